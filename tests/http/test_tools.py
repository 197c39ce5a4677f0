"""Tools that the model may call. (The fake answers with the last user message, so that is where its calls come
from.)"""
import json
import os
import subprocess

import pytest
import requests
from conftest import BINARY, MODEL, ROOT, chat_body, events, faked

CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {
    "name": "get_weather", "description": "The weather of a place",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}},
    {"type": "function", "function": {"name": "now"}}]
WEATHER = '{"city":"S\u00e3o Paulo","days":[1,2]}'


def hermes(name="get_weather", arguments=WEATHER):
    return '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>' % (name, arguments)


def llama(name="get_weather", arguments=WEATHER):
    return '{"name": "%s", "parameters": %s}' % (name, arguments)


@pytest.fixture(scope="module")
def caller():
    yield from faked(TOOLS="hermes")


def ask(daemon, text, **fields):
    body = chat_body(text, **{"tools": TOOLS, "max_tokens": 400, **fields})
    answer = daemon.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert choices == streamed(daemon, body, logprobs=fields.get("logprobs")), "streamed or not is the same"
    return choices[0] if len(choices) == 1 else choices


def streamed(daemon, body, logprobs=False):
    """The choices of a stream put together as clients do; ids are those of the answer."""
    r = requests.post(daemon.url + CHAT, json={**body, "stream": True}, stream=True, timeout=60)
    assert r.status_code == 200
    choices = {}
    for chunk in map(json.loads, events(r)[:-1]):
        for c in chunk["choices"]:
            add(choices.setdefault(c["index"], {"message": {}, "scores": []}), c, chunk["id"])
    return [finished(i, choices[i], logprobs) for i in sorted(choices)]


def add(choice, delta, answer):
    message = choice["message"]
    for key in ("content", "reasoning", "reasoning_content"):
        if key in delta["delta"]:
            message[key] = message.get(key, "") + delta["delta"][key]
    for call in delta["delta"].get("tool_calls", []):
        calls = message.setdefault("tool_calls", [])
        if "id" in call:
            assert call["index"] == len(calls) and call["type"] == "function" and call["function"]["arguments"] == ""
            long = call["id"].startswith(f"call_{answer[9:33]}") and len(call["id"]) <= 40
            assert long or call["id"].isalnum() and len(call["id"]) == 9 and call["id"].startswith(answer[9:14])
            calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
        else:
            assert call["index"] == len(calls) - 1 and call["function"]["arguments"]
            calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    choice["scores"] += delta["logprobs"]["content"] if delta["logprobs"] else []
    if delta["finish_reason"]:
        choice.update(finish_reason=delta["finish_reason"], stop_reason=delta["stop_reason"])


class AnyId(str):
    """An id that equals the id of the same call in another answer."""

    def __eq__(self, other):
        return self[29:] == other[29:]

    __hash__ = str.__hash__


def finished(index, choice, logprobs):
    message = {"role": "assistant", "refusal": None, **choice["message"]}
    if not message["content"] and (message.get("tool_calls") or message.get("reasoning")):
        message["content"] = None
    for call in message.get("tool_calls", []):
        call["id"] = AnyId(call["id"])
    scores = {"content": choice["scores"], "refusal": None} if logprobs else None
    return {"index": index, "message": message, "logprobs": scores, "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"], "token_ids": None}


def calls(choice):
    return [(c["function"]["name"], c["function"]["arguments"]) for c in choice["message"].get("tool_calls", [])]


def test_call(caller):
    choice = ask(caller, hermes(), logprobs=True)
    assert calls(choice) == [("get_weather", WEATHER)] and choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert "".join(t["token"] for t in choice["logprobs"]["content"]).startswith("<tool_call>"), "scores are of tokens"


def test_text_and_several_calls(caller):
    choice = ask(caller, "Let me see.\n" + hermes() + "\n" + hermes("now", "{}"))
    assert choice["message"]["content"] == "Let me see."
    assert calls(choice) == [("get_weather", WEATHER), ("now", "{}")]
    ids = [c["id"] for c in choice["message"]["tool_calls"]]
    assert len({*map(str, ids)}) == 2 and choice["finish_reason"] == "tool_calls"


