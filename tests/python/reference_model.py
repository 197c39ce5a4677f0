"""A slow, independent reference of model, gates, cache and policies in float64 numpy.

Written from the published formulas (RoFormer; GQA; retention gates, arXiv 2512.03324 and 2605.09649)
and the eviction rule of the documentation, not from the C code.  It loads a Hugging Face directory
(Qwen3, Qwen2, Llama), replays given tokens through a cache of policies/, and returns
log-probabilities, log_beta and kept positions.
"""

import json
import math
from pathlib import Path

import numpy as np
from safetensors import deserialize

from policies.rules import Rule
from policies.schedule import schedule
from policies.sequence import STORED, Sequence


# --- files ----------------------------------------------------------------


def to_float64(dtype, shape, data):
    if dtype == "BF16":
        raw = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        return raw.view(np.float32).astype(np.float64).reshape(shape)
    types = {"F32": "<f4", "F16": "<f2", "I32": "<i4", "I64": "<i8"}
    values = np.frombuffer(data, types[dtype]).reshape(shape)
    return values if dtype in ("I32", "I64") else values.astype(np.float64)


def load_tensors(path):
    return {name: to_float64(t["dtype"], t["shape"], bytes(t["data"]))
            for name, t in deserialize(Path(path).read_bytes())}


def load_directory(directory):
    index = directory / "model.safetensors.index.json"
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() \
        else ["model.safetensors"]
    tensors = {}
    for name in names:
        tensors.update(load_tensors(directory / name))
    return tensors


def load_gates(path):
    """(header, tensors) of a gates file."""
    data = Path(path).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(json.loads(data[8:8 + size])["__metadata__"]["keepd"])
    return header, load_tensors(path)


# --- formulas -------------------------------------------------------------


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def silu(x):
    return x / (1 + np.exp(-x))


def log_sigmoid(z):
    return np.minimum(z, 0) - np.log1p(np.exp(-np.abs(z)))


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def rope_frequencies(config, head_dim):
    """(inverse frequencies, factor of cos and sin)"""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    inv = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if kind == "default":
        return inv, 1.0
    factor = rope["factor"]
    if kind == "linear":
        return inv / factor, 1.0
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * inv / (2 * math.pi)
        s = np.clip((turns - low) / (high - low), 0, 1)
        return (1 - s) * inv / factor + s * inv, 1.0
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
        index = [head_dim * math.log(original / (2 * math.pi * r)) / (2 * math.log(theta))
                 for r in (rope.get("beta_fast", 32), rope.get("beta_slow", 1))]
        low, high = max(math.floor(index[0]), 0), min(math.ceil(index[1]), head_dim - 1)
        ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
        return inv / factor * ramp + inv * (1 - ramp), rope.get("attention_factor", 0.1 * math.log(factor) + 1)
    raise ValueError(f"rope type {kind}")


def rotate(x, angle, factor):
    """Rotary embedding of x [rows, heads, D] by angle [rows, D/2]; pairs are (j, j + D/2)."""
    cos, sin = np.cos(angle)[:, None] * factor, np.sin(angle)[:, None] * factor
    a, b = np.split(x, 2, -1)
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), -1)


# --- model ----------------------------------------------------------------


class Reference:
    def __init__(self, directory, gates=None, kv_dtype="f32"):
        directory = Path(directory)
        c = self.config = json.loads((directory / "config.json").read_text())
        self.tensors = load_directory(directory)
        self.layers, self.heads_q = c["num_hidden_layers"], c["num_attention_heads"]
        self.heads_kv = c.get("num_key_value_heads") or self.heads_q
        self.head_dim = c.get("head_dim") or c["hidden_size"] // self.heads_q
        self.eps = c["rms_norm_eps"]
        self.inv, self.rope_factor = rope_frequencies(c, self.head_dim)
        self.stored = STORED[kv_dtype]
        default = directory / "gates.safetensors"
        path = gates if gates is not None else default if default.exists() else ""
        self.gates = load_gates(path) if path else None
        self.reset()

    def reset(self, rule=Rule()):
        """An empty cache, which records what the rule will want to know."""
        self.cache = Sequence(rule, self.layers, self.heads_q, self.heads_kv, self.head_dim,
                              self.head_dim ** -0.5, self.stored, self.inv)

    @property
    def tokens(self):
        return self.cache.tokens

    def linear(self, name, x):
        y = x @ self.tensors[name + ".weight"].T
        return y + self.tensors[name + ".bias"] if name + ".bias" in self.tensors else y

    def log_beta(self, layer, x):
        """[rows, heads_kv]"""
        if self.gates is None:
            return np.zeros((len(x), self.heads_kv))
        header, t = self.gates
        out = []
        for head in range(self.heads_kv):
            per_head = len(t["w1"]) == self.layers * self.heads_kv
            block = layer * self.heads_kv + head if per_head else layer
            h = silu(x @ t["w1"][block].T + t["b1"][block])
            if header["type"] == "rg10":
                h = silu(h @ t["w2"][layer].T + t["b2"][layer])
            row = t["row"][layer, head]
            out.append(log_sigmoid(h @ t["w_last"][row] + t["c"][row]))
        return np.stack(out, -1)

    def project(self, layer, x, positions):
        """Queries and keys after rotation, values, log_beta."""
        name = f"model.layers.{layer}.self_attn."
        q, k, v = (self.linear(name + p, x).reshape(len(x), -1, self.head_dim)
                   for p in ("q_proj", "k_proj", "v_proj"))
        if name + "q_norm.weight" in self.tensors:
            q = rms_norm(q, self.tensors[name + "q_norm.weight"], self.eps)
            k = rms_norm(k, self.tensors[name + "k_norm.weight"], self.eps)
        angle = positions[:, None] * self.inv
        q, k = rotate(q, angle, self.rope_factor), rotate(k, angle, self.rope_factor)
        return q, k, v, self.log_beta(layer, x)

    def attention(self, layer, x, positions):
        out = self.cache.append_layer(layer, *self.project(layer, x, positions))
        return self.linear(f"model.layers.{layer}.self_attn.o_proj", out.reshape(len(x), -1))

    def append(self, ids):
        """Log-probabilities [len(ids), vocab] after each of the next tokens."""
        positions = np.arange(self.tokens, self.tokens + len(ids))
        t = self.tensors
        x = t["model.embed_tokens.weight"][np.asarray(ids)]
        for layer in range(self.layers):
            name = f"model.layers.{layer}."
            x = x + self.attention(layer, rms_norm(x, t[name + "input_layernorm.weight"], self.eps), positions)
            y = rms_norm(x, t[name + "post_attention_layernorm.weight"], self.eps)
            gate, up = (self.linear(name + f"mlp.{p}_proj", y) for p in ("gate", "up"))
            x = x + self.linear(name + "mlp.down_proj", silu(gate) * up)
        self.cache.tokens += len(ids)
        head = "lm_head.weight" if "lm_head.weight" in t and not self.config.get("tie_word_embeddings") \
            else "model.embed_tokens.weight"
        return log_softmax(rms_norm(x, t["model.norm.weight"], self.eps) @ t[head].T)

    def streams(self):
        return [[(stream.pos, stream.log_beta) for stream in row] for row in self.cache.streams]


