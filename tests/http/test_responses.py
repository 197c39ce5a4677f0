"""POST /v1/responses and what it stores: OpenAI's Responses API on the wire. (The fake answers with the last user
message.)"""
import json

import pytest
import requests
from conftest import MODEL, named_events, request_bytes

PATH = "/v1/responses"
TOOLS = [{"type": "function", "name": "get_weather", "description": "The weather of a place",
          "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
         {"type": "function", "name": "now"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def body(text="hello", **fields):
    return {"model": MODEL, "input": text, "temperature": 0, "max_output_tokens": 400, **fields}


def ask(daemon, text="hello", **fields):
    r = daemon.post(PATH, body(text, **fields))
    assert r.status_code == 200, r.text
    return r.json()


def stream(daemon, text="hello", **fields):
    """The events of a stream; each has its type as its name, and its number."""
    r = requests.post(daemon.url + PATH, json={**body(text, **fields), "stream": True}, stream=True, timeout=60)
    assert r.status_code == 200, r.text
    data = named_events(r)
    assert [e["sequence_number"] for e in data] == list(range(len(data)))
    return data


def without_ids(value):
    """An answer without what differs from request to request."""
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "call_id", "created_at", "usage")}
    return [without_ids(v) for v in value] if isinstance(value, list) else value


def refused(daemon, status, param, code, fields):
    r = daemon.post(PATH, {**body(), **fields})
    error = r.json()["error"]
    assert (r.status_code, error["param"], error["code"]) == (status, param, code), r.text
    assert error["message"] and error["type"] == "invalid_request_error"
    return error["message"]


# --- answers ---

def test_text(shared):
    answer = ask(shared, metadata={"a": "b"}, instructions="Repeat.", user="me")
    assert (answer["object"], answer["status"], answer["error"], answer["incomplete_details"]) == \
        ("response", "completed", None, None)
    assert answer["id"].startswith("resp_") and answer["model"] == MODEL
    (item,) = answer["output"]
    assert item["id"].startswith("msg_")
    assert without_ids(item) == {"type": "message", "status": "completed", "role": "assistant", "content": [
        {"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}]}
    assert (answer["metadata"], answer["instructions"], answer["user"], answer["max_output_tokens"]) == \
        ({"a": "b"}, "Repeat.", "me", 400)
    usage = answer["usage"]
    assert usage["output_tokens"] == 6 and usage["total_tokens"] == usage["input_tokens"] + 6
    assert usage["kv_details"]["seen_tokens"] == usage["total_tokens"]


@pytest.mark.parametrize("items", [
    [{"role": "user", "content": "hello"}],
    [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
    [{"role": "system", "content": "s"}, {"role": "developer", "content": "d"}, {"role": "user", "content": "a"},
     {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
      "content": [{"type": "output_text", "text": "b", "annotations": []}]},
     {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
     {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
     {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "cold"}]},
     {"type": "function_call_output", "call_id": "c1", "output": "colder"},
     {"type": "reasoning", "summary": []}, {"role": "assistant", "content": "so"}, {"role": "user", "content": "hello"}]], ids=["short", "typed", "all types"])
def test_items(shared, items):
    assert ask(shared, items)["output"][0]["content"][0]["text"] == "hello"


def test_the_prompt_is_that_of_a_chat(shared):
    """Items of one turn are one message."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "first"},
                {"role": "assistant", "content": "well", "reasoning_content": "hm", "tool_calls": [call, call]},
                {"role": "tool", "tool_call_id": "c1", "content": "cold"}, {"role": "assistant", "content": "so"},
                {"role": "user", "content": "the same prompt"}]
    items = [{"role": "user", "content": "first"},
             {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
             {"role": "assistant", "content": "well"},
             *[{"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{\"a\": 1}"}] * 2,
             {"type": "function_call_output", "call_id": "c1", "output": "cold"}, {"role": "assistant", "content": "so"},
             {"role": "user", "content": "the same prompt"}]
    chat = shared.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 40}).json()
    answer = ask(shared, items, instructions="Be brief.")
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    count = shared.post("/v1/responses/input_tokens", {"input": items, "instructions": "Be brief.", "tools": []})
    assert count.status_code == 200 and count.json() == {"object": "response.input_tokens", "input_tokens": answer["usage"]["input_tokens"]}
    messages += [{"role": "assistant", "content": "the same prompt"}, {"role": "user", "content": "more"}]
    more = shared.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 40}).json()
    assert more["usage"]["prompt_tokens_details"]["cached_tokens"] >= answer["usage"]["total_tokens"] - 1


def test_cut(shared):
    answer = ask(shared, "hello", max_output_tokens=3)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (answer["output"][0]["status"], answer["output"][0]["content"][0]["text"]) == ("incomplete", "hel")


def test_stop_and_scores(shared):
    answer = ask(shared, "one two", stop=" ", include=["message.output_text.logprobs"], top_logprobs=2)
    (part,) = answer["output"][0]["content"]
    assert answer["status"] == "completed" and part["text"] == "one"
    assert [s["token"] for s in part["logprobs"]] == ["o", "n", "e"]
    assert all(len(s["top_logprobs"]) == 2 for s in part["logprobs"])
    streamed = [s for e in stream(shared, "one two", stop=" ", include=["message.output_text.logprobs"], top_logprobs=2)
                if e["type"] == "response.output_text.delta" for s in e["logprobs"]]
    assert streamed == part["logprobs"]


def test_calls_and_thoughts(caller):
    answer = ask(caller, f"\x01hm\x02Look: {CALL}\n{CALL}", tools=TOOLS)
    kinds = [item["type"] for item in answer["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    thought, text, *calls = answer["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}] and thought["summary"] == []
    assert text["content"][0]["text"] == "Look: "
    for call in calls:
        assert (call["name"], json.loads(call["arguments"]), call["status"]) == \
            ("get_weather", {"city": "Oslo"}, "completed")
    assert calls[0]["call_id"] != calls[1]["call_id"] and len({i["id"] for i in answer["output"]}) == 4
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 2
    one = ask(caller, f"{CALL}\n{CALL}", tools=TOOLS, parallel_tool_calls=False)
    assert [item["type"] for item in one["output"]] == ["function_call"]
    none = ask(caller, CALL, tools=TOOLS, tool_choice="none")
    assert [item["type"] for item in none["output"]] == ["message"]


def test_the_largest_members_that_are_repeated(shared):
    fields = {"metadata": {str(i).rjust(64, "\u00e9"): "\u00e9" * 512 for i in range(16)},
              **{name: "u" * 512 for name in ("user", "safety_identifier", "prompt_cache_key")}}
    answer = ask(shared, **fields)
    assert {name: answer[name] for name in fields} == fields


def test_truncation_leaves_room_for_an_answer(shared, fake):
    """Without max_output_tokens, too."""
    length = shared.get("/server_info").json()["max_model_len"]
    usage = ask(shared, "x" * 3 * length, truncation="auto", max_output_tokens=None)["usage"]
    assert usage["input_tokens"] >= length // 2 and usage["output_tokens"] > 1


# --- streams ---

ITEM_EVENTS = {
    "message": ("content_part.added", "output_text.delta", "output_text.done", "content_part.done"),
    "reasoning": ("content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"),
    "function_call": (None, "function_call_arguments.delta", "function_call_arguments.done", None)}


def check_item(data, index):
    """The events of one item, taken from the front of `data`; returns the item."""
    def take(name):
        e = data.pop(0)
        assert (e["type"], e["output_index"]) == ("response." + name, index), e
        return e

    begun = take("output_item.added")["item"]
    before, delta, done, behind = ITEM_EVENTS[begun["type"]]
    assert begun["status"] == "in_progress" and not begun.get("content") and not begun.get("arguments")
    if before:
        part = take(before)
        assert part["part"]["text"] == "" and part["item_id"] == begun["id"] and part["content_index"] == 0
    text = ""
    while data[0]["type"] == "response." + delta:
        e = take(delta)
        assert e["item_id"] == begun["id"]
        text += e["delta"]
    whole = take(done)
    assert whole["text" if before else "arguments"] == text and whole["item_id"] == begun["id"]
    if behind:
        assert take(behind)["part"]["text"] == text
    item = take("output_item.done")["item"]
    assert item["id"] == begun["id"]
    assert (item["content"][0]["text"] if before else item["arguments"]) == text
    return item


@pytest.mark.parametrize("text,fields", [
    ("hello", {}), ("hello", {"max_output_tokens": 2}), ("", {}), ("  \n", {}), ("caf\u00e9 \U0001f642", {}),
    ("hello", {"stop": "l"}),
    ("\x01thinking\x02said", {}), ("\x01\n \n\x02\n\nsaid", {}), ("\x01never ends", {}),
    (CALL, {"tools": TOOLS}), (f"{CALL}\n{CALL}", {"tools": TOOLS}), (f"\x01hm\x02 Look {CALL} there", {"tools": TOOLS}),
    (CALL, {"tools": TOOLS, "max_output_tokens": 60}), (CALL[:30], {"tools": TOOLS}),
    ('<tool_call>\n{"name": "now"}\n</tool_call>', {"tools": TOOLS})], ids=repr)
def test_streamed_or_not_is_the_same(caller, text, fields):
    data = stream(caller, text, **fields)
    assert [e["type"] for e in data[:2]] == ["response.created", "response.in_progress"]
    first, last = data[0]["response"], data[-1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    rest, items = data[2:-1], []
    while rest:
        items.append(check_item(rest, len(items)))
    assert items == last["output"] and first["id"] == last["id"]
    assert data[-1]["type"] == "response." + last["status"]
    assert without_ids(last) == without_ids(ask(caller, text, **fields))


def test_progress_and_timings(shared):
    data = stream(shared, "hello", return_progress=True, timings=True)
    seen = [e["prompt_progress"] for e in data if "prompt_progress" in e]
    assert seen and all(p["total"] >= p["processed"] >= p["cache"] for p in seen)
    assert data[-1]["response"]["timings"]["predicted_n"] == 6


def test_a_failure_before_and_in_a_stream(shared, fake):
    r = shared.post(PATH, body("fail now", stream=True))
    assert r.status_code == 500 and "error" in r.json()
    data = stream(shared, "fail later")
    assert data[-1]["type"] == "response.failed"
    response = data[-1]["response"]
    assert response["status"] == "failed" and response["error"]["code"] == "server_error"
    assert shared.get(f"{PATH}/{response['id']}").status_code == 404, "what failed is not stored"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves(slow, streamed):
    daemon = slow(step_us=10000)
    sock = daemon.socket()
    sock.sendall(request_bytes(PATH, body("x", stream=streamed, ignore_eos=True, max_output_tokens=900)))
    daemon.wait("tokens", lambda: (daemon.kv()["running"] or [{}])[0].get("completion_tokens", 0) > 2)
    sock.close()
    daemon.wait("the abort", lambda: daemon.finished("abort") == 1)
    daemon.wait_idle()
    assert daemon.kv()["pool"]["pages_used"] == 0


# --- stored responses ---

def test_previous_response(shared):
    """Only what is new is computed, and the items of all turns are there."""
    first = ask(shared, "My name is Nora.")
    second = ask(shared, "And yours?", previous_response_id=first["id"])
    usage = second["usage"]
    assert second["previous_response_id"] == first["id"]
    count = shared.post("/v1/responses/input_tokens", {"input": "And yours?", "previous_response_id": first["id"]}).json()
    assert count["input_tokens"] == second["usage"]["input_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] >= first["usage"]["total_tokens"] - 1
    assert usage["input_tokens"] > first["usage"]["total_tokens"]
    third = ask(shared, [{"role": "user", "content": "Well?"}], previous_response_id=second["id"])
    items = shared.get(f"{PATH}/{third['id']}/input_items").json()["data"]
    texts = [i["content"] if isinstance(i["content"], str) else i["content"][0]["text"] for i in items]
    assert texts == ["My name is Nora.", "My name is Nora.", "And yours?", "And yours?", "Well?"]
    assert [i["role"] for i in items] == ["user", "assistant", "user", "assistant", "user"]
    assert all(i["id"] and i["type"] == "message" for i in items)
    other = ask(shared, "Or so?", previous_response_id=first["id"])
    assert other["usage"]["input_tokens"] == second["usage"]["input_tokens"] - len("And yours?") + len("Or so?")


def test_pages_of_items(shared):
    first = ask(shared, [{"role": "user", "content": f"number {i}"} for i in range(5)])
    path = f"{PATH}/{first['id']}/input_items"
    whole = shared.get(path).json()
    ids = [item["id"] for item in whole["data"]]
    assert len(set(ids)) == 5 and not whole["has_more"] and (whole["first_id"], whole["last_id"]) == (ids[0], ids[-1])
    for order, wanted in (("asc", ids), ("desc", ids[::-1])):
        seen, after = [], ""
        while True:
            page = shared.get(f"{path}?limit=2&order={order}{after}").json()
            seen += [item["id"] for item in page["data"]]
            if not page["has_more"]:
                break
            assert len(page["data"]) == 2 and page["last_id"] == seen[-1]
            after = f"&after={page['last_id']}"
        assert seen == wanted
    end = shared.get(f"{path}?after={ids[-1]}").json()
    assert (end["data"], end["first_id"], end["last_id"], end["has_more"]) == ([], None, None, False)
    for query, param in (("limit=0", "limit"), ("limit=101", "limit"), ("limit=1x", "limit"), ("order=up", "order"),
                         ("after=nothing", "after")):
        r = shared.get(f"{path}?{query}")
        assert (r.status_code, r.json()["error"]["param"]) == (400, param), r.text


def test_only_what_is_read_again_is_stored(shared):
    """Items are listed without what a client added to them, and reasoning without content is left out."""
    junk = {"extra": [[0]] * 1000, "encrypted_content": "x" * 10000}
    first = ask(shared, [{"role": "user", "content": "hello", **junk}, {"type": "reasoning", "summary": [], **junk},
                         {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "mine", **junk},
                         {"type": "function_call_output", "call_id": "c", "output": [{"type": "text", "text": "o", **junk}]}])
    second = ask(shared, "more", previous_response_id=first["id"])
    items = shared.get(f"{PATH}/{second['id']}/input_items").json()["data"]
    done = {"status": "completed"}
    answer = items.pop(3)
    assert answer["content"] == [{"type": "output_text", "text": first["output"][0]["content"][0]["text"], "annotations": []}]
    assert items == [
        {"id": "item_0", "type": "message", **done, "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"id": "mine", "type": "function_call", **done, "call_id": "c", "name": "f", "arguments": "{}"},
        {"id": "item_2", "type": "function_call_output", **done, "call_id": "c", "output": [{"type": "input_text", "text": "o"}]},
        {"id": "item_4", "type": "message", **done, "role": "user", "content": [{"type": "input_text", "text": "more"}]}]


def test_instructions_are_those_of_the_request(shared):
    first = ask(shared, "hello", instructions="Be brief.")
    again = ask(shared, "more", previous_response_id=first["id"])
    assert again["instructions"] is None
    plain = ask(shared, [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello"},
                         {"role": "user", "content": "more"}])
    assert again["usage"]["input_tokens"] == plain["usage"]["input_tokens"]


@pytest.mark.parametrize("streamed", [False, True])
def test_get_and_delete(shared, streamed):
    answer = stream(shared, "keep me")[-1]["response"] if streamed else ask(shared, "keep me")
    path = f"{PATH}/{answer['id']}"
    assert shared.get(path).json() == answer and shared.get(path[3:]).json() == answer
    assert shared.http.delete(shared.url + path, timeout=60).json() == \
        {"id": answer["id"], "object": "response", "deleted": True}
    for r in (shared.get(path), shared.get(path + "/input_items"), shared.http.delete(shared.url + path, timeout=60)):
        assert (r.status_code, r.json()["error"]["code"]) == (404, "response_not_found")
    message = refused(shared, 400, "previous_response_id", "previous_response_not_found",
                      {"previous_response_id": answer["id"]})
    assert answer["id"] in message


def test_store_false(shared):
    answer = ask(shared, store=False)
    assert answer["store"] is False and shared.get(f"{PATH}/{answer['id']}").status_code == 404
    refused(shared, 400, "previous_response_id", "previous_response_not_found", {"previous_response_id": answer["id"]})


def test_owners(start):
    """Neither another key nor another salt finds a response."""
    daemon = start("--api-key", "a", "--api-key", "b")
    key = lambda name: {"Authorization": f"Bearer {name}"}
    answer = daemon.post(PATH, body(cache_salt="s\u0000t"), headers=key("a")).json()
    path = f"{PATH}/{answer['id']}"
    assert daemon.get(path, headers=key("a"), params={"cache_salt": "s\u0000t"}).json() == answer
    for name, salt in (("b", "s\u0000t"), ("a", ""), ("a", "s")):
        params = {"cache_salt": salt}
        assert daemon.get(path, headers=key(name), params=params).status_code == 404
        assert daemon.http.delete(daemon.url + path, headers=key(name), params=params, timeout=60).status_code == 404
        fields = {"previous_response_id": answer["id"], "cache_salt": salt}
        assert daemon.post(PATH, body(**fields), headers=key(name)).status_code == 400
    assert daemon.get(path).status_code == 401


# --- tools of agents ---

NAMESPACE = {"type": "namespace", "name": "team", "description": "Helpers", "tools": [
    {"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {"task": {"type": "string"}}}},
    {"type": "function", "name": "now"}, {"type": "web_search"}]}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Changes files.",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}
HOSTED = [{"type": "web_search", "external_web_access": True}, {"type": "local_shell"}, {"type": "mcp", "server_label": "x"},
          {"type": "of_next_year"}]
AGENT = [*TOOLS, NAMESPACE, *HOSTED, PATCH]


def said(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize("text,expected", [
    (said("spawn", task="dig"), {"type": "function_call", "name": "spawn", "namespace": "team", "arguments": '{"task": "dig"}'}),
    (said("now"), {"type": "function_call", "name": "now", "arguments": "{}"}),
    (said("team__now"), {"type": "function_call", "name": "now", "namespace": "team", "arguments": "{}"}),
    (said("apply_patch", input='*** Begin\n"caf\u00e9"'), {"type": "custom_tool_call", "name": "apply_patch", "input": '*** Begin\n"caf\u00e9"'}),
    (said("apply_patch", text="other"), {"type": "custom_tool_call", "name": "apply_patch", "input": '{"text": "other"}'})])
def test_tools_of_agents(caller, text, expected):
    """Functions of namespaces and custom tools are called; tools that keepd does not run are left out, and repeated."""
    answer = ask(caller, text, tools=AGENT)
    (item,) = answer["output"]
    assert without_ids(item) == {**expected, "status": "completed"} and answer["tools"] == AGENT
    events = stream(caller, text, tools=AGENT)
    assert without_ids(events[-1]["response"]["output"]) == [without_ids(item)]
    kind = "custom_tool_call_input" if item["type"] == "custom_tool_call" else "function_call_arguments"
    value = item.get("input", item.get("arguments"))
    assert "".join(e["delta"] for e in events if e["type"] == f"response.{kind}.delta") == value
    (done,) = [e for e in events if e["type"] == f"response.{kind}.done"]
    assert done["input" if "input" in item else "arguments"] == value
    result = {"type": item["type"] + "_output", "call_id": item["call_id"], "output": "done"}
    plain = ask(caller, [{"role": "user", "content": text}, item, result, {"role": "user", "content": "thanks"}], tools=AGENT)
    assert plain["output"][0]["content"][0]["text"] == "thanks"
    kept = ask(caller, [result, {"role": "user", "content": "thanks"}], tools=AGENT, previous_response_id=answer["id"])
    assert kept["usage"]["input_tokens"] == plain["usage"]["input_tokens"]
    listed = caller.get(f"{PATH}/{kept['id']}/input_items").json()["data"]
    assert without_ids(listed)[1] == without_ids(item)


@pytest.mark.parametrize("most", range(70, 96))
def test_a_custom_call_that_was_cut(caller, most):
    """Wherever it ends, its input is what the model wrote, and the next turn accepts it."""
    text = said("apply_patch", input='a\n\u00e9\U0001f642"b" and so on')
    answer = ask(caller, text, tools=[PATCH], max_output_tokens=most)
    assert answer["status"] == "incomplete"
    (item,) = answer["output"]
    assert 'a\n\u00e9\U0001f642"b" and so on'.startswith(item["input"]) or most < 72
    events = stream(caller, text, tools=[PATCH], max_output_tokens=most)
    assert without_ids(events[-1]["response"]["output"]) == [without_ids(item)]
    ask(caller, [{"role": "user", "content": text}, item, {"role": "user", "content": "go on"}], tools=[PATCH])


@pytest.mark.parametrize("most", [50, 60, 70])
def test_a_call_that_was_cut(caller, most):
    """Sent back by its items or by the response's id, with the same prompt."""
    cut = ask(caller, CALL, tools=TOOLS, max_output_tokens=most)
    (item,) = cut["output"]
    assert (cut["status"], item["type"], item["status"]) == ("incomplete", "function_call", "incomplete")
    rest = [{"type": "function_call_output", "call_id": item["call_id"], "output": "cut"}, {"role": "user", "content": "hello"}]
    sent = ask(caller, [{"role": "user", "content": CALL}, item, *rest], tools=TOOLS)
    kept = ask(caller, rest, tools=TOOLS, previous_response_id=cut["id"])
    assert sent["usage"]["input_tokens"] == kept["usage"]["input_tokens"]
    assert sent["output"][0]["content"][0]["text"] == kept["output"][0]["content"][0]["text"] == "hello"


def test_choice_of_a_custom_tool(caller):
    for choice in ({"type": "custom", "name": "apply_patch"}, {"type": "function", "namespace": "team", "name": "now"}):
        assert ask(caller, "x", tools=AGENT, tool_choice=choice)["tool_choice"] == choice


def test_tools_that_are_left_out_are_noted_once(start):
    daemon = start(env={"KEEPD_FAKE_TOOLS": "hermes"})
    for _ in range(3):
        ask(daemon, tools=[{"type": "web_search"}, {"type": "code_interpreter"}])
    notes = [line for line in daemon.errors if "left out" in line]
    assert len(notes) == 2 and "'web_search'" in notes[0] and "'code_interpreter'" in notes[1]


def test_items_of_other_servers_are_left_out(shared):
    items = [{"role": "user", "content": "a"}, {"type": "web_search_call", "id": "ws_1", "status": "completed"},
             {"type": "compaction", "encrypted_content": "x"}, {"role": "user", "content": "hello"}]
    answer = ask(shared, items)
    assert answer["usage"]["input_tokens"] == ask(shared, [items[0], items[3]])["usage"]["input_tokens"]
    assert len(shared.get(f"{PATH}/{answer['id']}/input_items").json()["data"]) == 2


def test_an_image_in_a_result(shared):
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": None}
    items = [{"role": "user", "content": "a"}, call,
             {"type": "function_call_output", "call_id": "c1", "output": [image, {"type": "input_text", "text": "seen"}]},
             {"role": "user", "content": "hello"}]
    answer = ask(shared, items)
    text = {**items[2], "output": "[An image was left out: this server reads text only.]\nseen"}
    assert answer["usage"]["input_tokens"] == ask(shared, [*items[:2], text, items[3]])["usage"]["input_tokens"]
    more = ask(shared, "more", previous_response_id=answer["id"])
    assert more["usage"]["input_tokens_details"]["cached_tokens"] >= answer["usage"]["total_tokens"] - 1


def test_item_reference(caller):
    """A stored item is found by its id: one of an answer, or one that the client sent."""
    user = {"role": "user", "content": said("now"), "id": "mine_1"}
    (call,) = ask(caller, [user], tools=TOOLS)["output"]
    rest = [{"type": "function_call_output", "call_id": call["call_id"], "output": "noon"}, {"role": "user", "content": "thanks"}]
    whole = ask(caller, [user, call, *rest], tools=TOOLS)
    named = ask(caller, [{"type": "item_reference", "id": "mine_1"}, {"id": call["id"]}, *rest], tools=TOOLS)
    assert named["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    listed = caller.get(f"{PATH}/{named['id']}/input_items").json()["data"]
    assert without_ids(listed) == without_ids(caller.get(f"{PATH}/{whole['id']}/input_items").json()["data"])
    for body in ({"input": [{"type": "item_reference", "id": call["id"]}, *rest], "cache_salt": "other"},
                 {"input": [{"type": "item_reference", "id": call["id"][:-1]}, *rest]},
                 {"input": [{"type": "item_reference", "id": 'x","type":"message'}, *rest]}):
        r = caller.post(PATH, body)
        assert (r.status_code, r.json()["error"]["param"], r.json()["error"]["code"]) == (404, "input[0].id", "item_not_found")


def test_usage_counts_written_entries(shared):
    assert ask(shared)["usage"]["input_tokens_details"]["cache_write_tokens"] == 0


@pytest.mark.parametrize("fields", [
    {"client_metadata": {"a": "b"}}, {"context_management": [{"type": "compaction", "compact_threshold": 1000}]},
    {"text": {"verbosity": "low"}}, {"include": ["web_search_call.action.sources"]}, {"reasoning": {"summary": "auto"}},
    {"background_options": {"completion_window": "soonest"}}, {"of_next_year": [1]}], ids=str)
def test_fields_that_change_nothing(shared, fields):
    r = shared.post(PATH, {**body(), **fields})
    assert r.status_code == 200, r.text
    assert without_ids(r.json()["output"]) == without_ids(ask(shared)["output"])


# --- refusals ---

PART = "input[0].content[0]"


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize("param,code,fields", [
    ("input", "missing_required_parameter", {"input": None}),
    ("input", "invalid_value", {"input": []}),
    ("input", "invalid_value", {"input": {"role": "user"}}),
    ("input", "invalid_value", {"input": [{"role": "user", "content": "x"}] * 4097}),
    ("input[0]", "invalid_value", {"input": ["x"]}),
    ("input[0].role", "missing_required_parameter", {"input": [{"content": "x"}]}),
    ("input[0].role", "invalid_value", {"input": [{"role": "tool", "content": "x"}]}),
    ("input[0].content", "missing_required_parameter", {"input": [{"role": "user"}]}),
    ("input[0].content", "invalid_value", {"input": [{"role": "user", "content": 5}]}),
    ("input[0].id", "missing_required_parameter", {"input": [{"type": "item_reference"}]}),
    ("input[0].call_id", "invalid_value",
     {"input": [{"type": "function_call", "call_id": "c" * 513, "name": "f", "arguments": "{}"}]}),
    ("input[0].type", "unsupported_parameter", {"input": [{"type": "additional_tools", "tools": []}]}),
    ("input", "invalid_value", {"input": [{"type": "web_search_call", "id": "x"}]}),
    ("input[0].input", "missing_required_parameter", {"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}),
    ("input[0].namespace", "invalid_value",
     {"input": [{"type": "function_call", "call_id": "c", "name": "f", "namespace": 5}]}),
    (PART, "invalid_value", {"input": user("x")}),
    (PART + ".type", "missing_required_parameter", {"input": user({"text": "x"})}),
    (PART + ".type", "unsupported_parameter", {"input": user({"type": "input_image", "image_url": "x"})}),
    (PART + ".type", "unsupported_parameter", {"input": user({"type": "input_file", "file_id": "x"})}),
    (PART + ".type", "unsupported_parameter", {"input": user({"type": "output_text", "text": "x"})}),
    (PART + ".text", "invalid_value", {"input": user({"type": "input_text", "text": 1})}),
    ("input[0].call_id", "missing_required_parameter",
     {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}),
    ("input[0].arguments", "invalid_value",
     {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]}),
    ("input[0].output", "missing_required_parameter", {"input": [{"type": "function_call_output", "call_id": "c"}]}),
    ("input[0].content[0].type", "unsupported_parameter",
     {"input": [{"type": "reasoning", "content": [{"type": "summary_text", "text": "x"}]}]}),
    ("instructions", "invalid_value", {"instructions": ["x"]}),
    ("previous_response_id", "invalid_value", {"previous_response_id": 5}),
    ("previous_response_id", "previous_response_not_found", {"previous_response_id": "resp_unknown"}),
    ("tools", "invalid_value", {"tools": {}}),
    ("tools[0]", "invalid_value", {"tools": ["x"]}),
    ("tools[0].type", "missing_required_parameter", {"tools": [{"name": "f"}]}),
    ("tools[0]", "invalid_value", {"tools": ["x"]}),
    ("tools[1].name", "invalid_value", {"tools": [{"type": "web_search"}, {"type": "function", "name": "a b"}]}),
    ("tools[1].tools[1].parameters", "invalid_value", {"tools": [{"type": "web_search"}, {"type": "namespace", "name": "n",
        "tools": [{"type": "function", "name": "f"}, {"type": "function", "name": "g", "parameters": []}]}]}),
    ("tools[0].tools", "missing_required_parameter", {"tools": [{"type": "namespace", "name": "n"}]}),
    ("tools[0].tools", "invalid_value", {"tools": [{"type": "namespace", "name": "n", "tools": {}}]}),
    ("tools[0].tools[0].type", "missing_required_parameter", {"tools": [{"type": "namespace", "name": "n", "tools": [{}]}]}),
    ("tools", "invalid_value", {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "web_search"}] * 4096}]}),
    ("tools[0].format.type", "invalid_value", {"tools": [{"type": "custom", "name": "f", "format": {"type": "x"}}]}),
    ("tools[0].format.syntax", "invalid_value",
     {"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "gbnf", "definition": "x"}}]}),
    ("tools[1].format.definition", "invalid_value", {"tools": [{"type": "web_search"}, {
        "type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "regex", "definition": "("}}]}),
    ("tool_choice", "invalid_value", {"tools": [{"type": "web_search"}], "tool_choice": "required"}),
    ("tools[1].name", "missing_required_parameter", {"tools": [TOOLS[0], {"type": "function"}]}),
    ("tools[1].name", "invalid_value", {"tools": [TOOLS[0], {"type": "function", "name": "a b"}]}),
    ("tools[0].parameters", "invalid_value", {"tools": [{"type": "function", "name": "f", "parameters": []}]}),
    ("tools[0].strict", "invalid_value", {"tools": [{"type": "function", "name": "f", "strict": 1}]}),
    ("tool_choice", "invalid_value", {"tools": TOOLS, "tool_choice": "maybe"}),
    ("tool_choice", "invalid_value", {"tools": TOOLS, "tool_choice": {"type": "function", "name": "unknown"}}),
    ("tool_choice.type", "unsupported_parameter", {"tools": TOOLS, "tool_choice": {"type": "web_search"}}),
    ("tool_choice.name", "missing_required_parameter", {"tools": TOOLS, "tool_choice": {"type": "function"}}),
    ("text", "invalid_value", {"text": "x"}),
    ("text.verbosity", "invalid_value", {"text": {"verbosity": 5}}),
    ("text.format", "invalid_value", {"text": {"format": "json"}}),
    ("text.format.type", "missing_required_parameter", {"text": {"format": {}}}),
    ("text.format.type", "unsupported_parameter", {"text": {"format": {"type": "xml"}}}),
    ("text.format.schema", "missing_required_parameter", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
    ("text.format.schema", "invalid_value", {"text": {"format": {"type": "json_schema", "schema": 5}}}),
    ("text.format.schema.properties.a.$ref", "unsupported_parameter",
     {"text": {"format": {"type": "json_schema", "schema": {"properties": {"a": {"$ref": "http://a/b"}}}}}}),
    ("reasoning", "invalid_value", {"reasoning": "high"}),
    ("reasoning.effort", "invalid_value", {"reasoning": {"effort": 5}}),
    ("include", "invalid_value", {"include": "x"}),
    ("include[0]", "invalid_value", {"include": [5]}),
    ("top_logprobs", "invalid_value", {"top_logprobs": 3}),
    ("truncation", "invalid_value", {"truncation": "middle"}),
    ("metadata", "invalid_value", {"metadata": "x"}),
    ("metadata", "invalid_value", {"metadata": {str(i): "x" for i in range(17)}}),
    ("metadata", "invalid_value", {"metadata": {"k" * 65: "x"}}),
    ("metadata.k", "invalid_value", {"metadata": {"k": 5}}),
    ("metadata.k", "invalid_value", {"metadata": {"k": "\u00e9" * 513}}),
    ("user", "invalid_value", {"user": "u" * 513}),
    ("safety_identifier", "invalid_value", {"safety_identifier": "u" * 513}),
    ("safety_identifier", "invalid_value", {"safety_identifier": {"a": "b"}}),
    ("prompt_cache_key", "invalid_value", {"prompt_cache_key": "u" * 513}),
    ("max_output_tokens", "invalid_value", {"max_output_tokens": 0}),
    ("max_output_tokens", "invalid_value", {"max_output_tokens": "x"}),
    ("temperature", "invalid_value", {"temperature": -1}),
    ("kv.budget", "invalid_value", {"kv": {"budget": 0}}),
    *[(name, "unsupported_parameter", {name: value}) for name, value in {
        "conversation": "conv_1", "prompt": {"id": "x"}, "messages": [], "max_tokens": 3, "n": 2,
        "response_format": {"type": "text"}, "logprobs": True, "prompt_logprobs": 1, "return_token_ids": True,
        "verbose": True, "moderation": {}}.items()],
], ids=lambda v: v if isinstance(v, str) else "")
def test_refusals(caller, param, code, fields):
    refused(caller, 400, param, code, fields)


def test_names_of_tools_in_the_log(start):
    """A client names the types: they are cut, and nothing in them ends a line or moves a terminal's cursor."""
    daemon = start()
    kind = "odd\n2026 error \x1b[31m\u009b31m" + "x" * 1000
    r = daemon.post("/v1/responses", {"input": "hi", "max_output_tokens": 16, "tools": [{"type": kind}]})
    assert r.status_code == 200, r.text
    daemon.wait("the line", lambda: any("which keepd does not run" in line for line in daemon.errors))
    line = next(line for line in daemon.errors if "which keepd does not run" in line)
    assert "odd?2026 error ?[31m" in line and len(line) < 250
    assert all(c == "\n" or c.isprintable() for c in line), ascii(line)
