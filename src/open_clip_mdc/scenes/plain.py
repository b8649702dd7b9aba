"""The plain world of scenes: objects in a row or a column, with exactly one true caption (cli/scenes.py).

A caption names the objects in a fixed order, left to right or top to bottom ("a red circle left of a blue square"). In
a free order two captions would be true, and a small captioner would learn the bag of words instead of the binding that
the paper measures (Table 2). All captions of the same number of objects have the same number of tokens, because a
masked diffusion model is given the length and could read the relation from it.

Every word is one token of CLIP's BPE. model_configs/scenes_bpe.txt.gz is the part of it that these words need.
Published numbers are about these scenes, so a seed must always draw the same ones.
"""
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from .drawing import BACKGROUNDS, SceneObject

# The shapes and colours of this world. drawing.py has more.
SHAPES = ("circle", "square", "triangle", "star")
COLOURS = ("red", "green", "blue", "yellow")
RELATIONS = {"left of": "right of", "up above": "down below"}  # each with its inverse
RADII = {"": (0.38, 0.48), "small": (0.24, 0.30), "large": (0.40, 0.48)}  # in cells, one cell per object
JITTER = 0.1  # across the row, in cells: twice this is less than the distance along it, so only one relation is true

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
LONG_TOKENS = (55, 70)  # range of a long caption's budget, with SOT and EOT. One object needs less
CLASS_NAMES = tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)
TEMPLATES = ("a {c}", "a picture of a {c}")


@dataclass(frozen=True)
class AnyWorld:
    """The settings of all worlds."""

    pixels: int = 32  # side of an image
    seed: int = 0

    def rng(self, stream: str, index: int) -> random.Random:
        """Return the random numbers of one sample, a function of the seed, a stream such as the split, and an index."""
        return random.Random(f"{self.seed}/{stream}/{index}")


@dataclass(frozen=True)
class World(AnyWorld):
    """The settings of the world."""

    objects: int = 2  # number of objects in a scene
    sizes: bool = False  # whether captions name the size, "small" or "large"
    fewest: int | None = None  # draw the number of objects from this one to `objects`
    without: str | None = None  # one of CLASS_NAMES, which is not in train/ and val/ but in splits of its own


@dataclass(frozen=True)
class Scene:
    """Objects in canonical order. `relation` (a key of RELATIONS) holds between each object and the next."""

    objects: tuple[SceneObject, ...]
    relation: str
    background: str


class Probe(NamedTuple):
    """A classification task."""

    classes: tuple[str, ...]
    templates: tuple[str, ...]  # of prompts, with {c} for the class
    draw: Callable[..., tuple[Scene, int]]  # (world, rng) -> a scene and its class


def check(world: World) -> None:
    """Raise ValueError for settings out of range."""
    if not (1 < world.objects <= max(COUNTS) and (world.fewest is None or 1 <= world.fewest < world.objects)):
        fewest = "" if world.fewest is None else f"{world.fewest}-"
        raise ValueError(f"--objects must be 2, 3, 4 or a range such as 1-3, not {fewest}{world.objects}")
    if world.without not in (None, *CLASS_NAMES):
        raise ValueError(f"--without {world.without!r} is none of {', '.join(CLASS_NAMES)}")
    if world.pixels < 10 * world.objects:
        raise ValueError(f"--size {world.pixels} cannot show {world.objects} objects: use {10 * world.objects} or more")


def draw_scene(world: World, rng: random.Random, count: int | None = None, concept: bool | None = None) -> Scene:
    """Draw a scene of `count` objects (default: the world's), all different, in cells along one axis.

    `concept` decides whether `world.without` is among them. None leaves it to chance.
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


def caption(objects: Sequence[SceneObject], relation: str) -> str:
    """Return the caption that names objects in their order."""
    return f" {relation} ".join(f"a {item.noun}" for item in objects)


def words(text: str) -> list[str]:
    """Split a caption into words and punctuation marks, each one token of CLIP's BPE."""
    return re.findall(r"\w+|[^\w\s]", text)


def long_caption(scene: Scene, rng: random.Random) -> str:
    """Draw several true sentences about one scene, 40 to 70 tokens with SOT and EOT."""
    def say(kind: str, **facts: str) -> str:
        return rng.choice(SENTENCES[kind]).format(**facts)

    count, neighbours = len(scene.objects), list(pairwise(scene.objects))
    if neighbours:
        first, second = rng.choice(neighbours)
    sentences = [
        say("opening" if neighbours else "alone", count=COUNTS[count], background=scene.background),
        say("forward", caption=caption(scene.objects, scene.relation)),
    ]
    if neighbours:
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


def captions(scene: Scene, rng: random.Random) -> dict[str, str]:
    """Return the short and the long caption of a scene."""
    return {"caption": caption(scene.objects, scene.relation), "long_caption": long_caption(scene, rng)}


def negative_captions(scene: Scene, i: int, j: int) -> dict[str, str] | None:
    """Return false captions under SugarCrepe's names, or None if objects `i` and `j` cannot swap colours.

    They cannot if the swap would name an object of the scene. A false relation is the other one of RELATIONS, so that
    no false caption can be told without the image.
    """
    a, b = scene.objects[i], scene.objects[j]
    named = {(item.colour, item.shape) for item in scene.objects}
    if not named.isdisjoint({(a.colour, b.shape), (b.colour, a.shape)}):
        return None

    def with_those(*two: SceneObject) -> str:
        objects = list(scene.objects)
        objects[i], objects[j] = two
        return caption(objects, scene.relation)

    other = next(relation for relation in RELATIONS if relation != scene.relation)
    return {"swap_att": with_those(replace(a, colour=b.colour), replace(b, colour=a.colour)),
            "swap_obj": with_those(b, a), "replace_rel": caption(scene.objects, other)}


def draw_pair(world: World, rng: random.Random) -> tuple[Scene, str, dict[str, str]]:
    """Draw a scene, its caption, and false captions under SugarCrepe's names."""
    negatives = None
    while not negatives:
        scene = draw_scene(world, rng)
        if len(scene.objects) > 1:
            negatives = negative_captions(scene, *rng.sample(range(len(scene.objects)), 2))
    return scene, caption(scene.objects, scene.relation), negatives


def _draw_labelled(world: World, rng: random.Random) -> tuple[Scene, int]:
    scene = draw_scene(world, rng, count=1)
    return scene, CLASS_NAMES.index(f"{scene.objects[0].colour} {scene.objects[0].shape}")


PROBES = {"probe": Probe(CLASS_NAMES, TEMPLATES, _draw_labelled)}


def words_of(tables: Iterable[Iterable[str]]) -> list[str]:
    """Return all words and punctuation marks in tables of texts, sorted, without their {fields}."""
    return sorted(set(words(re.sub(r"{.*?}", " ", " ".join(text for table in tables for text in table)))))


def caption_words() -> list[str]:
    """Return every word and punctuation mark that captions, templates and class names can contain, sorted."""
    tables = [CLASS_NAMES, TEMPLATES, RADII, RELATIONS, RELATIONS.values(), BACKGROUNDS, COUNTS.values(), COMPARISONS]
    return words_of([*tables, *PLACES, *SENTENCES.values()])
