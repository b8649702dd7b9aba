"""Models and data of the benchmark's tests: run folders of untrained models with opinions, tiny CLIPs, data sets."""
import io
import json
import tarfile
from pathlib import Path

import open_clip
import pytest
import torch
from open_clip.model import CLIP
from PIL import Image

import open_clip_mdc

CLIP_CONFIG = {"embed_dim": 16, "vision_cfg": {"image_size": 48, "layers": 1, "width": 32, "patch_size": 16,
                                               "head_width": 16},
               "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}}


def make_runs(folder: Path) -> Path:
    """Run folders `mdc`, `arc` and `mcd` as open_clip_train leaves them, of untrained models."""
    open_clip_mdc.register()
    for seed, name in enumerate(("MDC-ViT-Ti-8", "ARC-ViT-Ti-8", "MCD-ViT-Ti-8-mcs")):
        torch.manual_seed(seed)
        model = open_clip.create_model(name)
        torch.nn.init.normal_(model.text.output.weight, std=0.3)  # opinions
        if model.length_head is not None:
            torch.nn.init.normal_(model.length_head.weight.data[3:9], std=0.1)
        path = folder / name[:3].lower()
        (path / "checkpoints").mkdir(parents=True)
        (path / "params.txt").write_text(f"model: {name}\n")
        torch.save({"state_dict": model.state_dict()}, path / "checkpoints" / "epoch_1.pt")
    open_clip_mdc.unregister()
    return folder


def tiny_clip(**text_cfg) -> CLIP:
    torch.manual_seed(0)
    model = CLIP(**CLIP_CONFIG | {"text_cfg": CLIP_CONFIG["text_cfg"] | text_cfg})
    torch.nn.init.normal_(model.visual.proj)
    torch.nn.init.normal_(model.text_projection)
    return model.eval()


def save_clip(folder: Path, name: str = "tiny-clip-vit", **text_cfg) -> tuple[str, str]:
    """A CLIP model that OpenCLIP knows: what --model and --pretrained take."""
    config, weights = folder / f"{name}.json", folder / f"{name}.pt"
    config.write_text(json.dumps(CLIP_CONFIG | {"text_cfg": CLIP_CONFIG["text_cfg"] | text_cfg}))
    torch.save(tiny_clip(**text_cfg).state_dict(), weights)
    open_clip.add_model_config(config)
    return name, str(weights)


def make_image(i: int, size: int = 40) -> Image.Image:
    noise = torch.randint(0, 256, (size, size, 3), generator=torch.Generator().manual_seed(i), dtype=torch.uint8)
    return Image.fromarray(noise.numpy())


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def png(i: int) -> bytes:
    stream = io.BytesIO()
    make_image(i).save(stream, "PNG")
    return stream.getvalue()


def labelled_webdataset(root: Path, classes: list[str], templates: list[str], per_split: int = 24) -> Path:
    """clip_benchmark's layout; image i has class i modulo their number."""
    for split, first in (("train", 1000), ("test", 0)):
        (root / split).mkdir(parents=True)
        (root / split / "nshards.txt").write_text("1")
        with tarfile.open(root / split / "0.tar", "w") as tar:
            for i in range(per_split):
                add(tar, f"{i}.png", png(first + i))
                add(tar, f"{i}.cls", str(i % len(classes)).encode())
    (root / "classnames.txt").write_text("\n".join(classes))
    (root / "zeroshot_classification_templates.txt").write_text("\n".join(templates))
    return root


WORDS = ("red", "green", "blue", "yellow", "circle", "square", "star", "triangle")


def order_data(root: Path, images: int = 12) -> Path:
    """ARO's COCO order: a caption of four words an image, and its orders by frozen "perturbations"."""
    from clip_benchmark_ext.datasets import build_dataset
    (root / "val2014").mkdir(parents=True)
    rows = []
    for i in range(images):
        make_image(i).save(root / "val2014" / f"{i}.png")
        rows.append({"image": f"val2014/{i}.png", "caption": [
            f"a {WORDS[i % 4]} {WORDS[4 + i % 3]} {WORDS[7 - i % 2]}"]})
    (root / "coco_karpathy_test.json").write_text(json.dumps(rows))
    pytest.importorskip("nltk")
    build_dataset("aro/coco_order", root, tagger=lambda text: [
        (word, "JJ" if word in WORDS[:4] else "NN" if word in WORDS else "DT") for word in text.split()])
    return root
