"""The command line: an error of the user is one line with exit code 2, before any file is written."""

import numpy as np
from click.testing import CliRunner
from test_cli import SMALL, invoke
from test_traces import trace_entries, write_traces

from sketchssm.cli import main


def errors(tmp_path):
    """Wrong arguments, with a part of the message."""
    traces = write_traces(tmp_path / "good.npz", "gdn")
    other = write_traces(tmp_path / "other.npz", "kda")
    broken = tmp_path / "broken.npz"
    broken.write_bytes(b"not an archive")
    plan = tmp_path / "plan.safetensors"
    invoke("calibrate", traces, "--out", plan, "--mean-rank", 3, "--window", 8)
    out = tmp_path / "out.safetensors"
    entries = trace_entries("gdn")
    silent, narrow, few = (tmp_path / f"{name}.npz" for name in ("silent", "narrow", "few"))
    np.savez(silent, **entries | {name: 0 * x for name, x in entries.items() if name.endswith("_v")})
    np.savez(narrow, **entries | {name: x[..., :4] for name, x in entries.items() if name.endswith(("_q", "_k"))})
    np.savez(few, **entries | {"calib_grad": entries["calib_grad"][:, :12]})
    return {
        "missing traces": (["calibrate", tmp_path / "none.npz", "--out", out], "does not exist"),
        "broken traces": (["calibrate", broken, "--out", out], "expected an npz archive"),
        "too high a rank": (
            ["calibrate", traces, "--out", out, "--mean-rank", 500, "--method", "uniform"],
            "mean_rank: expected",
        ),
        "traces without a write, by name": (
            ["plan", traces, silent, "--error", 1, "--out", tmp_path],
            "silent: moments: ",
        ),
        "the same, compared": (["evaluate", traces, silent, *SMALL], "silent: moments: expected samples"),
        "rank beyond one of two layers": (
            ["evaluate", other, narrow, "--window", 8, "--systems", "ablation/full-method", "--mean-rank", 5],
            "narrow: mean_rank: expected 1 to 4",
        ),
        "no gradients": (
            ["calibrate", write_traces(tmp_path / "plain.npz", "gdn", grads=0), "--out", out, "--method", "gradient"],
            "needs gradients",
        ),
        "same name twice": (["calibrate", traces, traces, "--out", tmp_path / "plans"], "different names"),
        "no window but the first": (
            ["calibrate", traces, "--out", out, "--window", 40],
            "good: moments: expected",
        ),
        "no scored window but the first": (["calibrate", few, "--out", out], "scores: expected samples"),
        "plan over traces": (["calibrate", traces, "--out", traces], "--out: expected a separate file"),
        "report over traces": (
            ["calibrate", traces, "--out", out, "--json", traces],
            "--json: expected a separate file",
        ),
        "report over plan": (["calibrate", traces, "--out", out, "--json", out], "--json: expected a separate file"),
        "page over traces": (["evaluate", traces, "--report", traces], "--report: expected a separate file"),
        "results over traces": (["evaluate", traces, "--json", traces], "--json: expected a separate file"),
        "page over results": (
            ["evaluate", traces, "--json", out, "--report", out],
            "--json: expected a separate file",
        ),
        "results over a plan": (["evaluate", traces, "--plan", plan, "--json", plan], "--json: expected a separate"),
        "description over a plan": (["info", plan, "--json", plan], "--json: expected a separate file"),
        "times over a plan": (["bench", "--plan", plan, "--json", plan], "--json: expected a separate file"),
        "results into a folder": (["demo", "--json", tmp_path], "--json: expected a file, got the folder"),
        "no name": (["calibrate", traces, "--out", out, "--json", ""], "--json: expected a file, got the folder"),
        "picture over a plan": (
            ["plan", traces, "--error", 1, "--out", tmp_path / "p.svg", "--plots", tmp_path / "p.svg"],
            "--plots: expected a separate file",
        ),
        "picture of no format": (
            ["plan", traces, "--error", 1, "--out", out, "--plots", tmp_path / "p.pdf"],
            "--plots: expected a name that ends in .png or .svg",
        ),
        "plans of nothing": (["plan", "--error", 1, "--out", out], "TRACES: expected trace files"),
        "target without times": (["plan", traces, "--microseconds", 1, "--out", out], "expected --time-on"),
        "ridge that is no number": (
            ["plan", traces, "--error", 1, "--out", out, "--maps", "ridge:x"],
            "'--maps': expected a number after ridge:, got 'x'",
        ),
        "endless time": (["bench", "--seconds", "inf"], "'--seconds': expected a finite number, got 'inf'"),
        "time that is no number": (["bench", "--seconds", "nan"], "'--seconds': expected a finite number, got 'nan'"),
        "missing plan": (["info", tmp_path / "none.safetensors"], "none.safetensors"),
        "not a plan": (["info", broken], "not a whole safetensors file"),
        "plan of another layer": (["evaluate", other, "--plan", plan, *SMALL[2:]], "plan: expected one for"),
        "plan of another layer, among others": (
            ["evaluate", other, "--plan", plan, "--systems", "plan", *SMALL],
            "plan: expected one for",
        ),
        "one plan, two layers": (["evaluate", traces, other, "--plan", plan], "one trace file"),
        "settings of a plan": (["evaluate", traces, "--plan", plan, "--window", 4], "--window: has no effect"),
        "seed of no random basis": (
            ["evaluate", traces, "--window", 8, "--systems", "exact,sketch/ridge-*", "--ranks", 2, "--seed", 1],
            "--seed: has no effect without the systems random-basis",
        ),
        "ranks of no sketch": (["evaluate", traces, "--systems", "exact", "--ranks", 2], "--ranks: has no effect"),
        "rank of no ablation": (["evaluate", traces, "--systems", "sketch", "--mean-rank", 2], "--mean-rank: has no"),
        "map of no sketch": (["evaluate", traces, "--systems", "exact", "--map", "prior"], "--map: has no effect"),
        "format of nothing": (["evaluate", traces, "--format", "svg"], "--format: has no effect without --plots"),
        "shape of a plan": (["bench", "--plan", plan, "--shape", "qwen3-next"], "--shape: has no effect with --plan"),
        "plan to standard output": (["calibrate", traces, "--out", "-"], "--out: expected a file, got -; only --json"),
        "raw gates of no kda": (
            ["bench", "--shape", "qwen3-next", "--batch", 1, "--raw-gate"],
            "--raw-gate: has no effect without a layer of kda",
        ),
        "mean rank beyond the values": (
            ["bench", "--shape", "nemotron-3-super", "--batch", 1, "--rank", 65],
            "mean_ranks: expected at most 64 for nemotron-3-super, got 65",
        ),
        "largest rank below the shape's mean rank": (
            ["bench", "--shape", "nemotron-3-super", "--batch", 1, "--rank-max", 4],
            "rank_max: expected 5 (the mean rank) to 64 for nemotron-3-super, got 4",
        ),
        "rows that are not timed": (["demo", "--backend", "reference", "--rows", 4], "--rows: has no effect"),
        "pivots of no map": (["evaluate", traces, "--pivots", 2], "map 'ridge' has no pivots"),
        "too high a rank for all systems": (["evaluate", traces, "--mean-rank", 500], "mean_rank: expected 1 to"),
        "pictures nowhere": (["evaluate", traces, "--plots"], "--out FOLDER"),
        "no such system": (
            ["evaluate", traces, "--systems", "exact,ghosts"],
            "got 'ghosts'; there are exact (standard",
        ),
        "a system without its family": (
            ["evaluate", traces, "--systems", "replay"],
            "got 'replay'; did you mean exact/replay?",
        ),
        "another system of a family": (
            ["evaluate", traces, "--systems", "sketch/ridge-3", "--ranks", 2],
            "got 'sketch/ridge-3'; there are sketch (ridge-2, lowrank-2, prior-2, offline-2, random-basis-2)",
        ),
        "one name, two layers": (["evaluate", traces, traces], "different names"),
        "bad ranks": (["evaluate", traces, "--ranks", "2,x"], "positive integers"),
        "too long a window": (["evaluate", traces, "--window", 32], "two windows"),
    }


