"""Read the official files of the compositionality data sets, by their rows in datasets.json.

A row says where the annotation file and the images are, and how to get them. It names one of FORMS, by which the file
is read, and one of CASES, the function that makes cases of an entry of the file. With `columns` instead, it names the
fields of an entry.
"""
import csv
import io
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.parquet as pq

from open_clip_mdc.data.paths import inside
from open_clip_mdc.data.text import read_text

from .known import selection_row
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


Read = tuple[list[Case], dict]  # cases, and facts about them for the result file


@dataclass(frozen=True)
class Entry:
    """An entry of an annotation file, and the folder of its images."""

    key: str | int  # or its number
    content: dict | list
    path: Path  # of the file
    folder: Path
    row: dict  # the data set's, of datasets.json

    def value(self, name: str, kind: type | tuple[type, ...]):
        return entry_value(self.content, name, kind, self.path, self.key)

    def texts(self, *names: str) -> list[str]:
        return [self.value(name, str) for name in names]

    def case(self, images: list[str], captions: list[str], group: str | None = None, key: str | None = None,
             **more) -> Case:
        found = tuple(inside(self.folder, image, self.path, self.key) for image in images)
        return Case(str(self.key if key is None else key), found, tuple(captions), group or self.row["group"], **more)

    def refused(self, problem: str) -> ValueError:
        return ValueError(f"{self.path}, row {self.key}: {problem}")


# ---- from a file to its entries, with their keys or numbers


def json_entries(path: Path, row: dict) -> Iterator[tuple[str | int, object]]:
    content = read_json(path, *row.get("holds", ["list"]))
    return iter(content.items() if isinstance(content, dict) else enumerate(content))


def csv_entries(path: Path, row: dict) -> Iterator[tuple[int, dict]]:
    return enumerate(csv.DictReader(io.StringIO(read_text(path))))


def csv_pairs(path: Path, row: dict) -> Iterator[tuple[int, tuple]]:
    """Return every two rows behind the header together."""
    _, *rows = (cells for cells in csv.reader(io.StringIO(read_text(path))) if cells)
    if len(rows) % 2 or any(len(cells) != 3 for cells in rows):
        raise ValueError(f"{path} should have a header and an even number of rows: number, visual pattern, statement")
    return enumerate(zip(rows[::2], rows[1::2], strict=True))


FORMS: dict[str, Callable] = {"json": json_entries, "json lines": lambda path, row: read_json_lines(path),
                              "csv": csv_entries, "csv pairs": csv_pairs}


# ---- from an entry to its cases


def by_columns(entry: Entry) -> list[Case]:
    columns = entry.row["columns"]
    found = entry.texts(*columns["images"], *columns["captions"])
    images, captions = found[:len(columns["images"])], found[len(columns["images"]):]
    if columns.get("flat"):  # names of images are paths elsewhere
        images = [PurePosixPath(image).name for image in images]
    key, group = (entry.content.get(columns.get(name)) for name in ("key", "group"))
    return [entry.case(images, captions, group and str(group), key, right=columns.get("right", 1))]


def visual_genome(entry: Entry) -> list[Case]:
    """Read ARO's VG-Relation and VG-Attribution, a true and a false caption per image crop."""
    image, true, false = entry.texts("image_path", "true_caption", "false_caption")
    left, upper, width, height = (round(entry.value(f"bbox_{side}", (int, float))) for side in "xywh")
    if width <= 0 or height <= 0:
        raise entry.refused(f"an empty box, {width} x {height} pixels")
    if entry.row["subset"] == "vg_relation":
        (group,) = entry.texts("relation_name")
    else:
        attributes = entry.value("attributes", list)
        if len(attributes) != 2:
            raise entry.refused(f"'attributes' should have two entries, not {len(attributes)}")
        group = f"{attributes[0]}_{attributes[1]}"
    return [entry.case([image], [true, false], group, box=(left, upper, left + width, upper + height))]


def winoground(entry: Entry) -> list[Case]:
    """Read Winoground, two captions of the same words: huggingface.co/datasets/facebook/winoground (gated)."""
    first, second, *captions = entry.texts("image_0", "image_1", "caption_0", "caption_1")
    images = [image if PurePosixPath(image).suffix else f"{image}.png" for image in (first, second)]
    return [entry.case(images, captions, str(entry.content.get("collapsed_tag", "winoground")),
                       entry.content.get("id"))]


