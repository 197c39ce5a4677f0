#!/usr/bin/env python3
"""Asks keepd-nano with eyes about pictures that it has never seen, with parts of the cache, over HTTP.

    pictures.py --model MODEL --gates FILE --out DIR

A context is a picture with one question and its answer, alone (`at once`) or followed by other talk (`after talk`). It is read, and a
method keeps a share of its entries. Only then come further questions about the picture, and each continues the compressed context.
Pictures and questions are held-out ones of training/scenes.py, which needs training/requirements.txt.

Writes DIR/answers.jsonl, which a later run continues, and prints tables: right answers in %, with 95 % intervals over contexts, and
differences to the full cache and of `global` to the other methods, paired by context. --map FILE draws instead (SVG) which squares of
a picture of each kind the heads still hold after talk, with the first of --methods behind `full` and the first of --shares.
"""
import argparse
import concurrent.futures
import pathlib
import random
import sys
import time

import answers
from lab import client, report

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "training"))
import corpus  # noqa: E402
import scenes  # noqa: E402

TASKS = {"at once": 0, "after talk": 1000}  # tokens of other talk behind the picture
QUESTIONS = 4
ANSWER = 14  # tokens of the longest answer, with its end
ROOM = 36    # tokens of a question and its answer, for which nothing is evicted


def arguments():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--contexts", type=int, default=100, help="contexts of each task (100)")
    ap.add_argument("--methods", default="full,global,snapkv,streaming")
    ap.add_argument("--shares", default="0.5,0.25,0.125", help="of a context's entries (0.5,0.25,0.125)")
    ap.add_argument("--out", type=pathlib.Path)
    ap.add_argument("--map", type=pathlib.Path, metavar="FILE", help="only draw what is held of four pictures")
    ap.add_argument("--report", action="store_true", help="ask nothing, only print the tables")
    ap.add_argument("--binary", default=str(ROOT / "build" / "keepd"))
    ap.add_argument("--model", required=True)
    ap.add_argument("--gates", help="gates file")
    ap.add_argument("--workers", type=int, default=2)
    a = ap.parse_args()
    if not a.out and not a.map:
        ap.error("--out or --map is needed")
    a.shares, a.methods = [float(s) for s in a.shares.split(",")], a.methods.split(",")
    return a


ARTICLES = {"the", "one"}


def tells(text, answer):
    """Returns whether all words of an answer are in a text, so that the picture is not needed."""
    return set(answer.split()) - ARTICLES <= set(text.replace("?", "").split())


class Context:
    """The messages of a context, and the rows that are asked about its picture."""

    def __init__(self, c, task, number, kind=None):
        w = corpus.Words(random.Random(f"pictures/{task}/{number}"), "heldout")
        self.task, self.number, self.scene = task, number, scenes.scene(w, kind)
        scene = self.scene
        first, answer = w.rng.choice(scene.questions)
        untold = [(q, a) for q, a in scene.questions if not tells(f"{first} {answer}", a)]
        others = w.rng.sample(untold, min(QUESTIONS, len(untold)))
        self.messages = [{"role": "user", "content": [scenes.part(scene.picture), {"type": "text", "text": first}]},
                         {"role": "assistant", "content": answer}]
        self.rows = [{"question": q, "answer": [a]} for q, a in others]
        self.tokens = self.read(c, self.messages, {"policy": "full", "retain": False}, "")
        while self.tokens < TASKS[task]:
            talk, reply = corpus.chatter(w)
            self.messages += [{"role": "user", "content": talk}, {"role": "assistant", "content": reply}]
            self.tokens += len(c.tokens(self.messages[-2:], prompt=False))

    @staticmethod
    def read(c, messages, kv, salt):
        """Reads messages, which stay as a conversation unless `kv` says otherwise. Returns how many tokens they have."""
        answer = c.chat(messages, 1, kv, cache_salt=salt, add_generation_prompt=False)
        return answer["usage"]["prompt_tokens"]

    def texts(self, c, kv, salt):
        self.tokens = self.read(c, self.messages, kv, salt)
        out = []
        for row in self.rows:
            answer = c.chat([*self.messages, {"role": "user", "content": row["question"]}], ANSWER, {**kv, "retain": False}, cache_salt=salt)
            usage = answer["usage"]
            answers.check(kv, usage, usage["prompt_tokens"] - self.tokens, ANSWER)
            out.append(answer["choices"][0]["message"]["content"])
        return out


