"""Forms of whole conversations and of whole benchmarks: a header and lines below it, or documents of many requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kvpagoda.errors import BadLine, shown, unknown_name
from kvpagoda.replay.readers.records import Ids, Numbers, Request, count, field, listed, seconds

TEXT_BLOCK = 64  # bytes of a text that become an id: about 16 tokens of English or code
AGENT_TIMES = ("agent", "conversation")
EPSILON = 1e-6  # seconds by which a time may be off
MOST_BLOCKS = 1 << 24  # in one prompt; a line that names more is refused before they are made


class RunLength:
    """Weka's traces of agents, their ids as runs. A line {"format": "weka-rle-v1", "block_size": ..}, lines {"conv": ..}
    that begin a conversation, and requests {"t": s, "in": .., "out": .., "r": [first, count, ..]}. An id has a meaning
    only inside its conversation; the reader makes the ids of all conversations different. "sp" says why the answer ended:
    "end_turn", or "tool_use"."""

    def __init__(self) -> None:
        self._block_size = self._first = self._fresh = self._session = 0
        # first, fresh: the first id of this conversation, and of the next one

    def __call__(self, record: Mapping[str, Any]) -> list[Request]:
        if "conv" in record or "format" in record:
            if "format" in record:
                self._block_size = count(record, "block_size", least=1)
            self.missed()
            return []
        size, runs, tokens = self._block_size, field(record, "r"), count(record, "in")
        if not size:
            raise BadLine("no line with 'format' and 'block_size' came before it", field="block_size")
        if not isinstance(runs, list) or len(runs) % 2 or not set(map(type, runs)) <= {int}:
            raise BadLine("'r' must be a list of whole numbers in pairs: first id, count", field="r")
        if any(not 0 <= value < 2**31 for value in runs):
            raise BadLine("'r' holds a number below 0 or above 2^31 - 1", field="r")
        _few_blocks(sum(runs[1::2]), "r")
        if sum(runs[1::2]) * size >= tokens + size:
            raise BadLine(f"'r' names {sum(runs[1::2])} blocks of {size} tokens, 'in' is {tokens}", field="r")
        arrival, outputs = seconds(record, "t"), count(record, "out")
        spans = [np.arange(begin, begin + num) for begin, num in zip(runs[::2], runs[1::2])]
        ids = np.concatenate([np.empty(0, np.int64), *spans]) + self._first
        self._fresh = max(self._fresh, int(ids.max(initial=-1)) + 1)
        is_tool = record.get("sp", "end_turn") != "end_turn"
        return [Request(arrival, tokens, outputs, ids, size, self._session, is_tool)]

    def missed(self) -> None:
        """Begin a conversation: also where a line could not be read, which may have begun one."""
        self._first, self._session = self._fresh, self._session + 1


class AgentTimes:
    """From when the times of the requests of agents count: from the entry of the "agent" in its conversation, as the recorder
    writes them, or from the beginning of the "conversation", as data sets are published. ``base``: the one that is known to
    hold in the whole trace. Raises BadInput for another.

    An agent says which by its earliest request: one before the agent's own entry counts from there. A conversation takes
    what most of its agents say, and ``most`` is what most agents of the trace said so far, None before one did."""

    def __init__(self, base: str | None = None) -> None:
        if base not in (None, *AGENT_TIMES):
            raise unknown_name("base of the times of agents", str(base), AGENT_TIMES)
        self.base, self._said, self._taken = base, Counter[str](), set[str]()

    def of(self, agents: Iterable[tuple[float, float]]) -> str:
        """Return which one a conversation takes. ``agents``: (time of the entry, time of the earliest request) of each."""
        said = Counter(
            "agent" if earliest < entry - EPSILON else "conversation" for entry, earliest in agents if entry > EPSILON
        )
        self._said += said
        taken = self.base or _most(said) or self.most or "agent"
        self._taken |= {taken} if said else set()
        return taken

    @property
    def most(self) -> str | None:
        """What most agents said; ``base`` if it is known, and any did."""
        most = _most(self._said)
        return most and (self.base or most)

    @property
    def is_mixed(self) -> bool:
        """Whether a conversation took another one than ``most``."""
        return not self._taken <= {self.most}


def _most(said: Counter[str]) -> str | None:
    return max(AGENT_TIMES, key=lambda base: said[base]) if said else None


class Conversations:
    """Weka's traces as they are published (kv-cache-tester), a file for each conversation: {"id": .., "block_size": ..,
    "hash_id_scope": "local", "requests": [{"t": s, "in": .., "out": .., "hash_ids": [..], "stop": ..}, ..]}. A request of
    type "subagent" holds ``requests`` of its own; ``times`` tells from when theirs count. Ids are local to the conversation,
    or global: the same in every conversation of the trace that says so, and in no other."""

    def __init__(self, times: AgentTimes | None = None) -> None:
        self._times = times or AgentTimes()
        self._fresh = self._session = 0
        self._first_scope = ""  # its ids stay as they are, or are shifted up; those of the other one become negative

    def __call__(self, record: Mapping[str, Any]) -> list[Request]:
        size, scope = count(record, "block_size", least=1), record.get("hash_id_scope", "local")
        if scope not in ("local", "global"):
            raise BadLine(f"'hash_id_scope' must be 'local' or 'global', got {shown(scope)}", field="hash_id_scope")
        first, numbers = self._fresh if scope == "local" else 0, Numbers()
        made, agents, end = list[tuple[float, float, Request]](), dict[str, tuple[float, float]](), first
        for where, entries, request in _flat(record, "", (), 4):
            try:
                ids = numbers.of(field(request, "hash_ids"))
                if ids.min(initial=0) < 0 or ids.max(initial=0) >= 2**62 - first:
                    raise BadLine("'hash_ids' must be from 0 to 2^62", field="hash_ids")
                tokens, outputs, time = count(request, "in"), count(request, "out"), seconds(request, "t")
            except BadLine as error:
                raise BadLine(f"{where}: {error}", field=f"{where}.{error.field}", needed=error.needed) from None
            ids += first
            end = max(end, int(ids.max(initial=-1)) + 1)
            if scope != (self._first_scope or scope):
                ids = -1 - ids
            if entries:
                agent = where.rpartition("requests")[0]
                agents[agent] = entries[-1], min(time, agents.get(agent, (0.0, time))[1])
            calls_tool = request.get("stop", "") not in ("", "end_turn")
            made.append((time, sum(entries), Request(time, tokens, outputs, ids, size, self._session, calls_tool)))
        if scope == "local":
            self._fresh = end
        self._first_scope = self._first_scope or scope
        self._session += 1
        if self._times.of(agents.values()) == "conversation":
            return [request for _, _, request in made]
        return [replace(request, arrival=since + time) for time, since, request in made]


def _flat(
    record: Mapping[str, Any], where: str, entries: tuple[float, ...], depth: int
) -> Iterator[tuple[str, tuple[float, ...], Mapping[str, Any]]]:
    """Yield (its place in the record, the times of the entries of the agents that it is in, the request) for all requests of a
    conversation, those of its agents too, ``depth`` levels deep. Raises BadLine."""
    for number, request in enumerate(listed(record, "requests", Mapping)):
        place = f"{where}requests[{number}]"
        if "requests" not in request:
            yield place, entries, request
        elif depth:
            yield from _flat(request, f"{place}.", (*entries, seconds(request, "t")), depth - 1)
        else:
            raise BadLine(f"{place} holds agents of agents of agents", field=place)


class CommonPrefix:
    """Prompts by what they share (LMCache's agent trace): a line {"format": "lcp-v1"}, and requests {"t": s, "n": bytes,
    "o": .., "p": earlier prompt or -1, "l": bytes in common with it}. Whole blocks of 64 bytes become ids: those that it
    shares with prompt ``p``, and new ones after them."""

    def __init__(self) -> None:
        self._prompts: list[tuple[int, Ids]] = []
        self._fresh = 0

    def __call__(self, record: Mapping[str, Any]) -> list[Request]:
        if "format" in record:
            self._prompts.clear()  # another file; its prompts are counted from 0
            return []
        number = len(self._prompts)
        self.missed()
        length, common, parent = count(record, "n"), count(record, "l"), count(record, "p", least=-1)
        earlier, ids = self._prompts[parent] if 0 <= parent < number else (0, np.empty(0, np.int64))
        if parent >= number or common > min(length, earlier):
            raise BadLine(
                f"prompt {number} of {length} bytes cannot share {common} bytes with prompt {parent}"
                + (f" of {earlier}" if parent < number else ", which comes later"), field="l",
            )  # fmt: skip
        _few_blocks(length // TEXT_BLOCK, "n")
        arrival, outputs = seconds(record, "t"), count(record, "o")
        shared = ids[: common // TEXT_BLOCK]
        num_own = length // TEXT_BLOCK - len(shared)
        ids = np.concatenate([shared, np.arange(self._fresh, self._fresh + num_own)])
        self._prompts[number] = (length, ids)
        self._fresh += num_own
        return [Request(arrival, length, outputs, ids, TEXT_BLOCK)]

    def missed(self) -> None:
        """Count a prompt that could not be read: it keeps its number, and nothing is shared with it."""
        self._prompts.append((0, np.empty(0, np.int64)))


def _few_blocks(num_blocks: int, name: str) -> None:
    if num_blocks > MOST_BLOCKS:
        text = f"{name!r} names {num_blocks:,} blocks, more than {MOST_BLOCKS:,} in one prompt"
        raise BadLine(text, field=name, needed=num_blocks, available=MOST_BLOCKS)


class Prompts:
    """Data sets of vLLM's bench with texts: lines {"prompt": text, "output_tokens": ..} (custom), or a list of
    {"conversations": [{"from": .., "value": text}, ..]} (ShareGPT), of which the first message is the prompt and the
    second the answer. Lengths are bytes of UTF-8; whole blocks of 64 bytes become ids. All requests arrive at once."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    def __call__(self, record: Mapping[str, Any]) -> list[Request]:
        if "conversations" in record:
            turns = listed(record, "conversations", Mapping)
            if len(turns) < 2:
                return []  # as vLLM does
            prompt, answer = (_text(turn, "value") for turn in turns[:2])
            outputs = len(answer)
        else:
            prompt = _text(record, "prompt")
            outputs = count(record, "output_tokens") if record.get("output_tokens") is not None else 0
        blocks = [prompt[i : i + TEXT_BLOCK] for i in range(0, len(prompt) - TEXT_BLOCK + 1, TEXT_BLOCK)]
        number = self._numbers.setdefault
        ids = np.array([number(block, len(self._numbers)) for block in blocks], np.int64)
        return [Request(0.0, len(prompt), outputs, ids, TEXT_BLOCK)]


