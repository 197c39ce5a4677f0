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
        self.rows, self.groups, self.lock = {}, {}, threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        text = self.path.read_text() if self.path.exists() else ""
        for line in text.splitlines():
            self.read(line)
        self.file = self.path.open("a")
        if text and not text.endswith("\n"):
            self.file.write("\n")

    def read(self, line):
        try:
            self.keep(json.loads(line))
        except (ValueError, KeyError, TypeError):
            pass                                    # the end of a run that was killed

    def keep(self, row):
        key = row["key"]
        self.rows[key] = row
        self.groups.setdefault(key.rpartition("/")[0], {})[key] = row

    def get(self, key):
        return self.rows.get(key)

    def add(self, key, row):
        row = {"key": key, **row}
        with self.lock:
            self.keep(row)
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()

    def take(self, rows):
        """Adds rows of an earlier run that are missing here."""
        for row in rows:
            if row["key"] not in self.rows:
                self.add(row["key"], row)

    def under(self, group):
        """Rows whose key is `group`, a slash and one more word."""
        with self.lock:
            return list(self.groups.get(group, {}).values())

    def forget(self, methods):
        """Drops what was measured of these methods: they changed. Rewrites the file."""
        with self.lock:
            kept = [r for r in self.rows.values() if r.get("method") not in methods]
            self.rows, self.groups = {}, {}
            for row in kept:
                self.keep(row)
            self.file.close()
            whole = self.path.with_suffix(".new")
            whole.write_text("".join(json.dumps(r) + "\n" for r in kept))
            whole.replace(self.path)
            self.file = self.path.open("a")
