"""Refreshes: sketches that advance through a window's tokens, and heads that flush once in several windows."""

import re
from itertools import pairwise

import numpy as np
import pytest
from samples import LAYERS, Basis, at, plan_of, relative, states_of, tokens_of
from test_reference_window import prefix, ring_of

import sketchssm as ss
from sketchssm.calibrate.refreshes import refresh_errors
from sketchssm.layer.coefficients import MAPS
from sketchssm.layer.formats import SketchFormat
from sketchssm.layer.recurrence import FULL_STATE, KINDS
from sketchssm.layer.slots import DUE
from sketchssm.reference.maps import coefficient_map
from sketchssm.reference.recurrence import run
from sketchssm.reference.refresh import HeadPlan, refresh, sketch_state, surrogate
from sketchssm.reference.window import decay_between, fold

WINDOW, EVERY = 4, 12

# Float64 on terms of size one; the maps' solves enlarge rounding by up to 1 / RIDGE_FLOOR.
SOLVED = 1e-9
# Sums of float64 in another order.
FLOAT64 = 1e-12


def case(kind, name, rng, rank=3, tokens=WINDOW, harsh=False):
    """How one head is sketched, sketches of its states, the states, and a ring of tokens."""
    layer = LAYERS[kind]
    plan = plan_of(rng, layer, rank, map=name, window=WINDOW)
    _, ring = ring_of(layer, tokens_of(rng, layer, 2, tokens, np.float64, harsh=harsh))
    own = ring.at(np.s_[:, 0])
    state = states_of(rng, layer, 2, np.float64)[:, 0].swapaxes(-1, -2)
    bases = Basis(np.random.default_rng(3), layer).columns(rank, plan.map.weighted)
    omega, projection = (x[0] for x in bases)
    head = HeadPlan(SketchFormat.of("float32"), plan.map, omega, projection)
    return head, sketch_state(head, state), state, own


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MAPS)
class TestAlgebra:
    def test_the_factors_that_kernels_use(self, kind, name, rng):
        """``Y = [U, w]`` and ``X = [R D; l^T]`` give the sketch, the map and the norm."""
        head, sketch, start, ring = case(kind, name, rng)
        _, map, omega, projection, _ = head
        u = start.swapaxes(-1, -2) @ omega
        rows = coefficient_map(map, start, omega, projection)
        if map.storage != "dense":
            rows = projection.T + rows @ (np.eye(6) - omega @ projection.T)
        from_start, between = decay_between(ring.g)
        left = between[..., -1, :, :] * ring.k
        write = ring.v
        if ring.beta is not None:
            keys = from_start * ring.k
            gram = np.einsum("...jsk,...jk->...js", between * ring.k[..., None, :, :], ring.k)
            system = np.eye(WINDOW) + np.tril(ring.beta[..., None] * gram, -1)
            predicted = (keys @ rows.swapaxes(-1, -2)) @ u.swapaxes(-1, -2)
            write = np.linalg.solve(system, ring.beta[..., None] * (ring.v - predicted))
        y = np.concatenate([u, write.swapaxes(-1, -2)], axis=-1)
        x = np.concatenate([rows * from_start[..., -1, None, :], left], axis=-2)
        state = (y @ x).swapaxes(-1, -2)
        new = refresh(head, sketch, ring)
        c = coefficient_map(map, state, omega, projection)
        assert relative(y @ (x @ omega) @ c, new.read) < SOLVED
        if map.storage != "dense":
            assert relative(y @ (x @ omega), new.u) < FLOAT64
        energy = (y.swapaxes(-1, -2) @ y * (x @ x.swapaxes(-1, -2))).sum(axis=(-1, -2))
        assert relative(energy, np.square(state).sum(axis=(-1, -2))) < FLOAT64

    def test_the_surrogate_has_the_sketch(self, kind, name, rng):
        """``S^^T Omega = U``: exactly for the oblique projection, up to the ridge for the dense maps."""
        head, sketch, state, _ = case(kind, name, rng)
        # a direction of share s of the mean diagonal is kept as s / (s + ridge) of itself; these have s > 0.05
        tolerance = 20 * head.map.effective_ridge if head.map.storage == "dense" else SOLVED
        want = state.swapaxes(-1, -2) @ head.omega
        assert relative(surrogate(head, sketch).swapaxes(-1, -2) @ head.omega, want) < tolerance

    def test_the_error_follows_the_transitions(self, kind, name, rng):
        """The surrogate's error after the tokens is ``M (S - S^)``: the tokens add nothing to it."""
        head, sketch, state, ring = case(kind, name, rng, harsh=True)
        away = state - surrogate(head, sketch)
        silent = ring._replace(v=np.zeros_like(ring.v))
        after = fold(state, ring) - fold(surrogate(head, sketch), ring)
        assert np.linalg.norm(after - fold(away, silent)) < FLOAT64 * np.linalg.norm(state)
        assert np.linalg.norm(after) <= np.linalg.norm(away) * (1 + FLOAT64)  # transitions are contractions
        assert np.isfinite(refresh(head, sketch, ring).read).all()

    def test_no_tokens_change_little(self, kind, name, rng):
        """No-op tokens do not change the sketch."""
        head, sketch, _, ring = case(kind, name, rng)
        nothing = type(ring)(*(None if x is None else np.zeros_like(x) for x in ring))
        new = refresh(head, sketch, nothing)
        tolerance = 20 * head.map.effective_ridge if head.map.storage == "dense" else SOLVED
        assert relative(new.u, sketch.u) < tolerance


