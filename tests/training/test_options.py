"""Wrong inputs end a script at its start, by the argument's or the file's name: never with a stack of calls."""

import json

import pytest

import convert_trimkv
import distill
import fit_gates
import record
import train_gates
from conftest import make_model


@pytest.fixture
def files(tmp_path, base):
    """Inputs that a user may confuse."""
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9 " * 99)
    (tmp_path / "text.jsonl").write_text("not JSON\n")
    (tmp_path / "empty").write_text("")
    broken = make_model(tmp_path / "broken", "qwen3")
    (broken / "config.json").write_text("{")
    return {"tmp": tmp_path, "base": base}


WRONG = (
    (train_gates, "{base} --chats {tmp}/none --run {tmp}/run", "--chats", "No such file"),
    (train_gates, "{base} --chats {tmp} --run {tmp}/run", "--chats", "Is a directory"),
    (train_gates, "{base} --chats {tmp}/empty --run {tmp}/run", "empty", "no chats"),
    (train_gates, "{base} --chats {tmp}/text.jsonl --run {tmp}/run", "text.jsonl:1", "not JSON"),
    (train_gates, "{base} --text {tmp}/none --run {tmp}/run", "--text", "No such file"),
    (train_gates, "{base} --text {tmp}/latin1.txt --run {tmp}/run", "latin1.txt", "not UTF-8"),
    (train_gates, "{base} --text {tmp}/text.jsonl --run {tmp}/run", "text.jsonl", "fewer than 1026 tokens"),
    (train_gates, "{base} --start {tmp}/none --run {tmp}/run", "--start", "No such file"),
    (train_gates, "{base} --start {tmp}/text.jsonl --run {tmp}/run", "text.jsonl", "safetensors"),
    (train_gates, "{base} --gates {tmp}/none --evaluate", "--evaluate", "no such file"),
    (train_gates, "{tmp}/none --text {tmp}/text.jsonl --run {tmp}/run", "config.json", "not found"),
    (train_gates, "{tmp}/broken --text {tmp}/text.jsonl --run {tmp}/run", "config.json", "not JSON"),
    (train_gates, "{base} --text {tmp}/text.jsonl --rows 0 --run {tmp}/run", "--rows", "above 0"),
    (train_gates, "{base} --text {tmp}/text.jsonl --length 3 --run {tmp}/run", "--length", "at least 16"),
    (train_gates, "{base} --text {tmp}/text.jsonl --budget -1 --run {tmp}/run", "--budget", "above 0"),
    (train_gates, "{base} --text {tmp}/text.jsonl --minutes nan --run {tmp}/run", "--minutes", "above 0"),
    (fit_gates, "{base} --run {tmp}/run", "--chats or --text", "required"),
    (fit_gates, "{base} --text {tmp}/none --run {tmp}/run", "--text", "No such file"),
    (fit_gates, "{base} --text {tmp}/text.jsonl --texts 1 --run {tmp}/run", "--texts", "at least 2"),
    (fit_gates, "{base} --text {tmp}/text.jsonl --length 9 --run {tmp}/run", "--length", "four windows"),
    (fit_gates, "{base} --text {tmp}/text.jsonl --run {tmp}/run", "text.jsonl", "fewer than 2050 tokens"),
    (distill, "{base} --records {tmp}/none --run {tmp}/run --out {tmp}/out", "--records", "No such file"),
    (distill, "{base} --records {tmp}/empty --run {tmp}/run --out {tmp}/out", "empty", "no records"),
    (distill, "{base} --records {tmp}/text.jsonl --run {tmp}/run --out {tmp}/out", "text.jsonl:1", "not JSON"),
    (record, "--chats {tmp}/none --out {tmp}/out", "--chats", "No such file"),
    (record, "--chats {tmp}/empty --out {tmp}/out --budget 0", "--budget", "above 0"),
    (convert_trimkv, "{tmp}/none --base {base} --out {tmp}/out", "weights", "No such file"),
    (convert_trimkv, "{tmp}/text.jsonl --base {base} --out {tmp}/out", "text.jsonl", "cannot be read"),
    (convert_trimkv, "{tmp}/text.jsonl --config {tmp}/text.jsonl --base {base} --out {tmp}/out", "text.jsonl", "not JSON"),
    (convert_trimkv, "{tmp}/text.jsonl --base {tmp}/none --out {tmp}/out", "config.json", "not found"),
    (convert_trimkv, "{tmp}/text.jsonl --base {base} --horizon 0.5 --out {tmp}/out", "--horizon", "at least 1"),
)


@pytest.mark.parametrize("module, line, name, says", WRONG, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_what_is_wrong_is_named(script, files, module, line, name, says):
    failure, out, err = script(module, *line.format(**files).split())
    said = failure + err if failure else ""
    assert name in said and says in said, said
    assert out == "" or all(json.loads(s) for s in out.splitlines())
    assert not (files["tmp"] / "out").exists()
