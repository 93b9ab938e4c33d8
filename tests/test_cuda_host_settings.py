"""Settings of heads on the CUDA backend without a GPU: activation types, raw gates, backends, compiling."""

import os
import re
import warnings

import numpy as np
import pytest
from decode_systems import head_of
from gpu.cuda_support import EXACT, ROUNDED, STORED, make_plan, make_tokens
from host import fixtures, standin
from host.heads import BFLOAT16, LAYER, narrow, sketch, tokens_of
from samples import gate_of, refused, relative

import sketchssm as ss
from sketchssm import cuda
from sketchssm.cuda import limits, modules
from sketchssm.layer.checks import UnsupportedError
from sketchssm.layer.recurrence import FULL_STATE, Layer, Tokens

cupy = fixtures.of_heads


class TestActivations:
    @fixtures.cold
    @pytest.mark.parametrize(
        ("types", "settled"),
        [
            ((BFLOAT16, BFLOAT16, BFLOAT16), "bfloat16"),
            ((np.float32, np.float32, np.float32), "float32"),
            ((BFLOAT16, np.float32, BFLOAT16), "float32"),
            ((np.float64, np.float16, BFLOAT16), "float32"),
        ],
    )
    def test_the_first_call_decides(self, types, settled, rng):
        """It fixes the narrowest type that rounds nothing, and sketches the states that were loaded before."""
        plan = make_plan(LAYER, [7, FULL_STATE], np.random.default_rng(1), window=4)
        head, twin = ss.SketchHead(plan, 4, "cuda"), sketch("reference")
        tokens, start = tokens_of(rng), rng.standard_normal((2, *LAYER.state_shape)).astype(np.float32)
        for each in (head, twin):
            each.load_state(start, slots=[3, 1])
            each.flush()
        given = tokens._replace(**{n: x.astype(t) for n, x, t in zip("qkv", tokens[:3], types, strict=True)})
        output, want = head.step(*given), twin.step(*tokens)
        assert output.dtype == types[2]
        assert relative(output, want) < STORED["bfloat16"]
        assert relative(output[:, 3], want[:, 3]) < (ROUNDED if types[2] == BFLOAT16 else EXACT)
        other = {"bfloat16": "float32", "float32": "bfloat16"}[settled]
        refused(f"activation_dtype: expected '{settled}', the head's type", head.warmup, other)

    def test_a_refused_call_decides_nothing(self, rng):
        plan = make_plan(LAYER, [7, FULL_STATE], np.random.default_rng(1), window=4)
        head = ss.SketchHead(plan, 4, "cuda")
        tokens = tokens_of(rng)
        refused("g: expected log-decays", head.step, *tokens._replace(g=-tokens.g))
        head.warmup("bfloat16")

    def test_one_that_was_asked_for_rounds(self, rng):
        head, twin = sketch(activation="bfloat16"), sketch("reference")
        asked = ss.SketchHead(head.plan, 4, "cuda", activation_dtype="bfloat16", output_dtype="float32")
        asked.warmup()
        tokens = tokens_of(rng, activation="float32")
        output = asked.step(*tokens)
        assert output.dtype == np.float32
        wide = twin.step(*(x.astype(BFLOAT16).astype(float) if i < 3 else x for i, x in enumerate(tokens)))
        assert relative(output[:, 3], wide[:, 3]) < EXACT


class TestRawGates:
    """Raw gate inputs have the type of the activations, and keep it in the ring."""

    LAYER = Layer("kda", 2, 64, 64, 2)

    def pair(self, system, bound=None, **options):
        """A head on the device and one of the reference."""
        gate = gate_of(np.random.default_rng(2), self.LAYER, bound)
        plan = make_plan(self.LAYER, [7, FULL_STATE], np.random.default_rng(1), window=4)

        device, twin = (head_of(system, plan, 4, x, gate=gate, **o) for x, o in (("cuda", options), ("reference", {})))
        return device, twin, gate

    @fixtures.cold
    @pytest.mark.parametrize("bound", [None, -5.0])
    @pytest.mark.parametrize("system", ["standard", "replay", "sketch"])
    @pytest.mark.parametrize("place", [np.asarray, standin.asarray])
    def test_outputs_and_states(self, place, system, bound, rng):
        head, twin, gate = self.pair(system, bound)
        tokens, slots = make_tokens(self.LAYER, 3, 10, "bfloat16", rng, gate=gate), [2, -1, 0]
        given = Tokens(*(place(x if name == "beta" else x.astype(BFLOAT16)) for name, x in tokens._asdict().items()))
        output, want = head.step(*given, slots=slots), twin.step(*tokens, slots=slots)
        assert type(output) is type(given.v)
        assert relative(output, want) < (STORED["bfloat16"] if system == "sketch" else ROUNDED)
        for each in (head, twin):
            each.flush()
        assert relative(head.state, twin.state) < EXACT
        if system != "standard":
            assert [x.dtype.itemsize for x in head._engine.slots.ring] == [2, 2, 2, 4]

    @fixtures.cold
    def test_types(self, rng):
        """Gate inputs count like q, k and v when the head settles on a type, and are refused or rounded like them."""
        head, twin, gate = self.pair("replay")
        tokens = make_tokens(self.LAYER, 3, 5, "float32", rng, gate=gate)
        q, k, v = (x.astype(BFLOAT16) for x in tokens[:3])
        output = head.step(q, k, v, tokens.g, tokens.beta)
        assert relative(output, twin.step(q, k, v, tokens.g, tokens.beta)) < ROUNDED
        assert head._engine.slots.ring[2].dtype == np.float32
        narrow, twin, _ = self.pair("replay")
        narrow.warmup("bfloat16")
        refused("g: expected bfloat16, which the head's first call or", narrow.step, q, k, v, tokens.g, tokens.beta)
        asked, _, _ = self.pair("replay", activation_dtype="bfloat16")
        output = asked.step(q, k, v, tokens.g, tokens.beta)
        want = twin.step(q, k, v, tokens.g.astype(BFLOAT16), tokens.beta)
        assert relative(output, want) < ROUNDED


