"""Snapshots of slots, as arrays and as files."""

import json
import re

import numpy as np
import pytest
from decode_systems import head_of
from safetensors import safe_open
from samples import gate_of, parts_of, plan_of, raw_of, refused, same, states_of, tokens_of

import sketchssm as ss
from sketchssm.heads.snapshot import FORMAT
from sketchssm.layer.recurrence import FULL_STATE
from sketchssm.plans.files import save_file

WINDOW = 4
RANKS = np.array([FULL_STATE, 2, 3, 1])
SYSTEMS = ("standard", "drafts", "replay", "sketch", "codes")


@pytest.fixture(params=SYSTEMS)
def make(request, backend, layer):
    """A function that makes equal heads of five slots."""
    kind = "int8" if request.param == "codes" else "bfloat16"
    plan = plan_of(np.random.default_rng(7), layer, RANKS, window=WINDOW, sketch_dtype=kind)
    system, options = {"drafts": ("standard", {"drafts": 3}), "codes": ("sketch", {})}.get(
        request.param, (request.param, {})
    )
    return lambda **more: head_of(system, plan, 5, backend, **(options | more))


def busy(head, layer, rng):
    """Load states, and decode so that slot i is at window position i."""
    head.load_state(states_of(rng, layer, 5))
    for slot in range(1, WINDOW):
        head.step(*tokens_of(rng, layer, 1, slot), slots=[slot])
    return head


@pytest.mark.parametrize(("state_dtype", "through_file"), [("float32", True), ("bfloat16", True), ("float16", False)])
def test_a_half_full_window_survives(make, layer, state_dtype, through_file, tmp_path, rng):
    """The restored slots, in another head and in another order, decode bitwise as the slots they were taken from."""
    head, other = busy(make(state_dtype=state_dtype), layer, rng), make(state_dtype=state_dtype)
    other.step(*tokens_of(rng, layer, 5, 3))
    snapshot = head.snapshot([3, 1, 0])
    if through_file:
        snapshot.save(tmp_path / "slots.safetensors")
        snapshot = ss.Snapshot.load(tmp_path / "slots.safetensors")
    assert len(snapshot) == 3
    assert list(snapshot.arrays) == [part.name for part in head.parts]
    other.restore(snapshot, [0, -1, 4])
    np.testing.assert_array_equal(other.position[[0, 4]], head.position[[3, 0]])
    tokens = tokens_of(rng, layer, 2, 2 * WINDOW + 1)
    np.testing.assert_array_equal(other.step(*tokens, slots=[0, 4]), head.step(*tokens, slots=[3, 0]))
    np.testing.assert_array_equal(other.state[[0, 4]], head.state[[3, 0]])


class TestRefusals:
    @pytest.fixture
    def snapshot(self, layer, rng):
        plan = plan_of(np.random.default_rng(7), layer, RANKS, window=WINDOW)
        return busy(ss.SketchHead(plan, 5, "reference"), layer, rng).snapshot([1, 2])

    def test_another_owner(self, layer, snapshot):
        """The message names what differs first, and the head is as it was."""
        rng = np.random.default_rng(7)
        plan = plan_of(rng, layer, RANKS, window=WINDOW)
        changed = ss.SketchPlan.__new__(ss.SketchPlan)
        tensors = {"omega": plan.omega * 2, "ranks": plan.ranks}
        changed._fill(layer, tensors, WINDOW, plan.map, plan.sketch_dtype, 0)
        for head, message in (
            (ss.ReplayHead(layer, 5, "reference", window=WINDOW), 'system "ReplayHead", got "SketchHead"'),
            (ss.SketchHead(plan_of(rng, layer, RANKS, window=8), 5, "reference"), "window 8, got 4"),
            (ss.SketchHead(changed, 5, "reference"), f'plan "{changed.fingerprint}", got "{plan.fingerprint}"'),
            (ss.SketchHead(plan, 5, "reference", state_dtype="float16"), 'state_dtype "float16", got "float32"'),
            (ss.SketchHead(plan, 5, "reference", sketch_dtype="int8"), 'sketch_dtype "int8", got "bfloat16"'),
        ):
            before = head.snapshot()
            with pytest.raises(ValueError, match=re.escape(f"snapshot: expected {message}")):
                head.restore(snapshot, [0, 1])
            for name, array in head.snapshot().arrays.items():
                np.testing.assert_array_equal(array, before.arrays[name])

    def test_another_monitor(self, layer, rng):
        """Samples are counted by their monitor."""
        plan = plan_of(np.random.default_rng(7), layer, RANKS, window=WINDOW)
        two, three, none = (ss.SketchHead(plan, 5, "reference", monitor=monitor) for monitor in (2, 3, 0))
        snapshot = busy(two, layer, rng).snapshot()
        refused("snapshot: expected monitor 3, got 2$", three.restore, snapshot)
        refused(r"snapshot: expected parts, of those that differ, \[\], got .*errors", none.restore, snapshot)

    def test_another_layer(self, layer, snapshot, rng):
        wide = ss.Layer(layer.kind, layer.heads, layer.key_dim, layer.value_dim + 1, layer.key_heads)
        head = ss.SketchHead(plan_of(rng, wide, RANKS, window=WINDOW), 5, "reference")
        refused("snapshot: expected layer", head.restore, snapshot)

    @pytest.mark.parametrize("layer", ["kda"], indirect=True)
    def test_another_gate(self, layer, rng):
        gates = [gate_of(np.random.default_rng(1), layer) for _ in range(2)]
        gates.append(ss.GateInput(gates[0].A_log, gates[0].dt_bias + 1))
        first, second, third = (ss.StandardHead(layer, 2, "reference", gate=gate) for gate in gates)
        tokens = tokens_of(rng, layer, 2, 3)._replace(g=raw_of(rng, layer, 2, 3))
        first.step(*tokens)
        second.restore(first.snapshot())
        same(first, second)
        refused("snapshot: expected gate", third.restore, first.snapshot())

    @pytest.mark.parametrize(
        ("name", "value", "good"),
        [("flush_every", 8, WINDOW), ("deferred", True, False), ("sketch_dtype", "fp8", "int8")],
    )
    def test_heads_with_settings_that_are_gone(self, name, value, good, snapshot, tmp_path):
        """Files of such heads are refused by name; files with the settings that every head had load."""
        path = tmp_path / "slots.safetensors"
        for own in (good, value):
            ss.Snapshot(snapshot.arrays, snapshot.owner | {name: own}).save(path)
            if own == good:
                ss.Snapshot.load(path)
        with pytest.raises(ss.SnapshotFileError, match=f"{name}: this version does not have {value!r}; take a"):
            ss.Snapshot.load(path)

    def test_a_head_knows_the_plan_that_it_was_made_of(self, layer):
        """Changes of the plan object afterwards change neither the head nor what its snapshots belong to."""
        plan = plan_of(np.random.default_rng(7), layer, RANKS, window=WINDOW)
        head = ss.SketchHead(plan, 2, "reference")
        snapshot = head.snapshot()
        plan.omega[...] *= 2
        head.restore(snapshot)
        assert snapshot.owner["plan"] != plan.fingerprint

    def test_arguments(self, layer, snapshot):
        head = ss.SketchHead(plan_of(np.random.default_rng(7), layer, RANKS, window=WINDOW), 5, "reference")
        refused("snapshot: expected a Snapshot, got dict", head.restore, {})
        for slots, message in (([0], "expected shape (2,), got (1,)"), ([1, 1], "expected each slot at most once")):
            with pytest.raises(ValueError, match=re.escape(f"slots: {message}")):
                head.restore(snapshot, slots)
        refused(r"slots: expected 0 to 4, got -1 \(padding\)", head.snapshot, [0, -1])
        snapshot.arrays["cursor"][0] = WINDOW
        refused("cursor: expected positions from 0 to 3, got 4", head.restore, snapshot)


