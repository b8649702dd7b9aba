"""Claims about the rich world: captions are true, swaps are false, a probe has one property, a share is noise."""
import gzip
import hashlib
import json
import re
from collections import Counter

import clip_benchmark.datasets.builder as clip_benchmark_datasets
import numpy as np
import pytest
from conftest import REPO, contents, read_json, run_tool
from open_clip.tokenizer import SimpleTokenizer
from shard_files import samples

from open_clip_mdc.scenes import rich as rich_world
from open_clip_mdc.scenes.drawing import render
from open_clip_mdc.scenes.rich import World
from open_clip_mdc.text import vocabulary as bpe

COLOURS = "red green blue yellow orange purple pink brown white black".split()
SHAPES = "circle square triangle star diamond cross ring heart".split()
NOUN = rf"(?:an? )?((?:(?:small|large) )?(?:{'|'.join(COLOURS)}) (?:{'|'.join(SHAPES)}))"
RELATIONS = {"left of": "left", "west of": "left", "up above": "above", "north of": "above",
             "northwest of": "above left", "northeast of": "above right"}
RELATION = rf"({'|'.join(RELATIONS)})"
PLACE = r"in the (top|bottom) (left|right) corner"
NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4}
NUM = {"train": 60, "val": 20, "probe": 120, "pairs": 30}


def flags(out, *more):
    return ["scenes", "--out", out, "--world", "rich", *(f"--num-{name}={n}" for name, n in NUM.items()), *more]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "rich"
    run_tool(flags(out, "--noise", "0.5"))
    return out


def drawn(count):
    world = World()
    for index in range(count):
        rng = world.rng("test", index)
        yield rich_world.draw_scene(world, rng), rng


def named(noun, objects):
    """Return the object that a noun names, or None. It never names two. A medium object has no word for its size."""
    *size, colour, shape = noun.split()
    found = [o for o in objects if (o["colour"], o["shape"]) == (colour, shape)]
    assert len(found) < 2
    return found[0] if found and (size or ["medium"]) == [found[0]["size"]] else None


def halves(item):
    """Return whether an object is in the lower half and in the right half."""
    return item["y"] > 0.5, item["x"] > 0.5


def holds(a, relation, b):
    """By the halves of the image alone."""
    (low_a, right_a), (low_b, right_b) = halves(a), halves(b)
    level, in_line = low_a == low_b, right_a == right_b
    return {"left": level and right_b > right_a, "above": in_line and low_b > low_a,
            "above left": low_b > low_a and right_b > right_a,
            "above right": low_b > low_a and right_b < right_a}[relation]


def place_of(item):
    low, right = halves(item)
    return f"in the {'bottom' if low else 'top'} {'right' if right else 'left'} corner"


def is_true(text, scene):
    """Return whether everything that a sentence says is true. At least one thing must be understood."""
    objects, said = scene["objects"], []
    for noun in re.findall(NOUN, text):
        said.append(named(noun, objects) is not None)
    if not all(said):
        return False
    if related := re.search(rf"{NOUN} (?:is )?{RELATION} {NOUN}", text):
        said.append(holds(named(related[1], objects), RELATIONS[related[2]], named(related[3], objects)))
    elif place := re.search(PLACE, text):
        said.append(place[0] == place_of(named(re.search(NOUN, text)[1], objects)))
    if ground := re.search(r"(light|dark)", text):
        said.append(ground[1] == scene["background"])
    if number := re.search(r"\b(one|two|three|four) shapes?\b", text):
        said.append(NUMBERS[number[1]] == len(objects))
    if same := re.search(rf"{NOUN} has the same colour as {NOUN}", text):
        said.append(same[1].split()[-2] == same[2].split()[-2])
    return all(said) if said else text == "one can see a shape" and len(objects) == 1


def as_dict(scene):
    return {"objects": [vars(item) for item in scene.objects], "background": scene.background}


def test_the_world_stays_what_it_was():
    """Published numbers are about these scenes and pairs."""
    digest, world = hashlib.sha256(), World()
    for scene, rng in drawn(60):
        digest.update(repr((as_dict(scene), rich_world.captions(scene, rng), rng.random())).encode())
    for index in range(60):
        digest.update(repr(rich_world.draw_pair(world, world.rng("pairs", index))).encode())
    assert digest.hexdigest()[:16] == "2fb76e13168ff54b"


def test_all_that_captions_say_is_true_in_7_to_40_tokens_of_clip():
    clip, short, long = SimpleTokenizer(), Counter(), Counter()
    for scene, rng in drawn(400):
        texts, facts = rich_world.captions(scene, rng), as_dict(scene)
        for text in (texts["caption"], *texts["captions"], *texts["long_caption"].removesuffix(".").split(". ")):
            assert is_true(text, facts), (text, facts)
        for lengths, text in ((short, texts["caption"]), (long, texts["long_caption"])):
            lengths[len(clip.encode(text)) + 2] += 1
            assert 5 <= len(clip.encode(text)) <= 38
    assert len(short) > 8 and len(long) > 12 and max(short) < 20 < max(long)


