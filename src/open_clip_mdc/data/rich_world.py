"""The rich world of scenes: 1 to 4 objects anywhere, and captions that say some of what is true of them, in many ways.

Objects differ in colour (10), shape (8) and size (3). A short caption, like a web page's alt text, says two objects and
a relation, or one and its place, or lists some; a long one has a few sentences. What is said, in which order and by
which words is drawn, so that the image does not decide the caption. Everything said is true, and no two objects of a
scene have both colour and shape in common: a false caption is false of every object.

Captions have 6 to 40 tokens with SOT and EOT. Every word is one token of CLIP's BPE; model_configs/rich_bpe.txt.gz is
the part of it that these words need (bpe.py).
"""
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .drawing import BACKGROUNDS, COLOURS, OUTLINES, SceneObject
from .plain_world import COUNTS, Probe, words

RADII = {"small": (0.085, 0.105), "medium": (0.13, 0.15), "large": (0.18, 0.21)}  # of the image's side
GAP = 0.03  # at least, between objects
DOMINANCE = 1.5  # an object is "left of" another if it is so by this many times what it is above or below it
TRIES = 50  # to place the objects, before all are drawn anew
KINDS = tuple((colour, shape) for colour in COLOURS for shape in OUTLINES)

SIZES = {"small": ("small", "little"), "medium": ("medium",), "large": ("large", "big")}
RELATIONS = {"left": ("left of", "to the left of"), "right": ("right of", "to the right of"),
             "above": ("above", "over"), "below": ("below", "under"),
             "bigger": ("bigger than", "larger than"), "smaller": ("smaller than",)}
OPPOSITES = {"left": "right", "right": "left", "above": "below", "below": "above", "bigger": "smaller",
             "smaller": "bigger"}
SPATIAL = ("left", "right", "above", "below")
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "center", "right")
PLACES = {(row, column): "in the middle" if (row, column) == ("middle", "center") else
          f"at the {row}" if column == "center" else f"on the {column}" if row == "middle" else
          f"in the {row} {column} corner" for row in ROWS for column in COLUMNS}

# Of short captions: a, b, c are objects with an article, bare_a is one without, b_shape its shape.
ONE = ("{a} on a {background} background", "{a} {place}", "a photo of {a} {place}",
       "picture of {a} , {background} background", "one {bare_a} {place}",
       "drawing of {a} on a {background} background")
RELATED = ("{a} {relation} {b}", "a photo of {a} {relation} {b}", "{a} {relation} {b} on a {background} background",
           "{bare_a} {relation} {bare_b} , {background} background", "{count} shapes with {a} {relation} {b}")
LISTED = ("{a} and {b} on a {background} background", "{count} shapes , one is {a}", "{a} {place} and {b}")
THREE = ("{a} , {b} and {c}", "photo of {a} , {b} and {c}")
SAME_COLOUR = ("{a} and a {b_shape} of the same colour",)
SAME_SHAPE = ("{a} and one that is {b_colour}", "{a} beside one that is {b_colour}")
# Of long captions.
OPENING = ("there are {count} shapes on a {background} background.", "one can see {count} shapes.",
           "the background is {background}.", "a drawing of {count} shapes.")
OPENING_ONE = ("there is one shape on a {background} background.", "one can see a shape.",
               "the background is {background}.", "a drawing of one shape.")
PLACED = ("{a} is {place}.", "{place} there is {a}.", "{place} lies {a}.")
RELATION = ("{a} is {relation} {b}.", "{relation} {b} is {a}.", "there is {a} {relation} {b}.")
COMPARISON = ("{a} is {relation} {b}.",)
SAME = ("{a} has the same colour as {b}.",)
LONG_WORDS = (18, 38)  # the range of a long caption's budget
ALT_WORDS = ("stock photo image free download wallpaper vector icon banner logo design untitled preview click here buy "
             "now sale best new shop online page home cheap set").split()
