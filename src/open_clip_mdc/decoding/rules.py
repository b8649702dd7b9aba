"""The rules that decode captions of masked diffusion, by name. A new rule is one function and one row.

Flags take their choices and their help from these tables. A row of this package names its function, so that `--help`
imports no torch. A row of yours may hold the function itself.
"""
from collections.abc import Callable
from pkgutil import resolve_name
from typing import NamedTuple


class Rule(NamedTuple):
    """A function that decodes captions, and what its users should know of it."""

    function: str | Callable  # or "module:function" of this package
    help: str
    options: tuple[str, ...] = ()  # what this rule reads and not every rule does
    draws: bool = False  # True if captions of an image differ even without a temperature

    def __call__(self, *args):
        """Return what the function returns, a `sampling.Decoded`."""
        if callable(self.function):
            return self.function(*args)
        return resolve_name(f"{__package__}.{self.function}")(*args)


# Each takes (model, network, text [R, L] with masks, options, guide).
SAMPLERS = {
    "confidence": Rule("confidence:by_confidence", "reveals the most confident tokens first",
                       ("tokens_per_step", "repeats", "clip_scale")),
    "ancestral": Rule("ancestral:by_ancestral", "draws from the reverse diffusion", ("steps",), draws=True),
}
# Each takes (model, decode, log p(N | image) [B, S], options). `decode` takes lengths, long [R] on the CPU.
LENGTHS = {
    "auto": Rule("lengths:best_length", "tries the 8 likeliest lengths, and takes 4 times as long as a length of 10"),
    "sample": Rule("lengths:drawn_length", "draws one", draws=True),
    "top": Rule("lengths:top_lengths", "gives --samples the likely ones in turn", draws=True),
}
