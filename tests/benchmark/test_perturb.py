"""Claims about ARO's orders: how words are perturbed, and that perturbations are made once and frozen."""
import random
from itertools import permutations

import pytest
from conftest import picture, read_json, write_json

from clip_benchmark_ext.datasets import perturb
from clip_benchmark_ext.selection_datasets import build_dataset

TAGS = {"a": "DT", "the": "DT", "big": "JJ", "red": "JJ", "dog": "NN", "cat": "NN", "mats": "NNS", "sees": "VBZ",
        "on": "IN", "two": "CD"}


def tag_by_hand(text):
    return [(word, TAGS.get(word.lower(), ".")) for word in text.replace(".", " .").split()]


def test_pre_caption_lowers_cuts_and_drops_the_listed_punctuation_only():
    assert perturb.pre_caption('  A "Big" dog.  (Two!) #3: it\'s, *here*; ~now ') == "a big dog two 3 it's, here now"
    assert perturb.pre_caption("w " * 31) == " ".join("w" * 30)


@pytest.mark.parametrize("text, tokens", [
    ("A dog's ball, isn't it?", "A dog 's ball , is n't it ?"),
    ("two cats.", "two cats ."),
    ('A "stop" sign, 3.5 feet (high)', "A `` stop '' sign , 3.5 feet ( high )"),
    ("black-and-white dogs' o'clock", "black-and-white dogs ' o'clock"),
    ("it's 10:30; they cannot", "it 's 10:30 ; they can not"),
    ("Hi. It runs.", "Hi . It runs ."),
    ("a sign 'red' here", "a sign ' red ' here"),
    ("can't WON'T we're", "ca n't WO N'T we 're"),
    ("", ""),
])
def test_captions_are_split_as_the_penn_treebank_does(text, tokens):
    """The expected words follow from the treebank's rules. Its quotes are `` and ''."""
    pytest.importorskip("nltk")
    assert perturb.treebank_tokenizer()(text) == tokens.split()


def orders(*parts: str) -> list[str]:
    return [" ".join(order) for order in permutations(parts)]


SHUFFLED = {  # a function of perturb, its argument, and all that may come of it
    "shuffle_nouns_and_adj": (tag_by_hand("the big dog sees a red cat on mats"), {
        f"the {j} {x} sees a {k} {y} on {z}" for j, k in permutations(("big", "red"))
        for x, y, z in permutations(("dog", "cat", "mats"))}),
    "shuffle_allbut_nouns_and_adj": (tag_by_hand("the big dog sees a cat"), {
        f"{x} big dog {y} {z} cat" for x, y, z in permutations(("the", "sees", "a"))}),
    "shuffle_within_trigrams": ("a b c d e".split(), {f"{x} {y}" for x in orders(*"abc") for y in orders(*"de")}),
    "shuffle_trigrams": ("a b c d e f g".split(), set(orders("a b c", "d e f", "g"))),
}


@pytest.mark.parametrize("name", SHUFFLED)
def test_a_shuffle_gives_each_of_its_orders_and_no_other(name):
    tokens, expected = SHUFFLED[name]
    rng = random.Random(0)
    assert {getattr(perturb, name)(tokens, rng) for _ in range(600)} == expected


def order_folder(root, part="coco_order"):
    pytest.importorskip("nltk")
    file, image = {"coco_order": ("coco_karpathy_test.json", "val2014/COCO_1.png"),
                   "flickr30k_order": ("flickr30k_test.json", "flickr30k-images/1.png")}[part]
    picture(root / image, 7)
    rows = [{"image": image, "caption": ["The big dog sees a red cat on two mats.", "A cat on the dog."]},
            {"image": image, "caption": ["Two red mats"]}]
    write_json(root / file, rows)
    return root / f"{part}_perturbations.json"


@pytest.mark.parametrize("part", ["coco_order", "flickr30k_order"])
def test_aro_order_has_one_case_per_caption_with_five_orders_of_its_words(tmp_path, part):
    frozen = order_folder(tmp_path, part)
    dataset = build_dataset(f"aro/{part}", tmp_path, tagger=tag_by_hand)
    assert len(dataset) == 3 and dataset.cases[1].key.endswith("1.png#1")
    _, captions = dataset[0]
    assert captions[0] == "the big dog sees a red cat on two mats"
    assert [sorted(text.split()) for text in captions] == [sorted(captions[0].split())] * 5
    assert dataset.facts["perturbations"] == str(frozen) and len(dataset.facts["perturbations_sha256"]) == 64


def test_perturbations_are_made_once_and_then_only_read(tmp_path):
    frozen = order_folder(tmp_path)
    first = build_dataset("aro/coco_order", tmp_path, tagger=tag_by_hand)
    written = frozen.read_bytes()
    again = build_dataset("aro/coco_order", tmp_path, tagger=pytest.fail)
    assert again.cases == first.cases and again.facts == first.facts and frozen.read_bytes() == written
    frozen.unlink()
    build_dataset("aro/coco_order", tmp_path, tagger=tag_by_hand)
    assert frozen.read_bytes() == written  # the same seed makes the same file
    assert list(tmp_path.glob(".*")) == []  # no partial file


@pytest.mark.parametrize("change, message", [
    (lambda content: content["cases"][0]["perturbed"].__setitem__(0, "an easier negative"), "was changed after"),
    (lambda content: content.update(seed=2), "was changed after"),
    (lambda content: content.update(sha256="0" * 64), "was changed after"),
    (lambda content: content.pop("sha256"), "not a file of frozen perturbations"),
    (lambda content: content.update(cases=3), "not a file of frozen perturbations"),
])
def test_a_changed_perturbation_file_is_refused(tmp_path, change, message):
    frozen = order_folder(tmp_path)
    build_dataset("aro/coco_order", tmp_path, tagger=tag_by_hand)
    content = read_json(frozen)
    change(content)
    write_json(frozen, content)
    with pytest.raises(ValueError, match=message):
        build_dataset("aro/coco_order", tmp_path, tagger=tag_by_hand)
