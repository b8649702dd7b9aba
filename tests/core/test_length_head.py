"""Claims about p(length | image): it is learnt beside the loss and changes nothing else."""
import math

import pytest
import torch
from conftest import VOCAB, captions, images, refused, seeded, tiny_captioner
from scipy.stats import chisquare
from torch import nn
from training import MAIN, equal, holds, open_clip_train, weights

from open_clip_mdc.decoding import lengths as rules
from open_clip_mdc.decoding.options import Sampling, Unmasking
from open_clip_mdc.decoding.sampling import Decoded
from open_clip_mdc.models.length_head import SCALE, LengthHead, length_nll
from open_clip_mdc.objectives.loss import CaptionLoss
from open_clip_mdc.text.special_tokens import caption_lengths

WITHOUT_HEAD = """
import sys
from open_clip_mdc.integration.patches import configs
configs.ROWS["MDC-*"]["length_head"] = False
from open_clip_mdc.train import main
main(sys.argv[1:])
"""


def features(model, image):
    """Return the input of the head: the mean of the patch tokens, which is the probed feature, and their maximum."""
    tokens = model.encode_image_tokens(image)
    return SCALE / model.length_head.narrowing * torch.cat((model.encode_image(image), tokens.max(1).values), 1)


def opinionated():
    """A model whose head prefers one length or another, image by image."""
    model = tiny_captioner()
    nn.init.normal_(model.length_head.weight, std=model.length_head.narrowing / SCALE, generator=seeded(0))
    model.length_head.weight.data[:, 64:] *= 0.05  # maxima of noise are all alike
    nn.init.normal_(model.length_head.bias, std=0.5, generator=seeded(1))
    return model


def head_logits(model, image):
    return features(model, image) @ model.length_head.weight.T + model.length_head.bias


def preferring(*bias: float):
    """A model whose head gives each image the same logits of lengths, of 0 at first. The others are all but never."""
    model = tiny_captioner()
    model.length_head.weight.data[0] = 1e-10  # trained, as it were
    model.length_head.bias.data = torch.tensor([*bias, *[-99.0] * (11 - len(bias))])
    return model


def lengths_of(model, image, **options):
    return caption_lengths(model.generate(image, **options), VOCAB) - 2


def test_the_head_begins_uniform_and_changes_neither_the_random_numbers_nor_the_other_weights():
    states, models = [], []
    for length_head in (True, False):
        models.append(tiny_captioner(length_head=length_head))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    own, other = (model.state_dict() for model in models)
    assert own.keys() - other.keys() == {"length_head.weight", "length_head.bias"}
    assert holds(own, other)
    nll = length_nll(models[0].length_head(torch.randn(2, 4, 64)), torch.tensor([3.0, 8.0]))
    assert nll.tolist() == pytest.approx([math.log(11)] * 2)  # 0 to 10 tokens in a context of 12


def test_the_loss_is_the_cross_entropy_of_the_true_length_and_reaches_the_head_alone():
    model = opinionated().train()
    out = model(images(3), captions([3, 5, 12]))
    probability = head_logits(model, images(3)).softmax(1)[range(3), [1, 3, 10]]
    torch.testing.assert_close(out["length_nll"], -probability.log(), rtol=1e-4, atol=0)
    terms = CaptionLoss()(**out, output_dict=True)
    assert terms.keys() == {"caption_loss", "length_loss"}
    assert CaptionLoss()(**out) == sum(terms.values())
    terms["length_loss"].backward()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == [
        "length_head.weight", "length_head.bias"]


def test_training_by_the_real_command_gives_bit_for_bit_the_weights_that_it_gives_without_the_head(csv, tmp_path):
    """Gradient clipping, accumulation and autocast included."""
    for name, launcher in (("with", MAIN), ("without", ("python", "-c", WITHOUT_HEAD))):
        open_clip_train("--batch-size 8 --epochs 2 --precision amp_bf16 --grad-clip-norm 0.1 --accum-freq 2", data=csv,
                        logs=tmp_path, name=name, launcher=launcher)
    own, other = (weights(tmp_path, 2, name) for name in ("with", "without"))
    assert all(own.pop(f"length_head.{name}").any() for name in ("weight", "bias")) and equal(own, other)


