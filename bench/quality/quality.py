#!/usr/bin/env python3
"""Quality through HTTP: what does a bounded cache cost, on our synthetic tasks?

    quality.py                       the table, 50 rounds of dialogues; writes bench/results/nano/QUALITY.md
    quality.py --minutes 25          the same, ended by the clock: fewer rounds, still balanced
    quality.py --thorough            200 rounds
    quality.py --cells 'trace/1024/*/0.25' --dialogues 120
                                     more dialogues for some cells (task/length/method/share)
    quality.py ablations             horizon, sinks and interval of `global`, one at a time
    quality.py known                 the question is known when the cache is compressed; prints a table
    quality.py gates untied=FILE wide=FILE
                                     other gates against the model's own, each on a daemon of its own
    quality.py costs                 times and memory only, anew: best while nothing else runs
    quality.py selftest              do forked questions get bitwise the answers of histories read anew?
    quality.py report                writes the documents again from what is stored

Each form starts build/keepd (or --binary), or takes the daemon at --url. Finished dialogues are kept in
build/quality/, by the SHA-256 of weights and gates: an interrupted run goes on where it was. A method
whose code changed is measured anew with --forget METHOD. What is asked: lab/tasks.py.
"""
import argparse
import contextlib
import fnmatch
import hashlib
import json
import math
import os
import pathlib
import sys
import time

from lab import anatomy, client, packed, plan, report, runner, store, tasks

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "bench/quality/nano.template.md"
ROUNDS, THOROUGH = 50, 200
SMOKE_LENGTH = 256


def arguments():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("what", nargs="?", default="run", choices=("run", "costs", "ablations", "known", "gates", "selftest", "report"))
    ap.add_argument("files", nargs="*", metavar="NAME=FILE", help="gates: the files to compare")
    ap.add_argument("--minutes", type=float, help="end after this time, with a balanced table")
    ap.add_argument("--thorough", action="store_true", help=f"{THOROUGH} rounds instead of {ROUNDS}")
    ap.add_argument("--dialogues", type=int, help="rounds; four questions per dialogue")
    ap.add_argument("--length", type=int, default=1024, help="the trained length (1024)")
    ap.add_argument("--methods", help="only these, separated by commas")
    ap.add_argument("--cells", metavar="PATTERN,...", help="only cells whose name is like one of these")
    ap.add_argument("--sharing", choices=("auto", "fork", "again"), default="auto",
                    help="read a history once for its questions, or again for each; auto: once where the daemon can")
    ap.add_argument("--forget", action="append", default=[], metavar="METHOD", help="drop what was measured of it")
    ap.add_argument("--from", type=pathlib.Path, action="append", default=[], dest="earlier", metavar="FILE",
                    help="go on from these rows, too (JSON lines, .xz or not; bench/results has some)")
    ap.add_argument("--url", help="a running daemon; default: start one")
    ap.add_argument("--binary", default=str(ROOT / "build" / "keepd"))
    ap.add_argument("--model", default=str(ROOT / "bundled/keepd-nano"))
    ap.add_argument("--workers", type=int, default=16, help="dialogues at once (16)")
    ap.add_argument("--out", type=pathlib.Path, default=ROOT / "bench/results/nano")
    ap.add_argument("--store", type=pathlib.Path, default=ROOT / "build" / "quality")
    ap.add_argument("--smoke", action="store_true", help="one short dialogue per kind of cell: does everything work?")
    a = ap.parse_intermixed_args()      # options may stand between `gates` and its files
    if a.smoke:
        a.length, a.dialogues = SMOKE_LENGTH, 1
    a.dialogues = a.dialogues or (THOROUGH if a.thorough else ROUNDS)
    a.deadline = time.time() + 60 * a.minutes if a.minutes else None
    unknown = set(filter(None, (a.methods or "").split(","))) - set(plan.METHODS)
    if unknown:
        ap.error(f"unknown methods: {', '.join(sorted(unknown))}; there are {', '.join(plan.METHODS)}")
    a.files = [pair.partition("=")[::2] for pair in a.files]
    if (a.what == "gates") != bool(a.files) or any(not name or "/" in name or not pathlib.Path(path).is_file() for name, path in a.files):
        ap.error("gates: expected NAME=FILE with an existing file")
    if a.files and a.url:
        ap.error("gates needs daemons of our own: leave out --url")
    return a


