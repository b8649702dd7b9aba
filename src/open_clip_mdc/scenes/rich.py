"""The rich world of scenes: 1 to 4 objects on a grid of four cells, and several true captions of each scene.

Objects have one of 10 colours, 8 shapes and 3 sizes. A short caption, like a web page's alt text, names one object and
its place, or the first two objects and their relation. A long one has a few sentences. The image does not determine the
caption: the wording, and whether it tells the background and the number of objects, are drawn. Objects are named in
reading order, for the reason given in plain.py. Captions are true. No two objects of a scene have the same colour and
shape, so that a false caption is false for every object.

Each statement has only two or three wordings, as a small masked diffusion model learns wording before it learns what
depends on the image. With fourteen templates ViT-Ti-8 named places and shapes no better than chance after 160,000
images.

Captions have 7 to 40 tokens with SOT and EOT. model_configs/rich_bpe.txt.gz is the part of CLIP's BPE that they need.
"""
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from .drawing import BACKGROUNDS, COLOURS, OUTLINES, SceneObject
from .plain import COUNTS, AnyWorld, Probe, words, words_of

RADII = {"small": (0.27, 0.31), "medium": (0.36, 0.39), "large": (0.45, 0.48)}  # in cells of half the image's side
KINDS = tuple((colour, shape) for colour in COLOURS for shape in OUTLINES)

SIZES = {"small": "small ", "medium": "", "large": "large "}  # the words before the colour
# The relation of an object to a later one, by the number of rows down and of columns to the right to that one. All have
# two words, so that the number of tokens, which a masked diffusion model is given, does not tell the relation.
RELATIONS = {(0, 1): ("left of", "west of"), (1, 0): ("up above", "north of"), (1, 1): ("northwest of",),
             (1, -1): ("northeast of",)}
ROWS, COLUMNS = ("top", "bottom"), ("left", "right")
PLACES = {(y, x): f"in the {row} {column} corner" for y, row in enumerate(ROWS) for x, column in enumerate(COLUMNS)}

# Templates of short captions. a and b are objects with an article, in reading order.
ONE = ("photo of {a}", "{a} {place}", "{a} {place} on a {background} background")
TWO = ("{a} {relation} {b}", "photo of {a} {relation} {b}", "{a} {relation} {b} on a {background} background")
MORE = ("{count} shapes , {a} {relation} {b}", "photo of {count} shapes , {a} {relation} {b}",
        "{count} shapes on a {background} background , {a} {relation} {b}")
# Templates of sentences in long captions.
OPENING = ("there are {count} shapes on a {background} background.", "one can see {count} shapes.")
OPENING_ONE = ("there is one shape on a {background} background.", "one can see a shape.")
PLACED = ("{a} is {place}.", "{place} there is {a}.")
RELATION = ("{a} is {relation} {b}.",)
SAME = ("{a} has the same colour as {b}.",)
LONG_WORDS = (18, 38)  # range of a long caption's budget
ALT_WORDS = ("stock photo image free download wallpaper vector icon banner logo design untitled preview click here buy "
             "now sale best new shop online page home cheap set").split()
SHORT_NOISE, LONG_NOISE = (6, 12), (16, 24)  # ranges of their number of words
REFERENCES = 5  # number of reference captions of a scene


@dataclass(frozen=True)
class World(AnyWorld):
    """The settings of the world."""

    noise: float = 0.0  # share of training captions that do not describe the image


@dataclass(frozen=True)
class Scene:
    """Objects in reading order on a background."""

    objects: tuple[SceneObject, ...]
    background: str


def check(world: World) -> None:
    """Raise ValueError for settings out of range."""
    if world.pixels < 32:
        raise ValueError(f"--size {world.pixels} cannot show objects of 3 sizes in 4 cells: use 32 or more")
    if not 0 <= world.noise < 1:
        raise ValueError(f"--noise {world.noise} should be at least 0 and less than 1")


