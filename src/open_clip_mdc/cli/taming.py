"""Read VQGANs of taming-transformers (Esser et al. 2021, arXiv 2012.09841), Euclidean and Gumbel, for `vq import`.

Weights are renamed, 1 x 1 convolutions become linear layers, and the quantiser becomes one linear layer (vq.py). A
Gumbel codebook gives the most probable code, where taming-transformers draws one even outside training.

Dimensions: N codes of the checkpoint, K codes that are kept, C latent width.
"""
from pathlib import Path

import torch
from torch import Tensor

from ..data import weights

# Our names of weights (diffusers') and theirs, replaced in this order.
NAMES = (
    ("mid_block.resnets.0", "mid.block_1"), ("mid_block.resnets.1", "mid.block_2"),
    ("mid_block.attentions.0", "mid.attn_1"), ("down_blocks", "down"), ("resnets", "block"), ("attentions", "attn"),
    ("downsamplers.0", "downsample"), ("conv_shortcut", "nin_shortcut"), ("conv_norm_out", "norm_out"),
    ("group_norm", "norm"), ("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "proj_out"),
)
CONVOLUTIONS = ("encoder.", "quant_conv.")
LINEAR = (".q.weight", ".k.weight", ".v.weight", ".proj_out.weight")  # of these convolutions, in diffusers


def their_name(name: str) -> str:
    for ours, theirs in NAMES:
        name = name.replace(ours, theirs)
    return name


def read_tensors(path: str) -> dict[str, Tensor]:
    """Return {name: tensor} of a checkpoint. A lone tensor has the name ""."""
    content = weights.read(Path(path))
    try:
        return weights.state_dict({"": content} if isinstance(content, Tensor) else content, Path(path))
    except weights.Misfit as problem:
        raise ValueError(f"{path} is not a checkpoint: {problem}") from problem


def kept_codes(path: str, used: str | None, count: int, kept: int) -> Tensor:
    """Return the codes to keep out of `count`, in the model's order: long [K].

    `used` is a file of N numbers, from 1 in the model's order, and 0 for codes that are dropped. None keeps all.
    """
    classes = torch.arange(count) + 1 if used is None else read_tensors(used).get("", torch.empty(0))
    if classes.shape != (count,) or classes.is_floating_point():
        raise ValueError(f"--used {used} should be a tensor of whole numbers, one for each of {count} codes")
    codes = classes.argsort(stable=True)[int((classes == 0).sum()):]
    if not torch.equal(classes[codes], torch.arange(kept) + 1):
        raise ValueError(f"{path} uses {len(codes)} codes, but the model has {kept}: give another --model, or --used "
                         f"with the codes to keep")
    return codes


def quantizer(path: str, source: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the quantiser's weights by our names, for all N codes: [N, C], [N] and [N, C]."""
    if "quantize.embedding.weight" in source:
        vectors = source["quantize.embedding.weight"]
        return {"score.weight": 2 * vectors, "score.bias": -vectors.square().sum(1), "vectors": vectors}
    gumbel = {"score.weight": "quantize.proj.weight", "score.bias": "quantize.proj.bias",
              "vectors": "quantize.embed.weight"}
    if missing := [name for name in gumbel.values() if name not in source]:
        raise ValueError(f"{path} is not a VQGAN of taming-transformers: it has neither quantize.embedding.weight nor "
                         f"{missing[0]}")
    return {ours: source[name].flatten(1) if source[name].ndim > 1 else source[name] for ours, name in gumbel.items()}


def convert(path: str, used: str | None, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's weights by our names. `own` has the model's weights, whose names and shapes they get.

    Raises ValueError if it has another architecture, by the names that the checkpoint has.
    """
    source = read_tensors(path)
    quantised = quantizer(path, source)
    keep = kept_codes(path, used, len(quantised["vectors"]), len(own["vectors"]))
    given = {name: x.flatten(1) if name.endswith(LINEAR) else x for name, x in source.items()
             if name.startswith(CONVOLUTIONS)} | {name: x[keep] for name, x in quantised.items()}
    theirs = {name: their_name(name) for name in own}  # the quantiser's stay
    if problem := weights.difference({theirs[name]: x for name, x in own.items()}, given):
        raise ValueError(f"{path} has another architecture than the model: {problem}")
    return {name: given[their] for name, their in theirs.items()}
