"""Registers the layers with vLLM, and tells vLLM the size of their blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import vllm
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models import ModelRegistry
from vllm.platforms.interface import Platform

from sketchssm.vllm import layers
from sketchssm.vllm.head_layer import HeadLayer, settings_of, side_bytes, with_side
from sketchssm.vllm.metadata import logger
from sketchssm.vllm.registry import CLASSES, TESTED, tested

_without: set[str] = set()


def take(layer: type) -> None:
    """Let layers of one of vLLM's classes have heads, or tell that they have none; each class once.

    Other modules of vLLM's need not be there: they differ between versions and builds.
    """
    name = layer.__name__
    if name in op_registry_oot or name in _without:
        return
    if name not in CLASSES:
        tell_without(name)
        return
    if not tested(vllm.__version__):
        versions = " and ".join(version.rstrip(".") for version in TESTED)
        logger.warning(
            "sketchssm was tested with vLLM %s, not with %s: it checks a layer of class %s at start",
            versions,
            vllm.__version__,
            name,
        )
    head = getattr(layers, CLASSES[name].head)
    PluggableLayer.register_oot(type(head.__name__, (head, layer), {}), name=name)
    widen()


def tell_without(name: str) -> None:
    """Tell once that the layers of a class have no heads."""
    if name not in _without:
        _without.add(name)
        logger.warning("sketchssm: no heads for layers of class %s: they decode as without the plugin", name)


@cache
def widen() -> None:
    """Tell vLLM the size of blocks."""
    align = Platform._align_hybrid_block_size.__func__

    def aligned(cls: Any, vllm_config: Any, backend_cls: Any) -> None:
        """Align blocks of attention and of recurrent states, with the parts behind the states."""
        with wider_states(vllm_config):
            align(cls, vllm_config, backend_cls)

    Platform._align_hybrid_block_size = classmethod(aligned)


@contextmanager
def wider_states(vllm_config: Any) -> Iterator[None]:
    """Let the class of the loaded model tell states with the parts behind them, while the block runs."""
    extra = 0
    if settings_of(vllm_config) is not None:
        extra = side_bytes(vllm_config)
        for layer in vllm_config.compilation_config.static_forward_context.values():
            if isinstance(layer, MambaBase) and not isinstance(layer, HeadLayer):  # maybe not made through `take`
                tell_without(type(layer).__name__)
    if not extra:
        yield
        return
    config = vllm_config.model_config
    model, _ = ModelRegistry.resolve_model_cls(config.architecture, model_config=config)
    more: dict[str, Callable[[Any], Any]] = {
        "get_mamba_state_shape_from_config": lambda shapes: (*shapes, (extra,)),
        "get_mamba_state_dtype_from_config": lambda dtypes: (*dtypes, torch.uint8),
    }
    if hasattr(model, "get_mamba_specs_from_config"):  # of models with several layouts of states
        more["get_mamba_specs_from_config"] = lambda specs: [with_side(spec, extra) for spec in specs]
    had = {name: vars(model).get(name) for name in more}
    for name, add in more.items():
        setattr(model, name, _extended(getattr(model, name), add))
    try:
        yield
    finally:
        for name, method in had.items():
            if method is None:
                delattr(model, name)
            else:
                setattr(model, name, method)


def _extended(method: Any, add: Callable[[Any], Any]) -> Any:
    return staticmethod(lambda *args: add(method(*args)))
