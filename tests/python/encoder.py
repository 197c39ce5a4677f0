"""Encoders in float64 numpy, written from the models' papers and the classes of transformers, not from the C code: BERT,
RoBERTa (the same from another first position on) and nomic-bert, with pooling, sentence-transformers' Dense modules and
classifiers. Also tiny random models of these families, as directories and as GGUF files."""
import json
import math
import struct

import numpy as np
from reference_model import load_tensors
from safetensors.numpy import save_file


def layer_norm(x, tensors, name, eps):
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred ** 2).mean(-1, keepdims=True) + eps)
    return scaled * tensors[name + ".weight"] + tensors[name + ".bias"]


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rotate(x, base):
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[0])[:, None] * base ** (-np.arange(half) / half)
    a, b, c, s = x[..., :half], x[..., half:], np.cos(angle)[:, None], np.sin(angle)[:, None]
    return np.concatenate([a * c - b * s, b * c + a * s], -1)


class Encoder:
    def __init__(self, directory):
        self.config = json.loads((directory / "config.json").read_text())
        tensors = load_tensors(directory / "model.safetensors")
        self.t = {name.removeprefix("bert.").removeprefix("roberta."): value for name, value in tensors.items()}
        self.nomic = self.config["model_type"] == "nomic_bert"

    def linear(self, name, x):
        return x @ self.t[name + ".weight"].T + self.t.get(name + ".bias", 0)

    def attention(self, q, k, v):
        heads = self.config.get("num_attention_heads") or self.config["n_head"]
        q, k, v = (a.reshape(len(a), heads, -1) for a in (q, k, v))
        if self.nomic:
            q, k = (rotate(a, self.config["rotary_emb_base"]) for a in (q, k))
        weights = softmax(np.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1]))
        return np.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)

    def layer(self, i, x, eps):
        if self.nomic:
            name = f"encoder.layers.{i}."
            parts = np.split(self.linear(name + "attn.Wqkv", x), 3, -1)
            x = layer_norm(x + self.linear(name + "attn.out_proj", self.attention(*parts)), self.t, name + "norm1", eps)
            gate = self.linear(name + "mlp.fc12", x)
            y = self.linear(name + "mlp.fc11", x) * gate / (1 + np.exp(-gate))
            return layer_norm(x + self.linear(name + "mlp.fc2", y), self.t, name + "norm2", eps)
        name = f"encoder.layer.{i}."
        parts = [self.linear(f"{name}attention.self.{p}", x) for p in ("query", "key", "value")]
        y = self.linear(name + "attention.output.dense", self.attention(*parts))
        x = layer_norm(x + y, self.t, name + "attention.output.LayerNorm", eps)
        y = self.linear(name + "output.dense", gelu(self.linear(name + "intermediate.dense", x)))
        return layer_norm(x + y, self.t, name + "output.LayerNorm", eps)

    def hidden(self, ids, second=None):
        """Outputs of the last layer; from token `second` on the tokens are those of a second text."""
        t, c = self.t, self.config
        eps = c.get("layer_norm_eps") or c.get("layer_norm_epsilon")
        x = t["embeddings.word_embeddings.weight"][ids]
        types = t.get("embeddings.token_type_embeddings.weight")
        if types is not None:
            which = [int(second is not None and i >= second and len(types) > 1) for i in range(len(ids))]
            x = x + types[which]
        if not self.nomic:
            first = c["pad_token_id"] + 1 if c["model_type"] != "bert" else 0
            x = x + t["embeddings.position_embeddings.weight"][first:first + len(ids)]
        x = layer_norm(x, t, "emb_ln" if self.nomic else "embeddings.LayerNorm", eps)
        for i in range(c.get("num_hidden_layers") or c["n_layer"]):
            x = self.layer(i, x, eps)
        return x

    def labels(self, ids, second):
        first = self.hidden(ids, second)[0]
        if self.config["model_type"] == "bert":
            return self.linear("classifier", np.tanh(self.linear("pooler.dense", first)))
        return self.linear("classifier.out_proj", np.tanh(self.linear("classifier.dense", first)))


# --- tiny random models -----------------------------------------------------------------------------------------------

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{c}" for c in LETTERS), *".,!?-'", "the", "code",
         "##ing", "##ed", "garage", "is", "東", "京", "é", "##é", "ß", "ж", "##ж"]
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 80}


