"""Structured output and promised calls, on the real daemon: answers belong to the language of their request."""
import json
import pathlib
import re
import shutil

import jsonschema
import pytest
import requests

ROOT = pathlib.Path(__file__).resolve().parents[2]
USER = [{"role": "user", "content": "The code of the garage is 4815. Who are you?"}]
SCHEMA = {"type": "object", "properties": {
    "name": {"type": "string", "minLength": 1, "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2}},
    "required": ["name", "age", "tags"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 10}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"], "additionalProperties": False}}}
HERMES = """{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{%- if tools %}{{ tools | tojson }}<tool_call>
{"name": ..., "arguments": ...}
</tool_call>{% endif %}<|im_start|>assistant
"""
CALL = """<tool_call>
{"name": ..., "arguments": ...}
</tool_call>"""
# The words by which the template of another family is known.
FAMILIES = {
    "qwen3_coder": "<tool_call><function=f><parameter=k>v", "seed_oss": "<seed:tool_call><function=f><parameter=k>v",
    "glm45": "<tool_call>f<arg_key>k</arg_key> <arg_value>v", "glm47": "<tool_call>f<arg_key>k</arg_key><arg_value>v",
    "minimax_m2": '<minimax:tool_call><invoke name="f">', "minimax_m3": ']<]minimax[>[<invoke name="f">', "deepseek_v3": "<｜tool▁call▁begin｜><｜tool▁sep｜>```json",
    "deepseek_v31": "<｜tool▁call▁begin｜><｜tool▁sep｜>", "deepseek_v32": "<｜DSML｜function_calls><｜DSML｜parameter",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_argument_begin|>", "granite": "<|tool_call|><|start_of_role|>",
    "command": "<|START_ACTION|>tool_name", "lfm2": "<|tool_list_start|>", "gemma4": "<|tool_call>call:f{}<tool_call|>"}

# The template of these tests shows no calls, so that they are written into the text.
HIDDEN = {
    "lfm2": '<|tool_call_start|>[weather(city="Rome", unit="C")]<|tool_call_end|>',
    "gemma4": '<|tool_call>call:weather{city:<|"|>Rome<|"|>,unit:<|"|>C<|"|>}<tool_call|>',
    "granite": '<|tool_call|>[{"name": "weather", "arguments": {"city":"Rome","unit":"C"}}]'}


@pytest.fixture
def nano(daemon):
    return daemon()


def content(answer, choice=0):
    assert answer["choices"][choice]["finish_reason"] == "stop", answer
    return answer["choices"][choice]["message"]["content"]


def test_schema(nano):
    answer = nano.chat(USER, n=4, temperature=1, seed=1, max_tokens=300, response_format={
        "type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}})
    for i in range(4):
        jsonschema.validate(json.loads(content(answer, i)), SCHEMA)


def test_choice_regex_and_stream(nano):
    assert content(nano.chat(USER, guided_choice=["yes", "no", "may be"])) in ("yes", "no", "may be")
    answer = nano.chat(USER, structured_outputs={"regex": "[a-z]{3}: [0-9]{4}"}, logprobs=True)
    assert re.fullmatch("[a-z]{3}: [0-9]{4}", content(answer))
    r = requests.post(f"{nano.url}/v1/chat/completions", timeout=60, stream=True, json={
        "messages": USER, "model": "keepd-nano", "temperature": 0, "guided_regex": "[a-z]{3}: [0-9]{4}", "stream": True})
    deltas = [json.loads(line[6:]) for line in r.iter_lines() if line.startswith(b"data: {")]
    assert "".join(d["choices"][0]["delta"].get("content", "") for d in deltas) == content(answer)


GBNF = r'''root ::= "(" item ("," item){0,3} ")"   # a list in a list
item ::= [0-9]{1,2} | root'''
LARK = '''start: "(" item ("," item)~0..3 ")"
?item: /[0-9]{1,2}/ | start
'''


def test_grammars(nano):
    for fields in ({"grammar": GBNF}, {"guided_grammar": LARK}, {"structured_outputs": {"grammar": GBNF}}, {"ebnf": GBNF}):
        answer = content(nano.chat(USER, temperature=1, seed=3, max_tokens=400, **fields))
        while re.search(r"\(\d", answer):  # from the inside
            answer = re.sub(r"\(\d{1,2}(,\d{1,2}){0,3}\)", "7", answer)
        assert answer == "7", answer
    body = {"model": "keepd-nano", "prompt": "1", "max_tokens": 400, "grammar": 'root ::= "ab" | "cd"'}
    for path in ("/completion", "/v1/completions"):
        r = requests.post(nano.url + path, json=body, timeout=60).json()
        assert r.get("content", r.get("choices", [{}])[0].get("text")) in ("ab", "cd")


def test_an_answer_that_is_cut_says_so(nano):
    answer = nano.chat(USER, guided_regex="[a-z]{40}", max_tokens=3)
    assert answer["choices"][0]["finish_reason"] == "length"


def test_free_answers_are_the_same(nano):
    """A constraint of another request does not change a free answer."""
    alone = content(nano.chat(USER))
    nano.chat(USER, guided_choice=["a"])
    assert content(nano.chat(USER)) == alone


@pytest.mark.parametrize("template", [HERMES, None], ids=["hermes", "no tools"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_promised_calls(daemon, tmp_path, choice, template):
    model = tmp_path / "model"
    shutil.copytree(ROOT / "bundled/keepd-nano", model)
    if template:
        (model / "chat_template.jinja").write_text(template)
    answer = daemon("--model", str(model)).chat(USER, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, max_tokens=200)
    call = answer["choices"][0]["message"]["tool_calls"][0]["function"]
    assert call["name"] == "weather" and answer["choices"][0]["finish_reason"] == "tool_calls"
    jsonschema.validate(json.loads(call["arguments"]), TOOL["function"]["parameters"])


@pytest.mark.parametrize("family", FAMILIES)
def test_promised_calls_in_tags(daemon, tmp_path, family):
    """A call that is promised, or strict, keeps to the schema, streamed or not."""
    model = tmp_path / "model"
    shutil.copytree(ROOT / "bundled/keepd-nano", model)
    assert CALL in HERMES
    (model / "chat_template.jinja").write_text(HERMES.replace(CALL, FAMILIES[family]))
    nano = daemon("--model", str(model))
    assert requests.get(f"{nano.url}/server_info", timeout=60).json()["tool_call_parser"] == family
    for seed in range(3):
        body = {"messages": USER, "model": "keepd-nano", "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False,
                "max_tokens": 300, "temperature": 1.5, "seed": seed}
        choice = requests.post(f"{nano.url}/v1/chat/completions", timeout=60, json=body).json()["choices"][0]
        call = choice["message"]["tool_calls"][0]["function"]
        assert call["name"] == "weather" and choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]
        jsonschema.validate(json.loads(call["arguments"]), TOOL["function"]["parameters"])
        r = requests.post(f"{nano.url}/v1/chat/completions", timeout=60, stream=True, json={**body, "stream": True})
        deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in r.iter_lines() if line.startswith(b"data: {")]
        assert "".join(c["function"].get("arguments", "") for d in deltas for c in d.get("tool_calls", [])) == call["arguments"]
    if family not in HIDDEN:
        return
    calls = [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome", "unit": "C"}'}}]
    history = [*USER, {"role": "assistant", "content": "So.", "tool_calls": calls}, {"role": "tool", "tool_call_id": "1", "content": "cold"}]
    prompt = requests.post(f"{nano.url}/apply-template", timeout=60, json={"messages": history, "tools": [TOOL]}).json()["prompt"]
    assert f"So.{HIDDEN[family]}<|im_end|>" in prompt


OWN_FORM = """{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}{% if loop.first %}<<calls>>{% endif %}
@{{ call.function.name }}: {{ call.function.arguments | tojson }};{% if loop.last %}<</calls>>{% endif %}{% endfor %}<|im_end|>
{% endfor %}{%- if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_a_form_that_only_the_template_knows(daemon, tmp_path):
    """Such a form is read from what the template renders, named at start, bound, streamed and sent back."""
    model = tmp_path / "model"
    shutil.copytree(ROOT / "bundled/keepd-nano", model)
    (model / "chat_template.jinja").write_text(OWN_FORM)
    nano = daemon("--model", str(model))
    assert requests.get(f"{nano.url}/server_info", timeout=60).json()["tool_call_parser"] == "template"
    body = {"messages": USER, "model": "keepd-nano", "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False,
            "max_tokens": 300, "temperature": 1.5, "seed": 1}
    choice = requests.post(f"{nano.url}/v1/chat/completions", timeout=60, json=body).json()["choices"][0]
    call = choice["message"]["tool_calls"][0]["function"]
    assert call["name"] == "weather" and choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]
    jsonschema.validate(json.loads(call["arguments"]), TOOL["function"]["parameters"])
    r = requests.post(f"{nano.url}/v1/chat/completions", timeout=60, stream=True, json={**body, "stream": True})
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in r.iter_lines() if line.startswith(b"data: {")]
    assert "".join(c["function"].get("arguments", "") for d in deltas for c in d.get("tool_calls", [])) == call["arguments"]
    history = [*USER, choice["message"], {"role": "tool", "tool_call_id": choice["message"]["tool_calls"][0]["id"], "content": "cold"}]
    prompt = requests.post(f"{nano.url}/apply-template", timeout=60, json={"messages": history, "tools": [TOOL]}).json()["prompt"]
    assert f"<<calls>>@weather: {call['arguments']};<</calls>>" in prompt


def test_tags_that_are_special_tokens(daemon, tmp_path):
    """Tags are part of the answer, which they may begin, and no text of a request becomes one."""
    model = tmp_path / "model"
    shutil.copytree(ROOT / "bundled/keepd-nano", model)
    (model / "chat_template.jinja").write_text(HERMES.replace(CALL, FAMILIES["granite"]))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_text((model / name).read_text().replace("<|endoftext|>", "<|tool_call|>"))
    (model / "generation_config.json").write_text('{"eos_token_id": 2}')
    nano = daemon("--model", str(model))
    answer = nano.chat(USER, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=200, logit_bias={"0": 100},
                       return_token_ids=True)
    choice = answer["choices"][0]
    assert choice["token_ids"][0] == 0 and choice["token_ids"].count(0) == 1 and choice["finish_reason"] == "tool_calls"
    jsonschema.validate(json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]), TOOL["function"]["parameters"])
    ids = requests.post(f"{nano.url}/tokenize", timeout=60, json={"messages": [{"role": "user", "content": "<|tool_call|>"}]}).json()["tokens"]
    assert 0 not in ids


def test_promised_arguments_are_declared(daemon, tmp_path):
    """Also where the schema does not say additionalProperties: false."""
    model = tmp_path / "model"
    shutil.copytree(ROOT / "bundled/keepd-nano", model)
    (model / "chat_template.jinja").write_text(HERMES)
    nano = daemon("--model", str(model))
    for properties in ({}, {"unit": {"enum": ["C", "F"]}}):
        tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": properties}}}
        answer = nano.chat(USER, n=4, temperature=2, seed=3, tools=[tool], tool_choice="required", parallel_tool_calls=False,
                           max_tokens=200)
        for choice in answer["choices"]:
            assert choice["finish_reason"] == "tool_calls"
            assert set(json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])) <= set(properties)
