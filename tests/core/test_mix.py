"""Claims about a decoder that learns ARC's rows and MDC's."""
import re
from pathlib import Path

import pytest
import torch
from conftest import VOCAB, captions, complaint_of, images, refused, run_folder, seeded, tiny_captioner, with_weights_of

import open_clip_mdc
from clip_benchmark_ext.flags import Flags, decoding_options, scoring_options
from open_clip_mdc.integration.configs import readings
from open_clip_mdc.objectives.config import CaptionCfg
from open_clip_mdc.objectives.loss import CaptionLoss
from open_clip_mdc.objectives.times import stratified_uniform
from open_clip_mdc.text.packing import pack

U = stratified_uniform(8, 0.3)



def packed(model, text, u=U):
    return pack(text, model.corrupt(text, u, seeded(1)), VOCAB)


def loss_of(model, text):
    """The loss and the gradients of a step in training, with autocast as by default."""
    model.train().zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = CaptionLoss()(**model(images(len(text)), packed(model, text)) | {"length_nll": None})
    loss.backward()
    return [loss, *(p.grad for p in model.text.parameters())]


@pytest.mark.parametrize(("share", "objective"), [(0.0, "mdc"), (1.0, "arc")])
def test_the_ends_of_the_mix_are_mdc_and_arc_to_the_bit(share, objective):
    mix, text = tiny_captioner("mix", autoregressive_share=share), captions([5, 9, 12, 2] * 2)
    assert all(map(torch.equal, loss_of(mix, text), loss_of(with_weights_of(mix, objective), text)))


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_a_share_of_the_rows_is_arcs_and_the_others_are_mdcs_of_stratified_times(share):
    mix, text = tiny_captioner("mix", autoregressive_share=share, t_min=0.0), captions([5, 9, 12, 2] * 2)
    noised, count = mix.corrupt(text, U), int(8 * share)
    assert noised.causal.tolist() == [True] * count + [False] * (8 - count)
    times = noised.t[count:]
    assert not noised.t[:count].any() and ((times * (8 - count)).ceil() == torch.arange(1, 9 - count)).all()
    mdc, read = with_weights_of(mix, "mdc", t_min=0.0), packed(mix, text)
    masked = packed(mdc, text, torch.cat((U[:count], (U[count:] - share) / (1 - share))))
    with torch.no_grad():
        nll = mix(images(8), read)["token_nll"]
        arc, other = with_weights_of(mix, "arc")(images(8)[:count], text[:count]), mdc(images(8), masked)
    causal, chosen = read.predicted.row < count, masked.predicted.row >= count
    assert torch.allclose(nll[causal], arc["token_nll"], atol=2e-6) and (read.predicted.weight[causal] == 1).all()
    assert torch.allclose(nll[~causal], other["token_nll"][chosen], atol=2e-6)
    assert torch.equal(read.predicted.weight[~causal], masked.predicted.weight[chosen])


def test_it_captions_and_scores_both_ways():
    mix, image, text = tiny_captioner("mix", autoregressive_share=0.5), images(3), captions([5, 9, 12])
    arc, mdc = with_weights_of(mix, "arc"), with_weights_of(mix, "mdc")
    for options in ({}, dict(num_beams=2, min_length=3), dict(length=4)):
        assert torch.equal(mix.generate(image, sampler="beam", **options), arc.generate(image, **options))
    unmasked, other, searched = (model.generate(image, length=6) for model in (mix, mdc, arc))
    assert torch.equal(unmasked, other) and not torch.equal(unmasked, searched)
    candidates = torch.stack((text, captions([6, 3, 9], seed=1), captions([4, 4, 4], seed=2)), 1)  # [B, C, L]
    for of_image in (dict(image=image), dict(image=None, blind=mix.encode_image_tokens(image).mean(0))):
        for other, method in ((arc, "autoregressive"), (mdc, "heuristic"), (mdc, "parallel"), (mdc, "monte_carlo")):
            assert torch.equal(mix.log_likelihood(text=candidates, method=method, **of_image),
                               other.log_likelihood(text=candidates, method=method, **of_image)), method
    assert torch.equal(mix.log_likelihood(image, text), mdc.log_likelihood(image, text))


def test_what_a_mix_cannot_do_is_refused_in_one_line(here, photos):
    said = refused(ValueError, CaptionCfg, autoregressive_share=0.25)
    assert "autoregressive_share is 0.25: " in said and " 0 for any other" in said
    assert "it must be 0 to 1" in refused(ValueError, CaptionCfg, objective="mix", autoregressive_share=1.5)
    assert [cfg["autoregressive_share"] for _, cfg in readings("Mix-ViT-Ti-8-arc12.5")] == [0.125]
    for folder, name in (("mix", "Mix-ViT-Ti-8-arc25"), ("arc", "ARC-ViT-Ti-8")):
        run_folder(here / folder, name)
    for order, ways in (("from left to right", ("mix", "mix --min-length 3", "arc --sampler beam",
                                                "mix --sampler beam --temperature 1 --samples 2 --select consensus")),
                        ("most confident tokens first", ("mix --samples 2 --select consensus",
                                                         "mix --sampler confidence"))):
        for words in (f"caption --html c.html --out c.jsonl --pretrained {way}" for way in ways):
            assert not complaint_of(*words.split(), *photos), words
            assert order in Path("c.html").read_text()
            Path("c.jsonl").unlink()
    model = open_clip_mdc.load("mix")
    assert model.caption(photos, length="auto") != model.caption(photos) == model.caption(photos, num_beams=6)
    assert "num_beams is not supported" in refused(ValueError, model.caption, photos, num_beams=2, length=6)


def test_the_flags_of_the_benchmark_choose_the_way():
    cfg = CaptionCfg(objective="mix", autoregressive_share=0.25)
    searched = {"length": "auto", "num_beams": 6, "sampler": "beam"}
    assert decoding_options(None, Flags(), cfg) == decoding_options(None, Flags(sampler="beam"), cfg) == searched
    assert decoding_options(None, Flags(tokens_per_step=2), cfg) == {"length": 15, "tokens_per_step": 2}
    assert decoding_options(None, Flags(caption_length="auto"), cfg) == {"length": "auto", "tokens_per_step": 1}
    assert scoring_options(None, Flags(scorer="autoregressive"), cfg) == {"method": "autoregressive", "alpha": 1.0}
    said = refused(ValueError, decoding_options, None, Flags(sampler="beam"), CaptionCfg())
    assert "read from left to right" in said


def test_settings_that_came_later_change_no_fingerprint_of_a_model_without_them():
    """Names of kept results hold the settings of the first release, as `repr` lists them, and `block_sizes`."""
    assert " ".join(re.findall(r"(\w+)=", repr(CaptionCfg(objective="mix", autoregressive_share=0.5)))) == (
        "objective t_min t_max loss_weight regions length_head time_embedding aux_weight condition_drop condition_mask "
        "condition_zeros block_sizes contrastive_weight")
