"""Plugin for vLLM: the recurrent layers of a model decode with heads.

vLLM loads the plugin through the entry point ``sketchssm`` of the group ``vllm.general_plugins``, in every process.
The plugin changes nothing until it is switched on, by the environment variable ``SKETCHSSM_VLLM`` or by vLLM's
``additional_config={"sketchssm": ...}``; see `sketchssm.vllm.settings.Settings`.

=============  =====================================================================================
module         content
=============  =====================================================================================
`settings`     settings of the plugin, and engines that it refuses; does not import vLLM
`registry`     vLLM's classes of layers that may have heads; does not import vLLM
`metadata`     vLLM's metadata builders, with the rows of a batch
`layers`       vLLM's layers, with heads
`selfcheck`    checks layers in versions of vLLM that the plugin was not tested with
`plugin`       registers layers and tells vLLM the size of blocks, when an engine switches the plugin on
=============  =====================================================================================

What is not vLLM's (rows of a batch, blocks, heads, inputs of layers, plans) is in `sketchssm.serving`.

A head's slots are the blocks of vLLM's pool: a slot's ring, sketch and cursor are behind the state in the same block.
So there is no table from blocks to slots, and vLLM alone handles joining, leaving, preemption and reuse of blocks.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

__all__ = ["register"]


def register() -> None:
    """Wait for an engine that switches the plugin on; called by vLLM in each process, maybe more than once.

    The settings may be in the engine's configuration, which is known when the model's layers are made. Until a layer
    of an engine with settings is made, nothing is registered and vLLM's own layers and methods stay.
    """
    from sketchssm.vllm.settings import Settings

    named = Settings.find(os.environ, None)  # wrong settings end the first process, before an engine starts
    try:
        from vllm.config import get_current_vllm_config_or_none as current
        from vllm.model_executor.custom_op import PluggableLayer
    except ImportError as error:
        if named is not None:
            raise ValueError(f"vllm: expected a version with layers that can be replaced, got {error}") from error
        return
    make = PluggableLayer.__new__
    if make.__module__ == __name__:
        return

    def watched(cls: type, *args: Any, **kwargs: Any) -> Any:
        """Make a layer, with heads if its engine switches the plugin on."""
        config = current() if hasattr(cls, "get_state_shape") else None  # a layer with states
        if config is not None and Settings.find(os.environ, config.additional_config) is not None:
            import_module("sketchssm.vllm.plugin").take(cls)
        return make(cls, *args, **kwargs)

    PluggableLayer.__new__ = watched
