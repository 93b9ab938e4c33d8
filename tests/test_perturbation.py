"""Weights of errors by forward perturbation: their definition, and beside gradients on tiny models."""

import copy
import json
import warnings

import numpy as np
import pytest
from samples import refused
from tiny_models import make, prompt, qwen, st, torch, transformers

import sketchssm as ss
from sketchssm.transformers import perturbation
from sketchssm.transformers.perturbation import divergence, noisy, output_weights

__all__ = ["qwen"]  # a fixture

TEXT = prompt(3, 48, seed=7)
SETTINGS = {"window": 4, "scores": ("ranks",)}


@pytest.mark.parametrize("heads", (3, 8))
def test_weights_of_a_linear_block(heads):
    """Heads that a block scales: the weight is the squared scale over the energy of the block's output."""
    random = torch.Generator().manual_seed(0)
    out = torch.randn(2, 40, heads, 16, generator=random)
    out[0, 3] = 0  # nothing to perturb
    scales = torch.arange(1.0, heads + 1)[:, None]

    def run(x):
        return 5 + (x * scales).flatten(-2)

    weights = output_weights(run, out, run(out))
    passes = min(perturbation.PASSES, heads)
    assert (weights[0, 3] == 0).all()
    assert ((weights > 0).sum(-1) == passes).flatten().sum() == 2 * 40 - 1
    want = scales[:, 0].square() / run(out).square().sum(-1, keepdim=True) * heads / passes
    # differences of float32 numbers, of a 250th of the output and more
    torch.testing.assert_close(weights, torch.where(weights > 0, want, 0.0), rtol=1e-3, atol=0)


def test_noise_and_divergence():
    whole = torch.randn(1, 5, 2, 8, generator=torch.Generator().manual_seed(0))
    change = (noisy(whole) - whole).flatten(2).norm(dim=-1) / whole.flatten(2).norm(dim=-1)
    torch.testing.assert_close(change, torch.full((1, 5), perturbation.NOISE), rtol=1e-5, atol=0)  # float32
    random = torch.randn(2, 150, 11, generator=torch.Generator().manual_seed(1))
    for exact, other in (random, 1e-4 * random):  # the divergence of the second is below the rounding of float32
        p, q = exact.double().softmax(-1), other.double().softmax(-1)
        want = float((p * (p / q).log()).sum(-1).mean()) / perturbation.NOISE**2
        assert divergence(exact, other) == pytest.approx(want, rel=1e-6)
    assert divergence(exact, exact) == 0


def curves(calibration, method=None):
    """Logarithms of the scores of rank 1."""
    return np.log(np.concatenate([x.ranks.objective(method)[:, 1] for x in calibration.layers.values()]))


@pytest.mark.parametrize("name", ("OlmoHybrid", "KimiLinear", "NemotronH"))
def test_scores_are_like_those_by_gradients(name):
    """Correlations over heads were 0.89 to 0.97, of scores by error -0.10, 0.09 and 0.91; both scores are in nats."""
    model = make(name).train()
    exact = st.collect(model, TEXT, method="gradient", **SETTINGS)
    found = st.collect(model, TEXT, method="perturbation", **SETTINGS)
    assert model.training
    assert not any(vars(module).get("_forward_hooks") for module in model.modules())
    assert np.corrcoef(curves(exact), curves(found))[0, 1] > 0.8
    assert abs(np.median(curves(exact) - curves(found))) < np.log(20)  # a tiny model's head counts 10 times
    assert found.plans(2).allocation.method == "perturbation"


class Detached(torch.nn.Module):
    """A stand-in for quantised weights without a backward pass."""

    def __init__(self, weight, fails):
        super().__init__()
        self.weight, self.fails = weight, fails

    def forward(self, x):
        if self.fails and x.requires_grad:
            raise NotImplementedError("no backward kernel")
        return torch.nn.functional.linear(x, self.weight).detach()


