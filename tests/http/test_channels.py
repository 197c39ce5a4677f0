"""Answers in channels (Harmony, gpt-oss). The fake turns the bytes 1 to 7 of its answer into the format's special tokens;
its prompts end with <|start|>assistant."""
import json

import pytest
import requests
from conftest import chat_body, events, faked

CHAT = "/v1/chat/completions"
START, CHANNEL, MESSAGE, END, CONSTRAIN, CALL, RETURN = map(chr, range(1, 8))
FINAL = f"{START}assistant{CHANNEL}final{MESSAGE}"
THOUGHT = f"{CHANNEL}analysis{MESSAGE}"
TO_F = f"{CHANNEL}commentary to=functions.f {CONSTRAIN}json{MESSAGE}"
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "get_weather")]


@pytest.fixture(scope="module")
def daemon():
    yield from faked(CHANNELS="1", TOOLS="harmony")


def whole(daemon, body):
    choice = daemon.post(CHAT, body).json()["choices"][0]
    message = choice["message"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
    return message.get("reasoning_content"), message["content"], calls, choice["finish_reason"]


def streamed(daemon, body):
    r = requests.post(daemon.url + CHAT, json={**body, "stream": True}, stream=True, timeout=60)
    reasoning, content, calls, finish = "", "", [], None
    for event in events(r)[:-1]:
        for choice in json.loads(event)["choices"]:
            delta = choice["delta"]
            reasoning += delta.get("reasoning_content", "")
            content += delta.get("content") or ""
            finish = choice["finish_reason"] or finish
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"]["arguments"]
    return reasoning or None, content, [tuple(c) for c in calls], finish


def check(daemon, text, reasoning, content, calls=(), finish="stop", **fields):
    body = chat_body(text, **{"max_tokens": 200, **fields})
    told = whole(daemon, body)
    assert told == (reasoning, content, list(calls), finish)
    assert streamed(daemon, body) == (reasoning, content or "", list(calls), finish)


PLAIN = [
    (THOUGHT + "hm, é" + END + FINAL + "yes" + RETURN, "hm, é", "yes"),
    (f"{CHANNEL}final{MESSAGE}at once" + RETURN, None, "at once"),
    (THOUGHT + "one" + END + START + "assistant" + THOUGHT + " two" + END + FINAL + "three" + RETURN, "one two", "three"),
    (f"{CHANNEL}commentary{MESSAGE}I will look. " + END + FINAL + "done" + RETURN, None, "I will look. done"),
    (THOUGHT + "nothing more" + RETURN, "nothing more", None),
    (f"{MESSAGE}no channel" + RETURN, None, "no channel"),
    (f"{CHANNEL}analysis_more{MESSAGE}x" + RETURN, None, "x"),
    (THOUGHT + "a" + END + CHANNEL + "final" + MESSAGE + "b" + RETURN, "a", "b"),
]


@pytest.mark.parametrize("text,reasoning,content", PLAIN, ids=range(len(PLAIN)))
def test_channels(daemon, text, reasoning, content):
    check(daemon, text, reasoning, content)


CALLS = [
    (THOUGHT + "hm" + END + START + "assistant" + TO_F + '{"a": 1}' + CALL, "hm", None, [("f", '{"a": 1}')], "tool_calls"),
    (f" to=functions.get_weather{CHANNEL}commentary {CONSTRAIN}json{MESSAGE}" + '{"b":"é"}' + CALL, None, None,
     [("get_weather", '{"b":"é"}')], "tool_calls"),
    (f"{CHANNEL}commentary{MESSAGE}Look: " + END + START + "assistant" + TO_F + "{}" + CALL, None, "Look: ", [("f", "{}")],
     "tool_calls"),
    (TO_F + CALL, None, None, [("f", "{}")], "tool_calls"),
    (TO_F + '{"a": 1}' + END + START + "assistant" + TO_F + '{"a": 2}' + CALL, None, None,
     [("f", '{"a": 1}'), ("f", '{"a": 2}')], "tool_calls"),
    (f"{CHANNEL}analysis to=functions.f{MESSAGE}" + "not json" + CALL, None, None, [("f", "not json")], "tool_calls"),
    (f"{CHANNEL}commentary to=functions.other {CONSTRAIN}json{MESSAGE}" + "{}" + CALL, None, "{}", [], "stop"),
    (f"{CHANNEL}commentary to=functions.ff{MESSAGE}" + "{}" + CALL, None, "{}", [], "stop"),
]


@pytest.mark.parametrize("text,reasoning,content,calls,finish", CALLS, ids=range(len(CALLS)))
def test_calls(daemon, text, reasoning, content, calls, finish):
    check(daemon, text, reasoning, content, calls, finish, tools=TOOLS)


def test_calls_after_the_first_are_left_out(daemon):
    text = TO_F + '{"a": 1}' + END + START + "assistant" + TO_F + '{"a": 2}' + CALL
    check(daemon, text, None, None, [("f", '{"a": 1}')], "tool_calls", tools=TOOLS, parallel_tool_calls=False)


def test_without_tools_a_call_is_text(daemon):
    check(daemon, TO_F + '{"a": 1}' + CALL, None, '{"a": 1}')


def test_a_cut_call(daemon):
    """The header has 41 tokens, with those that mark its parts; the fake's first token is the answer's first byte."""
    text = TO_F + '{"a": 1}' + CALL
    check(daemon, text, None, None, [("f", '{"a"')], "length", tools=TOOLS, max_tokens=len(TO_F) + 4)
    check(daemon, text, None, "", [], "length", tools=TOOLS, max_tokens=len(TO_F) - 1)


def test_reasoning_is_counted_and_hidden(daemon):
    text = THOUGHT + "four" + END + FINAL + "yes" + RETURN
    answer = daemon.chat(text, max_tokens=200).json()
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4
    check(daemon, text, None, "yes", include_reasoning=False)
    assert daemon.get("/server_info").json()["splits_reasoning"] is True
    assert daemon.get("/server_info").json()["tool_call_parser"] == "harmony"


def test_a_long_header_is_no_call(daemon):
    check(daemon, f"{CHANNEL}commentary {'x' * 320} to=functions.f{MESSAGE}" + "{}" + CALL, None, "{}", tools=TOOLS,
          max_tokens=400)


def test_promised_calls_are_objects(daemon):
    """A constrained answer has no channels. (The fake writes what it is asked to.)"""
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        check(daemon, '{"name": "f", "parameters": {"a": 1}}', None, None, [("f", '{"a": 1}')], "tool_calls", tools=TOOLS, tool_choice=choice)
    refused = [{"type": "function", "function": {"name": "f", "parameters": {"unevaluatedItems": False}}}]
    r = daemon.chat("x", tools=refused, tool_choice="required")
    assert r.status_code == 400 and r.json()["error"]["param"] == "tools[0].function.parameters.unevaluatedItems"


def test_constrained_answers_have_no_headers(daemon):
    answer = daemon.chat('{"a": 1}', response_format={"type": "json_object"}, max_tokens=200).json()
    assert answer["choices"][0]["message"]["content"] == '{"a": 1}'


def test_server_returns_reasoning_unchanged(start, fake):
    daemon = start("--reasoning-parser", "none", env={"KEEPD_FAKE_CHANNELS": "1", "KEEPD_FAKE_TOOLS": "harmony"})
    assert whole(daemon, chat_body(THOUGHT + "hm" + END + FINAL + "yes" + RETURN, max_tokens=200))[:2] == (
        None, "analysishmassistantfinalyes")
    assert whole(daemon, chat_body(THOUGHT + "hm" + END + START + "assistant" + TO_F + "{}" + CALL, max_tokens=200, tools=TOOLS)) == (
        None, "hm", [("f", "{}")], "tool_calls")
