"""Adapts keepd-nano to evictions by reinforcement: answers sampled under eviction, rewarded when right.

    python reinforce.py ../bundled/keepd-nano --share 0.0625 --run RUN/reinforce --out ADAPTED

RL-Sparse of G-KV (arXiv 2512.00504) on the generated `trace` task. In each step a daemon serves the current weights and
answers `--rows` questions `--samples` times each at temperature 1, holding `--share` of the length per head. An answer
that ends as expected has reward 1. The gradient is that of log p(answer) under exactly what each token could see
("report": "trace"), times the reward less the mean of the question's answers; questions whose answers are all right or
all wrong teach nothing and are left out. The weights in training are float32 and the daemon's are rounded, so each
token's weight is corrected by the ratio of the two probabilities, at most 2.

Every --evaluate steps held-out questions are answered greedily, with the full cache and under eviction, and a line is
added to RUN/curve.jsonl. --evaluate-only writes that line for the model as it is, for one that distill.py made, say.
"""

import argparse
import copy
import json
import random
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import torch

import corpus
import record
from data import Shuffle
from distill import SparseModel, export
from eviction_trace import parse_record
from options import count, positive
from runs import Run, World, add_arguments

ANSWER = 120            # tokens of an answer, at most
MOST_RATIO = 2.0


def questions(split, seed, length):
    """Endless (messages, expected): dialogues cut before a scored answer of their last third."""
    rng = random.Random(f"{split}/{seed}/{length}")
    for d in corpus.dialogues("trace", split, seed, length):
        scored = [n for n, m in enumerate(d.messages) if m.get("scored") and n >= 2 * len(d.messages) / 3]
        if scored:
            n = rng.choice(scored)
            yield [{k: m[k] for k in ("role", "content")} for m in d.messages[:n]], d.messages[n]["expected"]


def advantages(rewards):
    """Rewards of a question's answers less their mean."""
    mean = sum(rewards) / len(rewards)
    return [r - mean for r in rewards]


class Daemon:
    """A daemon that serves a model directory for as long as a `with` lasts."""

    def __init__(self, a, model):
        self.command = [str(a.daemon), "--model", str(model), "--port", "0", "--served-model-name", "m", "--kv-dtype", "f32",
                        "--log-level", "warn", "--threads", str(a.threads)]

    def __enter__(self):
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        for line in self.process.stdout:
            if "http://" in line:
                threading.Thread(target=self.process.stdout.read, daemon=True).start()
                return line[line.index("http://"):].split()[0].rstrip("/,")
        raise SystemExit(f"{self.command[0]} did not become ready (exit {self.process.wait()})")

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()


class Asker:
    """Answers of a daemon, as records of what was evicted."""

    def __init__(self, a, url):
        self.a, self.url = a, url

    def held(self, share):
        """The kv fields with which no head holds more than the share on average: three quarters of it stay, one is filled and evicted."""
        if share >= 1:
            return {"policy": "full", "budget": None, "buffer": None, "chunk": None}
        step = max(1, int(self.a.length * share / 4))
        return {"policy": self.a.policy, "budget": int(self.a.length * share) - step, "buffer": step, "chunk": step}

    def ask(self, messages, share, temperature, seed):
        """(record, log-probabilities that the daemon gave the answer's tokens)."""
        fields = SimpleNamespace(**self.held(share), max_tokens=ANSWER, temperature=temperature, top_p=1.0, seed=seed)
        body = {**record.request_body(fields, "m", {"messages": messages}), "logprobs": True}
        to = SimpleNamespace(url=self.url, api_key=None, timeout=600)
        answer = record.send(to, "/v1/chat/completions", body)
        return record.record_of(answer, seed), [t["logprob"] for t in answer["choices"][0]["logprobs"]["content"]]

    def all(self, jobs):
        with ThreadPoolExecutor(self.a.parallel) as pool:
            return list(pool.map(lambda job: self.ask(*job), jobs))


def right(found, expected):
    return found["text"].strip().endswith(expected)