def test_errors_are_one_line_and_exit_code_2(tmp_path):
    for name, (arguments, message) in errors(tmp_path).items():
        result = invoke(*arguments, code=2)
        last = result.stderr.strip().splitlines()[-1]
        assert last.startswith("Error: "), name
        assert message in last, name
        assert "Traceback" not in result.output, name


def test_two_options_may_not_have_one_file(tmp_path, monkeypatch):
    """By any name of the file, before any work; the message has both options."""
    monkeypatch.chdir(tmp_path)
    write_traces(tmp_path / "a.npz", "gdn")
    write_traces(tmp_path / "b.npz", "gdn")
    plan, text, model = tmp_path / "plan", tmp_path / "text", tmp_path / "model"
    model.mkdir()
    for file in (plan, text):
        file.write_bytes(b"1")
    (tmp_path / "link").symlink_to(tmp_path / "new")
    (tmp_path / "other").symlink_to(tmp_path)
    find, of_model = ["plan", "a.npz", "--error", 1], ["--model", "model", "--text", "text"]
    pairs = [  # of options: the later one is refused
        (["evaluate", "a.npz", "--report", "new", "--out", "new"], "--report", "--out"),
        (["evaluate", "a.npz", "--out", "new", "--report", "link"], "--report", "--out"),
        (["evaluate", "a.npz", "--out", "r", "--report", "other/r/drift.csv"], "--report", "--out"),
        (["evaluate", "a.npz", "--out", "r", "--json", "r/../r/results.json"], "--json", "--out"),
        (["evaluate", "a.npz", "--out", "r", "--plots", "--report", "r/ranks.png"], "--report", "--out"),
        (["evaluate", "a.npz", "--json", "new", "--report", tmp_path / "new"], "--json", "--report"),
        (["evaluate", "a.npz", "--report", "new", "--json", "new/below"], "--json", "--report"),
        (["evaluate", "a.npz", "--plan", "plan", "--report", "other/plan"], "--report", "--plan"),
        (["evaluate", *of_model, "--plans", "plan", "--json", "plan"], "--json", "--plans"),
        (["calibrate", "a.npz", "--out", "other/a.npz"], "--out", "TRACES"),
        (["calibrate", "a.npz", "--out", "link", "--json", "new"], "--json", "--out"),
        (["calibrate", "a.npz", "b.npz", "--out", "new", "--json", "new"], "--json", "--out"),
        (["calibrate", *of_model, "--out", "text"], "--out", "--text"),
        ([*find, "--out", "new", "--json", "./new"], "--json", "--out"),
        ([*find, "--out", "p.svg", "--plots", "p.svg"], "--plots", "--out"),
        ([*find, "--out", "new", "--plots", "p.svg", "--json", "other/p.svg"], "--json", "--plots"),
        (["bench", "--plan", "plan", "--json", "plan"], "--json", "--plan"),
        (["demo", "--plots", "new", "--json", "link"], "--json", "--plots"),
        (["demo", "--plots", "new", "--json", "new/ranks.png"], "--json", "--plots"),
        (["info", "plan", "--json", "other/plan"], "--json", "PLAN"),
    ]
    before = sorted(tmp_path.iterdir())
    for arguments, refused, owner in pairs:
        message = invoke(*arguments, code=2).stderr.splitlines()[-1]
        assert message.startswith(f"Error: {refused}: expected a separate file, got "), (arguments, message)
        assert f": {owner} has " in message, (arguments, message)
    assert sorted(tmp_path.iterdir()) == before


