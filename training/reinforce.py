"""Adapts keepd-nano to evictions by reinforcement: answers sampled under eviction, rewarded when right.

    python reinforce.py ../bundled/keepd-nano --run RUN/reinforce --out ADAPTED
    python reinforce.py ADAPTED --evaluate curve.jsonl && python reinforce.py --table curve.jsonl

RL-Sparse of G-KV (arXiv 2512.00504) on the generated `trace` task. In each step a daemon serves the current weights and
answers `--rows` questions `--samples` times each at temperature 1, the questions in turns with one of `--train-shares` of the
length held per head. A dialogue is read once, and its answers continue it. An answer that ends as expected has reward 1. The
gradient is that of log p(answer) under exactly what each token could see ("report": "trace"), times the reward less the
mean of the question's answers; questions whose answers are all right or all wrong teach nothing and are left out. The answers to
a question are branches of one text in training, too. The weights in training are float32 and the daemon's are rounded, so
each token's weight is corrected by the ratio of the two probabilities, at most 2.

Every question is asked in one step only, so the reported rewards are of questions that the weights have not seen. Every
--keep steps the model is written to RUN/step-NNNN. --evaluate asks a model held-out questions greedily, with the full cache and
under eviction, and adds a line to a file; --table prints such a file, each line paired by question with the first.
"""

import argparse
import copy
import json
import math
import random
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers

import corpus
import record
from distill import SparseModel, export
from eviction_trace import parse_record
from options import count, positive
from runs import Run, World, add_arguments

ANSWER = 120            # tokens of an answer, at most
MOST_RATIO = 2.0


class Questions:
    """Endless (messages, expected): dialogues cut before a scored answer of their last third. They are made when they are asked for."""

    def __init__(self, split, seed, length):
        self.made, self.source = [], questions(split, seed, length)

    def some(self, begin, end):
        while len(self.made) < end:
            self.made.append(next(self.source))
        return self.made[begin:end]


def questions(split, seed, length):
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


def held(length, share, policy):
    """The kv fields with which no head holds more than the share on average: three quarters of it stay, one is filled and evicted."""
    if share >= 1:
        return {"policy": "full"}
    step = max(1, int(length * share / 4))
    return {"policy": policy, "budget": int(length * share) - step, "buffer": step, "chunk": step}


class Daemon:
    """A daemon that serves a model directory for as long as a `with` lasts."""

    def __init__(self, a, model):
        self.command = [str(a.daemon), "--model", str(model), "--port", "0", "--served-model-name", "m", "--kv-dtype", "f32",
                        "--log-level", "warn", "--threads", str(a.threads), "--max-conversations", str(4 * getattr(a, "rows", 1))]

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
        self.a, self.to = a, SimpleNamespace(url=url, api_key=None, timeout=600)

    def each(self, work, jobs):
        with ThreadPoolExecutor(self.a.parallel) as pool:
            return list(pool.map(lambda job: work(*job), jobs))

    def complete(self, ids, most, kv, **fields):
        return record.send(self.to, "/v1/completions", {"model": "m", "prompt": ids, "max_tokens": most, "return_token_ids": True,
                                                        "kv": {**kv, "report": "trace"}, **fields})

    def read(self, messages, share, salt):
        """Reads all of a dialogue but its last token, which an answer needs: (token ids, evictions). The daemon keeps what is left."""
        ids = record.send(self.to, "/tokenize", {"model": "m", "messages": messages, "add_generation_prompt": True})["tokens"]
        kv = {**held(self.a.length, share, self.a.policy), "reuse": False}
        found = self.complete(ids[:-1], 1, kv, temperature=0, cache_salt=salt)
        return ids, record.record_of(found, salt)["trace"]

    def answer(self, ids, evictions, share, temperature, seed, salt):
        """(record, log-probabilities that the daemon gave the answer's tokens) of an answer that goes on from what was read."""
        kv = {**held(self.a.length, share, self.a.policy), "retain": False}
        found = self.complete(ids, ANSWER, kv, temperature=temperature, seed=seed, logprobs=0, cache_salt=salt)
        if found["usage"]["prompt_tokens_details"]["cached_tokens"] != len(ids) - 1:
            raise record.Refused("the daemon did not go on from the dialogue that it had read")
        out = record.record_of(found, salt)
        return {**out, "trace": evictions + out["trace"]}, found["choices"][0]["logprobs"]["token_logprobs"]

    def groups(self, asked, samples, temperature, seed):
        """`samples` answers to each of (messages, share): a list of lists."""
        salts = [f"{seed}-{n}" for n in range(len(asked))]
        known = self.each(self.read, [(messages, share, salt) for (messages, share), salt in zip(asked, salts)])
        jobs = [(ids, evictions, share, temperature, seed + 1009 * n + s, salt)
                for n, ((ids, evictions), (_, share), salt) in enumerate(zip(known, asked, salts)) for s in range(samples)]
        found = self.each(self.answer, jobs)
        return [found[n * samples:(n + 1) * samples] for n in range(len(asked))]

    def greedy(self, messages, share):
        """The text of one answer."""
        found = record.send(self.to, "/v1/chat/completions",
                            {"model": "m", "messages": messages, "max_tokens": ANSWER, "temperature": 0,
                             "kv": {**held(self.a.length, share, self.a.policy), "reuse": False, "retain": False}})
        return found["choices"][0]["message"]["content"] or ""


