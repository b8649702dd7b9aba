"""Pages of images and captions; those of `open_clip_mdc caption` show the denoising as a grid (Eq. 6, Fig. 2).

One file without script and without anything from elsewhere; its Content-Security-Policy forbids both. Names and
captions come from other people: all is escaped, and what a terminal or page would act on, not show, is written out.
"""
from html import escape
from io import BytesIO
from math import exp
from pathlib import Path

from PIL import Image

from ..data.files import new_file
from ..data.images import data_url

SIDE = 480  # pixels of an embedded image
BINS = (0.1, 0.25, 0.5, 0.75, 0.9)  # of probability: class p0 below the first, p5 from the last on
EXPLANATION = """<p>Read each grid from top to bottom. A row is a step, a column a token of the caption. All is hidden
at first; every step fills in what it shows in colour, and the colour is how probable the model found it at that moment:
the number below, in per cent.</p>"""
LEGEND = ("under 10 %", "10 to 25", "25 to 50", "50 to 75", "75 to 90", "90 and more")


def printable(text: str) -> str:
    """The text with control, direction and broken characters as escapes: what cannot be shown cannot deceive."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(name: str, page: str | Path) -> str:
    """Return how a page names a file, an image of a shard or a checkpoint: without the folders of this machine.

    What lies beside or under the page is named from there; else the last part stands alone, of a checkpoint the run.
    """
    source, colon, place = name.rpartition("local-dir:")
    place, separator, key = place.partition("::")
    path = Path(place)
    if path.is_absolute():
        folder = Path(page).absolute().parent
        path = path.relative_to(folder) if path.is_relative_to(folder) else \
            Path(*path.parts[-3 if path.parent.name == "checkpoints" else -1:])
    return f"{source}{colon}{path if place else place}{separator}{key}"


def shown_lines(lines: list[str], paths: list[Path], page: str | Path) -> list[str]:
    """Return lines about some of the paths with these as `shown`."""
    for path in filter(Path.is_absolute, paths if lines else ()):
        lines = [line.replace(str(path), shown(str(path), page)) for line in lines]
    return lines


def thumbnail(image: Image.Image) -> str:
    """An image (RGB) as a small JPEG, or a PNG where it is small already, in a data: URL."""
    small = image.copy()
    small.thumbnail((SIDE, SIDE))
    kind = "png" if max(image.size) <= 128 else "jpeg"
    buffer = BytesIO()
    small.save(buffer, kind, quality=80)
    return data_url(buffer.getvalue(), f"image/{kind}")


def percent(log_prob: float) -> str:
    """Of a probability, to whole per cent."""
    value = 100 * exp(log_prob)
    return "<1" if value < 0.5 else f"{value:.0f}"


def word_classes(tokens: list[dict]) -> list[str]:
    """CSS classes of the tokens' columns: probability p0 to p5, or "given"; "open", "continued" between pieces."""
    classes = []
    inside = False
    for token in tokens:
        kind = "given" if token["step"] is None else f"p{sum(exp(token['log_prob']) >= edge for edge in BINS)}"
        continues = not token["token"].endswith(" ") and token is not tokens[-1] and token["token"] != "<end>"
        classes.append(kind + " open" * continues + " continued" * inside)
        inside = continues
    return classes


def grid(tokens: list[dict]) -> str:
    """A table with a row per step and a column per token: [MASK], then what was revealed, and its probability below."""
    classes = word_classes(tokens)
    texts = [escape(printable(token["token"].strip())) or "&middot;" for token in tokens]
    rows = []
    for step in range(-1, 1 + max((token["step"] for token in tokens if token["step"] is not None), default=-1)):
        cells = []
        for token, name, text in zip(tokens, classes, texts, strict=True):
            since = -1 if token["step"] is None else token["step"]
            cells.append(f'<td class="mask {name.partition(" ")[2]}">' if since > step else
                         f'<td class="{"new" if token["step"] == step else "old"} {name}">{text}')
        rows.append(f"<tr><th>{step + 1}{''.join(cells)}")
    odds = "".join(f'<td class="{name}">' + ("" if token["log_prob"] is None else escape(percent(token["log_prob"])))
                   for token, name in zip(tokens, classes, strict=True))
    return f'<table>{"".join(rows)}<tr class="odds"><th>%{odds}</table>'


