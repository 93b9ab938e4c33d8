"""Calibration of whole models: plans by layer, their file, and the model that they belong to."""

import copy
import re

import numpy as np
import pytest
from samples import fingerprints, refused, relative
from tiny_models import SETTINGS, generate, make, prompt, qwen, st, torch

import sketchssm as ss
from sketchssm.arrays import interop
from sketchssm.calibrate.allocation import allocate_ranks
from sketchssm.calibrate.basis import fit_basis
from sketchssm.calibrate.windows import take_tokens
from sketchssm.plans.model_plans import ModelPlans

__all__ = ["qwen"]  # a fixture

WINDOW = 4


def text(rows=3, length=24):
    return prompt(rows, length, seed=7)


@pytest.fixture(scope="module")
def plans(qwen):
    return st.calibrate(qwen, text(), mean_rank=3, window=WINDOW)


@pytest.mark.parametrize("name", SETTINGS)
def test_streamed_sums_are_those_of_recorded_traces(name):
    """Bases, scores and ranks as from traces that are recorded first. Both sum the same numbers in one order."""
    model = make(name)
    plans = st.calibrate(model, text(), mean_rank=3, window=WINDOW)
    with st.record(model, gradients=True) as recording:
        for row in text().split(1):
            logits = model(row, use_cache=False).logits
            torch.nn.functional.cross_entropy(logits[0, :-1], row[0, 1:], reduction="sum").backward()
    scores, bases = [], []
    for layer in recording.layers:
        tokens = recording.tokens(layer)
        moments = ss.Moments(recording.layers[layer].layer, window=WINDOW)
        for one in tokens[:2]:
            moments.update(*(None if x is None else x[None] for x in one))
        bases.append(fit_basis(moments))
        scores.append(ss.RankScores(bases[-1]))
        last = (None if x is None else x[None] for x in tokens[2])
        scores[-1].update(*last, grad=recording._handlers[layer].gradients[2][None])
    allocation = allocate_ranks(scores, 3.0)
    assert list(plans) == list(recording.layers)
    for plan, basis, ranks in zip(plans.values(), bases, allocation.ranks, strict=True):
        # The backward pass of `calibrate` has no gradients of parameters, which may change the order of a sum.
        assert np.array_equal(plan.ranks, ranks)
        assert relative(plan.omega, basis.omega[..., : plan.omega.shape[-1]]) < 1e-6  # the plan's columns are float32
        assert plan.window == WINDOW
    assert plans.allocation.method == "gradient"
    assert plans.allocation.tokens == 72
    assert plans.allocation.gap == pytest.approx(allocation.gap, abs=1e-6)
    assert plans.reduction == pytest.approx(allocation.traffic.reduction, rel=1e-12)
    for sums, ranks, got in zip(scores, allocation.ranks, plans.allocation.retained.values(), strict=True):
        lost = sum(0 if rank == ss.FULL_STATE else sums.error[head, rank] for head, rank in enumerate(ranks))
        assert got == pytest.approx(1 - lost / sums.error[:, 0].sum(), rel=1e-5)  # inputs are float32


def test_the_model_is_left_as_it_was(qwen):
    model = copy.deepcopy(qwen).train()
    model.lm_head.weight.requires_grad_(False)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    st.calibrate(model, text(), window=WINDOW, mean_rank=3)
    assert model.training
    assert before == {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.get_input_embeddings()._forward_hooks


def test_backward_passes_keep_the_inputs_of_blocks_alone(qwen):
    """A block of layers runs again for its gradients; afterwards its forward is that of its class."""
    model, runs = copy.deepcopy(qwen), []
    model.model.layers[1].input_layernorm.register_forward_hook(lambda *given: runs.append(torch.is_grad_enabled()))
    st.calibrate(model, text(2), window=WINDOW, mean_rank=3)
    assert runs == [False, True, True, False, True, True]  # a trial of both passes, moments, scores
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("method", ("error", "uniform", "gradient"))
def test_methods(qwen, method, monkeypatch):
    """Only scores with gradients run backward passes."""
    calls = []
    backward = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda *given: (calls.append(1), backward(*given)))
    plans = st.calibrate(qwen, text(), mean_rank=2, window=WINDOW, method=method)
    assert plans.allocation.method == method
    assert len(calls) == 2 * (method == "gradient")  # the first finds layers without gradients
    if method == "uniform":
        assert all((plan.ranks == 2).all() for plan in plans.values())


