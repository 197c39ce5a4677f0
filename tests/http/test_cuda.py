"""The daemon on the CUDA backend, its kernels run by the emulator of tests/emu: the same kernels, bytes and
errors as on a GPU, none of its speed. KEEPD_BIN with KEEPD_DEVICE=cuda is a daemon on a real one."""
import concurrent.futures
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, Daemon, chat_body, events, find_built, named_binary, read_all, read_until, request_bytes

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
STORY = "My sister Nora lives in Lisbon with two cats. The code of the garage is 4815. "


BINARY = (os.environ.get("KEEPD_DEVICE") == "cuda" and named_binary()) or find_built("tests/emu/keepd-emu")
EMULATED = BINARY is not None and BINARY.name == "keepd-emu"
POOL = ("--kv-pool-bytes", "48M")


def start(*flags, device="cuda", env=None):
    if BINARY is None:
        pytest.skip("skip: keepd-emu is not built")
    return Daemon("--device", device, "--max-conversations", "8", "--max-num-seqs", "8", *flags, env=env, binary=BINARY)


@pytest.fixture
def daemon_of():
    """daemon_of(*flags, device=, env=) runs a daemon of its own; all must exit cleanly."""
    daemons = []

    def run(*flags, **options):
        daemons.append(start(*flags, **options))
        return daemons[-1]

    yield run
    for daemon in daemons:
        assert daemon.stop() == 0, "".join(daemon.errors)


@pytest.fixture(scope="module")
def cuda():
    daemon = start(*POOL)
    yield daemon
    assert daemon.stop() == 0, "".join(daemon.errors)


def content(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def fresh(**fields):
    """Neither reuses nor retains a conversation, so the answer depends on the request alone."""
    return {"kv": {"reuse": False, "retain": False, **fields}}


def test_the_pool_is_what_the_device_has(breakable):
    """The pool takes the memory beside the weights; if none is left, startup fails with advice."""
    daemon = start(env={"KEEPD_EMU_MEMORY": "80"})
    pages = daemon.kv()["pool"]["pages_total"]
    assert 20 << 20 < pages * 8192 < 76 << 20 and daemon.stop() == 0
    refused = subprocess.run([BINARY, "--model", ROOT / "bundled/keepd-nano", "--device", "cuda", "--port", "0"], text=True,
                             env={**os.environ, "KEEPD_EMU_MEMORY": "18"}, capture_output=True, timeout=120)
    assert refused.returncode == 1 and "18 MiB are free" in refused.stderr and "lower max-model-len" in refused.stderr


@pytest.mark.parametrize("to", ["q8", "q4"])
def test_weights_in_blocks(daemon_of, to):
    """Weights in 8 and 4 bits are multiplied as they are and a chat is answered."""
    daemon = daemon_of("--quantization", to, *POOL)
    assert len(content(daemon.chat("What is a cache?", max_tokens=4, **fresh()))) > 0


@pytest.mark.skipif(not EMULATED, reason="skip: only the emulator takes the part of other devices")
def test_other_devices(cuda, daemon_of):
    """One without bulk copies gives the same answer, bit by bit; one that is too old is refused by name."""
    older = daemon_of(*POOL, env={"KEEPD_EMU_CAPABILITY": "80"})
    answers = [daemon.chat("What is a cache?", max_tokens=3, logprobs=True, **fresh()).json()["choices"] for daemon in (cuda, older)]
    assert answers[0] == answers[1] and answers[0][0]["logprobs"]["content"]
    refused = subprocess.run([BINARY, "--model", ROOT / "bundled/keepd-nano", "--device", "cuda", "--port", "0"], text=True, capture_output=True, timeout=120,
                             env={**os.environ, "KEEPD_EMU_CAPABILITY": "75"})
    assert refused.returncode == 78 and "compute capability 7.5; 8.0 (Ampere) or later is needed" in refused.stderr, refused


def test_which_backend(cuda):
    assert ("cuda-emulated" if EMULATED else "cuda") in cuda.ready_line


@pytest.mark.slow
def test_a_chat_alone_and_in_company(cuda):
    """An answer is the same alone, among others, and streamed."""
    asked = [STORY * (1 + i) + "What is the code?" for i in range(3)]
    alone = [content(cuda.chat(text, max_tokens=5, **fresh())) for text in asked]
    assert all(alone)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda text: content(cuda.post(CHAT, chat_body(text, max_tokens=5, **fresh()))), asked))
    assert together == alone
    with cuda.http.post(cuda.url + CHAT, json=chat_body(asked[1], max_tokens=5, stream=True, **fresh()), stream=True,
                        timeout=120) as r:
        chunks = [json.loads(e) for e in events(r) if e != "[DONE]"]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]) == alone[1]
    cuda.wait_idle()


