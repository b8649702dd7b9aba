"""Begin and end a script of this folder. Standard library alone, as `make -n` runs where nothing is installed."""
import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def in_one_line() -> Iterator[None]:
    """Exit with one line for bad input, for a file or a step that fails, and for Ctrl-C. Other errors pass."""
    try:
        yield
    except (ValueError, OSError) as problem:
        sys.exit(f"error: {problem}")
    except KeyboardInterrupt:
        sys.exit("interrupted: run the same command again to resume")


def make_parser(about: str) -> argparse.ArgumentParser:
    """Return a parser whose --help shows a script's docstring, `about`, as it is written."""
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