@pytest.mark.parametrize("width", [128, 768, 1280])
@pytest.mark.parametrize("lr", [5e-4, 1e-3])
def test_the_head_learns_the_distribution_of_lengths_at_every_width_and_is_never_worse_than_uniform(width, lr):
    """This holds from the first step on, with features whose mean is twice their spread.

    Images tell nothing about lengths.
    """
    share = torch.exp(-0.5 * ((torch.arange(76) - 11) / 3.0) ** 2)
    generator = seeded(0)
    mean = 2 * torch.randn(width, generator=generator)
    head, nll = LengthHead(width, 77), []
    optimizer = torch.optim.AdamW(head.parameters(), lr, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.1)
    for _ in range(200):
        number = torch.multinomial(share, 64, replacement=True, generator=generator)
        loss = length_nll(head(mean + torch.randn(64, 3, width, generator=generator)), number + 1.0).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        nll.append(loss.item())
    entropy = torch.distributions.Categorical(share).entropy().item()
    assert max(nll) <= math.log(76) + 1e-4 and sum(nll[-50:]) / 50 < entropy + 0.2


def test_checkpoints_hold_the_weights_of_ten_times_the_features_whatever_the_width():
    """As they did when training saw them so: what was trained then predicts the same and comes back, bit for bit."""
    head, tokens = LengthHead(768, 77), torch.randn(5, 9, 768)
    stored = {"weight": torch.randn(76, 1536), "bias": torch.randn(76)}
    head.load_state_dict(stored)
    expected = nn.functional.linear(10 * torch.cat((tokens.mean(1), tokens.amax(1)), 1), **stored)
    assert head.narrowing > 1 and torch.equal(head(tokens), expected)
    assert equal(head.state_dict(), stored)


def test_auto_is_the_caption_of_highest_length_probability_times_probability_as_of_so_many_tokens(monkeypatch):
    """It is compared with captions of every length, one at a time.

    The empty caption is never chosen, however probable.
    """
    monkeypatch.setattr(rules, "MAX_LENGTHS", 99)
    model, image = opinionated(), images(8)
    model.length_head.bias.data[0] = 50
    logits = head_logits(model, image)
    expected, most_probable = [], []
    for i in range(8):
        log_prob = {n: logits[i, n].item() - logits[i, 1:].logsumexp(0).item() for n in range(1, 11)}
        alone = {n: model.generate(image[i:i + 1], length=n, return_trace=True) for n in log_prob}
        value = {n: log_prob[n] + rules.LENGTH_NORM * sum(alone[n].log_prob[0].tolist()) / n for n in log_prob}
        expected.append(alone[max(value, key=value.get)].text[0])
        most_probable.append(max(log_prob, key=log_prob.get) + 2)
    assert len({len(text) for text in expected}) > 2 and [len(text) for text in expected] != most_probable
    found = model.generate(image, length="auto")
    for text, row in zip(expected, found, strict=True):
        assert torch.equal(row[:len(text)], text) and not row[len(text):].any()


@pytest.mark.parametrize("options, rows", [
    (dict(), [8, 56]), (dict(tokens_per_step=0.3), [8, 56]), (dict(samples=2), [16])])
def test_auto_gives_the_same_captions_whatever_fits_into_memory(monkeypatch, options, rows):
    """The first length, then the other seven together. Draws are of a length at a time."""
    model, image, found, sizes = opinionated(), images(8), [], set()
    for most in (1, 2 ** 28):
        monkeypatch.setattr(rules, "LOGITS", most)
        sampling = Sampling(float("samples" in options), generator=seeded(0))
        found.append(model.generate(image, length="auto", return_trace=True, sampling=sampling, **options))
        model.text.register_forward_pre_hook(lambda _, args: sizes.add(len(args[0].valid)))
    assert sorted(sizes) == rows and torch.equal(found[0].text, found[1].text)
    torch.testing.assert_close(found[0].log_prob, found[1].log_prob, rtol=1e-4, atol=1e-5)


