#!/usr/bin/env python3
"""Speed through HTTP, beside what the machine can do, measured in the same run.

Serves a random bf16 model of the Qwen3-0.6B shape (`keepd --random-weights`: real sizes, no download)
and reports tokens per second of prompt and generation as shares of two limits that
`bench_machine` measures before and after: the read bandwidth (every generated token reads every weight
once) and the matrix rate (every prompt token multiplies with every weight).

    speed.py                     both of the following
    speed.py speed               bench/results/cpu-<date>.json and a table
    speed.py policies            what policies cost beside `streaming`: policies-<date>.json and tables
    speed.py --config FILE       another shape

Machines are noisy: read the shares, not the seconds.
"""
import argparse
import concurrent.futures as futures
import contextlib
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

    def prompt(self, tokens):
        return [self.rng.randrange(1, 2000) for _ in range(tokens)]

    def ask(self, prompt, max_tokens, **kv):
        body = {"model": "bench", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "speculate": 0, "kv": kv}
        r = requests.post(f"{self.url}/v1/completions", json=body, timeout=900)
        r.raise_for_status()
        assert r.json()["usage"]["completion_tokens"] == max_tokens
        return r.json()

    def complete(self, prompt_tokens, max_tokens, **kv):
        """Seconds of one request, from nothing."""
        prompt, start = self.prompt(prompt_tokens), time.perf_counter()
        self.ask(prompt, max_tokens, **{"reuse": False, **kv})
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


# --- cost of policies -----------------------------------------------------------------------------

BUDGET, BUFFER = 1024, 128     # kv.buffer is the default
LOOKED_AT = 2 * BUFFER         # generated tokens of each sequence that are timed, so two evictions
SPARE = 48                     # and those before all prompts are read, and after
COUNTERS = {"prompts": "vllm:prompt_tokens_total", "tokens": "vllm:generation_tokens_total", "reading": "vllm:request_prefill_time_seconds_sum",
            "evicting": "keepd_eviction_seconds_sum", "evictions": "keepd_evictions_total"}


