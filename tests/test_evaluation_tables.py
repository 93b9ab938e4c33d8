"""Tables of an evaluation, from results made up for the purpose."""

from dataclasses import replace

from sketchssm.study.evaluate import LayerResults, Measurement, tables
from sketchssm.study.evaluate.registry import FULL_METHOD


def system(name, reduction=5.0, error=0.1, ranks=None):
    """A made-up measurement with curves of eight points."""
    family, _, setting = name.partition("/")
    drift = {"tokens": list(range(1, 9)), "output_error": [error] * 8, "state_error": [error] * 8}
    heads = [[error], [error], [1 - error**2]]
    return Measurement(family, setting, reduction, "cpu", error, error, error, 1 - error**2, *heads, drift, ranks)


def layer_of(*systems, name="layer"):
    return LayerResults(name, "gdn", {"half_life": [5.0, None]}, "ridge", list(systems))


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
