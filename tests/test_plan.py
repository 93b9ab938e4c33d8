"""Plans: accepted arguments, and files that load unchanged or are refused."""

import re

import numpy as np
import pytest
from safetensors.numpy import load_file
from samples import LAYERS, Basis, parts_of, plan_of

import sketchssm as ss
from sketchssm.coefficients import MAPS, CoefficientMap
from sketchssm.files import save_file
from sketchssm.plan import FORMAT
from sketchssm.recurrence import DENSE, KINDS, Layer

LAYER = LAYERS["gdn"]  # 4 heads, K = 6, V = 5
RANKS = np.array([3, DENSE, 1, 2])


@pytest.fixture
def plan(rng):
    return plan_of(rng, LAYER, RANKS, window=8, map="prior", pivots=3, ridge=0.02)


@pytest.fixture
def saved(plan, tmp_path):
    """A plan file."""
    path = tmp_path / "plan.safetensors"
    plan.save(path)
    return path


def same(a, b):
    """Whether two plans are bitwise equal."""
    assert a.layer == b.layer
    for name in ("omega", "projection", "ranks"):
        first, second = getattr(a, name), getattr(b, name)
        assert first.dtype == second.dtype
        assert first.tobytes() == second.tobytes()
    for name in ("window", "map"):
        assert getattr(a, name) == getattr(b, name)
        assert type(getattr(a, name)) is type(getattr(b, name))


class TestPlan:
    def test_takes_the_columns_it_uses(self, rng):
        basis = Basis(rng, LAYER)
        plan = ss.SketchPlan(basis, RANKS, map="lowrank")
        np.testing.assert_array_equal(plan.omega, basis.omega[:, :, :3].astype(np.float32))
        np.testing.assert_array_equal(plan.projection, plan.omega)
        np.testing.assert_array_equal(plan.ranks, RANKS)
        assert plan.omega.flags.c_contiguous
        assert plan.omega.dtype == plan.projection.dtype == np.float32

    @pytest.mark.parametrize(("rank", "columns"), [(1, 1), (5, 5), (DENSE, 1)])
    def test_keeps_no_other_column(self, rank, columns, rng):
        assert plan_of(rng, LAYER, rank).omega.shape == (4, 6, columns)

    def test_defaults(self, rng):
        plan = ss.SketchPlan(Basis(rng, LAYER), RANKS)
        assert (plan.window, plan.map) == (16, CoefficientMap("ridge", ridge=0.001))

    @pytest.mark.parametrize("name", MAPS)
    def test_each_map_has_its_columns(self, name, rng):
        basis = Basis(rng, LAYER)
        plan = ss.SketchPlan(basis, RANKS, map=name)
        omega, projection = basis.columns(3, weighted=name in ("prior", "offline"))
        np.testing.assert_array_equal(plan.omega, omega.astype(np.float32))
        np.testing.assert_array_equal(plan.projection, projection.astype(np.float32))

    def test_takes_what_holds_ranks(self, rng):
        class Allocation:
            ranks = RANKS

        np.testing.assert_array_equal(ss.SketchPlan(Basis(rng, LAYER), Allocation()).ranks, RANKS)
        np.testing.assert_array_equal(ss.SketchPlan(Basis(rng, LAYER), RANKS.tolist()).ranks, RANKS)

    def test_the_window_is_the_basis_s(self, rng):
        basis = ss.SketchBasis.random(LAYER, 4, window=32)
        assert ss.SketchPlan(basis, RANKS).window == 32
        assert ss.SketchPlan(basis, RANKS, window=8).window == 8

    def test_mean_rank_and_repr(self, plan, rng):
        assert plan.mean_rank == 2.0
        line = repr(plan)
        assert "\n" not in line
        for shown in (
            "gdn",
            "heads=4",
            "K=6",
            "V=5",
            "ranks=1..3",
            "dense=1",
            "window=8",
            "map=prior(pivots=3, ridge=0.02)",
        ):
            assert shown in line
        dense = plan_of(rng, LAYER, DENSE)
        assert np.isnan(dense.mean_rank)
        assert "ranks=none" in repr(dense)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"map": "best"}, "map: expected one of exact, ridge, lowrank, prior, offline, got 'best'"),
            ({"window": 1}, "window: expected an integer from 2 to 4096, got 1"),
            ({"window": 10**30}, f"window: expected an integer from 2 to 4096, got {10**30}"),
            ({"window": 8.0}, "window: expected an integer from 2 to 4096, got 8.0"),
            ({"window": True}, "window: expected an integer from 2 to 4096, got True"),
            ({"ranks": [1, 2, 3]}, "ranks: expected 4 integers, got shape (3,)"),
            ({"ranks": 2}, "ranks: expected 4 integers, got shape ()"),
            ({"ranks": [1.0, 2.0, 3.0, 4.0]}, "ranks: expected 4 integers, got shape (4,) of float64"),
            ({"ranks": list("1234")}, "ranks: expected 4 integers, got shape (4,) of <U1"),
            ({"ranks": [1, 2, 0, 3]}, "ranks: expected DENSE or 1 to 3"),
            ({"ranks": [1, 2, -2, 3]}, "ranks: expected DENSE or 1 to 3"),
            ({"ranks": [1, 2, 3, 6]}, "ranks: expected at most the basis's rank_max=5, got 6"),
        ],
    )
    def test_refuses(self, change, message, rng):
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            ss.SketchPlan(**({"basis": Basis(rng, LAYER), "ranks": RANKS} | change))

    def test_a_rank_is_bounded_by_the_value_dim(self, rng):
        layer = Layer("gdn", 1, 6, 2)
        with pytest.raises(ValueError, match=r"^ranks: expected DENSE or 1 to 2 \(columns, K and V bound it\), got 3"):
            ss.SketchPlan(Basis(rng, layer, rank_max=4), [3])

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_refuses_a_basis_that_is_not_finite(self, bad, rng):
        basis = Basis(rng, LAYER)
        basis.omega = basis.omega.copy()
        basis.omega[1, 2, 0] = bad
        with pytest.raises(ValueError, match=r"^omega: expected finite numbers, got NaN or infinity"):
            ss.SketchPlan(basis, RANKS)

    def test_does_not_share_the_caller_s_ranks(self, rng):
        ranks = RANKS.copy()
        plan = ss.SketchPlan(Basis(rng, LAYER), ranks)
        ranks[:] = 1
        np.testing.assert_array_equal(plan.ranks, RANKS)


