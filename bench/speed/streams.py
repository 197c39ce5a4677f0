#!/usr/bin/env python3
"""streams.py [--keepd BINARY] [--model MODEL] [--gates GATES]: prompts that begin alike, and prompts beside answers.

first    Chats with a system prompt of some 2,000 tokens: the time to the first token of the first chat and of a second one
         with another question, for --rounds system prompts; medians and their ratio.
streams  The time between the tokens of 16 running answers, median and p99: alone, and while a prompt of some 4,096 tokens is
         read; and how long reading it takes, beside the answers and alone. With and without --step-stretch.
pictures The same while a picture of 4 megapixels is encoded and read, with a random model of SmolVLM-256M's size.

Machines are noisy: read the ratios."""
import argparse
import asyncio
import base64
import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORDS = "river stone garden copper yellow window mountain paper silver bridge candle winter forest market engine letter".split()
STREAMS = 16


def text(tokens):
    return " ".join(random.choice(WORDS) for _ in range(tokens))


async def ask(port, path, times, **body):
    """Streams an answer; appends to `times` when each piece of it came, and returns the last usage."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    data = json.dumps({"stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "ignore_eos": True, "speculate": 0, **body}).encode()
    usage = None
    writer.write(b"POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                 % (path.encode(), len(data)) + data)
    async for line in reader:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event)
            if event.get("choices"):
                times.append(time.monotonic())
            usage = event.get("usage") or usage
    writer.close()
    return usage


async def first_tokens(port, rounds, length):
    pairs = []
    for _ in range(rounds):
        system, both = text(length), []
        for question in "What is near the river?", "Who has the letter of the garden?":
            messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
            begin, times = time.monotonic(), []
            usage = await ask(port, "/v1/chat/completions", times, messages=messages, max_tokens=4)
            both.append(times[0] - begin)
        pairs.append(both)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    one, two = (statistics.median(p[i] for p in pairs) for i in range(2))
    print(f"first token: {one * 1000:.0f} ms, second chat {two * 1000:.1f} ms ({one / two:.1f} times sooner), "
          f"{usage['prompt_tokens']} prompt tokens, {cached} cached", flush=True)


def gaps(answers, begin, end):
    """Times between tokens that lie in the interval, sorted."""
    found = [b - a for times in answers for a, b in zip(times, times[1:]) if a >= begin and b <= end]
    return sorted(found)


def show(what, values):
    print(f"{what}: {len(values)} gaps, median {values[len(values) // 2] * 1000:.1f} ms, p99 {values[int(len(values) * 0.99)] * 1000:.1f} ms",
          flush=True)
    return values[int(len(values) * 0.99)]


async def streams(port, tokens, count, disturb, **fields):
    """disturb(times): awaits a request's answer, appends its times to `times` and returns its usage. `fields`: of the answers' requests."""
    kept = [[] for _ in range(STREAMS)]

    async def stream(times):
        await ask(port, "/v1/completions", times, prompt=text(16), max_tokens=tokens, kv={"retain": False, "reuse": False}, **fields)

    tasks = [asyncio.create_task(stream(times)) for times in kept]
    await asyncio.sleep(2)
    read = []
    for _ in range(count):
        await asyncio.sleep(3)
        begin, times = time.monotonic(), []
        usage = await disturb(times)
        read.append((begin, times[0]))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    alone = sorted(g for begin, _ in read for g in gaps(kept, begin - 3, begin))
    beside = sorted(g for begin, end in read for g in gaps(kept, begin, end))
    a, b = show("alone", alone), show("beside", beside)
    seconds = statistics.median(end - begin for begin, end in read)
    print(f"p99 ratio {b / a:.2f}; a prompt of {usage['prompt_tokens']} tokens is read in {seconds:.2f} s beside them", flush=True)


def prompts(port, length):
    return lambda times: ask(port, "/v1/completions", times, prompt=text(length), max_tokens=1, kv={"retain": False, "reuse": False})


def pictures(port):
    """Chats about another picture each time, 2,000 x 2,000 pixels."""
    from test_pictures import np, png

    def chat(times):
        noise = np.random.default_rng(random.getrandbits(32)).integers(0, 256, (20, 20, 3), dtype=np.uint8)
        file = base64.b64encode(png(np.kron(noise, np.ones((100, 100, 1), np.uint8)))).decode()
        parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + file}}, {"type": "text", "text": "What is it?"}]
        return ask(port, "/v1/chat/completions", times, messages=[{"role": "user", "content": parts}], max_tokens=1)
    return chat


def letters():
    """A random model's answers are letters, so that each of its tokens is sent: with keepd-nano's tokenizer a byte's id is the byte + 3."""
    return {"logit_bias": {str(ord(c) + 3): 100 for c in "abcdefghijklmnopqrstuvwxyz"}}


def write_seeing_model(folder):
    """A directory with the sizes of SmolVLM-256M: SmolLM2-135M, and an encoder of 12 layers for tiles of 512 pixels."""
    sys.path[:0] = [str(ROOT / "tests" / part) for part in ("python", "e2e")]
    import vision_model as m
    m.TEXT.update(hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536,
                  max_position_embeddings=8192, vocab_size=49152)
    m.VISION.update(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072, image_size=512, patch_size=16)
    m.EDGE, m.MERGE, m.VOCAB = 512, 4, m.TEXT["vocab_size"]
    return m.write_model(pathlib.Path(folder), longest=2048)


def serve(args, *flags):
    daemon = subprocess.Popen([args.keepd, "--model", args.model, "--port", "0", "--log-level", "warn",
                               *(["--gates", args.gates] if args.gates else []), *flags], stdout=subprocess.PIPE, text=True)
    return daemon, int(daemon.stdout.readline().split()[3].rsplit(":", 1)[1].strip("/"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("first", "streams", "pictures"))
    parser.add_argument("--keepd", default=ROOT / "build/release/server/keepd", type=pathlib.Path)
    parser.add_argument("--model", default=ROOT / "bundled/keepd-nano")
    parser.add_argument("--gates")
    parser.add_argument("--rounds", default=5, type=int)
    parser.add_argument("--words", type=int, default=1400, help="words of the system prompt, or of the prompt beside answers")
    parser.add_argument("--tokens", type=int, default=3000, help="tokens of each running answer")
    parser.add_argument("--prompts", type=int, default=2, help="prompts read beside them")
    parser.add_argument("--stretch", default="200,0", help="values of step-stretch")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.what == "pictures":
            args.model = write_seeing_model(folder)
        for stretch in ["200"] if args.what == "first" else args.stretch.split(","):
            measure(args, stretch)


def measure(args, stretch):
    daemon, port = serve(args, "--step-stretch", stretch)
    try:
        if args.what == "first":
            asyncio.run(first_tokens(port, args.rounds, args.words))
            return
        print("step-stretch", stretch)
        if args.what == "streams":
            asyncio.run(streams(port, args.tokens, args.prompts, prompts(port, args.words)))
        else:
            asyncio.run(streams(port, args.tokens, args.prompts, pictures(port), **letters()))
    finally:
        daemon.terminate()
        daemon.wait(60)


if __name__ == "__main__":
    main()
