"""Text models that see pictures in three dimensions (Qwen2.5-VL, arXiv 2502.13923; Qwen3-VL), in float64 numpy: rows of pictures
are given, each with the numbers that are added behind the first layers. Written from the papers and transformers' classes; and
tiny random directories of them."""
import json

import numpy as np
from encoder import write_gguf
from reference_model import Reference, load_tensors, log_softmax, rms_norm, rotate, silu
from safetensors.numpy import save_file

PICTURE, GRID = 1 << 30, 3 << 29  # ids of rows of pictures; ids that say how a picture's rows stand
HEAD = {"qwen2_5_vl": 16, "qwen3_vl": 16}
SECTIONS = {"qwen2_5_vl": [2, 3, 3], "qwen3_vl": [4, 2, 2]}
CLASS = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}


def picture_ids(rows, columns, seed):
    """The ids of a picture's rows, the first of which holds the grid."""
    ids = [PICTURE + int(bits) for bits in np.random.default_rng(seed).integers(0, 1 << 29, rows * columns)]
    if len(ids) > 1:
        ids[0] = GRID + (rows << 19) + (columns << 9) + ids[0] % 512
    return ids


def places(ids):
    """[tokens, 3]: time, height, width of each token."""
    out, start = [], 0
    while len(out) < len(ids):
        token = ids[len(out)]
        rows, columns = (token >> 19 & 1023, token >> 9 & 1023) if token >= GRID else (1, 1)
        out += [(start, start + r, start + c) for r in range(rows) for c in range(columns)]
        start += max(rows, columns)
    return np.array(out)


def axes(kind, sections, half):
    """The place, of its three, that turns each pair of a head."""
    if kind == "qwen2_5_vl":
        return np.repeat([0, 1, 2], sections)
    out = np.zeros(half, int)
    for axis in (1, 2):
        out[axis:3 * sections[axis]:3] = axis
    return out


class GridReference(Reference):
    """The text model of a directory. `rows`: of each id that is a picture's, its numbers, [1 + deep, hidden_size]."""

    def __init__(self, directory, text, rows=None, gates=""):
        """`text`: a folder for the text part as a directory of its own, which is what Reference reads."""
        self.rows = rows or {}
        text.mkdir(parents=True, exist_ok=True)
        whole = json.loads((directory / "config.json").read_text())
        config = whole.get("text_config", whole)
        (text / "config.json").write_text(json.dumps({**config, "rope_scaling": None, "rope_parameters": None,
                                                      "rope_theta": theta_of(config)}))
        save_file({name.replace("model.language_model.", "model."): t.astype(np.float32)
                   for name, t in load_tensors(directory / "model.safetensors").items() if "visual." not in name},
                  text / "model.safetensors")
        super().__init__(text, gates=gates)
        kind = whole["model_type"]
        self.axes = axes(kind, section_of(config, kind), self.head_dim // 2)

    def reset(self, *rule):
        super().reset(*rule)
        self.ids, self.log = [], []

    def show(self, rows, columns, numbers):
        """Ids of a picture with these rows of embeddings."""
        ids = picture_ids(rows, columns, len(self.rows))
        self.rows |= dict(zip(ids, numbers))
        return ids

    def project(self, layer, x, positions):
        name, t = f"model.layers.{layer}.self_attn.", self.tensors
        q, k, v = (self.linear(name + p, x).reshape(len(x), -1, self.head_dim) for p in ("q_proj", "k_proj", "v_proj"))
        if name + "q_norm.weight" in t:
            q, k = (rms_norm(y, t[f"{name}{p}_norm.weight"], self.eps) for y, p in ((q, "q"), (k, "k")))
        angle = places(self.ids)[positions][:, self.axes] * self.inv
        return rotate(q, angle, 1.0), rotate(k, angle, 1.0), v, self.log_beta(layer, x)

    def append(self, ids):
        first, t = self.tokens, self.tensors
        self.ids += ids
        pictured = np.array([token >= PICTURE for token in ids])
        rows = np.array([self.rows[token] for token in ids if token >= PICTURE])
        x = t["model.embed_tokens.weight"][np.where(pictured, 0, ids)]
        if pictured.any():
            x[pictured] = rows[:, 0]
        for layer in range(self.layers):
            name = f"model.layers.{layer}."
            x = x + self.attention(layer, rms_norm(x, t[name + "input_layernorm.weight"], self.eps),
                                   np.arange(first, first + len(ids)))
            y = rms_norm(x, t[name + "post_attention_layernorm.weight"], self.eps)
            gate, up = (self.linear(name + f"mlp.{p}_proj", y) for p in ("gate", "up"))
            x = x + self.linear(name + "mlp.down_proj", silu(gate) * up)
            if pictured.any() and 1 + layer < rows.shape[1]:
                x[pictured] += rows[:, 1 + layer]
        self.cache.tokens += len(ids)
        out = log_softmax(rms_norm(x, t["model.norm.weight"], self.eps) @ t["lm_head.weight"].T)
        self.log.append(out)
        return out


def rope_of(config):
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def theta_of(config):
    return rope_of(config).get("rope_theta", config.get("rope_theta"))


def section_of(config, kind):
    return rope_of(config).get("mrope_section", SECTIONS[kind])


def text_config(kind):
    out = {"model_type": kind + "_text", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
           "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
           "vocab_size": 300, "hidden_act": "silu", "tie_word_embeddings": False,
           "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": SECTIONS[kind]}}
    if kind == "qwen3_vl":
        out |= {"head_dim": HEAD[kind], "attention_bias": False}
        out["rope_parameters"]["mrope_interleaved"] = True
    return out


