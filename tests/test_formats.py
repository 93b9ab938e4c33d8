"""Formats of sketches: their bytes, by hand and against the measured tables."""

import re

import numpy as np
import pytest

import sketchssm as ss
from sketchssm.layer.coefficients import MAPS, CoefficientMap
from sketchssm.layer.formats import FORMATS, FP8, INT4, INT8, SketchFormat
from sketchssm.plans import traffic

RIDGE = CoefficientMap("ridge")


@pytest.mark.parametrize(
    ("name", "rank", "wide", "bytes_128", "bytes_64"),
    [
        ("bfloat16", 4, None, 2048, 1536),
        ("bfloat16", 8, None, 4096, 3072),
        ("int8", 8, None, 2080, 1568),
        ("fp8", 8, None, 2080, 1568),
        ("int8+int4", 12, 6, 2352, 1776),
        ("int8+int4", 16, 8, 3136, 2368),
        ("int8", 16, None, 4160, 3136),
    ],
)
def test_bytes_of_the_split_form(name, rank, wide, bytes_128, bytes_64):
    """K = 128; V = 128 and 64."""
    form = SketchFormat.of(name)
    for value_dim, size in ((128, bytes_128), (64, bytes_64)):
        assert form.bytes(RIDGE, rank, 128, value_dim, wide) == size
        assert traffic.sketch_read("mamba2", 128, value_dim, rank, sketch_dtype=name, wide=wide) == size
        erase = 2 * rank * 16
        assert traffic.sketch_read("kda", 128, value_dim, rank, sketch_dtype=name, wide=wide) == size + erase


def test_bytes_by_definition():
    """Elements and scales counted as arrays, at odd shapes: a row of n codes of 4 bits takes whole bytes."""
    key_dim, value_dim, rank, pivots = 7, 5, 3, 2
    for name in ("int8", "fp8"):
        form = SketchFormat.of(name)
        for map in (CoefficientMap("lowrank", pivots), CoefficientMap("prior", pivots)):
            codes = rank * value_dim + pivots * key_dim
            small = rank * pivots + rank  # F and w
            assert form.bytes(map, rank, key_dim, value_dim) == codes + 4 * (rank + pivots) + 4 * small
        assert form.bytes(CoefficientMap("offline"), rank, key_dim, value_dim) == rank * (value_dim + 4)
        assert form.bytes(CoefficientMap("exact"), rank, key_dim, value_dim) == rank * (value_dim + key_dim + 4)
    for wide in range(rank + 1):
        size = wide * (7 + 5) + (rank - wide) * (4 + 3) + 4 * rank
        assert SketchFormat.of("int8+int4").bytes(RIDGE, rank, key_dim, value_dim, wide) == size
    for map in map_all():
        elements = rank * value_dim + map.elements(rank, key_dim)
        assert SketchFormat.of("float32").bytes(map, rank, key_dim, value_dim) == 4 * elements
        assert SketchFormat.of("bfloat16").bytes(map, rank, key_dim, value_dim) == 2 * elements


def map_all():
    return [CoefficientMap(name) for name in MAPS]


def test_several_heads():
    form = SketchFormat.of("int8+int4")
    ranks, wide = np.array([4, 8, 12]), np.array([4, 0, 6])
    size = form.bytes(RIDGE, ranks, 128, 128, wide)
    assert size.tolist() == [form.bytes(RIDGE, r, 128, 128, w) for r, w in zip(ranks, wide, strict=True)]
    reads = traffic.sketch_read("mamba2", 128, 128, [4, ss.FULL_STATE], sketch_dtype="int8+int4", wide=[2, 0])
    assert reads.tolist() == [form.bytes(RIDGE, 4, 128, 128, 2), 4 * 128 * 128]


def test_which_formats_split():
    for name, form in FORMATS.items():
        assert (form.scaled, form.mixed) == (name in ("int8", "fp8", "int8+int4"), name == "int8+int4")
        for map in map_all():
            assert form.splits(map) == (form.scaled and map.name in ("exact", "ridge"))
            if form.mixed and not form.splits(map):
                with pytest.raises(ValueError, match=r"^sketch_dtype: 'int8\+int4' serves the maps exact and ridge"):
                    form.check_map(map)
            else:
                form.check_map(map)


def test_largest_codes():
    """Of b bits with a sign and a zero; e4m3 has its largest number at 1.75 * 2^8."""
    assert (INT8.top, INT4.top, FP8.top) == (2**7 - 1, 2**3 - 1, 1.75 * 2**8)


def test_reduction_of_a_plan():
    layer = ss.Layer("gdn", 3, 16, 8)
    basis, ranks, wide = ss.SketchBasis.random(layer, 6), [2, 6, ss.FULL_STATE], [1, 3, 0]
    for name in ("int8", "fp8"):
        plan = ss.SketchPlan(basis, ranks, window=8, sketch_dtype=name)
        assert plan.reduction == traffic.reduction("gdn", 16, 8, ranks, 8, sketch_dtype=name)
        assert plan.reduction > ss.SketchPlan(basis, ranks, window=8).reduction
    plan = ss.SketchPlan(basis, ranks, window=8, sketch_dtype="int8+int4", wide=wide)
    assert plan.reduction == traffic.reduction("gdn", 16, 8, ranks, 8, sketch_dtype="int8+int4", wide=wide)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sketch_dtype": "int4"}, "sketch_dtype: expected one of"),
        ({"sketch_dtype": None}, "sketch_dtype: expected one of"),
        ({"sketch_dtype": "int8+int4"}, "wide: expected the 8-bit columns of each head for sketch_dtype 'int8+int4'"),
        ({"sketch_dtype": "int8+int4", "wide": 5}, "wide: expected numbers from 0 to the rank, got 5"),
        ({"sketch_dtype": "int8+int4", "wide": -1}, "wide: expected numbers from 0 to the rank, got -1"),
        ({"sketch_dtype": "int8+int4", "wide": 1, "map": "prior"}, "sketch_dtype: 'int8+int4' serves the maps exact"),
        ({"wide": 1}, "wide: expected None for sketch_dtype 'bfloat16', got 1"),
        ({"sketch_dtype": "fp8", "wide": 1}, "wide: expected None for sketch_dtype 'fp8', got 1"),
    ],
)
def test_refusals(settings, message):
    for call in (traffic.sketch_read, traffic.sketch, traffic.reduction):
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            call("gdn", 8, 8, 4, **settings)
