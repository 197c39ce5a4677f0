"""Types of command-line arguments: what is wrong with one is said at the start, by its name; the standard library only."""

import argparse
from pathlib import Path


def file(text):
    """A file that can be read."""
    path = Path(text)
    try:
        path.open("rb").close()
    except OSError as e:
        raise argparse.ArgumentTypeError(f"{text}: {e.strerror}") from None
    return path


def count(text):
    """A whole number above 0."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text}: not a whole number above 0")
    return int(text)


def positive(text):
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: not a number above 0")
    return value
