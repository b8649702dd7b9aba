"""Claims about decoding and scoring on an asynchronous device: the host does not wait for it at each step."""
import pytest
import torch
import torch.nn.functional as F
from accelerator import Accelerator, mark
from captured import emulate
from conftest import VOCAB, captions, images, seeded, tiny_captioner
from likelihoods import network
from open_clip import get_tokenizer

from open_clip_mdc.decoding.confidence import fully_masked, unmask_by_confidence
from open_clip_mdc.decoding.options import Sampling, Unmasking
from open_clip_mdc.decoding.sampling import sample_tokens
from open_clip_mdc.integration.pretrained import describe_captions
from open_clip_mdc.likelihood import log_likelihood as scoring
from open_clip_mdc.models.step_graphs import StepGraphs
from open_clip_mdc.text.special_tokens import mask_id, valid_tokens

MASK = mask_id(VOCAB)


def naive_unmask(token_logits, text, tokens_per_step, forbidden, sampling, repeats):
    """The most confident first, by boolean indexing, with as many calls and the same logits as the algorithm."""
    step, log_prob, number = torch.full_like(text, -1), torch.zeros(text.shape), 0
    while (masked := text == MASK).any():
        allowed = token_logits(text, masked.flatten().nonzero()[:, 0]).log_softmax(1)
        allowed[:, forbidden] = -torch.inf
        for log_prob_of, (row, place) in zip(allowed, masked.nonzero().tolist(), strict=True):
            beside = text[row, [place - 1, place + 1]]
            log_prob_of[beside[(beside != MASK) & (repeats == "avoid")]] = -torch.inf
        confidence = torch.full(text.shape, -torch.inf)
        confidence[masked] = allowed.amax(1)
        chosen = torch.zeros_like(masked)
        for row, values in enumerate(confidence):
            if isinstance(tokens_per_step, int):
                chosen[row, values.argsort(descending=True, stable=True)[:tokens_per_step]] = True
                chosen[row] &= masked[row]
            elif masked[row].any():
                chosen[row] = masked[row] & (values.exp() >= tokens_per_step)
                chosen[row, values.argmax()] = True
        token = sample_tokens(allowed[chosen[masked]], sampling)
        log_prob[chosen] = allowed[chosen[masked]].gather(1, token[:, None]).squeeze(1)
        text = text.masked_scatter(chosen, token)
        step[chosen] = number
        number += 1
    return text, step, log_prob


