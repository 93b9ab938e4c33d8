"""Second moments of states and effective queries, from which a sketch basis is fitted (section 4.1)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.arrays.space import Space
from sketchssm.calibrate.sums import Accumulator, RunningSum, added
from sketchssm.calibrate.windows import Carry, Reads
from sketchssm.layer.checks import check_choice
from sketchssm.layer.recurrence import KINDS, Layer, check_window
from sketchssm.plans.files import FileFormat, Stored, check_array

FORMAT = FileFormat("sketchssm-moments", 2, ("state_gram", "query_gram", "samples"))


class Moments(Stored, Accumulator):
    """Running sums of ``S0 S0^T`` and ``x x^T`` over the tokens that read the state through a sketch.

    A sample is a token at position 1 to W - 1 of a window. The flush token is no sample: it reads the exact state.
    A sample contributes its effective query x and the state S0 that x reads, so both expectations are over the same
    samples. Tokens whose S0 is exactly zero, such as those of a sequence's first window, are not samples.

    Parameters
    ----------
    kind : Layer or {"mamba2", "gdn", "kda", "gla"}
        The layer, or its kind; with a `Layer` leave out the four sizes.
    heads, key_dim, value_dim : int, optional
        Value heads, length K of a query or a key, and length V of a value or an output.
    key_heads : int, optional
        Heads of q and k; default `heads`.
    window : int, default 16
        Tokens from one flush to the next (W).

    Attributes
    ----------
    layer : Layer
        Kind and shape.
    state_gram : ndarray of float64, (heads, K, K)
        Sum of ``S0 S0^T`` over the samples.
    query_gram : ndarray of float64, (heads, K, K)
        Sum of ``x x^T`` over the samples.
    samples : ndarray of int64, (heads,)
        Number of samples.
    window : int
        As given.

    Raises
    ------
    ValueError
        If an argument is out of range.
    """

    FORMAT = FORMAT
    sums = FORMAT.tensors
    state_gram, query_gram, samples = RunningSum(), RunningSum(), RunningSum()

    def __init__(
        self,
        kind: str | Layer,
        heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        key_heads: int | None = None,
        *,
        window: int = 16,
    ) -> None:
        self.layer = _layer(kind, heads=heads, key_dim=key_dim, value_dim=value_dim, key_heads=key_heads)
        self.window = check_window(window)
        shape = (self.layer.heads, self.layer.key_dim, self.layer.key_dim)
        self.state_gram, self.query_gram = np.zeros(shape), np.zeros(shape)
        self.samples = np.zeros(self.layer.heads, dtype=np.int64)

    def update(self, q: Any, k: Any, v: Any, g: Any, beta: Any = None, *, carry: Carry | None = None) -> Carry:
        """Add the samples of some tokens.

        Arrays of CuPy, and of PyTorch on a GPU, stay there: sums are computed on their device, and copied when an
        attribute is read. Others are computed in NumPy on all cores. Matrices are multiplied in float32 unless an
        array is float64, and summed in float64.

        Parameters
        ----------
        q, k : array, (batch, tokens, key_heads, K)
            Queries and keys, normalised and scaled.
        v : array, (batch, tokens, heads, V)
            Values.
        g : array, (batch, tokens, heads) or, for kda and gla, (batch, tokens, heads, K)
            Log-decays, <= 0.
        beta : array, (batch, tokens, heads), optional
            Write gates; None for mamba2 and gla.
        carry : Carry, optional
            Result of the previous call, to continue the same sequences. Default: new sequences, from zero states at
            the start of a window.

        Returns
        -------
        Carry
            Positions of the sequences. The sums do not depend on how sequences are cut, except for rounding.

        Raises
        ------
        ValueError
            Naming the argument, before anything is added: a wrong shape, a gate above 0 or NaN, an input that is not
            finite, a write gate outside 0 to 2, keys that let a state grow, moments above 1e100, a carry that does not
            fit.
        TypeError
            If an argument is not a real floating-point array.
        """
        return self._update((q, k, v, g, beta), None, None, carry)

    def _add(self, space: Space, reads: Reads, sums: dict[str, Any], dtype: str) -> None:
        some = slice(0, 1 + max(i for i, count in enumerate(reads.counts) if count))
        states, counts = reads.states[:, :, some], space.array(np.array(reads.counts[some]), dtype)
        if len(set(reads.counts[some])) == 1:
            weight = float(reads.counts[0])
        else:
            weight, states = 1.0, states * space.xp.sqrt(counts)[:, None, None]
        for name, x, share in (("state_gram", states, weight), ("query_gram", reads.queries, 1.0)):
            columns = x.reshape(*x.shape[:2], -1, x.shape[-1])
            gram = space.cast(columns.swapaxes(-1, -2) @ columns, "float64")
            sums[name][reads.heads] += gram.sum(0) if share == 1.0 else share * gram.sum(0)
        live = space.cast(reads.live[:, :, some], dtype) * counts
        sums["samples"][reads.heads] += space.cast(live.sum((0, 2)), "int64")

    def __add__(self, other: Moments) -> Moments:
        """Moments of both sets of traces; ValueError unless layer and window agree."""
        if not isinstance(other, Moments):
            return NotImplemented
        for name in ("layer", "window"):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(
                    f"moments: expected the same {name} to add, got {getattr(self, name)} and {getattr(other, name)}"
                )
        total = Moments(self.layer, window=self.window)
        total.__dict__.update(added(self, {name: getattr(other, name) for name in FORMAT.tensors}))
        return total

    def _contents(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        tensors = {name: getattr(self, name) for name in FORMAT.tensors}
        return tensors, {"layer": asdict(self.layer), "window": self.window, "weighting": "uniform"}

    @classmethod
    def _build(cls, tensors: dict[str, npt.NDArray[Any]], layer: Any, window: Any, weighting: Any) -> Moments:
        shape = Layer(**layer)
        gram = (shape.heads, shape.key_dim, shape.key_dim)
        check_array("state_gram", tensors["state_gram"], gram, np.float64)  # first: these bound what is allocated
        check_array("query_gram", tensors["query_gram"], gram, np.float64)
        check_array("samples", tensors["samples"], (shape.heads,), np.int64)
        if weighting != "uniform":
            raise ValueError(f"weighting: this version does not have {weighting!r}; collect the moments anew")
        moments = cls(shape, window=window)
        moments.__dict__.update(added(moments, tensors))
        return moments


def _layer(kind: str | Layer, **sizes: int | None) -> Layer:
    """Layer from a `Layer`, or from a kind and sizes."""
    given = {name: size for name, size in sizes.items() if size is not None}
    if isinstance(kind, Layer):
        if given:
            raise ValueError(f"{min(given)}: expected None with a Layer, which has its sizes, got {given[min(given)]}")
        return kind
    check_choice("kind", kind, KINDS)
    for name in ("heads", "key_dim", "value_dim"):
        if name not in given:
            raise ValueError(f"{name}: expected a positive integer, got None")
    return Layer(kind, **given)
