"""Helpers for the tests of models whose pictures have any shape. A model has its `directory`, its GGUF files `text` and
`mmproj`, and `check`, which compares an answer with a float64 model; `picture` makes pixels from a seed."""
import concurrent.futures as futures

from answers import cached, tokens
from conftest import start_on
from test_pictures import answer_of, ask, tiles

FLAGS = ("--kv-dtype", "f32", "--cpu-activations", "f32")


def check_path(daemon, path, model, picture):
    d = start_on(daemon, path, "--model", str(model.directory), *FLAGS)
    for pictures in ([picture(0)], [picture(1), picture(3), picture(2)]):
        model.check(pictures, answer_of(d, ask(*pictures)))


def check_steps_and_files(daemon, model, picture):
    """Answers are the same in any step and from GGUF files."""
    asked = [ask(picture(i), picture(9), text=f"What is {i}?") for i in range(3)]
    d = daemon("--model", str(model.directory), *FLAGS)
    alone = [tokens(answer_of(d, messages)) for messages in asked]
    small = ("--model", str(model.directory), "--max-num-batched-tokens", "7", "--max-num-seqs", "4")
    for flags in (small, ("--model", str(model.text), "--mmproj", str(model.mmproj))):
        d = daemon(*FLAGS, *flags)
        with futures.ThreadPoolExecutor(3) as pool:
            assert list(pool.map(lambda m: tokens(answer_of(d, m)), asked)) == alone, flags


def check_turns_and_evictions(daemon, model, picture):
    pictures = [picture(0), picture(1), picture(2)]
    d = daemon("--model", str(model.directory), *FLAGS)
    first = answer_of(d, ask(*pictures))
    later = ask(*pictures) + [{"role": "assistant", "content": first["choices"][0]["message"]["content"]},
                              {"role": "user", "content": "And what else?"}]
    assert cached(answer_of(d, later)) >= first["usage"]["prompt_tokens"] and tiles(d) == 3
    kv = {"policy": "snapkv", "budget": 24, "buffer": 8, "chunk": 16, "report": "trace"}
    answer = answer_of(d, ask(*pictures), kv=kv)
    assert answer["usage"]["kv_details"]["evicted_entries"] > 0
    model.check(pictures, answer, answer["usage"]["kv_details"]["trace"])
