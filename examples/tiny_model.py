"""A transformer of two layers for the examples: a sliding window, then full attention, with random weights.

Every logit depends on every row that the attention reads through the block table, so that a wrong row gives a wrong
token. Weights and arithmetic are float64, the cache is float32. The result of a request therefore does not depend on
the other requests in the same step. A real engine has CUDA kernels in place of ``attend_each``, with the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from kvpagoda import Batch, KVCache, LayerView, Schema, Sequence

VOCAB, WINDOW, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LONGEST = 61, 24, 32, 4, 2, 8, 512
torch.set_num_threads(1)

CONFIG = dict(
    model_type="gemma3_text", num_hidden_layers=2, hidden_size=HIDDEN, num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, vocab_size=VOCAB, sliding_window=WINDOW,
    layer_types=["sliding_attention", "full_attention"], max_position_embeddings=LONGEST,
)  # fmt: skip


class TinyModel:
    """``forward`` computes a step through a cache, ``recompute`` a whole text without one. Its weights are on ``device``."""

    def __init__(self, seed: int = 0, verify_width: int = 0, device: str = "cpu") -> None:
        self.schema = Schema.from_hf_config(CONFIG, dtype="float32", verify_width=verify_width)
        random = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=random).to(device)

        self.embedding, self.positions, self.head = drawn(VOCAB, HIDDEN), drawn(LONGEST, HIDDEN), drawn(HIDDEN, VOCAB)
        self.layers = [
            {
                "q": drawn(HIDDEN, HEADS * HEAD_DIM),
                "kv": drawn(HIDDEN, 2 * KV_HEADS * HEAD_DIM),
                "out": drawn(HIDDEN, HIDDEN),
            }
            for _ in self.schema.layers
        ]
        self.computed_tokens = 0

    def load(self, other: TinyModel) -> None:
        """Use the weights of ``other`` from now on."""
        self.embedding, self.positions, self.layers, self.head = (
            other.embedding,
            other.positions,
            other.layers,
            other.head,
        )

    def forward(
        self,
        batch: Batch,
        tokens: np.ndarray | torch.Tensor,
        attend: Callable[[torch.Tensor, LayerView], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Write the rows of the step's new ``tokens``, int ``[T]``, and return the logits after each: float64
        ``[T, VOCAB]``. ``attend``: another attention than ``attend_each``."""
        attend = attend or attend_each
        self.computed_tokens += len(tokens)
        x = self._embed(torch.as_tensor(tokens), batch.positions.long())
        for index, weights in enumerate(self.layers):
            view = batch.layer(index)
            q, k, v = _project(x, weights)
            view.write(k=k, v=v)
            x = x / 4 + attend(q, view) @ weights["out"]
        return x @ self.head

    def recompute(self, text: np.ndarray) -> torch.Tensor:
        """Return the logits after each token of ``text``, float64 ``[len(text), VOCAB]``, computed without a cache."""
        positions = torch.arange(len(text), device=self.head.device)
        x = self._embed(torch.as_tensor(text, device=self.head.device), positions)
        for layer, weights in zip(self.schema.layers, self.layers):
            q, k, v = _project(x, weights)
            assert layer.growth is not None
            x = x / 4 + _attend(q, k, v, layer.growth.reads(positions[:, None], positions)) @ weights["out"]
        return x @ self.head

    def _embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.embedding[tokens.long()] + self.positions[positions]


def attend_each(q: torch.Tensor, view: LayerView) -> torch.Tensor:
    """Compute paged attention in plain torch: ``q``, float64 ``[T, HEADS, HEAD_DIM]``, over the rows that the block
    table of ``view`` names. Returns float64 ``[T, HIDDEN]``."""
    out = torch.zeros(len(q), HIDDEN, dtype=torch.float64)
    ends, lengths = view.qo_indptr.tolist(), view.cache_seqlens.tolist()
    for row, length in enumerate(lengths):
        if length:  # 0: a padded row of the batch
            blocks = view.block_table[row, : -(-length // view.block_size)].long()
            k, v = (view[name][blocks].flatten(0, 1)[:length] for name in ("k", "v"))
            tokens = slice(ends[row], ends[row + 1])
            visible = view.layer.growth.reads(view.step.positions[tokens, None], torch.arange(length))
            out[tokens] = _attend(q[tokens], k, v, visible)
    return out


def _project(x: torch.Tensor, weights: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, float64 ``[n, HEADS, HEAD_DIM]``, and keys and values, float32 ``[n, KV_HEADS, HEAD_DIM]``, the
    dtype of the cache."""
    x = x / x.norm(dim=-1, keepdim=True)
    k, v = (x @ weights["kv"]).float().view(len(x), 2, KV_HEADS, HEAD_DIM).unbind(1)
    return (x @ weights["q"]).view(len(x), HEADS, HEAD_DIM), k, v


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Compute attention of ``q`` ``[n, HEADS, HEAD_DIM]`` over ``k``, ``v`` ``[rows, KV_HEADS, HEAD_DIM]`` where
    ``visible`` ``[n, rows]`` is True."""
    # rows that slid out of the window may hold NaN
    k, v = (rows.double().masked_fill(~visible.any(0)[:, None, None], 0) for rows in (k, v))
    q = q.view(len(q), KV_HEADS, -1, HEAD_DIM)
    scores = torch.einsum("nkgd,rkd->nkgr", q, k).masked_fill(~visible[:, None, None], -torch.inf)
    return torch.einsum("nkgr,rkd->nkgd", scores.softmax(-1), v).flatten(1)


def choose(logits: torch.Tensor, position: int, seed: int | None) -> int:
    """Return the token at ``position``: the best one, or, with a ``seed``, one sampled from the model's distribution.

    It depends only on the arguments. A draft can therefore be verified, and a preempted request continues as before."""
    if seed is not None:
        logits = logits + torch.as_tensor(np.random.default_rng((seed, position)).gumbel(size=VOCAB))
    return int(logits.argmax())


def go_on(
    model: TinyModel, cache: KVCache, sequence: Sequence, text: list[int], n: int, seed: int | None = None
) -> None:
    """Append ``n`` tokens to ``text``, and compute through ``sequence`` all tokens but the last of them."""
    for _ in range(n):
        known = np.array(text[sequence.length :], np.int32)
        sequence.extend(len(known))
        logits = model.forward(cache.batch([sequence], [len(known)]), known)
        sequence.commit(known)
        text.append(choose(logits[-1], len(text), seed))


def is_exact(model: TinyModel, text: np.ndarray, prompt_length: int, seed: int | None = None) -> bool:
    """Whether the model, without a cache, would have written ``text`` after its prompt."""
    logits = model.recompute(text[:-1])
    return all(choose(logits[i - 1], i, seed) == text[i] for i in range(prompt_length, len(text)))
