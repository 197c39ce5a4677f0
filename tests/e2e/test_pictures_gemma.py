"""Pictures in chats with Gemma 3, whose text model lets the rows of a picture see each other: answers beside a float64 model on
every path of the CPU, bit by bit in any step, on ranks and from GGUF files, after evictions around and inside pictures."""
import concurrent.futures as futures
import pathlib
import sys

import pytest
import requests

from answers import cached, tokens
from conftest import start_on

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/python"))
np = pytest.importorskip("numpy")
from gemma_seeing import EDGE, TILE, GemmaReference, write_gemma, write_gemma_mmproj, write_gemma_text_gguf  # noqa: E402
from vision_model import write_model, write_text_gguf  # noqa: E402
from test_pictures import FLAGS, Tokens, answer_of, ask, part, picture, refusal, tile_of, tiles  # noqa: E402

EVICTIONS = [{"policy": policy, "budget": 24, "buffer": 4, "chunk": chunk, "report": "trace"}
             for policy, chunk in (("streaming", 16), ("snapkv", 16), ("h2o", 5), ("streaming", 4))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_gemma(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def reference(model, tmp_path_factory):
    return GemmaReference(model, tmp_path_factory.mktemp("text"))


def prompt_of(reference, words, pictures, text="What is it?"):
    ids = words("<|im_start|>user\n")
    for pixels in pictures:
        ids += words("\n\n<start_of_image>") + reference.show(tile_of(pixels)) + words("<end_of_image>\n\n")
    return ids + words(text + "<|im_end|>\n<|im_start|>assistant\n")


def log_probabilities(reference, ids, evictions):
    """After each token; evictions never lie inside a picture."""
    reference.reset()
    rows, ends = [], sorted({e["tokens"] for e in evictions} | {len(ids)})
    for end in ends:
        rows += list(reference.append(ids[len(rows):end]))
        for gone in [e for e in evictions if e["tokens"] == end]:
            for layer, heads in enumerate(gone["evicted"]):
                for head, positions in enumerate(heads):
                    stream = reference.cache.streams[layer][head]
                    stream.keep(~np.isin(stream.pos, positions))
    return rows


def check(model, reference, pictures, answer, evictions=(), most=2e-5):
    words = Tokens(model)
    prompt = prompt_of(reference, words, pictures)
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    names = {name: i for name, i in words.marks.items()} | {bytes([b]): words.vocab[c] for b, c in words.chars.items()}

    def id_of(token):
        return names[token["token"]] if token["token"] in names else names[bytes(token["bytes"])]

    content = answer["choices"][0]["logprobs"]["content"]
    rows = log_probabilities(reference, prompt + [id_of(token) for token in content], evictions)
    worst = max(abs(other["logprob"] - rows[len(prompt) - 1 + i][id_of(other)])
                for i, token in enumerate(content) for other in [token, *token["top_logprobs"]])
    print(f"largest difference {worst:.1e}")
    assert worst < most


@pytest.mark.parametrize("path", ["reference", "portable", "avx2", "avx512", "amx"])
def test_answers_are_those_of_an_independent_model(daemon, model, reference, path):
    d = start_on(daemon, path, "--model", str(model), *FLAGS)
    for pictures in ([picture(1)], [picture(1), picture(3, EDGE), picture(2)]):
        check(model, reference, pictures, answer_of(d, ask(*pictures)))
        for kv in EVICTIONS if len(pictures) > 1 else ():
            answer = answer_of(d, ask(*pictures), kv=kv)
            trace = answer["usage"]["kv_details"]["trace"]
            assert trace and answer["usage"]["kv_details"]["evicted_entries"] > 0
            check(model, reference, pictures, answer, trace)


def test_a_picture_is_the_same_in_any_step(daemon, model):
    """Bit by bit, with the fewest rows that a step may have, in batches, on ranks and replicas; with evictions, too."""
    asked = [(ask(picture(i), picture(9), text=f"What is {i}?"), kv) for i in range(3) for kv in (None, EVICTIONS[1], EVICTIONS[2])]

    def answer(d, of, **kv):
        return tokens(answer_of(d, of[0], kv={**(of[1] or {}), **kv}))

    d = daemon("--model", str(model), *FLAGS)
    alone = [answer(d, of) for of in asked]
    assert len({str(a) for a in alone}) > 3
    for flags in (("--max-num-batched-tokens", str(TILE + 3), "--max-num-seqs", "4"), ("--tensor-parallel-size", "2", "--threads", "2"),
                  ("--data-parallel-size", "2", "--threads", "2")):
        d = daemon("--model", str(model), *FLAGS, *flags)
        with futures.ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda of: answer(d, of, reuse=False), asked)) == alone, flags


def test_gguf_files_are_the_same(daemon, model, tmp_path):
    whole = daemon("--model", str(model), *FLAGS)
    file = daemon("--model", str(write_gemma_text_gguf(model, tmp_path / "text.gguf")), "--mmproj",
                  str(write_gemma_mmproj(model, tmp_path / "mmproj.gguf")), *FLAGS)
    for pictures in ([picture(1)], [picture(2), picture(3)]):
        assert tokens(answer_of(file, ask(*pictures))) == tokens(answer_of(whole, ask(*pictures)))


def test_a_later_turn_reads_no_picture_again(daemon, model, reference):
    """Also a prompt that parts inside a conversation, and one that has another picture behind the first."""
    d = daemon("--model", str(model), *FLAGS)
    messages = ask(picture(1), picture(2))
    first = answer_of(d, messages)
    assert tiles(d) == 2
    later = messages + [{"role": "assistant", "content": first["choices"][0]["message"]["content"]},
                        {"role": "user", "content": "And what else?"}]
    second = answer_of(d, later)
    assert tiles(d) == 2 and cached(second) >= first["usage"]["prompt_tokens"]
    other = answer_of(d, ask(picture(1), picture(4)))
    assert tiles(d) == 3 and 20 < cached(other) < first["usage"]["prompt_tokens"] - 20
    check(model, reference, [picture(1), picture(4)], other)


def test_what_cannot_be(daemon, model, tmp_path):
    file, few = write_gemma_mmproj(model, tmp_path / "mmproj.gguf"), ("--max-num-batched-tokens", "11", "--max-num-seqs", "4")
    said = refusal("--model", model, "--mmproj", file, *few)
    assert "max_num_batched_tokens: 11, but a step holds the 9 rows of a picture" in said and "at least 12 are needed" in said, said
    said = refusal("--model", write_text_gguf(write_model(tmp_path / "llama"), tmp_path / "llama.gguf"), "--mmproj", file)
    assert "the encoder is for another family of models than llama: the tokenizer has no token <start_of_image>" in said, said
    d = daemon("--model", str(model), *FLAGS, *few)  # texts do not need it
    r = requests.post(d.url + "/v1/chat/completions", json={"messages": ask(picture(1))}, timeout=60)
    assert r.status_code == 400, r.text
    d = daemon("--model", str(model), *FLAGS)
    kv = {"policy": "streaming", "budget": 24, "overflow": "shift"}
    r = requests.post(d.url + "/v1/chat/completions", json={"messages": [{"role": "user", "content": [part(picture(1))]}], "kv": kv}, timeout=60)
    assert r.status_code == 400 and r.json()["error"]["param"] == "kv.overflow", r.text
