"""Follows an engine's evictions beside the reference.

The rule of agreement: the engine keeps exactly what the reference keeps, except entries whose
reference score is within a relative 1e-5 of the cut, where float32 may see another order.  After
such a tie the reference goes on with the engine's choice, so that the two do not drift apart, and
counts it: ties must stay rare.
"""

from dataclasses import dataclass, field
from itertools import product

import numpy as np

from . import formulas as f
from . import classes, merge
from .choose import best, choose, floor_allotment, scopes, quotas, ranked
from .sequence import similarity


@dataclass
class Tally:
    """Counts of a comparison."""

    evictions: int = 0
    entries: int = 0  # kept
    at_cut: int = 0  # decided otherwise at a tie
    forgiven: int = 0  # streams in which float32 forgave another likeness, at the threshold
    merged: int = 0
    members: int = 0  # kept members of classes
    merged_otherwise: int = 0
    worst: dict = field(default_factory=dict)  # largest deviations

    def note(self, what, value):
        self.worst[what] = max(self.worst.get(what, 0.0), float(value))


@dataclass
class State:
    """The engine's state after an eviction, per stream; without keys and values only the choice
    is compared."""

    pos: list
    keys: list | None = None
    values: list | None = None
    members: list | None = None


ROW_ERROR = 1e-6  # the error of a merge in float32, as a part of the largest number of its row


class Rounding:
    """Rounds merged rows as the cache stores them, and remembers what they were: float32 may see the other side of a tie."""

    def __init__(self, store, nudge):
        self.store, self.nudge, self.exact = store, nudge, {}

    def __call__(self, row):
        rounded = np.asarray(self.store(row), np.float64)
        self.exact[rounded.tobytes()] = row
        return rounded

    def off(self, mine, theirs):
        """How far each number of a row is from the nearest that a merge within the rounding of float32 may store."""
        exact, either = self.exact.get(mine.tobytes()), [mine]
        if exact is not None:  # a merged number that is nearly 0 has the error of the largest ones in it
            error = ROW_ERROR * np.abs(exact).max()
            either += [self.store(exact * (1 + side * self.nudge)) for side in (-1, 1)]
            either += [self.store(exact + side * error) for side in (-1, 1)]
        return np.min([np.abs(row - theirs) / np.maximum(1, np.abs(row)) for row in either], axis=0)