def test_seeds_logprobs_and_choices(cuda):
    body = {"max_tokens": 5, "temperature": 0.9, "seed": 7, "n": 3, "logprobs": True, "top_logprobs": 3, **fresh()}
    first, again = cuda.chat(STORY, **body).json(), cuda.chat(STORY, **body).json()
    assert [c["message"]["content"] for c in first["choices"]] == [c["message"]["content"] for c in again["choices"]]
    for choice in first["choices"]:
        for token in choice["logprobs"]["content"]:
            assert token["logprob"] <= 0 and len(token["top_logprobs"]) == 3
    cuda.wait_idle()


def test_guessed_tokens(cuda):
    """An answer that was predicted, partly wrongly, has the bits of the one without guesses."""
    asked, body = STORY * 3 + "What is the code of the garage?", {"max_tokens": 14, "logprobs": True}
    kv = {"policy": "global", "budget": 24, "buffer": 16, "chunk": 16, "report": "positions"}
    whole = cuda.chat(asked, **body, speculate="off", **fresh(**kv)).json()
    guess = {"type": "content", "content": whole["choices"][0]["message"]["content"] + " Is it not?"}
    guessed = cuda.chat(asked, **body, prediction=guess, **fresh(**kv)).json()
    details = [answer["usage"].pop("completion_tokens_details") for answer in (whole, guessed)]
    assert details[0]["accepted_prediction_tokens"] == 0 < details[1]["accepted_prediction_tokens"], details
    assert guessed["choices"] == whole["choices"] and guessed["usage"] == whole["usage"]


def policies(daemon):
    refusal = daemon.chat(kv={"policy": "none of them"}).json()["error"]["message"]
    return refusal.split("there are ")[1].rstrip(".").replace(",", "").split()


# Policies that need what this backend does not compute, and what it says of them.
REFUSED = {"d2o": "evicted entries are not merged on this device",
           "ems": "evicted entries are not merged on this device",
           "lagkv": "entries are not compared with later ones on this device",
           "expected_attention": "the queries to come are not estimated on this device"}


def test_policies_that_the_backend_cannot_run(cuda):
    """Such policies are not listed. A request that names one is refused, and so is a start with one as the default."""
    served = cuda.get("/server_info").json()
    assert served["kv_policies"] == policies(cuda) and not set(REFUSED) & set(served["kv_policies"]), served
    for policy, reason in REFUSED.items():
        r = cuda.chat(STORY, max_tokens=1, **fresh(policy=policy))
        error, why = r.json()["error"], f"cannot run on the backend '{served['backend']}': {reason}; choose one of full, "
        assert r.status_code == 400 and error["param"] == "kv.policy", (policy, r.text)
        assert f"policy '{policy}' {why}" in error["message"], r.text
    refused = subprocess.run([BINARY, "--model", ROOT / "bundled/keepd-nano", "--device", "cuda", "--kv-policy", "ems", "--port", "0"],
                             text=True, capture_output=True, timeout=120)
    assert refused.returncode == 78 and f"kv-policy: policy 'ems' {why.replace(reason, REFUSED['ems'])}" in refused.stderr, refused


@pytest.fixture
def latent(tmp_path):
    sys.path.insert(0, str(pathlib.Path(ROOT) / "tests/python"))
    latent_model, nano = pytest.importorskip("latent_model"), pathlib.Path(ROOT) / "bundled/keepd-nano"
    latent_model.write(tmp_path, vocab_size=json.loads((nano / "config.json").read_text())["vocab_size"], eos_token_id=1)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(nano / name, tmp_path)
    return tmp_path


def test_latent_attention(latent, daemon_of):
    """The CPU keeps the same entries and says nearly the same; policies that read keys are refused by name."""
    kv = {**fresh()["kv"], "policy": "streaming", "budget": 32, "buffer": 8, "report": "positions"}
    kept, first = [], []
    for device in ("cpu", "cuda"):
        daemon = daemon_of("--model", str(latent), "--kv-dtype", "bf16", *POOL, device=device)
        answer = daemon.chat(STORY * 3, max_tokens=4, ignore_eos=True, logprobs=True, top_logprobs=5, kv=kv).json()
        kept.append(answer["usage"]["kv_details"]["positions"])
        first.append({top["token"]: top["logprob"] for top in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]})
    assert kept[0] == kept[1] and [len(layer) for layer in kept[0]] == [1, 1, 1]
    shared = first[0].keys() & first[1].keys()
    assert len(shared) >= 3 and all(abs(first[0][token] - first[1][token]) < 0.1 for token in shared), first
    assert policies(daemon) == ["full", "streaming"]
    refused = daemon.chat(STORY, max_tokens=1, **fresh(policy="snapkv")).json()["error"]
    assert "attention to the model's latent vectors is not observed" in refused["message"], refused


