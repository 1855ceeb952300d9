"""Tiny random models with an encoder, and what transformers' own cache makes of them."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from models import randomise

BASE: dict[str, Any] = dict(
    vocab_size=128, pad_token_id=0, decoder_start_token_id=1, eos_token_id=None, bos_token_id=None,
    forced_eos_token_id=None, dtype="float32",
)  # fmt: skip
BART = dict(
    d_model=48, decoder_layers=3, decoder_attention_heads=4, decoder_ffn_dim=64, encoder_layers=2,
    encoder_attention_heads=6, encoder_ffn_dim=32, init_std=0.2, max_position_embeddings=64,
)  # fmt: skip
T5 = dict(d_model=48, d_kv=10, d_ff=64, num_layers=2, num_decoder_layers=3, num_heads=4)
ENCODERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys("bart blenderbot blenderbot-small m2m_100 marian mbart mvp pegasus plbart".split(), BART),
    **dict.fromkeys("longt5 mt5 t5 umt5".split(), T5),
    "whisper": dict(
        BART, max_target_positions=64, num_mel_bins=8, max_source_positions=10, suppress_tokens=None,
        begin_suppress_tokens=None,
    ),
}  # fmt: skip
"""Model type -> what differs from ``BASE``."""


def model_of(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model of type ``name`` in eval mode."""
    config = transformers.CONFIG_MAPPING[name](**{**BASE, **ENCODERS[name], **changes})
    kind = transformers.AutoModelForSpeechSeq2Seq if name == "whisper" else transformers.AutoModelForSeq2SeqLM
    torch.manual_seed(0)
    model = kind.from_config(config, dtype=dtype).eval()
    randomise(model)
    return model


def inputs_of(model: Any, lengths: tuple[int, ...]) -> list[Any]:
    """Random inputs of the encoder, of ``lengths`` positions where the model takes any."""
    source = torch.Generator().manual_seed(1)
    if model.main_input_name == "input_features":
        frames = 2 * model.config.max_source_positions
        return [torch.randn(model.config.num_mel_bins, frames, generator=source) for _ in lengths]
    return [torch.randint(2, 100, (n,), generator=source).tolist() for n in lengths]


@torch.no_grad()
def run(model: Any, given: Any, ids: list[int], past: Any = None) -> Any:
    """One pass over ``ids`` of the decoder, with transformers' own cache."""
    inputs = {
        model.main_input_name: torch.as_tensor(given)[None].to(torch.int64 if type(given) is list else model.dtype)
    }
    return model(**inputs, decoder_input_ids=torch.tensor([ids]), past_key_values=past, use_cache=True)


def greedy(model: Any, given: Any, prompt: list[int], n: int) -> tuple[list[int], torch.Tensor]:
    """``n`` greedy tokens with transformers' own cache, and the logits from which each was chosen, ``[n, vocab]``."""
    ids, past, logits = list(prompt), None, []
    for _ in range(n):
        found = run(model, given, ids if past is None else ids[-1:], past)
        past = found.past_key_values
        logits.append(found.logits[0, -1])
        ids.append(int(logits[-1].argmax()))
    return ids[len(prompt) :], torch.stack(logits)
