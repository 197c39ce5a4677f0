"""Requests drawn at random give the same bits with guessed tokens and without, alone and side by side, on every
path of the CPU, on two ranks, on the emulated GPU, and with draft models. KEEPD_DRAFT_REQUESTS: how many are drawn for
the path of this processor; KEEPD_DRAFT_SEED: another number draws others."""
import concurrent.futures as futures
import json
import math
import os
import pathlib
import random
import re
import shutil
import struct
import subprocess
import sys
import threading
import time

import pytest
import requests
from conftest import start_on
from lora import load_directory, make
from test_fit_families import with_tokenizer

ROOT = pathlib.Path(__file__).resolve().parents[2]
COUNT = int(os.environ.get("KEEPD_DRAFT_REQUESTS", "50"))
FEWER = max(COUNT // 3, 8)  # where models or paths are compared: each computes rows alike for all fields of a request
SEED = 1000 * int(os.environ.get("KEEPD_DRAFT_SEED", "0"))
FLAGS = ("--kv-budget", "48", "--kv-buffer", "16", "--kv-chunk", "64", "--max-num-seqs", "12")
POLICIES = ("full", "global", "streaming", "keydiff", "knorm", "trimkv", "snapkv", "h2o", "rkv", "lagkv")
NANO = ROOT / "bundled/keepd-nano"
WITHOUT_GATES = tuple(p for p in POLICIES if p not in ("global", "trimkv"))
NAMES = "Nora Milo Ada Bob Cleo Dora".split()
SCHEMA = {"type": "object", "properties": {"name": {"enum": NAMES}, "codes": {"type": "array", "items": {"type": "integer"}, "maxItems": 4}},
          "required": ["name", "codes"], "additionalProperties": False}


def draw(rng, policies=POLICIES):
    """One request; what it repeats is what makes guesses right."""
    fact = f"My sister {rng.choice(NAMES)} lives in Lisbon. The code of the garage is {rng.randrange(1000, 9999)}. "
    messages = [{"role": "user", "content": fact * rng.randrange(1, 7)}]
    if rng.random() < 0.3:
        messages += [{"role": "assistant", "content": "Noted."}, {"role": "user", "content": "What is the code of the garage?"}]
    kv = {"policy": rng.choice(policies), "report": rng.choice(("lengths", "positions", "trace")), "reuse": False, "retain": False}
    if kv["policy"] != "full":
        kv |= {"budget": rng.randrange(20, 80), "buffer": rng.choice((0, 4, 16, 40)), "chunk": rng.choice((16, 64))}
    body = {"model": "keepd-nano", "messages": messages, "max_tokens": rng.randrange(1, 90), "seed": rng.randrange(1 << 30),
            "temperature": rng.choice((0, 0, 0.3, 1)), "kv": kv, "return_token_ids": True, "logprobs": True, "ignore_eos": rng.random() < 0.5}
    if rng.random() < 0.3:
        body |= {"repetition_penalty": 1.2, "presence_penalty": 0.3}
    if rng.random() < 0.3:
        body |= {"dry_multiplier": 0.8, "dry_allowed_length": rng.randrange(3), "dry_penalty_last_n": rng.choice((16, 64, -1))}
    if rng.random() < 0.3:
        body["stop"] = [rng.choice(("garage", "i", ". ", "code of"))]
    if rng.random() < 0.2:
        body["n"] = rng.randrange(2, 4)
    if rng.random() < 0.2:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "facts", "schema": SCHEMA}}
        body.pop("stop", None)
        body["ignore_eos"] = False
    if rng.random() < 0.4:
        words = (fact * 3).split(" ")
        words[rng.randrange(len(words))] = "Porto"
        body["prediction"] = {"type": "content", "content": " ".join(words)}
    return body


def ask(url, body, speculate):
    r = requests.post(f"{url}/v1/chat/completions", json=body | {"speculate": speculate}, timeout=600)
    assert r.status_code == 200, r.text
    answer = r.json()
    details = answer["usage"]["completion_tokens_details"]
    choices = [(c["finish_reason"], c["message"]["content"], c["token_ids"], c["logprobs"]) for c in answer["choices"]]
    return (choices, answer["usage"]["kv_details"]), details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


