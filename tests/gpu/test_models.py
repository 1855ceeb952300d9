"""On a GPU as on a CPU: models of transformers, and a captured loop whose requests join and leave."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from kvpagoda.core.memory.virtual import VirtualMemory  # noqa: E402
from kvpagoda.hf import Generator  # noqa: E402
from models import VOCAB, tiny_model  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODELS = ("llama", "gemma3_text", "qwen3_next", "mamba2", "deepseek_v3", "gpt_oss", "deepseek_v4", "bamba")


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_generate_cold_and_warm(name: str) -> None:
    model = tiny_model(name).to("cuda")
    source = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, VOCAB, (n,), generator=source).tolist() for n in (3, 16, 33, 41)]
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, use_cache=False
        )
        wanted.append(found[0, len(prompt) :].tolist())
    generator = Generator(model, num_blocks=80, max_requests=4, prefill_chunk=16, poison=True)
    cold = generator.generate(prompts, 12)
    warm = generator.generate(prompts, 12)
    assert cold == warm == wanted and generator.stats().cached_tokens > 0
    generator.cache.check()


@pytest.mark.parametrize("sleeps", [False, True])
def test_a_captured_loop_of_64_rows(sleeps: bool) -> None:
    """``sleeps``: memory is given back between two servings; the graph finds it at the same addresses afterwards."""
    import gpu_engine
    from tiny_model import TinyModel, is_exact

    settings = {}
    if sleeps:
        pytest.importorskip("cuda.bindings", reason="pip install 'kvpagoda[cuda]'")
        settings["memory"] = VirtualMemory("cuda")
    model = TinyModel(device="cuda")
    engine = gpu_engine.Engine(model, "64MiB", 64, "cuda", **settings)
    requests = gpu_engine.serve(engine, 160, 40)
    graph = engine.graph
    if sleeps:
        assert engine.cache.sleep("nothing").given_back > 0
        engine.cache.wake()
        requests += gpu_engine.serve(engine, 80, 40, seed=1)
    engine.cache.check()
    assert engine.graph is graph is not None, "captured once"
    assert all(is_exact(model, np.array(one.text), one.prompt_length) for one in requests)
