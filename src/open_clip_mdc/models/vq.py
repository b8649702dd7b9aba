"""The discrete image encoder of MC-Diffusion: an image becomes a grid of codes of a frozen VQ-VAE, and codes vectors.

The VQ-VAE is the convolutional encoder of taming-transformers (Esser et al. 2021, arXiv 2012.09841) as diffusers keeps
it, and one linear layer whose largest output is the code: of a Euclidean codebook e that is argmax 2 e.h - |e|^2, of a
Gumbel one argmax of its projection. It is frozen, float32, and its weights travel in every checkpoint. `open_clip_mdc
vq` makes them. The embedding of codes, of [MASK] and of their places is what is learnt here.

With `quantise` false the latents themselves go through a linear map: the control for what discreteness does.

Dimensions: B images, P = h w places, K codes, C latent width, D width of the embedding.
"""
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from open_clip import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from torch import Tensor, nn

from .precision import without_autocast

PREFIX = "visual.vq."  # of the frozen weights in a checkpoint
SCORED = 16  # images at a time: the paper's batch of 128 would take 1.5 GB for [B, P, K]


@dataclass
class VQCfg:
    """A model config's `vq_cfg`. Each level but the last halves the image's side."""

    codes: int  # K
    channels: tuple[int, ...]  # of the convolutions, a level each
    layers: int  # residual blocks per level
    latent: int  # C
    attention_levels: tuple[int, ...] = ()  # with self-attention after each block
    quantise: bool = True


def convolutions(cfg: VQCfg) -> tuple[type[nn.Module], type[nn.Module], dict]:
    """Return diffusers' Encoder and Decoder, and the arguments of both. Raises ValueError without diffusers."""
    try:
        from diffusers.models.autoencoders.vae import Decoder, Encoder
    except ModuleNotFoundError as problem:
        raise ValueError("models with a VQ-VAE need diffusers: pip install 'open_clip_mdc[vq]'") from problem
    return Encoder, Decoder, dict(block_out_channels=tuple(cfg.channels), layers_per_block=cfg.layers,
                                  norm_num_groups=min(32, *cfg.channels))


def make_encoder(cfg: VQCfg) -> nn.Module:
    """Make taming-transformers' encoder: [B, 3, H, W] in [-1, 1] -> [B, C, h, w]."""
    encoder, _, sizes = convolutions(cfg)
    blocks = ["Attn" * (level in cfg.attention_levels) + "DownEncoderBlock2D" for level in range(len(cfg.channels))]
    return encoder(3, cfg.latent, tuple(blocks), double_z=False, **sizes)


def make_decoder(cfg: VQCfg) -> nn.Module:
    """Make its counterpart, which only fitting needs: [B, C, h, w] -> [B, 3, H, W]."""
    _, decoder, sizes = convolutions(cfg)
    blocks = ["Attn" * (level in cfg.attention_levels) + "UpDecoderBlock2D" for level in range(len(cfg.channels))]
    return decoder(cfg.latent, 3, tuple(blocks[::-1]), **sizes)


