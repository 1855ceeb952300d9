"""Train the model of ``kvpagoda generate``, a small DeepSeek-V4 over bytes, in less than an hour on two cores.

    python tools/train_demo.py --steps 3600 --out src/kvpagoda/hf/demo

It writes ``config.json``, ``model.safetensors`` (matrices in float8, the rest in float16), ``held_out.txt`` (text that
is not used for training) and ``training.json`` (the settings and the loss). The text is prose: paragraphs of this
project's documents and docstrings, and of the language topics of Python's documentation (PSF licence). Needs the ``hf``
extra. The same text, steps, seed, threads, machine and version of torch give the same weights, bit for bit.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import platform
import random
import re
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
HELD_OUT_BYTES = 16_384
PHASES = ((0.75, 4, 256), (0.25, 1, 1024))
"""(share of the steps, texts per step, bytes per text): short texts first, then texts longer than the window."""
LEARNING_RATE, MATRIX_RATE, WARM_UP = 3e-3, 0.02, 0.03
"""Learning rate of AdamW; learning rate of Muon, for matrices; share of the steps in which both rise from 0."""

Tensor = torch.Tensor


def config() -> DeepseekV4Config:
    """Return a config with all three kinds of layers and the real window and ratios. A head has 64 numbers without and
    16 with the rotary position, so that rows can be packed in every format."""
    return DeepseekV4Config(
        vocab_size=256, hidden_size=160, moe_intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, head_dim=80,
        q_lora_rank=64, partial_rotary_factor=0.2, num_experts_per_tok=2, n_routed_experts=4, n_shared_experts=1,
        compress_ratios=[0, 4, 128, 4, 0], num_hash_layers=1, sliding_window=128, o_groups=2, o_lora_rank=32,
        index_n_heads=16, index_head_dim=32, index_topk=128, hc_mult=2, hc_sinkhorn_iters=3, max_position_embeddings=8192,
        eos_token_id=10, bos_token_id=None, dtype="float32",
    )  # fmt: skip


# -- text
# ----------------------------------------------------------------------------------------------------------------


def docstrings(path: Path) -> Iterator[str]:
    """Yield every docstring of a Python file; nothing if this version of Python cannot parse it."""
    try:
        tree = ast.parse(path.read_text())
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of ``text`` that are plain English sentences, each as one line, without markup."""
    for paragraph in re.split(r"\n\s*\n", text):
        line = re.sub(r"\s+", " ", paragraph).strip()
        line = re.sub(r"[`*_]{1,2}([^`*]+)[`*_]{1,2}", r"\1", line).removeprefix("- ")
        if not (60 <= len(line) <= 1200 and line.isascii() and line[0].isupper() and line[-1] in ".:!?"):
            continue
        is_plain = sum(c.isalpha() or c == " " for c in line) >= 0.9 * len(line)
        if is_plain and not any(mark in line for mark in (">>>", "|", " = ", "://")):
            yield line


def python_paragraphs() -> list[str]:
    """Return the paragraphs of the language topics of Python's documentation, sorted."""
    from pydoc_data.topics import topics

    return sorted({line for text in topics.values() for line in paragraphs(text)})


def is_held_out(line: str) -> bool:
    """Whether a paragraph is not trained on; its content alone decides."""
    return blake2b(line.encode(), digest_size=1).digest()[0] < 6


def corpus() -> tuple[str, str]:
    """Return (training text, held-out text)."""
    own: list[str] = []
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "benchmarks" / "LOG.md"):
        own += paragraphs(path.read_text())
    for path in (ROOT / "src").rglob("*.py"):
        own += [line for text in docstrings(path) for line in paragraphs(text)]
    kept, held = [], []
    for line in sorted(dict.fromkeys(own)) + python_paragraphs():
        (held if is_held_out(line) else kept).append(line)
    random.Random(0).shuffle(held)
    return "\n".join(kept), "\n".join(held)[:HELD_OUT_BYTES]


# -- training
# ------------------------------------------------------------------------------------------------------------


class Muon(torch.optim.Optimizer):
    """An optimizer for matrices ``[.., rows, columns]``: momentum, orthogonalised (Jordan et al. 2024, Muon)."""

    def __init__(self, parameters: Any, lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 1 - group["momentum"])
                step = orthogonal(p.grad.lerp(mean, group["momentum"]))
                p.add_(step, alpha=-group["lr"] * max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5)


