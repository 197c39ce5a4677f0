#!/usr/bin/env python3
"""One dialogue that is much longer than the model's positions, with kv.overflow "shift".

    endless.py --binary build/keepd --model bundled/keepd-nano --tokens 100000 --out endless.jsonl
    endless.py --model SmolLM2.gguf --flag=--gates=FILE --flag=--max-model-len=2048 --sinks 512 --people --essays essays/
    endless.py --model SmolLM2.gguf --people --essays essays/ --policy full --once --at 1000,2000,4000,7000

The user tells --facts facts at the start, then chatters; in the middle of the dialogue each fact is told once more, and
eight new ones are told once (not with --once). Every --step tokens all facts told so far are asked, each in a branch of
its own that the dialogue does not keep. With --people the facts are those of answers.py about people, each told as a
short sentence, between pieces of essays. They are asked in two forms: as a question, and as the beginning of the same sentence in
the user's next message. Both are answered by one of the values of the fact's kind, because a small general model would
rather go on with a sentence of its own. --sinks keeps the first tokens, in which the facts are told, whatever the policy
says. With --policy full nothing is evicted or shifted: that shows what the model itself can do at a distance.

A line of --out has what was read, shifts, bytes of the conversation's pages, the daemon's resident memory, the share of
the entries of the first telling that are kept, and the number of right answers of each form; --plot draws the memory
curve of finished files as SVG.
"""
import argparse
import json
import pathlib
import random
import sys
import time

from lab import client, rows, tasks

corpus = tasks.corpus
LATE = 8        # facts told in the middle
MARK = "\x1e"   # where the user's message ends, until the template is applied


def arguments():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--binary", default="build/keepd")
    ap.add_argument("--model", default="bundled/keepd-nano")
    ap.add_argument("--flag", action="append", default=[], help="a further flag of the daemon, as --flag=--gates=FILE")
    ap.add_argument("--tokens", type=int, default=100_000)
    ap.add_argument("--step", type=int, default=4000)
    ap.add_argument("--at", help="tokens at which facts are asked, separated by commas, instead of every --step")
    ap.add_argument("--people", action="store_true", help="facts about people, for general models")
    ap.add_argument("--essays", type=pathlib.Path, help="folder of .txt files that --people talks about")
    ap.add_argument("--facts", type=int, default=8, help="facts told at the start (8)")
    ap.add_argument("--told", type=int, default=1, help="how often they are told there (1)")
    ap.add_argument("--once", action="store_true", help="tell nothing in the middle")
    ap.add_argument("--sinks", type=int, help="first tokens that are always kept")
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


class Told:
    """A dialogue of the generator that keepd-nano was trained with."""
    FORMS = ("question",)

    def __init__(self, a, run):
        self.run, self.words = run, corpus.Words(random.Random(a.seed), "train")
        self.dialogue = corpus.Dialogue("memory", "train")
        known = corpus.facts(self.words, a.facts + LATE)
        self.early, self.late = known[:a.facts], known[a.facts:]

    def messages(self):
        return [{"role": m["role"], "content": m["content"]} for m in self.dialogue.messages]

    def tell(self, fact):
        corpus.tell(self.words, self.dialogue, [fact])
        self.chatter()

    def chatter(self):
        self.dialogue.say(*corpus.chatter(self.words))

    def filler(self):
        self.dialogue.say(corpus.filler(self.words, 8, 16), "That sounds nice.")  # a request has at most 4,096 messages

    def tokens(self):
        return self.dialogue.tokens()

    def ask(self, fact, _):
        question = {"role": "user", "content": self.words.rng.choice(fact.asked)}
        answer = self.run.post(self.messages() + [question], 32, retain=False)
        return right(answer["choices"][0]["message"]["content"] or "", fact)


