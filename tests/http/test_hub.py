"""keepd pull and --model hf:..., beside a server that speaks the hub's API (tests/hub_server.py)."""
import fcntl
import json
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import time

import pytest
import requests
from conftest import BINARY, FAKE, ROOT, find_built

sys.path.insert(0, str(ROOT / "tests"))
from hub_server import TOKEN, Hub, Repository, oid_of  # noqa: E402


def noise(size, seed=1):
    return random.Random(seed).randbytes(size)


GGUF = {"README.md": b"# model\n", "m-Q4_K_M.gguf": noise(900_000), "m-Q8_0.gguf": noise(1_000_000, 2), "mmproj-m-F16.gguf": noise(5000, 3),
        "BF16/m-BF16-00001-of-00002.gguf": noise(9000, 4), "BF16/m-BF16-00002-of-00002.gguf": noise(8000, 5)}
PARTS = {"config.json": b"{}", "tokenizer.json": b"{ }", "tokenizer_config.json": b"{  }", "chat_template.jinja": b"{{ x }}", "README.md": b"r",
         "model.safetensors.index.json": b'{"weight_map": {"a": "w-1.safetensors", "b": "w-1.safetensors", "c": "w-2.safetensors"}}',
         "w-1.safetensors": noise(6000, 6), "w-2.safetensors": noise(7000, 7), "w-3.safetensors": noise(7000, 8),
         "pytorch_model.bin": noise(9000, 9), "onnx/model.onnx": noise(9000, 10)}
WHOLE = {"config.json": b"{}", "model.safetensors": noise(6000, 6), "tokenizer.json": b"{ }", "tokenizer_config.json": b"{  }"}
NANO = ROOT / "bundled/keepd-nano"


@pytest.fixture
def hub():
    server = Hub(org__gguf=Repository(GGUF), org__parts=Repository(PARTS))
    yield server
    server.close()


