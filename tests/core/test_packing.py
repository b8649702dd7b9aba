"""Claims about packed batches, and about training without waits for the device.

These tests need no GPU. That nothing waits for one is shown by running on the meta device, which has no values to wait
for.
"""

import open_clip
import pytest
import torch
from conftest import LENGTH, VOCAB, captions, images, seeded, tiny_captioner
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, lengths
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import open_clip_mdc
from open_clip_mdc.integration.factory import OpenCLIPCaptioner as Captioner
from open_clip_mdc.models.decoder import pad, unpad
from open_clip_mdc.objectives import loss as loss_module
from open_clip_mdc.objectives.loss import CaptionLoss
from open_clip_mdc.text.packing import Captions, NoisedCaptions, pack, pack_tokens, pad_to_bucket, predictor_index
from open_clip_mdc.text.special_tokens import target_tokens, valid_tokens

OBJECTIVES = ["mdc", "arc", "cappa", "mcd-replace", "block-diffusion"]


def training_step(model: Captioner, image: torch.Tensor, text: Captions | torch.Tensor) -> None:
    CaptionLoss()(**model(image, text)).backward()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_size_depends_on_values_on_the_device(objective):
    """Meta tensors have none: .item(), nonzero and boolean indexing raise."""
    with torch.device("meta"):
        model = tiny_captioner(objective).train()
    prepared = model.prepare(captions([2, 5, 12, 7, 3])).to("meta")
    training_step(model, images(5).to("meta"), prepared)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_one_graph_serves_captions_of_all_lengths(objective):
    """fullgraph: nothing breaks it. Two compilations: the first batch's sizes, then any."""
    model, compiled = tiny_captioner(objective).train(), []
    torch._dynamo.reset()
    compiled_model = torch.compile(model, fullgraph=True, backend=lambda graph, inputs: compiled.append(
        graph) or graph.forward)
    for sizes in torch.randint(3, 13, (25, 16), generator=seeded(0)).tolist():
        prepared, image = model.prepare(captions(sizes)), images(16)
        training_step(compiled_model, image, prepared)
        assert_close(compiled_model(image, prepared)["token_nll"], model(image, prepared)["token_nll"])
    assert len(compiled) <= 2


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_chunks_of_the_vocabulary_loss_change_nothing(objective, monkeypatch):
    model = tiny_captioner(objective).train()
    prepared, image = model.prepare(captions([2, 5, 12, 7, 3, 12, 12])), images(7)
    results = []
    for rows in (4096, 5, 1):
        monkeypatch.setattr(loss_module, "LOSS_ROWS", rows)
        out = model(image, prepared)
        gradients = torch.autograd.grad(CaptionLoss()(**out), list(model.parameters()))
        results.append([out["token_nll"], *gradients])
    for result in results[1:]:
        assert_close(result, results[0])


def test_chunks_hold_the_logits_of_one_chunk_only(monkeypatch):
    monkeypatch.setattr(loss_module, "LOSS_ROWS", 4)
    model, rows = tiny_captioner("arc").train(), []
    model.text.output.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    training_step(model, images(5), model.prepare(captions([12] * 5)))
    assert max(rows) == 4 and sum(rows) == 2 * 5 * 11  # once forward, once more for the gradient


def test_a_text_prepared_beforehand_or_by_forward_gives_the_same_loss():
    model = tiny_captioner()
    text, image, losses = captions([4, 9, 12]), images(3), []
    for prepare in (lambda x: x, model.prepare):
        model.seed_t(0)
        torch.manual_seed(0)
        losses.append(CaptionLoss()(**model(image, prepare(text))))
    assert torch.equal(*losses)


