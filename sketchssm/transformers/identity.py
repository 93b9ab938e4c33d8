"""Identity of a model and its recurrent layers."""

from __future__ import annotations

from hashlib import sha256

import torch

from sketchssm.plans.model_plans import LayerFingerprint, ModelFingerprint
from sketchssm.transformers.modeling import COMPILED, layers

SAMPLES = 2**16
"""Values of a parameter that its fingerprint reads, at even distances."""


def fingerprint(model: torch.nn.Module) -> ModelFingerprint:
    """Identity of a model and its recurrent layers.

    A digest covers the parameters of a layer's module, as many as `SAMPLES` values of each at even distances, rounded
    to bfloat16 and to float16: weights of a file in bfloat16 have the same digest in every type. Of weights that are
    packed in buffers, as by GPTQ, it covers the scales: kernels may pack the rest anew when they first run.

    Parameters
    ----------
    model : torch.nn.Module
        A model of transformers.

    Returns
    -------
    ModelFingerprint
        Class of the model, and class, shape and digest of each layer.

    Raises
    ------
    ValueError
        If the model has no known layers, or a parameter has no values yet (on the device "meta").
    """
    found = layers(model)
    identities = {
        name: LayerFingerprint(type(x.module).__name__, x.layer, _digest(name, x.module)) for name, x in found.items()
    }
    return ModelFingerprint(type(getattr(model, COMPILED, model)).__name__, identities)


def whole_digest(model: torch.nn.Module) -> str:
    """Digest of all parameters of a model, as `fingerprint` takes those of its layers, and of their types."""
    kinds = ", ".join(sorted({str(parameter.dtype) for parameter in model.parameters()}))
    return f"{kinds} {_digest('model', model)}"


def _digest(layer: str, module: torch.nn.Module) -> str:
    digest = sha256()
    for part in module.modules():
        # bitsandbytes packs 4-bit weights for the CPU when they are first used; asked for their state, it unpacks them
        if getattr(getattr(getattr(part, "weight", None), "quant_state", None), "packing_format_for_cpu", False):
            part.state_dict()
    scales = [item for item in module.named_buffers() if item[0].endswith(".scales")]  # of weights packed in buffers
    for name, parameter in sorted([*module.named_parameters(), *scales]):
        held = _offloaded(module, name) if parameter.is_meta else parameter
        if held is None:
            raise ValueError(f"model: expected loaded parameters, got {layer}.{name} on the device meta")
        if type(held).dequantize is not torch.Tensor.dequantize:  # weights of torchao, of which few operators run
            held = held.dequantize()
        values = held.detach().reshape(-1)
        values = values[:: -(-values.numel() // SAMPLES) or 1]
        if values.is_floating_point():
            values = values.to(torch.bfloat16).to(torch.float16).view(torch.int16)
        plain = ".".join(part for part in name.split(".") if part != COMPILED)
        digest.update(f"{plain} {tuple(parameter.shape)}\n".encode())
        digest.update(values.cpu().numpy().tobytes())
    return digest.hexdigest()


def _offloaded(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    """A parameter that accelerate keeps on the host or on disk; None if it does not."""
    place, _, leaf = name.rpartition(".")
    hook = getattr(module.get_submodule(place), "_hf_hook", None)
    for own in (hook, *getattr(hook, "hooks", ())):
        if getattr(own, "weights_map", None) is not None:
            tensor: torch.Tensor = own.weights_map[leaf]
            return tensor
    return None
