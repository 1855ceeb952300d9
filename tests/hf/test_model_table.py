"""``docs/models.md``: every causal model type of transformers, covered or refused. Made here and compared.

``python tests/hf/test_model_table.py`` writes it anew.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("torch")

from test_every_family import TEXT_PARTS  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402
from vllm_specs import EXPLAINED, RESULT, ours  # noqa: E402

from encoder_decoders import ENCODERS  # noqa: E402
from kvpagoda import Schema  # noqa: E402
from kvpagoda.errors import SchemaError  # noqa: E402
from kvpagoda.schema import Attention, Compressed, Latent, LayerKind, Recurrent, Shared  # noqa: E402
from kvpagoda.schema.families import (  # noqa: E402
    families,
    known_types,
    mtp_layers,
    other_names,
    refused,
    served_types,
)  # fmt: skip
from kvpagoda.schema.from_hf import TEXT  # noqa: E402
from kvpagoda.schema.presets import presets  # noqa: E402
from models import FAMILIES, tiny_config  # noqa: E402
from more_models import DECODERS, MORE, MULTIMODAL, NEWEST  # noqa: E402

VERSIONS = ("5.23", "5.24")
"""Versions of transformers with which the page is compared. It lists the types of the last one; where that is not installed,
the rows of types that it alone has are taken as they are."""
PATH = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = f"""# Model types

Is your model supported? This page lists every model type of transformers {VERSIONS[-1]} that is built as a causal
language model: what its cache keeps, or why it is refused. `tests/hf/test_model_table.py` makes the tables from the
schemas that the tests compare with transformers, and fails for a type that is in neither table.

The column *together* says which decoding requests share a forward pass in `kvpagoda.hf.Generator`:

- `any`: requests of any lengths,
- `equal`: requests of equal length, because the model computes attention or positions with code of its own, or
  ranks tokens,
- `none`: no requests, because the model's code mixes the rows of a batch.

The last column says what the multi-token prediction (MTP) layers of a model keep, where they are known: with
`Schema.from_hf_config(config, draft="mtp")` they are [draft layers](drafts.md) of its schema.

Generated tokens equal those of the model's own forward pass without a cache. There are four exceptions and limits:

- LongRoPE (Phi-3-mini-128k, Phi-3.5-MoE, Phi-4-mini): a text that grows past `original_max_position_embeddings` is
  computed again, because all of its positions are then encoded differently. Shorter and longer texts share no
  prefixes.
- Indexers (DeepSeek-V3.2, GLM-DSA and others) with few heads give many tokens the same score. So does Doge for
  repeated tokens of a text longer than `keep_window_size`. Which of the tokens with equal scores are selected
  depends on how many tokens are ranked, so transformers' own cache differs from recomputation. In this case the
  tokens equal those of transformers' cache (for Doge: without a window), if the prompt is computed in the same
  pieces.
- Mamba-2 layers with `time_step_limit` or `time_step_min` (Nemotron-H, Zamba2 and others): transformers clamps the time
  steps of a prompt, but not those of a single token, so its own cache differs from recomputation. Here both are
  clamped.
- Text only: images and sounds of multimodal models are not supported, except the sounds of Whisper.
"""
OTHERS = """
Types of multimodal models and of published configs are refused with a reason too:

| type | because |
|---|---|"""
WITH_ENCODER = """
## With an encoder: {count}

