"""The table of training objectives, and how to add a row to it, also from outside this package.

An objective is a row of OBJECTIVES: how it corrupts a caption, what a predicted token costs, in which order the model
reads, and which scores fit it. Whoever needs to know asks the row. Nobody asks for an objective's name.

    @register_objective("mine", corrupt_full_interval=whole_interval)
    def mine(text, vocab_size, cfg, u, generator=None): ...     # -> NoisedCaptions; see tests/plugin_example

Dimensions: B captions of one process, L positions, M predicted tokens, V vocabulary.
"""
from collections.abc import Callable
from typing import NamedTuple

from .loss import cross_entropy


class Objective(NamedTuple):
    """A way to train, and what follows from it for decoding and scoring."""

    # (text [B, L], V, cfg, u [B], generator) -> NoisedCaptions of B rows, or of as many for each caption, one after
    # another. u is uniform on (0, 1] over a global batch.
    corrupt: Callable
    # (text, V, u, generator): the same with t in (0, 1], whatever interval is trained. Its mean loss is the NELBO.
    corrupt_full_interval: Callable
    token_loss: Callable  # (logits [M, V], Predicted, aux_weight where there is a schedule) -> float32 [M]
    order: str  # "any" | "causal": which decoders and estimators fit
    scorers: tuple[str, ...]  # methods of likelihood.log_likelihood that fit, the first by default
    schedule: Callable | None = None  # (V, device) -> Schedule of replace_process.py; None: t is continuous


OBJECTIVES: dict[str, Objective] = {}


def register_objective(name: str, *, corrupt_full_interval: Callable, token_loss: Callable = cross_entropy,
                       order: str = "any", scorers: tuple[str, ...] = ("heuristic", "monte_carlo"),
                       schedule: Callable | None = None) -> Callable[[Callable], Callable]:
    """Register the decorated function as an objective's `corrupt`. Raises ValueError if the name is taken."""
    def add(corrupt: Callable) -> Callable:
        if name in OBJECTIVES:
            raise ValueError(f"there is an objective {name!r} already, by {OBJECTIVES[name].corrupt.__module__}")
        OBJECTIVES[name] = Objective(corrupt, corrupt_full_interval, token_loss, order, scorers, schedule)
        return corrupt
    return add
