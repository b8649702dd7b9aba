"""`Scoring` says how captions are scored, a `Scorer` does it in `Call`s, and `Likelihood` is what comes of it.

Values that do not go together are refused when a `Scoring` is made.

Dimensions: B images, C candidates of an image, R captions, L positions.
"""
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..models.interface import Network
from ..objectives.registry import Objective

if TYPE_CHECKING:
    from ..models.captioner import Captioner


@dataclass(frozen=True)
class Scoring:
    """Set how captions are scored. Raises ValueError for values that do not fit each other.

    Attributes:
        method: a key of `log_likelihood.SCORERS`. None is the first that fits the model.
        num_samples: most draws of a caption, for "monte_carlo" and "bound".
        seed: of the draws.
        interval: (t_min, t_max) of "monte_carlo", whose mask counts alone are drawn. None is all (Eq. 8).
    """

    method: str | None = None
    num_samples: int = 1024
    seed: int = 0
    interval: tuple[float, float] | None = None

    def __post_init__(self):
        if self.method not in (None, "monte_carlo") and self.interval is not None:
            raise ValueError(f"interval is an option of method 'monte_carlo', not of {self.method!r}")
        if self.num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, not {self.num_samples}")
        if self.interval is not None and not 0 <= self.interval[0] <= self.interval[1] <= 1:
            raise ValueError(f"interval must be (t_min, t_max) with 0 <= t_min <= t_max <= 1, not {self.interval}")

    def fit(self, objective: Objective) -> "Scoring":
        """Return the settings with a method. Raises ValueError if it does not fit the objective."""
        if not objective.scorers:
            raise ValueError("this model can only fill in words of a caption, and has no likelihood of a whole one")
        if self.method is None:
            if self.num_samples != 1024 and objective.scorers[0] not in ("monte_carlo", "bound"):
                raise ValueError("num_samples changes nothing of the default method: give one that draws")
            return replace(self, method=objective.scorers[0])
        if self.method not in objective.scorers:
            kind = {"any": "in both directions", "causal": "from left to right", "blocks": "block by block"}
            raise ValueError(f"method {self.method!r} does not fit: this model reads captions {kind[objective.order]}; "
                             f"choose {' or '.join(map(repr, objective.scorers))}")
        return self


class Likelihood(NamedTuple):
    """Scores of captions and details of their estimator. Shapes are [R, ...], or [B, C, ...] from `log_likelihood`."""

    log_likelihood: Tensor  # float32 [B, C], nats
    token_log_likelihood: Tensor | None = None  # float32 [B, C, L], 0 where not scored. None for monte_carlo
    order: Tensor | None = None  # long [B, C, L], the step that revealed a token, or -1. Only for heuristic
    standard_error: Tensor | None = None  # float32 [B, C], inf if unknown. Only for monte_carlo and bound
    draws: Tensor | None = None  # long [B, C], number of draws. Only for monte_carlo and bound


class Call(NamedTuple):
    """Hold candidates of some images, and the network with those images' keys and values, for a scorer."""

    model: "Captioner"
    network: Network
    text: Tensor  # long [B*C, L], on the CPU. A row without scored tokens gets 0
    num_images: int  # B
    max_tokens: int  # of a decoder call, with padding
    device: torch.device  # of the network

    @property
    def rows(self) -> tuple:
        """Return what all scorers read: the network, the captions [B*C, L], the size of the vocabulary."""
        return self.network, self.text, self.model.vocab_size

    @property
    def blocks(self) -> tuple:
        """Return what those of blocks read, too: the tokens of a block, those of the context."""
        return self.model.caption_cfg.block_sizes[0], self.model.context_length

    @property
    def image(self) -> np.ndarray:
        """Return the image of each caption, long [B*C]."""
        return np.arange(len(self.text)) * self.num_images // len(self.text)

    def to_device(self, x: np.ndarray) -> Tensor:
        """Return a copy of an array on the device. The host does not wait for it."""
        return torch.from_numpy(x).to(self.device, non_blocking=True)


class Scorer(NamedTuple):
    """A way to score captions. A new one is a function, a row of SCORERS, and its name in an objective's `scorers`."""

    score: Callable[[Call, Scoring], Likelihood]
    passes: Callable[[int, Scoring], int]  # decoder passes of a caption of N tokens
    # How many texts a caption of N tokens is read as. Such a scorer splits them into decoder calls itself. None if the
    # driver splits the candidates, as each is read once at a time.
    texts: Callable[[Scoring], int] | None = None
    logits: int = 2  # how many tensors of logits it holds at once
    by_length: bool = False  # True if one text serves all captions of an image and a length


class Sizes(NamedTuple):
    """Hold what fits the memory: images of a group, captions of an image, and tokens of a decoder call."""

    images: int
    captions: int
    tokens: int
