"""`sketchssm calibrate --model` and `evaluate --model` on a tiny model on disk."""

import json
import math
import shutil
import subprocess
import sys

import numpy as np
import pytest
from samples import fingerprints, refused
from test_cli import invoke
from tiny_models import VISION, make, prompt, st, torch, transformers

import sketchssm as ss
import sketchssm.cli.calibrate as cli_calibrate
from sketchssm.plans.files import FileFormatError
from sketchssm.study.tasks import Score, make_prompts

SHORT = ["--length", 24, "--rows", 3, "--device", "cpu"]
LONG = ["--length", 80, "--rows", 1, "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model and a tokenizer of 63 words, ids as text and as an array."""
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("model")
    make("Qwen3Next").save_pretrained(path)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(64)}, "w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    ids = prompt(1, 100)[0].numpy()
    (path / "text.txt").write_text(" ".join(f"w{i}" for i in ids))
    np.save(path / "text.npy", ids)
    return path


@pytest.fixture(scope="module")
def plans(folder):
    path = folder / "plans.safetensors"
    arguments = ["--model", folder, "--text", folder / "text.txt", *SHORT, "--window", 4, "--mean-rank", 3]
    result = invoke("calibrate", *arguments, "--out", path, "--json", folder / "report.json")
    return path, result.output


def test_calibrate(folder, plans):
    """The file is that of `calibrate` with the same settings."""
    path, output = plans
    got = st.ModelPlans.load(path)
    want = st.calibrate(make("Qwen3Next"), prompt(1, 100)[0, :72], length=24, window=4, mean_rank=3)
    assert fingerprints(got) == fingerprints(want)
    assert got.fingerprint == want.fingerprint
    assert "model.layers.1.linear_attn" in output
    assert f"{got.reduction:.2f}x less state traffic" in output
    report = json.loads((folder / "report.json").read_text())
    assert report["layers"]["model.layers.0.linear_attn"]["ranks"] == got["model.layers.0.linear_attn"].ranks.tolist()
    assert (report["tokens"], report["method"]) == (72, "gradient")


@pytest.mark.parametrize("name", ("Qwen3_5", "Glm5Next"))
def test_vision_classes(folder, name, tmp_path):
    """The command loads the class that the folder names, so its plans are those of the class in Python."""
    parts = {"text_config": make(name).config.get_text_config().to_dict(), "vision_config": VISION}
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    model = kind(getattr(transformers, f"{name}Config")(**parts)).eval()
    model.save_pretrained(tmp_path)
    arguments = ["--model", tmp_path, "--text", folder / "text.npy", *SHORT, "--window", 4, "--mean-rank", 3]
    invoke("calibrate", *arguments, "--out", tmp_path / "plans.safetensors")
    got = st.ModelPlans.load(tmp_path / "plans.safetensors")
    want = st.calibrate(model, prompt(1, 100)[0, :72], length=24, window=4, mean_rank=3)
    assert got.fingerprint == want.fingerprint
    assert fingerprints(got) == fingerprints(want)


@pytest.mark.parametrize("device", ("cpu", "balanced"))
def test_token_ids_in_place_of_text(folder, plans, tmp_path, device):
    """On one device, and with the layers spread over all."""
    if device == "balanced":
        pytest.importorskip("accelerate")
    out = tmp_path / "new" / "plans.safetensors"
    arguments = [*SHORT[:-1], device, "--window", 4, "--mean-rank", 3]
    invoke("calibrate", "--model", folder, "--text", folder / "text.npy", *arguments, "--out", out)
    assert out.read_bytes() == plans[0].read_bytes()


def test_settings_reach_the_plans(folder, tmp_path):
    out = tmp_path / "plans.safetensors"
    arguments = ["--model", folder, "--text", folder / "text.npy", *SHORT, "--mean-rank", 3, "--window", 4]
    chosen = ["--map", "ridge", "--sketch-dtype", "int8", "--method", "error", "--rank-max", 2]
    invoke("calibrate", *arguments, *chosen, "--out", out)
    plans = st.ModelPlans.load(out)
    assert plans.allocation.method == "error"
    assert {(x.window, x.map.name, x.sketch_dtype) for x in plans.values()} == {(4, "ridge", "int8")}
    assert max(plan.ranks.max() for plan in plans.values()) == 2


