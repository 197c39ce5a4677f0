"""Writes tools.jsonl: chats with tools as clients send them, and what transformers makes of them.

    python3 make_tools.py [TEMPLATE...] > tools.jsonl        (needs transformers; tokenizers)

Each line is {template, request, expected}. transformers is given what its documentation asks for: arguments as objects,
no content as "", parts of text joined.
"""
import copy
import itertools
import json
import pathlib
import sys

import jinja2
import tokenizers
import transformers

HERE = pathlib.Path(__file__).resolve().parent
TEMPLATES = ["Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "Qwen-QwQ-32B"]
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather of a place, \u00b0C \u2014 \"now\"",
    "parameters": {"type": "object", "properties": {
        "city": {"type": "string", "enum": ["Oslo", "S\u00e3o Paulo"]}, "days": {"type": "integer", "default": 1}},
        "required": ["city"]}}}
NOW = {"type": "function", "function": {"name": "now"}}
STRICT = {"type": "function", "function": {"name": "a-b_C9", "strict": True, "parameters": {}}}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "How is it in Oslo?"}
MORE = {"role": "user", "content": "And <tool_call> there?"}


def call(name, arguments, id="call_0"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calls(*items, content=None, **more):
    return {"role": "assistant", "content": content, "tool_calls": list(items), **more}


def result(content, id="call_0"):
    return {"role": "tool", "tool_call_id": id, "content": content}


OSLO = call("get_weather", '{"city": "Oslo", "days": 2}')
CHATS = [
    ([USER], [WEATHER]),
    ([SYSTEM, USER], [WEATHER, NOW, STRICT]),
    ([USER, calls(OSLO)], [WEATHER]),
    ([USER, calls(OSLO), result('{"temp": -3.5}')], [WEATHER]),
    ([SYSTEM, USER, calls(OSLO, content="Let me look."), result("cold")], [WEATHER, NOW]),
    ([USER, calls(OSLO, call("now", "{}", "call_1")), result("cold"), result("12:00", "call_1")], [WEATHER, NOW]),
    ([USER, calls(OSLO), result("cold"), {"role": "assistant", "content": "Cold."}, MORE], [WEATHER]),
    ([USER, calls(OSLO), result("cold"), calls(call("now", ""), content=""), result("noon")], [WEATHER, NOW]),
    ([USER, calls(call("get_weather", '{"city":"S\\u00e3o \\"P\\"\\n","x":[1,2.50,1e5,true,null,{"y":{}}]}')),
      result([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])], [WEATHER]),
    ([USER, calls(OSLO, reasoning_content="Cold, I guess.\n"), result("cold")], [WEATHER]),
    ([USER, calls(OSLO, content="", reasoning_content="Hm."), result("cold"),
      {"role": "assistant", "content": "Cold."}, MORE, calls(call("now", "{}"))], [WEATHER, NOW]),
    ([USER, calls(call("now", '{"big": 123456789012345678901, "small": 1e-7, "text": "<|im_end|>"}')),
      result("</tool_response>")], [NOW]),
]


def opened(message):
    message = copy.deepcopy(message)
    if isinstance(message["content"], list):
        message["content"] = "\n".join(part["text"] for part in message["content"])
    message["content"] = message["content"] or ""
    for item in message.get("tool_calls", []):
        item["function"]["arguments"] = json.loads(item["function"]["arguments"] or "{}")
    return message


def main():
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()))
    for name, (messages, tools), prompt in itertools.product(sys.argv[1:] or TEMPLATES, CHATS, (True, False)):
        template = (HERE / "templates" / f"{name}.jinja").read_text()
        try:
            expected = tokenizer.apply_chat_template([opened(m) for m in messages], tools=tools, chat_template=template,
                                                     add_generation_prompt=prompt, tokenize=False)
        except jinja2.TemplateError:
            continue  # some take one call per message
        request = {"messages": messages, "tools": tools, "add_generation_prompt": prompt}
        print(json.dumps({"template": name, "request": request, "expected": expected}, ensure_ascii=False))


main()
