"""Figures of few or of equal values, and cosines under autocast, against NumPy in float64."""
import json
import math
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from clip_benchmark_ext import results
from clip_benchmark_ext.metrics.mask_metrics import confusion, with_errors
from clip_benchmark_ext.tasks import retrieval
from clip_benchmark_ext.tasks.linear_probe import top_k_accuracy
from clip_benchmark_ext.tasks.probe import accuracy
from clip_benchmark_ext.tasks.zeroshot import classification_metrics
from experiments import judge_answers
from experiments.decodings import with_error
from open_clip_mdc.decoding.clip_guidance import Clip


def test_one_prediction_serves_accuracy_and_recall():
    """The first of equal scores is the prediction. Each class has as many images, so accuracy is the mean recall."""
    generator = np.random.default_rng(0)
    logits, targets = generator.integers(0, 4, (600, 6)), np.arange(600) % 6
    assert (np.sort(logits)[:, -1] == np.sort(logits)[:, -2]).sum() > 200
    found = classification_metrics(torch.tensor(logits).float(), torch.tensor(targets))
    ahead = [sum(x > row[t] or x == row[t] and k < t for k, x in enumerate(row)) for row, t in zip(
        logits, targets, strict=True)]
    for k, name in ((1, "acc1"), (1, "mean_per_class_recall"), (5, "acc5")):
        assert found[name] == pytest.approx(np.mean(np.array(ahead) < k))
    assert top_k_accuracy(torch.tensor([[3.0, 3, 1, 0, 0, 0]]), torch.tensor([1]), (1, 2)) == [0, 1]


def test_one_image_has_no_standard_error_and_says_so(tmp_path):
    mask = torch.tensor([[0, 0, 1], [1, 1, 0]])
    one = confusion(torch.zeros_like(mask), mask, 2)[None]
    for groups in (one, torch.cat([one, torch.zeros_like(one)])):  # the second image is void
        found = with_errors(groups)
        assert found == {"miou": 0.25, "pixel_acc": 0.5, "miou_se_missing": found["pixel_acc_se_missing"],
                         "pixel_acc_se_missing": "fewer than two images have pixels of a class"}
    found |= accuracy("linear", torch.tensor([1]), torch.tensor([1]))
    assert found["linear_acc1"] == 1 and found["linear_se_missing"] == "there is one image"
    results.write(tmp_path / "r.json", {}, found)
    assert json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)["metrics"] == found
    assert math.isclose(accuracy("knn", torch.tensor([1, 0]), torch.tensor([1, 1]))["knn_se"], (0.25 / 2) ** 0.5)


class Towers(torch.nn.Module):
    """Images are their own features, and a text is a row of a table."""

    def __init__(self, table: np.ndarray):
        super().__init__()
        self.table = torch.tensor(table)

    def encode_image(self, image):
        return image

    def encode_text(self, text):
        return self.table[text]


def test_cosines_of_retrieval_are_those_of_float64_under_autocast_too():
    generator = np.random.default_rng(0)
    images, table = (generator.normal(size=(n, 12)).astype(np.float32) for n in (9, 18))
    clip = Clip(Towers(table), None, lambda texts: torch.tensor([*map(int, texts)]))
    loader = [(torch.tensor(images[part]), [[str(2 * n), str(2 * n + 1)] for n in part], part)
              for part in ([0, 1, 2, 3], [4, 5, 6, 7], [8])]  # images, captions, ids
    job = SimpleNamespace(args=Namespace(device="cpu"), load_test=lambda transform: loader)
    with torch.autocast("cpu"):
        ids, texts, cosines = retrieval.read_captions(job, loader, clip)
    images, table = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (images.astype(float), table.astype(float)))
    expected = images @ table.T
    np.testing.assert_allclose(cosines.numpy(), expected, atol=1e-6)
    assert len(texts) == 9 and (retrieval.best(cosines, 3).numpy() == (expected.argsort(1).argsort(1) >= 15)).all()


def test_one_judged_image_has_no_standard_error(tmp_path, capsys):
    summary = judge_answers.summarise([{"chosen": "x", "shown": ["x", "y"]}], ["x", "y"])
    assert summary["selection_rate"] == {"x": 1, "y": 0} and summary["standard_error"] == {"x": None, "y": None}
    assert with_error(np.array([0.5]), "CIDEr") == "0.500"
    assert with_error(np.array([0.0, 2]), "CIDEr") == "1.000 ± 1.000"
    judge_answers.report(tmp_path / "out.jsonl", tmp_path / "r.json", {"systems": ["x", "y"], "model": "m"}, summary)
    assert capsys.readouterr().out.count("unknown") == 2