def describe_steps(tokens: list[dict]) -> str:
    """The grid in words, for who does not see it."""
    found = sorted((token for token in tokens if token["step"] is not None), key=lambda token: token["step"])
    return "; ".join(f"step {token['step'] + 1}: {printable(token['token'].strip())}, {percent(token['log_prob'])} %"
                     for token in found) or "nothing was revealed"


def captioned_grid(row: dict) -> str:
    """A caption with its grid."""
    name, caption = (escape(printable(row[key])) for key in ("image", "caption"))
    return (f'<div><h2 dir="auto">{caption or "(no words)"}</h2><p class="name" dir="auto">{name}</p>'
            f'<div class="steps" tabindex="0" role="img" aria-label="{escape(describe_steps(row["tokens"]))}">'
            f'{grid(row["tokens"])}</div></div>')


def card(row: dict, image: str, other: dict | None = None) -> str:
    """An image with its caption and its grid.

    Args:
        row: a line of the JSONL file.
        image: `thumbnail(...)`.
        other: a line for the same image by another command, to stand on the right; its "image" says whose.
    """
    small = ' class="small"' if image.startswith("data:image/png") else ""
    return (f'<article{" class=pair" if other else ""}><img{small} src="{image}" alt="">'
            f'{captioned_grid(row)}{captioned_grid(other) if other else ""}</article>')


def legend() -> str:
    """What `card` needs to be read: how, and the colours."""
    colours = "".join(f'<li><i class="p{i}"></i>{text}' for i, text in enumerate(LEGEND))
    return f'{EXPLANATION}<ul class="legend"><li><i class="mask"></i>hidden{colours}</ul>'


def write_page(path: str | Path, title: str, facts: dict[str, str], explanation: str, cards: list[str],
               skipped: list[str], style: str = "") -> None:
    """Writes the page, at once.

    Args:
        facts: what its head says: name, value.
        explanation: HTML, how to read the cards.
        cards: HTML, of `card` or its like.
        skipped: lines on images that could not be read.
        style: what the cards need beyond STYLE.
    """
    title = escape(printable(title))
    head = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(printable(v))}</dd></div>" for k, v in facts.items())
    lines = "".join(f"<li>{escape(line)}" for line in skipped)
    footer = f'<section class="skipped"><h2>Skipped</h2><ul>{lines}</ul></section>' if skipped else ""
    html = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title><style>{STYLE}{style}</style></head><body>
