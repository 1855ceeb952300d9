"""Speculative decoding: commit the accepted tokens, when to rewind, and why publishing drafts costs memory.

The rows of drafts are written like all others, behind the committed tokens. Only ``commit`` makes a row part of the
text, so a rejected draft needs no clean-up: the next step overwrites it. States go back by choosing an older one, which
the plan has places for (``verify_width``). Committing all drafts and removing the
rejected ones with ``rewind`` gives the same text. But ``commit`` makes whole blocks shareable, so that rejected drafts
stay cached, under texts that no request will ask for.

    python examples/speculate.py
"""

from __future__ import annotations

import numpy as np
from tiny_model import VOCAB, TinyModel, choose, go_on, is_exact

from kvpagoda import BadInput, KVCache, Schema, Sequence
from kvpagoda.schema import Layer, Recurrent, Rows

WIDTH = 6  # drafts per step
BLOCK = 4


def drafts_after(text: list[int], random: np.random.Generator, answer: list[int]) -> np.ndarray:
    """Return up to ``WIDTH`` drafts, int32, as a draft model would: the next tokens of ``answer``, about 15 % of them
    replaced by random tokens."""
    drafts = np.array(answer[len(text) : len(text) + WIDTH], np.int32)
    wrong = random.random(len(drafts)) < 0.15
    drafts[wrong] = random.integers(0, VOCAB, wrong.sum())
    return drafts


def verified(model: TinyModel, cache: KVCache, sequence: Sequence, text: list[int], drafts: np.ndarray) -> list[int]:
    """Run one step over the uncommitted tokens of ``text`` and over ``drafts``. Return the tokens that the model
    writes: the accepted drafts, and one token after them."""
    tokens = np.concatenate((np.array(text[sequence.length :], np.int32), drafts))
    sequence.extend(len(tokens))
    logits = model.forward(cache.batch([sequence], [len(tokens)]), tokens)[-1 - len(drafts) :]
    new: list[int] = []
    for i in range(len(logits)):
        new.append(choose(logits[i], len(text) + i, None))
        if i < len(drafts) and drafts[i] != new[-1]:
            break
    return new


def speculate(
    model: TinyModel, answer: list[int], prompt: list[int], commits_drafts: bool
) -> tuple[list[int], int, KVCache]:
    """Write ``answer`` again with drafts. Return the text, the number of steps, and the cache."""
    cache = KVCache(model.schema, "256KiB", device="cpu", block_size=BLOCK, max_requests=2)
    random, text, steps = np.random.default_rng(3), [*prompt], 0
    with cache.open(prompt) as sequence:
        while len(text) < len(answer):
            steps += 1
            drafts = drafts_after(text, random, answer)
            new = verified(model, cache, sequence, text, drafts)
            known = text[sequence.length :]
            if commits_drafts:  # wrong: rejected drafts are published before they are removed
                sequence.commit([*known, *drafts.tolist()])
                if len(drafts) >= len(new):
                    sequence.rewind(len(drafts) - len(new) + 1)
            else:  # right: commit the accepted tokens only
                sequence.commit([*known, *new[:-1]])
            text += new
    cache.check()
    return text[: len(answer)], steps, cache


def take_back(model: TinyModel, prompt: list[int]) -> tuple[list[int], int]:
    """Remove committed tokens with ``rewind``: here a tool call that the user edits. The rows before it are kept.
    Return the text, and how many tokens were computed in all."""
    cache = KVCache(model.schema, "256KiB", device="cpu", block_size=BLOCK, max_requests=2)
    text, before = [*prompt], model.computed_tokens
    with cache.open(prompt) as sequence:
        go_on(model, cache, sequence, text, 20)
        sequence.rewind(8)
        text[sequence.length :] = [1, 2, 3]  # the user's edit
        edited = len(text)
        go_on(model, cache, sequence, text, 10)
    assert is_exact(model, np.array(text), edited)
    return text, model.computed_tokens - before


def with_states(random: np.random.Generator) -> str:
    """Speculate in a model with states: here one number, half of the last one plus the token.

    A state cannot forget a token, so a request has ``WIDTH + 1`` places for it, and a step leaves the state after each of
    its last tokens in the next one. Return the error message of a ``rewind`` that goes back too far."""
    kind = Recurrent((Rows("recurrent", (1,), "float32"),), verify_width=WIDTH)
    schema = Schema((Layer(0, "sum", (kind,)),), "sums")
    cache = KVCache(schema, "64KiB", device="cpu", block_size=BLOCK, max_requests=2)

    def compute(sequence: Sequence, tokens: list[int]) -> None:
        sequence.extend(len(tokens))
        view = cache.batch([sequence], [len(tokens)]).layer(0)
        places, state = view.state_writes[0].tolist(), view["recurrent"][int(view.state_indices[0])].clone()
        for number, token in enumerate(tokens):
            state = 0.5 * state + token
            if len(tokens) - number <= len(places):
                view["recurrent"][places[number - max(0, len(tokens) - len(places))]] = state

    text = list(range(10))
    with cache.open(text, reserve=200) as sequence:
        compute(sequence, text[:-1])
        sequence.commit(text[:-1])
        for _ in range(20):
            drafts = random.integers(0, VOCAB, WIDTH).tolist()
            compute(sequence, [text[-1], *drafts])
            accepted = int(random.integers(0, WIDTH + 1))
            sequence.commit([text[-1], *drafts[:accepted]])  # the next step reads the state after these
            text += [*drafts[:accepted], int(random.integers(VOCAB))]
        compute(sequence, text[-1:] * (WIDTH + 1))
        sequence.commit(text[-1:] * (WIDTH + 1))
        sequence.rewind(WIDTH)
        view = cache.batch([sequence], [1]).layer(0)
        known = sum(token * 0.5**age for age, token in enumerate(reversed(text)))
        assert abs(view["recurrent"][int(view.state_indices[0])].item() - known) < 1e-3, "not the state of the text"
        try:
            sequence.rewind(1)
        except BadInput as refused:
            return str(refused)
    raise AssertionError("a state went back to where another one lies")


def main() -> dict[str, int]:
    model, prompt = TinyModel(seed=5, verify_width=8), list(range(10))
    plain = KVCache(model.schema, "256KiB", device="cpu", block_size=BLOCK, max_requests=2)
    answer = [*prompt]
    with plain.open(prompt) as sequence:
        go_on(model, plain, sequence, answer, 120)
    assert is_exact(model, np.array(answer), len(prompt))
    results = {"plain: steps": len(answer) - len(prompt), "plain: blocks held": plain.stats().groups[0].held}
    for name, commits_drafts in (("accepted", False), ("drafts", True)):
        text, steps, cache = speculate(model, answer, prompt, commits_drafts)
        assert text == answer
        results |= {f"commit {name}: steps": steps, f"commit {name}: blocks held": cache.stats().groups[0].held}
    results["tokens computed, 8 rewound"] = take_back(model, prompt)[1]
    for name, value in results.items():
        print(f"{name:>34}  {value}")
    print(
        f"\nOf a model with recurrent states, after {WIDTH} tokens taken back:\n"
        + with_states(np.random.default_rng(4))
    )
    return results


if __name__ == "__main__":
    main()
