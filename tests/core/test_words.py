"""Claims about how docstrings, help and pages are written.    pytest tests/core/test_words.py"""
import pytest
from conftest import REPO
from words import RIDDLES, count, docstrings, prose

PACKAGES = ("src", "clip_benchmark_ext", "experiments", "benchmarks")
PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").glob("*.md"))]


def test_prose_is_counted_without_code_and_tables():
    counts = count(prose("# Title\n\nYou read `a; b; c` here; it is long.\nAnd this is: short.\n\n```sh\nx; y\n```\n\n"
                         "| a; b | c |\n\n- An item that stands alone\n"))
    assert counts == (3, pytest.approx((7 + 4 + 5) / 3), pytest.approx(100 / 3), pytest.approx(100 / 3),
                      pytest.approx(100 / 3))


@pytest.mark.parametrize("package", PACKAGES)
def test_no_docstring_begins_with_a_riddle(package):
    texts = [(path.name, name, text.splitlines()[0]) for path in sorted((REPO / package).rglob("*.py"))
             for name, text in docstrings(path)]
    assert texts and not [each for each in texts if each[2].startswith(RIDDLES)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_have_short_sentences_and_no_semicolons(path):
    counts = count(prose(path.read_text(encoding="utf-8")))
    assert counts.semicolons == 0 and counts.words <= 20
