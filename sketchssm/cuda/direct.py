"""Steps of PyTorch tensors in one call of C++, from the arguments to the launches.

Most of a step's host time in Python is spent on the properties of tensors. ``_direct.cpp`` reads them in less than a
microsecond, for arguments that the kernels can use in place. All other calls go through Python, and so does the first
call for each number of rows and each stream.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from sketchssm.cuda.arrays import DeviceArrays
from sketchssm.cuda.frameworks import TorchArrays
from sketchssm.cuda.launch import Launcher, driver_addresses
from sketchssm.cuda.workspaces import PER_THREAD, WORDS
from sketchssm.layer.recurrence import Layer

CODES = {"bfloat16": (4, 16), "float16": (2, 16), "float32": (2, 32)}
"""DLPack's codes of types, and their bits."""

MOST_ROWS = 1 << 16
"""Most rows of a direct step, as in ``_direct.cpp``."""


class DirectStep:
    """Direct steps of one engine, one token each, once the types of its arrays are settled.

    Each launch of a step, in order, has a name for every argument that varies, from ``NAMES`` in ``_direct.cpp``.
    """

    def __init__(
        self,
        arrays: DeviceArrays,
        layer: Layer,
        launches: Sequence[tuple[Launcher, tuple[str, ...]]],
        capacity: int,
    ) -> None:
        self._arrays, self._layer, self._launches, self._capacity = arrays, layer, launches, capacity
        self._step: Any = None
        self._made = False

    def learn(self, rows: int, grids: list[tuple[int, int]], workspace: int) -> None:
        """Let later calls like the present call go through C++, if the arrays are PyTorch's.

        `grids` has blocks and threads of each launch, `workspace` is the address of the stream's.
        """
        torch = self._arrays.torch
        stream = PER_THREAD if torch is None else torch.stream_address()
        if torch is None or stream == PER_THREAD or rows > MOST_ROWS:
            return
        if not self._made:
            self._made = True
            self._step = self._make(torch)
        if self._step is not None:
            self._step.set_grids(rows, grids)
            self._step.set_workspace(stream, workspace)
            self._arrays.direct = self._step.step

    def _make(self, torch: TorchArrays) -> Any:
        """Make the extension's object; None if it is not built or old, or PyTorch has no C interface for tensors."""
        try:
            from sketchssm.cuda._direct import Step
        except ImportError:
            return None
        if torch.exchange is None:
            return None
        slots = self._arrays.all_slots(self._capacity, self._capacity).address, self._capacity
        try:
            return Step(
                exchange=torch.exchange,
                tensor_type=torch.kind,
                device=torch.dlpack_device,
                driver=driver_addresses(),
                arrays=[self._described(name) for name in ("q", "k", "v", "g", "beta", "out")],
                kernels=[launcher.places(names) for launcher, names in self._launches],
                slots=slots,
                grad_enabled=torch.grad_enabled,
                failed=_thrower([launcher for launcher, _ in self._launches]),
            )
        except (TypeError, ValueError) as error:  # other parameters, or another version of DLPack
            warnings.warn(
                f"sketchssm.cuda._direct was built from other sources, or for another PyTorch ({error}), so steps go "
                "through Python; build it again with pip install -e .",
                RuntimeWarning,
                stacklevel=2,
            )
            return None

    def _described(self, name: str) -> tuple[int, int, tuple[int, ...]] | None:
        """Type code, bits and shape of an argument's rows; None if the layer has no such argument."""
        shape = self._layer.token_shapes().get("v" if name == "out" else name)
        return None if shape is None else (*CODES[self._arrays.type_of(name)], tuple(shape))


def _thrower(launchers: list[Launcher]) -> Callable[[int, int, int, int], None]:
    """A function that raises the error of a launch, without a reference cycle through the `DirectStep`."""

    def throw(index: int, status: int, stream: int, workspace: int) -> None:
        try:
            if workspace:  # the next flush must not take the rows that this read has listed
                import cupy

                cupy.cuda.runtime.memsetAsync(workspace, 0, 4 * WORDS, stream)
        finally:  # also if the device takes no more work
            raise launchers[index].error(status)

    return throw
