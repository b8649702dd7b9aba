"""Special token ids: SOT, EOT, padding and [MASK]. No other file knows these ids.

OpenCLIP's SimpleTokenizer gives SOT and EOT the last two ids of its vocabulary and pads with 0, which is also a real
token ("!" in CLIP's BPE). [MASK] is one id beyond the vocabulary, so the output layer cannot predict it and a tokenizer
cannot decode it.

Dimensions: B captions, C candidates, L positions, V vocabulary.
"""
import codecs
import string
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import groupby

import torch
from open_clip.tokenizer import bytes_to_unicode
from torch import Tensor

PAD_ID = 0


def sot_id(vocab_size: int) -> int:
    """Return the id that starts every caption. The model is given it, so it is never masked and never scored."""
    return vocab_size - 2


def eot_id(vocab_size: int) -> int:
    """Return the id that ends every caption. It is predicted like any other token."""
    return vocab_size - 1


def mask_id(vocab_size: int) -> int:
    """Return the id of [MASK], the forward process's absorbing state. Only the input embedding has a row for it."""
    return vocab_size


def valid_tokens(text: Tensor, vocab_size: int) -> Tensor:
    """Return a mask, bool [..., L], that is True up to and including each caption's first EOT. Ids are long [..., L].

    `text != 0` would be wrong, as id 0 is a real token. A row without EOT (a caption being decoded) is all True.
    """
    # EOT itself counts as valid, all after the first one do not.
    is_eot = text == eot_id(vocab_size)
    return is_eot.cumsum(-1) <= is_eot


def not_whole(caption: str, tokenizer: Callable, context_length: int) -> str | None:
    """Return why the tokenizer would cut a caption, to follow "caption 3 ", or None."""
    return no_whole_ids(tokenizer.encode(caption), tokenizer.vocab_size, context_length)


def no_whole_ids(ids: list[int], vocab_size: int, context_length: int) -> str | None:
    """Return why ids, without SOT and EOT, are no whole caption, as `not_whole`."""
    if len(ids) + 2 > context_length:
        return f"has {len(ids) + 2} tokens with SOT and EOT, but the model reads at most {context_length}: shorten it"
    if {sot_id(vocab_size), eot_id(vocab_size)} & set(ids):
        return "holds <start_of_text> or <end_of_text>, which would start or end it: leave them out"
    return None


def tokenize_whole(captions: Sequence[str], tokenizer: Callable, context_length: int) -> Tensor:
    """Return ids of captions, long [C, L]. Raises ValueError if the tokenizer would cut one."""
    for number, caption in enumerate(captions, 1):
        if why := not_whole(caption, tokenizer, context_length):
            raise ValueError(f"caption {number} {why} ({caption[:40]!r}...)")
    return tokenizer(list(captions), context_length)


def decode_captions(text: Tensor, tokenizer: Callable) -> list[str]:
    """Return the captions of ids [B, L], up to the first EOT. Mask ids become "[MASK]", SOT and EOT are dropped."""
    vocab_size = tokenizer.vocab_size
    # The tokenizer cannot decode [MASK], so runs of real ids between masks are decoded one by one.
    special = (sot_id(vocab_size), eot_id(vocab_size))
    captions = []
    for ids in text.masked_fill(~valid_tokens(text, vocab_size), eot_id(vocab_size)).tolist():
        real, pieces = [i for i in ids if i not in special], []
        for masked, run in groupby(real, mask_id(vocab_size).__eq__):
            run = list(run)
            pieces += ["[MASK]"] * len(run) if masked else [tokenizer.decode(run).strip()]
        captions.append(" ".join(filter(None, pieces)))
    return captions


def token_bytes(token: int, tokenizer: Callable) -> bytes:
    return bytes(tokenizer.byte_decoder[c] for c in tokenizer.decoder[token])


@lru_cache(maxsize=4)
def whole_words(tokenizer: Callable) -> dict[int, str]:
    """Return each token's text. Special ids are left out, and so are tokens with a part of a character's bytes."""
    words = {}
    for token in range(sot_id(tokenizer.vocab_size)):
        with suppress(UnicodeDecodeError):
            words[token] = token_bytes(token, tokenizer).decode().replace("</w>", " ")
    return words


def words_and_marks(vocab_size: int) -> Tensor:
    """Return a mask, bool [V], that is False at digits, at single bytes inside a word, and at EOT.

    CLIP's BPE and every cut of it begin with the 256 bytes inside a word and the 256 bytes that end one. A digit is
    always one of the latter. Ids of fewer than 512 tokens, as in a table, are all words.
    """
    words = torch.ones(vocab_size, dtype=torch.bool)
    words[eot_id(vocab_size)] = False  # it fills the last block of block diffusion
    if vocab_size > 512:
        # A byte inside a word is no word by itself.
        words[:256] = False
        words[256:512] = torch.tensor([byte not in string.digits for byte in bytes_to_unicode().values()])
    return words


def decode_tokens(ids: Sequence[int], tokenizer: Callable) -> list[str]:
    """Return the text of each token (no special ids). A token that ends a word ends in a space."""
    with suppress(KeyError):
        return list(map(whole_words(tokenizer).__getitem__, ids))
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a character's bytes may lie in several tokens
    return [decoder.decode(token_bytes(i, tokenizer)).replace("</w>", " ") for i in ids]


def caption_lengths(text: Tensor, vocab_size: int) -> Tensor:
    """Return the number of valid tokens of each caption, with SOT and EOT: long [...] from [..., L]."""
    return valid_tokens(text, vocab_size).sum(-1)


def target_tokens(text: Tensor, vocab_size: int) -> Tensor:
    """Return a mask, bool [..., L], that is True at tokens to learn and to score: all valid ones but SOT."""
    target = valid_tokens(text, vocab_size)
    # SOT is given.
    target[..., 0] = False
    return target
