#!/usr/bin/env python3
"""keepd beside the fastest engines for CPUs, by the format of the weights, on this machine, now.

    formats.py [--llama DIR] [--ik DIR] [--openvino PYTHON] PREFIX [PREFIX ...]

PREFIX-FORMAT.gguf is read by every engine, so all multiply the same bits; a missing file is skipped with a line.
`llama-quantize` makes them from PREFIX-bf16.gguf: `llama-quantize --pure P-bf16.gguf P-q4_0.gguf q4_0`.

    --llama DIR             llama.cpp's llama-bench and llama-batched-bench
    --ik DIR                those of ik_llama.cpp, with run-time repacking (-rtr)
    --openvino PYTHON       a Python interpreter with the package openvino-genai; --openvino-options are properties of its device
    --llama-server PROGRAM  llama.cpp's server

An engine that is not named, or lacks its programs, is skipped with a line. keepd and llama.cpp's server are measured
through HTTP, by the same client; the others by their own benches, inside their process. In every round the engines
take their turns one after another, keepd in the middle, and every ratio is of two turns of one round: the median over
the rounds, with the lowest and the highest. The read bandwidth is measured in every round, too (bench_machine). The
generation of one text is also shown as a part of it: the bytes of the file's matrices, once for each token.
--keepd-options may be given more than once: then keepd takes a turn with each of them.
"""
import argparse
import contextlib
import datetime
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys

from compare import ROOT, Keepd, Llama, generating, prompt_of, reading, words_of

CASES = {"prompt": "prompt of 512", "1": "generation, batch 1", "8": "generation, batch 8", "32": "generation, batch 32"}
PROMPT, TOKENS, SHORT = 512, 32, 16
SERVED = 2 * TOKENS     # tokens of an answer through HTTP: the first answers begin while other prompts are read, and that time says little


def text_of(command, **options):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {(done.stdout + done.stderr)[-300:]}")
    return done.stdout + done.stderr


class ServerTurn:
    """A server on one file, measured through HTTP; stopped (SIGSTOP) outside its turns."""

    def __init__(self, name, server, args):
        self.name, self.server, self.prompt = name, server, words_of if args.words else prompt_of
        with self.server.turn() as s:   # memory touched
            generating(s, random.Random(99), max([1, *(int(c) for c in args.cases if c != "prompt")]), SERVED, self.prompt)

    def measure(self, cases, number):
        rng, found = random.Random(number), {}
        with self.server.turn() as s:
            for case in cases:
                if case == "prompt":
                    reading(s, rng, PROMPT)   # the others' benches also read one before the one that counts
                found[case] = reading(s, rng, PROMPT) if case == "prompt" else generating(s, rng, int(case), SERVED, self.prompt)
        return found

    def stop(self):
        self.server.stop()


def keepd_turn(args, model, name, options):
    return ServerTurn(name, Keepd(args, model, {"places": 32, "full": True, "options": options.split()}), args)


def keepds(args):
    """{name: options} of keepd's turns; a single one needs no options in its name."""
    several = args.keepd_options or [""]
    return {f"keepd {o}".strip() if len(several) > 1 else "keepd": o for o in several}


LLAMA_SERVER = "llama.cpp's server"


def llama_turn(args, model):
    return ServerTurn(LLAMA_SERVER, Llama(args, model.with_suffix(""), {"places": 32, "length": PROMPT + 2 * SERVED}), args)


class GgmlTurn:
    """llama.cpp or a fork: their own benches, a process for each measurement."""

    def __init__(self, name, folder, options, args, model):
        self.name, self.folder, self.options, self.args, self.model = name, folder, options, args, model

    def prompt(self):
        bench = [self.folder / "llama-bench", "-m", self.model, "-t", self.args.threads, "-p", PROMPT, "-n", 0, "-r", 2, "-o", "json"]
        out = text_of([*bench, *(["-rtr", 1] if "-rtr" in self.options else [])])
        return json.loads(out[out.index("[\n"):out.rindex("]") + 1])[0]["avg_ts"]

    def batches(self, sizes):
        bench = [self.folder / "llama-batched-bench", "-m", self.model, "-t", self.args.threads, "-tb", self.args.threads,
                 "-c", 64 * max(sizes), "-npp", SHORT, "-ntg", TOKENS, "-npl", ",".join(map(str, sizes)), *self.options]
        rows = re.findall(r"^\|" + r"\s*([\d.]+)\s*\|" * 8, text_of(bench).replace("||", "|"), re.MULTILINE)
        return {row[2]: float(row[7]) for row in rows}

    def measure(self, cases, number):
        found = {"prompt": self.prompt()} if "prompt" in cases else {}
        sizes = [int(c) for c in cases if c != "prompt"]
        return found | (self.batches(sizes) if sizes else {})

    def stop(self):
        pass


