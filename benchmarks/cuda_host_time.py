"""Host time of one step of heads on the CUDA backend, with PyTorch tensors, in microseconds.

    python benchmarks/cuda_host_time.py               # on a device
    python benchmarks/cuda_host_time.py --no-device   # on the host build of the kernels, with launches that do nothing

`direct` is a step through the C++ extension, `operator` the same through `sketchssm.torch.DecodeLayer`, and `python` a
step without the extension. Without a device, tensors on the host claim to be on a device, and only the library's own
work is timed. Each time is the median over many rounds of the thread's own CPU time.
"""

import argparse
import ctypes
import importlib
import statistics
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from reports import about, write

import sketchssm as ss
from sketchssm.study import bench

SHAPE, BATCH, SLOTS = "qwen3-next", 8, 16
CALLS, ROUNDS = 100, 150


def without_device(patch):
    """Take the place of CuPy, the driver, and PyTorch's queries about a device."""
    from host import standin

    from sketchssm import cuda
    from sketchssm.arrays import interop
    from sketchssm.cuda import direct, frameworks, launch

    extension = importlib.import_module("sketchssm.cuda._direct")
    standin.install(patch)
    patch.setitem(sys.modules, extension.__name__, extension)
    patch.setattr(cuda, "missing", lambda: "")
    patch.setattr(launch, "_driver", lambda: lambda config, function, pointers, extra: 0)
    nothing = ctypes.cast(ctypes.pythonapi.PyErr_CheckSignals, ctypes.c_void_p).value  # returns 0, as for success
    patch.setattr(direct, "driver_addresses", lambda: (nothing,) * 4)
    patch.setattr(interop, "CUDA_DEVICES", (1,))  # DLPack's number for the host
    patch.setattr(frameworks.TorchArrays, "stream_address", lambda self: 0)
    patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    patch.setattr(torch.Tensor, "get_device", lambda tensor: 0)
    patch.setattr(frameworks.TorchArrays, "stream", lambda self: None)
    patch.setattr(
        frameworks.TorchArrays, "empty", lambda self, shape, dtype: torch.empty(shape, dtype=getattr(torch, dtype))
    )


def microseconds(call, wait):
    """Median over rounds of what one call takes the thread; the device is idle when a round begins."""
    call()
    call()
    times = []
    for _ in range(ROUNDS):
        wait()
        start = time.thread_time_ns()
        for _ in range(CALLS):
            call()
        times.append((time.thread_time_ns() - start) / CALLS / 1e3)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-device", action="store_true", help="replace the device, CuPy and the driver")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    device = "cpu" if args.no_device else "cuda"
    wait = (lambda: None) if args.no_device else torch.cuda.synchronize
    rows = []
    with pytest.MonkeyPatch.context() as patch:
        if args.no_device:
            without_device(patch)
        layer = bench.SHAPES[SHAPE]
        plan = bench.random_plan(layer, bench.spread_ranks(layer.heads, 7), 16, "lowrank")
        tokens = {
            name: torch.zeros(BATCH, *shape, device=device, dtype=torch.bfloat16 if name in "qkv" else torch.float32)
            for name, shape in layer.token_shapes().items()
        }
        slots, out = torch.arange(BATCH, device=device), torch.empty_like(tokens["v"])
        calls = {
            "out, slots": {"slots": slots, "out": out},
            "out, int32 slots": {"slots": slots.to(torch.int32), "out": out},
            "slots": {"slots": slots},
            "neither": {},
        }
        for way in ("direct", "operator", "python"):
            if way == "python":
                patch.setitem(sys.modules, "sketchssm.cuda._direct", None)
            heads = {"standard": ss.StandardHead(layer, SLOTS, "cuda"), "sketch": ss.SketchHead(plan, SLOTS, "cuda")}
            for name, head in heads.items():
                head.warmup()
                step = head.step
                if way == "operator":
                    with pytest.MonkeyPatch.context() as host:
                        host.setattr(head, "backend", "cpu" if args.no_device else "cuda")
                        step = ss.torch.DecodeLayer(head)
                for label, options in calls.items():
                    with torch.inference_mode():
                        took = microseconds(lambda step=step, options=options: step(**tokens, **options), wait)
                    print(f"{name:10} {way:10} {label:18} {took:6.2f}")
                    rows.append({"system": name, "way": way, "arguments": label, "microseconds": round(took, 2)})
    if args.json:
        name = "none" if args.no_device else torch.cuda.get_device_name()
        settings = {"shape": SHAPE, "batch": BATCH, "torch": torch.__version__}
        write(about(name) | settings | {"rows": rows}, args.json)


if __name__ == "__main__":
    main()
