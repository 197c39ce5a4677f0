"""Converts published retention gates (`trimkv_weights.pth` of TRIM-KV and DBTrimKV) to a keepd gates file.

    python convert_trimkv.py DOWNLOAD/trimkv_weights.pth --base /path/to/base --out /path/to/base/gates.safetensors

The file is a state dict of the gates alone; `config.json` beside it says of which kind they are.  The
layout is that of github.com/ngocbh/trimkv: per layer i, under model.layers.{i}.self_attn.retention_gate,

    linear1.weight [m, d_model], linear1.bias [m]
    linear2.weight rg: [H, m]    rg10: [m, m], with linear2.bias [m] and linear3.weight [H, m]
    bias [H]
"""

import argparse
import json
import pickle
import re
import sys
from pathlib import Path

import torch

from gates import write_gates
from models import base_digests, read_json
from options import file, positive

NAME = re.compile(r"model\.layers\.(\d+)\.self_attn\.retention_gate\.(linear[123]\.(?:weight|bias)|bias)")
STORED = (torch.float32, torch.float16, torch.bfloat16)


class Layout(ValueError):
    """A mismatch between file and model; names the tensor or field."""


def full_name(layer, part):
    return f"model.layers.{layer}.self_attn.retention_gate.{part}"


def read_state(path):
    """{(layer, part): tensor}; nothing in the file is executed."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:      # torch's text advises to run what is in the file
        raise Layout("cannot be read as a state dict: it is damaged, or holds more than tensors") from None
    except (RuntimeError, EOFError, OSError) as e:
        raise Layout(f"cannot be read as a state dict: {e}") from None
    if not isinstance(state, dict) or not state:
        raise Layout("expected a state dict of tensors")
    out = {}
    for name, tensor in state.items():
        found = NAME.fullmatch(name) if isinstance(name, str) else None
        if not found:
            raise Layout(f"{name}: not a tensor of retention gates")
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            raise Layout(f"{name}: expected a tensor of floating-point numbers")
        if not torch.isfinite(tensor).all():
            raise Layout(f"{name}: holds a number that is not finite")
        out[int(found[1]), found[2]] = tensor if tensor.dtype in STORED else tensor.float()
    return out


def gate_type(state, config):
    """rg or rg10, from config.json and from the tensors, which must agree."""
    found = "rg10" if any(part == "linear3.weight" for _, part in state) else "rg"
    stated = config.get("retention_gate", found)
    if stated not in ("rg", "rg10"):
        raise Layout(f"config.json: retention_gate: {stated!r} is not supported: rg, rg10")
    if stated != found:
        raise Layout(f"config.json: retention_gate is {stated!r}, but {full_name(0, 'linear3.weight')} is "
                     + ("missing" if stated == "rg10" else "there"))
    return found


def base_shape(config):
    """(layers, KV heads, d_model) of a base model's config.json."""
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    return config["num_hidden_layers"], heads, config["hidden_size"]


def check_shapes(state, kind, layers, heads, d_model):
    """The width m; every tensor of every layer must be there, with its shape."""
    first = state.get((0, "linear1.weight"))
    if first is None:
        raise Layout(f"{full_name(0, 'linear1.weight')}: missing")
    m = first.shape[0]
    wanted = {"linear1.weight": (m, d_model), "linear1.bias": (m,), "bias": (heads,)}
    wanted |= {"linear2.weight": (heads, m)} if kind == "rg" else \
        {"linear2.weight": (m, m), "linear2.bias": (m,), "linear3.weight": (heads, m)}
    for layer in range(layers):
        for part, shape in wanted.items():
            tensor = state.get((layer, part))
            if tensor is None:
                raise Layout(f"{full_name(layer, part)}: missing; the base has {layers} layers")
            if tuple(tensor.shape) != shape:
                raise Layout(f"{full_name(layer, part)}: shape is {list(tensor.shape)}, expected {list(shape)}")
    for layer, part in state:
        if layer >= layers:
            raise Layout(f"{full_name(layer, part)}: the base has only {layers} layers")
        if part not in wanted:
            raise Layout(f"{full_name(layer, part)}: not a part of type {kind}")
    return m