def write_tokenizer(directory, lower=True):
    special = [{"id": i, "content": w, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False} for i, w in enumerate(WORDS[:5])]
    ends = {w: {"id": w, "ids": [WORDS.index(w)], "tokens": [w]} for w in ("[CLS]", "[SEP]")}

    def items(text):
        return [{"SpecialToken": {"id": w, "type_id": int(i > 2)}} if w in ends else
                {"Sequence": {"id": w, "type_id": int(w == "B")}} for i, w in enumerate(text.split())]

    (directory / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": special,
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
                       "lowercase": lower},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "TemplateProcessing", "single": items("[CLS] A [SEP]"),
                           "pair": items("[CLS] A [SEP] B [SEP]"), "special_tokens": ends},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": {w: i for i, w in enumerate(WORDS)}}}))


def shapes(kind, positions, types, labels):
    """Names and shapes of a family's tensors."""
    d, ff = SIZES["hidden_size"], SIZES["intermediate_size"]
    out = {"embeddings.word_embeddings.weight": (len(WORDS), d)}
    if types:
        out["embeddings.token_type_embeddings.weight"] = (types, d)

    def linear(name, rows, cols, bias=True):
        out[name + ".weight"] = (rows, cols)
        if bias:
            out[name + ".bias"] = (rows,)

    nomic = kind == "nomic_bert"
    if not nomic:
        out["embeddings.position_embeddings.weight"] = (positions, d)
    norms = ["emb_ln" if nomic else "embeddings.LayerNorm"]
    for i in range(SIZES["num_hidden_layers"]):
        name = f"encoder.layers.{i}." if nomic else f"encoder.layer.{i}."
        if nomic:
            for part, rows, cols in (("attn.Wqkv", 3 * d, d), ("attn.out_proj", d, d), ("mlp.fc11", ff, d),
                                     ("mlp.fc12", ff, d), ("mlp.fc2", d, ff)):
                linear(name + part, rows, cols, False)
            norms += [name + "norm1", name + "norm2"]
            continue
        for part in ("query", "key", "value"):
            linear(f"{name}attention.self.{part}", d, d)
        linear(name + "attention.output.dense", d, d)
        linear(name + "intermediate.dense", ff, d)
        linear(name + "output.dense", d, ff)
        norms += [name + "attention.output.LayerNorm", name + "output.LayerNorm"]
    for norm in norms:
        out[norm + ".weight"] = out[norm + ".bias"] = (d,)
    if labels:
        head = ("pooler.dense", "classifier") if kind == "bert" else ("classifier.dense", "classifier.out_proj")
        linear(head[0], d, d)
        linear(head[1], labels, d)
        prefix = "bert." if kind == "bert" else "roberta."
        out = {name if name.startswith("classifier") else prefix + name: shape for name, shape in out.items()}
    return out


ARCHITECTURES = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta", "nomic_bert": "NomicBert"}


def write_model(directory, kind="bert", labels=0, positions=160, seed=1, **fields):
    """A directory with a tiny random model."""
    directory.mkdir(parents=True, exist_ok=True)
    nomic, offset = kind == "nomic_bert", 2 if "roberta" in kind else 0
    types = 1 if offset else 2
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes(kind, positions + offset, types, labels).items():
        numbers = random.standard_normal(shape) * (0.5 if len(shape) > 1 else 0.2)
        if "norm" in name.lower() or "emb_ln" in name:
            numbers = numbers + name.endswith("weight")
        tensors[name] = numbers.astype(np.float32)
    save_file(tensors, directory / "model.safetensors")
    config = {**SIZES, "max_position_embeddings": positions + offset, "layer_norm_eps": 1e-12, "hidden_act": "gelu",
              "pad_token_id": 1 if offset else 0, "position_embedding_type": "absolute"}
    if nomic:
        config = {"n_embd": SIZES["hidden_size"], "n_layer": SIZES["num_hidden_layers"], "n_inner": SIZES["intermediate_size"],
                  "n_head": SIZES["num_attention_heads"], "n_positions": positions, "layer_norm_epsilon": 1e-12,
                  "activation_function": "swiglu", "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
                  "rotary_emb_interleaved": False, "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False,
                  "prenorm": False, "causal": False, "use_rms_norm": False, "rotary_scaling_factor": None}
    end = "ForSequenceClassification" if labels else "Model"
    config |= {"model_type": kind, "architectures": [ARCHITECTURES[kind] + end], "vocab_size": len(WORDS),
               "type_vocab_size": types, **fields}
    if labels:
        config["id2label"] = {str(i): f"LABEL_{i}" for i in range(labels)}
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory)
    return directory


# --- GGUF -------------------------------------------------------------------------------------------------------------

