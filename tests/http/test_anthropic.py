"""POST /v1/messages and its count_tokens: Anthropic's form on the wire. (The fake answers with the last user message.)"""
import json

import pytest
import requests
from conftest import MODEL, chat_body, named_events, request_bytes

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOOLS = [{"name": "get_weather", "description": "The weather of a place",
          "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
         {"type": "custom", "name": "now", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def body(content="hello", **fields):
    return {"model": MODEL, "max_tokens": 400, "temperature": 0, "messages": [{"role": "user", "content": content}],
            **fields}


def ask(daemon, content="hello", **fields):
    r = daemon.post(PATH, body(content, **fields))
    assert r.status_code == 200, r.text
    return r.json()


def stream(daemon, content="hello", **fields):
    r = requests.post(daemon.url + PATH, json={**body(content, **fields), "stream": True}, stream=True, timeout=60)
    assert r.status_code == 200, r.text
    data = named_events(r)
    return [e for e in data if e["type"] != "ping"]


def refused(daemon, param, code, fields, path=PATH):
    r = daemon.post(path, {k: v for k, v in {**body(), **fields}.items() if v != "absent"})
    assert r.status_code == 400, r.text
    answer = r.json()
    assert set(answer) == {"type", "error", "request_id"} and answer["type"] == "error"
    error = answer["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code), error
    assert answer["request_id"] == r.headers["x-request-id"]


# --- answers ---

def test_text(shared):
    answer = ask(shared, system="Repeat.", metadata={"user_id": "u"})
    assert answer.pop("id").startswith("msg_")
    usage = answer.pop("usage")
    assert answer == {"type": "message", "role": "assistant", "model": MODEL, "stop_reason": "end_turn",
                      "stop_sequence": None, "content": [{"type": "text", "text": "hello", "citations": None}]}
    assert usage["output_tokens"] == 6 and usage["cache_creation_input_tokens"] == 0


@pytest.mark.parametrize("fields,reason,stopped,text", [
    ({"max_tokens": 3}, "max_tokens", None, "hel"), ({"stop_sequences": ["x", "l"]}, "stop_sequence", "l", "he")])
def test_stop_reasons(shared, fields, reason, stopped, text):
    answer = ask(shared, **fields)
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, stopped)
    assert answer["content"][0]["text"] == text


def test_the_prompt_is_that_of_a_chat(shared):
    """Blocks of one turn are one message, results are one each."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    chat = [{"role": "system", "content": "Be\nbrief."}, {"role": "user", "content": "first\nsecond"},
            {"role": "assistant", "content": "well", "reasoning_content": "hm", "tool_calls": [call, call]},
            {"role": "tool", "tool_call_id": "c1", "content": "cold"}, {"role": "tool", "tool_call_id": "c1", "content": ""},
            {"role": "user", "content": "and now"}]
    use = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""},
                                          {"type": "redacted_thinking", "data": "x"},
                                          {"type": "text", "text": "well"}, use, use]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "cold"}]},
            {"type": "tool_result", "tool_use_id": "c1", "is_error": True}, {"type": "text", "text": "and now"}]}]
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief.", "cache_control": {"type": "ephemeral"}}]
    expected = shared.post("/v1/chat/completions", chat_body(messages=chat)).json()["usage"]["prompt_tokens"]
    usage = ask(shared, messages=messages, system=system)["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == expected
    counted = shared.post(COUNT, {"messages": messages, "system": system}).json()
    assert counted == {"input_tokens": expected}


def test_blocks_of_one_message_are_one_message(shared):
    """Templates that want the roles in turns see one answer, whatever the order of its blocks."""
    user = {"role": "user", "content": "first"}
    last = {"role": "user", "content": "the same prompt"}
    blocks = [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "a"},
              {"type": "text", "text": "b"}, {"type": "thinking", "thinking": "so", "signature": ""},
              {"type": "text", "text": "c"}]
    answer = {"role": "assistant", "content": "a\nb\nc", "reasoning_content": "hm\nso"}
    chat = shared.post("/v1/chat/completions", {"messages": [user, answer, last], "temperature": 0, "max_tokens": 40}).json()
    whole = shared.post(PATH, {**body(), "messages": [user, {"role": "assistant", "content": blocks}, last]}).json()
    usage = whole["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]


def test_the_next_turn_pays_for_what_is_new(shared):
    first = ask(shared, "My name is Nora.")
    used = first["usage"]
    more = [{"role": "user", "content": "My name is Nora."}, {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": "And yours?"}]
    second = ask(shared, messages=more)["usage"]
    assert second["cache_read_input_tokens"] >= used["input_tokens"] + used["output_tokens"] - 1


def test_prefill(shared):
    """A last message of the assistant is continued."""
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hel"}]
    whole = shared.post(COUNT, {"messages": messages}).json()["input_tokens"]
    closed = shared.post(COUNT, {"messages": [*messages, {"role": "user", "content": ""}]}).json()["input_tokens"]
    assert whole < closed
    assert ask(shared, messages=messages)["type"] == "message"


def test_calls_and_thoughts(caller):
    answer = ask(caller, f"\x01hm\x02Look: {CALL}\n{CALL}", tools=TOOLS)
    thought, text, *calls = answer["content"]
    assert answer["usage"]["output_tokens_details"] == {"thinking_tokens": 2}
    assert thought == {"type": "thinking", "thinking": "hm", "signature": ""} and text["text"] == "Look: "
    assert [(c["type"], c["name"], c["input"]) for c in calls] == [("tool_use", "get_weather", {"city": "Oslo"})] * 2
    assert len({c["id"] for c in calls}) == 2 and answer["stop_reason"] == "tool_use"
    one = ask(caller, f"{CALL}\n{CALL}", tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [c["type"] for c in one["content"]] == ["tool_use"]
    none = ask(caller, CALL, tools=TOOLS, tool_choice={"type": "none"})
    assert [c["type"] for c in none["content"]] == ["text"]
    cut = ask(caller, CALL, tools=TOOLS, max_tokens=60)
    assert cut["stop_reason"] == "max_tokens" and list(cut["content"][0]["input"]) == ["INVALID_JSON"]


# --- streams ---

@pytest.mark.parametrize("content,fields", [
    ("hello", {}), ("hello", {"max_tokens": 2}), ("", {}), ("caf\u00e9 \U0001f642", {}), ("hello", {"stop_sequences": ["l"]}),
    ("\x01thinking\x02said", {}), ("\x01never ends", {}), (CALL, {"tools": TOOLS}),
    (f"\x01hm\x02 Look {CALL}\n{CALL} there", {"tools": TOOLS}), (CALL, {"tools": TOOLS, "max_tokens": 60}),
    ('<tool_call>\n{"name": "now"}\n</tool_call>', {"tools": TOOLS})], ids=repr)
def test_streamed_or_not_is_the_same(caller, content, fields):
    data = stream(caller, content, **fields)
    start, *middle, last, stop = data
    assert start["type"] == "message_start" and stop == {"type": "message_stop"} and last["type"] == "message_delta"
    blocks = []
    for e in middle:
        if e["type"] == "content_block_start":
            assert e["index"] == len(blocks)
            blocks.append({**e["content_block"], "json": "", "open": True})
            continue
        block = blocks[e["index"]]
        assert e["index"] == len(blocks) - 1 and block["open"]
        if e["type"] == "content_block_stop":
            block["open"] = False
            continue
        delta = e["delta"]
        kind = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}[block["type"]]
        if delta["type"] == "signature_delta":
            assert block["type"] == "thinking" and delta["signature"] == ""
        elif delta["type"] == kind == "input_json_delta":
            block["json"] += delta["partial_json"]
        else:
            assert delta["type"] == kind
            block[block["type"]] += delta[block["type"]]
    assert not any(b.pop("open") for b in blocks)
    for b in blocks:
        raw = b.pop("json")
        if b["type"] == "tool_use":
            b["input"] = {"INVALID_JSON": raw} if "max_tokens" in fields else json.loads(raw)
    whole = ask(caller, content, **fields)
    assert strip(blocks) == strip(whole["content"])
    assert last["delta"] == {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert start["message"]["content"] == [] and start["message"]["stop_reason"] is None
    seen = start["message"]["usage"]
    assert seen["input_tokens"] + seen["cache_read_input_tokens"] == \
        last["usage"]["input_tokens"] + last["usage"]["cache_read_input_tokens"]


def strip(blocks):
    return [{k: v for k, v in b.items() if k != "id"} for b in blocks]


def test_ping(slow):
    """A silent stream is kept alive by events that Anthropic's clients know."""
    daemon = slow("--drain-seconds", "0", step_us=20000, prefill=1000000, first=50, ping=50)
    r = requests.post(daemon.url + PATH, json=body(stream=True), stream=True, timeout=60)
    lines = r.iter_lines()
    assert [next(lines) for _ in range(6)] == [b"event: ping", b'data: {"type":"ping"}', b""] * 2
    r.close()


def test_a_failure_before_and_in_a_stream(shared, fake):
    r = shared.post(PATH, body("fail now", stream=True))
    assert r.status_code == 500 and r.json()["error"]["type"] == "api_error"
    assert stream(shared, "fail later")[-1]["error"]["type"] == "api_error"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves(slow, streamed):
    daemon = slow(step_us=10000)
    sock = daemon.socket()
    sock.sendall(request_bytes(PATH, body("x", stream=streamed, ignore_eos=True, max_tokens=900)))
    daemon.wait("tokens", lambda: (daemon.kv()["running"] or [{}])[0].get("completion_tokens", 0) > 2)
    sock.close()
    daemon.wait("the abort", lambda: daemon.finished("abort") == 1)
    daemon.wait_idle()
    assert daemon.kv()["pool"]["pages_used"] == 0


# --- requests of agents ---

def tokens(daemon, messages, **fields):
    return daemon.post(COUNT, {"messages": messages, **fields}).json()["input_tokens"]


@pytest.mark.parametrize("fields", [
    {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}, {"type": "of_next_year"}]}},
    {"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, {"container": "x"}, {"speed": "fast"},
    {"diagnostics": {"previous_message_id": None}}, {"fallbacks": "default"}, {"thinking": {"type": "adaptive", "display": "omitted"}},
    {"tools": [{"type": "web_search_20250305", "name": "web_search"}, {"type": "bash_20250124", "name": "bash"}]},
    {"output_config": {"effort": "max", "task_budget": {"type": "tokens", "total": 9}}}, {"of_next_year": [1]}], ids=str)
def test_fields_that_change_nothing(caller, fields):
    headers = {"anthropic-beta": "context-management-2025-06-27,of-next-year", "anthropic-version": "2023-06-01"}
    r = caller.post(PATH + "?beta=true", body(**fields), headers=headers)
    assert r.status_code == 200 and r.json()["content"][0]["text"] == "hello", r.text
    counted = {k: v for k, v in body(**fields).items() if k not in ("max_tokens", "temperature")}
    assert caller.post(COUNT + "?beta=true", counted, headers=headers).status_code == 200


def calls(count, text="x" * 50, **first):
    """A dialogue with calls, each answered by `text`; `first`: of the calls by number, their texts."""
    messages = [{"role": "user", "content": "go"}]
    for i in range(count):
        messages += [{"role": "assistant", "content": [{"type": "tool_use", "id": f"toolu_{i}", "name": ("read", "write")[i % 2], "input": {"n": i}}]},
                     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"toolu_{i}", "content": first.get(f"t{i}", text)}]}]
    return [*messages, {"role": "user", "content": "hello"}]


