"""Many requests at once."""
import asyncio
import concurrent.futures as futures
import json

import openai
import pytest
from conftest import MODEL, chat_body, read_all, read_until, request_bytes, run_async

CHAT = "/v1/chat/completions"


def body(i):
    return chat_body(f"client {i} says something of its own", temperature=1, seed=i, stream=True, max_tokens=64,
                     kv={"reuse": False}, stream_options={"include_usage": True})


async def stream_text(port, i):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_bytes(CHAT, body(i), "Connection: close"))
    data = (await reader.read()).decode()
    writer.close()
    assert data.startswith("HTTP/1.1 200"), data[:300]
    chunks = [json.loads(line[6:]) for line in data.splitlines() if line.startswith("data: {")]
    assert data.count("data: [DONE]") == 1
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])


@pytest.mark.parametrize("count", [64, 256])
def test_streams_equal_alone(start, count):
    daemon = start("--max-num-seqs", "48")

    async def together():
        return await asyncio.gather(*(stream_text(daemon.port, i) for i in range(count)))
    answers = run_async(together())
    daemon.wait_idle()
    assert daemon.metrics()["vllm:time_to_first_token_seconds_count",] == count
    assert daemon.metrics()["keepd_preemptions_total",] == 0
    for i in range(0, count, max(1, count // 32)):
        assert run_async(stream_text(daemon.port, i)) == answers[i]


def test_sdk_clients(start):
    daemon = start()

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{daemon.url}/v1", api_key="x", max_retries=0) as client:
            async def one(i):
                r = await client.chat.completions.create(model=MODEL, max_tokens=16,
                                                         messages=[{"role": "user", "content": f"{i}"}])
                return r.choices[0].finish_reason
            return await asyncio.gather(*(one(i) for i in range(100)))
    assert set(run_async(all_of_them())) <= {"stop", "length"}


def test_full_queue(slow):
    """Places in the queue are counted before any work, and freed when a request is admitted or ends."""
    daemon = slow("--max-num-seqs", "1", "--max-queue", "2")
    socks = []
    for waiting in range(3):
        sock = daemon.socket()
        sock.sendall(request_bytes(CHAT, chat_body(max_tokens=900, ignore_eos=True, stream=True)))
        daemon.wait("its place", lambda: daemon.kv()["running_count"] == 1
                    and daemon.kv()["waiting_count"] == waiting)
        socks.append(sock)
    r = daemon.chat()
    assert r.status_code == 503 and r.json()["error"]["code"] == "overloaded"
    assert 1 <= int(r.headers["retry-after"]) <= 120 and int(r.headers["retry-after-ms"]) >= 100
    assert daemon.post(CHAT, {"model": "nobody looks at this"}).status_code == 503, "before any work"
    assert daemon.get("/health").status_code == 200, "busy is not ill"
    socks[1].close()
    daemon.wait("a place", lambda: daemon.kv()["waiting_count"] == 1)
    assert daemon.post(CHAT, {"model": "x"}).status_code == 404
    for sock in socks:
        sock.close()
    daemon.wait_idle()
    assert daemon.chat(max_tokens=2).status_code == 200


def test_team_smaller_than_the_demand(start, fake):
    """Requests wait for pages, none is preempted."""
    daemon = start("--kv-pool-bytes", str(8192 * 64))
    with futures.ThreadPoolExecutor(16) as pool:
        codes = list(pool.map(lambda i: daemon.client().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": f"{i}" * 20}], max_tokens=64).choices[0].finish_reason,
            range(32)))
    assert set(codes) == {"stop"}
    daemon.wait_idle()
    assert daemon.chat(max_tokens=900).json()["error"]["param"] == "max_tokens", "can never fit"


def test_a_slow_reader_holds_nobody_up(start, fake):
    """One client reads nothing while its answer grows; others are served meanwhile."""
    daemon = start()
    slow = daemon.socket()
    slow.sendall(request_bytes(CHAT, chat_body(stream=True, max_tokens=1000, ignore_eos=True, logprobs=True,
                                               top_logprobs=20)))
    daemon.wait("its end", lambda: daemon.finished("length") == 1)
    for _ in range(20):
        assert daemon.chat().status_code == 200
    assert read_until(slow, b"data: [DONE]\n\n").count(b"data: {") == 1002
    slow.close()


def test_keep_alive_and_pipelining(shared):
    """Requests sent without waiting are answered in order."""
    with shared.socket() as sock:
        for i in range(5):
            sock.sendall(request_bytes(CHAT, chat_body(f"number {i}", stream=i % 2 == 1)))
        sock.sendall(request_bytes("/v1/models", b"", "Connection: close", method="GET"))
        data = read_all(sock)
    assert data.count(b"HTTP/1.1 200") == 6 and data.count(b"data: [DONE]") == 2
    assert data.index(b'"chat.completion"') < data.index(b'"list"')


def test_pipelined_flood_is_harmless(shared):
    with shared.socket() as sock:
        sock.sendall(request_bytes("/version", b"", method="GET") * 300
                     + request_bytes("/version", b"", "Connection: close", method="GET"))
        assert read_all(sock).count(b"HTTP/1.1 200") == 301
