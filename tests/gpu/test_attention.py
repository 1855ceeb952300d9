"""Attention kernels of others over the memory of a cache: what they read is what was written, and what they write is the same.

With ``-m gpu`` these are FlashInfer's own, and torch's compiled ``flex_attention``. On a CPU a stand-in in torch takes what
FlashInfer takes, so that the page tables, strides, windows and scales that a cache gives are judged in every run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kvpagoda import Batch, KVCache, LayerView, Limits, Schema, Sequence

ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
Tensor = torch.Tensor
Tokens = npt.NDArray[np.int32]
HEADS, KV_HEADS, DIM, WINDOW, EVER, VOCAB = 4, 2, 64, 32, 1 << 20, 512
K_SCALE, V_SCALE = 0.031, 0.017
CONFIG = dict(
    model_type="gemma3_text", num_hidden_layers=2, hidden_size=256, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
    head_dim=DIM, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"], vocab_size=VOCAB,
    max_position_embeddings=4096, torch_dtype="bfloat16",
)  # fmt: skip
CASES: list[tuple[int, str | None, str, dict[str, Any]]] = [
    (16, None, "raw", {}), (64, "trtllm", "raw", {}), (16, None, "fp8_e4m3", {}), (16, "trtllm", "fp8_e4m3", {}),
    (64, None, "raw", {"kernel_page": 16}), (64, None, "raw", {"order": "layer"}), (16, "trtllm", "raw", {}),
    (64, None, "raw", {}), (64, None, "fp8_e4m3", {}),
]  # fmt: skip
"""Block size, layout (None: NHD; "trtllm": HND), format of K and V, and other settings of a cache."""


class Kernels(Protocol):
    """FlashInfer, or what stands for it. ``pages``: (kv_indptr, kv_indices, kv_last_page_len)."""

    device: str

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, pages: tuple[Tensor, Tensor, Tensor], page_size: int,
        window: int, hnd: bool, scales: tuple[float, float] | None,
    ) -> Tensor:  # fmt: skip
        """Return the attention of ``q`` ``[T, heads, dim]``: rows begin at ``starts``, or have one token each (None)."""

    def append(
        self, k: Tensor, v: Tensor, rows: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor,
        pages: tuple[Tensor, Tensor, Tensor], hnd: bool,
    ) -> None:  # fmt: skip
        """Write ``k`` and ``v`` ``[T, kv heads, dim]`` at ``positions`` of ``rows``."""


class StandIn:
    """FlashInfer in plain torch."""

    device = "cpu"

    def attend(self, q, k, v, starts, pages, page_size, window, hnd, scales):  # type: ignore[no-untyped-def]
        indptr, indices, last = (one.tolist() for one in pages)
        starts = range(len(q) + 1) if starts is None else starts.tolist()
        out = torch.zeros_like(q)
        for row in range(len(indptr) - 1):
            used = indices[indptr[row] : indptr[row + 1]]
            begin, end = starts[row], starts[row + 1]
            if begin < end and used:
                length = (len(used) - 1) * page_size + last[row]
                both = [
                    (one[used].transpose(1, 2) if hnd else one[used]).flatten(0, 1)[:length].float() for one in (k, v)
                ]
                both = [one * scale for one, scale in zip(both, scales or (1.0, 1.0))]
                at = torch.arange(length - (end - begin), length)
                out[begin:end] = dense(q[begin:end], *both, at, window).to(q.dtype)
        return out

    def append(self, k, v, rows, positions, k_cache, v_cache, pages, hnd):  # type: ignore[no-untyped-def]
        page_size = k_cache.shape[2 if hnd else 1]
        for i, (row, position) in enumerate(zip(rows.tolist(), positions.tolist())):
            page, inside = pages[1][pages[0][row] + position // page_size], position % page_size
            for cache, values in ((k_cache, k), (v_cache, v)):
                (cache[page, :, inside] if hnd else cache[page, inside]).copy_(values[i])


class FlashInfer:
    """FlashInfer's wrappers for paged memory."""

    device = "cuda"

    def __init__(self) -> None:
        self._lib = pytest.importorskip("flashinfer", reason="pip install flashinfer-python: its kernels are the judge")
        self._space = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")

    def attend(self, q, k, v, starts, pages, page_size, window, hnd, scales):  # type: ignore[no-untyped-def]
        layout, heads = "HND" if hnd else "NHD", (HEADS, KV_HEADS, DIM, page_size)
        kinds = {"window_left": window, "q_data_type": q.dtype, "kv_data_type": k.dtype}
        if starts is None:
            wrapper = self._lib.BatchDecodeWithPagedKVCacheWrapper(self._space, layout)
            wrapper.plan(*pages, *heads, **kinds)
        else:
            wrapper = self._lib.BatchPrefillWithPagedKVCacheWrapper(self._space, layout, backend="fa2")
            wrapper.plan(starts, *pages, *heads, causal=True, **kinds)
        k_scale, v_scale = scales or (None, None)
        return wrapper.run(q, (k, v), k_scale=k_scale, v_scale=v_scale)

    def append(self, k, v, rows, positions, k_cache, v_cache, pages, hnd):  # type: ignore[no-untyped-def]
        layout = "HND" if hnd else "NHD"
        indptr, indices, last = pages
        self._lib.append_paged_kv_cache(
            k, v, rows, positions, (k_cache, v_cache), indices, indptr, last, kv_layout=layout
        )


