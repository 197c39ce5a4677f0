"""Fits retention gates to a frozen Qwen3, Qwen2 or Llama directory by regression: minutes instead of hours.

    python fit_gates.py /path/to/model --chats chats.jsonl --text book.txt --run RUN/fit

First the model reads `--texts` texts once, and what each cache entry was worth to later tokens is measured
(`importance.py`) and kept in the run's folder. Then the gates alone are trained on these measurements: at the moments
at which a daemon would evict, the entries are ranked as `global` ranks them, over all layers and heads, and the loss
is the share of the measured worth that falls below the cutoff. The cutoff is soft, so that it has a gradient.

Both parts report the minutes left, and both go on where they were stopped. `train_gates.py --start` continues from the
result with the whole model in the loop.
"""

import argparse
import math
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from data import Chats, PlainText
from gates import GateBank
from importance import Probe, load_capture, save_capture
from models import DTYPES, base_digests
from options import count, file, positive
from report import Report
from runs import Run, World, add_arguments

SHARES = (1 / 32, 0.4)      # tokens of a text kept per head on average: drawn log-uniformly for each text of a step
HELD_OUT = 8                # every eighth text is only evaluated
MOMENTS = 6                 # evictions of a text that a step sees
SOFTNESS = 0.3              # width of the cutoff, in units of log(age)


# --- measurements -----------------------------------------------------------

