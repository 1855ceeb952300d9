"""``judge`` against the public cases, and against legal and illegal tensors for every kernel and demand of the table."""

import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from legal_tensors import CASES, HUGE, fused, nhd, packed, tensor

from kvpagoda.errors import BadInput
from kvpagoda.layouts.demands import COMPARISONS, OUTCOMES, kernel, kernels
from kvpagoda.layouts.judge import TensorSpec, judge
from raises import raises

PUBLIC = Path(__file__).parents[3] / "shared" / "vectors" / "legality.json"
ILLEGAL = [
    pytest.param(name, facts.get("arch", arch), tensors or legal, facts, outcome, rule, id=f"{name}: {rule}")
    for name, (arch, legal, _, rows) in CASES.items()
    for tensors, facts, outcome, rule in rows
]


def facts_of(facts):
    return {fact: value for fact, value in facts.items() if fact != "arch"}


@pytest.mark.skipif(not PUBLIC.exists(), reason="the public legality cases are not here")
def test_the_public_cases():
    cases = json.loads(PUBLIC.read_text())
    assert len(cases) >= 40
    for case in cases:
        verdict = judge(
            case["kernel"], tensors=case["tensors"], arch=case.get("arch", "any"), declared=case.get("declared")
        )
        assert verdict.expect == case["expect"], (case, str(verdict))
        assert verdict.rule and verdict.source and (verdict.remedy or verdict.expect == "ok")


@pytest.mark.parametrize("name", CASES)
def test_legal_tensors_are_ok(name):
    arch, tensors, facts, _ = CASES[name]
    verdict = judge(name, tensors, arch, facts)
    assert verdict.expect == "ok" and verdict.unused == (), str(verdict)


@pytest.mark.parametrize(("name", "arch", "tensors", "facts", "outcome", "rule"), ILLEGAL)
def test_illegal_tensors_break_the_rule_that_is_named(name, arch, tensors, facts, outcome, rule):
    verdict = judge(name, tensors, arch, facts_of(facts))
    assert (verdict.expect, verdict.rule) == (outcome, rule), str(verdict)
    assert verdict.source and verdict.reason


def test_every_kernel_and_every_demand_of_the_table_has_a_case():
    assert set(CASES) == set(kernels())
    table = json.loads(files("kvpagoda.layouts").joinpath("demands.json").read_text(encoding="utf-8"))
    for name, row in table["kernels"].items():  # what a row has from the one that it is like is tested there
        tested = {rule for _, _, _, rule in CASES[name][3]}
        own = {demand["demand"] for demand in row["demands"]}
        assert own <= tested, f"{name}: no case for {own - tested}"


def test_every_name_is_of_one_kernel():
    table = json.loads(files("kvpagoda.layouts").joinpath("demands.json").read_text(encoding="utf-8"))["kernels"]
    names = [name for key, row in table.items() for name in (key, *row.get("also", ()))]
    assert len(names) == len(set(names)) and len(table) == 52
    assert all(kernel(name).name in table for name in names)


def test_every_demand_names_what_there_is_and_its_source():
    for row in map(kernel, kernels()):
        assert row.title and row.source and row.section and row.role in ("read", "write", "move")
        for demand in row.demands:
            assert demand.source and demand.outcome in OUTCOMES and demand.comparison in COMPARISONS
            assert demand.conditions.keys() <= {"when", "arch", "addresses", "offset", "rounded_up_to"}
            paths = [*demand.of, *demand.conditions.get("when", ())]
            paths += demand.value.split() if isinstance(demand.value, str) and "." in demand.value else []
            for path in [side for whole in paths for side in whole.split("*")]:
                owner, _, rest = path.partition(".")
                if owner in ("declared", "each") or owner.isdigit():
                    continue
                assert owner in row.tensors, f"{row.name}: {path}"
                axes = rest.partition(".")[2]
                named = set(axes.split(",")) - {"", "all", "outer", "last"}
                assert named <= {axis for form in row.tensors[owner].values() for axis in form}, f"{row.name}: {path}"


@pytest.mark.parametrize("name", [name for name in kernels() if kernel(name).archs])
def test_a_kernel_refuses_the_other_architectures(name):
    _, tensors, facts, _ = CASES[name]
    for arch in {"sm80", "sm90", "sm100", "sm120"} - set(kernel(name).archs):
        verdict = judge(name, tensors, arch, facts)
        assert (verdict.expect, verdict.rule) == ("reject", "architecture")


@pytest.mark.parametrize(
    ("arch", "same_as"), [("sm103a", "sm100"), ("SM_90a", "sm90"), ("sm121", "sm120"), ("any", "any")]
)
def test_architectures_by_family(arch, same_as):
    page = {"kv": packed(64, 656, 42000)}
    assert judge("flashmla_sparse_v32", page, arch).expect == judge("flashmla_sparse_v32", page, same_as).expect


