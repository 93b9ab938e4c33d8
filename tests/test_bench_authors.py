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
    found = bench.measure_authors("tiny", plan_of([3, 1, 5, 7]), 8, 1e12, tmp_path, seconds=0.1, duty=0.5)
    given = {"kind": "gdn", "sizes": [8, 4, 2, 128, 128, 16, [3, 1, 5, 7]], "seconds": 0.1, "duty": 0.5}
    assert seen == [(given, tmp_path)]
    assert (found.system, found.backend, found.microseconds) == ("SNU-ARC sketch G=4", "peer", 2.5)
    assert (found.read_microseconds, found.flush_microseconds) == (2.0, 10.0)
    assert (found.error, found.state_error) == (3e-3, 1e-3)


@pytest.mark.parametrize(
    ("plan", "answer", "message"),
    [
        (plan_of([3, FULL_STATE, 3, 3]), {}, "only ranks below K, without full states"),
        (plan_of([3] * 4, layer=Layer("gla", 4, 128, 128)), {}, "there are no kernels of theirs for gla"),
        (plan_of([3] * 4), {"code": 1, "err": "log\nImportError: no torch"}, "ImportError: no torch"),
        (plan_of([3] * 4), {"errors": [0.1, float("nan")]}, "errors of 1.0e-01"),
    ],
)
def test_refusals(plan, answer, message, monkeypatch, tmp_path):
    answered(monkeypatch, **answer)
    with pytest.raises(RuntimeError, match=f"^{message}"):
        bench.measure_authors("tiny", plan, 8, 1e12, tmp_path)


def decode_functions(torch, called):
    """Plain recurrences with the signatures of the authors' functions; they note position and flush of each call."""
    norm, softplus = torch.nn.functional.normalize, torch.nn.functional.softplus

    def token(state, slots, q, k, v, decay, beta=None):
        """Advance states ``(slots, heads, V, K)`` by one token in float32 and read them."""
        s = state[slots.long()] * decay[:, :, None]
        if beta is not None:
            v = beta.float().sigmoid()[..., None] * (v - torch.einsum("bhvk,bhk->bhv", s, k))
        s = s + v[..., None] * k[:, :, None]
        state[slots.long()] = s
        return torch.einsum("bhvk,bhk->bhv", s, q)

    def gdn(mixed, a, b, rate, bias, out, state, *, slots, write_pos, scale, has_flush_rows, **rest):
        called.append((int(write_pos[0]), has_flush_rows))
        q, k, v = mixed.float().split([256, 256, 512], -1)
        q, k = (norm(x.view(-1, 2, 128), dim=-1).repeat_interleave(2, 1) for x in (q, k))
        gate = (-rate.exp() * softplus(a.float() + bias)).exp()[..., None]
        out.copy_(token(state, slots, q * scale, k, v.view(-1, 4, 128), gate, b))

    def kda(q, k, v, g, b, rate, bias, out, state, rings, *, slots, pos, scale, has_flush_rows, **rest):
        called.append((int(pos[0]), has_flush_rows))
        gate = (-5 * (rate.exp()[:, None] * (g.float() + bias.view(4, 128))).sigmoid()).exp()
        out.copy_(token(state, slots, norm(q.float(), dim=-1) * scale, norm(k.float(), dim=-1), v.float(), gate, b))

    def mamba2(state, x, dt, rate, b, c, skip, bias, *rings, write_pos, slots, out, has_flush_rows, **rest):
        t = int(write_pos[0])
        called.append((t, has_flush_rows))
        assert torch.allclose(rings[-1][:, :, t], torch.einsum("bgk,bgk->bg", b.float(), c), rtol=1e-4, atol=1e-4)
        dt = softplus(dt[..., :1].float() + bias[:, :1].float())
        b, c = (y.float().repeat_interleave(2, 1) for y in (b, c))
        out.copy_(token(state, slots, c, b, dt * x.float(), (rate[:, 0, :1] * dt).exp()) + skip.float() * x.float())

    return {"gdn": gdn, "kda": kda, "mamba2": mamba2}


@pytest.mark.parametrize("kind", ["gdn", "kda", "mamba2"])
def test_the_process_compares_with_the_recurrence(kind, torch, monkeypatch):
    """With a plain recurrence in place of their kernels the errors are rounding; sketches have room for every head."""
    called = []
    theirs = ModuleType("sketchssm.kernels")
    setattr(theirs, f"{kind}_decode", decode_functions(torch, called)[kind])
    theirs.kda = SimpleNamespace(scratch_numel=lambda rows, heads: rows * heads)
    monkeypatch.setitem(sys.modules, "sketchssm.kernels", theirs)
    text = resources.files("sketchssm.study.bench").joinpath("authors_process.py").read_text()
    names = {"__name__": "authors"}
    exec(text.removesuffix("main()\n"), names)
    torch.manual_seed(0)
    slots = names["KINDS"][kind](2, 4, 4 if kind == "kda" else 2, 128, 128, 16, [3, 1, 5, 17])
    output, state = slots.errors()
    assert output < 4e-3  # outputs are bf16
    assert state < 1e-6
    assert called == 2 * [(t, t == 15) for t in range(16)]
    sketch, tables = slots.sketch, slots.sketch.tables
    if kind == "gdn":
        assert tables.layout[:, 3].tolist() == [4, 4, 8, 20]
        assert tables.layout[3, :3].tolist() == [9 * 128, 2 * 536 + 552, 16 * (4 + 4 + 8)]
        assert not (tables.layout[:, :3] % 8).any()
        assert sketch.u.shape[1] == 26 * 128
    elif kind == "kda":
        assert [(heads.tolist(), most, first) for heads, most, first in tables.flush_groups] == [
            ([3 << 16, 1 | 1 << 16, 2 | 5 << 16], 16, 0),
            ([3 | 17 << 16], 32, 3),
        ]
        assert tables.heads_step.tolist() == [1, 0, 2, 3]
        assert sketch.phi.shape == (2, 4, 24, 128)
        rings = [ring for name, ring in vars(slots.rings).items() if name != "window"]
        assert {ring.stride(0) * ring.itemsize for ring in rings} == {4 * 16 * (4 * 2 * 128 + 4 * 128 + 4)}
        rows = tables.frame_gk[2, 33792:].view(8, 136)  # rank 5, keys in the order of the tensor cores
        assert [row.nonzero().flatten().tolist() for row in rows] == [[0], [1], [8], [9], [2], [], [], []]
        halves = tables.frame_gk[3, 16384:33792].view(torch.bfloat16).view(2, 128, 136)
        assert torch.equal(halves[0, :8].float(), tables.frame_gk[3, 33792:].view(8, 136))
        assert halves.float().sum((1, 2)).tolist() == [17, 0]
    else:
        assert tables.u_offsets.tolist() == tables.ag_offsets.tolist() == [0, 3, 4, 9]
        assert tables.w_offsets.tolist() == [0, 3, 4, 8]
        assert (sketch.u.shape, sketch.w.shape, sketch.ag.shape) == ((2, 26, 128), (2, 12, 128), (2, 5, 26))
        assert slots.state.stride()[-2:] == (1, 128)
