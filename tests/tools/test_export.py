"""Claims about `open_clip_mdc export`: each folder is read by its own library.

The run has an image size, a context, a mean and a vocabulary of its own.
"""
import json
import re
import shutil

import open_clip
import pytest
import timm
import torch
from conftest import complaint_of, make_image, read_json, run, run_folder, seeded, write_json
from hub import TOKEN, hub
from open_clip.factory import SimpleTokenizer
from PIL import Image
from safetensors.torch import save_file

import open_clip_mdc
from open_clip_mdc.cli.model_card import training_flags
from open_clip_mdc.integration.factory import OpenCLIPCaptioner as Captioner
from open_clip_mdc.text.vocabulary import write

transformers = pytest.importorskip("transformers")

IMAGES = [make_image(i, 48) for i in range(3)]
CAPTIONS = ["a red circle above a blue square", "a blue square"]
TIMM_CONFIG = {  # the smallest ViT of timm that has CLIP's blocks
    "embed_dim": None, "custom_text": True,
    "vision_cfg": {"timm_model_name": "vit_xsmall_patch16_clip_224", "image_size": 224},
    "text_cfg": {"context_length": 20, "vocab_size": 665, "width": 64, "heads": 2, "layers": 1,
                 "tokenizer_kwargs": {"bpe_path": "scenes_bpe.txt.gz"}},
    "caption_cfg": {"objective": "mdc"},
}


def complaint(*argv) -> str | None:
    return complaint_of("export", *argv)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def trained(folder):
    path = run_folder(folder / "logs/run", "MDC-ViT-Ti-8", force_image_size=48, force_context_length=20,
                      image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.25, 0.3])
    with (path / "params.txt").open("a") as file:
        file.write("logs: /home/somebody/logs\ntrain_data: /home/somebody/cc12m/{00000..00009}.tar\nlr: 0.0007\n"
                   "batch_size: 64\nwarmup: 123\n")
    return path


@pytest.fixture(scope="module")
def out(trained, folder):
    result = {"dataset": "wds/cifar10", "model": "MDC", "pretrained": "/home/somebody/logs", "task": "linear_probe",
              "metrics": {"lp_acc1": 0.51234, "scorer": "heuristic", "acc5": None}, "settings": {}}
    write_json(folder / "result.json", result)
    assert complaint("--pretrained", trained, "--out", folder / "exported", "--results", folder / "result.json") is None
    return folder / "exported"


@pytest.fixture(scope="module")
def model(trained):
    return open_clip_mdc.load(trained, device="cpu")


@pytest.fixture(scope="module")
def expected(model):
    """Preprocessed images, features, patch tokens."""
    image = next(model.batches(IMAGES))
    return image, model.encode_image(image), model.encode_image_tokens(image)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() < 1e-5)


def test_the_open_clip_folder_is_the_captioner_of_the_run(out, model, expected):
    loaded = open_clip_mdc.load(f"local-dir:{out}", device="cpu")
    assert torch.equal(loaded.encode_image(IMAGES), expected[1])
    assert loaded.caption(IMAGES, length="auto") == model.caption(IMAGES, length="auto")
    assert torch.equal(loaded.score(IMAGES, CAPTIONS), model.score(IMAGES, CAPTIONS))
    assert torch.equal(loaded.tokenizer(CAPTIONS), model.tokenizer(CAPTIONS))
    assert loaded.model.context_length == 20
    assert complaint("--pretrained", f"local-dir:{out}", "--out", out.parent / "again", "--to", "open_clip") is None
    assert torch.equal(open_clip_mdc.load(out.parent / "again").encode_image(IMAGES), expected[1])


def test_a_vocabulary_beside_the_weights_is_found_there_from_anywhere(out, tmp_path, monkeypatch):
    """A file that no package has, under a name that no package has."""
    shutil.copytree(out, tmp_path / "own")
    (tmp_path / "own/scenes_bpe.txt.gz").unlink()
    size = write(tmp_path / "own/own_words.txt.gz", ["circle", "square", "zebra"])
    config = read_json(tmp_path / "own/open_clip_config.json")
    config["model_cfg"]["text_cfg"]["tokenizer_kwargs"]["bpe_path"] = "own_words.txt.gz"
    write_json(tmp_path / "own/open_clip_config.json", config)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    tokenizer = open_clip_mdc.get_tokenizer(f"local-dir:{tmp_path / 'own'}")
    assert isinstance(tokenizer, SimpleTokenizer) and tokenizer.vocab_size == size
    assert len(tokenizer.encode("zebra")) == 1


def test_a_model_is_exported_on_the_cpu_whatever_the_default_device(trained, tmp_path, monkeypatch):
    monkeypatch.setattr("open_clip_mdc.integration.checkpoints.default_device", lambda device=None: device or "meta")
    assert complaint("--pretrained", trained, "--out", tmp_path / "out", "--to", "open_clip", "timm") is None


