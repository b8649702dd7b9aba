"""Claims about `open_clip_mdc scenes`: files are reproducible and true, and OpenCLIP and clip_benchmark read them."""
import fcntl
import io
import json
import os
import re
import shlex
import signal
from collections import Counter
from contextlib import suppress
from itertools import islice

import clip_benchmark.datasets.builder as clip_benchmark_datasets
import numpy as np
import pytest
from conftest import complaint_of, contents, killed_when, members, read_json, run_tool, wait_for
from matplotlib.path import Path as Outline
from open_clip.tokenizer import SimpleTokenizer
from open_clip_train.data import expand_urls
from PIL import Image
from scene_truth import COMMITTED_BPE, check_colours, coloured, hue_name, read_caption, read_scene, sentence_is_true
from shard_files import samples

from open_clip_mdc.cli import scenes
from open_clip_mdc.scenes import rich
from open_clip_mdc.scenes.drawing import OUTLINES
from open_clip_mdc.scenes.plain import World


def test_a_larger_set_begins_with_the_smaller_one(scenes, tmp_path):
    run_tool(["scenes", "--out", tmp_path / "s", "--num-train 80 --num-val 2 --num-probe 2 --num-pairs 2"])
    small, large = (samples(*sorted(folder.glob("train/*.tar"))) for folder in (tmp_path / "s", scenes))
    assert len(small) == 80 and small == dict(islice(large.items(), 80))


def test_a_world_of_one_to_three_objects_has_captions_of_three_lengths_that_are_all_true(tmp_path, capsys):
    run_tool(["scenes", "--out", tmp_path / "s",
              "--objects 1-3 --size 48 --num-train 90 --num-val 30 --num-probe 2 --num-pairs 9"])
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
        image = Image.open(io.BytesIO(sample["png"]))
        assert image.size == (48, 48)
        check_colours(image, objects)
    assert sum(counts.values()) == 120 and min(counts[n] for n in (1, 2, 3)) > 20
    for pairs in tmp_path.glob("s/sugarcrepe/*.json"):
        assert all(len(row["caption"].split()) in (8, 13) for row in read_json(pairs).values())


def test_a_concept_is_left_out_of_training_and_has_splits_of_its_own(tmp_path):
    """As few scenes as asked for, the first of the more, each as often as any other."""
    run_tool(["scenes", "--out", tmp_path / "s", "--without", "yellow star",
              "--num-train 60 --num-val 12 --num-probe 16 --num-pairs 8"])

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


def test_no_image_is_in_two_splits(scenes):
    shards = [shard for shard in scenes.rglob("*.tar") if "-long" not in str(shard)]
    images = [sample["png"] for shard in shards for sample in samples(shard).values()]
    images += [path.read_bytes() for path in (scenes / "sugarcrepe/images").iterdir()]
    assert len(images) == len(set(images)) == 512 + 64 + 2 * 96 + 40


@pytest.mark.parametrize("task", ["swap_att", "swap_obj", "replace_rel"])
def test_clip_benchmark_reads_the_pairs_as_sugarcrepe(scenes, task):
    rows = read_json(scenes / f"sugarcrepe/{task}.json")
    assert list(rows) == [str(i) for i in range(40)]
    assert all(set(row) == {"filename", "caption", "negative_caption"} for row in rows.values())
    dataset = clip_benchmark_datasets.build_dataset(
        f"sugar_crepe/{task}", root=str(scenes / "sugarcrepe"), task="image_caption_selection")
    assert len(dataset) == len(rows)
    for (image, (true, false)), row in zip((dataset[i] for i in range(len(dataset))), rows.values(), strict=True):
        assert (true, false) == (row["caption"], row["negative_caption"]) and true != false
        relation, names = read_caption(true)
        halves = np.array_split(np.asarray(image), 2, axis=1 if relation == "left of" else 0)
        masks = np.array_split(coloured(image), 2, axis=1 if relation == "left of" else 0)
        assert [hue_name(half[mask]) for half, mask in zip(halves, masks, strict=True)] == [n.split()[0] for n in names]


