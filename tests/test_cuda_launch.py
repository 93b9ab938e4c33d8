"""Launches through the driver without a device: a stand-in for the driver's function reads its arguments."""

import ctypes
import struct
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from host import standin

from sketchssm.cuda import launch
from sketchssm.cuda.occupancy import read_pace

FUNCTION, STREAM = 0x1234, 0x5678


class Driver:
    """Stand-in for ``cuLaunchKernelEx``, which reads the structures as the C header defines them."""

    def __init__(self):
        self.seen, self.answers = [], []

    def __call__(self, config, function, pointers, extra):
        *fields, attributes, count = struct.unpack("7I4xQQI4x", ctypes.string_at(config, 56))
        attribute = struct.unpack("I4xi60x", ctypes.string_at(attributes, 72)) if count else None
        assert (function, extra) == (FUNCTION, None)
        self.seen.append((fields, count, attribute))
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


def launcher(**options):
    """One of the kernel, of whose arguments three vary."""
    return launch.Launcher(kernel(), BEFORE, "Qqi", AFTER, **options)


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
    fields, *early = driver.seen[0]
    assert fields == [1, 1, 1, 32, 1, 1, 0, STREAM]
    assert tuple(early) == ((1, (6, 1)) if wanted else (0, None))


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