class TestBackends:
    def test_auto_takes_the_device_where_there_is_one(self, monkeypatch):
        assert ss.StandardHead(LAYER, 2).backend == "cuda"
        with pytest.warns(
            RuntimeWarning, match=r"^backend: 'auto' takes 'cpu': key_dim: the CUDA kernels don't"
        ) as said:
            assert ss.StandardHead(Layer("gdn", 2, 33, 80), 2).backend == "cpu"
        assert len(said) == 1
        assert said[0].filename == __file__
        assert ss.QuantisedHead(LAYER, 2).backend == "cpu"  # without a warning: it has CUDA kernels for no layer
        monkeypatch.setattr(standin.cuda, "is_available", lambda: False)
        assert ss.StandardHead(LAYER, 2).backend == "cuda"  # looked up once
        cuda.missing.cache_clear()
        assert ss.StandardHead(LAYER, 2).backend == "cpu"

    @pytest.mark.parametrize(
        ("patch", "why"),
        [
            (lambda m: m.setattr(cuda.importlib.util, "find_spec", lambda name: None), "CuPy is not installed"),
            (lambda m: m.setattr(standin.cuda, "is_available", lambda: False), "CuPy sees no CUDA device"),
            (lambda m: m.setattr(standin.cuda, "is_available", lambda: 1 / 0), "CuPy does not work: division by zero"),
            (
                lambda m: m.setattr(standin.cuda.runtime, "driverGetVersion", lambda: 11080),
                "the driver is for CUDA 11.8, expected 12.0 or later",
            ),
        ],
    )
    def test_without(self, patch, why, monkeypatch):
        patch(monkeypatch)
        with pytest.raises(UnsupportedError, match=rf"^backend: 'cuda' can't run here: {why}"):
            ss.StandardHead(LAYER, 2, "cuda")
        assert ss.StandardHead(LAYER, 2).backend == "cpu"

    @pytest.mark.parametrize(
        ("layer", "window", "pivots", "message"),
        [
            (Layer("gdn", 2, 80, 80), 16, 4, "key_dim: the CUDA kernels don't support 80"),
            (Layer("kda", 2, 192, 64), 16, 4, "key_dim: the CUDA kernels don't support 192"),
            (Layer("gdn", 2, 64, 72), 16, 4, "value_dim: the CUDA kernels don't support 72"),
            (Layer("gdn", 2, 64, 272), 16, 4, "value_dim: the CUDA kernels don't support 272"),
            (LAYER, 12, 4, "window: the CUDA kernels don't support 12"),
            (LAYER, 16, 9, "pivots: the CUDA kernels don't support 9"),
        ],
    )
    def test_unsupported(self, layer, window, pivots, message, rng):
        plan = make_plan(layer, [12] * layer.heads, rng, window=window, pivots=pivots)
        words = rf"^{message}; they support {re.escape(limits.SUPPORTED)}"
        with pytest.raises(UnsupportedError, match=words):
            ss.SketchHead(plan, 2, "cuda")
        if pivots == 4:
            with pytest.raises(UnsupportedError, match=words):
                ss.ReplayHead.parts_of(layer, "cuda", window=window, activation_dtype="bfloat16")
        with pytest.warns(RuntimeWarning, match=rf"^backend: 'auto' takes 'cpu': {message}"):
            assert ss.SketchHead(plan, 2).backend == "cpu"

    def test_ranks(self, rng):
        plan = make_plan(LAYER, [3, 17], rng, map="ridge")
        message = (
            rf"ranks: expected at most 16 on backend 'cuda', got 17 for head 1 of {re.escape(str(LAYER))}; "
            r"allocate with rank_max=16 or with residual bits, or take backend 'cpu'$"
        )
        with pytest.raises(UnsupportedError, match=f"^{message}"):
            ss.SketchHead(plan, 1, "cuda")
        with pytest.raises(UnsupportedError, match=f"^{message}"):
            ss.SketchHead.parts_of(plan, "cuda")
        with pytest.warns(RuntimeWarning, match=f"^backend: 'auto' takes 'cpu': {message}"):
            assert ss.SketchHead(plan, 1).backend == "cpu"

    def test_shared_memory(self, monkeypatch):
        """On a device with less shared memory the message names the largest rank that fits, and this rank does fit."""
        monkeypatch.setattr(standin, "sizes_only", True)
        monkeypatch.setattr(modules, "_modules", {})
        rng = np.random.default_rng(1)
        wide = make_plan(LAYER, [16, 7], rng, map="ridge", ridge=0.01, window=32)
        constants = ss.SketchHead(wide, 1, "cuda")._engine.variants()[1]
        module = modules.load(modules.Variant("flush", dict(constants.constants) | {"RANK_MAX": 8}))
        limit = modules.size_of(module, "flush_shared_bytes")
        monkeypatch.setitem(
            standin.cuda.Device.attributes, "MaxSharedMemoryPerBlockOptin", limit + limits.STATIC_SHARED
        )
        with pytest.raises(UnsupportedError, match=r"^plan: rank 16 with window 32 needs") as refused:
            ss.SketchHead(wide, 1, "cuda")
        assert f"has {limit}; " in str(refused.value)
        rank = int(re.search(r"window 32 fits with ranks of up to (\d+)", str(refused.value))[1])
        assert 8 <= rank < 16
        ss.SketchHead(make_plan(LAYER, [rank, 7], rng, map="ridge", ridge=0.01, window=32), 1, "cuda")
        module = modules.load(modules.Variant("flush", dict(constants.constants) | {"RANK_MAX": rank + 1}))
        assert modules.size_of(module, "flush_shared_bytes") > limit


