#!/usr/bin/env python3
"""Asks questions about contexts under every method, in the form of kvpress's evaluation, over HTTP.

    answers.py --model MODEL --gates FILE --essays essays/ --out DIR
    answers.py --url http://127.0.0.1:8080 --rows rows.jsonl --out DIR --methods global,snapkv

A row has a context, a question, the beginning of the answer, and the strings that a right answer contains (lab/rows.py
makes them; --rows reads others). A method keeps a share of the context's tokens per head. There are two protocols:

  unknown   the context is read and compressed before any question; every question continues the compressed context
  known     context and question are read and compressed together, as papers on compressing prompts do; then the beginning
            of the answer follows, so that no word of the answer is chosen with the full cache

Writes DIR/answers.jsonl, which a later run continues, and prints a table: right answers in %, with 95 % intervals over
contexts, and differences to the full cache paired by context. --kvpress also writes predictions.csv, metrics.json and
config.yaml of every cell in kvpress's form.
"""
import argparse
import concurrent.futures
import csv
import functools
import json
import pathlib
import sys
import threading
import time

from lab import client, packed, plots, report, rows, statistics

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROTOCOLS = ("unknown", "known")
ROOM = 64       # tokens of a question and its answer, for which nothing is evicted
NEVER = 1 << 20  # a chunk that no prompt reaches
MARK = "\x1e"   # around the question, until the template is applied


def arguments():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--rows", type=pathlib.Path, help="rows in JSON lines; default: made here")
    ap.add_argument("--essays", type=pathlib.Path, help="folder of .txt files in which facts are hidden")
    ap.add_argument("--tasks", default=",".join(rows.MAKERS))
    ap.add_argument("--length", type=int, default=512, help="tokens of a context (512)")
    ap.add_argument("--contexts", type=int, default=13, help="contexts of each task (13)")
    ap.add_argument("--first", type=int, default=0, help="number of the first context; those of other numbers are another split (0)")
    ap.add_argument("--methods", default="full,global,snapkv,rkv,streaming")
    ap.add_argument("--shares", default="0.25,0.125", help="of a context's tokens (0.25,0.125)")
    ap.add_argument("--protocols", default=",".join(PROTOCOLS))
    ap.add_argument("--out", type=pathlib.Path, required=True)
    ap.add_argument("--from", type=pathlib.Path, action="append", default=[], dest="earlier", metavar="FILE",
                    help="go on from these lines, too (JSON lines, .xz or not; bench/results has some)")
    ap.add_argument("--label", default="", help="added to the methods' names, where several gates are compared")
    ap.add_argument("--kvpress", action="store_true", help="also write kvpress's files")
    ap.add_argument("--report", action="store_true", help="ask nothing, only print the table")
    ap.add_argument("--least", type=int, default=40, help="questions of a cell that the table of all cells shows (40)")
    ap.add_argument("--plot", type=pathlib.Path, help="write a picture (SVG) of the table there")
    ap.add_argument("--drawn", help="methods of the picture (default: all)")
    ap.add_argument("--url", help="a running daemon; default: start one")
    ap.add_argument("--binary", default=str(ROOT / "build" / "keepd"))
    ap.add_argument("--model", default=str(ROOT / "bundled/keepd-nano"))
    ap.add_argument("--gates", help="gates file for the daemon that is started")
    ap.add_argument("--workers", type=int, default=4)
    a = ap.parse_args()
    if a.kvpress and a.report:
        ap.error("--kvpress: needs the rows, not only the report")
    a.shares = [float(s) for s in a.shares.split(",")]
    a.protocols = a.protocols.split(",")
    return a


