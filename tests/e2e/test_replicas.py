"""Two replicas of the model in one daemon: conversations stay where they are, answers are those of one
replica, and what an operator sees, deletes and stops is all of them."""
import concurrent.futures
import contextlib
import json
import os
import pathlib
import subprocess

import pytest
import requests
from answers import cached, tokens
from prometheus_client.parser import text_string_to_metric_families

ROOT = pathlib.Path(__file__).resolve().parents[2]
TWO = ("--data-parallel-size", "2", "--threads", "2")
FLAGS = ("--kv-budget", "64", "--kv-buffer", "16", "--kv-chunk", "64", "--kv-policy", "global")
NAMES = ("Nora", "Otto", "Ada", "Karl", "Mina", "Juri")


def first_turn(name):
    return [{"role": "user", "content": f"My sister {name} lives in Lisbon. The code of the garage is 4815. " * 6}]


def next_turn(messages, answer):
    return messages + [{"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
                       {"role": "user", "content": "What is the code of the garage?"}]


def ask(d, messages):
    return d.chat(messages, max_tokens=16, temperature=1, seed=3, logprobs=True)


@contextlib.contextmanager
def busy(d):
    """A request that generates for as long as the block runs."""
    body = {"model": "keepd-nano", "prompt": "The river is near the", "max_tokens": 8000, "ignore_eos": True, "stream": True,
            "kv": {"retain": False}}
    with requests.post(f"{d.url}/v1/completions", json=body, stream=True, timeout=60) as r:
        lines = r.iter_lines()
        assert next(lines).startswith(b"data: {")
        yield
        assert next(line for line in lines if line) != b"data: [DONE]"


def by_engine(d, name):
    text = requests.get(f"{d.url}/metrics", timeout=10).text
    return {s.labels["engine"]: s.value for family in text_string_to_metric_families(text)
            for s in family.samples if s.name == name}


def engines_of(d):
    return {c["id"]: c["engine"] for c in d.kv()["conversations"]}


def test_a_conversation_stays_with_its_replica(daemon):
    d = daemon(*TWO, *FLAGS)
    with busy(d):  # runs on the first replica, which is idle before
        answers = [ask(d, first_turn(name)) for name in NAMES[:2]]
        assert set(engines_of(d).values()) == {1}
        assert [row["engine"] for row in d.kv()["running"]] == [0]
    seconds = [ask(d, next_turn(first_turn(n), a)) for n, a in zip(NAMES, answers)]  # the first is idle now
    assert all(cached(a) > 0 for a in seconds)
    assert set(engines_of(d).values()) == {1}
    assert by_engine(d, "keepd_conversation_hits_total") == {"0": 0, "1": 2}
    assert by_engine(d, "vllm:e2e_request_latency_seconds_count")["1"] == 4
    assert by_engine(d, "keepd_connections").keys() == {"0"}


def dialogues(d):
    """Three turns of all dialogues; the requests of a turn run concurrently."""
    history, given = [first_turn(name) for name in NAMES], []
    with concurrent.futures.ThreadPoolExecutor(len(NAMES)) as pool:
        for _ in range(3):
            answers = list(pool.map(lambda messages: ask(d, messages), history))
            given.append([(tokens(a), cached(a)) for a in answers])
            history = [next_turn(h, a) for h, a in zip(history, answers)]
    return given


def test_answers_are_those_of_one_replica(daemon):
    one, two = daemon("--threads", "1", *FLAGS), daemon(*TWO, *FLAGS)
    expected = dialogues(one)
    assert all(c > 0 for turn in expected[1:] for _, c in turn)
    assert dialogues(two) == expected
    assert sum(by_engine(two, "keepd_conversation_hits_total").values()) == 2 * len(NAMES)


def test_operators_see_and_delete_all(daemon):
    d = daemon(*TWO, *FLAGS)
    ask(d, first_turn("Otto"))  # runs on the first replica, because all are idle
    with busy(d):
        ask(d, first_turn("Nora"))  # runs on the second replica
    loads = requests.get(f"{d.url}/v1/loads", timeout=10).json()["loads"]
    assert [load["dp_rank"] for load in loads] == [0, 1]
    pool = d.kv()["pool"]
    assert pool["pages_total"] == sum(by_engine(d, "keepd_pages_total").values())
    assert requests.get(f"{d.url}/server_info", timeout=10).json()["data_parallel_size"] == 2
    rows = requests.get(f"{d.url}/v1/conversations", timeout=10).json()["data"]
    last = [row for row in rows if not row["superseded"]]  # the others are their checkpoints, and go with them
    assert sorted(row["engine"] for row in last) == [0, 1]
    for row in last:
        url = f"{d.url}/v1/conversations/{row['id']}"
        assert requests.delete(url, timeout=10).json()["deleted"] is True
        assert requests.delete(url, timeout=10).status_code == 404
    assert d.kv()["conversations"] == [] and d.kv()["pool"]["pages_used"] == 0


def test_choices_and_prompts_of_one_request(daemon):
    d = daemon(*TWO, *FLAGS)
    body = {"model": "keepd-nano", "prompt": ["My cat is called", "The code is"], "n": 3, "max_tokens": 8, "seed": 1,
            "temperature": 1}
    r = requests.post(f"{d.url}/v1/completions", json=body, timeout=60).json()
    assert [c["index"] for c in r["choices"]] == list(range(6))
    alone = [requests.post(f"{d.url}/v1/completions", json={**body, "prompt": p}, timeout=60).json()["choices"]
             for p in body["prompt"]]
    assert [c["text"] for c in r["choices"]] == [c["text"] for choices in alone for c in choices]


def test_one_state_directory(daemon, tmp_path):
    flags = ("--state-dir", str(tmp_path / "state"), "--state-idle", "86400", *FLAGS)
    d = daemon(*TWO, *flags)
    answers = [ask(d, first_turn(name)) for name in NAMES[1:]]
    with busy(d):
        answers = [ask(d, first_turn(NAMES[0])), *answers]
    assert set(engines_of(d).values()) == {0, 1}
    assert d.stop() == 0
    assert len(list((tmp_path / "state").glob("*.state"))) == len(NAMES)
    d = daemon(*TWO, *flags)
    assert set(engines_of(d).values()) == {None}
    assert all(cached(ask(d, next_turn(first_turn(n), a))) > 0 for n, a in zip(NAMES[2:], answers[2:]))
    with busy(d):
        assert all(cached(ask(d, next_turn(first_turn(n), a))) > 0 for n, a in zip(NAMES[:2], answers))
    assert set(engines_of(d).values()) == {0, 1}
    assert sum(by_engine(d, "keepd_state_restored_total").values()) == len(NAMES)


def test_draining_finishes_what_both_have(daemon):
    d = daemon(*TWO, *FLAGS)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        body = {"model": "keepd-nano", "prompt": "The river", "max_tokens": 300, "ignore_eos": True, "stream": True}
        streams = [requests.post(f"{d.url}/v1/completions", json=body, stream=True, timeout=60) for _ in range(8)]
        lines = [stream.iter_lines() for stream in streams]
        assert all(next(line).startswith(b"data: {") for line in lines)
        d.process.terminate()
        ends = list(pool.map(lambda rest: [json.loads(x[6:]) for x in rest if x.startswith(b"data: {")][-1], lines))
    assert [end["choices"][0]["finish_reason"] for end in ends] == ["length"] * 8
    assert d.process.wait(timeout=60) == 0


@pytest.mark.parametrize("flags", [("--data-parallel-size", "0"), ("--data-parallel-size", "65"),
                                   ("--data-parallel-size", "3", "--threads", "2")])
@pytest.mark.parametrize("check", [(), ("--check-config",)])
def test_what_cannot_work_is_refused_by_name(flags, check):
    binary = os.path.abspath(os.environ.get("KEEPD_BIN", ROOT / "build" / "keepd"))
    if not pathlib.Path(binary).exists():
        pytest.skip(f"skip: {binary} is not built")
    run = subprocess.run([binary, "--model", ROOT / "bundled/keepd-nano", "--port", "0", *flags, *check],
                         capture_output=True, text=True, timeout=60)
    assert run.returncode == 78
    assert "data-parallel-size" in run.stderr
