"""Claims about tables in a spreadsheet: no cell is a formula."""
import os

import pandas as pd
import pytest
from conftest import json_lines

from open_clip_mdc.cli.rows import write_rows

NAMES = ["=cmd|calc'!A1.png", "@SUM(1+1).png", "+1.png", "-1.png", "\t=1.png", "\r=1.png", "\uff1d1.png", "a=1.png",
         "folder/=1.png", "/tmp/=1.png"]
FIRST = set("=+-@\t\r\uff1d\uff0b\uff0d\uff20")  # of what Excel, LibreOffice or their Japanese editions calculate


@pytest.mark.parametrize("column", ["image", "caption", "sentence"])
def test_no_cell_of_a_table_is_a_formula_and_each_image_keeps_its_file(column, tmp_path):
    rows = [{column: name, "score": -1.5, "tokens": [{"token": "=1"}]} for name in NAMES]
    write_rows(tmp_path / "x.csv", list(rows[0]), rows)
    read = pd.read_csv(tmp_path / "x.csv", dtype={column: str})
    assert FIRST.isdisjoint(cell[0] for cell in (*read[column], *read["tokens"])) and (read["score"] == -1.5).all()
    for name, cell in zip(NAMES, read[column], strict=True):
        assert (os.path.normpath(cell) if column == "image" else cell.removeprefix("'")) == name
        assert (cell == name) == (name[0] not in FIRST)
    write_rows(tmp_path / "x.jsonl", list(rows[0]), rows)
    assert [row[column] for row in json_lines(tmp_path / "x.jsonl")] == NAMES