@pytest.mark.parametrize("fails", (False, True))
def test_models_without_a_backward_pass(qwen, fails, tmp_path):
    """Ranks are scored by perturbation, with a warning that names the layer and the kind of weights."""
    model = copy.deepcopy(qwen)
    model.quantization_method = "fp8"
    model.lm_head = Detached(model.lm_head.weight, fails)
    lack = r"method: .*the backward pass of weights quantised by fp8 gives model\.layers\.0\.linear_attn no gradient"
    lack += r" \(no backward kernel\)" if fails else ""
    with pytest.warns(RuntimeWarning, match=rf"^{lack}; ranks are scored by perturbation$"):
        plans = st.calibrate(model, TEXT, mean_rank=2, window=4)
    assert plans.allocation.method == "perturbation"
    want = st.calibrate(qwen, TEXT, mean_rank=2, window=4, method="perturbation")
    assert {n: x.fingerprint for n, x in plans.items()} == {n: x.fingerprint for n, x in want.items()}
    with pytest.warns(RuntimeWarning):
        plans = st.calibrate(model, TEXT, reduction=1.7, window=4)
    assert plans.allocation.method == "joint-perturbation"
    with pytest.raises(ValueError, match=rf"{lack}; expected 'perturbation', 'error' or 'uniform'$"):
        st.calibrate(model, TEXT, window=4, mean_rank=3, method="gradient")
    with pytest.raises(ValueError, match=r"^prompts: expected None, as an answer needs gradients .*; got 3 rows$"):
        st.calibrate(model, TEXT, reduction=1.7, window=4, prompts=TEXT, answers=torch.ones_like(TEXT, dtype=bool))
    kept = st.collect(qwen, TEXT, window=4, method="perturbation")
    kept.save(tmp_path / "kept.safetensors")
    loaded = ss.Calibration.load(tmp_path / "kept.safetensors")
    assert loaded.plans(reduction=1.7).allocation.method == "joint-perturbation"
    refused("method: expected 'perturbation' of the joint scores or", loaded.plans, reduction=1.7, method="gradient")


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
@pytest.mark.parametrize("bits", (8, 4))
def test_quantised_weights(bits, tmp_path):
    """bitsandbytes on the CPU: fingerprints stay when weights are packed, and when a folder is loaded."""
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    from sketchssm.transformers.loading import ModelText

    sizes = {"hidden_size": 128, "intermediate_size": 128, "linear_num_key_heads": 4}
    make("Qwen3_5", **sizes, linear_key_head_dim=32, linear_value_head_dim=32, head_dim=64).save_pretrained(
        tmp_path / "whole"
    )
    kind = {f"load_in_{bits}bit": True, "llm_int8_skip_modules": ["in_proj_a", "in_proj_b", "lm_head"]}
    config = transformers.BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.float32, **kind)
    how = {"quantization_config": config, "device_map": "cpu"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole", **how)
    before = st.fingerprint(model)
    with warnings.catch_warnings():  # where 4-bit weights are packed, they have no backward pass
        warnings.filterwarnings("ignore", "method: the backward pass of weights quantised by bitsandbytes")
        plans = st.calibrate(model, TEXT, mean_rank=2, window=4)
    assert plans.allocation.method in ("gradient", "perturbation")[: 2 if bits == 4 else 1]
    assert before == plans.fingerprint == st.fingerprint(model)
    model.save_pretrained(tmp_path / "quantised")
    loaded = ModelText(tmp_path / "quantised", None, 1, 8, "auto", "cpu").load_model()
    assert st.fingerprint(loaded) == before


class Packed(torch.Tensor):
    """A stand-in for weights of torchao."""

    def reshape(self, *shape):
        raise NotImplementedError

    def dequantize(self):
        return self.as_subclass(torch.Tensor)


def test_the_digest_of_packed_weights_is_that_of_their_values():
    model = make("Qwen3_5")
    before = st.fingerprint(model)
    projection = model.model.layers[0].linear_attn.out_proj
    projection.weight = torch.nn.Parameter(projection.weight.detach().as_subclass(Packed))
    assert st.fingerprint(model) == before


def test_the_digest_of_weights_in_buffers_is_that_of_their_scales():
    """As GPTQ keeps them. Other buffers, such as those of Falcon-H1 in float, are left out."""
    model = make("FalconH1")
    mixer, packed = model.model.layers[0].mamba, torch.nn.Module()
    packed.register_buffer("qweight", torch.arange(32, dtype=torch.int32))
    packed.register_buffer("scales", torch.rand(2, 32).half())
    mixer.out_proj = packed
    before = st.fingerprint(model)
    mixer.mup_vector, packed.qweight = mixer.mup_vector + 1, packed.qweight.flip(0)
    packed.scales = packed.scales.float()
    assert st.fingerprint(model) == before
    packed.scales = packed.scales * 1.01
    assert "layer model.layers.0.mamba: expected parameters with SHA-256" in before.difference(st.fingerprint(model))


def test_weights_in_fp8_on_the_cpu(tmp_path):
    """transformers converts them to bfloat16."""
    pytest.importorskip("accelerate")
    from safetensors.torch import load_file, save_file

    from sketchssm.transformers.loading import ModelText

    make("Qwen3_5").to(torch.bfloat16).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name in [name for name in weights if name.endswith(("_proj.weight", "_qkv.weight", "_z.weight"))]:
        weights[name] = weights[name].to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    form = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": form}))
    model = ModelText(tmp_path, None, 1, 8, "auto", "cpu").load_model()
    weight = model.model.layers[0].linear_attn.out_proj.weight
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight, weights["model.layers.0.linear_attn.out_proj.weight"].to(torch.bfloat16))
    assert st.calibrate(model, TEXT, mean_rank=2, window=4).allocation.method == "gradient"
