"""Claims about retrieval by likelihood, by the real command. Ranks are counted by hand from one pair at a time."""
from pathlib import Path
from unittest.mock import patch

import models
import numpy as np
import pytest
import torch
from conftest import made_images, read_json
from models import WORDS, captioned_webdataset, flags_of, save_clip

from clip_benchmark_ext import resume as resume_module
from clip_benchmark_ext.table import markdown, read_results
from clip_benchmark_ext.tasks import retrieval
from open_clip_mdc.integration.checkpoints import load
from open_clip_mdc.likelihood import log_likelihood as scoring
from open_clip_mdc.likelihood.log_likelihood import mean_image

pytestmark = pytest.mark.usefixtures("clip_benchmark")
CAPTIONS = [[f"a {WORDS[i % 8]} {WORDS[(3 * i + j + i // 8) % 8]}" + " and a star" * j for j in range(1 + i % 3)]
            for i in range(9)]
FLAT = [caption for own in CAPTIONS for caption in own]
OWNER = np.array([i for i, own in enumerate(CAPTIONS) for _ in own])
KS = (1, 3)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Nine images with one to three captions each, in two shards."""
    samples = [(f"key{i}", (i, "\n \n".join([*own, ""]))) for i, own in enumerate(CAPTIONS)]
    return captioned_webdataset(tmp_path_factory.mktemp("data"), dict(samples[:5]), dict(samples[5:]))


@pytest.fixture
def evaluate(runs, data):
    """Return a function that gives the metrics of the captioner `arc`, or of a model that is named in the flags."""
    def evaluated(*flags, alias="arc") -> dict:
        return models.evaluate(*flags_of(runs, "wds/x", data, "--task zeroshot_retrieval --no_amp --recall_k 1 3",
                                         *flags, alias=alias))["metrics"]

    return evaluated


def by_hand(path, method=None) -> tuple[np.ndarray, np.ndarray]:
    """Plain scores [N, C] and blind ones [C], a pair at a time."""
    model, transform, tokenizer = load(str(path))
    images, text = made_images(transform, 9), tokenizer(FLAT)
    blind = mean_image(model, [images])
    plain = [[float(model.log_likelihood(image[None], row[None], method)) for row in text] for image in images]
    return (np.array(plain),
            np.array([float(model.log_likelihood(None, row[None], method, blind=blind)) for row in text]))


def recalls(of_texts: np.ndarray, of_images: np.ndarray, scores: np.ndarray, k: int) -> tuple[float, float]:
    """Text -> image and image -> text, given masks [N, C] of what is listed.

    Whether a right one is listed, and fewer than k of those listed are ahead of the best.
    """
    images = [of_texts[i, c] and (scores[of_texts[:, c], c] > scores[i, c]).sum() < k for c, i in enumerate(OWNER)]
    listed = np.where(of_images, scores, -np.inf)
    best = [row[OWNER == i].max() for i, row in enumerate(listed)]
    texts = [own > -np.inf and (row > own).sum() < k for row, own in zip(listed, best, strict=True)]
    return float(np.mean(images)), float(np.mean(texts))


ALL = np.ones((9, len(FLAT)), dtype=bool)


def shortlist(texts: np.ndarray, images: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Masks [N, C] of the best images of each caption by `texts`, and of the best captions of each image by those."""
    return texts > np.sort(texts, 0)[-size - 1], images > np.sort(images, 1)[:, -size - 1, None]


def assert_listed(metrics: dict, of_texts: np.ndarray, of_images: np.ndarray, whole: dict) -> None:
    """The share of right ones in the shortlists, and how many pairs are scored."""
    assert metrics["image_retrieval_shortlist"] == pytest.approx(np.mean([of_texts[i, c] for c, i in enumerate(OWNER)]))
    assert metrics["text_retrieval_shortlist"] == pytest.approx(
        np.mean([of_images[i, OWNER == i].any() for i in range(9)]))
    assert metrics["pairs"] == (of_texts | of_images).sum() < whole["pairs"]


@pytest.mark.parametrize("alias", ["mdc", "arc"])
def test_recalls_are_those_counted_by_hand_plain_blind_debiased_and_at_every_alpha(runs, evaluate, alias):
    metrics = evaluate("--alpha 0.5 --batch_size 4", alias=alias)
    plain, blind = by_hand(runs / alias)
    for k in KS:
        for suffix, scores in (("", plain), ("_debiased", plain - 0.5 * blind)):
            found = [metrics[f"{way}_retrieval_recall@{k}{suffix}"] for way in ("image", "text")]
            assert found == pytest.approx(recalls(ALL, ALL, scores, k)), (k, suffix)
        best = np.argsort(-blind)[:k]  # whatever the image
        assert metrics[f"text_retrieval_recall@{k}_blind"] == pytest.approx(len(set(OWNER[best])) / 9)
        assert metrics[f"image_retrieval_recall@{k}_debiased"] == metrics[f"image_retrieval_recall@{k}"]
        assert metrics[f"text_retrieval_recall@{k}_by_alpha"] == pytest.approx(
            [recalls(ALL, ALL, plain - alpha * blind, k)[1] for alpha in metrics["alphas"]])
    assert metrics["alphas"][0] == 0 and metrics["alphas"][-1] == 1.5
    _, _, tokenizer = load(str(runs / alias))
    tokens = [len(tokenizer.encode(text)) + 1 for text in FLAT]  # EOT counts
    assert metrics["decoder_passes"] == (9 + 1) * (sum(tokens) if alias == "mdc" else len(FLAT))
    assert (metrics["images"], metrics["captions"], metrics["pairs"]) == (9, len(FLAT), 9 * len(FLAT))
    items = read_json("items/result.json")
    assert items["images"] == [f"key{i}" for i in range(9)]
    for name, values in items["values"].items():
        assert np.average(values, weights=items["weights"].get(name)) == pytest.approx(metrics[name]), name
    heads = [head.strip() for head in markdown(read_results(["result.json"])).splitlines()[0].split("|")]
    for way in ("image", "text"):
        place = heads.index(f"{way} R@1")
        assert heads[place:place + 3] == [f"{way} R@1", f"{way} R@1 blind", f"{way} R@1 debiased"]


