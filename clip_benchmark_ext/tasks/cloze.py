"""Cloze: fill in a masked word of a human caption, which needs only captions, no questions.

The first word of each kind in a caption is masked (datasets/cloze_words.py). A word of k BPE tokens becomes k [MASK]
tokens, so the model knows their number. They are filled in the most confident first, as in decoding (Eq. 6), and the
answer is right if all of them are. The model also chooses among the words of a list, by the sum of log-probabilities of
a word's tokens, each given the unmasked words. An autoregressive model cannot fill in words. It only chooses, by the
likelihood of the whole caption with each word of the list.

Dimensions: B images, P patches, D width, Q questions (rows), k masks of a word, L positions, V vocabulary.
"""
import logging
from collections.abc import Sequence
from functools import partial
from itertools import chain

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from open_clip_mdc.decoding.confidence import tokenize_with_masks, unmask_by_confidence
from open_clip_mdc.decoding.options import Unmasking
from open_clip_mdc.likelihood.log_likelihood import log_likelihood
from open_clip_mdc.models.captioner import Captioner
from open_clip_mdc.models.interface import ImageKV
from open_clip_mdc.text.special_tokens import caption_lengths, eot_id, mask_id, not_whole, sot_id, tokenize_whole

from ..datasets.caption_data import read_batch, unique_ids
from ..datasets.cloze_words import Question, questions, same, word_lists
from ..distributed import merge, own_batches
from ..evaluation_job import Job
from ..metrics.cloze_metrics import Answer, cloze_metrics
from .selection import null_image

ROWS = 256  # texts of a decoder call
Asked = tuple[int, Question]  # with the number of the image in its batch


def fill(model: Captioner, image_kv: ImageKV, text: Tensor) -> Tensor:
    """Return texts [Q, L] with their [MASK] filled in. `image_kv` are the keys and values of Q images."""
    forbidden = sot_id(model.vocab_size), eot_id(model.vocab_size)
    return unmask_by_confidence(partial(model.token_logits, image_kv), text, model.vocab_size, Unmasking(), forbidden,
                                device=image_kv[0][0].device).text.cpu()


def mask_log_probs(model: Captioner, image_kv: ImageKV, text: Tensor) -> list[Tensor]:
    """Return the log-probabilities at the k masks of each of Q texts, float32 [k, V] on the CPU."""
    device = image_kv[0][0].device
    lengths = caption_lengths(text, model.vocab_size)
    text = text[:, :int(lengths.max())]
    masked = text == mask_id(model.vocab_size)
    places = masked.flatten().nonzero().squeeze(1)
    logits = model.token_logits(image_kv, lengths.tolist())(text.to(device), places.to(device))
    return list(logits.log_softmax(1).cpu().split(masked.sum(1).tolist()))


def infill(model: Captioner, tokenizer, tokens: Tensor, asked: Sequence[Asked],
           lists: dict) -> list[tuple[str, list[float]]]:
    """Return for each question the word that is filled in, and the scores of the words of its list, in nats.

    `tokens` are patch tokens, [B, P, D].
    """
    kv = model.text.project_image(tokens)

    def hidden(question: Question, count: int) -> Tensor:
        """Return the caption's token ids, long [1, L], with its word replaced by `count` [MASK]."""
        return tokenize_with_masks(tokenizer, question.fill(" [MASK]" * count + " "), model.context_length)

    def run(function, rows: list[tuple[int, Tensor]]) -> list:
        results = []
        for start in range(0, len(rows), ROWS):
            index, texts = zip(*rows[start:start + ROWS], strict=True)
            index = torch.tensor(index, device=tokens.device)
            results += function(model, [(k.index_select(0, index), v.index_select(0, index)) for k, v in kv],
                                torch.cat(texts))
        return results

    ids = {kind: [tokenizer.encode(word) for word in words] for kind, words in lists.items()}
    rows = {(number, count): (image, hidden(question, count)) for number, (image, question) in enumerate(asked)
            for count in sorted({len(word) for word in ids[question.kind]})}
    log_probs = dict(zip(rows, run(mask_log_probs, list(rows.values())), strict=True))
    whole = [(image, hidden(question, len(tokenizer.encode(question.word)))) for image, question in asked]
    answers = []
    for number, ((_, question), (_, text), filled) in enumerate(zip(asked, whole, run(fill, whole), strict=True)):
        word = tokenizer.decode(filled[text[0] == mask_id(model.vocab_size)].tolist()).strip()
        scores = [sum(log_probs[number, len(word)][i, token].item() for i, token in enumerate(word))
                  for word in ids[question.kind]]
        answers.append((word, scores))
    return answers


