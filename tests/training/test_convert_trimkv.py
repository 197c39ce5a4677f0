"""Published gates become gates files with the same log_beta, which the engine accepts."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import convert_trimkv
from conftest import make_model, save_tokenizer, serve
from gates import GateBank, GatedModel, read_header
from models import base_digests

L, H, D, M = 2, 2, 32, 12          # sizes of the tiny models
PREFIX = "model.layers.{}.self_attn.retention_gate.{}"


def published(kind, tied, seed=1, dtype=torch.bfloat16):
    """A state dict in the published layout."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=g)

    state, shared = {}, {"last": normal(H, M), "bias": 2 + normal(H)}
    for i in range(L):
        own = shared if tied else {"last": normal(H, M), "bias": 2 + normal(H)}
        parts = {"linear1.weight": normal(M, D) / D ** 0.5, "linear1.bias": normal(M), "bias": own["bias"]}
        if kind == "rg10":
            parts |= {"linear2.weight": normal(M, M) / M ** 0.5, "linear2.bias": normal(M), "linear3.weight": own["last"]}
        else:
            parts["linear2.weight"] = own["last"]
        state |= {PREFIX.format(i, k): v.to(dtype).clone() for k, v in parts.items()}
    return state


def original_log_beta(state, layer, x):
    """The published gate, x [T, D] -> [H, T]."""
    p = {k.split("retention_gate.")[1]: v.float() for k, v in state.items() if f".{layer}." in k}
    h = F.silu(F.linear(x, p["linear1.weight"], p["linear1.bias"]))
    if "linear3.weight" in p:
        h = F.silu(F.linear(h, p["linear2.weight"], p["linear2.bias"]))
    z = F.linear(h, p.get("linear3.weight", p["linear2.weight"])) + p["bias"]
    return (z.clamp(max=0) - torch.log1p(torch.exp(-z.abs()))).T


@pytest.fixture
def convert(script, tmp_path):
    """(failure, stderr) of converting a state dict to tmp_path/gates.safetensors."""
    def run(state, base, config=None, *options):
        torch.save(state, tmp_path / "trimkv_weights.pth")
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
        failure, _, err = script(convert_trimkv, tmp_path / "trimkv_weights.pth", "--base", base, "--out",
                                 tmp_path / "gates.safetensors", *options)
        return failure, err
    return run


def bank_of(path):
    header = read_header(path)
    bank = GateBank(L, H, D, **{k: header[k] for k in ("width", "type", "tying")})
    bank.load(path)
    return bank


def check_as_the_engine(path, layers=L, heads=H, d=D):
    """The checks of model/gates.c on header, names, shapes, types and rows."""
    header, t = read_header(path), load_file(path)
    assert header["version"] == 1 and header["type"] in ("rg", "rg10") and header["act"] == "silu"
    assert header["layers"] == layers and header["heads"] == heads and 1 <= header["width"] <= 16384
    assert 0 <= header["trained_budget"] < 2 ** 31 and [len(v) for v in header["base"].values()] == [64, 64]
    assert header.get("horizon", 1) >= 1
    m, rows = header["width"], len(t["w_last"])
    want = {"w1": (layers, m, d), "b1": (layers, m), "w_last": (rows, m), "c": (rows,), "row": (layers, heads)}
    if header["type"] == "rg10":
        want |= {"w2": (layers, m, m), "b2": (layers, m)}
    assert {k: tuple(v.shape) for k, v in t.items()} == want and rows <= layers * heads
    assert t["row"].dtype == torch.int32 and 0 <= t["row"].min() and t["row"].max() < rows
    assert all(v.dtype in (torch.float32, torch.float16, torch.bfloat16) for k, v in t.items() if k != "row")


@pytest.mark.parametrize("kind", ["rg", "rg10"])
@pytest.mark.parametrize("tied", [True, False])
def test_log_beta_is_the_original(tmp_path, convert, base, kind, tied):
    state = published(kind, tied)
    config = {"retention_gate": kind, "retention_gate_intermediate_size": M, "memory_size": 128,
              "tie_retention_gate_layers": tied}
    assert convert(state, base, config) == (None, "")
    path = tmp_path / "gates.safetensors"
    check_as_the_engine(path)
    header = read_header(path)
    assert header["base"] == base_digests(base) and header["trained_budget"] == 128
    assert header["tying"] == ("code" if tied else "untied") and "horizon" not in header
    bank, x = bank_of(path), torch.randn(7, D)
    for layer in range(L):
        torch.testing.assert_close(bank.log_beta(layer, x[None])[0], original_log_beta(state, layer, x), atol=1e-6, rtol=1e-5)


def test_tied_copies_that_differ_warn_and_use_the_last_layer(tmp_path, convert, base):
    state = published("rg10", tied=False)
    failure, err = convert(state, base, {"tie_retention_gate_layers": True})
    assert failure is None
    assert "warning:" in err and PREFIX.format(1, "linear3.weight") in err and "layer 1 is used" in err
    check_as_the_engine(tmp_path / "gates.safetensors")
    for part in ("linear3.weight", "bias"):
        state[PREFIX.format(0, part)] = state[PREFIX.format(L - 1, part)]
    bank, x = bank_of(tmp_path / "gates.safetensors"), torch.randn(7, D)
    torch.testing.assert_close(bank.log_beta(0, x[None])[0], original_log_beta(state, 0, x), atol=1e-6, rtol=1e-5)