SHORT_NOISE, LONG_NOISE = (6, 12), (16, 24)  # numbers of words
REFERENCES = 5  # captions of a scene to compare with


@dataclass(frozen=True)
class World:
    """What is drawn: image side in pixels, random seed, share of training captions that are of something else."""

    pixels: int = 48
    seed: int = 0
    noise: float = 0.0

    def rng(self, stream: str, index: int) -> random.Random:
        """The random numbers of one scene."""
        return random.Random(f"{self.seed}/{stream}/{index}")


@dataclass(frozen=True)
class Scene:
    """What is seen."""

    objects: tuple[SceneObject, ...]
    background: str


def check(world: World) -> None:
    """Raises ValueError if such scenes cannot be drawn."""
    if world.pixels < 40:
        raise ValueError(f"--size {world.pixels} cannot show 4 objects of 3 sizes: use 40 or more")
    if not 0 <= world.noise < 1:
        raise ValueError(f"--noise {world.noise} should be at least 0 and less than 1")


def related(a: SceneObject, b: SceneObject) -> list[str]:
    """The keys of RELATIONS in which `a` clearly is to `b`."""
    dx, dy, found = b.x - a.x, b.y - a.y, []
    if abs(dx) > DOMINANCE * abs(dy):
        found.append("left" if dx > 0 else "right")
    if abs(dy) > DOMINANCE * abs(dx):
        found.append("above" if dy > 0 else "below")
    if a.size != b.size:
        found.append("bigger" if a.radius > b.radius else "smaller")
    return found


def pairs(objects: Sequence[SceneObject], kinds: Sequence[str]) -> list[tuple[SceneObject, SceneObject, str]]:
    """All ordered pairs of objects and what the first is to the second, of these kinds of relation."""
    return [(a, b, relation) for a in objects for b in objects if a is not b for relation in related(a, b)
            if relation in kinds]


def cell(item: SceneObject) -> tuple[str, str]:
    """The key of PLACES: in which third of the height and of the width the centre lies."""
    return ROWS[int(item.y * 3)], COLUMNS[int(item.x * 3)]


def draw_object(rng: random.Random, kind: tuple[str, str], size: str | None = None,
                place: tuple[str, str] | None = None) -> SceneObject:
    """An object anywhere, or with its centre in the cell `place`."""
    size = size or rng.choice(tuple(RADII))
    radius = rng.uniform(*RADII[size])
    thirds = (COLUMNS.index(place[1]), ROWS.index(place[0])) if place else (None, None)
    x, y = (rng.uniform(radius, 1 - radius) if third is None else
            rng.uniform(max(radius, third / 3), min(1 - radius, (third + 1) / 3 - 1e-3)) for third in thirds)
    return SceneObject(*kind, size, round(x, 4), round(y, 4), round(radius, 4))


def draw_scene(world: World, rng: random.Random, count: int | None = None, sizes: Sequence[str] = ()) -> Scene:
    """Objects that do not touch, at least two of them clearly beside or above one another.

    Args:
        count: of objects; default 1 to 4.
        sizes: of the objects; default as it comes, but many large ones seldom find room.
    """
    count = count or rng.randint(1, 4)
    while True:
        kinds, objects = rng.sample(KINDS, count), []
        for _ in range(TRIES):
            item = draw_object(rng, kinds[len(objects)], sizes[len(objects)] if sizes else None)
            if all((item.x - o.x) ** 2 + (item.y - o.y) ** 2 > (item.radius + o.radius + GAP) ** 2 for o in objects):
                objects.append(item)
            if len(objects) == count:
                break
        if len(objects) == count and (count == 1 or pairs(objects, SPATIAL)):
            return Scene(tuple(objects), rng.choice(tuple(BACKGROUNDS)))


# ---- wording


def bare(item: SceneObject, rng: random.Random) -> str:
    """ "large red circle"; the size is said every other time."""
    size = rng.choice(SIZES[item.size]) + " " if rng.random() < 0.5 else ""
    return f"{size}{item.colour} {item.shape}"


