"""record.py against a small server that answers as the daemon does."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import record
from eviction_trace import parse_record


class Daemon(BaseHTTPRequestHandler):
    """Answers "busy" once, refuses chats that say so, and leaves out what `missing` names."""

    busy, missing, bodies, lost = 0, (), [], 0

    def answer(self, status, value):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.answer(200, {"data": [{"id": "tiny"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).bodies.append(body)
        if type(self).busy:
            type(self).busy -= 1
            return self.answer(503, {"error": {"message": "busy"}})
        if "refuse" in body["messages"][-1]["content"]:
            return self.answer(400, {"error": {"message": "too long"}})
        kv = {"policy": body["kv"]["policy"], "budget": body["kv"]["budget"],
              "trace": [{"tokens": 3, "evicted": [[[0], [1]]]}]}
        value = {"choices": [{"message": {"content": "b"}, "token_ids": [4, 5], "finish_reason": "stop"}],
                 "prompt_token_ids": [1, 2, 3], "usage": {"kv_details": kv}}
        if type(self).lost:
            kv["trace_lost"] = type(self).lost
        for key in type(self).missing:
            kv.pop(key, None), value.pop(key, None)
        self.answer(200, value)

    def log_message(self, *_):
        pass


@pytest.fixture
def daemon():
    handler = type("Handler", (Daemon,), {"bodies": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    handler.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield handler
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def collect(script, daemon, tmp_path, monkeypatch):
    monkeypatch.setattr(record.time, "sleep", lambda _: None)
    out = tmp_path / "records.jsonl"

    def run(*texts):
        (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": [
            {"role": "user", "content": t}, {"role": "assistant", "content": "old"}]}) + "\n" for t in texts))
        failure, _, err = script(record, "--url", daemon.url, "--chats", tmp_path / "chats.jsonl", "--out", out,
                                 "--policy", "gkv", "--budget", 64, "--parallel", 2)
        return failure, err, [json.loads(s) for s in out.read_text().splitlines()]
    return run


def test_answers_become_records_that_distill_reads(collect, daemon):
    failure, err, records = collect("a", "b", "c")
    assert failure is None and err == "" and sorted(r["source"] for r in records) == [1, 2, 3]
    parsed = parse_record(json.dumps(records[0]), 1, 2, 10)
    assert parsed.ids == [1, 2, 3, 4, 5] and parsed.prompt == 3
    assert parsed.until.tolist() == [[[3, 5, 5, 5, 5], [5, 3, 5, 5, 5]]]
    body = daemon.bodies[0]
    assert [m["role"] for m in body["messages"]] == ["user"], "the daemon answers in the place of the last answer"
    assert body["kv"] == {"policy": "gkv", "budget": 64, "reuse": False, "retain": False, "report": "trace"}
    assert body["model"] == "tiny" and body["return_token_ids"] is True


def test_only_what_is_missing_is_asked_again(collect, daemon, tmp_path):
    collect("a", "b")
    with (tmp_path / "records.jsonl").open("a") as f:
        f.write('{"source": 3, "prompt_')             # a line cut off by a crash
    daemon.bodies.clear()
    _, _, records = collect("a", "b", "c")
    assert [b["messages"][0]["content"] for b in daemon.bodies] == ["c"]
    assert sorted(r["source"] for r in records) == [1, 2, 3]


def test_a_busy_daemon_is_asked_again(collect, daemon):
    daemon.busy = 3
    failure, _, records = collect("a")
    assert failure is None and len(records) == 1 and len(daemon.bodies) == 4


def test_a_refused_request_costs_only_itself(collect):
    failure, err, records = collect("a", "refuse", "c")
    assert "1 of 3 requests got no record" in failure and "chats.jsonl:2: HTTP 400: too long" in err
    assert sorted(r["source"] for r in records) == [1, 3]


def test_a_daemon_without_traces_is_named(collect, daemon):
    daemon.missing = ("trace",)
    failure, err, records = collect("a")
    assert failure and "no usage.kv_details.trace" in err and records == []


def test_an_incomplete_trace_is_no_record(collect, daemon):
    daemon.lost = 2
    failure, err, records = collect("a")
    assert failure and "whole trace" in err and records == []


def test_no_daemon(script, tmp_path):
    (tmp_path / "c").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    failure, _, _ = script(record, "--url", "http://127.0.0.1:9", "--chats", tmp_path / "c", "--out", tmp_path / "o")
    assert "http://127.0.0.1:9" in failure
