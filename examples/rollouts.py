"""Rollouts for reinforcement learning: many samples of one prompt, weights updated between and during them.

Rows that were cached with old weights are wrong after an update. ``cache.invalidate()`` stops their reuse at once,
while requests run:

- A running sample continues over the rows that it has, as asynchronous trainers want it. ``sequence.epochs`` says which
  tokens were computed with which weights. Nothing that it computed is cached for reuse.
- A sequence that is opened after the update computes its whole prompt with the new weights.
- While the trainer works, ``cache.sleep()`` gives the cache's memory to it. Running samples go on after ``cache.wake()``.
- Samples of a ``Namespace`` with an epoch stay on that epoch and share blocks among themselves. The engine has to keep
  the old weights for them.

    python examples/rollouts.py
"""

from __future__ import annotations

import numpy as np
from tiny_model import VOCAB, TinyModel, go_on, is_exact

from kvpagoda import KVCache, Namespace

SAMPLES, LENGTH = 6, 24


def samples(model: TinyModel, cache: KVCache, prompt: list[int], seed: int) -> list[list[int]]:
    """Return ``SAMPLES`` texts that begin with ``prompt``. The prompt is computed once, in the first sequence; the
    others are forked from it. Sample ``i`` is drawn with ``seed + i``."""
    first = cache.open(prompt, reserve=len(prompt) + LENGTH)
    missing = np.array(prompt[first.length : -1], np.int32)  # all but the last token, whose logits each sample needs
    if len(missing):
        model.forward(cache.batch([first], [len(missing)]), missing)
        first.commit(missing)
    sequences = [first, *(first.fork(reserve=len(prompt) + LENGTH) for _ in range(SAMPLES - 1))]
    texts = [[*prompt] for _ in sequences]
    for i, (sequence, text) in enumerate(zip(sequences, texts)):
        go_on(model, cache, sequence, text, LENGTH, seed + i)
        sequence.close()
    return texts


def between(model: TinyModel, cache: KVCache, prompt: list[int]) -> dict[str, object]:
    """Update the weights between two batches of rollouts."""
    before, results = model.computed_tokens, dict[str, object]()
    results["exact, epoch 0"] = all(
        is_exact(model, np.array(text), len(prompt), i) for i, text in enumerate(samples(model, cache, prompt, 0))
    )
    results["computed"] = model.computed_tokens - before
    results["computed without sharing"] = SAMPLES * (len(prompt) + LENGTH - 1)
    results["found before the update"] = cache.lookup(prompt).resumable
    slept = cache.sleep()  # what is cached belongs to the old weights: nothing is kept
    model.load(TinyModel(seed=1))
    cache.invalidate()
    cache.wake()
    results["bytes for the trainer"], results["blocks dropped"] = slept.given_back, slept.dropped
    results["found after the update"] = cache.lookup(prompt).resumable
    results["exact, epoch 1"] = all(
        is_exact(model, np.array(text), len(prompt), i) for i, text in enumerate(samples(model, cache, prompt, 0))
    )
    return results


def during(model: TinyModel, cache: KVCache, prompt: list[int]) -> dict[str, object]:
    """Update the weights while a sample is half done."""
    text, old = [*prompt], TinyModel(seed=1)
    with cache.open(prompt, reserve=len(prompt) + LENGTH) as sequence:
        go_on(model, cache, sequence, text, LENGTH // 2, seed=9)
        updated_at = len(text)
        slept = cache.sleep()  # the rows of the running sample wait in host memory
        model.load(TinyModel(seed=2))
        cache.invalidate()
        cache.wake()
        go_on(model, cache, sequence, text, LENGTH // 2, seed=9)
        epochs = sequence.epochs
    return {
        "requests that slept": slept.running,
        "epochs of the running sample": epochs,  # the trainer uses them for importance weights, or for a mask
        "exact until the update": is_exact(old, np.array(text[:updated_at]), len(prompt), 9),
        "exact for one model as a whole": any(
            is_exact(weights, np.array(text), len(prompt), 9) for weights in (old, model)
        ),
        "found after it closed": cache.lookup(text).resumable,
    }


def staying(model: TinyModel, cache: KVCache, prompt: list[int]) -> dict[str, object]:
    """Update the weights between two samples of a group, and compute the second sample with the old weights too."""
    group, old, texts = Namespace(epoch=cache.epoch), TinyModel(seed=2), [[*prompt], [*prompt]]
    with cache.open(prompt, group, reserve=len(prompt) + LENGTH) as first:
        go_on(old, cache, first, texts[0], LENGTH // 2, seed=9)
        cache.invalidate()  # the engine keeps both: other requests would use the new weights, in ``model``
        model.load(TinyModel(seed=3))
        go_on(old, cache, first, texts[0], LENGTH // 2, seed=9)
        with cache.open(prompt, group, reserve=len(prompt) + LENGTH) as second:
            go_on(old, cache, second, texts[1], LENGTH, seed=9)
            epochs, found = second.epochs, second.cached_tokens
    return {
        "epochs of the second sample": epochs,
        "found of the first sample": found,
        "both exact, old weights": all(is_exact(old, np.array(text), len(prompt), 9) for text in texts),
        "found by the new weights": cache.lookup(prompt).resumable,
    }


def adapters(model: TinyModel, cache: KVCache, prompt: list[int]) -> dict[str, object]:
    """Update one adapter: what is cached for other adapters stays valid."""
    for name in ("math", "code"):
        with cache.open(prompt, Namespace(adapter=name)) as sequence:
            go_on(model, cache, sequence, [*prompt], 1)
    cache.invalidate(Namespace(adapter="math"))
    found = {name: cache.lookup(prompt, Namespace(adapter=name)).resumable for name in ("math", "code")}
    return {"found for the updated adapter": found["math"], "found for the other adapter": found["code"]}


def main() -> dict[str, object]:
    model = TinyModel(seed=0)
    cache = KVCache(model.schema, "512KiB", device="cpu", block_size=8, max_requests=SAMPLES)
    prompt = np.random.default_rng(0).integers(0, VOCAB, 70).tolist()
    results = {**between(model, cache, prompt), **during(model, cache, prompt)}
    results |= {**staying(model, cache, prompt), **adapters(model, cache, prompt)}
    cache.check()
    for name, value in results.items():
        print(f"{name:>31}  {value}")
    computed, without = results["computed"], results["computed without sharing"]
    print(
        f"\n{SAMPLES} samples of one prompt: {computed} tokens were computed in place of {without}, because the prompt was "
        f"computed once.\nAfter the update nothing of the old weights was found, and all samples are exact."
    )
    return results


if __name__ == "__main__":
    main()
