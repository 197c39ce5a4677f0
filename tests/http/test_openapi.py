"""/openapi.json is exact: real answers fit it, and it promises what is true. (That it names the fields that are read
is tests/unit/server/oai/test_openapi.c.)"""
import json

import jsonschema
import pytest
import requests
from conftest import MODEL, ROOT, chat_body, events

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DOCUMENT = json.loads((ROOT / "server/oai/openapi.json").read_text())
SCHEMAS = DOCUMENT["components"]["schemas"]
GOOD = {CHAT: chat_body(max_tokens=3), TEXT: {"model": MODEL, "prompt": "abc", "max_tokens": 3},
        "/tokenize": {"prompt": "abc"}, "/detokenize": {"tokens": [65]},
        "/completion": {"prompt": "abc", "n_predict": 3},
        "/apply-template": {"messages": [{"role": "user", "content": "hi"}]},
        "/v1/responses": {"input": "hi", "max_output_tokens": 3},
        "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
        "/v1/chat/completions/input_tokens": chat_body(max_tokens=3),
        "/v1/embeddings": {"input": ["abc", "de"]}, "/v1/rerank": {"query": "a", "documents": ["b", {"text": "c"}]},
        "/v2/rerank": {"query": "a", "documents": ["b"], "return_documents": False},
        "/v1/score": {"text_1": "a", "text_2": ["b", "c"]},
        "/api/chat": {"messages": [{"role": "user", "content": "hi"}], "stream": False, "options": {"num_predict": 3}},
        "/api/generate": {"prompt": "hi", "stream": False, "options": {"num_predict": 3}},
        "/api/embed": {"input": ["abc", "de"]}, "/api/embeddings": {"prompt": "abc"}, "/api/show": {"model": MODEL}}
INVOCATION = "/invocations"  # has the bodies of others


def check(name, value):
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    jsonschema.Draft202012Validator(schema).validate(value)


def request_schema(path):
    reference = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    return reference.rsplit("/", 1)[1]


def answer_schema(path, method):
    content = DOCUMENT["paths"][path][method]["responses"]["200"]["content"]
    return content.get("application/json", {}).get("schema", {}).get("$ref", "").rsplit("/", 1)[-1]


def test_document(shared):
    assert shared.get("/openapi.json").json() == DOCUMENT
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema({**schema, "components": DOCUMENT["components"]})


def test_every_get_answers_as_described(shared):
    shared.chat("leave something behind", max_tokens=2)
    stored = shared.post("/v1/responses", GOOD["/v1/responses"]).json()["id"]
    for path, methods in DOCUMENT["paths"].items():
        if "get" not in methods or path.endswith("/state"):  # needs a state directory: tests/e2e/test_move.py
            continue
        r = shared.get(path.replace("{id}", stored if "responses" in path else MODEL))
        assert r.status_code == 200, path
        if name := answer_schema(path, "get"):
            check(name, r.json())


def test_the_routes_that_take_a_model_say_so(shared):
    """?model= names the model of a question; where it means nothing, it is ignored."""
    for path, methods in DOCUMENT["paths"].items():
        if "get" in methods and "{" not in path:
            taken = {"$ref": "#/components/parameters/Model"} in methods["get"].get("parameters", [])
            r = shared.get(path + "?model=other")
            assert (r.status_code == 404) == taken, path
            assert not taken or r.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("path", GOOD)
def test_every_post_answers_as_described(shared, path):
    check(request_schema(path), GOOD[path])
    r = shared.post(path, GOOD[path])
    assert r.status_code == 200, r.text
    check(answer_schema(path, "post"), r.json())


def test_invocations(shared):
    """SageMaker's route answers as the one that the body belongs to."""
    for path in (CHAT, TEXT):
        body = {**GOOD[path], "temperature": 0}
        own, other = (shared.post(p, body).json() for p in (INVOCATION, path))
        assert own["object"] == other["object"] and own["choices"] == other["choices"]
        assert own["id"].split("-")[0] == other["id"].split("-")[0]
    chunks = events(requests.post(shared.url + INVOCATION, json={**GOOD[TEXT], "stream": True}, stream=True, timeout=60))
    check("CompletionChunk", json.loads(chunks[0]))
    assert shared.post(INVOCATION, {}).json()["error"]["param"] == "messages"
    assert shared.post(INVOCATION, {"prompt": {}}).json()["error"]["param"] == "prompt"
    for path in ("/v1/embeddings", "/v1/rerank", "/v1/score"):
        own, other = (shared.post(p, GOOD[path]).json() for p in (INVOCATION, path))
        for key in own.keys() - {"id", "created"} | other.keys() - {"id", "created"}:
            assert own[key] == other[key], (path, key)
    names = [{"$ref": f"#/components/schemas/{name}Request"} for name in ("Chat", "Completion", "Embeddings", "Rerank", "Score")]
    assert DOCUMENT["paths"][INVOCATION]["post"]["requestBody"]["content"]["application/json"]["schema"] == {"anyOf": names}


def test_ids_have_a_maximum(shared):
    """An id that the description permits is read or refused as one that the model does not have."""
    most = SCHEMAS["DetokenizeRequest"]["properties"]["tokens"]["items"]["maximum"]
    for value, code in ((most, "invalid_value"), (most + 1, "invalid_value")):
        r = shared.post("/detokenize", {"tokens": [value]})
        assert (r.status_code, r.json()["error"]["code"]) == (400, code)


