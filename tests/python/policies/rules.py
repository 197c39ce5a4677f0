"""A method of eviction as parameters of one pipeline, and the table of them.

The names are those of `struct kern_rule` in kernels/kern_rule.h, in small letters, so that the table can
be compared with the daemon's; the values are from the papers and their code.
"""

from dataclasses import asdict, dataclass, field, replace

import numpy as np

INF = float("inf")
PARTS = ("observe", "redundancy", "classes")


@dataclass(frozen=True)
class Observe:
    window: int = 0  # 0: every query, added up in the entry
    support: str = "all"  # all, candidates
    group: str = "mean"  # mean, max, sum, squares, max_logit, sum_logit, each
    reduce: str = "mean"  # mean, sum, max, mean_var, mean_std
    gamma: float = 0.0
    normalise: bool = False
    history: str = "none"  # none, max, mean, sum
    decay: float = 0.0
    smooth: str = "none"  # none, average, max
    smooth_width: int = 0
    smooth_first: bool = False
    expect: int = 0  # positions to come, 0: observe the window's attention
    all_queries: bool = False  # "global"


@dataclass(frozen=True)
class Redundancy:
    on: bool = False
    measure: str = "likeness"  # likeness, length, lag
    lag: int = 0
    weight: float = 0.0  # lambda
    threshold: float = 0.0
    eps: float = 0.0
    normalise: bool = False
    candidates_only: bool = False
    own: bool = False
    index_zero: bool = False


@dataclass(frozen=True)
class Classes:
    gamma: float = 0.0
    tau: float = 0.0
    positions: bool = False


@dataclass(frozen=True)
class Rule:
    score: str = "recency"  # recency, retention, attention
    scope: str = "stream"  # stream, layer, sequence
    layers: str = "uniform"  # uniform, pyramid, preference, density
    merge: str = "none"  # none, paper, code, classes
    sinks: int = 0
    recent: int = 0
    horizon: float = 0.0
    published: bool = False
    retain: float = 0.0
    floor: float = 0.0
    merge_beta: float = 0.0
    pyramid_beta: float = 0.0
    tau1: float = 0.0
    tau2: float = 0.0
    observe: Observe = field(default_factory=Observe)
    redundancy: Redundancy = field(default_factory=Redundancy)
    classes: Classes = field(default_factory=Classes)

    def flat(self):
        """{name: value}, nested names with a dot, Python's own words by their name."""
        plain = {k: v for k, v in asdict(self).items() if not isinstance(v, dict)}
        parts = {part: asdict(getattr(self, part)) for part in PARTS}
        nested = {f"{part}.{k}": v for part, values in parts.items() for k, v in values.items()}
        nested["redundancy.lambda"] = nested.pop("redundancy.weight")
        nested["observe.global"] = nested.pop("observe.all_queries")
        return plain | nested

    def as_float32(self):
        """With the numbers that a float32 holds."""
        def rounded(part):
            return {k: float(np.float32(v)) for k, v in asdict(part).items() if isinstance(v, float)}
        return self.but(**{part: rounded(getattr(self, part)) for part in PARTS}, **rounded(self))

    def but(self, **changes):
        """The rule with other values; those of its parts as dictionaries."""
        for name in PARTS:
            if isinstance(changes.get(name), dict):
                changes[name] = replace(getattr(self, name), **changes[name])
        return replace(self, **changes)