LEFT_OUT = "[This result was left out to save context.]"


@pytest.mark.parametrize("fields, gone", [
    ({}, []), ({"trigger": {"type": "tool_uses", "value": 3}, "keep": {"type": "tool_uses", "value": 1}}, [0, 1, 2]),
    ({"trigger": {"type": "tool_uses", "value": 4}, "keep": {"type": "tool_uses", "value": 1}}, []),
    ({"trigger": {"type": "tool_uses", "value": 3}}, [0]), ({"trigger": {"type": "input_tokens", "value": 100}}, [0]),
    ({"trigger": {"type": "input_tokens", "value": 100}, "keep": {"type": "tool_uses", "value": 4}}, []),
    ({"trigger": {"type": "tool_uses", "value": 3}, "keep": {"type": "tool_uses", "value": 0}, "exclude_tools": ["read"]}, [1, 3]),
    ({"trigger": {"type": "tool_uses", "value": 3}, "clear_at_least": {"type": "input_tokens", "value": 52}}, [0]),
    ({"trigger": {"type": "tool_uses", "value": 3}, "clear_at_least": {"type": "input_tokens", "value": 53}}, [])], ids=str)
def test_old_results_are_left_out(caller, fields, gone):
    """(The fake has a token for each byte, also for the quotes of a result.)"""
    edits = {"context_management": {"edits": [{"type": "clear_tool_uses_20250919", **fields}]}, "tools": TOOLS}
    expected = tokens(caller, calls(4, **{f"t{i}": LEFT_OUT for i in gone}), tools=TOOLS)
    count = caller.post(COUNT, {"messages": calls(4), **edits}).json()
    assert count == {"input_tokens": expected, "context_management": {"original_input_tokens": expected + 52 * len(gone)}}
    applied = [{"type": "clear_tool_uses_20250919", "cleared_tool_uses": len(gone), "cleared_input_tokens": 52 * len(gone)}] if gone else []
    answer = ask(caller, messages=calls(4), **edits)
    assert answer["content"][0]["text"] == "hello" and answer["context_management"] == {"applied_edits": applied}
    assert answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"] == expected
    delta = [e for e in stream(caller, messages=calls(4), **edits) if e["type"] == "message_delta"]
    assert [d["context_management"] for d in delta] == [{"applied_edits": applied}]


