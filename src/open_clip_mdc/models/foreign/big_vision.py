"""Names of big_vision's weights, the published layout of CapPa (Tschannen et al. 2023, arXiv 2306.07915) and SigLIP.

An .npz has each array under its path: params/encoder/Transformer/encoderblock_0/LayerNorm_0/scale. CapPa's image
encoder is in `encoder`, SigLIP's in `img`. A scanned network has one array for all blocks, with the block in front. To
add the layout of another project, write such a file: from its names to timm's, for models/tower_weights.py to call.

Dimensions: D width, H heads, N blocks, I and O inputs and outputs.
"""
from collections.abc import Mapping

from torch import Tensor

from .. import names

BLOCKS = "Transformer.encoderblock."  # of a scanned network
ATTENTION = ".MultiHeadDotProductAttention_0."
TABLE: names.Table = (
    ("embedding.", "patch_embed.proj."), ("pos_embedding", "pos_embed"),
    ("Transformer.encoderblock_", "blocks."), ("Transformer.encoder_norm.", "norm."), ("MAPHead_0.", "attn_pool."),
    (".LayerNorm_0.", ".norm1."), (".LayerNorm_1.", ".norm2."), (".MlpBlock_0.Dense_0.", ".mlp.fc1."),
    (".MlpBlock_0.Dense_1.", ".mlp.fc2."), (f"{ATTENTION}out.", ".attn.proj."), (f"{ATTENTION}query.", ".attn.q_proj."),
    (f"{ATTENTION}key.", ".attn.k_proj."), (f"{ATTENTION}value.", ".attn.v_proj."),
)
# What the arrays do not show, by the names of `tower_weights.traits`, and how its images are normalised.
TRAITS = {"activation": "gelu_pytorch_tanh", "eps of LayerNorm": 1e-6}
NORMALIZATION = {"mean": [0.5] * 3, "std": [0.5] * 3}


def is_encoder(weights: Mapping[str, object]) -> bool:
    """Return whether there are blocks of a ViT of big_vision among the names."""
    return any("Transformer/encoderblock" in name for name in weights)


def to_timm(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the image encoder's part of weights for which `is_encoder`, with timm's names and shapes."""
    prefix = next(name for name in weights if "Transformer/encoderblock" in name).partition("Transformer/")[0]
    found = {}
    for name, x in weights.items():
        if not name.startswith(prefix):
            continue
        name = name.removeprefix(prefix).replace("/", ".")
        if name.startswith(BLOCKS):
            rest = name.removeprefix(BLOCKS)
            found |= {f"{BLOCKS[:-1]}_{block}.{rest}": part for block, part in enumerate(x)}  # [N, ...] -> N x [...]
        else:
            found[name] = x
    renamed = {name.replace(".kernel", ".weight").replace(".scale", ".weight"): transposed(name, x)
               for name, x in found.items()}
    return names.joined(names.renamed(renamed, TABLE))


def transposed(name: str, x: Tensor) -> Tensor:
    """Return an array as PyTorch's layers have it: outputs first, heads joined."""
    if name.endswith((".query.bias", ".key.bias", ".value.bias")):
        return x.flatten()  # [H, D / H] -> [D]
    if not name.endswith("kernel"):
        return x
    if x.ndim == 4:
        return x.permute(3, 2, 0, 1)  # [height, width, I, O] -> [O, I, height, width]
    if x.ndim == 3:  # [H, D / H, O] of the output, [I, H, D / H] of queries, keys and values
        x = x.flatten(0, 1) if ".out." in name else x.flatten(1)
    return x.T
