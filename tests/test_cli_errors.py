"""The command line: an error of the user is one line with exit code 2, before any file is written."""

import shutil
from importlib.util import find_spec

import numpy as np
import pytest
from click.testing import CliRunner
from test_cli import SMALL, invoke
from test_traces import trace_entries, write_traces

import sketchssm as ss
from sketchssm.cli import main

ERRORS = """
calibrate none.npz --out out | does not exist
calibrate broken.npz --out out | expected an npz archive
plan good.npz silent.npz --error 1 --out new --reductions 3 | silent: moments:
evaluate other.npz narrow.npz --window 8 --systems ablation/full-method --mean-rank 5 | narrow: mean_rank: expected 1
calibrate plain.npz --out out --mean-rank 2 --method gradient | method: expected 'uniform' or 'error'
calibrate good.npz other.npz --out new.safetensors | --out: expected a folder for 2 trace files, got the file new.saf
plan good.npz other.npz --error 1 --out new.safetensors | --out: expected a folder for 2 trace files, got the file new
calibrate logits.npz --out out | logits.npz: calib_beta: expected write gates from 0 to 2, got
demo --json folder | --json: expected a file, got the folder
plan --error 1 --out out | TRACES: expected trace files
plan good.npz --microseconds 1 --out out | expected --time-on
plan good.npz --error 1 --out out --maps ridge --reductions 8 | --reductions: has no effect without the map subspace
plan good.npz --error 1 --out out --maps subspace --mean-ranks 4 | --mean-ranks: has no effect with the map subspace
plan good.npz --error 1 --out out --mean-ranks 4 | --mean-ranks: has no effect with the map subspace
demo --method perturbation | --method: expected perturbation with --model or --from only
plan good.npz --error 1 --out out --maps ridge:x | '--maps': expected a number after ridge:, got 'x'
bench --seconds inf | '--seconds': expected a finite number, got 'inf'
info none.safetensors | plans: expected a file or folder of plans, got none.safetensors, which does not exist
info empty | plans: expected files NAME.safetensors in empty, got none
info broken.npz | not a whole safetensors file
info moments | moments: expected the plan of a layer, from sketchssm calibrate or plan, got sketchssm-moments
evaluate other.npz --plan plan SMALL[2:] | plan: expected one for
evaluate good.npz other.npz --plan plan | --plan: expected plans named as the trace files, good, other, got plan
evaluate good.npz none.npz --plan plans | 'none.npz' does not exist
evaluate good.npz silent.npz --plan plans | --plan: expected plans named as the trace files, silent, got good, other
evaluate good.npz --plan plan --window 4 | --window: has no effect
evaluate good.npz SMALL[:2] --systems exact,sketch/ridge-* --ranks 2 --seed 1 | --seed: has no effect without
evaluate good.npz --systems exact --ranks 2 | --ranks: has no effect
evaluate good.npz --systems exact --map lowrank | --map: has no effect
evaluate good.npz --format svg | --format: has no effect without --plots
evaluate good.npz --plan plan --plan plans | --plan: expected once, got it 2 times
calibrate good.npz --out out --window 8 --map ridge --window 4 | --window: expected once
bench --plan plan --shape qwen3-next | --shape: has no effect with --plan
calibrate good.npz --out - | --out: expected a file, got -; only --json
calibrate good.npz --out out --residual-bits 0 | --residual-bits: has no effect as 0 without --mean-rank
bench --shape qwen3-next --residual-bits 2 | --residual-bits: has no effect without --map subspace
bench --shape qwen3-next --batch 1 --raw-gate | --raw-gate: has no effect without a decay per channel
bench --shape nemotron-3-super --batch 1 --rank 65 | mean_ranks: expected at most 64 for nemotron-3-super, got 65
evaluate good.npz --plots | --out FOLDER
evaluate good.npz --systems exact,ghosts | got 'ghosts'; there are exact (standard
evaluate good.npz --systems replay | got 'replay'; did you mean exact/replay?
evaluate good.npz --systems sketch/ridge-3 --ranks 2 | got 'sketch/ridge-3'; there are sketch (ridge-2, low
evaluate good.npz good.npz | different names
evaluate good.npz --ranks 2,x | positive integers
"""
"""Commands, each with a part of its message."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with traces and plans, good ones and bad ones."""
    folder = tmp_path_factory.mktemp("files")
    good = write_traces(folder / "good.npz", "gdn")
    write_traces(folder / "other.npz", "kda")
    write_traces(folder / "plain.npz", "gdn", grads=0)
    (folder / "broken.npz").write_bytes(b"not an archive")
    entries = trace_entries("gdn")
    for name, own in {
        "silent": {name: 0 * x for name, x in entries.items() if name.endswith("_v")},
        "narrow": {name: x[..., :4] for name, x in entries.items() if name.endswith(("_q", "_k"))},
        "logits": {"calib_beta": entries["calib_beta"] - 1},
    }.items():
        np.savez(folder / f"{name}.npz", **entries | own)
    for name in ("folder", "empty", "plans"):
        (folder / name).mkdir()
    invoke("calibrate", good, "--out", folder / "plan", "--mean-rank", 3, "--window", 8)
    for name in ("good", "other"):
        shutil.copy(folder / "plan", folder / "plans" / f"{name}.safetensors")
    ss.Moments("gdn", 1, 2, 2).save(folder / "moments")
    return folder