OPENVINO = """
import json, sys
import numpy, openvino
import openvino_genai as ov
model, threads, prompt, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
pipe = ov.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads, **dict(o.split("=") for o in sys.argv[5:]))
config = ov.GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens, ignore_eos=True)
rate = {}
rng = numpy.random.default_rng(1)
for length, case in ((prompt, "prompt"), (16, "1")):
    for _ in range(2):  # other tokens, because prompts that were read before are cached
        inputs = openvino.Tensor(rng.integers(300, 20000, (1, length)))
        metrics = pipe.generate(inputs, config).perf_metrics
        rate[case] = length / metrics.get_ttft().mean * 1e3 if case == "prompt" else 1e3 / metrics.get_tpot().mean
print(json.dumps(rate))
"""


class OpenvinoTurn:
    """OpenVINO GenAI: one text at a time."""

    name = "OpenVINO GenAI"

    def __init__(self, args, model):
        self.args, self.model = args, model

    def measure(self, cases, number):
        out = text_of([self.args.openvino, "-c", OPENVINO, self.model, self.args.threads, PROMPT, TOKENS, *self.args.openvino_options.split()])
        rates = json.loads(out[out.rindex("{"):out.rindex("}") + 1])
        return {case: rate for case, rate in rates.items() if case in cases}

    def stop(self):
        pass


OPENVINO_VERSION = """
import openvino, openvino_genai
print(openvino_genai.__version__, openvino.Core().get_property("CPU", "INFERENCE_PRECISION_HINT").to_string())
"""


def ggml_version(folder):
    """The version and the commit that llama-batched-bench shows."""
    out = text_of([folder / "llama-batched-bench", "--version"])
    return " ".join(re.sub(r"[(),]|\bbuild \d+|\bcommit\b", " ", out[out.index("version:") + 8:].splitlines()[0]).split())


def engines(args):
    """[(name, what opens it on a file, its version and flags)], keepd in the middle."""
    found = []
    for name, folder, options in (("llama.cpp", args.llama, []), ("ik_llama.cpp", args.ik, ["-rtr"])):
        missing = [p for p in ("llama-bench", "llama-batched-bench") if not folder or not (folder / p).exists()]
        if missing:
            print(f"{name}: skipped, no {missing[0]}" + (f" in {folder}" if folder else ": its folder is not given"))
            continue
        version = ""
        with contextlib.suppress(RuntimeError, ValueError):    # some builds do not know the option
            version = ggml_version(folder)
        found.append((name, lambda model, n=name, f=folder, o=options: GgmlTurn(n, f, o, args, model),
                      " ".join([version, *options]).strip()))
    if args.openvino:
        version = text_of([args.openvino, "-c", OPENVINO_VERSION]).strip()
        found.append(("OpenVINO GenAI", lambda model: OpenvinoTurn(args, model), f"{version} {args.openvino_options}".strip()))
    else:
        print("OpenVINO GenAI: skipped, no interpreter is given")
    if args.llama_server:
        found.append((LLAMA_SERVER, lambda model: llama_turn(args, model), args.llama_options))
    else:
        print(f"{LLAMA_SERVER}: skipped, its program is not given")
    commit = text_of(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT).strip()
    found[1:1] = [(name, lambda model, n=name, o=options: keepd_turn(args, model, n, o), f"{commit} {options}".strip())
                  for name, options in keepds(args).items()]
    return found


EXTENSIONS = {"AVX2": "avx2", "AVX-512": "avx512f", "AVX-512 VNNI": "avx512_vnni", "AVX-512 BF16": "avx512_bf16",
              "AMX int8": "amx_int8", "AMX bf16": "amx_bf16"}


def machine(cpuinfo):
    """The processor's name and the instruction sets that matter for products, of the text of /proc/cpuinfo."""
    name = re.search(r"model name\s*: (.*)", cpuinfo)
    flags = re.search(r"flags\s*: (.*)", cpuinfo)
    known = flags[1].split() if flags else []
    return f"{name[1] if name else 'unknown processor'} ({', '.join(n for n, f in EXTENSIONS.items() if f in known) or 'no known extension'})"


# --- the table ------------------------------------------------------------------------------------


def read_rate(args):
    """Bytes per second that all cores read now."""
    return json.loads(text_of([args.machine]))["read_bytes_per_s"]


def one_round(args, running, number):
    """{engine: {case: tokens/s}}; engines whose turn fails are left out, with a line."""
    found = {}
    for engine in running if number % 2 == 0 else running[::-1]:
        try:
            found[engine.name] = engine.measure(args.cases, number)
        except (RuntimeError, ValueError) as e:
            print(f"  {engine.name}: {e}", file=sys.stderr, flush=True)
            continue
        print(f"  {engine.name}: " + ", ".join(f"{c} {r:.4g}" for c, r in found[engine.name].items()), file=sys.stderr, flush=True)
    return found


def rounds_of(args, known, model):
    running = []
    try:
        for _, opened, _ in known:
            running.append(opened(model))
        return [{"read": read_rate(args), "rates": one_round(args, running, n)} for n in range(args.rounds)]
    finally:
        for engine in running:
            engine.stop()


