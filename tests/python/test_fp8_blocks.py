"""Directories in FP8 with a scale for each block of a matrix, as Qwen3-*-FP8, compressed-tensors and modelopt write them.

Weights of tests/data/models are rounded to E4M3 here, by the published layouts. keepd must then compute what a float64 pass over
the dequantised numbers computes. Blocks whose width is no multiple of 32 become F32 and give the same bits as a directory of these numbers in F32.
"""
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from reference_model import Reference
from safetensors import deserialize
from test_golden import MODELS, ROOT, random_tokens, run, run_driver

CODES = np.array([(-1) ** (c >> 7) * (((c & 7) / 8 + 1) * 2.0 ** ((c >> 3 & 15) - 7) if c >> 3 & 15 else (c & 7) / 8 * 2.0**-6)
                  for c in range(256)])
CODES[[0x7F, 0xFF]] = np.nan
TOKENS = random_tokens(60)


def nearest_codes(x):
    """The E4M3 number nearest to each, and its byte."""
    values = CODES[:0x7F]
    at = np.clip(np.searchsorted((values[1:] + values[:-1]) / 2, np.abs(x)), 0, 0x7E)
    return np.where(x < 0, at | 0x80, at).astype(np.uint8)


def bf16(x):
    return (x.astype(np.float32).view(np.uint32) + 0x8000 >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def spread(scales, block, shape):
    return np.repeat(np.repeat(scales, block[0], 0), block[1], 1)[:shape[0], :shape[1]]


def block_scales(w, block):
    """The largest magnitude of each block becomes 448."""
    tall, wide = -(-w.shape[0] // block[0]), -(-w.shape[1] // block[1])
    padded = np.zeros((tall * block[0], wide * block[1]))
    padded[:w.shape[0], :w.shape[1]] = np.abs(w)
    return np.maximum(padded.reshape(tall, block[0], wide, block[1]).max((1, 3)) / 448, 1e-8)


class Rounded:
    """A model of tests/data whose layers' matrices are codes and scales. `powers`: scales are powers of two."""

    def __init__(self, family, block=(16, 48), powers=False, ends=".weight_scale_inv", narrow=True, between=False):
        data = {n: t for n, t in deserialize((MODELS / family / "model.safetensors").read_bytes())}
        self.family, self.block, self.plain, self.wide, self.parts = family, block, {}, {}, {}
        for name, t in data.items():
            raw = np.frombuffer(bytes(t["data"]), {"F32": "<f4", "BF16": "<u2", "F16": "<f2"}[t["dtype"]]).reshape(t["shape"])
            numbers = from_bf16(raw) if t["dtype"] == "BF16" else raw.astype(np.float32)
            if "_proj" not in name or not name.endswith(".weight"):
                self.plain[name] = ("F32", numbers)
                continue
            scales = block_scales(numbers, block)
            scales = (2.0 ** np.ceil(np.log2(scales)) if powers else scales).astype(np.float32)
            stored = from_bf16(bf16(scales)) if narrow else scales
            codes = nearest_codes(numbers / spread(stored, block, numbers.shape))
            self.wide[name] = ("F32", CODES[codes].astype(np.float32) * spread(stored, block, numbers.shape).astype(np.float32))
            shape = stored[:, None, :, None] if between else stored
            self.parts[name] = ("F8_E4M3", codes)
            self.parts[name.removesuffix(".weight") + ends] = ("BF16", bf16(shape)) if narrow else ("F32", shape)

    def save(self, folder, about, files=(), wide=False):
        folder.mkdir()
        named = self.plain | (self.wide if wide else self.parts)
        header, at = {}, 0
        for name, (kind, a) in named.items():
            header[name] = {"dtype": kind, "shape": list(a.shape), "data_offsets": [at, at + a.nbytes]}
            at += a.nbytes
        text = json.dumps(header).encode()
        data = b"".join(np.ascontiguousarray(a).tobytes() for _, a in named.values())
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
        config = json.loads((MODELS / self.family / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | ({"quantization_config": about} if about else {})))
        for name, content in files:
            (folder / name).write_text(json.dumps(content))
        return folder

    def expected(self):
        """Log-probabilities in float64 over the numbers that codes and scales stand for."""
        reference = Reference(MODELS / self.family)
        for name, (_, a) in (self.plain | self.wide).items():
            reference.tensors[name] = a.astype(np.float64)
        return reference.append(TOKENS)


def logits(folder, *options):
    return run(folder, TOKENS, "--rows", "all", "--kv-dtype", "f32", *options)["logprobs"]


def qwen(block):
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}


def compressed(block):
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "block", "block_structure": list(block)}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "group", "group_size": 128}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}}


