"""Answer what OpenCLIP's factory, training loop and logger ask of a model, for captioners."""
import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint

from ..data.weights import misfit
from .towers import Tower, tower

if TYPE_CHECKING:
    from .step_graphs import StepGraphs


class OpenCLIPSeam(nn.Module):
    """Features, locks, modes, checkpointing, sharding and weight decay of a model with `visual` and `text`.

    OpenCLIP relies on these, too:
        `visual` (with `image_size`), `text` (with `positional_embedding`, which --force-context-length resizes),
        `logit_scale`, which it logs and clamps, `logit_bias = None`, and
        `forward`, whose outputs but `logit_scale` can be concatenated over micro-batches.
    """

    step_graphs: "StepGraphs | None" = None  # see compile_for_captions. Not set on instances, or a fingerprint sees it

    @property
    def tower(self) -> Tower:
        """Return what is known of the image tower."""
        return tower(self.visual)

    def encode_image(self, image: Tensor, normalize: bool = False) -> Tensor:
        """Return the global average of the patch tokens, [B, D]: the feature that probes use (Sec. 4.2)."""
        features = self.encode_image_tokens(image).mean(dim=1)
        return F.normalize(features, dim=-1) if normalize else features

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False):
        """Load weights. A file of `open_clip_mdc vq` fills the frozen VQ-VAE only, and the rest keeps its values.

        Weights of ARC or MDC begin a model of another objective, as all but the length head is alike. A warning says
        that the head starts from scratch, or is left out by a model of blocks. ARC refuses one, as before.

        Raises Misfit, a RuntimeError that says which kind of model the weights belong to.
        """
        # --pretrained vq.pt fills a part of the tower before training.
        if self.tower.load(state_dict):
            return None
        own, given = ({name for name in names if name.startswith("length_head.")}
                      for names in (self.state_dict(), state_dict))
        if given and self.objective.order == "blocks":
            logging.warning("The length head of these weights is left out, as this model ends captions itself.")
            state_dict = {name: x for name, x in state_dict.items() if name not in given}
        elif own and not given:
            logging.warning("There is no length head in these weights. It starts from scratch.")
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as problem:
            raise misfit(self.state_dict(), state_dict) from problem

    def lock_image_tower(self, unlocked_groups: int = 0, freeze_bn_stats: bool = False) -> None:
        self.tower.lock(unlocked_groups)

    def train(self, mode: bool = True) -> "OpenCLIPSeam":
        """Set the mode. A locked image tower, or each locked BatchNorm in it, stays in eval mode: see `keep_locked`."""
        super().train(mode)
        self.tower.keep_locked()
        if mode:  # a fused optimizer changes weights without a trace that `with_cast_blocks` could see
            self.text.__dict__.pop("cast", None)
        return self

    def set_grad_checkpointing(self, enable: bool = True, impl: str = "inline") -> None:
        if impl == "composable":  # what OpenCLIP 4.x asks for under --fsdp
            for _, block in self.fsdp_shard_modules():
                composable_checkpoint(block)
            return
        self.visual.set_grad_checkpointing(enable)
        self.text.set_grad_checkpointing(enable)

    def fsdp_shard_modules(self) -> list[tuple[str, nn.Module]]:
        """Return names and modules that OpenCLIP 4.x shards one by one under --fsdp, inner ones first.

        They are the blocks of both towers, and each decoder block's `cross_kv`, which `project_image` calls before it.
        """
        # Inner modules first, as a module that is sharded takes along what is inside of it.
        return [(name, module) for name, module in self.named_modules()
                if re.search(r"blocks\.\d+(\.cross_kv)?$", name)][::-1]

    def no_weight_decay(self) -> set[str]:
        parts = {"visual": self.tower.no_weight_decay(), "text": self.text.no_weight_decay()}
        return {f"{part}.{name}" for part, names in parts.items() for name in names}
