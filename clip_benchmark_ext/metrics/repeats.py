"""Count obvious flaws of captions, which references seldom have.

Punctuation is no word, as in mean_length and CIDEr.

    repeating_captions    share of captions with a word twice in a row
    cut_captions          share of captions whose last word cannot end a sentence
    empty_captions        share of captions without a word
    distinct_words        mean number of different words per caption
"""
from collections.abc import Mapping
from itertools import pairwise
from statistics import fmean

from .caption_metrics import plain_words

# Articles, prepositions that take a noun, and conjunctions, in which captions by people do not end.
LEAD_ON = set("a an the of with and or but while as at into onto from for by his her its their is are to".split())


def repeated_words(caption: str) -> int:
    """Return how many words equal the word before them."""
    return sum(a == b for a, b in pairwise(plain_words(caption).split()))


def metrics(captions: Mapping[str, str]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return the metrics, and their values for each image."""
    words = [plain_words(caption).split() for caption in captions.values()]
    of_images = {
        "repeating_captions": [float(repeated_words(caption) > 0) for caption in captions.values()],
        "distinct_words": [float(len(set(text))) for text in words],
        "empty_captions": [float(not text) for text in words],
        "cut_captions": [float(not LEAD_ON.isdisjoint(text[-1:])) for text in words],
    }
    return {name: fmean(values) for name, values in of_images.items()}, of_images
