"""Claims about claims.py: the ledger of the paper's claims, and what results make of it."""
import json
import math
import re

import numpy as np
import pytest
from conftest import REPO
from helpers import write_result
from scipy import stats

from experiments import commands
from experiments.report import claims
from experiments.report.results import read_results
from experiments.tables import scales
from experiments.tables.paper_tables import TABLES

# ---- from files


def fill(folder, model: str, accuracies: list[float], items: dict[int, list[int]] | None = None) -> None:
    for seed, accuracy in enumerate(accuracies):
        path = write_result(folder, "linear_probe", f"{model}--short--s{seed}", "wds/probe", lp_acc1=accuracy)
        if items:
            (path.parent / "items").mkdir(exist_ok=True)
            (path.parent / "items" / path.name).write_text(json.dumps(
                {"images": list(range(len(items[seed]))), "values": {"lp_acc1": items[seed]}}))


def row_of(page: str, claim: str) -> dict[str, str]:
    lines = [[cell.strip() for cell in line.split("|")] for line in page.splitlines() if line.startswith("|")]
    return next(dict(zip(lines[0], line, strict=True)) for line in lines if line[2].startswith(claim))


def ledger_of(folder, scale=scales.SCENES) -> str:
    return claims.ledger(claims.claims(scale), read_results(folder), scale)


def test_a_ledger_from_results(tmp_path):
    fill(tmp_path, "MDC-ViT-Ti-8", [0.70, 0.71, 0.72])
    fill(tmp_path, "MDC-ViT-Ti-8-t0.0-1.0", [0.40, 0.41, 0.42])
    fill(tmp_path, "MDC-ViT-Ti-8-t0.3-0.8", [0.69])
    page = ledger_of(tmp_path)
    wide, narrow = row_of(page, "t in [0.5, 1.0] above [0.0"), row_of(page, "t in [0.5, 1.0] above [0.3")
    assert (wide["verdict"], wide["here"], wide["its numbers"]) == ("*shows*", "+30.0", "39.2 / 29.3")
    assert (narrow["verdict"], narrow["here"], narrow["errors of"]) == ("*not resolved*", "+2.0", "3 + 1 seeds")
    assert row_of(page, "t in [0.5, 1.0] above [0.4")["verdict"] == "*not run*"
    # by hand: seeds 1 / 3 each; 1,600 test images, (0.71 * 1600 + 1) of 1602 and (0.41 * 1600 + 1) of 1602
    variance = 2 / 3 + sum(1e4 * p * (1 - p) / 1602 for p in (1137 / 1602, 657 / 1602))
    freedom = variance ** 2 / (2 * (1 / 3) ** 2 / 2)
    reach = stats.t.isf(0.025, freedom) * math.sqrt(variance)
    assert wide["95 %"] == f"{30 - reach:+.1f} to {30 + reach:+.1f}"


def test_results_of_single_images_are_paired(tmp_path):
    rng = np.random.default_rng(5)
    better = {s: (rng.random(300) < 0.8).astype(int).tolist() for s in range(2)}
    worse = {s: [value if i % 10 else 0 for i, value in enumerate(values)] for s, values in better.items()}
    fill(tmp_path, "MDC-ViT-Ti-8", [np.mean(better[s]) for s in range(2)], better)
    fill(tmp_path, "MDC-ViT-Ti-8-unweighted", [np.mean(worse[s]) for s in range(2)], worse)
    row = row_of(ledger_of(tmp_path), "CC12M: MDC above MDC without 1/t")
    assert row["errors of"] == "2 + 2 seeds, 300 images, paired"
    difference = np.mean([np.subtract(better[s], worse[s]) for s in range(2)], axis=0)
    low, high = (float(part) for part in row["95 %"].split(" to "))
    error = 100 * difference.std(ddof=1) / math.sqrt(300)  # of the images; that of the seeds is added
    assert high - low > 2 * 1.96 * error and row["here"] == f"{100 * difference.mean():+.1f}"


