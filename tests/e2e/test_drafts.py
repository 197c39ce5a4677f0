"""Requests drawn at random give the same bits with guessed tokens and without, alone and side by side, on every
path of the CPU and on two ranks (tests/http/test_cuda.py: on the emulated GPU). KEEPD_DRAFT_REQUESTS: how many are
drawn for each of them."""
import concurrent.futures as futures
import os
import pathlib
import random
import threading
import time

import pytest
import requests

ROOT = pathlib.Path(__file__).resolve().parents[2]
COUNT = int(os.environ.get("KEEPD_DRAFT_REQUESTS", "50"))
FLAGS = ("--kv-budget", "48", "--kv-buffer", "16", "--kv-chunk", "64", "--max-num-seqs", "12")
POLICIES = ("full", "global", "streaming", "keydiff", "knorm", "trimkv", "snapkv", "h2o", "rkv", "lagkv")
NAMES = "Nora Milo Ada Bob Cleo Dora".split()
SCHEMA = {"type": "object", "properties": {"name": {"enum": NAMES}, "codes": {"type": "array", "items": {"type": "integer"}, "maxItems": 4}},
          "required": ["name", "codes"], "additionalProperties": False}


def draw(rng):
    """One request; what it repeats is what makes guesses right."""
    fact = f"My sister {rng.choice(NAMES)} lives in Lisbon. The code of the garage is {rng.randrange(1000, 9999)}. "
    messages = [{"role": "user", "content": fact * rng.randrange(1, 7)}]
    if rng.random() < 0.3:
        messages += [{"role": "assistant", "content": "Noted."}, {"role": "user", "content": "What is the code of the garage?"}]
    kv = {"policy": rng.choice(POLICIES), "report": rng.choice(("lengths", "positions", "trace")), "reuse": False, "retain": False}
    if kv["policy"] != "full":
        kv |= {"budget": rng.randrange(20, 80), "buffer": rng.choice((0, 4, 16, 40)), "chunk": rng.choice((16, 64))}
    body = {"model": "keepd-nano", "messages": messages, "max_tokens": rng.randrange(1, 90), "seed": rng.randrange(1 << 30),
            "temperature": rng.choice((0, 0, 0.3, 1)), "kv": kv, "return_token_ids": True, "logprobs": True, "ignore_eos": rng.random() < 0.5}
    if rng.random() < 0.3:
        body |= {"repetition_penalty": 1.2, "presence_penalty": 0.3}
    if rng.random() < 0.3:
        body["stop"] = [rng.choice(("garage", "i", ". ", "code of"))]
    if rng.random() < 0.2:
        body["n"] = rng.randrange(2, 4)
    if rng.random() < 0.2:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "facts", "schema": SCHEMA}}
        body.pop("stop", None)
        body["ignore_eos"] = False
    if rng.random() < 0.4:
        words = (fact * 3).split(" ")
        words[rng.randrange(len(words))] = "Porto"
        body["prediction"] = {"type": "content", "content": " ".join(words)}
    return body


def ask(url, body, speculate):
    r = requests.post(f"{url}/v1/chat/completions", json=body | {"speculate": speculate}, timeout=600)
    assert r.status_code == 200, r.text
    answer = r.json()
    details = answer["usage"]["completion_tokens_details"]
    choices = [(c["finish_reason"], c["message"]["content"], c["token_ids"], c["logprobs"]) for c in answer["choices"]]
    return (choices, answer["usage"]["kv_details"]), details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


def vanish(url, body, stop):
    """Clients that leave in the middle of an answer."""
    while not stop.is_set():
        with requests.post(f"{url}/v1/chat/completions", json=body | {"stream": True}, stream=True, timeout=600) as r:
            next(r.iter_lines())
        time.sleep(0.05)


def compare(d, seed, count):
    rng = random.Random(seed)
    bodies = [draw(rng) for _ in range(count)]
    without = [ask(d.url, body, "off") for body in bodies]
    assert not any(accepted or rejected for _, accepted, rejected in without)
    alone = [ask(d.url, body, "auto") for body in bodies]
    stop = threading.Event()
    leaver = threading.Thread(target=vanish, args=(d.url, bodies[0] | {"max_tokens": 400, "ignore_eos": True}, stop))
    leaver.start()
    with futures.ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda body: ask(d.url, body, "auto"), bodies))
    stop.set()
    leaver.join()
    for i, body in enumerate(bodies):
        assert alone[i][0] == without[i][0], f"request {i} alone: {body}"
        assert together[i][0] == without[i][0], f"request {i} beside others: {body}"
    accepted, rejected = (sum(a[k] for a in alone) for k in (1, 2))
    print(f"{count} requests, {accepted} guesses confirmed, {rejected} not")
    if count >= 50:
        assert accepted > 0 and rejected > 0
    assert d.metric("keepd_preemptions_total") == 0


@pytest.mark.parametrize("path", ["auto", "portable"])
def test_the_bits_are_those_without_guesses(daemon, path):
    compare(daemon("--cpu-path", path, *FLAGS), 1, COUNT)


def test_on_the_reference_path(daemon):
    compare(daemon("--cpu-path", "reference", *FLAGS), 2, max(COUNT // 16, 3))


def test_on_two_ranks(daemon):
    compare(daemon("--tensor-parallel-size", "2", "--threads", "2", *FLAGS), 3, COUNT)


def test_none_are_made_where_they_are_turned_off(daemon):
    d = daemon("--speculate", "0", *FLAGS)
    body = {"model": "keepd-nano", "messages": [{"role": "user", "content": "Hello, hello, hello, hello"}], "max_tokens": 40}
    assert ask(d.url, body | {"return_token_ids": True, "logprobs": True}, "auto")[1:] == (0, 0)
    assert d.metric("keepd_drafted_tokens_total") == 0


def test_a_conversation_goes_on_as_without(daemon):
    """The state that a turn leaves has no trace of guesses: the next turn's bits are the same."""
    answers = []
    for speculate in ("0", "15"):
        d = daemon("--speculate", speculate, *FLAGS)
        messages, turns = [{"role": "user", "content": "The code of the garage is 4815. " * 5}], []
        for _ in range(4):
            answer = d.chat(messages, max_tokens=50, logprobs=True, ignore_eos=True, kv={"policy": "global", "report": "positions"})
            choice, usage = answer["choices"][0], answer["usage"]
            turns.append((choice["logprobs"], usage["kv_details"], usage["prompt_tokens_details"]))
            messages += [choice["message"], {"role": "user", "content": "And what is the code of the garage?"}]
        answers.append(turns)
        assert turns[-1][2]["cached_tokens"] > 0
    assert answers[0] == answers[1]
