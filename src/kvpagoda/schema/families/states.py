"""Rules for the state of a layer: convolution tails and recurrent matrices. ``model_types.json`` names these functions.

Shapes are those of transformers' caches without the batch axis, so that a model can copy its tensors into ours
unchanged, whatever the order in memory. Convolution tails have ``kernel - 1`` columns, because the oldest of
transformers' ``kernel`` columns is never read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvpagoda.errors import SchemaError
from kvpagoda.layouts.pages import page_choice
from kvpagoda.schema.config import Config
from kvpagoda.schema.families.heads import swa
from kvpagoda.schema.fields import Rows

StateRule = Callable[[Config, str], tuple[Rows, ...]]


def conv(heads: tuple[tuple[int, int], ...], columns: int, dtype: str) -> Rows:
    """Return a convolution tail ``[channels, columns]``, oldest column first. ``heads``: (number, channels) runs."""
    return Rows("conv", (sum(number * width for number, width in heads), columns), dtype, heads=heads, axes=("C", "W"))


def recurrent(*shape: int, dtype: str = "float32", axes: tuple[str, ...] = (), layout: str = "") -> Rows:
    """Return a recurrent state of ``shape``, heads or channels first; float32 by default, whatever the model's dtype.

    ``axes``: the letters of its axes in layouts. ``layout``: name of its layout, if its order in memory is not that of
    the axes.
    """
    page = page_choice(layout).pages["recurrent"] if layout else ""
    return Rows("recurrent", shape, dtype, heads=((shape[0], 1),), page=page, axes=axes)


def delta(heads: int, key_dim: int, value_dim: int) -> Rows:
    """Return the state matrices of a delta net, ``[heads, key, value]`` for the model.

    In memory the key axis is innermost, because nearly all kernels read it so.
    """
    return recurrent(heads, key_dim, value_dim, axes=("H", "K", "V"), layout="gdn-state-vk")


def inner_channels(c: Config) -> tuple[int, int]:
    """Return (heads, channels per head) of a state space model.

    All heads together have ``state_channels`` channels; ``expand * hidden_size`` if that field is null or the family
    names none. One head if the family has no field ``state_heads``. Raises SchemaError.
    """
    channels = c.size("expand") * c.size("hidden_size") if c.get("state_channels") is None else c.size("state_channels")
    number = c.size("state_heads") if "state_heads" in c.fields else 1
    if channels % number:
        text = f"{channels} channels cannot be divided into {c.spelled('state_heads')} = {number}"
        raise SchemaError(text, field=c.spelled("state_heads"), needed=number, available=channels)
    return number, channels // number


def mamba1(c: Config, dtype: str) -> tuple[Rows, ...]:
    """Mamba, a selective state space model (arXiv 2312.00752). For its channels see ``inner_channels``."""
    number, width = inner_channels(c)
    shape = (number, width) if "state_heads" in c.fields else (width,)
    return conv(((number * width, 1),), c.size("conv_kernel") - 1, dtype), recurrent(*shape, c.size("state_size"))


def mamba2(c: Config, dtype: str) -> tuple[Rows, ...]:
    """Mamba-2 (arXiv 2405.21060): the convolution runs over values and both projections of every group.

    If ``state_head_dim`` is null or "auto", the ``inner_channels`` are divided over the heads.
    """
    if c.get("state_head_dim") in (None, "auto"):
        number, width = inner_channels(c)
    else:
        number, width = c.size("state_heads"), c.size("state_head_dim")
    projection = (c.size("state_groups"), c.size("state_size"))
    tail = conv(((number, width), projection, projection), c.size("conv_kernel") - 1, dtype)
    return tail, recurrent(number, width, c.size("state_size"), axes=("H", "D", "R"))


def gated_delta(c: Config, dtype: str) -> tuple[Rows, ...]:
    """Gated delta net (arXiv 2412.06464): one convolution over queries, keys and values, and a matrix per value head.

    The matrices are ``[key, value]``.
    """
    keys = (c.size("linear_num_key_heads"), c.size("linear_key_head_dim"))
    values = (c.size("linear_num_value_heads"), c.size("linear_value_head_dim"))
    tail = conv((keys, keys, values), c.size("linear_conv_kernel_dim") - 1, dtype)
    return tail, delta(values[0], keys[1], values[1])


def olmo_hybrid(c: Config, dtype: str) -> tuple[Rows, ...]:
    """A gated delta net; sizes that the config does not name are derived from those of attention."""
    heads = c.size("num_attention_heads")
    key_heads = c.size_or("linear_num_key_heads", heads)
    key_dim = c.size_or("linear_key_head_dim", 3 * c.size("hidden_size") // (4 * key_heads))
    derived = c.replaced(
        linear_num_key_heads=key_heads,
        linear_num_value_heads=c.size_or("linear_num_value_heads", heads),
        linear_key_head_dim=key_dim,
        linear_value_head_dim=c.size_or("linear_value_head_dim", 2 * key_dim),
    )
    return gated_delta(derived, dtype)


def kimi_delta(c: Config, dtype: str) -> tuple[Rows, ...]:
    """Kimi delta attention (arXiv 2510.26692)."""
    number, width = c.size("linear_num_heads"), c.size("linear_head_dim")
    tail = conv(((number, width),) * 3, c.size("linear_conv_kernel_dim") - 1, dtype)
    return tail, delta(number, width, width)


def qwen4_exp(c: Config, dtype: str) -> tuple[Rows, ...]:
    """A gated delta net, with n-grams of tokens in the layers that ``ple_layer_ids`` lists, counted from 1.

    The n-grams are a dilated convolution, of which all columns are read, and the last tokens themselves.
    """
    states = gated_delta(c, dtype)
    if c.get("layer") + 1 not in c.indices("ple_layer_ids"):
        return states
    size, streams = c.size("ngram_size", 2), c.size("hc_count")
    columns = (c.size("ple_conv_kernel_size", 2) - 1) * size
    n_grams = Rows("conv_1", (streams * c.size("hidden_size"), columns), dtype)
    return *states, n_grams, Rows("conv_2", (size - 1,), "int64")


def short_convolution(c: Config, dtype: str) -> tuple[Rows, ...]:
    """The tail of one short convolution over the hidden state."""
    return (conv(((c.size("hidden_size"), 1),), c.size("conv_L_cache", 2) - 1, dtype),)


def zaya(c: Config, dtype: str) -> tuple[Rows, ...]:
    """Two successive convolutions over queries and keys, which read all kept columns; half of the last value row."""
    width, keys = c.size("head_dim"), c.size("num_key_value_heads")
    columns = c.size("cca_time0") + c.size("cca_time1") - 2
    tail = conv(((c.size("num_attention_heads"), width), (keys, width)), columns, dtype)
    return tail, recurrent(keys * width // 2, dtype=dtype)


def lightning(c: Config, dtype: str) -> tuple[Rows, ...]:
    """Lightning attention (arXiv 2501.08313): a ``[key, value]`` matrix per head, in the model's dtype."""
    heads = c.size("num_attention_heads")
    width = c.size("hidden_size") // heads if c.get("head_dim") is None else c.size("head_dim")
    return (recurrent(heads, width, width, dtype=dtype),)


