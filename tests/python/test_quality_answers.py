"""Questions about contexts (bench/quality/answers.py): rows, both protocols against a daemon that is played, and the table."""
import csv
import json
import pathlib
import sys
import types

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench" / "quality"))
import agent  # noqa: E402
import answers  # noqa: E402
import beside_kvpress  # noqa: E402
from lab import rows, statistics  # noqa: E402


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 500)


def count(text):
    return len(text.split())


@pytest.mark.parametrize("task", rows.MAKERS)
def test_rows_are_reproducible_and_hold_their_answers(task):
    made = rows.make(task, 300, 1, [rows.PROSE], count)
    assert made == rows.make(task, 300, 1, [rows.PROSE], count) != rows.make(task, 300, 2, [rows.PROSE], count)
    assert len(made) == rows.QUESTIONS and len({json.dumps(r["context"]) for r in made}) == 1
    text = json.dumps(made[0]["context"])
    assert 0.4 * 300 < count(text) < 1.5 * 300
    for r in made:
        assert r["answer"][0] in text and r["question"].strip() not in text
        assert not r["choices"] or r["answer"][0] in r["choices"]
    assert len({r["question"] for r in made}) == rows.QUESTIONS


class Played:
    """Answers as the daemon does: prompts continue conversations of their salt, and a prompt that exceeds budget and
    buffer is compressed at its end. `late`: compresses one token later. A token is a word."""

    def __init__(self, late=0):
        self.late, self.kept, self.prompts, self.url = late, {}, [], "played:"
        self.http = types.SimpleNamespace(get=lambda *_, **__: types.SimpleNamespace(json=lambda: {"data": []}))

    def post(self, path, body):
        if path == "/apply-template":
            return {"prompt": " ".join(f"<{m['role']}> {m['content']}" for m in body["messages"]) + " <answer> "}
        if path == "/tokenize":
            return {"tokens": body["prompt"].split()}
        ids, kv, budget = body["prompt"], body["kv"], body["kv"].get("budget", 1 << 30)
        known = [k for k in self.kept if k[0] == body["cache_salt"] and list(k[1]) == ids[:len(k[1])]]
        last = max(known, key=lambda k: len(k[1]), default=None)
        held = self.kept[last] + len(ids) - len(last[1]) if last else len(ids)
        if held > budget + kv.get("buffer", 0):
            held = budget + self.late
        if kv.get("retain", True):
            self.kept[body["cache_salt"], tuple(ids)] = held
        self.prompts.append(ids)
        streams = 6
        return {"choices": [{"text": " 17"}], "usage": {
            "prompt_tokens_details": {"cached_tokens": len(last[1]) if last else 0},
            "kv_details": {"seen_tokens": len(ids), "kept_entries": streams * held, "evicted_entries": streams * (len(ids) - held)}}}


def group():
    context = "Every " + "word " * 200
    return [dict(context=context, question=f"Which number has {w} ?", answer_prefix=f"{w} :", answer=[v], max_new_tokens=3,
                 task="pairs") for w, v in (("acorn", "17"), ("birch", "23"))]


def asked(tmp_path, daemon, protocols=answers.PROTOCOLS, method="snapkv"):
    store = answers.Store(tmp_path)
    context = answers.Context(daemon, "pairs", 0, group())
    answers.run_cell(daemon, store, context, method, 1.0 if method == "full" else 0.25, protocols, "")
    return store


def test_both_protocols_compress_where_they_say(tmp_path):
    daemon = Played()
    store = asked(tmp_path, daemon, ["known"])
    after_question, prompt = daemon.prompts[:2]
    assert after_question[-1] == "?" and prompt == after_question + ["<answer>", "acorn", ":"]
    daemon.prompts.clear()
    store = asked(tmp_path, daemon, ["unknown"])
    assert daemon.prompts[0][-1] == "word" and [p[-2] for p in daemon.prompts[1:]] == ["acorn", "birch"]
    found = {p: store.done["pairs", 0, "snapkv", 0.25, p] for p in answers.PROTOCOLS}
    assert [(line["got"], line["of"]) for line in found.values()] == [(1, 2), (1, 2)]
    both = asked(tmp_path / "both", Played())       # in one run, the known question's prompt continues nothing that was compressed before
    assert set(both.done) == {("pairs", 0, "snapkv", 0.25, p) for p in answers.PROTOCOLS}
    daemon.prompts.clear()
    asked(tmp_path, daemon)          # everything is in the file
    assert not daemon.prompts


