"""Steps of PyTorch tensors in one call of C++: results, and which calls are left to Python.

The kernels run on the host; tensors of the host claim to be on the device.
"""

import gc
import hashlib
import weakref
from pathlib import Path

import numpy as np
import pytest
from host import driver as drivers
from host import heads, standin
from host.compiler import missing
from host.heads import LAYER, narrow, sketch, tokens_of
from samples import refused

import sketchssm as ss
from sketchssm import cuda
from sketchssm.cuda import arrays, direct, frameworks
from sketchssm.layer.recurrence import Layer

extension = pytest.importorskip("sketchssm.cuda._direct", reason="the extension is not built: pip install -e .")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

BATCH, SLOTS = 3, 5
ROWS = [3, 1, 0]


def test_the_extension_is_of_this_source():
    """If this fails, so do others: build it anew with pip install -e ."""
    folder = Path(cuda.__file__).parent
    sources = b"".join((folder / name).read_bytes() for name in ("_direct.cpp", "_direct_interfaces.h"))
    assert hashlib.sha256(sources).hexdigest() == extension.SOURCE


class DriverError(RuntimeError):
    """Stand-in for CuPy's."""


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    installed = heads.install(monkeypatch)
    next(installed)
    monkeypatch.setattr(standin.cuda.driver, "CUDADriverError", DriverError, raising=False)
    made = drivers.install(monkeypatch, torch, extension)
    yield made
    assert not made.raised
    next(installed, None)


@pytest.fixture(autouse=True)
def slow(monkeypatch):
    """The list has one entry for each step that went through Python."""
    seen = []
    python = arrays.DeviceArrays.inputs

    def counted(*given):
        seen.append(given[1].v.shape)
        return python(*given)

    monkeypatch.setattr(arrays.DeviceArrays, "inputs", counted)
    return seen


def make(system="sketch"):
    """A warm head."""
    if system == "sketch":
        return sketch(slots=SLOTS)
    head = ss.StandardHead(LAYER, SLOTS, "cuda")
    head.warmup()
    return head


def tensors_of(tokens, t):
    """One token of each row, q, k and v in bf16."""
    return [
        None if x is None else torch.from_numpy(x[:, t].copy()).to(torch.bfloat16 if i < 3 else torch.float32)
        for i, x in enumerate(tokens)
    ]


@pytest.mark.parametrize("system", ["sketch", "standard"])
@pytest.mark.parametrize("given", ["slots, out", "slots", "out", ""])
def test_the_same_as_through_python(system, given, slow, rng):
    """Over windows and with other slots, with the same bits; only the first step goes through Python."""
    head, twin = make(system), make(system)
    tokens = tokens_of(rng, BATCH, 9)
    outputs = []
    for t in range(9):
        token = tensors_of(tokens, t)
        options = {"slots": torch.tensor(ROWS[::-1] if t > 5 else ROWS)} if "slots" in given else {}
        out = torch.full(token[2].shape, torch.nan, dtype=torch.bfloat16) if "out" in given else None
        got = head.step(*token, **options, out=out)
        assert out is None or got is out
        assert got.dtype == torch.bfloat16
        outputs.append(got)
    assert len(slow) == 1
    for t in range(9):
        options = {"slots": torch.tensor(ROWS[::-1] if t > 5 else ROWS)} if "slots" in given else {}
        twin._arrays.direct = None
        assert torch.equal(twin.step(*tensors_of(tokens, t), **options), outputs[t])
    assert len(slow) == 10
    np.testing.assert_array_equal(head.position, twin.position)
    np.testing.assert_array_equal(head.state, twin.state)


@pytest.mark.parametrize("system", ["sketch", "standard"])
def test_slices_and_int32_slots(system, slow, rng):
    """Inputs are rows of wider arrays, such as a projection's output, and padding is among the slots."""
    head, twin = make(system), make(system)
    tokens = tokens_of(rng, BATCH, 9)
    for t in range(9):
        token = tensors_of(tokens, t)
        wide = [torch.stack([x, torch.full_like(x, torch.nan)], 1) for x in token]
        slots = torch.tensor([3, -1, 0] if t % 2 else ROWS)
        got = head.step(*(x[:, 0] for x in wide), slots=slots.to(torch.int32))
        twin._arrays.direct = None
        assert torch.equal(got, twin.step(*token, slots=slots))
    assert len(slow) == 1 + 9
    np.testing.assert_array_equal(head.position, twin.position)
    np.testing.assert_array_equal(head.state, twin.state)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "out"])
