"""Between the device and the host: what the card does, and the same bytes as blocks of a host tier and of the swap memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from statistics import median
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch

from kvpagoda import KVCache, Limits, Sequence
from kvpagoda.bench_gpu.card import Card
from kvpagoda.bench_gpu.rows import CARD, SWAP, TIER, BenchCase, RowBound, RowSizes, at_least, at_most
from kvpagoda.errors import CheckFailed
from kvpagoda.schema import Attention, Layer, Schema
from kvpagoda.tiers import host_tier

Figures = tuple[dict[str, float], dict[str, RowBound]]

BLOCK_SIZE, DIM, MOST_BLOCKS = 16, 128, 16_384
TIER_LEAST, SWAP_OUT_LEAST, SWAP_IN_LEAST = 85, 95, 83
"""The least shares of a page-locked copy, in percent. Of swap: what was measured before blocks were moved in one way."""
EVICTED, EVICT_US = 64, 100
"""Blocks that a request evicts at a time, and the most time that this may hold it."""


class Link(NamedTuple):
    """Bytes a second of page-locked copies to the device and from it."""

    inwards: float
    outwards: float


class Shape(NamedTuple):
    """Blocks of ``heads`` K/V heads of 128 elements and ``layers`` layers. ``order``: of the memory, as ``Schema.plan`` has
    it."""

    name: str
    heads: int
    layers: int
    order: str | None = None

    @property
    def schema(self) -> Schema:
        """The layers."""
        heads = Attention(self.heads, DIM, DIM, "bfloat16")
        return Schema(tuple(Layer(i, "full_attention", (heads,)) for i in range(self.layers)))

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block."""
        return BLOCK_SIZE * self.heads * self.layers * DIM * 2 * 2


SHAPES = (
    Shape("8 KiB", 1, 1), Shape("64 KiB", 8, 1), Shape("1 MiB", 8, 16), Shape("1 MiB, a layer apart", 8, 16, "layer"),
)  # fmt: skip