def modelopt(block):
    return {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "weight_block_size": list(block), "ignore": ["lm_head"]}


def check(tmp_path, model, about, files=()):
    found = np.array(logits(model.save(tmp_path / "fp8", about, files)))
    assert np.abs(found - model.expected()).max() < 1e-4
    if model.block[1] % 32:     # numbers in F32; otherwise codes and scales, whose sums have another order
        assert logits(tmp_path / "fp8", "--exact", "yes") == logits(model.save(tmp_path / "wide", None, wide=True), "--exact", "yes")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("block", [(16, 48), (128, 32), (8, 128)])
def test_blocks_of_qwen(tmp_path, family, block):
    check(tmp_path, Rounded(family, block), qwen(block))


def test_memory(tmp_path):
    """Eight bits for each number of a layer's matrices, and a float32 for each row of a block."""
    model = Rounded("llama", (128, 32))
    codes = sum(a.size for kind, a in model.parts.values() if kind == "F8_E4M3")
    plain = sum(a.nbytes for _, a in model.plain.values())
    daemon = Path(os.environ.get("KEEPD_BIN", ROOT / "build/keepd"))
    if not daemon.exists():
        pytest.skip(f"skip: {daemon} is not built")
    text = subprocess.run([daemon, "--inspect", model.save(tmp_path / "fp8", qwen((128, 32)))], capture_output=True, text=True).stdout
    found = float(re.search(r"memory +([\d.]+) MB of weights", text)[1])
    assert found == pytest.approx((plain + codes * (1 + 4 / 32)) * 1e-6, rel=0.03)


def test_one_block_is_the_whole_matrix(tmp_path):
    """tests/data's matrices are smaller than a block of 128 x 128: each has one scale, [1, 1]."""
    model = Rounded("qwen3", (128, 128))
    found = np.array(logits(model.save(tmp_path / "fp8", qwen((128, 128)))))
    assert np.abs(found - model.expected()).max() < 1e-4


@pytest.mark.parametrize("path", ["reference", "auto"])
def test_scales_in_float32_and_powers_of_two(tmp_path, path):
    """Products by powers of two fit in bf16, which is what the backend gets."""
    for name, model in (("f32", Rounded("llama", narrow=False)), ("powers", Rounded("llama", powers=True))):
        fp8, wide = model.save(tmp_path / f"{name}-fp8", qwen((16, 48))), model.save(tmp_path / f"{name}-wide", None, wide=True)
        found = np.array(logits(fp8, "--path", path, "--exact", "yes"))
        assert np.abs(found - model.expected()).max() < 1e-4
        assert np.abs(found - np.array(logits(wide, "--path", path, "--exact", "yes"))).max() < 1e-4


def test_blocks_of_compressed_tensors(tmp_path):
    check(tmp_path, Rounded("llama", ends=".weight_scale"), compressed((16, 48)))


def test_blocks_of_modelopt(tmp_path):
    check(tmp_path, Rounded("llama", ends=".weight_scale", narrow=False, between=True), modelopt((16, 48)))


