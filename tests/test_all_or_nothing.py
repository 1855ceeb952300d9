"""All or nothing, for any exception at any point: every public operation is cut short at its n-th call.

An operation is a generator: it prepares a scene, yields the one call that is cut short, is told whether it was, finds out
through public names what became of it, and goes on. After that every request of the scene computes more tokens, and each
row that it reads is compared with its own text; what was left behind is found again; all slots and blocks can be used.

    undone   the call raised, nothing had changed, and it could be made again
    done     the call raised, or took the failure for a miss, and all that it says was done
    reset    a signal fell into lines that cannot be undone: the cache said so, and ``reset`` brought it back whole
    damage   anything else

``python -m pytest -s -m "slow or not slow" tests/test_all_or_nothing.py`` prints how many points led to what; with
``KVPAGODA_SWEEP=FILE`` they are written there as JSON. One case: ``-k "gemma and eviction"``; one point of it: ``cut``.
"""

from __future__ import annotations

import json
import os
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from functools import cache, partial
from types import FrameType
from typing import Any, NamedTuple

import pytest
from tests.interruption import Interruption, Point, any_call, at_most, failing_call, failing_functions
from tests.row_oracle import RowOracle, Text

from kvpagoda import KVCache, Schema, Sequence, errors
from kvpagoda.errors import OutOfBlocks, RetryLater, StaleHandle
from kvpagoda.schema import Attention, Growth, Latent, Layer, LayerKind, Recurrent, Rows, Shared
from kvpagoda.tiers import Driver, RecordBuffer, TierSpec, host_driver

# -- the layer kinds -----------------------------------------------------------------------------------------------------


def schema_of(*layers: LayerKind | tuple[LayerKind, ...]) -> Schema:
    kinds = [layer if isinstance(layer, tuple) else (layer,) for layer in layers]
    return Schema(tuple(Layer(i, type(k[0]).__name__, k) for i, k in enumerate(kinds)), "swept", vocab_size=1000)


SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
MODEL: dict[str, Any] = dict(
    vocab_size=1000, hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=4096,
)  # fmt: skip
DEEPSEEK_V4 = dict(
    MODEL, model_type="deepseek_v4", hidden_size=64, num_hidden_layers=3, head_dim=32, partial_rotary_factor=0.25,
    q_lora_rank=24, layer_types=[SLIDING, "compressed_sparse_attention", "heavily_compressed_attention"],
    compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}, sliding_window=8,
    index_n_heads=32, index_head_dim=16, index_topk=4, o_groups=2, o_lora_rank=16, hc_mult=2, hc_sinkhorn_iters=4,
    n_routed_experts=4, n_shared_experts=1, num_hash_layers=2, num_experts_per_tok=2, moe_intermediate_size=32,
)  # fmt: skip
GEMMA = dict(
    MODEL, model_type="gemma3_text", num_hidden_layers=3, sliding_window=8, layer_types=[SLIDING, SLIDING, FULL]
)
QWEN3_NEXT = dict(
    MODEL, model_type="qwen3_next", num_hidden_layers=2, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=4, linear_value_head_dim=4, linear_conv_kernel_dim=4, layer_types=[LINEAR, FULL], num_experts=4,
    shared_expert_intermediate_size=32, num_experts_per_tok=2, moe_intermediate_size=32,
)  # fmt: skip
MAMBA = dict(
    model_type="mamba", vocab_size=1000, hidden_size=16, num_hidden_layers=2, state_size=4, conv_kernel=4, expand=2,
    time_step_rank=4,
)  # fmt: skip
HEAD, WINDOW = Attention(1, 4, 4, "float32"), Attention(1, 4, 4, "float32", Growth(window=10))
STATE = Recurrent((Rows("conv", (6, 3), "float32"), Rows("recurrent", (2, 4, 4), "float32")))
WIDTH = 4
"""Tokens that windows and rings can take back."""


class Kind(NamedTuple):
    """A model, the memory it gets, and what cannot be asked of it."""

    schema: Callable[[], Schema]
    size: dict[str, Any]
    block_size: int = 4
    rewinds: bool = True
    partial: bool = False
    """Whether the part of a block that a request shares with another is copied."""
    shares: bool = True
    """Whether it has a group that keeps all tokens, whose blocks requests share."""
    evicts: bool = True
    """Whether memory can be so full that a request must evict what others left."""


def of_config(config: dict[str, Any], **settings: Any) -> Schema:
    return Schema.from_hf_config(config, dtype="float32", **settings)


KINDS = {
    "full": Kind(lambda: schema_of(HEAD), {"num_blocks": 24}, partial=True),
    "sliding": Kind(
        lambda: schema_of(WINDOW, WINDOW).rewindable(WIDTH), {"num_blocks": 20}, shares=False, evicts=False
    ),
    "gemma": Kind(lambda: of_config(GEMMA, verify_width=WIDTH), {"budget": "16KiB"}),
    "mla": Kind(lambda: schema_of(*[Latent(8, 4, "float32", index_dim=4)] * 2), {"num_blocks": 24}, partial=True),
    "qwen3_next": Kind(lambda: of_config(QWEN3_NEXT), {"budget": "24KiB"}, rewinds=False),
    "deepseek_v4": Kind(lambda: of_config(DEEPSEEK_V4, verify_width=WIDTH), {"budget": "420KiB"}, block_size=8),
    "mamba": Kind(lambda: of_config(MAMBA), {"budget": "16KiB"}, rewinds=False, shares=False, evicts=False),
    "mixed": Kind(
        lambda: schema_of(
            HEAD, WINDOW, (HEAD, STATE), Attention(1, 4, 4, "float32", Growth(chunk=12)), Shared(0)
        ).rewindable(WIDTH),
        {"budget": "16KiB"},
        rewinds=False,
    ),
}
QUICK_KINDS = ("full", "gemma", "qwen3_next")
QUICK_POINTS = {"signal": 3, "memory": 2, "driver": 2}
"""About so many points of each case in the default run, evenly spread."""
SLOTS = 4
SECONDS = 20.0
"""The most that one point may take."""