def check_timm(folder, image, features, tokens):
    """Return timm's encoder of a folder, whose features and tokens are these."""
    encoder = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    with torch.no_grad():
        assert close(encoder(image), features)
        assert close(encoder.forward_features(image)[:, encoder.num_prefix_tokens:], tokens)
    return encoder


def test_timm_loads_its_folder(out, expected):
    encoder = check_timm(out, *expected)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(encoder))
    assert close(torch.stack([transform(x) for x in IMAGES]), expected[0])


def test_transformers_loads_the_folder_of_timm(out, expected):
    processor = transformers.AutoImageProcessor.from_pretrained(out)
    encoder = transformers.AutoModel.from_pretrained(out).eval()
    image, features, tokens = expected
    pixels = processor(IMAGES)["pixel_values"]
    with torch.no_grad():
        found = encoder(pixels)
    assert close(pixels, image) and close(found.pooler_output, features)
    assert close(found.last_hidden_state[:, 1:], tokens)


def test_transformers_loads_a_clip_vision_model(out, model, expected):
    """Also its last layer but one, which LLaVA reads."""
    path = out / "clip_vision_model"
    processor = transformers.AutoImageProcessor.from_pretrained(path)
    encoder = transformers.CLIPVisionModel.from_pretrained(path).eval()
    image, features, tokens = expected
    pixels = processor(IMAGES, return_tensors="pt")["pixel_values"]
    assert (pixels - image).abs().max() < 0.05  # its resize works on bytes
    with torch.no_grad():
        found = encoder(image, output_hidden_states=True)
        normalised = getattr(encoder, "vision_model", encoder).post_layernorm(found.last_hidden_state[:, 1:])
        before_last = model.model.visual.forward_intermediates(image, indices=[2], output_fmt="NLC")
    assert close(normalised, tokens) and close(normalised.mean(1), features)
    assert close(found.hidden_states[-2][:, 1:], before_last["image_intermediates"][0])


def test_the_torch_program_needs_torch_alone_and_takes_any_batch(out, expected, tmp_path):
    torch.save(expected, tmp_path / "expected.pt")
    run("python", "-c", f"""
import sys, torch
encode_image = torch.export.load({str(out / 'encode_image.pt2')!r}).module()
image, features, tokens = torch.load({str(tmp_path / 'expected.pt')!r}, weights_only=True)
for n in (1, 2, 3):
    found = encode_image(image[:n])
    assert (found[0] - features[:n]).abs().max() < 1e-5 and (found[1] - tokens[:n]).abs().max() < 1e-5
assert "open_clip" not in sys.modules and "timm" not in sys.modules
""")


def test_the_card_tells_the_run_and_its_code_runs(out, model, monkeypatch):
    card = (out / "README.md").read_text()
    for told in ("MDC-ViT-Ti-8", "48 x 48", "| `--lr` | `0.0007` |", "`--warmup`",
                 "| wds/cifar10 | linear_probe | lp_acc1 | 0.5123 |"):
        assert told in card, told
    assert not re.search("somebody|{{|--logs|No results were given", card)
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in out.rglob("*") if path.is_file())
    monkeypatch.chdir(out.parent)
    turned = Image.Exif()
    turned[0x0112] = 6  # as phones save it
    IMAGES[0].save("image.jpg", quality=100, exif=turned)
    feature = model.encode_image("image.jpg")
    blocks = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        with torch.no_grad():
            exec(block, names := {})
        if "feature" in names and "zeros" not in block:
            assert (names["feature"] - feature).abs().max() < (0.2 if "CLIPImageProcessor" in block else 1e-5), block


def test_the_flags_of_a_run_are_told_from_within_its_folder(trained, monkeypatch):
    monkeypatch.chdir(trained / "checkpoints")
    assert training_flags("epoch_1.pt")["warmup"] == "123" and training_flags(None) == {}


@pytest.fixture(scope="module")
def timm_tower(folder):
    """A captioner on a timm encoder, as an OpenCLIP folder."""
    open_clip_mdc.register()
    torch.manual_seed(0)
    config = json.loads(json.dumps(TIMM_CONFIG))
    config.pop("custom_text")
    captioner = Captioner(**config)
    (folder / "timm_tower").mkdir()
    save_file(captioner.state_dict(), folder / "timm_tower/open_clip_model.safetensors")
    write_json(folder / "timm_tower/open_clip_config.json", {"model_cfg": TIMM_CONFIG, "preprocess_cfg": {}})
    return folder / "timm_tower"


def test_a_timm_encoder_goes_where_it_fits(timm_tower, folder, capsys):
    assert complaint("--pretrained", timm_tower, "--out", folder / "of_timm") is None
    assert "not exported to transformers: its image tower is a timm model" in capsys.readouterr().out
    model = open_clip_mdc.load(timm_tower, device="cpu")
    image = torch.randn(2, 3, 224, 224, generator=seeded(0))
    features, tokens = model.encode_image(image), model.encode_image_tokens(image)
    check_timm(folder / "of_timm", image, features, tokens)
    program = torch.export.load(folder / "of_timm/encode_image.pt2").module()
    with torch.no_grad():
        assert close(program(image)[1], tokens)
    assert torch.equal(open_clip_mdc.load(folder / "of_timm", device="cpu").encode_image(image), features)