def _text(record: Mapping[str, Any], name: str) -> bytes:
    value = field(record, name)
    if not isinstance(value, str):
        raise BadLine(f"{name!r} must be a text, got {type(value).__name__}", field=name)
    return value.encode("utf-8", "replace")


class BenchResult:
    """A result of ``vllm bench serve --save-result --save-detailed``: {"input_lens": [..], "output_lens": [..],
    "start_times": [s, ..], ..}; with --append-result one on each line, of which each begins where the last request of the
    one before it arrived. It has no ids: the trace has arrivals and lengths only."""

    def __init__(self) -> None:
        self._begin = 0.0

    def __call__(self, record: Mapping[str, Any]) -> list[Request]:
        if "input_lens" not in record:
            raise BadLine("no field 'input_lens': save the result with --save-detailed", field="input_lens")
        inputs = _column(record, "input_lens", len(listed(record, "input_lens")))
        outputs = _column(record, "output_lens", len(inputs)) if "output_lens" in record else [0] * len(inputs)
        times = listed(record, "start_times") if "start_times" in record else [0.0] * len(inputs)
        if len(times) != len(inputs):
            raise BadLine(f"'start_times' has {len(times)} numbers, 'input_lens' {len(inputs)}", field="start_times")
        starts = [seconds({"start_times": time}, "start_times") for time in times]
        begin, first = self._begin, min(starts, default=0.0)
        arrivals = [begin + start - first for start in starts]
        self._begin = max(arrivals, default=begin)
        none = np.empty(0, np.int64)
        return [Request(*request, none) for request in zip(arrivals, inputs, outputs)]


def _column(record: Mapping[str, Any], name: str, length: int) -> list[int]:
    values = listed(record, name)
    if len(values) != length:
        raise BadLine(f"{name!r} has {len(values)} numbers, 'input_lens' {length}", field=name)
    return [count({name: value}, name) for value in values]
