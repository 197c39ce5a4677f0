"""The rows: what each method is, from its paper and its published code.

Where paper and code differ a row says which it follows; VARIANTS holds the other readings, as
changes to a row.  Four sinks are protected by default, though most papers protect none.
"""

from .rules import INF, Classes, Observe, Redundancy, Rule


def attention(**values):
    return Rule(score="attention", sinks=4, **values)


ROWS = {
    "full": Rule(),
    # StreamingLLM (arXiv 2309.17453), without its re-rotation
    "streaming": Rule(score="recency", sinks=4),
    # TRIM-KV (arXiv 2512.03324), global gates (arXiv 2605.09649)
    "trimkv": Rule(score="retention", sinks=4, horizon=1),
    # (global: the last 16 tokens are ours, see docs/QUALITY.md)
    "global": Rule(score="retention", scope="sequence", sinks=4, recent=16, horizon=128),
    # G-KV (arXiv 2512.00504)
    "gkv": attention(recent=16, observe=Observe(
        window=16, group="max", normalise=True, history="max", decay=0.8), redundancy=Redundancy(
        on=True, weight=0.5, threshold=0.5, eps=1e-6, normalise=True)),
    # R-KV (arXiv 2505.24133), its code
    "rkv": attention(recent=8, observe=Observe(
        window=8, support="candidates", group="max_logit", smooth="max", smooth_width=7),
        redundancy=Redundancy(on=True, weight=0.1, threshold=0.5, eps=1e-8)),
    # H2O (arXiv 2306.14048)
    "h2o": attention(observe=Observe(group="sum", reduce="sum")),
    # SnapKV (arXiv 2404.14469)
    "snapkv": attention(recent=32, observe=Observe(
        window=32, group="mean", reduce="sum", smooth="average", smooth_width=5)),
    # PyramidKV (arXiv 2406.02069)
    "pyramidkv": attention(layers="pyramid", recent=8, pyramid_beta=20, observe=Observe(
        window=8, group="mean", smooth="max", smooth_width=7)),
    # Ada-KV (arXiv 2407.11550)
    "adakv": attention(scope="layer", recent=32, floor=0.2, observe=Observe(
        window=32, group="mean", smooth="max", smooth_width=7)),
    # MorphKV (arXiv 2503.00979)
    "morphkv": attention(recent=33, observe=Observe(
        window=32, support="candidates", group="sum_logit", reduce="sum")),
    # CAKE (arXiv 2503.12491)
    "cake": attention(layers="preference", tau1=1, tau2=1, recent=32, observe=Observe(
        window=32, group="each", reduce="mean_var", gamma=200, smooth="average", smooth_width=5)),
    # KV-Compress (arXiv 2410.00161)
    "kvcompress": attention(scope="sequence", recent=64, observe=Observe(
        group="squares", reduce="sum")),
    # D2O (arXiv 2406.13035)
    "d2o": attention(layers="density", merge="paper", merge_beta=0.7,
                     observe=Observe(group="sum", reduce="sum")),
    # EMS (arXiv 2412.08521)
    "ems": attention(merge="classes", recent=32, classes=Classes(gamma=4, tau=0.6, positions=True),
                     observe=Observe(window=32, group="sum", reduce="sum", all_queries=True,
                                     smooth="average", smooth_width=7)),
    # TOVA (arXiv 2401.06104), per KV head
    "tova": attention(recent=1, observe=Observe(window=1, group="mean")),
    # Expected Attention (arXiv 2510.00636), with the queries of the window
    "expected_attention": attention(recent=32, observe=Observe(window=64, expect=512)),
    # KeyDiff (arXiv 2504.15364): the mean of unit keys, nothing forgiven
    "keydiff": attention(recent=32, redundancy=Redundancy(on=True, threshold=1)),
    # L2 norm of keys (arXiv 2406.11430)
    "knorm": attention(recent=32, redundancy=Redundancy(on=True, measure="length")),
    # LagKV (arXiv 2504.04704)
    "lagkv": attention(redundancy=Redundancy(on=True, measure="lag", lag=128)),
}

# Recent entries as a part of the budget: H2O's half; D2O's one in four (N : M = 3 : 1)
RECENT_PART = {"h2o": 0.5, "d2o": 0.25}

VARIANTS = {
    "trimkv published": ("trimkv", dict(published=True, sinks=0)),
    "global published": ("global", dict(published=True, sinks=0)),
    "global one step": ("global", dict(horizon=1)),
    "global one step published": ("global", dict(horizon=1, published=True)),
    "global forever": ("global", dict(horizon=INF)),
    "global floor": ("global", dict(floor=0.25)),
    "global threshold": ("global", dict(retain=0.8)),
    "gkv mean": ("gkv", dict(observe=dict(history="mean"))),
    "gkv sum": ("gkv", dict(observe=dict(history="sum"))),
    "rkv artefact": ("rkv", dict(redundancy=dict(index_zero=True))),
    "rkv paper": ("rkv", dict(redundancy=dict(candidates_only=True, own=True), observe=dict(smooth_first=True))),
    "lagkv short": ("lagkv", dict(redundancy=dict(lag=20))),
    "rkv code weight": ("rkv", dict(redundancy=dict(weight=0.07))),
    "gkv without redundancy": ("gkv", dict(redundancy=dict(on=False))),
    "gkv smoothed": ("gkv", dict(observe=dict(smooth="max", smooth_width=5))),
    "morphkv max": ("morphkv", dict(observe=dict(reduce="max"))),
    "cake std": ("cake", dict(observe=dict(reduce="mean_std"))),
    "cake taus": ("cake", dict(tau1=1.6, tau2=0.4)),
    "snapkv max": ("snapkv", dict(observe=dict(smooth="max", smooth_width=7, reduce="mean"))),
    "adakv max": ("adakv", dict(observe=dict(group="max"))),
    "d2o code": ("d2o", dict(merge="code", merge_beta=0.5)),
    "ems all": ("ems", dict(classes=dict(tau=0.0))),  # any similarity suffices
    "ems none": ("ems", dict(classes=dict(tau=1.0))),
    "ems evict": ("ems", dict(classes=dict(gamma=1.0))),
    "ems few": ("ems", dict(classes=dict(gamma=1.3, tau=0.3))),
    "ems without positions": ("ems", dict(classes=dict(positions=False))),
    "ems protecting little": ("ems", dict(recent=3, sinks=0)),  # queries older than members
}


