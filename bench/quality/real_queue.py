#!/usr/bin/env python3
"""Measures bounded caches on the real models, in the order of worth: what is done is not done again, so it may be stopped at any time.

    nice -n 15 real_queue.py FOLDER --binary build/release/server/keepd --processor AVX-512
    real_queue.py FOLDER --dry-run          prints the commands that are left

FOLDER gets the texts of real_texts.py, the gates that `keepd fit` makes, and the tables that it prints; --rows the rows of texts.py, from which
real_models.py makes tables and the picture. The models are those that tools/fetch-model fetches. Rows of processors that round otherwise are
not mixed: --processor is a part of the models' names. All methods hold 4 sinks; `global` protects 16 recent tokens, `snapkv`, `cake` and
`expected_attention` 32, `rkv` 8, `trimkv` none.
"""
import argparse
import pathlib
import shlex
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODELS = {
    "smollm2": ("SmolLM2-135M-Instruct Q4_1", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "gemma": ("Gemma 3 270M Q4_K_M", "gemma-3-270m-q4_k_m.gguf"),
    "qwen0.5": ("Qwen2.5-Coder-0.5B-Instruct Q4_K_M", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),
    "qwen1.5": ("Qwen2.5-Coder-1.5B-Instruct Q4_K_M", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"),
}
FIRST = "global,snapkv,streaming"
ALL = FIRST + ",rkv,cake,expected_attention,trimkv"
BOTH = "0.25,0.125"
# (model, texts of a kind, methods, shares); gates are fitted before the first step of a model
STEPS = [("smollm2", 8, FIRST, BOTH), ("gemma", 8, FIRST, BOTH), ("qwen0.5", 4, FIRST, BOTH), ("qwen1.5", 3, FIRST, "0.25"),
         ("qwen1.5", 3, FIRST, BOTH), ("qwen0.5", 8, FIRST, BOTH), ("smollm2", 8, ALL, BOTH), ("gemma", 8, ALL, BOTH),
         ("qwen1.5", 8, FIRST, BOTH), ("qwen0.5", 8, ALL, BOTH), ("qwen1.5", 8, ALL, BOTH)]
SOURCES = ("documents", "code", "languages", "chats.jsonl", "tools.jsonl")


def arguments():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("folder", type=pathlib.Path)
    ap.add_argument("--binary", default=str(ROOT / "build/release/server/keepd"))
    ap.add_argument("--models", type=pathlib.Path, default=pathlib.Path.home() / ".cache/keepd")
    ap.add_argument("--only", default=",".join(MODELS), help="models, separated by commas")
    ap.add_argument("--processor", default="", help="added to the models' names in the rows")
    ap.add_argument("--rows", type=pathlib.Path, default=ROOT / "bench/results/real-models.jsonl")
    ap.add_argument("--dry-run", action="store_true")
    return ap.parse_args()


def commands(a):
    """(what is there afterwards, command, file for its output) of all steps; None: texts.py knows itself what is done."""
    texts, seen = a.folder / "texts", set()
    yield texts / "tools.jsonl", [sys.executable, str(HERE / "real_texts.py"), str(texts)], None
    for model, count, methods, shares in STEPS:
        if model not in a.only.split(","):
            continue
        name, file = MODELS[model]
        gates = a.folder / f"{model}.safetensors"
        if model not in seen:
            yield gates, [a.binary, "fit", str(a.models / file), "--out", str(gates)], a.folder / f"{model}.txt"
        seen.add(model)
        yield None, [sys.executable, str(HERE / "texts.py"), *(str(texts / s) for s in SOURCES), "--length", "1024", "--count", str(count),
                     "--methods", methods, "--shares", shares, "--binary", a.binary, "--model", str(a.models / file), "--gates", str(gates),
                     "--workers", "2", "--store", str(a.rows), "--names", ", ".join(filter(None, (name, a.processor))), "keepd fit"], None


def main():
    a = arguments()
    a.folder.mkdir(parents=True, exist_ok=True)
    for made, command, output in commands(a):
        if made and made.exists():
            continue
        print(shlex.join(command), flush=True)
        if a.dry_run:
            continue
        with open(output or "/dev/null", "w") as out:
            subprocess.run(command, check=True, stdout=out)


if __name__ == "__main__":
    main()