def test_gradients_are_refused(name, slow, rng):
    """Also by a direct step, before anything is launched; under no_grad a step stays direct."""
    head, twin = make(), make()
    tokens = dict(zip(("q", "k", "v", "g", "beta"), tensors_of(tokens_of(rng, BATCH, 1), 0), strict=True))
    given = tokens | {"out": torch.zeros_like(tokens["v"])}
    for each in (head, twin):
        each.step(**tokens)
    given[name].requires_grad_()
    refused(f"{name}: expected a tensor without gradients", head.step, **given)
    with torch.no_grad():
        got = head.step(**given)
    given[name].requires_grad_(False)
    assert torch.equal(got, twin.step(**tokens))
    assert len(slow) == 2


@pytest.fixture
def learned(rng):
    """A head whose next step of `BATCH` rows is direct, the step's arguments, and a function that calls it."""
    head = make()
    given = dict(zip("qkvgb", tensors_of(tokens_of(rng, BATCH, 1), 0), strict=True))
    given |= {"out": torch.empty(given["v"].shape, dtype=torch.bfloat16), "slots": torch.tensor(ROWS)}

    def call(**others):
        q, k, v, g, beta, out, slots = (given | others).values()
        return head.step(q, k, v, g, beta, out=out, slots=slots)

    call()
    call.head, call.given = head, given
    call.direct = lambda **others: head._arrays.direct(*(given | others).values())
    return call


def test_calls_left_to_python(learned, driver):
    """Such a call has no effect before Python takes it: nothing is launched, nothing is written."""
    x = learned.given
    wide = torch.zeros(BATCH, 2 * x["v"].shape[1], x["v"].shape[2], dtype=torch.bfloat16)
    flat = torch.zeros(x["v"].numel() + 1, dtype=torch.bfloat16)
    both = torch.zeros(2 * BATCH, *x["v"].shape[1:], dtype=torch.bfloat16)
    others = [
        *({name: x[name].double()} for name in "qkvgb"),
        *({name: x[name][:2]} for name in "qkvgb"),
        *({name: x[name][:, None]} for name in "qkvgb"),
        *({name: torch.nn.Parameter(x[name], requires_grad=False)} for name in "qkvgb"),
        *({name: x[name].numpy()} for name in "gb"),
        {"b": None},
        {"q": x["q"].to_sparse()},
        {"k": x["k"].half()},
        {"v": wide[:, ::2]},  # rows whose heads are not next to each other
        {"v": flat[1:].view(x["v"].shape)},  # not aligned
        {"q": torch.zeros(*x["q"].shape[::-1], dtype=torch.bfloat16).permute(2, 1, 0)},
        {"slots": ROWS},
        {"slots": torch.tensor([ROWS])},
        {"slots": torch.tensor(ROWS).float()},
        {"slots": torch.tensor(ROWS).to(torch.int16)},
        {"slots": torch.tensor(ROWS[:2])},
        {"slots": torch.tensor(ROWS).repeat_interleave(2)[::2]},
        {"out": x["v"]},  # kernels read v after they have written
        {"out": both[1:4], "v": both[3:]},  # the last row of one is the first of the other
        {"out": torch.zeros(x["v"].shape)},
        {"out": flat[1:].view(x["v"].shape)},
        {"out": wide[:, ::2]},
        {"out": np.zeros(x["v"].shape, np.float32)},
    ]
    before = driver.launches
    for other in others:
        assert learned.direct(**other) is None, other
    more = {name: torch.cat([y, y]) for name, y in x.items()}
    assert learned.direct(**more) is None  # as many rows for the first time
    assert learned.direct(**{name: y[:0] for name, y in x.items()}) is None
    driver.capturing = 1
    assert learned.direct() is None
    driver.capturing = 0
    for function in ("get_context", "capture_status"):
        driver.answers[function] = [1]
        assert learned.direct() is None
    assert driver.launches == before
    assert learned.direct() is x["out"]
    assert driver.launches == before + 2


def test_mamba2(rng, slow):
    """A layer without write gates."""
    layer = Layer("mamba2", 2, 64, 64, 1)
    head, twin = ss.StandardHead(layer, SLOTS, "cuda"), ss.StandardHead(layer, SLOTS, "reference")
    head.warmup("float32")
    for _ in range(3):
        q, k, v = (torch.from_numpy(rng.standard_normal((BATCH, n, 64), np.float32)) for n in (1, 1, 2))
        g = -torch.rand(BATCH, 2)
        got = head.step(q, k, v, g, slots=torch.tensor(ROWS))
        want = twin.step(q.numpy(), k.numpy(), v.numpy(), g.numpy(), slots=ROWS)
        # float32 sums over 64 channels
        np.testing.assert_allclose(got, want, atol=1e-4)
    assert len(slow) == 1


