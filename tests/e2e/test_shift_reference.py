"""The daemon's log-probabilities of a text with more tokens than positions, against a float64 model that applies the
same evictions and rotates every key by its own arithmetic of places."""
import json
import math
import pathlib
import shutil
import sys

import pytest
import requests

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/python"))
np = pytest.importorskip("numpy")
import latent_model  # noqa: E402
from reference_model import LatentReference, Reference, rotate  # noqa: E402

NANO = ROOT / "bundled/keepd-nano"
POSITIONS, SINKS, TOKENS = 256, 4, 620
OWN = {"streaming": {"recent": 0}, "global": {"recent": 16, "horizon": 128, "parity": False}}
FLAGS = ("--max-model-len", str(POSITIONS), "--kv-dtype", "f32", "--cpu-path", "reference")


def text(count):
    state, out = 99, []
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        out.append(260 + state // 4096 % 900)
    return out


def place(pos, shifts):
    """The documented map: a quarter of the positions is freed by each shift; blocks of 32 behind the near places move together."""
    if shifts == 0 or pos < SINKS:
        return pos
    room, block = POSITIONS // 4, pos // 32 * 32
    near = 32 * math.ceil(SINKS / 32) + room
    x = block - shifts * room
    return (x if x >= near else near - math.floor(room * (near - x) / (room + near - x))) + pos - block


class Shifting:
    """Appends token after token; before a token that has no place, all keys are turned to lower places."""
    shifts = dropped = 0

    def cut(self, layer, head, most):
        """Long streams drop those entries behind the sinks that the policy ranks lowest: for `streaming` the oldest."""
        stream, scored = self.cache.streams[layer][head], self.cache.scored(layer, head)
        self.dropped += len(stream) - most
        order = np.lexsort((stream.pos, np.where(scored.protected, np.inf, scored.score)))
        stream.keep(np.isin(np.arange(len(stream)), order[-most:]))

    def shift(self):
        most = POSITIONS - POSITIONS // 4
        for i, stream in enumerate(self.cache.all_streams()):
            if len(stream) > most:
                self.cut(*divmod(i, self.cache.heads_kv), most)
            by = np.array([place(p, self.shifts + 1) - place(p, self.shifts) for p in stream.pos])
            stream.keys = rotate(stream.keys[:, None], by[:, None] * self.cache.inv_freq, 1.0)[:, 0]
        self.shifts += 1

    def project(self, layer, x, positions):
        return super().project(layer, x, positions - self.shifts * (POSITIONS // 4))

    def read(self, ids, evictions):
        """Log-probabilities after each token; `evictions` {tokens: [layer][head][positions]}."""
        rows = []
        for i, token in enumerate(ids):
            if self.tokens - self.shifts * (POSITIONS // 4) == POSITIONS:
                self.shift()
            rows.append(self.append([token])[0])
            if i + 1 in evictions:
                self.evict(evictions[i + 1])
        return np.stack(rows)

    def evict(self, gone):
        """Also checks that retention is judged by true ages: nothing kept ranks below what went."""
        scores = {True: [], False: []}
        for layer, row in enumerate(self.cache.streams):
            for head, stream in enumerate(row):
                leaves = np.isin(stream.pos, gone[layer][head])
                assert leaves.sum() == len(gone[layer][head])
                open_to_all = (stream.pos >= SINKS) & (stream.pos < self.tokens - self.cache.rule.recent)
                for went in (True, False):
                    scores[went].append(self.cache.scored(layer, head).score[(leaves == went) & open_to_all])
                stream.keep(~leaves)
        assert np.concatenate(scores[True]).max() <= np.concatenate(scores[False]).min() + 1e-3


class Shifted(Shifting, Reference):
    pass


class ShiftedLatent(Shifting, LatentReference):
    pass


def compare(d, policy, own, model, ids):
    """The largest difference of a log-probability, and what the daemon says of the cache."""
    from policies import table
    kv = {"policy": policy, "budget": 80, "chunk": 24, "buffer": 8, "sinks": SINKS, **own, "overflow": "shift", "reuse": False, "report": "trace"}
    body = {"model": "keepd-nano", "prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 0, "temperature": 0, "kv": kv}
    r = requests.post(f"{d.url}/v1/completions", json=body, timeout=300)
    assert r.status_code == 200, r.text
    details, said = r.json()["usage"]["kv_details"], r.json()["choices"][0]["logprobs"]["token_logprobs"][1:TOKENS]
    assert details["shifts"] == math.ceil((TOKENS - POSITIONS) / (POSITIONS // 4))
    model.reset(table.rule(policy).but(sinks=SINKS, recent=own["recent"], horizon=128.0))
    rows = model.read(ids[:-1], {e["tokens"]: e["evicted"] for e in details["trace"]})
    assert model.shifts == details["shifts"]
    return np.abs(rows[np.arange(TOKENS - 1), ids[1:]] - np.array(said)).max()


@pytest.mark.parametrize("path", ["reference", "portable", "auto"])
def test_latent_attention_as_a_float64_model(daemon, path, tmp_path):
    """The numbers that rotate are behind those that are key and value at once."""
    latent_model.write(tmp_path, vocab_size=json.loads((NANO / "config.json").read_text())["vocab_size"], eos_token_id=1)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(NANO / name, tmp_path)
    d = daemon("--model", str(tmp_path), *FLAGS[:4], "--cpu-path", path, "--served-model-name", "keepd-nano", "--cpu-activations", "f32")
    worst = compare(d, "streaming", OWN["streaming"], ShiftedLatent(tmp_path), text(TOKENS))
    print(f"{path}: {worst:.1e}")
    assert worst < 2e-5, worst


@pytest.mark.parametrize("policy", ["streaming", "global"])
def test_scores_are_those_of_a_float64_model(daemon, policy):
    model = Shifted(NANO)
    worst = compare(daemon(*FLAGS), policy, OWN[policy], model, text(TOKENS))
    assert worst < 2e-3, worst
    assert (model.dropped > 0) == (policy == "global")  # a head of keepd-nano keeps all that it may
