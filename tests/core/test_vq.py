"""Claims about discrete image tokens: codes, training, loading."""
import open_clip
import pytest
import torch
from conftest import TEXT, captions, images, refused, seeded
from torch.testing import assert_close
from training import equal, holds

import open_clip_mdc
from open_clip_mdc import errors, train
from open_clip_mdc.cli import conversion
from open_clip_mdc.integration import check_flags
from open_clip_mdc.integration.factory import OpenCLIPCaptioner as Captioner
from open_clip_mdc.models.vq import PREFIX, VQCfg, VQTower
from open_clip_mdc.objectives.loss import CaptionLoss

TINY = dict(codes=24, channels=(8, 16, 16), layers=1, latent=16)
DECODER = TEXT | dict(layers=1)


def tower(seed: int = 0, **changes) -> VQTower:
    """Return a tower whose vectors are latents of some images, so that images have different codes."""
    torch.manual_seed(seed)
    visual = VQTower(VQCfg(**TINY | changes), 32, 4, 16)
    visual.vq.set_codebook(visual.vq.latents(2 * bright(8) - 1).flatten(0, 1)[::8 * 64 // 24][:24])
    return visual


def captioner(seed: int = 0, quantise: bool = True, **caption_cfg) -> Captioner:
    torch.manual_seed(seed)
    return Captioner(None, dict(image_size=32, patch_size=4, width=16), DECODER, dict(objective="mdc", **caption_cfg),
                     vq_cfg=TINY | dict(quantise=quantise))


def bright(n: int) -> torch.Tensor:
    """Images in [0, 1] of different colours: the codes of noise would all be alike."""
    return torch.nn.functional.interpolate(torch.rand(n, 3, 6, 6, generator=seeded(1)), size=(32, 32), mode="bilinear")


def normalised(x: torch.Tensor, visual: VQTower) -> torch.Tensor:
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (visual.image_mean, visual.image_std))
    return (x - mean) / std


def test_a_code_is_the_nearest_vector_row_by_row_whatever_normalised_the_image():
    visual, x = tower(), bright(3)
    latents = visual.vq.quant_conv(visual.vq.encoder(2 * x - 1))  # [B, C, h, w]
    expected = (latents.flatten(2).mT[:, :, None] - visual.vq.vectors).square().sum(3).argmin(2)
    assert len(expected.unique()) > 3
    for mean, std in ((visual.image_mean, visual.image_std), ((0.5, 0.4, 0.3), [0.2, 0.5, 0.9])):
        visual.image_mean, visual.image_std = mean, std
        assert torch.equal(visual.codes(normalised(x, visual)), expected)


def test_codes_do_not_depend_on_autocast_batch_mode_or_saving():
    visual = tower()
    image = normalised(bright(8), visual)
    expected = visual.codes(image)
    assert len(expected.unique()) > 3
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert torch.equal(visual.codes(image), expected)
            assert visual.latents(image).dtype == torch.float32
    assert torch.equal(torch.cat([visual.codes(x[None]) for x in image]), expected)
    assert torch.equal(visual.train().codes(image), visual.eval().codes(image))
    other = tower(seed=1)
    assert not torch.equal(other.codes(image), expected)
    other.load_state_dict(visual.state_dict())
    assert torch.equal(other.codes(image), expected)


@pytest.mark.parametrize("quantise", [True, False])
def test_a_hidden_code_leaves_its_place_alone(quantise):
    visual = tower(quantise=quantise).eval()
    a, b = normalised(bright(2), visual).split(1)
    masked = torch.zeros(1, 64, dtype=torch.bool)
    masked[0, [3, 9, 50]] = True
    plain, hidden, other = visual(a)[1], visual(a, masked)[1], visual(b, masked)[1]
    assert (plain != hidden).any(-1).nonzero()[:, 1].tolist() == [3, 9, 50]
    assert torch.equal(hidden[masked], other[masked]) and not torch.equal(hidden, other)
    assert not torch.equal(hidden[0, 3], hidden[0, 9])
    assert torch.equal(visual(a, torch.zeros_like(masked))[1], plain)
    assert_close(visual(a, masked)[0], hidden.mean(1))


def test_condition_masking_hides_codes_behind_the_towers_mask_and_guidance_without_classifier_behind_zeros():
    image = normalised(bright(2), tower())
    masked = torch.zeros(2, 64, dtype=torch.bool)
    masked[:, 5] = True
    learned, zeros = (captioner(condition_drop=1.0, condition_mask=0.5, condition_zeros=z) for z in (False, True))
    assert torch.equal(learned.encode_image_tokens(image, masked), learned.visual(image, masked)[1])
    assert not hasattr(learned, "no_patch")  # a parameter without a gradient would stop DDP
    tokens = zeros.encode_image_tokens(image, masked)
    assert not tokens[masked].any() and torch.equal(tokens[~masked], zeros.visual(image)[1][~masked])
    CaptionLoss()(**learned.train()(image, captions([9, 10]))).backward()
    assert learned.visual.embedding.grad[-1].any()


def test_training_on_codes_is_one_graph():
    """As --torchcompile makes it, masked conditions included."""
    torch._dynamo.reset()
    model, found = captioner(condition_drop=0.5, condition_mask=0.3).train(), []
    image, batch = normalised(bright(4), model.visual), model.prepare(captions([5, 6, 7, 8]))
    for network in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        loss = CaptionLoss()(**network(image, batch))
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters())])
    assert_close(*found, atol=1e-5, rtol=1e-4)