def test_auto_decodes_no_more_lengths_than_can_win(monkeypatch):
    """p(2) = 0.7 with tokens at 0.5 makes 0.35, which p(4) = 0.2 cannot reach whatever its tokens are."""
    monkeypatch.setattr(rules, "LENGTH_NORM", 1)
    model, tried = tiny_captioner(), []
    per_token = torch.tensor([1.0, 0.8, 0.5, 0.8, 0.9]).log()

    def decode(lengths, longest):
        tried.append(sorted(n for n in lengths.tolist() if n > 0))
        text = torch.arange(longest + 2) < lengths[:, None]
        return Decoded(text * lengths[:, None], text.long(), text * per_token[lengths, None])

    for probability, best, lengths in (
            ([[0.0, 0.04, 0.7, 0.06, 0.2]], [2], [[2]]), ([[0.0, 0.06, 0.4, 0.14, 0.4]], [4], [[2], [4]]),
            ([[0.0, 0.04, 0.7, 0.06, 0.2], [0.0, 0.1, 0.3, 0.4, 0.2]], [2, 3], [[2, 3]]),
            ([[0.0, 0.25, 0.26, 0.25, 0.24]], [4], [[2], [1, 3, 4]])):
        tried.clear()
        found = rules.best_length(model, decode, torch.tensor(probability).log(), Unmasking())
        assert found.text.amax(1).tolist() == best and tried == lengths


def test_sample_draws_lengths_as_often_as_the_head_says():
    model = preferring(9, math.log(1), math.log(2), math.log(5))  # 0: not drawn
    drawn = lengths_of(model, images(1).expand(800, -1, -1, -1), length="sample",
                       sampling=Sampling(generator=seeded(0))).bincount(minlength=4)
    assert drawn[0] == 0 and chisquare(drawn[1:], [100, 200, 500]).pvalue > 0.001


def test_top_gives_samples_the_most_probable_lengths_in_turn(monkeypatch):
    model = preferring(9, 2, 0.6, 3, 1, 0.69, 0.71, -1, -2, -3, -4)  # 0: not chosen. A tenth of e^3 is e^0.697
    for most, samples, expected in ((None, 2, [3, 1]), (None, 1, [3]), (None, 6, [3, 1, 4, 6, 3, 1]),
                                    (2, 5, [3, 1, 3, 1, 3]), (99, 5, [3, 1, 4, 6, 3])):  # 99: beyond the context
        monkeypatch.setattr(rules, "MAX_LENGTHS", most or rules.MAX_LENGTHS)
        assert lengths_of(model, images(2), length="top", samples=samples).tolist() == expected * 2


def test_lengths_under_autocast_are_those_of_float32():
    head, tokens = opinionated().length_head, torch.randn(200, 4, 64)
    expected = head(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(head(tokens), expected)


def test_a_checkpoint_without_the_head_or_of_another_context_loads_and_auto_is_one_clear_line():
    model = opinionated()
    old = {name: weight for name, weight in model.state_dict().items() if not name.startswith("length_head")}
    other = {**old, "length_head.weight": torch.ones(5, 64), "length_head.bias": torch.ones(5)}
    for state in (old, other):
        loaded = tiny_captioner(seed=1)
        loaded.load_state_dict(state)
        assert holds(loaded.state_dict(), old)
        assert torch.equal(loaded.generate(images(2), length=3), model.generate(images(2), length=3))
        for length in ("auto", "sample"):
            assert "have none): give a number" in refused(ValueError, loaded.generate, images(2), length=length)


def test_a_model_without_a_head_says_so_and_a_causal_one_has_none():
    said = refused(ValueError, tiny_captioner(length_head=False).generate, images(1), length="auto")
    assert "caption_cfg.length_head" in said
    for objective in ("arc", "cappa"):
        model = tiny_captioner(objective)
        terms = CaptionLoss()(**model(images(2), captions([4, 5])), output_dict=True)
        assert model.length_head is None and terms.keys() == {"caption_loss"}


@pytest.mark.parametrize("source, target, said", [
    ("arc", "mdc", "There is no length head in these weights"),
    ("mdc", "block-diffusion", "The length head of these weights is left out"),
    ("block-diffusion", "mdc", "There is no length head in these weights")])
def test_weights_of_one_objective_begin_a_model_of_another_and_the_head_is_named(source, target, said, caplog):
    """Autoregressive first, then diffusion, and the other way: all other weights are those of the file."""
    weights, model = tiny_captioner(source, seed=1).state_dict(), tiny_captioner(target, seed=2)
    before = dict(weights)
    model.load_state_dict(weights)
    assert said in caplog.text and weights.keys() >= before.keys()
    for name, value in model.state_dict().items():
        assert name.startswith("length_head.") or torch.equal(value, before[name]), name
    if target == "mdc":
        assert not model.length_head.weight.any()
