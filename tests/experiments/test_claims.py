"""Claims about claims.py and sides.py: the verdicts that results give to the paper's claims."""
import csv
import json
import math
import re

import numpy as np
import pytest
from helpers import write_result
from scipy import stats

from experiments import commands
from experiments.report import claims
from experiments.report.results import read_results
from experiments.report.sides import Measured
from experiments.tables import scales
from experiments.tables.cells import floors
from experiments.tables.paper_tables import TABLES

# ---- from files


def fill(folder, model: str, accuracies: list[float], items: dict[int, list[int]] | None = None) -> None:
    for seed, accuracy in enumerate(accuracies):
        path = write_result(folder, "linear_probe", f"{model}--short--s{seed}", "wds/probe", lp_acc1=accuracy)
        if items:
            (path.parent / "items").mkdir(exist_ok=True)
            (path.parent / "items" / path.name).write_text(json.dumps(
                {"images": list(range(len(items[seed]))), "values": {"lp_acc1": items[seed]}}))


def row_of(rows: list[claims.Row], short: str) -> claims.Row:
    return next(row for row in rows if row.claim.id == short)


def judged(folder, scale=scales.SCENES, ledger: str = "claims") -> list[claims.Row]:
    return claims.give_verdicts(claims.claims_of(ledger, scale), read_results(folder), scale)


def test_a_ledger_from_results(tmp_path):
    fill(tmp_path, "MDC-ViT-Ti-8", [0.70, 0.71, 0.72])
    fill(tmp_path, "MDC-ViT-Ti-8-t0.0-1.0", [0.40, 0.42, 0.41])
    fill(tmp_path, "MDC-ViT-Ti-8-t0.3-0.8", [0.69])
    rows = judged(tmp_path)
    wide, narrow = row_of(rows, "t-wide"), row_of(rows, "t-middle")
    assert (wide.verdict, wide.finding.difference, wide.claim.paper) == ("shows", pytest.approx(30), "39.2 / 29.3")
    assert (narrow.verdict, narrow.finding.difference, narrow.finding.basis) == (
        "not resolved", pytest.approx(1.0), "1 seed")
    assert row_of(rows, "t-near").verdict == "not run"
    # by hand: differences 30, 29, 31; 1,600 test images, (0.71 * 1600 + 1) of 1602 and (0.41 * 1600 + 1) of 1602
    of_images = sum(1e4 * p * (1 - p) / 1602 for p in (1137 / 1602, 657 / 1602))
    reach = math.sqrt(stats.t.isf(0.025, 2) ** 2 / 3 + stats.norm.isf(0.025) ** 2 * of_images)
    assert wide.finding.interval == pytest.approx((30 - reach, 30 + reach))
    page = claims.ledger(rows, read_results(tmp_path), scales.SCENES)
    assert f"| +30.0 | {30 - reach:+.1f} to {30 + reach:+.1f} |" in page
    assert "\n18 claims: 1 shows, 0 contradicts, 0 within, 1 not resolved, 0 no verdict, 16 not run.\n" in page
    assert "| CC12M, ImageNet: MDC above ARC | 54.8 / 54.2 | ImageNet |  |\n" in page
    table = list(csv.DictReader([",".join(claims.COLUMNS), *claims.table(rows, scales.SCENES).splitlines()]))
    row = next(row for row in table if row["id"] == "scenes.t-wide")
    assert (row["difference"], row["verdict"], row["command"]) == (
        "30", "shows", "make reproduce CLAIM=scenes.t-wide")


def test_rows_of_a_family_share_their_standard_deviation(tmp_path):
    """Seeds move five captioners alike. Their deviation is pooled without that common part. CLIP is another family."""
    numbers = {"MDC-ViT-Ti-8": [70, 72, 71], "MDC-ViT-Ti-8-t0.0-1.0": [60, 62.5, 61], "ARC-ViT-Ti-8": [65, 67, 65.5],
               "BERT-ViT-Ti-8-r15": [50, 51.5, 51], "BERT-ViT-Ti-8-r75": [70.5, 72, 71], "ViT-Ti-8": [10, 90, 50]}
    for model, accuracies in numbers.items():
        fill(tmp_path, model, [accuracy / 100 for accuracy in accuracies])
    rows = judged(tmp_path)
    assert row_of(rows, "t-wide").finding.basis == "3 seeds, sd of 5 rows, bound of the images' error"
    table = np.array([row for model, row in numbers.items() if model != "ViT-Ti-8"])
    rest = table - table.mean(1, keepdims=True) - table.mean(0) + table.mean()
    (pooled, _) = Measured(read_results(tmp_path), scales.SCENES, (
        cell for of_scale in TABLES.values() for cell in of_scale(scales.SCENES))).side(
        row_of(rows, "arc").claim.left).pools
    assert pooled.variance == pytest.approx((rest ** 2).sum() / 8) and pooled.freedom == 8
    assert f"| {math.sqrt(pooled.variance):.2f} | 5 | 8 | seed by seed | {pooled.p:.3f} |" in claims.ledger(
        rows, read_results(tmp_path), scales.SCENES)
    assert row_of(rows, "clip-short").finding.basis.startswith("3 seeds, bound")


