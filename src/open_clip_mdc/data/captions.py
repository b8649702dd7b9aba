"""Captions in shards and in COCO's files: what a KEY.txt says, what is none, and which samples have a caption.

One rule for training and every command: a KEY.txt is UTF-8 (or UTF-16 with a byte order mark), may hold several
captions, and a blank one is none. A sample without an image or a caption is left out and counted.
"""
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby, islice

from .paths import IMAGE_SUFFIXES, is_hidden
from .shards import file_names, image_member, members, read_samples, split_name
from .text import decode_text

TEXTS = ("txt", "json")
# Separates several captions in one KEY.txt. ASCII's record separator is in no caption, but alt texts contain line ends.
CAPTION_SEPARATOR = "\x1e"


def without_image(sample: dict) -> str:
    """Return how a message names a sample without an image: its key, and the members that it has."""
    return f"sample {sample['__key__']} ({', '.join(members(sample))})"


def text_of(sample: dict) -> str:
    """Return the text of KEY.txt, "" without one. Raises ValueError that names shard and key if it is no text."""
    return decode_text(sample.get("txt", b""), f"{sample['__url__']}, sample {sample['__key__']}")


def is_text(value: object) -> bool:
    """Return whether a value is a text that is not empty and that UTF-8 can encode, as not all of JSON's can be."""
    try:
        return isinstance(value, str) and bool(value.strip() and value.encode())
    except UnicodeEncodeError:
        return False


def split_captions(text: str) -> list[str]:
    """Return the captions in a text. Blank ones are none."""
    return [caption for caption in text.split(CAPTION_SEPARATOR) if caption.strip()]


def captions_of(sample: dict, with_image: bool = True) -> list[str]:
    """Return the captions of a sample. Raises ValueError that names it and says why training could not use it."""
    name = f"{sample['__url__']}, {without_image(sample)}"
    if "txt" not in sample or with_image and not image_member(sample):
        raise ValueError(name)
    if captions := split_captions(text_of(sample)):
        return captions
    raise ValueError(f"{name}, whose .txt is empty")


def captioned(samples: Iterable[dict], with_image: bool = True) -> Iterator[tuple[dict, list[str]]]:
    """Yield each sample that has captions (and an image), with these. A warning counts others and names the first."""
    lacking, first, usable = Counter(), None, set()
    try:
        for sample in samples:
            try:
                captions = captions_of(sample, with_image)
            except ValueError as problem:
                lacking[sample["__url__"]] += 1
                first = first or str(problem)
                continue
            usable.add(sample["__url__"])
            yield sample, captions
    finally:  # also if an epoch ends within a pass
        if lacking:
            logging.warning("Left out %d of the samples, in %d of the shards, as they have no %scaption. The first is "
                            "%s. Shards without any other sample: %d.", lacking.total(), len(lacking),
                            "image or no " * with_image, first, len(lacking.keys() - usable))


def find_apart(shard: str) -> str | None:
    """Return what is wrong if an image and a text of a shard belong together, but do not stand side by side.

    Only the names are read, and only of a file on this machine.
    """
    images, texts = {}, {}  # those that stand alone, name without folder: member
    try:
        names = ((name, name.rpartition(".")[2].lower()) for name in file_names(shard) if not is_hidden(name))
        ours = ((name, suffix in IMAGE_SUFFIXES) for name, suffix in names if suffix in (*IMAGE_SUFFIXES, *TEXTS))
        for key, group in groupby(ours, lambda named: split_name(named[0])[0]):
            of_images = {is_image: name for name, is_image in group}
            if key and len(of_images) == 1:
                [(is_image, name)] = of_images.items()
                (images if is_image else texts).setdefault(os.path.basename(key), name)
    except (OSError, ValueError):  # the code that reads the shard says what is wrong
        return None
    key = next((key for key in texts if key in images), None)
    if key is None:
        return None
    image, text = images[key], texts[key]
    return f"{shard}: {text} is elsewhere in the tar than {image}: " + (
        "write it with tar --sort=name, so that the files of a sample stand side by side"
        if split_name(image)[0] == split_name(text)[0] else "put both in one folder, and write it with tar --sort=name")


def warnings_of(shards: list[str]) -> Iterator[str]:
    """Yield what is hardly meant in the first shard: samples whose files are apart, texts that hold many captions.

    In clip_benchmark's sets most texts have several lines, each of them a caption.
    """
    if not shards or not os.path.isfile(shards[0]):
        return
    if apart := find_apart(shards[0]):
        yield apart
    try:
        texts = [sample["txt"].decode(errors="replace").strip() for sample in
                 islice(read_samples(shards[0], ("txt",)), 50)]
    except (OSError, ValueError):  # the code that reads the whole shard reports it
        return
    if sum("\n" in text and CAPTION_SEPARATOR not in text for text in texts) > len(texts) / 2:
        yield (f"most texts of {shards[0]} have several lines, and each KEY.txt is taken as one caption. If every line "
               f"is a caption, make shards of them by open_clip_mdc prepare shards")


def coco_rows(content: dict, key: str) -> list[dict]:
    """Return the images of a file in COCO's format, each with a list of its captions as `key`, or None.

    Raises ValueError, KeyError or TypeError for another format.
    """
    captions = {}
    for row in content["annotations"]:
        captions.setdefault(str(row["image_id"]), []).append(row["caption"])
    rows = [{**image, "file_name": image["file_name"], key: captions.get(str(image["id"]))}
            for image in content["images"]]
    if rows and captions and not any(row[key] for row in rows):
        raise ValueError(f"its annotations are of other images: their image_id {next(iter(captions))} is no id of them")
    return rows
