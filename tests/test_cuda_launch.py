"""Launches through the driver, without a device: a function in the driver's place reads what it is given."""

import ctypes
import struct
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from host import standin

from sketchssm.cuda import launch

FUNCTION, STREAM = 0x1234, 0x5678
TYPES = "QqifQ"
"""Of the arguments in these tests: array, int64, int32, float32, null pointer."""


class Driver:
    """Takes ``cuLaunchKernelEx``'s place: reads the structures as the C header lays them out."""

    def __init__(self):
        self.seen, self.answers = [], []

    def __call__(self, config, function, pointers, extra):
        fields = struct.unpack("7I4xQQI4x", ctypes.string_at(config, 56))
        grid, block, shared, stream, attributes, count = fields[:3], fields[3:6], *fields[6:]
        attribute = struct.unpack("I4xi60x", ctypes.string_at(attributes, 72)) if count else None
        addresses = (ctypes.c_void_p * len(TYPES)).from_address(ctypes.addressof(pointers))
        values = [
            struct.unpack(code, ctypes.string_at(at, struct.calcsize(code)))[0]
            for code, at in zip(TYPES, addresses, strict=True)
        ]
        assert extra is None
        self.seen.append((function, grid, block, shared, stream, count, attribute, values))
        return self.answers.pop(0) if self.answers else 0


class DriverError(RuntimeError):
    """In the place of CuPy's."""


@pytest.fixture
def driver(monkeypatch):
    """The stand-in in CuPy's place, on a device of now, with a driver that can be asked what it saw."""
    found = Driver()
    monkeypatch.setitem(sys.modules, "cupy", standin)
    monkeypatch.setattr(standin.Stream, "ptr", STREAM)
    monkeypatch.setattr(standin.cuda.runtime, "driverGetVersion", lambda: 12030)
    monkeypatch.setattr(standin.cuda.driver, "CUDADriverError", DriverError, raising=False)
    monkeypatch.setattr(launch, "_driver", lambda: found)
    return found


def kernel():
    return SimpleNamespace(name="some_step", kernel=SimpleNamespace(ptr=FUNCTION))


def arguments(scale=1):
    """As in `TYPES`."""
    array = standin.zeros(4, np.float32)
    return array, np.int64(-(2**40) * scale), np.int32(-7 * scale), np.float32(0.5 * scale), np.uint64(0)


def test_arguments_and_sizes(driver):
    """Every launch has its own arguments and sizes, in buffers that are used again."""
    run = launch.launcher(kernel())
    given = [arguments(), arguments(3)]
    run(3, 128, given[0], 70_000)
    run(1, 32, given[1])
    for args, seen, sizes in zip(given, driver.seen, [(3, 128, 70_000), (1, 32, 0)], strict=True):
        function, grid, block, shared, stream, _, _, values = seen
        assert (grid[0], block[0], shared) == sizes
        assert grid[1:] == block[1:] == (1, 1)
        assert (function, stream) == (FUNCTION, STREAM)
        assert values == [args[0].data.ptr, *args[1:]]


@pytest.mark.parametrize(
    ("version", "capability", "overlaps"),
    [(12030, "90", True), (13000, "120", True), (12020, "90", False), (12030, "89", False)],
)
def test_who_may_start_early(driver, monkeypatch, version, capability, overlaps):
    monkeypatch.setattr(standin.cuda.runtime, "driverGetVersion", lambda: version)
    monkeypatch.setattr(standin.cuda.Device, "compute_capability", capability)
    launch.launcher(kernel())(1, 32, arguments())
    *_, count, attribute, _ = driver.seen[0]
    assert (count, attribute) == ((1, (6, 1)) if overlaps else (0, None))


def test_an_old_driver_is_left_to_cupy(driver, monkeypatch):
    monkeypatch.setattr(standin.cuda.runtime, "driverGetVersion", lambda: 11080)
    calls = []
    args = arguments()
    launch.launcher(lambda *a, **o: calls.append((a, o)))(3, 64, args, 16)
    assert calls == [(((3,), (64,), args), {"shared_mem": 16})]
    assert not driver.seen


def test_callers_share_nothing(driver):
    one, two = (launch.launcher(kernel()) for _ in range(2))
    one(1, 32, arguments())
    two(2, 64, arguments(2))
    one(1, 32, arguments(3))
    assert [seen[-1][2] for seen in driver.seen] == [-7, -14, -21]
    assert [seen[1][0] for seen in driver.seen] == [1, 2, 1]


def test_a_thread_without_a_context_gets_one(driver, monkeypatch):
    asked = []
    monkeypatch.setattr(standin.cuda.runtime, "memGetInfo", lambda: asked.append(1))
    driver.answers = [201]
    launch.launcher(kernel())(1, 32, arguments())
    assert len(asked) == 1
    assert driver.seen[0] == driver.seen[1]


def test_refusals(driver):
    run = launch.launcher(kernel())
    driver.answers = [701]
    with pytest.raises(DriverError, match="701") as caught:
        run(5, 2048, arguments(), 16)
    assert caught.value.__notes__ == ["some_step: 5 blocks, 2048 threads, 16 bytes of shared memory"]
    with pytest.raises(struct.error):  # another type than the first time's
        run(1, 32, (np.float32(1), *arguments()[1:]))
    with pytest.raises(KeyError):
        launch.launcher(kernel())(1, 32, (1.5,))
