"""Benchmarks: workloads, bytes, results, and measurements on the host."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from gpu.cuda_support import EXACT, STORED
from host.heads import LAYER
from samples import refused
from test_cli import invoke
from test_traces import SHAPES

from sketchssm import cuda
from sketchssm.layer.coefficients import CoefficientMap
from sketchssm.layer.recurrence import FULL_STATE, KINDS, Layer
from sketchssm.study import bench
from sketchssm.study.bench import cases
from sketchssm.study.bench.results import BenchResult, StepBytes

WINDOW = 4


def result(system="standard", batch=1, step=2.0, shape="tiny"):
    times = [step] * WINDOW
    return BenchResult.of((shape, system, "cuda"), batch, times, StepBytes(4e3, 4e3), 1e10, (1e-3, 1e-7), 0.0)


class TestWorkloads:
    @pytest.mark.parametrize("mean", range(1, 33))
    def test_spread_ranks_have_their_mean(self, mean):
        ranks = bench.spread_ranks(32, mean, 128)
        assert ranks.min() >= 1
        assert ranks.mean() == pytest.approx(mean, abs=0.13)  # rank 1 can't be spread downwards
        assert len(set(ranks)) > 1
        for limit in (1, 6, 16):
            ranks = bench.spread_ranks(16, mean, limit)
            assert ranks.max() <= limit
            assert ranks.mean() == pytest.approx(min(mean, limit), abs=0.13)

    def test_largest_rank_of_a_case(self):
        def case(mean, rank_max):
            layer = Layer("gdn", 8, 32, 24)
            return cases.Case.random("a", layer, 16, (mean,), (CoefficientMap("ridge"),), ("bfloat16",), 0, rank_max)

        assert case(6, 7).plans[0].ranks.tolist() == [3, 4, 6, 7, 7, 7, 7, 7]
        refused("mean_ranks: expected at most 24 for a, got 25$", case, 25, 25)
        refused("mean_ranks: expected at most 5 for a, got 6$", case, 6, 5)

    def test_shapes_are_distinct_and_documented(self):
        assert len(set(bench.SHAPES.values())) == len(bench.SHAPES) == len(bench.MEAN_RANKS)
        page = (Path(__file__).parents[1] / "docs" / "cli.md").read_text()
        for name, (layer, models) in bench.SHIPPED.items():
            sizes = layer.kind, layer.heads, layer.key_heads, layer.key_dim, layer.value_dim, bench.MEAN_RANKS[name]
            assert name not in bench.COMMON or f"| `{name}` | {' | '.join(map(str, sizes))} | {models} |\n" in page

    def test_every_shape_has_its_measured_times(self):
        """The table of the CUDA page has the shapes, their sizes and ranks, and the figures of the file of results."""
        root = Path(__file__).parents[1]
        page = (root / "docs" / "cuda.md").read_text()
        timed = {}
        for x in json.loads((root / "benchmarks" / "results" / "cuda-shapes.json").read_text())["results"]:
            timed.setdefault(x["shape"], {})[x["system"].split()[0]] = x
        assert set(timed) == set(bench.SHAPES)
        for name, layer in bench.SHAPES.items():
            standard, replay, sketch = (timed[name][system] for system in ("standard", "replay", "sketch"))
            rank = float(sketch["system"].split()[1].removeprefix("G="))
            assert rank == pytest.approx(bench.MEAN_RANKS[name], abs=0.5)
            listed = rf"^\| {re.escape(name)} \((\d+), (\d+), (\d+) / (\d+)\), ([\d.]+) \|(.*)\|$"
            (row,) = re.findall(listed, page, re.M)
            sizes = layer.key_dim, layer.value_dim, layer.heads, layer.key_heads, rank
            assert tuple(map(float, row[:-1])) == sizes
            shown = [float(x) for x in re.findall(r"([\d.]+)", row[-1])]
            whole = standard["microseconds"], replay["microseconds"], sketch["microseconds"]
            (us, share, *rest), window = (whole[0], 100 * standard["fraction"], whole[1]), whole[2]
            rest += [sketch["read_microseconds"], 100 * sketch["read_fraction"]]
            rest += [sketch["flush_microseconds"], 100 * sketch["flush_fraction"], window, us / window]
            assert shown == pytest.approx([us, share, *rest], rel=0.012)


class TestBytes:
    def test_step_bytes(self):
        layer = SHAPES["gdn"]
        standard, replay, sketch = bench.systems(layer, 16, [bench.random_plan(layer, 2, 16, "lowrank")])
        moved = 4 * (2 * 2 * 16 + 4 * 8 + 4 + 4) + 4 * 4 * 8  # inputs and outputs
        state = 4 * 4 * 16 * 8
        ring = 4 * (2 * 16 + 4 * 8 + 4 + 4)
        assert bench.step_bytes(standard, layer, 3, 16) == StepBytes(3 * (2 * state + moved), 3 * (2 * state + moved))
        # before the flush a step reads 0 to 14 earlier tokens, on average 7, and writes its own
        found = bench.step_bytes(replay, layer, 3, 16)
        assert found == StepBytes(3 * (state + moved + 8 * ring), 3 * (2 * state + moved + 15 * ring))
        assert found.amortised(16) == (15 * found.read + found.flush) / 16
        read = 4 * 2 * (2 * 8 + 2 * 16 + 2 * 2 + 2)  # four heads in bf16: U, pivots, F and w
        assert bench.step_bytes(sketch, layer, 3, 16) == StepBytes(
            3 * (read + moved + 8 * ring), 3 * (2 * state + moved + 15 * ring + read)
        )

    def test_on_device(self):
        """Inputs and outputs are bf16, factors are packed as in the kernels, a full-state head reads its shadow."""
        ranks = np.array([3, FULL_STATE])
        sketch = bench.systems(LAYER, 8, [bench.random_plan(LAYER, ranks, 8, CoefficientMap("lowrank", 2))])[-1]
        gates = 4 * (2 + 2)
        ring = 2 * (64 + 2 * 80) + gates
        moved = ring + 2 * 64 + 2 * 2 * 80
        state = 4 * 64 * 80
        packed = 2 * (3 * 80 + 2 * 64 + 3 * 2 + 3)
        assert bench.step_bytes(sketch, LAYER, 1, 8, on_device=True) == StepBytes(
            packed + state // 2 + moved + 4 * ring, 4 * state + moved + 7 * ring + packed + state // 2
        )

    @pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
    def test_states_of_16_bits(self, narrow):
        plan = bench.random_plan(LAYER, np.array([3, FULL_STATE]), 8, "lowrank")
        pairs = zip(bench.systems(LAYER, 8, [plan]), bench.systems(LAYER, 8, [plan], state_dtype=narrow), strict=True)
        state = 4 * 64 * 80  # of one of the two heads
        # states that a step between flushes moves; without 16 bits the sketch's reads move its shadow, flushes make it
        for (wide, less), reads, made in zip(pairs, (4, 2, 0), (0, 0, 1), strict=True):
            assert less.build(1, "reference").state.shape == (1, 2, 80, 64)
            more, fewer = (bench.step_bytes(system, LAYER, 1, 8, on_device=True) for system in (wide, less))
            assert (more.read - fewer.read, more.flush - fewer.flush) == (reads * state / 2, (4 + made) * state / 2)

    def test_raw_gates(self):
        """Raw gates have two bytes on a device like activations; on the host they are converted at input."""
        layer = SHAPES["kda"]
        pairs = zip(bench.systems(layer, 16, []), bench.systems(layer, 16, [], bench.random_gate(layer)), strict=True)
        saved = 2 * layer.heads * layer.key_dim  # per token: read as an input, and read and written in the ring
        for (plain, raw), (read, flush) in zip(pairs, ((1, 1), (9, 16)), strict=True):
            assert bench.step_bytes(plain, layer, 3, 16) == bench.step_bytes(raw, layer, 3, 16)
            more, less = (bench.step_bytes(system, layer, 3, 16, on_device=True) for system in (plain, raw))
            assert (more.read - less.read, more.flush - less.flush) == (3 * read * saved, 3 * flush * saved)

    def test_result(self):
        found = BenchResult.of(
            ("a", "b", "c"), 3, [1.0, 2.0, 6.0], StepBytes(3e3, 12e3), 1e10, (0.1, 0.2), first_call_seconds=4.0
        )
        assert (found.window, found.read_microseconds, found.flush_microseconds, found.microseconds) == (3, 1.5, 6, 3)
        assert (found.read_fraction, found.flush_fraction, found.fraction) == pytest.approx((0.2, 0.2, 0.2))
        assert found.gigabytes_per_second == pytest.approx(2)
        assert (found.error, found.state_error, found.first_call_seconds) == (0.1, 0.2, 4)

    def test_window_of_one_token(self):
        found = BenchResult.of(("a", "b", "c"), 1, [2.0], StepBytes(1, 1), 1, (0, 0), 0)
        assert found.read_microseconds == found.flush_microseconds == 2


class TestHost:
    @pytest.mark.parametrize("kind", KINDS)
    def test_measure(self, kind):
        layer = SHAPES[kind]
        systems = bench.systems(layer, WINDOW, [bench.random_plan(layer, 3, WINDOW, CoefficientMap("lowrank", 2))])
        results = bench.measure_host("tiny", layer, systems, 2, WINDOW, 1e9, backend="reference", seconds=0)
        assert [result.system for result in results] == ["standard", "replay", "sketch G=3 lowrank"]
        for found in results:
            # both sides are the reference: outputs are equal, float32 rounding included
            assert found.error == 0
            assert min(found.positions) > 0
            assert found.fraction == pytest.approx(found.bytes / found.microseconds * 1e6 / 1e9)

    def test_raw_gates(self):
        layer = SHAPES["kda"]
        plan, gate = bench.random_plan(layer, 3, WINDOW, CoefficientMap("lowrank", 2)), bench.random_gate(layer)
        listed = bench.systems(layer, WINDOW, [plan], gate)
        for found in bench.measure_host("tiny", layer, listed, 2, WINDOW, 1e9, seconds=0):
            assert found.error < STORED["bfloat16"]
            assert found.state_error < EXACT

    def test_copy_bandwidth(self):
        assert bench.copy_bandwidth(threads=1, megabytes=4, repeats=1) > 1e6

    def test_no_device(self, monkeypatch):
        monkeypatch.setattr(cuda, "missing", lambda: "CuPy sees no CUDA device")
        assert "'cuda' can't run here: CuPy sees no CUDA device" in invoke("bench", "--backend", "cuda", code=2).output
        assert "on a GPU only" in invoke("bench", "--peers", code=2).output
        assert "only a GPU rests" in invoke("bench", "--duty", 0.5, code=2).output
        for duty in (0, 2, "nan"):
            assert "expected a share in (0, 1]" in invoke("bench", "--duty", duty, code=2).output
        monkeypatch.setattr(cuda, "missing", lambda: "")
        assert "with log-decays only" in invoke("bench", "--peers", "--raw-gate", code=2).output


class TestTables:
    def test_times(self):
        """A table for each shape and window, a rule between batches, the note behind the last table."""
        pairs = [("standard", 1), ("sketch", 1), ("standard", 8), ("peer", 8)]
        results = [result(name, batch, 6 if name == "standard" else 2, "a") for name, batch in pairs]
        first, second = bench.time_tables(cases.Report(1e10, [*results, result("sketch", 1, 1234, "b")]))
        assert (first.title.partition(":")[0], second.title.partition(":")[0]) == (
            f"a, W = {WINDOW}, on cuda",
            f"b, W = {WINDOW}, on cuda",
        )
        assert [row[:2] for row in first.rows] == [
            ["standard", "1"], ["sketch", "1"], [], ["standard", "8"], ["peer", "8"],
        ]  # fmt: skip
        assert [row[7] for row in first.rows if row] == ["1.00x", "3.00x", "1.00x", "3.00x"]
        assert first.rows[1][2:7] == ["2.0  20%", "2.0  20%", "2.0  20%", "0.00", "2.0"]
        assert first.rows[1][8:] == ["1.0e-03", "1.0e-07"]
        assert second.rows[0][4] == "1234   0%"
        assert second.rows[0][7] == "-"  # standard decode of this shape was not timed
        assert {len(row) for table in (first, second) for row in table.rows if row} == {len(first.columns)}
        assert not first.note
        assert "10.0 GB/s" in second.note


class TestCalibration:
    def test_report(self, tmp_path, monkeypatch):
        monkeypatch.setitem(bench.SHAPES, "tiny", LAYER)
        settings = ["--shape", "tiny", "--seconds", 0, "--backend", "cpu", "--json", tmp_path / "t.json"]
        invoke("bench", "--calibrate", *settings)
        report = json.loads((tmp_path / "t.json").read_text())
        assert report["device"] == "cpu"
        assert [r["sums"] for r in report["results"]] == ["moments", "scores", "joint scores"]
        for r in report["results"]:
            assert (r["shape"], r["backend"]) == ("tiny", "cpu")
            assert r["tokens_per_second"] == pytest.approx(1e3 / r["milliseconds"])
            assert 0 < r["error"] < 3e-3  # float32 products; joint: codes at the edge of two levels

    @pytest.mark.parametrize("option", [("--batch", 2), ("--map", "lowrank")])
    def test_options_of_decode_are_refused(self, option):
        assert f"{option[0]}: has no effect with --calibrate" in invoke("bench", "--calibrate", *option, code=2).output

    def test_backends(self):
        assert "NumPy (cpu) or CuPy" in invoke("bench", "--calibrate", "--backend", "reference", code=2).output
