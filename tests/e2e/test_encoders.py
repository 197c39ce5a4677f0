"""Encoders, which read texts both ways: vectors beside an independent model in float64, bit by bit alone and in batches, from
directories and GGUF files; limits; what they do not serve."""
import base64
import concurrent.futures as futures
import json
import os
import struct
import subprocess
import sys

import numpy as np
import pytest
import requests
from conftest import ROOT, start_on

sys.path.insert(0, str(ROOT / "tests/python"))
from encoder import WORDS, Encoder, to_gguf, write_model  # noqa: E402
from windowed_encoder import WINDOWED, WindowedEncoder, add_modules, end_vector, windowed_to_gguf, write_windowed  # noqa: E402

TEXTS = ["The code of the garage is 4815.", "a", "Wer wohnt in Lissabon? Café, naïve ÉTÉ!", "0123456789 " * 9,
         "  spaces  and\nlines\t", "東京 is a city; ж 🙂", "x" * 120, "the coding coded garage's code " * 5]
KINDS = ["bert", "roberta", "xlm-roberta", "nomic_bert"]
ARCHES = {"bert": "bert", "nomic_bert": "nomic-bert", "modernbert": "modern-bert", "gemma3_text": "gemma-embedding"}


def write(directory, kind, **fields):
    return (write_windowed if kind in WINDOWED else write_model)(directory, kind, **fields)


def reference(model):
    kind = json.loads((model / "config.json").read_text())["model_type"]
    return (WindowedEncoder if kind in WINDOWED else Encoder)(model)


def as_gguf(model, kind, path, **metadata):
    return (windowed_to_gguf if kind in WINDOWED else to_gguf)(model, path, **metadata)


def embed(d, text, status=200, **fields):
    r = requests.post(f"{d.url}/v1/embeddings", json={"input": text, "encoding_format": "base64", **fields}, timeout=300)
    assert r.status_code == status, r.text
    return r.json()["error"] if status != 200 else [base64.b64decode(v["embedding"]) for v in r.json()["data"]]


def numbers(raw):
    return np.array(struct.unpack(f"<{len(raw) // 4}f", raw))


def ids_of(d, text):
    return requests.post(f"{d.url}/tokenize", json={"prompt": text}, timeout=60).json()["tokens"]


def check_vectors(d, model, texts=TEXTS, how="mean", most=2e-5, ending=lambda vector: vector):
    for text in texts:
        states = model.hidden(ids_of(d, text))
        wanted = ending(states.mean(0) if how == "mean" else states[0] if how == "cls" else states[-1])
        [raw] = embed(d, text, normalize=False)
        assert np.abs(numbers(raw) - wanted).max() <= most * np.abs(states).max(), text
        [unit] = embed(d, text)
        assert numbers(unit) @ wanted / np.linalg.norm(wanted) > 1 - 1e-6


@pytest.mark.parametrize("kind", KINDS + WINDOWED)
def test_vectors_are_those_of_an_independent_model(daemon, tmp_path, kind):
    model = write(tmp_path / "model", kind)
    check_vectors(daemon("--model", str(model)), reference(model))


def test_names_and_words_of_other_files(daemon, tmp_path):
    """Files with a head have another prefix; newer configurations list the layers and their rotations."""
    ropes = {"full_attention": {"rope_type": "default", "rope_theta": 160000.0},
             "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    other = {"architectures": ["ModernBertForMaskedLM"], "global_rope_theta": None, "local_rope_theta": None,
             "rope_parameters": ropes, "global_attn_every_n_layers": None,
             "layer_types": [("sliding" if i % 3 else "full") + "_attention" for i in range(4)]}
    plain, masked = write(tmp_path / "plain", "modernbert"), write(tmp_path / "masked", "modernbert", prefix="model.", **other)
    assert embed(daemon("--model", str(masked)), TEXTS) == embed(daemon("--model", str(plain)), TEXTS)
    plain, whole = write(tmp_path / "gemma", "gemma3_text"), write(tmp_path / "whole", "gemma3_text", prefix="model.")
    assert embed(daemon("--model", str(whole)), TEXTS) == embed(daemon("--model", str(plain)), TEXTS)


