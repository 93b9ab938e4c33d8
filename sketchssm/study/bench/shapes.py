"""Recurrent layers of released models, whole (one layer, no tensor parallelism): each distinct shape once.

The defaults of the configuration classes of transformers 5.24 are `qwen3-next` (Qwen3-Next, Qwen3.5, Qwen4-Exp),
`lara-mini`, `olmo-hybrid-7b`, `kimi-linear` (Kimi-Linear, BailingHybrid), `glm-5-flash` and `nemotron-3-super`
(Nemotron-H, Mamba-2). The others are of configurations as released, which the classes do not hold.
"""

from __future__ import annotations

from typing import NamedTuple

from sketchssm.layer.recurrence import Layer
from sketchssm.plans import traffic


class Shipped(NamedTuple):
    """A layer and the models that have it."""

    layer: Layer
    models: str


SHIPPED = {
    "nemotron-3-super": Shipped(Layer("mamba2", 128, 128, 64, 8), "Nemotron-H 8B, Nemotron 3 Super, Codestral Mamba"),
    "nemotron-nano-9b-v2": Shipped(Layer("mamba2", 128, 128, 80, 8), "Nemotron Nano 9B v2 and 12B v2"),
    "qwen3-next": Shipped(Layer("gdn", 32, 128, 128, 16), "Qwen3-Next, Qwen3.5 4B, 9B and 35B-A3B, Qwen4-Exp"),
    "qwen3.5-large": Shipped(Layer("gdn", 64, 128, 128, 16), "Qwen3.5 122B-A10B and 397B-A17B"),
    "kimi-linear": Shipped(Layer("kda", 32, 128, 128, 32), "Kimi-Linear 48B-A3B, Ling 3 Flash"),
    "nemotron-3-nano": Shipped(Layer("mamba2", 64, 128, 64, 8), "Nemotron 3 Nano"),
    "nemotron-h-4b": Shipped(Layer("mamba2", 112, 128, 64, 8), "Nemotron-H 4B"),
    "nemotron-h-56b": Shipped(Layer("mamba2", 256, 256, 64, 8), "Nemotron-H 47B and 56B"),
    "mamba2-130m": Shipped(Layer("mamba2", 24, 128, 64, 1), "Mamba-2 130m, Falcon-H1 0.5B"),
    "mamba2-370m": Shipped(Layer("mamba2", 32, 128, 64, 1), "Mamba-2 370m"),
    "mamba2-780m": Shipped(Layer("mamba2", 48, 128, 64, 1), "Mamba-2 780m, Granite-4-H Tiny"),
    "mamba2-1.3b": Shipped(Layer("mamba2", 64, 128, 64, 1), "Mamba-2 1.3b, Granite-4-H Micro"),
    "mamba2-2.7b": Shipped(Layer("mamba2", 80, 128, 64, 1), "Mamba-2 2.7b"),
    "bamba-9b": Shipped(Layer("mamba2", 128, 128, 64, 1), "Bamba-9B, Granite-4-H Small"),
    "zamba2-1.2b": Shipped(Layer("mamba2", 64, 64, 64, 1), "Zamba2 1.2B"),
    "zamba2-2.7b": Shipped(Layer("mamba2", 80, 64, 64, 1), "Zamba2 2.7B"),
    "zamba2-7b": Shipped(Layer("mamba2", 112, 64, 64, 2), "Zamba2 7B"),
    "falcon-h1-1.5b": Shipped(Layer("mamba2", 48, 256, 64, 1), "Falcon-H1 1.5B"),
    "falcon-h1-3b": Shipped(Layer("mamba2", 32, 256, 128, 1), "Falcon-H1 3B"),
    "falcon-h1-7b": Shipped(Layer("mamba2", 24, 256, 128, 1), "Falcon-H1 7B and 1.5B-Deep"),
    "falcon-h1-34b": Shipped(Layer("mamba2", 32, 256, 128, 2), "Falcon-H1 34B"),
    "ring-linear": Shipped(Layer("mamba2", 32, 128, 128, 32), "Ring-linear 2.0 and 2.5 (lightning attention)"),
    "minimax-01": Shipped(Layer("mamba2", 64, 128, 128, 64), "MiniMax-01 and M1 (lightning attention)"),
    "lara-mini": Shipped(Layer("gdn", 16, 128, 128, 8), "LaraMini"),
    "qwen3.5-small": Shipped(Layer("gdn", 16, 128, 128, 16), "Qwen3.5 0.8B and 2B"),
    "qwen3.5-27b": Shipped(Layer("gdn", 48, 128, 128, 16), "Qwen3.5 27B"),
    "olmo-hybrid-7b": Shipped(Layer("gdn", 30, 96, 192, 30), "OLMo-Hybrid 7B (beta up to 2)"),
    "glm-5-flash": Shipped(Layer("kda", 64, 128, 128, 64), "GLM-5-Next (gates of at least -5)"),
    "kimi-k3": Shipped(Layer("kda", 96, 128, 128, 96), "Kimi-K3 (bounded gates)"),
}
"""Shapes by name."""

SHAPES = {name: shipped.layer for name, shipped in SHIPPED.items()}
"""Layers of `SHIPPED`."""

COMMON = ("nemotron-3-super", "nemotron-nano-9b-v2", "qwen3-next", "qwen3.5-large", "kimi-linear")
"""The shapes that are timed unless others are named."""


def _tenfold(layer: Layer) -> int:
    """Mean rank of a plan that moves nearest to a tenth of the bytes of standard decode."""
    sizes = layer.kind, layer.key_dim, layer.value_dim
    return min(range(2, 33), key=lambda rank: abs(0.1 - 1 / traffic.reduction(*sizes, rank)))


MEAN_RANKS = {name: _tenfold(layer) for name, layer in SHAPES.items()} | dict(
    zip(COMMON, (5, 6, 7, 7, 7), strict=True)
)
"""Mean ranks: of `COMMON`, those at which the models keep their quality in the paper's evaluation; else of a tenfold
reduction."""
