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

INT8_INT4 = {"map": "ridge", "sketch_dtype": "int8+int4", "wide": [1, 0, 1, 0]}


def test_default(rng):
    plan = plan_of(rng, LAYER, RANKS)
    assert (plan.sketch_dtype, plan.wide) == ("bfloat16", None)


@pytest.mark.parametrize("settings", [{"sketch_dtype": "int8"}, {"sketch_dtype": "fp8", "map": "prior"}, INT8_INT4])
def test_file_shards_and_text(settings, rng, tmp_path):
    plan = plan_of(rng, LAYER, RANKS, **settings)
    plan.save(tmp_path / "plan.safetensors")
    same(ss.SketchPlan.load(tmp_path / "plan.safetensors"), plan)
    assert f"sketch_dtype={settings['sketch_dtype']}" in repr(plan)
    shards = [plan.shard(rank, 2) for rank in range(2)]
    assert {shard.sketch_dtype for shard in shards} == {plan.sketch_dtype}
    if plan.wide is not None:
        np.testing.assert_array_equal(np.concatenate([shard.wide for shard in shards]), plan.wide)
        assert "wide=0..1" in repr(plan)


def test_every_format_has_its_fingerprint(rng):
    made = [{}, {"sketch_dtype": "int8"}, {"sketch_dtype": "fp8"}, INT8_INT4, INT8_INT4 | {"wide": [2, 0, 1, 0]}]
    prints = {plan_of(np.random.default_rng(0), LAYER, RANKS, **settings).fingerprint for settings in made}
    assert len(prints) == len(made)


def test_an_allocation_brings_its_format(rng):
    class Allocation:
        ranks, sketch_dtype, wide = RANKS, "int8+int4", np.array([1, 0, 1, 0])

    basis = Basis(rng, LAYER)
    plan = ss.SketchPlan(basis, Allocation())
    assert plan.sketch_dtype == "int8+int4"
    np.testing.assert_array_equal(plan.wide, Allocation.wide)
    assert ss.SketchPlan(basis, Allocation(), sketch_dtype="bfloat16").wide is None
    assert ss.SketchPlan(basis, Allocation(), wide=[3, 0, 0, 0]).wide[0] == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sketch_dtype": "int4"}, "sketch_dtype: expected one of float32, bfloat16, int8, fp8, int8+int4, got"),
        ({"sketch_dtype": 8}, "sketch_dtype: expected one of"),
        ({"sketch_dtype": ["int8"]}, "sketch_dtype: expected one of"),
        (INT8_INT4 | {"map": "prior"}, "sketch_dtype: 'int8+int4' serves the maps exact and ridge, got map prior"),
        (
            INT8_INT4 | {"map": "offline"},
            "sketch_dtype: 'int8+int4' serves the maps exact and ridge, got map offline",
        ),
        (INT8_INT4 | {"wide": None}, "wide: expected the 8-bit columns of each head for 'int8+int4', got None"),
        ({"wide": [1, 0, 1, 0]}, "wide: expected None, as sketch_dtype 'bfloat16' has one width"),
        ({"wide": [1, 0, 1, 0], "sketch_dtype": "int8"}, "wide: expected None, as sketch_dtype 'int8' has one"),
        (INT8_INT4 | {"wide": [4, 0, 1, 0]}, "wide: expected 0 to 3 for head 0, got 4"),
        (INT8_INT4 | {"wide": [-1, 0, 1, 0]}, "wide: expected 0 to 3 for head 0, got -1"),
        (INT8_INT4 | {"wide": [1, 1, 1, 0]}, "wide: expected 0 to 0 for head 1, got 1"),
        (INT8_INT4 | {"wide": [1, 0, 1]}, "wide: expected 4 integers, got shape (3,)"),
        (INT8_INT4 | {"wide": 1}, "wide: expected 4 integers, got shape ()"),
        (INT8_INT4 | {"wide": [1.0, 0.0, 1.0, 0.0]}, "wide: expected 4 integers, got shape (4,) of float64"),
    ],
)
def test_refuses(settings, message, rng):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        plan_of(rng, LAYER, RANKS, **settings)


def test_version_2_has_no_format(rng, tmp_path):
    """Its sketches were bfloat16, unless the head said float32."""
    plan, path = plan_of(rng, LAYER, RANKS), tmp_path / "plan.safetensors"
    plan.save(path)
    fields, tensors = parts_of(path)
    for name in FORMAT.older[2]:
        del fields[name]
    save_file(path, FORMAT._replace(version=2), tensors, fields)
    same(ss.SketchPlan.load(path), plan)
    save_file(path, FORMAT._replace(version=2), tensors, fields | {"sketch_dtype": "int8"})
    with pytest.raises(ss.PlanFileError, match="sketch_dtype"):
        ss.SketchPlan.load(path)


@pytest.mark.parametrize(
    ("settings", "asked", "message"),
    [
        ({}, "int8+int4", "sketch_dtype: 'int8+int4' needs a plan of this format, got a plan of 'bfloat16'"),
        (INT8_INT4, "int8", "sketch_dtype: expected None or 'float32' for a plan of 'int8+int4', got 'int8'"),
        (
            INT8_INT4,
            "bfloat16",
            "sketch_dtype: expected None or 'float32' for a plan of 'int8+int4', got 'bfloat16'",
        ),
        ({}, "int4", "sketch_dtype: expected one of"),
    ],
)
def test_heads_refuse(settings, asked, message, rng):
    plan = plan_of(rng, LAYER, RANKS, **settings)
    for make in (ss.SketchHead, lambda *args, **own: ss.SketchHead.parts_of(plan, *args[2:], **own)):
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            make(plan, 2, "reference", sketch_dtype=asked)


@pytest.mark.parametrize(
    ("settings", "asked", "stored"),
    [
        ({}, None, "bfloat16"),
        ({}, "int8", "int8"),
        ({"sketch_dtype": "fp8"}, None, "fp8"),
        ({"sketch_dtype": "fp8"}, "float32", "float32"),
        (INT8_INT4, None, "int8+int4"),
        (INT8_INT4, "float32", "float32"),
    ],
)
def test_heads_take_the_plan_s_or_their_own(settings, asked, stored, rng):
    head = ss.SketchHead(plan_of(rng, LAYER, RANKS, **settings), 2, "reference", sketch_dtype=asked)
    assert head.sketch_dtype == stored


def test_traffic_of_a_head_with_its_own_formats(rng):
    plan = plan_of(rng, LAYER, RANKS, window=8, **INT8_INT4)
    shape = LAYER.kind, LAYER.key_dim, LAYER.value_dim, RANKS, 8, plan.map
    own = {"sketch_dtype": "int8+int4", "wide": plan.wide}
    assert plan.reduction == plan.reduction_with() == traffic.reduction(*shape, **own)
    assert plan.reduction_with("bfloat16") == traffic.reduction(*shape, "bfloat16", **own)
    assert plan.reduction_with("float32", "float32") == traffic.reduction(*shape, sketch_dtype="float32")


def test_snapshots_of_another_format_do_not_fit(rng):
    plan = plan_of(rng, LAYER, RANKS)
    heads = [ss.SketchHead(plan, 2, "reference", sketch_dtype=name) for name in ("int8", "fp8")]
    with pytest.raises(ValueError, match=r'^snapshot: expected sketch_dtype "fp8", got "int8"'):
        heads[1].restore(heads[0].snapshot())