class People:
    """Facts about people (lab/rows.py) between pieces of essays, or small talk."""
    PIECE = 700                   # letters of an essay in one message
    FORMS = ("question", "sentence")

    def __init__(self, a, run):
        self.run, self.rng, self.said, self.letters = run, random.Random(a.seed), [], 0
        essays = [p.read_text(errors="replace") for p in sorted(a.essays.glob("*.txt"))] if a.essays else []
        self.pieces = [text[i:i + self.PIECE].replace("\n", " ") for text in essays for i in range(0, len(text), self.PIECE)]
        self.rng.shuffle(self.pieces)
        known = {}                # by name: a person has one fact
        while len(known) < min(a.facts + LATE, len(rows.NAMES)):
            for fact in rows.facts(self.rng):
                known.setdefault(next(name for name in rows.NAMES if name in fact[1]), fact)
        known = list(known.values())
        self.early, self.late = known[:a.facts], known[a.facts:a.facts + LATE]

    def messages(self):
        return [dict(role=role, content=text) for role, text in self.said]

    def say(self, user, assistant):
        self.said += [("user", user), ("assistant", assistant)]
        self.letters += len(user) + len(assistant) + 40

    def tell(self, fact):
        _, _, begins, value, _ = fact
        self.say(f"{begins} {value}.", self.rng.choice(rows.NOTED))

    def chatter(self):
        self.say(*self.rng.choice(rows.SMALL_TALK))

    def filler(self):
        if self.pieces:
            self.say("I have read this: " + self.pieces[len(self.said) % len(self.pieces)], "That is interesting.")
        else:
            self.chatter()

    def tokens(self):
        return self.letters // 4

    def ask(self, fact, form):
        _, asked, begins, value, values = fact
        said = asked + MARK if form == "question" else MARK
        turn = [*self.messages(), {"role": "user", "content": said}]
        before, after = self.run.http.post("/apply-template", {"messages": turn})["prompt"].split(MARK)
        prompt = before + (after if form == "question" else "") + begins
        fields = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "add_special_tokens": False,
                  "guided_choice": [" " + v for v in values], "kv": {**self.run.kv, "retain": False}}
        answer = self.run.http.post("/v1/completions", fields)
        return answer["choices"][0]["text"].strip().lower() == value.lower()


class Run:
    def __init__(self, a):
        self.a, self.talk = a, (People if a.people else Told)(a, self)
        shifts = () if a.policy == "full" else ("--kv-overflow", "shift")
        self.daemon = client.Daemon(a.binary, a.model, *shifts, "--max-conversations", "4", *a.flag)
        self.http = client.Client(self.daemon.url)
        self.positions = self.http.http.get(f"{self.daemon.url}/v1/models", timeout=30).json()["data"][0]["max_model_len"]
        self.kv = {"policy": a.policy} if a.policy == "full" else {"policy": a.policy, "budget": a.budget}
        if a.sinks is not None:
            self.kv["sinks"] = a.sinks

    def post(self, messages, most, **kv):
        return self.http.post("/v1/chat/completions", {"messages": messages, "max_tokens": most, "temperature": 0,
                                                       "kv": {**self.kv, **kv}})

    def early_held(self, kept):
        """The share of the entries of the first telling that is kept, over all heads."""
        heads = [head for layer in kept for head in layer]
        return round(sum(pos < self.told_tokens for head in heads for pos in head) / (self.told_tokens * len(heads)), 4)

    def answers(self, facts):
        """Right answers by form."""
        return {form: sum(self.talk.ask(fact, form) for fact in facts) for form in self.talk.FORMS}

    def measure(self, repeated):
        began = time.time()
        # The last message of the history is the assistant's: the next user's message makes it part of a prompt.
        self.talk.chatter()
        # The report is of this request: one of its own, with other last words, could make the daemon read the whole text again.
        usage = self.post(self.talk.messages()[:-1], 1, report="positions")["usage"]
        details, read = usage["kv_details"], usage["prompt_tokens"]
        row = {"model": pathlib.Path(self.a.model).name, "positions": self.positions, "policy": self.a.policy, "sinks": self.a.sinks,
               "seed": self.a.seed, "told": self.told_tokens, "tokens": read,
               "shifts": details["shifts"], "bytes": details["bytes"], "resident": resident(self.daemon.process.pid),
               "read_seconds": round(time.time() - began, 2), "repeated": repeated,
               "computed": read - usage["prompt_tokens_details"]["cached_tokens"],
               "early_held": self.early_held(details["positions"]),
               "early": len(self.talk.early), "early_right": self.answers(self.talk.early),
               "late": len(self.talk.late) if repeated else 0, "late_right": self.answers(self.talk.late) if repeated else None}
        print(json.dumps(row), flush=True)
        if self.a.out:
            with self.a.out.open("a") as f:
                f.write(json.dumps(row) + "\n")
        return read

    def tell(self, facts):
        for fact in facts:
            self.talk.tell(fact)

    def aims(self, read):
        """The next number of tokens at which facts are asked."""
        if not self.a.at:
            return read + self.a.step
        return next((at for at in map(int, self.a.at.split(",")) if at > 1.02 * read), None)

    def run(self):
        read, repeated = 0, False
        for _ in range(self.a.told):
            self.tell(self.talk.early)
        self.told_tokens = self.post(self.talk.messages()[:-1], 1)["usage"]["prompt_tokens"]
        last = 0.98 * max(map(int, self.a.at.split(","))) if self.a.at else self.a.tokens
        while read < last:
            if not repeated and not self.a.once and read >= last / 2:
                self.tell(self.talk.early + self.talk.late)
                repeated = True
            most = self.talk.tokens() + max(1, self.aims(read) - read)
            while self.talk.tokens() < most:
                self.talk.filler()
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
