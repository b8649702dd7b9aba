"""Read the official files of data sets of captions and classes, by their rows in datasets.json or your own file.

A row says where the annotation file and the images are, how to get them, and which fields of an entry hold what
(docs/extend.md). `form` is one of FORMS, by which the file is read, unless its suffix says it. `case` is one of CASES,
for what columns cannot say.
"""
import csv
import io
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from open_clip_mdc.data.captions import coco_rows
from open_clip_mdc.data.images import decode_image
from open_clip_mdc.data.paths import inside
from open_clip_mdc.data.text import read_text

from .known import row_of
from .local_files import Cell, entry_value, find, image_folder, need_images, read_json, read_json_lines
from .perturb import Tagger, frozen_options

PERMUTATIONS = 6  # images per statement of NLVR, with the three boxes in each order


@dataclass(frozen=True)
class Case:
    """One decision, which of `captions` fits the image."""

    key: str
    images: tuple[Path | Cell, ...]
    captions: tuple[str, ...]  # the right ones first, or with two images caption i for image i
    group: str  # relation, pair of attributes, subset or piece, over which the official metric averages
    box: tuple[int, int, int, int] | None = None  # (left, upper, right, lower) in pixels, or None for the whole image
    right: int = 1  # number of right captions

    @property
    def wrong(self) -> tuple[str, ...]:
        """Return the captions that do not fit the first image."""
        return self.captions[self.right:]

    def opened(self) -> list[Image.Image]:
        """Return the images, RGB and upright. Raises ValueError that names a damaged one."""
        return [decode_image(image.open(), image.name) if isinstance(image, Cell) else
                decode_image(image, box=self.box) for image in self.images]


Read = tuple[list[Case], dict]  # cases, and facts about them for the result file
Entries = Iterable[tuple[str | int, object]]  # of an annotation file, with their keys or numbers


@dataclass(frozen=True)
class Entry:
    """An entry of an annotation file, and the folder of its images."""

    key: str | int  # or its number
    content: dict
    path: Path  # of the file
    folder: Path
    row: dict  # the data set's, of datasets.json

    def value(self, name: str, *kinds: type):
        return entry_value(self.content, name, kinds, self.path, self.key)

    def inside(self, name: str) -> Path:
        return inside(self.folder, name, self.path, self.key)

    def image(self, column: str) -> Path | Cell:
        """Return the image that a column names, or holds in a table."""
        image, columns = self.value(column, str, int, Cell), self.row["columns"]
        if isinstance(image, Cell):
            return image
        name = str(image).zfill(columns.get("digits", 0))
        name = name if PurePosixPath(name).suffix else name + columns.get("suffix", "")
        return self.inside(PurePosixPath(name).name if columns.get("flat") else name)

    def refused(self, problem: str) -> ValueError:
        return ValueError(f"{self.path}, row {self.key}: {problem}")


# ---- from a file to its entries


def json_entries(path: Path, row: dict) -> Entries:
    content = read_json(path, "list", "dict")
    return content.items() if isinstance(content, dict) else enumerate(content)


def csv_entries(path: Path, row: dict) -> Entries:
    return enumerate(csv.DictReader(io.StringIO(read_text(path))))


def csv_pairs(path: Path, row: dict) -> Entries:
    """Return every two rows behind the header as one entry. The captions get the official prompt of MMVP-VLM."""
    _, *rows = ([cell.strip() for cell in cells] for cells in csv.reader(io.StringIO(read_text(path))) if cells)
    if len(rows) % 2 or any(len(cells) != 3 for cells in rows):
        raise ValueError(f"{path} should have a header and an even number of rows: number, visual pattern, statement")
    for number, pair in enumerate(zip(rows[::2], rows[1::2], strict=True)):
        entry = {"key": pair[0][0], "pattern": pair[0][1]}
        for place, (image, _, statement) in enumerate(pair):
            entry |= {f"image_{place}": f"{entry['pattern']}/{image}", f"caption_{place}": f"a photo of {statement}"}
        yield number, entry


def parquet_entries(path: Path, row: dict) -> Entries:
    """Return the rows of all tables that have the file's name, as Hugging Face stores them. Images stay there."""
    images = row["columns"]["images"]
    for table in sorted(path.parent.glob(row["file"])):
        try:
            with pq.ParquetFile(table) as file:
                texts = [name for name in file.schema_arrow.names if name not in images]
                groups = [file.read_row_group(group, texts).to_pylist() for group in range(file.num_row_groups)]
        except (pa.ArrowException, OSError) as problem:
            raise ValueError(f"{table} is damaged: fetch it again ({problem})") from problem
        for group, entries in enumerate(groups):
            for number, entry in enumerate(entries):
                cells = {name: Cell(table, group, number, name) for name in images}
                yield f"{table.name}#{group}.{number}", entry | cells


