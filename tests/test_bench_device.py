"""Benchmarks of devices, on the host's stand-in, and of other packages' kernels."""

import json
import sys

import numpy as np
import pytest
from gpu.cuda_support import EXACT, ROUNDED, STORED
from host import fixtures
from host.heads import LAYER
from samples import refused
from test_bench import WINDOW, result
from test_cli import invoke

from sketchssm.calibrate.plans import Settings
from sketchssm.calibrate.traces import Traces
from sketchssm.layer.recurrence import Layer, Tokens
from sketchssm.study import bench
from sketchssm.study.bench import cases, device, peers
from sketchssm.study.bench.workloads import token_at
from sketchssm.study.evaluate import Study, entries, measure
from sketchssm.study.evaluate.measure import relative_error
from sketchssm.study.systems import exact_systems

cupy = fixtures.of_host


class TestDevice:
    @pytest.mark.parametrize("kind", ["gdn", "kda"])
    def test_command(self, kind, cupy, monkeypatch, tmp_path):
        """All systems, windows whose cursors advance from graph to graph, several sets of slots."""
        layer, chosen = LAYER, ["bench", "--shape", "all", "--batch", 2, "--peers"]
        if kind == "kda":
            layer, chosen = Layer("kda", 2, 64, 64, 2), ["bench", "--shape", "tiny", "--batch", "2,3", "--raw-gate"]
        monkeypatch.setattr(bench, "SHAPES", {"tiny": layer, "wide": Layer("mamba2", 32, 80, 64, 1)})
        monkeypatch.setattr(bench, "MEAN_RANKS", {"tiny": 5, "wide": 5})
        monkeypatch.setattr(cases, "device_bandwidth", lambda: 1e12)
        monkeypatch.setattr(device, "LEAST", 1)
        monkeypatch.setattr(device, "PASSING", 100_000)  # for a few sets of slots
        rests = []
        monkeypatch.setattr(device.time, "sleep", rests.append)
        file = tmp_path / "out.json"
        options = [*chosen, "--window", WINDOW, "--map", "lowrank", "--seconds", 0, "--duty", 0.9, "--json", file]
        printed = invoke(*options).output
        report = json.loads(file.read_text())
        assert report["device"] == "host"
        assert report["duty"] == 0.9
        assert len(rests) >= len(report["results"])  # one for each round
        systems = [r["system"] for r in report["results"]]
        sketches = ["lowrank"] if kind == "gdn" else ["lowrank", "lowrank"]
        assert systems[:2] == ["standard", "replay"]
        assert [name.split()[-1] for name in systems if "sketch" in name] == sketches
        for found in report["results"]:
            assert found["backend"] == "cuda"
            assert found["error"] < STORED["bfloat16"]
            assert found["state_error"] < EXACT
            assert len(found["positions"]) == WINDOW
        assert {r["shape"] for r in report["results"]} == {"tiny" if kind == "gdn" else "tiny, raw gate"}
        assert ("wide was not timed: key_dim: the CUDA kernels don't support 80" in printed) == (kind == "gdn")
        assert ("FlashInfer gdn was not timed: " in printed) == (kind == "gdn")

    def test_too_small_a_device(self, cupy, monkeypatch, tmp_path):
        """A system that does not fit is named; the others are timed."""
        monkeypatch.setattr(bench, "SHAPES", {"tiny": LAYER})
        monkeypatch.setattr(bench, "MEAN_RANKS", {"tiny": 5})
        monkeypatch.setattr(cases, "device_bandwidth", lambda: 1e12)
        monkeypatch.setattr(cases, "compile_all", lambda systems: 0.0)

        def measured(shape, system, *rest, **settings):
            assert settings == {"seconds": 0.2, "duty": 0.5}
            if system.name == "replay":
                raise MemoryError("Out of memory allocating 8 bytes")
            return result(system.name)

        monkeypatch.setattr(cases, "measure_device", measured)
        file = tmp_path / "out.json"
        options = ["--shape", "tiny", "--batch", 2, "--window", WINDOW, "--seconds", 0.2, "--duty", 0.5]
        printed = invoke("bench", *options, "--json", file).output
        assert "worked for 50% of the time" in printed
        assert "tiny, batch 2: replay was not timed: Out of memory" in printed
        assert "replay" not in {r["system"] for r in json.loads(file.read_text())["results"]}

    def test_slots_take_turns(self, cupy):
        assert device.slot_sets(2, 2 * device.PASSING, 1000) == 1
        assert device.slot_sets(2, device.PASSING / 32, 1000) == 32
        assert device.slot_sets(2, 1, 1000) == device.MAX_SETS
        assert device.slot_sets(1, 1, 1 << 28) == 2  # half of the memory

    def test_bandwidth(self, cupy):
        assert bench.device_bandwidth(4, 1) > 1e6

    def test_rests(self, cupy, monkeypatch):
        """With a duty of a quarter the device rests three quarters of the time, before every timed round."""
        done = []
        stream = cupy.cuda.Stream(non_blocking=True)
        monkeypatch.setattr(stream, "synchronize", lambda: done.append("waited"))
        monkeypatch.setattr(device.time, "sleep", done.append)
        monkeypatch.setattr(device.Ahead, "launch", lambda self, stream: done.append("ahead"))
        monkeypatch.setattr(cupy.cuda.Event, "record", lambda self, stream: done.append("mark"))
        monkeypatch.setattr(cupy.cuda, "get_elapsed_time", lambda start, stop: 1.0)
        took = device.launch_times([lambda: done.append("a"), lambda: done.append("b")], stream, 2, rest=0.01)
        assert took.shape == (2, 2)
        assert done == ["a", "b", *["waited", 0.01, "ahead", "mark", "a", "mark", "b", "mark"] * 2, "waited"]

        monkeypatch.setattr(device, "launch_times", lambda launches, stream, n, rest=0.0: np.full((n, 2), 1e6 + rest))
        assert np.allclose(device.typical_times([], stream, 0, duty=0.25), 1e6 + 6)
        assert np.allclose(device.typical_times([], stream, 0), 1e6)
        for duty in (0.0, 1.5, np.nan):
            refused("duty: expected a share in", device.typical_times, [], stream, 0, duty)

    def test_evaluate(self, cupy):
        """Inputs and outputs on the host, states on the device."""
        calib, test = (bench.random_tokens(LAYER, 2, 2 * WINDOW, seed) for seed in range(2))
        study = Study(Traces(LAYER, calib, test), Settings(WINDOW))
        for entry in entries(study, ["exact"]):
            found = measure(entry, study, "cuda")
            assert found.backend == "cuda"
            assert max(found.output_error, found.flush_error, found.state_error) < EXACT