def test_rows_that_are_cut(qwen, plans):
    """A stream of tokens, and text with a tokenizer, give the rows of an array."""

    class Tokenizer:
        eos_token_id = 5

        def __call__(self, string, **settings):
            assert settings["add_special_tokens"] is False
            return {"input_ids": [int(part) for part in string.split()]}

    stream = text().flatten()
    words = [" ".join(map(str, part.tolist())) for part in (stream[:30], stream[31:])]
    stream[30] = 5
    rows = stream.view(3, 24)
    want = st.calibrate(qwen, rows, mean_rank=3, window=WINDOW)
    for given in (
        {"text": torch.cat([stream, stream[:23]]).numpy(), "length": 24},  # the last 23 tokens are left out
        {"text": list(rows)},
        {"text": words, "tokenizer": Tokenizer(), "length": 24},
    ):
        got = st.calibrate(qwen, mean_rank=3, window=WINDOW, **given)
        assert fingerprints(got) == fingerprints(want)


def test_progress(qwen):
    labels = []
    st.calibrate(qwen, text(5), window=WINDOW, mean_rank=3, progress=labels.append)
    assert labels[:2] == ["moments, row 1 of 3", "moments, row 2 of 3"]
    assert labels[3:] == ["bases", "scores, row 1 of 2", "scores, row 2 of 2"]


@pytest.mark.parametrize(
    ("settings", "message"),
    (
        ({"text": text(1)}, r"text: expected at least 2 rows, got 1"),
        ({"text": text(2, 5)}, r"text: expected rows of at least 6 tokens, got a row of 5"),
        ({"text": text().flatten()}, r"text: expected at least 2 rows, got 0; .* than 1024"),
        ({"text": "any"}, r"tokenizer: expected the model's tokenizer for text, got None"),
        ({"text": text(), "tokenizer": len}, r"tokenizer: expected None with token ids, got builtin_"),
        ({"text": {"input_ids": text()}}, r"text: expected a sequence of strings or of rows .*, got \{'input"),
        ({"text": text(), "length": 8}, r"length: expected None with rows of token ids, got 8"),
        ({"text": text().flatten(), "length": 1}, r"length: expected an integer of at least 2, got 1"),
        ({"text": text().float()}, r"text: expected strings or integers .* got float32 of \(24,\)"),
        ({"text": text() - 64}, r"text: expected token ids from 0 to 63, got -\d+"),
        ({"text": text() + 64}, r"text: expected token ids from 0 to 63, got \d+"),
        ({"method": "best"}, r"method: expected one of gradient, perturbation, .* got 'best'"),
        ({"mean_rank": 9, "method": "uniform", "window": 8}, r"mean_rank: expected at most 3 for a uniform .* got 9"),
        ({"mean_rank": 0.5}, r"mean_rank: expected a finite number of at least 1, got 0.5"),
        ({"rank_max": 0}, r"rank_max: expected a positive integer, got 0"),
        ({"window": 1}, r"window: expected an integer from 2"),
    ),
)
def test_bad_settings(qwen, settings, message):
    labels = []
    with pytest.raises((TypeError, ValueError), match=message):
        st.calibrate(
            qwen, **({"text": text(), "window": WINDOW, "mean_rank": 3, "progress": labels.append} | settings)
        )
    assert not labels  # before any work


def test_other_classes(qwen):
    refused("text: expected a sequence of strings or of rows of token ids, got", st.calibrate, qwen, None, mean_rank=3)
    for call in (lambda: st.calibrate("models/qwen", text()), lambda: st.patch("models/qwen", "replay")):
        refused("model: expected a model, as from_pretrained returns it, got str", call)


def test_other_files(plans, qwen, tmp_path):
    path = tmp_path / "plans.safetensors"
    next(iter(plans.values())).save(path)
    with pytest.raises(ValueError, match=r"^plans: expected names among model\..*, got 'plans'"):
        st.patch(qwen, path)  # the plan of a layer with the name of its file


