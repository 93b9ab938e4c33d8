"""Hugging Face transformers: find, record and calibrate a model's recurrent layers, and decode with heads.

Four recurrences of transformers have heads: the gated delta rule (Qwen3-Next), Kimi Delta Attention (Kimi-Linear),
Mamba-2 (Bamba) and lightning attention (MiniMax), in all classes that have them. Modeling files of transformers call
the first three through two functions of the file, and these are replaced while a patched layer runs
(`sketchssm.transformers.interception`). MiniMax has its recurrence inline, and gets another forward meanwhile
(`sketchssm.transformers.lightning`).
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
