"""Claims about cloze questions: which words are hidden, and how answers of models are counted."""
from io import BytesIO
from pathlib import Path

import pytest
import torch
from captioned import flags
from conftest import png, write_json
from models import captioned_webdataset, evaluate

from clip_benchmark_ext.datasets import cloze_words
from clip_benchmark_ext.datasets.cloze_words import CLOSED, Question, frequent_nouns, frequent_verbs, questions
from clip_benchmark_ext.metrics.cloze_metrics import Answer, cloze_metrics
from clip_benchmark_ext.table import markdown
from clip_benchmark_ext.tasks import cloze
from open_clip_mdc.data.images import decode_image
from open_clip_mdc.integration.checkpoints import load

WORDS = {"colour": ["red", "blue", "grey", "gray"], "relation": ["left of", "up above"]}
CAPTIONS = ["a red square left of a blue star", "two grey dogs in the Snow .", "A man up above the sea, in red"]


def test_the_first_word_of_each_kind_is_asked_for_and_nothing_within_another_word():
    lists = CLOSED | {"relation": ["left", "left of"]}
    asked = {question.kind: question.word for question in questions("A one-eyed Red dog left of two reds", lists)}
    assert asked == {"colour": "Red", "number": "two", "relation": "left of"}
    assert questions("rednecks atone", CLOSED) == []
    (question,) = questions("a RED, red dog", {"colour": ["red", "blue"]})
    assert question == Question("colour", "a RED, red dog", 2, 5) and question.fill("blue") == "a blue, red dog"


def test_nouns_and_verbs_are_found_by_where_they_stand():
    captions = ["a dog is running on the grass .", "two small dogs and a red ball", "the boy wearing a hat",
                "a building with a dog", "dog running in a park"] * 20
    assert frequent_verbs(captions) == ["running", "wearing"]  # no building
    assert set(frequent_nouns(captions)) == {"dog", "ball", "boy", "hat", "park", "grass"}  # no small, once no dogs
    assert frequent_nouns(captions[:5]) == []  # too few of each
    assert frequent_nouns(captions)[0] == "dog"  # 60 of them, and 20 of the others


def test_the_numbers_of_answers_that_were_counted_by_hand():
    lists = {"colour": ["red", "blue", "grey", "gray"], "number": ["one", "two"]}
    answers = {
        "a": [Answer("colour", "red", "red", "blue", [3, 2, 1, 1], [4, 2, 1, 1]),
              Answer("colour", "gray", "GREY", "red", [1, 2, 9, 3], [5, 2, 5, 1])],
        "b": [Answer("number", "two", "one", "two", [2, 1], [3, 1])],
        "c": []}
    metrics, items = cloze_metrics(answers, lists)
    assert metrics.items() >= {
        "questions_colour": 2, "questions_number": 1, "cloze_acc_colour": 1, "cloze_acc_colour_blind": 0,
        "choice_acc_colour": 1, "choice_acc_colour_blind": 0.5,
        "choice_acc_colour_debiased": 0.5,  # red's are -1, 0, 0, 0; grey's -4, 0, 4, 2
        "cloze_acc_number": 0, "choice_acc_number_debiased": 1,  # -1, 0
        "majority_acc_colour": 0.5, "majority_acc_number": 1,
        "cloze_acc": 0.5, "choice_acc": 0.5, "majority_acc": 0.75}.items()
    assert items["images"] == ["a", "b", "c"] and items["weights"]["cloze_acc_colour"] == [2, 0, 0]
    assert items["values"]["choice_acc_colour_blind"] == [0.5, 0, 0]
    chosen, _ = cloze_metrics({"b": [answers["b"][0]._replace(filled=None)]}, lists)
    assert not any(name.startswith("cloze") for name in chosen) and chosen["choice_acc_number"] == 0
    with pytest.raises(ValueError, match="no caption has a word of the lists colour, number"):
        cloze_metrics({"c": []}, lists)


