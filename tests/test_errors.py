"""Monitors: the error that a head measures at its flush tokens, on the backends of any host."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger import Ledger
from samples import LAYERS, one_block, plan_of, refused, states_of, tokens_of

import sketchssm as ss
from sketchssm.layer.recurrence import FULL_STATE
from sketchssm.layer.slots import LEAST_SAMPLES
from sketchssm.reference.recurrence import per_head
from sketchssm.serving.errors import ErrorLog

WINDOW, SLOTS = 4, 3
RANKS = [FULL_STATE, 2, 3, 1]
FORMS = {
    "ridge": {},
    "lowrank": {"map": "lowrank", "pivots": 2},
    "residual": {"map": "subspace", "residual_bits": [0, 1, 2, 3]},
}
TOLERANCE = {"reference": 1e-12, "cpu": 3e-6}
"""Of outputs, relative to the largest: some ten tokens of a hundred operations, whose roundings add up like a random
walk."""


def ledger_of(layer, backend, form="ridge", monitor=1, **options):
    plan = plan_of(np.random.default_rng(5), layer, RANKS, window=WINDOW, **FORMS[form])
    head = ss.SketchHead(plan, SLOTS, backend, sketch_dtype="float32", monitor=monitor, **options)
    return Ledger(head, SLOTS)


@pytest.mark.parametrize("form", FORMS)
def test_errors_of_reads_at_flush_tokens(backend, layer, form, rng):
    """From loaded states, with several key heads, and a head whose state is read in full."""
    ledger = ledger_of(layer, backend, form)
    ledger.head.load_state(states_of(rng, layer, SLOTS))
    ledger.step(tokens_of(rng, layer, SLOTS, 3 * WINDOW), [2, 0, 1])
    ledger.check(TOLERANCE[backend])
    found = ledger.head.errors()
    assert (found.samples == 3).all()
    assert (found.error[:, 1:] > 0).all()
    assert found.relative == pytest.approx(found.error.sum() / found.energy.sum())
    if backend == "cpu":
        assert (found.error[:, 0] == 0).all()


OPERATIONS = st.one_of(
    st.tuples(st.just("step"), st.permutations(range(SLOTS)), st.integers(1, 6 * WINDOW)),
    st.tuples(st.just("draft"), st.permutations(range(SLOTS)), st.integers(1, WINDOW - 1)),
    *(
        st.tuples(st.just(name), st.permutations(range(SLOTS)), st.integers(1, SLOTS))
        for name in ("flush", "reset", "load_state", "adopt", "copy", "snapshot", "take")
    ),
)


@settings(max_examples=15)
@given(
    kind=st.sampled_from(list(LAYERS)),
    operations=st.lists(OPERATIONS, min_size=3, max_size=8),
    phase=st.sampled_from([None, 1]),
    monitor=st.integers(1, 3),
    tolerance=st.sampled_from([None, 1e-2, 1e-6]),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_any_sequence_of_calls(backend, kind, operations, phase, monitor, tolerance, seed):
    """Requests carry their sums, and exact reads if they are above the tolerance: through copies and snapshots, until
    the slot's next one.
    """
    layer, rng = LAYERS[kind], np.random.default_rng(seed)
    ledger = ledger_of(layer, backend, monitor=monitor, tolerance=tolerance, phase=phase)
    for name, slots, count in operations:
        call(ledger, rng, name, slots, count)
        ledger.check(TOLERANCE[backend])


def call(ledger, rng, name, slots, count):
    """Make one call of a head, and note it in its ledger."""
    head, layer, some = ledger.head, ledger.head.layer, slots[:count]
    if name == "step":
        ledger.step(tokens_of(rng, layer, 2, count), slots[:2])
    elif name == "draft":
        tokens = tokens_of(rng, layer, 2, count)
        head.step(*tokens, slots=slots[:2], draft=True)
        for slot in slots[:2]:
            if not head.position[slot]:
                ledger.rings[slot] = []
        head.commit([0, 1], slots[:2])
        ledger.rings[slots[1]].append(per_head(layer, tokens.at((1, 0))))
    elif name == "flush":
        head.flush(some)
        for slot in some:
            ledger.rings[slot] = []
    elif name == "copy":
        head.copy(slots[:1], slots[1:2])
        ledger.copy(slots[:1], slots[1:2])
    elif name == "snapshot":
        head.restore(head.snapshot(slots[:1]), slots[1:2])
        ledger.copy(slots[:1], slots[1:2])
    elif name == "take":
        head.errors(some, reset=True)
        ledger.sums[some], ledger.flushes[some] = 0, 0
    else:
        states = (states_of(rng, layer, count),) if name == "load_state" else ()
        getattr(head, name)(*states, some)
        ledger.clear(some)


def test_exact_reads_go_on_through_all_calls(backend, layer, rng):
    """Kept drafts, flushes, copies and snapshots in between; the last three calls end them."""
    go_on_exactly(ledger_of(layer, backend, tolerance=1e-9, phase=1), rng, TOLERANCE[backend])


def go_on_exactly(ledger, rng, tolerance):
    """Call a head, whose tolerance is below its errors, in all ways."""
    some = [0, 1, 2]
    call(ledger, rng, "step", some, LEAST_SAMPLES * ledger.head.monitor * ledger.head.window + 2)
    assert ledger.exact[:3].tolist() == [True, True, False]
    for name in ("draft", "step", "draft", "draft", "flush", "step", "take", "draft", "copy", "snapshot", "step"):
        call(ledger, rng, name, some, 2)
        ledger.check(tolerance)
    assert ledger.exact[:2].all()
    for name, slot in (("adopt", 0), ("load_state", 1), ("copy", 2), ("reset", 0), ("reset", 2)):
        call(ledger, rng, name, [slot, (slot + 2) % 3], 1)
        ledger.check(tolerance)
    assert not ledger.exact.any()


@pytest.mark.parametrize("form", FORMS)
def test_requests_above_a_tolerance_continue_exactly(backend, layer, form, rng):
    tokens, states = tokens_of(rng, layer, 2, 9 * WINDOW), states_of(rng, layer, 2)
    tokens.g[...] *= 0.1
    continue_exactly(lambda **own: ledger_of(layer, backend, form, **own).head, tokens, states, 3 * TOLERANCE[backend])


def continue_exactly(head_of, tokens, states, tolerance):
    """Decode two requests with a tolerance that one of them exceeds at the first comparison.

    Outputs before, and those of the other one, are those of a head without a tolerance; those after are exact.
    """

    def decoded(head, given):
        head.load_state(states, [2, 1])
        return head.step(*given, slots=[2, 1])

    watched = head_of()
    change = LEAST_SAMPLES * watched.monitor * watched.window - (watched.monitor - 1) * watched.window
    decoded(watched, tokens.at(np.s_[:, :change]))
    sums = watched.errors([2, 1])
    errors = sums.error.sum(1) / sums.energy.sum(1)
    over, under = np.argsort(-errors)
    exact = decoded(ss.StandardHead(watched.layer, 3, "reference"), tokens)
    sketched, most = decoded(watched, tokens), abs(exact).max()
    head = head_of(tolerance=errors[over] * (1 - 1e-6))
    out, found = decoded(head, tokens), head.errors([2, 1])
    assert found.exact[over] and found.samples[over] == LEAST_SAMPLES
    np.testing.assert_array_equal(found.error[over], sums.error[over])
    np.testing.assert_array_equal(out[over, :change], sketched[over, :change])
    np.testing.assert_allclose(out[over, change:], exact[over, change:], rtol=0, atol=tolerance * most)
    assert abs(sketched - exact)[over, change:].max() > max(10 * tolerance, 1e-3) * most
    before = change if found.exact[under] else None
    np.testing.assert_array_equal(out[under, :before], sketched[under, :before])


def test_heads_without_a_tolerance_drop_exact_reads(backend, layer, rng):
    head = ledger_of(layer, backend, tolerance=1e-9).head
    head.step(*tokens_of(rng, layer, 2, LEAST_SAMPLES * WINDOW))
    other, snapshot = ledger_of(layer, backend).head, head.snapshot([1])
    for restored in (head, other):
        restored.restore(snapshot, [2])
    assert head.errors([2]).exact.all() and not other.errors().exact.any()
    assert not other.snapshot().arrays["cursor"].any()


def test_memory_of_the_caller(backend, layer, rng):
    """Sums are part of a slot; whatever a pool holds at first is no error."""
    plan = ledger_of(layer, backend).plan
    parts = ss.SketchHead.parts_of(plan, backend, sketch_dtype="float32", monitor=2)
    block, memory = one_block(parts, SLOTS)
    block[...] = 0xFF  # NaN
    ledger = ledger_of(layer, backend, monitor=2, memory=memory)
    assert (ledger.head.errors().samples == 0).all()
    ledger.head.reset()
    ledger.step(tokens_of(rng, layer, 2, 3 * WINDOW), [1, 2])
    ledger.check(TOLERANCE[backend], [1, 2])
    assert memory["errors"][1].any()
    assert "errors" not in {part.name for part in ss.SketchHead.parts_of(plan, backend)}


def test_outputs_are_those_without_a_monitor(backend, layer, rng):
    heads = [ledger_of(layer, backend, monitor=monitor).head for monitor in (0, 2)]
    tokens = tokens_of(rng, layer, SLOTS, 3 * WINDOW)
    np.testing.assert_array_equal(*(head.step(*tokens) for head in heads))


def test_nan_stays_in_its_slot_until_the_next_request(backend, layer, rng):
    ledger = ledger_of(layer, backend)
    tokens = tokens_of(rng, layer, 2, WINDOW)
    tokens.v[0, 1] = np.nan
    with np.errstate(invalid="ignore"):
        ledger.head.step(*tokens)
    assert np.isnan(ledger.head.errors([0]).relative)
    assert np.isfinite(ledger.head.errors([1]).relative)
    ledger.head.reset([0])
    ledger.clear([0, 1])
    ledger.head.errors([1], reset=True)
    ledger.step(tokens_of(rng, layer, 1, WINDOW), [0])
    ledger.check(TOLERANCE[backend], [0])


def test_refusals(layer):
    plan = ledger_of(layer, "reference").plan
    for monitor in (-1, 1.5, True, None):
        refused("monitor: expected an integer from 0 to", ss.SketchHead, plan, 1, "reference", monitor=monitor)
    for tolerance in (0, -1.0, np.nan, np.inf, True, "1"):
        refused("tolerance: expected a finite number above 0, or None, got", ss.SketchHead, plan, 1, "reference",
                monitor=1, tolerance=tolerance)  # fmt: skip
    refused("tolerance: expected None without a monitor", ss.SketchHead, plan, 1, "reference", tolerance=0.1)
    refused("monitor: expected a head with monitor=1 or more, got", ss.SketchHead(plan, 1, "reference").errors)
    head = ss.SketchHead(plan, 2, "reference", monitor=1)
    assert np.isnan(head.errors().relative)
    refused(r"slots: expected 0 to 1, got -1 \(padding\)", head.errors, [-1])
    refused("reset: expected", head.errors, reset=1)


def test_lines_of_an_engines_log(layer, rng, monkeypatch):
    """Once a minute; of all requests together, and of the one with the largest error. Gauges have the same numbers."""
    now, lines, shown = [100.0], [], []
    monkeypatch.setattr("sketchssm.serving.errors.monotonic", lambda: now[0])
    log, head = ErrorLog(lines.append, lambda *own: shown.append(own)), ledger_of(layer, "reference").head
    head.load_state(states_of(rng, layer, SLOTS))
    log.write({"layers.0": head}, [0, 1])
    assert not lines  # no sample
    assert not log.due
    head.step(*tokens_of(rng, layer, 2, 2 * WINDOW))
    now[0] += 61
    assert [log.due, log.due] == [True, False]
    log.write({"layers.0": head, "layers.1": head}, [0, 1])
    most = max(head.errors([slot]).relative for slot in (0, 1))
    each = f"{head.errors([0, 1]).relative:.1e} ({most:.1e})"
    assert len(lines) == 1 and lines[0].endswith(f": layers.0 {each}, layers.1 {each}")
    assert shown == [(name, head.errors([0, 1]).relative, pytest.approx(most), 0) for name in ("layers.0", "layers.1")]
    bounded = ledger_of(layer, "reference", tolerance=1e-9).head
    bounded.step(*tokens_of(rng, layer, 2, LEAST_SAMPLES * WINDOW))
    log.write({"layers.0": bounded}, [0, 1, 2])
    assert lines[1].endswith(", 2 exact)") and shown[2][3] == 2
