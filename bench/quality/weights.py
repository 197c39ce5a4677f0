#!/usr/bin/env python3
"""The cost in accuracy of formats of weights: Kullback-Leibler divergence from the model's own numbers, and how often the
most likely token is the same.

    weights.py [--quantize PROGRAM] [FORMAT ...]
    weights.py --model MODEL.gguf --tokenizer FILE [--quantize PROGRAM] [FORMAT ...]

Every prediction of every text is compared over the whole vocabulary, with products of exact activations (float32) and a
float32 cache. A FORMAT is q8 or q4 (keepd's own, `--quantization`), q4-N (the same, saved with `--quantize-calibrate N`), or one that llama.cpp's llama-quantize writes
(q8_0, q4_0, q4_k_m, ...), for which --quantize names that program: keepd reads those numbers exactly, so these rows
are llama.cpp's formats without the rounding of activations. The last columns round them as keepd's `int8` does.
kv-q8, kv-q4, kv-fp8 and kv-bf16 are types of the cache, with the model's own weights.
Models: Qwen3 directories in bf16 (default: keepd-nano), and GGUF files, which are read as they are; of these only pages
are predicted. Needs the packages numpy, gguf and tokenizers.
"""
import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import numpy as np
from tokenizers import Tokenizer

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench" / "compare"))
from compare import dialogue  # noqa: E402
from make_model import convert  # noqa: E402

PAGES = ("README.md", "docs/CHOOSING.md", "docs/OPERATIONS.md", "docs/POLICIES.md")
OWN = ("q8", "q4")
CACHES = ("kv-q8", "kv-q4", "kv-fp8", "kv-bf16")


def is_saved(form):
    return form.startswith("q4-") and form[3:].isdigit()


def is_file(model):
    return model.suffix == ".gguf"


def texts(args):
    """{kind: [token ids]}: texts like those that keepd-nano was trained on, and this repository's pages."""
    tokenizer = Tokenizer.from_file(str(args.tokenizer or args.model / "tokenizer.json"))
    rng = random.Random(1)
    kinds = {"dialogues": ["".join(dialogue(rng) for _ in range(args.length // 40)) for _ in range(args.count)]}
    if is_file(args.model):
        kinds = {}
    kinds["pages"] = [(ROOT / page).read_text() for page in PAGES]
    return {kind: [tokenizer.encode(text).ids[:args.length] for text in found] for kind, found in kinds.items()}


def predictions(args, model, ids, *options):
    """[tokens][vocabulary] log-probabilities."""
    with tempfile.NamedTemporaryFile("w", suffix=".ids") as f:
        f.write(",".join(map(str, ids)))
        f.flush()
        done = subprocess.run([args.golden, "--model", model, "--tokens", f"@{f.name}", "--rows", "all", "--path", "auto",
                               "--threads", "2", *("--kv-dtype", "f32")[:0 if "--kv-dtype" in options else 2], *options],
                              capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{model}: {done.stderr.strip()}")
    found = json.loads(done.stdout)
    return next(np.array(v) for v in found.values() if isinstance(v, list) and v and isinstance(v[0], list) and len(v[0]) > 1)


def compared(base, other):
    """(divergences, whether the most likely token is the same) of all predictions."""
    kl = np.concatenate([(np.exp(a) * (a - b)).sum(1) for a, b in zip(base, other)])
    same = np.concatenate([a.argmax(1) == b.argmax(1) for a, b in zip(base, other)])
    return kl, same


def cell(base, other):
    kl, same = compared(base, other)
    return f"{kl.mean():.2g} ± {kl.std() / len(kl) ** 0.5:.1g} | {np.quantile(kl, 0.99):.2g} | {100 * same.mean():.1f} %"


def written(args, folder, form):
    """The model in a format of llama.cpp."""
    source, path = args.model if is_file(args.model) else folder / "bf16.gguf", folder / f"{form}.gguf"
    if not source.exists():
        convert(args.model, source)
    done = subprocess.run([args.quantize, source, path, form], capture_output=True, text=True, check=False)
    return path if done.returncode == 0 else sys.exit(f"{form}: {done.stderr[-300:]}")


def saved(args, folder, form):
    """The model as keepd saves it."""
    path, (kind, tokens) = folder / (form + ".gguf" * is_file(args.model)), form.split("-")
    if path.exists():
        return path
    done = subprocess.run([args.keepd, "--model", args.model, "--quantization", kind, "--quantize-calibrate", tokens,
                           "--quantize-to", path], capture_output=True, text=True, check=False)
    return path if done.returncode == 0 else sys.exit(f"{form}: {done.stderr[-300:]}")


def source_of(args, folder, form):
    """(model, options of golden_logits)"""
    if form in OWN:
        return args.model, ["--quantization", form]
    if form in CACHES:
        return args.model, ["--kv-dtype", form.removeprefix("kv-")]
    if is_saved(form):
        return saved(args, folder, form), []
    return written(args, folder, form), []


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("formats", nargs="*", default=list(OWN), metavar="FORMAT")
    ap.add_argument("--model", type=pathlib.Path, default=ROOT / "bundled" / "keepd-nano")
    ap.add_argument("--tokenizer", type=pathlib.Path, help="tokenizer.json (default: the model directory's)")
    ap.add_argument("--golden", default=str(ROOT / "build" / "dev" / "tests" / "golden" / "golden_logits"))
    ap.add_argument("--keepd", default=str(ROOT / "build" / "dev" / "server" / "keepd"))
    ap.add_argument("--quantize", help="llama-quantize")
    ap.add_argument("--length", type=int, default=512, help="tokens of a text (512)")
    ap.add_argument("--count", type=int, default=4, help="dialogues (4)")
    a = ap.parse_args()
    if is_file(a.model) and not a.tokenizer:
        ap.error("a GGUF file needs --tokenizer")
    if not a.quantize and any(not is_saved(f) for f in set(a.formats) - {*OWN, *CACHES}):
        ap.error("formats of llama.cpp need --quantize")
    all_texts = texts(a)
    base = {kind: [predictions(a, a.model, ids, "--exact", "yes") for ids in found] for kind, found in all_texts.items()}
    with tempfile.TemporaryDirectory() as folder:
        for kind, found in all_texts.items():
            print(f"\n| {kind}, {sum(map(len, found)):,} tokens | mean KL | p99 | same token | with `int8` activations: mean KL | p99 | same token |")
            print("|---|--:|--:|--:|--:|--:|--:|")
            for form in a.formats:
                model, options = source_of(a, pathlib.Path(folder), form)
                cells = [cell(base[kind], [predictions(a, model, ids, "--exact", exact, *options) for ids in found])
                         for exact in ("yes", "no")]
                print(f"| {form} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
