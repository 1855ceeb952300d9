"""Our schemas against the specs that an installed vLLM computes for the same configs.

``python tests/hf/vllm_specs.py`` asks it for every model type and writes ``benchmarks/results/vllm_specs.json``, of which
``test_model_table.py`` makes a part of ``docs/models.md``.

``KVPAGODA_VLLM_PYTHON``: the Python that runs vLLM. ``KVPAGODA_VLLM_PATH``: folders that it searches first, for a newer vLLM
over the binaries of an older one. ``KVPAGODA_VLLM_TRANSFORMERS``: a folder with a newer transformers, for the types that vLLM
does not build with its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
PYTHON = Path(os.environ.get("KVPAGODA_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
RESULT = ROOT / "benchmarks" / "results" / "vllm_specs.json"

YARN = dict(
    rope_type="yarn", rope_theta=10000.0, factor=2.0, original_max_position_embeddings=2048, beta_fast=32, beta_slow=1,
    truncate=False,
)  # fmt: skip
INKLING = dict(
    padded_vocab_size=128, use_embed_norm=False, q_bias=False, o_bias=False, sconv_kernel_size=3, use_sconv=True,
    final_logit_softcapping=None, dense_mlp_idx=1, dense_intermediate_size=64, use_gate_bias=False,
    use_global_scale=False, norm_after_topk=True, gate_activation="sigmoid", inference_moe_w13_interleaved=True,
    num_nextn_predict_layers=0,
)  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "afmoe": dict(score_func="sigmoid", route_norm=True, route_scale=1.0, mup_enabled=False, n_group=1, topk_group=1),
    "beam": dict(
        rope_parameters=dict(sliding_attention=dict(rope_type="default", rope_theta=10000.0), full_attention=None)
    ),
    "deepseek_v4": dict(
        head_dim=512, index_head_dim=128, qk_rope_head_dim=64, partial_rotary_factor=0.125,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        compress_ratios=[0, 4, 128, 4, 128],
    ),
    "deepseek_v32": dict(index_head_dim=128),
    "glm_moe_dsa": dict(index_head_dim=128),
    "hy_v4": dict(index_head_dim=128),
    "glm4_moe_lite": dict(first_k_dense_replace=1),
    "gpt2": dict(activation_function="gelu"),
    "gpt_oss": dict(rope_parameters=YARN),
    "gptj": dict(activation_function="gelu"),
    "hy_v3": dict(first_k_dense_replace=1, expert_hidden_dim=32, route_norm=True),
    "inkling_text": INKLING,
    "kimi_linear": dict(
        mla_use_nope=True, max_position_embeddings=4096,
        linear_attn_config=dict(
            kda_layers=[1, 2, 3], full_attn_layers=[4], num_heads=4, head_dim=16, short_conv_kernel_size=4
        ),
    ),
    "lfm2": dict(conv_dim=48, conv_dim_out=48, block_dim=48, block_multiple_of=8, block_ffn_dim_multiplier=1.0),
    "longcat_flash": dict(mla_scale_q_lora=True, mla_scale_kv_lora=True, zero_expert_type="identity"),
    "mimo_v2_flash": dict(
        hybrid_layer_pattern=[0, 1, 1, 1], moe_layer_freq=[0, 1, 1, 1], layernorm_epsilon=1e-5,
        layer_types=["full_attention"] + ["sliding_attention"] * 3, head_dim=12, v_head_dim=8,
        swa_num_attention_heads=8, swa_num_key_value_heads=2, swa_head_dim=16, swa_v_head_dim=4, swa_rope_theta=10000.0,
        rope_theta=10000.0, partial_rotary_factor=1.0, sliding_window_size=8,
    ),
    "minimax_m2": dict(rotary_dim=6, scoring_func="sigmoid"),
    "qwen4_exp_text": dict(output_gate_type="sigmoid"),
}  # fmt: skip
"""Fields that checkpoints have and transformers' own configs rename or leave out, and sizes that vLLM's kernels demand."""
SERVED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("served_configs.json").read_text())
"""Preset -> the config by which vLLM builds it: the preset's, and what a model needs besides. Experts are fewer, tables of
n-grams smaller, and there are no draft layers; a cache has none of them."""
NOT_PUBLISHED = ("_name_or_path", "output_attentions", "model_max_length")

FP8_KEYS = "keys of the indexer in fp8 with a float32 scale for 128 elements, which no option of vLLM changes; here raw"
DENSE = "through its Transformers backend, which computes dense attention and keeps no keys of the indexer"
FULL_HERE = "through its Transformers backend, which knows neither these windows nor the states of their convolutions"
KEPT_FULL = "windows that the config names without types of layers are kept as full attention; transformers masks them"
EXPLAINED: dict[str, str] = {
    "axk2": DENSE,
    "cohere2": "a window of one token more than transformers masks",
    "cohere2_moe": "a window of one token more than transformers masks",
    "deepseek_v32": FP8_KEYS,
    "deepseek_v4": "keys of the indexer in fp8 (132 bytes), here MXFP4 (68); rings and tails are blocks of windows",
    "glm_moe_dsa": FP8_KEYS,
    "hy_v4": FP8_KEYS,
    "inkling2_text": FULL_HERE,
    "mimo_v2_flash": "the window of a checkpoint counts the tokens before the current one; vLLM counts that one too",
    "minicpm3": "decompressed heads, values padded to the keys' size; here the latent",
    "minimax_m3_vl_text": DENSE,
    "moshi": "windows on all layers; transformers' model masks none",
    "qwen2_moe": KEPT_FULL,
    "zaya": FULL_HERE,
    "deepseek-v4.1-flash": "entries, keys and rings in fp8 (584 and 132 bytes a row), here raw; rings are blocks of "
    "windows, and the tail of a compressor has 8 rows where 1 is read",
    "glm-5.3-flash": FP8_KEYS,
    "qwen3.8-flash-next": "the last two tokens of an n-gram are read from the request, here they are a state of 16 bytes",
}
"""Model type or preset -> why vLLM keeps other bytes than we do."""


def configs() -> dict[str, dict[str, Any]]:
    """Model type -> its tiny config, in the form of a checkpoint's."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from models import FAMILIES, tiny_config
    from more_models import MORE

    found = {}
    for name in sorted({*FAMILIES, *MORE}):
        own = FAMILIES.get(name, MORE.get(name, {}))
        sizes = FIELDS[name] if name == "deepseek_v4" else {}
        fields = tiny_config(name, **{**own, **sizes}).to_dict()
        published = fields if name == "nemotron_h" else CONFIG_MAPPING[name]().to_dict()
        kept = {key: value for key, value in fields.items() if key in published or key in own}
        kept |= {**FIELDS.get(name, {}), "model_type": name}
        if name == "dbrx":
            for part, names in (
                ("attn_config", ("kv_n_heads", "rope_theta", "clip_qkv")),
                ("ffn_config", ("moe_", "ffn_")),
            ):
                kept[part] = {key: value for key, value in kept[part].items() if key.startswith(names)}
        if name == "gpt_bigcode":
            del kept["num_key_value_heads"]
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name, "")
        found[name] = {key: value for key, value in kept.items() if key not in NOT_PUBLISHED}
        found[name]["architectures"] = [architecture]
    return found


