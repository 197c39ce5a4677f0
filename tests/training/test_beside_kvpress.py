"""kvpress's side of bench/quality/beside_kvpress.py, on a tiny model: reading once for several methods, scoring, and
answering several questions at once, against the model run plainly."""

import json
import sys
import types

import pytest
import torch

from conftest import ROOT, make_model

kvpress = pytest.importorskip("kvpress")
sys.path.insert(0, str(ROOT / "bench" / "quality"))
import beside_kvpress  # noqa: E402

IDS = torch.randint(0, 256, (60,), generator=torch.Generator().manual_seed(1)).tolist()
AFTER = torch.randint(0, 256, (20,), generator=torch.Generator().manual_seed(2)).tolist()
METHODS = ("snapkv", "adakv", "tova", "keydiff", "knorm", "streaming", "expected_attention")


@pytest.fixture(scope="module")
def press(tmp_path_factory):
    return beside_kvpress.Press(make_model(tmp_path_factory.mktemp("llama"), "llama"), 1)


# kvpress hides what adakv evicts behind keys that repel all queries, of which heads of 8 dimensions have none.
ASKED = tuple(m for m in METHODS if m != "adakv")


def plain(press, ids):
    with torch.no_grad():
        return press.model(torch.tensor([ids])).logits[0]


def methods(share):
    return {"full": None, **{m: beside_kvpress.presses(m, share) for m in METHODS}}


def test_one_reading_serves_all_methods_and_each_keeps_its_share(press):
    kept, last = press.read(IDS, methods(0.75))
    assert torch.allclose(last, plain(press, IDS)[-1], atol=1e-5)
    for name, layers in kept.items():
        held = [keys.shape[2] - (len(masked[0]) / 2 if masked else 0) for keys, _, masked in layers]
        assert held == [60 if name == "full" else 45] * 2, name
    for name in METHODS:   # as when the method is alone
        alone, _ = press.read(IDS, {name: beside_kvpress.presses(name, 0.75)})
        assert all(torch.equal(a[0], b[0]) for a, b in zip(alone[name], kept[name])), name


def test_scores_are_those_of_a_model_that_does_not_see_what_was_evicted(press):
    count, hidden = len(IDS) + len(AFTER), torch.zeros(len(IDS) + len(AFTER), len(IDS) + len(AFTER), dtype=torch.bool)
    kept, last = press.read(IDS, methods(0.75))
    for method, evicted in (("full", slice(0, 0)), ("streaming", slice(4, 19))):
        hidden[len(IDS):, evicted] = True
        mask = torch.zeros(1, 1, count, count).masked_fill(hidden | torch.ones(count, count).triu(1).bool(), -torch.inf)
        with torch.no_grad():
            chances = press.model(torch.tensor([IDS + AFTER]), attention_mask=mask).logits[0].log_softmax(-1)[len(IDS) - 1:-1]
        nats = -sum(chances[i, t].item() for i, t in enumerate(AFTER))
        assert press.score(kept[method], last, IDS, AFTER) == pytest.approx(nats, rel=1e-5)
    assert len({press.score(kept[m], last, IDS, AFTER) for m in ("full", *ASKED)}) == 1 + len(ASKED)


def test_questions_at_once_are_answered_as_one_by_one(press):
    rows = [{"max_new_tokens": n, "choices": choices} for n, choices in ((6, None), (6, ["ab", "abc", "zz"]), (2, None))]
    questions = [AFTER[:3], AFTER[3:9], AFTER[9:]]
    for name, kept in press.read(IDS, methods(0.5))[0].items():
        if name == "adakv":
            continue
        together = press.answer(kept, len(IDS), questions, rows)
        assert together == [press.answer(kept, len(IDS), [q], [r])[0] for q, r in zip(questions, rows)], name
        assert together[1].strip() in rows[1]["choices"]
    greedy = IDS + questions[0]
    for _ in range(6):
        token = int(plain(press, greedy)[-1].argmax())
        if token in press.ends:
            break
        greedy.append(token)
    full, _ = press.read(IDS, {"full": None})
    assert press.answer(full["full"], len(IDS), questions[:1], rows[:1])[0] == press.tokenizer.decode(greedy[len(IDS) + 3:])


def test_texts_and_rows_go_on_where_they_stopped(press, tmp_path):
    essays = tmp_path / "essays"
    essays.mkdir()
    (essays / "one.txt").write_text("The quick brown fox jumps over the lazy dog. " * 4)
    row = {"context": "Every word counts. " * 4, "question": "Which?", "answer_prefix": "It is", "answer": ["a"],
           "max_new_tokens": 2, "task": "pairs", "choices": ["a", "b"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    a = types.SimpleNamespace(out=tmp_path / "out", essays=essays, rows=tmp_path / "rows.jsonl", methods=["knorm"], shares=[0.5],
                              length=64, count=2, contexts=2)
    for _ in range(2):
        beside_kvpress.press_texts(a, press)
        beside_kvpress.press_rows(a, press)
        assert len((tmp_path / "out/nats.jsonl").read_text().splitlines()) == 2
        assert len((tmp_path / "out/answers.jsonl").read_text().splitlines()) == 2
