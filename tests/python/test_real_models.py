"""Tables and the picture of bounded caches on real models (bench/quality/real_models.py)."""
import json
import pathlib
import subprocess
import sys
from xml.etree import ElementTree

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench" / "quality"))
import real_models  # noqa: E402
from lab import client  # noqa: E402
import texts  # noqa: E402


def row(cell, number, nats, gates=None, **fields):
    fields = fields or {"policy": "full"}
    return json.dumps({"model": "small", "gates": gates, "key": f"{cell} {number} 1024 {json.dumps(fields)}", "nats": nats, "tokens": 512})


QUARTER = {"budget": 192, "buffer": 64, "chunk": 64}


def test_losses_are_paired_by_text_and_part():
    """A text that only one of both has read does not count."""
    lines = [row("code", n, 512.0 * (n + 1)) for n in range(3)]
    lines += [row("code", n, 512.0 * (n + 1) + 51.2, policy="snapkv", **QUARTER) for n in (0, 2, 7)]
    lines += [row("code", 1, 1024.0, "keepd fit", policy="global", budget=96, buffer=32, chunk=32, recent=48)]
    rows = real_models.Rows(lines)
    assert rows.models() == ["small"] and rows.labels("small", 8) == ["`global`, recent 48, keepd fit"]
    (mean, low, high), texts = rows.loss("small", "code", 4, "`snapkv`")
    assert (mean, low, high) == pytest.approx((0.1, 0.1, 0.1)) and texts == 2
    assert rows.loss("small", "chats", 4, "`snapkv`") is None
    assert real_models.table(rows, "small", 4).splitlines()[::2] == [
        "| 1/4 of the tokens | documents | code (2) | languages | chats | tools |", "| `snapkv` |  | 0.100 |  |  |  |"]


def test_columns_of_unequal_counts_show_them():
    lines = [row("code", n, 512.0) for n in range(4)] + [row("code", 0, 563.2, policy="snapkv", **QUARTER)]
    lines += [row("code", n, 512.0 + 51.2, policy="streaming", **QUARTER) for n in range(4)]
    assert real_models.table(real_models.Rows(lines), "small", 4).splitlines()[2:] == [
        "| `snapkv` |  | 0.100 (1) |  |  |  |", "| `streaming` |  | 0.100 [0.100, 0.100] (4) |  |  |  |"]


def test_goals_are_judged_by_cell():
    """At a quarter by the mean, at an eighth by the lower bound of the paired lead."""
    eighth = {"budget": 96, "buffer": 32, "chunk": 32}
    lines = [row(cell, n, 512.0) for cell in ("code", "chats") for n in range(3)]
    for cell, loss in (("code", 0.021), ("chats", 0.029)):
        lines += [row(cell, n, 512 * (1 + loss), "keepd fit", policy="global", **QUARTER) for n in range(3)]
        lines += [row(cell, n, 512 * 1.1, "keepd fit", policy="global", **eighth) for n in range(3)]
        lines += [row(cell, n, 512 * (1.2 if cell == "code" else 1 + 0.2 * n), policy="snapkv", **eighth) for n in range(3)]
    lines += [row("chats", n, 512 * 1.3, policy="streaming", **eighth) for n in range(3)]
    assert real_models.goals(real_models.Rows(lines), "small").splitlines() == [
        "1/4: 1 of 2 goals met; missed: code 0.021",
        "1/8: ahead of `snapkv` in 1 of 2; not in chats 0.100 [-0.100, 0.300]",
        "1/8: ahead of `streaming` in 1 of 1"]


def test_texts_of_the_same_number_are_not_paired_when_they_differ():
    lines = [json.dumps({**json.loads(row("code", 0, 512.0, **fields)), "text": text})
             for text, fields in (("a", {}), ("b", {}), ("b", {"policy": "snapkv", **QUARTER}), ("c", {"policy": "streaming", **QUARTER}))]
    rows = real_models.Rows(lines)
    assert rows.loss("small", "code", 4, "`snapkv`")[1] == 1 and rows.loss("small", "code", 4, "`streaming`") is None


