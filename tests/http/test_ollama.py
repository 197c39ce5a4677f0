"""Ollama's API: chats, prompts, streams of lines, options, vectors, lists of models, errors. The fake engine repeats the
last user message, and with a temperature above 0 the seed behind it."""
import json

import pytest
import requests
from conftest import LENGTH, MODEL, events

CHAT, GENERATE, EMBED, SHOW = "/api/chat", "/api/generate", "/api/embed", "/api/show"
CITY = {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Lisbon"}}\n</tool_call>'
TIMES = {"total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"}
ZERO = {"temperature": 0}


def ask(daemon, path, status=200, **body):
    r = daemon.post(path, {"model": MODEL, **body})
    assert r.status_code == status, r.text
    return r


def chat(daemon, text, **body):
    return ask(daemon, CHAT, **{"messages": [{"role": "user", "content": text}], "stream": False, "options": ZERO,
                                **body}).json()


def generate(daemon, text, **body):
    return ask(daemon, GENERATE, **{"prompt": text, "stream": False, "options": ZERO, **body}).json()


def lines(daemon, path, **body):
    r = requests.post(daemon.url + path, json={"model": MODEL, "options": ZERO, **body}, stream=True, timeout=60)
    assert r.status_code == 200 and r.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in r.text.split("\n")[:-1]]


def refused(daemon, path, param, status=400, **body):
    error = ask(daemon, path, status, **body).json()
    assert set(error) <= {"error", "param", "code"} and isinstance(error["error"], str)
    assert error.get("param") == param, error
    return error["error"]


# --- chats ---

def test_chat(shared, fake):
    answer = chat(shared, "hello")
    assert answer["message"] == {"role": "assistant", "content": "hello"}
    assert answer["done"] is True and answer["done_reason"] == "stop" and answer["model"] == MODEL
    assert TIMES <= set(answer) and answer["eval_count"] == len("hello") + 1
    assert answer["total_duration"] >= answer["prompt_eval_duration"] >= 0


def test_a_stream_is_the_whole_answer_in_lines(shared, fake):
    *parts, last = lines(shared, CHAT, messages=[{"role": "user", "content": "naïve 🙂 text"}])
    assert "".join(p["message"]["content"] for p in parts) == "naïve 🙂 text"
    assert all(p["done"] is False and p["model"] == MODEL for p in parts) and len(parts) == len("naïve 🙂 text")
    whole = chat(shared, "naïve 🙂 text")
    assert last["message"] == {"role": "assistant", "content": ""}
    assert set(last) == set(whole) and last["eval_count"] == whole["eval_count"]


def test_a_silent_stream_has_blanks_before_its_lines(start, fake):
    daemon = start(env={"KEEPD_FAKE_PREFILL_STEPS": "30", "KEEPD_FAKE_STEP_US": "20000"}, first=50, ping=100)
    text = requests.post(daemon.url + CHAT, json={"messages": [{"role": "user", "content": "hi"}]}, timeout=60).text
    assert text.startswith(" ") and not text.startswith(" \n") and all(json.loads(line) for line in text.split("\n")[:-1])


def test_messages(shared, fake):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u", "images": []},
                {"role": "assistant", "content": "", "thinking": "t",
                 "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Lisbon"}}}]},
                {"role": "tool", "content": "rain", "tool_name": "get_weather"}, {"role": "user", "content": "and?"}]
    answer = ask(shared, CHAT, messages=messages, stream=False, options=ZERO).json()["message"]["content"]
    assert answer == "<tool_response>\nrain\n</tool_response>\nand?"  # this model's template knows no tools


def test_a_last_message_of_the_assistant_goes_on(shared, fake):
    body = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]}
    ours = shared.post("/v1/chat/completions", {**body, "continue_final_message": True, "max_tokens": 3}).json()
    theirs = ask(shared, CHAT, **body, stream=False, options={"num_predict": 3}).json()
    assert theirs["prompt_eval_count"] == ours["usage"]["prompt_tokens"]


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_nothing_to_say_loads_the_model(shared, path):
    for body in ({}, {"messages": []}, {"prompt": "", "keep_alive": 0}):
        answer = ask(shared, path, **body).json()
        assert answer["done"] is True and answer["done_reason"] == "load" and answer["model"] == MODEL
        assert ("message" in answer) == (path == CHAT)