def cell(item: SceneObject) -> tuple[int, int]:
    """Return the key of PLACES for an object: the row and the column of its cell."""
    return int(item.y * 2), int(item.x * 2)


def offset(a: SceneObject, b: SceneObject) -> tuple[int, int]:
    """Return the key of RELATIONS: the rows down and columns to the right from `a` to a later object `b`."""
    (row, column), (below, beside) = cell(a), cell(b)
    return below - row, beside - column


def draw_object(rng: random.Random, kind: tuple[str, str], size: str | None = None,
                place: tuple[int, int] | None = None) -> SceneObject:
    """Draw an object of a given colour and shape, by default with any size and in any cell."""
    size = size or rng.choice(tuple(RADII))
    row, column = place or rng.choice(tuple(PLACES))
    radius = rng.uniform(*RADII[size])
    x, y = (half + rng.uniform(radius, 1 - radius) for half in (column, row))
    return SceneObject(*kind, size, *(round(cells / 2, 4) for cells in (x, y, radius)))


def draw_scene(world: World, rng: random.Random, count: int | None = None) -> Scene:
    """Draw `count` objects (default: one in half of the scenes, else 2 to 4) in different cells, in reading order."""
    count = count or rng.choice((1, 1, 1, 2, 3, 4))
    kinds, places = rng.sample(KINDS, count), sorted(rng.sample(tuple(PLACES), count))
    return Scene(tuple(draw_object(rng, kind, place=place) for kind, place in zip(kinds, places, strict=True)),
                 rng.choice(tuple(BACKGROUNDS)))


# ---- wording


def noun(item: SceneObject) -> str:
    """Return an object in words with an article, such as "a small red circle"."""
    words = f"{SIZES[item.size]}{item.colour} {item.shape}"
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def fill(template: str, scene: Scene, nouns: Sequence[str], relation: str = "", place: str = "") -> str:
    """Fill in the fields of a template. `nouns` are for {a} and {b}."""
    facts = {"count": COUNTS[len(scene.objects)], "background": scene.background, "relation": relation, "place": place}
    return template.format(**facts, **dict(zip("ab", nouns, strict=False)))


def say(templates: Sequence[str], rng: random.Random, scene: Scene, *items: SceneObject) -> str:
    """Draw a template and fill it in for one or two objects of a scene."""
    return fill(rng.choice(templates), scene, [noun(item) for item in items],
                rng.choice(RELATIONS[offset(*items)]) if len(items) > 1 else "", PLACES[cell(items[0])])


def caption(scene: Scene, rng: random.Random) -> str:
    """Draw a short caption of the first object or the first two, without a full stop."""
    return say((ONE, TWO, MORE, MORE)[len(scene.objects) - 1], rng, scene, *scene.objects[:2])


def long_caption(scene: Scene, rng: random.Random) -> str:
    """Draw a caption of two sentences or more, with 16 to 38 words and full stops."""
    said = [say(OPENING if len(scene.objects) > 1 else OPENING_ONE, rng, scene, scene.objects[0])]
    further = [say(PLACED, rng, scene, item) for item in scene.objects]
    further += [say(RELATION, rng, scene, a, b) for a, b in pairwise(scene.objects)]
    further += [say(SAME, rng, scene, a, b) for a, b in combinations(scene.objects, 2) if a.colour == b.colour]
    left = rng.randint(*LONG_WORDS) - len(words(said[0]))
    for sentence in further:
        if len(words(sentence)) <= left or len(said) < 2:
            said.append(sentence)
            left -= len(words(sentence))
    return " ".join(said)


def captions(scene: Scene, rng: random.Random) -> dict[str, str | list[str]]:
    """Draw a short caption, a long one, and REFERENCES short ones."""
    return {"caption": caption(scene, rng), "long_caption": long_caption(scene, rng),
            "captions": [caption(scene, rng) for _ in range(REFERENCES)]}


