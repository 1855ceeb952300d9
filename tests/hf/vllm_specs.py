"""Our schemas against the specs that an installed vLLM computes for the same configs.

``python tests/hf/vllm_specs.py`` asks it for every model type and writes ``benchmarks/results/vllm_specs.json``, of which
``test_model_table.py`` makes a part of ``docs/models.md``.

``KVPAGODA_VLLM_PYTHON``: the Python that runs vLLM. ``KVPAGODA_VLLM_PATH``: folders that it searches first, for a newer vLLM
over the binaries of an older one. ``KVPAGODA_VLLM_TRANSFORMERS``: a folder with a newer transformers, for the types that vLLM
does not build with its own. ``KVPAGODA_SGLANG_PATH``: a folder with SGLang, which the same Python asks for types whose states
no class of vLLM has; without it what was recorded of SGLang stays.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
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
ROPE = dict(rope_type="default", rope_theta=10000.0)
INKLING = dict(
    padded_vocab_size=128, use_embed_norm=False, q_bias=False, o_bias=False, sconv_kernel_size=3, use_sconv=True,
    final_logit_softcapping=None, dense_mlp_idx=1, dense_intermediate_size=64, use_gate_bias=False,
    use_global_scale=False, norm_after_topk=True, gate_activation="sigmoid", inference_moe_w13_interleaved=True,
    num_nextn_predict_layers=0,
)  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "afmoe": dict(score_func="sigmoid", route_norm=True, route_scale=1.0, mup_enabled=False, n_group=1, topk_group=1),
    "bailing_hybrid": dict(linear_head_dim=8),
    "beam": dict(
        rope_parameters=dict(sliding_attention=dict(rope_type="default", rope_theta=10000.0), full_attention=None)
    ),
    "deepseek_v4": dict(
        head_dim=512, index_head_dim=128, qk_rope_head_dim=64, partial_rotary_factor=0.125,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        compress_ratios=[0, 4, 128, 4, 128],
    ),
    "deepseek_v32": dict(index_head_dim=128),
    "dots3_note_text": dict(
        index_head_dim=128, per_layer_config={
            str(i): dict(
                num_attention_heads=2, num_key_value_heads=2, q_lora_rank=20, kv_lora_rank=36, head_dim=24, v_head_dim=12,
                qk_rope_head_dim=8,
            ) for i in (1, 3)
        },
    ),
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
    "qwen2_5_vl_text": dict(use_sliding_window=False, layer_types=["full_attention"] * 4),
    "qwen2_vl_text": dict(use_sliding_window=False, layer_types=["full_attention"] * 4),
    "qwen4_exp_text": dict(output_gate_type="sigmoid"),
}  # fmt: skip
"""Fields that checkpoints have and transformers' own configs rename or leave out, and sizes that vLLM's kernels demand."""
TOLD: dict[str, dict[str, Any]] = {
    "bailing_hybrid": dict(
        architectures=["BailingMoeV3ForCausalLM"], n_group=1, num_experts_per_tok=2,
        moe_shared_expert_intermediate_size=32, use_bias=False, no_kda_lora=True,
    ),
    "dots3_note_text": dict(
        architectures=["Dots3NoteLanguageModelForCausalLM"], model_type="dots3_note",
        first_k_dense_replace=1, layer_types=["full_attention", "sliding_attention"] * 2, sliding_window_size=8,
        swa_num_attention_heads=2, swa_q_lora_rank=20, swa_kv_lora_rank=36, swa_qk_nope_head_dim=16, swa_v_head_dim=12,
        swa_qk_rope_head_dim=8, swa_rope_theta=10000.0, attention_gate_type="headwise", swa_attention_gate_type="headwise",
        apply_mla_qkv_lora_rescale=False, num_nextn_predict_layers=0, rope_theta=10000.0,
        rope_parameters=ROPE,
    ),
    "emu3_text_model": dict(architectures=["Emu3ForConditionalGeneration"]),
    "gemma4_unified_text": dict(architectures=["Gemma4ForCausalLM"]),
    "glm4v_moe_text": dict(architectures=["Glm4MoeForCausalLM"], model_type="glm4_moe", rope_parameters=ROPE),
    "glm4v_text": dict(architectures=["Glm4ForCausalLM"], model_type="glm4", head_dim=12, rope_parameters=ROPE),
    "inkling_text": dict(model_type="inkling_model"),
    "minimax_m3_vl_text": dict(
        architectures=["MiniMaxM3SparseForCausalLM"], model_type="minimax_m3_mtp", hidden_act="swigluoai",
        moe_layer_freq=[1] * 4, num_mtp_modules=0, sparse_attention_config=dict(
            use_sparse_attention=True, sparse_index_dim=8, sparse_num_index_heads=2, sparse_topk_blocks=3,
            sparse_block_size=4, sparse_disable_index_value=[0, 1, 0, 1], sparse_score_type="max", sparse_init_block=0,
            sparse_local_block=1, sparse_attention_freq=[0, 1, 0, 1],
        ),
    ),
    "mllama_text_model": dict(architectures=["MllamaForConditionalGeneration"]),
    "qwen2_5_vl_text": dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", rope_parameters=ROPE),
    "qwen2_vl_text": dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", rope_parameters=ROPE),
    "qwen3_vl_moe_text": dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", rope_parameters=ROPE),
    "qwen3_vl_text": dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", rope_parameters=ROPE),
}  # fmt: skip
"""What vLLM is told instead: of a text that is a part of a multimodal model, the language model that vLLM's class of the
whole builds for it; of others, vLLM's names of a type, a class and its fields."""
SERVED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("served_configs.json").read_text())
"""Preset -> the config by which vLLM builds it: the preset's, and what a model needs besides. Experts are fewer, tables of
n-grams smaller, and there are no draft layers; a cache has none of them."""
SMALL = dict(
    vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2,
    max_position_embeddings=256, rms_norm_eps=1e-5, hidden_act="silu", rope_parameters=ROPE, torch_dtype="bfloat16",
)  # fmt: skip
BLOCKS = [
    {"attention": {"no_op": heads is None, "n_heads_in_group": heads}, "ffn": {"no_op": False, "ffn_mult": 1.0}}
    for heads in (4, None, 2, 8, 4, None)
]
FALCON = dict(bias=False, parallel_attn=True, alibi=False, layer_norm_epsilon=1e-5, multi_query=True)
FP8 = dict(num_bits=8, type="float", dynamic=False, strategy="tensor", symmetric=True)
TENSORS = dict(quant_method="compressed-tensors", format="float-quantized", config_groups={}, kv_cache_scheme=FP8)
LLAMA = dict(SMALL, model_type="llama", attention_bias=False, mlp_bias=False, architectures=["LlamaForCausalLM"])
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "falcon": (
        dict(SMALL, **FALCON, model_type="falcon", new_decoder_architecture=True, num_kv_heads=2),
        dict(architectures=["FalconForCausalLM"]),
    ),
    "exaone4": (
        dict(SMALL, model_type="exaone4", sliding_window=8, sliding_window_pattern="LLLG"),
        dict(
            architectures=["Exaone4ForCausalLM"], sliding_window_pattern=4,
            layer_types=[*["sliding_attention"] * 3, "full_attention", "sliding_attention", "full_attention"],
        ),
    ),
    "llama with a scheme of compressed-tensors": (dict(LLAMA, quantization_config=TENSORS), {}),
    "llama with a scheme of ModelOpt": (
        dict(LLAMA, quantization_config=dict(quant_method="modelopt", quant_algo="FP8", kv_cache_quant_algo="FP8")), {},
    ),
    "mimo": (
        dict(SMALL, model_type="mimo", use_sliding_window=False),
        dict(architectures=["MiMoForCausalLM"], model_type="qwen2"),
    ),
    "nemotron-nas": (
        dict(SMALL, model_type="nemotron-nas", num_key_value_heads=None, block_configs=BLOCKS),
        dict(
            architectures=["DeciLMForCausalLM"], model_type="llama", num_key_value_heads=2, attention_bias=False,
            mlp_bias=False,
        ),
    ),
}  # fmt: skip
"""Type -> (a config as it is published, what vLLM is told besides): spellings that no config of ``configs`` has. vLLM is given
its names of a class, and a type that its transformers has."""
SGLANG: dict[str, dict[str, Any]] = {"zaya": dict(zaya_layers=["a"] * 4)}
"""Types that vLLM has only through its Transformers backend, without their states, and SGLang as a model of its own -> fields
of the checkpoint that transformers' config leaves out."""
NOT_PUBLISHED = ("_name_or_path", "output_attentions", "model_max_length")

