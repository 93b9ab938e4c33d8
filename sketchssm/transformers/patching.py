"""Decode with heads in a model of transformers."""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Any

import torch

from sketchssm.heads.exact import ExactHead
from sketchssm.heads.head import check_capacity
from sketchssm.heads.sketch import ReadErrors, SketchHead
from sketchssm.heads.standard import ReplayHead, StandardHead
from sketchssm.layer.checks import UnsupportedError
from sketchssm.plans.model_plans import ModelPlans, load_plans
from sketchssm.plans.plan import SketchPlan
from sketchssm.transformers.caches import HeadHandler
from sketchssm.transformers.identity import fingerprint
from sketchssm.transformers.interception import intercepted
from sketchssm.transformers.modeling import RecurrentLayer, layers

_patched: weakref.WeakKeyDictionary[torch.nn.Module, Patch] = weakref.WeakKeyDictionary()
"""Mixers that a patch decodes."""


def patch(
    model: torch.nn.Module,
    plans: Mapping[str, SketchPlan] | str | os.PathLike[str],
    *,
    slots: int = 64,
    window: int | None = None,
    backend: str = "auto",
    **settings: Any,
) -> Patch:
    """Decode the recurrent layers of a model with heads.

    transformers runs the prefill. A call of one token with a cache is a step of the layer's head, which begins from
    the prefill's state. Caches are transformers' own: reordering for beam search copies slots, a second prompt on a
    cache begins from the exact state, a deep copy of a cache has its own slots, and a cache's slots are free again
    when the cache is deleted. Outputs of decode steps have no gradients. `torch.compile` compiles a step as one graph,
    and breaks the graph at each layer of a prompt.

    Parameters
    ----------
    model : torch.nn.Module
        A model of transformers.
    plans : ModelPlans, mapping of str to SketchPlan, path, or {"standard", "replay"}
        `ModelPlans` from `calibrate`, or the path of their file: they must have been made for this model, or for one
        of another class with the same layers. Any other mapping, and a folder of files ``NAME.safetensors``, has plans
        by the layers' names (`layers`), and transformers runs the layers without a plan. "standard" and "replay" name
        a system for all layers.
    slots : int, default 64
        Sequences that all caches may hold together; one for each beam.
    window : int, optional
        Tokens from one flush to the next, only for "replay"; default 16.
    backend : str, default "auto"
        See `SketchHead`.
    **settings
        Further keywords of the heads. Heads on ``cuda`` take activations in float32, unless `activation_dtype` says
        otherwise: transformers computes in float32 between the normalisation of queries and keys and the output.

    Returns
    -------
    Patch
        A context manager; `Patch.start` patches until `Patch.stop`.

    Raises
    ------
    TypeError
        If the heads have no keyword of such a name.
    ValueError
        If plans were made for another model, a plan's layer does not exist or has another shape, a window is given
        without "replay", or the version of transformers is not supported.
    FileNotFoundError
        If there is no such file of plans.
    PlanFileError
        If the file can't be used.

    Examples
    --------
    >>> with sketchssm.transformers.patch(model, plans):  # doctest: +SKIP
    ...     model.generate(**tokenizer("The", return_tensors="pt"), max_new_tokens=100)
    """
    found = layers(model)
    heads = build_heads(model, found, plans, slots, window, backend, settings)
    return Patch({name: found[name] for name in heads}, heads)


