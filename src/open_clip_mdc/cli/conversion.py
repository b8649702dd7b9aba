"""Converts the image tower to timm, transformers and torch.export.

Each gives the normalised patch tokens of `Captioner.encode_image_tokens`, whose mean is `encode_image` (Sec. 4.2). Of
OpenCLIP's ViT the other libraries have only the form that CLIP's weights use. Other forms raise ValueError.

Dimensions: B images, P patches, D width.
"""
from inspect import signature
from typing import TYPE_CHECKING

import torch
from open_clip.timm_model import TimmModel
from open_clip.transformer import QuickGELU, ResidualAttentionBlock, VisionTransformer
from torch import Tensor, nn

from ..models import names
from ..models.captioner import Captioner
from ..models.towers import patch_tokens, tower

if TYPE_CHECKING:
    from transformers import CLIPVisionModel

CLIP_IN_TIMM = "vit_base_patch32_clip_224"  # the architecture whose sizes are then overridden
ARCHITECTURE_KEYS = ("architecture", "input_size", "fixed_input_size", "num_classes", "first_conv", "classifier")
TIMM_ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu"}
TIMM_NORMS = {1e-5: {}, 1e-6: {"norm_layer": "layernorm"}}  # by eps: the architecture's own, timm's LayerNorm


def activation(visual: nn.Module) -> str:
    """Return the activation of an OpenCLIP ViT by transformers' name. Raises ValueError for special blocks."""
    if not isinstance(visual, VisionTransformer):
        raise ValueError(f"its image tower is a {type(visual).__name__}, which no other library has")
    block = visual.transformer.resblocks[0]
    if type(block) is not ResidualAttentionBlock or not isinstance(block.mlp.gelu, (nn.GELU, QuickGELU)):
        raise ValueError(f"its blocks are OpenCLIP's {type(block).__name__} with {type(block.mlp.gelu).__name__}, "
                         "which the other library does not have")
    if isinstance(block.mlp.gelu, QuickGELU):
        return "quick_gelu"
    return "gelu" if block.mlp.gelu.approximate == "none" else "gelu_pytorch_tanh"


def timm_model(visual: nn.Module) -> nn.Module:
    """Return a timm model in eval mode, whose `forward_features` gives what `timm_tokens` makes patch tokens of.

    `forward` gives their mean [B, D], but of feature maps what timm's own head makes, which was not trained.
    Raises ValueError if timm has no such network, or no ViT whose feature is the mean of the patch tokens.
    """
    import timm
    options = {"num_classes": 0, "global_pool": "avg"}
    if isinstance(visual, TimmModel):
        architecture = visual.trunk.pretrained_cfg["architecture"]
        known = signature(type(visual.trunk)).parameters
        # A norm behind the pooling was not trained, so there must be none.
        options |= {name: False for name in ("fc_norm", "use_fc_norm") if name in known}
        if "img_size" in known and tuple(visual.image_size) != tuple(visual.trunk.pretrained_cfg["input_size"][1:]):
            options["img_size"] = tuple(visual.image_size)
        weights = visual.trunk.state_dict()
    else:
        act_layer, width = TIMM_ACTIVATIONS[activation(visual)], tower(visual).width
        block = visual.transformer.resblocks[0]
        if visual.ln_post.eps not in TIMM_NORMS:
            raise ValueError(f"its LayerNorms have eps {visual.ln_post.eps}, timm's 1e-5 or 1e-6")
        pre_norm = isinstance(visual.ln_pre, nn.LayerNorm)
        architecture = CLIP_IN_TIMM
        options |= {
            "fc_norm": False, "img_size": tuple(visual.image_size), "patch_size": visual.patch_size[0],
            "embed_dim": width, "depth": len(visual.transformer.resblocks), "num_heads": block.attn.num_heads,
            "mlp_ratio": block.mlp.c_fc.out_features / width, "pre_norm": pre_norm, "act_layer": act_layer,
            "init_values": 1.0 if hasattr(block.ls_1, "gamma") else None, **TIMM_NORMS[visual.ln_post.eps],
        }
        weights = names.to_timm(visual.state_dict())
        if not pre_norm:  # then timm's patch embedding has a bias
            weights["patch_embed.proj.bias"] = torch.zeros(width)
    try:
        model = timm.create_model(architecture, **options)
        model.load_state_dict(weights, strict=getattr(visual, "has_last_norm", True))  # the head of a map is untrained
    except (RuntimeError, TypeError) as problem:
        raise ValueError(f"timm's {architecture} that averages its patch tokens is another network: "
                         f"{str(problem).splitlines()[0]}") from problem
    # Without this, timm would give these weights the tag, licence and source of its own.
    model.pretrained_cfg = {name: x for name, x in model.pretrained_cfg.items() if name in ARCHITECTURE_KEYS}
    return model.eval()


