"""Heads as PyTorch operators, for ``torch.compile(fullgraph=True)`` and CUDA graphs.

An operator finds its head by name. A head's memory is not among its arguments: every operator has an argument `order`
instead, a tensor of one byte that stands for the memory. The schema says that the operator writes `order`, so the
compiler keeps the operators of one head in order and removes none of them. If the compiler copies the arguments that
an operator writes, it copies one byte instead of the states of all slots.

The operators are ``torch.ops.sketchssm.step``, ``step_out``, ``load_state``, ``adopt``, ``commit``, ``copy``,
``flush`` and ``reset``. `DecodeLayer` calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch

from sketchssm.arrays.interop import check_gradients
from sketchssm.heads.head import DecodeHead

__all__ = ["DecodeLayer"]

_layers: WeakValueDictionary[str, DecodeLayer] = WeakValueDictionary()
_numbers = count()

_library = torch.library.Library("sketchssm", "DEF")

MEMORY = "Tensor(a!) order, str name"
TOKENS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta, Tensor? slots"
DRAFT = "Tensor? lengths=None, bool draft=False"


class DecodeLayer(torch.nn.Module):  # type: ignore[misc]
    """One head as a module of a model.

    All methods but the constructor can be compiled. They have no backward pass: call them under ``torch.no_grad()``.

    Parameters
    ----------
    head : DecodeHead
        Any head that no other layer has. Call its `warmup` before a CUDA graph is captured.
    name : str, optional
        Name by which the operators find the head, such as the layer's name in the model. Compiled code contains the
        name. Default: "head" and a number.

    Attributes
    ----------
    head : DecodeHead
        The head. Its methods may be called as well, outside of compiled code.
    name : str
        The name.
    order : torch.Tensor
        Buffer of one byte on the head's device, which stands for the head's memory; see `sketchssm.torch`.

    Raises
    ------
    TypeError
        If `head` is not a head, or `name` is not a string.
    ValueError
        If another layer has the head or the name.
    """

    head: DecodeHead
    name: str

    def __init__(self, head: DecodeHead, name: str | None = None) -> None:
        super().__init__()
        if not isinstance(head, DecodeHead):
            raise TypeError(f"head: expected a DecodeHead, got {type(head).__name__}")
        if name is None:
            name = f"head{next(_numbers)}"
        if not isinstance(name, str):
            raise TypeError(f"name: expected a string, got {type(name).__name__}")
        if name in _layers:
            raise ValueError(f"name: expected a name that no other layer has, got {name!r}")
        for other in list(_layers.values()):
            if other.head is head:  # with two tensors `order`, the compiler could exchange calls of one head
                raise ValueError(f"head: expected a head that no other layer has, got that of {other.name!r}")
        self.head, self.name = head, name
        device = torch.device("cuda", head.state.device.id) if head.backend == "cuda" else torch.device("cpu")
        with torch.inference_mode(False):  # compiled code writes the tensor, also outside of inference mode
            order = torch.zeros(1, dtype=torch.uint8, device=device)
        self.register_buffer("order", order, persistent=False)
        _layers[name] = self

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any = None,
        slots: Any = None,
        *,
        out: Any = None,
        draft: bool = False,
        lengths: Any = None,
    ) -> torch.Tensor:
        """Decode one token, several in order, or a draft, for each row of a batch.

        Parameters
        ----------
        q, k, v, g, beta, slots : torch.Tensor
            See `DecodeHead.step`.
        out : torch.Tensor, optional
            Where to write the outputs; must share no memory with another argument.
        draft, lengths : bool and torch.Tensor, optional
            See `DecodeHead.step`.

        Returns
        -------
        torch.Tensor, (batch, [tokens,] heads, V)
            Outputs: a new contiguous tensor of v's type, or `out`.
        """
        if out is None:
            return _step_op(self.order, self.name, q, k, v, g, beta, slots, lengths, draft)
        _step_out_op(self.order, self.name, q, k, v, g, beta, slots, out, lengths, draft)
        return out

    def load_state(self, state: Any, slots: Any = None) -> None:
        """Set the states of some slots; see `DecodeHead.load_state`.

        Parameters
        ----------
        state, slots : torch.Tensor
            States ``(batch, heads, V, K)``, and the slot of each row. Default: row i goes to slot i.
        """
        torch.ops.sketchssm.load_state(self.order, self.name, state, slots)

    def adopt(self, slots: Any = None) -> None:
        """Begin windows on states that are already in the head's memory; see `SketchHead.adopt`.

        The compiler does not know that the operator reads this memory: write the memory outside the graph.

        Parameters
        ----------
        slots : torch.Tensor of int, optional
            Which slots. Default: all.
        """
        torch.ops.sketchssm.adopt(self.order, self.name, slots)

    def commit(self, accepted: Any, slots: Any = None) -> None:
        """Keep the first tokens of each row's draft, and drop the rest; see `SketchHead.commit`.

        Parameters
        ----------
        accepted, slots : torch.Tensor of int, (batch,)
            How many tokens to keep, and the slot of each row. Default: row i uses slot i.
        """
        torch.ops.sketchssm.commit(self.order, self.name, accepted, slots)

    def copy(self, src: Any, dst: Any) -> None:
        """Copy the contents of slots, except drafts; see `SketchHead.copy`.

        Parameters
        ----------
        src, dst : torch.Tensor of int, (count,)
            Slots to read, and slots to write.
        """
        torch.ops.sketchssm.copy(self.order, self.name, src, dst)

    def flush(self, slots: Any = None) -> None:
        """Fold the buffered tokens of some slots into their states; see `DecodeHead.flush`.

        Parameters
        ----------
        slots : torch.Tensor of int, optional
            Which slots. Default: all.
        """
        torch.ops.sketchssm.flush(self.order, self.name, slots)

    def reset(self, slots: Any = None) -> None:
        """Clear some slots; see `DecodeHead.reset`.

        Parameters
        ----------
        slots : torch.Tensor of int, optional
            Which slots. Default: all.
        """
        torch.ops.sketchssm.reset(self.order, self.name, slots)

    def extra_repr(self) -> str:
        """Name and head, as PyTorch shows them in a model's `repr`.

        Returns
        -------
        str
            One line.
        """
        return f"{self.name!r}, {self.head!r}"


def _head(name: str) -> Any:
    layer = _layers.get(name)
    if layer is None:
        raise RuntimeError(f"name: expected the name of a DecodeLayer that is in use, got {name!r}")
    return layer.head


def _operator(name: str, arguments: str, returns: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define an operator of a head; return the function that calls the operator."""
    names = [argument.split()[1].partition("=")[0] for argument in arguments.split(", ")]

    def traced(order: Any, head: str, *given: Any) -> Any:
        if order.device.type == "meta" and any(isinstance(x, torch.Tensor) and not x.is_meta for x in given):
            raise RuntimeError(
                f"order: expected a tensor with memory, got one on 'meta'; DecodeLayer {head!r} was moved"
            )
        if torch.is_grad_enabled():  # eager calls: the head checks the tensors
            check_gradients(**dict(zip(names, given, strict=False)))
        return fake(order, head, *given)

    _library.define(f"{name}({MEMORY}, {arguments}) -> {returns}")
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sketchssm::{name}", traced, lib=_library)
    return getattr(torch.ops.sketchssm, name).default  # without the search for the right overload