def make_cache(kind: str, tiers: tuple[TierSpec, ...] = ()) -> KVCache:
    """The only place where a cache is made."""
    size = KINDS[kind].block_size
    below = {"tiers": tiers, "weights": "w"} if tiers else {}
    return KVCache(
        schemas(kind), device="cpu", max_requests=SLOTS, block_size=size, step_tokens=2 * size, poison=True,
        checkpoints=4, checkpoint_every=1, **KINDS[kind].size, **below,
    )  # fmt: skip


_SCHEMAS: dict[str, Schema] = {}


def schemas(kind: str) -> Schema:
    return _SCHEMAS.setdefault(kind, _SCHEMAS.get(kind) or KINDS[kind].schema())


# -- a scene: a cache, its requests, and what they wrote -----------------------------------------------------------------


class FailingDriver:
    """A driver whose ``n``-th call from ``arm`` on raises MemoryError; with n = 0 none does."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._left, self.count, self.where = driver, 0, 0, ""
        self._lock = threading.Lock()

    def arm(self, n: int) -> None:
        self._left, self.count, self.where = n, 0, ""

    def disarm(self) -> None:
        self._left = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._driver, name)
        if name not in ("store", "lookup", "load", "discard"):
            return found

        def call(*arguments: Any) -> Any:
            with self._lock:
                self.count, self._left = self.count + 1, self._left - 1
                hit = self._left == 0
                self.where = f"driver {name}" if hit else self.where
            if hit:
                raise MemoryError(f"driver call: {name}")
            return found(*arguments)

        return call


class Request:
    """A sequence and the text it should have."""

    def __init__(self, sequence: Sequence, text: Text) -> None:
        self.sequence, self.text = sequence, text


class Scene:
    """What one operation happens in."""

    def __init__(self, kind: str, has_tier: bool) -> None:
        self.kind, self.drivers = KINDS[kind], list[FailingDriver]()

        def make(buffer: RecordBuffer) -> Driver:
            self.drivers.append(FailingDriver(host_driver(buffer, "4MiB")))
            return self.drivers[-1]

        tier = TierSpec("host", make, write="commit", staging="1MiB", workers=1)
        self.cache = make_cache(kind, (tier,) if has_tier else ())
        self.size = self.kind.block_size
        self.oracle = RowOracle(self.cache)
        self.requests = list[Request]()
        self.texts = list[Text]()
        """What was computed, and may be found again."""
        self.stack = ExitStack()
        self.is_undisturbed = False
        """Whether nothing fails: then the operation must do what its name says."""

    def open(self, tokens: list[int], **settings: Any) -> Request:
        """Open a request that may grow by three blocks."""
        return self.take(self.opening(tokens, **settings)(), tokens)

    def opening(self, tokens: list[int], **settings: Any) -> Callable[[], Sequence]:
        """The call alone that opens a request."""
        settings = {"room": 0, "reserve": len(tokens) + 3 * self.size, **settings}
        return partial(self.cache.open, tokens, "one", **settings)

    def take(self, sequence: Sequence, tokens: list[int]) -> Request:
        """``sequence`` was opened for ``tokens``."""
        text = Text("one", list(tokens))
        assert 0 <= sequence.length == sequence.cached_tokens < len(tokens), "what is cached is a true beginning"
        self._starts_at(text, sequence.length)
        self.requests.append(Request(sequence, text))
        return self.requests[-1]

    @staticmethod
    def _starts_at(text: Text, length: int) -> None:
        text.state = text.fingerprints(length)[-1] if length else None

    def took_up(self, request: Request) -> None:
        """``request`` was resumed; what it lost is computed again."""
        length = request.sequence.length
        if length < len(request.text.tokens):
            self._starts_at(request.text, length)
            self.compute(request)

    def forked(self, child: Sequence, parent: Request) -> None:
        text, length = parent.text, parent.sequence.length
        self.requests.append(Request(child, Text(text.space, text.tokens[:length], text.state)))
        assert child.length == length

    def write(self, requests: list[Request], counts: list[int]) -> None:
        """Room, and the rows, for the next tokens of each; they are compared, but not committed."""
        before = [one.sequence.length for one in requests]
        for one, start, count in zip(requests, before, counts):
            tokens = one.text.tokens
            tokens += [(7 * len(tokens) + i) % 900 for i in range(start + count - len(tokens))]
            one.sequence.extend(count)
        batch = self.cache.batch([one.sequence for one in requests], counts)
        self.oracle.step(batch, [one.text for one in requests], before, counts)

    def commit_of(self, request: Request, count: int) -> Callable[[], None]:
        start = request.sequence.length
        return partial(request.sequence.commit, request.text.tokens[start : start + count])

    def step(self, requests: list[Request], counts: list[int]) -> None:
        """One step of several requests."""
        self.write(requests, counts)
        for one, count in zip(requests, counts):
            self.commit_of(one, count)()

    def compute(self, request: Request, length: int | None = None) -> Request:
        """Step up to ``length`` tokens (default: those it has), ending at every block, so that checkpoints can be kept."""
        end = len(request.text.tokens) if length is None else length
        while request.sequence.length < end:
            at = request.sequence.length
            self.step([request], [min(self.size - at % self.size, end - at)])
        return request

    def close(self, request: Request) -> None:
        self.remember(request)
        request.sequence.close()
        self.requests.remove(request)

    def remember(self, request: Request) -> None:
        """Its text may be found from now on."""
        if request.text.tokens not in [text.tokens for text in self.texts]:
            self.texts.append(Text(request.text.space, request.text.tokens[: request.sequence.length]))

    def leave(self, tokens: list[int]) -> None:
        """A request computes ``tokens`` and ends."""
        self.close(self.compute(self.open(tokens)))

    def words(self, number: int, blocks: float = 3) -> list[int]:
        """The text of that number: its first token is its own."""
        return [number, *((3 * number + i) % 900 for i in range(1, int(blocks * self.size)))]

    def fill(self) -> None:
        """Leave texts behind until memory is full: blocks were evicted, and none is free but what the last one gave back."""
        before = self.num_evicted()
        for number in range(500, 580):
            self.leave(self.words(number))
            if self.num_evicted() > before:
                return
        raise AssertionError("nothing was evicted")

    def num_evicted(self) -> int:
        """Blocks that were evicted; of models whose blocks are copied to checkpoints alone, checkpoints."""
        stats = self.cache.stats()
        return stats.evicted_blocks if self.kind.shares else stats.evicted_checkpoints

    def forget(self) -> None:
        """Nothing is cached on the device any more; tiers have it."""
        assert self.cache.flush()
        self.cache.reset()

    @property
    def running(self) -> int:
        return self.cache.stats().running

    # -- what must hold afterwards

    def prove(self) -> None:
        """Every request goes on with its own rows; all of it can be found again, and all places can be used."""
        cache, size = self.cache, self.size
        cache.check()
        assert self.running == len(self.requests), f"{self.running} run of {len(self.requests)}: a slot was lost"
        for request in self.requests:
            length = request.sequence.length
            assert request.sequence.tokens.tolist() == request.text.tokens[:length]
            left = len(request.text.tokens) - length
            self.step([request], [2 if not left else min(left, 2 * size)])
        if self.requests:
            self.step(self.requests, [size] * len(self.requests))
            cache.check()
        for request in [*self.requests]:
            self.close(request)
        cache.check()
        self.all_is_idle()
        for text in [*self.texts]:
            self.close(self.compute(self.open([*text.tokens, 998])))
        everyone = [self.open([901 + i], reserve=1) for i in range(SLOTS)]
        self.step(everyone, [1] * SLOTS)
        for request in everyone:
            self.close(request)
        if self.drivers:
            assert cache.flush()
        self.all_is_idle()
        cache.reset()
        cache.check()
        assert not cache.stats().running and cache.open(self.words(999)).cached_tokens == 0

    def all_is_idle(self) -> None:
        """No request runs: no slot, block or byte of the swap is held."""
        stats = self.cache.stats()
        assert stats.running == 0 == stats.suspended, f"{stats.running} run, {stats.suspended} are suspended"
        assert stats.swap_nbytes == 0, f"{stats.swap_nbytes} bytes of the swap are held"
        for group in stats.groups:
            assert idle_blocks(group) == group.total, f"{idle_blocks(group)} of {group.total} in {group.name} are idle"
            assert outstanding(group) == 0, f"{outstanding(group)} blocks of {group.name} are still promised"

    def prove_reset(self, closes_first: bool) -> None:
        """The cache says that it must be reset: so it does in every call, and ``reset`` and ``close`` bring it back."""
        needs_reset = needs_reset_error()
        assert issubclass(needs_reset, RuntimeError)
        calls = [lambda: self.cache.open([1]), self.cache.check]
        for request in self.requests:
            if request.sequence.is_open:
                calls += [partial(request.sequence.extend, 1), partial(self.cache.batch, [request.sequence], [1])]
        for call in calls:
            with pytest.raises(needs_reset):
                call()
        for request in self.requests if closes_first else ():
            if request.sequence.is_open:
                request.sequence.close()
        self.cache.reset()
        self.cache.check()
        for request in self.requests:
            with pytest.raises(StaleHandle):
                request.sequence.extend(1)
            with suppress(StaleHandle):
                request.sequence.close()
        self.requests.clear()
        self.cache.check()
        self.all_is_idle()
        for text in [*self.texts]:  # whatever is found was written for this text
            self.close(self.compute(self.open([*text.tokens, 997])))
        self.prove()

    def end(self) -> None:
        with suppress(BaseException):
            self.stack.close()
        with suppress(BaseException):
            self.cache.close(timeout=0.5)


def idle_blocks(group: Any) -> int:
    """Blocks that are free or could be evicted, by the name that statistics have for them."""
    return int(group.free + (group.evictable if hasattr(group, "evictable") else group.spare))


def outstanding(group: Any) -> int:
    """Blocks that are promised to running requests beyond what they hold."""
    return int(group.outstanding if hasattr(group, "outstanding") else group.promised)


def needs_reset_error() -> type[BaseException]:
    found: type[BaseException] = errors.NeedsReset  # type: ignore[attr-defined]
    return found


# -- the operations ------------------------------------------------------------------------------------------------------

Told = tuple[Any, bool]
"""What the call returned, and whether it raised."""
Operation = Callable[[Scene], Generator[Callable[[], Any], Told, str]]
OPERATIONS: dict[str, Operation] = {}
WITH_TIER: set[str] = set()
ONLY: dict[str, Callable[[Kind], bool]] = {}


def operation(name: str, *, tier: bool = False, only: Callable[[Kind], bool] = lambda kind: True) -> Any:
    def add(function: Operation) -> Operation:
        OPERATIONS[name], ONLY[name] = function, only
        if tier:
            WITH_TIER.add(name)
        return function

    return add


def opened(
    scene: Scene, tokens: list[int], least: int = 0, evicts: bool = False, **settings: Any
) -> Generator[Callable[[], Any], Told, str]:
    """Open ``tokens``, of which at least ``least`` are cached, while two others run; ``evicts``: memory is full."""
    others = [scene.compute(scene.open(scene.words(number, 1.5))) for number in (300, 301)]
    if evicts:
        scene.fill()
    running, evicted = len(others), scene.num_evicted()
    call = scene.opening(tokens, **settings)
    sequence, raised = yield call
    outcome = "done"
    assert not (evicts and scene.is_undisturbed) or scene.num_evicted() > evicted, "nothing was evicted"
    if raised:
        assert scene.running == running, f"{scene.running} run, not {running}: a slot was lost"
        sequence, outcome = call(), "undone"
    request = scene.take(sequence, tokens)
    cached = sequence.cached_tokens
    assert not scene.is_undisturbed or cached >= least, f"{cached} tokens were cached, not {least}"
    scene.compute(request)
    return outcome


@operation("open, a miss")
def open_a_miss(scene: Scene) -> Any:
    return (yield from opened(scene, scene.words(1), room=scene.size))


@operation("open, a hit")
def open_a_hit(scene: Scene) -> Any:
    scene.leave(scene.words(1, 2))
    return (yield from opened(scene, scene.words(1, 3), least=scene.size, room=2 * scene.size + 1))


@operation("open, a part of a block", only=lambda kind: kind.partial)
def open_a_part_of_a_block(scene: Scene) -> Any:
    scene.leave(scene.words(1, 2))
    text = [*scene.words(1, 2)[: scene.size + 2], 700, 701, 702]
    return (yield from opened(scene, text, least=scene.size + 2))


@operation("open, eviction", only=lambda kind: kind.evicts)
def open_with_eviction(scene: Scene) -> Any:
    return (yield from opened(scene, scene.words(1, 4.5), evicts=True, room=4 * scene.size))


@operation("open, a tier", tier=True)
def open_from_a_tier(scene: Scene) -> Any:
    scene.leave(scene.words(1, 3))
    scene.forget()
    return (yield from opened(scene, [*scene.words(1, 3), 5], scene.size))


@operation("open, a tier and eviction", tier=True, only=lambda kind: kind.evicts)
def open_from_a_tier_with_eviction(scene: Scene) -> Any:
    scene.leave(scene.words(1, 4))
    scene.forget()
    return (yield from opened(scene, [*scene.words(1, 4), 5], scene.size, evicts=True, room=6 * scene.size))


@operation("open, layer-wise", tier=True)
def open_layer_wise(scene: Scene) -> Any:
    scene.leave(scene.words(1, 3))
    scene.forget()
    return (yield from opened(scene, [*scene.words(1, 3), 5], scene.size, layerwise=True))


@operation("open, prefetched", tier=True)
def open_prefetched(scene: Scene) -> Any:
    text = [*scene.words(1, 3), 5]
    scene.leave(scene.words(1, 3))
    scene.forget()
    ahead = scene.cache.prefetch(text, "one")
    scene.stack.callback(ahead.close)
    sequence, raised = yield scene.opening(text, prefetch=ahead)
    outcome = "undone" if raised else "done"
    if raised:
        assert scene.running == 0, "a slot was lost"
        sequence = scene.opening(text, prefetch=ahead)()
    assert not scene.is_undisturbed or sequence.cached_tokens >= scene.size
    scene.compute(scene.take(sequence, text))
    return outcome


@operation("prefetch", tier=True)
def prefetch(scene: Scene) -> Any:
    text = [*scene.words(1, 3), 5]
    scene.leave(scene.words(1, 3))
    scene.forget()
    call = partial(scene.cache.prefetch, text, "one")
    ahead, raised = yield call
    outcome = "undone" if raised else "done"
    if raised:
        ahead = call()
    scene.compute(scene.open(text, prefetch=ahead))
    return outcome


@operation("extend")
def extend(scene: Scene) -> Any:
    request = scene.compute(scene.open(scene.words(1, 1.5)))
    scene.compute(scene.open(scene.words(2, 1.5)))
    _, raised = yield partial(request.sequence.extend, 2 * scene.size)
    request.sequence.extend(2 * scene.size)
    return "undone" if raised else "done"


@operation("extend, eviction", only=lambda kind: kind.evicts)
def extend_with_eviction(scene: Scene) -> Any:
    request = scene.compute(scene.open(scene.words(1, 1.5)))
    scene.fill()
    evicted, n = scene.num_evicted(), 3 * scene.size
    _, raised = yield partial(request.sequence.extend, n)
    assert not scene.is_undisturbed or scene.num_evicted() > evicted, "nothing was evicted"
    request.sequence.extend(n)
    return "undone" if raised else "done"


def committed(scene: Scene, request: Request, count: int) -> Generator[Callable[[], Any], Told, str]:
    scene.write([request], [count])
    before, call = request.sequence.length, scene.commit_of(request, count)
    _, raised = yield call
    if not raised or request.sequence.length == before + count:
        assert request.sequence.length == before + count
        return "done"
    assert request.sequence.length == before, f"{request.sequence.length - before} of {count} tokens are committed"
    call()
    return "undone"


@operation("commit, a prompt")
def commit_a_prompt(scene: Scene) -> Any:
    scene.compute(scene.open(scene.words(2, 1.5)))
    return (yield from committed(scene, scene.open(scene.words(1, 2)), 2 * scene.size))


@operation("commit, a block and a window")
def commit_a_block(scene: Scene) -> Any:
    request = scene.compute(scene.open(scene.words(1, 3)), 3 * scene.size)
    request.text.tokens += [11] * (scene.size - 1)
    scene.compute(request)
    request.text.tokens.append(12)
    return (yield from committed(scene, request, 1))


@operation("commit, what another has", tier=True)
def commit_a_duplicate(scene: Scene) -> Any:
    text = scene.words(1, 2)
    first, second = scene.open(text), scene.open(text)
    scene.compute(first)
    return (yield from committed(scene, second, 2 * scene.size))


@operation("fork")
def fork(scene: Scene) -> Any:
    parent = scene.compute(scene.open(scene.words(1, 2.5)))
    running = scene.running
    call = partial(parent.sequence.fork, reserve=6 * scene.size)
    child, raised = yield call
    if raised:
        assert scene.running == running, f"{scene.running} run, not {running}: a slot was lost"
        child = call()
    scene.forked(child, parent)
    return "undone" if raised else "done"


def rewound(scene: Scene, n: int) -> Generator[Callable[[], Any], Told, str]:
    request = scene.compute(scene.open(scene.words(1, 2)))
    scene.step([request], [1])
    scene.remember(request)
    before = request.sequence.length
    call = partial(request.sequence.rewind, n)
    _, raised = yield call
    outcome = "done"
    if request.sequence.length == before:
        assert raised, "nothing was taken back"
        call()
        outcome = "undone"
    assert request.sequence.length == before - n
    del request.text.tokens[before - n :]
    request.text.tokens += [850, 851, 852, 853]  # others follow
    scene.compute(request)
    return outcome


@operation("rewind, a token", only=lambda kind: kind.rewinds)
def rewind_a_token(scene: Scene) -> Any:
    return (yield from rewound(scene, 1))


@operation("rewind, into a shared block", only=lambda kind: kind.rewinds)
def rewind_into_a_shared_block(scene: Scene) -> Any:
    return (yield from rewound(scene, 3))


def suspended(scene: Scene, whole: bool) -> Generator[Callable[[], Any], Told, str]:
    request = scene.compute(scene.open(scene.words(1, 2.5)))
    scene.compute(scene.open(scene.words(2, 1.5)))
    call = partial(request.sequence.suspend, whole)
    _, raised = yield call
    outcome = "done"
    if not is_suspended(scene, request):
        assert raised, "nothing was suspended"
        call()
        outcome = "undone"
    assert scene.running == 1, f"{scene.running} run, not 1"
    scene.cache.check()
    request.sequence.resume()
    scene.took_up(request)
    return outcome


def is_suspended(scene: Scene, request: Request) -> bool:
    """Whether it is set aside, as its calls say."""
    try:
        request.sequence.extend(0)
    except StaleHandle:
        return True
    return False


@operation("suspend, whole")
def suspend_whole(scene: Scene) -> Any:
    return (yield from suspended(scene, True))


@operation("suspend, in part")
def suspend_in_part(scene: Scene) -> Any:
    return (yield from suspended(scene, False))


def resumed(scene: Scene, whole: bool, evicts: bool = False) -> Generator[Callable[[], Any], Told, str]:
    request = scene.compute(scene.open(scene.words(1, 2.5)))
    scene.compute(scene.open(scene.words(2, 1.5)))
    length = request.sequence.length
    request.sequence.suspend(whole)
    if evicts:
        for number in range(500, 525):
            scene.leave(scene.words(number))
    _, raised = yield request.sequence.resume
    outcome = "done"
    assert not (evicts and scene.is_undisturbed) or request.sequence.length < length, "nothing was lost"
    if is_suspended(scene, request):
        assert raised, "it did not go on"
        assert scene.running == 1, f"{scene.running} run, not 1: a slot was lost"
        request.sequence.resume()
        outcome = "undone"
    scene.took_up(request)
    return outcome


@operation("resume, whole")
def resume_whole(scene: Scene) -> Any:
    return (yield from resumed(scene, True))


@operation("resume, in part")
def resume_in_part(scene: Scene) -> Any:
    return (yield from resumed(scene, False))


@operation("resume, eviction", only=lambda kind: kind.shares)
def resume_with_eviction(scene: Scene) -> Any:
    return (yield from resumed(scene, False, evicts=True))


@operation("close")
def close(scene: Scene) -> Any:
    request = scene.compute(scene.open(scene.words(1, 2.5)))
    scene.compute(scene.open(scene.words(2, 1.5)))
    scene.remember(request)
    _, raised = yield request.sequence.close
    outcome = "done"
    if request.sequence.is_open:
        assert raised, "it is open still"
        request.sequence.close()
        outcome = "undone"
    scene.requests.remove(request)
    return outcome


@operation("close, suspended")
def close_what_is_suspended(scene: Scene) -> Any:
    request = scene.compute(scene.open(scene.words(1, 2.5)))
    request.sequence.suspend()
    scene.remember(request)
    _, raised = yield request.sequence.close
    outcome = "done"
    if request.sequence.is_open:
        assert raised, "it is open still"
        request.sequence.close()
        outcome = "undone"
    scene.requests.remove(request)
    return outcome


@operation("pin")
def pin(scene: Scene) -> Any:
    scene.leave(scene.words(1, 2))
    scene.compute(scene.open(scene.words(2, 1.5)))
    call = partial(scene.cache.pin, scene.words(1, 2), "one")
    held, raised = yield call
    if raised:
        held = call()
    scene.cache.check()
    scene.cache.unpin(held)
    assert not held.is_held
    return "undone" if raised else "done"


@operation("unpin")
def unpin(scene: Scene) -> Any:
    scene.leave(scene.words(1, 2))
    scene.compute(scene.open(scene.words(2, 1.5)))
    held = scene.cache.pin(scene.words(1, 2), "one")
    _, raised = yield partial(scene.cache.unpin, held)
    outcome = "undone" if held.is_held else "done"
    assert raised or outcome == "done"
    scene.cache.unpin(held)
    assert not held.is_held
    return outcome


def invalidated(scene: Scene, *namespaces: str) -> Generator[Callable[[], Any], Told, str]:
    scene.leave(scene.words(1, 2))
    scene.cache.pin(scene.words(1, 2), "one")
    request = scene.compute(scene.open(scene.words(2, 1.5)))
    call = partial(scene.cache.invalidate, *namespaces)
    _, raised = yield call
    scene.cache.check()
    if raised:
        call()
    probe = scene.cache.open(scene.words(1, 3), "one", room=0)
    assert probe.cached_tokens == 0, "what was invalidated is found"
    probe.close()
    scene.texts.clear()
    scene.compute(request, len(request.text.tokens) + scene.size)
    return "undone" if raised else "done"


@operation("invalidate, one namespace")
def invalidate_one(scene: Scene) -> Any:
    return (yield from invalidated(scene, "one"))


@operation("invalidate, all")
def invalidate_all(scene: Scene) -> Any:
    return (yield from invalidated(scene))


@operation("reset")
def reset(scene: Scene) -> Any:
    for number in (1, 2):
        scene.leave(scene.words(number, 2))
    scene.cache.pin(scene.words(1, 2), "one")
    _, raised = yield scene.cache.reset
    scene.cache.check()
    if raised:
        scene.cache.reset()
    assert scene.cache.stats().cached_tokens == 0 or not scene.cache.lookup(scene.words(1, 3)).cached
    return "undone" if raised else "done"


@operation("fence, a commit and a close inside")
def fence(scene: Scene) -> Any:
    first, second = (scene.compute(scene.open(scene.words(number, 1.5))) for number in (1, 2))
    scene.remember(second)
    scene.write([first, second], [scene.size, 1])
    before, commit = first.sequence.length, scene.commit_of(first, scene.size)

    def call() -> None:
        with scene.cache.fence([first.sequence, second.sequence]):
            commit()
            second.sequence.close()

    _, raised = yield call
    outcome = "done"
    if first.sequence.length == before:
        assert raised
        commit()
        outcome = "undone"
    assert first.sequence.length == before + scene.size
    if second.sequence.is_open:
        assert raised
        second.sequence.close()
    scene.requests.remove(second)
    assert scene.running == 1, f"{scene.running} run, not 1: a slot was lost"
    first.sequence.suspend()  # what is fenced still cannot be
    first.sequence.resume()
    return outcome


def batched(scene: Scene, requests: list[Request], counts: list[int]) -> Generator[Callable[[], Any], Told, str]:
    """A batch, and the views and index arrays of all its layers; the same again must show the right rows."""
    for request, count in zip(requests, counts):
        request.sequence.extend(count)
    layers = scene.cache.schema.layers

    def call() -> None:
        made = scene.cache.batch([request.sequence for request in requests], counts, pad_to=3)
        for layer in layers:
            view = made.layer(layer.index)
            if layer.growth is not None:
                _ = view.block_table, view.slot_mapping, view.kv_indices

    _, raised = yield call
    call()
    return "undone" if raised else "done"


@operation("batch")
def batch(scene: Scene) -> Any:
    requests = [scene.compute(scene.open(scene.words(number, 1.5))) for number in (1, 2)]
    for request in requests:
        request.text.tokens += [13, 14]
    return (yield from batched(scene, requests, [2, 1]))


@operation("batch, layers that come in", tier=True)
def batch_of_layers_that_come_in(scene: Scene) -> Any:
    scene.leave(scene.words(1, 3))
    scene.forget()
    request = scene.open([*scene.words(1, 3), 5, 6], layerwise=True)
    return (yield from batched(scene, [request], [2]))


class Together(NamedTuple):
    """Requests that are stepped by a persistent batch."""

    requests: list[Request]
    run: Any

    def write(self, scene: Scene, step: Any) -> None:
        members = [self.of(sequence) for sequence in self.run.sequences]
        before = [one.sequence.length for one in members]
        for one, start in zip(members, before):
            one.text.tokens += [15] * (start + 1 - len(one.text.tokens))
        scene.oracle.step(step, [one.text for one in members], before, [1] * len(members))

    def of(self, sequence: Sequence) -> Request:
        return next(one for one in self.requests if one.sequence is sequence)

    def next_tokens(self) -> list[int]:
        return [self.of(one).text.tokens[one.length] for one in self.run.sequences]

    def step(self, scene: Scene, count: int = 3) -> None:
        """Some steps, each compared; the first request, or another, comes to the end of a block."""
        for _ in range(count):
            self.write(scene, self.run.extend())
            self.run.commit(self.next_tokens())

    def end(self) -> None:
        self.run.remove(*self.run.sequences)


def together(scene: Scene, left: int) -> Together:
    """Three requests, of different lengths, in a persistent batch; the first lacks ``left`` tokens to a whole block."""
    lengths = [3 * scene.size - left, scene.size + 1, 2]
    requests = [scene.compute(scene.open(scene.words(n, 4)[:length])) for n, length in enumerate(lengths, 1)]
    return Together(requests, scene.cache.persistent_batch([one.sequence for one in requests], 4))


@operation("persistent batch, extend")
def persistent_extend(scene: Scene) -> Any:
    group = together(scene, left=0)
    step, raised = yield group.run.extend
    group.write(scene, group.run.extend() if raised else step)
    group.run.commit(group.next_tokens())
    group.step(scene)
    group.end()
    return "undone" if raised else "done"


@operation("persistent batch, commit")
def persistent_commit(scene: Scene) -> Any:
    group = together(scene, left=1)
    group.write(scene, group.run.extend())
    before, tokens = [one.sequence.length for one in group.requests], group.next_tokens()
    _, raised = yield partial(group.run.commit, tokens)
    grown = {one.sequence.length - length for one, length in zip(group.requests, before)}
    assert len(grown) == 1 and grown <= {0, 1}, f"members have {sorted(grown)} tokens more"
    assert raised or grown == {1}
    if grown == {0}:
        group.run.commit(tokens)
    group.step(scene)
    group.end()
    return "undone" if grown == {0} else "done"


@operation("persistent batch, add")
def persistent_add(scene: Scene) -> Any:
    group = together(scene, left=1)
    more = scene.compute(scene.open(scene.words(9, 1.5)))
    group.requests.append(more)
    group.step(scene, 2)
    _, raised = yield partial(group.run.add, more.sequence)
    outcome = "undone" if more.sequence not in group.run.sequences else "done"
    assert raised or outcome == "done"
    if outcome == "undone":
        group.run.add(more.sequence)
    group.step(scene)
    group.end()
    return outcome


@operation("persistent batch, remove")
def persistent_remove(scene: Scene) -> Any:
    group = together(scene, left=2)
    group.write(scene, group.run.extend())
    group.run.commit(group.next_tokens())
    gone = group.requests[0]
    _, raised = yield partial(group.run.remove, gone.sequence)
    outcome = "undone" if gone.sequence in group.run.sequences else "done"
    assert raised or outcome == "done"
    if outcome == "undone":
        group.run.remove(gone.sequence)
    scene.step([gone], [1])
    group.step(scene)
    group.end()
    return outcome


# -- one point, and all of them ------------------------------------------------------------------------------------------


class Cut(NamedTuple):
    """What became of one operation that was cut short at one point; ``outcome`` "over" if it has no such point."""

    outcome: str
    where: str = ""
    why: str = ""


def cut(kind: str, name: str, way: str, n: int) -> Cut:
    """Cut the operation short at its ``n``-th point."""
    with at_most(SECONDS):
        scene = Scene(kind, name in WITH_TIER)
        try:
            return _cut(scene, OPERATIONS[name](scene), WAYS[way], n)
        finally:
            scene.end()


@cache
def num_points(kind: str, name: str) -> dict[str, int]:
    """How many points the operation has, of each way, when nothing fails; it must go well then."""
    for _ in range(2):  # what is imported on the way is, the second time
        with at_most(SECONDS):
            scene = Scene(kind, name in WITH_TIER)
            scene.is_undisturbed = True
            try:
                found = _count(scene, OPERATIONS[name](scene))
            finally:
                scene.end()
        if name in _IMPORTED:
            break
        _IMPORTED.add(name)
    return found


_IMPORTED: set[str] = set()


def _count(scene: Scene, steps: Generator[Callable[[], Any], Told, str]) -> dict[str, int]:
    call, found = next(steps), dict.fromkeys(WAYS, 0)

    def count(frame: FrameType, event: str, argument: Any) -> str:
        for way in ("signal", "memory"):
            found[way] += bool(WAYS[way].is_point(frame, event, argument))  # type: ignore[misc]
        return ""

    for driver in scene.drivers:
        driver.arm(0)
    with Interruption(0, count, KeyboardInterrupt):
        result = call()
    if scene.drivers:
        assert scene.cache.flush()
        found["driver"] = scene.drivers[0].count
    with pytest.raises(StopIteration) as end:
        steps.send((result, False))
    assert end.value.value == "done"
    scene.prove()
    return found


class Way(NamedTuple):
    """How calls are made to fail. ``is_point`` None: those of a tier's driver, in its own threads."""

    is_point: Point | None
    error: type[BaseException]


