"""ollama, and langchain-ollama, which speak Ollama's own API."""
import asyncio
import json

import ollama
import pytest
from conftest import CALL, GARAGE, KEY, MODEL, WEATHER, wait_aborted
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings

HEADERS = {"Authorization": f"Bearer {KEY}"}
CHAT = [{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), GARAGE)]
PERSON = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["age"],
          "additionalProperties": False}  # others may have no end


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"rain in {city}"


def client(daemon, cls=ollama.Client, **options):
    return cls(host=daemon.url, headers=HEADERS, **options)


def langchain(daemon, cls=ChatOllama, **options):
    return cls(model=MODEL, base_url=daemon.url, client_kwargs={"headers": HEADERS}, **options)


def test_chat(nano):
    answer = client(nano).chat(MODEL, CHAT, options={"temperature": 0})
    assert "4815" in answer.message.content and answer.done and answer.done_reason == "stop"
    assert answer.eval_count > 0 and answer.total_duration >= answer.eval_duration > 0
    assert answer.created_at.startswith("20")


def test_stream(nano):
    parts = list(client(nano).chat(f"{MODEL}:latest", CHAT, stream=True))
    assert "4815" in "".join(p.message.content for p in parts) and [p.done for p in parts][-2:] == [False, True]


def test_async(nano):
    async def talk():
        one = client(nano, ollama.AsyncClient)
        answers = await asyncio.gather(*(one.chat(MODEL, CHAT) for _ in range(4)))
        text = "".join([p.message.content async for p in await one.chat(MODEL, CHAT, stream=True)])
        return [a.message.content for a in answers] + [text]

    assert all("4815" in text for text in asyncio.run(talk()))


def test_generate_goes_on_from_a_context(nano):
    one = client(nano)
    first = one.generate(MODEL, GARAGE[0], options={"temperature": 0})
    second = one.generate(MODEL, GARAGE[2], context=first.context, options={"temperature": 0})
    assert "4815" in second.response and second.prompt_eval_count > first.prompt_eval_count
    assert "".join(p.response for p in one.generate(MODEL, GARAGE[2], context=first.context, stream=True,
                                                    options={"temperature": 0})) == second.response
    assert isinstance(one.generate(MODEL, "The code is", raw=True, options={"num_predict": 4}).response, str)


def test_schema(writer):
    answer = client(writer).chat(MODEL, CHAT, format=PERSON, options={"num_predict": 60})
    assert 0 <= json.loads(answer.message.content)["age"] <= 99


@pytest.mark.parametrize("stream", [False, True])
def test_tool_call(caller, stream):
    one = client(caller)
    messages = [{"role": "user", "content": CALL}]
    answer = one.chat(MODEL, messages, tools=[get_weather], stream=stream, options={"temperature": 0})
    message = next(p.message for p in answer if p.message.tool_calls) if stream else answer.message
    call, = message.tool_calls
    assert call.function.name == "get_weather" and call.function.arguments == WEATHER
    messages += [message, {"role": "tool", "content": get_weather(**call.function.arguments), "tool_name": "get_weather"},
                 {"role": "user", "content": "thanks"}]
    assert one.chat(MODEL, messages, tools=[get_weather], options={"temperature": 0}).message.content == "thanks"


def test_models(nano):
    one = client(nano)
    assert MODEL in [m.model for m in one.list().models] and MODEL in [m.model for m in one.ps().models]
    shown = one.show(MODEL)
    assert "completion" in shown.capabilities and shown.modelinfo["general.architecture"]


def test_vectors(nano):
    one = client(nano)
    two = one.embed(MODEL, ["abc", "de"]).embeddings
    assert len(two) == 2 and sum(x * x for x in two[0]) == pytest.approx(1, abs=1e-5)
    assert len(one.embeddings(MODEL, "abc").embedding) == len(two[0])


def test_errors(nano, full):
    for name, status in (("other", 404), (MODEL, 400)):
        with pytest.raises(ollama.ResponseError) as caught:
            client(nano).chat(name, [{"role": "user", "content": "x", "images": [b"abc"]}])
        assert caught.value.status_code == status and caught.value.error[0] != "{"
    with pytest.raises(ollama.ResponseError) as caught:
        ollama.Client(host=nano.url).chat(MODEL, CHAT)
    assert caught.value.status_code == 401
    with pytest.raises(ollama.ResponseError) as caught:
        client(full).chat(MODEL, CHAT)
    assert caught.value.status_code == 503


def test_timeout(silent):
    with pytest.raises(Exception, match="timed out"):
        client(silent, timeout=0.5).chat(MODEL, CHAT)
    wait_aborted(silent)


def test_langchain(nano):
    messages = [HumanMessage(GARAGE[0]), AIMessage(GARAGE[1]), HumanMessage(GARAGE[2])]
    answer = langchain(nano).invoke(messages)
    assert "4815" in answer.content and answer.usage_metadata["output_tokens"] > 0
    assert len(langchain(nano, OllamaEmbeddings).embed_documents(["abc", "de"])) == 2


def test_langchain_calls_tools(caller):
    bound = langchain(caller, temperature=0).bind_tools([tool(get_weather)])
    assert [(c["name"], c["args"]) for c in bound.invoke([HumanMessage(CALL)]).tool_calls] == [("get_weather", WEATHER)]


def test_langchain_checks_that_a_model_is_there(nano):
    langchain(nano, validate_model_on_init=True)
    with pytest.raises(Exception, match="not found|other"):
        ChatOllama(model="other", base_url=nano.url, client_kwargs={"headers": HEADERS}, validate_model_on_init=True)
