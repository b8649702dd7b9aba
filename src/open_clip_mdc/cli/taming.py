"""Reads VQGANs of taming-transformers (Esser et al. 2021, arXiv 2012.09841), Euclidean and Gumbel, for `vq import`.

Names of weights change, 1 x 1 convolutions become linear layers, the quantiser becomes one linear layer (vq.py). Of a
Gumbel codebook the code is the most probable one, where taming-transformers draws one even outside training.

Dimensions: N codes of the checkpoint, K of them kept, C latent width.
"""
import re
from pathlib import Path

import torch
from torch import Tensor

from ..data import weights

# Ours (diffusers') and theirs, in this order.
NAMES = (
    ("mid_block.resnets.0", "mid.block_1"), ("mid_block.resnets.1", "mid.block_2"),
    ("mid_block.attentions.0", "mid.attn_1"), ("down_blocks", "down"), ("resnets", "block"), ("attentions", "attn"),
    ("downsamplers.0", "downsample"), ("conv_shortcut", "nin_shortcut"), ("conv_norm_out", "norm_out"),
    ("group_norm", "norm"), ("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "proj_out"),
)
CONVOLUTIONS = ("encoder.", "quant_conv.")
MAX_SHOWN = 4  # names of weights in a message


def their_name(name: str) -> str:
    for ours, theirs in NAMES:
        name = name.replace(ours, theirs)
    return name


def read_tensors(path: str) -> dict[str, Tensor]:
    """Read names and tensors of a checkpoint. A tensor alone has the name ""."""
    content = weights.read(Path(path))
    try:
        return weights.state_dict({"": content} if isinstance(content, Tensor) else content, Path(path))
    except weights.Misfit as problem:
        raise ValueError(f"{path} is no checkpoint: {problem}") from problem


def kept_codes(path: str, used: str | None, count: int, kept: int) -> Tensor:
    """Return which of `count` codes are kept, in which order: long [K]. `used` has their classes, 0 for no use."""
    classes = torch.arange(count) + 1 if used is None else read_tensors(used).get("", torch.empty(0))
    if classes.shape != (count,) or classes.is_floating_point():
        raise ValueError(f"--used {used} is no tensor of the classes of {count} codes")
    codes = classes.argsort(stable=True)[int((classes == 0).sum()):]
    if not torch.equal(classes[codes], torch.arange(kept) + 1):
        raise ValueError(f"{path}: {len(codes)} codes are in use, and the model has {kept}: give another --model, or "
                         f"--used to say which are")
    return codes


def quantizer(path: str, source: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the quantiser's part of a checkpoint by our names, for all N codes: [N, C], [N] and [N, C]."""
    if "quantize.embedding.weight" in source:
        vectors = source["quantize.embedding.weight"]
        return {"score.weight": 2 * vectors, "score.bias": -vectors.square().sum(1), "vectors": vectors}
    gumbel = {"score.weight": "quantize.proj.weight", "score.bias": "quantize.proj.bias",
              "vectors": "quantize.embed.weight"}
    if missing := [name for name in gumbel.values() if name not in source]:
        raise ValueError(f"{path} is no VQGAN of taming-transformers: it has neither quantize.embedding.weight nor "
                         f"{missing[0]}")
    return {ours: source[name].flatten(1) if source[name].ndim > 1 else source[name] for ours, name in gumbel.items()}


def convert(path: str, used: str | None, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's weights by our names, as `own` has them with tensors of the shapes that are needed."""
    source = read_tensors(path)
    quantised = quantizer(path, source)
    theirs = {name: their_name(name) for name in own if name.startswith(CONVOLUTIONS)}
    there = {name for name in source if name.startswith(CONVOLUTIONS)}
    for what, names in (("lacks", set(theirs.values()) - there), ("has too many", there - set(theirs.values()))):
        if names:
            raise ValueError(f"{path} is of another architecture than the model and {what} {len(names)} weights: "
                             f"{', '.join(sorted(names)[:MAX_SHOWN])}")
    keep = kept_codes(path, used, len(quantised["vectors"]), len(own["vectors"]))
    weights = {name: source[theirs[name]] for name in theirs}
    weights |= {name: weight[keep] for name, weight in quantised.items()}
    for name, weight in weights.items():
        if re.search(r"\.to_\w+(\.0)?\.weight$", name):
            weights[name] = weight.flatten(1)
        if weights[name].shape != own[name].shape:
            raise ValueError(f"{path} is of another architecture than the model: {theirs.get(name, name)} is "
                             f"{list(weight.shape)}, and the model's is {list(own[name].shape)}")
    return weights
