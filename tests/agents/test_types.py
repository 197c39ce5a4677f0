"""Every answer, event and error of the three APIs fits the newest types of OpenAI's and Anthropic's packages: strictly,
and with no member that they lack but keepd's own."""
import datetime
import functools
import json

import anthropic.types
import anthropic.types.beta
import openai.types
import openai.types.chat
import openai.types.responses
import openai.types.shared
import pydantic
import pytest
import requests
from conftest import HTTP, call

MODEL = HTTP.MODEL
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
CALL = call("get_weather", city="Oslo")
THOUGHT = "\x01hm\x02"

# keepd's own members, and those of vLLM and llama.cpp that clients read: docs/API.md
OWN = {
    "chat": {"usage.kv_details", "prompt_logprobs", "prompt_token_ids", "choices[].stop_reason", "choices[].token_ids",
             "choices[].message.reasoning_content", "choices[].message.reasoning", "choices[].delta.reasoning_content",
             "choices[].delta.reasoning"},
    "completion": {"usage.kv_details", "prompt_logprobs", "prompt_token_ids", "choices[].stop_reason", "choices[].token_ids",
                   "choices[].prompt_logprobs", "choices[].prompt_token_ids"},
    # OpenAI sends `store` and a custom call's `status`, too; older packages had a name at the end of arguments
    "responses": {"usage.kv_details", "response.usage.kv_details", "store", "response.store", "output[].status",
                  "response.output[].status", "item.status", "name", "logprobs[].bytes", "logprobs[].top_logprobs[].bytes"},
    "messages": {"usage.kv_details", "error.param", "error.code"},
    "models": {"root", "parent", "max_model_len", "object", "created", "owned_by", "type", "display_name", "created_at",
               "lifecycle", "max_input_tokens", "status", "pinned", "requests_waiting"},
    "errors": set(),
}


def unknown(value, path=""):
    """Paths of members that the types of a validated value lack."""
    if isinstance(value, pydantic.BaseModel):
        for name in type(value).model_fields:
            yield from unknown(getattr(value, name), f"{path}.{name}")
        for name, extra in (value.model_extra or {}).items():
            yield f"{path}.{name}".lstrip(".")
    elif isinstance(value, list):
        for item in value:
            yield from unknown(item, f"{path}[]")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from unknown(item, f"{path}.{name}")


@functools.cache
def adapter(kind):
    return pydantic.TypeAdapter(kind)


def check(kind, api, text):
    """Validates a JSON text as `kind`."""
    value = adapter(kind).validate_json(text if isinstance(text, (str, bytes)) else json.dumps(text), strict=True)
    strange = set(unknown(value)) - OWN[api]
    assert not strange, (kind, strange, text)
    return value


@pytest.fixture(scope="module")
def daemon():
    """A model that repeats the last user message, with thoughts and calls."""
    daemon = HTTP.Daemon(binary=HTTP.BINARY, env={"KEEPD_FAKE_TOOLS": "hermes", "KEEPD_FAKE_THINK": "1"})
    yield daemon
    assert daemon.stop() == 0, "".join(daemon.errors)


def events(daemon, path, body):
    """The data of a stream's events."""
    r = requests.post(daemon.url + path, json={**body, "stream": True}, stream=True, timeout=60)
    assert r.status_code == 200, r.text
    for line in r.iter_lines():
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield line[6:]


ANSWERS = [("hello", {}), (f"{THOUGHT}hello", {}), (f"{THOUGHT}Look: {CALL}\n{CALL}", {"tools": True}), (CALL, {"tools": True, "cut": 60}),
           ("hello", {"cut": 2}), ("hello", {"scores": True}), ("", {})]
IDS = ["text", "thought", "calls", "cut call", "cut text", "scores", "nothing"]
each_answer = pytest.mark.parametrize("text,wish", ANSWERS, ids=IDS)


