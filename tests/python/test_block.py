"""A block that predicts further tokens (multi-token prediction) against float64 numpy, through the block_logits driver.

The block is a layer behind a product of two norms. So its logits are those of a model of one layer whose embeddings are
these products, computed here; that such a model is right is shown by test_golden.py, against transformers.
"""
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from reference_model import load_directory
from safetensors.numpy import save_file
from test_golden import find_driver, run

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "tests/data/models"
VOCAB, COUNT = 512, 9
TOKENS = [3 + 41 * i % 500 for i in range(COUNT)]


def layer_of(family, tensors, number):
    """The tensors of a layer, without its prefix."""
    prefix = f"model.layers.{number}."
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def plain(name):
    return name.replace("model.language_model.", "model.")


def make(family, source, folder):
    """The family's model with a block that is as its layer `source`, and the block's parts."""
    rng = np.random.default_rng(7)
    config = json.loads((MODELS / family / "config.json").read_text())
    text = config.get("text_config", config)
    d = text["hidden_size"]
    tensors = {plain(name): x.astype(np.float32) for name, x in load_directory(MODELS / family).items()
               if not name.startswith("mtp.") and "visual" not in name}
    own = {name: x * np.float32(rng.uniform(0.8, 1.2)) for name, x in layer_of(family, tensors, source).items()}
    parts = {"eh_proj.weight": rng.normal(0, 0.15, (d, 2 * d)), "enorm.weight": rng.uniform(0.4, 0.9, d),
             "hnorm.weight": rng.uniform(0.4, 0.9, d), "shared_head.norm.weight": rng.uniform(0.4, 0.9, d)}
    parts = {name: x.astype(np.float32) for name, x in parts.items()}
    if family.startswith("qwen3"):
        names = {"eh_proj.weight": "fc.weight", "enorm.weight": "pre_fc_norm_embedding.weight",
                 "hnorm.weight": "pre_fc_norm_hidden.weight", "shared_head.norm.weight": "norm.weight"}
        block = {f"mtp.{names[name]}": x for name, x in parts.items()} | {f"mtp.layers.0.{name}": x for name, x in own.items()}
    else:
        prefix = f"model.layers.{text['num_hidden_layers']}."
        block = {prefix + name: x for name, x in (own | parts).items()}
        config["num_nextn_predict_layers"] = 1
    shutil.copytree(MODELS / family, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.f32", "golden.json"))
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(x) for name, x in (tensors | block).items()}, folder / "model.safetensors",
              metadata={"format": "pt"})
    return config, tensors, own, parts


def one_layer(config, tensors, own, parts, inputs, folder):
    """A model that has the block's layer alone and an embedding for each row of `inputs`."""
    config = json.loads(json.dumps(config))
    text = config.get("text_config", config)
    kind = "full_attention"
    text["num_hidden_layers"] = 1
    text.pop("num_nextn_predict_layers", None)
    if text.pop("full_attention_interval", None) or "layer_types" in text:
        text["layer_types"] = [kind]
    if "mlp_layer_types" in text:
        text["mlp_layer_types"] = ["sparse"]
    if "first_k_dense_replace" in text:
        text["first_k_dense_replace"] = 0
    text["tie_word_embeddings"] = config["tie_word_embeddings"] = False
    embed = np.zeros((VOCAB, inputs.shape[1]), np.float32)
    embed[:len(inputs)] = inputs
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    files = {"model.embed_tokens.weight": embed, "lm_head.weight": head, "model.norm.weight": parts["shared_head.norm.weight"]}
    files |= {f"model.layers.0.{name}": x for name, x in own.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(x) for name, x in files.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("family, source", [("qwen35", 3), ("qwen35moe", 2), ("qwen3next", 2), ("glm4moe", 2), ("deepseekv3", 2),
                                            ("glm4moelite", 2)])
def test_the_block_computes_what_its_formula_says(family, source, tmp_path):
    config, tensors, own, parts = make(family, source, tmp_path / "whole")
    text = config.get("text_config", config)
    offset = 1 if family.startswith("qwen3") else 0
    hidden = np.random.default_rng(3).normal(0, 1.5, (COUNT, text["hidden_size"])).astype(np.float32)
    (tmp_path / "hidden").write_bytes(hidden.tobytes())
    embedded = tensors["model.embed_tokens.weight"][TOKENS].astype(np.float64)
    eps = text["rms_norm_eps"]
    joined = np.concatenate([norm(embedded, parts["enorm.weight"] + np.float64(offset), eps),
                             norm(hidden.astype(np.float64), parts["hnorm.weight"] + np.float64(offset), eps)], -1)
    inputs = joined @ parts["eh_proj.weight"].T.astype(np.float64)
    alone = one_layer(config, tensors, own, parts, inputs, tmp_path / "alone")
    wanted = run(alone, range(COUNT), "--path", "reference", "--exact", "yes", "--kv-dtype", "f32", "--rows", "all")["logprobs"]
    driver = find_driver().with_name("block_logits")
    command = [driver, tmp_path / "whole", tmp_path / "hidden", ",".join(map(str, TOKENS))]
    done = subprocess.run([str(c) for c in command], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    out = np.frombuffer(done.stdout, np.float32).astype(np.float64)
    logits, own_hidden = out[:COUNT * VOCAB].reshape(COUNT, VOCAB), out[COUNT * VOCAB:].reshape(COUNT, -1)
    logprobs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) - logits.max(-1, keepdims=True)
    assert np.abs(logprobs - np.array(wanted)).max() < 2e-4
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).astype(np.float64)
    assert np.abs(own_hidden @ head.T - logits).max() < 1e-4  # behind the last norm