class Follower:
    def __init__(self, sequence, tolerance=1e-5, merge_tolerance=1e-4, adopt_merged=False):
        self.sequence, self.tolerance, self.merge_tolerance = sequence, tolerance, merge_tolerance
        self.adopt_merged = adopt_merged  # a rounded cache: a tie of the rounding must not spread
        self.rounding = Rounding(sequence.store, tolerance)
        self.tally = Tally()

    def evict(self, keep, engine):
        """Compares one eviction and goes on from what the engine kept."""
        sequence, streams = self.sequence, self.sequence.all_streams()
        kept = [self.kept(stream, pos) for stream, pos in zip(streams, engine.pos)]
        scored = self.scored(kept, keep)
        masks = choose(sequence, scored, keep)
        if any((a != b).any() for a, b in zip(kept, masks)):
            self.explain(scored, kept, masks, keep)
            self.tally.at_cut += sum(int((a != b).sum()) for a, b in zip(kept, masks))
        for i, stream in enumerate(streams):
            stream.memory = scored[i].memory
            if sequence.rule.merge == "classes":
                self.join(stream, kept[i], scored[i], keep, engine.members[i])
                plan = None
            else:
                plan = self.merge(stream, kept[i])
            if engine.keys:
                self.compare(stream, plan, engine.keys[i], engine.values[i])
        self.rounding.exact.clear()
        self.tally.evictions += 1
        self.tally.entries += sum(int(mask.sum()) for mask in kept)

    @staticmethod
    def kept(stream, pos):
        mask = np.isin(stream.pos, pos)
        assert np.array_equal(stream.pos[mask], pos), "order changed, or entries from nowhere"
        return mask

    # --- scores

    def scored(self, kept, keep):
        heads, found = self.sequence.heads_kv, []
        for i, mask in enumerate(kept):
            scored = self.sequence.scored(i // heads, i % heads)
            if self.sequence.rule.redundancy.on and not self.same_choice(scored, i, mask):
                scored = self.other_forgiveness(i, mask) or scored
            found.append(scored)
        return found

    def same_choice(self, scored, i, mask):
        pos = self.sequence.all_streams()[i].pos
        return not self.differing(scored, pos, mask, best(scored, pos, mask.sum(), self.sequence.rule.retain)).any()

    def other_forgiveness(self, i, mask):
        """Scores with other likenesses forgiven, where a cosine is at the threshold."""
        sequence, heads = self.sequence, self.sequence.heads_kv
        rule, stream = sequence.rule.redundancy, sequence.all_streams()[i]
        if rule.threshold >= 1:
            return None
        c, _ = similarity(stream, sequence.candidates(stream), rule)
        options = [f.forgiven(c, rule.threshold + d) for d in (0, -1e-6, 1e-6)]
        rows = np.flatnonzero((options[0] != options[1]) | (options[0] != options[2]))
        for choice in product(range(3), repeat=len(rows)) if len(rows) <= 5 else ():
            forgive = options[0].copy()
            forgive[rows] = [options[k][row] for k, row in zip(choice, rows)]
            scored = sequence.scored(i // heads, i % heads, forgive)
            if self.same_choice(scored, i, mask):
                self.tally.forgiven += 1
                return scored
        return None

    # --- ties

    def near(self, scored, value, size):
        return np.abs(scored.score - value) < self.tolerance * np.maximum(scored.size, size)

    def differing(self, scored, pos, mask, other):
        """Entries that two masks of equal size see otherwise and no tie explains."""
        differs = mask != other
        if not differs.any():
            return differs
        _, order = ranked([scored], [pos])
        last = order[int(other.sum()) - 1] if other.any() else order[0]
        near = self.near(scored, scored.score[last], scored.size[last])
        if self.sequence.rule.retain > 0:
            near |= self.near(scored, np.log(self.sequence.rule.retain), 1)
        return differs & (scored.protected | ~near)

    def explain(self, scored, kept, masks, keep):
        """Fails unless every difference is a tie of rounding. An exact tie has an order, where equal
        scores are equal in float32 too."""
        positions = [stream.pos for stream in self.sequence.all_streams()]
        sizes = [int(mask.sum()) for mask in kept]
        for scope in self.matching_scopes(scored, sizes, keep):
            more, less = (np.concatenate([scored[s].score[a[s] & ~b[s]] for s in scope.streams])
                          for a, b in ((kept, masks), (masks, kept)))
            assert self.sequence.rule.score == "attention" or not len(more) or not len(less) or \
                len({*more, *less}) > 1, f"equal scores {more[0]} out of order"
            self.explain_quotas(scope, scored, positions, sizes)
            for s in scope.streams:
                other = best(scored[s], positions[s], sizes[s], self.sequence.rule.retain)
                wrong = self.differing(scored[s], positions[s], kept[s], other)
                assert not wrong.any(), self.describe(s, scored[s], positions[s], kept[s], other)

    def matching_scopes(self, scored, sizes, keep):
        """The scopes, by layer weights that float32 may have rounded to the next entry."""
        sequence = self.sequence
        variants = [np.ones(sequence.layers)]
        if sequence.rule.layers in ("preference", "density"):
            nudge = 3 * self.tolerance * np.eye(sequence.layers)
            variants += [1 + nudge[i] for i in range(sequence.layers)] + [1 - nudge[i] for i in range(sequence.layers)]
        weights, found = sequence.layer_weights(), []
        for variant in variants:
            sequence.weights = weights * variant
            found = scopes(sequence, scored, keep)
            sequence.weights = weights
            if all(scope.room == sum(sizes[s] for s in scope.streams) for scope in found):
                break
        return found

    def explain_quotas(self, scope, scored, positions, sizes):
        """A tie at the cutoff of a scope moves allotments between its streams."""
        rule = self.sequence.rule
        mine, theirs = quotas(scope, scored, positions, rule), np.array([sizes[s] for s in scope.streams])
        if np.array_equal(mine, theirs) or rule.retain > 0:  # with retain, each stream is judged by itself
            return
        floors = floor_allotment(rule, scope) * len(scope.streams) if rule.scope == "sequence" else 0
        stream, entry = ranked([scored[s] for s in scope.streams], [positions[s] for s in scope.streams])
        last, at = scored[scope.streams[stream[scope.room - floors - 1]]], entry[scope.room - floors - 1]
        near = [(self.near(scored[s], last.score[at], last.size[at]) & ~scored[s].protected).sum()
                for s in scope.streams]
        assert mine.sum() == theirs.sum() and (np.abs(mine - theirs) <= near).all(), (mine, theirs, near)

    def describe(self, s, scored, pos, kept, other):
        only = [(int(p), float(x)) for p, x in zip(pos[kept & ~other], scored.score[kept & ~other])]
        missing = [(int(p), float(x)) for p, x in zip(pos[other & ~kept], scored.score[other & ~kept])]
        return f"tokens {self.sequence.tokens}, stream {s}: kept {only[:4]} instead of {missing[:4]}"

    # --- merging

    def merge(self, stream, mask):
        plan = merge.plan(stream, mask, self.sequence.rule)
        if plan:
            self.tally.merged += int(plan.joins().sum())
            merge.apply(stream, plan, self.sequence.rule, self.rounding)
        stream.keep(mask)
        return plan

    def join(self, stream, mask, scored, keep, members):
        """Doubtful entries go where the engine's look-up table says; then both must be the same."""
        sequence, length = self.sequence, None
        most = classes.members_max(sequence.rule, keep)
        plan = classes.plan(stream, mask, scored, sequence.rule, keep, self.tolerance, sequence.inv_freq)
        if plan:
            self.tally.merged_otherwise += plan.as_done(stream, members, most, self.tolerance)
            self.tally.merged += int(plan.joins().sum())
            length = classes.apply(stream, plan, self.rounding, sequence.inv_freq)
        if not mask.all():
            stream.members = classes.look_up(stream, plan, mask, length, most)
        stream.keep(mask)
        for name in ("centre", "pos"):
            mine, theirs = getattr(stream.members, name), getattr(members, name)
            assert np.array_equal(mine, theirs), f"tokens {sequence.tokens}: other members: {name}"
        off = np.abs(stream.members.gain - members.gain) / np.maximum(1, stream.members.gain)
        assert off.max(initial=0) <= self.merge_tolerance, f"gains differ by {off.max()}"
        stream.members = members
        self.tally.members += len(members)

    def compare(self, stream, plan, keys, values):
        wrong = np.zeros(len(stream), bool)
        for name, mine, theirs in (("keys", stream.keys, keys), ("values", stream.values, values)):
            off = np.abs(mine - theirs) / np.maximum(1, np.abs(mine))
            for row in np.flatnonzero((off > self.merge_tolerance).any(axis=1)):
                off[row] = self.rounding.off(mine[row], theirs[row])
            self.tally.note(name, np.where(off > self.merge_tolerance, 0, off).max(initial=0))
            wrong |= (off > self.merge_tolerance).any(axis=1)
        if wrong.any():
            self.explain_merge(plan, wrong)
        if wrong.any() or self.adopt_merged:
            stream.keys, stream.values = keys.astype(np.float64), values.astype(np.float64)

    def explain_merge(self, plan, wrong):
        """Fails unless an evicted entry might as well have gone to or away from each wrong one."""
        assert plan, "keys or values changed though nothing was merged"
        doubtful = plan.doubtful(self.tolerance)
        top = plan.best()[:, None]
        touched = (np.abs(plan.likeness - top) <= self.tolerance)[doubtful].any(axis=0)
        assert touched[wrong].all(), f"{int(wrong.sum())} merged entries differ"
        self.tally.merged_otherwise += int(wrong.sum())
