#!/usr/bin/env python3
"""masks.py [--keepd BINARY] [--model MODEL] [--rounds N]: what constrained answers cost.

Answers of 150 tokens, one at a time and eight at once: free ones, ones in a schema that is known, and ones in a schema of their
own each, so that each is compiled and nearly every mask is made for the first time. The kinds take turns, so that a change of the
machine's speed meets all. The schema has lengths, a pattern, two formats, an enumeration, bounds and an array of objects.

Printed for each, medians of the rounds:
  share    of the time from the first request to the last token that the engine's thread spends on masks (keepd_mask_seconds)
  masks    that time for each token
  token    the time between two tokens of an answer, as the server measures it (`timings`): what a client sees while it reads
  beside   the same, beside the free answers of the same round: all that a constraint adds to a step, masks made by other threads
           and cold caches too
  request  the whole requests' time, beside the free ones: compilation and first tokens too
Masks are made before the forward pass, on the engine's thread: nothing is hidden behind it."""
import argparse
import concurrent.futures
import json
import pathlib
import statistics
import subprocess
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
KINDS = "free", "known", "new"
TOKENS = 150


def schema(i):
    text = {"type": "string"}
    order = {"type": "object", "properties": {"id": {**text, "pattern": "^[A-Z]{2}-[0-9]{4}$"}, "price": {"type": "number", "minimum": 0},
                                              "when": {**text, "format": "date-time"}, "note": text},
             "required": ["id", "price", "when", "note"], "additionalProperties": False}
    members = {f"name{i}": {**text, "minLength": 3, "maxLength": 60}, "email": {**text, "format": "email"},
               "age": {"type": "integer", "minimum": 0, "maximum": 120 + i}, "kind": {"enum": [f"red{i}", "green", "blue"]},
               "orders": {"type": "array", "minItems": 2, "maxItems": 5 + i, "items": order}}
    return {"type": "object", "properties": members, "required": list(members), "additionalProperties": False}


class Server:
    def __init__(self, binary, model, port):
        self.base = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen([binary, "--model", model, "--port", str(port), "--kv-policy", "full", "--log-level", "warn"],
                                        stdout=subprocess.DEVNULL)
        for _ in range(600):
            if self.process.poll() is not None:
                break
            try:
                urllib.request.urlopen(self.base + "/health")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        raise SystemExit("keepd did not start")

    def metric(self, name):
        lines = urllib.request.urlopen(self.base + "/metrics").read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def ask(self, wanted, seed):
        """Returns the number of tokens and the milliseconds between two of them."""
        body = {"messages": [{"role": "user", "content": "Describe a person and their orders as JSON."}], "max_tokens": TOKENS,
                "temperature": 1, "seed": seed, "ignore_eos": True, "speculate": 0, "timings": True, "kv": {"retain": False}}
        if wanted is not None:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": wanted}}
        request = urllib.request.Request(self.base + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        answer = json.load(urllib.request.urlopen(request, timeout=300))
        timings = answer["timings"]
        return answer["usage"]["completion_tokens"], timings["predicted_ms"] / timings["predicted_n"]


def run(server, jobs, width):
    """Returns the share, and microseconds a token: of masks, between tokens, and of whole requests."""
    before, begin = server.metric("keepd_mask_seconds_sum"), time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(width) as threads:
        done = list(threads.map(lambda job: server.ask(*job), jobs))  # raises what a request raised
    spent = time.perf_counter() - begin
    masks, tokens = server.metric("keepd_mask_seconds_sum") - before, sum(n for n, _ in done)
    return masks / spent, masks / tokens * 1e6, statistics.mean(ms for _, ms in done) * 1e3, spent / tokens * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keepd", default=str(ROOT / "build/keepd"))
    parser.add_argument("--model", default=str(ROOT / "bundled/keepd-nano"))
    parser.add_argument("--port", type=int, default=8963)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    server = Server(options.keepd, options.model, options.port)
    fresh = iter(range(1, 1 << 30))
    try:
        for width in (1, 8):
            server.ask(None, 0)
            server.ask(schema(0), 0)
            rounds = {kind: [] for kind in KINDS}
            for _ in range(options.rounds):
                for kind in KINDS:
                    jobs = [({"free": None, "known": schema(0), "new": schema(i)}[kind], i) for i in (next(fresh) for _ in range(8))]
                    rounds[kind].append(run(server, jobs, width))
            print(f"{width} at once:")
            for kind in KINDS:
                share, masks, token, _ = (statistics.median(column) for column in zip(*rounds[kind]))
                beside, request = (statistics.median(r[k] / free[k] for r, free in zip(rounds[kind], rounds["free"])) for k in (2, 3))
                print(f"  {kind:6} share {100 * share:5.2f} %   masks {masks:6.1f} us   token {token:7.1f} us   beside {beside:.3f}   request {request:.3f}",
                      flush=True)
    finally:
        server.process.terminate()
        server.process.wait()


if __name__ == "__main__":
    main()
