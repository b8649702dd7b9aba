"""Read the official files of data sets whose cases have two images and two captions, caption i for image i."""
import csv
import io
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.parquet as pq

from open_clip_mdc.data.paths import inside
from open_clip_mdc.data.text import read_text

from .local_files import Cell, Source, find, how_to_get, image_folder, need_images, read_json, read_json_lines, texts
from .readers import Case, Read


def winoground(name: str, root: Path, **_) -> Read:
    """Read Winoground, two captions of the same words: huggingface.co/datasets/facebook/winoground (gated)."""
    source = Source("examples.jsonl", ("", "data", "winoground", "winoground/data"), ("images", "../images"),
                    "data/examples.jsonl and data/images.zip from https://huggingface.co/datasets/facebook/winoground "
                    "(needs an account that accepted its terms)",
                    "ROOT/examples.jsonl, ROOT/images/ex_0_img_0.png, ...")
    path = find(source, name, root)
    folder = image_folder(source, name, path)
    cases = []
    for index, row in read_json_lines(path):
        first, second, caption_0, caption_1 = texts(
            row, ("image_0", "image_1", "caption_0", "caption_1"), path, index)
        images = tuple(  # the official file names images without ".png"
            inside(folder, image if PurePosixPath(image).suffix else f"{image}.png", path, index)
            for image in (first, second))
        cases.append(Case(str(row.get("id", index)), images, (caption_0, caption_1),
                          str(row.get("collapsed_tag", "winoground"))))
    need_images(source, name, folder, cases)
    return cases, {"cases_left_out": 0}


def colorswap(name: str, root: Path, **_) -> Read:
    """Read ColorSwap, captions that swap two colours: test.json and images of github.com/Top34051/colorswap."""
    source = Source("test.json", ("", "data", "colorswap", "colorswap/data"), ("images", "../images"),
                    "the data by the link in https://github.com/Top34051/colorswap",
                    "ROOT/test.json, ROOT/images/*.png")
    path = find(source, name, root)
    folder = image_folder(source, name, path)
    cases = []
    for index, row in enumerate(read_json(path, list)):
        *names, first, second = texts(row, ("image_1", "image_2", "caption_1", "caption_2"), path, index)
        images = tuple(inside(folder, PurePosixPath(image).name, path, index) for image in names)
        cases.append(Case(str(row.get("id", index)), images, (first, second), str(row.get("image_source", name))))
    need_images(source, name, folder, cases)
    return cases, {"cases_left_out": 0}


def cola(name: str, root: Path, **_) -> Read:
    """Read COLA's multi-object pairs, [image, caption, image, caption]: github.com/arijitray1993/COLA."""
    file = "COLA_multiobjects_matching_benchmark.json"
    source = Source(file, ("", "data", "cola", "COLA/data"), ("images", "../images"),
                    f"https://raw.githubusercontent.com/arijitray1993/COLA/main/data/{file} and the images it links",
                    f"ROOT/{file}, ROOT/images/2414605.jpg, ...")
    path = find(source, name, root)
    folder = image_folder(source, name, path)
    cases = []
    for index, row in enumerate(read_json(path, list)):
        if not isinstance(row, list) or len(row) != 4 or not all(isinstance(cell, str) for cell in row):
            raise ValueError(f"{path}, row {index}: {row!r} is not [image, caption, image, caption]")
        images = tuple(inside(folder, PurePosixPath(image).name, path, index) for image in row[::2])
        cases.append(Case(str(index), images, tuple(row[1::2]), name))
    need_images(source, name, folder, cases)
    return cases, {"cases_left_out": 0}


def mmvp_vlm(name: str, root: Path, **_) -> Read:
    """Read MMVP-VLM, every two rows of Questions.csv as a case: huggingface.co/datasets/MMVP/MMVP_VLM."""
    source = Source("Questions.csv", ("", "MMVP_VLM", "mmvp_vlm"), ("MLLM_VLM Images", "MMVP_VLM_Images"),
                    "https://huggingface.co/datasets/MMVP/MMVP_VLM", "ROOT/Questions.csv, ROOT/MLLM_VLM Images/*/*.jpg")
    path = find(source, name, root)
    folder = image_folder(source, name, path)
    _, *rows = (row for row in csv.reader(io.StringIO(read_text(path))) if row)
    if len(rows) % 2 or any(len(row) != 3 for row in rows):
        raise ValueError(f"{path} should have a header and an even number of rows: number, visual pattern, statement")
    cases = []
    for index, pair in enumerate(zip(rows[::2], rows[1::2], strict=True)):
        pattern = pair[0][1].strip()
        images = tuple(inside(folder, f"{pattern}/{number.strip()}.jpg", path, index) for number, _, _ in pair)
        # The official prompt.
        captions = tuple(f"a photo of {statement.strip()}" for _, _, statement in pair)
        cases.append(Case(pair[0][0], images, captions, pattern))
    need_images(source, name, folder, cases)
    return cases, {"cases_left_out": 0}


def bivlc(name: str, root: Path, **_) -> Read:
    """Read BiVLC's Parquet tables, whose cells hold the images: huggingface.co/datasets/imirandam/BiVLC."""
    source = Source("test-*.parquet", ("", "data", "bivlc", "BiVLC/data"), (),
                    "data/test-*.parquet from https://huggingface.co/datasets/imirandam/BiVLC", "ROOT/test-*.parquet")
    tables = next((found for folder in source.folders if (found := sorted((root / folder).glob(source.file)))), None)
    if tables is None:
        raise FileNotFoundError(f"{name}: no {source.file} in {root}. {how_to_get(source)}")
    cases = []
    for table in tables:
        try:
            with pq.ParquetFile(table) as file:
                groups = [file.read_row_group(number, columns=["caption", "negative_caption", "type"]).to_pylist()
                          for number in range(file.num_row_groups)]
        except (pa.ArrowException, OSError) as problem:
            raise ValueError(f"{table} is damaged: fetch it again ({problem})") from problem
        for group, rows in enumerate(groups):
            for row, values in enumerate(rows):
                first, second, kind = texts(values, ("caption", "negative_caption", "type"), table, f"{group}.{row}")
                images = tuple(Cell(table, group, row, column) for column in ("image", "negative_image"))
                cases.append(Case(f"{table.name}#{group}.{row}", images, (first, second), kind))
    if not cases:
        raise ValueError(f"{name}: {tables[0]} has no rows")
    return cases, {"cases_left_out": 0}