def test_few_texts_are_not_drawn():
    lines = [row(cell, n, 512.0) for cell in real_models.CELLS for n in range(3)]
    lines += [row(cell, n, 512.0 + 5.12 * i, "keepd fit" if policy == "global" else None, policy=policy, **QUARTER)
              for i, policy in enumerate(real_models.DRAWN) for cell in real_models.CELLS for n in range({"documents": 3, "code": 2}.get(cell, 1))]
    picture = real_models.drawn(real_models.Rows(lines))
    assert ElementTree.fromstring(picture) is not None
    assert picture.count('width="12"') == 6, "documents and code"
    assert picture.count('stroke-width="1.5"') == 3, "intervals of documents"


def test_the_stored_rows_give_tables(tmp_path):
    script, picture = ROOT / "bench" / "quality" / "real_models.py", tmp_path / "out.svg"
    run = subprocess.run([sys.executable, script, ROOT / "bench" / "results" / "real-models.jsonl", picture], capture_output=True, text=True, check=True)
    assert "SmolLM2-135M" in run.stdout and "`global`, keepd fit" in run.stdout
    ElementTree.parse(picture)


def test_runs_with_names_share_a_store(tmp_path):
    """Rows of another model or other gates are not taken for one's own, and stay."""
    store, kv, ids = tmp_path / "rows.jsonl", {"policy": "global", **QUARTER}, list(range(1024))
    own, full = (texts.Scores.key("code", 0, ids, fields) for fields in (kv, {"policy": "full"}))
    for model, gates in (("small", "keepd fit"), ("small", "other"), ("large", "keepd fit")):
        scores = texts.Scores(store, (model, gates))
        assert own not in scores.rows and (full in scores.rows) == (gates == "other"), "methods without gates are the model's"
        scores.add(own, [-1.0] * 4)
        scores.add(full, [-1.0] * 4) if full not in scores.rows else None
    assert [(r["model"], r["gates"]) for r in map(json.loads, store.read_text().splitlines())] == [
        ("small", "keepd fit"), ("small", None), ("small", "other"), ("large", "keepd fit"), ("large", None)]
    assert not texts.Scores(store).rows
    taken = texts.Scores(store, ("small", "keepd fit"))
    assert taken.sample("code", [ids], kv) == {0: (2.0, 2)} and not taken.sample("code", [ids[::-1]], kv), "not of another text"
    assert real_models.Rows(store.read_text().splitlines()).labels("small", 4) == ["`global`, keepd fit", "`global`, other"]


def test_chats_of_a_base_model_are_plain_text():
    class Base:
        def tokens(self, messages, prompt):
            raise client.Refused({"message": "no chat template"})

        def post(self, path, body):
            return {"tokens": body["prompt"]}
    messages = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, {"role": "tool", "content": "x"}]
    assert texts.chat_ids(Base(), messages) == 'user: Look.\n\nassistant: [{"id": "1"}]\n\ntool: x\n\n'


def test_the_queue_goes_on_where_it_was(tmp_path):
    """Texts and gates that are there are not made again; every model is fitted before it is scored."""
    queue = [sys.executable, ROOT / "bench" / "quality" / "real_queue.py", tmp_path, "--dry-run", "--only", "gemma,qwen0.5", "--processor", "A"]

    def left():
        return subprocess.run(queue, capture_output=True, text=True, check=True).stdout.splitlines()
    lines = left()
    assert "real_texts.py" in lines[0] and " fit " in lines[1] and "texts.py" in lines[2] and "'Gemma 3 270M Q4_K_M, A' 'keepd fit'" in lines[2]
    assert sum(" fit " in line.replace("'keepd fit'", "") for line in lines) == 2
    (tmp_path / "texts").mkdir()
    for made in ("texts/tools.jsonl", "gemma.safetensors"):
        (tmp_path / made).write_text("")
    assert left() == lines[2:]
