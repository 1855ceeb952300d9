"""Models that pass their states around themselves: what lies in the cache is what transformers hands back, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_every_family import tiny  # noqa: E402

from kvpagoda.hf.cache_name import cache_name_of  # noqa: E402
from kvpagoda.hf.model_cache import runner_of  # noqa: E402

TOKENS = np.random.default_rng(1).integers(2, 100, 21).astype(np.int32)


def own_states(model: Any, output: Any) -> list[tuple[Any, ...]]:
    """For each layer the tensors of a forward pass that transformers ran by itself."""
    if model.config.model_type == "rwkv":
        return list(zip(*(state.unbind(-1) for state in output.state)))
    return list(output[cache_name_of(model)].rnn_state.values())


@pytest.mark.parametrize(("name", "changes"), [("rwkv", {}), ("xlstm", dict(hidden_size=128, num_heads=2))])
def test_the_cache_holds_the_states_that_transformers_hands_back(
    name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(name, monkeypatch, **changes)
    runner, _ = runner_of(model, 32, 0, "raw", dict(num_blocks=8, max_requests=2, poison=True))
    with runner.cache.open(TOKENS) as sequence, torch.no_grad():
        argument = cache_name_of(model)
        past: Any = None
        for piece in (TOKENS[:13], TOKENS[13:14], TOKENS[14:]):
            ids = torch.from_numpy(piece.astype(np.int64))[None]
            output = model(input_ids=ids, use_cache=True, **({} if past is None else {argument: past}))
            past = getattr(output, argument)
            sequence.extend(len(piece))
            logits = runner.step([(sequence, piece)])
            sequence.commit(piece)
            torch.testing.assert_close(logits[0], output.logits[0, -1])
        batch = runner.cache.batch([sequence], [1])
        for layer, tensors in zip(runner.cache.schema.layers, own_states(model, output), strict=True):
            pool = batch.layer(layer.index).state
            for row, tensor in zip(layer.state_rows(), tensors, strict=True):
                assert torch.equal(pool.read(row.name, (batch.state_indices.long(),))[0, 0], tensor[0]), row.name


def test_rwkv_decodes_one_request_in_a_pass_because_its_code_mixes_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of one token become two tokens of two rows each."""
    model, ids = tiny("rwkv", monkeypatch), torch.tensor([[3, 4], [5, 6]])
    with torch.no_grad():
        state = model(input_ids=ids, use_cache=True).state
        assert model(input_ids=ids[:, :1], state=state, use_cache=True).logits.shape[:2] == (2, 2)
