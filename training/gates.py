"""Retention gates around any Qwen3, Qwen2 or Llama model of transformers.

A hook on every attention module computes the gate from the same normalised residual that feeds q, k
and v; our attention adds the decay while training, or hides evicted keys while simulating the daemon's
cache.
"""

import json
import math

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from models import OwnAttention, causal


class GateBank(nn.Module):
    """All gates of a model: log_beta = logsigmoid(w_row . h + c_row), one per KV head.

    type   rg:   h = silu(W1 x + b1)                       (TRIM-KV, arXiv 2512.03324)
           rg10: h = silu(W2 silu(W1 x + b1) + b2)         (global retention gates, arXiv 2605.09649)
    tying  paper: one projection, an embedding h per layer and head (rg only)
           code:  one projection row per head shared by all layers, an embedding per layer
           untied: a projection row per layer and head, an embedding per layer
    """

    def __init__(self, layers, heads, d_model, width=64, type="rg", tying="code", bias=8.0):
        super().__init__()
        if type == "rg10" and tying == "paper":
            raise SystemExit("an embedding per head (tying paper) is supported for type rg only")
        self.layers, self.heads, self.d_model = layers, heads, d_model
        self.width, self.type, self.tying = width, type, tying
        hidden = layers * heads if tying == "paper" else layers
        rows = {"paper": 1, "code": heads, "untied": layers * heads}[tying]
        row = {"paper": torch.zeros(layers, heads), "code": torch.arange(heads).expand(layers, heads),
               "untied": torch.arange(layers * heads).view(layers, heads)}[tying]
        self.w1 = nn.Parameter(torch.randn(hidden, width, d_model) / d_model ** 0.5)
        self.b1 = nn.Parameter(torch.zeros(hidden, width))
        if type == "rg10":
            self.w2 = nn.Parameter(torch.randn(layers, width, width) / width ** 0.5)
            self.b2 = nn.Parameter(torch.zeros(layers, width))
        self.w_last = nn.Parameter(torch.randn(rows, width) * 0.02)
        self.c = nn.Parameter(torch.full((rows,), float(bias)))
        self.register_buffer("row", row.to(torch.int32).contiguous())

    def log_beta(self, layer, x):
        """x [B, T, d] -> [B, H, T], fp32."""
        x = x.float()
        rows = self.row[layer].long()
        w, c = self.w_last[rows], self.c[rows]
        if self.tying == "paper":
            part = slice(layer * self.heads, (layer + 1) * self.heads)
            h = F.silu(torch.einsum("btd,hmd->bhtm", x, self.w1[part]) + self.b1[part][:, None])
            return F.logsigmoid(torch.einsum("bhtm,hm->bht", h, w) + c[:, None])
        h = F.silu(F.linear(x, self.w1[layer], self.b1[layer]))
        if self.type == "rg10":
            h = F.silu(F.linear(h, self.w2[layer], self.b2[layer]))
        return F.logsigmoid(torch.einsum("btm,hm->bht", h, w) + c[:, None])

    def header(self, base, trained_budget, horizon=128, **protected):
        return {"version": 1, "type": self.type, "width": self.width, "act": "silu", "layers": self.layers,
                "heads": self.heads, "d_model": self.d_model, "tying": self.tying,
                "trained_budget": trained_budget, "horizon": horizon, **protected, "base": base}

    def save(self, path, base, trained_budget, large=torch.float32, **defaults):
        """`large`: the type of the matrices of hidden layers; `defaults`: horizon, sinks and recent of the score."""
        tensors = {k: v.detach().cpu().to(large if v.dim() == 3 else v.dtype).contiguous()
                   for k, v in self.state_dict().items()}
        write_gates(path, tensors, self.header(base, trained_budget, **defaults))

    def load(self, path):
        """Takes the values of a gates file of the same kind; errors name what differs."""
        header, mine = read_header(path), self.header("", 0)
        for key in ("layers", "heads", "d_model", "type", "width", "tying"):
            if header.get(key) != mine[key]:
                raise SystemExit(f"{path}: {key} is {header.get(key)}, expected {mine[key]}")
        try:
            self.load_state_dict(load_file(path))
        except RuntimeError as e:
            raise SystemExit(f"{path}: {e}") from None


