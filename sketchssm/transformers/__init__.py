"""Hugging Face transformers: find, record and calibrate a model's recurrent layers, and decode with heads.

Three recurrences of transformers have heads: the gated delta rule (Qwen3-Next, Qwen3.5, OLMo-Hybrid), Kimi Delta
Attention (Kimi-Linear) and Mamba-2 (Mamba-2, Bamba, Nemotron-H, Zamba2, Falcon-H1). No model code is copied: each
modeling file of transformers calls its recurrence through two functions of the file, and these are replaced while a
patched layer runs (`sketchssm.transformers.modeling`).
"""

from importlib.util import find_spec

if missing := [name for name in ("torch", "transformers") if find_spec(name) is None]:
    raise ModuleNotFoundError(
        f"sketchssm.transformers needs {' and '.join(missing)}; install with: "
        "pip install 'sketchssm-decode[transformers]'"
    )

from sketchssm.plans.model_plans import ModelPlans
from sketchssm.transformers.calibration import calibrate, collect
from sketchssm.transformers.evaluation import LayerTraffic, ModelEvaluation, evaluate
from sketchssm.transformers.identity import fingerprint
from sketchssm.transformers.importing import import_calibration
from sketchssm.transformers.modeling import RecurrentLayer, layers
from sketchssm.transformers.patching import Patch, patch, unpatch
from sketchssm.transformers.recall import recall
from sketchssm.transformers.recording import Recording, record

__all__ = [
    "LayerTraffic",
    "ModelEvaluation",
    "ModelPlans",
    "Patch",
    "Recording",
    "RecurrentLayer",
    "calibrate",
    "collect",
    "evaluate",
    "fingerprint",
    "import_calibration",
    "layers",
    "patch",
    "recall",
    "record",
    "unpatch",
]
