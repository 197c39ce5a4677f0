#!/usr/bin/env python3
"""Time that guessed tokens save, by kind of work: the same requests without guesses, with those found in the text, and with a draft model.

    drafts.py --model FILE [--draft-model FILE] [--llama-server FILE] [--json OUT] [--cases ...] [--tokens N] [--rounds N] [--at-once N]

    edit        a file of 200 lines is repeated with one function renamed
    predicted   the same, with OpenAI's `prediction`, which llama.cpp does not know
    document    a question whose answer quotes a long document
    json        facts of a text as JSON, by a schema
    agent       a call after a long listing of files
    prose       free text

Starts keepd, keepd with the draft model and, with --llama-server, llama.cpp's server without guesses, with n-grams, and with the draft
model and n-grams. They take turns; each has read a prompt before its answers are measured. The time is that between the first token and
the last. keepd's answers must have the same tokens with guesses and without. Shown: the median of the rounds' rates; how many times as fast
that is as the same server without guesses (median of the rounds' ratios, lowest and highest); and tokens for each reading of the weights.
bench/speed/drafts_picture.py draws the file of --json.
"""
import argparse
import concurrent.futures as futures
import contextlib
import copy
import datetime
import json
import pathlib
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONTEXT = 6144  # tokens of a llama.cpp slot: the longest prompt with its answer


def source_lines(path, count):
    return "".join((ROOT / path).read_text().splitlines(keepends=True)[:count])


def user(text):
    return {"messages": [{"role": "user", "content": text}]}


def edit_case():
    code = source_lines("engine/steps/queue.c", 200)
    return user("Here is a C file:\n```c\n" + code + "```\nRename the function `queue_open` to `queue_begin` and return the "
                "whole file, otherwise unchanged, in one code block.")


def predicted_case():
    return edit_case() | {"prediction": {"type": "content", "content": source_lines("engine/steps/queue.c", 200)}}


def document_case():
    text = source_lines("docs/SCALING.md", 80)
    return user(text + "\n\nQuote, word for word, the three paragraphs of the document above that matter most to an operator "
                "who runs several daemons on one directory.")


FACTS = {"type": "object", "additionalProperties": False, "required": ["machines"], "properties": {"machines": {
    "type": "array", "minItems": 8, "maxItems": 8, "items": {
        "type": "object", "additionalProperties": False, "required": ["hostname", "operating_system", "memory_gigabytes", "location"],
        "properties": {"hostname": {"type": "string"}, "operating_system": {"type": "string"},
                       "memory_gigabytes": {"type": "integer"}, "location": {"type": "string"}}}}}}


def json_case():
    places = "Oslo Lima Turin Quito Graz Accra Busan Porto".split()
    text = "\n".join(f"Machine {name}-{i} in {place} runs {('Debian 12', 'FreeBSD 14')[i % 2]} and has {16 << i % 4} GB."
                     for i, (name, place) in enumerate(zip("ada bob cleo dora emil finn gwen hugo".split(), places, strict=True)))
    body = user(text + "\n\nList the machines as JSON.")
    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "machines", "schema": FACTS, "strict": True}}
    return body


def agent_case():
    listing = "\n".join(str(p.relative_to(ROOT)) for p in sorted((ROOT / "engine").rglob("*.[ch]")))
    return user("You may run shell commands. The command `find engine -name '*.[ch]' | sort` printed:\n" + listing + "\n\nWrite one "
                "command for each file whose name begins with `sched`, which counts its lines: `wc -l FILE`. Only the commands, one on a line.")


def prose_case():
    return user("Write a short story about a lighthouse keeper who finds a letter.")


CASES = {"edit": edit_case, "predicted": predicted_case, "document": document_case, "json": json_case, "agent": agent_case, "prose": prose_case}


