"""`CaptionCfg`, the part of a model config that chooses an objective."""
import math
from dataclasses import dataclass, field

from .registry import OBJECTIVES


@dataclass
class CaptionCfg:
    """A model config's `caption_cfg`. BERT has t_min == t_max, parallel decoding has 1 for both."""

    objective: str = "mdc"  # a key of OBJECTIVES
    t_min: float = 0.5
    t_max: float = 1.0
    loss_weight: str = "inverse_t"  # "inverse_t" | "none"
    regions: int = 1  # g > 1 encodes g x g tiles, too (regions.py)
    length_head: bool = True  # also learn p(N | image). A causal model has none, as it predicts EOT
    time_embedding: bool = False  # condition the decoder on the step (diffusion in steps only)
    aux_weight: float = 0.0  # weight of the auxiliary loss -log p(x_0 | x_t) (diffusion in steps only)
    condition_drop: float = 0.0  # share of training images with masked features (MC-Diffusion's P_cond)
    condition_mask: float = 0.0  # share of their features that are masked (P_mask). 1 trains classifier-free guidance
    condition_zeros: bool = False  # replace masked features by zeros, not by a learnt vector
    # Tokens in a block of block diffusion. Of several sizes each caption draws one in training, and the first decodes.
    block_sizes: tuple[int, ...] = ()
    # Fingerprints hold `repr`. What is left out of it changes no fingerprint of older versions.
    autoregressive_share: float = field(default=0.0, repr=False)  # of the captions, read from left to right (mix only)
    bpe_path: str | None = field(default=None, repr=False)  # the tokenizer's file, which the captioner fills in
    word_weights: dict[str, float] = field(default_factory=dict, repr=False)  # of words, if the objective reads them
    decoder: str = field(default="transformer", repr=False)  # | "lstm" (lstm.py), which reads from left to right only
    contrastive_weight: float = 0.0  # weight of CLIP's contrastive loss (contrastive.py). 0 builds no text tower

    def __post_init__(self):
        if self.objective not in OBJECTIVES:
            raise ValueError(f"caption_cfg.objective is {self.objective!r}: it must be one of {', '.join(OBJECTIVES)}")
        objective = OBJECTIVES[self.objective]
        if self.loss_weight not in ("inverse_t", "none"):
            raise ValueError(f"caption_cfg.loss_weight is {self.loss_weight!r}: it must be 'inverse_t' or 'none'")
        if not (0 <= self.t_min <= self.t_max <= 1 and self.t_max > 0):
            raise ValueError(f"caption_cfg needs 0 <= t_min <= t_max <= 1, t_max > 0; not {self.t_min}, {self.t_max}")
        if not 0 <= self.aux_weight < math.inf:
            raise ValueError(f"caption_cfg.aux_weight is {self.aux_weight}: it must be 0 or more and finite")
        if (self.time_embedding or self.aux_weight) and objective.schedule is None:
            raise ValueError("caption_cfg.time_embedding and aux_weight are for diffusion in steps, not for "
                             f"{self.objective!r}")
        self.block_sizes = tuple(self.block_sizes)  # a list in JSON
        if bool(self.block_sizes) != (objective.order == "blocks") or \
                not all(isinstance(size, int) and size > 0 for size in self.block_sizes):
            raise ValueError(f"caption_cfg.block_sizes is {self.block_sizes}: it must be numbers of tokens, 1 or more, "
                             "for an objective of blocks, and empty for any other")
        mixes = objective.order == "any" and "autoregressive" in objective.scorers
        if not 0 <= self.autoregressive_share <= mixes:
            raise ValueError(f"caption_cfg.autoregressive_share is {self.autoregressive_share}: it must be 0 to 1 for "
                             "an objective that mixes, and 0 for any other")
        if self.word_weights and not objective.weighs_words or not all(
                isinstance(weight, int | float) and 0 <= weight < math.inf for weight in self.word_weights.values()):
            raise ValueError("caption_cfg.word_weights should be words with finite weights of 0 or more, and is for an "
                             "objective that reads it, such as 'visual-table'")
        if self.decoder not in ("transformer", "lstm"):
            raise ValueError(f"caption_cfg.decoder is {self.decoder!r}: it must be 'transformer' or 'lstm'")
        if self.decoder == "lstm" and objective.order != "causal":
            raise ValueError(f"caption_cfg.decoder 'lstm' reads from left to right, not as {self.objective!r} asks: "
                             "it must be with the objective 'arc'")
        # One without the other would mask nothing.
        rates = (self.condition_drop, self.condition_mask)
        if not all(0 <= rate <= 1 for rate in rates) or any(rates) != all(rates) \
                or self.condition_zeros and not any(rates):
            raise ValueError("caption_cfg needs condition_drop and condition_mask of 0 to 1, both or neither of them "
                             f"0, and condition_zeros only with them; not {rates}, {self.condition_zeros}")
        if not 0 <= self.contrastive_weight < math.inf or self.contrastive_weight and self.condition_drop:
            raise ValueError("caption_cfg.contrastive_weight should be 0 or more and finite, and 0 with "
                             f"condition_drop, which hides the image; not {self.contrastive_weight}")

    @property
    def default_uncond(self) -> str:
        """Return the default unconditional branch of guidance, the one that the model was trained with."""
        return "masked_image" if self.condition_drop else "null_image"
