"""Claims about `open_clip_mdc vq`: fitting, importing and using a VQ-VAE."""
import math
import random
from argparse import Namespace
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import read_json, refused, run_tool, seeded
from PIL import Image
from scipy.stats import entropy
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_info, threadpool_limits
from training import equal, state_of

import open_clip_mdc
from open_clip_mdc.cli import taming, vq
from open_clip_mdc.integration import checkpoints
from open_clip_mdc.models.vq import PREFIX, VQ, VQCfg, VQTower, make_decoder

TINY = VQCfg(codes=8, channels=(8, 16), layers=1, latent=4)


def fit(scenes: Path, out: Path, steps: int) -> None:
    run_tool(["vq", "fit", "--model", "MCD-VQ-ViT-Ti-8", "--train-data", scenes / "train/{00000..00007}.tar", "--out",
              out, "--steps", steps, "--batch-size", "16"])


@pytest.fixture(scope="module")
def fitted(scenes, tmp_path_factory):
    """The real command for seconds: its file and what it printed."""
    out = tmp_path_factory.mktemp("vq") / "vq.pt"
    with redirect_stdout(StringIO()) as said:
        fit(scenes, out, 30)
    return out, said.getvalue()


def test_fitting_prints_how_good_codes_are_and_shows_them(fitted):
    out, said = fitted
    assert "256 held-out images: PSNR " in said and " of 256 codes in use (" in said and "perplexity " in said
    assert f"--model MCD-VQ-ViT-Ti-8 --pretrained {out}" in said
    assert float(said.split("PSNR ")[1].split(" dB")[0]) > 12  # all grey: 11
    with Image.open(out.with_name(f"{out.name}.png")) as sheet:
        assert sheet.size == (8 * 34 + 2, 4 * 34 + 2) and len(sheet.convert("RGB").getcolors(10**6)) > 100
    state = state_of(out)
    assert all(name.startswith(PREFIX) for name in state) and not any("decoder" in name for name in state)
    assert sorted(p.name for p in out.parent.iterdir()) == ["vq.pt", "vq.pt.png"]


def test_quality_is_that_of_a_plain_count():
    torch.manual_seed(0)
    visual, decoder = VQTower(TINY, 8, 2, 8), make_decoder(TINY)
    images = torch.randn(6, 3, 8, 8)
    quality, after = vq.evaluate_codes(visual, decoder, images, batch_size=4)
    counts = Counter(visual.codes(images).flatten().tolist())
    assert quality.used == len(counts)
    assert quality.perplexity == pytest.approx(math.exp(entropy(list(counts.values()))), rel=1e-5)
    errors = ((visual.pixels(images) - after) / 2).square().mean((1, 2, 3))
    assert quality.psnr == pytest.approx(-10 * errors.log10().mean().item(), rel=1e-5)


def test_the_same_seed_gives_the_same_file(scenes, tmp_path):
    """Also of the k-means of latents that have hardly been trained, which are close to one another."""
    files = [tmp_path / "one.pt", tmp_path / "two.pt"]
    for out in files:
        fit(scenes, out, 8)
    assert equal(*map(state_of, files))


def test_k_means_adds_up_on_one_thread(monkeypatch):
    """With four, most runs of one seed differ in the last bits of float64."""
    fit, threads = KMeans.fit, set()

    def watched(self, latents):
        threads.update(pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "openmp")
        return fit(self, latents)

    monkeypatch.setattr(KMeans, "fit", watched)
    with threadpool_limits(4, user_api="openmp"):
        assert vq.k_means(torch.randn(64, 8), 4).shape == (4, 8) and threads == {1}


def test_unused_vectors_move_to_latents_and_used_ones_stay():
    codebook, latents = torch.zeros(4, 2), torch.arange(1.0, 21).view(10, 2)
    vq.restart(codebook, torch.tensor([True, False, True, False]), latents)
    assert codebook[[1, 3]].eq(0).all() and all((latents == row).all(1).any() for row in codebook[[0, 2]])


