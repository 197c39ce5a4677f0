#!/usr/bin/env python3
"""PyTorch's attention and matrix products at the shapes of gpu_bench, in bf16; rows of the same form, one JSON object a line.

    torch_rates.py --device cuda
    torch_rates.py --device cpu --small     sizes for a dry run
"""
import argparse
import json
import time

import torch
from torch.nn import functional

SHAPES = {  # heads, KV heads, numbers of a head; (outputs, inputs) of the products
    "llama-3.1-8b": (32, 8, 128, {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}),
    "qwen3-0.6b": (16, 8, 128, {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)}),
}
SMALL = {"small": (4, 2, 64, {"small": (64, 32)})}


def seconds(call, device, least):
    """Seconds of one call: a warm-up, then as many as fill `least` seconds, queued at once."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    for _ in range(3):
        call()
    wait()
    count = 1
    while True:
        begun = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        took = time.perf_counter() - begun
        if took >= least:
            return took / count
        count = count * 10 if took < least / 20 else int(count * 1.3 * least / took) + 1


def row(name, value, unit):
    print(json.dumps({"key": "", "name": f"torch {torch.__version__}, {name}", "value": value, "unit": unit, "prediction": ""}), flush=True)


def products(name, shapes, device, rows, least):
    for what, (outputs, inputs) in shapes.items():
        weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16)
        for count in rows:
            x = torch.randn(count, inputs, device=device, dtype=torch.bfloat16)
            took = seconds(lambda x=x, weight=weight: functional.linear(x, weight), device, least)
            row(f"{name}: product {what}, {count} rows: weights read", 2e-12 * outputs * inputs / took, "TB/s")
            row(f"{name}: product {what}, {count} rows: arithmetic", 2e-12 * outputs * inputs * count / took, "TFLOP/s")


def attention(name, sizes, device, prompts, batches, entries, least):
    heads, heads_kv, size = sizes

    def tensor(batch, count, tokens):
        return torch.randn(batch, count, tokens, size, device=device, dtype=torch.bfloat16)
    for tokens in prompts:
        q, k, v = tensor(1, heads, tokens), tensor(1, heads_kv, tokens), tensor(1, heads_kv, tokens)
        took = seconds(lambda q=q, k=k, v=v: functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), device, least)
        row(f"{name}: prefill attention, causal, {tokens} tokens", 2e-12 * tokens * tokens * heads * size / took, "TFLOP/s")
    for batch in batches:
        q, k, v = tensor(batch, heads, 1), tensor(batch, heads_kv, entries), tensor(batch, heads_kv, entries)
        took = seconds(lambda q=q, k=k, v=v: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True), device, least)
        row(f"{name}: decode attention, {batch} x {entries} entries", 4e-12 * batch * entries * heads_kv * size / took, "TB/s")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(1)
    torch.set_grad_enabled(False)
    least = 0.001 if args.small else 0.1
    for name, (heads, heads_kv, size, shapes) in (SMALL if args.small else SHAPES).items():
        products(name, shapes, args.device, [1] if args.small else [1, 64, 256, 512], least)
        attention(name, (heads, heads_kv, size), args.device, [32] if args.small else [2048, 8192],
                  [1] if args.small else [1, 64, 256], 40 if args.small else 1088, least)


if __name__ == "__main__":
    main()
