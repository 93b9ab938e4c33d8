"""Kernels compile for the supported architectures and spill few registers. Needs nvcc, no GPU.

With ``SKETCHSSM_ALL_ARCHITECTURES=1``, as in .ci/run, every variant is compiled for every architecture. Otherwise some
variants of every kernel are compiled for sm_90.
"""

import functools
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from gpu.cuda_pairs import ReplayEngine, SketchEngine, StandardEngine
from gpu.cuda_support import make_plan, thorough
from host import compiler, standin
from samples import gate_of, plan_of

from sketchssm.cuda.calibrate import CALIBRATE
from sketchssm.cuda.layer_kernels import layer_inputs_variant
from sketchssm.cuda.modules import source_text
from sketchssm.cuda.reads import draft_variant
from sketchssm.cuda.slots import COMMIT, COPY, SLOTS
from sketchssm.cuda.standard import standard_draft_variant
from sketchssm.cuda.workspaces import WORDS
from sketchssm.layer.recurrence import FULL_STATE, Layer
from sketchssm.study.bench import SHAPES

TARGETS = {
    (90,): ("-gencode=arch=compute_90,code=sm_90",),
    # nvcc's front end takes long, so sm_90 and sm_100 share its output: the sources treat them alike
    (80, 90, 100): ("-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=[sm_90,sm_100]"),
}
"""nvcc's options by architectures."""

# Limits on spilt bytes per thread. Kernels use as many registers as their residency allows. Spills cost time, as
# shared memory leaves little first-level cache, but most spills are in the one warp that finishes dense maps.
# The most measured is 308, for kda's dense map on sm_90; for reads 56 and for draft reads 216, where some heads read
# their full states.
SPILL_BYTES = {
    "standard": 8, "read": 56, "read_draft": 216, "standard_draft": 8, "flush": 320, "encode": 8, "slots": 0,
    "commit": 0, "copy": 0, "layer_inputs": 0, "calibrate": 0,
}  # fmt: skip
# With twice the pivots of the other shapes: 444 bytes on sm_80. With five blocks on a multiprocessor, which were
# faster than four with more registers on sm_90: 48 bytes there, 160 on sm_100.
SPILL_OF_VARIANTS = {"kimi-linear-pivots-flush": 444, "kimi-linear-replay-read": 160}

TILES = "nemotron-h-56b", "zamba2-1.2b", "falcon-h1-34b", "ring-linear", "olmo-hybrid-7b"
"""Shipped shapes with other tiles than those of `MAPS`."""
LAYERS = {
    "small": Layer("kda", 4, 64, 96, 2),
    "gla": Layer("gla", 16, 128, 128, 16),
}
MAPS = {
    "nemotron-3-super": ("ridge", "lowrank"), "nemotron-nano-9b-v2": ("lowrank",),
    "qwen3-next": ("ridge", "lowrank"), "kimi-linear": ("ridge", "lowrank"), "gla": ("lowrank",),
    **dict.fromkeys(TILES, ("ridge",)),
}  # fmt: skip
LAYERS |= {name: SHAPES[name] for name in MAPS if name not in LAYERS}


EVERYTHING = os.environ.get("SKETCHSSM_ALL_ARCHITECTURES") == "1"
ALWAYS = (
    *("qwen3-next-ridge", "kimi-linear-lowrank", "kimi-linear-residual", "nemotron-3-super-lowrank"),
    *("qwen3-next-standard", "kimi-linear-pivots-flush", "any"),
)
"""How names begin whose variants are compiled without `EVERYTHING` too: each operation, kind and storage of a map."""


def architectures(name):
    """Architectures that a variant is compiled for."""
    return (80, 90, 100) if EVERYTHING else (90,)


