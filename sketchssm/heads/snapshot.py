"""Snapshots: contents of some slots of a head on the host, as arrays and as a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sketchssm.layer.formats import FORMATS
from sketchssm.layer.slots import EXACT
from sketchssm.plans.files import FileFormat, FileFormatError, Stored, check_array

if TYPE_CHECKING:
    from sketchssm.arrays.gates import GateInput


class SnapshotFileError(FileFormatError):
    """A snapshot file that can't be used: damaged, not a snapshot, of another version, or inconsistent."""


OWNER = {"window": int, "layer": dict, "parts": list, "plan": str | None, "gate": str | None}
"""Fields of an owner that are no words, and their types in JSON."""

FORMAT = FileFormat("sketchssm-snapshot", 2, (), SnapshotFileError, "take the snapshot again")
"""Raise the version whenever a backend changes the layout of a part."""


@dataclass(frozen=True, eq=False)
class Snapshot(Stored):
    """Contents of some slots of a head, from `ExactHead.snapshot`; `ExactHead.restore` puts them into slots again.

    Parameters
    ----------
    arrays : dict of str to ndarray
        Each part of the slots by name, ``(count, *shape)``; bfloat16 as uint16 bits. The cursors are the window
        positions, and those of a monitor's head also tell which slots are read exactly.
    owner : dict
        The head of the arrays: system, backend, layer, window, plan (the plan's fingerprint), gate, type of the
        states, and parts; of a `SketchHead` also the sketch's format and, if it has one, the monitor.
    """

    FORMAT = FORMAT

    arrays: dict[str, npt.NDArray[Any]]
    owner: dict[str, Any]

    def __len__(self) -> int:
        """Number of slots."""
        return next(iter(self.arrays.values())).shape[0]

    def __repr__(self) -> str:
        """Slots, system and bytes in one line."""
        size = sum(array.nbytes for array in self.arrays.values())
        return f"Snapshot({len(self)} slots of {self.owner['system']} on {self.owner['backend']}, {size} bytes)"

    def _contents(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        return self.arrays, {"owner": self.owner}

    @classmethod
    def _build(cls, tensors: dict[str, npt.NDArray[Any]], owner: dict[str, Any]) -> Snapshot:
        for name, kind in (dict.fromkeys(("system", "backend", "state_dtype"), str) | OWNER).items():
            if not isinstance(owner.get(name, ...), kind):
                raise ValueError(f"owner: expected {name} of type {kind}, got {owner.get(name)!r}")
        known = {"flush_every": (owner["window"],), "deferred": (False,), "sketch_dtype": FORMATS}
        for name, values in known.items():
            if name in owner and owner[name] not in values:
                raise ValueError(f"{name}: this version does not have {owner[name]!r}; take a snapshot without it")
        names = [name for name, *_ in owner["parts"]]
        if sorted(names) != sorted(tensors):
            raise ValueError(f"expected the tensors {', '.join(names)}, got {', '.join(tensors)}")
        snapshot = cls({name: tensors[name] for name in names}, owner)
        snapshot._check_arrays()
        return snapshot

    def _check_arrays(self) -> None:
        """Check the arrays against the owner's parts."""
        for name, shape, dtype in self.owner["parts"]:
            stored = "uint16" if dtype == "bfloat16" else dtype
            check_array(name, self.arrays[name], (len(self), *shape), stored)
        cursor = self.arrays.get("cursor", np.zeros(1, np.int32))
        if "monitor" in self.owner:
            cursor = cursor & ~EXACT
        last = self.owner["window"] - 1
        wrong = cursor[(cursor < 0) | (cursor > last)]
        if wrong.size:
            raise ValueError(f"cursor: expected positions from 0 to {last}, got {wrong[0]}")

    def check(self, owner: Mapping[str, Any]) -> None:
        """Check that the snapshot fits a head.

        Parameters
        ----------
        owner : mapping
            The head's; ValueError if it is not the snapshot's, or the arrays do not fit its parts.
        """
        for name, want in owner.items():
            if self.owner.get(name) != want:
                came: Any = self.owner.get(name)
                if name == "parts":  # such as the errors of a monitor
                    want, came = [x for x in want if x not in came], [x for x in came if x not in want]
                    name = "parts, of those that differ,"
                raise ValueError(f"snapshot: expected {name} {json.dumps(want)}, got {json.dumps(came)}")
        self._check_arrays()


def gate_digest(gate: GateInput) -> str:
    """SHA-256 of a gate's parameters."""
    bound = np.array([0.0 if gate.lower_bound is None else gate.lower_bound])
    return sha256(b"".join(x.tobytes() for x in (gate.A_log, gate.dt_bias, bound))).hexdigest()