def test_two_scorers_of_one_model_are_compared_seed_by_seed_over_the_seeds_of_both(tmp_path):
    cells = {c.row: c for c in TABLES["table2"](scales.SCENES) if c.column == "swap_att"}
    for row, accuracies in (("MDC (heuristic)", [0.5, 0.7, 0.9, 0.1]), ("MDC (Monte Carlo)", [0.4, 0.61, 0.79])):
        cell = cells[row]
        for seed, accuracy in enumerate(accuracies):
            for selection in scales.SCENES.selection:
                write_result(tmp_path, commands.variant(cell.evaluation), cell.run.name(seed), selection.subsets[0],
                             commands.last_epoch(scales.SCENES, cell.run), text_acc=accuracy)
    row = row_of(ledger_of(tmp_path), "SugarCrepe: MDC (heuristic) above MDC (Monte Carlo)")
    assert (row["here"], row["errors of"]) == ("+10.0", "3 seeds of the same trainings, test images")


def test_the_judges_answers_are_its_items(tmp_path):
    folder = tmp_path / "results" / "judge"
    folder.mkdir(parents=True)
    for seed in range(2):
        chosen = [["ARC"]] * 60 + [["MDC-8"]] * 20 + [["ARC", "MDC-8"]] * 20
        order = sorted(range(100), key=lambda i: (i * 37 + seed) % 100)  # answers come in any order
        rows = [{"question": "?"}, {"id": "malformed", "chosen": []},
                *({"id": str(i), "chosen": chosen[i]} for i in order)]
        (folder / f"scenes--s{seed}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (folder / f"scenes--s{seed}.json").write_text(
            json.dumps({"selection_rate": {"ARC": 0.7, "MDC-8": 0.3}, "judged": 100}))
    row = row_of(ledger_of(tmp_path), "COCO, judge: ARC above MDC-10")
    # each image gives +1 (60 of them), -1 (20) or 0: mean 0.4, variance (80 - 100 * 0.16) / 99
    reach = 100 * stats.t.isf(0.025, 99) * math.sqrt((80 - 16) / 99 / 100)
    assert row["here"] == "+40.0" and row["95 %"] == f"{40 - reach:+.1f} to {40 + reach:+.1f}"
    assert row["errors of"] == "2 seeds of the same trainings, 100 images, paired"


def test_weights_of_items_are_those_of_the_metric(tmp_path):
    """A macro average: two relations of 1 and 3 cases count alike."""
    path = write_result(tmp_path, "image_caption_selection", "MDC-ViT-B-32--cc12m--s0", "aro/vg_relation", 32,
                        text_acc_macro=0.5, cases=4)
    (path.parent / "items").mkdir()
    (path.parent / "items" / path.name).write_text(json.dumps(
        {"images": ["a", "b", "b", "c"], "values": {"text_acc_macro": [1, 0, 0, 0]},
         "weights": {"text_acc_macro": [3, 1, 1, 1]}}))
    cell = next(c for c in TABLES["table2"](scales.PAPER) if c.row == "MDC (heuristic)" and "macro" in c.column)
    found = claims.of_results(read_results(tmp_path), scales.PAPER, (cell,))
    assert list(found.influence.values()) == pytest.approx([25, -100 / 6, -100 / 12])
    assert found.binomial is None


def test_a_mean_of_three_cells_has_a_third_of_the_errors_of_each(tmp_path):
    cells = tuple(c for c in TABLES["table2"](scales.SCENES) if c.row == "MDC (heuristic)")
    right = {cell.evaluation.datasets[0]: np.arange(40 * (i + 1)) % (i + 2) == 0 for i, cell in enumerate(cells)}
    for cell in cells:
        dataset, metric = cell.evaluation.datasets[0], cell.evaluation.metric
        found = right[dataset]
        path = write_result(tmp_path, commands.variant(cell.evaluation), cell.run.name(0), dataset,
                            commands.last_epoch(scales.SCENES, cell.run), **{metric: found.mean(), "cases": len(found)})
        (path.parent / "items").mkdir(exist_ok=True)
        (path.parent / "items" / path.name).write_text(json.dumps(
            {"images": [f"{dataset} {i}" for i in range(len(found))], "values": {metric: found.astype(int).tolist()}}))
    side_of = claims.of_results(read_results(tmp_path), scales.SCENES, cells)
    parts = [found.astype(float) for found in right.values()]
    assert len(parts) == 3 and side_of.numbers[0] == pytest.approx(100 * np.mean([part.mean() for part in parts]))
    influence = np.concatenate([100 / 3 * (part - part.mean()) / len(part) for part in parts])
    assert list(side_of.influence.values()) == pytest.approx(influence)
    shares = [((part.sum() + 1) / (len(part) + 2), len(part) + 2) for part in parts]
    assert side_of.binomial == pytest.approx(sum((100 / 3) ** 2 * p * (1 - p) / n for p, n in shares))