def link(card: Card, sizes: RowSizes) -> Link:
    """Measure page-locked copies each way."""
    there = torch.zeros(sizes.moved // 2, dtype=torch.uint8, device=card.device)
    here = card.page_locked(there.nbytes)
    ways = []
    for target, source in ((there, here), (here, there)):
        copy = partial(target.copy_, source, non_blocking=True)
        copy()
        ways.append(there.nbytes / median(card.device_seconds(copy) for _ in range(sizes.rounds)))
    return Link(*ways)


def card_case(card: Card, sizes: RowSizes) -> BenchCase:
    """Return the case of what the card does: a copy on the device, of which reads and writes count, and page-locked ones."""

    def run() -> Figures:
        source = torch.zeros(sizes.moved // 2, dtype=torch.uint8, device=card.device)
        target, ways = torch.empty_like(source), link(card, sizes)
        copy = partial(target.copy_, source)
        copy()
        device = 2 * source.nbytes / median(card.device_seconds(copy) for _ in range(sizes.rounds))
        return {"device_gbps": device / 1e9, "in_gbps": ways.inwards / 1e9, "out_gbps": ways.outwards / 1e9}, {}

    return BenchCase(CARD, "copies", run)


def cases(card: Card, sizes: RowSizes) -> Iterator[BenchCase]:
    """Yield a case for each shape of blocks in a host tier, and one for the swap memory."""
    for shape in SHAPES:
        yield BenchCase(TIER, shape.name, partial(measure_tier, card, sizes, shape))
    yield BenchCase(SWAP, "a request", partial(measure_swap, card, sizes))


def _shares(ways: Link, nbytes: int, out_seconds: float, in_seconds: float) -> dict[str, float]:
    """Return the speeds of ``nbytes`` that went out and came in, in GB/s and as shares of page-locked copies."""
    out, back = nbytes / out_seconds, nbytes / in_seconds
    return {
        "out_gbps": out / 1e9, "in_gbps": back / 1e9,
        "out_percent": 100 * out / ways.outwards, "in_percent": 100 * back / ways.inwards,
    }  # fmt: skip


def measure_tier(card: Card, sizes: RowSizes, shape: Shape) -> Figures:
    """Evict a text to a host tier, ``EVICTED`` blocks at a time, with the tier's usual settings; then open it again."""
    ways = link(card, sizes)
    schema, blocks = shape.schema, min(MOST_BLOCKS, max(2 * EVICTED, sizes.text // shape.block_nbytes))
    blocks -= blocks % EVICTED
    tier = host_tier(2 * blocks * shape.block_nbytes + (64 << 20), timeout=30.0)
    cache = KVCache(
        schema, num_blocks=blocks + 1, max_requests=2, block_size=BLOCK_SIZE, device=card.device, order=shape.order,
        tiers=[tier], limits=Limits(swap=0),
    )  # fmt: skip
    tokens = blocks * BLOCK_SIZE
    with closing(cache):
        with _filled(cache, 1, tokens) as first:
            written = _sums(cache, first, blocks, seed=1)
        pieces = [*range(EVICTED, blocks, EVICTED), blocks + 1]  # all of the memory: no block of the first text stays
        card.wait()
        start = perf_counter()
        with cache.open(_text(2, tokens), capacity=0, reserve=tokens + BLOCK_SIZE) as second:
            for many in pieces:
                second.extend(many * BLOCK_SIZE)
            held = (perf_counter() - start) / len(pieces)
            is_stored = cache.flush(60.0)
            card.wait()
            out_seconds = perf_counter() - start
        stored = cache.stats().tiers[0].stored
        if not (is_stored and stored):
            raise CheckFailed(f"{stored} of {blocks} blocks were stored in 60 s: {cache.stats().tiers[0].last_fault}")
        cache.reset()  # what is cached on the device is gone; the tier keeps its own
        card.wait()
        start = perf_counter()
        with cache.open(np.append(_text(1, tokens), np.int32(9)), reserve=tokens + BLOCK_SIZE) as again:
            batch = cache.batch([again], [tokens + 1 - again.length])
            for layer in schema.layers:
                _ = batch.layer(layer.index).block_table
            card.wait()
            in_seconds = perf_counter() - start
            loaded = cache.stats().tiers[0].loaded_tokens // BLOCK_SIZE
            same = torch.equal(_sums(cache, again, loaded), written[:loaded])
        if not loaded or not same:
            raise CheckFailed(
                f"{loaded} of {stored} stored blocks came back, {'the same' if same else 'with other bytes'}"
            )
    out = _shares(ways, stored * shape.block_nbytes, out_seconds, 1.0)
    back = _shares(ways, loaded * shape.block_nbytes, 1.0, in_seconds)
    figures = {name: (out if name.startswith("out") else back)[name] for name in out}
    figures |= {"stored_percent": 100 * stored / blocks, "evict_us": 1e6 * held}
    return figures, {
        "out_percent": at_least(TIER_LEAST), "in_percent": at_least(TIER_LEAST), "evict_us": at_most(EVICT_US),
    }  # fmt: skip


def measure_swap(card: Card, sizes: RowSizes) -> Figures:
    """Suspend a request that shares nothing, overwrite its memory, and resume it, several times."""
    ways, shape = link(card, sizes), SHAPES[2]
    blocks = max(2, sizes.text // shape.block_nbytes)
    tokens, nbytes = blocks * BLOCK_SIZE, blocks * shape.block_nbytes
    cache = KVCache(
        shape.schema, num_blocks=blocks + 1, max_requests=1, block_size=BLOCK_SIZE, device=card.device,
        limits=Limits(swap=nbytes + (64 << 20)),
    )  # fmt: skip
    with closing(cache), _filled(cache, 1, tokens, publish=False) as sequence:
        written, out, back = _sums(cache, sequence, blocks, seed=1), list[float](), list[float]()
        for _ in range(1 + sizes.rounds):
            card.wait()
            start = perf_counter()
            sequence.suspend()
            card.wait()
            out.append(perf_counter() - start)
            for layer in cache.schema.layers:
                for name in ("k", "v"):
                    cache.layer(layer.index)[name].zero_()
            card.wait()
            start = perf_counter()
            sequence.resume()
            card.wait()
            back.append(perf_counter() - start)
        if not torch.equal(_sums(cache, sequence, blocks), written):
            raise CheckFailed("a request that was resumed has other bytes than before")
    figures = {
        "first_ms_a_gib": 1e3 * out[0] * (1 << 30) / nbytes,
        **_shares(ways, nbytes, median(out[1:]), median(back[1:])),
    }
    return figures, {"out_percent": at_least(SWAP_OUT_LEAST), "in_percent": at_least(SWAP_IN_LEAST)}


def _text(first: int, tokens: int) -> np.ndarray:
    """Return int32 ``[tokens]``; texts of another ``first`` share no block."""
    text = np.arange(tokens, dtype=np.int32)
    text[0] = tokens + first
    return text


def _filled(cache: KVCache, first: int, tokens: int, publish: bool = True) -> Sequence:
    """Return a request of ``tokens`` tokens, all committed, which may have a block more."""
    text = _text(first, tokens)
    sequence = cache.open(text, publish=publish, reserve=tokens + BLOCK_SIZE)
    sequence.commit(text)
    return sequence


def _sums(cache: KVCache, sequence: Sequence, blocks: int, seed: int | None = None) -> torch.Tensor:
    """Return int64 ``[blocks]``: a sum of the bytes of each of the first blocks of ``sequence``. ``seed``: they are filled
    with random bytes first."""
    if sequence.capacity <= sequence.length:
        sequence.extend(1)
    ids = cache.batch([sequence], [1]).layer(0).block_table[0, :blocks].long()
    total = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
    if seed is not None:
        torch.manual_seed(seed)
    for number, layer in enumerate(cache.schema.layers):
        for name in ("k", "v"):
            field = cache.layer(layer.index)[name]
            if seed is not None:
                field.normal_()
            words = field.view(torch.int16)
            for begin in range(0, len(ids), 1024):  # sums take eight times the memory of what they are of
                some = words[ids[begin : begin + 1024]].long()
                total[begin : begin + 1024] += (2 * number + (name == "v") + 1) * some.flatten(1).sum(1)
    return total