def test_evaluate(folder, plans):
    arguments = ["--model", folder, "--text", folder / "text.txt", *SHORT, "--backend", "cpu"]
    result = invoke("evaluate", *arguments, "--plans", plans[0], "--json", "-")
    report = json.loads(result.stdout)
    rows = prompt(1, 100)[0, :72].view(3, 24)
    want = st.evaluate(make("Qwen3Next"), rows, plans[0], backend="cpu")
    assert report["loss"] == pytest.approx(want.loss, abs=1e-6)
    assert report["patched_loss"] == pytest.approx(want.patched_loss, abs=1e-6)
    assert report["divergence"] == pytest.approx(want.divergence, abs=1e-6)
    assert report["agreement"] == want.agreement
    assert report["layers"]["model.layers.0.linear_attn"]["standard"] == 3072
    assert report["exact"]["divergence"] < min(1e-6, report["divergence"])  # rounding of float32
    assert "exact heads" in result.stderr
    assert f"{want.patched_perplexity:.2f}" in result.stderr
    assert "3.1" in result.stderr  # kB


def test_evaluate_tasks(folder, plans, monkeypatch):
    """Each task at each distance, with the same prompts for all ways to decode them."""
    calls = []

    def recall(model, prompts, plans=None, *, backend, progress, **how):
        calls.append((prompts, plans if plans in (None, "standard") else "plans", how))
        return Score(len(calls) / 8, math.nan if len(calls) == 1 else 0.02)

    monkeypatch.setattr(st, "recall", recall)
    arguments = ["--model", folder, "--text", folder / "text.npy", *LONG, "--plans", plans[0], "--seed", 3]
    tasks = ["--tasks", "needle,values", "--prompts", 5, "--distance", 40, "--facts", 2, "--decoded", 9]
    result = invoke("evaluate", *arguments, *tasks, "--json", "-")
    decoded = {"decoded": 9}
    assert [x[1:] for x in calls] == 2 * [
        (None, {}), ("standard", decoded), ("plans", decoded), ("standard", decoded | {"wiped": True})
    ]  # fmt: skip
    assert [x[0] for x in calls] == 4 * [calls[0][0]] + 4 * [calls[4][0]]
    needle, values = json.loads(result.stdout)["tasks"]
    assert (needle["task"], needle["distance"], needle["prompts"]) == ("needle", 40, 5)
    assert needle["transformers"] == {"share": 0.125, "error": None}
    assert values["states wiped"] == {"share": 1.0, "error": 0.02}
    assert "37.5% ± 2.0" in result.stderr and "12.5%  " in result.stderr
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    settings = {"length": 80, "distance": 40, "facts": [2]}
    settings |= {"encode": lambda text: tokenizer(text)["input_ids"], "rng": np.random.default_rng(3), "prompts": 5}
    make_prompts("needle", np.load(folder / "text.npy"), **settings | {"facts": None})
    want = make_prompts("values", np.load(folder / "text.npy"), **settings)
    assert np.array_equal(calls[4][0].ids, want.ids)


def test_info(plans):
    result = invoke("info", plans[0], "--json", "-")
    report = json.loads(result.stdout)
    want = st.ModelPlans.load(plans[0])
    assert (report["model"], report["windows"], report["mean_rank"]) == ("Qwen3NextForCausalLM", [4], 3.0)
    assert report["reduction"] == pytest.approx(want.reduction)
    for name in ("ranks", "residual_bits"):
        assert [layer[name] for layer in report["layers"].values()] == [
            getattr(x, name).tolist() for x in want.values()
        ]
    assert "model.layers.1.linear_attn" in result.stderr


def test_a_kept_calibration_gives_plans(folder, plans, tmp_path):
    """The plans beside it, and those of another budget with residuals."""
    arguments = ["--model", folder, "--text", folder / "text.txt", *SHORT, "--window", 4, "--mean-rank", 3]
    kept, beside = tmp_path / "new" / "c.safetensors", tmp_path / "p.safetensors"
    invoke("calibrate", *arguments, "--keep", kept, "--out", beside)
    assert beside.read_bytes() == plans[0].read_bytes()
    out = tmp_path / "q.safetensors"
    assert "at mean rank 3" in invoke("calibrate", "--from", kept, "--mean-rank", 3, "--out", out).output
    assert out.read_bytes() == plans[0].read_bytes()
    invoke("calibrate", "--from", kept, "--reduction", 2.7, "--out", out)
    wanted = st.ModelPlans.load(out)
    assert wanted.reduction >= 2.7 * (1 - 1e-9)
    assert all(plan.residual_bits.any() for plan in wanted.values())
    assert wanted.allocation.method == "joint"
    assert "calibrate --from makes plans of it" in " ".join(invoke("info", kept, code=2).stderr.split())


