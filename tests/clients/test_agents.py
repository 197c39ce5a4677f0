"""Agents of popular frameworks, unmodified: a tool is called, its result is read, and an answer follows; whole and
streamed, and typed answers. LangChain, LlamaIndex, pydantic-ai, LiteLLM and instructor have files of their own."""
import asyncio
import json
from typing import Literal

import openai
import pydantic
import pytest
from conftest import ADVICE, KEY, MODEL, QUESTION, RAIN, SNOW, SNOW_QUESTION


class Person(pydantic.BaseModel, extra="forbid"):
    """A person."""
    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=120)
    mood: Literal["glad", "sad"]


def get_weather(city: str) -> str:
    """Tells the weather.

    Args:
        city: The name of the city.
    """
    return SNOW if city == "Oslo" else RAIN if city == "Lisbon" else "unknown"


# --- OpenAI's Agents SDK ---

def openai_agent(daemon, responses, **options):
    import agents
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{daemon.url}/v1", api_key=KEY, max_retries=0)
    model = (agents.OpenAIResponsesModel if responses else agents.OpenAIChatCompletionsModel)(MODEL, openai_client=client)
    return agents.Agent("assistant", model=model, instructions="Help.", **options)


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_openai_agents(scripted, responses):
    import agents
    tools = [agents.function_tool(get_weather)]
    assert agents.Runner.run_sync(openai_agent(scripted, responses, tools=tools), QUESTION).final_output == ADVICE

    async def stream():
        result = agents.Runner.run_streamed(openai_agent(scripted, responses, tools=tools), QUESTION)
        kinds = [e.item.type async for e in result.stream_events() if e.type == "run_item_stream_event"]
        return result.final_output, kinds

    assert asyncio.run(stream()) == (ADVICE, ["tool_call_item", "tool_call_output_item", "message_output_item"])


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_openai_agents_typed(writer, responses):
    import agents
    settings = agents.ModelSettings(temperature=0, max_tokens=300)
    agent = openai_agent(writer, responses, output_type=Person, model_settings=settings)
    assert isinstance(agents.Runner.run_sync(agent, "Invent a person.").final_output, Person)


def test_openai_agents_hand_over(scripted):
    """One agent hands over to another: a call of a tool that the framework makes."""
    import agents
    other = openai_agent(scripted, False, tools=[agents.function_tool(get_weather)])
    other.name = "Forecaster"
    first = openai_agent(scripted, False, handoffs=[other])
    result = agents.Runner.run_sync(first, "Ask the forecaster.")
    assert result.last_agent.name == "Forecaster"


# --- smolagents ---

@pytest.mark.parametrize("stream", [False, True])
def test_smolagents(scripted, stream):
    import smolagents
    model = smolagents.OpenAIServerModel(MODEL, api_base=f"{scripted.url}/v1", api_key=KEY)
    agent = smolagents.ToolCallingAgent([smolagents.tool(get_weather)], model, verbosity_level=0, stream_outputs=stream)
    assert agent.run(SNOW_QUESTION) == SNOW


def test_smolagents_code(scripted):
    """The model writes Python; answers end with the tag of its blocks, a stop string."""
    import smolagents
    model = smolagents.OpenAIServerModel(MODEL, api_base=f"{scripted.url}/v1", api_key=KEY)
    agent = smolagents.CodeAgent([smolagents.tool(get_weather)], model, verbosity_level=0, max_steps=2)
    assert agent.run("Answer with code.") == RAIN


# --- AutoGen ---

@pytest.mark.parametrize("stream", [False, True])
def test_autogen(scripted, stream):
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    async def talk():
        info = {"vision": False, "function_calling": True, "json_output": True, "family": "unknown", "structured_output": True}
        model = OpenAIChatCompletionClient(model=MODEL, base_url=f"{scripted.url}/v1", api_key=KEY, model_info=info, max_retries=0)
        agent = AssistantAgent("assistant", model, tools=[get_weather], reflect_on_tool_use=True, model_client_stream=stream)
        result = await agent.run(task=QUESTION)
        await model.close()
        return result.messages[-1].content

    assert asyncio.run(talk()) == ADVICE


# --- Agno ---

