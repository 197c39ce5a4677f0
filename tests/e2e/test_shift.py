"""kv.overflow "shift" on the real daemon, with 256 of keepd-nano's positions: texts go on in the same memory, an answer
does not depend on company, on the split of its prompt or on a restart, and what cannot be shifted is refused by name."""
import concurrent.futures
import json
import os
import subprocess
import sys

import pytest
import requests
from conftest import ROOT
from test_state import wait_for_files

POSITIONS = 256
FLAGS = ("--max-model-len", str(POSITIONS), "--kv-budget", "64", "--kv-chunk", "32", "--kv-buffer", "16", "--kv-pool-bytes", "32M")
STREAMS = 6 * 4  # layers and KV heads of keepd-nano
PAGES = {"auto": (32, 8576), "q8": (64, 9216), "q4": (128, 10240)}  # entries and bytes of a page
SHIFT = {"policy": "global", "overflow": "shift"}


def ids(count, seed=1):
    """Token ids of a text, by a linear congruence."""
    out = []
    for _ in range(count):
        seed = (seed * 1103515245 + 12345) % 2**31
        out.append(300 + seed // 65536 % 400)
    return out


def complete(d, prompt, status=200, **fields):
    kv = {**SHIFT, **fields.pop("kv", {})}
    body = {"model": "keepd-nano", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0, "kv": kv, **fields}
    r = requests.post(f"{d.url}/v1/completions", json=body, timeout=300)
    assert r.status_code == status, r.text
    return r.json()


def scores(answer):
    return answer["choices"][0]["logprobs"]["token_logprobs"], answer["choices"][0]["text"]


def shifts(tokens):
    return 0 if tokens <= POSITIONS else (tokens - POSITIONS - 1) // 64 + 1


@pytest.mark.parametrize("kv_dtype", ["auto", "q8", "q4"])
def test_a_text_goes_on_in_the_same_memory(daemon, kv_dtype):
    d = daemon(*FLAGS, "--kv-dtype", kv_dtype)
    slots, size = PAGES[kv_dtype]
    for count in (100, 247, 249, 700, 3000):
        details = complete(d, ids(count), kv={"reuse": False})["usage"]["kv_details"]
        assert details["shifts"] == shifts(count + 7), details
        held, pages = details["kept_entries"], details["bytes"] // size
        assert details["bytes"] == pages * size and held <= STREAMS * (64 + 16)
        # A stream's last page is partly filled, and no other: how many pages that makes depends on how entries are divided.
        assert held <= pages * slots <= held + STREAMS * (slots - 1)
    assert d.metric("keepd_shifts_total") == sum(shifts(count + 7) for count in (249, 700, 3000))
    assert d.metric("keepd_preemptions_total") == 0


def test_the_last_position_is_where_it_was_without(daemon):
    d = daemon(*FLAGS)
    for count in (POSITIONS - 8, POSITIONS - 7):
        kv = {"reuse": False}
        shifted = complete(d, ids(count), kv=kv)
        if count + 8 <= POSITIONS:
            assert scores(complete(d, ids(count), kv={**kv, "overflow": "error"})) == scores(shifted)
        else:
            error = complete(d, ids(count), 400, kv={**kv, "overflow": "error"})["error"]
            assert error["code"] == "context_length_exceeded" and error["n_ctx"] == POSITIONS


@pytest.mark.parametrize("kv_dtype", ["auto", "q8", "q4"])
def test_an_answer_is_its_own(daemon, kv_dtype):
    policies = ["global", "streaming", "snapkv", "h2o", "rkv", "d2o"]
    asked = [(ids(300 + 150 * i, i + 1), {"policy": name, "reuse": False}) for i, name in enumerate(policies)]
    flags = (*FLAGS, "--kv-dtype", kv_dtype)
    d, other = daemon(*flags), daemon(*flags, "--max-num-batched-tokens", "37", "--max-num-seqs", "8", "--tensor-parallel-size", "2")
    alone = [scores(complete(d, prompt, kv=kv)) for prompt, kv in asked]
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        assert list(pool.map(lambda a: scores(complete(other, a[0], kv=a[1])), asked)) == alone


def test_turns_continue_across_shifts_and_restarts(daemon, tmp_path):
    state = ("--state-dir", str(tmp_path / "state"), "--state-idle", "0")
    d = daemon(*FLAGS, *state)
    first = complete(d, ids(500), return_token_ids=True)
    longer = ids(500) + first["choices"][0]["token_ids"] + ids(200, 7)
    wait_for_files(tmp_path / "state", 1)
    second = complete(d, longer)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 507
    # The answer is edited away: the prompt goes on from the end of the first prompt, at the places of fewer tokens.
    edited = complete(d, ids(500) + ids(40, 9))
    assert edited["usage"]["prompt_tokens_details"]["cached_tokens"] == 500
    assert d.stop() == 0
    again = daemon(*FLAGS, *state)
    restored = complete(again, longer + ids(30, 3))
    assert restored["usage"]["prompt_tokens_details"]["cached_tokens"] >= 507
    assert restored["usage"]["kv_details"]["shifts"] == shifts(len(longer) + 30 + 7)
    assert again.stop() == 0
    # With another number of positions the places would be others: the file is not used.
    fewer = daemon(*FLAGS[2:], "--max-model-len", "384", *state)
    assert complete(fewer, longer + ids(30, 3))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_what_cannot_be_shifted_is_refused_by_name(daemon):
    d = daemon(*FLAGS, "--kv-overflow", "error")
    for kv, field in (({"policy": "full"}, "kv.overflow"), ({"policy": "ems"}, "kv.overflow"), ({"budget": 200}, "kv.budget"),
                      ({"sinks": 65, "budget": 100}, "kv.sinks"), ({"overflow": "wrap"}, "kv.overflow"), ({"overflow": 1}, "kv.overflow")):
        error = complete(d, ids(300), 400, kv=kv)["error"]
        assert error["param"] == field, error
    error = complete(d, ids(300), 400, max_tokens=257)["error"]
    assert error["param"] == "max_tokens" and "at most 256 tokens" in error["message"], error
    assert complete(d, ids(300), 400, kv={"overflow": None})["error"]["code"] == "context_length_exceeded"


def test_long_chats_are_counted(daemon):
    d = daemon(*FLAGS, "--kv-overflow", "shift")
    messages = [{"role": "user", "content": "The cat sat on the mat. " * 100}]
    for path in ("/v1/chat/completions/input_tokens", "/v1/messages/count_tokens", "/apply-template"):
        r = requests.post(f"{d.url}{path}", json={"model": "keepd-nano", "messages": messages}, timeout=60)
        assert r.status_code == 200, (path, r.text)
    counted = requests.post(f"{d.url}/v1/messages/count_tokens", json={"model": "keepd-nano", "messages": messages}, timeout=60).json()
    assert counted["input_tokens"] > POSITIONS


def test_a_shifted_text_is_truncated_in_llama_cpps_words(daemon):
    d = daemon(*FLAGS, "--kv-overflow", "shift")
    for count, truncated in ((POSITIONS + 44, True), (POSITIONS - 5, False)):
        body = {"prompt": ids(count), "n_predict": 4, "ignore_eos": True}
        answer = requests.post(f"{d.url}/completion", json=body, timeout=60).json()
        assert answer["tokens_predicted"] == 4 and answer["truncated"] is truncated, answer


def test_the_servers_default(daemon):
    d = daemon(*FLAGS, "--kv-overflow", "shift")
    assert complete(d, ids(400), kv={"overflow": None})["usage"]["kv_details"]["shifts"] == shifts(407)
    full = complete(d, ids(400), 400, kv={"overflow": None, "policy": "full"})["error"]
    assert full["code"] == "context_length_exceeded"
    for kv, field in (({"policy": "lagkv", "lag": 1}, "kv.lag"), ({"policy": "keydiff", "window": 3}, "kv.window"), ({"policy": "none"}, "kv.policy")):
        error = complete(d, ids(400), 400, kv={"overflow": None, **kv})["error"]
        assert error["param"] == field, error


def test_the_endless_dialogue(tmp_path):
    binary = os.path.abspath(os.environ.get("KEEPD_BIN", ROOT / "build/keepd"))
    out, svg = tmp_path / "run.jsonl", tmp_path / "run.svg"
    tool = [sys.executable, str(ROOT / "bench/quality/endless.py")]
    flags = [f"--flag={flag}" for flag in FLAGS]
    subprocess.run([*tool, "--binary", binary, "--model", str(ROOT / "bundled/keepd-nano"), "--tokens", "900", "--step", "400",
                    "--budget", "64", "--out", str(out), *flags], check=True, timeout=300)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows[-1]["tokens"] >= 900 and rows[-1]["repeated"]
    assert [r["shifts"] for r in rows] == [shifts(r["tokens"]) for r in rows]
    subprocess.run([*tool, "--plot", str(svg), str(out)], check=True, timeout=60)
    assert svg.read_text().startswith("<svg")
