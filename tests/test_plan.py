"""Plans: accepted arguments, and files that load unchanged or are refused."""

import re

import numpy as np
import pytest
from safetensors.numpy import load_file
from samples import LAYERS, Basis, gate_of, parts_of, plan_of, raw_of, refused, states_of, tokens_of

import sketchssm as ss
from sketchssm.layer.coefficients import MAPS, CoefficientMap
from sketchssm.layer.recurrence import FULL_STATE, KINDS, Layer
from sketchssm.plans import traffic
from sketchssm.plans.files import save_file
from sketchssm.plans.model_plans import AllocationSummary, LayerFingerprint, ModelFingerprint, ModelPlans
from sketchssm.plans.plan import FORMAT

LAYER = LAYERS["gdn"]  # 4 heads, K = 6, V = 5
RANKS, BITS = np.array([3, FULL_STATE, 1, 2]), [1, 0, 0, 3]


@pytest.fixture
def plan(rng):
    return plan_of(rng, LAYER, RANKS, window=8, map="lowrank", pivots=3, ridge=0.02)


@pytest.fixture
def saved(plan, tmp_path):
    """A plan file."""
    path = tmp_path / "plan.safetensors"
    plan.save(path)
    return path


def same(a, b):
    """Whether two plans are bitwise equal."""
    assert a.layer == b.layer
    for name in ("omega", "ranks"):
        first, second = getattr(a, name), getattr(b, name)
        assert first.dtype == second.dtype
        assert first.tobytes() == second.tobytes()
    assert a.residual_bits.tolist() == b.residual_bits.tolist()
    for name in ("window", "map", "sketch_dtype"):
        assert getattr(a, name) == getattr(b, name)
        assert type(getattr(a, name)) is type(getattr(b, name))


def contiguous(x):
    return None if x is None else np.ascontiguousarray(x)


class TestPlan:
    def test_takes_the_columns_it_uses(self, rng):
        for rank, columns in ((1, 1), (5, 5), (FULL_STATE, 1)):
            assert plan_of(rng, LAYER, rank).omega.shape == (4, 6, columns)
        basis = Basis(rng, LAYER)
        plan = ss.SketchPlan(basis, RANKS, map="lowrank")
        np.testing.assert_array_equal(plan.omega, basis.omega[:, :, :3].astype(np.float32))
        np.testing.assert_array_equal(plan.ranks, RANKS)
        assert plan.omega.flags.c_contiguous
        assert plan.omega.dtype == np.float32

    def test_defaults(self, rng):
        plan = ss.SketchPlan(Basis(rng, LAYER), RANKS)
        assert (plan.window, plan.map) == (16, CoefficientMap("ridge", ridge=0.001))
        basis = ss.SketchBasis.random(LAYER, 4, window=32)
        assert ss.SketchPlan(basis, RANKS).window == 32
        assert ss.SketchPlan(basis, RANKS, window=8).window == 8

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"map": "best"}, "map: expected one of ridge, lowrank, subspace, got 'best'"),
            ({"window": 1}, "window: expected an integer from 2 to 64, got 1"),
            ({"window": 65}, "window: expected an integer from 2 to 64, got 65"),
            ({"ranks": [1, 2, 3]}, "ranks: expected 4 integers, got shape (3,)"),
            ({"ranks": 2}, "ranks: expected 4 integers, got shape ()"),
            ({"ranks": [1.0, 2.0, 3.0, 4.0]}, "ranks: expected 4 integers, got shape (4,) of float64"),
            ({"ranks": list("1234")}, "ranks: expected 4 integers, got shape (4,) of <U1"),
            ({"ranks": [1, 2, 0, 3]}, "ranks: expected FULL_STATE or 1 to 5"),
            ({"ranks": [1, 2, -2, 3]}, "ranks: expected FULL_STATE or 1 to 5"),
            ({"ranks": [1, 2, 3, 6]}, "ranks: expected FULL_STATE or 1 to 5 (columns, K and V bound it), got 6"),
        ],
    )
    def test_refuses(self, change, message, rng):
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            ss.SketchPlan(**({"basis": Basis(rng, LAYER), "ranks": RANKS} | change))

    def test_a_rank_is_bounded_by_the_value_dim(self, rng):
        layer = Layer("gdn", 1, 6, 2)
        refused(r"ranks: expected FULL_STATE or 1 to 2 \(columns,", ss.SketchPlan, Basis(rng, layer, rank_max=4), [3])

    def test_does_not_share_the_caller_s_ranks(self, rng):
        ranks = RANKS.copy()
        plan = ss.SketchPlan(Basis(rng, LAYER), ranks)
        ranks[:] = 1
        np.testing.assert_array_equal(plan.ranks, RANKS)


