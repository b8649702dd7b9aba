"""Write and read shards, make images with five captions each, and run `open_clip_mdc prepare`."""
from functools import cache
from pathlib import Path

from conftest import members, run_tool, saved
from PIL import Image

COLOURS, SHAPES = ("red", "green", "blue", "yellow"), ("circle", "square")
ENDINGS = ("left of", "right of", "up above", "down below", "in the middle")


def texts(i: int) -> list[str]:
    """The five captions of image i of eight, in the scenes' words."""
    return [f"a {COLOURS[i % 4]} {SHAPES[i // 4 % 2]} {ending}" for ending in ENDINGS]


@cache
def make_image(i: int, kind: str = "jpeg") -> bytes:
    return saved(Image.effect_noise((40 + i, 40), 60).convert("RGB"), kind)


def samples(*shards: Path) -> dict[str, dict[str, bytes]]:
    """The members of tar files, grouped by key."""
    grouped: dict = {}
    for name, data in (item for shard in shards for item in members(shard).items()):
        key, extension = name.split(".")
        grouped.setdefault(key, {})[extension] = data
    return grouped


def tool(*argv) -> None:
    run_tool(["prepare", *argv])
