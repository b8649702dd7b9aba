"""Claims about size: lines and syntax nodes of each package, all flags, and the files that a job enters.

A limit that is too low for your change is a question: what can leave in its place? The limits go down with every part
that leaves. A line alone can be packed, so syntax nodes (without docstrings) count as well.
"""
import argparse
import ast
import csv
import re
import subprocess

import pytest
from conftest import REPO, make_image, run

from open_clip_mdc import cli
from open_clip_mdc.integration import arguments

HEART = tuple(f"src/open_clip_mdc/{name}" for name in ("text", "objectives", "models", "decoding", "likelihood"))
# Folders, the most lines, and the most syntax nodes in thousands.
BUDGET = {
    "the heart": (HEART, 5_990, 31.5),
    "src": (("src",), 17_535, 94.4),
    "clip_benchmark_ext": (("clip_benchmark_ext",), 5_800, 34.7),
    "experiments and benchmarks": (("experiments", "benchmarks"), 6_990, 44.9),
    "tests": (("tests",), 24_350, 177.0),
}
LONGEST_FUNCTION = 60  # lines
MOST_FLAGS = 192
FLAGS = REPO / "tests" / "core" / "fixtures" / "flags.csv"  # command, flag, where it is used
# The most files of the project that a job enters in a process of its own.
ENTERED = {"load": 40, "caption": 19, "score": 19, "probe": 49, "train": 52}


def nodes(tree: ast.AST) -> int:
    """The number of syntax nodes without docstrings and the contexts of names."""
    nested = [child for child in ast.walk(tree) if not isinstance(child, ast.expr_context)]
    return len(nested) - 2 * sum(ast.get_docstring(node, clean=False) is not None for node in nested if isinstance(
        node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef))


def sources(folders: tuple[str, ...]) -> list[str]:
    names = subprocess.run(["git", "ls-files", "--", *folders], cwd=REPO, capture_output=True, text=True).stdout.split()
    return [(REPO / name).read_text(encoding="utf-8") for name in names
            if name.endswith(".py") and (REPO / name).exists()]


def test_nodes_are_counted_without_docstrings():
    plain = nodes(ast.parse("def f(x):\n    return x"))
    assert nodes(ast.parse('"""A."""\ndef f(x):\n    """B."""\n    return x')) == plain
    assert nodes(ast.parse("def f(x):\n    return x + 1")) == plain + 3


@pytest.mark.parametrize("name", BUDGET)
def test_a_package_stays_within_its_budget(name):
    folders, most_lines, most_nodes = BUDGET[name]
    texts = sources(folders)
    if not texts:
        pytest.skip("no git here")
    assert sum(text.count("\n") for text in texts) <= most_lines
    assert sum(nodes(ast.parse(text)) for text in texts) / 1000 <= most_nodes


def test_no_function_is_longer_than_the_longest_of_today():
    lengths = {node.name: node.end_lineno - node.lineno + 1
               for text in sources(("src", "clip_benchmark_ext")) for node in ast.walk(ast.parse(text))
               if isinstance(node, ast.FunctionDef)}
    assert not [name for name, length in lengths.items() if length > LONGEST_FUNCTION]


def flags_of(parser: argparse.ArgumentParser, command: str) -> set[tuple[str, str]]:
    """(command, flag) of a parser and those below it."""
    found = set()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            parsers = {id(below): (name, below) for name, below in reversed(action.choices.items())}  # without aliases
            found |= set().union(*(flags_of(below, f"{command} {name}") for name, below in parsers.values()))
        elif action.option_strings and not isinstance(action, argparse._HelpAction):
            found.add((command, action.option_strings[0]))
    return found


def test_each_flag_is_listed_with_the_place_that_uses_it(monkeypatch):
    from clip_benchmark_ext.flags import make_parser
    seen = []

    def stop(parser, *_):
        seen.append(parser)
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        for parse in (cli.parse, lambda argv: arguments.split(None, argv)):
            pytest.raises(SystemExit, parse, [])
    rows = list(csv.DictReader(FLAGS.open(encoding="utf-8")))
    commands = ("open_clip_mdc", "open_clip_train", "clip_benchmark eval")
    found = set().union(*map(flags_of, (*seen, make_parser()), commands))
    assert {(row["command"], row["flag"]) for row in rows} == found
    for row in rows:
        if row["used in"]:
            text = (REPO / row["used in"]).read_text(encoding="utf-8")
            assert re.search(re.escape(row["flag"]) + r"(?![\w-])", text), row
    assert len(rows) <= MOST_FLAGS
    assert [row["flag"] for row in rows if not row["used in"]] == ["--version"]


WATCH = """
import sys
entered = set()
def watch(frame, event, _):
    name = frame.f_code.co_filename
    if event == "call" and ("open_clip_mdc/" in name or "clip_benchmark_ext/" in name) and \\
            frame.f_code.co_name != "<module>":
        entered.add(name)
def count(job, *args):
    entered.clear()
    sys.setprofile(watch)
    try:
        return job(*args)
    finally:
        sys.setprofile(None)
        print("ENTERED", len(entered), flush=True)
"""
JOBS = {
    "load, caption, score": "import open_clip_mdc\nmodel = count(open_clip_mdc.load, 'photo')\n"
        "count(lambda: model.caption(PHOTO, length=8))\ncount(model.score, PHOTO, ['a dog', 'two cats on a mat'])",
    "probe": "from clip_benchmark_ext import cli\ncount(cli.main, ['eval', '--model', 'mdc', '--pretrained', RUN, "
             "'--dataset', 'wds/probe', '--dataset_root', SCENES + '/probe', '--task', 'linear_probe', '--no_amp', "
             "'--num_workers', '0', '--feature_root', OUT + '/features', '--output', OUT + '/probe.json'])",
    "train": "from open_clip_mdc import train\ncount(train.main, ['--model', 'MDC-ViT-Ti-8', '--train-data', "
             "SCENES + '/train/00000.tar', '--dataset-type', 'webdataset', '--train-num-samples', '8', '--batch-size', "
             "'4', '--workers', '0', '--warmup', '1', '--lr', '1e-3', '--epochs', '1', '--precision', 'fp32', "
             "'--device', 'cpu', '--logs', OUT])",
}


@pytest.mark.parametrize("jobs", JOBS)
def test_a_job_enters_few_files(jobs, scenes, runs, tmp_path):
    names = {"PHOTO": str(tmp_path / "photo.png"), "RUN": str(runs / "mdc"), "SCENES": str(scenes),
             "OUT": str(tmp_path)}
    make_image(0, 64).save(names["PHOTO"])
    code = WATCH + "".join(f"{name} = {value!r}\n" for name, value in names.items()) + JOBS[jobs]
    found = dict(zip(jobs.split(", "), map(int, re.findall(r"ENTERED (\d+)", run("python", "-c", code).stdout)),
                     strict=True))
    assert {job: number for job, number in found.items() if not 1 < number <= ENTERED[job]} == {}
