"""Rows of an encoder's input, written once and read by every step: through the index arrays of both parts of a text."""

from __future__ import annotations

from contextlib import closing
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvpagoda import KVCache, Limits, OutOfBlocks, RetryLater, Schema, Sequence  # noqa: E402
from kvpagoda.core.batch.encoder_parts import PartArrays  # noqa: E402
from kvpagoda.errors import BadInput, StaleHandle, TicketRefused  # noqa: E402
from kvpagoda.handover import SharedMemory  # noqa: E402
from kvpagoda.schema import Attention, Growth, Layer, Recurrent, Rows  # noqa: E402
from late_device import Apart  # noqa: E402
from raises import raises  # noqa: E402

DIM = 4


def cache_of(*kinds: Any, **arguments: Any) -> KVCache:
    kinds = kinds or (Attention(1, DIM, DIM, "float32"),)
    layers = tuple(Layer(i, "attention", (kind,)) for i, kind in enumerate(kinds))
    usual: dict[str, Any] = dict(num_blocks=40, max_requests=8, block_size=8, device="cpu", poison=True, sanitize=True)
    return KVCache(Schema(layers, "test", vocab_size=50, encoder_positions=0), **{**usual, **arguments})


def row_of(*content: Any) -> np.ndarray[Any, Any]:
    """A row that says what it is of."""
    return np.frombuffer(blake2b(repr(content).encode(), digest_size=2 * DIM).digest(), np.uint16).astype(np.float32)


