"""A head on a CUDA device: pool and arrays there, a second stream for what begins requests, captured graphs."""

import contextlib

import numpy as np

from sketchssm.layer.recurrence import Tokens
from soak.places import Host

ROWS = 16
"""Captured calls have multiples of so many rows."""

DRAFTS = 4
"""Tokens of a captured draft."""


class Device(Host):
    """A head on the current CUDA device, or on the stand-in for CuPy; with graphs, steps and drafts are replayed."""

    overlaps = leaves_out = True
    refuses = False

    def __init__(self, make, slots, graphs=False):
        import cupy
        import ml_dtypes

        self.cupy, self.bfloat16 = cupy, np.dtype(ml_dtypes.bfloat16)
        self.main, self.other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        with self.main:
            super().__init__(make, slots)
            self.head.warmup(drafts=self.drafts > 0)
            self.main.synchronize()
        self.layer = self.head.layer
        self.graphs = {} if graphs else None
        if graphs:
            # with padding a batch may have more rows than slots
            for rows in range(ROWS, slots + 2 * ROWS, ROWS):
                self._capture(rows)

    def _pool(self, shape, dtype):
        raw = self.cupy.empty(shape[0] * shape[1] + 256, dtype)
        first = -raw.data.ptr % 256
        return raw[first : len(raw) - 256 + first].reshape(shape)

    def running(self):
        return self.main

    @contextlib.contextmanager
    def side(self):
        self.other.wait_event(self.main.record())  # slots that were freed hold NaN by then
        with self.other:
            yield

    def join(self):
        self.main.wait_event(self.other.record())

    def array(self, x):
        return self.cupy.asarray(np.asarray(x))

    def get(self, x):
        return x.get() if hasattr(x, "get") else np.asarray(x)

    def tokens(self, tokens):
        wide = (None if x is None else x.astype(np.float64) for x in tokens)
        return Tokens(*(x.astype(self.bfloat16).astype(np.float64) if i < 3 else x for i, x in enumerate(wide)))

    def _upload(self, tokens, strided):
        """The call's inputs on the device; strided ones are slices of one projection's output."""
        rows = tokens.v.shape[:2]
        narrow = [x.astype(self.bfloat16).view(np.uint16) for x in tokens[:3]]
        if strided:
            whole = self.array(np.concatenate([x.reshape(*rows, -1) for x in narrow], axis=-1))
            ends = np.cumsum([0] + [x[0, 0].size for x in narrow])
            pieces = [whole[..., a:b].reshape(x.shape) for a, b, x in zip(ends, ends[1:], narrow, strict=False)]
        else:
            pieces = [self.array(x) for x in narrow]
        rest = [None if x is None else self.array(x.astype(np.float32)) for x in tokens[3:]]
        return Tokens(*(x.view(self.bfloat16) for x in pieces), *rest)

    def step(self, tokens, slots, lengths=None, rng=None):
        if self.graphs is not None and tokens.v.shape[1] == (1 if lengths is None else DRAFTS):
            return self._replay(tokens, slots, lengths)
        given = self._upload(tokens, rng.random() < 0.5)
        out = self.cupy.empty(tokens.v.shape, np.float32)
        out[...] = np.nan
        target = out
        if tokens.v.shape[1] == 1 and rng.random() < 0.5:
            given, target = given.at(np.s_[:, 0]), out[:, 0]
        narrow = (np.int64, np.int32)[int(rng.integers(2))]
        draft = {} if lengths is None else {"draft": True, "lengths": self.array(lengths.astype(narrow))}
        self.head.step(*given, slots=self.array(slots.astype(narrow)), out=target, **draft)
        return lambda: out.get()

    def commit(self, accepted, slots):
        if self.graphs is None:
            self.head.commit(self.array(accepted), slots=self.array(slots))
            return
        graph, counts, index = self.graphs["commit", -(-len(slots) // ROWS) * ROWS]
        self._fill_rows(counts, accepted, 0)
        self._fill_rows(index, slots, self.head.pad_slot)
        graph.launch(self.main)

    def _fill_rows(self, target, values, padding):
        host = np.full(target.shape, padding, values.dtype)
        host[: len(values)] = values
        target[...] = self.array(host.astype(target.dtype))

    def _blank(self, rows, count):
        """Arrays of a captured call."""
        layer, empty = self.layer, self.cupy.zeros
        shapes = layer.token_shapes()
        q, k, v, g = (empty((rows, count, *shapes[name]), np.uint16 if i < 3 else np.float32)
                      for i, name in enumerate("qkvg"))  # fmt: skip
        beta = empty((rows, count, *shapes["beta"]), np.float32) if layer.erases else None
        given = Tokens(*(x.view(self.bfloat16) for x in (q, k, v)), g, beta)
        slots = self.array(np.full(rows, self.head.pad_slot, np.int32))
        out = empty((rows, count, layer.heads, layer.value_dim), np.float32)
        return given, slots, self.array(np.zeros(rows, np.int32)), out

    def _record(self, call):
        with self.main:
            self.main.begin_capture()
            call()
            return self.main.end_capture()

    def _capture(self, rows):
        given, slots, lengths, out = self._blank(rows, 1)
        now = given.at(np.s_[:, 0])
        graph = self._record(lambda: self.head.step(*now, slots=slots, out=out[:, 0]))
        self.graphs[rows, 1] = graph, given, slots, lengths, out
        if not self.drafts:
            return
        given, slots, lengths, out = self._blank(rows, DRAFTS)
        draft = {"draft": True, "lengths": lengths}
        graph = self._record(lambda: self.head.step(*given, slots=slots, out=out, **draft))
        self.graphs[rows, DRAFTS] = graph, given, slots, lengths, out
        slots, counts = (self.array(np.full(rows, x, np.int32)) for x in (self.head.pad_slot, 0))
        graph = self._record(lambda: self.head.commit(counts, slots=slots))
        self.graphs["commit", rows] = graph, counts, slots

    def _replay(self, tokens, slots, lengths):
        count, rows = len(slots), -(-len(slots) // ROWS) * ROWS
        graph, given, index, counts, out = self.graphs[rows, tokens.v.shape[1]]
        for target, x in zip(given, self._upload(tokens, False), strict=True):
            if target is not None:
                target.view(x.dtype)[:count] = x
        self._fill_rows(index, slots, self.head.pad_slot)
        if lengths is not None:
            self._fill_rows(counts, lengths, 0)
        out[...] = np.nan
        graph.launch(self.main)
        return lambda: out[:count].get()

    def left_out(self):
        """Rows that the head has left out since the last look."""
        return self.head.left_out()

    def used(self):
        pool = self.cupy.get_default_memory_pool()
        return pool.used_bytes() if hasattr(pool, "used_bytes") else super().used()