def test_the_sketch_of_mamba2_stays_exact(rng):
    """``U' = a U + S_buf^T Omega`` whatever the map, in as many refreshes as there are."""
    head, sketch, state, ring = case("mamba2", "lowrank", rng, tokens=5 * WINDOW)
    for first in range(0, 5 * WINDOW, WINDOW):
        sketch = refresh(head, sketch, ring.at(np.s_[..., first : first + WINDOW, :]))
    want = fold(state, prefix(ring, 5 * WINDOW)).swapaxes(-1, -2) @ head.omega
    assert relative(sketch.u, want) < FLOAT64


@pytest.mark.parametrize("kind", KINDS)
def test_a_sketch_of_full_rank_loses_nothing(kind, rng):
    """G = V columns hold a state of rank V, so each refresh adds at most the effect of the ridge on a sketch."""
    layer = LAYERS[kind]
    tokens = tokens_of(rng, layer, 2, 3 * EVERY, np.float64)
    state = rng.standard_normal((2, *layer.state_shape))
    errors = []
    for every in (WINDOW, EVERY):
        plan = plan_of(np.random.default_rng(1), layer, 5, map="exact", window=WINDOW, flush_every=every)
        head = ss.SketchHead(plan, 2, "reference")
        head.load_state(state)
        errors.append(relative(head.step(*tokens), run(layer, *tokens, state=state)[0]))
    assert errors[1] < EVERY // WINDOW * errors[0] < 0.1


def head_of(rng, kind, backend="reference", slots=3, **settings):
    plan = plan_of(rng, LAYERS[kind], [1, 2, 3, 4], window=WINDOW, flush_every=EVERY, ridge=0.01)
    return ss.SketchHead(plan, slots, backend, **settings)


