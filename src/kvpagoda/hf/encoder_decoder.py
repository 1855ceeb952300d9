"""Runs encoder-decoders (Whisper, T5, BART) over a ``KVCache``: what cross-attention keeps is written once, by a step of its
own, and read by every step after it.

The text of a request is a token 0 for each position of its encoder's input, up to a whole block, and then the tokens of the
decoder. ``EncoderInput`` is such an input; its digest at the first of these tokens keeps texts with other inputs apart.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from transformers import Cache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from kvpagoda import Batch, KVCache, Sequence
from kvpagoda.arrays import Tokens, as_tokens
from kvpagoda.errors import BadInput, NeverFits, shown
from kvpagoda.hf.paged import GroupGather, PagedLayer, StepCache, StepContext, in_step
from kvpagoda.hf.runner import ModelRunner, Tensor, Work
from kvpagoda.schema.fields import FULL
from kvpagoda.units import align_up

FEATURES = "input_features"
"""The ``main_input_name`` of models whose encoder reads a sound; the others read token ids."""


class EncoderInput:
    """The input of an encoder: token ids without padding, or the features of one sound ``[bins, frames]``. Raises BadInput,
    NeverFits.

    ``inputs``: the arguments of the model's ``forward``. ``num_positions``: of the encoder's output, each of which has a row
    in every layer. ``num_tokens``: how many tokens stand for them in the text, whole blocks.
    """

    def __init__(self, model: Any, cache: KVCache, given: Any) -> None:
        positions = cache.schema.encoder_positions
        if model.main_input_name == FEATURES:
            features = torch.as_tensor(given, dtype=model.dtype)
            frames = 2 * (positions or 0)  # the second of Whisper's convolutions has stride 2
            if features.shape != (model.config.num_mel_bins, frames):
                text = f"the features of one sound are [{model.config.num_mel_bins}, {frames}], got {[*features.shape]}"
                raise BadInput(text, needed=[model.config.num_mel_bins, frames], available=[*features.shape])
            self.num_positions, self.ids = frames // 2, None
            content, values = features.to(torch.float32).numpy(force=True).tobytes(), features
        else:
            ids = as_tokens(given, model.config.vocab_size)
            self.num_positions, self.ids = len(ids), ids
            content, values = ids.tobytes(), torch.from_numpy(ids.astype(np.int64))
        if self.num_positions < 1 or self.num_positions > (positions or self.num_positions):
            text = f"the encoder of {cache.schema.name} takes 1 to {positions or 'any'} positions, got {self.num_positions}"
            raise NeverFits.with_hint(text, "shorten its input", needed=self.num_positions, available=positions)
        self.inputs = {model.main_input_name: values[None].to(model.device)}
        self.num_tokens = align_up(self.num_positions, cache.block_size)
        self.media = {0: blake2b(content, digest_size=16).digest()}

    def text(self, prompt: Tokens) -> Tokens:
        """Return the text of a request: the tokens of this input, and the decoder's ``prompt``."""
        return np.concatenate((np.zeros(self.num_tokens, np.int32), prompt))


