"""Settings of the plugin, and the engines that the plugin refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from sketchssm.arrays.options import check_tolerance
from sketchssm.calibrate.allocation import budget_of
from sketchssm.cuda import WINDOWS
from sketchssm.layer.checks import check_integer, check_number
from sketchssm.layer.recurrence import check_window
from sketchssm.layer.slots import MAX_DRAFTS
from sketchssm.plans.plan import SketchPlan
from sketchssm.serving.plans import load_plans

VARIABLE = "SKETCHSSM_VLLM"
"""Environment variable that switches the plugin on."""

KEY = "sketchssm"
"""Key of vLLM's ``additional_config`` that switches the plugin on."""

SYSTEMS = ("standard", "replay")
"""Words that stand for a system without plans."""

RECORD = "record:"
"""Before the path of a calibration to write."""

SYSTEM_OF = {"window": ("replay", "record"), "phases": ("replay", "sketch"),
             "mean_rank": ("sketch",), "reduction": ("sketch",), "monitor": ("sketch",), "tolerance": ("sketch",),
             "tokens": ("record",), "share": ("record",)}  # fmt: skip
"""Fields that only some systems have."""

WORDS = f"'standard', 'replay' or '{RECORD}FILE'"


@dataclass(frozen=True)
class Settings:
    """Settings of the plugin; wrong values are refused with a TypeError or ValueError."""

    plans: str  # path of plans or a calibration, "standard" or "replay" for exact heads, or "record:FILE"
    window: int = 16  # of "replay", and of a calibration that is recorded; plans have their own windows
    phases: bool = True  # whether heads have clocks: a layer's rows flush together, one layer in W at each step
    mean_rank: float | None = None  # of plans from a calibration
    reduction: float | None = None  # of plans with residuals from a calibration, in place of `mean_rank`
    monitor: int = 0  # of sketches: measures their errors at one flush of so many, for the log
    tolerance: float | None = None  # with `monitor`: requests with larger errors continue with exact reads
    tokens: int = 65536  # of a calibration that is recorded
    share: float = 0.03  # most of the engine's time that recording takes; 1 for all tokens

    def __post_init__(self) -> None:
        if not isinstance(self.plans, str):
            raise TypeError(f"plans: expected a path, {WORDS}, got {type(self.plans).__name__}")
        if self.plans in ("", RECORD):
            raise ValueError(f"plans: expected a path, {WORDS}, got {self.plans!r}")
        if not isinstance(self.phases, bool):
            raise TypeError(f"phases: expected True or False, got {type(self.phases).__name__}")
        check_window(self.window, 1)
        check_integer("monitor", self.monitor, 0, 1 << 16)
        check_tolerance(self.tolerance, self.monitor)
        check_integer("tokens", self.tokens, 1024, 2**40)
        check_number("share", self.share, "a number from 0.001 to 1", lambda x: 0.001 <= x <= 1)
        budget_of(self.mean_rank, self.reduction)
        if self.reduction is not None:
            check_number("reduction", self.reduction, "a number of at least 1", lambda x: x >= 1)
        kind = "record" if self.record else self.system
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default and kind not in SYSTEM_OF.get(field.name, (kind,)):
                raise ValueError(f"{field.name}: expected none with plans={self.plans!r}, got {value}")

    @property
    def record(self) -> str | None:
        """Path of the calibration to record; None without."""
        return self.plans.removeprefix(RECORD) if self.plans.startswith(RECORD) else None

    @property
    def system(self) -> str:
        """Which heads: "standard", "replay" or "sketch"."""
        return "standard" if self.record else self.plans if self.plans in SYSTEMS else "sketch"

    @classmethod
    def find(cls, environment: Mapping[str, str], additional: Any) -> Settings | None:
        """Read the settings of an engine; None if neither environment nor `additional_config` switches the plugin on.

        In vLLM's ``additional_config``, which has precedence, the value of `KEY` is `plans`, or a mapping with all
        fields; in the environment such a mapping is in JSON.
        """
        given = additional.get(KEY) if isinstance(additional, Mapping) else None
        if given is None:
            given = environment.get(VARIABLE) or None
            if given is not None and given.startswith("{"):
                try:
                    given = json.loads(given)
                except ValueError as error:
                    raise ValueError(
                        f"{VARIABLE}: expected a path, {WORDS} or JSON, got {given!r}: {error}"
                    ) from error
        if given is None:
            return None
        if not isinstance(given, Mapping):
            return cls(given)
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise ValueError(f"{KEY}: expected fields among {', '.join(known)}, got {name!r}")
        if "plans" not in given:
            raise ValueError(f"{KEY}: expected a field 'plans', got {', '.join(given) or 'no field'}")
        return cls(**given)