def valse(entry: Entry) -> list[Case]:
    """Read VALSE, a caption and a foil per image, of rows that two of three annotators confirmed (as in its README)."""
    votes = entry.value("mturk", dict)
    if entry_value(votes, "caption", int, entry.path, f"{entry.key}, mturk") < 2:
        return []
    image, *captions = entry.texts("image_file", "caption", "foil")
    return [entry.case([image], captions)]


def whatsup(entry: Entry) -> list[Case]:
    """Read What'sUp, captions that say where something is, the right one first: github.com/amitakamath/whatsup_vlms."""
    group = None
    if entry.row["controlled"]:
        image, captions = PurePosixPath(*entry.texts("image_path")).name, entry.value("caption_options", list)
        parts = PurePosixPath(image).stem.split("_")  # two objects and their relation, such as mug_left_of_plate
        if len(parts) < 3:
            raise entry.refused(f"{image!r} does not name two objects and their relation")
        group = f"{parts[0]} {parts[1]} {parts[-1]}"
    else:
        content = entry.content
        image, *captions = content if isinstance(content, list) and len(content) == 3 else (None, None)
        image = f"{str(image).zfill(12) if entry.row['photos'] == 'val2017' else image}.jpg"
    if len(captions) < 2 or not all(isinstance(caption, str) for caption in captions):
        raise entry.refused(f"{entry.content!r} has no image with a right caption and wrong ones")
    return [entry.case([image], captions, group)]


def negbench(entry: Entry) -> list[Case]:
    """Read NegBench, multiple choice among captions with and without negation: github.com/m1k2zoo/negbench."""
    image, kind, place, *captions = entry.texts("image_path", "correct_answer_template", "correct_answer",
                                                *(f"caption_{number}" for number in range(4)))
    if place.strip() not in ("0", "1", "2", "3"):
        raise entry.refused(f"correct_answer is {place!r}, not 0 to 3")
    captions.insert(0, captions.pop(int(place)))
    return [entry.case([PurePosixPath(image).name], captions, kind)]


def cola(entry: Entry) -> list[Case]:
    """Read COLA's multi-object pairs, [image, caption, image, caption]: github.com/arijitray1993/COLA."""
    cells = entry.content
    if not isinstance(cells, list) or len(cells) != 4 or not all(isinstance(cell, str) for cell in cells):
        raise entry.refused(f"{cells!r} is not [image, caption, image, caption]")
    return [entry.case([PurePosixPath(image).name for image in cells[::2]], cells[1::2])]


def mmvp_vlm(entry: Entry) -> list[Case]:
    """Read MMVP-VLM, every two rows of Questions.csv as a case: huggingface.co/datasets/MMVP/MMVP_VLM."""
    pattern = entry.content[0][1].strip()
    images = [f"{pattern}/{number.strip()}.jpg" for number, _, _ in entry.content]
    # The official prompt.
    captions = [f"a photo of {statement.strip()}" for _, _, statement in entry.content]
    return [entry.case(images, captions, pattern, entry.content[0][0])]


def nlvr(entry: Entry) -> list[Case]:
    """Read the folder nlvr/dev or nlvr/test of github.com/lil-lab/nlvr, labelled sentences with six images each."""
    sentence, identifier, label = entry.texts("sentence", "identifier", "label")
    if label.lower() not in ("true", "false"):
        raise entry.refused(f"label is {label!r}, not true or false")
    start = f"{entry.content.get('directory')}/{entry.row['subset']}-{identifier}"
    return [entry.case([f"{start}-{k}.png"], [sentence], sentence, f"{identifier}-{k}",
                       right=int(label.lower() == "true")) for k in range(PERMUTATIONS)]


def each_caption(entry: Entry) -> list[Case]:
    (image,) = entry.texts("image")
    captions = entry.value("caption", list)
    for caption in captions:
        if not isinstance(caption, str):
            raise entry.refused(f"a caption is {caption!r}, not a text")
    return [entry.case([image], [caption], key=f"{image}#{number}") for number, caption in enumerate(captions)]


