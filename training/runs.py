"""Shared by all training runs: processes, the loop and its checkpoint."""

import argparse
import math
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from options import count, positive
from report import Report

BUCKET = 1 << 25        # elements of gradients summed over the processes at a time


class World:
    """This process alone, or one of those that torchrun started.

    Each has its own rows and the same copy of what is trained; gradients are summed, so every process
    takes the same step.  The checkpoint must lie where all processes can read it.
    """

    def __init__(self, device="cpu"):
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if device == "cuda":
            device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
            torch.cuda.set_device(device)
        self.device, self.first = device, self.rank == 0
        if self.size > 1:
            dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")

    def sum(self, value):
        """The sum over the processes of a tensor, in place."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def agree(self, number):
        """The first process's number: what depends on a clock must be the same everywhere."""
        if self.size == 1:
            return number
        value = torch.tensor(number, dtype=torch.float64, device=self.device)
        dist.broadcast(value, 0)
        return value.item()

    def sum_gradients(self, parameters):
        if self.size == 1:
            return
        bucket, count = [], 0
        for p in list(parameters) + [None]:
            if bucket and (p is None or count + p.numel() > BUCKET):
                flat = self.sum(torch.cat([g.flatten() for g in bucket]))
                for g, part in zip(bucket, flat.split([g.numel() for g in bucket])):
                    g.copy_(part.view_as(g))
                bucket, count = [], 0
            if p is not None:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                bucket.append(p.grad)
                count += p.numel()

    def close(self):
        if self.size > 1:
            dist.destroy_process_group()


class Checkpoint:
    """One file in the run's folder, replaced as a whole."""

    def __init__(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "checkpoint.pt"

    def load(self):
        return torch.load(self.path, weights_only=True, map_location="cpu") if self.path.exists() else None

    def save(self, state):
        partial = self.path.with_suffix(".tmp")
        torch.save(state, partial)
        partial.replace(self.path)


def rate(step, used, warmup):
    """Share of the peak learning rate: linear warm-up, cosine to 1 % at the end."""
    return min(1.0, (step + 1) / warmup) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, used))))


def add_arguments(ap, minutes, lr, warmup, steps=10**9, dtype="float32"):
    ap.add_argument("--run", type=Path, help="folder of the checkpoint")
    ap.add_argument("--minutes", type=positive, default=minutes, help="clock time, over all starts of the run")
    ap.add_argument("--max-steps", type=count, default=steps)
    ap.add_argument("--lr", type=positive, default=lr)
    ap.add_argument("--warmup", type=count, default=warmup, help="steps")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--every", type=count, default=20, help="steps between reports and checkpoints")
    ap.add_argument("--threads", type=count, default=2)
    ap.add_argument("--device", default="cpu", help="cpu or cuda; under torchrun each process takes its own GPU")
    ap.add_argument("--dtype", choices=("float32", "bfloat16"), default=dtype, help="of weights that are frozen")
    ap.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True, help="multiply in bfloat16")
    ap.add_argument("--checkpointing", action="store_true", help="compute layers again in backward: less memory")
    ap.add_argument("--logit-block", type=int, default=1024, help="positions whose logits exist at a time; 0: all")


class Run:
    """Steps until the clock time or the number of steps is used up, with reports and checkpoints on the way.

    A subclass names what it trains (`NAME`), and gives `train_step()` -> {name: mean over all processes},
    with "tokens" a sum, after which gradients are in place; it may extend `saved()`, which the first
    process calls after each checkpoint.
    """

    NAME = "module"
    BAR = ("step", "loss", "tokens_per_s", "minutes_left")      # fields of the summary that the bar shows

    def __init__(self, a, world, module, opt):
        self.a, self.world, self.module, self.opt = a, world, module, opt
        self.step, self.used_s, self.report, self.checkpoint = 0, 0.0, Report(), None

    def resume(self):
        """Continues from the checkpoint of the run's folder; whether there was one."""
        self.checkpoint = Checkpoint(self.a.run)
        state = self.checkpoint.load()
        if state is None:
            return False
        try:
            self.module.load_state_dict(state[self.NAME])
            self.opt.load_state_dict(state["opt"])
        except (KeyError, RuntimeError, ValueError) as e:
            raise SystemExit(f"{self.checkpoint.path}: of a run with other options: {e}") from None
        self.step, self.used_s = state["step"], state["used_s"]
        if self.world.first:
            self.report.line(f"resumed at step {self.step}")
        return True

    def save(self):
        self.checkpoint.save({self.NAME: self.module.state_dict(), "opt": self.opt.state_dict(),
                              "step": self.step, "used_s": self.used_s})
        self.saved()

    def saved(self):
        pass

    def used(self):
        """Share of the run that is over."""
        return max(self.used_s / (self.a.minutes * 60), self.step / self.a.max_steps)

    def update(self, used):
        self.world.sum_gradients(self.module.parameters())
        for group in self.opt.param_groups:
            group["lr"] = self.a.lr * rate(self.step, used, self.a.warmup)
        self.opt.step()
        self.opt.zero_grad(set_to_none=True)

    def summary(self, window, seconds):
        """Means since the last report."""
        out = {k: round(sum(w[k] for w in window) / len(window), 4) for k in window[0] if k != "tokens"}
        took = seconds / len(window)
        left = min(self.a.minutes * 60 - self.used_s, (self.a.max_steps - self.step) * took)
        return {"step": self.step, **out, "tokens_per_s": int(sum(w["tokens"] for w in window) / max(seconds, 1e-9)),
                "minutes_left": round(max(0.0, left) / 60, 1)}

    def train(self):
        window, begin = [], time.time()
        last = begin
        while (used := self.world.agree(self.used())) < 1:
            window.append(self.train_step())
            self.update(used)
            self.step += 1
            now = time.time()
            self.used_s, last = self.used_s + now - last, now
            if not self.world.first:
                continue
            summary = self.summary(window, now - begin)
            self.report.bar(self.used(), {k: summary[k] for k in self.BAR})
            if self.step % self.a.every == 0 or self.used() >= 1:
                self.report.line(summary)
                self.save()
                window, begin = [], time.time()
            self.after_step()
        if self.world.first:
            self.save()

    def after_step(self):
        pass