def test_lines_of_an_earlier_run_are_not_asked_again(tmp_path):
    lines = [dict(task="pairs", context=0, method="snapkv", share=0.25, protocol=p, got=2, of=2, texts=["", ""]) for p in answers.PROTOCOLS]
    answers.Store(tmp_path).take(lines)
    daemon = Played()
    assert set(asked(tmp_path, daemon).done) == {("pairs", 0, "snapkv", 0.25, p) for p in answers.PROTOCOLS}
    assert not daemon.prompts


@pytest.mark.parametrize("protocol", answers.PROTOCOLS)
def test_a_compression_at_another_moment_is_noticed(tmp_path, protocol):
    with pytest.raises(RuntimeError, match="another moment"):
        asked(tmp_path, Played(late=-1), [protocol])


def test_the_table_pairs_by_context_and_full_serves_both_protocols(tmp_path):
    store = answers.Store(tmp_path)
    for number in range(4):
        for method, share, protocol, got in (("full", 1.0, "unknown", 6), ("global", 0.25, "known", 5)):
            if number < 3 or method == "full":
                store.add(task="told", context=number, method=method, share=share, protocol=protocol, got=got, of=8, texts=[])
    table = answers.Table(store, ["told"])
    assert table.over_full("known", "global", 0.25) == pytest.approx((-1 / 8, -1 / 8, -1 / 8))
    assert table.over_full("unknown", "global", 0.25) is None
    assert table.mean("known", "full", 0.25)[0] == pytest.approx(6 / 8)
    assert "| `global` | 62.5 [62.5, 62.5] | -12.5 [-12.5, -12.5] | 24 |" in table.markdown("known", [0.25])


def test_kvpress_reads_what_is_written(tmp_path):
    store = asked(tmp_path, Played(), ["unknown"])
    answers.write_kvpress(types.SimpleNamespace(out=tmp_path), store, [("pairs", 0, group())])
    folder = tmp_path / "snapkv__0.75__unknown"
    predictions = list(csv.DictReader((folder / "predictions.csv").open()))
    assert [p["predicted_answer"] for p in predictions] == [" 17", " 17"]
    assert json.loads((folder / "metrics.json").read_text()) == {"pairs": {"string_match": 50.0}}
    assert "compression_ratio: 0.75" in (folder / "config.yaml").read_text()


# --- an agent's sessions ---------------------------------------------------------------------------


def test_sessions_are_reproducible_and_hold_their_answers():
    first, same, other = (agent.Session(seed, 12, (40, 80), count) for seed in (1, 1, 2))
    assert first.messages == same.messages != other.messages
    for step in range(1, 12):
        found = first.rows(step)
        assert [which for which, _ in found] == [which for which, _ in same.rows(step)]
        assert max(which for which, _ in found) >= step - agent.NEAR and min(which for which, _ in found) < step
        for which, row in found:
            printed = row["context"][4 * which + 3]
            assert printed["role"] == "tool" and row["answer"][0] in printed["content"] and f"step {which + 1}" in row["question"]


def rendered(messages):
    return sum(count(m["content"]) + 4 + 5 * ("tool_calls" in m) for m in messages)


def test_only_the_newest_output_stays_where_old_output_is_dropped():
    session = agent.Session(1, 12, (40, 80), count)
    _, row = session.rows(11)[0]
    dropped = agent.without_old(row, 1000, count, rendered)["context"]
    assert [m["role"] for m in dropped] == [m["role"] for m in row["context"]]
    kept = [m["content"] != agent.DROPPED for m in dropped if m["role"] == "tool"]
    assert 0 < sum(kept) < len(kept) and kept == sorted(kept)
    assert row["context"][3]["content"] != agent.DROPPED, "the session itself is unchanged"
    newest_dropped = 4 * (kept.count(False) - 1) + 3
    one_more = dropped[:newest_dropped] + row["context"][newest_dropped:]
    assert rendered(dropped) <= 1000 < rendered(one_more), "calls count as well"


