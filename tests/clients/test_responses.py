"""openai-python's client of the Responses API: whole, streamed, typed; also asynchronous; and an agent."""
import asyncio
import json
from typing import Literal

import openai
import pydantic
import pytest
from conftest import CALL, GARAGE, KEY, MODEL, WEATHER, wait_aborted

ITEMS = [{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), GARAGE)]
TOOLS = [{"type": "function", "name": "get_weather", "strict": True, "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"],
    "additionalProperties": False}}]


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=120)
    mood: Literal["glad", "sad"]


def client(daemon, cls=openai.OpenAI, **options):
    return cls(base_url=f"{daemon.url}/v1", **{"api_key": KEY, "max_retries": 0, **options})


def options(**fields):
    return {"model": MODEL, "input": ITEMS, "temperature": 0, **fields}


def test_create(nano):
    response = client(nano).responses.create(**options())
    assert "4815" in response.output_text and response.status == "completed" and response.error is None
    assert response.usage.output_tokens > 0 and response.usage.input_tokens_details.cached_tokens >= 0


def test_stream(nano):
    whole = client(nano).responses.create(**options())
    events = list(client(nano).responses.create(**options(stream=True)))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert events[-1].type == "response.completed" and events[-1].response.output_text == whole.output_text


def test_stream_helper(nano):
    with client(nano).responses.stream(**options()) as stream:
        events = [e.type for e in stream]
        assert "4815" in stream.get_final_response().output_text
    assert events[0] == "response.created" and events[-1] == "response.completed"


def test_async(nano):
    async def talk():
        async with client(nano, openai.AsyncOpenAI) as c:
            whole, stream = await asyncio.gather(c.responses.create(**options()), c.responses.create(**options(stream=True)))
            return whole, [e async for e in stream]

    whole, events = asyncio.run(talk())
    assert "4815" in whole.output_text and events[-1].response.output_text == whole.output_text


def test_stored(nano):
    """A stored response can be continued, read and deleted; a continuation computes only what is new."""
    c = client(nano)
    first = c.responses.create(**options(input=GARAGE[0]))
    second = c.responses.create(**options(input=GARAGE[2], previous_response_id=first.id))
    assert "4815" in second.output_text
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1
    assert c.responses.retrieve(second.id) == second
    texts = [item.content[0].text for item in c.responses.input_items.list(second.id)]
    assert texts == [GARAGE[0], first.output_text, GARAGE[2]]
    c.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        c.responses.retrieve(second.id)
    with pytest.raises(openai.BadRequestError) as caught:
        c.responses.create(**options(previous_response_id=second.id))
    assert caught.value.code == "previous_response_not_found"


@pytest.mark.parametrize("streamed", [False, True])
def test_parse(writer, streamed):
    arguments = options(input="Invent a person.", text_format=Person, max_output_tokens=100)
    if streamed:
        with client(writer).responses.stream(**arguments) as stream:
            response = stream.get_final_response()
    else:
        response = client(writer).responses.parse(**arguments)
    assert isinstance(response.output_parsed, Person)


def test_parse_async(writer):
    async def talk():
        async with client(writer, openai.AsyncOpenAI) as c:
            return await c.responses.parse(**options(input="Invent a person.", text_format=Person, max_output_tokens=100))

    assert isinstance(asyncio.run(talk()).output_parsed, Person)


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_call(caller, streamed):
    arguments = options(input=CALL, tools=[{**TOOLS[0], "strict": False}])
    if streamed:
        with client(caller).responses.stream(**arguments) as stream:
            response = stream.get_final_response()
    else:
        response = client(caller).responses.create(**arguments)
    (call,) = response.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", WEATHER)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    again = client(caller).responses.create(**options(input=[
        {"role": "user", "content": CALL}, call.model_dump(), result, {"role": "user", "content": "thanks"}]))
    assert again.output_text == "thanks"


@pytest.mark.parametrize("stored", [True, False])
def test_agent(toolbox, stored):
    """Three turns with tools: each pays only for what is new. Where the client holds the items, its text of the last answer
    may be other tokens than those that this small model chose under a schema; stored, they are the same."""
    c, items, previous, seen = client(toolbox), [{"role": "user", "content": "How is it in Oslo?"}], None, 0
    new, read = items, 0
    for turn in range(3):
        arguments = {"previous_response_id": previous, "input": new} if stored else {"input": items, "store": False}
        response = c.responses.create(**options(tools=TOOLS, tool_choice="required", parallel_tool_calls=False,
                                                max_output_tokens=100, **arguments))
        (call,) = response.output
        assert call.name == "get_weather" and list(json.loads(call.arguments)) == ["city"]
        usage = response.usage
        cached = usage.input_tokens_details.cached_tokens
        assert cached >= (seen if stored else read) - 1
        assert turn == 0 or usage.input_tokens - cached < (30 if stored else 100) < read
        seen, read, previous = usage.total_tokens, usage.input_tokens, response.id
        new = [{"type": "function_call_output", "call_id": call.call_id, "output": f"rain {turn}"}]
        items += [call.model_dump(), *new]


def test_background(nano):
    responses = client(nano).responses
    response = responses.create(**options(background=True))
    assert response.status == "queued"
    while response.status in ("queued", "in_progress"):
        response = responses.retrieve(response.id)
    assert response.status in ("completed", "incomplete") and response.output_text
    assert responses.cancel(response.id).status == response.status
    responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        responses.retrieve(response.id)


def test_a_stream_that_is_read_on(nano):
    """The client leaves the stream and comes back, by the number of the last event that it has."""
    responses = client(nano).responses
    seen = []
    with responses.create(**options(background=True, stream=True)) as stream:
        for event in stream:
            seen.append(event)
            if len(seen) == 6:
                break
    id, last = seen[0].response.id, seen[-1].sequence_number
    seen += list(responses.retrieve(id, stream=True, starting_after=last))
    assert [e.sequence_number for e in seen] == list(range(len(seen))) and seen[-1].type == "response.completed"
    text = "".join(e.delta for e in seen if e.type == "response.output_text.delta")
    assert text == seen[-1].response.output_text == responses.retrieve(id).output_text and "4815" in text
    assert [e.to_json() for e in responses.retrieve(id, stream=True)] == [e.to_json() for e in seen]
    assert list(responses.retrieve(id, stream=True, starting_after=len(seen))) == []
    with responses.stream(response_id=id, starting_after=last) as stream:  # the helper reads all and shows the rest
        assert [e.sequence_number for e in stream][0] == last + 1
        assert stream.get_final_response().output_text == text


def test_a_stream_that_cannot_be_read_again(nano):
    response = client(nano).responses.create(**options())
    with pytest.raises(openai.BadRequestError) as caught:
        list(client(nano).responses.retrieve(response.id, stream=True))
    assert caught.value.param == "stream" and "background=true" in caught.value.message


def test_refusals(nano):
    for fields, param in (({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
                          ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x", "detail": "low"}]}]},
                           "input[0].content[0].type")):
        with pytest.raises(openai.BadRequestError) as caught:
            client(nano).responses.create(**options(**fields))
        assert caught.value.param == param and caught.value.code == "unsupported_parameter"


def test_timeout(silent):
    with pytest.raises(openai.APITimeoutError):
        client(silent, timeout=0.5).responses.create(**options())
    wait_aborted(silent)


def test_retries(full):
    with pytest.raises(openai.InternalServerError):
        client(full, max_retries=2).responses.create(**options())
    assert full.rejected() == 3