class TestFiles:
    @pytest.fixture
    def path(self, layer, tmp_path, rng):
        plan = plan_of(np.random.default_rng(7), layer, RANKS, window=WINDOW)
        path = tmp_path / "slots.safetensors"
        busy(ss.SketchHead(plan, 5, "reference"), layer, rng).snapshot([1, 2]).save(path)
        return path

    def test_contradictions(self, path):
        """Files with a right checksum whose contents do not fit each other."""
        fields, tensors = parts_of(path)
        owner = fields["owner"]
        for change, other, message in (
            ({"state": tensors["state"][:1]}, {}, "keys: expected float64 of shape (1, 2, 4, 6)"),
            ({"state": tensors["state"].astype(np.float32)}, {}, "state: expected float64 of shape"),
            ({"cursor": tensors["cursor"] + WINDOW}, {}, "cursor: expected positions from 0 to 3"),
            ({"more": np.zeros(2)}, {}, "expected the tensors state, keys"),
            ({}, {"parts": owner["parts"][1:]}, "expected the tensors keys"),
            ({}, {"parts": 5}, "owner: expected parts of type <class 'list'>, got 5"),
            ({}, {"backend": None}, "owner: expected backend of type <class 'str'>, got None"),
            ({}, {"window": "4"}, "owner: expected window of type <class 'int'>, got '4'"),
        ):
            save_file(path, FORMAT, tensors | change, {"owner": owner | other})
            with pytest.raises(ss.SnapshotFileError, match=re.escape(message)):
                ss.Snapshot.load(path)
        for name in owner.keys() - {"sketch_dtype"}:
            save_file(path, FORMAT, tensors, {"owner": {key: value for key, value in owner.items() if key != name}})
            with pytest.raises(ss.SnapshotFileError, match=f"owner: expected {name} of type"):
                ss.Snapshot.load(path)


def test_a_plan_s_fingerprint(layer, tmp_path):
    """It is the file's checksum, and changes with anything in the plan."""
    plan = plan_of(np.random.default_rng(7), layer, RANKS)
    plan.save(tmp_path / "plan")
    with safe_open(tmp_path / "plan", "np") as file:
        assert json.loads(file.metadata()["sketchssm"])["sha256"] == plan.fingerprint
    others = [
        plan_of(np.random.default_rng(8), layer, RANKS),
        plan_of(np.random.default_rng(7), layer, [1, 2, 3, 1]),
        plan_of(np.random.default_rng(7), layer, RANKS, window=8),
        plan_of(np.random.default_rng(7), layer, RANKS, map="lowrank"),
        *(plan_of(np.random.default_rng(7), layer, RANKS, sketch_dtype=form) for form in ("int8", "float32")),
    ]
    assert len({plan.fingerprint, *(other.fingerprint for other in others)}) == 7
    assert plan_of(np.random.default_rng(7), layer, RANKS).fingerprint == plan.fingerprint
