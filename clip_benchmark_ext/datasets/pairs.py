"""Make pairs of a right and a wrong caption from captions of images, by rule, in SugarCrepe's format.

A wrong caption is a copy that a rule makes false. Two nouns or colours are swapped, or a noun, a colour or a
preposition is replaced. SugarCrepe's wrong captions are written with more care, so do not compare these scores with
SugarCrepe's.
"""
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain, pairwise
from pathlib import Path

from open_clip_mdc.data.captions import is_text, without_image
from open_clip_mdc.data.files import new_folder
from open_clip_mdc.data.shards import image_member, image_suffix, read_metadata, read_samples

from ..metrics import hallucination

KINDS = ("swap_obj", "swap_att", "replace_obj", "replace_att", "replace_rel")
SEED = 0
PAIRS = 200  # of each kind, and at most one of a kind from each image
NOUNS = hallucination.NOUNS
COLOURS = [colour for colour in hallucination.COLOURS if colour != "orange"]  # as when results were measured
CONTEXT_WORDS = {"and", "with", "near", "beside", "next"}  # a swap across one of these leaves the caption true
RELATIONS = dict(pair.split(":") for pair in (
    "in front of:behind, behind:in front of, over:under, under:over, up:down, down:up, into:out of, out of:into, "
    "on top of:beneath, inside:outside, outside:inside, off:onto, above:below, below:above, toward:away from, "
    "towards:away from, onto:off").split(", "))


def swap(caption: str, words: list[str]) -> str | None:
    """Swap the first two different words of this list. Return None if the caption could still be true."""
    text = caption.split()
    places = [i for i, word in enumerate(text) if word in words]
    for i, j in pairwise(places):
        if text[i] != text[j] and not CONTEXT_WORDS & set(text[i:j]):
            text[i], text[j] = text[j], text[i]
            return " ".join(text)
    return None


def replace(caption: str, words: list[str], described: str, rng: random.Random) -> str | None:
    text = caption.split()
    places = [i for i, word in enumerate(text) if word in words]
    others = [word for word in words if word not in described]
    if not (places and others):
        return None
    text[rng.choice(places)] = rng.choice(others)
    return " ".join(text)


def replace_relation(caption: str) -> str | None:
    pattern = r"\b(" + "|".join(sorted(RELATIONS, key=len, reverse=True)) + r")\b"
    false = re.sub(pattern, lambda match: RELATIONS[match[1]], caption, count=1)
    return false if false != caption else None


def negatives(caption: str, described: str, rng: random.Random) -> dict[str, str]:
    """Return the wrong captions of a caption by kind. `described` has the words that are true of its image."""
    made = {
        "swap_obj": swap(caption, NOUNS), "swap_att": swap(caption, COLOURS),
        "replace_obj": replace(caption, NOUNS, described, rng),
        "replace_att": replace(caption, COLOURS, described, rng), "replace_rel": replace_relation(caption)}
    return {kind: false for kind, false in made.items() if false}


def captions_in(sample: dict) -> list[str]:
    """Return the captions in a sample's KEY.json. Raises ValueError that names it if there are none."""
    captions = read_metadata(sample).get("captions")
    if not (isinstance(captions, list) and captions and all(map(is_text, captions))):
        raise ValueError(f"{sample['__url__']}, {without_image(sample)} has no list of captions in a KEY.json: make "
                         "such shards by open_clip_mdc prepare")
    return captions


def write_pairs(shards: Iterable[str], out: Path) -> dict[str, int]:
    """Write OUT/KIND.json and OUT/val2017/ from shards with captions in their metadata.

    Returns the number of pairs of each kind, without kinds that no caption gives.
    """
    rows = defaultdict(dict)
    with new_folder(out) as folder:
        (folder / "val2017").mkdir()
        for number, sample in enumerate(chain.from_iterable(map(read_samples, shards))):
            captions = list(map(hallucination.normal, captions_in(sample)))
            rng = random.Random(f"{SEED}/{number}")
            image = sample[image_member(sample)]
            filename = f"{number:012d}.{image_suffix(image)}"
            for caption in rng.sample(captions, len(captions)):
                for kind, false in negatives(caption, " ".join(captions), rng).items():
                    if len(rows[kind]) < PAIRS:
                        rows[kind].setdefault(str(number), dict(filename=filename, caption=caption,
                                                                negative_caption=false))
            if any(str(number) in of_kind for of_kind in rows.values()):
                Path(folder, "val2017", filename).write_bytes(image)
        for kind, pairs in rows.items():
            (folder / f"{kind}.json").write_text(json.dumps(pairs, indent=1), encoding="utf-8")
    return {kind: len(pairs) for kind, pairs in sorted(rows.items())}
