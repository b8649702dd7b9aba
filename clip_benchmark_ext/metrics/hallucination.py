"""Count nouns, colours and relations in captions that the references have (recall) or lack (hallucination).

A word in a caption and in none of its references is hallucinated, as in CHAIR (Rohrbach et al. 2018, arXiv 1809.02156).
The lists are short: words of the built-in scenes and the most frequent ones of Flickr8k, without synonyms. So use the
rates to compare captioners, as they mean little by themselves.
"""
import re
from collections.abc import Mapping, Sequence

from open_clip_mdc.scenes.drawing import OUTLINES

from .repeats import repeated_words

COLOURS = "black white red blue brown green yellow pink purple orange tan grey".split()
NOUNS = ("man woman boy girl dog child person baby lady ball bike car boat bench tree table building street beach "
         "field pool mountain river lake camera hat shirt jacket frisbee toy stick rock wall fence skateboard "
         "surfboard horse cat bird wave hill road ramp swing slide").split()
RELATIONS = ("left of, right of, up above, down below, in front of, on top of, out of, away from, over, behind, under, "
             "up, down, into, beneath, inside, outside, above, below, toward, off, towards, onto, larger than, "
             "smaller than, west of, north of, northwest of, northeast of").split(", ")
PLURALS = dict(pair.split(":") for pair in ("men:man women:woman children:child people:person ladies:lady babies:baby "
                                            "beaches:beach benches:bench gray:grey").split())
KINDS = {"colours": COLOURS, "nouns": [*NOUNS, *OUTLINES], "relations": RELATIONS}
PATTERNS = {kind: re.compile(r"\b(?:" + "|".join(sorted(words, key=len, reverse=True)) + r")\b")
            for kind, words in KINDS.items()}
SINGULARS = PLURALS | {f"{noun}s": noun for noun in KINDS["nouns"]}


def normal(caption: str) -> str:
    return " ".join(caption.lower().split())


def named(caption: str) -> dict[str, set[str]]:
    text = re.sub(r"[a-z]+", lambda word: SINGULARS.get(word[0], word[0]), caption.lower())
    return {kind: set(pattern.findall(text)) for kind, pattern in PATTERNS.items()}


Measured = tuple[dict, dict, dict]  # metrics, their values per image, and the weights of these in the mean


def metrics(captions: Mapping[str, str], references: Mapping[str, Sequence[str]],
            phrase: str | None = None) -> Measured:
    """Return the metrics of captions by image:

        hallucinating_captions    share of captions with a noun or colour that no reference of the image has
        hallucinated_words        share of nouns and colours that no reference of the image has
        recall_KIND               share of the references' words of a kind that the caption has
        repeated_words            mean number of words that stand twice in a row
        exact_match               share of captions that equal a reference, except for letter case and spaces
        phrase_recall             share of captions with the phrase, of images with a reference that has it
        phrase_false_alarms       share of captions with the phrase, of the other images

    Shares over no words are left out.
    """
    rows = []  # of each image, a count and the number that it is a share of
    for image, caption in captions.items():
        mine, texts = named(caption), references[image]
        true = {kind: set().union(*(named(text)[kind] for text in texts)) for kind in KINDS}
        false = sum(len(mine[kind] - true[kind]) for kind in ("nouns", "colours"))
        rows.append({
            "hallucinating_captions": (false > 0, 1),
            "hallucinated_words": (false, len(mine["nouns"]) + len(mine["colours"])),
            "repeated_words": (repeated_words(caption), 1),
            "exact_match": (normal(caption) in map(normal, texts), 1),
            **{f"recall_{kind}": (len(mine[kind] & true[kind]), len(true[kind])) for kind in KINDS}})
    columns = {name: ([count / of if of else 0.0 for count, of in column], [float(of) for _, of in column])
               for name in rows[0] if (column := [row[name] for row in rows])}
    if phrase is not None:
        pattern = re.compile(rf"\b{re.escape(phrase.lower())}\b")
        found = [float(bool(pattern.search(caption.lower()))) for caption in captions.values()]
        true = [float(any(pattern.search(text.lower()) for text in references[image])) for image in captions]
        columns |= {"phrase_recall": (found, true), "phrase_false_alarms": (found, [1 - x for x in true])}
    columns = {name: column for name, column in columns.items() if any(column[1])}
    means = {name: sum(v * w for v, w in zip(*column, strict=True)) / sum(column[1])
             for name, column in columns.items()}
    return means, *({name: column[i] for name, column in columns.items()} for i in (0, 1))
