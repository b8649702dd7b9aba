"""Try what is known of a timm encoder in no other way: the grid of its tokens, and parameters that they do not need.

A ViT gives prefix tokens (class, registers) and then patch tokens. A convolutional network gives its last feature map,
one token per position. If a network does not end in a LayerNorm, its tokens are normalised without parameters.
"""
import math

import torch
from open_clip.timm_model import TimmModel
from torch import Tensor, nn

from .precision import in_eval_mode


def settle(visual: TimmModel, name: str) -> None:
    """Set timm's encoder to `visual.image_size`, store the grid of its tokens, and drop parameters without a gradient.

    DDP stops at the second step if a parameter gets no gradient. A pass on the meta device finds these parameters and
    the tokens' shape. Raises ValueError if the encoder does not take this size, or gives no tokens.
    """
    trunk = visual.trunk
    try:
        if hasattr(trunk, "set_input_size"):
            made_for = getattr(getattr(trunk, "patch_embed", None), "img_size", None)
            if visual.image_size != tuple(made_for or trunk.pretrained_cfg["input_size"][1:]):
                trunk.set_input_size(img_size=visual.image_size)
        tokens, unused = _trial(trunk, visual.image_size)
    except Exception as problem:  # networks raise anything
        height, width = visual.image_size
        raise ValueError(f"timm's {name} does not take images of {height} x {width} (image_size), or is no image "
                         f"encoder: {(str(problem).splitlines() or [type(problem).__name__])[0][:200]}") from problem
    # Class and register tokens come first. A feature map has none.
    visual.num_prefix = getattr(trunk, "num_prefix_tokens", 0) if tokens.ndim == 3 else 0
    visual.channels_first = tokens.ndim == 4 and getattr(trunk, "output_fmt", "NCHW") == "NCHW"
    if tokens.ndim == 4:
        visual.to(memory_format=torch.channels_last)  # a step on the CPU takes two thirds of the time
        visual.grid_size = tuple(tokens.shape[2:] if visual.channels_first else tokens.shape[1:3])
    else:
        visual.grid_size = _grid(trunk, tokens.shape[1] - visual.num_prefix)
    if visual.grid_size is None:
        raise ValueError(f"timm's {name} gives {tokens.shape[1]} tokens, which do not form a grid")
    is_vit = hasattr(trunk, "num_prefix_tokens")
    visual.has_last_norm = is_vit or isinstance(getattr(trunk, "norm", None), nn.LayerNorm)
    # Heads and norms behind the pooling.
    for parameter in unused:
        owner, _, own = parameter.rpartition(".")
        trunk.get_submodule(owner).register_parameter(own, None)


class _Features(nn.Module):
    def __init__(self, trunk: nn.Module):
        super().__init__()
        self.trunk = trunk

    def forward(self, image: Tensor) -> Tensor:
        return self.trunk.forward_features(image)


def _trial(trunk: nn.Module, size: tuple[int, int]) -> tuple[Tensor, list[str]]:
    """Return the tokens of an image on the meta device, and the names of parameters without a gradient."""
    features = _Features(trunk)
    # No memory and no arithmetic: shapes alone go through the network.
    state = {name: torch.empty_like(x, device="meta").requires_grad_(isinstance(x, nn.Parameter))
             for name, x in (*features.named_parameters(), *features.named_buffers())}
    # The model may be built inside a context without gradients, and this pass needs them.
    with torch.inference_mode(False), torch.enable_grad(), in_eval_mode(trunk):
        tokens = torch.func.functional_call(features, state, torch.empty(1, 3, *size, device="meta"))
        if not isinstance(tokens, Tensor) or tokens.ndim not in (3, 4):
            raise ValueError("it gives no tokens and no feature map")
        tokens.sum().backward()
    return tokens, [name.removeprefix("trunk.") for name, _ in features.named_parameters() if state[name].grad is None]


def _grid(trunk: nn.Module, count: int) -> tuple[int, int] | None:
    grid = tuple(getattr(getattr(trunk, "patch_embed", None), "grid_size", None) or ())
    if len(grid) == 2 and math.prod(grid) == count:
        return grid
    side = math.isqrt(count)
    return (side, side) if side * side == count else None
