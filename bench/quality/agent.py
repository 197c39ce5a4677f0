#!/usr/bin/env python3
"""An agent's sessions in constant memory: what a tool printed long ago is asked for.

    agent.py --model MODEL --gates FILE --out rows.jsonl
    agent.py --model MODEL --gates FILE --out rows.jsonl --turns 24 --result 200,500 --sessions 4 --report

A session has numbered steps: the user asks for something, the agent calls a tool, and the tool prints a listing, a log, a test run or a
part of a file, --result tokens long. The model's context must hold a session. After every --every steps it is asked for a value that one of
the earlier steps printed, each question in a branch that the session does not keep. The beginning of the answer is given, so that the value
follows. The ways to hold the session:

  full             everything
  drop             everything but what tools printed, of which only the newest is there that fits into as many tokens; the full cache
  global, snapkv   (or another policy) at most --share of the session's tokens for each head, from its beginning to its end

A line of --out has the step, the step that was asked for, the answer and whether it was right; a later run goes on. --report only prints the
table: right answers in % with 95 % intervals over the sessions, by the number of steps between.
"""
import argparse
import json
import pathlib
import random

import answers
from lab import client, report, rows, statistics

ROOT = pathlib.Path(__file__).resolve().parents[2]
DROPPED = "[The old output of this tool was removed.]"
CHUNK = 256             # prompt tokens between two evictions
QUESTIONS = 4           # after every --every steps
NEAR = 4                # steps: what was printed since then is recent
SYSTEM = "You are a coding agent. You work on a project step by step with the tools list_files, read_log, run_tests and read_file."


def arguments():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--sessions", type=int, default=4)
    ap.add_argument("--turns", type=int, default=60)
    ap.add_argument("--result", default="500,2000", help="tokens that a tool prints, from and to (500,2000)")
    ap.add_argument("--every", type=int, default=6)
    ap.add_argument("--share", type=float, default=0.125, help="of the session's tokens that a head may hold (0.125)")
    ap.add_argument("--methods", default="full,drop,global,snapkv,streaming")
    ap.add_argument("--out", type=pathlib.Path, required=True)
    ap.add_argument("--name", default="", help="of the model, in the rows")
    ap.add_argument("--report", action="store_true")
    ap.add_argument("--binary", default=str(ROOT / "build" / "keepd"))
    ap.add_argument("--model", default=str(ROOT / "bundled/keepd-nano"))
    ap.add_argument("--gates")
    ap.add_argument("--flag", action="append", default=[], help="a further flag of the daemon")
    a = ap.parse_args()
    a.result = [int(n) for n in a.result.split(",")]
    return a


# --- Outputs of tools: (tool, arguments, lines of which one has the value, question, beginning of the answer, value) ---


def listing(rng, step):
    names = [f"{w}_{x}.{end}" for w, x, end in zip(rng.sample(rows.WORDS, 150), rng.choices(rows.VERBS, k=150), rng.choices(["c", "h", "py", "md"], k=150))]
    lines = [f"-rw-r--r-- {rows.number(rng, 5)} {name}" for name in names]
    return "list_files", {"path": f"src/{rng.choice(rows.WORDS)}"}, lines, lambda line: (
        f"How many bytes does {line.split()[2]} have in the listing of step {step}?", f"{line.split()[2]} has", line.split()[1])


def log(rng, step):
    jobs = rng.sample(rows.WORDS, 150)
    lines = [f"{rng.choice(['INFO', 'INFO', 'WARN'])} job {job} took {rows.number(rng, 4)} ms on host {rng.choice(rows.FRUITS)}" for job in jobs]
    return "read_log", {"unit": rng.choice(rows.WORDS)}, lines, lambda line: (
        f"How many ms did job {line.split()[2]} take in the log of step {step}?", f"Job {line.split()[2]} took", line.split()[4])


def tests(rng, step):
    names = [f"test_{w}_{x}" for w, x in zip(rng.sample(rows.WORDS, 150), rng.choices(rows.VERBS, k=150))]
    lines = [f"{name}: failed: expected {rows.number(rng, 4)}" if rng.random() < 0.3 else f"{name}: ok" for name in names]
    lines[0] = f"{names[0]}: failed: expected {rows.number(rng, 4)}"
    return "run_tests", {"suite": rng.choice(rows.WORDS)}, lines, lambda line: (
        f"Which value did {line.split(':')[0]} expect at step {step}?", f"{line.split(':')[0]} expected", line.split()[-1]) if "failed" in line else None


def source(rng, step):
    at, lines = rng.randint(100, 800), []
    for word, verb in zip(rng.sample(rows.WORDS, 60), rng.choices(rows.VERBS, k=60)):
        a, b, c = rng.sample(rows.PARAMETERS, 3)
        lines += [f"def {verb}_{word}({a}, {b}, {c}):", *rng.choice(rows.BODIES).format(a=a, b=b, c=c).splitlines(), ""]
    name = rng.choice(rows.WORDS)
    lines = [f"{at + i}\t{line}" for i, line in enumerate(lines)]
    return "read_file", {"path": f"{name}.py", "from": at}, lines, lambda line: (
        f"In which line does the file of step {step} define {line.split()[2].split('(')[0]}?", f"{line.split()[2].split('(')[0]} is defined in line",
        line.split()[0]) if "\tdef " in line else None


ASKED = {"list_files": "list the files of {path}", "read_log": "read the log of {unit}", "run_tests": "run the tests of {suite}", "read_file": "open {path} at line {from}"}


