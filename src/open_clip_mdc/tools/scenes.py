"""The built-in synthetic data set: scenes of coloured shapes with true captions. Nothing has to be downloaded.

    open_clip_mdc scenes --out scenes              # 20,000 training scenes and everything listed in `build`
    open_clip_mdc scenes --out scenes3 --objects 3 --sizes --size 48
    open_clip_mdc scenes --out lengths --objects 1-3     # captions of three lengths
    open_clip_mdc scenes --out fewshot --without "yellow star"     # and 1, 4, 16, 64, 256 scenes that have one

A scene is a row or a column of objects. Its caption names them in one canonical order, left to right or top to bottom
("a red circle left of a blue square"). With a free order two captions are true of an image, and a small captioner
learns the bag of words instead of the binding that the paper measures (Table 2, swapped attributes and objects). All
captions of as many objects have the same number of tokens: a masked diffusion model is given the length, and would read
the relation from it instead of from the image if one took more words than the other. In a world of 1 to 3 objects the
length is that of the one true caption, and a model that chooses it must count.

A draw depends only on (seed, stream, index): the same seed writes the same bytes, a larger set begins with the scenes
of a smaller one, and no split shares a stream with another.

Every word is one token of CLIP's BPE; model_configs/scenes_bpe.txt.gz is the part of it that these words need (bpe.py).
"""
import argparse
import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from tqdm import tqdm

from ..data.files import new_folder
from ..data.shards import tar_writer


def _corners(count: int, outer: float, inner: float | None = None, turn: float = 0.0) -> list[tuple[float, float]]:
    """Corners (x right, y down) of a polygon around the origin; with `inner`, every second corner is pulled in."""
    radii = (outer, outer if inner is None else inner)
    angles = [turn + 2 * math.pi * i / count for i in range(count)]
    return [(radii[i % 2] * math.sin(angle), -radii[i % 2] * math.cos(angle)) for i, angle in enumerate(angles)]


# All reach to a circle of radius 1, which is what "larger" compares. With outlines scaled to equal area instead, the
# tiny model names colours and relations after 300 steps but no shape (NELBO 2.9 nats a caption, two free choices of 4).
SHAPES = {
    "circle": _corners(48, 1.0),
    "square": _corners(4, 1.0, turn=math.pi / 4),
    "triangle": _corners(3, 1.0),
    "star": _corners(10, 1.0, inner=0.4),
}
COLOURS = {"red": (215, 45, 45), "green": (45, 165, 75), "blue": (50, 85, 215), "yellow": (235, 200, 45)}
RELATIONS = {"left of": "right of", "up above": "down below"}  # as captions say it: as seen from the other side
# Grey levels not far from the middle: nearly white or black ones outweigh the position embedding at the start, and on
# 200-240 and 15-60 the tiny model had learned no binding after 300 steps (swapped attributes 50 %; on these 100 %).
BACKGROUNDS = {"light": (150, 180), "dark": (75, 105)}
RADII = {"": (0.38, 0.48), "small": (0.24, 0.30), "large": (0.40, 0.48)}  # in cells, one cell per object
JITTER = 0.1  # across the row, in cells: twice this is less than the distance along it, so one relation is true

COUNTS = {1: "one", 2: "two", 3: "three", 4: "four"}
PLACES = (
    ("near the top left corner", "near the top", "near the top right corner"),
    ("near the left side", "in the middle", "near the right side"),
    ("near the bottom left corner", "near the bottom", "near the bottom right corner"),
)
COMPARISONS = ("smaller than", "about the same size as", "larger than")
SENTENCES = {
    "opening": (
        "there are {count} shapes on a {background} background.",
        "{count} shapes are on a {background} background.",
        "the picture shows {count} shapes on a {background} background.",
    ),
    "alone": ("there is one shape on a {background} background.", "one shape is on a {background} background."),
    "forward": ("{caption}.", "there is {caption}.", "one can see {caption}."),
    "backward": ("the {second} is {inverse} the {first}.", "{inverse} the {first} is the {second}."),
    "place": ("the {noun} is {place}.", "the {noun} lies {place}.", "{place} is the {noun}."),
    "comparison": ("the {first} is {comparison} the {second}.",),
    "closing": ("there is nothing else.", "nothing else is in the picture.", "there is no other shape."),
}
LONG_TOKENS = (55, 70)  # a long caption's budget, SOT and EOT included, is drawn from this range; one object needs less
CLASS_NAMES = tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)
TEMPLATES = ("a {c}", "a picture of a {c}")
SHOTS = (1, 4, 16, 64, 256)  # scenes to learn a concept from that the others lack
TRAIN_SHARDS = 8  # upstream refuses fewer training shards than workers x ranks
SUPERSAMPLING = 4