def _nothing(*given: Any) -> None:
    """Stand in for an operator without outputs while a graph is traced."""


def _step(
    order: Any,
    name: str,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    slots: Any,
    lengths: Any = None,
    draft: bool = False,
) -> torch.Tensor:
    return _head(name).step(q, k, v, g, beta, slots=slots, draft=draft, lengths=lengths)


def _step_fake(order: Any, name: str, q: Any, k: Any, v: Any, *others: Any) -> torch.Tensor:
    return v.new_empty(v.shape)


def _step_out(
    order: Any,
    name: str,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    slots: Any,
    out: Any,
    lengths: Any = None,
    draft: bool = False,
) -> None:
    _head(name).step(q, k, v, g, beta, slots=slots, out=out, draft=draft, lengths=lengths)


def _define(method: str, arguments: str) -> None:
    """Define an operator without outputs that calls a head's method with the same arguments."""

    def run(order: Any, name: str, *given: Any) -> None:
        getattr(_head(name), method)(*given)

    _operator(method, arguments, "()", run, _nothing)


_step_op = _operator("step", f"{TOKENS}, {DRAFT}", "Tensor", _step, _step_fake)
_step_out_op = _operator("step_out", f"{TOKENS}, Tensor(b!) out, {DRAFT}", "()", _step_out, _nothing)
_define("load_state", "Tensor state, Tensor? slots=None")
_define("adopt", "Tensor? slots=None")
_define("commit", "Tensor accepted, Tensor? slots=None")
_define("copy", "Tensor src, Tensor dst")
_define("flush", "Tensor? slots=None")
_define("reset", "Tensor? slots=None")