class TestShard:
    @pytest.mark.parametrize(("name", "form"), [*zip(MAPS, ("bfloat16", "float32", "int8"), strict=True)])
    def test_a_shard_is_a_whole_plan(self, name, form, rng, tmp_path):
        plan = plan_of(rng, LAYER, RANKS, map=name, window=7, pivots=2, ridge=1 / 3, sketch_dtype=form)
        for rank, (heads, columns) in enumerate([(slice(0, 2), 3), (slice(2, 4), 2)]):
            shard = plan.shard(rank, 2)
            assert shard.layer == Layer("gdn", 2, 6, 5, 1)
            assert (shard.window, shard.map, shard.sketch_dtype) == (7, plan.map, form)
            np.testing.assert_array_equal(shard.ranks, RANKS[heads])
            np.testing.assert_array_equal(shard.omega, plan.omega[heads, :, :columns])
            assert shard.reduction > 1
            shard.save(tmp_path / "shard.safetensors")
            same(ss.SketchPlan.load(tmp_path / "shard.safetensors"), shard)

    @pytest.mark.parametrize("world", [1, 2])
    def test_shares_no_memory(self, world, plan):
        shard = plan.shard(0, world)
        if world == 1:
            same(shard, plan)
        for name in FORMAT.tensors:
            assert not np.shares_memory(getattr(shard, name), getattr(plan, name))

    def test_only_full_state_heads(self, rng):
        shard = plan_of(rng, LAYER, [3, 2, FULL_STATE, FULL_STATE]).shard(1, 2)
        assert shard.omega.shape == (2, 6, 1)
        np.testing.assert_array_equal(shard.ranks, FULL_STATE)

    @pytest.mark.parametrize("backend", ["reference", "cpu"])
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("world", [2, 4])
    @pytest.mark.parametrize("form", [{"map": "lowrank", "pivots": 2}, {"map": "subspace", "residual_bits": BITS}])
    def test_heads_of_shards_are_the_whole_head(self, form, world, kind, backend, rng):
        """Bitwise: a head's arithmetic does not depend on the other heads of its layer."""
        layer = LAYERS[kind]
        plan = plan_of(rng, layer, RANKS, window=3, **form)
        gate = gate_of(rng, layer) if layer.channel_decays else None
        tokens, start = tokens_of(rng, layer, 2, 8), states_of(rng, layer, 2)
        if gate is not None:
            tokens = tokens._replace(g=raw_of(rng, layer, 2, 8))
        whole = ss.SketchHead(plan, 2, backend, gate=gate)
        whole.load_state(start)
        outputs = whole.step(*tokens)
        for rank in range(world):
            heads, keys = layer.shard_heads(rank, world)
            own = [
                None if x is None else x[:, :, axis]
                for x, axis in zip(tokens, [keys, keys, *[heads] * 3], strict=True)
            ]
            part = ss.SketchHead(plan.shard(rank, world), 2, backend, gate=gate and gate.shard(rank, world))
            part.load_state(np.ascontiguousarray(start[:, heads]))
            np.testing.assert_array_equal(part.step(*map(contiguous, own)), outputs[:, :, heads])
            np.testing.assert_array_equal(part.state, whole.state[:, heads])

    @pytest.mark.parametrize(
        ("rank", "world", "message"),
        [
            (0, 3, "world: expected a divisor of heads=4, got 3"),
            (2, 2, "rank: expected an integer from 0 to 1, got 2"),
            (0.0, 2, "rank: expected an integer from 0 to 1, got 0.0"),
            (0, True, "world: expected a positive integer, got True"),
        ],
    )
    def test_refuses(self, rank, world, message, plan):
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            plan.shard(rank, world)

    def test_refuses_key_heads_that_do_not_divide(self, rng):
        plan = plan_of(rng, Layer("gdn", 12, 6, 5, 6))
        refused("world: expected a divisor or a multiple of key_heads=6, got 4", plan.shard, 0, 4)


def test_any_safetensors_reader_opens_it(saved, plan):
    np.testing.assert_array_equal(load_file(saved)["omega"], plan.omega)


