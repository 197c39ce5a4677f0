"""pydantic-ai."""
import asyncio

import openai
import pytest
from conftest import CALL, GARAGE, KEY, MODEL, WEATHER, wait_aborted
from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ModelRequest, ModelResponse, TextPart, UserPromptPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

HISTORY = [ModelRequest(parts=[UserPromptPart(GARAGE[0])]), ModelResponse(parts=[TextPart(GARAGE[1])])]


class Enough(BaseException):
    """Ends an agent from one of its tools."""


def agent(daemon, **options):
    client = openai.AsyncOpenAI(base_url=f"{daemon.url}/v1", **{"api_key": KEY, "max_retries": 0, **options})
    return Agent(OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client)), model_settings={"temperature": 0})


def ask(daemon, **options):
    return agent(daemon, **options).run_sync(GARAGE[2], message_history=HISTORY)


def test_chat(nano):
    result = ask(nano)
    assert "4815" in result.output and result.usage.output_tokens > 0


def test_stream(nano):
    async def talk():
        async with agent(nano).run_stream(GARAGE[2], message_history=HISTORY) as stream:
            return [part async for part in stream.stream_text(delta=True)]

    parts = asyncio.run(talk())
    assert len(parts) >= 1 and "4815" in "".join(parts)


def test_tool_call(caller):
    """The tool's result goes back to the model, which here repeats its call."""
    cities = []
    a = agent(caller)

    @a.tool_plain
    def get_weather(city: str) -> str:
        cities.append({"city": city})
        if len(cities) == 3:
            raise Enough
        return "rain"

    with pytest.raises(Enough):
        a.run_sync(CALL)
    assert cities == [WEATHER] * 3


def test_retries(full):
    with pytest.raises(ModelHTTPError) as info:
        ask(full, max_retries=2)
    assert info.value.status_code == 503 and full.rejected() == 3


def test_timeout(silent):
    with pytest.raises(Exception) as info:
        ask(silent, timeout=0.5)
    assert isinstance(info.value, openai.APITimeoutError) or isinstance(info.value.__cause__, openai.APITimeoutError)
    wait_aborted(silent)


def test_wrong_key(nano):
    with pytest.raises(ModelHTTPError) as info:
        ask(nano, api_key="other")
    assert info.value.status_code == 401
