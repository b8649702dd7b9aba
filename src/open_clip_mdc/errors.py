"""Error messages about bad input: one line with the flag to blame and the names that were probably meant."""
import argparse
import difflib
import errno
import io
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib.util import find_spec
from itertools import takewhile
from numbers import Integral, Real
from typing import TypeVar

MOST = 2**32 - 1  # for whole numbers, as for seeds
LARGEST = 1e6  # its product with any log-probability is finite in float32
NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
Parsed = TypeVar("Parsed")
Problem = str | None  # in one line that says what to do
WHOLE = {"batch_size": 1, "samples": 1, "steps": 1, "top_k": 1, "num_beams": 1, "num_samples": 1, "min_length": 0,
         "seed": 0}  # options of Python functions that are whole numbers, and the least of each
NUMBERS = ("temperature", "top_p", "guidance_scale", "tokens_per_step", "alpha")
RENAMED = {"guidance_weak": "uncond", "save_probe": "save_clf"}  # old names of options
TARGETS = ("out", "output", "logs")  # flags that name an output
MAX_SHOWN = 10  # images that a message names


def flag(name: str, style: str = "-") -> str:
    """Return the flag of an argument's name. `style` joins its words."""
    return f"--{name.replace('_', style)}"


def close_names(name: str, known: Iterable[str]) -> str:
    """Return a question about the known names closest to an unknown one, to add to a message, or ""."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def number_from(lowest: int, most: int = MOST) -> Callable[[str], int]:
    """Return the type of a flag that takes whole numbers from `lowest` to `most`."""
    def number(value: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]+", value):
            raise argparse.ArgumentTypeError(f"{value!r} should be a whole number")
        if not lowest <= int(value) <= most:
            raise argparse.ArgumentTypeError(
                f"{value} should be at {f'least {lowest}' if int(value) < lowest else f'most {most}'}")
        return int(value)
    return number


def finite(value: str) -> float:
    """Parse the value of a flag whose product with a log-likelihood must be finite."""
    if not abs(float(value)) <= LARGEST:
        raise argparse.ArgumentTypeError(f"{value} should be a number from -1e6 to 1e6")
    return float(value)


def meant(name: str, known: Iterable[str]) -> str:
    """Return a question about the flags that were probably meant, such as --caption_length for --lenght, or ""."""
    known, dashes = sorted(known), re.match("-*", name)[0]
    old = name.removeprefix(dashes).replace("-", "_")
    if old in RENAMED:
        return f": it is now {dashes}{RENAMED[old]}"
    ends = [each for each in known
            if difflib.get_close_matches(name, [dashes + re.split("[-_]", each)[-1]], cutoff=0.75)]
    begin = [each for each in known if each.startswith(f"{name}_")]
    close = (difflib.get_close_matches(name, known, n=1, cutoff=0.75) or begin or ends
             or difflib.get_close_matches(name, known))
    return f": did you mean {' or '.join(close)}?" if close else ""


def check_options(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for an option that a Python function does not have."""
    known = sorted(known)
    for name in given:
        if name not in known:
            close = meant(name, known) or f": its options are {', '.join(known)}"
            raise TypeError(f"{function}() has no option {name!r}{close}")


def check_numbers(given: Mapping) -> None:
    """Raise TypeError for an option that is not a number, ValueError for one out of range. None means not given."""
    for name in (*WHOLE, *NUMBERS):
        value = given.get(name)
        kind, what = (Integral, "a whole number") if name in WHOLE else (Real, "a number")
        if value is None:
            continue
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}: it must be {what}")
        if name in NUMBERS and not math.isfinite(value):
            raise ValueError(f"{name} is {value}: it must be finite")
        if value < WHOLE.get(name, -math.inf):
            raise ValueError(f"{name} is {value}: it must be {WHOLE[name]} or more")


def need(package: str, extra: str, what: str) -> None:
    """Raise ValueError unless a package is installed that only an extra of open_clip_mdc brings."""
    if find_spec(package) is None:
        raise ValueError(f"{what} needs {package}: pip install 'open_clip_mdc[{extra}]'")


def check_none_empty(args: argparse.Namespace, argv: list[str]) -> None:
    """Raise ValueError for an empty argument, such as "$UNSET". As a path it would be the current folder."""
    for name, value in vars(args).items():
        if value == "" or isinstance(value, list) and "" in value:
            given = flag(name) in (arg.partition("=")[0] for arg in argv)
            raise ValueError(f"{flag(name) if given else 'an argument'} is empty")


def usable_stdout() -> None:
    """Let stdout print any name, and nothing if it or stderr is closed."""
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 image" or "2 images"."""
    return f"{count} {noun}" + "s" * (count != 1)


