"""Run a tool of this folder as open_clip_mdc runs its own: outputs are checked first, bad input is one line."""
import argparse
import sys
from collections.abc import Callable

from open_clip_mdc.cli import finish
from open_clip_mdc.data.outputs import FOLDER, MAKE_PARENTS, OUTPUTS
from open_clip_mdc.errors import read_flags

from .problems import make_parser


def main(module: str, about: str, add_flags: Callable[[argparse.ArgumentParser], None],
         run: Callable[[argparse.Namespace], None], outputs: dict[str, tuple[str, ...]],
         argv: list[str] | None = None) -> None:
    """Parse the flags and run.

    Args:
        module: name of the module, such as experiments.lengths.
        about: its docstring, which has examples.
        outputs: the suffixes of each flag that names an output.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser(about)
    parser.prog = f"python -m {module}"
    add_flags(parser)
    args = read_flags(parser.parse_args, argv)
    args.tool = module
    OUTPUTS[module] = outputs
    if FOLDER in outputs.values():
        MAKE_PARENTS.add(module)
    finish(lambda: run(args), args, argv)
