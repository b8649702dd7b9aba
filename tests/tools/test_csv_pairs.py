"""Claims about tables of captions, as common programs write them."""
from pathlib import Path

import pandas as pd
import pytest
from open_clip_train.data import CsvDataset

from open_clip_mdc.data.csv_pairs import read_csv, read_part, read_table, split_csv
from open_clip_mdc.integration.csv_images import CsvImages

ROWS = [("a.jpg", "a red circle"), ("b.jpg", 'a "stop" sign, 12" wide'), ("c.jpg", "None"), ("d.jpg", "N/A"),
        ("e.jpg", "null"), ("f.jpg", "nan"), ("g.jpg", "café ☕"), ("a.jpg", "007")]


def for_training(path) -> list[tuple[str, str]]:
    dataset = CsvImages(str(path), None, img_key="filepath", caption_key="title", sep="\t")
    return list(zip(dataset.images, dataset.captions, strict=True))


def for_tools(path) -> list[tuple[str, str]]:
    return [(row.image, row.caption) for part in split_csv(path, 3) for row in read_part(part)]


# Tables of ROWS as common programs write them, with the columns image and caption or OpenCLIP's.
TABLES = sorted((Path(__file__).parent / "fixtures/tables").iterdir())


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)
def test_training_and_tools_read_the_very_rows_that_a_program_wrote(path):
    assert for_training(path) == for_tools(path) == ROWS
    assert [name for part in split_csv(path) for name, *_ in read_csv(part)][-1] == "a.jpg#7"


def test_a_well_formed_table_has_the_rows_that_openclip_reads(tmp_path):
    rows = [(f"{i}.jpg", f'the "{i}" of\n{i} things\t' * (1 + i % 3)) for i in range(30)]
    pd.DataFrame(rows, columns=["filepath", "title"]).to_csv(tmp_path / "t.tsv", sep="\t", index=False)
    upstream = CsvDataset(str(tmp_path / "t.tsv"), None, "filepath", "title")
    assert for_training(tmp_path / "t.tsv") == rows == list(zip(upstream.images, upstream.captions, strict=True))


def test_quotes_that_open_no_cell_are_text_in_a_table_of_tabs(tmp_path):
    """Pandas joined all rows between two such quotes."""
    rows = [("a.jpg", '"stop sign with graffiti'), ("b.jpg", "a dog"), ("c.jpg", 'a star" end'), ("d.jpg", '"'),
            ("e.jpg", '"all" of it'), ("f.jpg", 'go"')]
    for some in (rows, [rows[0], rows[1], rows[5]], [rows[3]]):
        (tmp_path / "t.tsv").write_text("".join("\t".join(row) + "\n" for row in [("filepath", "title"), *some]))
        assert for_training(tmp_path / "t.tsv") == for_tools(tmp_path / "t.tsv") == some


@pytest.mark.parametrize("content, words", [
    (b"image,caption\na.jpg,x\nb.jpg,caf\xe9\n", "line 3 is no UTF-8 text (byte 0xe9): save the file as UTF-8"),
    (b"image,caption\ra.jpg,x\rb.jpg,caf\xe9\r", "line 3 is no UTF-8 text"),
    (b"image,caption\na.jpg,a dog, running\n", "line 2 has 3 cells and the header 2"),
    (b"filepath\ttitle\na.jpg\tx\nb.jpg\n", "line 3 has 1 cells and the header 2"),
    (b'image,caption\na.jpg,"stop\nb.jpg,a dog\nc.jpg,go"\n', "line 2 opens a quote that closes in line 4"),
    (b'caption,image\n"stop,a.jpg\na dog,b.jpg\nsign",c.jpg\n', "line 2 opens a quote that closes in line 4"),
    (b"a.jpg,a dog\n", "its first line should name them"),
    (b"image,caption,caption\na.jpg,a,b\n", "two columns 'caption'"),
    (b"PAR1\0\0", "make shards of a parquet"), ("image,caption\n".encode("utf-16-le"), "save a text as UTF-8"),
    (b"", "only []"), (b"a.jpg".ljust(257, b"\0") + b"ustar\0".ljust(255, b"\0"), "for a tar give --dataset-type"),
    (b"image_name| comment\na.jpg| a dog\n", "(separated by '|')"),
])
def test_what_would_drop_join_or_cut_rows_is_refused_with_its_line(content, words, tmp_path):
    (tmp_path / "t.csv").write_bytes(content)
    for read in (for_training, for_tools):
        with pytest.raises(ValueError) as caught:
            read(tmp_path / "t.csv")
        assert words in str(caught.value) and "t.csv" in str(caught.value), caught.value


@pytest.mark.parametrize("image, caption", [("image_path", "caption"), ("image_file", "text"), ("filepath", "caption")])
def test_one_list_of_columns_serves_training_and_tools(image, caption, tmp_path):
    (tmp_path / "t.csv").write_text(f"id,{caption},{image}\n1,a dog,a.jpg\n")
    assert for_training(tmp_path / "t.csv") == for_tools(tmp_path / "t.csv") == [("a.jpg", "a dog")]


def test_columns_that_training_names_are_taken_alone(tmp_path):
    (tmp_path / "t.csv").write_text("image,caption,alt\na.jpg,long,short\n")
    assert [tuple(row) for row in read_table(tmp_path / "t.csv", "image", "alt", ",")] == [(2, "a.jpg", "short")]
    with pytest.raises(ValueError, match="no columns image,altt, only"):
        read_table(tmp_path / "t.csv", "image", "altt", ",")