WAYS = {
    "signal": Way(any_call, KeyboardInterrupt),
    "memory": Way(failing_call, MemoryError),
    "driver": Way(None, MemoryError),
}


def _cut(scene: Scene, steps: Generator[Callable[[], Any], Told, str], way: Way, n: int) -> Cut:
    call, result, raised = next(steps), None, None
    points: Any = scene.drivers[0] if way.is_point is None else Interruption(n, way.is_point, way.error)
    with ExitStack() as stack:
        if way.is_point is None:
            points.arm(n)
        else:
            stack.enter_context(points)
        try:
            result = call()
        except BaseException as error:
            raised = error
    if way.is_point is None:
        scene.cache.flush()
        points.disarm()
    if not points.where:
        assert raised is None, f"without a failure it raised {raised!r}"
        return Cut("over")
    try:
        return Cut(_became(scene, steps, way, n, result, raised), points.where)
    except Exception as error:
        line = max(one.lineno for one in traceback.extract_tb(error.__traceback__) if one.filename == __file__)
        what = " ".join(str(error).split())[:160]
        return Cut("damage", points.where, f"{type(error).__name__}: {what} (line {line} here)")


def _became(
    scene: Scene, steps: Generator[Callable[[], Any], Told, str], way: Way, n: int, result: Any,
    raised: BaseException | None,
) -> str:  # fmt: skip
    """What the operation led to. Raises whatever shows damage."""
    if raised is not None:
        _is_the_injected(raised, way.error)
        try:
            scene.cache.check()
        except RuntimeError as error:
            if not isinstance(error, getattr(errors, "NeedsReset", ())):
                raise
            assert way.error is KeyboardInterrupt, "memory that runs out can always be undone"
            scene.prove_reset(closes_first=bool(n % 2))
            return "reset"
    else:
        assert way.error is not KeyboardInterrupt, "the signal was swallowed"
        scene.cache.check()
    try:
        steps.send((result, raised is not None))
    except StopIteration as end:
        scene.prove()
        return str(end.value)
    raise AssertionError("an operation is one call")


