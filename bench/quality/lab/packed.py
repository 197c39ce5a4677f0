"""Finished rows as files of the repository: JSON lines, packed by xz (`xz -9 < rows.jsonl > rows.jsonl.xz`) or not.

Raw rows lie in bench/results, so that a later run can go on from them (--from) and a table can be made again.
"""
import json
import lzma


def rows(path):
    """The rows of a file; a last line that was cut off is dropped."""
    with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as f:
        for line in f:
            try:
                yield json.loads(line)
            except ValueError:
                return
