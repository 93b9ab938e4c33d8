"""What an evaluation concludes, from results made up for the purpose."""

import math
from dataclasses import replace

import pytest

from sketchssm.cli import page
from sketchssm.cli.comparison import show_evaluation
from sketchssm.cli.output import Output
from sketchssm.evaluate import pictures
from sketchssm.evaluate.claims import claims
from sketchssm.evaluate.evaluation import Evaluation, LayerResults
from sketchssm.evaluate.findings import ablations, growth, headline, times
from sketchssm.evaluate.measure import Measurement
from sketchssm.evaluate.reasons import UNKNOWN
from sketchssm.evaluate.registry import FULL


def system(name, reduction, error, output=(), state=(), retained=1.0, objective=None):
    family, _, setting = name.partition("/")
    output = output or [error]
    state = state or [0.0] * len(output)
    drift = {"tokens": list(range(1, len(output) + 1)), "output_error": output, "state_error": state}
    heads = ([error], [state[-1]], [retained])
    return Measurement(
        family, setting, reduction, "cpu", error, state[-1], retained, *heads, drift, objective=objective
    )


def layer_of(*systems):
    return LayerResults(
        "layer",
        "gdn",
        {"half_life": [5.0, None], "test_tokens": 80, "read_share": [0.5, 0.5]},
        "ridge",
        list(systems),
        [],
    )


def test_headline_takes_the_worst_sketch_and_the_best_rival():
    layer = layer_of(
        system("sketch/ridge-8", 10.5, 0.02), system("sketch/ridge-12", 9.1, 0.01), system("sketch/ridge-2", 14, 0.09),
        system("sketch/prior-8", 10.0, 0.5), system("quantised/dsq-6-bits", 5.1, 0.06),
        system("quantised/dsq-8-bits", 3.9, 0.001), system("pruned/ghost-75", 4.0, 0.05),
        system("read-only/4-bit-copy", 8.0, 0.001),
    )  # fmt: skip
    found = headline(layer)
    assert [s.name for s in found.sketches] == ["sketch/ridge-8", "sketch/ridge-12"]
    assert found.rival.name == "pruned/ghost-75"
    assert found.margin == pytest.approx(2.5)
    assert headline(layer_of()).margin is None


def test_ablations_are_held_against_the_full_method():
    layer = layer_of(
        system(f"ablation/{FULL}", 10, 0.02, retained=0.98), system("ablation/random-basis", 10, 0.05, retained=0.93)
    )
    [found] = ablations(layer)
    assert (found.setting, found.error, found.retained) == ("random-basis", pytest.approx(2.5), pytest.approx(0.05))
    assert ablations(layer_of(system("ablation/random-basis", 10, 0.05))) == []


def test_growth_is_of_quarters():
    grown = system("quantised/dsq-6-bits", 5, 0.1, [0.1, 0.1, 0.2, 0.2, 0.2, 0.2, 0.3, 0.3], [0.01] * 8)
    steady = system("sketch/ridge-8", 10, 0.02, [0.02] * 8, [1e-7] * 8)
    first, second = growth(layer_of(), [grown, steady])
    assert (first.output, first.state) == (pytest.approx(3), pytest.approx(1))
    assert (second.output, second.state) == (pytest.approx(1), None)
    assert growth(layer_of(), [system("sketch/ridge-8", 10, 0.02)]) == []


def test_claims_hold_or_say_where_they_do_not():
    base = [
        system("sketch/ridge-8", 10, 0.02, [0.02] * 8, [1e-7] * 8),
        system("quantised/dsq-6-bits", 5, 0.1, [0.1] * 8, [0.1] * 4 + [0.2] * 4),
        system(f"ablation/{FULL}", 10, 0.02),
        system("ablation/allocation-gradient", 10, 0.02, objective=1.0),
    ]
    good = layer_of(*base, system("ablation/allocation-uniform", 10, 0.03, objective=2.0))
    assert all(claim.holds for claim in claims([good]))
    said = [claim.says for claim in claims([good])]
    assert len(said) == len(set(said)) == 4
    bad = layer_of(*base, system("ablation/allocation-uniform", 10, 0.01, objective=2.0))
    [differing] = [claim for claim in claims([bad]) if not claim.holds]
    assert "uniform" in differing.says
    good, said = differing.layers["layer"]
    assert not good
    assert said.startswith("0.50x the output error, 2.00x the gradient-weighted score")
    assert "what the model's loss feels" in differing.reason


