"""How much the answers of a model lose when one cache entry is missing: measured, for the regression of gates.

Without entry i, head h's attention output at query t moves by r (o_t - v_i), r = a / (1 - a), a the attention
of t to i.  To second order the divergence of the next-token distributions grows by half of the mean of
(g . r (o_t - v_i))^2, where g is the gradient of log p(y) at that output and y is drawn from the model's own
distribution (the Fisher information).  One draw per position is enough, because the regression averages.
The number is in nats everywhere, so entries of different layers and heads can be compared.
"""

from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

from models import OwnAttention, causal


class Capture(NamedTuple):
    """The contribution of a text: n of its entries per layer and KV head, and C windows of queries."""
    x: torch.Tensor             # [L, n, d_model] bf16: what the gates read
    loss: torch.Tensor          # [L, H, n, C]: what the queries of a window lose without the entry
    at: torch.Tensor            # [n] positions of the entries, ascending
    begin: torch.Tensor         # [C] first position of each window
    length: int                 # tokens of the text


def save_capture(capture, path):
    """Atomically: a file that exists is whole."""
    partial = path.with_suffix(".tmp")
    tensors = {**capture._asdict(), "loss": capture.loss.to(torch.bfloat16), "length": torch.tensor(capture.length)}
    save_file({k: v.contiguous() for k, v in tensors.items()}, partial)
    partial.replace(path)


def load_capture(path):
    t = load_file(path)
    return Capture(**{**t, "length": int(t["length"])})


class Probe(OwnAttention):
    """A base model whose attention is kept for one text."""

    def __init__(self, directory, device="cpu", dtype=torch.bfloat16):
        super().__init__(directory, device, dtype)
        self.model.requires_grad_(False)
        c = self.model.config
        self.layers, self.heads, self.d_model = c.num_hidden_layers, c.num_key_value_heads, c.hidden_size
        self.inputs, self.kept = {}, {}
        for i, layer in enumerate(self.model.model.layers):
            layer.self_attn.register_forward_pre_hook(self.input_hook(i), with_kwargs=True)

    def input_hook(self, layer):
        def hook(_module, args, kwargs):
            x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            self.inputs[layer] = x.detach()[0]
        return hook

    def attend(self, layer, q, k, v, scaling):
        out = causal(q, k, v, scaling)
        if not out.requires_grad:
            out.requires_grad_()
        self.kept[layer] = (q.detach()[0], k.detach()[0], v.detach()[0], scaling, out)
        return out

    @torch.no_grad()
    def drawn_gradient(self, hidden, generator, block):
        """The gradient of sum log p(y) at what feeds the output matrix, y drawn; [1, T, d_model]."""
        w, out = self.model.lm_head.weight, torch.empty_like(hidden)
        for at in range(0, hidden.shape[1], block):
            p = self.logits(hidden[0, at:at + block]).float().softmax(-1)
            y = torch.multinomial(p.cpu(), 1, generator=generator)[:, 0].to(w.device)
            out[0, at:at + block] = w[y] - p.to(w.dtype) @ w
        return out

    def capture(self, ids, entries, window, generator, block=512):
        """The Capture of one text, ids [T]; `entries` of its positions are drawn."""
        T = len(ids)
        hidden = self.hidden(ids[None].to(self.device), torch.arange(T, device=self.device)[None])
        outs = [self.kept[i][4] for i in range(self.layers)]
        grads = torch.autograd.grad(hidden, outs, self.drawn_gradient(hidden.detach(), generator, block))
        at = torch.randperm(T, generator=generator)[:entries].sort().values
        begin = torch.arange(window, T - window + 1, window)
        with torch.no_grad():
            x = torch.stack([self.inputs[i][at].to(torch.bfloat16) for i in range(self.layers)])
            loss = torch.stack([self.windows(i, grads[i][0], at, begin, window) for i in range(self.layers)])
        self.inputs, self.kept = {}, {}
        return Capture(x.cpu(), loss.cpu(), at, begin, T)

    def windows(self, layer, grad, at, begin, window):
        """[H, n, C]: of each window's queries, the sum of what they lose without each entry."""
        q, k, v, scaling, out = self.kept[layer]
        H, d = k.shape[0], k.shape[2]
        o = out.detach()[0]                                    # [Hq, T, d], as grad
        g, every = q.shape[0] // H, torch.arange(q.shape[1], device=q.device)
        base = (grad.float() * o.float()).sum(-1)              # g . o
        result = torch.zeros(H, len(at), len(begin), dtype=torch.float32, device=q.device)
        for c, first in enumerate(begin.tolist()):
            n, times = int((at < first).sum()), every[:first + window]
            if n == 0:
                continue
            t = slice(first, first + window)
            qs = q[:, t].reshape(H, g * window, d)
            logits = (qs @ k[:, :first + window].transpose(1, 2)).float().view(H, g, window, -1) * scaling
            norm = logits.masked_fill(times[None] > times[first:first + window, None], -torch.inf).logsumexp(-1, keepdim=True)
            a = (logits[..., at[:n]] - norm).exp()
            along = (grad[:, t].reshape(H, g * window, d) @ v[:, at[:n]].transpose(1, 2)).float()
            moved = base[:, t].view(H, g, window, 1) - along.view(H, g, window, n)
            drop = (a / (1 - a).clamp(min=1e-2) * moved).sum(1)     # the query heads of a group lose it together
            result[:, :n, c] = (drop * drop).sum(1)
        return result
