"""Measure the errors and savings of Monte Carlo's early stopping on artificial losses, without model and images.

Each race has a new population (a loss for each mask and candidate) and new draws. `wrong` is the share of races that
stopped early with a winner that is not the best by all masks. `draws` is their mean number per candidate, of at most
1,024. The populations of losses:

    normal   mean 3 nats, standard deviation 0.5
    rare     0.2 nats, and 8 more with a probability of 4 %
    lone     as rare, but the best candidate loses 0.5 nats with every mask, so that any rival may seem better by luck
    skewed   lognormal, the exponential of a standard normal variable
"""
import argparse
import math
import sys
from functools import lru_cache

import numpy as np

from open_clip_mdc.data.markdown import markdown_table
from open_clip_mdc.likelihood.draws import draw_masks
from open_clip_mdc.likelihood.race import race
from open_clip_mdc.likelihood.race import run as run_races

VOCABULARY = 49408  # CLIP's: a uniform guess loses 10.8 nats
POPULATIONS = ("normal", "rare", "lone", "skewed")
CANDIDATES, CONFIDENCES = (2, 3, 5, 16), (0.9, 0.99, 0.999)


def population(kind: str, candidates: int, num_tokens: int, behind: float, rng: np.random.Generator) -> np.ndarray:
    """Return log-likelihoods under each mask, float64 [C, 2 ** N]. The first candidate is better by `behind`.

    A mask is a binary number with a digit for each token.
    """
    shape = (candidates, 2 ** num_tokens)
    values = {"normal": lambda: -3 + rng.normal(0, 0.5, shape), "skewed": lambda: -rng.lognormal(0, 1, shape)}.get(
        kind, lambda: -0.2 - 8 * (rng.random(shape) < 0.04))()
    if kind == "lone":
        values[0] = -0.5
    values[1:] -= behind / num_tokens
    return values


@lru_cache
def masks_of_count(num_tokens: int) -> np.ndarray:
    count = np.array([code.bit_count() for code in range(2 ** num_tokens)])
    return np.where(count > 0, 1 / np.bincount(count)[count], 0)


def run(kind: str, candidates: int, confidence: float, behind: float, num_tokens: int, seed: int) -> tuple[bool, float]:
    rng = np.random.default_rng([seed, candidates])
    values = population(kind, candidates, num_tokens, behind, rng)
    draws = draw_masks(num_tokens, 1024, seed)

    def read(requests: list) -> list[np.ndarray]:
        return [values[rows][:, draws.hidden[new] @ 2 ** np.arange(num_tokens)] for _, _, rows, new in requests]

    own = race(np.full(candidates, num_tokens), {num_tokens: draws}, confidence, math.log(VOCABULARY))
    ((score, _, used),) = run_races([own], read)
    best = (values @ masks_of_count(num_tokens)).argmax()
    return bool(used[best] < len(draws.stratum) and score.argmax() != best), float(used.mean())


def table(runs: int, num_tokens: int) -> list[tuple]:
    rows = []
    for kind in POPULATIONS:
        for behind in (0, 1, 6, 12):
            cells = []
            for confidence in CONFIDENCES:
                found = [np.mean([run(kind, candidates, confidence, behind, num_tokens, seed) for seed in range(runs)],
                                 axis=0) for candidates in CANDIDATES]
                wrong, draws = np.array(found).T
                cells.append(f"{100 * wrong.max():.2f} % / {draws.min():.0f}-{draws.max():.0f}")
            rows.append((kind, behind, *cells))
            print(*rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=500, help="races per cell (default: 500)")
    parser.add_argument("--tokens", type=int, default=9, help="N, tokens of a candidate (default: 9)")
    args = parser.parse_args()
    print(markdown_table(("losses", "nats behind", *(f"{c}: wrong / draws" for c in CONFIDENCES)),
                         table(args.runs, args.tokens)))


if __name__ == "__main__":
    main()
