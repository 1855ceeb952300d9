"""Layouts as values: engines' axis orders, expressions, descriptors, fingerprints, drawings, and what is refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import numpy as np
import pytest
from plain_layout import made, random_content, random_plain

from kvpagoda.errors import BadInput, LayoutError
from kvpagoda.layouts import Layout
from raises import raises

VECTORS = Path(__file__).parents[3] / "shared" / "vectors" / "axes.npz"
DSV4 = "L B (N (code[448]:float8_e4m3fn | rope[64]:bfloat16) | N (scale[7]:float8_e8m0fnu | pad:uint8))^576"
PACKED = "(k[D]:uint16 | v[Dv]:uint16)"
ORDERS = {
    **{f"vllm_packed_{order}C": f"{' '.join(order)} {PACKED}" for order in "LBHN LBNH LHBN BLHN BLNH BHLN".split()},
    "vllm_packed_BLHNC_block_padded": f"B@268 L H N {PACKED}",
    "kv_split_L_2_BNHD": "L (B N H k[D]:uint16 | B N H v[Dv]:uint16)",
    "kv_split_L_B2_NHD": "L B (N H k[D]:uint16 | N H v[Dv]:uint16)",
    "kv_split_L_2_BHND": "L (B H N k[D]:uint16 | B H N v[Dv]:uint16)",
    "kv_split_L_B2_HND": "L B (H N k[D]:uint16 | H N v[Dv]:uint16)",
    "cross_layer_BL2_NHD": "B L (N H k[D]:uint16 | N H v[Dv]:uint16)",
    "cross_layer_BL2_HND": "B L (H N k[D]:uint16 | H N v[Dv]:uint16)",
    "tokens_2L_NHD": "L T H k[D]:uint16 | L T H v[Dv]:uint16",
    "sglang_page_first": "T L H k[D]:uint16 | T L H v[Dv]:uint16",
    "sglang_page_first_direct": "B L N H k[D]:uint16 | B L N H v[Dv]:uint16",
    "sglang_page_head": "B H N L k[D]:uint16 | B H N L v[Dv]:uint16",
}


def test_engines_axis_orders_put_every_element_where_they_do() -> None:
    if not VECTORS.exists():
        pytest.skip(f"no vectors at {VECTORS}")
    vectors = np.load(VECTORS)
    assert ORDERS.keys() == {*vectors.files} - {"shape", "letters"}
    sizes = dict(zip(("L", "B", "N", "H", "D", "Dv"), vectors["shape"].tolist()))
    for name, expression in ORDERS.items():
        layout, first = Layout.of(expression, **sizes), 0
        memory = np.full(layout.nbytes // 2, 65535, np.uint16)
        for part, dims in (("k", "D"), ("v", "Dv")):
            order = ("L", "T", "H", dims)
            numbers = first + np.arange(np.prod([layout.axis(axis).size for axis in order]))
            numbers = numbers.reshape([layout.axis(axis).size for axis in order])
            axes = layout.place(part).axes
            memory[layout.addresses(part) // 2] = numbers.transpose([order.index(axis) for axis in axes])
            first += numbers.size
        assert np.array_equal(memory, vectors[name]), name


def test_random_layouts_lie_where_a_walk_puts_them_and_round_trip() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        content = random_content(rng)
        plain, page = random_plain(rng, content, {axis: range(size) for axis, size in content.sizes.items()})
        layout = made(plain, content, page)
        found = {}
        for part in content.parts:
            axes = layout.place(part).axes
            for indices, address in np.ndenumerate(layout.addresses(part)):
                by_axis = dict(zip(axes, indices))
                found[int(address)] = (part, tuple(int(by_axis[axis]) for axis in content.parts[part][1]), 0)
        assert found == {at: one for at, one in plain.bytes().items() if one[2] == 0}, seed
        again = Layout.from_json(layout.to_json())
        assert again == layout and again.fingerprint == layout.fingerprint and str(again) == str(layout), seed
        assert replace(layout, expression=layout.expression) == layout and layout.nbytes == plain.end


@pytest.mark.parametrize(("page", "payload", "stride"), [(64, 37_376, 37_440), (32, 18_688, 19_008), (2, 1_168, 1_728)])
def test_a_footer_page_is_padded_to_whole_rows(page: int, payload: int, stride: int) -> None:
    layout = Layout.of(DSV4, L=1, B=3, N=page)
    assert layout.strides("code") == {"L": 3 * stride, "B": stride, "N": 576, "448": 1}
    assert layout.place("scale").offset == page * 576 and layout.nbytes == 3 * stride
    assert layout.payload_nbytes == 3 * (payload - page)  # the eighth scale byte of a row is no content


def test_an_axis_may_be_folded_and_its_digits_permuted() -> None:
    layout = Layout.of("N scale[G%4,G/4]:float8_e4m3fn", N=2, T=2, G=32)
    assert layout.addresses("scale")[1].tolist() == [32 + 8 * (s % 4) + s // 4 for s in range(32)]
    layout = Layout.of("B H D/8 N k[D%8]:float16", B=1, N=4, H=1, D=16)
    assert layout.strides("k") == {"B": 128, "H": 128, "D/8": 64, "N": 16, "D%8": 2}


def test_a_block_of_several_kernel_pages() -> None:
    layout = Layout.of("B P@64 N k[D]:uint8", B=2, P=2, N=4, D=8)
    assert layout.strides("k") == {"B": 128, "P": 64, "N": 8, "D": 1}
    assert layout.addresses("k")[:, 0].tolist()[::4] == [0, 64, 128, 192]


@pytest.mark.parametrize("expression", ORDERS.values())
def test_a_view_has_the_elements_of_its_part(expression: str) -> None:
    layout = Layout.of(expression, L=2, B=3, N=4, H=2, D=4, Dv=4)
    memory = np.arange(layout.nbytes // 2, dtype=np.uint16)
    tokens = ("T",) if "T" in expression else ("B", "N")
    for part, dims in (("k", "D"), ("v", "Dv")):
        view = layout.view(part, *tokens, "H", dims, at={"L": 1})
        seen = np.ndarray(view.shape, np.uint16, memory, view.offset, [2 * stride for stride in view.strides])
        axes = layout.place(part).axes
        wanted = layout.addresses(part).transpose([axes.index(axis) for axis in ("L", "T", "H", dims)])[1]
        assert np.array_equal(2 * seen.reshape(wanted.shape), wanted) and view.dtype == "uint16"
    with raises(LayoutError, needed="Q", available=ANY, rule="axis"):
        layout.view("k", "Q")
    with raises(LayoutError, needed=2, available=1, rule="size"):
        layout.view("k", "H", at={"L": 2})


def test_a_dimension_of_one_has_a_dense_stride() -> None:
    view = Layout.of("B H@70 N k[D]:uint16", B=3, H=1, N=4, D=8).view("k", "B", "H", "N", "D")
    assert (view.shape, view.strides) == ((3, 1, 4, 8), (35, 32, 8, 1))


def test_the_fingerprint_changes_with_everything_but_the_name() -> None:
    layout = Layout.of(DSV4, L=2, T=100, N=64, values={"format": "dsv4_584", "dialect": "flashmla", "name": "a"})
    assert replace(layout, name="b") == layout and replace(layout, name="b").fingerprint == layout.fingerprint
    others = [
        replace(layout, dialect="vllm"),
        replace(layout, format="raw"),
        replace(layout, offset=576),
        replace(layout, index=replace(layout.index, dtype="int64")),
        replace(layout, expression=DSV4.replace("^576", "^64")),
        layout.resized(N=32),
        layout.resized(T=101),
        layout.resized(L=3),
        *layout.split(pp=2),
    ]
    assert len({layout.fingerprint, *(other.fingerprint for other in others)}) == len(others) + 1


def test_the_fingerprint_of_a_layout_is_pinned() -> None:
    """It names records that outlive a process: if this changes, VERSION has to."""
    layout = Layout.of("B N k[D]:uint8", B=1, N=2, D=3)
    assert layout.fingerprint == "aac9211e525ba95ac5042c606ff77258"


def test_other_sizes() -> None:
    layout = Layout.of("B L H N k[D]:uint8", L=2, B=3, N=4, H=2, D=8)
    other = layout.resized(B=5, N=2, H=4)
    assert other == Layout.of("B L H N k[D]:uint8", L=2, B=5, N=2, H=4, D=8)
    assert other.split(tp=4)[3].axis("H").first == 3


def test_one_spelling() -> None:
    sizes = dict(L=2, B=3, N=4, H=2, D=4)
    spelled = Layout.of("( L  B ((N H k[D] :bfloat16|N H v[ D ]:bfloat16) ) )".replace(" :", ":"), **sizes)
    plain = Layout.of("L B (N H k[D]:bfloat16 | N H v[D]:bfloat16)", **sizes)
    assert spelled == plain and spelled.expression == plain.expression


def test_ranks_hold_heads_and_stages_layers() -> None:
    layout = Layout.of("L H k[D]:uint8", L=5, H=4, D=2)
    ranks = layout.split(tp=2, pp=2)
    held = [[(axis.first, axis.size) for axis in rank.axes if axis.name in "LH"] for rank in ranks]
    assert held == [[(0, 2), (0, 3)], [(2, 2), (0, 3)], [(0, 2), (3, 2)], [(2, 2), (3, 2)]]
    assert [rank.nbytes for rank in ranks] == [12, 12, 8, 8]
    more = layout.split(tp=8)
    assert [rank.axis("H").first for rank in more] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {rank.axis("H").size for rank in more} == {1}


BAD = {
    "nothing": ("syntax", "", {}),
    "rubbish": ("syntax", "L $ k:uint8", dict(L=1)),
    "open": ("syntax", "L (k:uint8", dict(L=1)),
    "closed": ("syntax", "L k:uint8)", dict(L=1)),
    "no part": ("syntax", "L B", dict(L=1, B=1)),
    "no item": ("syntax", "k:uint8 |", {}),
    "dtype": ("dtype", "k:float7", {}),
    "no size": ("axis", "L H k:uint8", dict(L=1)),
    "no place": ("axis", "L k:uint8", dict(L=1, H=2)),
    "digit twice": ("fold", "L L k:uint8", dict(L=2)),
    "digit left out": ("fold", "B k:uint8", dict(B=2, N=4)),
    "digits with a gap": ("fold", "D/8 D%4 k:uint8", dict(D=16)),
    "fold of a digit": ("fold", "B/2 k:uint8", dict(B=2)),
    "step of 0": ("fold", "D/0 k:uint8", dict(D=2)),
    "too few": ("fold", "D%4 k:uint8", dict(D=8)),
    "on top": ("stride", "B@7 k[D]:uint8", dict(B=2, D=8)),
    "not aligned": ("align", "B (a:uint8 | k:bfloat16)", dict(B=2)),
    "odd stride": ("align", "B@3 k:bfloat16", dict(B=2)),
    "pad to 0": ("align", "(k:uint8)^0", {}),
    "part twice": ("part", "k:uint8 | k:uint8", {}),
    "no content": ("part", "pad:uint8", {}),
    "too long": ("syntax", "(" * 300 + "k:uint8" + ")" * 300, {}),
    "too large": ("size", "A B D k:uint8", dict(A=2**30, B=2**30, D=2**30)),
    "tokens and blocks": ("size", "B N k:uint8", dict(B=2, N=4, T=4)),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_laid_out_is_refused_by_the_name_of_the_rule(name: str) -> None:
    rule, expression, sizes = BAD[name]
    with raises(LayoutError, rule=rule, needed=ANY, available=ANY):
        Layout.of(expression, **sizes)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "4"])
def test_sizes_are_whole_numbers(size: object) -> None:
    with raises(BadInput, field="the size of 'B'", needed=size, available=1):
        Layout.of("B N k:uint8", B=size, N=2)  # type: ignore[arg-type]


def test_what_cannot_be_divided_or_resized_is_refused() -> None:
    layout = Layout.of("L H k[D]:uint8", L=2, H=6, D=2)
    for ways, count in ((dict(tp=4), 6), (dict(pp=3), 2)):
        with raises(LayoutError, rule="divide", needed=next(iter(ways.values())), available=count):
            layout.split(**ways)
    with raises(LayoutError, needed=2, available=1, rule="divide"):
        layout.split(tp=2)[0].split(tp=2)
    with raises(LayoutError, needed="H", rule="size"):
        layout.split(tp=2)[0].resized(H=8)
    with raises(LayoutError, needed="L", rule="divide"):
        Layout.of("H k:uint8", H=2).split(pp=2)
    with raises(LayoutError, needed="v", rule="part"):
        layout.place("v")
    with raises(LayoutError, needed="Q", available=("D", "H", "L"), rule="axis"):
        layout.axis("Q")


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(layout=2),
        lambda data: data.pop("expression"),
        lambda data: data.update(axes=[]),
        lambda data: data["axes"]["T"].update(step=2),
        lambda data: data["index"].update(unit="page"),
        lambda data: data["follows"].update(nbytes=1),
        lambda data: data["follows"]["parts"][0]["strides"][0].update(stride=5),
        lambda data: data.update(dialect="another"),
        lambda data: data.update(follows=[1]),
    ],
)
def test_a_descriptor_that_is_none_is_refused(change: object) -> None:
    data = Layout.of("B N k[D]:uint8", B=1, N=2, D=3).to_dict()
    change(data)  # type: ignore[operator]
    with pytest.raises(LayoutError) as raised:
        Layout.from_json(json.dumps(data))
    assert raised.value.rule == "descriptor"


def test_rubbish_is_refused_by_rule() -> None:
    """Random words as an expression, and a descriptor with random values: a layout, or an error of this library."""
    rng, made = random.Random(0), 0
    words = (
        "L B N T H D D/2 D%2 D/0 k:uint8 k[D]:uint8 v[4]:float32 k[]:uint8 ( ) | ^4 ^0 @8 B@64 [ : ² pad:uint8".split()
    )
    for _ in range(3000):
        expression = " ".join(rng.choice(words) for _ in range(rng.randint(1, 5)))
        sizes = {}
        for word in "LBNTHD":
            if (word in expression) != (rng.random() < 0.05):
                sizes[word] = rng.choice([1, 2, 3]) if rng.random() < 0.95 else rng.choice([0, 10**30, "x"])
        try:
            layout = Layout.of(expression, **sizes)
            assert Layout.from_json(layout.to_json()) == layout and str(layout)
            made += 1
        except BadInput:
            pass
    assert made > 20
    plain, refused = Layout.of(DSV4, L=2, T=100, N=64), 0
    for _ in range(1000):
        inside = data = json.loads(plain.to_json())
        while True:
            key = rng.choice([*inside] if isinstance(inside, dict) else range(len(inside)))
            if not isinstance(inside[key], dict | list) or not inside[key] or rng.random() < 0.2:
                break
            inside = inside[key]
        inside[key] = rng.choice([None, -1, 0, 2**70, "x", [], {}, True])
        try:
            assert Layout.from_json(json.dumps(data)) == plain
        except BadInput:
            refused += 1
    assert refused > 800


@pytest.mark.parametrize("text", ["", "[]", "1", '"L"', "{}", "{"])
def test_text_that_is_no_descriptor_is_refused(text: str) -> None:
    with raises(LayoutError, rule="descriptor", needed=ANY):
        Layout.from_json(text)


def test_a_descriptor_without_what_follows_is_enough() -> None:
    layout = Layout.of(DSV4, L=2, T=100, N=64)
    data = layout.to_dict()
    del data["follows"]
    assert Layout.from_json(json.dumps(data)) == layout


def test_a_drawing_says_what_lies_at_which_byte() -> None:
    layout = Layout.of(DSV4, L=2, T=100, N=64, values={"format": "dsv4_584", "dialect": "flashmla", "name": "example"})
    assert (
        str(layout)
        == """\
example, dsv4_584, flashmla: 149,760 bytes, 116,600 of them content
L B (N (code[448]:float8_e4m3fn | rope[64]:bfloat16) | N (scale[7]:float8_e8m0fnu | pad:uint8))^576
L 2, T 100; index of a block: int32
0           L: 2 layers, 74,880 bytes apart
  0           B: 2 blocks, 37,440 bytes apart
    0           N: 64 tokens, 576 bytes apart
      0           code: 448 float8_e4m3fn = 448 bytes
      448         rope: 64 bfloat16 = 128 bytes
    36,864      N: 64 tokens, 8 bytes apart
      0           scale: 7 float8_e8m0fnu = 7 bytes
      7           pad: 1 uint8, undefined
    37,376      64 bytes of padding"""
    )
