"""Caption metrics by pycocoevalcap, as in the COCO evaluation: BLEU, METEOR, ROUGE-L, CIDEr and SPICE (Table 3).

Its Java programs (tokenizer, METEOR, SPICE) are started from here. Its own wrappers write into site-packages, download
models, miscount captions with Unicode line ends, may wait for ever, and lose all scores if one fails.
"""
import importlib.util
import json
import logging
import math
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen
from typing import NamedTuple

import numpy as np
from pycocoevalcap.bleu.bleu_scorer import BleuScorer
from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.cider.cider_scorer import precook
from pycocoevalcap.rouge.rouge import Rouge
from pycocoevalcap.tokenizer.ptbtokenizer import PUNCTUATIONS

JARS = Path(importlib.util.find_spec("pycocoevalcap").submodule_search_locations[0])
PTB_JAR = JARS / "tokenizer" / "stanford-corenlp-3.4.1.jar"
METEOR_JAR = JARS / "meteor" / "meteor-1.5.jar"
SPICE_JAR = JARS / "spice" / "spice-1.0.jar"
SPICE_MODELS = tuple(JARS / "spice" / "lib" / f"stanford-corenlp-3.6.0{part}.jar" for part in ("", "-models"))
PLAIN_WORD = re.compile(
    r"n't\b | '(?:s|re|ve|ll|d|m)\b | (?:[a-z]\.){2,} | \w+ (?: (?:[-./'] | (?<=\d)[,:](?=\d)) \w+)* | [^\w\s]",
    re.VERBOSE)
PTB_BRACKETS = {"(": "-lrb-", ")": "-rrb-", "[": "-lsb-", "]": "-rsb-", "{": "-lcb-", "}": "-rcb-"}
NO_JAVA = "there is no Java: install a runtime, such as Debian's default-jre-headless"
# Time limits of a Java program, to start and per caption with its references.
START_SECONDS, CAPTION_SECONDS = 600, 2
# METEOR reads its tables for ten seconds. So it stays, by the Java and the process that started it, and ends with it.
IDLE_METEOR: dict[tuple[str, int], Popen] = {}

Captions = Sequence[str]
References = Sequence[Sequence[str]]  # of each caption
Scored = tuple[float, Sequence[float] | None]  # of all captions, and of each


class CaptionScores(NamedTuple):
    scores: dict[str, float]  # by pycocoevalcap's names
    missing: dict[str, str]  # by metric, why it could not be computed and what to do about it
    word_tokenizer: str  # "PTB" as in the COCO evaluation, or "plain" without Java
    mean_length: float  # words per candidate
    reference_mean_length: float  # words per reference
    of_images: dict[str, list[float]]  # by metric, a value per image, whose mean is the metric (BLEU, METEOR: about)


def score_captions(candidates: Mapping[Hashable, str], references: Mapping[Hashable, Captions],
                   names: Sequence[str] = ()) -> CaptionScores:
    """Return `names` of METRICS, by default all, or the reasons why some cannot be computed here."""
    if not candidates:
        raise ValueError("there are no captions to score")
    words, word_tokenizer = split_words([*candidates.values(), *(r for i in candidates for r in references[i])])
    rest = iter(words)
    hypotheses = [next(rest) for _ in candidates]
    targets = [[next(rest) for _ in references[i]] for i in candidates]
    scores, missing, of_images = {}, {}, {}
    for name in names or METRICS:
        try:
            value, values = METRICS[name](hypotheses, targets)
            if not math.isfinite(value):
                raise ValueError("it is NaN or infinite for these captions")
            scores[name] = float(value)
            if values is not None:
                of_images[name] = [float(value) for value in values]
        except Exception as problem:  # a metric that fails must not lose the others, after hours of decoding
            missing[name] = one_line(str(problem)) or repr(problem)
            logging.warning("%s is missing: %s", name, missing[name])
    return CaptionScores(scores, missing, word_tokenizer, mean_words(hypotheses),
                         mean_words([r for captions in targets for r in captions]), of_images)


