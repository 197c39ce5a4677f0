"""The laboratory's runner against a daemon that is played: sharing, refusals, the clock, errors."""
import pathlib
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench" / "quality"))
from lab import client, plan, runner, store  # noqa: E402


class Played:
    """Answers as the daemon does. `forks`: a conversation may be continued more than once; `spoiled`:
    policies whose continued answers depend on what was asked before; `deaf`: continues nothing."""

    def __init__(self, forks=True, spoiled=(), refused=(), deaf=False):
        self.forks, self.spoiled, self.refused, self.deaf = forks, spoiled, refused, deaf
        self.kept, self.reads, self.asked = {}, 0, 0

    def tokens(self, messages, prompt=True):
        return list(range(sum(5 + len(m["content"]) // 4 for m in messages) + (3 if prompt else 0)))

    def score(self, ids, kv):
        return [-0.5] * (len(ids) - 1)

    def chat(self, messages, max_tokens, kv, prompt_cache_key="", **fields):
        if kv["policy"] in self.refused:
            raise client.Refused({"message": "unknown policy", "param": "kv.policy"})
        if not kv.get("reuse", True):
            self.reads += 1
            self.kept[prompt_cache_key] = 0
            cached = 0
        else:
            self.asked += 1
            known = self.kept.get(prompt_cache_key)
            cached = 0 if known is None or self.deaf else len(self.tokens(messages[:-2]))
            if known is not None:
                self.kept[prompt_cache_key] += 1
            if not self.forks:
                self.kept.pop(prompt_cache_key, None)
        turns = self.kept.get(prompt_cache_key, 0) if kv["policy"] in self.spoiled else 0
        return {"choices": [{"message": {"content": "no idea"}, "logprobs": {"content": [-0.25 * turns]}}],
                "usage": {"prompt_tokens_details": {"cached_tokens": cached}, "kv_details": {"kept_entries": 7}}}

    continued = staticmethod(client.Client.continued)


def lab(tmp_path, daemon, shared):
    return runner.Runner(daemon, store.Store(tmp_path, "ab" * 32), shared, workers=2)


CELL = plan.Cell("memory", 256, "full")


@pytest.mark.parametrize("shared,reads", [(True, 1), (False, 4)])
def test_a_history_is_read_once_or_for_each_question(tmp_path, shared, reads):
    daemon = Played()
    row = lab(tmp_path, daemon, shared).ask(CELL, 0)
    assert (daemon.reads, daemon.asked, row["of"], row["got"]) == (reads, 4, 4, 0)


def test_a_conversation_used_up_is_read_again_and_one_never_continued_is_an_error(tmp_path):
    daemon = Played(forks=False)
    lab(tmp_path, daemon, True).ask(CELL, 0)
    assert daemon.reads == 4
    with pytest.raises(RuntimeError, match="did not continue"):
        lab(tmp_path, Played(deaf=True), True).ask(CELL, 0)


def test_forks_that_change_an_answer_are_found(tmp_path):
    daemon = Played(spoiled=("h2o",), refused=("ems",))
    assert runner.forks_agree(lab(tmp_path, daemon, True), ["full", "h2o", "ems", "streaming"], 256) == ["h2o"]


def test_a_refusal_is_a_result_and_other_errors_end_the_run(tmp_path):
    r = lab(tmp_path, Played(refused=("ems",)), True)
    cells = [CELL, plan.Cell("memory", 256, "ems", plan.QUARTER), plan.Cell("loss", 256, "full")]
    assert r.run(cells, 1, None)
    assert r.store.get("memory/256/ems/0.25/0")["refused"] == "unknown policy"
    assert r.store.get("loss/256/full/1/0")["got"] > 0
    with pytest.raises(RuntimeError):
        lab(tmp_path / "other", Played(deaf=True), True).run(cells[:1], 1, None)


def test_the_clock_ends_a_run_and_the_next_goes_on(tmp_path):
    daemon = Played()
    assert not lab(tmp_path, daemon, True).run([CELL], 3, time.time() - 1)
    assert daemon.asked == 0
    assert lab(tmp_path, daemon, True).run([CELL], 3, None)
    assert daemon.asked == 12
    assert lab(tmp_path, daemon, True).run([CELL], 3, None), "nothing is left to do"
    assert daemon.asked == 12
