"""Tiny random models of every family, made here; tests of training/, which need torch.

Run by `make check` with the Python of training/requirements.txt (tools/run_training), because the
environment of the other suites has no torch.
"""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRAINING = ROOT / "training"
BINARY = Path(os.environ.get("KEEPD_BIN", ROOT / "build/keepd"))
sys.path.insert(0, str(TRAINING))

try:
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
except ImportError as e:
    collect_ignore_glob = ["test_*.py"]
    print(f"skip: tests/training: {e}; pip install -r training/requirements.txt", file=sys.stderr)
else:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()

@contextmanager
def serve(model, *args):
    """Runs a daemon with this model; gives its address."""
    process = subprocess.Popen([BINARY, "--model", model, "--port", "0", *args], stdout=subprocess.PIPE, text=True)
    try:
        ready = process.stdout.readline()
        assert ready.startswith("keepd ready at "), ready
        yield ready.split()[3]
    finally:
        process.terminate()
        process.communicate(timeout=60)


CHATML = """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and not loop.last %}{{- m.content.split('</think>')[-1].lstrip('\\n') }}
{%- elif m.role == 'assistant' %}{{- '<think>\\n\\n</think>\\n\\n' + m.content }}
{%- else %}{{- m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}{{- '\\n<tool_call>' + call.function.name + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
VOCAB = 256 + len(SPECIAL)


def save_tokenizer(directory, template=CHATML, bos=None):
    """One token per byte, and the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tok = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens(SPECIAL)
    tok.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": bos}))
    (directory / "chat_template.jinja").write_text(template)


def make_model(directory, family, seed=1, **changes):
    """Two layers of width 32, 4 query and 2 KV heads; random weights wide enough to attend unevenly."""
    shape = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, intermediate_size=48, max_position_embeddings=512, bos_token_id=None,
                 eos_token_id=258, pad_token_id=None, tie_word_embeddings=family != "qwen2", **changes)
    if family == "qwen3":
        shape["head_dim"] = 16
    name = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama"}[family]
    config = getattr(transformers, f"{name}Config")(**shape)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for key, p in model.named_parameters():
        if p.dim() == 2:
            p.data = torch.randn(p.shape) / p.shape[1] ** 0.5
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


@pytest.fixture
def script(monkeypatch, capsys):
    """Runs the main() of a script of training/ here, as importing torch again takes seconds: (exit text or
    None, stdout, stderr)."""
    def run(module, *arguments):
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
        capsys.readouterr()
        failure = None
        try:
            module.main()
        except SystemExit as e:
            failure = str(e.code)
        out = capsys.readouterr()
        return failure, out.out, out.err
    return run


@pytest.fixture(scope="session", params=["qwen3", "qwen2", "llama"])
def any_base(request, tmp_path_factory):
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("base"), "qwen3")


@pytest.fixture
def chats(tmp_path):
    """Six chats of different lengths."""
    path = tmp_path / "chats.jsonl"
    with path.open("w") as f:
        for i in range(6):
            messages = [{"role": "user", "content": f"Number {i}? " + "word " * (4 + 6 * i)},
                        {"role": "assistant", "content": f"It is {i}."},
                        {"role": "user", "content": "Again?"}, {"role": "assistant", "content": f"Still {i}."}]
            f.write(json.dumps({"messages": messages}) + "\n")
    return path