class Server:
    def __init__(self, kind, command, log, more=None):
        self.kind, self.more, self.log = kind, more or {}, log
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log)

    def wait(self):
        for _ in range(1200):
            if self.process.poll() is not None:
                break
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(self.url + "/health", timeout=10).close()
                return
            time.sleep(0.1)
        self.log.seek(0)
        sys.exit(f"drafts.py: no server for '{self.kind}':\n" + self.log.read().decode(errors="replace")[-2000:])

    def stop(self):
        self.process.terminate()
        self.process.wait(60)


def answer(url, body):
    """The answer's text, its tokens' ids where the server says them, seconds from its first token to its last, and counts."""
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    first = last = None
    text, ids, usage, timings = "", [], {}, {}
    with urllib.request.urlopen(request, timeout=1800) as stream:
        for line in stream:
            if not line.startswith(b"data: {"):
                continue
            now, event = time.perf_counter(), json.loads(line[6:])
            usage, timings = event.get("usage") or usage, event.get("timings") or timings
            for choice in event.get("choices", []):
                ids += choice.get("token_ids") or []
                text += choice["delta"].get("content") or ""
                if choice.get("token_ids") or choice["delta"].get("content"):
                    first, last = first or now, now
    details = usage.get("completion_tokens_details") or {}
    right = details.get("accepted_prediction_tokens", timings.get("draft_n_accepted", 0))
    return {"text": text, "ids": ids, "seconds": (last or 0) - (first or 0), "tokens": usage.get("completion_tokens", len(ids)), "right": right,
            "wrong": details.get("rejected_prediction_tokens", timings.get("draft_n", right) - right)}


def together(server, bodies):
    with futures.ThreadPoolExecutor(len(bodies)) as pool:
        done = list(pool.map(lambda body: answer(server.url, body | server.more), bodies))
    tokens, right, wrong = (sum(d[k] for d in done) for k in ("tokens", "right", "wrong"))
    seconds = max(d["seconds"] for d in done)
    return {"rate": (tokens - len(done)) / seconds if seconds else 0, "tokens": tokens, "right": right, "wrong": wrong,
            "answers": [d["ids"] or d["text"] for d in done]}


def measure(args, name, servers, until):
    """Rounds of one kind of work, at most args.rounds, and none that would probably end after `until`."""
    base = {"stream": True, "stream_options": {"include_usage": True}, "temperature": args.temperature, "return_token_ids": True}
    bodies = [CASES[name]() | base | {"max_tokens": args.tokens, "seed": 7 + i} for i in range(args.at_once)]
    if name == "predicted":
        servers = [s for s in servers if s.kind.startswith("keepd")]
    for server in {s.url: s for s in servers}.values():
        answer(server.url, bodies[0] | server.more | {"max_tokens": 1})
    rounds, longest = [], 0
    while len(rounds) < args.rounds and (not rounds or time.monotonic() + longest < until):
        begun = time.monotonic()
        order = servers if len(rounds) % 2 == 0 else servers[::-1]
        rounds.append({s.kind: together(s, bodies) for s in order})
        longest = max(longest, time.monotonic() - begun)
    kinds = {}
    for server in servers:
        without = server.kind.split(",")[0]
        runs = [r[server.kind] for r in rounds]
        ratios = sorted(r[server.kind]["rate"] / max(r[without]["rate"], 1e-9) for r in rounds)
        last = runs[-1]
        kinds[server.kind] = {"rates": [round(r["rate"], 2) for r in runs], "times": [round(r, 3) for r in ratios],
                              "tokens": last["tokens"], "right": last["right"], "wrong": last["wrong"],
                              "tokens_a_read": round(last["tokens"] / max(last["tokens"] - last["right"], 1), 3),
                              "equal": all(r["answers"] == rounds[0][without]["answers"] for r in runs)}
        k = kinds[server.kind]
        print(f"| {name} | {server.kind} | {statistics.median(k['rates']):.1f} | {statistics.median(ratios):.2f} "
              f"({ratios[0]:.2f}-{ratios[-1]:.2f}) | {k['tokens_a_read']:.2f} | {k['right']} of {k['right'] + k['wrong']} | "
              f"{'equal' if k['equal'] else 'different'} |", flush=True)
    return kinds


