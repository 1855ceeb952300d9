"""Makes a ``KVCache`` for a transformers model, and the runner that computes the model's steps over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvpagoda import Identity, KVCache, Limits, Sequence
from kvpagoda.arrays import Tokens
from kvpagoda.errors import BadInput, shown
from kvpagoda.hf.compressed import CompressedRunner
from kvpagoda.hf.drafter import Drafter, check_draft
from kvpagoda.hf.encoder_decoder import EncoderDecoderRunner
from kvpagoda.hf.runner import ModelRunner, Runner
from kvpagoda.hf.state_modules import StateModules
from kvpagoda.hf.weights import weights_digest
from kvpagoda.schema import Attention, Compressed, Layer, Schema
from kvpagoda.schema.families import known_types
from kvpagoda.schema.kv_format import KVFormatNames
from kvpagoda.schema.layout_choice import LayoutNames

STEP_CHECKPOINTS = 16
"""At how many positions inside a step of one request the states are kept by default, where the state modules of a model can
run in pieces."""


def check_model(model: Any) -> None:
    """Raise BadInput, which says what to pass, unless ``model`` is a loaded transformers model."""
    if not hasattr(model, "config") or not hasattr(model, "forward"):
        hint = f"AutoModelForCausalLM.from_pretrained({model!r})" if isinstance(model, str) else "a loaded model"
        text = f"a model is a transformers causal language model, got {shown(model)}; pass {hint}"
        raise BadInput(text, hint=hint, needed=type(model).__name__)


def schema_of(config: Any, **given: Any) -> Schema:
    """Return the schema of what transformers keeps for a model's ``config``: ``Schema.from_hf_config(config, **given)``, with
    K/V heads once for each query head where its code repeats them (``Family.repeats_heads``). Raises SchemaError."""
    schema = Schema.from_hf_config(config, **given)
    repeats = known_types()[schema.name]["family"].repeats_heads
    if not repeats or not getattr(config, repeats, False):
        return schema

    def repeated(layer: Layer) -> Layer:
        heads = layer.num_query_heads or 1
        kinds = (replace(kind, num_kv_heads=heads) if isinstance(kind, Attention) else kind for kind in layer.kinds)
        return replace(layer, kinds=tuple(kinds))

    return replace(schema, layers=tuple(map(repeated, schema.layers)))


def runner_of(
    model: Any, chunk: int, lookup: int, kv_format: KVFormatNames, cache_arguments: dict[str, Any],
    layout: LayoutNames | None = None, kv_scales: Mapping[int, tuple[float, float]] | None = None, draft: Any = None,
) -> tuple[Runner, Drafter | None]:  # fmt: skip
    """Return a runner of ``model`` (which is put in eval mode) over a new ``KVCache(**cache_arguments)``, and one of the
    model ``draft``, if given, whose layers are draft layers of that cache. A step computes at most ``chunk`` prompt
    tokens of a text, or ``lookup`` proposed tokens and one more; none are proposed for a model with states if it is not
    known which of its modules update them. ``kv_format``, ``kv_scales`` and ``layout``: see
    ``Schema.from_hf_config``. If other processes can read ``tiers``, ``identity.weights`` is by default a digest of the
    whole model. Raises BadInput, SchemaError, NeverFits."""
    check_model(model)
    model.eval()
    dtype = str(model.dtype).removeprefix("torch.")
    schema = schema_of(model.config, dtype=dtype, kv_format=kv_format, kv_scales=kv_scales)
    states, drafts = StateModules(model, schema), None
    width = lookup if states.are_known else 0
    if draft is not None:
        check_model(draft)
        draft.eval()
        if draft.device != model.device:
            raise BadInput(f"the model is on {model.device} and its draft on {draft.device}; move one to the other")
        drafts = schema_of(draft.config, dtype=str(draft.dtype).removeprefix("torch."), kv_format="raw")
        check_draft(schema.rewindable(width), drafts)
        schema = schema.drafted_by(drafts)
    schema = schema.rewindable(width)
    schema = schema if layout is None else schema.laid_out(layout)
    sizes = {"device": None, **cache_arguments}
    if str(device := sizes.pop("device") or model.device).partition(":")[0] != model.device.type:
        text = f"the model is on {model.device}, so its cache cannot be on {device}; move the model"
        raise BadInput(text, needed=device, available=model.device.type)
    identity, limits = sizes.pop("identity", None) or Identity(), sizes.pop("limits", None) or Limits()
    if not identity.weights and not all(getattr(tier, "is_private", True) for tier in sizes.get("tiers", ())):
        identity = replace(identity, weights=weights_digest(model))
    limits = replace(limits, step_tokens=max(chunk, lookup + 1))
    can_leave, has_states = states.can_leave and draft is None, bool(schema.state_layout.nbytes)
    if limits.step_checkpoints and not can_leave and (has_states or draft is not None):
        who = f"the modules of this {type(model).__name__} that update states run only as a whole"
        why = who if draft is None else "a draft runs between a step and its commit"
        raise BadInput.with_hint(
            f"step_checkpoints is {limits.step_checkpoints}, but {why}, so no step leaves states inside",
            "leave step_checkpoints out: then steps end where a checkpoint is due",
            needed=limits.step_checkpoints, available=0,
        )  # fmt: skip
    if limits.step_checkpoints is None and can_leave:
        limits = replace(limits, step_checkpoints=STEP_CHECKPOINTS)
    cache = KVCache(schema, device=model.device, identity=identity, limits=limits, **sizes)
    return runner_over(model, cache), None if drafts is None else Drafter(draft, cache, drafts, chunk)


def runner_over(model: Any, cache: KVCache) -> Runner:
    """Return a runner of ``model`` over ``cache``, which has the model's schema. Raises SchemaError."""
    if cache.schema.encoder_positions is not None:
        return EncoderDecoderRunner(model, cache)
    compressed = any(isinstance(kind, Compressed) for layer in cache.schema.layers for kind in layer.kinds)
    return (CompressedRunner if compressed else ModelRunner)(model, cache)


def next_piece(runner: Runner, sequence: Sequence, text: Tokens, chunk: int) -> Tokens:
    """Return the tokens of ``text`` that the next step of ``sequence`` computes: at most ``chunk``, after the committed
    tokens."""
    begin, most = sequence.length, min(chunk, runner.most_tokens(sequence) or chunk)
    return text[begin : begin + min(most, runner.cache.step_limit(sequence))]


def commit_step(sequence: Sequence, tokens: Tokens) -> None:
    """Commit ``tokens`` of ``sequence``, which a runner computed, and the states that it left inside the step."""
    end = sequence.length + len(tokens)
    sequence.commit(tokens, [at for at in sequence.step_checkpoints if at <= end] or None)
