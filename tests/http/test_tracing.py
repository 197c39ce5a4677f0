"""Spans of requests, sent to a collector that is up, down, slow or refuses them."""
import http.server
import json
import os
import socket
import threading

import pytest
from conftest import MODEL, chat_body, find_built

CHAT = "/v1/chat/completions"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """Answers with `statuses` in turn, the last one for ever, and keeps the spans that it took."""

    def __init__(self, *statuses, port=0):
        self.spans, self.requests = [], []
        left = list(statuses)
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status = left.pop(0) if len(left) > 1 else left[0]
                outer.requests.append((self.path, self.headers["Content-Type"], status))
                if status == 200:
                    for resource in body["resourceSpans"]:
                        assert {"key": "service.name", "value": {"stringValue": "keepd"}} in resource["resource"]["attributes"]
                        outer.spans += [span for scope in resource["scopeSpans"] for span in scope["spans"]]
                self.send_response(status)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def collector():
    opened = []

    def run(*statuses, port=0):
        opened.append(Collector(*statuses, port=port))
        return opened[-1]

    yield run
    for one in opened:
        one.close()


def flags(port):
    return "--otlp-endpoint", f"http://127.0.0.1:{port}"


def attributes(span):
    return {a["key"]: next(iter(a["value"].values())) for a in span["attributes"]}


def counts(daemon):
    values = daemon.metrics()
    return (values[("keepd_traces_exported_total",)], values["keepd_traces_dropped_total", ("reason", "queue_full")],
            values["keepd_traces_dropped_total", ("reason", "collector")])


def test_a_request_is_a_span_with_its_parts(start, collector):
    taker = collector(200)
    daemon = start(*flags(taker.port))
    body = {**chat_body("hello"), "max_tokens": 5, "ignore_eos": True}
    r = daemon.post(CHAT, body, headers={"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"})
    daemon.wait("the spans", lambda: len(taker.spans) == 4)
    assert {request[:2] for request in taker.requests} == {("/v1/traces", "application/json")}
    assert {span["traceId"] for span in taker.spans} == {TRACE}
    assert len({span["spanId"] for span in taker.spans}) == 4
    root, *parts = taker.spans
    assert root["name"] == f"chat {MODEL}" and root["kind"] == 2 and root["parentSpanId"] == PARENT
    assert [part["name"] for part in parts] == ["queue", "prompt", "generation"]
    assert {(part["parentSpanId"], part["kind"]) for part in parts} == {(root["spanId"], 1)}
    times = [int(root["startTimeUnixNano"])] + [int(part["startTimeUnixNano"]) for part in parts]
    assert times == sorted(times) and int(parts[-1]["endTimeUnixNano"]) <= int(root["endTimeUnixNano"])
    assert [part["endTimeUnixNano"] for part in parts[:-1]] == [part["startTimeUnixNano"] for part in parts[1:]]
    found = attributes(root)
    usage = r.json()["usage"]
    assert found["gen_ai.operation.name"] == "chat" and found["gen_ai.request.model"] == MODEL
    assert int(found["gen_ai.usage.input_tokens"]) == usage["prompt_tokens"]
    assert int(found["gen_ai.usage.output_tokens"]) == usage["completion_tokens"] == 5
    assert found["gen_ai.response.id"] == r.json()["id"] and found["keepd.request_id"] == "mine"
    assert found["gen_ai.response.finish_reasons"]["values"] == [{"stringValue": "length"}]
    assert found["http.response.status_code"] == "200" and found["http.route"] == CHAT and "status" not in root


