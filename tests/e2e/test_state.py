"""Conversations outlive the process: kill -9 and a new start, another daemon, SIGTERM; files that are
torn or forged are refused and cost nobody an answer."""
import shutil
import signal
import time

from answers import cached, tokens

FACTS = "My sister Nora lives in Lisbon. The code of the garage is 4815. My cat is called Otto. " * 8
FLAGS = ("--kv-budget", "64", "--kv-buffer", "16", "--kv-chunk", "64", "--kv-policy", "global")


def first_turn():
    return [{"role": "user", "content": FACTS}]


def next_turn(messages, answer, text):
    return messages + [{"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
                       {"role": "user", "content": text}]


def ask(d, messages):
    return d.chat(messages, max_tokens=16, logprobs=True)


def wait_for_files(folder, count):
    """Waits for the daemon to write when it is idle; the minute only limits a failing test."""
    for _ in range(600):
        files = sorted(folder.glob("*.state"))
        if len(files) == count:
            return files
        time.sleep(0.1)
    raise AssertionError(f"{count} state files expected, there are {files}")


def kill(d):
    d.process.send_signal(signal.SIGKILL)
    d.process.wait()


def test_a_start_says_which_conversations_are_not_written(daemon, tmp_path, capfd):
    daemon("--state-dir", tmp_path / "full", "--kv-policy", "full")
    assert "conversations with policy full, the default here, are not written" in capfd.readouterr().err
    daemon("--state-dir", tmp_path / "global", *FLAGS)
    assert "not written" not in capfd.readouterr().err


def test_kill_and_restart_continues_with_the_same_next_token(daemon, killed, tmp_path):
    state, copy = tmp_path / "state", tmp_path / "copy"
    d = killed("--state-dir", str(state), "--state-idle", "0", *FLAGS)
    first = ask(d, first_turn())
    assert first["usage"]["kv_details"]["evicted_entries"] > 0
    wait_for_files(state, 1)
    shutil.copytree(state, copy)  # a copy for another daemon
    second = next_turn(first_turn(), first, "What is the code of the garage?")
    expected = ask(d, second)
    assert cached(expected) > 0
    kill(d)
    other = daemon("--state-dir", str(copy), "--state-idle", "0", *FLAGS)
    answer = ask(other, second)
    assert cached(answer) == cached(expected)
    assert tokens(answer) == tokens(expected)
    # A new daemon also serves from the directory of the killed one.
    again = daemon("--state-dir", str(state), *FLAGS)
    assert cached(ask(again, next_turn(second, expected, "Where does Nora live?"))) > 0


def test_sigterm_writes_what_is_in_memory(daemon, tmp_path):
    state = tmp_path / "state"
    d = daemon("--state-dir", str(state), "--state-idle", "86400", *FLAGS)
    first = ask(d, first_turn())
    assert not list(state.glob("*.state"))
    assert d.stop() == 0
    assert len(list(state.glob("*.state"))) == 1
    d = daemon("--state-dir", str(state), *FLAGS)
    assert cached(ask(d, next_turn(first_turn(), first, "What is my cat called?"))) > 0


def test_what_a_request_chose_outlives_the_process(daemon, tmp_path):
    """For any parameter of any policy, the conversation is found again with the same parameters."""
    state = tmp_path / "state"
    chosen = ({"policy": "ems", "gamma": 2, "tau": 0.3, "positions": False, "window": 8},
              {"policy": "rkv", "lambda": 0.07, "variant": "paper", "parity": True},
              {"policy": "gkv", "history": "mean", "decay": 0}, {"policy": "d2o", "merge": "code"},
              {"policy": "global", "horizon": "inf", "floor": 0.25})
    d = daemon("--state-dir", str(state), "--state-idle", "86400", *FLAGS)
    first = [d.chat(first_turn(), max_tokens=4, kv=kv) for kv in chosen]
    second = [next_turn(first_turn(), answer, "What is the code of the garage?") for answer in first]
    expected = [d.chat(turn, max_tokens=8, logprobs=True, kv={**kv, "retain": False}) for turn, kv in zip(second, chosen)]
    assert d.stop() == 0
    wait_for_files(state, len(chosen))
    d = daemon("--state-dir", str(state), *FLAGS)
    for turn, kv, before in zip(second, chosen, expected):
        other = {k: v for k, v in kv.items() if k in ("policy", "window")}
        assert cached(d.chat(turn, max_tokens=1, kv={**other, "retain": False})) == 0, kv  # other settings find nothing
        after = d.chat(turn, max_tokens=8, logprobs=True, kv=kv)
        assert cached(after) == cached(before) > 0, kv
        assert tokens(after) == tokens(before), kv


def damage(file, how):
    data = bytearray(file.read_bytes())
    if how == "torn":
        data = data[: len(data) // 2]
    elif how == "changed":
        data[len(data) // 2] ^= 1
    elif how == "forged":  # complete and well-formed, but signed without the key
        data[-32:] = bytes(32)
    file.write_bytes(data)


def test_damaged_files_are_refused_and_cost_no_answer(daemon, tmp_path):
    for how in ("torn", "changed", "forged"):
        state = tmp_path / how
        d = daemon("--state-dir", str(state), "--state-idle", "0", *FLAGS)
        first = ask(d, first_turn())
        file = wait_for_files(state, 1)[0]
        assert d.stop() == 0
        damage(file, how)
        d = daemon("--state-dir", str(state), "--state-idle", "86400", *FLAGS)
        answer = ask(d, next_turn(first_turn(), first, "What is the code of the garage?"))
        assert cached(answer) == 0
        assert answer["choices"][0]["message"]["content"]
        assert file.with_suffix(".bad").exists() and not file.exists()
        assert d.stop() == 0