def vanish(url, body, stop):
    """Clients that leave in the middle of an answer."""
    while not stop.is_set():
        with requests.post(f"{url}/v1/chat/completions", json=body | {"stream": True}, stream=True, timeout=600) as r:
            next(r.iter_lines())
        time.sleep(0.05)


def compare(d, seed, count, policies=POLICIES):
    rng = random.Random(SEED + seed)
    bodies = [draw(rng, policies) for _ in range(count)]
    without = [ask(d.url, body, "off") for body in bodies]
    assert not any(accepted or rejected for _, accepted, rejected in without)
    alone = [ask(d.url, body, "auto") for body in bodies]
    stop = threading.Event()
    leaver = threading.Thread(target=vanish, args=(d.url, bodies[0] | {"max_tokens": 400, "ignore_eos": True}, stop))
    leaver.start()
    with futures.ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda body: ask(d.url, body, "auto"), bodies))
    stop.set()
    leaver.join()
    for i, body in enumerate(bodies):
        assert alone[i][0] == without[i][0], f"request {i} alone: {body}"
        assert together[i][0] == without[i][0], f"request {i} beside others: {body}"
    accepted, rejected = (sum(a[k] for a in alone) for k in (1, 2))
    print(f"{count} requests, {accepted} guesses confirmed, {rejected} not")
    if count >= 50:
        assert accepted > 0 and rejected > 0
    assert d.metric("keepd_preemptions_total") == 0


@pytest.mark.parametrize("path", ["auto", "avx2", "portable"])
def test_the_bits_are_those_without_guesses(daemon, path):
    compare(start_on(daemon, path, *FLAGS), 1, COUNT if path == "auto" else FEWER)


