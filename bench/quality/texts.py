#!/usr/bin/env python3
"""Measures a bounded cache on your model and your texts, in nats per token.

    texts.py --model MODEL --gates FILE essays/ chats.jsonl
    texts.py --url http://127.0.0.1:8080 book.txt --methods global,snapkv --shares 0.25

A source is a folder of .txt files, one such file, or chats in JSON lines ({"messages": [...]}), each of them a text; a
text gives its first --length tokens, and shorter ones are passed over. Each is scored by /v1/completions with the full
cache and with every method: the numbers are means over the tokens of the second half. Nothing is known of the rest of a
text when an eviction decides. A share of 1/4 means that a head never holds more than a quarter of the text's tokens on
average: three quarters of that are the budget, one quarter is the chunk.

Prints a Markdown table of the increase over the full cache, paired by text, with 95 % intervals over the texts. With
--store, scores are kept there, with a digest of the text's tokens, and an interrupted run goes on. With --names several runs share a store: their rows have the names of
the model and of the gates (real_models.py makes tables of them).
"""
import argparse
import concurrent.futures
import hashlib
import json
import pathlib
import sys

from lab import client, plan, report, statistics

ROOT = pathlib.Path(__file__).resolve().parents[2]
GATED = ("global", "trimkv")


def arguments():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("sources", nargs="+", type=pathlib.Path, metavar="SOURCE")
    ap.add_argument("--length", type=int, default=2048, help="tokens of a text (2048)")
    ap.add_argument("--count", type=int, default=32, help="at most so many texts of a source (32)")
    ap.add_argument("--methods", help="only these, separated by commas (default: all that the daemon offers)")
    ap.add_argument("--shares", default="0.25,0.125", help="of a text's tokens (0.25,0.125)")
    ap.add_argument("--kv", type=json.loads, default={}, metavar="JSON", help="further fields of the kv object of all methods")
    ap.add_argument("--url", help="a running daemon, whatever model it serves ($KEEPD_API_KEY: its key); default: start one")
    ap.add_argument("--binary", default=str(ROOT / "build" / "keepd"))
    ap.add_argument("--model", default=str(ROOT / "bundled/keepd-nano"))
    ap.add_argument("--gates", help="gates file for the daemon that is started")
    ap.add_argument("--flag", action="append", default=[], help="a further flag of that daemon, as --flag=--kv-pool-bytes=500000000")
    ap.add_argument("--store", type=pathlib.Path, help="file of finished scores")
    ap.add_argument("--names", nargs=2, metavar=("MODEL", "GATES"), help="of the rows in --store; those with other names are passed over")
    ap.add_argument("--workers", type=int, default=4)
    a = ap.parse_args()
    a.shares = [float(s) for s in a.shares.split(",")]
    if not all(0 < s < 1 for s in a.shares):
        ap.error("--shares: numbers between 0 and 1")
    for source in a.sources:
        if not source.exists():
            ap.error(f"{source}: no such file or folder")
    return a


def chat_ids(c, messages):
    """Token ids of a chat; of a base model without a template in the plain form that `keepd fit` reads then."""
    try:
        return c.tokens(messages, prompt=False)
    except client.Refused:
        lines = [f"{m['role']}: {m.get('content') or ''}{json.dumps(m['tool_calls']) if 'tool_calls' in m else ''}\n\n" for m in messages]
        return c.post("/tokenize", {"prompt": "".join(lines), "add_special_tokens": False})["tokens"]


def raw_texts(c, source):
    """Token ids of every text of a source."""
    if source.suffix == ".jsonl":
        for line in source.read_text().splitlines():
            yield chat_ids(c, json.loads(line)["messages"])
        return
    for path in sorted(source.glob("*.txt")) if source.is_dir() else [source]:
        yield c.post("/tokenize", {"prompt": path.read_text(errors="replace"), "add_special_tokens": False})["tokens"]


def texts(c, a, source):
    found, longest = [], 0
    for ids in raw_texts(c, source):
        longest = max(longest, len(ids))
        if len(ids) >= a.length:
            found.append(ids[:a.length])
        if len(found) == a.count:
            break
    if not found:
        raise SystemExit(f"{source}: no text has {a.length} tokens, the longest has {longest}: lower --length")
    return found


def kv_fields(a, method, share):
    if method == "full":
        return {"policy": "full"}
    held = max(plan.SMALLEST, int(a.length * share))
    step = max(1, int(held * plan.STEP))
    return {"policy": method, "budget": held - step, "buffer": step, "chunk": step, **a.kv}


