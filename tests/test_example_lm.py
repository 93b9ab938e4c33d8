"""examples/lm: decoding with heads against the forward pass, prompts, and the evaluation."""

import importlib.util
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from samples import refused, relative, self_answered, states_of, tokens_of

import sketchssm as ss
from sketchssm.calibrate.traces import SHIPPED
from sketchssm.layer.formats import FORMATS

torch = pytest.importorskip("torch")
LM = Path(__file__).parents[1] / "examples" / "lm"
VOCAB, LENGTH = 64, 40
TINY = {
    "d": 32, "vocab": VOCAB, "pattern": "RAR", "conv": 4, "attn_heads": 2, "H": 4, "Hk": 2, "K": 8, "V": 8, "ff": 24,
}  # fmt: skip


def modules(*more):
    """A fixture: the example's modules, imported as its scripts import them."""

    @pytest.fixture(scope="module")
    def lm():
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(LM.parents[1] / "benchmarks"))  # of `forms`
            patch.syspath_prepend(str(LM))
            names = ("recurrence", "model", "prompts", "systems", "figure", "runs", "evaluate", *more)
            yield {name: importlib.import_module(name) for name in names}
            for name in names:
                sys.modules.pop(name, None)

    return lm


lm = modules("stress", "errors", "tolerance", "criteria", "forms")


def tiny(lm, kind, dtype=torch.float32):
    torch.manual_seed(5)
    key_heads = 4 if kind == "kda" else 2
    model = lm["model"].HybridLM({**TINY, "family": kind, "Hk": key_heads}).to(dtype)
    torch.nn.init.normal_(model.emb.weight, std=0.3)  # logits of a few units
    return model.eval().requires_grad_(False)


def ids(rows=3, length=LENGTH):
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def stepwise(model, core, tokens):
    """Hidden vectors with one call per token."""
    cache = {}
    return torch.cat([model(token, core, cache) for token in tokens.split(1, dim=1)], 1)


@pytest.mark.parametrize("kind", SHIPPED)
def test_stepwise_decode_is_the_forward_pass(kind, lm):
    """In float64 both orders of summation agree to rounding, 40 tokens deep."""
    model = tiny(lm, kind, torch.float64)
    heads = {place: ss.StandardHead(model.layer, 3, "reference") for place in model.recurrent}
    assert relative(stepwise(model, lm["recurrence"].Heads(heads), ids()), model(ids())) < 1e-11


@pytest.mark.parametrize("kind", SHIPPED)
def test_decode_goes_on_from_a_prefill(kind, lm):
    model = tiny(lm, kind)
    core, cache = lm["recurrence"].Chunked(), {}
    before = model(ids()[:, :23], core, cache)
    heads = lm["recurrence"].Heads({place: ss.StandardHead(model.layer, 3, "cpu") for place in model.recurrent})
    heads.load(core.states)
    whole = torch.cat([before, model(ids()[:, 23:], heads, cache)], 1)
    assert relative(whole, model(ids())) < 1e-5  # float32, three blocks


@pytest.mark.parametrize("kind", SHIPPED)
def test_gradients_are_those_of_the_loss(kind, lm):
    """The slope of the loss along a recorded gradient is the norm of the gradient."""
    model = tiny(lm, kind, torch.float64)
    recorder = lm["systems"].graded(model, ids(1))
    place = model.recurrent[-1]
    grad, step = recorder.outputs[place].grad, 1e-6

    def loss(shift):
        exact = lm["recurrence"].Chunked()
        along = shift * grad / grad.norm()
        hidden = model(ids(1), lambda at, *inputs: exact(at, *inputs) + (along if at == place else 0))
        logits = model.head(hidden[:, :-1]).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, ids(1)[:, 1:].flatten(), reduction="sum")

    slope = (loss(step) - loss(-step)) / (2 * step)
    assert slope.item() == pytest.approx(grad.norm().item(), rel=1e-5)  # a central difference at 1e-6, in float64


