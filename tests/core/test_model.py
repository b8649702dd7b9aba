"""Claims about the captioner: what it computes, what it may see, what it costs."""
import copy

import open_clip
import pytest
import torch
from conftest import TEXT, VISION, VOCAB, captions, images, refused, seeded, tiny_captioner
from likelihoods import naive_decoder
from torch.testing import assert_close

import open_clip_mdc
from open_clip_mdc.integration.factory import OpenCLIPCaptioner as Captioner
from open_clip_mdc.integration.factory import model_class
from open_clip_mdc.objectives.loss import CaptionLoss
from open_clip_mdc.text.packing import pack
from open_clip_mdc.text.special_tokens import mask_id, valid_tokens

OBJECTIVES = ["mdc", "arc", "cappa"]


def naive_nll(model, image, text, corrupted):
    """-log p of every asked token, one caption at a time: [B, L]."""
    nll = torch.zeros(text.shape)
    causal = torch.as_tensor(corrupted.causal).expand(len(text)).tolist()
    for b, n in enumerate(valid_tokens(text, VOCAB).sum(1).tolist()):
        embs = model.encode_image_tokens(image[b:b + 1])[0]
        hidden, _ = naive_decoder(model.text, corrupted.text[b, :n], embs, causal[b])
        for i in corrupted.loss_mask[b].nonzero()[:, 0].tolist():
            nll[b, i] = -model.text.output(hidden[i - causal[b]]).log_softmax(0)[text[b, i]]
    return nll


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("lengths", [[2, 5, 12, 7, 3], [9, 9, 9, 9, 9], [12, 12, 12, 12, 12]])
def test_packed_forward_equals_one_caption_at_a_time_in_values_and_gradients(objective, lengths):
    model = tiny_captioner(objective, t_min=0.0)
    text, image = captions(lengths), images(5)
    corrupted = model.corrupt(text)
    out = model(image, pack(text, corrupted, VOCAB))
    expected = naive_nll(model, image, text, corrupted)[corrupted.loss_mask]
    assert_close(out["token_nll"], expected, atol=1e-5, rtol=1e-5)
    found, by_hand = (torch.autograd.grad(CaptionLoss()(**out | {"token_nll": nll}), list(model.parameters()),
                                          retain_graph=True) for nll in (out["token_nll"], expected))
    assert_close(found, by_hand, atol=1e-5, rtol=1e-4)


def test_logits_of_a_text_whose_end_cannot_be_told_are_refused():
    """A masked EOT and padding behind it: attending the padding would change every logit without a word."""
    model = tiny_captioner()
    text, valid = captions([6, 12]), valid_tokens(captions([6, 12]), VOCAB)
    masked = text.clone()
    masked[0, 5] = mask_id(VOCAB)
    assert "text 0 has no EOT and ends in padding" in refused(ValueError, model.logits, images(2), masked)
    model.logits(images(2), masked, valid)
    text[1, 11] = mask_id(VOCAB)  # full width: nothing is ambiguous
    assert_close(model.logits(images(2), text), model.logits(images(2), text, valid))


def test_gap_feature_is_the_mean_of_the_patch_tokens():
    model = tiny_captioner()
    tokens = model.encode_image_tokens(images(2))
    assert tokens.shape == (2, 16, 64)
    for feature in (model.encode_image(images(2)), model.visual(images(2))[0]):  # and upstream's own pooling
        assert_close(feature, tokens.mean(1))
    assert_close(model.encode_image(images(2), normalize=True).norm(dim=-1), torch.ones(2))


def reduced(name: str) -> Captioner:
    """A packaged config at one layer a tower, 32 or 64 px and 400 tokens: the same code path, in seconds."""
    config = copy.deepcopy(open_clip_mdc.packaged_configs()[name])
    config.pop("custom_text")
    config["vision_cfg"].update(layers=1, image_size=2 * config["vision_cfg"]["patch_size"])
    if "condition_drop" in config["caption_cfg"]:
        config["caption_cfg"].update(condition_drop=0.5, condition_mask=0.5)  # of 8 images none might be chosen
    config["text_cfg"].update(layers=1, vocab_size=400)
    torch.manual_seed(0)
    return model_class(Captioner)(**config)


@pytest.mark.parametrize("name", sorted(
    name for name, config in open_clip_mdc.packaged_configs().items() if "caption_cfg" in config))
def test_every_parameter_of_every_config_gets_a_gradient(name):
    model = reduced(name)
    text = torch.nn.functional.pad(torch.randint(1, 300, (8, 12), generator=seeded(0)), (0, 65))
    text[:, 0], text[:, 11] = model.vocab_size - 2, model.vocab_size - 1
    loss = model.caption_loss(vars(model.caption_cfg), open_clip.ClipLoss)
    loss(**model(images(8, model.visual.image_size[0]), text)).backward()
    for parameter, p in model.named_parameters():
        if parameter.startswith("visual.vq."):  # frozen, and never in an optimizer
            assert p.grad is None and not p.requires_grad
            continue
        assert p.grad is not None and p.grad.abs().sum() > 0, f"no gradient for {parameter}"
    assert "vit" in name.lower()  # upstream picks Adam's beta2 by it


def test_names_do_not_hide_weights_from_weight_decay():
    for name, p in tiny_captioner().named_parameters():
        if p.ndim >= 2:
            assert not any(part in name for part in ("ln", "bn", "bias", "logit_scale")), name


def test_grad_checkpointing_changes_no_number():
    text, image = captions([4, 12, 7]), images(3)
    grads = []
    for enable in (False, True):
        model = tiny_captioner().train()
        model.set_grad_checkpointing(enable)
        CaptionLoss()(**model(image, pack(text, model.corrupt(text, generator=seeded(0)), VOCAB))).backward()
        grads.append([p.grad for p in model.parameters()])
    assert_close(*grads)


def test_bad_caption_cfg_is_refused_in_one_line():
    for wrong in (dict(objective="bert"), dict(t_min=0.9, t_max=0.5), dict(t_min=0.0, t_max=0.0), dict(loss_weight=1)):
        assert "caption_cfg" in refused(ValueError, tiny_captioner, **wrong)
    assert "embed_dim" in refused(ValueError, Captioner, 65, VISION, TEXT, dict(objective="mdc"))


@pytest.mark.parametrize("precision", ["bf16", "pure_bf16", "fp32"])
def test_low_precision_is_close_to_full(precision):
    open_clip_mdc.register()
    full = open_clip.create_model("MDC-ViT-Ti-8")
    model = open_clip.create_model("MDC-ViT-Ti-8", precision=precision)
    model.load_state_dict(full.state_dict())
    text = torch.randint(1, 300, (4, 77), generator=seeded(0))
    text[:, 0], text[:, 20:] = full.vocab_size - 2, full.vocab_size - 1
    prepared = full.prepare(text)
    got = model(images(4).to(open_clip.get_input_dtype(precision)), prepared)["token_nll"]
    assert_close(got, full(images(4), prepared)["token_nll"], atol=0.1, rtol=0.02)  # float32, too
