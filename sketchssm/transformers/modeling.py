"""The recurrent layers of a transformers model: how their modeling files call recurrences."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from sketchssm.layer.recurrence import Layer, Tokens
from sketchssm.transformers import lightning

LEAST_VERSION, NEXT_VERSION = (5, 19), (6,)
"""Supported versions of transformers: every modeling file calls its recurrence through the functions of `RULES`."""

NORM_EPSILON = 1e-6
"""Added to the squared norm of queries and keys, as in transformers."""

COMPILED = "_orig_mod"
"""Name of a module within its result of `torch.compile`."""


class Call(NamedTuple):
    """One call of a recurrence: inputs ``(batch, tokens, heads, ...)`` of any length, state, skip and output gate."""

    tokens: Tokens  # in float32: functions of transformers compute in float32 after the convolution
    skip: torch.Tensor | None  # added to outputs: the term D x of mamba2, in float32
    state: torch.Tensor | None  # before the call, in the cache's layout
    dtype: torch.dtype  # of the activations
    z: torch.Tensor | None = None  # output gate of mamba2: outputs are multiplied by silu(z)

    def last(self, count: int) -> Call:
        """Return the call of the last tokens alone, after a state that is not known."""
        tail = slice(None), slice(-count, None)
        skip = None if self.skip is None else self.skip[tail]
        return self._replace(tokens=self.tokens.at(tail), skip=skip, state=None)

    def finished(self, out: torch.Tensor) -> torch.Tensor:
        """Output of the function for the recurrence's output."""
        out = (out if self.skip is None else out + self.skip).to(self.dtype)
        return out if self.z is None else out * F.silu(self.z)


@dataclass(frozen=True)
class Rule:
    """Interface of one kind of recurrence in modeling files of transformers."""

    kind: str
    prefill: str  # function of the modeling file, for any number of tokens
    decode: str  # the same for one token
    shape: Callable[[Any], Layer]  # returns the `Layer` of a mixer
    call: Callable[[dict[str, Any], bool], Call]  # of bound arguments; the flag tells decoding
    state: str  # argument that holds the state before the call
    tokens: tuple[str, ...]  # arguments of `prefill` whose second axis is tokens
    transposed: bool  # whether states are (heads, K, V)
    updates: bool = False  # whether `decode` updates the state itself, and returns the output of a token alone
    fuses: bool = False  # whether a fused kernel may replace the functions in training mode
    marks: tuple[str, ...] = ()  # names in a mixer's forward that tell the rule, if not those of the functions
    forward: Callable[..., Any] | None = None  # replaces a forward without the functions; its file has them
    place: Callable[[Any, int], Any] = lambda cache, index: cache.layers[index]  # of a layer in a cache

    def turned(self, state: torch.Tensor) -> torch.Tensor:
        """Convert a state between the layouts of heads and of caches."""
        return state.transpose(-1, -2) if self.transposed else state


def _lightning_call(given: dict[str, Any], decoding: bool) -> Call:
    q, k, v = (given[name].float() for name in LIGHTNING_TOKENS)
    g = -given["slope_rate"].float().reshape(-1).expand(v.shape[:3]).contiguous()
    return Call(Tokens(q, k, v, g, None), None, given["initial_state"], given["value"].dtype)


LIGHTNING_TOKENS = ("query", "key", "value")
DELTA_TOKENS = ("query", "key", "value", "g", "beta")


def _delta_call(given: dict[str, Any], decoding: bool) -> Call:
    q, k, v, g, beta = (given[name].float() for name in DELTA_TOKENS)
    if given.get("use_qk_l2norm_in_kernel"):
        q, k = _normalised(q), _normalised(k)
    return Call(Tokens(q * q.shape[-1] ** -0.5, k, v, g, beta), None, given["initial_state"], given["value"].dtype)


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPSILON)


def _mamba_call(given: dict[str, Any], decoding: bool) -> Call:
    x, dt, rate, skip = (given[name] for name in ("hidden_states", "dt", "A", "D"))
    bias = given.get("dt_bias")
    if decoding:  # one token; dt, A, D and the bias are repeated over the head's channels
        dt, rate, skip = dt[..., 0], rate[:, 0, 0], None if skip is None else skip[:, 0]
        bias = None if bias is None else bias[:, 0]
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    if given.get("dt_softplus"):
        dt = F.softplus(dt)
    if not decoding:
        dt = dt.clamp(*given["dt_limit"])
    x, dt, kind, z = x.float(), dt.float(), x.dtype if decoding else torch.float32, None
    tokens = Tokens(given["C"].float(), given["B"].float(), x * dt[..., None], rate.float() * dt, None)
    if decoding:
        tokens = Tokens(*(y if y is None else y[:, None] for y in tokens))
        x = x[:, None]
        z = given["z"] if given["z"] is None else given["z"][:, None]
    term = None if skip is None else skip.float()[:, None] * x
    return Call(tokens, term, given["state"] if decoding else given["initial_states"], kind, z)