@pytest.mark.parametrize("kind", ["bert", *WINDOWED])
@pytest.mark.parametrize("path", ["reference", "portable", "avx2", "avx512"])
def test_every_path(daemon, tmp_path, path, kind):
    model = write(tmp_path / "model", kind)
    for how in ("cls", "last"):
        d = start_on(daemon, path, "--model", str(model), "--pooling", how)
        check_vectors(d, reference(model), TEXTS[:4], how)


@pytest.mark.parametrize("kind", ["bert", "nomic_bert", *WINDOWED])
def test_a_vector_depends_on_its_text_alone(daemon, tmp_path, kind):
    """Bit by bit: alone, in a batch, in any order, from many clients, in short steps, on other numbers of threads and ranks."""
    model = write(tmp_path / "model", kind)
    d = daemon("--model", str(model))
    texts = TEXTS * 3
    alone = [embed(d, text)[0] for text in texts]
    assert len(set(alone)) == len(TEXTS)
    assert embed(d, texts) == alone and embed(d, texts[::-1]) == alone[::-1]
    with futures.ThreadPoolExecutor(6) as pool:
        assert all(b.result() == alone for b in [pool.submit(embed, d, texts) for _ in range(6)])
    for flags in (["--max-num-batched-tokens", "161", "--max-num-seqs", "8"], ["--threads", "1"], ["--threads", "4"],
                  ["--tensor-parallel-size", "2"], ["--tensor-parallel-size", "4", "--threads", "4"],
                  ["--data-parallel-size", "2"], ["--kv-budget", "64", "--kv-policy", "streaming"]):
        assert embed(daemon("--model", str(model), *flags), texts) == alone, flags
    pool = d.kv()["pool"]
    assert pool["pages_used"] == 0 and pool["pages_reserved"] == 0 and d.kv()["conversation_count"] == 0


@pytest.mark.parametrize("kind", ARCHES)
def test_gguf_files_are_the_same(daemon, tmp_path, kind):
    model = write(tmp_path / "model", kind)
    whole, file = daemon("--model", str(model)), daemon("--model", str(as_gguf(model, kind, tmp_path / "model.gguf")))
    for text in TEXTS + ["[CLS] is a token", "naïve"]:
        assert ids_of(file, text) == ids_of(whole, text)
    assert embed(file, TEXTS) == embed(whole, TEXTS)
    first = daemon("--model", str(as_gguf(model, kind, tmp_path / "cls.gguf", **{f"{ARCHES[kind]}.pooling_type": 2})))
    check_vectors(first, reference(model), TEXTS[:2], "cls")


EMBEDDING_GEMMA = [(96, False, "linear.Identity"), (48, False, "linear.Identity")]


@pytest.mark.parametrize("kind, pooling, dense", [("gemma3_text", "mean", EMBEDDING_GEMMA), ("bert", "cls", [(24, True, "activation.Tanh")]),
                                                  ("modernbert", "mean", [(40, True, "linear.Identity"), (64, False, "activation.Tanh")])])
