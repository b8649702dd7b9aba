"""Decide from coordinates and pixels alone whether a caption is true of a scene of the plain world."""
import colorsys
import re
from pathlib import Path

import numpy as np

COMMITTED_BPE = Path(__file__).parents[2] / "model_configs/scenes_bpe.txt.gz"
HUES = {"red": 0.0, "yellow": 0.13, "green": 0.37, "blue": 0.63}


def read_scene(objects):
    """Return what the coordinates say: the relation, and the objects' names in the order in which it holds."""
    spread = {axis: max(o[axis] for o in objects) - min(o[axis] for o in objects) for axis in "xy"}
    axis = max(spread, key=spread.get)
    names = [f"{o['size']} {o['colour']} {o['shape']}".strip() for o in sorted(objects, key=lambda o: o[axis])]
    return {"x": "left of", "y": "up above"}[axis], names


def read_caption(text):
    relation = "up above" if " up above " in text else "left of"
    return relation, [name.removeprefix("a ") for name in text.split(f" {relation} ")]


def sentence_is_true(sentence, objects, background):
    """Parse one sentence of a long caption and judge it by coordinates alone."""
    relation, names = read_scene(objects)
    in_order = sorted(objects, key=lambda o: o["x" if relation == "left of" else "y"])
    by_name = dict(zip(names, in_order, strict=True))
    number = {1: "one", 2: "two", 3: "three", 4: "four"}[len(objects)]
    if f"{number} shape" in sentence:
        return f"on a {background} background" in sentence
    if "else" in sentence or "no other shape" in sentence:
        return True
    if comparison := re.fullmatch(r"the (.+) is (smaller than|larger than|about the same size as) the (.+)", sentence):
        ratio = by_name[comparison[1]]["radius"] / by_name[comparison[3]]["radius"]
        return comparison[2] == ("smaller than" if ratio <= 1 / 1.15 else "larger than" if ratio > 1.15 else
                                 "about the same size as")
    inverse = {"left of": "right of", "up above": "down below"}[relation]
    later = re.fullmatch(f"the (.+) is {inverse} the (.+)", sentence)
    turned = re.fullmatch(f"{inverse} the (.+) is the (.+)", sentence)
    if later or turned:
        first, second = (later[2], later[1]) if later else (turned[1], turned[2])
        return names.index(second) == names.index(first) + 1
    if place := re.search(r"near the (top|bottom)?\s?(left|right)?|in the middle", sentence):
        name = next(name for name in names if f"the {name}" in sentence)
        x, y = by_name[name]["x"], by_name[name]["y"]
        row = "top" if y < 1 / 3 else "bottom" if y >= 2 / 3 else None
        column = "left" if x < 1 / 3 else "right" if x >= 2 / 3 else None
        return (place[1], place[2]) == (row, column)
    return read_caption(re.sub("^(there is|one can see) ", "", sentence)) == (relation, names)


def hue_name(pixels):
    """The named colour that is nearest to the mean of pixels [N, 3]."""
    hue, _, _ = colorsys.rgb_to_hsv(*pixels.reshape(-1, 3).mean(0) / 255)
    return min(HUES, key=lambda name: min(abs(hue - HUES[name]), 1 - abs(hue - HUES[name])))


def check_colours(image, objects):
    """Assert that the named colours are where the objects are and nowhere else."""
    pixels, colour = np.asarray(image), coloured(image)
    y, x = (np.indices(colour.shape) + 0.5) / image.width
    for item in objects:
        inside = np.hypot(x - item["x"], y - item["y"]) <= item["radius"] + 1 / image.width
        assert hue_name(pixels[inside & colour]) == item["colour"]
        colour[inside] = False
    assert not colour.any()


def coloured(image):
    """[H, W], True where a pixel is no grey: the background's noise is grey."""
    pixels = np.asarray(image).astype(int)
    return pixels.max(-1) - pixels.min(-1) > 60
