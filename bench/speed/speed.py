#!/usr/bin/env python3
"""Speed through HTTP, beside what the machine can do, measured in the same run.

Serves a random bf16 model of the Qwen3-0.6B shape (`keepd --random-weights`: real sizes, no download)
and reports tokens per second of prompt and generation as shares of two limits that
`bench_machine` measures before and after: the read bandwidth (every generated token reads every weight
once) and the matrix rate (every prompt token multiplies with every weight).

    speed.py                     writes bench/results/cpu-<date>.json and prints a table
    speed.py --config FILE       another shape

Machines are noisy: read the shares, not the seconds.
"""
import argparse
import concurrent.futures as futures
import datetime
import json
import pathlib
import platform
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time

import requests

ROOT = pathlib.Path(__file__).resolve().parents[2]
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
    "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False, "torch_dtype": "bfloat16",
    "eos_token_id": 0,
}


def weights(c):
    """(bytes one generated token reads, multiply-adds of one prompt token) of the matrices."""
    d, heads, kv, size = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    layer = d * size * (heads + 2 * kv) + heads * size * d + 3 * d * c["intermediate_size"]
    body = layer * c["num_hidden_layers"]
    return 2 * (body + d * c["vocab_size"]), body


class Daemon:
    def __init__(self, binary, model, flags):
        self.process = subprocess.Popen([binary, "--model", str(model), "--random-weights", "--port", "0",
                                         "--served-model-name", "bench", *flags], stdout=subprocess.PIPE, text=True)
        self.url = next((line[line.index("http://"):].split()[0].rstrip("/,") for line in self.process.stdout
                         if "http://" in line), None)
        if self.url is None:
            sys.exit(f"the daemon did not become ready (exit {self.process.wait()})")
        threading.Thread(target=self.process.stdout.read, daemon=True).start()
        self.rng = random.Random(1)

    def stop(self):
        self.process.terminate()
        self.process.wait()

    def metric(self, name):
        for line in requests.get(f"{self.url}/metrics", timeout=10).text.splitlines():
            if line.startswith(name + "{"):
                return float(line.rsplit(" ", 1)[1])
        raise KeyError(name)

    def complete(self, prompt_tokens, max_tokens, **kv):
        body = {"model": "bench", "prompt": [self.rng.randrange(1, 2000) for _ in range(prompt_tokens)],
                "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "kv": {"reuse": False, **kv}}
        start = time.perf_counter()
        r = requests.post(f"{self.url}/v1/completions", json=body, timeout=900)
        r.raise_for_status()
        assert r.json()["usage"]["completion_tokens"] == max_tokens
        return time.perf_counter() - start


def prompt_rate(d, tokens, repeats):
    """Median tokens per second of a request that answers with one token."""
    return statistics.median(tokens / d.complete(tokens, 1) for _ in range(repeats))


def generation_rate(d, batch, tokens, prompt_tokens=16, **kv):
    """Tokens per second of `batch` requests, by the daemon's own time from each first token to its last: a random
    model's tokens have no text, so there is nothing to see arrive."""
    metric = "vllm:request_decode_time_seconds_sum"
    before = d.metric(metric)
    with futures.ThreadPoolExecutor(batch) as pool:
        list(pool.map(lambda _: d.complete(prompt_tokens, tokens, **kv), range(batch)))
    mean = (d.metric(metric) - before) / batch
    return batch * (tokens - 1) / mean


BUFFER = 128                   # kv.buffer, the default
# No gates here: global and trimkv cost what streaming does, and a logarithm per entry at each eviction.
POLICIES = ("streaming", "gkv", "rkv", "snapkv", "pyramidkv", "adakv", "morphkv", "cake", "h2o", "kvcompress", "d2o")


def evicting_seconds(d, work):
    before = d.metric("keepd_eviction_seconds_sum")
    result = work()
    return result, d.metric("keepd_eviction_seconds_sum") - before


def policy_costs(d):
    """Of one sequence at its full budget, per policy: tokens per second, and how much of that time evicting takes.
    The prompt fills the budget, the answer brings one eviction."""
    costs = {}
    for name in POLICIES:
        _, reading = evicting_seconds(d, lambda: d.complete(1024, 1, policy=name))
        rate, both = evicting_seconds(d, lambda: generation_rate(d, 1, BUFFER + 32, 1024, policy=name))
        costs[name] = {"tokens_per_s": rate, "evicting": (both - reading) * rate / BUFFER,
                       "of_streaming": rate / costs.get("streaming", {"tokens_per_s": rate})["tokens_per_s"]}
    return costs


def machine(binary):
    return json.loads(subprocess.run([binary], check=True, capture_output=True, text=True).stdout)


def measure(args, shape):
    model = ROOT / "build" / "bench" / "random-model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(shape))
    shutil.copy(ROOT / "models" / "keepd-nano" / "tokenizer.json", model)
    before = machine(args.machine)
    d = Daemon(args.binary, model, ["--kv-policy", "streaming", "--kv-budget", "1024"])
    rows = {}
    try:
        d.complete(64, 8)  # pages touched, clocks up
        rows["prompt_512"] = prompt_rate(d, 512, args.repeats)
        for batch in (1, 8, 32):
            rows[f"generate_{batch}"] = generation_rate(d, batch, 48)
        wall, spent = time.perf_counter(), d.metric("keepd_eviction_seconds_sum")
        short = generation_rate(d, 1, 160, 1024)
        long = generation_rate(d, 1, 160, 8192)
        rows["generate_1_seen_1024"], rows["generate_1_seen_8192"] = short, long
        rows["eviction_share"] = (d.metric("keepd_eviction_seconds_sum") - spent) / (time.perf_counter() - wall)
        rows["policies"] = policy_costs(d)
    finally:
        d.stop()
    after = machine(args.machine)
    limits = {k: max(before[k], after[k]) for k in ("read_bytes_per_s", "matrix_flop_per_s")}
    return rows, limits


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--binary", default=str(ROOT / "build" / "keepd"))
    ap.add_argument("--machine", default=str(ROOT / "build" / "release" / "bench" / "speed" / "bench_machine"))
    ap.add_argument("--config", type=pathlib.Path)
    ap.add_argument("--repeats", type=int, default=5)
    ap.add_argument("--out", type=pathlib.Path, default=ROOT / "bench" / "results")
    a = ap.parse_args()
    shape = json.loads(a.config.read_text()) if a.config else QWEN3_0_6B
    rows, limits = measure(a, shape)
    read, macs = weights(shape)
    shares = {"prompt_512": rows["prompt_512"] * 2 * macs / limits["matrix_flop_per_s"],
              **{f"generate_{b}": rows[f"generate_{b}"] / b * read / limits["read_bytes_per_s"] for b in (1, 8, 32)}}
    cpu = next((line.split(":")[1].strip() for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.machine())
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    result = {"date": datetime.date.today().isoformat(), "commit": commit, "cpu": cpu, "limits": limits,
              "tokens_per_s": rows, "shares": shares, "shape": shape}
    a.out.mkdir(parents=True, exist_ok=True)
    (a.out / f"cpu-{result['date']}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"read bandwidth {limits['read_bytes_per_s'] / 1e9:.1f} GB/s, matrix rate {limits['matrix_flop_per_s'] / 1e12:.2f} TFLOP/s\n")
    print("| what | tokens/s | share of the limit |\n|---|--:|--:|")
    print(f"| prompt, 512 tokens | {rows['prompt_512']:.0f} | {100 * shares['prompt_512']:.0f} % of the matrix rate |")
    for b in (1, 8, 32):
        print(f"| generation, batch {b} | {rows[f'generate_{b}']:.1f} | {100 * shares[f'generate_{b}']:.0f} % of the read bandwidth |")
    print(f"| batch 1, 1,024 seen | {rows['generate_1_seen_1024']:.1f} | |")
    print(f"| batch 1, 8,192 seen, budget 1,024 | {rows['generate_1_seen_8192']:.1f} | "
          f"{100 * rows['generate_1_seen_8192'] / rows['generate_1_seen_1024']:.0f} % of the line above |")
    print(f"| eviction | | {100 * rows['eviction_share']:.2f} % of the time |")
    print("\n| policy, budget 1,024 | tokens/s | of streaming | evicting, of the time |\n|---|--:|--:|--:|")
    for name, cost in rows["policies"].items():
        print(f"| {name} | {cost['tokens_per_s']:.1f} | {100 * cost['of_streaming']:.0f} % | {100 * cost['evicting']:.2f} % |")


if __name__ == "__main__":
    main()
