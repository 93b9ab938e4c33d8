"""Plans: what they accept, and files that come back as they were or are refused."""

import json
import os
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from samples import LAYERS, Basis, plan_of

import sketchssm as ss
from sketchssm.coefficients import MAPS, CoefficientMap
from sketchssm.recurrence import DENSE, KINDS, Layer

LAYER = LAYERS["gdn"]  # 4 heads, K = 6, V = 5
RANKS = np.array([3, DENSE, 1, 2])


@pytest.fixture
def plan(rng):
    return plan_of(rng, LAYER, RANKS, window=8, map="prior", pivots=3, ridge=0.02)


@pytest.fixture
def saved(plan, tmp_path):
    """A plan file, and its metadata and tensors to write it again with changes."""
    path = tmp_path / "plan.safetensors"
    plan.save(path)
    return path


def parts(path):
    """Metadata and tensors of a file."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + size])["__metadata__"], load_file(path)


def same(a, b):
    """Whether two plans are the same to the last bit."""
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
            ({"window": 1}, "window: expected an integer of at least 2, got 1"),
            ({"window": 8.0}, "window: expected an integer of at least 2, got 8.0"),
            ({"window": True}, "window: expected an integer of at least 2, got True"),
            ({"ranks": [1, 2, 3]}, "ranks: expected 4 integers, got shape (3,)"),
            ({"ranks": 2}, "ranks: expected 4 integers, got shape ()"),
            ({"ranks": [1.0, 2.0, 3.0, 4.0]}, "ranks: expected 4 integers, got shape (4,) of float64"),
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

    def test_twice_is_once(self, saved, tmp_path):
        again = tmp_path / "again.safetensors"
        ss.SketchPlan.load(saved).save(again)
        meta, tensors = parts(saved)
        meta_again, tensors_again = parts(again)
        assert meta == meta_again
        assert {name: x.tobytes() for name, x in tensors.items()} == {n: x.tobytes() for n, x in tensors_again.items()}

    def test_path_may_be_text(self, plan, tmp_path):
        plan.save(str(tmp_path / "plan.safetensors"))
        same(ss.SketchPlan.load(str(tmp_path / "plan.safetensors")), plan)

    def test_all_heads_dense(self, rng, tmp_path):
        plan = plan_of(rng, LAYER, DENSE)
        plan.save(tmp_path / "plan.safetensors")
        same(ss.SketchPlan.load(tmp_path / "plan.safetensors"), plan)

    def test_any_safetensors_reader_opens_it(self, saved, plan):
        meta, tensors = parts(saved)
        assert (meta["format"], meta["version"]) == ("sketchssm-plan", "1")
        np.testing.assert_array_equal(tensors["omega"], plan.omega)


class TestReplacement:
    def test_an_existing_file_is_replaced(self, saved, rng):
        other = plan_of(rng, LAYERS["kda"], 2)
        other.save(saved)
        same(ss.SketchPlan.load(saved), other)

    @pytest.mark.parametrize("fails", ["fsync", "replace"])
    def test_a_failed_save_leaves_the_old_file_and_no_other(self, fails, saved, plan, rng, monkeypatch):
        def fail(*_):
            raise OSError("disk full")

        monkeypatch.setattr(os, fails, fail)
        with pytest.raises(OSError, match="disk full"):
            plan_of(rng, LAYERS["kda"], 2).save(saved)
        same(ss.SketchPlan.load(saved), plan)
        assert [entry.name for entry in saved.parent.iterdir()] == [saved.name]

    def test_a_reader_of_the_old_file_keeps_it(self, saved, rng):
        with open(saved, "rb") as reader:
            before = saved.read_bytes()
            plan_of(rng, LAYERS["kda"], 2).save(saved)
            assert reader.read() == before

    def test_a_missing_folder_is_the_system_s_error(self, plan, tmp_path):
        with pytest.raises(FileNotFoundError):
            plan.save(tmp_path / "nowhere" / "plan.safetensors")


class TestBadFiles:
    def test_missing(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"nothing\.safetensors"):
            ss.SketchPlan.load(tmp_path / "nothing.safetensors")
        with pytest.raises(FileNotFoundError):
            ss.SketchPlan.load(tmp_path)

    def test_truncated_anywhere(self, saved):
        whole = saved.read_bytes()
        # every byte of the length and the header's start, then samples, and all but the last byte
        for size in (*range(12), *range(12, len(whole), 23), len(whole) - 1):
            saved.write_bytes(whole[:size])
            with pytest.raises(ss.PlanFileError, match=re.escape(str(saved))):
                ss.SketchPlan.load(saved)

    def test_with_bytes_to_spare(self, saved):
        saved.write_bytes(saved.read_bytes() + b"\0")
        with pytest.raises(ss.PlanFileError):
            ss.SketchPlan.load(saved)

    @pytest.mark.parametrize("content", [b"\x93NUMPY" * 100, b"{}", b"\xff" * 64, b"\0" * 64])
    def test_not_safetensors(self, content, tmp_path):
        (tmp_path / "plan").write_bytes(content)
        with pytest.raises(ss.PlanFileError):
            ss.SketchPlan.load(tmp_path / "plan")

    @pytest.mark.parametrize("meta", [None, {"format": "pt"}])
    def test_another_program_s_safetensors(self, meta, tmp_path):
        save_file({"weight": np.zeros(3, np.float32)}, tmp_path / "model.safetensors", metadata=meta)
        with pytest.raises(ss.PlanFileError, match="expected format 'sketchssm-plan', got"):
            ss.SketchPlan.load(tmp_path / "model.safetensors")

    @pytest.mark.parametrize(
        ("version", "message"),
        [("2", "version 2 is newer than this library reads"), ("0", "version"), ("one", "version"), ("²", "version")],
    )
    def test_another_version(self, version, message, saved):
        meta, tensors = parts(saved)
        save_file(tensors, saved, metadata=meta | {"version": version})
        with pytest.raises(ss.PlanFileError, match=message):
            ss.SketchPlan.load(saved)

    @pytest.mark.parametrize("missing", ["omega", "projection", "ranks"])
    def test_missing_tensor(self, missing, saved):
        meta, tensors = parts(saved)
        del tensors[missing]
        save_file(tensors, saved, metadata=meta)
        with pytest.raises(ss.PlanFileError, match=f"tensors missing: {missing}"):
            ss.SketchPlan.load(saved)

    @pytest.mark.parametrize("missing", ["layer", "settings", "version"])
    def test_missing_metadata(self, missing, saved):
        meta, tensors = parts(saved)
        del meta[missing]
        save_file(tensors, saved, metadata=meta)
        with pytest.raises(ss.PlanFileError):
            ss.SketchPlan.load(saved)

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
        meta, good = parts(saved)
        save_file(good | tensors, saved, metadata=meta)
        with pytest.raises(ss.PlanFileError, match=rf"inconsistent.*({'|'.join(good)})"):
            ss.SketchPlan.load(saved)

    @pytest.mark.parametrize(
        ("key", "change"),
        [
            ("layer", {"kind": "mamba1"}),
            ("layer", {"heads": 5}),
            ("layer", {"heads": "4"}),
            ("layer", {"key_dim": 7}),
            ("layer", {"key_heads": 3}),
            ("layer", {"value_dim": 2}),
            ("layer", {"colour": "red"}),
            ("settings", {"window": 1}),
            ("settings", {"window": "16"}),
            ("settings", {"map": "best"}),
            ("settings", {"map": {"name": "best", "pivots": 3, "ridge": 0.02}}),
            ("settings", {"map": {"name": ["prior"], "pivots": 3, "ridge": 0.02}}),
            ("settings", {"map": {"name": "prior", "pivots": 0, "ridge": 0.02}}),
            ("settings", {"map": {"name": "prior", "pivots": 3, "ridge": -1.0}}),
            ("settings", {"map": {"name": "prior", "pivots": 3, "ridge": "small"}}),
            ("settings", {"map": {"name": "prior", "pivots": 3, "ridge": None}}),
            ("settings", {"map": {"name": "prior", "pivots": 3}}),
            ("settings", {"map": {"name": "ridge", "pivots": 3, "ridge": 0.02}}),
        ],
        ids=str,
    )
    def test_contradictory_metadata(self, key, change, saved):
        meta, tensors = parts(saved)
        meta[key] = json.dumps(json.loads(meta[key]) | change)
        save_file(tensors, saved, metadata=meta)
        with pytest.raises(ss.PlanFileError, match="inconsistent"):
            ss.SketchPlan.load(saved)

    @pytest.mark.parametrize("key", ["layer", "settings"])
    @pytest.mark.parametrize("text", ["", "{", "null", "[]", "3", '"gdn"'])
    def test_metadata_that_is_no_object(self, key, text, saved):
        meta, tensors = parts(saved)
        save_file(tensors, saved, metadata=meta | {key: text})
        with pytest.raises(ss.PlanFileError, match="inconsistent"):
            ss.SketchPlan.load(saved)

    def test_is_a_value_error_too(self):
        assert issubclass(ss.PlanFileError, ValueError)