class LatentReference(Reference):
    """Latent attention (DeepSeek-V2, arXiv 2405.04434) with dense networks, computed as it is cached: one KV head, whose
    values are what keys begin with. Keys here have the numbers that rotate at the ends of both halves."""

    def __init__(self, directory, gates=None, kv_dtype="f32"):
        c = json.loads((Path(directory) / "config.json").read_text())
        self.rank, self.still, self.turned, self.dim_v = (
            c[n] for n in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        super().__init__(directory, gates, kv_dtype)

    def reset(self, rule=Rule()):
        self.heads_kv, self.head_dim = 1, self.rank + self.turned
        self.inv = rope_frequencies(self.config, self.turned)[0]
        self.cache = Sequence(rule, self.layers, self.heads_q, 1, self.head_dim, (self.still + self.turned) ** -0.5, self.stored,
                              np.concatenate((np.zeros(self.rank // 2), self.inv)), value_dim=self.rank)

    def parts(self, layer, name):
        """The matrices of all heads that make keys and values of the cached vector."""
        rows = self.tensors[f"model.layers.{layer}.self_attn.kv_b_proj.weight"].reshape(self.heads_q, -1, self.rank)
        return rows[:, :self.still] if name == "k" else rows[:, self.still:]

    def join(self, plain, turning, angle):
        turned = rotate(np.concatenate((turning[..., ::2], turning[..., 1::2]), -1), angle, 1.0)
        return np.concatenate([x for pair in zip(np.split(plain, 2, -1), np.split(turned, 2, -1)) for x in pair], -1)

    def project(self, layer, x, positions):
        name, t = f"model.layers.{layer}.self_attn.", self.tensors
        down = rms_norm(self.linear(name + "q_a_proj", x), t[name + "q_a_layernorm.weight"], 1e-6)
        q = self.linear(name + "q_b_proj", down).reshape(len(x), self.heads_q, -1)
        entry = self.linear(name + "kv_a_proj_with_mqa", x)[:, None]
        c = rms_norm(entry[..., :self.rank], t[name + "kv_a_layernorm.weight"], 1e-6)
        angle = positions[:, None] * self.inv
        q = self.join(np.einsum("nhs,hsr->nhr", q[..., :self.still], self.parts(layer, "k")), q[..., self.still:], angle)
        return q, self.join(c, entry[..., self.rank:], angle), c, self.log_beta(layer, x)

    def attention(self, layer, x, positions):
        out = self.cache.append_layer(layer, *self.project(layer, x, positions))
        out = np.einsum("nhr,hvr->nhv", out, self.parts(layer, "v"))
        return self.linear(f"model.layers.{layer}.self_attn.o_proj", out.reshape(len(x), -1))


def replay(reference, tokens, prompt, budget, buffer, chunk, evict):
    """Replays tokens; the first `prompt` are a prompt, the rest count as generated one by one.
    `evict()` is called when an eviction is due.  Returns log-probabilities [len(tokens), vocab]."""
    rows, at = [], 0
    for count, full in schedule(len(tokens), prompt, budget, buffer, chunk):
        if count:
            rows.append(reference.append(tokens[at:at + count]))
            at += count
        if full:
            evict()
    return np.concatenate(rows)
