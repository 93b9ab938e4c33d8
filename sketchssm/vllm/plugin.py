"""Registers the layers with vLLM, and tells vLLM the size of their blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.models import ModelRegistry
from vllm.platforms.interface import Platform

from sketchssm.vllm.head_layer import settings_of, side_bytes
from sketchssm.vllm.layers import LAYERS

__all__ = ["register"]


def register() -> None:
    """Register the layers; a second call does nothing."""
    if next(iter(LAYERS)) in op_registry_oot:
        return
    for name, layer in LAYERS.items():
        PluggableLayer.register_oot(layer, name=name)
    align = Platform._align_hybrid_block_size.__func__

    def aligned(cls: Any, vllm_config: Any, backend_cls: Any) -> None:
        """Align blocks of attention and of recurrent states, with the parts behind the states."""
        with wider_states(vllm_config):
            align(cls, vllm_config, backend_cls)

    Platform._align_hybrid_block_size = classmethod(aligned)


@contextmanager
def wider_states(vllm_config: Any) -> Iterator[None]:
    """Let the class of the loaded model tell states with the parts behind them, while the block runs."""
    extra = 0 if settings_of(vllm_config) is None else side_bytes(vllm_config)
    if not extra:
        yield
        return
    config = vllm_config.model_config
    model, _ = ModelRegistry.resolve_model_cls(config.architecture, model_config=config)
    more = {"get_mamba_state_shape_from_config": ((extra,),), "get_mamba_state_dtype_from_config": (torch.uint8,)}
    had = {name: vars(model).get(name) for name in more}
    for name, part in more.items():
        setattr(model, name, _longer(getattr(model, name), part))
    try:
        yield
    finally:
        for name, method in had.items():
            if method is None:
                delattr(model, name)
            else:
                setattr(model, name, method)


def _longer(method: Any, part: tuple[Any, ...]) -> Any:
    return staticmethod(lambda *args: (*method(*args), *part))
