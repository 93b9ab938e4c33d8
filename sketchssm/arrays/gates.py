"""Log-decays from a layer's gate activations: formulas in float64, and the `GateInput` of a head.

In float32 a softplus of a very negative argument underflows, and its product with a large decay rate is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from sketchssm.arrays.interop import is_real, to_host
from sketchssm.layer.checks import as_array, check_instance, check_number
from sketchssm.layer.recurrence import Layer, shard_range

Array = npt.NDArray[Any]

LARGEST = 40.0
"""Largest magnitude of `A_log`: float32 holds the rate, and the rate times an underflowing softplus is negligible."""


def log_softplus(x: Array) -> Array:
    """Logarithm of a softplus, accurate even if the softplus underflows."""
    # Below -37 the softplus is exp(x) to float64's last digit, and beyond -745 it would underflow.
    return np.where(x < -37, x, np.log(np.logaddexp(0.0, np.maximum(x, -37))))


def scaled_decay(rate_log: Array, log_step: Array) -> Array:
    """Return ``-exp(rate_log) * step`` as one exponential, so that neither factor overflows or underflows."""
    with np.errstate(over="ignore"):  # -inf, a full forget, is the right limit
        return -np.exp(rate_log + log_step)


def bounded_decay(rate_log: Array, x: Array, lower_bound: float) -> Array:
    """Return fla's bounded log-decay, ``lower_bound * sigmoid(exp(rate_log) * x)``."""
    with np.errstate(over="ignore"):  # the sigmoid of +-inf is exact
        return lower_bound * expit(np.exp(rate_log) * x)


@dataclass(frozen=True, eq=False)
class GateInput:
    """Gate parameters of a layer with a decay per channel, for a head that computes log-decays from raw activations.

    With `gate=`, pass the raw activation ``a`` of the layer to `step` instead of ``g``. The head computes
    ``g = -exp(A_log) * softplus(a + dt_bias)``, or with a `lower_bound`
    ``g = lower_bound * sigmoid(exp(A_log) * (a + dt_bias))``, as `models.kda_inputs` does. On ``cuda`` the ring holds
    ``a`` in the activations' type, at most half the bytes of a float32 log-decay, and every kernel computes g from
    it. Other backends convert ``a`` at each call.

    Parameters
    ----------
    A_log : array, (heads,), or None
        Logarithm of each head's decay rate, from -40 to 40; kept as float64. None, with a `lower_bound`: a rate of 1.
    dt_bias : array, (heads, K)
        Added to the activation; ``(heads * K,)``, the shape in checkpoints, is accepted too. Kept as float64.
    lower_bound : float, optional
        Negative. Selects fla's bounded gate.

    Raises
    ------
    TypeError
        If an array is not real floating-point.
    ValueError
        If a shape is wrong, a number not finite, a rate out of range, or the bound not negative.
    """

    A_log: Any
    dt_bias: Any
    lower_bound: float | None = None

    def __post_init__(self) -> None:
        bias = _numbers("dt_bias", self.dt_bias)
        if self.A_log is None and (self.lower_bound is None or bias.ndim != 2):
            raise ValueError(
                "A_log: expected the decay rate of each head, or a lower_bound and a dt_bias of shape (heads, K), got "
                f"None, lower_bound {self.lower_bound} and shape {bias.shape}"
            )
        rate_log = np.zeros(len(bias)) if self.A_log is None else _numbers("A_log", self.A_log)
        heads = rate_log.size
        if heads == 0 or max(rate_log.shape, default=1) != heads:
            raise ValueError(f"A_log: expected shape (heads,), got {rate_log.shape}")
        if not (np.abs(rate_log) <= LARGEST).all():
            worst = rate_log.flat[np.argmax(~(np.abs(rate_log) <= LARGEST))]
            raise ValueError(f"A_log: expected numbers from {-LARGEST:g} to {LARGEST:g}, got {worst}")
        flat = bias.ndim == 1 and bias.size % heads == 0
        if bias.size == 0 or not (flat or (bias.ndim == 2 and bias.shape[0] == heads)):
            raise ValueError(f"dt_bias: expected shape ({heads}, K), got {bias.shape}; A_log has {heads} heads")
        if not (np.abs(bias) <= np.finfo(np.float32).max).all():
            raise ValueError("dt_bias: expected finite float32 numbers, got NaN, infinity or one beyond them")
        bound = self.lower_bound
        if bound is not None:
            lowest = -float(np.finfo(np.float32).max)
            check_number("lower_bound", bound, "a negative number", lambda number: lowest <= number < 0)
            object.__setattr__(self, "lower_bound", float(bound))
        object.__setattr__(self, "A_log", rate_log.reshape(heads))
        object.__setattr__(self, "dt_bias", bias.reshape(heads, -1))

    def check(self, layer: Layer) -> None:
        """Check that the gate fits a layer.

        Parameters
        ----------
        layer : Layer
            Kind and shape.

        Raises
        ------
        ValueError
            If its decay is not per channel, or heads or channels differ.
        """
        check_instance("layer", layer, Layer)
        if not layer.channel_decays:
            raise ValueError(f"gate: expected None for {layer.kind}; raw gate inputs have a decay per channel")
        want, have = (layer.heads, layer.key_dim), self.dt_bias.shape
        if have != want:
            raise ValueError(f"gate: expected A_log and dt_bias of {want} heads and channels, got {have}")

    def shard(self, rank: int, world: int) -> GateInput:
        """Gate of the heads of one process of a tensor-parallel group, as `Layer.shard_heads` splits them.

        Parameters
        ----------
        rank, world : int
            Process and processes; `world` divides the number of heads.

        Returns
        -------
        GateInput
            Parameters of the process's heads.
        """
        heads = shard_range("heads", len(self.A_log), rank, world)
        return GateInput(self.A_log[heads], self.dt_bias[heads], self.lower_bound)

    def log_decays(self, a: npt.ArrayLike) -> Array:
        """Convert raw activations to log-decays.

        Parameters
        ----------
        a : array_like, (..., heads, K)
            Raw activations.

        Returns
        -------
        ndarray of float64, (..., heads, K)
            Log-decays, <= 0; NaN for a NaN input.
        """
        raw, rate_log = np.asarray(a, dtype=np.float64) + self.dt_bias, self.A_log[:, None]
        if self.lower_bound is not None:
            return bounded_decay(rate_log, raw, self.lower_bound)
        return scaled_decay(rate_log, log_softplus(raw))


def _numbers(name: str, value: Any) -> Array:
    array = as_array(name, value) if isinstance(value, list | tuple | float) else to_host(value, name)
    if not is_real(array.dtype):
        raise TypeError(f"{name}: expected a real floating-point array, got dtype {array.dtype}")
    own: Array = array.astype(np.float64)
    own.flags.writeable = False
    return own