@pytest.mark.slow
def test_every_policy_runs(cuda):
    for policy in policies(cuda):
        r = cuda.chat(STORY * 3, max_tokens=4, kv={**fresh()["kv"], "policy": policy, "budget": 32, "buffer": 8})
        assert r.status_code == 200, (policy, r.text)
        details = r.json()["usage"]["kv_details"]
        streams = 24
        most = details["seen_tokens"] if policy == "full" else 32 + 8
        assert details["policy"] == policy and 0 < details["kept_entries"] <= most * streams
        assert policy == "full" or details["evicted_entries"] > 0
    cuda.wait_idle()


def test_a_killed_client(cuda):
    """A client that disconnects in the middle of an answer: its pages are returned."""
    retained = cuda.kv()["pool"]["pages_retained"]
    aborts = cuda.finished("abort")
    with cuda.socket() as sock:
        sock.sendall(request_bytes(CHAT, chat_body(STORY, stream=True, max_tokens=900, ignore_eos=True)))
        read_until(sock, b'"content":"')
    cuda.wait("the abort", lambda: cuda.finished("abort") == aborts + 1)
    cuda.wait_idle()
    assert cuda.kv()["pool"]["pages_retained"] == retained


def test_tokens_out_of_range(cuda):
    for body in ({"prompt": [1, 2, 2048]}, {"prompt": [-1]}, {"prompt": "x", "logit_bias": {"2048": 1}}):
        r = cuda.post(TEXT, {"model": "tiny", "max_tokens": 2, **body})
        assert r.status_code == 400, r.text
    assert cuda.post(TEXT, {"model": "tiny", "max_tokens": 2, "prompt": [1, 2, 2047]}).status_code == 200


def turns(daemon, count, **fields):
    """Runs a dialogue; returns the answers and the number of cached tokens of each prompt."""
    messages, said, cached = [], [], []
    for i in range(count):
        messages.append({"role": "user", "content": f"{STORY * 2}Question {i}: where does she live?"})
        r = daemon.chat(messages=messages, max_tokens=6, ignore_eos=True, **fields)
        said.append(content(r))
        cached.append(r.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        messages.append({"role": "assistant", "content": said[-1]})
    return said, cached


@pytest.mark.slow
def test_a_conversation_goes_on(daemon_of):
    kv = {"kv": {"budget": 64, "buffer": 8}}
    daemon = daemon_of(*POOL)
    said, cached = turns(daemon, 3, **kv)
    assert cached[0] == 0 and cached[1] > 0 and cached[2] > cached[1]
    assert turns(daemon_of(*POOL), 3, **kv) == (said, cached), "from an equal state the same answers"
    pool = daemon.kv()["pool"]
    assert 0 < pool["pages_used"] <= pool["pages_retained"]  # turns share pages


@pytest.mark.slow
def test_a_full_pool(daemon_of):
    """Requests that fit wait, requests that can never fit are rejected, and no answer is lost."""
    daemon = daemon_of("--kv-pool-bytes", "640K", "--max-conversations", "0")
    body = chat_body(STORY * 2, max_tokens=6, kv={"policy": "full"}, ignore_eos=True)
    alone = content(daemon.post(CHAT, body))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: content(daemon.post(CHAT, body)), range(4))) == [alone] * 4
    r = daemon.chat(STORY * 2, max_tokens=800, kv={"policy": "full"})
    assert r.status_code == 400 and "pages of cache" in r.json()["error"]["message"]
    assert daemon.metrics()["keepd_preemptions_total",] == 0
    daemon.wait_idle()


@pytest.mark.slow
@pytest.mark.parametrize("devices, dtype", [(("cuda", "cpu"), "bf16"), (("cpu", "cuda"), "bf16"), (("cuda", "cuda"), "bf16"),
                                            (("cuda", "cpu"), "fp8"), (("cpu", "cuda"), "fp8"),
                                            (("cuda", "cpu"), "q8"), (("cpu", "cuda"), "q8")])
