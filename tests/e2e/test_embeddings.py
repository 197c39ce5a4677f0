"""/v1/embeddings of decoder models, with their real forward pass: beside an independent one in float64, and bit by bit
alone, in batches, beside chats, split over steps, on several ranks."""
import base64
import concurrent.futures as futures
import json
import math
import shutil
import struct
import sys

import numpy as np
import pytest
import requests
from conftest import ROOT, start_on

sys.path.insert(0, str(ROOT / "tests/python"))
from reference_model import Reference, rms_norm, silu  # noqa: E402

NANO = ROOT / "bundled/keepd-nano"
TEXTS = ["The code of the garage is 4815.", "a", "My sister Nora lives in Lisbon. " * 9, "Wer wohnt in Lissabon?",
         "0123456789 " * 40, "  spaces  and\nlines\n", "ξένος 東京 🙂", "def f(x):\n    return x + 1\n"] * 2


def embed(d, text, status=200, **fields):
    r = requests.post(f"{d.url}/v1/embeddings", json={"input": text, "encoding_format": "base64", **fields}, timeout=300)
    assert r.status_code == status, r.text
    if status != 200:
        return r.json()["error"]
    return [base64.b64decode(v["embedding"]) for v in r.json()["data"]]


def numbers(raw):
    return np.array(struct.unpack(f"<{len(raw) // 4}f", raw))


def ids_of(d, text):
    return requests.post(f"{d.url}/tokenize", json={"prompt": text}, timeout=60).json()["tokens"]


def hidden(model, ids):
    """The outputs of the final norm."""
    t = model.tensors
    x, positions = t["model.embed_tokens.weight"][np.asarray(ids)], np.arange(len(ids))
    for layer in range(model.layers):
        name = f"model.layers.{layer}."
        x = x + model.attention(layer, rms_norm(x, t[name + "input_layernorm.weight"], model.eps), positions)
        y = rms_norm(x, t[name + "post_attention_layernorm.weight"], model.eps)
        gate, up = (model.linear(name + f"mlp.{p}_proj", y) for p in ("gate", "up"))
        x = x + model.linear(name + "mlp.down_proj", silu(gate) * up)
    return rms_norm(x, t["model.norm.weight"], model.eps)


@pytest.mark.parametrize("path", ["reference", "portable", "avx2", "avx512"])
def test_hidden_states_are_those_of_an_independent_model(daemon, path):
    flags = ["--kv-dtype", "f32", "--cpu-activations", "f32"]
    last, mean, first = (start_on(daemon, path, *flags, "--pooling", how) for how in ("last", "mean", "cls"))
    for text in TEXTS[:8]:
        states = hidden(Reference(NANO, gates=""), ids_of(last, text))
        scale = np.abs(states).max()
        for d, wanted in ((last, states[-1]), (mean, states.mean(0)), (first, states[0])):
            [raw] = embed(d, text, normalize=False)
            assert np.abs(numbers(raw) - wanted).max() <= 2e-5 * scale
            [unit] = embed(d, text)
            assert np.abs(numbers(unit) - wanted / np.linalg.norm(wanted)).max() <= 2e-5


@pytest.mark.parametrize("how", ["last", "mean"])
def test_a_vector_depends_on_its_text_alone(daemon, how):
    """Bit by bit: alone, in a batch, in any order, beside chats, in steps of few rows, on other numbers of threads and
    ranks, with a bounded cache for chats, and with another policy."""
    d = daemon("--pooling", how)
    alone = [embed(d, text)[0] for text in TEXTS]
    assert embed(d, TEXTS) == alone and embed(d, TEXTS[::-1]) == alone[::-1]
    with futures.ThreadPoolExecutor(8) as pool:
        chats = [pool.submit(d.chat, [{"role": "user", "content": text}], max_tokens=20) for text in TEXTS[:4]]
        batches = [pool.submit(embed, d, TEXTS) for _ in range(4)]
        assert all(b.result() == alone for b in batches)
        assert all(c.result()["usage"]["completion_tokens"] for c in chats)
    for flags in (["--max-num-batched-tokens", "17", "--max-num-seqs", "8"], ["--kv-budget", "64", "--kv-policy", "global"],
                  ["--kv-policy", "streaming", "--kv-budget", "48"], ["--threads", "1"], ["--threads", "4"],
                  ["--tensor-parallel-size", "2"], ["--tensor-parallel-size", "4", "--threads", "4"],
                  ["--data-parallel-size", "2"]):
        assert embed(daemon("--pooling", how, *flags), TEXTS) == alone, flags


