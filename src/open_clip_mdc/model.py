"""`Captioner`: an OpenCLIP image encoder and a text decoder that reconstructs the caption (Fig. 2, Sec. 3.2).

The path of a batch from pixels to loss is `Captioner.forward`: encode the image, hide tokens (objective.corrupt), run
the decoder on the real tokens (decoder.TextDecoder), take the cross-entropy where a token was hidden.

Dimensions: B captions and images, P patches, L positions, N real tokens, M scored tokens, D image width, V vocabulary.
"""
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from open_clip.model import CLIPTextCfg, CLIPVisionCfg
from open_clip.transformer import LayerNorm, LayerNormFp32, QuickGELU
from torch import Tensor, nn

from . import encoder, generate, scoring
from .decoder import Layout, TextDecoder
from .interface import Decoded, ImageKV
from .length_head import LengthHead, length_nll
from .objective import Corrupted, corrupt, sample_t
from .tokens import valid_tokens


@dataclass
class CaptionCfg:
    """What makes a model config a captioner: its objective. BERT is t_min == t_max; parallel decoding is 1.0, 1.0."""

    objective: str = "mdc"  # "mdc" | "arc" | "cappa"
    t_min: float = 0.5
    t_max: float = 1.0
    loss_weight: str = "inverse_t"  # "inverse_t" | "none"
    length_head: bool = True  # learn p(N | image), too; a causal model has none, as it ends its captions itself

    def __post_init__(self):
        if self.objective not in ("mdc", "arc", "cappa"):
            raise ValueError(f"caption_cfg.objective is {self.objective!r}; it must be 'mdc', 'arc' or 'cappa'")
        if self.loss_weight not in ("inverse_t", "none"):
            raise ValueError(f"caption_cfg.loss_weight is {self.loss_weight!r}; it must be 'inverse_t' or 'none'")
        if not (0 <= self.t_min <= self.t_max <= 1 and self.t_max > 0):
            raise ValueError(f"caption_cfg needs 0 <= t_min <= t_max <= 1, t_max > 0; not {self.t_min}, {self.t_max}")


@torch.compiler.disable  # shapes depend on the data: one graph break here instead of many
def pack(valid: Tensor) -> Layout:
    """Layout of the real tokens, trimmed to the longest caption. Waits for the device.

    Args:
        valid: bool [B, L], True first and False after.
    """
    length = int(valid.sum(1).max())
    index = valid[:, :length].flatten().nonzero().squeeze(1)
    return Layout(len(valid), length, None if len(index) == len(valid) * length else index)


@torch.compiler.disable
def read_positions(asked: Tensor, valid: Tensor, causal: bool | Tensor) -> Tensor:
    """Which packed token speaks of each asked one: itself, or the one before where captions are read left to right.

    Args:
        asked: bool [B, L].
        valid: bool [B, L].

    Returns:
        long [M] into the N packed tokens, in row-major order of `asked`.
    """
    row, position = asked.nonzero().unbind(1)
    lengths = valid.sum(1)
    back = causal[row].long() if isinstance(causal, Tensor) else int(causal)
    return (lengths.cumsum(0) - lengths)[row] + position - back


