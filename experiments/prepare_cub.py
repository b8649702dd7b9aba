"""Read CUB-200-2011 (Wah et al. 2011) with the ten captions per image of Reed et al. (2016), MC-Diffusion's test set.

    python -m experiments.prepare_cub --images CUB_200_2011/images --captions text_c10 --split reed \\
        --classes trainvalclasses.txt testclasses.txt --out cub-wds

Images are CLASS/NAME.jpg and captions CLASS/NAME.txt. They are joined by the class's number, with which CLASS begins,
and NAME, because the rest of CLASS is spelt differently in 17 folders. Two splits are in use, whose results are not
comparable. In Reed's no class is in both halves (8,855 and 2,933 images). The official one splits images (5,994 and
5,794).
"""
import argparse
import random
from collections.abc import Iterable
from pathlib import Path

from open_clip_mdc.cli.arguments import add
from open_clip_mdc.cli.prepare import refuse, write
from open_clip_mdc.cli.prepare_layouts import Sample
from open_clip_mdc.data.text import read_lines

from . import tool

CAPTIONS = 10
Key = tuple[int, str]  # the class's number, the image's name without suffix
Rows = list[tuple[Path, list[str]]]


def class_number(name: str) -> int:
    number = name.split(".")[0]
    if not number.isdecimal():
        raise ValueError(f"{name!r} is not a class of CUB-200, such as 001.Black_footed_Albatross")
    return int(number)


def find(folder: str, suffix: str) -> dict[Key, Path]:
    files = {(class_number(path.parent.name), path.stem): path for path in sorted(Path(folder).glob(f"*/*{suffix}"))}
    if not files:
        raise FileNotFoundError(f"no CLASS/NAME{suffix} in {folder}")
    return files


def read_captions(path: Path) -> list[str]:
    content = path.read_bytes()
    try:  # some are Latin-1
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    captions = [line.strip().lower() for line in text.split("\n") if line.strip()]
    if len(captions) != CAPTIONS:
        raise ValueError(f"{len(captions)} captions, not {CAPTIONS}, in {path}")
    return captions


def reed_split(keys: Iterable[Key], lists: list[str]) -> dict[Key, str]:
    train, test = ({class_number(line) for line in read_lines(path)} for path in lists)
    if both := train & test:
        raise ValueError(f"class {min(both)} is in {lists[0]} and in {lists[1]}: Reed's split has no class in both")
    return {key: "train" if key[0] in train else "test" for key in keys if key[0] in train | test}


def official_split(images: str) -> dict[Key, str]:
    folder = Path(images).resolve().parent
    names, halves = (dict(line.split() for line in read_lines(folder / name))
                     for name in ("images.txt", "train_test_split.txt"))
    if names.keys() != halves.keys():
        raise ValueError(f"images.txt and train_test_split.txt in {folder} list different images")
    places = {number: Path(name) for number, name in names.items()}
    return {(class_number(place.parent.name), place.stem): "train" if halves[number] == "1" else "test"
            for number, place in places.items()}


def read(images: str, captions: str, split: str, classes: list[str] | None) -> tuple[dict[str, Rows], list[str]]:
    """Return the image files with captions of train and test, and a line with the reason for each unusable image."""
    if (split == "reed") != (classes is not None):
        raise ValueError("--split reed needs --classes TRAIN TEST, and --split official takes none")
    files, texts = find(images, ".jpg"), find(captions, ".txt")
    halves = reed_split(files.keys() | texts.keys(), classes) if classes else official_split(images)
    rows, problems = {"train": [], "test": []}, []
    for key, half in sorted(halves.items()):
        name = f"{key[0]:03d}/{key[1]}"
        try:
            if key not in files or key not in texts:
                missing = f".jpg in {images}" if key not in files else f".txt in {captions}"
                raise ValueError(f"no {missing}")
            rows[half].append((files[key], read_captions(texts[key])))
        except ValueError as problem:
            problems.append(f"{name!r}: {problem}")
    random.Random(0).shuffle(rows["train"])  # they are sorted by class
    print(f"{split} split: {len(rows['train'])} images to train on, {len(rows['test'])} to test on")
    return rows, problems


def run(args: argparse.Namespace) -> None:
    rows, left_out = read(args.images, args.captions, args.split, args.classes)
    if left_out and not args.skip_broken:
        refuse(left_out)
    splits = {split: [Sample(path.name, path, captions) for path, captions in rows[split]] for split in rows}
    write(args.out, splits, left_out, args.join, args.skip_broken)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images", required=True, help="folder CUB_200_2011/images, with a folder per class")
    parser.add_argument("--captions", required=True, help="folder text_c10, with a folder per class")
    parser.add_argument("--split", required=True, choices=("reed", "official"),
                        help="reed tests on other classes than it trains on (needs --classes), official reads the "
                             "train_test_split.txt beside the folder of --images")
    parser.add_argument("--classes", nargs=2, metavar=("TRAIN", "TEST"),
                        help="lists of classes for --split reed: trainvalclasses.txt testclasses.txt")
    add(parser, "shards to write")


def main(argv: list[str] | None = None) -> None:
    tool.main("experiments.prepare_cub", __doc__, add_flags, run, {"out": ()}, argv)


if __name__ == "__main__":
    main()
