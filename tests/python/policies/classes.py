"""Classes of entries (EMS, arXiv 2412.08521): what a member is, who joins whom, what a class becomes.

Keys are compared and merged at position 0, where RoPE does nothing.  The look-up table of a stream is
its `members`; attention expands it into one key per remembered token and shares the values.
"""

from dataclasses import dataclass, field

import numpy as np

from . import formulas as f


@dataclass
class Members:
    centre: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # a position, as pos
    pos: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    gain: np.ndarray = field(default_factory=lambda: np.zeros(0))  # length of its key over the centre's

    def __len__(self):
        return len(self.pos)

    def keep(self, mask):
        return Members(self.centre[mask], self.pos[mask], self.gain[mask])

    def sorted(self):
        order = np.lexsort((self.pos, self.centre))
        return Members(self.centre[order], self.pos[order], self.gain[order])


def turned(x, positions, inv_freq, back=False):
    """RoPE in rotate-half pairs: rows of x as if they were `positions` further on, or back."""
    if inv_freq is None:
        return x
    half = x.shape[-1] // 2
    angle = np.multiply.outer(np.asarray(positions, np.float64), inv_freq) * (-1 if back else 1)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate((a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)), axis=-1)


def unit(x):
    length = np.linalg.norm(x, axis=-1, keepdims=True)
    return np.divide(x, length, out=np.zeros_like(x), where=length > 0)


def owners(stream):
    """The entry at the centre of every entry's and every member's class."""
    return np.concatenate((np.arange(len(stream)), np.searchsorted(stream.pos, stream.members.centre)))


def expanded(stream, rule, inv_freq):
    """One key per entry, then one per member."""
    members = stream.members
    own = stream.keys[owners(stream)[len(stream):]]
    at_zero = turned(own, members.centre, inv_freq, back=True)
    there = turned(at_zero, members.pos if rule.positions else members.centre, inv_freq)
    return np.concatenate((stream.keys, members.gain[:, None] * there))


def seen(stream, visible, positions, sliding_window):
    """[queries, entries and members]: a member where its centre is and it is not newer; of both those
    less than `sliding_window` positions behind the query (0: all)."""
    members = visible[:, owners(stream)[len(stream):]] & (stream.members.pos[None] <= positions[:, None])
    near = np.concatenate((stream.pos, stream.members.pos))[None] > positions[:, None] - (sliding_window or np.inf)
    return np.concatenate((visible, members), axis=1) & near


def folded(stream, p):
    """The attention of whole classes."""
    whole = p[..., :len(stream)].copy()
    np.add.at(np.moveaxis(whole, -1, 0), owners(stream)[len(stream):], np.moveaxis(p[..., len(stream):], -1, 0))
    return whole


# --- joining ------------------------------------------------------------------------------------


def members_max(rule, keep):
    return int((rule.classes.gamma - 1) * keep) if rule.merge == "classes" else 0


@dataclass
class Plan:
    """The plan of which evicted entries of one stream join which class."""

    gone: np.ndarray  # indices into the stream
    centres: np.ndarray
    likeness: np.ndarray  # [gone, centres]
    target: np.ndarray  # [gone], an index into centres
    eligible: np.ndarray  # [gone]
    uncertain: np.ndarray  # [gone]: is that at a tie?
    tau: float

    def best(self):
        return self.likeness[np.arange(len(self.gone)), self.target]

    def joins(self):
        return self.eligible & (self.best() > self.tau)

    def doubtful(self, tolerance):
        top = self.best()
        rivals = (np.abs(self.likeness - top[:, None]) <= tolerance).sum(axis=1) > 1
        close = (rivals & (top > self.tau - tolerance)) | (np.abs(top - self.tau) <= tolerance)
        return (close & self.eligible) | self.uncertain

    def as_done(self, stream, members, most, tolerance):
        """The ways of doubtful entries as another's table of members shows them; how many others."""
        doubtful, changed = self.doubtful(tolerance), 0
        went = dict(zip(members.pos.tolist(), members.centre.tolist()))
        for i in np.flatnonzero(doubtful):
            own, joins = stream.pos[self.gone[i]], bool(self.joins()[i])
            trail = np.append(stream.members.pos[stream.members.centre == own], own)
            centre = next((went[p] for p in trail.tolist() if p in went), None)
            if centre is None:
                if len(members) < most or trail.max() > members.pos.min():  # the old trail would have stayed
                    changed += joins
                    self.eligible[i] = False
                continue
            target = int(np.flatnonzero(stream.pos[self.centres] == centre)[0])
            changed += not joins or target != self.target[i]
            self.target[i], self.eligible[i] = target, True
            self.likeness[i, target] = max(self.likeness[i, target], self.tau + tolerance)
        return changed


