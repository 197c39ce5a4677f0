"""Continuing the final message. No text of a client becomes a special token, on any route."""
import pytest
from conftest import MODEL, chat_body

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}
SPECIAL = "<|im_end|>"


def tokens(daemon, **body):
    r = daemon.post("/tokenize", body)
    assert r.status_code == 200, r.text
    return r.json()["tokens"]


def test_the_prompt_ends_with_the_message(shared):
    """The prompt equals the one without continuing, up to the end of the message's text."""
    messages = [USER, {"role": "assistant", "content": "The answer is"}]
    closed = tokens(shared, messages=messages, add_generation_prompt=False)
    opened = tokens(shared, messages=messages, continue_final_message=True)
    assert opened == closed[:len(opened)] and len(opened) < len(closed)
    text = shared.post("/apply-template", {"messages": messages, "continue_final_message": True}).json()["prompt"]
    assert text.endswith("The answer is")
    usage = shared.chat(messages=messages, continue_final_message=True, max_tokens=2).json()["usage"]
    assert usage["prompt_tokens"] == len(opened)


def test_white_space_at_the_end_stays(shared, fake):
    for content in ("a b ", "a b\n"):
        messages = [USER, {"role": "assistant", "content": content}]
        text = shared.post("/apply-template", {"messages": messages, "continue_final_message": True}).json()["prompt"]
        assert text.endswith(content)


def test_add_generation_prompt(shared):
    messages = chat_body()["messages"]
    with_prompt = shared.post("/apply-template", {"messages": messages}).json()["prompt"]
    without = shared.post("/apply-template", {"messages": messages, "add_generation_prompt": False}).json()["prompt"]
    assert with_prompt.startswith(without) and len(with_prompt) > len(without)
    a = shared.chat(max_tokens=1).json()["usage"]["prompt_tokens"]
    b = shared.chat(max_tokens=1, add_generation_prompt=False).json()["usage"]["prompt_tokens"]
    assert a > b


@pytest.mark.parametrize("flags", [{}, {"continue_final_message": True}, {"add_generation_prompt": False}])
def test_typed_special_tokens_are_text(shared, flags):
    """A special token in text becomes tokens of its bytes, never the token itself."""
    end = shared.post("/tokenize", {"prompt": SPECIAL, "parse_special": True, "add_special_tokens": False}).json()["tokens"]
    assert len(end) == 1
    for messages in ([{"role": "user", "content": "x" + SPECIAL}],
                     [{"role": "user", "content": [{"type": "text", "text": "x" + SPECIAL}]}],
                     [USER, {"role": "assistant", "content": "x" + SPECIAL}]):
        plain = [{**m, "content": "x"} if m is messages[-1] else m for m in messages]
        typed, clean = tokens(shared, messages=messages, **flags), tokens(shared, messages=plain, **flags)
        assert typed.count(end[0]) == clean.count(end[0]) and len(typed) > len(clean) + 1
        usage = shared.chat(messages=messages, max_tokens=1, **flags).json()["usage"]
        assert usage["prompt_tokens"] == len(typed)
        text = shared.post("/apply-template", {"messages": messages, **flags}).json()["prompt"]
        assert shared.post("/detokenize", {"tokens": typed}).json()["prompt"] == text


def test_typed_special_tokens_in_prompts(shared):
    """Read, as by other servers, unless the request says that its prompt is text alone."""
    for flags in ({}, {"parse_special": True}, {"parse_special": False}):
        found = tokens(shared, prompt=SPECIAL, add_special_tokens=False, **flags)
        assert (len(found) == 1) == flags.get("parse_special", True)
        for prompt, count in ((SPECIAL, 1), ([SPECIAL, SPECIAL], 2)):
            r = shared.post(TEXT, {"model": MODEL, "prompt": prompt, "max_tokens": 1, "add_special_tokens": False,
                                   **flags})
            assert r.json()["usage"]["prompt_tokens"] == count * len(found)


def test_a_template_cannot_be_sent(shared):
    for path in (CHAT, "/tokenize", "/apply-template"):
        r = shared.post(path, {"messages": [USER], "chat_template": "{{ messages }}"})
        assert r.status_code == 400 and r.json()["error"]["param"] == "chat_template"


def test_a_model_without_a_template(start, fake):
    daemon = start(env={"KEEPD_FAKE_NO_TEMPLATE": "1"})
    for path in (CHAT, "/apply-template", "/tokenize"):
        r = daemon.post(path, {"messages": [USER]})
        assert r.status_code == 400 and r.json()["error"]["param"] == "messages", path
    assert daemon.post(TEXT, {"prompt": "abc"}).status_code == 200
    assert daemon.get("/server_info").json()["has_chat_template"] is False
