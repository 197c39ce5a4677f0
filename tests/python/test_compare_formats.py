"""bench/compare/formats: what its tables say of the machine and the engines, and the ratios in their rows."""
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench" / "compare"))
import formats  # noqa: E402


@pytest.mark.parametrize("cpuinfo, shown", [
    ("model name\t: Some Xeon\nflags\t\t: fpu avx2 avx512f avx512_vnni amx_tile amx_int8\n", "Some Xeon (AVX2, AVX-512, AVX-512 VNNI, AMX int8)"),
    ("model name\t: Some Zen\nflags\t\t: fpu avx2\nmodel name\t: Some Zen\n", "Some Zen (AVX2)"),
    ("CPU architecture: 8\n", "unknown processor (no known extension)"),
])
def test_machine(cpuinfo, shown):
    assert formats.machine(cpuinfo) == shown


@pytest.mark.parametrize("says, version", [
    ("version: 0.5.0-dev (build 1, commit 0c1e570)", "0.5.0-dev 0c1e570"),    # llama.cpp
    ("version: 4840 (8337e4cd3)", "4840 8337e4cd3"),                          # ik_llama.cpp
])
def test_version_of_a_bench(tmp_path, says, version):
    bench = tmp_path / "llama-batched-bench"
    bench.write_text(f"#!/bin/sh\necho '{says}'\necho 'built with cc 1 for a machine (of tests)' >&2\n")
    bench.chmod(0o755)
    assert formats.ggml_version(tmp_path) == version


def test_row_compares_turns_of_one_round():
    """The medians of the rates would give a ratio of 1; a round whose others failed has none."""
    rounds = [{"read": 1e9, "rates": {"keepd": {"1": 10.0}, "a": {"1": 20.0}, "b": {"1": 5.0}}},
              {"read": 2e9, "rates": {"keepd": {"1": 20.0}, "a": {"1": 10.0}}},
              {"read": 1e9, "rates": {"keepd": {"1": 15.0}}}]
    cells = [c.strip() for c in formats.line("1", rounds, ["a", "keepd", "b"], 50e6).strip("|").split("|")]
    assert cells == ["generation, batch 1", "15.0", "15.0", "5.0", "1.25 (0.50-2.00)", "50 (50-75) %"]


def test_keepd_with_several_options():
    """Each has a turn and its own ratio, to the best of the others and never to the other turn of keepd."""
    class Args:
        keepd_options = ["--x 1", "--x 2"]
    one, two = formats.keepds(Args)
    assert formats.keepds(Args) == {one: "--x 1", two: "--x 2"}
    rounds = [{"read": 1e9, "rates": {one: {"1": 10.0}, two: {"1": 40.0}, "a": {"1": 20.0}}},
              {"read": 1e9, "rates": {one: {"1": 30.0}, "a": {"1": 20.0}}}]
    cells = [c.strip() for c in formats.line("1", rounds, ["a", one, two], 10e6).strip("|").split("|")]
    assert cells == ["generation, batch 1", "20.0", "20.0", "40.0", "1.00 (0.50-1.50)", "20 (10-30) %", "2.00", "40 %"]
