"""Token ids: where a caption starts and ends, what is padding, what [MASK] is. The only place that knows ids.

OpenCLIP's SimpleTokenizer gives SOT and EOT the last two ids of its vocabulary and pads with 0, which is also a real
token ("!" in CLIP's BPE). [MASK] is one id beyond the vocabulary, so no output row can predict it and no tokenizer
can decode it.

Dimensions: B captions, L positions, V vocabulary.
"""
import codecs
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache

from torch import Tensor

PAD_ID = 0


def sot_id(vocab_size: int) -> int:
    """Return the id that opens every caption. It is given to the model, never masked and never scored."""
    return vocab_size - 2


def eot_id(vocab_size: int) -> int:
    """Return the id that ends every caption. It is learnt like any other token."""
    return vocab_size - 1


def mask_id(vocab_size: int) -> int:
    """Return the absorbing state [MASK] of the forward process: a row of the input embedding, not of the output."""
    return vocab_size


def valid_tokens(text: Tensor, vocab_size: int) -> Tensor:
    """Return True up to and including the first EOT of each caption: bool [..., L] from ids, long [..., L].

    Never `text != 0`: id 0 is a real token. A row without EOT (a caption being decoded) is valid throughout.
    """
    is_eot = text == eot_id(vocab_size)
    return is_eot.long().cumsum(-1) - is_eot.long() == 0


def not_whole(caption: str, tokenizer: Callable, context_length: int) -> str | None:
    """Return why the tokenizer would cut a caption, or None."""
    ids = tokenizer.encode(caption)
    if len(ids) + 2 > context_length:
        return f"has {len(ids) + 2} tokens with SOT and EOT, and the model reads {context_length}: shorten it"
    if {sot_id(tokenizer.vocab_size), eot_id(tokenizer.vocab_size)} & set(ids):
        return "holds <start_of_text> or <end_of_text>, where it would begin or end: leave them out"
    return None


def tokenize_whole(captions: Sequence[str], tokenizer: Callable, context_length: int) -> Tensor:
    """Return ids of captions, long [C, L]. Raises ValueError for one that the tokenizer would cut."""
    for number, caption in enumerate(captions, 1):
        if why := not_whole(caption, tokenizer, context_length):
            raise ValueError(f"caption {number} {why} ({caption[:40]!r}...)")
    return tokenizer(list(captions), context_length)


def decode_captions(text: Tensor, tokenizer: Callable) -> list[str]:
    """Return captions of ids, long [B, L], read up to the first EOT. Special ids are dropped, mask ids are [MASK]."""
    vocab_size = tokenizer.vocab_size
    special = (sot_id(vocab_size), eot_id(vocab_size))
    captions = []
    for ids, valid in zip(text.tolist(), valid_tokens(text, vocab_size).tolist(), strict=True):
        pieces, run = [], []
        for token in (i for i, v in zip(ids, valid, strict=True) if v and i not in special):
            if token == mask_id(vocab_size):
                pieces += [tokenizer.decode(run).strip(), "[MASK]"]
                run = []
            else:
                run.append(token)
        pieces.append(tokenizer.decode(run).strip())
        captions.append(" ".join(p for p in pieces if p))
    return captions


def token_bytes(token: int, tokenizer: Callable) -> bytes:
    return bytes(tokenizer.byte_decoder[c] for c in tokenizer.decoder[token])


@lru_cache(maxsize=4)
def whole_words(tokenizer: Callable) -> dict[int, str]:
    """Return what each token adds to a caption, but for special ids and tokens that hold a part of a letter."""
    words = {}
    for token in range(sot_id(tokenizer.vocab_size)):
        with suppress(UnicodeDecodeError):
            words[token] = token_bytes(token, tokenizer).decode().replace("</w>", " ")
    return words


def decode_tokens(ids: Sequence[int], tokenizer: Callable) -> list[str]:
    """Return what each token (no special ids) adds to the caption. A token that ends a word ends in a space."""
    with suppress(KeyError):
        return list(map(whole_words(tokenizer).__getitem__, ids))
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # of a letter's bytes in several tokens
    return [decoder.decode(token_bytes(i, tokenizer)).replace("</w>", " ") for i in ids]


def caption_lengths(text: Tensor, vocab_size: int) -> Tensor:
    """Return the numbers of valid tokens, SOT and EOT included: long [...] from [..., L]."""
    return valid_tokens(text, vocab_size).sum(-1)


def target_tokens(text: Tensor, vocab_size: int) -> Tensor:
    """Return True where a token is learnt and scored: valid, but not the given SOT at position 0. bool [..., L]."""
    scored = valid_tokens(text, vocab_size)
    scored[..., 0] = False
    return scored