class Captioner(nn.Module):
    """Image encoder and text decoder, in the place where OpenCLIP has a `CustomTextCLIP`.

    Upstream's train loop, factory and logger rely on:
        `visual` (with `image_size`), `text` (with `positional_embedding`: resized by --force-context-length),
        `logit_scale`, a buffer that is not saved: upstream logs and clamps it (an unused parameter would stop DDP),
        `logit_bias = None`, `lock_image_tower`, `set_grad_checkpointing`, `no_weight_decay`,
        `forward`, returning only batch-first tensors of fixed width besides `logit_scale`: upstream concatenates them
        over the micro-batches of an accumulated step.
    """

    def __init__(
            self,
            embed_dim: int | None,
            vision_cfg: CLIPVisionCfg | dict[str, Any],
            text_cfg: CLIPTextCfg | dict[str, Any],
            caption_cfg: CaptionCfg | dict[str, Any],
            quick_gelu: bool = False,
            cast_dtype: torch.dtype | None = None,
    ):
        """Args: as OpenCLIP's model classes; `embed_dim` is None or the encoder's width, as nothing is projected."""
        super().__init__()
        vision_cfg = CLIPVisionCfg(**vision_cfg) if isinstance(vision_cfg, dict) else vision_cfg
        text_cfg = CLIPTextCfg(**text_cfg) if isinstance(text_cfg, dict) else text_cfg
        self.caption_cfg = CaptionCfg(**caption_cfg) if isinstance(caption_cfg, dict) else caption_cfg

        self.visual = encoder.build(vision_cfg, quick_gelu, cast_dtype)
        image_width = encoder.width(self.visual)
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
        )
        self.context_length = text_cfg.context_length
        self.vocab_size = text_cfg.vocab_size
        has_length_head = self.caption_cfg.length_head and not self.causal
        self.length_head = LengthHead(image_width, self.context_length) if has_length_head else None
        self.register_buffer("logit_scale", torch.ones(()), persistent=False)
        self.logit_bias = None
        self.seed_t(0)

    def lock_image_tower(self, unlocked_groups: int = 0, freeze_bn_stats: bool = False) -> None:
        encoder.lock(self.visual, unlocked_groups, freeze_bn_stats)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.visual.set_grad_checkpointing(enable)
        self.text.set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        """For --opt timm/...; upstream's AdamW goes by parameter names and dimensions."""
        towers = {"visual": encoder.no_weight_decay(self.visual), "text": self.text.no_weight_decay()}
        return {f"{tower}.{name}" for tower, names in towers.items() for name in names}

    # ---- image

    def encode_image_tokens(self, image: Tensor) -> Tensor:
        """Normalised patch tokens, what the decoder attends to: [B, P, D] from [B, 3, height, width]."""
        return encoder.patch_tokens(self.visual, image)

    def encode_image(self, image: Tensor, normalize: bool = False) -> Tensor:
        """The GAP feature that is probed: mean of the patch tokens, [B, D] (Sec. 4.2)."""
        features = self.encode_image_tokens(image).mean(dim=1)
        return F.normalize(features, dim=-1) if normalize else features

    # ---- text

    @property
    def causal(self) -> bool:
        """Whether captions are read left to right when they are scored or decoded (CapPa's model is)."""
        return self.caption_cfg.objective != "mdc"

    def logits(self, image: Tensor, text: Tensor, valid: Tensor | None = None) -> Tensor:
        """Logits for every position of the text as it stands: plain, unpacked, slow, for tests and notebooks.

        A bidirectional model's position i speaks of token i; a causal model's of token i + 1.

        Args:
            text: long [B, L], mask ids included.
            valid: bool [B, L], what is no padding; by default up to the first EOT (give it when EOT is masked).

        Returns:
            [B, L, V].
        """
        valid = valid_tokens(text, self.vocab_size) if valid is None else valid
        image_kv = self.text.project_image(self.encode_image_tokens(image))
        hidden = self.text(text, image_kv, valid, self.causal)
        return self.text.output(hidden).view(*text.shape, -1)

    def token_logits(self, image_kv: ImageKV, text: Tensor, valid: Tensor, asked: Tensor,
                     causal: bool | Tensor | None = None) -> Tensor:
        """Logits of the asked tokens only, at the cost of the valid ones: what training, scoring and decoding run.

        Args:
            image_kv: `self.text.project_image(...)` of I images; R/I consecutive rows belong to each.
            text: long [R, L], mask ids included.
            valid: bool [R, L], True first and False after, at least one per row.
            asked: bool [R, L], the tokens whose logits are wanted (not position 0 of a causal row).
            causal: this model's own direction if None.

        Returns:
            [M, V] in row-major order of `asked`.
        """
        causal = self.causal if causal is None else causal
        layout = pack(valid)
        is_key = None if layout.index is None else valid[:, :layout.length]
        hidden = self.text(text[:, :layout.length], image_kv, is_key, causal, layout)
        return self.text.output(hidden[read_positions(asked, valid, causal)])

    def seed_t(self, seed: int) -> None:
        """Starts the sequence of time offsets u0. It is equal on all ranks, so that their strata interlock."""
        self._t_rng = np.random.default_rng(seed)

    @torch.compiler.disable
    def corrupt(self, text: Tensor, t: Tensor | None = None, generator: torch.Generator | None = None) -> Corrupted:
        """`objective.corrupt` by this model's config; t is drawn systematically over the ranks unless given."""
        cfg = self.caption_cfg
        if t is None:
            ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else ()
            interval = (0.0, 1.0) if cfg.objective == "cappa" else (cfg.t_min, cfg.t_max)
            t = sample_t(len(text), *interval, self._t_rng.random(), *ranks)
        return corrupt(text, self.vocab_size, t.to(text.device), cfg.objective, cfg.loss_weight, generator)

    def forward(self, image: Tensor, text: Tensor, corrupted: Corrupted | None = None) -> dict[str, Tensor]:
        """Cross-entropy of the hidden tokens, at the cost of the real ones.

        Args:
            image: [B, 3, height, width].
            text: long [B, L] as the tokenizer makes it: SOT, tokens, EOT, padding.
            corrupted: what is hidden; drawn anew by `corrupt` if None.

        Returns:
            token_nll: float32 [B, L], -log p(token), 0 where not scored.
            token_weight: float32 [B, L], its weight in the loss, 0 where not scored.
            token_target: float32 [B, L], 1 for the tokens that the loss is normalised by.
            logit_scale: [], for upstream's log.
            length_nll: float32 [B], of the length head, where there is one.
        """
        image_embs = self.encode_image_tokens(image)
        image_kv = self.text.project_image(image_embs)
        # After the encoder was launched: packing waits for the device, which then has work to go on with.
        corrupted = self.corrupt(text) if corrupted is None else corrupted
        scored = corrupted.token_weight > 0
        valid = valid_tokens(text, self.vocab_size)
        logits = self.token_logits(image_kv, corrupted.text, valid, scored, corrupted.causal)
        nll = F.cross_entropy(logits.float(), text[scored], reduction="none")
        token_nll = torch.zeros_like(corrupted.token_weight).masked_scatter(scored, nll)
        output = {
            "token_nll": token_nll,
            "token_weight": corrupted.token_weight,
            "token_target": corrupted.token_target.float(),
            "logit_scale": self.logit_scale,
        }
        if self.length_head is not None:
            output["length_nll"] = length_nll(self.length_head(image_embs.mean(dim=1)), text, self.vocab_size)
        return output

    # ---- scoring and decoding

    def log_likelihood(self, image: Tensor, text: Tensor, method: str | None = None, **options) -> Tensor:
        """`scoring.log_likelihood`: nats of captions [B, L] or candidates [B, C, L], as [B] or [B, C]."""
        return scoring.log_likelihood(self, image, text, method, **options)

    def generate(self, image: Tensor, **options) -> Tensor | Decoded:
        """`generate.generate`: captions as ids from SOT to EOT, then padding, long [B, L]."""
        return generate.generate(self, image, **options)