def encode(text):
    """A stand-in for a tokenizer: words are tokens."""
    return [2 + sum(word.encode()) % (VOCAB - 2) for word in re.findall(r"[\w-]+|[^\w\s]", text)]


def test_prompts_hold_their_needles(lm):
    text = np.zeros(4000, dtype=np.uint16)
    made = lm["prompts"].needle_prompts(text, encode, 20, 512, np.random.default_rng(3))
    assert made.ids.shape[1] <= 512
    assert set(made.facts) <= set(range(1, 9)) and len(set(made.facts)) > 3
    for row, ((start, stop),) in zip(made.ids, made.spans, strict=True):
        assert made.question == 512 - lm["prompts"].ROOM < start
        assert stop == start + 1 and not row[stop:].any()  # padding follows
        assert row[:4].tolist() == encode(lm["prompts"].WORDING.preamble)[:4]


def test_rows_are_disjoint_and_seeded(lm):
    rows = [lm["prompts"].text_rows(np.arange(1000), 6, 150, np.random.default_rng(2)) for _ in range(2)]
    assert np.array_equal(*rows)
    assert np.unique(rows[0]).size == rows[0].size
    refused("rows: expected at most 6", lm["prompts"].text_rows, np.arange(1000), 7, 150, np.random.default_rng(2))


def test_calibration_rows_can_hold_needles(lm):
    """Every other row begins with a prompt and continues with its own text after the answer."""
    rows, text = np.full((5, 256), 7), np.zeros(4000, dtype=np.int64)
    mixed = lm["prompts"].mixed_rows(rows, text, encode, np.random.default_rng(1))
    assert (mixed[::2] == 7).all() and (mixed[:, -10:] == 7).all()
    [first] = np.unique(mixed[1::2, 0])
    assert first == encode(lm["prompts"].WORDING.preamble)[0]
    assert (rows == 7).all()


@pytest.fixture
def small_run(lm):
    model = tiny(lm, "kda")
    calibrations = lm["systems"].calibrate(model, ids(3, 64), window=8)
    systems = lm["systems"].baselines(calibrations, "exact", 8) + lm["systems"].sketches(calibrations, [1, 2], 8)
    text = np.random.default_rng(0).integers(VOCAB, size=2000)
    rows = lm["prompts"].text_rows(text, 3, 64, np.random.default_rng(0))
    prompts = lm["prompts"].needle_prompts(text, encode, 5, 256, np.random.default_rng(0), facts=[1, 2])
    task = self_answered(lambda rows: model.head(model(torch.from_numpy(rows))).argmax(-1).numpy(), 16)
    settings = {"decoded": 40, "batch": 2, "backend": "reference"}
    return lambda: lm["evaluate"].evaluate(model, systems, rows, prompts, {"keys": task}, **settings)


