#!/usr/bin/env python3
"""The rehearsal of bench/gpu/check on a machine of another distribution, as machines with a GPU are: a clean root of Ubuntu
24.04 with Python, later also a compiler and CMake, without the daemon's libraries, Criterion or a package index; nvidia-smi is
a script that shows a GPU.

    gpu.py [--log FILE] [--mirror URL] [--archive FILE] [--parts LIST] [--no-build]

1. The carried programs of the emulated device run there, every part of the plan that needs no other software.
2. Without them, the programs are built there from the carried libraries, and the first parts run again.
3. The programs for a GPU start there and say that there is none; only where the archive has them.

--archive: made by `bench/gpu/carry --emulate` before; without it, one with the emulated device alone is made. Needs root,
mmdebstrap and the mirror; otherwise says so and succeeds."""
import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
RELEASE = "noble"
MIRROR = "http://archive.ubuntu.com/ubuntu"
TOOLS = ["g++", "cmake", "ninja-build"]
PARTS = "smoke,cases,model,kernels,each,serve,formats,chat,modes,long"
GPU = """#!/bin/sh
case "$*" in
*compute_cap*) echo 9.0 ;;
*) echo "NVIDIA H100 80GB HBM3, 81559 MiB, 580.159.04" ;;
esac
"""
NO_GPU = "no CUDA device"


def run(*command, **options):
    r = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)
    assert r.returncode == 0, f"{' '.join(map(str, command))}: exit {r.returncode}\n{r.stdout}{r.stderr}"
    return r.stdout


def reachable(mirror):
    try:
        with urllib.request.urlopen(f"{mirror}/dists/{RELEASE}/Release", timeout=20) as answer:
            return answer.status == 200
    except OSError:
        return False


def proxy_options():
    """The machine's own proxies."""
    lines = run("apt-config", "dump").splitlines()
    return [word for line in lines if line.startswith("Acquire::http") for word in ("--aptopt", line)]


class ForeignRoot:
    def __init__(self, path, mirror):
        self.path = path
        # The keys of that archive are not among Debian's packages, and the root is thrown away.
        run("mmdebstrap", "--variant=apt", "--quiet", "--include=python3", *proxy_options(), RELEASE, path,
            f"deb [trusted=yes] {mirror} {RELEASE} main universe")
        run("mount", "--bind", "/proc", path / "proc")
        (path / "usr/local/bin/nvidia-smi").write_text(GPU)
        (path / "usr/local/bin/nvidia-smi").chmod(0o755)
        copy_checkout(path / "src")

    def close(self):
        subprocess.run(["umount", self.path / "proc"], check=False, capture_output=True)

    def call(self, *command):
        environment = {"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8",
                       "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(["chroot", self.path, *map(str, command)], env=environment, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, check=False)

    def add_tools(self):
        for command in (["update", "-q"], ["install", "-y", "-q", "--no-install-recommends", *TOOLS]):
            done = self.call("apt-get", *command)
            assert done.returncode == 0, done.stdout

    def check(self, *arguments):
        """bench/gpu/check there: what it printed, and its results."""
        results = self.path / "results"
        shutil.rmtree(results, ignore_errors=True)
        done = self.call("python3", "/src/bench/gpu/check", "--results", "/results", "--out", "/out", "--commit", "rehearsal", *arguments)
        found = next(results.glob("*.json"), None)
        assert found, done.stdout
        return done, json.loads(found.read_text())


def copy_checkout(to):
    """The tracked files, as a machine without git gets them."""
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)


def summary(result):
    good = sum(step["ok"] for step in result["steps"])
    return f"{good} of {len(result['steps'])} steps passed in {result['seconds']:.0f} s"


class Log:
    def __init__(self, path):
        self.path, self.text = path, ""

    def say(self, line):
        print(line, flush=True)
        self.text += line + "\n"
        if self.path:
            self.path.write_text(self.text)

    def steps(self, result):
        for step in result["steps"]:
            self.say(f"    {'ok' if step['ok'] else 'FAILED':<7}{step['seconds']:>7.1f} s  {step['name']}")
        for what in result["left_out"]:
            self.say(f"    left out: {what}")
        self.say(f"  {summary(result)}")


def all_passed(log, what, done, result, least):
    log.say(what)
    log.steps(result)
    assert done.returncode == 0 and len(result["steps"]) >= least, done.stdout


def carried(root, archive, log):
    where = root.path / "src/build"
    where.mkdir(exist_ok=True)
    shutil.copy(archive, where / "gpu-carry.tar.xz")
    log.say(f"archive: {archive.stat().st_size / 2**20:.1f} MiB")
    return where / "gpu-carry.tar.xz"


def without_programs(archive, to):
    """The same archive with headers and libraries alone."""
    with tarfile.open(archive) as old, tarfile.open(to, "w:xz", preset=1) as new:
        for entry in old:
            if entry.name.split("/")[0] not in ("device", "emulated"):
                new.addfile(entry, old.extractfile(entry) if entry.isfile() else None)


def has_device(archive):
    with tarfile.open(archive) as packed:
        return any(entry.name.startswith("device/") for entry in packed)


def rehearse(args, folder, log):
    archive = args.archive or folder / "carry.tar.xz"
    if not args.archive:
        run(sys.executable, ROOT / "bench/gpu/carry", "--emulate-only", "--to", archive)
    root = ForeignRoot(folder / "root", args.mirror)
    try:
        name = (root.path / "etc/os-release").read_text().split('"')[1]
        log.say(f"a clean root of {name}: Python alone")
        there = carried(root, archive, log)
        all_passed(log, "the emulated device, carried programs:", *root.check("--emulate", "--only", args.parts), 20 if args.parts == PARTS else 5)
        if has_device(archive):
            done, result = root.check("--only", "smoke,kernels,chat", "--seconds", "120")
            log.say("the programs for a GPU, shown one that is not there:")
            log.steps(result)
            said = [step["output"] for step in result["steps"] if not step["ok"]]
            assert done.returncode == 1 and said and all(NO_GPU in text for text in said), done.stdout
            log.say(f"  every failure says: {NO_GPU}")
        if not args.no_build:
            root.add_tools()
            log.say(f"with {root.call('gcc', '--version').stdout.splitlines()[0]}")
            without_programs(archive, there)
            all_passed(log, "the emulated device, programs built there:", *root.check("--emulate", "--only", "smoke,chat"), 5)
    finally:
        root.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log", type=pathlib.Path, help="also write what happened here")
    parser.add_argument("--mirror", default=MIRROR)
    parser.add_argument("--archive", type=pathlib.Path)
    parser.add_argument("--parts", default=PARTS, help="of bench/gpu/check, for the carried programs")
    parser.add_argument("--no-build", action="store_true", help="leave out what is built there, the longest part")
    args = parser.parse_args()
    if os.geteuid() != 0 or not shutil.which("mmdebstrap"):
        print("skip: the rehearsal of a machine with a GPU needs root and mmdebstrap")
        return
    if not reachable(args.mirror):
        print(f"skip: the rehearsal of a machine with a GPU: {args.mirror} is not reachable")
        return
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rehearse(args, pathlib.Path(folder), Log(args.log))
    print(f"rehearsed in {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
