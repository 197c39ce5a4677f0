"""A daemon that is short of memory: the request whose allocation fails ends, with an error it can read or a connection
that closes; nobody else's answer changes, and the daemon serves on."""
import json
import signal

import pytest
import requests
from conftest import chat_body, events

CHAT = "/v1/chat/completions"
MANY = dict(n=2, logprobs=True, top_logprobs=2, stop=["#", "zz"], seed=3, kv={"report": "positions"})
KINDS = {
    "answer": (CHAT, chat_body("of n voices", **MANY)),
    "stream": (CHAT, chat_body("in pieces", stream=True, stream_options={"include_usage": True}, **MANY)),
    "completion": ("/v1/completions", {"prompt": ["one", "two"], "max_tokens": 8, "echo": True, "logprobs": 1,
                                       "temperature": 0, "suffix": None, "logit_bias": {"70": -1}}),
    "tokens": ("/tokenize", chat_body("to be counted")),
    "kv": ("/kv", None),
    "metrics": ("/metrics", None),
}


def joined(chunks):
    """The choices of a stream: how their tokens are divided into events depends on the load."""
    choices = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            whole = choices.setdefault(choice["index"], {"content": "", "scores": [], "finish": None})
            whole["content"] += choice["delta"].get("content") or ""
            whole["scores"] += (choice.get("logprobs") or {}).get("content") or []
            whole["finish"] = whole["finish"] or choice["finish_reason"]
    return choices


def ask(daemon, kind):
    """The text of the answer; None if there is no complete answer."""
    path, body = KINDS[kind]
    try:
        with requests.Session() as http:
            r = http.get(daemon.url + path, timeout=60) if body is None else \
                http.post(daemon.url + path, json=body, timeout=60)
            said = events(r) if kind == "stream" else [r.text]
    except requests.RequestException:
        return None
    if r.status_code != 200:
        assert r.status_code in (500, 503) and r.json()["error"]["message"], r.text
        return None
    if kind in ("kv", "metrics"):
        return len(said) == 1
    if kind == "stream":
        if said[-1:] != ["[DONE]"] or any("error" in json.loads(e) for e in said[:-1]):
            return None
        return joined(map(json.loads, said[:-1]))
    facts = ("id", "created", "usage", "system_fingerprint")
    return [{k: v for k, v in json.loads(e).items() if k not in facts} for e in said]


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_request_whose_allocation_fails(start, fake, kind):
    daemon = start(env={"KEEPD_TEST_MEMORY": "1"})
    expected = {k: ask(daemon, k) for k in ("answer", kind)}
    assert all(expected.values())
    failures = quiet = 0
    while quiet < 8:  # eight answers in a row: all allocations have been reached
        daemon.process.send_signal(signal.SIGUSR1)
        said = [ask(daemon, kind)]
        daemon.process.send_signal(signal.SIGUSR2)
        said.append(ask(daemon, "answer"))
        assert said[1] in (None, expected["answer"]) and said[0] in (None, expected[kind])
        assert None not in said or said.count(None) == 1
        quiet = 0 if None in said else quiet + 1
        failures += None in said
        assert failures < 2000
    assert failures > (3 if KINDS[kind][1] is None else 20), failures
    daemon.wait_idle()
    assert ask(daemon, "answer") == expected["answer"]


def test_a_text_without_memory_is_refused(start):
    """The headers are not sent yet, so the client can read why."""
    daemon = start(env={"KEEPD_TEST_MEMORY": "1"})
    codes = set()
    for _ in range(1000):   # the allocation that fails comes later each time, other threads' counted, too
        daemon.process.send_signal(signal.SIGUSR1)
        try:
            codes.add(requests.get(daemon.url + "/metrics", timeout=60).status_code)
        except requests.RequestException:
            pass
        daemon.process.send_signal(signal.SIGUSR2)
        if codes == {200, 503}:
            break
    assert codes == {200, 503}
