"""States that go back: which of its places a request reads and writes, and how far it can be rewound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpagoda import KVCache, Limits, Sequence
from kvpagoda.errors import BadInput
from kvpagoda.schema import Attention, Layer, Recurrent, Rows, Schema
from raises import raises

WIDTH, SIZE = 3, 4
PLACES = WIDTH + 1
STATE = Recurrent((Rows("recurrent", (2,), "float32"),))


def cache_of(width: int = WIDTH, full: bool = True, **arguments: Any) -> KVCache:
    kinds = (Attention(1, 2, 2, "float32"), STATE) if full else (STATE,)
    layers = tuple(Layer(i, type(kind).__name__, (kind,)) for i, kind in enumerate(kinds))
    usual = {"num_blocks": 64, "max_requests": 4, "block_size": SIZE, "device": "cpu", "poison": True}
    return KVCache(Schema(layers, "test").rewindable(width), **{**usual, **arguments})


def compute(cache: KVCache, sequence: Sequence, n: int) -> None:
    """Make a step of ``n`` tokens: the state after m tokens is the number m. It must begin with that of its length."""
    sequence.extend(n)
    view = cache.batch([sequence], [n]).layer(cache.schema.layers[-1].index)
    states, end = view["recurrent"], sequence.length + n
    assert states[int(view.state_indices[0])].unique().tolist() == [sequence.length]
    for place, after in zip(view.state_writes[0].tolist(), range(max(sequence.length, end - PLACES) + 1, end + 1)):
        states[place] = after


def reads(cache: KVCache, sequence: Sequence) -> float:
    """Return the state with which the next token of ``sequence`` begins."""
    sequence.extend(1)
    view = cache.batch([sequence], [1]).layer(cache.schema.layers[-1].index)
    (value,) = view["recurrent"][int(view.state_indices[0])].unique().tolist()
    return float(value)


def refused(sequence: Sequence, n: int) -> BadInput:
    before = sequence.length, sequence.tokens.tolist()
    with pytest.raises(BadInput) as error:
        sequence.rewind(n)
    assert (sequence.length, sequence.tokens.tolist()) == before
    return error.value


@pytest.mark.parametrize("step", [1, 3, PLACES, 11])
def test_a_rewind_of_up_to_k_tokens_chooses_the_state_of_the_shorter_text(step: int) -> None:
    """After steps of one token, of fewer than the places, of as many, and of a longer piece of a prompt."""
    for n in range(1, WIDTH + 1):
        cache = cache_of()
        sequence = cache.open(range(11))
        while sequence.length < 11:
            count = min(step, 11 - sequence.length)
            compute(cache, sequence, count)
            sequence.commit(range(sequence.length, sequence.length + count))
        sequence.rewind(n)
        assert reads(cache, sequence) == sequence.length == 11 - n
        compute(cache, sequence, PLACES)  # the places go round, and the states of other tokens follow
        sequence.commit([20])
        assert reads(cache, sequence) == 12 - n
        cache.check()


def test_a_rewind_too_far_says_how_far_it_goes_and_what_would_let_it() -> None:
    cache = cache_of()
    sequence = cache.open(range(9))
    compute(cache, sequence, 9)
    sequence.commit(range(9))
    error = refused(sequence, 4)
    assert "9 tokens can be rewound to 6, not to 5: of 9 tokens written after the first 0" in str(error)
    assert "layer 1 (Recurrent) 3; plan with a verify_width of 4" in str(error) and "fork" not in str(error)
    assert (error.needed, error.available) == (4, 3)
    compute(cache, sequence, 4)  # three drafts: they wrote over the states of 6, 7 and 8 tokens ..
    sequence.commit([50])
    assert "10 tokens can be rewound to 10" in str(refused(sequence, 1))  # .. and 13 tokens are written
    plain = cache_of(width=0).open(range(9))
    plain.commit(range(9))
    assert "verify_width of 1, or fork before tokens that may be taken back" in str(refused(plain, 1))


def test_a_request_has_no_older_states_than_those_it_began_with() -> None:
    """A hit, a fork and a suspended request copy one state, the newest; what they write themselves can be rewound."""
    cache = cache_of()
    text = [*range(11)]
    first = cache.open(text)
    compute(cache, first, 8)
    first.commit(text[:8])
    compute(cache, first, 3)
    first.commit(text[8:])
    child = first.fork(reserve=20)
    assert reads(cache, child) == 11 and "can be rewound to 11" in str(refused(child, 1))
    assert "it began there, as a hit, a fork or after a suspend; open the shorter text instead" in str(
        refused(child, 1)
    )
    first.close()
    hit = cache.open(text)
    assert hit.cached_tokens == 8 == reads(cache, hit) and "can be rewound to 8" in str(refused(hit, 1))
    for one in (child, hit):
        compute(cache, one, 2)
        one.commit(text[one.length :][:2] if one is hit else [30, 31])
        one.rewind(2)
        assert reads(cache, one) == one.length and refused(one, 1).available == 0
    compute(cache, child, 2)
    child.commit([40, 41])
    child.suspend()
    assert child.resume() == 0 and reads(cache, child) == 13
    assert "13 tokens can be rewound to 13" in str(refused(child, 1))
    cache.check()


def test_a_fork_keeps_no_checkpoint_of_a_state_that_it_does_not_have() -> None:
    """Its parent wrote drafts over the state at the end of the block; the fork has the state of its last token alone."""
    cache = cache_of()
    parent = cache.open(range(20), capacity=0)
    compute(cache, parent, 4)
    parent.commit(range(4))
    compute(cache, parent, 8)
    parent.commit(range(4, 10))  # 12 written: the state of 8 tokens is gone
    child = parent.fork()
    child.suspend()  # keeps what it can
    assert not cache.core.prefix.kept
    assert child.resume() == 0 and not cache.core.prefix.kept
    compute(cache, child, 2)
    child.commit([50, 51])
    assert len(cache.core.prefix.kept) == 1  # that of its own third block
    cache.check()


@pytest.mark.parametrize("drafts", range(WIDTH + 1))
@pytest.mark.parametrize("full", [True, False])
def test_a_step_across_the_end_of_a_block_leaves_a_checkpoint_there(drafts: int, full: bool) -> None:
    """With no step that ends at a boundary: the text is resumed where its last whole block ends all the same."""
    cache, text = cache_of(full=full), [*range(30)]
    sequence = cache.open(text[:5])
    compute(cache, sequence, 4)
    sequence.commit(text[:4])
    while sequence.length < 18:
        compute(cache, sequence, 1 + drafts)
        sequence.commit(text[sequence.length :][: 1 + drafts])
    assert not cache.stats().passed_boundaries
    last = sequence.length // SIZE * SIZE
    sequence.close()
    cache.check()
    again = cache.open(text)
    assert again.cached_tokens == last == reads(cache, again)


def test_a_prompt_that_goes_past_a_boundary_by_up_to_k_tokens_keeps_its_checkpoint() -> None:
    text = [*range(40)]
    for past in range(WIDTH + 2):
        cache = cache_of()
        sequence = cache.open(text[:9], capacity=0)
        compute(cache, sequence, 8 + past if past < 2 else 9)
        sequence.commit(text[: 8 + min(past, 1)])
        if past > 1:  # drafts behind the prompt, which are not committed: at most k in all
            compute(cache, sequence, past - 1)
        assert cache.stats().passed_boundaries == 0
        sequence.close()
        assert cache.open(text[:12]).cached_tokens == 8


def test_a_suspended_request_takes_one_state_of_the_swap() -> None:
    """However many places it has: so a swap holds as many requests with ``verify_width`` as without."""
    sizes = {}
    for width in (0, WIDTH):
        cache = cache_of(width, limits=Limits(swap="1MiB"))
        sequence = cache.open(range(11))
        sequence.commit(range(11))
        sequence.suspend()
        sizes[width] = cache.stats().swap_nbytes
        assert sequence.resume() == 0
        cache.check()
    assert sizes[0] == sizes[WIDTH] > 0


def test_without_places_there_is_one_state_that_each_step_overwrites() -> None:
    cache = cache_of(width=0)
    one, two = cache.open(range(5)), cache.open(range(20, 30))
    batch = cache.batch([one, two], [5, 10], pad_to=3)
    assert batch.state_writes.shape == (3, 1)
    assert batch.state_writes[:, 0].tolist() == batch.state_indices.tolist() and batch.state_indices[2] == 0
    view = batch.layer(1)
    assert view.state_writes is batch.state_writes
    with raises(BadInput, needed=1):
        _ = cache.layer(1).state_writes
    bare = KVCache(cache.schema, num_blocks=8, device="none").open(range(3))
    assert isinstance(bare._lifecycle.core.states.rows(np.array([0]), np.array([3])), np.ndarray)
