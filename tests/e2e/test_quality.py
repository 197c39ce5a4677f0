"""The laboratory against the real daemon, at its smallest: does every kind of cell run, resume and get written up?"""
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("KEEPD_BIN", str(ROOT / "build" / "keepd"))


def quality(tmp_path, *arguments):
    if not pathlib.Path(BINARY).exists():
        pytest.skip(f"skip: {BINARY} is not built")
    command = [sys.executable, str(ROOT / "bench" / "quality" / "quality.py"), *arguments, "--smoke", "--binary", BINARY,
               "--methods", "full,global,streaming", "--out", str(tmp_path / "out"), "--store", str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def stored(tmp_path):
    (path,) = (tmp_path / "store").glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_run_resume_and_report(tmp_path):
    quality(tmp_path)
    rows = [r for r in stored(tmp_path) if r["key"] != "meta"]
    cells = {r["key"] for r in rows if not r["key"].startswith("anatomy/")}
    assert len(cells) == 5 * 3 and len(rows) == len(cells) + 3
    assert all("refused" not in r for r in rows)
    for r in rows:
        if r["key"].startswith("memory/"):
            assert len(r["answers"]) == 4 and r["got"] == sum(r["right"])
        if r["key"].startswith("loss/"):
            assert 0 < r["got"] / r["of"] < 10
        if r["key"].startswith("anatomy/") and r["method"] == "global":
            assert r["evictions"] > 0 and r["bytes"] > 0 and sum(r["counts"]) == sum(map(sum, r["lengths"]))
    quality(tmp_path)
    assert len([r for r in stored(tmp_path) if r["key"] != "meta"]) == len(rows), "a finished run measures nothing again"
    quality(tmp_path, "report")
    data = json.loads((tmp_path / "out" / "quality.json").read_text())
    assert {c["method"] for c in data["costs"]} == {"full", "global", "streaming"}
    assert (tmp_path / "out" / "QUALITY.md").exists()


def test_forks_are_checked(tmp_path):
    assert "bitwise" in quality(tmp_path, "selftest") or "nothing to compare" in quality(tmp_path, "selftest")


def test_texts(tmp_path):
    """A table of any model and texts; what was scored is not scored again."""
    if not pathlib.Path(BINARY).exists():
        pytest.skip(f"skip: {BINARY} is not built")
    (tmp_path / "notes").mkdir()
    for n in range(3):
        (tmp_path / "notes" / f"{n}.txt").write_text(" ".join(f"The code of garage {i * (n + 3)} is {i * i}." for i in range(60)))
    (tmp_path / "notes" / "short.txt").write_text("Too short.")
    chat = {"messages": [{"role": "user", "content": "word " * 300}, {"role": "assistant", "content": "Noted."}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat) + "\n")
    command = [sys.executable, str(ROOT / "bench" / "quality" / "texts.py"), str(tmp_path / "notes"), str(tmp_path / "chats.jsonl"),
               "--length", "256", "--methods", "global,streaming", "--binary", BINARY, "--store", str(tmp_path / "scores")]
    runs = [subprocess.run(command, capture_output=True, text=True, timeout=300) for _ in range(2)]
    assert all(r.returncode == 0 for r in runs), runs[0].stderr
    lines = runs[0].stdout.splitlines()
    assert lines[0] == "notes: 3 texts, chats: 1 texts of 256 tokens"
    assert [line.split(" | ")[0] for line in lines[3:]] == ["| full", "| global", "| streaming"]
    assert runs[0].stdout == runs[1].stdout
    rows = [json.loads(line) for line in (tmp_path / "scores").read_text().splitlines()]
    assert len(rows) == 4 * 5 == len({r["key"] for r in rows}) and all(r["tokens"] == 128 for r in rows)
    assert "scored" in runs[0].stderr and "scored" not in runs[1].stderr


def test_an_agents_sessions(tmp_path):
    """All ways to hold a session; a finished run asks nothing again."""
    if not pathlib.Path(BINARY).exists():
        pytest.skip(f"skip: {BINARY} is not built")
    command = [sys.executable, str(ROOT / "bench" / "quality" / "agent.py"), "--turns", "7", "--result", "40,60", "--every", "3", "--sessions", "1",
               "--share", "0.5", "--binary", BINARY, "--out", str(tmp_path / "rows.jsonl")]
    runs = [subprocess.run(command, capture_output=True, text=True, timeout=300) for _ in range(2)]
    assert all(r.returncode == 0 for r in runs), runs[0].stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert runs[0].stdout == runs[1].stdout and len({(r["method"], r["step"], r["which"]) for r in rows}) == len(rows)
    sizes = {m: max(r["tokens"] for r in rows if r["method"] == m) for m in ("full", "drop", "global", "snapkv", "streaming")}
    assert sizes["drop"] < sizes["full"] == sizes["global"]


def test_texts_of_a_running_daemon(tmp_path, daemon):
    """The daemon serves its model under another name, with a key, and without a chat template."""
    model = tmp_path / "model"
    shutil.copytree(ROOT / "bundled/keepd-nano", model)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    config = model / "tokenizer_config.json"
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "chat_template"}))
    d = daemon("--model", str(model), "--served-model-name", "some-other-name", "--api-key", "secret")
    (tmp_path / "notes.txt").write_text(" ".join(f"The code of garage {i} is {i * i}." for i in range(60)))
    command = [sys.executable, str(ROOT / "bench/quality/texts.py"), "--url", d.url, str(tmp_path / "notes.txt"), "--length", "256",
               "--shares", "0.25", "--methods", "streaming"]
    environment = dict(os.environ, KEEPD_API_KEY="secret")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert [line.split(" | ")[0] for line in done.stdout.splitlines()[3:]] == ["| full", "| streaming"]
    done = subprocess.run([*command, "--length", "3000"], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 1 and "the longest has" in done.stderr and "lower --length" in done.stderr
    done = subprocess.run([*command, "--length", "8192"], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 1 and "the daemon takes texts below 8192 tokens" in done.stderr
