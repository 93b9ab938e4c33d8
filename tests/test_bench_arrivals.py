"""Benchmarks of requests that arrive and leave: the schedule, and both kinds of runs against float64."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from gpu.cuda_support import EXACT, STORED
from host import fixtures
from host.heads import LAYER
from test_bench import WINDOW
from test_traces import SHAPES

from sketchssm.layer.coefficients import CoefficientMap
from sketchssm.study import bench

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import arrival_runs
import arrivals
from arrival_runs import SPARE, Requests

cupy = fixtures.of_host

MODES = ["arrivals", "lockstep", "clock", "no clock"]


class TestRequests:
    def test_slots(self):
        """No two rows share a slot, and a slot changes hands only when a request begins."""
        requests = Requests.arriving(20, 400, 16, 30, seed=3)
        assert requests.num_slots == 20 + SPARE
        assert requests.slots.max() < requests.num_slots
        for before, slots, joins in zip(requests.slots, requests.slots[1:], requests.joins[1:], strict=False):
            live = slots[slots >= 0]
            assert np.unique(live).size == live.size
            np.testing.assert_array_equal(slots[~joins], before[~joins])
            assert (slots[joins] != before[joins]).all()
        np.testing.assert_array_equal(requests.slots[0] >= 0, requests.joins[0])

    def test_the_batch_is_full_after_a_window(self):
        requests = Requests.arriving(256, 100, 16, 30, seed=1)
        assert (requests.slots[16:] >= 0).all()
        first = (requests.slots >= 0).argmax(axis=0)
        assert np.unique(first).size == 16

    def test_lengths_have_their_mean(self):
        """2000 rows of 300 steps with requests of 30 tokens: 20000 ends, so 4 standard deviations are 3%."""
        requests = Requests.arriving(2000, 316, 16, 30, seed=2)
        assert requests.joins[16:].sum() == pytest.approx(2000 * 300 / 30, rel=0.03)
        assert Requests.arriving(3, 20, 4, 1).joins[4:].all()

    def test_is_seeded(self):
        first, again, other = (Requests.arriving(4, 50, 4, 10, seed) for seed in (1, 1, 2))
        np.testing.assert_array_equal(first.slots, again.slots)
        assert not np.array_equal(first.slots, other.slots)

    def test_together(self):
        requests = Requests.together(3, 5)
        assert requests.joins.sum() == requests.joins[0].sum() == requests.num_slots == 3
        np.testing.assert_array_equal(requests.slots, np.tile([0, 1, 2], (5, 1)))


def check(results, layers, steps=2 * WINDOW, batch=3):
    """Check the common properties of the results of one case with one plan."""
    assert [r.mode for r in results] == MODES
    standard, lockstep, *others = results
    assert np.isnan(standard.over_lockstep)
    assert lockstep.over_lockstep == 1
    assert lockstep.requests == 0
    assert all(other.requests == standard.requests > 0 for other in others)
    for r in results:
        assert (r.batch, r.window, r.layers, len(r.steps)) == (batch, WINDOW, layers, steps)
        assert r.microseconds == pytest.approx(np.mean(r.steps), rel=1e-3)
        assert r.slowest == pytest.approx(max(r.steps) / r.microseconds, rel=1e-3)
        assert r.over_lockstep == pytest.approx(r.microseconds / lockstep.microseconds) or r is standard


def case_of(kind, raw=False, **types):
    layer = SHAPES[kind]
    plan = bench.random_plan(layer, 3, WINDOW, CoefficientMap("lowrank", 2))
    return bench.Case("tiny", layer, 3, WINDOW, [plan], bench.random_gate(layer) if raw else None, **types)


class TestHost:
    @pytest.mark.parametrize(("kind", "raw"), [("mamba2", False), ("gdn", False), ("kda", False), ("kda", True)])
    def test_reference(self, kind, raw):
        """The float64 comparison uses the same system, requests and clocks, so it agrees to the last bit."""
        found = list(arrivals.measure_arrivals(case_of(kind, raw), "reference", layers=2, steps=5, mean_tokens=5))
        check(found, 2)
        assert all(r.error == r.state_error == 0 for r in found)

    def test_cpu(self):
        found = list(arrivals.measure_arrivals(case_of("gdn"), "cpu", layers=2, steps=8, mean_tokens=3, seed=4))
        check(found, 2)
        for r in found:
            assert r.error < STORED["bfloat16"]
            assert r.state_error < EXACT

    @pytest.mark.parametrize("backend", ["reference", "cpu"])
    def test_states_of_16_bits(self, backend, monkeypatch):
        """All heads have the type of the case; its rounding is part of the system, so a twin in float64 rounds too."""
        seen, run = [], arrivals.run_on_host

        def spied(heads, inputs, requests):
            seen.extend(head.state_dtype for head in heads)
            return run(heads, inputs, requests)

        monkeypatch.setattr(arrivals, "run_on_host", spied)
        case = case_of("gdn", state_dtype="bfloat16")
        found = list(arrivals.measure_arrivals(case, backend, layers=2, steps=8, mean_tokens=3))
        check(found, 2)
        assert seen == ["bfloat16"] * 8
        # a number between two bf16 numbers may be rounded to the other one, which is 2^-8 away
        assert all(r.error < STORED["bfloat16"] and r.state_error < 2**-8 for r in found)

    def test_too_little_memory(self, monkeypatch, capsys):
        """A mode that does not fit is named; the others are timed."""
        run = arrivals.run_on_host

        def limited(heads, inputs, requests):
            if requests.joins[0].all():
                raise MemoryError("no room")
            return run(heads, inputs, requests)

        monkeypatch.setattr(arrivals, "run_on_host", limited)
        found = list(arrivals.measure_arrivals(case_of("gdn"), "reference", layers=1, steps=4, mean_tokens=3))
        assert [r.mode for r in found] == ["arrivals", "clock", "no clock"]
        assert "sketch G=3 lowrank, lockstep, was not timed: no room" in capsys.readouterr().out


class TestDevice:
    def test_command(self, cupy, monkeypatch, tmp_path, capsys):
        """Graphs whose slots change between replays, loads of those that begin, and rests between windows."""
        monkeypatch.setattr(bench, "SHAPES", {"tiny": LAYER})
        monkeypatch.setattr(bench, "MEAN_RANKS", {"tiny": 5})
        rests = []
        monkeypatch.setattr(arrival_runs.time, "sleep", rests.append)
        file = tmp_path / "out.json"
        chosen = f"--shape tiny --batch 3 --window {WINDOW} --layers 2 --steps 8 --tokens 3 --duty 0.5".split()
        arrivals.main([*chosen, "--backend", "cuda", "--json", str(file)])
        assert "microseconds of a layer's step, 2 layers" in capsys.readouterr().out
        report = json.loads(file.read_text())
        assert (report["device"], report["layers"]) == ("host", 2)
        assert len(rests) == 3 * len(report["results"])  # one for each window
        assert [r["mode"] for r in report["results"]] == MODES
        for found in report["results"]:
            assert found["backend"] == "cuda"
            assert found["error"] < STORED["bfloat16"]
            assert found["state_error"] < EXACT

    def test_states_of_16_bits(self, cupy):
        plans = [bench.random_plan(LAYER, 5, WINDOW, "lowrank")]
        case = bench.Case("narrow", LAYER, 3, WINDOW, plans, state_dtype="bfloat16")
        found = list(arrivals.measure_arrivals(case, "cuda", layers=1, steps=WINDOW, mean_tokens=3))
        assert [r.mode for r in found] == MODES
        assert all(r.error < STORED["bfloat16"] and r.state_error < 2**-8 for r in found)