FP8_KEYS = "keys of the indexer in fp8 with a float32 scale for 128 elements, which no option of vLLM changes; here raw"
FULL_HERE = (
    "its Transformers backend, which gives windows to layers of the type sliding_attention alone, and has no states"
)
COHERE = "vLLM's class adds a token to the window, which the training had, as it says; transformers' model does not"
EXPLAINED: dict[str, str] = {
    "axk2": "its Transformers backend, which knows latents and no indexer: dense attention over all of them",
    "cohere2": COHERE,
    "cohere2_moe": COHERE,
    "deepseek_v32": FP8_KEYS,
    "deepseek_v4": "keys of the indexer in fp8 (132 bytes), here MXFP4 (68); rings and tails are blocks of windows",
    "dots3_note_text": f"{FP8_KEYS}, in float32; latents of full layers are padded to the size of those with windows",
    "glm_moe_dsa": FP8_KEYS,
    "hy_v4": FP8_KEYS,
    "inkling2_text": FULL_HERE,
    "inkling_text": "the inputs of convolutions are bfloat16 rows of windows, each head's padded to a power of two; here "
    "they are float32 states",
    "mimo_v2_flash": "vLLM's window has sliding_window_size tokens with the current one, transformers' one more",
    "minicpm3": "K/V heads made of the latent, values padded to the keys' size; here the latent itself",
    "moshi": "its Transformers backend, which takes the config's window for all layers; transformers' model masks none",
    "qwen2_moe": "vLLM's class has no windows; transformers masks those that use_sliding_window switches on",
    "qwen4_exp_text": "one key of the indexer for indexer_compress_ratio tokens, and a ring for those of the open pool; "
    "transformers' model keeps one a token. Tokens of n-grams are taken from the request, here they are a state of 16 bytes",
    "zaya": FULL_HERE,
    "deepseek-v4.1-flash": "entries, keys and rings in fp8 (584 and 132 bytes a row), here raw; rings are blocks of "
    "windows, and the tail of a compressor has 8 rows where 1 is read",
    "glm-5.3-flash": FP8_KEYS,
    "qwen3.8-flash-next": "the two tokens before a step, which n-grams read, are taken from the request's tokens; here they "
    "are a state of two int64",
}
"""Model type or preset -> why vLLM keeps other bytes than we do."""