def noise(world: World, index: int) -> tuple[str, str] | None:
    """Return the false captions, short and long, of a training sample, or None for a sample without noise."""
    rng = world.rng("noise", index)
    if rng.random() >= world.noise:
        return None
    if rng.random() < 0.5:  # captions of another scene, or below words of alt texts
        other = draw_scene(world, rng)
        return caption(other, rng), long_caption(other, rng)
    return tuple(" ".join(rng.sample(ALT_WORDS, rng.randint(*length))) for length in (SHORT_NOISE, LONG_NOISE))


def draw_pair(world: World, rng: random.Random) -> tuple[Scene, str, dict[str, str]]:
    """Draw a scene of two objects, a true caption, and false captions under SugarCrepe's names.

    Only the image tells which caption is true: objects are exchangeable, and the false relation is that of another
    scene, so that each pair of relations is as frequent as its reverse.
    """
    while True:
        scene, other = draw_scene(world, rng, 2), draw_scene(world, rng, 2)
        a, b = scene.objects
        if a.shape != b.shape and a.colour != b.colour and offset(a, b) != offset(*other.objects):
            break
    template = rng.choice(TWO)
    here, elsewhere = (rng.choice(RELATIONS[offset(*drawn.objects)]) for drawn in (scene, other))

    def text(a: SceneObject, b: SceneObject, relation: str = here) -> str:
        return fill(template, scene, (noun(a), noun(b)), relation)

    return scene, text(a, b), {"swap_att": text(replace(a, colour=b.colour), replace(b, colour=a.colour)),
                               "swap_obj": text(b, a), "replace_rel": text(a, b, elsewhere)}


# ---- probes: classify one property, while the others vary at random


def _one(world: World, rng: random.Random, colour: str | None = None, shape: str | None = None,
         size: str | None = None, place: tuple[int, int] | None = None) -> Scene:
    kind = colour or rng.choice(tuple(COLOURS)), shape or rng.choice(tuple(OUTLINES))
    return Scene((draw_object(rng, kind, size, place),), rng.choice(tuple(BACKGROUNDS)))


def _related(world: World, rng: random.Random, wanted: tuple[int, int]) -> Scene:
    while True:
        scene = draw_scene(world, rng, 2)
        if offset(*scene.objects) == wanted:
            return scene


def _probe(draw: Callable[..., Scene], name: str, values: Iterable, classes: Iterable[str], template: str) -> Probe:
    values = tuple(values)  # all are equally frequent, so chance is 1 / len(values)

    def labelled(world: World, rng: random.Random) -> tuple[Scene, int]:
        label = rng.randrange(len(values))
        return draw(world, rng, **{name: values[label]}), label

    return Probe(tuple(classes), (template,), labelled)


PROBES = {
    "probe-colour": _probe(_one, "colour", COLOURS, COLOURS, "a {c} shape"),
    "probe-shape": _probe(_one, "shape", OUTLINES, OUTLINES, "a {c}"),
    "probe-size": _probe(_one, "size", RADII, RADII, "a {c} shape"),
    "probe-count": _probe(draw_scene, "count", COUNTS, COUNTS.values(), "{c} shapes"),
    "probe-position": _probe(_one, "place", PLACES, PLACES.values(), "a shape {c}"),
    "probe-relation": _probe(_related, "wanted", RELATIONS, (wordings[0] for wordings in RELATIONS.values()),
                             "a shape {c} a shape"),
}


def caption_words() -> list[str]:
    """Return every word and punctuation mark that captions, templates and class names can contain, sorted."""
    templates = (ONE, TWO, MORE, OPENING, OPENING_ONE, PLACED, RELATION, SAME, SIZES.values(), *RELATIONS.values(),
                 COLOURS, OUTLINES, COUNTS.values(), BACKGROUNDS, PLACES.values(), ALT_WORDS, ("a", "an"),
                 *(probe.templates + probe.classes for probe in PROBES.values()))
    return words_of(templates)
