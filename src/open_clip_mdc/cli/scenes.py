"""Render the built-in synthetic data sets, scenes of coloured shapes with true captions, without any download.

    open_clip_mdc scenes --out scenes              # 20,000 training scenes, validation scenes and test sets
    open_clip_mdc scenes --out scenes3 --objects 3 --sizes --size 48
    open_clip_mdc scenes --out lengths --objects 1-3     # captions of three lengths
    open_clip_mdc scenes --out fewshot --without "yellow star"     # and shots of 1, 4, 16, 64, 256 scenes with one
    open_clip_mdc scenes --out rich --world rich --noise 0.1       # several true captions, and 10 % wrong ones
    open_clip_mdc scenes --out r90 --world mentions --redundancy 0.9    # most shapes follow from the colour

A draw depends only on (seed, stream, index). So the same seed writes the same bytes, a larger set begins with the
scenes of a smaller one, and splits are independent. The package scenes/ has the worlds plain, rich and mentions.
"""
import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from ..bulk.engine import process_pool
from ..data.files import new_folder, write_json
from ..data.images import encode_png
from ..data.paths import for_shell
from ..data.shards import shard_pattern, tar_writer
from ..progress import progress_bar
from ..scenes import mentions as mentions_world
from ..scenes import plain as plain_world
from ..scenes import rich as rich_world
from ..scenes.drawing import OUTLINES, mask, render

World = plain_world.World | rich_world.World
NAMED = {"plain": plain_world, "rich": rich_world, "mentions": mentions_world}
WORLDS = {module.World: module for module in NAMED.values()}
SHOTS = (1, 4, 16, 64, 256)  # numbers of distinct scenes to learn a left-out object from
TRAIN_SHARDS = 8  # OpenCLIP refuses fewer training shards than workers x ranks
RICH_SHARD = 10_000  # the most scenes in a shard of the rich world


