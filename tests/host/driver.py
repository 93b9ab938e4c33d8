"""The driver's functions as C++ calls them, on the stand-in's kernels; for tests of ``sketchssm.cuda._direct``."""

import ctypes
import sys

from host import standin

word = ctypes.c_void_p
SIGNATURES = {
    "launch": (word,) * 4,
    "get_context": (ctypes.POINTER(word),),
    "set_context": (word,),
    "capture_status": (word, ctypes.POINTER(ctypes.c_int)),
}


class Driver:
    """Functions with addresses. An error of Python's is kept in `raised`, and its status is 999."""

    def __init__(self):
        self.context, self.contexts = 1, []  # the current one, and all that were set
        self.capturing, self.answers = 0, {}  # by function: answers to come; None is the function's own
        self.launches, self.raised = 0, []
        self._functions = [self._function(name, kinds) for name, kinds in SIGNATURES.items()]

    def _function(self, name, kinds):
        call = getattr(self, f"_{name}")

        def answer(*given):
            status = self.answers[name].pop(0) if self.answers.get(name) else None
            if status is not None:
                return status
            try:
                call(*given)
            except BaseException as error:
                self.raised.append(error)
                return 999
            return 0

        return ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(answer)

    def _launch(self, config, function, pointers, extra):
        assert extra is None
        assert self.context == 1
        self.launches += 1
        standin.launch_kernel(config, function, pointers, extra)

    def _get_context(self, where):
        where[0] = self.context

    def _set_context(self, context):
        self.contexts.append(context)
        self.context = context

    def _capture_status(self, stream, where):
        where[0] = self.capturing

    def addresses(self):
        """In the order that C++ expects."""
        return tuple(ctypes.cast(function, word).value for function in self._functions)


def install(monkeypatch, torch, extension):
    """Tensors of the host are on the device, with the extension in use, on top of `standin.install`."""
    from sketchssm.arrays import interop
    from sketchssm.cuda import direct, frameworks

    driver = Driver()
    monkeypatch.setitem(sys.modules, "sketchssm.cuda._direct", extension)
    monkeypatch.setattr(direct, "driver_addresses", driver.addresses)
    monkeypatch.setattr(interop, "CUDA_DEVICES", (1,))  # DLPack's number for the host
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 0, raising=False)
    monkeypatch.setattr(frameworks.TorchArrays, "stream", lambda self: self.__dict__.update(_device="cpu"))
    monkeypatch.setattr(frameworks.TorchArrays, "stream_address", lambda self: 0)
    return driver
