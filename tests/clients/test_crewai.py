"""CrewAI. Its versions of other packages exclude those of tests/clients/requirements.txt, so it needs an environment of its own, with
crewai 1.15.30; without it this file is skipped."""
import os

import pytest
from conftest import ADVICE, KEY, MODEL, QUESTION, RAIN

os.environ.update(CREWAI_DISABLE_TELEMETRY="true", CREWAI_TRACING_ENABLED="false", CREWAI_TESTING="true")
crewai = pytest.importorskip("crewai")


@crewai.tools.tool("get_weather")
def get_weather(city: str) -> str:
    """Tells the weather of a city."""
    return RAIN if city == "Lisbon" else "unknown"


@pytest.mark.parametrize("stream", [False, True])
def test_crew(scripted, stream):
    model = crewai.LLM(model=f"openai/{MODEL}", base_url=f"{scripted.url}/v1", api_key=KEY, stream=stream)
    agent = crewai.Agent(role="Adviser", goal="Give advice.", backstory="You know the weather.", llm=model, tools=[get_weather])
    task = crewai.Task(description=QUESTION, expected_output="One sentence.", agent=agent)
    assert crewai.Crew(agents=[agent], tasks=[task]).kickoff().raw == ADVICE