def write_gates(path, tensors, header):
    """The gates file: safetensors with the header as JSON in the metadata key `keepd` (model/gates.h)."""
    partial = path.with_name(path.name + ".tmp")
    save_file(tensors, partial, metadata={"keepd": json.dumps(header)})
    partial.chmod(0o644)        # safetensors leaves it to its owner alone; a daemon mostly runs as another
    partial.replace(path)


def read_header(path):
    try:
        with safe_open(path, "pt") as f:
            text = (f.metadata() or {}).get("keepd")
    except (OSError, SafetensorError) as e:
        raise SystemExit(f"{path}: cannot be read as safetensors: {e}") from None
    if text is None:
        raise SystemExit(f"{path}: no metadata key \"keepd\": this is not a gates file")
    return json.loads(text)


# --- attention ------------------------------------------------------------

def decayed(q, k, v, log_beta, positions, scaling):
    """Causal attention with (t - i) * log_beta_i added to the logits.

    The term is the dot product of (t, 1) with (log_beta_i, -i * log_beta_i): two more
    columns of q and k, so the ordinary fused attention computes it and its gradient.
    Positions are centred to keep the products small in fp32.
    """
    with torch.autocast(q.device.type, enabled=False):
        g = q.shape[1] // k.shape[1]
        q, k, v = q.float(), k.repeat_interleave(g, 1).float(), v.repeat_interleave(g, 1).float()
        pos = (positions - positions[:, :1]).float()
        pos = pos - pos[:, -1:] / 2
        lb = log_beta.repeat_interleave(g, 1)
        t = pos[:, None].expand(lb.shape)
        pad = (0, 6)                               # keep the head size a multiple of 8
        q = torch.cat((q * scaling, F.pad(torch.stack((t, torch.ones_like(t)), -1), pad)), -1)
        k = torch.cat((k, F.pad(torch.stack((lb, -t * lb), -1), pad)), -1)
        out = F.scaled_dot_product_attention(q, k, F.pad(v, (0, 8)), is_causal=True, scale=1.0)
        return out[..., :v.shape[-1]]


class GatedModel(OwnAttention):
    """A frozen base model with gates. `mode`: plain, gated or cached."""

    def __init__(self, directory, device="cpu", dtype=torch.float32, **bank):
        super().__init__(directory, device, dtype)
        self.model.requires_grad_(False)
        c = self.model.config
        self.layers, self.heads = c.num_hidden_layers, c.num_key_value_heads
        self.bank = GateBank(self.layers, self.heads, c.hidden_size, **bank).to(device)
        self.mode, self.positions, self.log_beta, self.cache = "plain", None, {}, None
        for i, layer in enumerate(self.model.model.layers):
            layer.self_attn.register_forward_pre_hook(self.gate_hook(i), with_kwargs=True)

    def gate_hook(self, layer):
        def hook(_module, args, kwargs):
            if self.mode != "plain":
                x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
                with torch.autocast(x.device.type, enabled=False):
                    self.log_beta[layer] = self.bank.log_beta(layer, x)
        return hook

    def hidden(self, ids, positions, mode="plain"):
        self.mode, self.positions, self.log_beta = mode, positions, {}
        return super().hidden(ids, positions)

    def __call__(self, ids, positions, mode="plain"):
        return self.logits(self.hidden(ids, positions, mode))

    def layer_log_beta(self):
        """Per layer [B, H, T], of the last gated call."""
        return [self.log_beta[i] for i in range(self.layers)]

    def attend(self, layer, q, k, v, scaling):
        if self.mode == "cached":
            return self.cache.attend(layer, q, k, v, scaling, self.log_beta[layer])
        if self.mode == "gated":
            return decayed(q, k, v, self.log_beta[layer], self.positions, scaling).to(self.model.dtype)
        return causal(q, k, v, scaling)