def read_flags(parse: Callable[[list[str]], Parsed], argv: list[str]) -> Parsed:
    """Return parse(argv). Wrong flags end the process with status 2 and one line, without the usage text."""
    said, known = io.StringIO(), io.StringIO()
    try:
        with redirect_stderr(said):
            return parse(argv)
    except (SystemExit, ValueError) as problem:  # ValueError: OpenCLIP's --aug-cfg without "="
        if isinstance(problem, SystemExit) and not problem.code:
            raise  # --help
        line = (said.getvalue() or str(problem)).strip().splitlines()[-1].rpartition("error: ")[2]
        if line.startswith(("the following arguments are required", "unrecognized arguments")):
            line += ": --help lists what this command takes"
    # With another wrong value it prints no help.
    with suppress(SystemExit, ValueError), redirect_stderr(io.StringIO()), redirect_stdout(known):
        parse([*argv, "--help"])
    flags = set(re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", known.getvalue()))
    for name in (arg.partition("=")[0] for arg in takewhile("--".__ne__, argv if flags else ())):
        if re.match(r"-[-a-zA-Z]\S", name) and not any(flag.startswith(name) for flag in flags):
            line = f"{name} is no flag of this command{meant(name, flags)}"
            break
    raise Refusal(line)


def printable(text: str) -> str:
    """Escape characters that do not print: control, text direction and broken ones."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Refusal(SystemExit):
    """The end of a process that was given bad input: one line on stderr, and status 2 as for wrong flags."""

    def __init__(self, line: str):
        super().__init__(2)
        self.line = "\n".join(map(printable, f"error: {line}".split("\n")))
        print(self.line, file=sys.stderr)

    def __str__(self) -> str:
        return self.line


class OptionError(ValueError):
    """Options that do not fit. The message names them in braces, of which a command's `complaint` makes flags."""

    def __init__(self, message: str):
        super().__init__(re.sub(r"{(\w+)}", r"\1", message))
        self.message = message


def check_scale(name: str, value: float) -> None:
    """Raise OptionError if a scale of guidance, or the alpha of scores, would make logits infinite or NaN."""
    if not abs(value) <= LARGEST:  # also refuses NaN
        raise OptionError(f"{{{name}}} is {value}: it must be a number from -1e6 to 1e6")


def complaint(problem: Exception, args: argparse.Namespace, argv: list[str], style: str = "-") -> str:
    """Return an error's text in one paragraph, with the flag to blame in front unless the text names it.

    The flag to blame is the one whose value comes first in the text. If several values begin there, it is that of the
    longest. A default value, which is not in `argv`, is to blame only if it is an output. `style` joins the words of a
    flag.
    """
    text = str(problem)
    if isinstance(problem, OptionError):
        text = re.sub(r"{(\w+)}", lambda found: flag(found[1], style), problem.message)
    if re.match(r"Caught \w+ in DataLoader worker", text):  # a traceback, with the reason in its last line
        text = text.strip().splitlines()[-1].partition(": ")[2]
    if isinstance(problem, OSError) and problem.strerror:
        place = problem.filename
        if place is None and problem.errno in NO_ROOM:  # a failed write does not name its file
            place = next((value for name in TARGETS if (value := getattr(args, name, None))), "a file")
        if place is not None:
            text = f"{place}: {problem.strerror[0].lower()}{problem.strerror[1:]}"
    text = text or type(problem).__name__
    found = []
    for name, values in vars(args).items():
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, str) and value and name not in ("tool", "source") and (
                    name in TARGETS or any(value in (arg, arg.partition("=")[2]) for arg in argv)):
                at = re.search(rf"(?<![\w/.-]){re.escape(value)}(?![\w-])|{re.escape(os.path.abspath(value))}", text)
                found += [(at.start(), -len(value), name)] if at else []
    if not found or text.startswith("--"):
        return text
    name = min(found)[2]
    blamed = flag(name, style)
    positional = name in ("paths", "encoder") or name == "shards" and args.tool.endswith(".lengths")
    return text if blamed in text or positional else f"{blamed}: {text}"


def of_worker(problem: RuntimeError | MemoryError) -> str:
    """Return the line for memory that is full, or a data worker that died or hangs. Raises any other error again."""
    if isinstance(problem, MemoryError) or re.search("out of memory|can't allocate memory", str(problem)):
        return "the memory is full: give a smaller batch or model, or smaller images (what is written is kept)"
    if not re.match(r"DataLoader (worker \(pid|timed out)|Pin memory thread exited", str(problem)):
        raise problem
    return ("a worker process that reads data was killed, possibly out of memory, or no longer answers: run the "
            "command again with fewer workers or a smaller batch (what is written is kept)")


def with_reasons(line: str, reasons: list[str], count: int, most: int = MAX_SHOWN) -> ValueError:
    """Return the error of a line with the first of `count` reasons below it."""
    more = [f"... and {count - most} more"] * (count > most)
    return ValueError("\n  ".join(map(printable, [line, *reasons[:most], *more])))


def complain_of_none(found: Collection, skipped: list[str]) -> None:
    """Raise ValueError, before anything is written, if no image can be read, with the reasons."""
    if not found:
        raise with_reasons("no image can be read, so nothing is written:", skipped, len(skipped))


def complain(skipped: list[str], count: int | None = None) -> None:
    """Raise ValueError with the first of `skipped`, the images that cannot be read. `count` may be that of more."""
    if skipped:
        count = count or len(skipped)
        raise with_reasons(f"{count} skipped, all else is written:", skipped, count)