def test_dense_modules(daemon, tmp_path, kind, pooling, dense):
    """Products behind the pooled vector, whose numbers `dimensions` shortens."""
    model = add_modules(write(tmp_path / "model", kind), *dense, pooling=pooling)
    d, width = daemon("--model", str(model)), dense[-1][0]
    check_vectors(d, reference(model), how=pooling, ending=lambda vector: end_vector(model, vector))
    alone = [embed(d, text)[0] for text in TEXTS]
    assert embed(d, TEXTS) == alone and all(len(v) == 4 * width for v in alone)
    assert embed(daemon("--model", str(model), "--tensor-parallel-size", "2", "--threads", "3"), TEXTS) == alone
    assert requests.get(f"{d.url}/server_info", timeout=60).json()["embedding_width"] == width
    whole, short = embed(d, TEXTS, normalize=False), embed(d, TEXTS, normalize=False, dimensions=16)
    assert [v[:64] for v in whole] == short
    assert "dimensions" in embed(d, "a", status=400, dimensions=width + 1)["param"]
    if kind == "gemma3_text":
        file = daemon("--model", str(as_gguf(model, kind, tmp_path / "model.gguf")))
        assert embed(file, TEXTS) == alone
    (model / "2_Dense/model.safetensors").unlink()
    assert "2_Dense/model.safetensors" in embed(daemon("--model", str(model)), "a", status=400)["message"]


def test_prompts(daemon, tmp_path):
    model = add_modules(write(tmp_path / "model", "gemma3_text"), *EMBEDDING_GEMMA)
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    (model / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts, "default_prompt_name": None}))
    d = daemon("--model", str(model))
    for name, prompt in prompts.items():
        assert embed(d, TEXTS, prompt_name=name) == embed(d, [prompt + text for text in TEXTS])
    assert "query" in embed(d, "a", status=400, prompt_name="other")["message"]


def test_a_saved_model_has_its_modules(daemon, tmp_path):
    model = add_modules(write(tmp_path / "model", "gemma3_text"), *EMBEDDING_GEMMA, pooling="cls")
    binary = os.environ.get("KEEPD_BIN", str(ROOT / "build/keepd"))
    saved = tmp_path / "saved"
    subprocess.run([binary, "--model", str(model), "--quantization", "q8", "--quantize-to", str(saved)], check=True, timeout=120)
    assert embed(daemon("--model", str(saved)), TEXTS) == embed(daemon("--model", str(model), "--quantization", "q8"), TEXTS)


def test_lengths(daemon, tmp_path):
    """sentence-transformers' max_seq_length is a limit, as are the model's positions and the rows of a step."""
    model = write_model(tmp_path / "model")
    d = daemon("--model", str(model))
    long = "a " * 200
    e = embed(d, long, status=400)
    assert e["code"] == "context_length_exceeded" and "160" in e["message"]
    assert len(embed(d, "a " * 158)) == 1
    cut = ids_of(d, long)
    assert embed(d, long, truncate_prompt_tokens=-1) == embed(d, [*cut[:159], WORDS.index("[SEP]")])
    (model / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 40, "do_lower_case": False}))
    d = daemon("--model", str(model))
    assert "40" in embed(d, "a " * 39, status=400)["message"]
    assert embed(d, long, truncate_prompt_tokens=-1) == embed(d, [*cut[:39], WORDS.index("[SEP]")])
    d = daemon("--model", str(model), "--max-num-batched-tokens", "33", "--max-num-seqs", "4")
    assert "33" in embed(d, "a " * 39, status=400)["message"]
    assert len(embed(d, ["a " * 31] * 20)) == 20


def test_what_an_encoder_does_not_serve(daemon, tmp_path):
    model = write_model(tmp_path / "model")
    d = daemon("--model", str(model))
    messages = [{"role": "user", "content": "hello"}]
    for path, body in (("/v1/chat/completions", {"messages": messages}), ("/v1/completions", {"prompt": "a"}),
                       ("/v1/responses", {"input": "a"}), ("/v1/messages", {"messages": messages, "max_tokens": 1})):
        r = requests.post(d.url + path, json=body, timeout=60)
        assert r.status_code == 400, (path, r.text)
        assert "vectors" in r.json()["error"]["message"] or "template" in r.json()["error"]["message"], r.text
    assert len(embed(d, "a")) == 1
    info = requests.get(f"{d.url}/server_info", timeout=60).json()
    assert info["model_family"] == "bert" and info["pooling"] == "mean" and info["embedding_width"] == 32


