"""LoRA adapters with their real products: as a model into which they are merged, bit by bit the same alone, in batches,
over ranks and from a GGUF file, and never mixed up in conversations. (Beside PEFT: tests/training/test_lora_peft.py.)"""
import concurrent.futures as futures
import random
import threading
import time

import pytest
import requests
from lora import NANO, TARGETS, make, model_with

EXACT = ("--kv-dtype", "f32", "--gates", "", "--cpu-activations", "f32")
POLICIES = ({"policy": "full"}, {"policy": "snapkv", "budget": 48, "buffer": 16, "chunk": 64},
            {"policy": "streaming", "budget": 64, "buffer": 16, "chunk": 64})


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A float32 model, three adapters, and the models into which they are merged."""
    folder = tmp_path_factory.mktemp("lora")
    made = {"all": make(folder / "all", 1), "qv": make(folder / "qv", 2, rank=4, alpha=4, targets=["self_attn.q_proj", "self_attn.v_proj"]),
            "rs": make(folder / "rs", 3, rank=16, targets=list(TARGETS)[3:], rslora=True)}
    for name, changes in made.items():
        model_with(folder / f"merged-{name}", changes)
    model_with(folder / "base", {})
    return folder


def loras(files, *names):
    return [word for name in names for word in ("--lora", f"{name}={files / name}")]


def score(d, model, prompt, **kv):
    """The log-probabilities of a prompt's tokens and of 16 more."""
    r = requests.post(f"{d.url}/v1/completions", timeout=300, json={
        "model": model, "prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 16, "temperature": 0, "ignore_eos": True, "kv": kv})
    assert r.status_code == 200, r.text
    logprobs = r.json()["choices"][0]["logprobs"]
    return logprobs["tokens"], logprobs["token_logprobs"][1:]


def prompts():
    dice = random.Random(7)
    return [[dice.randrange(3, 2048) for _ in range(length)] for length in (1, 9, 200)]


LONG = "My sister Nora lives in Lisbon. The code of the garage is 4815. " * 8  # short conversations are not written to disk


def ask(d, model, text="The code of the garage is 4815.", **fields):
    r = requests.post(f"{d.url}/v1/chat/completions", timeout=300, json={
        "model": model, "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 24, "ignore_eos": True, "logprobs": True, **fields})
    assert r.status_code == 200, r.text
    return r.json()


def answer_of(d, model, text="The code of the garage is 4815.", **fields):
    return ask(d, model, text, kv={"reuse": False, "retain": False}, **fields)["choices"]


def test_an_adapter_is_the_model_into_which_it_is_merged(daemon, files):
    d = daemon("--model", str(files / "base"), *EXACT, *loras(files, "all", "qv", "rs"))
    largest = 0
    for name in ("all", "qv", "rs"):
        merged = daemon("--model", str(files / f"merged-{name}"), *EXACT)
        for prompt in prompts():
            for kv in POLICIES:
                (ours, a), (theirs, b) = score(d, name, prompt, **kv), score(merged, "keepd-nano", prompt, **kv)
                assert ours == theirs, (name, len(prompt), kv)
                largest = max(largest, max(abs(x - y) for x, y in zip(a, b)))
        base = score(d, "keepd-nano", prompts()[-1])[1]
        assert max(abs(x - y) for x, y in zip(a, base)) > 0.01  # and it does change something
        merged.stop()
    print(f"largest difference of a log-probability: {largest:.2e}")
    assert largest < 2e-5


@pytest.mark.parametrize("flags", [EXACT, ()], ids=["f32", "as-built"])
def test_rows_do_not_depend_on_other_adapters(daemon, files, flags):
    plain = daemon("--model", str(NANO), *flags)
    d = daemon("--model", str(NANO), *flags, *loras(files, "all", "qv", "rs"))
    names = ["keepd-nano", "all", "keepd-nano:qv", "rs"]
    texts = [f"Text number {i} about a garage. " * (1 + i % 5) for i in range(12)]
    jobs = [(names[i % 4], text) for i, text in enumerate(texts)]
    alone = [answer_of(d, *job) for job in jobs]
    for job, answer in zip(jobs, alone):
        if job[0] == "keepd-nano":
            assert answer_of(plain, *job) == answer
    assert len({str(answer_of(d, name, texts[0])) for name in names}) == 4
    with futures.ThreadPoolExecutor(12) as pool:
        assert list(pool.map(lambda job: answer_of(d, *job), jobs)) == alone
    for guess in (0, 15):  # tokens are guessed without the adapter, and answers are the same
        assert [answer_of(d, *job, speculate=guess) for job in jobs] == alone


def test_ranks_agree(daemon, files):
    answers = []
    for ranks in (1, 2, 8):
        d = daemon("--model", str(NANO), "--tensor-parallel-size", str(ranks), "--threads", "2", *loras(files, "all", "rs"))
        answers.append([answer_of(d, name) for name in ("all", "rs", "keepd-nano")])
    assert answers[1] == answers[0] and answers[2] == answers[0]


def test_replicas_agree(daemon, files):
    d = daemon("--model", str(NANO), "--data-parallel-size", "2", "--threads", "2", *loras(files, "all"))
    with futures.ThreadPoolExecutor(6) as pool:
        assert len(set(pool.map(lambda _: str(answer_of(d, "all")), range(6)))) == 1


def test_a_gguf_file_is_the_directory(daemon, files):
    d = daemon("--model", str(NANO), *loras(files, "all"), "--lora", f"file={files}/all.gguf")
    assert answer_of(d, "all") == answer_of(d, "file")
    listed = requests.get(f"{d.url}/server_info", timeout=60).json()["lora_adapters"]
    assert listed[0]["digest"] == listed[1]["digest"] and [a["rank"] for a in listed] == [8, 8]
    first = ask(d, "all")  # equal numbers are one adapter: the file continues the directory's conversations
    more = [{"role": "user", "content": "The code of the garage is 4815."}, first["choices"][0]["message"], {"role": "user", "content": "And?"}]
    assert ask(d, "file", messages=more)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def dialogue(first):
    return [{"role": "user", "content": LONG}, first["choices"][0]["message"], {"role": "user", "content": "What is the code?"}]


def cached(r):
    return r["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_conversations_keep_to_their_adapter(daemon, files, tmp_path):
    flags = ("--model", str(NANO), *loras(files, "all", "qv"), "--state-dir", str(tmp_path / "state"))
    d, names = daemon(*flags), ("keepd-nano", "all", "qv")
    firsts = {name: ask(d, name, LONG, max_tokens=4) for name in names}
    assert [cached(firsts[name]) for name in names] == [0, 0, 0]  # the same prompt each time
    later, fresh = {}, {}
    for name in names:
        second = ask(d, name, messages=dialogue(firsts[name]), max_tokens=4)
        assert cached(second) > 0, name
        later[name] = [*dialogue(firsts[name]), second["choices"][0]["message"], {"role": "user", "content": "again"}]
        fresh[name] = ask(d, name, messages=later[name], max_tokens=4, kv={"reuse": False, "retain": False})["choices"]
        listed = requests.get(f"{d.url}/v1/conversations", params={"model": name}, timeout=60).json()["data"]
        assert listed
    assert d.stop() == 0
    d = daemon(*flags)
    for name in reversed(names):
        r = ask(d, name, messages=later[name], max_tokens=4)
        assert cached(r) > 0 and r["choices"] == fresh[name], name


def post(d, path, status, **body):
    r = requests.post(f"{d.url}/v1/{path}", json=body, timeout=60)
    assert r.status_code == status, r.text
    return r.json()


def test_adapters_come_and_go(daemon, files):
    d = daemon("--model", str(NANO), "--lora-dir", str(files), *loras(files, "qv"), "--max-loras", "2", "--threads", "2",
               "--data-parallel-size", "2")
    before = [answer_of(d, "qv"), answer_of(d, "keepd-nano")]
    assert post(d, "load_lora_adapter", 200, lora_name="sql", lora_path="all")["parent"] == "keepd-nano"
    once = answer_of(d, "sql")
    assert once != before[0] and [answer_of(d, "qv"), answer_of(d, "keepd-nano")] == before
    post(d, "load_lora_adapter", 400, lora_name="third", lora_path="rs")  # --max-loras
    assert post(d, "load_lora_adapter", 400, lora_name="a b", lora_path="rs")["error"]["param"] == "lora_name"
    post(d, "unload_lora_adapter", 200, lora_name="sql")
    post(d, "chat/completions", 404, model="sql", messages=[{"role": "user", "content": "a"}])
    post(d, "load_lora_adapter", 200, lora_name="sql", lora_path=str(files / "all.gguf"))
    assert answer_of(d, "sql") == once
    post(d, "load_lora_adapter", 400, lora_name="sql", lora_path="rs")
    post(d, "unload_lora_adapter", 200, lora_name="sql")  # so that --max-loras refuses none of these
    for path, status in (("../lora0", 404), ("/etc", 404), ("nothing", 404), ("base", 400)):
        error = post(d, "load_lora_adapter", status, lora_name="other", lora_path=path)["error"]
        assert str(files) not in error["message"], error  # clients need not know where the folder is


def test_a_running_request_keeps_its_adapter(daemon, files):
    """The folder for adapters is the root here."""
    d = daemon("--model", str(NANO), "--lora-dir", "/", *loras(files, "all"))
    fields = {"max_tokens": 400}
    expected, running = answer_of(d, "all", **fields), []
    thread = threading.Thread(target=lambda: running.append(answer_of(d, "all", **fields)))
    thread.start()
    while d.metric("vllm:num_requests_running") == 0:
        assert thread.is_alive(), "the answer ended before the adapter was unloaded"
        time.sleep(0.002)
    post(d, "unload_lora_adapter", 200, lora_name="all")
    post(d, "unload_lora_adapter", 404, lora_name="all")
    post(d, "load_lora_adapter", 200, lora_name="all", lora_path=str(files / "rs"))
    other = answer_of(d, "all")
    thread.join()
    assert running == [expected] and other != expected
    assert d.metric("keepd_adapters") == 1


def test_what_cannot_be_served_is_refused_at_the_start(daemon, files, tmp_path, capfd):
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn/adapter_config.json").write_text('{"peft_type": ')
    for flags, words in ((["--lora", "all"], "name, an = sign and a path"),
                         (["--lora", f"a={tmp_path}/torn"], "adapter_config.json: "),
                         (["--lora", f"a={tmp_path}"], "adapter_config.json"),
                         (["--lora", f"a={files}/all", "--lora-memory", "1000"], "lora-memory"),
                         ([*loras(files, "all", "qv"), "--max-loras", "1"], "max-loras"),
                         ([*loras(files, "all", "all")], "already"),
                         (["--lora", f"a b={files}/all"], "the name of an adapter")):
        for check in ((), ("--check-config",)):
            with pytest.raises(AssertionError):
                daemon("--model", str(NANO), *flags, *check)
            assert words in capfd.readouterr().err, flags
