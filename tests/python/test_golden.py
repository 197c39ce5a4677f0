"""The C model, cache and policies against reference_model.py, through the golden_logits driver.

Needs numpy and safetensors only.  KEEPD_GOLDEN_LOGITS names the driver, or KEEPD_BUILD the build
folder (build/dev).
"""

import ctypes
import ctypes.util
import hashlib
import json
import math
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # small matrices: more threads only spin

import numpy as np
import pytest
from safetensors.numpy import save_file

import latent_model
from policies import table
from policies.agree import Follower, State
from policies.choose import choose
from policies.classes import Members
from policies.sequence import Sequence, Stream
from reference_model import LatentReference, Reference, load_directory, log_softmax, replay

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "tests/data/models"
BUNDLED = ROOT / "bundled/keepd-nano"
FAMILIES = ("qwen3", "qwen2", "llama")
PATHS = ("reference", "portable", "neon", "avx2", "avx512", "amx")


# --- the driver -----------------------------------------------------------


def find_driver():
    build = Path(os.environ.get("KEEPD_BUILD", ROOT / "build/dev"))
    driver = Path(os.environ.get("KEEPD_GOLDEN_LOGITS") or build / "tests/golden/golden_logits")
    assert driver.exists(), f"{driver} is not built"
    return driver


def run_driver(model, tokens, *options, check=True):
    command = [find_driver(), "--model", model, "--tokens", ",".join(map(str, tokens)), *options]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0 or not check, done.stderr
    return done


def run(model, tokens, *options):
    return json.loads(run_driver(model, tokens, *options).stdout)


def has_path(path):
    done = run_driver(MODELS / "qwen3", [1], "--path", path, check=False)
    assert done.returncode == 0 or path not in ("reference", "portable"), done.stderr
    return done.returncode == 0


@dataclass(frozen=True)
class Policy:
    name: str
    budget: int
    buffer: int
    chunk: int
    sinks: int = 0
    recent: int = 0
    horizon: float = 1.0

    def rule(self):
        retention = dict(horizon=self.horizon) if table.rule(self.name).score == "retention" else {}
        return table.rule(self.name).but(sinks=self.sinks, recent=self.recent, **retention).as_float32()


def policy_options(p, prompt):
    options = {"prompt": prompt, "policy": p.name, "budget": p.budget, "buffer": p.buffer, "chunk": p.chunk,
               "sinks": p.sinks, "recent": p.recent}
    if p.rule().score == "retention":
        options["horizon"] = p.horizon
    return [str(x) for key, value in options.items() for x in (f"--{key}", value)]


def split_streams(state, layers, heads):
    """The driver's flat arrays as [layer][head] -> (positions, log_beta float32)."""
    ends = np.cumsum(state["lengths"])
    pos = np.split(np.array(state["positions"], np.int64), ends)[:-1]
    beta = np.split(np.array(state["log_beta"], np.float32), ends)[:-1]
    assert ends[-1] == len(state["positions"]) == len(state["log_beta"])
    return [[(pos[i * heads + h], beta[i * heads + h]) for h in range(heads)] for i in range(layers)]


def split_rows(state, name):
    """Keys or values per stream, [entries, D]."""
    rows = np.array(state[name]).reshape(len(state["positions"]), -1)
    return np.split(rows, np.cumsum(state["lengths"]))[:-1]


def split_members(state):
    """The classes' members per stream."""
    members = state["members"]
    ends = np.cumsum(members["lengths"])[:-1]
    columns = (np.split(np.array(members[name], kind), ends)
               for name, kind in (("centre", np.int64), ("pos", np.int64), ("gain", np.float64)))
    return [Members(*parts) for parts in zip(*columns)]


# --- models and gates -----------------------------------------------------


