#!/usr/bin/env python3
"""One dialogue that is much longer than the model's positions, with kv.overflow "shift".

    endless.py --binary build/keepd --model bundled/keepd-nano --tokens 100000 --out endless.jsonl

The user tells eight facts at the start, then chatters; in the middle of the dialogue each fact is told once more, and
eight new ones are told once. Every --step tokens all facts told so far are asked, each in a branch of its own that the dialogue
does not keep. A line of --out has what was read, shifts, bytes of the conversation's pages, the daemon's resident memory
and the number of right answers; --plot draws the memory curve of finished files as SVG.
"""
import argparse
import json
import pathlib
import random
import sys
import time

from lab import client, tasks

corpus = tasks.corpus


def arguments():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--binary", default="build/keepd")
    ap.add_argument("--model", default="bundled/keepd-nano")
    ap.add_argument("--flag", action="append", default=[], help="a further flag of the daemon, as --flag=--gates=FILE")
    ap.add_argument("--tokens", type=int, default=100_000)
    ap.add_argument("--step", type=int, default=4000)
    ap.add_argument("--policy", default="global")
    ap.add_argument("--budget", type=int, default=1024)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--out", type=pathlib.Path)
    ap.add_argument("--plot", type=pathlib.Path, nargs="+", metavar="FILE", help="SVG, then files of --out")
    return ap.parse_args()


def resident(pid):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def right(answer, fact):
    """The value is the end of the expected answer: its last word."""
    value = fact.answer.rstrip(".").split()[-1].lower()
    return value in answer.lower()


def shown(dialogue):
    return [{"role": m["role"], "content": m["content"]} for m in dialogue.messages]


class Run:
    def __init__(self, a):
        self.a, self.rng = a, random.Random(a.seed)
        self.words = corpus.Words(self.rng, "train")
        self.dialogue = corpus.Dialogue("memory", "train")
        known = corpus.facts(self.words, 16)
        self.early, self.late = known[:8], known[8:]
        self.daemon = client.Daemon(a.binary, a.model, "--kv-overflow", "shift", "--max-conversations", "4", *a.flag)
        self.http = client.Client(self.daemon.url)
        self.kv = {"policy": a.policy, "budget": a.budget}

    def post(self, messages, most, **kv):
        return self.http.post("/v1/chat/completions", {"messages": messages, "max_tokens": most, "temperature": 0,
                                                       "kv": {**self.kv, **kv}})

    def told(self, facts):
        for fact in facts:
            corpus.tell(self.words, self.dialogue, [fact])
            self.dialogue.say(*corpus.chatter(self.words))

    def early_entries(self):
        """Entries that are still kept of the tokens in which the early facts were first told."""
        usage = self.post(shown(self.dialogue)[:-1] + [{"role": "user", "content": "Thank you!"}], 1, retain=False, report="positions")["usage"]
        return sum(pos < self.told_tokens for layer in usage["kv_details"]["positions"] for head in layer for pos in head)

    def ask(self, fact):
        question = {"role": "user", "content": self.words.rng.choice(fact.asked)}
        answer = self.post(shown(self.dialogue) + [question], 32, retain=False)
        return right(answer["choices"][0]["message"]["content"] or "", fact)

    def measure(self, repeated):
        began = time.time()
        # The last message of the history is the assistant's: the next user's message makes it part of a prompt.
        self.dialogue.say(*corpus.chatter(self.words))
        usage = self.post(shown(self.dialogue)[:-1], 1)["usage"]
        details, read = usage["kv_details"], usage["prompt_tokens"]
        row = {"tokens": read, "shifts": details["shifts"], "bytes": details["bytes"], "resident": resident(self.daemon.process.pid),
               "read_seconds": round(time.time() - began, 2), "repeated": repeated,
               "computed": read - usage["prompt_tokens_details"]["cached_tokens"],
               "early_entries": self.early_entries(), "early_right": sum(map(self.ask, self.early)), "late_right": sum(map(self.ask, self.late)) if repeated else None}
        print(json.dumps(row), flush=True)
        if self.a.out:
            with self.a.out.open("a") as f:
                f.write(json.dumps(row) + "\n")
        return read

    def run(self):
        read, repeated = 0, False
        self.told(self.early)
        self.told_tokens = self.post(shown(self.dialogue)[:-1], 1)["usage"]["prompt_tokens"]
        while read < self.a.tokens:
            if not repeated and read >= self.a.tokens / 2:
                self.told(self.early + self.late)
                repeated = True
            aim = self.dialogue.tokens() + self.a.step
            while self.dialogue.tokens() < aim:
                self.dialogue.say(corpus.filler(self.words, 8, 16), "That sounds nice.")  # a request has at most 4,096 messages
            read = self.measure(repeated)
        self.daemon.stop()


def plot(svg, files):
    width, height, left, top = 760, 260, 60, 24
    runs = [(f.stem, [json.loads(line) for line in f.read_text().splitlines()]) for f in files]
    most = max(r["tokens"] for _, rows in runs for r in rows)
    high = 1.15 * max(r["bytes"] for _, rows in runs for r in rows) / 2**20
    colours = ("#2563eb", "#d97706", "#059669", "#9333ea")

    def x(tokens):
        return left + tokens / most * (width - left - 20)

    def y(mib):
        return top + (1 - mib / high) * (height - top - 40)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
           f'<rect width="{width}" height="{height}" fill="white"/>',
           f'<text x="{left}" y="15">Memory of the conversation\'s cache, MiB, by tokens read</text>']
    for part in range(5):
        mib = high * part / 4
        out.append(f'<line x1="{left}" x2="{width - 20}" y1="{y(mib):.1f}" y2="{y(mib):.1f}" stroke="#ddd"/>'
                   f'<text x="{left - 8}" y="{y(mib) + 4:.1f}" text-anchor="end">{mib:.0f}</text>')
        tokens = most * part / 4
        out.append(f'<text x="{x(tokens):.1f}" y="{height - 22}" text-anchor="middle">{tokens / 1000:.0f}k</text>')
    for i, (name, rows) in enumerate(runs):
        colour = colours[i % len(colours)]
        points = " ".join(f'{x(r["tokens"]):.1f},{y(r["bytes"] / 2**20):.1f}' for r in rows)
        out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
                   f'<text x="{left + i * 180}" y="{height - 4}" fill="{colour}">{name}</text>')
    svg.write_text("\n".join(out + ["</svg>"]) + "\n")


def main():
    a = arguments()
    if a.plot:
        plot(a.plot[0], a.plot[1:])
        return 0
    Run(a).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
