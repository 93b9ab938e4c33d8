"""What happens to running requests between two steps."""

import tempfile
from pathlib import Path

from samples import tokens_of

from soak.verdicts import SoakError


class Events:
    """Forks, moves, preemption, aborts, early flushes and wrong calls; a part of `soak.server.Server`."""

    def some(self, most):
        """Up to so many running requests."""
        count = min(most, len(self.running))
        return [self.running[i] for i in self.rng.permutation(len(self.running))[:count]]

    def fork(self, parents=None):
        """Copies of running requests go on by themselves; several may come from one."""
        parents = self.some(2) if parents is None else parents
        if not parents or len(self.free) < 6:
            return
        parents = [parents[i] for i in self.rng.integers(0, len(parents), int(self.rng.integers(1, 4)))]
        children = [self.request(each.past, each) for each in parents]
        sources, slots = [each.slot for each in parents], self.take(len(parents))
        self.head.copy(self.place.array(sources), self.place.array(slots))
        self.cursors.copy(sources, slots)
        self.enter(children, slots, "forked")
        self.counts["forked"] += len(children)

    def cache(self):
        """Keep a copy of a running request for others to begin with."""
        if not self.running or not self.free:
            return
        parent, (slot,) = self.some(1)[0], self.take(1)
        entry = self.request(parent.past, parent)
        self.counts["requests"] -= 1
        self.head.copy(self.place.array([parent.slot]), self.place.array([slot]))
        self.cursors.copy([parent.slot], [slot])
        entry.slot = slot
        entry.note("cached in", slot)
        self.cached.append(entry)
        self.counts["cached"] += 1

    def evict(self, count):
        for _ in range(min(count, len(self.cached))):
            self.release(self.cached.pop(int(self.rng.integers(len(self.cached)))))

    def swap(self):
        """Two requests exchange their slots, or move on to each other's."""
        pair = self.some(2)
        if len(pair) < 2:
            return
        source = [each.slot for each in pair]
        target = source[::-1]
        self.head.copy(self.place.array(source), self.place.array(target))
        cursors = self.cursors
        for words in (cursors.position, cursors.due):
            words[target] = words[source]
        cursors.drafted[target] = 0
        for each, slot in zip(pair, target, strict=True):
            each.slot = slot
            each.note("moved to", slot)
        self.counts["moved"] += 2

    def preempt(self):
        """Requests leave for the host's memory, or for a file."""
        group = self.some(3)
        if not group:
            return
        slots = [each.slot for each in group]
        snapshot = self.head.snapshot(self.place.array(slots))
        if self.rng.random() < 0.05:
            with tempfile.TemporaryDirectory() as folder:
                snapshot.save(Path(folder) / "snapshot.safetensors")
                snapshot = type(snapshot).load(Path(folder) / "snapshot.safetensors")
        self.preempted.append((snapshot, group, self.cursors.position[slots].copy()))
        for each in group:
            each.note("preempted from", each.slot)
            self.running.remove(each)
            self.release(each)
        self.counts["preempted"] += len(group)

    def abort(self):
        for each in self.some(2):
            self.running.remove(each)
            self.release(each)
            self.counts["aborted"] += 1

    def flush(self):
        """Some windows end early."""
        group = self.some(3)
        if group:
            slots = [each.slot for each in group]
            self.head.flush(self.place.array(slots))
            self.end_windows(group, "flushed")
            self.cursors.begin(slots)

    def end_windows(self, group, why):
        for each, past in zip(group, self.oracle.fold([each.past for each in group]), strict=True):
            each.past = past
            each.note(why)

    def wrong_call(self):
        """A call with wrong slots is refused, and changes nothing."""
        if not self.place.refuses or len(self.running) < 2:
            return
        slots = [each.slot for each in self.some(2)]
        for wrong in ([slots[0], slots[0]], [slots[0], self.head.num_slots], [slots[1], -9]):
            tokens = tokens_of(self.rng, self.layer, 2, 1)
            for call in (lambda s, x=tokens: self.head.step(*x, slots=s), self.head.flush, self.head.reset):
                try:
                    call(wrong)
                except ValueError:
                    continue
                raise SoakError(f"seed {self.seed}: slots {wrong} were not refused")
        self.counts["refused"] += 1

    def spoil(self, rows, slots):
        """Give some rows a slot out of range, or another's: they are left out, and outputs are zeros."""
        live = [i for i, row in enumerate(rows) if row is not None]
        if len(live) < 4 or self.rng.random() > 0.1:
            return rows, slots
        wrong, one, other = live[0], live[1], live[2]
        slots[wrong] = self.rng.choice([self.head.num_slots, -7, 2**31 - 1])
        slots[one] = slots[other]
        self.spoiled += 3
        self.counts["left out"] += 3
        return [None if i in live[:3] else row for i, row in enumerate(rows)], slots