def coco_images(path: Path, row: dict) -> Entries:
    try:
        return enumerate(coco_rows(read_json(path, "dict"), "captions"))
    except (KeyError, TypeError) as problem:
        raise ValueError(f"{path} is not in COCO's format ({problem!r})") from problem


def text_files(path: Path, row: dict) -> Entries:
    for file in sorted(path.parent.glob(f"*{path.suffix}")):
        yield file.stem, {"name": file.stem, "text": " ".join(read_text(file).split())}


def files_of_split(path: Path, row: dict) -> Entries:
    """Return the JSON files in the folder `entries` that a file lists by split, as {split: [names]}."""
    for name in entry_value(read_json(path, "dict"), row["split"], list, path, "the file"):
        yield name, read_json(inside(path.parent / row.get("entries", ""), str(name), path, name), "dict")


def voc_images(path: Path, row: dict) -> Entries:
    """Return the images of VOC's CLASS_SPLIT.txt, with 1 for a class that is there, -1 if not, and 0 if in doubt."""
    behind, read = f"_{row['split']}.txt", partial(pd.read_csv, sep=r"\s+", header=None, dtype=str, index_col=0)
    signs = pd.DataFrame({file.name.removesuffix(behind): read(file)[1] for file in path.parent.glob(f"*{behind}")})
    if not signs.isin(["1", "-1", "0"]).all(axis=None):
        raise ValueError(f"a line of {path.parent}/*{behind} is not an image and 1, -1 or 0, or some lack an image")
    for name, own in signs.iterrows():
        yield name, {"name": name, **{sign: list(own.index[own == sign]) for sign in ("1", "0")}}


FORMS = {
    ".json": json_entries, ".jsonl": read_json_lines, ".jsonlines": read_json_lines, ".csv": csv_entries,
    ".parquet": parquet_entries, "csv pairs": csv_pairs, "coco": coco_images, ".txt": text_files,
    "files of a split": files_of_split, "voc": voc_images}


# ---- from an entry to its cases


def by_columns(entry: Entry) -> list[Case]:
    columns, box = entry.row["columns"], None
    images = tuple(map(entry.image, columns["images"]))
    captions = columns["captions" if "captions" in columns else "labels"]
    if isinstance(captions, str):
        captions = list(entry.value(captions, list))
    else:
        captions = [" ".join(entry.value(name, str) for name in ([names] if isinstance(names, str) else names))
                    for names in captions]
    right = columns.get("right", len(captions) if "labels" in columns else 1)
    captions += entry.value(columns["unsure"], list) if "unsure" in columns else []
    if wrong := [caption for caption in captions if not isinstance(caption, str)]:
        raise entry.refused(f"a caption is {wrong[0]!r}, not a text")
    if "answer" in columns:
        place = str(entry.value(columns["answer"], str, int)).strip()
        if place not in map(str, range(len(captions))):
            raise entry.refused(f"{columns['answer']} is {place!r}, not 0 to {len(captions) - 1}")
        captions.insert(0, captions.pop(int(place)))
    group = entry.value(columns["group"], str, list) if "group" in columns else \
        entry.content.get(columns.get("tag"), entry.row["group"])
    if "box" in columns:
        left, upper, width, height = (round(entry.value(f"{columns['box']}{side}", int, float)) for side in "xywh")
        if width <= 0 or height <= 0:
            raise entry.refused(f"an empty box, {width} x {height} pixels")
        box = left, upper, left + width, upper + height
    return [Case(str(entry.content.get(columns.get("key"), entry.key)), images, tuple(captions),
                 "_".join(map(str, group)) if isinstance(group, list) else str(group), box, right)]


def valse(entry: Entry) -> list[Case]:
    """Return VALSE's rows that two of three annotators confirmed (as in its README)."""
    votes = entry_value(entry.value("mturk", dict), "caption", int, entry.path, f"{entry.key}, mturk")
    return by_columns(entry) if votes >= 2 else []


