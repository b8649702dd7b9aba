"""Claims about the embedded data set: captions are true, negatives are false, upstream reads it, and bytes repeat."""
import colorsys
import gzip
import hashlib
import io
import json
import re
import tarfile
from argparse import Namespace
from collections import Counter
from pathlib import Path

import clip_benchmark.datasets.builder as clip_benchmark_datasets
import numpy as np
import pytest
from open_clip.tokenizer import SimpleTokenizer
from open_clip_train.data import expand_urls, get_wds_dataset
from PIL import Image
from torchvision.transforms import ToTensor

from open_clip_mdc import tools as cli
from open_clip_mdc.data import bpe, plain_world
from open_clip_mdc.data.plain_world import World
from open_clip_mdc.tools import scenes

COMMITTED_BPE = Path(__file__).parents[2] / "model_configs" / "scenes_bpe.txt.gz"
WORLDS = [World(), World(sizes=True, seed=1), World(objects=3, seed=2), World(pixels=48, objects=4, sizes=True, seed=3)]
SMALL = {"num_train": 40, "num_val": 12, "num_probe": 48, "num_pairs": 24}
HUES = {"red": 0.0, "yellow": 0.13, "green": 0.37, "blue": 0.63}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "scenes"
    scenes.build(out, World(), **SMALL)
    return out


def drawn(world, count=100):
    """Scenes with the random numbers that render them."""
    for index in range(count):
        rng = world.rng("test", index)
        yield plain_world.draw_scene(world, rng), rng


def samples(*shards):
    """The members of tar files, grouped by key."""
    grouped = {}
    for shard in shards:
        with tarfile.open(shard) as archive:
            for member in archive:
                key, extension = member.name.split(".")
                grouped.setdefault(key, {})[extension] = archive.extractfile(member).read()
    return grouped


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def read_scene(objects):
    """What the coordinates say: the relation, and the objects' names in the order in which it holds."""
    spread = {axis: max(o[axis] for o in objects) - min(o[axis] for o in objects) for axis in "xy"}
    axis = max(spread, key=spread.get)
    names = [f"{o['size']} {o['colour']} {o['shape']}".strip() for o in sorted(objects, key=lambda o: o[axis])]
    return {"x": "left of", "y": "up above"}[axis], names


def read_caption(text):
    relation = "up above" if " up above " in text else "left of"
    return relation, [name.removeprefix("a ") for name in text.split(f" {relation} ")]


def as_dicts(scene):
    return [vars(item) for item in scene.objects]


def hue_name(pixels):
    """The named colour that is nearest to the mean of pixels [N, 3]."""
    hue, _, _ = colorsys.rgb_to_hsv(*pixels.reshape(-1, 3).mean(0) / 255)
    return min(HUES, key=lambda name: min(abs(hue - HUES[name]), 1 - abs(hue - HUES[name])))


def coloured(image):
    """[H, W], True where a pixel is no grey: the background's noise is grey."""
    pixels = np.asarray(image).astype(int)
    return pixels.max(-1) - pixels.min(-1) > 60


def test_same_seed_writes_the_same_bytes_and_another_seed_does_not(root, tmp_path):
    scenes.build(tmp_path / "again", World(), **SMALL)
    scenes.build(tmp_path / "other", World(seed=1), **SMALL)
    first, again, other = files(root), files(tmp_path / "again"), files(tmp_path / "other")
    assert first == again
    assert {name for name in first if first[name] == other[name]} == {
        "train/sizes.json", "train-long/sizes.json", "val/sizes.json", "val-long/sizes.json", "probe/train/nshards.txt",
        "probe/test/nshards.txt", "probe/classnames.txt", "probe/zeroshot_classification_templates.txt"}


def test_a_larger_set_begins_with_the_smaller_one(root, tmp_path):
    scenes.build(tmp_path / "larger", World(), **{**SMALL, "num_train": 50, "num_val": 20})
    small, large = (samples(*sorted((folder / "train").glob("*.tar"))) for folder in (root, tmp_path / "larger"))
    assert len(large) == 50 and small == {key: large[key] for key in list(large)[:40]}


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


