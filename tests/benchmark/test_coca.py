"""Claims about coca.py: CoCa's beam search finds the same captions as an exhaustive search."""
from itertools import product

import open_clip
import torch
from open_clip.coca_model import CoCa

from clip_benchmark_ext.coca import CoCaCaptioner
from open_clip_mdc.text.special_tokens import eot_id, sot_id

VOCAB, CONTEXT = 7, 5


def tiny_coca(vocab_size: int = VOCAB, context_length: int = CONTEXT, image_size: int = 16) -> CoCa:
    torch.manual_seed(0)
    tower = dict(context_length=context_length, vocab_size=vocab_size, width=16, heads=2, layers=1)
    model = CoCa(16, dict(**tower, attn_pooler_heads=2), dict(**tower, embed_cls=True, output_tokens=True),
                 dict(image_size=image_size, layers=1, width=16, patch_size=8, head_width=8, attentional_pool=True,
                      attn_pooler_heads=2, output_tokens=True))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


@torch.no_grad()
def most_likely(model: CoCa, image: torch.Tensor) -> list[int]:
    """By scoring every caption there is, with CoCa's own teacher forcing."""
    sot, eot = sot_id(VOCAB), eot_id(VOCAB)
    words = [i for i in range(VOCAB) if i not in (sot, eot)]
    scores = {}
    for count in range(CONTEXT - 1):
        for caption in product(words, repeat=count):
            text = torch.tensor([[sot, *caption, eot]])
            out = model(image[None], text)
            log_probs = out["logits"][:, :len(caption) + 1].log_softmax(-1)  # 4.x has one more, after EOT
            scores[caption] = float(log_probs.gather(2, text[:, 1:, None]).sum())
    best = max(scores, key=scores.get)
    return [sot, *best, eot]


def test_a_wide_beam_finds_the_most_likely_caption_of_all():
    model = tiny_coca()
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1)) * 3
    text = CoCaCaptioner(model).generate(images, num_beams=VOCAB ** 3)
    for row, image in zip(text.tolist(), images, strict=True):
        expected = most_likely(model, image)
        assert row[:len(expected)] == expected
    one = CoCaCaptioner(model).generate(images[:1], length=1, num_beams=4)
    assert one.shape[1] <= 3


def test_the_real_config_is_searched_at_full_context():
    model = open_clip.create_model("coca_ViT-B-32").eval()
    torch.nn.init.normal_(model.text_decoder.text_projection, std=0.02)  # uninitialised upstream
    captioner = CoCaCaptioner(model)
    text = captioner.generate(torch.zeros(1, 3, 224, 224), length=3, num_beams=2)
    assert text[0, 0] == 49406 and 49407 in text[0].tolist() and text.shape[1] <= 5
