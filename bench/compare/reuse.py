#!/usr/bin/env python3
"""Tokens that a server reads again, of a model with recurrent layers: keepd beside llama.cpp's server.

    reuse.py --keepd PROGRAM [--llama-server PROGRAM] MODEL.gguf     make_hybrid.py makes a model: qwen35-tiny

A recurrent state cannot be cut: a server can go on only from where it kept one. Each situation is a few chats, one request after the
other, with answers of --tokens tokens; what counts is the tokens of the last prompt (of all prompts, for the agent) that were
neither found nor new, by the server's own numbers (usage.prompt_tokens_details.cached_tokens). Numbers of tokens do not depend on
the machine's speed.

llama.cpp's server runs twice: as it starts by itself, and with checkpoints as near to each other as it can have them
(--checkpoint-min-step 0). Both have places for 4 chats.
"""
import argparse
import contextlib
import http.client
import json
import random
import socket
import string
import subprocess
import sys
import tempfile
import time

WORDS = [a + b + c for a in "abc" for b in string.ascii_lowercase for c in string.ascii_lowercase]


def text(seed, words):
    """A token for each word."""
    rng = random.Random(seed)
    return "".join(" " + rng.choice(WORDS) for _ in range(words))


class Server:
    def __init__(self, name, command):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.name, self.log = name, tempfile.TemporaryFile()
        self.process = subprocess.Popen([*command, "--port", str(self.port)], stdout=self.log, stderr=self.log)
        while self.process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.call("GET", "/health").status == 200:
                    return
            time.sleep(0.1)
        self.log.seek(0)
        sys.exit(f"{name} did not start: {self.log.read().decode()[-2000:]}")

    def call(self, method, path, body=None):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        c.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"})
        return c.getresponse()

    def chat(self, messages, tokens):
        """(the answer, tokens of the prompt, how many of them were found)"""
        body = {"model": "m", "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = json.loads(self.call("POST", "/v1/chat/completions", body).read())
        if "choices" not in answer:
            sys.exit(f"{self.name}: {answer}")
        usage = answer["usage"]
        return (answer["choices"][0]["message"]["content"], usage["prompt_tokens"],
                (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))

    def stop(self):
        self.process.terminate()
        self.process.wait()


def said(role, words):
    return {"role": role, "content": words}


def turns(server, messages, questions, tokens):
    """Asks the questions one after the other; the chat with its answers, and what each prompt was: (tokens, found)."""
    prompts = []
    for question in questions:
        messages = [*messages, said("user", question)]
        answer, size, found = server.chat(messages, tokens)
        prompts.append((size, found))
        messages = [*messages, said("assistant", answer)]
    return messages, prompts


def situations(server, tokens):
    """{situation: (tokens of the prompt or prompts, tokens that a server must read, tokens that it read)}"""
    system, found = [said("system", text(1, 2000))], {}

    def last(name, chat, shared):
        """`shared`: tokens in front that an earlier request had, in this prompt."""
        _, size, cached = server.chat(chat, tokens)
        found[name] = (size, size - shared(size), size - cached)

    chat, prompts = turns(server, system, [text(10 + i, 100) for i in range(3)], tokens)
    last("the last request again (a retry)", chat[:-1], lambda size: size)
    edited = [*chat[:-2], said("user", text(20, 100))]
    before = len(edited[-1]["content"].split())
    last("the last question, edited", edited, lambda size: size - before)
    earlier = [*chat[:-4], said("user", text(21, 100))]
    last("the question before the last, edited", earlier, lambda size: size - 100)
    last("another chat with the same system prompt", [*system, said("user", text(30, 100))], lambda size: size - 100)
    _, prompts = turns(server, [said("system", text(2, 2000))], [text(100 + i, 150) for i in range(20)], tokens)
    new = prompts[0][0] + sum(b[0] - a[0] for a, b in zip(prompts, prompts[1:])) - 19 * tokens
    found["an agent of 20 turns, all prompts"] = (sum(p[0] for p in prompts), new, sum(p[0] - p[1] for p in prompts))
    chats, sizes, prompts = [[said("system", text(3, 2000))] for _ in range(8)], [2000] * 8, []
    new = 2000
    for turn in range(3):
        for i, chat in enumerate(chats):
            chats[i], (prompt,) = turns(server, chat, [text(1000 + 10 * i + turn, 100)], tokens)
            new += prompt[0] - sizes[i] - (tokens if turn else 0)
            sizes[i] = prompt[0]
            prompts.append(prompt)
    found["8 chats with one system prompt by turns, 3 each, all prompts"] = (sum(p[0] for p in prompts), new, sum(p[0] - p[1] for p in prompts))
    return found


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("model")
    ap.add_argument("--keepd", default="build/keepd")
    ap.add_argument("--llama-server")
    ap.add_argument("--tokens", type=int, default=32)
    ap.add_argument("--threads", default="1")
    a = ap.parse_args()
    servers = {"keepd": [a.keepd, "--model", a.model, "--served-model-name", "m", "--threads", a.threads, "--max-num-seqs", "4",
                         "--kv-policy", "full", "--log-level", "warn"]}
    if a.llama_server:
        own = [a.llama_server, "-m", a.model, "-t", a.threads, "-np", "4", "-c", "65536", "--no-kv-unified", "--jinja"]
        servers |= {"llama.cpp": own, "llama.cpp, checkpoints close together": [*own, "--checkpoint-min-step", "0"]}
    rows = {}
    for name, command in servers.items():
        server = Server(name, command)
        try:
            for what, numbers in situations(server, a.tokens).items():
                rows.setdefault(what, []).append(numbers)
        finally:
            server.stop()
    print("| read again | tokens of the prompts | new ones, about | " + " | ".join(servers) + " |\n|---|--:|--:|" + "--:|" * len(servers))
    for what, found in rows.items():
        print(f"| {what} | {found[0][0]:,} | {found[0][1]:,} | " + " | ".join(f"{read:,}" for _, _, read in found) + " |")


if __name__ == "__main__":
    main()