RULES = (
    Rule(
        "gdn",
        "torch_chunk_gated_delta_rule",
        "torch_recurrent_gated_delta_rule",
        lambda m: Layer("gdn", m.num_v_heads, m.head_k_dim, m.head_v_dim, m.num_k_heads),
        _delta_call,
        "initial_state",
        DELTA_TOKENS,
        True,
    ),
    Rule(
        "kda",
        "chunk_kimi_delta_attention",
        "recurrent_kimi_delta_attention",
        lambda m: Layer("kda", m.num_heads, m.head_dim, m.head_dim, m.num_heads),
        _delta_call,
        "initial_state",
        DELTA_TOKENS,
        True,
    ),
    Rule(
        "mamba2",
        "mamba2_chunk_scan",
        "mamba2_selective_state_update",
        lambda m: Layer("mamba2", m.num_heads, m.ssm_state_size, m.head_dim, m.n_groups),
        _mamba_call,
        "initial_states",
        ("hidden_states", "dt", "B", "C"),
        False,
        updates=True,
        fuses=True,
    ),
    Rule(
        "mamba2",
        "lightning_prefill",
        "lightning_decode",
        lambda m: Layer("mamba2", m.num_attention_heads, m.head_dim, m.head_dim, m.num_attention_heads),
        _lightning_call,
        "initial_state",
        LIGHTNING_TOKENS,
        True,
        marks=("slope_rate", "get_linear_cache"),
        forward=lightning.forward,
        place=lightning.place_of,
    ),
)


@dataclass(frozen=True)
class RecurrentLayer:
    """One recurrent layer of a model.

    Parameters
    ----------
    name : str
        Name of the module within the model.
    layer : Layer
        Kind and shape.
    index : int
        The layer's index in a cache.
    module : torch.nn.Module
        The mixer.
    rule : Rule
        Interface of the mixer's recurrence.
    """

    name: str
    layer: Layer
    index: int
    module: torch.nn.Module
    rule: Rule


def layers(model: torch.nn.Module) -> dict[str, RecurrentLayer]:
    """Recurrent layers of a model that heads can decode.

    Parameters
    ----------
    model : torch.nn.Module
        A model of transformers; it, or a part, may be a result of `torch.compile`.

    Returns
    -------
    dict of str to RecurrentLayer
        Layers by the names of their modules before `torch.compile`, in the order of the model.

    Raises
    ------
    TypeError
        If `model` is no module, such as the name of a folder.
    ValueError
        If the version of transformers is not supported, or no layer has a known recurrence.
    """
    check_version()
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a model, as from_pretrained returns it, got {type(model).__name__}")
    found = {}
    for full, module in model.named_modules():
        name = ".".join(part for part in full.split(".") if part != COMPILED)
        names = inspect.unwrap(type(module).forward).__code__.co_names
        for rule in RULES:
            if all(name in names for name in rule.marks or (rule.prefill, rule.decode)):
                found[name] = RecurrentLayer(name, rule.shape(module), int(module.layer_idx), module, rule)
    if not found:
        raise ValueError(
            "model: expected layers of gated delta rule, Kimi Delta Attention, Mamba-2 or lightning attention, found "
            f"none in {type(getattr(model, COMPILED, model)).__name__}"
        )
    return found


def block_of(model: torch.nn.Module, layer: RecurrentLayer) -> torch.nn.Module:
    """The block of a model that a layer is in, with its norms and often an MLP: the module around the mixer."""
    full = next(name for name, module in model.named_modules() if module is layer.module)
    return model.get_submodule(full.removesuffix(f".{COMPILED}").rpartition(".")[0])


def check_version() -> None:
    """Refuse a version of transformers with other modeling files."""
    import transformers

    version = transformers.__version__
    if not LEAST_VERSION <= tuple(int(x) for x in version.split(".")[:2]) < NEXT_VERSION:
        least, after = (".".join(map(str, x)) for x in (LEAST_VERSION, NEXT_VERSION))
        raise ValueError(f"transformers: expected a version >={least},<{after}, got {version}")