class EncoderContext(StepContext):
    """One forward pass of the decoder over rows that are equally long without their encoder's inputs."""

    def __init__(self, batch: Batch, runner: EncoderDecoderRunner, encoder_inputs: Many[EncoderInput]) -> None:
        super().__init__(batch, runner.cache.schema, {}, True, {}, 0)
        counts = [encoder_input.num_positions for encoder_input in encoder_inputs]
        cross, own, positions = batch.encoder_parts(counts)
        self.past = int(positions[0])
        starts, ends = torch.zeros_like(own.cache_seqlens), cross.cache_seqlens
        self._own = GroupGather(own, starts, positions, FULL)
        after = ends.repeat_interleave(len(positions) // len(counts))  # every token reads all positions
        self._cross = GroupGather(cross, starts, after, FULL)

    def gather(self, layer: int) -> GroupGather:
        return self._cross if self.reads_encoder else self._own

    @property
    def encoder_mask(self) -> Tensor:
        """int64 ``[B, positions]``: 1 for the positions that each row has."""
        return (~self._cross.absent).long()


class CrossLayer(PagedLayer):
    """The rows of the encoder's inputs in one layer, which transformers reads as attributes."""

    def __init__(self, context: EncoderContext, index: int, dtype: torch.dtype, width: int) -> None:
        self._kept: tuple[Tensor, Tensor] | None = None
        self._dtype, self._width = dtype, width
        super().__init__(context, index)

    def _rows(self) -> tuple[Tensor, Tensor]:
        self._context.reads_encoder = True
        if self._kept is None:
            self._kept = self.apart([self._read(name, self._dtype) for name in self._row_names], self._width)
        return self._kept

    @property
    def keys(self) -> Tensor:
        return self._rows()[0]

    @keys.setter
    def keys(self, rows: Tensor | None) -> None:
        """Do nothing: transformers begins with None."""

    @property
    def values(self) -> Tensor:
        return self._rows()[1]

    @values.setter
    def values(self, rows: Tensor | None) -> None:
        """Do nothing, as ``keys``."""


class EncoderStepCache(EncoderDecoderCache):  # type: ignore[misc]
    """The cache of one forward pass of the decoder; both halves lie in the same blocks."""

    def __init__(self, context: EncoderContext, dtype: torch.dtype) -> None:
        layers = context.schema.layers
        widths = [layer.block_rows()[0].shape[-1] for layer in layers]
        cross = Cache(layers=[CrossLayer(context, at.index, dtype, width) for at, width in zip(layers, widths)])
        EncoderDecoderCache.__init__(self, StepCache(context), cross)
        self.is_updated = {layer.index: True for layer in layers}

    def leave_states(self, index: int, num_tokens: int) -> None:
        """Do nothing: the decoders of these models have no states."""

    def save_states(self) -> None:
        """Do nothing, as ``leave_states``."""


class EncoderDecoderRunner(ModelRunner):
    """Runs encoder-decoders. Requests whose decoders are equally far share a pass, whatever their encoder's inputs are.

    A step of a sequence that lacks rows of its encoder's input computes these alone, for all that are lacking: one pass of
    the encoder, and one of the decoder over a single token, in which transformers makes the rows of all layers.
    """

    _encoder_inputs: dict[Sequence, EncoderInput]

    @torch.no_grad()
    def step(
        self, work: Many[Work], kept: Many[int] | None = None, lengths: Many[int] | None = None,
        firsts: Many[int] | None = None, encoder_inputs: Many[EncoderInput] = (),
    ) -> Tensor:  # fmt: skip
        """See ``Runner``. ``encoder_inputs``: of each sequence. The logits of a step that computes rows of an input are 0."""
        kept = [1] * len(work) if kept is None else kept
        rows: dict[int, Tensor] = {}
        decoding: list[int] = []
        for at, ((sequence, tokens), encoder_input) in enumerate(zip(work, encoder_inputs, strict=True)):
            if sequence.length < encoder_input.num_tokens:
                self._encode(sequence, len(tokens), encoder_input)
                vocab = self.cache.schema.vocab_size or 1
                rows[at] = torch.zeros(kept[at], vocab, device=self.cache.device)
            else:
                decoding.append(at)
        if decoding:
            self._encoder_inputs = {work[at][0]: encoder_inputs[at] for at in decoding}
            starts = [work[at][0].length - encoder_inputs[at].num_tokens for at in decoding]
            counts = [kept[at] for at in decoding]
            with self._attending():
                found = self._step([work[at] for at in decoding], counts, [0] * len(decoding), starts, False)
            rows.update(zip(decoding, torch.split(found, counts)))
        return torch.cat([rows[at] for at in range(len(work))])

    def _encode(self, sequence: Sequence, num_tokens: int, encoder_input: EncoderInput) -> None:
        """Write the rows of ``encoder_input`` that ``sequence`` lacks, and 0 in those up to a whole block."""
        start = torch.zeros(1, 1, dtype=torch.int64, device=self.cache.device)
        kept = self.model(**encoder_input.inputs, decoder_input_ids=start, use_cache=True).past_key_values
        batch, begin = self.cache.batch([sequence], [num_tokens]), sequence.length
        context = StepContext(batch, self.cache.schema, {}, True, {}, 0)
        for layer, made in zip(self.cache.schema.layers, kept.cross_attention_cache.layers):
            sides = (rows[:, :, begin : begin + num_tokens] for rows in (made.keys, made.values))
            whole = [torch.nn.functional.pad(side, (0, 0, 0, num_tokens - side.shape[2])) for side in sides]
            context.view(layer.index).write(**PagedLayer(context, layer.index).joined(*whole))

    def _forward(self, work: Many[Work], kept: int, firsts: Many[int] | None) -> Tensor:
        batch = self.cache.batch([sequence for sequence, _ in work], [len(tokens) for _, tokens in work])
        ids = torch.from_numpy(np.stack([tokens for _, tokens in work])).to(self.cache.device, torch.int64)
        context = EncoderContext(batch, self, [self._encoder_inputs[sequence] for sequence, _ in work])
        mask = context.encoder_mask
        hidden = torch.zeros(1, 1, 1, dtype=self.model.dtype, device=mask.device).expand(*mask.shape, 1)
        with in_step(context, lambda _: EncoderStepCache(context, self.model.dtype)) as past:
            out = self.model(
                decoder_input_ids=ids, encoder_outputs=BaseModelOutput(last_hidden_state=hidden), attention_mask=mask,
                past_key_values=past, use_cache=True,
            )  # fmt: skip
        return out.logits[:, -kept:].float()  # type: ignore[no-any-return]


def encoder_input_of(model: Any, cache: KVCache, given: Any) -> EncoderInput | None:
    """Return the input of the encoder that ``given`` is; None for a model without one. Raises BadInput, NeverFits."""
    if (cache.schema.encoder_positions is None) != (given is None):
        text = (
            f"{type(model).__name__} {'has no' if given is not None else 'has an'} encoder, got {shown(given)} for it"
        )
        raise BadInput(text, needed="encoder_input", available=type(given).__name__)
    return None if given is None else EncoderInput(model, cache, given)


def check_length(cache: KVCache, num_tokens: int) -> None:
    """Raise NeverFits if a decoder's text of ``num_tokens`` tokens passes the positions of its model."""
    most = cache.schema.max_positions
    if most is not None and num_tokens > most:
        text = f"{num_tokens} tokens of the decoder are more than the {most} positions of {cache.schema.name}"
        raise NeverFits.with_hint(text, "lower max_new_tokens", needed=num_tokens, available=most)