def right(text, expected):
    return text.strip().endswith(expected)


class ReinforceRun(Run):
    NAME = "model"
    BAR = ("step", "reward", "minutes_left")

    def __init__(self, a, world):
        self.student = SparseModel(a.model, world.device)
        c = self.student.model.config
        self.shape = c.num_hidden_layers, c.num_key_value_heads, c.vocab_size
        self.asked, self.held_out = Questions("train", a.seed, a.length), Questions("heldout", a.seed, a.length)
        super().__init__(a, world, self.student.model,
                         torch.optim.AdamW(self.student.model.parameters(), lr=a.lr, betas=(0.9, 0.95), weight_decay=0.0))

    def serving(self):
        """A daemon with the current weights, rounded as the model's own are."""
        folder = self.a.run / "serving"
        export(copy.deepcopy(self.student.model), self.a.model, folder)
        return Daemon(self.a, folder)

    def sampled(self):
        """For each of this step's questions, its answers: [(record, log-probabilities, reward)]."""
        a = self.a
        chosen = self.asked.some(self.step * a.rows, (self.step + 1) * a.rows)
        asked = [(messages, a.train_shares[r % len(a.train_shares)]) for r, (messages, _) in enumerate(chosen)]
        with self.serving() as url:
            found = Asker(a, url).groups(asked, a.samples, 1.0, a.seed + 1000003 * self.step)
        return [[(rec, daemons, float(right(rec["text"], expected))) for rec, daemons in group]
                for group, (_, expected) in zip(found, chosen)]

    def log_probabilities(self, records):
        """For each answer to a question, the log-probabilities of its tokens, each under what it could see."""
        for rec, hidden in zip(records, self.student.completions(records)):
            wanted = torch.tensor(rec.ids[rec.prompt:], device=hidden.device)[:, None]
            yield self.student.logits(hidden).float().log_softmax(-1).gather(1, wanted)[:, 0]

    def question_loss(self, group, answers):
        """A question's share of the step's loss, and how far the two probabilities of its tokens are apart on average, in nats."""
        records = [parse_record(json.dumps(rec), *self.shape) for rec, _, _ in group]
        loss, off, tokens = 0.0, 0.0, 0
        gains = advantages([reward for _, _, reward in group])
        for mine, (_, daemons, _), gain in zip(self.log_probabilities(records), group, gains):
            apart = mine.detach() - torch.tensor(daemons, device=mine.device)
            loss -= (gain * apart.exp().clamp(max=MOST_RATIO) * mine).mean() / answers
            off, tokens = off + apart.abs().sum().item(), tokens + len(mine)
        return loss, off / tokens

    def train_step(self):
        found = self.sampled()
        answers = sum(map(len, found))
        used = [group for group in found if 0 < sum(reward for *_, reward in group) < len(group)]
        apart = []
        for group in used:
            with torch.autocast(torch.device(self.world.device).type, torch.bfloat16, enabled=self.a.bf16):
                loss, off = self.question_loss(group, answers)
            loss.backward()
            apart.append(off)
        torch.nn.utils.clip_grad_norm_(self.student.model.parameters(), 1.0)
        return {"reward": sum(reward for group in found for *_, reward in group) / answers, "used": len(used) / len(found),
                "apart": sum(apart) / max(1, len(apart)), "tokens": sum(len(rec["completion_ids"]) for group in found for rec, *_ in group)}

    def after_step(self):
        if self.step % self.a.keep == 0:
            export(copy.deepcopy(self.student.model), self.a.model, self.a.run / f"step-{self.step:04}")


def evaluate(a):
    """Right answers of a model to the held-out questions, by the share of the length that is held: a digit for each question."""
    out, held_out = {}, Questions("heldout", a.seed, a.length).some(0, a.cases)
    with Daemon(a, a.model) as url:
        asker = Asker(a, url)
        for share in a.shares:
            found = asker.each(asker.greedy, [(messages, share) for messages, _ in held_out])
            out[f"{share:g}"] = "".join(str(int(right(text, expected))) for text, (_, expected) in zip(found, held_out))
    a.evaluate.parent.mkdir(parents=True, exist_ok=True)
    with a.evaluate.open("a") as f:
        f.write(json.dumps({"model": a.model.resolve().name, "right": out}) + "\n")