def plan(stream, mask, scored, rule, keep, tolerance, inv_freq):
    """For a stream before its entries outside the mask go; None when nothing can join."""
    old = ~(stream.pos >= scored.tokens - rule.recent)
    gone, centres = np.flatnonzero(~mask), np.flatnonzero(mask & old)
    if rule.merge != "classes" or not len(gone) or not len(centres):
        return None
    order = gone[np.lexsort((-stream.pos[gone], -scored.score[gone]))]
    best = order[:members_max(rule, keep)]
    uncertain = np.zeros(len(gone), bool)
    if 0 < len(best) < len(gone):
        last = best[-1]
        near = np.abs(scored.score[gone] - scored.score[last]) < tolerance * np.maximum(scored.size[gone], scored.size[last])
        uncertain = near if near.sum() > 1 else uncertain
    at_zero = turned(stream.keys, stream.pos, inv_freq, back=True)
    likeness = f.cosines(at_zero[gone], at_zero[centres]) * f.cosines(stream.values[gone], stream.values[centres])
    target = likeness.shape[1] - 1 - np.argmax(likeness[:, ::-1], axis=1)  # ties: the newer
    return Plan(gone, centres, likeness, target, np.isin(gone, best), uncertain, rule.classes.tau)


def apply(stream, plan, store, inv_freq):
    """Computes the merged centres; the evicted entries stay in the arrays."""
    joins, keys, values, memory = plan.joins(), stream.keys.copy(), stream.values.copy(), stream.memory.copy()
    length = np.linalg.norm(stream.keys, axis=1)
    towards = unit(turned(stream.keys, stream.pos, inv_freq, back=True))
    for target in np.unique(plan.target[joins]):
        centre = plan.centres[target]
        whole = np.concatenate(([centre], plan.gone[joins & (plan.target == target)]))
        mass = stream.memory[whole]
        direction = mass @ towards[whole]
        if mass.sum() > 0 and np.linalg.norm(direction) > 0:
            key = turned(length[centre] * unit(direction), stream.pos[centre], inv_freq)
            keys[centre] = store(key)
            values[centre] = store(mass @ stream.values[whole] / mass.sum())
            memory[centre] = mass.sum()
    stream.keys, stream.values, stream.memory = keys, values, memory
    return length


def look_up(stream, plan, mask, length, most):
    """The table after the eviction."""
    home = {int(stream.pos[i]): int(stream.pos[i]) for i in np.flatnonzero(mask)}
    scale, fresh = dict.fromkeys(home, 1.0), []
    for i, target, joins in zip(plan.gone, plan.target, plan.joins()) if plan else ():
        if joins:
            pos, centre = int(stream.pos[i]), plan.centres[target]
            home[pos], scale[pos] = int(stream.pos[centre]), length[i] / length[centre]
            fresh.append((home[pos], pos, scale[pos]))
    old = stream.members
    fresh += [(home[c], p, g * scale[c]) for c, p, g in zip(old.centre.tolist(), old.pos.tolist(), old.gain) if c in home]
    newest = sorted(fresh, key=lambda record: record[1])[max(0, len(fresh) - most):]
    columns = list(zip(*newest)) or [(), (), ()]
    return Members(*(np.array(x, t) for x, t in zip(columns, (np.int64, np.int64, np.float64)))).sorted()
