"""Claims about consensus: which of several captions of an image is kept."""
import math
from collections import Counter

import pytest
import torch
from conftest import VOCAB as V
from conftest import images, seeded, untrained_captioner, with_opinions

from open_clip_mdc.decoding.consensus import agreement
from open_clip_mdc.decoding.generate import generate
from open_clip_mdc.decoding.sampling import Sampling
from open_clip_mdc.text.special_tokens import caption_lengths


def ids(captions):
    """Return ids of words that are numbers. Tokens behind EOT are not part of a caption."""
    longest = max(map(len, captions))
    return torch.tensor([[V - 2, *words, V - 1, *[7] * (longest - len(words))] for words in captions])


def ngrams(words, n):
    return Counter(tuple(words[i:i + n]) for i in range(len(words) - n + 1))


def cosine(a, b):
    norm = math.sqrt(sum(x * x for x in a.values()) * sum(x * x for x in b.values()))
    return sum(count * b[gram] for gram, count in a.items()) / norm if norm else 0.0


def naive(captions):
    """The mean of each caption's likeness to all, in loops over dictionaries of counts."""
    return [sum(sum(cosine(ngrams(one, n), ngrams(other, n)) for n in (1, 2, 3, 4)) / 4 for other in captions)
            / len(captions) for one in captions]


def test_agreement_is_that_of_a_loop_over_counts_of_n_grams():
    generator = seeded(0)
    drawn = [[torch.randint(1, 5, (int(n),), generator=generator).tolist()
              for n in torch.randint(0, 10, (6,), generator=generator)] for _ in range(20)]
    found = agreement(ids(sum(drawn, [])), 6, V)  # an image's captions say nothing of another's
    assert found.tolist() == pytest.approx(sum(map(naive, drawn), []), abs=1e-6)


@pytest.fixture(scope="module", params=["mdc", "arc"])
def model(request):
    return with_opinions(untrained_captioner(request.param))


def test_generate_keeps_one_draw_of_each_image_and_encodes_it_once(model, monkeypatch):
    image = 3 * images(3, seed=1)
    encoded, encode = [], model.encode_image_tokens
    monkeypatch.setattr(model, "encode_image_tokens", lambda x, *args: encoded.append(len(x)) or encode(x, *args))
    options = {} if model.causal else dict(length="sample")

    def drawn(**more):
        return generate(model, image, samples=5, sampling=Sampling(1.0, generator=seeded(2)),
                        return_trace=True, **options, **more)

    every, kept = drawn(), drawn(select="consensus")
    assert encoded == [3, 3] and len(every.text) == 15 and len(kept.text) == 3
    words = [row[1:n - 1] for row, n in zip(every.text.tolist(), caption_lengths(every.text, V).tolist(), strict=True)]
    for i, n in enumerate(caption_lengths(kept.text, V).tolist()):
        value = naive(words[5 * i:5 * i + 5])
        best = 5 * i + value.index(max(value))
        for part, of_all in zip(kept, every, strict=True):
            assert torch.equal(part[i, :n], of_all[best, :n])
