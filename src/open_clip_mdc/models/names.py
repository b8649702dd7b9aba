"""Translates names of image tower weights between timm, OpenCLIP and four model families of transformers.

timm's names are the common form. tower_weights.py reads weights by these tables, and cli/conversion.py writes by them,
in the opposite direction. A pattern that begins with a dot matches anywhere in a name, any other only at its beginning.
"""
from collections.abc import Mapping

import torch
from torch import Tensor

Table = tuple[tuple[str, str], ...]
NATIVE: Table = (  # OpenCLIP's VisionTransformer
    ("conv1.", "patch_embed.proj."), ("class_embedding", "cls_token"), ("positional_embedding", "pos_embed"),
    ("ln_pre.", "norm_pre."), ("ln_post.", "norm."), ("transformer.resblocks.", "blocks."), (".ln_1.", ".norm1."),
    (".ln_2.", ".norm2."), (".attn.in_proj_", ".attn.qkv."), (".attn.out_proj.", ".attn.proj."),
    (".mlp.c_fc.", ".mlp.fc1."), (".mlp.c_proj.", ".mlp.fc2."), (".ls_1.", ".ls1."), (".ls_2.", ".ls2."),
)
CLIP: Table = (  # transformers' CLIPVisionModel and SiglipVisionModel
    ("embeddings.patch_embedding.", "patch_embed.proj."), ("embeddings.class_embedding", "cls_token"),
    ("embeddings.position_embedding.weight", "pos_embed"), ("pre_layrnorm.", "norm_pre."), ("post_layernorm.", "norm."),
    ("encoder.layers.", "blocks."), (".layer_norm1.", ".norm1."), (".layer_norm2.", ".norm2."),
    (".self_attn.out_proj.", ".attn.proj."), (".self_attn.", ".attn."),
)
DINOV2: Table = (  # transformers' Dinov2Model, with or without registers. Names in files, and in modules since 5.0
    ("embeddings.patch_embeddings.projection.", "patch_embed.proj."), ("embeddings.position_embeddings", "pos_embed"),
    ("embeddings.", ""), ("encoder.layer.", "blocks."), ("layernorm.", "norm."),
    (".attention.attention.query.", ".attn.q_proj."), (".attention.attention.key.", ".attn.k_proj."),
    (".attention.attention.value.", ".attn.v_proj."), (".attention.output.dense.", ".attn.proj."),
    (".attention.o_proj.", ".attn.proj."), (".attention.", ".attn."), (".layer_scale1.lambda1", ".ls1.gamma"),
    (".layer_scale2.lambda1", ".ls2.gamma"), (".mlp.weights_in.", ".mlp.w12."), (".mlp.weights_out.", ".mlp.w3."),
)
VIT: Table = DINOV2 + (  # transformers' ViTModel, also for DINO and MAE. Only for reading
    (".layernorm_before.", ".norm1."), (".layernorm_after.", ".norm2."), (".intermediate.dense.", ".mlp.fc1."),
    (".output.dense.", ".mlp.fc2."), ("layers.", "blocks."),
)
FAMILIES = (("class_embedding", NATIVE), ("embeddings.patch_embedding.", CLIP),
            ("embeddings.patch_embeddings.", VIT))  # keyed by the beginning of a name that only this family has


def renamed(weights: Mapping[str, Tensor], table: Table, back: bool = False) -> dict[str, Tensor]:
    """Return weights under timm's names, or with `back` from timm's names to the table's."""
    result = {}
    for name, x in weights.items():
        for pair in table:
            old, new = reversed(pair) if back else pair
            if old.startswith("."):
                name = name.replace(old, new)
            elif name.startswith(old):
                name = new + name.removeprefix(old)
        result[name] = x
    return result


def joined(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights with the projections of queries, keys and values joined in one."""
    result = dict(weights)
    for name in weights:
        if ".attn.q_proj." in name:
            # timm keeps one matrix [3D, D] where transformers has three [D, D].
            parts = [name.replace(".q_proj.", f".{part}_proj.") for part in "qkv"]
            if all(part in result for part in parts):
                result[name.replace(".q_proj.", ".qkv.")] = torch.cat([result.pop(part) for part in parts])
    return result


def split(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights with separate projections of queries, keys and values."""
    result = {}
    for name, x in weights.items():
        if ".attn.qkv." in name:
            # [3D, D] -> three of [D, D], in this order.
            for part, rows in zip("qkv", x.chunk(3), strict=True):
                result[name.replace(".qkv.", f".{part}_proj.")] = rows
        else:
            result[name] = x
    return result


def to_timm(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return an image tower's weights with timm's names and shapes. Unknown names stay as they are."""
    for beginning, table in FAMILIES:
        if any(name.startswith(beginning) for name in weights):
            weights = joined(renamed(weights, table))
            break
    weights = {name: x for name, x in weights.items() if not name.endswith("position_ids")}
    for name in ("cls_token", "pos_embed"):
        if name in weights and weights[name].ndim < 3:
            weights[name] = weights[name].reshape(1, -1, weights[name].shape[-1])
    return weights


def to_native(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a ViT's weights for OpenCLIP's VisionTransformer, from timm's names.

    OpenCLIP's patch embedding has no bias. A bias is added to the position embeddings of the patches instead, which
    computes the same.
    """
    weights = dict(weights)
    bias = weights.pop("patch_embed.proj.bias", None)
    if bias is not None and "pos_embed" in weights:
        # The class token has no patch, so its position [:, 0] stays.
        moved = weights["pos_embed"].clone()
        moved[:, 1:] += bias
        weights["pos_embed"] = moved
    weights = renamed(weights, NATIVE, back=True)
    if "positional_embedding" in weights:
        weights["positional_embedding"] = weights["positional_embedding"].squeeze(0)
    if "class_embedding" in weights:
        weights["class_embedding"] = weights["class_embedding"].flatten()
    return weights