def test_texts_are_compared_by_their_vectors(daemon, tmp_path):
    """An encoder without labels scores pairs by the cosine of two vectors, as vLLM does."""
    d = daemon("--model", str(write_model(tmp_path / "model")))
    texts = TEXTS[:4]
    vectors = np.array([numbers(raw) for raw in embed(d, texts)])

    def post(path, status=200, **body):
        r = requests.post(f"{d.url}/v1/{path}", json=body, timeout=60)
        assert r.status_code == status, r.text
        return r.json()

    def scores(first, second):
        return [s["score"] for s in post("score", text_1=first, text_2=second)["data"]]

    assert scores(texts[0], texts) == pytest.approx(vectors @ vectors[0], abs=1e-6)
    assert scores(texts[:2], texts[2:]) == pytest.approx((vectors[:2] * vectors[2:]).sum(1), abs=1e-6)
    assert scores(texts[1], texts[2]) == pytest.approx([vectors[1] @ vectors[2]], abs=1e-6)
    ranked = post("rerank", query=texts[0], documents=texts, top_n=3)["results"]
    assert [x["index"] for x in ranked] == list(np.argsort(-(vectors @ vectors[0]), kind="stable")[:3])
    assert ranked[0]["relevance_score"] == pytest.approx(1, abs=1e-6) and ranked[0]["document"]["text"] == texts[0]
    long, count = "a " * 300, len(ids_of(d, texts[0]))
    assert post("score", text_1=texts[0], text_2=texts[0])["usage"]["prompt_tokens"] == 2 * count
    for path, body, param in (("score", {"text_1": long, "text_2": ["a"]}, "text_1"), ("score", {"text_1": ["a", long], "text_2": ["a", "b"]}, "text_1[1]"),
                              ("score", {"text_1": "a", "text_2": long}, "text_2"), ("rerank", {"query": "a", "documents": ["a", long]}, "documents[1]"),
                              ("score", {"text_1": ["a"] * 1025, "text_2": ["a"] * 1025}, "text_2"),
                              ("score", {"text_1": "a", "text_2": "a", "use_activation": True}, "use_activation"),
                              ("rerank", {"query": "a", "documents": ["a"], "instruction": "b"}, "instruction")):
        assert post(path, 400, **body)["error"]["param"] == param
    assert post("score", text_1=long, text_2=long, truncate_prompt_tokens=-1)["data"][0]["score"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta"])
def test_cross_encoders(daemon, tmp_path, kind):
    """A pair is read as the tokenizer joins it, with types of its own; the score is the label, or its sigmoid."""
    model = write_model(tmp_path / "model", kind, labels=1)
    reference, query, documents = Encoder(model), "who has the code?", TEXTS
    plain = write_model(tmp_path / "plain", kind, labels=1, sbert_ce_default_activation_function="torch.nn.modules.linear.Identity")
    d, raw = daemon("--model", str(model)), daemon("--model", str(plain))
    first = ids_of(d, query)
    wanted = [reference.labels([*first, *ids_of(d, text)[1:]], len(first))[0] for text in documents]

    def scores(d, documents, **fields):
        r = requests.post(f"{d.url}/v1/rerank", json={"query": query, "documents": documents, **fields}, timeout=300)
        assert r.status_code == 200, r.text
        return [x["relevance_score"] for x in sorted(r.json()["results"], key=lambda x: x["index"])]

    assert scores(raw, documents) == pytest.approx(wanted, abs=3e-5)
    assert scores(d, documents) == pytest.approx([1 / (1 + np.exp(-x)) for x in wanted], abs=1e-5)
    for model_of in (d, raw):
        assert scores(model_of, documents, use_activation=False) == pytest.approx(wanted, abs=3e-5)
        assert scores(model_of, documents, use_activation=True) == scores(d, documents)
    alone = [scores(d, [text])[0] for text in documents]
    assert scores(d, documents * 3) == alone * 3
    assert scores(daemon("--model", str(model), "--tensor-parallel-size", "2"), documents) == alone
    r = requests.post(f"{d.url}/v1/score", json={"text_1": query, "text_2": documents}, timeout=300)
    assert [s["score"] for s in r.json()["data"]] == alone
    assert r.json()["usage"]["prompt_tokens"] == sum(len(first) + len(ids_of(d, text)) - 1 for text in documents)
    for path, body, param in (("/v1/embeddings", {"input": "a"}, None), ("/v1/completions", {"prompt": "a"}, "model"),
                              ("/v1/rerank", {"query": "a", "documents": ["a " * 170]}, "documents[0]"),
                              ("/v1/rerank", {"query": "a", "documents": ["a"], "instruction": "b"}, "instruction")):
        r = requests.post(d.url + path, json=body, timeout=60)
        assert r.status_code == 400 and r.json()["error"]["param"] == param, r.text
    long = scores(d, ["a " * 300, "a " * 200], truncate_prompt_tokens=-1)
    assert long[0] == long[1]
    if kind == "bert":
        file = daemon("--model", str(to_gguf(model, tmp_path / "model.gguf", **{"bert.pooling_type": 4})))
        assert scores(file, documents) == alone


def test_a_classifier_of_several_labels(daemon, tmp_path):
    d = daemon("--model", str(write_model(tmp_path / "model", labels=3)))
    r = requests.post(f"{d.url}/v1/rerank", json={"query": "a", "documents": ["b"]}, timeout=60)
    assert r.status_code == 400 and "3 labels" in r.json()["error"]["message"]


def test_files_that_are_refused(tmp_path):
    binary = os.environ.get("KEEPD_BIN", str(ROOT / "build/keepd"))
    for kind, fields, said in (("bert", {"hidden_act": "relu"}, "hidden_act"), ("bert", {"is_decoder": True}, "is_decoder"),
                               ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
                               ("bert", {"max_position_embeddings": 161}, "position_embeddings.weight"),
                               ("modernbert", {"norm_bias": True}, "norm_bias"),
                               ("modernbert", {"attention_bias": True}, "attention_bias"),
                               ("modernbert", {"mlp_bias": True}, "mlp_bias"),
                               ("modernbert", {"hidden_activation": "silu"}, "hidden_act"),
                               ("gemma3_text", {"use_bidirectional_attention": "some"}, "use_bidirectional_attention")):
        model = write(tmp_path / said, kind, **fields)
        r = subprocess.run([binary, "--model", str(model), "--check-config"], capture_output=True, text=True, timeout=60)
        assert r.returncode != 0 and said in r.stderr + r.stdout, (said, r.stderr)


def test_a_file_without_its_first_dense_module_is_refused(tmp_path):
    binary = os.environ.get("KEEPD_BIN", str(ROOT / "build/keepd"))
    model = as_gguf(write(tmp_path / "model", "gemma3_text"), "gemma3_text", tmp_path / "model.gguf", **{"gemma-embedding.dense_3_feat_out": 8})
    r = subprocess.run([binary, "--model", str(model), "--check-config"], capture_output=True, text=True, timeout=60)
    assert r.returncode != 0 and "dense_3.weight but no dense_2.weight" in r.stderr + r.stdout, r.stderr


def test_sdk(daemon, tmp_path):
    openai = pytest.importorskip("openai")
    model = write_model(tmp_path / "model")
    d = daemon("--model", str(model))
    client = openai.OpenAI(base_url=f"{d.url}/v1", api_key="none")
    answer = client.embeddings.create(model="keepd-nano", input=TEXTS)
    for text, item in zip(TEXTS, answer.data):
        assert np.array_equal(np.float32(item.embedding), np.float32(numbers(embed(d, text)[0])))
    assert answer.usage.prompt_tokens == sum(len(ids_of(d, text)) for text in TEXTS)
