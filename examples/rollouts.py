"""Rollouts for reinforcement learning: many samples of one prompt, weights updated between and during them.

What was cached with old weights is wrong after an update, and ``cache.invalidate()`` hides all of it at once, while requests
run. A sample that runs goes on over the rows that it has, as asynchronous trainers want it: ``sequence.epochs`` says which
tokens were computed with which weights. It leaves nothing behind. Everything that is opened from then on is computed anew;
but samples of a ``Namespace`` with an epoch stay on it, and share among themselves, while the old weights are still there.

    python examples/rollouts.py
"""

from __future__ import annotations

import numpy as np
from tiny_model import VOCAB, TinyModel, go_on, is_exact

from kvpagoda import KVCache, Namespace

SAMPLES, LENGTH = 6, 24


def samples(model: TinyModel, cache: KVCache, prompt: list[int], seed: int) -> list[list[int]]:
    """``SAMPLES`` answers to ``prompt``, which is computed once: the others are forked from the first."""
    first = cache.open(prompt, reserve=len(prompt) + LENGTH)
    missing = np.array(prompt[first.length : -1], np.int32)  # all but the last token: each sample needs its logits
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
    """An update between two batches of rollouts."""
    before, told = model.computed_tokens, dict[str, object]()
    told["exact, epoch 0"] = all(
        is_exact(model, np.array(text), len(prompt), i) for i, text in enumerate(samples(model, cache, prompt, 0))
    )
    told["computed"] = model.computed_tokens - before
    told["computed without sharing"] = SAMPLES * (len(prompt) + LENGTH - 1)
    told["found before the update"] = cache.lookup(prompt).resumable
    model.load(TinyModel(seed=1))
    cache.invalidate()
    told["found after the update"] = cache.lookup(prompt).resumable
    told["exact, epoch 1"] = all(
        is_exact(model, np.array(text), len(prompt), i) for i, text in enumerate(samples(model, cache, prompt, 0))
    )
    return told


def during(model: TinyModel, cache: KVCache, prompt: list[int]) -> dict[str, object]:
    """An update while a sample is half done."""
    text, old = [*prompt], TinyModel(seed=1)
    with cache.open(prompt, reserve=len(prompt) + LENGTH) as sequence:
        go_on(model, cache, sequence, text, LENGTH // 2, seed=9)
        turned = len(text)
        model.load(TinyModel(seed=2))
        cache.invalidate()
        go_on(model, cache, sequence, text, LENGTH // 2, seed=9)
        epochs = sequence.epochs
    return {
        "epochs of the sample that ran": epochs,  # for the trainer: importance weights, or a mask
        "exact until the update": is_exact(old, np.array(text[:turned]), len(prompt), 9),
        "of either weights as a whole": any(is_exact(one, np.array(text), len(prompt), 9) for one in (old, model)),
        "found of what it left": cache.lookup(text).resumable,
    }


def staying(model: TinyModel, cache: KVCache, prompt: list[int]) -> dict[str, object]:
    """An update, after which the second sample of a group is still of the weights of the first."""
    group, old, texts = Namespace(epoch=cache.epoch), TinyModel(seed=2), [[*prompt], [*prompt]]
    with cache.open(prompt, group, reserve=len(prompt) + LENGTH) as first:
        go_on(old, cache, first, texts[0], LENGTH // 2, seed=9)
        cache.invalidate()  # an engine that has both: a request of the new weights would ask ``model``
        model.load(TinyModel(seed=3))
        go_on(old, cache, first, texts[0], LENGTH // 2, seed=9)
        with cache.open(prompt, group, reserve=len(prompt) + LENGTH) as second:
            go_on(old, cache, second, texts[1], LENGTH, seed=9)
            epochs, found = second.epochs, second.cached_tokens
    return {
        "epochs of one that stayed": epochs,
        "found by it of the first": found,
        "both exact, old weights": all(is_exact(old, np.array(text), len(prompt), 9) for text in texts),
        "found by the new weights": cache.lookup(prompt).resumable,
    }


def adapters(model: TinyModel, cache: KVCache, prompt: list[int]) -> dict[str, object]:
    """An update of one adapter: what was cached for the others stays."""
    for name in ("math", "code"):
        with cache.open(prompt, Namespace(adapter=name)) as sequence:
            go_on(model, cache, sequence, [*prompt], 1)
    cache.invalidate(Namespace(adapter="math"))
    found = {name: cache.lookup(prompt, Namespace(adapter=name)).resumable for name in ("math", "code")}
    return {"found for the updated adapter": found["math"], "found for the other one": found["code"]}


def main() -> dict[str, object]:
    model = TinyModel(seed=0)
    cache = KVCache(model.schema, "512KiB", device="cpu", block_size=8, max_requests=SAMPLES)
    prompt = np.random.default_rng(0).integers(0, VOCAB, 70).tolist()
    told = {**between(model, cache, prompt), **during(model, cache, prompt)}
    told |= {**staying(model, cache, prompt), **adapters(model, cache, prompt)}
    cache.check()
    for name, value in told.items():
        print(f"{name:>31}  {value}")
    return told


if __name__ == "__main__":
    main()