def configs() -> dict[str, dict[str, Any]]:
    """Model type -> its tiny config, in the form of a checkpoint's. Without the newest types, which the transformers that
    was installed beside vLLM did not have."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from models import FAMILIES, tiny_config
    from more_models import MORE, NEWEST

    found = {}
    for name in sorted({*FAMILIES, *MORE} - NEWEST):
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
    found["kimi_k2"] = {**found["deepseek_v3"], "model_type": "kimi_k2"}
    return found


def ask(configs: dict[str, dict[str, Any]], *folders: str, timeout: float = 500) -> dict[str, Any]:
    """What the installed vLLM says of ``configs``; see ``benchmarks/peers/vllm_specs.py``. ``folders`` are searched first."""
    told = {name: {**config, **TOLD.get(name, {})} for name, config in configs.items()}
    if "dots3_note_text" in told:
        del told["dots3_note_text"]["per_layer_config"]  # its swa_ fields say the same
    return answered("vllm_specs", told, (*folders, os.environ.get("KVPAGODA_VLLM_PATH")), timeout)


def answered(program: str, told: dict[str, Any], folders: Sequence[str | None], timeout: float) -> dict[str, Any]:
    """What ``program`` of ``benchmarks/peers`` answers to ``told``; ``folders`` are searched first."""
    answer = subprocess.run(
        [PYTHON, "-m", f"benchmarks.peers.{program}"], input=json.dumps(told), capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (*folders, str(ROOT))))}, timeout=timeout, check=False,
    )  # fmt: skip
    if answer.returncode:
        raise RuntimeError(answer.stderr[-2000:])
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def ours(config: dict[str, Any] | str) -> dict[str, float]:
    """Bytes of a token for each growth law, and of a request's states, as the schema of a config or preset says."""
    from kvpagoda import Schema

    is_packed = not isinstance(config, str) and config["model_type"] == "deepseek_v4"
    schema = Schema.from_hf_config(config, dtype="bfloat16", kv_format="fp8" if is_packed else "auto")
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
        "Mllama": "dropped since 0.10.2",
        "was supported in vLLM until": "dropped since 0.28",
        "load the processor": "a text that it builds inside its multimodal model alone, which needs a processor of images",
        "are not supported for now": "no such architecture, and transformers' class takes no attention of others",
        "position_ids not found": "not taken by its Transformers backend: transformers' model takes no positions",
        "(linear_attention)": "not taken by its Transformers backend, which has no states",
        "(conv)": "not taken by its Transformers backend, which has no states",
        "does not dispatch": "not taken by its Transformers backend: transformers' model computes attention itself",
        "more than one module": "not taken by its Transformers backend: layers attend to an encoder too",
        "KeyError: 'vllm'": "not taken by its Transformers backend: transformers' model chooses its attention from a list",
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