@dataclass(frozen=True)
class World:
    """What is drawn: image side in pixels, objects per scene, whether nouns carry "small" or "large", random seed."""

    pixels: int = 32
    objects: int = 2
    sizes: bool = False
    seed: int = 0
    fewest: int | None = None  # of objects per scene, where that is drawn: `objects` is then the most
    without: str | None = None  # of CLASS_NAMES: left out of train/ and val/, and in splits of its own

    def rng(self, stream: str, index: int) -> random.Random:
        """The random numbers of one scene."""
        return random.Random(f"{self.seed}/{stream}/{index}")


@dataclass(frozen=True)
class SceneObject:
    """One object; centre and outer radius are fractions of the image's side, y points down."""

    colour: str
    shape: str
    size: str
    x: float
    y: float
    radius: float

    @property
    def noun(self) -> str:
        return f"{self.size} {self.colour} {self.shape}".strip()


@dataclass(frozen=True)
class Scene:
    """Objects in canonical order; `relation` (a key of RELATIONS) holds between each object and the next."""

    objects: tuple[SceneObject, ...]
    relation: str
    background: str


def draw_scene(world: World, rng: random.Random, count: int | None = None, concept: bool | None = None) -> Scene:
    """Draws a scene of `count` objects (default: the world's), all different, that lie in cells along one axis.

    Args:
        concept: whether the object `world.without` is among them; None: as it comes.
    """
    count = count or (rng.randint(world.fewest, world.objects) if world.fewest else world.objects)
    relation = rng.choice(list(RELATIONS))
    unit = 1 / world.objects
    sizes = [rng.choice(("small", "large")) if world.sizes else "" for _ in range(count)]
    radii = [unit * rng.uniform(*RADII[size]) for size in sizes]
    margin = max(radii) + unit * JITTER
    across = rng.uniform(margin, 1 - margin)
    names = rng.sample([name for name in CLASS_NAMES if concept is None or name != world.without], count)
    if concept:
        names[rng.randrange(count)] = world.without
    objects = []
    for i, (name, size, radius) in enumerate(zip(names, sizes, radii, strict=True)):
        u = (i + 0.5) / count + rng.uniform(-1, 1) * (0.5 / count - radius)
        v = across + rng.uniform(-1, 1) * unit * JITTER
        x, y = (u, v) if relation == "left of" else (v, u)
        objects.append(SceneObject(*name.split(), size, round(x, 4), round(y, 4), round(radius, 4)))
    return Scene(tuple(objects), relation, rng.choice(list(BACKGROUNDS)))


def render(scene: Scene, pixels: int, rng: random.Random) -> Image.Image:
    """Draws the scene as an RGB image, anti-aliased, with slightly varying colours and noise of +-6 grey levels."""
    side = pixels * SUPERSAMPLING
    image = Image.new("RGB", (side, side), (rng.randint(*BACKGROUNDS[scene.background]),) * 3)
    draw = ImageDraw.Draw(image)
    for item in scene.objects:
        tone = tuple(level + rng.randint(-12, 12) for level in COLOURS[item.colour])
        x, y, radius = side * item.x, side * item.y, side * item.radius
        draw.polygon([(x + radius * dx, y + radius * dy) for dx, dy in SHAPES[item.shape]], fill=tone)
    smooth = np.asarray(image.reduce(SUPERSAMPLING), dtype=np.int16)
    noise = np.frombuffer(rng.randbytes(pixels * pixels), dtype=np.uint8).reshape(pixels, pixels, 1) % 13 - np.int16(6)
    return Image.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8))


def encode_png(image: Image.Image) -> bytes:
    buffer = BytesIO()
    image.save(buffer, "png")
    return buffer.getvalue()


def caption(objects: Sequence[SceneObject], relation: str) -> str:
    """One sentence: "a red circle left of a blue square"."""
    return f" {relation} ".join(f"a {item.noun}" for item in objects)


def words(text: str) -> list[str]:
    """Words and punctuation marks of a caption, which are its tokens: every word here is one token of CLIP's BPE."""
    return re.findall(r"\w+|[^\w\s]", text)