def thinner(shape, by):
    """A part of the layers and of the vocabulary: shares of a step stay what they are, and come sooner."""
    return {**shape, "num_hidden_layers": shape["num_hidden_layers"] // by, "vocab_size": shape["vocab_size"] // by}


def counters(d):
    now, lines = time.perf_counter(), requests.get(f"{d.url}/metrics", timeout=10).text.splitlines()
    values = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#") and "{" in line}
    return {"at": now, **{k: values[m] for k, m in COUNTERS.items()}}


def wait_for(d, name, value):
    while (now := counters(d))[name] < value:
        time.sleep(0.02)
    return now


def policy_round(d, name, batch):
    """`batch` sequences at their full budget generate together; looked at from when all prompts are read."""
    kv = {"policy": name, "budget": BUDGET, "buffer": BUFFER, "reuse": False, "retain": False}
    start = counters(d)
    with futures.ThreadPoolExecutor(batch) as pool:
        running = [pool.submit(d.ask, d.prompt(BUDGET), LOOKED_AT + SPARE * batch, **kv) for _ in range(batch)]
        begin = wait_for(d, "tokens", start["tokens"] + batch)       # one per sequence: a first token needs the whole prompt
        begin = wait_for(d, "prompts", start["prompts"] + batch * BUDGET)
        end = wait_for(d, "tokens", begin["tokens"] + batch * LOOKED_AT)
        answers = [f.result() for f in running]
    reading = counters(d)["reading"] - start["reading"]
    took, evictions = end["at"] - begin["at"], end["evictions"] - begin["evictions"]
    eviction = (end["evicting"] - begin["evicting"]) / max(1, evictions)
    rate = (end["tokens"] - begin["tokens"]) / took
    return {"prompt_tokens_per_s": BUDGET / reading if batch == 1 else None, "tokens_per_s": rate, "eviction_ms": 1000 * eviction,
            "evicting": eviction * rate / BUFFER, "bytes": answers[0]["usage"]["kv_details"]["bytes"]}


def refusal(d, name):
    """The message that refuses a policy; None if the daemon serves it."""
    try:
        d.ask(d.prompt(4), 1, policy=name, budget=BUDGET)
    except requests.HTTPError as error:
        if error.response.status_code == 400:
            return error.response.json()["error"]["message"]
        raise


def policies(d):
    """All bounded policies that the daemon serves, `streaming` among them. The model has no gates: global and trimkv,
    which need them, cost what streaming does and a logarithm per entry at each eviction."""
    known = refusal(d, "none of them").split("there are ")[1].rstrip(".").replace(",", "").split()
    return [name for name in known if name != "full" and refusal(d, name) is None]


def policy_costs(d, rounds):
    """{batch: {policy: numbers}}, medians over rounds in which all policies take turns. Each is compared with `streaming` measured
    just before it, because machines change their pace within a minute. rounds: {batch: number}."""
    names, costs = policies(d), {}
    for batch, count in rounds.items():
        rows = {name: [] for name in names}
        for name in names * count:
            plain = policy_round(d, "streaming", batch)
            row = plain if name == "streaming" else policy_round(d, name, batch)
            rows[name].append({**row, "of_streaming": row["tokens_per_s"] / plain["tokens_per_s"]})
        costs[batch] = {name: {**{k: statistics.median(r[k] for r in found) for k in found[0] if found[0][k] is not None},
                               "of_streaming_all": sorted(r["of_streaming"] for r in found)} for name, found in rows.items()}
    return costs


def machine(binary):
    return json.loads(subprocess.run([binary], check=True, capture_output=True, text=True).stdout)


@contextlib.contextmanager
def serving(args, shape, *flags):
    """A daemon with a random model of this shape."""
    model = ROOT / "build" / "bench" / "random-model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(shape))
    shutil.copy(ROOT / "bundled/keepd-nano" / "tokenizer.json", model)
    d = Daemon(args.binary, model, ["--kv-policy", "streaming", "--kv-budget", str(BUDGET), *flags])
    try:
        d.complete(64, 8)  # pages touched, clocks up
        yield d
    finally:
        d.stop()


def measure(args, shape):
    before, rows = machine(args.machine), {}
    with serving(args, shape) as d:
        rows["prompt_512"] = prompt_rate(d, 512, args.repeats)
        for batch in (1, 8, 32):
            rows[f"generate_{batch}"] = generation_rate(d, batch, 48)
        wall, spent = time.perf_counter(), d.metric("keepd_eviction_seconds_sum")
        short = generation_rate(d, 1, 160, 1024)
        long = generation_rate(d, 1, 160, 8192)
        rows["generate_1_seen_1024"], rows["generate_1_seen_8192"] = short, long
        rows["eviction_share"] = (d.metric("keepd_eviction_seconds_sum") - spent) / (time.perf_counter() - wall)
    after = machine(args.machine)
    limits = {k: max(before[k], after[k]) for k in ("read_bytes_per_s", "matrix_flop_per_s")}
    return rows, limits


def speed(args, shape, about):
    rows, limits = measure(args, shape)
    read, macs = weights(shape)
    shares = {"prompt_512": rows["prompt_512"] * 2 * macs / limits["matrix_flop_per_s"],
              **{f"generate_{b}": rows[f"generate_{b}"] / b * read / limits["read_bytes_per_s"] for b in (1, 8, 32)}}
    keep(args, "cpu", {**about, "limits": limits, "tokens_per_s": rows, "shares": shares, "shape": shape})
    print(f"read bandwidth {limits['read_bytes_per_s'] / 1e9:.1f} GB/s, matrix rate {limits['matrix_flop_per_s'] / 1e12:.2f} TFLOP/s\n")
    print("| what | tokens/s | share of the limit |\n|---|--:|--:|")
    print(f"| prompt, 512 tokens | {rows['prompt_512']:.0f} | {100 * shares['prompt_512']:.0f} % of the matrix rate |")
    for b in (1, 8, 32):
        print(f"| generation, batch {b} | {rows[f'generate_{b}']:.1f} | {100 * shares[f'generate_{b}']:.0f} % of the read bandwidth |")
    print(f"| batch 1, 1,024 seen | {rows['generate_1_seen_1024']:.1f} | |")
    print(f"| batch 1, 8,192 seen, budget 1,024 | {rows['generate_1_seen_8192']:.1f} | "
          f"{100 * rows['generate_1_seen_8192'] / rows['generate_1_seen_1024']:.0f} % of the line above |")
    print(f"| eviction | | {100 * rows['eviction_share']:.2f} % of the time |\n")


def policies(args, shape, about):
    shape = thinner(shape, args.thinner)
    with serving(args, shape, "--log-level", "warn") as d:
        costs = policy_costs(d, {1: args.repeats})
    keep(args, "policies", {**about, "repeats": args.repeats, "budget": BUDGET, "buffer": BUFFER, "by_batch": costs, "shape": shape})
    for batch, rows in costs.items():
        print(f"\n| policy, batch {batch}, budget {BUDGET} | prompt tokens/s | generated tokens/s | of streaming (all rounds) "
              "| ms per eviction | evicting, of the time | MiB per sequence |\n|---|--:|--:|--:|--:|--:|--:|")
        for name, c in rows.items():
            spread = f"{100 * c['of_streaming_all'][0]:.0f}-{100 * c['of_streaming_all'][-1]:.0f}"
            reading = f"{c['prompt_tokens_per_s']:.0f}" if "prompt_tokens_per_s" in c else ""
            print(f"| {name} | {reading} | {c['tokens_per_s']:.1f} | {100 * c['of_streaming']:.0f} % ({spread}) "
                  f"| {c['eviction_ms']:.1f} | {100 * c['evicting']:.2f} % | {c['bytes'] * args.thinner / 2 ** 20:.0f} |")


def keep(args, what, result):
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{what}-{result['date']}.json").write_text(json.dumps(result, indent=1) + "\n")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("what", nargs="?", choices=("speed", "policies"), help="default: both")
    ap.add_argument("--binary", default=str(ROOT / "build" / "keepd"))
    ap.add_argument("--machine", default=str(ROOT / "build" / "release" / "bench" / "speed" / "bench_machine"))
    ap.add_argument("--config", type=pathlib.Path)
    ap.add_argument("--repeats", type=int, default=5)
    ap.add_argument("--thinner", type=int, default=7, help="policies: a part of the layers and of the vocabulary (7: one in seven)")
    ap.add_argument("--out", type=pathlib.Path, default=ROOT / "bench" / "results")
    a = ap.parse_args()
    shape = json.loads(a.config.read_text()) if a.config else QWEN3_0_6B
    cpu = next((line.split(":")[1].strip() for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.machine())
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    about = {"date": datetime.date.today().isoformat(), "commit": commit, "cpu": cpu}
    for what in (a.what,) if a.what else ("speed", "policies"):
        {"speed": speed, "policies": policies}[what](a, shape, about)


if __name__ == "__main__":
    main()