def ask(configs: dict[str, dict[str, Any]], *folders: str, timeout: float = 500) -> dict[str, Any]:
    """What the installed vLLM says of ``configs``; see ``benchmarks/peers/vllm_specs.py``. ``folders`` are searched first."""
    path = os.pathsep.join(filter(None, (*folders, os.environ.get("KVPAGODA_VLLM_PATH"), str(ROOT))))
    answer = subprocess.run(
        [PYTHON, "-m", "benchmarks.peers.vllm_specs"], input=json.dumps(configs), capture_output=True, text=True,
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, timeout=timeout, check=False,
    )  # fmt: skip
    if answer.returncode:
        raise RuntimeError(answer.stderr[-2000:])
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def ours(config: dict[str, Any] | str) -> dict[str, float]:
    """Bytes of a token for each growth law, and of a request's states, as the schema of a config or preset says."""
    from kvpagoda import Schema

    is_packed = not isinstance(config, str) and config["model_type"] == "deepseek_v4"
    schema = Schema.from_hf_config(config, dtype="bfloat16", kv_format="fp8" if is_packed else "raw")
    found = Counter[str]()
    for group in schema.groups:
        rows = [row for layer in group.layers for row in layer.block_rows()]
        found[group.name] = sum(row.row_nbytes * row.count / row.tokens_per_row for row in rows)
    if states := sum(row.row_nbytes * row.count for layer in schema.layers for row in layer.state_rows()):
        found["state"] = states
    return dict(sorted(found.items()))


def theirs(layers: list[dict[str, Any]]) -> dict[str, float]:
    """The same of vLLM's specs."""
    found = Counter[str]()
    for layer in layers:
        name = "state" if "request" in layer else "full"
        for law, field in (("window", "sliding_window"), ("chunk", "attention_chunk_size")):
            if layer.get(field):
                name = f"{law}({layer[field]})"
        found[name] += layer.get("request", layer.get("token", 0))
    return dict(sorted(found.items()))


def reason(error: str) -> str:
    """Why vLLM does not build a model, in a few words."""
    known = {
        "are not supported for now": "no such architecture",
        "is not supported anymore": "dropped since 0.28",
        "position_ids not found": "not taken by its Transformers backend",
        "KeyError: 'vllm'": "not taken by its Transformers backend",
        "NOTE tokenizer": "built beside its tokenizer alone",
        "dispatch": "not taken by its Transformers backend",
        "Flint requires FlashInfer": "built on a GPU alone",
    }
    return next((text for part, text in known.items() if part in error), "an error while the tiny model is built")


def compared(answer: dict[str, Any], asked: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Model type -> both answers, or why vLLM has none."""
    rows: dict[str, Any] = {}
    for name, found in answer["specs"].items():
        if "absent" in found:
            rows[name] = {"absent": reason(found["absent"])}
        else:
            own = ours(name if name in SERVED else asked[name])
            rows[name] = {"model": found["model"], "ours": own, "vllm": theirs(found["layers"])}
    return rows


def main() -> None:
    """See the top of this file."""
    asked = configs()
    answer = ask(asked)
    newer = os.environ.get("KVPAGODA_VLLM_TRANSFORMERS")
    if newer:
        missed = {name: asked[name] for name, found in answer["specs"].items() if "absent" in found}
        answer["specs"] |= ask(missed, newer)["specs"]
    served = compared(ask(SERVED), SERVED)
    rows = compared(answer, asked)
    result = {"vllm": answer["vllm"], "transformers": answer["transformers"], "types": rows, "presets": served}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    for name, row in {**rows, **served}.items():
        if "absent" in row:
            print(name, "absent:", row["absent"][:150])
        elif row["ours"] != row["vllm"]:
            print(name, row, EXPLAINED.get(name, "UNEXPLAINED"))
    print(sum("ours" in row and row["ours"] == row["vllm"] for row in rows.values()), "agree of", len(rows))


if __name__ == "__main__":
    main()