def test_only_one_call(caller):
    choice = ask(caller, hermes() + "\n" + hermes("now", "{}"), parallel_tool_calls=False)
    assert calls(choice) == [("get_weather", WEATHER)] and choice["message"]["content"] is None


@pytest.mark.parametrize("text", ['<tool_call>\n{"name": "now"}\n</tool_call>', hermes("now", "null")])
def test_a_call_without_arguments(caller, text):
    choice = ask(caller, text)
    assert calls(choice) == [("now", "{}")] and choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("text", [
    "no call at all", hermes("unknown"), hermes(arguments='"Paris"'), "<tool_call>\nget_weather()\n</tool_call>",
    "<tool_call>", "a < b and <tool_ca", llama()])
def test_what_is_no_call_is_text(caller, text):
    choice = ask(caller, text)
    assert choice["message"]["content"] == text and not calls(choice) and choice["finish_reason"] == "stop"


def test_arguments_that_are_no_json(caller):
    """Calls that had begun stay calls: a stream takes nothing back."""
    choice = ask(caller, "<tool_call>\n" + '{"name": "now", "arguments": {"a": \'b\'}}\n</tool_call>')
    assert calls(choice) == [("now", "{\"a\": 'b'}}\n")] and choice["finish_reason"] == "tool_calls"


def test_cut_by_length(caller):
    begun = ask(caller, "Hm.\n" + hermes(), max_tokens=4 + hermes().index("S\u00e3o"))
    assert calls(begun) == [("get_weather", '{"city":"')] and begun["finish_reason"] == "length"
    assert begun["message"]["content"] == "Hm."
    choice = ask(caller, "Hm.\n" + hermes(), max_tokens=30)
    assert not calls(choice) and choice["message"]["content"] == ("Hm.\n" + hermes())[:30]
    assert choice["finish_reason"] == "length"


def test_cut_by_a_stop_string(caller):
    choice = ask(caller, hermes(), stop=[" Paulo"])
    assert calls(choice) == [("get_weather", '{"city":"S\u00e3o')]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", " Paulo")
    choice = ask(caller, hermes(), stop=["</tool_call>"])
    assert calls(choice) == [("get_weather", WEATHER)] and choice["finish_reason"] == "tool_calls"


def test_several_choices(caller):
    choices = ask(caller, hermes(), n=3, temperature=1, seed=7)
    assert len({str(c["message"]["tool_calls"][0]["id"]) for c in choices}) == 3
    for choice in choices:
        assert calls(choice) == [("get_weather", WEATHER)]
        assert choice["message"]["content"].startswith(" #"), "the fake adds its seed"


def test_ids_are_unique_over_answers(caller):
    body = chat_body(hermes(), tools=TOOLS, max_tokens=400)
    ids = {caller.post(CHAT, body).json()["choices"][0]["message"]["tool_calls"][0]["id"] for _ in range(8)}
    assert len(ids) == 8


def test_none_leaves_the_text_whole(caller):
    assert ask(caller, hermes(), tool_choice="none")["message"]["content"] == hermes()
    assert ask(caller, hermes(), tools=None)["message"]["content"] == hermes()
    assert ask(caller, hermes(), tools=[])["message"]["content"] == hermes()


@pytest.mark.parametrize("choice,param,code", [
    ("other", "tool_choice", "invalid_value"), (3, "tool_choice", "invalid_value"),
    ({"type": "function", "function": {"name": "nobody"}}, "tool_choice", "invalid_value"),
    ({"type": "function", "function": {}}, "tool_choice.function.name", "missing_required_parameter"),
    ({"type": "allowed_tools"}, "tool_choice", "unsupported_parameter")])
def test_choices_that_are_refused(caller, choice, param, code):
    r = caller.chat("hi", tools=TOOLS, tool_choice=choice)
    assert r.status_code == 400
    assert (r.json()["error"]["param"], r.json()["error"]["code"]) == (param, code)


def test_schemas_of_tools_that_are_promised(caller):
    """Where a call is promised, and for strict tools always, a schema must be one that is enforced."""
    def tool(**fields):
        return [{"type": "function", "function": {"name": "f", "parameters": {"unevaluatedProperties": False}, **fields}}]
    for fields in (dict(tools=tool(), tool_choice="required"), dict(tools=tool(strict=True))):
        r = caller.chat("hi", **fields)
        assert (r.status_code, r.json()["error"]["param"]) == (400, "tools[0].function.parameters.unevaluatedProperties"), r.text
    assert caller.chat("hi", tools=tool()).status_code == 200
    assert caller.chat("hi", tool_choice="required").json()["error"]["param"] == "tool_choice"