def with_article(noun: str) -> str:
    """With "a", or "an" before a vowel."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def fill(template: str, scene: Scene, nouns: Sequence[str], relation: str = "", place: str = "") -> str:
    """A template with the nouns of up to three objects."""
    facts = {"count": COUNTS[len(scene.objects)], "background": scene.background, "relation": relation, "place": place}
    for name, noun in zip("abc", nouns, strict=False):
        *_, colour, shape = noun.split()
        facts |= {name: with_article(noun), f"bare_{name}": noun, f"{name}_colour": colour, f"{name}_shape": shape}
    return template.format(**facts)


def say(templates: Sequence[str], rng: random.Random, scene: Scene, *items: SceneObject, relation: str = "") -> str:
    """One of these templates, of some objects; the place is the first one's."""
    return fill(rng.choice(templates), scene, [bare(item, rng) for item in items],
                relation and rng.choice(RELATIONS[relation]), PLACES[cell(items[0])])


def caption(scene: Scene, rng: random.Random) -> str:
    """A short one: 6 to 16 words of what is true, without a full stop."""
    objects = rng.sample(scene.objects, len(scene.objects))
    if len(objects) == 1:
        return say(ONE, rng, scene, *objects)
    kind, (a, b) = rng.random(), objects[:2]
    if kind < 0.6:
        a, b, relation = rng.choice(pairs(objects, tuple(RELATIONS)))
        return say(RELATED, rng, scene, a, b, relation=relation)
    if kind < 0.7:
        return say(ONE, rng, scene, a)
    if a.colour == b.colour or a.shape == b.shape:
        return say(SAME_COLOUR if a.colour == b.colour else SAME_SHAPE, rng, scene, a, b)
    if len(objects) > 2 and kind < 0.85:
        return say(THREE, rng, scene, *objects[:3])
    return say(LISTED, rng, scene, a, b)


def long_caption(scene: Scene, rng: random.Random) -> str:
    """Two to four sentences, 13 to 38 words and full stops."""
    opening = say(OPENING if len(scene.objects) > 1 else OPENING_ONE, rng, scene, scene.objects[0])
    known = pairs(scene.objects, tuple(RELATIONS))
    further = [say(PLACED, rng, scene, item) for item in scene.objects]
    further += [say(RELATION if relation in SPATIAL else COMPARISON, rng, scene, a, b, relation=relation)
                for a, b, relation in rng.sample(known, min(3, len(known)))]
    further += [say(SAME, rng, scene, a, b) for a in scene.objects for b in scene.objects
                if a is not b and a.colour == b.colour]
    rng.shuffle(further)
    left, chosen = rng.randint(*LONG_WORDS) - len(words(opening)), []
    for sentence in further:
        if len(words(sentence)) <= left or not chosen:
            chosen.append(sentence)
            left -= len(words(sentence))
    chosen.insert(rng.randrange(2) * len(chosen), opening)
    return " ".join(chosen)


def captions(scene: Scene, rng: random.Random) -> dict[str, str | list[str]]:
    """What KEY.json says of a scene: a short caption, a long one, and several short ones to compare with."""
    return {"caption": caption(scene, rng), "long_caption": long_caption(scene, rng),
            "captions": [caption(scene, rng) for _ in range(REFERENCES)]}


def noise(world: World, index: int) -> tuple[str, str] | None:
    """What training sample `index` says instead of its captions, short and long; None of most.

    Of another scene, or words such as alt texts have. Scenes are the same with and without noise.
    """
    rng = world.rng("noise", index)
    if rng.random() >= world.noise:
        return None
    if rng.random() < 0.5:
        other = draw_scene(world, rng)
        return caption(other, rng), long_caption(other, rng)
    return tuple(" ".join(rng.sample(ALT_WORDS, rng.randint(*length))) for length in (SHORT_NOISE, LONG_NOISE))


