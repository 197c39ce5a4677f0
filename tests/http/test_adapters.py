"""LoRA adapters over HTTP: names, lists, loading and unloading. What they compute is in tests/e2e/test_lora.py."""
import concurrent.futures as futures
import re
import subprocess

import pytest
import requests
from conftest import BINARY, FAKE, MODEL, ROOT, chat_body

pytestmark = pytest.mark.skipif(not FAKE, reason="skip: the adapters are the fake's")
SQL = ("--lora", "sql=/adapters/sql", "--lora", "team/law=/adapters/law")


def ask(daemon, model, text="hello", **fields):
    return daemon.post("/v1/chat/completions", {**chat_body(text, **fields), "model": model})


def load(daemon, status=200, **body):
    r = daemon.post("/v1/load_lora_adapter", body)
    assert r.status_code == status, r.text
    return r.json()


def unload(daemon, status=200, **body):
    r = daemon.post("/v1/unload_lora_adapter", body)
    assert r.status_code == status, r.text
    return r.json()


def test_requests_name_an_adapter_as_their_model(start):
    daemon = start(*SQL)
    for model, shown in (("sql", "sql"), (f"{MODEL}:sql", "sql"), ("alias:team/law", "team/law"), (MODEL, MODEL), ("alias", MODEL)):
        r = ask(daemon, model)
        assert r.status_code == 200 and r.json()["model"] == shown, r.text
    for model in ("law", f"{MODEL}:law", f"{MODEL}:", "sql:sql", f"{MODEL}:{MODEL}", ":sql"):
        r = ask(daemon, model)
        assert r.status_code == 404 and r.json()["error"]["code"] == "model_not_found", r.text
    body = {"model": "sql", "prompt": "a", "max_tokens": 2}
    assert daemon.post("/v1/completions", body).json()["model"] == "sql"
    assert daemon.post("/v1/embeddings", {"model": "sql", "input": "a"}).json()["model"] == "sql"
    assert daemon.post("/v1/responses", {"model": "sql", "input": "a", "max_output_tokens": 2}).json()["model"] == "sql"
    assert daemon.post("/tokenize", {"model": "sql", "prompt": "a"}).status_code == 200
    assert daemon.post("/api/chat", {"model": "sql:latest", "stream": False, "messages": [{"role": "user", "content": "a"}]}).status_code == 200


def test_lists_name_them(start):
    daemon = start(*SQL)
    listed = daemon.get("/v1/models").json()
    models = {m["id"]: m for m in listed["data"]}
    assert list(models) == [MODEL, "alias", "sql", "team/law"] and listed["last_id"] == "team/law"
    assert models["sql"]["parent"] == MODEL and models["sql"]["root"] == "sql" and models[MODEL]["parent"] is None
    assert daemon.get("/v1/models/team/law").json() == models["team/law"]
    assert daemon.get(f"/v1/models/{MODEL}:sql").json() == models["sql"]
    assert daemon.get("/v1/models/law").status_code == 404
    info = daemon.get("/server_info").json()
    assert [a["name"] for a in info["lora_adapters"]] == ["sql", "team/law"] and info["max_loras"] == 16
    assert len(info["lora_adapters"][0]["digest"]) == 64
    ask(daemon, "sql")
    ask(daemon, f"{MODEL}:sql")
    assert daemon.metrics()["keepd_adapters",] == 2 and daemon.metrics()["keepd_adapter_bytes",] > 0
    assert daemon.metrics()["keepd_adapter_requests_total", ("adapter", "sql")] == 2


def test_conversations_keep_to_their_adapter(start):
    daemon = start(*SQL)
    first = ask(daemon, "sql", "one two three").json()
    more = {"messages": [{"role": "user", "content": "one two three"}, first["choices"][0]["message"], {"role": "user", "content": "x"}]}

    def cached(model):
        return ask(daemon, model, **more).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(MODEL) == 0 and cached("team/law") == 0 and cached("sql") > 0
    for model in ("sql", "team/law", MODEL):
        assert daemon.get("/v1/conversations", params={"model": model}).json()["data"]
    ids = [{c["id"] for c in daemon.get("/v1/conversations", params={"model": m}).json()["data"]} for m in ("sql", MODEL)]
    assert not ids[0] & ids[1]
    assert daemon.get("/v1/conversations", params={"model": "law"}).status_code == 404


def test_loading_needs_a_folder(start):
    daemon = start(*SQL)
    assert load(daemon, 403, lora_name="x", lora_path="x")["error"]["code"] == "adapters_fixed"
    assert unload(daemon, 403, lora_name="sql")["error"]["code"] == "adapters_fixed"
    assert ask(daemon, "sql").status_code == 200


def test_adapters_come_and_go(start):
    daemon = start("--lora-dir", "/adapters", "--max-loras", "2")
    assert load(daemon, lora_name="x", lora_path="x") == {"id": "x", "object": "lora_adapter", "parent": MODEL, "loaded": True}
    assert ask(daemon, "x").status_code == 200
    assert load(daemon, 400, lora_name="x", lora_path="y")["error"]["param"] == "lora_name"
    error = load(daemon, 400, lora_name="y", lora_path="broken")["error"]
    assert error["param"] == "lora_path" and "use_dora" in error["message"]
    error = load(daemon, 404, lora_name="y", lora_path="absent")["error"]  # as vLLM's
    assert error["param"] == "lora_path" and error["code"] == "adapter_not_found"
    load(daemon, lora_name="y", lora_path="y")
    assert "at most 2" in load(daemon, 400, lora_name="z", lora_path="z")["error"]["message"]
    assert unload(daemon, lora_name="x") == {"id": "x", "object": "lora_adapter", "parent": MODEL, "loaded": False}
    assert unload(daemon, 404, lora_name="x")["error"]["code"] == "adapter_not_found"
    assert ask(daemon, "x").status_code == 404
    load(daemon, lora_name="z", lora_path="z")
    assert [m["id"] for m in daemon.get("/v1/models").json()["data"]][2:] == ["z", "y"]


