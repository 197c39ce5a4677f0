#!/usr/bin/env python3
"""tenants.py [--keepd BINARY] [--asked N] [--json FILE] [-- OPTIONS]: one key floods the daemon, another one asks.

The key `flood` keeps 100 requests waiting or running: each connection asks again as soon as it has its answer of 128
tokens. The key `guest` asks one question after the other, streamed. Printed: the guest's time to the first token, p50
and p99, alone and beside the flood, for each row of SETTINGS, and what the flood got meanwhile. OPTIONS go to the daemon."""
import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile
import threading
import time

import requests

ROOT = pathlib.Path(__file__).resolve().parents[2]
FLOOD = 100
SETTINGS = {
    "equal weights": ("", ""),
    "guest weight=4": ("", "weight=4"),
    "flood requests=4": ("requests=4", ""),
}
QUESTION = {"messages": [{"role": "user", "content": "My sister Nora lives in Lisbon. The code of the garage is 4815."},
                         {"role": "assistant", "content": "Noted."}, {"role": "user", "content": "What is the code of the garage?"}],
            "max_tokens": 8, "stream": True}
STORY = {"messages": [{"role": "user", "content": "Tell me a story about my sister Nora in Lisbon."}], "max_tokens": 128}
COMMON = {"model": "keepd-nano", "ignore_eos": True, "kv": {"reuse": False, "retain": False}}


def ask(session, url):
    """Seconds to the first token; reads the whole answer."""
    begin, first = time.monotonic(), None
    with session.post(f"{url}/v1/chat/completions", json={**COMMON, **QUESTION}, stream=True, timeout=600,
                      headers={"Authorization": "Bearer key-of-guest"}) as r:
        r.raise_for_status()
        for line in r.iter_lines(chunk_size=1):
            if first is None and line.startswith(b"data: {") and json.loads(line[6:])["choices"]:
                first = time.monotonic() - begin
    return first


def asked(url, count):
    with requests.Session() as session:
        for _ in range(10):
            ask(session, url)
        return sorted(ask(session, url) for _ in range(count))


class Flood:
    def __init__(self, url):
        self.url, self.end, self.answers, self.refused = url, False, 0, 0
        self.threads = [threading.Thread(target=self.client) for _ in range(FLOOD)]
        for thread in self.threads:
            thread.start()

    def client(self):
        with requests.Session() as session:
            while not self.end:
                r = session.post(f"{self.url}/v1/chat/completions", json={**COMMON, **STORY}, timeout=600,
                                 headers={"Authorization": "Bearer key-of-flood"})
                if r.status_code == 200:
                    self.answers += 1
                else:
                    self.refused += 1
                    time.sleep(int(r.headers.get("Retry-After", 1)))

    def stop(self):
        self.end = True
        for thread in self.threads:
            thread.join()


def p99(times):
    return times[min(len(times) - 1, int(len(times) * 0.99))]


def run(keepd, options, flood, guest, count):
    with tempfile.NamedTemporaryFile("w", suffix=".keys") as keys:
        keys.write(f"key-of-flood name=flood {flood}\nkey-of-guest name=guest {guest}\n")
        keys.flush()
        daemon = subprocess.Popen([keepd, "--model", str(ROOT / "bundled/keepd-nano"), "--port", "0", "--api-key-file", keys.name,
                                   *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        url = next(line for line in daemon.stdout if "http://" in line).split("at ")[1].split()[0]
        try:
            alone = asked(url, count)
            crowd, begin = Flood(url), time.monotonic()
            time.sleep(1)
            beside = asked(url, count)
            seconds = time.monotonic() - begin
            answers, refused = crowd.answers, crowd.refused
            crowd.stop()
        finally:
            daemon.terminate()
            daemon.wait()
    return {"alone_p50": statistics.median(alone), "alone_p99": p99(alone), "beside_p50": statistics.median(beside),
            "beside_p99": p99(beside), "flood_answers_per_second": answers / seconds, "flood_refused": refused}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keepd", default=str(ROOT / "build/keepd"))
    parser.add_argument("--asked", type=int, default=200)
    parser.add_argument("--json")
    parser.add_argument("--only", choices=SETTINGS)
    parser.add_argument("options", nargs="*")
    args = parser.parse_args()
    rows = {}
    print("| settings | alone, p50 | p99 | beside, p50 | p99 | p99, ratio | flood, answers/s |\n|---|--:|--:|--:|--:|--:|--:|")
    for name, (flood, guest) in SETTINGS.items():
        if args.only and name != args.only:
            continue
        row = rows[name] = run(args.keepd, args.options, flood, guest, args.asked)
        ms = {key: f"{1000 * value:.1f} ms" for key, value in row.items()}
        print(f"| {name} | {ms['alone_p50']} | {ms['alone_p99']} | {ms['beside_p50']} | {ms['beside_p99']} | "
              f"{row['beside_p99'] / row['alone_p99']:.2f} | {row['flood_answers_per_second']:.1f} |", flush=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
