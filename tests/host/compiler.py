"""Compiles CUDA sources for the host with g++, and keeps the results between runs."""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

HERE = Path(__file__).parent
HEADERS = HERE / "device.h", HERE / "ptx.cuh"
SANITIZE = "SKETCHSSM_HOST_SANITIZE"
"""Environment variable that turns AddressSanitizer and UndefinedBehaviorSanitizer on in what is compiled."""

OPTIONS = (
    *("-std=c++20", "-Og", "-fPIC"),  # -Og takes half of -O1's time to compile, and kernels run 15% longer
    # as the device's compiler: any type may alias any other, and the host does not fuse a product with a sum
    *("-fno-strict-aliasing", "-ffp-contract=off"),
    "-fvisibility=hidden",  # variants have the same names: each must find its own
    "-fmax-errors=5",
    "-w",  # warnings are for the device's compiler to give
)
SANITIZERS = (
    "-g1",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fsanitize-sections=shared_memory",
)


_precompiling = threading.Lock()


class CompileError(Exception):
    """What g++ had to say."""


def missing():
    """What a test would need and does not find, or an empty string."""
    if importlib.util.find_spec("sketchssm._cuda_host") is None:
        return "the extension is not built: SKETCHSSM_BUILD_HOST_KERNELS=1 pip install -e ."
    return "" if shutil.which("g++") else "g++ is not installed"


def sanitizer_libraries():
    """What a program that was not itself built with the sanitizers must load first; empty where there are none."""
    paths = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return " ".join(paths) if all(map(os.path.isabs, paths)) else ""


def host_source(code):
    """A kernel's source, headers in place, as g++ can take it."""
    # an array of unknown size is no object of the host's: a pointer stands for it
    code = re.sub(
        r"extern __shared__ ([^;]*?)(\w+)\[\];",
        lambda m: f"{m[1]}* const {m[2]} = reinterpret_cast<{m[1]}*>(host::dynamic_shared);",
        code,
    )
    # the one file with instructions of the device
    code = re.sub(r'#line 1 "ptx\.cuh"\n.*?(?=^#line )', "", code, flags=re.DOTALL | re.MULTILINE)
    exports = [
        "#ifndef SIZES_ONLY",
        *(
            f"SKETCHSSM_KERNEL({name})"
            for name in re.findall(r'extern "C" __global__ [^;{]*?(\w+)\([^()]*\) \{', code)
        ),
        "#endif",
        *(f"SKETCHSSM_VARIABLE({name})" for name in re.findall(r'extern "C" __device__ \w+ (\w+) =', code)),
    ]
    # names of their own: shared memory of inline functions could not lie in one section with the kernels' otherwise
    return "\n".join([*(f'#include "{header}"' for header in HEADERS), "namespace {", code, "}", *exports])


def compile_library(code, constants=()):
    """Compile a source (headers in place) with ``-D`` options; returns the shared library's path."""
    options = [*OPTIONS, *(SANITIZERS if os.environ.get(SANITIZE) else ())]
    # after the precompiled header: g++ rejects one that has seen a name which the command line defines
    defines = ["#define " + option.removeprefix("-D").replace("=", " ", 1) for option in constants]
    source = "\n".join([f'#include "{precompiled(options)}"', *defines, host_source(code)])
    return built(["g++", *options, "-shared"], source, ".cpp", ".so")


def precompiled(options):
    """A header like ``device.h``, whose text g++ need not read again."""
    include = f'#include "{HERE / "device.h"}"\n'
    with _precompiling:  # kernels are compiled by several threads
        header = built(["g++", *options, "-x", "c++-header"], include, ".h", ".h.gch").with_suffix("")
    if not header.exists():  # g++ reads it where the binary is another compiler's
        header.write_text(include)
    return header


def built(command, source, suffix, result):
    """What g++ makes of a source."""

    def make(folder, output):
        unit = folder / f"unit{suffix}"
        unit.write_text(source)
        # g++ itself needs no sanitizer, whatever this process was started with
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        run = [*command, str(unit), "-o", str(output)]
        done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError(done.stderr)

    return cached([*command, source, *(header.read_text() for header in HEADERS)], result, make)


def cached(key, suffix, make):
    """Path of a file named after its key, the texts it depends on; ``make(folder, path)`` makes it if it is new."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sketchssm" / "host-kernels"
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()
    target = folder / f"{digest[:32]}{suffix}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        output = Path(scratch) / f"unit{suffix}"
        make(Path(scratch), output)
        output.replace(target)  # at once, as others may be compiling the same
    return target
