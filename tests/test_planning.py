"""The search for plans against its definitions, on small random traces."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import refused
from test_cli import invoke
from test_traces import write_traces

from sketchssm.calibrate.allocation import allocate_ranks
from sketchssm.calibrate.joint_allocation import allocate_joint
from sketchssm.calibrate.plans import calibrate
from sketchssm.calibrate.traces import Traces
from sketchssm.heads.sketch import SketchHead
from sketchssm.layer.recurrence import Layer
from sketchssm.plans.plan import SketchPlan
from sketchssm.reference.recurrence import run
from sketchssm.study.planning import Candidate, StepTimes, autoplan, candidates
from sketchssm.study.planning.search import PlanPoint, frontier

WINDOW = 8
JOINT = Candidate("subspace", "int8", WINDOW, residual_bits=(3, 1))
TRIED = [*candidates(("ridge", "lowrank"), ("bfloat16",), (WINDOW, 2 * WINDOW)), JOINT]
RANKS, REDUCTIONS = (1, 2, 4), (3.2, 4)  # beyond 2.9, that of full reads in every head
SETTINGS = {"candidates": TRIED, "mean_ranks": RANKS, "reductions": (*REDUCTIONS, 99), "backend": "reference"}
BUDGETS = [(c, budget) for c in TRIED for budget in (REDUCTIONS if c is JOINT else RANKS)]


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    """Two layers of different kinds; only the first has gradients."""
    folder = tmp_path_factory.mktemp("traces")
    first, second = (Traces.load(write_traces(folder / f"{kind}.npz", kind)) for kind in ("gdn", "mamba2"))
    return [first, replace(second, grad=None)]


@pytest.fixture(scope="module")
def search(layers):
    return autoplan(layers, error=10.0, **SETTINGS)


def point(cost, error):
    return PlanPoint(TRIED[0], 1.0, (), error, cost)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=12))
def test_frontier(pairs):
    points = [point(*pair) for pair in pairs]
    line = frontier(points)
    assert [p.cost for p in line] == sorted({p.cost for p in line})
    for p in points:
        assert any(q.cost <= p.cost and q.error <= p.error for q in line)
    for p in line:
        assert not any(
            q.cost <= p.cost and q.error <= p.error and (q.cost, q.error) != (p.cost, p.error) for q in points
        )


@pytest.mark.parametrize("place", [4, 7, 12, 13])  # of `ridge`, of `lowrank`, which costs less, and with residuals
def test_points_are_measured(layers, search, place):
    """Plans are those of one allocation over both layers, and errors those of the float64 recurrence."""
    assert [(p.candidate, p.budget) for p in search.points] == BUDGETS
    assert not search.graded
    found = search.points[place]
    calibrated = [calibrate(traces, found.candidate.window) for traces in layers]
    if found.candidate is JOINT:
        allocation = allocate_joint([own.joint((1, 3)) for own in calibrated], found.budget)
        tables = zip(allocation.ranks, allocation.residual_bits, strict=True)
        forms = [{"ranks": x, "residual_bits": bits, "sketch_dtype": "int8"} for x, bits in tables]
    else:
        allocation = allocate_ranks([own.scores for own in calibrated], found.budget, map=found.candidate.map)
        forms = [{"ranks": x} for x in allocation.ranks]
    shares = []
    for traces, own, form, plan in zip(layers, calibrated, forms, found.plans, strict=True):
        want = SketchPlan(own.basis, map=found.candidate.map, **form)
        assert plan.fingerprint == want.fingerprint
        tokens = traces.score_part()[0]
        exact = run(traces.layer, *tokens)[0]
        away = SketchHead(want, tokens.v.shape[0], "reference").step(*tokens) - exact
        shares += (np.square(away).sum(axis=(0, 1, 3)) / np.square(exact).sum(axis=(0, 1, 3))).tolist()
    assert found.error == pytest.approx(np.sqrt(np.mean(shares)), rel=1e-12)  # the same float64 numbers


def test_errors_weighted_by_gradients(layers):
    traces = layers[0]
    found = autoplan([traces], error=10.0, candidates=TRIED[:1], mean_ranks=(2,), backend="reference")
    assert found.graded
    tokens, grad = traces.score_part()
    exact = run(traces.layer, *tokens)[0]
    away = SketchHead(found.plans[0], tokens.v.shape[0], "reference").step(*tokens) - exact
    lost, whole = (np.square((grad * x).sum(axis=-1)).sum(axis=(0, 1)) for x in (away, exact))
    assert found.chosen.error == pytest.approx(np.sqrt((lost / whole).mean()), rel=1e-12)  # the same float64 numbers


def test_traffic_counts_the_ring(search):
    """A longer window flushes less often but reads more of its ring."""
    by_window = {p.candidate.window: p.traffic for p in search.points if p.budget == 2}
    assert set(by_window) == {WINDOW, 2 * WINDOW}
    reductions = {p.candidate.window: p.plans[0].reduction for p in search.points if p.budget == 2}
    gain = reductions[2 * WINDOW] / reductions[WINDOW]
    assert by_window[WINDOW] / by_window[2 * WINDOW] < gain  # the byte model of plans leaves the ring out


def test_ranks_are_limited_to_those_of_cuda(tmp_path):
    traces = Traces.load(write_traces(tmp_path / "layer.npz", "gdn", layer=Layer("gdn", 1, 128, 128)))
    candidate = Candidate("ridge", window=WINDOW)
    [own] = autoplan([traces], error=10.0, candidates=[candidate], mean_ranks=(30,), backend="reference").layers
    assert own.calibrated(candidate)[1].rank_max == 16


@pytest.mark.parametrize(("target", "least"), [("error", "cost"), ("traffic", "error")])
def test_targets(layers, search, target, least):
    bound = float(np.median([getattr(p, target) for p in search.points]))
    chosen = autoplan(layers, **{target: bound}, **SETTINGS).chosen
    assert getattr(chosen, least) == min(getattr(p, least) for p in search.points if getattr(p, target) <= bound)
    assert getattr(chosen, target) <= bound


def test_target_seconds(layers, search):
    """Times are measured for the points that are best in bytes and error among those of the same settings."""
    timed = []

    def time_of(plans):
        timed.append(plans)
        return float(sum(plan.ranks.clip(0).mean() * plan.window for plan in plans))

    found = autoplan(layers, seconds=40.0, time_of=time_of, **SETTINGS)
    best = [p for c in TRIED for p in frontier(p for p in search.points if p.candidate == c)]
    assert [(p.candidate, p.budget) for p in found.points] == [(p.candidate, p.budget) for p in best]
    assert len(timed) == len(best)
    assert all(p.cost == p.seconds for p in found.points)
    assert found.chosen.error == min(p.error for p in found.points if p.seconds <= 40.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "target: expected one of error, traffic, seconds, got none"),
        ({"error": 0.1, "traffic": 0.1}, "target: expected one of .* got error, traffic"),
        ({"error": -0.1}, "error: expected a finite number above 0, got -0.1"),
        ({"error": float("nan")}, "error: expected a finite number above 0"),
        ({"seconds": 1.0}, "time_of: expected a measurement"),
        ({"error": 1e-9}, r"error: expected a target within reach, got 1e-09; the least is .*mean rank"),
        ({"error": 1.0, "mean_ranks": (99,)}, "mean_ranks: expected at least one from 1 to 8"),
        (
            {"error": 1.0, "candidates": [JOINT], "reductions": (99,)},
            r"reductions: expected at least one up to 4\.752 \(rank 1, 1-bit residuals\), got \(99,\)",
        ),
        ({"error": 1.0, "reductions": (0,)}, "reductions: expected finite numbers above 0, got 0"),
        ({"error": 1.0, "candidates": []}, "candidates: expected at least one, got none"),
    ],
)
def test_refusals(layers, settings, message):
    refused("layers: expected at least one, got none", autoplan, [], **SETTINGS | {"error": 0.1})
    with pytest.raises(ValueError, match=message):
        autoplan(layers, **(SETTINGS | {"candidates": TRIED[:1]} | settings))


def test_candidates():
    listed = candidates()
    assert len(set(listed)) == len(listed)
    assert {(c.sketch_dtype, c.window) for c in listed} == {(f, w) for f in ("bfloat16", "int8") for w in (16, 32)}
    refused("maps: expected at least one, got none", candidates, maps=())
    assert {(c.map.name, c.residual_bits) for c in listed} == {("subspace", (1, 2, 3))}
    assert not any(c.residual_bits for c in candidates(("ridge", "lowrank")))
    assert str(JOINT) == "subspace, int8, window 8, residuals of 1/3 bits"
    refused("sketch_dtype: expected one of", candidates, sketch_dtypes=("int7",))
    refused("residual_bits: expected numbers from 1 to 3, got 0", Candidate, "subspace", residual_bits=(0, 1))
    refused("map: expected 'subspace' with residuals, got 'ridge'", Candidate, "ridge", residual_bits=(2,))


def test_step_times_of_other_bits(search, monkeypatch):
    """Plans that differ only in which head has which bits are timed apart."""
    asked, times = [], StepTimes("cpu", 2)
    monkeypatch.setattr(times, "_time", lambda name, system, plan: asked.append(name) or 0.0)
    basis = search.layers[0].calibrated(JOINT)[0]
    for bits in ([1, 3, 1, 1], [1, 1, 3, 1]):
        times([SketchPlan(basis, [2] * 4, map="subspace", residual_bits=bits)])
    assert len(set(asked)) == 2


def test_step_times(search):
    times = StepTimes("cpu", 2)
    plans = search.plans
    taken = times(plans)
    assert 0 < taken < 10
    assert times(plans) == taken  # each plan is timed once
    assert times([*plans, *plans]) == pytest.approx(2 * taken)  # a sum of the same numbers
    assert times.standard(plans) > 0
    refused("backend: expected one of cpu, cuda, got", StepTimes, "reference", 2)


def test_command(tmp_path):
    paths = [write_traces(tmp_path / f"{kind}.npz", kind) for kind in ("gdn", "kda")]
    settings = ["--maps", "ridge:0.01,lowrank", "--sketch-dtypes", "bfloat16", "--windows", "8"]
    settings += ["--mean-ranks", "2,4", "--backend", "reference", "--out", tmp_path / "plans"]
    told = invoke("plan", *paths, *settings, "--error", "10", "--json", tmp_path / "out.json")
    assert "Frontier of 4 points" in told.output
    report = json.loads((tmp_path / "out.json").read_text())
    assert [SketchPlan.load(path).layer.kind for path in report["plans"]] == ["gdn", "kda"]
    assert report["chosen"] in report["frontier"]
    assert {p["map"] for p in report["points"]} == {"ridge(ridge=0.01)", "lowrank(pivots=4, ridge=0.1)"}
    assert (
        "has no effect without --time-on"
        in invoke("plan", *paths, *settings, "--error", 1, "--batch", 2, code=2).output
    )
    for named, targets in (("none", ()), ("--error and --traffic", ("--error", 1, "--traffic", 1))):
        expected = f"target: expected one of --error, --traffic and --microseconds, got {named}"
        assert expected in " ".join(invoke("plan", *paths, *settings, *targets, code=2).output.split())
    assert "map: expected one of" in invoke("plan", *paths, "--maps", "rigde", code=2).output
    joint = [*settings[4:6], *settings[8:], "--maps", "subspace", "--sketch-dtypes", "int8", "--reductions", "3.2,4"]
    invoke("plan", *paths, *joint, "--error", "10", "--json", tmp_path / "out.json")
    report = json.loads((tmp_path / "out.json").read_text())
    assert [(p["budget"], p["residual_bits"]) for p in report["points"]] == [(3.2, [1, 2, 3]), (4, [1, 2, 3])]
    assert any(SketchPlan.load(path).residual_bits.any() for path in report["plans"])
    beyond = invoke("plan", *paths, *settings, "--error", 1e-9, code=2)
    assert "Frontier of 4 points" in beyond.output and "nearest plans (none meet the target)" in beyond.output
    assert "error: expected a target within reach, got 1e-09; the least is" in beyond.stderr
    refused = invoke("plan", *paths, *settings[2:], "--error", 1, "--maps", "subspace:1", code=2)
    assert "'--maps': ridge: map 'subspace' has no ridge" in refused.output
