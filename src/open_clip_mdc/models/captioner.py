"""`Captioner`: an OpenCLIP image encoder and a text decoder that reconstructs the caption (Fig. 2, Sec. 3.2).

From a batch to its loss: on the CPU, noise the captions (the objective's `corrupt`) and drop padding (packing.pack). On
the device, encode the images, run the decoder on the valid tokens, and compute the loss of the predicted ones.

Dimensions: B images, R captions (rows), P patches, L positions, N valid tokens, M predicted tokens, D image width,
W decoder width, V vocabulary.
"""
from typing import Any

import numpy as np
import torch
from open_clip.model import CLIPTextCfg, CLIPVisionCfg
from torch import Tensor, nn

from ..objectives.config import CaptionCfg
from ..objectives.loss import in_chunks
from ..objectives.registry import OBJECTIVES
from ..objectives.replace import STEPS, step_of
from ..objectives.times import mask_condition, ranks, stratified_uniform
from ..text.packing import Captions, NoisedCaptions, Predicted, pack
from . import towers
from .caption_logits import CaptionReader
from .decoder import TextDecoder
from .length_head import LengthHead, length_nll
from .openclip_seam import OpenCLIPSeam


class Captioner(OpenCLIPSeam, CaptionReader):
    """Image encoder and text decoder, used in the place of OpenCLIP's `CustomTextCLIP`."""

    def __init__(self, embed_dim: int | None, vision_cfg: CLIPVisionCfg | dict[str, Any],
                 text_cfg: CLIPTextCfg | dict[str, Any], caption_cfg: CaptionCfg | dict[str, Any],
                 quick_gelu: bool = False, cast_dtype: torch.dtype | None = None, vq_cfg: dict[str, Any] | None = None):
        """Build both towers. `vq_cfg` (vq.VQCfg) makes the encoder a `VQTower`.

        Raises ValueError unless `embed_dim` is None or the encoder's width, as nothing is projected.
        """
        super().__init__()
        vision_cfg = CLIPVisionCfg(**vision_cfg) if isinstance(vision_cfg, dict) else vision_cfg
        text_cfg = CLIPTextCfg(**text_cfg) if isinstance(text_cfg, dict) else text_cfg
        self.caption_cfg = CaptionCfg(**caption_cfg) if isinstance(caption_cfg, dict) else caption_cfg
        self.caption_cfg.bpe_path = (text_cfg.tokenizer_kwargs or {}).get("bpe_path")
        self.objective = OBJECTIVES[self.caption_cfg.objective]
        self.visual = towers.build(vision_cfg, quick_gelu, cast_dtype, vq_cfg, vars(self.caption_cfg))
        self.image_width = image_width = self.tower.width
        if embed_dim not in (None, image_width):
            raise ValueError(f"embed_dim is {embed_dim}, but this encoder's features have width {image_width}")
        if self.caption_cfg.decoder == "lstm":
            from .lstm import LSTMDecoder  # few models need it
            self.text = LSTMDecoder(text_cfg, image_width)
        else:
            self.text = TextDecoder(text_cfg, image_width, quick_gelu, cast_dtype,
                                    STEPS if self.caption_cfg.time_embedding else None)
        self.context_length, self.vocab_size = text_cfg.context_length, text_cfg.vocab_size
        has_length_head = self.caption_cfg.length_head and self.objective.order == "any"  # others predict EOT
        self.length_head = LengthHead(image_width, self.context_length) if has_length_head else None
        # What stands for a masked patch token. Zeros draw no random numbers, so other weights start as without it.
        if self.caption_cfg.condition_drop:
            if self.caption_cfg.condition_zeros:
                self.register_buffer("no_patch", torch.zeros(image_width), persistent=False)
            elif not self.tower.has_mask:
                self.no_patch = nn.Parameter(torch.zeros(image_width))
        self.register_buffer("logit_scale", torch.ones(()), persistent=False)  # no parameter, as DDP wants gradients
        self.logit_bias = None
        self.patch_tokens = towers.patch_tokens
        self.seed_t(0)

    def encode_image_tokens(self, image: Tensor, masked: Tensor | None = None, tokens: Tensor | None = None) -> Tensor:
        """Return the normalised patch tokens that the decoder attends to: [B, P, D] from [B, 3, height, width].

        Args:
            masked: bool [B, P], tokens to replace by `no_patch` or by a VQTower's [MASK].
            tokens: the unmasked tokens, if you have them. The image is then read again only by a VQTower.
        """
        # A VQTower puts its [MASK] where the position is added. Elsewhere a vector takes the token's place.
        if masked is None or self.tower.has_mask and not self.caption_cfg.condition_zeros:
            return self.patch_tokens(self.visual, image, masked)
        tokens = self.patch_tokens(self.visual, image) if tokens is None else tokens
        masked = masked[:, :tokens.shape[1], None]  # [B, P, 1]. patch_dropout leaves fewer tokens
        return torch.where(masked, self.no_patch.to(tokens.dtype), tokens)

    def seed_t(self, seed: int) -> None:
        """Seed the offsets u0 of `stratified_uniform`. Give all ranks the same seed, so that their strata interlock."""
        self._t_rng = np.random.default_rng(seed)

    def corrupt(self, text: Tensor, u: Tensor | None = None,
                generator: torch.Generator | None = None) -> NoisedCaptions:
        """Add this objective's noise to `text` [B, L]. By default u [B] is stratified over all ranks."""
        u = stratified_uniform(len(text), self._t_rng.random(), *ranks()) if u is None else u
        return self.objective.corrupt(text, self.vocab_size, self.caption_cfg, u, generator)

    def prepare(self, text: Tensor) -> Captions:
        """Noise and pack a batch [B, L] on the CPU. Move the result to the model's device and give it to `forward`.

        In training this also draws which image features are masked (`condition_drop`).
        """
        # Sizes are read here, on the CPU, so that no training step waits for the device.
        captions = pack(text, self.corrupt(text), self.vocab_size, self.caption_cfg.objective)
        self.check_length(int(captions.packed.position.max()) + 1)
        if self.training and (cfg := self.caption_cfg).condition_drop:
            shape = (len(text), self.tower.num_patches)
            captions = captions._replace(masked=mask_condition(shape, cfg.condition_drop, cfg.condition_mask))
        return captions

    def forward(self, image: Tensor, text: Tensor | Captions) -> dict[str, Tensor]:
        """Return the loss of each predicted token. Padding costs no compute, and the host never waits for the device.

        Args:
            image: [B, 3, height, width].
            text: the result of `prepare`. Or ids, long [B, L], which are then prepared here, on the CPU.

        Returns:
            token_nll: float32 [M], for most objectives -log p(token).
            token_weight: float32 [M], the token's weight in the loss.
            num_target: float32 [R], target tokens of each row. The loss is divided by their sum.
            logit_scale: a scalar for OpenCLIP's log.
            length_nll: float32 [B], the length head's loss, if the model has one.
        """
        captions = text if isinstance(text, Captions) else self.prepare(text.cpu()).to(image.device)
        return self.losses(self.encode_image_tokens(image, captions.masked), captions)

    def losses(self, image_embs: Tensor, captions: Captions) -> dict[str, Tensor]:
        """Return what `forward` returns, from patch tokens [B, P, D]."""
        own = self.training and self.objective.forward
        token_nll, learnt = own(self, image_embs, captions) if own else (self.token_nll(image_embs, captions), captions)
        output = {"token_nll": token_nll, "token_weight": learnt.predicted.weight, "num_target": learnt.num_target,
                  "logit_scale": self.logit_scale}
        if self.length_head is not None:
            num_target = captions.num_target.view(len(image_embs), -1)[:, 0]  # [B], the same in all rows of an image
            output["length_nll"] = length_nll(self.length_head(image_embs), num_target)
        return output

    def hidden(self, image_embs: Tensor, captions: Captions) -> Tensor:
        """Return the hidden state of each predicted token, [M, W]. `text.output` makes logits of them."""
        image_kv = self.text.project_image(image_embs)  # keys and values of the patches, once for all rows of an image
        time = None if self.text.time_embedding is None else step_of(captions.t)  # long [R]
        return self.text(captions.packed, image_kv, time).index_select(0, captions.predicted.index)

    def token_nll(self, image_embs: Tensor, captions: Captions) -> Tensor:
        """Return the loss of each predicted token, float32 [M], from patch tokens [B, P, D]."""
        # The auxiliary loss of diffusion in steps is for training alone, so that validation is the bound.
        aux = (self.caption_cfg.aux_weight,) if self.training and self.caption_cfg.aux_weight else ()

        def loss(hidden: Tensor, *predicted: Tensor) -> Tensor:
            return self.objective.token_loss(self.text.output(hidden), Predicted(*predicted), *aux)

        return in_chunks(loss, self.hidden(image_embs, captions), *captions.predicted)
