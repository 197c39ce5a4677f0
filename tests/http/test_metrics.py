"""/metrics row by row against what readers of vLLM's expect: names, types, labels, buckets. And the log."""
import json
import math
import shutil
import subprocess

import pytest
import requests
from conftest import MODEL, chat_body
from prometheus_client.parser import text_string_to_metric_families

SECONDS = [.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560]
TOKEN = [.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
REQUEST = [.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
LENGTHS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]  # buckets up to the context's length
STEPS = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
BUCKETS = {
    "time_to_first_token_seconds": SECONDS, "inter_token_latency_seconds": TOKEN,
    "request_time_per_output_token_seconds": TOKEN, "e2e_request_latency_seconds": REQUEST,
    "request_queue_time_seconds": REQUEST, "request_inference_time_seconds": REQUEST,
    "request_prefill_time_seconds": REQUEST, "request_decode_time_seconds": REQUEST, "request_prompt_tokens": LENGTHS,
    "request_generation_tokens": LENGTHS, "request_max_num_generation_tokens": LENGTHS,
    "request_params_max_tokens": LENGTHS, "request_prefill_kv_computed_tokens": LENGTHS,
    "request_params_n": [1, 2, 5, 10, 20], "request_num_preemptions": [0, 1, 2, 5, 10], "iteration_tokens_total": STEPS}
GAUGES = {"num_requests_running": (), "num_requests_waiting": (), "num_requests_waiting_by_reason": ("reason",),
          "kv_cache_usage_perc": (), "engine_sleep_state": ("sleep_state",),
          "lora_requests_info": ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
          "cache_config_info": ("block_size", "num_gpu_blocks", "cache_dtype"),
          "gpu_cache_usage_perc": (), "gpu_prefix_cache_hit_rate": ()}
COUNTERS = {"prompt_tokens": (), "prompt_tokens_by_source": ("source",), "prompt_tokens_cached": (),
            "generation_tokens": (), "request_success": ("finished_reason",), "num_preemptions": (),
            "prefix_cache_queries": (), "prefix_cache_hits": (), "external_prefix_cache_queries": (),
            "external_prefix_cache_hits": (), "mm_cache_queries": (), "mm_cache_hits": (), "corrupted_requests": (),
            "gpu_prefix_cache_queries": (), "gpu_prefix_cache_hits": ()}
ALIASES = {"gpu_cache_usage_perc": "kv_cache_usage_perc", "gpu_prefix_cache_hits_total": "prefix_cache_hits_total",
           "gpu_prefix_cache_queries_total": "prefix_cache_queries_total"}


@pytest.fixture
def families(shared):
    shared.chat(max_tokens=4)
    return {f.name: f for f in text_string_to_metric_families(shared.get("/metrics").text)}


@pytest.mark.parametrize("kind, rows", [("gauge", GAUGES), ("counter", COUNTERS)])
def test_names_types_and_labels(shared, families, kind, rows):
    engines = shared.engines()
    for name, labels in rows.items():
        family = families[f"vllm:{name}"]
        assert family.type == kind and family.samples, name
        for sample in family.samples:
            assert set(sample.labels) == {"model_name", "engine", *labels}, name
            assert sample.labels["model_name"] == MODEL and sample.labels["engine"] in engines


@pytest.mark.parametrize("name", BUCKETS)
def test_buckets(families, name):
    family = families[f"vllm:{name}"]
    bounds = [float(s.labels["le"]) for s in family.samples
              if s.name.endswith("_bucket") and s.labels["engine"] == "0"]
    assert family.type == "histogram" and bounds == [*BUCKETS[name], math.inf]


def test_older_names_have_the_same_values(families):
    values = {s.name: s.value for f in families.values() for s in f.samples
              if len(s.labels) == 2 and s.labels["engine"] == "0"}
    assert {k: values[f"vllm:{k}"] for k in ALIASES} == {k: values[f"vllm:{v}"] for k, v in ALIASES.items()}


def test_promtool_minds_only_names_that_were_given(shared):
    """Debian's package prometheus has it. Its style rules forbid what vLLM's names have (a colon; a histogram that ends
    in _total) and one gauge's name; of everything else there is no complaint, and the text parses."""
    if not shutil.which("promtool"):
        pytest.skip("skip: promtool is not installed")
    shared.chat(max_tokens=4)
    run = subprocess.run(["promtool", "check", "metrics"], input=shared.get("/metrics").text, capture_output=True,
                         text=True, timeout=60)
    given = ["metric names should not contain ':'", "iteration_tokens_total non-counter", "keepd_pages_total non-counter"]
    complaints = [line for line in (run.stdout + run.stderr).splitlines() if not any(text in line for text in given)]
    assert run.returncode in (0, 3) and not complaints, run.stderr
    assert all(line.startswith(("vllm:", "keepd_pages_total ")) for line in run.stderr.splitlines())


def test_conversations_in_memory_and_on_disk(families):
    for name in ("keepd_conversations", "keepd_conversations_on_disk", "keepd_state_bytes", "keepd_queue_tokens"):
        assert families[name].type == "gauge"
    reasons = {s.labels["reason"] for s in families["keepd_conversation_lost"].samples}
    assert {"new", "unreadable"} <= reasons and "(null)" not in reasons and families["keepd_conversation_lost"].type == "counter"


def test_log_lines_as_json(start):
    daemon = start("--log-format", "json", "--log-level", "debug")
    r = daemon.post("/v1/chat/completions", chat_body(max_tokens=3, ignore_eos=True), headers={"X-Request-Id": "abc-1"})
    assert r.status_code == 200
    requests.get(daemon.url + "/%22%5c%ff", timeout=60)

    def lines():
        return [json.loads(line) for line in list(daemon.errors) if line.startswith("{") and line.endswith("\n")]
    daemon.wait("both requests", lambda: len([e for e in lines() if e["text"] == "request"]) >= 2)
    work, unknown = [e for e in lines() if e["text"] == "request"][:2]
    assert work["level"] == "info" and work["request_id"] == "abc-1" and work["status"] == 200
    assert work["id"] == r.json()["id"] and work["completion_tokens"] == 3 and work["path"] == "/v1/chat/completions"
    assert unknown["level"] == "debug" and unknown["status"] == 404 and unknown["path"] == '/"\\?'


def test_log_lines_for_people(start):
    daemon = start()
    daemon.chat(max_tokens=1)
    daemon.wait("the line", lambda: any(" info  request request_id=" in line for line in daemon.errors))
    line = next(line for line in daemon.errors if "request_id=" in line)
    assert line[:2] == "20" and " status=200 " in line and " completion_tokens=1" in line
