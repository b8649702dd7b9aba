"""Beam search over blocks (block diffusion): each hypothesis fills in the place that it is most confident of (Eq. 6).

Hypotheses of an image have filled in equally many places, so their log-likelihoods can be compared. Each is that of the
scorer "heuristic", EOT's fills to the end of the block included. With blocks of one token this is `beam.beam_search`,
but for a caption of the most tokens, whose EOT is given.

Dimensions: B images, K beams, R = B*K rows, L positions, n tokens of a block, m hidden ones of a row, V vocabulary.
"""
import torch
from torch import Tensor

from ..models.caption_logits import BlockReader
from ..models.captioner import Captioner
from ..models.interface import Network
from ..text.packing import partition_indices
from ..text.special_tokens import PAD_ID, eot_id, mask_id, sot_id, valid_tokens
from .beam import check_search
from .blocks import rows_of
from .options import OptionError, Search
from .sampling import Decoded


def best_place(network: Network, text: Tensor, start: int, end: int, count: int,
               vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return each row's most confident place of a block, long [R], and log p of its tokens, float32 [R, V].

    Args:
        text: long [R, L]. Each row hides `count` places of its block, start to end.
    """
    rows = torch.arange(len(text), device=text.device)
    before = text.narrow(1, max(start - 1, 0), 1)  # SOT or filled in, so no mask
    block = torch.cat((before, text[:, start:end]), 1)  # [R, 1 + n]
    places, _ = partition_indices(block == mask_id(vocab_size), count * len(text))
    log_prob = network([block.shape[1]] * len(text))(block, places).float().log_softmax(1)
    log_prob[:, sot_id(vocab_size)] = -torch.inf
    log_prob = log_prob.view(len(text), count, -1)  # [R, m, V]
    which = log_prob.amax(2).argmax(1)
    place = places.view(len(text), count)[rows, which] % block.shape[1] - 1 + start
    return place, log_prob[rows, which]


def rule_out(log_prob: Tensor, place: Tensor, text: Tensor, start: int, end: int, min_length: int,
             vocab_size: int) -> Tensor:
    """Return log p [R, V] at places [R], with -inf for tokens that do not go with the rest of the block.

    Right of an EOT all tokens are EOT. Left of a word none is, and none comes before `min_length` words.
    """
    eot, block = eot_id(vocab_size), text[:, start:end]
    left = torch.arange(start, end, device=text.device) < place[:, None]  # [R, n]
    ended = ((block == eot) & left).any(1)
    word_follows = ((block != eot) & (block != mask_id(vocab_size)) & ~left).any(1)
    only_eot = torch.arange(vocab_size, device=text.device) == eot
    log_prob = log_prob.masked_fill(ended[:, None] & ~only_eot, -torch.inf)
    return log_prob.masked_fill((word_follows | (place <= min_length))[:, None] & only_eot, -torch.inf)


def search_blocks(reader: BlockReader, text: Tensor, size: int, vocab_size: int, num_beams: int,
                  min_length: int, longest: int) -> Decoded:
    """Search for each image's most likely caption, block by block. One beam is greedy.

    The search stops when no beam can overtake the best finished caption. As log-likelihoods only fall, this is exact.
    The returned `log_prob` leaves out what is filled in behind EOT, which the search counts.

    Args:
        reader: predicts tokens of a block, keeps finished blocks, and follows the beams.
        text: long [B, L]: SOT, masks of `longest` words, and EOT to the end of the last block.
    """
    eot, (batch, width) = eot_id(vocab_size), text.shape
    check_search(min_length, longest, num_beams)
    image = torch.arange(batch, device=text.device)
    text = text.repeat_interleave(num_beams, 0)
    step, log_prob = torch.full_like(text, -1), torch.zeros(text.shape, device=text.device)
    # [B, K], log-likelihood of each beam. All but one of an image are of no caption yet.
    live = torch.full((batch, num_beams), -torch.inf, device=text.device)
    live[:, 0] = 0
    best_score = torch.full((batch,), -torch.inf, device=text.device)
    best = tuple(part[::num_beams] for part in (text, step, log_prob))

    for start in range(0, width, size):
        end = min(start + size, width)
        last = min(end, longest + 1)  # SOT and what follows the words are given
        for number in range(max(start, 1), last):
            place, of_token = best_place(reader, text, start, end, last - number, vocab_size)
            of_token = rule_out(of_token, place, text, start, end, min_length, vocab_size)
            # [B, K * V], then the K best of an image: their beams (rows of `text`) and tokens.
            live, choice = (live[..., None] + of_token.view(batch, num_beams, -1)).flatten(1).topk(num_beams)
            row = (image[:, None] * num_beams + choice // vocab_size).flatten()
            token = (choice % vocab_size).flatten()
            reader.select(row)
            here = place[row][:, None]
            text = text[row].scatter(1, here, token[:, None])
            step = step[row].scatter(1, here, number - 1)
            log_prob = log_prob[row].scatter(1, here, of_token[row, token][:, None])

        # The best of the captions that end in this block, [B], replaces the image's best one if it is better.
        ends = (text[:, start:end] == eot).any(1).view(batch, num_beams)
        ended, which = live.masked_fill(~ends, -torch.inf).max(1)
        better = (ended > best_score)[:, None]
        best_score = torch.maximum(best_score, ended)
        row = image * num_beams + which
        best = tuple(part[row].where(better, old) for part, old in zip((text, step, log_prob), best, strict=True))
        live = live.masked_fill(ends, -torch.inf)
        # The host waits for the device only here.
        if end == width or (best_score >= live.amax(1)).all():
            break
        reader.keep(text[:, start:end])

    text, step, log_prob = best
    after = ~valid_tokens(text, vocab_size)
    return Decoded(text.masked_fill(after, PAD_ID), step.masked_fill(after, -1), log_prob.masked_fill(after, 0.0))


def search_in_blocks(model: Captioner, image: Tensor, options: Search) -> Decoded:
    """Caption images [B, 3, height, width] by `search_blocks`. Raises OptionError for a temperature."""
    if options.sampling.temperature:
        raise OptionError("{temperature} draws, and {sampler} beam searches: leave out one of them")
    reader = BlockReader(model.text, model.text.project_image(model.encode_image_tokens(image)))
    rows = rows_of(model, None, options.length, image.device).expand(len(image), -1)
    return search_blocks(reader, rows, model.caption_cfg.block_sizes[0], model.vocab_size, options.num_beams,
                         options.min_length, options.max_length(model.context_length - 2))