class VQ(nn.Module):
    """The encoder half of a VQ-VAE."""

    def __init__(self, cfg: VQCfg):
        super().__init__()
        self.encoder = make_encoder(cfg)
        self.quant_conv = nn.Conv2d(cfg.latent, cfg.latent, 1)
        self.score = nn.Linear(cfg.latent, cfg.codes)  # the name that checkpoints have; see `code_logits`
        self.register_buffer("vectors", torch.empty(cfg.codes, cfg.latent))  # what a decoder was given for a code
        self.set_codebook(torch.randn(cfg.codes, cfg.latent))

    @torch.no_grad()
    def set_codebook(self, vectors: Tensor) -> None:
        """Make the code of a latent that of the nearest of the vectors [K, C]."""
        self.vectors.copy_(vectors)
        self.score.weight.copy_(2 * vectors)
        self.score.bias.copy_(-vectors.square().sum(1))

    def latents(self, image: Tensor) -> Tensor:
        """[B, P, C], row by row, from images [B, 3, H, W] in [-1, 1]."""
        return self.quant_conv(self.encoder(image)).flatten(2).transpose(1, 2)

    def code_logits(self, latents: Tensor) -> Tensor:
        """[B, P, K] from [B, P, C]. The largest is the code."""
        return self.score(latents)

    def codes(self, latents: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # for any B
            return self.code_logits(latents).argmax(-1)
        return torch.cat([self.code_logits(some).argmax(-1) for some in latents.split(SCORED)])


class VQTower(nn.Module):
    """In the place of OpenCLIP's image towers: normalised tokens [B, P, D], one for each code."""

    def __init__(self, cfg: VQCfg, image_size: int | tuple[int, int], patch_size: int, width: int):
        """Args: `patch_size` is a code's pixels a side, `width` is D. Raises ValueError if the sizes do not fit."""
        super().__init__()
        self.image_size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
        self.image_mean, self.image_std = OPENAI_DATASET_MEAN, OPENAI_DATASET_STD  # until upstream says others
        if patch_size != 2 ** (len(cfg.channels) - 1) or any(side % patch_size for side in self.image_size):
            raise ValueError(f"vq_cfg.channels has {len(cfg.channels)} levels, and each but the last halves a side: "
                             f"that does not fit vision_cfg.patch_size {patch_size} and image_size {self.image_size}")
        self.cfg = cfg
        self.vq = VQ(cfg).requires_grad_(False)
        # Rows of an embedding, or of a map from the latent and a number that says whether it is masked.
        self.embedding = nn.Parameter(torch.empty((cfg.codes if cfg.quantise else cfg.latent) + 1, width))
        self.grid_size = tuple(side // patch_size for side in self.image_size)
        self.row_embedding = nn.Parameter(torch.empty(self.grid_size[0], width))
        self.column_embedding = nn.Parameter(torch.empty(self.grid_size[1], width))
        self.ln_post = nn.LayerNorm(width)
        for parameter in (self.embedding, self.row_embedding, self.column_embedding):
            nn.init.normal_(parameter, std=width ** -0.5)
        if not cfg.quantise:
            nn.init.normal_(self.embedding[:-1], std=(width * cfg.latent) ** -0.5)

    @torch.no_grad()
    def load_vq(self, state_dict: dict[str, Tensor]) -> None:
        """Load the frozen weights. The embedding begins with the codebook's vectors where they are as wide."""
        self.vq.load_state_dict(state_dict)
        if self.cfg.quantise and self.vq.vectors.shape[1] == self.embedding.shape[1]:
            self.embedding[:-1] = self.vq.vectors / self.vq.vectors.std() * self.embedding.shape[1] ** -0.5

    def pixels(self, image: Tensor) -> Tensor:
        """2 x - 1 of the x in [0, 1] that OpenCLIP has normalised, float32 [B, 3, H, W]."""
        # By numbers: a tensor of them would be copied to the device, for which the host would wait.
        channels = zip(image.float().unbind(1), self.image_mean, self.image_std, strict=True)
        return torch.stack([x * (2 * std) + (2 * mean - 1) for x, mean, std in channels], dim=1)

    @torch.no_grad()
    def latents(self, image: Tensor) -> Tensor:
        """Float32 [B, P, C] of OpenCLIP's images under any autocast. Raises ValueError for 16-bit weights."""
        if self.vq.score.weight.dtype != torch.float32:
            raise ValueError("a VQ-VAE in 16 bit gives other codes: use --precision fp32, amp or amp_bf16")
        with without_autocast(image.device.type):
            return self.vq.latents(self.pixels(image))

    @torch.no_grad()
    def codes(self, image: Tensor) -> Tensor:
        """Long [B, P] of images as OpenCLIP normalises them."""
        with without_autocast(image.device.type):
            return self.vq.codes(self.latents(image))

    def forward(self, image: Tensor, masked: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the mean of the tokens, [B, D], and the tokens, [B, P, D]. [MASK] stands for codes `masked` [B, P]."""
        if self.cfg.quantise:
            code = self.codes(image)
            tokens = F.embedding(code if masked is None else code.masked_fill(masked, self.cfg.codes), self.embedding)
        else:
            latents = self.latents(image) / self.vq.vectors.std()
            masked = torch.zeros_like(latents[..., 0]) if masked is None else masked.to(latents.dtype)
            latents = latents * (1 - masked)[..., None]
            tokens = torch.cat([latents, masked[..., None]], dim=-1) @ self.embedding
        places = self.row_embedding[:, None] + self.column_embedding
        tokens = self.ln_post(tokens + places.flatten(0, 1))
        return tokens.mean(dim=1), tokens

    def lock(self, unlocked_groups: int = 0, freeze_bn_stats: bool = False) -> None:
        """Freeze the embedding. With any unlocked group only the VQ-VAE, which always is."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad = unlocked_groups > 0 and not name.startswith("vq.")

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Nothing to do: no gradient passes the convolutions."""

    def no_weight_decay(self) -> set[str]:
        return {"row_embedding", "column_embedding"}
