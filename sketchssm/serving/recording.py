"""Calibration from the tokens that an engine serves: bases from some tokens, then rank scores from others.

A `Recording` chooses at each step what is added to the sums of all layers: chunks of prefills, and rows that are
followed for some tokens while they decode. A chunk or a followed row begins at the exact state in its slot, so it may
begin anywhere in a request. By the time of the host, or of the device if that is longer, this takes at most a share of
the engine's. The host waits for the device only where followed rows end, to know how many tokens they have. Tokens
that sums refuse, such as NaN, are skipped and counted.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sketchssm.arrays.gates import GateInput
from sketchssm.calibrate.basis import fit_basis
from sketchssm.calibrate.calibration import Calibration, LayerCalibration, StoredBasis
from sketchssm.calibrate.distributed import join_shards
from sketchssm.calibrate.joint_scores import WINDOWS, JointScores
from sketchssm.calibrate.scores import RankScores
from sketchssm.layer.recurrence import Layer
from sketchssm.plans.model_plans import LayerFingerprint, ModelFingerprint
from sketchssm.serving.following import ROWS, STEPS, Followed
from sketchssm.serving.layer_record import CHUNK, LayerRecord, columns_of
from sketchssm.serving.updates import Update

SCORED = 8
"""Moments take so many times more tokens than scores."""

IDLE = 1.0
"""Longest time in seconds from one step to the next that counts as the engine's."""

SAVED = 10.0
"""Seconds of the engine's of which a share that was not spent may be spent later, so that there are no bursts."""

FINISH = ".finish"
"""A stage goes on with the tokens that it has, when the file of this ending beside the calibration's is touched."""

LEAST = 1024
"""Fewest tokens of a stage that goes on."""

LOOK = 1.0
"""Seconds from one look at this file to the next."""

TELL = 60.0
"""Seconds from one line about the tokens so far to the next."""

EXPECTED = (
    "expected finite queries, keys and values, normalised keys, log-decays of at most 0 and write gates from 0 to 2"
)
"""What sums take."""


class Chunk(NamedTuple):
    """Tokens of a row that is prefilled."""

    row: int
    tokens: int
    begun: bool  # whether there are tokens of the request before


@dataclass(frozen=True)
class Choice:
    """What of a step's batch is added to the sums."""

    chunks: tuple[Chunk, ...] = ()
    begin: npt.NDArray[Any] | None = None  # decoding rows that are followed from this step on
    lead: Any = None  # the group whose blocks tell which rows are followed; None if none are
    end: list[int] | None = None  # tokens of the rows followed before this step, if these are added


NOTHING = Choice()


