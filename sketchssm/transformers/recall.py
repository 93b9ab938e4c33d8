"""Recall of a model of transformers, with and without heads: how many questions about a text it answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from sketchssm.layer.checks import check_integer
from sketchssm.plans.plan import SketchPlan
from sketchssm.study.tasks import Prompts, Score
from sketchssm.transformers.evaluation import RowDecoder
from sketchssm.transformers.interception import intercepted
from sketchssm.transformers.modeling import layers
from sketchssm.transformers.patching import build_heads
from sketchssm.transformers.text import check_ids, evaluating, run_row


def recall(
    model: torch.nn.Module,
    prompts: Prompts,
    plans: Mapping[str, SketchPlan] | str | os.PathLike[str] | None = None,
    *,
    decoded: int = 0,
    wiped: bool = False,
    window: int | None = None,
    backend: str = "auto",
    progress: Callable[[str], None] | None = None,
    **settings: Any,
) -> Score:
    """Share of questions that a model answers, with heads from the question on.

    Prompts run one at a time, without a cache. transformers runs the recurrences of the text, as in a prefill. Heads
    go on from the states and decode question and answers token by token. All other modules of the model compute the
    tokens of a prompt together.

    Parameters
    ----------
    model : torch.nn.Module
        A model of transformers for causal language modelling.
    prompts : Prompts
        Prompts of one task, from `sketchssm.study.tasks.make_prompts`.
    plans : ModelPlans, mapping of str to SketchPlan, path, or {"standard", "replay"}, optional
        See `patch`. None is transformers without heads.
    decoded : int, default 0
        Last tokens of the text that heads decode too.
    wiped : bool, default False
        Let heads begin from zero states: what is still answered does not need the states of their layers.
    window : int, optional
        Tokens from one flush to the next, only for "replay"; default 16.
    backend : str, default "auto"
        See `SketchHead`.
    progress : callable, optional
        Called with a label before each prompt.
    **settings
        Further keywords of the heads.

    Returns
    -------
    Score
        Share of right answers with its standard error; see `Prompts.right`.

    Raises
    ------
    ValueError
        If `patch` would refuse an argument, `decoded` is out of range, the model does not know a token, or arguments
        of heads are given without `plans`.
    """
    check_integer("decoded", decoded, 0, prompts.question, ", the tokens of the text")
    if plans is None and (decoded or wiped or window is not None or settings):
        raise ValueError("plans: expected heads for decoded, wiped, window and keywords of heads, got None")
    check_ids(model, list(prompts.ids), "prompts")
    found = layers(model)
    heads = {} if plans is None else build_heads(model, found, plans, 1, window, backend, settings)
    prefix = prompts.question - decoded
    decoders = {name: RowDecoder(head, found[name].rule, prefix, wiped) for name, head in heads.items()}
    said = []
    with evaluating(model), torch.no_grad(), intercepted(decoders, found):
        for i, row in enumerate(prompts.ids):
            if progress is not None:
                progress(f"prompt {i + 1} of {len(prompts.ids)}")
            logits = run_row(model, row)[0]
            said.append(logits[prompts.question - 1 :].argmax(-1).cpu().numpy())
    return prompts.score(np.stack(said))
