"""Loads an image encoder's weights from another library into a tower. All must fit, or none are loaded.

Classification and projection heads are left out, as a captioner has none. In a CoCa tower the last norm is the one
before the attention pooling, as the patch tokens pass through that one. Position embeddings are resized with antialias,
as OpenCLIP and timm do. Only a DINOv2 without registers is resized without, as its authors do.
"""
import math
import re
import sys
from collections.abc import Mapping
from inspect import signature
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from open_clip.model import resize_pos_embed
from open_clip.timm_model import TimmModel
from open_clip.transformer import QuickGELU, VisionTransformer
from torch import Tensor, nn

from ..data.weights import Misfit, difference
from . import names
from .foreign import big_vision
from .towers import tower

# What a whole model puts before the names of its image tower.
PREFIXES = ("visual.", "tower.", "trunk.", "vision_model.", "dinov2.", "dinov2_with_registers.", "vit.")
HEADS = re.compile(r"(head|fc|fc_norm|classifier|last_linear|pre_logits|attn_pool\w*|attnpool|conv_head|norm_head)\.|"
                   r"proj$|head_\w+\.|mask_token$|pooler\.")
COUNTS = "num_batches_tracked"  # BatchNorm's counter, which is not used
ACTIVATIONS = {"gelu": F.gelu, "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu,
               "quick_gelu": QuickGELU(), "silu": F.silu}  # by transformers' names
# Pairs that other libraries treat as equal: OpenCLIP and timm when they convert SigLIP, transformers for ViTs.
ALIKE = ({"gelu", "gelu_pytorch_tanh"}, {1e-6, 1e-12})


def fill(visual: nn.Module, found: Mapping[str, Tensor]) -> None:
    """Load the weights that `converted` returns into `visual`."""
    tower(visual).network.load_state_dict(found, strict=False)  # only BatchNorm's counters may be missing


def converted(visual: nn.Module, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights with the names and sizes of a tower, which may be on the meta device. Raises Misfit."""
    if tower(visual).has_mask:
        raise Misfit("its image tower is a frozen VQ-VAE, which comes from open_clip_mdc vq: give it by --pretrained")
    network = tower(visual).network
    own = {name: x for name, x in network.state_dict().items() if not name.endswith(COUNTS)}
    weights = big_vision.to_timm(given) if big_vision.is_encoder(given) else names.to_timm(image_part(given))
    # CoCa's patch tokens go through the norm of its attention pooling.
    if "attn_pool.ln_k.weight" in weights and not any(name.startswith("attn_pool_contrastive.") for name in weights):
        weights |= {f"norm.{name}": weights[f"attn_pool.ln_k.{name}"] for name in ("weight", "bias")}
    elif "norm.weight" not in weights:
        weights = {name.replace("fc_norm.", "norm."): x for name, x in weights.items()}
    if isinstance(network, VisionTransformer):
        weights = _sized(network, names.to_native(weights))
    elif isinstance(tower(visual).core, TimmModel):
        weights = _adapted(network, own, weights)
    # All must fit: a tower that is half loaded trains without a warning.
    found = {name: x for name, x in weights.items()
             if name in own or not name.endswith(COUNTS) and not HEADS.match(name)}
    if said := difference(own, found):
        raise Misfit(said)
    return {name: weights[name] for name in network.state_dict() if name in weights}


def image_part(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the image tower's part of a model's weights, without prefixes such as "visual."."""
    for prefix in PREFIXES:
        part = {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}
        weights = part or weights
    return weights


def _sized(visual: VisionTransformer, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    position = weights.get("positional_embedding")
    weights.pop("mask_token", None)
    if position is None or math.isqrt(len(position) - 1) ** 2 != len(position) - 1:
        return weights
    state = {"visual.positional_embedding": position}
    # An OpenCLIP ViT with layer scale is a DINOv2.
    scaled = hasattr(visual.transformer.resblocks[0].ls_1, "gamma")
    resize_pos_embed(state, SimpleNamespace(visual=visual), antialias=not scaled)
    return weights | {"positional_embedding": state["visual.positional_embedding"]}


def _adapted(trunk: nn.Module, own: Mapping[str, Tensor], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights that timm's own filter has adapted: old names, sizes of position embeddings and windows."""
    adapt = getattr(sys.modules[type(trunk).__module__], "checkpoint_filter_fn", None)
    patches = "patch_embed.proj.weight"  # timm would resize it silently, so another size is left to fail
    if adapt is None or all(name in weights and weights[name].shape == x.shape for name, x in own.items()) or (
            patches in own and patches in weights and own[patches].shape != weights[patches].shape):
        return weights
    plain = ("dinov2" in trunk.pretrained_cfg.get("architecture", "") and trunk.num_prefix_tokens == 1
             and "antialias" in signature(adapt).parameters)
    try:
        return adapt(dict(weights), trunk, **({"antialias": False} if plain else {}))
    except Exception as problem:  # timm meets unexpected names with errors of any kind
        raise Misfit(f"timm cannot load it into its {type(trunk).__name__} "
                     f"({type(problem).__name__}: {str(problem)[:100]})") from problem


def traits(network: nn.Module) -> dict[str, object]:
    """Return settings of a ViT of OpenCLIP or timm that its weights do not show. {} for other networks."""
    if isinstance(network, VisionTransformer):
        block = network.transformer.resblocks[0]
        found = block.attn.num_heads, getattr(block.mlp, "gelu", None), network.ln_post.eps
    elif hasattr(network, "num_prefix_tokens") and hasattr(network, "blocks"):
        block = network.blocks[0]
        found = (getattr(getattr(block, "attn", None), "num_heads", None),
                 getattr(getattr(block, "mlp", None), "act", None), getattr(network.norm, "eps", None))
    else:
        return {}
    return {"heads": found[0], "activation": _activation(found[1]), "eps of LayerNorm": found[2]}


def _activation(act: nn.Module | None) -> str | None:
    # Told by its value at 1, as libraries have classes of their own for the same function.
    x = torch.ones(1, device="cpu")
    return next((name for name, f in ACTIVATIONS.items() if act is not None and torch.allclose(f(x), act(x), 0, 1e-6)),
                None)


def check_traits(visual: nn.Module, given: Mapping[str, object]) -> None:
    """Raise Misfit if `given`, the settings that are known of the weights' network, differ from the tower's."""
    for name, own in traits(tower(visual).network).items():
        other = given.get(name)
        if None not in (own, other) and own != other and not any({own, other} <= same for same in ALIKE):
            raise Misfit(f"its {name} is {other}, here {own}")