def train_shards(world: World, count: int) -> int:
    shards = max(TRAIN_SHARDS, -(-count // RICH_SHARD)) if isinstance(world, rich_world.World) else TRAIN_SHARDS
    return min(shards, count)


def _write_shard(root: Path, split: str, world: World, shard: str, indices: range, distinct: int | None = None,
                 **which) -> Iterator[None]:
    # SPLIT has short captions, and SPLIT-long long ones of the same images.
    drawing = WORLDS[type(world)]
    with tar_writer(root / split / shard) as short, tar_writer(root / f"{split}-long" / shard) as long:
        for index in indices:
            # `distinct` scenes, repeated
            rng = world.rng("shots", index % distinct) if distinct else world.rng(split, index)
            scene = drawing.draw_scene(world, rng, **which)
            texts = drawing.captions(scene, rng)
            sample = {
                "__key__": f"{split}{index:07d}",
                "png": encode_png(render(scene, world.pixels, rng)),
                "json": json.dumps({**asdict(scene), **texts}),
            }
            said = texts["caption"], texts["long_caption"]
            if split == "train" and drawing is rich_world:
                said = rich_world.noise(world, index) or said
            for writer, text in zip((short, long), said, strict=True):
                writer.write({**sample, "txt": text})
            yield


def _captioned(root: Path, split: str, world: World, count: int, shards: int = 1, **which) -> Iterator[partial]:
    sizes = {}
    for shard in range(shards):
        name = f"{shard:05d}.tar"
        indices = range(shard * count // shards, (shard + 1) * count // shards)
        sizes[name] = len(indices)
        yield partial(_write_shard, root, split, world, name, indices, **which)
    for folder in (split, f"{split}-long"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        write_json(root / folder / "sizes.json", sizes)  # OpenCLIP reads the number of samples here


def _write_probe(root: Path, name: str, split: str, world: World, count: int) -> Iterator[None]:
    probe = WORLDS[type(world)].PROBES[name]
    with tar_writer(root / name / split / "0.tar") as writer:
        for index in range(count):
            rng = world.rng(f"{name}-{split}", index)
            scene, label = probe.draw(world, rng)
            writer.write({"__key__": f"{split}{index:07d}", "png": encode_png(render(scene, world.pixels, rng)),
                          "cls": str(label)})
            yield
    (root / name / split / "nshards.txt").write_text("1")
    (root / name / "classnames.txt").write_text("\n".join(probe.classes))
    (root / name / "zeroshot_classification_templates.txt").write_text("\n".join(probe.templates))


def _write_pairs(root: Path, world: World, count: int) -> Iterator[None]:
    (root / "images").mkdir(parents=True)
    (root / "val2017").symlink_to("images")  # where clip_benchmark looks for them
    rows: dict[str, dict] = {}
    for index in range(count):
        rng = world.rng("pairs", index)
        scene, true, negatives = WORLDS[type(world)].draw_pair(world, rng)
        filename = f"{index:012d}.png"
        render(scene, world.pixels, rng).save(root / "images" / filename)
        for task, false in negatives.items():
            rows.setdefault(task, {})[str(index)] = {"filename": filename, "caption": true, "negative_caption": false}
        yield
    for task, pairs in rows.items():
        write_json(root / f"{task}.json", pairs, indent=4)


def _write_masks(root: Path, split: str, world: World, count: int) -> Iterator[None]:
    drawing = WORLDS[type(world)]
    classes = ("background", *getattr(drawing, "SHAPES", OUTLINES))
    with tar_writer(root / f"{split}.tar") as writer:
        for index in range(count):
            rng = world.rng(f"masks-{split}", index)
            scene = drawing.draw_scene(world, rng)
            writer.write({"__key__": f"{split}{index:07d}", "png": encode_png(render(scene, world.pixels, rng)),
                          "mask.png": encode_png(mask(scene, world.pixels, classes))})
            yield
    (root / "classnames.txt").write_text("\n".join(classes))


def _count(part: partial) -> int:
    return sum(1 for _ in part())


def _written(parts: list[partial], jobs: int) -> Iterator[int]:
    if jobs == 1:
        yield from (1 for part in parts for _ in part())
        return
    with process_pool(jobs, "a process was killed, possibly out of memory: give fewer --jobs, or try again") as map_all:
        yield from map_all(_count, parts)


def build(out: str | Path, world: World, num_train: int, num_val: int, num_probe: int, num_pairs: int,
          jobs: int = 1, masks: bool = False) -> None:
    """Write the whole data set under `out`, which appears only when it is complete (docs/data.md has its folders)."""
    drawing = WORLDS[type(world)]
    drawing.check(world)
    without = getattr(world, "without", None) is not None
    lacks = {"concept": False} if without else {}
    total = num_train + num_val + 2 * num_probe * len(drawing.PROBES) + num_pairs
    total += 2 * num_probe if masks else 0
    total += num_val + len(SHOTS) * SHOTS[-1] if without else 0
    with new_folder(out) as folder, progress_bar(total=total, what="scenes", unit="scene") as bar:
        parts = [*_captioned(folder, "train", world, num_train, train_shards(world, num_train), **lacks),
                 *_captioned(folder, "val", world, num_val, **lacks)]
        if without:
            parts += _captioned(folder, "concept", world, num_val, concept=True)
            for shots in SHOTS:
                parts += _captioned(folder, f"shots-{shots}", world, SHOTS[-1], concept=True, distinct=shots)
        parts += [partial(_write_probe, folder, name, split, world, num_probe) for name in drawing.PROBES
                  for split in ("train", "test")]
        if masks:
            parts += [partial(_write_masks, folder / "masks", split, world, num_probe) for split in ("train", "test")]
        parts.append(partial(_write_pairs, folder / "sugarcrepe", world, num_pairs))
        for count in _written(parts, jobs):
            bar.update(count)


OF_WORLD = {"objects": "plain", "sizes": "plain", "without": "plain", "noise": "rich", "redundancy": "mentions"}
OTHERS = {"rich": "the rich world has 1 to 4 objects of 3 sizes", "mentions": "the mentions world has two objects"}


def world_of(args: argparse.Namespace) -> World:
    given = {flag: value for flag in OF_WORLD if (value := getattr(args, flag)) is not None and value is not False}
    for flag in given:
        if OF_WORLD[flag] != args.world:
            why = f": {OTHERS[args.world]}" if OF_WORLD[flag] == "plain" else ""
            raise ValueError(f"--{flag} is only for --world {OF_WORLD[flag]}{why}")
    if objects := given.pop("objects", None):
        given["fewest"], given["objects"] = objects
    return NAMED[args.world].World(**({"pixels": args.size} if args.size else {}), seed=args.seed, **given)


def run(args: argparse.Namespace) -> None:
    world = world_of(args)
    build(args.out, world, args.num_train, args.num_val, args.num_probe, args.num_pairs, args.jobs, args.masks)
    train, val = shard_pattern(f"{args.out}/train", train_shards(world, args.num_train)), f"{args.out}/val/00000.tar"
    print(f"{args.out}: {args.num_train} training scenes, --train-data {for_shell(train)} --val-data {for_shell(val)}")