def test_pages_go_when_the_text_is_read(daemon):
    d = daemon("--pooling", "mean")
    pool = d.kv()["pool"]
    embed(d, TEXTS)
    after = d.kv()["pool"]
    assert after["pages_used"] == pool["pages_used"] == 0 and after["pages_reserved"] == 0
    assert d.kv()["conversation_count"] == 0 and d.metric("vllm:generation_tokens_total") == 0


def test_a_pool_bounds_texts_not_a_budget(daemon):
    """A text keeps all entries while it is read, whatever the budget; the pool and the cap on budgets bound it."""
    d = daemon("--kv-pool-bytes", "2M", "--kv-budget", "32", "--max-num-seqs", "2")
    long = "word " * 1500
    e = embed(d, ["a", long], status=400)
    assert e["param"] == "input[1]" and "pages of cache" in e["message"]
    assert len(embed(d, ["a", "word " * 100])) == 2
    d = daemon("--kv-budget", "32", "--kv-budget-max", "64")
    e = embed(d, ["word " * 100], status=400)
    assert e["param"] == "input[0]" and "--kv-budget-max" in e["message"]
    assert len(embed(d, "word " * 20)) == 1


def test_settings_of_the_model(daemon, tmp_path):
    """modules.json and 1_Pooling/config.json say how texts become vectors; the option goes before them."""
    plain = {how: embed(daemon("--pooling", how), TEXTS[:2]) for how in ("last", "mean", "cls")}
    assert embed(daemon(), TEXTS[:2]) == plain["last"] and len({v[0] for v in plain.values()}) == 3
    model = shutil.copytree(NANO, tmp_path / "model")
    (model / "1_Pooling").mkdir()
    settings = model / "1_Pooling/config.json"
    for how, own in (("mean", "pooling_mode_mean_tokens"), ("cls", "pooling_mode_cls_token"), ("last", "pooling_mode_lasttoken")):
        settings.write_text(json.dumps({"word_embedding_dimension": 128, own: True, "pooling_mode_max_tokens": False}))
        assert embed(daemon("--model", str(model)), TEXTS[:2]) == plain[how]
    (model / "modules.json").write_text(json.dumps([
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Other", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}]))
    (model / "1_Other").mkdir()
    (model / "1_Other/config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    assert embed(daemon("--model", str(model)), TEXTS[:2]) == plain["mean"]
    (model / "1_Other/config.json").write_text(json.dumps({"pooling_mode_max_tokens": True}))
    d = daemon("--model", str(model))
    e = embed(d, "a", status=400)
    assert e["code"] == "unsupported_model" and "pooling 'max'" in e["message"]
    assert d.chat([{"role": "user", "content": "hello"}], max_tokens=1)
    assert embed(daemon("--model", str(model), "--pooling", "cls"), TEXTS[:2]) == plain["cls"]


def test_sdk(daemon):
    openai = pytest.importorskip("openai")
    d = daemon()
    client = openai.OpenAI(base_url=f"{d.url}/v1", api_key="none")
    answer = client.embeddings.create(model="keepd-nano", input=TEXTS)
    for text, item in zip(TEXTS, answer.data):
        assert np.array_equal(np.float32(item.embedding), np.float32(numbers(embed(d, text)[0])))
        assert abs(math.hypot(*item.embedding) - 1) < 1e-6
    assert answer.usage.prompt_tokens == sum(len(ids_of(d, text)) for text in TEXTS)
    short = client.embeddings.create(model="keepd-nano", input=TEXTS[0], dimensions=16).data[0].embedding
    whole = np.array(answer.data[0].embedding[:16])
    assert np.abs(np.array(short) - whole / np.linalg.norm(whole)).max() < 1e-6