def test_the_latent_control_is_a_linear_map_of_the_same_latents():
    visual = tower(quantise=False)
    image = normalised(bright(2), visual)
    places = (visual.row_embedding[:, None] + visual.column_embedding).flatten(0, 1)
    tokens = visual.latents(image) / visual.vq.vectors.std() @ visual.embedding[:-1] + places
    assert_close(visual(image)[1], torch.nn.functional.layer_norm(tokens, (16,)))
    assert visual.vq.state_dict().keys() == tower().vq.state_dict().keys()  # one vq.pt serves both


def test_a_file_of_a_vq_vae_alone_gives_that_and_leaves_the_rest_to_the_seed():
    weights = {name: weight for name, weight in captioner(seed=7).state_dict().items() if name.startswith(PREFIX)}
    models = [captioner(seed) for seed in (0, 0, 1)]
    for model in models:
        model.load_state_dict(weights)
    one, same, other = (model.state_dict() for model in models)
    assert holds(one, weights) and holds(other, weights) and equal(one, same)
    assert not torch.equal(one["text.output.weight"], other["text.output.weight"])
    visual = models[0].visual  # the embedding begins with the vectors, as they are of one width
    cosine = torch.nn.functional.cosine_similarity(visual.embedding[:-1], visual.vq.vectors)
    assert_close(cosine, torch.ones(24))
    assert_close(visual.embedding.std(), torch.tensor(0.25), atol=0.05, rtol=0)


def test_the_papers_model_has_122_million_trainable_parameters():
    """Sec. "Implementation Details": 18 blocks of width 512, K = 2886 codes, 32 x 32 of them for 256 x 256 pixels."""
    open_clip_mdc.register()
    config = open_clip.get_model_config("MCD-VQ-ViT-f8-mcs")
    config.pop("custom_text")
    with torch.device("meta"):
        model = Captioner(**config)
    assert abs(sum(p.numel() for p in model.parameters() if p.requires_grad) - 122e6) < 1e6
    assert model.visual.embedding.shape == (2887, 256) and len(model.text.blocks) == 18
    assert len(model.visual.row_embedding) == len(model.visual.column_embedding) == 32


def test_locking_freezes_the_embedding_too():
    model = captioner()
    model.lock_image_tower()
    assert not any(p.requires_grad for p in model.visual.parameters())
    model.lock_image_tower(unlocked_groups=1)
    assert all(p.requires_grad != name.startswith("vq.") for name, p in model.visual.named_parameters())
    exempt = model.no_weight_decay()
    assert {"visual.row_embedding", "visual.column_embedding"} <= exempt & dict(model.named_parameters()).keys()


def problem(*flags) -> str | None:
    open_clip_mdc.register()
    return check_flags.find_problem(train.parse([
        "--model=MCD-VQ-ViT-Ti-8", "--precision=fp32", "--dataset-type=synthetic", "--train-num-samples=64",
        *map(str, flags)]))


def test_training_whose_codes_would_mean_nothing_is_refused_in_one_line(tmp_path):
    file = tmp_path / "vq.pt"
    torch.save(tower().vq.state_dict(), file)
    assert "its VQ-VAE is untrained. Train one by open_clip_mdc vq" in problem()
    for precision in ("pure_bf16", "fp16"):
        assert "a VQ-VAE in 16 bit gives other codes" in problem("--pretrained", file, "--precision", precision)
    assert problem("--pretrained", file, "--precision", "amp_bf16") is None


@pytest.mark.parametrize("saved, flags, resumes", [
    ("epoch_1.pt", (), True), ("epoch_latest.pt", ("--save-most-recent",), True),
    ("epoch_1.pt", ("--save-most-recent",), True), ("vq.pt", (), False)])
def test_a_run_is_resumed_with_the_vq_vae_that_its_checkpoint_holds(saved, flags, resumes, tmp_path):
    flags = ("--logs", tmp_path, "--name", "run", "--resume", "latest", *flags)
    assert "its VQ-VAE is untrained" in problem(*flags)
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    assert "its VQ-VAE is untrained" in problem(*flags)
    (tmp_path / "run/checkpoints" / saved).touch()
    assert (problem(*flags) is None) == resumes


def test_a_missing_diffusers_is_one_line(monkeypatch):
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    assert "needs diffusers: pip install 'open_clip_mdc[vq]'" in refused(ValueError, tower)


@pytest.mark.parametrize("quantise", [True, False])
def test_the_tower_is_a_graph_that_needs_only_torch_and_no_other_librarys_vit(quantise):
    model = captioner(quantise=quantise).eval()
    image = normalised(bright(3), model.visual)
    feature, tokens = conversion.exported_program(model).module()(image)
    assert_close(tokens, model.encode_image_tokens(image))
    assert_close(feature, model.encode_image(image))
    for convert in (conversion.timm_model, conversion.clip_vision_model):
        assert "VQTower, which no other library has" in refused(ValueError, convert, model.visual)


def test_an_image_need_not_be_square():
    visual = VQTower(VQCfg(**TINY), (16, 32), 4, 16)
    assert visual(images(2)[:, :, :16])[1].shape == (2, 32, 16) and visual.image_size == (16, 32)
