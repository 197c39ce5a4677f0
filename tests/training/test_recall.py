"""Chats that ask for what was said: answers are in the text, and nothing of the quality benches is."""

import json
import random
import re
import sys

import recall
from conftest import ROOT

sys.path.insert(0, str(ROOT / "bench/quality"))
from lab import rows  # noqa: E402

TEXT = "The committee met on the usual day. Nothing was decided! Was anything said at all? " * 400
TALK = [("How long is a river?", "That depends on the river."), ("Tell me a story.", "Once there was a town.")]


def chats(n, talk=TALK):
    return [recall.chat(random.Random(f"1 {i}"), TEXT, talk, 2000)["messages"] for i in range(n)]


def test_the_same_seed_gives_the_same_chats():
    assert chats(20) == chats(20)


def test_turns_alternate_and_texts_are_of_the_asked_size():
    for messages in chats(200) + chats(50, talk=[]):
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert 500 < sum(len(m["content"]) for m in messages) < 2 * 2000 + 1500


def test_answers_can_be_found_in_the_text():
    """The value at the end of an answer was said before."""
    found = 0
    for messages in chats(200):
        value = re.split(r" ", messages[-1]["content"].rstrip("."))[-1]
        found += value in " ".join(m["content"] for m in messages[:-2]) + messages[-2]["content"]
    assert found >= 195     # some answers end with a word of their own ("pieces", "floor")


def test_nothing_that_the_bench_asks_for_is_trained(tmp_path):
    theirs = {*rows.WORDS, *rows.NAMES, *(v for _, _, _, values in rows.FACTS for v in values)}
    mine = {*recall.PEOPLE, *recall.THINGS}
    for kinds in (recall.ABOUT_PEOPLE, recall.ABOUT_THINGS):
        for told, asked, answered, draw in kinds:
            mine |= {draw(random.Random(i)) for i in range(200)}
            assert not {*told, *asked, *answered} & {s for f in rows.FACTS for s in (*f[0], f[1])}
    assert not {w.lower() for w in mine} & {w.lower() for w in theirs}


def test_the_program_writes_json_lines(script, tmp_path):
    (tmp_path / "book.txt").write_text(TEXT)
    failure, _, err = script(recall, "--text", tmp_path / "book.txt", "--count", 5, "--out", tmp_path / "r.jsonl")
    assert failure is None, failure + err
    assert len([json.loads(line)["messages"] for line in (tmp_path / "r.jsonl").read_text().splitlines()]) == 5