def orthogonal(x: Tensor, rounds: int = 5) -> Tensor:
    """Return the orthogonal matrix near ``x`` ``[.., m, n]``, by ``rounds`` of a quintic Newton-Schulz iteration."""
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if is_tall else x


def train(model: Any, text: bytes, num_steps: int, seed: int, out: Path) -> tuple[int, float]:
    """Train ``model`` and save it every 1,000 steps. Return (bytes read, mean loss of the last
    100 steps in bits per byte)."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    matrices, rest = [], []
    for name, p in model.named_parameters():
        is_matrix = p.ndim >= 2 and min(p.shape[-2:]) > 8 and not any(w in name for w in ("embed", "lm_head", "bias"))
        (matrices if is_matrix else rest).append(p)
    optimizers = [
        Muon(matrices, MATRIX_RATE),
        torch.optim.AdamW(rest, LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0),
    ]
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    random_state, seen, losses = torch.Generator().manual_seed(seed), 0, [8.0]
    for step in range(1, num_steps + 1):
        done = (step - 1) / num_steps
        texts, length = PHASES[done >= PHASES[0][0]][1:]
        starts = torch.randint(len(data) - length - 1, (texts, 1), generator=random_state)
        batch = data[starts + torch.arange(length + 1)].long()
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(rest, 1.0)
        share = min(1.0, done / WARM_UP, (1 - done) / 0.5)  # share of the full learning rate
        for rate, group in zip(rates, (g for optimizer in optimizers for g in optimizer.param_groups)):
            group["lr"] = rate * max(share, 0.01)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seen += batch.numel()
        losses.append(loss.item() / math.log(2))
        if step % 100 == 0:
            print(f"{done:5.0%}  step {step}, {seen:,} bytes: {sum(losses[-100:]) / 100:.3f} bits a byte", flush=True)
        if step % 1000 == 0:
            save(model, out)
    return seen, sum(losses[-100:]) / len(losses[-100:])


def save(model: Any, out: Path) -> None:
    """Write the config and the weights of ``model`` to the folder ``out``."""
    model.save_pretrained(out, state_dict={name: stored(t) for name, t in model.state_dict().items()})


def stored(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in the dtype in which it is stored: matrices in float8, vectors and small matrices in float16.

    The file is half as large as in float16. float8 holds up to 448; trained weights are
    far below.
    """
    if not tensor.is_floating_point():
        return tensor
    is_large = tensor.ndim >= 2 and tensor.numel() >= 4096
    return tensor.to(torch.float8_e4m3fn) if is_large else tensor.half()


@torch.no_grad()
def bits_per_byte(model: Any, text: bytes, length: int = 1024) -> float:
    """Return the mean bits that ``model`` needs for a byte of ``text``, evaluated in pieces of ``length`` bytes."""
    pieces = (
        torch.frombuffer(bytearray(text[: len(text) // length * length]), dtype=torch.uint8).long().view(-1, length)
    )
    logits = torch.cat([model(input_ids=piece[None], use_cache=False).logits for piece in pieces])
    return cross_entropy(logits[:, :-1].flatten(0, 1), pieces[:, 1:].flatten()).item() / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(given.seed)
    text, held_out = corpus()
    model = DeepseekV4ForCausalLM(config())
    with torch.no_grad():
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):  # the experts of each byte, in the layers that route by hash
                table.copy_(torch.arange(256)[:, None] + torch.tensor([0, 1]) + torch.arange(256)[:, None] // 16)
                table.remainder_(model.config.n_routed_experts)
    number = sum(p.numel() for p in model.parameters())
    print(f"{number:,} parameters; {len(text):,} bytes of text, {len(held_out):,} held out")
    seen, loss = train(model.train(), text.encode(), given.steps, given.seed, given.out)
    model.eval()
    model.load_state_dict({name: stored(t).to(t.dtype) for name, t in model.state_dict().items()})
    held_loss = bits_per_byte(model, held_out.encode())
    print(f"{given.steps} steps, {seen:,} bytes: {loss:.3f} bits a byte; held out {held_loss:.3f}")
    save(model, given.out)
    (given.out / "held_out.txt").write_text(held_out)
    figures = {
        "parameters": number, "steps": given.steps, "threads": given.threads, "seed": given.seed, "bytes_read": seen,
        "corpus_bytes": len(text), "corpus_digest": blake2b(text.encode(), digest_size=16).hexdigest(),
        "bits_per_byte": round(loss, 3), "held_out_bits_per_byte": round(held_loss, 3),
        "python": platform.python_version(), "torch": torch.__version__,
    }  # fmt: skip
    (given.out / "training.json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
