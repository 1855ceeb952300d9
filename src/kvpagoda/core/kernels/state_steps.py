"""Recurrent and convolution states, one token after another, with the state after each token in a place of its own.

    row    reads  its state      place 5                    tokens t0 t1 t2, of which t1 and t2 are drafts
           leaves the states  after t0 in place 8,  after t1 in place 2,  after t2 in place 9

If one draft is accepted, the next step reads place 2: nothing is copied or computed again. ``reads``, ``writes`` and
``indptr`` are ``state_indices``, ``state_writes`` and ``qo_indptr`` of a ``Batch``. A state is read once, before any is
written, since the last place that a row writes may be the one that it reads.

These are the references for engine authors: ``conv_steps`` (causal convolutions), ``ssd_steps`` (Mamba-2) and
``delta_steps`` (gated delta nets, Kimi delta attention), which has a Triton kernel too. A long row, such as a part of a
prompt, is better computed by a scan of all but its last ``places - 1`` tokens, and then by these.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvpagoda.core.kernels.dispatch import backend, jit, tl, triton
from kvpagoda.errors import BadInput

Tensor = torch.Tensor
VALUES = 32
"""Number of columns of a matrix that one program of the Triton kernel keeps."""


def conv_steps(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, reads: Tensor, writes: Tensor, indptr: Tensor
) -> Tensor:
    """Return a causal convolution over the tokens of each row, ``[T, C]``, and leave the tails of it in ``states``.

    The activation is the caller's. O(T * C * W).

    Args:
        x: ``[T, C]``, the new tokens, one row after another.
        weight: ``[C, W]``.
        bias: ``[C]`` or None.
        states: ``[records, C, W - 1]``, the last columns before a token, oldest first; may be strided.
        reads: int ``[B]``, see the file.
        writes: int ``[B, places]``, see the file.
        indptr: int ``[B + 1]``, see the file.

    Raises:
        BadInput: a tensor has a wrong shape, dtype or device; nothing is written.

    Examples:
        >>> states, table = torch.zeros(4, 1, 2), torch.tensor([[2, 3, 1]])
        >>> x, ends = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 3])
        >>> conv_steps(x, torch.tensor([[100.0, 10.0, 1.0]]), None, states, torch.tensor([1]), table, ends).flatten()
        tensor([  1.,  12., 123.])
        >>> states[[2, 3, 1]].flatten(1).tolist()  # after one, two and three tokens
        [[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]]
    """
    _check(states, (x.shape[-1], weight.shape[-1] - 1), x, reads, writes, indptr)
    now, out = states[reads.long()].to(x.dtype), torch.empty_like(x)
    for rows, tokens, kept, targets in _steps(writes, indptr):
        window = torch.cat((now[rows], x[tokens][..., None]), dim=-1)
        out[tokens] = (window * weight).sum(-1) + (0 if bias is None else bias)
        now[rows] = window[..., 1:]
        states[targets] = now[rows[kept]].to(states.dtype)
    return out


def ssd_steps(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    states: Tensor,
    reads: Tensor,
    writes: Tensor,
    indptr: Tensor,
) -> Tensor:
    """Return the outputs of a Mamba-2 layer (arXiv 2405.21060, section 3) without its skip, and leave its states.

        S = exp(dt a) S + (dt x) b^T         y = S c

    O(T * H * D * R).

    Args:
        x: ``[T, H, D]``.
        dt: ``[T, H]``, after its softplus.
        a: ``[H]``, negative.
        b: ``[T, H, R]``, those of a head's group.
        c: ``[T, H, R]``, those of a head's group.
        states: ``[records, H, D, R]``; may be strided; computed in their dtype, float32 as a rule.
        reads: int ``[B]``, see the file.
        writes: int ``[B, places]``, see the file.
        indptr: int ``[B + 1]``, see the file.

    Returns:
        ``[T, H, D]``.

    Raises:
        BadInput: a tensor has a wrong shape, dtype or device; nothing is written.
    """
    _check(states, (*x.shape[1:], b.shape[-1]), x, reads, writes, indptr)
    now, out = states[reads.long()], torch.empty_like(x)
    x, dt, b, c = (one.to(now.dtype) for one in (x, dt, b, c))
    for rows, tokens, kept, targets in _steps(writes, indptr):
        decay, new = (dt[tokens] * a).exp()[..., None, None], (dt[tokens][..., None] * x[tokens])[..., None]
        now[rows] = now[rows] * decay + new * b[tokens][..., None, :]
        out[tokens] = (now[rows] * c[tokens][..., None, :]).sum(-1).to(out.dtype)
        states[targets] = now[rows[kept]]
    return out


def delta_steps(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    states: Tensor, reads: Tensor, writes: Tensor, indptr: Tensor,
) -> Tensor:  # fmt: skip
    """Return the outputs of a gated delta net (arXiv 2412.06464, section 3.1), and leave its states.

        S = exp(g) S         S = S + k (beta (v - S^T k))^T         o = S^T q

    With Triton nothing is read back from the device, and the launch depends only on shapes, so a CUDA graph can capture
    it. O(T * H * K * V).

    Args:
        q: ``[T, H, K]``, normalised and scaled by the caller; those of a value head's key head.
        k: ``[T, H, K]``, normalised by the caller; likewise.
        v: ``[T, H, V]``.
        g: ``[T, H]``, the logarithm of the decay; ``[T, H, K]`` for each key channel (Kimi delta attention).
        beta: ``[T, H]``.
        states: ``[records, H, K, V]``; may be strided; computed in float32.
        reads: int ``[B]``, see the file.
        writes: int ``[B, places]``, see the file.
        indptr: int ``[B + 1]``, see the file.

    Returns:
        ``[T, H, V]``.

    Raises:
        BadInput: a tensor has a wrong shape, dtype or device; nothing is written.
    """
    _check(states, (*k.shape[1:], v.shape[-1]), v, reads, writes, indptr)
    run = _delta_triton if backend(v.device.type) == "triton" else _delta_reference
    return run(q, k, v, g if g.ndim == 3 else g[..., None], beta, states, reads, writes, indptr)


def _delta_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    states: Tensor, reads: Tensor, writes: Tensor, indptr: Tensor,
) -> Tensor:  # fmt: skip
    """The definition of ``delta_steps``, in torch, on any device."""
    now, out = states[reads.long()].float(), torch.empty_like(v)
    decay = g.float().exp()[..., None]
    q, k, v, beta = (one.float() for one in (q, k, v, beta))
    for rows, tokens, kept, targets in _steps(writes, indptr):
        old, key = now[rows] * decay[tokens], k[tokens][..., None]
        new = (v[tokens] - (old * key).sum(-2)) * beta[tokens][..., None]
        now[rows] = old + key * new[..., None, :]
        out[tokens] = (now[rows] * q[tokens][..., None]).sum(-2).to(out.dtype)
        states[targets] = now[rows[kept]].to(states.dtype)
    return out


def _steps(writes: Tensor, indptr: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield for each token of the longest row: the rows that have such a token, int64; the tokens; which of these rows,
    bool, keep the state after it; and the places for these, int64."""
    counts, begin, places = indptr.diff().long(), indptr[:-1].long(), writes.shape[1]
    for number in range(int(counts.max())):
        rows = (counts > number).nonzero()[:, 0]
        columns = number - (counts[rows] - places).clamp(min=0)
        kept = columns >= 0
        yield rows, begin[rows] + number, kept, writes[rows[kept], columns[kept]].long()


