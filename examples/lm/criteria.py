"""Criteria of the ranks and bits of heads, compared at equal bytes by loss and recall.

    python examples/lm/criteria.py --model recall-gdn.safetensors --tokens TOKENS --out RESULTS

Every head has scores of its pairs of a rank and bits: by the loss of text, by the loss of answers to questions, and by
the relative errors of reads and states. A criterion combines them. "mixed" ones have text with questions in it for
bases and scores; all others share both. A name ends with the fewest bits of a head, if they are not 1.
"""

import copy
import sys
from fnmatch import fnmatchcase

import numpy as np
import systems as catalogue
import torch
from evaluate import Prefilled, checked, common_options, continued, mean_and_error, prefill, score_text, task_prompts
from model import HybridLM
from prompts import mixed_rows, needle_prompts, questions, text_rows
from runs import encoder, origin

import sketchssm as ss
from sketchssm.calibrate.calibration import StoredBasis
from sketchssm.calibrate.joint_scores import some_scores
from sketchssm.cli.output import Output
from sketchssm.layer.recurrence import FULL_STATE
from sketchssm.study.tables import percent

DEFAULTS = "text + states", "text + questions"
"""What `sketchssm.allocate_joint` minimises without and with questions; the others are compared with them."""

FLOOR = 1
"""Bits that every head gets by default."""

ROWS = 4
"""Rows of text that decode at once with every system."""

FLOORS = (
    *((label, 0) for label in ("text", *DEFAULTS, "text + questions + states", "mixed text")),
    *((label, 2) for label in DEFAULTS),
)
"""Criteria with another floor."""

MEASURES = {
    "loss": lambda x: x.paired,
    "reads": lambda x: x.error / x.energy[:, None, None] * x.samples[:, None, None],
    "states": lambda x: x.isotropic,
}
"""Sums over the samples ``(heads, ranks, bits)`` of scores: by gradients, and relative errors of reads and states."""


class AllScores(ss.JointScores):
    """Joint scores that begin with those of sketches without codes; `with_none` counts their bits."""

    def __init__(self, basis):
        super().__init__(basis)
        shape = self.layer.heads, len(self.ranks), 1 + len(self.bits)
        self.paired, self.error, self.isotropic = np.zeros(shape), np.zeros(shape), np.zeros(shape)

    def _measured(self, space, states, image, rows, x, slope, dtype):
        xp, coded = space.xp, super()._measured(space, states, image, rows, x, slope, dtype)
        found = space.zeros((*coded.shape[:-2], 1 + len(self.bits), 3), "float64")
        found[..., 1:, :] = coded
        left, start = states, 0
        for i, rank in enumerate(self.ranks):
            new = np.s_[..., start:rank, :]
            left, start = left - image[new].swapaxes(-1, -2) @ rows[new], rank
            delta = space.product(x, left.swapaxes(-1, -2))
            found[..., i, 0, 0] = space.cast(xp.square(delta).sum((-2, -1)), "float64")
            found[..., i, 0, 1] = space.cast(xp.square(left).sum((-2, -1)), "float64")
            found[..., i, 0, 2] = space.cast(xp.square((slope * delta).sum(-1)).sum(-1), "float64")
        return found

    def with_none(self):
        """The same scores, with 0 among the bits."""
        found = copy.copy(self)
        found.bits = (0, *self.bits)
        return found


def shares(layers, measure):
    """Scores ``(heads, ranks, bits)`` of layers, as shares of their sum at rank 2 with 2 bits."""
    found = [measure(x) / np.maximum(x.samples, 1)[:, None, None] for x in layers]
    at = layers[0].ranks.index(2), layers[0].bits.index(2)
    whole = sum(x[:, *at].sum() for x in found)
    return [x / whole for x in found]


def combined(rule, *tasks):
    """Scores of several tasks as one, layer by layer."""
    return [rule(parts) for parts in zip(*tasks, strict=True)]


def allocate(layers, values, reduction, floor=FLOOR):
    """Ranks and bits of the least sum of `values`, from `floor` bits on; None without so small a table."""
    parts = []
    for own, value in zip(layers, values, strict=True):
        part = copy.copy(own)
        part.paired, part.isotropic = value * np.maximum(own.samples, 1)[:, None, None], np.zeros_like(value)
        parts.append(some_scores(part, [bits for bits in own.bits if bits >= floor], None))
    try:
        return ss.allocate_joint(parts, reduction)
    except ValueError as error:
        if "expected at most" in str(error):
            return None
        raise


def worst(layers, text, answers, reduction):
    """The allocation whose larger one of both tasks' sums is the least, among those of weighted sums."""

    def larger(found):
        return max(total(layers, values, found) for values in (text, answers))

    weights = np.linspace(0.02, 0.98, 25)
    mixes = [combined(lambda x, w=w: w * x[0] + (1 - w) * x[1], text, answers) for w in weights]
    return min((allocate(layers, mix, reduction) for mix in mixes), key=larger)


