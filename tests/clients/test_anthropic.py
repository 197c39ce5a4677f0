"""anthropic's client of the Messages API: whole, streamed, typed; also asynchronous; and an agent."""
import asyncio
from typing import Literal

import anthropic
import pydantic
import pytest
from conftest import CALL, GARAGE, KEY, MODEL, WEATHER, wait_aborted

CHAT = [{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), GARAGE)]
TOOLS = [{"name": "get_weather", "strict": True, "input_schema": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"],
    "additionalProperties": False}}]


class Person(pydantic.BaseModel):
    """Without bounds of numbers: the client leaves them out of the schema."""
    age: Literal["young", "old"]
    mood: Literal["glad", "sad"]


def client(daemon, cls=anthropic.Anthropic, **options):
    return cls(base_url=daemon.url, **{"api_key": KEY, "max_retries": 0, **options})


def options(**fields):
    return {"model": MODEL, "max_tokens": 100, "messages": CHAT, "extra_body": {"temperature": 0}, **fields}


def test_create(nano):
    message = client(nano).messages.create(**options(system="Be brief."))
    assert "4815" in message.content[0].text and message.stop_reason == "end_turn"
    assert message.usage.output_tokens > 0
    again = client(nano).messages.create(**options(system=[{"type": "text", "text": "Be brief."}]))
    assert again.content == message.content


def test_stream(nano):
    whole = client(nano).messages.create(**options())
    with client(nano).messages.stream(**options()) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens and final.stop_reason == "end_turn"
    raw = list(client(nano).messages.create(**options(stream=True)))
    assert raw[0].type == "message_start" and raw[-1].type == "message_stop"


def test_async(nano):
    async def talk():
        async with client(nano, anthropic.AsyncAnthropic) as c:
            whole = await c.messages.create(**options())
            count = await c.messages.count_tokens(model=MODEL, messages=CHAT)
            async with c.messages.stream(**options()) as stream:
                return whole, count, await stream.get_final_message()

    whole, count, streamed = asyncio.run(talk())
    assert "4815" in whole.content[0].text == streamed.content[0].text
    for message in (whole, streamed):
        assert count.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens


def test_stop_sequences(nano):
    message = client(nano).messages.create(**options(stop_sequences=["48"]))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "48")
    assert client(nano).messages.create(**options(max_tokens=1)).stop_reason == "max_tokens"


def test_parse(writer):
    message = client(writer).messages.parse(**options(
        messages=[{"role": "user", "content": "Invent a person."}], output_format=Person))
    assert isinstance(message.parsed_output, Person)


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_use(caller, streamed):
    arguments = options(messages=[{"role": "user", "content": f"Look: {CALL}"}], tools=[{**TOOLS[0], "strict": False}])
    if streamed:
        with client(caller).messages.stream(**arguments) as stream:
            message = stream.get_final_message()
    else:
        message = client(caller).messages.create(**arguments)
    text, use = message.content
    assert text.text == "Look: " and message.stop_reason == "tool_use"
    assert (use.type, use.name, use.input) == ("tool_use", "get_weather", WEATHER)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}
    again = client(caller).messages.create(**options(messages=[
        *arguments["messages"], {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result, {"type": "text", "text": "thanks"}]}]))
    assert again.content[0].text == "thanks"


def test_agent(toolbox):
    """Three turns with tools: each pays only for what is new and, where the text of the last answer is other tokens than
    those that this small model chose under a schema, for these."""
    c, messages, read = client(toolbox), [{"role": "user", "content": "How is it in Oslo?"}], 0
    for turn in range(3):
        message = c.messages.create(**options(messages=messages, tools=TOOLS, tool_choice={
            "type": "any", "disable_parallel_tool_use": True}))
        (use,) = message.content
        assert use.name == "get_weather" and list(use.input) == ["city"]
        usage = message.usage
        assert usage.cache_read_input_tokens >= read - 1
        assert turn == 0 or usage.input_tokens < 100 < read
        read = usage.input_tokens + usage.cache_read_input_tokens
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": use.id, "content": f"rain {turn}"}]}]


def test_errors(nano):
    with pytest.raises(anthropic.BadRequestError) as caught:
        client(nano).messages.create(**options(messages=[{"role": "user", "content": [
            {"type": "image", "source": {"type": "url", "url": "x"}}]}]))
    assert caught.value.body["error"]["param"] == "messages[0].content[0].type"
    with pytest.raises(anthropic.NotFoundError):
        client(nano).messages.create(**options(model="claude"))
    with pytest.raises(anthropic.AuthenticationError):
        client(nano, api_key="wrong").messages.create(**options())


def test_timeout(silent):
    with pytest.raises(anthropic.APITimeoutError):
        client(silent, timeout=0.5).messages.create(**options())
    wait_aborted(silent)


def test_retries(full):
    with pytest.raises(anthropic.InternalServerError):
        client(full, max_retries=2).messages.create(**options())
    assert full.rejected() == 3
