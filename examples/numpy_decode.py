"""The main job in NumPy: calibrate on traces, allocate ranks and bits, save a plan, decode with it.

The traces are those of a small Gated DeltaNet layer, which the package contains. docs/howto-traces.md shows how to
record your own.
"""

import numpy as np

import sketchssm as ss

traces = ss.Traces.shipped("gdn")
layer = traces.layer

# Once per layer. The basis is fitted on some sequences; ranks and bits of residuals are scored on others.
moments = ss.Moments(layer, window=16)
moments.update(*traces.fit_part())
basis = ss.fit_basis(moments, rank_max=16)

scores = ss.JointScores(basis)
tokens, grad = traces.score_part()
scores.update(*tokens, grad=grad)
allocation = ss.allocate_joint(scores, reduction=9)
ss.SketchPlan(basis, allocation, map="subspace").save("layer.safetensors")
print(f"ranks {allocation.ranks.tolist()}, bits {allocation.residual_bits.tolist()}")
print(f"no allocation within the budget is better by more than {allocation.gap:.1%}")

# When serving: one head object holds all heads of the layer, for all requests. Here each test sequence is a request.
plan = ss.SketchPlan.load("layer.safetensors")
print(plan)
requests, length = traces.test.v.shape[:2]
sketch, standard = ss.SketchHead(plan, requests, backend="cpu"), ss.StandardHead(layer, requests, backend="cpu")
error = energy = 0.0
for t in range(length):
    q, k, v, g, beta = (x[:, t] for x in traces.test)
    exact, output = standard.step(q, k, v, g, beta), sketch.step(q, k, v, g, beta)
    error += np.square(output - exact).sum()
    energy += np.square(exact).sum()

# The state itself is exact: the difference is float32 rounding.
sketch.flush()
drift = np.linalg.norm(sketch.state - standard.state) / np.linalg.norm(standard.state)
assert drift < 1e-5

print(f"{length} tokens of {requests} requests: squared error of the outputs {error / energy:.1e} of their energy")
print(f"state traffic: {plan.reduction:.1f}x less than standard decode")
print(f"difference of the final states: {drift:.1e}")
