"""Claims about publish.py: the pages agree with the archives to the digit, and claim no more than these show."""
import csv
import io
import re
import shutil

import numpy as np
import pytest
from conftest import REPO
from PIL import Image

from experiments.report import publish
from experiments.report.claims import COLUMNS
from experiments.report.collect import LEDGERS, TITLES
from experiments.tables import article, mcdiffusion, scales, views

RESULTS = REPO / "experiments/results"
ARCHIVES = sorted(RESULTS.glob("*.tar.xz"))
PAGE = REPO / "experiments/RESULTS.md"
CLAIMS = publish.read_claims((RESULTS / "claims.csv").read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", ARCHIVES, ids=lambda file: file.name)
def test_tables_and_claims_of_the_pages_are_those_of_the_archives(file):
    """Every number, to the digit, and every pixel."""
    scale, _, part = file.name.removesuffix(".tar.xz").partition(".")
    page = (RESULTS / f"{part or scale}.md").read_text(encoding="utf-8")
    pages, claims, figures = publish.from_archive(file, page)
    needed = {"mcdiffusion": {*mcdiffusion.TABLES, "mcdiffusion"}, "contexts": {"contexts", "between"},
              "repetition": {"epochs", "repetition"}, "sentences": {"sentences"},
              "photographs": {"photos", "likelihoods"}, "views": {"table8", "views"}, "fair": {"rates", "own", "fair"},
              "article": {"table7", "figure8", "figure9", "figure10", "article"},
              "beside": {"probes", "pointing", "contrastive", "decodings_scenes", "decodings_photos", "retrieval"}}
    assert needed.get(part or scale, {part} if part else {"table2", "table3", "floors", "claims"}) <= pages.keys()
    for name, text in pages.items():
        assert f"<!-- {scale} {name} -->\n{text}<!-- end -->" in page, name
    assert claims in (RESULTS / "claims.csv").read_text(encoding="utf-8")
    judged = {row["ledger"] for row in publish.read_claims(",".join(COLUMNS) + "\n" + claims)}
    assert judged >= {"contexts": {"contexts", "between"}, "sentences": {"sentences"}}.get(
        scale, pages.keys() & {*LEDGERS})
    none = dict.fromkeys(("sentences", "photographs", "views", "fair", "objectives", "beside"), 0)
    assert len(figures) == ({"scenes": 2, "contexts": 2, "article": 3} | none).get(part or scale, 1)
    for name, drawn in figures.items():  # another version of matplotlib may draw letters in another way
        published, now = map(Image.open, (RESULTS.parent / "figures" / name, io.BytesIO(drawn)))
        difference = np.abs(np.asarray(published, dtype=float) - np.asarray(now, dtype=float))
        assert difference.mean() <= (published.info["Software"] != now.info["Software"]), name


def test_the_page_of_results_is_made_of_the_claims_and_is_short():
    page = PAGE.read_text(encoding="utf-8")
    assert publish.fill(page, CLAIMS) == page, "make results renews it"
    assert len(page.splitlines()) <= 310
    head = "\n".join(page.splitlines()[:40])
    assert all(f"<!-- {which} -->" in head for which in ("better", "worse", "equal"))


def test_no_sentence_outside_of_generated_blocks_gives_a_verdict_but_by_its_claims():
    """A verdict in italics names its claims, *shows* (rich.t-wide, ...), or explains the words themselves."""
    known = {row["id"]: row["verdict"] for row in CLAIMS}
    for path in (PAGE, *RESULTS.glob("*.md")):
        text = re.sub(r"<!-- .*?<!-- end -->", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for match in re.finditer(r"\*(shows|contradicts|within [\d.]+)\*( \(([\w., -]+)\))?", text):
            where = path.name, text[match.start() - 80:match.end()]
            assert match[3] or "*shows* and *contradicts*" in text[match.start() - 20:match.end() + 20], where
            assert all(known[claim] == match[1] for claim in (match[3] or "").split(", ") if claim), where


def test_claims_have_ids_of_their_own_and_verdicts_of_their_p():
    assert len({row["id"] for row in CLAIMS}) == len(CLAIMS) > 80 and tuple(CLAIMS[0]) == COLUMNS
    for row in CLAIMS:
        resolved = row["verdict"] in ("shows", "contradicts") or row["verdict"].startswith("within")
        smallest = min((float(row[name]) for name in ("p", "p within") if row[name]), default=1.0)
        assert resolved == (smallest <= 0.05), row
        if row["verdict"].startswith(("no verdict", "needs")):
            assert row["why"] and not row["p"], row
        if row["verdict"] == "shows" and " level " not in row["claim"]:
            assert float(row["difference"]) > 0, row


def test_a_chosen_rate_is_the_best_of_its_grid_and_lies_inside_of_it():
    page = (RESULTS / "fair.md").read_text(encoding="utf-8")
    for scale in (scales.SCENES, scales.RICH):
        found = publish.numbers_of(re.search(rf"<!-- {scale.name} rates -->\n(.*?)<!-- end -->", page, re.DOTALL)[1])
        for objective, rate in scale.chosen.items():
            grid = {float(row.split(", ")[1]): float(re.match(r"\W*([\d.]+)", cell)[1])
                    for (row, _), cell in found.items() if row.startswith(f"{objective},")}
            assert min(grid) < max(grid, key=grid.get) == rate < max(grid)


def test_tables_are_renewed_where_a_page_has_their_place(tmp_path):
    page = tmp_path / "scenes.md"
    page.write_text("before\n<!-- scenes table5 -->\nold\n<!-- end -->\nafter\n<!-- scenes table4 -->\n<!-- end -->\n")
    publish.insert({"table5": "| new |\n"}, "scenes", page)
    assert page.read_text() == ("before\n<!-- scenes table5 -->\n| new |\n<!-- end -->\nafter\n"
                                "<!-- scenes table4 -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match="no <!-- paper table5 -->"):
        publish.insert({"table5": "| new |\n"}, "paper", page)


@pytest.mark.parametrize("name, old, new, lost", [
    ("table5", "|  | a | b |\n| --- | --- | --- |\n| [0.5, 1.0] | **5.0 ± 1.0** | missing |\n",
     "|  | a | b |\n| --- | --- | --- |\n| [0.5, 1.0] | missing | 7.0 |\n", r"\[0.5, 1.0\], a \(\*\*5.0 ± 1.0\*\*\)"),
    ("table5", "|  | a |\n| --- | --- |\n| x | 5.0 |\n| y | 1.0 [3.0] |\n",
     "|  | a |\n| --- | --- |\n| x | 5.5 |\n\nNot run: y.\n", r"y, a \(1.0 \[3.0\]\)"),
    ("figure6", "scenes 0\n\n- ARC: a\n", "missing\n", "what it shows")], ids=["cell", "row", "figure"])
def test_a_number_of_a_page_is_never_replaced_by_nothing(tmp_path, name, old, new, lost):
    page, text = tmp_path / "scenes.md", "<!-- scenes {} -->\n{}<!-- end -->\n"
    page.write_text(text.format(name, old))
    with pytest.raises(ValueError, match=f"scenes.md, scenes {name}: {lost} would be missing: give the archive"):
        publish.insert({name: new}, "scenes", page)
    assert page.read_text() == text.format(name, old)
    other = old.replace("5.0", "6.0").replace("- ARC: a", "- ARC: b")
    publish.insert({name: other}, "scenes", page)
    assert page.read_text() == text.format(name, other)


def test_pages_are_made_of_an_archive_with_their_claims_and_counts(tmp_path):
    """MC-Diffusion's alone: its page, claims.csv, and a page of results that asks for three blocks."""
    (tmp_path / "results").mkdir()
    for name in ("scenes.mcdiffusion.tar.xz", "mcdiffusion.md"):
        shutil.copy(RESULTS / name, tmp_path / "results" / name)
    page = tmp_path / "RESULTS.md"
    page.write_text("<!-- counts -->\n<!-- end -->\n<!-- better -->\n<!-- end -->\n<!-- claims codes-vit replace -->\n"
                    "<!-- end -->\n")
    rows = list(csv.DictReader(publish.publish(tmp_path).splitlines()))
    assert (tmp_path / "results/mcdiffusion.md").read_text() == (RESULTS / "mcdiffusion.md").read_text()
    assert [row for row in CLAIMS if row["ledger"] == "mcdiffusion"] == rows
    text = page.read_text()
    assert "| mcdiffusion | scenes | " in text and "- no claim so far" in text
    assert re.search(r"\| codes-vit \| control: codes above a ViT that learns \|  \| \+183.1 .*, \*shows\* \|", text)
    page.write_text("<!-- claims no-such -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match="claims.csv has no claim no-such"):
        publish.publish(tmp_path)


def test_places_of_pages_are_of_tables_that_their_scale_has():
    for path in RESULTS.glob("*.md"):
        for scale, name in re.findall(r"<!-- (?!beside )(\w+) (\w+) -->", path.read_text(encoding="utf-8")):
            assert scale in scales.SCALES and name in {*TITLES, *article.TABLES, *views.TABLES}, (path, name)