def total(layers, values, found):
    """Sum of the scores of an allocation's ranks and bits."""
    return sum(
        value[head, own.ranks.index(rank), own.bits.index(bits)]
        for own, value, *table in zip(layers, values, found.ranks, found.residual_bits, strict=True)
        for head, (rank, bits) in enumerate(zip(*(x.tolist() for x in table), strict=True))
        if rank != FULL_STATE
    )


def allocations(text, mixed, reduction):
    """Each criterion's calibrations and allocation, by name; `mixed` are calibrations of text with questions in it."""
    own, asked, others = (
        [getattr(x, name).with_none() for x in found.values()]
        for found, name in ((text, "joint"), (text, "answers"), (mixed, "joint"))
    )
    loss, questions, within = (shares(x, MEASURES["loss"]) for x in (own, asked, others))
    reads, states = (shares(own, MEASURES[name]) for name in ("reads", "states"))
    alike = [np.broadcast_to(np.mean(np.concatenate(reads), 0), x.shape) for x in reads]
    values = {
        "uniform": alike,
        "text": loss,
        "reads": reads,
        "states": states,
        "text + states": combined(sum, loss, states),
        "text + questions": combined(sum, loss, questions),
        "text + questions + states": combined(sum, loss, questions, states),
        "max(text, questions)": combined(np.maximum.reduce, loss, questions),
    }
    found = {label: (text, allocate(own, value, reduction)) for label, value in values.items()}
    found["worst of text, questions"] = text, worst(own, loss, questions, reduction)
    values |= {"mixed text": within, "mixed text + states": combined(sum, within, shares(others, MEASURES["states"]))}
    for label, floor in (*((x, FLOOR) for x in list(values)[-2:]), *FLOORS):
        source, scores = (mixed, others) if label.startswith("mixed") else (text, own)
        name = label if floor == FLOOR else f"{label}, {floor} bits"
        found[name] = source, allocate(scores, values[label], reduction, floor)
    return {label: (source, table) for label, (source, table) in found.items() if table is not None}


class Beside:
    """The heads of several systems in one layer as one head, for rows ``(systems * rows, ...)``, system by system."""

    def __init__(self, plans, slots, backend):
        first, self.copies = plans[0], len(plans)
        own = first.layer
        layer = ss.Layer(own.kind, self.copies * own.heads, own.key_dim, own.value_dim, self.copies * own.key_heads)
        widest = max(plan.omega.shape[-1] for plan in plans)
        columns = [np.pad(x.omega, ((0, 0), (0, 0), (0, widest - x.omega.shape[-1]))) for x in plans]
        ranks, bits = (np.concatenate([getattr(x, name) for x in plans]) for name in ("ranks", "residual_bits"))
        basis = StoredBasis(layer, first.window, np.concatenate(columns))
        plan = ss.SketchPlan(basis, ranks, None, first.map, first.sketch_dtype, bits)
        self.head = ss.SketchHead(plan, slots, backend)
        self.reset, self.backend = self.head.reset, self.head.backend

    def step(self, *inputs):
        """Outputs of tokens."""
        beside = [x if x is None else x.unflatten(0, (self.copies, -1)).movedim(0, 2).flatten(2, 3) for x in inputs]
        return self.head.step(*beside).unflatten(2, (self.copies, -1)).movedim(2, 0).flatten(0, 1)

    def load_state(self, state):
        """Continue every system from the same states ``(rows, ...)``."""
        self.head.load_state(state.repeat(1, self.copies, 1, 1))


def repeated(x, copies):
    """Rows of a tensor, or of a pair of them, one copy after the other."""
    return tuple(repeated(y, copies) for y in x) if isinstance(x, tuple) else x.repeat(copies, *[1] * (x.dim() - 1))


def measured(model, standard, systems, rows, prompts, options):
    """Losses and divergences of rows, and right answers by task, of standard decode and systems: ``(1 + systems, n)``.

    All systems decode at once, as the heads of one.
    """
    copies, size = len(systems), max(ROWS, options.batch)
    exact = standard.heads(size, options.backend)
    heads = {
        place: Beside([x.layers[place].plan for x in systems], size, options.backend) for place in model.recurrent
    }
    losses, divergences = [], []
    for ids in torch.from_numpy(rows).split(ROWS):
        base = score_text(model, exact, ids)
        wanted = base._replace(hidden=repeated(base.hidden, copies))
        found = score_text(model, heads, repeated(ids, copies), wanted)
        for kept, name in ((losses, "losses"), (divergences, "divergences")):
            kept.append(np.concatenate([getattr(x, name) for x in (base, found)]).mean(1).reshape(-1, len(ids)))
    measures = {"loss": np.concatenate(losses, 1), "divergence": np.concatenate(divergences, 1)}
    for name, asked in prompts.items():
        said = []
        for ids in torch.from_numpy(asked.ids).split(options.batch):
            one = prefill(model, ids, asked.question - options.decoded)
            cache = {place: repeated(x, copies) for place, x in one.cache.items()}
            every = Prefilled(one.states, cache, repeated(one.rest, copies))
            tokens = np.concatenate([continued(model, exact, one), continued(model, heads, every)])
            said.append(tokens.reshape(1 + copies, len(ids), -1))
        measures[name] = np.stack([asked.right(x) for x in np.concatenate(said, 1)])
    return measures, next(iter(heads.values())).backend


