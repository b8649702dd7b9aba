"""One pass for all captions of a length: every token is scored with all tokens masked (parallel decoding, Sec. 3.2).

    sum over i of log p(c_i | all masked, image)

All captions of one length begin with the same state, so a pass for each (image, length) gives log p of every token at
every place, and a caption only looks its tokens up. This is another estimate than the heuristic: tokens do not see each
other, so the order of words counts less. It is the cheap first stage of retrieval and search.

Dimensions: B images, R captions (R/B consecutive rows per image), L positions, N scored tokens of a caption, J pairs of
an image and a length, M places of a call, T tokens of the captions of a call, V vocabulary.
"""
import numpy as np
import torch

from ..text.special_tokens import PAD_ID, mask_id, sot_id, target_tokens
from .calls import decoder_calls
from .scoring import Call, Likelihood, Scoring


def parallel(call: Call, options: Scoring) -> Likelihood:
    """Return the sum of each caption's log p(token | all masked), in nats."""
    _, text, vocab_size = call.rows
    lengths, text = target_tokens(text, vocab_size).sum(1).numpy(), text.numpy()  # N of each caption, [R]
    scored = lengths.nonzero()[0]
    # The state of an image and a length is one number. They ascend with the images.
    state, of_caption = np.unique(call.image[scored] * text.shape[1] + lengths[scored], return_inverse=True)
    of_image, length = state // text.shape[1], state % text.shape[1]  # [J]
    captions = np.split(scored[of_caption.argsort(kind="stable")], np.bincount(of_caption).cumsum()[:-1])
    per_token, to_device = torch.zeros(text.size, device=call.device), call.to_device
    calls = decoder_calls(call, of_image, length + 1) if len(state) else ()
    for index, token_logits in calls:
        number = np.where(index >= 0, length[index], 0)  # N of each row of the call. Index -1 only fills it up
        place = np.arange(number.max() + 1)
        masked = (place > 0) & (place <= number[:, None])
        noisy = np.where(masked, mask_id(vocab_size), PAD_ID)
        noisy[:, 0] = sot_id(vocab_size)
        log_prob = token_logits(to_device(noisy), to_device(masked.ravel().nonzero()[0])).log_softmax(1)  # [M, V]
        first = number.cumsum() - number  # of each row in M
        # Each caption of a row looks up its tokens, [T]: its place in M, its id, and where its log p is written.
        at, token, written = (np.concatenate(parts) for parts in zip(*(
            (np.tile(first[row] + np.arange(n), len(own)), text[own, 1:n + 1].ravel(),
             (own[:, None] * text.shape[1] + np.arange(1, n + 1)).ravel())
            for row, (j, n) in enumerate(zip(index, number, strict=True)) if j >= 0 for own in (captions[j],)),
            strict=True))
        per_token = per_token.scatter(0, to_device(written), log_prob[to_device(at), to_device(token)])
    per_token = per_token.view(text.shape)
    return Likelihood(per_token.sum(1), per_token)
