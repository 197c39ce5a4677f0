"""tools/build in a log, with a cmake that only says how far it is."""
import pathlib
import shutil
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
CMAKE = """#!/bin/sh
case $* in
*--build*) for step in 1 2 3 4 5 6 7 8; do echo "@ $((step * 12))%@"; done; echo "a warning" ;;
*) echo configured ;;
esac
"""


def test_a_log_has_a_line_for_each_tenth(tmp_path):
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/build", tmp_path / "tools/build")
    cmake = tmp_path / "bin/cmake"
    cmake.parent.mkdir()
    cmake.write_text(CMAKE)
    cmake.chmod(0o755)
    run = subprocess.run([tmp_path / "tools/build", "dev"], capture_output=True, text=True, timeout=60, check=True,
                         env={"PATH": f"{cmake.parent}:/usr/bin:/bin"})
    tenths = [f"Building dev: {n} %" for n in (10, 20, 30, 40, 60, 70, 80, 90)]
    assert run.stdout.splitlines() == ["Building dev", *tenths, "a warning"], run.stdout
