"""keepd bench measures the engine in the process; loading shows its progress."""
import errno
import json
import os
import pathlib
import pty
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.path.abspath(os.environ.get("KEEPD_BIN", ROOT / "build" / "keepd"))
MODEL = str(ROOT / "bundled/keepd-nano")
SMALL = ("-p", "16,24", "-n", "4", "-b", "1,3", "-r", "2", "--threads", "1")


def bench(*args):
    return subprocess.run([BINARY, "bench", *args], capture_output=True, text=True, timeout=120)


def test_the_table_has_a_row_for_each_test():
    run = bench(MODEL, *SMALL)
    assert run.returncode == 0, run.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in run.stdout.splitlines()]
    head, rule, rows = rows[0], rows[1], rows[2:]
    assert head == ["model", "weights", "backend", "threads", "cache", "test", "batch", "tokens/s"]
    assert all(set(cell) <= set("-:") for cell in rule)
    assert [(row[5], row[6]) for row in rows] == [
        ("prompt 16", "1"), ("prompt 16", "3"), ("prompt 24", "1"), ("prompt 24", "3"), ("generate 4", "1"), ("generate 4", "3")]
    for row in rows:
        assert row[0] == "keepd-nano" and row[3] == "1" and row[4] == "global 1024 bf16"
        mean, spread = map(float, row[7].split(" ± "))
        assert mean > 0 and spread >= 0


def test_json_has_every_run():
    run = bench(MODEL, *SMALL, "--json", "--kv-policy", "full", "--served-model-name", "mine")
    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout)
    assert len(rows) == 6
    for row in rows:
        assert row["model"] == "mine" and row["policy"] == "full" and row["budget"] is None
        assert len(row["rates"]) == 2 and all(rate > 0 for rate in row["rates"])
        assert row["mean"] == pytest.approx(sum(row["rates"]) / 2)


def test_without_a_number_there_are_two_to_five_repeats():
    run = bench(MODEL, "-p", "16", "-n", "0", "-b", "1", "--json", "--threads", "1")
    assert run.returncode == 0, run.stderr
    assert 2 <= len(json.loads(run.stdout)[0]["rates"]) <= 5


def test_nothing_is_cut_off():
    """Rows of more than a mebibyte are whole, and a table that cannot be written is a failure."""
    name = "n" * 100_000
    quick = ("-p", ",".join(["1"] * 12), "-n", "0", "-b", "1", "-r", "1", "--threads", "1")
    run = bench(MODEL, *quick, "--json", "--served-model-name", name)
    assert run.returncode == 0, run.stderr
    assert [row["model"] for row in json.loads(run.stdout)] == [name] * 12
    with open("/dev/full", "w") as full:
        run = subprocess.run([BINARY, "bench", MODEL, *quick], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert run.returncode != 0 and "cannot be written" in run.stderr


@pytest.mark.parametrize("args, message", [
    ((), "no model given"),
    ((MODEL, "-p", "8,x"), "-p: must be whole numbers"),
    ((MODEL, "-b", "0"), "-b: must be whole numbers from 1"),
    ((MODEL, "-r"), "-r: needs a value"),
    ((MODEL, "--thread", "1"), "thread"),
    ((MODEL, "-p", "9000", "-r", "1", "--kv-overflow", "error"), "maximum context length is 8192 tokens"),
    (("/nowhere",), "/nowhere"),
])
def test_refusals(args, message):
    run = bench(*args)
    assert run.returncode == 78 and message in run.stderr, run.stderr


def test_progress_elsewhere_is_two_lines():
    run = bench(MODEL, *SMALL)
    lines = [line for line in run.stderr.splitlines() if "load" in line]
    assert len(lines) == 2 and "\r" not in run.stderr
    assert re.search(r"loading weights: 11\.\d MB$", lines[0])
    assert re.search(r"loaded 11\.\d MB in \d+\.\d s, \S+ .?B/s$", lines[1])


def test_progress_on_a_terminal_is_one_line_that_is_drawn_again():
    master, slave = pty.openpty()
    run = subprocess.run([BINARY, "bench", MODEL, *SMALL], stdout=subprocess.PIPE, stderr=slave, timeout=120)
    os.close(slave)
    shown = b""
    try:
        while part := os.read(master, 65536):
            shown += part
    except OSError as error:  # how a terminal without a writer ends
        assert error.errno == errno.EIO
    os.close(master)
    shown = shown.decode()
    assert run.returncode == 0
    drawn = re.findall(r"\r\x1b\[Kweights \[#* *\] +(\d+) %  \S+ \S+ of 11\.\d MB", shown)
    assert drawn and drawn[-1] == "100" and sorted(map(int, drawn)) == list(map(int, drawn))
    assert re.search(r"\r\x1b\[Kloaded 11\.\d MB in \d+\.\d s, \S+ .?B/s\r\n", shown)
    assert "loading weights:" not in shown


@pytest.mark.parametrize("command", ["bench", "fit"])
def test_options_that_change_nothing_are_named(command):
    run = subprocess.run([BINARY, command, "/nowhere", "--flash-attn", "on"], capture_output=True, text=True, timeout=60)
    assert run.returncode != 0 and "--flash-attn" in run.stderr and "/nowhere" in run.stderr