def sha_of(model):
    digest = hashlib.sha256()
    for name in ("model.safetensors", "gates.safetensors"):
        path = pathlib.Path(model, name)
        if path.exists():
            client.file_sha(path, digest)
    return digest.hexdigest()


@contextlib.contextmanager
def connected(a, *flags):
    """A client of the daemon at --url, or of one of our own."""
    if a.url:
        yield client.Client(a.url)
        return
    daemon = client.Daemon(a.binary, a.model, *flags)
    try:
        yield client.Client(daemon.url)
    finally:
        daemon.stop()


def probe(c, a):
    """(methods the daemon offers, {name: why not})."""
    wanted = a.methods.split(",") if a.methods else plan.METHODS
    answers = {m: c.offered(m) for m in plan.METHODS if m in wanted}
    missing = {m: why for m, why in answers.items() if why}
    for method, why in missing.items():
        print(f"not offered: {method} ({why})", file=sys.stderr)
    return [m for m in answers if m not in missing], missing


def choose_sharing(c, results_store, a, methods):
    """Is a history read once for its questions? Never without a check that this changes no answer."""
    if a.sharing == "again":
        return False
    if not c.can_fork():
        if a.sharing == "fork":
            raise SystemExit("--sharing fork: this daemon does not let a conversation be continued twice")
        return False
    differing = runner.forks_agree(runner.Runner(c, results_store, True), methods, min(512, a.length))
    if differing and a.sharing == "fork":
        raise SystemExit(f"--sharing fork: other answers than from a history read anew: {', '.join(differing)}")
    if differing:
        print(f"histories are read again for each question: forks differ for {', '.join(differing)}", file=sys.stderr)
    return not differing


def describe(c, a, methods, missing, shared):
    version = c.http.get(f"{c.url}/version", timeout=30).json()["version"]
    return {"daemon": f"keepd {version} on {os.cpu_count()} cores", "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "methods": methods, "not_offered": missing, "trained": a.length,
            "sharing": "A history is read once, and its four questions continue it. Before the run, the answers were checked to be "
                       "bitwise those of histories read anew." if shared else "A history is read again for each of its questions."}


def merged(old, new):
    """Merges this run's facts with those of earlier runs with other --methods."""
    if not old:
        return new
    known = set(old["methods"]) | set(new["methods"])
    return {**new, "methods": [m for m in plan.METHODS if m in known],
            "not_offered": {**{m: w for m, w in old["not_offered"].items() if m not in known}, **new["not_offered"]}}


def cells_of(a, methods):
    return plan.smoke(a.length, methods) if a.smoke else plan.table(a.length, methods)


def wanted(a, cells):
    """Selects the cells that --cells names, or all of them."""
    if not a.cells:
        return cells
    patterns = a.cells.split(",")
    named = [c for c in cells if any(fnmatch.fnmatch(c.name, p) for p in patterns)]
    if not named:
        raise SystemExit(f"--cells {a.cells}: there is no such cell; they are called, for instance, {cells[0].name}")
    return named


def run_table(c, a, results_store):
    methods, missing = probe(c, a)
    cells = wanted(a, cells_of(a, methods))
    shared = choose_sharing(c, results_store, a, methods)
    facts = merged(results_store.get("meta"), describe(c, a, methods, missing, shared))
    results_store.add("meta", facts)
    lab = runner.Runner(c, results_store, shared, a.workers)
    if not a.cells:
        anatomy.measure(lab, methods, a.length, 1 if a.smoke else anatomy.DIALOGUES)
    whole = lab.run(cells, a.dialogues, a.deadline)
    if not whole:
        print("The time is over; the same command goes on from here.", file=sys.stderr)


def run_costs(a, results_store):
    with connected(a, "--threads", "1") as c:      # several threads would all wait for the one that another process delays
        methods, _ = probe(c, a)
        anatomy.measure(runner.Runner(c, results_store, True), methods, a.length, anew=True)


