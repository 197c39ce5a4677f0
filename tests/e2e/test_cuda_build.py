"""The build of `cmake --preset cuda`, where there is no GPU: it starts, and says so; made by .ci/run where nvcc is."""
import os
import pathlib
import shutil
import subprocess

import pytest
from conftest import ROOT, Daemon

BINARY = ROOT / "build" / "cuda" / "server" / "keepd"
HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}  # hides the GPU of a machine that has one


@pytest.fixture(autouse=True)
def built():
    if not BINARY.exists():
        pytest.skip(f"skip: {BINARY} is not built")


def test_the_cpu_computes(monkeypatch, capfd):
    """With device auto, one log line gives the reason, and the CPU answers requests."""
    monkeypatch.setenv("KEEPD_BIN", str(BINARY))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    daemon = Daemon("--kv-pool-bytes", "64M")
    try:
        answer = daemon.chat([{"role": "user", "content": "What is a cache?"}], max_tokens=4)
        assert answer["usage"]["completion_tokens"] > 0
        said = [line for line in capfd.readouterr().err.splitlines() if "device" in line]
        assert len(said) == 1 and "no CUDA device" in said[0] and said[0].endswith("the CPU computes"), said
    finally:
        assert daemon.stop() == 0


def test_a_gpu_that_is_asked_for():
    """Device cuda is rejected with one line before the model is read."""
    model = pathlib.Path(ROOT / "bundled/keepd-nano")
    done = subprocess.run([BINARY, "--model", model, "--device", "cuda", "--port", "0"], text=True, capture_output=True,
                          timeout=120, env={**os.environ, **HIDDEN})
    assert done.returncode == 78 and done.stdout == ""
    assert done.stderr.startswith("keepd: device: no CUDA device: ") and done.stderr.count("\n") == 1, done.stderr


def test_no_library_of_cuda_is_needed_to_start():
    """The runtime is part of the program; cuBLASLt, NCCL and the driver are loaded when a GPU is opened."""
    listed = subprocess.run(["readelf", "-d", BINARY], capture_output=True, text=True, check=True).stdout
    needed = [line for line in listed.splitlines() if "(NEEDED)" in line]
    assert needed and not any(name in line for line in needed for name in ("cudart", "cublas", "nccl", "libcuda")), needed
    assert any("RUNPATH" in line or "RPATH" in line for line in listed.splitlines()), "where the toolkit's libraries are"


def test_decoding_spills_no_registers():
    """tools/kernel_resources reads the compiled kernels."""
    if not shutil.which("cuobjdump"):
        pytest.skip("skip: cuobjdump is not here")
    done = subprocess.run([ROOT / "tools/kernel_resources"], capture_output=True, text=True, check=True)
    rows = [line.rsplit(None, 3) for line in done.stdout.splitlines()[1:]]
    decode = [row for row in rows if row[0].startswith("k_attend_decode<")]
    assert decode and all(int(row[2]) == 0 for row in decode), done.stdout