def choose(model: Captioner, tokenizer, tokens: Tensor, asked: Sequence[Asked],
           lists: dict) -> list[tuple[None, list[float]]]:
    """Return for each question None, and the log-likelihoods of its caption with each word of its list."""
    answers = [(None, [])] * len(asked)
    for kind, words in lists.items():
        numbers = [number for number, (_, question) in enumerate(asked) if question.kind == kind]
        for some in (numbers[start:start + ROWS] for start in range(0, len(numbers), ROWS)):
            images, own = zip(*(asked[number] for number in some), strict=True)
            texts = [question.fill(word) for question in own for word in words]
            text = tokenize_whole(texts, tokenizer, model.context_length).view(len(some), len(words), -1)
            scores = log_likelihood(model, tokens[list(images)], text)
            for number, row in zip(some, scores.tolist(), strict=True):
                answers[number] = None, row
    return answers


def no_pixels(image: Image.Image) -> Tensor:
    return torch.zeros(1)


@torch.inference_mode()
def answer(job: Job, batches: DataLoader, lists: dict) -> tuple[dict[str, list[Answer]], int]:
    """Return the answers by image and the number of questions beyond the context length, on every process."""
    model, tokenizer, device, found = job.model, job.tokenizer, job.args.device, []
    ask = infill if model.objective.order == "any" else choose
    longest = {kind: max(words, key=lambda word: len(tokenizer.encode(word))) for kind, words in lists.items()}
    with job.autocast():
        blind = null_image(model, batches, device)[None]
        for i, batch in own_batches(batches, "cloze"):
            ids, images, references = read_batch(i, batch, batches)
            every = [(image, question) for image, captions in enumerate(references)
                     for caption in captions for question in questions(caption, lists)]
            asked = [(image, question) for image, question in every
                     if not not_whole(question.fill(longest[question.kind]), tokenizer, model.context_length)]
            seen = ask(model, tokenizer, model.encode_image_tokens(images.to(device)), asked, lists)
            guessed = ask(model, tokenizer, blind, [(0, question) for _, question in asked], lists)
            own = [[] for _ in ids]
            for (image, question), (word, scores), (guess, prior) in zip(asked, seen, guessed, strict=True):
                own[image].append(Answer(question.kind, same(question.word), word, guess, scores, prior))
            found.append((i, (ids, own, len(every) - len(asked))))
    found = merge(found)
    ids = unique_ids([i for part, _, _ in found for i in part])
    return dict(zip(ids, chain.from_iterable(own for _, own, _ in found), strict=True)), sum(n for *_, n in found)


def run(job: Job, batches: DataLoader) -> dict:
    file = job.flags.cloze_words
    blank = job.load(job.args.split, no_pixels) if file is None else ()
    captions = [caption for i, batch in enumerate(blank) for own in read_batch(i, batch, blank)[2] for caption in own]
    lists = word_lists(captions, file)
    answers, cut = answer(job, batches, lists)
    if cut:
        logging.warning("%d questions do not fit the context of %d tokens and are left out", cut,
                        job.model.context_length)
    alpha = job.options.get("alpha", 1.0)
    metrics, items = cloze_metrics(answers, lists, alpha)
    return {**metrics, "questions_cut": cut, "images": len(answers), "alpha": alpha, "blind": "mean image",
            **{f"words_{kind}": ", ".join(words) for kind, words in lists.items()}, "items": items}
