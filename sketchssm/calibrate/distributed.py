"""Calibration in several processes, through torch.distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sketchssm.calibrate.moments import FORMAT, Moments
from sketchssm.calibrate.sums import added

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["all_reduce_moments"]


def all_reduce_moments(moments: Moments, group: ProcessGroup | None = None) -> Moments:
    """Add up the moments of all processes of a group; each process gets the total.

    Every process of the group calls this function, with the moments of its own sequences. Without torch.distributed,
    save the moments of each process, load all files and add them: moments have a ``+``.

    Parameters
    ----------
    moments : Moments
        Sums of this process, which stay as they are. A process without data passes new `Moments`.
    group : torch.distributed.ProcessGroup, optional
        The processes. Default: all.

    Returns
    -------
    Moments
        The total, the same on every process. The sums are float64, so the number of processes changes only their
        rounding.

    Raises
    ------
    ValueError
        On every process, if layer or window differ between processes, or a total is above 1e100.
    """
    import torch
    from torch import distributed

    settings = {name: getattr(moments, name) for name in ("layer", "window")}
    others = [settings] * distributed.get_world_size(group)
    distributed.all_gather_object(others, settings, group)
    for rank, other in enumerate(others):
        for name, value in others[0].items():
            if other[name] != value:
                raise ValueError(
                    f"moments: expected the same {name} in all processes, got {value} in process 0 and {other[name]} "
                    f"in process {rank} of the group"
                )
    device = "cuda" if distributed.get_backend(group) == "nccl" else "cpu"
    total = Moments(**{"kind" if name == "layer" else name: value for name, value in settings.items()})
    sums = {name: torch.from_numpy(getattr(moments, name)).to(device, copy=True) for name in FORMAT.tensors}
    for summed in sums.values():
        distributed.all_reduce(summed, group=group)
    total.__dict__.update(added(total, {name: summed.cpu().numpy() for name, summed in sums.items()}))
    return total