def test_files_that_cannot_be_written(tmp_path, monkeypatch):
    """They are refused before the work whose results they would get."""
    traces = write_traces(tmp_path / "a.npz", "gdn")
    result = invoke("calibrate", traces, "--out", traces / "below", code=2)
    assert "--out: expected a separate file" in result.stderr
    (tmp_path / "file").touch()
    result = invoke("evaluate", traces, "--out", tmp_path / "file" / "below", code=2)
    assert f"--out: expected a file in a folder, got {tmp_path / 'file' / 'below'}" in result.stderr
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    for option in ("--out", "--json", "--report"):
        result = invoke("evaluate", traces, option, tmp_path / "new" / "below", code=2)
        assert f"{option}: expected a folder that can be written, got {tmp_path / 'new'}" in result.stderr


def test_refused_outputs_leave_their_files(tmp_path):
    traces = write_traces(tmp_path / "layer3.npz", "gdn")
    before = traces.read_bytes()
    for option in ("--report", "--json"):
        invoke("evaluate", traces, "--systems", "exact", option, traces, code=2)
    assert traces.read_bytes() == before


def test_bugs_keep_their_traceback(monkeypatch):
    """Only errors about the caller's input become one line."""
    monkeypatch.setattr("sketchssm.study.bench.cases.copy_bandwidth", lambda: {}["bug"])
    result = CliRunner().invoke(main, ["bench"])
    assert isinstance(result.exception, KeyError)
