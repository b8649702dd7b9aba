"""Write pages of images and captions, which for `open_clip_mdc caption` show the denoising as a grid (Eq. 6, Fig. 2).

A page is one file without scripts or external resources. Its Content-Security-Policy forbids both. Names and captions
come from other people, so all is escaped, and control characters are written out.
"""
import argparse
from functools import partial
from html import escape
from io import BytesIO
from math import exp
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from ..data.files import new_file
from ..data.images import data_url
from ..errors import printable
from ..integration.runs import find

SIDE = 480  # pixels of the longer side of an embedded image
BINS = (0.1, 0.25, 0.5, 0.75, 0.9)  # edges of the probability classes p0 to p5
LEGEND = ("under 10 %", "10 to 25", "25 to 50", "50 to 75", "75 to 90", "90 and more")


def shown(name: str, page: str | Path) -> str:
    """Return the name of a file, an image of a shard or a checkpoint without this machine's folders, for a page."""
    source, colon, place = name.rpartition("local-dir:")
    place, separator, key = place.partition("::")
    path = Path(place)
    if path.is_absolute():
        folder = Path(page).absolute().parent
        path = path.relative_to(folder) if path.is_relative_to(folder) else \
            Path(*path.parts[-3 if path.parent.name == "checkpoints" else -1:])
    return f"{source}{colon}{path if place else place}{separator}{key}"


def shown_model(args: argparse.Namespace, page: str | Path) -> str:
    """Return how a page names the model of --pretrained and --model."""
    return shown(find(args.pretrained, args.model).model_name.removeprefix("local-dir:"), page)


def shown_lines(lines: list[str], paths: list[Path], page: str | Path) -> list[str]:
    for path in filter(Path.is_absolute, paths if lines else ()):
        lines = [line.replace(str(path), shown(str(path), page)) for line in lines]
    return lines


def thumbnail(image: Image.Image) -> str:
    """Return an RGB image as a data: URL of a thumbnail, a JPEG or, for small images, a PNG."""
    small = image.copy()
    small.thumbnail((SIDE, SIDE))
    kind = "png" if max(image.size) <= 128 else "jpeg"
    buffer = BytesIO()
    small.save(buffer, kind, quality=80)
    return data_url(buffer.getvalue(), f"image/{kind}")


def percent(log_prob: float) -> str:
    value = 100 * exp(log_prob)
    return "<1" if value < 0.5 else f"{value:.0f}"


def word_classes(tokens: list[dict]) -> list[str]:
    """Return the CSS classes of each token's column.

    They are p0 to p5 by probability or "given", with "open" before and "continued" after a break within a word.
    """
    classes = []
    inside = False
    for token in tokens:
        kind = "given" if token["step"] is None else f"p{sum(exp(token['log_prob']) >= edge for edge in BINS)}"
        continues = not token["token"].endswith(" ") and token is not tokens[-1] and token["token"] != "<end>"
        classes.append(kind + " open" * continues + " continued" * inside)
        inside = continues
    return classes


def last_step(tokens: list[dict]) -> int:
    return max((token["step"] for token in tokens if token["step"] is not None), default=-1)


def describe_steps(tokens: list[dict]) -> str:
    """Describe the grid in words, for screen readers."""
    found = sorted((token for token in tokens if token["step"] is not None), key=lambda token: token["step"])
    return "; ".join(f"step {token['step'] + 1}: {printable(token['token'].strip())}, {percent(token['log_prob'])} %"
                     for token in found) or "nothing was revealed"


ENVIRONMENT = Environment(loader=PackageLoader("open_clip_mdc.cli", ""), autoescape=True, undefined=StrictUndefined,
                          keep_trailing_newline=True)
ENVIRONMENT.filters.update(text=lambda text: Markup(escape(printable(text))), percent=percent)
ENVIRONMENT.globals.update(word_classes=word_classes, describe_steps=describe_steps, last_step=last_step)
CARDS = ENVIRONMENT.get_template("cards.html.jinja").module
card, legend = CARDS.grids, partial(CARDS.legend, LEGEND)


def render_page(title: str, facts: dict[str, str], explanation: str, cards: list[str], skipped: list[str],
                style: str = "") -> str:
    """Return a page as HTML.

    Args:
        facts: shown at the head.
        explanation: HTML below the facts.
        cards: HTML of each image.
        skipped: lines about images that were left out.
        style: a template of CSS that the cards need besides page.css.jinja.
    """
    return ENVIRONMENT.get_template("page.html.jinja").render(
        title=title, facts=facts, explanation=explanation, cards=cards, skipped=skipped, style=style)


def write_page(path: str | Path, *content, **options) -> None:
    """Write the page of `render_page`, whole or not at all."""
    html = render_page(*content, **options)
    with new_file(path) as partial:
        partial.write_text(html, encoding="utf-8")