def spread(values, show="{:.2f}"):
    values = sorted(values)
    middle = show.format(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({show.format(values[0])}-{show.format(values[-1])})"


def is_keepd(name):
    return name.split()[0] == "keepd"


def beside(case, rounds, name, size):
    """The last two cells of a turn of keepd: its rates beside the best of the others in each round, and as a part of reading."""
    both = [r for r in rounds if case in r["rates"].get(name, {})]
    others = [(r["rates"][name][case], [o[case] for n, o in r["rates"].items() if not is_keepd(n) and case in o]) for r in both]
    best = [rate / max(rates) for rate, rates in others if rates]
    part = [100 * r["rates"][name][case] * size / r["read"] for r in both]
    return [spread(best) if best else "", f"{spread(part, '{:.0f}')} %" if case == "1" and part else ""]


def line(case, rounds, names, size):
    """One row of the table: the medians of the rounds in which keepd was measured, and the cells of each of its turns."""
    cells, last = [], []
    for name in names:
        rates = [r["rates"][name][case] for r in rounds
                 if case in r["rates"].get(name, {}) and any(is_keepd(n) and case in o for n, o in r["rates"].items())]
        cells.append(f"{statistics.median(rates):.1f}" if rates else "")
        if is_keepd(name):
            last += beside(case, rounds, name, size)
    return f"| {CASES[case]} | {' | '.join(cells + last)} |"


def matrix_bytes(path):
    """Bytes that one token reads: of the file's matrices, which are nearly all of it without the vocabulary's text. An
    embedding that is not the LM head, too, is counted, though one token reads one row of it."""
    import gguf
    reader = gguf.GGUFReader(path)
    names = {t.name for t in reader.tensors}
    return sum(int(t.n_bytes) for t in reader.tensors
               if len(t.shape) > 1 and not (t.name == "token_embd.weight" and "output.weight" in names))


def table(args, known, prefix, form, path):
    size = matrix_bytes(path)
    print(f"\n{path.name}: {size / 1e6:.0f} MB of matrices", file=sys.stderr, flush=True)
    rounds = rounds_of(args, known, path)
    names = [name for name, _, _ in known]
    read = spread([r["read"] / 1e9 for r in rounds], "{:.1f}")
    last = [head for name in names if is_keepd(name) for head in (f"{name} / best other", "of reading")]
    print(f"\n| {prefix.name}, {form}; {read} GB/s read | {' | '.join(names + last)} |")
    print("|---|" + "--:|" * len(names + last))
    for case in args.cases:
        print(line(case, rounds, names, size), flush=True)
    return {"file": path.name, "matrix_bytes": size, "rounds": rounds}


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("prefixes", nargs="+", type=pathlib.Path, metavar="PREFIX")
    ap.add_argument("--formats", nargs="+", default=["bf16", "q8_0", "q4_0"], metavar="FORMAT")
    ap.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    ap.add_argument("--llama", type=pathlib.Path, metavar="DIR")
    ap.add_argument("--ik", type=pathlib.Path, metavar="DIR")
    ap.add_argument("--openvino", metavar="PYTHON")
    ap.add_argument("--openvino-options", default="", metavar="'KEY=VALUE ...'", help="such as INFERENCE_PRECISION_HINT=f32")
    ap.add_argument("--llama-server", metavar="PROGRAM")
    ap.add_argument("--words", action="store_true", help="prompts of batches are English words: a trained model answers random ids with parts "
                    "of characters, for which llama.cpp's server sends no events")
    ap.add_argument("--llama-options", default="", help="of llama.cpp's server, besides threads, places and length; as one word")
    ap.add_argument("--keepd", default=str(ROOT / "build" / "keepd"))
    ap.add_argument("--keepd-options", action="append", help="more of them, as one word; another for another turn of keepd")
    ap.add_argument("--machine", default=str(ROOT / "build" / "release" / "bench" / "speed" / "bench_machine"))
    ap.add_argument("--threads", type=int, default=os.cpu_count())
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--out", type=pathlib.Path, default=ROOT / "build" / "bench" / "compare")
    a = ap.parse_args()
    a.logs, a.nice = a.out, 0
    a.out.mkdir(parents=True, exist_ok=True)
    known = engines(a)
    print(f"{datetime.date.today().isoformat()}, {machine(pathlib.Path('/proc/cpuinfo').read_text())}, {a.threads} threads; "
          + "; ".join(f"{name} {version}" for name, _, version in known), flush=True)
    found = []
    for prefix in a.prefixes:
        for form in a.formats:
            path = prefix.parent / f"{prefix.name}-{form}.gguf"
            if path.exists():
                found.append(table(a, known, prefix, form, path))
            else:
                print(f"\n{path}: skipped, there is no such file")
    (a.out / "formats.json").write_text(json.dumps({"engines": [k[::2] for k in known], "tables": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