def test_results_of_single_images_are_paired(tmp_path):
    rng = np.random.default_rng(5)
    better = {s: (rng.random(300) < 0.8).astype(int).tolist() for s in range(2)}
    worse = {s: [value if i % 10 else 0 for i, value in enumerate(values)] for s, values in better.items()}
    fill(tmp_path, "MDC-ViT-Ti-8", [np.mean(better[s]) for s in range(2)], better)
    fill(tmp_path, "MDC-ViT-Ti-8-unweighted", [np.mean(worse[s]) for s in range(2)], worse)
    finding = row_of(judged(tmp_path), "weight-short").finding
    assert finding.basis == "2 seeds, 300 images"
    both = np.array([np.subtract(better[s], worse[s]) for s in range(2)])
    images = both.mean(0).var(ddof=1) / 300
    residual = ((both - both.mean(0) - both.mean(1, keepdims=True) + both.mean()) ** 2).sum() / 299 / 300 / 2
    seeds = both.mean(1).var(ddof=1) / 2
    assert finding.error == pytest.approx(100 * math.sqrt(seeds + max(images - residual, 0)))


def test_two_scorers_of_one_model_are_compared_seed_by_seed_over_the_seeds_of_both(tmp_path):
    cells = {c.row: c for c in TABLES["table2"](scales.SCENES) if c.column == "swap_att" and "debiased" in c.row}
    for row, accuracies in (("MDC (heuristic), debiased", [0.5, 0.7, 0.9, 0.1]),
                            ("MDC (Monte Carlo), debiased", [0.4, 0.61, 0.79])):
        cell = cells[row]
        for seed, accuracy in enumerate(accuracies):
            for selection in scales.SCENES.selection:
                write_result(tmp_path, commands.variant(cell.evaluation), cell.run.name(seed), selection.subsets[0],
                             commands.last_epoch(scales.SCENES, cell.run), text_acc_debiased=accuracy)
    finding = row_of(judged(tmp_path), "pairs-mc").finding
    assert finding.difference == pytest.approx(10)
    assert finding.basis == "3 seeds of the same trainings, bound of the images' error"


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
    row = row_of(judged(tmp_path), "judge")
    # each image gives +1 (60 of them), -1 (20) or 0: mean 0.4, variance (80 - 100 * 0.16) / 99
    assert (row.verdict, row.why) == (claims.PAPER, "an LLM judge") and row.p is None
    assert row.finding.difference == pytest.approx(40)
    assert row.finding.error == pytest.approx(100 * math.sqrt((80 - 16) / 99 / 100))
    assert row.finding.basis == "2 seeds of the same trainings, 100 images"


def test_weights_of_items_are_those_of_the_metric(tmp_path):
    """A macro average: two relations of 1 and 3 cases count alike."""
    path = write_result(tmp_path, "image_caption_selection", "MDC-ViT-B-32--cc12m--s0", "aro/vg_relation", 32,
                        text_acc_macro=0.5, cases=4)
    (path.parent / "items").mkdir()
    (path.parent / "items" / path.name).write_text(json.dumps(
        {"images": ["a", "b", "b", "c"], "values": {"text_acc_macro": [1, 0, 0, 0]},
         "weights": {"text_acc_macro": [3, 1, 1, 1]}}))
    cell = next(c for c in TABLES["table2"](scales.PAPER) if c.row == "MDC (heuristic)" and "macro" in c.column)
    found = Measured(read_results(tmp_path), scales.PAPER).side((cell,))
    assert list(found.items[0].values()) == pytest.approx([25, -100 / 6, -100 / 12])
    assert found.bound is None


