"""Passes of a model over text that add to sums: forward, backward, and forward with perturbations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from warnings import catch_warnings, filterwarnings

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from sketchssm.arrays import interop
from sketchssm.calibrate.sums import Accumulator
from sketchssm.layer.recurrence import Tokens
from sketchssm.transformers.interception import Handler, intercepted
from sketchssm.transformers.modeling import Call, RecurrentLayer, block_of, layers
from sketchssm.transformers.perturbation import divergence, noisy, output_weights
from sketchssm.transformers.recording import check_no_cache, first_output, host_inputs
from sketchssm.transformers.text import Ids, evaluating, run_row

Mask = npt.NDArray[np.bool_]

Sums = Mapping[str, Sequence[Accumulator]]
"""Sums by the names of the layers whose inputs they take."""


def forward(model: torch.nn.Module, sums: Sums, row: Ids) -> None:
    """Add the samples of a row to sums."""
    with _streamed(model, sums, False), torch.no_grad():
        run_row(model, row)


def backward(model: torch.nn.Module, sums: Sums, row: Ids, wanted: Mask | None = None) -> None:
    """Add the samples of a row to sums, with gradients of the loss of all tokens or of the wanted ones."""
    with _streamed(model, sums, True):
        _backward(model, row, wanted)


def without_gradients(model: Any, row: Ids) -> str:
    """Why the backward pass does not reach the output of every layer; empty if it does."""
    reached: dict[str, list[Any]] = {name: [] for name in layers(model)}
    why = ""
    try:
        forward(model, {}, row)  # bitsandbytes packs 4-bit weights for the CPU now; then they have no backward pass
        with _streamed(model, {name: (_Reached(seen),) for name, seen in reached.items()}, True), catch_warnings():
            filterwarnings("error", ".*autograd kernel was not registered")  # PyTorch would go on without gradients
            _backward(model, row)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, UserWarning) as error:  # of kernels without a backward pass
        why = f" ({str(error).partition('. ')[0]})"
    missed = [name for name, seen in reached.items() if not seen]
    kind = getattr(model, "quantization_method", None)
    of = f" of weights quantised by {getattr(kind, 'value', kind)}" if kind else ""
    what = f"gives {missed[0]} no gradient" if missed else "fails"
    return f"the backward pass{of} {what}{why}" if missed or why else ""


def perturbation_shares(model: torch.nn.Module, row: Ids) -> dict[str, float]:
    """What a change of each layer's block does to the distribution of the next token, see `divergence`."""
    shares = {}
    with _prepared(model), torch.no_grad():
        exact, _ = run_row(model, row)
        for name, layer in layers(model).items():
            with _hooked(block_of(model, layer), _disturb):
                shares[name] = divergence(exact, run_row(model, row)[0])
    return shares


def perturbed(model: torch.nn.Module, sums: Sums, row: Ids, shares: Mapping[str, float]) -> None:
    """Add the samples of a row to sums, with weights by perturbation."""
    found = layers(model)
    probes = {name: _Probe(found[name], own, shares[name]) for name, own in sums.items()}
    with ExitStack() as stack:
        for name, probe in probes.items():
            stack.enter_context(_hooked(block_of(model, found[name]), probe.after))
        stack.enter_context(_prepared(model))
        stack.enter_context(intercepted(probes, found))
        stack.enter_context(torch.no_grad())
        run_row(model, row)


class _Stream(Handler):
    """Passes one layer's inputs on during the forward pass, and runs the recurrence of transformers."""

    def __init__(self, layer: RecurrentLayer, sums: Sequence[Any], gradients: bool = False) -> None:
        self._layer = layer
        self._sums = sums
        self._gradients = gradients

    def prefill(self, run: Callable[..., Any], given: dict[str, Any], call: Call, cache: Any) -> Any:
        """See `sketchssm.transformers.interception.Handler`."""
        tokens = self._inputs(call, cache)
        result = run(**given)
        if not self._gradients:
            self._add(tokens)
        elif (out := first_output(result)).requires_grad:
            out.register_hook(lambda grad: self._pass_on(tokens, grad))
        return result

    def _inputs(self, call: Call, cache: Any) -> Tokens:
        """Inputs of a call, on the device if they are there: sums are computed there."""
        if not interop.is_on_device(call.tokens.v):
            return host_inputs(call, cache, self._layer)
        check_no_cache(cache)
        return Tokens(*(None if x is None else x.detach().float() for x in call.tokens))

    def _pass_on(self, tokens: Tokens, grad: torch.Tensor | None) -> None:
        if grad is not None:
            self._add(tokens, grad=grad.detach().float())

    def _add(self, tokens: Tokens, **how: torch.Tensor) -> None:
        try:
            for each in self._sums:
                each.update(*tokens, **how)
        except ValueError as error:
            raise ValueError(f"layer {self._layer.name}: {error}") from error


