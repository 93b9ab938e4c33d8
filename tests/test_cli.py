"""The command line: every command on small traces."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from samples import fingerprints
from test_traces import SHAPES, write_traces

import sketchssm as ss
from sketchssm import cuda
from sketchssm.calibrate.plans import calibrate
from sketchssm.calibrate.traces import SHIPPED, Traces
from sketchssm.cli import COMMANDS, main
from sketchssm.cli.output import Output
from sketchssm.layer.coefficients import CoefficientMap
from sketchssm.layer.recurrence import Layer
from sketchssm.plans.model_plans import AllocationSummary, LayerFingerprint, ModelFingerprint, ModelPlans, load_plans
from sketchssm.plans.plan import SketchPlan
from sketchssm.study import bench
from sketchssm.study.tables import ranks_text

SMALL = ["--window", "8", "--backend", "reference"]


def invoke(*arguments, code=0):
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


def test_characters_that_the_terminal_lacks(monkeypatch):
    """They must not end a command whose results are not written yet."""
    for encoding, want in (("ascii", b"\\xb1 \\xf6"), ("latin-1", b"\xb1 \xf6"), ("utf-8", "± ö".encode())):
        whole = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(whole, encoding=encoding))
        output = Output(None)
        output.table("title", ["± ö"], [["\udcff"]])  # a file's name that is no UTF-8 has such characters
        sys.stdout.flush()
        assert want in whole.getvalue()


@pytest.mark.parametrize("name", ["q[red].st", "[/b]", "a:smile:b", "end\\"])
def test_text_of_the_user_is_printed_as_it_is(name, capsys):
    """Names and paths are not interpreted as markup."""
    output = Output(None)
    output.say(name)
    output.table(name, [name, "x"], [[name, name]])
    assert capsys.readouterr().out.count(name) == 5
    with output.progress(name, 1) as step:
        step(name)
        output.console.print(step._progress.get_renderable())
    assert name in capsys.readouterr().out


def test_a_slash_ends_a_folder_of_plans(traces, tmp_path):
    for out, want in (("plans/", "plans/layer3.safetensors"), ("plans", "plans/layer3.safetensors"), ("one", "one")):
        invoke("calibrate", traces, "--out", f"{tmp_path}/{out}", "--mean-rank", 3, "--window", 8)
        assert SketchPlan.load(tmp_path / want).window == 8


@pytest.mark.parametrize("quiet, lines", [(60.0, ""), (-1.0, "one (0 of 2 steps done)\ntwo (1 of 2 steps done)\n")])
def test_long_steps_tell_a_log(quiet, lines, monkeypatch, capsys):
    monkeypatch.setattr("sketchssm.cli.output.QUIET", quiet)
    with Output(None).progress("work", 2) as step:
        step("one")
        step("two")
    assert capsys.readouterr().err == lines


@pytest.fixture
def traces(tmp_path):
    return write_traces(tmp_path / "layer3.npz", "gdn")


def test_help_is_instant():
    """`--help` imports no heavy packages."""
    script = (
        "import sys; from sketchssm.cli import main; main(['--help'], standalone_mode=False)\n"
        "assert not {'numpy', 'numba', 'rich', 'scipy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in COMMANDS)


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "sketchssm", "info", "none"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 2 and "Error: plans: expected a file" in done.stderr


def test_calibrate_then_evaluate(traces, tmp_path):
    plan_file = tmp_path / "plan.safetensors"
    settings = ["--mean-rank", 3, "--window", 8, "--map", "ridge", "--ridge", 0.02]
    result = invoke("calibrate", traces, "--out", plan_file, *settings, "--json", "-")
    report = json.loads(result.stdout)
    plan = SketchPlan.load(plan_file)
    assert (plan.window, plan.map) == (8, CoefficientMap("ridge", ridge=0.02))
    assert report["plans"][0]["ranks"] == plan.ranks.tolist()
    assert report["method"] == "gradient"

    measured = json.loads(
        invoke("evaluate", traces, "--plan", plan_file, "--backend", "reference", "--json", "-").stdout
    )
    systems = measured["layers"][0]["systems"]
    assert [system["setting"] for system in systems] == ["standard", "replay", "given"]
    assert systems[2]["reduction"] == pytest.approx(report["reduction"], rel=1e-5)
    assert systems[1]["reduction"] == pytest.approx(2 / (1 + 1 / 8), rel=1e-5)  # the window of the plan


def test_calibrate_with_residuals(traces, tmp_path):
    """Ranks and bits from the joint allocation, by traffic or by the bytes of a mean rank."""
    plan_file = tmp_path / "plan.safetensors"
    given = "calibrate", traces, "--out", plan_file, "--window", 8, "--json", "-"
    calibrated = calibrate(Traces.load(traces), 8)
    result = invoke(*given, "--reduction", 3.2)
    report = json.loads(result.stdout)
    plan, want = ss.SketchPlan.load(plan_file), ss.allocate_joint(calibrated.joint(), 3.2)
    assert np.array_equal(plan.ranks, want.ranks) and np.array_equal(plan.residual_bits, want.residual_bits)
    assert (plan.map.name, plan.sketch_dtype, report["method"]) == ("subspace", "int8", want.method)
    assert report["plans"][0]["residual_bits"] == plan.residual_bits.tolist()
    assert plan.reduction == pytest.approx(report["reduction"]) and plan.reduction >= 3.2 * (1 - 1e-9)
    assert (plan.ranks.tolist(), plan.residual_bits.tolist()) == ([-1, 1, 2, -1], [0, 3, 3, 0])
    assert " full 1+3 2+3 full " in result.stderr
    assert " of full reads (" in invoke(*given, "--reduction", 1).stderr
    same = calibrated.plan(2, "subspace", residual_bits=3, sketch_dtype="int8")
    invoke(*given, "--mean-rank", 2, "--residual-bits", 3)
    assert ss.SketchPlan.load(plan_file).fingerprint == same.fingerprint
    even = ss.SketchPlan(calibrated.basis, [2] * plan.layer.heads, 8, "subspace", "int8", 3)
    invoke(*given, "--mean-rank", 2, "--residual-bits", 3, "--method", "uniform")
    assert ss.SketchPlan.load(plan_file).fingerprint == even.fingerprint
    assert "reduction: expected at most" in invoke(*given, "--reduction", 90, code=2).stderr


@pytest.mark.parametrize(("bits", "told"), [([1, 0, 3], ", with 1 to 3 bits"), ([0, 0, 0], "")])
def test_ranks_of_many_heads_are_summed_up(bits, told):
    ranks, bits = np.resize([1, ss.FULL_STATE, 3], 24), np.resize(bits, 24)
    assert ranks_text(ranks, bits) == f"1 to 3, mean 2.00{told}; 8 full"


def test_calibrate_limits_ranks_to_those_of_cuda(tmp_path):
    layer = Layer("gdn", 1, 128, 128)
    traces, plan = write_traces(tmp_path / "layer.npz", "gdn", layer=layer), tmp_path / "plan.safetensors"
    settings = ["--window", 8, "--method", "uniform", "--mean-rank"]
    refused = invoke("calibrate", traces, "--out", plan, *settings, 20, code=2)
    assert "mean_rank: expected at most 16 for a uniform rank, got 20" in " ".join(refused.output.split())
    first = invoke("calibrate", traces, "--out", plan, "--method", "uniform", "--rank-max", 5, code=2)
    assert "layer: mean_rank: expected at most 5 for a uniform rank, got 7" in " ".join(first.stderr.split())
    invoke("calibrate", traces, "--out", plan, *settings, 16)
    assert SketchPlan.load(plan).ranks.tolist() == [16]


def test_several_layers_share_a_budget(tmp_path):
    files = [write_traces(tmp_path / f"layer{i}.npz", "kda", seed=i) for i in range(2)]
    report = json.loads(
        invoke("calibrate", *files, "--out", tmp_path / "plans", "--mean-rank", 3, "--window", 8, "--json", "-").stdout
    )
    plans = {name: SketchPlan.load(tmp_path / "plans" / f"{name}.safetensors") for name in ("layer0", "layer1")}
    ranks = [plan.ranks.tolist() for plan in plans.values()]
    assert [entry["ranks"] for entry in report["plans"]] == ranks
    # the folder, and a file of all plans, serve every command
    layers = {name: LayerFingerprint("Kda", plan.layer, "") for name, plan in plans.items()}
    made = AllocationSummary(3.0, "gradient", 0.0, dict.fromkeys(plans, 1.0), 100)
    whole = tmp_path / "plans.safetensors"
    ModelPlans(plans, ModelFingerprint("Model", layers), made).save(whole)
    for place in (tmp_path / "plans", whole):
        assert fingerprints(load_plans(place)) == fingerprints(plans)
        for some in (files, files[1:]):
            found = json.loads(invoke("evaluate", *some, "--plan", place, *SMALL[2:], "--json", "-").stdout)
            own = [layer["systems"][-1] for layer in found["layers"]]
            assert [(system["family"], system["ranks"]) for system in own] == [
                ("plan", x) for x in ranks[-len(some) :]
            ]
        timed = ["--batch", 1, "--backend", "reference", "--seconds", 0, "--json", "-"]
        results = json.loads(invoke("bench", "--plan", place, *timed).stdout)["results"]
        assert [result["shape"] for result in results] == ["layer0"] * 3 + ["layer1"] * 3
        described = json.loads(invoke("info", place, "--json", "-").stdout)
        assert [layer["ranks"] for layer in described["layers"].values()] == ranks
    with pytest.raises(
        ValueError, match=r"expected format 'sketchssm-plan', .*model-plans': ModelPlans.load reads it"
    ):
        SketchPlan.load(whole)


def test_evaluate_compares_everything(traces, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    other = write_traces(tmp_path / "layer7.npz", "kda")
    arguments = ["--ranks", "1,4", "--mean-rank", 2, "--every", 8, *SMALL, "--out", out, "--plots"]
    result = invoke("evaluate", traces, other, *arguments)
    for title in ("Systems: output error", "Ablations: output error relative to the full method's"):
        assert title in result.output
    layers = json.loads((out / "results.json").read_text())["layers"]
    assert [layer["kind"] for layer in layers] == ["gdn", "kda"]
    assert {path.name for path in out.glob("*.*")} == {
        *("results.json", "error-against-traffic.png", "drift-of-outputs.png", "drift-of-states.png"),
    }


def test_evaluate_repeats_to_the_byte(traces, tmp_path):
    """Another run gives the same file."""
    few = ["--systems", "exact,sketch/ridge-*,quantised/dsq-6-bits", "--systems", "ablation/allocation-*"]
    few += ["--ranks", "2,4", "--mean-rank", 3, "--every", 16, "--window", 8, "--backend", "cpu"]
    for out in ("one", "two"):
        invoke("evaluate", traces, *few, "--out", tmp_path / out)
    one, two = ((tmp_path / out / "results.json").read_bytes() for out in ("one", "two"))
    assert one == two


@pytest.mark.slow
def test_demo(tmp_path):
    file = tmp_path / "demo.json"
    result = invoke("demo", "--backend", "reference", "--ranks", "4,8", "--json", file)
    assert "Ablations" in result.output
    report = json.loads(file.read_text())
    assert [layer["kind"] for layer in report["layers"]] == list(SHIPPED)
    for layer in report["layers"]:
        systems = {system["setting"]: system for system in layer["systems"]}
        assert all(system["flush_error"] < 1e-6 and system["state_error"] < 1e-9 for system in systems.values())
        wide, narrow = systems["ridge-8"], systems["ridge-4"]
        assert narrow["reduction"] > wide["reduction"] > 9
        assert narrow["output_error"] > wide["output_error"] > 0
    # the README shows the table of the cpu backend, which agrees with float64 to the digits of the sketches' rows,
    # but for one in the last digit of `retained`
    readme = (Path(__file__).parents[1] / "README.md").read_text().replace("|", " ")
    rows = [
        [line.split() for line in text.splitlines() if re.search(r" sketch/ridge-| residual/4\+2-bit", line)]
        for text in (result.output, readme)
    ]
    shown, written = ({tuple(row[:4]): float(row[-1].rstrip("%")) for row in own} for own in rows)
    assert len(shown) == 9 and shown == pytest.approx(written, abs=0.011)


def test_missing_matplotlib_is_said_before_any_work(traces, monkeypatch, tmp_path):
    def refuse(*arguments, **settings):
        raise AssertionError("worked")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("sketchssm.calibrate.traces.Traces.load", refuse)
    result = invoke("evaluate", "--out", "x", "--plots", traces, code=2)
    assert "pip install 'sketchssm-decode[plot]'" in result.output
    assert {path.name for path in tmp_path.iterdir()} == {traces.name}


def test_bench(monkeypatch):
    monkeypatch.setattr(bench, "SHAPES", SHAPES)
    monkeypatch.setattr("sketchssm.study.bench.cases.copy_bandwidth", lambda: 1e10)
    arguments = ["--shape", "kda", "--batch", "1,2", "--window", "4", "--rank", "3"]
    arguments += ["--backend", "reference", "--seconds", "0", "--json", "-"]
    result = invoke("bench", *arguments, "--map", "lowrank", "--map", "ridge")
    results = json.loads(result.stdout)["results"]
    assert len(results) == 2 * 4
    assert all(entry["error"] == 0 and entry["fraction"] > 0 for entry in results)
    narrow = ["--map", "ridge", "--sketch-dtype", "float32", "--sketch-dtype", "int8"]
    result = invoke("bench", *arguments, *narrow)
    wide, coded = (r for r in json.loads(result.stdout)["results"] if r["batch"] == 1 and "sketch" in r["system"])
    assert wide["system"].endswith(" ridge float32")
    assert coded["system"].endswith(" ridge int8")
    assert coded["bytes"] < wide["bytes"]
    result = invoke("bench", *arguments, "--map", "subspace", "--map", "ridge", "--residual-bits", "2")
    kept, pure = (r for r in json.loads(result.stdout)["results"] if r["batch"] == 1 and "sketch" in r["system"])
    assert kept["system"].endswith(" subspace + 2 bits")
    assert pure["system"].endswith(" ridge")
    assert kept["read_bytes"] > pure["read_bytes"]
    assert "invalid value" in invoke("bench", "--shape", "nemotron", code=2).output.lower()


def test_info(traces, tmp_path):
    report = json.loads(invoke("info", "--json", "-").stdout)
    assert report["packages"]["numpy"] == np.__version__
    lack = cuda.missing()  # without a usable GPU the report says why
    assert report["backends"] == ["reference", "cpu", *([] if lack else ["cuda"])]
    assert report["cuda"] == (lack or "usable")
    invoke("calibrate", traces, "--out", tmp_path / "plan.safetensors", "--mean-rank", 3, "--window", 8)
    described = json.loads(invoke("info", tmp_path / "plan.safetensors", "--json", "-").stdout)
    assert (described["kind"], described["window"]) == ("gdn", 8)
    assert len(described["ranks"]) == 4
    assert described["reduction"] > 1
    assert described["residual_bits"] == [0] * 4
    invoke("info", "--json", tmp_path / "new" / "info.json")
    assert json.loads((tmp_path / "new" / "info.json").read_text()) == report