class TestBadFiles:
    @pytest.mark.parametrize(
        "tensors",
        [
            {"omega": np.full((4, 6, 3), np.nan, np.float32)},
            {"omega": np.zeros((4, 6), np.float32)},
            {"omega": np.zeros((4, 5, 3), np.float32)},
            {"omega": np.ones((4, 6, 2), np.float32)},
            {"omega": np.zeros((4, 6, 3), np.int32)},
            {"omega": np.full((4, 6, 3), 1e300)},
            {"ranks": np.array([1, 2, 3, 4])},
            {"ranks": np.array([1, 2, 0, 3])},
            {"ranks": np.array([1, 2, 3])},
            {"ranks": np.array([1.0, 2.0, 3.0, 3.0])},
        ],
        ids=lambda change: "-".join(f"{name}{x.shape}{x.dtype}" for name, x in change.items()),
    )
    def test_contradictory_tensors(self, tensors, saved):
        fields, good = parts_of(saved)
        save_file(saved, FORMAT, good | tensors, fields)
        with pytest.raises(ss.PlanFileError, match=rf": ({'|'.join(good)}): expected "):
            ss.SketchPlan.load(saved)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            *(("layer", wrong) for wrong in ({"kind": "mamba1"}, {"heads": 5}, {"heads": "4"}, {"key_dim": 7})),
            *(("layer", wrong) for wrong in ({"key_heads": 3}, {"value_dim": 2}, {"colour": "red"})),
            *(("window", wrong) for wrong in (1, 10**30, "16")),
            *(("flush_every", wrong) for wrong in (12, 16)),
            *(("map", wrong) for wrong in ("best", {"name": "best"}, {"name": ["ridge"]}, {"name": "ridge"})),
            *(("map", wrong) for wrong in ({"pivots": 0}, {"ridge": -1.0}, {"ridge": "small"}, {"ridge": None})),
            ("map", {"depth": 3}),
        ],
        ids=str,
    )
    def test_contradictory_metadata(self, key, value, saved):
        fields, tensors = parts_of(saved)
        fields[key] = fields[key] | value if isinstance(value, dict) else value
        save_file(saved, FORMAT, tensors, fields)
        with pytest.raises(ss.PlanFileError, match=re.escape(str(saved))):
            ss.SketchPlan.load(saved)


def test_an_allocation_brings_its_format(rng):
    class Allocation:
        ranks, sketch_dtype = RANKS, "int8"

    basis = Basis(rng, LAYER)
    assert ss.SketchPlan(basis, Allocation()).sketch_dtype == "int8"
    assert ss.SketchPlan(basis, Allocation(), sketch_dtype="bfloat16").sketch_dtype == "bfloat16"


def as_of(version, fields, tensors):
    """Fields and tensors of a plan as an older version wrote them."""
    gone = {2: {"residual_bits", "sketch_dtype"}, 3: {"residual_bits"}, 4: set()}[version]
    more = {} if version == 2 else {"flush_every": fields["window"], "wide": None}
    kept = {name: x for name, x in (fields | more).items() if name not in gone}
    return kept, tensors | {"projection": tensors["omega"]}


def save_older(path, version, settings):
    fields, tensors = as_of(version, *parts_of(path))
    save_file(path, FORMAT._replace(version=version, tensors=tuple(sorted(tensors))), tensors, fields | settings)


@pytest.mark.parametrize("version", [2, 3, 4])
def test_older_files(version, rng, tmp_path):
    """Plans of a layer and of a model."""
    form = {"map": "subspace", "residual_bits": BITS} if version == 4 else {}
    path, plan = tmp_path / "plan.safetensors", plan_of(rng, LAYER, RANKS, **form)
    plan.save(path)
    save_older(path, version, {})
    same(ss.SketchPlan.load(path), plan)
    whole, identity = tmp_path / "model.safetensors", LayerFingerprint("Module", LAYER, "x")
    made = AllocationSummary(2.0, "uniform", 0.0, {"a": 1.0}, 9)
    ModelPlans({"a": plan}, ModelFingerprint("Model", {"a": identity}), made).save(whole)
    fields, _ = parts_of(whole)
    fields["layers"]["a"]["plan"], tensors = as_of(version, *plan._contents()[::-1])
    form = ModelPlans.FORMAT._replace(version=version, tensors=tuple(f"a.{name}" for name in sorted(tensors)))
    save_file(whole, form, {f"a.{name}": x for name, x in tensors.items()}, fields)
    same(ModelPlans.load(whole)["a"], plan)


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
    """They are refused by name."""
    path = tmp_path / "plan.safetensors"
    plan_of(rng, LAYER, RANKS).save(path)
    save_older(path, 4, {name: value})
    gone = value["name"] if name == "map" else value
    with pytest.raises(ss.PlanFileError, match=re.escape(f"{path}: {name}: this version does not have {gone!r}")):
        ss.SketchPlan.load(path)


@pytest.mark.parametrize(("form", "asked"), [("bfloat16", None), ("bfloat16", "int8"), ("int8", "float32")])
def test_heads_take_the_plan_s_or_their_own(form, asked, rng):
    plan = plan_of(rng, LAYER, RANKS, sketch_dtype=form)
    assert ss.SketchHead(plan, 2, "reference", sketch_dtype=asked).sketch_dtype == (asked or form)


def test_traffic_of_a_plan_and_of_a_head_with_its_own_formats(rng):
    plan = plan_of(rng, LAYER, RANKS, window=8, map="lowrank", pivots=3, sketch_dtype="int8")
    shape = LAYER.kind, LAYER.key_dim, LAYER.value_dim, RANKS, 8, plan.map
    assert plan.reduction == plan.reduction_with() == traffic.reduction(*shape, sketch_dtype="int8")
    assert plan.reduction_with("bfloat16") == traffic.reduction(*shape, "bfloat16", sketch_dtype="int8")
    assert plan.reduction_with("float32", "float32") == traffic.reduction(*shape, sketch_dtype="float32")