class Session:
    """Messages, where each step ends in them, and what can be asked of each step: (question, beginning, value)."""

    def __init__(self, seed, turns, result, count):
        rng = random.Random(f"{rows.SEED}/agent/{seed}")
        self.messages, self.ends, self.asked = [dict(role="system", content=SYSTEM)], [], []
        for step in range(1, turns + 1):
            name, arguments_, lines, ask = rng.choice((listing, log, tests, source))(rng, step)
            wanted, used, shown = rng.randint(*result), 0, []
            while used < wanted and lines:
                shown.append(lines.pop(0))
                used += count(shown[-1] + "\n")
            call = dict(name=name, arguments=json.dumps(arguments_))
            self.messages += [dict(role="user", content=f"Step {step}: please {ASKED[name].format(**arguments_)}."),
                              dict(role="assistant", content="", tool_calls=[dict(id=f"call{step}", type="function", function=call)]),
                              dict(role="tool", tool_call_id=f"call{step}", content="\n".join(shown)),
                              dict(role="assistant", content=f"Step {step} is done.")]
            self.ends.append(len(self.messages))
            self.asked.append(rng.choice([found for found in map(ask, shown) if found]))
        self.steps = {step: self.choose(rng, step) for step in range(turns)}

    @staticmethod
    def choose(rng, step):
        """Chooses the steps that are asked for after a step: a recent one, and one in each part of those before."""
        old = max(0, step - NEAR)
        parts = [old * i // (QUESTIONS - 1) for i in range(QUESTIONS)]
        return [rng.randrange(a, b) for a, b in zip(parts, parts[1:]) if a < b] + [rng.randrange(old, step)] if step else []

    def rows(self, step):
        """Rows for answers.py, of the session up to a step."""
        out = []
        for which in self.steps[step]:
            question, begins, value = self.asked[which]
            out.append((which, rows.row("agent", self.messages[:self.ends[step]], question, begins, value, 8)))
        return out


def without_old(row, tokens, count, rendered):
    """The same row; of what tools printed only the newest is there that fits. `rendered(messages)`: tokens of messages with their template."""
    context = [{**m, "content": DROPPED} if m["role"] == "tool" else m for m in row["context"]]
    left = tokens - rendered(context)
    for m, whole in zip(reversed(context), reversed(row["context"])):
        if m["role"] == "tool":
            left -= count(whole["content"]) - count(DROPPED)
            if left < 0:
                break
            m["content"] = whole["content"]
    return {**row, "context": context}


class Rows:
    def __init__(self, path, name):
        self.path, self.name = path, name
        self.rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self.done = {self.key(**row) for row in self.rows}

    @staticmethod
    def key(model, result, turns, share, session, method, step, **_):
        return model, tuple(result), turns, share, session, method, step

    def add(self, found):
        with self.path.open("a") as f:
            for row in found:
                self.rows.append(row)
                self.done.add(self.key(**row))
                f.write(json.dumps(row) + "\n")


def rendered(c, messages):
    return len(c.tokens(messages, prompt=False))


def run_session(c, a, store, number, method, count):
    session = Session(number, a.turns, a.result, count)
    try:
        whole = rendered(c, session.messages)
    except client.Refused as error:
        raise SystemExit(f"session {number}: {error} Lower --turns or --result.")
    held = int(whole * a.share)
    kv = {"policy": "full"} if method in ("full", "drop") else {"policy": method, "budget": held - CHUNK, "buffer": answers.ROOM, "chunk": CHUNK}
    salt = f"agent-{number}-{method}"
    for step in range(a.every, a.turns, a.every):
        what = dict(model=a.name, result=a.result, turns=a.turns, share=a.share, session=number, method=method, step=step)
        if store.key(**what) in store.done:
            continue
        found, last = [], None
        for which, row in session.rows(step):
            given = without_old(row, held, count, lambda messages: rendered(c, messages)) if method == "drop" else row
            context, question, begins = answers.pieces(c, given)
            if context != last:
                answers.read(c, context, kv, salt)
            last = context
            text, usage = answers.ask(c, context + question + begins, row, kv, salt)
            found.append({**what, "which": which, "tokens": usage["prompt_tokens"], "of": whole, "text": text, "right": answers.right(row, text)})
        store.add(found)
    answers.forget(c, salt)


def ages(a):
    middle = max(NEAR, a.turns // 3)
    return [("recent", 0, NEAR), *((f"{low + 1} to {high} steps", low, high) for low, high in ((NEAR, middle), (middle, a.turns)))]


def table(a, store):
    out, mine = [], [r for r in store.rows if (r["model"], r["turns"], r["result"], r["share"]) == (a.name, a.turns, a.result, a.share)]
    for method in dict.fromkeys(r["method"] for r in mine):
        line = [f"`{method}`"]
        for _, low, high in [*ages(a), ("all", 0, a.turns)]:
            sample = {}
            for r in mine:
                if r["method"] == method and low < r["step"] - r["which"] <= high:
                    got, of = sample.get(r["session"], (0, 0))
                    sample[r["session"]] = got + r["right"], of + 1
            line.append(f"{report.percent(statistics.mean(statistics.aligned(sample)[0]))} ({sum(of for _, of in sample.values())})" if sample else "")
        out.append(line)
    return report.table(["method", *(name for name, _, _ in ages(a)), "all"], out)


def main():
    a = arguments()
    store = Rows(a.out, a.name)
    if not a.report:
        daemon = client.Daemon(a.binary, a.model, "--kv-policy", "full", *(("--gates", a.gates) if a.gates else ()), *a.flag)
        try:
            c = client.Client(daemon.url)
            sizes = {}

            def count(text):
                if text not in sizes:
                    sizes[text] = len(c.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"])
                return sizes[text]
            for number in range(a.sessions):
                for method in a.methods.split(","):
                    run_session(c, a, store, number, method, count)
        finally:
            daemon.stop()
    print(table(a, store))


if __name__ == "__main__":
    main()