def test_a_schema_that_is_too_complex_names_its_tool(caller):
    """The work of a compilation is bounded by its text, and the refusal says whose text it is."""
    costly = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^([a-z][0-9])+$", "minLength": 10000}}}
    fields = {"tools": [TOOLS[1], {"type": "function", "function": {"name": "f", "parameters": costly}}], "tool_choice": "required"}
    error = caller.chat(**fields).json()["error"]
    assert error["param"] == "tools[1].function.parameters" and "is too complex: " in error["message"], error
    error = caller.post("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}], "tool_choice": {"type": "any"},
                                         "tools": [{"name": "f", "input_schema": costly}]}).json()["error"]
    assert error["param"] == "tools[0].input_schema" and "is too complex: " in error["message"], error
    error = caller.chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": costly}}).json()["error"]
    assert error["param"] == "response_format.json_schema.schema" and "is too complex: " in error["message"], error


def test_answers_that_are_not_searched(fake, start):
    daemon = start("--tool-call-parser", "none", env={"KEEPD_FAKE_TOOLS": "hermes"})
    assert daemon.get("/server_info").json()["tool_call_parser"] == "none"
    r = daemon.chat("hi", tools=TOOLS)
    assert r.status_code == 400 and r.json()["error"]["param"] == "tools"
    assert "--tool-call-parser none" in r.json()["error"]["message"]
    assert daemon.chat("hi", tools=TOOLS, tool_choice="none").status_code == 200


def test_models_whose_template_shows_no_tools(shared, fake):
    """The system message describes the tools; calls and results are text."""
    assert shared.get("/server_info").json()["tool_call_parser"] == "generic"
    choice = ask(shared, "So.\n" + hermes() + "\n" + hermes("now", "{}"), max_tokens=200)
    assert calls(choice) == [("get_weather", WEATHER), ("now", "{}")] and choice["message"]["content"] == "So."
    messages = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}]}, {"role": "tool", "tool_call_id": "a", "content": "noon"}]
    prompt = shared.post("/apply-template", {"messages": messages, "tools": TOOLS}).json()["prompt"]
    assert '{"name":"get_weather","description":"The weather of a place","parameters":{' in prompt and prompt.count("<tool_call>") == 2
    assert '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>' in prompt and "<tool_response>\nnoon\n</tool_response>" in prompt


def refused_start(*flags, env=None):
    """The status and the message of a daemon that does not start."""
    run = subprocess.run([BINARY, "--model", ROOT / "bundled/keepd-nano", "--port", "0", *flags], capture_output=True, text=True, timeout=60,
                         env={**os.environ, **(env or {})})
    return run.returncode, run.stderr


def test_a_parser_that_the_template_cannot_use_is_refused_at_start(fake, start):
    for more in ([], ["--check-config"]):
        status, text = refused_start("--tool-call-parser", "hermes", *more)
        assert status == 78 and "tool-call-parser: the model's chat template shows no tools" in text, text
    daemon = start("--tool-call-parser", "llama3", env={"KEEPD_FAKE_TOOLS": "hermes"})
    wanted = "the model's chat template teaches the form 'hermes', not 'llama3'"
    daemon.wait("the warning", lambda: wanted in "".join(daemon.errors))
    assert daemon.get("/server_info").json()["tool_call_parser"] == "llama3"