<header><h1>{title}</h1><dl>{head}</dl>
{explanation}</header>
<main>{"".join(cards)}</main>{footer}</body></html>
"""
    with new_file(path) as partial:
        partial.write_text(html, encoding="utf-8")


STYLE = """
:root { color-scheme: light dark; --page: #fbfaf7; --ink: #1f2421; --soft: #646b67; --line: #dedbd3; --mask: #e6e3db;
  --p0: #fbe8b0; --p1: #dce6a6; --p2: #a8d8a8; --p3: #67bdae; --p4: #2b7a94; --p5: #1c4e7a;
  --on-low: #1f2421; --on-high: #fff; --trail: 12%; }
@media (prefers-color-scheme: dark) { :root { --page: #16191a; --ink: #e8e6e0; --soft: #9aa19d; --line: #2f3435;
  --mask: #2a2f30; --p0: #4d432a; --p1: #43522f; --p2: #2d6149; --p3: #237a70; --p4: #55b4bd; --p5: #9bdcec;
  --on-low: #f4f2ec; --on-high: #10201f; --trail: 7%; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 2.5rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 0.9375rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
body:has(.pair) { max-width: 112rem; }
h1, h2 { font-family: "Iowan Old Style", Palatino, "Palatino Linotype", Georgia, serif; font-weight: 500;
  line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h1 { font-size: 1.9rem; }
header { padding-bottom: 1.5rem; }
header p { max-width: 44rem; color: var(--soft); }
dl { display: flex; flex-wrap: wrap; gap: 0.5rem 2rem; margin: 1.25rem 0; }
dt { color: var(--soft); font-size: 0.75rem; letter-spacing: 0.02em; }
dd { margin: 0; overflow-wrap: anywhere; }
.legend { display: flex; flex-wrap: wrap; gap: 0.4rem 1.1rem; margin: 0; padding: 0; list-style: none;
  font-size: 0.8125rem; color: var(--soft); }
.legend i { display: inline-block; width: 1.4em; height: 0.8em; margin-right: 0.4em; border-radius: 3px;
  background-color: var(--c, var(--mask)); }
article { display: grid; grid-template-columns: 15rem minmax(0, 1fr); gap: 1rem 2rem; padding: 2rem 0;
  border-top: 1px solid var(--line); break-inside: avoid; }
article.pair { grid-template-columns: 15rem minmax(0, 1fr) minmax(0, 1fr); }
img { width: 100%; border-radius: 6px; }
img.small { image-rendering: pixelated; }
article h2 { font-size: 1.4rem; }
.name { margin: 0.15rem 0 1rem; color: var(--soft); font-size: 0.8125rem; overflow-wrap: anywhere; }
.steps { max-height: 36rem; overflow: auto; }
table { border-collapse: separate; border-spacing: 0 2px; font-size: 0.8125rem; line-height: 1.35; }
th { position: sticky; left: 0; padding: 1px 0.75rem 1px 0; background: var(--page); color: var(--soft);
  font-weight: 400; text-align: right; font-variant-numeric: tabular-nums; }
td { padding: 1px 0.5em; border-right: 3px solid transparent; border-radius: 6px; background-clip: padding-box;
  text-align: center; white-space: nowrap; }
td.open { padding-right: 0; border-right-width: 0; border-top-right-radius: 0; border-bottom-right-radius: 0;
  text-align: right; }
td.continued { padding-left: 0; text-align: left; border-top-left-radius: 0; border-bottom-left-radius: 0; }
.mask { background-color: var(--mask); }
.p0 { --c: var(--p0); --on: var(--on-low); } .p1 { --c: var(--p1); --on: var(--on-low); }
.p2 { --c: var(--p2); --on: var(--on-low); } .p3 { --c: var(--p3); --on: var(--on-low); }
.p4 { --c: var(--p4); --on: var(--on-high); } .p5 { --c: var(--p5); --on: var(--on-high); }
.new { background-color: var(--c); color: var(--on); }
.old { color: var(--soft); background-color: color-mix(in srgb, var(--c, transparent) var(--trail), transparent); }
.given { font-style: italic; }
.odds td, .odds th { position: sticky; bottom: 0; background: var(--page); color: var(--soft); font-size: 0.6875rem;
  font-variant-numeric: tabular-nums; }
.odds td { padding: 1px 2px; text-align: center; border-radius: 0; background-clip: border-box; }
.skipped { border-top: 1px solid var(--line); padding: 2rem 0; overflow-wrap: anywhere; }
@media (max-width: 100rem) { article.pair { grid-template-columns: 15rem minmax(0, 1fr); }
  article.pair > div + div { grid-column: 2; } }
@media (max-width: 44rem) { article.pair > div + div { grid-column: auto; }
  article, article.pair { grid-template-columns: minmax(0, 1fr); } img { max-width: 26rem; }
  body { padding-top: 1.5rem; } table { font-size: 0.75rem; } td { padding: 1px 0.35em; border-right-width: 2px; } }
@media print { .steps { max-height: none; overflow: visible; } }
"""
