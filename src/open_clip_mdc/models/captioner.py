"""`Captioner`: an OpenCLIP image encoder and a text decoder that reconstructs the caption (Fig. 2, Sec. 3.2).

From a batch to its loss: on the CPU, noise the captions (the objective's `corrupt`) and drop padding (packing.pack). On
the device, encode the images, run the decoder on the valid tokens, and compute the loss of the predicted ones.

Dimensions: B images, R captions (rows), P patches, L positions, N valid tokens, M predicted tokens, D image width,
W decoder width, V vocabulary.
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
from .step_graphs import StepGraphs

LOSS_ROWS = 4096  # tokens whose logits are held at a time. Smaller chunks take longer.


class Captioner(nn.Module):
    """Image encoder and text decoder, used in the place of OpenCLIP's `CustomTextCLIP`.

    OpenCLIP's train loop, factory and logger rely on:
        `visual` (with `image_size`), `text` (with `positional_embedding`, which --force-context-length resizes),
        `logit_scale`, which OpenCLIP logs and clamps. It is an unsaved buffer, as DDP stops at unused parameters.
        `logit_bias = None`, `lock_image_tower`, `set_grad_checkpointing`, `no_weight_decay`,
        `forward`, whose outputs but `logit_scale` can be concatenated over micro-batches.
    """

    step_graphs: StepGraphs | None = None  # see compile_for_captions. Not set on instances: a fingerprint would see it

    def __init__(self, embed_dim: int | None, vision_cfg: CLIPVisionCfg | dict[str, Any],
                 text_cfg: CLIPTextCfg | dict[str, Any], caption_cfg: CaptionCfg | dict[str, Any],
                 quick_gelu: bool = False, cast_dtype: torch.dtype | None = None, vq_cfg: dict[str, Any] | None = None):
        """Build both towers.

        Args: those of OpenCLIP's model classes. `embed_dim` must be None or the encoder's width (else ValueError), as
        nothing is projected. `vq_cfg` (vq.VQCfg) makes the encoder a `VQTower`.
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
        if self.caption_cfg.condition_drop:  # zeros draw no random numbers, so other weights start as without it
            no_patch = torch.zeros(image_width)
            if self.caption_cfg.condition_zeros:
                self.register_buffer("no_patch", no_patch, persistent=False)
            elif not encoder.has_mask(self.visual):
                self.no_patch = nn.Parameter(no_patch)
        self.register_buffer("logit_scale", torch.ones(()), persistent=False)
        self.logit_bias = None
        self.patch_tokens = encoder.patch_tokens
        self.seed_t(0)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False):
        """Load weights. A file of `open_clip_mdc vq` fills the frozen VQ-VAE only, and the rest keeps its values.

        Raises Misfit, a RuntimeError that says which kind of model the weights belong to.
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
        """Set the mode. A locked image tower, or each locked BatchNorm in it, stays in eval mode: see `keep_locked`."""
        super().train(mode)
        encoder.keep_locked(self.visual)
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
        return [(name, module) for name, module in self.named_modules()
                if re.search(r"blocks\.\d+(\.cross_kv)?$", name)][::-1]

    def no_weight_decay(self) -> set[str]:
        towers = {"visual": encoder.no_weight_decay(self.visual), "text": self.text.no_weight_decay()}
        return {f"{tower}.{name}" for tower, names in towers.items() for name in names}

    # ---- image

    def encode_image_tokens(self, image: Tensor, masked: Tensor | None = None, tokens: Tensor | None = None) -> Tensor:
        """Return the normalised patch tokens that the decoder attends to: [B, P, D] from [B, 3, height, width].

        Args:
            masked: bool [B, P], tokens to replace by `no_patch` or by a VQTower's [MASK].
            tokens: the unmasked tokens, if you have them. The image is then read again only by a VQTower.
        """
        if masked is None or encoder.has_mask(self.visual) and not self.caption_cfg.condition_zeros:
            return self.patch_tokens(self.visual, image, masked)
        if tokens is None:
            tokens = self.patch_tokens(self.visual, image)
        masked = masked[:, :tokens.shape[1], None]  # patch_dropout leaves fewer tokens
        return torch.where(masked, self.no_patch.to(tokens.dtype), tokens)

    def encode_image(self, image: Tensor, normalize: bool = False) -> Tensor:
        """Return the global average of the patch tokens, [B, D]: the feature that probes use (Sec. 4.2)."""
        features = self.encode_image_tokens(image).mean(dim=1)
        return F.normalize(features, dim=-1) if normalize else features

    # ---- text

    @property
    def causal(self) -> bool:
        """Return True if captions are scored and decoded from left to right."""
        return self.objective.order == "causal"

    def check_length(self, tokens: int) -> None:
        """Raise ValueError if a text is longer than the context. (On CUDA a bad index would end the process.)"""
        if tokens > self.context_length:
            raise ValueError(f"a text of {tokens} tokens, SOT and EOT included, is longer than this model's context "
                             f"of {self.context_length}")

    def logits(self, image: Tensor, text: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return logits at every position of a text, [B, L, V]. It is simple and slow, for tests and notebooks.

        Position i predicts token i in a bidirectional model, and token i + 1 in a causal one.

        Args:
            text: long [B, L], mask ids included.
            valid: bool [B, L], False at padding. By default True up to the first EOT. Give it if EOT is masked.

        Raises ValueError if the text is longer than the context, or if `valid` is needed to know where it ends.
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
        """Return each row's step, long [R], judged by its share of masks. None if the decoder reads no step.

        Args: `text` is long [R, L], `lengths` [R] counts the tokens of each row.
        """
        if self.text.time_embedding is None:
            return None
        share = (text == mask_id(self.vocab_size)).sum(1).double() / (lengths - 1).clamp(min=1)
        return infer_time(share, self.objective.schedule(self.vocab_size, text.device))

    def token_logits(self, image_kv: ImageKV, lengths: Sequence[int],
                     graphs: StepGraphs | None = None) -> CaptionLogits:
        """Return a function from texts to logits of predicted tokens only. Padding costs no compute.

        Args:
            image_kv: `self.text.project_image(...)` of B images. R/B consecutive rows belong to each.
            lengths: number of tokens in each of the R rows, at least one.
            graphs: run the decoder, without gradients.

        Raises ValueError if a length exceeds the context.
        """
        self.check_length(max(lengths))
        infer_time = None if self.text.time_embedding is None else self.infer_time
        return CaptionLogits(self.text, image_kv, lengths, self.causal, infer_time, graphs)

    # ---- training

    def seed_t(self, seed: int) -> None:
        """Seed the offsets u0 of `stratified_uniform`. Give all ranks the same seed, so that their strata interlock."""
        self._t_rng = np.random.default_rng(seed)

    def corrupt(self, text: Tensor, u: Tensor | None = None,
                generator: torch.Generator | None = None) -> NoisedCaptions:
        """Add this objective's noise to `text` [B, L]. By default u [B] is stratified over all ranks."""
        if u is None:
            ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else ()
            u = stratified_uniform(len(text), self._t_rng.random(), *ranks)
        return self.objective.corrupt(text, self.vocab_size, self.caption_cfg, u, generator)

    def prepare(self, text: Tensor) -> Captions:
        """Noise and pack a batch [B, L] on the CPU. Move the result to the model's device and give it to `forward`.

        In training this also draws which image features are masked (`condition_drop`).
        """
        captions = pack(text, self.corrupt(text), self.vocab_size)
        self.check_length(int(captions.packed.position.max()) + 1)
        cfg = self.caption_cfg
        if self.training and cfg.condition_drop:
            shape = (len(text), encoder.num_patches(self.visual))
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
        return self.terms(self.encode_image_tokens(image, captions.masked), captions)

    def terms(self, image_embs: Tensor, captions: Captions) -> dict[str, Tensor]:
        """Return what `forward` returns, from patch tokens [B, P, D]."""
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
        # Logits are computed chunk by chunk, and again for the gradient, so that [M, V] is never held whole. Compiled
        # code holds it in 16 bit, and would recompile a loop for each number of chunks.
        aux = (self.caption_cfg.aux_weight,) if self.training and self.caption_cfg.aux_weight else ()

        def loss(hidden: Tensor, *predicted: Tensor) -> Tensor:
            return self.objective.token_loss(self.text.output(hidden), Predicted(*predicted), *aux)

        if torch.compiler.is_compiling() or len(hidden) <= LOSS_ROWS:
            return loss(hidden, *predicted)
        chunks = zip(*(x.split(LOSS_ROWS) for x in (hidden, *predicted)), strict=True)
        return torch.cat([checkpoint(loss, *c, use_reentrant=False, preserve_rng_state=False) for c in chunks])