# ---- the ledger itself


def test_the_ledger_is_of_the_papers_claims():
    rows = claims.claims(scales.PAPER)
    assert 25 <= len(rows) <= 35 and len({claim.text for claim in rows}) == len(rows)
    assert {claim.where for claim in rows} == {*(f"Table {i}" for i in range(1, 6)), "Figure 4", "Figure 5",
                                               "Section 4.3"}
    for claim in rows:
        assert claim.left and claim.right, claim.text
        if claim.paper and claim.margin is None:
            assert claim.paper[0] > claim.paper[1], claim.text
        elif claim.paper:
            assert abs(claim.paper[0] - claim.paper[1]) < claim.margin, claim.text
        for cells, number in zip((claim.left, claim.right), claim.paper or (), strict=False):
            if all(cell.paper is not None for cell in cells):
                assert number == pytest.approx(np.mean([cell.paper for cell in cells]), abs=0.051), claim.text


@pytest.mark.parametrize("scale", scales.SCALES.values(), ids=lambda scale: scale.name)
def test_lengths_that_a_row_says_are_compared_are_those_of_its_cells(scale):
    for claim in claims.claims(scale) if scale.selection and not scale.tables else ():
        rows = " / ".join(cells[0].row.rpartition(", ")[2] for cells in (claim.left, claim.right) if cells)
        text, _, here = claim.sentence.partition("; here ")
        assert text == claim.text and here in ("", rows)
        if claim.left and claim.right:
            assert set(re.findall(r"MDC-\w+", here or text)) <= set(rows.split(" / ")), claim.sentence


def test_rows_of_other_lengths_are_named_in_ledger_and_summary(tmp_path):
    cells = {c.row: c for c in TABLES["table3"](scales.SCENES) if c.column == "CIDEr"}
    for row, score, step in (("scenes, MDC-8", 9.0, 1), ("scenes, MDC-10", 4.0, 2)):
        for seed in range(3):
            path = write_result(tmp_path, commands.variant(cells[row].evaluation), cells[row].run.name(seed),
                                "wds/captions", commands.last_epoch(scales.SCENES, cells[row].run), CIDEr=score)
            (path.parent / "items").mkdir(exist_ok=True)
            (path.parent / "items" / path.name).write_text(json.dumps(
                {"images": list(range(20)), "values": {"CIDEr": [score + step * i % 3 for i in range(20)]}}))
    text = "COCO, CIDEr: MDC-10 above MDC-20"
    page = ledger_of(tmp_path)
    assert f"| {text}; here MDC-8 / MDC-10 |" in page
    summary = claims.resolved(f"<!-- scenes claims -->\n{page}<!-- end -->")
    assert re.search(rf"\| {text} \| 64.7 / 24.1 \| \*shows\*, \+500.0 \(.*\), MDC-8 / MDC-10 \|", summary)


def means_of_page(text: str, scale: scales.Scale) -> dict[tuple[str, str], float]:
    """Mean by row and column of a scale's tables in RESULTS.md."""
    found = {}
    for table in re.findall(rf"<!-- {scale.name} \w+ -->\n(.*?)<!-- end -->", text, re.DOTALL):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
                if line.startswith("| ")]
        for row in rows[2:] if "\nSeeds: " in table else ():
            found |= {(row[0], column): float(number[1]) for column, cell in zip(rows[0][1:], row[1:], strict=True)
                      if (number := re.match(r"\W*(\d+\.\d)", cell))}
    return found


