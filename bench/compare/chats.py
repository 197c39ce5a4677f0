#!/usr/bin/env python3
"""Chats that have seen much and answer together: keepd with a budget beside engines that keep everything.

    chats.py [--llama DIR] [--ik DIR] [--chats 4 32] [--seen 4096] MODEL.gguf

Every chat has its own prompt of --seen tokens. What is measured is the generation of all chats together, in tokens per second.

keepd is measured through HTTP: it reads the prompts of all chats once, keeps them as conversations, and in every round answers one
more question in each of them; medians over the rounds, with the lowest and the highest. It runs with --keepd-options, by default a
budget of 1,024 entries and a cache of 4 bits; more of them, such as gates and a policy, can be given. With --go FILE the rounds
begin when that file is there, so that only they, and not the long reading before them, need a machine without other work. With
--alike TOKENS the prompts begin with the same tokens, which are read once; every chat goes on from there with its own rest. The
rest must be long enough that eviction writes all kept entries anew, into pages of each chat's own (512 tokens are).

The others are measured by their own llama-batched-bench, inside their process, with a cache of the types in --caches, and the best
of these counts. llama.cpp reads one prompt and copies its cache to every chat (-pps with a cache for each sequence: what a step
reads is as much as with prompts of their own). ik_llama.cpp has one cache for all sequences, so a copied prompt would be read once
for all; it reads every prompt, which takes so long that it is only asked for up to --ik-most chats.

An engine that is not named, or lacks its program, is skipped with a line.
"""
import argparse
import datetime
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import time

from compare import ROOT, Keepd, joint_rate
from formats import spread, text_of

BENCH = "llama-batched-bench"
QUESTION = 16  # tokens of the prompt that is added in every round


def prompt_of(args, seed, tokens):
    rng = random.Random(seed)
    return [rng.randrange(300, args.ids) for _ in range(tokens)]


class Counted(Keepd):
    """Counts tokens by their ids, because one event may bring several. Answers are not kept, so that every round finds the chats alike."""

    keeps = True

    def request(self, prompt, tokens, cached):
        path, body = super().request(prompt, tokens, cached)
        return path, body | {"kv": {"reuse": cached, "retain": cached and self.keeps}}

    def stream(self, prompt, tokens, cached=False):
        start, moments = time.perf_counter(), []
        path, body = self.request(prompt, tokens, cached)
        with self.call("POST", path, {**body, "stream": True, "return_token_ids": True}) as r:
            if r.status != 200:
                sys.exit(f"keepd: {r.read().decode()}")
            for line in r:
                choices = json.loads(line[6:])["choices"] if line.startswith(b"data: {") else []
                moments += [time.perf_counter() - start] * sum(len(c.get("token_ids") or []) for c in choices)
        if len(moments) != tokens:
            sys.exit(f"keepd: {len(moments)} of {tokens} tokens")
        return moments


def keepd_rates(args, chats):
    """[tokens/s of each round]"""
    server = Counted(args, args.model, {"places": chats, "options": args.keepd_options.split()})
    alike = prompt_of(args, 999, args.alike)
    texts = [alike + prompt_of(args, i, args.seen - args.alike) for i in range(chats)]
    found = []
    try:
        with server.turn():
            if alike:
                server.stream(alike, 1, cached=True)
            for text in texts:
                server.stream(text, 1, cached=True)
            server.keeps = False
            print(f"keepd: {chats} chats have read {args.seen} tokens each", file=sys.stderr, flush=True)
            while args.go and not args.go.exists():
                time.sleep(0.2)
            for number in range(args.rounds):
                again = [t + prompt_of(args, 1000 + 100 * number + i, QUESTION) for i, t in enumerate(texts)]
                found.append(joint_rate(server.together(again, args.tokens, cached=True)))
                print(f"keepd: {found[-1]:.1f} tokens/s", file=sys.stderr, flush=True)
            cached = cached_tokens(server, texts[0] + prompt_of(args, 9, QUESTION))
            if cached < args.seen:
                sys.exit(f"keepd: a chat went on from {cached} tokens instead of {args.seen}")
    finally:
        server.stop()
    return found


def cached_tokens(server, text):
    path, body = server.request(text, 1, True)
    return json.loads(server.call("POST", path, body).read())["usage"]["prompt_tokens_details"]["cached_tokens"]


