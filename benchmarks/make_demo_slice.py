"""Cut the traces that ship with the package from full ones.

    python benchmarks/make_demo_slice.py TRACES.npz OUT.npz --calib 3 --test 1 --tokens 224

The shipped files are cut from layer 1 of each kind. Of the two recorded layers, this is the layer of which the paper's
map retains less, so the demo is not the better case. Values are rounded to bfloat16 (gradients, which only rank scores
use, to float8) and stored in float16, so that deflate can compress them. Only the sequences for rank scores have
gradients.
"""

import argparse

import ml_dtypes
import numpy as np

from sketchssm.calibrate.traces import Traces

PROVENANCE = """\
Inputs of recurrent layer {layer} of a 17 M parameter {kind} hybrid language model, trained for a few minutes on
English prose, technical documentation and some Python from public Debian packages; the sequences are text from the
same sources. The first {tokens} tokens of {calib} calibration and {test} test sequences, rounded to bfloat16."""
LICENCE = "Apache-2.0, as the project; the arrays are activations of a throw-away model and hold no text"


def rounded(x, dtype=ml_dtypes.bfloat16):
    """Round to a shorter mantissa within float16, without subnormals, which would cost bytes."""
    short = x.astype(np.float32).astype(dtype).astype(np.float32)
    return np.where(np.abs(short) < np.finfo(np.float16).smallest_normal, 0, short).astype(np.float16)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces")
    parser.add_argument("out")
    parser.add_argument("--calib", type=int, default=3)
    parser.add_argument("--test", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=224)
    parser.add_argument("--layer", default="1", help="how the provenance note names the layer")
    options = parser.parse_args()

    whole = Traces.load(options.traces)
    arrays = {}
    for part, rows in (("calib", options.calib), ("test", options.test)):
        for name, values in getattr(whole, part)._asdict().items():
            if values is not None:
                cut = values[:rows, : options.tokens]
                # a scalar log-decay adds up over hundreds of tokens and is small: it stays as it is
                keep = name == "g" and not whole.layer.channel_decays
                arrays[f"{part}_{name}"] = cut if keep else rounded(cut)
    if whole.grad is not None:
        scored = slice(options.calib - max(options.calib // 3, 1), options.calib)
        arrays["calib_grad"] = rounded(whole.grad[scored, : options.tokens], ml_dtypes.float8_e5m2)
    note = PROVENANCE.format(kind=whole.layer.kind, **vars(options))
    np.savez_compressed(options.out, **arrays, kind=whole.layer.kind, provenance=note, licence=LICENCE)


if __name__ == "__main__":
    main()