def make_gates(path, config, tying, seed, width=24):
    """Random gates whose retention spreads over entries, layers and heads."""
    rng = np.random.default_rng(seed)
    layers, d = config["num_hidden_layers"], config["hidden_size"]
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    blocks = layers * heads if tying == "paper" else layers
    row = {"paper": np.zeros((layers, heads)), "untied": np.arange(layers * heads).reshape(layers, heads),
           "code": np.tile(np.arange(heads), (layers, 1)), "rg10": np.tile(np.arange(heads), (layers, 1))}[tying]
    rows = int(row.max()) + 1

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    tensors = {"w1": normal(blocks, width, d) / math.sqrt(d), "b1": 0.3 * normal(blocks, width),
               "w_last": 6 * normal(rows, width) / math.sqrt(width), "c": 3 + 0.5 * normal(rows),
               "row": row.astype(np.int32)}
    if tying == "rg10":
        tensors |= {"w2": normal(layers, width, width) / math.sqrt(width), "b2": 0.3 * normal(layers, width)}
        tensors["w_last"] = tensors["w_last"] * 2
    header = {"version": 1, "type": "rg10" if tying == "rg10" else "rg", "width": width, "act": "silu",
              "layers": layers, "heads": heads, "trained_budget": 64, "horizon": 128}
    save_file(tensors, path, metadata={"keepd": json.dumps(header)})
    return path


