"""Trains retention gates for a frozen Qwen3, Qwen2 or Llama directory and evaluates them.

    python train_gates.py ../bundled/keepd-nano --minutes 20 --run RUN/gates
    python train_gates.py /path/to/model --chats chats.jsonl --run RUN/gates --device cuda
    torchrun --nproc-per-node 4 -- train_gates.py /path/to/model --chats chats.jsonl --run RUN/gates --device cuda
    python train_gates.py ../bundled/keepd-nano --evaluate

Data are the generated dialogues (`corpus.py`), chats in JSON lines with `--chats FILE`, or any text with
`--text FILE`.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import evaluation
import losses
from data import Chats, Dialogues, PlainText
from gates import GatedModel, read_header
from models import DTYPES, base_digests
from options import count, file, positive
from runs import Run, World, add_arguments


def gate_options(a):
    """Returns the kind of the gates, read from the file if it exists."""
    known = a.gates if a.evaluate else a.start
    if known is not None:
        header = read_header(known)
        return {k: header[k] for k in ("type", "width", "tying")}
    return {"type": a.type, "width": a.width, "tying": a.tying}


class GateRun(Run):
    NAME = "bank"
    BAR = ("step", "loss", "soft_size", "tokens_per_s", "minutes_left")

    def __init__(self, a, world):
        torch.manual_seed(a.seed)
        bias = math.log(a.length) + 1 if a.bias is None else a.bias
        self.gated = GatedModel(a.model, world.device, DTYPES[a.dtype], bias=bias, **gate_options(a))
        if a.checkpointing:
            self.gated.checkpoint_layers()
        self.base = base_digests(a.model)
        # Gradients of the gate are tiny next to Adam's usual eps.
        opt = torch.optim.Adam(self.gated.bank.parameters(), lr=a.lr, betas=(0.9, 0.98), eps=1e-12)
        super().__init__(a, world, self.gated.bank, opt)

    def chats(self, seed, rows):
        a = self.a
        reach = min(a.reach, self.gated.model.config.max_position_embeddings)
        return Chats(a.chats, AutoTokenizer.from_pretrained(a.model), seed, a.length, rows, reach, a.gap_share,
                     a.other_weight, self.world)

    def source(self, seed):
        a = self.a
        if a.chats:
            return self.chats(a.seed, a.rows)
        tokenizer = Tokenizer.from_file(str(a.model / "tokenizer.json"))
        seed += 7919 * self.world.rank
        if a.text:
            return PlainText(tokenizer, a.text, seed, a.length, a.rows)
        return Dialogues(tokenizer, seed, a.length, a.rows, a.reach, a.gap_share)

    def resume(self):
        if not super().resume() and self.a.start:
            self.gated.bank.load(self.a.start)
        self.data = self.source(self.step_seed())

    def step_seed(self):
        return self.a.seed + 1000003 * self.step

    def saved(self):
        self.gated.bank.save(self.a.gates, self.base, self.a.budget or self.a.length // 4)

    def draw(self, lengths):
        """How many entries the soft size may have: that of --budget, else, for one gate that serves all budgets, each
        batch's own, log-uniform in T/16 .. T/2.  And the times at which it is taken.  The same in every process."""
        a, generator = self.a, torch.Generator().manual_seed(self.step_seed())
        share = 8 ** torch.rand((), generator=generator).item() / 16
        at = torch.randint(a.length // 16, a.length, (min(a.samples, a.length),), generator=generator)
        times = (at.to(lengths.device) * lengths[:, None]) // a.length
        return share * lengths if a.budget is None else torch.full_like(lengths, a.budget), times

    def train_step(self):
        a, gated = self.a, self.gated
        b = self.data.batch(self.step).to(gated.device)
        x, y, weight = b.ids[:, :-1], b.ids[:, 1:], b.weight / self.world.sum(b.weight.sum()).clamp(min=1)

        def quality(student, teacher, targets, w):
            s, t = gated.logits(student), gated.logits(teacher)
            return torch.stack((losses.divergence(s, t, w), losses.next_token(s, targets, w)))

        with torch.autocast(torch.device(gated.device).type, torch.bfloat16, enabled=a.bf16):
            with torch.no_grad():
                teacher = gated.hidden(x, b.positions)
            student = gated.hidden(x, b.positions, "gated")
            kl, nll = losses.by_blocks(quality, a.logit_block, student, teacher, y, weight)
        budget, times = self.draw(b.lengths)
        cap, size, share = losses.capacity(gated.layer_log_beta(), b.positions, times, budget)
        cap, size, share = (v / self.world.size for v in (cap, size, share))
        loss = (kl + nll) / 2 + a.capacity * cap
        loss.backward()
        values = torch.stack((loss, kl, nll, cap, size, share, b.lengths.sum())).detach()
        names = ("loss", "kl", "next_token", "capacity", "soft_size", "soft_share", "tokens")
        return dict(zip(names, self.world.sum(values).tolist()))

    def after_step(self):
        if self.a.probe and self.step % self.a.probe == 0:
            self.report.line(self.evaluate(64))

    def evaluate(self, cases):
        a = self.a
        if a.chats:
            return evaluation.agreement(self.gated, self.chats(a.seed + 1, 1), cases, a.share, a.chunk)
        tokenizer = Tokenizer.from_file(str(a.model / "tokenizer.json"))
        return evaluation.recall(self.gated, tokenizer, a.length, cases, a.share, a.chunk, a.task)


def arguments():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("model", type=Path, help="model directory")
    ap.add_argument("--gates", type=Path, help="gates file (default: gates.safetensors in the model directory)")
    ap.add_argument("--start", type=file, help="gates file to start from")
    what = ap.add_mutually_exclusive_group()
    what.add_argument("--chats", type=file, help="train on these chats: JSON lines {\"messages\": [...]}")
    what.add_argument("--text", type=file, help="train on this text file")
    ap.add_argument("--other-weight", type=float, default=0.3, help="loss weight of chat text that is no answer")
    ap.add_argument("--type", choices=("rg", "rg10"), default="rg", help="rg10: a second hidden layer")
    ap.add_argument("--tying", choices=("paper", "code", "untied"), default="code")
    ap.add_argument("--width", type=count, default=64)
    ap.add_argument("--bias", type=float, help="start of c (default ln(length) + 1)")
    ap.add_argument("--length", type=count, default=1024, help="tokens of a row")
    ap.add_argument("--rows", type=count, default=2, help="rows per step and process")
    ap.add_argument("--reach", type=count, default=8192, help="largest position, reached by jumps")
    ap.add_argument("--gap-share", type=float, default=0.25, help="rows in which positions jump")
    add_arguments(ap, minutes=20, lr=2e-3, warmup=30)
    ap.add_argument("--capacity", type=float, default=1.0, help="weight of the capacity loss")
    ap.add_argument("--budget", type=count, help="entries per head that the soft size may have, the papers' training M "
                    "(default: drawn for each batch between length/16 and length/2)")
    ap.add_argument("--samples", type=count, default=48, help="positions per row where the soft size is taken")
    ap.add_argument("--probe", type=int, default=0, help="steps between hard-eviction probes")
    ap.add_argument("--evaluate", action="store_true", help="only evaluate the gates file")
    ap.add_argument("--task", default="memory")
    ap.add_argument("--cases", type=count, default=200)
    ap.add_argument("--share", type=positive, default=0.25)
    ap.add_argument("--chunk", type=count, default=64)
    a = ap.parse_args()
    if a.gates is None:
        a.gates = a.model / "gates.safetensors"
    if a.evaluate and not a.gates.is_file():
        ap.error(f"--evaluate: {a.gates}: no such file; --gates names another")
    if a.length < 16:
        ap.error(f"--length {a.length}: at least 16 tokens")
    if a.run is None and not a.evaluate:
        ap.error("--run is required for training")
    return a


def main():
    a = arguments()
    torch.set_num_threads(a.threads)
    world = World(a.device)
    run = GateRun(a, world)
    if a.evaluate:
        run.gated.bank.load(a.gates)
        print(json.dumps(run.evaluate(a.cases)))
    else:
        run.resume()
        run.train()
    world.close()


if __name__ == "__main__":
    main()