def by_hand(model, tokenizer, image, question, words):
    """Each word's log p given all other tokens, from the plain `model.logits`, and the most probable first token."""
    scores, best = [], {}
    for word in (*words, question.word):
        ids = tokenizer.encode(word)
        before, after = (tokenizer.encode(part) for part in (question.caption[:question.start],
                                                             question.caption[question.stop:]))
        text = torch.tensor([[model.vocab_size - 2, *before, *[model.vocab_size] * len(ids), *after,
                              model.vocab_size - 1]])
        with torch.no_grad():
            table = model.logits(image[None], text, torch.ones_like(text, dtype=torch.bool))[0].log_softmax(-1)
        scores.append(sum(table[1 + len(before) + i, token].item() for i, token in enumerate(ids)))
        best[len(ids)] = tokenizer.decode([table[1 + len(before), :model.vocab_size - 2].argmax().item()]).strip()
    return scores[:-1], best.get(1) if len(ids) == 1 else None


@pytest.fixture
def data(tmp_path) -> Path:
    root = captioned_webdataset(tmp_path / "wds", {
        f"k{i}": (i, f"{caption}\na caption without such words\n") for i, caption in enumerate(CAPTIONS)})
    write_json(tmp_path / "words.json", WORDS)
    return root


def metrics_of(runs, data, alias="mdc", *more) -> dict:
    return evaluate(*flags(runs, data, alias), "--task", "cloze", *more)["metrics"]


@pytest.mark.parametrize("alias", ["mdc", "arc"])
def test_answers_are_the_models_given_all_other_words(runs, data, clip_benchmark, monkeypatch, alias):
    answered = {}
    monkeypatch.setattr(cloze, "cloze_metrics", lambda *of: answered.update(of[0]) or cloze_metrics(*of))
    metrics = metrics_of(runs, data, alias, "--cloze_words", data.parent / "words.json")
    assert (metrics["questions_colour"], metrics["questions_relation"]) == (3, 2) and metrics["images"] == 3
    assert list(answered) == ["k0", "k1", "k2"] and metrics["words_colour"] == "red, blue, grey, gray"
    model, transform, tokenizer = load(str(runs / alias))
    filled = 0
    for i, caption in enumerate(CAPTIONS):
        image = transform(decode_image(BytesIO(png(i))))
        for question, answer in zip(questions(caption, WORDS), answered[f"k{i}"], strict=True):
            if alias == "mdc":
                scores, best = by_hand(model, tokenizer, image, question, WORDS[question.kind])
                assert best is None or answer.filled == best
                filled += best is not None
            else:
                texts = tokenizer([question.fill(word) for word in WORDS[question.kind]])
                scores = model.log_likelihood(image[None], texts[None])[0].tolist()
                assert answer.filled is None
            assert answer.scores == pytest.approx(scores, abs=1e-3)
            assert answer.scores_blind != pytest.approx(scores, abs=1e-3)
    assert ("cloze_acc_relation" in metrics) == (alias == "mdc") and filled == 2 * (alias == "mdc")
    assert all(0 <= metrics[f"choice_acc_colour{row}"] <= 1 for row in ("", "_blind", "_debiased"))
    assert Path("items/result.json").exists()


def test_the_table_shows_the_means_over_kinds():
    result = {"dataset": "d", "model": "m", "pretrained": "p", "metrics": {
        "cloze_acc": 0.4, "cloze_acc_blind": 0.2, "choice_acc": 0.5, "choice_acc_blind": 0.3, "majority_acc": 0.25}}
    header, _, row = markdown([result]).splitlines()
    assert header.endswith("| cloze | cloze blind | choice | choice blind | majority |")
    assert row == "| d | m |  | 40.0 | 20.0 | 50.0 | 30.0 | 25.0 |"


def test_the_default_words_are_closed_lists_and_the_data_sets_own(runs, data, clip_benchmark, monkeypatch):
    monkeypatch.setattr(cloze_words, "FEWEST", 1)
    metrics = metrics_of(runs, data)
    assert metrics["words_number"].startswith("one, two") and metrics["questions_preposition"] == 2
    assert "questions_verb" not in metrics and "star" in metrics["words_noun"]
