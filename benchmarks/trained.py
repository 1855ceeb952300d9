"""Small models over bytes with K/V heads, trained in minutes on one thread.

The text is a part of that of ``tools/train_demo.py``: the language topics of Python's documentation, which do not
change with this project. So the same versions of Python and torch and the same machine give the same weights. They are
kept in ``build/trained``, by a digest of all that they depend on, and are no part of the package.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from tools.train_demo import PHASES, is_held_out, python_paragraphs, train

KEPT = Path(__file__).parents[1] / "build" / "trained"
SEED = 0
SIZES: dict[str, Any] = dict(
    vocab_size=256, hidden_size=128, intermediate_size=384, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    max_position_embeddings=2048, bos_token_id=None, eos_token_id=10, pad_token_id=None, tie_word_embeddings=False,
)  # fmt: skip
WINDOW = "sliding_attention"
FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "llama": (600, dict(num_hidden_layers=4)),
    "gemma3_text": (
        500,
        dict(
            num_hidden_layers=6, sliding_window=64, layer_types=[WINDOW, WINDOW, "full_attention"] * 2,
            query_pre_attn_scalar=64,
        ),
    ),
}  # fmt: skip
"""Model type -> (steps of training, the fields of its config beside ``SIZES``)."""


def training_text() -> bytes:
    """Return the text that the models are trained on."""
    return "\n".join(line for line in python_paragraphs() if not is_held_out(line)).encode()


def trained_model(model_type: str, *, is_quick: bool = False) -> Any:
    """Return the trained model of ``FAMILIES``: float32, in eval mode. It is trained if ``KEPT`` does not have it; the
    progress goes to stderr. ``is_quick``: two steps of training, and nothing is kept."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    num_steps, fields = FAMILIES[model_type]
    num_steps = 2 if is_quick else num_steps
    config = CONFIG_MAPPING[model_type](**SIZES, **fields)
    text = training_text()
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config).float()
    depends = repr((config.to_json_string(), num_steps, SEED, PHASES, torch.__version__)).encode() + text
    path = KEPT / f"{model_type}-{blake2b(depends, digest_size=8).hexdigest()}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()
    with redirect_stdout(sys.stderr):
        train(model.train(), text, num_steps, SEED, KEPT)
    if not is_quick:
        KEPT.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)
    return model.eval()
