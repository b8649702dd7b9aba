"""Compute the official metrics of the compositionality data sets (Table 2), from scores alone.

    scores = {"plain": [...], "blind": [...], "debiased": [...]}       # any rows, one array per case, dataset order
    metrics, items = selection_metrics(dataset.metric, scores, dataset.cases) # {"text_acc": ..., ...}

An array is [C], the score of each caption, the right ones first. With two images it is [I, C] = [2, 2], the score of
image i with caption c. Higher is better. Names of metrics have the row as a suffix, except for "plain".
docs/evaluation.md has the list. Equal texts within a case get equal scores, so that a noisy estimator cannot win by
chance.

Dimensions: N cases, I images of a case, C captions of a case.
"""
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from ..datasets.readers import Case

TIES_NAMED = 10
MIN_PAIR_CASES = 25  # VG-Attribution officially leaves out pairs of attributes with fewer cases
OF_ALL_ROWS = ("groups", "cases_in_groups", "text_acc_missing")  # names without a suffix

# Features of a caption that may give it away without its meaning.
SURFACES = {
    "full_stop": lambda caption: caption.rstrip().endswith("."),
    "capital": lambda caption: caption.lstrip()[:1].isupper(),
}

Outcomes = np.ndarray  # int [N]: 1 right, 0 a tie at the top, -1 wrong


class Metric(NamedTuple):
    """The official metric of a data set."""

    # By name of the metric: from the outcomes of captions and of images to the cases that count as right.
    shares: dict[str, Callable[[Outcomes, Outcomes], np.ndarray]]
    ties_count_as: str = "wrong"
    groups: Callable[[Mapping[str, int]], set[str]] | None = None  # from cases per group to the groups of the mean
    kind: Callable[[Case], str] | None = None  # the kind of a case, to give the shares by kind too
    # By name of the metric: what cases have in common that count as right only together.
    together: Mapping[str, Callable[[Case], object]] = {}
    statements: bool = False  # True if a case is one caption, true or false (metrics/statements.py)


def debiased_score(conditional: np.ndarray, blind: np.ndarray, alpha: float = 1.0) -> np.ndarray:
    """Return log p(c|i) - alpha * log p(c), which for alpha = 1 is the pointwise mutual information."""
    return np.asarray(conditional, dtype=np.float64) - alpha * np.asarray(blind, dtype=np.float64)


def suffix_of(row: str) -> str:
    return "" if row in ("plain", "cosine") else f"_{row}"


def symmetric_relations() -> frozenset[str]:
    # The 157 relations that ARO's notebook "Replicate ARO! ..." leaves out
    # (github.com/mertyg/vision-language-models-are-bows).
    path = Path(__file__).parents[1] / "aro_symmetric_relations.json"
    return frozenset(json.loads(path.read_bytes()))


def has_same_words(case: Case) -> bool:
    right, *wrong = (sorted(re.findall(r"[\w']+", caption.lower())) for caption in (case.captions[0], *case.wrong))
    return any(words == right for words, caption in zip(wrong, case.wrong, strict=True) if caption != case.captions[0])


def selection_metrics(metric: Metric, scores: Mapping[str, Sequence], cases: Sequence[Case],
                      surfaces: Mapping[str, Callable[[str], object]] = SURFACES) -> tuple[dict, dict]:
    """Return the metrics of one data set (listed in docs/evaluation.md), and items for `results.write_items`.

    Args:
        scores: by row ("plain", "blind", "debiased", ...), an array [C] or [I, C] per case, in the order of `cases`.
        surfaces: by name, a function of a caption whose values are compared.

    Raises ValueError for arrays of another number or shape, or NaN.
    """
    same_words = np.array([has_same_words(case) for case in cases])
    differs = {name: np.array([not {*map(surface, case.wrong)} <= {*map(surface, case.captions[:case.right])}
                               for case in cases]) for name, surface in surfaces.items()}
    metrics = {
        "cases": len(cases),
        "duplicates": sum(case.captions[0] in case.wrong for case in cases),
        "same_words": int(sum(same_words)),
        **{f"{name}_differs": int(sum(marks)) for name, marks in differs.items()},
        "ties_count_as": metric.ties_count_as,
    }
    least, right = 0 if metric.ties_count_as == "right" else 1, {}
    for row, values in scores.items():
        suffix = suffix_of(row)
        arrays = list(_checked(values, cases, row))
        text = np.array([_outcome(array, case.right) for array, case in zip(arrays, cases, strict=True)], dtype=int)
        image = np.array([_outcome(array.T) if array.ndim == 2 else 1 for array in arrays], dtype=int)
        right[suffix] = (text >= least).astype(int).tolist()
        numbers = {name: _mean(share(text, image)) for name, share in metric.shares.items()}
        if row == "debiased":
            numbers["statement_acc"] = _mean(
                [_statements(array, case.right) for array, case in zip(arrays, cases, strict=True)])
        if metric.groups:
            numbers |= _grouped(metric.groups, text == 1, cases)
        if metric.kind:
            kinds = np.array([re.sub(r"\W+", "_", metric.kind(case).lower()) for case in cases])
            numbers |= {f"{name}_{kind}": _mean(share(text, image)[kinds == kind])
                        for name, share in metric.shares.items() for kind in sorted(set(kinds))}
        for name, key in metric.together.items():
            numbers[name] = _mean(pd.Series(text == 1).groupby(pd.Series(list(map(key, cases)))).all())
        metrics |= {name if name in OF_ALL_ROWS else f"{name}{suffix}": number for name, number in numbers.items()}
        if same_words.any():
            metrics[f"same_words_acc{suffix}"] = _mean(text[same_words] == 1)
        metrics |= {f"same_{name}_acc{suffix}": _mean(text[~marks] == 1) for name, marks in differs.items()
                    if marks.any() and not marks.all()}
        tied = [case.key for case, outcome in zip(cases, text, strict=True) if outcome == 0]
        metrics |= {f"ties{suffix}": len(tied), f"tied_cases{suffix}": " ".join(tied[:TIES_NAMED])}
        if any(array.ndim == 2 for array in arrays):
            metrics[f"image_ties{suffix}"] = int((image == 0).sum())
    return metrics, {"images": [case.images[0].name for case in cases], "same_words": same_words.tolist(),
                     **{f"{name}_differs": marks.tolist() for name, marks in differs.items()},
                     **_items(metric, right, cases)}


