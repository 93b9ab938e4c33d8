"""Residual energy of state reads on the shipped traces, through the heads of a device, against float64."""

import importlib.util
from pathlib import Path

import pytest

from sketchssm.calibrate.traces import SHIPPED, Traces

pytestmark = pytest.mark.gpu

FORMS = ("ridge bfloat16 8", "ridge int8 8", "lowrank int8 8")


@pytest.mark.parametrize("kind", SHIPPED)
def test_heads_lose_what_the_equations_lose(kind, cupy):
    """Within 5%: maps are computed from products of two bf16 slices, and codes round where bf16 products fall. The
    kernels on the host differ by up to 0.7% in two forms of gdn.
    """
    path = Path(__file__).parents[2] / "benchmarks" / "narrow.py"
    spec = importlib.util.spec_from_file_location("narrow", path)
    narrow = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(narrow)
    want, have = (narrow.layer_table(Traces.shipped(kind), backend, FORMS)["stored"] for backend in (None, "cuda"))
    assert set(want) == set(have) == set(FORMS)
    for label, form in want.items():
        assert have[label]["lost"] == pytest.approx(form["lost"], rel=0.05), label
