"""Directories whose matrices are in 4 bits (AWQ, GPTQ, compressed-tensors, NVFP4) against directories of the same numbers in F32.

The packing is written here from the published layouts, not from keepd's code. Products of exact activations must give the same
bits for both directories. KEEPD_GOLDEN_LOGITS names the driver.
"""
import json
import subprocess

import numpy as np
import pytest
from test_golden import find_driver

HIDDEN, INNER, HEADS, HEADS_KV, SIZE, VOCAB, LAYERS = 256, 512, 8, 2, 32, 64, 2  # sums are divided alike from 256 inputs on
QKV = (HEADS + 2 * HEADS_KV) * SIZE
CONFIG = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
          "num_key_value_heads": HEADS_KV, "head_dim": SIZE, "vocab_size": VOCAB, "max_position_embeddings": 64,
          "rms_norm_eps": 1e-5, "rope_theta": 10000, "tie_word_embeddings": False}
APART = {"self_attn.q_proj": (HEADS * SIZE, HIDDEN), "self_attn.k_proj": (HEADS_KV * SIZE, HIDDEN),
         "self_attn.v_proj": (HEADS_KV * SIZE, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * SIZE),
         "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
FUSED = {"self_attn.qkv_proj": (QKV, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * SIZE),
         "mlp.gate_up_proj": (2 * INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
FAMILIES = {"llama": ("LlamaForCausalLM", APART), "phi3": ("Phi3ForCausalLM", FUSED), "ernie4_5": ("Ernie4_5ForCausalLM", APART)}
FIRST = "model.layers.0.self_attn.q_proj"
TOKENS = [3, 61, 7, 7, 20, 41, 9, 30, 2, 55]


# --- packing: 8 numbers of 4 bits in an I32, the lowest bits first --------------------------------


def words(numbers, axis, order=range(8)):
    """Eight numbers along the axis become a word; place i of a word has number order[i]."""
    numbers = np.moveaxis(numbers.astype(np.uint32), axis, -1)
    eights = numbers.reshape(*numbers.shape[:-1], -1, 8)[..., list(order)]
    packed = (eights << (4 * np.arange(8, dtype=np.uint32))).sum(-1, dtype=np.uint32)
    return np.moveaxis(packed, -1, axis).view(np.int32)


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(q, z, s, _symmetric):
    return {".qweight": words(q.T, 1, AWQ_ORDER), ".qzeros": words(z.T, 1, AWQ_ORDER), ".scales": s.T}


def gptq(q, z, s, _symmetric, less=1):
    group = q.shape[1] // s.shape[1]
    return {".qweight": words(q.T, 0), ".qzeros": words(z.T - less, 1), ".scales": s.T,
            ".g_idx": (np.arange(q.shape[1]) // group).astype(np.int32)}


def gptq_v2(q, z, s, symmetric):
    return gptq(q, z, s, symmetric, less=0)


def tensors(q, z, s, symmetric):
    found = {".weight_packed": words(q, 1), ".weight_scale": s, ".weight_shape": np.array(q.shape, np.int64)}
    return found if symmetric else found | {".weight_zero_point": words(z, 0)}


def awq_config(group, _symmetric):
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}


def gptq_config(group, symmetric, form="gptq"):
    return {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": symmetric, "desc_act": False, "checkpoint_format": form}


def tensors_config(group, symmetric):
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "channel" if group < 0 else "group",
               "group_size": None if group < 0 else group, "dynamic": False, "actorder": None}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"], "kv_cache_scheme": None,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None,
                                          "output_activations": None}}}


KINDS = {"awq": (awq, awq_config), "gptq": (gptq, gptq_config),
         "gptq_v2": (gptq_v2, lambda g, s: gptq_config(g, s, "gptq_v2")), "compressed-tensors": (tensors, tensors_config)}


# --- a model, twice -------------------------------------------------------------------------------


def bf16(x):
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def save(folder, config, named):
    """U16 are the bits of BF16, and I8 those of E4M3."""
    kinds = {"float32": "F32", "float16": "F16", "int32": "I32", "int64": "I64", "uint16": "BF16",
             "uint8": "U8", "int8": "F8_E4M3"}
    folder.mkdir()
    header, at = {}, 0
    for name, a in named.items():
        header[name] = {"dtype": kinds[a.dtype.name], "shape": list(a.shape), "data_offsets": [at, at + a.nbytes]}
        at += a.nbytes
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(a.tobytes() for a in named.values()))
    (folder / "config.json").write_text(json.dumps(config))


