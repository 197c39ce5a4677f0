"""Runs the README's requests unchanged, against a daemon on the port that they name, and its commands."""
import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from hub_server import Hub, Repository  # noqa: E402

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


def shell_commands():
    """The lines of all other shell blocks, without comments."""
    blocks = re.findall(r"(?<!-->\n)```sh\n(.*?)```", README, re.S)
    return [line.split("#")[0].strip() for text in blocks for line in text.splitlines()] + re.findall(r"`(make [^`]+)`", " ".join(README.split()))


def test_make_has_the_targets():
    targets = [line for line in shell_commands() if line.startswith("make ")]
    assert "make serve" in targets and "make serve MODEL=smollm2" in targets
    for line in targets:
        subprocess.run([*line.split(), "--dry-run"], cwd=ROOT, check=True, capture_output=True, env={**os.environ, "MAKEFLAGS": ""})


def test_commands_of_the_daemon(tmp_path):
    """`--inspect`, `pull` and `fit` run as they stand, `bench` with few tokens; a start is checked, up to the listening socket. The hub
    is one of this machine: its GGUF file is only fetched and found, and in the start a directory, the bundled model, takes its place."""
    nano = {p.name: p.read_bytes() for p in (ROOT / "bundled/keepd-nano").iterdir() if p.is_file()}
    hub = Hub(Qwen__nano=Repository(nano))
    hub.repositories["Qwen/Qwen3-0.6B-GGUF"] = Repository({"Qwen3-0.6B-Q4_K_M.gguf": b"GGUF" * 4000, "Qwen3-0.6B-Q8_0.gguf": b"GGUF" * 5000})
    more = {"pull": [], "hf:Qwen/nano": ["--check-config"], "--inspect": [], "bench": ["-p", "16", "-n", "4", "-b", "1,2", "-r", "1"], "/path/to/model": ["--check-config"], "--models-dir": ["--check-config"], "fit": []}
    for name, source in (("docs.txt", "docs/OPERATIONS.md"), ("code.txt", "base/json.c"), ("chats.txt", "docs/API.md")):
        (tmp_path / name).write_text((ROOT / source).read_text()[:16000])
    lines = [line for line in shell_commands() if line.startswith("build/keepd")]
    assert [line.split()[1] for line in lines] == ["pull", "hf:Qwen/Qwen3-0.6B-GGUF:Q4_K_M", "--inspect", "bench", "/path/to/model", "--models-dir", "/path/to/model", "fit", "fit"]
    for line in lines:
        line = line.replace("hf:Qwen/Qwen3-0.6B-GGUF:Q4_K_M", "hf:Qwen/nano")
        words = line.replace("/path/to/models", str(ROOT / "bundled")).replace("/path/to/model", str(ROOT / "bundled/keepd-nano")).split()
        env = {**os.environ, "KEEPD_GATES_CACHE": str(tmp_path / "gates"), "KEEPD_TEST_CALIBRATION": str(tmp_path),
               "HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url, "no_proxy": "*"}
        if words[1] == "hf:Qwen/nano":
            fetched = subprocess.run([str(ROOT / words[0]), "pull", "Qwen/nano"], capture_output=True, text=True, timeout=300, env=env)
            assert fetched.returncode == 0, fetched.stderr
        run = subprocess.run([str(ROOT / words[0]), *words[1:], *more[line.split()[1]]], cwd=tmp_path, capture_output=True, text=True,
                             timeout=300, env=env)
        assert run.returncode == 0, run.stderr
        if words[1] == "bench":
            assert "| prompt 16 | 1 |" in run.stdout and "| generate 4 | 2 |" in run.stdout, run.stdout
        if words[1] == "pull":
            assert pathlib.Path(run.stdout.strip()).read_bytes() == b"GGUF" * 4000
    hub.close()


def test_named_flags_exist():
    help_text = subprocess.run([str(ROOT / "build" / "keepd"), "--help"], capture_output=True, text=True).stdout
    for flag in set(re.findall(r"`(--[a-z-]+)", README)):
        assert flag in help_text, f"README.md names {flag}"
