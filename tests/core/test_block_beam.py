"""Claims about beam search over blocks."""
import pytest
import torch
import torch.nn.functional as F
from conftest import VOCAB, images, seeded, tiny_captioner
from test_beam import all_captions, words
from test_blocks import blocks, naive_logits

from open_clip_mdc.decoding.beam import beam_search
from open_clip_mdc.decoding.block_beam import search_blocks
from open_clip_mdc.decoding.confidence import fully_masked
from open_clip_mdc.text.special_tokens import caption_lengths, eot_id


def logits_of_blocks(model, image):
    """`StepLogits` of a block model of size 1, by a row without a cache for each hypothesis."""
    def step_logits(text, parent):
        seen, longer = image.repeat_interleave(len(text) // len(image), 0), F.pad(text, (0, 1))
        return torch.cat([naive_logits(model, one, row, 1, [text.shape[1]]) for one, row in zip(
            seen.split(1), longer.split(1), strict=True)])
    return step_logits


@pytest.mark.parametrize("beams", [1, 4])
def test_a_beam_over_blocks_of_one_token_is_that_from_left_to_right(beams):
    model, image = blocks(1, seed=2), images(6)
    model.text.output.weight.data[eot_id(VOCAB)] *= 1.5
    seen = set()
    for min_length in (0, 3):
        found = model.generate(image, sampler="beam", num_beams=beams, min_length=min_length, return_trace=True)
        with torch.no_grad():
            text, _, log_prob = beam_search(logits_of_blocks(model, image), 6, VOCAB, 10, beams, min_length=min_length)
        width = found.text.shape[1]
        ends = caption_lengths(text, VOCAB) < 12  # the EOT of the longest ones is given to blocks
        assert torch.equal(found.text[ends], text[ends, :width])
        assert torch.allclose(found.log_prob[ends], log_prob[ends, :width], atol=2e-5)
        seen |= set(caption_lengths(found.text, VOCAB)[ends].tolist())
        assert (caption_lengths(found.text, VOCAB) >= 2 + min_length).all()
    assert len(seen) > 2


def test_the_searched_likelihood_is_that_of_the_scorer_and_above_that_of_greedy_decoding():
    model, image = blocks(2, seed=2), images(30)
    model.text.output.weight.data[eot_id(VOCAB)] *= 1.7
    greedy = model.generate(image)
    found = model.generate(image, sampler="beam", num_beams=4, return_trace=True)
    score, of_greedy = (model.log_likelihood(image, text) for text in (found.text, greedy))
    # Behind an EOT that ends its block, nothing is filled in. That of the longest captions is given.
    lengths = caption_lengths(found.text, VOCAB)
    whole = (lengths % 2 == 0) & (lengths < 12)
    assert 3 < whole.sum()
    assert torch.allclose(found.log_prob.sum(1)[whole], score[whole], atol=2e-5)
    assert (score > of_greedy - 1e-4).float().mean() > 0.7 and (score > of_greedy + 0.1).any()


@pytest.mark.parametrize("options, why", [({"num_beams": 0}, "num_beams >= 1"), ({"min_length": -1}, "at least -1"),
                                          ({"min_length": 11}, "at least 11 and at most 10")])
def test_searches_that_no_caption_can_end_are_refused_as_for_other_models(options, why):
    for model in (blocks(4), tiny_captioner("arc")):
        with pytest.raises(ValueError, match=why):
            model.generate(images(2), sampler="beam", **options)


def logits_of(*read):
    """Logits of five ids, 3 and 4 of them SOT and EOT, as a function of all that was read."""
    return 2 * torch.randn(5, generator=seeded(hash(read) % 2 ** 40))


class Table:
    """A reader of blocks of two images whose logits are those of a seed, the image, what it has read, and the place."""

    def __init__(self, seed: int, rows: int = 2):
        self.seed, self.kept = seed, [()] * rows

    def __call__(self, lengths):
        return self.logits

    def logits(self, text, predicted):
        return torch.stack([logits_of(self.seed, row * 2 // len(text), self.kept[row] + tuple(text[row, 1:].tolist()),
                                      len(self.kept[row]) + column - 1)
                            for row, column in (divmod(place, text.shape[1]) for place in predicted.tolist())])

    def keep(self, block):
        self.kept = [past + tuple(row) for past, row in zip(self.kept, block.tolist(), strict=True)]

    def select(self, row):
        self.kept = [self.kept[i] for i in row.tolist()]


def by_enumeration(seed: int, image: int, size: int, width: int, min_length: int) -> dict[tuple[int, ...], float]:
    """The likelihoods of all captions of up to 4 words, each in the order of the model's confidence."""
    found = {}
    for caption in all_captions(5, 4):
        text, total = (3, *caption, *[4] * (width - 1 - len(caption))), 0.0
        for start in range(0, width, size):
            if 4 in text[:start]:
                break
            block = range(start, min(start + size, width))
            hidden = [p for p in block if 0 < p < 5]
            while hidden:
                read = text[:start] + tuple(5 if p in hidden else text[p] for p in block)
                log_probs = torch.stack([logits_of(seed, image, read, p) for p in hidden]).log_softmax(1)
                log_probs[:, 3] = -torch.inf
                which = int(log_probs.amax(1).argmax())
                total += float(log_probs[which, text[hidden.pop(which)]])
        if len(caption) >= min_length:
            found[caption] = total
    return found


@pytest.mark.parametrize("size, min_length, width", [(2, 0, 6), (3, 0, 6), (3, 2, 6), (5, 1, 6), (5, 1, 10), (4, 0, 8)])
def test_a_wide_beam_over_blocks_finds_the_best_of_all_captions_where_greedy_decoding_does_not(size, min_length, width):
    worse = 0
    for seed in range(6):
        text = F.pad(fully_masked(torch.tensor([4, 4]), 5), (0, width - 6), value=4)
        found = search_blocks(Table(seed, rows=400), text, size, 5, 200, min_length, 4)
        greedy = search_blocks(Table(seed), text, size, 5, 1, min_length, 4)
        for image in range(2):
            scores = by_enumeration(seed, image, size, width, min_length)
            best = max(scores, key=scores.get)
            assert found.text[image].tolist() == [3, *best, 4] + [0] * (width - 2 - len(best))
            worse += scores[words(greedy.text[image])] < scores[best] - 1e-3
    assert worse > 3
