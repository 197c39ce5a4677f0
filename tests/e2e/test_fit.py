"""keepd fit: gates for a model from texts alone, the table of what they lose, and what is refused."""
import functools
import json
import os
import pathlib
import re
import resource
import signal
import subprocess

import pytest
from test_fit_families import SHORT, with_tokenizer

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.path.abspath(os.environ.get("KEEPD_BIN", ROOT / "build" / "keepd"))
MODEL = str(ROOT / "bundled/keepd-nano")
TEXTS = [str(ROOT / "docs/SCALING.md"), str(ROOT / "SECURITY.md")]


def keepd(*args, **env):
    return subprocess.run([BINARY, *map(str, args)], env={**os.environ, **env}, capture_output=True, text=True, timeout=300)


def limit_file_size(size):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def header(path):
    data = pathlib.Path(path).read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(json.loads(data[8:8 + size])["__metadata__"]["keepd"])


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """As users get them, with all steps."""
    folder = tmp_path_factory.mktemp("fit")
    return folder, keepd("fit", MODEL, "--text", *TEXTS, "--threads", 1, "--out", folder / "1.safetensors", KEEPD_TEST_FIT_STEPS="")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A model of the same kind that is fitted in a third of the time. Its tokens are bytes."""
    return with_tokenizer("qwen3", tmp_path_factory.mktemp("small"))


def test_gates_are_written_and_served(fitted):
    folder, run = fitted
    assert run.returncode == 0, run.stderr
    about, own = header(folder / "1.safetensors"), header(pathlib.Path(MODEL) / "gates.safetensors")
    assert about["type"] == "rg" and about["width"] == 64 and about["horizon"] == 1
    assert (about["layers"], about["heads"], about["d_model"]) == (own["layers"], own["heads"], own["d_model"])
    assert len(about["base"]["vectors"]) == 64 and len(about["base"]["matrices"]) == 64
    check = keepd("--model", MODEL, "--gates", folder / "1.safetensors", "--check-config")
    assert check.returncode == 0, check.stderr
    assert not list(folder.glob("*.partial"))


def test_the_same_bits_for_any_number_of_threads(small, tmp_path):
    files = []
    for threads in (1, 3):
        files.append(tmp_path / f"{threads}.safetensors")
        run = keepd("fit", small, "--text", TEXTS[0], "--threads", threads, "--out", files[-1], *SHORT)
        assert run.returncode == 0, run.stderr
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_table(fitted):
    folder, run = fitted
    lines = run.stdout.splitlines()
    assert lines[0] == str(folder / "1.safetensors")
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in lines if line.startswith("| `")}
    assert list(rows) == ["`global`", "`snapkv`", "`streaming`"]
    lost = {name: [float(cell.split()[0]) for cell in cells] for name, cells in rows.items()}
    assert all(len(cells) == 3 for cells in lost.values())
    assert lost["`global`"][0] < 0.1                            # half of the tokens
    assert lost["`global`"][2] < 0.5 * lost["`streaming`"][2]   # no layer has taken the room of all others
    assert len(re.findall(r"^For at most 0\.0[25] nats per token: ", run.stdout, re.M)) == 2
    found = re.search(r"evictions lose (0\.\d+) \(newest kept: (0\.\d+)\)", run.stderr)
    assert float(found[1]) < float(found[2])
    said = [line.split(",")[0] for line in run.stderr.splitlines()]
    for work in ("measuring", "fitting", "comparing"):      # each from its beginning to its end
        lines = [re.fullmatch(rf"{work} (\d+) of (\d+)", line) for line in said]
        first, *_, last = [match for match in lines if match]
        assert first[1] == "0" and last[1] == last[2], run.stderr


def write_chats(path, count, **first):
    turn = " ".join(f"The parcel number {n} goes to room {n * 7 % 90}." for n in range(60))
    messages = [{"role": "user", "content": turn}, {"role": "assistant", "content": "Noted."}] * 3
    lines = [{"messages": [{**messages[0], **(first if i == 0 else {})}, *messages[1:]]} for i in range(count)]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def test_chats_are_texts(small, tmp_path):
    chats = write_chats(tmp_path / "chats.jsonl", 3)
    run = keepd("fit", small, "--chats", chats, "--out", tmp_path / "g.safetensors", *SHORT)
    assert run.returncode == 0, run.stderr
    assert "plain text" not in run.stderr and re.search(r"^\d+ texts", run.stderr, re.M)


def test_a_chat_that_the_template_refuses_is_plain_text(small, tmp_path):
    chats = write_chats(tmp_path / "chats.jsonl", 3, role="critic")
    run = keepd("fit", small, "--chats", chats, "--text", TEXTS[0], "--out", tmp_path / "g.safetensors", *SHORT)
    assert run.returncode == 0, run.stderr
    assert "no chat template for 1 of the chats" in run.stderr


def test_chats_become_turns_that_the_template_takes(small, tmp_path):
    """As the server joins them."""
    chats = write_chats(tmp_path / "chats.jsonl", 3, role="system")
    run = keepd("fit", small, "--chats", chats, "--chat-template", ROOT / "tests/data/jinja/no_system.jinja", "--out", tmp_path / "g.safetensors",
                *SHORT)
    assert run.returncode == 0, run.stderr
    assert "plain text" not in run.stderr and re.search(r"^\d+ texts", run.stderr, re.M)


def test_chats_that_are_none(tmp_path):
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "Hello!"}]}\n\n{"messages": "Hello!"}\n')
    run = keepd("fit", MODEL, "--chats", tmp_path / "chats.jsonl", "--out", tmp_path / "g.safetensors")
    assert run.returncode == 78 and "line 3: " in run.stderr and "messages" in run.stderr
    (tmp_path / "chats.jsonl").write_text("\n")
    run = keepd("fit", MODEL, "--chats", tmp_path / "chats.jsonl", "--out", tmp_path / "g.safetensors")
    assert run.returncode == 78 and "has no chats" in run.stderr


@pytest.mark.parametrize("args, message", [
    ((MODEL, "--chats"), "--chats: needs a file"),
    ((MODEL, "--text"), "--text: needs a file"),
    ((MODEL, "--text", "/nowhere", "--out", "{tmp}/g"), "/nowhere"),
    ((MODEL, "--text", TEXTS[0]), "cannot fit: --out: is required: no folder of gates can be written"),
    ((MODEL, "--text", TEXTS[0], str(ROOT / "docs/page.png"), "--out", "{tmp}/g"), "cannot fit: text: file 2 of 2: not valid UTF-8"),
    ((MODEL, "--text", TEXTS[0], "--minutes", "x"), "--minutes: must be a whole number"),
    ((MODEL, "--text", TEXTS[0], "--out"), "--out: needs a file"),
    ((MODEL, "--text", TEXTS[0], "--out", "/nowhere/g.safetensors"), "/nowhere/g.safetensors"),
    ((MODEL, "--text", str(ROOT / "tests/pytest.ini"), "--out", "{tmp}/g"), "tokens or more are needed"),
    ((MODEL, "--text", TEXTS[0], "--out", "{tmp}/g", "--device", "cuda"), "device"),
    (("--text", TEXTS[0]), "no model given"),
    (("/nowhere", "--text", TEXTS[0]), "/nowhere"),
    ((MODEL, "--text", TEXTS[0], "--thread", "1"), "thread"),
])
def test_refusals(args, message, tmp_path):
    run = keepd("fit", *[a.replace("{tmp}", str(tmp_path)) for a in args])
    assert run.returncode == 78 and message in run.stderr, run.stderr
    assert not list(tmp_path.iterdir())


def test_steps_for_tests_are_a_number_and_said(fitted, small, tmp_path):
    out = tmp_path / "g.safetensors"
    run = keepd("fit", small, "--text", TEXTS[0], "--out", out, *SHORT, KEEPD_TEST_FIT_STEPS="1x")
    assert run.returncode == 78 and "cannot fit: KEEPD_TEST_FIT_STEPS: must be a whole number" in run.stderr and not out.exists()
    run = keepd("fit", small, "--text", TEXTS[0], "--out", out, *SHORT, KEEPD_TEST_FIT_STEPS="20")
    assert run.returncode == 0 and "fitting 20 of 20" in run.stderr and "at most 20 steps: gates for tests" in run.stderr
    assert "gates for tests" not in fitted[1].stderr


def test_the_same_bits_without_a_file_of_measurements(small, tmp_path):
    """With a file, with one that is full halfway, and with all measurements in memory."""
    files = []
    for cache, limit in ((tmp_path / "cache", None), (tmp_path / "full", 2_000_000), ("", None)):
        files.append(tmp_path / f"{len(files)}.safetensors")
        args = ["fit", small, "--text", TEXTS[0], "--threads", 1, "--gates-cache", cache, "--out", files[-1], *SHORT]
        run = subprocess.run([BINARY, *map(str, args)], capture_output=True, text=True, timeout=300,
                             preexec_fn=limit and functools.partial(limit_file_size, limit))
        assert run.returncode == 0, run.stderr
        assert ("stays in memory" in run.stderr) == bool(limit), run.stderr
    assert len({path.read_bytes() for path in files}) == 1


def test_a_file_is_not_overwritten(tmp_path):
    there = tmp_path / "gates.safetensors"
    there.write_text("mine")
    run = keepd("fit", MODEL, "--text", *TEXTS, "--out", there)
    assert run.returncode == 78 and "is not overwritten" in run.stderr
    assert there.read_text() == "mine"


def test_help():
    run = keepd("fit", "--help")
    assert run.returncode == 0 and "--text FILE..." in run.stdout
