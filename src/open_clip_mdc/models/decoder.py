"""The text decoder: 12 blocks of self-attention over the caption, cross-attention to the image, MLP (Secs. 3.2, 4.1).

MDC's self-attention is bidirectional over the valid tokens, ARC's causal. Captions are packed for the linear layers:
the real tokens of a batch, one after another, are [N, W]. Only attention works on the padded shape [R, L, W].

Dimensions: B images, R captions (R/B consecutive rows per image), P patches, L positions, N real tokens of all rows,
D image width, W decoder width, H heads, V vocabulary.
"""
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from open_clip.model import CLIPTextCfg
from open_clip.transformer import LayerNorm, LayerNormFp32, QuickGELU
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..text.packing import Packed, sees
from .interface import ImageKV
from .length_head import fill_missing_from_init
from .precision import autocast_dtype, in_chosen_precision, in_float32, in_training_step

TextKV = list[tuple[Tensor, Tensor]]  # per layer: keys and values of the caption so far, [R, H, L, W/H] each


def pad(x: Tensor, packed: Packed) -> Tensor:
    """Return padded [R, L, W] from packed [N, W], zero where there is no token."""
    if packed.place is not None:
        # Every token is written at its own place in R*L. Padding stays 0.
        x = x.new_zeros(packed.valid.numel(), x.shape[-1]).index_copy(0, packed.place, x)
    return x.view(*packed.valid.shape, x.shape[-1])


def unpad(x: Tensor, packed: Packed) -> Tensor:
    """Return packed [N, ...] from padded [R, L, ...]."""
    x = x.flatten(0, 1)
    return x if packed.place is None else x.index_select(0, packed.place)


def attention_mask(packed: Packed, dtype: torch.dtype) -> tuple[Tensor | None, bool]:
    """Return `attn_mask` and `is_causal` for scaled_dot_product_attention. All layers share them.

    The mask is 0 where a token may attend and -inf elsewhere, [R, 1, 1 or L, L], or None. Valid tokens come first in a
    row, so causal attention never reaches padding and needs no mask.
    """
    valid, causal = packed.valid, packed.causal
    # Padding is hidden from every query. Its own rows are never read.
    may_attend = valid[:, None, None, :]  # [R, 1, 1, L]
    if packed.sight is not None:
        # Padding sees itself, [R, 1, L, L], as a row of -inf alone would give NaN, also to the gradients of others.
        itself = torch.eye(valid.shape[1], dtype=torch.bool, device=valid.device) & ~valid[:, None, :, None]
        may_attend = sees(packed.sight)[:, None] & may_attend | itself
    elif isinstance(causal, Tensor):
        # Rows of both kinds in a batch (CapPa) need a mask of their own, [R, 1, L, L].
        square = torch.ones(valid.shape[1], valid.shape[1], dtype=torch.bool, device=valid.device)
        may_attend = (square.tril() | ~causal[:, None, None, None]) & may_attend
    elif causal or not packed.padded:
        return None, bool(causal)
    return torch.zeros_like(may_attend, dtype=dtype).masked_fill(~may_attend, float("-inf")), False


