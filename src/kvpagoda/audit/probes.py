"""What is tried: each probe makes a case of new prompts. A request with a ``kind`` is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvpagoda.audit.prompts import Ask, Case, Draw, PromptPart, PromptStep, Symbols, one
from kvpagoda.audit.server import ServerProfile

KINDS = {
    "repeat": "the same prompt, asked again,",
    "extend": "a prompt that goes on where an earlier one ended",
    "cut": "the beginning of an earlier prompt",
    "front": "a beginning of an earlier prompt, of less than half of it,",
    "branch": "a prompt that leaves an earlier one in its middle",
    "turn": "a prompt that goes on after the answer to an earlier one",
    "other beginning": "a prompt with another beginning than an earlier one, and the same rest,",
    "splice": "the beginning of an earlier prompt, and the rest of another one,",
    "edit": "an earlier prompt with one token changed, or two of them swapped,",
    "long branch": "the beginning of an earlier prompt, with a long new rest,",
    "in turn": "two prompts, asked in turn,",
    "chat turn": "the next turn of a chat",
    "tool turn": "a turn with a tool's result",
    "other role": "a chat whose text was asked with another role",
    "other salt": "the same prompt under another cache_salt",
    "other adapter": "the same prompt for another adapter",
    "other picture": "the same text with another picture",
    "repeat after churn": "after other prompts had filled the cache, the same prompt",
    "extend after churn": "after other prompts had filled the cache, a prompt that goes on where an earlier one ended",
    "at once": "a prompt that was asked at the same moment as another one",
    "after at once": "a prompt that was asked at the same moment as another one, asked again,",
    "beside abort": "a prompt that was asked at the same moment as one that was aborted",
    "after abort": "a prompt whose request was aborted before, asked again,",
    "under load": "a prompt that was asked at the same moment as several others",
    "after load": "a prompt that was asked under load before, asked again,",
    "repeat after wait": "after the wait, the same prompt",
    "extend after wait": "after the wait, a prompt that goes on where an earlier one ended",
}
"""Kind of a judged request -> what it is, in words; the simplest first."""
PLAIN = ("repeat", "extend", "cut", "front", "branch", "turn", "in turn")
"""Kinds of plain hits. A fault in these shows in most others too."""
CROWDS = {"at once", "beside abort", "under load"}
"""Kinds whose answers are computed beside others."""


@dataclass
class ProbeTexts:
    """Makes prompts for probes.

    Args:
        draw: where symbols come from.
        profile: the server's.
        beyond: for how many tokens requests go on after they have filled the memory.
    """

    draw: Draw
    profile: ServerProfile
    beyond: int = 4

    @property
    def unit(self) -> int:
        """Symbols of a unit of hits; 16 where hits have no unit, so that any number of symbols is found."""
        each = self.profile.per_symbol
        return self.profile.unit // each if self.profile.unit > each else 16

    def in_chat(self, n: int) -> int:
        """Return how many symbols have in a chat as many tokens as ``n`` in most requests."""
        return max(2, n * self.profile.per_symbol // self.profile.per.get("chat", 1))

    def new(self, n: int) -> Symbols:
        """Return a new prompt of ``n`` symbols."""
        return self.draw.text(n, head=True)

    def ask(self, symbols: Symbols, kind: str = "", **options: object) -> Ask:
        """Return a request with the prompt ``symbols``."""
        options.setdefault("chat", self.profile.is_chat)
        return Ask((PromptPart(symbols),), kind, **options)  # type: ignore[arg-type]

    def lengths(self) -> list[int]:
        """Return the lengths that are tried, in symbols: around the unit of hits, several units, and around windows."""
        u, most = self.unit, max(8, self.profile.longest // self.profile.per_symbol)
        near = [3 * u + 1, u + 1, 5 * u + u // 2, 2 * u, 3 * u - 1, 8 * u + 3, u, 4 * u, 2 * u + 1, 6 * u + 1]
        near += [128 + 1, 512 + u // 2, 1024 + 1, max(2, u - 1)]
        if 4 * u + 8 > most:  # prompts have one unit at most
            near = [u + 1, u + u // 3, u, u + u // 5, max(2, u - 1)]
        return [n for n in dict.fromkeys(near) if n + 2 * u + 8 <= most] or [max(2, most // 2)]

    def noise_lengths(self) -> list[int]:
        """Return the lengths of cold runs that are compared, in symbols: these, and among the first ones the longest that is
        asked, and nearly so: kernels compute a long text in other pieces than short ones."""
        most, (first, *rest) = max(8, self.profile.longest // self.profile.per_symbol), self.lengths()
        return [first, most, *rest[:2], most * 4 // 5, *rest[2:]]


Probe = Callable[[ProbeTexts, int], Case]


def hits(texts: ProbeTexts, n: int) -> Case:
    """A prompt again, longer, shorter, with another end and with another beginning."""
    draw, u = texts.draw, texts.unit
    p = texts.new(n)
    longer = p + draw.text(draw.number(1, u + 1))
    cut, front = p[: max(1, n - draw.number(1, u + 1))], p[: draw.number(u + 1, max(u + 1, n // 2))]
    middle = max(1, min(n - 1, draw.number(1, max(1, n // u)) * u + draw.number(-1, 1)))
    branch = p[:middle] + draw.text(draw.number(2, u + 2))
    start = max(1, min(u, n // 2))
    other = texts.new(start) + p[start:]
    asks = [
        texts.ask(p), texts.ask(p, "repeat"), texts.ask(longer, "extend"), texts.ask(cut, "cut"),
        texts.ask(branch, "branch"), texts.ask(other, "other beginning"), texts.ask(front, "front"), texts.ask(p, "repeat"),
        texts.ask(longer, "extend"), texts.ask(branch, "branch"),
    ]  # fmt: skip
    return Case("hits", one(*asks))


def spliced(texts: ProbeTexts, n: int) -> Case:
    """The beginning of a prompt and the rest of another, both cached: with the same first unit, and with nothing in common."""
    draw, u = texts.draw, texts.unit
    n = max(n, 3 * u + 1)
    p, r = texts.new(n), texts.new(n)
    same = p[:u] + draw.text(u + 2)
    asks = [
        texts.ask(p), texts.ask(same), texts.ask(same[: 2 * u] + p[2 * u :], "splice"), texts.ask(r),
        texts.ask(r[:u] + p[u:], "splice"),
    ]  # fmt: skip
    return Case("splice", one(*asks))


def edits(texts: ProbeTexts, n: int) -> Case:
    """A prompt with one token changed, with two of them swapped, and with a new rest that takes several chunks."""
    draw, u = texts.draw, texts.unit
    p = texts.new(n)
    at = draw.number(max(1, n - 2 * u) // 2, max(1, n - u - 2))  # a whole unit is behind it, that must not be found
    other = next(symbol for symbol in draw.text(99) if symbol != p[at])
    two = next((i for i in range(at, 0, -1) if p[i] != p[i - 1]), 1)
    most = max(n, texts.profile.longest // texts.profile.per_symbol)
    asks = [
        texts.ask(p), texts.ask((*p[:at], other, *p[at + 1 :]), "edit"),
        texts.ask((*p[: two - 1], p[two], p[two - 1], *p[two + 1 :]), "edit"),
        texts.ask(p[: min(n, 3 * u)] + draw.text(most - min(n, 3 * u)), "long branch"),
    ]  # fmt: skip
    return Case("edits", one(*asks))


def turns(texts: ProbeTexts, n: int) -> Case:
    """A prompt that goes on after an answer of more than a unit, and once more."""
    draw, u = texts.draw, texts.unit
    p, q, r = texts.new(n), draw.text(3), draw.text(draw.number(2, u + 2))
    first = PromptPart(p)
    if texts.profile.is_chat:
        return chat(texts, n)
    asks = [
        Ask((first,), most=min(u + 4, 40)), Ask((first, PromptPart(answer=0), PromptPart(q)), "turn"),
        Ask((first, PromptPart(answer=0), PromptPart(q), PromptPart(answer=1), PromptPart(r)), "turn"),
        Ask((first, PromptPart(answer=0), PromptPart(q)), "turn"),
    ]  # fmt: skip
    return Case("turns", one(*asks))


def in_turn(texts: ProbeTexts, n: int) -> Case:
    """Two prompts in turn, again and again: the cheapest hits, for faults that are rare."""
    p, q = texts.new(n), texts.new(n + texts.draw.number(1, texts.unit))
    asks = [texts.ask(p), texts.ask(q)]
    for _ in range(4):
        asks += [texts.ask(p, "in turn"), texts.ask(q, "in turn")]
    return Case("in turn", one(*asks))


def chat(texts: ProbeTexts, n: int) -> Case:
    """A chat of three turns, one with a tool's result."""
    draw, u = texts.draw, texts.in_chat(texts.unit)
    system, p, q, r = texts.new(u + 3), draw.text(texts.in_chat(n)), draw.text(9), draw.text(u + 2)
    opening = (PromptPart(system, "system"), PromptPart(p))
    second = (*opening, PromptPart(answer=0, role="assistant"), PromptPart(q))
    third = (*second, PromptPart(answer=1, role="assistant"), PromptPart(r))
    asks = [
        Ask(opening, chat=True), Ask(second, "chat turn", chat=True), Ask(third, "chat turn", chat=True),
        Ask(second, "chat turn", chat=True),
    ]  # fmt: skip
    return Case("chat", one(*asks))


