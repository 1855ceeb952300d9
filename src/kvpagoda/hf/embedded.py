"""The default model of ``kvpagoda generate``: a DeepSeek-V4 of 1.2 million parameters over bytes.

It has the real mix of layers (sliding window, compressed sparse, heavily compressed) with the real ratios and window;
only the widths are small, and its indexers were never trained. ``tools/train_demo.py`` trained it on the prose of this
project and of Python's documentation; ``demo/training.json`` says how. The line break at the end of a paragraph is its
end token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

FOLDER = Path(__file__).parent / "demo"

NUM_PROMPTS, PROMPT_BYTES = 4, 1600
"""How many prompts the package has, and the most bytes of each: long enough that computing one takes a second."""


def embedded_model() -> Any:
    """Load the model: float32 on the CPU, in eval mode. It reads only files of the package, and needs no network."""
    shows_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, local_files_only=True).eval()
    finally:
        if shows_progress:
            logging.enable_progress_bar()


def held_out_text() -> bytes:
    """Return prose of the same kind that the model was not trained on."""
    return (FOLDER / "held_out.txt").read_bytes()


def built_in_prompts() -> list[str]:
    """Return prompts that have no common beginning: neighbouring parts of the held-out text, each up to a whole
    word."""
    text = held_out_text().decode()
    parts = (text[begin : begin + PROMPT_BYTES] for begin in range(0, NUM_PROMPTS * PROMPT_BYTES, PROMPT_BYTES))
    return [part[: part.rindex(" ") + 1] for part in parts]


class ByteTokenizer:
    """Text to bytes and back: token id = byte value."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")
