"""Several daemons with one state directory: a conversation is continued wherever its next turn arrives, with the same bits."""
import concurrent.futures
import time

import pytest
import requests
from answers import cached, tokens
from test_state import FLAGS, ask, first_turn, kill, next_turn, wait_for_files

LONG = "My sister Nora lives in Lisbon. The code of the garage is 4815. My cat is called Otto. " * 250


def wait_until(what, happened):
    """The minute only limits a failing test: a daemon looks for others every two seconds."""
    for _ in range(600):
        if happened():
            return
        time.sleep(0.1)
    raise AssertionError(what)


def listed(d):
    return {row["id"] for row in requests.get(f"{d.url}/v1/conversations", timeout=60).json()["data"]}


def names(state):
    return {file.stem for file in state.glob("*.state")}


def shared_flags(state, idle="0"):
    return ("--state-dir", str(state), "--state-idle", idle, *FLAGS)


def test_a_long_conversation_is_continued_by_another_daemon(daemon, tmp_path):
    """6,000 tokens answered on A and continued on B, while A runs: bitwise as on A."""
    state = tmp_path / "state"
    a, b = daemon(*shared_flags(state)), daemon(*shared_flags(state))
    messages = [{"role": "user", "content": LONG}]
    first = ask(a, messages)
    assert first["usage"]["prompt_tokens"] >= 6000 and first["usage"]["kv_details"]["evicted_entries"] > 0
    (file,) = wait_for_files(state, 1)
    second = next_turn(messages, first, "What is the code of the garage?")
    expected = a.chat(second, max_tokens=16, logprobs=True, kv={"retain": False})
    assert cached(expected) >= 6000
    answer = ask(b, second)
    assert cached(answer) == cached(expected)
    assert tokens(answer) == tokens(expected)
    assert b.metric("keepd_state_restored_total") == 1
    # The name follows from the content, and the file of the turn before is replaced.
    wait_until("the turn before is replaced", lambda: file.stem not in names(state))
    (file,) = wait_for_files(state, 1)
    assert file.stem in listed(b)


def test_back_and_forth(daemon, tmp_path):
    """Each turn goes to the other daemon; the dialogue is that of one daemon, and nothing is computed twice."""
    state = tmp_path / "state"
    one = daemon(*FLAGS)
    a, b = daemon(*shared_flags(state)), daemon(*shared_flags(state))
    messages = expected = first_turn()
    before = set()
    for turn, (d, other) in enumerate(((a, b), (b, a), (a, b), (b, a), (a, b))):
        answer, reference = ask(d, messages), ask(one, expected)
        assert tokens(answer) == tokens(reference) and cached(answer) == cached(reference), turn
        wait_until("the turn is written, and the one before deleted",
                   lambda: len(names(state)) == 1 and names(state) != before)
        before = names(state)
        wait_until("the other knows it", lambda: before <= listed(other))
        messages = next_turn(messages, answer, f"And what is the {turn}th?")
        expected = next_turn(expected, reference, f"And what is the {turn}th?")


def test_what_a_killed_daemon_wrote_goes_on(daemon, killed, tmp_path):
    state = tmp_path / "state"
    a, b = killed(*shared_flags(state)), daemon(*shared_flags(state))
    firsts = [a.chat(first_turn() + [{"role": "user", "content": str(i)}], max_tokens=8) for i in range(4)]
    wait_for_files(state, 4)
    kill(a)
    for i, first in enumerate(firsts):
        messages = next_turn(first_turn() + [{"role": "user", "content": str(i)}], first, "What is my cat called?")
        assert cached(ask(b, messages)) > 100


def test_deleting_is_for_all(daemon, tmp_path):
    state = tmp_path / "state"
    a, b = daemon(*shared_flags(state)), daemon(*shared_flags(state))
    first = ask(a, first_turn())
    (file,) = wait_for_files(state, 1)
    wait_until("the other knows it", lambda: file.stem in listed(b))
    assert requests.delete(f"{b.url}/v1/conversations/{file.stem}", timeout=60).status_code == 200
    wait_until("the file is deleted", lambda: not file.exists())
    assert cached(ask(b, next_turn(first_turn(), first, "What is my cat called?"))) == 0


@pytest.mark.parametrize("count", [3])
def test_daemons_that_start_at_once(daemon, tmp_path, count):
    """All agree on the key of a new directory: each reads what any of them writes."""
    flags = shared_flags(tmp_path / "state")
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        daemons = list(pool.map(lambda _: daemon(*flags), range(count)))
    first = ask(daemons[0], first_turn())
    (file,) = wait_for_files(tmp_path / "state", 1)
    for d in daemons:  # a daemon that looked before the others had leases looks again two seconds later
        wait_until("all know it", lambda d=d: file.stem in listed(d))
    second = next_turn(first_turn(), first, "What is my cat called?")
    answers = [d.chat(second, max_tokens=8, logprobs=True, kv={"retain": False}) for d in daemons]
    assert len({str(tokens(answer)) for answer in answers}) == 1
    assert all(cached(answer) > 100 for answer in answers)
    assert [d.metric("keepd_state_refused_total") for d in daemons] == [0] * count