def long_caption(scene: Scene, rng: random.Random) -> str:
    """Several true sentences about one scene: 40 to 70 tokens with SOT and EOT, wording and order drawn from `rng`."""
    def say(kind: str, **facts: str) -> str:
        return rng.choice(SENTENCES[kind]).format(**facts)

    count, neighbours = len(scene.objects), list(zip(scene.objects, scene.objects[1:], strict=False))
    if count > 1:
        first, second = rng.choice(neighbours)
    sentences = [
        say("opening" if count > 1 else "alone", count=COUNTS[count], background=scene.background),
        say("forward", caption=caption(scene.objects, scene.relation)),
    ]
    if count > 1:
        sentences.append(say("backward", first=first.noun, second=second.noun, inverse=RELATIONS[scene.relation]))
    further = [say("place", noun=item.noun, place=PLACES[int(item.y * 3)][int(item.x * 3)]) for item in scene.objects]
    for first, second in neighbours:
        ratio = first.radius / second.radius
        verdict = COMPARISONS[(ratio > 1 / 1.15) + (ratio > 1.15)]
        further.append(say("comparison", first=first.noun, second=second.noun, comparison=verdict))
    further.append(say("closing"))
    rng.shuffle(further)
    left = rng.randint(*LONG_TOKENS) - 2 - sum(len(words(sentence)) for sentence in sentences)
    for sentence in further:
        if len(words(sentence)) <= left:
            sentences.append(sentence)
            left -= len(words(sentence))
    return " ".join(sentences)


def negative_captions(scene: Scene, i: int, j: int) -> dict[str, str] | None:
    """False captions by SugarCrepe's names, or None where objects `i` and `j` cannot swap colours.

    They cannot where the swap would name an object that is there: the colours or the shapes are equal, so that swapping
    attributes is nothing or the same as swapping objects; or a third object is named twice, as no true caption does.
    The relation gives way to the other one that captions use: no false caption is visible as such without the image.
    """
    a, b = scene.objects[i], scene.objects[j]
    named = {(item.colour, item.shape) for item in scene.objects}
    if not named.isdisjoint({(a.colour, b.shape), (b.colour, a.shape)}):
        return None
    attributes, objects = list(scene.objects), list(scene.objects)
    attributes[i], attributes[j] = replace(a, colour=b.colour), replace(b, colour=a.colour)
    objects[i], objects[j] = b, a
    other = next(relation for relation in RELATIONS if relation != scene.relation)
    return {
        "swap_att": caption(attributes, scene.relation),
        "swap_obj": caption(objects, scene.relation),
        "replace_rel": caption(scene.objects, other),
    }