def test_mistral(start, fake):
    """The tags may be text or special tokens, which leave none; ids are those that its templates accept."""
    text = '{"name": "%s", "arguments": %s}'
    for daemon in (start(env={"KEEPD_FAKE_TOOLS": "mistral"}),
                   start("--tool-call-parser", "mistral", env={"KEEPD_FAKE_TOOLS": "hermes"})):
        assert daemon.get("/server_info").json()["tool_call_parser"] == "mistral"
        for tag in ("", "[TOOL_CALLS]", "[TOOL_CALLS] "):
            choice = ask(daemon, f"{tag}[{text % ('get_weather', WEATHER)}, {text % ('now', '{}')}]")
            assert calls(choice) == [("get_weather", WEATHER), ("now", "{}")]
            assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
            ids = [str(c["id"]) for c in choice["message"]["tool_calls"]]
            assert len({*ids}) == 2 and all(len(i) == 9 and i.isalnum() for i in ids)
            message = daemon.post("/v1/messages", {"max_tokens": 200, "messages": [{"role": "user", "content": f"{tag}[{text % ('now', '{}')}]"}], "tools": [
                {"name": "now", "input_schema": {"type": "object"}}]}).json()
            use = [str(block["id"]) for block in message["content"] if block["type"] == "tool_use"]
            assert len(use) == 1 and len(use[0]) == 9 and use[0].isalnum()
        choice = ask(daemon, "Say.[TOOL_CALLS]get_weather[ARGS]" + WEATHER)
        assert calls(choice) == [("get_weather", WEATHER)] and choice["message"]["content"] == "Say."
        assert ask(daemon, "[1, 2]")["message"]["content"] == "[1, 2]"


