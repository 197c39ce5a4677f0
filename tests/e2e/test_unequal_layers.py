"""Models whose layers differ in heads (Gemma 4): random weights with keepd-nano's tokenizer."""
import json
import pathlib
import shutil

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NANO = ROOT / "bundled/keepd-nano"
QUESTION = [{"role": "user", "content": "Where is the red box, and who put it there? " * 4}]


@pytest.fixture(scope="module", params=["gemma4", "gemma4dense"])
def model(request, tmp_path_factory):
    """(the directory, KV heads of each layer that holds entries)"""
    folder = tmp_path_factory.mktemp(request.param)
    config = json.loads((ROOT / "tests/data/models" / request.param / "config.json").read_text())
    text = config.get("text_config", config)
    text.update({"vocab_size": json.loads((NANO / "config.json").read_text())["vocab_size"], "eos_token_id": 1})
    text["vocab_size_per_layer_input"] = text["vocab_size"]
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(NANO / name, folder)
    wide = text.get("num_global_key_value_heads") or text["num_key_value_heads"]
    layers = text["layer_types"][:len(text["layer_types"]) - text["num_kv_shared_layers"]]
    return folder, [text["num_key_value_heads"] if kind == "sliding_attention" else wide for kind in layers]


@pytest.mark.parametrize("ranks", [1, 2])
def test_reports(model, daemon, ranks):
    """Lengths, positions and the trace have the layers' own heads, and say what was kept."""
    folder, heads = model
    if min(heads) % ranks:
        pytest.skip("skip: one rank would have no head of a layer")
    d = daemon("--model", str(folder), "--random-weights", "--tensor-parallel-size", str(ranks), "--max-model-len", "1024")
    for policy in ("full", "streaming", "snapkv"):
        kv = {"policy": policy, "report": "trace", **({} if policy == "full" else {"budget": 48, "buffer": 8, "chunk": 16})}
        answer = d.chat(QUESTION, max_tokens=40, ignore_eos=True, kv=kv)
        details = answer["usage"]["kv_details"]
        assert [len(layer) for layer in details["lengths"]] == heads
        assert [[len(held) for held in layer] for layer in details["positions"]] == details["lengths"]
        assert sum(map(sum, details["lengths"])) == details["kept_entries"]
        for layer in details["positions"]:
            for held in layer:
                assert held == sorted(set(held)) and 0 <= held[0] and held[-1] < details["seen_tokens"]
        for eviction in details["trace"]:
            assert [len(layer) for layer in eviction["evicted"]] == heads
        assert bool(details["trace"]) == (details["evicted_entries"] > 0)
        if policy != "full":
            assert details["trace"]