@pytest.fixture(params=[StandIn, pytest.param(FlashInfer, marks=ON_GPU)])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    made: Kernels = request.param()
    return made


def dense(q: Tensor, k: Tensor, v: Tensor, at: Tensor, window: int) -> Tensor:
    """Return in float32 the attention of ``q`` ``[n, heads, dim]``, of positions ``at``, over ``k``, ``v`` ``[m, ..]``."""
    k, v = (one.float().repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for one in (k, v))
    behind = at[:, None] - torch.arange(k.shape[1], device=at.device)
    scores = q.float().transpose(0, 1) @ k.transpose(1, 2) / DIM**0.5
    visible = (behind >= 0) & (behind <= window)
    return (scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v).transpose(0, 1)


class Texts:
    """Requests of one cache, whose K and V are functions of layer, position and token."""

    def __init__(self, kernels: Kernels, block_size: int, layout: str | None, kv_format: str, settings: dict[str, Any]):
        self.kernels, self.hnd, self.is_fp8 = kernels, layout is not None, kv_format != "raw"
        scales = dict(kv_format=kv_format, kv_scales=dict.fromkeys((0, 1), (K_SCALE, V_SCALE))) if self.is_fp8 else {}
        schema = Schema.from_hf_config(CONFIG, **scales, **({"layout": layout} if layout else {}))
        self.cache = KVCache(
            schema, "4MiB", device=kernels.device, block_size=block_size, max_requests=4,
            limits=Limits(step_tokens=256, max_context=1024), **{"poison": True, **settings},
        )  # fmt: skip
        random = torch.Generator().manual_seed(0)
        self.of_token, self.of_place = (
            torch.randn(2, 2, n, KV_HEADS, DIM, generator=random).to(kernels.device) for n in (VOCAB, 1024)
        )
        self.random, self.text = random, dict[Sequence, Tokens]()
        self.spoil: Callable[[dict[str, Any]], None] = lambda given: None

    def rows(self, layer: int, tokens: Tokens, first: int) -> list[Tensor]:
        """Return K and V of ``tokens`` at positions ``first ..``, bfloat16."""
        ids, at = torch.from_numpy(tokens).long().to(self.kernels.device), slice(first, first + len(tokens))
        return [(self.of_token[layer, i, ids] + self.of_place[layer, i, at]).bfloat16() for i in (0, 1)]

    def stored(self, values: Tensor, scale: float) -> Tensor:
        """Return ``values`` as the cache keeps them."""
        if not self.is_fp8:
            return values.float()
        return (values.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    def open(self, tokens: Tokens) -> Sequence:
        sequence = self.cache.open(tokens, reserve=len(tokens) + 200)
        self.text[sequence] = tokens[: sequence.length]
        return sequence

    def step(self, sequences: list[Sequence], news: list[Tokens], batch: Batch | None = None) -> None:
        """Write the rows of ``news``, have the kernel attend to them, compare its answers, and commit. ``batch``: a step of a
        persistent batch, with padded rows."""
        is_decode = batch is not None
        if batch is None:
            for sequence, new in zip(sequences, news):
                sequence.extend(len(new))
            batch = self.cache.batch(sequences, [len(new) for new in news])
        for layer in (0, 1):
            self._judge(batch.layer(layer), layer, sequences, news, is_decode)
        for sequence, new in zip(sequences, news):
            self.text[sequence] = np.concatenate((self.text[sequence], new))

    def _judge(
        self, view: LayerView, layer: int, sequences: list[Sequence], news: list[Tokens], is_decode: bool
    ) -> None:
        window, padded = (WINDOW - 1, EVER)[layer], len(view.slot_mapping) - sum(map(len, news))
        firsts = [len(self.text[sequence]) for sequence in sequences]
        new_rows = [torch.cat(one) for one in zip(*(self.rows(layer, *one) for one in zip(news, firsts)))]
        zeros = torch.zeros(padded, KV_HEADS, DIM, dtype=torch.bfloat16, device=self.kernels.device)
        k, v = (torch.cat((one, zeros)) for one in new_rows)
        view.write(k=k, v=v)
        tensors = view.kernel_tensors("flashinfer-decode" if is_decode else "flashinfer-prefill")
        assert tensors["declared"].get("layout", "NHD") == ("HND" if self.hnd else "NHD")
        q = torch.randn(len(k), HEADS, DIM, generator=self.random).to(self.kernels.device, torch.bfloat16)
        given: dict[str, Any] = {
            "k": tensors["k"], "v": tensors["v"], "starts": None if is_decode else view.qo_indptr, "window": window,
            "pages": (view.kv_indptr, view.kv_indices[: int(view.kv_indptr[-1])], view.kv_last_page_len),
        }  # fmt: skip
        self.spoil(given)
        scales = (K_SCALE, V_SCALE) if self.is_fp8 else None
        out = self.kernels.attend(q, page_size=view.page_size, hnd=self.hnd, scales=scales, **given)
        begin = 0
        for sequence, new, first in zip(sequences, news, firsts):
            whole = np.concatenate((self.text[sequence], new))
            both = [self.stored(one, scale) for one, scale in zip(self.rows(layer, whole, 0), (K_SCALE, V_SCALE))]
            at = torch.arange(first, len(whole), device=q.device)
            want = dense(q[begin : begin + len(new)], *both, at, window)
            torch.testing.assert_close(out[begin : begin + len(new)].float(), want, atol=0.02, rtol=0.02)
            begin += len(new)

    def life(self) -> int:
        """Serve requests that share a beginning, chunk by chunk and then token by token; return how many tokens of prompts
        were found in the cache."""
        random = np.random.default_rng(0)
        new = partial(random.integers, 1, VOCAB, dtype=np.int32)
        base = new(75)
        prompts = [base, np.r_[base[:66], new(20)], new(9)]
        sequences = [self.open(prompts[0])]
        self._chunk(sequences, [prompts[0]])
        sequences += [self.open(prompt) for prompt in prompts[1:]]
        found = sum(sequence.cached_tokens for sequence in sequences)
        self._chunk(sequences[1:], [prompt[one.length :] for prompt, one in zip(prompts[1:], sequences[1:])])
        for n in (17, 40):  # windows slide, and blocks that nobody holds are NaN
            self._chunk(sequences, [new(n + 3 * i) for i in range(3)])
        running = self.cache.persistent_batch(sequences, num_rows=4)
        for _ in range(3):
            batch, tokens = running.extend(), new(3)
            self.step(sequences, [tokens[i : i + 1] for i in range(3)], batch)
            running.commit(tokens)
        self.cache.check()
        return found

    def _chunk(self, sequences: list[Sequence], news: list[Tokens]) -> None:
        self.step(sequences, news)
        for sequence, new in zip(sequences, news):
            sequence.commit(new)


@pytest.mark.parametrize(("block_size", "layout", "kv_format", "settings"), CASES)
def test_a_kernel_reads_what_was_written(
    kernels: Kernels, block_size: int, layout: str | None, kv_format: str, settings: dict[str, Any]
) -> None:
    assert Texts(kernels, block_size, layout, kv_format, settings).life() >= 64


SPOILS: dict[str, Callable[[dict[str, Any]], None]] = {
    "another page": lambda given: given.update(pages=(given["pages"][0], given["pages"][1].roll(1), given["pages"][2])),
    "a page of K": lambda given: given.update(k=given["k"].roll(1, 0)),
    "a row of V": lambda given: given.update(v=given["v"].roll(1, 1)),
    "heads": lambda given: given.update(k=given["k"].flip(2)),
    "the length": lambda given: given.update(pages=(*given["pages"][:2], given["pages"][2] - 1)),
    "a stride": lambda given: given.update(
        k=given["k"].as_strided(given["k"].shape, torch.empty_like(given["k"]).stride())
    ),
    "the window": lambda given: given.update(window=given["window"] - 1),
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_what_is_wrong_is_seen(spoil: str) -> None:
    texts = Texts(StandIn(), 16, None, "raw", {})
    texts.spoil = SPOILS[spoil]
    with pytest.raises(AssertionError, match="close"):
        texts.life()


@pytest.mark.parametrize(("block_size", "layout", "kv_format", "settings"), CASES[:4])
def test_appends_of_a_kernel_are_the_bytes_of_write(
    kernels: Kernels, block_size: int, layout: str | None, kv_format: str, settings: dict[str, Any]
) -> None:
    texts = Texts(kernels, block_size, layout, kv_format, settings)
    sequences = [texts.open(np.arange(1, n, dtype=np.int32)) for n in (60, 18)]
    pieces = [np.arange(1, n, dtype=np.int32) for n in (60, 18)]
    for _ in range(2):
        for sequence, piece in zip(sequences, pieces):
            sequence.extend(len(piece))
        batch = texts.cache.batch(sequences, [len(piece) for piece in pieces])
        for layer in (0, 1):
            view = batch.layer(layer)
            rows = [texts.rows(layer, piece, one.length) for piece, one in zip(pieces, sequences)]
            k, v = (torch.cat(one) for one in zip(*rows))
            memory = torch.empty(0, dtype=torch.uint8, device=kernels.device).set_(view["k"].untyped_storage())
            before = memory.clone()
            view.write(k=k, v=v)
            written = memory.clone()
            assert not torch.equal(written, before)
            memory.copy_(before)
            if texts.is_fp8:
                k, v = ((one.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn) for one, scale in
                        ((k, K_SCALE), (v, V_SCALE)))  # fmt: skip
            tensors, of = view.kernel_tensors("flashinfer-append"), batch.step.request_ids
            pages = view.kv_indptr, view.kv_indices[: int(view.kv_indptr[-1])], view.kv_last_page_len
            places = (batch.positions - view.kv_start[of.long()]).int()
            kernels.append(k, v, of, places, tensors["k"], tensors["v"], pages, texts.hnd)
            assert torch.equal(memory, written)
        for sequence, piece in zip(sequences, pieces):
            sequence.commit(piece)


def is_visible(
    asks: Tensor, at: Tensor, owner: Tensor, place: Tensor, window: int, _b: Tensor, _h: Tensor, i: Tensor, j: Tensor
) -> Tensor:
    """Whether new token ``i`` sees row ``j`` of the memory."""
    behind = at[i] - place[j]
    return (owner[j] == asks[i]) & (behind >= 0) & (behind <= window)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_flex_attention_reads_pages_in_place(device: str) -> None:
    """All pages of a layer are its K and V, and the mask says which token lies in each row: none of another request."""
    stand_in = StandIn()
    stand_in.device = device
    texts = Texts(stand_in, 16, None, "raw", {"order": "layer", "poison": False})
    random = np.random.default_rng(1)
    sequences = [texts.open(random.integers(1, VOCAB, n, dtype=np.int32)) for n in (70, 33)]
    news = [random.integers(1, VOCAB, n, dtype=np.int32) for n in (70, 33)]
    batch = texts.cache.batch(sequences, [70, 33])
    attend = torch.compile(flex_attention) if device == "cuda" else flex_attention
    asks, at = batch.step.request_ids.long(), batch.positions.long()
    for layer, window in ((0, WINDOW - 1), (1, EVER)):
        view = batch.layer(layer)
        k, v = (torch.cat(one) for one in zip(*(texts.rows(layer, new, 0) for new in news)))
        view.write(k=k, v=v)
        q = torch.randn(len(k), HEADS, DIM, generator=texts.random).to(device, torch.bfloat16)
        pages = [view[name].flatten(0, 1).transpose(0, 1)[None] for name in "kv"]
        assert [page.data_ptr() for page in pages] == [view[name].data_ptr() for name in "kv"], "not a copy"
        owner, place = (torch.full((pages[0].shape[2],), -1, device=device) for _ in range(2))
        slots = view.slot_mapping.long()
        owner[slots], place[slots] = asks, at
        visible = partial(is_visible, asks, at, owner, place, window)
        mask = create_block_mask(visible, None, None, len(q), pages[0].shape[2], device=device)
        out = attend(q.transpose(0, 1)[None], *pages, block_mask=mask, enable_gqa=True)
        begin = 0
        for new in news:
            want = dense(
                q[begin : begin + len(new)], *texts.rows(layer, new, 0), torch.arange(len(new), device=device), window
            )
            got = out[0].transpose(0, 1)[begin : begin + len(new)].float()
            torch.testing.assert_close(got, want, atol=0.02, rtol=0.02)
            begin += len(new)
