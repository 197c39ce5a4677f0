"""The `codex` program in openai-codex-cli-bin: two turns with a tool, and a model name for which it sends a tool with a
grammar."""
import json

import pytest
from conftest import MODEL, MODELS, block, call, program


@pytest.fixture
def codex(agent):
    """codex(daemon, arguments): the items of one call of the program."""
    binary = program("codex_cli_bin", "bin", "codex")

    def run(daemon, arguments, model=MODEL):
        home = agent.home / ".codex"
        home.mkdir(exist_ok=True)
        config = block("codex").replace("http://127.0.0.1:8080", daemon.url).replace(f'"{MODEL}"', f'"{model}"')
        (home / "config.toml").write_text(config)
        # the machine that runs tests may not allow sandboxes
        out = agent.run(f"{binary} exec {arguments} --json --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox")
        events = [json.loads(line) for line in out.splitlines()]
        assert events[-1]["type"] == "turn.completed", events
        return [e["item"] for e in events if e["type"] == "item.completed"]

    return run


def said(items):
    return [i["text"] for i in items if i["type"] == "agent_message"]


@pytest.mark.parametrize("keepd", MODELS, indirect=True)
def test_two_turns_with_a_tool(codex, keepd, agent):
    daemon = keepd([["good-bye from keepd\n", "It says good-bye now."],
                    ["now make it say good-bye", keepd.call("exec_command", cmd="sed -i s/hello/good-bye/ hello.txt; cat hello.txt")],
                    ["Process exited with code 0", "hello.txt is written."],
                    ["write hello.txt", "I will. " + keepd.call("exec_command", cmd="echo hello from keepd > hello.txt")]])
    first = codex(daemon, "'Please write hello.txt'")
    assert [text.strip() for text in said(first)] == ["I will.", "hello.txt is written."]
    assert (agent.project / "hello.txt").read_text() == "hello from keepd\n"
    second = codex(daemon, "resume --last 'Please now make it say good-bye'")
    assert said(second) == ["It says good-bye now."]
    assert (agent.project / "hello.txt").read_text() == "good-bye from keepd\n"


def test_a_custom_tool(codex, keepd, agent):
    """For a model that it knows, the program sends apply_patch with a grammar."""
    patch = "*** Begin Patch\n*** Add File: hello.txt\n+hello from keepd\n*** End Patch"
    daemon = keepd([["Success. Updated the following files", "hello.txt is written."],
                    ["write hello.txt", call("apply_patch", input=patch)]], "gpt-5.5")
    items = codex(daemon, "'Please write hello.txt'", model="gpt-5.5")
    assert said(items) == ["hello.txt is written."] and "file_change" in [i["type"] for i in items]
    assert (agent.project / "hello.txt").read_text() == "hello from keepd\n"