def copies(bound, found, same, lost, name="layer"):
    """A layer where a copy that loses 0.1 % of what is read beats a sketch, and what sketches could lose at best."""
    layer = layer_of(
        system("sketch/ridge-16", 8.0, 0.05, retained=1 - lost),
        system("read-only/4-bit-copy", 8.0, 0.03, retained=0.999),
    )
    least = {"4-bit-copy": {"bound": bound, "found": found, "ranks": [37], "test_basis": bound / 2}}
    ideal = {"share": [1.0], "same_ranks": {"ridge-16": same}, "least": least}
    return replace(layer, name=name, facts=layer.facts | {"ideal": ideal})


BASIS = (0.002, 0.0021, 0.003, 0.004)
NOTHING = (0.0005, 0.0006, 0.0008, 0.0009)


@pytest.mark.parametrize(
    ("losses", "found"),
    [
        (BASIS, "neither map nor ranks"),
        ((0.0005, 0.0006, 0.003, 0.004), "the ranks"),
        ((0.0005, 0.0015, 0.003, 0.004), UNKNOWN),
        ((0.0005, 0.0006, 0.0008, 0.004), "the map"),
        (NOTHING, UNKNOWN),
    ],
)
def test_why_a_copy_wins_is_tested(losses, found):
    """Basis, ranks or map, by which of them alone is enough to lose more than the copy does."""
    [claim] = claims([copies(*losses)])
    assert found in claim.reason
    head = "Head 0, with 100% of that energy and gates that halve in 5 tokens, makes 100% of the sketch's loss."
    assert (head in claim.reason) == (losses is BASIS)


def test_a_reason_of_one_layer_is_not_said_of_another():
    [claim] = claims([copies(*BASIS, name="tested"), copies(*NOTHING, name="untested")])
    assert claim.reason.startswith("tested, 4-bit-copy: neither map nor ranks.")
    assert claim.reason.endswith(f"untested, 4-bit-copy: {UNKNOWN}")


def test_why_a_copy_wins_is_not_made_up():
    [claim] = claims([layer_of(system("sketch/ridge-16", 8.0, 0.05), system("read-only/4-bit-copy", 8.0, 0.03))])
    assert claim.reason == UNKNOWN


def test_terminal_and_page_say_that_a_reason_is_not_known(capsys):
    layer = layer_of(system("sketch/ridge-16", 8.0, 0.05), system("read-only/4-bit-copy", 8.0, 0.03))
    show_evaluation(Output(None), Evaluation({}, [layer]))
    [_, said] = capsys.readouterr().out.split("differ from the paper:")
    assert "not layer: sketch/ridge-16" in said
    assert said.rstrip().endswith(UNKNOWN)
    [claim] = claims([layer])
    assert f"Not on all layers. {UNKNOWN}<ul><li>not layer: sketch/ridge-16" in page._differing(claim)


def test_curves_over_tokens_look_different(monkeypatch, tmp_path):
    """The exact systems, which that picture leaves out, take no look from the others, of which there are seven."""
    pytest.importorskip("matplotlib")
    seen = []
    monkeypatch.setattr(pictures, "_finish", lambda figure, axes, *rest: seen.extend(axes[0].get_lines()))
    names = ("quantised/dsq-6-bits", "pruned/ghost-75.0", "key-reduced/drrqr-75.0", "read-only/4-bit-copy")
    lossy = [
        f"ablation/{FULL}",
        "sketch/ridge-8",
        *names,
        "read-only/low-rank-read-16",
        "quantised/dsq-4-bits-with-feedback",
    ]
    systems = [system(name, 5.0, 0.1, [0.1] * 8, [0.1] * 8) for name in ("exact/standard", "exact/replay-16", *lossy)]
    pictures._drift([layer_of(*systems)], tmp_path / "drift.png", "output_error", "outputs")
    assert len({(line.get_color(), line.get_marker()) for line in seen}) == len(seen) == 7


