"""Chats become ids, weights and rows as the model's own template writes them."""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from conftest import make_model, save_tokenizer
from data import BadChat, ChatEncoder, Chats, check_chat, render


@pytest.fixture(scope="module")
def tokenizer(base):
    return AutoTokenizer.from_pretrained(base)


def chat(*turns, **more):
    roles = ("user", "assistant")
    return check_chat(json.dumps({"messages": [t if isinstance(t, dict) else {"role": roles[i % 2], "content": t}
                                               for i, t in enumerate(turns)], **more}))


def weighted(tokenizer, c, other=0.3):
    """The texts of weight 1, joined by |."""
    ids, weight, _ = ChatEncoder(tokenizer, other).encode(c)
    assert set(np.unique(weight)) <= {np.float32(1), np.float32(other)}
    runs = np.split(ids, np.flatnonzero(np.diff(weight)) + 1)
    return "|".join(tokenizer.decode(part) for part, w in
                    zip(runs, np.split(weight, np.flatnonzero(np.diff(weight)) + 1)) if w[0] == 1)


def test_answers_and_their_end_of_turn_have_weight_one(tokenizer):
    c = chat("Who?", "Ann.", "Where?", "Bern, \u00fcber allem.")
    assert weighted(tokenizer, c) == "Ann.<|im_end|>|Bern, \u00fcber allem.<|im_end|>"


def test_text_is_what_the_template_writes(tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"},
                {"role": "assistant", "content": "Ann."}]
    text, _ = render(tokenizer, {"messages": messages, "tools": None})
    assert text == tokenizer.apply_chat_template(messages, tokenize=False)
    assert text.endswith("<think>\n\n</think>\n\nAnn.<|im_end|>\n"), "a last answer without thinking keeps the empty block"


def test_thinking_of_every_turn_stays(tokenizer):
    c = chat("Who?", "<think>\nA or B\n</think>\n\nAnn.", "Where?",
             {"role": "assistant", "content": "Bern.", "reasoning_content": "maps"})
    text, _ = render(tokenizer, c)
    assert "assistant\n<think>\nA or B\n</think>\n\nAnn.<|im_end|>" in text
    assert text.endswith("assistant\n<think>\nmaps\n</think>\n\nBern.<|im_end|>\n"), "no second, empty block"
    assert weighted(tokenizer, c).startswith("<think>\nA or B")


def test_tool_calls_belong_to_the_answer(tokenizer):
    c = chat("Time?", {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "clock"}}]},
             {"role": "tool", "content": "12"}, {"role": "assistant", "content": "Noon."})
    assert weighted(tokenizer, c) == "\n<tool_call>clock</tool_call><|im_end|>|Noon.<|im_end|>"


def test_without_an_end_token_only_the_answer_counts(tmp_path):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}<|endoftext|>"
    save_tokenizer(tmp_path, template)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert weighted(tokenizer, chat("Who?", "Ann.", "Where?", "Bern.")) == "Ann.|Bern.\n<|endoftext|>"


@pytest.mark.parametrize("line, field", [
    ("{", "not JSON"), ("[]", "messages"), ('{"messages": []}', "messages"),
    ('{"messages": [{"role": "user", "content": "a"}]}', "no assistant"),
    ('{"messages": [{"content": "a"}]}', r"messages\[0\].role"),
    ('{"messages": [{"role": "user", "content": 3}]}', r"messages\[0\].content"),
    ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', r"messages\[0\].content"),
    ('{"messages": [{"role": "user", "content": "\\ue000"}]}', r"messages\[0\].content"),
])
def test_bad_chats_name_the_field(line, field):
    with pytest.raises(BadChat, match=field):
        check_chat(line)


def test_text_parts_are_joined():
    c = check_chat(json.dumps({"messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"}]}))
    assert c["messages"][0]["content"] == "ab"


def test_a_malformed_line_is_named_at_start(tokenizer, chats):
    chats.write_text(chats.read_text() + "\n{\"messages\": 1}\n")
    with pytest.raises(SystemExit, match=r"chats.jsonl:8: messages"):
        Chats(chats, tokenizer, 1, 64, 2, 512, 0.0)


def test_a_chat_the_template_refuses_is_skipped(tmp_path, chats, capsys):
    template = "{% if 'Number 3' in messages[0].content %}{{ raise_exception('no threes') }}{% endif %}" \
               "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    save_tokenizer(tmp_path, template)
    source = Chats(chats, AutoTokenizer.from_pretrained(tmp_path), 1, 512, 6, 512, 0.0)
    source.batch(0), source.batch(1)
    assert capsys.readouterr().err.count("chats.jsonl:4: skipped: messages: the chat template refuses them: no threes") == 1


def test_rows_are_padded_with_weight_zero(tokenizer, chats):
    b = Chats(chats, tokenizer, 1, 512, 6, 512, 0.0).batch(0)
    assert len(set(b.lengths.tolist())) > 1 and b.weight.shape[1] == b.lengths.max()
    for r, n in enumerate(b.lengths):
        assert (b.weight[r, n:] == 0).all() and (b.weight[r, :n] > 0).all()
    assert (b.positions.diff() == 1).all()


def test_an_epoch_has_every_chat_once_and_resumes_anywhere(tokenizer, chats):
    a, b = (Chats(chats, tokenizer, 1, 512, 2, 512, 0.0) for _ in range(2))
    rows = [a.batch(s) for s in range(6)]
    texts = [tokenizer.decode(row[:n]) for s in range(3) for row, n in zip(rows[s].ids, rows[s].lengths + 1)]
    assert len(set(texts)) == 6
    for s in (4, 1):
        assert all((x == y).all() for x, y in zip(rows[s], b.batch(s)))


def test_processes_share_the_rows_of_a_step(tokenizer, chats):
    class World:
        rank, size = 0, 2

    whole = Chats(chats, tokenizer, 1, 512, 4, 512, 0.5).batch(1)
    for rank in range(2):
        World.rank = rank
        part = Chats(chats, tokenizer, 1, 512, 2, 512, 0.5, world=World).batch(1)
        for r in range(2):
            n = part.lengths[r]
            assert (part.ids[r, :n + 1] == whole.ids[2 * rank + r, :n + 1]).all()
            assert (part.positions[r, :n] == whole.positions[2 * rank + r, :n]).all()


def test_long_chats_give_windows_that_begin_with_bos(tmp_path, chats):
    save_tokenizer(tmp_path, "<s>{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", bos="<s>")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    source = Chats(chats, tokenizer, 1, 40, 1, 512, 0.0)
    starts = set()
    for n in range(60):
        ids, weight, positions = source.row(n)
        assert len(ids) == 41 and len(weight) == len(positions) == 40 and ids[0] == tokenizer.bos_token_id
        starts.add(int(ids[1]))
    assert len(starts) > 1, "not every window is the chat's beginning"


def test_positions_jump_within_reach(tokenizer, chats):
    source = Chats(chats, tokenizer, 1, 100, 1, 512, 1.0)
    for n in range(20):
        _, _, positions = source.row(n)
        steps = np.diff(positions)
        assert (steps > 0).all() and (steps > 1).sum() == 1 and positions[-1] < 512


def test_a_tokenizer_without_a_template_is_refused(tmp_path, chats):
    make_model(tmp_path, "llama")
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(SystemExit, match="no chat template"):
        Chats(chats, AutoTokenizer.from_pretrained(tmp_path), 1, 64, 2, 512, 0.0)