def test_qwen3_coder(start, fake):
    """Arguments in tags are JSON, streamed and whole; what is a string the schema says."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "o": {}, "p": {"type": "object"},
                                         "zip": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                                         "size": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "kind": {"type": ["string", "null"]}}}}}]
    text = "<tool_call>\n<function=f>\n%s</function>\n</tool_call>" % "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in
        (("s", '12 "a"\né'), ("n", "12"), ("o", '{"a": [1]}'), ("other", "words"), ("zip", "123"), ("size", "null"), ("kind", "123"),
         ("p", "{'a': 1, 'b': [True, None]}"), ("q", "{hello} world"), ("r", "[draft] fix")))
    wanted = {"s": '12 "a"\né', "n": 12, "o": {"a": [1]}, "other": "words", "zip": "123", "size": None, "kind": "123",
              "p": {"a": 1, "b": [True, None]}, "q": "{hello} world", "r": "[draft] fix"}
    for daemon in (start(env={"KEEPD_FAKE_TOOLS": "qwen3_coder"}),
                   start("--tool-call-parser", "qwen3_coder", env={"KEEPD_FAKE_TOOLS": "hermes"})):
        assert daemon.get("/server_info").json()["tool_call_parser"] == "qwen3_coder"
        choice = ask(daemon, "Say.\n" + text, tools=tools, max_tokens=480)
        (name, arguments), = calls(choice)
        assert name == "f" and json.loads(arguments) == wanted and choice["message"]["content"] == "Say."
        assert choice["finish_reason"] == "tool_calls"


def tagged(form, name="f", **arguments):
    """A call as the templates of these families write it."""
    if form == "lfm2":
        return "<|tool_call_start|>[f(" + ", ".join(f"{k}={v if k != 's' else repr(v)}" for k, v in arguments.items()) + ")]<|tool_call_end|>"
    if form == "gemma4":
        words = {k: v if k == "n" else '{a:[1]}' if k == "o" else f'<|"|>{v}<|"|>' for k, v in arguments.items()}
        return "<|tool_call>call:f{" + ",".join(f"{k}:{v}" for k, v in words.items()) + "}<tool_call|>"
    if form == "seed_oss":
        body = "".join(f"<parameter={k}>{v}</parameter>\n" for k, v in arguments.items())
        return f"<seed:tool_call>\n<function={name}>\n{body}</function>\n</seed:tool_call>"
    if form == "minimax_m2":
        body = "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in arguments.items())
        return f'<minimax:tool_call>\n<invoke name="{name}">\n{body}</invoke>\n</minimax:tool_call>'
    line = "\n" if form == "glm45" else ""
    body = "".join(f"<arg_key>{k}</arg_key>{line}<arg_value>{v}</arg_value>{line}" for k, v in arguments.items())
    return f"<tool_call>{name}{line}{body}</tool_call>"


@pytest.mark.parametrize("form", ["seed_oss", "glm45", "glm47", "minimax_m2", "lfm2", "gemma4"])
def test_families_with_tags(start, fake, form):
    """Streamed and whole are the same, with "auto", promised and strict (the fake writes what it is asked to)."""
    def tool(**fields):
        return [{"type": "function", "function": {"name": "f", **fields, "parameters": {
            "type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}}, "required": ["s"]}}}]
    text = tagged(form, s='12 "a" <b>\né', n="12", o='{"a": [1]}')
    wanted = {"s": '12 "a" <b>\né', "n": 12, "o": {"a": [1]}}
    daemon = start(env={"KEEPD_FAKE_TOOLS": form})
    assert daemon.get("/server_info").json()["tool_call_parser"] == form
    for fields in ({}, {"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, {"strict": True}):
        tools = tool(strict=True) if fields.pop("strict", False) else tool()
        choice = ask(daemon, text, tools=tools, max_tokens=480, **fields)
        (name, arguments), = calls(choice)
        assert name == "f" and json.loads(arguments) == wanted and choice["message"]["content"] is None, fields
        assert choice["finish_reason"] == "tool_calls"
    choice = ask(daemon, "Say.\n" + text + "\n" + tagged(form, s="x"), tools=tool(), max_tokens=480)
    assert [json.loads(a) for _, a in calls(choice)] == [wanted, {"s": "x"}] and choice["message"]["content"] == "Say."
    refused = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"s": {"unevaluatedItems": False}}}}}]
    answer = daemon.chat("hi", tools=refused, tool_choice="required")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools[0].function.parameters.properties.s.unevaluatedItems"


JSON_FORMS = {
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>%s<｜tool▁sep｜>%s<｜tool▁call▁end｜>", "", "<｜tool▁calls▁end｜>"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.%s:0<|tool_call_argument_begin|>%s<|tool_call_end|>", "",
                "<|tool_calls_section_end|>"),
    "granite": ("<|tool_call|>[", '{"name": "%s", "arguments": %s}', ", ", "]"),
    "deepseek_v32": ("<｜DSML｜function_calls>\n", '<｜DSML｜invoke name="%s">\n%s</｜DSML｜invoke>', "\n", "\n</｜DSML｜function_calls>")}


@pytest.mark.parametrize("form", JSON_FORMS)
def test_families_with_marks(start, fake, form):
    """Streamed and whole are the same, with "auto", promised and strict; text stands before and behind."""
    begin, call, between, end = JSON_FORMS[form]
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    weather, none = WEATHER, "{}"
    if form == "deepseek_v32":
        weather, none = '<｜DSML｜parameter name="city" string="true">12</｜DSML｜parameter>\n', ""
    text = begin + call % ("get_weather", weather) + between + call % ("now", none) + end
    wanted = {"city": "12"} if form == "deepseek_v32" else json.loads(WEATHER)
    daemon = start(env={"KEEPD_FAKE_TOOLS": form})
    assert daemon.get("/server_info").json()["tool_call_parser"] == form
    for fields in ({}, {"tool_choice": "required"}, {"tools": tools}):
        choice = ask(daemon, text, max_tokens=480, **fields)
        assert [(n, json.loads(a)) for n, a in calls(choice)] == [("get_weather", wanted), ("now", {})], fields
        assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
    choice = ask(daemon, "Say. " + text + " So.", max_tokens=480)
    assert len(calls(choice)) == 2 and choice["message"]["content"] == "Say.  So."
    assert ask(daemon, text.replace("get_weather", "nobody").replace("now", "none"), max_tokens=480)["finish_reason"] == "stop"


def test_llama(start, fake):
    for daemon in (start(env={"KEEPD_FAKE_TOOLS": "llama3"}),
                   start("--tool-call-parser", "llama3", env={"KEEPD_FAKE_TOOLS": "hermes"})):
        assert daemon.get("/server_info").json()["tool_call_parser"] == "llama3"
        choice = ask(daemon, llama() + "; " + llama("now", "{}"))
        assert calls(choice) == [("get_weather", WEATHER), ("now", "{}")]
        assert choice["message"]["content"] is None
        choice = ask(daemon, "Say: " + llama())
        assert calls(choice) == [("get_weather", WEATHER)] and choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Say: "
        choice = ask(daemon, '{"x": ' + llama() + "}")
        assert choice["message"]["content"] == '{"x": ' + llama() + "}" and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("opened", [1, 2])
def test_after_thinking(start, fake, opened):
    daemon = start(env={"KEEPD_FAKE_TOOLS": "hermes", "KEEPD_FAKE_THINK": str(opened)})
    thought = "it wants <tool_call> " + hermes()
    choice = ask(daemon, ("" if opened == 2 else "\n\x01") + thought + "\x02\n\n" + hermes())
    assert choice["message"]["reasoning"] == thought and calls(choice) == [("get_weather", WEATHER)]


def test_stream_holds_back_only_beginnings(caller):
    """Arguments come piece by piece, text before a tag at once."""
    body = chat_body("A < B\n\n" + hermes(), tools=TOOLS, max_tokens=400, stream=True)
    deltas = [json.loads(e)["choices"][0]["delta"] for e in events(
        requests.post(caller.url + CHAT, json=body, stream=True, timeout=60))[:-1]]
    texts = [d["content"] for d in deltas if d.get("content")]
    assert texts == ["A", " ", "< ", "B", "\n"]
    pieces = [d["tool_calls"][0]["function"]["arguments"] for d in deltas if "tool_calls" in d]
    assert pieces == ["", *WEATHER]


def test_sdk(caller):
    client = caller.client()
    messages = [{"role": "user", "content": "Look.\n" + hermes()}]
    options = {"model": MODEL, "tools": TOOLS, "temperature": 0, "max_tokens": 400}
    answer = client.chat.completions.create(messages=messages, **options)
    message = answer.choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments)["days"] == [1, 2]
    with client.chat.completions.stream(messages=messages, **options) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls" and final.message.content == "Look."
    assert final.message.tool_calls[0].function.parsed_arguments is None
    assert final.message.tool_calls[0].function.arguments == message.tool_calls[0].function.arguments


def test_the_conversation_goes_on(caller):
    """The message with the calls, as the SDK gives it back, renders to what the model wrote."""
    client = caller.client()
    options = {"model": MODEL, "tools": TOOLS, "temperature": 0, "max_tokens": 400,
               "extra_body": {"cache_salt": "calls"}}
    messages = [{"role": "user", "content": "Look.\n" + hermes() + "\n" + hermes("now", "{}")}]
    first = client.chat.completions.create(messages=messages, **options)
    message = first.choices[0].message
    messages += [message] + [{"role": "tool", "tool_call_id": c.id, "content": "fine"} for c in message.tool_calls]
    second = client.chat.completions.create(messages=messages, **options)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.prompt_tokens + first.usage.completion_tokens - 1, "the calls too"
    assert second.usage.kv_details["dropped_tokens"] == 0


@pytest.mark.parametrize("opened", [1, 2], ids=["the model opens its thought", "the template opens it"])
def test_an_agent_that_thinks(start, fake, tmp_path, opened):
    """A model that thinks, calls, and answers from the result, by a script: whole and streamed, on all three routes."""
    tag = "" if opened == 2 else "\x01"
    script = [["98 degrees", f"{tag}I have it.\x02It is 98 degrees."], ["Dallas", f"{tag}They want\nto know.\x02{hermes()}"]]
    (tmp_path / "script.json").write_text(json.dumps(script))
    daemon = start(env={"KEEPD_FAKE_TOOLS": "hermes", "KEEPD_FAKE_THINK": str(opened),
                        "KEEPD_FAKE_SCRIPT": str(tmp_path / "script.json")})
    asked = ask(daemon, "How warm is it in Dallas?")
    message = asked["message"]
    assert message["reasoning"] == "They want\nto know." and message["content"] is None
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["get_weather"] and asked["finish_reason"] == "tool_calls"
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "98 degrees"}
    told = ask(daemon, "", messages=[{"role": "user", "content": "How warm is it in Dallas?"}, message, result])
    assert (told["message"]["reasoning"], told["message"]["content"]) == ("I have it.", "It is 98 degrees.")

    flat = [{"type": "function", **t["function"]} for t in TOOLS]
    first = daemon.post("/v1/responses", {"input": "How warm is it in Dallas?", "tools": flat}).json()
    assert [item["type"] for item in first["output"]] == ["reasoning", "function_call"]
    second = daemon.post("/v1/responses", {"previous_response_id": first["id"], "input": [
        {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "98 degrees"}]}).json()
    assert [item["type"] for item in second["output"]] == ["reasoning", "message"]
    assert second["output"][1]["content"][0]["text"] == "It is 98 degrees."

    tools = [{"name": t["function"]["name"], "input_schema": t["function"].get("parameters", {"type": "object"})} for t in TOOLS]
    blocks = daemon.post("/v1/messages", {"max_tokens": 400, "tools": tools, "messages": [
        {"role": "user", "content": "How warm is it in Dallas?"}]}).json()["content"]
    assert [b["type"] for b in blocks] == ["thinking", "tool_use"] and blocks[1]["input"] == json.loads(WEATHER)


def union(default):
    """A union as pydantic writes it; with `default`, the member that decides has one, so it is not required."""
    def branch(kind):
        member = {"const": kind, "type": "string", **({"default": kind} if default else {})}
        return {"type": "object", "properties": {"kind": member, "n": {"type": "integer"}}, "required": ["n"] + ["kind"] * (not default)}
    return {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], "$defs": {"Cat": branch("cat"), "Dog": branch("dog")}}


@pytest.mark.parametrize("schema", [
    union(False), union(True),
    {**union(True), "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}}},
    {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    {"type": "array", "items": {"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]}, "uniqueItems": True},
    {"type": "object", "additionalProperties": {"type": "integer"}, "propertyNames": {"enum": ["a", "b"]}},
    {"type": "object", "propertyNames": {"$ref": "#/$defs/E"}, "$defs": {"E": {"enum": ["a"], "type": "string"}}},
    {"type": "string", "format": "regex"}])
def test_schemas_of_pydantic_are_served(caller, schema):
    """Sets, dicts of enums, patterns and unions; tests/unit/constrain/test_schema.c has the languages."""
    body = chat_body("hi", response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert caller.post(CHAT, body).status_code == 200
    defs = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
        "x": {k: v for k, v in schema.items() if k != "$defs"}}, **defs}}}
    assert caller.post(CHAT, chat_body(hermes("f", "{}"), tools=[tool], tool_choice="required")).status_code == 200


BARE = '{"name": "get_weather", "arguments": %s}' % WEATHER


@pytest.mark.parametrize("text, before", [
    (BARE, None), (f"```json\n{BARE}\n```", None), (f"Let me see.\n```json\n{BARE}\n```\n", "Let me see."),
    (f"Let me see.\n{BARE}", "Let me see."), (f"[{BARE}]", None)])
def test_a_call_without_tags(caller, text, before):
    choice = ask(caller, text)
    assert calls(choice) == [("get_weather", WEATHER)] and choice["message"]["content"] == before
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("text", [
    '{"name": "unknown", "arguments": {}}', '```json\n{"name": "Ada", "age": 36}\n```', '{"name": "now"}', f"It writes {BARE}.",
    '{"name": "now", "parameters": {"type": "object"}}', "```json\n[1, 2]\n```", '{"calls": %s}' % BARE, '{"name": "now", "argum'])
def test_an_object_that_is_no_call_stays_text(caller, text):
    choice = ask(caller, text)
    assert choice["message"]["content"] == text and not calls(choice) and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("arguments", [None, "null", "", " ", '{"city": "Par', '{"city": "Par\\', '{"a": [1, {"b": tr', "not json", "[1]", "missing"])
def test_any_arguments_may_be_sent_back(caller, arguments):
    function = {"name": "get_weather"} if arguments == "missing" else {"name": "get_weather", "arguments": arguments}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c", "type": "function", "function": function}]}, {"role": "tool", "tool_call_id": "c", "content": "?"}]
    r = caller.post(CHAT, chat_body("x", messages=messages, tools=TOOLS))
    assert r.status_code == 200, r.text


def test_fields_of_newer_models_are_ignored(caller):
    for verbosity in ("low", "high"):
        assert caller.post(CHAT, chat_body("x", verbosity=verbosity)).status_code == 200
        r = caller.post("/v1/responses", {"model": MODEL, "input": "x", "max_output_tokens": 2, "text": {"verbosity": verbosity}})
        assert r.status_code == 200 and r.json()["text"]["verbosity"] == verbosity
    assert caller.post(CHAT, chat_body("x", stop=[f"stop{i}" for i in range(40)], temperature=3.5)).status_code == 200


def test_many_tools_with_long_names(caller):
    names = ["f" * 128, *(f"tool_{i}" for i in range(300))]
    r = caller.post("/v1/messages", {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "x"}],
                                     "tools": [{"name": name, "input_schema": {"type": "object"}} for name in names]})
    assert r.status_code == 200, r.text
