"""keepd --quantize-to: a saved model answers with the same bits as one that is rounded while it loads."""
import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NANO = ROOT / "bundled/keepd-nano"
QUESTION = [{"role": "user", "content": "My sister Nora lives in Lisbon. The code of the garage is 4815. Where does Nora live?"}]


def keepd(*args):
    binary = os.environ.get("KEEPD_BIN", ROOT / "build/keepd")
    if not pathlib.Path(binary).exists():
        pytest.skip(f"skip: {binary} is not built")
    return subprocess.run([binary, *args], capture_output=True, text=True, timeout=120)


def save(to, *flags, calibrate=0):
    return keepd("--model", NANO, "--quantize-to", to, "--quantize-calibrate", str(calibrate), *flags)


def answer(d):
    """Tokens and log-probabilities, and what the cache kept."""
    found = d.chat(QUESTION, max_tokens=24, logprobs=True, top_logprobs=4)
    details = found["usage"]["kv_details"]
    return found["choices"], {name: details[name] for name in ("policy", "budget", "kept_entries")}


@pytest.mark.parametrize("form", ["q8", "q4"])
def test_the_same_bits_as_rounded_while_loading(daemon, tmp_path, form):
    done = save(tmp_path / "saved", "--quantization", form)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path / 'saved'}: ") and done.stdout.endswith(" MB of weights\n")
    sizes = [sum(f.stat().st_size for f in folder.glob("model*.safetensors")) for folder in (NANO, tmp_path / "saved")]
    rounding, rounded = [line for line in done.stderr.splitlines() if "round" in line]
    assert "rounding weights: 11." in rounding and "rounded 11." in rounded and "load" not in done.stderr
    checked = keepd("--model", tmp_path / "saved", "--check-config")
    assert checked.returncode == 0 and "warn" not in checked.stderr, checked.stderr  # the gates fit as they fit the source
    assert not (tmp_path / "saved/SHA256SUMS").exists()
    assert sizes[1] < sizes[0] * (0.54 if form == "q8" else 0.42)
    assert answer(daemon("--model", str(tmp_path / "saved"))) == answer(daemon("--quantization", form))


def test_calibrated(daemon, tmp_path):
    """Other numbers of the same size; twice the same."""
    for to, tokens in (("plain", 0), ("saved", 300), ("again", 300)):
        done = save(tmp_path / to, "--quantization", "q4", calibrate=tokens)
        assert done.returncode == 0, done.stderr
        assert ("calibrating with 300 tokens" in done.stderr) == bool(tokens)
    plain, saved, again = [(tmp_path / to / "model.safetensors").read_bytes() for to in ("plain", "saved", "again")]
    assert saved == again and saved != plain and len(saved) == len(plain)
    checked = keepd("--model", tmp_path / "saved", "--check-config")
    assert checked.returncode == 0 and "warn" not in checked.stderr, checked.stderr
    assert "Lisbon" in answer(daemon("--model", str(tmp_path / "saved")))[0][0]["message"]["content"]


def test_what_is_refused(tmp_path):
    (tmp_path / "there").mkdir()
    for to, flags, text in (("there", ("--quantization", "q8"), "not overwritten"), ("new", (), "--quantization q8 or q4"),
                            ("new.gguf", ("--quantization", "q8"), "must not end in .gguf"),
                            ("absent/new", ("--quantization", "q8"), "No such file or directory")):
        done = save(tmp_path / to, *flags)
        assert done.returncode == 78 and "quantize-to" in done.stderr and text in done.stderr, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["there"]