NAMES = {"embeddings.word_embeddings": "token_embd", "embeddings.position_embeddings": "position_embd",
         "embeddings.token_type_embeddings": "token_types", "embeddings.LayerNorm": "token_embd_norm",
         "emb_ln": "token_embd_norm", "attention.self.query": "attn_q", "attention.self.key": "attn_k",
         "attention.self.value": "attn_v", "attention.output.dense": "attn_output",
         "attention.output.LayerNorm": "attn_output_norm", "intermediate.dense": "ffn_up", "output.dense": "ffn_down",
         "output.LayerNorm": "layer_output_norm", "attn.Wqkv": "attn_qkv", "attn.out_proj": "attn_output",
         "norm1": "attn_output_norm", "norm2": "layer_output_norm", "mlp.fc11": "ffn_up", "mlp.fc12": "ffn_gate",
         "mlp.fc2": "ffn_down", "pooler.dense": "cls", "classifier": "cls.output", "classifier.dense": "cls",
         "classifier.out_proj": "cls.output", "embeddings": "embeddings"}


def gguf_name(name):
    name = name.removeprefix("bert.").removeprefix("roberta.")
    stem, end = name.rsplit(".", 1)
    parts = stem.split(".")
    if parts[0] == "encoder":
        return f"blk.{parts[2]}.{NAMES['.'.join(parts[3:])]}.{end}"
    return f"{NAMES[stem]}.{end}"


def gguf_value(value):
    """A value's type and bytes: strings, bools, floats, integers, and lists of strings or integers."""
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, struct.pack("<Q", len(value.encode())) + value.encode()
    if not value:
        return 9, struct.pack("<IQ", 8, 0)
    inner = [(5, struct.pack("<i", v)) if type(v) is int else gguf_value(v) for v in value]
    return 9, struct.pack("<IQ", inner[0][0], len(inner)) + b"".join(data for _, data in inner)


def write_gguf(path, metadata, tensors):
    """A GGUF file of version 3 with tensors in float32."""
    head, at = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)), 0
    for key, value in metadata.items():
        kind, data = gguf_value(value)
        head += struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + data
    for name, numbers in tensors.items():
        head += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", numbers.ndim)
        head += struct.pack(f"<{numbers.ndim}Q", *reversed(numbers.shape)) + struct.pack("<IQ", 0, at)
        at += (numbers.nbytes + 31) // 32 * 32
    data = b"".join(n.astype("<f4").tobytes().ljust((n.nbytes + 31) // 32 * 32, b"\0") for n in tensors.values())
    path.write_bytes(head.ljust((len(head) + 31) // 32 * 32, b"\0") + data)
    return path


def wordpiece_metadata():
    """The tokenizer of the tiny models."""
    words = [w if w.startswith("[") and w.endswith("]") else w[2:] if w.startswith("##") else "\u2581" + w for w in WORDS]
    return {"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": words,
            "tokenizer.ggml.token_type": [3] * 5 + [1] * (len(words) - 5), "tokenizer.ggml.bos_token_id": 2,
            "tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.cls_token_id": 2, "tokenizer.ggml.seperator_token_id": 3,
            "tokenizer.ggml.unknown_token_id": 1, "tokenizer.ggml.padding_token_id": 0}


def to_gguf(directory, path, **metadata):
    """Converts a tiny model, as converters do: WordPiece's names, positions without those that are skipped."""
    c = json.loads((directory / "config.json").read_text())
    nomic = c["model_type"] == "nomic_bert"
    arch = "nomic-bert" if nomic else "bert"
    tensors = {gguf_name(n): t.astype(np.float32) for n, t in load_tensors(directory / "model.safetensors").items()}
    if "position_embd.weight" in tensors and "roberta" in c["model_type"]:
        tensors["position_embd.weight"] = tensors["position_embd.weight"][c["pad_token_id"] + 1:]
    values = {"general.architecture": arch, f"{arch}.block_count": SIZES["num_hidden_layers"],
              f"{arch}.context_length": 160, f"{arch}.embedding_length": SIZES["hidden_size"],
              f"{arch}.feed_forward_length": SIZES["intermediate_size"],
              f"{arch}.attention.head_count": SIZES["num_attention_heads"], f"{arch}.attention.layer_norm_epsilon": 1e-12,
              f"{arch}.attention.causal": False, f"{arch}.pooling_type": 1, **wordpiece_metadata(),
              "tokenizer.ggml.token_type_count": c["type_vocab_size"]}
    if nomic:
        values[f"{arch}.rope.freq_base"] = 1000.0
    return write_gguf(path, {**values, **metadata}, tensors)
