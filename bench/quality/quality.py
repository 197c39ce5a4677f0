#!/usr/bin/env python3
"""Quality through HTTP: what does a bounded cache cost, on our synthetic tasks?

Every case is one held-out question at the end of a held-out dialogue, sent to a running daemon as a
client would, greedy, without reusing a conversation. All policies get the same cases, so the
differences are paired. Budgets are a share of the prompt's own tokens, buffer included: with share
1/4 a prompt of 1,000 tokens never leaves more than 250 entries per head on average, at any time
(kv.budget + max(kv.buffer, kv.chunk) = 250).

Intervals: cluster bootstrap over dialogues (the questions of one dialogue are not independent).

    quality.py                    start build/keepd, run everything, write docs/QUALITY.md
    quality.py --quick            one small cell per policy: a smoke test
    quality.py --url http://...   measure a daemon that runs already

Interrupted runs resume: finished cases are kept in build/quality/<model sha>.jsonl.
"""
import argparse
import concurrent.futures as futures
import hashlib
import itertools
import json
import pathlib
import subprocess
import sys
import threading
import time

import numpy as np
import requests

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "training"))
import corpus  # noqa: E402  (the generator the model was trained with; its held-out split)

POLICIES = ("full", "global", "trimkv", "streaming")
COLOURS = {"full": "#555555", "global": "#0b6e4f", "trimkv": "#c46210", "streaming": "#7a3b9c"}
RESAMPLES = 10_000


class Cell:
    """One table cell: a task at a length under a policy that may hold `share` of the tokens."""

    def __init__(self, task, length, policy, share, dialogues):
        self.task, self.length, self.policy, self.share = task, length, policy, share
        self.dialogues = dialogues

    @property
    def name(self):
        return f"{self.task}/{self.length}/{self.policy}/{self.share:g}"