def test_on_the_reference_path(daemon):
    compare(daemon("--cpu-path", "reference", *FLAGS), 2, max(COUNT // 16, 3))


def test_on_two_ranks(daemon):
    compare(daemon("--tensor-parallel-size", "2", "--threads", "2", *FLAGS), 3, FEWER)


@pytest.mark.slow
def test_on_the_emulated_gpu(daemon):
    """Prompts of the bundled model take seconds there."""
    binary = ROOT / "build/dev/tests/emu/keepd-emu"
    d = daemon("--device", "cuda", "--kv-pool-bytes", "48M", *FLAGS, binary=binary)
    compare(d, 4, max(COUNT // 16, 3), tuple(p for p in POLICIES if p != "lagkv"))


def test_none_are_made_where_they_are_turned_off(daemon):
    d = daemon("--speculate", "0", *FLAGS)
    body = {"model": "keepd-nano", "messages": [{"role": "user", "content": "Hello, hello, hello, hello"}], "max_tokens": 40}
    assert ask(d.url, body | {"return_token_ids": True, "logprobs": True}, "auto")[1:] == (0, 0)
    assert d.metric("keepd_drafted_tokens_total") == 0


def test_a_conversation_goes_on_as_without(daemon):
    """The state that a turn leaves has no trace of guesses: the next turn's bits are the same."""
    answers = []
    for speculate in ("0", "15"):
        d = daemon("--speculate", speculate, *FLAGS)
        messages, turns = [{"role": "user", "content": "The code of the garage is 4815. " * 5}], []
        for _ in range(4):
            answer = d.chat(messages, max_tokens=50, logprobs=True, ignore_eos=True, kv={"policy": "global", "report": "positions"})
            choice, usage = answer["choices"][0], answer["usage"]
            turns.append((choice["logprobs"], usage["kv_details"], usage["prompt_tokens_details"]))
            messages += [choice["message"], {"role": "user", "content": "And what is the code of the garage?"}]
        answers.append(turns)
        assert turns[-1][2]["cached_tokens"] > 0
    assert answers[0] == answers[1]


# ---- Recurrent states ----


@pytest.mark.parametrize("family, ranks", [("qwen35", 1), ("qwen35", 2), ("qwen3next", 1), ("lfm2", 1), ("granitehybrid", 1), ("falconh1", 2)])
def test_states_wait_for_what_is_drawn(daemon, tmp_path, family, ranks):
    """Gated delta rules, short convolutions, Mamba-2 alone and beside attention."""
    more = ("--tensor-parallel-size", "2", "--threads", "2") if ranks > 1 else ()
    d = daemon("--model", str(with_tokenizer(family, tmp_path)), "--step-stretch", "0", *more, *FLAGS)
    compare(d, 7, max(COUNT // 4, 8), WITHOUT_GATES)
    assert d.metric("keepd_confirmed_tokens_total") > 0


# ---- Blocks that predict further tokens ----


def write_tensors(path, tensors):
    """tensors: name -> (dtype, shape, bytes)."""
    at, header = 0, {}
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


def read_tensors(path):
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8:8 + size]), data[8 + size:]
    return {name: (t["dtype"], t["shape"], body[slice(*t["data_offsets"])]) for name, t in header.items() if name != "__metadata__"}


def f32(shape, number):
    count = math.prod(shape)
    return "F32", list(shape), struct.pack(f"<{count}f", *(number(i) for i in range(count)))


def with_block(family, source, folder, right):
    """The model with a block like its layer `source`. right: every layer hands on what it gets, so that a token follows from the
    one before alone, and the block guesses it. Otherwise the block is of random numbers."""
    with_tokenizer(family, folder)
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    width = text["hidden_size"]
    tensors = {name: t for name, t in read_tensors(folder / "model.safetensors").items() if not name.startswith("mtp.")}
    prefix = f"model.language_model.layers.{source}." if "text_config" in config else f"model.layers.{source}."
    block = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    if "layer_types" not in text:  # a block that costs a third of the model would not be asked
        for more in range(text["num_hidden_layers"], 12):
            tensors |= {f"model.layers.{more}.{name}": t for name, t in block.items()}
        text["num_hidden_layers"] = 12
    rng, offset = random.Random(3), 0 if family.startswith("qwen3") else 1
    final = next(t for name, t in tensors.items() if name.endswith("model.norm.weight") or name.endswith("language_model.norm.weight"))
    joins = {"in": f32((width, 2 * width), lambda i: float(i % (2 * width) == i // (2 * width)) if right else rng.gauss(0, 0.2)),
             "embed": f32((width,), lambda i: offset), "hidden": f32((width,), lambda i: offset), "out": final}
    if family.startswith("qwen3"):
        names = {"in": "fc.weight", "embed": "pre_fc_norm_embedding.weight", "hidden": "pre_fc_norm_hidden.weight", "out": "norm.weight"}
        added = {f"mtp.{names[part]}": t for part, t in joins.items()} | {f"mtp.layers.0.{name}": t for name, t in block.items()}
    else:
        names = {"in": "eh_proj.weight", "embed": "enorm.weight", "hidden": "hnorm.weight", "out": "shared_head.norm.weight"}
        before = f"model.layers.{text['num_hidden_layers']}."
        added = {before + names[part]: t for part, t in joins.items()} | {before + name: t for name, t in block.items()}
        text["num_nextn_predict_layers"] = 1
    tensors |= added
    if right:
        ends = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")
        tensors = {name: (t[0], t[1], bytes(len(t[2]))) if name.endswith(ends) else t for name, t in tensors.items()}
    write_tensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


BLOCKS = [("qwen35", 3), ("qwen35moe", 2), ("glm4moe", 2), ("deepseekv3", 2)]


@pytest.mark.parametrize("family, source", BLOCKS)
def test_a_block_that_knows_is_right(daemon, tmp_path, family, source):
    model = with_block(family, source, tmp_path, True)
    d = daemon("--model", model, "--step-stretch", "0", *FLAGS)
    for temperature in (0.5, 1):
        body = {"messages": [{"role": "user", "content": "Where?"}], "max_tokens": 120, "temperature": temperature, "seed": 4,
                "ignore_eos": True, "kv": {"policy": "full"}, "return_token_ids": True, "logprobs": True}
        answer, accepted, _ = ask(d.url, body, "auto")
        assert accepted > 20
        assert answer == ask(d.url, body, "off")[0]
    guessed, right = (d.metric(f"keepd_model_{what}_tokens_total") for what in ("drafted", "confirmed"))
    print(f"{right:.0f} of {guessed:.0f} guesses of the block")
    assert right > 0.9 * guessed > 20
    info = requests.get(f"{d.url}/server_info", timeout=10).json()
    assert info["draft_model"] == "mtp" and info["draft_tokens"] == 1024 and info["draft_bytes"] > 0
    none = daemon("--model", model, "--draft-model", "none", *FLAGS)
    assert requests.get(f"{none.url}/server_info", timeout=10).json()["draft_model"] is None


def test_the_files_of_a_block_count_once(tmp_path):
    model, pad = with_block("qwen35", 3, tmp_path, True), 16 << 20
    tensors = read_tensors(tmp_path / "model.safetensors") | {"model.visual.pad.weight": ("F32", [pad // 4], bytes(pad))}
    write_tensors(tmp_path / "model.safetensors", tensors)

    def most(*flags):
        binary = os.environ.get("KEEPD_BIN", ROOT / "build" / "keepd")
        found = subprocess.run([binary, "--inspect", model, "--max-num-seqs", "4", *flags], capture_output=True, text=True, timeout=60)
        return float(re.search(r"^serving +([0-9.]+) MB at most", found.stdout, re.M)[1])
    assert 0 < most() - most("--draft-model", "none") < pad * 1e-6


@pytest.mark.parametrize("family, source, right", [("qwen35", 3, True), ("qwen35moe", 2, False), ("glm4moe", 2, True), ("deepseekv3", 2, False)])
def test_the_bits_are_those_without_a_block(daemon, tmp_path, family, source, right):
    """128 tokens of a text: the block's texts begin anew within an answer."""
    d = daemon("--model", with_block(family, source, tmp_path, right), "--draft-tokens", "128", "--step-stretch", "0", *FLAGS)
    compare(d, 11, max(COUNT // 4, 8), WITHOUT_GATES)
    assert d.metric("keepd_draft_model_failures_total") == 0
    assert d.metric("keepd_model_drafted_tokens_total") > 0


def compare_with_adapter(d):
    """Answers of the adapter `own` and of the model itself have the bits of answers without guesses."""
    answers = []
    for name in ("own", "keepd-nano"):
        body = {"model": name, "messages": [{"role": "user", "content": "Where?"}], "max_tokens": 120, "temperature": 0.5, "seed": 4,
                "ignore_eos": True, "kv": {"policy": "full"}, "return_token_ids": True, "logprobs": True}
        before = d.metric("keepd_model_drafted_tokens_total")
        answer = ask(d.url, body, "auto")[0]
        assert d.metric("keepd_model_drafted_tokens_total") > before, name
        assert answer == ask(d.url, body, "off")[0], name
        answers.append(answer[0])
    assert answers[0] != answers[1]
    assert d.metric("keepd_draft_model_failures_total") == 0


def test_the_bits_with_an_adapter_are_those_without_a_block(daemon, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    model = with_block("glm4moe", 2, folder, True)
    tensors = {name: t for name, t in load_directory(folder).items() if not name.startswith("model.layers.12.")}  # not the block's
    make(tmp_path / "lora", 5, targets=("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj"), size=0.1, model=tensors)
    compare_with_adapter(daemon("--model", model, "--lora", f"own={tmp_path / 'lora'}", "--step-stretch", "0", *FLAGS))


def test_a_conversation_from_a_file_needs_nothing_of_the_block(daemon, tmp_path):
    """Turns before and behind a restart have the bits of a daemon without guesses."""
    folder = tmp_path / "model"
    folder.mkdir()
    model, answers = with_block("qwen35", 3, folder, True), []
    for speculate in ("0", "15"):
        messages, turns = [{"role": "user", "content": "The code of the garage is 4815."}], []
        for _ in range(2):
            d = daemon("--model", model, "--speculate", speculate, "--step-stretch", "0", "--state-dir", str(tmp_path / speculate), *FLAGS)
            for _ in range(2):
                answer = d.chat(messages, max_tokens=40, logprobs=True, ignore_eos=True, kv={"policy": "full"})
                turns.append((answer["choices"][0]["logprobs"], answer["usage"]["prompt_tokens_details"]))
                messages += [answer["choices"][0]["message"], {"role": "user", "content": "And?"}]
            assert d.stop() == 0
        answers.append(turns)
    assert answers[0] == answers[1]


def test_a_broken_block_is_left_out(daemon, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    with_block("qwen35", 3, folder, True)
    tensors = read_tensors(folder / "model.safetensors")
    tensors["mtp.fc.weight"] = f32((64, 64), lambda i: 0)
    write_tensors(folder / "model.safetensors", tensors)
    d = daemon("--model", str(folder), *FLAGS)
    assert requests.get(f"{d.url}/server_info", timeout=10).json()["draft_model"] is None
    assert d.chat([{"role": "user", "content": "Hello"}], max_tokens=8)["usage"]["completion_tokens"] > 0


# ---- Draft models ----



def resize(to, layers):
    """keepd-nano with so many of its layers; further ones add nothing, so that it computes the same, more slowly."""
    shutil.copytree(NANO, to, ignore=shutil.ignore_patterns("gates*", "*.md", "*.log", "SHA*", "model.safetensors"))
    tensors = {}
    for name, (dtype, shape, data) in read_tensors(NANO / "model.safetensors").items():
        number = int(name.split(".")[2]) if ".layers." in name else -1
        if number < layers:
            tensors[name] = (dtype, shape, data)
        for more in range(6, layers) if number == 0 else []:
            zero = name.endswith(("o_proj.weight", "down_proj.weight"))
            tensors[name.replace(".0.", f".{more}.")] = (dtype, shape, bytes(len(data)) if zero else data)
    write_tensors(to / "model.safetensors", tensors)
    config = json.loads((to / "config.json").read_text()) | {"num_hidden_layers": layers}
    (to / "config.json").write_text(json.dumps(config))
    return str(to)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A model that computes what keepd-nano computes, in six times as many layers."""
    return resize(tmp_path_factory.mktemp("deep") / "model", 36)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory):
    return resize(tmp_path_factory.mktemp("shallow") / "model", 4)


def test_a_model_that_computes_the_same_is_always_right(daemon, deep):
    d = daemon("--model", deep, "--draft-model", str(NANO), "--step-stretch", "0", *FLAGS)
    fact = "My sister Nora lives in Lisbon. The code of the garage is 4815. "
    for temperature in (0, 1):
        body = {"messages": [{"role": "user", "content": fact}], "max_tokens": 150, "temperature": temperature, "seed": 4,
                "ignore_eos": True, "kv": {"policy": "full"}, "return_token_ids": True, "logprobs": True}
        answer, accepted, _ = ask(d.url, body, "auto")
        assert accepted > 60
        assert answer == ask(d.url, body, "off")[0]
    guessed, right = (d.metric(f"keepd_model_{what}_tokens_total") for what in ("drafted", "confirmed"))
    assert guessed == right > 100
    info = requests.get(f"{d.url}/server_info", timeout=10).json()
    assert info["draft_model"] == "keepd-nano" and info["draft_tokens"] == 1024 and info["draft_bytes"] > 11e6


@pytest.mark.parametrize("stretch", ["0", "200"])
def test_the_bits_are_those_without_a_draft_model(daemon, deep, shallow, stretch):
    d = daemon("--model", deep, "--draft-model", shallow, "--draft-tokens", "128", "--step-stretch", stretch, *FLAGS)
    compare(d, 5, FEWER, WITHOUT_GATES)
    guessed, right = (d.metric(f"keepd_model_{what}_tokens_total") for what in ("drafted", "confirmed"))
    print(f"{right:.0f} of {guessed:.0f} guesses of the draft model")
    assert d.metric("keepd_draft_model_failures_total") == 0
    assert guessed >= right
    assert guessed > right > 0 or stretch != "0"  # otherwise the times of steps decide whether guesses pay


def test_thirty_two_chats_keep_their_reservations(daemon, deep, shallow):
    """The draft model has a cache of its own; test_sched_drafter counts its pages."""
    d = daemon("--model", deep, "--draft-model", shallow, "--draft-tokens", "128", "--max-num-seqs", "32", "--kv-budget", "64",
               "--kv-policy", "streaming", "--step-stretch", "0")

    def dialogue(number):
        messages, ends = [], []
        for turn in range(2):
            messages.append({"role": "user", "content": f"Chat {number}, turn {turn}: my code is {number * 37 % 1000}."})
            answer = d.chat(messages, max_tokens=40, ignore_eos=True)
            messages.append(answer["choices"][0]["message"])
            ends.append(answer["usage"]["completion_tokens"])
        return ends

    with futures.ThreadPoolExecutor(32) as pool:
        assert list(pool.map(dialogue, range(32))) == [[40] * 2] * 32
    assert d.metric("keepd_preemptions_total") == 0
    assert d.metric("keepd_draft_model_failures_total") == 0
    assert d.metric("keepd_pages_reserved") == 0


def refusal(*flags):
    binary = os.environ.get("KEEPD_BIN", ROOT / "build" / "keepd")
    done = subprocess.run([binary, "--port", "0", *flags], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    return done.stderr + done.stdout


def test_the_bits_with_an_adapter_are_those_without_a_draft_model(daemon, tmp_path, deep, shallow):
    make(tmp_path / "lora", 5, size=0.03)  # small, so that the draft model, which has no adapter, is often right
    compare_with_adapter(daemon("--model", deep, "--draft-model", shallow, "--lora", f"own={tmp_path / 'lora'}", "--step-stretch", "0", *FLAGS))


def test_a_draft_model_that_cannot_guess_is_refused(tmp_path, deep):
    other = tmp_path / "other"
    shutil.copytree(NANO, other)
    tokens = json.loads((other / "tokenizer.json").read_text())
    vocab = tokens["model"]["vocab"]
    names = {number: name for name, number in vocab.items()}
    vocab[names[1000]], vocab[names[1001]] = 1001, 1000
    (other / "tokenizer.json").write_text(json.dumps(tokens))
    model = ("--model", deep)
    said = refusal(*model, "--draft-model", str(other))
    assert "draft-model" in said and "token 1000 is" in said and names[1000] in said, said
    assert "speculate 0" in refusal(*model, "--draft-model", str(NANO), "--speculate", "0")
    assert "one rank" in refusal(*model, "--draft-model", str(NANO), "--tensor-parallel-size", "2", "--threads", "2")
    assert "draft-model" in refusal(*model, "--draft-model", str(tmp_path / "absent"))


def test_the_measurement_and_its_picture(tmp_path):
    """bench/speed/drafts.py compares the answers itself."""
    results, picture = tmp_path / "drafts.json", tmp_path / "drafts.svg"
    command = [sys.executable, ROOT / "bench/speed/drafts.py", "--keepd", os.environ.get("KEEPD_BIN", ROOT / "build" / "keepd"),
               "--model", NANO, "--draft-model", NANO, "--cases", "json", "--tokens", "24", "--rounds", "2", "--json", results]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    work = json.loads(results.read_text())["work"]
    assert all(k["equal"] and len(k["rates"]) == 2 for kinds in work.values() for k in kinds.values())
    assert work["json"]["keepd, text"]["tokens_a_read"] > 1
    subprocess.run([sys.executable, ROOT / "bench/speed/drafts_picture.py", results, "--out", picture], check=True, timeout=60)
    assert "JSON by a schema" in picture.read_text()
