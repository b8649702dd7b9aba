"""Check how prose is written, and that CONTRIBUTING's tree is the tree.    python tests/prose.py [FILE.md ...]

With files it prints what is counted of each. Without it checks the project and ends with status 1 after its complaints.
"""
import ast
import re
import sys
from pathlib import Path
from statistics import mean
from typing import NamedTuple

REPO = Path(__file__).resolve().parent.parent
PACKAGE = REPO / "src/open_clip_mdc"
README_LINES = 120
SENTENCE = 20  # the most words of a page's mean sentence
# No docstring begins with these words, as it would be a riddle until one has read the name.
RIDDLES = ("Of ", "What ", "Whether ", "Where ", "How ", "Its ", "Those ", "Whose ")


class Counts(NamedTuple):
    sentences: int
    words: float  # a sentence
    semicolons: int


def prose(markdown: str) -> str:
    """Return the running text of a page: no code, tables, headings, comments or addresses."""
    left_out = r"<!--.*?-->|```.*?```|^    .*?$|^\|.*?$|^#.*?$|^!\[.*?$"
    text = re.sub(left_out, "", markdown, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`]*`", "code", text)
    return re.sub(r"\]\([^)]*\)|https?://\S+", "]", text)


def count(path: Path) -> Counts:
    """Return what is counted of a page's running text."""
    text = prose(path.read_text(encoding="utf-8"))
    blocks = re.split(r"\n\s*\n|^\s*[-*] |^\s*\d+\. ", text, flags=re.MULTILINE)
    parts = [part for block in blocks for part in re.split(r"(?<=[.!?])\s+(?=[A-Z\"'(`\[])", " ".join(block.split()))]
    sentences = [part.split() for part in parts if len(part.split()) > 2]
    return Counts(len(sentences), mean(map(len, sentences)) if sentences else 0.0, text.count(";"))


def riddles(path: Path) -> list[str]:
    """Return the public functions and classes of a file whose docstring begins with a riddle."""
    kinds = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    found = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]
    names = {getattr(node, "name", "the file"): ast.get_docstring(node) or "" for node in found}
    return [name for name, text in names.items() if not name.startswith("_") and text.startswith(RIDDLES)]


def listed() -> dict[str, set[str]]:
    """Return the files of each folder of the package that CONTRIBUTING's tree names."""
    tree = (REPO / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("<!-- tree -->")[2].split("```")[1]
    named, folder = {}, ""
    for line in tree.partition("clip_benchmark_ext/")[0].splitlines()[2:]:
        names = re.match(r"\s*(\w+(?:  ?\w+)*/?)(?:  |$)", line)[1].split()
        if names[0].endswith("/"):
            folder = names[0].rstrip("/")
        else:
            named.setdefault(folder if line.startswith("    ") else "", set()).update(names)
    return named


def present() -> dict[str, set[str]]:
    """Return the files of each folder of the package. Those of cli/ are a file a command."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        folder = path.parent.relative_to(PACKAGE).name
        if not path.stem.startswith("__") and folder != "cli":
            found.setdefault(folder, set()).add(path.stem)
    return found


def complaints() -> list[str]:
    found = []
    for page in (REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").glob("*.md"))):
        counts = count(page)
        if counts.semicolons or counts.words > SENTENCE:
            found.append(f"{page.name}: {counts.semicolons} semicolons, {counts.words:.1f} words a sentence")
    lines = len((REPO / "README.md").read_text(encoding="utf-8").splitlines())
    if lines > README_LINES:
        found.append(f"README.md: {lines} lines, at most {README_LINES}")
    for package in ("src", "clip_benchmark_ext", "experiments", "benchmarks"):
        for path in sorted((REPO / package).rglob("*.py")):
            found += [f"{path.name}: the docstring of {name} begins with a riddle" for name in riddles(path)]
    named, there = listed(), present()
    for folder in sorted(named.keys() | there.keys()):
        for name in sorted(named.get(folder, set()) ^ there.get(folder, set())):
            found.append(f"CONTRIBUTING.md: {folder or 'the package'}: {name} is not in both tree and folder")
    return found


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, count(Path(name))._asdict())
    if not sys.argv[1:]:
        said = complaints()
        print("\n".join(said))
        sys.exit(bool(said))
