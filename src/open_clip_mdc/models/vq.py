"""MC-Diffusion's discrete image encoder: a frozen VQ-VAE turns an image into a grid of codes, which are embedded.

The VQ-VAE has taming-transformers' convolutional encoder (Esser et al. 2021, arXiv 2012.09841), from diffusers, and one
linear layer whose largest output is the code. For a Euclidean codebook e that is argmax 2 e.h - |e|^2, for a Gumbel
codebook the argmax of its projection. It is frozen and float32, every checkpoint holds its weights, and
`open_clip_mdc vq` makes them. The embeddings of codes, of [MASK] and of positions are trained.

With `quantise` false, latents are mapped linearly instead of coded. This control shows what quantising does.

Dimensions: B images, P = h w places, K codes, C latent width, D width of the embedding.
"""
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from open_clip import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from timm.layers import to_2tuple
from torch import Tensor, nn

from ..errors import need
from .precision import without_autocast
from .towers import TOWERS, Tower

PREFIX = "visual.vq."  # names of the frozen weights in a checkpoint begin so
IMAGES_PER_CHUNK = 16  # for [B, P, K], which would take 1.5 GB at the paper's batch of 128


@dataclass
class VQCfg:
    """A model config's `vq_cfg`. Each level but the last halves the side of the image."""

    codes: int  # K
    channels: tuple[int, ...]  # of each level's convolutions
    layers: int  # residual blocks per level
    latent: int  # C
    attention_levels: tuple[int, ...] = ()  # levels with self-attention after each block
    quantise: bool = True


def convolutions(cfg: VQCfg, block: str = "") -> tuple[ModuleType, tuple[str, ...], dict]:
    """Return diffusers' module of encoder and decoder, their block of each level, and their other common arguments.

    Raises ValueError without diffusers.
    """
    need("diffusers", "vq", "a model with a VQ-VAE")
    from diffusers.models.autoencoders import vae
    blocks = tuple("Attn" * (level in cfg.attention_levels) + block for level in range(len(cfg.channels)))
    return vae, blocks, dict(block_out_channels=tuple(cfg.channels), layers_per_block=cfg.layers,
                             norm_num_groups=min(32, *cfg.channels))


def make_decoder(cfg: VQCfg) -> nn.Module:
    """Build the decoder, which only fitting needs: [B, C, h, w] -> [B, 3, H, W]."""
    vae, blocks, sizes = convolutions(cfg, "UpDecoderBlock2D")
    return vae.Decoder(cfg.latent, 3, blocks[::-1], **sizes)


class VQ(nn.Module):
    """The encoder half of a VQ-VAE."""

    def __init__(self, cfg: VQCfg):
        super().__init__()
        vae, blocks, sizes = convolutions(cfg, "DownEncoderBlock2D")
        # taming-transformers' encoder: [B, 3, H, W] in [-1, 1] -> [B, C, h, w].
        self.encoder = vae.Encoder(3, cfg.latent, blocks, double_z=False, **sizes)
        self.quant_conv = nn.Conv2d(cfg.latent, cfg.latent, 1)
        self.score = nn.Linear(cfg.latent, cfg.codes)  # logits of codes, [B, P, K] from [B, P, C]
        self.register_buffer("vectors", torch.empty(cfg.codes, cfg.latent))  # the decoder's input for each code
        self.set_codebook(torch.randn(cfg.codes, cfg.latent))

    @torch.no_grad()
    def set_codebook(self, vectors: Tensor) -> None:
        """Set the codebook, [K, C]. The code of a latent is then its nearest vector."""
        self.vectors.copy_(vectors)
        # -|h - e|^2 = 2 e.h - |e|^2 - |h|^2, and the last term is the same for all codes.
        self.score.weight.copy_(2 * vectors)
        self.score.bias.copy_(-vectors.square().sum(1))

    def latents(self, image: Tensor) -> Tensor:
        """Return latents [B, P, C], row by row, of images [B, 3, H, W] in [-1, 1]."""
        # [B, C, h, w] -> [B, P, C], row by row.
        return self.quant_conv(self.encoder(image)).flatten(2).transpose(1, 2)

    def codes(self, latents: Tensor) -> Tensor:
        """Return the codes with the largest logits, long [B, P], of latents [B, P, C]."""
        if torch.compiler.is_compiling():  # a loop would fix B
            return self.score(latents).argmax(-1)
        return torch.cat([self.score(some).argmax(-1) for some in latents.split(IMAGES_PER_CHUNK)])