def test_patch_takes_plans_and_their_file(plans, qwen, tmp_path):
    path = tmp_path / "plans.safetensors"
    plans.save(path)
    answers = []
    for given in (plans, path, str(path), dict(plans)):
        with st.patch(qwen, given, slots=2, backend="cpu") as patch:
            assert {name: head.plan.fingerprint for name, head in patch.heads.items()} == fingerprints(plans)
            answers.append(generate(qwen, prompt(2, 9)).sequences)
    assert all(torch.equal(answers[0], answer) for answer in answers)


def test_full_ranks_decode_like_the_model(qwen):
    """Every head reads its full state: the tokens are the unpatched model's."""
    plans = st.calibrate(qwen, text(), mean_rank=1000, window=WINDOW)
    assert all((plan.ranks == ss.FULL_STATE).all() for plan in plans.values())
    want = generate(qwen, prompt(2, 9))
    with st.patch(qwen, plans, slots=2, backend="cpu"):
        assert torch.equal(generate(qwen, prompt(2, 9)).sequences, want.sequences)


def changed(model, edit):
    other = copy.deepcopy(model)
    edit(other)
    return other


def test_plans_of_another_model(plans, qwen):
    """The message names the first layer that differs."""

    def scale(model):
        with torch.no_grad():
            model.model.layers[1].linear_attn.in_proj_ba.weight[0, 0] += 1

    def drop(model):
        model.model.layers[1].linear_attn = torch.nn.Identity()

    def rename(model):
        kind = type(model.model.layers[0].linear_attn)
        model.model.layers[0].linear_attn.__class__ = type("Other", (kind,), {"__module__": kind.__module__})

    shape = {"linear_key_head_dim": 16}
    first, second = (re.escape(f"model.layers.{i}.linear_attn") for i in range(2))
    for model, message in (
        (changed(qwen, scale), rf"layer {second}: expected parameters with SHA-256 \w{{8}}\.\.\., got \w{{8}}\.\.\.$"),
        (changed(qwen, drop), rf"expected a recurrent layer {second}, got none$"),
        (changed(qwen, rename), rf"layer {first}: expected a Qwen3NextGatedDeltaNet, got a Other$"),
        (make("Qwen3Next", **shape), rf"layer {first}: expected Layer\(.*key_dim=8.*, got Layer\(.*key_dim=16"),
        (make("Qwen3_5"), r"expected a Qwen3NextForCausalLM, got a Qwen3_5ForCausalLM$"),
    ):
        refused(f"plans: made for another model: {message}", st.patch, model, plans)
    more = make("Qwen3Next", num_hidden_layers=4, layer_types=[*["linear_attention"] * 3, "full_attention"])
    with pytest.raises(ValueError, match=r"expected no recurrent layer model\.layers\.2\.linear_attn, got one$"):
        st.patch(more, plans)


def test_fingerprints_do_not_depend_on_the_type(plans, qwen):
    """Weights of a file in bfloat16 have one fingerprint, however they are loaded."""
    rounded = copy.deepcopy(qwen).to(torch.bfloat16)
    for kind in (torch.bfloat16, torch.float32, torch.float16):
        assert st.fingerprint(rounded.to(kind)) == plans.fingerprint


def test_fingerprints_of_large_parameters(qwen, monkeypatch):
    """Values at even distances, the first included."""
    monkeypatch.setattr("sketchssm.transformers.identity.SAMPLES", 7)
    name = "model.layers.0.linear_attn"
    before = st.fingerprint(qwen).layers[name].parameters
    other = copy.deepcopy(qwen)
    weight = other.get_submodule(name).out_proj.weight.data.view(-1)
    step = -(-weight.numel() // 7)
    weight[1] += 1
    assert st.fingerprint(other).layers[name].parameters == before
    weight[5 * step] += 1
    assert st.fingerprint(other).layers[name].parameters != before


def test_parameters_without_values(qwen):
    refused("model: expected loaded parameters, got", st.fingerprint, copy.deepcopy(qwen).to("meta"))


def test_plans_need_their_fingerprint(plans):
    one = dict(list(plans.items())[:1])
    refused("plans: expected the layers .*, got", ModelPlans, one, plans.fingerprint, plans.allocation)


def graded(model, rows, wanted=None):
    """Inputs and gradients of a model's layers, row by row."""
    with st.record(model, gradients=True) as recording:
        for i, row in enumerate(rows):
            logits = model(row[None], use_cache=False).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits, row[1:], reduction="none")
            (losses if wanted is None else losses[wanted[i][1:]]).sum().backward()
    return recording