# --- hard eviction ----------------------------------------------------------

def horizon_weight(lb, n=128):
    """log of the mean retention over the next n steps: log((1-e^(n lb)) / (n (1-e^lb)))."""
    lb = lb.clamp(max=-1e-9).double()
    w = torch.log(-torch.expm1(n * lb)) - torch.log(-torch.expm1(lb)) - math.log(n)
    return w.float()


HORIZON = {"global": 128, "trimkv": 1}      # the daemon's defaults, paging/policy.c
RECENT = {"global": 16}


class SimulatedCache:
    """The daemon's cache as a mask: what is kept per layer and head, evicted every `chunk` tokens.

    Entries stay in memory; eviction only hides them. `budget` is the kept mean per
    layer and head after an eviction, sinks and recent entries included, which give way to a
    smaller budget; between evictions a sequence holds up to budget + chunk.
    """

    def __init__(self, policy, budget, sinks=4):
        self.policy, self.budget, self.sinks = policy, budget, min(sinks, budget)
        self.recent = min(RECENT.get(policy, 0), budget - self.sinks)
        self.k, self.v, self.lb, self.alive = {}, {}, {}, {}

    def attend(self, layer, q, k, v, scaling, lb):
        new = torch.ones(lb.shape, dtype=torch.bool, device=q.device)
        if layer in self.k:
            k, v = torch.cat((self.k[layer], k), 2), torch.cat((self.v[layer], v), 2)
            lb, new = torch.cat((self.lb[layer], lb), 2), torch.cat((self.alive[layer], new), 2)
        self.k[layer], self.v[layer], self.lb[layer], self.alive[layer] = k, v, lb, new
        T, S, g = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
        at = torch.arange(S, device=q.device)
        mask = (new[:, :, None] & (at[None] <= at[S - T:, None])).repeat_interleave(g, 1)
        return F.scaled_dot_product_attention(q, k.repeat_interleave(g, 1), v.repeat_interleave(g, 1),
                                              attn_mask=mask, scale=scaling)

    def evict(self):
        L = len(self.k)
        lb = torch.stack([self.lb[i] for i in range(L)], 1)              # [B, L, H, S]
        alive = torch.stack([self.alive[i] for i in range(L)], 1)
        B, _, H, S = lb.shape
        if self.policy == "full" or S <= self.budget:
            return
        age = (S - torch.arange(S, device=lb.device)).float()
        score = -age.expand(lb.shape) if self.policy == "streaming" else age * lb + horizon_weight(lb, HORIZON[self.policy])
        score = score.masked_fill(~alive, -torch.inf)
        score[..., :self.sinks] = torch.inf
        score[..., S - self.recent:] = torch.inf
        if self.policy == "global":
            keep = score.view(B, -1).topk(L * H * self.budget).indices
            kept = torch.zeros_like(alive).view(B, -1).scatter_(1, keep, True).view(lb.shape)
        else:
            kept = torch.zeros_like(alive).scatter_(3, score.topk(self.budget, -1).indices, True)
        for i in range(L):
            self.alive[i] = kept[:, i] & alive[:, i]

    def held(self):
        """[B, L, H, S]: is the entry still there?"""
        return torch.stack([self.alive[i] for i in range(len(self.alive))], 1)


@torch.no_grad()
def simulate(gated, ids, policy, budget, chunk):
    """Arg max at every position when the cache evicts after each chunk; also what it held in the end."""
    gated.cache = SimulatedCache(policy, budget)
    guesses = []
    for at in range(0, ids.shape[1], chunk):
        part = ids[:, at:at + chunk]
        pos = torch.arange(at, at + part.shape[1], device=ids.device).expand(part.shape)
        guesses.append(gated(part, pos, "cached").argmax(-1))
        gated.cache.evict()
    held = gated.cache.held()
    gated.cache = None
    return torch.cat(guesses, 1), held
