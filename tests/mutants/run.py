#!/usr/bin/env python3
"""run.py [--root DIR] [--only WORD,WORD...] [--at-least PERCENT]: tries changes of the sources that a test must catch.

Each row of rows/*.toml is a mutant: a file, a piece of its text, what takes its place, the tests that must fail then, and why
that matters. The runner works on a copy of the tree with a build folder of its own. First all tests that rows name must pass
without a change. Then, one after the other, each mutant is built, and its tests run, then those of the row's folder of unit
tests. A test has caught the mutant if it fails twice, so that a deadline missed on a busy machine is no catch, or if it does
not end in time.

Fails when a piece of text is not found exactly once, when a mutant does not build, when a named test fails without a change,
and when fewer than --at-least percent of the mutants are caught. A mutant that only another test catches counts, and its row
is reported, so that it can name that test."""
import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIELDS = {"why", "file", "old", "new", "tests"}
SECONDS = 300  # for one test


class Row:
    def __init__(self, name, values):
        assert set(values) == FIELDS, f"{name}: a row has {', '.join(sorted(FIELDS))}, not {', '.join(sorted(values))}"
        self.name = name
        self.why, self.file, self.old, self.new, self.tests = (values[k] for k in ("why", "file", "old", "new", "tests"))
        assert self.tests and self.old != self.new, f"{name}: names no test or changes nothing"


def read_rows(folder):
    return [Row(f"{path.stem}:{i + 1}", values) for path in sorted(folder.glob("*.toml"))
            for i, values in enumerate(tomllib.loads(path.read_text())["mutant"])]


def misplaced(root, rows):
    """A line for each row whose text is not found exactly once."""
    wrong = []
    for row in rows:
        path = root / row.file
        found = path.read_text().count(row.old) if path.exists() else 0
        if found != 1:
            wrong.append(f"{row.name}: {row.file} has its text {found} times: {row.old!r}")
    return wrong


class Tree:
    """A copy of the sources, and what is built of it."""

    def __init__(self, root, work):
        self.root, self.sources, self.build = root, work / "tree", work / "build"
        self.sources.mkdir(parents=True, exist_ok=True)
        self.copy()
        subprocess.run(["cmake", "-S", self.sources, "-B", self.build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Debug",
                        "-DKEEPD_WERROR=OFF"], check=True, stdout=subprocess.DEVNULL)
        shown = subprocess.run(["ninja", "-C", self.build, "-t", "targets", "all"], check=True, capture_output=True, text=True).stdout
        # the path of each program in the build folder, by name
        self.programs = {pathlib.Path(p).name: p for p in re.findall(r"^(\S+): C_EXECUTABLE_LINKER", shown, re.M)}

    def copy(self):
        """Files that did not change keep their time, so that only the others are built again."""
        names = subprocess.run(["git", "-C", self.root, "ls-files", "-coz", "--exclude-standard"], check=True,
                               capture_output=True, text=True).stdout.split("\0")
        names = {name for name in names if name and (self.root / name).is_file()}
        for path in self.sources.rglob("*"):
            if path.is_file() and str(path.relative_to(self.sources)) not in names:
                path.unlink()
        for name in names:
            to = self.sources / name
            if not to.exists() or to.read_bytes() != (self.root / name).read_bytes():
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.root / name, to)

    def make(self, programs):
        done = subprocess.run(["ninja", "-C", self.build, *(self.programs[p] for p in programs)], capture_output=True, text=True)
        return None if done.returncode == 0 else done.stdout[-2000:]

    def needs(self, test):
        """The program that a test is or runs."""
        if ".py" not in test:
            assert test in self.programs, f"{test} is no program of the build"
            return test
        return "keepd-fake"

    def passes(self, test):
        env = {**os.environ, "KEEPD_BIN": str(self.build / "server/keepd-fake")}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *test.split()] if ".py" in test else [
            "tools/run_test", self.build / self.programs[test]]
        try:
            return self.succeeds(command, env) or self.succeeds(command, env)
        except subprocess.TimeoutExpired:
            return False

    def succeeds(self, command, env):
        """False: it failed. A run that does not end in time raises TimeoutExpired."""
        return subprocess.run(command, cwd=self.sources, env=env, timeout=SECONDS, capture_output=True).returncode == 0

    def neighbours(self, row):
        """The other tests of the folder of unit tests that the row's tests, or its file, belong to."""
        folder = f"tests/unit/{row.file.split('/')[0]}/"
        return [name for name, path in sorted(self.programs.items()) if path.startswith(folder) and name not in row.tests]

    def catcher(self, tests):
        """(the first test that fails or None, or why nothing could be tried)"""
        wrong = self.make({self.needs(test) for test in tests}) if tests else None
        if wrong:
            return None, wrong
        return next((test for test in tests if not self.passes(test)), None), None

    def try_row(self, row):
        """(the test that caught it or None, what is wrong with the row)"""
        path = self.sources / row.file
        before = path.read_text()
        path.write_text(before.replace(row.old, row.new))
        try:
            caught, wrong = self.catcher(row.tests)
            if not caught and not wrong:
                caught, wrong = self.catcher(self.neighbours(row))
        finally:
            path.write_text(before)
        return caught, wrong


def expect_passing(tree, rows):
    tests = sorted({test for row in rows for test in row.tests})
    print(f"{len(rows)} mutants; their {len(tests)} tests must pass without a change", flush=True)
    caught, wrong = tree.catcher(tests)
    if caught or wrong:
        sys.exit(f"without a change: {caught} fails" if caught else wrong)


def report(results, at_least):
    survivors = [row for row, caught in results if not caught]
    elsewhere = [(row, caught) for row, caught in results if caught and caught not in row.tests]
    for row in survivors:
        print(f"SURVIVED {row.name} {row.file}: {row.why}\n    {row.old.strip()}\n -> {row.new.strip()}")
    for row, caught in elsewhere:
        print(f"{row.name} was caught by {caught}, which its row does not name")
    percent = 100 * (len(results) - len(survivors)) / len(results)
    print(f"{len(results) - len(survivors)} of {len(results)} mutants were caught: {percent:.1f} %, at least {at_least:g} are asked for")
    return percent >= at_least


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=ROOT, type=pathlib.Path, help="the tree; its rows are in tests/mutants/rows")
    parser.add_argument("--only", default="", help="parts of the names or files of the rows to try, separated by commas")
    parser.add_argument("--at-least", default=95, type=float, help="percent")
    parser.add_argument("--check", action="store_true", help="only check that each row's text is found")
    args = parser.parse_args()
    rows = [row for row in read_rows(args.root / "tests/mutants/rows") if any(word in f"{row.name}: {row.file}" for word in args.only.split(","))]
    wrong = misplaced(args.root, rows) or ([] if rows else ["there is no such row"])
    if wrong or args.check:
        sys.exit("\n".join(wrong) or 0)
    tree, results = Tree(args.root, args.root / "build/mutants"), []
    expect_passing(tree, rows)
    for i, row in enumerate(rows):
        begin = time.monotonic()
        caught, wrong = tree.try_row(row)
        if wrong:
            sys.exit(f"{row.name} does not build:\n{wrong}")
        results.append((row, caught))
        print(f"{i + 1:3}/{len(rows)} {row.name:14} {caught or 'SURVIVED':44} {time.monotonic() - begin:5.1f} s  {row.why}", flush=True)
    sys.exit(0 if report(results, args.at_least) else 1)


if __name__ == "__main__":
    main()
