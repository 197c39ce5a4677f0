"""The other endpoints."""
import requests
from conftest import LENGTH, MODEL, chat_body
from prometheus_client.parser import text_string_to_metric_families

TEXT = "/v1/completions"
GAUGES = """vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc vllm:cache_config_info
vllm:gpu_cache_usage_perc vllm:gpu_prefix_cache_hit_rate keepd_pages_total keepd_pages_used keepd_pages_reserved
keepd_pages_retained keepd_pages_superseded keepd_pages_pinned keepd_entries_kept keepd_entries_superseded keepd_conversations""".split()
COUNTERS = """vllm:prompt_tokens vllm:generation_tokens vllm:request_success vllm:num_preemptions
vllm:prefix_cache_queries vllm:prefix_cache_hits keepd_entries_evicted keepd_evictions keepd_preemptions""".split()
HISTOGRAMS = """vllm:time_to_first_token_seconds vllm:inter_token_latency_seconds vllm:e2e_request_latency_seconds
vllm:request_time_per_output_token_seconds vllm:request_queue_time_seconds vllm:request_prefill_time_seconds
vllm:request_decode_time_seconds vllm:request_inference_time_seconds vllm:request_prompt_tokens
vllm:request_generation_tokens vllm:request_max_num_generation_tokens vllm:iteration_tokens_total
keepd_eviction_seconds""".split()


def test_token_ids_beside_the_texts(shared):
    """As in vLLM, a chat's prompt ids are at the top level, a completion's in its choice."""
    body = chat_body(max_tokens=3, ignore_eos=True, return_token_ids=True)
    answer = shared.post("/v1/chat/completions", body).json()
    prompt, ids = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    assert len(prompt) == answer["usage"]["prompt_tokens"] and len(ids) == 3
    assert prompt == shared.post("/tokenize", {"model": MODEL, "messages": body["messages"]}).json()["tokens"]
    text = shared.post("/v1/completions", {"model": MODEL, "prompt": [7, 8, 9], "max_tokens": 2, "ignore_eos": True,
                                           "return_token_ids": True}).json()
    assert text["choices"][0]["prompt_token_ids"] == [7, 8, 9] and len(text["choices"][0]["token_ids"]) == 2
    assert shared.chat(max_tokens=3).json()["choices"][0]["token_ids"] is None


def test_health_and_version(shared):
    r = shared.get("/health")
    assert r.status_code == 200 and r.json() == {"status": "ok"}
    assert shared.get("/version").json()["version"].count(".") == 2


def test_models(shared):
    models = shared.get("/v1/models").json()
    assert models["object"] == "list"
    assert [m["id"] for m in models["data"]] == [MODEL, "alias"]
    for m in models["data"]:
        assert m["object"] == "model" and m["max_model_len"] == LENGTH and m["root"] == MODEL
        assert shared.get(f"/v1/models/{m['id']}").json() == m


def test_a_long_model_name_is_found(start):
    name = "m" * 256
    daemon = start("--served-model-name", f"short,{name}")
    assert daemon.get(f"/v1/models/{name}").json()["id"] == name
    assert daemon.get(f"/v1/models/{name}m").status_code == 404


def test_metrics_parse(shared):
    shared.chat(max_tokens=4)
    r = shared.get("/metrics")
    assert r.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {f.name: f for f in text_string_to_metric_families(r.text)}
    assert {n for n in GAUGES if families[n].type == "gauge"} == set(GAUGES)
    assert {n for n in COUNTERS if families[n].type == "counter"} == set(COUNTERS)
    assert {n for n in HISTOGRAMS if families[n].type == "histogram"} == set(HISTOGRAMS)
    engines = shared.engines()
    for family in families.values():
        for sample in family.samples:
            assert sample.labels["model_name"] == MODEL and sample.labels["engine"] in engines
        for engine in engines if family.type == "histogram" else ():
            samples = [s for s in family.samples if s.labels["engine"] == engine]
            buckets = [s.value for s in samples if s.name.endswith("_bucket")]
            count = next(s.value for s in samples if s.name.endswith("_count"))
            assert buckets == sorted(buckets) and buckets[-1] == count


def test_metrics_count(start):
    daemon = start()
    daemon.chat(max_tokens=5, ignore_eos=True)
    daemon.chat(max_tokens=3, ignore_eos=True, stream=True)
    m = daemon.metrics()
    assert daemon.finished("length") == 2 and m["vllm:generation_tokens_total",] == 8
    assert m["vllm:request_generation_tokens_sum",] == 8
    assert m["vllm:time_to_first_token_seconds_count",] == m["vllm:e2e_request_latency_seconds_count",] == 2
    assert m["vllm:prompt_tokens_total",] == m["vllm:request_prompt_tokens_sum",] > 0
    assert m["keepd_conversations",] == daemon.kv()["conversation_count"]


def test_tokenize_round_trip(shared):
    text = "Hello, w\u00f6rld \U0001f600!"
    r = shared.post("/tokenize", {"model": MODEL, "prompt": text, "return_token_strs": True,
                                  "add_special_tokens": False}).json()
    assert r["count"] == len(r["tokens"]) == len(r["token_strs"]) and r["max_model_len"] == LENGTH
    assert shared.post("/detokenize", {"model": MODEL, "tokens": r["tokens"]}).json() == {"prompt": text, "content": text}
    assert shared.post("/tokenize", {"prompt": ""}).json()["token_strs"] is None
    assert shared.post("/detokenize", {"tokens": []}).json() == {"prompt": "", "content": ""}


def test_tokenize_chat_is_what_chat_uses(shared):
    messages = chat_body("count me")["messages"]
    r = shared.post("/tokenize", {"messages": messages}).json()
    assert r["count"] == shared.chat("count me").json()["usage"]["prompt_tokens"]
    shorter = shared.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()
    assert shorter["count"] < r["count"] and r["tokens"][:shorter["count"]] == shorter["tokens"]


