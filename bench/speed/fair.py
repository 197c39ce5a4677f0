#!/usr/bin/env python3
"""fair.py [--keepd BINARY] [--seconds N]: fair shares through HTTP, at three times the capacity.

Three clients with a key each ask keepd (the bundled model, eight places) again as soon as they have an answer:

    chat   8 connections: short questions, 32 tokens
    wide   1 connection: n=8, max_tokens=1, so every place at once
    long   8 connections: prompts of some 2,000 tokens, 64 tokens

That is 24 places for 8. Printed for each: answers and the time to the first token, median and p99, alone and beside the
others. Machines are noisy: read the ratios, and compare binaries in the same hour."""
import argparse
import json
import pathlib
import subprocess
import threading
import time

import requests

ROOT = pathlib.Path(__file__).resolve().parents[2]
PLACES = 8
ROWS = 256  # rows of a step: prompts are read in small pieces, so that steps are short
FACTS = " ".join(f"The code of gate {i} is {1000 + 7 * i}." for i in range(150))
KINDS = {
    "chat": (8, {"messages": [{"role": "user", "content": "What is the capital of my country?"}], "max_tokens": 32}),
    "wide": (1, {"messages": [{"role": "user", "content": "Say a word."}], "max_tokens": 1, "n": PLACES}),
    "long": (8, {"messages": [{"role": "user", "content": FACTS + " What is the code of gate 77?"}], "max_tokens": 64}),
}


def ask(session, url, body, key):
    """Seconds to the first token; reads the whole answer."""
    begin, first = time.monotonic(), None
    with session.post(f"{url}/v1/chat/completions", json=body, stream=True, timeout=600,
                      headers={"Authorization": f"Bearer {key}"}) as r:
        r.raise_for_status()
        for line in r.iter_lines():
            if first is None and line.startswith(b"data: {") and json.loads(line[6:])["choices"]:
                first = time.monotonic() - begin
    return first


def client(url, kind, end, out):
    _, body = KINDS[kind]
    body = {"model": "keepd-nano", "stream": True, "ignore_eos": True, "speculate": 0, "temperature": 0, "kv": {"reuse": False, "retain": False},
            **body}
    with requests.Session() as session:
        while time.monotonic() < end:
            out.append(ask(session, url, body, kind))


def run(url, kinds, seconds):
    times, end = {kind: [] for kind in kinds}, time.monotonic() + seconds
    threads = [threading.Thread(target=client, args=(url, kind, end, times[kind]))
               for kind in kinds for _ in range(KINDS[kind][0])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {kind: sorted(t) for kind, t in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keepd", default=ROOT / "build/release/server/keepd", type=pathlib.Path)
    parser.add_argument("--seconds", default=10, type=float)
    args = parser.parse_args()
    keys = [flag for kind in KINDS for flag in ("--api-key", kind)]
    daemon = subprocess.Popen([args.keepd, "--model", ROOT / "bundled/keepd-nano", "--port", "0", "--log-level", "warn",
                               "--max-num-seqs", str(PLACES), "--max-num-batched-tokens", str(ROWS), *keys], stdout=subprocess.PIPE, text=True)
    try:
        url = daemon.stdout.readline().split()[3]
        alone = {kind: run(url, [kind], args.seconds)[kind] for kind in KINDS}
        together = run(url, list(KINDS), 3 * args.seconds)
    finally:
        daemon.terminate()
        daemon.wait(60)
    print(f"{'client':6} | {'answers/s':^15} | {'TTFT median, ms':^17} | {'TTFT p99, ms':^17}")
    for kind in KINDS:
        a, b = alone[kind], together[kind]
        at = lambda t, part: 1000 * t[min(len(t) - 1, int(part * len(t)))]
        print(f"{kind:6} | {len(a) / args.seconds:6.1f} {len(b) / args.seconds / 3:6.1f}   | {at(a, .5):7.1f} {at(b, .5):7.1f}   | "
              f"{at(a, .99):7.1f} {at(b, .99):7.1f}")


if __name__ == "__main__":
    main()