def test_a_scale_per_tensor_of_modelopt(tmp_path):
    """As NVIDIA publishes them: scalars, scales of activations beside them, and perhaps nothing in config.json."""
    model = Rounded("llama", (1024, 1024), ends=".weight_scale", narrow=False)
    model.parts = {n: (k, a.reshape(())) if n.endswith("_scale") else (k, a) for n, (k, a) in model.parts.items()}
    model.parts |= {n.replace("weight_scale", "input_scale"): ("F32", np.float32(0.01).reshape(()))
                    for n in list(model.parts) if n.endswith("_scale")}
    said = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    own = ("hf_quant_config.json", {"producer": {"name": "modelopt", "version": "0.23"}, "quantization": said})
    found = np.array(logits(model.save(tmp_path / "own", None, [own])))
    assert np.abs(found - model.expected()).max() < 1e-4
    config = said | {"quant_method": "modelopt", "producer": {"name": "modelopt"}}
    assert logits(model.save(tmp_path / "config", config)) == found.tolist()
    assert logits(model.save(tmp_path / "bare", {"quantization": said, "producer": {"name": "modelopt"}})) == found.tolist()


@pytest.mark.parametrize("family", ["phi3", "ernie45"])
def test_joined_matrices_and_rows_in_another_order(tmp_path, family):
    """Phi-3 joins q, k and v in one matrix; ERNIE's rows of q and k are put in another order as they are loaded."""
    model = Rounded(family)
    fp8, wide = model.save(tmp_path / "fp8", qwen((16, 48))), model.save(tmp_path / "wide", None, wide=True)
    assert logits(fp8, "--exact", "yes") == logits(wide, "--exact", "yes")


def refuse(folder):
    done = run_driver(folder, [1], check=False)
    assert done.returncode == 1
    return done.stderr


def test_refused_by_name(tmp_path):
    name = "model.layers.0.self_attn.q_proj.weight"
    model = Rounded("llama")
    kind, scales = model.parts[name + "_scale_inv"]
    assert "is missing: the scale of an F8_E4M3 matrix" in refuse(
        Rounded.save(changed(model, {name + "_scale_inv": None}), tmp_path / "missing", qwen((16, 48))))
    text = refuse(Rounded.save(changed(model, {name + "_scale_inv": (kind, scales[:-1])}), tmp_path / "shape", qwen((16, 48))))
    assert text.startswith(name + "_scale_inv: BF16 [") and "a scale for each block of 16 outputs and 48 inputs" in text
    codes = model.parts[name][1].copy()
    codes[3, 5] = 0x7F
    text = refuse(Rounded.save(changed(model, {name: ("F8_E4M3", codes)}), tmp_path / "nan", qwen((16, 48))))
    assert text.startswith(name) and f"element {3 * codes.shape[1] + 5} is not a finite number" in text
    model = Rounded("llama", (32, 32), narrow=False)
    scales = model.parts[name + "_scale_inv"][1].copy()
    scales[1, 0] = -1
    text = refuse(Rounded.save(changed(model, {name + "_scale_inv": ("F32", scales)}), tmp_path / "scale", qwen((32, 32))))
    assert text.startswith(name) and "a scale of row 32 is not a number from 0 to" in text
    codes = model.parts[name][1].copy()
    codes[3, 5] = 0xFF
    text = refuse(Rounded.save(changed(model, {name: ("F8_E4M3", codes)}), tmp_path / "nan32", qwen((32, 32))))
    assert text.startswith(name) and f"element {3 * codes.shape[1] + 5} is not a finite number" in text
    own = ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4_AWQ"}})
    text = refuse(model.save(tmp_path / "algorithm", None, [own]))
    assert text.startswith("hf_quant_config.json:") and "modelopt's \"NVFP4_AWQ\"" in text


def changed(model, parts):
    """A copy of the model whose parts are others; None: it is not there."""
    other = Rounded.__new__(Rounded)
    other.__dict__.update(model.__dict__)
    other.parts = {n: p for n, p in (model.parts | parts).items() if p is not None}
    return other


def test_rounded_to_blocks_of_keepd(tmp_path):
    """--quantization makes blocks of the numbers, as of those of any directory."""
    model = Rounded("llama", (32, 32))
    fp8, wide = model.save(tmp_path / "fp8", qwen((32, 32))), model.save(tmp_path / "wide", None, wide=True)
    assert logits(fp8, "--quantization", "q8") == logits(wide, "--quantization", "q8")
    shutil.rmtree(fp8)
