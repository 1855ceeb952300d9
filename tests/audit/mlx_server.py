"""mlx-lm's server with a tiny random model: ``FOLDER PORT FAULT``. It runs where mlx-lm is, which is not here.

FAULT is one of its prompt cache: "rows": of one layer of a hit, 16 rows are those of another place; "long": a hit is one token
longer than what is common, whose row is that of another text; "keys": 16 tokens of a prompt do not count for what is common.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm import server
from mlx_lm.models import llama
from mlx_lm.models.cache import LRUPromptCache
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CONFIG: dict[str, Any] = dict(
    model_type="llama", hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=128,
    rms_norm_eps=1e-6, vocab_size=512, rope_theta=1e4, max_position_embeddings=4096, tie_word_embeddings=False,
    num_hidden_layers=4, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save(folder: Path) -> None:
    """Write a model with random weights and a tokenizer for which each byte is a token."""
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    drawn = tree_map(lambda value: mx.random.normal(value.shape) * 0.3 if value.ndim > 1 else value, model.parameters())
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(drawn)), metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    names = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<{i}>" for i in range(len(names), 512)]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def plant_rows() -> None:
    """Put rows of another place into what is found."""
    fetch = LRUPromptCache.fetch_nearest_cache

    def wrong(self: Any, *args: Any) -> Any:
        found, rest = fetch(self, *args)
        for one in found or ():
            if getattr(one, "keys", None) is not None and (n := getattr(one, "offset", 0)) > 48:
                one.keys[..., n - 32 : n - 16, :] = one.keys[..., n - 48 : n - 32, :]
                break
        return found, rest

    LRUPromptCache.fetch_nearest_cache = wrong


def plant_long() -> None:
    """Let a hit be one token longer than what is common, where there is a row of another text."""
    fetch = LRUPromptCache.fetch_nearest_cache

    def wrong(self: Any, *args: Any) -> Any:
        found, rest = fetch(self, *args)
        if found and len(rest) > 1 and all(one.offset < one.keys.shape[2] for one in found):
            for one in found:
                one.offset += 1
            rest = rest[1:]
        return found, rest

    LRUPromptCache.fetch_nearest_cache = wrong


def plant_keys() -> None:
    """Find and keep prompts by tokens of which the 16 after the eighth are all the same."""
    for name in ("fetch_nearest_cache", "insert_cache"):
        call = getattr(LRUPromptCache, name)

        def keyed(self: Any, model: Any, tokens: Any, *args: Any, call: Any = call, **more: Any) -> Any:
            said = [*tokens]
            done = call(self, model, [*said[:8], *[0] * len(said[8:24]), *said[24:]], *args, **more)
            if isinstance(done, tuple) and len(done[1]):
                done = done[0], said[-len(done[1]) :]
            return done

        setattr(LRUPromptCache, name, keyed)


if __name__ == "__main__":
    folder, port, fault = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    save(folder)
    {"": lambda: None, "rows": plant_rows, "long": plant_long, "keys": plant_keys}[fault]()
    sys.argv[1:] = [
        "--model", str(folder), "--port", port, "--host", "127.0.0.1", "--log-level", "WARNING", "--prompt-cache-size", "6",
    ]  # fmt: skip
    server.main()
