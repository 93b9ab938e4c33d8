"""Times the gdn kernels of the authors' package, in a process that has their `sketchssm`; see `authors`.

Run as ``python -c TEXT OF THIS FILE JSON`` in the folder of their package: it must not import this library, whose name
is the same. A step is their `gdn_decode` alone, which contains l2norm and gates. Frames are the identity, as times do
not depend on them, so that the Triton kernels that rotate keys are left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

gdn: Any = import_module("sketchssm.kernels.gdn")  # theirs

K = V = 128
PASSING = 1 << 28
"""Bytes that all sets of slots read in a step: more than any L2 cache."""


def tables(ranks: Sequence[int], key_heads: int, window: int, batch: int) -> Any:
    """Containers of the sketches: blocks of every head, one after the other."""
    heads, layout, ends = len(ranks), [], [0, 0, 0]  # of u, phi and fs
    for rank in ranks:
        columns = -(-rank // 4) * 4
        layout.append([*ends, columns])
        sizes = rank * V, 4 * K + 5 * columns, window * columns
        ends = [end + -(-size // 8) * 8 for end, size in zip(ends, sizes, strict=True)]
    u, phi, fs = (torch.zeros(batch, end, dtype=torch.bfloat16) for end in ends)
    facts = SimpleNamespace(
        ranks=torch.tensor(ranks, dtype=torch.int32),
        layout=torch.tensor(layout, dtype=torch.int32),
        rank_cap=-(-max(ranks) // 4) * 4,
        window=window,
    )
    return SimpleNamespace(
        u=u,
        phi=phi,
        fs=fs,
        beta=torch.zeros(batch, heads, window),
        current_d=torch.zeros(batch, heads, V),
        current_k=torch.zeros(batch, key_heads, K),
        tables=facts,
    )


class Slots:
    """States, rings, sketches and inputs of one batch."""

    def __init__(self, given: dict[str, Any]) -> None:
        batch, heads, key_heads, window = (given[name] for name in ("batch", "heads", "key_heads", "window"))
        draw: Any = {"dtype": torch.bfloat16}
        self.state = torch.randn(batch + 1, heads, V, K) * 0.1
        self.rings = {
            "d_cache": torch.zeros(batch + 1, heads, window, V, **draw),
            "k_cache": torch.zeros(batch + 1, key_heads, window, K, **draw),
            "g_cache": torch.zeros(batch + 1, heads, window),
        }
        self.sketch = tables(given["ranks"], key_heads, window, batch)
        self.slots, self.meta = (torch.arange(i, batch + i, dtype=torch.int32) for i in (1, 0))
        self.mixed = torch.randn(window, batch, 2 * key_heads * K + heads * V, **draw)
        self.a, self.b = torch.randn(2, window, batch, heads, **draw).unbind()
        self.rate, self.bias = torch.zeros(heads), torch.full((heads,), -3.0)
        self.positions = torch.arange(window, dtype=torch.int32)[:, None].expand(window, batch).contiguous()
        self.out = torch.empty(batch, heads, V, **draw)

    def step(self, t: int) -> None:
        """Decode token t of a window."""
        flush = t == self.positions.shape[0] - 1
        gdn.gdn_decode(
            self.mixed[t], self.a[t], self.b[t], self.rate, self.bias, self.out, self.state,
            **self.rings, slots=self.slots, write_pos=self.positions[t], meta=self.meta,
            flush_rows=self.meta if flush else torch.full_like(self.meta, -2),
            sketch=self.sketch, scale=K**-0.5, has_flush_rows=flush,
        )  # fmt: skip

    def errors(self) -> list[float]:
        """Relative errors of the first row's output at a flush and of its state, against float64."""
        heads, window = self.state.shape[1], len(self.positions)
        state = self.state[1].double().transpose(-1, -2).clone()
        for t in range(window):
            self.step(t)
            flat = self.mixed[t, 0].double()
            size = (flat.numel() - heads * V) // 2
            q, k = (x.view(-1, K) for x in flat[: 2 * size].split(size))
            q, k = ((x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()) for x in (q, k))
            q, k = (x.repeat_interleave(heads * K // size, 0) for x in (q * K**-0.5, k))
            v = flat[2 * size :].view(heads, V)
            gate = -self.rate.double().exp() * torch.nn.functional.softplus(self.a[t, 0].double() + self.bias.double())
            state = state * gate.exp()[:, None, None]
            erased = v - torch.einsum("hkv,hk->hv", state, k)
            state = state + torch.einsum("hk,hv->hkv", k, self.b[t, 0].double().sigmoid()[:, None] * erased)
        out = torch.einsum("hkv,hk->hv", state, q)
        pairs = (self.out[0], out), (self.state[1], state.transpose(-1, -2))
        return [float((x.double() - y).norm() / y.norm()) for x, y in pairs]


def timed(work: list[Slots], t: int, seconds: float) -> float:
    """Microseconds of a step at one position: a graph over all sets, replayed."""
    for slots in work:
        slots.step(t)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for slots in work:
            slots.step(t)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    spent = 0.0
    graph.replay()
    while spent < seconds or len(times) < 5:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(work))
        spent += times[-1] * 1e-6 * len(work)
    return sorted(times)[len(times) // 2]


def main() -> None:
    """Print the times of a window, the errors, and where the kernels come from, as JSON."""
    given = json.loads(sys.argv[1])
    support = gdn.gdn_supported(
        given["key_heads"], given["heads"], K, V, given["window"], torch.bfloat16, torch.float32
    )
    if not support:
        raise SystemExit(f"their kernels do not support the layer: {support.reason}")
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    with torch.no_grad():
        first = Slots(given)
        errors = first.errors()
        read = first.sketch.u.nbytes + first.sketch.phi.nbytes
        work = [first, *(Slots(given) for _ in range(min(PASSING // read, 8)))]
        positions = [timed(work, t, given["seconds"]) for t in range(given["window"])]
    print(json.dumps({"positions": positions, "errors": errors, "source": support.source}))


main()