def test_the_head_s_context_is_current_during_launches(learned, driver):
    driver.context = 7
    learned()
    assert driver.contexts == [1, 7]
    assert driver.context == 7
    driver.contexts.clear()
    driver.answers["set_context"] = [201]
    assert learned.direct() is None
    assert driver.contexts == []


class Beside(standin.Stream):
    """A stream of CuPy's that is not PyTorch's current one."""

    ptr = 7


@pytest.mark.parametrize("stream", [standin.Stream, Beside])
@pytest.mark.parametrize("launch", [0, 1])
def test_refused_launches(learned, driver, launch, stream):
    """The error names the kernel; the next flush does not take the rows that this read has listed."""
    learned()
    learned()
    driver.answers["launch"] = [None] * launch + [701]  # at a step that flushes
    with stream(), pytest.raises(DriverError, match="701") as caught:
        learned()
    assert caught.value.__notes__[0].startswith(["read_step: ", "flush_step: "][launch])
    assert not any(x.any() for x in learned.head._engine.slots._workspaces._used.values())
    np.testing.assert_array_equal(learned.head.position, [3, 3, 0, 3, 0])


def test_another_framework_in_between(learned, slow, rng):
    """Calls without arrays run on the stream of the framework of the call before."""
    tokens = narrow(tokens_of(rng, BATCH, 1), standin.asarray)
    arrays = learned.head._arrays
    learned.head.step(*tokens)
    assert arrays.direct is None
    assert arrays.torch is None
    learned()
    assert arrays.direct is not None
    assert arrays.torch is not None
    assert len(slow) == 3


def test_drafts_go_through_python(learned, driver, monkeypatch):
    monkeypatch.setattr(learned.head, "_draft", lambda *given: "a draft")
    q, k, v, g, beta, out, slots = learned.given.values()
    before = driver.launches
    assert learned.head.step(q, k, v, g, beta, slots=slots, out=out, draft=True) == "a draft"
    refused("lengths: expected None", learned.head.step, q, k, v, g, beta, slots=slots, out=out, lengths=slots)
    assert driver.launches == before


def test_streams_of_threads(rng, slow, monkeypatch):
    """The handle 2 stands for another stream, with another workspace, in every thread."""
    monkeypatch.setattr(frameworks.TorchArrays, "stream_address", lambda self: 2)
    head = make()
    for _ in range(3):
        head.step(*tensors_of(tokens_of(rng, BATCH, 1), 0))
    assert len(slow) == 3


def other_parameters(exchange, tensor_type):
    """The parameters of another version."""


def other_interface(**given):
    """The answer to a PyTorch with another version of DLPack."""
    raise ValueError("expected DLPack 1")


@pytest.mark.parametrize("step", [other_parameters, other_interface])
def test_an_old_build_warns(monkeypatch, slow, rng, step):
    """After an update of the sources or of PyTorch, steps go through Python instead of ending in an error."""
    monkeypatch.setattr(extension, "Step", step)
    head = make()
    with pytest.warns(
        RuntimeWarning, match=r"^sketchssm\.cuda\._direct was built from other sources, or .*pip install -e"
    ):
        head.step(*tensors_of(tokens_of(rng, BATCH, 1), 0))
    head.step(*tensors_of(tokens_of(rng, BATCH, 1), 0))  # warns once
    assert len(slow) == 2


def test_most_rows(monkeypatch, slow, rng):
    """Steps of more rows than the extension takes go through Python."""
    monkeypatch.setattr(direct, "MOST_ROWS", BATCH - 1)
    head = make("standard")
    for _ in range(2):
        head.step(*tensors_of(tokens_of(rng, BATCH, 1), 0))
        head.step(*tensors_of(tokens_of(rng, BATCH - 1, 1), 0))
    assert len(slow) == 3


def test_memory_is_freed(rng):
    head = make()
    for _ in range(2):
        head.step(*tensors_of(tokens_of(rng, BATCH, 1), 0))
    gone = weakref.ref(head._engine.state)
    del head
    gc.collect()
    assert gone() is None
