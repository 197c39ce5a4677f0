"""openai-python, an older line than the one of tests/http; also asynchronous."""
import asyncio
import json

import openai
import pytest
from conftest import CALL, GARAGE, KEY, MODEL, WEATHER, wait_aborted

CHAT = [{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), GARAGE)]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}]


def client(daemon, cls=openai.OpenAI, **options):
    return cls(base_url=f"{daemon.url}/v1", **{"api_key": KEY, "max_retries": 0, **options})


def text(chunks):
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def test_chat(nano):
    answer = client(nano).chat.completions.create(model=MODEL, messages=CHAT)
    assert "4815" in answer.choices[0].message.content and answer.usage.total_tokens > 0


def test_stream(nano):
    create = client(nano).chat.completions.create
    assert text(create(model=MODEL, messages=CHAT, stream=True)) == \
        create(model=MODEL, messages=CHAT).choices[0].message.content


def test_stream_helper(nano):
    with client(nano).chat.completions.stream(model=MODEL, messages=CHAT) as stream:
        events = [e.type for e in stream]
        assert "4815" in stream.get_final_completion().choices[0].message.content
    assert events[-1] == "content.done" and "content.delta" in events


def test_async(nano):
    async def talk():
        async with client(nano, openai.AsyncOpenAI) as c:
            whole = await c.chat.completions.create(model=MODEL, messages=CHAT)
            stream = await c.chat.completions.create(model=MODEL, messages=CHAT, stream=True)
            return whole, [chunk async for chunk in stream]

    whole, chunks = asyncio.run(talk())
    assert whole.choices[0].message.content == text(chunks) and "4815" in text(chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_call(caller, stream):
    options = {"model": MODEL, "tools": TOOLS, "temperature": 0, "messages": [{"role": "user", "content": CALL}]}
    if stream:
        with client(caller).chat.completions.stream(**options) as s:
            choice = s.get_final_completion().choices[0]
    else:
        choice = client(caller).chat.completions.create(**options).choices[0]
    call = choice.message.tool_calls[0]
    assert choice.finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", WEATHER)
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    message = {"role": "assistant", "content": None, "tool_calls": [call.model_dump(include={"id", "type", "function"})]}
    again = client(caller).chat.completions.create(**{**options, "messages": [
        *options["messages"], message, result, {"role": "user", "content": "thanks"}]})
    assert again.choices[0].message.content == "thanks"


def test_retries(full):
    with pytest.raises(openai.InternalServerError):
        client(full, max_retries=2).chat.completions.create(model=MODEL, messages=CHAT)
    assert full.rejected() == 3


def test_timeout(silent):
    with pytest.raises(openai.APITimeoutError):
        client(silent, timeout=0.5).chat.completions.create(model=MODEL, messages=CHAT)
    wait_aborted(silent)


def test_wrong_key(nano):
    with pytest.raises(openai.AuthenticationError) as info:
        client(nano, api_key="other", max_retries=2).chat.completions.create(model=MODEL, messages=CHAT)
    assert info.value.code == "invalid_api_key"