def timm_tokens(visual: nn.Module, model: nn.Module, image: Tensor) -> Tensor:
    """Return patch tokens [B, P, D] of the network that `timm_model` made of `visual`."""
    x = model.forward_features(image)
    return tower(visual).of_last(x) if isinstance(visual, TimmModel) else x[:, model.num_prefix_tokens:]


def clip_vision_model(visual: nn.Module) -> "CLIPVisionModel":
    """Return transformers' `CLIPVisionModel` in eval mode.

    Its patch tokens are `post_layernorm(last_hidden_state[:, 1:])`. Raises ValueError if the tower is no ViT of CLIP.
    """
    from transformers import CLIPVisionConfig, CLIPVisionModel
    if isinstance(visual, TimmModel):
        raise ValueError("its image tower is a timm model, and CLIPVisionModel holds only CLIP's ViT")
    act, block = activation(visual), visual.transformer.resblocks[0]
    height, width = visual.image_size
    if height != width or isinstance(visual.ln_pre, nn.Identity) or hasattr(block.ls_1, "gamma"):
        raise ValueError("CLIPVisionModel needs square images, a LayerNorm before the blocks and no layer scale")
    model = CLIPVisionModel(CLIPVisionConfig(
        hidden_size=tower(visual).width, intermediate_size=block.mlp.c_fc.out_features,
        num_hidden_layers=len(visual.transformer.resblocks), num_attention_heads=block.attn.num_heads,
        image_size=height, patch_size=visual.patch_size[0], hidden_act=act, layer_norm_eps=visual.ln_post.eps))
    # By timm's names, which every table here leads to and from.
    weights = names.renamed(names.split(names.to_timm(visual.state_dict())), names.CLIP, back=True)
    weights["embeddings.class_embedding"] = weights["embeddings.class_embedding"].flatten()
    weights["embeddings.position_embedding.weight"] = weights["embeddings.position_embedding.weight"].squeeze(0)
    model = model.eval()
    missing, unexpected = getattr(model, "vision_model", model).load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"embeddings.position_ids"}:
        raise ValueError(f"CLIPVisionModel has no {unexpected} and needs {missing}")
    return model


class ImageEncoder(nn.Module):
    """Images [B, 3, height, width] -> the mean of the patch tokens [B, D], and the patch tokens [B, P, D]."""

    def __init__(self, model: Captioner):
        super().__init__()
        self.visual = model.visual

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        tokens = patch_tokens(self.visual, image)
        return tokens.mean(dim=1), tokens


def exported_program(model: Captioner) -> torch.export.ExportedProgram:
    """Return `ImageEncoder` as a graph for any batch size. Only torch is needed to run it."""
    image = torch.zeros(2, 3, *model.visual.image_size, device=next(model.parameters()).device)
    whole = ImageEncoder(model).eval().to(memory_format=torch.contiguous_format)  # or torch.export warns of each weight
    # The graph holds for any number of images.
    return torch.export.export(whole, (image,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
