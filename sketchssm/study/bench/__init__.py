"""Benchmarks: step times of decode systems, averaged over a window, compared with the measured memory bandwidth.

The cost of a step depends on its position in the window: the ring grows, and the last token flushes. Every position is
timed, and the result is the mean over positions. The floor is the number of bytes that the operation must move / the
copy bandwidth measured in the same run. Each result also has the error of the outputs of the same run.

`measure_host` times heads on this machine's CPU, `measure_device` on a GPU, `measure_peer` kernels of other libraries.
`time_cases` runs a list of cases with the three. `time_calibration` times the sums from which plans are made.
"""

from sketchssm.study.bench.authors import measure_authors
from sketchssm.study.bench.calibration import calibration_table, time_calibration
from sketchssm.study.bench.cases import Case, Report, time_cases
from sketchssm.study.bench.device import Workload, compile_all, device_bandwidth, device_name, measure_device
from sketchssm.study.bench.host import available_cores, copy_bandwidth, measure_host
from sketchssm.study.bench.peers import PEERS, measure_peer
from sketchssm.study.bench.results import step_bytes
from sketchssm.study.bench.shapes import COMMON, MEAN_RANKS, SHAPES, SHIPPED
from sketchssm.study.bench.tables import time_tables
from sketchssm.study.bench.workloads import random_gate, random_plan, random_tokens, spread_ranks, systems

__all__ = [
    "COMMON", "MEAN_RANKS", "PEERS", "SHAPES", "SHIPPED", "Case", "Report", "Workload", "available_cores",
    "calibration_table", "compile_all", "copy_bandwidth", "device_bandwidth", "device_name", "measure_authors",
    "measure_device", "measure_host", "measure_peer", "random_gate", "random_plan", "random_tokens", "spread_ranks",
    "step_bytes", "systems", "time_calibration", "time_cases", "time_tables",
]  # fmt: skip