def test_questions_about_the_text(folder, tmp_path, monkeypatch):
    """They are in the calibration where the text, its rows and the plans allow, as in Python."""
    text, out = tmp_path / "text.txt", tmp_path / "p.safetensors"
    ids = prompt(1, 400, seed=3)[0].numpy()
    text.write_text(" ".join(f"w{i}" for i in ids))
    np.save(tmp_path / "text.npy", ids)
    monkeypatch.setattr(cli_calibrate, "ROOM", 160)
    monkeypatch.setattr(cli_calibrate, "QUESTIONS", 2)
    command = ["calibrate", "--model", folder, "--rows", 2, "--window", 4, "--device", "cpu", "--out", out]

    def asks(**changed):
        chosen = {"reduction": 2.7, "text": text, "length": 160} | changed
        options = [x for name, value in chosen.items() if value is not None for x in (f"--{name}", value)]
        return "Questions about facts in the text: 2" in invoke(*command, *options).output

    assert asks()
    got = st.ModelPlans.load(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    settings = {"encode": lambda text: tokenizer(text)["input_ids"], "rng": np.random.default_rng(0), "prompts": 2}
    asked = make_prompts("keys", ids, **settings, length=160, facts=range(1, 9))
    settings = {"length": 160, "window": 4, "reduction": 2.7}
    want = st.calibrate(make("Qwen3Next"), ids[:320], **settings, prompts=asked.ids, answers=asked.answers)
    assert fingerprints(got) == fingerprints(want)
    for changed in (
        {"questions": 0},
        {"method": "error"},
        {"text": tmp_path / "text.npy"},
        {"length": 159},
        {"reduction": None, "mean-rank": 3},
    ):
        assert not asks(**changed)
    for number in (0, 2):  # the default is too much for so small heads
        arguments = ["--text", text, "--length", 160, "--questions", number]
        told = f"got {10 if number else 9}"
        assert told in invoke(*command, *arguments, code=2).stderr
        invoke(*command, *arguments, "--reduction", 2.7, "--keep", kept := tmp_path / f"{number}.safetensors")
        assert told in invoke("calibrate", "--from", kept, "--out", out, code=2).stderr
    monkeypatch.setattr(cli_calibrate, "ROOM", 24)
    assert not asks(length=24)  # no room for the facts


def test_plans_for_a_time(folder, tmp_path):
    """The first of the budgets, from the most traffic on, that takes at most as long."""
    arguments = ["--model", folder, "--text", folder / "text.txt", *SHORT, "--window", 4, "--reduction", 1.5]
    kept, out = tmp_path / "c.safetensors", tmp_path / "p.safetensors"
    invoke("calibrate", *arguments, "--keep", kept, "--out", out)
    calibration, seen = ss.Calibration.load(kept), []

    def took(plans):
        seen.append(plans)
        return 1.0 if len(seen) < 3 else 0.4

    found = ss.plans_within(calibration, 0.5, took, budgets=(2, 1.5, 1.2), rank_max=2)
    assert len(seen) == 3 and found.allocation.method == "joint"
    assert fingerprints(found) == fingerprints(calibration.plans(reduction=2, rank_max=2))
    refused("seconds: expected a finite number above 0, got 0", ss.plans_within, calibration, 0, took)
    with pytest.raises(TypeError, match="time_of: expected a function of the plans, got 5"):
        ss.plans_within(calibration, 1, 5)
    timed = ["--from", kept, "--out", out, "--map", "ridge", "--time-on", "cpu", "--batch", 1, "--microseconds"]
    invoke("calibrate", *timed, 1e9)
    assert st.ModelPlans.load(out).allocation.mean_rank == 16
    assert "seconds: expected at least" in invoke("calibrate", *timed, 1e-3, code=2).stderr


def test_a_budget_that_no_plans_meet_is_refused_first(folder, tmp_path):
    """Joint scores of a calibration are those of the plans' format."""
    kept, out = tmp_path / "c.safetensors", tmp_path / "p.safetensors"
    arguments = ["--model", folder, "--text", folder / "text.txt", *SHORT, "--window", 4, "--method", "error"]
    more = ["--sketch-dtype", "bfloat16", "--keep", kept, "--out", out]
    assert "reduction: expected at most" in invoke("calibrate", *arguments, "--reduction", 99, *more, code=2).stderr
    uniform = ["--method", "uniform", "--mean-rank", 8, "--keep", kept, "--out", out]
    assert "for a uniform rank, got 8" in invoke("calibrate", *arguments[:-2], *uniform, code=2).stderr
    assert not kept.exists()
    invoke("calibrate", *arguments, "--reduction", 1.5, *more)
    invoke("calibrate", "--from", kept, "--reduction", 1.5, "--sketch-dtype", "bfloat16", "--out", out)


def published(folder, spoil=lambda contents: None):
    """A file by the authors' documented format, of the first two layers' scores with one basis for two heads."""
    rng = np.random.default_rng(0)
    layers = st.fingerprint(make("Qwen3Next")).layers
    layer = next(iter(layers.values())).layer
    count, groups, rank = len(layers), layer.key_heads, min(layer.key_dim, layer.value_dim)
    curves = np.cumsum(rng.random((count, layer.heads, rank + 1)), axis=-1)[..., ::-1].copy()
    contents = {
        "format": "sketchssm-calibration",
        "schema_version": 1,
        "model": {"name": "tiny", "family": layer.kind},
        "geometry": {
            "key_dim": layer.key_dim, "value_dim": layer.value_dim, "groups": groups, "window": 16, "erase": True,
        },
        "max_rank": rank,
        "omega": torch.from_numpy(rng.standard_normal((count, groups, rank, layer.key_dim)).astype(np.float32)),
        "curves": {"joint_dot_sq_sum": torch.from_numpy(curves), "joint_nstep": 100, "meta": {}},
        "layer_ids": [int(name.split(".")[2]) for name in layers],
    }  # fmt: skip
    spoil(contents)
    path = folder / "calibration.pt"
    torch.save(contents, path)
    return path, contents, layer


def test_import_of_published_calibrations(folder, tmp_path):
    path, contents, layer = published(tmp_path)
    kept, out = tmp_path / "c.safetensors", tmp_path / "p.safetensors"
    invoke("calibrate", "--import", path, "--model", folder, "--keep", kept, "--mean-rank", 3, "--out", out)
    plans = st.ModelPlans.load(out)
    assert fingerprints(ss.Calibration.load(kept).plans(3)) == fingerprints(plans)
    omega = contents["omega"].double().numpy()
    for place, plan in enumerate(plans.values()):
        for head in range(layer.heads):
            own = omega[place, head * len(omega[place]) // layer.heads, : plan.omega.shape[-1]].T
            frame = plan.omega[head].astype(np.float64)
            # columns of the file, in float32, lie in the span of the plan's first columns, at every rank
            for rank in range(1, own.shape[1] + 1):
                rest = own[:, :rank] - frame[:, :rank] @ (frame[:, :rank].T @ own[:, :rank])
                assert np.abs(rest).max() < 1e-5


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda c: c.update(schema_version=2), "expected a sketchssm-calibration of schema 1"),
        (lambda c: c["model"].update(family="kda"), "layer model.layers.0.linear_attn: expected kind, K, V and heads"),
        (lambda c: c.update(layer_ids=[0] * len(c["omega"])), "layer_ids: expected the layers"),
        (lambda c: c.update(omega=c["omega"][1:]), "recurrent layers, got"),
        (lambda c: c["omega"].fill_(np.nan), "omega: expected a tensor of 4 axes and finite numbers"),
        (lambda c: c["geometry"].update(window=1), "window: expected an integer from 2 to"),
        (lambda c: c.update(model=print), "calibration.pt: expected a file of torch.save, of tensors and plain"),
    ],
)
def test_refused_imports(spoil, match, tmp_path):
    path = published(tmp_path, spoil)[0]
    with pytest.raises(FileFormatError, match=match):
        st.import_calibration(path, make("Qwen3Next"))


