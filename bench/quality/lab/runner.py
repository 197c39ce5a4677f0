"""Runs dialogues of a plan against one daemon, many at once, within a time budget.

Sharing: the four questions of a dialogue continue the same history. Where the daemon lets a
conversation be continued several times, the history is read once ("fork"); else it is read again
before each question ("again"). From an equal starting state the daemon's answers are bitwise the
same, so both give the same table; `forks_agree` checks that against the daemon at hand.
"""
import concurrent.futures as futures
import sys
import threading
import time

from . import plan, tasks
from .client import Refused

SHARED_PART = 0.9             # part of the history's tokens that must come from the conversation


class Bar:
    """One line on a terminal: how much is done, what runs, how long it will take."""

    def __init__(self, total, deadline, done=0.0):
        self.total, self.deadline, self.started = max(total, 1e-9), deadline, time.time()
        self.before = self.done = done
        self.shown, self.lock = 0.0, threading.Lock()

    def add(self, amount, what):
        with self.lock:
            self.done += amount
            now = time.time()
            if now - self.shown < (0.5 if sys.stderr.isatty() else 30) and self.done < self.total:
                return
            self.shown = now
            rate = (self.done - self.before) / max(now - self.started, 1e-9)
            left = (self.total - self.done) / max(rate, 1e-9)
            stop = "" if self.deadline is None else f" (time ends in {max(0.0, self.deadline - now) / 60:.1f})"
            full = int(24 * self.done / self.total)
            print(f"\r[{'#' * full}{'.' * (24 - full)}] {100 * self.done / self.total:3.0f} %  {rate / 1000:.1f} k tokens/s  "
                  f"{left / 60:.1f} min left{stop}  {what:<44}", end="" if sys.stderr.isatty() else "\n",
                  file=sys.stderr, flush=True)


class Runner:
    """Asks dialogues and files the results. Any of its methods may run on any worker thread."""

    def __init__(self, client, store, shared, workers=16):
        self.client, self.store, self.shared, self.workers = client, store, shared, workers
        self.dialogues, self.lock = {}, threading.Lock()

    def dialogue(self, task, length, number):
        """Made once for all methods."""
        key = task, length, number
        with self.lock:
            if key in self.dialogues:
                return self.dialogues[key]
        made = tasks.make(task, length, number, lambda m, prompt: len(self.client.tokens(m, prompt)))
        with self.lock:
            if len(self.dialogues) > 512:          # the plan moves on; old ones do not come back
                self.dialogues.pop(next(iter(self.dialogues)))
            self.dialogues[key] = made
        return made

    def read(self, dialogue, kv, space):
        """Reads the history: it stays as a conversation of this space."""
        self.client.chat(dialogue.history[:-1], 1, {**kv, "reuse": False, "retain": True}, prompt_cache_key=space)

    def answers(self, dialogue, kv, max_tokens, shared, **fields):
        """One answer per question, each from the same history as its start."""
        space = f"lab-{time.time_ns()}-{threading.get_ident()}"
        out = []
        for i, question in enumerate(dialogue.questions):
            turn = dialogue.history + [question.message]
            for attempt in range(3):
                if attempt or i == 0 or not shared:
                    self.read(dialogue, kv, space)
                answer = self.client.chat(turn, max_tokens, {**kv, "reuse": True, "retain": False},
                                          prompt_cache_key=space, **fields)
                if self.client.continued(answer) >= SHARED_PART * dialogue.read:
                    break
            else:
                raise RuntimeError("the daemon did not continue the history it had just read; "
                                   "are there too few --max-conversations or pages?")
            out.append(answer)
        return out

    def answers_known(self, dialogue, kv, max_tokens):
        """One answer per question; history and question are one prompt, which is compressed at its end. What is computed
        before that, the questions share where the daemon can."""
        space = f"lab-{time.time_ns()}-{threading.get_ident()}"
        return [self.client.chat(dialogue.history + [q.message], max_tokens, {**kv, "reuse": True, "retain": True},
                                 prompt_cache_key=space) for q in dialogue.questions]

    def ask(self, cell, number):
        dialogue = self.dialogue(cell.task, cell.length, number)
        kv = plan.kv_fields(cell, dialogue)
        if cell.task == "loss":
            ids = self.client.tokens(dialogue.history, prompt=False)
            scores = self.client.score(ids, kv)
            scores = scores[len(scores) // 2:]
            return {"tokens": dialogue.tokens, "got": -sum(scores), "of": len(scores)}
        if "known" in dict(cell.extra):
            answers = self.answers_known(dialogue, kv, tasks.ANSWER_TOKENS[cell.task])
        else:
            answers = self.answers(dialogue, kv, tasks.ANSWER_TOKENS[cell.task], self.shared)
        texts = [a["choices"][0]["message"]["content"].strip() for a in answers]
        right = [text.endswith(q.expected) for text, q in zip(texts, dialogue.questions)]
        return {"tokens": dialogue.tokens, "got": sum(right), "of": len(right), "right": right, "answers": texts,
                "expected": [q.expected for q in dialogue.questions],
                "depths": [q.depth for q in dialogue.questions],
                "kept": answers[-1]["usage"]["kv_details"]["kept_entries"]}

    def unit(self, cell, number):
        key = f"{cell.name}/{number}"
        if self.store.get(key):
            return
        try:
            row = self.ask(cell, number)
        except Refused as error:
            row = {"refused": str(error)}
        self.store.add(key, {"method": cell.method, "dialogue": number, **row})

    def run(self, cells, rounds, deadline):
        """Works off the schedule; False when the time ended first."""
        units = [(c, d) for c, d in plan.schedule(cells, rounds) if not self.store.get(f"{c.name}/{d}")]
        bar = Bar(sum(plan.cost(c, self.shared) for c, _ in units), deadline)
        waiting, stop = iter(units), threading.Event()
        ended = threading.Event()

        def work():
            while not stop.is_set():
                if deadline is not None and time.time() > deadline:
                    return ended.set()
                with self.lock:
                    unit = next(waiting, None)
                if unit is None:
                    return None
                self.unit(*unit)
                bar.add(plan.cost(unit[0], self.shared), f"{unit[0].name} no. {unit[1]}")
            return None

        with futures.ThreadPoolExecutor(self.workers) as pool:
            try:
                for f in futures.as_completed([pool.submit(work) for _ in range(self.workers)]):
                    f.result()
            finally:
                stop.set()
        print(file=sys.stderr)
        return not ended.is_set()


def forks_agree(runner, methods, length=512):
    """Methods whose forked answers differ, in any log-probability, from those of a history read anew."""
    differing = []
    for method in methods:
        cell = plan.Cell("memory", length, method, 1.0 if method == "full" else plan.QUARTER)
        dialogue = runner.dialogue(cell.task, length, 0)
        kv = plan.kv_fields(cell, dialogue)
        try:
            both = [[a["choices"][0]["logprobs"] for a in
                     runner.answers(dialogue, kv, 16, shared, logprobs=True)] for shared in (True, False)]
        except Refused:
            continue                                # the table will say so
        if both[0] != both[1]:
            differing.append(method)
    return differing