def test_a_seed_has_items_if_all_its_cells_kept_them(tmp_path):
    fill(tmp_path, "MDC-ViT-Ti-8", [0.5, 0.5, 0.5], [[0, 1]] * 3)
    kept = sorted(tmp_path.glob("results/*/items/*--s*"))
    kept[1].unlink()
    cell = next(c for c in TABLES["table4"](scales.SCENES) if c.run.name(0) == "MDC-ViT-Ti-8--short--s0")
    found = Measured(read_results(tmp_path), scales.SCENES).side((cell, cell))
    assert sorted(found.numbers) == [0, 1, 2] and sorted(found.items) == [0, 2]
    assert list(found.items[0].values()) == [-25, 25]


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
    side_of = Measured(read_results(tmp_path), scales.SCENES).side(cells)
    parts = [found.astype(float) for found in right.values()]
    assert len(parts) == 3 and side_of.numbers[0] == pytest.approx(100 * np.mean([part.mean() for part in parts]))
    influence = np.concatenate([100 / 3 * (part - part.mean()) / len(part) for part in parts])
    assert list(side_of.items[0].values()) == pytest.approx(influence)
    shares = [((part.sum() + 1) / (len(part) + 2), len(part) + 2) for part in parts]
    assert side_of.bound == pytest.approx(sum((100 / 3) ** 2 * p * (1 - p) / n for p, n in shares))


# ---- what has no verdict


def test_a_probe_that_is_not_above_pixels_or_the_untrained_network_has_no_verdict(tmp_path):
    fill(tmp_path, "MDC-ViT-Ti-8", [0.70, 0.71, 0.72])
    fill(tmp_path, "MDC-ViT-Ti-8-t0.0-1.0", [0.45, 0.46, 0.44])
    fill(tmp_path, "MDC-ViT-Ti-8-t0.3-0.8", [0.60, 0.61, 0.59])
    assert row_of(judged(tmp_path), "t-wide").verdict == "shows"
    for (run, flags), accuracy in zip(floors(scales.SCENES).values(), (0.44, 0.30), strict=True):
        for seed in range(3):
            write_result(tmp_path, "linear_probe" + "-feature-pixels" * bool(flags), run.name(seed), "wds/probe",
                         lp_acc1=accuracy + 0.001 * seed)
    wide, middle = (row_of(judged(tmp_path), short) for short in ("t-wide", "t-middle"))
    assert (wide.verdict, wide.p) == ("no verdict", None) and middle.verdict == "shows"
    assert wide.why == "[0.0, 1.0] (45.0) is not two standard errors above pixels (44.1)"
    page = claims.ledger(judged(tmp_path), read_results(tmp_path), scales.SCENES)
    assert "*no verdict*: [0.0, 1.0] (45.0) is not" in page


def pairs(folder, scale, accuracies: dict[str, tuple[float, float, float]], at: int | None = None) -> None:
    """Write pairs of two captioners: with the image, without it, and debiased."""
    cells = {c.row: c for c in TABLES["table2"](scale)}
    for row, (plain, blind, debiased) in accuracies.items():
        for seed in range(3):
            for selection in scale.selection:
                extra = 0.001 * seed * (row == "ARC")
                write_result(folder, commands.variant(cells[row].evaluation), cells[row].run.name(seed),
                             selection.subsets[0], at or commands.last_epoch(scale, cells[row].run), text_acc=plain,
                             text_acc_blind=blind, text_acc_debiased=debiased - extra, cases=400)


def test_pairs_told_apart_without_the_image_have_no_verdict_and_others_are_judged_debiased(tmp_path):
    blind, seeing = tmp_path / "blind", tmp_path / "seeing"
    pairs(blind, scales.FLICKR8K, {"ARC": (0.90, 0.85, 0.50), "MDC (heuristic)": (0.80, 0.50, 0.70)})
    row = row_of(judged(blind, scales.FLICKR8K), "pairs-arc")
    assert (row.verdict, row.why) == (
        "no verdict", "the image adds +5.0 points to the accuracy of ARC")
    pairs(seeing, scales.FLICKR8K, {"ARC": (0.90, 0.75, 0.50), "MDC (heuristic)": (0.80, 0.50, 0.70)})
    row = row_of(judged(seeing, scales.FLICKR8K), "pairs-arc")
    assert row.finding.difference == pytest.approx(20.1) and row.verdict == "shows", "not -10"


