"""Pictures are written in both formats, and failures are reported."""

import sys

import numpy as np
import pytest

from sketchssm.layer.recurrence import FULL_STATE, ROUNDING
from sketchssm.study import figures, plots
from sketchssm.study.evaluate import LayerResults, Measurement
from sketchssm.study.evaluate.registry import FULL_METHOD

HEADER = {".png": b"\x89PNG", ".svg": b"<?xml"}


def system(name, reduction=5.0, error=0.1, ranks=None):
    """A made-up measurement with curves of eight points."""
    family, _, setting = name.partition("/")
    drift = {"tokens": list(range(1, 9)), "output_error": [error] * 8, "state_error": [error] * 8}
    heads = [[error], [error], [1 - error**2]]
    return Measurement(family, setting, reduction, "cpu", error, error, error, 1 - error**2, *heads, drift, ranks)


def layer_of(*systems, name="layer"):
    return LayerResults(name, "gdn", {"half_life": [5.0, None]}, "ridge", list(systems))


LAYER = layer_of(
    system("exact/standard", 1, 1e-7), system("exact/replay", 1.9, 1e-7), system("sketch/ridge-4", 12, 0.03),
    system("sketch/ridge-8", 10, 0.02), system("sketch/prior-8", 10, 0.02), system("quantised/dsq-6-bits"),
    system(f"ablation/{FULL_METHOD}", 10, 0.02), system("ablation/allocation-error", 10, 0.02, [4, 12]),
    name="a $x and $y",
)  # fmt: skip


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib")


@pytest.mark.parametrize(("suffix", "layers"), [(".png", [LAYER]), (".svg", [LAYER, layer_of(*LAYER.systems)])])
def test_pictures(suffix, layers, matplotlib, tmp_path):
    made = plots.draw(layers, tmp_path, suffix)
    assert set(made) == {
        "error-against-traffic", "retained-by-rank", "drift-of-outputs", "drift-of-states", "ranks",
    }  # fmt: skip
    for path in made.values():
        assert path.read_bytes().startswith(HEADER[suffix])
    if suffix == ".svg":
        assert "a $x and $y" in made["retained-by-rank"].read_text()  # no formula


def test_pictures_without_data_are_left_out(matplotlib, tmp_path):
    assert plots.draw([layer_of(system("exact/standard", 1, 1e-7))], tmp_path).keys() == set()


@pytest.fixture
def drawn(matplotlib, monkeypatch):
    """The figures that are saved, open."""
    found = []
    monkeypatch.setattr(plots, "save", lambda figure, path: found.append(figure))
    yield found
    matplotlib.pyplot.close("all")


def test_every_curve_has_its_own_look(drawn, tmp_path):
    names = [f"family-{i}/system-{'abcdefgh'[i % 8]}-{rank}" for i in range(24) for rank in (4, 8)]
    every = [system(name, 4 + i % 2, 0.1) for i, name in enumerate(["sketch/ridge-8", "sketch/prior-8", *names])]
    plots.draw([layer_of(system("exact/standard", 1, 1e-7), *every)], tmp_path)
    for figure, curves in zip(drawn, (27, 2, 24, 24), strict=False):
        looks = [
            (line.get_color(), line.get_marker()) for line in figure.axes[0].get_lines() if line.get_marker() != "None"
        ]
        assert len(set(looks)) == len(looks) == curves


@pytest.mark.parametrize("layers", [1, 5])
def test_nothing_is_cut_or_lies_over_another(layers, drawn, tmp_path):
    """The legend is within the picture and below all panels, which keep their size."""
    names = [f"family-{i}/a-system-with-a-long-name-{i}{'abcdefgh'[i % 8]}" for i in range(22)]
    plots.draw([layer_of(*LAYER.systems, *map(system, names), name=f"layer-{i}") for i in range(layers)], tmp_path)
    assert len(drawn) == 5
    for figure in drawn:
        figure.canvas.draw()
        assert figure.get_suptitle()
        whole, shown = figure.bbox, [axes for axes in figure.axes if axes.get_visible()]
        boxes = [axes.get_tightbbox() for axes in shown]
        boxes += [legend.get_window_extent() for legend in figure.legends] + [figure._suptitle.get_window_extent()]
        for i, box in enumerate(boxes):
            assert whole.x0 <= box.x0 <= box.x1 <= whole.x1 and whole.y0 <= box.y0 <= box.y1 <= whole.y1
            assert not any(box.overlaps(other) for other in boxes[:i])
        assert min(axes.bbox.height for axes in shown) > 100


def test_errors_of_rounding_are_drawn_on_the_line(drawn, tmp_path):
    plots.draw([LAYER], tmp_path)
    curves = {line.get_label(): list(line.get_ydata()) for line in drawn[0].axes[0].get_lines()}
    assert curves["exact/standard"] == curves["exact/replay"] == [ROUNDING]
    assert curves["sketch/ridge"] == [0.02, 0.03]
    for figure in (drawn[0], drawn[2], drawn[3]):
        assert "errors below 1e-05, float32 rounding, are drawn on the dotted line" in figure.get_suptitle()


def test_other_suffixes_are_refused(matplotlib, tmp_path):
    with pytest.raises(ValueError, match=r"expected a name that ends in \.png or \.svg, got 'a\.pdf'"):
        plots.rank_heatmap({"layer": np.array([1, 2])}, tmp_path / "a.pdf")
    with pytest.raises(ValueError, match=r"got 'b\.pdf'"):
        figures.check(tmp_path / "b.pdf")


def test_a_failed_picture_leaves_the_old_one(matplotlib, tmp_path, monkeypatch):
    path = plots.rank_heatmap({"layer": np.array([1, 2])}, tmp_path / "a.svg")
    before = path.read_bytes()
    savefig = matplotlib.figure.Figure.savefig

    def fail(figure, file, **settings):
        savefig(figure, file, **settings)
        raise OSError("disk full")

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        plots.rank_heatmap({"layer": np.array([2, 1])}, path)
    assert path.read_bytes() == before


def test_full_reads_stand_out(matplotlib, tmp_path):
    """Full-state heads have their own colour outside the scale of ranks."""
    from matplotlib.image import imread

    def share(ranks):
        pixels = imread(plots.rank_heatmap({"layer": np.array(ranks)}, tmp_path / "a.png"))[..., :3]
        vermilion = np.array([0xD5, 0x5E, 0x00]) / 255
        return (np.abs(pixels - vermilion) < 0.01).all(axis=-1).mean()

    assert share([1, 5, 4, 3]) == 0
    assert share([1, FULL_STATE, FULL_STATE, 3]) > 0.1


def test_no_ranks_no_picture(matplotlib, tmp_path):
    with pytest.raises(ValueError, match="ranks: expected at least one row"):
        plots.rank_heatmap({}, tmp_path / "a.png")


def test_missing_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for call in (figures.check, lambda: plots.draw([LAYER], tmp_path)):
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'sketchssm-decode\[plot\]'"):
            call()


@pytest.mark.parametrize(
    ("name", "curve"),
    [
        ("sketch/ridge-16", "sketch/ridge"),
        ("quantised/dsq-10-bits", "quantised/dsq"),
        ("pruned/ghost-37.5", "pruned/ghost"),
        ("read-only/4-bit-copy", "read-only/copy"),
        ("read-only/low-rank-read-8", "read-only/low-rank-read"),
        ("exact/standard", "exact/standard"),
    ],
)
def test_series(name, curve):
    assert plots.series(name) == curve
