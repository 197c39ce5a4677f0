"""SmolLM2 from its GGUF file in float64 numpy, written from the formats' and the model's descriptions and not from the C
code: a reader for the three types that this file has, and a forward pass of a Llama model."""
import struct

import numpy as np

TEXTS = [
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, and nothing "
    "particular to interest me on shore, I thought I would sail about a little.",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife.",
    "Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty.",
    "When in the Course of human events, it becomes necessary for one people to dissolve the political bands.",
    "We the People of the United States, in Order to form a more perfect Union, establish Justice, insure domestic "
    "Tranquility, provide for the common defence.",
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do.",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness.",
    "In the beginning God created the heaven and the earth. And the earth was without form, and void.",
    "You will rejoice to hear that no disaster has accompanied the commencement of an enterprise which you have regarded "
    "with such evil forebodings.",
    "To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer the slings and arrows.",
    "All happy families are alike; each unhappy family is unhappy in its own way.",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n",
    "#include <stdio.h>\n\nint main(void) {\n    printf(\"Hello, world!\\n\");\n    return 0;\n}\n",
    "The sum of 17 and 25 is 42, and 42 divided by 6 is 7. The square root of 144 is 12.",
    "Alle Menschen sind frei und gleich an Würde und Rechten geboren.",
    "Longtemps, je me suis couché de bonne heure. Parfois, à peine ma bougie éteinte, mes yeux se fermaient si vite.",
    "En un lugar de la Mancha, de cuyo nombre no quiero acordarme, no ha mucho tiempo que vivía un hidalgo.",
    "| name | age |\n|------|-----|\n| Ada  | 36  |\n| Alan | 41  |\n",
    "Water boils at 100 degrees Celsius at sea level; on Mount Everest it boils at about 68 degrees.",
    "{\"city\": \"Lisbon\", \"population\": 545000, \"rivers\": [\"Tagus\"], \"capital\": true}",
]

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
F32, Q4_1, Q8_0 = 0, 3, 8


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, code):
        value, = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self):
        size = self.take("Q")
        self.at += size
        return self.data[self.at - size:self.at].decode()

    def value(self, kind):
        if kind == 8:
            return self.string()
        if kind == 9:
            inner, count = self.take("I"), self.take("Q")
            return [self.value(inner) for _ in range(count)]
        return self.take(SCALARS[kind])


def dequantise(raw, kind):
    if kind == F32:
        return raw.view("<f4").astype(np.float64)
    blocks = raw.reshape(-1, {Q4_1: 20, Q8_0: 34}[kind])
    d = blocks[:, :2].copy().view("<f2").astype(np.float64)
    if kind == Q8_0:
        return d * blocks[:, 2:].view(np.int8)
    m = blocks[:, 2:4].copy().view("<f2").astype(np.float64)
    return d * np.concatenate((blocks[:, 4:] & 15, blocks[:, 4:] >> 4), 1) + m


def load(path):
    """(metadata, {name: float64 array}): the values are those of the file, rounded to float32 once. Converting them for
    each text would take nine tenths of the time."""
    data = path.read_bytes()
    r = Reader(data)
    assert r.take("4s") == b"GGUF" and r.take("I") == 3
    tensor_count, value_count = r.take("Q"), r.take("Q")
    metadata = {}
    for _ in range(value_count):
        key = r.string()
        metadata[key] = r.value(r.take("I"))
    infos = []
    for _ in range(tensor_count):
        name = r.string()
        shape = [r.take("Q") for _ in range(r.take("I"))][::-1]
        infos.append((name, shape, r.take("I"), r.take("Q")))
    start = -(-r.at // 32) * 32
    tensors = {}
    for name, shape, kind, offset in infos:
        count = int(np.prod(shape))
        size = {F32: 4 * count, Q4_1: count // 32 * 20, Q8_0: count // 32 * 34}[kind]
        raw = np.frombuffer(data, np.uint8, size, start + offset)
        tensors[name] = dequantise(raw, kind).reshape(shape).astype(np.float32).astype(np.float64)
    return metadata, tensors


def norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


class SmolLM2:
    def __init__(self, path):
        self.metadata, self.tensors = load(path)
        get = lambda key: self.metadata["llama." + key]
        self.layers, self.eps = get("block_count"), get("attention.layer_norm_rms_epsilon")
        self.heads, self.heads_kv = get("attention.head_count"), get("attention.head_count_kv")
        self.dim = get("embedding_length") // self.heads
        self.base = get("rope.freq_base")

    def weight(self, layer, name):
        return self.tensors[f"blk.{layer}.{name}.weight"]

    def rotate(self, x):
        """Pairs are neighbours: the file's rows of q and k are in that order."""
        turn = np.arange(len(x))[:, None] * self.base ** (-np.arange(0, self.dim, 2) / self.dim)
        cos, sin = np.cos(turn)[:, None], np.sin(turn)[:, None]
        out = np.empty_like(x)
        out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
        out[..., 1::2] = x[..., 1::2] * cos + x[..., 0::2] * sin
        return out

    def attend(self, layer, x):
        q, k, v = ((x @ self.weight(layer, f"attn_{part}").T).reshape(len(x), -1, self.dim) for part in "qkv")
        group = self.heads // self.heads_kv
        k, v = np.repeat(self.rotate(k), group, 1), np.repeat(v, group, 1)
        scores = np.einsum("thd,shd->hts", self.rotate(q), k) / np.sqrt(self.dim)
        scores[:, np.triu(np.ones((len(x), len(x)), bool), 1)] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        heads = np.einsum("hts,shd->thd", p / p.sum(-1, keepdims=True), v)
        return heads.reshape(len(x), -1) @ self.weight(layer, "attn_output").T

    def logprobs(self, ids):
        """[len(ids), vocabulary]: row t is of the token after ids[:t + 1]."""
        x = self.tensors["token_embd.weight"][ids]
        for layer in range(self.layers):
            x = x + self.attend(layer, norm(x, self.weight(layer, "attn_norm"), self.eps))
            y = norm(x, self.weight(layer, "ffn_norm"), self.eps)
            gate = y @ self.weight(layer, "ffn_gate").T
            x = x + (gate / (1 + np.exp(-gate)) * (y @ self.weight(layer, "ffn_up").T)) @ self.weight(layer, "ffn_down").T
        x = norm(x, self.tensors["output_norm.weight"], self.eps)
        logits = x @ self.tensors["token_embd.weight"].T
        logits -= logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))
