"""Random LoRA adapters of the bundled model, as a directory of PEFT, as a GGUF file, and merged into the model."""
import json
import shutil
import struct

import numpy as np
from conftest import ROOT
from safetensors.numpy import save_file

import sys

sys.path.insert(0, str(ROOT / "tests/python"))
from reference_model import load_directory  # noqa: E402

NANO = ROOT / "bundled/keepd-nano"
TARGETS = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
           "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
TENSORS = load_directory(NANO)


def make(folder, seed, rank=8, alpha=16, targets=TARGETS, rslora=False, size=0.05, model=TENSORS):
    """Writes folder/ as PEFT does, and folder.gguf, for the tensors of keepd-nano or of another `model`; gives {tensor of the model: the change of its matrix}."""
    random = np.random.default_rng(seed)
    scale = alpha / (rank ** 0.5 if rslora else rank)
    tensors, gguf, changes = {}, {}, {}
    for name, matrix in sorted(model.items()):  # files give their tensors in any order, and the numbers must not depend on it
        target = next((t for t in targets if name.endswith(t + ".weight")), None)
        if not target:
            continue
        a = (random.standard_normal((rank, matrix.shape[1])) * size).astype(np.float32)
        b = (random.standard_normal((matrix.shape[0], rank)) * size).astype(np.float32)
        layer = int(name.split(".")[2])
        for half, numbers in (("A", a), ("B", b)):
            tensors[f"base_model.model.{name.removesuffix('.weight')}.lora_{half}.weight"] = numbers
            gguf[f"blk.{layer}.{TARGETS[target]}.weight.lora_{half.lower()}"] = numbers
        changes[name] = scale * b.astype(np.float64) @ a.astype(np.float64)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": rank, "lora_alpha": alpha, "use_rslora": rslora, "bias": "none", "use_dora": False,
        "target_modules": [t.split(".")[1] for t in targets], "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {}}))
    if not rslora:
        write_gguf(folder.with_suffix(".gguf"), gguf, alpha)
    return changes


def write_gguf(path, tensors, alpha):
    def text(s):
        return struct.pack("<Q", len(s)) + s.encode()

    values = {"general.architecture": "qwen3", "general.type": "adapter", "adapter.type": "lora"}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values) + 1)
    for key, value in values.items():
        head += text(key) + struct.pack("<I", 8) + text(value)
    head += text("adapter.lora.alpha") + struct.pack("<If", 6, alpha)
    data = b""
    for name, numbers in tensors.items():
        head += text(name) + struct.pack("<IQQIQ", 2, numbers.shape[1], numbers.shape[0], 0, len(data))
        data += numbers.tobytes() + bytes(-numbers.nbytes % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + data)


def model_with(folder, changes):
    """The bundled model in float32, with the changes added."""
    shutil.copytree(NANO, folder, ignore=shutil.ignore_patterns("model.safetensors", "gates.safetensors"))
    (folder / "config.json").write_text((NANO / "config.json").read_text().replace("bfloat16", "float32"))
    save_file({name: (t + changes.get(name, 0)).astype(np.float32) for name, t in TENSORS.items()},
              folder / "model.safetensors")
    return folder
