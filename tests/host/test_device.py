"""The host build: operations behave as CUDA defines them, and mistakes are reported."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from host import compiler, standin

if missing := compiler.missing():
    pytest.skip(missing, allow_module_level=True)

HERE = Path(__file__).parent
SOURCE = (HERE / "selftest.cu").read_text()


@pytest.fixture(scope="module")
def module():
    module = standin.RawModule(SOURCE)
    module.compile()
    return module


@pytest.fixture(params=[0, 1, 2], autouse=True)
def order(request, monkeypatch):
    monkeypatch.setattr(standin, "order", request.param)
    return request.param


def test_shared_memory_is_poisoned_and_barriers_hold(module):
    x, out, blocks = np.arange(256, dtype=np.float32), np.zeros(256, np.float32), np.zeros(1, np.uint32)
    module.get_function("reverse")((4,), (64,), (x, out, blocks), shared_mem=256)
    assert np.array_equal(out.reshape(4, 64), x.reshape(4, 64)[:, ::-1])
    assert blocks == 256


def test_a_missing_barrier_reads_poison(module):
    out = np.zeros((2, 64), np.float32)
    module.get_function("unsynchronised")((2,), (64,), (out,))
    assert np.isnan(out[0]).any()
    assert np.array_equal(out[1], np.arange(64)[::-1])


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("half_barrier", ["thread 0 to 31: __syncthreads at selftest.cu:", "thread 32 to 63: returned"]),
        (
            "two_barriers",
            ["thread 0 to 31: __syncthreads at selftest.cu:", "thread 32 to 63: __syncthreads at selftest.cu:"],
        ),
        ("two_shuffles", ["thread 0 to 6: a warp operation of lanes ffffffff", "thread 39 to 63: a warp operation"]),
        ("wrong_mask", ["not in its own mask"]),
    ],
)
def test_divergence_is_reported(module, name, lines):
    args = (np.zeros(64, np.float32),) if name == "two_shuffles" else ()
    with pytest.raises(RuntimeError) as raised:
        module.get_function(name)((2, 3), (64,), args)
    message = str(raised.value)
    assert message.startswith(f"{name}, block (") and ", thread (" in message
    assert all(line in message for line in lines)
    out = np.zeros((2, 64), np.float32)  # the next launch is not affected
    module.get_function("unsynchronised")((2,), (64,), (out,))
    assert np.array_equal(out[1], np.arange(64)[::-1])


def test_copies_land_at_their_wait(module):
    x, out = np.arange(128, dtype=np.float32), np.zeros((3, 32, 4), np.float32)
    module.get_function("copies")((1,), (32,), (x, out))
    assert np.array_equal(out[0].ravel(), x)
    assert np.isnan(out[1:]).all()  # a later batch, and one that has not ended


def test_mbarriers_of_producer_and_consumers(module):
    """Two buffers, many phases: every number is read after it is written and before it is overwritten."""
    out = np.zeros((9, 3, 32), np.float32)
    module.get_function("pipeline")((1,), (128,), (out, np.int32(9), np.int32(1)))
    assert np.array_equal(out, np.broadcast_to(100 * np.arange(9)[:, None, None] + np.arange(32)[::-1], out.shape))


def test_a_missing_wait_at_an_mbarrier_shows(module, order):
    """Consumers that do not wait read NaN; a producer that does not wait overtakes its consumers."""
    out = np.zeros((9, 3, 32), np.float32)
    if order == 0:  # the first warp runs as far as it can
        with pytest.raises(RuntimeError, match=r"an mbarrier has gone two phases on, at selftest.cu:\d+"):
            module.get_function("pipeline")((1,), (128,), (out, np.int32(9), np.int32(0)))
        return
    seen = 0
    for _ in range(8):  # orders
        module.get_function("pipeline")((1,), (128,), (out, np.int32(2), np.int32(-1)))
        seen += np.isnan(out).any()
    assert seen


@pytest.mark.parametrize("phases", [0, 1, 2])
def test_an_mbarrier_knows_which_phase_is_over(module, phases):
    """A device compares parities only: a thread that is two phases late would wait for a later phase."""
    late = module.get_function("late")
    if phases == 1:
        late((1,), (64,), (np.int32(phases),))
        return
    with pytest.raises(RuntimeError, match="thread 32: an mbarrier at" if phases == 0 else "gone two phases on"):
        late((1,), (64,), (np.int32(phases),))


def test_a_named_barrier(module):
    out = np.zeros((5, 3, 32), np.float32)
    module.get_function("named_barrier")((2,), (128,), (out, np.int32(5), np.int32(0)))
    number = 100 * np.arange(5)[:, None, None] + np.arange(96).reshape(3, 32)
    assert np.array_equal(out, np.roll(number, -1, axis=1))
    with pytest.raises(RuntimeError, match="thread 64 to 127: a named barrier at"):
        module.get_function("named_barrier")((1,), (128,), (out, np.int32(5), np.int32(1)))
    module.get_function("named_barrier")(
        (1,), (128,), (out, np.int32(5), np.int32(0))
    )  # the failed launch leaves no trace
    assert np.array_equal(out, np.roll(number, -1, axis=1))


def test_stage_copies_land_at_a_wait(module):
    x, out = np.arange(64, dtype=np.float32), np.zeros((2, 64, 4), np.float32)
    module.get_function("stage_copies")((1,), (64,), (x, out, np.int32(32), np.int32(64)))
    lane = np.arange(64) % 32
    row, column = lane % 3, lane % 12
    for n in range(2):
        assert np.isnan(out[n, :, 0]).all()
        there = column < 8  # 32 bytes of a row; the rest was never written
        assert np.array_equal(out[n, there, 1], (32 * n + 8 * row + column)[there])
        assert np.isnan(out[n, ~there, 1]).all()
        assert np.array_equal(out[n, :, 2], 32 * n + lane % 16)
        assert np.array_equal(out[n, :, 3], 32 * n + 8 * row + (lane % 8 ^ row % 2 * 4))
    with pytest.raises(RuntimeError, match="a row of a copy is no multiple of 16 bytes"):
        module.get_function("stage_copies")((1,), (64,), (x, out, np.int32(20), np.int32(64)))
    for wrong in (0, 48, 80):
        with pytest.raises(RuntimeError, match="a copy brings other bytes than were expected"):
            module.get_function("stage_copies")((1,), (64,), (x, out, np.int32(32), np.int32(wrong)))


@pytest.mark.parametrize("spoil", [False, True])
def test_bulk_stores_read_until_the_wait(module, spoil):
    out = np.full((2, 2, 128), np.nan, np.float32)
    module.get_function("bulk_stores")((1,), (64,), (out, np.int32(spoil), np.int32(2)))
    want = np.broadcast_to(np.arange(128) + 1000 * np.arange(2)[:, None, None], out.shape)
    assert np.array_equal(out[:, :, 32:], want[:, :, 32:])
    if spoil:
        assert np.all(out[:, :, 0] == -1)  # written by the lane that sends, before it waits
    else:
        assert np.array_equal(out, want)
    with pytest.raises(RuntimeError, match="a thread ends before what it sent has been read"):
        module.get_function("bulk_stores")((1,), (64,), (out, np.int32(spoil), np.int32(1)))


def test_warp_copies_land_at_their_wait(module):
    x, out = np.arange(384, dtype=np.float32).reshape(2, 192), np.zeros((2, 193), np.float32)
    module.get_function("warp_copies")((1,), (32,), (x, out, np.int32(768)))
    assert np.isnan(out[:, 0]).all()
    assert np.array_equal(out[:, 1:], x)


@pytest.mark.parametrize("announced", [752, 784])
def test_warp_copies_bring_the_announced_bytes(module, announced):
    """A device would wait forever, or for bytes of the next phase."""
    x, out = np.zeros((2, 192), np.float32), np.zeros((2, 193), np.float32)
    with pytest.raises(RuntimeError, match="a copy brings other bytes than were announced"):
        module.get_function("warp_copies")((1,), (32,), (x, out, np.int32(announced)))


def test_clones_share_what_is_compiled(tmp_path, monkeypatch):
    """Files in another folder with the same contents give the same library."""
    first = compiler.compile_library(SOURCE)
    for header in compiler.HEADERS:
        (tmp_path / header.name).write_text(header.read_text())
    for source in compiler.HERE.glob("*.cpp"):
        (tmp_path / source.name).write_text(source.read_text())
    monkeypatch.setattr(compiler, "HERE", tmp_path)
    monkeypatch.setattr(compiler, "HEADERS", tuple(tmp_path / header.name for header in compiler.HEADERS))
    assert compiler.compile_library(SOURCE) == first


def test_numbers_and_arguments(module):
    x, out, flag = np.array([0x12345678, 0x9ABCDEF0], np.uint32), np.zeros(4, np.uint32), np.zeros(1, bool)
    kernel = module.get_function("numbers")
    kernel((1,), (1,), (x, out, np.finfo(np.float32).tiny, np.int64(7 << 32), flag))
    assert out.tolist() == [0x9ABC1234, bin(0x12345678).count("1"), 0, 7]  # a subnormal product is flushed to 0
    assert flag.all()
    x.flags.writeable = False
    kernel((1,), (1,), (x, out, 1.0, 0, flag))
    good = (x, out, 1.0, 0, flag)
    for i, bad, what in [
        (0, x.astype(np.float32), "argument 0: expected const u4, got an array of float32"),
        (1, x, "argument 1: expected mutable u4, got a read-only array"),
        (3, 1.5, "argument 3: expected i8, got 1.5"),
        (3, "x", "argument 3: expected i8, got 'x'"),
        (4, np.zeros(1, np.int32), "argument 4: expected mutable u1"),
    ]:
        with pytest.raises(TypeError, match=what):
            kernel((1,), (1,), (*good[:i], bad, *good[i + 1 :]))
    with pytest.raises(TypeError, match="expected 5 arguments, got 4"):
        kernel((1,), (1,), good[:4])


# Under AddressSanitizer and UndefinedBehaviorSanitizer


def run_sanitized(*command):
    libraries = compiler.sanitizer_libraries()
    if not libraries:
        pytest.skip("g++ has no sanitizers")
    paths = [str(HERE.parents[1]), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        compiler.SANITIZE: "1",
        "LD_PRELOAD": libraries,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps memory to its end
        "PYTHONPATH": os.pathsep.join(paths),
    }
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)


BEYOND = """
import sys
import numpy as np
from host import standin
module = standin.RawModule(open(sys.argv[1]).read())
out = np.zeros(64, np.float32)
module.get_function("beyond")((1,), (32,), (out, int(sys.argv[2])), shared_mem=128)
print("no report")
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", [0], indirect=True)
@pytest.mark.parametrize(
    ("place", "report"),
    [
        (0, "no report"),
        (1, "AddressSanitizer"),  # dynamic shared memory
        (1001, "out of bounds"),  # static shared memory
        (2033, "heap-buffer-overflow"),  # global memory
        (3001, "misaligned address"),
    ],
)
def test_sanitizers_see(place, report):
    done = run_sanitized("-c", BEYOND, str(HERE / "selftest.cu"), str(place))
    assert report in done.stdout + done.stderr
    assert (done.returncode == 0) == (place == 0)


@pytest.mark.thorough
@pytest.mark.parametrize("order", [0], indirect=True)
def test_kernels_under_sanitizers():
    """Parts of tests/test_cuda_host.py: together all kinds, files of cuda_src/ and forms of maps, in small shapes."""
    tests = (
        *("standard[host-float32-float32-gdn]", "standard[host-float32-float32-kda-64-bounded]"),
        *("replay[host-gdn-96-8-float16-float32]", "sketch[host-mamba2-80-lowrank-float32-float32]"),
        *("sketch[host-gdn-96-ridge-float32-float32]", "sketch[host-kda-ridge-bfloat16-float32]"),
    )
    suite = HERE.parent / "test_cuda_host.py"
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", *(f"{suite}::test_{test}" for test in tests))
    done = run_sanitized("-m", "pytest", *options)
    assert done.returncode == 0, done.stdout + done.stderr
