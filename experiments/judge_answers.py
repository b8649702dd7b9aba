"""Letter the captions of an image, parse the judge's answers, and compute selection rates (Table 3)."""
import math
import random
import re
from collections import Counter, defaultdict
from pathlib import Path

from open_clip_mdc.data.files import write_json

LETTERS = "ABCDEFGH"  # ends here because "I" is also a word
_CLAUSE = re.compile(r"[.!?;]+(?=\s|$)|\n+|\b(?:because|since|while|whereas|although|though|but|however)\b"
                     r"|\bas\b(?! the\b| being\b)", re.IGNORECASE)
_MENTION = re.compile(r"(?<![\w'’&-])([A-H])(?![\w&-]|\.\w)")
_VERDICT = re.compile(r"(?<!second.)(?<!next.)(?<!at.)\bbest\b|\b(?:answer|choice|choose|pick|winner)\b"
                      r"|\bselect|\bprefer|\b(?:so|thus|hence|therefore|overall)\W+(?:(?:caption|option)\W+)?$",
                      re.IGNORECASE)
_DENIED_BEFORE = re.compile(r"\b(?:not|never|neither|nor|none|except|than|over|worst)\b|n['’]t\b", re.IGNORECASE)
_DENIED_AFTER = re.compile(r"\W*(?:\w+n['’]t|(?:\w+\s+)?(?:not|never)|cannot)\b", re.IGNORECASE)
_LETTER_CONTINUES = re.compile(r"\s+(?![a-z])|\s+(?:is|was|has|does|and|or|best|because|since|as|over)\b|\S|$")


def assign_letters(captions: dict[str, str], seed: int, id: str) -> list[tuple[str, list[str]]]:
    """Return the distinct captions of {system: caption} in the order of their letters, each with its systems."""
    systems = defaultdict(list)
    for name, caption in sorted(captions.items()):
        systems[caption].append(name)
    choices = list(systems.items())
    random.Random(f"{seed}/{id}").shuffle(choices)
    return choices


def parse_letter(answer: str, captions: list[str]) -> str | None:
    """Return the letter of the one caption that an answer chooses, or None if it is unclear.

    Strict by intent. Captions that the answer repeats are ignored. The rest must be one of

    - a letter: "b", "(B)", "**B**", "Answer: B"
    - text that names one letter only: "Caption B, which ..."
    - text that names several, with clauses that declare a single letter the best: "The best is B because A ...". All
      such clauses must agree.

    Letters are capitals that stand alone. An "A" that may be the article counts against other letters, and not for A.
    """
    for caption in sorted(captions, key=len, reverse=True):
        if " " in caption:
            answer = re.sub(rf"(?<!\w){re.escape(caption)}(?!\w)", "quoted", answer, flags=re.IGNORECASE)
    answer = re.sub(r"[*_`#]", "", answer)
    bare = re.fullmatch(r"\W*(?:(?:caption|option|answer|choice)\W+)*([a-h])\W*", answer, re.IGNORECASE)
    named, chosen, declared = set(), set(), set()
    if bare:
        named = chosen = {bare[1].upper()}
    else:
        for clause in _CLAUSE.split(re.sub(r"\b(is|be)\s*:\s*", r"\1 ", answer)):  # a clause continues after "is:"
            mentions = list(_MENTION.finditer(clause))
            letters = {mention[1] for mention in mentions}
            named |= letters
            if len(letters) != 1:
                continue
            before, after = clause[:mentions[0].start()], clause[mentions[0].end():]
            article = letters == {"A"} and not re.search(r"\w\s+$", before) and not _LETTER_CONTINUES.match(after)
            if article or _DENIED_BEFORE.search(before) or _DENIED_AFTER.match(after):
                continue
            chosen |= letters
            if _VERDICT.search(before) or _VERDICT.search(after):
                declared |= letters
    choice = chosen if len(named) == 1 else declared
    return choice.pop() if len(choice) == 1 and choice <= set(LETTERS[:len(captions)]) else None


def summarise(votes: list[dict], names: list[str]) -> dict:
    """Return selection rates over well-formed answers, with binomial standard errors (too large if votes are shared).

    `letters` counts the answers by letter, as a judge may prefer a place in the list.
    """
    judged = [vote for vote in votes if vote["chosen"]]
    rates = {name: math.fsum(1 / len(vote["chosen"]) for vote in judged if name in vote["chosen"]) / len(judged)
             if judged else None for name in names}
    errors = {name: math.sqrt(rate * (1 - rate) / len(judged)) if len(judged) > 1 else None
              for name, rate in rates.items()}
    letters = Counter(LETTERS[vote["shown"].index(vote["chosen"])] for vote in judged if len(vote["shown"]) > 1)
    return {"images": len(votes), "judged": len(judged), "malformed": len(votes) - len(judged),
            "all_equal": sum(len(vote["shown"]) == 1 for vote in votes), "selection_rate": rates,
            "standard_error": errors, "letters": dict(sorted(letters.items()))}


def report(out: Path, path: Path, settings: dict, summary: dict) -> None:
    write_json(path, {**settings, **summary}, like=out, indent=4)
    if not summary["judged"]:
        raise ValueError(f"{path}: none of {summary['images']} answers names exactly one caption")
    width = max(map(len, settings["systems"]))
    print(f"{'system':<{width}}  selected (%)  standard error")
    for name, rate in summary["selection_rate"].items():
        error = summary["standard_error"][name]  # None of one image
        print(f"{name:<{width}}  {100 * rate:>12.1f}  {'unknown' if error is None else f'{100 * error:.1f}':>14}")
    print(f"{summary['judged']} of {summary['images']} images judged by {settings['model']}, {summary['malformed']} "
          f"malformed answers, {summary['all_equal']} with equal captions: {path}")
