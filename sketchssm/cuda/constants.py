"""Numbers that host and kernels share: the kernels include them as ``constants.cuh``, which `header` writes."""

from __future__ import annotations

from sketchssm.cuda.kernel_parameters import macros
from sketchssm.layer import slots

TYPES = {"bfloat16": 0, "float16": 1, "float32": 2, "int8": 3}
"""Types of elements; int8 are codes of sketches."""

MAPS = {"factors": 0, "dense": 1, "none": 2, "subspace": 3}
"""Storage of maps; "none" if no head has a sketch. "subspace" tells the flush kernel that sketches have a basis of
their own, in dense storage."""

STEP, FOLD, LOAD, DRAFT = 0, 1, 2, 3
"""Modes of the flush kernel: a step's due rows; fold only; sketch only; rows that must fold before a draft."""

WIDE, COUNTED = 1, 2
"""Flags of a call's integers: each has 8 bytes instead of 4; of slots: rows that are left out are counted."""

MAX_ROWS = 512
"""Rows of a launch."""

STANDARD_WARPS = 4
"""Largest number of warps of a block of standard decode."""

ACCESS = 16
"""Bytes that kernels load and store at once, except scalars per head: arrays, slots and parts of slots begin at a
multiple."""

MOST_STRIDE = 2**31 - 1
"""Largest stride of the kernels, in bytes."""

ALIGN = 128
"""Bytes: each head's packed sketch is padded to a multiple; ``cuda_src/slot/sketch_layout.cuh`` says why."""

KERNEL_PIVOTS = 8
"""Most pivots of a map."""

MAX_RANK = 16
"""Largest rank of a head with a sketch."""

WINDOWS = (4, 8, 16, 32)
"""Tokens from one flush to the next."""

STATIC_SHARED = 128
"""Bytes reserved for statically declared shared memory, of which kernels use at most 96."""

_ELEMENTS = {"bfloat16": "BF16", "float16": "FP16", "float32": "FP32", "int8": "INT8"}


def header() -> str:
    """Text of the header, with the kernels' parameters.

    Forms of maps are macros, because conditions of the preprocessor have no constants.
    """
    numbers = {_ELEMENTS[name]: number for name, number in TYPES.items()}
    numbers |= {"STEP": STEP, "FOLD": FOLD, "LOAD": LOAD, "DRAFT": DRAFT, "WIDE": WIDE, "COUNTED": COUNTED}
    numbers |= {"MAX_ROWS": MAX_ROWS, "STANDARD_WARPS": STANDARD_WARPS, "ALIGN": ALIGN}
    numbers |= {"KERNEL_PIVOTS": KERNEL_PIVOTS, "STATIC_SHARED": STATIC_SHARED, "MAX_RANK": MAX_RANK}
    numbers |= {"POSITION": slots.POSITION, "DUE": slots.DUE, "EXACT": slots.EXACT}
    numbers |= {"LEAST_SAMPLES": slots.LEAST_SAMPLES}
    numbers |= {"DRAFTED_SHIFT": slots.DRAFTED_SHIFT, "MAX_DRAFTS": slots.MAX_DRAFTS}
    forms = [f"#define {name.upper()} {number}" for name, number in MAPS.items()]
    return "\n".join([*forms, *macros(), *(f"constexpr int {name} = {number};" for name, number in numbers.items())])
