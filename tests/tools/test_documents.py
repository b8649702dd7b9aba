"""Claims about README and docs/: commands print what the pages show."""
import json
import re
import runpy
import shlex
import shutil
from pathlib import Path

import documents
import pytest
from conftest import REPO, run
from documents import PAGES

from open_clip_mdc import unregister
from open_clip_mdc.integration import configs, plugins
from open_clip_mdc.objectives.registry import OBJECTIVES

LINK = re.compile(r"\]\(([^)\s]+)\)")
RESULTS = [REPO / "experiments/RESULTS.md", *sorted((REPO / "experiments/results").glob("*.md"))]
INLINE = re.compile(r"`((?:make|clip_benchmark eval|python -m) [^`]*)`")
LINKED = [*PAGES, *RESULTS, *(REPO / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "experiments/README.md"))]


@pytest.fixture(scope="module")
def world(scenes, runs, tmp_path_factory) -> Path:
    """Make what a reader has beside the page: what the first page makes, what `make demo` leaves, a run."""
    folder = tmp_path_factory.mktemp("world")
    (made,) = (block.code for block in documents.blocks(REPO / "docs/index.md") if block.language == "python")
    run("python", "-c", f"import os\nos.chdir({str(folder)!r})\n{made}")
    shutil.copytree(runs, folder / "demo")
    shutil.copytree(scenes, folder / "demo/scenes")
    shutil.copytree(runs / "mdc", folder / "logs/mine")
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_says_to_type_works_and_prints_what_it_says(page, world, tmp_path, monkeypatch):
    shutil.copytree(world, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("sys.argv", ["page"])
    monkeypatch.setattr(plugins, "_loaded", {*plugins._loaded})
    rows, objectives = dict(configs.ROWS), dict(OBJECTIVES)
    try:
        documents.run_page(page)
    finally:
        unregister()
        for table, was in ((configs.ROWS, rows), (OBJECTIVES, objectives)):
            table.clear()
            table.update(was)


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.name)
def test_the_commands_of_results_are_commands(page):
    """Commands that train for hours are parsed: every flag and target of make, in blocks and within sentences."""
    found = [argv for block in documents.blocks(page) for argv, _ in documents.commands(block)]
    found += [shlex.split(command) for command in INLINE.findall(page.read_text(encoding="utf-8"))]
    assert found
    for argv in found:
        documents.parse(argv)


def test_each_table_of_one_training_has_a_command_that_measures_it():
    page = (REPO / "experiments/results/beside.md").read_text(encoding="utf-8")
    for section in page.split("\n## ")[1:]:
        assert "\n| ---" in section
        assert "```sh\n" in section or "`make " in section.partition("\n|")[0], section[:60]


def test_the_image_of_docker_installs_and_starts_what_exists():
    lines = (REPO / "Dockerfile").read_text(encoding="utf-8").splitlines()
    entry, command = (json.loads(line.partition(" ")[2]) for line in lines[-2:])
    documents.parse(entry + command)
    for line in lines:
        if line.startswith("RUN "):
            documents.parse(shlex.split(line)[1:])


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_every_link_to_a_file_leads_to_one_and_every_anchor_to_a_title(page):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if path.startswith("http"):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists() and REPO in target.parents, link
        assert not anchor or anchor in anchors(target), link


def test_a_file_that_two_pages_show_is_one_file():
    shown: dict[str, set[str]] = {}
    for block in (block for page in PAGES for block in documents.blocks(page) if block.mark.startswith("file")):
        shown.setdefault(block.mark, set()).add(block.code)
    assert shown and all(len(codes) == 1 for codes in shown.values())


def test_every_page_is_in_the_menu_and_on_the_first_page():
    menu, first = (REPO / "mkdocs.yml").read_text(), (REPO / "docs/index.md").read_text()
    for page in (REPO / "docs").glob("*.md"):
        assert f" {page.name}\n" in menu and (page.name == "index.md" or f"({page.name})" in first), page.name


def test_the_models_are_those_of_the_table_of_objectives():
    written = runpy.run_path(str(REPO / "docs/models.py"))
    assert written["page"]() == (REPO / "docs/models.md").read_text(encoding="utf-8"), "run python docs/models.py"


def test_the_readme_names_both_commands_and_its_numbers_are_those_of_results():
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    assert "make demo" in readme and "make test" in readme
    results = (REPO / "experiments/results/rich.md").read_text(encoding="utf-8")
    curves = results.partition("<!-- rich curves -->")[2].partition("<!-- end -->")[0].replace("*", "")
    for column, model in enumerate(("CLIP", "ARC", "MDC")):
        (measured,) = (line.split("|") for line in curves.splitlines() if line.startswith(f"| {model}, 1 |"))
        for row, place, scale in (("linear probe, %", -7, 1), ("swapped attributes, %", -6, 1), ("CIDEr", -3, 100)):
            shown = re.search(rf"^\| {row} \|(.*)\|$", readme, re.M)[1].split("|")[column]
            numbers = [float(number) / scale for number in re.findall(r"[\d.]+", measured[place])]
            assert [float(number) for number in re.findall(r"[\d.]+", shown)] == pytest.approx(numbers, abs=0.005)