class Puller:
    """Runs keepd with a cache of its own."""

    def __init__(self, folder, hub):
        self.home, self.hub = folder, hub
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
        self.env.update(HF_HOME=str(folder / "hf"), HF_ENDPOINT=hub.url, KEEPD_TEST_HUB_PAUSE_MS="1", no_proxy="*")
        self.env["ASAN_OPTIONS"] = ":".join(filter(None, (os.environ.get("ASAN_OPTIONS"), "verify_asan_link_order=0")))

    def run(self, *words, **more):
        if BINARY is None or not BINARY.exists():
            pytest.skip(f"skip: {BINARY or 'keepd-fake'} is not built")
        env = {**self.env, **more.pop("env", {})}
        return subprocess.run([BINARY, *words], capture_output=True, text=True, timeout=120, env=env, **more)

    def pull(self, name, **more):
        r = self.run("pull", name, **more)
        assert r.returncode == 0 and r.stdout.count("\n") == 1, r
        return pathlib.Path(r.stdout.strip())

    def fails(self, name, status, **more):
        r = self.run("pull", name, **more)
        assert r.returncode == status and not r.stdout, r
        return r.stderr

    def folder(self, repo="org/gguf"):
        return self.home / "hf/hub" / ("models--" + repo.replace("/", "--"))

    def start(self, *words, env=None, binary=BINARY):
        return subprocess.Popen([binary, *words], env={**self.env, **(env or {})}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def puller(tmp_path, hub):
    return Puller(tmp_path, hub)


# --- files that are fetched, and where they lie ---

def test_a_quantisation_lies_as_the_hub_has_it(puller, hub):
    path = puller.pull("org/gguf:Q8_0")
    commit = hub.repositories["org/gguf"].commits["main"]
    data, folder = GGUF["m-Q8_0.gguf"], puller.folder()
    assert path == folder / "snapshots" / commit / "m-Q8_0.gguf" and path.read_bytes() == data
    assert os.readlink(path) == f"../../blobs/{oid_of(data)}"
    assert (folder / "refs/main").read_text() == commit
    assert sorted(p.name for p in (folder / "blobs").iterdir()) == [oid_of(data)]
    before = len(hub.gets("/blobs/"))
    assert puller.pull("hf:org/gguf:q8_0") == path and len(hub.gets("/blobs/")) == before  # nothing is fetched twice


def test_names_of_any_kind(puller):
    for name in ("org/gguf:m-Q8_0.gguf", "hf.co/org/gguf:Q8_0", "https://huggingface.co/org/gguf/blob/main/m-Q8_0.gguf",
                 "https://huggingface.co/org/gguf/resolve/main/m-Q8_0.gguf?download=true", "hf://org/gguf@main:Q8_0"):
        assert puller.pull(name).name == "m-Q8_0.gguf"
    for name in ("org", "org/gguf:", "org/../x", "org/gguf@../..:Q8_0", "/org/gguf", "org/gguf:../x.gguf", "https://example.org/org/gguf", "-x"):
        assert "is no name of a model in the hub" in (text := puller.fails(name, 78)) or "expected one name" in text, text


def test_all_parts_of_a_split_file(puller):
    path = puller.pull("org/gguf:BF16")
    assert path.name == "m-BF16-00001-of-00002.gguf" and path.parent.name == "BF16"
    for name in ("m-BF16-00001-of-00002.gguf", "m-BF16-00002-of-00002.gguf"):
        assert (path.parent / name).read_bytes() == GGUF[f"BF16/{name}"]
        assert os.readlink(path.parent / name).startswith("../../../blobs/")


def test_a_part_that_the_repository_lacks(puller, hub):
    del hub.repositories["org/gguf"].files["BF16/m-BF16-00002-of-00002.gguf"]
    assert "has 1 of 2 parts" in puller.fails("org/gguf:BF16", 78)
    assert not puller.folder().exists()


def test_a_directory_has_what_it_needs(puller):
    path = puller.pull("org/parts")
    found = sorted(str(p.relative_to(path)) for p in path.rglob("*"))
    assert found == ["chat_template.jinja", "config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
                     "w-1.safetensors", "w-2.safetensors"]
    assert all((path / name).read_bytes() == PARTS[name] for name in found)


def test_an_index_that_names_what_is_not_there(puller, hub):
    hub.repositories["org/parts"].files["model.safetensors.index.json"] = b'{"weight_map": {"a": "../../../etc/passwd"}}'
    hub.repositories["org/parts"].commit("main")
    assert "names ../../../etc/passwd, which is not there" in puller.fails("org/parts", 78)
    assert not (puller.folder("org/parts") / "refs").exists()


def test_without_a_quantisation_the_list_is_shown(puller):
    r = puller.run("pull", "org/gguf")
    assert r.returncode == 0 and r.stdout.endswith("/m-Q4_K_M.gguf\n"), r
    lines = [line.split() for line in r.stderr.splitlines() if "needs" in line]
    assert [line[0] for line in lines] == ["BF16", "Q4_K_M", "Q8_0"] and all(line[-1] == "fits" or line[-1] == "chosen" for line in lines)
    assert lines[1][-1] == "chosen" and "mmproj" not in r.stderr


def test_what_is_not_there_gets_the_list(puller):
    text = puller.fails("org/gguf:Q5_K_M", 78)
    assert "org/gguf has no GGUF file for 'Q5_K_M'" in text and "  Q8_0 " in text and "  BF16 " in text
    assert "leave out what stands behind the colon" in puller.fails("org/parts:Q4_K_M", 78)


def test_a_default_that_does_not_fit_is_not_fetched(puller, hub):
    """Sizes are the hub's word until the bytes arrive."""
    hub.repositories["org/gguf"].files = {"b-Q4_K_M.gguf": noise(5000), "b-Q8_0.gguf": noise(5001)}
    text = puller.fails("org/gguf", 78, env={"KEEPD_TEST_MEMORY": "1000000"})
    assert "needs 0.33 GB of memory, and 0.00 GB are available here: name what is to be fetched" in text
    assert text.count("does not fit") == 2 and not hub.gets("/resolve/")
    assert puller.pull("org/gguf:Q4_K_M", env={"KEEPD_TEST_MEMORY": "1000000"}).name == "b-Q4_K_M.gguf"  # named: fetched, with a warning


def test_a_directory_in_parts_that_does_not_fit_is_said_before_it_is_fetched(puller, hub):
    """The directory's size is known when the index is here."""
    room = 331_350_016  # bytes for the cache and the process
    r = puller.run("pull", "org/parts", env={"KEEPD_TEST_MEMORY": str(room + 13_000)})
    assert r.returncode == 0 and "are available here" not in r.stderr, r.stderr
    hub.repositories["org/parts"].files["w-1.safetensors"] = noise(6001, 6)
    hub.repositories["org/parts"].commit("main")
    r = puller.run("pull", "org/parts", env={"KEEPD_TEST_MEMORY": str(room + 13_000)})
    assert r.returncode == 0 and r.stderr.count("org/parts needs 0.33 GB of memory, and 0.33 GB are available here") == 1, r.stderr


def test_revisions(puller, hub):
    repository = hub.repositories["org/gguf"]
    first = repository.commits["main"]
    puller.pull("org/gguf:Q8_0")
    repository.files["m-Q8_0.gguf"] = noise(5000, 20)
    second = repository.commit("refs/pr/1")
    assert puller.pull("org/gguf@refs/pr/1:Q8_0").read_bytes() == noise(5000, 20)
    assert (puller.folder() / "refs/refs/pr/1").read_text() == second and (puller.folder() / "refs/main").read_text() == first
    assert puller.pull(f"org/gguf@{second}:Q8_0").parent.name == second
    assert "has no revision 'v7'" in puller.fails("org/gguf@v7:Q8_0", 78)


def test_a_new_commit_keeps_what_did_not_change(puller, hub):
    repository = hub.repositories["org/gguf"]
    old = puller.pull("org/gguf:Q8_0")
    repository.files["README.md"] = b"new"
    repository.commit("main")
    before = len(hub.gets("/blobs/"))
    new = puller.pull("org/gguf:Q8_0")
    assert new != old and new.read_bytes() == old.read_bytes() and len(hub.gets("/blobs/")) == before


def test_a_repository_with_a_new_name(puller, hub):
    hub.moved["old/name"] = "org/gguf"
    assert puller.pull("old/name:Q8_0").read_bytes() == GGUF["m-Q8_0.gguf"]


# --- faults ---

def test_a_connection_that_breaks_goes_on(puller, hub):
    hub.cuts = [300_000, 300_000, 100]
    path = puller.pull("org/gguf:Q8_0")
    assert path.read_bytes() == GGUF["m-Q8_0.gguf"]
    assert [r[3].get("Range") for r in hub.gets("/blobs/")] == [None, "bytes=300000-", "bytes=600000-", "bytes=600100-"]


def test_attempts_have_a_bound_and_the_part_is_kept(puller, hub):
    hub.cuts = [300_000] + [10] * 20
    text = puller.fails("org/gguf:Q8_0", 1)
    assert len(hub.gets("/blobs/")) == 6 and "127.0.0.1" in text  # the first helped, the other five did not
    part = puller.folder() / "blobs" / f"{oid_of(GGUF['m-Q8_0.gguf'])}.incomplete"
    assert part.stat().st_size == 300_050 and not (puller.folder() / "refs").exists()
    hub.cuts = []
    assert puller.pull("org/gguf:Q8_0").read_bytes() == GGUF["m-Q8_0.gguf"]
    assert hub.gets("/blobs/")[-1][3]["Range"] == "bytes=300050-" and not part.exists()


def test_a_server_without_ranges(puller, hub):
    hub.ranges, hub.cuts = False, [300_000]
    assert puller.pull("org/gguf:Q8_0").read_bytes() == GGUF["m-Q8_0.gguf"]


@pytest.mark.parametrize("left", [b"x" * 2_000_000, GGUF["m-Q8_0.gguf"][:1000], GGUF["m-Q8_0.gguf"]])
def test_what_others_left(puller, left):
    """A part of an earlier version of this library, too long, or whole."""
    blobs = puller.folder() / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{oid_of(GGUF['m-Q8_0.gguf'])}.incomplete").write_bytes(left)
    assert puller.pull("org/gguf:Q8_0").read_bytes() == GGUF["m-Q8_0.gguf"]


@pytest.mark.parametrize("repo, path, name, sent", [
    ("org/gguf", "m-Q8_0.gguf", "org/gguf:Q8_0", noise(1_000_000, 99)),
    ("org/parts", "tokenizer.json", "org/parts", b"{! }"[:3])])
def test_another_file_under_the_name(puller, hub, repo, path, name, sent):
    hub.repositories[repo].sent[path] = sent
    text = puller.fails(name, 1)
    assert f"{path}: what arrived has another sum, and the hub says {oid_of(hub.repositories[repo].files[path])[:12]}...: it was deleted" in text
    assert not list(puller.folder(repo).glob("blobs/*.incomplete")) and not (puller.folder(repo) / "refs").exists()
    hub.repositories[repo].sent = {}
    puller.pull(name)


def test_more_bytes_than_the_hub_says(puller, hub):
    hub.repositories["org/gguf"].sent["m-Q8_0.gguf"] = GGUF["m-Q8_0.gguf"] + b"x" * 100_000
    assert "has more bytes than it should" in puller.fails("org/gguf:Q8_0", 1)
    assert not list(puller.folder().glob("blobs/*"))


def test_fewer_bytes_than_the_hub_says(puller, hub):
    hub.repositories["org/gguf"].sent["m-Q8_0.gguf"] = GGUF["m-Q8_0.gguf"][:500_000]
    text = puller.fails("org/gguf:Q8_0", 1)
    assert "status 416" in text or "ended early" in text, text
    assert len(hub.gets("/blobs/")) <= 7


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_hub_that_is_busy_is_asked_again(puller, hub, status):
    hub.busy = [(status, {"Retry_After": "1"})] * 3
    assert puller.pull("org/gguf:Q8_0").name == "m-Q8_0.gguf"
    hub.busy = [(status, {})] * 50
    text = puller.fails("org/gguf:Q8_0", 1)
    assert len(hub.busy) == 45 and ("too many requests" in text if status == 429 else f"status {status}" in text)


def test_a_hub_that_is_away(puller, hub, tmp_path):
    assert "the hub cannot be reached" in puller.fails("org/gguf:Q8_0", 1, env={"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert not (tmp_path / "hf").exists()


def test_the_disk_is_checked_before(puller, hub):
    (puller.folder() / "blobs").mkdir(parents=True)
    disk = find_built("tests/full_disk.so")
    if disk is None:
        pytest.skip("skip: full_disk is not built")
    text = puller.fails("org/gguf:Q8_0", 1, env={"LD_PRELOAD": str(disk), "FULL_DISK_LEFT": "10000000"})
    assert "0.00 GB are to be fetched, and the disk of" in text and "HF_HOME names another folder" in text and not hub.gets("/resolve/")


def test_a_disk_that_fills_keeps_the_part(puller):
    disk = find_built("tests/full_disk.so")
    if disk is None:
        pytest.skip("skip: full_disk is not built")
    text = puller.fails("org/gguf:Q8_0", 1, env={"LD_PRELOAD": str(disk), "FULL_DISK_WRITES": "500000"})
    assert "No space left on device; what has arrived is kept, and keepd pull goes on from there" in text
    part, = puller.folder().glob("blobs/*.incomplete")
    assert 0 < part.stat().st_size <= 500_000
    assert puller.pull("org/gguf:Q8_0").read_bytes() == GGUF["m-Q8_0.gguf"]


def test_a_file_that_may_not_grow_keeps_the_part(puller):
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
    assert "File too large; what has arrived is kept" in puller.fails("org/gguf:Q8_0", 1, preexec_fn=limit)
    assert puller.pull("org/gguf:Q8_0").read_bytes() == GGUF["m-Q8_0.gguf"]


def test_a_cache_that_cannot_be_written(puller, tmp_path):
    (tmp_path / "hf").write_text("a file")
    assert "hf/hub: Not a directory" in puller.fails("org/gguf:Q8_0", 1)


def test_two_at_once_fetch_once(puller, hub):
    """The second waits for the lock that the first has; it is the lock of the hub's own library."""
    oid = oid_of(GGUF["m-Q8_0.gguf"])
    lock = puller.home / "hf/hub/.locks/models--org--gguf" / f"{oid}.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = puller.start("pull", "org/gguf:Q8_0")
        assert "another process fetches" in next(line for line in process.stderr if "waiting" in line)
        blobs = puller.folder() / "blobs"
        blobs.mkdir(parents=True, exist_ok=True)
        (blobs / oid).write_bytes(GGUF["m-Q8_0.gguf"])  # as the other process does
    assert process.wait(timeout=60) == 0 and not hub.gets("/blobs/")
    process.communicate()


# --- tokens ---

def test_a_gated_model_says_what_to_do(puller, hub):
    hub.repositories["org/gguf"].gated = True
    text = puller.fails("org/gguf:Q8_0", 78)
    assert f"org/gguf is gated: accept its terms at {hub.url}/org/gguf, then give a token" in text
    assert puller.pull("org/gguf:Q8_0", env={"HF_TOKEN": TOKEN}).name == "m-Q8_0.gguf"


def test_a_private_model_and_one_that_is_not_there(puller, hub):
    hub.repositories["org/gguf"].private = True
    for name in ("org/gguf:Q8_0", "org/none"):
        assert "or it is private: check the name, or give a token" in puller.fails(name, 78)
    (puller.home / "hf").mkdir(exist_ok=True)
    (puller.home / "hf/token").write_text(TOKEN + "\n")
    assert puller.pull("org/gguf:Q8_0").name == "m-Q8_0.gguf"
    assert "the hub has no org/none" in puller.fails("org/none", 78)


def test_the_token_goes_to_the_hub_alone(puller, hub):
    puller.pull("org/gguf:Q8_0", env={"HF_TOKEN": TOKEN})
    near, far = ([r[3].get("Authorization") for r in hub.requests if r[0] == side] for side in (False, True))
    assert set(near) == {f"Bearer {TOKEN}"} and len(far) == 1 and set(far) == {None}


def test_a_token_that_is_none(puller, hub):
    text = puller.fails("org/gguf:Q8_0", 78, env={"HF_TOKEN": "hf_x\r\nX-Evil: 1"})
    assert "holds no token" in text and not hub.requests


def test_where_redirects_may_lead(puller, hub):
    hub.far_url = "http://192.0.2.1"
    text = puller.fails("org/gguf:Q8_0", 78)
    assert "the hub points to http://192.0.2.1/blobs/" in text and "which is not https" in text and "X-Signature" not in text
    hub.far_url = "file:///etc"
    assert "the hub points to file:" in puller.fails("org/gguf:Q8_0", 78)
    hub.moved = {"a/a": "b/b", "b/b": "a/a"}
    assert "too many redirects" in puller.fails("a/a", 1)


@pytest.mark.parametrize("endpoint", ["http://192.0.2.1", "http://hub.example", "ftp://127.0.0.1", "hub", "https://u:p@hub.example",
                                      "https://user:secret@127.0.0.1:9", "http://user:secret@127.0.0.1:9", "https://:secret@127.0.0.1:9",
                                      "https://user@127.0.0.1:9", "https://user:secret@hub example"])
def test_endpoints_that_are_none(puller, endpoint):
    text = puller.fails("org/gguf:Q8_0", 78, env={"HF_ENDPOINT": endpoint})
    assert "http is accepted for this machine alone" in text or "expected https://HOST" in text
    assert "secret" not in text


def test_redirects_with_a_user_are_refused(puller, hub):
    """An address that carries a password is not asked, and the password is not shown."""
    for user in ("u", "user", "user:secret", ":secret"):
        hub.far_url = f"http://{user}@127.0.0.1:{hub.far.server_address[1]}"
        text = puller.fails("org/gguf:Q8_0", 78)
        assert "the hub points to an address with a user or a password" in text and "secret" not in text, text
    assert not hub.gets("/blobs/")


@pytest.mark.parametrize("item", [
    {"type": "file", "path": "../x.gguf", "oid": "0" * 40, "size": 1}, {"type": "file", "path": "/x", "oid": "0" * 40, "size": 1},
    {"type": "file", "path": "a/../../x", "oid": "0" * 40, "size": 1}, {"type": "file", "path": "x", "oid": "../" + "0" * 37, "size": 1},
    {"type": "file", "path": "x", "oid": "0" * 40, "size": -1}, {"type": "file", "path": "x\n", "oid": "0" * 40, "size": 1},
    {"type": "file", "path": "x", "size": 1}, {"type": "file", "path": 7, "oid": "0" * 40, "size": 1},
    {"type": "file", "path": "x", "oid": "0" * 40, "size": 2**44 + 1}, {"type": "file", "path": "x", "oid": "0" * 40, "size": 2**62 - 1},
    {"type": "file", "path": "x", "oid": "0" * 40, "size": 1, "lfs": {"oid": "0" * 64, "size": 2**62 - 1}}])
def test_lists_that_a_hub_does_not_send(puller, hub, item):
    hub.extra_items = [item]
    assert puller.fails("org/gguf:Q8_0", 78) and not puller.folder().exists()


# --- serving ---

without_a_model = pytest.mark.skipif(not FAKE, reason="skip: the files are no model")


def ready(process):
    line = process.stdout.readline()
    process.terminate()
    _, errors = process.communicate(timeout=60)
    return line, errors


@without_a_model
def test_a_start_fetches_once_and_then_needs_no_network(puller, hub):
    words = ("hf:org/gguf:Q8_0", "--port", "0")
    line, _ = ready(puller.start(*words))
    assert "(model org/gguf:Q8_0," in line
    count = len(hub.requests)
    line, _ = ready(puller.start(*words, env={"HF_ENDPOINT": "http://127.0.0.1:9"}))
    assert "(model org/gguf:Q8_0," in line and len(hub.requests) == count
    line, _ = ready(puller.start("-hf", "org/gguf:Q8_0", "--port", "0", env={"HF_HUB_OFFLINE": "1"}))
    assert line.startswith("keepd ready") and len(hub.requests) == count


def test_offline_says_so(puller, hub):
    for words in (("hf:org/gguf:Q8_0", "--port", "0"), ("pull", "org/gguf:Q8_0")):
        r = puller.run(*words, env={"HF_HUB_OFFLINE": "1"})
        assert r.returncode == 78 and "HF_HUB_OFFLINE is set" in r.stderr and "hf:org/gguf:Q8_0" in r.stderr
    assert not hub.requests
    path = puller.pull("org/gguf:Q8_0")
    assert puller.pull("org/gguf:Q8_0", env={"HF_HUB_OFFLINE": "1"}) == path


def test_a_start_that_cannot_fetch_may_be_tried_again(puller):
    r = puller.run("hf:org/gguf:Q8_0", "--port", "0", env={"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert r.returncode == 1 and "keepd: model: the hub cannot be reached" in r.stderr
    assert puller.run("hf:org/gguf:Q5_0", "--port", "0").returncode == 78


@without_a_model
def test_a_check_fetches_nothing(puller, hub):
    r = puller.run("hf:org/gguf:Q8_0", "--check-config")
    assert r.returncode == 78 and "a start fetches it: model: hf:org/gguf:Q8_0 is not in the cache" in r.stderr and not hub.requests
    puller.pull("org/gguf:Q8_0")
    assert puller.run("hf:org/gguf:Q8_0", "--check-config").returncode == 0


def test_inspect_says_what_would_fit(puller, hub):
    r = puller.run("--inspect", "hf:org/gguf")
    assert r.returncode == 78 and not hub.gets("/resolve/")
    assert [line.split()[0] for line in r.stdout.splitlines()[1:]] == ["BF16", "Q4_K_M", "Q8_0"], r.stdout
    r = puller.run("--inspect", "hf:org/parts")
    assert r.stdout.splitlines()[1].split()[0] == "safetensors"


def test_a_download_that_was_stopped_goes_on(puller, hub):
    hub.cuts = [200_000] + [0] * 4
    process = puller.start("pull", "org/gguf:Q8_0", env={"KEEPD_TEST_HUB_PAUSE_MS": "60000"})
    next(line for line in process.stderr if "going on at byte" in line)
    process.terminate()
    assert process.wait(timeout=60) != 0
    process.communicate()
    hub.cuts = []
    assert puller.pull("org/gguf:Q8_0").read_bytes() == GGUF["m-Q8_0.gguf"]
    assert hub.gets("/blobs/")[-1][3]["Range"] == "bytes=200000-"


# --- directories that are here in part ---

@pytest.fixture
def torn(puller, hub):
    """A commit of a directory whose fetch failed at the file that comes last."""
    repository = hub.repositories["org/whole"] = Repository(WHOLE)
    repository.sent["tokenizer_config.json"] = b"{!!}"
    name = f"hf:org/whole@{repository.commits['main']}"
    assert "tokenizer_config.json: what arrived has" in puller.fails(name, 1)
    snapshot, = puller.folder("org/whole").glob("snapshots/*")
    assert sorted(p.name for p in snapshot.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    repository.sent = {}
    return name, snapshot


@without_a_model
def test_a_commit_that_is_here_in_part_is_fetched(puller, hub, torn):
    name, snapshot = torn
    count = len(hub.requests)
    line, _ = ready(puller.start(name, "--port", "0"))
    assert line.startswith("keepd ready") and len(hub.requests) > count
    assert (snapshot / "tokenizer_config.json").read_bytes() == WHOLE["tokenizer_config.json"]
    count = len(hub.requests)
    line, _ = ready(puller.start(name, "--port", "0"))
    assert line.startswith("keepd ready") and len(hub.requests) == count


def test_a_directory_that_lost_a_file_is_fetched(puller, hub):
    path = puller.pull("org/parts")
    (path / "chat_template.jinja").unlink()
    assert "does not hold chat_template.jinja of hf:org/parts" in puller.fails("org/parts", 78, env={"HF_HUB_OFFLINE": "1"})
    assert puller.run("hf:org/parts", "--check-config").returncode == 78
    assert puller.pull("org/parts") == path and (path / "chat_template.jinja").exists()
    assert puller.pull("org/parts", env={"HF_HUB_OFFLINE": "1"}) == path


def test_offline_says_which_file_is_missing(puller, hub, torn):
    name, _ = torn
    for words in ((name, "--port", "0"), (name, "--check-config"), ("pull", name)):
        r = puller.run(*words, env={"HF_HUB_OFFLINE": "1"})
        assert r.returncode == 78 and f"does not hold tokenizer_config.json of {name}" in r.stderr, r.stderr


def of_others(puller, hub, *lacks):
    """A directory as another program has fetched it: the branch is noted, and which files there are is not."""
    repository = hub.repositories["org/whole"] = Repository(WHOLE)
    snapshot = puller.folder("org/whole") / "snapshots" / repository.commits["main"]
    snapshot.mkdir(parents=True)
    (puller.folder("org/whole") / "refs").mkdir()
    (puller.folder("org/whole") / "refs/main").write_text(repository.commits["main"])
    (puller.folder("org/whole") / "blobs").mkdir()
    for name, data in WHOLE.items():
        if name not in lacks:
            (puller.folder("org/whole") / "blobs" / oid_of(data)).write_bytes(data)
            (snapshot / name).symlink_to(f"../../blobs/{oid_of(data)}")
    return snapshot


@without_a_model
def test_what_others_fetched_in_part_is_completed(puller, hub):
    """The hub is asked about the commit that is here, not for a newer one."""
    snapshot = of_others(puller, hub, "tokenizer_config.json")
    old = hub.repositories["org/whole"].commits["main"]
    hub.repositories["org/whole"].commits["main"] = "f" * 40
    line, _ = ready(puller.start("hf:org/whole", "--port", "0"))
    assert line.startswith("keepd ready") and (snapshot / "tokenizer_config.json").read_bytes() == WHOLE["tokenizer_config.json"]
    assert (puller.folder("org/whole") / "refs/main").read_text() == old and len(hub.gets("/resolve/")) == 1
    count = len(hub.requests)
    line, _ = ready(puller.start("hf:org/whole", "--port", "0", env={"HF_ENDPOINT": "http://127.0.0.1:9"}))
    assert line.startswith("keepd ready") and len(hub.requests) == count


@without_a_model
def test_what_others_fetched_is_served_offline_with_a_warning(puller, hub):
    of_others(puller, hub)
    r = puller.run("hf:org/whole", "--port", "0", env={"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert r.returncode == 1 and "the hub cannot be reached" in r.stderr and "HF_HUB_OFFLINE=1 serves what the cache has" in r.stderr
    line, errors = ready(puller.start("hf:org/whole", "--port", "0", env={"HF_HUB_OFFLINE": "1"}))
    assert line.startswith("keepd ready") and "whether the cache has all files of hf:org/whole is not known" in errors
    assert not hub.requests


@without_a_model
def test_a_list_that_cannot_be_written(puller, hub):
    """The files that are here are served, and the next start asks again."""
    of_others(puller, hub)
    (puller.folder("org/whole") / ".keepd").write_text("a file")
    for _ in range(2):
        count = len(hub.requests)
        line, errors = ready(puller.start("hf:org/whole", "--port", "0"))
        assert line.startswith("keepd ready") and len(hub.requests) > count and ".keepd" in errors


@without_a_model
@pytest.mark.parametrize("text", [b"", b"x", b"6000 model.safetensors", b"-1 config.json\n", b"1 ../x\n", b"99999999999999999999 x\n", b"1  \0\n"])
def test_a_list_that_is_none(puller, hub, text):
    of_others(puller, hub, "tokenizer_config.json")
    note = puller.folder("org/whole") / ".keepd" / hub.repositories["org/whole"].commits["main"]
    note.parent.mkdir()
    note.write_bytes(text)
    puller.pull("org/whole", env={"HF_HUB_OFFLINE": "1"})
    line, _ = ready(puller.start("hf:org/whole", "--port", "0"))
    assert line.startswith("keepd ready") and hub.gets("/resolve/") and note.read_text() == "".join(
        f"{len(data)} {name}\n" for name, data in sorted(WHOLE.items()))


@without_a_model
def test_a_commit_that_the_hub_no_longer_has(puller, hub):
    """Files of another program cannot be checked then, so the branch's newest commit is fetched."""
    snapshot = of_others(puller, hub)
    repository = hub.repositories["org/whole"]
    del repository.commits[snapshot.name]
    repository.files["tokenizer_config.json"] = b"{   }"
    new = repository.commit("main")
    line, _ = ready(puller.start("hf:org/whole", "--port", "0"))
    assert line.startswith("keepd ready") and (puller.folder("org/whole") / "refs/main").read_text() == new
    assert (snapshot.parent / new / "tokenizer_config.json").read_bytes() == b"{   }"


# --- with a model ---

@pytest.fixture
def nano(puller, hub):
    """The bundled model in the hub, and the program that serves it."""
    binary = find_built("server/keepd") if FAKE else BINARY
    if binary is None or not binary.exists():
        pytest.skip("skip: keepd is not built")
    files = {p.name: p.read_bytes() for p in NANO.iterdir() if p.suffix in (".json", ".jinja", ".safetensors")}
    hub.repositories["org/nano"] = Repository(files)

    def server_info(*words):
        process = puller.start(*words, "--port", "0", "--threads", "1", binary=binary)
        line = process.stdout.readline()
        try:
            assert line.startswith("keepd ready at "), process.communicate(timeout=60)[1]
            return requests.get(line.split()[3] + "/server_info", timeout=60).json()
        finally:
            process.terminate()
            process.communicate(timeout=60)
    return hub.repositories["org/nano"], server_info


@pytest.mark.parametrize("folder, dense, pooling", [("1_Pooling", False, "mean"), ("1_Pooling", True, "none"), ("sets/own", False, "mean"), (None, False, "mean")])
def test_how_vectors_are_made_is_fetched(nano, folder, dense, pooling):
    """modules.json names the folder of the settings; without it the folder is 1_Pooling."""
    repository, server_info = nano
    modules = [("", "Transformer"), (folder, "Pooling")] + [("2_Dense", "Dense")] * dense
    if folder:
        repository.files["modules.json"] = json.dumps([{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
                                                       for i, (path, name) in enumerate(modules)]).encode()
    repository.files[f"{folder or '1_Pooling'}/config.json"] = json.dumps({"word_embedding_dimension": 128, "pooling_mode_mean_tokens": True}).encode()
    repository.commit("main")
    assert server_info("hf:org/nano")["pooling"] == pooling


def test_a_draft_model_by_name(nano, puller):
    _, server_info = nano
    words = ("--model", str(NANO), "--draft-model", "hf:org/nano", "--draft-tokens", "128", "--max-num-seqs", "2")
    r = puller.run(*words, "--check-config")
    assert r.returncode == 78 and "keepd: draft-model: a start fetches it: draft-model: hf:org/nano is not in the cache" in r.stderr, r.stderr
    info = server_info(*words)
    assert info["draft_model"] == "org/nano" and info["draft_tokens"] == 128 and (puller.folder("org/nano") / "refs/main").exists()
    r = puller.run(*words, "--check-config")
    assert r.returncode == 0, r.stderr
    r = puller.run("--model", str(NANO), "--draft-model", "hf:org/none", "--port", "0")
    assert r.returncode == 78 and "keepd: draft-model: the hub has no org/none" in r.stderr, r.stderr


# --- other programs ---

@without_a_model
def test_the_library_of_the_hub_finds_the_same_files(puller, hub):
    """Runs where huggingface_hub is installed."""
    pytest.importorskip("huggingface_hub")
    def library(call, **env):
        program = f"import huggingface_hub as h; print(h.{call})"
        r = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120,
                           env={**puller.env, "HF_HUB_DISABLE_XET": "1", **env})
        assert r.returncode == 0, r.stderr
        return r.stdout.strip()
    ours = puller.pull("org/gguf:Q8_0")
    assert library("hf_hub_download('org/gguf', 'm-Q8_0.gguf')", HF_HUB_OFFLINE="1") == str(ours)
    count = len(hub.gets("/blobs/"))
    assert library("hf_hub_download('org/gguf', 'm-Q8_0.gguf')") == str(ours) and len([r for r in hub.gets("/blobs/")[count:] if r[1] == "GET"]) == 0
    parts = puller.pull("org/parts")
    assert library("snapshot_download('org/parts')", HF_HUB_OFFLINE="1") == str(parts)
    theirs = library("hf_hub_download('org/gguf', 'm-Q4_K_M.gguf')")
    count = len(hub.requests)
    r = puller.run("hf:org/gguf:Q4_K_M", "--check-config")
    assert r.returncode == 0 and len(hub.requests) == count, r.stderr
    assert str(puller.pull("org/gguf:Q4_K_M")) == theirs
    assert library("scan_cache_dir().warnings") == "[]"
