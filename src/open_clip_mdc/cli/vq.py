"""Train or import the frozen VQ-VAE of a model that reads images as discrete codes (MC-Diffusion).

    open_clip_mdc vq fit --model MCD-VQ-ViT-Ti-8 --train-data 'scenes/train/{00000..00007}.tar' --out vq.pt
    open_clip_mdc vq import --model MCD-VQ-ViT-f8-mcs --from last.ckpt --used taming_vqvae_2887.pt --out vq.pt
    open_clip_train --model MCD-VQ-ViT-Ti-8 --pretrained vq.pt ...

Fitting follows van den Oord et al. 2017 (arXiv 1711.00937), with two changes. A fifth of the steps trains a plain
autoencoder, and K-means of its latents is the first codebook, because of a random one few codes would be used. Vectors
that no latent has chosen for 100 steps are moved to random latents. Latents are rounded to the nearest vector with a
straight-through gradient. The loss is the squared error of the image, plus that of the vectors to the latents, plus a
quarter of that of the latents to the vectors. The decoder is thrown away.

Dimensions: B images, P codes of each, K codes, C latent width.
"""
import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import open_clip
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.utils import save_image

from ..data.files import new_file
from ..data.images import Images
from ..data.outputs import BESIDE
from ..data.paths import for_shell
from ..data.shards import find_shards
from ..integration.checkpoints import default_device
from ..integration.patches import register
from ..integration.saving import save_whole
from ..models.vq import PREFIX, VQ, VQTower, make_decoder
from ..progress import progress_bar
from . import taming

SEED = 0
LR = 0.002  # peak
HELD_OUT = 256  # the first images, which are not trained on
MAX_SHOWN = 16
PLAIN = 0.2  # share of steps without a codebook
COMMITMENT = 0.25
RESTART = 100  # steps
LATENTS_PER_CODE = 64  # for k-means


def tower(name: str) -> tuple[VQTower, object, object]:
    register()
    if not (open_clip.get_model_config(name) or {}).get("vq_cfg"):
        raise ValueError(f"--model {name} is no known model with a VQ-VAE: give one such as MCD-VQ-ViT-Ti-8")
    model, train_transform, transform = open_clip.create_model_and_transforms(name)
    return model.visual, train_transform, transform


def read_images(
        shards: list[str], transform, args: argparse.Namespace, **options) -> Iterator[tuple[list[str], Tensor]]:
    """Yield names and images [B, 3, H, W] in batches. Raises ValueError for an image that cannot be read."""
    images = Images(list(map(Path, shards)), transform, args.batch_size, **options)
    for batch in images.loader(workers=1):
        if batch.problems:
            raise ValueError(batch.problems[0])
        yield batch.names, batch.image


def training_batches(shards: list[str], transform, args: argparse.Namespace, held_out: set[str]) -> Iterator[Tensor]:
    """Yield batches of images [B, 3, H, W] without end, with shards in random order and without `held_out`."""
    while True:
        count = 0
        seed = int(torch.randint(2 ** 31, ()))
        for names, image in read_images(random.sample(shards, len(shards)), transform, args, seed=seed):
            image = image[[name not in held_out for name in names]]
            if len(image):
                count += len(image)
                yield image
        if not count:
            raise ValueError(f"--train-data {args.train_data} has {len(held_out)} images, and the first {HELD_OUT} are "
                             f"held out: give more")


def k_means(latents: Tensor, codes: int) -> Tensor:
    """Return the k-means centres [codes, C] of latents [N, C]."""
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits
    # One thread, as several add up the members of a cluster in the order in which they finish.
    with threadpool_limits(1, user_api="openmp"):
        centres = KMeans(codes, n_init=1, max_iter=50, random_state=SEED).fit(latents.double().numpy()).cluster_centers_
    return torch.from_numpy(centres).float()


def restart(codebook: Tensor, unused: Tensor, latents: Tensor) -> None:
    """Move the unused vectors (bool [K], True if unused) of the codebook [K, C] to random latents of [N, C]."""
    chosen = torch.randint(len(latents), (int(unused.sum()),), device=latents.device)
    codebook[unused] = latents[chosen]


