"""Claims about models that are trained by mask-and-replace diffusion."""
import math

import pytest
import torch
from conftest import VOCAB, captions, images, seeded, tiny_captioner

from open_clip_mdc.objectives.registry import OBJECTIVES
from open_clip_mdc.text.packing import pack


def loss(out: dict[str, torch.Tensor]) -> torch.Tensor:
    return (out["token_weight"] * out["token_nll"]).sum() / out["num_target"].sum()


def test_an_absorbing_model_has_the_loss_and_gradient_of_mdc():
    """The same captions with the same tokens masked at the same t, by either objective's row, in float64 to 1e-12."""
    text, image = captions([5, 9, 12], seed=1), images(3).double()
    row = OBJECTIVES["mcd-absorbing"]
    losses, gradients = [], []
    for objective in ("mcd-absorbing", "mdc"):
        model = tiny_captioner(objective, seed=3, t_min=0.0, length_head=False).double().train()
        corrupted = row.corrupt(text, VOCAB, model.caption_cfg, torch.tensor([0.31, 0.5, 0.777], dtype=torch.float64),
                                seeded(0))
        assert corrupted.t.tolist() == pytest.approx([0.31, 0.5, 0.78])
        if objective == "mdc":
            corrupted = corrupted._replace(weight=corrupted.loss_mask / torch.tensor(
                [[0.31], [0.5], [0.78]], dtype=torch.float64))
        value = loss(model(image, pack(text, corrupted, VOCAB)))
        value.backward()
        losses.append(value.item())
        gradients.append([p.grad for p in model.parameters()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    for ours, mdcs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, mdcs, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("objective", ["mcd", "mcd-absorbing", "mcd-replace"])
def test_the_auxiliary_loss_joins_in_training_only(objective):
    """T lambda_t -log p(x_0 | x_t) at every asked token, lambda_t = w (2 - (t - 1)/T), against the logits of all."""
    text, image, weight = captions([5, 9, 12], seed=1), images(3), 0.01
    plain = tiny_captioner(objective, t_min=0.0)
    corrupted = plain.corrupt(text, torch.tensor([0.01, 0.5, 0.777], dtype=torch.float64))
    prepared = pack(text, corrupted, VOCAB)
    model = tiny_captioner(objective, t_min=0.0, aux_weight=weight)
    without, validated = (m(image, prepared)["token_nll"] for m in (plain, model))
    assert torch.equal(without, validated)
    trained = model.train()(image, prepared)["token_nll"]
    nll = -plain.logits(image, corrupted.text, corrupted.target | (text == VOCAB - 2)).log_softmax(-1).gather(
        -1, text[..., None]).squeeze(-1)
    factor = weight * (2 - (torch.tensor([[1], [50], [78]]) - 1) / 100)
    torch.testing.assert_close(trained - without, (factor * nll)[corrupted.loss_mask], atol=1e-5, rtol=1e-5)


def test_a_decoder_that_is_told_the_time_begins_as_one_that_is_not():
    """Both have the same weights and random numbers.

    A checkpoint without a time embedding loads and gives the same outputs.
    """
    text, image = captions([5, 9, 12], seed=1), images(3)
    plain, told = (tiny_captioner("mcd", t_min=0.0, time_embedding=on) for on in (False, True))
    prepared = plain.prepare(text)
    assert torch.equal(plain(image, prepared)["token_nll"], told(image, prepared)["token_nll"])
    torch.nn.init.normal_(told.text.time_embedding.weight)
    assert not torch.equal(plain(image, prepared)["token_nll"], told(image, prepared)["token_nll"])
    fresh = tiny_captioner("mcd", seed=1, t_min=0.0, time_embedding=True)
    fresh.load_state_dict(plain.state_dict())
    assert torch.equal(plain(image, prepared)["token_nll"], fresh(image, prepared)["token_nll"])


@pytest.mark.parametrize("lengths", [[5, 9, 12], [12, 12, 12]])
def test_training_and_decoding_tell_the_decoder_the_same_time(lengths):
    """With padding and without: logits of a batch at a step are those of captions alone with its vector added."""
    model = tiny_captioner("mcd-absorbing", t_min=0.0, time_embedding=True)
    torch.nn.init.normal_(model.text.time_embedding.weight)
    text, image = captions(lengths), images(3)
    masked = text.clone()
    masked[:, 1:4] = VOCAB
    image_kv = model.text.project_image(model.encode_image_tokens(image))
    predicted = (masked == VOCAB).flatten().nonzero()[:, 0]
    time = torch.tensor([7, 70, 100])
    together = model.token_logits(image_kv, lengths)(masked, predicted, time).unflatten(0, (3, 3))
    inferred = model.token_logits(image_kv, lengths)(masked, predicted).unflatten(0, (3, 3))
    steps = [math.ceil(100 * 3 / (n - 1) - 1e-9) for n in lengths]
    plain = tiny_captioner("mcd-absorbing", t_min=0.0)
    for i, n in enumerate(lengths):
        kv = plain.text.project_image(plain.encode_image_tokens(image[i:i + 1]))
        for got, step in ((together, int(time[i])), (inferred, steps[i])):
            position = plain.text.positional_embedding.data.clone()
            plain.text.positional_embedding.data += model.text.time_embedding.weight[step].data
            expected = plain.token_logits(kv, [n])(masked[i:i + 1, :n], torch.arange(1, 4))
            torch.testing.assert_close(got[i], expected, atol=1e-4, rtol=1e-4)
            plain.text.positional_embedding.data = position
