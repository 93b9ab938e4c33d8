"""One call of a head on the device: its arguments become arrays that the kernels can take, its result the caller's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sketchssm import interop
from sketchssm.cuda.ports import KERNEL_TYPES, Port, export, host_type
from sketchssm.recurrence import Tokens

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sketchssm.cuda.arrays import DeviceArrays

__all__ = ["DeviceCall"]

ALIGNMENT = 16
"""Bytes: the kernels load 16 at a time."""

CALLS = 1024
"""Calls that are remembered at most."""

REAL = ("bfloat16", "float16", "float32", "float64")

HOST = interop.HostArrays(np.float32)
"""Checks what stands on the host."""


class DeviceCall:
    """One call: see `sketchssm.backends.Call`.

    Parameters
    ----------
    arrays : DeviceArrays
        The engine's.
    port : Port
        Framework whose current stream the call runs on.
    """

    def __init__(self, arrays: DeviceArrays, port: Port) -> None:
        self._arrays, self._port = arrays, port
        self._stream: Any = None
        self._temporary: list[Any] = []  # freed memory may be given to the next array before our kernels run
        self._foreign: dict[int, tuple[Any, Any]] = {}  # others' arrays by id, and CuPy's views of them
        self._live: Any = None  # which rows are no padding, where the host knows it
        self._direct = True  # whether all memory is used as it is, so that the same addresses mean the same views
        self._made: Any = None  # the caller's array behind the target

    def __enter__(self) -> DeviceCall:
        self._arrays.device.__enter__()
        self._stream = self._port.stream()
        if self._stream is not None:
            self._stream.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._foreign:
            self._arrays.keep(self._foreign)
        if self._stream is not None:
            self._stream.__exit__(*error)
        self._arrays.device.__exit__(*error)

    def slots(self, slots: Any, batch: int | None, capacity: int) -> Any:
        """See `sketchssm.backends.Call`."""
        arrays = self._arrays
        found = None if slots is None else self._local(slots, "slots")
        if found is None:
            index = HOST.slots(slots, batch, capacity)
            self._live = index >= 0
            if slots is None:
                return arrays.rows(index.shape[0], capacity)
            self._direct = False
            return arrays.uploaded(index)
        port, array, name, address = found
        shape = tuple(array.shape)
        if not name.startswith(("int", "uint")):
            raise ValueError(f"slots: expected integers, got dtype {name}")
        inner = (1,) if batch is None and not shape else shape
        if len(inner) != 1 or (batch is not None and inner[0] != batch):
            raise ValueError(f"slots: expected shape ({'count' if batch is None else batch},), got {shape}")
        if address is None or name not in ("int64", "int32"):
            array, name = self._converted(port, array, "int64"), "int64"
            address = _own_address(port, array)
        index = arrays.wrap(address, inner, name)
        if name == "int64":
            return index
        self._direct = False
        return arrays.widened(index, capacity)

    def inputs(self, given: Tokens, slots: Any, out: Any, several: bool, capacity: int) -> tuple[Tokens, Any, Any]:
        """See `sketchssm.backends.Call`."""
        arrays = self._arrays
        key = self._signature((*given, slots, out))
        known = None if key is None else arrays.calls.get(key)
        if known is None:
            index = self.slots(slots, given.v.shape[0], capacity)
            tokens = self._tokens(given, several)
            known = tokens, index, None if out is None else self._target(out, out, several, tokens)
            if key is not None and self._direct:
                if len(arrays.calls) == CALLS:
                    arrays.calls.clear()
                arrays.calls[key] = known
        elif out is not None:
            self._made = out
        tokens, index, written = known
        return tokens, index, self._target(given.v, None, several) if written is None else written

    def _signature(self, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """What a call looks like whose arrays are all contiguous and of the port's framework."""
        found = []
        for array in given:
            identity = None if array is None else self._port.identity(array)
            if identity is None and array is not None:
                return None
            found.append(identity)
        return tuple(found)

    def _tokens(self, given: Tokens, several: bool) -> Tokens:
        activation, narrow = self._arrays.activation, self._arrays.activations
        if activation is None:
            names = {self._type_name(getattr(given, name), name) for name in narrow}
            activation = names.pop() if len(names) == 1 and names <= {"bfloat16", "float16"} else "float32"
        taken = (
            None if x is None else self._take(x, name, activation if name in narrow else "float32", several)
            for name, x in given._asdict().items()
        )
        tokens = Tokens(*taken)
        self._arrays.activation = activation
        return tokens

    def states(self, state: Any, slots: Any) -> Any:
        """See `sketchssm.backends.Call`."""
        return self._take(state, "state", "float32", True)

    def _target(self, v: Any, out: Any, several: bool, tokens: Iterable[Any] = ()) -> Any:
        """Find or make the array that the kernels write, which no input may share memory with."""
        arrays, port, name = self._arrays, self._port, str(self._arrays.output)
        inner = _with_tokens(v.shape, several)
        if out is not None and port.owns(out):
            device, came, address = port.describe(out)
            if device >= 0:
                arrays.check_device(device, "out")
                if came == name and address is not None and address % ALIGNMENT == 0:
                    written = arrays.wrap(address, inner, name)
                    if not any(x is not None and _meet(x, written) for x in tokens):
                        self._made = out
                        return written
        self._direct = False
        self._made = port.empty(tuple(v.shape), name)
        return arrays.wrap(_own_address(port, self._made), inner, name)

    def result(self, written: Any, v: Any, out: Any) -> Any:
        """See `sketchssm.backends.Call`."""
        made, port = self._made, self._port
        if made is out:
            return out
        if out is not None:
            if self._arrays.port(out) is None:
                return interop.from_host(_to_host(made), like=v, out=out)
            port.fill(out, made)
            return out
        found = self._local(v, "v")
        if found is None:
            return interop.from_host(_to_host(made), like=v)
        _, array, name, _ = found  # of the call's port, which is v's where there is no `out`
        if port.describe(made)[1] != name:
            made = port.converted(made, name)
        return made if array is v else export(made, v)

    def _take(self, array: Any, name: str, want: str, several: bool) -> Any:
        """A kernel's view of one argument, with a tokens axis."""
        found = self._local(array, name)
        if found is None:
            return self._upload(array, name, want, several)
        port, array, came, address = found
        if came != want:
            self._check_type(came, array, name, want)
        if came != want or address is None or address % ALIGNMENT:
            array = self._converted(port, array, want)
            address = _own_address(port, array)
        return self._arrays.wrap(address, _with_tokens(array.shape, several), want)

    def _converted(self, port: Port, array: Any, want: str) -> Any:
        self._direct = False
        self._temporary.append(port.converted(array, want))
        return self._temporary[-1]

    def _upload(self, array: Any, name: str, want: str, several: bool) -> Any:
        self._direct = False
        host = interop.to_host(array, name)
        self._check_type(host.dtype.name, host, name, want)
        wide = np.ascontiguousarray(host, dtype=host_type(want))
        if self._live is not None and name not in self._arrays.activations:
            HOST.check(name, wide[self._live])
        return self._arrays.cupy.asarray(wide.reshape(_with_tokens(wide.shape, several)).view(KERNEL_TYPES[want]))

    def _check_type(self, came: str, array: Any, name: str, want: str) -> None:
        if came not in REAL:
            raise TypeError(f"{name}: expected a real floating-point array, got dtype {array.dtype}")
        if came != want != "float32" and not self._arrays.converts:
            raise TypeError(
                f"{name}: expected {want}, which the head's first call or warmup() settled on, got {came}; "
                f"make the head with activation_dtype={want!r} to have it rounded, or with activation_dtype='float32'"
            )

    def _type_name(self, array: Any, name: str) -> str:
        found = self._local(array, name)
        return str(interop.to_host(array, name).dtype.name) if found is None else found[2]

    def _local(self, array: Any, name: str) -> tuple[Port, Any, str, int | None] | None:
        """An argument with the port that knows it, its type and address; None on the host.

        The port is the call's own, or for what is foreign to it CuPy's, after an import.
        """
        port = self._port
        if not port.owns(array):
            if self._arrays.port(array) is None:
                return None
            array, port = self._import(array), self._arrays.cupy_port
        try:
            device, came, address = port.describe(array)
        except RuntimeError as error:  # a tensor without plain memory, such as a sparse one
            raise TypeError(f"{name}: expected an array, got {type(array).__name__} ({error})") from error
        if device < 0:
            return None
        self._arrays.check_device(device, name)
        return port, array, came, address

    def _import(self, array: Any) -> Any:
        """CuPy's view of another framework's array."""
        self._direct = False
        if id(array) not in self._foreign:
            plain = array.detach() if hasattr(array, "detach") else array
            self._foreign[id(array)] = array, self._arrays.cupy_port.imported(plain)
        return self._foreign[id(array)][1]


def _with_tokens(shape: Any, several: bool) -> tuple[int, ...]:
    """A shape with a tokens axis."""
    return tuple(shape) if several else (shape[0], 1, *shape[1:])


def _own_address(port: Port, array: Any) -> int:
    """Where an array starts that was made contiguous."""
    _, _, address = port.describe(array)
    assert address is not None
    return address


def _to_host(made: Any) -> Any:
    """A copy on the host of an array that we made; waits for it."""
    host = made.get() if hasattr(made, "get") else interop.to_host(made, "out")
    return host.astype(np.float32) if host.dtype.name == "bfloat16" else host  # PyTorch takes no bf16 from NumPy


def _meet(one: Any, other: Any) -> bool:
    """Whether two contiguous arrays share memory."""
    a, b = one.data.ptr, other.data.ptr
    return bool(a < b + other.nbytes and b < a + one.nbytes)