class Recording:
    """Calibration of all layers of one process of an engine; a file is written at the end.

    Parameters
    ----------
    path : str
        Where the calibration is written. Each of `world` processes writes its part beside it, and the last process
        puts the parts together. Touch this path with `FINISH` behind it to go on with the tokens that there are.
    model : str
        Class of the model.
    window : int
        Tokens of a window.
    tokens : int
        Tokens for the moments; an eighth more are scored.
    share : float
        Most of the engine's time that is spent; with 1, all chunks are added, and as many rows as can be followed.
    tell : callable
        Is given a line for the log at each stage, and about once a minute.
    rank, world : int
        This process, and the processes that hold the model's layers and heads.

    Raises
    ------
    ValueError
        If the path is a folder, or is in a folder that does not exist or can't be written.
    """

    def __init__(
        self,
        path: str,
        model: str,
        window: int,
        tokens: int,
        share: float,
        tell: Callable[[str], None],
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self._path, self._model, self._tell, self._rank, self._world = Path(path), model, tell, rank, world
        self._trigger = Path(path + FINISH)
        if self._path.is_dir() or not os.access(self._path.parent, os.W_OK):
            raise ValueError(f"plans: expected 'record:FILE', a file in a folder that can be written, got {path}")
        self.window, self._tokens, self._share = window, tokens, share
        self._layers: dict[str, LayerRecord] = {}
        self.active = True
        self._need, self._next, self._fitted = tokens, self._fit, 0
        self._skipped = 0  # chunks and followed rows, of the layer with most
        self._seen, self._looked, self._told = _stamp(self._trigger), 0.0, -TELL
        self._task = Future[None]()
        self._task.set_result(None)
        self._pool = ThreadPoolExecutor(1, "sketchssm")
        self._random = np.random.default_rng(0)
        self._asked: set[Any] = set()
        self._choice = NOTHING
        self._last, self._credit = perf_counter(), 0.0
        self._updates = deque[tuple[LayerRecord, int, Update]]()  # that are not known yet
        self._served, self._taken = np.zeros(2), np.zeros(2)  # tokens that decode, tokens of prefills
        self._steps, self._lead = -1, None  # since rows are followed, -1 for none; the group that follows them
        self.device = torch.device("cpu")
        self._part(rank).unlink(missing_ok=True)

    def layer(
        self,
        name: str,
        module: str,
        layer: Layer,
        gate: Callable[[], GateInput | None],
        whole: Layer | None = None,
    ) -> LayerRecord:
        """Sums of one more layer, of a class `module`."""
        self._layers[name] = LayerRecord(self, name, module, layer, gate, whole or layer)
        return self._layers[name]

    @cached_property
    def followed(self) -> Followed:
        """The followed rows, on `device`."""
        return Followed(self.device)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the time of what runs within."""
        start = perf_counter()
        try:
            yield
        finally:
            self._credit -= perf_counter() - start

    def note(self, record: LayerRecord, tokens: int, update: Update) -> None:
        """Note an update of a layer's sums by some tokens."""
        self._updates.append((record, tokens, update))
        self._settle()

    def _settle(self) -> None:
        """Count the updates that are known by now."""
        while self._updates and self._updates[0][2].known:
            record, tokens, update = self._updates.popleft()
            self._credit -= update.beyond_host
            record.count(tokens, update.good)

    def skip(self, number: int, name: str) -> None:
        """Note that sums of a layer have refused so many chunks and followed rows; each power of two is logged."""
        if number > self._skipped:
            self._skipped = number
            if not number & (number - 1):
                self._tell(f"skipped tokens that can't be added, {number} times so far: {name}: {EXPECTED}")

    def choose(self, group: Any, lengths: npt.NDArray[Any], computed: npt.NDArray[Any], decodes: int) -> Choice:
        """Choose what is added of a step's batch. Each group of layers asks once a step, and gets the same answer.

        `lengths` and `computed` are as of `sketchssm.serving.batches.split_rows`; the first `decodes` rows decode.
        """
        if group in self._asked:
            self._asked.clear()
        if not self._asked:
            self._choice = self._chosen(group, lengths, computed, decodes)
        self._asked.add(group)
        return self._choice

    def _chosen(self, group: Any, lengths: npt.NDArray[Any], computed: npt.NDArray[Any], decodes: int) -> Choice:
        now = perf_counter()
        credit = self._credit + self._share * min(now - self._last, IDLE)
        self._credit = min(credit, self._share * SAVED)
        self._last = now
        self._settle()
        if not self._collecting(now):
            if self._steps >= 0:
                self._end()
            return NOTHING
        self._served[0] += lengths[:decodes].sum()
        self._served[1] += lengths[decodes:].sum()
        end = self._end() if self._steps == STEPS else None
        every = self._share >= 1
        chunks: tuple[Chunk, ...] = ()
        begin = None
        if every or self._credit > 0:
            decoding = self._taken[0] * self._served[1] <= self._taken[1] * self._served[0]
            if (every or decoding) and self._steps < 0:
                rows = np.flatnonzero((lengths[:decodes] == 1) & (computed[:decodes] >= self.window))
                if rows.size:
                    begin = rows[:ROWS] if every else self._random.permutation(rows)[:ROWS]
                    self._steps, self._lead = 0, group
                else:  # such as requests of one token
                    decoding = False
            if every or not decoding:
                behind = decodes + np.flatnonzero(lengths[decodes:])
                picked = behind
                if behind.size and not every:  # each token is as likely
                    picked = self._random.choice(behind, 1, p=lengths[behind] / lengths[behind].sum())
                chunks = tuple(Chunk(int(i), min(int(lengths[i]), CHUNK), bool(computed[i])) for i in picked)
                self._taken[1] += sum(chunk.tokens for chunk in chunks)
        if self._steps >= 0:
            self._steps += 1
        elif not chunks and end is None:
            return NOTHING
        return Choice(chunks, begin, self._lead, end)

    def _end(self) -> list[int]:
        """Follow no rows from now on; tokens of each row that were followed."""
        self._steps, self._lead = -1, None
        counts = self.followed.end()
        self._taken[0] += max(sum(counts), STEPS)  # requests that end at once do not keep chunks away
        return counts

    def _collecting(self, now: float) -> bool:
        """Whether tokens are added at this step; goes on to the next stage when there are enough."""
        if not self.active or not self._task.done():
            return False
        tokens = min(record.tokens for record in self._layers.values())
        if now - self._looked >= LOOK:
            seen, self._looked = self._seen, now
            self._seen = _stamp(self._trigger) or seen
            if self._seen != seen:
                self._need = min(self._need, max(tokens, LEAST))
        if now - self._told >= TELL:
            stage = "bases" if self._next == self._fit else "scores"
            self._tell(f"{tokens} of {self._need} tokens for {stage}")
            self._told = now
        if tokens < self._need:
            return True
        if self._updates:  # the stage reads the sums
            return False
        self._task = self._pool.submit(self._run, self._next)
        return False

    def _run(self, stage: Callable[[], None]) -> None:
        try:
            stage()
        except Exception as error:  # in a thread of its own, where nobody sees it
            self._finish(f"ended without a calibration: {error}")

    def _finish(self, words: str) -> None:
        self.active = False
        self._tell(words)
        self._pool.shutdown(wait=False)

    def _fit(self) -> None:
        records = self._layers.values()
        self._fitted = min(record.tokens for record in records)
        self._tell(f"fitting bases to {self._fitted} tokens")
        bases = [fit_basis(record.sums["moments"], columns_of(record.layer)) for record in records]
        self._need, self._next = self._need // SCORED, self._write
        every = max(1, self._need // self.window // WINDOWS)
        for record, basis in zip(records, bases, strict=True):
            record.basis = StoredBasis.of(basis)
            record.sums, record.tokens = {"ranks": RankScores(basis), "joint": JointScores(basis, every=every)}, 0

    def _write(self) -> None:
        records: dict[str, Any] = self._layers
        layers = {name: LayerCalibration(record.basis, **record.sums) for name, record in records.items()}
        names = {name: LayerFingerprint(record.module, record.whole, "") for name, record in records.items()}
        scored = min(record.tokens for record in records.values())
        own = Calibration(layers, ModelFingerprint(self._model, names), self._fitted + scored)
        told = (
            f"bases of {self._fitted} tokens ({self._tokens} asked), scores of {scored} ({self._tokens // SCORED}), "
            f"{self._skipped} chunks skipped"
        )
        parts = [self._part(rank) for rank in range(self._world)] if self._world > 1 else []
        if parts:
            own.save(parts[self._rank])
            try:
                own = join_shards([Calibration.load(part) for part in parts])
            except FileNotFoundError:  # not yet there, or another process has joined them
                self._finish(f"wrote {parts[self._rank]}: {told}; the last process puts the parts together")
                return
        own.save(self._path)
        for part in parts:
            part.unlink(missing_ok=True)
        self._trigger.unlink(missing_ok=True)
        self._finish(f"wrote {self._path}: {told}")

    def _part(self, rank: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{rank}-of-{self._world}")


def _stamp(path: Path) -> int:
    """When a file was changed; 0 if there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
