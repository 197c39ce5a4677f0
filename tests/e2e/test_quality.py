"""The laboratory against the real daemon, at its smallest: does every kind of cell run, resume and get written up?"""
import json
import os
import pathlib
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
