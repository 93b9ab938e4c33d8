"""The format of sketches: a setting of the plan, in its file, its shards and its heads."""

import re

import numpy as np
import pytest
from samples import Basis, parts_of, plan_of
from test_plan import LAYER, RANKS, same

import sketchssm as ss
from sketchssm.plans import traffic
from sketchssm.plans.files import save_file
from sketchssm.plans.plan import FORMAT

OLDER = FORMAT._replace(version=4, tensors=("omega", "projection", "ranks"))


@pytest.mark.parametrize("settings", [{"sketch_dtype": "int8"}, {"sketch_dtype": "float32", "map": "lowrank"}])
def test_file_shards_and_text(settings, rng, tmp_path):
    plan = plan_of(rng, LAYER, RANKS, **settings)
    plan.save(tmp_path / "plan.safetensors")
    same(ss.SketchPlan.load(tmp_path / "plan.safetensors"), plan)
    assert f"sketch_dtype={settings['sketch_dtype']}" in repr(plan)
    assert {plan.shard(rank, 2).sketch_dtype for rank in range(2)} == {plan.sketch_dtype}


def test_every_format_has_its_fingerprint():
    made = ("bfloat16", "int8", "float32")
    plans = [plan_of(np.random.default_rng(0), LAYER, RANKS, sketch_dtype=form) for form in made]
    assert len({plan.fingerprint for plan in plans}) == len(made)


def test_an_allocation_brings_its_format(rng):
    class Allocation:
        ranks, sketch_dtype = RANKS, "int8"

    basis = Basis(rng, LAYER)
    assert ss.SketchPlan(basis, Allocation()).sketch_dtype == "int8"
    assert ss.SketchPlan(basis, Allocation(), sketch_dtype="bfloat16").sketch_dtype == "bfloat16"


def of_version_4(path, settings):
    """Write a plan file as the version before wrote it."""
    fields, tensors = parts_of(path)
    older = {"flush_every": fields["window"], "wide": None}
    save_file(path, OLDER, tensors | {"projection": tensors["omega"]}, fields | older | settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("flush_every", 64),
        ("sketch_dtype", "int8+int4"),
        ("wide", [1, 0, 1, 0]),
        *(("map", {"name": name, "pivots": None, "ridge": None}) for name in ("prior", "offline", "exact")),
    ],
)
def test_files_with_settings_that_are_gone(name, value, rng, tmp_path):
    """They are refused by name; a file of the same version without them loads."""
    path = tmp_path / "plan.safetensors"
    plan = plan_of(rng, LAYER, RANKS)
    plan.save(path)
    of_version_4(path, {})
    same(ss.SketchPlan.load(path), plan)
    of_version_4(path, {name: value})
    gone = value["name"] if name == "map" else value
    with pytest.raises(ss.PlanFileError, match=re.escape(f"{path}: {name}: this version does not have {gone!r}")):
        ss.SketchPlan.load(path)


@pytest.mark.parametrize(("form", "asked"), [("bfloat16", None), ("bfloat16", "int8"), ("int8", "float32")])
def test_heads_take_the_plan_s_or_their_own(form, asked, rng):
    plan = plan_of(rng, LAYER, RANKS, sketch_dtype=form)
    assert ss.SketchHead(plan, 2, "reference", sketch_dtype=asked).sketch_dtype == (asked or form)


def test_traffic_of_a_head_with_its_own_formats(rng):
    plan = plan_of(rng, LAYER, RANKS, window=8, sketch_dtype="int8")
    shape = LAYER.kind, LAYER.key_dim, LAYER.value_dim, RANKS, 8, plan.map
    assert plan.reduction == plan.reduction_with() == traffic.reduction(*shape, sketch_dtype="int8")
    assert plan.reduction_with("bfloat16") == traffic.reduction(*shape, "bfloat16", sketch_dtype="int8")
    assert plan.reduction_with("float32", "float32") == traffic.reduction(*shape, sketch_dtype="float32")


def test_snapshots_of_another_format_do_not_fit(rng):
    plan = plan_of(rng, LAYER, RANKS)
    heads = [ss.SketchHead(plan, 2, "reference", sketch_dtype=name) for name in ("int8", "float32")]
    with pytest.raises(ValueError, match=r'^snapshot: expected sketch_dtype "float32", got "int8"'):
        heads[1].restore(heads[0].snapshot())
