"""Find the code on README and the pages of docs/, parse and run it, and compare the output with the one shown.

A comment before a block says what is special about it:

    <!-- needs: gpu|cluster|download|hours|browser -->    commands are parsed by the real parsers, Python is compiled
    <!-- file: NAME -->                                   the reader saves it under that name
    <!-- output of make demo -->                          it is run on a smaller model, whose output is another

Comment lines directly below a command, or below an expression of Python, are its output.
"""
import argparse
import ast
import contextlib
import io
import math
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from conftest import REPO, run

import clip_benchmark_ext.cli
from open_clip_mdc import cli
from open_clip_mdc.integration import arguments

PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.M | re.S)
MARK = re.compile(r"needs: (gpu|cluster|download|hours|browser)|file: [\w./]+|output of make demo")
NUMBER = re.compile(r"(-?\d+\.\d+(?:e-?\d+)?)")
MODULES = {"open_clip_mdc": "open_clip_mdc", "open_clip_train": "open_clip_mdc.train",
           "clip_benchmark": "clip_benchmark_ext.cli"}

EVIDENCE = {f"experiments.{cli.module_of(tool)}" for tool in cli.MOVED}


class Block(NamedTuple):
    mark: str
    language: str
    code: str

    @property
    def runs(self) -> bool:
        return not self.mark.startswith(("needs", "file"))


def blocks(page: Path) -> list[Block]:
    found = [Block(*(part or "" for part in match.group("mark", "language", "code")))
             for match in BLOCK.finditer(page.read_text(encoding="utf-8"))]
    unknown = [block.mark for block in found if block.mark and not MARK.fullmatch(block.mark)]
    assert not unknown, unknown
    return found


def alike(said: str, shown: str) -> bool:
    """Return whether two texts are the same but for spaces and the last digits of numbers."""
    said, shown = (NUMBER.split("".join(text.split())) for text in (said, shown))
    return len(said) == len(shown) and all(
        math.isclose(float(a), float(b), rel_tol=1e-3) if i % 2 else a == b
        for i, (a, b) in enumerate(zip(said, shown, strict=True)))


# ---- Python


def run_python(block: Block, names: dict) -> None:
    """Run a block in the page's `names`, and compare what its expressions come to."""
    lines = block.code.splitlines()
    for node in ast.parse(block.code).body:
        shown = []
        for line in lines[node.end_lineno:]:
            if not line.startswith("# "):
                break
            shown.append(line.removeprefix("# "))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            if isinstance(node, ast.Expr):
                value = eval(compile(ast.Expression(node.value), "page", "eval"), names)
            else:
                value = exec(compile(ast.Module([node], []), "page", "exec"), names)
        said = printed.getvalue() if value is None else repr(value)
        if shown and not block.mark:
            assert alike(said, "\n".join(shown)), f"{ast.unparse(node)}\n{said}"


# ---- commands


def commands(block: Block) -> Iterator[tuple[list[str], list[str]]]:
    """Yield each command and the lines that it prints."""
    found: list[tuple[list[str], list[str]]] = []
    for line in block.code.replace("\\\n", " ").splitlines():
        if line.startswith("# "):
            found[-1][1].append(line.removeprefix("# "))
        elif argv := shlex.split(line, comments=True):  # no "#SBATCH"
            found.append((argv, []))
    yield from found


def module_and_flags(argv: list[str]) -> tuple[str, list[str]] | None:
    """Return the Python module that a command runs and its arguments, or None if it is another program."""
    argv = argv[argv[0] == "srun":]
    if argv[0] in MODULES:
        return MODULES[argv[0]], argv[1:]
    if argv[0] in ("python", "torchrun", ".venv4/bin/python") and "-m" in argv:
        place = argv.index("-m")
        rest = argv[place + 2:]
        return argv[place + 1], rest[1:] if rest[:1] == ["--"] else rest
    return None


def parse(argv: list[str]) -> None:
    """Assert that a command is one: its flags are known to its parser, its targets to make, its extras to setup.py."""
    program = module_and_flags(argv)
    if program is None:
        check_other(argv)
        return
    module, flags = program
    if module == "open_clip_mdc":
        cli.parse(flags)
    elif module == "open_clip_mdc.train":
        arguments.parse_first(flags)
    elif module == "clip_benchmark_ext.cli":
        _, args, args.flags = clip_benchmark_ext.cli.parse(flags)
        clip_benchmark_ext.cli.check(args, flags)
    else:
        found = find_spec(module)
        assert found, module
        if module in EVIDENCE:
            parser = argparse.ArgumentParser()
            import_module(module).add_flags(parser)
            parser.parse_args(flags)
        elif (REPO / module.partition(".")[0]).is_dir():  # its parser is made where it runs
            own = Path(found.origin).read_text(encoding="utf-8")
            assert not [flag for flag in flags if flag.startswith("--") and f'"{flag}"' not in own], (module, flags)


def check_other(argv: list[str]) -> None:
    if argv[0] == "make":
        makefile = (REPO / "Makefile").read_text().replace("\\\n", "")
        for target in (word for word in argv[1:] if "=" not in word and not word.startswith("-")):
            assert re.search(rf"^(TABLES|ARTICLE|\.PHONY)\b.*\b{target}\b", makefile, re.M), target
    elif argv[:2] == ["pip", "install"]:
        setup = (REPO / "setup.py").read_text()
        for extra in re.findall(r"\[(\w+)\]", " ".join(argv)):
            assert f'"{extra}": [' in setup, extra
    elif argv[0] == "lmms-eval":
        task = argv[argv.index("--tasks") + 1]
        assert (REPO / f"clip_benchmark_ext/lmms/tasks/{task}.yaml").exists(), task
    else:
        assert argv[0] == "export", argv


def run_command(argv: list[str], shown: list[str], compare: bool) -> None:
    parse(argv)
    program = module_and_flags(argv)
    if program is None:
        return
    result = run("python", "-m", program[0], *program[1], fork=True)
    said = (result.stdout + result.stderr).splitlines()
    for line in shown if compare else ():
        assert any(alike(each, line) for each in said), f"{shlex.join(argv)}\n{line}\n" + "\n".join(said)


def run_page(page: Path) -> None:
    """Follow a page from top to bottom in the current folder, as a reader would."""
    names: dict = {}
    for block in blocks(page):
        if block.mark.startswith("file"):
            Path(block.mark.removeprefix("file: ")).write_text(block.code)
        elif block.language == "python":
            run_python(block, names) if block.runs else compile(block.code, page.name, "exec")
        elif block.language == "sh":
            for argv, shown in commands(block):
                run_command(argv, shown, not block.mark) if block.runs else parse(argv)