def run_cells(c, a, results_store, cells):
    cells = wanted(a, cells)
    shared = choose_sharing(c, results_store, a, ["global"])
    return runner.Runner(c, results_store, shared, a.workers).run(cells, a.dialogues, a.deadline)


def run_ablations(a, results_store):
    plain = [plan.Cell(t, a.length, "global", plan.QUARTER, w) for t, w in plan.ABLATED]     # the baseline of the variants
    with connected(a) as c:
        run_cells(c, a, results_store, plan.ablations(a.length) + plain)


def run_known(a, results_store):
    """Prints the table; the documents have the other protocol."""
    with connected(a) as c:
        methods, _ = probe(c, a)
        run_cells(c, a, results_store, plan.known(a.length, methods))
    print(report.known_table(report.Results(results_store, a.length, methods), methods))


def gates_kind(path):
    """Reads the metadata of a gates file (model/gates.h)."""
    with pathlib.Path(path).open("rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    said = json.loads(header.pop("__metadata__")["keepd"])
    count = sum(math.prod(t["shape"]) for name, t in header.items() if name != "row")
    return {**{k: said[k] for k in ("type", "tying", "width", "trained_budget")}, "parameters": count}


def compare_gates(a, results_store):
    with connected(a) as c:
        run_cells(c, a, results_store, plan.with_gates(a.length, ""))
    for name, path in a.files:
        digest = hashlib.sha256()
        client.file_sha(path, digest)
        label = f"{name}-{digest.hexdigest()[:6]}"
        with connected(a, "--gates", path) as c:
            run_cells(c, a, results_store, plan.with_gates(a.length, label))
        results_store.add(f"gates/{label}", gates_kind(path))


def selftest(a, results_store):
    with connected(a) as c:
        methods, _ = probe(c, a)
        if not c.can_fork():
            print("This daemon does not let a conversation be continued twice: histories are read again, nothing to compare.")
            return
        differing = runner.forks_agree(runner.Runner(c, results_store, True), methods, min(512, a.length))
    if differing:
        raise SystemExit(f"forked answers differ from those of histories read anew: {', '.join(differing)}")
    print(f"Forked answers are bitwise those of histories read anew: {', '.join(methods)}.")


def completeness(results, cells, rounds):
    planned = plan.schedule(cells, rounds)
    done = sum(1 for c, d in planned if results.store.get(f"{c.name}/{d}"))
    return f"{done} of {len(planned)} planned dialogues were run ({100 * done / max(1, len(planned)):.0f} %)."


def write_report(a, results_store, sha):
    facts = results_store.get("meta")
    if not facts:
        raise SystemExit("nothing is stored for these weights and gates; run quality.py first")
    results = report.Results(results_store, facts["trained"], facts["methods"])
    a.length = facts["trained"]
    cells = cells_of(a, facts["methods"])
    own = pathlib.Path(a.model, "gates.safetensors")
    kinds = {key.partition("/")[2]: row for key, row in results_store.rows.items() if key.startswith("gates/")}
    facts = {**facts, "sha": sha, "gates": {"": gates_kind(own), **kinds} if own.exists() else {},
             "completeness": completeness(results, cells, a.dialogues)}
    report.write(results, facts, cells, TEMPLATE, a.out)
    print(report.goals_text(report.goals(results)))
    print(f"written: {a.out / 'QUALITY.md'}")


def main():
    a = arguments()
    sha = sha_of(a.model)
    results_store = store.Store(a.store, sha)
    for path in a.earlier:
        results_store.take(packed.rows(path))
    if a.forget:
        results_store.forget(set(a.forget))
    if a.what in ("selftest", "known"):
        return (selftest if a.what == "selftest" else run_known)(a, results_store)
    try:
        if a.what == "run":
            with connected(a) as c:
                run_table(c, a, results_store)
        elif a.what == "costs":
            run_costs(a, results_store)
        elif a.what == "ablations":
            run_ablations(a, results_store)
        elif a.what == "gates":
            compare_gates(a, results_store)
    except KeyboardInterrupt:
        raise SystemExit("\nInterrupted: what is finished is kept, the same command goes on from there.")
    return write_report(a, results_store, sha)


if __name__ == "__main__":
    main()