def test_a_world_of_one_to_three_objects_has_captions_of_three_lengths_that_are_all_true(tmp_path, capsys):
    cli.main(["scenes", "--out", str(tmp_path / "s"), "--objects", "1-3", "--size", "48", "--num-train", "90",
              "--num-val", "30", "--num-probe", "2", "--num-pairs", "9"])
    tokenizer, counts = SimpleTokenizer(bpe_path=str(COMMITTED_BPE)), Counter()
    stored = samples(*tmp_path.glob("s/train/*.tar"), *tmp_path.glob("s/val/*.tar"))
    for sample in stored.values():
        scene = json.loads(sample["json"])
        objects, text = scene["objects"], sample["txt"].decode()
        counts[len(objects)] += 1
        assert len(tokenizer.encode(text)) == {1: 3, 2: 8, 3: 13}[len(objects)]
        relation, names = read_scene(objects)
        assert text == f" {relation} ".join(f"a {name}" for name in names)  # one caption is true, and it is this
        for sentence in scene["long_caption"].removesuffix(".").split(". "):
            assert sentence_is_true(sentence, objects, scene["background"]), sentence
        assert len(tokenizer.encode(scene["long_caption"])) + 2 <= 70
        image, colour = (f(Image.open(io.BytesIO(sample["png"]))) for f in (np.asarray, coloured))
        y, x = (np.indices(colour.shape) + 0.5) / 48
        for item in objects:
            inside = np.hypot(x - item["x"], y - item["y"]) <= item["radius"] + 1 / 48
            assert hue_name(image[inside & colour]) == item["colour"]
            colour[inside] = False
        assert not colour.any()
    assert sum(counts.values()) == 120 and min(counts[n] for n in (1, 2, 3)) > 20
    for pairs in tmp_path.glob("s/sugarcrepe/*.json"):
        assert all(len(row["caption"].split()) in (8, 13) for row in json.loads(pairs.read_text()).values())


