"""Claims about files of weights: which load, whole, and what is said of the others.

    pytest tests/core/test_weights.py
"""
import gzip
import json
import os
import re
from argparse import Namespace
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from conftest import complaint_of, make_image, run_folder
from safetensors.torch import load_file, save_file
from training import equal

import open_clip_mdc
from clip_benchmark_ext import run as benchmark
from clip_benchmark_ext.tasks.zeroshot import read_classifier
from open_clip_mdc import train
from open_clip_mdc.cli import taming
from open_clip_mdc.data import weights
from open_clip_mdc.integration import checkpoints, runs, saving
from open_clip_mdc.integration import clip as clip_models

MODEL = "MDC-ViT-Ti-8"


@pytest.fixture(scope="module", autouse=True)
def registered():
    open_clip_mdc.register()
    yield
    open_clip_mdc.unregister()


@pytest.fixture(scope="module")
def state():
    torch.manual_seed(0)
    return open_clip.create_model(MODEL).state_dict()


@pytest.fixture(scope="module")
def clip_state():
    return open_clip.create_model("ViT-Ti-8").state_dict()


class Callback:
    """Lightning's checkpoints hold such; a pickle of it runs code of this file."""


class Payload:
    def __reduce__(self):
        return os.mkdir, ("PWNED",)


def say(path: Path, call) -> str:
    """The one line that a call raises, which names the file and no way to run what is in it."""
    with pytest.raises((ValueError, OSError)) as error:
        call(path)
    said = str(error.value)
    assert "\n" not in said and path.name in said and len(said) < 500, said
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


def write_rotten(name: str, path: Path, state: dict) -> None:
    """A file that is no whole checkpoint, of one kind."""
    small = {"text.a": torch.ones(64, 64), "text.b": torch.zeros(4)}
    if name.startswith("safetensors"):
        weights.save(small, path)
        whole = path.read_bytes()
        path.write_bytes({"bit": whole[:-900] + b"\x01" + whole[-899:], "cut": whole[:-900], "header": whole[:40],
                          "longer": whole + b"0", "size": b"\xff" * 7 + whole[7:]}[name.partition(" ")[2]])
    elif name == "not finite":
        save_file(small | {"text.b": torch.tensor([0.0, float("nan")])}, path)
    elif name in ("payload", "callback"):
        torch.save({"state_dict": small, "x": Payload() if name == "payload" else Callback()}, path)
    elif name == "old payload":
        torch.save({"state_dict": small, "x": Payload()}, path, _use_new_zipfile_serialization=False)
    elif name == "script":
        torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), path)
    elif name == "program":
        torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), path)
    elif name == "npz":
        np.savez(path, a=np.ones(3))
        Path(f"{path}.npz").rename(path)
    else:
        path.write_bytes({
            "empty": b"", "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n",
            "page": b"\n<!DOCTYPE html><html>404", "gzip": gzip.compress(b"x" * 99), "zeros": bytes(5000),
            "pickle": b"\x80" + bytes(range(256)) * 4}[name])


ROTTEN = {  # kind of file: words of the message
    "safetensors bit": "damaged", "safetensors cut": "damaged or was cut off", "safetensors size": "",
    "safetensors header": "damaged or was cut off", "safetensors longer": "damaged or was cut off",
    "not finite": "NaN or infinity (text.b)", "payload": "it holds other objects of Python (posix.mkdir)",
    "old payload": "it holds other objects of Python (posix.mkdir)", "callback": "(test_weights.Callback)",
    "script": "a program of TorchScript", "npz": "NumPy archive", "empty": "it is empty", "pointer": "git lfs pull",
    "page": "a page of HTML", "gzip": "a gzip file", "zeros": "neither torch.save nor safetensors wrote it",
    "pickle": "is damaged or was cut off",
}


