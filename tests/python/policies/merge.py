"""Merging of evicted entries into kept ones (D2O, arXiv 2406.13035)."""

from dataclasses import dataclass

import numpy as np

from . import formulas as f

WEIGHTED = {"paper": f.merge_exponential, "code": f.merge_mean}


@dataclass
class Plan:
    """Where the evicted entries of one stream go."""

    kept: np.ndarray  # indices into the stream
    gone: np.ndarray
    likeness: np.ndarray  # [gone, kept] cosines
    target: np.ndarray  # [gone], an index into kept
    tau: float | None

    def best(self):
        return self.likeness[np.arange(len(self.gone)), self.target]

    def joins(self):
        """For each evicted entry: is it merged?"""
        return self.best() >= self.tau

    def doubtful(self, tolerance):
        """Evicted entries whose way float32 may see otherwise: two targets alike, or at the threshold."""
        top = self.best()
        rivals = (np.abs(self.likeness - top[:, None]) <= tolerance).sum(axis=1) > 1
        return rivals | (np.abs(top - self.tau) <= tolerance)


def plan(stream, mask, rule):
    """For a stream before its entries outside the mask go; None when nothing is to be merged."""
    kept, gone = np.flatnonzero(mask), np.flatnonzero(~mask)
    if rule.merge == "none" or not len(gone) or not len(kept):
        return None
    likeness = f.cosines(stream.keys[gone], stream.keys[kept])
    target = likeness.shape[1] - 1 - np.argmax(likeness[:, ::-1], axis=1)  # ties: the newer
    mean = likeness.max(axis=1).mean()
    tau = mean if stream.tau is None else rule.merge_beta * mean + (1 - rule.merge_beta) * stream.tau
    return Plan(kept, gone, likeness, target, tau)


def apply(stream, plan, rule, store):
    """Merges into the kept entries; the evicted ones stay in the arrays."""
    joins, best = plan.joins(), plan.best()
    keys, values = stream.keys.copy(), stream.values.copy()
    for target in np.unique(plan.target[joins]):
        members = joins & (plan.target == target)
        entry, taken = plan.kept[target], plan.gone[members]
        for rows, source in ((keys, stream.keys), (values, stream.values)):
            rows[entry] = store(WEIGHTED[rule.merge](source[entry], source[taken], best[members]))
    stream.keys, stream.values, stream.tau = keys, values, plan.tau