class Store:
    """Finished answers: one line for each context and cell."""

    def __init__(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.lock, self.done = folder / "answers.jsonl", threading.Lock(), {}
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                self.keep(json.loads(line))

    def keep(self, line):
        self.done[line["task"], line["context"], line["method"], line["share"], line["protocol"]] = line

    def take(self, lines):
        """Adds lines of an earlier run that are missing here."""
        for line in lines:
            if (line["task"], line["context"], line["method"], line["share"], line["protocol"]) not in self.done:
                self.add(**line)

    def add(self, **line):
        with self.lock:
            self.keep(line)
            with self.path.open("a") as f:
                f.write(json.dumps(line) + "\n")


def pieces(c, row):
    """Token ids of context, question, and what precedes the answer, as the model's template renders them."""
    chat = row["context"] if isinstance(row["context"], list) else []
    text = "" if chat else row["context"]
    turn = chat + [{"role": "user", "content": text + MARK + row["question"] + MARK}]
    prompt = c.post("/apply-template", {"messages": turn})["prompt"] + row["answer_prefix"]
    return [c.post("/tokenize", {"prompt": part, "add_special_tokens": False})["tokens"] for part in prompt.split(MARK)]


def read(c, ids, kv, salt):
    """Reads a prompt; what remains after its compression stays as a conversation."""
    c.post("/v1/completions", {"prompt": ids, "max_tokens": 1, "temperature": 0, "kv": kv, "cache_salt": salt})


def ask(c, ids, row, kv, salt):
    """The reply to a prompt, and its usage."""
    fields = {"prompt": ids, "max_tokens": row["max_new_tokens"], "temperature": 0, "cache_salt": salt,
              "kv": {**kv, "retain": False}}
    if row.get("choices"):
        fields["guided_choice"] = [" " + choice for choice in row["choices"]]
    answer = c.post("/v1/completions", fields)
    return answer["choices"][0]["text"], answer["usage"]


def right(row, text):
    return all(value.lower() in text.lower() for value in row["answer"])


BARE = ("expected_attention", "keydiff", "knorm")   # as published these protect no recent tokens; keepd's defaults do


def kv_fields(method, share, length):
    if method == "full":
        return {"policy": "full"}
    kv = {"policy": method, "budget": max(8, int(length * share)), "buffer": ROOM, "chunk": NEVER}
    return {**kv, "recent": 0} if method in BARE else kv


class Context:
    """The rows that share a context, with their token ids."""

    def __init__(self, c, task, number, group):
        self.task, self.number, self.rows = task, number, group
        parts = [pieces(c, row) for row in group]
        self.ids, self.questions = parts[0][0], [(question, begins) for _, question, begins in parts]
        if max(len(q) + len(b) + row["max_new_tokens"] for (q, b), row in zip(self.questions, group)) > ROOM:
            raise SystemExit(f"a question and its answer have more than {ROOM} tokens")

    def texts(self, c, kv, salt, protocol):
        """The replies. What has been read and compressed stays as a conversation, which the next prompt continues. The
        state before the compression stays, too, so that prompts that begin alike are computed once, where the policy
        allows it."""
        out = []
        if protocol == "unknown":
            read(c, self.ids, kv, salt)
        for row, (question, begins) in zip(self.rows, self.questions):
            if protocol == "known":
                read(c, self.ids + question, kv, salt)
            text, usage = ask(c, self.ids + question + begins, row, kv, salt)
            after = begins if protocol == "known" else question + begins
            check(kv, usage, len(after), row["max_new_tokens"])
            out.append(text)
        return out


def check(kv, usage, after, answer):
    """Fails unless all that came after the compression is held, and nothing else above the budget."""
    if kv["policy"] == "full":
        return
    details = usage["kv_details"]
    streams = (details["kept_entries"] + details["evicted_entries"]) / details["seen_tokens"]
    above = details["kept_entries"] / streams - kv["budget"]
    if not after <= above <= after + answer:
        raise RuntimeError(f"compressed at another moment, {after} tokens before the answer: {usage}")


def forget(c, salt):
    """Deletes the conversations of a cell: the next one needs their room."""
    for conversation in c.http.get(f"{c.url}/v1/conversations", params={"cache_salt": salt}, timeout=60).json()["data"]:
        c.http.delete(f"{c.url}/v1/conversations/{conversation['id']}", params={"cache_salt": salt}, timeout=60)


def run_cell(c, store, context, method, share, wanted, label):
    """A context under one method. Each protocol has conversations of its own: one that was compressed before its question must
    not be continued where the question is to be known."""
    kv, name = kv_fields(method, share, len(context.ids)), method + label
    for protocol in PROTOCOLS:
        if protocol not in wanted or (context.task, context.number, name, share, protocol) in store.done:
            continue
        salt = f"answers-{time.time_ns()}-{threading.get_ident()}"
        texts = context.texts(c, kv, salt, protocol)
        got = sum(right(row, text) for row, text in zip(context.rows, texts))
        store.add(task=context.task, context=context.number, method=name, share=share, protocol=protocol, got=got,
                  of=len(texts), texts=texts)
        forget(c, salt)


# --- results ---------------------------------------------------------------------------------------


class Table:
    """Right answers by cell, {(task, number): (got, of)}; the full cache is the same in both protocols."""

    def __init__(self, store, tasks):
        self.cells = {}
        for (task, number, method, share, protocol), line in store.done.items():
            if task not in tasks:
                continue
            for p in PROTOCOLS if method == "full" else (protocol,):
                self.cells.setdefault((p, method, share), {})[task, number] = line["got"], line["of"]
        self.methods = list(dict.fromkeys(m for _, m, _ in self.cells if m != "full"))

    def sample(self, protocol, method, share):
        return self.cells.get((protocol, method, 1.0 if method == "full" else share), {})

    def asked(self, *cell):
        return sum(of for _, of in self.sample(*cell).values())

    def mean(self, *cell):
        found = self.sample(*cell)
        return statistics.mean(statistics.aligned(found)[0]) if found else None

    def over_full(self, protocol, method, share):
        """The paired difference to the full cache; None without common contexts."""
        found, full = self.sample(protocol, method, share), self.sample(protocol, "full", 1.0)
        return statistics.paired(found, full) if set(found) & set(full) else None

    def ordered(self, protocol, share):
        """The methods measured in a cell, the best first."""
        have = [m for m in self.methods if self.sample(protocol, m, share)]
        return sorted(have, key=lambda m: -self.mean(protocol, m, share)[0])

    def markdown(self, protocol, shares):
        head = ["method"]
        for share in shares:
            head += [report.share_name(share), f"{report.share_name(share)} - full", "questions"]
        order = self.ordered(protocol, shares[-1]) or self.methods
        lines = [["full", *[x for _ in shares for x in (report.percent(self.mean(protocol, "full", 1.0)), "",
                                                        questions(self.sample(protocol, "full", 1.0)))]]]
        for m in order + [m for m in self.methods if m not in order]:
            line = [f"`{m}`"]
            for share in shares:
                line += [report.percent(self.mean(protocol, m, share)), report.percent(self.over_full(protocol, m, share)),
                         questions(self.sample(protocol, m, share))]
            if any(line[1:]):
                lines.append(line)
        return report.table(head, lines)

    def leads(self, protocol, share):
        """Lines of the paired differences of `global` to the other methods, the smallest lower bound first."""
        ours, out = self.sample(protocol, "global", share), []
        for m in self.ordered(protocol, share):
            theirs = self.sample(protocol, m, share)
            common = set(ours) & set(theirs)
            if m != "global" and common:
                out.append((statistics.paired(ours, theirs), m, sum(theirs[c][1] for c in common)))
        return [[f"`{m}`", report.percent(lead), str(pairs)] for lead, m, pairs in sorted(out, key=lambda x: x[0][1])]

    def overview(self, protocols, shares, least):
        """All cells of at least `least` questions in one table, the best first by the last share of the first protocol."""
        cells_ = [(p, s) for p in protocols for s in shares]

        def line(m):
            counts = [self.asked(p, m, s) for p, s in cells_]
            shown = [points(self.mean(p, m, s)) if n >= least else "" for (p, s), n in zip(cells_, counts)]
            return [f"`{m}`" if m != "full" else "full cache", *shown, " / ".join(map(str, counts))]
        lines = [line(m) for m in ["full", *self.ordered(protocols[0], shares[-1])]]
        return report.table(["method", *(f"{p}, {report.share_name(s)}" for p, s in cells_), "questions"],
                            [x for x in lines if any(x[1:-1])])

    def panel(self, protocol, shares, least, drawn):
        names = [report.share_name(s) for s in shares]
        series = {m: {report.share_name(s): self.mean(protocol, m, s) for s in shares if self.asked(protocol, m, s) >= least}
                  for m in self.methods if m in drawn}
        full = self.mean(protocol, "full", 1.0)
        series["full"] = {name: full for name in names} if full else {}
        return f"question {protocol}", names, {m: v for m, v in series.items() if v}


def points(triple):
    """A share in whole per cent with its interval."""
    mean, low, high = (f"{100 * x:.0f}" for x in triple)
    return f"{mean} [{low}, {high}]"


def questions(sample):
    return str(sum(of for _, of in sample.values())) if sample else ""


def show(a, store):
    table = Table(store, a.tasks.split(","))
    for protocol in a.protocols:
        print(f"\nQuestion {protocol} at the compression, right answers in %\n\n{table.markdown(protocol, a.shares)}")
    if len(a.protocols) > 1:
        print(f"\nAll cells\n\n{table.overview(a.protocols, a.shares, a.least)}")
    for protocol, share in ((p, s) for p in a.protocols for s in a.shares):
        leads = report.table(["method", "global - method", "paired questions"], table.leads(protocol, share))
        print(f"\nQuestion {protocol}, {report.share_name(share)}: differences in points\n\n{leads}")
    if a.plot:
        drawn = set(a.drawn.split(",")) if a.drawn else set(plots.LOOK)
        panels = [table.panel(p, a.shares, a.least, drawn) for p in a.protocols]
        shown = [m for m in plots.LOOK if any(m in series for _, _, series in panels)]
        a.plot.write_text(plots.charts(panels, shown, "Right answers in %"))


def write_kvpress(a, store, groups_):
    """kvpress's three files for every finished cell."""
    for method, share, protocol in dict.fromkeys((m, s, p) for _, _, m, s, p in store.done):
        folder = a.out / f"{method}__{1 - share:g}__{protocol}"
        folder.mkdir(exist_ok=True)
        ratio, scores = 1 - share, {}
        with (folder / "predictions.csv").open("w", newline="") as f:
            out = csv.writer(f)
            out.writerow(["task", "question", "answer_prefix", "answer", "max_new_tokens", "predicted_answer", "compression_ratio"])
            for task, number, group in groups_:
                line = store.done.get((task, number, method, share, protocol))
                for row, text in zip(group, line["texts"] if line else ()):
                    out.writerow([task, row["question"], row["answer_prefix"], row["answer"], row["max_new_tokens"], text, ratio])
                    scores.setdefault(task, []).append(100.0 * right(row, text))
        metrics = {task: {"string_match": round(sum(found) / len(found), 2)} for task, found in scores.items()}
        (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
        config = {"press_name": method, "compression_ratio": ratio, "compress_questions": str(protocol == "known").lower()}
        (folder / "config.yaml").write_text("".join(f"{k}: {v}\n" for k, v in config.items()))


# --- the run ---------------------------------------------------------------------------------------


def cells(a):
    """(method, share, protocols) in the order in which each context runs them."""
    methods = a.methods.split(",")
    full = [("full", 1.0, ["unknown"])] if "full" in methods else []  # the same in both protocols
    return full + [(m, s, a.protocols) for s in a.shares for m in methods if m != "full"]


def groups(a, c):
    """(task, number, rows) of the contexts, the tasks in turns."""
    if a.rows:
        found = {}
        for row in map(json.loads, a.rows.read_text().splitlines()):
            found.setdefault((row["task"], json.dumps(row["context"])), []).append(row)
        numbers = {}
        for (task, _), group in found.items():
            numbers[task] = numbers.get(task, -1) + 1
            yield task, numbers[task], group
        return
    essays = [p.read_text(errors="replace") for p in sorted(a.essays.glob("*.txt"))] if a.essays else [rows.PROSE]
    if not essays:
        raise SystemExit(f"{a.essays}: holds no .txt files")

    @functools.lru_cache(maxsize=4096)
    def count(text):
        return len(c.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"])
    for number in range(a.first, a.first + a.contexts):
        for task in a.tasks.split(","):
            yield task, number, rows.make(task, a.length, number, essays, count)


def measure(c, a, store):
    """Context by context, so that the table is balanced wherever the run stops."""
    def one(job):
        task, number, group = job
        context = Context(c, task, number, group)
        for method, share, protocols in cells(a):
            run_cell(c, store, context, method, share, protocols, a.label if method != "full" else "")
        print(f"{task} {number}", file=sys.stderr, flush=True)

    jobs = list(groups(a, c))
    with concurrent.futures.ThreadPoolExecutor(a.workers) as pool:
        for f in concurrent.futures.as_completed([pool.submit(one, job) for job in jobs]):
            f.result()
    if a.kvpress:
        write_kvpress(a, store, jobs)


def main():
    a = arguments()
    store = Store(a.out)
    for path in a.earlier:
        store.take(packed.rows(path))
    if a.report:
        show(a, store)
        return
    if a.url:
        measure(client.Client(a.url), a, store)
        show(a, store)
        return
    daemon = client.Daemon(a.binary, a.model, "--kv-policy", "full", *(("--gates", a.gates) if a.gates else ()))
    try:
        measure(client.Client(daemon.url), a, store)
    finally:
        daemon.stop()
    show(a, store)


if __name__ == "__main__":
    main()