def agno_agent(daemon, **options):
    from agno.agent import Agent
    from agno.models.openai.like import OpenAILike
    model = OpenAILike(id=MODEL, base_url=f"{daemon.url}/v1", api_key=KEY, max_retries=0, temperature=0, max_tokens=300)
    return Agent(model=model, telemetry=False, **options)


def test_agno(scripted):
    agent = agno_agent(scripted, tools=[get_weather])
    assert agent.run(QUESTION).content == ADVICE
    assert "".join(e.content or "" for e in agent.run(QUESTION, stream=True) if e.event == "RunContent") == ADVICE


def test_agno_typed(writer):
    assert isinstance(agno_agent(writer, output_schema=Person).run("Invent a person.").content, Person)


# --- Haystack ---

@pytest.mark.parametrize("stream", [False, True])
def test_haystack(scripted, stream):
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret
    parts = []
    model = OpenAIChatGenerator(model=MODEL, api_base_url=f"{scripted.url}/v1", api_key=Secret.from_token(KEY), max_retries=0,
                                streaming_callback=(lambda chunk: parts.append(chunk.content)) if stream else None)
    agent = Agent(chat_generator=model, tools=[create_tool_from_function(get_weather)])
    result = agent.run(messages=[ChatMessage.from_user(QUESTION)])
    assert result["last_message"].text == ADVICE and (not stream or ADVICE in "".join(parts))


# --- LangGraph ---

def langgraph_agent(daemon):
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent
    model = ChatOpenAI(model=MODEL, base_url=f"{daemon.url}/v1", api_key=KEY, max_retries=0)
    return create_react_agent(model, [get_weather])


@pytest.mark.filterwarnings("ignore:create_react_agent")
def test_langgraph(scripted):
    agent, question = langgraph_agent(scripted), {"messages": [("user", QUESTION)]}
    messages = agent.invoke(question)["messages"]
    assert [m.type for m in messages] == ["human", "ai", "tool", "ai"] and messages[-1].content == ADVICE
    parts = [m.content for m, _ in agent.stream(question, stream_mode="messages") if m.type == "AIMessageChunk"]
    assert len(parts) > 2 and "".join(parts) == ADVICE


# --- LlamaIndex ---

def test_llama_index_agent(scripted):
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike
    model = OpenAILike(model=MODEL, api_base=f"{scripted.url}/v1", api_key=KEY, is_chat_model=True, is_function_calling_model=True,
                       max_retries=0)

    async def talk():
        return await FunctionAgent(tools=[get_weather], llm=model).run(QUESTION)

    assert str(asyncio.run(talk())) == ADVICE


# --- pydantic-ai ---

def test_pydantic_ai_agent(scripted):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        agent = Agent(kind(MODEL, provider=OpenAIProvider(base_url=f"{scripted.url}/v1", api_key=KEY)))
        agent.tool_plain(get_weather)
        assert agent.run_sync(QUESTION).output == ADVICE


# --- Editors: the bodies that they send ---

def test_continue_and_zed(scripted):
    """Continue sends a chat's tools with their results as texts, Zed parts and `parallel_tool_calls`; both stream."""
    import requests
    tool = {"type": "function", "function": {"name": "get_weather", "description": "Tells the weather.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Lisbon"}'}}
    plain = [{"role": "system", "content": "You are in agent mode."}, {"role": "user", "content": QUESTION},
             {"role": "assistant", "content": " ", "tool_calls": [call]}, {"role": "tool", "content": RAIN, "tool_call_id": "call_1"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}, {"role": "assistant", "content": None, "tool_calls": [call]},
             {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": RAIN}]}]
    for body in ({"messages": plain, "model": MODEL, "max_tokens": 4096, "stream": True, "stream_options": {"include_usage": True}, "tools": [tool]},
                 {"model": MODEL, "messages": parts, "stream": True, "max_completion_tokens": 4096, "stop": [], "temperature": 1.0,
                  "tool_choice": "auto", "parallel_tool_calls": False, "tools": [tool], "prompt_cache_key": "thread"}):
        r = requests.post(f"{scripted.url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
        events = [json.loads(line[6:]) for line in r.text.split("\n\n") if line.startswith("data: {")]
        assert r.status_code == 200 and r.text.endswith("data: [DONE]\n\n"), r.text
        assert "".join(c["delta"].get("content") or "" for e in events for c in e["choices"]) == ADVICE
