"""A head, its tokens and tolerances that the tests of heads on the host share."""

import ml_dtypes
import numpy as np
import pytest
from decode_systems import head_of
from gpu.cuda_support import make_plan, make_tokens

import sketchssm as ss
from host import compiler, standin
from sketchssm import cuda
from sketchssm.arrays import interop
from sketchssm.cuda import modules
from sketchssm.layer.recurrence import FULL_STATE, Layer, Tokens

BFLOAT16 = ml_dtypes.bfloat16
LAYER = Layer("gdn", 2, 64, 80, 1)

_modules = {}  # compiled once for all tests of a file


def install(monkeypatch, order=0):
    """The stand-in for CuPy; every test looks for a device anew. Skips on machines that can't compile the kernels."""
    if missing := compiler.missing():
        pytest.skip(missing)
    standin.install(monkeypatch)
    monkeypatch.setattr(standin, "order", order)
    monkeypatch.setattr(modules, "_modules", _modules)
    found = cuda.importlib.util.find_spec
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name, *given: name == "cupy" or found(name, *given))
    cuda.missing.cache_clear()
    yield standin
    cuda.missing.cache_clear()


def sketch(backend="cuda", slots=4, activation=None, **options):
    """A warm sketch head. All tests of an activation type use the same compiled kernels."""
    plan = make_plan(LAYER, [7, FULL_STATE], np.random.default_rng(1), window=4)
    head = ss.SketchHead(plan, slots, backend, **options)
    if backend == "cuda":
        head.warmup(activation)
    return head


def head_with(system, **options):
    """A warm head of LAYER with four slots and windows of four tokens."""
    plan = make_plan(LAYER, [7, FULL_STATE], np.random.default_rng(1), window=4)
    head = head_of(system, plan, 4, "cuda", **options)
    head.warmup()
    return head


def tokens_of(rng, batch=3, length=10, activation="bfloat16"):
    return make_tokens(LAYER, batch, length, activation, rng)


def narrow(tokens, convert=lambda x: x):
    """Tokens with q, k and v in bf16."""
    return Tokens(*(convert(x.astype(BFLOAT16) if i < 3 else x) for i, x in enumerate(tokens)))


class OnDevice:
    """An array of an unknown framework; DLPack says that it is on a device."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __dlpack__(self, **options):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return interop.CUDA_DEVICES[0], 0
