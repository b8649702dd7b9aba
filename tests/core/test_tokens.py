"""Claims about token ids.    pytest tests/core/test_tokens.py"""
import open_clip
import pytest
import torch

from open_clip_mdc.text.special_tokens import (
    caption_lengths,
    decode_captions,
    eot_id,
    mask_id,
    not_whole,
    sot_id,
    target_tokens,
    tokenize_whole,
    valid_tokens,
)

TOKENIZER = open_clip.SimpleTokenizer()
V = TOKENIZER.vocab_size


def test_ids_are_those_of_the_tokenizer():
    assert sot_id(V) == TOKENIZER.sot_token_id and eot_id(V) == TOKENIZER.eot_token_id
    assert mask_id(V) not in TOKENIZER.decoder


def test_exclamation_marks_are_words_although_their_id_may_be_padding():
    text = TOKENIZER(["! ! !", "!!!", "a ! b"])
    assert (text[0] == 256).sum() == 3  # "!" with its word end; id 0 is "!" inside a word
    for row in text:
        length = int((row == eot_id(V)).nonzero()[0]) + 1
        assert valid_tokens(row[None], V).sum() == length
    inside_a_word = torch.tensor([[sot_id(V), 0, 0, eot_id(V), 0, 0]])
    assert valid_tokens(inside_a_word, V).tolist() == [[True] * 4 + [False] * 2]


def test_valid_ends_at_the_first_eot_and_scored_leaves_out_sot():
    text = torch.tensor([[sot_id(V), 5, eot_id(V), eot_id(V), 0], [sot_id(V), 5, 6, 7, 8]])
    assert valid_tokens(text, V).tolist() == [[True, True, True, False, False], [True] * 5]
    assert target_tokens(text, V).tolist() == [[False, True, True, False, False], [False] + [True] * 4]


def test_an_empty_caption_has_two_tokens_and_a_long_one_keeps_eot():
    text = TOKENIZER(["", "word " * 100])
    assert caption_lengths(text, V).tolist() == [2, 77]
    assert text[1, -1] == eot_id(V)


def test_decoding_drops_special_ids_and_shows_masks():
    text = TOKENIZER(["a dog on a log"])
    assert decode_captions(text, TOKENIZER) == ["a dog on a log"]
    text[0, 2] = mask_id(V)
    assert decode_captions(text, TOKENIZER) == ["a [MASK] on a log"]


def test_captions_outside_ascii_survive():
    caption = "ein hündchen, 犬 und 🐕"
    assert decode_captions(TOKENIZER([caption]), TOKENIZER)[0].replace(" ", "") == caption.replace(" ", "")


def test_a_caption_that_would_be_cut_is_not_scored():
    assert not_whole("dog " * 75, TOKENIZER, 77) is None
    assert "has 78 tokens with SOT and EOT, and the model reads 77" in not_whole("dog " * 76, TOKENIZER, 77)
    for name in ("<end_of_text>", "<start_of_text>", "<End_of_Text>"):
        with pytest.raises(ValueError, match="caption 2 holds <start_of_text> or <end_of_text>"):
            tokenize_whole(["a dog", f"a dog{name} and all that it does not say"], TOKENIZER, 77)
