#!/usr/bin/env python3
"""keepd beside other engines: the same weights, prompts and lengths, on the same machine, one after the other.

    side_by_side.py --keepd build/cuda/server/keepd --device cuda
    side_by_side.py --keepd build/keepd --device cpu --shape tiny --requests 3

A model with random weights of a real shape is written as safetensors and given to every engine that is
installed: keepd over HTTP (the full cache, then a budget), transformers with continuous batching over its paged
cache, vLLM. Every request is greedy, ends after the same number of tokens, and is sent at once with all others.
Each engine is a process of its own. Printed and written (--json): tokens generated per second, prompts
included; the most memory that was taken; and how much of the answers is the first engine's, up to the first
token that differs (engines round differently, and a random model's best tokens lie close together).
"""
import argparse
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time
import traceback

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import serving  # noqa: E402
from harness import ROOT, LeftOut  # noqa: E402

SHAPES = {
    "llama-8b": serving.LLAMA_8B,
    "tiny": {**serving.LLAMA_8B, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
             "num_hidden_layers": 3, "head_dim": 64, "vocab_size": 2048},
}


# --- the model ------------------------------------------------------------------------------------


def tensors(shape):
    """(name, rows, columns or None) of a Llama's weights."""
    d, ff, size = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    q, kv = shape["num_attention_heads"] * size, shape["num_key_value_heads"] * size
    yield "model.embed_tokens.weight", shape["vocab_size"], d
    for i in range(shape["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        yield layer + "input_layernorm.weight", d, None
        for name, rows, columns in (("self_attn.q_proj", q, d), ("self_attn.k_proj", kv, d), ("self_attn.v_proj", kv, d),
                                    ("self_attn.o_proj", d, q), ("mlp.gate_proj", ff, d), ("mlp.up_proj", ff, d),
                                    ("mlp.down_proj", d, ff)):
            yield f"{layer}{name}.weight", rows, columns
        yield layer + "post_attention_layernorm.weight", d, None
    yield "model.norm.weight", d, None
    yield "lm_head.weight", shape["vocab_size"], d


def write_model(folder, shape, device):
    """config.json, a tokenizer, and a file of random bf16 weights per layer. A folder that holds this shape is left as it is."""
    import torch
    from safetensors.torch import save_file
    config, done = json.dumps(shape, indent=1), folder / "complete"
    if done.exists() and done.read_text() == config:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    generator = torch.Generator(device).manual_seed(1)
    files, index = {}, {}
    for name, rows, columns in tensors(shape):
        if columns is None:
            values = torch.ones(rows, dtype=torch.bfloat16)
        else:  # outputs about as large as inputs
            values = torch.randn(rows, columns, generator=generator, device=device, dtype=torch.float32)
            values = (values * (1 if "embed" in name else columns ** -0.5)).to(torch.bfloat16).cpu()
        file = "model-" + (name.split(".")[2] if ".layers." in name else name.split(".")[-2]) + ".safetensors"
        files.setdefault(file, {})[name] = values
        index[name] = file
    for file, content in files.items():
        save_file(content, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "bundled/keepd-nano" / name, folder / name)
    (folder / "config.json").write_text(config)
    done.write_text(config)
    if device == "cuda":  # the engines are other processes
        torch.cuda.empty_cache()


def requests_of(count, prompt, out):
    """Prompts of half to one and a half times the length, all different."""
    return [{"prompt": serving.prompt(prompt // 2 + prompt * i // max(1, count - 1), i), "out": out} for i in range(count)]


# --- engines: each a process, which prints one JSON object -------------------------------------------


class Peak:
    """The most memory that was taken while it runs, looked at twice a second: of the device all that is, of the CPU the
    process's own (`pid`), in MiB."""

    def __init__(self, device, pid):
        self.device, self.pid, self.most, self.stop = device, pid, 0, threading.Event()
        self.thread = threading.Thread(target=self.look, daemon=True)

    def now(self):
        if self.device == "cuda":
            done = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], text=True,
                                  capture_output=True, check=False)
            return max((int(x) for x in done.stdout.split() if x.isdigit()), default=0)
        for line in pathlib.Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) // 1024
        return 0

    def look(self):
        while not self.stop.is_set():
            try:
                self.most = max(self.most, self.now())
            except OSError:  # the process has ended
                return
            self.stop.wait(0.5)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join(10)


def run_keepd(args, model, requests, policy):
    longest = max(len(r["prompt"]) + r["out"] for r in requests)
    flags = ["--device", args.keepd_device, "--max-num-seqs", len(requests), "--max-queue", max(16, len(requests)),
             "--max-queue-tokens", 0, "--max-conversations", 0, "--max-model-len", longest + 64, "--max-num-batched-tokens",
             max(4096, len(requests))]
    kv = {} if policy == "full" else {"budget": args.budget}
    bodies = [{**serving.body(r["prompt"], r["out"], policy, **kv), "return_token_ids": True} for r in requests]
    with serving.Daemon(args.keepd, model, args.work / f"keepd-{policy}.log", flags, dict(os.environ),
                        max(5, args.limit - 10)) as daemon:  # ends before the process that waits for it
        daemon.ask(serving.TEXT, {**bodies[0], "max_tokens": 2})
        with Peak(args.device, daemon.process.pid) as peak, serving.Together(daemon, serving.TEXT, bodies) as together:
            begun, pages = time.monotonic(), 0
            while any(t.is_alive() for t in together.threads):
                together.check()
                pages = max(pages, daemon.kv()["pool"]["pages_used"])
                time.sleep(0.1)
            answers, seconds = together.results(), time.monotonic() - begun
        kv = pages * daemon.kv()["pool"]["page_bytes"] / 2**20
    return {"seconds": seconds, "tokens": [a["choices"][0]["token_ids"] for a in answers], "peak_mib": peak.most,
            "memory_is": f"a pool as large as the device included; {kv:,.0f} MiB of it in use"}


def run_transformers(args, model, requests):
    os.environ["HF_HUB_OFFLINE"] = "1"  # kernels that it would fetch are left out, not waited for
    import torch
    import transformers
    torch.set_grad_enabled(False)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    lm = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa").to(args.device).eval()
    out = requests[0]["out"]
    greedy = transformers.GenerationConfig(do_sample=False, max_new_tokens=out, eos_token_id=-1, pad_token_id=0)

    def generate(requests, plain):
        extra = {}
        if hasattr(transformers, "ContinuousBatchingConfig"):
            # On a CPU it would take what the machine has: it is told how many pages the requests need.
            pages = sum(-(-(len(r["prompt"]) + out) // 32) + 1 for r in requests)
            cpu = {"page_size": 32, "num_blocks": pages, "max_batch_tokens": 1024} if args.device == "cpu" else {}
            extra["continuous_batching_config"] = transformers.ContinuousBatchingConfig(allow_block_sharing=False, **cpu, **plain)
        found = lm.generate_batch([r["prompt"] for r in requests], generation_config=greedy, **extra)
        return [list(o.generated_tokens) for o in found.values()]

    plain = {}
    if not generate(requests[:1], plain):  # compiled and warm; it says nothing where its own choice of attention fails
        plain = {"auto_switch_to_flash": False}
        generate(requests[:1], plain)
    with Peak(args.device, os.getpid()) as peak:
        begun = time.monotonic()
        tokens = generate(requests, plain)
        seconds = time.monotonic() - begun
    if len(tokens) != len(requests) or any(len(t) != out for t in tokens):
        raise RuntimeError(f"{len(tokens)} answers of {[len(t) for t in tokens][:8]} tokens to {len(requests)} requests of {out}")
    return {"seconds": seconds, "tokens": tokens, "peak_mib": peak.most,
            "memory_is": f"attention {lm.config._attn_implementation}; its cache takes what is free"}


def run_vllm(args, model, requests):
    import vllm
    llm = vllm.LLM(model=str(model), dtype="bfloat16", skip_tokenizer_init=True, enable_prefix_caching=False,
                   max_model_len=max(len(r["prompt"]) + r["out"] for r in requests) + 64)
    sampling = vllm.SamplingParams(temperature=0, max_tokens=requests[0]["out"], ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": r["prompt"]} for r in requests]
    llm.generate(prompts[:1], sampling)
    with Peak(args.device, os.getpid()) as peak:
        begun = time.monotonic()
        found = llm.generate(prompts, sampling)
        seconds = time.monotonic() - begun
    return {"seconds": seconds, "tokens": [list(o.outputs[0].token_ids) for o in found], "peak_mib": peak.most,
            "memory_is": "its cache takes what is free"}


def module(name, what=None):
    """A look whether it is installed: None, or why it cannot be taken."""
    def look(args):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
        return what(args) if what else None
    return look


def has_batches(args):
    version = importlib.metadata.version("transformers")
    import transformers
    return None if hasattr(transformers.GenerationMixin, "generate_batch") else f"transformers {version} has no generate_batch"


def has_gpu(args):
    return None if args.device == "cuda" else "needs a GPU"


def has_keepd(args):
    return None if args.keepd and args.keepd.exists() else f"{args.keepd} is not there"


ENGINES = {  # name: (may it run? or why not, how)
    "keepd, full cache": (has_keepd, lambda a, m, r: run_keepd(a, m, r, "full")),
    "keepd, budget": (has_keepd, lambda a, m, r: run_keepd(a, m, r, "streaming")),
    "transformers, paged continuous batching": (module("transformers", has_batches), run_transformers),
    "vLLM": (module("vllm", has_gpu), run_vllm),
}


# --- all engines ------------------------------------------------------------------------------------


def agreement(first, other):
    """Tokens up to the first that differs, of all, averaged over the answers."""
    shares = []
    for a, b in zip(first, other, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        shares.append(same / max(1, len(a)))
    return sum(shares) / len(shares)


def run_engine(args, name):
    """In a process of its own, so that memory is free for the next. Its result; LeftOut where it cannot run."""
    if why := ENGINES[name][0](args):
        raise LeftOut(why)
    result = args.work / "engine.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / "side_by_side.py"), *args.given, "--engine", name]
    with (args.work / "engine.log").open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=log, check=False, timeout=args.limit)
    if done.returncode or not result.exists():
        raise RuntimeError(f"{name}: status {done.returncode}\n{(args.work / 'engine.log').read_text(errors='replace')[-1500:]}")
    return json.loads(result.read_text())


def compare(args):
    shape = {**SHAPES[args.shape], **({"num_hidden_layers": args.layers} if args.layers else {})}
    write_model(args.work / "model", shape, args.device)
    requests = requests_of(args.requests, args.prompt, args.out)
    workload = (f"{args.shape} of {shape['num_hidden_layers']} layers, {len(requests)} requests of {len(requests[0]['prompt'])} to "
                f"{len(requests[-1]['prompt'])} tokens, {args.out} out")
    report = {"workload": workload, "device": args.device, "budget": args.budget, "engines": [], "left_out": [], "failed": []}
    first = None
    for name in ENGINES:
        try:
            found = run_engine(args, name)
        except LeftOut as why:
            report["left_out"].append(f"{name}: {why}")
            continue
        except Exception as error:  # noqa: BLE001: the other engines go on
            traceback.print_exc()
            report["failed"].append(f"{name}: {error}")
            report["left_out"].append(f"{name}: it failed")
            continue
        first = first or found["tokens"]
        made = sum(map(len, found["tokens"]))
        report["engines"].append({"name": f"{name} {args.budget}" if name.endswith("budget") else name,
                                  "tokens_per_second": made / found["seconds"], "seconds": found["seconds"], "generated": made,
                                  "peak_mib": found["peak_mib"], "memory_is": found["memory_is"],
                                  "agreement": agreement(first, found["tokens"])})
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return report


def show(report):
    print(f"{report['workload']}, on {report['device']}, one run\n")
    print("| engine | tokens/s | most memory, MiB | agrees with the first | |\n|---|--:|--:|--:|---|")
    for e in report["engines"]:
        print(f"| {e['name']} | {e['tokens_per_second']:.1f} | {e['peak_mib']} | {100 * e['agreement']:.0f} % | {e['memory_is']} |")
    for what in report["left_out"]:
        print(f"\nleft out: {what}")


def arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keepd", type=pathlib.Path, default=ROOT / "build/keepd")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="of the engines")
    parser.add_argument("--keepd-device", choices=("cpu", "cuda"), help="of keepd, where it is another (cuda: keepd-emu has it)")
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--layers", type=int, help="fewer or more than the shape has")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512, help="tokens, on average")
    parser.add_argument("--out", type=int, default=128, help="tokens")
    parser.add_argument("--budget", type=int, default=256, help="entries per head, of the second run of keepd")
    parser.add_argument("--limit", type=float, default=150, help="seconds for one engine")
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build/side-by-side", help="where the model and logs go")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.given, args.keepd, args.keepd_device = list(argv), args.keepd.resolve(), args.keepd_device or args.device
    return args


def main(argv=None):
    args = arguments(sys.argv[1:] if argv is None else argv)
    args.work.mkdir(parents=True, exist_ok=True)
    if args.engine:
        found = ENGINES[args.engine][1](args, args.work / "model", requests_of(args.requests, args.prompt, args.out))
        (args.work / "engine.json").write_text(json.dumps(found))
        return 0
    report = compare(args)
    show(report)
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