def test_clip_benchmark_reads_the_probe_and_labels_are_right(scenes):
    for split in ("train", "test"):
        dataset = clip_benchmark_datasets.build_wds_dataset("scenes", lambda image: image, split, str(scenes / "probe"))
        assert len(dataset.classes) == len(set(dataset.classes)) == 16
        assert all(template.format(c=dataset.classes[0]) for template in dataset.templates)
        pairs = list(dataset)
        assert len(pairs) == 96 and len({label for _, label in pairs}) > 8
        for image, label in pairs:
            image = image.convert("RGB")
            assert hue_name(np.asarray(image)[coloured(image)]) == dataset.classes[label].split()[0]


def test_processes_end_with_the_run_that_started_them_and_so_do_the_locks_that_they_inherit(tmp_path):
    """The experiments' lock is one: the next `make` would wait for ever."""
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status = killed_when(lambda: len(list(tmp_path.glob(".scenes.*/train/.*.tar.*"))) == 2, "-m", "open_clip_mdc",
                             "scenes", "--out", str(tmp_path / "scenes"), "--num-train", "1000000", "--jobs", "2",
                             pass_fds=(lock.fileno(),))

    def is_free() -> bool:
        with (tmp_path / "lock").open("w") as lock, suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    assert status == -9
    wait_for(is_free)


def test_a_process_that_is_killed_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(scenes, "render", lambda *args: os.kill(os.getpid(), signal.SIGKILL))
    complaint = complaint_of("scenes", "--out", tmp_path / "scenes", "--jobs 2")
    assert complaint.startswith("error: a process was killed") and "\n" not in complaint
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_a_pattern_that_upstream_expands_to_its_shards(tmp_path, capsys):
    out = tmp_path / "deeper/my scenes"
    run_tool(["scenes", "--out", out,
              "--size 40 --objects 3 --sizes --seed 7 --num-train 20 --num-val 3 --num-probe 2 --num-pairs 2"])
    *_, pattern, _, _ = shlex.split(capsys.readouterr().out)
    shards = expand_urls(pattern)[0]
    assert shards == sorted(map(str, out.glob("train/*.tar")))
    stored = samples(*shards)
    assert len(stored) == 20
    for sample in stored.values():
        assert Image.open(io.BytesIO(sample["png"])).size == (40, 40)
        assert re.fullmatch(r"a (small|large) \w+ \w+( (up above|left of) a (small|large) \w+ \w+){2}",
                            sample["txt"].decode())


@pytest.mark.parametrize("world", [World(objects=3, pixels=64), rich.World(pixels=64)], ids=["plain", "rich"])
def test_masks_say_the_shape_under_each_pixel_and_change_nothing_else(tmp_path, world):
    """Matplotlib says which pixels' centres lie within a shape."""
    few = dict.fromkeys(("num_train", "num_val", "num_pairs"), 8) | {"num_probe": 12}
    scenes.build(tmp_path / "bare", world, **few)
    scenes.build(tmp_path / "masked", world, **few, masks=True)
    files = contents(tmp_path / "masked")
    added = {name: files.pop(name) for name in ("masks/classnames.txt", "masks/test.tar", "masks/train.tar")}
    assert files == contents(tmp_path / "bare")

    classes = added["masks/classnames.txt"].decode().split("\n")
    images = {name: np.asarray(Image.open(io.BytesIO(data)))
              for name, data in members(tmp_path / "masked/masks/test.tar").items()}
    seen, centres = set(), (np.indices((64, 64))[::-1].reshape(2, -1).T + 0.5) / 64  # [N, x and y]
    for index in range(12):
        scene = scenes.WORLDS[type(world)].draw_scene(world, world.rng("masks-test", index))
        mask = images[f"test{index:07d}.mask.png"]
        expected = np.zeros_like(mask)
        for item in scene.objects:
            inside = Outline(OUTLINES[item.shape]).contains_points((centres - (item.x, item.y)) / item.radius)
            expected[inside.reshape(64, 64)] = classes.index(item.shape)
            seen.add(item.shape)
        wrong = mask != expected
        assert wrong.mean() < 0.04 and (expected > 0).mean() > 0.03  # at edges alone: see the next line
        around = [np.roll(expected, (down, right), (0, 1)) for down in (-1, 0, 1) for right in (-1, 0, 1)]
        same = (np.stack(around) == expected).all(0)
        assert not (wrong & same).any()
        if world.__class__ is World:  # whose objects are all coloured
            assert np.array_equal(coloured(images[f"test{index:07d}.png"])[same], (expected > 0)[same])
    assert len(seen) >= 4