def _check(states: Tensor, record: tuple[int, ...], x: Tensor, reads: Tensor, writes: Tensor, indptr: Tensor) -> None:
    """Raise BadInput unless shapes and devices fit. ``record``: the shape of one state."""
    rows = len(reads)
    if (
        tuple(states.shape[1:]) != record or writes.ndim != 2 or len(writes) != rows or len(indptr) != rows + 1
        or any(one.device != x.device or one.is_floating_point() for one in (reads, writes, indptr))
        or states.device != x.device
    ):  # fmt: skip
        raise BadInput(
            f"states {[*states.shape]} are to be {['records', *record]}, reads {[*reads.shape]}, writes "
            f"{[*writes.shape]} and indptr {[*indptr.shape]} integers of as many rows, all on {x.device}",
            needed=[*states.shape],
        )


def _delta_triton(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    states: Tensor, reads: Tensor, writes: Tensor, indptr: Tensor,
) -> Tensor:  # fmt: skip
    """Launch the kernel, one program for each row, head and ``VALUES`` columns of its matrix."""
    q, k, v, g, beta, reads, writes = (one.contiguous() for one in (q, k, v, g, beta, reads, writes))
    (heads, keys), values, out = k.shape[1:], v.shape[-1], torch.empty_like(v)
    grid = len(reads), heads, triton.cdiv(values, VALUES)
    with torch.cuda.device_of(v):  # type: ignore[no-untyped-call]
        delta_steps_kernel[grid](
            q, k, v, g, beta, states, reads, writes, indptr, out, heads, keys, values, writes.shape[1], *states.stride(),
            KEYS=triton.next_power_of_2(keys), VALUES=VALUES, BY_KEY=g.shape[-1] > 1, num_warps=4,
        )  # fmt: skip
    return out


@jit()
def delta_steps_kernel(  # type: ignore[no-untyped-def]
    q, k, v, g, beta, states, reads, writes, indptr, out, heads, keys, values, places,
    record_stride, head_stride, key_stride, value_stride,
    KEYS: tl.constexpr, VALUES: tl.constexpr, BY_KEY: tl.constexpr,
):  # fmt: skip
    """Keep ``VALUES`` columns of the matrix of one row and head in registers, over the tokens of the row."""
    row, head = tl.program_id(0), tl.program_id(1)
    i, j = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    has_key, has_value = i < keys, j < values
    inside = has_key[:, None] & has_value[None, :]
    # To int64 before multiplying by the stride: a pool may have more than 2^31 elements.
    at = states + head * head_stride + i[:, None] * key_stride + j[None, :] * value_stride
    now = tl.load(at + tl.load(reads + row).to(tl.int64) * record_stride, mask=inside, other=0.0).to(tl.float32)
    begin, end = tl.load(indptr + row), tl.load(indptr + row + 1)
    first = tl.maximum(begin, end - places)  # the first token whose state is kept
    token = begin
    while token < end:
        here = token.to(tl.int64) * heads + head
        key = tl.load(k + here * keys + i, mask=has_key, other=0.0).to(tl.float32)
        query = tl.load(q + here * keys + i, mask=has_key, other=0.0).to(tl.float32)
        value = tl.load(v + here * values + j, mask=has_value, other=0.0).to(tl.float32)
        if BY_KEY:
            now = now * tl.exp(tl.load(g + here * keys + i, mask=has_key, other=0.0).to(tl.float32))[:, None]
        else:
            now = now * tl.exp(tl.load(g + here).to(tl.float32))
        new = (value - tl.sum(now * key[:, None], 0)) * tl.load(beta + here).to(tl.float32)
        now = now + key[:, None] * new[None, :]
        tl.store(out + here * values + j, tl.sum(now * query[:, None], 0).to(out.dtype.element_ty), mask=has_value)
        if token >= first:
            place = tl.load(writes + row * places + token - first).to(tl.int64)
            tl.store(at + place * record_stride, now.to(states.dtype.element_ty), mask=inside)
        token += 1