def _items(metric: Metric, right: Mapping[str, list[int]], cases: Sequence[Case]) -> dict:
    averages = {"": None}  # by average, the weight of each case
    if metric.groups:
        sizes = Counter(case.group for case in cases)
        kept = metric.groups(sizes)
        macro = [(case.group in kept) / sizes[case.group] for case in cases]
        averages = {"": macro, "_micro": [float(case.group in kept) for case in cases], "_macro": macro}
    return {"values": {f"text_acc{average}{suffix}": values for suffix, values in right.items()
                       for average in averages},
            "weights": {f"text_acc{average}{suffix}": weights for suffix in right
                        for average, weights in averages.items() if weights is not None}}


def clip_benchmarks_metrics(scores: Sequence[np.ndarray]) -> dict[str, float]:
    """Return the accuracies that clip_benchmark itself reports, under names of their own.

    They are means over all cases, including those that the official average leaves out. Ties count as right, as the
    right caption is first. `scores` are [C] or [I, C] for each case.
    """
    right = []
    for array in map(np.atleast_2d, scores):
        truth = np.arange(len(array))
        right.append(((array.argmax(1) == truth).all(), (array.argmax(0)[:len(array)] == truth).all()))
    text, image = np.array(right).T
    metrics = {"clip_benchmark_text_acc": _mean(text)}
    if any(array.ndim == 2 for array in scores):  # otherwise there is one image
        metrics |= {"clip_benchmark_image_acc": _mean(image), "clip_benchmark_acc": _mean(text & image)}
    return metrics


# ---- the official metrics


RIGHT = {"text_acc": lambda text, image: text == 1}
PAIRS = Metric(RIGHT)
WINOGROUND = Metric({**RIGHT, "image_acc": lambda text, image: image == 1,
                     "acc": lambda text, image: (text == 1) & (image == 1)})
ORDERS = Metric({"text_acc": lambda text, image: text >= 0, "text_acc_strict": RIGHT["text_acc"]}, "right")
TWO_IMAGES = WINOGROUND._replace(kind=lambda case: case.group)
STATEMENTS = Metric({}, statements=True)
BY_KIND = PAIRS._replace(kind=lambda case: case.group)
PLACES = Metric(RIGHT, kind=lambda case: case.group.split()[1], together={
    "pair_acc": lambda case: (*case.group.split()[::2], case.group.split()[1] in ("left", "right")),
    "set_acc": lambda case: tuple(case.group.split()[::2])})
RELATIONS = Metric({}, groups=lambda sizes: set(sizes) - symmetric_relations())
ATTRIBUTES = Metric({}, groups=lambda sizes: {group for group, count in sizes.items() if count >= MIN_PAIR_CASES})


def _grouped(groups: Callable, correct: np.ndarray, cases: Sequence[Case]) -> dict:
    found = pd.Series(correct).groupby(pd.Series([case.group for case in cases])).agg(["mean", "count"])
    found = found[found.index.isin(groups(dict(found["count"])))]
    sizes = {"groups": len(found), "cases_in_groups": int(found["count"].sum())}
    if found.empty:
        reason = f"the official average keeps none of these {len(cases)} cases"
        logging.warning("text_acc is missing: %s", reason)
        return {**dict.fromkeys(("text_acc", "text_acc_macro", "text_acc_micro")), "text_acc_missing": reason, **sizes}
    macro, micro = _mean(found["mean"].to_numpy()), float(np.average(found["mean"], weights=found["count"]))
    return {"text_acc": macro, "text_acc_macro": macro, "text_acc_micro": micro, **sizes}


def _outcome(array: np.ndarray, right: int = 1) -> int:
    outcomes = []  # of [I, C], the worst of the I images counts, with its right caption on the diagonal
    for image, scores in enumerate(np.atleast_2d(array)):
        fits = slice(image, image + right)
        worst_right, best_wrong = scores[fits].min(), np.delete(scores, fits).max()
        outcomes.append(int(worst_right > best_wrong) - int(worst_right < best_wrong))
    return min(outcomes)


def _statements(array: np.ndarray, right: int) -> float:
    scores = np.atleast_2d(array)  # [I, C]
    image, caption = np.indices(scores.shape)
    fits = (caption >= image) & (caption < image + right)
    return (np.mean(scores[fits] > 0) + np.mean(scores[~fits] <= 0)) / 2


def _checked(values: Sequence, cases: Sequence[Case], row: str) -> Iterator[np.ndarray]:
    if len(values) != len(cases):
        raise ValueError(f"{len(values)} {row} scores for {len(cases)} cases")
    for value, case in zip(values, cases, strict=True):
        array = np.asarray(value, dtype=np.float64)
        shape = (len(case.images),) * (len(case.images) > 1) + (len(case.captions),)
        if array.shape != shape:
            raise ValueError(f"case {case.key}: {row} scores of shape {array.shape}, not {shape}")
        if np.isnan(array).any():
            raise ValueError(f"case {case.key}: a {row} score is NaN")
        yield array[..., [case.captions.index(caption) for caption in case.captions]]


def _mean(values: Sequence) -> float:
    return float(np.mean(values))
