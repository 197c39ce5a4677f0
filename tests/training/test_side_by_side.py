"""bench/gpu/side_by_side.py on a CPU, with a tiny model: the same weights and prompts for keepd and transformers."""
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("KEEPD_BIN", ROOT / "build/keepd")
SCRIPT = ROOT / "bench/gpu/side_by_side.py"


def run(tmp_path, *flags):
    report = tmp_path / "report.json"
    done = subprocess.run([sys.executable, SCRIPT, "--device", "cpu", "--shape", "tiny", "--requests", "3", "--prompt", "32", "--out", "8",
                           "--work", tmp_path / "work", "--json", report, "--limit", "600", *flags], text=True, capture_output=True, timeout=1800)
    return done, json.loads(report.read_text()) if report.exists() else None


def test_all_engines_answer(tmp_path):
    if not os.path.exists(BINARY):
        pytest.skip(f"skip: {BINARY} is not built")
    done, report = run(tmp_path, "--keepd", str(BINARY), "--budget", "256")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [e["name"] for e in report["engines"]] == ["keepd, full cache", "keepd, budget 256", "transformers, paged continuous batching"]
    assert report["left_out"] in (["vLLM: vllm is not installed"], ["vLLM: needs a GPU"]) and report["failed"] == []
    for engine in report["engines"]:
        assert engine["generated"] == 24 and engine["tokens_per_second"] > 0 and engine["peak_mib"] > 0
    full, budget, other = (e["agreement"] for e in report["engines"])
    assert full == budget == 1, "the budget holds everything"
    assert other > 0.8, "the same weights in float32"
    assert "| transformers, paged continuous batching |" in done.stdout


def test_an_engine_that_fails_is_named(tmp_path):
    """The others are compared all the same; the status tells."""
    broken = tmp_path / "keepd"
    broken.write_text("#!/bin/sh\necho 'no luck today' >&2\nexit 3\n")
    broken.chmod(0o755)
    done, report = run(tmp_path, "--keepd", str(broken))
    assert done.returncode == 1 and [e["name"] for e in report["engines"]] == ["transformers, paged continuous batching"]
    assert "status 3" in report["failed"][0] and "no luck today" in report["failed"][0]
    assert {"keepd, full cache: it failed", "keepd, budget: it failed"} <= set(report["left_out"])
