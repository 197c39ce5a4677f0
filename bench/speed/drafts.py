#!/usr/bin/env python3
"""The time that guessed tokens save: the same requests with and without, on one running daemon, by turns.

    drafts.py --url http://127.0.0.1:8080 [--cases edit document json agent prose] [--tokens N] [--rounds N] [--at-once N]

    edit        a file of 200 lines is repeated with one function renamed; also with OpenAI's `prediction`
    document    a question whose answer quotes a long document
    json        facts of a text as JSON, by a schema
    agent       a call after a long listing of files
    prose       free text

Every answer is compared with the one without guesses: they must be equal. The time is that between the first token
and the last. Shown: the median of the rounds' ratios, lowest and highest, and the tokens for each reading of the weights.
"""
import argparse
import concurrent.futures as futures
import json
import pathlib
import statistics
import sys
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]


def source_lines(path, count):
    return "".join((ROOT / path).read_text().splitlines(keepends=True)[:count])


def user(text):
    return {"messages": [{"role": "user", "content": text}]}


def edit_case():
    code = source_lines("engine/steps/queue.c", 200)
    return user("Here is a C file:\n```c\n" + code + "```\nRename the function `queue_open` to `queue_begin` and return the "
                "whole file, otherwise unchanged, in one code block."), code


def document_case():
    text = source_lines("docs/SCALING.md", 80)
    return user(text + "\n\nQuote, word for word, the three paragraphs of the document above that matter most to an operator "
                "who runs several daemons on one directory."), None


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
    return body, None


def agent_case():
    listing = "\n".join(str(p.relative_to(ROOT)) for p in sorted((ROOT / "engine").glob("*.[ch]")))
    return user("You may run shell commands. The command `ls engine/*.[ch]` printed:\n" + listing + "\n\nWrite one command for each "
                "file whose name begins with `sched`, which counts its lines: `wc -l FILE`. Only the commands, one on a line."), None


def prose_case():
    return user("Write a short story about a lighthouse keeper who finds a letter."), None


CASES = {"edit": edit_case, "document": document_case, "json": json_case, "agent": agent_case, "prose": prose_case}


def answer(url, body):
    """(tokens' ids, seconds from the first token to the last, usage)."""
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    first = last = usage = None
    ids = []
    with urllib.request.urlopen(request, timeout=1800) as stream:
        for line in stream:
            if not line.startswith(b"data: {"):
                continue
            now, event = time.perf_counter(), json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if choice.get("token_ids"):
                    first, last = first or now, now
                    ids += choice["token_ids"]
    return ids, last - first, usage


def together(url, bodies):
    with futures.ThreadPoolExecutor(len(bodies)) as pool:
        done = list(pool.map(lambda body: answer(url, body), bodies))
    details = [d[2]["completion_tokens_details"] for d in done]
    return {"ids": [d[0] for d in done], "rate": sum(len(d[0]) - 1 for d in done) / max(d[1] for d in done),
            "accepted": sum(d["accepted_prediction_tokens"] for d in details),
            "rejected": sum(d["rejected_prediction_tokens"] for d in details),
            "tokens": sum(len(d[0]) for d in done)}


def measure(args, name, predicted):
    body, text = CASES[name]()
    body |= {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": args.tokens, "temperature": args.temperature,
             "seed": 7, "return_token_ids": True}
    guess = {"prediction": {"type": "content", "content": text}} if predicted else {}
    bodies = {on: [body | guess | {"speculate": on, "seed": 7 + i} for i in range(args.at_once)] for on in ("off", "auto")}
    together(args.url, bodies["off"])   # the prompt is read once
    rounds = []
    for number in range(args.rounds):
        order = ("off", "auto") if number % 2 == 0 else ("auto", "off")
        rounds.append({on: together(args.url, bodies[on]) for on in order})
    equal = all(r["off"]["ids"] == r["auto"]["ids"] == rounds[0]["off"]["ids"] for r in rounds)
    ratios = sorted(r["auto"]["rate"] / r["off"]["rate"] for r in rounds)
    auto, off = rounds[-1]["auto"], statistics.median(r["off"]["rate"] for r in rounds)
    reads = auto["tokens"] - auto["accepted"]
    print(f"| {name}{', predicted' if predicted else ''} | {off:.1f} | {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) | "
          f"{auto['tokens'] / reads:.2f} | {auto['accepted']} of {auto['accepted'] + auto['rejected']} | "
          f"{'equal' if equal else 'DIFFERENT'} |", flush=True)
    return equal


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--url", default="http://127.0.0.1:8080")
    ap.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    ap.add_argument("--tokens", type=int, default=400)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--at-once", type=int, default=1, help="the same request this many times side by side, with other seeds")
    ap.add_argument("--temperature", type=float, default=0)
    args = ap.parse_args()
    print("| case | tokens/s without | with guesses, times | tokens a reading | guesses confirmed | answers |\n|---|--:|--:|--:|--:|---|")
    equal = [measure(args, name, predicted) for name in args.cases for predicted in ([False, True] if name == "edit" else [False])]
    sys.exit(not all(equal))


if __name__ == "__main__":
    main()
