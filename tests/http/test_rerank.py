"""/v1/rerank, /v2/rerank and /v1/score: shapes, order, limits, errors. The fake engine likes long documents."""
import math

import pytest
from conftest import LENGTH, MODEL

PATHS = ["/v1/rerank", "/v2/rerank", "/rerank"]
DOCUMENTS = ["bb", "dddd", "a", "ccc", "DDDD"]
PATH, SCORE = PATHS[0], "/v1/score"


def rerank(daemon, documents=DOCUMENTS, path=PATH, **fields):
    r = daemon.post(path, {"model": MODEL, "query": "which?", "documents": documents, **fields})
    assert r.status_code == 200, r.text
    return r.json()


def error(r, status, param):
    assert r.status_code == status, r.text
    assert r.json()["error"]["param"] == param, r.text
    return r.json()["error"]


@pytest.mark.parametrize("path", PATHS)
def test_shape(shared, fake, path):
    answer = rerank(shared, path=path)
    assert answer["model"] == MODEL and answer["id"].startswith("rerank-")
    results = answer["results"]
    assert [r["index"] for r in results] == [1, 4, 3, 0, 2]  # equal ones in their order
    assert [r["document"]["text"] for r in results] == [DOCUMENTS[r["index"]] for r in results]
    scores = [r["relevance_score"] for r in results]
    assert scores == sorted(scores, reverse=True) and all(0 < s < 1 for s in scores) and scores[0] == scores[1]
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > sum(map(len, DOCUMENTS))


def test_the_shape_of_text_embeddings_inference(shared, fake):
    body, plain = {"query": "which?", "texts": DOCUMENTS}, rerank(shared)["results"]
    answer = shared.post("/rerank", body).json()
    assert answer == [{"index": r["index"], "score": r["relevance_score"]} for r in plain]
    answer = shared.post("/rerank", {**body, "return_text": True, "top_n": 2, "raw_scores": False}).json()
    assert answer == [{"index": r["index"], "score": r["relevance_score"], "text": r["document"]["text"]} for r in plain[:2]]
    error(shared.post(PATH, {**body, "documents": DOCUMENTS}), 400, "texts")
    error(shared.post(PATH, {**body, "raw_scores": True}), 400, "raw_scores")
    error(shared.post(PATH, {**body, "return_text": 1}), 400, "return_text")
    error(shared.post(PATH, {"query": "q", "texts": "a"}), 400, "texts")
    error(shared.post(PATH, {"query": "q", "texts": ["a", 5]}), 400, "texts[1]")


def test_top_n(shared, fake):
    assert [r["index"] for r in rerank(shared, top_n=2)["results"]] == [1, 4]
    assert len(rerank(shared, top_n=99)["results"]) == len(DOCUMENTS)
    error(shared.post(PATH, {"query": "q", "documents": ["a"], "top_n": 0}), 400, "top_n")


def test_scores_are_probabilities(shared):
    assert rerank(shared, use_activation=True)["results"] == rerank(shared)["results"]
    assert error(shared.post(PATH, {"query": "q", "documents": ["a"], "use_activation": False}), 400, "use_activation")["code"] == "unsupported_parameter"
    error(shared.post(SCORE, {"text_1": "q", "text_2": "a", "use_activation": 1}), 400, "use_activation")


def test_documents_come_back_on_request(shared):
    assert all("document" not in r for r in rerank(shared, return_documents=False)["results"])
    odd = ["naïve 🙂", 'quo"te\n', "nul \u0000 byte", ""]
    results = rerank(shared, odd, return_documents=True)["results"]
    assert {r["index"]: r["document"]["text"] for r in results} == dict(enumerate(odd))


def test_documents_may_be_objects(shared, fake):
    plain, objects = rerank(shared), rerank(shared, [{"text": d, "title": "x"} for d in DOCUMENTS])
    assert plain["results"] == objects["results"]


def test_a_score_depends_on_its_pair_alone(shared):
    together = {r["index"]: r["relevance_score"] for r in rerank(shared)["results"]}
    for i, document in enumerate(DOCUMENTS):
        assert rerank(shared, [document])["results"][0]["relevance_score"] == together[i]


def test_scores(shared):
    def score(first, second):
        r = shared.post(SCORE, {"text_1": first, "text_2": second})
        assert r.status_code == 200, r.text
        answer = r.json()
        assert answer["object"] == "list" and answer["model"] == MODEL and answer["usage"]["total_tokens"] > 0
        assert [d["index"] for d in answer["data"]] == list(range(len(answer["data"])))
        return [d["score"] for d in answer["data"]]

    one, many = score("which?", "bb"), score("which?", DOCUMENTS)
    assert len(one) == 1 and one[0] == many[0] and len(many) == len(DOCUMENTS)
    assert score(["which?"] * len(DOCUMENTS), DOCUMENTS) == many
    ranked = {r["index"]: r["relevance_score"] for r in rerank(shared)["results"]}
    assert [ranked[i] for i in range(len(many))] == many
    assert all(math.isfinite(s) for s in many)


@pytest.mark.parametrize("body,param", [
    ({"documents": ["a"]}, "query"), ({"query": 5, "documents": ["a"]}, "query"), ({"query": "q"}, "documents"),
    ({"query": "q", "documents": "a"}, "documents"), ({"query": "q", "documents": []}, "documents"),
    ({"query": "q", "documents": ["a", 5]}, "documents[1]"), ({"query": "q", "documents": [{"title": "x"}]}, "documents[0]"),
    ({"query": "q", "documents": ["a"], "top_n": "x"}, "top_n"),
    ({"query": "q", "documents": ["a"], "return_documents": 1}, "return_documents"),
    ({"query": "q", "documents": ["a"], "instruction": 1}, "instruction"),
    ({"query": "q", "documents": ["a"], "max_tokens_per_doc": 9}, "max_tokens_per_doc"),
    ({"query": "q", "documents": ["a"] * 2049}, "documents"),
])
def test_errors_name_the_field(shared, body, param):
    error(shared.post(PATH, body), 400, param)


@pytest.mark.parametrize("body,param", [
    ({"text_2": "a"}, "text_1"), ({"text_1": "a"}, "text_2"), ({"text_1": 1, "text_2": "a"}, "text_1"),
    ({"text_1": ["a", "b"], "text_2": ["a"]}, "text_2"), ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
    ({"text_1": "a", "text_2": ["a", {}]}, "text_2[1]"), ({"text_1": "a", "text_2": []}, "text_2"),
])
def test_errors_of_scores_name_the_field(shared, body, param):
    error(shared.post(SCORE, body), 400, param)


def test_long_documents_are_named(shared):
    e = error(shared.post(PATH, {"query": "q", "documents": ["a", "x" * LENGTH, "b"]}), 400, "documents[1]")
    assert e["code"] == "context_length_exceeded"
    error(shared.post(SCORE, {"text_1": "q", "text_2": "x" * LENGTH}), 400, "text_2")


def test_many_documents(start, fake):
    d = start("--max-queue", "8", "--max-num-seqs", "4")
    results = rerank(d, ["x" * (i % 50) for i in range(500)], top_n=20)["results"]
    assert [r["index"] for r in results] == [49 + 50 * i for i in range(10)] + [48 + 50 * i for i in range(10)]
    d.wait_idle()


def test_models_that_cannot_be_asked(start, fake):
    d = start(env={"KEEPD_FAKE_NO_TEMPLATE": "1"})
    e = d.post(PATH, {"query": "q", "documents": ["a"]}).json()["error"]
    assert e["code"] == "unsupported_model" and "--chat-template" in e["message"]
