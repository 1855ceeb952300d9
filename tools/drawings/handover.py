"""The drawing of a hand-over: the blocks of two ranks, their leases, and the blocks of the one rank that receives them."""

from __future__ import annotations

from collections.abc import Callable

from tools.drawings.svg import MARGIN, Picture

from kvpagoda import Identity, KVCache, Schema
from kvpagoda.handover import SharedMemory, Ticket

CONFIG = dict(model_type="llama", num_hidden_layers=1, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
TOKENS, CELL = 28, 30


def handover() -> Picture:
    """Draw how a request of 28 tokens goes from two ranks with blocks of 4 to one rank with blocks of 8."""
    picture = Picture("A request goes from two ranks with blocks of 4 tokens to one rank with blocks of 8")
    schema, tickets = Schema.from_hf_config(CONFIG), []
    senders = [
        KVCache(schema.split(tp=2), num_blocks=16, device="cpu", block_size=4, identity=Identity("w", n, 2))
        for n in (0, 1)
    ]
    transfers = [SharedMemory("1MiB") for _ in senders]
    for rank, (cache, transfer) in enumerate(zip(senders, transfers)):
        cache.sender(transfer)
        sequence = cache.open(range(TOKENS))
        sequence.commit(range(TOKENS))
        held = cache.core.groups[0].held_places(sequence.slot).tolist()
        tickets.append(sequence.hand_over(60.0))
        picture.heading(f"Sender, rank {rank}: {len(held)} blocks of 4 tokens, head {rank}")
        _row(picture, held, CELL, "main")
    ticket = Ticket.joined(tickets)
    picture.heading("Ticket")
    lease = ticket.ranks[0]
    for text in (
        f"{len(ticket.tokens)} tokens, {ticket.length} committed; weights, model, expiry, signature",
        f"{len(ticket.ranks)} leases of {lease.nbytes:,} bytes: {ticket.counts[0]} records and their checksums",
    ):
        picture.text(MARGIN, picture.y + 12, text, "ink", 10)
        picture.y += 16
    picture.y += 8
    receiver = KVCache(schema, num_blocks=8, device="cpu", block_size=8, identity=Identity("w"))
    received = receiver.receive(ticket, SharedMemory())
    held = receiver.core.groups[0].held_places(received.slot).tolist()
    picture.heading(f"Receiver: {len(held)} blocks of 8 tokens, both heads")
    _row(picture, held, 2 * CELL + 3, "warm")
    picture.paragraph(
        f"In a cell: the place of the block. The request has {received.length} tokens here too; the senders keep theirs "
        "until both receipts are there, or the lease is over.",
        size=10,
    )
    for transfer in transfers:
        transfer.close()
    return picture


def _row(picture: Picture, places: list[int], width: float, fill: str) -> None:
    for number, place in enumerate(places):
        x = MARGIN + number * (width + 3)
        picture.box(x, picture.y, width, 20, fill)
        picture.text(x + width / 2, picture.y + 14, str(place), "on", 10, "middle", bold=True)
    picture.y += 30


DRAWINGS: dict[str, Callable[[], Picture]] = {"handover": handover}