def test_special_tokens_in_text_are_text(shared):
    """Text typed by a user cannot end a turn."""
    typed = shared.post("/tokenize", {"messages": chat_body("<|im_end|>")["messages"]}).json()["count"]
    empty = shared.post("/tokenize", {"messages": chat_body("")["messages"]}).json()["count"]
    assert typed - empty > 1
    plain = shared.post("/tokenize", {"prompt": "<|im_end|>", "add_special_tokens": False,
                                      "parse_special": False}).json()["count"]
    special = shared.post("/tokenize", {"prompt": "<|im_end|>", "add_special_tokens": False,
                                        "parse_special": True}).json()["count"]
    assert plain > 1 and special == 1


def test_completion_prompts(shared, fake):
    ids = shared.post("/tokenize", {"prompt": "abc", "add_special_tokens": False}).json()["tokens"]
    texts = {shared.post(TEXT, {"prompt": p, "temperature": 0, "max_tokens": 3}).json()["choices"][0]["text"]
             for p in ("abc", ["abc"], ids, [ids])}
    assert texts == {"abc"}


def test_echo_scores(shared):
    """max_tokens 0 and 1, as used to compute likelihoods."""
    body = {"prompt": "one two three", "echo": True, "logprobs": 2, "temperature": 0}
    scored = shared.post(TEXT, {**body, "max_tokens": 0}).json()
    longer = shared.post(TEXT, {**body, "max_tokens": 1}).json()
    a, b = (r["choices"][0]["logprobs"] for r in (scored, longer))
    assert scored["choices"][0]["text"] == "one two three" and scored["choices"][0]["finish_reason"] == "length"
    assert scored["usage"]["completion_tokens"] == 0 and longer["usage"]["completion_tokens"] == 1
    n = scored["usage"]["prompt_tokens"]
    assert [len(a[k]) for k in a] == [n] * 4 and [len(b[k]) for k in b] == [n + 1] * 4
    assert a["token_logprobs"][0] is None and a["top_logprobs"][0] is None
    assert all(x <= 0 for x in a["token_logprobs"][1:])
    assert a["token_logprobs"] == b["token_logprobs"][:n] and a["text_offset"] == b["text_offset"][:n]
    assert all(t in top for t, top in zip(a["tokens"][1:], a["top_logprobs"][1:])), "the token itself is among them"
    again = shared.post(TEXT, {**body, "max_tokens": 0}).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "scoring never continues a conversation"


def test_echo_without_scores(shared):
    r = shared.post(TEXT, {"prompt": "one two", "echo": True, "max_tokens": 1}).json()
    assert r["choices"][0]["text"].startswith("one two") and r["choices"][0]["logprobs"] is None


def test_partial_characters_in_scores(shared, fake):
    r = shared.post(TEXT, {"prompt": "\u00e9a", "echo": True, "logprobs": 1, "max_tokens": 0}).json()
    scores = r["choices"][0]["logprobs"]
    assert scores["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "a"] and scores["text_offset"] == [0, 0, 1]


def test_kv_shows_what_runs_and_stays(start):
    daemon = start()
    before = daemon.kv()
    assert before["running"] == before["conversations"] == []
    assert set(before["pool"]) == {"pages_total", "pages_used", "pages_reserved", "pages_retained", "page_bytes",
                                   "page_slots"}
    usage = daemon.chat("remember me", max_tokens=8).json()["usage"]
    daemon.wait_idle()
    after = daemon.kv()
    assert after["conversation_count"] == 1 and after["pool"]["pages_retained"] > 0
    row = after["conversations"][0]
    assert abs(row["tokens"] - usage["total_tokens"]) <= 1 and row["pages"] == after["pool"]["pages_retained"]
    daemon.chat("forget me", max_tokens=4, kv={"retain": False})
    daemon.wait_idle()
    assert daemon.kv()["conversation_count"] == 1


def test_kv_reports(shared):
    details = shared.chat(kv={"policy": "streaming", "budget": 64, "report": "lengths"}).json()["usage"]["kv_details"]
    assert details["policy"] == "streaming" and details["budget"] == 64 and "positions" not in details
    assert sum(map(sum, details["lengths"])) == details["kept_entries"]
    assert "lengths" not in shared.chat().json()["usage"]["kv_details"]


def test_prompt_beyond_the_budget_is_accepted_and_reported(shared):
    """A prompt longer than the budget but shorter than the context is compressed, and the answer says so."""
    r = shared.chat("many words here " * 20, max_tokens=2, kv={"budget": 32, "buffer": 16, "chunk": 32,
                                                               "policy": "streaming"})
    assert r.status_code == 200, r.text
    details = r.json()["usage"]["kv_details"]
    assert details["evicted_entries"] > 0 and details["seen_tokens"] > 64


def test_spaces(shared):
    """Nothing is shared between salts."""
    messages = [{"role": "user", "content": "a secret prefix that is long enough " * 3}]
    first = shared.chat(messages=messages, cache_salt="alice").json()
    messages += [{"role": "assistant", "content": first["choices"][0]["message"]["content"]},
                 {"role": "user", "content": "go on"}]
    for salt in ("bob", None):
        usage = shared.chat(messages=messages, cache_salt=salt, kv={"retain": False}).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    usage = shared.chat(messages=messages, cache_salt="alice").json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_ids_are_unique(shared):
    ids = [shared.chat(max_tokens=1).json()["id"] for _ in range(5)]
    assert len(set(ids)) == 5
    requests_ids = {requests.get(shared.url + "/version", timeout=60).headers["x-request-id"] for _ in range(5)}
    assert len(requests_ids) == 5
