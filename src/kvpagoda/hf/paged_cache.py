"""A ``KVCache`` as the cache of a transformers model: for ``model.generate`` and your own decoding loops.

transformers runs a padded batch from its first token, and asks a cache for rows layer by layer. Here each row of the
batch is a sequence: its cached prefix is not computed, and later texts find what it computes. So a call of the model
with a ``PagedCache`` runs as a step of the ``Generator`` (``runner.py``), in place of the padded pass.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from types import MethodType
from typing import Any

import numpy as np
import torch
from transformers import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvpagoda import CacheStats, Sequence
from kvpagoda.arrays import Tokens, as_tokens
from kvpagoda.errors import BadInput
from kvpagoda.hf.cache_name import CACHE_NAMES, OUTPUT_NAME
from kvpagoda.hf.model_cache import check_model, commit_step, next_piece, runner_of
from kvpagoda.hf.rope_switch import media_past
from kvpagoda.hf.weights import WeightsWatch
from kvpagoda.schema.kv_format import KVFormatNames

Tensor = torch.Tensor
_READ = {"input_ids", "attention_mask", *CACHE_NAMES}
_PLAIN = {"position_ids", "cache_position", "use_cache", "return_dict", "logits_to_keep"}
"""Arguments that are accepted and ignored: positions are those of the texts, and only the last logits are returned."""


class Row:
    """One row of the batch. ``passed``: the switch of position encodings that its text has passed, see
    ``rope_switch``."""

    def __init__(self, sequence: Sequence, passed: int) -> None:
        self.sequence, self.passed = sequence, passed


class PagedCache(Cache):  # type: ignore[misc]
    """The cache of ``model``, for many calls of ``model.generate(ids, cache=cache)``.

    Every call of ``generate`` gives whole texts, padded on the left. Their tokens that are cached, from earlier rows of
    the batch or from earlier calls, are not computed again. Greedy tokens are those of ``generate`` without it.
    Sampling and beam search work; assisted generation, images and other inputs than token ids raise BadInput.

    Before it looks up a text it checks whether the model's weights changed. If they did, it invalidates what is cached,
    so that no row of older weights is used. ``kvpagoda.hf.weights.WeightsWatch`` says which changes it notices; after
    others call ``invalidate``. Rows of a batch that runs meanwhile continue, as they do in transformers' own caches.

    In your own loop, ``model(ids, cache=cache)``, the first call after ``reset`` starts texts, and each later call
    appends tokens to every row. ``logits`` are then ``[B, 1, vocab]``, those after the last token of each row, where
    transformers' own caches give ``[B, S, vocab]``: compare with ``logits[:, -1:]`` of these. ``labels`` and a loss are
    not supported. ``get_seq_length`` is always 0, so that ``generate`` passes whole texts. The constructor replaces
    ``forward``, ``prepare_inputs_for_generation`` and ``generate`` of this ``model`` object; with any other cache they
    do what they did before. They take it as ``cache`` or ``past_key_values`` in every version of transformers.

    Args:
        model: a transformers causal language model.
        budget: memory, bytes or text; ignored if ``cache_arguments``, the arguments of ``KVCache``, have
            ``num_blocks``. The cache must hold all rows of a batch at once (with beam search twice as many rows), and
            ``max_requests`` must allow them: else ``generate`` raises OutOfBlocks or RetryLater, and the cache stays
            usable.
        prefill_chunk: the most tokens of one text in one step.
        kv_format: see ``Schema.from_hf_config``.
        kv_scales: see ``Schema.from_hf_config``.
        **cache_arguments: all other arguments of ``KVCache``.

    Raises:
        BadInput: ``prefill_chunk`` is below 1, ``model`` is no transformers model or has an encoder, or an argument that
            ``KVCache`` refuses.
        SchemaError: a model with unknown layers.
        NeverFits: a budget too small for one request.

    Examples:
        >>> from kvpagoda.hf.embedded import embedded_model
        >>> model = embedded_model()
        >>> cache = PagedCache(model, "16MiB")
        >>> prompt = torch.tensor([list(b"a prompt that is the same " * 10)])
        >>> own = model.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0)
        >>> for _ in range(2):
        ...     ours = model.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0, cache=cache)
        ...     assert ours.tolist() == own.tolist()
        >>> cache.stats().cached_tokens >= 128  # found, not computed
        True
    """

    def __init__(
        self,
        model: Any,
        budget: int | str = "512MiB",
        *,
        prefill_chunk: int = 512,
        kv_format: KVFormatNames = "raw",
        kv_scales: Mapping[int, tuple[float, float]] | None = None,
        **cache_arguments: Any,
    ) -> None:
        if prefill_chunk < 1:
            raise BadInput(f"need prefill_chunk >= 1 tokens, got {prefill_chunk}", needed=prefill_chunk, available=1)
        sizes = cache_arguments if "num_blocks" in cache_arguments else {"budget": budget, **cache_arguments}
        check_model(model)
        if getattr(model.config, "is_encoder_decoder", False):
            text = f"{type(model).__name__} has an encoder, whose input generate() passes beside the texts"
            hint = "use kvpagoda.hf.Generator, whose submit takes encoder_input"
            raise BadInput.with_hint(text, hint, needed=type(model).__name__)
        _route(model)
        self._runner, _ = runner_of(model, prefill_chunk, 0, kv_format, sizes, kv_scales=kv_scales)
        self.model, self.cache = model, self._runner.cache
        self._weights = WeightsWatch(model, self.cache)
        self._chunk, self._rows = prefill_chunk, list[Row]()
        Cache.__init__(self, layers=[])

    # -- what transformers asks of a cache ---------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """The number of rows of the running batch, or -1 if none runs."""
        return len(self._rows) or -1

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def is_linear(self) -> list[bool]:
        """Not only layers with linear attention: of a cache without ``layers`` ``generate`` would take them to be all, and
        not ask for its length."""
        return [False]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The longest text, in tokens.

        Args:
            layer_idx: has no effect.
        """
        return self.cache.max_context

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Not for this cache: only another model than the cache's own calls this.

        Args:
            *args: transformers'.
            **kwargs: transformers'.

        Raises:
            BadInput: always.
        """
        raise self.error_of_another_model()

    def error_of_another_model(self) -> BadInput:
        """Return the error for a model that is given the cache of another model."""
        return BadInput(
            f"this PagedCache belongs to a {type(self.model).__name__}, another model or a copy of this one",
            needed=type(self.model).__name__,
        )

    def reset(self) -> None:
        """End the texts of the batch; they stay cached until they are evicted or ``invalidate`` is called. A new
        ``generate`` calls this by itself."""
        while self._rows:
            sequence = self._rows.pop().sequence
            if sequence.is_open:
                sequence.close()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row ``i`` continue the text of row ``beam_idx[i]``: blocks are shared, tails are copied.

        Args:
            beam_idx: int ``[rows]``.

        Raises:
            RetryLater: no slots or room for the copies; nothing changed.
        """
        chosen, forks, used = [self._rows[i] for i in beam_idx.tolist()], list[Sequence](), set[Row]()
        rows = list[Row]()
        try:
            for row in chosen:
                if row in used:
                    forks.append(row.sequence.fork())
                    rows.append(Row(forks[-1], row.passed))
                else:
                    used.add(row)
                    rows.append(row)
        except BaseException:
            for sequence in forks:
                sequence.close()
            raise
        for row in self._rows:
            if row not in used:
                row.sequence.close()
        self._rows = rows

    def activate_past_recording(self) -> None:
        raise BadInput(
            "assisted generation is not supported by PagedCache; kvpagoda.hf.Generator(lookup=..) verifies proposed tokens",
            needed="lookup",
        )

    def crop(self, tokens_to_remove: int) -> None:
        self.activate_past_recording()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Replace row ``i`` by copies, rows ``i * repeats`` and following; each copy then continues on its own.

        Args:
            repeats: copies of each row.
        """
        self.reorder_cache(torch.arange(len(self._rows)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only some rows.

        Args:
            indices: of the rows, in their new order.
        """
        self.reorder_cache(indices)

    # -- its steps ---------------------------------------------------------------------------------------------------

    def invalidate(self, weights: str | None = None) -> None:
        """Stop reuse of all that is cached, as the model computes other rows than before.

        Needed only after changes that are not noticed, see the class.

        Args:
            weights: see ``KVCache.invalidate``.
        """
        self._weights.invalidate(weights)

    def stats(self) -> CacheStats:
        """The cache's counters."""
        return self.cache.stats()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> CausalLMOutputWithPast:
        """Compute whole texts if no batch runs, else the next tokens of each row. On any error all rows end.

        Args:
            input_ids: ``[B, S]``.
            attention_mask: ``[B, S or more]``, 0 for padding on the left of whole texts.

        Returns:
            this cache, and ``logits`` float ``[B, 1, vocab]`` after the last token of each row.

        Raises:
            BadInput: ``input_ids`` or the mask has another shape than the running rows, a row is empty, or an id is
                outside of the vocabulary.
        """
        ids = input_ids.cpu().numpy()
        if ids.ndim != 2 or not ids.size or (self._rows and len(ids) != len(self._rows)):
            raise BadInput(
                f"expected token ids [{len(self._rows) or 'rows'}, tokens], got {list(ids.shape)}",
                needed=list(ids.shape),
            )
        try:
            if self._rows:
                logits = self._append([as_tokens(row) for row in ids])
            else:
                texts = _texts(ids, attention_mask)
                self._weights.follow()
                logits = torch.stack([self._begin(text) for text in texts])
        except BaseException:
            self.reset()
            raise
        return CausalLMOutputWithPast(logits=logits[:, None], **{OUTPUT_NAME: self})

    def _begin(self, text: Tokens) -> Tensor:
        """Add a row for ``text`` and compute it, without its cached prefix. Return the logits ``[vocab]`` after it."""
        row = self._open(text)
        self._rows.append(row)
        return self._compute(row, text)

    def _append(self, tokens: list[Tokens]) -> Tensor:
        """Append ``tokens[i]`` to each row ``i`` and compute them, in one step if each is one token. Return logits
        ``[B, vocab]``."""
        for i, (row, more) in enumerate(zip(self._rows, tokens)):
            if self._runner.switch.passed(row.sequence.length + len(more)) != row.passed:
                text = np.concatenate((row.sequence.tokens, more))
                row.sequence.close()  # all its cached rows were encoded for a shorter text
                self._weights.follow()
                self._rows[i] = self._open(text)
                tokens[i] = text[self._rows[i].sequence.length :]
        if any(len(more) > 1 for more in tokens):
            texts = [np.concatenate((row.sequence.tokens, more)) for row, more in zip(self._rows, tokens)]
            return torch.stack([self._compute(row, text) for row, text in zip(self._rows, texts)])
        sequences = [row.sequence for row in self._rows]
        for sequence in sequences:
            sequence.extend(1)
        logits = self._runner.step(list(zip(sequences, tokens)))
        for sequence, more in zip(sequences, tokens):
            sequence.commit(more)
        return logits

    def _open(self, text: Tokens) -> Row:
        passed = self._runner.switch.passed(len(text))
        return Row(self.cache.open(text, capacity=0, media=media_past(passed, int(text[0]))), passed)

    def _compute(self, row: Row, text: Tokens) -> Tensor:
        """Compute the tokens of ``text`` that are not committed, piece by piece. Return the logits ``[vocab]`` after
        it."""
        sequence = row.sequence
        while True:
            tokens = next_piece(self._runner, sequence, text, self._chunk)
            sequence.extend(len(tokens))
            logits = self._runner.step([(sequence, tokens)], lengths=[len(text)])
            commit_step(sequence, tokens)
            if sequence.length == len(text):
                return logits[0]


