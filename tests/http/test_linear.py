"""The work on a body is in proportion to its length, whatever list of the client is long. Counted in instructions by
callgrind, at n and at 2n, so that no other process can change the result."""
import os
import re
import shutil

import pytest
from conftest import BINARY, MODEL, chat_body

TEXT = "lorem ipsum dolor " * 12
GROWTH = 2.5  # for twice the length: 2, and a little for what sorts
USER = {"role": "user", "content": "hi"}


def claude(n, block, role="assistant", **fields):
    turn = {"role": role, "content": [block(i) for i in range(n)]}
    return "/v1/messages/count_tokens", {"model": MODEL, "messages": [USER, turn], **fields}


def respond(n, item):
    return "/v1/responses", {"model": MODEL, "input": [USER, *(item(i) for i in range(n))], "max_output_tokens": 16}


def chat(*messages, **fields):
    return "/v1/chat/completions", {**chat_body(max_tokens=1), "messages": [USER, *messages], **fields}


def text(_):
    return {"type": "text", "text": TEXT}


def call(i):
    return {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def schema(value):
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": value}})


SHAPES = {
    "texts": (1500, lambda n: claude(n, text)),
    "thoughts": (1500, lambda n: claude(n, lambda i: {"type": "thinking", "thinking": TEXT, "signature": ""})),
    "texts and calls": (1000, lambda n: claude(n, lambda i: text(i) if i % 2 else {
        "type": "tool_use", "id": f"c{i}", "name": "f", "input": {}})),
    "calls": (1000, lambda n: claude(n, lambda i: {"type": "tool_use", "id": f"c{i}", "name": "f", "input": {}})),
    "user's texts": (1500, lambda n: claude(n, text, "user")),
    "results": (1000, lambda n: claude(n, lambda i: {"type": "tool_result", "tool_use_id": f"c{i}", "content": "x"}, "user")),
    "results with text": (1000, lambda n: claude(n, lambda i: {"type": "tool_result", "tool_use_id": f"c{i}", "content": TEXT}, "user")),
    "system": (1500, lambda n: claude(1, text, system=[text(i) for i in range(n)])),
    "parts": (1500, lambda n: chat({"role": "user", "content": [text(i) for i in range(n)]})),
    "calls of a chat": (1000, lambda n: chat({"role": "assistant", "content": None, "tool_calls": [call(i) for i in range(n)]})),
    "messages": (1000, lambda n: chat(*[{"role": "assistant", "content": TEXT}] * n)),
    "items": (1000, lambda n: respond(n, lambda i: {"type": "message", "role": "assistant", "content": [
        {"type": "output_text", "text": TEXT}]})),
    "item's parts": (1500, lambda n: respond(1, lambda i: {"type": "message", "role": "assistant", "content": [
        {"type": "output_text", "text": TEXT}] * n})),
    "reasoning items": (1000, lambda n: respond(n, lambda i: {"type": "reasoning", "id": f"r{i}", "summary": [], "content": [
        {"type": "reasoning_text", "text": TEXT}]})),
    "call items": (1000, lambda n: respond(n, lambda i: {"type": "function_call", "call_id": f"c{i}", "name": "f",
                                                         "arguments": "{}"})),
    "parameters": (1000, lambda n: chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(n)}}}}])),
    "references": (3000, lambda n: chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "$defs": {f"d{i}": {"type": "string"} for i in range(n)},
        "properties": {f"p{i}": {"$ref": f"#/$defs/d{i}"} for i in range(n)}}}}])),
    "properties": (500, lambda n: schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(n)},
                                          "required": [f"p{i}" for i in range(n)]})),
    "enum": (1000, lambda n: schema({"type": "string", "enum": [f"v{i}" for i in range(n)]})),
    "choices": (1000, lambda n: chat(guided_choice=[f"v{i}" for i in range(n)])),
    "mixed prompt": (2000, lambda n: ("/completion", {"prompt": [65, "a"] * n, "n_predict": 1})),
    "fields": (2000, lambda n: chat(**{f"unknown{i}": i for i in range(n)})),
}


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """A daemon, and a function that returns the instructions that it takes to prepare a body."""
    from conftest import Daemon
    if not (valgrind := shutil.which("valgrind")):
        pytest.skip("skip: valgrind is not installed")
    if BINARY is None or b"__asan_init" in BINARY.read_bytes():
        pytest.skip("skip: valgrind runs no program with sanitizers")
    folder = tmp_path_factory.mktemp("callgrind")
    wrapper = folder / "keepd-fake"
    wrapper.write_text(f"#!/bin/sh\nexec {valgrind} -q --tool=callgrind --toggle-collect=prepare_run --dump-after=prepare_run "
                       f"--callgrind-out-file={folder}/out {BINARY} \"$@\"\n")
    os.chmod(wrapper, 0o755)
    daemon = Daemon("--max-body-bytes", "16M", binary=wrapper, env={"KEEPD_FAKE_TOOLS": "qwen3_coder"})
    daemon.count = 0

    def count(request):
        r = daemon.post(*request)
        assert r.status_code in (200, 400), r.text
        assert r.status_code == 200 or "tokens" in r.text, r.text  # too long: all was read and joined before
        daemon.count += 1
        found = []

        def totals():
            found[:] = re.findall(r"^totals: (\d+)", (folder / f"out.{daemon.count}").read_text(), re.M)
            return found
        daemon.wait("the count", lambda: (folder / f"out.{daemon.count}").exists() and totals())
        return int(found[0])

    yield count
    daemon.process.kill()


@pytest.mark.parametrize("shape", SHAPES)
def test_twice_as_long_takes_twice_as_much(counted, shape):
    n, make = SHAPES[shape]
    once, twice = counted(make(n)), counted(make(2 * n))
    assert twice < GROWTH * once, f"{n}: {once} instructions, {2 * n}: {twice}"
