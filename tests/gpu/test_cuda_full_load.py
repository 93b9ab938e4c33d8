"""Flushes with many tiles on every multiprocessor and the whole memory busy: copies land as late as they ever do."""

import numpy as np
import pytest

import sketchssm as ss
from sketchssm.cuda import launch
from sketchssm.layer.recurrence import FULL_STATE
from sketchssm.study import bench
from sketchssm.study.bench.device import Workload

pytestmark = pytest.mark.gpu

ROWS, DIFFERENT, WINDOW = 256, 32, 16
"""Rows of a step; rows with inputs of their own, which the others repeat (`Workload`); tokens of a window."""


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize(
    ("map", "stored", "mean_rank", "form"),
    [
        ("lowrank", "bfloat16", None, ""),
        ("ridge", "bfloat16", None, ""),
        ("ridge", "bfloat16", None, "shadows"),
        ("ridge", "bfloat16", None, "tolerance"),
        ("ridge", "bfloat16", 12, ""),
        ("ridge", "int8", 12, ""),
    ],
)
@pytest.mark.parametrize("shape", ["nemotron-3-super", "qwen3-next", "kimi-linear"])
def test_equal_rows_get_equal_bits(shape, map, stored, mean_rank, form, overlaps, cupy, monkeypatch):
    """A tile's arithmetic does not depend on the block that works on the tile, nor on when its data arrive. The first
    tiles of all blocks are loaded at the same time, so their states arrive last. Four flushes of steps, then one of a
    half-full window; with a tolerance, one at each token.
    """
    if not overlaps:
        monkeypatch.setattr(launch, "OVERLAP", 1 << 30)
    layer = bench.SHAPES[shape]
    ranks = bench.spread_ranks(layer.heads, mean_rank or bench.MEAN_RANKS[shape])
    if form == "shadows":
        ranks[::8] = FULL_STATE
    options = {"monitor": 1, "tolerance": 1e-9} if form == "tolerance" else {}
    head = ss.SketchHead(bench.random_plan(layer, ranks, WINDOW, map, sketch_dtype=stored), ROWS, "cuda", **options)
    head.warmup("bfloat16")
    work = Workload(layer, ROWS, WINDOW)
    head.load_state(cupy.asarray(work.start[None]).repeat(ROWS, axis=0))
    for t in range(4 * WINDOW):
        head.step(*work.steps[t % WINDOW])
        if t % WINDOW == WINDOW - 1:
            check_equal(head, cupy)
    for t in range(WINDOW // 2):
        head.step(*work.steps[t])
    assert not options or head.errors().exact.all()
    head.flush()
    check_equal(head, cupy)


def check_equal(head, cupy):
    """All repeated rows have the states, sketches, maps and errors of the rows that they repeat."""
    for name in ("state", "sketch", "cursor", *(["errors"] if head.monitor else [])):
        bits = head._engine.memory[name].reshape(ROWS, -1).view(np.uint8).reshape(ROWS // DIFFERENT, DIFFERENT, -1)
        same = (bits == bits[:1]).all(axis=2)
        assert bool(same.all()), f"{name}: rows {cupy.nonzero(~same)} differ from the rows whose inputs they have"
