"""Pictures are written, in both formats, and say so when they can't be."""

import sys

import numpy as np
import pytest
from test_traces import write_traces

from sketchssm import plots
from sketchssm.evaluate import SystemResult, calibrate, collect_windows, retained_energy
from sketchssm.recurrence import DENSE
from sketchssm.traces import Traces

RESULTS = {
    "gdn": [
        SystemResult(name, reduction, error, 1e-7, 1e-7, 10.0, 0.0, "cpu", 1)
        for name, reduction, error in (("standard", 1, 1e-7), ("sketch, mean rank 4", 12, 0.03))
    ]
}
HEADER = {".png": b"\x89PNG", ".svg": b"<?xml"}


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib")


@pytest.fixture
def basis_and_energies(tmp_path):
    layer = calibrate(Traces.load(write_traces(tmp_path / "a.npz", "gdn")), 8)
    windows = collect_windows(layer.traces.layer, layer.traces.test, 8)
    return layer.basis, retained_energy(layer.basis, windows, (1, 2, 4), ["exact", "prior"])


@pytest.mark.parametrize("suffix", HEADER)
def test_pictures(suffix, matplotlib, basis_and_energies, tmp_path):
    ranks = {"layer 1": np.array([1, 5, DENSE, 3]), "layer 2": np.array([2, 2])}
    made = [
        plots.spectrum(*basis_and_energies, tmp_path / f"a{suffix}", "layer"),
        plots.rank_heatmap(ranks, tmp_path / f"b{suffix}"),
        plots.error_against_traffic(RESULTS, tmp_path / f"c{suffix}"),
    ]
    for path in made:
        assert path.read_bytes().startswith(HEADER[suffix])


def test_other_suffixes_are_refused(matplotlib, tmp_path):
    with pytest.raises(ValueError, match=r"expected a name that ends in \.png or \.svg, got 'a\.pdf'"):
        plots.error_against_traffic(RESULTS, tmp_path / "a.pdf")


def test_full_reads_stand_out(matplotlib, tmp_path):
    """Heads that read their full state have a colour of their own, off the scale of ranks."""
    from matplotlib.image import imread

    def share(ranks):
        pixels = imread(plots.rank_heatmap({"layer": np.array(ranks)}, tmp_path / "a.png"))[..., :3]
        vermilion = np.array([0xD5, 0x5E, 0x00]) / 255
        return (np.abs(pixels - vermilion) < 0.01).all(axis=-1).mean()

    assert share([1, 5, 4, 3]) == 0
    assert share([1, DENSE, DENSE, 3]) > 0.1


def test_no_ranks_no_picture(matplotlib, tmp_path):
    with pytest.raises(ValueError, match="ranks: expected at least one row"):
        plots.rank_heatmap({}, tmp_path / "a.png")


def test_missing_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'sketchssm\[plot\]'"):
        plots.error_against_traffic(RESULTS, tmp_path / "a.png")