Configs of whole encoder-decoders (`is_encoder_decoder`): a text begins with the positions of the encoder's input, whose rows
cross-attention reads, in the same blocks as those of the decoder's tokens
([how](step-loop.md#what-a-model-with-an-encoder-reads)). `kvpagoda.hf.Generator` runs them; those requests share a pass whose
decoders are equally far. `tests/schema/test_encoder_schemas.py` compares the rows with transformers' `EncoderDecoderCache`.

| type | keeps | longest input of the encoder |
|---|---|---|"""
BESIDE = """
## Beside vLLM's own specs

`tests/hf/vllm_specs.py` lets vLLM {vllm} build a tiny model of each of {asked} types of `families/model_types.json`, from
its config, and adds up what its layers say that they keep: bytes of a token for each growth law, and of a request's states.
{same} types keep the same bytes, {differ} others for the reasons below, and of {absent} vLLM builds no model. Of the {covered}
covered types above, {here} are among them, and {whole} are other names of them or multimodal models with one of them as text;
{parts} of the {asked} are such texts, or names that transformers does not have. Of the {refused} refused types no bytes are
compared.

States of recurrent layers are float32 in both (`mamba_ssm_cache_dtype`); vLLM's default is the model's dtype, unless the
checkpoint's config names another.

| type | bytes here | bytes in vLLM | why |
|---|---|---|---|"""
NOT_ASKED = """
Not asked for, as types that transformers has only from 5.24 on: {names}."""
SGLANG = """
SGLang {sglang} has a class of its own for {name}, and its config says what a request keeps there without a GPU: {bytes}, here
{own}. Its convolutions keep the hidden state of the last token, transformers' half the values made of it. Of the types that
vLLM does not build SGLang has mllama and whisper alone, with rows of images or sounds beside those of the text: not asked."""
SERVED_HEAD = """
## Served by engines, without a causal model in transformers

Plans and caches alone: `kvpagoda.hf.Generator` has no model to run. The configs are presets (`kvpagoda plan --presets`).
`index_tail` is a state: the keys of the open pool of an indexer that makes one key of several tokens. Of a model with a
window over what is generated alone (R-SWA, unlimited-ocr) all rows stay, as vLLM's specs say too: the growth laws know
positions, not where a prompt ends.

| preset | type | bytes | beside | remarks |
|---|---|---|---|---|"""
PUBLISHED_FOOT = """
Published configs have these types too, without a preset: {types}. Other names: {names}. A config may nest its text as
{text}. vLLM {vllm} keeps the same bytes for configs as they are published of {same}.
"""
NOTES = {
    **dict.fromkeys(DECODERS, "as a decoder"),
    **dict.fromkeys(("codegen", "gptj"), "`equal` in transformers 5.23, where its attention is code of its own"),
    "big_bird": "as a decoder, attention_type original_full",
}


def kept(kind: LayerKind) -> str:
    """What a layer keeps, in a few words."""
    if isinstance(kind, Attention):
        return f"K/V {growth(kind)}" + (" with indexer keys" if kind.indexer else "")
    if isinstance(kind, Latent):
        return f"latent {growth(kind)}" + (" with indexer keys" if kind.indexer else "")
    if isinstance(kind, Compressed):
        return "compressed entries" if kind.ratio else "ring"
    assert isinstance(kind, Recurrent | Shared)
    return "state" if isinstance(kind, Recurrent) else "K/V of another layer"


def mtp(text: str) -> str:
    """What the MTP layers of type ``text`` keep, in a few words."""
    config = tiny_config(text, **MORE.get(text, {})).to_dict()
    row = mtp_layers()[text]
    drafts = Schema.from_hf_config({**config, row["number"][0]: 1}, draft="mtp").draft_layers
    return ", ".join(dict.fromkeys(kept(kind) for layer in drafts for kind in layer.kinds))


def growth(kind: Attention | Latent) -> str:
    return "window" if kind.law.window else "chunk" if kind.law.chunk else "full"


def causal_types() -> set[str]:
    """Those that transformers builds as causal models, with the newest."""
    return {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *NEWEST - {*TEXT_PARTS}}


def described(name: str) -> tuple[str, Schema] | None:
    """(the type that has the cache, a tiny schema of it); None for a type that is not covered."""
    real = getattr(transformers.CONFIG_MAPPING[name], "model_type", name)
    inside = MULTIMODAL[name][0] if name in MULTIMODAL else f"{name}_text"
    for text in (name, real, inside):
        if text in families():
            return text, Schema.from_hf_config(tiny_config(text, **MORE.get(text, {})))
    return None


def is_together(name: str, text: str, schema: Schema) -> str:
    model: Any = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])
    family = families()[text]
    if any(isinstance(kind, Compressed) for layer in schema.layers for kind in layer.kinds) or not schema.groups:
        return "any" if family.batched else "none"
    own = family.own_attention or family.aligned or not model._can_set_attn_implementation()
    ranks = any(
        isinstance(kind, Attention | Latent) and kind.indexer for layer in schema.layers for kind in layer.kinds
    )
    takes = "position_ids" in inspect.signature(model.forward).parameters
    return "equal" if own or ranks or not takes else "any"


def table() -> str:
    covered, other = [], []
    for name in sorted(causal_types()):
        if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            covered += [line for line in PATH.read_text("utf-8").splitlines() if line.startswith(f"| {name} | ")][:1]
            continue
        if name in refused():
            other.append(f"| {name} | {refused()[name]} |")
            continue
        found = described(name)
        assert found is not None, f"{name} is neither covered nor refused with a reason"
        text, schema = found
        keeps = list(dict.fromkeys(kept(kind) for layer in schema.layers for kind in layer.kinds))
        notes = [NOTES[text]] if text in NOTES else []
        notes += [f"its text part, {text}"] if text != name else []
        notes += [why] if (why := remark(text)) else []
        notes += [f"MTP layers: {mtp(text)}"] if text in mtp_layers() else []
        together = is_together(name, text, schema)
        if f"`{together}`" in NOTES.get(name, ""):
            together = "any"
        covered.append(f"| {name} | {', '.join(keeps)} | {together} | {'; '.join(notes)} |")
    return "\n".join(
        [
            HEAD,
            f"## Covered: {len(covered)}\n\n| type | keeps | together | remarks |\n|---|---|---|---|",
            *covered,
            f"\n## Refused: {len(other)}\n\n| type | because |\n|---|---|",
            *other,
            OTHERS,
            *(
                f"| {name} | {why} |"
                for name, why in refused().items()
                if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
            ),
            *with_encoder(),
            beside_vllm(),
            "",
        ]
    )


def with_encoder() -> list[str]:
    """The section of models with an encoder."""
    named = {name: row["family"] for name, row in sorted(known_types().items()) if row["family"].encoder is not None}
    rows = []
    for name, family in named.items():
        kinds = {kept(kind) for layer in Schema.from_hf_config(encoder_decoder(name)).layers for kind in layer.kinds}
        rows.append(f"| {name} | {', '.join(kinds)} | {f'`{family.encoder}`' if family.encoder else 'any'} |")
    return [WITH_ENCODER.format(count=len(rows)), *rows]


def encoder_decoder(name: str) -> Any:
    """A tiny config of a whole encoder-decoder."""
    return transformers.CONFIG_MAPPING[name](**ENCODERS[name])


def beside_vllm() -> str:
    """What vLLM's own specs say of the same configs, as ``vllm_specs.py`` recorded it."""
    found = json.loads(RESULT.read_text())
    rows: dict[str, Any] = found["types"]
    same = [name for name, row in rows.items() if "ours" in row and row["ours"] == row["vllm"]]
    differ = [f"| {name} | {figures(rows[name]['ours'])} | {figures(rows[name]['vllm'])} | {EXPLAINED[name]} |"
              for name in rows if "ours" in rows[name] and name not in same]  # fmt: skip
    absent: dict[str, list[str]] = {}
    for name, row in rows.items():
        if "absent" in row:
            absent.setdefault(row["absent"], []).append(name)
    names = causal_types() - NEWEST
    head = BESIDE.format(
        vllm=found["vllm"], asked=len(rows), same=len(same), differ=len(differ), absent=sum(map(len, absent.values())),
        covered=len(names - refused().keys()), here=len(names & rows.keys()), parts=len(rows.keys() - names),
        whole=len(names - rows.keys() - refused().keys()), refused=len(names & refused().keys()),
    )  # fmt: skip
    ((name, sizes),) = found["sglang"]["sizes"].items()
    own = rows[name]["ours"]
    kept_here = {"token": sum(nbytes for law, nbytes in own.items() if law != "state"), "state": own["state"]}
    return "\n".join(
        [
            head,
            *differ,
            SGLANG.format(sglang=found["sglang"]["sglang"], name=name, bytes=figures(sizes), own=figures(kept_here)),
            f"\nvLLM {found['vllm']} builds no model of {sum(map(len, absent.values()))} types:\n",
            *(f"- {why}: {', '.join(names)}" for why, names in sorted(absent.items())),
            f"\nThe same bytes: {', '.join(same)}.",
            NOT_ASKED.format(names=", ".join(sorted(NEWEST))),
            SERVED_HEAD,
            *(
                f"| {name} | {kind} | {figures(ours(name))} | {compared_with(name, found)} | {remark(kind)} |"
                for name, row in presets().items()
                if (kind := row["config"]["model_type"]) in {*served_types(), "kimi_linear"}
            ),
            PUBLISHED_FOOT.format(
                types=", ".join(
                    sorted({*served_types()} - {row["config"]["model_type"] for row in presets().values()})
                ),
                names=", ".join(f"{name} ({kind})" for name, kind in other_names().items()),
                text=", ".join(f"`{field}`" for field in TEXT),
                vllm=found["vllm"],
                same=", ".join(found["published"]),
            ).rstrip(),
        ]
    )


def remark(model_type: str) -> str:
    """What a plan of the type does not do."""
    return str(known_types()[model_type].get("remark", ""))


def compared_with(name: str, found: dict[str, Any]) -> str:
    """What an engine says of a preset, or why none was asked."""
    if (why := presets()[name].get("unverified")) is not None:
        return f"unverified: {why}"
    row = found["presets"][name]
    same = row["ours"] == row["vllm"]
    return f"vLLM {found['vllm']}: {'the same' if same else figures(row['vllm']) + '; ' + EXPLAINED[name]}"


def figures(kept: dict[str, float]) -> str:
    """Bytes by growth law, as text."""
    return ", ".join(f"{name} {nbytes:,.3f}".rstrip("0").rstrip(".") for name, nbytes in kept.items())


def test_the_table_of_model_types_is_up_to_date() -> None:
    if not transformers.__version__.startswith(VERSIONS):
        pytest.skip(f"the table is of transformers {VERSIONS[-1]}, this is {transformers.__version__}")
    assert PATH.read_text("utf-8") == table(), "run python tests/hf/test_model_table.py"


@pytest.mark.parametrize("name", sorted(refused()))
def test_refused_types_are_told_why(name: str) -> None:
    assert name not in families() and name not in FAMILIES
    for config in ({"model_type": name}, {"model_type": name, "text_config": {"model_type": "llama"}}):
        with pytest.raises(SchemaError) as caught:
            Schema.from_hf_config(config)
        assert str(caught.value) == f"model type {name!r} is not supported: {refused()[name]}"


@pytest.mark.parametrize(("typed", "meant"), [
    ("lama", "llama"), ("qwne3", "qwen3"), ("qwen33", None), ("minicpm", None), ("lxyzma", None), ("emu", None),
    ("nemotron-nass", "nemotron-nas"), ("nemotron-x", None), ("minimax_m4", None), ("qwen3_omni_text", None),
])  # fmt: skip
def test_only_near_names_are_suggested(typed: str, meant: str | None) -> None:
    with pytest.raises(SchemaError) as caught:
        Schema.from_hf_config({"model_type": typed})
    assert ("did you mean" in str(caught.value)) == (meant is not None) and (meant or "") in str(caught.value)


if __name__ == "__main__":
    PATH.write_text(table(), "utf-8")
