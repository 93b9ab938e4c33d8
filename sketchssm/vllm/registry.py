"""vLLM's recurrent layers that may have heads; does not import vllm."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerClass:
    """A class of vLLM's, whose layers may have heads."""

    kind: str
    head: str  # class of `sketchssm.vllm.layers`, made the first base class
    models: str  # some of the models that have such layers


CLASSES = {
    "MambaMixer2": LayerClass(
        "mamba2", "HeadMamba2", "Nemotron-H, Nemotron 3, Granite-4-H, Falcon-H1, Zamba2, Mamba-2, Codestral Mamba"
    ),
    "QwenGatedDeltaNetAttention": LayerClass("gdn", "HeadGatedDeltaNet", "Qwen3-Next, Qwen3.5 to 3.8, Qwen4-Exp"),
    "OlmoHybridGatedDeltaNetAttention": LayerClass("gdn", "HeadGatedDeltaNet", "OLMo Hybrid"),
    "KimiGatedDeltaNetAttention": LayerClass("kda", "HeadKimiDelta", "Kimi-Linear"),
    "KimiK3DeltaAttention": LayerClass("kda", "HeadKimiDelta", "Kimi K3"),
    "Glm5NextLinearAttention": LayerClass("kda", "HeadGlmDelta", "GLM 5.3 Flash"),
    "BailingMoELinearAttention": LayerClass("mamba2", "HeadLightning", "Ling and Ring 2.5"),
    "BailingMoeV3KimiDeltaAttention": LayerClass("kda", "HeadBailingDelta", "Ling 3, Ring 3"),
}
"""The classes by name."""

TESTED = ("0.32.", "0.33.")
"""Beginnings of versions of vLLM that the plugin was tested with."""


def tested(version: str) -> bool:
    """Whether the plugin was tested with a version; in another, layers are checked at start."""
    return version.startswith(TESTED)
