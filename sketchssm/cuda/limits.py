"""Checks that the kernels support a layer and a plan, and that the device is large enough."""

from __future__ import annotations

from typing import Any

from sketchssm.cuda.constants import KERNEL_PIVOTS, MAX_RANK, STATIC_SHARED, WINDOWS
from sketchssm.cuda.modules import Variant, load, size_of
from sketchssm.layer.checks import UnsupportedError
from sketchssm.layer.recurrence import Layer
from sketchssm.plans.plan import SketchPlan

KEY_DIMS, VALUE_DIMS = (64, 96, 128, 192, 256), range(16, 257, 16)
MAX_CHANNELS = 128
"""Most channels of a key with a decay each."""
SUPPORTED = (
    f"key_dim {KEY_DIMS} (up to {MAX_CHANNELS} with a decay per channel), value_dim a "
    f"multiple of 16 up to {VALUE_DIMS[-1]}, window {WINDOWS}, up to {KERNEL_PIVOTS} pivots, ranks up to {MAX_RANK}"
)


def _refuse(name: str, value: Any) -> None:
    raise UnsupportedError(f"{name}: the CUDA kernels don't support {value}; they support {SUPPORTED}")


def check_layer(layer: Layer) -> None:
    """Refuse a layer that the kernels do not support."""
    if layer.key_dim not in KEY_DIMS or (layer.channel_decays and layer.key_dim > MAX_CHANNELS):
        _refuse("key_dim", layer.key_dim)
    if layer.value_dim not in VALUE_DIMS:
        _refuse("value_dim", layer.value_dim)


def check_window(window: int) -> None:
    """Refuse a window that the kernels do not support."""
    if window not in WINDOWS:
        _refuse("window", window)


def check_plan(plan: SketchPlan) -> None:
    """Refuse a plan, or a plan's layer, that the kernels do not support."""
    check_layer(plan.layer)
    check_window(plan.window)
    head = int(plan.ranks.argmax())
    if plan.ranks[head] > MAX_RANK:
        raise UnsupportedError(
            f"ranks: expected at most {MAX_RANK} on backend 'cuda', got {plan.ranks[head]} for head {head} of "
            f"{plan.layer}; allocate with rank_max={MAX_RANK} or with residual bits, or take backend 'cpu'"
        )
    if (plan.map.pivots or 0) > KERNEL_PIVOTS:
        _refuse("pivots", plan.map.pivots)


def shared_limit() -> int:
    """Largest dynamic shared memory of a block on the current device, in bytes."""
    import cupy

    return int(cupy.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"])


def check_shared(*variants: Variant) -> None:
    """Refuse kernels that need more shared memory than the device has; the error names what fits.

    The variants are reads and flushes of one plan. The compiler gives their sizes without compiling the kernels.
    """
    import cupy

    device, limit = cupy.cuda.Device(), shared_limit() - STATIC_SHARED

    def need(**changes: int) -> int:
        sizes = []
        for variant in variants:
            constants = dict(variant.constants) | {"SIZES_ONLY": 1} | changes
            sizes.append(size_of(load(Variant(variant.operation, constants)), f"{variant.operation}_shared_bytes"))
        return max(sizes)

    if need() <= limit:
        return
    window, rank = (dict(variants[0].constants)[name] for name in ("W", "RANK_MAX"))
    rooms = []
    fitting = [w for w in WINDOWS if w < window and need(W=w) <= limit]
    if fitting:
        rooms.append(f"rank {rank} fits with a window of up to {max(fitting)}")
    low, high = 0, rank  # the largest rank that fits is at least low and less than high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if need(RANK_MAX=middle) <= limit else (low, middle)
    if low:
        rooms.append(f"window {window} fits with ranks of up to {low} (calibrate with rank_max={low})")
    raise UnsupportedError(
        f"plan: rank {rank} with window {window} needs {need()} bytes of shared memory a block, and device "
        f"{device.id} (sm_{device.compute_capability}) has {limit}; {' and '.join(rooms) or 'no smaller plan fits'}"
    )
