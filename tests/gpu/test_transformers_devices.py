"""A model of transformers whose layers are on two GPUs: each head is on the device of its layer."""

import pytest
from tiny_models import generate, make, prompt

import sketchssm as ss

pytestmark = pytest.mark.gpu


def across(model, torch):
    """Move the second layer to another device, as accelerate does for a `device_map`."""

    def moved(device, given):
        return torch.utils._pytree.tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, given)

    layer = model.to("cuda:0").model.layers[1].to("cuda:1")
    layer.register_forward_pre_hook(lambda _, x, named: (moved("cuda:1", x), moved("cuda:1", named)), with_kwargs=True)
    layer.register_forward_hook(lambda _, x, out: moved("cuda:0", out))
    return model


@pytest.mark.parametrize("kind", ("float32", "bfloat16"))
def test_layers_on_two_devices(torch, cupy, kind):
    """In bfloat16, too, exact heads predict what transformers predicts, as they take activations in float32."""
    pytest.importorskip("transformers", minversion="5.20")
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two CUDA devices")
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    model = across(make("Qwen3_5", **sizes).to(getattr(torch, kind)), torch)
    ids = prompt().cuda(0)
    want = generate(model, ids).sequences
    with ss.transformers.patch(model, "standard", slots=2, backend="cuda") as patch:
        assert [head.state.device.id for head in patch.heads.values()] == [0, 1]
        got = generate(model, ids).sequences
    if kind == "float32":
        assert torch.equal(got, want)
    found = ss.transformers.evaluate(model, prompt(2, 40, seed=8), "replay", backend="cuda")
    assert found.divergence < 1e-5  # rounded outputs may differ in a bit
