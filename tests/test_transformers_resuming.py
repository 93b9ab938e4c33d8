"""Calibrations of models that are interrupted and go on, and samples of given sizes."""

import pytest
from samples import fingerprints
from tiny_models import make, prompt, qwen, st, torch

from sketchssm.plans.files import FileFormatError
from sketchssm.transformers import resuming
from sketchssm.transformers.identity import whole_digest

__all__ = ["qwen"]  # a fixture

TEXT = prompt(5, 24, seed=7)
ASKED = {"prompts": prompt(2, 16, seed=9), "answers": torch.ones((2, 16), dtype=bool)}


class Stopped(Exception):
    """In place of Ctrl-C."""


def until(label):
    """A callable for progress that stops at a label."""

    def step(now):
        if now == label:
            raise Stopped

    return step


@pytest.mark.parametrize(
    ("label", "settings", "left"),
    (
        ("moments, row 2 of 3", {"mean_rank": 3, "method": "error"}, 4),
        ("bases", {"mean_rank": 3, "method": "error"}, 2),
        ("scores, row 2 of 2", {"reduction": 1.7, **ASKED}, 5),  # two runs are the trial of both passes
        ("answers, row 2 of 2", {"reduction": 1.7, **ASKED}, 3),
        ("scores, row 2 of 2", {"mean_rank": 3, "method": "perturbation"}, 4),  # one run, and one for each layer
    ),
)
def test_a_later_run_continues(qwen, label, settings, left, tmp_path, monkeypatch):
    """Plans are those of a run without interruption, and rows that were done do not run again."""
    monkeypatch.setattr(resuming, "SECONDS", 0.0)
    settings = {"window": 4, "resume": tmp_path / "sums"} | settings
    with pytest.raises(Stopped):
        st.calibrate(qwen, TEXT, progress=until(label), **settings)
    runs = []
    hook = qwen.get_input_embeddings().register_forward_hook(lambda *given: runs.append(1))
    found = st.calibrate(qwen, TEXT, **settings)
    hook.remove()
    assert len(runs) == left
    want = st.calibrate(qwen, TEXT, **settings | {"resume": None})
    assert fingerprints(found) == fingerprints(want)
    assert found.allocation == want.allocation


def test_other_sums(qwen, tmp_path):
    settings = {"window": 4, "mean_rank": 2, "method": "error", "resume": tmp_path / "sums"}
    with pytest.raises(Stopped):
        st.calibrate(qwen, TEXT, progress=until("moments, row 1 of 3"), **settings)
    weights, wide = make("Qwen3Next"), make("Qwen3Next").double()
    with torch.no_grad():
        weights.get_input_embeddings().weight[0, 0] += 1  # the recurrent layers are the same
    assert whole_digest(torch.compile(qwen, backend="eager")) == whole_digest(qwen) != whole_digest(weights)
    for other in (
        {"text": TEXT[:4]},
        {"text": (TEXT + 1) % 64},
        {"window": 5},
        {"method": "perturbation"},
        {"model": weights},
        {"model": wide},
    ):
        with pytest.raises(
            ValueError, match=r"^resume: expected sums of this model, text and settings, got others in"
        ):
            st.calibrate(**{"model": qwen, "text": TEXT} | settings | other)
    with pytest.raises(TypeError, match=r"^resume: expected a path, got int$"):
        st.calibrate(qwen, TEXT, **settings | {"resume": 5})
    (tmp_path / "sums").write_bytes(b"damaged")
    with pytest.raises(FileFormatError, match="sums: not a whole safetensors file"):
        st.calibrate(qwen, TEXT, **settings)
    with pytest.raises(OSError, match="none"):  # before any work
        st.calibrate(
            qwen, TEXT, progress=until("moments, row 1 of 3"), **settings | {"resume": tmp_path / "none" / "x"}
        )


def test_samples(qwen):
    """Whole rows of as many tokens, for bases and for ranks; the rest of the text is left out."""
    labels = []
    plans = st.calibrate(qwen, TEXT, window=4, mean_rank=3, method="error", sample=(25, 24), progress=labels.append)
    assert labels == ["moments, row 1 of 2", "moments, row 2 of 2", "bases", "scores, row 1 of 1"]
    assert plans.allocation.tokens == 72
    for sample, message in (
        ((72, 49), r"expected at most the 120 tokens of rows, got \(72, 49\)"),
        ((24,), r"expected two numbers of tokens"),
        ((24, 0), r"expected a positive integer, got 0"),
    ):
        with pytest.raises(ValueError, match=rf"^sample: {message}"):
            st.calibrate(qwen, TEXT, window=4, mean_rank=3, sample=sample)
