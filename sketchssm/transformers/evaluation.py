"""Comparison of a model of transformers with and without heads: loss, agreement, traffic."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from sketchssm.heads.exact import ExactHead
from sketchssm.heads.sketch import SketchHead
from sketchssm.heads.standard import ReplayHead
from sketchssm.plans import traffic
from sketchssm.plans.plan import SketchPlan
from sketchssm.study.systems import exact_systems
from sketchssm.transformers.interception import Handler, intercepted
from sketchssm.transformers.modeling import Call, RecurrentLayer, Rule, layers
from sketchssm.transformers.patching import build_heads
from sketchssm.transformers.text import Ids, check_ids, evaluating, run_row, token_rows


class LayerTraffic(NamedTuple):
    """State traffic of one layer, in bytes per token of one sequence.

    Parameters
    ----------
    standard : float
        Traffic of standard decode.
    patched : float
        Traffic of the layer's head, see `sketchssm.plans.traffic`.
    """

    standard: float
    patched: float


@dataclass(frozen=True)
class ModelEvaluation:
    """Comparison of a model with and without heads, from `evaluate`.

    Parameters
    ----------
    tokens : int
        Tokens that were predicted.
    loss, patched_loss : float
        Cross-entropy in nats per token, of transformers and with heads.
    increase_error : float
        Standard error of the increase of the loss, over rows; NaN for one row.
    agreement : float
        Share of positions at which the likeliest next token is the same with and without heads.
    divergence : float
        Kullback-Leibler divergence of the predictions with heads from those of transformers, in nats per token.
    layers : dict of str to LayerTraffic
        State traffic by layer.
    errors : dict of str to float
        Relative squared error of sketches by layer, of heads with a `monitor`; see `SketchHead.errors`.
    exact_rows : dict of str to int
        Number of rows that ended with exact reads by layer, of heads with a `tolerance`.
    """

    tokens: int
    loss: float
    patched_loss: float
    increase_error: float
    agreement: float
    divergence: float
    layers: dict[str, LayerTraffic]
    errors: dict[str, float]
    exact_rows: dict[str, int]

    @property
    def increase(self) -> float:
        """Loss with heads minus loss of transformers."""
        return self.patched_loss - self.loss

    @property
    def perplexity(self) -> float:
        """Perplexity of transformers."""
        return math.exp(self.loss)

    @property
    def patched_perplexity(self) -> float:
        """Perplexity with heads."""
        return math.exp(self.patched_loss)

    @property
    def reduction(self) -> float:
        """State traffic of standard decode over that of the heads, all layers together."""
        return sum(x.standard for x in self.layers.values()) / sum(x.patched for x in self.layers.values())


def evaluate(
    model: torch.nn.Module,
    text: Any,
    plans: Mapping[str, SketchPlan] | str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    length: int | None = None,
    window: int | None = None,
    backend: str = "auto",
    progress: Callable[[str], None] | None = None,
    **settings: Any,
) -> ModelEvaluation:
    """Compare a model's predictions on a text with and without heads.

    Rows run one at a time, without a cache. Heads decode every row token by token from zero states. All other modules
    of the model compute the tokens of a row together.

    Parameters
    ----------
    model : torch.nn.Module
        A model of transformers for causal language modelling.
    text : str, sequence of str, or array of int
        Text that calibration has not used; in the forms of `calibrate`.
    plans : ModelPlans, mapping of str to SketchPlan, path, or {"standard", "replay"}
        See `patch`.
    tokenizer : PreTrainedTokenizerBase, optional
        For strings: the model's tokenizer.
    length : int, optional
        Tokens of a row that is cut; default 1024.
    window : int, optional
        Tokens from one flush to the next, only for "replay"; default 16.
    backend : str, default "auto"
        See `SketchHead`.
    progress : callable, optional
        Called with a label before each row.
    **settings
        Further keywords of the heads.

    Returns
    -------
    ModelEvaluation
        Loss, agreement and traffic.

    Raises
    ------
    ValueError
        If `patch` or `calibrate` would refuse an argument.
    """
    rows = token_rows(text, tokenizer, length, least=2)
    check_ids(model, rows)
    step = progress or (lambda label: None)
    found = layers(model)
    heads = build_heads(model, found, plans, 1, window, backend, settings)
    decoders = {name: RowDecoder(head, found[name].rule) for name, head in heads.items()}
    parts = []
    watched = {name: head for name, head in heads.items() if isinstance(head, SketchHead) and head.monitor}
    measured = {name: np.zeros(2) for name in watched}
    exact = {name: 0 for name, head in watched.items() if head.tolerance is not None}
    with evaluating(model), torch.no_grad():
        for i, row in enumerate(rows):
            step(f"row {i + 1} of {len(rows)}")
            parts.append(_compared(model, row, decoders, found))
            for name, head in watched.items():  # which the next row resets
                own = head.errors()
                measured[name] += own.error.sum(), own.energy.sum()
                if name in exact:
                    exact[name] += int(own.exact.sum())
    sums = np.array(parts)
    counts = np.array([row.size - 1 for row in rows])
    loss, patched, agreed, divergence = (float(x) for x in sums.sum(axis=0) / counts.sum())
    increases = (sums[:, 1] - sums[:, 0]) / counts
    error = float(increases.std(ddof=1) / len(rows) ** 0.5) if len(rows) > 1 else math.nan
    costs = {name: _traffic(x, heads.get(name)) for name, x in found.items()}
    errors = {name: float(one / energy) if energy else math.nan for name, (one, energy) in measured.items()}
    return ModelEvaluation(int(counts.sum()), loss, patched, error, agreed, divergence, costs, errors, exact)


def _compared(
    model: torch.nn.Module, row: Ids, decoders: dict[str, RowDecoder], found: dict[str, RecurrentLayer]
) -> list[float]:
    """Sums over a row's predictions: both losses, agreements, and divergence."""
    logits, ids = run_row(model, row)
    plain = logits[:-1].float().log_softmax(-1)
    with intercepted(decoders, found):
        patched = run_row(model, row)[0][:-1].float().log_softmax(-1)
    following = ids[1:, None]
    sums = (
        -plain.gather(1, following).double().sum(),
        -patched.gather(1, following).double().sum(),
        (plain.argmax(-1) == patched.argmax(-1)).sum(),
        (plain.exp() * (plain - patched)).sum(-1).double().sum(),
    )
    return [float(x) for x in sums]


