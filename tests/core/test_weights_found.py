"""Claims about weights in run folders, exports and caches."""
import copy
import itertools
import os
import re
from argparse import Namespace
from pathlib import Path

import open_clip
import pytest
import torch
from conftest import complaint_of, make_image, read_json, refused, run_folder, write_json, write_run
from safetensors.torch import load_file
from training import equal

import open_clip_mdc
from clip_benchmark_ext import run as benchmark
from open_clip_mdc import train
from open_clip_mdc.data import weights
from open_clip_mdc.integration import check_flags, checkpoints, runs, saving
from open_clip_mdc.integration import clip as clip_models

MODEL = "MDC-ViT-Ti-8"
pytestmark = pytest.mark.usefixtures("registered_for_training")


def test_a_run_resumes_between_one_process_and_several(state, tmp_path):
    """DDP in one process of gloo is what torchrun's processes load into."""
    for prefix in ("", "module.", "_orig_mod.", "module._orig_mod."):
        torch.save({"epoch": 1, "optimizer": {}, "state_dict": {prefix + k: v for k, v in state.items()}},
                   tmp_path / "epoch_1.pt")
        resumed = saving.pt_load(None)(str(tmp_path / "epoch_1.pt"))
        assert resumed["epoch"] == 1 and equal(resumed["state_dict"], state)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for name, prefix in itertools.product((MODEL, "ViT-Ti-8"), ("", "module.")):
            model = torch.nn.parallel.DistributedDataParallel(open_clip.create_model(name))
            other = open_clip.create_model(name).state_dict()
            model.load_state_dict({prefix + k: v for k, v in other.items()})
            assert equal(model.module.state_dict(), other)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("stored, taken, over", [  # the epochs in files, None if cut off; which a line passes over
    (dict(epoch_1=1, epoch_2=2, epoch_3=3, epoch_latest=1), "epoch_3", "epoch_latest.pt (epoch 1)"),
    (dict(epoch_1=1, epoch_latest=4), "epoch_latest", ""), (dict(epoch_latest=1), "epoch_latest", ""),
    (dict(epoch_9=9, epoch_10=10), "epoch_10", ""), (dict(epoch_2=5, epoch_7=1), "epoch_2", "epoch_7.pt (epoch 1)"),
    (dict(epoch_1=1, epoch_2=2, epoch_3=None), "epoch_2", "epoch_3.pt (cannot be read)"),
    (dict(epoch_1=1, epoch_latest=None), "epoch_1", "epoch_latest.pt (cannot be read)")])
def test_the_highest_stored_epoch_is_taken_by_tools_and_resume_whatever_names_and_times_say(
        stored, taken, over, tmp_path, capsys):
    run = write_run(tmp_path / "run", {}, model=MODEL)
    kept = run / "checkpoints"
    (kept / "epoch_1.pt").unlink()
    for name, epoch in {**stored, "mine": 99}.items():  # mine is not the run's own
        path = kept / f"{name}.pt"
        torch.save({"epoch": epoch or 9, "state_dict": {}}, path)
        if epoch is None:
            os.truncate(path, 300)
        os.utime(path, (1_700_000_000 - 100 * (epoch or 0),) * 2)  # the highest epoch is the oldest file
    for place in (run, kept):
        assert runs.find(str(place)).weights == str(kept / f"{taken}.pt")
    said = capsys.readouterr().err
    assert said.count("\n") == bool(over) and over in said, said
    assert Path(saving.get_latest_checkpoint(None)(str(kept), False)).stem == taken
    runs.bring_latest(train.parse(f"--model {MODEL} --logs {tmp_path} --name run --resume latest --save-most-recent"
                                  .split()))  # upstream then looks at epoch_latest.pt alone
    assert (kept / "epoch_latest.pt").read_bytes() == (kept / f"{taken}.pt").read_bytes()


def test_of_sharded_checkpoints_the_highest_epoch_is_named(tmp_path):
    for epoch in (9, 10):
        os.makedirs(tmp_path / f"epoch_{epoch}/.metadata")
    assert "epoch_10 is a sharded" in refused(FileNotFoundError, runs.latest_checkpoint, tmp_path)


@pytest.fixture
def run(here) -> Path:
    """A run in the working directory, beside an image x.png."""
    make_image(0).save("x.png")
    return run_folder(here / "run", MODEL)


@pytest.fixture
def e(run) -> Path:
    """The run's export to OpenCLIP."""
    assert complaint_of("export", "--pretrained", run, "--out", "e", "--to", "open_clip") is None
    return Path("e")


def test_an_export_without_its_weights_is_refused_everywhere(e):
    """OpenCLIP would run a network at random."""
    checkpoints.load("local-dir:e")
    (e / "open_clip_model.safetensors").rename(e / "renamed.safetensors")
    for given in ("e", "local-dir:e"):
        for command in ("caption x.png", "export --out f", "attention x.png"):
            said = complaint_of(*f"{command} --pretrained {given}".split())
            assert "e has no weights (open_clip_model.safetensors)" in said, said
        assert "has no weights" in refused(FileNotFoundError, open_clip_mdc.load, given)
    assert "has no weights" in refused(FileNotFoundError, clip_models.load, "local-dir:e")
    assert "has no weights" in check_flags.find_problem(train.parse(["--model", "local-dir:e", "--precision", "fp32"]))
    assert not Path("f").exists()
    clip = {"model_cfg": open_clip.get_model_config("ViT-Ti-8"), "preprocess_cfg": {}}
    for config in (read_json(e / "open_clip_config.json"), clip):  # a captioner's, a CLIP model's
        write_json(e / "open_clip_config.json", config)
        assert "has no weights" in refused(FileNotFoundError, benchmark.load_model, Namespace(
            skip_load=False, model="local-dir:e", pretrained="local-dir:e", device="cpu", model_type="open_clip",
            model_cache_dir=None))


