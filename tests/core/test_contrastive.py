"""Claims about captioners that learn to contrast, too."""
import math
import shutil
from argparse import Namespace
from pathlib import Path

import open_clip
import pytest
import torch
import torch.nn.functional as F
from benchmark.models import captioned_webdataset, evaluate
from conftest import TEXT, VISION, captions, images, json_lines, run_tool
from open_clip import ClipLoss, CustomTextCLIP
from open_clip.loss import SigLipLoss
from training import equal, holds, losses, open_clip_train, open_clip_train_each, run_ranks, train_flags, weights

import open_clip_mdc
from open_clip_mdc.extras.contrastive import ContrastiveLoss, OpenCLIPContrastiveCaptioner
from open_clip_mdc.integration.check_flags import find_captioner_problem
from open_clip_mdc.integration.factory import OpenCLIPCaptioner
from open_clip_mdc.models.captioner import Captioner
from open_clip_mdc.objectives.loss import CaptionLoss

MODEL = "MDC-ViT-Ti-8-contrastive"


def tiny(objective="mdc", weight=1.0, text=TEXT, **more):
    torch.manual_seed(0)
    return OpenCLIPContrastiveCaptioner(24, VISION, text, dict(objective=objective, contrastive_weight=weight), **more)


def clip_of(model) -> CustomTextCLIP:
    """OpenCLIP's own model, GAP its pooling, with the same weights."""
    clip = CustomTextCLIP(24, VISION | {"pool_type": "avg"}, TEXT, output_dict=True).eval()
    clip.visual.load_state_dict(model.visual.state_dict() | {"proj": model.image_projection})
    clip.text.load_state_dict(model.text_tower.state_dict())
    clip.logit_scale.data.copy_(model.logit_scale)
    return clip


def test_the_contrastive_half_is_clips_own_and_what_cosines_say():
    model, image, text = tiny().eval(), images(5), captions([4, 7, 9, 3, 6])
    out, clip = model(image, text), clip_of(model)
    theirs = clip(image, text)
    torch.testing.assert_close({name: out[name] for name in theirs}, theirs)
    torch.testing.assert_close(model.encode_image(image), clip.encode_image(image))
    torch.testing.assert_close(model.encode_text(text, normalize=True), theirs["text_features"])
    ours = ContrastiveLoss(ClipLoss(), 0.25)(**out, output_dict=True)["contrastive_loss"]
    cosines = F.cosine_similarity(model.encode_image(image)[:, None], model.encode_text(text)[None], dim=-1)
    by_hand = -sum(math.log(math.exp(row[i] / 0.07) / sum(math.exp(x / 0.07) for x in row))
                   for table in (cosines, cosines.T) for i, row in enumerate(table.tolist())) / 10
    assert float(ours) == pytest.approx(0.25 * by_hand, rel=1e-5)


@pytest.mark.parametrize("objective", ["mdc", "arc", "complementary"])
def test_the_captions_half_is_the_captioners_to_the_last_bit_from_the_first_weight_on(objective):
    torch.manual_seed(0)
    plain = OpenCLIPCaptioner(64, VISION, TEXT, dict(objective=objective))
    mixed, image, text = tiny(objective), images(5), captions([4, 7, 9, 3, 6])
    assert holds(mixed.state_dict(), plain.state_dict())
    terms = []
    for model, loss in ((plain, CaptionLoss()), (mixed, ContrastiveLoss(ClipLoss(), 3.0))):
        torch.manual_seed(1)
        terms.append(loss(**model(image, text), output_dict=True))
    assert terms[0].keys() < terms[1].keys() == {*terms[0], "contrastive_loss"}
    assert holds(terms[1], terms[0])
    plain.load_state_dict({name: x for name, x in mixed.state_dict().items() if name in plain.state_dict()})


def test_an_image_is_encoded_once_and_the_text_tower_reads_up_to_the_longest_caption():
    model, seen = tiny(text=TEXT | {"context_length": 40}), []
    model.visual.register_forward_hook(lambda *_: seen.append("image"))
    model.text_tower.register_forward_hook(lambda _, args, __: seen.append(args[0].shape))
    model(images(2), captions([4, 7], width=40))
    assert seen == ["image", (2, 16)]
    with pytest.raises(ValueError, match="41 tokens, SOT and EOT included, is longer than this model's context of 40"):
        model.encode_text(torch.zeros(1, 41, dtype=torch.long))


# Rank r takes rows r, r + 2, ... Both have equally many target tokens, so the mean of their means is the mean of all.
RANKS = """
import json, sys, torch, torch.distributed as dist
sys.path[:0] = sys.argv[1:3]
from test_contrastive import gradients
import open_clip_mdc
open_clip_mdc.register(training=True)
dist.init_process_group("gloo")
for kind in ("gathered", "local", "siglip", "alone"):
    found = gradients(kind, dist.get_rank(), 2)
    if dist.get_rank() == 0:
        torch.save(found, f"{sys.argv[3]}/{kind}.pt")
dist.destroy_process_group()
"""


