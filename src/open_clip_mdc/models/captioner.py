"""`Captioner`: an OpenCLIP image encoder and a text decoder that reconstructs the caption (Fig. 2, Sec. 3.2).

The path of a batch to its loss: hide tokens (the objective's `corrupt`), drop the padding (packing.pack), both on the
CPU. Encode the image, run the decoder on the valid tokens, take the objective's loss where it is asked.

Dimensions: B captions and images, R rows, P patches, L positions, N valid tokens, M asked tokens, D image width, W
decoder width, V vocabulary.
"""
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from open_clip.model import CLIPTextCfg, CLIPVisionCfg
from open_clip.transformer import LayerNorm, LayerNormFp32, QuickGELU
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.utils.checkpoint import checkpoint

from ..data.weights import misfit
from ..objectives.base import CaptionCfg, mask_condition, stratified_uniform
from ..objectives.registry import OBJECTIVES
from ..objectives.replace import STEPS, step_of
from ..objectives.replace_process import infer_time
from ..text.packing import Captions, NoisedCaptions, Packed, Predicted, pack
from ..text.special_tokens import PAD_ID, mask_id, valid_tokens
from . import encoder
from .caption_logits import CaptionLogits
from .decoder import TextDecoder
from .interface import ImageKV
from .length_head import LengthHead, fill_missing_from_init, length_nll

LOSS_ROWS = 4096  # logits of so many tokens are held at a time; more and smaller chunks take longer


