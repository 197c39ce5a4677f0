"""Messages that clients send back: keepd's own answers, and every text that JSON can hold."""
import json

import pytest
from conftest import MODEL, chat_body

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}


def deep_schema(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def test_a_cut_thought_may_be_sent_back(start, fake):
    daemon = start(env={"KEEPD_FAKE_THINK": "2"})
    first = daemon.post(CHAT, chat_body("a long thought", max_tokens=4)).json()["choices"][0]
    assert first["finish_reason"] == "length" and first["message"]["content"] is None
    r = daemon.post(CHAT, {**chat_body(), "messages": [USER, first["message"], USER]})
    assert r.status_code == 200, r.text


@pytest.mark.parametrize("most", [50, 60])
def test_a_cut_call_may_be_sent_back(start, fake, most):
    daemon = start(env={"KEEPD_FAKE_TOOLS": "hermes"})
    call = '<tool_call>\n{"name": "now", "arguments": {"city": "Oslo, Norway"}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "now"}}]
    first = daemon.chat(call, max_tokens=most, tools=tools, temperature=0).json()["choices"][0]
    (made,) = first["message"]["tool_calls"]
    assert first["finish_reason"] == "length" and not made["function"]["arguments"].endswith("}")
    result = {"role": "tool", "tool_call_id": made["id"], "content": "cut"}
    r = daemon.chat(messages=[{"role": "user", "content": call}, first["message"], result, USER], tools=tools)
    assert r.status_code == 200, r.text


@pytest.mark.parametrize("message", [
    {"role": "assistant", "content": None, "refusal": "No."}, {"role": "assistant", "content": None},
    {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
    {"role": "assistant", "content": None, "reasoning_content": "hm"}, {"role": "tool", "tool_call_id": "1", "content": None}])
def test_null_content(shared, message):
    r = shared.chat(messages=[USER, message, USER])
    assert r.status_code == 200, r.text


def test_an_image_in_a_result(shared):
    """The image is left out with a note: the client could not take it back, and the dialogue would end."""
    call = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]}
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, {"type": "text", "text": "seen"},
             {"type": "input_audio", "input_audio": {}}, {"type": "of_next_year"}]
    text = ("[An image was left out: this server reads text only.]\nseen\n[A sound was left out: this server reads text only.]\n"
            "[A part was left out: this server reads text only.]")
    rendered = [shared.post("/apply-template", {"messages": [USER, call, {"role": "tool", "tool_call_id": "1", "content": content}]})
                for content in (parts, text)]
    assert rendered[0].status_code == 200 and rendered[0].json() == rendered[1].json()
    assert shared.chat(messages=[{"role": "user", "content": parts}]).status_code == 400


def test_nul_in_a_prompt_is_its_token(shared, fake):
    """For the fake, each byte is a token."""
    tokens = shared.post("/tokenize", {"prompt": "a\0b\0"}).json()
    assert tokens["tokens"] == [97, 0, 98, 0]
    assert shared.post("/detokenize", {"tokens": tokens["tokens"]}).json()["prompt"] == "a\0b\0"
    answer = shared.post(TEXT, {"model": MODEL, "prompt": "a\0b", "max_tokens": 4}).json()
    assert answer["usage"]["prompt_tokens"] == 3


def test_nul_in_a_chat(shared):
    """In a tool's result, in a role's name, and in fields that templates only echo."""
    messages = [USER, {"role": "assistant", "content": "\0", "x\0": "\0"}, {"role": "tool", "content": "a\0b"}, USER]
    text = shared.post("/apply-template", {"messages": messages}).json()["prompt"]
    assert text.count("\0") == 2 and "a\0b" in text
    assert shared.post(CHAT, {**chat_body(), "messages": messages, "user": "\0"}).status_code == 200
    text = shared.post("/apply-template", {"messages": [USER, {"role": "assistant", "content": "a\0b"}],
                                           "continue_final_message": True}).json()["prompt"]
    assert text.endswith("a\0b")


def test_an_answer_with_nul_is_continued(shared, fake):
    """The same text gives the same tokens, so no token is computed again."""
    body = chat_body("x\0y", max_tokens=8, cache_salt="nul")
    first = shared.post(CHAT, body).json()
    message = first["choices"][0]["message"]
    assert "\0" in message["content"]
    again = shared.post(CHAT, {**body, "messages": [*body["messages"], message, USER]}).json()["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"]


def test_nul_in_a_stop_string(shared, fake):
    answer = shared.chat("ab\0cd", max_tokens=16, stop=["\0"]).json()["choices"][0]
    assert answer["finish_reason"] == "stop" and answer["stop_reason"] == "\0" and "\0" not in answer["message"]["content"]


def test_salts_with_nul_are_different_salts(shared):
    """A salt in a query may contain %00, as in a body."""
    shared.chat("salted", max_tokens=2, cache_salt="s\0a")
    found = {salt: len(shared.get(f"/v1/conversations?cache_salt={salt}").json()["data"])
             for salt in ("s", "s%00", "s%00a", "s%00b")}
    assert found == {"s": 0, "s%00": 0, "s%00a": 1, "s%00b": 0}


def test_a_deep_schema_is_shown_to_the_model(shared):
    tool = {"type": "function", "function": {"name": "f", "parameters": deep_schema(60)}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    assert len(json.dumps(body)) < 8192
    r = shared.post("/apply-template", body)
    assert r.status_code == 200, r.text


def test_chat_fields_beside_a_prompt_have_their_types(shared):
    for field, value in (("continue_final_message", 1), ("add_generation_prompt", "yes"), ("reasoning_effort", 3),
                         ("chat_template_kwargs", []), ("tools", {})):
        r = shared.post("/tokenize", {"prompt": "a", field: value})
        assert (r.status_code, r.json().get("error", {}).get("param")) == (400, field), r.text


def test_only_the_described_empty_value(shared):
    for path, field, value in ((CHAT, "documents", {}), (CHAT, "bad_words", ""), (TEXT, "suffix", []),
                               (CHAT, "grammar", []), (CHAT, "repetition_penalty", 5e-324)):
        body = chat_body() if path == CHAT else {"prompt": "a"}
        r = shared.post(path, {**body, field: value})
        assert (r.status_code, r.json().get("error", {}).get("param")) == (400, field), r.text
