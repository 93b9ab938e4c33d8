"""Standard decode of other installed libraries: checked against float64, then timed like the heads.

All of them need PyTorch, which is imported only when a peer is timed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any

import numpy as np

from sketchssm.layer.recurrence import Layer, Tokens
from sketchssm.study.bench.device import Workload, slot_sets, typical_times
from sketchssm.study.bench.results import WRONG, BenchResult, step_bytes
from sketchssm.study.systems import exact_systems

Step = Callable[[Any], tuple[Any, Any]]
"""From states to outputs ``(batch, heads, V)`` and new states, in the same memory or in new memory."""


Adapter = Callable[[Layer, Tokens, Any], tuple[Step, Tokens]]
"""From a layer, one token's inputs ``(batch, ...)`` and PyTorch to a step, and the same inputs as this library defines
them."""


@dataclass(frozen=True)
class Peer:
    """One kernel of another library."""

    name: str
    modules: tuple[str, ...]  # that must be installed
    kind: str  # of the layer that the kernel decodes
    adapter: Adapter  # makes the step
    key_first: bool = False  # whether the states are (batch, heads, K, V)

    def missing(self) -> str:
        """Return the first module that is not installed, or an empty string."""
        return next((name for name in ("torch", *self.modules) if importlib.util.find_spec(name) is None), "")


def measure_peer(
    shape: str, peer: Peer, work: Workload, bandwidth: float, *, seconds: float = 0.05, duty: float = 1.0
) -> BenchResult:
    """Check a peer on one window of tokens, then time it; the arguments are those of `measure_device`.

    ModuleNotFoundError if the peer is not installed, RuntimeError if it fails or its results are wrong.
    """
    import cupy

    if lack := peer.missing():
        raise ModuleNotFoundError(f"{peer.name}: {lack} is not installed")
    import torch

    layer, batch, window = work.layer, work.batch, work.window
    standard = exact_systems(layer)[0]
    needed = step_bytes(standard, layer, batch, window, on_device=True)
    try:
        with torch.no_grad():
            made = [peer.adapter(layer, _tensors(step, torch), torch) for step in work.steps]
            start = _turned(torch.from_numpy(work.start).cuda(), peer)[None].repeat(batch, 1, 1, 1)
            state, outputs = start.clone(), []
            for step, _ in made:
                output, state = step(state)
                outputs.append(output[0].double().cpu().numpy())
            row = Tokens(*(None if x[0] is None else _row(x) for x in zip(*(told for _, told in made), strict=True)))
            errors = work.errors(standard, np.stack(outputs), _turned(state[0], peer).cpu().numpy(), row)
            if not max(errors) < WRONG:
                raise ValueError(f"errors of {errors[0]:.1e} (outputs) and {errors[1]:.1e} (states)")
            del state
            sets = slot_sets(batch, needed.read, 8 * int(np.prod(layer.state_shape)))
            graph, kept = _captured([made[i % window][0] for i in range(sets)], start, torch)
    except Exception as error:  # other libraries raise many types
        raise RuntimeError(str(error)) from error
    stream = cupy.cuda.Stream(non_blocking=True)
    shared = torch.cuda.ExternalStream(stream.ptr)
    torch.cuda.synchronize()

    def replay() -> None:
        with torch.cuda.stream(shared):
            graph.replay()

    time = float(typical_times([replay], stream, seconds, duty)[0]) / sets
    del kept, replay
    torch.cuda.empty_cache()
    return BenchResult.of((shape, peer.name, "peer"), batch, [time] * window, needed, bandwidth, errors, 0.0)


def _turned(state: Any, peer: Peer) -> Any:
    return state.transpose(-1, -2).contiguous() if peer.key_first else state


def _captured(steps: list[Step], start: Any, torch: Any) -> tuple[Any, Any]:
    """Capture a graph that decodes one token for each set of states; return the graph and its memory."""
    states = [start.clone() for _ in steps]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        kept = [step(state) for step, state in zip(steps, states, strict=True)]
    return graph, (states, kept)


def _tensors(step: Tokens, torch: Any) -> Tokens:
    """Share a token's arrays as tensors; bf16 goes through DLPack as 16-bit integers, which every version supports."""

    def taken(name: str, x: Any) -> Any:
        if name in "qkv":
            return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16)
        return torch.from_dlpack(x)

    return Tokens(*(None if x is None else taken(name, x) for name, x in step._asdict().items()))


def _row(tensors: Any) -> Any:
    """Return the first row of one argument at all tokens, ``(1, window, ...)`` on the host."""
    return np.stack([x[:1].double().cpu().numpy() for x in tensors], axis=1).astype(np.float32)


def _fla_gdn(layer: Layer, token: Tokens, torch: Any) -> tuple[Step, Tokens]:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    one = Tokens(*(x[:, None] for x in token))

    def step(state: Any) -> tuple[Any, Any]:
        output, state = fused_recurrent_gated_delta_rule(
            one.q, one.k, one.v, g=one.g, beta=one.beta, scale=1.0,
            initial_state=state, output_final_state=True, state_v_first=True,
        )  # fmt: skip
        return output[:, 0], state

    return step, token


