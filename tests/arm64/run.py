#!/usr/bin/env python3
"""Compiles keepd for ARM64, packs it, and runs it and the kernels' tests in an emulator, as several processors.

    run.py [required]

Without a compiler for ARM64 or the emulator it says so and succeeds or, if `required`, fails. `tools/install-deps arm64`
installs both. build/keepd answers the same question for comparison."""
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import threading

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/package"))
import run as package  # noqa: E402

NEEDS = ("aarch64-linux-gnu-gcc", "qemu-aarch64", "mmdebstrap")
# The emulator's names of processors: one with every extension, one with products of int8 alone, one without.
PATHS = {"max": "cpu-neon", "neoverse-n1": "cpu-neon", "cortex-a72": "cpu-portable"}
ALL = ("ops", "blocks", "attend", "math", "number", "quantize", "moments", "experts", "states", "cpu", "sample")
# Tests of what products of unsigned bytes change, for a processor without them.
OTHER = ("blocks", "cpu")
SAMPLE = "2"  # tests/sample.h
SECONDS = 120


def build():
    subprocess.run([ROOT / "tools/arm64-root"], check=True)
    subprocess.run([ROOT / "tools/build", "arm64", *(f"test_{name}" for name in ALL)], check=True)


def unpack(folder):
    """The daemon of the package."""
    subprocess.run(["make", "--no-print-directory", "package-arm64"], cwd=ROOT, check=True)
    packed, = (ROOT / "build").glob("keepd_*_arm64.deb")
    wanted = subprocess.run(["dpkg-deb", "-f", packed, "Architecture", "Depends"], capture_output=True, text=True, check=True).stdout
    assert "Architecture: arm64" in wanted and "libmicrohttpd12" in wanted, wanted
    subprocess.run(["dpkg-deb", "-x", packed, folder], check=True)
    return pathlib.Path(folder) / "usr/bin/keepd"


def run_tests(processor, names):
    print(f"Tests as {processor}", flush=True)
    subprocess.run([ROOT / "tools/run_ctest", "arm64", "-R", f"^test_({'|'.join(names)})$"], check=True,
                   env={**os.environ, "QEMU_CPU": processor, "KEEPD_TEST_SAMPLE": SAMPLE})


class Daemon(package.Daemon):
    def __init__(self, *command, processor="max"):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{s.getsockname()[1]}"
        self.process = subprocess.Popen(
            [*command, "--model", ROOT / "bundled/keepd-nano", "--port", self.url.rsplit(":", 1)[1], "--quantization", "q8",
             "--log-level", "warn"],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "QEMU_CPU": processor})
        limit = threading.Timer(SECONDS, self.process.kill)     # also ends a wait for a line
        limit.start()
        while "ready at" not in (line := self.process.stdout.readline()):
            assert line, f"keepd did not become ready: exit {self.process.wait()}"
        limit.cancel()
        self.ready = line

    def answers(self):
        """The texts of a dialogue, whose last one recalls the first question."""
        noted, _ = self.chat(package.FACT)
        answer, _ = self.chat(package.FACT, noted, package.QUESTION)
        self.stop()
        return noted, answer


def main(required):
    missing = [name for name in NEEDS if not shutil.which(name)]
    if missing:
        print(f"{'Failed' if required else 'Skipped'} ARM64: no {', '.join(missing)} here; tools/install-deps arm64 installs what it needs")
        return 1 if required else 0
    build()
    run_tests("max", ALL)
    run_tests("neoverse-n1", OTHER)
    want = Daemon(ROOT / "build/keepd").answers()
    assert "4815" in want[1], want
    with tempfile.TemporaryDirectory() as folder:
        program = unpack(folder)
        for processor, path in PATHS.items():
            daemon = Daemon("qemu-aarch64", "-L", ROOT / "build/arm64-root", program, processor=processor)
            assert f"{path})" in daemon.ready, (processor, daemon.ready)
            got = daemon.answers()
            assert got == want, (processor, got, want)
            print(f"the package's keepd as {processor}, {path}: the same answers as here", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main("required" in sys.argv[1:]))
