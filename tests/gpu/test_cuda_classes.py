"""Every class of transformers decodes on the device with its own plans, as the CPU kernels do."""

import pytest
from tiny_models import MORE, SETTINGS, generate, make, prompt

import sketchssm as ss

pytestmark = pytest.mark.gpu

DELTA = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
MAMBA = {"mamba_d_state": 64, "mamba_d_head": 64, "mamba_expand": 8}
SIZES = dict.fromkeys(SETTINGS | MORE, DELTA) | {
    "OlmoHybrid": {"linear_key_head_dim": 96, "linear_value_head_dim": 192}, "KimiLinear": {"linear_head_dim": 64},
    "Glm5Next": {"linear_head_dim": 64}, "BailingHybrid": {"head_dim": 64}, "MiniMax": {"head_dim": 64},
    "Mamba2": {"state_size": 64, "head_dim": 64, "expand": 8},
    "NemotronH": {"ssm_state_size": 64, "mamba_head_dim": 64}, "Zamba2": {"mamba_d_state": 64, "mamba_expand": 8},
    "FalconH1": MAMBA | {"mamba_d_ssm": 256, "mamba_d_state": 256, "mamba_n_groups": 1}, "Bamba": MAMBA,
    "GraniteMoeHybrid": MAMBA,
}  # fmt: skip
"""Settings with which a tiny model of a class has a shape with kernels: where it is unusual, the shipped one."""


@pytest.mark.filterwarnings("ignore:.*on the host")  # heads on the CPU get arrays of the device
@pytest.mark.parametrize("name", SIZES)
def test_plans_decode_on_the_device(torch, cupy, name):
    pytest.importorskip("transformers", minversion="5.24")
    model = make(name, **SIZES[name]).to("cuda")  # where fla is installed, transformers needs it there
    plans = ss.transformers.calibrate(model, prompt(3, 24).to("cuda"), mean_rank=3, window=4)
    logits = []
    for backend in ("cpu", "cuda"):
        with ss.transformers.patch(model, plans, slots=2, backend=backend) as patch:
            assert {head.backend for head in patch.heads.values()} == {backend}
            found = generate(model, prompt().to("cuda"), tokens=2)
        logits.append(torch.stack(found.logits).float().cpu())
    # Sketches are bf16 on both; a column that is rounded the other way changes logits of up to 4 by a few 2^-8.
    torch.testing.assert_close(*logits, atol=0.1, rtol=0)