def named_places(entry: Entry) -> list[Case]:
    """Group What'sUp's photographs by the two objects and their relation in a file's name, mug_left_of_plate."""
    (case,) = by_columns(entry)
    parts = case.images[0].stem.split("_")
    if len(parts) < 3 or len(case.captions) < 2:
        raise entry.refused(f"{case.images[0].name} with {len(case.captions)} captions names no two objects and their "
                            "relation, or has no wrong caption")
    return [replace(case, group=f"{parts[0]} {parts[1]} {parts[-1]}")]


def permutations(entry: Entry) -> list[Case]:
    """Return a case for each image of a statement of NLVR, which is true or false of all of them."""
    sentence, identifier, label = (entry.value(name, str) for name in ("sentence", "identifier", "label"))
    if label.lower() not in ("true", "false"):
        raise entry.refused(f"label is {label!r}, not true or false")
    start = f"{entry.content.get('directory')}/{entry.row['subset']}-{identifier}"
    return [Case(f"{identifier}-{k}", (entry.inside(f"{start}-{k}.png"),), (sentence,), sentence,
                 right=int(label.lower() == "true")) for k in range(PERMUTATIONS)]


def each_caption(entry: Entry) -> list[Case]:
    (case,) = by_columns(entry)
    return [replace(case, key=f"{case.key}#{number}", captions=(caption,))
            for number, caption in enumerate(case.captions)]


CASES = {function.__name__: function for function in (
    by_columns, valse, named_places, permutations, each_caption)}


# ---- from a name and a folder to all cases


def read(name: str, root: Path, split: str = "test", choose: Callable = lambda entries, *_: (entries, {}), **_) -> Read:
    """Return the cases of a row of datasets.json, and facts.

    `choose` takes the entries, the path and the subset, and returns the entries to read, and facts.
    """
    row = row_of(name, split)
    path = find(row, name, root)
    folder, fields = image_folder(row, name, path), row.get("fields")
    form = row.get("form", path.suffix)
    if form not in FORMS:
        raise ValueError(f"{name}: {path} needs a form in its row: give one of {', '.join(FORMS)}")
    entries, facts = choose(FORMS[form](path, row), path, row["subset"])
    cases, make, empty = [], CASES[row.get("case", "by_columns")], 0
    for key, content in entries:
        if fields:
            if not isinstance(content, list) or len(content) != len(fields):
                raise ValueError(f"{path}, row {key}: {content!r} is not [{', '.join(fields)}]")
            content = dict(zip(fields, content, strict=True))
        entry = Entry(key, content, path, folder, row)
        if (column := row.get("columns", {}).get("split")) and entry.value(column, str) != split:
            continue
        found = make(entry)
        cases += found
        empty += not found
    need_images(row, name, folder, cases)
    return cases, {"cases_left_out": 0} | facts | ({"rows_not_validated": empty} if make is valse else {})


def with_images(entries: Entries, path: Path, subset: str) -> tuple[Entries, dict]:
    """Restrict SugarCrepe to the rows of `rows_with_image.json` ({subset: [keys]}) beside it, if there is one."""
    selection, rows = path.with_name("rows_with_image.json"), dict(entries)
    if not selection.is_file():
        return rows.items(), {}
    keys = entry_value(read_json(selection, "dict"), subset, list, selection, "the file")
    if unknown := [key for key in keys if key not in rows]:
        raise ValueError(f"{selection} names rows that {path} does not have, such as {unknown[0]!r}")
    kept = {key: rows[key] for key in keys}
    left_out = len(rows) - len(kept)
    if left_out:
        logging.warning("%s is not the full data set: %d of %d rows are left out, because %s names only %d",
                        f"sugar_crepe/{subset}", left_out, len(rows), selection, len(kept))
    return kept.items(), {"cases_left_out": left_out}


def word_order(name: str, root: Path, tagger: Tagger | None = None, **_) -> Read:
    """Read ARO's COCO-Order and Flickr30k-Order, five word orders of each caption of Karpathy's test split."""
    cases, facts = read(name, root)  # first, as tagging may take minutes
    row = row_of(name)
    perturbations = find(row, name, root).with_name(f"{row['subset']}_perturbations.json")
    options, sha256 = frozen_options(perturbations, name, [case.captions[0] for case in cases], tagger)
    cases = [replace(case, captions=tuple(texts)) for case, texts in zip(cases, options, strict=True)]
    return cases, {**facts, "perturbations": str(perturbations), "perturbations_sha256": sha256}


READERS = {  # (name, root, split=, tagger=) -> Read
    "read": read, "sugar_crepe": partial(read, choose=with_images), "word_order": word_order}
