"""Trains retention gates for a frozen Qwen3, Qwen2 or Llama directory and evaluates them.

    python train_gates.py ../models/keepd-nano --minutes 20 --run ../../train-run/gates
    python train_gates.py ../models/keepd-nano --evaluate

Data are the generated dialogues (`corpus.py`), or any text with `--text FILE`.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

import corpus
from gates import GatedModel, simulate, weights_sha256


class Dialogues:
    def __init__(self, tokenizer, seed, length, rows, reach, gap_share):
        self.encoder = corpus.Encoder(tokenizer)
        self.source = corpus.mixture("train", seed, length)
        self.rng = np.random.default_rng(seed)
        self.length, self.rows, self.reach, self.gap_share = length, rows, reach, gap_share

    def batch(self):
        ids, weight, _ = self.encoder.batch([next(self.source) for _ in range(self.rows)], self.length)
        pos = np.tile(np.arange(self.length, dtype=np.int64), (self.rows, 1))
        for r in range(self.rows):
            # Ages are positions, as in the daemon; a jump lets the gate meet long ages in short rows.
            if self.rng.random() < self.gap_share:
                spare = int(math.exp(self.rng.uniform(math.log(64), math.log(self.reach - self.length))))
                heads = np.flatnonzero(ids[r, 1:-1] == self.encoder.start) + 1
                pos[r, int(self.rng.choice(heads)) if len(heads) else self.length // 2:] += spare
        return torch.from_numpy(ids), torch.from_numpy(weight), torch.from_numpy(pos)


class PlainText:
    """Windows of a text file, every token of the same weight: for bases that are not ours."""

    def __init__(self, tokenizer, path, seed, length, rows):
        self.ids = np.asarray(tokenizer.encode(Path(path).read_text(), add_special_tokens=False).ids)
        if len(self.ids) < length + 2:
            raise SystemExit(f"{path}: fewer than {length + 2} tokens")
        self.rng, self.length, self.rows = np.random.default_rng(seed), length, rows

    def batch(self):
        at = self.rng.integers(0, len(self.ids) - self.length - 1, self.rows)
        ids = torch.from_numpy(np.stack([self.ids[i:i + self.length + 1] for i in at]))
        pos = torch.arange(self.length).expand(self.rows, -1)
        return ids, torch.ones(self.rows, self.length), pos


# --- losses ---------------------------------------------------------------

def quality(student, teacher, targets, weight):
    """(KL(teacher || student) + next token) / 2 over weighted positions."""
    s, t = F.log_softmax(student.float(), -1), F.log_softmax(teacher.float(), -1)
    kl = (t.exp() * (t - s)).sum(-1)
    nll = -s.gather(-1, targets[..., None])[..., 0]
    w = weight / weight.sum()
    return (kl * w).sum(), (nll * w).sum()


def capacity(log_beta, positions, budget, samples, generator):
    """Mean over t of max(0, S_t - M) / t with S_t the soft cache size per head, one sum over all heads.

    A random subset of t estimates the mean; the exact sum over all t costs T x T per head.
    """
    B, L, H, T = log_beta.shape
    t = torch.randint(T // 16, T, (min(samples, T),), generator=generator).to(log_beta.device)
    age = (positions[:, t, None] - positions[:, None, :]).float()                    # [B, s, T]
    lb = log_beta.reshape(B, L * H, 1, T)
    alive = torch.exp(lb * age.clamp(min=0)[:, None]) * (age >= 0)[:, None]
    size = alive.sum((1, 3)) / (L * H)                                              # [B, s]
    return ((size - budget).clamp(min=0) / (t + 1)).mean(), (size / (t + 1)).mean().item()


# --- evaluation -----------------------------------------------------------

def evaluate(gated, tokenizer, length=1024, cases=100, share=0.25, chunk=64, task="memory",
             policies=("full", "global", "trimkv", "streaming"), seed=5):
    """Held-out answers exactly right per policy when the sequence holds `share` of its tokens, chunk included."""
    encoder = corpus.Encoder(tokenizer)
    source = corpus.dialogues(task, "heldout", seed, int(0.92 * length))
    budget = int(0.92 * length * share) - chunk
    score, lengths = {p: [0, 0] for p in policies}, {}
    while score[policies[0]][1] < cases:
        ids, _, answer = encoder.batch(encoder.fitting(source, 8, length), length)
        for p in policies:
            guess, lengths[p] = simulate(gated, torch.from_numpy(ids[:, :-1]).to(gated.device), p, budget, chunk)
            wrong = guess.cpu().numpy() != ids[:, 1:]
            for r in range(len(ids)):
                for n in np.unique(answer[r][answer[r] >= 0]):
                    score[p][1] += 1
                    score[p][0] += not wrong[r][answer[r] == n].any()
    result = {p: round(a / b, 4) for p, (a, b) in score.items()}
    result.update(task=task, length=length, budget=budget, chunk=chunk, cases=score[policies[0]][1])
    if "global" in lengths:
        result["global_lengths"] = lengths["global"].float().mean(0).round().int().tolist()
    return result


# --- run ------------------------------------------------------------------

class Run:
    def __init__(self, a):
        self.a = a
        torch.manual_seed(a.seed)
        torch.set_num_threads(a.threads)
        self.tokenizer = Tokenizer.from_file(str(a.model / "tokenizer.json"))
        bias = math.log(a.length) + 1 if a.bias is None else a.bias
        self.gated = GatedModel(a.model, a.device, width=a.width, tying=a.tying, bias=bias)
        self.file = a.model / "gates.safetensors" if a.gates is None else a.gates
        self.base = weights_sha256(a.model)
        # Gradients of the gate are tiny next to Adam's usual eps.
        self.opt = torch.optim.Adam(self.gated.bank.parameters(), lr=a.lr, betas=(0.9, 0.98), eps=1e-12)
        self.step, self.used_s = 0, 0.0

    def resume(self):
        a = self.a
        self.checkpoint = a.run / "checkpoint.pt"
        a.run.mkdir(parents=True, exist_ok=True)
        if self.checkpoint.exists():
            s = torch.load(self.checkpoint, weights_only=True)
            self.gated.bank.load_state_dict(s["bank"])
            self.opt.load_state_dict(s["opt"])
            self.step, self.used_s = s["step"], s["used_s"]
            print(f"resumed at step {self.step}", flush=True)
        elif a.start:
            self.gated.bank.load(a.start)
        seed = a.seed + 1000003 * self.step
        self.generator = torch.Generator().manual_seed(seed)
        self.data = (PlainText(self.tokenizer, a.text, seed, a.length, a.rows) if a.text else
                     Dialogues(self.tokenizer, seed, a.length, a.rows, a.reach, a.gap_share))

    def save(self):
        torch.save({"bank": self.gated.bank.state_dict(), "opt": self.opt.state_dict(), "step": self.step,
                    "used_s": self.used_s}, self.checkpoint.with_suffix(".tmp"))
        self.checkpoint.with_suffix(".tmp").replace(self.checkpoint)
        self.gated.bank.save(self.file, self.base, self.a.length // 4)

    def budget(self):
        """One gate serves all budgets, so each batch draws its own: log-uniform in T/16 .. T/2."""
        u = torch.rand((), generator=self.generator).item()
        return self.a.length / 16 * 8 ** u

    def train_step(self, used):
        a = self.a
        ids, weight, pos = (x.to(a.device) for x in self.data.batch())
        x, y = ids[:, :-1], ids[:, 1:]
        with torch.autocast(a.device, torch.bfloat16, enabled=a.bf16):
            with torch.no_grad():
                teacher = self.gated(x, pos)
            student = self.gated(x, pos, "gated")
        kl, nll = quality(student, teacher, y, weight)
        cap, soft = capacity(self.gated.all_log_beta(), pos, self.budget(), a.samples, self.generator)
        ((kl + nll) / 2 + a.capacity * cap).backward()
        rate = a.lr * min(1.0, (self.step + 1) / a.warmup) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, used))))
        for g in self.opt.param_groups:
            g["lr"] = rate
        self.opt.step()
        self.opt.zero_grad(set_to_none=True)
        self.step += 1
        return kl.item(), nll.item(), cap.item(), soft

    def used(self):
        return max(self.used_s / (self.a.minutes * 60), self.step / self.a.max_steps)

    def train(self):
        a, last, rows = self.a, time.time(), []
        while self.used() < 1:
            rows.append(self.train_step(self.used()))
            now = time.time()
            self.used_s, last, took = self.used_s + now - last, now, now - last
            if self.step % a.every == 0 or self.used() >= 1:
                kl, nll, cap, soft = np.mean(rows, 0)
                left = min(a.minutes * 60 - self.used_s, (a.max_steps - self.step) * took)
                print(json.dumps({"step": self.step, "kl": round(kl, 4), "next_token": round(nll, 4),
                                  "capacity": round(cap, 4), "soft_share": round(soft, 4),
                                  "tokens_per_s": int(a.rows * a.length / took),
                                  "minutes_left": round(left / 60, 1)}), flush=True)
                rows = []
                self.save()
            if a.probe and self.step % a.probe == 0:
                print(json.dumps(evaluate(self.gated, self.tokenizer, a.length, 64)), flush=True)
        self.save()


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("model", type=Path, help="model directory")
    ap.add_argument("--run", type=Path, help="folder of the checkpoint")
    ap.add_argument("--gates", type=Path, help="gates file (default: gates.safetensors in the model directory)")
    ap.add_argument("--start", type=Path, help="gates file to start from")
    ap.add_argument("--text", help="train on this text file instead of dialogues")
    ap.add_argument("--tying", choices=("paper", "code", "untied"), default="code")
    ap.add_argument("--width", type=int, default=64)
    ap.add_argument("--bias", type=float, help="start of c (default ln(length) + 1)")
    ap.add_argument("--length", type=int, default=1024)
    ap.add_argument("--rows", type=int, default=2)
    ap.add_argument("--reach", type=int, default=8192)
    ap.add_argument("--gap-share", type=float, default=0.25)
    ap.add_argument("--minutes", type=float, default=20)
    ap.add_argument("--max-steps", type=int, default=10**9)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--warmup", type=int, default=30)
    ap.add_argument("--capacity", type=float, default=1.0, help="weight of the capacity loss")
    ap.add_argument("--samples", type=int, default=48, help="positions per row where the soft size is taken")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--every", type=int, default=20)
    ap.add_argument("--probe", type=int, default=0, help="steps between hard-eviction probes")
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--device", default="cpu")
    ap.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    ap.add_argument("--evaluate", action="store_true", help="only evaluate the gates file")
    ap.add_argument("--task", default="memory")
    ap.add_argument("--cases", type=int, default=200)
    ap.add_argument("--share", type=float, default=0.25)
    ap.add_argument("--chunk", type=int, default=64)
    a = ap.parse_args()
    run = Run(a)
    if a.evaluate:
        run.gated.bank.load(run.file)
        print(json.dumps(evaluate(run.gated, run.tokenizer, a.length, a.cases, a.share, a.chunk, a.task)))
        return
    if a.run is None:
        ap.error("--run is required for training")
    run.resume()
    run.train()


if __name__ == "__main__":
    main()