def variants():
    """Variants by name: all shipped tiles and all maps; every window and activation type once."""
    rng = np.random.default_rng(0)
    engines = {name: StandardEngine(layer, 1) for name, layer in LAYERS.items()}
    for name, kinds in MAPS.items():
        layer = LAYERS[name]
        ranks = np.resize([7, 1, 16, 3, FULL_STATE], layer.heads)
        engines |= {f"{name}-{kind}": SketchEngine(make_plan(layer, ranks, rng, map=kind), 1) for kind in kinds}
        if len(kinds) > 1:
            engines[f"{name}-replay"] = ReplayEngine(layer, 1, 16)
    layer = LAYERS["kimi-linear"]
    for name, bound in (("raw", None), ("bounded", -5.0)):
        gate, plan = (
            gate_of(rng, layer, bound),
            make_plan(layer, np.resize([7, 1, 16, 3, FULL_STATE], layer.heads), rng),
        )
        engines |= {
            f"kimi-linear-{name}": StandardEngine(layer, 1, gate=gate),
            f"kimi-linear-{name}-lowrank": SketchEngine(plan, 1, gate=gate),
        }
    for window, activation in ((4, "bfloat16"), (8, "float16"), (32, "float32")):
        plan = make_plan(LAYERS["small"], [16, 2, 9, FULL_STATE], rng, window=window, pivots=8)
        engines[f"small-{window}-{activation}"] = SketchEngine(plan, 1, "float32", activation_dtype=activation)
    # scalar decays with reads token by token, and the most pivots
    for name, of, window, activation, pivots in (
        ("nemotron-3-super-half", "nemotron-3-super", 16, "float16", 4),
        ("qwen3-next-long", "qwen3-next", 32, "bfloat16", 4),
        ("kimi-linear-pivots", "kimi-linear", 16, "bfloat16", 8),
    ):
        ranks = np.resize([7, 1, 16, 3], LAYERS[of].heads)
        plan = make_plan(LAYERS[of], ranks, rng, window=window, pivots=pivots)
        engines[name] = SketchEngine(plan, 1, activation_dtype=activation)
    for name in ("nemotron-3-super", "qwen3-next", "kimi-linear"):
        layer, stored = LAYERS[name], {"state_dtype": "bfloat16"}
        plan = make_plan(layer, np.resize([7, 1, 16, 3, FULL_STATE], layer.heads), rng)
        engines |= {
            f"{name}-bf16-states": StandardEngine(layer, 1, **stored),
            f"{name}-bf16-states-lowrank": SketchEngine(plan, 1, **stored),
        }
    for name, kind in (("nemotron-3-super", "ridge"), ("qwen3-next", "ridge"), ("kimi-linear", "lowrank")):
        plan = make_plan(LAYERS[name], np.resize([7, 1, 16, 3], LAYERS[name].heads), rng, map=kind)
        engines[f"{name}-int8"] = SketchEngine(plan, 1, "int8")
    for name in ("nemotron-3-super", "qwen3-next", "kimi-linear", *TILES):
        bits = np.resize([2, 1, 3], LAYERS[name].heads)
        plan = plan_of(rng, LAYERS[name], np.resize([4, 1, 8], bits.size), "subspace", residual_bits=bits)
        engines[f"{name}-residual"] = SketchEngine(plan, 1, "int8")
    layer, stored = LAYERS["qwen3-next"], {"state_dtype": "float16"}
    plan = make_plan(layer, np.resize([7, 1, 16, 3], layer.heads), rng, map="ridge")
    engines |= {
        "qwen3-next-fp16-states": StandardEngine(layer, 1, **stored),
        "qwen3-next-fp16-states-replay": ReplayEngine(layer, 1, 16, **stored),
        "qwen3-next-fp16-states-ridge": SketchEngine(plan, 1, **stored),
        "qwen3-next-monitor": SketchEngine(plan, 1, monitor=2),
        "qwen3-next-tolerance": SketchEngine(plan, 1, monitor=2, tolerance=0.01),
    }
    chosen = {f"{name}-{v.operation}": v for name, engine in engines.items() for v in engine.variants()}
    drafts = {f"{name}_draft": draft_variant(v) for name, v in chosen.items() if v.operation == "read"}
    for name, v in chosen.items():
        if v.operation == "standard":
            drafts[f"{name}_draft"] = standard_draft_variant(v, 4)
    types = "bfloat16", "bfloat16", "float32", "bfloat16"
    shared = {"slots": SLOTS, "copy": COPY, "commit": COMMIT, "calibrate": CALIBRATE}
    shared["layer_inputs"] = layer_inputs_variant(128, 80, types)
    return chosen | drafts | {f"any-{name}": variant for name, variant in shared.items()}