def test_old_arguments_are_left_out(caller):
    trigger = {"trigger": {"type": "tool_uses", "value": 1}, "keep": {"type": "tool_uses", "value": 1}}
    bare = calls(3, t0=LEFT_OUT, t1=LEFT_OUT)
    bare[1]["content"][0]["input"] = {}
    one = tokens(caller, bare)
    bare[3]["content"][0]["input"] = {}
    for inputs, expected in ((["read"], one), (True, tokens(caller, bare))):
        edit = {"type": "clear_tool_uses_20250919", **trigger, "clear_tool_inputs": inputs}
        assert tokens(caller, calls(3), context_management={"edits": [edit]}) == expected


def test_old_thoughts_are_left_out(caller):
    def chat(*thoughts):
        return [m for thought in thoughts for m in (
            {"role": "user", "content": "why?"},
            {"role": "assistant", "content": [*([{"type": "thinking", "thinking": thought, "signature": ""}] if thought else []),
                                              {"type": "text", "text": "so"}]})] + [{"role": "user", "content": "hello"}]

    def edited(**keep):
        fields = {"context_management": {"edits": [{"type": "clear_thinking_20251015", **keep}, {"type": "of_next_year"}]}}
        answer = ask(caller, messages=chat("a long thought", "another", "the last"), **fields)
        applied = answer["context_management"]["applied_edits"]
        return [e["cleared_thinking_turns"] for e in applied], answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"]

    assert edited(keep="all") == ([], tokens(caller, chat("a long thought", "another", "the last")))
    assert edited() == ([2], tokens(caller, chat("", "", "the last")))
    assert edited(keep={"type": "thinking_turns", "value": 2}) == ([1], tokens(caller, chat("", "another", "the last")))
    assert edited(keep={"type": "thinking_turns", "value": 3}) == ([], tokens(caller, chat("a long thought", "another", "the last")))


