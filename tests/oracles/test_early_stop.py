"""Early stopping against the best of all masks, at both ends of the range that its docstring names.

    pytest tests/oracles/test_early_stop.py
"""
import math

import numpy as np
import pytest

from open_clip_mdc.likelihood import race as racing
from open_clip_mdc.likelihood.draws import draw_masks

N = 9
HIDDEN = np.array([code.bit_count() for code in range(2 ** N)])
WEIGHTS = np.where(HIDDEN > 0, 1 / np.bincount(HIDDEN)[HIDDEN], 0)  # Eq. 8: a mean over counts of means over masks


def dropped(loss: float, usual: float, candidates: int, confidence: float, seed: int) -> bool:
    """Whether the best of the candidates dropped out.

    Each mask costs the first one `usual` nats a token. The others cost nothing, or rarely `loss`: a little more on
    average, but a few draws do not show it.
    """
    rng = np.random.default_rng([seed, candidates])
    values = -loss * (rng.random((candidates, 2 ** N)) < (usual + 0.3) / loss)
    values[0] = -usual
    draws = draw_masks(N, 1024, seed)

    def read(requests: list) -> list[np.ndarray]:
        return [values[rows][:, draws.hidden[new] @ 2 ** np.arange(N)] for _, _, rows, new in requests]

    ((score, _, used),) = racing.run([racing.race(np.full(candidates, N), {N: draws}, confidence, math.log(49408))],
                                     read)
    best = (values @ WEIGHTS).argmax()
    return bool(used[best] < len(draws.stratum) and score.argmax() != best)


@pytest.mark.parametrize("loss, least, most", [(10.5, 0, 0), (30, 0, 0), (100, 1, 30)])
def test_the_best_candidate_is_dropped_no_more_often_than_the_docstring_says(loss, least, most):
    """At confidence 0.9, of 300 races."""
    found = sum(dropped(loss, 4, candidates, 0.9, seed) for candidates in (2, 5, 16) for seed in range(100))
    assert least <= found <= most
