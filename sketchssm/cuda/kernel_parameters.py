"""Parameters of the kernels that vary from launch to launch; the kernels include them as macros.

A launch passes their values in this order. ``_direct.cpp`` sets them by name.
"""

from __future__ import annotations

from typing import NamedTuple


class Parameters(NamedTuple):
    """Types in C++, and names."""

    types: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def letters(self) -> str:
        """Types as `sketchssm.cuda.launch.Launcher` takes them."""
        return "".join("Q" if name.endswith("*") else {"int": "i", "i64": "q"}[name] for name in self.types)

    @property
    def text(self) -> str:
        """The list in C++."""
        return ", ".join(f"{kind} {name}" for kind, name in zip(self.types, self.names, strict=True))

    def given(self, **others: str) -> tuple[str, ...]:
        """Names, some of them replaced."""
        return tuple(others.get(name, name) for name in self.names)


def _parameters(*parts: str | Parameters) -> Parameters:
    """Parameters from declarations ``type name name ...`` and from others."""
    types: list[str] = []
    names: list[str] = []
    for part in parts:
        if isinstance(part, Parameters):
            own, more = part
        else:
            kind, _, rest = part.replace("const ", "const_").partition(" ")
            more = tuple(rest.split())
            own = (kind.replace("const_", "const "),) * len(more)
        types += own
        names += more
    return Parameters(tuple(types), tuple(names))


_STRIDES = "int q_stride k_stride v_stride g_stride beta_stride out_stride"
INPUTS = _parameters("const act_t* q k v", "const gate_t* g", "const float* beta", "out_t* out", _STRIDES)
"""Inputs and outputs of a token of each row, and bytes from row to row."""

TOKEN_STEPS = _parameters("int q_step k_step v_step g_step beta_step")
"""Bytes from token to token, for kernels that take several."""

SLOTS = _parameters("const void* slot_numbers", "int slot_flags scan_from scan_to")
LENGTHS = _parameters("const void* lengths", "int length_flags")
ACCEPTED = _parameters("const void* accepted", "int accepted_flags")

KERNELS = {
    "read_step": _parameters(INPUTS, SLOTS, "int batch", "Schedule* schedule"),
    "flush_step": _parameters(INPUTS, SLOTS, "int batch ticks draft_tokens", LENGTHS, "Schedule* schedule"),
    "encode_states": _parameters("int batch", "Schedule* schedule"),
    "read_draft": _parameters(INPUTS, TOKEN_STEPS, SLOTS, "int batch ticks tokens", LENGTHS),
    "standard_step": _parameters(INPUTS, TOKEN_STEPS, SLOTS, "int batch tokens"),
    "standard_draft": _parameters(INPUTS, TOKEN_STEPS, SLOTS, "int batch tokens", LENGTHS),
    "standard_commit": _parameters(SLOTS, "int batch", ACCEPTED),
    "commit": _parameters(SLOTS, ACCEPTED, "int batch"),
    "set_slots": _parameters("const uint4* rows", "i64 row_stride", "int size", SLOTS, "int shares"),
    "check_pairs": _parameters("const void* sources", "int source_flags", SLOTS, "int count", "int2* pairs"),
    "copy_slots": _parameters("const int2* pairs", "int count units"),
    "rejoin": _parameters(SLOTS, "int count"),
}


def macros() -> list[str]:
    """Lines of the kernels' header: the list of a kernel's parameters is ``READ_STEP_PARAMETERS`` and so on."""
    return [f"#define {name.upper()}_PARAMETERS {kernel.text}" for name, kernel in KERNELS.items()]
