"""Sums of tokens that stay on their device. On a host without one, PyTorch's CPU stands for it."""

from types import SimpleNamespace

import numpy as np
import pytest
from host import fixtures
from samples import relative, tokens_of

import sketchssm as ss
from sketchssm.arrays import interop
from sketchssm.calibrate.sums import add_to_all
from sketchssm.calibrate.windows import Carry
from sketchssm.layer.recurrence import KINDS
from sketchssm.plans.basis import SketchBasis

of_host = fixtures.of_host

SUMS = {
    "moments": ("state_gram", "query_gram", "samples"),
    "scores": ("error", "paired", "weighted", "samples"),
    "joint": ("paired", "error", "isotropic", "energy", "samples"),
}


@pytest.fixture(params=["host", "kernels", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("torch", "cupy"))])
def device(request, monkeypatch):
    if request.param == "cupy":
        cupy = request.getfixturevalue("cupy")
        return lambda x: None if x is None else cupy.asarray(x)
    torch = request.getfixturevalue("torch")
    if request.param == "torch":  # on a stream of its own, which others do not wait for
        torch.cuda.set_stream(torch.cuda.Stream())
        request.addfinalizer(lambda: torch.cuda.set_stream(torch.cuda.default_stream()))
        return lambda x: None if x is None else torch.from_numpy(np.array(x)).cuda()
    if request.param == "kernels":  # those of the CUDA backend, run on the host
        request.getfixturevalue("of_host")
        monkeypatch.setattr(interop, "CUDA_DEVICES", (1,))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(interop, "is_on_device", lambda array: interop.framework(array) == "torch")
    return lambda x: None if x is None else torch.from_numpy(np.array(x))


def on_host(x):
    return interop.to_host(x, "x")


def made(name, layer):
    if name == "moments":
        return ss.Moments(layer, window=8)
    basis = SketchBasis.random(layer, 8, window=8)
    return ss.RankScores(basis) if name == "scores" else ss.JointScores(basis)


def updates(sums, tokens, grad):
    more, carry = {}, None
    for start, stop in ((0, 19), (19, 60)):
        if grad is not None:
            more["grad"] = grad[:, start:stop]
        carry = sums.update(*tokens.at(np.s_[:, start:stop]), carry=carry, **more)
    return carry


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("kind", KINDS)
def test_same_sums_as_on_the_host(kind, name, device, rng):
    layer = ss.Layer(kind, 4, 32, 24, 2)
    tokens, whole = tokens_of(rng, layer, 2, 60), made(name, layer)
    grad = None if name == "moments" else rng.standard_normal(tokens.v.shape).astype(np.float32)
    carry = updates(whole, tokens, grad)
    own = made(name, layer)
    there = type(tokens)(*map(device, tokens))
    after = updates(own, there, device(grad))
    assert len({interop.framework(x) for x in (there.v, after.state, after.ring.k, vars(own)["samples"])}) == 1
    np.testing.assert_allclose(on_host(after.state), carry.state, atol=1e-5)
    for each in SUMS[name]:
        # float32 products of two libraries; codes at the edge of two levels may differ
        assert relative(on_host(getattr(own, each)), getattr(whole, each)) < (3e-3 if name == "joint" else 2e-6)
    # on the host again, and sums of both
    updates(own, tokens, grad)
    assert relative(on_host(getattr(own + whole, SUMS[name][0])), 3 * getattr(whole, SUMS[name][0])) < 3e-3


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda t: t._replace(g=t.g + 10), "^g: "),
        (lambda t: t._replace(v=t.v * np.nan), "^v: "),
        (lambda t: t._replace(beta=4 * t.beta), "^beta: .* 0 to 2"),
        (lambda t: t._replace(k=8 * t.k), "^k: .*L2-normalised"),
        (lambda t: t._replace(q=t.q[..., :-1]), "^q: "),
    ],
)
def test_refusals(spoil, match, device, rng):
    layer = ss.Layer("gdn", 4, 6, 5, 2)
    moments = made("moments", layer)
    with pytest.raises(ValueError, match=match):
        moments.update(*map(device, spoil(tokens_of(rng, layer, 2, 20))))
    assert not moments.samples.any()


def several(layer):
    return [made(name, layer) for name in SUMS]