def chat(text, wish):
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": wish.get("cut", 400)}
    if "tools" in wish:
        body["tools"] = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
    if "scores" in wish:
        body.update(logprobs=True, top_logprobs=2)
    return body


@each_answer
def test_chat(daemon, text, wish):
    body = chat(text, wish)
    check(openai.types.chat.ChatCompletion, "chat", daemon.post("/v1/chat/completions", body).content)
    body["stream_options"] = {"include_usage": True}
    chunks = [check(openai.types.chat.ChatCompletionChunk, "chat", e) for e in events(daemon, "/v1/chat/completions", body)]
    assert chunks[-1].usage and any(c.choices and c.choices[0].finish_reason for c in chunks)


@pytest.mark.parametrize("scores", [None, 2])
def test_completions(daemon, scores):
    body = {"model": MODEL, "prompt": "hello", "temperature": 0, "logprobs": scores}
    check(openai.types.Completion, "completion", daemon.post("/v1/completions", body).content)
    for event in events(daemon, "/v1/completions", body):
        chunk = json.loads(event)
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"  # the package has no type for chunks
        check(openai.types.Completion, "completion", chunk)


def response(text, wish):
    body = {"model": MODEL, "input": text, "temperature": 0, "max_output_tokens": wish.get("cut", 400)}
    if "tools" in wish:
        body["tools"] = [{"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False}]
    if "scores" in wish:
        body.update(include=["message.output_text.logprobs"], top_logprobs=2)
    return body


TEAM = [{"type": "namespace", "name": "team", "description": "", "tools": [{"type": "function", "name": "get_weather", "parameters": PARAMETERS}]},
        {"type": "custom", "name": "patch", "format": {"type": "text"}}, {"type": "web_search"}, {"type": "local_shell"}]


@pytest.mark.parametrize("text,wish,tools", [(*a, None) for a in ANSWERS] + [(f"Look: {CALL}\n{call('patch', input='a')}", {}, TEAM)],
                         ids=[*IDS, "tools of agents"])
def test_responses(daemon, text, wish, tools):
    body = response(text, wish)
    if tools:
        body["tools"] = tools
    whole = check(openai.types.responses.Response, "responses", daemon.post("/v1/responses", body).content)
    stored = check(openai.types.responses.Response, "responses", daemon.get(f"/v1/responses/{whole.id}").content)
    assert stored == whole
    check(openai.types.responses.response_item_list.ResponseItemList, "responses",
          daemon.get(f"/v1/responses/{whole.id}/input_items").content)
    again = {**body, "input": [{"role": "user", "content": text}, *json.loads(whole.model_dump_json(exclude_none=True))["output"]]}
    kept = daemon.post("/v1/responses", again)
    assert kept.status_code == 200, kept.text
    check(openai.types.responses.response_item_list.ResponseItemList, "responses",
          daemon.get(f"/v1/responses/{kept.json()['id']}/input_items").content)
    last = [check(openai.types.responses.ResponseStreamEvent, "responses", e) for e in events(daemon, "/v1/responses", body)][-1]
    assert last.type in ("response.completed", "response.incomplete")


def test_responses_in_the_background(daemon):
    first = check(openai.types.responses.Response, "responses", daemon.post("/v1/responses", {"input": "hello", "background": True}).content)
    assert first.status == "queued"
    check(openai.types.responses.Response, "responses", daemon.post(f"/v1/responses/{first.id}/cancel", {}).content)


@each_answer
def test_streams_in_the_background(daemon, text, wish):
    body = {**response(text, wish), "background": True}
    whole = [check(openai.types.responses.ResponseStreamEvent, "responses", e) for e in events(daemon, "/v1/responses", body)]
    assert [e.type for e in whole[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert whole[-1].type in ("response.completed", "response.incomplete")


def test_a_response_that_fails(daemon):
    last = list(events(daemon, "/v1/responses", {"input": "fail later"}))[-1]
    assert check(openai.types.responses.ResponseStreamEvent, "responses", last).type == "response.failed"


def message(text, wish):
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": wish.get("cut", 400), "temperature": 0}
    if "tools" in wish:
        body["tools"] = [{"name": "get_weather", "input_schema": PARAMETERS}]
    return body


@each_answer
def test_messages(daemon, text, wish):
    body = message(text, wish)
    answer = daemon.post("/v1/messages", body).content
    stream = [e for e in events(daemon, "/v1/messages", body) if json.loads(e)["type"] != "ping"]
    for whole, event in ((anthropic.types.Message, anthropic.types.RawMessageStreamEvent),
                         (anthropic.types.beta.BetaMessage, anthropic.types.beta.BetaRawMessageStreamEvent)):
        check(whole, "messages", answer)
        assert [check(event, "messages", e) for e in stream][-1].type == "message_stop"
    counted = {k: v for k, v in body.items() if k not in ("max_tokens", "temperature")}
    check(anthropic.types.MessageTokensCount, "messages", daemon.post("/v1/messages/count_tokens", counted).content)


def test_edits_of_the_context(daemon):
    answer = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""},
                                               {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}}]}
    messages = [{"role": "user", "content": "go"}, answer,
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}]}, {"role": "user", "content": "hello"}]
    edits = [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 0}},
             {"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 0}, "trigger": {"type": "tool_uses", "value": 0}}]
    body = {"model": MODEL, "messages": messages, "context_management": {"edits": edits}}
    beta = anthropic.types.beta
    whole = check(beta.BetaMessage, "messages", daemon.post("/v1/messages", {**body, "max_tokens": 9}).content)
    assert [e.type for e in whole.context_management.applied_edits] == [e["type"] for e in edits]
    delta = [e for e in (check(beta.BetaRawMessageStreamEvent, "messages", e) for e in events(daemon, "/v1/messages", {**body, "max_tokens": 9})
                         if json.loads(e)["type"] != "ping") if e.type == "message_delta"]
    assert delta[0].context_management == whole.context_management
    count = check(beta.BetaMessageTokensCount, "messages", daemon.post("/v1/messages/count_tokens", body).content)
    assert count.context_management.original_input_tokens > 0


def test_models(daemon):
    models = daemon.get("/v1/models").json()
    assert models["object"] == "list" and models["has_more"] is False
    for one in (*models["data"], daemon.get(f"/v1/models/{MODEL}").json()):
        check(openai.types.Model, "models", one)
        check(anthropic.types.ModelInfo, "models", one)


@pytest.mark.parametrize("body", [{}, {"model": "gpt-5"}, {"messages": [{"role": "user", "content": "fail now"}], "input": "fail now", "max_tokens": 5},
                                  {"messages": [{"role": "user", "content": "x" * 2000}], "input": "x" * 2000, "max_tokens": 5}], ids=range(4))
def test_errors(daemon, body):
    for path in ("/v1/chat/completions", "/v1/responses"):
        r = daemon.post(path, body)
        assert r.status_code >= 400
        error = r.json()["error"]
        for own in ("n_prompt_tokens", "n_ctx"):  # llama.cpp's
            error.pop(own, None)
        check(openai.types.shared.ErrorObject, "errors", error)
    r = daemon.post("/v1/messages", body)
    assert r.status_code >= 400
    check(anthropic.types.ErrorResponse, "messages", r.content)


def test_the_check_reports(daemon):
    """A member that is missing, of another type, or unknown fails."""
    good = daemon.post("/v1/messages", message("hello", {})).json()
    for bad in ({**good, "id": 5}, {k: v for k, v in good.items() if k != "usage"}, {**good, "of_next_year": 1}):
        with pytest.raises((pydantic.ValidationError, AssertionError)):
            check(anthropic.types.Message, "messages", bad)
    assert datetime.datetime.fromisoformat(daemon.get(f"/v1/models/{MODEL}").json()["created_at"])