class Scores:
    """Nats and tokens of the second half, by (source, number of the text and kv fields; digest of the text): on another machine the same
    number may be another text. `names`: of the model and the gates."""

    def __init__(self, path, names=None):
        self.path, self.given, self.rows = path, names, {}
        for row in map(json.loads, path.read_text().splitlines() if path and path.exists() else ()):
            if self.names(row["key"]) == {k: v for k, v in row.items() if k in ("model", "gates")}:
                self.rows[row["key"], row.get("text")] = row["nats"], row["tokens"]

    def names(self, key):
        """The names in the row of this key; methods that need no gates have none."""
        if not self.given:
            return {}
        needs = json.loads(key.split(" ", 3)[3])["policy"] in GATED
        return {"model": self.given[0], "gates": self.given[1] if needs else None}

    @staticmethod
    def key(source, number, ids, fields):
        digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:12]
        return f"{source} {number} {len(ids)} {json.dumps(fields, sort_keys=True)}", digest

    def add(self, key, logprobs):
        half = logprobs[len(logprobs) // 2:]
        self.rows[key] = -sum(half), len(half)
        if self.path:
            with self.path.open("a") as f:
                named, text = key
                f.write(json.dumps({**self.names(named), "key": named, "text": text, "nats": self.rows[key][0], "tokens": len(half)}) + "\n")

    def sample(self, source, found, fields):
        """{number: (nats, tokens)} of the texts `found`."""
        keys = (self.key(source, n, ids, fields) for n, ids in enumerate(found))
        return {n: self.rows[k] for n, k in enumerate(keys) if k in self.rows}


def measure(c, a, sources, cells, scores):
    """Text by text, so that the table is balanced wherever the run stops."""
    wanted = [(source, n, ids, fields) for n in range(a.count) for source, found in sources.items()
              for ids in found[n:n + 1] for fields in cells if scores.key(source, n, ids, fields) not in scores.rows]
    with concurrent.futures.ThreadPoolExecutor(a.workers) as pool:
        jobs = {pool.submit(c.score, ids, fields): scores.key(source, n, ids, fields) for source, n, ids, fields in wanted}
        for done, job in enumerate(concurrent.futures.as_completed(jobs), 1):
            scores.add(jobs[job], job.result())
            print(f"\r{done} of {len(wanted)} scored", end="", file=sys.stderr, flush=True)


def increase(triple):
    return f"{triple[0]:+.3f} [{triple[1]:.3f}, {triple[2]:.3f}]"


def table(a, sources, methods, scores):
    columns = [(source, share) for source in sources for share in a.shares]
    rows = [["full", *(report.nats(statistics.mean(statistics.aligned(full_of(a, sources, s, scores))[0])) for s, _ in columns)]]
    for method in methods:
        rows.append([method, *(increase(statistics.paired(
            scores.sample(source, sources[source], kv_fields(a, method, share)),
            full_of(a, sources, source, scores))) for source, share in columns)])
    head = ["method", *(f"{source}, {report.share_name(share)}" for source, share in columns)]
    return report.table(head, rows)


def full_of(a, sources, source, scores):
    return scores.sample(source, sources[source], kv_fields(a, "full", 1))


def run(c, a):
    if a.length >= (positions := c.positions()):
        raise SystemExit(f"--length {a.length}: the daemon takes texts below {positions} tokens")
    sources = {source.stem: texts(c, a, source) for source in a.sources}
    if len(sources) < len(a.sources):
        raise SystemExit("two sources have the same name")
    wanted = a.methods.split(",") if a.methods else plan.METHODS
    methods = []
    for m in wanted:
        why = c.offered(m) if m != "full" else "measured in any case"
        if why is None:
            methods.append(m)
        elif m != "full":
            print(f"not offered: {m} ({why})", file=sys.stderr)
    scores = Scores(a.store, a.names)
    cells = [kv_fields(a, "full", 1)] + [kv_fields(a, m, s) for s in a.shares for m in methods]
    measure(c, a, sources, cells, scores)
    print(file=sys.stderr)
    print(", ".join(f"{source}: {len(found)} texts" for source, found in sources.items()) + f" of {a.length} tokens")
    print(table(a, sources, methods, scores))


def main():
    a = arguments()
    if a.url:
        run(client.Client(a.url), a)
        return
    daemon = client.Daemon(a.binary, a.model, "--kv-policy", "full", *(("--gates", a.gates) if a.gates else ()), *a.flag)
    try:
        run(client.Client(daemon.url), a)
    finally:
        daemon.stop()


if __name__ == "__main__":
    main()
