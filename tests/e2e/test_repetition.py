"""repetition_detection on the bundled model: a loop ends an answer, named in finish_reason; what is a loop:
tests/unit/engine/test_loops.c."""
import json

import requests

BODY = {"model": "keepd-nano", "prompt": "A line", "max_tokens": 64, "temperature": 0, "ignore_eos": True,
        "logit_bias": {"65": 100}, "return_token_ids": True}  # one token, again and again
RULE = {"min_pattern_size": 2, "max_pattern_size": 8, "min_count": 5}


def ask(d, path="/v1/completions", **fields):
    r = requests.post(d.url + path, json=BODY | fields, timeout=300)
    assert r.status_code == 200, r.text
    return r.json()


def test_a_loop_ends_an_answer(daemon):
    d = daemon()
    whole = ask(d)["choices"][0]
    assert whole["finish_reason"] == "length" and len(set(whole["token_ids"])) == 1
    cut = ask(d, repetition_detection=RULE)["choices"][0]
    assert cut["finish_reason"] == "repetition" and cut["stop_reason"] is None
    assert cut["token_ids"] == whole["token_ids"][:10]  # 5 times 2 tokens
    assert ask(d, repetition_detection=RULE | {"min_count": 40})["choices"][0] == whole  # 80 tokens are not there
    assert ask(d, repetition_detection={"max_pattern_size": 0})["choices"][0] == whole
    assert ask(d, repetition_detection=RULE, speculate="off")["choices"][0]["token_ids"] == cut["token_ids"]
    assert ask(d, repetition_detection=RULE, n=2)["choices"][1]["finish_reason"] == "repetition"


def test_a_loop_ends_a_constrained_answer(daemon):
    d = daemon()
    text = ask(d, max_tokens=1)["choices"][0]["text"]
    again = {"guided_regex": f"({text})*"}
    assert ask(d, **again)["choices"][0]["finish_reason"] == "length"
    cut = ask(d, **again, repetition_detection=RULE)["choices"][0]
    assert cut["finish_reason"] == "repetition" and len(cut["token_ids"]) == 10
    assert len(ask(d, **again, repetition_detection=RULE, min_tokens=20)["choices"][0]["token_ids"]) == 20
    whole = ask(d, guided_regex=f"({text}){{10}}", repetition_detection=RULE)["choices"][0]
    assert whole["finish_reason"] == "stop" and len(whole["token_ids"]) == 10


def test_streams_and_other_forms_name_it(daemon):
    d = daemon()
    r = requests.post(f"{d.url}/v1/completions", json=BODY | {"stream": True, "repetition_detection": RULE}, timeout=300)
    events = [json.loads(line[6:]) for line in r.text.splitlines() if line.startswith("data: {")]
    assert events[-1]["choices"][0]["finish_reason"] == "repetition"
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert ask(d, "/v1/chat/completions", **chat, repetition_detection=RULE)["choices"][0]["finish_reason"] == "repetition"
    native = ask(d, "/completion", repetition_detection=RULE)
    assert native["stop_type"] == "limit" and not native["truncated"] and native["tokens_predicted"] == 10
    own = {k: BODY[k] for k in ("model", "temperature", "ignore_eos", "logit_bias")} | {"repetition_detection": RULE}

    def other(path, **fields):
        answer = requests.post(d.url + path, json=own | fields, timeout=300)
        assert answer.status_code == 200, answer.text
        return answer.json()
    assert other("/v1/messages", **chat, max_tokens=64)["stop_reason"] == "max_tokens"
    response = other("/v1/responses", input="hi", max_output_tokens=64)
    assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "repetition"}
    assert other("/api/chat", **chat, stream=False)["done_reason"] == "repetition"


def test_the_server_may_ask_for_it(daemon):
    d = daemon("--repetition-count", "3")
    assert len(ask(d)["choices"][0]["token_ids"]) == 24  # blocks have at least 8 tokens
    assert ask(d, repetition_detection={"max_pattern_size": 0})["choices"][0]["finish_reason"] == "length"
    assert len(ask(d, repetition_detection=RULE)["choices"][0]["token_ids"]) == 10
    text = requests.get(f"{d.url}/metrics", timeout=60).text
    assert 'reason="repetition"' in text