# ---- metrics: from captions and their references, split into words, to the score of all and a value per image, if any


def by_pycocoevalcap(scorer: Rouge | Cider, hypotheses: Captions, references: References) -> Scored:
    if isinstance(scorer, Cider):
        check_idf(references)
    return scorer.compute_score(dict(enumerate(references)), {i: [text] for i, text in enumerate(hypotheses)})


def check_idf(references: References) -> None:
    # CIDEr weighs words by how few images have them. So an image gets 0 for any caption if all images have its words.
    words = [{word for text in texts for word in precook(text)} for texts in references]  # of one to four words
    images = Counter(word for of_image in words for word in of_image)
    silent = sum(all(images[word] == len(words) for word in of_image) for of_image in words)
    if silent == len(words):
        raise ValueError("it weighs words by how few images have them in their references, but here " +
                         ("all images have the same words" if silent > 1 else "there is one image"))
    if silent:
        logging.warning("CIDEr is 0 for %d of %d images, whatever their captions: the words of their references are in "
                        "those of all images", silent, len(words))


def bleu(n: int, hypotheses: Captions, references: References) -> Scored:
    """Return BLEU-n of all captions, and for BLEU-4 a jackknife pseudo-value per image (Tukey 1958)."""
    longest = max(len(caption.split()) for caption in hypotheses)
    if 0 < longest < n:  # pycocoevalcap would return the quotient of two tiny numbers
        raise ValueError(f"no caption has {n} words in a row to be found in a reference: the longest has {longest}")
    scorer = BleuScorer(n=4)
    for hypothesis, targets in zip(hypotheses, references, strict=True):
        scorer += (hypothesis, targets)
    score = scorer.compute_score(option="closest")[0][n - 1]
    if n < 4:
        return score, None
    counts = np.array([[*one["correct"], *one["guess"], one["testlen"], min(
        (abs(length - one["testlen"]), length) for length in one["reflen"])[1]] for one in scorer.ctest], dtype=float)
    rest = counts.sum(0) - counts  # without each image
    precision = (rest[:, :4] + 1e-15) / (rest[:, 4:8] + 1e-9)  # as pycocoevalcap avoids 0 / 0
    brevity = np.exp(np.minimum(0, 1 - rest[:, 9] / np.maximum(rest[:, 8], 1)))
    return score, len(counts) * score - (len(counts) - 1) * np.prod(precision, 1) ** 0.25 * brevity


def mean_words(captions: Captions) -> float:
    return sum(len(caption.split()) for caption in captions) / len(captions)


# ---- words


def split_words(captions: Captions) -> tuple[list[str], str]:
    try:
        return ptb_words(captions), "PTB"
    except (OSError, ValueError, subprocess.SubprocessError) as problem:
        logging.warning("captions are split into words by a plain rule, not as in the COCO evaluation, so that scores "
                        "may differ in the third digit: %s", problem)
        return [plain_words(caption) for caption in captions], "plain"


def ptb_words(captions: Captions) -> list[str]:  # as in the COCO evaluation
    lines = run_java("-cp", PTB_JAR, "edu.stanford.nlp.process.PTBTokenizer", "-preserveLines", "-lowerCase",
                     text="".join(f"{one_line(caption)}\n" for caption in captions),
                     seconds=patience(len(captions))).split("\n")[:-1]
    if len(lines) != len(captions):
        raise ValueError(f"the PTB tokenizer made {len(lines)} lines of {len(captions)} captions")
    return [without_punctuation(line.split()) for line in lines]


def plain_words(caption: str) -> str:  # needs no Java, and agrees with `ptb_words` on nearly every caption
    text = re.sub(r"\bcannot\b", "can not", caption.lower().replace("’", "'").replace('"', " "))
    text = re.sub(r"(?<=\w)(n't|'(?:s|re|ve|ll|d|m))\b", r" \1", text)
    return without_punctuation([PTB_BRACKETS.get(word, word) for word in PLAIN_WORD.findall(text)])


