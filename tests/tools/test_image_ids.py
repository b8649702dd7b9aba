"""Claims about captions in one file of each format, and about COCO's image ids."""
import csv
import json
from pathlib import Path

import caption_files
import pyarrow.parquet as pq
import pytest
from caption_files import PATHS, column, lines, run, scene
from conftest import read_json, saved, write_tar

from open_clip_mdc.data.image_ids import check_image_ids, image_id

folder = pytest.fixture(caption_files.folder)


@pytest.mark.parametrize("alias, more", [("mdc", ()), ("arc", ("--length 5",))])
def test_every_kind_of_file_has_the_rows_of_the_json_lines(runs, folder, alias, more):
    command = ("--pretrained", runs / alias, *PATHS, *more)
    for suffix in ("jsonl", "csv", "parquet"):
        assert run(*command, "--out", f"c.{suffix}") is None
    expected = lines("c.jsonl")
    with open("c.csv", newline="") as file:
        rows = [{**row, "caption": row["caption"].removeprefix("'"), "tokens": json.loads(row["tokens"])}
                for row in csv.DictReader(file)]  # an apostrophe stands before what a spreadsheet would compute
    assert rows == expected and len(rows) == 7
    table = pq.read_table("c.parquet")
    assert table.column_names == ["image", "caption", "tokens"] == list(expected[0])
    for row, line in zip(table.to_pylist(), expected, strict=True):
        assert (row["image"], row["caption"]) == (line["image"], line["caption"])
        for token, other in zip(row["tokens"], line["tokens"], strict=True):
            assert token == {**other, "log_prob": pytest.approx(other["log_prob"], abs=1e-5)}


def test_cocos_results_have_the_numbers_of_files_and_of_shards(runs, here):
    Path("in").mkdir()
    for number, name in enumerate(("COCO_val2014_000000391895", "000000000042", "holiday", "x")):
        scene(number).save(f"in/{name}.png")
    Path("in/holiday.json").write_text('{"image_id": 7, "caption": "mine"}')
    Path("in/x.JSON").write_text('{"image_id": "8"}')
    write_tar(here / "s.tar", {
        "000000000.png": saved(scene(4)), "000000000.json": b'{"filename": "COCO_val2014_000000000009.jpg"}',
        "000000001.png": saved(scene(5)), "000000001.json": b'{"image_id": 11, "filename": "3.jpg"}',
        "000000012.png": saved(scene(6))})
    assert run("--pretrained", runs / "mdc", "in", "s.tar", "--out r.json --length 4") is None
    assert run("--pretrained", runs / "mdc", "in", "s.tar", "--out r.jsonl --length 4") is None
    results = read_json("r.json")
    assert [row["image_id"] for row in results] == [42, 391895, 7, 8, 9, 11, 12]
    assert [row["caption"] for row in results] == column("caption", "r.jsonl")
    assert {tuple(row) for row in results} == {("image_id", "caption")}


def test_a_name_and_a_json_as_the_message_wants_them_have_a_number():
    with pytest.raises(ValueError, match="no image_id .* after a sign, as in val_0001.jpg") as found:
        check_image_ids([("val0000007.png", None)])
    wanted = json.loads(str(found.value).partition("beside it, ")[2].partition(", or")[0])
    assert image_id({}, "val_0001.jpg") == image_id(wanted, "val0000007.png") == 1


@pytest.mark.parametrize("metadata, name, number", [
    ({}, "COCO_train2014_000000057870.jpg", 57870), ({}, "000000391895.jpg", 391895), ({}, "img-3.v2.png", None),
    ({}, "s0000001.jpg", None), ({}, "val_0000007.png", 7), ({}, "photo 12.jpg", 12), ({"image_id": 0}, "9.jpg", 0),
    ({"image_id": True}, "9.jpg", 9),
    ({"image_id": -1, "filename": "val2014/COCO_val2014_7.jpg"}, "9.jpg", 7), ({"filename": None}, "9.jpg", 9)])
def test_the_number_of_an_image(metadata, name, number):
    assert image_id(metadata, name) == number