class VQTower(nn.Module):
    """An image tower in OpenCLIP's form that returns normalised tokens [B, P, D], one for each code."""

    def __init__(self, cfg: VQCfg, image_size: int | tuple[int, int], patch_size: int, width: int):
        """Build the tower. A code covers `patch_size` pixels a side, `width` is D. Raises ValueError for bad sizes."""
        super().__init__()
        self.image_size = to_2tuple(image_size)
        self.image_mean, self.image_std = OPENAI_DATASET_MEAN, OPENAI_DATASET_STD  # until OpenCLIP sets others
        if patch_size != 2 ** (len(cfg.channels) - 1) or any(side % patch_size for side in self.image_size):
            raise ValueError(f"vq_cfg.channels has {len(cfg.channels)} levels, and each but the last halves a side: "
                             f"that does not fit vision_cfg.patch_size {patch_size} and image_size {self.image_size}")
        self.cfg = cfg
        # Frozen from the start: a locked tower and a free one have the same codes.
        self.vq = VQ(cfg).requires_grad_(False)
        # K codes and [MASK]. Without codes it is a linear map of C latents and one input that is 1 where masked.
        self.embedding = nn.Parameter(torch.empty((cfg.codes if cfg.quantise else cfg.latent) + 1, width))
        self.grid_size = tuple(side // patch_size for side in self.image_size)
        self.row_embedding = nn.Parameter(torch.empty(self.grid_size[0], width))
        self.column_embedding = nn.Parameter(torch.empty(self.grid_size[1], width))
        self.ln_post = nn.LayerNorm(width)
        for parameter in (self.embedding, self.row_embedding, self.column_embedding):
            nn.init.normal_(parameter, std=width ** -0.5)
        if not cfg.quantise:
            nn.init.normal_(self.embedding[:-1], std=(width * cfg.latent) ** -0.5)

    def pixels(self, image: Tensor) -> Tensor:
        """Return pixels in [-1, 1], float32 [B, 3, H, W], of images as OpenCLIP normalises them."""
        # Plain numbers: the host would wait for a tensor of them to be copied to the device.
        channels = zip(image.float().unbind(1), self.image_mean, self.image_std, strict=True)
        return torch.stack([x * (2 * std) + (2 * mean - 1) for x, mean, std in channels], dim=1)

    @torch.no_grad()
    def latents(self, image: Tensor) -> Tensor:
        """Return float32 latents [B, P, C], also under autocast. Raises ValueError for 16-bit weights."""
        if self.vq.score.weight.dtype != torch.float32:
            raise ValueError("a VQ-VAE in 16 bit gives other codes: use --precision fp32, amp or amp_bf16")
        with without_autocast(image.device.type):
            return self.vq.latents(self.pixels(image))

    @torch.no_grad()
    def codes(self, image: Tensor) -> Tensor:
        """Return codes, long [B, P], of images as OpenCLIP normalises them."""
        with without_autocast(image.device.type):
            return self.vq.codes(self.latents(image))

    def forward(self, image: Tensor, masked: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the mean of the tokens, [B, D], and the tokens, [B, P, D]. [MASK] replaces those `masked` [B, P]."""
        if self.cfg.quantise:
            # [B, P]. [MASK] is the row after the K codes.
            code = self.codes(image)
            tokens = F.embedding(code if masked is None else code.masked_fill(masked, self.cfg.codes), self.embedding)
        else:
            latents = self.latents(image) / self.vq.vectors.std()
            masked = torch.zeros_like(latents[..., 0]) if masked is None else masked.to(latents.dtype)
            # A masked latent is 0, and the last input says that it is masked.
            latents = latents * (1 - masked)[..., None]
            tokens = torch.cat([latents, masked[..., None]], dim=-1) @ self.embedding
        places = self.row_embedding[:, None] + self.column_embedding
        # The last norm is the tower's own, as a ViT's: the decoder reads normalised tokens.
        tokens = self.ln_post(tokens + places.flatten(0, 1))
        return tokens.mean(dim=1), tokens

    def lock(self, unlocked_groups: int = 0) -> None:
        """Freeze the whole tower, or with any unlocked group only the VQ-VAE, which is always frozen."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad = unlocked_groups > 0 and not name.startswith("vq.")

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Do nothing, as no gradient passes the convolutions."""

    def no_weight_decay(self) -> set[str]:
        return {"row_embedding", "column_embedding"}


class Codes(Tower):
    """The tokens of a `VQTower`."""

    matches = VQTower
    has_mask = True

    def __init__(self, module: VQTower):
        super().__init__(module)
        self.width = module.embedding.shape[1]

    def tokens(self, image: Tensor, masked: Tensor | None = None) -> Tensor:
        return self.module(image, masked)[1]

    @torch.no_grad()
    def load(self, state_dict: Mapping[str, Tensor]) -> bool:
        """Load a file with only the VQ-VAE (`open_clip_mdc vq`).

        The embedding starts from the codebook's vectors if they have the same width.
        """
        if not all(name.startswith(PREFIX) for name in state_dict):
            return False
        vq, embedding = self.module.vq, self.module.embedding
        vq.load_state_dict({name.removeprefix(PREFIX): weight for name, weight in state_dict.items()})
        if self.module.cfg.quantise and vq.vectors.shape[1] == self.width:
            embedding[:-1] = vq.vectors / vq.vectors.std() * self.width ** -0.5
        return True


TOWERS.append(Codes)