# --- prompts ---

def test_generate(shared, fake):
    answer = generate(shared, "hello", system="s")
    assert answer["response"] == "hello" and TIMES <= set(answer)
    *parts, last = lines(shared, GENERATE, prompt="hello", system="s")
    assert "".join(p["response"] for p in parts) == "hello" and last["context"] == answer["context"]


def test_context_is_what_was_read_and_written(shared, fake):
    first = generate(shared, "one")
    assert len(first["context"]) == first["prompt_eval_count"] + first["eval_count"]
    second = generate(shared, "two", context=first["context"])
    assert second["response"] == "two" and second["context"][:len(first["context"])] == first["context"]
    refused(shared, GENERATE, "context[1]", prompt="x", context=[1, -1])
    refused(shared, GENERATE, "context", prompt="x", context="1")
    refused(shared, GENERATE, "prompt", prompt="x", context=[1] * LENGTH)


def test_raw(shared, fake):
    answer = generate(shared, "abc", raw=True)
    assert answer["response"] == "abc" and answer["prompt_eval_count"] == 3 and "context" not in answer
    refused(shared, GENERATE, "context", prompt="x", raw=True, context=[1])
    refused(shared, GENERATE, "system", prompt="x", raw=True, system="s")


def test_suffix(shared, start, fake):
    assert "gap" in refused(shared, GENERATE, "suffix", prompt="def", suffix="return")
    daemon = start(env={"KEEPD_FAKE_FIM": "1"})
    assert generate(daemon, "def", suffix="return")["prompt_eval_count"] == 3 + len("defreturn")


def test_images_and_templates_are_refused_by_name(shared):
    refused(shared, GENERATE, "images", prompt="x", images=["aaaa"])
    refused(shared, GENERATE, "template", prompt="x", template="{{ .Prompt }}")
    refused(shared, CHAT, "messages[1].images",
            messages=[{"role": "user", "content": "x"}, {"role": "user", "content": "x", "images": ["aaaa"]}])
    assert generate(shared, "x", images=[], template="", suffix="", format="")["done"]


# --- options ---

def test_options_are_fields_of_a_chat(shared, fake):
    assert chat(shared, "hello", options={**ZERO, "num_predict": 2})["done_reason"] == "length"
    assert chat(shared, "hello", options={**ZERO, "stop": ["l"]})["message"]["content"] == "he"
    said = [chat(shared, "x", options={"temperature": 1, "seed": seed})["message"]["content"] for seed in (5, 5, -1, -1)]
    assert said[0] == said[1] and len(set(said[1:])) == 3
    whole = {"num_keep": 5, "num_predict": -2, "top_k": 20, "top_p": 0.9, "min_p": 0.0, "repeat_last_n": 33,
             "repeat_penalty": 1.2, "presence_penalty": 1.5, "frequency_penalty": 1.0, "penalize_newline": True,
             "stop": ["\n", "user:"], "numa": False, "num_ctx": 1024, "num_batch": 2, "num_gpu": 1, "main_gpu": 0,
             "use_mmap": True, "num_thread": 8, "typical_p": 1, "tfs_z": 1.0, "mirostat": 0, "kv": {"budget": 64}}
    assert chat(shared, "hello", options={**ZERO, **whole})["kv_details"]["budget"] == 64


@pytest.mark.parametrize("option, value", [
    ("temperature", -1), ("top_p", 2), ("num_predict", "x"), ("num_predict", 0), ("seed", "x"), ("stop", 3), ("stop", [""]),
    ("mirostat", 1), ("tfs_z", 0.5), ("typical_p", 0.7), ("repeat_penalty", "x"), ("stream", True)])
def test_a_bad_option_is_named(shared, option, value):
    name = f"options.{option}" + ("[0]" if value == [""] else "")
    refused(shared, CHAT, name, messages=[{"role": "user", "content": "x"}], options={option: value})
    refused(shared, GENERATE, name, prompt="x", options={option: value})