def test_a_concept_is_left_out_of_training_and_has_splits_of_its_own(tmp_path):
    """As few scenes as asked for, the first of the more, each as often as any other."""
    cli.main(["scenes", "--out", str(tmp_path / "s"), "--without", "yellow star", "--num-train", "60", "--num-val",
              "12", "--num-probe", "16", "--num-pairs", "8"])

    def of(split):
        found = samples(*sorted((tmp_path / "s" / split).glob("*.tar")))
        return [(sample["png"], sample["txt"].decode()) for sample in found.values()]

    without = of("train") + of("val")
    assert len(without) == 72 and not any("yellow star" in text for _, text in without)
    assert any("yellow" in text for _, text in without) and any("star" in text for _, text in without)
    shots = {n: of(f"shots-{n}") for n in (1, 4, 16, 64, 256)}
    for n, rows in shots.items():
        counts = Counter(rows)
        assert len(counts) == n and set(counts.values()) == {256 // n}
        assert all("yellow star" in text for _, text in rows) and rows[:n] == shots[256][:n]
    concept = of("concept")
    assert len(concept) == 12 and all(text.count("yellow star") == 1 for _, text in concept)
    assert not set(concept) & set(shots[256])
    places = Counter(text.startswith("a yellow star") for _, text in shots[256])
    assert min(places.values()) > 80  # first or second
    with pytest.raises(SystemExit, match="--without 'pink star' is none of red circle"):
        cli.main(["scenes", "--out", str(tmp_path / "x"), "--without", "pink star"])


def test_no_image_is_in_two_splits(root):
    members = [m for shard in sorted(root.rglob("*.tar")) if "-long" not in str(shard) for m in samples(shard).values()]
    images = [member["png"] for member in members] + [p.read_bytes() for p in (root / "sugarcrepe/images").iterdir()]
    assert len(images) == 40 + 12 + 2 * 48 + 24
    assert len(set(images)) == len(images)


def test_stored_captions_say_what_the_stored_coordinates_say(root):
    for sample in samples(*root.glob("train/*.tar"), *root.glob("val/*.tar")).values():
        scene = json.loads(sample["json"])
        assert sample["txt"].decode() == scene["caption"]
        assert read_caption(scene["caption"]) == read_scene(scene["objects"])


@pytest.mark.parametrize("world", WORLDS)
def test_captions_name_all_objects_in_canonical_order(world):
    for scene, _ in drawn(world):
        relation, names = read_scene(as_dicts(scene))
        assert len(set(names)) == len(names) == world.objects
        assert plain_world.caption(scene.objects, scene.relation) == f" {relation} ".join(f"a {name}" for name in names)


@pytest.mark.parametrize("world", WORLDS)
def test_the_length_of_a_caption_says_nothing_about_the_image(world):
    tokenizer, counts = SimpleTokenizer(), set()
    for scene, _ in drawn(world):
        negatives = plain_world.negative_captions(scene, 0, 1) or {}
        texts = [plain_world.caption(scene.objects, scene.relation), *negatives.values()]
        counts |= {len(tokenizer.encode(text)) for text in texts}
    assert counts == {world.objects * (4 if world.sizes else 3) + 2 * (world.objects - 1)}


@pytest.mark.parametrize("world", WORLDS)
def test_neighbours_lie_clearly_on_one_axis_without_touching(world):
    for scene, _ in drawn(world):
        for a, b in zip(scene.objects, scene.objects[1:], strict=False):
            along, across = (b.x - a.x, b.y - a.y) if scene.relation == "left of" else (b.y - a.y, b.x - a.x)
            assert along >= a.radius + b.radius - 1e-3
            assert along > 2 * abs(across)


@pytest.mark.parametrize("world", WORLDS)
def test_the_named_colours_are_where_the_objects_are_and_nowhere_else(world):
    for scene, rng in drawn(world, 60):
        image = scenes.render(scene, world.pixels, rng)
        pixels, colour = np.asarray(image), coloured(image)
        assert image.mode == "RGB" and image.size == (world.pixels, world.pixels)
        assert (np.median(pixels) > 128) == (scene.background == "light")
        y, x = (np.indices(colour.shape) + 0.5) / world.pixels
        for item in scene.objects:
            inside = np.hypot(x - item.x, y - item.y) <= item.radius + 1 / world.pixels
            assert hue_name(pixels[inside & colour]) == item.colour
            colour[inside] = False
        assert not colour.any()


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


def sentence_is_true(sentence, objects, background):
    """Parse one sentence of a long caption and judge it by coordinates alone."""
    relation, names = read_scene(objects)
    in_order = sorted(objects, key=lambda o: o["x" if relation == "left of" else "y"])
    by_name = dict(zip(names, in_order, strict=True))
    number = {1: "one", 2: "two", 3: "three", 4: "four"}[len(objects)]
    if f"{number} shape" in sentence:
        return f"on a {background} background" in sentence
    if "else" in sentence or "no other shape" in sentence:
        return True
    if comparison := re.fullmatch(r"the (.+) is (smaller than|larger than|about the same size as) the (.+)", sentence):
        ratio = by_name[comparison[1]]["radius"] / by_name[comparison[3]]["radius"]
        return comparison[2] == ("smaller than" if ratio <= 1 / 1.15 else "larger than" if ratio > 1.15 else
                                 "about the same size as")
    inverse = {"left of": "right of", "up above": "down below"}[relation]
    later = re.fullmatch(f"the (.+) is {inverse} the (.+)", sentence)
    turned = re.fullmatch(f"{inverse} the (.+) is the (.+)", sentence)
    if later or turned:
        first, second = (later[2], later[1]) if later else (turned[1], turned[2])
        return names.index(second) == names.index(first) + 1
    if place := re.search(r"near the (top|bottom)?\s?(left|right)?|in the middle", sentence):
        name = next(name for name in names if f"the {name}" in sentence)
        x, y = by_name[name]["x"], by_name[name]["y"]
        row = "top" if y < 1 / 3 else "bottom" if y >= 2 / 3 else None
        column = "left" if x < 1 / 3 else "right" if x >= 2 / 3 else None
        return (place[1], place[2]) == (row, column)
    return read_caption(re.sub("^(there is|one can see) ", "", sentence)) == (relation, names)


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
def test_one_changed_word_makes_a_sentence_false(world):
    swaps = {"light": "dark", "dark": "light", "left": "right", "right": "left", "top": "bottom", "bottom": "top",
             "above": "below", "below": "above", "smaller": "larger", "larger": "smaller", "middle": "top"}
    changed = 0
    for scene, rng in drawn(world):
        for sentence in plain_world.long_caption(scene, rng).removesuffix(".").split(". "):
            for word in set(sentence.split()) & set(swaps):
                wrong = re.sub(rf"\b{word}\b", swaps[word], sentence)
                assert not sentence_is_true(wrong, as_dicts(scene), scene.background), wrong
                changed += 1
    assert changed > 300


def test_long_and_short_splits_hold_the_same_images(root):
    for split in ("train", "val"):
        short, long = (samples(*sorted((root / folder).glob("*.tar"))) for folder in (split, f"{split}-long"))
        assert list(short) == list(long) and len(short) == SMALL[f"num_{split}"]
        for key in short:
            assert short[key]["png"] == long[key]["png"] and short[key]["json"] == long[key]["json"]
            assert json.loads(long[key]["json"])["long_caption"] == long[key]["txt"].decode()


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


@pytest.mark.parametrize("task", ["swap_att", "swap_obj", "replace_rel"])
def test_clip_benchmark_reads_the_pairs_as_sugarcrepe(root, task):
    rows = json.loads((root / "sugarcrepe" / f"{task}.json").read_text())
    assert list(rows) == [str(i) for i in range(SMALL["num_pairs"])]
    assert all(set(row) == {"filename", "caption", "negative_caption"} for row in rows.values())
    dataset = clip_benchmark_datasets.build_dataset(
        f"sugar_crepe/{task}", root=str(root / "sugarcrepe"), task="image_caption_selection")
    assert len(dataset) == len(rows)
    for (image, (true, false)), row in zip((dataset[i] for i in range(len(dataset))), rows.values(), strict=True):
        assert (true, false) == (row["caption"], row["negative_caption"]) and true != false
        relation, names = read_caption(true)
        halves = np.array_split(np.asarray(image), 2, axis=1 if relation == "left of" else 0)
        masks = np.array_split(coloured(image), 2, axis=1 if relation == "left of" else 0)
        assert [hue_name(half[mask]) for half, mask in zip(halves, masks, strict=True)] == [n.split()[0] for n in names]


def test_open_clip_trains_on_the_shards(root):
    pattern = str(root / "train" / "{00000..00007}.tar")
    args = Namespace(
        train_data=pattern, train_num_samples=None, dataset_resampled=False, train_data_upsampling_factors=None, seed=0,
        batch_size=10, workers=0, world_size=1)
    info = get_wds_dataset(args, ToTensor(), is_train=True, tokenizer=SimpleTokenizer())
    assert info.dataloader.num_samples == SMALL["num_train"]  # from sizes.json
    batches = list(info.dataloader)
    assert [images.shape for images, _ in batches] == [(10, 3, 32, 32)] * 4
    tokenizer = SimpleTokenizer()
    stored = {sample["txt"].decode() for sample in samples(*expand_urls(pattern)[0]).values()}
    for _, texts in batches:
        for row in texts.tolist():
            assert tokenizer.decode(row[1:row.index(tokenizer.eot_token_id)]).strip() in stored


def test_clip_benchmark_reads_the_probe_and_labels_are_right(root):
    for split in ("train", "test"):
        dataset = clip_benchmark_datasets.build_wds_dataset("scenes", lambda image: image, split, str(root / "probe"))
        assert len(dataset.classes) == len(set(dataset.classes)) == 16
        assert all(template.format(c=dataset.classes[0]) for template in dataset.templates)
        pairs = list(dataset)
        assert len(pairs) == SMALL["num_probe"] and len({label for _, label in pairs}) > 8
        for image, label in pairs:
            image = image.convert("RGB")
            assert hue_name(np.asarray(image)[coloured(image)]) == dataset.classes[label].split()[0]


def test_an_interrupted_run_leaves_nothing_behind(tmp_path, monkeypatch):
    render, calls = scenes.render, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) > 50:
            raise KeyboardInterrupt
        return render(*args)

    monkeypatch.setattr(scenes, "render", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scenes.build(tmp_path / "scenes", World(), **SMALL)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_and_impossible_numbers_are_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("keep me")
    for world, numbers, message in [
        (World(), SMALL, "not an empty folder"),
        (World(), {**SMALL, "num_val": 0}, "--num-val"),
        (World(objects=5), SMALL, "--objects must be 2, 3, 4 or a range such as 1-3, not 5"),
        (World(objects=3, fewest=3), SMALL, "not 3-3"),
        (World(objects=1), SMALL, "not 1"),
        (World(pixels=16), SMALL, "--size 16 cannot show 2 objects: use 20 or more"),
    ]:
        out = tmp_path if message.startswith("not an") else tmp_path / "out"
        with pytest.raises(ValueError, match=message):
            scenes.build(out, world, **numbers)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_command_prints_a_pattern_that_upstream_expands_to_its_shards(tmp_path, capsys):
    out = tmp_path / "deeper" / "scenes"
    cli.main([
        "scenes", "--out", str(out), "--size", "40", "--objects", "3", "--sizes", "--seed", "7", "--num-train", "20",
        "--num-val", "3", "--num-probe", "2", "--num-pairs", "2"])
    pattern = re.search("--train-data '(.+?)'", capsys.readouterr().out)[1]
    shards = expand_urls(pattern)[0]
    assert shards == sorted(map(str, out.glob("train/*.tar")))
    stored = samples(*shards)
    assert len(stored) == 20
    for sample in stored.values():
        assert Image.open(io.BytesIO(sample["png"])).size == (40, 40)
        assert re.fullmatch(r"a (small|large) \w+ \w+( (up above|left of) a (small|large) \w+ \w+){2}",
                            sample["txt"].decode())


def test_the_committed_merges_are_the_ones_this_code_makes(tmp_path):
    for name in ("first", "second"):
        bpe.write(tmp_path / name, plain_world.caption_words())
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    assert gzip.decompress((tmp_path / "first").read_bytes()) == gzip.decompress(COMMITTED_BPE.read_bytes())


def test_every_word_is_one_token_of_clip_and_of_the_small_vocabulary():
    clip, small = SimpleTokenizer(), SimpleTokenizer(bpe_path=str(COMMITTED_BPE))
    for word in plain_world.caption_words():
        for tokenizer in (clip, small):
            assert [tokenizer.decoder[i] for i in tokenizer.encode(word)] == [f"{word}</w>"]
    assert "" not in small.encoder and len(small.encoder) == 512 + len(small.bpe_ranks) + 2 < 1000
    assert small.all_special_ids == [small.vocab_size - 2, small.vocab_size - 1]
    assert sorted(small.bpe_ranks, key=clip.bpe_ranks.get) == list(small.bpe_ranks)


def test_no_kept_merge_is_superfluous():
    small = SimpleTokenizer(bpe_path=str(COMMITTED_BPE))
    for merge in list(small.bpe_ranks):
        rank = small.bpe_ranks.pop(merge)
        small.cache.clear()
        assert any(" " in small.bpe(word) for word in plain_world.caption_words()), merge
        small.bpe_ranks[merge] = rank


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
