"""The modules of a transformers model that update states, run in pieces so that more states than the last can be kept.

A module returns the states after the last token of a pass. Where a rewind may go back to the tokens before it, the states
after each of the last tokens of the pass are needed, and where a checkpoint is due inside the pass, those at that position:
the module, and no other, then runs several times in the pass:

    the pass              t0 t1 t2 t3 t4 t5 t6 t7 t8          states are needed after t5, t6, t7 and t8
    a state module       [t0 t1 t2 t3 t4 t5][t6][t7][t8]      four calls, as a prompt and then three tokens would make
    all other modules    [t0 t1 t2 t3 t4 t5 t6 t7 t8]

So the states, and what the module returns, are those of plain decoding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from kvpagoda.schema import Recurrent, Schema

Tensor = torch.Tensor
_UPDATES = {"update_conv_state", "update_recurrent_state", "set_linear_cache"}
"""The methods of transformers' caches by which a module hands over new states."""


class StateModules:
    """The modules of ``model`` that update the states of the layers of ``schema``.

    ``holders``: layer -> the module that holds the layer's states itself between calls. ``are_known``: whether each layer
    with recurrent or convolution states has one module that updates them, and can run in pieces. ``resume``: whether pieces
    of several tokens may begin anywhere in a text; else only at its beginning, see ``ModelRunner.most_tokens``.
    ``can_leave``: whether a pass can leave all states of its texts at any position.
    """

    def __init__(self, model: Any, schema: Schema) -> None:
        wanted = {layer.index for layer in schema.layers if any(isinstance(kind, Recurrent) for kind in layer.kinds)}
        self.holders: dict[int, Any] = {
            index: part
            for index, layer in enumerate(getattr(model.base_model, "layers", ()))
            for part in layer.modules()
            if hasattr(part, "conv1d_state")
        }
        found: dict[int, list[Any]] = {index: [part] for index, part in self.holders.items()}
        for part in model.modules():
            if (index := getattr(part, "layer_idx", None)) in wanted and _names_in(type(part)) & _UPDATES:
                found.setdefault(index, []).append(part)
        scans = [part for part in model.modules() if hasattr(part, "A_log")]
        self.resume = not self.holders and not any(
            hasattr(part, "x_proj") or hasattr(part, "x_proj_weight") for part in scans
        )
        self.are_known = all(len(found.get(index, ())) == 1 for index in wanted)
        kept = {kind for layer in schema.layers for kind in layer.kinds if kind.state_rows()}
        only_these = bool(wanted) and all(isinstance(kind, Recurrent) for kind in kept)
        self.can_leave = self.are_known and self.resume and only_these
        self._modules = {index: found[index][0] for index in wanted} if self.are_known else {}

    @contextmanager
    def in_pieces(self, num_tokens: int, ends: Many[int], left: Callable[[int, int], None]) -> Iterator[None]:
        """Inside this context, in which a pass of ``num_tokens`` tokens a row runs, each module runs in pieces that end after
        the first ``ends`` tokens of the rows, ascending and below ``num_tokens``, and one for the rest. After the piece of
        layer ``l`` that ends after ``n`` tokens, but not after the last, ``left(l, n)`` is called."""
        if not ends:
            yield
            return
        spans = [slice(begin, end) for begin, end in zip((0, *ends), (*ends, num_tokens))]
        with ExitStack() as stack:
            for index, part in self._modules.items():
                own = part.forward
                if "forward" in vars(part):
                    stack.callback(setattr, part, "forward", own)
                else:
                    stack.callback(delattr, part, "forward")
                part.forward = _in_pieces(own, num_tokens, spans, partial(left, index))
            yield


def _in_pieces(own: Any, num_tokens: int, spans: list[slice], left: Callable[[int], None]) -> Callable[..., Any]:
    """Return a ``forward`` that calls ``own`` for each of ``spans`` of its ``num_tokens`` tokens."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        pieces = []
        for span in spans:
            part = {name: _cut(value, num_tokens, span) for name, value in kwargs.items()}
            pieces.append(own(*[_cut(value, num_tokens, span) for value in args], **part))
            if span.stop < num_tokens:
                left(span.stop)
        if isinstance(pieces[0], tuple):
            return tuple(_joined(each, spans) for each in zip(*pieces))
        return _joined(pieces, spans)

    return forward


def _cut(value: Any, num_tokens: int, span: slice) -> Any:
    """Return the part of an argument that belongs to the tokens ``span``: of tensors ``[B, num_tokens, ..]`` and
    ``[num_tokens]``, also in tuples; anything else as it is."""
    if isinstance(value, tuple):
        return tuple(_cut(one, num_tokens, span) for one in value)
    if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == num_tokens:
        return value[:, span]
    if isinstance(value, Tensor) and value.ndim == 1 and len(value) == num_tokens:
        return value[span]
    return value


def _joined(parts: Many[Any], spans: list[slice]) -> Any:
    """Return what a module would have returned for all tokens: tensors ``[B, tokens, ..]`` one after another; the last
    of anything else."""
    lengths = [span.stop - span.start for span in spans]
    if all(isinstance(one, Tensor) and one.ndim > 1 and one.shape[1] == n for one, n in zip(parts, lengths)):
        return torch.cat(list(parts), dim=1)
    return parts[-1]


def _names_in(kind: type) -> set[str]:
    """Return the names that the methods of a module's class use."""
    methods = (inspect.unwrap(one) for base in kind.__mro__ for one in vars(base).values() if inspect.isfunction(one))
    return {name for method in methods for name in method.__code__.co_names}