def test_messages_of_the_system(shared):
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"},
                {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "f"}}]}, {"role": "assistant", "content": "d"},
                {"role": "system", "content": "e", "clear_at": "never"}, {"role": "user", "content": "hello"}]
    chat = [messages[0], {"role": "system", "content": "b\nc"}, messages[2], {"role": "system", "content": "e"}, messages[4]]
    expected = shared.post("/v1/chat/completions", chat_body(messages=chat)).json()["usage"]["prompt_tokens"]
    assert tokens(shared, messages) == expected
    assert ask(shared, messages=messages)["content"][0]["text"] == "hello"


def test_a_message_of_the_system_for_one_turn(shared):
    note = {"role": "system", "content": "a long note", "clear_at": "next_user_message"}
    one, two = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    assert tokens(shared, [one, note, two]) == tokens(shared, [one, two])
    assert tokens(shared, [one, two, note]) > tokens(shared, [one, two])


def test_max_tokens_beyond_the_context(start, fake):
    """The answer is as long as the context allows, and says that it was cut."""
    daemon = start("--max-model-len", "200")
    answer = ask(daemon, max_tokens=32000, ignore_eos=True)
    used = answer["usage"]
    assert answer["stop_reason"] == "max_tokens" and used["input_tokens"] + used["output_tokens"] == 200
    assert ask(daemon, max_tokens=32000)["stop_reason"] == "end_turn"