def kv_of(method, share, context):
    kv = answers.kv_fields(method, share, context.tokens)
    return {**kv, "buffer": ROOM} if "buffer" in kv else kv


def run_cell(c, store, context, method, share):
    if (context.task, context.number, method, share, "unknown") in store.done:
        return
    salt = f"pictures-{context.task}-{context.number}-{method}-{share}-{time.time_ns()}"
    texts = context.texts(c, kv_of(method, share, context), salt)
    got = sum(text.strip() == row["answer"][0] for row, text in zip(context.rows, texts))
    store.add(task=context.task, context=context.number, method=method, share=share, protocol="unknown", got=got, of=len(texts), texts=texts)
    answers.forget(c, salt)


def measure(c, a, store):
    def one(job):
        context = Context(c, *job)
        for method, share in [("full", 1.0)] + [(m, s) for s in a.shares for m in a.methods if m != "full"]:
            run_cell(c, store, context, method, share)

    jobs = [(task, number) for number in range(a.contexts) for task in TASKS]
    with concurrent.futures.ThreadPoolExecutor(a.workers) as pool:
        for done in concurrent.futures.as_completed([pool.submit(one, job) for job in jobs]):
            done.result()


def show(a, store):
    for task in TASKS:
        table = answers.Table(store, [task])
        print(f"\nQuestions {task}, right answers in %\n\n{table.markdown('unknown', a.shares)}")
        for share in a.shares:
            leads = report.table(["method", "global - method", "paired questions"], table.leads("unknown", share))
            print(f"\n{task}, {report.share_name(share)}: differences in points\n\n{leads}")


# --- the map ----------------------------------------------------------------------------------------

ZOOM = 2
GAP = 20


def held_squares(c, context, method, share):
    """Shares of the heads that hold each square of a context's picture."""
    kv = {**kv_of(method, share, context), "report": "positions", "retain": False}
    answer = c.chat(context.messages, 1, kv, add_generation_prompt=False)
    heads = [set(positions) for layer in answer["usage"]["kv_details"]["positions"] for positions in layer]
    first = c.post("/tokenize", {"messages": context.messages})["pictures"][0]["parts"][0]["at"]
    return [sum(first + i in held for held in heads) / len(heads) for i in range(scenes.ROWS)]


def draw_map(c, a):
    """Each picture twice: as it is, and paler where fewer heads hold a square."""
    size, svg, method = scenes.SIDE * ZOOM, [], next(m for m in a.methods if m != "full")
    for n, kind in enumerate(scenes.KINDS):
        context, x = Context(c, "after talk", 0, kind), n * (size + GAP)
        url = context.messages[0]["content"][0]["image_url"]["url"]
        for y in (0, size + GAP):
            svg.append(f'<image href="{url}" x="{x}" y="{y}" width="{size}" height="{size}"/>')
        for i, share in enumerate(held_squares(c, context, method, a.shares[0])):
            cell = scenes.CELL * ZOOM
            svg.append(f'<rect x="{x + i % scenes.CELLS * cell}" y="{size + GAP + i // scenes.CELLS * cell}" width="{cell}" height="{cell}" '
                       f'fill="white" fill-opacity="{0.92 * (1 - share):.2f}"><title>{share:.0%} of the heads</title></rect>')
    width = len(scenes.KINDS) * (size + GAP) - GAP
    a.map.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{2 * size + GAP}">' + "\n".join(svg) + "</svg>\n")


def main():
    a = arguments()
    store = answers.Store(a.out) if a.out else None
    if a.map or not a.report:
        daemon = client.Daemon(a.binary, a.model, "--kv-policy", "full", *(("--gates", a.gates) if a.gates else ()))
        try:
            c = client.Client(daemon.url)
            draw_map(c, a) if a.map else measure(c, a, store)
        finally:
            daemon.stop()
    if store:
        show(a, store)


if __name__ == "__main__":
    main()