UPDATE = """
import torch

def selective_state_update(state, x, dt, A, B, C, D, dt_bias=None, state_batch_indices=None, out=None):
    heads = state.shape[1]
    B, C = (y.double().repeat_interleave(heads // y.shape[1], 1)[:, :, None] for y in (B, C))
    dt = (dt if dt_bias is None else dt + dt_bias).double()[..., None]
    state.copy_(torch.exp(dt * A) * state + dt * B * x[..., None])
    found = (state * C).sum(-1) + D * x
    return found if out is None else out.copy_(found)
"""


class TestPeers:
    @pytest.fixture
    def packages(self, tmp_path, monkeypatch):
        """Stand-ins for other packages, with a selective state update as they document it."""
        for path in ("mamba_ssm/ops/triton/selective_state_update.py", "flashinfer/mamba.py"):
            file = tmp_path / path
            file.parent.mkdir(parents=True)
            file.write_text(UPDATE)
        (tmp_path / "flashinfer/__init__.py").touch()
        (tmp_path / "mamba_ssm/__init__.py").write_text("import an_extension_that_was_not_compiled")
        monkeypatch.syspath_prepend(tmp_path)
        peers._inner.cache_clear()
        yield
        peers._inner.cache_clear()
        for name in [name for name in sys.modules if name.split(".")[0] == "flashinfer"]:
            del sys.modules[name]

    @pytest.mark.parametrize("adapter", [peers._mamba_ssm, peers._flashinfer_ssu])
    def test_selective_state_updates(self, torch, packages, adapter):
        """Argument names and broadcasts; only a device can test the kernels themselves."""
        layer = Layer("mamba2", 4, 16, 8, 2)
        tokens = bench.random_tokens(layer, 2, WINDOW)
        twin = exact_systems(layer)[0].build(2, "reference")
        state = torch.zeros((2, *layer.state_shape))
        for t in range(WINDOW):
            token = token_at(tokens, t)
            given = [None if x is None else torch.from_numpy(np.ascontiguousarray(x)) for x in token]
            given[:3] = (x.to(torch.bfloat16) for x in given[:3])
            step, told = adapter(layer, Tokens(*given), torch)
            output, state = step(state)
            want = twin.step(*(None if x is None else x.float().numpy() for x in told))
            # the stand-in's state is float32; its output is bf16 where the adapter passes memory for the output
            assert relative_error(output.double().numpy(), want) < ROUNDED
            assert relative_error(state.numpy(), twin.state[:2]) < EXACT
        assert "mamba_ssm" not in sys.modules

    def test_missing(self, monkeypatch):
        listed = {peer.name: peer for peer in bench.PEERS}
        monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None if name == "cutlass" else object())
        assert listed["FlashInfer gdn"].missing() == "cutlass"
        assert listed["FlashInfer ssu"].missing() == ""
