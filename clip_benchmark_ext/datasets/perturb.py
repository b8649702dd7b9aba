"""Make the four word-order perturbations of ARO's COCO-Order and Flickr30k-Order (Table 2) once, and read them later.

Source: github.com/mertyg/vision-language-models-are-bows, `dataset_zoo/perturbations.py` and `retrieval.py` (commit
42dbb5e). That code draws new negatives in every run, by the installed versions of spaCy and nltk. Here they are made at
first use with a fixed seed, by spaCy's `en_core_web_sm` and nltk's `word_tokenize` (extra `[aro]`), and frozen in a
file. Report its SHA-256 with every number that is measured on them.
"""
import hashlib
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

from open_clip_mdc.data.files import new_file
from open_clip_mdc.progress import progress_bar

# The captions of an ARO Order case are the right one, then these four.
PERTURBATIONS = ("shuffle_nouns_and_adj", "shuffle_allbut_nouns_and_adj", "shuffle_within_trigrams", "shuffle_trigrams")
NOUN_TAGS = frozenset("NN NNS NNP NNPS".split())
ADJECTIVE_TAGS = frozenset("JJ JJR JJS".split())
SEED = 1  # `main_aro.py --seed` of the official code
MAX_WORDS = 30

Tagged = list[tuple[str, str]]  # words with their tags
Tagger = Callable[[str], Tagged]
Tokenizer = Callable[[str], list[str]]


def pre_caption(text: str) -> str:
    return " ".join(re.sub(r'[.!"()*#:;~]', " ", text.lower()).split()[:MAX_WORDS])


def treebank_tokenizer() -> Tokenizer:
    """Return nltk's `word_tokenize` without its data, as it finds sentences without a trained model."""
    import nltk  # optional, only this function needs it
    from nltk.tokenize import NLTKWordTokenizer, PunktSentenceTokenizer
    words, sentences = NLTKWordTokenizer(), PunktSentenceTokenizer()

    def tokenize(text: str) -> list[str]:
        return [word for sentence in sentences.tokenize(text) for word in words.tokenize(sentence)]

    tokenize.__name__ = f"nltk-{nltk.__version__} NLTKWordTokenizer"
    return tokenize


def _shuffled(tagged: Tagged, rng: random.Random, *kinds: Callable[[str], bool]) -> str:
    tokens = [token for token, _ in tagged]
    for is_own in kinds:
        slots = [i for i, (_, tag) in enumerate(tagged) if is_own(tag)]
        moved = [tokens[i] for i in slots]
        rng.shuffle(moved)
        for i, token in zip(slots, moved, strict=True):
            tokens[i] = token
    return " ".join(tokens)


def shuffle_nouns_and_adj(tagged: Tagged, rng: random.Random) -> str:
    return _shuffled(tagged, rng, NOUN_TAGS.__contains__, ADJECTIVE_TAGS.__contains__)


def shuffle_allbut_nouns_and_adj(tagged: Tagged, rng: random.Random) -> str:
    return _shuffled(tagged, rng, lambda tag: tag not in NOUN_TAGS | ADJECTIVE_TAGS)


def trigrams(tokens: list[str]) -> list[list[str]]:
    return [tokens[i : i + 3] for i in range(0, len(tokens), 3)]


def shuffle_within_trigrams(tokens: list[str], rng: random.Random) -> str:
    chunks = trigrams(tokens)
    for chunk in chunks:
        rng.shuffle(chunk)
    return " ".join(map(" ".join, chunks))


def shuffle_trigrams(tokens: list[str], rng: random.Random) -> str:
    chunks = trigrams(tokens)
    rng.shuffle(chunks)
    return " ".join(map(" ".join, chunks))


def perturb(caption: str, tagger: Tagger, tokenizer: Tokenizer, rng: random.Random) -> list[str]:
    """Return the four negatives of one raw caption, in the order of `PERTURBATIONS`, normalised by `pre_caption`."""
    tagged, tokens = tagger(caption), tokenizer(caption)
    texts = (shuffle_nouns_and_adj(tagged, rng), shuffle_allbut_nouns_and_adj(tagged, rng),
             shuffle_within_trigrams(tokens, rng), shuffle_trigrams(tokens, rng))
    return [pre_caption(text) for text in texts]


def spacy_tagger() -> Tagger:
    import spacy  # optional, only this function needs it
    nlp = spacy.load("en_core_web_sm", disable=["parser", "ner", "lemmatizer"])  # none of them changes a tag

    def tag(text: str) -> Tagged:
        return [(token.text, token.tag_) for token in nlp(text)]

    tag.__name__ = f"spacy-{spacy.__version__} {nlp.meta['name']}-{nlp.meta['version']}"
    return tag


def frozen_options(path: Path, dataset: str, captions: list[str], tagger: Tagger | None) -> tuple[list[list[str]], str]:
    """Return for each caption five options, the right one first, and the SHA-256 of the frozen file.

    Args:
        path: the file, which is made if it is not there.
        captions: raw captions in the order of the data set.
        tagger: part-of-speech tagger that makes the file, by default `spacy_tagger()`.

    Raises FileNotFoundError if the file cannot be made, ValueError if it was changed or belongs to other captions.
    """
    if not path.is_file():
        _freeze(path, dataset, captions, tagger)
    try:
        content = json.loads(path.read_bytes())
        claimed = content.pop("sha256")
        cases = [(str(case["caption"]), [str(text) for text in case["perturbed"]]) for case in content["cases"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a file of frozen perturbations ({error!r}): move it and try again") from error
    if _sha256(content) != claimed:
        raise ValueError(f"{path} was changed after it was made: its content does not have the SHA-256 written in it. "
                         "Restore the original, or move it away to make new negatives (numbers then differ)")
    if content.get("dataset") != dataset:
        raise ValueError(f"{path} holds the perturbations of {content.get('dataset')}, not of {dataset}")
    if [caption for caption, _ in cases] != captions:
        raise ValueError(f"{path} was made from other captions ({len(cases)}) than those of {dataset} here "
                         f"({len(captions)}), or from the same ones in another order")
    return [[pre_caption(caption), *perturbed] for caption, perturbed in cases], claimed


def _freeze(path: Path, dataset: str, captions: list[str], tagger: Tagger | None) -> None:
    try:
        tagger, tokenizer = tagger or spacy_tagger(), treebank_tokenizer()
    except (ImportError, OSError) as error:
        raise FileNotFoundError(
            f"{path} is missing, and to make the negatives of {dataset} takes spaCy's tagger and nltk ({error}). Run "
            "`pip install spacy nltk && python -m spacy download en_core_web_sm`, or put there a file that was made "
            "elsewhere") from error
    rng = random.Random(SEED)
    content = {
        "dataset": dataset, "seed": SEED, "tagger": tagger.__name__, "tokenizer": tokenizer.__name__,
        "order": list(PERTURBATIONS),
        "cases": [{"caption": caption, "perturbed": perturb(caption, tagger, tokenizer, rng)}
                  for caption in progress_bar(captions, f"making the negatives of {dataset}", "caption")],
    }
    content["sha256"] = _sha256(content)
    try:
        with new_file(path) as partial:
            partial.write_text(json.dumps(content, ensure_ascii=False, indent=0), encoding="utf-8")
    except OSError as error:
        raise FileNotFoundError(f"cannot write the perturbations of {dataset} to {path} ({error.strerror}): let "
                                "the folder be written to") from error


def _sha256(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