class _Probe(_Stream):
    """Passes one layer's inputs on after its block, with weights of errors, which `share` scales."""

    _other: torch.Tensor | None = None  # in place of the recurrence's output

    def __init__(self, layer: RecurrentLayer, sums: Sequence[Any], share: float) -> None:
        super().__init__(layer, sums)
        self._share = share

    def prefill(self, run: Callable[..., Any], given: dict[str, Any], call: Call, cache: Any) -> Any:
        """See `sketchssm.transformers.interception.Handler`."""
        if self._other is None:
            self._seen = self._inputs(call, cache), run(**given)
            return self._seen[1]
        return _with_first(self._seen[1], self._other)

    def after(self, block: torch.nn.Module, args: Any, named: Any, whole: Any) -> None:
        """Measure weights, and pass inputs on: a forward hook of the layer's block."""

        def rest(other: torch.Tensor) -> torch.Tensor:
            self._other = other
            try:
                return first_output(block.forward(*args, **named))
            finally:
                self._other = None

        tokens, result = self._seen
        self._add(tokens, weight=output_weights(rest, first_output(result), first_output(whole)) * self._share)
        del self._seen


class _Reached:
    """In place of sums: a mark when gradients arrive."""

    def __init__(self, seen: list[Any]) -> None:
        self._seen = seen

    def update(self, *tokens: Any, grad: Any) -> None:
        """See `sketchssm.RankScores.update`."""
        self._seen.append(True)


def _disturb(block: torch.nn.Module, args: Any, named: Any, result: Any) -> Any:
    """Add noise to the output of a block: a forward hook."""
    return _with_first(result, noisy(first_output(result)))


def _with_first(result: Any, out: torch.Tensor) -> Any:
    """The result of a function or block with another output."""
    return (out, *result[1:]) if isinstance(result, tuple) else out


@contextmanager
def _hooked(module: torch.nn.Module, hook: Callable[..., Any]) -> Iterator[None]:
    handle = module.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _streamed(model: torch.nn.Module, sums: Mapping[str, Sequence[Any]], gradients: bool) -> Iterator[None]:
    """Pass the inputs of layers on while a model runs."""
    found = layers(model)
    handlers = {name: _Stream(found[name], own, gradients) for name, own in sums.items()}
    with _prepared(model), intercepted(handlers, found):
        yield


@contextmanager
def _prepared(model: torch.nn.Module) -> Iterator[None]:
    """Run a model in evaluation mode, without gradients of parameters and as it is, not compiled."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in wanted:
            parameter.requires_grad_(False)
        with evaluating(model):
            yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)


@contextmanager
def _checkpointed(model: torch.nn.Module) -> Iterator[None]:
    """Keep the inputs of a model's blocks alone for a backward pass, which computes the rest again."""
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    before = [vars(block).get("forward") for block in blocks]  # of a module that accelerate has wrapped
    try:
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        yield
    finally:
        for block, forward in zip(blocks, before, strict=True):
            if forward is None:
                vars(block).pop("forward", None)
            else:
                block.forward = forward


def _backward(model: Any, row: Ids, wanted: Mask | None = None) -> None:
    """Backward pass of the summed next-token cross-entropy of a row, of all its tokens or of the wanted ones."""
    # The backward pass ends at the embeddings, because no parameter has a gradient.
    start = model.get_input_embeddings().register_forward_hook(lambda module, given, x: x.detach().requires_grad_())
    try:
        with torch.enable_grad(), _checkpointed(model):
            logits, ids = run_row(model, row)
            logits, following = logits[:-1], ids[1:]
            if wanted is not None:
                kept = torch.from_numpy(wanted[1:]).to(logits.device)
                logits, following = logits[kept], following[kept]
            loss = F.cross_entropy(logits.float(), following, reduction="sum")
            if loss.requires_grad:
                loss.backward()
    finally:
        start.remove()
