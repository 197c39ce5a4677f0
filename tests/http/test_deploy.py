"""Tests deploy/: systemd accepts the units and their sandbox, the daemon accepts the settings, and the dashboard uses
only metrics that exist."""
import os
import re
import shutil
import subprocess

import pytest
from conftest import BINARY, ROOT

DEPLOY = ROOT / "deploy"
EXPOSURE_MAX = 3.5


@pytest.fixture
def units(tmp_path):
    """Copies the units into one folder, with the path of an existing daemon."""
    if not shutil.which("systemd-analyze"):
        pytest.skip("skip: systemd-analyze is not installed")
    for name in ("keepd.service", "keepd@.service", "keepd.socket"):
        text = (DEPLOY / name).read_text()
        assert name.endswith("socket") or "ExecStart=/usr/bin/keepd " in text
        (tmp_path / name.replace("@.", "@one.")).write_text(text.replace("/usr/bin/keepd", str(BINARY)))
    return tmp_path


@pytest.mark.parametrize("names", [["keepd.service", "keepd.socket"], ["keepd@one.service"]])
def test_units_are_accepted(units, names):
    r = subprocess.run(["systemd-analyze", "verify", "--man=no", *(str(units / n) for n in names)], capture_output=True,
                       text=True, timeout=60)
    assert r.returncode == 0 and str(units) not in r.stderr, r.stderr


@pytest.mark.parametrize("name", ["keepd.service", "keepd@one.service"])
def test_exposure(units, name):
    r = subprocess.run(["systemd-analyze", "security", "--offline=true", "--no-pager", str(units / name)],
                       capture_output=True, text=True, timeout=60)
    level = float(re.search(r"Overall exposure level for \S+: ([\d.]+)", r.stdout).group(1))
    assert level <= EXPOSURE_MAX, r.stdout


def test_the_service_can_read_its_settings(tmp_path):
    """The configuration is installed as root and readable only by the unit's user."""
    if os.geteuid() or not shutil.which("systemd-tmpfiles"):
        pytest.skip("skip: needs root and systemd-tmpfiles")
    etc = tmp_path / "etc"
    (etc / "keepd").mkdir(parents=True)
    (etc / "passwd").write_text("root:x:0:0::/:\nkeepd:x:4242:4242::/:\n")
    (etc / "group").write_text("root:x:0:\nkeepd:x:4242:\n")
    for name in ("keepd.conf", "chat.conf"):
        (etc / "keepd" / name).touch(mode=0o640)
    r = subprocess.run(["systemd-tmpfiles", "--create", f"--root={tmp_path}", str(DEPLOY / "keepd.tmpfiles")],
                       capture_output=True, text=True, timeout=60)
    assert r.returncode == 0, r.stderr
    for path in (etc / "keepd", *(etc / "keepd").iterdir()):
        st = path.stat()
        assert (st.st_uid, st.st_gid) == (0, 4242) and st.st_mode & 0o7777 == (0o750 if path.is_dir() else 0o640), path


def test_template_differs_by_its_names_only():
    single, template = ((DEPLOY / n).read_text().splitlines() for n in ("keepd.service", "keepd@.service"))
    differ = {a.split("=")[0] for a, b in zip(single[3:], template[3:]) if a != b and not a.startswith("#")}
    assert differ == {"Description", "ExecStart", "StateDirectory", "RuntimeDirectory", "WorkingDirectory"}


def test_dashboard_asks_for_metrics_that_exist(shared):
    text = (DEPLOY / "grafana.json").read_text()
    asked = set(re.findall(r"\b(?:vllm:|keepd_|process_)[a-z_0-9]+", text))
    shared.chat(max_tokens=2)
    have = set(re.findall(r"^((?:vllm:|keepd_|process_)[a-z_0-9]+)\{", shared.get("/metrics").text, re.M))
    assert len(asked) >= 20 and not asked - have, asked - have


def functions():
    """Names of all tests: Python functions, Criterion's tests, fuzzers."""
    tests = ROOT / "tests"
    names = {n for f in tests.rglob("*.py") for n in re.findall(r"^def (test_\w+)", f.read_text(), re.M)}
    names |= {n for f in tests.rglob("*.c") for n in re.findall(r"^Test\(\w+, (\w+)", f.read_text(), re.M)}
    return names | {f.name for f in tests.rglob("test_*.*")} | {f.stem for f in tests.rglob("fuzz_*.c")}


@pytest.mark.parametrize("page, least", [("SECURITY.md", 30), ("docs/OPERATIONS.md", 12)])
def test_pages_name_tests_that_exist(page, least):
    text = (ROOT / page).read_text()
    named = {n for ref in re.findall(r"`((?:test|fuzz)_[\w.:]+)`", text) for n in ref.split("::")}
    named |= {n.strip("`") for names in re.findall(r"`test_\w+\.c` \(([^)]*)\)", text) for n in names.split(", ")}
    assert len(named) >= least and not named - functions(), named - functions()


def test_pages_name_options_that_exist():
    options = set(re.findall(r"^  (--[a-z-]+) ", subprocess.run([BINARY, "--help"], capture_output=True, text=True).stdout,
                             re.M))
    text = (ROOT / "docs" / "OPERATIONS.md").read_text() + (ROOT / "SECURITY.md").read_text()
    others = {"--enable", "--now", "--create", "--unix-socket", "--cacert", "--json", "-e"}  # also those of chat, bench and podman
    unknown = {name for name in set(re.findall(r"`(--?[a-z-]+)", text)) - options - others if is_unknown(name)}
    assert not unknown


def is_unknown(name):
    """Whether the daemon knows an option neither as its own nor as another server's."""
    r = subprocess.run([BINARY, name, "1"], capture_output=True, text=True, timeout=60)
    return "unknown option" in r.stderr


def complete(tmp_path, *words):
    """The proposals of bash for the last word."""
    script = tmp_path / "keepd.bash"
    script.write_bytes(subprocess.run([BINARY, "--completion", "bash"], capture_output=True, check=True, timeout=60).stdout)
    line = " ".join(f"'{word}'" for word in words)
    r = subprocess.run(["bash", "-c", f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _keepd; "
                        'printf "%s\\n" "${COMPREPLY[@]}"'], cwd=tmp_path, capture_output=True, text=True, check=True,
                       timeout=60)
    return r.stdout.split()


def test_bash_completes_options_and_values(tmp_path):
    (tmp_path / "model").mkdir()
    assert complete(tmp_path, "keepd", "--log-l") == ["--log-level"]
    assert complete(tmp_path, "keepd", "--log-level", "") == ["error", "warn", "info", "debug"]
    assert complete(tmp_path, "keepd", "--log-level", "=", "w") == ["warn"]
    assert "global" in complete(tmp_path, "keepd", "--kv-policy", "=")
    assert complete(tmp_path, "keepd", "--model", "mod") == ["model"]
    assert complete(tmp_path, "keepd", "--port", "") == []


@pytest.mark.parametrize("shell,begin", [("bash", "--"), ("zsh", "--"), ("fish", "-l ")])
def test_completions_name_every_option(shell, begin):
    def output(*flags):
        return subprocess.run([BINARY, *flags], capture_output=True, text=True, check=True, timeout=60).stdout
    script = output("--completion", shell)
    options = re.findall(r"^  --([a-z0-9-]+)", output("--help"), re.M)
    assert len(options) > 50
    for option in options:
        assert re.search(rf"{begin}{option}\b(?!-)", script), option