def test_alternatives_are_bounded_by_the_server_alone():
    """--max-logprobs may allow any number, and -1 (test_as_many_alternatives_as_the_server_allows)."""
    for path, fields in ((CHAT, ("top_logprobs", "prompt_logprobs")), (TEXT, ("logprobs", "prompt_logprobs")),
                         ("/completion", ("n_probs", "logprobs")), ("/v1/responses", ("top_logprobs",))):
        for field in fields:
            for value in (-1, 0, 21, 2**31 - 1):
                check(request_schema(path), {**GOOD[path], field: value})
            with pytest.raises(jsonschema.ValidationError):
                check(request_schema(path), {**GOOD[path], field: -2})


def test_full_answers_fit(shared):
    wide = dict(n=2, logprobs=True, top_logprobs=2, prompt_logprobs=2, stop=["x"], stop_token_ids=[1],
                return_token_ids=True, kv={"report": "trace"})
    check("ChatRequest", chat_body(**wide))
    check("ChatCompletion", shared.chat(**wide).json())
    text = {**GOOD[TEXT], "prompt": ["a", "bc"], "echo": True, "logprobs": 2, "prompt_logprobs": 0, "best_of": 1,
            "return_token_ids": True}
    check("CompletionRequest", text)
    check("Completion", shared.post(TEXT, text).json())
    check("Tokens", shared.post("/tokenize", {"prompt": "a", "return_token_strs": True}).json())


@pytest.mark.parametrize("path,name,options", [
    (CHAT, "ChatChunk", {"include_usage": True}), (TEXT, "CompletionChunk", {"include_usage": True}),
    (CHAT, "ChatChunk", {"include_usage": True, "continuous_usage_stats": True}), (TEXT, "CompletionChunk", None)])
def test_chunks_fit(shared, path, name, options):
    body = {**GOOD[path], "stream": True, "stream_options": options, "logprobs": 1 if path == TEXT else True, "n": 2}
    for event in events(requests.post(shared.url + path, json=body, stream=True, timeout=60))[:-1]:
        check(name, json.loads(event))


def test_errors_fit(shared):
    for r in (shared.chat(temperature=-1), shared.get("/nothing"), shared.get(CHAT), shared.chat(model="x"),
              shared.http.post(shared.url + CHAT, data="{", headers={"Content-Type": "application/json"}, timeout=60)):
        assert r.status_code >= 400
        check("Error", r.json())
    check("MessageError", shared.post("/v1/messages", {}).json())
    check("OllamaError", shared.post("/api/chat", {"model": "x"}).json())


def test_lines_fit(shared):
    for path, name in (("/api/chat", "OllamaChat"), ("/api/generate", "OllamaText")):
        body = {**GOOD[path], "stream": True, "logprobs": True, "return_progress": True, "kv": {"report": "trace"}}
        for line in shared.post(path, body).text.splitlines():
            check(name, json.loads(line))
        check(name, shared.post(path, {}).json())  # no prompt: the model is loaded


@pytest.mark.parametrize("path", GOOD)
def test_null_is_absent(shared, path):
    """Every field that may be left out may be null."""
    schema = SCHEMAS[request_schema(path)]
    needed = {TEXT: {"prompt"}, "/tokenize": {"prompt"}, "/v1/responses": {"input"}, "/api/chat": {"messages", "stream"},
              "/api/generate": {"prompt", "stream"}, "/api/show": {"model"}, "/v1/rerank": {"query", "documents"},
              "/v2/rerank": {"query", "documents"}}.get(path) or set(schema["required"])
    body = {**dict.fromkeys(schema["properties"]), **{k: GOOD[path][k] for k in needed}}
    if path in (CHAT, TEXT):
        body["max_tokens"] = 2
        body["kv"] = dict.fromkeys(SCHEMAS["Kv"]["properties"])
    r = shared.post(path, body)
    assert r.status_code == 200, r.text
    strict = {k: v for k, v in body.items() if v is not None}
    assert set(r.json()) == set(shared.post(path, strict).json())


def test_other_methods_are_refused(shared):
    for path, methods in DOCUMENT["paths"].items():
        for method in {"get", "post", "put", "delete", "patch"} - set(methods):
            r = shared.http.request(method, shared.url + path.replace("{id}", MODEL), json={}, timeout=60)
            if r.status_code == 200:
                continue  # another entry of the same path
            assert r.status_code == 405, (method, path)
            allowed = {m.strip().lower() for m in r.headers["allow"].split(",")} - {"head", "options"}
            assert allowed == set(methods), path


def test_every_key_but_health(start):
    daemon = start("--api-key", "secret")
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            r = requests.request(method, daemon.url + path.replace("{id}", MODEL), json={}, timeout=60)
            assert (r.status_code == 401) == ("security" not in operation), (method, path)


@pytest.mark.slow
def test_schemathesis(start):
    """Random bodies made from the description cause no crash and no undescribed answer."""
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.specs.openapi.checks import positive_data_acceptance
    daemon = start(env={"KEEPD_FAKE_FIM": "1"})
    # a request that fits the description may still contradict itself: min_tokens above max_tokens, a stream with prompt_logprobs
    tried = 0
    for result in schemathesis.openapi.from_url(f"{daemon.url}/openapi.json").get_all_operations():
        @settings(max_examples=40, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
                  suppress_health_check=list(HealthCheck))
        @given(case=result.ok().as_strategy())
        def run(case):
            nonlocal tried
            tried += 1
            case.call_and_validate(timeout=60, excluded_checks=[positive_data_acceptance])
        run()
    assert tried > 200
    daemon.wait_idle()
