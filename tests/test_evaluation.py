"""The whole evaluation: its systems, measurements and kept results."""

import json
import math

import numpy as np
import pytest
from samples import refused
from test_traces import trace_entries, write_traces

from sketchssm.calibrate.plans import Settings
from sketchssm.calibrate.traces import Traces
from sketchssm.calibrate.windows import host_tokens
from sketchssm.layer.coefficients import MAPS, CoefficientMap
from sketchssm.layer.recurrence import KINDS
from sketchssm.plans.plan import SketchPlan
from sketchssm.reference.recurrence import run
from sketchssm.reference.walk import walk
from sketchssm.study.evaluate import Study, entries, evaluate, measure, select
from sketchssm.study.evaluate.registry import FAMILIES, FULL_METHOD

WINDOW = 8


def study_of(folder, kind="gdn", *, name="a", grads=1, **settings):
    """Evaluation of small random traces."""
    path = write_traces(folder / f"{name}.npz", kind, test=2, grads=grads)
    chosen = {"ranks": (1, 3), "mean_rank": 3, "every": 8} | settings
    return Study(Traces.load(path), Settings(WINDOW), **chosen)


@pytest.fixture(params=KINDS)
def study(request, tmp_path):
    return study_of(tmp_path, request.param)


def names_of(study):
    return [entry.name for entry in entries(study)]


def entry_of(study, name):
    [found] = [entry for entry in entries(study) if entry.name == name]
    return found


def test_every_kind_has_its_families(study):
    names = names_of(study)
    assert len(set(names)) == len(names)
    families = {name.partition("/")[0] for name in names}
    other = "pruned" if study.traces.layer.kind == "gdn" else "key-reduced"
    assert families == set(FAMILIES) - {"plan", other}
    assert {"exact/standard", "exact/replay", "sketch/ridge-3", f"ablation/{FULL_METHOD}"} <= set(names)


def test_settings_of_the_paper(study):
    """Compressed states and read-only variants have exactly the settings of the paper's comparison."""
    bits = [f"quantised/dsq-{n}-bits" for n in (10, 8, 6, 4)]
    reduced = "key-reduced/drrqr" if study.traces.layer.kind == "gdn" else "pruned/ghost"
    sparse = [f"{reduced}-{share}" for share in (37.5, 50.0, 62.5, 75.0)]
    copies = [f"read-only/{n}-bit-copy" for n in (8, 6, 4, 2)]
    reads = [f"read-only/low-rank-read-{rank}" for rank in (8, 4)]  # V = 8
    compressed = ("quantised", "pruned", "key-reduced", "read-only")
    found = [name for name in names_of(study) if name.startswith(compressed)]
    assert found == [*bits, *sparse, *copies, *reads]


def test_ablations_of_the_paper(tmp_path):
    names = set(names_of(study_of(tmp_path)))
    assert "ablation/random-basis" in names
    assert {f"ablation/allocation-{m}" for m in ("gradient", "error", "uniform")} <= names
    assert {f"ablation/lowrank-pivots-{p}" for p in (1, 2, 4, 8)} <= names
    assert {f"ablation/lowrank-ridge-{r}" for r in ("0", "0.01", "0.1", "1")} <= names
    # 40 test tokens hold two windows of 16 tokens, and not of 32
    assert {name for name in names if "window" in name} == {f"ablation/window-{w}" for w in (4, 8, 16)}
    path = write_traces(tmp_path / "long.npz", "gdn", test=2, tokens=64)
    assert "ablation/window-32" in names_of(Study(Traces.load(path), Settings(WINDOW), mean_rank=3))


def test_windows_need_calibration(tmp_path):
    """A window too long for the scoring sequences is left out of the ablations, and refused as the window in use."""
    arrays = trace_entries("gdn", test=2)
    arrays["calib_grad"] = arrays["calib_grad"][:, :20]
    np.savez(tmp_path / "short.npz", **arrays)
    traces = Traces.load(tmp_path / "short.npz")
    names = names_of(Study(traces, Settings(WINDOW), mean_rank=3))
    assert {name for name in names if "window" in name} == {f"ablation/window-{w}" for w in (4, 8)}
    refused(r"short: expected .* at least two windows \(32 tokens\), got 40", Study, traces, Settings(16), mean_rank=3)


