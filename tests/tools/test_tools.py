"""Claims about `open_clip_mdc` itself: its help, its flags, its speed to start."""
import json
import re
import sys
from contextlib import redirect_stdout
from io import StringIO

import pytest
from conftest import REPO, run

import open_clip_mdc
from experiments import prepare_recap
from open_clip_mdc import cli as tools

# What help says of each tool, and the packages that are imported after all of it.
HELP = """
import contextlib, io, json, sys
from open_clip_mdc.cli import TOOLS, main
said = {}
for argv in [], *([name] for name in TOOLS):
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        main([*argv, "--help"])
    said[" ".join(argv)] = text.getvalue()
print(json.dumps([said, sorted({name.split(".")[0] for name in sys.modules})]))
"""


def help_of(*argv: str) -> str:
    with redirect_stdout(StringIO()) as text, pytest.raises(SystemExit) as end:
        tools.main([*argv, "--help"] if argv else [])  # who types the name alone sees the tools, too
    assert end.value.code == 0
    return text.getvalue()


def flags(*argv: str) -> set[str]:
    """The flags that a tool's parser takes."""
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", help_of(*argv)))


def test_help_imports_nothing_heavy():
    said, imported = json.loads(run("python", "-c", HELP).stdout)
    assert list(said) == ["", *tools.TOOLS]
    assert all(text.startswith(f"usage: open_clip_mdc {name}".rstrip()) for name, text in said.items())
    heavy = {"torch", "open_clip", "webdataset", "numpy", "PIL", "matplotlib", "pandas", "requests", "tqdm"}
    assert not heavy & set(imported) and "argparse" in imported


@pytest.mark.parametrize("module, argv", [("open_clip_mdc.train", []), ("clip_benchmark_ext.cli", ["eval"])])
def test_training_and_evaluation_answer_help_and_mistakes_before_they_import_torch(module, argv):
    for wrong in ["--help"], ["--modle", "x"]:
        code = (f"import sys\ntry:\n    from {module} import main\n    main({[*argv, *wrong]!r})\n"
                "except SystemExit as end:\n    print(end.code)\nprint('torch' in sys.modules)")
        said = run("python", "-c", code)
        assert said.stdout.endswith(f"{2 if wrong[1:] else 0}\nFalse\n")
        if wrong[1:]:
            assert said.stderr == "error: --modle is no flag of this command: did you mean --model?\n"


def test_help_lists_every_tool_and_every_flag_that_it_names_exists():
    text = help_of()
    assert re.findall(r"^    ([a-z-]+)\b", text, re.MULTILINE) == list(tools.TOOLS)
    assert set(re.findall(r"--[a-z-]+", text)) == {"--help", "--version"}
    for name in tools.TOOLS:
        module = (REPO / f"src/open_clip_mdc/cli/{name.replace('-', '_')}.py").read_text()
        sources = {"prepare": ("coco", "shards"), "vq": ("fit", "import")}.get(name)
        known = set().union(*(flags(name, source) for source in sources)) if sources else flags(name)
        examples = re.findall(rf"open_clip_mdc {name} .*", module.split('"""')[1])
        assert examples
        for example in examples:
            assert set(re.findall(r"(?<=\s)--[a-z-]+", example.partition("#")[0])) <= known, example


def test_help_begins_with_what_is_needed_and_ends_with_examples_in_groups():
    text = help_of("caption")
    assert text.startswith("usage: open_clip_mdc caption [options] PATHS [PATHS ...]\n")
    titles = re.findall(r"^(\w.*):$", text, re.MULTILINE)
    assert titles == ["positional arguments", "options", "model", "decoding", "help from a CLIP model", "output",
                      "reading images", "many shards", "examples"]


def test_list_names_what_the_commands_take(capsys):
    from clip_benchmark_ext.tasks import TASKS
    from open_clip_mdc.objectives import OBJECTIVES
    tools.main(["list"])
    said = capsys.readouterr().out
    blocks = {block.split(":")[0]: block for block in re.split(r"^(?=\w+:$)", said, flags=re.MULTILINE) if block}
    assert list(blocks) == ["models", "objectives", "tasks", "datasets"]
    for kind, names in (("objectives", OBJECTIVES), ("tasks", TASKS)):
        assert re.findall(r"^  (\S+) ", blocks[kind], re.MULTILINE) == list(names)
    assert "MDC-BASE" in blocks["models"] and "swap_att" in blocks["datasets"] and "folder" in blocks["datasets"]
    tools.main(["list", "tasks"])
    assert capsys.readouterr().out == blocks["tasks"]


def test_a_shell_completes_tools_and_flags():
    pytest.importorskip("argcomplete")
    for line, expected in (("open_clip_mdc capt", "caption"), ("open_clip_mdc caption --guid", "--guidance-scale")):
        said = run("bash", "-c", f"exec 8>&1 9>&2; {sys.executable} -m open_clip_mdc", _ARGCOMPLETE="1", COMP_LINE=line,
                   COMP_POINT=str(len(line)), _ARGCOMPLETE_COMP_WORDBREAKS=" ", IFS="\v").stdout
        assert expected in said


def test_the_version_is_the_packages():
    assert run("python", "-m", "open_clip_mdc", "--version").stdout == f"open_clip_mdc {open_clip_mdc.__version__}\n"


def test_ctrl_c_is_one_line(monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt
    monkeypatch.setattr("experiments.prepare_recap.find_shards", interrupted)
    with pytest.raises(SystemExit, match="^interrupted: run the same command again to resume$") as stopped:
        prepare_recap.main(["--shards", "x", "--out", "y", "--pairs", "1"])
    assert "\n" not in stopped.value.code


def test_a_reader_that_goes_ends_the_tool_without_a_word():
    for buffering in ("", "1"):  # at the end, or at the first line
        said = run("bash", "-c", f"{sys.executable} -m open_clip_mdc list | true", PYTHONUNBUFFERED=buffering)
        assert said.stdout == said.stderr == ""


@pytest.mark.parametrize("tool", tools.MOVED)
def test_what_makes_evidence_says_where_it_went(tool):
    with pytest.raises(SystemExit) as end:
        tools.main([*tool.split(), "--help"])
    module = f"experiments.{tools.module_of(tool)}"
    assert f"open_clip_mdc {tool} is now python -m {module} in a clone (" in end.value.code
    assert "usage: python -m" in run("python", "-m", module, "--help", fork=True).stdout
