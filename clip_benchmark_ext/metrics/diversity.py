"""Measure the diversity of several captions per image (--samples): Div-n, mBLEU-4, distinct and novel captions.

Div-n is the number of distinct n-grams divided by the number of words in all captions of an image, averaged over
images. mBLEU-4 is the mean BLEU-4 of one caption against the others of its image, so that less is more diverse (Shetty
et al. 2017, arXiv 1703.10476). Punctuation is no word. Nonsense is diverse too, so compare models at equal CIDEr.
"""
from collections.abc import Mapping
from statistics import fmean

from pycocoevalcap.bleu.bleu import Bleu

from open_clip_mdc.data.captions import captioned
from open_clip_mdc.data.paths import is_shard
from open_clip_mdc.data.shards import find_shards, read_samples
from open_clip_mdc.data.text import read_lines

from .caption_metrics import Captions, plain_words
from .hallucination import normal


def div(captions: Captions, n: int) -> float:
    """Return the share of distinct n-grams, of captions whose words stand between spaces."""
    words = [caption.split() for caption in captions]
    grams = {tuple(text[i:i + n]) for text in words for i in range(len(text) - n + 1)}
    return len(grams) / max(sum(map(len, words)), 1)


def m_bleu(samples: Mapping[str, Captions]) -> float:
    count = len(next(iter(samples.values())))
    scores = []
    for k in range(count):
        candidates = {image: [captions[k]] for image, captions in samples.items()}
        others = {image: [*captions[:k], *captions[k + 1:]] for image, captions in samples.items()}
        scores.append(Bleu(4).compute_score(others, candidates, verbose=0)[0][3])
    return fmean(scores)


def read_train_captions(path: str) -> set[str]:
    """Return all captions of training shards (KEY.txt), or of a text file with one per line, normalised."""
    if not is_shard(path):
        texts = read_lines(path)
    else:
        samples = (sample for shard in find_shards(path) for sample in read_samples(shard, ("txt",)))
        texts = [text for _, captions in captioned(samples, with_image=False) for text in captions]
    found = {normal(text) for text in texts if text.strip()}
    if not found:
        raise ValueError(f"--train_captions {path} holds no caption")
    return found


def metrics(samples: Mapping[str, Captions], train: set[str] | None = None) -> tuple[dict, dict]:
    """Return the metrics of two or more captions per image, and values per image for those that are means over images.

    They are div_1, div_2, mBLEU_4 (None, with the reason, if no caption has four words), `distinct_captions` (the share
    of distinct ones among an image's) and, with `train`, `novel_captions` (the share that is not among training
    captions).
    """
    words = {image: [plain_words(caption) for caption in captions] for image, captions in samples.items()}
    normalised = [[normal(caption) for caption in captions] for captions in samples.values()]
    of_images = {
        **{f"div_{n}": [div(captions, n) for captions in words.values()] for n in (1, 2)},
        "distinct_captions": [len(set(captions)) / len(captions) for captions in normalised],
    }
    if train is not None:
        of_images["novel_captions"] = [fmean(caption not in train for caption in captions) for captions in normalised]
    found = {name: fmean(values) for name, values in of_images.items()}
    if any(len(caption.split()) >= 4 for captions in words.values() for caption in captions):
        return {**found, "mBLEU_4": m_bleu(words)}, of_images
    return {**found, "mBLEU_4": None, "mBLEU_4_missing": "no caption has four words"}, of_images
