"""Keys, queries, values and log_beta to feed a cache with: random ones, and those of a model.

A recording holds, for tokens 0 .. T-1, everything after rotation as the cache sees it:
q [L, T, Hq, D], k and v [L, T, H, D], log_beta [L, T, H].
"""

from dataclasses import dataclass

import numpy as np

from . import classes


@dataclass
class Recording:
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    log_beta: np.ndarray
    inv_freq: np.ndarray | None = None  # frequencies of the rotation, [D / 2]; None: not rotated

    @property
    def tokens(self):
        return self.q.shape[1]

    def qkv(self):
        """[L, T, (Hq + 2 H) D] as the kernels take it."""
        return np.concatenate([x.reshape(*x.shape[:2], -1) for x in (self.q, self.k, self.v)], axis=-1)

    def as_float32(self):
        return Recording(*(x.astype(np.float32) for x in (self.q, self.k, self.v, self.log_beta)), self.inv_freq)

    def layers(self, chosen):
        return Recording(*(x[chosen] for x in (self.q, self.k, self.v, self.log_beta)), self.inv_freq)


def random_gates(rng, shape, style):
    """log_beta: of a trained gate, drawn from three values, or all zero."""
    if style == "equal":
        return np.zeros(shape)
    if style == "tied":
        return -rng.integers(0, 3, shape) / 64
    return -np.log1p(np.exp(-rng.uniform(-4, 20, shape)))


def random_recording(seed, layers, heads_q, heads_kv, head_dim, tokens, gates="trained"):
    """Streams with topics: keys come in clusters, so that there is redundancy to find; queries
    follow the topic of the moment, so that attention is uneven, and more so in some heads."""
    rng = np.random.default_rng(seed)
    group, topics = heads_q // heads_kv, 12
    topic = np.repeat(rng.integers(0, topics, tokens), rng.integers(1, 9, tokens))[:tokens]
    centers = rng.standard_normal((layers, heads_kv, topics, head_dim))
    noise = rng.uniform(0.4, 1.2, (layers, 1, heads_kv, 1))
    k = np.moveaxis(centers[:, :, topic], 1, 2) + noise * rng.standard_normal((layers, tokens, heads_kv, head_dim))
    sharp = rng.uniform(0.5, 2.0, (layers, 1, heads_q, 1))
    topic_q = np.where(rng.random(tokens) < 0.2, rng.integers(0, topics, tokens), topic)
    q = np.repeat(np.moveaxis(centers[:, :, topic_q], 1, 2), group, axis=2)
    q = sharp * q + rng.standard_normal((layers, tokens, heads_q, head_dim))
    v = rng.standard_normal((layers, tokens, heads_kv, head_dim)) + 0.5 * k
    return Recording(q, k, v, random_gates(rng, v.shape[:3], gates)).as_float32()


def redundant_recording(seed, layers, heads_q, heads_kv, head_dim, tokens, theta=10000.0):
    """As random_recording, with keys and values of a topic nearly alike, and rotated."""
    r, rng = random_recording(seed, layers, heads_q, heads_kv, head_dim, tokens), np.random.default_rng(seed)
    topics = rng.standard_normal((2, 12, layers, heads_kv, head_dim))
    topic = np.repeat(rng.integers(0, 12, tokens), rng.integers(1, 9, tokens))[:tokens]
    k, v = (np.moveaxis(which[topic], 0, 1) for which in topics)
    spread = rng.uniform(0.1, 0.6, (2, layers, tokens, heads_kv, 1))
    k = (k + spread[0] * r.k) * rng.uniform(0.5, 1.5, spread[0].shape)
    inv_freq = np.float32(theta) ** -(np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    q = r.q + np.repeat(k, heads_q // heads_kv, axis=2)
    q, k = (classes.turned(x, np.arange(tokens)[:, None], inv_freq.astype(np.float64)) for x in (q, k))
    return Recording(q, k, v + spread[1] * r.v, r.log_beta, inv_freq).as_float32()


# Transforms a random recording's queries, keys and values, [L, T, heads, D] each, into streams whose
# scores tie or vanish, or have nothing to compare.
DEGENERATE = {
    "one token": lambda x, t: x[:, :1].repeat(t, axis=1),
    "two tokens": lambda x, t: x[:, np.arange(t) % 2],
    "zeros": lambda x, t: np.zeros_like(x),
    "zero every third": lambda x, t: x * (np.arange(t) % 3 > 0)[None, :, None, None],
    "sharp": lambda x, t: 2 * x,
}


def degenerate_recording(kind, seed, layers, heads_q, heads_kv, head_dim, tokens):
    """Equal tokens are equal whatever their position: nothing is rotated."""
    r, change = random_recording(seed, layers, heads_q, heads_kv, head_dim, tokens), DEGENERATE[kind]
    return Recording(*(change(x, tokens) for x in (r.q, r.k, r.v)), change(r.log_beta[..., None], tokens)[..., 0]).as_float32()


def recording_for(name, *shape):
    """Random streams in which a policy finds work."""
    rotated = name.startswith(("ems", "expected"))
    return (redundant_recording if rotated else random_recording)(*shape)


def model_recording(reference, tokens):
    """Records the input of a reference_model.Reference's cache while it reads the tokens, without evictions."""
    parts, project = [], reference.project

    def recording(layer, x, positions):
        parts.append(project(layer, x, positions))
        return parts[-1]

    reference.reset()
    reference.project = recording
    reference.append(tokens)
    reference.project = project
    return Recording(*(np.stack(x) for x in zip(*parts)), reference.inv).as_float32()
