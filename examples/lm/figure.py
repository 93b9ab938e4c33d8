"""The picture of a comparison: what systems do to loss and to recall, against their traffic."""

from pathlib import Path

from sketchssm.plots import COLOURS, MARKERS, STYLE

FLOOR = 1e-4
"""Loss increases are drawn on a logarithmic scale above this, on a linear one below: some are zero or less."""


def draw(kind, results, without, path):
    """Draw results of `evaluate` into a PNG or SVG file.

    Parameters
    ----------
    kind : str
        The model's kind of recurrence.
    results : list of Result
        What the systems did; each family is one line.
    without : float
        Recall with the states wiped.
    path : str or PathLike
        Where to.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    families = {}
    for result in results:
        families.setdefault(result.family, []).append(result)
    with pyplot.rc_context(STYLE):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.5, 4.2), layout="constrained")
        for i, (family, members) in enumerate(families.items()):
            members = sorted(members, key=lambda x: x.reduction)
            traffic = [x.reduction for x in members]
            look = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "label": family}
            left.errorbar(traffic, [x.increase for x in members], [x.increase_error for x in members], **look)
            right.plot(traffic, [100 * x.recall for x in members], **look)
        left.set_yscale("symlog", linthresh=FLOOR)
        left.set(ylabel="loss above standard decoding (nats a token)", title="Test text")
        right.axhline(100 * without, color="#777777", linestyle=":", label="states wiped after prefill")
        right.set(ylabel="needles recalled (%)", ylim=(0, 103), title="Needle prompts")
        for axes in (left, right):
            axes.set(xlabel="state traffic, times less than standard decoding", xlim=(0, None))
        right.legend(loc="lower left")
        figure.suptitle(kind)
        target = Path(path)
        figure.savefig(target)
        pyplot.close(figure)
    return target