def build_heads(
    model: torch.nn.Module,
    found: dict[str, RecurrentLayer],
    plans: Mapping[str, SketchPlan] | str | os.PathLike[str],
    slots: int,
    window: int | None,
    backend: str,
    settings: dict[str, Any],
) -> dict[str, ExactHead]:
    """Heads of the layers `found` in a model, for the arguments of `patch`."""
    check_capacity(slots, "slots")
    if window is not None and plans != "replay":
        raise ValueError(f"window: expected None, as only 'replay' takes a window, got {window!r}")
    if plans not in ("standard", "replay") and isinstance(plans, str | os.PathLike):
        if not os.path.exists(plans):
            raise FileNotFoundError(f"plans: expected plans, their file, 'standard' or 'replay', got {str(plans)!r}")
        plans = load_plans(plans)
    if isinstance(plans, ModelPlans):
        plans = plans.of(fingerprint(model))
    if not isinstance(plans, str) and not (isinstance(plans, Mapping) and plans):
        came = "none" if isinstance(plans, Mapping) else type(plans).__name__
        raise ValueError(f"plans: expected plans by the names of layers, got {came}")
    kind: Any = {"standard": StandardHead, "replay": ReplayHead}[plans] if isinstance(plans, str) else SketchHead
    if kind is ReplayHead:
        settings = settings | {"window": 16 if window is None else window}
    known = list(inspect.signature(kind).parameters)[3:]  # after layer or plan, num_slots and backend
    for name in settings:
        if name not in known:
            raise TypeError(f"{name}: expected slots, backend, or a keyword of {kind.__name__} ({', '.join(known)})")
    heads: dict[str, ExactHead] = {}
    for name in found if isinstance(plans, str) else plans:
        if name not in found:
            raise ValueError(f"plans: expected names among {', '.join(found)}, got {name!r}")
        source: Any = found[name].layer
        if not isinstance(plans, str):
            layer, source = source, plans[name]
            if not isinstance(source, SketchPlan):
                raise ValueError(f"plans: expected a SketchPlan for {name}, got {type(source).__name__}")
            if source.layer != layer:
                raise ValueError(f"plans: expected a plan of {layer} for {name}, got one of {source.layer}")
        with _device_of(found[name].module):
            try:
                heads[name] = kind(source, slots, backend, **settings)
            except UnsupportedError as error:
                raise UnsupportedError(f"{name}: {error}") from error
            if heads[name].backend == "cuda" and "activation_dtype" not in settings:
                heads[name].warmup("float32")
    return heads


def _device_of(module: torch.nn.Module) -> AbstractContextManager[Any]:
    """Make the device of a layer's weights the current one, on which a head works."""
    device = next(module.parameters()).device
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def unpatch(model: torch.nn.Module) -> None:
    """Undo the patch of a model, whether or not its `Patch` is still known; see `Patch.stop`.

    Parameters
    ----------
    model : torch.nn.Module
        The model. Without a patch nothing happens.
    """
    for layer in layers(model).values():
        if patched := _patched.get(layer.module):
            patched.stop()


class Patch:
    """Heads in the layers of a model; made by `patch`.

    Parameters
    ----------
    found : dict of str to RecurrentLayer
        The layers by their names.
    heads : dict of str to ExactHead
        The heads by the layers' names.

    Attributes
    ----------
    heads
        As given.
    """

    def __init__(self, found: dict[str, RecurrentLayer], heads: dict[str, ExactHead]) -> None:
        self.heads = heads
        self._found = found
        self._handlers = {name: HeadHandler(found[name], head) for name, head in heads.items()}
        self._stack: ExitStack | None = None

    def start(self) -> Patch:
        """Patch the model until `stop`.

        Returns
        -------
        Patch
            This object.

        Raises
        ------
        RuntimeError
            If the model is patched already.
        """
        modules = [layer.module for layer in self._found.values()]
        if any(module in _patched for module in modules):
            raise RuntimeError("start: the model is patched already; expected stop() of its patch or unpatch() before")
        self._stack = ExitStack()
        self._stack.enter_context(intercepted(self._handlers, self._found))
        for module in modules:
            _patched[module] = self
            self._stack.callback(_patched.pop, module, None)
        return self

    def stop(self) -> None:
        """Undo `start`. Caches in use get their exact states back, and transformers continues from them."""
        if self._stack is not None:
            self._stack.close()
            self._stack = None
            for handler in self._handlers.values():
                handler.give_back()

    def __enter__(self) -> Patch:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def errors(self, *, reset: bool = False) -> dict[str, ReadErrors]:
        """Return what monitors have measured (``patch(..., monitor=2)``), of the last sequence of each slot.

        Parameters
        ----------
        reset : bool, default False
            Whether to clear the sums.

        Returns
        -------
        dict of str to ReadErrors
            See `SketchHead.errors`, by the layers' names.

        Raises
        ------
        ValueError
            If the heads have no monitor.
        """
        found = {}
        for name, head in self.heads.items():
            if not isinstance(head, SketchHead):
                raise ValueError("monitor: expected patch(..., monitor=1 or more) with plans, got exact heads")
            found[name] = head.errors(reset=reset)
        return found

    @property
    def free(self) -> int:
        """Number of free slots, in the layer with the fewest."""
        return min(len(handler.free) for handler in self._handlers.values())