@pytest.fixture(scope="module")
def chosen():
    """The variants that engines would load; skips without nvcc."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc, the CUDA compiler, is not installed")
    with pytest.MonkeyPatch.context() as patch:
        standin.install(patch)
        return variants()


@functools.cache
def version():
    """The version that nvcc reports."""
    return subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout


def nvcc(source, suffix, *options):
    """What nvcc writes: its log for ``.log``, else PTX. Kept between runs."""
    options = ("-std=c++17", "-ftz=true", *options)  # -ftz: as CuPy does

    def make(folder, output):
        unit = folder / "unit.cu"
        unit.write_text(source)
        command = ["nvcc", *options, str(unit), "-o", str(folder / "unit.fatbin" if suffix == ".log" else output)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise compiler.CompileError(done.stderr)
        if suffix == ".log":
            output.write_text(done.stderr)

    return compiler.cached([version(), *options, source], suffix, make).read_text()


def ptx(source, *options):
    """PTX for sm_90."""
    return nvcc(source, ".ptx", "-ptx", "-arch=sm_90", *options)


@pytest.fixture(scope="module")
def compiled(chosen):
    """nvcc's log of each variant that is compiled, or its error."""

    def one(work):
        variant, targets = work
        try:
            source = source_text(variant.operation)
            return nvcc(source, ".log", "-fatbin", "-Xptxas=-v", *targets, *variant.options)
        except compiler.CompileError as error:
            return error

    some = {name: variant for name, variant in chosen.items() if EVERYTHING or name.startswith(ALWAYS)}
    works = {name: (variant, TARGETS[architectures(name)]) for name, variant in some.items()}
    distinct = list(set(works.values()))  # some maps share kernels
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        logs = dict(zip(distinct, pool.map(one, distinct), strict=True))
    return {name: logs[work] for name, work in works.items()}


def test_all_variants_compile(compiled):
    failed = {name: log for name, log in compiled.items() if isinstance(log, compiler.CompileError)}
    assert not failed, "\n\n".join(f"{name}:\n{log}" for name, log in failed.items())
    for name, log in compiled.items():
        for sm in architectures(name):
            assert f"for 'sm_{sm}'" in log, name


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        *(
            ("nemotron-3-super-ridge", "-DK=40", "whole operands"),
            ("qwen3-next-ridge", "-DV=24", "whole blocks of rows"),
        ),
        *(
            ("nemotron-3-super-ridge", "-DK=512", "every lane has all"),
            ("kimi-linear-ridge", "-DK=256", "each channel's"),
        ),
    ],
)
def test_other_shapes_do_not_compile(name, sizes, message, chosen):
    variant = chosen[f"{name}-flush"]
    options = [x for x in variant.options if not x.startswith(sizes[: sizes.index("=") + 1])]
    with pytest.raises(compiler.CompileError, match=f"static assertion failed.*{message}"):
        ptx(source_text("flush"), sizes, *options)


@pytest.mark.parametrize("operation", ["standard", "read", "flush", "encode", "read_draft", "standard_draft"])
def test_sources_treat_sm_90_and_sm_100_alike(operation):
    conditions = re.findall(r"^#(?:el)?if (.*__CUDA_ARCH__.*)", source_text(operation), flags=re.MULTILINE)
    assert conditions
    for condition in conditions:
        python = condition.replace("||", "or").replace("&&", "and")
        on_90, on_100 = (eval(python, {"__CUDA_ARCH__": number}) for number in (900, 1000))
        assert on_90 == on_100, condition


def test_pragmas_behind_a_condition_are_in_braces():
    """In a template, nvcc 13.0 drops the statement behind ``if constexpr (false)``, a pragma and a loop otherwise."""
    for path in sorted((Path(__file__).parents[1] / "cuda_src").rglob("*.cu*")):
        assert not re.findall(r"if constexpr \(.*\)\n#pragma", path.read_text()), path