@pytest.mark.parametrize("more", [0, 200])
def test_a_prompt_beyond_the_context(start, fake, more):
    """Anthropic's clients know it by the words, and make their dialogue shorter."""
    daemon = start("--max-model-len", "200")
    count = daemon.post(COUNT, {"messages": [{"role": "user", "content": "x" * 10}]}).json()["input_tokens"] - 10
    text = "x" * (200 - count + more)
    for streamed in (False, True):
        r = daemon.post(PATH, body(text, stream=streamed))
        error = r.json()["error"]
        assert (r.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["message"] == f"prompt is too long: {count + len(text)} tokens > 200 maximum"


def test_images_and_others_in_results(shared):
    parts = [{"type": "text", "text": "a"}, {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
             {"type": "document", "source": {"type": "url", "url": "http://x"}}, {"type": "of_next_year"}]
    text = ("a\n[An image was left out: this server reads text only.]\n[A file was left out: this server reads text only.]\n"
            "[A part was left out: this server reads text only.]")
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look"}]}
    prompts = [[{"role": "user", "content": "q"}, use, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "c1", "content": content}]}] for content in (parts, text)]
    assert tokens(shared, prompts[0]) == tokens(shared, prompts[1])


def test_documents_of_text(shared):
    blocks = [{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "one"}},
              {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "two"}]}},
              {"type": "search_result", "source": "x", "title": "y", "content": [{"type": "text", "text": "three"}]}]
    assert tokens(shared, [{"role": "user", "content": blocks}]) == tokens(shared, [{"role": "user", "content": "one\ntwo\nthree"}])


def test_blocks_of_other_servers_are_left_out(shared):
    blocks = [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, {"type": "redacted_thinking", "data": "x"},
              {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}, {"type": "text", "text": "b"}]
    user, last = {"role": "user", "content": "a"}, {"role": "user", "content": "c"}
    assert tokens(shared, [user, {"role": "assistant", "content": blocks}, last]) == \
        tokens(shared, [user, {"role": "assistant", "content": "b"}, last])


def test_a_call_that_was_cut_is_accepted(caller):
    """The arguments are those that the model wrote, so the next turn continues them."""
    cut = ask(caller, CALL, tools=TOOLS, max_tokens=60)
    user = {"role": "user", "content": CALL}
    more = [user, {"role": "assistant", "content": cut["content"]}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": cut["content"][0]["id"], "content": "cut", "is_error": True}, {"type": "text", "text": "hello"}]}]
    assert ask(caller, messages=more, tools=TOOLS)["content"][0]["text"] == "hello"
    raw = cut["content"][0]["input"]["INVALID_JSON"]
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": raw}}
    chat = [user, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "cut"},
            {"role": "user", "content": "hello"}]
    assert tokens(caller, more, tools=TOOLS) == \
        caller.post("/v1/chat/completions", chat_body(messages=chat)).json()["usage"]["prompt_tokens"]