def roles(texts: ProbeTexts, n: int) -> Case:
    """A chat, and one with the same text that somebody else says."""
    p, q = texts.new(texts.in_chat(texts.unit) + 3), texts.draw.text(texts.in_chat(n))
    system, user = ((PromptPart(p, role), PromptPart(q)) for role in ("system", "user"))
    asks = [Ask(system, chat=True), Ask(user, "other role", chat=True), Ask(system, "other role", chat=True)]
    return Case("roles", one(*asks))


def tools(texts: ProbeTexts, n: int) -> Case:
    """A chat in which a tool's result follows."""
    draw = texts.draw
    p, result, more = texts.new(texts.in_chat(texts.unit) + 3), draw.text(texts.in_chat(texts.unit) + 5), draw.text(7)
    first = (PromptPart(p), PromptPart(draw.text(3), "tool"))
    second = (PromptPart(p), PromptPart(result, "tool"))
    asks = [
        Ask(first, chat=True), Ask(second, "tool turn", chat=True),
        Ask((*second, PromptPart(answer=1, role="assistant"), PromptPart(more)), "tool turn", chat=True),
    ]  # fmt: skip
    return Case("tools", one(*asks))


def at_once(texts: ProbeTexts, n: int) -> Case:
    """Two prompts at the same moment: of one beginning, of none in common, one new text twice beside another; then again."""
    draw, u = texts.draw, texts.unit
    p, q, new, other = texts.new(n), texts.new(n + draw.number(1, u)), texts.new(n), texts.new(n)
    left, right = p + draw.text(draw.number(1, u + 2)), p + draw.text(draw.number(1, u + 2))
    steps = [
        *one(texts.ask(p), texts.ask(q)),
        PromptStep("together", (texts.ask(p, "at once", most=12), texts.ask(q, "at once", most=12))),
        PromptStep("together", (texts.ask(left, "at once"), texts.ask(right, "at once"), texts.ask(other, most=2))),
        PromptStep("together", (texts.ask(q, most=40), texts.ask(new, "at once"), texts.ask(new, "at once"))),
        *one(texts.ask(p, "after at once"), texts.ask(new, "after at once"), texts.ask(left, "after at once")),
    ]
    return Case("at once", tuple(steps))