def test_strict(start):
    daemon = start("--strict-params")
    assert generate(daemon, "x", options={"num_ctx": 5})["done"]
    refused(daemon, GENERATE, "options.colour", prompt="x", options={"colour": 1})
    refused(daemon, GENERATE, "colour", prompt="x", colour=1)


def test_formats(shared):
    """The fake engine compiles languages and does not obey them; tests/clients/test_ollama.py has a model that does."""
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}}
    for form in ("json", schema, "", None):
        assert generate(shared, "x", format=form)["done"]
    refused(shared, GENERATE, "format", prompt="x", format="yaml")
    refused(shared, GENERATE, "format", prompt="x", format=3)
    refused(shared, GENERATE, "format.properties.age.type", prompt="x",
            format={"type": "object", "properties": {"age": {"type": "number?"}}})


def test_fields_of_other_apis_are_named(shared):
    assert "options.num_predict" in refused(shared, CHAT, "max_tokens", messages=[{"role": "user", "content": "x"}],
                                            max_tokens=3)
    refused(shared, CHAT, "think", messages=[{"role": "user", "content": "x"}], think=3)
    refused(shared, CHAT, "messages[0].role", messages=[{"role": "critic", "content": "x"}])
    refused(shared, CHAT, "messages", messages="x")
    for role, field, value in (("assistant", "thinking", 1), ("tool", "tool_name", 1), ("tool", "tool_call_id", []),
                               ("assistant", "tool_calls", 1), ("user", "content", [])):
        refused(shared, CHAT, f"messages[0].{field}", messages=[{"role": role, "content": "x", field: value}])
    refused(shared, CHAT, "messages[0].tool_calls[0].id",
            messages=[{"role": "assistant", "tool_calls": [{"id": 1, "function": {"name": "a"}}]}])
    refused(shared, CHAT, "options", messages=[{"role": "user", "content": "x"}], options=[])


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_one_answer_to_a_request(shared, path):
    """Ollama's answers have place for one choice, so more of them are refused, as in Messages and Responses."""
    body = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    for n in (0, 2, "1"):
        refused(shared, path, "n", **body, n=n)
        refused(shared, path, "options.n", **body, options={"n": n})
    assert ask(shared, path, **body, n=1, options={"n": 1}).status_code == 200


def test_scores(shared, fake):
    answer = chat(shared, "ab", logprobs=True, top_logprobs=2)
    assert [s["token"] for s in answer["logprobs"]][:2] == ["a", "b"] and len(answer["logprobs"][0]["top_logprobs"]) == 2
    parts = lines(shared, CHAT, messages=[{"role": "user", "content": "ab"}], logprobs=True, top_logprobs=2)
    assert [s for p in parts for s in p.get("logprobs", [])][:2] == answer["logprobs"][:2]
    refused(shared, CHAT, "top_logprobs", messages=[{"role": "user", "content": "x"}], top_logprobs=2)


# --- thoughts and tools ---

def test_thoughts(start, fake):
    daemon = start(env={"KEEPD_FAKE_THINK": "1"})
    text = "\1deep\2said"
    assert chat(daemon, text, think=True)["message"] == {"role": "assistant", "content": "said", "thinking": "deep"}
    assert generate(daemon, text, think="low")["thinking"] == "deep"
    parts = [p["message"] for p in lines(daemon, CHAT, messages=[{"role": "user", "content": text}], think=False)]
    assert "".join(p.get("thinking", "") for p in parts) == "deep" and "".join(p["content"] for p in parts) == "said"
    assert "thinking" in ask(daemon, SHOW).json()["capabilities"]


