"""Claims about notebooks/tour.ipynb: it was executed, and its code runs."""
import json

import matplotlib
from conftest import REPO, read_json
from documents import alike

CELLS = read_json(REPO / "notebooks/tour.ipynb")["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


def test_the_notebook_holds_the_outputs_of_one_run_from_top_to_bottom():
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    kinds = {output["output_type"] for cell in CODE for output in cell["outputs"]}
    assert kinds == {"stream", "display_data"}  # no error, no leftover
    assert len(json.dumps(CELLS)) < 200_000


def test_its_code_prints_what_it_shows(capsys):
    matplotlib.use("Agg")
    names = {}
    for cell in CODE:
        exec("".join(cell["source"]), names)
        shown = "".join(line for output in cell["outputs"] for line in output.get("text", ()))
        assert alike(capsys.readouterr().out, shown)
    assert len(names["plt"].get_fignums()) == 2
    names["plt"].close("all")