@pytest.mark.parametrize("asked", (False, True))
def test_plans_with_residuals(qwen, asked):
    """Ranks and bits as from traces that are recorded first, with the loss of answers alone."""
    rows, prompts = text(), prompt(2, 16, seed=9)
    answers = torch.zeros(prompts.shape, dtype=torch.bool)
    answers[0, 11:13] = answers[1, 14] = True
    given = {"prompts": prompts, "answers": answers} if asked else {}
    plans = st.calibrate(qwen, rows, reduction=2.7, window=WINDOW, **given)
    parts = [graded(qwen, rows), *([graded(qwen, prompts, answers)] if asked else [])]
    tasks = [[] for _ in parts]
    for name, plan in plans.items():
        moments = ss.Moments(plan.layer, window=WINDOW)
        for one in parts[0].tokens(name)[:2]:
            moments.update(*(None if x is None else x[None] for x in one))
        for scores, recording, rows_used in zip(tasks, parts, ([2], [0, 1]), strict=False):
            scores.append(ss.JointScores(fit_basis(moments)))
            for i in rows_used:
                one = (None if x is None else x[None] for x in recording.tokens(name)[i])
                scores[-1].update(*one, grad=recording._handlers[name].gradients[i][None])
    want = ss.allocate_joint(tasks[0], 2.7, *tasks[1:])
    for plan, ranks, bits in zip(plans.values(), want.ranks, want.residual_bits, strict=True):
        assert np.array_equal(plan.ranks, ranks)
        assert np.array_equal(plan.residual_bits, bits)
        assert (plan.map.name, plan.sketch_dtype) == ("subspace", "int8")
    assert {bits for plan in plans.values() for bits in plan.residual_bits} > {0, 3}  # heads of their own bits
    assert plans.allocation.method == "joint"
    assert plans.reduction == pytest.approx(want.traffic.reduction, rel=1e-12)
    assert plans.reduction >= 2.7
    for scores, plan, kept in zip(tasks[0], plans.values(), plans.allocation.retained.values(), strict=True):
        lost = sum(
            0 if rank == ss.FULL_STATE else scores.error[head, scores.ranks.index(rank), scores.bits.index(bits)]
            for head, (rank, bits) in enumerate(zip(plan.ranks, plan.residual_bits, strict=True))
        )
        assert kept == pytest.approx(1 - lost / scores.energy.sum(), rel=1e-4)


def test_bits_that_are_given(qwen):
    """The method "uniform" gives every head the rank, too."""
    even = st.calibrate(qwen, text(), mean_rank=2, residual_bits=2, method="uniform", window=WINDOW)
    assert all((plan.ranks == 2).all() and (plan.residual_bits == 2).all() for plan in even.values())
    assert even.allocation.method == "uniform"


MARKS = torch.ones((1, 16), dtype=torch.bool)


