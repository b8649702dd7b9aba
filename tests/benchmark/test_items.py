"""Claims about results of single images, which are kept beside a result: their weighted mean is the metric."""
from pathlib import Path

import numpy as np
import pytest
from pycocoevalcap.bleu.bleu import Bleu

from clip_benchmark_ext.datasets.readers import Case
from clip_benchmark_ext.metrics.caption_metrics import score_captions
from clip_benchmark_ext.metrics.selection_metrics import ATTRIBUTES, ORDERS, PAIRS, RELATIONS, selection_metrics


@pytest.mark.parametrize("metric,groups,names", [
    (PAIRS, ["swap"], {"text_acc"}),
    (ORDERS, ["coco_order"], {"text_acc"}),
    (RELATIONS, ["on", "on", "on", "under", "next to"], {"text_acc", "text_acc_macro", "text_acc_micro"}),
    (ATTRIBUTES, ["a_b"] * 3 + ["b_a", "rare_pair"], {"text_acc", "text_acc_macro", "text_acc_micro"}),
])
def test_the_weighted_mean_of_cases_is_the_accuracy(metric, groups, names):
    rng = np.random.default_rng(0)
    cases = [Case(str(i), (Path(f"{i // 2}.jpg"),), ("right", "wrong"), groups[i % len(groups)]) for i in range(130)]
    cases = [case for i, case in enumerate(cases) if case.group != "rare_pair" or i < 100]  # 20 of them
    scores = {row: rng.integers(0, 3, (len(cases), 2)).astype(float) for row in ("plain", "blind")}  # with ties
    metrics, items = selection_metrics(metric, scores, cases)
    assert items["images"][:3] == ["0.jpg", "0.jpg", "1.jpg"]
    assert items["values"].keys() == {name + suffix for name in names for suffix in ("", "_blind")}
    for name, values in items["values"].items():
        weights = items["weights"].get(name, np.ones(len(cases)))
        assert np.average(values, weights=weights) == pytest.approx(metrics[name]), name
    if metric in (RELATIONS, ATTRIBUTES):
        assert metrics["text_acc_macro"] != metrics["text_acc_micro"] and min(items["weights"]["text_acc"]) == 0


def test_the_mean_over_images_is_the_caption_metric(no_java):
    captions = {"7": "a dog runs on the grass", "8": "a man rides a red bike", "9": "two birds"}
    references = {"7": ["a dog is running on grass"], "8": ["a man on a bike", "a red bike"], "9": ["three fish swim"]}
    scored = score_captions(captions, references)
    assert scored.of_images.keys() == {"Bleu_4", "CIDEr", "ROUGE_L"}
    for name in ("CIDEr", "ROUGE_L"):
        values = scored.of_images[name]
        assert len(values) == 3 and np.mean(values) == pytest.approx(scored.scores[name]) and values[2] < values[1]


def test_an_images_value_of_bleu_is_what_the_jackknife_has_of_leaving_it_out(no_java):
    """Against pycocoevalcap's own score of all captions but one."""
    rng = np.random.default_rng(0)
    captions = {i: " ".join(rng.choice([*"uvwxyz"], rng.integers(4, 9))) for i in range(30)}
    references = {i: [" ".join(rng.choice([*"uvwxyz"], rng.integers(5, 10))) for _ in range(3)] for i in captions}

    def score(images) -> float:
        return Bleu(4).compute_score({i: references[i] for i in images}, {i: [captions[i]] for i in images},
                                     verbose=0)[0][3]
    scored = score_captions(captions, references)
    assert scored.scores["Bleu_4"] == pytest.approx(score(captions)) and 0 < scored.scores["Bleu_4"] < 1
    expected = [30 * score(captions) - 29 * score([j for j in captions if j != i]) for i in captions]
    assert scored.of_images["Bleu_4"] == pytest.approx(expected, abs=1e-6)