@pytest.mark.parametrize("scale", [scales.SCENES, scales.FLICKR8K])
def test_results_page_prints_the_ledger_of_its_own_tables_and_verdicts_of_its_own_p(scale):
    page = (REPO / "experiments" / "RESULTS.md").read_text(encoding="utf-8")
    means = means_of_page(page, scale)
    assert len(means) > 40
    printed = page.partition(f"<!-- {scale.name} claims -->\n")[2].partition("<!-- end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines()
            if line.startswith("| ")][2:]
    verdicts = []
    for claim, (where, text, _, here, _, p, _, verdict) in zip(claims.claims(scale), rows, strict=True):
        assert (where, text) == (claim.where, claim.sentence)
        left, right = ([means.get((cell.row, cell.column)) for cell in cells] for cells in (claim.left, claim.right))
        if not left or not right or None in (*left, *right):
            assert (here, verdict) == ("", "*not run*"), text
        else:
            assert float(here) == pytest.approx(np.mean(left) - np.mean(right), abs=0.11), text
        found = verdict in ("*shows*", "*contradicts*")
        assert found == (p == "< 0.001" or bool(p) and float(p) <= 0.05), text
        if found and "level" not in text:
            assert (float(here) > 0) == (verdict == "*shows*"), text
        verdicts.append(verdict.strip("*"))
    counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in ("shows", "contradicts", "not resolved", "not run"))
    assert f"\n{len(rows)} claims: {counts}.\n" in printed


def test_results_page_begins_with_the_claims_that_a_ledger_of_it_resolves():
    page = (REPO / "experiments" / "RESULTS.md").read_text(encoding="utf-8")
    text = page.partition("<!-- resolved -->\n")[2].partition("<!-- end -->")[0]
    assert text == claims.resolved(page)
    ledgers = [page.partition(f"<!-- {scale} claims -->")[2].partition("<!-- end -->")[0] for scale in
               ("rich", "scenes", "flickr8k")]
    assert sum(ledger.count("| *shows* |") + ledger.count("| *contradicts* |") for ledger in ledgers) == \
        text.count("*shows*") + text.count("*contradicts*") > 0


def test_the_sentence_on_two_views_and_its_control_are_about_cells_that_there_are():
    for claim in claims.claims_of(claims.SENTENCES["views"], scales.SCENES):
        assert len(claim.left) == len(claim.right) == 1 and claim.left != claim.right


@pytest.mark.parametrize("scale", [scales.SCENES, scales.FLICKR8K])
def test_the_articles_sentences_are_about_cells_that_there_are(scale):
    """On the scenes all of them; on photographs those that need no scenes."""
    rows = claims.claims_of(claims.SENTENCES["article"], scale)
    there = [claim for claim in rows if claim.left and claim.right]
    assert len(there) == len(rows) if scale is scales.SCENES else 10 < len(there) < len(rows)
    assert all(claim.left != claim.right for claim in there) and len({claim.text for claim in rows}) == len(rows)


def test_an_articles_claim_is_judged_by_its_images(tmp_path):
    """Two seeds of 60 images whose captions hallucinate less with CLIP: the ledger says shows, by paired images."""
    rng = np.random.default_rng(0)
    cells = {c.row: c for c in TABLES["table7"](scales.SCENES) if c.column == "hallucinating"}
    for row, rate in (("MDC, unguided", 0.8), ("MDC, CLIP 1", 0.1)):
        for seed in (0, 1):
            values = (rng.random(60) < rate).astype(float).tolist()
            path = write_result(tmp_path, commands.variant(cells[row].evaluation), cells[row].run.name(seed),
                                "wds/captions", commands.last_epoch(scales.SCENES, cells[row].run),
                                hallucinating_captions=float(np.mean(values)))
            (path.parent / "items").mkdir(exist_ok=True)
            (path.parent / "items" / path.name).write_text(json.dumps({
                "images": list(range(60)), "values": {"hallucinating_captions": values}, "weights": {}}))
    page = claims.ledger(claims.claims_of(claims.SENTENCES["article"], scales.SCENES), read_results(tmp_path),
                         scales.SCENES)
    (line,) = [line for line in page.splitlines() if "fewer hallucinations |" in line]
    assert "*shows*" in line and "60 images, paired" in line