def test_without_gradients_there_is_less_to_ablate(tmp_path):
    names = names_of(study_of(tmp_path, grads=0))
    assert [n for n in names if "allocation" in n] == ["ablation/allocation-error", "ablation/allocation-uniform"]


def test_selection(tmp_path):
    studies = [study_of(tmp_path, kind, name=kind) for kind in ("gdn", "kda")]
    for names, expected in (
        (["exact"], ["exact/standard", "exact/replay"]),
        (["sketch/ridge-?", "exact/replay"], ["exact/replay", "sketch/ridge-1", "sketch/ridge-3"]),
        (["pruned"], []),  # gdn has none; kda has some
        (["*/*-3"], [*(f"sketch/{name}-3" for name in (*MAPS, "random-basis")), "narrow/int8-3"]),
    ):
        assert [entry.name for entry in select(studies, names)[0]] == expected
    assert select(studies, ["pruned"])[1]
    assert [[entry.name for entry in own] for own in select(studies, [])] == [names_of(study) for study in studies]


def test_baselines_that_are_not_asked_for_are_not_calibrated(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise AssertionError("calibrated")

    monkeypatch.setattr("sketchssm.study.baselines.KeyMoments.update", refuse)
    study = study_of(tmp_path)
    assert select([study], ["exact", "sketch/ridge-*"])
    with pytest.raises(AssertionError, match="calibrated"):
        select([study], ["key-reduced"])


def test_unknown_systems_are_told_what_there_is(tmp_path):
    known = r"exact \(standard, replay\); rounded-states \(standard-bfloat16, .*\); sketch \(.*window-16"
    with pytest.raises(ValueError, match=rf"got 'exakt'; there are {known}"):
        select([study_of(tmp_path)], ["exact", "exakt"])


def test_study_measures_against_the_recurrence(study):
    np.testing.assert_array_equal(study.output, run(study.traces.layer, *study.traces.test)[0])
    # float64, with sums in another order
    for tokens in (study.length, 5, 16):
        part = study.traces.test.at(np.s_[:, :tokens])
        np.testing.assert_allclose(study.state(tokens), run(study.traces.layer, *part)[1], rtol=1e-9, atol=1e-12)
    assert study.checkpoints == [8, 16, 24, 32, 40]


@pytest.mark.parametrize(("every", "points"), [(64, [40]), (30, [40]), (26, [26, 40]), (27, [40]), (40, [40])])
def test_checkpoints_end_with_the_sequence(tmp_path, every, points):
    """The rest is a stretch of its own if it has at least half of `every` tokens; else it joins the last one."""
    assert study_of(tmp_path, every=every).checkpoints == points


def test_half_life(tmp_path):
    study = study_of(tmp_path)
    gates = study.traces.test.g
    gates[..., 0], gates[..., 1] = 0.0, math.log(0.5) / 7
    assert study.half_life[:2] == pytest.approx([math.inf, 7])


def test_half_life_of_channels(tmp_path):
    """One channel in ten remembers longer than the channel that stands for its head."""
    study = study_of(tmp_path, "kda")
    size = study.traces.layer.key_dim
    study.traces.test.g[:] = -math.log(2) / np.arange(1.0, size + 1)
    assert 0.8 * size < study.half_life[0] < size


def test_read_energy(tmp_path):
    study = study_of(tmp_path)
    by_window = []
    tokens = host_tokens(study.traces.layer, *study.traces.test)
    walk(study.traces.layer, tokens, WINDOW, lambda reads: by_window.append(reads.queries @ reads.state))
    by_head = np.square(by_window).sum(axis=(0, 1, 3, 4))
    # sums of float64 in another order
    np.testing.assert_allclose(study.read_energy(WINDOW).sum(axis=0), by_head, rtol=1e-9)
    assert not study.read_energy(WINDOW)[0].any()  # the first window starts from a zero state


def test_sketches_read_by_their_plan(study):
    found = measure(entry_of(study, "sketch/ridge-3"), study, "reference")
    plan = study.calibrated().plan(3)
    np.testing.assert_array_equal(found.ranks, plan.ranks)
    energy = study.read_energy(WINDOW).sum(axis=0)
    # of numbers with six digits
    assert found.retained == pytest.approx(np.average(found.head_retained, weights=energy), abs=1e-5)
    assert found.state_error < 1e-9  # float64 in another order of summation
    assert (found.name, found.backend) == ("sketch/ridge-3", "reference")


def test_drift_adds_up_to_the_output_error(study):
    found = measure(entry_of(study, "quantised/dsq-6-bits"), study, "reference")
    stretches = np.split(study.output, study.checkpoints[:-1], axis=1)
    sizes = np.array([np.square(part).sum() for part in stretches])
    lost = np.square(found.drift["output_error"]) * sizes
    assert found.output_error == pytest.approx(math.sqrt(lost.sum() / sizes.sum()))
    assert found.drift["tokens"] == study.checkpoints
    assert found.drift["state_error"][-1] == found.state_error > 1e-3
    assert len(found.head_output_error) == len(found.head_state_error) == study.traces.layer.heads


def test_open_windows_are_judged_as_of_their_flush(tmp_path):
    """Within a window the state is the exact state of the last flush."""
    study = study_of(tmp_path, every=5)
    assert max(measure(entry_of(study, "exact/replay"), study, "reference").drift["state_error"]) < 1e-9


def test_ablations_differ_in_one_thing(tmp_path):
    study = study_of(tmp_path)
    full, random, narrow = (
        entry_of(study, f"ablation/{name}").build().plan for name in (FULL_METHOD, "random-basis", "lowrank-pivots-1")
    )
    np.testing.assert_array_equal(full.ranks, random.ranks)
    assert full.map == random.map == CoefficientMap("ridge")
    assert not np.allclose(full.omega, random.omega)
    assert narrow.map == CoefficientMap("lowrank", 1, 0.1)
    assert entry_of(study, "ablation/window-4").build().plan.window == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": ()}, "ranks: expected different positive"),
        ({"ranks": (2, 2)}, "ranks: expected different positive"),
        ({"ranks": (9,), "method": "uniform"}, "ranks: expected at most 8 for uniform ranks, got 9"),
        ({"mean_rank": 9}, "mean_rank: expected 1 to 8"),
        ({"method": "best"}, "method: expected one of gradient"),
        ({"method": "gradient", "grads": 0}, "method: 'gradient' needs gradients, and a has none"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_are_checked_before_anything_is_measured(tmp_path, settings, message):
    good = study_of(tmp_path, grads=settings.get("grads", 1))
    chosen = {"mean_rank": 3} | {name: value for name, value in settings.items() if name not in ("grads", "method")}
    with pytest.raises(ValueError, match=message):
        Study(good.traces, Settings(WINDOW, method=settings.get("method")), **chosen)


def test_files(tmp_path):
    studies = [study_of(tmp_path)]
    found = evaluate(studies, select(studies, ["exact", "sketch"]), "reference", lambda label: None)
    results = json.loads(found.save(tmp_path / "new" / "out", "1").read_text())
    [layer] = results["layers"]
    assert (layer["name"], layer["kind"], layer["heads"]) == ("a", "gdn", 4)
    sketch = next(s for s in layer["systems"] if s["setting"] == "ridge-3")
    assert len(sketch["head_retained"]) == 4
    assert [len(curve) for curve in sketch["drift"].values()] == [5] * 3


def test_plans_join_in(tmp_path):
    study = study_of(tmp_path)
    plan = SketchPlan(study.calibrated().basis, np.full(4, 2), WINDOW)
    joined = study_of(tmp_path, plan=plan)
    assert names_of(joined) == [*names_of(study), "plan/given"]
    refused("plan: expected one for", study_of, tmp_path, "kda", name="b", plan=plan)


def test_ablations_beside_residuals(study):
    """Every method makes plans."""
    settings = Settings(WINDOW, CoefficientMap("subspace"), sketch_dtype="int8", residual_bits=2)
    beside = Study(study.traces, settings, ranks=(1, 3), mean_rank=3)
    names = names_of(beside)
    assert "ablation/allocation-gradient" in names
    refused("map: expected 'subspace'", beside.calibrated().plan, 3, "ridge", sketch_dtype="int8", residual_bits=2)