def test_names_in_files_lead_nowhere_else(run, e, monkeypatch):
    """Neither to the network nor to other code's configs, and the line blames the file."""
    for name in ("socket.socket.connect", "socket.getaddrinfo"):
        monkeypatch.setattr(name, lambda *args, **kwargs: pytest.fail("the network was asked"))
    for name in ("hf-hub:ORG/NAME", "local-dir:/tmp/x", "http://x/y", "MDC-hf-hub:ORG/NAME", "roberta-ViT-B-32"):
        (run / "params.txt").write_text(f"model: {name}\n")
        said = complaint_of("caption", "x.png", "--pretrained", run, "--out", "o.jsonl")
        assert name in said and said.startswith("error: ") and "\n" not in said, said
    file = e / "open_clip_config.json"
    config = read_json(file)
    for tower, key in (("vision_cfg", "timm_model_name"), ("text_cfg", "hf_tokenizer_name"),
                       ("text_cfg", "hf_model_name")):
        changed = copy.deepcopy(config)
        changed["model_cfg"][tower][key] = "hf-hub:ORG/NAME"
        write_json(file, changed)
        said = complaint_of(*"caption x.png --pretrained e --out o.jsonl".split())
        assert f"{key} is 'hf-hub:ORG/NAME'" in said and "open_clip_config.json" in said
    clip = open_clip.get_model_config("ViT-Ti-8")
    clip["text_cfg"]["hf_model_name"] = "roberta-base"
    write_json(file, {"model_cfg": clip})
    said = refused(ValueError, clip_models.load, "local-dir:e")
    assert "hf_model_name is 'roberta-base', which lies elsewhere" in said
    file.write_text("[" * 5000)
    assert "open_clip_config.json is no config" in complaint_of("caption", "x.png", "--pretrained", "e")


def test_weights_of_a_file_are_taken_though_the_config_lies_beside_others(state, e):
    """OpenCLIP ignores the file that is given with a local-dir:."""
    torch.save(state, "w.pt")
    assert equal(checkpoints.load("w.pt", "local-dir:e")[0].state_dict(), state)
    assert not equal(checkpoints.load("e")[0].state_dict(), state)
    args = train.parse("--model local-dir:e --pretrained w.pt --precision fp32".split())
    assert "names its own weights" in check_flags.find_problem(args)


@pytest.mark.parametrize("value", ["-" * 200_000 + "1", "1+" * 100_000 + "1", "(" * 5000, "[" * 90 + "]" * 90,
                                   "9" * 5000, "\x00", "1e999", "[[1], 2, 3]", "{}", "{[]: 1}", "(1, 2, 3", "'a' 'b'"])
def test_any_text_in_params_is_one_line(value, run):
    runs.literal(value)
    for name in ("image_mean", "force_image_size", "force_context_length"):
        (run / "params.txt").write_text(f"model: {MODEL}\n{name}: {value}\n")
        said = complaint_of("caption", "x.png", "--pretrained", run)
        assert said.startswith("error: ") and "\n" not in said and len(said) < 500
        assert name == "image_mean" or "params.txt" in said
    (run / "params.txt").write_bytes(b"model: " + MODEL.encode() + b"\nname: \xff\xfe\n" + b"x" * 3_000_000)
    assert runs.find(str(run)).model_name == MODEL


def test_exports_carry_a_checksum_and_say_nothing_of_timms_own_weights(run):
    """A tag, a licence, a paper or a place that nobody gave would go on in timm and transformers."""
    import timm
    assert complaint_of("export", "--pretrained", run, "--out", "e", "--to", "timm", "open_clip") is None
    config = read_json("e/config.json")
    assert set(config) == {*"architecture num_classes num_features global_pool model_args pretrained_cfg".split()}
    assert set(config["pretrained_cfg"]) <= {
        *"custom_load input_size fixed_input_size interpolation crop_pct crop_mode mean std".split(),
        *"num_classes pool_size first_conv classifier".split()}
    said = "".join(path.read_text().lower() for path in Path("e").iterdir() if path.suffix in (".json", ".md"))
    assert not re.search("laion|apache|openai|license", said)
    model = timm.create_model("local-dir:e", pretrained=True)
    assert not any(model.pretrained_cfg.get(name) for name in ("tag", "license", "origin_url", "paper_ids", "url"))
    for path in Path("e").glob("*.safetensors"):
        assert equal(weights.tensors(path), load_file(path))
        with open(path, "r+b") as file:
            file.seek(-50, 2)
            file.write(b"\x7f\x01")
        with pytest.raises(ValueError, match="the checksum in its header is wrong"):
            weights.tensors(path)
