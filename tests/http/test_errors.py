"""Bad input of every kind: the OpenAI error object names the field, and the engine never sees it."""
import json
import threading

import pytest
import requests
from conftest import FAKE, LENGTH, MODEL, ROOT, chat_body

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}


def text_body(**fields):
    return {"model": MODEL, "prompt": "abc", "max_tokens": 4, **fields}


def message(**fields):
    return {"messages": [fields]}


def tool(**function):
    return {"tools": [{"type": "function", "function": function}]}


LONG_STOP = ["x"] * 257
# path, fields over a good body, param, code
INVALID = [
    (CHAT, {"temperature": 1e7}, "temperature"), (CHAT, {"temperature": -0.1}, "temperature"),
    (CHAT, {"temperature": "1"}, "temperature"), (CHAT, {"temperature": True}, "temperature"),
    (CHAT, {"repetition_detection": 3}, "repetition_detection"),
    (CHAT, {"repetition_detection": {"max_pattern_size": 2049, "min_count": 2}}, "repetition_detection.max_pattern_size"),
    (CHAT, {"repetition_detection": {"max_pattern_size": 4}}, "repetition_detection.min_count"),
    (CHAT, {"repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 5, "min_count": 2}},
     "repetition_detection.min_pattern_size"),
    (CHAT, {"xtc_probability": 1.1}, "xtc_probability"), (CHAT, {"xtc_threshold": -0.1}, "xtc_threshold"),
    (CHAT, {"top_p": 1.1}, "top_p"), (CHAT, {"top_p": -1}, "top_p"), (CHAT, {"min_p": 2}, "min_p"),
    (CHAT, {"top_k": -2}, "top_k"), (CHAT, {"top_k": 1.5}, "top_k"),
    (CHAT, {"presence_penalty": 2.5}, "presence_penalty"), (CHAT, {"frequency_penalty": -3}, "frequency_penalty"),
    (CHAT, {"repetition_penalty": 0}, "repetition_penalty"), (CHAT, {"repetition_penalty": -1}, "repetition_penalty"),
    (CHAT, {"repetition_penalty": 0.009}, "repetition_penalty"),
    (CHAT, {"max_tokens": 0}, "max_tokens"), (CHAT, {"max_tokens": -2}, "max_tokens"),
    (CHAT, {"max_tokens": "many"}, "max_tokens"), (CHAT, {"max_tokens": 2**40}, "max_tokens"),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    (CHAT, {"max_tokens": 3, "n_predict": -1}, "max_tokens"), (CHAT, {"n_predict": "x"}, "n_predict"),
    (CHAT, {"repetition_penalty": 1.5, "repeat_penalty": 1.1}, "repetition_penalty"),
    (CHAT, {"repeat_penalty": 0}, "repeat_penalty"), (CHAT, {"user": 5}, "user"),
    (CHAT, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (TEXT, {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"), (CHAT, {"timings": 1}, "timings"),
    (CHAT, {"include_reasoning": 0}, "include_reasoning"), (CHAT, {"echo": 1}, "echo"),
    (CHAT, {"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
    (CHAT, {"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids"),
    (TEXT, {"prompt": [{"role": "user", "content": "x"}]}, "prompt"),
    (TEXT, {"prompt": [[{"role": "user", "content": "x"}]]}, "prompt[0]"),
    (TEXT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    (CHAT, {"return_token_ids": 1}, "return_token_ids"),
    (CHAT, {"prompt_logprobs": -1}, "prompt_logprobs"), (TEXT, {"prompt_logprobs": True}, "prompt_logprobs"),
    (CHAT, {"separate_reasoning": 1}, "separate_reasoning"), (CHAT, {"session_id": 5}, "session_id"),
    (CHAT, {"continue_final_message": 1}, "continue_final_message"),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    (CHAT, {"continue_final_message": True, "messages": [{"role": "assistant", "content": " \n"}]},
     "messages[0].content"),
    (TEXT, {"prompt": ["a", ""]}, "prompt[1]"), (TEXT, {"prompt": ["a", True]}, "prompt[1]"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"min_tokens": -1}, "min_tokens"), (CHAT, {"min_tokens": 17}, "min_tokens"),
    (CHAT, {"n": 0}, "n"), (CHAT, {"n": 129}, "n"), (CHAT, {"n": "1"}, "n"),
    (CHAT, {"seed": 1.5}, "seed"), (CHAT, {"seed": 2**64}, "seed"), (CHAT, {"seed": "7"}, "seed"),
    (CHAT, {"seed": -2**63 - 1}, "seed"),
    (CHAT, {"stop": ""}, "stop"), (CHAT, {"stop": ["a", ""]}, "stop[1]"), (CHAT, {"stop": [1]}, "stop[0]"),
    (CHAT, {"stop": LONG_STOP}, "stop"), (CHAT, {"stop": {}}, "stop"), (CHAT, {"stop": "x" * 16385}, "stop"),
    (CHAT, {"stop_token_ids": 3}, "stop_token_ids"), (CHAT, {"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    (CHAT, {"stop_token_ids": [0, 10**9]}, "stop_token_ids[1]"), (CHAT, {"stop_token_ids": [0] * 257}, "stop_token_ids"),
    (CHAT, {"ignore_eos": 1}, "ignore_eos"),
    (CHAT, {"thinking_token_budget": -1}, "thinking_token_budget"), (CHAT, {"reasoning": {"max_tokens": "x"}}, "reasoning.max_tokens"),
    (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 1.5}}, "thinking.budget_tokens"), (TEXT, {"max_thinking_tokens": True}, "max_thinking_tokens"),
    (CHAT, {"speculate": -1}, "speculate"), (TEXT, {"speculate": "on"}, "speculate"), (CHAT, {"speculate": 1.5}, "speculate"),
    (CHAT, {"logprobs": 1}, "logprobs"), (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"), (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    (CHAT, {"stream": "yes"}, "stream"), (CHAT, {"stream_options": {}}, "stream_options"),
    (CHAT, {"stream": True, "stream_options": 1}, "stream_options"),
    (CHAT, {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    (CHAT, {"logit_bias": "x"}, "logit_bias"), (CHAT, {"logit_bias": {"x": 1}}, "logit_bias.x"),
    (CHAT, {"logit_bias": {"": 1}}, "logit_bias."), (CHAT, {"logit_bias": {"5x": 1}}, "logit_bias.5x"),
    (CHAT, {"logit_bias": {"-1": 1}}, "logit_bias.-1"), (CHAT, {"logit_bias": {"1": 101}}, "logit_bias.1"),
    (CHAT, {"logit_bias": {"99999999999999999999": 1}}, "logit_bias.99999999999999999999"),
    (CHAT, {"logit_bias": {"1": "x"}}, "logit_bias.1"),
    (CHAT, {"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    (CHAT, {"model": 5}, "model"),
    (CHAT, {"messages": []}, "messages"), (CHAT, {"messages": "hi"}, "messages"), (CHAT, {"messages": {}}, "messages"),
    (CHAT, {"messages": ["hi"]}, "messages[0]"), (CHAT, {"messages": [USER, 1]}, "messages[1]"),
    (CHAT, message(role=1, content="x"), "messages[0].role"),
    (CHAT, message(role="", content="x"), "messages[0].role"),
    (CHAT, message(role="user", content=1), "messages[0].content"),
    (CHAT, message(role="user", content={}), "messages[0].content"),
    (CHAT, message(role="user", content=["x"]), "messages[0].content[0]"),
    (CHAT, message(role="user", content=[{"text": "x"}]), "messages[0].content[0].type"),
    (CHAT, message(role="user", content=[{"type": "text"}]), "messages[0].content[0].text"),
    (CHAT, message(role="assistant", tool_calls={}), "messages[0].tool_calls"),
    (CHAT, message(role="assistant", tool_calls=[{}]), "messages[0].tool_calls[0].function"),
    (CHAT, message(role="assistant", tool_calls=[{"function": {"name": 1}}]), "messages[0].tool_calls[0].function.name"),
    (CHAT, message(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": []}}]),
     "messages[0].tool_calls[0].function.arguments"),
    (CHAT, message(role="tool", content="x", tool_call_id=1), "messages[0].tool_call_id"),
    (CHAT, {"tools": {}}, "tools"), (CHAT, {"tools": [1], "tool_choice": "none"}, "tools[0]"),
    (CHAT, {"tools": [{"type": 1}]}, "tools[0].type"), (CHAT, {"tools": [{"type": "function", "function": 1}]},
                                                        "tools[0].function"),
    (CHAT, tool(name=1), "tools[0].function.name"), (CHAT, tool(name=""), "tools[0].function.name"),
    (CHAT, tool(name="a b"), "tools[0].function.name"), (CHAT, tool(name="x" * 129), "tools[0].function.name"),
    (CHAT, tool(name="f", description=1), "tools[0].function.description"),
    (CHAT, tool(name="f", parameters=[]), "tools[0].function.parameters"),
    (CHAT, tool(name="f", strict="yes"), "tools[0].function.strict"),
    (CHAT, {"tool_choice": 1}, "tool_choice"), (CHAT, {"parallel_tool_calls": 1}, "parallel_tool_calls"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"), (CHAT, {"response_format": "text"}, "response_format"),
    (CHAT, {"response_format": {"type": 1}}, "response_format.type"), (CHAT, {"guided_json": 1}, "guided_json"),
    (CHAT, {"guided_json": "{"}, "guided_json"), (CHAT, {"guided_json": {"type": "x"}}, "guided_json.type"),
    (CHAT, {"guided_json": False}, "guided_json"), (CHAT, {"guided_regex": "("}, "guided_regex"),
    (CHAT, {"guided_regex": 1}, "guided_regex"), (CHAT, {"guided_choice": []}, "guided_choice"),
    (CHAT, {"guided_choice": ["a", 1]}, "guided_choice[1]"),
    (CHAT, {"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex"),
    (CHAT, {"response_format": {"type": "json_object"}, "json_schema": {}}, "json_schema"),
    (CHAT, {"structured_outputs": []}, "structured_outputs"), (TEXT, {"grammar": 'root ::= a'}, "grammar"),
    (CHAT, {"structured_outputs": {"grammar": "start: ("}}, "structured_outputs.grammar"),
    (CHAT, {"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
    (CHAT, {"structured_outputs": {"regex": "a{2,1}"}}, "structured_outputs.regex"),
    (CHAT, {"chat_template_kwargs": []}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    (CHAT, {"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token"),
    (CHAT, {"add_generation_prompt": "no"}, "add_generation_prompt"),
    (CHAT, {"cache_salt": 1}, "cache_salt"), (CHAT, {"prompt_cache_key": "x" * 1025}, "prompt_cache_key"),
    (CHAT, {"kv": []}, "kv"), (CHAT, {"kv": {"policy": "lru"}}, "kv.policy"), (CHAT, {"kv": {"policy": 1}}, "kv.policy"),
    (CHAT, {"kv": {"budget": 0}}, "kv.budget"), (CHAT, {"kv": {"budget": 1.5}}, "kv.budget"),
    (CHAT, {"kv": {"budget": 2**40}}, "kv.budget"), (CHAT, {"kv": {"buffer": -1}}, "kv.buffer"),
    (CHAT, {"kv": {"chunk": 0}}, "kv.chunk"), (CHAT, {"kv": {"sinks": -1}}, "kv.sinks"),
    (CHAT, {"kv": {"recent": "all"}}, "kv.recent"), (CHAT, {"kv": {"horizon": "infinite"}}, "kv.horizon"),
    (CHAT, {"kv": {"reuse": 1}}, "kv.reuse"),
    (CHAT, {"kv": {"report": "all"}}, "kv.report"), (CHAT, {"kv": {"report": True}}, "kv.report"),
    (TEXT, {"prompt": 1}, "prompt"), (TEXT, {"prompt": {}}, "prompt"), (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": [[]]}, "prompt[0]"), (TEXT, {"prompt": [-1]}, "prompt[0]"),
    (TEXT, {"prompt": [1, None]}, "prompt[1]"), (TEXT, {"prompt": [1, 2.5]}, "prompt[1]"),
    (TEXT, {"prompt": [[1, 10**9]]}, "prompt[0][1]"), (TEXT, {"prompt": [True]}, "prompt[0]"),
    (TEXT, {"logprobs": 21}, "logprobs"), (TEXT, {"logprobs": True}, "logprobs"), (TEXT, {"echo": "yes"}, "echo"),
    (TEXT, {"max_tokens": 0}, "max_tokens"), (TEXT, {"add_special_tokens": 1}, "add_special_tokens"),
    ("/tokenize", {"prompt": [1, 2]}, "prompt"), ("/tokenize", {"prompt": "x", "return_token_strs": 1},
                                                  "return_token_strs"),
    ("/detokenize", {"tokens": "x"}, "tokens"), ("/detokenize", {"tokens": [1, -5]}, "tokens[1]"),
]
UNSUPPORTED = [
    (CHAT, {"audio": {"voice": "x"}}, "audio"), (CHAT, {"functions": [{}]}, "functions"),
    (CHAT, {"function_call": "auto"}, "function_call"), (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"guided_json": {"unevaluatedItems": False}}, "guided_json.unevaluatedItems"),
    (CHAT, {"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
    (TEXT, {"grammar": 'root ::= <think>'}, "grammar"), (CHAT, {"guided_grammar": "%declare A"}, "guided_grammar"),
    (CHAT, {"chat_template": "{{ x }}"}, "chat_template"),
    (CHAT, {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    (CHAT, {"tools": [{"type": "custom"}]}, "tools[0].type"),
    (CHAT, {"regex": "a(?<=b)"}, "regex"), (CHAT, {"typical_p": 0.5}, "typical_p"),
    (CHAT, {"mirostat": 2}, "mirostat"),
    (CHAT, {"skip_special_tokens": False}, "skip_special_tokens"),
    (CHAT, message(role="user", content=[{"type": "image_url", "image_url": {"url": "x"}}]),
     "messages[0].content[0].type"),
    (TEXT, {"best_of": 2}, "best_of"), (TEXT, {"suffix": "x"}, "suffix"),
    (TEXT, {"n": 2, "best_of": 3}, "best_of"), (TEXT, {"top_logprobs": 2}, "top_logprobs"),
    (TEXT, {"prompt": ["a", "b"], "kv": {"report": "lengths"}}, "kv.report"), (TEXT, {"use_beam_search": True}, "use_beam_search"),
]
MISSING = [
    (CHAT, {"messages": None}, "messages"), (CHAT, message(content="x"), "messages[0].role"),
    (CHAT, message(role="user"), "messages[0].content"), (CHAT, message(role="user", content=None),
                                                          "messages[0].content"),
    (TEXT, {"prompt": None}, "prompt"), ("/tokenize", {}, "prompt"), ("/detokenize", {}, "tokens"),
]
CASES = ([(*c, "invalid_value") for c in INVALID] + [(*c, "unsupported_parameter") for c in UNSUPPORTED]
         + [(*c, "missing_required_parameter") for c in MISSING]
         + [(CHAT, {"kv": {"bugdet": 5}}, "kv.bugdet", "unknown_parameter")])


def body_for(path, fields):
    if path == CHAT:
        return chat_body(**fields)
    return text_body(**fields) if path == TEXT else {"model": MODEL, **fields}


def check_error(response, status, param, code):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    length = {"n_prompt_tokens", "n_ctx"} if code == "context_length_exceeded" else set()
    assert set(error) == {"message", "type", "param", "code"} | length
    assert (error["param"], error["code"]) == (param, code), error
    assert error["message"] and error["type"]
    return error["message"]


@pytest.mark.parametrize("path,fields,param,code", CASES, ids=lambda v: v if isinstance(v, str) else None)
def test_field(shared, path, fields, param, code):
    before = shared.metrics()
    message = check_error(shared.post(path, body_for(path, fields)), 400, param, code)
    assert param in message
    after = shared.metrics()
    for name in ("vllm:prompt_tokens_total", "keepd_conversation_misses_total", "keepd_conversation_hits_total"):
        assert before[name,] == after[name,]


def test_neutral_values_are_accepted(shared):
    neutral = dict(n=1, audio=None, functions=None, function_call="none", modalities=["text"], tool_choice="none",
                   response_format={"type": "text"}, logit_bias={}, stop=None, seed=None, temperature=None, top_p=None,
                   top_k=-1, min_p=0, user="u", metadata={"a": "b"}, store=False, stream=False, stream_options=None,
                   logprobs=False, top_logprobs=0, tools=None, parallel_tool_calls=True, service_tier="auto", verbosity="low",
                   max_completion_tokens=None, presence_penalty=0, frequency_penalty=0, unknown_field={"x": 1},
                   skip_special_tokens=True, chat_template_kwargs={"enable_thinking": False}, kv={})
    assert shared.chat(**neutral).status_code == 200
    assert shared.post(TEXT, text_body(best_of=1, suffix=None, echo=False, logprobs=None, n=1)).status_code == 200


def test_message_shapes(shared):
    messages = [{"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
                 "name": "bob"},
                {"role": "assistant", "content": None, "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
                {"role": "tool", "tool_call_id": "1", "content": "42"},
                {"role": "user", "content": "and?"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert shared.chat(messages=messages, tools=tools, tool_choice="none").status_code == 200


def test_strict_params(start):
    daemon = start("--strict-params")
    check_error(daemon.chat(tempurature=1), 400, "tempurature", "unknown_parameter")
    check_error(daemon.post(TEXT, text_body(messages=[])), 400, "messages", "unknown_parameter")
    assert daemon.chat(kv={"budget": 64}, ignore_eos=False, user="x").status_code == 200


def test_unknown_model(shared):
    text = check_error(shared.chat(model="gpt-4"), 404, "model", "model_not_found")
    assert text == f"The model `gpt-4` does not exist or you do not have access to it. Served here: `{MODEL}`, `alias`."
    body = chat_body()
    del body["model"]
    assert shared.post(CHAT, body).status_code == 200, "the only model is the default"
    assert shared.chat(model="alias").status_code == 200


def test_context_length(shared):
    text = "hello world, " * LENGTH
    limit = f"maximum context length is {LENGTH} tokens"
    assert limit in check_error(shared.chat(text, max_tokens=None), 400, "messages", "context_length_exceeded")
    text = check_error(shared.chat(max_tokens=LENGTH), 400, "max_tokens", "context_length_exceeded")
    assert limit in text
    most = int(text.split("'max_tokens' may be up to ")[1].split()[0])
    r = shared.post("/v1/responses", {"model": MODEL, "input": "hello", "max_output_tokens": LENGTH})
    assert "'max_output_tokens' may be up to " in check_error(r, 400, "max_output_tokens", "context_length_exceeded")
    assert shared.chat(max_tokens=most).status_code == 200 and shared.chat(max_tokens=most + 1).status_code == 400
    assert limit in check_error(shared.post(TEXT, text_body(prompt=[1] * LENGTH)), 400, "prompt",
                                "context_length_exceeded")
    assert limit in check_error(shared.post(TEXT, text_body(prompt=[65] * (LENGTH - 3))), 400, "max_tokens",
                                "context_length_exceeded")
    answer = shared.post(TEXT, text_body(prompt=[65] * (LENGTH - 4), ignore_eos=True))
    assert answer.status_code == 200 and answer.json()["usage"]["total_tokens"] == LENGTH


def test_absent_max_tokens_is_clamped(shared):
    answer = shared.chat("ab", max_tokens=None, ignore_eos=True).json()
    assert answer["usage"]["total_tokens"] == LENGTH and answer["choices"][0]["finish_reason"] == "length"
    body = text_body(ignore_eos=True)
    del body["max_tokens"]
    assert shared.post(TEXT, body).json()["usage"]["completion_tokens"] == 16, "OpenAI's default of completions"


def test_empty_prompt(shared):
    if FAKE:
        check_error(shared.post(TEXT, text_body(prompt="")), 400, "prompt", "invalid_value")


def test_budget_cap(start):
    daemon = start("--kv-budget-max", "128", "--kv-budget", "64")
    check_error(daemon.chat(kv={"budget": 129}), 400, "kv.budget", "invalid_value")
    details = daemon.chat(kv={"budget": 128}).json()["usage"]["kv_details"]
    assert details["budget"] == 128
    assert daemon.chat().json()["usage"]["kv_details"]["budget"] == 64
    check_error(daemon.chat(kv={"policy": "full"}), 400, "kv.policy", "invalid_value")


def test_an_unknown_policy_is_told_the_known_ones(shared):
    text = check_error(shared.chat(kv={"policy": "lru"}), 400, "kv.policy", "invalid_value")
    assert "'lru'" in text and all(name in text for name in ("full", "streaming", "trimkv", "global"))


def test_full_policy_has_no_budget(shared):
    assert shared.chat(kv={"policy": "full"}).json()["usage"]["kv_details"]["budget"] is None


def test_template_refusal(shared, fake):
    text = check_error(shared.chat("refuse this template"), 400, "messages", "invalid_value")
    assert "chat template line 1: the template refuses it" in text


BAD_JSON = [b"", b" ", b"{", b"[]", b"null", b"5", b"\"x\"", b"{\"model\":\"tiny\",}", b"{'model':1}", b"\xff\xfe{}",
            b"\xef\xbb\xbf{}", b"{\"a\":1e999}x", b"{} {}", b"\x00",
            b"{\"a\":\"\xc3\x28\"}"]


@pytest.mark.parametrize("body", BAD_JSON, ids=range(len(BAD_JSON)))
def test_bad_json(shared, body):
    for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
        r = shared.http.post(shared.url + path, data=body, headers={"Content-Type": "application/json"}, timeout=60)
        check_error(r, 400, None, None)


def nested(depth):
    return b'{"model":"tiny","metadata":' + b"[" * depth + b"]" * depth + b',"prompt":"a","max_tokens":1}'


def test_nesting(shared):
    """JSON that is nested too deeply still gets an error about its depth."""
    headers = {"Content-Type": "application/json"}
    assert shared.http.post(shared.url + TEXT, data=nested(511), headers=headers, timeout=60).status_code == 200
    for depth in (512, 5000):
        r = shared.http.post(shared.url + TEXT, data=nested(depth), headers=headers, timeout=60)
        text = check_error(r, 400, None, None)
        assert "nested deeper than 512" in text and "not valid JSON" not in text


def test_body_of_countless_values(shared):
    """Values of a few bytes each would take a hundred bytes in memory."""
    zeros = b"0," * (3 << 20) + b"0]}"
    for body in (b'{"model":"tiny","prompt":[' + zeros, b'{"model":"tiny","messages":[],"user":[' + zeros):
        r = shared.http.post(shared.url + TEXT, data=body, headers={"Content-Type": "application/json"}, timeout=60)
        assert "JSON body" in (text := check_error(r, 400, None, None)) and "JSON values" in text


def test_a_million_token_ids(shared, fake):
    """A text that may outgrow the context may be given as ids."""
    body = {"model": MODEL, "prompt": [65] * 1_000_000, "max_tokens": 1, "kv": {"overflow": "shift", "retain": False}}
    assert shared.post(TEXT, body).json()["usage"]["prompt_tokens"] == 1_000_000


def test_large_trees_share_the_memory_of_bodies(start, fake, tmp_path):
    gate = tmp_path / "gate"
    daemon = start("--max-body-bytes", "4M", env={"KEEPD_FAKE_GATE": str(gate)})
    body = {**chat_body("at the gate", max_tokens=1), "unknown": [0] * 1_048_000}
    codes = []
    ask = lambda: codes.append(requests.post(daemon.url + CHAT, json=body, timeout=60).status_code)
    waiting = [threading.Thread(target=ask) for _ in range(2)]
    for thread in waiting:
        thread.start()
    daemon.wait("the refusal of the second", lambda: codes)
    assert codes == [503] and daemon.chat(max_tokens=1).status_code == 200, "a small one has room"
    gate.touch()
    for thread in waiting:
        thread.join()
    assert sorted(codes) == [200, 503]
    assert daemon.post(CHAT, body).status_code == 200, "the memory is given back"


def test_json_suite(shared):
    """JSONTestSuite: every n_ text is a 400, as a whole body and as a member of one."""
    folder = ROOT / "tests" / "data" / "json" / "test_parsing"
    if not folder.is_dir():
        pytest.skip("skip: tests/data/json is not here")
    files = sorted(folder.glob("n_*.json"))
    assert len(files) > 150
    for file in files:
        r = shared.http.post(shared.url + CHAT, data=file.read_bytes(), headers={"Content-Type": "application/json"},
                             timeout=60)
        check_error(r, 400, None, None)


def test_json_suite_never_crashes(shared):
    for file in sorted((ROOT / "tests" / "data" / "json" / "test_parsing").glob("[iy]_*.json")):
        r = shared.http.post(shared.url + CHAT, data=file.read_bytes(), headers={"Content-Type": "application/json"},
                             timeout=60)
        assert r.status_code == 400 and r.json()["error"]


def test_the_body_that_was_cut_off(shared):
    for body, text in ((b'{"messages": [{"role": "user", "content": "hel', "unfinished string at byte 46, where the text ends"),
                       (b'{"messages": [', "expected a value at byte 14, where the text ends"),
                       (b'{"a":1 x}', "expected ',' or '}' at byte 7. ")):
        r = shared.http.post(shared.url + CHAT, data=body, headers={"Content-Type": "application/json"}, timeout=60)
        check_error(r, 400, None, None)
        assert text in r.json()["error"]["message"], r.text


@pytest.mark.parametrize("path, body, field, text", [
    ("/v1/responses", {"messages": []}, "messages", "'messages' is 'input' in requests to /v1/responses"),
    ("/v1/responses", {"input": "x", "max_tokens": 4}, "max_tokens", "'max_tokens' is 'max_output_tokens'"),
    ("/v1/responses", {"prompt": "x"}, "prompt", "this server does not support it"),
    ("/v1/completions", {"messages": []}, "prompt", "A request with 'messages' is for POST /v1/chat/completions."),
    (CHAT, {"prompt": "x"}, "messages", "A request with 'prompt' is for POST /v1/completions."),
    (CHAT, {"input": "x"}, "messages", "A request with 'input' is for POST /v1/responses."),
    (CHAT, {}, "messages", "Missing required parameter: 'messages'.")])
def test_fields_of_another_route(shared, path, body, field, text):
    error = shared.post(path, body).json()["error"]
    assert error["param"] == field and text in error["message"], error


@pytest.mark.parametrize("fields, field, text", [
    ({"functions": [{"name": "f"}]}, "functions", "'functions' is the old form of 'tools'"),
    ({"function_call": {"name": "f"}}, "function_call", "'function_call' is the old form of 'tool_choice'"),
    ({"function_call": "auto"}, "function_call", '{"type": "function", "function": {...}}'),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools[0].function",
     "Put name, description, parameters and strict into it: only /v1/responses has them here.")])
def test_what_to_do_next(shared, fake, fields, field, text):
    error = shared.chat(**fields).json()["error"]
    assert error["param"] == field and text in error["message"], error


@pytest.mark.skipif(FAKE, reason="needs a model")
def test_an_unknown_role_is_named_by_its_message(shared):
    messages = [{"role": "user", "content": "a"}, {"role": "usr", "content": "b"}]
    text = check_error(shared.chat(messages=messages), 400, "messages[1].role", "invalid_value")
    assert "does not know the role 'usr'; roles are system, developer, user, assistant, tool" in text


def test_a_key_that_is_twice_there(shared):
    for body, key in ((b'{"messages":[],"messages":[]}', "messages"), (b'{"messages":[{"role":"user","content":"a","role":"user"}]}', "role")):
        r = shared.http.post(shared.url + CHAT, data=body, headers={"Content-Type": "application/json"}, timeout=60)
        assert f"the key '{key}' is twice in one object; send it once" in check_error(r, 400, key, "invalid_value")


def test_routes_that_are_near(shared):
    for path, near in (("/v1/chat/completion", CHAT), ("/v1/v1/chat/completions", CHAT), (CHAT + "/", CHAT), ("/v1/message", "/v1/messages"),
                       ("/V1/Models", "/v1/models"), ("/healthz", "/health"), ("/api/v1/responses", "/v1/responses")):
        message = shared.post(path, {}).json()["error"]["message"]
        assert message == f"Invalid URL (POST {path}). Did you mean {near}?", message
    for path in ("/nothing", "/v1", "/x"):
        message = shared.post(path, {}).json()["error"]["message"]
        assert "Did you mean" not in message and "/v1/chat/completions" in message and "/openapi.json" in message, message


def test_routes(shared):
    check_error(shared.get("/v1/nothing"), 404, None, "unknown_url")
    assert "GET /v1/nothing" in shared.get("/v1/nothing").json()["error"]["message"]
    check_error(shared.get("/v1/models/"), 404, None, "unknown_url")
    check_error(shared.get("/v1/models/none"), 404, "model", "model_not_found")
    r = shared.get(CHAT)
    assert check_error(r, 405, None, "method_not_allowed") == f"Not allowed: GET {CHAT}; use POST."
    assert r.headers["allow"] == "POST"
    r = shared.http.delete(shared.url + "/v1/models", timeout=60)
    assert check_error(r, 405, None, "method_not_allowed") == "Not allowed: DELETE /v1/models; use GET, HEAD."
    assert r.headers["allow"] == "GET, HEAD"


def test_content_type(shared):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""):
        r = shared.http.post(shared.url + CHAT, data=json.dumps(chat_body()), headers={"Content-Type": kind},
                             timeout=60)
        check_error(r, 415, None, "unsupported_media_type")
    for kind in ("application/json; charset=utf-8", "Application/JSON"):
        r = shared.http.post(shared.url + CHAT, data=json.dumps(chat_body()), headers={"Content-Type": kind},
                             timeout=60)
        assert r.status_code == 200


def test_a_nul_is_shown_as_one_character(shared):
    error = shared.chat(model="a\0b\0\0").json()["error"]
    assert "`a\ufffdb\ufffd\ufffd`" in error["message"]
    param = shared.chat(kv={"a\0": 1}).json()["error"]["param"]
    assert param == "kv.a\ufffd"
