"""What a person reads when a call is wrong: whole texts of the most common errors. Others ask for class and figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvpagoda import KVCache, Limits, Schema, Sequence, errors
from kvpagoda.handover import SharedMemory
from kvpagoda.schema import Attention, Layer, Recurrent, Rows
from kvpagoda.tiers import host_tier, tier_from_text

LLAMA = dict(
    model_type="llama", num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, vocab_size=100,
    intermediate_size=64, max_position_embeddings=256,
)  # fmt: skip
SCHEMA = Schema.from_hf_config(LLAMA)
MAMBA = Recurrent((Rows("state", (4,), "float32"),))
HYBRID = Schema((Layer(0, "attention", (Attention(1, 4, 4, "float32"),)), Layer(1, "mamba", (MAMBA,))), "hybrid")


def cache(schema: Schema = SCHEMA, **settings: Any) -> KVCache:
    return KVCache(schema, **{"num_blocks": 8, "max_requests": 2, "device": "none", **settings})


def running(tokens: int = 20, schema: Schema = SCHEMA) -> Sequence:
    sequence = cache(schema).open(range(tokens))
    sequence.commit(range(tokens))
    return sequence


def closed() -> Sequence:
    sequence = running()
    sequence.close()
    return sequence


MESSAGES: list[tuple[Callable[[], object], str, str]] = [
    (
        lambda: Schema.from_hf_config({**LLAMA, "model_type": "lama"}),
        "SchemaError",
        "model type 'lama' is not supported: its cache was not verified; did you mean 'llama'? "
        "(docs/models.md lists those that are)",
    ),
    (
        lambda: Schema.from_hf_config({**LLAMA, "num_hidden_layers": 0}),
        "SchemaError",
        "llama config: num_hidden_layers is 0; expected a whole number of at least 1",
    ),
    (
        lambda: Schema.from_hf_config(LLAMA, kv_format="fp9"),
        "SchemaError",
        "unknown kv_format 'fp9'; known: raw, fp8, mxfp4, nvfp4, int8, fp8_e4m3, fp8_e5m2, "
        "fp8_per_token_head, int8_per_token_head, int4",
    ),
    (
        lambda: SCHEMA.plan(),
        "BadInput",
        "give either a budget in bytes or num_blocks: exactly one of them",
    ),
    (
        lambda: SCHEMA.plan("12 apples"),
        "BadInput",
        "cannot read '12 apples' as a size; write '512MiB', '2GiB' or a number of bytes",
    ),
    (
        lambda: SCHEMA.plan("1KiB"),
        "NeverFits",
        "a budget of 1.0 KiB is too small: one request of up to 16 tokens needs 8,192 bytes (8.0 KiB); raise "
        "the budget",
    ),
    (
        lambda: cache(device="gpu"),
        "BadInput",
        "no device 'gpu' here (torch knows no such name); give 'cpu', 'cuda', 'cuda:0', 'none', or None for "
        "the default",
    ),
    (
        lambda: cache(policy="lruu"),
        "BadInput",
        "unknown eviction policy 'lruu'; known: lru, fifo, lfu, lfuda, sieve, priority, ttl, s3fifo, arc, "
        "auto; did you mean 'lru'?",
    ),
    (
        lambda: cache(block_size=0),
        "BadInput",
        "block_size must be a positive whole number, got 0",
    ),
    (
        lambda: cache().open([1, 2, 100]),
        "BadInput",
        "token id 100 is outside the vocabulary 0..99",
    ),
    (
        lambda: cache().open([1.5]),
        "BadInput",
        "token ids must be a vector of integers, got float64 of shape [1]",
    ),
    (
        lambda: cache().open(range(90), reserve=300),
        "NeverFits",
        "300 tokens are more than the longest context of 256, the limit of llama itself; shorten the prompt",
    ),
    (
        lambda: running().extend(200),
        "OutOfBlocks",
        "need 12 blocks, 6 available (6 free, 0 reserved by running requests) of 8 in group 'full': 6 more "
        "must be freed by running requests; close a sequence or raise the budget (now 36.0 KiB)",
    ),
    (
        lambda: running().commit(range(50)),
        "BadInput",
        "commit of 50 tokens after 20 passes the capacity of 32; extend first",
    ),
    (
        lambda: running().rewind(30),
        "BadInput",
        "cannot rewind 30 of 20 tokens",
    ),
    (
        lambda: running(schema=HYBRID).rewind(2),
        "BadInput",
        "20 tokens can be rewound to 20, not to 18: of 20 tokens written after the first 0, these layers take back at "
        "most: layer 1 (mamba) 0; plan with a verify_width of 2, or fork before tokens that may be taken back",
    ),
    (
        lambda: closed().extend(1),
        "StaleHandle",
        "this sequence is closed; open a new one",
    ),
    (
        lambda: running().resume(),
        "BadInput",
        "the sequence in slot 0 runs; suspend it first",
    ),
    (
        lambda: cache().batch([running()], [1, 2]),
        "BadInput",
        "expected sequences that this cache opened, got <Sequence running in slot 0, blocks for 32 tokens: 20"
        " committed, a prompt of 20, of which 0 were cached>",
    ),
    (
        lambda: cache().receive(b"nothing", SharedMemory()),
        "BadInput",
        "this cache has no memory to receive bytes into; let each of its ranks receive the ticket",
    ),
    (
        lambda: tier_from_text("disc:/tmp:1GiB"),
        "BadInput",
        "no tier is written like 'disc:..'; write host:4GiB, disk:FOLDER:50GiB, redis://HOST:PORT, rediss://,"
        " unix:///PATH, redis+sentinel://HOST:PORT#NAME or mooncake://HOST:PORT; did you mean 'disk'?",
    ),
    (
        lambda: host_tier("0"),
        "BadInput",
        "a size (bytes, or text such as '2GiB') must be a positive whole number, got 0",
    ),
    (
        lambda: Limits(swap="much"),
        "BadInput",
        "cannot read 'much' as a size; write '512MiB', '2GiB' or a number of bytes",
    ),
]


@pytest.mark.parametrize(("call", "kind", "text"), MESSAGES, ids=[str(number) for number in range(len(MESSAGES))])
def test_a_message_says_what_is_wrong_with_its_numbers_and_a_next_step(
    call: Callable[[], object], kind: str, text: str
) -> None:
    with pytest.raises(errors.KVPagodaError) as caught:
        call()
    assert (type(caught.value).__name__, str(caught.value)) == (kind, text)