def test_evaluation_compares_systems(small_run, lm, tmp_path):
    """Exact systems agree, a wider sketch loses less, and equal runs give equal numbers."""
    results, without, wiped = small_run()
    standard, replay, narrow, wide = results
    assert standard.increase == 0 and standard.agreement == 1
    assert abs(replay.increase) < 1e-6 and replay.recall == standard.recall  # float32 between the layers
    assert narrow.reduction > wide.reduction > 1
    assert standard.divergence == 0 and replay.divergence < 1e-10  # of second order in errors of float32
    assert narrow.divergence > wide.divergence > 1e-6
    assert narrow.agreement < wide.agreement < 1
    assert 0 <= without <= 1
    scores = [result.tasks["keys"] for result in results]
    assert scores[0] == scores[1] == (1, 0)
    assert max(scores[2].share, scores[3].share, wiped["keys"].share) < 1
    assert small_run() == (results, without, wiped)
    if importlib.util.find_spec("matplotlib"):
        picture = lm["figure"].Comparison("kda", results, without)
        assert lm["figure"].draw([picture], tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_ranks_by_perturbation(lm):
    """Scores are like those by gradients, which have the samples too; systems are named after their scores."""
    model = tiny(lm, "kda")
    calibrations = lm["systems"].calibrate(model, ids(6, 64), window=8, perturb=True)
    found, exact = ([getattr(x, kind) for x in calibrations.values()] for kind in ("perturbed", "scores"))
    for one, other in zip(found, exact, strict=True):
        assert one.weighting == "perturbation" and np.array_equal(one.samples, other.samples)
    curves = [np.log(np.concatenate([x.objective()[:, 1] for x in own])) for own in (found, exact)]
    assert np.corrcoef(*curves)[0, 1] > 0.8  # 0.97; other scores of random heads have nothing in common
    given = ["--systems", "sketch", "--ranks", "2", "--method", "perturbation", "gradient", "--window", "8"]
    options = lm["evaluate"].arguments([*given, "--model", "m", "--tokens", "t"])
    *_, perturbed, graded = lm["evaluate"].listed(options, calibrations)
    for system, scores, name in ((perturbed, found, "perturbation"), (graded, exact, "gradient")):
        assert system.name.endswith(f"rank 2, by {name}")
        for layer, ranks in zip(system.layers.values(), ss.allocate_ranks(scores, 2).ranks, strict=True):
            assert np.array_equal(layer.plan.ranks, ranks)


def test_joint_systems_score_answers_alone(lm):
    """Ranks and bits are those of the library's allocation; gradients are of the answers' loss."""
    model, text = tiny(lm, "gdn"), np.random.default_rng(0).integers(VOCAB, size=2000)
    asked = lm["prompts"].needle_prompts(text, encode, 2, 256, np.random.default_rng(0), facts=[1, 2])
    calibrations = lm["systems"].calibrate(model, ids(3, 64), window=8, joint=True, questions=[asked])
    want = {place: ss.JointScores(x.basis) for place, x in calibrations.items()}
    for row, ((start, stop),) in zip(asked.ids, asked.spans, strict=True):
        row = torch.from_numpy(row[None, :stop])
        recorder = lm["recurrence"].Recorder()
        emb = model.emb.register_forward_hook(lambda module, given, x: x.detach().requires_grad_())
        hidden = model(row, recorder)
        emb.remove()
        losses = torch.nn.functional.cross_entropy(model.head(hidden[0, :-1]), row[0, 1:], reduction="none")
        losses[start - stop :].sum().backward()
        for place, scores in want.items():
            scores.update(*recorder.inputs[place], grad=recorder.outputs[place].grad)
    for place, x in calibrations.items():
        assert relative(x.answers.paired, want[place].paired) < 1e-4
        assert x.joint.weighting == "gradient" and x.joint.samples.sum() == x.scores.samples.sum()
    given = ["--systems", "joint", "--reductions", "3.2", "3.0", "--window", "8", "--model", "m", "--tokens", "t"]
    *_, narrow, wide = lm["evaluate"].listed(lm["evaluate"].arguments(given), calibrations)
    assert (narrow.name, wide.name, narrow.family) == ("joint, 3.2x", "joint, 3x", "joint")
    found = ss.allocate_joint(
        [x.joint for x in calibrations.values()], 3.0, list(x.answers for x in calibrations.values())
    )
    for system, ranks, bits in zip(wide.layers.values(), found.ranks, found.residual_bits, strict=True):
        assert np.array_equal(system.plan.ranks, ranks) and np.array_equal(system.plan.residual_bits, bits)
    assert {int(own) for bits in found.residual_bits for own in bits} > {0}
    assert narrow.reduction >= 3.2 * (1 - 1e-9) and wide.reduction >= 3.0 * (1 - 1e-9)
    *_, graded, errors = lm["evaluate"].listed(
        lm["evaluate"].arguments([*given, "--method", "error", "gradient", "--only", "*3x*"]), calibrations
    )
    assert (graded.name, errors.name) == ("joint, 3x", "joint, 3x, by error")
    for x in calibrations.values():
        x.joint.weighting = "error"
    found = ss.allocate_joint([x.joint for x in calibrations.values()], 3.0)
    for system, ranks in zip(errors.layers.values(), found.ranks, strict=True):
        assert np.array_equal(system.plan.ranks, ranks)
    plain = lm["systems"].calibrate(model, ids(3, 64), window=8)
    assert all(x.joint is None and x.answers is None for x in plain.values())


REDUCTION = 3.2
"""Less traffic than a full read in bf16 has; rank 1 with 3 bits has 3.5x."""


@pytest.fixture(scope="module")
def criteria(lm):
    """A model, calibrations for criteria, and the tables of all criteria."""
    model, text = tiny(lm, "gdn"), np.random.default_rng(0).integers(VOCAB, size=2000)
    asked = lm["prompts"].needle_prompts(text, encode, 2, 256, np.random.default_rng(0), facts=[1, 2])
    settings = {"window": 8, "joint": True, "kind": lm["criteria"].AllScores}
    own = lm["systems"].calibrate(model, ids(3, 64), questions=[asked], **settings)
    mixed = lm["systems"].calibrate(model, ids(4, 64), **settings)
    return model, own, mixed, lm["criteria"].allocations(own, mixed, REDUCTION)


def test_criteria_have_the_default_allocations(criteria, lm):
    """Two are those of the library, all are within the budget, and each has its fewest bits."""
    _, own, mixed, found = criteria
    text, answers = ([getattr(x, name) for x in own.values()] for name in ("joint", "answers"))
    for scores in (*text, *answers):
        for name in ("paired", "error", "isotropic"):
            setattr(scores, name, getattr(scores, name)[..., 1:])
    for label, given in zip(lm["criteria"].DEFAULTS, (None, answers), strict=True):
        want = ss.allocate_joint(text, REDUCTION, given)
        assert all(map(np.array_equal, found[label][1].ranks, want.ranks))
        assert all(map(np.array_equal, found[label][1].residual_bits, want.residual_bits))
    assert len(found) == 18 and all(table.traffic.reduction >= REDUCTION * (1 - 1e-9) for _, table in found.values())
    for label, (source, table) in found.items():
        assert (source is mixed) == label.startswith("mixed")
        ranks, bits = (np.concatenate(x) for x in (table.ranks, table.residual_bits))
        least = int(label.split()[-2]) if label.endswith("bits") else 1
        assert bits[ranks != ss.FULL_STATE].min(initial=3) >= least


def test_scores_of_criteria_know_sketches_without_codes(lm, rng):
    """The column before those of `JointScores` has the errors of reads of the sketch alone."""
    layer = ss.Layer("kda", 2, 8, 8)
    basis, length = ss.SketchBasis.random(layer, 8), 60
    tokens, grad = tokens_of(rng, layer, 1, length), rng.standard_normal((1, length, 2, 8)).astype(np.float32)
    plain, found = ss.JointScores(basis, sketch_dtype="float32"), lm["criteria"].AllScores(basis)
    found.sketch_dtype = "float32"
    for scores in (plain, found):
        scores.update(*tokens, grad=grad)
    for name in ("paired", "error", "isotropic"):
        assert relative(getattr(found, name)[..., 1:], getattr(plain, name)) < 1e-5
    bare = found.error[..., 0]
    assert (np.diff(bare, axis=1) < 0).all() and (bare[:, -1] < 1e-9 * found.energy).all()  # of full rank
    assert (bare > found.error[..., 3])[:, :4].all()
    assert found.with_none().bits == (0, 1, 2, 3) and found.bits == (1, 2, 3)


def test_systems_beside_each_other_decode_as_by_themselves(criteria, lm):
    """All rows and prompts, with every system's own numbers."""
    model, _, _, found = criteria
    made = [lm["systems"].allocated(own, table, label) for label, (own, table) in list(found.items())[::6]]
    standard = lm["systems"].baselines(criteria[1], "exact", 8)[0]
    text = np.random.default_rng(0).integers(VOCAB, size=2000)
    prompts = lm["prompts"].needle_prompts(text, encode, 5, 256, np.random.default_rng(0), facts=[1, 2])
    given = ["--model", "m", "--tokens", "t", "--batch", "3", "--backend", "cpu"]
    options, rows = lm["criteria"].checked(lm["criteria"].common_options(""), given), ids(10).numpy()
    got, backend = lm["criteria"].measured(model, standard, made, rows, {"recall": prompts}, options)
    results, _, _ = lm["evaluate"].evaluate(model, [standard, *made], rows, prompts, batch=3, backend="cpu")
    assert backend == "cpu"
    np.testing.assert_allclose(got["loss"].mean(1), [x.loss for x in results], rtol=1e-6)
    np.testing.assert_allclose(got["divergence"].mean(1), [x.divergence for x in results], rtol=1e-3, atol=1e-12)
    np.testing.assert_allclose(got["recall"].mean(1), [x.recall for x in results])
    assert results[1].divergence != results[2].divergence


@pytest.mark.parametrize("kind", SHIPPED)
def test_the_stored_form_decodes_as_its_head(kind, lm, rng):
    """From zero states and from loaded ones; flushes are exact, other forms differ."""
    layer = ss.Layer(kind, 2, 8, 8)
    basis, tokens = ss.SketchBasis.random(layer, 8), [tokens_of(rng, layer, 2, length) for length in (20, 39)]
    forms, turns = lm["forms"], np.broadcast_to(np.eye(8), (2, 8, 8))
    made = {name: make for name, _, make in forms.residual_forms.forms(layer, basis, turns)}
    plan = ss.SketchPlan(basis, [4, 4], 16, "subspace", "int8", residual_bits=2)
    heads = [ss.SketchHead(plan, 2, "reference"), *(forms.FormHead(made[x]) for x in ("rank 4 + 2 bits", "ridge"))]
    exact, state = ss.StandardHead(layer, 2, "reference"), torch.from_numpy(states_of(rng, layer, 2)).double()
    for given in tokens:
        given = [x if x is None else torch.from_numpy(x).double() for x in given]
        outs = [np.asarray(head.step(*given)) for head in (exact, *heads)]
        assert relative(outs[2], outs[1]) < 1e-3  # a number at the edge of two codes may get either one
        assert relative(outs[3], outs[1]) > 1e-2 and relative(outs[2], outs[0]) > 1e-2
        assert relative(outs[2][:, 15::16], outs[0][:, 15::16]) < 1e-12
        for head in (exact, *heads):
            head.load_state(state)


@pytest.mark.parametrize("form", FORMATS)
def test_sketches_of_a_copys_traffic(form, lm):
    """All heads at this rank move the bytes of the copy."""
    layer = ss.Layer("kda", 4, 128, 64)
    rank = lm["systems"].rank_of_copy(layer, 5, 4, "ridge", form)
    copy = ss.traffic.read_only_copy(layer.key_dim, layer.value_dim, 5, 4)
    assert ss.traffic.sketch("kda", 128, 64, rank, 4, sketch_dtype=form) == pytest.approx(copy, rel=1e-12)


def test_sketches_beside_copies_are_listed(lm):
    """Once for every format, at most of the copy's traffic."""
    calibrations = lm["systems"].calibrate(tiny(lm, "gdn"), ids(), window=4)
    given = ["--systems", "sketch", "copy", "--ranks", "--copy-bits", "4", "--formats", "bfloat16", "int8"]
    given += ["--window", "4", "--model", "m", "--tokens", "t"]
    listed = lm["evaluate"].listed(lm["evaluate"].arguments(given), calibrations)
    found = {x.family: x.reduction for x in listed if x.family.startswith("sketch")}
    (copy,) = (x.reduction for x in listed if x.name == "4-bit copy")
    assert list(found) == ["sketch, ridge map", "sketch, ridge map, int8"]
    for x in (x for x in listed if x.family in found):
        form = "int8" if x.family.endswith("int8") else "bfloat16"
        assert {layer.plan.sketch_dtype for layer in x.layers.values()} == {form}
    assert min(found.values()) >= copy
    chosen = lm["evaluate"].listed(
        lm["evaluate"].arguments([*given, "--only", "[24]-bit copy", "*int8*"]), calibrations
    )
    wanted = ("standard", "2-bit copy", "4-bit copy")
    assert [x.name for x in chosen] == [x.name for x in listed if x.name in wanted or "int8" in x.name]


def test_distances_need_tasks(lm, capsys):
    given = ["--model", "m", "--tokens", "t", "--distance", "256"]
    with pytest.raises(SystemExit):
        lm["evaluate"].arguments(given)
    assert "--distance: has no effect without --tasks" in capsys.readouterr().err
    assert lm["evaluate"].arguments([*given, "--tasks", "keys"]).distance == [256]


def test_free_decode_beside_standard_decode(lm):
    """Half of the rows take the likeliest tokens; standard decode does not diverge from itself, a sketch does."""
    model, rows = tiny(lm, "gdn"), ids(4, 24)
    calibrations = lm["systems"].calibrate(model, ids(3, 64), window=8)
    (narrow,) = lm["systems"].sketches(calibrations, [1], 8)
    standard = {place: ss.StandardHead(model.layer, 4, "cpu") for place in model.recurrent}
    exact = {place: ss.StandardHead(model.layer, 4, "cpu") for place in model.recurrent}
    said, apart = lm["stress"].free_decode(model, exact, standard, rows, 30, seed=3)
    assert said.shape == apart.shape == (4, 30) and not apart.any()
    whole = model.head(model(torch.cat([rows, torch.from_numpy(said)], 1))).argmax(-1)[:, 23:-1]
    assert np.array_equal(said[:2], whole[:2]) and not np.array_equal(said[2:], whole[2:])
    _, apart = lm["stress"].free_decode(model, narrow.heads(4, "cpu"), standard, rows, 30, seed=3)
    assert (apart[:, 10:] > 0).all() and apart.mean() > 1e-7
    assert lm["stress"].in_blocks(apart, 3)[0] == pytest.approx(apart[:, :10].mean())


def test_reported_and_true_errors_share_the_tokens(lm):
    """Flush tokens are reported, all others are the true error's; the head that is read in full errs in neither."""
    model, rows = tiny(lm, "gdn"), ids(3, 64)
    calibrations = lm["systems"].calibrate(model, rows, window=8)
    heads = {}
    for place, calibration in calibrations.items():
        plan = ss.SketchPlan(calibration.basis, [ss.FULL_STATE, 1, 2, 1], window=8)
        heads[place] = ss.SketchHead(plan, 3, "cpu", monitor=1)
    reported, energy, true, whole = lm["errors"].errors_on(model, heads, rows)
    recorder = lm["recurrence"].Recorder()
    model(rows, recorder)
    outputs = np.stack([recorder.outputs[place].numpy(force=True) for place in heads])
    np.testing.assert_allclose(energy + whole, np.square(outputs).sum((1, 2, 4)), rtol=1e-5)
    assert (reported[:, 1:] > 1e-5 * energy[:, 1:]).all() and (true[:, 1:] > 1e-5 * whole[:, 1:]).all()
    assert not reported[:, 0].any() and (true[:, 0] < 2.0**-18 * whole[:, 0]).all()  # a shadow in bfloat16


def test_a_tolerance_brings_requests_back_to_exact_decode(lm):
    """All requests above it change in every layer, and diverge less; below it nothing changes."""
    model, rows = tiny(lm, "gdn"), ids(3, 64)
    calibrations = lm["systems"].calibrate(model, rows, window=8)
    (narrow,) = lm["systems"].sketches(calibrations, [1], 8)
    standard = {place: ss.StandardHead(model.layer, 3, "cpu") for place in model.recurrent}
    watched, strict, loose = (
        {place: ss.SketchHead(own.plan, 3, "cpu", monitor=1, **bound) for place, own in narrow.layers.items()}
        for bound in ({}, {"tolerance": 1e-9}, {"tolerance": 1e9})
    )
    found = lm["tolerance"].compared(model, standard, watched, strict, rows)
    assert (found["requests"], found["slots"]) == (1.0, 1.0)
    (free, _), (held, _) = found["changed"]["divergence"]
    assert free > 1.2 * held > 1e-6
    found = lm["tolerance"].compared(model, standard, watched, loose, rows)
    assert found == {"requests": 0.0, "slots": 0.0, "changed": None}


def test_mixed_calibration_takes_turns(lm, tmp_path):
    """Both parts of a calibration, bases and scores, see every kind of text; halves of a file do not overlap."""
    for name, word in (("code", "x"), ("tables", "1")):
        (tmp_path / f"{name}.txt").write_text(f"{word} " * 200)
    kinds, density = lm["stress"].texts_of(tmp_path, encode, VOCAB, np.random.default_rng(0))
    assert list(kinds) == ["code", "tables", "random"] and density["code"] == 2.0
    assert len(kinds["code"][0]) == len(kinds["code"][1]) == 100 and kinds["random"][0] is None
    mixed = lm["stress"].mixture(np.zeros(200, int), kinds, 5, 20, np.random.default_rng(0))
    assert mixed.shape == (5, 20) and mixed[:, 0].tolist() == [0, *encode("x 1"), 0, *encode("x")]


def test_reports_name_the_run(lm, tmp_path, monkeypatch):
    """Heads' backends and devices, a command that a shell repeats, and the commit of this repository alone."""
    runs = lm["runs"]
    assert runs.devices(["cpu", "reference", "cpu"], tiny(lm, "gdn")) == {
        "heads": {"cpu": "CPU", "reference": "CPU"}, "model": "CPU",
    }  # fmt: skip
    given = ["--model", "m/a.safetensors", "--tokens", "t", "--out", "o", "--only", "* copy", "--commit", "abc"]
    words = runs.command("evaluate.py", lm["evaluate"].arguments(given))
    assert "--model MODELS/a.safetensors --tokens TOKENS" in words and "--only '* copy'" in words
    assert "--tasks" not in words and "abc" not in words
    (tmp_path / "examples" / "lm").mkdir(parents=True)
    monkeypatch.setattr(runs, "__file__", str(tmp_path / "examples" / "lm" / "runs.py"))
    assert runs.commit() == ""
    monkeypatch.setattr(runs, "_git", lambda folder, *words: "/elsewhere")  # a copy inside another checkout
    assert runs.commit() == ""


@pytest.mark.parametrize("kind", SHIPPED)
def test_logits_are_those_of_the_model_as_trained(kind, lm):
    """Against the implementation that trained the weights; SKETCHSSM_MODELS names their folder."""
    folder = Path(os.environ.get("SKETCHSSM_MODELS", "missing"))
    if not (folder / "tiny_lm.py").exists():
        pytest.skip("needs SKETCHSSM_MODELS, a folder of trained models with tiny_lm.py")
    spec = importlib.util.spec_from_file_location("tiny_lm", folder / "tiny_lm.py")
    trained = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(trained)
    model = lm["model"].HybridLM.load(folder / f"{kind}.safetensors")
    tokens = torch.randint(model.emb.num_embeddings, (2, 70), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        want = trained.TinyLM.load(folder / f"{kind}.safetensors")(tokens)
    assert relative(model.head(model(tokens)), want) < 1e-5  # float32, seven blocks
