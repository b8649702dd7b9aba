"""Hooks for checkpoints: save whole files, resume from the highest epoch, load weights of any format."""
import os
from pathlib import Path

import torch

from ..data import weights
from ..data.files import new_file
from .openclip import hook, version
from .runs import latest_checkpoint


@hook
def load_state_dict(original, checkpoint_path, device="cpu", weights_only=True):
    """Replace `open_clip.factory.load_state_dict`: read any format, and check it (data/weights.py)."""
    return {name: x.to(device) for name, x in weights.tensors(Path(checkpoint_path)).items()}


@hook
def load_checkpoint(original, model, checkpoint_path, *args, **kwargs):
    """Wrap `open_clip.load_checkpoint`: check the file first. Raises Misfit for weights of another model."""
    path = Path(checkpoint_path)
    archive = weights.check(path) == "npz"
    if archive != (path.suffix in (".npz", ".npy")):  # `original` tells the format by the suffix
        raise ValueError(f"{path} is {'a' if archive else 'no'} NumPy archive: rename it to end in "
                         f"{'.npz' if archive else '.pt or .safetensors'}")
    if not hasattr(model, "logit_bias"):  # `original` reads it, and GenLIP has none
        model.logit_bias = None
    try:
        keys = original(model, path, *args, **kwargs)
    except weights.Misfit:
        raise
    except (RuntimeError, KeyError, AttributeError, TypeError, IndexError, AssertionError) as problem:
        raise (weights.Misfit("it is an .npz of big_vision, for a SigLIP model") if archive else
               weights.misfit(model.state_dict(), weights.tensors(path))) from problem
    if archive:
        weights.check_finite(model.state_dict(), path)
    return keys


@hook
def pt_load(original, file_path, map_location=None):
    """Wrap `open_clip_train.main.pt_load`: check the file, and name weights as in the model without DDP."""
    path = Path(file_path)
    content = weights.read(path) if path.exists() else weights.unpickled(
        lambda: original(file_path, map_location=map_location), file_path)
    weights.check_finite(content, path)
    bare = weights.state_dict(content, path)
    if isinstance(content.get("epoch"), int) and {"state_dict", "optimizer"} <= content.keys():
        if ("global_step" in content) != version.COUNTS_STEPS:  # the other version's optimizer has other groups
            raise ValueError(f"{file_path} was trained with OpenCLIP {version.OTHER}, this is {version.NAME}: resume "
                             "it there, or give its weights by --pretrained")
        return {**content, "state_dict": bare}
    if "epoch" in content or "state_dict" in content:
        raise ValueError(f"{file_path} holds weights, but no epoch and optimizer to resume from: give it by "
                         "--pretrained")
    return bare


@hook
def get_latest_checkpoint(original, path, remote):
    """Wrap `open_clip_train.main.get_latest_checkpoint`: take the highest epoch that a local folder stores."""
    if remote or not any(Path(path).glob("epoch_*.pt")):
        return original(path, remote)
    return str(latest_checkpoint(Path(path)))


@hook
def save(original, obj, f, *args, **kwargs):
    """Wrap `torch.save`: a file appears once it is complete. Raises OSError with the reason, unlike PyTorch."""
    if not isinstance(f, (str, os.PathLike)):
        return original(obj, f, *args, **kwargs)
    with new_file(f) as partial:
        try:
            with partial.open("wb") as file:
                original(obj, file, *args, **kwargs)
        except (RuntimeError, OSError) as problem:
            cause = problem if isinstance(problem, OSError) else problem.__context__
            if not isinstance(cause, OSError):
                raise
            raise OSError(cause.errno, cause.strerror, str(f)) from problem


save_whole = save(torch.save)
