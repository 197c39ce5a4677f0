"""One sequence's cache in float64: appending, attention, scoring, choosing, merging.

Plain arrays, one object per stream (layer, KV head); entries ascend in position.
"""

from dataclasses import dataclass, field

import numpy as np

from . import classes, allot, rows, tiles
from . import formulas as f


@dataclass
class Stream:
    keys: np.ndarray
    values: np.ndarray
    pos: np.ndarray
    log_beta: np.ndarray
    memory: np.ndarray  # accumulated mass, or the score remembered from the last eviction (NaN: none)
    tau: float | None = None  # threshold of merging
    members: classes.Members = field(default_factory=classes.Members)

    def __len__(self):
        return len(self.pos)

    def extend(self, keys, values, pos, log_beta, memory):
        old = (self.keys, self.values, self.pos, self.log_beta, self.memory)
        new = (keys, values, pos, log_beta, memory)
        self.keys, self.values, self.pos, self.log_beta, self.memory = (
            np.concatenate(pair) for pair in zip(old, new))

    def keep(self, mask):
        for name in ("keys", "values", "pos", "log_beta", "memory"):
            setattr(self, name, getattr(self, name)[mask])


def empty_stream(head_dim, value_dim):
    none = np.zeros(0)
    return Stream(np.zeros((0, head_dim)), np.zeros((0, value_dim)), none.astype(np.int64), none, none)


def round_bf16(x):
    """Nearest bfloat16, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def round_e4m3(x):
    """Nearest 8-bit E4M3, ties to even, at most 448."""
    x = np.asarray(x, np.float32).astype(np.float64)
    _, exponent = np.frexp(x)  # 0.5 <= |mantissa| < 1: 3 bits after the first, and none below 2^-9
    step = np.ldexp(1.0, np.maximum(exponent - 4, -9))
    return np.clip(np.rint(x / step) * step, -448, 448)


# Rounding of stored keys and values.
STORED = {"f32": np.asarray, "bf16": round_bf16, "fp8": round_e4m3, "q8": rows.round_q8, "q4": rows.round_q4}


# --- scoring ------------------------------------------------------------------------------------


def grouped(z, group, fold):
    """Logits [query heads, queries, keys], -inf where masked, to p [1 or query heads, queries, entries]."""
    if group == "max_logit":
        return fold(f.softmax(z.max(axis=0, keepdims=True)))
    if group == "sum_logit":
        return fold(f.softmax(z.sum(axis=0, keepdims=True)))
    p = fold(f.softmax(z))
    if group == "each":
        return p
    combine = {"mean": p.mean, "max": p.max, "sum": p.sum, "squares": (p * p).sum}
    return combine[group](axis=0, keepdims=True)


def reduced(p, how, gamma):
    """Over the queries, axis -2."""
    if how == "sum":
        return p.sum(axis=-2)
    if how == "max":
        return p.max(axis=-2)
    mean = p.mean(axis=-2)
    if how == "mean":
        return mean
    variance = p.var(axis=-2, ddof=1) if p.shape[-2] > 1 else np.zeros_like(mean)
    return mean + gamma * (variance if how == "mean_var" else np.sqrt(variance))


def smoothed(x, observe):
    if observe.smooth == "none" or not x.shape[-1]:
        return x
    return {"average": f.smooth_mean, "max": f.smooth_max}[observe.smooth](x, observe.smooth_width)


def observed(p, observe):
    """One number per candidate from the window's attention to them."""
    if observe.smooth_first:
        p = smoothed(p, observe)
    return reduced(p, observe.reduce, observe.gamma).mean(axis=0)


def similarity(stream, candidates, rule):
    """C, the rows and columns it is over, with a zero diagonal."""
    rows = candidates if rule.candidates_only else np.ones(len(stream), bool)
    c = f.cosines(stream.keys[rows], stream.keys[rows], rule.eps)
    np.fill_diagonal(c, 0)
    return c, candidates[rows]


def redundancy(stream, candidates, rule, forgive=None):
    """R of every candidate. `forgive`: other choices of the column each row forgives."""
    c, wanted = similarity(stream, candidates, rule)
    rho = f.mean_similarity(c, f.forgiven(c, rule.threshold) if forgive is None else forgive, rule.index_zero, rule.own)
    r = f.softmax(rho)[wanted]
    return r / r.max() if rule.normalise and len(r) else r


@dataclass
class Scored:
    """The scores of one stream: of all entries, meaningless where protected."""

    score: np.ndarray
    size: np.ndarray  # sum of the sizes of the added terms; rounding is relative to it
    memory: np.ndarray
    protected: np.ndarray
    expired: np.ndarray  # hidden from every later query by the layer's sliding window
    tokens: int  # when


# --- a sequence -----------------------------------------------------------------------------------


