"""How a long run says where it is; the standard library only."""

import json
import shutil
import sys


class Report:
    """JSON lines; on a terminal one line with a bar that is written over."""

    def __init__(self, stream=None):
        self.stream = stream or sys.stdout
        self.terminal = self.stream.isatty()

    def line(self, values):
        if self.terminal:
            self.stream.write("\r\033[K")
        print(values if isinstance(values, str) else json.dumps(values), file=self.stream, flush=True)

    def bar(self, share, values):
        """The state after each step; nothing where lines are collected."""
        if not self.terminal:
            return
        width = shutil.get_terminal_size().columns - 1
        filled = int(20 * min(1.0, share))
        text = f"[{'#' * filled}{'.' * (20 - filled)}] {100 * min(1.0, share):3.0f} % " + "  ".join(
            f"{k} {v:,.4g}" if isinstance(v, float) else f"{k} {v:,}" for k, v in values.items())
        self.stream.write(f"\r\033[K{text[:width]}")
        self.stream.flush()