def plan(length, dialogues):
    """All cells; `full` comes first because its prompt sizes set the others' budgets."""
    cells = []
    grid = [("memory", length, (0.25, 0.5, 0.125), dialogues),
            ("memory", 2 * length, (0.25,), dialogues // 2),
            ("needle", length, (0.25,), dialogues // 2), ("trace", length, (0.25,), dialogues // 2),
            ("memory", 4 * length, (0.25,), dialogues // 4)]
    for task, tokens, shares, count in grid:
        cells.append(Cell(task, tokens, "full", 1.0, count))
        cells += [Cell(task, tokens, p, s, count) for s in shares for p in POLICIES if p != "full"]
    return cells


def cases(task, length, count, questions=4):
    """(dialogue, question, messages, expected): up to `questions` per dialogue, gold history."""
    source = corpus.dialogues(task, "heldout", 2026, length)
    for d, dialogue in enumerate(itertools.islice(source, count)):
        asked = [i for i, m in enumerate(dialogue.messages) if m.get("scored")]
        for q, i in enumerate(asked[-questions:]):
            history = [{"role": m["role"], "content": m["content"]} for m in dialogue.messages[:i]]
            yield d, q, history, dialogue.messages[i]["expected"]


def kv_request(policy, share, prompt_tokens):
    if policy == "full":
        return {"policy": "full", "reuse": False}
    total = max(16, int(prompt_tokens * share))
    buffer = max(4, total // 4)
    return {"policy": policy, "budget": total - buffer, "buffer": buffer, "chunk": buffer,
            "reuse": False}


class Store:
    """Results on disk, one line per case, so that a run can stop and go on."""

    def __init__(self, path):
        self.path, self.rows, self.lock = path, {}, threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            for line in path.read_text().splitlines():
                row = json.loads(line)
                self.rows[row["key"]] = row
        self.file = path.open("a")

    def add(self, row):
        with self.lock:
            self.rows[row["key"]] = row
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()


def ask(url, messages, kv):
    body = {"model": "keepd-nano", "messages": messages, "temperature": 0, "max_tokens": 64, "kv": kv}
    for attempt in range(5):
        r = requests.post(f"{url}/v1/chat/completions", json=body, timeout=600)
        if r.status_code != 503:
            break
        time.sleep(float(r.headers.get("retry-after", 1)))
    r.raise_for_status()
    return r.json()


def run_case(url, store, cell, case):
    d, q, messages, expected = case
    key = f"{cell.name}/{d}/{q}"
    if key in store.rows:
        return
    full = store.rows.get(f"{cell.task}/{cell.length}/full/1/{d}/{q}")
    answer = ask(url, messages, kv_request(cell.policy, cell.share, full["prompt_tokens"] if full else 0))
    text = answer["choices"][0]["message"]["content"].strip()
    usage = answer["usage"]
    store.add({"key": key, "cell": cell.name, "dialogue": d, "question": q,
               "right": text.endswith(expected), "answer": text, "expected": expected,
               "prompt_tokens": usage["prompt_tokens"], "kept": usage["kv_details"]["kept_entries"]})


def run(url, store, cells, workers):
    total = sum(4 * c.dialogues for c in cells)
    done = 0
    started = time.time()
    for cell in cells:
        work = list(cases(cell.task, cell.length, cell.dialogues))
        with futures.ThreadPoolExecutor(workers) as pool:
            for f in futures.as_completed([pool.submit(run_case, url, store, cell, c) for c in work]):
                f.result()
                done += 1
                left = (time.time() - started) / done * max(0, total - done)
                print(f"\r{done}/{total} cases  {cell.name:<34} about {left / 60:.0f} min left ",
                      end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


# --- statistics -----------------------------------------------------------------------------------

def by_dialogue(store, cell):
    """[dialogues] of (right, asked)."""
    rows = {}
    for row in store.rows.values():
        if row["cell"] == cell.name and row["dialogue"] < cell.dialogues:
            right, asked = rows.get(row["dialogue"], (0, 0))
            rows[row["dialogue"]] = (right + row["right"], asked + 1)
    return np.array([rows[d] for d in sorted(rows)], float)


def bootstrap(values, rng):
    """Mean and 95 % interval of sum(right)/sum(asked), resampling dialogues."""
    picks = rng.integers(0, len(values), (RESAMPLES, len(values)))
    sums = values[picks].sum(axis=1)
    low, high = np.percentile(sums[:, 0] / sums[:, 1], [2.5, 97.5])
    return values[:, 0].sum() / values[:, 1].sum(), low, high


def paired(a, b, rng):
    """Mean difference a - b with its 95 % interval; the same dialogues in both."""
    return bootstrap(np.stack([a[:, 0] - b[:, 0], a[:, 1]], 1), rng)


def summarise(store, cells):
    rng = np.random.default_rng(2026)
    out = []
    for cell in cells:
        values = by_dialogue(store, cell)
        mean, low, high = bootstrap(values, rng)
        row = {"task": cell.task, "length": cell.length, "policy": cell.policy, "share": cell.share,
               "cases": int(values[:, 1].sum()), "dialogues": len(values), "score": mean,
               "low": low, "high": high}
        for other in POLICIES:
            twin = Cell(cell.task, cell.length, other, 1.0 if other == "full" else cell.share, cell.dialogues)
            theirs = by_dialogue(store, twin)
            if other != cell.policy and len(theirs) == len(values):
                row[f"minus_{other}"] = paired(values, theirs, rng)
        out.append(row)
    return out


# --- report ---------------------------------------------------------------------------------------

def percent(mean, low, high):
    return f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def table(rows):
    lines = ["| task | tokens | policy | share held | cases | right, % [95 %] | minus full | minus streaming | minus trimkv |",
             "|---|--:|---|--:|--:|---|---|---|---|"]
    for r in rows:
        diffs = [percent(*r[f"minus_{o}"]) if f"minus_{o}" in r else "" for o in ("full", "streaming", "trimkv")]
        lines.append(f"| {r['task']} | {r['length']} | {r['policy']} | {r['share']:g} | {r['cases']} | "
                     f"{percent(r['score'], r['low'], r['high'])} | " + " | ".join(diffs) + " |")
    return "\n".join(lines)


def plot(rows, path):
    """Bars with intervals, one group per (task, length, share); plain SVG, readable in both themes."""
    groups = sorted({(r["task"], r["length"], r["share"]) for r in rows if r["policy"] != "full"},
                    key=lambda g: (g[0] != "memory", g[1], -g[2], g[0]))
    width, left, height, bar = 120 * len(groups) + 70, 50, 300, 22
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height + 90}" '
           'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>']
    for p in range(0, 101, 25):
        y = height - p / 100 * (height - 30)
        svg.append(f'<path d="M{left} {y}H{width - 10}" stroke="#ddd"/><text x="{left - 8}" y="{y + 4}" text-anchor="end">{p}</text>')
    for g, (task, length, share) in enumerate(groups):
        x0 = left + 15 + g * 120
        for k, policy in enumerate(POLICIES):
            r = next((r for r in rows if (r["task"], r["length"], r["policy"]) == (task, length, policy)
                      and r["share"] == (1.0 if policy == "full" else share)), None)
            if r is None:
                continue
            x, y = x0 + k * (bar + 2), height - r["score"] * (height - 30)
            lo, hi = (height - v * (height - 30) for v in (r["low"], r["high"]))
            svg.append(f'<rect x="{x}" y="{y:.1f}" width="{bar}" height="{height - y:.1f}" fill="{COLOURS[policy]}"/>'
                       f'<path d="M{x + bar / 2} {lo:.1f}V{hi:.1f}" stroke="#000"/>')
        svg.append(f'<text x="{x0 + 48}" y="{height + 16}" text-anchor="middle">{task} {length}</text>'
                   f'<text x="{x0 + 48}" y="{height + 32}" text-anchor="middle">share {share:g}</text>')
    for k, policy in enumerate(POLICIES):
        svg.append(f'<rect x="{left + k * 120}" y="{height + 55}" width="12" height="12" fill="{COLOURS[policy]}"/>'
                   f'<text x="{left + 18 + k * 120}" y="{height + 66}">{policy}</text>')
    svg.append(f'<text x="{left}" y="16">right answers, % (bars: 95 % interval)</text></svg>')
    path.write_text("\n".join(svg))


def goals(rows, length):
    """The bars this project set itself, judged from the table."""
    def cell(policy, share):
        return next(r for r in rows if (r["task"], r["length"], r["policy"], r["share"]) ==
                    ("memory", length, policy, share))
    full, ours = cell("full", 1.0), cell("global", 0.25)
    checks = [
        ("full cache at the trained length >= 95 %", full["score"] >= 0.95, f"{100 * full['score']:.1f} %"),
        ("global with a quarter >= 95 % of the full cache's score", ours["score"] >= 0.95 * full["score"],
         f"{100 * ours['score'] / max(full['score'], 1e-9):.1f} %"),
        ("lower bound of global - streaming > 0", ours["minus_streaming"][1] > 0,
         f"{100 * ours['minus_streaming'][1]:.1f} points"),
        ("lower bound of global - trimkv >= -1 point", ours["minus_trimkv"][1] >= -0.01,
         f"{100 * ours['minus_trimkv'][1]:.1f} points"),
    ]
    return "\n".join(f"- {'met' if ok else '**missed**'}: {what} ({value})" for what, ok, value in checks)


def write_report(rows, length, sha, out):
    out.mkdir(exist_ok=True)
    (out / "quality.json").write_text(json.dumps({"model_sha256": sha, "rows": rows}, indent=1, default=float) + "\n")
    plot(rows, out / "quality.svg")
    notes = out / "QUALITY.notes.md"
    (out / "QUALITY.md").write_text(f"""# Quality

*On our synthetic tasks*, with the bundled model `keepd-nano` (weights {sha[:12]}...), measured through HTTP by
`make quality`. Held-out names, values and codes; greedy decoding; every policy answers the same questions.
A share of 1/4 means: at no time more than a quarter of the prompt's tokens per head on average, the
eviction buffer included. `streaming` keeps four sinks and the most recent tokens at their true
positions (not StreamingLLM's re-rotation). Trained length: {length} tokens.

![right answers by policy](quality.svg)

{goals(rows, length)}

{table(rows)}

Differences are points, paired by question; intervals are a cluster bootstrap over dialogues
({RESAMPLES} resamples). Raw numbers: `quality.json`.

{notes.read_text() if notes.exists() else ""}""")


# --- the daemon -----------------------------------------------------------------------------------

def start_daemon(binary, model):
    process = subprocess.Popen([binary, "--model", model, "--port", "0", "--served-model-name", "keepd-nano"],
                               stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if "http://" in line:
            url = line[line.index("http://"):].split()[0].rstrip("/,")
            threading.Thread(target=lambda: [None for _ in process.stdout], daemon=True).start()
            return process, url
    sys.exit(f"{binary} did not become ready (exit {process.wait()})")


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--url", help="a running daemon; default: start one")
    ap.add_argument("--binary", default=str(ROOT / "build" / "keepd"))
    ap.add_argument("--model", default=str(ROOT / "models" / "keepd-nano"))
    ap.add_argument("--length", type=int, default=1024, help="the trained length")
    ap.add_argument("--dialogues", type=int, default=104, help="per main cell; four questions each")
    ap.add_argument("--workers", type=int, default=16)
    ap.add_argument("--out", type=pathlib.Path, default=ROOT / "docs")
    ap.add_argument("--quick", action="store_true")
    a = ap.parse_args()
    if a.quick:
        a.dialogues, a.length = 4, 512
    sha = hashlib.sha256(pathlib.Path(a.model, "model.safetensors").read_bytes()
                         + pathlib.Path(a.model, "gates.safetensors").read_bytes()).hexdigest()
    store = Store(ROOT / "build" / "quality" / f"{sha[:16]}.jsonl")
    cells = plan(a.length, a.dialogues)
    if a.quick:
        cells = [c for c in cells if (c.task, c.length) == ("memory", a.length) and c.share in (1.0, 0.25)]
    process, url = (None, a.url) if a.url else start_daemon(a.binary, a.model)
    try:
        run(url, store, cells, a.workers)
    finally:
        if process:
            process.terminate()
            process.wait()
    rows = summarise(store, cells)
    if a.quick:
        print(table(rows))
    else:
        write_report(rows, a.length, sha, a.out)
        print((a.out / "QUALITY.md").read_text())


if __name__ == "__main__":
    main()