@pytest.mark.parametrize(
    ("settings", "message"),
    (
        ({}, r"reduction: expected at most .*, got 9"),
        ({"prompts": prompt(1, 16), "answers": MARKS}, r"reduction: expected at most .*, got 10"),
        ({"reduction": 2.7, "map": "ridge"}, r"map: expected 'subspace' with residuals, got 'ridge'"),
        ({"reduction": 2.7, "method": "loss"}, r"method: expected one of gradient, "),
        ({"reduction": 2.7, "method": "uniform"}, r"reduction: expected None with the method 'uniform'"),
        ({"reduction": 2.7, "prompts": prompt(1, 16)}, r"answers: expected an argument beside prompts, got None"),
        ({"reduction": 2.7, "answers": MARKS}, r"prompts: expected an argument beside answers, got None"),
        ({"mean_rank": 3, "prompts": prompt(1, 16), "answers": MARKS}, r"prompts: expected None without residuals"),
        (
            {"reduction": 2.7, "method": "error", "prompts": prompt(1, 16), "answers": MARKS},
            r"prompts: expected None without .*, got the scores joint and the method 'error'$",
        ),
        ({"reduction": 2.7, "prompts": prompt(1, 5), "answers": MARKS}, r"prompts: expected rows of at least 6 tok"),
        ({"reduction": 2.7, "prompts": prompt(1, 16) + 64, "answers": MARKS}, r"prompts: expected token ids from 0"),
        ({"reduction": 2.7, "prompts": prompt(1, 16), "answers": MARKS[:, 1:]}, r"answers: expected the 1 rows of p"),
        ({"reduction": 2.7, "prompts": prompt(1, 16), "answers": MARKS.int()}, r"answers: expected bool, got int32"),
        (
            {"reduction": 2.7, "prompts": prompt(1, 16), "answers": torch.arange(16)[None] == 0},
            r"answers: expected one True after the first token of row 0, got none",
        ),
    ),
)
def test_bad_settings_of_residuals(qwen, settings, message):
    labels = []
    with pytest.raises(ValueError, match=message):
        st.calibrate(qwen, text(), window=WINDOW, progress=labels.append, **settings)
    assert not labels  # before any work


def test_a_layer_without_states_is_named():
    model = make("Qwen3Next")
    name, layer = list(st.layers(model).items())[1]
    torch.nn.init.zeros_(layer.module.in_proj_qkvz.weight)
    refused(f"layer {name}: moments: expected samples", st.calibrate, model, text(), window=WINDOW, mean_rank=3)


def test_prompts_are_not_ignored(qwen):
    """Scores of ranks have no use for them."""
    given = {"prompts": prompt(1, 16), "answers": MARKS, "window": WINDOW, "scores": ["ranks"]}
    refused("prompts: expected None without .*, got the scores ranks", st.collect, qwen, text(), **given)


def test_sums_stay_on_the_models_device(monkeypatch):
    """PyTorch's CPU stands for a device: plans are those of the host. Larger ranks would tie: they retain all."""
    model, settings = make("Qwen3Next"), {"window": WINDOW, "mean_rank": 1.5}
    want = st.calibrate(model, text(), **settings)
    seen = []

    def take(layer, *inputs, kept=take_tokens):
        seen.append(inputs[0])
        return kept(layer, *inputs)

    monkeypatch.setattr("sketchssm.calibrate.sums.take_tokens", take)
    monkeypatch.setattr(interop, "is_on_device", lambda array: interop.framework(array) == "torch")
    got = st.calibrate(model, text(), **settings)
    assert all(torch.is_tensor(x) for x in seen)
    for name, plan in got.items():
        assert np.array_equal(plan.ranks, want[name].ranks)
    # float32 products of two libraries; columns of equal eigenvalues differ, what they retain does not
    assert got.allocation.retained == pytest.approx(want.allocation.retained, abs=1e-3)


@pytest.mark.parametrize(("place", "method"), [("host", "error"), ("host", "gradient"), ("disk", "gradient")])
def test_models_as_people_load_them(place, method, tmp_path):
    """Of parameters that accelerate keeps elsewhere: the same plans and fingerprint."""
    accelerate = pytest.importorskip("accelerate")
    model, settings = make("Qwen3Next"), {"window": WINDOW, "mean_rank": 3, "method": method}
    want = st.calibrate(model, text(), **settings)
    load = {
        "host": lambda model: accelerate.cpu_offload(model, execution_device="cpu"),
        "disk": lambda model: accelerate.disk_offload(model, tmp_path, execution_device="cpu"),
    }
    loaded = load[place](make("Qwen3Next"))
    assert next(loaded.parameters()).is_meta
    got = st.calibrate(loaded, text(), **settings)
    assert got.fingerprint == want.fingerprint
    assert fingerprints(got) == fingerprints(want)
