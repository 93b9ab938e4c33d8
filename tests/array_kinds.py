"""Arrays of unknown frameworks, and the types of known ones."""

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
REAL = (np.float16, np.float32, np.float64, BFLOAT16)
TORCH = ("float16", "float32", "float64", "bfloat16")


class Exporter:
    """An array of an unknown framework: it has DLPack and a shape only."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Elsewhere(Exporter):
    """An array in memory that the host cannot read."""

    def __dlpack__(self, **options):
        raise BufferError("the memory is on a GPU")

    def __dlpack_device__(self):
        return (2, 0)


class Convertible:
    """An array with ``__array__`` only."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def __array__(self, dtype=None, copy=None):
        return self.array


class Standard(Exporter):
    """An array with the array API's namespace."""

    def __array_namespace__(self, api_version=None):
        class Namespace:
            @staticmethod
            def from_dlpack(array):
                return Standard(np.from_dlpack(array))

        return Namespace