def texts(a):
    """Rows of ids, alternating between the sources; a text too short to evict anything is passed over."""
    sources = []
    if a.chats:
        sources.append(Chats(a.chats, AutoTokenizer.from_pretrained(a.model), a.seed, a.length, 1, a.length, 0.0))
    if a.text:
        sources.append(PlainText(Tokenizer.from_file(str(a.model / "tokenizer.json")), a.text, a.seed, a.length, 1))
    for n in range(16 * a.texts):
        ids = sources[n % len(sources)].batch(n // len(sources)).ids[0, :-1]
        if len(ids) >= 4 * a.window:
            yield ids
    raise SystemExit(f"too few texts of at least {4 * a.window} tokens")


def measure(a, world, report):
    """The captures of a.texts texts, from the run's folder or made now."""
    folder = a.run / "captures"
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{n:05}.safetensors" for n in range(a.texts)]
    missing = [n for n, f in enumerate(files) if not f.exists()]
    if missing:
        probe, begin, done = Probe(a.model, world.device, DTYPES[a.dtype]), time.time(), 0
        for n, ids in zip(range(a.texts), texts(a)):
            if n not in missing:
                continue
            generator = torch.Generator().manual_seed(a.seed + n)
            save_capture(probe.capture(ids, a.entries, a.window, generator), files[n])
            done += 1
            left = (time.time() - begin) / done * (len(missing) - done)
            report.line({"measured": n + 1, "of": a.texts, "tokens": len(ids), "minutes_left": round(left / 60, 1)})
    return [load_capture(f) for f in files]


# --- ranking ----------------------------------------------------------------

def log_rates(bank, x):
    """log(-log_beta) of entries x [L, n, d_model] -> [L, H, n]. The rank of an entry in `global` with horizon 1 is
    -age * exp of it: the sum with log(age) ranks in reverse."""
    h = F.silu(torch.baddbmm(bank.b1[:, None], x.float(), bank.w1.transpose(1, 2)))
    rows = bank.row.long()
    z = torch.einsum("lnm,lhm->lhn", h, bank.w_last[rows]) + bank.c[rows][..., None]
    return torch.where(z > 15, -z, torch.log(F.softplus(-z.clamp(max=15))))     # softplus(-z) = -logsigmoid(z)


def soft_cutoff(rank, free, wanted):
    """[C]: the cutoffs at which the free entries' soft counts are `wanted`; rank [L, H, n, C], free [n, C]. Its gradient
    is that of the equation: whatever is ranked lower makes room."""
    def soft(cut):
        return torch.sigmoid((cut - rank) / SOFTNESS) * free

    with torch.no_grad():
        low, high = torch.full_like(wanted, -20.0), torch.full_like(wanted, 20.0)
        for _ in range(18):
            cut = (low + high) / 2
            over = soft(cut).sum((0, 1, 2)) > wanted
            low, high = torch.where(over, low, cut), torch.where(over, cut, high)
        p = soft(cut)
        slope = (p * (free - p)).sum((0, 1, 2)) / SOFTNESS
    total = soft(cut).sum((0, 1, 2))
    return cut - (total - total.detach()) / slope.clamp(min=1e-6)


class Moments:
    """Evictions of a text: what was measured, which entries are not protected, and how many of these may stay."""

    def __init__(self, a, capture, share, chosen):
        begin = capture.begin[chosen]
        self.age = (begin[None] - capture.at[:, None]).float()                       # [n, C]
        self.free = ((self.age > a.recent) & (capture.at[:, None] >= a.sinks)).float()
        self.worth = capture.loss[..., chosen].float() * self.free                  # [L, H, n, C]
        L, H, n, _ = self.worth.shape
        kept = max(0.0, share * capture.length - a.recent - a.sinks)
        self.wanted = torch.minimum(torch.full((len(chosen),), kept * L * H * n / capture.length),
                                    self.free.sum(0) * L * H * 0.999)

    def rank(self, log_rate):
        return log_rate[..., None] + self.age.clamp(min=1).log()

    def soft_loss(self, rank):
        cut = soft_cutoff(rank, self.free, self.wanted)
        lost = (self.worth * (1 - torch.sigmoid((cut - rank) / SOFTNESS))).sum()
        return lost / self.worth.sum().clamp(min=1e-30)

    def hard_loss(self, rank):
        """The same share with the cutoff that a daemon makes."""
        rank, worth = rank.masked_fill(self.free == 0, torch.inf).flatten(0, 2), self.worth.flatten(0, 2)
        lost = 0.0
        for c, wanted in enumerate(self.wanted.long().tolist()):
            lost += worth[rank[:, c].argsort()[wanted:], c].sum().item()
        return lost / max(worth.sum().item(), 1e-30)


def late(capture, share):
    """The windows before which an eviction at this share would remove something."""
    return [c for c, t in enumerate(capture.begin.tolist()) if t > share * capture.length]


# --- the fit ----------------------------------------------------------------

class FitRun(Run):
    NAME = "bank"
    BAR = ("step", "loss", "minutes_left")

    def __init__(self, a, world, captures):
        torch.manual_seed(a.seed)
        self.held_out, self.captures = captures[::HELD_OUT], [c for n, c in enumerate(captures) if n % HELD_OUT]
        layers, heads, _, _ = captures[0].loss.shape
        bank = GateBank(layers, heads, captures[0].x.shape[-1], a.width, "rg", "untied", math.log(a.length / 8))
        if a.per_head:
            bank.w_last.data.zero_()
            for name, parameter in bank.named_parameters():
                parameter.requires_grad_(name == "c")
        self.base = base_digests(a.model)
        super().__init__(a, world, bank, torch.optim.Adam(bank.parameters(), lr=a.lr, betas=(0.9, 0.98)))

    def train_step(self):
        a, rng, losses = self.a, random.Random(f"{self.a.seed} {self.step}"), []
        for capture in rng.choices(self.captures, k=a.rows):
            share = math.exp(rng.uniform(*map(math.log, SHARES)))
            windows = late(capture, share)
            at = Moments(a, capture, share, sorted(rng.sample(windows, min(MOMENTS, len(windows)))))
            loss = at.soft_loss(at.rank(log_rates(self.module, capture.x))) / a.rows
            loss.backward()
            losses.append(loss.item())
        return {"loss": sum(losses), "tokens": a.rows * a.length}

    @torch.no_grad()
    def evaluate(self):
        """Shares of the measured worth that hard evictions lose in held-out texts: with the gates, and with the newest."""
        out = {}
        for share in (1 / 4, 1 / 8, 1 / 16):
            lost = []
            for capture in self.held_out:
                at = Moments(self.a, capture, share, late(capture, share))
                newest = at.age.log1p().expand_as(at.worth)
                lost.append([at.hard_loss(at.rank(log_rates(self.module, capture.x))), at.hard_loss(newest)])
            gates, newest = torch.tensor(lost).mean(0).tolist()
            out[f"{share:g}"] = {"gates": round(gates, 4), "newest": round(newest, 4)}
        return {"held_out_texts": len(self.held_out), "lost": out}

    def saved(self):
        self.module.save(self.a.gates, self.base, self.a.length // 8, torch.bfloat16, horizon=1,
                         sinks=self.a.sinks, recent=self.a.recent)


def arguments():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("model", type=Path, help="model directory")
    ap.add_argument("--gates", type=Path, help="gates file (default: gates.safetensors in the model directory)")
    ap.add_argument("--chats", type=file, help="chats: JSON lines {\"messages\": [...]}")
    ap.add_argument("--text", type=file, help="text file; with --chats every other text is from it")
    ap.add_argument("--texts", type=count, default=100, help="texts that the model reads")
    ap.add_argument("--length", type=count, default=2048, help="tokens of a text")
    ap.add_argument("--entries", type=count, default=384, help="entries per head that are measured in each text")
    ap.add_argument("--window", type=count, default=64, help="tokens between two evictions")
    ap.add_argument("--width", type=count, default=64, help="of the gates' hidden layer")
    ap.add_argument("--per-head", action="store_true",
                    help="one lifetime for each head, whatever the token: a head keeps its newest tokens, and only how many is fitted")
    ap.add_argument("--sinks", type=int, default=4, help="protected first tokens")
    ap.add_argument("--recent", type=int, default=16, help="protected last tokens")
    ap.add_argument("--rows", type=count, default=4, help="texts per step")
    add_arguments(ap, minutes=600, lr=3e-3, warmup=20, steps=400, dtype="bfloat16")
    a = ap.parse_args()
    if a.gates is None:
        a.gates = a.model / "gates.safetensors"
    if a.run is None:
        ap.error("--run is required")
    if not a.chats and not a.text:
        ap.error("--chats or --text is required")
    if a.texts < 2:
        ap.error("--texts: at least 2, as one of them is only evaluated")
    if a.length < 4 * a.window:
        ap.error(f"--length {a.length}: at least four windows")
    return a


def main():
    a = arguments()
    torch.set_num_threads(a.threads)
    world = World(a.device)
    if world.size > 1:
        raise SystemExit("fit_gates.py is one process; train_gates.py uses several")
    run = FitRun(a, world, measure(a, world, Report()))
    run.resume()
    run.train()
    run.report.line(run.evaluate())
    world.close()


if __name__ == "__main__":
    main()