@pytest.mark.parametrize("kind", KINDS)
def test_added_to_all(kind, device, rng):
    """The sums of `update`, one by one. The arrays of a window that begins in a state are there too."""
    layer = ss.Layer(kind, 4, 32, 24, 2)
    tokens = tokens_of(rng, layer, 2, 60)
    there = tuple(map(device, tokens))
    carry = Carry(device(rng.standard_normal((2, *layer.state_shape)).astype(np.float32)))
    together, alone = several(layer), several(layer)
    assert on_host(add_to_all(together, there, carry))
    for name, found, want in zip(SUMS, together, alone, strict=True):
        want.update(*there, carry=carry)
        assert vars(found).get("weighting", "error") == "error"
        for each in SUMS[name]:
            assert np.array_equal(getattr(found, each), getattr(want, each))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: t._replace(g=t.g + 10),
        lambda t: t._replace(v=t.v * np.nan),
        lambda t: t._replace(beta=4 * t.beta),
        lambda t: t._replace(v=t.v * np.float32(1e36)),  # finite, but not its squares
    ],
)
def test_added_to_none(spoil, device, rng):
    layer = ss.Layer("gdn", 4, 16, 8, 2)
    tokens, sums = tokens_of(rng, layer, 2, 60), several(layer)
    assert on_host(add_to_all(sums, tuple(map(device, tokens)), None))
    before = [on_host(getattr(own, each)) + 0 for name, own in zip(SUMS, sums, strict=True) for each in SUMS[name]]
    assert not on_host(add_to_all(sums, tuple(map(device, spoil(tokens))), None))
    after = [getattr(own, each) for name, own in zip(SUMS, sums, strict=True) for each in SUMS[name]]
    assert all(map(np.array_equal, before, after))


@pytest.mark.parametrize("device", ["host"], indirect=True)
def test_products_are_in_float32(torch, device, rng):
    """Whatever the caller allows for its own products."""
    layer = ss.Layer("gdn", 4, 32, 24, 2)
    tokens = [device(x) for x in tokens_of(rng, layer, 2, 60)]
    plain, mixed = made("moments", layer), made("moments", layer)
    plain.update(*tokens)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            mixed.update(*tokens)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert np.array_equal(mixed.state_gram, plain.state_gram)


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_waits_for_its_device_twice(kind, name, torch, monkeypatch, rng):
    """And `add_to_all` not at all. Once more with write gates and a decay per channel. Lists as indices would wait."""
    from torch.overrides import TorchFunctionMode

    monkeypatch.setattr(interop, "is_on_device", lambda array: interop.framework(array) == "torch")
    layer, waits = ss.Layer(kind, 4, 32, 24, 2), []

    class Seen(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            called = getattr(function, "__name__", "")
            if called in ("__bool__", "__float__", "__int__", "item", "tolist", "cpu", "numpy", "nonzero"):
                waits.append(called)
            if called in ("__getitem__", "__setitem__"):
                index = args[1] if isinstance(args[1], tuple) else (args[1],)
                waits.extend(x for x in index if isinstance(x, list | np.ndarray))
            return function(*args, **kwargs or {})

    tokens = [None if x is None else torch.from_numpy(x) for x in tokens_of(rng, layer, 2, 60)]
    sums, once = made(name, layer), ["__float__"] * layer.channel_decays * layer.erases
    with Seen():
        sums.update(*tokens)
    assert waits == once + ["__bool__"] * 2
    waits.clear()
    with Seen():
        add_to_all([sums], tokens, None)
    assert waits == once


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("kind", ("mamba2", "gdn"))
def test_pytorch_sees_no_wait(kind, torch, rng):
    layer = ss.Layer(kind, 4, 32, 24, 2)
    there = [None if x is None else torch.from_numpy(x).cuda() for x in tokens_of(rng, layer, 2, 60)]
    carry, sums = Carry(torch.zeros(2, *layer.state_shape, device="cuda")), several(layer)
    add_to_all(sums, there, carry)  # compiles and uploads
    try:
        torch.cuda.set_sync_debug_mode("error")
        add_to_all(sums, there, carry)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("there", (True, False))
def test_an_update_is_known_when_its_device_has_done_it(torch, there):
    """Without a wait of the host. The answer may be on the host."""
    from sketchssm.serving.updates import Update

    device = torch.device("cuda")
    Update(device).end(torch.ones((), dtype=torch.bool, device=device))  # allocates
    torch.cuda.synchronize()
    update = Update(device)
    torch.cuda._sleep(10**9)  # cycles: half a second
    update.end(torch.zeros((), dtype=torch.bool, device=device) if there else False)
    assert not update.known
    torch.cuda.synchronize()
    assert update.known
    assert not update.good
    assert 0.1 < update.beyond_host < 10