def test_any_architecture_means_all_of_them():
    page = {"kv": packed(64, 656, 42000)}
    assert judge("flashmla_sparse_v32", page, "sm90").expect == "ok"
    assert judge("flashmla_sparse_v32", page).expect == "reject"


def test_a_refusal_comes_before_garbage():
    verdict = judge("cutlass_mla", fused(48, stride=40000), "sm100")
    assert (verdict.expect, verdict.rule) == ("reject", "page size")


def test_strides_of_single_elements_matter_only_to_kernels_that_look_at_them():
    one_page = {"kv": tensor(1, 64, 576, strides=(HUGE, 576, 1))}
    assert judge("cutlass_mla", one_page, "sm100").expect == "ok"
    k, v = tensor(1, 16, 8, 128), tensor(1, 16, 8, 128, strides=(20000, 1024, 128, 1))
    assert judge("vllm_reshape_and_cache_flash", {"k": k, "v": v}).expect == "ok"
    assert judge("flashinfer_fa2_decode", {"k": k, "v": v}).expect == "reject"


def test_facts_that_nobody_declared_are_listed():
    verdict = judge("flashinfer_gdn_decode", CASES["flashinfer_gdn_decode"][1], "sm90")
    assert verdict.expect == "ok" and verdict.assumed == ("declared.order is ['VK']",)
    assert judge("flashinfer_gdn_decode", CASES["flashinfer_gdn_decode"][1], "sm90", {"ordr": "VK"}).unused == ("ordr",)


def test_facts_may_stand_beside_the_tensors_and_go_by_other_names():
    state = CASES["flashinfer_gdn_decode"][1]
    assert judge("flashinfer_gdn_decode", {**state, "declared": {"order": "KV"}}, "sm90").expect == "garbage"
    assert judge("flashinfer-gdn-decode-pretranspose", state, "sm90", {"orientation": "KV"}).expect == "garbage"
    assert judge("fa2", {"key_cache": nhd(256)["k"], "value_cache": nhd(256)["v"]}).expect == "ok"


def test_the_key_tells_strides_apart():
    dense, padded = judge("fa3", nhd(), "sm90"), judge("fa3", nhd(strides=(20000, 1024, 128, 1)), "sm90")
    assert hash(dense.key) == hash(judge("fa3", nhd(), "sm90").key) and dense.key != padded.key


@pytest.mark.parametrize(
    ("call", "figures"),
    [
        (lambda: judge("flash_atention_2", nhd()), {"needed": "flash_atention_2", "available": ANY}),
        (lambda: judge("nothing_like_it", nhd()), {"needed": "nothing_like_it", "available": ANY}),
        (lambda: judge("fa2", {"k": tensor(8, 256, 8, 128)}), {"needed": "k and v", "available": ("k",)}),
        (lambda: judge("fa2", {**nhd(256), "w": tensor(1)}), {"needed": "w", "available": ("k", "v", "table")}),
        (lambda: judge("fa2", nhd(256), "sm70"), {"needed": "sm70", "available": ANY}),
        (lambda: judge("fa2", nhd(256, dtype="float17")), {"field": "k", "needed": "float17"}),
        (lambda: judge("fa2", {**nhd(256), "v": {"shape": [1], "dtype": "int8"}}), {"field": "v", "needed": "strides"}),
        (
            lambda: judge("fa2", {**nhd(256), "v": {**tensor(1, 2), "strides": [1]}}),
            {"field": "v", "needed": 2, "available": 1},
        ),
        (
            lambda: judge("fa2", {**nhd(256), "v": tensor(1, -2)}),
            {"field": "an extent of 'v'", "needed": -2, "available": 0},
        ),
        (
            lambda: judge("fa2", {**nhd(256), "v": tensor(1, 2, base=0)}),
            {"field": "the base alignment of 'v' in bytes", "needed": 0, "available": 1},
        ),
    ],
)
def test_what_cannot_be_judged_is_an_error_with_a_next_step(call, figures: dict[str, Any]):
    with raises(BadInput, **figures):
        call()


def test_a_tensor_of_another_rank_is_refused_with_the_axes_that_are_wanted():
    verdict = judge("flashmla_dense", {"kv": tensor(8, 64, 576)}, "sm90")
    assert (verdict.expect, verdict.rule) == ("reject", "shape") and "[block, token, head, dim]" in verdict.remedy


def test_specs_are_values():
    spec = TensorSpec((8, 256, 8, 128), (262144, 1024, 128, 1), "bfloat16", 16)
    assert judge("fa2", {"k": spec, "v": spec}).expect == "ok"


def test_it_needs_no_torch_and_nothing_of_the_cache():
    code = """
import sys
from kvpagoda.layouts import judge
loaded = {name.split(".")[1] for name in sys.modules if name.startswith("kvpagoda.")}
assert "torch" not in sys.modules and loaded <= {"errors", "units", "loading", "text", "layouts"}, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True)