@pytest.mark.parametrize("kind", KINDS)
class TestHead:
    def test_the_state_is_exact(self, kind, rng):
        """The state at each flush is the fold of the raw tokens: bitwise that of a head with other ranks and map."""
        head = head_of(rng, kind)
        layer = head.layer
        other = plan_of(rng, layer, 2, map="offline", window=WINDOW, flush_every=EVERY)
        twin = ss.SketchHead(other, 3, "reference")
        tokens, start = tokens_of(rng, layer, 3, 30, np.float64, harsh=True), states_of(rng, layer, 3, np.float64)
        for each in (head, twin):
            each.load_state(start)
        for first, stop in pairwise([0, 11, 12, 23, 24, 30]):
            done = stop // EVERY * EVERY
            for each in (head, twin):
                each.step(*at(tokens, np.s_[:, first:stop]))
            np.testing.assert_array_equal(head.state, twin.state)
            np.testing.assert_array_equal(head.position, stop - done)
            want = run(layer, *at(tokens, np.s_[:, :done]), state=start)[1]
            assert np.linalg.norm(head.state - want) < FLOAT64 * np.linalg.norm(start)
        head.flush()
        want = run(layer, *tokens, state=start)[1]
        assert np.linalg.norm(head.state - want) < FLOAT64 * np.linalg.norm(start)

    def test_windows_read_the_refreshed_sketch(self, kind, rng):
        """A window's outputs are those of a head that begins there, on the surrogate that the refresh has made."""
        head = head_of(rng, kind, slots=1)
        layer, plan = head.layer, head.plan
        tokens = tokens_of(rng, layer, 1, EVERY, np.float64)
        start = states_of(rng, layer, 1, np.float64)
        head.load_state(start)
        outputs = head.step(*tokens)
        _, ring = ring_of(layer, tokens)
        for number in range(layer.heads):
            rank = plan.ranks[number]
            bases = [x[number, :, :rank].astype(np.float64) for x in (plan.omega, plan.projection)]
            own = ring.at(np.s_[0, number])
            own_plan = HeadPlan(SketchFormat.of("float32"), plan.map, *bases)
            sketch = sketch_state(own_plan, start[0, number].T)
            state = start[0].copy()
            for first in range(0, EVERY, WINDOW):
                state[number] = sketch.read
                twin = run(layer, *at(tokens, np.s_[:, first : first + WINDOW]), state=state[None])[0]
                last = WINDOW - (first + WINDOW == EVERY)  # the flush reads the exact state
                got = outputs[0, first : first + last, number]
                assert relative(got, twin[0, :last, number]) < SOLVED
                sketch = refresh(own_plan, sketch, own.at(np.s_[first : first + WINDOW]))
        exact = run(layer, *tokens, state=start)[0]
        assert relative(outputs[:, -1], exact[:, -1]) < FLOAT64

    def test_one_window_is_no_refresh(self, kind, rng):
        """``flush_every`` of one window is the plan without it."""
        given = [{}, {"flush_every": WINDOW}]
        plans = [plan_of(np.random.default_rng(1), LAYERS[kind], 2, window=WINDOW, **x) for x in given]
        assert plans[0].fingerprint == plans[1].fingerprint
        tokens = tokens_of(rng, LAYERS[kind], 2, 9)
        np.testing.assert_array_equal(*(ss.SketchHead(plan, 2, "reference").step(*tokens) for plan in plans))

    def test_drafts(self, kind, rng):
        """Outputs of drafts are those of the same tokens; rejected drafts leave no trace, at any position."""
        head, layer = head_of(rng, kind), LAYERS[kind]
        twin = ss.SketchHead(head.plan, 3, "reference")
        assert head.drafts == WINDOW - 1
        start = states_of(rng, layer, 3, np.float64)
        kept = [[] for _ in range(3)]
        for each in (head, twin):
            each.load_state(start)
        for _ in range(25):
            tokens = tokens_of(rng, layer, 3, 3, np.float64)
            lengths = rng.integers(0, 4, 3)
            outputs = head.step(*tokens, draft=True, lengths=lengths)
            accepted = np.array([rng.integers(0, n + 1) for n in lengths])
            # the same tokens behind other drafts, all of which are kept
            alone = twin.step(*tokens, draft=True, lengths=lengths)
            np.testing.assert_array_equal(outputs, alone)
            for each in (head, twin):
                each.commit(accepted)
            other = tokens_of(rng, layer, 3, 1, np.float64)
            head.step(*other, draft=True)  # dropped by the next draft, but for a window or flush before it
            head.commit(np.zeros(3, int))
            twin.step(*other, draft=True)
            twin.commit(np.zeros(3, int))
            for row in range(3):
                kept[row].append(at(tokens, np.s_[row : row + 1, : accepted[row]]))
        head.flush()
        for row, parts in enumerate(kept):
            joined = [None if x[0] is None else np.concatenate(x, axis=1) for x in zip(*parts, strict=True)]
            want = run(layer, *joined, state=start[row : row + 1])[1]
            assert np.linalg.norm(head.state[row] - want[0]) < FLOAT64 * np.linalg.norm(start[row])

    def test_a_draft_without_room_begins_at_the_next_window(self, kind, rng):
        """The gap is filled with no-op tokens; at the end of the ring the slot flushes instead."""
        head, layer = head_of(rng, kind, slots=1), LAYERS[kind]
        tokens = tokens_of(rng, layer, 1, 6, np.float64)
        start = states_of(rng, layer, 1, np.float64)
        head.load_state(start)
        head.step(*at(tokens, np.s_[:, :2]))
        head.step(*at(tokens, np.s_[:, 2:4]), draft=True)
        assert head.position == 4
        head.commit([2])
        assert head.position == 6
        head.step(*at(tokens, np.s_[:, 4:5]))
        np.testing.assert_array_equal(head.state[0], start[0])
        head.step(*at(tokens, np.s_[:, 5:6]), draft=True)
        assert head.position == 8
        head.commit([1])
        head.flush()
        want = run(layer, *tokens, state=start)[1]
        assert np.linalg.norm(head.state - want) < FLOAT64 * np.linalg.norm(start)

    def test_the_clock(self, kind, rng):
        """All rows flush at the strokes, once in `EVERY` steps; refreshes follow the rows' own positions."""
        head, layer = head_of(rng, kind, phase=5), LAYERS[kind]
        positions = []
        for step in range(26):
            slots = [0, 2] if step < 3 else [0, 1, 2]
            head.step(*tokens_of(rng, layer, len(slots), 1, np.float64), slots=slots)
            positions.append(head.position)
        assert (np.array(positions)[[6, 18]] == 0).all()
        assert (np.array(positions)[17] == 11).all()
        assert (np.array(positions)[5] == [6, 3, 6]).all()

    def test_copies_and_snapshots(self, kind, rng, tmp_path):
        """A slot's memory determines its later outputs, also in the middle of a ring."""
        head, layer = head_of(rng, kind), LAYERS[kind]
        head.load_state(states_of(rng, layer, 3, np.float64))
        head.step(*tokens_of(rng, layer, 3, 7, np.float64))
        head.copy([0], [1])
        snapshot = head.snapshot([0])
        snapshot.save(tmp_path / "slot")
        other = ss.SketchHead(head.plan, 2, "reference")
        other.restore(ss.Snapshot.load(tmp_path / "slot"), [1])
        tokens = tokens_of(rng, layer, 1, 20, np.float64)
        want = head.step(*tokens, slots=[0])
        np.testing.assert_array_equal(head.step(*tokens, slots=[1]), want)
        np.testing.assert_array_equal(other.step(*tokens, slots=[1]), want)
        assert snapshot.arrays["cursor"][0] == 7

    def test_adopt_and_reset(self, kind, rng):
        """Loading, adopting and resetting drop the ring, the refreshed sketch included."""
        head, layer = head_of(rng, kind), LAYERS[kind]
        fresh = ss.SketchHead(head.plan, 3, "reference")
        head.load_state(states_of(rng, layer, 3, np.float64))
        head.step(*tokens_of(rng, layer, 3, 7, np.float64))
        head.reset([0])
        head.adopt([1])
        fresh.load_state(head.state)
        tokens = tokens_of(rng, layer, 3, 9, np.float64)
        np.testing.assert_array_equal(head.step(*tokens)[:2], fresh.step(*tokens)[:2])