@cache
def plans_at(path: str, mean_rank: float | None, reduction: float | None) -> Mapping[str, SketchPlan]:
    """Read plans as `load_plans`, once; the error of a wrong path has the words that stand for no path."""
    if not os.path.exists(path):
        raise FileNotFoundError(f"plans: expected a path, {WORDS}, got {path!r}, which does not exist")
    return load_plans(path, mean_rank, reduction)


@dataclass(frozen=True)
class EngineFacts:
    """Configuration of an engine, as far as the plugin depends on it."""

    platform: str  # where vLLM runs: "cuda", "cpu" or another word
    cache_mode: str  # of recurrent states: "none", or "align", which caches prefixes
    kind: str
    drafts: int  # most draft tokens of a step; 0 without speculative decoding
    window: int  # tokens from one flush to the next; 1 for standard decode
    transfers: bool = False  # whether states go to other engines (vLLM's kv_transfer_config)
    microbatches: bool = False  # whether a step is split into microbatches (enable_dbo, ubatch_size)
    own_replay: bool = False  # whether vLLM's own layers keep rings (use_replayssm)
    recording: int = 0  # window of a calibration that is recorded; 0 for none
    monitor: int = 0  # of `Settings`
    random_rounding: bool = False  # whether vLLM's own layers round states at random (enable_stochastic_rounding)
    decode_backend: str = "auto"  # of vLLM's ``additional_config``: another one decodes past the layers


def check_engine(facts: EngineFacts) -> None:
    """Refuse an engine that the plugin does not support, naming vLLM's setting, what is expected, and what it is."""
    if facts.platform not in ("cuda", "cpu") or (facts.platform == "cpu" and facts.kind != "mamba2"):
        raise ValueError(f"platform: expected CUDA, or a CPU for mamba2, got {facts.platform} for {facts.kind}")
    if facts.cache_mode not in ("none", "align"):
        raise ValueError(f"mamba_cache_mode: expected 'none' or 'align', got {facts.cache_mode!r}")
    if facts.own_replay:
        raise ValueError("use_replayssm: expected False, as heads have rings of their own, got True")
    if facts.transfers:
        raise ValueError("kv_transfer_config: expected None, as states go to no other engine, got a configuration")
    if facts.microbatches:
        raise ValueError(
            "enable_dbo: expected False, and ubatch_size at most 1, as no batch is split, got microbatches"
        )
    if facts.random_rounding:
        raise ValueError("enable_stochastic_rounding: expected False, as heads round states to nearest, got True")
    if facts.decode_backend != "auto":
        raise ValueError(f"decode_backend: expected 'auto', as layers decode with heads, got {facts.decode_backend!r}")
    if facts.recording and facts.platform == "cuda" and facts.recording not in WINDOWS:
        known = ", ".join(map(str, WINDOWS))
        raise ValueError(f"window: expected one of {known}, which the kernels take, got {facts.recording}")
    if not facts.drafts:
        return
    if facts.monitor:
        raise ValueError(f"monitor: expected 0 with speculative decoding, which is not measured, got {facts.monitor}")
    if facts.recording:
        raise ValueError(
            f"speculative_config: expected None while a calibration is recorded, got {facts.drafts} draft tokens"
        )
    if facts.platform == "cpu":
        raise ValueError(
            f"speculative_config: expected None, as vLLM's convolution on a CPU takes no drafts, got {facts.drafts} "
            "draft tokens"
        )
    if facts.cache_mode != "none":
        raise ValueError(
            "enable_prefix_caching: expected False with drafts, as heads keep no state after each draft token, "
            f"got a cache of mode {facts.cache_mode!r}"
        )
    most = MAX_DRAFTS if facts.window == 1 else min(MAX_DRAFTS, facts.window - 1)
    if 1 + facts.drafts > most:
        raise ValueError(
            f"num_speculative_tokens: expected at most {most - 1}, as a head takes drafts of up to {most} tokens "
            f"with the token before them, got {facts.drafts}"
        )