def test_which_requests_are_recorded(start, collector):
    """Not those whose parent is not, nor questions; refused and streamed ones are. A traceparent that is none, or two of
    them, begin another trace."""
    taker = collector(200)
    daemon = start(*flags(taker.port))
    daemon.post(CHAT, chat_body(), headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    daemon.get("/v1/models")
    daemon.post("/tokenize", {"model": MODEL, "prompt": "a"})
    assert daemon.post(CHAT, chat_body(temperature=-1), headers={"traceparent": f"00-{TRACE}-{PARENT}-1"}).status_code == 400
    with daemon.socket() as sock:
        data = json.dumps({"model": MODEL, "prompt": ["a", "b"], "max_tokens": 2, "stream": True}).encode()
        parent = f"traceparent: 00-{TRACE}-{PARENT}-01\r\n"
        sock.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{parent * 2}Content-Type: application/json\r\n"
                     f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
        while sock.recv(65536):
            pass
    daemon.wait("the spans", lambda: len(taker.spans) == 1 + 7)
    refused, text, *parts = taker.spans
    assert attributes(refused)["http.response.status_code"] == "400" and "status" not in refused
    assert text["name"] == f"text_completion {MODEL}"
    assert [attributes(part)["keepd.prompt"] for part in parts] == ["0"] * 3 + ["1"] * 3
    assert not any("parentSpanId" in span for span in (refused, text))
    assert TRACE not in {span["traceId"] for span in taker.spans} and refused["traceId"] != text["traceId"]


def test_failures_are_errors(start, collector):
    taker = collector(200)
    daemon = start(*flags(taker.port))
    assert daemon.post(CHAT, chat_body("fail later")).status_code == 500
    daemon.wait("the spans", lambda: taker.spans)
    assert taker.spans[0]["status"] == {"code": 2} and "error.type" in attributes(taker.spans[0])


def test_a_collector_that_is_down_gets_them_later(start, collector):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    daemon = start(*flags(port))
    assert daemon.chat().status_code == 200
    daemon.wait("the failure", lambda: any("spans were not taken" in line for line in daemon.errors))
    assert counts(daemon) == (0, 0, 0)
    taker = collector(503, 200, port=port)
    daemon.wait("the spans", lambda: counts(daemon) == (1, 0, 0))
    assert len(taker.spans) == 4 and [request[2] for request in taker.requests] == [503, 200]


def test_a_collector_that_refuses_is_not_asked_again(start, collector):
    taker = collector(500)
    daemon = start(*flags(taker.port))
    assert daemon.chat().status_code == 200
    daemon.wait("the count", lambda: counts(daemon) == (0, 0, 1))
    assert len(taker.requests) == 1


def test_failures_that_last_are_one_warning(start, collector):
    """Without the password of the endpoint."""
    taker = collector(400)
    daemon = start("--otlp-endpoint", f"http://user:s3cret@127.0.0.1:{taker.port}")
    for sent in range(1, 6):
        assert daemon.chat().status_code == 200
        daemon.wait("the count", lambda: counts(daemon) == (0, 0, sent))
    assert len(taker.requests) == 5 and daemon.stop() == 0
    warnings = [line for line in daemon.errors if "spans were not taken" in line]
    assert len(warnings) == 1 and f"by http://127.0.0.1:{taker.port}/v1/traces: status 400" in warnings[0]
    assert not any("s3cret" in line for line in daemon.errors)


def test_a_collector_that_hangs_delays_nothing(start):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        daemon = start(*flags(silent.getsockname()[1]))
        for _ in range(20):
            assert daemon.chat().status_code == 200
        assert counts(daemon) == (0, 0, 0)
        assert daemon.stop() == 0  # gives up what it cannot send


def test_a_name_that_is_never_found_delays_nothing(start):
    resolver = find_built("tests/silent_resolver.so")
    if resolver is None:
        pytest.skip("skip: silent_resolver is not built")
    options = ":".join(filter(None, (os.environ.get("ASAN_OPTIONS"), "verify_asan_link_order=0")))
    daemon = start("--otlp-endpoint", "http://silent.invalid:4318", env={"LD_PRELOAD": str(resolver), "ASAN_OPTIONS": options})
    for _ in range(20):
        assert daemon.chat().status_code == 200
    assert daemon.stop() == 0


def test_an_endpoint_that_is_none(start):
    with pytest.raises(pytest.fail.Exception, match="otlp-endpoint: expected http://HOST:PORT"):
        start("--otlp-endpoint", "collector:4318")
