"""bench/compare/chats.py: keepd on the bundled model beside a peer that says what it measured."""
import re
import subprocess
import sys

from conftest import ROOT

sys.path.append(str(ROOT / "bench/compare"))

from compare import joint_rate

PEER = """#!/bin/sh
echo "$@" >>"$0.asked"
[ "$(echo "$@" | grep -c 'ctk q8_0')" = 1 ] && rate=12.5 || rate=5.0
echo "|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |"
echo "|   200 |      8 |    2 |    416 |    1.000 |   400.00 |    0.500 |    $rate |    1.500 |   277.33 |"
"""


def test_a_row_has_the_best_of_the_others_and_the_ratio(tmp_path):
    peer = tmp_path / "llama-batched-bench"
    peer.write_text(PEER)
    peer.chmod(0o755)
    done = subprocess.run([sys.executable, ROOT / "bench/compare/chats.py", "--llama", tmp_path, "--chats", "2", "--seen", "200", "--ids", "900",
                           "--tokens", "16", "--rounds", "2", "--caches", "q4_0", "q8_0", "--out", tmp_path / "out", "--keepd",
                           ROOT / "build/keepd", "--keepd-options", "--kv-dtype q4 --kv-budget 64 --kv-chunk 32 --kv-buffer 16",
                           ROOT / "bundled/keepd-nano"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ik_llama.cpp: skipped" in done.stdout
    row = re.search(r"^\| 2 chats of 200 tokens \| ([\d.]+) \(([\d.]+)-([\d.]+)\) \| 12.5 \(q8_0\) \| ([\d.]+) \|$", done.stdout, re.MULTILINE)
    assert row, done.stdout
    median, low, high, ratio = map(float, row.groups())
    assert 0 < low <= median <= high and abs(median / 12.5 - ratio) < 0.1
    asked = (tmp_path / "llama-batched-bench.asked").read_text().splitlines()
    assert len(asked) == 2 and all("-npp 200 -ntg 16 -npl 2" in line and "-pps -no-kvu" in line for line in asked)


def test_a_rate_counts_the_time_in_which_all_generate():
    together = [[0.0, 1.0, 2.0, 3.0, 4.0], [0.5, 1.5, 2.5, 3.5, 4.5]]
    assert joint_rate(together) == 7 / 3.5


def test_a_rate_of_answers_that_hardly_meet_counts_all_their_time():
    assert joint_rate([[0.0, 1.0], [2.0, 4.0]]) == 3 / 4  # one after the other
    assert joint_rate([[0.0, 1.0, 2.0], [1.999, 3.0, 4.0]]) == 5 / 4
    assert joint_rate([[0.0, 1.0, 2.0]]) == 1
