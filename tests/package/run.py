#!/usr/bin/env python3
"""Installs the Debian package in a clean root, uses it, upgrades it with a conversation on disk, purges it.

    run.py PACKAGE.deb

Needs root and mmdebstrap; otherwise says so and succeeds. There is no systemd in the root, so the daemon is started as its
unit starts it: the same command, user and directories."""
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

RELEASE = "bookworm"
FACT = "My sister Nora lives in Lisbon. The code of the garage is 4815."
QUESTION = "What is the code of the garage?"
SECONDS = 60


def run(*command, **options):
    r = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)
    assert r.returncode == 0, f"{' '.join(map(str, command))}: exit {r.returncode}\n{r.stdout}{r.stderr}"
    return r.stdout


def apt_settings():
    """The machine's own mirrors and proxies."""
    options = []
    for line in run("apt-config", "dump").splitlines():
        if line.startswith("Acquire::http"):
            options += ["--aptopt", line]
    sources = [p for p in (pathlib.Path("/etc/apt/sources.list"), *pathlib.Path("/etc/apt/sources.list.d").glob("*"))
               if p.is_file() and p.read_text().strip()]
    return options, sources


class Root:
    def __init__(self, path):
        self.path = path
        options, sources = apt_settings()
        run("mmdebstrap", "--variant=apt", "--quiet", "--include=systemd-standalone-sysusers,systemd-standalone-tmpfiles",
            *options, RELEASE, path, *sources)
        run("mount", "--bind", "/proc", path / "proc")  # systemd-tmpfiles needs it
        self.run("apt-get", "update", "-q")

    def close(self):
        subprocess.run(["umount", self.path / "proc"], check=False, capture_output=True)

    def run(self, *command):
        env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
        return run("chroot", self.path, *command, env=env)

    def install(self, package):
        shutil.copy(package, self.path / "tmp/keepd.deb")
        self.run("apt-get", "install", "-y", "-q", "--no-install-recommends", "/tmp/keepd.deb")
        (self.path / "tmp/keepd.deb").unlink()

    def left(self):
        """Files of the package, or named after it, outside apt's and dpkg's own records."""
        skipped = ("proc", "sys", "dev", "var/lib/dpkg", "var/lib/apt", "var/cache", "var/log")
        found = []
        for folder, folders, files in os.walk(self.path):
            relative = pathlib.Path(folder).relative_to(self.path).as_posix()
            folders[:] = [f for f in folders if f"{relative}/{f}".removeprefix("./") not in skipped]
            found += [f"{relative}/{f}" for f in files + folders if "keepd" in f]
        return found


class Daemon:
    """keepd as keepd.service starts it, on a free port."""

    def __init__(self, root):
        unit = (root.path / "usr/lib/systemd/system/keepd.service").read_text()
        command = re.search(r"^ExecStart=(.*)$", unit, re.M).group(1).split()
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{s.getsockname()[1]}"
        self.process = subprocess.Popen(
            ["chroot", root.path, "setpriv", "--reuid=keepd", "--regid=keepd", "--clear-groups", *command,
             "--port", self.url.rsplit(":", 1)[1], "--state-dir", "/var/lib/keepd"], stdout=subprocess.PIPE, text=True)
        end = time.monotonic() + SECONDS
        while "ready at" not in (line := self.process.stdout.readline()):
            assert line and time.monotonic() < end, f"keepd did not become ready: exit {self.process.poll()}"

    def chat(self, *texts):
        roles = ("user", "assistant")
        body = {"model": "keepd-nano", "temperature": 0,
                "messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}
        request = urllib.request.Request(self.url + "/v1/chat/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            answer = json.load(answer)
        return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def stop(self):
        self.process.terminate()
        assert self.process.wait(timeout=SECONDS) == 0


def raise_version(package, folder):
    """The same package as the next version."""
    run("dpkg-deb", "-R", package, folder / "tree")
    control = folder / "tree/DEBIAN/control"
    control.write_text(re.sub(r"^(Version: .*)$", r"\1+next", control.read_text(), flags=re.M))
    run("dpkg-deb", "-b", folder / "tree", folder / "next.deb")
    return folder / "next.deb"


def check_installed(root):
    assert root.run("keepd", "--version").startswith("keepd ")
    assert "/var/lib/keepd" in root.run("getent", "passwd", "keepd")
    for path, mode in (("etc/keepd", 0o750), ("etc/keepd/keepd.conf", 0o640), ("var/lib/keepd", 0o700)):
        assert (root.path / path).stat().st_mode & 0o777 == mode, path
    assert (root.path / "etc/systemd/system/multi-user.target.wants/keepd.service").is_symlink()
    root.run("bash", "-n", "/usr/share/bash-completion/completions/keepd")
    for path in ("usr/share/man/man1/keepd.1", "usr/share/zsh/site-functions/_keepd"):
        assert (root.path / path).stat().st_size, path


def use(root, package, folder):
    print("installing in a clean", RELEASE, flush=True)
    root.install(package)
    check_installed(root)
    daemon = Daemon(root)
    noted, _ = daemon.chat(FACT)
    daemon.stop()
    settings = root.path / "etc/keepd/keepd.conf"
    settings.write_text(settings.read_text() + "\nlog-level = debug\n")
    print("upgrading with a conversation on disk", flush=True)
    root.install(raise_version(package, folder))
    assert settings.read_text().endswith("log-level = debug\n"), "the upgrade replaced the settings"
    daemon = Daemon(root)
    answer, cached = daemon.chat(FACT, noted, QUESTION)
    daemon.stop()
    assert "4815" in answer and cached > 0, (answer, cached)
    print(f"the conversation continues: {cached} tokens from disk, {answer!r}", flush=True)
    root.run("apt-get", "purge", "-y", "-q", "keepd")
    left = root.left()
    assert not left, left
    assert "keepd" not in (root.path / "etc/passwd").read_text()
    print("purged: nothing is left")


def may_mount():
    with tempfile.TemporaryDirectory() as folder:
        command = ["mount", "--bind", folder, folder]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            return False
        run("umount", folder)
        return True


def main(package):
    if os.geteuid() or not shutil.which("mmdebstrap") or not may_mount():
        print("Skipped the package's test: it needs root, the right to mount, and mmdebstrap")
        return
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        folder.chmod(0o755)
        root = Root(folder / "root")
        try:
            use(root, package, folder)
        finally:
            root.close()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).resolve())