def draw_pair(world: World, rng: random.Random) -> tuple[Scene, str, dict[str, str]]:
    """A scene, a true caption, and false ones by SugarCrepe's names; a relation is replaced by its opposite.

    No object of the scene has the one's colour and the other's shape, so that swapped attributes are false of all.
    """
    while True:
        scene = draw_scene(world, rng, rng.randint(2, 4))
        a, b, relation = rng.choice(pairs(scene.objects, SPATIAL))
        named = {(item.colour, item.shape) for item in scene.objects}
        if named.isdisjoint({(a.colour, b.shape), (b.colour, a.shape)}):
            break
    template, form, nouns = rng.choice(RELATED), rng.randrange(2), [bare(a, rng), bare(b, rng)]
    recoloured = [nouns[0].replace(a.colour, b.colour), nouns[1].replace(b.colour, a.colour)]

    def text(nouns: list[str], relation: str) -> str:
        return fill(template, scene, nouns, RELATIONS[relation][form])

    return scene, text(nouns, relation), {
        "swap_att": text(recoloured, relation), "swap_obj": text(nouns[::-1], relation),
        "replace_rel": text(nouns, OPPOSITES[relation])}


# ---- probes: one property is asked for, the others vary at random


def _one(world: World, rng: random.Random, colour: str | None = None, shape: str | None = None,
         size: str | None = None, place: tuple[str, str] | None = None) -> Scene:
    kind = colour or rng.choice(tuple(COLOURS)), shape or rng.choice(tuple(OUTLINES))
    return Scene((draw_object(rng, kind, size, place),), rng.choice(tuple(BACKGROUNDS)))


def _related(world: World, rng: random.Random, relation: str) -> Scene:
    """A large and a small object, the large one in this relation to the small one."""
    while True:
        scene = draw_scene(world, rng, 2, ("large", "small"))
        if relation in related(*scene.objects):
            return scene


def _probe(values: Iterable, classes: Iterable[str], template: str, draw: Callable[..., Scene]) -> Probe:
    """All classes are as frequent: chance is one in so many."""
    values = tuple(values)

    def labelled(world: World, rng: random.Random) -> tuple[Scene, int]:
        label = rng.randrange(len(values))
        return draw(world, rng, values[label]), label

    return Probe(tuple(classes), (template,), labelled)


PROBES = {
    "probe-colour": _probe(COLOURS, COLOURS, "a {c} shape", lambda *given: _one(*given[:2], colour=given[2])),
    "probe-shape": _probe(OUTLINES, OUTLINES, "a {c}", lambda *given: _one(*given[:2], shape=given[2])),
    "probe-size": _probe(RADII, RADII, "a {c} shape", lambda *given: _one(*given[:2], size=given[2])),
    "probe-count": _probe(COUNTS, COUNTS.values(), "{c} shapes", draw_scene),
    "probe-position": _probe(PLACES, PLACES.values(), "a shape {c}", lambda *given: _one(*given[:2], place=given[2])),
    "probe-relation": _probe(SPATIAL, (RELATIONS[relation][0] for relation in SPATIAL),
                             "a large shape {c} a small shape", _related),
}


def caption_words() -> list[str]:
    """Every word and punctuation mark that captions, templates and class names can contain, sorted."""
    templates = (ONE, RELATED, LISTED, THREE, SAME_COLOUR, SAME_SHAPE, OPENING, OPENING_ONE, PLACED, RELATION,
                 COMPARISON, SAME, *SIZES.values(), *RELATIONS.values(), tuple(COLOURS), tuple(OUTLINES),
                 tuple(COUNTS.values()), tuple(BACKGROUNDS), tuple(PLACES.values()), ALT_WORDS, ("a", "an"),
                 *((*probe.templates, *probe.classes) for probe in PROBES.values()))
    return sorted(set(words(re.sub(r"{.*?}", " ", " ".join(text for table in templates for text in table)))))