class TestCompiling:
    def test_a_late_kernel_warns_once(self, rng, monkeypatch):
        monkeypatch.setattr(modules, "_modules", {})
        tokens = narrow(tokens_of(rng, length=1))
        with pytest.warns(RuntimeWarning, match=r"^loading kernel standard in the middle of decoding") as record:
            ss.StandardHead(LAYER, 4, "cuda").step(*tokens)
        assert [w.filename for w in record] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ss.StandardHead(LAYER, 4, "cuda").step(*tokens)
            sketch().step(*tokens)

    def test_an_error_shows_source_options_and_log(self, monkeypatch):
        monkeypatch.setattr(modules, "_modules", {})
        monkeypatch.setattr(modules, "source_text", lambda operation: "nothing that C++ knows\n")
        head = ss.StandardHead(LAYER, 4, "cuda")
        with pytest.raises(modules.KernelCompileError) as raised:
            head.warmup()
        assert re.match(r"standard\.cu \(in .*cuda_src\) did not compile with .* -DHEADS=2 .*", str(raised.value))
        assert "error: 'nothing' does not name a type" in str(raised.value).replace("‘", "'").replace("’", "'")

    def test_a_full_disk_is_no_error(self, rng, monkeypatch):
        """Where CuPy cannot write its cache, kernels are compiled without it, with one warning."""
        compile_it = standin.RawModule.compile

        def with_cache(module):
            if os.environ.get("CUPY_CACHE_IN_MEMORY") != "1":
                raise OSError(28, "No space left on device")
            compile_it(module)

        monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "0")
        monkeypatch.setattr(modules, "_modules", {})
        monkeypatch.setattr(standin.RawModule, "compile", with_cache)
        with pytest.warns(RuntimeWarning, match=r"^CuPy can't keep compiled kernels on disk \(.*No space") as record:
            head = sketch(activation="float32")
        assert len(record) == 1
        head.step(*tokens_of(rng, length=1))

    @pytest.mark.parametrize("backend", ["reference", "cpu", "cuda"])
    def test_warmup_leaves_no_trace(self, backend, rng):
        head, twin = sketch(backend), sketch(backend)
        start, tokens = rng.standard_normal((4, *LAYER.state_shape)).astype(np.float32), narrow(tokens_of(rng))
        for each in (head, twin):
            each.load_state(start)
            each.step(*tokens)
        head.warmup()
        np.testing.assert_array_equal(head.position, twin.position)
        np.testing.assert_array_equal(head.step(*tokens), twin.step(*tokens))
        np.testing.assert_array_equal(head.state, twin.state)