def test_loads_wait_without_holding_up_other_requests(start, tmp_path):
    """There are more loads than threads; the engine of these tests ends if two run at once."""
    gate = tmp_path / "gate"
    daemon = start("--lora-dir", "/adapters", env={"KEEPD_FAKE_GATE": str(gate)})
    with futures.ThreadPoolExecutor(10) as pool:
        loads = [pool.submit(load, daemon, lora_name=f"a{i}", lora_path="gated") for i in range(10)]
        try:
            daemon.wait("all loads", lambda: daemon.metrics()["keepd_connections",] > 10)
            assert daemon.post("/tokenize", {"prompt": "a"}).status_code == 200
            assert not any(done.done() for done in loads)
        finally:
            gate.touch()
        assert all(done.result()["loaded"] for done in loads)
    assert daemon.metrics()["keepd_adapters",] == 10


@pytest.mark.parametrize("body, param", [({}, "lora_name"), ({"lora_name": "a"}, "lora_path"), ({"lora_name": 1, "lora_path": "a"}, "lora_name"),
                                         ({"lora_name": "a", "lora_path": ["a"]}, "lora_path"), ({"lora_name": MODEL, "lora_path": "a"}, "lora_name"),
                                         ({"lora_name": "a", "lora_path": "a", "load_inplace": True}, "load_inplace")])
def test_bad_bodies_are_refused_by_field(start, body, param):
    daemon = start("--lora-dir", "/adapters")
    assert load(daemon, 400, **body)["error"]["param"] == param


def test_another_model_of_the_daemon_has_its_own(tmp_path, start):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    config = tmp_path / "keepd.conf"
    config.write_text(f"lora-dir = /adapters\n[a]\nmodel = {tmp_path}/a\nlora = sql=/adapters/sql\n[b]\nmodel = {tmp_path}/b\nlora = law=/adapters/law\n")
    process = subprocess.Popen([BINARY, "--config", config, "--port", "0"], stdout=subprocess.PIPE, text=True)
    url = process.stdout.readline().split()[3]
    try:
        for model, status in (("b:law", 200), ("sql", 200), ("law", 200), ("a:law", 404), ("a:sql", 200)):
            r = requests.post(f"{url}/v1/chat/completions", json={**chat_body(), "model": model}, timeout=60)
            assert r.status_code == status, (model, r.text)
        parents = {m["id"]: m["parent"] for m in requests.get(f"{url}/v1/models", timeout=60).json()["data"]}
        assert parents == {"a": None, "sql": "a", "b": None, "law": "b"}
        r = requests.post(f"{url}/v1/load_lora_adapter", json={"model": "a", "lora_name": "b", "lora_path": "x"}, timeout=60)
        assert r.status_code == 400 and r.json()["error"]["param"] == "lora_name", r.text  # requests for it would go to the model b
    finally:
        process.terminate()
        assert process.wait(60) == 0


def test_an_adapter_that_cannot_be_served_ends_the_start():
    run = subprocess.run([BINARY, "--model", ROOT / "bundled/keepd-nano", "--port", "0", "--lora", "a=/x/broken"],
                         capture_output=True, text=True, timeout=60)
    assert run.returncode == 78 and "lora" in run.stderr and "broken" in run.stderr, run.stderr


def test_an_adapter_has_no_name_of_a_model():
    run = subprocess.run([BINARY, "--model", ROOT / "bundled/keepd-nano", "--port", "0", "--served-model-name", "big,small", "--lora", "small=/x/law"],
                         capture_output=True, text=True, timeout=60)
    assert run.returncode == 78 and "'small': a model has this name" in run.stderr, run.stderr


def test_routers_see_the_adapters_in_use(start):
    def info(daemon):
        labels = re.search("^vllm:lora_requests_info{(.*)}", daemon.get("/metrics").text, re.M).group(1)
        return dict(re.findall('(max_lora|running_lora_adapters)="([^"]*)"', labels))

    assert info(start()) == {"max_lora": "0", "running_lora_adapters": ""}
    daemon = start(*SQL, "--max-loras", "3", env={"KEEPD_FAKE_STEP_US": "20000"})
    assert info(daemon) == {"max_lora": "3", "running_lora_adapters": ""}
    body = {**chat_body("hello", stream=True, max_tokens=200), "model": "team/law"}
    with requests.post(f"{daemon.url}/v1/chat/completions", json=body, stream=True, timeout=60) as r:
        next(r.iter_lines())
        assert info(daemon) == {"max_lora": "3", "running_lora_adapters": "team/law"}


def test_options_of_other_servers(start):
    daemon = start("--enable-lora", "--lora-modules", "sql=/adapters/sql", "--max-lora-rank", "64")
    assert ask(daemon, "sql").status_code == 200
