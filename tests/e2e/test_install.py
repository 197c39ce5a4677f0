"""Tests `make install` into a temporary folder."""
import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_install(tmp_path):
    build = pathlib.Path(os.environ.get("KEEPD_BUILD", ROOT / "build" / "release"))
    if not (build / "server" / "keepd").exists():
        pytest.skip(f"skip: {build} has no keepd")
    copy = {**os.environ, "DESTDIR": str(tmp_path)}

    def cmake(*arguments):
        """Runs CMake when no other build of the folder runs, as tools/build does."""
        subprocess.run(["flock", f"{build}.lock", "cmake", *arguments], check=True, capture_output=True, env=copy)
    cmake("-B", str(build), "-DCMAKE_INSTALL_PREFIX=/usr")
    cmake("--build", str(build), "--target", "keepd_texts")
    cmake("--install", str(build))
    for name in ("usr/bin/keepd", "usr/share/man/man1/keepd.1", "usr/lib/systemd/system/keepd.service",
                 "usr/lib/systemd/system/keepd@.service", "usr/lib/systemd/system/keepd.socket",
                 "usr/lib/sysusers.d/keepd.conf", "usr/lib/tmpfiles.d/keepd.conf", "etc/keepd/keepd.conf",
                 "usr/share/doc/keepd/grafana.json", "usr/share/keepd/models/keepd-nano/model.safetensors"):
        assert (tmp_path / name).is_file(), name
    daemon = str(tmp_path / "usr/bin/keepd")
    page = (tmp_path / "usr/share/man/man1/keepd.1").read_text()
    assert page == subprocess.run([daemon, "--man"], capture_output=True, text=True, check=True).stdout
    settings = tmp_path / "etc/keepd/keepd.conf"
    model = "/usr/share/keepd/models/keepd-nano"
    assert f"\nmodel = {model}\n" in settings.read_text()
    moved = tmp_path / "moved.conf"
    moved.write_text(settings.read_text().replace(model, str(tmp_path) + model))
    r = subprocess.run([daemon, "--config", str(moved), "--check-config"], capture_output=True, text=True)
    assert r.returncode == 0 and f"model = {tmp_path}{model}" in r.stdout, r.stderr
    settings.chmod(0o640)
    settings.write_text("# mine\n")
    cmake("--install", str(build))
    assert settings.read_text() == "# mine\n", "settings are left alone"
    if shutil.which("systemd-analyze"):
        unit = tmp_path / "usr/lib/systemd/system/keepd.service"
        unit.write_text(unit.read_text().replace("/usr/bin/keepd", daemon))
        subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)], check=True, capture_output=True)


BROKEN = {
    "config.json": (lambda m: (m / "config.json").unlink(), [], "holds weights and no config.json"),
    "tensor": (lambda m: (m / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}"), [], "the model is refused: "),
    "tokenizer": (lambda m: (m / "tokenizer.json").write_text("{}"), [], "the model is refused: tokenizer.json: "),
    "gates": (None, ["--gates", "/nowhere"], "keepd: gates: /nowhere: "),
    "state": (None, ["--state-dir", "/nowhere/else"], "keepd: state-dir: /nowhere/else cannot be made: "),
    "no directory": (None, ["--state-dir", "/dev/null"], "keepd: state-dir: /dev/null cannot be opened: "),
    "policy": (None, ["--kv-policy", "lru"], "keepd: kv-policy: 'lru' is not one of auto, full, streaming, trimkv"),
    "no gates": (None, ["--kv-policy", "global", "--gates", ""],
                 "keepd: kv-policy: 'global' needs retention gates; --gates '' says to use none"),
    "length": (None, ["--max-model-len", "999999"], "keepd: max-model-len: the model's positions end at 8192"),
    "pool": (None, ["--kv-pool-bytes", "8192"], "keepd: kv-pool-bytes: "),
}


@pytest.mark.parametrize("case", BROKEN)
def test_the_check_refuses_what_a_start_refuses(tmp_path, case):
    """--check-config reports the same error and status as a start, without loading weights."""
    binary = os.environ.get("KEEPD_BIN", str(ROOT / "build" / "keepd"))
    if not pathlib.Path(binary).exists():
        pytest.skip(f"skip: {binary} is not built")
    spoil, flags, words = BROKEN[case]
    model = ROOT / "bundled/keepd-nano"
    if spoil:
        model = shutil.copytree(model, tmp_path / "model")
        spoil(model)
    said = []
    for check in ([], ["--check-config"]):
        r = subprocess.run([binary, "--model", str(model), "--port", "0", *flags, *check], capture_output=True, text=True,
                           timeout=60)
        said.append(r.stderr.strip().splitlines()[-1])
        assert r.returncode == 78 and r.stdout == "", r
    assert said[0] == said[1] and words in said[0], said
