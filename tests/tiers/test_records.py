"""Records: every fault is found. The buffer: a record goes out again only when nobody works on it."""

from __future__ import annotations

from unittest.mock import ANY

import numpy as np
import pytest

from kvpagoda.errors import BadInput, CheckFailed, NotOwned, OutOfBlocks
from kvpagoda.pages import PAGE, pages
from kvpagoda.tiers.records import HEADER_NBYTES, RecordBuffer, pack_record, read_header, verify_record
from raises import raises

KEY, PRINT = bytes(range(32)), bytes(range(32, 64))


def record(payload: int = 500, nbytes: int | None = None) -> np.ndarray:  # type: ignore[type-arg]
    made = np.random.default_rng(payload).integers(0, 256, HEADER_NBYTES + payload, np.uint8)
    pack_record(made, KEY, PRINT, nbytes)
    return made


def test_a_record_proves_itself() -> None:
    made = record()
    assert verify_record(made, KEY, PRINT) == 500 and read_header(made[:HEADER_NBYTES].tobytes()) == (KEY, 500)


@pytest.mark.parametrize("nbytes", [0, 1, 499])
def test_a_short_payload_keeps_its_length_and_nothing_behind_it(nbytes: int) -> None:
    made = record(500, nbytes)
    assert verify_record(made, KEY, PRINT) == nbytes and not made[HEADER_NBYTES + nbytes :].any()