class DecoderBlock(nn.Module):
    """Self-attention, cross-attention and MLP, each with a norm before it. One MLP per layer, as in CapPa."""

    def __init__(self, cfg: CLIPTextCfg, image_width: int, act_layer: Callable, norm_layer: Callable):
        super().__init__()
        width, hidden = cfg.width, int(cfg.width * cfg.mlp_ratio)
        self.heads = cfg.heads
        self.ln_1 = norm_layer(width)
        self.self_qkv = nn.Linear(width, 3 * width)
        self.self_out = nn.Linear(width, width)
        self.ln_2 = norm_layer(width)
        self.cross_q = nn.Linear(width, width)
        self.cross_kv = nn.Linear(image_width, 2 * width)
        self.cross_out = nn.Linear(width, width)
        self.ln_3 = norm_layer(width)
        self.mlp = nn.Sequential(OrderedDict(
            c_fc=nn.Linear(width, hidden), gelu=act_layer(), c_proj=nn.Linear(hidden, width)))

    def split_heads(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        return x.unflatten(-1, (parts, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def project_image(self, image_embs: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of the images, [B, H, P, W/H] each, from patch tokens [B, P, D]."""
        # Once an image, however many captions and steps there are.
        return self.split_heads(self.cross_kv(image_embs), 2)

    def look(self, q: Tensor, image_k: Tensor, image_v: Tensor) -> Tensor:
        """Return what queries [R, L, W] find in the images, [R, L, W]."""
        # The rows of an image are one long row of queries, [B, H, (R/B)*L, W/H], as they share its keys and values.
        rows = q.reshape(image_k.shape[0], -1, q.shape[-1])
        y = F.scaled_dot_product_attention(*self.split_heads(rows, 1), image_k, image_v)
        return y.transpose(1, 2).reshape(q.shape)

    def forward(self, x: Tensor, packed: Packed, image_k: Tensor, image_v: Tensor, mask: Tensor | None,
                is_causal: bool) -> Tensor:
        # Only attention needs the padded shape. All linear layers run on [N, W].
        q, k, v = self.split_heads(pad(self.self_qkv(self.ln_1(x)), packed), 3)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)  # [R, H, L, W/H]
        x = x + self.self_out(unpad(y.transpose(1, 2).flatten(2), packed))
        y = self.look(pad(self.cross_q(self.ln_2(x)), packed), image_k, image_v)
        x = x + self.cross_out(unpad(y, packed))
        return x + self.mlp(self.ln_3(x))

    def step(self, x: Tensor, image_k: Tensor, image_v: Tensor,
             past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run `forward` for n more tokens per row, [R, n, W]. Also return keys and values, [R, H, L + n, W/H].

        The new tokens see each other and all before them. One of them is a step of a causal model.
        """
        # Rows are equally long, so nothing is padded, and no token before the new ones is asked: no mask.
        q, k, v = self.split_heads(self.self_qkv(self.ln_1(x)), 3)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)  # [R, H, L + n, W/H]
        y = F.scaled_dot_product_attention(q, k, v)  # [R, H, n, W/H]
        x = x + self.self_out(y.transpose(1, 2).flatten(2))
        x = x + self.cross_out(self.look(self.cross_q(self.ln_2(x)), image_k, image_v))
        return x + self.mlp(self.ln_3(x)), (k, v)


class VocabularyProjection(nn.Linear):
    """Logits [M, V] from hidden states [M, W]. Outside training they are float32, whatever the weights are."""

    def forward(self, hidden: Tensor) -> Tensor:
        if in_training_step(self):
            return super().forward(hidden)
        with in_float32(self.weight.device.type):
            return F.linear(hidden.float(), self.weight.float())


class TimeEmbedding(nn.Embedding):
    """A vector for each step 0..T. It starts at zero and draws no random numbers, so all else starts as without it."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class TextDecoder(nn.Module):
    """Decoder blocks. The input embedding has V + 1 rows, the last for [MASK]. The output, not tied to it, has V."""

    def __init__(self, cfg: CLIPTextCfg, image_width: int, quick_gelu: bool = False,
                 cast_dtype: torch.dtype | None = None, steps: int | None = None):
        """Build the decoder in the size of a text tower. `steps` is T if it reads the diffusion step, else None."""
        super().__init__()
        act_layer = QuickGELU if quick_gelu else nn.GELU
        norm_layer = LayerNormFp32 if cast_dtype in (torch.float16, torch.bfloat16) else LayerNorm
        norm_layer = partial(norm_layer, **(cfg.norm_kwargs or {}))
        self.vocab_size = cfg.vocab_size
        self.context_length = cfg.context_length
        # The last row is [MASK], which the output cannot predict.
        self.token_embedding = nn.Embedding(cfg.vocab_size + 1, cfg.width)
        self.positional_embedding = nn.Parameter(torch.empty(cfg.context_length, cfg.width))
        self.time_embedding = None
        if steps is not None:
            self.time_embedding = TimeEmbedding(steps + 1, cfg.width)
            self.time_embedding.register_load_state_dict_pre_hook(fill_missing_from_init)
        self.blocks = nn.ModuleList(DecoderBlock(cfg, image_width, act_layer, norm_layer) for _ in range(cfg.layers))
        self.ln_final = norm_layer(cfg.width)
        self.output = VocabularyProjection(cfg.width, cfg.vocab_size, bias=False)
        self.grad_checkpointing = False
        self.init_parameters()

    def init_parameters(self) -> None:
        # As in OpenCLIP's TextTransformer, the output layers of residual branches start smaller in deeper networks.
        width = self.positional_embedding.shape[1]
        residual = width ** -0.5 * (2 * len(self.blocks)) ** -0.5
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        nn.init.normal_(self.positional_embedding, std=0.01)
        nn.init.normal_(self.output.weight, std=0.02)
        for block in self.blocks:
            for linear, std in (
                    (block.self_qkv, width ** -0.5), (block.cross_q, width ** -0.5),
                    (block.cross_kv, block.cross_kv.in_features ** -0.5), (block.self_out, residual),
                    (block.cross_out, residual), (block.mlp.c_proj, residual), (block.mlp.c_fc, (2 * width) ** -0.5)):
                nn.init.normal_(linear.weight, std=std)
                nn.init.zeros_(linear.bias)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        return {"positional_embedding"}

    @property
    def body_dtype(self) -> torch.dtype:
        weight = self.blocks[0].self_qkv.weight
        # FSDP2 casts weights when it gathers them, so theirs says nothing.
        return (self.output.weight if hasattr(weight, "to_local") else weight).dtype

    @in_chosen_precision
    def project_image(self, image_embs: Tensor) -> ImageKV:
        """Return keys and values of images from patch tokens [B, P, D]: once for all captions and decoding steps."""
        if autocast_dtype(image_embs.device.type) is None:
            image_embs = image_embs.to(self.body_dtype)
        return [block.project_image(image_embs) for block in self.blocks]

    @in_chosen_precision
    def forward(self, packed: Packed, image_kv: ImageKV, time: Tensor | None = None) -> Tensor:
        """Return hidden states after the last norm, [N, W]. `output` makes logits of them.

        Args:
            packed: R rows, ids in [0, V].
            image_kv: keys and values of B images. Rows b*(R/B) to (b+1)*(R/B) - 1 belong to image b.
            time: the step of each row, long [R], for a decoder that reads it.
        """
        x = self.token_embedding(packed.token) + self.positional_embedding[packed.position]  # [N, W]
        if self.time_embedding is not None:
            # Each token gets the step of its row: [R] -> [R, L] -> [N].
            x = x + self.time_embedding(unpad(time[:, None].expand(packed.valid.shape), packed))
        x = x.to(self.body_dtype)  # --precision bf16 keeps embeddings in float32
        # One mask serves all layers.
        mask, is_causal = attention_mask(packed, autocast_dtype(x.device.type) or x.dtype)
        for block, (image_k, image_v) in zip(self.blocks, image_kv, strict=True):
            args = (x, packed, image_k, image_v, mask, is_causal)
            x = checkpoint(block, *args, use_reentrant=False) if self.grad_checkpointing and self.training \
                else block(*args)
        return self.ln_final(x.to(self.output.weight.dtype))

    @in_chosen_precision
    def step(self, token: Tensor, image_kv: ImageKV, past: TextKV | None = None) -> tuple[Tensor, TextKV]:
        """Return the hidden states of n more tokens per row, which see each other and all before them.

        Args:
            token: ids, long [R, n]: one of a causal model, or a block.
            past: keys and values from the last step, with the rows that you continue. None at the first step.

        Returns:
            hidden states [R, n, W], and the keys and values of all tokens so far.
        """
        start = 0 if past is None else past[0][0].shape[2]
        position = self.positional_embedding[start:start + token.shape[1]]  # [n, W]
        x = (self.token_embedding(token) + position).to(self.body_dtype)
        present = []
        for i, (block, (image_k, image_v)) in enumerate(zip(self.blocks, image_kv, strict=True)):
            x, kv = block.step(x, image_k, image_v, None if past is None else past[i])
            present.append(kv)
        return self.ln_final(x.to(self.output.weight.dtype)), present
