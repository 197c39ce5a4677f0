"""Typed answers by way of popular clients: OpenAI's parse, instructor, pydantic-ai, LangChain and LiteLLM."""
import asyncio
from typing import Literal

import instructor
import litellm
import openai
import pydantic
import pytest
from conftest import KEY, MODEL
from langchain_openai import ChatOpenAI
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

ASK = [{"role": "user", "content": "Invent a person."}]


class Person(pydantic.BaseModel, extra="forbid"):
    """A person. Other members than these would be free text without end for a small model."""
    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=120)
    mood: Literal["glad", "sad"]


def client(daemon, cls=openai.OpenAI):
    return cls(base_url=f"{daemon.url}/v1", api_key=KEY, max_retries=0)


def test_openai_parse(writer):
    answer = client(writer).chat.completions.parse(model=MODEL, messages=ASK, response_format=Person, max_tokens=300, temperature=0)
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_openai_parse_async(writer):
    async def talk():
        async with client(writer, openai.AsyncOpenAI) as c:
            return await c.chat.completions.parse(model=MODEL, messages=ASK, response_format=Person, max_tokens=300, temperature=0)

    assert isinstance(asyncio.run(talk()).choices[0].message.parsed, Person)


@pytest.mark.parametrize("form", ["toolbox", "mistral"])
def test_openai_parse_tools(request, form):
    answer = client(request.getfixturevalue(form)).chat.completions.parse(
        model=MODEL, messages=ASK, tools=[openai.pydantic_function_tool(Person)], tool_choice="required",
        parallel_tool_calls=False, max_tokens=300, temperature=0)
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, Person)


@pytest.mark.parametrize("mode,model", [
    (instructor.Mode.JSON_SCHEMA, "writer"), (instructor.Mode.TOOLS, "toolbox"), (instructor.Mode.TOOLS_STRICT, "toolbox")])
def test_instructor(request, mode, model):
    """Without retries: the first answer must do."""
    c = instructor.from_openai(client(request.getfixturevalue(model)), mode=mode)
    person = c.chat.completions.create(model=MODEL, messages=ASK, response_model=Person, max_retries=0, max_tokens=300, temperature=0)
    assert isinstance(person, Person)


@pytest.mark.parametrize("output,model", [(NativeOutput, "writer"), (ToolOutput, "toolbox")])
def test_pydantic_ai(request, output, model):
    c = client(request.getfixturevalue(model), openai.AsyncOpenAI)
    agent = Agent(OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=c)), output_type=output(Person), retries=0,
                  model_settings={"temperature": 0, "max_tokens": 300, "parallel_tool_calls": False})
    assert isinstance(agent.run_sync("Invent a person.").output, Person)


@pytest.mark.parametrize("method,model", [("json_schema", "writer"), ("function_calling", "toolbox")])
def test_langchain(request, method, model):
    daemon = request.getfixturevalue(model)
    chat = ChatOpenAI(model=MODEL, base_url=f"{daemon.url}/v1", api_key=KEY, max_retries=0, temperature=0, max_tokens=300)
    assert isinstance(chat.with_structured_output(Person, method=method).invoke("Invent a person."), Person)


def test_langchain_responses(writer):
    chat = ChatOpenAI(model=MODEL, base_url=f"{writer.url}/v1", api_key=KEY, max_retries=0, temperature=0, max_tokens=300,
                      use_responses_api=True)
    assert isinstance(chat.with_structured_output(Person, method="json_schema").invoke("Invent a person."), Person)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(writer, provider):
    answer = litellm.completion(model=f"{provider}/{MODEL}", api_base=f"{writer.url}/v1", api_key=KEY, max_retries=0,
                                messages=ASK, response_format=Person, temperature=0, max_tokens=300)
    assert isinstance(Person.model_validate_json(answer.choices[0].message.content), Person)
