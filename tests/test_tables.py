"""The tables of an evaluation, from results made up for the purpose."""

from dataclasses import replace

import pytest
from test_plots import layer_of, system

from sketchssm.cli.output import Output
from sketchssm.study.evaluate import tables
from sketchssm.study.evaluate.registry import FULL_METHOD

SIDE_BY_SIDE = "Systems: output error @ traffic reduction"
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


def test_details():
    found = replace(SKETCH, flush_error=1e-7, state_error=0.0, retained=0.97654)
    table = tables.details([layer_of(STANDARD, found, name="a"), layer_of(STANDARD, name="b")])
    assert len(table.columns) == 7
    assert table.rows[2] == ["a", "sketch/ridge-8", "10.25x", "2.0e-02", "1.0e-07", "0", "97.65%"]
    assert [bool(row) for row in table.rows] == [True, False, True, False, True]


def test_times_beside_details():
    times = {("a", "exact/standard"): 30.0, ("a", "sketch/ridge-8"): 7.5}
    table = tables.details([layer_of(STANDARD, SKETCH, system("exact/replay"), name="a")], times)
    assert table.columns[-2:] == ["us/token", "speed"]
    assert [row[-2:] for row in table.rows if row] == [["30.00", "1.00x"], ["-", "-"], ["7.50", "4.00x"]]


def test_ablations_are_held_against_the_full_method():
    """Layers without the full method are left out; an error where the base has none has no ratio."""
    exact = replace(BASE, output_error=0.0)
    layers = [layer_of(BASE, RANDOM, name="a"), layer_of(RANDOM, name="b"), layer_of(exact, RANDOM, name="c")]
    table = tables.ablations([*layers, layer_of(BASE, name="d")])
    assert table.columns == ["replaced", "a", "c", "d"]
    assert table.rows == [["random-basis", "2.50x +5.0", "- +5.0", "-"]]


@pytest.mark.parametrize(("layers", "titles"), [(1, ["Systems"]), (5, [SIDE_BY_SIDE] * 2)])
def test_many_layers_are_shown_in_parts(layers, titles, capsys):
    """Details of one layer, else tables of up to four layers; tables without rows are left out."""
    for table in tables.all_tables([layer_of(STANDARD, name=f"layer-{i}") for i in range(layers)]):
        Output(None).table(*table)
    shown = capsys.readouterr().out
    assert [line.strip() for line in shown.splitlines() if line.startswith("Systems")] == titles
    assert "Ablations" not in shown
    both = tables.all_tables([layer_of(BASE, RANDOM)])
    assert [table.title.partition(":")[0] for table in both] == ["Systems", "Ablations"]
