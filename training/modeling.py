"""A compact Qwen3 decoder for training; parameter names are those of transformers."""

import torch
import torch.nn.functional as F
from torch import nn

CONFIG = dict(vocab_size=2048, hidden_size=256, num_hidden_layers=6, num_attention_heads=8,
              num_key_value_heads=4, head_dim=64, intermediate_size=640, rope_theta=500000.0,
              rms_norm_eps=1e-6, max_position_embeddings=8192)


def rope_tables(positions, head_dim, theta):
    """cos and sin [B, 1, T, head_dim] of the rotate-half form, fp32."""
    inv = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim)
    angle = positions[:, None, :, None].float() * inv
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def causal_attention(q, k, v, block=128):
    """Softmax attention by blocks of queries.

    Written out because torch's fused CPU kernel spends most of a step in its bf16
    backward; compiled, this form took 0.6 of its time at rows of 512 and no less at 1,024.
    """
    T = q.shape[2]
    if T > 512 or q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    out = []
    for i in range(0, T, block):
        j = min(i + block, T)
        s = (q[:, :, i:j] @ k[:, :, :j].mT).float() * q.shape[-1] ** -0.5
        late = torch.arange(j)[None] > torch.arange(i, j)[:, None]
        out.append(s.masked_fill(late, -torch.inf).softmax(-1).to(v.dtype) @ v[:, :, :j])
    return torch.cat(out, 2)


class Norm(nn.Module):
    def __init__(self, size, eps, start=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), start))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, self.hd = c["hidden_size"], c["head_dim"]
        self.hq, self.hk = c["num_attention_heads"], c["num_key_value_heads"]
        self.q_proj = nn.Linear(d, self.hq * self.hd, bias=False)
        self.k_proj = nn.Linear(d, self.hk * self.hd, bias=False)
        self.v_proj = nn.Linear(d, self.hk * self.hd, bias=False)
        self.o_proj = nn.Linear(self.hq * self.hd, d, bias=False)
        # Normalised q and k of length 8 give logits of at most 8; over a thousand keys
        # that is too soft to point at one of them, so k starts longer.
        self.q_norm = Norm(self.hd, c["rms_norm_eps"])
        self.k_norm = Norm(self.hd, c["rms_norm_eps"], 1.5)

    def forward(self, x, cos, sin):
        B, T, _ = x.shape
        w = torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight))
        q, k, v = F.linear(x, w).view(B, T, -1, self.hd).split((self.hq, self.hk, self.hk), 2)
        q = rotate(self.q_norm(q).transpose(1, 2), cos, sin).to(v.dtype)
        k = rotate(self.k_norm(k).transpose(1, 2), cos, sin).to(v.dtype)
        g = self.hq // self.hk
        k, v = k.repeat_interleave(g, 1), v.transpose(1, 2).repeat_interleave(g, 1)
        y = causal_attention(q, k, v)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, f = c["hidden_size"], c["intermediate_size"]
        self.gate_proj = nn.Linear(d, f, bias=False)
        self.up_proj = nn.Linear(d, f, bias=False)
        self.down_proj = nn.Linear(f, d, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = Norm(c["hidden_size"], c["rms_norm_eps"])
        self.self_attn = Attention(c)
        self.post_attention_layernorm = Norm(c["hidden_size"], c["rms_norm_eps"])
        self.mlp = MLP(c)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = Norm(c["hidden_size"], c["rms_norm_eps"])


class Nano(nn.Module):
    def __init__(self, c=CONFIG):
        super().__init__()
        self.c = c
        self.model = Decoder(c)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.02 / (2 * c["num_hidden_layers"]) ** 0.5 if deep else 0.02)

    def forward(self, ids, positions):
        cos, sin = rope_tables(positions, self.c["head_dim"], self.c["rope_theta"])
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)
