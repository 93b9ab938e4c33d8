"""Coefficient maps and formats of sketches: parameters, and what a state stores, in elements and in bytes."""

import re

import numpy as np
import pytest

from sketchssm.layer.coefficients import FORMS, MAPS, RIDGE_FLOOR, CoefficientMap
from sketchssm.layer.formats import SketchFormat


def test_each_map_has_its_own_parameters():
    made = {name: CoefficientMap(name) for name in MAPS}
    assert {name: (map.pivots, map.ridge) for name, map in made.items()} == {
        "ridge": (None, 0.001), "lowrank": (4, 0.1), "subspace": (None, None),
    }  # fmt: skip
    assert CoefficientMap("lowrank", 3, 0.02) == CoefficientMap("lowrank", np.int64(3), np.float64(0.02))
    assert CoefficientMap("ridge", ridge=0).effective_ridge == RIDGE_FLOOR
    assert CoefficientMap("ridge", ridge=0.5).effective_ridge == 0.5


def test_a_name_stands_for_its_defaults():
    assert CoefficientMap.of("lowrank") == CoefficientMap("lowrank", 4, 0.1)
    map = CoefficientMap("lowrank", 2)
    assert CoefficientMap.of(map) is map


@pytest.mark.parametrize(
    ("name", "rows", "elements"),
    [
        ("ridge", (2, 9), (2 * 32, 9 * 32)),
        ("lowrank", (2, 4), (2 * 32 + 2 * 2 + 2, 4 * 32 + 9 * 4 + 9)),
    ],
)
def test_what_a_state_stores(name, rows, elements):
    """Rank 2, below the pivot count of 4, and rank 9, above it; K = 32."""
    map = CoefficientMap(name)
    np.testing.assert_array_equal(map.rows([2, 9]), rows)
    np.testing.assert_array_equal(map.elements([2, 9], 32), elements)
    assert map.elements(9, 32) == elements[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("best",), "map: expected one of ridge, lowrank, subspace, got 'best'"),
        (("ridge", None, -0.1), "ridge: expected a finite number of at least 0, got -0.1"),
        (("ridge", None, float("nan")), "ridge: expected a finite number of at least 0, got nan"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        CoefficientMap(*arguments)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("parameter", ["pivots", "ridge"])
def test_a_parameter_that_the_map_ignores_is_an_error(name, parameter):
    if getattr(FORMS[name], parameter) is None:
        with pytest.raises(ValueError, match=f"^{parameter}: map '{name}' has no {parameter}, expected None, got 2"):
            CoefficientMap(name, **{parameter: 2})
    else:
        assert getattr(CoefficientMap(name, **{parameter: 2}), parameter) == 2


RIDGE = CoefficientMap("ridge")


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