@pytest.fixture(scope="session")
def gates(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("gates"), {}

    def get(family, tying):
        path = folder / f"{family}-{tying}.safetensors"
        if path not in made:
            config = json.loads((MODELS / family / "config.json").read_text())
            made[path] = make_gates(path, config, tying, len(made))
        return path

    return get


def random_tokens(count, vocab=512, seed=1):
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


def bundled_tokens():
    cases = json.loads((MODELS / "keepd-nano/golden.json").read_text())["cases"]
    case = max(cases, key=lambda c: len(c["prompt"]))
    return case["prompt"] + case["greedy"], len(case["prompt"])


needs_bundled = pytest.mark.skipif(not (BUNDLED / "model.safetensors").exists(), reason="no bundled model")


# --- logits ---------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES + (pytest.param("keepd-nano", marks=needs_bundled),))
def test_the_reference_agrees_with_transformers(family):
    directory = MODELS / family if family in FAMILIES else BUNDLED
    for case in json.loads((MODELS / family / "golden.json").read_text())["cases"]:
        ids = case["prompt"] + case["greedy"]
        rows = Reference(directory, gates="").append(ids)
        found = rows[np.arange(len(ids) - 1), ids[1:]]
        assert np.abs(found - (case["prompt_logprobs"] + case["logprobs"])).max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_every_logprob_of_the_float32_path(family):
    ids = random_tokens(150)
    expected = Reference(MODELS / family).append(ids)
    found = np.array(run(MODELS / family, ids, "--rows", "all")["logprobs"])
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-3


# A token's row that float32 and float64 round to other codes, because it lies at a tie: which row that is stored (a layer's
# keys and values of every head in turn), which token, and the side on which the engine is. llama, q8: number 11 of the
# rotated row is 8e-6 of a step from a tie. qwen3, q4: the row's factor is half-way between two numbers of bf16.
TIES = {("llama", "q8"): (3, 19, +1), ("qwen3", "q4"): (9, 94, -1)}


def move_from_tie(reference, row, token, side):
    """Makes a stored row longer or shorter by a millionth."""
    store, rows = reference.stored, iter(range(10**6))

    def stored(x):
        x = np.array(x)
        if next(rows) == row:
            x[token] *= 1 + side * 1e-6
        return store(x)

    reference.stored = stored
    reference.reset()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv_dtype", ("bf16", "fp8", "q8", "q4"))
def test_a_narrow_cache_is_off_by_the_rounding_of_what_it_stores(family, kv_dtype):
    """Keys and values are rounded in the reference, too. Rounding to bf16 meets ties in every model."""
    ids, reference = random_tokens(150), Reference(MODELS / family, kv_dtype=kv_dtype)
    if (family, kv_dtype) in TIES:
        move_from_tie(reference, *TIES[family, kv_dtype])
    expected = reference.append(ids)
    found = np.array(run(MODELS / family, ids, "--rows", "all", "--kv-dtype", kv_dtype)["logprobs"])
    assert np.abs(found - expected).max() < (1e-2 if kv_dtype == "bf16" else 1e-4)


@needs_bundled
def test_greedy_tokens_of_the_bundled_model():
    for case in json.loads((MODELS / "keepd-nano/golden.json").read_text())["cases"]:
        found = run(BUNDLED, case["prompt"], "--greedy", len(case["greedy"]), "--policy", "full")
        assert found["greedy"] == case["greedy"]
        assert np.abs(np.array(found["greedy_logprobs"]) - case["logprobs"]).max() < 1e-3


# --- policies -------------------------------------------------------------

libm = ctypes.CDLL(ctypes.util.find_library("m"))
libm.logf.restype = libm.expm1f.restype = ctypes.c_float
libm.logf.argtypes = libm.expm1f.argtypes = [ctypes.c_float]


def score_float32(log_beta, age, horizon):
    """The documented score in the documented arithmetic: float32, so that near ties fall alike."""
    one, n = np.float32, np.float32(horizon)
    out = np.zeros(len(log_beta), np.float32)
    for i, lb in enumerate(np.asarray(log_beta, np.float32)):
        x = one(n * lb)
        if n == 1:
            w = one(0)
        elif np.isinf(n):
            w = -one(libm.logf(-libm.expm1f(lb)))
        elif -x < one(0.01):
            w = one(one(x - lb) / one(2)) + one(one(one(x * x) - one(lb * lb)) / one(24))
        else:
            w = one(libm.logf(one(libm.expm1f(x)) / one(n * one(libm.expm1f(lb)))))
        out[i] = one(one(age[i]) * lb) + w
    return out.astype(np.float64)


class Float32Scores(Sequence):
    """A cache as the engine reports it, scored in the engine's arithmetic."""

    def by_retention(self, layer, head, _):
        stream = self.streams[layer][head]
        values = score_float32(stream.log_beta, self.tokens - stream.pos, self.rule.horizon)
        return values, np.ones(len(stream)), stream.memory


class Checker:
    """Follows the driver's evictions beside the reference."""

    def __init__(self, result, policy, reference, tolerance):
        self.result, self.policy, self.reference = result, policy, reference
        self.layers, self.heads = result["layers"], result["heads_kv"]
        self.follower = Follower(reference.cache, tolerance)
        self.count, self.worst_beta = 0, 0.0

    def states(self, index):
        eviction = self.result["evictions"][index]
        return [split_streams(eviction[key], self.layers, self.heads) for key in ("before", "after")]

    def check_selection(self, index):
        """From the engine's own log_beta and positions, an identical selection in the same order."""
        before, after = self.states(index)
        cache = Float32Scores(self.policy.rule(), self.layers, self.heads, self.heads, 1, 1.0)
        cache.tokens = self.result["evictions"][index]["tokens"]
        cache.streams = [[Stream(None, None, pos, beta, None) for pos, beta in row] for row in before]
        scored = [cache.scored(i, h) for i in range(self.layers) for h in range(self.heads)]
        for mask, old, new in zip(choose(cache, scored, self.policy.budget), sum(before, []), sum(after, [])):
            assert np.array_equal(old[0][mask], new[0])
            assert np.array_equal(old[1][mask], new[1])
        return sum(len(pos) for pos, _ in sum(after, []))

    def evict(self):
        index, self.count = self.count, self.count + 1
        before, after = self.states(index)
        assert self.result["evictions"][index]["tokens"] == self.reference.tokens
        for (pos, beta), stream in zip(sum(before, []), self.reference.cache.all_streams()):
            assert np.array_equal(pos, stream.pos)
            self.worst_beta = max(self.worst_beta, np.abs(beta - stream.log_beta).max())
        state = self.result["evictions"][index]["after"]
        held = [split_rows(state, name) for name in ("keys", "values")] + [split_members(state)] if "keys" in state else []
        self.follower.evict(self.policy.budget, State([pos for pos, _ in sum(after, [])], *held))


def check_policy(model, gates_file, policy, tokens, prompt, tolerance=1e-5, kind=Reference, options=()):
    """Returns the driver's result and the checker, after all comparisons in the float32 path."""
    named = ["--gates", gates_file] if gates_file is not None else []
    merges = ["--entries", "yes"] if policy.rule().merge != "none" else []
    result = run(model, tokens, "--rows", "all", *named, *merges, *options, *policy_options(policy, prompt))
    reference = kind(model, gates=gates_file)
    reference.reset(policy.rule())
    checker = Checker(result, policy, reference, tolerance)
    rows = replay(reference, tokens, prompt, policy.budget, policy.buffer, policy.chunk, checker.evict)
    assert checker.count == len(result["evictions"]) > 0
    if policy.rule().score != "attention":
        for i in range(checker.count):
            assert checker.check_selection(i) == result["layers"] * result["heads_kv"] * policy.budget
    assert checker.worst_beta < 1e-4
    final = sum(split_streams(result["final"], checker.layers, checker.heads), [])
    for (pos, _), stream in zip(final, reference.cache.all_streams()):
        assert np.array_equal(pos, stream.pos)
    assert np.abs(np.array(result["logprobs"]) - rows).max() < 1e-3
    tally = checker.follower.tally
    assert tally.at_cut + tally.forgiven <= 1 + tally.entries / 1000  # ties are no way out
    print(f"{Path(model).name} {policy.name}: log_beta off by {checker.worst_beta:.1e}, {tally}")
    return result, checker


POLICIES = (
    Policy("streaming", 24, 8, 32, 2, 0),
    Policy("streaming", 40, 0, 64, 0, 5),
    Policy("trimkv", 24, 8, 32, 2, 0, 1.0),
    Policy("trimkv", 16, 16, 48, 0, 4, 1.0),
    Policy("global", 24, 8, 32, 2, 0, 128.0),
    Policy("global", 16, 0, 40, 0, 4, 8.0),
    Policy("global", 32, 20, 64, 4, 0, math.inf),
    Policy("global", 9, 1, 33, 1, 1, 1.0),
)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.name}-{p.budget}-{p.horizon:g}")
@pytest.mark.parametrize("family", FAMILIES)
def test_policies_keep_what_the_reference_keeps(family, policy, gates):
    check_policy(MODELS / family, gates(family, "code"), policy, random_tokens(190), 150)