@dataclass
class Sequence:
    rule: object
    layers: int
    heads_q: int
    heads_kv: int
    head_dim: int
    scale: float
    store: object = np.asarray  # the rounding of keys and values in the cache
    inv_freq: np.ndarray | None = None  # frequencies of the rotation of keys
    sliding_windows: tuple = ()  # one for each layer, 0: none; () is none anywhere
    rounds: str | None = None  # how attention rounds: a key of tiles.BLOCKS
    kv_dtype: str = "f32"
    tokens: int = 0
    weights: np.ndarray | None = None  # weights of the layers, once measured
    streams: list = field(default_factory=list)
    queries: list = field(default_factory=list)  # per layer [window, Hq, D]
    slacks: list = field(default_factory=list)  # per layer [n, Hq, D]: what ties of rounding explain in the last results
    sight: np.ndarray | None = None  # the newest position that each of the next queries sees; None: its own
    value_dim: int = 0  # numbers of a value; 0: as many as of a key

    def __post_init__(self):
        self.value_dim = self.value_dim or self.head_dim
        self.streams = [[empty_stream(self.head_dim, self.value_dim) for _ in range(self.heads_kv)] for _ in range(self.layers)]
        self.slacks = [None] * self.layers
        self.queries = [np.zeros((0, self.heads_q, self.head_dim)) for _ in range(self.layers)]

    @property
    def group(self):
        return self.heads_q // self.heads_kv

    def all_streams(self):
        return [stream for row in self.streams for stream in row]

    def accumulates(self):
        observe = self.rule.observe
        unused = self.rule.redundancy.on and self.rule.redundancy.weight == 0
        added_up = self.rule.score == "attention" and (observe.window == 0 and not unused or observe.all_queries)
        return added_up or self.rule.layers == "density"

    # --- appending

    def append(self, q, k, v, log_beta):
        """q [L, n, Hq, D] and so on of the next n tokens; the attention's results [L, n, Hq * D]."""
        count = q.shape[1]
        out = np.stack([self.append_layer(layer, q[layer], k[layer], v[layer], log_beta[layer])
                        for layer in range(self.layers)])
        self.tokens += count
        return out.reshape(self.layers, count, -1)

    def append_layer(self, layer, q, k, v, log_beta):
        positions = np.arange(self.tokens, self.tokens + len(q))
        fresh = np.zeros(len(q)) if self.accumulates() else np.full(len(q), np.nan)
        out, slack = (np.zeros((len(q), self.heads_q, self.value_dim)) for _ in range(2))
        for head, stream in enumerate(self.streams[layer]):
            stream.extend(self.store(k[:, head]), self.store(v[:, head]), positions, log_beta[:, head], fresh)
            mine = slice(head * self.group, (head + 1) * self.group)
            out[:, mine], slack[:, mine] = self.attend(layer, stream, q[:, mine], positions)
        self.slacks[layer] = slack
        window = self.rule.observe.window
        self.queries[layer] = np.concatenate((self.queries[layer], q))[-window:] if window else self.queries[layer]
        return out

    def logits(self, layer, stream, q, positions, among=True, sight=None):
        """[group, queries, entries and members], -inf where a query does not see them."""
        visible = (stream.pos[None] <= (positions if sight is None else sight)[:, None]) & among
        z = f.logits(q, classes.expanded(stream, self.rule.classes, self.inv_freq), self.scale)
        return f.masked(z, classes.seen(stream, visible, positions, self.sliding_windows[layer] if self.sliding_windows else 0))

    def grouped(self, stream, z, group):
        return grouped(z, group, lambda p: classes.folded(stream, p))

    def attend(self, layer, stream, q, positions):
        """The results, and how far ties of rounding may move them."""
        z = self.logits(layer, stream, q, positions, sight=self.sight)
        if self.accumulates():
            stream.memory += self.grouped(stream, z, self.rule.observe.group)[0].sum(axis=0)
        if self.rule.merge != "classes" and tiles.fits(self.rounds, self.kv_dtype, self.head_dim):
            q = tiles.queries(q, self.scale, self.kv_dtype)
            z = np.where(z > -np.inf, np.einsum("tgd,nd->gtn", q, stream.keys), -np.inf)
            return tiles.attend(self.rounds, z, stream.values, self.kv_dtype)
        out = np.einsum("gtn,nd->tgd", classes.folded(stream, f.softmax(z)), stream.values)
        return out, np.zeros_like(out)

    # --- scoring

    def candidates(self, stream):
        return stream.pos < self.tokens - self.rule.recent

    def scored(self, layer, head, forgive=None):
        stream, rule = self.streams[layer][head], self.rule
        old = self.candidates(stream)
        score, size, memory = {"recency": self.by_recency, "retention": self.by_retention,
                               "attention": self.by_attention}[rule.score](layer, head, forgive)
        expired = self.expired(layer, stream)
        protected = ~old | (stream.pos < rule.sinks)
        return Scored(np.where(expired, -np.inf, score), size, memory, protected, expired, self.tokens)

    def expired(self, layer, stream):
        """Evicted first, whatever protects them; rules that merge keep them."""
        visible = self.sliding_windows[layer] if self.sliding_windows and self.rule.merge == "none" else 0
        return stream.pos <= self.tokens - visible if visible else np.zeros(len(stream), bool)

    def by_recency(self, layer, head, _):
        stream = self.streams[layer][head]
        return stream.pos.astype(np.float64), np.zeros(len(stream)), stream.memory

    def by_retention(self, layer, head, _):
        stream = self.streams[layer][head]
        score = f.retention_published if self.rule.published else f.retention
        values = score(stream.log_beta, self.tokens - stream.pos, self.rule.horizon)
        return values, np.maximum(1, np.abs(values)), stream.memory

    def by_attention(self, layer, head, forgive):
        stream, observe, old = self.streams[layer][head], self.rule.observe, self.candidates(self.streams[layer][head])
        if observe.expect:
            return self.by_expectation(layer, head)
        memory, now = stream.memory.copy(), self.importance(layer, head, old)
        if observe.window and observe.history != "none":
            now = memory[old] = f.with_history(now, memory[old], observe.history, observe.decay)
        if not observe.smooth_first:
            now = smoothed(now, observe)
        score, size = np.zeros(len(stream)), np.zeros(len(stream))
        score[old], size[old] = self.mixed(stream, old, now, forgive)
        return score, size, memory

    def by_expectation(self, layer, head):
        """By the logarithm, in which rounding is even for large and small scores."""
        stream, q = self.streams[layer][head], self.queries[layer][:, head * self.group:(head + 1) * self.group]
        mine = self.candidates(stream) & (stream.pos >= self.rule.sinks)
        score = np.zeros(len(stream))
        with np.errstate(divide="ignore"):
            score[mine] = np.log(f.expected_attention(
                q, np.arange(self.tokens - len(q), self.tokens), stream.keys[mine], stream.values[mine],
                np.zeros(self.head_dim // 2) if self.inv_freq is None else self.inv_freq,
                np.arange(self.tokens, self.tokens + self.rule.observe.expect), self.scale))
        return score, np.maximum(1, np.abs(score)), stream.memory

    def importance(self, layer, head, old):
        stream, observe = self.streams[layer][head], self.rule.observe
        if observe.window:
            q = self.queries[layer][:, head * self.group:(head + 1) * self.group]
            positions = np.arange(self.tokens - len(q), self.tokens)
            z = self.logits(layer, stream, q, positions, old if observe.support == "candidates" else True)
            now = observed(self.grouped(stream, z, observe.group)[..., old], observe)
            whole = stream.memory[old]
            if observe.all_queries and whole.sum() > 0:
                now = np.maximum(whole * now.sum() / whole.sum(), now)
        else:
            now = stream.memory[old]
        return now / now.max() if observe.normalise and len(now) and now.max() > 0 else now

    def mixed(self, stream, old, importance, forgive):
        r = self.rule.redundancy
        if not r.on or not old.any():
            return importance, np.abs(importance)
        redundant = self.dispensable(stream, old, r, forgive)
        if r.weight == 0:
            return -redundant, np.abs(redundant)
        parts = r.weight * importance, (1 - r.weight) * redundant
        return parts[0] - parts[1], np.abs(parts[0]) + np.abs(parts[1])

    def dispensable(self, stream, old, r, forgive):
        if r.measure == "length":
            return np.linalg.norm(stream.keys[old], axis=1)
        if r.measure == "lag":
            sinks = int((stream.pos[old] < self.rule.sinks).sum())
            return -f.lag_scores(stream.keys[old], stream.values[old], sinks, r.lag)
        return redundancy(stream, old, r, forgive)

    # --- layers

    def layer_weights(self):
        """The weights by which layers divide the candidates; measured once."""
        if self.weights is None:
            measure = {"uniform": lambda: np.ones(self.layers), "preference": self.preferences,
                       "pyramid": lambda: allot.pyramid(self.layers, self.rule.pyramid_beta),
                       "density": self.densities}
            self.weights = measure[self.rule.layers]()
        return self.weights

    def preferences(self):
        """CAKE: dispersion and shift of the window's attention to the candidates."""
        found = []
        for layer in range(self.layers):
            h = s = 0.0
            for head, stream in enumerate(self.streams[layer]):
                q = self.queries[layer][:, head * self.group:(head + 1) * self.group]
                positions = np.arange(self.tokens - len(q), self.tokens)
                z = self.logits(layer, stream, q, positions)
                p = classes.folded(stream, f.softmax(z))[..., self.candidates(stream)]
                h, s = h + f.entropy(p), s + f.spread(p)
            found.append(f.cake_preference(h, s, self.rule.tau1, self.rule.tau2))
        return np.array(found)

    def densities(self):
        """D2O's code: layers whose heads gather unequal mass more unequally do with fewer entries."""
        variances = [[stream.memory.var(ddof=1) for stream in row] for row in self.streams]
        return f.d2o_weights([f.d2o_scalar_code(row) for row in variances])
