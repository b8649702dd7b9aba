"""Compute the metrics of cloze questions from their answers.

    cloze_acc_KIND      share of questions whose word was filled in right, for models that can fill in
    choice_acc_KIND     share of questions whose word was the most probable of its list
    majority_acc_KIND   share of questions with the most frequent answer, the accuracy of always giving it
    questions_KIND      number of questions

Rows "_blind" are given the null image. "_debiased" is the choice by log p(word | image) - alpha * log p(word). Names
without a kind are means over the kinds.
"""
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from ..datasets.cloze_words import same
from .selection_metrics import debiased_score


class Answer(NamedTuple):
    """A cloze question with the model's answers, given the image and given the null image (blind)."""

    kind: str
    answer: str  # the right word
    filled: str | None  # None if the model cannot fill in
    filled_blind: str | None
    scores: Sequence[float]  # of the words of the list of its kind
    scores_blind: Sequence[float]


def outcomes(one: Answer, words: Sequence[str], alpha: float) -> dict[str, bool]:
    """Return whether a question was answered right, by metric."""
    rows = {"": one.scores, "_blind": one.scores_blind,
            "_debiased": debiased_score(one.scores, one.scores_blind, alpha)}
    found = {f"choice_acc{row}": same(words[int(np.argmax(scores))]) == one.answer for row, scores in rows.items()}
    if one.filled is not None:
        found |= {"cloze_acc": same(one.filled) == one.answer, "cloze_acc_blind": same(one.filled_blind) == one.answer}
    return found


def cloze_metrics(answers: Mapping[str, Sequence[Answer]], lists: Mapping[str, Sequence[str]],
                  alpha: float = 1.0) -> tuple[dict, dict]:
    """Return the metrics of answers by image, and items for `results.write_items`."""
    kinds = [kind for kind in lists if any(one.kind == kind for own in answers.values() for one in own)]
    if not kinds:
        raise ValueError(f"no caption has a word of the lists {', '.join(lists)}: give others by --cloze_words")
    metrics, values, weights, means = {}, {}, {}, defaultdict(list)
    for kind in kinds:
        by_image = [[one for one in own if one.kind == kind] for own in answers.values()]
        all_answers = Counter(one.answer for own in by_image for one in own)
        metrics[f"questions_{kind}"] = all_answers.total()
        right = [[outcomes(one, lists[kind], alpha) for one in own] for own in by_image]
        names = next(own[0] for own in right if own)
        for name in names:
            named = name.replace("_acc", f"_acc_{kind}")
            values[named] = [fmean(o[name] for o in own) if own else 0.0 for own in right]
            weights[named] = [float(len(own)) for own in right]
            metrics[named] = fmean(o[name] for own in right for o in own)
            means[name].append(metrics[named])
        metrics[f"majority_acc_{kind}"] = majority = max(all_answers.values()) / all_answers.total()
        means["majority_acc"].append(majority)
    return ({name: fmean(numbers) for name, numbers in means.items()} | metrics,
            {"images": list(answers), "values": values, "weights": weights})
