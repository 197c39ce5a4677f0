"""The DRY penalty on the bundled model; its numbers: tests/unit/engine/test_dry.c."""
import requests


def test_dry_breaks_a_repetition(daemon):
    """A text that repeats itself goes on with its repetition, and with the penalty it does not; a neutral one changes nothing."""
    d = daemon()
    body = {"model": "keepd-nano", "prompt": "The code of the garage is 4815. " * 6, "max_tokens": 24, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True}
    def ids(**fields):
        r = requests.post(f"{d.url}/v1/completions", json=body | fields, timeout=300)
        assert r.status_code == 200, r.text
        choice = r.json()["choices"][0]
        return choice["token_ids"], choice["prompt_token_ids"]
    plain, text = ids()
    dry, _ = ids(dry_multiplier=100, dry_base=2, dry_allowed_length=2, dry_penalty_last_n=-1, dry_sequence_breakers=[])
    assert ids(dry_multiplier=0, dry_base=4)[0] == plain and ids(dry_multiplier=1, dry_penalty_last_n=0)[0] == plain
    assert ids(dry_multiplier=100, samplers=["penalties", "top_k"])[0] == plain

    def repeats(answer):
        """Does a token go on with two that stand before it somewhere?"""
        tokens = text + answer
        seen = [tuple(tokens[i:i + 3]) for i in range(len(tokens) - 2)]
        return any(seen[i] in seen[:i] for i in range(len(text) - 2, len(seen)))
    assert repeats(plain) and not repeats(dry), (plain, dry)