# --- results ---------------------------------------------------------------------------------------


def percent(values):
    """Mean of numbers, in %, with its 95 % interval (questions are from different dialogues, hence independent)."""
    n = len(values)
    mean = sum(values) / n
    half = 1.96 * math.sqrt(sum((x - mean) ** 2 for x in values) / max(1, n - 1) / n)
    return f"{100 * mean:.1f} [{100 * (mean - half):.1f}, {100 * (mean + half):.1f}]"


def digits(line, share):
    return [int(c) for c in line["right"].get(share, "")]


def table(path):
    """Markdown: the lines of --evaluate's file, and the paired difference of each to the first line."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    shares = list(lines[0]["right"])
    out = ["| model | " + " | ".join(f"held {s} | difference" for s in shares) + " |", "|---|" + "--:|--:|" * len(shares)]
    for line in lines:
        cells = []
        for s in shares:
            pairs = [x - y for x, y in zip(digits(line, s), digits(lines[0], s))]
            cells += [percent(digits(line, s)), percent(pairs)] if pairs else ["", ""]
        out.append(f"| {line['model']} | " + " | ".join(cells) + " |")
    return "\n".join(out)


def write_records(run, path):
    """--max-steps of answers of the model as it is, right or wrong, as distill.py reads them."""
    with path.open("w") as out:
        while run.step < run.a.max_steps:
            for group in run.sampled():
                out.writelines(json.dumps(rec) + "\n" for rec, *_ in group)
            run.step += 1


def shares(text):
    return [positive(x) for x in text.split(",")]


def arguments():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("model", type=Path, nargs="?", help="model directory, with gates")
    ap.add_argument("--evaluate", type=Path, metavar="FILE", help="only ask MODEL held-out questions, and add a line to this file")
    ap.add_argument("--table", type=Path, metavar="FILE", help="only print what --evaluate's file has")
    ap.add_argument("--daemon", type=Path, default=Path(__file__).resolve().parents[1] / "build/keepd")
    ap.add_argument("--out", type=Path, help="model directory to write at the end")
    ap.add_argument("--policy", default="global")
    ap.add_argument("--train-shares", type=shares, default=[1 / 16],
                    help="of --length that a head holds while answers are sampled (0.0625)")
    ap.add_argument("--shares", type=shares, default=[1.0, 1 / 16, 1 / 32], help="those that are evaluated (1,0.0625,0.03125)")
    ap.add_argument("--length", type=count, default=1024, help="tokens of a dialogue")
    ap.add_argument("--rows", type=count, default=8, help="questions per step")
    ap.add_argument("--samples", type=count, default=12, help="answers to each")
    ap.add_argument("--parallel", type=count, default=32, help="requests at a time")
    ap.add_argument("--cases", type=count, default=200, help="held-out questions")
    ap.add_argument("--keep", type=count, default=25, help="steps between models that are written to RUN/step-NNNN")
    ap.add_argument("--record", type=Path, metavar="FILE", help="only write answers there for distill.py, of --max-steps steps")
    add_arguments(ap, minutes=60, lr=1e-4, warmup=5)
    ap.set_defaults(bf16=False)     # on a CPU hardly faster, and the two probabilities of a token are further apart
    a = ap.parse_args()
    if a.table:
        return a
    if a.model is None or not (a.evaluate or a.run and (a.record or a.out)):
        ap.error("MODEL, --run and --out are required")
    if a.out and a.out.resolve() == a.model.resolve():
        ap.error("--out is the model itself: a stopped run could not go on from it")
    if a.record and a.max_steps == ap.get_default("max_steps"):
        ap.error("--record needs --max-steps: it ends after that many")
    if a.samples < 2:
        ap.error("--samples: at least 2, of which one can be better than the other")
    return a


def main():
    a = arguments()
    if a.table:
        print(table(a.table))
        return
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(a.seed)
    torch.set_num_threads(a.threads)
    world = World(a.device)
    if world.size > 1:
        raise SystemExit("reinforce.py is one process")
    if a.evaluate:
        evaluate(a)
        return
    a.run.mkdir(parents=True, exist_ok=True)
    run = ReinforceRun(a, world)
    if a.record:
        write_records(run, a.record)
        return
    run.resume()
    run.train()
    export(run.student.model, a.model, a.out)


if __name__ == "__main__":
    main()