CASES: dict[str, Callable[[Entry], list[Case]]] = {function.__name__: function for function in (
    by_columns, visual_genome, winoground, valse, whatsup, negbench, cola, mmvp_vlm, nlvr, each_caption)}


# ---- from a name and a folder to all cases


def read(name: str, root: Path, choose: Callable = lambda entries, *_: (entries, {"cases_left_out": 0}),
         **_) -> Read:
    """Return the cases of a row of datasets.json, and facts.

    `choose` takes the entries, the path and the subset, and returns the entries to read, and facts.
    """
    row = selection_row(name)
    path = find(row, name, root)
    folder = image_folder(row, name, path)
    entries, facts = choose(FORMS[row.get("form", "json")](path, row), path, row["subset"])
    cases, make = [], CASES[row.get("case", "by_columns")]
    empty = 0
    for key, content in entries:
        found = make(Entry(key, content, path, folder, row))
        cases += found
        empty += not found
    need_images(row, name, folder, cases)
    return cases, facts | ({"rows_not_validated": empty} if make is valse else {})


def with_images(entries: Iterator[tuple[str, dict]], path: Path, subset: str) -> tuple[Iterator, dict]:
    """Restrict SugarCrepe to the rows of `rows_with_image.json` ({subset: [keys]}) beside it, if there is one."""
    selection, rows = path.with_name("rows_with_image.json"), dict(entries)
    if not selection.is_file():
        return iter(rows.items()), {"cases_left_out": 0}
    keys = entry_value(read_json(selection, "dict"), subset, list, selection, "the file")
    if unknown := [key for key in keys if key not in rows]:
        raise ValueError(f"{selection} names rows that {path} does not have, such as {unknown[0]!r}")
    kept = {key: rows[key] for key in keys}
    left_out = len(rows) - len(kept)
    if left_out:
        logging.warning("%s is not the full data set: %d of %d rows are left out, because %s names only %d",
                        f"sugar_crepe/{subset}", left_out, len(rows), selection, len(kept))
    return iter(kept.items()), {"cases_left_out": left_out}


def word_order(name: str, root: Path, perturbations: str | Path | None = None, tagger: Tagger | None = None) -> Read:
    """Read ARO's COCO-Order and Flickr30k-Order, five word orders of each caption of Karpathy's test split."""
    cases, facts = read(name, root)  # first, as tagging may take minutes
    if perturbations is None:
        row = selection_row(name)
        perturbations = find(row, name, root).with_name(f"{row['subset']}_perturbations.json")
    options, sha256 = frozen_options(perturbations, name, [case.captions[0] for case in cases], tagger)
    cases = [replace(case, captions=tuple(texts)) for case, texts in zip(cases, options, strict=True)]
    return cases, {**facts, "perturbations": str(perturbations), "perturbations_sha256": sha256}


def bivlc(name: str, root: Path, **_) -> Read:
    """Read BiVLC's Parquet tables, whose cells hold the images: huggingface.co/datasets/imirandam/BiVLC."""
    row = selection_row(name)
    tables, cases = sorted(find(row, name, root).parent.glob(row["file"])), []
    for table in tables:
        try:
            with pq.ParquetFile(table) as file:
                groups = [file.read_row_group(number, columns=["caption", "negative_caption", "type"]).to_pylist()
                          for number in range(file.num_row_groups)]
        except (pa.ArrowException, OSError) as problem:
            raise ValueError(f"{table} is damaged: fetch it again ({problem})") from problem
        for group, entries in enumerate(groups):
            for number, values in enumerate(entries):
                *captions, kind = (entry_value(values, field, str, table, f"{group}.{number}")
                                   for field in ("caption", "negative_caption", "type"))
                images = tuple(Cell(table, group, number, column) for column in ("image", "negative_image"))
                cases.append(Case(f"{table.name}#{group}.{number}", images, tuple(captions), kind))
    if not cases:
        raise ValueError(f"{name}: {tables[0]} has no rows")
    return cases, {"cases_left_out": 0}


READERS: dict[str, Callable[..., Read]] = {  # (name, root, perturbations=, tagger=)
    "read": read, "sugar_crepe": partial(read, choose=with_images), "word_order": word_order, "bivlc": bivlc}