@pytest.mark.parametrize("model_args", [{}, {"force_image_size": 24}], ids=["32", "24"])
def test_a_model_of_regions_goes_to_open_clip_and_torch(tmp_path, capsys, model_args):
    path = run_folder(tmp_path / "run", "MDC-ViT-Ti-8-regions2", **model_args)
    assert complaint("--pretrained", path, "--out", tmp_path / "out") is None
    said, side = capsys.readouterr().out, 2 * model_args.get("force_image_size", 32)
    assert all(f"not exported to {name}: its image tower" in said for name in ("timm", "transformers"))
    patches = side // 2 // 8
    assert f"images of {side} x {side} pixels (5 regions x {patches} x {patches} patches)" in \
        (tmp_path / "out/README.md").read_text().replace("\n", " ")
    image = torch.randn(3, 3, side, side, generator=seeded(0))
    tokens = open_clip_mdc.load(path, device="cpu").encode_image_tokens(image)
    assert torch.equal(open_clip_mdc.load(tmp_path / "out", device="cpu").encode_image_tokens(image), tokens)
    with torch.no_grad():
        assert close(torch.export.load(tmp_path / "out/encode_image.pt2").module()(image)[1], tokens)


@pytest.mark.usefixtures("trained")
def test_a_resnet_captioner_is_exported_and_read_again(tmp_path):
    model = open_clip.create_model("MDC-small-RN50").eval()
    torch.save(model.state_dict(), tmp_path / "rn.pt")
    assert complaint("--pretrained", tmp_path / "rn.pt", "--model", "MDC-small-RN50", "--out", tmp_path / "out", "--to",
                     "open_clip", "torch") is None
    image = torch.rand(1, 3, 224, 224, generator=seeded(0))
    found = open_clip_mdc.load(tmp_path / "out", device="cpu").encode_image(image)
    assert torch.allclose(found, model.encode_image(image), atol=1e-5)
    assert "224 x 224 pixels" in (tmp_path / "out/README.md").read_text()


def test_a_destination_that_does_not_fit_is_refused(timm_tower, folder):
    message = complaint("--pretrained", timm_tower, "--out", folder / "refused", "--to", "open_clip", "transformers")
    assert message.endswith("cannot be exported to transformers: its image tower is a timm model, and "
                            "CLIPVisionModel holds only CLIP's ViT")
    assert not (folder / "refused").exists()


def test_a_folder_is_pushed_and_loaded_from_the_hub(trained, folder, model):
    """By huggingface_hub's own client, against a server that speaks its HTTP."""
    IMAGES[0].save(folder / "pushed.png")
    feature, caption = model.encode_image(folder / "pushed.png")[0].tolist(), model.caption(folder / "pushed.png")
    with hub() as server:
        where = dict(HF_ENDPOINT=server.url, HF_HOME=str(folder / "hf"), HF_HUB_DISABLE_XET="1")
        script = f"""
import json, os, timm, open_clip_mdc, torch
from open_clip_mdc.cli import main
export = ["export", "--pretrained", {str(trained)!r}, "--to", "open_clip", "timm", "--push", "org/name", "--out"]
try:
    main([*export, {str(folder / 'refused')!r}])
except SystemExit as end:
    print(end)
os.environ["HF_TOKEN"] = {TOKEN!r}
main([*export, {str(folder / 'pushed')!r}])
model = open_clip_mdc.load("hf-hub:org/name", device="cpu")
encoder = timm.create_model("hf-hub:org/name", pretrained=True).eval()
image = {str(folder / 'pushed.png')!r}
with torch.no_grad():
    print(json.dumps([model.encode_image(image)[0].tolist(), model.caption(image),
                      encoder(next(model.batches(image)))[0].tolist(), len(model.tokenizer.bpe_ranks)]))
"""
        printed = run("python", "-c", script, HF_TOKEN="wrong", **where).stdout.splitlines()
        assert any(re.match("error: .*refused is written, but not uploaded: ", line) for line in printed)
        assert f"{server.url}/org/name" in printed
        own, words, of_timm, merges = json.loads(printed[-1])
        assert own == feature and words == caption and merges == len(model.tokenizer.bpe_ranks)
        assert torch.allclose(torch.tensor(of_timm), torch.tensor(feature), atol=1e-5)
        assert server.files == {str(path.relative_to(folder / "pushed")): path.read_bytes()
                                for path in (folder / "pushed").rglob("*") if path.is_file()}
        assert 'open_clip_mdc.load("hf-hub:org/name")' in server.files["README.md"].decode()
