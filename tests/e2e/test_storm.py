"""Sixty-four chats on a pool for a third of them; then sixty-four clients that disconnect."""
import concurrent.futures as futures
import json
import time

import requests

CLIENTS = 64
KV = {"policy": "global", "budget": 64, "buffer": 16, "chunk": 32}
FLAGS = ("--kv-buffer", "16", "--kv-chunk", "32")


def prompt(i):
    facts = " ".join(f"The code of the place{i + k} is {1000 + 37 * i + k}." for k in range(12))
    return [{"role": "user", "content": f"{facts} What is the code of the place{i + 3}?"}]


def body(i):
    return {"model": "keepd-nano", "messages": prompt(i), "temperature": 0 if i % 2 else 1, "seed": i,
            "max_tokens": 96, "ignore_eos": True, "stream": True, "kv": KV,
            "stream_options": {"include_usage": True}}


def streamed(url, i):
    text, usage = "", None
    with requests.post(f"{url}/v1/chat/completions", json=body(i), stream=True, timeout=300) as r:
        assert r.status_code == 200, r.text
        for line in r.iter_lines():
            if not line.startswith(b"data: ") or line == b"data: [DONE]":
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            text += "".join(c["delta"].get("content") or "" for c in event["choices"])
            usage = event.get("usage") or usage
    return text, usage["kv_details"]["kept_entries"]


def page_need(d):
    """Pages that one such request reserves, read while it runs alone."""
    with requests.post(f"{d.url}/v1/chat/completions", json=body(0), stream=True, timeout=300) as r:
        next(r.iter_lines())
        need = d.kv()["pool"]["pages_reserved"]
        for _ in r.iter_lines():
            pass
    return need


def settle(d):
    """Waits for the engine, whose last step may still run when the last byte arrives."""
    for _ in range(200):
        pool = d.kv()["pool"]
        if pool["pages_reserved"] == 0 and not d.kv()["running"]:
            break
        time.sleep(0.02)
    assert pool["pages_reserved"] == 0
    assert pool["pages_used"] == pool["pages_retained"]
    assert d.metric("keepd_preemptions_total") == 0
    return pool


def small_pool(daemon):
    probe = daemon(*FLAGS)
    need, page_bytes = page_need(probe), probe.kv()["pool"]["page_bytes"]
    return daemon(*FLAGS, "--kv-pool-bytes", str(need * page_bytes * CLIENTS // 3))


def test_chats_of_a_storm_equal_alone(daemon):
    d = small_pool(daemon)
    with futures.ThreadPoolExecutor(CLIENTS) as pool:
        together = list(pool.map(lambda i: streamed(d.url, i), range(CLIENTS)))
    settle(d)
    alone = daemon(*FLAGS)
    for i in range(0, CLIENTS, 3):
        assert streamed(alone.url, i) == together[i], f"client {i} got another answer than alone"


def test_sixty_four_clients_vanish(daemon):
    d = small_pool(daemon)

    def vanish(i):
        r = requests.post(f"{d.url}/v1/chat/completions", json={**body(i), "max_tokens": 4000},
                          stream=True, timeout=300)
        lines = r.iter_lines()
        for _ in range(1 + i % 7):
            next(lines)
        r.raw._fp.fp.raw._sock.close() if i % 2 else None  # half of them without a FIN exchange by requests
        r.close()

    with futures.ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(vanish, range(CLIENTS)))
    assert settle(d)["pages_retained"] == 0, "aborted requests leave no state"
    assert streamed(d.url, 1)[0], "the daemon still answers"