def _texts(ids: np.ndarray[Any, Any], attention_mask: Tensor | None) -> list[Tokens]:
    """Return the texts in ``ids`` ``[B, S]``, without padding on the left. Raises BadInput for other padding and for
    empty rows."""
    if attention_mask is None:
        return [as_tokens(row) for row in ids]
    real = attention_mask.cpu().numpy() != 0
    if real.shape != ids.shape:
        raise BadInput(f"the mask has shape {list(real.shape)}, the token ids {list(ids.shape)}: give whole texts")
    first = real.argmax(axis=1)
    for i, row in enumerate(real):
        if not row[-1] or not row[first[i] :].all():
            text = f"row {i} has padding that is not on the left; set the tokenizer's padding_side to 'left'"
            raise BadInput(text, needed=i)
    return [as_tokens(row[begin:]) for row, begin in zip(ids, first)]


# -- the model's own methods, wrapped -------------------------------------------------------------------------------


def _route(model: Any) -> None:
    """Wrap ``forward``, ``prepare_inputs_for_generation`` and ``generate`` of ``model``: given a PagedCache, they call it.
    The methods are bound, so that a copy of the model has its own. A second call does nothing. Raises BadInput."""
    routes = {"forward": _forward, "prepare_inputs_for_generation": _prepare, "generate": _generate}
    methods = {name: getattr(model, name, None) for name in routes}
    bound = {name: method for name, method in methods.items() if isinstance(method, MethodType)}
    replaced = [name for name in ("forward", "prepare_inputs_for_generation") if name not in bound]
    if replaced:
        text = f"{' and '.join(replaced)} of the {type(model).__name__} must be bound methods, but were replaced"
        raise BadInput(text, needed=replaced)
    for name, method in bound.items():
        if not hasattr(method, "is_kvpagoda_route"):
            setattr(model, name, MethodType(routes[name](method.__func__), model))