@pytest.mark.parametrize(
    ("kind", "kept", "found"),
    [
        ("mamba2", [1e-7] * 8, "exact to float32 rounding"),
        ("mamba2", [0.1] * 8, UNKNOWN),
        ("gdn", [0.1] * 8, "in the last quarter 1.00x to 1.00x"),
        ("kda", [0.1] * 4 + [0.3] * 4, UNKNOWN),
        ("kda", [], UNKNOWN),
    ],
)
def test_why_errors_of_pruned_states_stay_is_tested(kind, kept, found):
    pruned = system("pruned/ghost-75.0", 4.0, 0.2, [0.2] * 8, [0.2] * 8)
    if kept:
        pruned.drift["kept_error"] = kept
    [claim] = claims([replace(layer_of(pruned), kind=kind)])
    assert found in claim.reason


@pytest.mark.parametrize(
    ("left", "found"),
    [([0.6, 0.4], "40% to 40% is left at its end"), ([0.9, 0.8], "is not known"), ([], "is not known")],
)
def test_that_errors_of_kept_channels_go_away_is_tested(left, found):
    pruned = system("pruned/ghost-75.0", 4.0, 0.2, [0.2] * 8, [0.2] * 8)
    pruned.drift.update(kept_error=[0.1] * 8, left_error=left)
    [claim] = claims([replace(layer_of(pruned), kind="kda")])
    assert found in claim.reason


def test_why_errors_of_pruned_states_stay_is_said_once_per_group():
    layers = []
    for name, kind, kept in (("a", "mamba2", 1e-7), ("b", "kda", 0.1), ("c", "mamba2", 1e-8), ("d", "mamba2", 0.1)):
        pruned = system("pruned/ghost-75.0", 4.0, 0.2, [0.2] * 8, [0.2] * 8)
        pruned.drift["kept_error"] = [kept] * 8
        layers.append(replace(layer_of(pruned), name=name, kind=kind))
    [claim] = claims(layers)
    assert claim.reason.startswith("a, c: the states of kept channels are exact")
    assert " b: erasure couples channels, and the states of kept ones err by up to 1.0e-01" in claim.reason
    assert claim.reason.endswith(f"d: {UNKNOWN}")


def test_the_same_ranks_say_nothing_of_methods():
    same = [replace(system(f"ablation/allocation-{m}", 10, 0.02), ranks=[8, 8]) for m in ("gradient", "error")]
    assert claims([layer_of(*same)]) == []
    other = replace(same[1], ranks=[4, 12], output_error=0.03)
    assert [claim.holds for claim in claims([layer_of(same[0], other)])] == [True]


@pytest.mark.parametrize(("growth", "found"), [(1.0, "forgets its errors"), (2.0, UNKNOWN)])
def test_forgetting_is_a_reason_only_where_errors_do_not_add_up(growth, found):
    rival = system("quantised/dsq-6-bits", 5, 0.01, [0.01] * 6 + [0.01 * growth] * 2, [0.01] * 8)
    layer = layer_of(system("sketch/ridge-8", 10, 0.02, [0.02] * 8, [1e-7] * 8), rival)
    layer.facts["half_life"] = [5.0]
    [claim] = [c for c in claims([layer]) if c.says.startswith("At 9x to 11x")]
    assert not claim.holds
    assert found in claim.reason


def test_times():
    assert times(1.0, 0.5) == 2
    assert times(0.0, 0.0) == times(math.inf, math.inf) == 1
    assert times(1.0, 0.0) == times(math.inf, 1.0) == math.inf
    assert times(1.0, math.inf) == 0