def last_projection(state, kind, layers, heads, tied, warn):
    """w_last, c, row and the tying.

    The reference keeps one shared tensor where the tie flag is set, and reads its copies layer by layer:
    the last one read holds for all.  So do we, and say so when the copies differ.
    """
    part = "linear2.weight" if kind == "rg" else "linear3.weight"
    differs = next((full_name(i, p) for p in (part, "bias") for i in range(1, layers)
                    if not torch.equal(state[i, p], state[0, p])), None)
    if differs is None or tied:
        if differs:
            warn(f"{differs} differs from layer 0 although the gates are tied; layer {layers - 1} is used for all, "
                 "as the reference does")
        row = torch.arange(heads).expand(layers, heads)
        return state[layers - 1, part], state[layers - 1, "bias"], row, "code"
    last, bias = (torch.cat([state[i, p] for i in range(layers)]) for p in (part, "bias"))
    return last, bias, torch.arange(layers * heads).view(layers, heads), "untied"


def convert(state, config, base, horizon=None, warn=print):
    """(tensors, header without base) of the gates file."""
    layers, heads, d_model = base_shape(base)
    act = base.get("hidden_act") or base.get("hidden_activation") or "silu"
    if act != "silu":
        raise Layout(f"base config.json: hidden_act: {act!r} is not supported, only 'silu'")
    kind = gate_type(state, config)
    m = check_shapes(state, kind, layers, heads, d_model)
    if config.get("retention_gate_intermediate_size", m) != m:
        raise Layout(f"config.json: retention_gate_intermediate_size is {config['retention_gate_intermediate_size']}, "
                     f"{full_name(0, 'linear1.weight')} has {m} rows")
    last, bias, row, tying = last_projection(state, kind, layers, heads, bool(config.get("tie_retention_gate_layers")), warn)

    def stack(part):
        return torch.stack([state[i, part] for i in range(layers)])

    tensors = {"w1": stack("linear1.weight"), "b1": stack("linear1.bias"), "w_last": last, "c": bias,
               "row": row.to(torch.int32)}
    if kind == "rg10":
        tensors |= {"w2": stack("linear2.weight"), "b2": stack("linear2.bias")}
    budget = config.get("memory_size")
    header = {"version": 1, "type": kind, "width": m, "act": "silu", "layers": layers, "heads": heads,
              "d_model": d_model, "tying": tying,
              "trained_budget": budget if isinstance(budget, int) and budget > 0 else 0}
    if horizon is not None:
        header["horizon"] = horizon
    return {k: v.contiguous().clone() for k, v in tensors.items()}, header


def read_gate_config(weights, given):
    path = given or weights.with_name("config.json")
    if not path.exists():
        print(f"{path}: not found; the kind of the gates is read from the tensors, and layers are tied where equal",
              file=sys.stderr)
        return {}
    return read_json(path)


def horizon(text):
    """As in the header: a number from 1, or "inf"."""
    value = positive(text) if text != "inf" else 1
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: a horizon is at least 1")
    return text if text == "inf" else value


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("weights", type=file, help="trimkv_weights.pth")
    ap.add_argument("--base", type=Path, required=True, help="directory of the base model the gates were trained for")
    ap.add_argument("--config", type=file, help="config.json of the gates (default: beside the weights)")
    ap.add_argument("--out", type=Path, required=True, help="gates file to write")
    ap.add_argument("--horizon", type=horizon, help="horizon of the score the gates are meant for, if known: 1 and more, or inf")
    a = ap.parse_args()

    def warn(text):
        print(f"warning: {text}", file=sys.stderr)

    if not (a.base / "config.json").exists():
        raise SystemExit(f"{a.base / 'config.json'}: not found; --base is a model directory")
    base, config = read_json(a.base / "config.json"), read_gate_config(a.weights, a.config)
    try:
        tensors, header = convert(read_state(a.weights), config, base, a.horizon, warn)
    except Layout as e:
        raise SystemExit(f"{a.weights}: {e}") from None
    header["base"] = base_digests(a.base)
    write_gates(a.out, tensors, header)
    print(json.dumps({"gates": str(a.out), **header}))


if __name__ == "__main__":
    main()
