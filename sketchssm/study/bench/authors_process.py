"""Times a decode kernel of the authors' package, in a process that has their `sketchssm`; see `authors`.

Run as ``python -c TEXT OF THIS FILE JSON`` in the folder of their package: it must not import this library, whose name
is the same. A step is their decode function alone, built with the knobs that it selects: for gdn and kda it contains
l2norm and gates, for mamba2 softplus and the product with D. Frames are the identity, as times do not depend on them.
The Triton kernels that their vLLM runs before it are left out: for gdn the rotation of queries and keys, for mamba2
that of C, and the products of C with the ring's B, which are inputs here.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from importlib import import_module
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import torch

kernels: Any = import_module("sketchssm.kernels")  # theirs

BF16, FLOAT, INT = torch.bfloat16, torch.float32, torch.int32
softplus = torch.nn.functional.softplus

SETS = 24
"""Sets of slots that take turns, so that no L2 cache holds a set's sketches and gaps between graphs hardly count."""

LEAST, MOST = 5, 200
"""Smallest and largest number of timed windows."""


def integers(values: Any, device: str | None = None) -> Any:
    """Make an int32 tensor."""
    return torch.tensor(values, dtype=INT, device=device)


def normalised(x: Any) -> Any:
    """Divide vectors by their norms as their kernels do."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


class Slots:
    """States, rings, sketches and inputs of one batch; a kind adds what its decode function takes."""

    _decode: Any  # (t, flush, rows): call their function for token t of a window; `rows` are those that flush
    _token: Any  # (t): of the first row in float64: q, k, v, decay (heads, 1 or K), beta or None, what outputs add

    def __init__(self, batch: int, heads: int, key_heads: int, K: int, V: int, window: int, ranks: list[int]) -> None:
        self.heads, self.key_heads, self.K, self.V = heads, key_heads, K, V
        self.window, self.ranks = window, ranks
        self.state = torch.randn(batch + 1, heads, V, K) * 0.1  # slot 0 is padding
        self.slots, self.meta = (torch.arange(i, batch + i, dtype=INT) for i in (1, 0))
        self.no_rows = torch.full_like(self.meta, -1)
        self.positions = torch.arange(window, dtype=INT)[:, None].expand(window, batch).contiguous()
        self.out = torch.empty(batch, heads, V, dtype=BF16)
        self.rate, self.bias = torch.zeros(heads), torch.full((heads,), -3.0)

    def step(self, t: int) -> None:
        """Decode token t of a window."""
        flush = t == self.window - 1
        self._decode(t, flush, self.meta if flush else self.no_rows)

    def errors(self) -> list[float]:
        """Relative errors of the first row's outputs and state against float64, over two windows from a zero state.

        The sketches of the first window are exact, as the state is zero; of the second, only the flush counts.
        """
        self.state.zero_()
        state = torch.zeros(self.heads, self.V, self.K, dtype=torch.float64)
        got, want = [], []
        for i in range(2 * self.window):
            t = i % self.window
            self.step(t)
            q, k, v, decay, beta, added = self._token(t)
            state = state * decay[:, None]
            if beta is not None:
                v = beta[:, None] * (v - torch.einsum("hvk,hk->hv", state, k))
            state = state + v[:, :, None] * k[:, None]
            if i < self.window or t == self.window - 1:
                got.append(self.out[0].double())
                want.append(torch.einsum("hvk,hk->hv", state, q) + added)
        pairs = (torch.stack(got), torch.stack(want)), (self.state[1].double(), state)
        return [float((x - y).norm() / y.norm()) for x, y in pairs]


class Gdn(Slots):
    """Slots of `gdn_decode`."""

    def __init__(self, batch: int, *sizes: Any) -> None:
        super().__init__(batch, *sizes)
        heads, key_heads, window, K, V = self.heads, self.key_heads, self.window, self.K, self.V
        self.mixed = torch.randn(window, batch, 2 * key_heads * K + heads * V, dtype=BF16)
        self.a, self.b = torch.randn(2, window, batch, heads, dtype=BF16).unbind()
        shapes = {"d_cache": (heads, window, V), "k_cache": (key_heads, window, K)}
        self.rings = {name: torch.zeros(batch + 1, *shape, dtype=BF16) for name, shape in shapes.items()}
        self.rings["g_cache"] = torch.zeros(batch + 1, heads, window)
        layout, ends = [], [0, 0, 0]  # of u, phi and fs: blocks of every head, one after the other
        for rank in self.ranks:
            columns = -(-rank // 4) * 4
            layout.append([*ends, columns])
            blocks = rank * V, 4 * K + 5 * columns, window * columns
            ends = [end + -(-size // 8) * 8 for end, size in zip(ends, blocks, strict=True)]
        u, phi, fs = (torch.zeros(batch, end, dtype=BF16) for end in ends)
        cap = -(-max(self.ranks) // 4) * 4
        facts = SimpleNamespace(ranks=integers(self.ranks), layout=integers(layout), rank_cap=cap, window=window)
        last = {"current_d": torch.zeros(batch, heads, V), "current_k": torch.zeros(batch, key_heads, K)}
        beta = torch.zeros(batch, heads, window)
        self.sketch = SimpleNamespace(u=u, phi=phi, fs=fs, beta=beta, **last, tables=facts)

    def _decode(self, t: int, flush: bool, rows: Any) -> None:
        kernels.gdn_decode(
            self.mixed[t], self.a[t], self.b[t], self.rate, self.bias, self.out, self.state, **self.rings,
            slots=self.slots, write_pos=self.positions[t], meta=self.meta, flush_rows=rows, sketch=self.sketch,
            scale=self.K**-0.5, has_flush_rows=flush,
        )  # fmt: skip

    def _token(self, t: int) -> tuple[Any, ...]:
        flat, size = self.mixed[t, 0].double(), self.key_heads * self.K
        q, k = (normalised(x.view(-1, self.K)) for x in flat[: 2 * size].split(size))
        q, k = (x.repeat_interleave(self.heads // self.key_heads, 0) for x in (q * self.K**-0.5, k))
        gate = -self.rate.double().exp() * softplus(self.a[t, 0].double() + self.bias.double())
        return q, k, flat[2 * size :].view(-1, self.V), gate.exp()[:, None], self.b[t, 0].double().sigmoid(), 0.0


class Kda(Slots):
    """Slots of `kda_decode`: gates are bounded by -5, and the rings of a slot lie side by side."""

    def __init__(self, batch: int, *sizes: Any) -> None:
        super().__init__(batch, *sizes)
        heads, window, ranks, K = self.heads, self.window, self.ranks, self.K
        self.q, self.k, self.v, self.g = torch.randn(4, window, batch, heads, K, dtype=BF16).unbind()
        self.b = torch.randn(window, batch, heads, dtype=BF16)
        self.biases = self.bias.repeat_interleave(K)
        wide, single = (heads, window, K), (heads, window)
        forms = {"k": (wide, BF16), "v": (wide, BF16), "prefix": (wide, FLOAT), "beta": (single, FLOAT)}
        forms |= {"u_ring": (wide, BF16), "d_ring": (wide, BF16)}
        ends = [0, *accumulate(math.prod(shape) * dtype.itemsize for shape, dtype in forms.values())]
        page = torch.zeros(batch + 1, ends[-1], dtype=torch.uint8)
        self.rings = SimpleNamespace(window=window)
        for (name, (shape, dtype)), (start, end) in zip(forms.items(), pairwise(ends), strict=True):
            setattr(self.rings, name, page[:, start:end].view(dtype).unflatten(1, shape))

        packed: list[int] = []
        groups = []  # a launch of their flush for each; heads with their ranks in the upper half
        for least, most in ((0, 16), (16, 32), (32, 64), (64, 128)):
            if group := [h | rank << 16 for h, rank in enumerate(ranks) if least < rank <= most]:
                groups.append((integers(group, "cpu"), most, len(packed)))
                packed += group
        cap = -(-max(ranks) // 8) * 8
        facts = SimpleNamespace(
            num_heads=heads, window=window, rank_cap=cap, frame_gk=identity_frames(ranks, K), ranks=integers(ranks),
            heads_step=integers(sorted(range(heads), key=ranks.__getitem__)), heads_all=integers(packed, "cpu"),
            flush_groups=groups, num_sketch_heads=heads, num_dense_heads=0, dense_heads_d=integers([]),
            dense_rows=integers([-1] * heads),
        )  # fmt: skip
        # their step stages rows in blocks: a spare row of the batch follows
        u, phi = (torch.zeros(batch + 1, heads, cap, K, dtype=BF16)[:batch] for _ in range(2))
        f, dense = (torch.zeros(batch, *s, dtype=BF16) for s in ((heads, cap, window), (0, K, K)))
        self.sketch = SimpleNamespace(u=u, phi=phi, f=f, dense=dense, tables=facts)
        self.scratch = torch.empty(kernels.kda.scratch_numel(batch, heads))

    def _decode(self, t: int, flush: bool, rows: Any) -> None:
        kernels.kda_decode(
            self.q[t], self.k[t], self.v[t], self.g[t], self.b[t], self.rate, self.biases, self.out, self.state,
            self.rings, slots=self.slots, meta=self.meta, pos=self.positions[t], flush_rows=rows, sketch=self.sketch,
            scratch=self.scratch, scale=self.K**-0.5, has_flush_rows=flush,
        )  # fmt: skip

    def _token(self, t: int) -> tuple[Any, ...]:
        q, k, v, g = (x[t, 0].double() for x in (self.q, self.k, self.v, self.g))
        gate = -5 * (self.rate.double().exp()[:, None] * (g + self.bias.double()[:, None])).sigmoid()
        return normalised(q) * self.K**-0.5, normalised(k), v, gate.exp(), self.b[t, 0].double().sigmoid(), 0.0


def identity_frames(ranks: list[int], size: int) -> Any:
    """Identity frames of all heads in the form of the kda kernels.

    A head has its basis in float32, two bf16 halves of it with keys in the order of the tensor cores and padded rows,
    zero beyond the head's rank, and the first eight of these rows in float32.
    """
    eye, place, pitch = torch.eye(size), torch.arange(size), size + 8
    inner = place % 16
    keys = place - inner + inner % 8 // 2 * 4 + inner // 8 * 2 + inner % 2
    rows = eye[:, keys] * (place < integers(ranks)[:, None])[:, :, None]
    ends = [0, *accumulate((size * size, size * pitch, 8 * pitch))]
    frames = torch.zeros(len(ranks), ends[-1])
    basis, halves, first = (frames[:, start:end] for start, end in pairwise(ends))
    basis[:] = eye.flatten()
    halves.view(BF16).unflatten(1, (2, size, pitch))[:, 0, :, :size] = rows.to(BF16)
    first.unflatten(1, (8, pitch))[:, :, :size] = rows[:, :8]
    return frames


class Mamba2(Slots):
    """Slots of `mamba2_decode`: states are ``(K, V)`` in memory."""

    def __init__(self, batch: int, *sizes: Any) -> None:
        super().__init__(batch, *sizes)
        heads, groups, window, K, V = self.heads, self.key_heads, self.window, self.K, self.V
        self.state = self.state.mT.contiguous().mT
        mixed = torch.randn(window, batch, heads * V + 2 * groups * K, dtype=BF16)
        x, b, c = mixed.split([heads * V, groups * K, groups * K], -1)
        self.x = x.unflatten(-1, (heads, V))
        self.b, c = (y.unflatten(-1, (groups, K)) for y in (b, c))
        self.c = c.float()
        self.products = torch.einsum("tbgk,sbgk->tbgs", self.c, self.b.float())
        self.dt = torch.randn(window, batch, heads, 1, dtype=BF16).expand(-1, -1, -1, V)
        self.rates = -torch.rand(heads)[:, None, None].expand(-1, V, K)
        self.skip, self.biases = (y.to(BF16)[:, None].expand(-1, V) for y in (torch.rand(heads), self.bias))
        shapes = (heads, window, V), (heads, window), (groups, window, K)
        self.rings = [torch.zeros(batch + 1, *shape, dtype=(FLOAT, BF16)[len(shape) - 2]) for shape in shapes]
        self.flags = torch.zeros(batch, dtype=torch.int8), torch.ones(batch, dtype=torch.int8)
        *columns, total = accumulate(self.ranks, initial=0)
        *rows, maps = accumulate((min(rank, 4) for rank in self.ranks), initial=0)
        tables = {"ranks": self.ranks, "ag_offsets": columns, "u_offsets": columns, "w_offsets": rows}
        tables["dense_rows"] = [0] * heads
        u, w = (torch.zeros(batch, *shape, dtype=BF16) for shape in ((total, V), (maps, K)))
        facts = SimpleNamespace(**{name: integers(values) for name, values in tables.items()})
        self.sketch = SimpleNamespace(u=u, w=w, ag=torch.zeros(batch, 5, total), tables=facts)
        self.frames = torch.eye(K).repeat(groups, 1, 1)

    def _decode(self, t: int, flush: bool, rows: Any) -> None:
        kernels.mamba2_decode(
            self.state, self.x[t], self.dt[t], self.rates, self.b[t], self.c[t], self.skip, self.biases, *self.rings,
            self.products[t], write_pos=self.positions[t], is_flush=self.flags[flush], flush_rows=rows,
            slots=self.slots, meta=self.meta, out=self.out, sketch=self.sketch, has_flush_rows=flush,
            frames_t=self.frames, flush_programs=-(-len(self.meta) // 4),
        )  # fmt: skip

    def _token(self, t: int) -> tuple[Any, ...]:
        q, k = (y[t, 0].double().repeat_interleave(self.heads // self.key_heads, 0) for y in (self.c, self.b))
        dt = softplus(self.dt[t, 0, :, :1].double() + self.biases[:, :1].double())
        x = self.x[t, 0].double()
        return q, k, dt * x, (self.rates[:, 0, :1].double() * dt).exp(), None, self.skip.double() * x


KINDS: dict[str, type[Slots]] = {"gdn": Gdn, "kda": Kda, "mamba2": Mamba2}


def supported(kind: str, batch: int, heads: int, key_heads: int, K: int, V: int, window: int, ranks: list[int]) -> Any:
    """Ask their package whether it has kernels for a layer."""
    layers = {"gdn": (key_heads, heads, K, V), "kda": (heads, K, V), "mamba2": (heads, V, K, key_heads)}
    return getattr(kernels, f"{kind}_supported")(*layers[kind], window, BF16, FLOAT)


def window_times(work: list[Slots], seconds: float, duty: float) -> list[float]:
    """Median microseconds of a step at each position of the window, from whole windows of replayed graphs.

    The device rests between windows, so that it works the share `duty` of the time.
    """
    graphs = []
    for t in range(work[0].window):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for slots in work:
                slots.step(t)
    times: list[list[float]] = []
    rounds, rest = 2, 0.0
    while len(times) < rounds:
        time.sleep(rest)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(graphs) + 1)]
        graphs[-1].replay()  # the device has work while the host launches the others
        marks[0].record()
        for graph, mark in zip(graphs, marks[1:], strict=True):
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        times.append([start.elapsed_time(end) * 1e3 / len(work) for start, end in pairwise(marks)])
        taken = 1e-6 * sum(times[-1]) * len(work)
        rounds, rest = min(max(int(seconds / taken), LEAST), MOST), taken * (1 / duty - 1)
    return torch.tensor(times[1:], device="cpu").median(0).values.tolist()


def main() -> None:
    """Print the times of a window, the errors, and where the kernels come from, as JSON."""
    logging.basicConfig(level=logging.INFO)  # their package tells which tuned file it takes
    given = json.loads(sys.argv[1])
    support = supported(given["kind"], *given["sizes"])
    if not support:
        raise SystemExit(f"their kernels do not support the layer: {support.reason}")
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    make = KINDS[given["kind"]]
    with torch.no_grad():
        work = [make(*given["sizes"])]
        errors = work[0].errors()
        room = torch.cuda.mem_get_info()[0] // (2 * torch.cuda.memory_allocated())
        work += [make(*given["sizes"]) for _ in range(min(SETS - 1, room))]
        positions = window_times(work, given["seconds"], given["duty"])
    print(json.dumps({"positions": positions, "errors": errors, "source": support.source}))


main()