CALIBRATE = "calibrate --out x --model {} --text {}/text.npy"
EVALUATE = "evaluate --model {} --text {}/text.npy"
TASKS = f"{EVALUATE} --length 80 --plans standard --tasks keys"


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ("calibrate --out x", "TRACES: expected trace files, or --model DIR"),
        ("calibrate --out x --from {}/text.npy --model {}", "--model: has no effect with --from"),
        (f"{CALIBRATE} --reduction 9 --mean-rank 3", "--mean-rank: has no effect with --reduction"),
        ("calibrate --out x --keep y {}/text.npy", "--keep: has no effect without --model"),
        ("calibrate --out x --microseconds 9 {}/text.npy", "--microseconds: has no effect without --from"),
        ("calibrate --out x --from {}/text.npy --microseconds 9", "--microseconds: expected --time-on cpu or"),
        (
            "calibrate --out x --from {}/text.npy --microseconds 9 --time-on cpu --mean-rank 3",
            "--mean-rank: has no effect with --microseconds",
        ),
        ("calibrate --out x --from {}/text.npy --batch 3", "--batch: has no effect without --microseconds"),
        ("calibrate --out x --rows 3", "--rows: has no effect without --model"),
        ("calibrate --out x --resume y {}/text.npy", "--resume: has no effect without --model"),
        ("calibrate --out x --questions 3 {}/text.npy", "--questions: has no effect without --model"),
        (f"{CALIBRATE} --mean-rank 3 --questions 3", "--questions: has no effect without residuals"),
        (f"{CALIBRATE} --method error --questions 3", "--questions: has no effect with --method error"),
        (f"{CALIBRATE} --length 24 --reduction 3 --questions 3", "length: expected at least "),
        (f"{CALIBRATE} --rows 3 --sample 48,24", "--rows: has no effect with --sample"),
        (f"{CALIBRATE} --sample 48", "--sample: expected two numbers, for bases and for ranks, got 1"),
        (f"{CALIBRATE} --length 24 --sample 24,96", "text: expected at least 5 rows, got 4; give more text"),
        ("calibrate --out x --import {}/text.npy --model {}", "--mean-rank: expected a mean rank with --import"),
        ("calibrate --out x --model {}", "--text: expected a text for the model to read"),
        ("calibrate --out x --model {} {}/text.npy", "--model: expected no trace files with"),
        ("calibrate --out {} --model {} --text {}/text.npy", "--out: expected a file, got the folder"),
        ("calibrate --out {}/text.npy --model {} --text {}/text.npy", "--out: expected a separate file"),
        ("calibrate --out x --model {} --text {}/model.safetensors", "text: expected UTF-8 text or an npy file"),
        (
            "calibrate --out x --model {}/.. --text {}/text.npy --length 24",
            "model: AutoConfig of transformers can't read",
        ),
        (f"{CALIBRATE} --length 24 --device cuda:99", "device: 'cuda:99' can't be used"),
        (EVALUATE, "--plans: expected plans of the model, standard or replay"),
        (f"{EVALUATE} --window 8", "--window: has no effect with --mod"),
        (f"{EVALUATE} --out x", "--out: has no effect with --model"),
        ("evaluate {}/text.npy --plans {}/text.npy", "--plans: has no effect without --model"),
        ("evaluate {}/text.npy --tasks keys", "--tasks: has no effect without --model"),
        *((f"{EVALUATE} --{name} 3", f"--{name}: has no effect without --tasks") for name in ("prompts", "decoded")),
        *((f"{EVALUATE} --{name} 3", f"--{name}: has no effect without --tasks") for name in ("facts", "distance")),
        (f"{EVALUATE} --seed 3", "--seed: has no effect with --model and without --tasks"),
        (f"{EVALUATE} --tasks needle --facts 3", "--facts: has no effect on the task needle"),
        (f"{EVALUATE} --tasks needles", "expected tasks among needle, keys, values, queries, got 'needles'"),
        (
            f"{TASKS} --facts 2 --distance 40 --decoded 81",
            "--decoded: expected at most the 80 tokens before a question, got 81",
        ),
        (f"{TASKS} --distance 8", "distance: expected at least "),
    ),
)
def test_errors(folder, arguments, message):
    result = invoke(*(argument.format(folder) for argument in arguments.split()), code=2)
    assert message in " ".join(result.stderr.split())