def test_deferred_tools(caller):
    """A tool that is deferred may be called once the result of a search has named it, and is shown there."""
    tools = [TOOLS[0], {**TOOLS[1], "defer_loading": True, "description": "The time"}, {"name": "never", "defer_loading": True}]
    late = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert ask(caller, late, tools=tools)["content"][0]["type"] == "text"
    found = [{"role": "user", "content": "q"}, {"role": "assistant", "content": [
        {"type": "tool_use", "id": "c1", "name": "ToolSearch", "input": {"query": "now"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [
            {"type": "tool_reference", "tool_name": "now"}, {"type": "tool_reference", "tool_name": "now"}]}]},
        {"role": "user", "content": late}]
    answer = ask(caller, messages=found, tools=tools)
    assert [(b["type"], b["name"]) for b in answer["content"]] == [("tool_use", "now")]
    text = ('This tool can be called from now on: {"type": "function", "function": {"name": "now", "description": "The time", '
            '"parameters": {"type":"object"}}}\nThe tool now can be called.')
    plain = [*found[:2], {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": text}]}, found[3]]
    assert tokens(caller, found, tools=tools) == tokens(caller, plain, tools=tools)


def test_models(shared):
    """The list of models is one for Anthropic's clients, too."""
    models = shared.get("/v1/models").json()
    first = models["data"][0]
    assert (models["has_more"], models["first_id"], models["last_id"]) == (False, MODEL, "alias")
    assert first["type"] == "model" and first["display_name"] == first["id"] and first["created_at"].endswith("Z")


# --- refusals ---

IN = "messages[0].content[0]"


def user(*blocks, role="user"):
    return {"messages": [{"role": role, "content": list(blocks)}]}


@pytest.mark.parametrize("param,code,fields", [
    ("max_tokens", "missing_required_parameter", {"max_tokens": "absent"}),
    ("max_tokens", "missing_required_parameter", {"max_tokens": None}),
    ("max_tokens", "invalid_value", {"max_tokens": 0}),
    ("messages", "missing_required_parameter", {"messages": "absent"}),
    ("messages", "invalid_value", {"messages": []}),
    ("messages", "invalid_value", {"messages": "x"}),
    ("messages", "invalid_value", {"messages": [{"role": "user", "content": "x"}] * 4097}),
    ("messages[0]", "invalid_value", {"messages": ["x"]}),
    ("messages[0].role", "missing_required_parameter", {"messages": [{"content": "x"}]}),
    ("messages[0].role", "invalid_value", {"messages": [{"role": "tool", "content": "x"}]}),
    ("messages[0].content[0].type", "unsupported_parameter",
     {"messages": [{"role": "system", "content": [{"type": "image"}]}]}),
    ("messages[0].content", "missing_required_parameter", {"messages": [{"role": "user"}]}),
    ("messages[0].content", "invalid_value", {"messages": [{"role": "user", "content": 5}]}),
    (IN, "invalid_value", user("x")),
    (IN + ".type", "missing_required_parameter", user({})),
    (IN + ".type", "unsupported_parameter", user({"type": "image", "source": {}})),
    (IN + ".type", "unsupported_parameter", user({"type": "document", "source": {}})),
    (IN + ".type", "unsupported_parameter", user({"type": "tool_use", "id": "x", "name": "f", "input": {}})),
    (IN + ".text", "missing_required_parameter", user({"type": "text"})),
    (IN + ".tool_use_id", "missing_required_parameter", user({"type": "tool_result"})),
    (IN + ".content[0].text", "missing_required_parameter",
     user({"type": "tool_result", "tool_use_id": "x", "content": [{"type": "text"}]})),
    (IN + ".input", "invalid_value", user({"type": "tool_use", "id": "x", "name": "f", "input": "{}"}, role="assistant")),
    (IN + ".id", "missing_required_parameter", user({"type": "tool_use", "name": "f", "input": {}}, role="assistant")),
    (IN + ".thinking", "missing_required_parameter", user({"type": "thinking"}, role="assistant")),
    ("system", "invalid_value", {"system": 5}),
    ("system[0].type", "unsupported_parameter", {"system": [{"type": "image"}]}),
    ("tools", "invalid_value", {"tools": {}}),
    ("tools[0].type", "invalid_value", {"tools": [{"type": 5}]}),
    ("tools[1].name", "invalid_value", {"tools": [{"type": "web_search_20250305", "name": "web_search"}, {"name": "a b"}]}),
    ("tool_choice", "invalid_value", {"tools": [{"type": "web_search_20250305"}], "tool_choice": {"type": "any"}}),
    ("tools[0].name", "missing_required_parameter", {"tools": [{"input_schema": {}}]}),
    ("tools[0].name", "invalid_value", {"tools": [{"name": "a b"}]}),
    ("tools[0].input_schema", "invalid_value", {"tools": [{"name": "f", "input_schema": []}]}),
    ("tool_choice", "invalid_value", {"tools": TOOLS, "tool_choice": "auto"}),
    ("tool_choice", "invalid_value", {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "unknown"}}),
    ("tool_choice.type", "invalid_value", {"tools": TOOLS, "tool_choice": {"type": "required"}}),
    ("tool_choice.name", "missing_required_parameter", {"tools": TOOLS, "tool_choice": {"type": "tool"}}),
    ("tool_choice.disable_parallel_tool_use", "invalid_value",
     {"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}),
    ("thinking", "invalid_value", {"thinking": True}),
    ("thinking.type", "invalid_value", {"thinking": {"type": True}}),
    ("thinking.type", "missing_required_parameter", {"thinking": {}}),
    ("output_config", "invalid_value", {"output_config": "x"}),
    ("output_config.format.type", "unsupported_parameter", {"output_config": {"format": {"type": "text"}}}),
    ("output_config.format.schema", "missing_required_parameter", {"output_config": {"format": {"type": "json_schema"}}}),
    ("output_config.format.schema.properties.a.$ref", "unsupported_parameter",
     {"output_config": {"format": {"type": "json_schema", "schema": {"properties": {"a": {"$ref": "http://a/b"}}}}}}),
    ("metadata", "invalid_value", {"metadata": "x"}),
    ("metadata.user_id", "invalid_value", {"metadata": {"user_id": 5}}),
    ("stop_sequences[0]", "invalid_value", {"stop_sequences": [5]}),
    ("stop_sequences", "invalid_value", {"stop_sequences": ["x"] * 257}),
    ("temperature", "invalid_value", {"temperature": -1}),
    ("kv.budget", "invalid_value", {"kv": {"budget": 0}}),
    *[(name, "unsupported_parameter", {name: value}) for name, value in {
        "compaction": {"type": "summarize"}, "thread": {"type": "create"}, "n": 2, "stop": "x", "logprobs": True,
        "response_format": {"type": "text"}, "prompt_logprobs": 1, "return_token_ids": True, "timings": True,
        "verbose": True}.items()],
], ids=lambda v: v if isinstance(v, str) else "")
def test_refusals(caller, param, code, fields):
    refused(caller, param, code, fields)


@pytest.mark.parametrize("param,code,fields", [
    ("messages", "missing_required_parameter", {"messages": "absent"}), ("tools[0].name", "invalid_value", {"tools": [{"name": "a b"}]}),
    (IN + ".type", "unsupported_parameter", user({"type": "image", "source": {}}))])
def test_refusals_of_counts(shared, param, code, fields):
    refused(shared, param, code, fields, path=COUNT)


def test_errors_before_the_body(start):
    daemon = start("--api-key", "k", "--max-body-bytes", "10000")
    key = {"x-api-key": "k", "anthropic-version": "2023-06-01"}
    expected = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 415: "invalid_request_error"}
    got = [daemon.post(PATH, body()), daemon.post(PATH, body(model="gpt-5"), headers=key),
           daemon.post(PATH, body("x" * 20000), headers=key),
           daemon.http.post(daemon.url + PATH, data="x", headers={**key, "Content-Type": "text/plain"}, timeout=60)]
    assert {r.status_code: r.json()["error"]["type"] for r in got} == expected
    assert all(r.json()["type"] == "error" for r in got)
    assert daemon.post(PATH, body(), headers=key).status_code == 200


def test_a_tool_in_the_form_of_chats(caller):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    r = caller.post(PATH, body(tools=[tool]))
    assert r.status_code == 400 and "tools[0].type" in r.text and "input_schema" in r.text
