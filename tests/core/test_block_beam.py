"""Claims about beam search over blocks."""
import itertools

import pytest
import torch
from conftest import VOCAB, images, seeded, tiny_captioner
from test_blocks import blocks, naive_logits

from open_clip_mdc.decoding.beam import beam_search
from open_clip_mdc.decoding.block_beam import search_blocks
from open_clip_mdc.decoding.confidence import fully_masked
from open_clip_mdc.text.special_tokens import caption_lengths, eot_id, mask_id


def logits_of_blocks(model, image):
    """`StepLogits` of a block model of size 1, by a row without a cache for each hypothesis."""
    def step_logits(text, parent):
        n, of_image = text.shape[1], torch.arange(len(text)) // (len(text) // len(image))
        return torch.cat([naive_logits(model, image[b:b + 1], torch.nn.functional.pad(row[None], (0, 12 - n)), 1, [n])
                          for b, row in zip(of_image.tolist(), text, strict=True)])
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
    text, greedy = (torch.nn.functional.pad(x, (0, 12 - x.shape[1])) for x in (found.text, greedy))
    score, of_greedy = (model.log_likelihood(image, x[:, None]).detach()[:, 0] for x in (text, greedy))
    # Behind an EOT that ends its block, nothing is filled in. That of the longest captions is given.
    lengths = caption_lengths(text, VOCAB)
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


class Table:
    """A reader of blocks of a few words, whose logits are a function of all that it has read."""

    def __init__(self, seed: int, rows: int = 2, batch: int = 2, vocab: int = 5):
        self.seed, self.batch, self.vocab, self.kept = seed, batch, vocab, [()] * rows

    def __call__(self, lengths):
        return self.logits

    def logits(self, text, predicted):
        rows, columns = predicted // text.shape[1], predicted % text.shape[1]
        return torch.stack([self.of(row * self.batch // len(text), self.kept[row] + tuple(text[row, 1:].tolist()),
                                    len(self.kept[row]) + column - 1)
                            for row, column in zip(rows.tolist(), columns.tolist(), strict=True)])

    def of(self, image: int, read: tuple, place: int):
        return 2 * torch.randn(self.vocab, generator=seeded(hash((self.seed, image, read, place)) % 2 ** 40))

    def keep(self, block):
        self.kept = [past + tuple(row) for past, row in zip(self.kept, block.tolist(), strict=True)]

    def select(self, row):
        self.kept = [self.kept[i] for i in row.tolist()]


def best_by_enumeration(table: Table, image: int, size: int, width: int, min_length: int, longest: int):
    """The most likely caption in the order of the model's confidence, over all captions of 0 to `longest` words."""
    eot, sot, mask = eot_id(table.vocab), table.vocab - 2, mask_id(table.vocab)
    found = {}
    for words in itertools.chain.from_iterable(itertools.product(range(table.vocab - 2), repeat=n)
                                               for n in range(min_length, longest + 1)):
        text, total = (sot, *words, *[eot] * (width - 1 - len(words))), 0.0
        for start in range(0, width, size):
            end = min(start + size, width)
            if eot in text[:start]:
                break
            hidden = [p for p in range(start, end) if 0 < p <= longest]
            while hidden:
                read = text[:start] + tuple(mask if p in hidden else text[p] for p in range(start, end))
                log_probs = torch.stack([table.of(image, read, p) for p in hidden]).log_softmax(1)
                log_probs[:, sot] = -torch.inf
                which = int(log_probs.amax(1).argmax())
                total += float(log_probs[which, text[hidden.pop(which)]])
        found[words] = total
    return [sot, *max(found, key=found.get), eot], found


@pytest.mark.parametrize("size, min_length, width", [(2, 0, 6), (3, 0, 6), (3, 2, 6), (5, 1, 6), (5, 1, 10), (4, 0, 8)])
def test_a_wide_beam_over_blocks_finds_the_best_of_all_captions_where_greedy_decoding_does_not(size, min_length, width):
    worse = 0
    for seed in range(6):
        text = torch.nn.functional.pad(fully_masked(torch.tensor([4, 4]), 5), (0, width - 6), value=eot_id(5))
        found = search_blocks(Table(seed, rows=400), text, size, 5, 200, min_length, 4)
        greedy = search_blocks(Table(seed), text, size, 5, 1, min_length, 4)
        for image in range(2):
            best, scores = best_by_enumeration(Table(seed), image, size, width, min_length, 4)
            assert found.text[image].tolist() == best + [0] * (width - len(best))
            words = tuple(greedy.text[image, 1:int(caption_lengths(greedy.text, 5)[image]) - 1].tolist())
            worse += scores[words] < max(scores.values()) - 1e-3
    assert worse > 3
