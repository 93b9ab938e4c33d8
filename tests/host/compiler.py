"""Compile CUDA sources for the host with g++ and keep the results between runs, for all clones of the repository."""

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
"""Environment variable that compiles kernels with AddressSanitizer and UndefinedBehaviorSanitizer."""

OPTIONS = (
    *("-std=c++20", "-Og", "-fPIC"),  # -Og halves the compile time of -O1; kernels run 15% longer
    # as in nvcc any type may alias another; the host fuses no products and sums
    *("-fno-strict-aliasing", "-ffp-contract=off"),
    "-fvisibility=hidden",  # variants export the same names
    "-fmax-errors=5",
    "-w",  # nvcc gives the warnings
)
SANITIZERS = (
    "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fsanitize-sections=shared_memory",
)  # fmt: skip


_precompiling = threading.Lock()  # of what all libraries share: threads compile several at once


class CompileError(Exception):
    """Errors of a compiler."""


def missing():
    """A message about missing tools, or an empty string."""
    if importlib.util.find_spec("sketchssm._cuda_host") is None:
        return "the extension is not built: SKETCHSSM_BUILD_HOST_KERNELS=1 pip install -e ."
    return "" if shutil.which("g++") else "g++ is not installed"


def sanitizer_libraries():
    """Libraries that a program built without sanitizers must preload; empty where g++ has none."""
    paths = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return " ".join(paths) if all(map(os.path.isabs, paths)) else ""


def host_source(code):
    """A kernel's source with its headers inserted, converted for g++."""
    # host C++ has no arrays of unknown size: use a pointer
    code = re.sub(
        r"extern __shared__ ([^;]*?)(\w+)\[\];",
        lambda m: f"{m[1]}* const {m[2]} = reinterpret_cast<{m[1]}*>(host::dynamic_shared);",
        code,
    )
    # tests/host/ptx.cuh replaces the file with device instructions
    code = re.sub(r'#line 1 "lib/ptx\.cuh"\n.*?(?=^#line )', "", code, flags=re.DOTALL | re.MULTILINE)
    exports = [
        "#ifndef SIZES_ONLY",
        *(
            f"SKETCHSSM_KERNEL({name})"
            for name in re.findall(r'extern "C" __global__ [^;{]*?(\w+)\([^()]*\) \{', code)
        ),
        "#endif",
        *(f"SKETCHSSM_VARIABLE({name})" for name in re.findall(r'extern "C" __device__ \w+ (\w+) =', code)),
    ]
    # the namespace gives inline functions internal linkage: g++ puts their shared memory into the kernels' section
    return "\n".join([*(f'#include "{header.name}"' for header in HEADERS), "namespace {", code, "}", *exports])


def compile_library(code, constants=()):
    """Compile a source with ``-D`` options; returns the path of the shared library."""
    options = [*OPTIONS, *(SANITIZERS if os.environ.get(SANITIZE) else ())]
    # not on the command line: g++ rejects a precompiled header that contains a name defined there
    defines = ["#define " + option.removeprefix("-D").replace("=", " ", 1) for option in constants]
    source = "\n".join([f'#include "{precompiled(options)}"', *defines, host_source(code)])
    return built(["g++", *options, "-shared", *runtime(options)], source, ".cpp", ".so")


def runtime(options):
    """Paths of what every library contains, compiled once and with optimisation."""
    quick = ["g++", *("-O2" if option == "-Og" else option for option in options), "-c"]
    sources = "scheduler.cpp", "copies.cpp", "fragments.cpp"
    with _precompiling:
        return [str(built(quick, (HERE / name).read_text(), ".cpp", ".o")) for name in sources]


def precompiled(options):
    """A precompiled ``device.h``."""
    include = '#include "device.h"\n'
    with _precompiling:
        header = built(["g++", *options, "-x", "c++-header"], include, ".h", ".h.gch").with_suffix("")
    if not header.exists():  # g++ reads this text if another compiler made the binary
        header.write_text(include)
    return header


def built(command, source, suffix, result):
    """The output of g++ for a source."""

    def make(folder, output):
        unit = folder / f"unit{suffix}"
        unit.write_text(source)
        # this process may preload sanitizers, which g++ must not load
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        run = [*command, "-I", str(HERE), str(unit), "-o", str(output)]  # the digest has the headers, not their place
        done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError(done.stderr)

    return cached([*command, source, *(header.read_text() for header in HEADERS)], result, make)


def cached(key, suffix, make):
    """Path of a cached file. Its name is a digest of ``key``; a missing file is made by ``make(folder, path)``."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sketchssm" / "host-kernels"
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()
    target = folder / f"{digest[:32]}{suffix}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        output = Path(scratch) / f"unit{suffix}"
        make(Path(scratch), output)
        output.replace(target)  # atomic, as other processes may compile the same source
    return target