@pytest.mark.parametrize("steps", [1, 2, 7, 20])
def test_few_steps_fit_too(steps):
    torch.manual_seed(0)
    visual, image = VQTower(TINY, 8, 2, 8), torch.randn(4, 3, 8, 8)
    vq.fit(visual, make_decoder(TINY), iter(lambda: image, None), steps, 1e-3)
    assert visual.vq.vectors.isfinite().all()


@pytest.mark.parametrize("batch_size", [3, 32, 600])
def test_images_held_out_are_not_trained_on(scenes, batch_size):
    """In whatever order shards come, and though a batch holds some that are held out and some that are not."""
    shards = vq.find_shards(f"{scenes}/train/{{00000..00003}}.tar")
    args = Namespace(batch_size=batch_size, workers=0, train_data="")

    def transform(image):
        return torch.tensor(list(image.resize((4, 4)).tobytes()))

    names, images = zip(*vq.read_images(shards, transform, args), strict=True)
    names, images = [name for some in names for name in some], torch.cat(images)
    expected = Counter(str(image.tolist()) for image in images[50:])
    random.seed(0)
    batches = vq.training_batches(shards, transform, args, set(names[:50]))
    for _ in range(4):  # passes
        seen = Counter()
        while seen.total() < expected.total():
            seen.update(str(image.tolist()) for image in next(batches))
        assert seen == expected


def test_workers_change_no_image_that_is_trained_on(scenes):
    """Though the images are cut at random, and the shards come in random order."""
    _, transform, _ = vq.tower("MCD-VQ-ViT-Ti-8")
    shards, seen = [f"{scenes}/val/00000.tar", f"{scenes}/train/00000.tar"], []
    for workers in (0, 3):
        torch.manual_seed(0)
        random.seed(0)
        args = Namespace(batch_size=30, workers=workers, train_data="")
        batches = vq.training_batches(shards, transform, args, set())
        seen.append([next(batches) for _ in range(2)])
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


# ---- taming-transformers' checkpoints, by their names

SHAPES = Path(__file__).parent / "fixtures/taming.json"
TAMING = VQCfg(codes=5, channels=(32, 32, 64, 64), layers=2, latent=8, attention_levels=(3,))


