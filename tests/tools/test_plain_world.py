"""Claims about the plain world: captions are true, negatives are false, and every word is known."""
import gzip
import hashlib
import re
from collections import Counter

import numpy as np
import pytest
from open_clip.tokenizer import SimpleTokenizer
from scene_truth import COMMITTED_BPE, check_colours, coloured, read_caption, read_scene, sentence_is_true

from open_clip_mdc.cli import scenes
from open_clip_mdc.scenes import plain as plain_world
from open_clip_mdc.scenes.plain import World
from open_clip_mdc.text import vocabulary as bpe

WORLDS = [World(), World(sizes=True, seed=1), World(objects=3, seed=2), World(pixels=48, objects=4, sizes=True, seed=3)]


def drawn(world, count=100):
    """Scenes with the random numbers that render them."""
    for index in range(count):
        rng = world.rng("test", index)
        yield plain_world.draw_scene(world, rng), rng


def as_dicts(scene):
    return [vars(item) for item in scene.objects]


@pytest.mark.parametrize("world, expected", [(WORLDS[0], "7d89629023a6b6bc"), (WORLDS[3], "c3c75a0327697662")])
def test_worlds_stay_what_they_were(world, expected):
    """Published numbers are about these scenes. Pixels are left to Pillow, the random numbers behind them are not."""
    digest = hashlib.sha256()
    for scene, rng in drawn(world, 50):
        facts = as_dicts(scene), scene.relation, scene.background, plain_world.long_caption(scene, rng)
        scenes.render(scene, world.pixels, rng)
        negatives = plain_world.negative_captions(scene, *rng.sample(range(world.objects), 2))
        digest.update(repr((facts, negatives, rng.random())).encode())
    assert digest.hexdigest()[:16] == expected


@pytest.mark.parametrize("world", WORLDS)
def test_the_named_colours_are_where_the_objects_are_and_nowhere_else(world):
    for scene, rng in drawn(world, 60):
        image = scenes.render(scene, world.pixels, rng)
        assert image.mode == "RGB" and image.size == (world.pixels, world.pixels)
        assert (np.median(np.asarray(image)) > 128) == (scene.background == "light")
        check_colours(image, as_dicts(scene))


def test_shapes_cover_their_share_of_the_bounding_box():
    world, seen = World(pixels=256), Counter()
    covers = {"circle": np.pi / 4, "square": 1.0, "triangle": 0.5, "star": 0.342}
    for scene, rng in drawn(world, 40):
        colour = coloured(scenes.render(scene, world.pixels, rng))
        for item in scene.objects:
            left, top, right, bottom = (
                round(256 * edge) for edge in (item.x - item.radius, item.y - item.radius, item.x + item.radius,
                                               item.y + item.radius))
            box = colour[max(top - 1, 0):bottom + 1, max(left - 1, 0):right + 1]
            rows, columns = box.any(1).sum(), box.any(0).sum()
            assert box.sum() / (rows * columns) == pytest.approx(covers[item.shape], abs=0.035), item.shape
            seen[item.shape] += 1
    assert set(seen) == set(covers)


@pytest.mark.parametrize("world", WORLDS)
def test_every_sentence_of_a_long_caption_is_true_and_lengths_are_in_range(world):
    tokenizer, kinds = SimpleTokenizer(), set()
    for scene, rng in drawn(world):
        text = plain_world.long_caption(scene, rng)
        sentences = text.removesuffix(".").split(". ")
        assert len(sentences) >= 3
        for sentence in sentences:
            assert sentence_is_true(sentence, as_dicts(scene), scene.background), (sentence, scene)
            kinds.add(re.sub("|".join([*plain_world.COLOURS, *plain_world.SHAPES]), "", sentence))
        assert 40 <= len(tokenizer.encode(text)) + 2 <= 70
    assert len(kinds) > 30


@pytest.mark.parametrize("world", WORLDS)
def test_negatives_are_false_and_are_true_of_some_other_scene(world):
    tested = 0
    for scene, rng in drawn(world, 240):
        i, j = rng.sample(range(world.objects), 2)
        negatives = plain_world.negative_captions(scene, i, j)
        truth = read_scene(as_dicts(scene))
        a, b = scene.objects[i], scene.objects[j]
        if a.colour == b.colour or a.shape == b.shape:
            assert negatives is None
        if negatives is None:
            continue
        tested += 1
        true = plain_world.caption(scene.objects, scene.relation)
        assert len({true, *negatives.values()}) == 4
        for negative in negatives.values():
            relation, names = read_caption(negative)
            assert (relation, names) != truth
            assert len({" ".join(name.split()[-2:]) for name in names}) == world.objects  # as in every true caption
        assert Counter(negatives["swap_att"].split()) == Counter(negatives["swap_obj"].split()) == Counter(true.split())
        assert read_caption(negatives["replace_rel"]) == (({"up above", "left of"} - {truth[0]}).pop(), truth[1])
    assert tested > 80


def test_the_committed_merges_are_the_ones_this_code_makes(tmp_path):
    for name in ("first", "second"):
        bpe.write(tmp_path / name, plain_world.caption_words())
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    assert gzip.decompress((tmp_path / "first").read_bytes()) == gzip.decompress(COMMITTED_BPE.read_bytes())


@pytest.mark.parametrize("world", WORLDS)
def test_scene_texts_use_only_known_words_and_decode_back(world):
    small, known = SimpleTokenizer(bpe_path=str(COMMITTED_BPE)), set(plain_world.caption_words())
    for scene, rng in drawn(world):
        texts = [template.format(c=name) for template in plain_world.TEMPLATES for name in plain_world.CLASS_NAMES]
        for text in [plain_world.caption(scene.objects, scene.relation), plain_world.long_caption(scene, rng), *texts]:
            pieces = re.findall(r"[a-z]+|\.", text)
            assert set(pieces) <= known
            assert len(small.encode(text)) == len(pieces)
            assert small.decode(small.encode(text)).strip() == " ".join(pieces)