def shapes(kind, config):
    d, ff, head = config["hidden_size"], config["intermediate_size"], config.get("head_dim", HEAD[kind])
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    out = {"model.language_model.embed_tokens.weight": (config["vocab_size"], d), "lm_head.weight": (config["vocab_size"], d),
           "model.language_model.norm.weight": (d,)}
    for i in range(config["num_hidden_layers"]):
        name = f"model.language_model.layers.{i}."
        parts = {"self_attn.q_proj.weight": (q, d), "self_attn.k_proj.weight": (kv, d), "self_attn.v_proj.weight": (kv, d),
                 "self_attn.o_proj.weight": (d, q), "mlp.gate_proj.weight": (ff, d), "mlp.up_proj.weight": (ff, d),
                 "mlp.down_proj.weight": (d, ff), "input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)}
        if kind == "qwen3_vl":
            parts |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
        else:
            parts |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
        out |= {name + part: shape for part, shape in parts.items()}
    return out


def write_text(directory, kind, flat=False, seed=1, **fields):
    """A directory with a tiny random text model. `flat`: as older ones of Qwen2.5-VL are."""
    directory.mkdir(parents=True, exist_ok=True)
    random, config, tensors = np.random.default_rng(seed), {**text_config(kind), **fields}, {}
    for name, shape in shapes(kind, config).items():
        numbers = random.standard_normal(shape) * (0.12 if len(shape) > 1 else 0.1)
        if "norm" in name:
            numbers = numbers + 1
        tensors[name.replace("language_model.", "") if flat else name] = numbers.astype(np.float32)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    whole = {"architectures": [CLASS[kind] + "ForConditionalGeneration"], "model_type": kind, "torch_dtype": "float32",
             "tie_word_embeddings": False}
    if flat:
        rope = config.pop("rope_parameters")
        whole = {**config, **whole, "rope_theta": rope["rope_theta"],
                 "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    else:
        whole["text_config"] = config
    (directory / "config.json").write_text(json.dumps(whole))
    return directory


def prompt_of(grids, seed=1, text=(5, 9, 7, 30), vocab=300):
    """Ids of texts with pictures between them, and the rows of the pictures are given apart."""
    random, ids = np.random.default_rng(seed), []
    for i, count in enumerate(text):
        ids += random.integers(0, vocab, count).tolist()
        if i < len(grids):
            ids += picture_ids(*grids[i], seed=i)
    return ids


def rows_of(ids, deep, width=64, seed=2):
    count = sum(token >= PICTURE for token in ids)
    return np.random.default_rng(seed).standard_normal((count, 1 + deep, width)).astype(np.float32) * 0.5


GGUF_NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
              "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
              "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
              "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


def write_text_gguf(directory, path, **metadata):
    """The directory's text model as a GGUF file, as converters write it."""
    whole = json.loads((directory / "config.json").read_text())
    kind, c, out = whole["model_type"], whole["text_config"], {}
    arch = {"qwen2_5_vl": "qwen2vl", "qwen3_vl": "qwen3vl"}[kind]
    for name, t in load_tensors(directory / "model.safetensors").items():
        stem, end = name.removeprefix("model.language_model.").rsplit(".", 1)
        if "visual." in name:
            continue
        if stem.startswith("layers."):
            _, layer, part = stem.split(".", 2)
            out[f"blk.{layer}.{GGUF_NAMES[part]}.{end}"] = t
        else:
            out[{"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[stem] + ".weight"] = t
    values = {"general.architecture": arch, f"{arch}.block_count": c["num_hidden_layers"],
              f"{arch}.context_length": c["max_position_embeddings"], f"{arch}.embedding_length": c["hidden_size"],
              f"{arch}.feed_forward_length": c["intermediate_size"], f"{arch}.vocab_size": c["vocab_size"],
              f"{arch}.attention.head_count": c["num_attention_heads"],
              f"{arch}.attention.head_count_kv": c["num_key_value_heads"],
              f"{arch}.attention.key_length": HEAD[kind], f"{arch}.attention.value_length": HEAD[kind],
              f"{arch}.attention.layer_norm_rms_epsilon": c["rms_norm_eps"], f"{arch}.rope.freq_base": theta_of(c),
              f"{arch}.rope.dimension_sections": [*section_of(c, kind), 0]}
    return write_gguf(path, {**values, **metadata}, {name: t.astype(np.float32) for name, t in out.items()})