def test_without_a_config_equal_copies_are_tied(tmp_path, convert, base):
    failure, err = convert(published("rg", tied=True), base, None, "--horizon", 128)
    assert failure is None and "config.json: not found" in err
    header = read_header(tmp_path / "gates.safetensors")
    assert (header["type"], header["tying"], header["trained_budget"], header["horizon"]) == ("rg", "code", 0, 128)


@pytest.fixture
def refused(tmp_path, convert):
    def run(base, state, text, config=None):
        failure, _ = convert(state, base, config or {})
        assert failure and text in failure
        assert not (tmp_path / "gates.safetensors").exists()
    return run


def test_what_does_not_fit_is_named(refused, base):
    good = published("rg10", True)
    name = PREFIX.format(1, "linear2.bias")
    refused(base, {k: v for k, v in good.items() if k != name}, f"{name}: missing")
    refused(base, {**good, name: torch.zeros(3)}, f"{name}: shape is [3], expected [{M}]")
    refused(base, {**good, name: torch.full((M,), torch.nan)}, f"{name}: holds a number that is not finite")
    refused(base, {**good, name: torch.zeros(M, dtype=torch.int64)}, f"{name}: expected a tensor of floating")
    refused(base, {**good, PREFIX.format(2, "bias"): torch.zeros(H)}, f"{PREFIX.format(2, 'bias')}: the base has only 2")
    refused(base, {**good, "lm_head.weight": torch.zeros(1)}, "lm_head.weight: not a tensor of retention gates")
    refused(base, published("rg", True), "retention_gate is 'rg10'", {"retention_gate": "rg10"})
    refused(base, good, "retention_gate: 'rg2' is not supported", {"retention_gate": "rg2"})
    refused(base, good, "retention_gate_intermediate_size is 99", {"retention_gate_intermediate_size": 99})


def test_another_base_is_refused(tmp_path, refused):
    other = make_model(tmp_path / "other", "llama")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "hidden_size": 48}))
    refused(other, published("rg", True), f"linear1.weight: shape is [{M}, {D}], expected [{M}, 48]")


class Attack:
    def __reduce__(self):
        return os.system, ("true",)


def test_a_pickle_with_code_is_refused(refused, base):
    refused(base, {PREFIX.format(0, "bias"): Attack()}, "cannot be read as a state dict")


@pytest.mark.skipif(not os.environ.get("KEEPD_GOLDEN_LOGITS"), reason="no golden_logits driver (KEEPD_GOLDEN_LOGITS)")
@pytest.mark.parametrize("kind, tied", [("rg", False), ("rg10", True)])
def test_the_engine_computes_the_same(tmp_path, convert, base, kind, tied):
    state = published(kind, tied)
    convert(state, base, {})
    ids = torch.randint(0, 256, (30,), generator=torch.Generator().manual_seed(2))
    driver = Path(os.environ["KEEPD_GOLDEN_LOGITS"])
    done = subprocess.run([driver, "--model", base, "--gates", tmp_path / "gates.safetensors", "--tokens",
                           ",".join(map(str, ids.tolist())), "--policy", "global", "--budget", "64"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = torch.tensor(json.loads(done.stdout)["final"]["log_beta"]).view(L, H, len(ids))
    inputs = {}
    gated = GatedModel(base)
    for i, layer in enumerate(gated.model.model.layers):
        layer.input_layernorm.register_forward_hook(lambda _m, _a, out, i=i: inputs.update({i: out[0]}))
    gated(ids[None], torch.arange(len(ids))[None])
    for layer in range(L):
        torch.testing.assert_close(found[layer], original_log_beta(state, layer, inputs[layer]), atol=2e-3, rtol=2e-3)


MODELS = sorted(p.parent for p in (Path(__file__).resolve().parents[1] / "data/models").glob("*/model*.safetensors"))


@pytest.mark.parametrize("model", sorted(set(MODELS)), ids=lambda p: p.name)
def test_a_base_of_every_family_is_named_as_the_daemon_names_it(model, tmp_path, convert):
    """Gates of one family after another are converted, and accepted by a daemon that has their base, and only by it."""
    base, (config,) = tmp_path / "base", [json.loads((model / "config.json").read_text())]
    shutil.copytree(model, base)
    save_tokenizer(base)
    layers, heads, d = config["num_hidden_layers"], config.get("num_key_value_heads") or config["num_attention_heads"], config["hidden_size"]
    bank, gates = GateBank(layers, heads, d, 8, tying="untied"), tmp_path / "gates.safetensors"
    act = config.get("hidden_act") or config.get("hidden_activation")
    state = {}
    for layer in range(layers):
        at = f"model.layers.{layer}.self_attn.retention_gate."
        state |= {at + "linear1.weight": bank.w1[layer].detach().clone(), at + "linear1.bias": bank.b1[layer].detach().clone(),
                  at + "linear2.weight": torch.randn(heads, 8), at + "bias": torch.randn(heads)}
    failure, _ = convert(state, base)
    if act != "silu":
        assert act in failure
        bank.save(gates, base_digests(base), 64)
    else:
        assert failure is None
    with serve(base, "--gates", gates, "--no-ui"):
        pass
    header = read_header(gates)
    assert header["base"] == base_digests(base)
    for path in base.glob("model*.safetensors"):
        weights = load_file(path)
        if "model.norm.weight" in weights:
            weights["model.norm.weight"] += 1
            save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(AssertionError), serve(base, "--gates", gates, "--no-ui"):
        pass
