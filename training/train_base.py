"""Trains keepd-nano on the generated dialogues and exports a Hugging Face directory.

    python train_base.py --minutes 65 --run ../../train-run/base --out ../bundled/keepd-nano

The clock is the budget: lengths, learning rate and the end follow the share of
`--minutes` already used, so the same command suits a laptop and a GPU.  A run
stopped at any point continues from its last checkpoint.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import corpus
from modeling import CONFIG, Nano

STAGES = (128, 512, 1024)
PROBES = (("128",), ("128", "512", "512far"), None)     # probes of each stage; None: all


# --- optimizer ------------------------------------------------------------

def orthogonalise(g, steps=5):
    """Newton-Schulz towards U V^T of each matrix of a stack, in bf16."""
    x = g.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.to(g.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised per matrix.

    Steps are what a CPU lacks, and an orthogonal update makes more of each; it costs about a
    tenth of a step's time.  Matrices of one shape are handled as one stack.
    """

    def __init__(self, params, lr=0.02, momentum=0.95, weight_decay=0.01):
        super().__init__(list(params), dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            stacks = {}
            for p in group["params"]:
                stacks.setdefault(tuple(sorted(p.shape)), []).append(p)
            for (short, long), ps in stacks.items():
                grads = []
                for p in ps:
                    m = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    m.lerp_(p.grad, 1 - group["momentum"])
                    g = p.grad.lerp(m, group["momentum"])
                    grads.append(g if g.shape[0] == short else g.mT)
                update = orthogonalise(torch.stack(grads))
                for p, u in zip(ps, update):
                    u = u if p.shape[0] == short else u.mT
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(u, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def optimizers(net, a):
    matrices = [p for n, p in net.named_parameters() if p.dim() == 2 and "embed" not in n]
    vectors = [p for p in net.parameters() if p.dim() == 1]
    out = [Muon(matrices, lr=a.lr),
           torch.optim.AdamW([{"params": [net.model.embed_tokens.weight], "lr": a.lr_embed},
                              {"params": vectors, "lr": a.lr_embed}],
                             betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=True)]
    for o in out:
        for g in o.param_groups:
            g["peak"] = g["lr"]
    return out


def schedule(step, used, warm_up=100):
    """Share of the peak rate: `warm_up` steps of warm-up, flat, linear to zero over the last 40 % of the time."""
    return min(1.0, (step + 1) / warm_up) * min(1.0, max(0.02, (1 - used) / 0.4))


# --- data -----------------------------------------------------------------

def gap_positions(rows, length, reach, starts, rng, share):
    """Strictly increasing positions; some rows jump, mostly between messages.

    A jump stands for text that is not there: it trains rotary distances far beyond
    the row's own length at the price of a short row.
    """
    pos = np.tile(np.arange(length, dtype=np.int64), (rows, 1))
    for r in range(rows):
        if rng.random() >= share:
            continue
        spare = int(math.exp(rng.uniform(math.log(64), math.log(reach - length))))
        count = int(rng.integers(1, 7))
        cuts = np.sort(rng.random(count - 1))
        sizes = (np.diff(np.concatenate(([0.0], cuts, [1.0]))) * spare).astype(np.int64)
        heads = np.flatnonzero(starts[r])
        for size in sizes:
            boundary = len(heads) > 1 and rng.random() < 0.8
            at = int(rng.choice(heads[1:])) if boundary else int(rng.integers(1, length))
            pos[r, at:] += size
    return pos


class Data:
    """Batches of a constant number of tokens, whatever the row length."""

    def __init__(self, tokenizer, seed, tokens, reach, other_weight):
        self.encoder = corpus.Encoder(tokenizer)
        self.rng = np.random.default_rng(seed)
        self.sources = {n: corpus.mixture("train", seed, n) for n in STAGES}
        self.tokens, self.reach, self.other_weight = tokens, reach, other_weight

    def batch(self, length, gap_share):
        rows = self.tokens // length
        ids, weight, _ = self.encoder.batch([next(self.sources[length]) for _ in range(rows)], length,
                                            self.other_weight)
        pos = gap_positions(rows, length, self.reach, ids[:, :-1] == self.encoder.start, self.rng, gap_share)
        return torch.from_numpy(ids), torch.from_numpy(weight), torch.from_numpy(pos)


class Probe:
    """Share of held-out questions answered exactly (teacher-forced arg max of every token)."""

    def __init__(self, tokenizer, seed=99):
        encoder = corpus.Encoder(tokenizer)
        self.sets = {}
        for name, task, length, rows in (("128", "memory", 128, 64), ("512", "memory", 512, 32),
                                         ("1024", "memory", 1024, 16), ("needle1024", "needle", 1024, 16),
                                         ("trace512", "trace", 512, 12)):
            source = corpus.dialogues(task, "heldout", seed, int(0.92 * length))
            rng = np.random.default_rng(seed)
            ids, _, answer = encoder.batch(encoder.fitting(source, rows, length), length)
            flat = np.tile(np.arange(length), (rows, 1))
            self.sets[name] = (ids, answer, flat)
            if name == "512":
                far = gap_positions(rows, length, 8192, ids[:, :-1] == encoder.start, rng, 1.0)
                self.sets["512far"] = (ids, answer, far)

    @torch.no_grad()
    def run(self, forward, names=None):
        out = {}
        for name in names or self.sets:
            ids, answer, pos = self.sets[name]
            right = total = 0
            for i in range(0, len(ids), 8):
                x = torch.from_numpy(ids[i:i + 8])
                guess = forward(x[:, :-1], torch.from_numpy(pos[i:i + 8])).argmax(-1).cpu().numpy()
                wrong = guess != ids[i:i + 8, 1:]
                for r in range(len(x)):
                    for n in np.unique(answer[i + r]):
                        if n >= 0:
                            total += 1
                            right += not wrong[r][answer[i + r] == n].any()
            out[name] = right / max(1, total)
        return out


# --- export ---------------------------------------------------------------

def export(net, out, tokenizer):
    """The directory as published for transformers: bf16 weights, tied embedding."""
    c = net.c
    out.mkdir(parents=True, exist_ok=True)
    tensors = {n: p.detach().bfloat16().cpu().contiguous() for n, p in net.named_parameters()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
              "attention_dropout": 0.0, "bos_token_id": None,
              "eos_token_id": tokenizer.token_to_id(corpus.IM_END), "hidden_act": "silu",
              "initializer_range": 0.02, "rope_scaling": None, "sliding_window": None,
              "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
              "use_sliding_window": False, **c}
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


# --- run ------------------------------------------------------------------

class Run:
    def __init__(self, a):
        self.a = a
        torch.manual_seed(a.seed)
        torch.set_num_threads(a.threads)
        self.tokenizer = Tokenizer.from_file(str(a.tokenizer))
        self.net = Nano().to(a.device)
        self.opts = optimizers(self.net, a)
        self.step, self.used_s, self.stage = 0, 0.0, 0
        a.run.mkdir(parents=True, exist_ok=True)
        self.file = a.run / "checkpoint.pt"
        if self.file.exists():
            self.load()
        elif a.start:
            self.net.load_state_dict(load_file(a.start / "model.safetensors", device=a.device))
        # A resumed run draws fresh dialogues, the same ones each time it resumes at this step.
        self.data = Data(self.tokenizer, a.seed + 1000003 * self.step, a.batch_tokens, a.reach, a.other_weight)
        self.probe = Probe(self.tokenizer)
        body = torch.compile(self.net, dynamic=False) if a.compile else self.net
        self.forward = lambda ids, pos: self.cast(body, ids, pos)
        self.plain = lambda ids, pos: self.cast(self.net, ids, pos)

    def cast(self, body, ids, pos):
        with torch.autocast(self.a.device, torch.bfloat16, enabled=self.a.bf16):
            return body(ids.to(self.a.device), pos.to(self.a.device))

    def load(self):
        s = torch.load(self.file, weights_only=True, map_location=self.a.device)
        self.net.load_state_dict(s["net"])
        for o, state in zip(self.opts, s["opts"]):
            o.load_state_dict(state)
        self.step, self.used_s, self.stage = s["step"], s["used_s"], s["stage"]
        print(f"resumed at step {self.step}", flush=True)

    def save(self):
        state = {"net": self.net.state_dict(), "opts": [o.state_dict() for o in self.opts],
                 "step": self.step, "used_s": self.used_s, "stage": self.stage}
        torch.save(state, self.file.with_suffix(".tmp"))
        self.file.with_suffix(".tmp").replace(self.file)

    def length(self):
        """The stage's length, with a quarter of the batches shorter so that nothing is unlearned."""
        if self.stage and self.data.rng.random() < 0.25:
            return STAGES[int(self.data.rng.integers(0, self.stage))]
        return STAGES[self.stage]

    def train_step(self, used):
        ids, weight, pos = self.data.batch(self.length(), self.a.gap_share if self.stage else 0.3)
        logits = self.forward(ids[:, :-1], pos)
        targets, w = ids[:, 1:].flatten().to(self.a.device), weight.flatten().to(self.a.device)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets, reduction="none")
        on_answers = (loss.detach() * (w == 1)).sum() / (w == 1).sum().clamp(min=1)
        ((loss * w).sum() / w.sum()).backward()
        for o in self.opts:
            for g in o.param_groups:
                g["lr"] = g["peak"] * schedule(self.step, used)
            o.step()
        self.net.zero_grad(set_to_none=True)
        self.step += 1
        return on_answers.item()

    def next_stage(self, used, recall):
        """Lengthen when the current length is recalled, or when its share of the time is spent."""
        good = recall.get(str(STAGES[self.stage]), 0)
        if self.stage < 2 and (good >= (0.85, 0.9)[self.stage] or used > (0.35, 0.6)[self.stage]):
            self.stage += 1

    def train(self):
        a, last, seen, losses = self.a, time.time(), 0, []
        budget = a.minutes * 60
        while self.used_s < budget and self.step < a.max_steps:
            losses.append(self.train_step(self.used_s / budget))
            seen += a.batch_tokens
            if self.step % a.every:
                continue
            now = time.time()
            speed = seen / (now - last)
            self.used_s += now - last
            recall = self.probe.run(self.plain, PROBES[self.stage])
            self.next_stage(self.used_s / budget, recall)
            print(json.dumps({"step": self.step, "length": STAGES[self.stage], "answer_loss": round(float(np.mean(losses)), 4),
                              "recall": {k: round(v, 3) for k, v in recall.items()}, "tokens_per_s": int(speed),
                              "minutes_left": round((budget - self.used_s) / 60, 1)}), flush=True)
            self.save()
            seen, losses, last = 0, [], now
        export(self.net, a.out, self.tokenizer)
        self.save()
        print(json.dumps({"final": self.probe.run(self.plain), "step": self.step, "seconds": int(self.used_s)}), flush=True)


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--run", type=Path, required=True, help="folder of the checkpoint")
    ap.add_argument("--out", type=Path, required=True, help="model directory to write")
    ap.add_argument("--start", type=Path, help="model directory to go on from, with fresh optimizer states")
    ap.add_argument("--tokenizer", type=Path, default=Path(__file__).parent.parent / "bundled/keepd-nano/tokenizer.json")
    ap.add_argument("--minutes", type=float, default=65)
    ap.add_argument("--max-steps", type=int, default=10**9)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--batch-tokens", type=int, default=4096)
    ap.add_argument("--lr", type=float, default=0.02)
    ap.add_argument("--lr-embed", type=float, default=4e-3)
    ap.add_argument("--other-weight", type=float, default=0.3)
    ap.add_argument("--gap-share", type=float, default=0.6)
    ap.add_argument("--reach", type=int, default=8192, help="largest position trained")
    ap.add_argument("--every", type=int, default=200, help="steps between probes and checkpoints")
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--device", default="cpu")
    ap.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    ap.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    Run(ap.parse_args()).train()


if __name__ == "__main__":
    main()
