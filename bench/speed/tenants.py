#!/usr/bin/env python3
"""tenants.py [--keepd BINARY] [--model MODEL] [--words N] [--asked N] [--json FILE] [-- OPTIONS]: one key floods the daemon, another one asks.

The key `flood` keeps 100 requests waiting or running: each connection asks again as soon as it has its answer of 128
tokens. The key `guest` asks one question after the other, streamed, with --words words in front of it. Printed: the
guest's time to the first token, p50 and p99, alone and beside the flood, for each row of SETTINGS, what the flood got
meanwhile, and how many of the machine's cores the daemon, the flooding client and the asking one used. Each client is a
process of its own, so that neither waits for the other's interpreter. OPTIONS go to the daemon."""
import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import pathlib
import socket
import statistics
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
FLOOD = 100
SETTINGS = {
    "equal weights": ("", ""),
    "guest weight=4": ("", "weight=4"),
    "flood requests=4": ("requests=4", ""),
}
WORDS = "river stone garden copper yellow window mountain paper silver bridge candle winter forest market engine letter".split()
STORY = {"messages": [{"role": "user", "content": "Tell me a story about my sister Nora in Lisbon."}], "max_tokens": 128}
COMMON = {"ignore_eos": True, "speculate": 0, "kv": {"reuse": False, "retain": False}}
TICK = os.sysconf("SC_CLK_TCK")


def question(words):
    facts = " ".join(itertools.islice(itertools.cycle(WORDS), words))
    return {"messages": [{"role": "user", "content": "My sister Nora lives in Lisbon. The code of the garage is 4815. " + facts},
                         {"role": "assistant", "content": "Noted."}, {"role": "user", "content": "What is the code of the garage?"}],
            "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}


def post(key, body):
    data = json.dumps({**COMMON, **body}).encode()
    return (f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer key-of-{key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n").encode() + data


def cpu_of(pid):
    """CPU seconds of a process so far."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


# ---- The guest ----


def ask(file, request):
    """Seconds to the first token, and the number of prompt tokens; reads the whole answer."""
    begin, first, tokens = time.monotonic(), None, 0
    file.write(request)
    file.flush()
    status = file.readline()
    if b" 200 " not in status:
        raise RuntimeError(status)
    while file.readline() != b"\r\n":
        pass
    for line in iter(file.readline, b"0\r\n"):  # chunks
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if first is None and event["choices"]:
                first = time.monotonic() - begin
            tokens = (event.get("usage") or {}).get("prompt_tokens", tokens)
    file.readline()
    return first, tokens


def asked(port, request, count):
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        file = connection.makefile("rwb")
        for _ in range(5):
            ask(file, request)
        answers = [ask(file, request) for _ in range(count)]
    return sorted(first for first, _ in answers), answers[0][1]


# ---- The flood ----


async def flooder(port, counts):
    request = post("flood", STORY)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while True:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().lower().split("\r\n")[1:] if line)
        await reader.readexactly(int(fields["content-length"]))
        ok = b" 200 " in head[:20]
        with counts.get_lock():
            counts[0 if ok else 1] += 1
        if not ok:
            await asyncio.sleep(int(fields.get("retry-after", 1)))


def flood(port, counts):
    async def all_of_them():
        await asyncio.gather(*(flooder(port, counts) for _ in range(FLOOD)))

    asyncio.run(all_of_them())


# ---- Both ----


def beside(port, request, count, daemon):
    """The guest's times beside the flood, answers and refusals of the flood for each second, and the cores used."""
    counts = multiprocessing.Array("l", 2)
    crowd = multiprocessing.Process(target=flood, args=(port, counts))
    crowd.start()
    try:
        time.sleep(2)
        pids = daemon, crowd.pid, os.getpid()
        begin, before, cpu = time.monotonic(), list(counts), [cpu_of(pid) for pid in pids]
        times, _ = asked(port, request, count)
        seconds = time.monotonic() - begin
        rates = [(counts[i] - before[i]) / seconds for i in range(2)]
        cores = [(cpu_of(pid) - was) / seconds for pid, was in zip(pids, cpu)]
    finally:
        crowd.kill()
        crowd.join()
    return times, rates, cores


def p99(times):
    return times[min(len(times) - 1, int(len(times) * 0.99))]


def run(args, flood_settings, guest_settings):
    request = post("guest", question(args.words))
    with tempfile.NamedTemporaryFile("w", suffix=".keys") as keys:
        keys.write(f"key-of-flood name=flood {flood_settings}\nkey-of-guest name=guest {guest_settings}\n")
        keys.flush()
        gates = ["--gates", args.gates] if args.gates else []
        daemon = subprocess.Popen([args.keepd, "--model", args.model, "--port", "0", "--api-key-file", keys.name, *gates, *args.options],
                                  stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        port = int(next(line for line in daemon.stdout if "http://" in line).split("at ")[1].split()[0].strip("/").rsplit(":", 1)[1])
        try:
            alone, tokens = asked(port, request, args.asked)
            times, (answers, refused), cores = beside(port, request, args.asked, daemon.pid)
        finally:
            daemon.terminate()
            daemon.wait()
    return {"prompt_tokens": tokens, "alone_p50": statistics.median(alone), "alone_p99": p99(alone),
            "beside_p50": statistics.median(times), "beside_p99": p99(times), "flood_answers_per_second": answers,
            "flood_refused_per_second": refused, "cores_daemon": cores[0], "cores_flood": cores[1], "cores_guest": cores[2]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keepd", default=str(ROOT / "build/keepd"))
    parser.add_argument("--model", default=str(ROOT / "bundled/keepd-nano"))
    parser.add_argument("--gates")
    parser.add_argument("--words", type=int, default=0, help="words in front of the question: about a token each")
    parser.add_argument("--asked", type=int, default=200)
    parser.add_argument("--json")
    parser.add_argument("--only", choices=SETTINGS)
    parser.add_argument("options", nargs="*")
    args = parser.parse_args()
    rows = {}
    print("| settings | prompt | alone, p50 | p99 | beside, p50 | p99 | p99, ratio | flood, answers/s | cores: daemon, flood, guest |\n"
          "|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for name, (flood_settings, guest_settings) in SETTINGS.items():
        if args.only and name != args.only:
            continue
        row = rows[name] = run(args, flood_settings, guest_settings)
        ms = {key: f"{1000 * value:.1f} ms" for key, value in row.items()}
        print(f"| {name} | {row['prompt_tokens']} | {ms['alone_p50']} | {ms['alone_p99']} | {ms['beside_p50']} | {ms['beside_p99']} | "
              f"{row['beside_p99'] / row['alone_p99']:.2f} | {row['flood_answers_per_second']:.1f} | "
              f"{row['cores_daemon']:.2f}, {row['cores_flood']:.2f}, {row['cores_guest']:.2f} |", flush=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