def test_a_state_file_moves_between_devices(daemon_of, tmp_path, devices, dtype):
    """Each device continues from files of the other; the answers are those of the device that runs."""
    flags = (*POOL, "--state-dir", str(tmp_path), "--state-idle", "0", "--kv-dtype", dtype)
    kv = {"kv": {"budget": 64, "buffer": 8}}
    first = daemon_of(*flags, device=devices[0])
    said, _ = turns(first, 1, **kv)
    assert first.stop() == 0
    second = daemon_of(*flags, device=devices[1])
    messages = [{"role": "user", "content": f"{STORY * 2}Question 0: where does she live?"},
                {"role": "assistant", "content": said[0]}, {"role": "user", "content": "And the code?"}]
    r = second.chat(messages=messages, max_tokens=6, **kv)
    assert content(r) and r.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 50
    assert second.metrics()["keepd_state_restored_total",] == 1


@pytest.fixture
def hybrid(tmp_path):
    """Flags for a model of random numbers with gated delta rules, which has keepd-nano's tokenizer."""
    nano, folder = ROOT / "bundled/keepd-nano", tmp_path / "hybrid"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (folder / name).write_bytes((nano / name).read_bytes())
    shape = {"model_type": "qwen3_5_text", "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96,
             "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 2048, "eos_token_id": 2,
             "max_position_embeddings": 1024, "tie_word_embeddings": True, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32,
             "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 32,
             "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    (folder / "config.json").write_text(json.dumps(shape))
    return "--model", str(folder), "--random-weights"


@pytest.mark.slow
def test_recurrent_states(daemon_of, hybrid):
    """A state is counted, a text goes on from its end, and a retry reads one token of its prompt again."""
    prompt, floats = [20 + i * 37 % 1900 for i in range(100)], 2 * (3 * (2 * 32 + 2 * 32) + 2 * 32 * 32) * 2

    def ask(daemon, tokens, **kv):
        """Two tokens, of which the first is 300."""
        body = {"model": "tiny", "prompt": tokens, "max_tokens": 2, "ignore_eos": True, "logit_bias": {"300": 100}, "kv": {"policy": "full", **kv}}
        answer = daemon.post(TEXT, body).json()
        assert answer["usage"]["kv_details"]["state_bytes"] == 4 * floats, answer
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    daemon = daemon_of(*hybrid, *POOL)
    assert ask(daemon, prompt)[1] == 0
    longer = prompt + [300] + [30 + i * 41 % 1900 for i in range(100)]
    text, cached = ask(daemon, longer)
    assert cached == len(prompt) + 1
    assert ask(daemon, longer) == (text, len(longer) - 1)
    assert ask(daemon, longer, **fresh()["kv"]) == (text, 0)
    daemon.wait_idle()


@pytest.mark.slow
def test_a_replica_for_every_device(daemon_of):
    """Each replica has its own thread and device; answers equal those of one replica; there are no more replicas than devices."""
    if not EMULATED:
        pytest.skip("needs two devices")
    asked = [STORY + f"Question {i}: what is the code?" for i in range(4)]
    one = daemon_of(*POOL)
    alone = [content(one.chat(text, max_tokens=4, **fresh())) for text in asked]
    two = daemon_of(*POOL, "--data-parallel-size", "2", env={"KEEPD_EMU_DEVICES": "2"})
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        bodies = [chat_body(text, max_tokens=4, **fresh()) for text in asked]
        assert list(pool.map(lambda body: content(two.post(CHAT, body)), bodies)) == alone
    refused = subprocess.run([BINARY, "--model", ROOT / "bundled/keepd-nano", "--device", "cuda", "--port", "0", *POOL,
                              "--data-parallel-size", "2"], text=True, capture_output=True, timeout=120)
    why = "data-parallel-size: 2 replicas need a GPU each; this machine shows 1"
    assert refused.returncode == 78 and why in refused.stderr, refused.stderr


@pytest.mark.slow
def test_a_model_over_two_devices(daemon_of, tmp_path):
    """One rank per device: answers depend on the request alone; a lost device ends all; there are no more ranks than devices."""
    if not EMULATED:
        pytest.skip("needs two devices")
    path = tmp_path / "lost"
    ranks = ("--tensor-parallel-size", "2", "--kv-rank-cap", "125")
    daemon = start(*POOL, *ranks, env={"KEEPD_EMU_DEVICES": "2", "KEEPD_EMU_LOST": str(path)})
    assert "cuda-emulated, 2 ranks" in daemon.ready_line
    kv = {"kv": {**fresh()["kv"], "budget": 32, "buffer": 8}}
    asked = [STORY * (1 + i) + "What is the code?" for i in range(2)]
    alone = [content(daemon.chat(text, max_tokens=3, **kv)) for text in asked]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        bodies = [chat_body(text, max_tokens=3, **kv) for text in asked]
        assert list(pool.map(lambda body: content(daemon.post(CHAT, body)), bodies)) == alone
    daemon.wait_idle()
    path.touch()
    assert daemon.chat(STORY, max_tokens=3).status_code == 500
    lost_after(daemon, path)
    refused = subprocess.run([BINARY, "--model", ROOT / "bundled/keepd-nano", "--device", "cuda", "--port", "0", *POOL, *ranks],
                             text=True, capture_output=True, timeout=120)
    assert refused.returncode != 0 and "2 ranks need a GPU each" in refused.stderr, refused.stderr


@pytest.mark.slow
def test_replicas_of_a_model_over_several_devices(daemon_of, tmp_path):
    """Four devices as two replicas of two ranks: answers are those of one such replica, a conversation goes on where it
    is, every rank has a device of its own, and one that is lost ends all."""
    if not EMULATED:
        pytest.skip("needs four devices")
    path = tmp_path / "lost"
    ranks, replicas = ("--tensor-parallel-size", "2"), ("--data-parallel-size", "2")
    kv = {"budget": 32, "buffer": 8}
    asked = [STORY + f"Question {i}: what is the code?" for i in range(2)]
    one = daemon_of(*POOL, *ranks, env={"KEEPD_EMU_DEVICES": "2"})
    alone = [content(one.chat(text, max_tokens=3, kv={**fresh()["kv"], **kv})) for text in asked]
    four = start(*POOL, *ranks, *replicas, env={"KEEPD_EMU_DEVICES": "4", "KEEPD_EMU_LOST": str(path)})
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        bodies = [chat_body(text, max_tokens=3, kv=kv) for text in asked]
        assert list(pool.map(lambda body: content(four.post(CHAT, body)), bodies)) == alone
    rows = [row for row in four.kv()["conversations"] if not row["superseded"]]
    assert sorted(row["engine"] for row in rows) == [0, 1]
    for text, said in zip(asked, alone):
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": said},
                    {"role": "user", "content": "And her sister?"}]
        r = four.chat(messages=messages, max_tokens=2, kv=kv)
        assert content(r) and r.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 30
    assert {row["engine"] for row in four.kv()["conversations"]} == {0, 1}
    path.touch()
    assert four.chat(STORY, max_tokens=3).status_code == 500
    lost_after(four, path)
    refused = subprocess.run([BINARY, "--model", ROOT / "bundled/keepd-nano", "--device", "cuda", "--port", "0", *POOL, *ranks, *replicas],
                             text=True, env={**os.environ, "KEEPD_EMU_DEVICES": "3"}, capture_output=True, timeout=120)
    why = "data-parallel-size: 2 replicas of 2 ranks need 4 GPUs; this machine shows 3"
    assert refused.returncode == 78 and why in refused.stderr, refused.stderr