@examples(150)
@given(lengths, st.sampled_from((None, 16)), st.data())
def test_packing_loses_nothing_and_its_masks_follow_the_valid_tokens(lengths, multiple, data):
    text = captions(lengths)
    valid = valid_tokens(text, VOCAB)
    causal = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))))
    packed = pack_tokens(text, valid, causal, multiple)
    longest = multiple or max(lengths)
    assert packed.valid.shape == (len(lengths), longest) and packed.valid.sum(1).tolist() == lengths
    assert packed.padded == (multiple is not None or min(lengths) < max(lengths))
    assert packed.position.tolist() == [i for n in lengths for i in range(n)]
    padded = pad(packed.token[:, None].float(), packed).squeeze(-1)
    assert torch.equal(padded[packed.valid].long(), text[valid]) and not padded[~packed.valid].any()
    assert torch.equal(unpad(padded[..., None], packed).squeeze(-1).long(), packed.token)

    target = target_tokens(text, VOCAB)
    asked = target & (torch.rand(text.shape) < 0.7)
    row, position = asked.nonzero().unbind(1)  # predicted by the token itself, or by the one before
    start = valid.flatten().cumsum(0)[::LENGTH] - 1
    assert torch.equal(predictor_index(asked, valid, causal), start[row] + position - causal[row].long())
    weight = torch.rand(text.shape) * asked
    prepared = pack(text, NoisedCaptions(text, asked, weight, target, causal, torch.ones(len(text))), VOCAB)
    assert_close(prepared.sum_rows(prepared.predicted.weight), weight.sum(1))
    assert prepared.num_target.tolist() == [n - 1 for n in lengths]


@examples(60)
@given(st.lists(st.integers(1, 77), min_size=1, max_size=30))
def test_numbers_of_tokens_are_rounded_up_to_few_by_repeating_the_last_token_at_its_place(lengths):
    valid = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    packed = pack_tokens(torch.randint(9, valid.shape), valid, False, 16)
    found, count = pad_to_bucket(packed), sum(lengths)
    for x, y in zip(found[:3], packed[:3], strict=True):
        assert torch.equal(x[:count], y) and (x[count:] == y[-1]).all()
    size = len(found.token)
    assert count <= size <= max(-(-count // 16) * 16, count * 1.125) and size % (2 ** (size.bit_length() - 4)) == 0
    assert found[3:] == packed[3:]


def config_of(name: str) -> dict:
    open_clip_mdc.register()
    config = open_clip.get_model_config(name)
    del config["custom_text"]
    return config


def step_flops(config: dict, lengths: list[int]) -> int:
    with torch.device("meta"):
        model = Captioner(**config).train()
    text = torch.full((len(lengths), 77), 5)
    text[:, 0] = model.vocab_size - 2
    text[range(len(lengths)), torch.tensor(lengths) - 1] = model.vocab_size - 1
    prepared = model.prepare(text).to("meta")
    with FlopCounterMode(display=False) as counter:
        training_step(model, torch.empty(len(lengths), 3, 224, 224, device="meta"), prepared)
    return counter.get_total_flops()


def test_multiplications_grow_with_the_real_tokens_and_not_with_the_longest_caption():
    """Parallel decoding, so that all target tokens are asked and chance has no say. One layer a tower, for speed."""
    config = config_of("Parallel-ViT-B-32")
    config["vision_cfg"]["layers"] = config["text_cfg"]["layers"] = 1
    even, uneven = step_flops(config, [16] * 8), step_flops(config, [8] * 7 + [72])
    assert uneven == pytest.approx(even, rel=0.02)  # as many tokens, as only attention pads to the longest
    steps = [step_flops(config, [n] * 8) for n in (16, 32, 48)]
    assert steps[2] - steps[1] == pytest.approx(steps[1] - steps[0], rel=0.05)


def test_a_step_of_b_16_takes_no_more_multiplications_than_clips():
    """At CC12M's 17 tokens, whole models."""
    ours = step_flops(config_of("MDC-ViT-B-16"), [17] * 4)
    with torch.device("meta"):
        clip = open_clip.model.CLIP(**open_clip.get_model_config("ViT-B-16"), output_dict=True).train()
        with FlopCounterMode(display=False) as counter:
            out = clip(torch.empty(4, 3, 224, 224), torch.zeros(4, 77, dtype=torch.long))
            (out["image_features"] @ out["text_features"].T).sum().backward()
    assert ours <= 1.02 * counter.get_total_flops()


def test_projecting_the_image_copies_nothing_it_need_not():
    """Non-contiguous patch tokens would be copied, and the bias added apart, in each of the layers."""
    class Count(TorchDispatchMode):
        kernels = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            out = operator(*args, **(kwargs or {}))
            self.kernels += operator.overloadpacket.__name__ in ("addmm", "mm", "clone", "copy_", "add", "_to_copy")
            return out

    model = tiny_captioner(layers=12)
    image_embs = model.encode_image_tokens(images(2))
    with torch.no_grad(), Count() as count:
        model.text.project_image(image_embs)
    assert count.kernels <= 12
