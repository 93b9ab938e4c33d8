"""Recall of models of transformers: states of the text, from which heads go on, against whole passes."""

import pytest
from samples import refused, self_answered
from test_transformers_evaluation import random_plans
from tiny_models import SETTINGS, call, forward, make, qwen, st, torch

import sketchssm as ss
from sketchssm.study.tasks import Score

__all__ = ["qwen"]  # a fixture


def likeliest(model):
    def run(ids):
        with torch.no_grad():
            return model(torch.from_numpy(ids), use_cache=False).logits.argmax(-1).numpy()

    return run


def asked(model, prompts=12):
    """Prompts of 60 tokens before a question whose right answers are those of the model."""
    return self_answered(likeliest(model), prompts)


@pytest.mark.parametrize("name", SETTINGS)
def test_exact_heads_answer_as_the_model(name):
    """From the states of the text, of a part of it, and from the first token; not from wiped states."""
    model = make(name)
    for x in st.layers(model).values():
        x.module.time_step_limit = (0.0, float("inf"))  # classes with a limit clamp in prefill alone
    prompts = asked(model)
    assert st.recall(model, prompts) == (1, 0)
    for decoded in (0, 25, prompts.question):
        assert st.recall(model, prompts, "standard", decoded=decoded, backend="cpu") == (1, 0)
    whole = {"decoded": prompts.question, "wiped": True}  # the text begins from zero states anyway
    assert st.recall(model, prompts, "standard", backend="cpu", **whole) == (1, 0)
    if name != "FalconH1":  # its answers do not depend on states
        assert st.recall(model, prompts, "standard", wiped=True, backend="cpu").share < 1


@pytest.mark.parametrize("name", ("Mamba2", "Qwen3_5"))
def test_sketches_answer_as_in_stepwise_decoding(name):
    """The text is a prompt with a cache; the heads of a patch decode its last tokens, questions and answers."""
    model, decoded = make(name), 20
    prompts, plans = asked(model), random_plans(model)
    ids, stop = torch.from_numpy(prompts.ids), prompts.question - decoded
    with st.patch(model, plans, slots=12, backend="cpu"):
        _, cache = forward(model, ids[:, :stop])
        parts = [call(model, ids[:, i : i + 1], cache, i) for i in range(stop, ids.shape[1])]
    want = prompts.score(torch.cat(parts, 1).argmax(-1).numpy())
    labels = []
    got = st.recall(model, prompts, plans, decoded=decoded, backend="cpu", progress=labels.append)
    assert got == want
    assert 0 < want.share < 1
    assert labels[::11] == ["prompt 1 of 12", "prompt 12 of 12"]


def test_wiped_layers_are_those_of_the_plans(qwen):
    """A layer without a plan keeps its state."""
    plans = random_plans(qwen)
    prompts, settings = asked(qwen), {"wiped": True, "backend": "cpu"}
    exact = {
        name: ss.SketchPlan(ss.SketchBasis.random(plan.layer, 1, window=4), [ss.FULL_STATE] * 4)
        for name, plan in plans.items()
    }
    both = st.recall(qwen, prompts, exact, **settings)
    one = st.recall(qwen, prompts, dict(list(exact.items())[:1]), **settings)
    assert both == st.recall(qwen, prompts, "standard", wiped=True, backend="cpu")
    assert both.share < one.share < 1


def test_training_mode_returns(qwen):
    model = qwen.train()
    assert isinstance(st.recall(model, asked(model.eval(), 2)), Score)
    assert not model.training
    st.recall(model.train(), asked(make("Qwen3Next"), 2), "replay", window=4, backend="cpu")
    assert model.training
    model.eval()


def test_bad_arguments(qwen):
    prompts = asked(qwen, 2)
    for decoded in (-1, 61, True, 2.0):
        refused("decoded: expected an integer from 0 to 60", st.recall, qwen, prompts, "standard", decoded=decoded)
    for given in ({"decoded": 2}, {"wiped": True}, {"window": 4}, {"state_dtype": "bfloat16"}):
        refused("plans: expected heads for decoded, wiped, window and keywords of", st.recall, qwen, prompts, **given)
    prompts.ids[1, 3] = 64
    refused("prompts: expected token ids from 0 to 63, got 64", st.recall, qwen, prompts)
