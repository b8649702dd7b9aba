"""Show progress: a bar on a terminal, elsewhere a line per minute. Import this file late, as tqdm imports slowly."""
import re
import sys
import time
from collections.abc import Iterable

from tqdm import tqdm

EVERY = 60.0  # seconds from line to line
FORMAT = "{desc}: {n_fmt} of {total_fmt}{unit}, {elapsed} gone, {remaining} to go, {rate_fmt}{postfix}"
OPEN_FORMAT = "{desc}: {n_fmt}{unit}, {elapsed} gone, {rate_fmt}{postfix}"  # if the total is not known


class Lines:
    """File for tqdm without a terminal: prints a line per minute, so nothing for short work."""

    def __init__(self):
        self.said, self.file = time.monotonic(), sys.stderr  # which a job may hide from others for a while

    def write(self, text: str) -> None:
        if text.strip() and time.monotonic() - self.said >= EVERY:
            self.said = time.monotonic()
            print(text.strip(), file=self.file, flush=True)

    def flush(self) -> None:
        """Do nothing, as `write` prints at once."""


class Bar(tqdm):
    """Bar whose slow rates are "1.1 s/image", not tqdm's "1.1s/ images"."""

    @staticmethod
    def format_meter(*counts, unit: str = "it", **options) -> str:
        singular = re.sub("(?<=ch)es$|s$", "", unit.strip())
        return tqdm.format_meter(*counts, unit=unit, **options).replace(f"s/{unit}", f" s/{singular}")


def progress_bar(items: Iterable | None = None, what: str = "", unit: str = "image", **options) -> tqdm:
    """Return tqdm for items, or for a total that `update` counts. `unit` is in the singular, `options` are tqdm's."""
    plural = "" if options.get("unit_scale") else "es" if unit == "batch" else "s"
    options |= {"desc": what, "unit": " " * bool(plural) + unit + plural}
    if not sys.stderr.isatty():
        known = options.get("total") is not None or hasattr(items, "__len__")
        # The time to go follows the last line's minute, as what a resumed run finds done took no time at all.
        options |= {"file": Lines(), "mininterval": EVERY, "maxinterval": EVERY, "miniters": 1, "smoothing": 1.0,
                    "bar_format": FORMAT if known else OPEN_FORMAT}
    return Bar(items, **options)
