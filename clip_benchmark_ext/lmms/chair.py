"""CHAIR: which of COCO's objects do captions name that are not there (Rohrbach et al. 2018, arXiv 1809.02156)?

The local task reads the authors' list of synonyms, synonyms.txt, from the folder that lmms-eval runs in. Words are
compared as they stand and without the s or es of a plural. The authors' code makes words singular by the library
pattern, so a few words differ.
"""
from functools import cache
from pathlib import Path
from typing import NamedTuple

Synonyms = dict[tuple[str, ...], str]  # one word or more: the name of the object


class Named(NamedTuple):
    """The objects that a caption names, one for each mention, and those that are in the image."""

    named: list[str]
    there: list[str]

    @property
    def hallucinated(self) -> list[str]:
        """Return the objects that are named, but not there."""
        return [name for name in self.named if name not in self.there]


@cache
def read_synonyms(path: Path) -> Synonyms:
    """Return the object of each synonym, which is one word or more. A line's first synonym names its object."""
    lines = [[word.strip() for word in line.lower().split(",")] for line in path.read_text("utf-8").splitlines()]
    return {tuple(word.split()): line[0] for line in lines for word in line if word}


def objects_of(caption: str, synonyms: Synonyms) -> list[str]:
    """Return the object of each mention in a caption. Of several synonyms at a place, the longest counts."""
    words = [word.strip(".,!?;:'\"()") for word in caption.lower().split()]
    longest, found, place = max(map(len, synonyms)), [], 0
    while place < len(words):
        for count in range(longest, 0, -1):
            *first, last = words[place:place + count]
            forms = (last, last.removesuffix("s"), last.removesuffix("es"))
            if name := next((synonyms[key] for form in forms if (key := (*first, form)) in synonyms), None):
                found.append(name)
                break
        place += count  # 1 where nothing is found
    return found


def chair(document: dict, answers: list[str]) -> dict[str, Named]:
    """Return what each measure takes of a line of chair.json, {"image": "a.jpg", "objects": ["dog"]}."""
    named = Named(objects_of(answers[0], read_synonyms(Path("synonyms.txt"))), document["objects"])
    return dict.fromkeys(("chair_i", "chair_s", "recall"), named)


def chair_i(found: list[Named]) -> float:
    """Return the share of mentions that name what is not there."""
    return sum(len(one.hallucinated) for one in found) / max(sum(len(one.named) for one in found), 1)


def chair_s(found: list[Named]) -> float:
    """Return the share of captions that name something that is not there."""
    return sum(bool(one.hallucinated) for one in found) / len(found)


def recall(found: list[Named]) -> float:
    """Return the share of the images' objects that their captions name."""
    return sum(name in one.named for one in found for name in one.there) / max(sum(len(one.there) for one in found), 1)
