"""Decode systems, and where the engines of each are. Engines are imported on first use, which keeps imports cheap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

BACKENDS = ("reference", "cpu", "cuda")


@dataclass(frozen=True)
class System:
    """A decode system: its name, and ``"module:name"`` of its engine on each backend that has one."""

    name: str
    engines: Mapping[str, str]

    def engine(self, backend: str) -> Any:
        """The class of the engine on a backend; see `sketchssm.heads.engine.Engine`."""
        module, _, name = self.engines[backend].partition(":")
        return getattr(import_module(module), name)


def _exact(name: str, cuda: str) -> System:
    engine = f"{name.capitalize()}Engine"
    modules = {"reference": "sketchssm.reference.engines", "cpu": f"sketchssm.cpu.{name}", "cuda": cuda}
    return System(name, {backend: f"{module}:{engine}" for backend, module in modules.items()})


STANDARD = _exact("standard", "sketchssm.cuda.standard")
REPLAY = _exact("replay", "sketchssm.cuda.window")
SKETCH = _exact("sketch", "sketchssm.cuda.window")