def test_tools(start, fake):
    daemon = start(env={"KEEPD_FAKE_TOOLS": "hermes"})
    body = {"messages": [{"role": "user", "content": "Well. " + CALL + CALL}], "tools": [CITY]}
    whole = ask(daemon, CHAT, **body, stream=False, options=ZERO).json()["message"]
    assert [c["function"] for c in whole["tool_calls"]] == [
        {"index": i, "name": "get_weather", "arguments": {"city": "Lisbon"}} for i in range(2)]
    parts = [p["message"] for p in lines(daemon, CHAT, **body)]
    assert [c["function"] for p in parts for c in p.get("tool_calls", [])] == [c["function"] for c in whole["tool_calls"]]
    assert "".join(p["content"] for p in parts) == whole["content"]
    assert "tools" in ask(daemon, SHOW).json()["capabilities"]
    refused(daemon, CHAT, "tools[0].function.name", messages=body["messages"],
            tools=[{"type": "function", "function": {"name": "a b"}}])


def test_a_cut_call_is_shown(start, fake):
    daemon = start(env={"KEEPD_FAKE_TOOLS": "hermes"})
    answer = chat(daemon, CALL, tools=[CITY], options={**ZERO, "num_predict": 60})
    assert answer["done_reason"] == "length"
    assert answer["message"]["tool_calls"][0]["function"]["arguments"]["INVALID_JSON"].startswith('{"city"')


# --- vectors ---

def test_vectors(shared):
    ours = [v["embedding"] for v in shared.post("/v1/embeddings", {"input": ["abc", "de"]}).json()["data"]]
    answer = ask(shared, EMBED, input=["abc", "de"], options={"num_ctx": 5}).json()
    assert answer["embeddings"] == ours and answer["prompt_eval_count"] > 0 and answer["total_duration"] > 0
    assert ask(shared, EMBED, input="abc").json()["embeddings"] == ours[:1]
    assert len(ask(shared, EMBED, input="abc", dimensions=8).json()["embeddings"][0]) == 8
    raw = shared.post("/v1/embeddings", {"input": "abc", "normalize": False}).json()["data"][0]["embedding"]
    assert ask(shared, "/api/embeddings", prompt="abc").json() == {"embedding": raw}


def test_long_texts_are_cut_unless_the_client_forbids_it(shared):
    long = "word " * LENGTH
    assert ask(shared, EMBED, input=long).json()["prompt_eval_count"] == LENGTH
    refused(shared, EMBED, "input", input=long, truncate=False)
    refused(shared, EMBED, "input")
    refused(shared, EMBED, "input", input=["abc"] * 2049)
    refused(shared, "/api/embeddings", "prompt", prompt=["abc"])


# --- models ---

def test_lists(shared):
    tags, loaded = shared.get("/api/tags").json()["models"], shared.get("/api/ps").json()["models"]
    assert [m["name"] for m in tags] == [m["model"] for m in loaded] == [MODEL, "alias"]
    assert tags[0]["details"]["family"] and loaded[0]["context_length"] == LENGTH
    assert shared.get("/api/version").json() == shared.get("/version").json()


def test_show(shared):
    for name in ({"model": MODEL}, {"model": None, "name": MODEL}, {"model": f"{MODEL}:latest", "verbose": True}):
        shown = ask(shared, SHOW, **name).json()
        family = shown["model_info"]["general.architecture"]
        assert shown["model_info"][f"{family}.context_length"] == LENGTH
        assert {"completion", "embedding"} <= set(shown["capabilities"]) and "temperature" in shown["parameters"]
    refused(shared, SHOW, "name", 404, model=None, name="other")


@pytest.mark.parametrize("path", [CHAT, GENERATE, EMBED, "/api/embeddings", SHOW])
def test_names_have_tags(shared, path):
    body = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x"}
    assert ask(shared, path, model=f"{MODEL}:latest", **body).status_code == 200
    for name in ("other", f"{MODEL}:8b", f"{MODEL}:latest:latest", f"{MODEL}:"):
        refused(shared, path, "model", 404, model=name, **body)


@pytest.mark.parametrize("models", [[], ["second"]], ids=["one model", "two"])
def test_the_tag_of_a_name_without_one(start, tmp_path, models):
    """A name without a tag stands for its `latest`, and for no other tag: as in Ollama."""
    (tmp_path / "second").mkdir()
    more = [option for name in models for option in ("--model", str(tmp_path / name))]
    daemon = start("--served-model-name", "qwen2:latest,gemma:2b", *more)
    for path in (CHAT, SHOW):
        for name in ("qwen2", "qwen2:latest", "gemma:2b"):
            ask(daemon, path, model=name, messages=[{"role": "user", "content": "x"}])
        for name in ("gemma", "gemma:latest", "qwen2:2b"):
            refused(daemon, path, "model", 404, model=name, messages=[{"role": "user", "content": "x"}])