def test_a_blind_score_finds_an_image_by_chance():
    """Each image has k of the N captions, whichever they are."""
    scores = torch.randn(12).expand(6, 12)
    positive = torch.eye(6).repeat_interleave(2, 1).bool()
    for k in (1, 4):
        assert retrieval.hits(scores.t(), positive.t(), k).mean() == pytest.approx(k / 6)


def test_a_shortlist_is_reordered_and_nothing_else_is_scored(runs, evaluate, tmp_path):
    name, weights = save_clip(tmp_path)
    theirs = evaluate("--model", name, "--pretrained", weights)
    whole = evaluate()
    everything = evaluate("--clip", f"{name}:{weights}", "--shortlist 100")
    for metric, value in theirs.items():
        assert everything[f"{metric}_clip"] == pytest.approx(value), metric  # by the same code
        assert everything[metric] == whole[metric] and everything[f"{metric}_debiased"] == whole[f"{metric}_debiased"]
    assert everything["image_retrieval_shortlist"] == everything["text_retrieval_shortlist"] == 1

    metrics = evaluate("--clip", f"{name}:{weights}", "--shortlist 4")
    model, transform, tokenizer = load(weights, name)
    with torch.no_grad():
        images = model.encode_image(made_images(transform, 9))
        texts = model.encode_text(tokenizer(FLAT))
    cosines = torch.cosine_similarity(images[:, None], texts[None], dim=-1).numpy()
    of_texts, of_images = shortlist(cosines, cosines, 4)
    plain, blind = by_hand(runs / "arc")
    for suffix, scores in (("", plain), ("_debiased", plain - blind)):
        for k in KS:
            found = [metrics[f"{way}_retrieval_recall@{k}{suffix}"] for way in ("image", "text")]
            assert found == pytest.approx(recalls(of_texts, of_images, scores, k))
    assert_listed(metrics, of_texts, of_images, whole)
    assert metrics["decoder_passes"] == metrics["pairs"] + len(FLAT)  # of ARC, one a pair
    assert metrics["decoder_passes_without_shortlist"] == whole["decoder_passes"]


def test_one_pass_of_the_captioner_makes_a_shortlist_too(runs, evaluate):
    whole = evaluate(alias="mdc")
    everything = evaluate("--shortlist 100", alias="mdc")
    assert all(everything[name] == value for name, value in whole.items() if "recall" in name)
    metrics = evaluate("--shortlist 3", alias="mdc")
    (rough, rough_blind), (plain, _) = by_hand(runs / "mdc", "parallel"), by_hand(runs / "mdc")
    of_texts, of_images = shortlist(rough, rough - rough_blind, 3)
    assert_listed(metrics, of_texts, of_images, whole)
    assert metrics["image_retrieval_recall@1"] == pytest.approx(recalls(of_texts, of_images, plain, 1)[0])
    assert metrics["shortlist_by"] == "parallel" and metrics["scorer"] == "heuristic"
    alone = evaluate("--scorer parallel", alias="mdc")
    for k in KS:
        assert alone[f"text_retrieval_recall@{k}_debiased"] == pytest.approx(
            recalls(ALL, ALL, rough - rough_blind, k)[1])


def test_a_run_that_was_stopped_resumes_and_another_alpha_scores_nothing(evaluate, monkeypatch):
    whole = evaluate("--feature_root other")
    monkeypatch.setattr(retrieval, "PAIRS", 2 * len(FLAT))  # two images at once
    note, calls = resume_module.Journal.note, []

    def stopped(journal, row):
        calls.append(row["batch"])
        if len(calls) == 3:
            raise KeyboardInterrupt
        note(journal, row)

    with patch.object(resume_module.Journal, "note", stopped):
        with pytest.raises(SystemExit, match="interrupted"):
            evaluate()
    (part,) = Path("features").iterdir()
    assert part.name.startswith("test-likelihoods-") and part.name.endswith(".part0")
    with patch.object(retrieval, "log_likelihood", wraps=scoring.log_likelihood) as score:
        assert evaluate("--batch_size 3") == whole
        scored = [call.args[1] for call in score.call_args_list]
        assert [image if image is None else len(image) for image in scored] == [None, 2, 2, 1]  # blind, what was left
        assert not list(Path("features").glob("*.part*"))
        other = evaluate("--alpha 0.3 --recall_k 2")
    assert score.call_count == 4 and other["alpha"] == 0.3 and other["text_retrieval_recall@2_by_alpha"][3] == \
        other["text_retrieval_recall@2_debiased"]