OBSERVING = [name for name in table.ROWS if table.rule(name).score == "attention"]
# A dialogue repeats its words, so that in the first layer an evicted key is exactly as like its word
# before as its word behind it, and rounding chooses what it merges into: the merged keys are looked at.
# keepd-nano normalises keys, so that their lengths (knorm) tie.
END_TO_END = [(name, "qwen3") for name in OBSERVING] + \
    [pytest.param(name, "keepd-nano", marks=needs_bundled) for name in OBSERVING if name != "knorm"]


@pytest.mark.parametrize("name, model", END_TO_END)
def test_policies_that_observe_attention(name, model):
    """End to end: what float32 makes of the scores may tell near ties otherwise."""
    tokens, prompt = (random_tokens(190), 150) if model in FAMILIES else bundled_tokens()
    rule = table.rule(name, 72)
    policy = Policy(name, 72, 12, 40, rule.sinks, rule.recent)
    directory = MODELS / model if model in FAMILIES else BUNDLED
    _, checker = check_policy(directory, "", policy, tokens, prompt, 1e-4)
    assert rule.merge != "classes" or checker.follower.tally.members > 0


@pytest.mark.parametrize("tying", ("paper", "untied", "rg10"))
def test_every_kind_of_gates(tying, gates):
    policy = Policy("global", 24, 8, 32, 2, 0, 128.0)
    result, _ = check_policy(MODELS / "qwen3", gates("qwen3", tying), policy, random_tokens(190), 150)
    assert len(set(result["evictions"][-1]["after"]["lengths"])) > 1, "gates must tell streams apart"


@needs_bundled
@pytest.mark.parametrize("policy", (Policy("global", 64, 16, 48, 4, 0, 128.0), Policy("global", 32, 32, 64, 4, 0, 128.0),
                                    Policy("trimkv", 64, 16, 48, 4, 0, 1.0), Policy("streaming", 64, 16, 48, 4, 0)),
                         ids=lambda p: f"{p.name}-{p.budget}")