@pytest.mark.parametrize("repeats", ["allow", "avoid"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tokens_per_step", [1, 3, 20, 0.0, 0.2, 0.4, 1.0])
@pytest.mark.parametrize("lengths", [[8] * 6, [1, 3, 8, 8, 6, 2]])
def test_unmasking_by_index_is_the_naive_loop_to_the_last_bit(lengths, tokens_per_step, temperature, repeats):
    model, image = tiny_captioner(), images(6)
    with torch.no_grad():
        torch.nn.init.normal_(model.text.positional_embedding, std=0.5)
        text = fully_masked(torch.tensor(lengths), VOCAB)
        text[0, 1] = 7  # a given word, with which one caption is finished
        valid = valid_tokens(text, VOCAB)

        reader, (sampling, same) = network(model, image), (Sampling(temperature, generator=seeded(0)) for _ in range(2))
        expected = naive_unmask(reader(valid.sum(1).tolist()), text, tokens_per_step, (VOCAB - 2, VOCAB - 1), sampling,
                                repeats)
        found = unmask_by_confidence(reader, F.pad(text, (0, 3)), VOCAB, Unmasking(
            tokens_per_step=tokens_per_step, repeats=repeats, sampling=same), (VOCAB - 2, VOCAB - 1),
            F.pad(valid, (0, 3)))
    for x, y, padding in zip(found, expected, (0, -1, 0), strict=True):
        assert torch.equal(x, F.pad(y, (0, 3), value=padding))


def waits(model, function):
    """Count how often the host waits for the device while a function of four images runs."""
    device, image = Accelerator(model), images(4)
    mark(image)
    with device, torch.no_grad():
        function(image)
    return len(device.waits)


@pytest.fixture(scope="module")
def that_knows_lengths():
    model = tiny_captioner()
    torch.nn.init.normal_(model.length_head.weight, std=0.1)
    return model


@pytest.mark.parametrize("options, number", [
    ({"length": 6}, 1), ({"length": 6, "tokens_per_step": 3}, 1), ({"length": 9, "repeats": "avoid"}, 1),
    ({"length": 6, "sampling": Sampling(1.0)}, 1), ({"length": "sample"}, 3), ({"length": "auto"}, 4),
    ({"text": fully_masked(torch.tensor([3]), VOCAB)}, 1), ({"length": 6, "sampler": "ancestral"}, 2)])
@pytest.mark.parametrize("by_graphs", [False, True])
def test_captions_ask_the_device_so_often_whatever_their_steps_and_lengths(that_knows_lengths, options, number,
                                                                           by_graphs, monkeypatch):
    """CUDA waits for each graph that it captures, too, once in a process."""
    graphs = emulate(monkeypatch)
    if by_graphs:
        monkeypatch.setattr(that_knows_lengths, "step_graphs", StepGraphs())
    assert waits(that_knows_lengths, lambda image: that_knows_lengths.generate(image, **options)) == number
    assert bool(graphs) == by_graphs


@pytest.mark.parametrize("objective", ["mcd-absorbing", "mcd-replace"])
def test_the_reverse_chain_asks_the_device_twice_whatever_its_steps(objective):
    """The masks of all steps are drawn beforehand, so that the host knows which tokens each step predicts."""
    model = tiny_captioner(objective, t_min=0.0, time_embedding=True)
    options = dict(length=6, sampler="ancestral", steps=7, sampling=Sampling(1.0, top_p=0.9))
    assert waits(model, lambda image: model.generate(image, **options)) == 2


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)])
def test_a_search_asks_the_device_once_a_step_whether_it_may_end(sampling):
    model, steps = tiny_captioner("arc"), []
    step = model.text.step
    model.text.step = lambda *args: steps.append(0) or step(*args)
    assert waits(model, lambda image: model.generate(image, length=6, sampling=sampling)) == len(steps) + 1 > 3


def test_captions_are_described_by_one_question():
    model = tiny_captioner()
    decoded = model.generate(images(4), length=6, return_trace=True)
    mark(*decoded)
    assert waits(model, lambda image: describe_captions(decoded, get_tokenizer("ViT-B-32"))) == 1


@pytest.mark.parametrize("memory_mib", [1, 512])
@pytest.mark.parametrize("objective, method, number", [
    ("mdc", "heuristic", 0), ("arc", "autoregressive", 0), ("mdc", "monte_carlo", 1), ("mcd-replace", "bound", 1)])
def test_scores_ask_the_device_once_at_most_whatever_the_images_and_lengths(objective, method, number, memory_mib,
                                                                            monkeypatch):
    """All in one call, or in many of what the budget holds. Captions of two images differ in the second last token."""
    model, text = tiny_captioner(objective), captions([5, 9, 12, 12] * 2).view(4, 2, -1)
    text[1::2, 1, :10] = text[1::2, 0, :10]
    calls, network = [], model.token_logits
    monkeypatch.setattr(scoring, "MIB", 2 ** 18)
    monkeypatch.setattr(model, "token_logits", lambda *args, **reading: calls.append(len(args[0][0][0])) or network(
        *args, **reading))
    options = {"num_samples": 12} if number else {}
    found = waits(model, lambda image: model.log_likelihood(image, text, method, memory_mib=memory_mib, **options))
    assert found == number * (1 if memory_mib == 512 else 4)
    assert set(calls) >= ({4} if memory_mib == 512 else {1})


def test_the_device_refuses_tensors_of_two_devices():
    there = torch.arange(3.0)
    mark(there)
    with Accelerator(), pytest.raises(AssertionError, match="two devices"):
        there + torch.ones(3)
