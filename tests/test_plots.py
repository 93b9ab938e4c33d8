"""Pictures and tables of an evaluation, from results made up for the purpose."""

from dataclasses import replace

import pytest

from sketchssm.layer.recurrence import ROUNDING
from sketchssm.study import plots
from sketchssm.study.evaluate import LayerResults, Measurement, tables
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
    system("sketch/ridge-8", 10, 0.02), system("sketch/lowrank-8", 10, 0.02), system("quantised/dsq-6-bits"),
    system(f"ablation/{FULL_METHOD}", 10, 0.02), system("ablation/allocation-error", 10, 0.02, [4, 12]),
    name="a $x and $y",
)  # fmt: skip


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib")


@pytest.mark.parametrize(("suffix", "layers"), [(".png", [LAYER]), (".svg", [LAYER, layer_of(*LAYER.systems)])])
def test_pictures(suffix, layers, matplotlib, tmp_path):
    made = plots.draw(layers, tmp_path, suffix)
    assert set(made) == {"error-against-traffic", "drift-of-outputs", "drift-of-states"}
    for path in made.values():
        assert path.read_bytes().startswith(HEADER[suffix])
    if suffix == ".svg":
        assert "a $x and $y" in made["drift-of-states"].read_text()  # no formula


def test_pictures_without_data_are_left_out(matplotlib, tmp_path):
    assert plots.draw([layer_of(system("exact/standard", 1, 1e-7))], tmp_path).keys() == set()


@pytest.fixture
def drawn(matplotlib, monkeypatch):
    """The figures that are saved, open."""
    found = []
    monkeypatch.setattr(plots, "save", lambda figure, path: found.append(figure))
    yield found
    matplotlib.pyplot.close("all")


def test_errors_of_rounding_are_drawn_on_the_line(drawn, tmp_path):
    plots.draw([LAYER], tmp_path)
    curves = {line.get_label(): list(line.get_ydata()) for line in drawn[0].axes[0].get_lines()}
    assert curves["exact/standard"] == curves["exact/replay"] == [ROUNDING]
    assert curves["sketch/ridge"] == [0.02, 0.03]
    for figure in drawn:
        assert "errors below 1e-05, float32 rounding, are drawn on the dotted line" in figure.get_suptitle()


def test_a_failed_picture_leaves_the_old_one(matplotlib, tmp_path, monkeypatch):
    path = plots.draw([LAYER], tmp_path, ".svg")["drift-of-states"]
    before = path.read_bytes()
    savefig = matplotlib.figure.Figure.savefig

    def fail(figure, file, **settings):
        savefig(figure, file, **settings)
        raise OSError("disk full")

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        plots.draw([LAYER], tmp_path, ".svg")
    assert path.read_bytes() == before


STANDARD, SKETCH = system("exact/standard", 1, 1e-7), system("sketch/ridge-8", 10.25, 0.02)
BASE = replace(system(f"ablation/{FULL_METHOD}", 10, 0.02), retained=0.98)
RANDOM = replace(system("ablation/random-basis", 10, 0.05), retained=0.93)


def test_systems_side_by_side():
    """One column per layer, a dash where a layer lacks a system, a rule between families."""
    table = tables.systems([layer_of(STANDARD, SKETCH, name="a"), layer_of(STANDARD, name="b")])
    assert table.columns == ["system", "a", "b"]
    assert table.rows == [
        ["exact/standard", "1.0e-07 @1.00x", "1.0e-07 @1.00x"],
        [],
        ["sketch/ridge-8", "2.0e-02 @10.25x", "-"],
    ]


def test_ablations_are_held_against_the_full_method():
    """Layers without the full method are left out; an error where the base has none has no ratio."""
    exact = replace(BASE, output_error=0.0)
    layers = [layer_of(BASE, RANDOM, name="a"), layer_of(RANDOM, name="b"), layer_of(exact, RANDOM, name="c")]
    table = tables.ablations([*layers, layer_of(BASE, name="d")])
    assert table.columns == ["replaced", "a", "c", "d"]
    assert table.rows == [["random-basis", "2.50x +5.0", "- +5.0", "-"]]
