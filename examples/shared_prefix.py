"""Read what rows share once: a group of 16 samples of one prompt, and agents with one system prompt, in one decode step.

``batch.shared_prefix`` returns the arguments of FlashInfer's ``MultiLevelCascadeAttentionWrapper.plan``. Here a class with the
same calls computes on a CPU: attention over the run of each level, and the merge of the results. With a GPU, use
``from flashinfer import MultiLevelCascadeAttentionWrapper`` in its place.

    python examples/shared_prefix.py
"""

from __future__ import annotations

import torch

from kvpagoda import Batch, KVCache, Schema, Sequence

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16
CONFIG = dict(
    model_type="llama", num_hidden_layers=1, hidden_size=512, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
    head_dim=DIM, vocab_size=1000, torch_dtype="float32",
)  # fmt: skip


class MultiLevelCascadeAttentionWrapper:
    """The calls of FlashInfer's class of this name, for NHD pages and a step of any number of tokens a row."""

    def __init__(self, num_levels: int) -> None:
        self.num_levels = num_levels

    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, heads, kv_heads, dim, page_size, causal=False):
        self.levels = [*zip(qo_indptr, kv_indptr, kv_indices, kv_last_page_len, strict=True)]
        self.page_size, self.causal = page_size, causal
        assert len(self.levels) == self.num_levels

    def run(self, q, kv):
        """``q``: ``[T, heads, dim]``; ``kv``: (k, v), each ``[pages, page size, kv heads, dim]``. Returns the shape of q."""
        out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf)
        for level in self.levels:
            its_out, its_lse = self._attend(q, kv, level, self.causal and level is self.levels[-1])
            both = torch.logaddexp(lse, its_lse)
            out = out * (lse - both).exp()[..., None] + its_out * (its_lse - both).exp()[..., None]
            lse = both
        return out

    def _attend(self, q, kv, level, causal):
        """Attention of each segment of ``level`` over its run alone, and the logarithm of its sum of exponentials."""
        out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf)
        qo, indptr, indices, last = level
        for i, (begin, end) in enumerate(zip(qo.tolist(), qo[1:].tolist())):
            pages = indices[indptr[i] : indptr[i + 1]].long()
            n = (len(pages) - 1) * self.page_size + int(last[i])
            if not len(pages):
                continue
            k, v = (one[pages].flatten(0, 1)[:n].repeat_interleave(q.shape[1] // one.shape[2], 1) for one in kv)
            scores = torch.einsum("thd,nhd->thn", q[begin:end], k) / q.shape[2] ** 0.5
            if causal:
                behind = torch.arange(end - begin)[:, None] + n - (end - begin)
                scores.masked_fill_((torch.arange(n) > behind)[:, None], -torch.inf)
            out[begin:end] = torch.einsum("thn,nhd->thd", scores.softmax(-1), v)
            lse[begin:end] = scores.logsumexp(-1)
        return out, lse


def computed(cache: KVCache, text: list[int]) -> Sequence:
    """Open ``text``, and compute what is not cached of it: here random rows are written."""
    sequence = cache.open(text, reserve=len(text) + 8)
    n = len(text) - sequence.length
    cache.batch([sequence], [n]).layer(0).write(k=torch.randn(n, KV_HEADS, DIM), v=torch.randn(n, KV_HEADS, DIM))
    sequence.commit(text[-n:])
    return sequence


def running(cache: KVCache) -> list[Sequence]:
    """Return 16 samples of one prompt of 200 tokens, and 8 agents, in 4 teams of 2, whose texts begin with one system
    prompt of 400 tokens and go on with 100 tokens of their team; mixed, as requests arrive."""
    first = computed(cache, [7] * 200)
    samples = [first, *(first.fork(reserve=208) for _ in range(15))]
    agents = [computed(cache, [8] * 400 + [20 + i // 2] * 100 + [100 + i] * 30) for i in range(8)]
    return [one for i in range(8) for one in (agents[i], *samples[2 * i : 2 * i + 2])]


def attention(batch: Batch, q: torch.Tensor, num_levels: int) -> tuple[torch.Tensor, int]:
    """Return attention of the step's new tokens ``q`` over the cache, and how many pages were read for it."""
    view, shared = batch.layer(0), batch.shared_prefix(0, num_levels)
    wrapper = MultiLevelCascadeAttentionWrapper(num_levels)
    wrapper.plan(*shared[:4], HEADS, KV_HEADS, DIM, view.page_size, causal=True)
    order = slice(None) if shared.order is None else shared.order
    out = torch.empty_like(q)
    out[order] = wrapper.run(q[order], (view["k"], view["v"]))  # rows that share are adjacent in the levels
    return out, sum(len(indices) for indices in shared.kv_indices)


def main() -> dict[str, int | float]:
    torch.manual_seed(0)
    cache = KVCache(Schema.from_hf_config(CONFIG), "4MiB", device="cpu", block_size=PAGE, max_requests=24)
    sequences = running(cache)
    for sequence in sequences:
        sequence.extend(1)
    batch = cache.batch(sequences, [1] * len(sequences))
    view, n = batch.layer(0), len(sequences)
    view.write(k=torch.randn(n, KV_HEADS, DIM), v=torch.randn(n, KV_HEADS, DIM))  # of the new tokens, before attention
    q = torch.randn(n, HEADS, DIM)
    plain, read = attention(batch, q, 1)  # one level: what each row reads, by itself
    assert read == len(view.kv_indices)
    results: dict[str, int | float] = {"rows": n, "pages, without levels": read}
    worst = 0.0
    for num_levels in (2, 3):
        out, results[f"pages, {num_levels} levels"] = attention(batch, q, num_levels)
        worst = max(worst, float((out - plain).abs().max()))
    results["largest difference"] = worst
    for name, value in results.items():
        print(f"{name:>22}  {value}")
    assert worst < 1e-5
    for sequence in sequences:
        sequence.close()
    cache.check()
    return results


if __name__ == "__main__":
    main()