def peer_rate(args, folder, options, chats, cache):
    """Tokens/s of a llama-batched-bench."""
    room = chats * (args.seen + (args.peer_tokens or args.tokens) + 1) + 256
    out = text_of([folder / BENCH, "-m", args.model, "-t", args.threads, "-tb", args.threads, "-c", room, "-npp", args.seen,
                   "-ntg", args.peer_tokens or args.tokens, "-npl", chats, "-fa", "on", "-ctk", cache, "-ctv", cache, *options])
    rows = re.findall(r"^\|" + r"\s*([\d.]+)\s*\|" * 8, out.replace("||", "|"), re.MULTILINE)
    if not rows:
        raise RuntimeError(f"no row of results for {chats} chats: {out[-300:]}")
    return float(rows[-1][7])


def peers_of(args):
    """[(name, folder, options, most chats)]"""
    found = []
    for name, folder, options, most in (("llama.cpp", args.llama, ["-pps", "-no-kvu"], max(args.chats)),
                                        ("ik_llama.cpp", args.ik, ["-rtr"], args.ik_most)):
        if folder and (folder / BENCH).exists():
            found.append((name, folder, options, most))
        else:
            print(f"{name}: skipped, no {BENCH}" + (f" in {folder}" if folder else ": its folder is not given"))
    return found


def row(args, peers, chats):
    """One row of the table."""
    rates, cells = {}, []
    for name, folder, options, most in peers:
        for cache in args.caches if chats <= most else []:
            try:
                rate = peer_rate(args, folder, options, chats, cache)
            except RuntimeError as e:
                print(f"  {name}, {cache}: {e}", file=sys.stderr, flush=True)
                continue
            print(f"{name}, {cache}: {rate:.1f} tokens/s", file=sys.stderr, flush=True)
            rates[name] = max(rates.get(name, (0, "")), (rate, cache))
        cells.append("{:.1f} ({})".format(*rates[name]) if name in rates else "")
    own = keepd_rates(args, chats) if args.rounds else []
    best = max((rate for rate, _ in rates.values()), default=0)
    ratio = f"{statistics.median(own) / best:.1f}" if best and own else ""
    return f"| {chats} chats of {args.seen:,} tokens | {spread(own, '{:.1f}') if own else ''} | {' | '.join([*cells, ratio])} |"


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model", type=pathlib.Path)
    ap.add_argument("--chats", nargs="+", type=int, default=[4, 32])
    ap.add_argument("--seen", type=int, default=4096, help="tokens of each chat")
    ap.add_argument("--alike", type=int, default=0, metavar="TOKENS", help="at the beginning of all chats, read once by keepd")
    ap.add_argument("--ids", type=int, default=20000, help="prompts have token ids from 300 to this")
    ap.add_argument("--tokens", type=int, default=32, help="tokens of each answer")
    ap.add_argument("--peer-tokens", type=int, metavar="TOKENS", help="of each answer of the others (default: --tokens)")
    ap.add_argument("--go", type=pathlib.Path, metavar="FILE", help="keepd's rounds begin when it is there")
    ap.add_argument("--llama", type=pathlib.Path, metavar="DIR")
    ap.add_argument("--ik", type=pathlib.Path, metavar="DIR")
    ap.add_argument("--ik-most", type=int, default=4, metavar="CHATS")
    ap.add_argument("--caches", nargs="+", default=["q4_0", "q8_0", "f16"], help="types of the others' caches")
    ap.add_argument("--keepd", default=str(ROOT / "build" / "keepd"))
    ap.add_argument("--keepd-options", default="--kv-dtype q4", help="besides a budget of 1,024; as one word")
    ap.add_argument("--threads", type=int, default=os.cpu_count())
    ap.add_argument("--rounds", type=int, default=5, help="of keepd; 0: the others alone")
    ap.add_argument("--out", type=pathlib.Path, default=ROOT / "build" / "bench" / "compare")
    a = ap.parse_args()
    a.logs, a.nice = a.out, 0
    a.out.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    print(f"{datetime.date.today().isoformat()}, {a.model.name}, {a.threads} threads, keepd {commit} {a.keepd_options}", flush=True)
    peers = peers_of(a)
    print(f"\n| tokens/s | keepd | {' | '.join([*(p[0] for p in peers), 'keepd / best other'])} |\n|---|" + "--:|" * (len(peers) + 2))
    for chats in a.chats:
        print(row(a, peers, chats), flush=True)


if __name__ == "__main__":
    main()
