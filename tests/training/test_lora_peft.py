"""LoRA adapters beside PEFT: the log-probabilities of adapters that it has written, and those of the models into which it
has merged them, evictions included."""
import copy
import random

import peft
import pytest
import requests
import torch
import transformers

from conftest import BINARY, SPECIAL, make_model, save_tokenizer, serve

KINDS = {"all": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
         "qv": {"r": 8, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]},
         "mlp": {"r": 2, "lora_alpha": 3, "target_modules": ["gate_proj", "up_proj", "down_proj"], "use_rslora": True},
         "last": {"r": 6, "lora_alpha": 6, "target_modules": ["o_proj", "k_proj"], "layers_to_transform": [1]}}
POLICIES = ({"policy": "snapkv", "budget": 24, "buffer": 8, "chunk": 32}, {"policy": "streaming", "budget": 32, "buffer": 8, "chunk": 32})
FLAGS = ["--kv-dtype", "f32", "--cpu-activations", "f32", "--fit", "never"]


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "llama"])
def base(request, tmp_path_factory):
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


def load(directory):
    return transformers.AutoModelForCausalLM.from_pretrained(directory).float().eval()


def adapt(base, kind, directory):
    """Writes an adapter with random numbers, and the model with it merged; gives PEFT's model."""
    model = peft.get_peft_model(load(base), peft.LoraConfig(task_type="CAUSAL_LM", **KINDS[kind]))
    torch.manual_seed(sum(kind.encode()))
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = torch.randn(p.shape) * 0.3 / p.shape[1] ** 0.5
    model.save_pretrained(directory / kind)
    copy.deepcopy(model).merge_and_unload().save_pretrained(directory / f"merged-{kind}")
    save_tokenizer(directory / f"merged-{kind}")
    return model.eval()


def score(url, model, prompt, **kv):
    body = {"model": model, "prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1, "kv": kv} if model else {
        "prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1, "kv": kv}
    r = requests.post(f"{url}/v1/completions", json={**body, "temperature": 0, "ignore_eos": True}, timeout=120)
    assert r.status_code == 200, r.text
    return r.json()["choices"][0]["logprobs"]["token_logprobs"][1:len(prompt)]


def test_log_probabilities_are_those_of_peft(base, tmp_path):
    if not BINARY.exists():
        pytest.skip(f"skip: {BINARY} is not built")
    dice, largest = random.Random(5), {"peft": 0.0, "merged": 0.0}
    prompts = [[dice.randrange(len(SPECIAL) + 200) for _ in range(n)] for n in (2, 20, 150)]
    models = {kind: adapt(base, kind, tmp_path) for kind in KINDS}
    with serve(base, *FLAGS, *(w for kind in KINDS for w in ("--lora", f"{kind}={tmp_path / kind}"))) as url:
        for kind, model in models.items():
            for prompt in prompts:
                with torch.no_grad():
                    logits = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
                theirs = [logits[i, t].item() for i, t in enumerate(prompt[1:])]
                ours = score(url, kind, prompt, policy="full")
                largest["peft"] = max(largest["peft"], max(abs(a - b) for a, b in zip(ours, theirs)))
            with serve(tmp_path / f"merged-{kind}", *FLAGS) as merged:
                for kv in POLICIES:
                    ours, theirs = score(url, kind, prompts[-1], **kv), score(merged, None, prompts[-1], **kv)
                    largest["merged"] = max(largest["merged"], max(abs(a - b) for a, b in zip(ours, theirs)))
    print(largest)
    assert max(largest.values()) < 2e-5
