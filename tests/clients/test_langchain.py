"""langchain-openai."""
import asyncio

import openai
import pytest
from conftest import CALL, GARAGE, KEY, MODEL, WEATHER, wait_aborted
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

CHAT = [HumanMessage(GARAGE[0]), AIMessage(GARAGE[1]), HumanMessage(GARAGE[2])]


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return "rain"


def model(daemon, cls=ChatOpenAI, **options):
    return cls(model=MODEL, base_url=f"{daemon.url}/v1", **{"api_key": KEY, "max_retries": 0, **options})


def test_chat(nano):
    answer = model(nano).invoke(CHAT)
    assert "4815" in answer.content and answer.usage_metadata["total_tokens"] > 0
    assert answer.response_metadata["finish_reason"] == "stop"


def test_stream(nano):
    chunks = list(model(nano, stream_usage=True).stream(CHAT))
    whole = sum(chunks[1:], chunks[0])
    assert "4815" in whole.content and whole.usage_metadata["output_tokens"] > 0


def test_async(nano):
    async def talk():
        return await model(nano).abatch([CHAT] * 4)

    assert all("4815" in a.content for a in asyncio.run(talk()))


def test_completion(nano):
    assert isinstance(model(nano, OpenAI, max_tokens=4).invoke("The code is"), str)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_call(caller, stream):
    bound = model(caller, temperature=0, streaming=stream).bind_tools([get_weather])
    question = HumanMessage(CALL)
    answer = bound.invoke([question])
    assert [(c["name"], c["args"]) for c in answer.tool_calls] == [("get_weather", WEATHER)]
    result = get_weather.invoke(answer.tool_calls[0])
    assert isinstance(result, ToolMessage)
    assert bound.invoke([question, answer, result, HumanMessage("thanks")]).content == "thanks"


def test_retries(full):
    with pytest.raises(openai.InternalServerError):
        model(full, max_retries=2).invoke(CHAT)
    assert full.rejected() == 3


def test_timeout(silent):
    with pytest.raises(openai.APITimeoutError):
        model(silent, timeout=0.5).invoke(CHAT)
    wait_aborted(silent)


def test_wrong_key(nano):
    with pytest.raises(openai.AuthenticationError):
        model(nano, api_key="other").invoke(CHAT)
