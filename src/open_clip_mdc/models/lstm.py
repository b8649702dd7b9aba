"""The LSTM decoder of Show and Tell (Vinyals et al. 2015, arXiv 1411.4555, Eqs. 10 to 12), for captions left to right.

    x_-1 = W_i GAP(patch tokens),    x_t = W_e S_t,    p_t+1 = softmax(W_o LSTM(x_t))

The image enters once, as the first input. What decoding and scoring keep of it is the state that the LSTM then has, and
what they keep of a text is the state after it. `TextDecoder` keeps keys and values in their place. There is one layer,
as wide as the config's text tower. The paper's has 512 units, too. Unlike the paper's it has no dropout, its output has
no bias, and the image encoder is the captioner's, of any kind, which learns with it.

Dimensions: B images, R captions (R/B consecutive rows per image), P patches, L positions, n more tokens of a row,
N real tokens of all rows, D image width, W decoder width, V vocabulary.
"""
from open_clip.model import CLIPTextCfg
from torch import Tensor, nn

from ..text.packing import Packed
from .decoder import TextKV, VocabularyProjection, pad, unpad
from .interface import ImageKV
from .precision import without_autocast


class LSTMDecoder(nn.Module):
    """A decoder with the methods of `TextDecoder`, for an objective that reads plainly from left to right."""

    time_embedding = None

    def __init__(self, cfg: CLIPTextCfg, image_width: int):
        """Build the decoder with the width, the vocabulary and the context length of a text tower."""
        super().__init__()
        self.vocab_size = cfg.vocab_size
        self.context_length = cfg.context_length
        self.token_embedding = nn.Embedding(cfg.vocab_size, cfg.width)  # nothing is masked, so there is no [MASK]
        self.image_embedding = nn.Linear(image_width, cfg.width)
        self.blocks = nn.ModuleList([nn.LSTM(cfg.width, cfg.width, batch_first=True)])
        self.output = VocabularyProjection(cfg.width, cfg.vocab_size, bias=False)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Change nothing. An LSTM's activations are few, and its backward pass reads them all."""

    def no_weight_decay(self) -> set[str]:
        return set()

    def read(self, x: Tensor, state: TextKV | None) -> tuple[Tensor, TextKV]:
        """Return the outputs [R, n, W] for more inputs [R, n, W], and hidden state and cell after them, [R, W] each.

        A cell adds up over a caption, so it is never rounded to autocast's 16 bit.
        """
        lstm, = self.blocks
        with without_autocast(x.device.type):
            y, (hidden, cell) = lstm(x.to(lstm.weight_ih_l0.dtype), None if state is None else tuple(
                part[None].contiguous() for part in state[0]))
        return y.to(self.output.weight.dtype), [(hidden[0], cell[0])]

    def project_image(self, image_embs: Tensor) -> ImageKV:
        """Return the state after the image, [B, W] twice, from patch tokens [B, P, D]: once for all its captions."""
        feature = image_embs.mean(1, keepdim=True).to(self.image_embedding.weight.dtype)  # [B, 1, D]
        return self.read(self.image_embedding(feature), None)[1]

    def forward(self, packed: Packed, image_kv: ImageKV, time: Tensor | None = None) -> Tensor:
        """Return hidden states, [N, W]. That of a token predicts the next one.

        Args:
            packed: R rows, ids in [0, V).
            image_kv: the state after each of B images. Rows b*(R/B) to (b+1)*(R/B) - 1 belong to image b.

        Raises ValueError for rows in another order than from left to right.
        """
        if packed.causal is not True or packed.sight is not None:
            raise ValueError("an LSTM reads captions from left to right only: give the objective 'arc'")
        # [R, L, W]. Padding comes last in a row, so that no token reads it.
        x = pad(self.token_embedding(packed.token), packed)
        return unpad(self.read(x, each_row(image_kv, len(x)))[0], packed)

    def step(self, token: Tensor, image_kv: ImageKV, past: TextKV | None = None) -> tuple[Tensor, TextKV]:
        """Return the hidden states of n more tokens per row, [R, n, W], and the state after them.

        Args:
            token: ids, long [R, n].
            past: the state from the last step, with the rows that you continue. None at the first step.
        """
        return self.read(self.token_embedding(token), each_row(image_kv, len(token)) if past is None else past)


def each_row(state: ImageKV, rows: int) -> ImageKV:
    """Return the states of R rows from those of B images, [B, W] each."""
    return [tuple(part.repeat_interleave(rows // len(part), 0) for part in layer) for layer in state]
