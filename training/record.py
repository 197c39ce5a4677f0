"""Collects what a running daemon answers and evicts, one JSON line per answer, for distill.py.

    python record.py --url http://127.0.0.1:8080 --chats chats.jsonl --policy gkv --budget 256 --out records.jsonl

Every line of --chats is {"messages": [...]}; a last message of the assistant is left out, the daemon answers in
its place.  Started again, it asks only what --out does not hold yet.  The standard library suffices.
"""

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

from options import count, file, positive
from report import Report

ATTEMPTS = 6            # for a request that a busy daemon rejects


class Refused(Exception):
    """One request that got no record, and why."""


def send(a, path, body=None):
    """The daemon's JSON answer; a busy daemon is asked again."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {a.api_key}"} if a.api_key else {})}
    data = None if body is None else json.dumps(body).encode()
    for attempt in range(ATTEMPTS):
        try:
            with urllib.request.urlopen(urllib.request.Request(a.url.rstrip("/") + path, data, headers), timeout=a.timeout) as r:
                return json.load(r)
        except urllib.error.HTTPError as e:
            text = e.read().decode(errors="replace")
            if e.code not in (429, 503) or attempt + 1 == ATTEMPTS:
                raise Refused(f"HTTP {e.code}: {error_message(text)}") from None
            time.sleep(2 ** attempt)
        except (urllib.error.URLError, TimeoutError, ConnectionError) as e:
            raise Refused(f"{a.url}: {getattr(e, 'reason', e)}") from None


def error_message(text):
    try:
        return json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return text[:200]


def request_body(a, model, chat):
    messages = chat["messages"]
    if messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    kv = {"policy": a.policy, "budget": a.budget, "buffer": a.buffer, "chunk": a.chunk}
    # An empty cache at the start makes positions indices of prompt and completion.
    kv = {**{k: v for k, v in kv.items() if v is not None}, "reuse": False, "retain": False, "report": "trace"}
    return {"model": model, "messages": messages, **({"tools": chat["tools"]} if chat.get("tools") else {}),
            "max_tokens": a.max_tokens, "temperature": a.temperature, "top_p": a.top_p, "seed": a.seed,
            "return_token_ids": True, "kv": kv}


def field(answer, *path):
    for key in path:
        try:
            answer = answer[key]
        except (KeyError, IndexError, TypeError):
            name = ".".join(map(str, path))
            raise Refused(f"the answer has no {name}: does this daemon know \"report\": \"trace\" and \"return_token_ids\"?") from None
    return answer


def record_of(answer, source):
    if answer.get("usage", {}).get("kv_details", {}).get("trace_lost"):
        raise Refused("the daemon had no memory for the whole trace")
    choice = field(answer, "choices", 0)
    text = choice["text"] if "text" in choice else field(answer, "choices", 0, "message", "content")
    prompt = choice["prompt_token_ids"] if "prompt_token_ids" in choice else field(answer, "prompt_token_ids")
    return {"source": source, "prompt_ids": prompt,
            "completion_ids": field(answer, "choices", 0, "token_ids"),
            "trace": field(answer, "usage", "kv_details", "trace"),
            "policy": field(answer, "usage", "kv_details", "policy"),
            "budget": field(answer, "usage", "kv_details", "budget"),
            "finish_reason": field(answer, "choices", 0, "finish_reason"),
            "text": text}


def read_chats(path):
    """(line number, chat) of every line."""
    with path.open() as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                chat = json.loads(line)
            except ValueError as e:
                raise SystemExit(f"{path}:{number}: not JSON: {e}") from None
            messages = chat.get("messages") if isinstance(chat, dict) else None
            if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
                raise SystemExit(f"{path}:{number}: messages: expected a list of objects that is not empty")
            yield number, chat


def recorded(path):
    """The line numbers --out holds already; a last line that was cut off is removed."""
    if not path.exists():
        return set()
    with path.open("r+b") as f:
        whole = f.read()
        f.truncate(whole.rfind(b"\n") + 1)
    return {json.loads(line)["source"] for line in whole[:whole.rfind(b"\n") + 1].splitlines()}


def collect(a, model, pending, out):
    """Records what the daemon answers, as it answers; how many were refused."""
    report, total, done, refused = Report(), len(pending), 0, 0
    pending, running = iter(pending), {}
    with ThreadPoolExecutor(a.parallel) as pool:
        while True:
            for number, chat in pending:
                running[pool.submit(send, a, "/v1/chat/completions", request_body(a, model, chat))] = number
                if len(running) >= a.parallel:
                    break
            if not running:
                return refused
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                number = running.pop(future)
                try:
                    out.write(json.dumps(record_of(future.result(), number)) + "\n")
                    out.flush()
                except Refused as e:
                    refused += 1
                    print(f"{a.chats}:{number}: {e}", file=sys.stderr)
                done += 1
                report.bar(done / total, {"records": done - refused, "refused": refused})
                if done % a.every == 0 or done == total:
                    report.line({"records": done - refused, "refused": refused, "left": total - done})


def arguments():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--url", default="http://127.0.0.1:8080")
    ap.add_argument("--api-key")
    ap.add_argument("--chats", type=file, required=True)
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--policy", help="default: the daemon's")
    ap.add_argument("--budget", type=count)
    ap.add_argument("--buffer", type=int)
    ap.add_argument("--chunk", type=count)
    ap.add_argument("--max-tokens", type=count, default=1024)
    ap.add_argument("--temperature", type=float, default=0.6)
    ap.add_argument("--top-p", type=float, default=1.0)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--parallel", type=count, default=4, help="requests at a time")
    ap.add_argument("--timeout", type=positive, default=3600, help="seconds for one answer")
    ap.add_argument("--every", type=count, default=20, help="answers between reports")
    return ap.parse_args()


def main():
    a = arguments()
    have = recorded(a.out)
    pending = [(n, chat) for n, chat in read_chats(a.chats) if n not in have]
    try:
        model = field(send(a, "/v1/models"), "data", 0, "id")
    except Refused as e:
        raise SystemExit(str(e)) from None
    with a.out.open("a") as out:
        refused = collect(a, model, pending, out)
    if refused:
        raise SystemExit(f"{refused} of {len(pending)} requests got no record")


if __name__ == "__main__":
    main()
