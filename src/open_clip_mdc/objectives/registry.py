"""The table of training objectives. You can add your own, also from another package (docs/extend.md).

    @register_objective("mine")
    def mine(text, vocab_size, cfg, u, generator=None): ...  # -> NoisedCaptions

A row of OBJECTIVES says how captions are noised, what the loss of a predicted token is, in which order the model reads,
and which likelihood estimators fit. All other code asks the row. None compares an objective's name.

Dimensions: B captions of one process, L positions, M predicted tokens, V vocabulary.
"""
from collections.abc import Callable
from typing import NamedTuple

from .loss import cross_entropy


class Objective(NamedTuple):
    """An objective, and what follows from it for decoding and scoring."""

    # (text [B, L], V, cfg, u [B], generator) -> NoisedCaptions with the same number of consecutive rows for each
    # caption. u is uniform on (0, 1] over a global batch.
    corrupt: Callable
    # (text, V, u, generator) -> the same for t in (0, 1], whatever the trained interval. The mean loss is the NELBO.
    # None asks `corrupt` for t in (0, 1] and the weight 1/t.
    corrupt_full_interval: Callable | None = None
    # (logits [M, V], Predicted, and aux_weight if there is a schedule) -> float32 [M]
    token_loss: Callable = cross_entropy
    order: str = "any"  # "any" | "causal" | "blocks": the order that the decoder can predict tokens in
    # Methods of `log_likelihood` that fit. The first is the default. None at all: the model can only fill in words.
    scorers: tuple[str, ...] = ("heuristic", "monte_carlo", "parallel")
    schedule: Callable | None = None  # (V, device) -> Schedule of replace_process.py. None for continuous t
    # (model, patch tokens [B, P, D], Captions) -> the loss of each predicted token, float32 [M], and the captions that
    # it is of. In training only. None is one pass, `Captioner.token_nll`.
    forward: Callable | None = None
    weighs_words: bool = False  # whether `corrupt` reads the config's `word_weights`


OBJECTIVES: dict[str, Objective] = {}


def register_objective(name: str, **fields) -> Callable:
    """Register the decorated function as an objective's `corrupt`. Raises ValueError if the name is taken.

    Args: `fields` are the other fields of `Objective`.
    """
    def add(corrupt: Callable) -> Callable:
        objective = Objective(corrupt, **fields)
        if name in OBJECTIVES:
            raise ValueError(f"there is an objective {name!r} already")
        if objective.order not in ("any", "causal", "blocks") or isinstance(objective.scorers, str):
            raise ValueError(f"objective {name!r}: order is 'any', 'causal' or 'blocks', scorers is a tuple of names")
        OBJECTIVES[name] = objective
        return corrupt
    return add
