"""Claims about claims.py and sides.py: the verdicts that results give to the paper's claims."""
import csv
import json

import numpy as np
import pytest
from conftest import write_json
from helpers import write_items, write_result
from scipy import stats

from experiments.report import claims
from experiments.report.results import read_results
from experiments.report.sides import Measured
from experiments.tables import scales
from experiments.tables.paper_tables import TABLES

# ---- from files


def fill(folder, run: str, accuracies: list[float], items: dict[int, list[int]] | None = None) -> None:
    for seed, accuracy in enumerate(accuracies):
        path = write_result(folder, "linear_probe", f"{run}--s{seed}", "wds/probe", lp_acc1=accuracy)
        if items:
            write_items(path, list(range(len(items[seed]))), {"lp_acc1": items[seed]})


def row_of(rows: list[claims.Row], short: str) -> claims.Row:
    return next(row for row in rows if row.claim.id == short)


def judged(folder) -> list[claims.Row]:
    measured = Measured(read_results(folder), scales.SCENES)
    return claims.give_verdicts(claims.claims_of("claims", scales.SCENES), measured)


def test_a_ledger_from_results(tmp_path):
    fill(tmp_path, "MDC-ViT-Ti-8--short", [0.70, 0.71, 0.72])
    fill(tmp_path, "MDC-ViT-Ti-8-t0.0-1.0--short", [0.40, 0.42, 0.41])
    fill(tmp_path, "MDC-ViT-Ti-8-t0.3-0.8--short", [0.69])
    rows = judged(tmp_path)
    wide, narrow = row_of(rows, "t-wide"), row_of(rows, "t-middle")
    assert (wide.verdict, wide.finding.difference, wide.claim.paper) == ("shows", pytest.approx(30), "39.2 / 29.3")
    assert (narrow.verdict, narrow.finding.difference, narrow.finding.basis) == (
        "not resolved", pytest.approx(1.0), "1 seed, bound of the images' error alone")
    assert row_of(rows, "t-near").verdict == "not run"
    # by hand: differences 30, 29, 31; 1,600 test images, (0.71 * 1600 + 1) of 1602 and (0.41 * 1600 + 1) of 1602
    of_images = sum(1e4 * p * (1 - p) / 1602 for p in (1137 / 1602, 657 / 1602))
    reach = (stats.t.isf(0.025, 2) ** 2 / 3 + stats.norm.isf(0.025) ** 2 * of_images) ** 0.5
    assert wide.finding.interval == pytest.approx((30 - reach, 30 + reach))
    page = claims.ledger(rows, Measured(read_results(tmp_path), scales.SCENES))
    assert f"| +30.0 | {30 - reach:+.1f} to {30 + reach:+.1f} |" in page
    assert "\n20 claims: 1 shows, 0 contradicts, 0 within, 1 not resolved, 0 no verdict, 18 not run.\n" in page
    assert "| CC12M, ImageNet: MDC above ARC | 54.8 / 54.2 | ImageNet |  |\n" in page
    table = csv.DictReader([",".join(claims.COLUMNS), *claims.table(rows, scales.SCENES).splitlines()])
    row = next(row for row in table if row["id"] == "scenes.t-wide")
    assert (row["difference"], row["verdict"], row["command"]) == ("30", "shows", "make reproduce CLAIM=scenes.t-wide")


def test_a_row_at_the_floor_hides_behind_no_other_row(tmp_path):
    for run, accuracy in {"MDC-ViT-Ti-8--short": 0.9, "MDC-ViT-Ti-8--long": 0.9, "ARC-ViT-Ti-8--short": 0.9,
                          "ARC-ViT-Ti-8--long": 0.5, "MDC-ViT-Ti-8-untrained--short": 0.49}.items():
        fill(tmp_path, run, [accuracy] * 3)
    assert row_of(judged(tmp_path), "arc-loses").why.startswith("long captions, ViT-Ti-8, ARC (50.0) is not two")


def test_the_judges_answers_are_its_items(tmp_path):
    folder = tmp_path / "results/judge"
    folder.mkdir(parents=True)
    for seed in range(2):
        chosen = [["ARC"]] * 60 + [["MDC-8"]] * 20 + [["ARC", "MDC-8"]] * 20
        order = sorted(range(100), key=lambda i: (i * 37 + seed) % 100)  # answers come in any order
        rows = [{"question": "?"}, {"id": "malformed", "chosen": []},
                *({"id": str(i), "chosen": chosen[i]} for i in order)]
        (folder / f"scenes--s{seed}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        write_json(folder / f"scenes--s{seed}.json", {"selection_rate": {"ARC": 0.7, "MDC-8": 0.3}, "judged": 100})
    row = row_of(judged(tmp_path), "judge")
    # each image gives +1 (60 of them), -1 (20) or 0: mean 0.4, variance (80 - 100 * 0.16) / 99
    assert (row.verdict, row.why) == (claims.PAPER, "an LLM judge") and row.p is None
    assert row.finding.difference == pytest.approx(40)
    assert row.finding.error == pytest.approx(100 * ((80 - 16) / 99 / 100) ** 0.5)
    assert row.finding.basis == "2 seeds of the same trainings, 100 images"


# ---- the ledger itself


def test_weights_of_items_are_those_of_the_metric(tmp_path):
    """A macro average: two relations of 1 and 3 cases count alike."""
    path = write_result(tmp_path, "image_caption_selection", "MDC-ViT-B-32--cc12m--s0", "aro/vg_relation", 32,
                        text_acc_macro=0.5, cases=4)
    write_items(path, ["a", "b", "b", "c"], {"text_acc_macro": [1, 0, 0, 0]}, weights={"text_acc_macro": [3, 1, 1, 1]})
    cell = next(c for c in TABLES["table2"](scales.PAPER) if c.row == "MDC (heuristic)" and "macro" in c.column)
    found = Measured(read_results(tmp_path), scales.PAPER).side((cell,))
    assert list(found.items[0].values()) == pytest.approx([25, -100 / 6, -100 / 12])
    assert found.bound is None


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
            assert abs(numbers[0] - numbers[1]) < 2 if claim.level else numbers[0] > numbers[1], claim.text
        for cells, number in zip((claim.left, claim.right), numbers, strict=False):
            if all(cell.paper is not None for cell in cells):
                assert number == pytest.approx(np.mean([cell.paper for cell in cells]), abs=0.051), claim.text