class TestPlan:
    @pytest.mark.parametrize("wrong", [0, 3, 6, 132, 4.0, True, "8", -4])
    def test_refuses(self, wrong, rng):
        message = f"flush_every: expected a multiple of the window (4) up to 128 or None, got {wrong!r}"
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            plan_of(rng, LAYERS["gdn"], 2, window=4, flush_every=wrong)

    def test_refuses_heads_that_read_their_state(self, rng):
        with pytest.raises(ValueError, match=r"^flush_every: expected .* \(4\), as head 1 reads its full state"):
            plan_of(rng, LAYERS["gdn"], [2, FULL_STATE, 2, FULL_STATE], window=4, flush_every=8)

    def test_file_and_shard(self, rng, tmp_path):
        plan = plan_of(rng, LAYERS["gdn"], 2, window=4, flush_every=128)
        plan.save(tmp_path / "plan")
        assert ss.SketchPlan.load(tmp_path / "plan").flush_every == plan.shard(0, 2).flush_every == 128
        assert "window=4, flush_every=128" in repr(plan)

    def test_the_phase_is_a_position_of_the_ring(self, rng):
        with pytest.raises(ValueError, match=r"^phase: expected an integer from 0 to 11 or None, got 12"):
            head_of(rng, "gdn", phase=12)
        assert head_of(rng, "gdn", phase=11)._engine.memory["cursor"][0] == DUE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "form"), [("ridge", "int8"), ("ridge", "int8+int4"), ("lowrank", "fp8")])
