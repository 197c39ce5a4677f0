"""The daemon's defaults: texts go on in the same memory, a budget that changes nothing is named, and so are
sizes that the machine does not have."""
import os
import pathlib
import re
import signal
import subprocess

import pytest
import requests
from test_shift import FLAGS, complete, ids, shifts

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.path.abspath(os.environ.get("KEEPD_BIN", ROOT / "build" / "keepd"))
NANO = str(ROOT / "bundled/keepd-nano")


def check(*flags):
    """The status and the messages of a start that stops before weights are loaded."""
    if not pathlib.Path(BINARY).exists():
        pytest.skip(f"skip: {BINARY} is not built")
    r = subprocess.run([BINARY, NANO, "--check-config", *flags], capture_output=True, text=True, timeout=60)
    return r.returncode, r.stderr


def log_of(*flags):
    """The log of a daemon until it is ready."""
    process = subprocess.Popen([BINARY, NANO, "--port", "0", *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ready = process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    out, log = process.communicate(timeout=60)
    assert ready.startswith("keepd ready at "), log
    return log


def test_texts_with_a_budget_go_on(daemon):
    d = daemon(*FLAGS)
    assert complete(d, ids(400), kv={"overflow": None})["usage"]["kv_details"]["shifts"] == shifts(407)
    error = complete(d, ids(400), 400, kv={"overflow": None, "policy": "full"})["error"]
    assert error["code"] == "context_length_exceeded" and "kv.overflow 'shift'" in error["message"] and "--kv-policy" in error["message"]
    # Settings that cannot be shifted are served until the positions end.
    assert complete(d, ids(200), kv={"overflow": None, "budget": 200})["usage"]["kv_details"]["shifts"] == 0
    assert complete(d, ids(400), 400, kv={"overflow": None, "budget": 200})["error"]["code"] == "context_length_exceeded"


def test_the_option_turns_that_off(daemon):
    error = complete(daemon(*FLAGS, "--kv-overflow", "error"), ids(400), 400, kv={"overflow": None})["error"]
    assert error["code"] == "context_length_exceeded" and "--kv-overflow" in error["message"]


def test_a_model_without_gates_is_served_by_default(daemon):
    """Policy full cannot shift; that is no reason to refuse the start, unless shifts were asked for."""
    d = daemon("--gates", "", "--max-model-len", "256")
    assert complete(d, ids(300), 400, kv={"policy": None, "overflow": None})["error"]["code"] == "context_length_exceeded"
    status, log = check("--gates", "", "--kv-overflow", "shift")
    assert status == 78 and "kv-overflow" in log, log


# --- a budget that changes nothing ---

def test_a_budget_without_gates_warns_at_the_start():
    status, log = check("--gates", "", "--kv-budget", "512")
    assert status == 0 and "kv-budget 512 changes nothing: policy full keeps everything" in log, log
    assert "--kv-policy snapkv" in log and "--gates FILE" in log
    for flags in ([], ["--gates", ""], ["--gates", "", "--kv-budget", "512", "--kv-policy", "streaming"], ["--kv-budget", "512"]):
        assert "changes nothing" not in check(*flags)[1], flags
    assert "changes nothing" in check("--kv-policy", "full", "--kv-budget", "512")[1]


def test_a_budget_without_gates_warns_in_the_answer(daemon):
    d = daemon("--gates", "")

    def details(path="/v1/chat/completions", **fields):
        body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2, **fields}
        r = requests.post(d.url + path, json=body, timeout=60)
        assert r.status_code == 200, r.text
        return r.json()["usage"]["kv_details"]
    for path in ("/v1/chat/completions", "/v1/messages"):
        warning = details(path, kv={"budget": 64})["warning"]
        assert "kv.budget changes nothing" in warning and "'streaming'" in warning and "keepd fit" in warning
    assert "warning" not in details() and "warning" not in details(kv={"budget": 64, "policy": "streaming"})


# --- sizes ---

@pytest.mark.parametrize("flags, option", [(("--kv-pool-bytes", "1000000G"), "kv-pool-bytes"), (("--kv-budget", "2000000000"), "kv-budget")])
def test_sizes_beyond_the_machine(flags, option):
    status, log = check(*flags)
    total = int(re.search(r"MemTotal:\s+(\d+)", pathlib.Path("/proc/meminfo").read_text()).group(1)) * 1024
    assert status == 78 and f"keepd: {option}: " in log, log
    assert float(re.search(r"([\d.]+) GB in all", log).group(1)) <= total * 1e-9 + 0.1


def test_a_budget_beyond_the_positions_warns():
    status, log = check("--kv-budget", "10000")
    assert status == 0 and "kv-budget 10000 is more than the 8192 positions that a text may have: nothing is ever evicted" in log
    assert "nothing is ever" not in check("--max-model-len", "512")[1]


def test_the_log_counts_conversations():
    """1 GiB of pages of 8,576 bytes; a conversation has 1,664 entries per head at most, in 24 streams of pages of 32."""
    most = 24 * (1024 + 128 + 512 + 31) // 32
    log = log_of("--kv-pool-bytes", "1G")
    found = re.search(r"cache: 1\.1 GB, (\d+) conversations with a budget of 1024 entries per head\n", log)
    assert found and int(found.group(1)) >= 2**30 // 8576 // most, log
    assert re.search(rf"cache: 1\.1 GB, {2**30 // 8576 // (24 * 256)} conversations of 8192 tokens\n", log_of("--gates", "", "--kv-pool-bytes", "1G"))


# --- roles ---

def test_a_role_that_nobody_knows(daemon):
    d = daemon()
    body = {"messages": [{"role": "system", "content": "Be short."}, {"role": "usr", "content": "Hello!"}], "max_tokens": 2}
    r = requests.post(f"{d.url}/v1/chat/completions", json=body, timeout=60)
    error = r.json()["error"]
    assert r.status_code == 400 and error["param"] == "messages[1].role" and "'messages[1].role'" in error["message"], error
    assert "'usr'" in error["message"] and "system, developer, user, assistant, tool" in error["message"]
