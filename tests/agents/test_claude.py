"""The `claude` program in claude-agent-sdk: two turns with tools, its own search for tools, and a dialogue that is too
long."""
import json

import pytest
from conftest import MODEL, MODELS, block, call, program

WRITE, EDIT = "File created successfully at", "has been updated successfully"


@pytest.fixture
def claude(agent):
    """claude(daemon, arguments): what one call of the program answers."""
    binary = program("claude_agent_sdk", "_bundled", "claude")

    def run(daemon, arguments):
        settings = block("claude").replace("http://127.0.0.1:8080", daemon.url)
        assert "\nclaude\n" in settings
        command = f"{binary} --output-format json --permission-mode acceptEdits {arguments}"
        return json.loads(agent.run(settings.replace("\nclaude\n", f"\n{command}\n")))

    return run


@pytest.mark.parametrize("keepd", MODELS, indirect=True)
def test_two_turns_with_a_tool(claude, keepd, agent):
    path = agent.project / "hello.txt"
    daemon = keepd([
        [EDIT, "It says good-bye now."],
        ["now make it say good-bye", "Changing it. " + keepd.call("Edit", file_path=str(path), old_string="hello", new_string="good-bye")],
        [WRITE, "hello.txt is written."],
        ["write hello.txt", keepd.call("Write", file_path=str(path), content="hello from keepd\n")]])
    first = claude(daemon, "-p 'Please write hello.txt'")
    assert first["result"] == "hello.txt is written." and not first["is_error"] and first["num_turns"] == 2
    assert path.read_text() == "hello from keepd\n"
    assert first["usage"]["cache_read_input_tokens"] > 10000  # the second request reads what is new
    assert first["modelUsage"][MODEL]["contextWindow"] == 131072
    second = claude(daemon, "--continue -p 'Please now make it say good-bye'")
    assert second["result"] == "It says good-bye now." and second["num_turns"] == 2
    assert path.read_text() == "good-bye from keepd\n"


def test_parallel_calls(claude, keepd, agent):
    paths = [agent.project / name for name in ("a.txt", "b.txt")]
    daemon = keepd([[WRITE, "Both are written."],
                    ["write two files", "\n".join(call("Write", file_path=str(p), content=p.name) for p in paths)]])
    answer = claude(daemon, "-p 'Please write two files'")
    assert answer["result"] == "Both are written." and [p.read_text() for p in paths] == ["a.txt", "b.txt"]


def test_search_for_tools(claude, keepd):
    """A tool whose description is sent later is called after the search has named it."""
    daemon = keepd([["No scheduled jobs", "There are none."],
                    ['"name": "CronList"', call("CronList")],
                    ["which jobs are there", call("ToolSearch", query="select:CronList", max_results=3)]])
    assert claude(daemon, "-p 'Please tell me which jobs are there'")["result"] == "There are none."


def test_a_dialogue_that_is_too_long(claude, keepd, agent):
    """The program understands keepd's error as Anthropic's."""
    (agent.project / "long").write_text("word " * 26000)
    answer = claude(keepd([["unused", "unused"]]), "-p < long || true")
    assert answer["is_error"] and answer["result"].startswith("Prompt is too long"), answer
