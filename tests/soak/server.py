"""A simulated server: requests join, decode, draft, fork, are preempted, finish and abort, in any order. Every output
is compared with the request's own oracle. Slots without a request hold NaN. Everything follows from the seed; a
failure tells it, with the last events of the request.
"""

from collections import Counter

import numpy as np
from samples import states_of, tokens_of

from soak.cursors import Cursors
from soak.events import Events
from soak.oracle import Oracle, Request
from soak.verdicts import SoakError, Verdicts


class Server(Events):
    """Drives one head, in a `soak.places.Host`, with requests drawn from a seed. `tolerance` has the errors allowed to
    states and flushes, to full-state heads, to sketched ones, and to 99% of the outputs; `mean_length` counts a
    request's tokens.
    """

    def __init__(
        self, place, layer, requests, seed, tolerance, plan=None, phase=None, mean_length=12.0, state_dtype="float32"
    ):
        self.place, self.head, self.layer = place, place.head, layer
        self.seed, self.rng = seed, np.random.default_rng(seed)
        self.oracle = Oracle(layer, plan, state_dtype)
        self.cursors = Cursors(self.head.window, phase, self.head.num_slots)
        self.waiting, self.mean_length = requests, mean_length
        self.pad = getattr(self.head, "pad_slot", -1)
        self.free = [slot for slot in range(self.head.num_slots) if slot != self.pad]
        self.running, self.cached, self.preempted = [], [], []
        self.counts, self.spoiled = Counter(), 0
        exact, full, sketched, most = tolerance
        allowed, usual = np.full(layer.heads, full), np.full(layer.heads, max(most, full))
        allowed[self.oracle.sketched], usual[self.oracle.sketched] = sketched, most
        self.verdicts = Verdicts(exact, allowed, usual, f"seed {seed}", self.counts)

    def run(self):
        """Serve all requests; returns how often each thing happened."""
        memory = []
        with self.place.running():
            while self.waiting or self.running or self.preempted:
                self.tick()
                memory.append(self.place.used())
            self.evict(len(self.cached))
        done = self.counts["finished"] + self.counts["aborted"]
        if done != self.counts["begun"] + self.counts["forked"]:
            raise SoakError(f"seed {self.seed}: requests were lost: {dict(self.counts)}")
        self.verdicts.usual_errors()
        self.memory = memory
        return dict(self.counts)

    def tick(self):
        """One round of the server's loop."""
        for event in (self.fork, self.preempt, self.abort, self.swap, self.flush, self.cache, self.wrong_call):
            if self.rng.random() < 0.15:
                event()
        if len(self.cached) > 6 or not self.free:
            self.evict(2)
        if self.place.overlaps:
            self.cursors.strokes = {bool(self.cursors.due[-1])}
            begun = self.begin()
            copies = begun and begun[0].history[-1].startswith("prefix")
            wait = self.decode(begun)
            self.place.join()
            self.note_dues(() if copies else begun)
            wait()
        elif self.rng.random() < 0.5:
            self.decode(())()
            self.begin()
        else:
            self.decode(self.begin())()
        if self.place.leaves_out and self.place.left_out() != self.spoiled:
            raise self.verdicts.error(None, f"expected {self.spoiled} rows to be left out")
        self.spoiled, known = 0, self.running + self.cached
        slots = [each.slot for each in known]
        self.verdicts.positions(known, self.place.get(self.head.position)[slots], self.cursors.position[slots])
        self.retire()

    # Requests begin

    def begin(self):
        """Give free slots to new requests, on the side stream; returns the requests."""
        if not (self.waiting or self.preempted) or len(self.free) < 4:
            return ()
        kinds = ["reset", "load", "adopt"]
        kinds += ["prefix"] * bool(self.cached) * 2
        kind = "restore" if self.preempted and self.rng.random() < 0.5 else str(self.rng.choice(kinds))
        if not self.waiting and kind != "restore":
            if not self.preempted:
                return ()
            kind = "restore"
        if kind == "restore":
            return self.restore()
        count = min(int(self.rng.integers(1, 7)), self.waiting, len(self.free))
        slots = self.take(count)
        self.waiting -= count
        self.counts["begun"] += count
        self.counts[kind] += count
        if kind == "prefix":
            sources = [self.cached[i] for i in self.rng.integers(0, len(self.cached), count)]
            begun = [self.request(source.past, source) for source in sources]
            with self.place.side():
                self.head.copy(self.place.array([each.slot for each in sources]), self.place.array(slots))
            self.cursors.copy([each.slot for each in sources], slots)
        else:
            states = states_of(self.rng, self.layer, count) * np.float32(kind != "reset")
            pasts = self.oracle.begin(states.astype(np.float64).swapaxes(-1, -2))
            states = np.stack([past.state.swapaxes(-1, -2) for past in pasts]).astype(np.float32)
            begun = [self.request(past) for past in pasts]
            with self.place.side():
                if kind == "reset":
                    self.head.reset(self.place.array(slots))
                elif kind == "load":
                    self.head.load_state(self.place.array(states), slots=self.place.array(slots))
                else:
                    self.place.write_states(states, slots)
                    self.head.adopt(self.place.array(slots))
            self.cursors.begin(slots)
        self.enter(begun, slots, kind)
        return begun

    def request(self, past, parent=None):
        """A new request of random length."""
        self.counts["requests"] += 1
        one = Request(self.counts["requests"], past, int(self.rng.geometric(1 / self.mean_length)))
        if parent is not None:
            one.history.extend(parent.history)
            one.note(f"[{one.name}] from {parent.name} in {parent.slot}")
        return one

    def take(self, count):
        """Free slots, at random."""
        return [self.free.pop(int(self.rng.integers(len(self.free)))) for _ in range(count)]

    def enter(self, requests, slots, how):
        for each, slot in zip(requests, slots, strict=True):
            each.slot = slot
            each.note(how, "in", slot)
        self.running.extend(requests)

    def restore(self):
        """Bring a preempted group back, into other slots."""
        snapshot, group, positions = self.preempted.pop(int(self.rng.integers(len(self.preempted))))
        if len(group) > len(self.free):
            self.preempted.append((snapshot, group, positions))
            return ()
        slots = self.take(len(group))
        with self.place.side():
            self.head.restore(snapshot, slots=self.place.array(slots))
        self.cursors.restore(slots, positions)
        self.enter(group, slots, "restored")
        self.counts["restored"] += len(group)
        return group

    def note_dues(self, begun):
        """Whether a slot that began beside a step was in time for the clock's stroke is up to the device."""
        if len(self.cursors.strokes) > 1 and begun:
            slots = [each.slot for each in begun]
            self.cursors.due[slots] = self.place.due(slots)

    def release(self, request):
        self.place.poison(request.slot)
        self.free.append(request.slot)

    def retire(self):
        """Finished requests give their slots back; the states of some are compared first."""
        for each in [each for each in self.running if each.left <= 0]:
            if self.rng.random() < 0.2:
                self.head.flush(self.place.array([each.slot]))
                self.end_windows([each], "flushed to compare")
                self.verdicts.state(each, self.place.get(self.head.state[each.slot]))
            self.running.remove(each)
            self.release(each)
            self.counts["finished"] += 1

    # Requests decode

    def decode(self, begun):
        """A step or a draft of most of the other running requests; returns a function that checks the outputs."""
        rows = [each for each in self.running if self.rng.random() < 0.9 and each not in begun]
        if not rows:
            return lambda: None
        padding = [None] * int(self.rng.integers(0, 4))
        rows = [(rows + padding)[i] for i in self.rng.permutation(len(rows) + len(padding))]
        most = self.place.drafts
        drafts = self.rng.random() < 0.4 and most > 0
        count = int(self.rng.integers(1, most + 1)) if drafts else int(self.rng.choice([1, 1, 1, 1, 1, 2, 3]))
        tokens = tokens_of(self.rng, self.layer, len(rows), count, harsh=self.rng.random() < 0.1)
        lengths = self.rng.integers(0, count + 1, len(rows)) if drafts else np.full(len(rows), count)
        for i, row in enumerate(rows):
            for x in (tokens.q, tokens.k, tokens.v):
                x[i, 0 if row is None else lengths[i] :] = np.nan
        slots = np.array([self.pad if row is None else row.slot for row in rows])
        rows, slots = self.spoil(rows, slots) if self.place.leaves_out else (rows, slots)
        live = [i for i, row in enumerate(rows) if row is not None]
        seen = self.place.tokens(tokens)
        if drafts:
            fetch = self.place.step(tokens, slots, lengths, self.rng)
            return self.draft(rows, live, seen, lengths, count, slots, fetch)
        fetch = self.place.step(tokens, slots, None, self.rng)
        want, scale = self.blank(len(rows), count)
        exact = np.zeros((len(rows), count), bool)
        for t in range(count):
            exact[live, t] = flushes = self.cursors.plain(slots[live])
            token = _rows(seen, live, t)
            pasts = [rows[i].past for i in live]
            want[live, t], scale[live, t], after = self.oracle.decode(pasts, token, flushes)
            for i, past in zip(live, after, strict=True):
                rows[i].past = past
        for i in live:
            rows[i].left -= count
            rows[i].note("step", count, "position", self.cursors.position[rows[i].slot])
        self.counts["steps"] += 1
        self.counts["tokens"] += len(live) * count
        return lambda: self.verdicts.outputs(rows, fetch(), want, scale, exact)

    def draft(self, rows, live, seen, lengths, count, slots, fetch):
        """Read drafts, fork between, and keep what a random verification accepts."""
        folds = self.cursors.draft(slots[live], lengths[live], count)
        self.end_windows([rows[i] for i, folded in zip(live, folds, strict=True) if folded], "flushed for a draft")
        want, scale = self.blank(len(rows), count)
        trails = {i: [rows[i].past] for i in live}
        exact = self.head.window == 1
        for t in range(count):
            some = [i for i in live if lengths[i] > t]
            if some:
                pasts, flushes = [trails[i][-1] for i in some], np.full(len(some), exact)
                want[some, t], scale[some, t], after = self.oracle.decode(pasts, _rows(seen, some, t), flushes)
                for i, past in zip(some, after, strict=True):
                    trails[i].append(past)
        if self.rng.random() < 0.1:
            self.fork([rows[i] for i in live][:2])
        kept = [i for i in live if self.rng.random() < 0.9]
        accepted = np.array([self.rng.integers(0, lengths[i] + 1) for i in kept], int)
        full = self.rng.random(len(kept)) < 0.3
        accepted = np.where(full, lengths[kept], accepted).astype(int)
        if kept:
            self.place.commit(accepted, slots[kept])
            self.cursors.commit(slots[kept], accepted)
        for i, taken in zip(kept, accepted, strict=True):
            rows[i].past = trails[i][taken]
            rows[i].left -= int(taken)
        for i in live:
            rows[i].note("draft", lengths[i], "of", count, "position", self.cursors.position[rows[i].slot])
        self.counts["drafts"] += 1
        self.counts["accepted"] += int(accepted.sum())
        return lambda: self.verdicts.outputs(rows, fetch(), want, scale)

    def blank(self, rows, count):
        """Outputs of padding, and of what stands behind a row's drafts: zeros, exactly."""
        shape = rows, count, self.layer.heads
        return np.zeros((*shape, self.layer.value_dim)), np.zeros(shape)


def _rows(tokens, rows, t):
    """Token t of some rows."""
    return type(tokens)(*(x if x is None else x[rows, t] for x in tokens))