class ReinforceRun(Run):
    NAME = "model"
    BAR = ("step", "reward", "minutes_left")

    def __init__(self, a, world):
        self.student = SparseModel(a.model, world.device)
        c = self.student.model.config
        self.shape = c.num_hidden_layers, c.num_key_value_heads, c.vocab_size
        source = questions("train", a.seed, a.length)
        self.pool = [next(source) for _ in range(a.questions)]
        self.shuffle = Shuffle(a.seed, len(self.pool))
        source = questions("heldout", a.seed, a.length)
        self.held_out = [next(source) for _ in range(a.cases)]
        super().__init__(a, world, self.student.model,
                         torch.optim.AdamW(self.student.model.parameters(), lr=a.lr, betas=(0.9, 0.95), weight_decay=0.0))

    def serving(self):
        """A daemon with the current weights, rounded as the model's own are."""
        folder = self.a.run / "serving"
        export(copy.deepcopy(self.student.model), self.a.model, folder)
        return Daemon(self.a, folder)

    def sampled(self):
        """[(record, log-probabilities, reward, advantage)] of this step's questions."""
        a, out = self.a, []
        chosen = [self.pool[self.shuffle[self.step * a.rows + r]] for r in range(a.rows)]
        jobs = [(messages, a.share, 1.0, a.seed + 1000003 * self.step + 1009 * r + s)
                for r, (messages, _) in enumerate(chosen) for s in range(a.samples)]
        with self.serving() as url:
            found = Asker(a, url).all(jobs)
        for r, (_, expected) in enumerate(chosen):
            group = found[r * a.samples:(r + 1) * a.samples]
            rewards = [float(right(answer, expected)) for answer, _ in group]
            out += [(*answer, reward, advantage) for answer, reward, advantage in zip(group, rewards, advantages(rewards))]
        return out

    def log_probabilities(self, rec):
        """Log-probabilities of the completion's tokens, each under what it could see."""
        ids = torch.tensor([rec.ids[:-1]], device=self.world.device)
        hidden = self.student.hidden(ids, rec.until[..., :-1].to(self.world.device))[0, rec.prompt - 1:]
        wanted = torch.tensor(rec.ids[rec.prompt:], device=self.world.device)[:, None]
        return self.student.logits(hidden).float().log_softmax(-1).gather(1, wanted)[:, 0]

    def answer_loss(self, answer, daemons, advantage, answers):
        """The loss of one answer, and how far the two probabilities of its tokens are apart on average, in nats."""
        mine = self.log_probabilities(parse_record(json.dumps(answer), *self.shape))
        apart = mine.detach() - torch.tensor(daemons, device=mine.device)
        ratio = apart.exp().clamp(max=MOST_RATIO)
        return -(advantage * ratio * mine).mean() / answers, apart.abs().mean().item()

    def train_step(self):
        found = self.sampled()
        used = [x for x in found if x[3] != 0]
        apart = []
        for answer, daemons, _, advantage in used:
            loss, off = self.answer_loss(answer, daemons, advantage, len(found))
            loss.backward()
            apart.append(off)
        torch.nn.utils.clip_grad_norm_(self.student.model.parameters(), 1.0)
        return {"reward": sum(x[2] for x in found) / len(found), "used": len(used) / len(found),
                "apart": sum(apart) / max(1, len(apart)), "tokens": sum(len(x[0]["completion_ids"]) for x in found)}

    def evaluate(self):
        """Right answers to the held-out questions, with the full cache and under eviction."""
        out = {}
        with self.serving() as url:
            for share in (1.0, *self.a.shares):
                found = Asker(self.a, url).all([(messages, share, 0.0, 1) for messages, _ in self.held_out])
                out[f"{share:g}"] = sum(right(answer, expected) for (answer, _), (_, expected) in zip(found, self.held_out))
        line = {"step": self.step, "minutes": round(self.used_s / 60, 1), "cases": len(self.held_out), "right": out}
        with (self.a.run / "curve.jsonl").open("a") as f:
            f.write(json.dumps(line) + "\n")
        self.report.line(line)

    def after_step(self):
        if self.step % self.a.evaluate == 0:
            self.save()
            self.evaluate()


def arguments():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("model", type=Path, help="model directory, with gates")
    ap.add_argument("--daemon", type=Path, default=Path(__file__).resolve().parents[1] / "build/keepd")
    ap.add_argument("--out", type=Path, help="model directory to write at the end")
    ap.add_argument("--policy", default="global")
    ap.add_argument("--share", type=positive, default=1 / 16, help="of --length that a head holds while answers are sampled")
    ap.add_argument("--shares", type=lambda s: [float(x) for x in s.split(",")], default=[1 / 16, 1 / 32],
                    help="those that are evaluated (0.0625,0.03125)")
    ap.add_argument("--length", type=count, default=1024, help="tokens of a dialogue")
    ap.add_argument("--questions", type=count, default=4096, help="in the pool that is drawn from")
    ap.add_argument("--rows", type=count, default=16, help="questions per step")
    ap.add_argument("--samples", type=count, default=8, help="answers to each")
    ap.add_argument("--parallel", type=count, default=8, help="requests at a time")
    ap.add_argument("--cases", type=count, default=200, help="held-out questions")
    ap.add_argument("--evaluate", type=count, default=10, help="steps between evaluations")
    ap.add_argument("--evaluate-only", action="store_true")
    add_arguments(ap, minutes=60, lr=2e-5, warmup=5)
    a = ap.parse_args()
    if a.run is None or (a.out is None and not a.evaluate_only):
        ap.error("--run and --out are required")
    if a.out and a.out.resolve() == a.model.resolve():
        ap.error("--out is the model itself: a stopped run could not go on from it")
    if a.samples < 2:
        ap.error("--samples: at least 2, of which one can be better than the other")
    return a


def main():
    a = arguments()
    torch.manual_seed(a.seed)
    torch.set_num_threads(a.threads)
    world = World(a.device)
    if world.size > 1:
        raise SystemExit("reinforce.py is one process")
    a.run.mkdir(parents=True, exist_ok=True)
    run = ReinforceRun(a, world)
    if a.evaluate_only:
        run.evaluate()
        return
    if not run.resume():
        run.evaluate()
    run.train()
    export(run.student.model, a.model, a.out)


if __name__ == "__main__":
    main()
