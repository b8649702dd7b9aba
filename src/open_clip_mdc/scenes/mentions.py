"""The world of mentions: plain scenes of two objects whose shape can be guessed from the colour.

Colours and shapes are paired ("red" with "circle", ...). An object has its colour's shape with probability `redundancy`
and else any of the four: at 0 one word says nothing of the other, at 1 all. A caption says both, in an order that a
coin decides for the caption ("a red circle left of a blue square", "a circle red left of a square blue"): what stands
first and second differs in nothing but its place. Objects are drawn independently of each other, and may be alike.

A long caption adds a sentence that says all of it again. Every word is one of the plain world's.
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
ORDERS = ("colour", "shape")  # what is said first


@dataclass(frozen=True)
class World(plain.World):
    redundancy: float = 0.9
    first: str | None = None  # of ORDERS, in every caption; None: a coin decides


@dataclass(frozen=True)
class Scene(plain.Scene):
    order: str = ORDERS[0]


def check(world: World) -> None:
    plain.check(world)
    if not 0 <= world.redundancy <= 1:
        raise ValueError(f"--redundancy {world.redundancy} should be from 0 to 1")


def draw_scene(world: World, rng: random.Random) -> Scene:
    """Draw a scene. One of another redundancy by the same random numbers has other shapes and is else the same."""
    drawn = plain.draw_scene(world, rng)
    objects = []
    for item in drawn.objects:
        colour, shape, told = rng.choice(COLOURS), rng.choice(SHAPES), rng.random() < world.redundancy
        objects.append(replace(item, colour=colour, shape=SHAPE_OF[colour] if told else shape))
    order = rng.choice(ORDERS)
    return Scene(tuple(objects), drawn.relation, drawn.background, world.first or order)


def caption(scene: Scene, order: str | None = None) -> str:
    """Return the caption in an order, by default the scene's own."""
    return f" {scene.relation} ".join(f"a {_noun(item, order or scene.order)}" for item in scene.objects)


def _noun(item: SceneObject, order: str) -> str:
    return " ".join((item.colour, item.shape) if order == ORDERS[0] else (item.shape, item.colour))


def law(redundancy: float) -> Iterator[tuple[str, float]]:
    """Yield every caption of a world without `first`, and its probability."""
    kinds = [(colour, shape, ((SHAPE_OF[colour] == shape) * redundancy + (1 - redundancy) / len(SHAPES)) / len(COLOURS))
             for colour in COLOURS for shape in SHAPES]
    for pair in product(kinds, repeat=2):
        objects = tuple(SceneObject(colour, shape, "", 0.0, 0.0, 0.0) for colour, shape, _ in pair)
        for relation, order in product(RELATIONS, ORDERS):
            yield caption(Scene(objects, relation, "", order)), prod(p for *_, p in pair) / len(RELATIONS) / len(ORDERS)


def captions(scene: Scene, rng: random.Random) -> dict[str, str | list[str]]:
    """Return the short and the long caption, and the short one in both orders."""
    text, (first, second) = caption(scene), (_noun(item, scene.order) for item in scene.objects)
    return {"caption": text, "long_caption": f"{text}. the {second} is {RELATIONS[scene.relation]} the {first}.",
            "captions": [caption(scene, order) for order in ORDERS]}


draw_pair = plain.draw_pair  # of different objects, colour first


def _probe(classes: tuple[str, ...]) -> Probe:
    def labelled(world: World, rng: random.Random) -> tuple[plain.Scene, int]:
        scene = plain.draw_scene(world, rng, count=1)  # of any colour and shape: neither is known by the other
        item = scene.objects[0]
        return scene, classes.index(item.colour if classes is COLOURS else item.shape)

    return Probe(classes, ("a {c} shape",), labelled)


PROBES = {"probe-colour": _probe(COLOURS), "probe-shape": _probe(SHAPES)}
