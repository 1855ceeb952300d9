"""``Schema.from_hf_config(layout=)``: which rows a name is for, what follows from it, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvpagoda import DSV4Config, KVCache, Schema
from kvpagoda.errors import BadInput, LayoutError, SchemaError
from kvpagoda.layouts import Layout, named, names
from kvpagoda.layouts.named import table
from kvpagoda.layouts.pages import page_choice
from raises import raises

LLAMA = dict(
    model_type="llama", num_hidden_layers=2, hidden_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=64
)
V32: dict[str, Any] = dict(
    model_type="deepseek_v32", num_hidden_layers=3, hidden_size=7168, num_attention_heads=128, num_key_value_heads=128,
    kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128, index_n_heads=64, index_topk=2048, dtype="bfloat16",
)  # fmt: skip
GDN: dict[str, Any] = dict(
    model_type="qwen3_next", num_hidden_layers=4, hidden_size=2048, num_attention_heads=16, num_key_value_heads=2,
    head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=64,
    linear_conv_kernel_dim=4,
)  # fmt: skip


def pages(schema: Schema, block_size: int = 64) -> list[tuple[tuple[str, ...], int]]:
    """Rows and bytes of each page of the first layer."""
    layout = schema.groups[0].block_layout(block_size)
    return [(page.rows, page.nbytes) for page in layout.pages if page.layer == layout.pages[0].layer]


def test_latents_and_their_rope_keys_are_one_row_by_default() -> None:
    layout = Schema.from_hf_config(V32).groups[0].block_layout(64)
    latent, rope = layout.places[:2]
    assert (latent.offset, latent.strides, rope.offset, rope.strides) == (0, (1152, 1024, 2), 1024, (1152, 128, 2))
    assert pages(Schema.from_hf_config(V32)) == [(("latent", "k_rope"), 64 * 1152), (("index_key",), 64 * 256)]


def test_keys_are_innermost_in_the_states_of_delta_nets() -> None:
    """The state is [heads, key, value] to the model; ``gdn-state-kv`` has it so in memory."""

    def strides(schema: Schema) -> tuple[int, ...]:
        return next(one.strides for one in schema.state_layout.places if one.field.name == "recurrent")

    ours, theirs = Schema.from_hf_config(GDN), Schema.from_hf_config(GDN, layout="gdn-state-kv")
    assert strides(ours)[1:] == (128 * 64 * 4, 4, 128 * 4) and strides(theirs)[1:] == (128 * 64 * 4, 64 * 4, 4)
    assert ours.fingerprint != theirs.fingerprint
    assert ours.fingerprint == Schema.from_hf_config(GDN, layout={"recurrent": "gdn-state-vk"}).fingerprint


def test_packed_rows_of_latents_and_indexers() -> None:
    schema = Schema.from_hf_config(V32, layout={"latent": "flashmla-v32", "indexer": "deepgemm-indexer"})
    assert pages(schema) == [(("latent",), 64 * 656), (("index_key",), 64 * 132)]
    assert schema.groups[0].block_layout(64).nbytes % 656 == 0 and schema.bytes_per_token == 3 * (656 + 132)
    names = {place.field.name: place.strides for place in schema.groups[0].block_layout(64).places}
    assert names["latent_fp8"] == (656, 656, 1) and names["index_key_inv_scale"] == (4, 4)


def test_packed_rows_of_compressed_entries_and_their_window() -> None:
    schema = DSV4Config.flash().schema().laid_out(["flashmla-dsv4", "deepgemm-indexer-fp4"])
    layout = schema.groups[0].block_layout(128)
    assert layout.nbytes % 576 == 0 and schema.state_layout.nbytes % 576 == 0
    assert {page.nbytes for page in layout.pages} == {32 * 584, 32 * 68, 584}
    assert schema.state_layout.pages[0].nbytes == 128 * 584


def test_dialects_are_told_apart() -> None:
    """Engines whose dialects differ by a floor share no prefix and no record."""
    prints = {
        Schema.from_hf_config(V32, layout=f"flashmla-v32:{dialect}").fingerprint
        for dialect in ("flashmla", "flashinfer_raw", "sglang_raw")
    }
    keys = {
        KVCache(Schema.from_hf_config(V32, layout=name), "4MiB", device="none", max_requests=1).core.namespaces.key(
            None
        )
        for name in ("flashmla-v32:flashmla", "flashmla-v32:flashinfer_raw", "sglang-dsa")
    }
    assert len(prints) == len(keys) == 3
    assert Schema.from_hf_config(V32, layout="sglang-dsa").fingerprint in prints  # the same bytes by another name


def test_every_name_is_read_or_refused_for_a_reason() -> None:
    refused = {}
    for name in names():
        try:
            assert page_choice(name).kind
        except (LayoutError, BadInput) as error:
            refused[name] = str(error)
    assert {*refused} == {"sglang-host-page-first", "sglang-host-page-head", "sglang-host-mla-page-first"}
    assert all("tokens lie outside of layers" in why for why in refused.values())


def test_the_pages_of_a_cache_lie_as_the_whole_layout_does() -> None:
    """Of one layer, block and slot the digits of the pages in ``named.json`` have the strides that they have in the layout."""
    for name, entry in table()["layouts"].items():
        outer = {"L": "layers", "B": "blocks", "S": "states"}
        alone = {outer[letter]: 1 for letter in entry["sizes"] if letter in outer}
        whole = named(name, **alone, **({"blocks": 1} if "N" in entry["sizes"] else {}))
        sizes = {"N": whole.page_size if "N" in entry["sizes"] else 256, "L": 1}
        sizes |= {axis.name: axis.size for axis in whole.axes if len(axis.name) < 3 and axis.name not in "TLS"}
        for page in entry.get("pages", ()):
            if "conv[" in page:  # one row of several parts
                assert page.startswith("W ") == bool(re.search(r"\bW \(", entry["expression"]))
                continue
            given = {word: size for word, size in sizes.items() if re.search(rf"\b{word}\b", page)}
            given |= {"T": sizes["N"]} if "N" in given else {}
            laid = Layout.of(page.replace("{dtype}", entry["dtype"]), **given)
            for part in laid.places:
                told = whole.strides({"k_rope": "rope", "recurrent": "state"}.get(part.name, part.name))
                told = {word.replace("T", "N").replace("rope", "k_rope"): stride for word, stride in told.items()}
                for word, stride in laid.strides(part.name).items():
                    assert told[word] == stride or word in "BL", (name, part.name, word)


@pytest.mark.parametrize(
    ("config", "layout", "rule", "needed", "available"),
    [
        (LLAMA, "flashmla-v32", None, "flashmla-v32", "latent"),
        (LLAMA, {"latent": "trtllm"}, None, "latent", "attention"),
        (V32, ["flashmla-v32", "vllm-mla"], None, "vllm-mla", "flashmla-v32"),
        (V32, "flashmla-v32:fast", "dialect", "fast", ("flashmla", "vllm", "flashinfer_raw", "sglang_raw")),
        (V32, "trtlm-mla", "name", "trtlm-mla", None),
        (dict(V32, kv_lora_rank=256), "flashmla-v32", "size", (256, 64), (512, 64)),
        (dict(V32, kv_lora_rank=544, qk_rope_head_dim=32), "flashmla-v32", "size", (544, 32), (512, 64)),
        (dict(LLAMA, head_dim=24), "gdn-state-vk", None, "gdn-state-vk", "recurrent"),
    ],
)
def test_what_does_not_fit_is_refused(
    config: dict[str, Any], layout: Any, rule: str | None, needed: Any, available: Any
) -> None:
    kind, named = (SchemaError, {}) if rule is None else (LayoutError, {"rule": rule})
    with raises(kind, needed=needed, available=available, **named):
        Schema.from_hf_config(config, layout=layout)
