"""What a command says of bad input: one line with the flag that is to blame, and the names that were perhaps meant."""
import argparse
import difflib
import errno
import os
import re
from collections.abc import Iterable

NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
TARGETS = ("out", "output", "logs")  # flags that name what is written


def close_names(name: str, known: Iterable[str]) -> str:
    """The known names closest to one that is not known, to end a message with."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; close to it: {', '.join(close)}" if close else ""


def complaint(problem: Exception, args: argparse.Namespace, style: str = "-") -> str:
    """The text of an error, in one paragraph, after the flag whose value it is about, unless that is named already.

    Args:
        args: parsed; of the flags whose values are in the text the first is to blame, of several there the longest.
        style: what stands between the words of a flag.
    """
    text = str(problem)
    if re.match(r"Caught \w+ in DataLoader worker", text):  # with its traceback, the reason last
        text = text.strip().splitlines()[-1].partition(": ")[2]
    if isinstance(problem, OSError) and problem.strerror:
        place = problem.filename
        if place is None and problem.errno in NO_ROOM:  # a write does not know the name of its file
            place = next((value for name in TARGETS if (value := getattr(args, name, None))), "a file")
        if place is not None:
            text = f"{place}: {problem.strerror[0].lower()}{problem.strerror[1:]}"
    text = text or type(problem).__name__
    given = [(value, name) for name, values in vars(args).items()
             for value in (values if isinstance(values, list) else [values]) if isinstance(value, str) and value]
    found = []
    for value, name in given:
        place = re.search(rf"(?<![\w/.-]){re.escape(value)}(?![\w-])|{re.escape(os.path.abspath(value))}", text)
        if place and name not in ("tool", "source"):
            found.append((place.start(), -len(value), name))
    if not found or text.startswith("--"):
        return text
    name = min(found)[2]
    flag = f"--{name.replace('_', style)}"
    positional = name == "paths" or name == "shards" and args.tool == "lengths"
    return text if flag in text or positional else f"{flag}: {text}"