def test_sketches_in_few_bits(kind, name, form, rng):
    """Refreshed sketches are coded again at each refresh: errors grow by one rounding a refresh, states stay exact."""
    layer = LAYERS[kind]
    wide = {"wide": [2] * 4} if form == "int8+int4" else {}
    tokens, start = tokens_of(rng, layer, 2, 2 * EVERY, np.float64), states_of(rng, layer, 2, np.float64)
    outputs, states = [], []
    for dtype, more in (("float32", {}), (form, wide)):
        plan = plan_of(
            np.random.default_rng(1), layer, 3, map=name, window=WINDOW, flush_every=EVERY, sketch_dtype=dtype, **more
        )
        head = ss.SketchHead(plan, 2, "reference")
        head.load_state(start)
        outputs.append(head.step(*tokens))
        states.append(head.state)
    np.testing.assert_array_equal(*states)
    assert 0 < relative(outputs[1], outputs[0]) < (0.3 if form == "int8+int4" else 0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_errors_on_traces_are_those_of_the_head(kind, rng):
    """`refresh_errors` decodes window by window; the reference head decodes token by token."""
    layer = LAYERS[kind]
    tokens = tokens_of(rng, layer, 2, 2 * EVERY, np.float64)
    want = run(layer, *tokens)[0]
    plans = [plan_of(np.random.default_rng(1), layer, [1, 2, 3, 4], window=WINDOW, flush_every=x) for x in (4, EVERY)]
    measured = refresh_errors(plans[1], *tokens)
    for plan, whole, each in zip(plans, measured[:2], measured[2:], strict=True):
        away = np.square(ss.SketchHead(plan, 2, "reference").step(*tokens) - want).sum(axis=(0, 1, 3))
        size = np.square(want).sum(axis=(0, 1, 3))
        np.testing.assert_allclose(each, np.sqrt(away / size), rtol=1e-6)
        np.testing.assert_allclose(whole, np.sqrt(away.sum() / size.sum()), rtol=1e-6)
    assert measured.refreshed > measured.flushed


def test_no_whole_window(rng):
    layer = LAYERS["gdn"]
    with pytest.raises(ValueError, match=r"^v: expected at least one window of 4 tokens, got 3"):
        refresh_errors(plan_of(rng, layer, 2, window=4), *tokens_of(rng, layer, 1, 3))