def _fla_kda(layer: Layer, token: Tokens, torch: Any, value_first: bool = True) -> tuple[Step, Tokens]:
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    one = Tokens(*(x[:, None] for x in token))
    slots = torch.arange(token.v.shape[0], device=token.v.device)
    out = torch.empty_like(one.v)

    def step(state: Any) -> tuple[Any, Any]:
        output, state = fused_recurrent_kda_fwd(
            one.q, one.k, one.v, one.g, one.beta, initial_state=state, scale=1.0,
            inplace_final_state=True, state_v_first=value_first, ssm_state_indices=slots, out=out,
        )  # fmt: skip
        return output[:, 0], state

    return step, token


def _ssm_inputs(layer: Layer, token: Tokens, torch: Any) -> tuple[tuple[Any, ...], Tokens]:
    """Return the arguments x to D of a selective state update, and the same inputs as this library defines them."""
    q, k, x, g, _ = token
    batch, heads, value_dim, key_dim = x.shape[0], layer.heads, layer.value_dim, layer.key_dim
    dt = (-g).to(torch.bfloat16)  # with A = -1: the decay is exp(-dt), and v is dt x
    rate = torch.full((heads, 1, 1), -1.0, device=x.device).expand(heads, value_dim, key_dim)
    wide = dt[..., None].expand(batch, heads, value_dim)
    return (x, wide, rate, k, q, _zeros(layer, x, torch)), Tokens(q, k, dt[..., None].double() * x, -dt.float(), None)


def _zeros(layer: Layer, x: Any, torch: Any) -> Any:
    """Return skip weights or biases of zero; kernels want one number per head, broadcast."""
    return torch.zeros((layer.heads, 1), dtype=x.dtype, device=x.device).expand(layer.heads, layer.value_dim)


def _mamba_ssm(layer: Layer, token: Tokens, torch: Any) -> tuple[Step, Tokens]:
    update = _inner("mamba_ssm", "ops.triton.selective_state_update").selective_state_update
    arguments, told = _ssm_inputs(layer, token, torch)
    bias = _zeros(layer, token.v, torch)  # the kernel requires a bias

    def step(state: Any) -> tuple[Any, Any]:
        return update(state, *arguments, dt_bias=bias), state

    return step, told


@cache
def _inner(package: str, module: str) -> ModuleType:
    """Import one module of a package without the package's own code, which may need compiled extensions."""
    name = f"{package}.{module}"
    spec = importlib.util.find_spec(package)
    if package in sys.modules or spec is None:
        return importlib.import_module(name)
    sys.modules[package] = importlib.util.module_from_spec(spec)
    try:
        return importlib.import_module(name)
    finally:  # a later import loads the whole package
        for loaded in [x for x in sys.modules if x.split(".")[0] == package]:
            del sys.modules[loaded]


def _flashinfer_ssu(layer: Layer, token: Tokens, torch: Any) -> tuple[Step, Tokens]:
    from flashinfer.mamba import selective_state_update

    arguments, told = _ssm_inputs(layer, token, torch)
    slots = torch.arange(token.v.shape[0], dtype=torch.int32, device=token.v.device)
    out = torch.empty_like(token.v)

    def step(state: Any) -> tuple[Any, Any]:
        selective_state_update(state, *arguments, state_batch_indices=slots, out=out)
        return out, state

    return step, told


def _flashinfer_gdn(layer: Layer, token: Tokens, torch: Any) -> tuple[Step, Tokens]:
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose

    narrow = torch.bfloat16
    assert token.beta is not None
    # the kernel forms both gates itself: g = -softplus(a) with A_log and dt_bias zero, beta = sigmoid(b)
    a = torch.log(torch.expm1(-token.g.double()).clamp(min=1e-30)).to(narrow)
    b = torch.logit(token.beta.double(), eps=1e-6).to(narrow)
    none = torch.zeros(layer.heads, device=a.device)
    q, k, v, a1, b1 = (x[:, None].contiguous() for x in (token.q, token.k, token.v, a, b))
    out = torch.empty_like(v)

    def step(state: Any) -> tuple[Any, Any]:
        output, state = gated_delta_rule_decode_pretranspose(
            q, k, v, state, none, a1, none, b1, scale=1.0, output=out, use_qk_l2norm=False
        )
        return output[:, 0], state

    softplus = torch.nn.functional.softplus(a.double())
    return step, token._replace(g=-softplus, beta=torch.sigmoid(b.double()))


PEERS = (
    Peer("fla gated_delta_rule", ("fla",), "gdn", _fla_gdn),
    Peer("fla kda", ("fla",), "kda", _fla_kda),
    Peer("fla kda, K first", ("fla",), "kda", partial(_fla_kda, value_first=False), key_first=True),
    Peer("mamba-ssm ssu", ("mamba_ssm",), "mamba2", _mamba_ssm),
    Peer("FlashInfer ssu", ("flashinfer",), "mamba2", _flashinfer_ssu),
    Peer("FlashInfer gdn", ("flashinfer", "cutlass"), "gdn", _flashinfer_gdn),
)
"""Decode kernels of flash-linear-attention, mamba-ssm and FlashInfer. Its GDN kernel needs nvidia-cutlass-dsl."""