def _forward(own: Any) -> Any:
    """Return the wrapped ``forward`` of a model. ``own``: the original function."""
    _, *names = inspect.signature(own).parameters

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args)), **kwargs}
        cache = _given(given)
        if cache is None:
            return own(self, *args, **kwargs)
        if cache.model is not self:
            raise cache.error_of_another_model()
        unknown = [name for name, value in given.items() if name not in _READ | _PLAIN and _says_something(value)]
        if unknown or given.get("input_ids") is None:
            text = f"PagedCache takes input_ids alone; it was also given {sorted(unknown)}"
            raise BadInput(text, needed=sorted(unknown))
        return cache.forward(given["input_ids"], given.get("attention_mask"))

    forward.is_kvpagoda_route = True  # type: ignore[attr-defined]
    return forward


def _prepare(own: Any) -> Any:
    """Return the wrapped ``prepare_inputs_for_generation`` of a model: with a PagedCache it gives the whole texts in
    the first call, and then the newest tokens. ``own``: the original function."""

    @functools.wraps(own)
    def prepare(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = _given(kwargs)
        if cache is None:
            return own(self, input_ids, *args, **kwargs)
        mask, whole = kwargs.pop("attention_mask", None), kwargs.pop("next_sequence_length", None)
        if kwargs.pop("is_first_iteration", False):
            if whole is None and "attention_mask" in inspect.signature(self.forward).parameters:
                text = "PagedCache takes whole texts: do not set prefill_chunk_size, and do not give new tokens alone"
                raise BadInput(text, needed="whole texts")
            cache.reset()
            ids = input_ids
        else:
            ids = input_ids[:, -1:]  # even if the model's own settings say that it keeps no cache
        return {**kwargs, "input_ids": ids, OUTPUT_NAME: cache, "attention_mask": mask}

    taken = inspect.signature(own)
    if OUTPUT_NAME not in taken.parameters:  # generate reads the signature to check its arguments
        ours = inspect.Parameter(OUTPUT_NAME, inspect.Parameter.KEYWORD_ONLY, default=None)
        *before, last = taken.parameters.values()
        prepare.__signature__ = taken.replace(parameters=[*before, ours, last])  # type: ignore[attr-defined]
    prepare.is_kvpagoda_route = True  # type: ignore[attr-defined]
    return prepare


def _generate(own: Any) -> Any:
    """Return the wrapped ``generate`` of a model, which gives a PagedCache the name of the installed version. ``own``: the
    original function."""

    @functools.wraps(own)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = _given(kwargs)
        if cache is None:
            return own(self, *args, **kwargs)
        others = {name: value for name, value in kwargs.items() if value is not cache}
        return own(self, *args, **others, **{OUTPUT_NAME: cache})

    generate.is_kvpagoda_route = True  # type: ignore[attr-defined]
    return generate


def _given(kwargs: dict[str, Any]) -> PagedCache | None:
    """Return the PagedCache among the arguments of a model, or None."""
    caches = (kwargs.get(name) for name in CACHE_NAMES)
    return next((cache for cache in caches if isinstance(cache, PagedCache)), None)


def _says_something(value: Any) -> bool:
    """Whether an argument has an effect: None, False and a mapping with only such values have none."""
    if isinstance(value, Mapping):
        return any(_says_something(item) for item in value.values())
    return value is not None and value is not False
