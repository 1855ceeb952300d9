"""``Schema.from_hf_config`` takes paths, folders and names of presets."""

from __future__ import annotations

import json
from pathlib import Path

from kvpagoda import Schema
from kvpagoda.errors import SchemaError
from raises import raises


def test_a_config_by_path_folder_or_preset(tmp_path: Path) -> None:
    config = dict(model_type="llama", num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    (tmp_path / "config.json").write_text(json.dumps(config))
    wanted = Schema.from_hf_config(config, dtype="float32")
    for source in (tmp_path, str(tmp_path), tmp_path / "config.json", str(tmp_path / "config.json")):
        assert Schema.from_hf_config(source, dtype="float32") == wanted
    preset = Schema.from_hf_config("Qwen/Qwen3-8B")
    assert preset.name == "qwen3-8b" and preset == Schema.from_hf_config("qwen3-8b") and len(preset.layers) == 36
    (tmp_path / "text").write_text("no")
    (tmp_path / "list.json").write_text("[1]")
    for source, needed in (
        ("qwen3-8", "qwen3-8"), (tmp_path / "none.json", str(tmp_path / "none.json")), (3, "int"),
        ("some-lab/Some-Model", "some-lab/Some-Model"), (tmp_path / "text", str(tmp_path / "text")),
        (tmp_path / "list.json", "list"),
    ):  # fmt: skip
        with raises(SchemaError, needed=needed):
            Schema.from_hf_config(source)


def test_no_error_counts_the_types_that_the_page_counts_otherwise() -> None:
    with raises(SchemaError, field="model_type", needed="lxyzma"):
        Schema.from_hf_config({"model_type": "lxyzma"})