def test_the_bundled_model_keeps_what_the_reference_keeps(policy):
    if not (BUNDLED / "gates.safetensors").exists():
        pytest.skip("no bundled gates")
    check_policy(BUNDLED, None, policy, *bundled_tokens())


def log_beta_bar(path, kv_dtype, exact):
    """Four times what was measured: 2.5e-6, 3.2e-4 (a stray tie of bf16's rounding in the first layer), 3.4e-6.

    The tiles of amx round activations to 16 bits, and for narrow caches queries and weights of attention to bf16, which
    the reference does not; there it has not been measured. Where activations are not exact, avx512 rounds them to bf16, and
    attention over a bf16 cache, too, if the processor multiplies pairs of bf16: at most 0.053, with q4 0.19.
    """
    if path == "avx512" and not exact:
        return 0.8 if kv_dtype == "q4" else 0.2
    return 0.1 if path == "amx" else {"f32": 1e-5, "bf16": 1.3e-3, "fp8": 1.4e-5, "q8": 1e-3, "q4": 1e-2}[kv_dtype]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kv_dtype", ("f32", "bf16", "fp8", "q8", "q4"))
@pytest.mark.parametrize("exact", ("no", "yes"))
def test_every_path_selects_by_its_own_scores(path, kv_dtype, exact, gates):
    if exact == "yes" and path != "avx512":
        pytest.skip("nothing more is exact")
    if not has_path(path):
        pytest.skip(f"this processor has no {path}")
    policy = Policy("global", 24, 8, 32, 2, 0, 128.0)
    result = run(MODELS / "qwen3", random_tokens(190), "--path", path, "--kv-dtype", kv_dtype, "--exact", exact,
                 "--gates", gates("qwen3", "code"), *policy_options(policy, 150))
    checker = Checker(result, policy, Reference(MODELS / "qwen3"), 0)
    assert result["evictions"]
    for i in range(len(result["evictions"])):
        assert checker.check_selection(i) == checker.layers * checker.heads * policy.budget
    own = Reference(MODELS / "qwen3", gates=gates("qwen3", "code"), kv_dtype=kv_dtype)
    own.append(random_tokens(190)[:32])
    before, _ = checker.states(0)
    worst = max(np.abs(before[i][h][1] - own.streams()[i][h][1]).max()
                for i in range(checker.layers) for h in range(checker.heads))
    assert worst < log_beta_bar(path, kv_dtype, exact == "yes")


@pytest.mark.parametrize("path", PATHS)
def test_splitting_the_prompt_changes_nothing(path, gates):
    if not has_path(path):
        pytest.skip(f"this processor has no {path}")
    policy = Policy("global", 24, 8, 64, 2, 0, 128.0)
    outputs = {run_driver(MODELS / "qwen2", random_tokens(190), "--path", path, "--kv-dtype", "bf16", "--gates",
                          gates("qwen2", "code"), "--splits", splits, *policy_options(policy, 150)).stdout
               for splits in ("512", "7,1,40", "1", "16", "63")}
    assert len(outputs) == 1


