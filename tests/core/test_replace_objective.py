"""Claims about models that are trained by mask-and-replace diffusion."""


import pytest
import torch
from conftest import VOCAB, captions, images, seeded, tiny_captioner
from torch.testing import assert_close

from open_clip_mdc.objectives.loss import CaptionLoss
from open_clip_mdc.text.packing import pack
from open_clip_mdc.text.special_tokens import valid_tokens


def test_an_absorbing_model_has_the_loss_and_gradient_of_mdc():
    """The same captions with the same tokens masked at the same t, by either objective's row, in float64 to 1e-12."""
    text, u = captions([5, 9, 12], seed=1), torch.tensor([0.31, 0.5, 0.777], dtype=torch.float64)
    models = [tiny_captioner(objective, seed=3, t_min=0.0, length_head=False).double().train()
              for objective in ("mcd-absorbing", "mdc")]
    corrupted = models[0].corrupt(text, u, seeded(0))
    t = (100 * u).ceil() / 100
    assert_close(corrupted.t.double(), t)
    results = []
    for model, weight in zip(models, (corrupted.weight, corrupted.loss_mask / t[:, None]), strict=True):
        loss = CaptionLoss()(**model(images(3).double(), pack(text, corrupted._replace(weight=weight), VOCAB)))
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    assert_close(*results, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("objective", ["mcd", "mcd-absorbing", "mcd-replace"])
def test_the_auxiliary_loss_joins_in_training_only(objective):
    """T lambda_t -log p(x_0 | x_t) at every asked token, lambda_t = w (2 - (t - 1)/T), against the logits of all."""
    text, image = captions([5, 9, 12], seed=1), images(3)
    plain, model = (tiny_captioner(objective, t_min=0.0, aux_weight=weight) for weight in (0.0, 0.01))
    corrupted = plain.corrupt(text, torch.tensor([0.01, 0.5, 0.777], dtype=torch.float64))
    prepared = pack(text, corrupted, VOCAB)
    without, validated = (m(image, prepared)["token_nll"] for m in (plain, model))
    assert torch.equal(without, validated)
    trained = model.train()(image, prepared)["token_nll"]
    logits = plain.logits(image, corrupted.text, valid_tokens(text, VOCAB))[corrupted.loss_mask]
    nll = torch.nn.functional.cross_entropy(logits, text[corrupted.loss_mask], reduction="none")
    factor = 0.01 * (2 - (torch.tensor([1, 50, 78])[corrupted.loss_mask.nonzero()[:, 0]] - 1) / 100)
    assert_close(trained - without, factor * nll, atol=1e-5, rtol=1e-5)


def test_a_decoder_that_is_told_the_time_begins_as_one_that_is_not():
    """Both have the same weights and random numbers.

    A checkpoint without a time embedding loads and gives the same outputs.
    """
    text, image = captions([5, 9, 12], seed=1), images(3)
    plain, told = (tiny_captioner("mcd", t_min=0.0, time_embedding=on) for on in (False, True))
    fresh = tiny_captioner("mcd", seed=1, t_min=0.0, time_embedding=True)
    fresh.load_state_dict(plain.state_dict())
    prepared = plain.prepare(text)
    expected = plain(image, prepared)["token_nll"]
    for model in (told, fresh):
        assert torch.equal(model(image, prepared)["token_nll"], expected)
    torch.nn.init.normal_(told.text.time_embedding.weight)
    assert not torch.equal(told(image, prepared)["token_nll"], expected)


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
    time, inferred = torch.tensor([7, 70, 100]), torch.tensor([-(-300 // (n - 1)) for n in lengths])
    for steps, given in ((time, [time]), (inferred, [])):
        together = model.token_logits(image_kv, lengths)(masked, predicted, *given).unflatten(0, (3, 3))
        for i, n in enumerate(lengths):
            plain = tiny_captioner("mcd-absorbing", t_min=0.0)
            plain.text.positional_embedding.data += model.text.time_embedding.weight[steps[i]].data
            kv = plain.text.project_image(plain.encode_image_tokens(image[i:i + 1]))
            expected = plain.token_logits(kv, [n])(masked[i:i + 1, :n], torch.arange(1, 4))
            assert_close(together[i], expected, atol=1e-4, rtol=1e-4)