class Model:
    """Random integers, zero points and scales of every matrix; plain tensors of the rest."""

    def __init__(self, family="llama", group=32, symmetric=False, scales="F16", least_zero=1):
        rng = np.random.default_rng(7)
        architecture, self.matrices = FAMILIES[family]
        self.config = CONFIG | {"architectures": [architecture], "model_type": family}
        self.packed, self.wide, self.plain = {}, {}, {}
        for layer in range(LAYERS):
            for name in ("input_layernorm", "post_attention_layernorm"):
                self.plain[f"model.layers.{layer}.{name}.weight"] = self.normal(rng, HIDDEN, 0.1) + 1
            for name, (rows, cols) in self.matrices.items():
                groups = 1 if group < 0 else cols // group
                q = rng.integers(0, 16, (rows, cols))
                z = np.full((rows, groups), 8) if symmetric else rng.integers(least_zero, 16, (rows, groups))
                s = (rng.random((rows, groups)) * 0.02 + 0.005).astype(np.float32)
                stored = bf16(s) if scales == "BF16" else s.astype(np.float16)
                exact = (stored.astype(np.uint32) << 16).view(np.float32) if scales == "BF16" else stored.astype(np.float32)
                wide = (q - np.repeat(z, cols // groups, 1)).astype(np.float32) * np.repeat(exact, cols // groups, 1)
                self.packed[f"model.layers.{layer}.{name}"] = (q, z, stored, symmetric)
                self.wide[f"model.layers.{layer}.{name}.weight"] = wide
        self.plain["model.norm.weight"] = self.normal(rng, HIDDEN, 0.1) + 1
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            self.plain[name] = self.normal(rng, (VOCAB, HIDDEN), 0.3)

    @staticmethod
    def normal(rng, shape, width):
        return (rng.standard_normal(shape) * width).astype(np.float32)

    def save_wide(self, folder):
        save(folder, self.config, self.plain | self.wide)
        return folder

    def parts(self, pack):
        return {name + end: a for name, matrix in self.packed.items() for end, a in pack(*matrix).items()}

    def save_packed(self, folder, pack, about):
        save(folder, self.config | {"quantization_config": about}, self.plain | self.parts(pack))
        return folder


def run(folder, *options, check=True):
    command = [find_driver(), "--model", folder, "--tokens", ",".join(map(str, TOKENS)), "--rows", "all", "--kv-dtype", "f32", *options]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0 or not check, done.stderr
    return done


def logits(folder, *options):
    return json.loads(run(folder, *options).stdout)["logprobs"]


# --- tests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group, symmetric, scales", [(32, False, "F16"), (128, True, "F16"), (64, False, "BF16"), (-1, False, "F16"), (32, True, "BF16")])
def test_the_same_numbers_give_the_same_bits(tmp_path, kind, group, symmetric, scales):
    pack, about = KINDS[kind]
    model = Model(group=group, symmetric=symmetric, scales=scales)
    wide = model.save_wide(tmp_path / "wide")
    packed = model.save_packed(tmp_path / "packed", pack, about(group, symmetric))
    for path in ("reference", "auto"):
        assert logits(packed, "--exact", "yes", "--path", path) == logits(wide, "--exact", "yes", "--path", path)


@pytest.mark.parametrize("kind", ["awq", "gptq"])
@pytest.mark.parametrize("family", ["phi3", "ernie4_5"])
def test_joined_matrices_and_rows_in_another_order(tmp_path, kind, family):
    """Phi-3 joins q, k and v in one matrix; ERNIE's rows of q and k are put in another order as they are loaded."""
    pack, about = KINDS[kind]
    model = Model(family)
    wide = model.save_wide(tmp_path / "wide")
    packed = model.save_packed(tmp_path / "packed", pack, about(32, False))
    assert logits(packed, "--exact", "yes") == logits(wide, "--exact", "yes")


def test_symmetric_gptq_says_itself_whether_1_was_subtracted(tmp_path):
    model = Model(symmetric=True)
    found = [logits(model.save_packed(tmp_path / pack.__name__, pack, gptq_config(32, True)), "--exact", "yes") for pack in (gptq, gptq_v2)]
    assert found[0] == found[1]


def test_modules_that_are_not_quantised(tmp_path):
    model = Model()
    left = ("model.layers.1.mlp.up_proj", "model.layers.0.self_attn.o_proj")
    parts = {name: a for name, a in model.parts(awq).items() if not name.startswith(left)}
    plain = {name + ".weight": model.wide[name + ".weight"] for name in left}
    save(tmp_path / "some", model.config | {"quantization_config": awq_config(32, False)}, model.plain | parts | plain)
    assert logits(tmp_path / "some", "--exact", "yes") == logits(model.save_wide(tmp_path / "wide"), "--exact", "yes")


def test_a_quantised_head(tmp_path):
    model, rng = Model(), np.random.default_rng(3)
    q, z, s = rng.integers(0, 16, (VOCAB, HIDDEN)), rng.integers(1, 16, (VOCAB, HIDDEN // 32)), np.full((VOCAB, HIDDEN // 32), 0.01, np.float16)
    head = (q - np.repeat(z, 32, 1)).astype(np.float32) * s[0, 0].astype(np.float32)
    save(tmp_path / "wide", model.config, model.plain | model.wide | {"lm_head.weight": head})
    others = {name: a for name, a in model.plain.items() if name != "lm_head.weight"}
    parts = model.parts(gptq) | {"lm_head" + end: a for end, a in gptq(q, z, s, False).items()}
    save(tmp_path / "packed", model.config | {"quantization_config": gptq_config(32, False)}, others | parts)
    assert logits(tmp_path / "packed", "--exact", "yes") == logits(tmp_path / "wide", "--exact", "yes")


def without(name):
    return lambda parts: parts.pop(name)


def changed(name, change):
    return lambda parts: parts.update({name: change(parts[name])})


def swap_groups(index):
    index = index.copy()
    index[[0, 40]] = index[[40, 0]]
    return index


REFUSED = [
    ("awq", {}, without(FIRST + ".qzeros"), FIRST + ".qzeros", "missing"),
    ("awq", {}, without(FIRST + ".scales"), FIRST + ".scales", "missing"),
    ("awq", {}, without(FIRST + ".qweight"), FIRST + ".weight", "missing"),
    ("awq", {}, changed(FIRST + ".qweight", lambda a: a[:64]), FIRST + ".scales", "expected F32, F16 or BF16 [2, 256]"),
    ("awq", {}, changed(FIRST + ".qweight", lambda a: a.view(np.float32)), FIRST + ".qweight", "I32 of two dimensions"),
    ("awq", {}, changed(FIRST + ".qzeros", lambda a: a[:, :8]), FIRST + ".qzeros", "expected I32 [8, 32]"),
    ("awq", {}, changed(FIRST + ".scales", lambda a: a[:2]), FIRST + ".scales", "[8, 256]"),
    ("awq", {}, changed(FIRST + ".scales", lambda a: np.where(np.arange(256) == 70, np.float16(np.inf), a)), FIRST + ".weight", "not a finite number"),
    ("awq", {"group_size": 64}, None, "model.layers.0.mlp.down_proj.scales", "[8, 256]"),
    ("awq", {"group_size": 48}, None, "quantization_config.group_size", "multiples of 32"),
    ("awq", {"bits": 3}, None, "quantization_config.bits", "3 bits"),
    ("awq", {"version": "gemv"}, None, "quantization_config.version", "gemm"),
    ("awq", {"zero_point": False}, None, "quantization_config.zero_point", ""),
    ("gptq", {"bits": 8}, None, "quantization_config.bits", "8 bits"),
    ("gptq", {"checkpoint_format": "marlin"}, None, "quantization_config.checkpoint_format", "gptq_v2"),
    ("gptq", {"is_marlin_format": True}, None, "quantization_config.checkpoint_format", ""),
    ("gptq", {"sym": True}, None, "model.layers.0.mlp.down_proj.qzeros", "sym"),
    ("gptq", {}, changed(FIRST + ".g_idx", swap_groups), FIRST + ".g_idx", "order"),
    ("gptq", {"desc_act": True}, changed(FIRST + ".g_idx", swap_groups), FIRST + ".g_idx", "order"),
    ("gptq", {"desc_act": True}, without(FIRST + ".g_idx"), FIRST + ".g_idx", "missing"),
    ("gptq", {}, changed(FIRST + ".g_idx", lambda a: a[:8]), FIRST + ".g_idx", "I32 [256]"),
    ("compressed-tensors", {}, changed(FIRST + ".weight_shape", lambda a: a + 1), FIRST + ".weight_shape", "256 and 256"),
    ("compressed-tensors", {}, without(FIRST + ".weight_zero_point"), FIRST + ".weight_zero_point", "missing"),
    ("compressed-tensors", {"format": "marlin-24"}, None, "quantization_config", "compressed-tensors"),
]


@pytest.mark.parametrize("kind, about, change, field, text", REFUSED)
def test_refused_by_name(tmp_path, kind, about, change, field, text):
    pack, config = KINDS[kind]
    model = Model()
    parts = model.parts(pack)
    if change:
        change(parts)
    save(tmp_path / "model", model.config | {"quantization_config": config(32, False) | about}, model.plain | parts)
    done = run(tmp_path / "model", check=False)
    assert done.returncode == 1 and done.stderr.startswith(field + ":") and text in done.stderr, done.stderr


# --- NVFP4: E2M1 with a scale in E4M3 for each 16 inputs and one in float32 for the matrix --------

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def e4m3(codes):
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa / 512, (1 + mantissa / 8) * 2.0 ** (exponent - 7)).astype(np.float32)


def nvfp4(model, ends, inverse):
    """The tensors of every matrix, and its numbers in F32."""
    rng, parts, wide = np.random.default_rng(11), {}, {}
    for name, (q, *_) in model.packed.items():
        scales = rng.integers(1, 90, (q.shape[0], q.shape[1] // 16))
        whole = np.float32(rng.random() * 0.002 + 0.001)
        given = np.float32(1) / whole if inverse else whole
        whole = np.float32(1) / given if inverse else whole
        parts |= {name + ends[0]: (q[:, 0::2] | q[:, 1::2] << 4).astype(np.uint8), name + ends[1]: scales.astype(np.int8),
                  name + ends[2]: np.array(given, np.float32), name + ".input_scale": np.array(0.5, np.float32)}
        wide[name + ".weight"] = E2M1[q] * np.repeat(e4m3(scales) * whole, 16, 1)
    return parts, wide


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
MODELOPT_ENDS = (".weight", ".weight_scale", ".weight_scale_2")
NVFP4_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True, "dynamic": False}
NVFP4_TENSORS = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
                 "config_groups": {"group_0": {"targets": ["Linear"], "weights": NVFP4_WEIGHTS}}}


@pytest.mark.parametrize("ends, about", [(MODELOPT_ENDS, MODELOPT),
                                         ((".weight_packed", ".weight_scale", ".weight_global_scale"), NVFP4_TENSORS)])
def test_nvfp4_has_the_bits_of_its_numbers(tmp_path, ends, about):
    model = Model()
    parts, wide = nvfp4(model, ends, about is NVFP4_TENSORS)
    save(tmp_path / "packed", model.config | {"quantization_config": about}, model.plain | parts)
    save(tmp_path / "wide", model.config, model.plain | wide)
    for path in ("reference", "auto"):
        assert logits(tmp_path / "packed", "--exact", "yes", "--path", path) == logits(tmp_path / "wide", "--exact", "yes", "--path", path)


@pytest.mark.parametrize("change, field, text", [
    (without(FIRST + ".weight_scale"), FIRST + ".weight_scale", "missing"),
    (without(FIRST + ".weight_scale_2"), FIRST + ".weight_scale_2", "missing"),
    (changed(FIRST + ".weight_scale", lambda a: a[:, :8]), FIRST + ".weight_scale", "F8_E4M3 [256, 16]"),
    (changed(FIRST + ".weight_scale", lambda a: np.where(np.arange(16) == 3, np.int8(127), a)), FIRST + ".weight", "element 48 is not a finite"),
    (changed(FIRST + ".weight_scale_2", lambda a: np.zeros(2, np.float32)), FIRST + ".weight_scale_2", "one number above 0"),
    (changed(FIRST + ".weight", lambda a: a[:, :8]), FIRST + ".weight", "a multiple of 32 inputs")])
def test_nvfp4_is_refused_by_name(tmp_path, change, field, text):
    model = Model()
    parts, _ = nvfp4(model, MODELOPT_ENDS, False)
    change(parts)
    save(tmp_path / "model", model.config | {"quantization_config": MODELOPT}, model.plain | parts)
    done = run(tmp_path / "model", check=False)
    assert done.returncode == 1 and done.stderr.startswith(field + ":") and text in done.stderr, done.stderr


def test_desc_act_whose_index_is_in_order(tmp_path):
    model = Model()
    packed = model.save_packed(tmp_path / "packed", gptq, gptq_config(32, False) | {"desc_act": True})
    assert logits(packed, "--exact", "yes") == logits(model.save_wide(tmp_path / "wide"), "--exact", "yes")
