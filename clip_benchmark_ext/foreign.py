"""Captioners of other projects: how --model names one, how its captions can be scored, and how it is loaded."""
import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

import open_clip
import torch
from PIL import Image
from torch import Tensor, nn

from open_clip_mdc.errors import need
from open_clip_mdc.integration.checkpoints import first_lines
from open_clip_mdc.models.captioner import Captioner
from open_clip_mdc.models.foreign.base import ForeignCaptioner

HF = "hf:"  # --model hf:FOLDER, or hf:NAME of the Hugging Face hub
TASKS = "captioning cloze image_caption_selection zeroshot_classification zeroshot_retrieval".split()
# The files and classes of models/foreign/ by the model's class.
ADAPTERS = {"CoCa": "coca.CoCaCaptioner", "NaFlexGenLip": "genlip.GenLIPCaptioner"}


def scorers(model: str) -> tuple[str, ...]:
    """Return what --scorer can be for --model, the default first. It is empty for a model that is no captioner."""
    config = {} if model.startswith(HF) else open_clip.get_model_config(model) or {}
    if config.get("text_cfg", {}).get("tokenizer_type") == "tiktoken" and find_spec("tiktoken") is None:
        raise ValueError(f"--model {model} needs tiktoken: pip install tiktoken")
    if model.startswith(HF) or "genlip_cfg" in config:
        return ("autoregressive",)
    return ("cosine", "autoregressive") if "multimodal_cfg" in config else ()


def check_task(model: str, task: str) -> None:
    """Raise ValueError for a task that needs features or embeddings of a captioner that is read for its captions."""
    if task not in TASKS and "cosine" not in (scorers(model) or ("cosine",)):
        raise ValueError(f"--task {task} is not for --model {model}: give one of {', '.join(TASKS)}")


def as_captioner(model: nn.Module, tokenizer: Any, name: str) -> tuple[Captioner | ForeignCaptioner, Any]:
    """Return a model as a captioner, with the tokenizer of its texts. Raises ValueError for a model that is none."""
    if isinstance(model, Captioner | ForeignCaptioner):
        return model, tokenizer
    if (kind := type(model).__name__) not in ADAPTERS:
        raise ValueError(f"--model {name} is no captioner, which this task needs: give a captioner or another --task")
    captioner = resolve_name(f"open_clip_mdc.models.foreign.{ADAPTERS[kind]}")(model)
    return captioner, captioner.tokens_by(tokenizer)


def pixels(processor: Callable, image: Image.Image) -> Tensor:
    """Return an image as a model of transformers takes it, [3, H, W]."""
    return processor(images=image, return_tensors="pt")["pixel_values"][0]


def load_hf(name: str, device: str) -> tuple[ForeignCaptioner, Callable[[Image.Image], Tensor], Any]:
    """Return the captioner of --model hf:FOLDER_OR_NAME in eval mode, its transform and its tokenizer.

    A folder is read without the network, and only weights in safetensors are. Raises ValueError for other models.
    """
    need("transformers", "export", f"--model {name}")
    from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    from open_clip_mdc.models.foreign.huggingface import KINDS, HFCaptioner
    source = name.removeprefix(HF)
    read = {"local_files_only": os.path.isdir(source), "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(source, **read)
        if config.model_type not in KINDS:
            raise ValueError(f"it is a {config.model_type}, and not a {', '.join(KINDS)}")
        model, found = AutoModelForImageTextToText.from_pretrained(
            source, config=config, use_safetensors=True, dtype=torch.float32, output_loading_info=True, **read)
        if lacking := found["missing_keys"] & dict(model.named_parameters()).keys():
            raise ValueError(f"its weights lack {min(lacking)}")
        captioner = HFCaptioner(model.to(device)).eval()
        transform = partial(pixels, AutoImageProcessor.from_pretrained(source, **read))
        return captioner, transform, captioner.tokens_by(AutoTokenizer.from_pretrained(source, **read))
    except (ValueError, OSError, RuntimeError, LookupError, AttributeError, TypeError) as problem:  # any config.json
        raise ValueError(f"--model {name} cannot be loaded: {first_lines(problem)}") from problem
