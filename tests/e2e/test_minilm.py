"""all-MiniLM-L6-v2 with its real weights (tools/fetch-model minilm; skipped where it was not fetched): vectors of 240 texts in
many languages beside an independent model in float64 and, where it is installed, sentence-transformers, as an OpenAI client
sees them."""
import pathlib
import sys

import numpy as np
import pytest
import requests
from conftest import ROOT, fetched_model, start_on

sys.path.insert(0, str(ROOT / "tests/python"))
sys.path.insert(0, str(pathlib.Path(__file__).parent))
from encoder import Encoder  # noqa: E402
from smollm2 import TEXTS  # noqa: E402

pytestmark = pytest.mark.slow

SENTENCES = [*TEXTS, "Die Katze schläft auf dem warmen Ofen.", "Le chat dort sur le poêle chaud.", "El gato duerme en la estufa.",
             "Il gatto dorme sulla stufa calda.", "O gato dorme em cima do fogão.", "De kat slaapt op de warme kachel.",
             "Kot śpi na ciepłym piecu.", "Кошка спит на тёплой печи.", "Η γάτα κοιμάται πάνω στη σόμπα.", "猫在温暖的炉子上睡觉。",
             "猫は暖かいストーブの上で眠っている。", "고양이가 따뜻한 난로 위에서 잔다.", "القطة نائمة على الموقد الدافئ.",
             "बिल्ली गर्म चूल्हे पर सो रही है।", "Kissa nukkuu lämpimällä uunilla.", "Mèo ngủ trên bếp ấm.", "🙂🙃 emoji! ", "a", "?"]


def texts():
    """240 texts of one to some hundred tokens; the last ones are longer than the model takes."""
    count = len(SENTENCES)
    sizes = [1 + i // count if i // count < 6 else 25 for i in range(240)]
    return [" ".join(SENTENCES[(i * 7 + k * (1 + i // count)) % count] for k in range(sizes[i])) for i in range(240)]


@pytest.fixture(scope="module")
def model():
    return fetched_model("minilm")


def embed(d, client):
    answer = client.embeddings.create(model="keepd-nano", input=texts(), extra_body={"truncate_prompt_tokens": -1})
    return [np.array(item.embedding) for item in answer.data]


def client_of(d):
    return pytest.importorskip("openai").OpenAI(base_url=f"{d.url}/v1", api_key="none")


def test_vectors_are_those_of_an_independent_model(daemon, model):
    d, reference = daemon("--model", str(model)), Encoder(model)
    tokens = [requests.post(f"{d.url}/tokenize", json={"prompt": text}, timeout=60).json()["tokens"] for text in texts()]
    least = 1
    # Every fifth text: all sentences and all sizes are among them, and the model in float64 is slow.
    for ids, vector in list(zip(tokens, embed(d, client_of(d))))[::5]:
        if len(ids) > 256:
            ids = [*ids[:255], ids[-1]]
        wanted = reference.hidden(ids).mean(0)
        least = min(least, vector @ wanted / np.linalg.norm(wanted) / np.linalg.norm(vector))
    assert max(map(len, tokens)) > 256 and least > 1 - 1e-6
    print(f"least cosine: 1 - {1 - least:.1e}")


def test_sentence_transformers(daemon, model):
    transformers = pytest.importorskip("sentence_transformers")
    d = daemon("--model", str(model))
    wanted = transformers.SentenceTransformer(str(model), device="cpu").encode(texts(), normalize_embeddings=True)
    least = min(float(a @ b) / np.linalg.norm(b) for a, b in zip(embed(d, client_of(d)), wanted.astype(np.float64)))
    assert least > 1 - 1e-5
    print(f"least cosine to sentence-transformers: 1 - {1 - least:.1e}")


@pytest.mark.parametrize("path", ["reference", "portable", "avx2", "avx512"])
def test_what_is_near(daemon, model, path):
    """Every path finds the same text nearest to a question."""
    question, answers = "Where does the cat sleep?", [s for s in SENTENCES if len(s) > 20]
    d = start_on(daemon, path, "--model", str(model))
    body = {"input": [question, "The cat sleeps on the warm stove.", *answers]}
    r = requests.post(f"{d.url}/v1/embeddings", json=body, timeout=600)
    vectors = np.array([v["embedding"] for v in r.json()["data"]])
    assert int((vectors[1:] @ vectors[0]).argmax()) == 0
