"""Claims about notebooks/tour.ipynb: it was executed, and its code runs.    pytest tests/tools/test_notebook.py"""
import json

import matplotlib
import pytest
from conftest import REPO, run_folder

from open_clip_mdc import cli

CELLS = json.loads((REPO / "notebooks" / "tour.ipynb").read_text())["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


def test_the_notebook_holds_the_outputs_of_one_run_from_top_to_bottom():
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    kinds = {output["output_type"] for cell in CODE for output in cell["outputs"]}
    assert kinds == {"stream", "display_data"}  # no error, no leftover
    assert len(json.dumps(CELLS)) < 200_000


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    counts = ["--num-train", "8", "--num-val", "4", "--num-probe", "16", "--num-pairs", "1"]
    cli.main(["scenes", "--out", str(tmp_path / "scenes"), *counts])
    monkeypatch.setenv("RUN", str(run_folder(tmp_path / "run", "MDC-ViT-Ti-8")))
    monkeypatch.setenv("IMAGES", str(tmp_path / "scenes" / "val" / "00000.tar"))
    monkeypatch.chdir(tmp_path)


def test_its_code_runs_with_any_model(tiny, capsys):
    matplotlib.use("Agg")
    capsys.readouterr()
    names = {}
    for cell in CODE:
        exec("".join(cell["source"]), names)
    printed = capsys.readouterr().out.split("\n")[:-1]
    filled, scores, steps = printed[:4], printed[4:6], printed[6:]
    assert all(line.startswith("a") and "left of a" in line for line in filled)
    assert [line.split(maxsplit=1)[1] for line in scores] == names["texts"]
    assert len(steps) == len(names["tokens"]) + 1
    assert names["weights"].shape == (len(names["tokens"]), 4, 4)
    assert len(names["captions"]) == 4 and names["plt"].get_fignums()
    names["plt"].close("all")