class TestRoundTrip:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("name", MAPS)
    def test_bitwise(self, kind, name, rng, tmp_path):
        plan = plan_of(rng, LAYERS[kind], RANKS, map=name, window=7, pivots=2, ridge=1 / 3)
        plan.save(tmp_path / "plan.safetensors")
        same(ss.SketchPlan.load(tmp_path / "plan.safetensors"), plan)

    def test_path_may_be_text(self, plan, tmp_path):
        plan.save(str(tmp_path / "plan.safetensors"))
        same(ss.SketchPlan.load(str(tmp_path / "plan.safetensors")), plan)

    def test_all_heads_dense(self, rng, tmp_path):
        plan = plan_of(rng, LAYER, DENSE)
        plan.save(tmp_path / "plan.safetensors")
        same(ss.SketchPlan.load(tmp_path / "plan.safetensors"), plan)

    def test_any_safetensors_reader_opens_it(self, saved, plan):
        np.testing.assert_array_equal(load_file(saved)["omega"], plan.omega)

    def test_an_existing_file_is_replaced(self, saved, rng):
        other = plan_of(rng, LAYERS["kda"], 2)
        other.save(saved)
        same(ss.SketchPlan.load(saved), other)


class TestBadFiles:
    @pytest.mark.parametrize(
        "tensors",
        [
            {"omega": np.full((4, 6, 3), np.nan, np.float32)},
            {"projection": np.full((4, 6, 3), np.inf, np.float32)},
            {"omega": np.zeros((4, 6), np.float32)},
            {"omega": np.zeros((4, 5, 3), np.float32)},
            {"omega": np.ones((4, 6, 4), np.float32)},
            {"projection": np.ones((4, 6, 2), np.float32)},
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
            ("layer", {"kind": "mamba1"}),
            ("layer", {"heads": 5}),
            ("layer", {"heads": "4"}),
            ("layer", {"key_dim": 7}),
            ("layer", {"key_heads": 3}),
            ("layer", {"value_dim": 2}),
            ("layer", {"colour": "red"}),
            ("window", 1),
            ("window", 10**30),
            ("window", "16"),
            ("map", "best"),
            ("map", {"name": "best"}),
            ("map", {"name": ["prior"]}),
            ("map", {"pivots": 0}),
            ("map", {"ridge": -1.0}),
            ("map", {"ridge": "small"}),
            ("map", {"ridge": None}),
            ("map", {"name": "ridge"}),
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

    def test_a_map_without_all_its_parameters(self, saved):
        fields, tensors = parts_of(saved)
        del fields["map"]["ridge"]
        save_file(saved, FORMAT, tensors, fields)
        with pytest.raises(ss.PlanFileError, match="map: expected all parameters"):
            ss.SketchPlan.load(saved)
