"""What a model type takes for a field that its config leaves out.

Configs of multimodal models are written as differences from these values, so without them such a config cannot be read.
A test compares every number with transformers.
"""

from __future__ import annotations

COLUMNS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window",
    "max_position_embeddings", "vocab_size",
)  # fmt: skip

TABLE = """
afmoe                32  2048   16    -  128  1024    16384  200192  global_attn_every_n_layers=4
apertus              32  4096   32    -    -     -    65536  131072
arcee                32  2560   32    -    -     -     4096   32000
aria_text            32  4096   32    -    -     -     2048   32000
axk1                 61  7168   64   64    -     -    32768  163840  kv_lora_rank=512 qk_rope_head_dim=64
axk2                 48  2048   32   32   64     -   131072  163840
    + index_head_dim=128 kv_lora_rank=128 qk_rope_head_dim=32
bailing_hybrid       42  2560   32   32  128     -   262144  157184
    + kv_lora_rank=512 layer_group_size=6 qk_rope_head_dim=64 short_conv_kernel_size=4
bamba                32  4096   32    8    -     -   262144  128000
    + mamba_d_conv=4 mamba_d_head=auto mamba_d_state=256 mamba_expand=2 mamba_n_groups=1 mamba_n_heads=128
beam                 52  5120   48    8  128   512     8192  151936
biogpt               24  1024   16    -    -     -     1024   42384
bitnet               30  2560   20    5    -     -     2048  128256
bloom                 2    64    8    -    -     -        -  250880
codegen              28  4096   16    -    -     -     2048   50400
cohere               40  8192   64    -    -     -     8192  256000
cohere2              40  8192   64    -    -  4096     8192  256000
cohere2_moe          40  8192   64    -  128  4096     8192  256000
    + prefix_dense_sliding_window_pattern=1 sliding_window_pattern=4
ctrl                 48  1280   16    -    -     -      256  246534
cwm                  64  6144   48    8  128  8192   131072  128256
dbrx                 24  2048   16    -    -     -     2048   32000
deepseek_v2          32  4096   32    -    -     -     2048  102400  kv_lora_rank=512 qk_rope_head_dim=64
deepseek_v3          61  7168  128  128    -     -     4096  129280  kv_lora_rank=512 qk_rope_head_dim=64
deepseek_v32         61  7168  128  128   64     -   163840  129280
    + index_head_dim=128 kv_lora_rank=512 qk_rope_head_dim=64
deepseek_v4          43  4096   64    1  512   128  1048576  129280  index_head_dim=128
diffllama            16  2048   32    -    -     -     2048   32000
doge                 32  1024    8    -    -     -     2048   32768
dots1                62  4608   32   32    -  4096     2048  152064  max_window_layers=62
ernie4_5             18  1024   16    2  128     -   131072  103424
ernie4_5_moe         28  2560   20    4    -     -   131072  103424
exaone4              32  4096   32   32    -  4096     2048  102400  sliding_window_pattern=4
exaone_moe           32  4096   32   32    -  4096     2048  102400  sliding_window_pattern=4
falcon               32  4544   71    -    -     -     2048   65024  multi_query=1
falcon_h1            32  4096   32    8    -     -     8192  128000
    + mamba_d_conv=4 mamba_d_head=auto mamba_d_ssm=1024 mamba_d_state=256 mamba_n_groups=1 mamba_n_heads=128
falcon_mamba         32   768    -    -    -     -        -   50280  conv_kernel=4 expand=2 state_size=16
flex_olmo            32  4096   32    -    -     -     4096  100352
flint                49  2048   32    4  128   513   262144  150144
gemma                28  3072   16   16  256     -     8192  256000
gemma2               26  2304    8    4  256  4096     8192  256000
gemma3_text          26  2304    8    4  256  4096   131072  262208
gemma3n_text         35  2048    8    2  256   512    32768  262400  num_kv_shared_layers=15
gemma4_text          30  2304    8    4  256   512   131072  262144  num_kv_shared_layers=0
gemma4_unified_text  30  2304    8    4  256  1024   262144  262144  num_kv_shared_layers=0
glm                  40  4096   32    2  128     -   131072  151552
glm4                 40  4096   32    2  128     -   131072  151552
glm4_moe             46  4096   96    8    -     -   131072  151552
glm4_moe_lite        47  2048   20   20    -     -   202752  154880  kv_lora_rank=512 qk_rope_head_dim=64
glm4v_moe_text       46  4096   96    8    -     -    65536  151424
glm4v_text           40  4096   32    2    -     -    32768  151552
glm_moe_dsa          78  6144   64   64   64     -   202752  154880
    + index_head_dim=128 kv_lora_rank=512 qk_rope_head_dim=64
gpt2                 12   768   12    -    -     -     1024   50257
gpt_bigcode          12   768   12    -    -     -     1024   50257  multi_query=1
gpt_neo              24  2048   16    -    -     -     2048   50257
gpt_neox             44  6144   64    -    -     -     2048   50432
gpt_neox_japanese    32  2560   32    -    -     -     2048   32000
gpt_oss              36  2880   64    8   64   128   131072  201088
gptj                 28  4096   16    -    -     -     2048   50400
granite              32  4096   32    -    -     -     2048   32000
granite_swa          24  2560   20    4    -   128     8192  100352
granitemoe           32  4096   32    -    -     -     2048   32000
granitemoe_swa       32  4096   32    -    -   128     2048   32000
granitemoehybrid     32  4096   32    -    -     -     2048   32000
    + mamba_d_conv=4 mamba_d_head=auto mamba_d_state=256 mamba_expand=2 mamba_n_groups=1 mamba_n_heads=128
granitemoeshared     32  4096   32    -    -     -     2048   32000
helium               24  2560   20   20  128     -     4096   48000
hunyuan_v1_dense     32  4096   32    -    -     -     2048  290943
hunyuan_v1_moe       32  4096   32    -    -     -     2048  290943
hy_v3                80  4096   64    8  128     -   131072  120832
hy_v4                34  2816   32   32  256     -   262144  120832
    + index_head_dim=128 kv_lora_rank=512 qk_rope_head_dim=64
hyperclovax          32  4096   32    -    -     -     2048   32000
internlm3            48  4096   32    2  128     -    32768  128512
iquestcoder          80  5120   40    8  128     -   131072   76800
jais2                32  3328   26    -    -     -     8192  150272
jamba                32  4096   32    8    -     -   262144   65536
    + attn_layer_offset=4 attn_layer_period=8 mamba_d_conv=4 mamba_d_state=16 mamba_expand=2
jetmoe               12  2048    -   16    -     -     4096   32000  kv_channels=128
kimi_k2              61  7168  128  128    -     -     4096  129280  kv_lora_rank=512 qk_rope_head_dim=64
kimi_linear          27  2304   32   32    -     -  1048576  163840
    + kv_lora_rank=512 linear_conv_kernel_dim=4 linear_head_dim=128 linear_num_heads=32 qk_rope_head_dim=64
kolibri1             50  2560   48    4  128   513   262144  128000
laguna               40  2048   48    8  128     -   131072  100352
lfm2                 32  2560   32    8    -     -   128000   65536
lfm2_moe             32  2048   32    8    -     -   128000   65536  conv_L_cache=3
lfm3                 24  2048   16    4  128   256   128000  128000  conv_L_cache=7
llama                32  4096   32    -    -     -     2048   32000
llama4_text          48  5120   40    8  128     -   131072  202048
    + attention_chunk_size=8192 no_rope_layer_interval=4
longcat_flash        28  6144   64    -   64     -   131072  131072
    + kv_lora_rank=512 num_layers=28 qk_rope_head_dim=64
mamba                32   768    -    -    -     -        -   50280  conv_kernel=4 expand=2 state_size=16
mamba2               64  4096  128    -   64     -        -   32768
    + conv_kernel=4 n_groups=8 num_heads=128 state_size=128
mellum               28  2304   32    4  128     -   131072   98304
mimo_v2_flash        48  4096   64    4  192   129   131072  152576  v_head_dim=128
minicpm3             62  2560   40   40    -     -    32768   73448  kv_lora_rank=256 qk_rope_head_dim=32
minimax_m2           62  3072   48    8  128     -   196608  200064
minimax_m3_vl_text   60  6144   64    4  128     -   524288  200064
ministral            32  4096   32    8    -  4096   131072   32000
ministral3           34  4096   32    8  128     -   262144  131072
mistral              32  4096   32    8    -  4096   131072   32000
mixtral              32  4096   32    8    -     -   131072   32000
modernbert-decoder   22   768   12    -    -     -     8192   50368  local_attention=128
mpt                  24  2048   16    -    -     -     2048   50368
nanochat             12   768    6    -    -     -     2048   50304
nemotron             32  6144   48    -    -     -     4096  256000
nemotron_h            -  4096   32    8  128     -     4096  131072
    + conv_kernel=4 mamba_head_dim=64 mamba_num_heads=128 n_groups=8 ssm_state_size=128
olmo                 32  4096   32    -    -     -     2048   50304
olmo2                32  4096   32    -    -     -     2048   50304
olmo3                32  4096   32    -    -  4096     2048   50304
olmo_hybrid          32  3840   30    -    -     -    65536  100352  linear_conv_kernel_dim=4
olmoe                16  2048   16    -    -     -     4096   50304
opt                  12   768   12    -    -     -     2048   50272
persimmon            36  4096   64    -    -     -    16384  262144
phi                  24  2048   32    -    -     -     2048   51200
phi3                 32  3072   32    -    -     -     4096   32064
phimoe               32  4096   32    8    -     -   131072   32064
qwen2                32  4096   32   32    -  4096    32768  151936  max_window_layers=28
qwen2_5_vl_text      80  8192   64    8    -  4096    32768  152064  max_window_layers=80
qwen2_moe            24  2048   16   16    -  4096    32768  151936  max_window_layers=28
qwen2_vl_text        80  8192   64    8    -  4096    32768  152064  max_window_layers=80
qwen3                32  4096   32   32  128  4096    32768  151936  max_window_layers=28
qwen3_5_moe_text     40  2048   16    2  256     -    32768  248320
    + linear_conv_kernel_dim=4 linear_key_head_dim=128 linear_num_key_heads=16 linear_num_value_heads=32
    + linear_value_head_dim=128
qwen3_5_text         32  4096   16    4  256     -    32768  248320
    + linear_conv_kernel_dim=4 linear_key_head_dim=128 linear_num_key_heads=16 linear_num_value_heads=32
    + linear_value_head_dim=128
qwen3_moe            24  2048   32    4    -  4096    32768  151936
qwen3_next           48  2048   16    2  256     -    32768  151936
    + linear_conv_kernel_dim=4 linear_key_head_dim=128 linear_num_key_heads=16 linear_num_value_heads=32
    + linear_value_head_dim=128
qwen3_vl_moe_text    24  2048   16   16    -     -   128000  151936
qwen3_vl_text        32  4096   32   32  128     -   128000  151936
seed_oss             64  4096   80    8  128     -   524288  155136
smollm3              36  2048   16    4    -     -    32768  128256  no_rope_layer_interval=4
solar_open           48  4096   64    8  128     -   131072  196608
stablelm             32  2560   32   32    -     -     4096   50304
starcoder2           30  3072   24    2    -     -     4096   49152
vaultgemma           26  2304    8    4  256  4096     8192  256000
xglm                 24  1024   16    -    -     -     2048  256008
youtu                32  2048   16   16    -     -   131072  128256  kv_lora_rank=512 qk_rope_head_dim=64
zamba                76  3712   16   16    -     -     4096   32000
    + attn_layer_offset=4 attn_layer_period=6 mamba_d_conv=4 mamba_d_state=16 mamba_expand=2 n_mamba_heads=2
zamba2               54  2560   32    -    -     -     4096   32000
    + mamba_d_conv=4 mamba_d_state=64 mamba_expand=2 mamba_ngroups=1 n_mamba_heads=8
zaya                 40  2048    8    2  128     -   131072  262272  cca_time0=2 cca_time1=2
"""
"""A row a model type: the columns above (-: no default), then what only few types have, on lines that start with +."""


def parse(table: str) -> dict[str, dict[str, int | str]]:
    """``TABLE`` as {model type: {field: default}}."""
    rows: dict[str, dict[str, int | str]] = {}
    for line in table.replace("\n    +", "").strip().splitlines():
        name, *cells = line.split()
        pairs = [*zip(COLUMNS, cells), *(cell.split("=") for cell in cells[len(COLUMNS) :])]
        rows[name] = {field: int(value) if value.isdigit() else value for field, value in pairs if value != "-"}
    return rows


DEFAULTS = parse(TABLE)
