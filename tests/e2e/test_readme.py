"""Runs the README's requests unchanged, against a daemon on the port that they name."""
import pathlib
import re
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def block(kind):
    found = re.search(rf"<!-- test: {kind} -->\n```\w+\n(.*?)```", README, re.S)
    assert found, f"README.md has no block marked 'test: {kind}'"
    return found.group(1)


@pytest.fixture
def served(daemon):
    with socket.socket() as s:
        if s.connect_ex(("127.0.0.1", 8080)) == 0:
            pytest.skip("skip: something else listens on port 8080")
    return daemon("--port", "8080")


def test_curl(served):
    answer = subprocess.run(["bash", "-c", block("curl") .replace("curl ", "curl -sS --fail ", 1)], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert "4815" in answer.stdout and '"kv_details"' in answer.stdout


def test_sdk(served):
    answer = subprocess.run([sys.executable, "-c", block("python")], capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    assert "keepd-nano" in answer.stdout and "policy" in answer.stdout


def test_named_files_exist():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), f"README.md links to {target}"


def test_named_flags_exist():
    help_text = subprocess.run([str(ROOT / "build" / "keepd"), "--help"], capture_output=True, text=True).stdout
    for flag in set(re.findall(r"`(--[a-z-]+)", README)):
        assert flag in help_text, f"README.md names {flag}"