class Captioner(nn.Module):
    """Image encoder and text decoder, in the place where OpenCLIP has a `CustomTextCLIP`.

    OpenCLIP's train loop, factory and logger rely on:
        `visual` (with `image_size`), `text` (with `positional_embedding`: resized by --force-context-length),
        `logit_scale`, a buffer that is not saved: OpenCLIP logs and clamps it (an unused parameter would stop DDP),
        `logit_bias = None`, `lock_image_tower`, `set_grad_checkpointing`, `no_weight_decay`,
        `forward`, which returns only tensors besides `logit_scale` that can be concatenated over micro-batches.
    """

    def __init__(self, embed_dim: int | None, vision_cfg: CLIPVisionCfg | dict[str, Any],
                 text_cfg: CLIPTextCfg | dict[str, Any], caption_cfg: CaptionCfg | dict[str, Any],
                 quick_gelu: bool = False, cast_dtype: torch.dtype | None = None, vq_cfg: dict[str, Any] | None = None):
        """Args: as OpenCLIP's model classes. `embed_dim` is None or the encoder's width, as nothing is projected (else
        ValueError). `vq_cfg` (vq.VQCfg) makes the encoder a frozen VQ-VAE's codes.
        """
        super().__init__()
        vision_cfg = CLIPVisionCfg(**vision_cfg) if isinstance(vision_cfg, dict) else vision_cfg
        text_cfg = CLIPTextCfg(**text_cfg) if isinstance(text_cfg, dict) else text_cfg
        self.caption_cfg = CaptionCfg(**caption_cfg) if isinstance(caption_cfg, dict) else caption_cfg
        self.objective = OBJECTIVES[self.caption_cfg.objective]

        self.visual = encoder.build(vision_cfg, quick_gelu, cast_dtype, vq_cfg, self.caption_cfg.regions)
        self.image_width = image_width = encoder.width(self.visual)
        if embed_dim not in (None, image_width):
            raise ValueError(f"embed_dim is {embed_dim}, but this encoder's features have width {image_width}")

        norm_layer = LayerNormFp32 if cast_dtype in (torch.float16, torch.bfloat16) else LayerNorm
        self.text = TextDecoder(
            vocab_size=text_cfg.vocab_size,
            context_length=text_cfg.context_length,
            width=text_cfg.width,
            heads=text_cfg.heads,
            layers=text_cfg.layers,
            mlp_ratio=text_cfg.mlp_ratio,
            image_width=image_width,
            act_layer=QuickGELU if quick_gelu else nn.GELU,
            norm_layer=partial(norm_layer, **(text_cfg.norm_kwargs or {})),
            steps=STEPS if self.caption_cfg.time_embedding else None,
        )
        if self.text.time_embedding is not None:
            self.text.time_embedding.register_load_state_dict_pre_hook(fill_missing_from_init)
        self.context_length = text_cfg.context_length
        self.vocab_size = text_cfg.vocab_size
        has_length_head = self.caption_cfg.length_head and not self.causal
        self.length_head = LengthHead(image_width, self.context_length) if has_length_head else None
        if self.caption_cfg.condition_drop:  # zeros at first: no random numbers that a model without would not draw
            no_patch = torch.zeros(image_width)
            if self.caption_cfg.condition_zeros:
                self.register_buffer("no_patch", no_patch, persistent=False)
            elif not encoder.has_mask(self.visual):
                self.no_patch = nn.Parameter(no_patch)
        self.register_buffer("logit_scale", torch.ones(()), persistent=False)
        self.logit_bias = None
        self.seed_t(0)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False):
        """Load the weights. A file of `open_clip_mdc vq` gives the frozen VQ-VAE, and the rest stays as it was made.

        Raises Misfit, a RuntimeError that says what the weights are of.
        """
        if encoder.load(self.visual, state_dict):
            return None
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as problem:
            raise misfit(self.state_dict(), state_dict) from problem

    def lock_image_tower(self, unlocked_groups: int = 0, freeze_bn_stats: bool = False) -> None:
        encoder.lock(self.visual, unlocked_groups)

    def train(self, mode: bool = True) -> "Captioner":
        """As a module's, but a tower that is locked whole runs as in evaluation: BatchNorm keeps its statistics."""
        super().train(mode)
        encoder.keep_locked(self.visual)
        return self

    def set_grad_checkpointing(self, enable: bool = True, impl: str = "inline") -> None:
        if impl == "composable":  # OpenCLIP 4.x's under --fsdp
            for _, block in self.fsdp_shard_modules():
                composable_checkpoint(block)
            return
        self.visual.set_grad_checkpointing(enable)
        self.text.set_grad_checkpointing(enable)

    def fsdp_shard_modules(self) -> list[tuple[str, nn.Module]]:
        """Return name and module of what OpenCLIP 4.x shards one by one under --fsdp, inner ones first.

        They are the blocks of both towers, and of the decoder's what `project_image` calls before them.
        """
        return [(name, module) for name, module in self.named_modules()
                if re.search(r"blocks\.\d+(\.cross_kv)?$", name)][::-1]

    def no_weight_decay(self) -> set[str]:
        towers = {"visual": encoder.no_weight_decay(self.visual), "text": self.text.no_weight_decay()}
        return {f"{tower}.{name}" for tower, names in towers.items() for name in names}

    # ---- image

    def encode_image_tokens(self, image: Tensor, masked: Tensor | None = None, tokens: Tensor | None = None) -> Tensor:
        """Return normalised patch tokens, what the decoder attends to: [B, P, D] from [B, 3, height, width].

        Args:
            masked: bool [B, P], tokens that `no_patch` or a VQTower's [MASK] stands for.
            tokens: those of the image without `masked`, if at hand: only a tower with a [MASK] then reads it again.
        """
        if masked is None or encoder.has_mask(self.visual) and not self.caption_cfg.condition_zeros:
            return encoder.patch_tokens(self.visual, image, masked)
        if tokens is None:
            tokens = encoder.patch_tokens(self.visual, image)
        masked = masked[:, :tokens.shape[1], None]  # fewer where patch_dropout drops some at random
        return torch.where(masked, self.no_patch.to(tokens.dtype), tokens)

    def encode_image(self, image: Tensor, normalize: bool = False) -> Tensor:
        """Return the GAP feature that is probed: the mean of the patch tokens, [B, D] (Sec. 4.2)."""
        features = self.encode_image_tokens(image).mean(dim=1)
        return F.normalize(features, dim=-1) if normalize else features

    # ---- text

    @property
    def causal(self) -> bool:
        """True if captions are read from left to right when they are scored or decoded."""
        return self.objective.order == "causal"

    def check_length(self, tokens: int) -> None:
        """Raises ValueError if they are too many. (An index out of range would end a CUDA process.)"""
        if tokens > self.context_length:
            raise ValueError(f"a text of {tokens} tokens, SOT and EOT included, is longer than this model's context "
                             f"of {self.context_length}")

    def logits(self, image: Tensor, text: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return logits of every position of the text as it stands, [B, L, V]: plain, slow, for tests and notebooks.

        A bidirectional model's position i predicts token i, a causal model's token i + 1.

        Args:
            text: long [B, L], mask ids included.
            valid: bool [B, L], what is no padding. By default up to the first EOT (give it when EOT is masked).

        Raises ValueError: the text is longer than the context, or without `valid` a caption's end cannot be told.
        """
        self.check_length(text.shape[1])
        if valid is None:
            valid = valid_tokens(text, self.vocab_size)
            endless = (valid.all(-1) & (text[:, -1] == PAD_ID)).nonzero()
            if len(endless):
                raise ValueError(f"text {int(endless[0])} has no EOT and ends in padding: give `valid` [B, L] too")
        position = torch.arange(text.shape[1], device=text.device).repeat(len(text))
        image_kv = self.text.project_image(self.encode_image_tokens(image))
        hidden = self.text(Packed(text.flatten(), position, None, valid, True, self.causal), image_kv,
                           self.infer_time(text, valid.sum(1)))
        return self.text.output(hidden).view(*text.shape, -1)

    def infer_time(self, text: Tensor, lengths: Tensor) -> Tensor | None:
        """Return the step, long [R], by the share of masks in texts [R, L] of [R] tokens. None if not needed."""
        if self.text.time_embedding is None:
            return None
        share = (text == mask_id(self.vocab_size)).sum(1).double() / (lengths - 1).clamp(min=1)
        return infer_time(share, self.objective.schedule(self.vocab_size, text.device))

    def token_logits(self, image_kv: ImageKV, lengths: Sequence[int]) -> CaptionLogits:
        """Return a function that gives logits of predicted tokens only, at the cost of the real ones.

        Args:
            image_kv: `self.text.project_image(...)` of I images; R/I consecutive rows belong to each.
            lengths: the numbers of tokens of the R rows, at least one each.

        Raises ValueError if a length exceeds the context.
        """
        self.check_length(max(lengths))
        infer_time = None if self.text.time_embedding is None else self.infer_time
        return CaptionLogits(self.text, image_kv, lengths, self.causal, infer_time)

    # ---- training

    def seed_t(self, seed: int) -> None:
        """Start the sequence of time offsets u0. It is equal on all ranks, so that their strata interlock."""
        self._t_rng = np.random.default_rng(seed)

    def corrupt(self, text: Tensor, u: Tensor | None = None,
                generator: torch.Generator | None = None) -> NoisedCaptions:
        """Add this objective's noise to `text`; u [B] is stratified over the ranks unless given."""
        if u is None:
            ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else ()
            u = stratified_uniform(len(text), self._t_rng.random(), *ranks)
        return self.objective.corrupt(text, self.vocab_size, self.caption_cfg, u, generator)

    def prepare(self, text: Tensor) -> Captions:
        """Noise and pack a batch [B, L] on the CPU: `forward` runs on the result once it is on the model's device.

        In training this also draws which image features the decoder does not see.
        """
        captions = pack(text, self.corrupt(text), self.vocab_size)
        self.check_length(int(captions.packed.position.max()) + 1)
        cfg = self.caption_cfg
        if self.training and cfg.condition_drop:
            shape = (len(text), encoder.num_patches(self.visual))
            captions = captions._replace(masked=mask_condition(shape, cfg.condition_drop, cfg.condition_mask))
        return captions

    def forward(self, image: Tensor, text: Tensor | Captions) -> dict[str, Tensor]:
        """Return the loss of each predicted token, at the cost of the valid ones. Nothing waits for the device.

        Args:
            image: [B, 3, height, width].
            text: the result of `prepare`. Or long [B, L] as the tokenizer makes it, which is prepared here, on the CPU.

        Returns:
            token_nll: float32 [M], e.g. -log p(token).
            token_weight: float32 [M], its weight in the loss.
            num_target: float32 [R], the number of tokens that the loss is divided by.
            logit_scale: [], for OpenCLIP's log.
            length_nll: float32 [B], of the length head, where there is one.
        """
        captions = text if isinstance(text, Captions) else self.prepare(text.cpu()).to(image.device)
        return self.terms(self.encode_image_tokens(image, captions.masked), captions)

    def terms(self, image_embs: Tensor, captions: Captions) -> dict[str, Tensor]:
        """Return what `forward` returns, of patch tokens [B, P, D]."""
        output = {
            "token_nll": self.token_nll(image_embs, captions),
            "token_weight": captions.predicted.weight,
            "num_target": captions.num_target,
            "logit_scale": self.logit_scale,
        }
        if self.length_head is not None:
            output["length_nll"] = length_nll(self.length_head(image_embs),
                                              captions.num_target.view(len(image_embs), -1)[:, 0])
        return output

    def token_nll(self, image_embs: Tensor, captions: Captions) -> Tensor:
        """Return the loss of each predicted token, float32 [M], from patch tokens [B, P, D]."""
        image_kv = self.text.project_image(image_embs)
        time = None if self.text.time_embedding is None else step_of(captions.t)
        hidden = self.text(captions.packed, image_kv, time).index_select(0, captions.predicted.index)
        return self.token_loss(hidden, captions.predicted)

    def token_loss(self, hidden: Tensor, predicted: Predicted) -> Tensor:
        # Logits are made chunk by chunk and made again for the gradient, so that never all [M, V] are held. Compiled
        # code holds them in 16 bit only, and a loop would be compiled anew for each number of chunks.
        aux = (self.caption_cfg.aux_weight,) if self.training and self.caption_cfg.aux_weight else ()

        def loss(hidden: Tensor, *predicted: Tensor) -> Tensor:
            return self.objective.token_loss(self.text.output(hidden), Predicted(*predicted), *aux)

        if torch.compiler.is_compiling() or len(hidden) <= LOSS_ROWS:
            return loss(hidden, *predicted)
        chunks = zip(*(x.split(LOSS_ROWS) for x in (hidden, *predicted)), strict=True)
        return torch.cat([checkpoint(loss, *c, use_reentrant=False, preserve_rng_state=False) for c in chunks])
