"""Formats of sketches: their bytes, by hand and against the measured tables."""

import numpy as np
import pytest

import sketchssm as ss
from sketchssm.layer.coefficients import MAPS, CoefficientMap
from sketchssm.layer.formats import SketchFormat
from sketchssm.plans import traffic

RIDGE = CoefficientMap("ridge")


@pytest.mark.parametrize(
    ("name", "rank", "bytes_128", "bytes_64"),
    [("bfloat16", 4, 2048, 1536), ("bfloat16", 8, 4096, 3072), ("int8", 8, 2080, 1568), ("int8", 16, 4160, 3136)],
)
def test_bytes_of_the_split_form(name, rank, bytes_128, bytes_64):
    """K = 128; V = 128 and 64."""
    form = SketchFormat.of(name)
    for value_dim, size in ((128, bytes_128), (64, bytes_64)):
        assert form.bytes(RIDGE, rank, 128, value_dim) == size
        assert traffic.sketch_read("mamba2", 128, value_dim, rank, sketch_dtype=name) == size
        erase = 2 * rank * 16
        assert traffic.sketch_read("kda", 128, value_dim, rank, sketch_dtype=name) == size + erase


def test_bytes_by_definition():
    """Elements and scales counted as arrays, at odd shapes."""
    key_dim, value_dim, rank, pivots = 7, 5, 3, 2
    form = SketchFormat.of("int8")
    codes, small = rank * value_dim + pivots * key_dim, rank * pivots + rank  # F and w
    lowrank = CoefficientMap("lowrank", pivots)
    assert form.bytes(lowrank, rank, key_dim, value_dim) == codes + 4 * (rank + pivots) + 4 * small
    assert form.bytes(RIDGE, rank, key_dim, value_dim) == rank * (value_dim + key_dim + 4)
    for map in (CoefficientMap(name) for name in MAPS):
        elements = rank * value_dim + map.elements(rank, key_dim)
        assert SketchFormat.of("float32").bytes(map, rank, key_dim, value_dim) == 4 * elements
        assert SketchFormat.of("bfloat16").bytes(map, rank, key_dim, value_dim) == 2 * elements


def test_several_heads():
    form, ranks = SketchFormat.of("int8"), np.array([4, 8, 12])
    assert form.bytes(RIDGE, ranks, 128, 128).tolist() == [form.bytes(RIDGE, r, 128, 128) for r in ranks]
    reads = traffic.sketch_read("mamba2", 128, 128, [4, ss.FULL_STATE], sketch_dtype="int8")
    assert reads.tolist() == [form.bytes(RIDGE, 4, 128, 128), 4 * 128 * 128]


def test_reduction_of_a_plan():
    layer = ss.Layer("gdn", 3, 16, 8)
    basis, ranks = ss.SketchBasis.random(layer, 6), [2, 6, ss.FULL_STATE]
    plan = ss.SketchPlan(basis, ranks, window=8, sketch_dtype="int8")
    assert plan.reduction == traffic.reduction("gdn", 16, 8, ranks, 8, sketch_dtype="int8")
    assert plan.reduction > ss.SketchPlan(basis, ranks, window=8).reduction