def _is_the_injected(error: BaseException, kind: type[BaseException]) -> None:
    """Raises AssertionError unless ``error`` is what was injected, or a typed error that it caused."""
    if isinstance(error, kind) and "call " in str(error):
        return
    caused = error.__cause__ or error.__context__
    typed = isinstance(error, (OutOfBlocks, RetryLater)) and kind is MemoryError
    assert typed and isinstance(caused, kind), f"another error came out: {type(error).__name__}: {error}"


COUNTS: dict[tuple[str, str, str], Counter[str]] = {}
"""(way, operation, kind) -> how many points led to what."""


def sweep(kind: str, name: str, way: str, most: int | None) -> None:
    """Cut the operation short at every point, or at about ``most`` of them. Raises AssertionError with the damage."""
    count = num_points(kind, name)[way]
    every = 1 if most is None else max(1, -(-count // most))
    counts, damage = COUNTS.setdefault((way, name, kind), Counter()), list[str]()
    n = 1 + (hash_of(kind, name) % every)
    while (found := cut(kind, name, way, n)).outcome != "over":
        counts[found.outcome] += 1
        if found.outcome == "damage":
            damage.append(f"{n}: {found.where}: {found.why}")
        n += every
    total = counts.total()
    assert not damage, f"{len(damage)} of {total} points: damage\n" + "\n".join(damage[:12])


def hash_of(*words: str) -> int:
    """The same in every process."""
    return sum(map(ord, "".join(words)))


def cases(way: str) -> list[Any]:
    """Every operation of every kind; the default run has some of the kinds, and some points of each."""
    found = []
    for name in OPERATIONS:
        if way == "driver" and name not in WITH_TIER:
            continue
        for kind, what in KINDS.items():
            if ONLY[name](what):
                found.append(pytest.param(kind, name, None, id=f"{kind}-{name}-all", marks=pytest.mark.slow))
                if kind in QUICK_KINDS:
                    found.append(pytest.param(kind, name, QUICK_POINTS[way], id=f"{kind}-{name}"))
    return found


@pytest.mark.parametrize(("kind", "name", "most"), cases("signal"))
def test_a_signal_at_any_call(kind: str, name: str, most: int | None) -> None:
    sweep(kind, name, "signal", most)


@pytest.mark.parametrize(("kind", "name", "most"), cases("memory"))
def test_memory_that_runs_out(kind: str, name: str, most: int | None) -> None:
    sweep(kind, name, "memory", most)


@pytest.mark.parametrize(("kind", "name", "most"), cases("driver"))
def test_a_driver_that_fails_is_a_miss(kind: str, name: str, most: int | None) -> None:
    sweep(kind, name, "driver", most)


def test_the_list_of_what_can_fail_names_functions() -> None:
    assert len(failing_functions()) >= 8


@pytest.fixture(scope="module", autouse=True)
def _report() -> Iterator[None]:
    """Print how many points led to what, and write it where ``KVPAGODA_SWEEP`` says."""
    yield
    if not COUNTS:
        return
    print()
    for way in WAYS:
        print(table(way))
    path = os.environ.get("KVPAGODA_SWEEP")
    if path:
        rows = [dict(zip(("way", "operation", "kind"), key), **counts) for key, counts in COUNTS.items()]
        with open(path, "w") as file:
            json.dump(rows, file, indent=1)


def table(way: str) -> str:
    """For each operation its points over all kinds, what they led to, and the damage of each kind."""
    lines = [f"{way:36}{'points':>8}{'undone':>8}{'done':>8}{'reset':>8}{'damage':>8}   damage of points, by kind"]
    for name in OPERATIONS:
        mine = {kind: counts for (by, of, kind), counts in COUNTS.items() if by == way and of == name}
        if mine:
            total = sum(mine.values(), Counter[str]())
            numbers = [total.total(), *(total[outcome] for outcome in ("undone", "done", "reset", "damage"))]
            kinds = "  ".join(f"{kind} {counts['damage']}/{counts.total()}" for kind, counts in mine.items())
            lines.append(f"{name:36}{''.join(f'{number:8}' for number in numbers)}   {kinds}")
    return "\n".join(lines)