def test_a_model_without_a_tokenizer(folder, tmp_path):
    """transformers makes an empty tokenizer for a folder that has none."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, tmp_path)
    result = invoke("calibrate", "--out", "x", "--model", tmp_path, "--text", folder / "text.txt", code=2)
    assert f"model: expected a tokenizer in {tmp_path}, got none" in " ".join(result.stderr.split())


def test_damaged_ids(folder, tmp_path):
    path = tmp_path / "ids.npy"
    for whole in (np.arange(50), np.array([1, "a"], dtype=object)):
        np.save(path, whole)
        path.write_bytes(path.read_bytes()[:-8])
        result = invoke("calibrate", "--out", "x", "--model", folder, "--text", path, code=2)
        assert f"text: expected an npy file of integers, got {path}" in " ".join(result.stderr.split())


@pytest.mark.parametrize("package", ("torch", "transformers"))
def test_missing_packages(package, folder):
    """One line says which package is missing and how to install it."""
    script = f"""
import sys
sys.modules["{package}"] = None
from sketchssm.cli import main
main(["calibrate", "--out", "x", "--model", {str(folder)!r}, "--text", {str(folder / "text.npy")!r}])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"Error: sketchssm.transformers needs {package}; install with: pip install 'sketchssm-decode[transformers]'"
    ]