def rule(name, budget=0):
    """The rule of a policy or variant, for a budget."""
    changes = VARIANTS.get(name, (name, {}))[1]
    recent = dict(recent=int(RECENT_PART[base(name)] * budget)) if base(name) in RECENT_PART else {}
    return ROWS[base(name)].but(**recent).but(**changes)


def base(name):
    return name if name in ROWS else VARIANTS[name][0]


def mistakes(name):
    """Changes to a row that make it another method: a comparison must notice each."""
    r = ROWS[name]
    if r.score == "recency":
        return [dict(sinks=r.sinks + 1)]
    if r.score == "retention":
        return [dict(horizon=r.horizon + 40), dict(sinks=r.sinks + 3)]
    if r.redundancy.measure == "lag":
        return [dict(sinks=r.sinks + 1), dict(redundancy=dict(lag=20))]
    if r.observe.expect:
        return [dict(observe=dict(window=60)), dict(observe=dict(expect=64)), dict(sinks=r.sinks + 1)]
    found = [dict(recent=r.recent + 1)]
    if r.observe.window:
        found += [dict(observe=dict(window=r.observe.window - 1)),
                  dict(observe=dict(support="all" if r.observe.support == "candidates" else "candidates"))]
    if r.observe.history != "none":
        found.append(dict(observe=dict(decay=r.observe.decay - 0.1)))
    if r.observe.smooth != "none":
        found.append(dict(observe=dict(smooth_width=r.observe.smooth_width + 2)))
    if r.redundancy.on and r.redundancy.measure == "likeness" and r.redundancy.weight:
        found += [dict(redundancy=dict(weight=r.redundancy.weight + 0.05)), dict(redundancy=dict(threshold=0.45))]
    if r.layers != "uniform":
        found.append(dict(layers="uniform"))
    if r.merge == "classes":
        found += [dict(classes=dict(tau=r.classes.tau + 0.1)), dict(classes=dict(gamma=r.classes.gamma - 2)),
                  dict(classes=dict(positions=not r.classes.positions)), dict(observe=dict(all_queries=False))]
    elif r.merge != "none":
        found += [dict(merge="code" if r.merge == "paper" else "paper"), dict(merge_beta=r.merge_beta - 0.1)]
    return found


def random_rule(rng):
    """Any combination that the pipeline allows."""
    def one_of(*options):
        return options[rng.integers(len(options))]

    window = int(one_of(0, 1, 2, 5, 16, 64))
    observe = dict(window=window, normalise=bool(rng.integers(2)), smooth=one_of("none", "average", "max"),
                   smooth_width=int(one_of(1, 3, 7, 31)))
    if window:
        observe |= dict(support=one_of("all", "candidates"), smooth_first=bool(rng.integers(2)),
                        group=one_of("mean", "max", "sum", "squares", "max_logit", "sum_logit", "each"),
                        reduce=one_of("mean", "sum", "max", "mean_var", "mean_std"), gamma=float(rng.integers(1, 50)),
                        history=one_of("none", "max", "mean", "sum"), decay=float(rng.random()))
    else:
        observe |= dict(group=one_of("mean", "max", "sum", "squares"), reduce="sum")
    scope = one_of("stream", "layer", "sequence")
    layers = one_of("uniform", "pyramid", "preference" if window else "density")
    redundancy = dict(on=bool(rng.integers(2)), weight=float(rng.random()), threshold=float(rng.uniform(0, 0.9)),
                      eps=1e-6, normalise=bool(rng.integers(2)), candidates_only=bool(rng.integers(2)),
                      own=bool(rng.integers(2)), index_zero=bool(rng.integers(2)))
    merge = one_of("none", "none", "paper", "code", "classes")
    if merge == "classes" and window:  # classes merge by accumulated attention
        observe |= dict(all_queries=True, history="none", group=one_of("mean", "max", "sum", "squares"))
    classes = Classes(float(rng.uniform(1, 5)), float(rng.uniform(0, 0.8)), bool(rng.integers(2)))
    return Rule(score="attention", scope=scope, layers="uniform" if scope == "sequence" else layers, merge=merge,
                sinks=int(rng.integers(0, 6)), recent=int(rng.integers(0, 20)), merge_beta=float(rng.random()),
                floor=float(one_of(0, 0.1, 0.5, 1)), pyramid_beta=float(rng.uniform(1, 30)), tau1=float(rng.uniform(0.4, 2)),
                tau2=float(rng.uniform(0.4, 2)), observe=Observe(**observe), redundancy=Redundancy(**redundancy), classes=classes)
