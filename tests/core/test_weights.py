"""Claims about files of weights: good ones load as a whole, others are refused with a clear line."""
import gzip
import os
from functools import partial
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from conftest import refused
from safetensors.torch import save_file
from training import equal, tower

import open_clip_mdc
from clip_benchmark_ext.tasks.zeroshot import read_classifier
from open_clip_mdc import train
from open_clip_mdc.cli import taming
from open_clip_mdc.integration import check_flags, checkpoints, image_source, saving
from open_clip_mdc.integration import clip as clip_models

MODEL = "MDC-ViT-Ti-8"
pytestmark = pytest.mark.usefixtures("registered_for_training")


class Callback:
    """A class that Lightning's checkpoints hold. Its pickle would run code of this file."""


class Payload:
    def __reduce__(self):
        return os.mkdir, ("PWNED",)


def say(path: Path, call) -> str:
    """The one line that a call raises, which names the file and no way to run what is in it."""
    said = refused((ValueError, OSError), call, path)
    assert path.name in said and len(said) < 500, said
    assert "weights_only" not in said and "trust" not in said, said
    return said


READERS = {  # every way in
    "load": lambda path: open_clip_mdc.load(path, MODEL, "cpu"),
    "--pretrained": lambda path: open_clip.create_model(MODEL, str(path)),
    "--resume": lambda path: saving.pt_load(None)(str(path), "cpu"),
    "--clip": lambda path: clip_models.load("ViT-Ti-8", str(path)),
    "--load_clfs": lambda path: read_classifier(str(path), 4),
    "vq import": lambda path: taming.read_tensors(str(path)),
}


def with_object(content: object, **options) -> partial:
    return partial(torch.save, {"state_dict": {"text.a": torch.ones(64, 64)}, "x": content}, **options)


SEEN_FIRST = {  # words of the message, which training says before it reads data and makes a model: the file
    "a TorchScript program": partial(torch.jit.save, torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2))),
    "it is empty": b"", "git-lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n",
    "DOCTYPE html": b"\n<!DOCTYPE html><html>404", "it begins with": gzip.compress(b"x" * 99),
    "has written: it begins with": bytes(5000)}
ROTTEN = SEEN_FIRST | {
    "holds other Python objects than tensors (posix.mkdir)": with_object(Payload()),
    "than tensors (posix.mkdir)": with_object(Payload(), _use_new_zipfile_serialization=False),
    "(test_weights.Callback)": with_object(Callback()), "NumPy archive": partial(np.savez, a=np.ones(3)),
    "is damaged or was cut off": b"\x80" + bytes(range(256)) * 4}


@pytest.mark.parametrize("words", ROTTEN)
def test_a_file_that_is_no_whole_checkpoint_is_one_line_by_every_way_in(words, here):
    path, content = here / "w.pt", ROTTEN[words]
    with path.open("wb") as file:
        file.write(content) if isinstance(content, bytes) else content(file)
    for way, read in READERS.items():
        said = say(path, read)
        assert words in said, (way, said)
    assert not Path("PWNED").exists()
    args = train.parse(f"--model {MODEL} --pretrained w.pt --dataset-type synthetic --train-num-samples 8 --precision "
                       "fp32".split())
    assert words not in SEEN_FIRST or words in check_flags.find_problem(args)


@pytest.mark.parametrize("dtype", ["int8", "int64", "bool", "float8_e4m3fn", "complex64", "sparse_coo"])
def test_weights_of_a_type_that_cannot_hold_them_are_refused_by_every_way_in(dtype, state, tmp_path):
    """One matrix is enough, of torch.save or safetensors."""
    def change(x):
        return x.to_sparse() if dtype == "sparse_coo" else x.to(getattr(torch, dtype))
    name, path = "visual.transformer.resblocks.0.mlp.c_fc.weight", tmp_path / "w.pt"
    given = {**state, name: change(127 * state[name])}
    ways = dict(READERS, tower=lambda path: image_source.load(open_clip.create_model(MODEL).visual, str(path), MODEL))
    for way, read in ways.items():
        torch.save(change(torch.ones(8, 4)) if way == "--load_clfs" else {"epoch": 2, "state_dict": given}, path)
        for saved_again in (False, way != "--load_clfs" and dtype != "sparse_coo"):
            if saved_again:
                save_file(given, path)
            said = say(path, read)
            assert f" as {dtype}, from which the weight cannot be told: give weights in float16" in said, (way, said)
            assert way == "--load_clfs" or name in said or name.removeprefix("visual.") in said


