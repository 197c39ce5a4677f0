"""LlamaIndex (llama-index-llms-openai-like)."""
import asyncio

import openai
import pytest
from conftest import CALL, GARAGE, KEY, MODEL, WEATHER, wait_aborted
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

CHAT = [ChatMessage(role=role, content=text) for role, text in zip(("user", "assistant", "user"), GARAGE)]


def get_weather(city: str) -> str:
    """The weather of a city."""
    return "rain"


def model(daemon, **options):
    return OpenAILike(model=MODEL, api_base=f"{daemon.url}/v1", **{
        "api_key": KEY, "max_retries": 0, "is_chat_model": True, "context_window": 1024, "temperature": 0, **options})


def test_chat(nano):
    answer = model(nano).chat(CHAT)
    assert "4815" in answer.message.content and answer.raw.usage.total_tokens > 0


def test_stream(nano):
    chunks = list(model(nano).stream_chat(CHAT))
    assert "4815" in chunks[-1].message.content
    assert "".join(c.delta or "" for c in chunks) == chunks[-1].message.content


def test_async(nano):
    async def talk():
        return await asyncio.gather(*(model(nano).achat(CHAT) for _ in range(4)))

    assert all("4815" in a.message.content for a in asyncio.run(talk()))


def test_completion(nano):
    assert model(nano, is_chat_model=False, max_tokens=4).complete("The code is").text


def test_tool_call(caller):
    m = model(caller, is_function_calling_model=True)
    tools = [FunctionTool.from_defaults(get_weather)]
    answer = m.chat_with_tools(tools, user_msg=CALL)
    calls = m.get_tool_calls_from_response(answer)
    assert [(c.tool_name, c.tool_kwargs) for c in calls] == [("get_weather", WEATHER)]
    last = list(m.stream_chat_with_tools(tools, user_msg=CALL))[-1]
    assert [c.tool_kwargs for c in m.get_tool_calls_from_response(last)] == [WEATHER]


def test_retries(full):
    """LlamaIndex repeats by itself, and openai-python below it as well."""
    with pytest.raises(openai.InternalServerError):
        model(full, max_retries=2).chat(CHAT)
    assert full.rejected() >= 3


def test_timeout(silent):
    with pytest.raises(openai.APITimeoutError):
        model(silent, timeout=0.5).chat(CHAT)
    wait_aborted(silent)


def test_wrong_key(nano):
    with pytest.raises(openai.AuthenticationError):
        model(nano, api_key="other").chat(CHAT)