def _write_captioned(root: Path, split: str, world: World, count: int, shards: int, bar: tqdm,
                     concept: bool | None = None, distinct: int | None = None) -> None:
    """Write SPLIT and SPLIT-long: the same images as webdataset shards with short and with long captions.

    Args:
        concept: of `draw_scene`.
        distinct: so many scenes, the first of those that have the concept, are repeated `count` times in all.
    """
    sizes = {}
    for shard in range(shards):
        name = f"{shard:05d}.tar"
        indices = range(shard * count // shards, (shard + 1) * count // shards)
        sizes[name] = len(indices)
        with tar_writer(root / split / name) as short, tar_writer(root / f"{split}-long" / name) as long:
            for index in indices:
                rng = world.rng("shots", index % distinct) if distinct else world.rng(split, index)
                scene = draw_scene(world, rng, concept=concept)
                texts = {"caption": caption(scene.objects, scene.relation), "long_caption": long_caption(scene, rng)}
                sample = {
                    "__key__": f"{split}{index:07d}",
                    "png": encode_png(render(scene, world.pixels, rng)),
                    "json": json.dumps({**asdict(scene), **texts}),
                }
                short.write({**sample, "txt": texts["caption"]})
                long.write({**sample, "txt": texts["long_caption"]})
                bar.update()
    for folder in (split, f"{split}-long"):
        (root / folder / "sizes.json").write_text(json.dumps(sizes))  # upstream reads the number of samples here


def _write_probe(root: Path, world: World, count: int, bar: tqdm) -> None:
    """Write a labelled set of one-object scenes in clip_benchmark's webdataset layout."""
    for split in ("train", "test"):
        with tar_writer(root / split / "0.tar") as writer:
            for index in range(count):
                rng = world.rng(f"probe-{split}", index)
                scene = draw_scene(world, rng, count=1)
                label = CLASS_NAMES.index(f"{scene.objects[0].colour} {scene.objects[0].shape}")
                image = encode_png(render(scene, world.pixels, rng))
                writer.write({"__key__": f"{split}{index:07d}", "png": image, "cls": str(label)})
                bar.update()
        (root / split / "nshards.txt").write_text("1")
    (root / "classnames.txt").write_text("\n".join(CLASS_NAMES))
    (root / "zeroshot_classification_templates.txt").write_text("\n".join(TEMPLATES))


def _write_pairs(root: Path, world: World, count: int, bar: tqdm) -> None:
    """Write true and false captions in SugarCrepe's json format; `val2017` is where clip_benchmark looks for images."""
    (root / "images").mkdir(parents=True)
    (root / "val2017").symlink_to("images")
    rows: dict[str, dict] = {}
    for index in range(count):
        rng = world.rng("pairs", index)
        scene = negatives = None
        while not negatives:
            scene = draw_scene(world, rng)
            if len(scene.objects) > 1:
                negatives = negative_captions(scene, *rng.sample(range(len(scene.objects)), 2))
        filename = f"{index:012d}.png"
        render(scene, world.pixels, rng).save(root / "images" / filename)
        true = caption(scene.objects, scene.relation)
        for task, false in negatives.items():
            rows.setdefault(task, {})[str(index)] = {"filename": filename, "caption": true, "negative_caption": false}
        bar.update()
    for task, pairs in rows.items():
        (root / f"{task}.json").write_text(json.dumps(pairs, indent=4))


def build(out: str | Path, world: World, num_train: int, num_val: int, num_probe: int, num_pairs: int) -> None:
    """Write the whole data set under `out`, which appears only when it is complete.

        train/, val/              KEY.png, KEY.txt (one sentence), KEY.json (the scene and both captions), sizes.json
        train-long/, val-long/    the same images with long captions
        probe/                    labelled one-object scenes, clip_benchmark's webdataset layout
        sugarcrepe/               swap_att.json, swap_obj.json, replace_rel.json, images/

    In a world without a concept train/ and val/ lack it, and beside them are

        concept/                  as val/, each scene with it
        shots-1/ to shots-256/    as train/, 256 samples of so many scenes with it; the fewer are the first of the more

    Raises:
        ValueError: if `out` is there already and is not an empty folder, or a number is out of range.
    """
    if min(num_train, num_val, num_probe, num_pairs) < 1:
        raise ValueError("--num-train, --num-val, --num-probe and --num-pairs must be at least 1")
    if not (1 < world.objects <= max(COUNTS) and (world.fewest is None or 1 <= world.fewest < world.objects)):
        fewest = "" if world.fewest is None else f"{world.fewest}-"
        raise ValueError(f"--objects must be 2, 3, 4 or a range such as 1-3, not {fewest}{world.objects}")
    if world.without not in (None, *CLASS_NAMES):
        raise ValueError(f"--without {world.without!r} is none of {', '.join(CLASS_NAMES)}")
    if world.pixels < 10 * world.objects:
        raise ValueError(f"--size {world.pixels} cannot show {world.objects} objects: use {10 * world.objects} or more")
    lacks = None if world.without is None else False
    total = num_train + num_val + 2 * num_probe + num_pairs
    total += 0 if world.without is None else num_val + len(SHOTS) * SHOTS[-1]
    with new_folder(out) as folder, tqdm(total=total, desc="scenes", unit="scene") as bar:
        _write_captioned(folder, "train", world, num_train, min(TRAIN_SHARDS, num_train), bar, lacks)
        _write_captioned(folder, "val", world, num_val, 1, bar, lacks)
        if world.without is not None:
            _write_captioned(folder, "concept", world, num_val, 1, bar, True)
            for shots in SHOTS:
                _write_captioned(folder, f"shots-{shots}", world, SHOTS[-1], 1, bar, True, shots)
        _write_probe(folder / "probe", world, num_probe, bar)
        _write_pairs(folder / "sugarcrepe", world, num_pairs, bar)


def caption_words() -> list[str]:
    """Every word and punctuation mark that captions, templates and class names can contain, sorted."""
    tables = [CLASS_NAMES, TEMPLATES, RADII, RELATIONS, RELATIONS.values(), BACKGROUNDS, COUNTS.values(), COMPARISONS]
    texts = [text for table in (*tables, *PLACES, *SENTENCES.values()) for text in table]
    return sorted(set(words(re.sub(r"{.*?}", " ", " ".join(texts)))))


def run(args: argparse.Namespace) -> None:
    """Run `open_clip_mdc scenes`."""
    fewest, most = args.objects
    world = World(args.size, most, args.sizes, args.seed, fewest, args.without)
    build(args.out, world, args.num_train, args.num_val, args.num_probe, args.num_pairs)
    last = min(TRAIN_SHARDS, args.num_train) - 1
    print(f"{args.out}: {args.num_train} training scenes, --train-data '{args.out}/train/{{00000..{last:05d}}}.tar' "
          f"--val-data {args.out}/val/00000.tar")