def test_nothing_big_spills(compiled):
    """At the benchmarked shapes."""
    spilt = {}
    for name, log in compiled.items():
        if isinstance(log, str) and not name.startswith("small"):
            spilt[name] = max(int(n) for n in re.findall(r"(\d+) bytes spill", log))
    allowed = {name: SPILL_OF_VARIANTS.get(name, SPILL_BYTES[name.rsplit("-", 1)[1]]) for name in spilt}
    over = {name: (n, allowed[name]) for name, n in spilt.items() if n > allowed[name]}
    assert not over, f"bytes spilt by each thread, and how many may be: {over}"


def test_sizes(chosen):
    """A block that is alone on its multiprocessor has room for two states.

    The kernels' Schedule has the size that the host allocates for it.
    """
    for name, places in (
        ("kimi-linear-ridge-flush", 2),
        ("kimi-linear-lowrank-flush", 2),
        ("kimi-linear-pivots-flush", 2),
        ("qwen3-next-ridge-flush", 1),
    ):
        sizes = 'extern "C" __device__ int places = STATE_STAGES, schedule = sizeof(Schedule);'
        text = ptx(source_text("flush") + sizes, "-DSIZES_ONLY", *chosen[name].options)
        assert f" places = {places};" in text, name
        assert f" schedule = {4 * WORDS};" in text, name


BEFORE_WAIT = {
    # constants (heads), and slots to prefetch cursors for
    "read": r"(ld\.global\.v4\.u32|ld\.volatile\.global\.\w+|prefetch\.global\.L2)",
    "read_draft": r"ld\.global\.v4\.u32",  # constants (heads)
}
"""Accesses that kernels of sketch heads may make while the preceding kernel runs."""


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3-next-standard", "qwen3-next-lowrank-read", "qwen3-next-lowrank-read_draft"),
        *("kimi-linear-lowrank-read", "kimi-linear-lowrank-flush", "qwen3-next-ridge-read"),  # the last reads shadows
        *thorough(
            *(("nemotron-3-super-lowrank-read",), ("qwen3-next-replay-read",), ("qwen3-next-replay-read_draft",)),
            *(("kimi-linear-lowrank-read_draft",), ("qwen3-next-lowrank-flush",)),
        ),
    ],
)
def test_what_is_touched_before_the_wait(name, chosen):
    """Kernels start while the preceding one runs; the compiler must not move other accesses ahead of their wait."""
    options = list(chosen[name].options)
    if "lowrank" in name:  # flushes leave early where no head reads its full state
        heads = next(x for x in options if x.startswith("-DHEADS=")).removeprefix("-DHEADS=")
        options = [x for x in options if not x.startswith(("-DFULL_STATE_HEADS=", "-DSKETCHED_HEADS="))]
        options += ["-DFULL_STATE_HEADS=0", f"-DSKETCHED_HEADS={heads}"]
    text = ptx(source_text(chosen[name].operation), *options)
    lines = text[text.index(".entry") :].splitlines()  # functions that are not inlined stand before the kernel
    waits = [i for i, line in enumerate(lines) if "griddepcontrol.wait" in line]
    touches = [i for i, line in enumerate(lines) if re.search(r"\s(ld|st|atom|red|cp|prefetch)\.[\w.:]*global", line)]
    assert touches
    assert not any("global.nc" in line for line in lines), "takes what others write for constant"
    if "flush" in name:  # once the read has listed all due rows, a flush waits at its end only
        assert "ld.acquire" in lines[touches[0]], lines[touches[0]]
        return
    assert len(waits) == 1
    early = [lines[i].strip() for i in touches if i < waits[0]]
    sketched = "lowrank" in name or "ridge" in name
    allowed = BEFORE_WAIT.get(name.rsplit("-", 1)[1], "nothing") if sketched else "nothing"
    assert not [line for line in early if not re.search(allowed, line)]