def start_servers(args, log):
    """Every server of the table; two of its lines may be one server."""
    keepd = [args.keepd, args.model, "--threads", str(args.threads), "--max-num-seqs", str(max(args.at_once, 2)), *shlex.split(args.keepd_options)]
    kv = {"kv": {"policy": args.kv_policy}}
    one = Server("keepd", keepd, log(), kv | {"speculate": "off"})
    servers = [one]
    text = copy.copy(one)
    text.kind, text.more = "keepd, text", kv | {"speculate": "auto"}
    servers.append(text)
    draft = ["--draft-model", args.draft_model] if args.draft_model else []
    if draft:
        servers.append(Server("keepd, draft model", keepd + draft, log(), kv | {"speculate": "auto"}))
    if args.llama_server:
        llama = [args.llama_server, "-m", args.model, "-t", str(args.threads), "-np", str(args.at_once), "-c", str(CONTEXT * args.at_once),
                 *shlex.split(args.llama_options)]
        ngrams = shlex.split(args.llama_ngrams)
        servers += [Server("llama.cpp", llama, log()), Server("llama.cpp, text", [*llama, "--spec-type", "ngram-simple", *ngrams], log())]
        if draft:
            more = ["--spec-type", "ngram-simple,draft-simple", *ngrams, "--model-draft", args.draft_model, *shlex.split(args.llama_draft)]
            servers.append(Server("llama.cpp, draft model", llama + more, log()))
    return servers


def processor():
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return "unknown"


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", required=True, help="a GGUF file; a directory without --llama-server")
    ap.add_argument("--draft-model")
    ap.add_argument("--keepd", default=str(ROOT / "build" / "keepd"))
    ap.add_argument("--keepd-options", default="", help="further options of keepd")
    ap.add_argument("--kv-policy", default="full", help="as llama.cpp's server, which keeps every entry")
    ap.add_argument("--llama-server", help="llama.cpp's llama-server")
    ap.add_argument("--llama-options", default="--no-webui")
    ap.add_argument("--llama-ngrams", default="--spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 15")
    ap.add_argument("--llama-draft", default="", help="further options of its draft model")
    ap.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    ap.add_argument("--tokens", type=int, default=160)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--minutes", type=float, default=14, help="no round begins that would probably end later")
    ap.add_argument("--at-once", type=int, default=1, help="the same request this many times side by side, with other seeds")
    ap.add_argument("--temperature", type=float, default=0)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--json", type=pathlib.Path)
    args = ap.parse_args()
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        servers = start_servers(args, lambda: stack.enter_context(tempfile.TemporaryFile()))
        for server in servers:
            stack.callback(server.stop)
        for server in servers:
            server.wait()
        print("| work | guesses | tokens/s | times as fast | tokens a read | guesses confirmed | answers |\n|---|---|--:|--:|--:|--:|---|")
        results = {}
        for number, name in enumerate(args.cases):
            left = begun + args.minutes * 60 - time.monotonic()
            results[name] = measure(args, name, servers, time.monotonic() + left / (len(args.cases) - number))
    if args.json:
        args.json.write_text(json.dumps({
            "date": datetime.date.today().isoformat(), "processor": processor(), "threads": args.threads, "at_once": args.at_once,
            "temperature": args.temperature, "model": pathlib.Path(args.model).name, "kv_policy": args.kv_policy,
            "draft_model": pathlib.Path(args.draft_model).name if args.draft_model else None, "work": results}, indent=1) + "\n")
    sys.exit(not all(k["equal"] for work in results.values() for kind, k in work.items() if kind.startswith("keepd")))


if __name__ == "__main__":
    main()