def gradients(kind: str, rank: int = 0, world: int = 1) -> dict[str, torch.Tensor]:
    model = tiny("arc", 0.5, **({"init_logit_bias": -10} if kind == "siglip" else {}))
    flags = dict(rank=rank, world_size=world)
    loss = SigLipLoss(**flags) if kind == "siglip" else ClipLoss(
        local_loss=kind == "local", gather_with_grad=kind != "alone", **flags)
    ddp = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
    image, text = images(8)[rank::world], captions([4, 4, 7, 7, 9, 9, 3, 3])[rank::world]
    sum(ContrastiveLoss(loss, 0.5)(**ddp(image, text), output_dict=True).values()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_two_gloo_processes_have_the_gradients_of_one_with_twice_the_batch(tmp_path):
    run_ranks("python", "-c", RANKS, *map(str, (*Path(__file__).parents[:2], tmp_path)))
    for kind in ("gathered", "local", "siglip"):
        two = torch.load(tmp_path / f"{kind}.pt", weights_only=True)
        torch.testing.assert_close(two, gradients(kind), atol=1e-6, rtol=1e-4)
    alone = torch.load(tmp_path / "alone.pt", weights_only=True)  # why --gather-with-grad is asked for
    torch.testing.assert_close(alone["image_projection"], gradients("gathered")["image_projection"] / 2)


def test_several_processes_need_the_gathered_gradient(monkeypatch):
    open_clip_mdc.register()
    monkeypatch.setenv("WORLD_SIZE", "2")

    def problem(model=MODEL, **flags):
        return find_captioner_problem(Namespace(**dict(model=model, gather_with_grad=False, siglip=False,
                                                       lock_image=False, epochs=1) | flags))

    assert "needs --gather-with-grad" in problem()
    assert problem(gather_with_grad=True) is problem(siglip=True) is None
    assert "-contrastive" in problem("MDC-ViT-Ti-8", siglip=True)


def test_names_give_weights_and_what_cannot_be_is_one_line():
    open_clip_mdc.register()
    assert MODEL in open_clip.list_models()
    for name, like, weight in ((MODEL, "MDC-ViT-Ti-8", 1.0), ("ARC-ViT-B-16-contrastive0.5", "ARC-ViT-B-16", 0.5),
                               ("MDC-ViT-B-32-t0.2-0.9-contrastive2", "MDC-ViT-B-32-t0.2-0.9", 2.0),
                               ("MDC-small-timm-tf_efficientnet_lite0-contrastive",
                                "MDC-small-timm-tf_efficientnet_lite0", 1.0)):
        config, plain = open_clip.get_model_config(name), open_clip.get_model_config(like)
        assert config["caption_cfg"] == plain["caption_cfg"] | {"contrastive_weight": weight}
        assert config["text_cfg"] == plain["text_cfg"]
    assert open_clip.get_model_config("MDC-ViT-B-16-contrastive")["embed_dim"] == 512
    for name in ("ViT-B-32-contrastive", "MDC-ViT-B-32-contrastive0"):
        assert open_clip.get_model_config(name) is None
    with pytest.raises(ValueError, match="contrastive_weight should be .* 0 with condition_drop"):
        open_clip.create_model("MDC-ViT-Ti-8-mcs-contrastive")


# ---- the real command

ACCUMULATE = "--epochs 1 --wd 0.1 --grad-clip-norm 1"


def test_an_accumulated_step_is_the_step_and_the_negatives_are_of_all_its_micro_batches(csv, tmp_path):
    """ARC has no noise, so two micro-batches of 12 are the batch of 24, up to rounding.

    Only `logit_scale` gets the sum of both micro-batches' gradients, as in OpenCLIP. Adam divides by its size.
    """
    arc = dict(data=csv, logs=tmp_path, model="ARC-ViT-Ti-8-contrastive")
    open_clip_train_each(
        train_flags("--batch-size 24", ACCUMULATE, name="whole", **arc),
        train_flags("--batch-size 12 --accum-freq 2", ACCUMULATE, name="parts", **arc),
        train_flags("--batch-size 12", ACCUMULATE, "--siglip", name="siglip", **arc))
    torch.testing.assert_close(weights(tmp_path, 1, "parts"), weights(tmp_path, 1, "whole"), atol=2e-5, rtol=1e-3)
    whole, parts = (losses(tmp_path, name, "Contrastive_loss")[:2] for name in ("whole", "parts"))  # others log, too
    assert whole == pytest.approx(parts, abs=1e-4) and whole[0] > math.log(24)
    bias = weights(tmp_path, 1, "siglip")["logit_bias"]
    loaded = open_clip_mdc.load(tmp_path / "siglip")
    assert bias != -10 and loaded.model.logit_bias == bias
    assert torch.equal(loaded.encode_text([["red"], ["blue"]]), loaded.encode_text(["red", "blue"]))


@pytest.fixture(scope="module")
def trained(scenes, tmp_path_factory):
    """Five epochs of 512 scenes, broken off after four and resumed in another folder."""
    logs = tmp_path_factory.mktemp("contrastive")
    flags = ("--dataset-type webdataset --batch-size 64 --lr 2e-3 --warmup 10 --epochs 5 --val-data",
             scenes / "val/00000.tar")
    where = dict(data=scenes / "train/{00000..00007}.tar", logs=logs, model=MODEL, workers="1")
    open_clip_train(*flags, **where)
    open_clip_train(*flags, "--resume", logs / "run/checkpoints/epoch_4.pt", name="resumed", **where)
    return logs


def test_both_losses_fall_and_a_resumed_run_is_the_unbroken_one(trained):
    for kind in ("Caption_loss", "Contrastive_loss"):
        values = losses(trained, kind=kind)
        assert values[-1] < 0.7 * values[0]
    rows = json_lines(trained / "run/checkpoints/results.jsonl")
    assert rows[-1]["nelbo_per_token"] < rows[0]["nelbo_per_token"]
    assert rows[-1]["clip_val_loss"] < rows[0]["clip_val_loss"] and rows[-1]["image_to_text_R@10"] > 0.3
    assert equal(weights(trained, 5), weights(trained, 5, "resumed"))
    assert weights(trained, 5)["logit_scale"] != pytest.approx(math.log(1 / 0.07))


def test_tasks_of_clip_benchmark_run_by_cosine_and_by_likelihood(trained, scenes, tmp_path, clip_benchmark):
    """The probe has 16 classes, so chance is 6 %. Of 64 images ten are 16 %."""
    pairs = captioned_webdataset(tmp_path / "pairs", {})
    shutil.copy(scenes / "val/00000.tar", pairs / "test/0.tar")
    jobs = {
        "zeroshot_classification": ("wds/probe", scenes / "probe"),
        "image_caption_selection": ("sugar_crepe/swap_att", scenes / "sugarcrepe"),
        "zeroshot_retrieval": ("wds/val", pairs, "--recall_k 10")}
    model = ("--model mdc --pretrained", trained / "run", "--no_amp")
    found = {(task, scorer): evaluate(*model, "--task", task, "--dataset", name, "--dataset_root", root, *more,
                                      "--scorer", scorer)["metrics"]
             for task, (name, root, *more) in jobs.items() for scorer in ("cosine", "heuristic")}
    assert all(metrics.get("scorer", scorer) == scorer for (_, scorer), metrics in found.items())
    assert found["zeroshot_classification", "cosine"]["acc1"] > 0.15
    assert found["zeroshot_classification", "cosine"] != found["zeroshot_classification", "heuristic"]
    assert found["zeroshot_retrieval", "cosine"]["image_retrieval_recall@10"] > 0.3
    assert "image_retrieval_recall@10_blind" in found["zeroshot_retrieval", "heuristic"]


def test_it_still_captions_and_its_export_embeds_alike(trained, tmp_path):
    run_tool(["export", "--pretrained", str(trained / "run"), "--out", str(tmp_path / "export"), "--to open_clip timm"])
    model, export = open_clip_mdc.load(trained / "run"), open_clip_mdc.load(tmp_path / "export")
    assert isinstance(model.model, Captioner)
    text, image = ["a red circle", "a blue square above a green star"], images(2)
    assert all(caption.startswith("a ") for caption in model.caption(list(image)))
    assert torch.equal(model.encode_text(text, normalize=True), export.encode_text(text, normalize=True))
    assert torch.equal(model.encode_image(list(image)), export.encode_image(list(image)))
    torch.testing.assert_close(model.encode_image(list(image)),
                               model.features(list(image)).clone() @ model.model.image_projection.detach())
    with pytest.raises(ValueError, match="has no text embeddings"):
        open_clip_mdc.load("photo").encode_text("a dog")


def test_sigmoid_loss_has_its_bias_and_equals_openclips():
    model, image, text = tiny(init_logit_scale=math.log(10), init_logit_bias=-10), images(3), captions([4, 7, 9])
    out = model(image, text)
    ours = ContrastiveLoss(SigLipLoss())(**out, output_dict=True)["contrastive_loss"]
    cosines = out["image_features"] @ out["text_features"].T
    by_hand = -F.logsigmoid((2 * torch.eye(3) - 1) * (10 * cosines - 10)).sum() / 3
    torch.testing.assert_close(ours, by_hand)
    assert {"logit_scale", "logit_bias"} <= model.state_dict().keys()
