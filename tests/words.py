"""Count how prose is written: words a sentence, semicolons, who is spoken to.    python tests/words.py FILE.md ..."""
import ast
import re
import sys
from pathlib import Path
from statistics import mean
from typing import NamedTuple

# No docstring begins with these words, as it would be a riddle until one has read the name.
RIDDLES = ("Of ", "What ", "Whether ", "Where ", "How ", "Its ", "Those ", "Whose ")


class Counts(NamedTuple):
    sentences: int
    words: float  # a sentence
    semicolons: float  # in 100 sentences
    colons: float
    you: float  # sentences with "you" or "your", in 100


def prose(markdown: str) -> str:
    """Return the running text of a page: no code, tables, headings, comments or addresses."""
    left_out = r"<!--.*?-->|```.*?```|^    .*?$|^\|.*?$|^#.*?$|^!\[.*?$"
    text = re.sub(left_out, "", markdown, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`]*`", "code", text)
    return re.sub(r"\]\([^)]*\)|https?://\S+", "]", text)


def sentences(text: str) -> list[str]:
    blocks = re.split(r"\n\s*\n|^\s*[-*] |^\s*\d+\. ", text, flags=re.MULTILINE)
    found = [part for block in blocks for part in re.split(r"(?<=[.!?])\s+(?=[A-Z\"'(`\[])", " ".join(block.split()))]
    return [part for part in found if len(part.split()) > 2]


def count(text: str) -> Counts:
    """Return what is counted of running text."""
    found = sentences(text)
    many = max(1, len(found))
    joined = " ".join(found)
    return Counts(len(found), mean(len(part.split()) for part in found) if found else 0.0,
                  100 * joined.count(";") / many, 100 * len(re.findall(r":(?=\s|$)", joined)) / many,
                  100 * sum(bool(re.search(r"\b[Yy]our?\b", part)) for part in found) / many)


def docstrings(path: Path) -> list[tuple[str, str]]:
    """Return the name and the docstring of the public functions and classes of a file, and of the file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds) and not node.name.startswith("_")]
    return [(getattr(node, "name", path.name), text) for node in (tree, *nodes) if (text := ast.get_docstring(node))]


if __name__ == "__main__":
    print(f"{'':40} sentences  words  semicolons  colons  you")
    for name in sys.argv[1:]:
        counts = count(prose(Path(name).read_text(encoding="utf-8")))
        print(f"{name[-40:]:40} {counts.sentences:9} {counts.words:6.1f} {counts.semicolons:11.1f} "
              f"{counts.colons:7.1f} {counts.you:4.0f}")