def test_pixels_have_the_colour_of_the_object_that_is_there():
    for scene, rng in drawn(60):
        pixels = np.asarray(render(scene, 96, rng)).astype(int)
        for item in scene.objects:
            x, y = round(96 * item.x), round(96 * item.y)
            if item.shape == "ring":
                assert pixels[y, x].max() - pixels[y, x].min() < 30  # the grey ground
            else:
                distances = {name: np.abs(pixels[y, x] - tone).sum() for name, tone in rich_world.COLOURS.items()}
                assert min(distances, key=distances.get) == item.colour


def test_pairs_differ_by_the_swap_alone_and_are_false():
    world = World()
    for index in range(200):
        scene, true, false = rich_world.draw_pair(world, world.rng("pairs", index))
        assert set(false) == {"swap_att", "swap_obj", "replace_rel"} and is_true(true, as_dict(scene))
        for name, text in false.items():
            assert not is_true(text, as_dict(scene)), (name, text)
            if name != "replace_rel":
                assert Counter(re.sub(r"\ban\b", "a", text).split()) == Counter(re.sub(r"\ban\b", "a", true).split())
            assert len(text.split()) == len(true.split())
        swapped = {re.search(rf"{NOUN}.*?{NOUN}", text).groups() for text in (true, false["swap_obj"])}
        assert len(swapped) == 2 and len({frozenset(pair) for pair in swapped}) == 1


def test_a_share_of_training_captions_is_noise_and_of_nothing_else(root, tmp_path):
    clip = SimpleTokenizer()
    run_tool(flags(tmp_path / "clean"))
    for split in ("train", "train-long", "val", "val-long"):
        noisy, clean = (samples(*sorted((folder / split).glob("*.tar"))) for folder in (root, tmp_path / "clean"))
        assert list(noisy) == list(clean)
        key = "long_caption" if split.endswith("long") else "caption"
        wrong = 0
        for name, sample in noisy.items():
            assert sample["png"] == clean[name]["png"] and sample["json"] == clean[name]["json"]
            assert clean[name]["txt"].decode() == json.loads(sample["json"])[key]
            wrong += sample["txt"] != clean[name]["txt"]
            assert 5 <= len(clip.encode(sample["txt"].decode())) <= 38
        assert (0.3 * len(noisy) < wrong < 0.7 * len(noisy)) if split.startswith("train") else wrong == 0
    assert len(read_json(root / "train/sizes.json")) == 8


def test_many_processes_write_the_same_bytes(root, tmp_path):
    run_tool(flags(tmp_path / "two", "--jobs", "2", "--noise", "0.5"))
    one, two = contents(root), contents(tmp_path / "two")
    assert len(one) > 40 and one == two


def probe_answer(name, objects):
    """Return the answer that follows from the coordinates."""
    a, *more = objects
    if name == "relation":
        b, = more
        return next(phrase for phrase, relation in RELATIONS.items() if holds(a, relation, b))
    if name == "count":
        return {n: word for word, n in NUMBERS.items()}[len(objects)]
    assert not more
    return place_of(a) if name == "position" else a[name]


@pytest.mark.parametrize("name, classes", [("colour", 10), ("shape", 8), ("size", 3), ("count", 4), ("position", 4),
                                           ("relation", 4)])
def test_a_probe_asks_for_one_property_and_the_others_vary(root, name, classes):
    folder, seen = root / f"probe-{name}", set()
    for split in ("train", "test"):
        dataset = clip_benchmark_datasets.build_wds_dataset("rich", lambda image: image, split, str(folder))
        assert len(dataset.classes) == classes and dataset.templates[0].format(c=dataset.classes[0])
        rows, world = list(dataset), World()
        assert len(rows) == NUM["probe"]
        for index, (image, label) in enumerate(rows):
            scene, again = rich_world.PROBES[f"probe-{name}"].draw(world, world.rng(f"probe-{name}-{split}", index))
            assert again == label and image.size == (32, 32)
            objects = as_dict(scene)["objects"]
            assert probe_answer(name, objects) == dataset.classes[label]
            seen.update(tuple(item[k] for k in ("colour", "shape", "size")) for item in objects)
        counts = Counter(label for _, label in rows)
        assert len(counts) == classes and max(counts.values()) < 2.5 * NUM["probe"] / classes  # chance is 1 / classes
    assert len(seen) > 20 and {k for *_, k in seen} >= {"small", "large"}


def test_every_word_is_one_token_and_the_committed_merges_are_the_ones_this_code_makes(tmp_path):
    words = rich_world.caption_words()
    bpe.write(tmp_path / "made", words)
    committed = REPO / "model_configs/rich_bpe.txt.gz"
    assert gzip.decompress((tmp_path / "made").read_bytes()) == gzip.decompress(committed.read_bytes())
    clip, small = SimpleTokenizer(), SimpleTokenizer(bpe_path=str(committed))
    assert all(len(tokenizer.encode(word)) == 1 for word in words for tokenizer in (clip, small))
    for scene, rng in drawn(100):
        texts = rich_world.captions(scene, rng)
        assert {*rich_world.words(texts["caption"]), *rich_world.words(texts["long_caption"])} <= set(words)
    for name in ("ViT-Ti-8-rich", "ViT-S-16-128"):
        config = read_json(REPO / f"model_configs/{name}.json")
        assert config["text_cfg"]["vocab_size"] == small.vocab_size
