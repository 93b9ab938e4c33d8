"""Heads that a soak drives: every system and kind, ranks of both sorts, clocks, codes."""

from typing import NamedTuple

import numpy as np
from decode_systems import head_of
from samples import LAYERS, plan_of

from sketchssm.layer.formats import SketchFormat
from sketchssm.layer.recurrence import FULL_STATE, Layer
from soak.devices import Device
from soak.places import Host
from soak.server import Server

WINDOW = 8

# Errors relative to the norms of what an output is made of, for exact heads and for sketched ones. Float64: a hundred
# operations of 2^-53 each, and a condition number of 50 at most (1 over the ridge of 0.02). Float32: the same of 2^-24
# over some ten tokens. On a device split operands leave 2^-16 out of a sketch's products.
TOLERANCE = {"reference": (1e-14, 1e-13), "cpu": (5e-7, 2e-6), "cuda": (2e-7, 2e-5)}

CODED = {"int8": 2.5e-3}
"""The same for sketches in codes. Float32 may compute the neighbour of the oracle's code.

The neighbour is off by 1/127 of its vector's largest number, and an output sums many numbers: measured up to 8.9e-4.
On `cpu` neighbours are rare, so 99% of the outputs keep to `TOLERANCE`. On a
device split operands make neighbours common. The reference computes the oracle's codes.
"""

RESIDUAL = {"reference": (4e-12, 1e-13), "cpu": (0.1, 5e-5), "cuda": (0.1, 1.5e-2)}
"""The same for residuals, then for 99% of the outputs. Float64: a hundred operations, and columns of an adapted basis
of which 3e-3 (`PIVOT_TOLERANCE`) or more is new. A sum in float32 may fall into the neighbouring code, or round
a scale of many codes to its neighbour in bf16. Of 360,000 outputs on `cpu`, 99% were off by less than 5e-7 and one by
2.9e-2 (with sketches in int8: 2.7e-5). A device rounds what a sketch leaves to bf16 and finds other columns of the
same span: of 8,000 outputs 99% were off by less than 1e-2, and one by 2.3e-2. Without their residuals a tenth of the
reads would be off by more than 0.03 to 0.08.
"""

ROUNDED = 2.0**-9
"""The same for states in bf16, as float32 and float64 may round a number of a small state to either side, and for
full-state heads' shadows, of which the oracle knows nothing.
"""

# the kernels of a device take these shapes
DEVICE_LAYERS = {
    "mamba2": Layer("mamba2", 4, 64, 80, 2),
    "gdn": Layer("gdn", 4, 64, 64, 2),
    "kda": Layer("kda", 4, 64, 64, 4),
}


class Case(NamedTuple):
    """One head: a system, a kind of layer, where its clock begins, the slot that means padding, formats, residuals."""

    system: str
    kind: str
    phase: int | None = None
    pad_slot: int = -1
    state_dtype: str = "float32"
    sketch_dtype: str = "float32"
    residual: bool = False

    def __str__(self):
        clock = "" if self.phase is None else f"-clock{self.phase}"
        padding = "" if self.pad_slot == -1 else f"-pad{self.pad_slot}"
        state = "" if self.state_dtype == "float32" else "-bf16"
        form = "" if self.sketch_dtype == "float32" else f"-{self.sketch_dtype}"
        residual = "-residual" if self.residual else ""
        return f"{self.system}-{self.kind}{clock}{padding}{state}{form}{residual}"


CASES = [
    Case("sketch", "gdn", 3), Case("sketch", "mamba2"), Case("sketch", "kda", 0, 0), Case("replay", "kda", 7),
    Case("replay", "gdn"), Case("standard", "gdn"), Case("standard", "mamba2", None, 99),
    Case("sketch", "gdn", 5, -1, "bfloat16"), Case("standard", "kda", None, -1, "bfloat16"),
    Case("sketch", "kda", sketch_dtype="int8"), Case("sketch", "kda", None, 0, "bfloat16"),
    Case("sketch", "mamba2", 2, -1, "bfloat16"), Case("sketch", "gdn", 1, residual=True),
    Case("sketch", "mamba2", sketch_dtype="int8", residual=True),
    Case("sketch", "kda", 6, 0, "bfloat16", "int8", residual=True),
]  # fmt: skip


def plan_for(layer, case):
    """A plan with exact and sketched heads."""
    settings = {"ridge": 0.02, "window": WINDOW, "sketch_dtype": case.sketch_dtype}
    if case.residual:
        settings |= {"map": "subspace", "residual_bits": [0, 2, 3, 0]}
    return plan_of(np.random.default_rng(7), layer, [FULL_STATE, 2, 3, FULL_STATE], **settings)


def server(backend, case, requests, seed, slots=64, mean_length=12.0, graphs=False):
    """A server of one case; with graphs, its steps on a device are captured once and replayed."""
    layer: Layer = (DEVICE_LAYERS if backend == "cuda" else LAYERS)[case.kind]
    plan = plan_for(layer, case)
    settings = {"pad_slot": case.pad_slot}
    if backend == "cuda":
        settings |= {"activation_dtype": "bfloat16", "output_dtype": "float32"}
    settings |= {} if case.state_dtype == "float32" else {"state_dtype": case.state_dtype}
    settings |= {"drafts": 4} if case.system == "standard" else {"phase": case.phase}

    def make(slots, memory):
        own = settings if memory is None else settings | {"memory": memory}
        return head_of(case.system, plan, slots, backend, **own)

    place = Device(make, slots, graphs) if backend == "cuda" else Host(make, slots)
    exact, sketched = TOLERANCE[backend]
    usual, shadows = sketched, SketchFormat.of(case.sketch_dtype).shadows(case.state_dtype)
    if case.state_dtype == "bfloat16" and backend != "reference":
        exact = sketched = usual = ROUNDED
    if case.sketch_dtype in CODED and backend != "reference":
        sketched = CODED[case.sketch_dtype]
        usual = sketched if backend == "cuda" else usual
    if case.residual:
        sketched, own = RESIDUAL[backend]
        usual = max(usual, own)
    full = ROUNDED if shadows and backend != "reference" else exact
    allowed = exact, full, sketched, usual
    sketches = plan if case.system == "sketch" else None
    return Server(place, layer, requests, seed, allowed, sketches, case.phase, mean_length, case.state_dtype)