def prefixed(prefix: str, state: dict) -> dict:
    return {prefix + name: x for name, x in state.items()}


WRAPPED = {  # as others save the same weights
    "bare": lambda s: s, "state_dict": lambda s: {"state_dict": s, "epoch": 3}, "model": lambda s: {"model": s},
    "DDP": partial(prefixed, "module."), "compiled": partial(prefixed, "_orig_mod."),
    "compiled DDP": lambda s: {"model": prefixed("_orig_mod.module.", s)},
    "DDP compiled": partial(prefixed, "module._orig_mod."),
    "part compiled": lambda s: {k.replace("visual.", "visual._orig_mod."): v for k, v in s.items()},
    "Lightning": lambda s: {"epoch": 3, "global_step": 5, "state_dict": prefixed("model.", s)}}



def test_the_usual_wrappings_load_as_the_same_model_in_every_format(state, tmp_path):
    """By content, not by name."""
    given = [(wrap(state), "w.pt", torch.save) for wrap in WRAPPED.values()]
    given += [(prefixed("module.", state), f"w.{suffix}", save_file) for suffix in ("safetensors", "pt", "bin")]
    for content, name, save in (*given, (state, "w.safetensors", partial(
            torch.save, _use_new_zipfile_serialization=False))):
        save(content, tmp_path / name)
        assert equal(checkpoints.load(str(tmp_path / name), MODEL)[0].state_dict(), state)


def test_what_does_not_fit_is_said(state, tmp_path):
    timm_names = {name.removeprefix("visual."): x for name, x in tower(state).items()}
    given = {
        "image tower alone by open_clip_train --pretrained-image": (MODEL, timm_names),
        "it lacks text.blocks": (MODEL, {k: v for k, v in state.items() if not k.startswith("text.blocks")}),
        "its visual.": ("MDC-ViT-Ti-16", state),
        "it holds no tensor": (MODEL, {"state_dict": {}}), "it holds a list": (MODEL, [1, 2]),
        "only the state of an optimizer": (MODEL, {"state": {}, "param_groups": []}),
        "it holds only the state of an optimizer": (MODEL, {"epoch": 3, "optimizer": {"state": {}}}),
        "it has other names, such as wrong.name. ": (MODEL, {"wrong.name": torch.ones(2)}),
        "it lacks text.output.weight. ": (MODEL, {k: v for k, v in state.items() if k != "text.output.weight"}),
        "it has too much text.other. ": (MODEL, {**state, "text.other": torch.ones(1)}),
    }
    for words, (name, content) in given.items():
        torch.save(content, tmp_path / "w.pt")
        said = say(tmp_path / "w.pt", lambda path, name=name: checkpoints.load(str(path), name))
        assert f"holds no weights of {name}: it" in said and words in said, said


def test_a_vq_vae_alone_is_no_captioner(tmp_path):
    """Training may start from it. A tool would run a decoder with random weights."""
    pytest.importorskip("diffusers")
    vq = open_clip.create_model("MCD-VQ-ViT-Ti-8").visual.vq.state_dict()
    torch.save({"state_dict": prefixed("visual.vq.", vq)}, tmp_path / "vq.pt")
    for name, words in (("MCD-VQ-ViT-Ti-8", "vq.pt is a frozen VQ-VAE alone: train a captioner with --pretrained"),
                        (MODEL, "it has other names, such as visual.vq")):
        assert words in refused(ValueError, open_clip_mdc.load, tmp_path / "vq.pt", name, "cpu")


def test_a_classifier_of_other_classes_is_refused(tmp_path):
    torch.save(torch.ones(8, 4), tmp_path / "c.pt")
    assert read_classifier(str(tmp_path / "c.pt"), 4).shape == (8, 4)
    said = refused(ValueError, read_classifier, str(tmp_path / "c.pt"), 5)
    assert said.startswith("--load_clfs ") and "c.pt is not a classifier of 5 classes" in said
