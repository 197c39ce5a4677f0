"""The build of `cmake --preset cuda`, where there is no GPU: it starts, and says so; made by .ci/run where nvcc is."""
import os
import pathlib
import re
import shutil
import subprocess

import pytest
from conftest import ROOT, Daemon

BINARY = ROOT / "build" / "cuda" / "server" / "keepd"
HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}  # hides the GPU of a machine that has one


@pytest.fixture(autouse=True)
def built(request):
    if "architecture" in request.fixturenames:
        return
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


def test_attention_spills_no_registers():
    """tools/kernel_resources reads the compiled kernels."""
    if not shutil.which("cuobjdump"):
        pytest.skip("skip: cuobjdump is not here")
    done = subprocess.run([ROOT / "tools/kernel_resources"], capture_output=True, text=True, check=True)
    rows = [line.rsplit(None, 3) for line in done.stdout.splitlines()[1:]]
    for kernel in ("k_attend_decode<", "k_attend_prefill<", "k_attend_wide"):
        found = [row for row in rows if row[0].startswith(kernel)]
        assert found and all(int(row[2]) == 0 for row in found), done.stdout


@pytest.mark.parametrize("architecture", ["sm_80", "sm_89"])
def test_older_devices(architecture, tmp_path):
    """CI compiles all kernels for one architecture only; this is all that differs on others, in seconds."""
    source = ROOT / "tests/e2e/every_instruction.cu"
    listed = source.read_text() + (ROOT / "kernels/cuda/fetch.cuh").read_text()
    functions = set(re.findall(r"\bptx_\w+(?=\()", (ROOT / "kernels/cuda/ptx.cuh").read_text()))
    assert len(functions) > 20 and not {f for f in functions if f + "(" not in listed} - {"ptx_shared"}, functions
    if not shutil.which("nvcc"):
        pytest.skip("skip: nvcc is not here")
    done = subprocess.run(["nvcc", "-std=c++17", "-O3", f"-arch={architecture}", f"-I{ROOT}", "-D_GNU_SOURCE", "--keep", "--keep-dir", tmp_path,
                           "-cubin", "-o", tmp_path / "all.cubin", source], capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "all.cubin").exists(), done.stderr
    code = "".join(p.read_text() for p in tmp_path.glob("*.ptx"))
    assert "cp.async.cg" in code and "test_wait" in code and ("e4m3x2" in code) == (architecture == "sm_89"), code
    assert not any(name in code for name in ("cp.async.bulk", "griddepcontrol", "try_wait")), code