def random_taming(kind: str) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors by the names and shapes of taming-transformers' Encoder with a quantizer of this kind.

    "small" has VectorQuantizer2's names and fewer channels. Some are of parts that are not read.
    """
    generator, state = seeded(0), {}
    for name, shape in read_json(SHAPES)[kind].items():
        tensor = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            state[name] = tensor * (1.0 if name == "quantize.embedding.weight" else math.prod(shape[1:]) ** -0.5)
        else:
            state[name] = 0.1 * tensor + name.endswith("weight")  # a norm's weights lie about 1
    return state


def taming_latents(state: dict[str, torch.Tensor], cfg: VQCfg, x: torch.Tensor) -> torch.Tensor:
    """[B, C, h, w] by the definition, from the names."""
    def conv(name, x, **how):
        return F.conv2d(x, state[name + ".weight"], state[name + ".bias"], **how)

    def norm(name, x):
        return F.group_norm(x, 32, state[name + ".weight"], state[name + ".bias"], eps=1e-6)

    def block(name, x):
        y = conv(name + ".conv1", F.silu(norm(name + ".norm1", x)), padding=1)
        y = conv(name + ".conv2", F.silu(norm(name + ".norm2", y)), padding=1)
        return y + (conv(name + ".nin_shortcut", x) if name + ".nin_shortcut.weight" in state else x)

    def attention(name, x):
        q, k, v = (conv(f"{name}.{part}", norm(name + ".norm", x)).flatten(2) for part in "qkv")
        weight = (q.transpose(1, 2) @ k / x.shape[1] ** 0.5).softmax(2)  # [B, asks, is asked]
        return x + conv(name + ".proj_out", (v @ weight.transpose(1, 2)).view_as(x))

    x = conv("encoder.conv_in", x, padding=1)
    for level in range(len(cfg.channels)):
        for i in range(cfg.layers):
            x = block(f"encoder.down.{level}.block.{i}", x)
            if level in cfg.attention_levels:
                x = attention(f"encoder.down.{level}.attn.{i}", x)
        if level < len(cfg.channels) - 1:
            x = conv(f"encoder.down.{level}.downsample.conv", F.pad(x, (0, 1, 0, 1)), stride=2)
    x = block("encoder.mid.block_2", attention("encoder.mid.attn_1", block("encoder.mid.block_1", x)))
    return conv("quant_conv", conv("encoder.conv_out", F.silu(norm("encoder.norm_out", x)), padding=1))


@pytest.mark.parametrize("kind", ["VectorQuantizer2", "GumbelQuantize"])
def test_codes_of_a_checkpoint_are_those_of_its_definition_without_the_unused_ones(kind, tmp_path):
    """There are 13 codes, of which VQ-Diffusion's table keeps five.

    Attention is at the last level, as in the Gumbel VQGAN.
    """
    state = random_taming(kind)
    classes = torch.zeros(13, dtype=torch.long)
    classes[[11, 2, 5, 8, 9]] = torch.arange(1, 6)
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "last.ckpt")
    torch.save(classes, tmp_path / "used.pt")
    imported = VQ(TAMING)
    imported.load_state_dict(taming.convert(str(tmp_path / "last.ckpt"), str(tmp_path / "used.pt"),
                                            imported.state_dict()))
    image = torch.rand(2, 3, 64, 64, generator=seeded(0)) * 2 - 1
    latents = taming_latents(state, TAMING, image)
    torch.testing.assert_close(imported.latents(image), latents.flatten(2).transpose(1, 2), atol=1e-4, rtol=1e-4)
    kept = [11, 2, 5, 8, 9]
    if kind == "GumbelQuantize":
        scores = F.conv2d(latents, state["quantize.proj.weight"], state["quantize.proj.bias"])[:, kept]
        vectors = state["quantize.embed.weight"][kept]
    else:
        vectors = state["quantize.embedding.weight"][kept]
        scores = -(latents[:, None] - vectors[None, :, :, None, None]).square().sum(2)
    expected = scores.argmax(1).flatten(1)
    assert torch.equal(imported.codes(imported.latents(image)), expected) and len(expected.unique()) > 2
    assert torch.equal(imported.vectors, vectors)


def test_the_command_writes_what_training_takes(tmp_path):
    open_clip_mdc.register()
    cfg = VQCfg(codes=256, channels=(32, 64, 64), layers=1, latent=64)
    state = random_taming("small")
    torch.save(state, tmp_path / "bare.pt")
    run_tool(["vq", "import", "--model", "MCD-VQ-ViT-Ti-8", "--from", tmp_path / "bare.pt", "--out",
              tmp_path / "vq.pt"])
    model, _, _ = checkpoints.load(str(tmp_path / "vq.pt"), "MCD-VQ-ViT-Ti-8")
    image = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model.visual.latents(image), taming_latents(
        state, cfg, model.visual.pixels(image)).flatten(2).transpose(1, 2), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("change, said", [
    (lambda s: s.pop("encoder.down.3.attn.1.q.weight"), "it lacks encoder.down.3.attn.1.q.weight"),
    (lambda s: s.update({"quant_conv.weight": torch.ones(8, 7, 1, 1)}), "quant_conv.weight is [8, 7, 1, 1]"),
    (lambda s: s.update({"quantize.embedding.weight": torch.ones(9, 8)}), "uses 9 codes, but the model has 5"),
])
def test_other_checkpoints_are_refused_in_one_line(change, said, tmp_path):
    state = random_taming("VectorQuantizer2")
    state["quantize.embedding.weight"] = torch.randn(TAMING.codes, TAMING.latent)
    change(state)
    torch.save({"state_dict": state}, tmp_path / "x.ckpt")
    found = refused(ValueError, taming.convert, str(tmp_path / "x.ckpt"), None, VQ(TAMING).state_dict())
    assert said in found and str(tmp_path) in found