def test_errors_are_texts(start, fake):
    daemon = start("--api-key", "k")
    r = daemon.post(CHAT, {})
    assert r.status_code == 401 and isinstance(r.json()["error"], str)
    daemon = start()
    assert isinstance(daemon.post(CHAT, []).json()["error"], str)
    assert "fail" in refused(daemon, GENERATE, None, 500, prompt="fail now")
    *_, last = lines(daemon, GENERATE, prompt="fail later please")
    assert isinstance(last["error"], str)


def test_errors_of_paths_are_texts(shared):
    for r, status, code in ((shared.get(CHAT), 405, "method_not_allowed"), (shared.post("/api/tags", {}), 405, "method_not_allowed"),
                            (shared.post("/api/pull", {"model": "x"}), 404, "unknown_url"),
                            (shared.get("/api/chats"), 404, "unknown_url")):
        error = r.json()
        assert (r.status_code, error["code"], set(error)) == (status, code, {"error", "code"}) and isinstance(error["error"], str)
    assert shared.get("/v1/messages").json()["type"] == "error"  # Anthropic's form, by the same rule
    assert shared.get("/ap/chat").json()["error"]["code"] == "unknown_url"


def test_lists_refuse_in_texts(start):
    daemon = start("--api-key", "k")
    for path in ("/api/tags", "/api/ps", "/api/version"):
        assert daemon.get(path).status_code == 401 and isinstance(daemon.get(path).json()["error"], str)


# --- bodies without a type ---

FORM = "application/x-www-form-urlencoded"
PAGE = [{"Origin": "https://chat.example"}, {"Origin": "null"}, {"Referer": "https://chat.example/"},
        {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Mode": "no-cors"}]


def send(daemon, path, kind, **headers):
    """Sends a body that all of Ollama's routes read, with this Content-Type; None: without one."""
    body = json.dumps({"model": MODEL, "prompt": "x", "input": "x", "stream": False,
                       "messages": [{"role": "user", "content": "x"}]})
    typed = {} if kind is None else {"Content-Type": kind}
    return requests.post(daemon.url + path, data=body, headers={**typed, **headers}, timeout=60)


@pytest.mark.parametrize("path", [CHAT, GENERATE, EMBED, "/api/embeddings", SHOW])
def test_a_body_needs_no_type(shared, path):
    for kind in (None, FORM, FORM + "; charset=utf-8"):
        assert send(shared, path, kind).status_code == 200
    for kind in ("text/plain", "multipart/form-data", FORM + "x", "application/jsonx", ""):
        r = send(shared, path, kind)
        assert r.status_code == 415 and r.json()["code"] == "unsupported_media_type"


@pytest.mark.parametrize("page", PAGE, ids=str)
def test_a_body_of_a_page_needs_its_type(start, page):
    """A page of another site can post a form without a preflight request: a form that it posts does not run."""
    daemon = start("--cors-origin", "*")
    for kind in (None, FORM):
        r = send(daemon, CHAT, kind, **page)
        assert r.status_code == 415 and isinstance(r.json()["error"], str)
    assert daemon.metrics()["vllm:prompt_tokens_total",] == 0
    assert send(daemon, CHAT, "application/json", **page).status_code == 200


def test_progress(shared):
    parts = lines(shared, GENERATE, prompt="hello", return_progress=True)
    assert any("prompt_progress" in p for p in parts)


def test_usage_in_a_chat_is_the_same(shared):
    ours = shared.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "same"}], "temperature": 0,
                                                "stream": True, "stream_options": {"include_usage": True}})
    usage = json.loads(events(ours)[-2])["usage"]
    theirs = chat(shared, "same")
    assert (theirs["prompt_eval_count"], theirs["eval_count"]) == (usage["prompt_tokens"], usage["completion_tokens"])
