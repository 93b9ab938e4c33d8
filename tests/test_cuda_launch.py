"""Launches through the driver without a device: a stand-in for the driver's function reads its arguments."""

import ctypes
import struct
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from host import standin

from sketchssm.cuda import launch
from sketchssm.cuda.occupancy import read_pace

FUNCTION, STREAM = 0x1234, 0x5678
TYPES = "QqifQQqif"
"""Of the arguments in these tests: array, int64, int32, float32, null pointer; address, int64, int32; float32."""


class Driver:
    """Stand-in for ``cuLaunchKernelEx``, which reads the structures as the C header defines them."""

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
    """Stand-in for CuPy's."""


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


ARRAY = standin.zeros(4, np.float32)
BEFORE = ARRAY, np.int64(-(2**40)), np.int32(-7), np.float32(0.5), np.uint64(0)
AFTER = (np.float32(-0.25),)
FIXED = [ARRAY.ctypes.data, *map(float, BEFORE[1:])]


def launcher(function=None, **options):
    """One of the kernel with arguments as in `TYPES`, of which three vary."""
    return launch.Launcher(function or kernel(), BEFORE, "Qqi", AFTER, **options)


def test_arguments_and_sizes(driver):
    """Every launch has its own varying arguments and grid, in buffers that are used again."""
    run = launcher(shared=70_000)
    given = [(3, 128, 2**63 + 8, -(2**40), -7), (1, 32, 16, 5, 2**31 - 1)]
    for blocks, threads, *values in given:
        run(blocks, threads, *values)
        function, grid, block, shared, stream, _, _, came = driver.seen[-1]
        assert (grid, block, shared) == ((blocks, 1, 1), (threads, 1, 1), 70_000)
        assert (function, stream) == (FUNCTION, STREAM)
        assert came == [*FIXED, *values, -0.25]


@pytest.mark.parametrize(
    ("version", "capability", "overlaps", "wanted"),
    [
        *((12030, "90", True, True), (13000, "120", True, True)),
        *((12020, "90", True, False), (12030, "89", True, False), (12030, "90", False, False)),
    ],
)
def test_who_may_start_early(driver, monkeypatch, version, capability, overlaps, wanted):
    monkeypatch.setattr(standin.cuda.runtime, "driverGetVersion", lambda: version)
    monkeypatch.setattr(standin.cuda.Device, "compute_capability", capability)
    launcher(overlaps=overlaps)(1, 32, 0, 0, 0)
    *_, count, attribute, _ = driver.seen[0]
    assert (count, attribute) == ((1, (6, 1)) if wanted else (0, None))


def test_arrays_stay_as_long_as_the_launcher(driver):
    array = standin.zeros(4, np.float32)
    gone = weakref.ref(array)
    run = launch.Launcher(kernel(), (array,), "Q")
    del array
    assert gone() is not None
    del run
    assert gone() is None


def test_callers_share_nothing(driver):
    one, two = launcher(), launcher()
    for run, value in ((one, 1), (two, 2), (one, 3)):
        run(value, 32, 0, 0, value)
    assert [seen[-1][-2] for seen in driver.seen] == [1, 2, 3]
    assert [seen[1][0] for seen in driver.seen] == [1, 2, 3]


def test_a_thread_without_a_context_gets_one(driver, monkeypatch):
    asked = []
    monkeypatch.setattr(standin.cuda.runtime, "memGetInfo", lambda: asked.append(1))
    driver.answers = [201]
    launcher()(1, 32, 0, 0, 0)
    assert len(asked) == 1
    assert driver.seen[0] == driver.seen[1]


def test_refusals(driver):
    run = launcher(shared=16)
    driver.answers = [701]
    with pytest.raises(DriverError, match="701") as caught:
        run(5, 2048, 0, 0, 0)
    assert caught.value.__notes__ == ["some_step: 5 blocks, 2048 threads, 16 bytes of shared memory"]
    for wrong in ((0, 0), (0.5, 0, 0), (0, 0, 2**31)):
        with pytest.raises(struct.error):  # too few, another type, too wide
            run(1, 32, *wrong)
    with pytest.raises(KeyError):
        launch.Launcher(kernel(), (1.5,), "Q")
    assert len(driver.seen) == 1


@pytest.mark.parametrize(
    ("memory", "bits", "clock", "processors", "pace"),
    [(3201, 6144, 1980, 132, 16), (2619, 5120, 1980, 132, 16), (3996, 8192, 1965, 148, 23)],  # H200, H100, B200
)
def test_the_pace_of_first_reads_follows_the_memory(memory, bits, clock, processors, pace):
    """Devices that deliver more than an H200 per cycle and multiprocessor are not held to its pace."""
    given = 1000 * memory, bits, 1000 * clock, processors
    names = "MemoryClockRate", "GlobalMemoryBusWidth", "ClockRate", "MultiProcessorCount"
    assert read_pace(dict(zip(names, given, strict=True))) == pace
    assert read_pace({}) == 16
