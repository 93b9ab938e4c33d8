"""Record the inputs of a model's recurrent layers, for calibration and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sketchssm.calibrate.traces import Traces
from sketchssm.layer.calls import check_writes
from sketchssm.layer.checks import check_items
from sketchssm.layer.recurrence import Tokens
from sketchssm.transformers.interception import NO_CACHE, Handler, intercepted
from sketchssm.transformers.modeling import Call, RecurrentLayer, layers

Array = npt.NDArray[np.float32]


class Recording:
    """Inputs of a model's recurrent layers, sequence by sequence; made by `record`.

    Parameters
    ----------
    found : dict of str to RecurrentLayer
        The layers by their names.
    gradients : bool
        Whether gradients of the layers' outputs are recorded.

    Attributes
    ----------
    layers : dict of str to RecurrentLayer
        The layers by their names.
    """

    def __init__(self, found: dict[str, RecurrentLayer], gradients: bool) -> None:
        self.layers = found
        self._handlers = {name: _Recorder(layer, gradients) for name, layer in found.items()}

    def __len__(self) -> int:
        """Sequences recorded."""
        return min(len(handler.tokens) for handler in self._handlers.values())

    def tokens(self, name: str) -> list[Tokens]:
        """Inputs of one layer.

        Parameters
        ----------
        name : str
            The layer.

        Returns
        -------
        list of Tokens
            Float32 arrays ``(tokens, heads, ...)`` of each sequence.
        """
        return self._handler(name).tokens

    def traces(self, name: str, test: Sequence[int]) -> Traces:
        """Traces of one layer, from sequences of equal length.

        Parameters
        ----------
        name : str
            The layer.
        test : sequence of int
            Numbers of the test sequences; the other sequences are for calibration.

        Returns
        -------
        Traces
            With the gradients of the last calibration sequences, as far as they were recorded without a gap.

        Raises
        ------
        ValueError
            If the layer is unknown, nothing was recorded, a number is out of range or repeated, sequences have
            different lengths, there are fewer than two for calibration or none for the test, or gradients were wanted
            and the last calibration sequence has none.
        """
        handler = self._handler(name)
        count = len(handler.tokens)
        if not count:
            raise ValueError("recording: expected a call of the model while it is recorded, got none")
        test = check_items("test", test, "numbers of sequences")
        if len(set(test)) != len(test) or any(not isinstance(i, int | np.integer) or not 0 <= i < count for i in test):
            raise ValueError(f"test: expected different numbers from 0 to {count - 1}, got {list(test)}")
        lengths = {tokens.v.shape[0] for tokens in handler.tokens}
        calib = [i for i in range(len(handler.tokens)) if i not in set(test)]
        if len(lengths) != 1 or len(calib) < 2 or not len(test):
            raise ValueError(
                "test: expected sequences of one length, two of them for calibration and one for the test, got "
                f"lengths {sorted(lengths)}, {len(calib)} for calibration and {len(test)} for the test"
            )
        calibration, text = (_stacked([handler.tokens[i] for i in rows]) for rows in (calib, test))
        gradients = [handler.gradients[i] for i in takewhile(handler.gradients.__contains__, reversed(calib))]
        if handler.wants_gradients and not gradients:
            raise ValueError(
                "gradients: expected loss.backward() for the last calibration sequence at least, got none; parameters "
                "or inputs must require gradients"
            )
        grad = np.stack(gradients[::-1]) if gradients else None
        return Traces(self.layers[name].layer, calibration, text, grad, name)

    def _handler(self, name: str) -> _Recorder:
        if name not in self._handlers:
            raise ValueError(f"name: expected one of {', '.join(self._handlers)}, got {name!r}")
        return self._handlers[name]


def _stacked(sequences: list[Tokens]) -> Tokens:
    return Tokens(*(None if x[0] is None else np.stack(x) for x in zip(*sequences, strict=True)))


@contextmanager
def record(model: torch.nn.Module, *, gradients: bool = False) -> Iterator[Recording]:
    """Record the inputs of a model's recurrent layers, while it runs whole sequences without a cache.

    Parameters
    ----------
    model : torch.nn.Module
        A model of transformers. Call it with ``use_cache=False``, on sequences without padding.
    gradients : bool, default False
        Record gradients of the loss by the layers' outputs too: call ``loss.backward()`` for every sequence.
        Parameters or inputs must require gradients.

    Yields
    ------
    Recording
        The inputs, which stay after the block.

    Raises
    ------
    ValueError
        If the model has no known layers or mamba2 layers are in training mode, where a fused kernel may replace the
        recurrence; and at a call with a cache or with padding, or if inputs of a layer would let its state grow.

    Examples
    --------
    >>> with sketchssm.transformers.record(model) as recording:  # doctest: +SKIP
    ...     for ids in batches:
    ...         model(ids, use_cache=False)
    >>> traces = recording.traces("model.layers.0.linear_attn", test=[6, 7])  # doctest: +SKIP
    """
    found = layers(model)
    training = [name for name, x in found.items() if x.rule.fuses and x.module.training]
    if training:
        raise ValueError(f"model: expected evaluation mode, model.eval(), got layer {training[0]} in training mode")
    recording = Recording(found, gradients)
    with ExitStack() as stack:
        for layer in found.values():
            hook = layer.module.register_forward_pre_hook(_refuse_padding, with_kwargs=True)
            stack.callback(hook.remove)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(intercepted(recording._handlers, found))
        yield recording


def _refuse_padding(module: torch.nn.Module, args: Any, named: dict[str, Any]) -> None:
    """Refuse padding, which the recurrence of transformers takes for tokens: a forward hook of mixers."""
    mask = named.get("attention_mask")
    if mask is not None and not mask.all():
        raise ValueError(
            f"attention_mask: expected no padding while layers are recorded, got {(mask == 0).sum()} padded tokens"
        )


def host_inputs(call: Call, cache: Any, layer: RecurrentLayer) -> Tokens:
    """Inputs of a call without a cache, as float32 arrays ``(batch, tokens, ...)``."""
    check_no_cache(cache)
    tokens = Tokens(*(None if x is None else x.detach().float().cpu().numpy() for x in call.tokens))
    try:
        check_writes(layer.layer, tokens.k, tokens.beta)
    except ValueError as error:
        raise ValueError(f"layer {layer.name}: {error}") from None
    return tokens


def check_no_cache(cache: Any) -> None:
    """Refuse a call with a cache."""
    if cache is not None:
        raise ValueError(NO_CACHE)


def first_output(result: Any) -> torch.Tensor:
    """The output of a function or block that may return more."""
    out: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return out


class _Recorder(Handler):
    """Keeps one layer's inputs, and runs the recurrence of transformers."""

    def __init__(self, layer: RecurrentLayer, gradients: bool) -> None:
        self._layer = layer
        self.tokens: list[Tokens] = []
        self.gradients: dict[int, Array] = {}
        self.wants_gradients = gradients

    def prefill(self, run: Callable[..., Any], given: dict[str, Any], call: Call, cache: Any) -> Any:
        """See `sketchssm.transformers.interception.Handler`."""
        first = len(self.tokens)
        inputs = host_inputs(call, cache, self._layer)
        for row in range(inputs.v.shape[0]):
            self.tokens.append(Tokens(*(None if x is None else x.copy() for x in inputs.at(row))))
        result = run(**given)
        out = first_output(result)
        if self.wants_gradients and out.requires_grad:
            out.register_hook(lambda grad: self._keep(first, grad))
        return result

    def _keep(self, first: int, gradient: torch.Tensor) -> None:
        for row, one in enumerate(gradient.detach().float().cpu().numpy()):
            self.gradients[first + row] = one.copy()
