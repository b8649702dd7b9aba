"""Claims about learning curves and the rich scales.    pytest tests/experiments/test_curves.py"""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO
from helpers import place, write_result

from experiments.report import collect
from experiments.tables import curves
from experiments.tables.scales import RICH
from open_clip_mdc import cli

TINY = """
import sys
sys.path.insert(0, {experiments!r})
from experiments import run
from experiments.tables import curves, scales
curves.OBJECTIVES = {{"MDC": "MDC-"}}
data = {{"short": scales.RICH.data["short"]._replace(folder="{{data}}/train", samples=64)}}
selection = tuple(s._replace(root="{{data}}/sugarcrepe") for s in scales.RICH.selection[:1])
scales.SCALES["rich"] = scales.RICH._replace(
    data=data, batch=32, epochs=2, curve=(1, 2), probes=dict(list(scales.RICH.probes.items())[:2]), selection=selection,
    probe_root="{{data}}/{{{{dataset_cleaned}}}}", prepare=(), captioning=(
        scales.RICH.captioning[0]._replace(root="{{data}}/captions"),))
run.main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def rich(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("data") / "rich"
    cli.main(["scenes", "--out", str(out), "--world", "rich", "--num-train", "64", "--num-val", "8", "--num-probe",
              "64", "--num-pairs", "8"])
    cli.main(["prepare", "shards", "--captions-key", "captions", "--test", str(out / "val" / "00000.tar"), "--out",
              str(out / "captions")])
    return out


def test_an_objective_goes_from_nothing_to_its_curve(rich, tmp_path):
    command = [sys.executable, "-c", TINY.format(experiments=str(REPO)), "--scale", "rich", "--tables",
               "curves", "--data", str(rich), "--out", str(tmp_path), "--seeds", "0", "--jobs", "1", "--bin",
               f"{Path(sys.executable).parent}/"]
    without_java = {**os.environ, "PATH": str(Path(sys.executable).parent)}  # METEOR is in no curve, and takes its time
    result = subprocess.run(command, capture_output=True, text=True, timeout=3600, env=without_java)
    assert result.returncode == 0, result.stderr[-3000:]
    cells = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in result.stdout.splitlines()
             if line.startswith("| MDC, ")}
    assert list(cells) == ["MDC, 1/2", "MDC, 1"]
    for colour, shape, average, swapped, cider, exact in (
            [float(c.strip(" *")) for c in columns] for columns in cells.values()):
        assert average == pytest.approx((colour + shape) / 2, abs=0.11) and 0 < average <= 100
        assert 0 <= swapped <= 100 and cider >= 0 and exact >= 0
    assert "A whole run: 128 images, 4 steps of 32." in result.stdout and "| MDC |" in result.stdout
    assert (tmp_path / "tables" / "curves.png").exists()
    saved = (tmp_path / "runs" / "MDC-ViT-Ti-8-rich--short--s0" / "checkpoints").glob("epoch_?.pt")
    assert len(list(saved)) == 2
    measured = [json.loads(path.read_text()) for path in (tmp_path / "results").glob("linear_probe/*.json")]
    assert {Path(found["pretrained"]).name for found in measured} == {"epoch_1.pt", "epoch_2.pt"}
    assert {found["dataset"] for found in measured} == {"wds/probe-colour", "wds/probe-shape"} and len(measured) == 4


def test_images_until_swapped_attributes_are_told_apart_by_hand(tmp_path):
    never = [0.5] * 8
    accuracies = {"MDC": ([0.5, 0.5, 0.6, 0.85, 0.92, 0.89, 0.95, 0.96], [0.5, 0.5, 0.9], [0.5, 0.92, 0.2, 0.1]),
                  "ARC": ([0.5, 0.91], [0.2, 0.93]), "CLIP": (never, never), "CapPa": (never, [0.5] * 7 + [0.9])}
    for objective, by_seed in accuracies.items():
        for seed, values in enumerate(by_seed):
            for epoch, value in enumerate(values, 1):
                run = f"{curves.OBJECTIVES[objective]}ViT-Ti-8-rich--short--s{seed}"
                write_result(tmp_path, "image_caption_selection", run, "sugar_crepe/swap_att", epoch, text_acc=value)
    write_result(tmp_path, "image_caption_selection", "ARC-ViT-Ti-8-rich--short--s7", "sugar_crepe/swap_att", 8,
                 text_acc=1.0)  # Table 2's alone: when it got there is not known
    page = collect.collect(RICH, place(tmp_path), ["curves"])["curves"]
    assert "| MDC, 5/8 | **92.0** |" in page and "| ARC, 1/4 | **92.0 ± 1.4** |" in page
    for line in ("| ARC | 40,000 |", "| MDC | 40,000 to 100,000 |", "| CLIP | > 160,000 |",
                 "| CapPa | 160,000 to > 160,000 |"):
        assert line in page, page
    assert "| MCD |" not in page and "160,000 images, 5,000 steps of 32" in page