class RowDecoder(Handler):
    """Decodes whole rows of one layer with a head of one slot, from zero states.

    transformers runs the first `prefix` tokens of a row; the head goes on from their state, or from zeros if `wiped`.
    """

    def __init__(self, head: ExactHead, rule: Rule, prefix: int = 0, wiped: bool = False) -> None:
        self._head, self._rule, self._prefix, self._wiped = head, rule, prefix, wiped

    def prefill(self, run: Callable[..., Any], given: dict[str, Any], call: Call, cache: Any) -> Any:
        """See `sketchssm.transformers.interception.Handler`."""
        self._head.reset()
        count, parts = call.tokens.v.shape[1], []
        if self._prefix:
            asked = {name: True for name in ("return_final_states", "output_final_state") if name in given}
            first = {name: given[name][:, : self._prefix] for name in self._rule.tokens}
            out, state = run(**given | first | asked)
            if not self._wiped:
                self._head.load_state(self._rule.turned(state).float().contiguous())
            parts.append(out)
        decoded = call.last(count - self._prefix)
        parts.append(decoded.finished(self._head.step(*decoded.tokens)))
        out = torch.cat([part.to(parts[-1]) for part in parts], 1)
        return out if given.get("return_final_states") is False else (out, None)


def _traffic(layer: RecurrentLayer, head: ExactHead | None) -> LayerTraffic:
    shape = layer.layer
    standard = shape.heads * traffic.standard(shape.key_dim, shape.value_dim)
    if head is None:
        return LayerTraffic(standard, standard)
    if isinstance(head, SketchHead):
        reduction = head.plan.reduction_with(head.state_dtype, head.sketch_dtype)
    else:
        window = head.window if isinstance(head, ReplayHead) else 1
        systems = exact_systems(shape, window, state_dtype=head.state_dtype)
        reduction = systems[isinstance(head, ReplayHead)].reduction
    return LayerTraffic(standard, standard / reduction)
