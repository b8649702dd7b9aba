"""Read rows of images and captions from the JSON files that `open_clip_mdc prepare shards` takes."""
from pathlib import Path

from ..data.csv_pairs import FILE_NAME, IMAGES
from ..data.files import parse_json
from ..data.text import read_lines


def coco_rows(content: dict, key: str) -> list[dict]:
    captions: dict[str, list] = {}
    for row in content["annotations"]:
        captions.setdefault(id_of(row["image_id"]), []).append(row["caption"])
    rows = [{FILE_NAME: image["file_name"], key: captions.get(id_of(image["id"]))} for image in content["images"]]
    if rows and captions and not any(row[key] for row in rows):
        raise ValueError(f"its annotations are of other images: their image_id {next(iter(captions))} is no id of them")
    return rows


def id_of(value: object) -> str:
    """Return an image's id as text, as some files have 7 in one place and "7" in another. Raises TypeError."""
    if isinstance(value, int | str):
        return str(value)
    raise TypeError(f"{value!r} is no id of an image")


def by_file(content: dict, key: str) -> list[dict] | None:
    """Return the rows of {file: captions} or {file: {"caption": ...}}, or None if it is none of these."""
    if not content or "annotations" in content:
        return None
    if all(isinstance(value, dict) for value in content.values()):
        return [{**value, IMAGES[0]: name} for name, value in content.items()]
    if all(isinstance(text, str) for value in content.values() for text in (
            value if isinstance(value, list) else [value])):
        return [{IMAGES[0]: name, key: value} for name, value in content.items()]
    return None


def parse_line(path: Path, number: int, line: str) -> object:
    try:
        return parse_json(line)
    except ValueError as problem:
        raise ValueError(f"{path}, line {number} is not JSON: {problem}") from problem


def read_json_rows(path: Path, key: str) -> tuple[list, Path]:
    """Return the rows of a JSON file, not checked yet, and the folder of its images. Raises ValueError."""
    if path.suffix.lower() == ".jsonl":
        rows = [parse_line(path, number, line) for number, line in enumerate(read_lines(path), 1)]
    else:
        try:
            rows = parse_json(path.read_bytes())
        except ValueError as problem:
            raise ValueError(f"{path} is not JSON: {problem}") from problem
    folder = path.parent
    if isinstance(rows, dict) and (own := by_file(rows, key)):
        rows = own
    if isinstance(rows, dict):
        year = path.stem.removeprefix("captions_")  # COCO's annotations/captions_val2017.json names images in val2017/
        folder = next((there for above in (folder, folder.parent) if (there := above / year).is_dir()), folder)
        try:
            rows = coco_rows(rows, key)
        except (KeyError, TypeError) as problem:
            there = ", ".join(list(rows)[:5])
            why = f"it has no {problem}, only {there}" if isinstance(problem, KeyError) else str(problem)
            raise ValueError(f"{path} is neither a captions_*.json of COCO nor a list of images with captions: {why}. "
                             f"Karpathy's dataset_coco.json is for `prepare coco`") from problem
        except ValueError as problem:
            raise ValueError(f"{path}: {problem}") from problem
    if not isinstance(rows, list):
        raise ValueError(f"{path} holds {type(rows).__name__}, no images with captions")
    return rows, folder