def test_saturated_pairs_are_judged_at_the_quarter_of_a_run_whose_checkpoints_are_kept(tmp_path):
    full = {"ARC": (1.0, 0.5, 1.0), "MDC (heuristic)": (1.0, 0.5, 0.999)}
    pairs(tmp_path / "scenes", scales.SCENES, full)
    assert row_of(judged(tmp_path / "scenes"), "pairs-arc").why == "saturated"
    pairs(tmp_path / "rich", scales.RICH, full)
    assert row_of(judged(tmp_path / "rich", scales.RICH), "pairs-arc").why == "saturated"
    pairs(tmp_path / "rich", scales.RICH, {"ARC": (0.97, 0.5, 0.95), "MDC (heuristic)": (0.7, 0.5, 0.6)}, at=2)
    row = row_of(judged(tmp_path / "rich", scales.RICH), "pairs-arc")
    assert row.claim.text.endswith(", at 2/8 of the run") and row.verdict == "contradicts"
    assert row.finding.difference == pytest.approx(-34.9)


def test_a_seed_beyond_the_scales_own_is_a_second_look(tmp_path):
    fill(tmp_path, "MDC-ViT-Ti-8", [0.70, 0.71, 0.72, 0.70])
    fill(tmp_path, "MDC-ViT-Ti-8-t0.0-1.0", [0.40, 0.42, 0.41, 0.44])
    fill(tmp_path, "MDC-ViT-Ti-8-t0.3-0.8", [0.60, 0.62, 0.61])
    rows = judged(tmp_path)
    assert row_of(rows, "t-wide").finding.basis.endswith(", 2 looks")
    assert "looks" not in row_of(rows, "t-middle").finding.basis


# ---- the ledger itself


def test_the_ledger_is_of_the_papers_claims():
    rows = claims.claims_of("claims", scales.PAPER)
    assert 25 <= len(rows) <= 35
    assert len({claim.text for claim in rows}) == len({claim.id for claim in rows}) == len(rows)
    assert {claim.where for claim in rows} == {*(f"Table {i}" for i in range(1, 6)), "Figure 4", "Figure 5",
                                               "Section 4.3"}
    for claim in rows:
        assert claim.left and claim.right and not claim.needs, claim.text
        numbers = [float(number) for number in claim.paper.split(" / ")] if claim.paper else []
        if numbers:
            assert abs(numbers[0] - numbers[1]) < 1 if claim.level else numbers[0] > numbers[1], claim.text
        for cells, number in zip((claim.left, claim.right), numbers, strict=False):
            if all(cell.paper is not None for cell in cells):
                assert number == pytest.approx(np.mean([cell.paper for cell in cells]), abs=0.051), claim.text


@pytest.mark.parametrize("scale, margins", [
    (scales.RICH, (2, 20)), (scales.SCENES, (3, 20)), (scales.FLICKR8K, (1, 1))])
def test_margins_are_those_of_the_scale_and_what_no_small_scale_carries_is_no_row(scale, margins):
    rows = claims.claims_of("claims", scale)
    of = {claim.id: claim for claim in rows}
    assert (claims.margin_of(of["arc"], scale), claims.margin_of(of["cider-arc"], scale)) == margins
    assert claims.margin_of(of["stable"], scale) is None
    assert {claim.needs for claim in rows if claim.id.startswith(("clip", "pairs-clip"))} == {
        "a network of that size", "batches of 1,024, as CLIP has 31 or 63 negatives here"}
    assert {"imagenet", "judge", "aro-arc", "cider-flickr30k"} <= {claim.id for claim in rows if claim.needs}


@pytest.mark.parametrize("scale", scales.SCALES.values(), ids=lambda scale: scale.name)
def test_lengths_that_a_row_says_are_compared_are_those_of_its_cells(scale):
    for claim in claims.claims_of("claims", scale) if scale.selection and not scale.tables else ():
        rows = " / ".join(cells[0].row.rpartition(", ")[2] for cells in (claim.left, claim.right) if cells)
        text, _, here = claim.sentence.partition(", here ")
        assert text == claim.text and here in ("", rows)
        if claim.left and claim.right:
            assert set(re.findall(r"MDC-\w+", here or text)) <= set(rows.split(" / ")), claim.sentence


@pytest.mark.parametrize("scale", [scales.SCENES, scales.FLICKR8K])
def test_the_articles_sentences_are_about_cells_that_there_are(scale):
    """On scenes all claims have cells, on photographs those that need no scenes."""
    rows = claims.claims_of("article", scale)
    there = [claim for claim in rows if claim.left and claim.right]
    assert len(there) == len(rows) if scale is scales.SCENES else 10 < len(there) < len(rows)
    assert all(claim.left != claim.right for claim in there) and len({claim.text for claim in rows}) == len(rows)
