"""Claims about token ids."""
import open_clip
import pytest
import torch
from conftest import refused, seeded

import open_clip_mdc
from open_clip_mdc.text.special_tokens import (
    decode_tokens,
    eot_id,
    not_whole,
    sot_id,
    target_tokens,
    token_bytes,
    tokenize_whole,
    valid_tokens,
    whole_words,
)

TOKENIZER = open_clip.SimpleTokenizer()
V = TOKENIZER.vocab_size



def test_exclamation_marks_are_words_although_their_id_may_be_padding():
    text = TOKENIZER(["! ! !", "!!!", "a ! b"])
    assert (text[0] == 256).sum() == 3  # "!" with its word end; id 0 is "!" inside a word
    assert torch.equal(valid_tokens(text, V).sum(1), text.argmax(1) + 1)  # no id is above EOT
    inside_a_word = torch.tensor([[sot_id(V), 0, 0, eot_id(V), 0, 0]])
    assert valid_tokens(inside_a_word, V).tolist() == [[True] * 4 + [False] * 2]


def test_valid_ends_at_the_first_eot_and_scored_leaves_out_sot():
    text = torch.tensor([[sot_id(V), 5, eot_id(V), eot_id(V), 0], [sot_id(V), 5, 6, 7, 8]])
    assert valid_tokens(text, V).tolist() == [[True, True, True, False, False], [True] * 5]
    assert target_tokens(text, V).tolist() == [[False, True, True, False, False], [False] + [True] * 4]


def test_a_caption_that_would_be_cut_is_not_scored():
    assert not_whole("dog " * 75, TOKENIZER, 77) is None
    assert "has 78 tokens with SOT and EOT, but the model reads at most 77" in not_whole("dog " * 76, TOKENIZER, 77)
    for name in ("<end_of_text>", "<start_of_text>", "<End_of_Text>"):
        texts = ["a dog", f"a dog{name} and all that it does not say"]
        said = refused(ValueError, tokenize_whole, texts, TOKENIZER, 77)
        assert "caption 2 holds <start_of_text> or <end_of_text>" in said


@pytest.mark.parametrize("model", ["ViT-B-32", "MDC-ViT-B-16", "MDC-ViT-Ti-8"])
@pytest.mark.parametrize("text", ["qzxjk" * 400_000, "dog " * 400_000, "犬" * 40_000, "=-" * 40_000, "9" * 40_000],
                         ids=["letters", "words", "kanji", "marks", "digits"])
def test_of_a_long_text_bpe_reads_ten_thousand_characters(model, text, monkeypatch):
    tokenizer, read = open_clip_mdc.get_tokenizer(model), []
    monkeypatch.setattr(tokenizer, "bpe", lambda word: read.append(word) or "a</w>")
    tokenizer.encode(text)
    assert len("".join(read)) <= 10_000 * len(text[0].encode())


@pytest.mark.parametrize("text", ["a" * 30_000, "dog " * 30_000, " " * 30_000 + "a cat", "&amp; " * 30_000,
                                  "9" * 11_000, "thinkbigsundaywithmarsha " * 1000, "😂" * 10_100,
                                  "a dog, 犬 und hündchen"])
def test_a_text_that_is_cut_has_the_ids_of_the_whole_and_is_still_too_long(text):
    tokenizer = open_clip_mdc.get_tokenizer("MDC-ViT-B-16")
    assert torch.equal(tokenizer([text]), TOKENIZER([text]))
    assert (not_whole(text, tokenizer, 77) is None) == (not_whole(text, TOKENIZER, 77) is None)


def test_tokens_looked_up_are_tokens_decoded():
    """Random ids, many of which hold parts of letters: the pieces are those of one decoder that reads byte by byte."""
    for ids in torch.randint(0, 49406, (300, 12), generator=seeded(0)).tolist():
        stream = b"".join(token_bytes(i, TOKENIZER) for i in ids).decode(errors="replace").replace("</w>", " ")
        pieces = decode_tokens(ids, TOKENIZER)
        assert stream.startswith("".join(pieces)) and len(pieces) == 12
        whole = [i for i in ids if i in whole_words(TOKENIZER)]
        assert "".join(decode_tokens(whole, TOKENIZER)) == TOKENIZER.decode(whole)
    assert 48_000 < len(whole_words(TOKENIZER)) < 49406
