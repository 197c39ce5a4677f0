"""Finished dialogues on disk, one JSON line each, so that a run can stop and go on.

A file belongs to one model and one set of gates (named by their SHA-256) and one version of the
tasks; whoever changes what is asked or how it is judged raises VERSION. A line that was cut off
when a run was killed is dropped.
"""
import json
import threading

VERSION = 1


class Store:
    def __init__(self, folder, sha):
        self.path = folder / f"{sha[:16]}.v{VERSION}.jsonl"
        self.rows, self.lock = {}, threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        text = self.path.read_text() if self.path.exists() else ""
        for line in text.splitlines():
            self.read(line)
        self.file = self.path.open("a")
        if text and not text.endswith("\n"):
            self.file.write("\n")

    def read(self, line):
        try:
            row = json.loads(line)
            self.rows[row["key"]] = row
        except (ValueError, KeyError, TypeError):
            pass                                    # the end of a run that was killed

    def get(self, key):
        return self.rows.get(key)

    def add(self, key, row):
        row = {"key": key, **row}
        with self.lock:
            self.rows[key] = row
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()

    def under(self, prefix):
        """Rows whose key starts with prefix + "/"."""
        with self.lock:
            return [row for key, row in self.rows.items() if key.startswith(prefix + "/")]

    def forget(self, methods):
        """Drops what was measured of these methods: they changed. Rewrites the file."""
        with self.lock:
            self.rows = {k: r for k, r in self.rows.items() if r.get("method") not in methods}
            self.file.close()
            whole = self.path.with_suffix(".new")
            whole.write_text("".join(json.dumps(r) + "\n" for r in self.rows.values()))
            whole.replace(self.path)
            self.file = self.path.open("a")