def digests_of(directory):
    """The digests of model/base_digest.h, for a model of the family qwen3."""
    tensors, sums = load_directory(directory), {"vectors": hashlib.sha256(), "matrices": hashlib.sha256()}
    layers = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    vectors = ("input_layernorm", "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm")
    matrices = (*(f"self_attn.{p}_proj" for p in "qkvo"), *(f"mlp.{p}_proj" for p in ("gate", "up", "down")))

    def add(kind, name):
        part = tensors[f"model.{name}.weight"]
        if kind == "matrices":
            part = part[[0, len(part) // 2, len(part) - 1]]
        sums[kind].update(part.astype("<f4").tobytes())

    add("vectors", "norm")
    add("matrices", "embed_tokens")
    for layer in range(layers):
        for kind, names in (("vectors", vectors), ("matrices", matrices)):
            for name in names:
                add(kind, f"layers.{layer}.{name}")
    return {kind: h.hexdigest() for kind, h in sums.items()}


def test_gates_of_another_base_are_refused(gates, tmp_path):
    source = gates("qwen3", "code")
    data = source.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + size])
    info = json.loads(header["__metadata__"]["keepd"])
    right = digests_of(MODELS / "qwen3")
    other = "0" * 64
    for base, refused, announced in (
            (right, False, False), ({k: v.upper() for k, v in right.items()}, False, False), ({}, False, False),
            ({**right, "matrices": other}, False, True), ({**right, "vectors": other}, True, False)):
        header["__metadata__"]["keepd"] = json.dumps({**info, "base": base})
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path = tmp_path / "gates.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size:])
        done = run_driver(MODELS / "qwen3", [1, 2, 3], "--gates", path, check=not refused)
        assert (done.returncode != 0) == refused, done.stderr
        assert (f"{path}: keepd.base.vectors: the gates were trained for another base model" in done.stderr) == refused
        assert ("the same base model with other matrices" in done.stderr) == announced, done.stderr


def test_a_layer_with_a_recurrent_state_has_no_queries(tmp_path):
    """A file in which it has some belongs to another computation."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(MODELS / "lfm2" / name, tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, numbers = json.loads(data[8:8 + size]), data[8 + size:]
    name = "model.layers.0.self_attn.q_proj.weight"
    header[name] = {"dtype": "BF16", "shape": [64, 64], "data_offsets": [len(numbers), len(numbers) + 64 * 64 * 2]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + numbers + bytes(64 * 64 * 2))
    done = run_driver(tmp_path, [1, 2], check=False)
    assert done.returncode != 0 and name in done.stderr and "no use for it" in done.stderr, done.stderr


def test_the_score_near_one_is_what_the_formula_says():
    """float32 arithmetic against the definition, a plain sum over the horizon."""
    for lb in (-1e-9, -1e-6, -1e-4, -0.01, -0.3, -2.0):
        for n in (2, 16, 128):
            exact = math.log(sum(math.exp(lb * h) for h in range(n)) / n) + 10 * lb
            assert abs(score_float32([lb], [10], n)[0] - exact) < 2e-6 * max(1, abs(exact))


def test_log_softmax_of_the_reference_is_normalised():
    rows = Reference(MODELS / "llama").append(random_tokens(5))
    assert np.allclose(np.exp(rows).sum(-1), 1)
    assert np.allclose(log_softmax(rows), rows)


# --- latent attention -----------------------------------------------------

PLAIN = [name for name in OBSERVING if table.rule(name).merge == "none"]


@pytest.fixture(scope="module")
def latent(tmp_path_factory):
    return latent_model.write(tmp_path_factory.mktemp("latent"))


def test_the_reference_of_latent_attention_is_the_model(latent):
    tokens = random_tokens(90)
    for path in PATHS:
        if has_path(path):
            rows = np.array(run(latent, tokens, "--rows", "all", "--path", path, "--exact", "yes", "--kv-dtype", "f32")["logprobs"])
            assert np.abs(rows - LatentReference(latent).append(tokens)).max() < 2e-5, path


@pytest.mark.parametrize("name", PLAIN)
def test_policies_that_observe_latent_attention(name, latent):
    rule = table.rule(name, 72)
    check_policy(latent, "", Policy(name, 72, 12, 40, rule.sinks, rule.recent), random_tokens(190), 150, 1e-4, LatentReference)


@pytest.mark.parametrize("policy", (POLICIES[0], POLICIES[2], POLICIES[4]), ids=lambda p: p.name)
def test_policies_keep_entries_of_latent_attention(policy, latent, tmp_path):
    gates = make_gates(tmp_path / "gates.safetensors", {**latent_model.CONFIG, "num_key_value_heads": 1}, "code", 3)
    for path in PATHS:
        if has_path(path):
            check_policy(latent, gates, policy, random_tokens(190), 150, kind=LatentReference,
                         options=("--path", path, "--exact", "yes", "--kv-dtype", "f32"))