def aborted(texts: ProbeTexts, n: int) -> Case:
    """A request that is aborted at its first token, one while its prompt is computed, and one beside another that has the same
    beginning; then the same, and longer ones."""
    draw, u = texts.draw, texts.unit
    p, q = texts.new(n), texts.new(n)
    other, new = (texts.new(texts.profile.longest // texts.profile.per_symbol) for _ in range(2))
    longer, left, right = (p + draw.text(draw.number(1, u + 1)) for _ in range(3))
    most = max(2, min(3 * u, 48))
    steps = [
        PromptStep("abort", (texts.ask(p, most=most),)),
        *one(texts.ask(q, most=2), texts.ask(p, "after abort"), texts.ask(longer, "after abort"), texts.ask(other, most=1)),
        PromptStep("abort", (texts.ask(new, most=most),), after=draw.number(2, 9) / 10),
        *one(texts.ask(new, "after abort")),
        PromptStep("abort", (texts.ask(left, most=most), texts.ask(right, "beside abort", most=12))),
        *one(texts.ask(left, "after abort"), texts.ask(p, "after abort")),
    ]  # fmt: skip
    return Case("abort", tuple(steps))


def churned(texts: ProbeTexts, n: int) -> Case:
    """Prompts again after others have filled a part of the cache, one after an eighth or a quarter of it, the next after twice
    as much, and so on: what was evicted from the device is in a tier for a while, then in none. Each is asked twice before, as
    some tiers take what was found once."""
    draw, u, share = texts.draw, texts.unit, texts.draw.number(1, 2) / 8
    n = max(n, min(4 * u, texts.profile.longest // texts.profile.per_symbol // 2))
    prompts = [texts.new(n + draw.number(0, u)) for _ in range(3)]
    steps = [*one(*(texts.ask(p, kind) for p in prompts for kind in ("", "repeat")))]
    for number, p in enumerate(prompts):
        again, longer = texts.ask(p, "repeat after churn"), p + draw.text(draw.number(1, u + 1))
        steps += [
            PromptStep("churn", churn=share * 2.0 ** max(0, number - 1)),
            *one(again, texts.ask(longer, "extend after churn"), again),
        ]
    return Case("churn", tuple(steps))


def waited(texts: ProbeTexts, n: int) -> Case:
    """Six prompts again, after the user has done something."""
    draw, u = texts.draw, texts.unit
    prompts = [texts.new(n + draw.number(0, u)) for _ in range(6)]
    longer = [p + draw.text(draw.number(1, u + 1)) for p in prompts]
    after = [texts.ask(p, "repeat after wait") for p in prompts]
    more = [texts.ask(p, "extend after wait") for p in longer]
    return Case("wait", (*one(*map(texts.ask, prompts)), PromptStep("wait"), *one(*after, *more, *after)))


def loaded(texts: ProbeTexts, n: int) -> Case:
    """So many long prompts at once that the server has to preempt some; then each again. They go on until the memory is just
    full, so that little of a preempted one is evicted before it begins again."""
    profile, draw = texts.profile, texts.draw
    most = min(96, profile.longest // 3)  # they fit when they begin, and not when they have grown
    size = (profile.longest + 48 - most) * draw.number(7, 10) // 10
    if profile.num_blocks_tokens:
        size = min(size, profile.num_blocks_tokens * 9 // 40)
    size = max(8, size // profile.per_symbol)
    prompts = [texts.new(size - draw.number(0, texts.unit)) for _ in range(4)]
    most = min(most, _until_full([len(p) * profile.per_symbol for p in prompts], most, profile) + texts.beyond)
    crowd = PromptStep("together", tuple(texts.ask(p, "under load", most=most) for p in prompts))
    after = [texts.ask(p, "after load") for p in prompts]
    if not profile.is_chat:  # what was written while it ran, too
        y = PromptPart(texts.draw.text(3))
        after += [Ask((PromptPart(p), PromptPart(answer=i), y), "after load") for i, p in enumerate(prompts[-2:], 2)]
    return Case("load", (crowd, *one(*after)))


def _until_full(lengths: list[int], most: int, profile: ServerProfile) -> int:
    """Return after how many tokens prompts of ``lengths`` have filled the memory; at most ``most``."""
    unit, room = max(1, profile.unit), profile.num_blocks_tokens
    needed = (sum(-(-(length + n) // unit) for length in lengths) * unit for n in range(1, most))
    return next((n for n, tokens in enumerate(needed, 1) if tokens > room), most) if room else most


def salts(texts: ProbeTexts, n: int) -> Case:
    """A prompt under one salt, then under another one."""
    p = texts.new(n)
    asks = [
        texts.ask(p, salt="a"), texts.ask(p, "other salt", salt="b"), texts.ask(p, "other salt", salt="a"),
        texts.ask(p, "other salt"),
    ]  # fmt: skip
    return Case("salts", one(*asks)).fresh(texts.draw)


def adapters(texts: ProbeTexts, n: int) -> Case:
    """A prompt for the model, then for an adapter of it, and the other way round."""
    p, q, name = texts.new(n), texts.new(n), texts.draw.number(0, len(texts.profile.adapters) - 1)
    adapter = texts.profile.adapters[name]
    asks = [
        texts.ask(p), texts.ask(p, "other adapter", model=adapter), texts.ask(p, "repeat"),
        texts.ask(q, model=adapter), texts.ask(q, "other adapter"), texts.ask(q, "other adapter", model=adapter),
    ]  # fmt: skip
    return Case("adapters", one(*asks))


def pictures(texts: ProbeTexts, n: int) -> Case:
    """A text with a picture, then with another one, and the first again."""
    draw = texts.draw
    p, tail = draw.text(texts.in_chat(n)), draw.text(texts.in_chat(texts.unit) + 1)
    draw.shift += 10

    def shown(symbols: Symbols, image: int, kind: str = "") -> Ask:
        return Ask((PromptPart(symbols, image=draw.shift + image),), kind, chat=True)

    asks = [
        shown(p, 1), shown(p, 2, "other picture"), shown(p, 1, "repeat"), shown(p + tail, 3, "other picture"),
        shown(p + tail, 1, "other picture"),
    ]  # fmt: skip
    return Case("pictures", one(*asks))


def two_pictures(texts: ProbeTexts, n: int) -> Case:
    """Two pictures with a text behind each, and the same pictures the other way round."""
    draw = texts.draw
    p, q = (draw.text(texts.in_chat(length)) for length in (texts.unit, n))
    draw.shift += 10
    asks = [
        Ask((PromptPart(p, image=draw.shift + left), PromptPart(q, image=draw.shift + right)), kind, chat=True)
        for left, right, kind in ((1, 2, ""), (2, 1, "other picture"), (1, 2, "repeat"))
    ]
    return Case("two pictures", one(*asks))


def probes(profile: ServerProfile, after: str | None, has_salts: bool) -> Iterator[tuple[str, Probe | None, str]]:
    """Yield (name, probe, why it is not made): the probe is None where the server lacks something.

    Args:
        profile: the server's.
        after: what the user does in the middle; None: nothing.
        has_salts: whether it takes salts.
    """
    both = profile.chats is not None and profile.completions is not None
    yield "hits", hits, ""
    yield "turns", turns, ""
    yield "churn", churned if profile.churn else None, "the cache could not be filled"
    yield "splice", spliced, ""
    yield "edits", edits, ""
    yield "at once", at_once, ""
    yield "abort", aborted, ""
    yield "in turn", in_turn, ""
    yield "salts", salts if has_salts else None, "no cache_salt"
    yield "adapters", adapters if profile.adapters else None, "no adapters in /v1/models"
    yield "pictures", pictures if profile.has_images else None, "no pictures in chats"
    yield "two pictures", two_pictures if profile.has_images else None, "no pictures in chats"
    yield "chat", chat if both else None, "no chats beside completions"
    yield "roles", roles if profile.chats is not None else None, "no chats"
    yield "tools", tools if profile.chats is not None else None, "no chats"
    yield "load", loaded if profile.preemptions else None, "the server does not show preemptions in /metrics"
    yield "wait", waited if after else None, "--after was not given"