@pytest.mark.parametrize("case", ERRORS.strip().splitlines())
def test_errors_are_one_line_and_exit_code_2(case, files, monkeypatch):
    monkeypatch.chdir(files)
    words, _, message = case.partition(" | ")
    for name, few in {"SMALL[:2]": SMALL[:2], "SMALL[2:]": SMALL[2:], "SMALL": SMALL}.items():
        words = words.replace(name, " ".join(few))
    before = sorted(files.rglob("*"))
    result = invoke(*words.split(), code=2)
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("Error: ") and message in last
    assert "Traceback" not in result.output
    assert sorted(files.rglob("*")) == before


ONE_FILE = """
--json --out    evaluate good.npz --out r --json r/../r/results.json
--json --out    evaluate good.npz --out r --plots --json r/drift-of-states.png
--json --plan   evaluate good.npz --plan plan --json here/plan
--json --plans  evaluate --model folder --text text --plans plan --json plan
--out TRACES    calibrate good.npz --out here/good.npz
--json TRACES   calibrate good.npz --out new --json good.npz
--json TRACES   evaluate good.npz --json good.npz
--json --out    calibrate good.npz --out link --json new
--json --out    calibrate good.npz other.npz --out new --json new
--out --text    calibrate --model folder --text text --out text
--json --out    plan good.npz --error 1 --out new --json ./new
--json --plan   bench --plan plan --json plan
--json PLAN     info plan --json here/plan
"""
"""The option that is refused, the argument that has its file, and the command."""


def contents(folder):
    return {path: path.is_file() and path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("case", ONE_FILE.strip().splitlines())
def test_two_options_may_not_have_one_file(case, files, monkeypatch):
    """By any name of the file, before any work; the message has both options."""
    monkeypatch.chdir(files)
    refused, owner, *words = case.format(files).split()
    if "--model" in words and not (find_spec("torch") and find_spec("transformers")):
        pytest.skip("needs torch and transformers")
    (files / "text").write_bytes(b"1")
    for name, target in (("link", "new"), ("here", files)):
        if not (files / name).is_symlink():
            (files / name).symlink_to(target)
    before = contents(files)
    message = invoke(*words, code=2).stderr.splitlines()[-1]
    assert message.startswith(f"Error: {refused}: expected a separate file, got ")
    assert f": {owner} has " in message
    assert contents(files) == before


def test_files_that_cannot_be_written(tmp_path, monkeypatch):
    """They are refused before the work whose results they would get."""
    traces = write_traces(tmp_path / "a.npz", "gdn")
    result = invoke("calibrate", traces, "--out", traces / "below", code=2)
    assert "--out: expected a separate file" in result.stderr
    (tmp_path / "file").touch()
    result = invoke("evaluate", traces, "--out", tmp_path / "file" / "below", code=2)
    assert f"--out: expected a file in a folder, got {tmp_path / 'file' / 'below'}" in result.stderr
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    for option in ("--out", "--json"):
        result = invoke("evaluate", traces, option, tmp_path / "new" / "below", code=2)
        assert f"{option}: expected a folder that can be written, got {tmp_path / 'new'}" in result.stderr


def test_bugs_keep_their_traceback(monkeypatch):
    """Only errors about the caller's input become one line."""
    monkeypatch.setattr("sketchssm.study.bench.cases.copy_bandwidth", lambda: {}["bug"])
    result = CliRunner().invoke(main, ["bench"])
    assert isinstance(result.exception, KeyError)
