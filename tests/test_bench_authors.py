"""The authors' kernels as a peer: the process's own arithmetic, and what the bench makes of its answer."""

import json
import sys
from importlib import resources
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from sketchssm.layer.recurrence import FULL_STATE, Layer
from sketchssm.study import bench
from sketchssm.study.bench import authors

LAYER = Layer("gdn", 4, 128, 128, 2)


def plan_of(ranks, window=16, layer=LAYER):
    return bench.random_plan(layer, np.array(ranks), window, "ridge")


def answered(monkeypatch, code=0, err="", **found):
    """Let the process answer without a device; return the list of its arguments."""
    seen = []

    def run(command, **settings):
        seen.append((json.loads(command[-1]), settings["cwd"]))
        return SimpleNamespace(returncode=code, stdout="a log line\n" + json.dumps(found), stderr=err)

    monkeypatch.setattr(authors.subprocess, "run", run)
    return seen


def test_result(monkeypatch, tmp_path):
    seen = answered(monkeypatch, positions=[2.0] * 15 + [10.0], errors=[3e-3, 1e-3], source="nvrtc")
    found = bench.measure_authors("tiny", plan_of([3, 1, 5, 7]), 8, 1e12, tmp_path, seconds=0.1)
    given = {"batch": 8, "heads": 4, "key_heads": 2, "window": 16, "ranks": [3, 1, 5, 7], "seconds": 0.1}
    assert seen == [(given, tmp_path)]
    assert (found.system, found.backend, found.microseconds) == ("SNU-ARC sketch G=4", "peer", 2.5)
    assert (found.read_microseconds, found.flush_microseconds) == (2.0, 10.0)
    assert (found.error, found.state_error) == (3e-3, 1e-3)


@pytest.mark.parametrize(
    ("plan", "answer", "message"),
    [
        (plan_of([3] * 4, 8), {}, "only windows of a multiple of 16"),
        (plan_of([3, FULL_STATE, 3, 3]), {}, "only windows of a multiple of 16 and ranks without full states"),
        (plan_of([3] * 4, layer=Layer("kda", 4, 128, 128)), {}, "only their gdn kernels"),
        (plan_of([3] * 4), {"code": 1, "err": "log\nImportError: no torch"}, "ImportError: no torch"),
        (plan_of([3] * 4), {"errors": [0.1, float("nan")]}, "errors of 1.0e-01"),
    ],
)
def test_refusals(plan, answer, message, monkeypatch, tmp_path):
    answered(monkeypatch, **answer)
    with pytest.raises(RuntimeError, match=f"^{message}"):
        bench.measure_authors("tiny", plan, 8, 1e12, tmp_path)


def test_the_process_compares_with_the_recurrence(torch, monkeypatch):
    """With a plain gated delta rule in place of their kernels the errors are rounding; layouts hold every block."""
    folded = []

    def gdn_decode(mixed, a, b, rate, bias, out, state, *, slots, write_pos, sketch, scale, has_flush_rows, **rest):
        folded.append((int(write_pos[0]), has_flush_rows))
        q, k, v = mixed.float().split([256, 256, 512], -1)
        q, k = (torch.nn.functional.normalize(x.view(-1, 2, 128), dim=-1).repeat_interleave(2, 1) for x in (q, k))
        gate = (-rate.exp() * torch.nn.functional.softplus(a.float() + bias)).exp()
        s = state[slots.long()].transpose(-1, -2) * gate[..., None, None]
        write = b.float().sigmoid()[..., None] * (v.view(-1, 4, 128) - torch.einsum("bhkv,bhk->bhv", s, k))
        s = s + k[..., None] * write[..., None, :]
        state[slots.long()] = s.transpose(-1, -2)
        out.copy_(torch.einsum("bhkv,bhk->bhv", s, q * scale))

    theirs = ModuleType("sketchssm.kernels.gdn")
    theirs.gdn_decode = gdn_decode
    monkeypatch.setitem(sys.modules, "sketchssm.kernels", ModuleType("sketchssm.kernels"))
    monkeypatch.setitem(sys.modules, "sketchssm.kernels.gdn", theirs)
    text = resources.files("sketchssm.study.bench").joinpath("authors_process.py").read_text()
    names = {"__name__": "authors"}
    exec(text.removesuffix("main()\n"), names)
    torch.manual_seed(0)
    slots = names["Slots"]({"batch": 2, "heads": 4, "key_heads": 2, "window": 16, "ranks": [3, 1, 5, 16]})
    output, state = slots.errors()
    assert output < 4e-3  # outputs are bf16
    assert state < 1e-6
    assert folded == [(t, t == 15) for t in range(16)]
    layout = slots.sketch.tables.layout
    assert layout[:, 3].tolist() == [4, 4, 8, 16]
    assert layout[3, :3].tolist() == [9 * 128, 2 * 536 + 552, 16 * (4 + 4 + 8)]
    assert slots.sketch.u.shape[1] == 25 * 128
    assert not (layout[:, :3] % 8).any()