class Text:
    """A request: input ``name`` of ``num_positions`` positions, and the tokens of the decoder."""

    def __init__(self, cache: KVCache, name: int, num_positions: int, prompt: list[int]) -> None:
        self.cache, self.name, self.num_positions, self.prompt = cache, name, num_positions, prompt
        self.begin = -(-num_positions // cache.block_size) * cache.block_size
        self.tokens = np.concatenate((np.zeros(self.begin, np.int32), np.array(prompt, np.int32)))
        self.sequence: Sequence
        self.num_encoded = 0

    def open(self) -> None:
        digest = blake2b(repr((self.name, self.num_positions)).encode(), digest_size=16).digest()
        self.sequence = self.cache.open(self.tokens, media={0: digest})

    def rows(self, first: int, end: int) -> torch.Tensor:
        """What a layer keeps of tokens ``first .. end - 1``: of a position of the input, of no other thing than this input."""
        whole = (self.name, self.num_positions)
        made = [
            row_of(whole, at) if at < self.begin else row_of(whole, self.tokens[self.begin : at + 1].tolist())
            for at in range(first, end)
        ]
        return torch.from_numpy(np.array(made).reshape(-1, 1, DIM))

    def missing(self) -> int:
        """How many tokens the next step computes: those of the input that are lacking, alone, or all others."""
        length = self.sequence.length
        return (self.begin if length < self.begin else len(self.tokens)) - length


def compute(cache: KVCache, texts: list[Text]) -> list[Text]:
    """Run one step of ``texts``, and return those whose decoder it ran, after what both parts read was compared."""
    encoding = [text for text in texts if text.sequence.length < text.begin]
    decoding = [text for text in texts if text.sequence.length >= text.begin]
    for part in (encoding, decoding):
        if not part:
            continue
        counts = [text.missing() for text in part]
        for text, count in zip(part, counts):
            text.sequence.extend(count)
        batch = cache.batch([text.sequence for text in part], counts)
        new = [text.rows(text.sequence.length, text.sequence.length + count) for text, count in zip(part, counts)]
        batch.layer(0).write(k=torch.cat(new), v=-torch.cat(new))
        if part is decoding:
            check_read(batch, part, counts)
        for text, count in zip(part, counts):
            text.num_encoded += count * (part is encoding)
            text.sequence.commit(text.tokens[text.sequence.length :][:count])
    return decoding


def check_read(batch: Any, texts: list[Text], counts: list[int]) -> None:
    parts, view = batch.encoder_parts([text.num_positions for text in texts]), batch.layer(0)
    at = 0
    for row, (text, count) in enumerate(zip(texts, counts)):
        end = text.sequence.length + count
        assert parts.positions[at : at + count].tolist() == [*range(end - count - text.begin, end - text.begin)]
        at += count
        for part, first, last in ((parts.cross, 0, text.num_positions), (parts.own, text.begin, end)):
            wanted = text.rows(first, last)
            for pages in pages_of(part, row, view.page_size):
                for name, sign in (("k", 1), ("v", -1)):
                    found = view[name][pages].flatten(0, 1)[: last - first]
                    assert torch.equal(found, sign * wanted), (row, name)


def pages_of(part: PartArrays, row: int, size: int) -> list[torch.Tensor]:
    """The pages that ``row`` reads, in FlashAttention's words and in FlashInfer's, which say the same of its length."""
    length = int(part.cache_seqlens[row])
    begin, end = part.kv_indptr[row : row + 2].tolist()
    assert (end - begin - 1) * size + int(part.kv_last_page_len[row]) == length
    return [part.block_table[row, : -(-length // size)].long(), part.kv_indices[begin:end].long()]


@pytest.mark.parametrize("page", [8, 2])
@pytest.mark.parametrize("seed", range(2))
def test_random_requests_read_their_own_input_and_text(seed: int, page: int) -> None:
    """Few inputs, so that they are found; few blocks, so that they are evicted, suspended and begin again."""
    random, cache = np.random.default_rng(seed), cache_of(kernel_page=page)
    running: list[Text] = []
    num_forked = num_found = num_short = num_alone = 0
    for _ in range(130):
        choice = random.integers(10)
        if choice < 4 and len(running) < 6:
            name = int(random.integers(4))
            prompt = [int(name), *random.integers(1, 3, random.integers(0, 4)).tolist()]
            text = Text(cache, name, 3 + 9 * name, prompt)
            try:
                text.open()
            except RetryLater:
                continue
            num_found += text.sequence.cached_tokens >= text.begin
            num_alone += 0 < text.sequence.cached_tokens < text.begin
            running.append(text)
        elif choice < 6 and running:
            source = running[random.integers(len(running))]
            if source.sequence.length > source.begin:
                child = Text(cache, source.name, source.num_positions, source.prompt)
                child.tokens = source.tokens.copy()
                try:
                    child.sequence = source.sequence.fork()
                except RetryLater:
                    continue
                held = [cache.core.groups[0].held_places(one.sequence.slot) for one in (source, child)]
                whole = source.begin // cache.block_size
                settled = cache.core.groups[0].shared[source.sequence.slot] >= whole
                assert not settled or held[0][:whole].tolist() == held[1][:whole].tolist()
                num_forked += settled
                running.append(child)
        elif choice == 6 and running:
            text = running[random.integers(len(running))]
            text.sequence.suspend(whole=bool(random.integers(2)))
            try:
                text.sequence.resume()
            except RetryLater:
                running.remove(text)
                text.sequence.close()
        elif choice == 7 and running:
            running.pop(int(random.integers(len(running)))).sequence.close()
        if running:
            some = [text for text in running if random.integers(4)]
            some = [text for text in some if text.missing()]
            try:
                done = compute(cache, some) if some else []
            except OutOfBlocks:
                num_short += 1
                running.pop().sequence.close()
                continue
            for text in done:
                text.tokens = np.append(text.tokens, np.int32(random.integers(1, 3)))
                if len(text.tokens) > text.begin + 20:
                    running.remove(text)
                    text.sequence.close()
        cache.check()
    assert min(num_forked, num_found) > 3, (num_forked, num_found, num_short, num_alone)


def test_an_input_is_written_once_and_read_by_every_step() -> None:
    cache = cache_of()
    text = Text(cache, 0, 21, [7, 8])
    text.open()
    assert text.begin == 24
    assert compute(cache, [text]) == [] and text.num_encoded == 24
    for _ in range(12):
        assert compute(cache, [text]) == [text]
        text.tokens = np.append(text.tokens, np.int32(9))
    assert text.num_encoded == 24
    again = Text(cache, 0, 21, [7, 9])  # another task on the same input
    again.open()
    assert again.sequence.cached_tokens == 25
    other = Text(cache, 1, 21, [7, 8])  # the same task on another input
    other.open()
    assert other.sequence.cached_tokens == 0


def test_arrays_of_a_cache_without_memory_and_of_a_device_apart() -> None:
    """The same numbers; padded rows read nothing."""
    found = []
    for device in ("none", "apart"):
        cache = cache_of(device="none" if device == "none" else "cpu", sanitize=False, poison=False)
        if device == "apart":
            cache._step_buffers.arrays = Apart()
        sequences = []
        for length in (5, 16, 17):
            text = Text(cache, length, length, [1, 2, 3])
            text.open()
            text.sequence.extend(text.begin + 3)
            text.sequence.commit(text.tokens[: text.begin + 1])
            sequences.append(text.sequence)
        parts = cache.batch(sequences, [2, 1, 2], pad_to=4).encoder_parts([5, 16, 17])
        assert np.asarray(parts.cross.cache_seqlens).tolist() == [5, 16, 17, 0]
        assert np.asarray(parts.own.cache_seqlens).tolist() == [3, 2, 3, 0]
        assert np.asarray(parts.own.kv_indptr).tolist() == [0, 1, 2, 3, 3]
        assert np.asarray(parts.cross.kv_last_page_len).tolist() == [5, 8, 1, 0]
        assert np.asarray(parts.positions).tolist() == [1, 2, 1, 1, 2, 0]
        found.append([np.asarray(one).tolist() for one in (*parts.cross, *parts.own, parts.positions)])
        assert {str(np.asarray(one).dtype) for one in (*parts.cross, *parts.own, parts.positions)} == {"int32"}
    assert found[0] == found[1]


def test_a_persistent_batch_has_both_parts_in_fixed_shapes() -> None:
    cache = cache_of(limits=Limits(max_context=64), sanitize=False)  # as nothing is written
    texts = [Text(cache, name, 3 + 9 * name, [1, 2]) for name in range(2)]
    for text in texts:
        text.open()
    compute(cache, texts)
    compute(cache, texts)
    rows = cache.persistent_batch([text.sequence for text in texts], 3, tokens_per_row=1)
    shapes = set()
    for step in range(10):
        parts = rows.extend().encoder_parts([3, 12])
        shapes.add((*parts.cross.block_table.shape, *parts.own.block_table.shape))
        assert parts.own.cache_seqlens.tolist() == [3 + step, 3 + step, 0]
        assert parts.positions.tolist()[:2] == [2 + step] * 2
        rows.commit(np.array([5, 6], np.int32))
    assert shapes == {(3, 8, 3, 8)}


def test_a_request_goes_on_in_another_cache_and_its_input_with_it() -> None:
    key, one, two = bytes(32), cache_of(), cache_of(num_blocks=20)
    with closing(SharedMemory("1MiB")) as sent, closing(SharedMemory(0)) as received:
        sender = one.sender(sent, key=key)
        text = Text(one, 3, 21, [7, 8])
        text.open()
        for _ in range(3):
            compute(one, [text])
            text.tokens = text.tokens if text.missing() else np.append(text.tokens, np.int32(9))
        ticket = text.sequence.hand_over(30.0).to_json()
        with pytest.raises(TicketRefused):  # the decoder's text would begin inside of a block
            cache_of(block_size=16).receive(ticket, received, key=key)
        text.sequence, text.cache = two.receive(ticket, received, key=key), two
        for _ in range(9):
            assert compute(two, [text]) == [text]
            text.tokens = np.append(text.tokens, np.int32(5))
        assert text.num_encoded == 24 and len(text.tokens) == 24 + 2 + 2 + 9
        again = Text(two, 3, 21, [7, 8, 4])
        again.open()
        assert again.sequence.cached_tokens == 26
        two.check()
        sender.close()


def test_what_does_not_suit_is_refused() -> None:
    cache = cache_of(sanitize=False)  # as nothing is written
    text = Text(cache, 0, 12, [1])
    text.open()
    text.sequence.extend(17)
    batch = cache.batch([text.sequence], [16])
    with raises(BadInput, needed=16, available=0):  # its input is still to be written
        batch.encoder_parts([12])
    text.sequence.commit(text.tokens[:16])
    with pytest.raises(StaleHandle):
        cache.batch([text.sequence], [1]) and batch.encoder_parts([12])
    batch = cache.batch([text.sequence], [1])
    with raises(BadInput, needed=1, available=2):
        batch.encoder_parts([12, 12])
    with pytest.raises(BadInput):
        batch.encoder_parts([0])
    assert batch.encoder_parts([12]).own.cache_seqlens.tolist() == [1]
    state = Recurrent((Rows("state", (2,), "float32"),))
    cache = cache_of(Attention(1, DIM, DIM, "float32", Growth(window=10)), state)
    sequence = cache.open([0] * 9)
    sequence.extend(9)
    batch = cache.batch([sequence], [9])
    with raises(BadInput, needed="full", available="window(10)"):
        batch.encoder_parts([4])
    with pytest.raises(BadInput, match="keeps no blocks"):
        batch.encoder_parts([4], layer=1)
