"""Write the pages of results from the archives: make results, or python -m experiments.report.publish.

An archive results/SCALE.tar.xz fills results/SCALE.md between <!-- SCALE TABLE --> and <!-- end -->. An archive
results/SCALE.PART.tar.xz fills results/PART.md. That of `make beside` has results of single commands or tables they
printed. All claims go to results/claims.csv. From there they fill RESULTS.md between <!-- counts -->, <!-- better -->,
<!-- worse -->, <!-- equal --> or <!-- claims ID ... --> and <!-- end -->. Figures that these pages show are drawn again
into figures/, with the archives' numbers. What is in no archive, such as Figures 3 and 6, stays as it is.
"""
import csv
import logging
import re
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from ..commands import Place
from ..problems import in_one_line, make_parser
from ..progress import write
from ..tables.scales import SCALES
from . import archive
from .claims import CLAIM_SEPARATOR, COLUMNS, KINDS, PAPER
from .collect import LEDGERS, WITH_CLAIMS, collect

FOLDER = Path(__file__).parents[1]
BLOCK = re.compile(r"<!-- (counts|better|worse|equal|claims [\w -]+) -->\n(.*?)<!-- end -->", re.DOTALL)
Rows = list[dict[str, str]]  # of claims.csv


def numbers_of(page: str) -> dict[tuple[str, str], str]:
    """Return the cells of a page that hold a number, by row and column."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()
            if line.startswith("| ")]
    return {(row[0], column): cell for row in rows[2:] for column, cell in zip(rows[0][1:], row[1:], strict=False)
            if re.match(r"\W*\d", cell)}


def check_kept(old: str, new: str, where: str) -> None:
    new_numbers = numbers_of(new)
    lost = [f"{row}, {column} ({cell})" for (row, column), cell in numbers_of(old).items()
            if (row, column) not in new_numbers]
    if lost or new == "missing\n" and old.strip() not in ("", "missing"):
        raise ValueError(f"{where} {lost[0] if lost else 'what it shows'} would be missing: give the archive that has "
                         f"its results, or remove it from the page")


def insert(pages: dict[str, str], scale: str, path: Path) -> None:
    """Replace the tables of a page.

    Raises ValueError if the page has no place for a table, or a number that the new table lacks.
    """
    text = path.read_text(encoding="utf-8")
    for name, page in pages.items():
        found = re.search(rf"<!-- {scale} {name} -->\n(.*?)<!-- end -->", text, re.DOTALL)
        if not found:
            raise ValueError(f"{path} has no <!-- {scale} {name} --> ... <!-- end -->")
        if name not in LEDGERS:
            check_kept(found[1], page, f"{path}, {scale} {name}:")
        text = text[:found.start(1)] + page + text[found.end(1):]
    write(path, text)


class Published(NamedTuple):
    """The tables, claims and figures of an archive."""

    tables: dict[str, str]  # Markdown by name
    claims: str  # CSV
    figures: dict[str, bytes]  # PNG by the name of a file in figures/


def printed(folder: Path) -> str:
    """Return the table that a command printed, or that of results of `clip_benchmark eval`."""
    from clip_benchmark_ext import table
    if (file := folder / "table.md").exists():
        return file.read_text(encoding="utf-8")
    return table.markdown(table.read_results(sorted(map(str, folder.glob("*.json"))))) + "\n"


def from_archive(file: Path, page: str) -> Published:
    """Return the tables and figures of an archive for which its page has a place, and its claims."""
    scale = file.name.partition(".")[0]
    names = set(re.findall(rf"<!-- {scale} (\w+) -->", page)) - {"figure3", "figure6"}  # in no archive
    with TemporaryDirectory() as folder:
        out = Path(folder, scale)
        archive.unpack(file, out)
        if scale not in SCALES:  # that of `make beside`
            return Published({name: printed(out / "results" / name) for name in names}, "", {})
        pages = collect(SCALES[scale], Place(Path("data"), out, "", 0), sorted(names))
        tables = [out / "tables" / "claims" / f"{name}.csv" for name in WITH_CLAIMS if name in names]
        drawn = {scale if path.stem == scale else f"{scale}-{path.stem}": path for path in out.glob("tables/*.png")}
        figures = {f"{name}.png": path.read_bytes() for name, path in drawn.items() if f"/{name}.png)" in page}
        return Published(pages, "".join(file.read_text(encoding="utf-8") for file in tables), figures)


# ---- RESULTS.md, from claims.csv

def read_claims(text: str) -> Rows:
    return list(csv.DictReader(text.splitlines()))


def shown(row: dict[str, str]) -> str:
    """Return a difference with its interval and verdict, or the reason why there is no verdict."""
    if not row["difference"]:
        return "not run"
    if row["verdict"] == "no verdict":
        return f"no verdict: {row['why']}"
    number = f"{float(row['difference']):+.1f}" + (
        " ({:+.1f} to {:+.1f})".format(*(float(row[end]) for end in ("low", "high"))) if row["low"] else "")
    return f"{number}, *{row['verdict']}*"


def chosen(rows: Rows, ids: list[str]) -> str:
    from open_clip_mdc.data.markdown import markdown_table
    lines = []
    of = {row["id"]: row for row in rows}
    scales = dict.fromkeys(scale for scale, _, short in (row["id"].partition(".") for row in rows) if short in ids)
    for one in ids:
        found = [of.get(f"{scale}.{one}") for scale in scales]
        first = next((row for row in found if row), None)
        if first is None:
            raise ValueError(f"claims.csv has no claim {one}")
        lines.append([one, first["claim"].partition(CLAIM_SEPARATOR)[0], first["its numbers"],
                      *(shown(row) if row else "" for row in found)])
    return markdown_table(["claim", "", "paper", *scales], lines) + "\n"


def counts(rows: Rows) -> str:
    from open_clip_mdc.data.markdown import markdown_table
    groups = defaultdict(list)
    for row in rows:
        kind = "within" if row["verdict"].startswith("within") else row["verdict"]
        groups[row["ledger"], row["id"].partition(".")[0]].append(kind)
    kinds = [*KINDS, PAPER]
    lines = [[*group, *(found.count(kind) for kind in kinds)] for group, found in groups.items()]
    return markdown_table(["ledger", "scale", *kinds], lines) + "\n"


def standing(rows: Rows, which: str) -> str:
    """Return the claims in which the left side (MDC) is better, worse or equal, as a list with all scales."""
    numbers = defaultdict(list)
    for row in rows:
        open_ones = "not resolved", "no verdict", "not run", PAPER
        if row["ledger"] not in ("claims", "compared", "fair") or row["verdict"] in open_ones:
            continue
        equal = row["verdict"].startswith("within") or row["verdict"] == "shows" and " level " in row["claim"]
        stands = "equal" if equal else "better" if float(row["difference"]) > 0 else "worse"
        if stands == which:
            scale, _, short = row["id"].partition(".")
            claim, _, here = row["claim"].partition(CLAIM_SEPARATOR)
            number, _, verdict = shown(row).rpartition(", ")
            numbers[f"{row['paper']} ({short}). {claim}", verdict].append(
                f"{number} in {scale}" + f" [{here}]" * bool(here))
    lines = [f"- {claim}: {', '.join(found)}, {verdict}" for (claim, verdict), found in numbers.items()]
    return "\n".join(lines or ["- no claim so far"]) + "\n"


def fill(page: str, rows: Rows) -> str:
    """Return RESULTS.md with its blocks filled from the claims."""
    def block(match: re.Match) -> str:
        what, *ids = match[1].split()
        text = chosen(rows, ids) if what == "claims" else counts(rows) if what == "counts" else standing(rows, what)
        return f"<!-- {match[1]} -->\n{text}<!-- end -->"
    return BLOCK.sub(block, page)


def publish(folder: Path) -> str:
    """Write all pages and figures of a folder such as experiments/. Returns the claims as CSV."""
    from open_clip_mdc.data.files import new_file
    (folder / "figures").mkdir(exist_ok=True)
    table = ",".join(COLUMNS) + "\n"
    for file in sorted((folder / "results").glob("*.tar.xz")):
        scale, _, part = file.name.removesuffix(".tar.xz").partition(".")
        path = folder / "results" / f"{part or scale}.md"
        found = from_archive(file, path.read_text(encoding="utf-8"))
        insert(found.tables, scale, path)
        table += found.claims
        for name, figure in found.figures.items():
            with new_file(folder / "figures" / name) as partial:
                partial.write_bytes(figure)
    write(folder / "results" / "claims.csv", table)
    page = folder / "RESULTS.md"
    write(page, fill(page.read_text(encoding="utf-8"), read_claims(table)))
    return table


@in_one_line()
def main() -> None:
    make_parser(__doc__).parse_args()
    logging.disable(logging.WARNING)  # a table itself shows which groups of pairs have no row
    publish(FOLDER)


if __name__ == "__main__":
    main()