def griffin(c: Config, dtype: str) -> tuple[Rows, ...]:
    """A convolution and the real-gated linear recurrent unit after it (arXiv 2402.19427)."""
    width = c.size_or("lru_width", c.size("hidden_size"))
    return conv(((width, 1),), c.size("conv1d_width") - 1, dtype), recurrent(width)


def inkling(c: Config, dtype: str) -> tuple[Rows, ...]:
    """Four convolutions in float32: over keys, values, and the outputs of attention and of the feed-forward part."""
    heads, columns = swa(c, c.get("layer_type")), c.size("conv_kernel_size", 2) - 1
    kept = ((heads.number, heads.k_dim), (heads.number, heads.v_dim), *(((c.size("hidden_size"), 1),) * 2))
    tails = [conv((each,), columns, "float32") for each in kept]
    return tuple(replace(tail, name=f"conv_{i}" if i else "conv") for i, tail in enumerate(tails))


def rwkv(c: Config, dtype: str) -> tuple[Rows, ...]:
    """RWKV-4 (arXiv 2305.13048): the previous token's row, once for the feed-forward part and once for attention.

    In addition, for each channel in float32: a sum of values, a sum of weights, and the largest exponent so far.
    """
    hidden, channels = c.size("hidden_size"), c.size_or("attention_hidden_size", c.size("hidden_size"))
    shifts = (Rows(f"{part}_shift", (hidden,), dtype) for part in ("feed_forward", "attention"))
    sums = Rows("values", (channels,), "float32", heads=((channels, 1),))
    return *shifts, sums, replace(sums, name="weights"), replace(sums, name="exponent", fill=-1e30)


def rwkv7(c: Config, dtype: str) -> tuple[Rows, ...]:
    """RWKV-7 (arXiv 2503.14456): the previous token's row, for the feed-forward part and for attention, and a matrix
    per head in float32."""
    shifts = (Rows(f"{part}_shift", (c.size("hidden_size"),), dtype) for part in ("feed_forward", "attention"))
    width = c.size("head_dim")
    return *shifts, delta(c.ratio("hidden_size", "head_dim"), width, width)


def xlstm(c: Config, dtype: str) -> tuple[Rows, ...]:
    """xLSTM (arXiv 2405.04517, section 2.3): each head's matrix memory, its normaliser and its largest exponent so far.

    All heads together are ``hidden_size`` times a factor wide. Raises SchemaError if the heads do not divide that
    evenly.
    """
    heads = c.size("num_heads")

    def width(factor: str) -> int:
        return c.replaced(width=int(c.size("hidden_size") * c.get(factor))).ratio("width", "num_heads")

    keys, values = width("qk_dim_factor"), width("v_dim_factor")
    shapes = {"memory": (keys, values), "normaliser": (keys,), "exponent": (1,)}
    return tuple(Rows(name, (heads, *shape), dtype, heads=((heads, 1),)) for name, shape in shapes.items())
