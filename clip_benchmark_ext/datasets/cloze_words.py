"""Choose the words of captions to mask in cloze questions: colours, numbers, prepositions, frequent nouns and verbs.

No part-of-speech tagger is used, so that the questions do not depend on installed packages. Nouns and verbs are found
in the data set's own captions by their position (`frequent_nouns`, `frequent_verbs`). This is right for most words, but
a verb in -s such as "watches" may be taken for a noun.
"""
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from .local_files import read_json

CLOSED = {
    "colour": "black white red blue green yellow brown orange pink purple gray grey".split(),
    "number": "one two three four five six seven eight nine ten".split(),
    "preposition": "in on at near over under through across behind beside between into onto along around above below "
                   "down up against inside outside off".split(),
}
SAME = {"grey": "gray"}  # spellings that count as the same answer
DETERMINERS = {*"a an the his her their its some another this several".split(), *CLOSED["colour"], *CLOSED["number"]}
# Words that often follow a noun and are not nouns.
FUNCTION_WORDS = DETERMINERS | {*CLOSED["preposition"], *(
    "and is are was with while that who which of to from by for as be being it he she they them him there has have or "
    "other something anything nothing everything during").split()}
FEWEST, MOST = 20, 50  # fewest occurrences of a noun or verb, and most words of a list


class Question(NamedTuple):
    """A caption whose characters `start` to `stop` are masked."""

    kind: str
    caption: str
    start: int
    stop: int

    @property
    def word(self) -> str:
        return self.caption[self.start:self.stop]

    def fill(self, word: str) -> str:
        return self.caption[:self.start] + word + self.caption[self.stop:]


def same(word: str) -> str:
    """Return the normal form of a word, which all accepted spellings share."""
    word = " ".join(word.lower().split())
    return SAME.get(word, word)


def tokens_of(caption: str) -> list[str]:
    return re.findall(r"[a-z]+(?:'[a-z]+)?|[.,;!?]", caption.lower())


def _counts(captions: Iterable[str]) -> tuple[Counter, Counter, Counter]:
    # Occurrences of a word: all, after a determiner, and before something that is no noun.
    total, behind, before = Counter(), Counter(), Counter()
    for caption in captions:
        for previous, (word, following) in zip([".", *(words := tokens_of(caption))], pairwise([*words, "."]),
                                               strict=False):
            total[word] += 1
            behind[word] += previous in DETERMINERS
            before[word] += following in FUNCTION_WORDS or not following.isalpha() or following.endswith("ing")
    return total, behind, before


def frequent_nouns(captions: Iterable[str]) -> list[str]:
    """Return the MOST most frequent nouns, by their position, with at least FEWEST occurrences.

    A word counts as a noun if at least a fifth of its occurrences follow an article, a possessive, a number or a
    colour, and at least three in five precede the end, punctuation, a function word or a word in -ing. Words in -ing
    are left to `frequent_verbs`.
    """
    total, behind, before = _counts(captions)
    return [word for word, count in total.most_common() if count >= FEWEST and len(word) > 2 and word.isalpha()
            and word not in FUNCTION_WORDS and not word.endswith("ing")
            and behind[word] >= 0.2 * count and before[word] >= 0.6 * count][:MOST]


def frequent_verbs(captions: Iterable[str]) -> list[str]:
    """Return the MOST most frequent words in -ing with at least FEWEST occurrences, few of them after an article."""
    total, behind, _ = _counts(captions)
    return [word for word, count in total.most_common() if count >= FEWEST and word.endswith("ing")
            and word not in FUNCTION_WORDS and behind[word] < 0.1 * count][:MOST]


def word_lists(captions: Sequence[str], file: str | None) -> dict[str, list[str]]:
    """Return the words of each kind, from a JSON `file` {kind: [words]} or else CLOSED, nouns and verbs of `captions`.

    Raises ValueError for a file of another form.
    """
    if file is None:
        lists = CLOSED | {"noun": frequent_nouns(captions), "verb": frequent_verbs(captions)}
        return {kind: words for kind, words in lists.items() if len(words) > 1}
    lists = read_json(Path(file), "dict")
    for kind, words in lists.items():
        if not re.fullmatch(r"\w+", kind) or not isinstance(words, list) or len({same(str(x)) for x in words}) < 2 or \
                not all(isinstance(word, str) and word.strip() for word in words):
            raise ValueError(f"{file}: {kind!r} should be a name with a list of two words or more, not {words!r:.100}")
    return lists


def questions(caption: str, lists: Mapping[str, Sequence[str]]) -> list[Question]:
    """Return a question for the first word of each kind in a caption."""
    found = []
    for kind, words in lists.items():
        longest_first = sorted(map(re.escape, words), key=len, reverse=True)
        pattern = rf"(?<![\w'-])(?:{'|'.join(longest_first)})(?![\w'-])"
        if match := re.search(pattern, caption, re.IGNORECASE):
            found.append(Question(kind, caption, *match.span()))
    return found
