"""Claims about learning curves and the rich scales.    pytest tests/experiments/test_curves.py"""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO

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
