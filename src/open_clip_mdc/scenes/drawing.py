"""Draw the synthetic scenes: outlines, colours, and objects on a grey background as an image.

Coordinates and radii are fractions of the image's side. y points down.
"""
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from PIL import Image, ImageDraw

Point = tuple[float, float]


def _corners(count: int, outer: float = 1.0, inner: float = 1.0, turn: float = 0.0) -> list[Point]:
    """Return corners of a polygon around the origin, at the radii `outer` and `inner` in turn."""
    radii = outer, inner
    angles = [turn + 2 * math.pi * i / count for i in range(count)]
    return [(radii[i % 2] * math.sin(angle), -radii[i % 2] * math.cos(angle)) for i, angle in enumerate(angles)]


def _ring() -> list[Point]:
    outer, inner = _corners(48), _corners(48, 0.55, 0.55)  # one polygon, whose hole is cut in from the edge
    return [*outer, outer[0], inner[0], *reversed(inner)]


def _cross() -> list[Point]:
    points = [(-0.285, -0.95), (0.285, -0.95), (0.285, -0.285)]
    for _ in range(3):  # the same, a quarter further
        points += [(-y, x) for x, y in points[-3:]]
    return points


def _heart() -> list[Point]:
    angles = [2 * math.pi * i / 48 for i in range(48)]
    points = [(16 * math.sin(a) ** 3, 5 * math.cos(2 * a) + 2 * math.cos(3 * a) + math.cos(4 * a) - 13 * math.cos(a))
              for a in angles]
    reach = max(math.hypot(x, y) for x, y in points)
    return [(x / reach, y / reach) for x, y in points]


# All outlines reach to a circle of radius 1, which is what "larger" compares. With outlines of equal area instead, the
# tiny model named colours and relations after 300 steps but guessed shapes (NELBO 2.9 nats per caption).
OUTLINES = {
    "circle": _corners(48),
    "square": _corners(4, turn=math.pi / 4),
    "triangle": _corners(3),
    "star": _corners(10, inner=0.4),
    "diamond": [(0.0, -1.0), (0.6, 0.0), (0.0, 1.0), (-0.6, 0.0)],
    "cross": _cross(),
    "ring": _ring(),
    "heart": _heart(),
}
COLOURS = {
    "red": (215, 45, 45), "green": (45, 165, 75), "blue": (50, 85, 215), "yellow": (235, 200, 45),
    "orange": (240, 130, 30), "purple": (130, 50, 170), "pink": (245, 150, 190), "brown": (115, 70, 35),
    "white": (240, 240, 240), "black": (15, 15, 15),
}
# Grey levels near the middle, as nearly white or black ones outweigh the position embedding at the start of training.
# After 300 steps the tiny model told swapped attributes in 50 % (chance) on 200-240 and 15-60, and in 100 % on these.
BACKGROUNDS = {"light": (150, 180), "dark": (75, 105)}
SUPERSAMPLING = 4


@dataclass(frozen=True)
class SceneObject:
    """One object: its colour and shape (keys of COLOURS and OUTLINES), size in words, centre and outer radius."""

    colour: str
    shape: str
    size: str
    x: float
    y: float
    radius: float

    @property
    def noun(self) -> str:
        """Return the object in words, such as "small red circle"."""
        return f"{self.size} {self.colour} {self.shape}".strip()


class Scene(Protocol):
    """Objects on a background, as `render` takes them."""

    objects: Sequence[SceneObject]
    background: str  # a key of BACKGROUNDS


def _polygon(item: SceneObject, side: int) -> list[Point]:
    x, y, radius = side * item.x, side * item.y, side * item.radius
    return [(x + radius * dx, y + radius * dy) for dx, dy in OUTLINES[item.shape]]


def mask(scene: Scene, pixels: int, classes: Sequence[str]) -> Image.Image:
    """Draw a segmentation mask: for each pixel the index in `classes` of the shape that covers most of it, or 0."""
    side = pixels * SUPERSAMPLING
    image = Image.new("L", (side, side))
    draw = ImageDraw.Draw(image)
    for item in scene.objects:
        draw.polygon(_polygon(item, side), fill=classes.index(item.shape))
    cells = np.asarray(image).reshape(pixels, SUPERSAMPLING, pixels, SUPERSAMPLING)
    votes = [(cells == number).sum((1, 3)) for number in range(len(classes))]
    return Image.fromarray(np.argmax(votes, axis=0).astype(np.uint8))


def render(scene: Scene, pixels: int, rng: random.Random) -> Image.Image:
    """Draw a scene as an RGB image, anti-aliased, with slightly varying colours and noise of +-6 grey levels."""
    side = pixels * SUPERSAMPLING
    image = Image.new("RGB", (side, side), (rng.randint(*BACKGROUNDS[scene.background]),) * 3)
    draw = ImageDraw.Draw(image)
    for item in scene.objects:
        tone = tuple(level + rng.randint(-12, 12) for level in COLOURS[item.colour])
        draw.polygon(_polygon(item, side), fill=tone)
    smooth = np.asarray(image.reduce(SUPERSAMPLING), dtype=np.int16)
    noise = np.frombuffer(rng.randbytes(pixels * pixels), dtype=np.uint8).reshape(pixels, pixels, 1) % 13 - np.int16(6)
    return Image.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8))
