"""The runner of tests/mutants, on a tree of one function and one test."""
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUN = ROOT / "tests/mutants/run.py"
FILES = {
    "CMakeLists.txt": """cmake_minimum_required(VERSION 3.25)
project(small LANGUAGES C)
add_library(base STATIC base/sum.c)
add_executable(unit_sum tests/unit/base/unit_sum.c)
target_link_libraries(unit_sum PRIVATE base)
add_executable(unit_other tests/unit/base/unit_other.c)
target_link_libraries(unit_other PRIVATE base)
set_target_properties(unit_sum unit_other PROPERTIES RUNTIME_OUTPUT_DIRECTORY tests/unit/base)
""",
    "base/sum.c": "int sum(int a, int b) {\n    while (b < 0) b++, a--;\n    return a + b;\n}\n",
    "tests/unit/base/unit_sum.c": "int sum(int, int);\nint main(void) { return sum(2, 2) != 4; }\n",
    "tests/unit/base/unit_other.c": "int sum(int, int);\nint main(void) { return sum(0, 1) != 1; }\n",
    "tools/run_test": '#!/bin/sh\nexec "$@"\n',
}
CAUGHT = ("return a + b;", "return a - b;")
ELSEWHERE = ("return a + b;", "return a == 0 ? 0 : a + b;")
SURVIVES = ("while (b < 0) b++, a--;", "")


@pytest.fixture
def tree(tmp_path):
    if not shutil.which("cmake") or not shutil.which("ninja"):
        pytest.skip("skip: cmake or ninja is not installed")
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "tools/run_test").chmod(0o755)
    (tmp_path / ".gitignore").write_text("build/\n")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)

    def run(*mutants, at_least="95", check=False):
        rows = "".join(f'[[mutant]]\nwhy = "w"\nfile = "base/sum.c"\nold = "{old}"\nnew = "{new}"\ntests = ["unit_sum"]\n'
                       for old, new in mutants)
        folder = tmp_path / "tests/mutants/rows"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "base.toml").write_text(rows)
        done = subprocess.run([sys.executable, RUN, "--root", tmp_path, "--at-least", at_least, *(["--check"] if check else [])],
                              capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout + done.stderr
    return run


def test_mutants_are_caught_or_survive(tree, tmp_path):
    code, text = tree(CAUGHT, ELSEWHERE)
    assert code == 0 and "2 of 2 mutants were caught" in text, text
    assert "base:2 was caught by unit_other, which its row does not name" in text
    code, text = tree(CAUGHT, SURVIVES)
    assert code == 1 and "SURVIVED base:2 base/sum.c: w" in text and "50.0 %" in text, text
    code, text = tree(CAUGHT, SURVIVES, at_least="50")
    assert code == 0, text
    assert (tmp_path / "base/sum.c").read_text() == FILES["base/sum.c"], "the tree itself is left alone"


def test_rows_that_cannot_be_tried(tree, tmp_path):
    code, text = tree(CAUGHT, ("return a * b;", "return 0;"))
    assert code == 1 and "base:2: base/sum.c has its text 0 times" in text, text
    assert tree(CAUGHT, check=True)[0] == 0
    code, text = tree(("return a + b;", "return a + c;"))
    assert code == 1 and "base:1 does not build" in text, text
    test = tmp_path / "tests/unit/base/unit_sum.c"
    test.write_text(test.read_text().replace("4", "5"))
    code, text = tree(CAUGHT)
    assert code == 1 and "without a change: unit_sum fails" in text, text


def test_every_row_of_the_project_is_found():
    """A change of the sources that a row names changes the row, too."""
    done = subprocess.run([sys.executable, RUN, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