@pytest.mark.parametrize("name", ROTTEN)
def test_a_file_that_is_no_whole_checkpoint_is_one_line_by_every_way_in(name, state, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "w.pt"
    write_rotten(name, path, state)
    for way, read in READERS.items():
        said = say(path, read)
        assert ROTTEN[name] in said or (way, name) == ("--load_clfs", "not finite"), (way, said)
    assert not Path("PWNED").exists()
    args = train.parse(["--model", MODEL, "--pretrained", "w.pt", "--dataset-type", "synthetic",
                        "--train-num-samples", "8", "--precision", "fp32"])
    if name not in ("safetensors bit", "not finite", "payload", "old payload", "callback", "pickle", "npz"):
        assert ROTTEN[name] in train.find_problem(args)  # before the data and the model


def test_any_changed_bit_of_a_safetensors_file_of_ours_is_noticed(tmp_path):
    """By the checksum, the header's own form, or a size: of 300 places, none loads as if nothing were."""
    path = tmp_path / "w.safetensors"
    weights.save({"a": torch.randn(300), "b": torch.ones(3, dtype=torch.bfloat16)}, path)
    whole, read = path.read_bytes(), weights.tensors(path)
    for place in range(0, len(whole), max(1, len(whole) // 300)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1:])
        try:
            assert equal(weights.tensors(path), read)  # in the padding, or the key of the checksum itself
        except ValueError as problem:
            assert "w.safetensors" in str(problem)
    start = whole.index(b"}}") + 2
    for place in range(start + (-start) % 8, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1:])
        with pytest.raises(ValueError, match="the checksum in its header is wrong"):
            weights.tensors(path)


WRAPPED = {  # as others save the same weights
    "bare": lambda s: s, "state_dict": lambda s: {"state_dict": s, "epoch": 3}, "model": lambda s: {"model": s},
    "DDP": lambda s: {f"module.{k}": v for k, v in s.items()},
    "compiled": lambda s: {f"_orig_mod.{k}": v for k, v in s.items()},
    "compiled DDP": lambda s: {"model": {f"_orig_mod.module.{k}": v for k, v in s.items()}},
    "DDP compiled": lambda s: {f"module._orig_mod.{k}": v for k, v in s.items()},
    "part compiled": lambda s: {k.replace("visual.", "visual._orig_mod."): v for k, v in s.items()},
    "Lightning's metric": lambda s: {"state_dict": {**{f"net.{k}": v for k, v in s.items()}, "loss.w": torch.ones(1)}},
    "Lightning": lambda s: {"epoch": 3, "global_step": 5, "state_dict": {f"model.{k}": v for k, v in s.items()}},
}


def test_the_usual_wrappings_load_as_the_same_model_in_every_format(state, tmp_path):
    for wrap in WRAPPED.values():
        torch.save(wrap(state), tmp_path / "w.pt")
        assert equal(checkpoints.load(str(tmp_path / "w.pt"), MODEL)[0].state_dict(), state)
    for name in ("w.safetensors", "w.pt", "w.bin"):  # by content, not by name
        save_file({f"module.{k}": v for k, v in state.items()}, tmp_path / name)
        assert equal(checkpoints.load(str(tmp_path / name), MODEL)[0].state_dict(), state)
    torch.save(state, tmp_path / "w.safetensors", _use_new_zipfile_serialization=False)
    assert equal(checkpoints.load(str(tmp_path / "w.safetensors"), MODEL)[0].state_dict(), state)


def test_a_run_resumes_between_one_process_and_several(state, tmp_path, monkeypatch):
    """DDP in one process of gloo is what torchrun's processes load into."""
    for prefix in ("", "module.", "_orig_mod.", "module._orig_mod."):
        torch.save({"epoch": 1, "optimizer": {}, "state_dict": {prefix + k: v for k, v in state.items()}},
                   tmp_path / "epoch_1.pt")
        resumed = saving.pt_load(None)(str(tmp_path / "epoch_1.pt"))
        assert resumed["epoch"] == 1 and equal(resumed["state_dict"], state)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for name in (MODEL, "ViT-Ti-8"):
            model = torch.nn.parallel.DistributedDataParallel(open_clip.create_model(name))
            other = open_clip.create_model(name).state_dict()
            for saved in (other, {f"module.{k}": v for k, v in other.items()}):
                model.module.load_state_dict({k: torch.zeros_like(v) for k, v in other.items()})
                model.load_state_dict(saved)
                assert equal(model.module.state_dict(), other)
    finally:
        torch.distributed.destroy_process_group()


def test_what_a_file_is_of_is_said(state, clip_state, tmp_path):
    timm_names = {k.removeprefix("visual."): v for k, v in open_clip.create_model("MDC-ViT-Ti-8").state_dict().items()
                  if k.startswith("visual.")}
    given = {
        "a CLIP model: give the checkpoint of a captioner": (MODEL, clip_state),
        "a captioner: give the checkpoint of a CLIP model": ("ViT-Ti-8", state),
        "a captioner of another size: visual.": ("MDC-ViT-Ti-16", state),
        "a CLIP model of another size: ": ("ViT-S-32", clip_state),
        "an image tower of timm: give": (MODEL, {"patch_embed.proj.bias": torch.ones(2), "blocks.0.a": torch.ones(2)}),
        "a CLIP model of transformers: give": (MODEL, {"vision_model.a": torch.ones(2), "text_model.b": torch.ones(2)}),
        "it is of an unknown network: its names begin with net.": (
            MODEL, {**{f"net.{k}": v for k, v in state.items()}, **{f"ema.{k}": v for k, v in state.items()}}),
        "the state of an optimizer alone": (MODEL, {"state": {}, "param_groups": []}),
        "it holds the state of an optimizer alone": (MODEL, {"epoch": 3, "optimizer": {"state": {}}}),
        "its names begin with class_embedding, positional_embedding and": (MODEL, timm_names),
        "its names begin with wrong.name, those of a captioner here with": (MODEL, {"wrong.name": torch.ones(2)}),
        "it lacks text.output.weight; ": (MODEL, {k: v for k, v in state.items() if k != "text.output.weight"}),
        "it has too much text.other; ": (MODEL, {**state, "text.other": torch.ones(1)}),
    }
    for words, (name, content) in given.items():
        torch.save(content, tmp_path / "w.pt")
        said = say(tmp_path / "w.pt", lambda path, name=name: checkpoints.load(str(path), name))
        assert f"holds no weights of {name}: it " in said and words in said, said


def write_epochs(folder: Path, **stored: int | None) -> Path:
    """RUN/checkpoints of files that store other epochs than their names say; None is a file that was cut off."""
    for name, epoch in stored.items():
        path = folder / "checkpoints" / f"{name}.pt"
        torch.save({"epoch": epoch or 9, "state_dict": {}}, path)
        if epoch is None:
            path.write_bytes(path.read_bytes()[:300])
        os.utime(path, (1_700_000_000 - 100 * (epoch or 0),) * 2)  # the highest epoch is the oldest file
    return folder


def test_the_highest_stored_epoch_is_taken_by_tools_and_resume_whatever_names_and_times_say(tmp_path, capsys):
    cases = [  # files, which is taken, which a line says is passed over
        (dict(epoch_1=1, epoch_2=2, epoch_3=3, epoch_latest=1), "epoch_3", "epoch_latest.pt (epoch 1)"),
        (dict(epoch_1=1, epoch_latest=4), "epoch_latest", None), (dict(epoch_latest=1), "epoch_latest", None),
        (dict(epoch_9=9, epoch_10=10), "epoch_10", None),
        (dict(epoch_2=5, epoch_7=1), "epoch_2", "epoch_7.pt (epoch 1)"),
        (dict(epoch_1=1, epoch_2=2, epoch_3=None), "epoch_2", "epoch_3.pt (cannot be read)"),
        (dict(epoch_1=1, epoch_latest=None), "epoch_1", "epoch_latest.pt (cannot be read)"),
    ]
    for number, (stored, taken, over) in enumerate(cases):
        run = tmp_path / str(number)
        (run / "checkpoints").mkdir(parents=True)
        (run / "params.txt").write_text(f"model: {MODEL}\n")
        write_epochs(run, **stored)
        torch.save({"epoch": 99, "state_dict": {}}, run / "checkpoints" / "mine.pt")  # not the run's own
        for place in (run, run / "checkpoints"):
            assert Path(runs.find(str(place)).weights) == run / "checkpoints" / f"{taken}.pt"
        said = capsys.readouterr().err
        assert said.count("\n") == (over is not None) and (over or "") in said, said
        assert Path(saving.get_latest_checkpoint(None)(str(run / "checkpoints"), False)).stem == taken
        args = train.parse(["--model", MODEL, "--logs", str(tmp_path), "--name", str(number), "--resume", "latest",
                            "--save-most-recent"])
        train.bring_latest(args)  # upstream then looks at epoch_latest.pt alone
        kept = run / "checkpoints"
        assert (kept / "epoch_latest.pt").read_bytes() == (kept / f"{taken}.pt").read_bytes()


def test_an_export_without_its_weights_is_refused_everywhere(tmp_path, monkeypatch):
    """OpenCLIP would run a network at random."""
    monkeypatch.chdir(tmp_path)
    make_image(0).save("x.png")
    assert complaint_of("export", "--pretrained", run_folder(tmp_path / "run", MODEL), "--out", "e", "--to",
                        "open_clip") is None
    e = Path("e")
    checkpoints.load("local-dir:e")
    (e / "open_clip_model.safetensors").rename(e / "renamed.safetensors")
    for given in ("e", "local-dir:e"):
        for command in (("caption", "x.png"), ("export", "--out", "f"), ("attention", "x.png")):
            said = complaint_of(*command, "--pretrained", given)
            assert "e has no weights (open_clip_model.safetensors)" in said, said
        with pytest.raises(FileNotFoundError, match="has no weights"):
            open_clip_mdc.load(given)
    with pytest.raises(FileNotFoundError, match="has no weights"):
        clip_models.load("local-dir:e")
    assert "has no weights" in train.find_problem(train.parse(["--model", "local-dir:e", "--precision", "fp32"]))
    assert not Path("f").exists()
    clip = {"model_cfg": open_clip.get_model_config("ViT-Ti-8"), "preprocess_cfg": {}}
    for config in (None, clip):  # a captioner's, a CLIP model's
        if config:
            (e / "open_clip_config.json").write_text(json.dumps(config))
        args = Namespace(skip_load=False, model="local-dir:e", pretrained="local-dir:e", device="cpu",
                         model_type="open_clip", model_cache_dir=None)
        with pytest.raises(FileNotFoundError, match="has no weights"):
            benchmark.load_model(args)


def test_a_vq_vae_alone_is_no_captioner(tmp_path):
    """It trains one; a tool would run a decoder at random."""
    pytest.importorskip("diffusers")
    vq = {k: v for k, v in open_clip.create_model("MCD-VQ-ViT-Ti-8").state_dict().items() if k.startswith("visual.vq.")}
    torch.save({"state_dict": vq}, tmp_path / "vq.pt")
    with pytest.raises(ValueError, match="vq.pt is a frozen VQ-VAE alone: train a captioner with --pretrained"):
        open_clip_mdc.load(tmp_path / "vq.pt", "MCD-VQ-ViT-Ti-8", "cpu")
    with pytest.raises(ValueError, match="it is of a frozen VQ-VAE of open_clip_mdc vq: give the checkpoint of a capt"):
        open_clip_mdc.load(tmp_path / "vq.pt", MODEL, "cpu")


def test_a_classifier_of_other_classes_is_refused(tmp_path):
    torch.save(torch.ones(8, 4), tmp_path / "c.pt")
    assert read_classifier(str(tmp_path / "c.pt"), 4).shape == (8, 4)
    with pytest.raises(ValueError, match="--load_clfs .*c.pt holds no classifier of 5 classes"):
        read_classifier(str(tmp_path / "c.pt"), 5)


def test_names_in_files_lead_nowhere_else(tmp_path, monkeypatch):
    """Neither to the network nor to other code's configs, and the line blames the file."""
    def no_network(*args, **kwargs):
        raise AssertionError("the network was asked")
    monkeypatch.setattr("socket.socket.connect", no_network)
    monkeypatch.setattr("socket.getaddrinfo", no_network)
    monkeypatch.chdir(tmp_path)
    make_image(0).save("x.png")
    run = run_folder(tmp_path / "run", MODEL)
    for name in ("hf-hub:ORG/NAME", "local-dir:/tmp/x", "http://x/y", "MDC-hf-hub:ORG/NAME", "roberta-ViT-B-32"):
        (run / "params.txt").write_text(f"model: {name}\n")
        said = complaint_of("caption", "x.png", "--pretrained", run, "--out", "o.jsonl")
        assert name in said and said.startswith("error: ") and "--engine" not in said and "\n" not in said, said
    (run / "params.txt").write_text(f"model: {MODEL}\n")
    assert complaint_of("export", "--pretrained", run, "--out", "e", "--to", "open_clip") is None
    config = json.loads(Path("e/open_clip_config.json").read_text())
    for tower, key in (("vision_cfg", "timm_model_name"), ("text_cfg", "hf_tokenizer_name"),
                       ("text_cfg", "hf_model_name")):
        changed = {**config["model_cfg"], tower: {**config["model_cfg"][tower], key: "hf-hub:ORG/NAME"}}
        Path("e/open_clip_config.json").write_text(json.dumps({**config, "model_cfg": changed}))
        said = complaint_of("caption", "x.png", "--pretrained", "e", "--out", "o.jsonl")
        assert f"{key} is 'hf-hub:ORG/NAME'" in said and "open_clip_config.json" in said and "--engine" not in said
    clip = {**open_clip.get_model_config("ViT-Ti-8")}
    clip["text_cfg"] = {**clip["text_cfg"], "hf_model_name": "roberta-base"}
    Path("e/open_clip_config.json").write_text(json.dumps({"model_cfg": clip}))
    with pytest.raises(ValueError, match="hf_model_name is 'roberta-base', which lies elsewhere"):
        clip_models.load("local-dir:e")
    Path("e/open_clip_config.json").write_text("[" * 5000)
    assert "open_clip_config.json is no config" in complaint_of("caption", "x.png", "--pretrained", "e")


def test_weights_of_a_file_are_taken_though_the_config_lies_beside_others(state, tmp_path, monkeypatch):
    """OpenCLIP ignores the file that is given with a local-dir:."""
    monkeypatch.chdir(tmp_path)
    assert complaint_of("export", "--pretrained", run_folder(tmp_path / "run", MODEL), "--out", "e", "--to",
                        "open_clip") is None
    torch.save(state, "w.pt")
    assert equal(checkpoints.load("w.pt", "local-dir:e")[0].state_dict(), state)
    assert not equal(checkpoints.load("e")[0].state_dict(), state)
    args = train.parse(["--model", "local-dir:e", "--pretrained", "w.pt", "--precision", "fp32"])
    assert "names its own weights" in train.find_problem(args)


@pytest.mark.parametrize("value", ["-" * 200_000 + "1", "1+" * 100_000 + "1", "(" * 5000, "[" * 90 + "]" * 90,
                                   "9" * 5000, "\x00", "1e999", "[[1], 2, 3]", "{}", "(1, 2, 3", "'a' 'b'"])
def test_any_text_in_params_is_one_line(value, tmp_path, monkeypatch):
    runs.literal(value)
    monkeypatch.chdir(tmp_path)
    make_image(0).save("x.png")
    run = run_folder(tmp_path / "run", MODEL)
    (run / "params.txt").write_text(f"model: {MODEL}\nimage_mean: {value}\n")
    said = complaint_of("caption", "x.png", "--pretrained", run)
    assert said.startswith("error: ") and "\n" not in said and len(said) < 500
    for name in ("force_image_size", "force_context_length"):
        (run / "params.txt").write_text(f"model: {MODEL}\n{name}: {value}\n")
        said = complaint_of("caption", "x.png", "--pretrained", run)
        assert "params.txt" in said and "\n" not in said and len(said) < 500
    (run / "params.txt").write_bytes(b"model: " + MODEL.encode() + b"\nname: \xff\xfe\n" + b"x" * 3_000_000)
    assert runs.find(str(run)).model_name == MODEL


def test_exports_carry_a_checksum_and_say_nothing_of_timms_own_weights(tmp_path, monkeypatch):
    """A tag, a licence, a paper or a place that nobody gave would go on in timm and transformers."""
    import timm
    monkeypatch.chdir(tmp_path)
    run = run_folder(tmp_path / "run", MODEL)
    assert complaint_of("export", "--pretrained", run, "--out", "e", "--to", "timm", "open_clip") is None
    config = json.loads(Path("e/config.json").read_text())
    assert set(config) == {*"architecture num_classes num_features global_pool model_args pretrained_cfg".split()}
    assert set(config["pretrained_cfg"]) <= {
        *"custom_load input_size fixed_input_size interpolation crop_pct crop_mode mean std".split(),
        *"num_classes pool_size first_conv classifier".split()}
    for text in (path.read_text().lower() for path in Path("e").iterdir() if path.suffix in (".json", ".md")):
        assert not re.search("laion|apache|openai|license", text)
    model = timm.create_model("local-dir:e", pretrained=True)
    assert not any(model.pretrained_cfg.get(name) for name in ("tag", "license", "origin_url", "paper_ids", "url"))
    for path in Path("e").glob("*.safetensors"):
        assert equal(weights.tensors(path), load_file(path))
        with open(path, "r+b") as file:
            file.seek(-50, 2)
            file.write(b"\x7f\x01")
        with pytest.raises(ValueError, match="the checksum in its header is wrong"):
            weights.tensors(path)
