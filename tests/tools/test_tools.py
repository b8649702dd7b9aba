"""Claims about `open_clip_mdc` itself: its help, its flags, its speed to start.    pytest tests/tools/test_tools.py"""
import json
import re

import pytest
from conftest import REPO, run

import open_clip_mdc
from open_clip_mdc import tools

# What a command imports, on the last line of its output.
MODULES = """
import atexit, json, sys
from open_clip_mdc.tools import main
atexit.register(lambda: print(json.dumps(sorted({name.split(".")[0] for name in sys.modules}))))
main(sys.argv[1:])
"""


def modules(*argv: str) -> tuple[str, set[str]]:
    """What a command prints, and the packages that it has imported by then."""
    *lines, imported = run("python", "-c", MODULES, *argv).stdout.splitlines()
    return "\n".join(lines), set(json.loads(imported))


def flags(name: str) -> set[str]:
    """The flags that a tool's parser takes."""
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", run("python", "-m", "open_clip_mdc", name, "--help").stdout))


@pytest.mark.parametrize("name", [None, *tools.TOOLS])
def test_help_imports_nothing_heavy(name):
    text, imported = modules(*([name] if name else []), "--help")
    assert text.startswith("usage: open_clip_mdc")
    heavy = {"torch", "open_clip", "webdataset", "numpy", "PIL", "matplotlib", "pandas", "requests", "tqdm"}
    assert not heavy & imported and "argparse" in imported


def test_help_lists_every_tool_and_every_flag_that_it_names_exists():
    text = run("python", "-m", "open_clip_mdc", "--help").stdout
    listed = re.findall(r"^    ([a-z-]+)\b", text, re.MULTILINE)
    assert listed == list(tools.TOOLS)
    assert set(re.findall(r"--[a-z-]+", text)) == {"--help", "--version"}
    for name in tools.TOOLS:
        module = (REPO / "src" / "open_clip_mdc" / "tools" / f"{name.replace('-', '_')}.py").read_text()
        sources = {"prepare": ("coco", "shards", "cub", "folds", "recap"), "vq": ("fit", "import")}.get(name, ("",))
        known = set().union(*(flags(f"{name} {source}".strip()) if not source else set(re.findall(
            r"--[a-z-]+", run("python", "-m", "open_clip_mdc", name, source, "--help").stdout)) for source in sources))
        examples = re.findall(rf"open_clip_mdc {name} .*", module.split('"""')[1])
        assert examples
        for example in examples:
            assert set(re.findall(r"(?<=\s)--[a-z-]+", example.partition("#")[0])) <= known, example


def test_shared_flags_have_one_spelling_and_one_meaning():
    shared = {"--pretrained", "--model", "--device"}
    images = {"--precision", "--batch-size", "--workers", "--blind-images"}
    assert shared | images <= flags("caption") & flags("score")
    assert shared <= flags("reconstruct") & flags("schedule-search")


def test_the_version_is_the_packages():
    assert run("python", "-m", "open_clip_mdc", "--version").stdout == f"open_clip_mdc {open_clip_mdc.__version__}\n"


def test_ctrl_c_is_one_line(monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt
    monkeypatch.setattr("open_clip_mdc.tools.recap.find_shards", interrupted)
    with pytest.raises(SystemExit, match="^interrupted: caption, embed, .* score --pairs resume") as stopped:
        tools.main(["prepare", "recap", "--shards", "x", "--out", "y", "--pairs", "1"])
    assert "\n" not in stopped.value.code
