"""Claims about reproduce.py: it runs the rows of one claim, no others, and compares them with the archive."""
import csv

from conftest import REPO, read_json, write_json
from helpers import flags_of, place

from experiments import commands, reproduce
from experiments.report import archive
from experiments.tables.cells import Run

RESULTS = REPO / "experiments/results"


def trained(capsys, claim: str, *flags: str) -> list[str]:
    reproduce.main([claim, "--dry-run", *flags])
    commands_of = [line.split() for line in capsys.readouterr().out.splitlines() if "open_clip_train" in line]
    return [flags_of(command)["--name"] for command in commands_of]


def test_its_commands_are_the_trainings_of_its_rows_with_the_archived_seeds(capsys, tmp_path):
    out = "--out", str(tmp_path)
    assert trained(capsys, "scenes.bert15", *out) == [f"{model}--short--s{seed}" for seed in range(11) for model in (
        "MDC-ViT-Ti-8", "BERT-ViT-Ti-8-r15")]
    quarter = trained(capsys, "rich.early", *out, "--seeds", "3")
    assert sorted(quarter) == ["ARC-ViT-Ti-8-rich--short--s3", "MDC-ViT-Ti-8-rich--short--s3"]
    assert trained(capsys, "contexts.own-mdc", *out) == [f"MDC-ViT-Ti-8--r90--s{seed}" for seed in range(3)]
    assert not list(tmp_path.iterdir())


def test_results_and_differences_of_both_are_compared(tmp_path):
    """A machine that gives the archived results again, then one that gives another one."""
    task, out = reproduce.find("scenes.bert15"), tmp_path / "out"
    asked = []

    def run(title: str, steps: list) -> None:
        asked.extend(step.label for step in steps if title == "training")
        if title == "evaluation" and not (out / "results").exists():
            archive.unpack(RESULTS / "scenes.tar.xz", out)
    said = reproduce.reproduce(task, place(out), [0, 1, 2], run).splitlines()
    assert len(asked) == 6 and said[0].startswith("519 of 519 results in both are equal to the digit")
    assert said[1].replace("archived on", "now on") == said[2] and "AMD EPYC (AVX2), 1 thread" in said[2]
    assert said[3] == ("CC12M: MDC above BERT 15 %: archived +4.5208 (+1.2 to +7.9), now +4.5208 (+1.2 to +7.9)")
    name = commands.checkpoint(task.scale, Run("BERT-ViT-Ti-8-r15", "short"), 1, place(out)).parts[-3]
    (path,) = out.glob(f"results/linear_probe/*{name}_*.json")
    result = read_json(path)
    result["metrics"]["lp_acc1"] += 0.03
    write_json(path, result)
    said = reproduce.reproduce(task, place(out), [0, 1, 2], run).splitlines()
    assert said[0].startswith(f"linear_probe wds/probe {name.rpartition('--s')[0]}/epoch_1 1: lp_acc1")
    assert "archived +4.5208 (+1.2 to +7.9), now +3.5208 (" in said[-1]


def test_a_claim_on_ratios_is_compared_as_its_page_gives_it(tmp_path):
    task, out = reproduce.find("contexts.own-arc"), tmp_path / "out"

    def run(title: str, steps: list) -> None:
        if not out.exists():
            archive.unpack(task.file, out)
    said = reproduce.reproduce(task, place(out), None, run)
    (row,) = (row for row in csv.DictReader((RESULTS / "claims.csv").open()) if row["id"] == "contexts.own-arc")
    shown = f"{float(row['difference']):+.3f}"
    assert f"archived {shown}" in said and f", now {shown}" in said and said.count("(+0.7 to +0.8)") == 2
