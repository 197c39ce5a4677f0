"""LiteLLM, as an OpenAI-compatible provider and as a hosted vLLM."""
import asyncio
import json

import litellm
import pytest
from conftest import CALL, GARAGE, KEY, MODEL, WEATHER, wait_aborted

CHAT = [{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), GARAGE)]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}]


def options(daemon, provider="openai", **fields):
    return {"model": f"{provider}/{MODEL}", "api_base": f"{daemon.url}/v1", "api_key": KEY, "max_retries": 0,
            "messages": CHAT, **fields}


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_chat(nano, provider):
    answer = litellm.completion(**options(nano, provider))
    assert "4815" in answer.choices[0].message.content and answer.usage.total_tokens > 0


def test_stream(nano):
    chunks = list(litellm.completion(**options(nano, stream=True, stream_options={"include_usage": True})))
    assert "4815" in "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert litellm.stream_chunk_builder(chunks).usage.completion_tokens > 0


def test_async(nano):
    async def talk():
        return await asyncio.gather(*(litellm.acompletion(**options(nano)) for _ in range(4)))

    assert all("4815" in a.choices[0].message.content for a in asyncio.run(talk()))


@pytest.mark.parametrize("stream", [False, True])
def test_tool_call(caller, stream):
    answer = litellm.completion(**options(caller, tools=TOOLS, temperature=0, stream=stream,
                                          messages=[{"role": "user", "content": CALL}]))
    if stream:
        answer = litellm.stream_chunk_builder(list(answer))
    assert answer.choices[0].finish_reason == "tool_calls"
    function = answer.choices[0].message.tool_calls[0].function
    assert (function.name, json.loads(function.arguments)) == ("get_weather", WEATHER)


def test_retries(full):
    with pytest.raises(litellm.exceptions.ServiceUnavailableError):
        litellm.completion(**options(full, max_retries=2))
    assert full.rejected() == 3


def test_timeout(silent):
    with pytest.raises(litellm.exceptions.Timeout):
        litellm.completion(**options(silent, timeout=0.5))
    wait_aborted(silent)


def test_wrong_key(nano):
    with pytest.raises(litellm.exceptions.AuthenticationError):
        litellm.completion(**options(nano, api_key="other"))


def test_too_long_a_prompt(nano):
    """LiteLLM finds this error by its text, and routers fall back to a model with a longer context."""
    with pytest.raises(litellm.exceptions.ContextWindowExceededError):
        litellm.completion(**options(nano, messages=[{"role": "user", "content": "word " * 3000}]))
