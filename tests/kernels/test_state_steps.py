"""Steps that leave a state after each token: against plain loops, against transformers, and over a cache that speculates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvpagoda import KVCache
from kvpagoda.core.kernels.state_steps import conv_steps, delta_steps, ssd_steps
from kvpagoda.errors import BadInput
from kvpagoda.schema import Attention, Layer, Recurrent, Rows, Schema
from raises import raises

Tensor = torch.Tensor
HEADS, KEYS, VALUES, CHANNELS, WIDTH = 2, 5, 7, 6, 4
COUNTS = (1, 4, 9, 3, 5)
"""New tokens of each row: fewer than places, as many, more."""


def one_conv(state: Tensor, weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The next tail, and the output: written from the definition, for one token of one row."""
    window = torch.cat((state, x[:, None]), dim=1)
    return window[:, 1:], torch.stack([window[i] @ weight[i] for i in range(len(x))])


def one_delta(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    decayed = state * g.exp().reshape(HEADS, -1, 1)
    new = torch.stack([s + torch.outer(a, b * (w - s.T @ a)) for s, a, w, b in zip(decayed, k, v, beta)])
    return new, torch.stack([s.T @ a for s, a in zip(new, q)])


def one_ssd(state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    new = torch.stack([(t * d).exp() * s + torch.outer(t * w, u) for s, t, d, w, u in zip(state, dt, a, x, b)])
    return new, torch.stack([s @ u for s, u in zip(new, c)])


def inputs(random: np.random.Generator, n: int, *, by_key: bool = False) -> dict[str, Any]:
    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(random.standard_normal(shape)).float()

    return {
        "conv": (normal(n, CHANNELS),),
        "delta": (
            normal(n, HEADS, KEYS) / 3, normal(n, HEADS, KEYS) / 3, normal(n, HEADS, VALUES),
            -normal(n, HEADS, *(KEYS,) * by_key).abs(), normal(n, HEADS).sigmoid(),
        ),
        "ssd": (
            normal(n, HEADS, VALUES), normal(n, HEADS).abs(), -normal(HEADS).abs(), normal(n, HEADS, KEYS),
            normal(n, HEADS, KEYS),
        ),
    }  # fmt: skip


def run(kind: str, given: tuple[Tensor, ...], weight: Tensor, *where: Tensor) -> Tensor:
    if kind == "conv":
        return conv_steps(given[0], weight, None, *where)
    return (delta_steps if kind == "delta" else ssd_steps)(*given, *where)


def plain(kind: str, given: tuple[Tensor, ...], weight: Tensor, state: Tensor, at: int) -> tuple[Tensor, Tensor]:
    """Return (the state, the output) after token ``at`` of ``given``."""
    if kind == "conv":
        return one_conv(state, weight, given[0][at])
    if kind == "delta":
        return one_delta(state, *(one[at] for one in given))
    x, dt, a, b, c = given
    return one_ssd(state, x[at], dt[at], a, b[at], c[at])


SHAPES = {"conv": (CHANNELS, WIDTH - 1), "delta": (HEADS, KEYS, VALUES), "ssd": (HEADS, VALUES, KEYS)}


def pool(kind: str, records: int, random: np.random.Generator, order: str = "dense") -> Tensor:
    """Records of a kind with bytes of other layers between them, and the last two axes exchanged in memory unless dense."""
    shape = SHAPES[kind]
    if order == "dense":
        return torch.from_numpy(random.standard_normal((records, *shape))).float()
    memory = torch.from_numpy(random.standard_normal((records, 3, *shape[:-2], shape[-1], shape[-2]))).float()
    return memory[:, 1].transpose(-1, -2)


@pytest.mark.parametrize("places", [1, 2, 4])
@pytest.mark.parametrize("order", ["dense", "strided"])
@pytest.mark.parametrize(("kind", "by_key"), [("conv", False), ("delta", False), ("delta", True), ("ssd", False)])
def test_each_of_the_last_tokens_leaves_its_state(kind: str, by_key: bool, order: str, places: int) -> None:
    random = np.random.default_rng(places)
    given, weight = inputs(random, sum(COUNTS), by_key=by_key)[kind], torch.randn(CHANNELS, WIDTH)
    table = torch.from_numpy(random.permutation(np.arange(1, 40))[: len(COUNTS) * places].reshape(-1, places))
    states, ends = pool(kind, 41, random, order), torch.tensor([0, *np.cumsum(COUNTS)])
    before, reads = states.clone(), table[:, -1].int()
    out = run(kind, given, weight, states, reads, table.int(), ends.int())
    expected, written = before.clone(), set()
    for row, count in enumerate(COUNTS):
        state = before[reads[row]]
        for number in range(count):
            at = int(ends[row]) + number
            state, answer = plain(kind, given, weight, state, at)
            torch.testing.assert_close(out[at], answer, rtol=1e-4, atol=1e-5)
            column = number if count <= places else number - (count - places)
            if column >= 0:
                expected[table[row, column]] = state
                written.add(int(table[row, column]))
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5)
    others = [record for record in range(41) if record not in written]
    assert torch.equal(states[others], before[others])


@pytest.mark.parametrize("by_key", [False, True])
def test_delta_steps_are_the_rule_of_transformers(by_key: bool) -> None:
    pytest.importorskip("transformers")
    from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    theirs = recurrent_kimi_delta_attention if by_key else torch_recurrent_gated_delta_rule
    q, k, v, g, beta = inputs(np.random.default_rng(0), 6, by_key=by_key)["delta"]
    states, table = torch.zeros(8, *SHAPES["delta"]), torch.tensor([[1, 2, 3, 4, 5, 6]])
    out = delta_steps(q / KEYS**0.5, k, v, g, beta, states, torch.tensor([7]), table, torch.tensor([0, 6]))
    for count in (1, 4, 6):
        given = [one[None, :count] for one in (q, k, v, g, beta)]
        answer, last = theirs(*given, initial_state=torch.zeros(1, *SHAPES["delta"]), output_final_state=True)
        torch.testing.assert_close(out[:count], answer[0])
        torch.testing.assert_close(states[count], last[0])


def test_ssd_and_conv_steps_are_the_rules_of_transformers() -> None:
    pytest.importorskip("transformers")
    from transformers.models.mamba2.modeling_mamba2 import causal_conv1d_update, mamba2_selective_state_update

    known, table = inputs(np.random.default_rng(0), 6), torch.tensor([[1, 2, 3, 4, 5, 6]])
    (x, dt, a, b, c), (columns,), weight = known["ssd"], known["conv"], torch.randn(CHANNELS, WIDTH)
    where = torch.tensor([7]), table, torch.tensor([0, 6])
    states, tails = torch.zeros(8, *SHAPES["ssd"]), torch.zeros(8, *SHAPES["conv"])
    out, convolved = ssd_steps(x, dt, a, b, c, states, *where), conv_steps(columns, weight, None, tails, *where)
    state, tail = torch.zeros(1, *SHAPES["ssd"]), torch.zeros(1, CHANNELS, WIDTH)
    wide = a[:, None, None].expand(SHAPES["ssd"])
    for number in range(6):
        each = dt[None, number, :, None].expand(1, HEADS, VALUES)
        answer = mamba2_selective_state_update(state, x[None, number], each, wide, b[None, number], c[None, number])
        torch.testing.assert_close(out[number], answer[0])
        torch.testing.assert_close(states[number + 1], state[0])
        answer = causal_conv1d_update(columns[None, number, :, None], tail, weight, None, None)
        torch.testing.assert_close(convolved[number], answer.flatten())
        torch.testing.assert_close(tails[number + 1], tail[0, :, 1:])


@pytest.mark.parametrize("width", [0, 3])
def test_steps_over_a_cache_that_takes_drafts_back_end_in_the_state_of_the_text(width: int) -> None:
    """Random texts in a cache with little memory: drafts are rejected, tokens rewound, requests forked and suspended. Each
    state that a step begins with must be that of a plain loop over the text alone."""
    random = np.random.default_rng(width)
    rows = Recurrent((Rows("conv", SHAPES["conv"], "float32"), Rows("recurrent", SHAPES["delta"], "float32")))
    layers = (Layer(0, "attention", (Attention(1, 4, 4, "float32"),)), Layer(1, "delta", (rows,)))
    cache = KVCache(Schema(layers, "test").rewindable(width), "24KiB", block_size=4, max_requests=3, device="cpu")
    weight, known = torch.randn(CHANNELS, WIDTH), inputs(random, 50)  # the inputs of each token id
    x, (q, k, v, g, beta) = known["conv"][0], known["delta"]

    def states_of(text: list[int]) -> tuple[Tensor, Tensor]:
        tail, matrix = torch.zeros(SHAPES["conv"]), torch.zeros(SHAPES["delta"])
        for token in text:
            tail, _ = one_conv(tail, weight, x[token])
            matrix, _ = one_delta(matrix, q[token], k[token], v[token], g[token], beta[token])
        return tail, matrix

    seen = {"drafts taken back": 0, "rewound": 0, "forked": 0, "suspended": 0, "resumed at": 0}
    for _ in range(40):
        prompt = [int(token) for token in random.integers(0, 2, random.integers(1, 14))]
        sequence = cache.open(prompt, capacity=0)
        seen["resumed at"] += sequence.cached_tokens
        text = [*prompt[: sequence.length]]
        for _ in range(int(random.integers(2, 9))):
            rest = len(prompt) - sequence.length
            n = min(rest, cache.step_limit(sequence)) if rest > 0 else 1 + int(random.integers(0, width + 1))
            new = prompt[sequence.length :][:n] if rest > 0 else random.integers(0, 2, n).tolist()
            sequence.extend(n)
            batch = cache.batch([sequence], [n], pad_to=2)
            view, ids = batch.layer(1), torch.tensor([*new, 0])
            where = view.state_indices, view.state_writes, view.qo_indptr
            begun = [view[name][view.state_indices.long()[0], 0] for name in ("conv", "recurrent")]
            for found, expected in zip(begun, states_of(text)):
                torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
            conv_steps(x[ids], weight, None, view["conv"][:, 0], *where)
            delta_steps(q[ids], k[ids], v[ids], g[ids], beta[ids], view["recurrent"][:, 0], *where)
            kept = n if rest > 0 else int(random.integers(max(1, n - width), n + 1))
            sequence.commit(new[:kept])
            text += new[:kept]
            seen["drafts taken back"] += n - kept
            if width and random.random() < 0.3 and kept == n > 1 and rest <= 0:
                sequence.rewind(n - 1)
                del text[-(n - 1) :]
                seen["rewound"] += n - 1
            if random.random() < 0.2:
                child = sequence.fork()
                sequence.close()
                sequence = child
                seen["forked"] += 1
            if random.random() < 0.2:
                sequence.suspend()
                assert sequence.resume() == 0
                seen["suspended"] += 1
            cache.check()
        sequence.close()
    possible = {"forked", "suspended", "resumed at"} | ({"rewound", "drafts taken back"} if width else set())
    assert {what for what, count in seen.items() if count} == possible, seen


def test_what_it_does_not_take() -> None:
    random = np.random.default_rng(0)
    given, weight = inputs(random, 3), torch.randn(CHANNELS, WIDTH)
    reads, writes, ends = torch.tensor([1]), torch.tensor([[2, 3]]), torch.tensor([0, 3])
    for kind in ("conv", "delta", "ssd"):
        states = pool(kind, 5, random)
        before = states.clone()
        for where in (
            (states[:, :1], reads, writes, ends), (states, reads, writes[0], ends), (states, reads, writes, ends[:1]),
            (states, reads.float(), writes, ends), (states, torch.tensor([1, 2]), writes, ends),
        ):  # fmt: skip
            with raises(BadInput, needed=[*where[0].shape]):
                run(kind, given[kind], weight, *where)
        assert torch.equal(states, before)
