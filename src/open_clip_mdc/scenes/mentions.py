"""The world of mentions: plain scenes of two objects whose shape can be guessed from the colour.

Each colour has a shape ("red" has "circle", ...). An object takes the shape of its colour with probability
`redundancy`, and else any of the four. At 0 one word tells nothing about the other, at 1 everything. A caption names
both, in one of two orders drawn for each caption ("a red circle left of a blue square", "a circle red left of a square
blue"). So the first and the second word differ only in their position. Objects are drawn independently of each other,
and may look the same.

A long caption adds a sentence that repeats everything. All words are in the plain world's vocabulary.
"""
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from . import plain
from .drawing import SceneObject
from .plain import COLOURS, RELATIONS, SHAPES, Probe

SHAPE_OF = dict(zip(COLOURS, SHAPES, strict=True))
ORDERS = ("colour", "shape")  # the word that comes first


@dataclass(frozen=True)
class World(plain.World):
    """The settings of the world."""

    redundancy: float = 0.9


@dataclass(frozen=True)
class Scene(plain.Scene):
    """A plain scene with the order of words in its caption."""

    order: str = ORDERS[0]


def check(world: World) -> None:
    """Raise ValueError for settings out of range."""
    plain.check(world)
    if not 0 <= world.redundancy <= 1:
        raise ValueError(f"--redundancy {world.redundancy} should be from 0 to 1")


def draw_scene(world: World, rng: random.Random) -> Scene:
    """Draw a scene. With another redundancy the same random numbers give the same scene with other shapes."""
    drawn = plain.draw_scene(world, rng)
    objects = []
    for item in drawn.objects:
        colour, shape, told = rng.choice(COLOURS), rng.choice(SHAPES), rng.random() < world.redundancy
        objects.append(replace(item, colour=colour, shape=SHAPE_OF[colour] if told else shape))
    return Scene(tuple(objects), drawn.relation, drawn.background, rng.choice(ORDERS))


def caption(scene: Scene, order: str | None = None) -> str:
    """Return the caption in a given order, by default the scene's own."""
    return f" {scene.relation} ".join(f"a {_noun(item, order or scene.order)}" for item in scene.objects)


def _noun(item: SceneObject, order: str) -> str:
    return " ".join((item.colour, item.shape) if order == ORDERS[0] else (item.shape, item.colour))


def law(redundancy: float) -> Iterator[tuple[str, float]]:
    """Yield every caption and its probability."""
    kinds = [(colour, shape, ((SHAPE_OF[colour] == shape) * redundancy + (1 - redundancy) / len(SHAPES)) / len(COLOURS))
             for colour in COLOURS for shape in SHAPES]
    for pair in product(kinds, repeat=2):
        objects = tuple(SceneObject(colour, shape, "", 0.0, 0.0, 0.0) for colour, shape, _ in pair)
        for relation, order in product(RELATIONS, ORDERS):
            yield caption(Scene(objects, relation, "", order)), prod(p for *_, p in pair) / len(RELATIONS) / len(ORDERS)


def captions(scene: Scene, rng: random.Random) -> dict[str, str | list[str]]:
    """Return the short caption, the long one, and the short one in both orders."""
    text, (first, second) = caption(scene), (_noun(item, scene.order) for item in scene.objects)
    return {"caption": text, "long_caption": f"{text}. the {second} is {RELATIONS[scene.relation]} the {first}.",
            "captions": [caption(scene, order) for order in ORDERS]}


draw_pair = plain.draw_pair  # objects differ, and the colour comes first


def _probe(kind: str, classes: tuple[str, ...]) -> Probe:
    def labelled(world: World, rng: random.Random) -> tuple[plain.Scene, int]:
        scene = plain.draw_scene(world, rng, count=1)  # here the colour tells nothing about the shape
        return scene, classes.index(getattr(scene.objects[0], kind))

    return Probe(classes, ("a {c} shape",), labelled)


PROBES = {"probe-colour": _probe("colour", COLOURS), "probe-shape": _probe("shape", SHAPES)}
