"""Refresh: advance a sketch and its map through a window's tokens, without the state.

A sketch and its map stand for a surrogate ``S^`` of the state, of rank G,

    S^^T = U R,      R = C                              for `exact` and `ridge`,
                     R = Pi^T + C (I - Omega Pi^T)      for the other maps.

The second form is the oblique projection with ``S^^T Omega = U`` (because ``Pi^T Omega = I``). For the dense maps,
``R = C`` already has this property up to the ridge: ``C Omega = (H + ridge I)^-1 H`` with ``H = U^T U / mu``. Their
surrogate is the product that reads use, ``U C`` or ``Q B``, so the form of storage does not matter.

The tokens of a window advance the surrogate as they advance the state, by the same fold. A refresh then takes the
sketch and the map of the new surrogate:

    S'^T = U R D_{1:W} + sum_s w_s l_s^T,      U' = S'^T Omega,      C' = the map of S'.

For mamba2 the new sketch is exact, ``U' = a U + sum_s w_s (Omega^T l_s)^T``, whatever R. The delta rule predicts the
values ``S^^T D_{1:s} k_s = U R D_{1:s} k_s`` that a token replaces; these predictions and the map have the error of R.
The error of the surrogate follows the transitions of the state, ``M_{1:W} (S - S^)``: it decays, and tokens erase it.

Here S' is formed as a matrix ``(K, V)``. Kernels never form it: with the columns ``Y = [U, w]`` ``(V, G + W)`` and the
rows ``X = [R D_{1:W}; l^T]`` ``(G + W, K)``,

    S'^T = Y X,   U' = Y (X Omega),   U'^T S'^T = (U'^T Y) X,   |S'|_F^2 = <Y^T Y, X X^T>.

A refresh neither reads nor changes the state.
"""

from __future__ import annotations

from typing import NamedTuple

from sketchssm.layer.coefficients import CoefficientMap
from sketchssm.layer.formats import SketchFormat
from sketchssm.reference.narrow import sketched_read, stored
from sketchssm.reference.recurrence import Array
from sketchssm.reference.window import Ring, fold

__all__ = ["HeadPlan", "Sketch", "refresh", "sketch_state", "surrogate"]


class HeadPlan(NamedTuple):
    """Settings of one head's sketches.

    Attributes
    ----------
    form : SketchFormat
        Format of storage; float32 and bfloat16 stay float64.
    map : CoefficientMap
        Map and parameters.
    omega, projection : ndarray, (K, G)
        Sketch basis and shared projection Pi, in the form that the map reads through.
    wide : int, default 0
        Columns in 8 bits, of a mixed format.
    """

    form: SketchFormat
    map: CoefficientMap
    omega: Array
    projection: Array
    wide: int = 0


class Sketch(NamedTuple):
    """A sketch and its coefficient map, as stored.

    ``read (..., V, K)`` is the product of both: the read of an effective query x is ``read @ x``. ``u (..., V, G)`` is
    the sketch U; for dense maps it is ``read @ omega``, because only the product of sketch and map matters.
    """

    u: Array
    read: Array


def sketch_state(head: HeadPlan, state: Array) -> Sketch:
    """Sketch states ``(..., K, V)`` of one head."""
    form, map, omega, projection, wide = head
    read = sketched_read(form, map, state, omega, projection, wide)
    if map.storage == "dense":
        return Sketch(read @ omega, read)
    columns = (state.swapaxes(-1, -2) @ omega).swapaxes(-1, -2)
    return Sketch(stored(form, columns).swapaxes(-1, -2), read)


def surrogate(head: HeadPlan, sketch: Sketch) -> Array:
    """Return the states ``S^ (..., K, V)`` of rank G that sketches of one head stand for."""
    missed = sketch.u - sketch.read @ head.omega  # zero for dense maps
    return (sketch.read + missed @ head.projection.T).swapaxes(-1, -2)


def refresh(head: HeadPlan, sketch: Sketch, ring: Ring) -> Sketch:
    """Advance sketches of one head, and their maps, from a window's start through its tokens."""
    return sketch_state(head, fold(surrogate(head, sketch), ring))