# --- a device error: a clear answer, then the end, for the service manager to start again ---


def lost_after(daemon, path):
    """Waits for the daemon to exit by itself, with the documented status."""
    assert daemon.process.wait(timeout=60) == 1
    log = "".join(daemon.errors)
    assert "the backend failed" in log and "the process must restart" in log
    assert path.exists()


@pytest.fixture
def breakable(tmp_path):
    if not EMULATED:
        pytest.skip("a GPU cannot be broken on demand")
    path = tmp_path / "lost"
    return path, lambda *flags: start(*POOL, *flags, env={"KEEPD_EMU_LOST": str(path)})


@pytest.mark.parametrize("stream, state", [(False, True), (True, False)])
def test_the_device_is_lost(breakable, tmp_path, stream, state):
    path, run = breakable
    daemon = run(*(("--state-dir", str(tmp_path / "state"), "--state-idle", "3600") if state else ()))
    content(daemon.chat(STORY, max_tokens=3))  # a conversation that has not been written yet
    with daemon.socket() as sock:
        sock.sendall(request_bytes(CHAT, chat_body(STORY, stream=stream, max_tokens=900, ignore_eos=True)))
        daemon.wait("tokens", lambda: (daemon.kv()["running"] or [{}])[0].get("completion_tokens", 0) > 2)
        path.touch()
        answer = read_all(sock)
    assert b"the engine failed: device failure" in answer
    assert answer.startswith(b"HTTP/1.1 200" if stream else b"HTTP/1.1 500")
    lost_after(daemon, path)


def test_the_device_is_lost_while_idle(breakable):
    """The next request gets the error."""
    path, run = breakable
    daemon = run()
    content(daemon.chat(STORY, max_tokens=3))
    path.touch()
    r = daemon.chat(STORY, max_tokens=3)
    assert r.status_code == 500 and "device failure" in r.json()["error"]["message"]
    lost_after(daemon, path)