def ask_published() -> dict[str, Any]:
    """Type -> both answers to its config in ``PUBLISHED``."""
    told = {name: {**config, **more} for name, (config, more) in PUBLISHED.items()}
    answer = answered("vllm_specs", told, (os.environ.get("KVPAGODA_VLLM_PATH"),), 500)
    return {
        name: {"model": found["model"], "ours": ours(PUBLISHED[name][0]), "vllm": theirs(found["layers"])}
        for name, found in answer["specs"].items()
    }


def main() -> None:
    """See the top of this file."""
    asked = configs()
    answer = ask(asked)
    versions = [answer["transformers"]]
    if newer := os.environ.get("KVPAGODA_VLLM_TRANSFORMERS"):
        missed = {name: asked[name] for name, found in answer["specs"].items() if "absent" in found}
        second = ask(missed, newer)
        answer["specs"] |= second["specs"]
        versions.append(second["transformers"])
    if folder := os.environ.get("KVPAGODA_SGLANG_PATH"):
        told = {name: {**asked[name], **fields} for name, fields in SGLANG.items()}
        sglang = answered("sglang_sizes", told, (newer, folder), 500)
    else:
        sglang = json.loads(RESULT.read_text())["sglang"]
    rows, served = compared(answer, asked), compared(ask(SERVED), SERVED)
    published = ask_published()
    result = {"vllm": answer["vllm"], "transformers": versions, "types": rows, "presets": served, "sglang": sglang}
    result["published"] = published
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    for name, row in {**rows, **served}.items():
        if "absent" in row:
            print(name, "absent:", row["absent"][:150])
        elif row["ours"] != row["vllm"]:
            print(name, row, EXPLAINED.get(name, "UNEXPLAINED"))
    print(sum("ours" in row and row["ours"] == row["vllm"] for row in rows.values()), "agree of", len(rows))


if __name__ == "__main__":
    main()
