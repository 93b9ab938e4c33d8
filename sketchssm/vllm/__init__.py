"""Plugin for vLLM 0.26: the recurrent layers of a model decode with heads.

vLLM loads the plugin through the entry point ``sketchssm`` of the group ``vllm.general_plugins``, in every process.
The plugin changes nothing until it is switched on, by the environment variable ``SKETCHSSM_VLLM`` or by vLLM's
``additional_config={"sketchssm": ...}``; see `sketchssm.vllm.settings.Settings`.

=============  =====================================================================================
module         content
=============  =====================================================================================
`settings`     settings of the plugin, and engines that it refuses; does not import vLLM
`blocks`       the parts of a slot behind the state of a block of vLLM's pool, and their size
`plans`        the plan of a layer of vLLM
`batches`      rows of a batch that decode, that are prefilled, and that begin a request
`decoder`      the head of one layer, and its operations for the layer
`inputs`       from a layer's activations to q, k, v, g and beta; `kernels` is the same on a GPU
`metadata`     vLLM's metadata builders, with the rows of a batch
`layers`       vLLM's layers, with heads
`plugin`       registers the layers
=============  =====================================================================================

A head's slots are the blocks of vLLM's pool: a slot's ring, sketch and cursor are behind the state in the same block.
So there is no table from blocks to slots, and vLLM alone handles joining, leaving, preemption and reuse of blocks.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Register the layers of the plugin with vLLM; called by vLLM in each of its processes, maybe more than once."""
    from sketchssm.vllm.plugin import register as run

    run()