def without_punctuation(words: Sequence[str]) -> str:
    return " ".join(word for word in words if word not in PUNCTUATIONS)


def one_line(caption: str) -> str:
    return " ".join(caption.split())


# ---- Java


def java() -> str:
    path = shutil.which("java")
    if path is None:
        raise FileNotFoundError(NO_JAVA)
    return path


def patience(captions: int) -> float:
    return START_SECONDS + CAPTION_SECONDS * captions


def run_java(*arguments: str | Path, seconds: float, text: str = "") -> str:
    done = subprocess.run([java(), *map(str, arguments)], input=text, capture_output=True, timeout=seconds,
                          encoding="utf-8", errors="replace")
    if done.returncode:
        raise ValueError(failure(done.stderr))
    return done.stdout


def failure(errors: str) -> str:
    lines = [line for line in errors.splitlines() if line.strip()]
    shown = [line for line in lines if "Exception" in line or "Error" in line] or lines or ["it printed no error"]
    return f"its Java program failed (it was made for Java 8): {shown[0].strip()}"


def meteor(hypotheses: Captions, references: References) -> Scored:
    """Return METEOR 1.5 of all tokenized captions, and of each.

    Its program answers a caption with its statistics, and those of all captions with a score of each and of all.
    """
    program = java(), os.getpid()
    process = IDLE_METEOR.pop(program, None)
    if process is None or process.poll() is not None:
        process = Popen([program[0], "-Xmx2G", "-jar", METEOR_JAR, *"- - -stdio -l en -norm".split()], stdin=PIPE,
                        stdout=PIPE, stderr=PIPE, encoding="utf-8", errors="replace", start_new_session=True)
    alarm = threading.Timer(patience(len(hypotheses)), process.kill)
    alarm.start()
    try:
        def send(*fields: str) -> None:  # ||| separates them
            process.stdin.write(" ||| ".join(field.replace("|||", " ") for field in fields) + "\n")
            process.stdin.flush()

        statistics = []
        for hypothesis, targets in zip(hypotheses, references, strict=True):
            send("SCORE", *targets, hypothesis)
            statistics.append(process.stdout.readline().strip())
        send("EVAL", *statistics)
        *each, score = [float(process.stdout.readline()) for _ in range(len(statistics) + 1)]
        IDLE_METEOR[program] = process
        return score, each
    except (OSError, ValueError) as problem:
        raise ValueError(failure(process.communicate()[1])) from problem
    finally:
        alarm.cancel()
        if IDLE_METEOR.get(program) is not process:  # else its next answer would be to these captions
            process.kill()


def spice(hypotheses: Captions, references: References) -> Scored:
    """Return SPICE of tokenized captions, the mean over images, to the three digits that its program prints.

    Its result file would need the JavaScript engine that Java 15 dropped, and its cache a native library. Without them
    any Java will do.
    """
    java()
    if not all(path.exists() for path in SPICE_MODELS):
        raise FileNotFoundError("its language models are missing: run `python -m "
                                "pycocoevalcap.spice.get_stanford_models` once (400 MB)")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "captions.json")
        path.write_text(json.dumps([{"image_id": i, "test": hypothesis, "refs": list(targets)} for i, (
            hypothesis, targets) in enumerate(zip(hypotheses, references, strict=True))]))
        printed = run_java("-Xmx8G", "-Duser.language=en", "-jar", SPICE_JAR, path, seconds=patience(len(hypotheses)))
    score = re.search(r"f-score:\s*([\d.]+) \(SPICE metric\)", printed)
    if score is None:
        raise ValueError(f"its Java program printed no score but {one_line(printed)[-200:]!r}")
    return float(score[1]), None


METRICS = {
    **{f"Bleu_{n}": partial(bleu, n) for n in range(1, 5)}, "METEOR": meteor,
    "ROUGE_L": partial(by_pycocoevalcap, Rouge()), "CIDEr": partial(by_pycocoevalcap, Cider()), "SPICE": spice}