def fit(visual: VQTower, decoder: nn.Module, data: Iterator[Tensor], steps: int, lr: float) -> None:
    """Train `visual.vq` and the decoder on normalised images. The decoder takes latents [B, C, rows, columns]."""
    vq, device = visual.vq.requires_grad_(True).train(), visual.embedding.device
    plain, codes = int(PLAIN * steps), len(vq.vectors)
    codebook = nn.Parameter(vq.vectors.clone())
    optimizer = torch.optim.Adam(
        [*vq.encoder.parameters(), *vq.quant_conv.parameters(), *decoder.parameters(), codebook], lr=lr)
    rise = 0.1 if steps != 10 else 0.11  # OneCycleLR fails if the rise is exactly one step, 0.1 * 10
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=rise)
    uses = torch.zeros(codes, device=device)
    progress = progress_bar(range(steps), "vq", "step")
    for step in progress:
        if step == plain:
            start_codebook(visual, codebook, data)
        image = visual.pixels(next(data).to(device))
        latents = vq.latents(image)
        loss = 0.0
        if step >= plain:
            vq.set_codebook(codebook.detach())
            code = vq.codes(latents.detach())
            uses += code.flatten().bincount(minlength=codes)
            quantised = F.embedding(code, codebook)
            loss = F.mse_loss(quantised, latents.detach()) + COMMITMENT * F.mse_loss(latents, quantised.detach())
            latents = latents + (quantised - latents).detach()
        error = F.mse_loss(decode(decoder, latents, visual), image)
        optimizer.zero_grad()
        (error + loss).backward()
        optimizer.step()
        schedule.step()
        if step > plain and (step - plain) % RESTART == 0:
            restart(codebook.data, uses == 0, latents.detach().flatten(0, 1))
            uses.zero_()
        if step % 10 == 0:
            progress.set_postfix(psnr=f"{10 * (4 / error).log10().item():.1f} dB")
    vq.set_codebook(codebook.detach())
    vq.requires_grad_(False).eval()


@torch.no_grad()
def start_codebook(visual: VQTower, codebook: Tensor, data: Iterator[Tensor]) -> None:
    latents: list[Tensor] = []
    while sum(map(len, latents)) < LATENTS_PER_CODE * len(codebook):
        latents.append(visual.latents(next(data).to(codebook.device)).flatten(0, 1).cpu())
    codebook.copy_(k_means(torch.cat(latents), len(codebook)))


def decode(decoder: nn.Module, latents: Tensor, visual: VQTower) -> Tensor:
    """Return the images [B, 3, H, W], about in [-1, 1], of latents [B, P, C]."""
    return decoder(latents.transpose(1, 2).unflatten(2, visual.grid_size))


class Quality(NamedTuple):
    psnr: float  # mean over images, in dB
    used: int  # number of codes in use
    perplexity: float  # of the codes' frequencies


@torch.no_grad()
def evaluate_codes(visual: VQTower, decoder: nn.Module, images: Tensor, batch_size: int) -> tuple[Quality, Tensor]:
    """Return the quality of the codes of normalised images [N, 3, H, W], and the images decoded from them."""
    device, vq = visual.embedding.device, visual.vq
    shown, errors, uses = [], [], torch.zeros(len(vq.vectors), device=device)
    for image in images.to(device).split(batch_size):
        code = visual.codes(image)
        uses += code.flatten().bincount(minlength=len(uses))
        result = decode(decoder, F.embedding(code, vq.vectors), visual).clamp(-1, 1)
        errors.append((result - visual.pixels(image)).square().mean((1, 2, 3)) / 4)  # as if pixels were in [0, 1]
        shown.append(result)
    frequency = uses[uses > 0] / uses.sum()
    perplexity = (-(frequency * frequency.log()).sum()).exp()
    return Quality(-10 * torch.cat(errors).log10().mean().item(), len(frequency), perplexity.item()), torch.cat(shown)


def write_vq(vq: VQ, out: str) -> None:
    save_whole({"state_dict": {PREFIX + name: weight.cpu() for name, weight in vq.state_dict().items()}}, out)


def run_fit(args: argparse.Namespace) -> None:
    shards = find_shards(args.train_data)
    torch.manual_seed(SEED)
    random.seed(SEED)
    visual, train_transform, transform = tower(args.model)
    device = default_device()
    visual.to(device)
    decoder = make_decoder(visual.cfg).to(device)
    first = list(read_images(shards, transform, args, limit=HELD_OUT))
    if not first:
        raise ValueError(f"--train-data {args.train_data} has no images (KEY.jpg, png or webp)")
    images, held_out = torch.cat([image for _, image in first]), {name for names, _ in first for name in names}
    fit(visual, decoder, training_batches(shards, train_transform, args, held_out), args.steps, LR)
    quality, after = evaluate_codes(visual, decoder, images, args.batch_size)
    write_vq(visual.vq, args.out)  # before the sheet, which may find no room
    sheet = BESIDE["vq"](Path(args.out))
    rows = [x for i in range(0, MAX_SHOWN, 8) for x in (visual.pixels(images[i:i + 8]).cpu(), after[i:i + 8].cpu())]
    with new_file(sheet, like=Path(args.out)) as partial:
        save_image((torch.cat(rows) + 1) / 2, partial, format="png", nrow=8)
    codes = len(visual.vq.vectors)
    print(f"{len(images)} held-out images: PSNR {quality.psnr:.2f} dB, {quality.used} of {codes} codes in use "
          f"({quality.used / codes:.0%}), perplexity {quality.perplexity:.1f}")
    print(f"contact sheet, images above their reconstructions: {sheet}")


def run(args: argparse.Namespace) -> None:
    if args.action == "fit":
        run_fit(args)
    else:
        visual, _, _ = tower(args.model)
        visual.vq.load_state_dict(taming.convert(args.source, args.used, visual.vq.state_dict()))
        write_vq(visual.vq, args.out)
    print(f"To train with it: open_clip_train --model {args.model} --pretrained {for_shell(args.out)} ...")
