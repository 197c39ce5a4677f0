"""The laboratory's own arithmetic: schedules, shares, statistics, tasks, stored rows, documents."""
import argparse
import json
import lzma
import pathlib
import sys
import types
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench" / "quality"))
import quality  # noqa: E402
from lab import anatomy, client, packed, plan, plots, report, runner, statistics, store, tasks  # noqa: E402


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 1000)


def count(messages, prompt):
    """Stands in for a tokenizer: four characters a token, five for a message's frame."""
    return sum(5 + len(m["content"]) // 4 for m in messages) + (3 if prompt else 0)


def test_a_dialogue_is_reproducible_fits_and_has_an_answer_in_its_history():
    for task in tasks.TASKS:
        for number in (0, 1):
            d = tasks.make(task, 1024, number, count)
            assert d == tasks.make(task, 1024, number, count)
            assert 0.8 * 1024 <= d.tokens <= 1024
            assert d.history[-1]["role"] == "assistant"
            assert len(d.questions) == (0 if task == "loss" else tasks.FORKS)
    facts = tasks.make("needle", 1024, 0, count)
    for q in facts.questions:
        value = q.expected.rstrip(".").split()[-1]
        assert value in facts.history[0]["content"]
        assert abs(facts.history[0]["content"].index(value) / len(facts.history[0]["content"]) - q.depth) < 0.15


def test_two_needle_dialogues_cover_all_depths():
    bins = {int(q.depth * tasks.DEPTHS) for n in (0, 1) for q in tasks.make("needle", 2048, n, count).questions}
    assert bins == set(range(tasks.DEPTHS))


def test_trace_answers_follow_from_the_history():
    d = tasks.make("trace", 1024, 0, count)
    said = " ".join(m["content"] for m in d.history if m["role"] == "assistant")
    for q in d.questions:
        name = q.expected[0]
        last = [s for s in said.replace("So ", "").split(". ") if s.startswith(f"{name} = ")][-1]
        assert last.rstrip(".") + "." == q.expected


def peak_by_rule(kv, read, turn, answer):
    """paging/due.h, step by step: the most entries ever held by a prompt, a turn and its answer."""
    held = most = 0
    for new in (read, turn):
        done = 0
        while done < new:
            room = min(kv["chunk"], new - done)
            held, done = held + room, done + room
            most = max(most, held)
            if (done % kv["chunk"] == 0 and held > kv["budget"]) or (done == new and held > kv["budget"] + kv["buffer"]):
                held = kv["budget"]
    for _ in range(answer):
        if held + 1 > kv["budget"] + kv["buffer"]:
            held = kv["budget"]
        held += 1
        most = max(most, held)
    return most


@pytest.mark.parametrize("share", plan.SHARES)
def test_the_share_is_never_exceeded(share):
    for task in tasks.ANSWERED:
        for number in range(4):
            d = tasks.make(task, 1024, number, count)
            kv = plan.kv_fields(plan.Cell(task, 1024, "global", share), d)
            allowed = int(d.tokens * share)
            most = max(peak_by_rule(kv, d.read, turn, 200) for turn in (1, d.turn // 2, d.turn))
            assert most <= allowed, (task, number, kv)
            assert most >= 0.85 * allowed, "the share is used"


def test_every_beginning_of_the_schedule_is_balanced():
    cells = plan.table(1024, plan.METHODS)
    order = plan.schedule(cells, 8)
    assert len(order) == len(set(order)) and {c for c, _ in order} == set(cells)
    for end in (len(order) // 3, len(order) // 2, len(order)):
        seen = {}
        for cell, d in order[:end]:
            assert d == seen.get(cell, -1) + 1                   # dialogues in order
            seen[cell] = d
        for cell, last in seen.items():
            twins = [seen.get(c, -1) for c in cells if c.group == cell.group and c.weight == cell.weight]
            assert max(twins) - min(twins) <= 1


def test_cells_are_chosen_by_pattern():
    cells = plan.table(1024, ["full", "global", "gkv"])
    names = [c.name for c in quality.wanted(argparse.Namespace(cells="trace/1024/*/0.25,*/2048/full/*"), cells)]
    assert "trace/1024/gkv/0.25" in names and "memory/2048/full/1" in names
    assert all(n.endswith("/0.25") and n.startswith("trace/1024/") or "/2048/full/" in n for n in names)
    assert quality.wanted(argparse.Namespace(cells=None), cells) == cells
    with pytest.raises(SystemExit, match="there is no such cell"):
        quality.wanted(argparse.Namespace(cells="trace/1023/*"), cells)


def test_goal_cells_reach_four_hundred_pairs_in_a_whole_run():
    order = plan.schedule(plan.table(1024, plan.METHODS), 50)
    for method in ("full", "global", "trimkv", "streaming"):
        cell = [c for c, _ in order if (c.task, c.length, c.method) == ("memory", 1024, method) and c.share in (1.0, 0.25)]
        assert len(cell) * tasks.FORKS >= 400


def test_bootstrap_covers_the_truth_and_pairs_are_aligned():
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(40):
        truth = rng.beta(8, 2, 60)                               # dialogues differ: clusters
        values = np.stack([rng.binomial(4, truth), np.full(60, 4)], 1).astype(float)
        mean, low, high = statistics.mean(values)
        assert low <= mean <= high
        covered += low <= 0.8 <= high
    assert covered >= 33                                         # 38 expected
    a, b = {0: (4, 4), 1: (2, 4), 5: (0, 4)}, {0: (3, 4), 1: (2, 4), 7: (4, 4)}
    mean, low, high = statistics.paired(a, b)
    assert mean == pytest.approx(1 / 8) and low <= mean <= high
    assert statistics.paired({0: (1, 4)}, {1: (1, 4)}) is None


def test_mean_over_tasks_weighs_tasks_alike():
    many, few = np.array([[4.0, 4.0]] * 50), np.array([[0.0, 4.0]] * 2)
    assert statistics.over_tasks([many, few])[0] == pytest.approx(0.5)
    assert statistics.over_tasks([many, np.empty((0, 2))]) is None


def test_store_survives_a_cut_line_and_forgets_methods(tmp_path):
    s = store.Store(tmp_path, "ab" * 32)
    s.add("memory/64/full/1/0", {"method": "full", "got": 4})
    s.add("memory/64/h2o/0.25/0", {"method": "h2o", "got": 1})
    with s.path.open("a") as f:
        f.write('{"key": "memory/64/full/1/1", "met')
    again = store.Store(tmp_path, "ab" * 32)
    assert set(again.rows) == {"memory/64/full/1/0", "memory/64/h2o/0.25/0"}
    again.add("memory/64/full/1/1", {"method": "full", "got": 3})
    assert len(store.Store(tmp_path, "ab" * 32).under("memory/64/full/1")) == 2
    again.forget({"h2o"})
    assert set(store.Store(tmp_path, "ab" * 32).rows) == {"memory/64/full/1/0", "memory/64/full/1/1"}


def test_a_run_goes_on_from_packed_rows(tmp_path):
    rows = [{"key": f"memory/64/full/1/{n}", "method": "full", "got": n} for n in range(3)]
    whole = "".join(json.dumps(r) + "\n" for r in rows) + '{"key": "memory/64/full/1/3", "met'
    (tmp_path / "rows.jsonl.xz").write_bytes(lzma.compress(whole.encode()))
    s = store.Store(tmp_path, "ab" * 32)
    s.add(rows[1]["key"], {"method": "full", "got": 9})
    s.take(packed.rows(tmp_path / "rows.jsonl.xz"))
    assert [r["got"] for r in sorted(store.Store(tmp_path, "ab" * 32).rows.values(), key=lambda r: r["key"])] == [0, 9, 2]


def test_a_connection_that_was_closed_is_asked_again(monkeypatch):
    monkeypatch.setattr(client.time, "sleep", lambda _: None)
    c, left = client.Client("http://nowhere"), [3]

    def post(*_, **__):
        left[0] -= 1
        if left[0] >= 0:
            raise client.requests.ConnectionError
        return types.SimpleNamespace(status_code=200, raise_for_status=lambda: None, json=lambda: {"answer": 1})

    c.local.session = types.SimpleNamespace(post=post)
    assert c.post("/x", {}) == {"answer": 1}
    left[0] = 4
    with pytest.raises(client.requests.ConnectionError):
        c.post("/x", {})


METHODS = ("full", "global", "trimkv", "rkv", "streaming")
RIGHT = {"full": 4, "global": 4, "trimkv": 3, "rkv": 2, "streaming": 1}


def filled(folder, right, dialogues=6):
    """A store as a run leaves it; `right`: answers of four that a method gets right."""
    s = store.Store(folder, "cd" * 32)
    for cell in plan.table(1024, METHODS) + plan.ablations(1024):
        for d in range(dialogues):
            got = right[cell.method]
            row = {"method": cell.method, "dialogue": d, "tokens": 1000, "got": got, "of": 4, "right": [i < got for i in range(4)],
                   "depths": [0.1, 0.3, 0.6, 0.9]}
            if cell.task == "loss":
                row = {"method": cell.method, "dialogue": d, "tokens": 1000, "got": 900.0 - 10 * got, "of": 500}
            s.add(f"{cell.name}/{d}", row)
    for method in METHODS:
        s.add(f"anatomy/{anatomy.cell_of(method, 1024).name}/0", {
            "method": method, "dialogue": 0, "prompt_tokens_per_s": 1000.0, "tokens_per_s": 100.0, "evictions": 10, "eviction_seconds": 0.01,
            "busy_seconds": 1.0, "bytes": 4096, "lengths": [[3, 5], [4, 4]], "counts": [1] * anatomy.BINS, "seen": 900})
    return s


def facts():
    return {"sha": "cd" * 32, "daemon": "keepd 0", "date": "2026-01-01", "not_offered": {"ems": "unknown policy 'ems'"}, "gates": {},
            "sharing": "", "completeness": ""}


def test_goals_are_judged_from_the_numbers(tmp_path):
    judged = report.goals(report.Results(filled(tmp_path / "good", RIGHT), 1024, METHODS))
    assert [g["met"] for g in judged] == [True] * len(judged)
    worse = report.goals(report.Results(filled(tmp_path / "bad", {**RIGHT, "global": 2, "rkv": 3}), 1024, METHODS))
    missed = [g["goal"] for g in worse if g["met"] is False]
    assert any("`global` not below any other method with 1/8" in g for g in missed)
    assert any("at twice the trained length (memory)" in g for g in missed)
    assert any("minus `trimkv`" in g for g in missed)
    empty = report.goals(report.Results(store.Store(tmp_path / "none", "00"), 1024, METHODS))
    assert {g["met"] for g in empty} == {None}


def test_documents_are_written_whole(tmp_path):
    results = report.Results(filled(tmp_path / "store", RIGHT), 1024, METHODS)
    (tmp_path / "QUALITY.notes.md").write_text("<!-- weights and gates: 0123456789ab -->\nabout other weights\n")
    cells = plan.table(1024, METHODS)
    report.write(results, facts(), cells, quality.TEMPLATE, tmp_path)
    page = (tmp_path / "QUALITY.md").read_text()
    assert "| rkv | 50.0 [50.0, 50.0] |" in page and "unknown policy 'ems'" in page
    assert "about other weights" not in page, "notes belong to the weights they name"
    assert "| `horizon=16` |" in page
    data = json.loads((tmp_path / "quality.json").read_text())
    assert len([r for r in data["rows"] if not r.get("variant")]) == len(cells)
    for name in ("quality", "quality-needle", "quality-density", "quality-allocation"):
        ElementTree.parse(tmp_path / f"{name}.svg")


def test_gates_are_compared_with_those_of_the_same_kind_trained_alike(tmp_path):
    s = filled(tmp_path, RIGHT)
    kind = {"type": "rg", "tying": "code", "width": 64, "trained_budget": 256, "parameters": 1000}
    kinds = {"wide-abc123": {**kind, "width": 256}, "": kind, "again-123456": kind}
    for label, got in (("again-123456", 3), ("wide-abc123", 2)):
        for cell in plan.with_gates(1024, label):
            for d in range(6):
                s.add(f"{cell.name}/{d}", {"method": "global", "dialogue": d, "tokens": 1000, "got": got, "of": 4})
    text = report.gates_text(report.Results(s, 1024, METHODS), kinds)
    own, base, wide = text.splitlines()[2:]
    assert own.startswith("| the model's own | code | 64 | 256 | 1 k | 100.0 [100.0, 100.0] |") and own.endswith("|  |  |")
    assert base.startswith("| `again` |") and base.endswith("|  |  |")
    assert wide.endswith("| -25.0 [-25.0, -25.0] | -25.0 [-25.0, -25.0] |")
    assert report.gates_text(report.Results(s, 1024, METHODS), {}) == ""


def test_what_a_gates_file_says_of_itself():
    kind = quality.gates_kind(ROOT / "bundled/keepd-nano" / "gates.safetensors")
    assert (kind["type"], kind["tying"], kind["width"], kind["trained_budget"]) == ("rg", "code", 64, 256)
    assert kind["parameters"] == 6 * 64 * (256 + 1) + 4 * (64 + 1)


def test_documents_of_a_run_with_holes(tmp_path):
    """A run that was ended early, and a method that was refused, still give a page that says so."""
    s = store.Store(tmp_path / "store", "cd" * 32)
    cell = plan.Cell("memory", 1024, "rkv", 1 / 16)
    s.add(f"{cell.name}/0", {"method": "rkv", "dialogue": 0, "refused": "kv.budget is 3, must be at least 8"})
    results = report.Results(s, 1024, METHODS)
    report.write(results, facts(), plan.table(1024, METHODS), quality.TEMPLATE, tmp_path)
    page = (tmp_path / "QUALITY.md").read_text()
    assert "must be at least 8" in page and "refused" in page and "not measured" in page
    for name in ("quality", "quality-needle", "quality-density", "quality-allocation"):
        ElementTree.parse(tmp_path / f"{name}.svg")


def test_every_method_has_its_look():
    assert set(plots.LOOK) == {*plan.METHODS, "static"}  # a gates file in answers.py
    assert len(set(plots.LOOK.values())) == len(plots.LOOK)


# --- the question is known -----------------------------------------------------------------------


def test_known_cells_compress_once_behind_the_question(tmp_path):
    cells = plan.known(1024, ["full", "global", "snapkv"])
    assert len({c.name for c in cells}) == len(cells) == 4 * (1 + 2 * 3)
    short = next(c for c in cells if c.method == "snapkv" and c.share == 1 / 8 and dict(c.extra).get("window"))
    kv = plan.kv_fields(short, argparse.Namespace(tokens=1000))
    assert kv == {"policy": "snapkv", "budget": 125, "buffer": tasks.ANSWER_TOKENS[short.task], "chunk": plan.NEVER, "window": 8}

    asked = []
    dialogue = argparse.Namespace(history=["history"], tokens=1000, questions=[
        argparse.Namespace(message=n, expected="right", depth=0) for n in range(4)])
    client_ = argparse.Namespace(chat=lambda messages, most, fields, **_: asked.append((messages, fields)) or {
        "choices": [{"message": {"content": "It is right" if messages[1] else "wrong"}}], "usage": {"kv_details": {"kept_entries": 1}}})
    lab = runner.Runner(client_, store.Store(tmp_path, "ef" * 32), True)
    lab.dialogue = lambda *_: dialogue
    lab.unit(short, 0)
    assert [m for m, _ in asked] == [["history", n] for n in range(4)]      # nothing is read before its question
    assert all(fields["budget"] == 125 for _, fields in asked)
    lab.store.add("needle/1024/full/1/0", {"method": "full", "dialogue": 0, "got": 4, "of": 4})
    for task in tasks.ANSWERED:
        for cell in cells:
            if cell.task == task and (cell.method == "full" or cell == plan.Cell(task, 1024, "snapkv", 1 / 8, 1.0, short.extra)):
                lab.store.add(f"{cell.name}/0", {"method": cell.method, "dialogue": 0, "got": 4 if cell.method == "full" else 3, "of": 4})
    lines = report.known_table(report.Results(lab.store, 1024, []), ["full", "global", "snapkv"]).splitlines()
    assert "| snapkv, window 8 |  |  | 75.0 [75.0, 75.0] | -25.0 [-25.0, -25.0] |" in lines