def test_every_flipped_bit_is_found() -> None:
    made = record(40)
    for bit in range(8 * len(made)):
        made[bit // 8] ^= 1 << bit % 8
        assert verify_record(made, KEY, PRINT) is None, bit
        assert bit >= 8 * HEADER_NBYTES or read_header(made[:HEADER_NBYTES].tobytes()) is None
        made[bit // 8] ^= 1 << bit % 8
    assert verify_record(made, KEY, PRINT) == 40


def test_every_truncation_is_found() -> None:
    made = record(40)
    for length in range(len(made)):
        assert verify_record(made[:length], KEY, PRINT) is None, length


def test_another_key_or_layout_is_found() -> None:
    made = record()
    assert verify_record(made, PRINT, PRINT) is None and verify_record(made, KEY, KEY) is None


def test_a_header_of_another_payload_is_found() -> None:
    made, other = record(), record()
    other[HEADER_NBYTES:] ^= 1
    pack_record(other, KEY, PRINT)
    made[:HEADER_NBYTES] = other[:HEADER_NBYTES]
    assert verify_record(made, KEY, PRINT) is None


def test_without_a_checksum_only_those_who_ask_for_none_believe_it() -> None:
    made = record()
    pack_record(made, KEY, PRINT, checksum=False)
    assert verify_record(made, KEY, PRINT) is None and verify_record(made, KEY, PRINT, checksum=False) == 500


@pytest.mark.parametrize("nbytes", [-1, 501, 2**63])
def test_lengths_that_cannot_be_are_refused(nbytes: int) -> None:
    with raises(BadInput, needed=nbytes, available=628):
        record(500, nbytes)
    with raises(BadInput, needed=32, available=(3, 32)):
        pack_record(np.zeros(200, np.uint8), b"key", PRINT)


def test_records_lie_on_pages_of_their_own() -> None:
    buffer = RecordBuffer(3, 4000)
    assert buffer.record_nbytes == 2 * PAGE and buffer.records.ctypes.data % PAGE == 0
    assert buffer.payloads.shape == (3, 4000) and buffer.payloads[1].ctypes.data == buffer.rows[1].ctypes.data + 128
    memory = pages(RecordBuffer.nbytes_for(3, 4000))
    assert RecordBuffer(3, 4000, memory).records.ctypes.data == memory.ctypes.data
    for bad in (memory[:-1], memory[1:], memory.view(np.int8)):
        with raises(BadInput, needed=24576, available=ANY):
            RecordBuffer(3, 4000, bad)
    with raises(BadInput, needed=(0, 1)):
        RecordBuffer(0, 1)


def test_a_record_in_use_goes_out_again_only_when_it_is_dropped() -> None:
    buffer = RecordBuffer(3, 10)
    first, second = buffer.acquire(2)
    assert buffer.hold([first]) and not buffer.hold([second, first]) and buffer.hold([second])
    buffer.drop([second])
    buffer.release([first, second])
    assert buffer.num_free == 2
    buffer.check()
    with raises(OutOfBlocks, needed=3, available=2):
        buffer.acquire(3)
    for count in (-1, 1.0, True):
        with raises(BadInput, field="the number of records to take", needed=count, available=0):
            buffer.acquire(count)
    buffer.drop([first])
    buffer.check()
    assert sorted(buffer.acquire(3)) == [0, 1, 2]


def test_records_have_owners_while_they_are_out() -> None:
    buffer, owner = RecordBuffer(3, 10), object()
    (first,), (second,) = buffer.acquire(1, owner), buffer.acquire(1)
    assert buffer.owners() == {first: owner, second: "the caller"}
    (third,) = buffer.acquire(1, owner)
    buffer.release_all(owner)
    assert buffer.owners() == {second: "the caller"} and buffer.num_free == 2 and {first, second, third} == {0, 1, 2}
    buffer.release([second])
    buffer.release_all(owner)
    assert buffer.owners() == {}
    buffer.check()


def test_records_that_are_not_out_are_refused() -> None:
    buffer = RecordBuffer(3, 10)
    (row,) = buffer.acquire(1)
    for rows in ([row, row], [3], [-1], [row + 1 if row < 2 else 0]):
        for call in (buffer.release, buffer.hold):
            with pytest.raises(NotOwned):
                call(rows)
    buffer.check()
    del buffer._owners[row]
    with raises(CheckFailed, available=[0]):
        buffer.check()


def test_random_operations_never_give_a_record_to_two() -> None:
    random, buffer = np.random.default_rng(3), RecordBuffer(8, 10)
    out: set[int] = set()
    used: set[int] = set()
    for _ in range(3000):
        what = random.integers(4)
        if what == 0 and buffer.num_free:
            got = set(buffer.acquire(int(random.integers(1, buffer.num_free + 1))))
            assert not got & (out | used)
            out |= got
        elif what == 1 and out:
            row = int(random.choice(sorted(out)))
            assert buffer.hold([row]) == (row not in used)
            used.add(row)
        elif what == 2 and used:
            row = int(random.choice(sorted(used)))
            buffer.drop([row])
            used.remove(row)
        elif what == 3 and out:
            row = int(random.choice(sorted(out)))
            buffer.release([row])
            out.remove(row)
        buffer.check()
        assert buffer.num_free == 8 - len(out | used)


def test_records_of_a_driver_in_this_process_change_places_and_are_not_copied() -> None:
    """Against a model: what each record and each slot holds, whatever is stored, loaded and released in between."""
    random, buffer, made = np.random.default_rng(4), RecordBuffer(6, 100, pages), 0
    assert buffer.extend(5) and not buffer.extend(5)
    assert buffer.nbytes == 6 * buffer.record_nbytes and len(buffer.records) == 11 and len(buffer.rows) == 6
    slots, held = dict[int, tuple[int, int]](), dict[int, int]()  # slot -> place and content; record -> content
    for _ in range(3000):
        kind = int(random.integers(4))
        if kind == 0 and buffer.num_free:
            (row,) = buffer.acquire(1)
            made += 1
            buffer.rows[row][:8] = np.frombuffer(made.to_bytes(8, "little"), np.uint8)
            held[row] = made
        elif kind == 1 and held:
            row, slot = int(random.choice([*held])), int(random.integers(5))
            slots[slot] = buffer.exchange(row, slots[slot][0] if slot in slots else None), held.pop(row)
            buffer.release([row])
        elif kind == 2 and slots and buffer.num_free:
            slot = int(random.choice([*slots]))
            (row,) = buffer.acquire(1)
            buffer.show(row, slots[slot][0])
            held[row] = slots[slot][1]
        elif held:
            row = int(random.choice([*held]))
            buffer.release([row])
            del held[row]
        buffer.check()
        for place, content in slots.values():
            assert int.from_bytes(buffer.records[place, :8].tobytes(), "little") == content
        for row, content in held.items():
            assert int.from_bytes(buffer.rows[row][:8].tobytes(), "little") == content
            assert buffer.places_of([row])[0] * buffer.record_nbytes == (
                buffer.rows[row].ctypes.data - buffer.records.ctypes.data
            )


def test_a_place_is_shown_by_as_many_records_as_there_are() -> None:
    buffer = RecordBuffer(400, 10, pages)
    assert buffer.extend(1)
    rows = buffer.acquire(400)
    place = buffer.exchange(rows[0], None)
    for row in rows:
        buffer.show(row, place)
    buffer.check()
    assert set(buffer.places_of(rows)) == {place}
    buffer.release(rows)
    buffer.check()
    assert sorted(buffer.places_of(range(400))) == [*range(place), *range(place + 1, 401)]


def test_memory_that_was_given_has_no_places_for_a_driver() -> None:
    assert not RecordBuffer(3, 4000).extend(1)
    assert not RecordBuffer(3, 4000, pages(RecordBuffer.nbytes_for(3, 4000))).extend(1)