def compared(result, other):
    """Mean and standard error of the paired differences from another system, by measure."""
    pairs = {name: mean_and_error(values - other[name]) for name, values in result.items()}
    return {name: dict(zip(("mean", "error"), pair, strict=True)) for name, pair in pairs.items()}


def main(given=None):
    """Calibrate, compare, print, and write the file of `--out`."""
    parser = common_options(__doc__)
    parser.add_argument("--only", nargs="+", default=("*",), help="names of criteria, with wildcards")
    options = checked(parser, given)
    if options.questions < 1:
        raise ValueError(f"questions: expected at least 1, got {options.questions}")
    torch.backends.cudnn.allow_tf32 = False  # of convolutions; products have float32 by default
    model = HybridLM.load(options.model).to(options.device)
    calib, test = (np.load(options.tokens / f"{part}.npy") for part in ("calib", "test"))
    rng, encode = np.random.default_rng(options.seed), encoder(options.tokens)
    rows = text_rows(test, options.rows, options.length, rng)
    prompts = {"recall": needle_prompts(test, encode, options.prompts, options.length, rng)}
    prompts |= task_prompts(options, test, encode)
    seen = text_rows(calib, options.calib_rows, options.length, rng)
    asked = questions(options, calib, encode, rng)
    settings = options.window, options.rank_max, True
    text = catalogue.calibrate(model, torch.from_numpy(seen), *settings, asked, kind=AllScores)
    blend = torch.from_numpy(mixed_rows(seen, calib, encode, rng))
    mixed = catalogue.calibrate(model, blend, *settings, kind=AllScores)
    standard, report = catalogue.baselines(text, "exact", options.window)[0], []
    for reduction in options.reductions:
        found = allocations(text, mixed, reduction)
        found = {label: x for label, x in found.items() if any(fnmatchcase(label, name) for name in options.only)}
        systems = [catalogue.allocated(own, table, label) for label, (own, table) in found.items()]
        measures, backend = measured(model, standard, systems, rows, prompts, options)
        results = {
            label: {name: values[i] for name, values in measures.items()}
            for i, label in enumerate(("standard", *found))
        }
        for system, (label, result) in zip([standard, *systems], results.items(), strict=True):
            plans = [] if system is standard else [x.plan for x in system.layers.values()]
            entry = {"criterion": label, "reduction": system.reduction}
            entry |= {"ranks": [x.ranks.tolist() for x in plans], "bits": [x.residual_bits.tolist() for x in plans]}
            entry["right"] = {task: float(result[task].mean()) for task in prompts}
            others = [x for x in ("standard", *DEFAULTS) if x in results] if plans else ["standard"]
            report.append(entry | {"beside": {other: compared(result, results[other]) for other in others}})
    origins = origin("criteria.py", options, [backend], model)
    output = Output(None if options.out is None else str(options.out / f"criteria-{options.model.stem}.json"))
    show(output, options.model.stem, report)
    output.finish(origins | {"systems": report})


def show(output, model, systems):
    """Print the comparison."""
    rows, tasks = [], list(systems[0]["right"])
    for x in systems:
        beside = x["beside"]["standard"]
        loss, divergence, *lost = (beside[name] for name in ("loss", "divergence", *tasks))
        shown = [f"{loss['mean']:+.4f} ± {loss['error']:.4f}"]
        shown.append(f"{1e3 * divergence['mean']:.2f} ± {1e3 * divergence['error']:.2f}")
        for task, own in zip(tasks, lost, strict=True):
            change = f"{100 * own['mean']:+.1f} ± {100 * own['error']:.1f}"
            shown.append(f"{percent(x['right'][task], 1)} ({change})")
        rows.append([x["criterion"], f"{x['reduction']:.2f}x", *shown])
    columns = ["criterion", "less traffic", "loss increase", "KL, thousandths", *tasks]
    output.table(f"{model}: criteria at equal bytes; in brackets, beside standard decode", columns, rows)


if __name__ == "__main__":
    sys.exit(main())