def test_the_table_of_sessions_is_by_steps_between(tmp_path):
    store = agent.Rows(tmp_path / "rows.jsonl", "small")
    what = dict(model="small", result=[40, 80], turns=12, share=0.125, method="global")
    store.add([{**what, "session": n, "step": step, "which": which, "right": right} for n in range(2) for step, which, right in ((6, 5, True), (11, 1, False))])
    again = agent.Rows(tmp_path / "rows.jsonl", "small")
    assert again.done == store.done and len(again.done) == 4
    a = types.SimpleNamespace(name="small", turns=12, result=[40, 80], share=0.125)
    assert agent.ages(types.SimpleNamespace(turns=7))[1:] == [("5 to 4 steps", 4, 4), ("5 to 7 steps", 4, 7)], "no step counts twice"
    assert "| `global` | 100.0 [100.0, 100.0] (2) |  | 0.0 [0.0, 0.0] (2) | 50.0 [50.0, 50.0] (4) |" in agent.table(a, again)


# --- beside kvpress ----------------------------------------------------------------------------------


def test_the_second_half_is_scored_after_one_eviction(tmp_path):
    """keepd's side of beside_kvpress.py: one chunk is one half, and only the other half counts."""
    asked = []

    class Scoring:
        def post(self, path, body):
            return {"tokens": list(range(len(body["prompt"].split())))}

        def score(self, ids, kv):
            asked.append((len(ids), kv))
            return [-1.0] * 31 + [-2.0] * 32

    essays = tmp_path / "essays"
    essays.mkdir()
    (essays / "long.txt").write_text("word " * 70)
    (essays / "short.txt").write_text("word " * 20)
    a = types.SimpleNamespace(out=tmp_path / "out", essays=essays, methods=["tova"], shares=[0.25], length=64, count=9)
    beside_kvpress.keepd_texts(a, Scoring())
    assert asked == [(64, {"policy": "full"}), (64, {"policy": "tova", "budget": 8, "buffer": 32, "chunk": 32})]
    nats = beside_kvpress.Nats(a.out)
    assert nats.cells == {("keepd", "full", 1.0): {0: (64.0, 32)}, ("keepd", "tova", 0.25): {0: (64.0, 32)}}
    beside_kvpress.keepd_texts(a, Scoring())
    assert len(asked) == 2


def test_both_sides_are_compared_where_both_were_measured(tmp_path):
    nats, store = beside_kvpress.Nats(tmp_path), answers.Store(tmp_path)
    for text, (own, theirs) in enumerate(((30.0, 20.0), (34.0, 24.0), (50.0, None))):
        for side, value in (("keepd", own), ("kvpress", theirs)):
            for method, share, extra in (("full", 1.0, 0), ("tova", 0.25, 5)):
                if value is not None:
                    nats.add(side=side, method=method, share=share, text=text, nats=value + extra, tokens=10)
    assert "| `tova` | 1/4 | +0.500 [0.500, 0.500] | +0.500 [0.500, 0.500] | +1.000 [1.000, 1.000] | 2 |" in beside_kvpress.nats_table(nats)
    for context, own, theirs in ((0, 4, 3), (1, 2, 1), (2, 1, None)):
        for method, got in (("tova", own), ("kvpress:tova", theirs)):
            if got is not None:
                store.add(task="pairs", context=context, method=method, share=0.25, protocol="unknown", got=got, of=4, texts=[])
    line = beside_kvpress.answers_table(store).splitlines()[-1]
    assert line.startswith("| `tova` | 1/4 | 75.0") and "| 25.0 [25.0, 25.0] | 8 |" in line and "50.0" in line
