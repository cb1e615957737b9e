"""IFEval: does a text follow instructions that can be checked? One line per kind of instruction; KINDS is the list.

    follows("punctuation:no_comma", {}, "No commas here.") -> True

Written from the published definitions (Zhou et al. 2023, arXiv 2311.07911, and the release in google-research). All 25 kinds
are here; 21 need nothing. response_language and the two kinds whose text must also be English need `langdetect`
(requirements-math.txt), number_sentences needs `nltk` with its punkt data, which is a download of its own. Without them such
a prompt is left out and counted at load. The one package with these checks on PyPI (if-verifiable 0.1.2) imports datasets and
nltk first and wants Python 3.11, so it is no help offline.

Two differences: the release replaces a letter outside a-z by a random one (letter_frequency of "#"); here the one that the
prompt names is counted. langdetect draws at random; here its seed is fixed.
"""

import functools
import json
import math
import re
from collections.abc import Callable

OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
CLITIC = re.compile(r"(?i)(n't|'(?:s|m|d|ll|re|ve))$")


def compared(n: int, relation: str, bound: int) -> bool:
    if relation not in ("at least", "less than"):
        raise ValueError(f"relation {relation!r}")
    return n >= bound if relation == "at least" else n < bound


def pattern(keyword: str) -> str:
    """The release reads keywords as regular expressions; one that is none is read as it stands."""
    try:
        re.compile(keyword)
    except re.error:
        return re.escape(keyword)
    return keyword


def found(keyword: str, text: str) -> int:
    return len(re.findall(pattern(keyword.strip()), text, re.I))


def sections(text: str, splitter: str) -> int:
    return len(re.split(rf"\s?{pattern(splitter.strip())}\s?\d+\s?", text)) - 1


def bullets(text: str) -> int:
    return len(re.findall(r"(?m)^\s*\*[^*].*$", text)) + len(re.findall(r"(?m)^\s*-.*$", text))


def highlights(text: str) -> int:
    """*marked* parts that are not empty; those in ** count twice, as in the release."""
    single = [h.strip("*").strip() for h in re.findall(r"\*[^\n*]*\*", text)]
    double = [h[2:-2].strip() for h in re.findall(r"\*\*[^\n*]*\*\*", text)]
    return sum(map(bool, single + double))


def has_title(text: str) -> bool:
    return any(title.lstrip("<").rstrip(">").strip() for title in re.findall(r"<<[^\n]+>>", text))


def has_postscript(text: str, marker: str) -> bool:
    marker = marker.strip()
    known = {"P.P.S": r"\s*p\.\s?p\.\s?s.*$", "P.S.": r"\s*p\.\s?s\..*$"}
    return bool(re.search(known.get(marker, rf"\s*{pattern(marker.lower())}.*$"), text.lower(), re.M))


def is_json(text: str) -> bool:
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def parts(text: str, divider: str) -> list[str] | None:
    """The stripped parts between dividers; None if one in the middle is empty. The first and the last may be."""
    out = [part.strip() for part in re.split(divider, text)]
    if not all(out[1:-1]):
        return None
    return [part for part in out if part]


def paragraphs(text: str) -> int:
    """Parts between lines of ***; -1 if one in the middle is empty."""
    found = parts(text, r"\s?\*\*\*\s?")
    return -1 if found is None else len(found)


def two_responses(text: str) -> bool:
    found = parts(text, r"\*{6}")
    return found is not None and len(found) == 2 and found[0] != found[1]


def opens_paragraph(text: str, first_word: str, count: int, nth: int) -> bool:
    """Paragraph nth (from 1) of count, between blank lines, opens with the word."""
    blocks = text.split("\n\n")
    filled = sum(bool(block.strip()) for block in blocks)
    if not 1 <= nth <= filled or not (words := blocks[nth - 1].split()):
        return False
    word = re.match(r"""[^.,?!'"]*""", words[0].lstrip("'").lstrip('"'))[0]
    return filled == count and word.lower() == first_word.lower()


def capital_words(text: str) -> int:
    """Words all in capitals, split as nltk does: DON'T and IT'S are two each, WELL-KNOWN and U.S. one."""
    count = 0
    for word in re.findall(r"[^\s\"“”()\[\]{}<>,;:?!@#$%&*`]+", text):
        stem = CLITIC.sub("", word.rstrip("'"))
        count += stem.isupper() + (stem != word and word[len(stem) :].isupper())
    return count


def quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


NEEDS = {  # kind -> package
    "language:response_language": "langdetect",
    "change_case:english_capital": "langdetect",
    "change_case:english_lowercase": "langdetect",
    "length_constraints:number_sentences": "nltk",
}


@functools.cache
def optional(name: str):
    """A package that need not be there, with what it needs, or None."""
    try:
        if name == "langdetect":
            import langdetect as package

            package.DetectorFactory.seed = 0
        else:
            import nltk as package

            package.sent_tokenize("Is the data there? It is.")
    except (ImportError, LookupError):
        return None
    return package


def in_language(text: str, wanted: str) -> bool | None:
    """Is the text in this language? A text of no language counts as followed, as in the release."""
    if (langdetect := optional("langdetect")) is None:
        return None
    try:
        return langdetect.detect(text) == wanted
    except langdetect.LangDetectException:
        return True


def sentences(text: str, relation: str, bound: int) -> bool | None:
    if (nltk := optional("nltk")) is None:
        return None
    return compared(len(nltk.sent_tokenize(text)), relation, bound)


# text and the kwargs of the data -> followed? None: cannot be said here
KINDS: dict[str, Callable[..., bool | None]] = {
    "change_case:capital_word_frequency": lambda t, capital_relation, capital_frequency: compared(
        capital_words(t), capital_relation, capital_frequency
    ),
    "change_case:english_capital": lambda t: t.isupper() and in_language(t, "en"),
    "change_case:english_lowercase": lambda t: t.islower() and in_language(t, "en"),
    "combination:repeat_prompt": lambda t, prompt_to_repeat: (
        t.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "combination:two_responses": two_responses,
    "detectable_content:number_placeholders": lambda t, num_placeholders: (
        len(re.findall(r"\[.*?\]", t)) >= num_placeholders
    ),
    "detectable_content:postscript": lambda t, postscript_marker: has_postscript(t, postscript_marker),
    "detectable_format:constrained_response": lambda t: any(o in t for o in OPTIONS),
    "detectable_format:json_format": is_json,
    "detectable_format:multiple_sections": lambda t, section_spliter, num_sections: (
        sections(t, section_spliter) >= num_sections
    ),
    "detectable_format:number_bullet_lists": lambda t, num_bullets: bullets(t) == num_bullets,
    "detectable_format:number_highlighted_sections": lambda t, num_highlights: highlights(t) >= num_highlights,
    "detectable_format:title": has_title,
    "keywords:existence": lambda t, keywords: all(re.search(pattern(k), t, re.I) for k in keywords),
    "keywords:forbidden_words": lambda t, forbidden_words: (
        not any(re.search(rf"\b{pattern(w)}\b", t, re.I) for w in forbidden_words)
    ),
    "keywords:frequency": lambda t, relation, keyword, frequency: compared(found(keyword, t), relation, frequency),
    "keywords:letter_frequency": lambda t, let_relation, letter, let_frequency: compared(
        t.lower().count(letter.lower()), let_relation, let_frequency
    ),
    "language:response_language": lambda t, language: in_language(t, language),
    "length_constraints:nth_paragraph_first_word": lambda t, first_word, num_paragraphs, nth_paragraph: opens_paragraph(
        t, first_word, num_paragraphs, nth_paragraph
    ),
    "length_constraints:number_paragraphs": lambda t, num_paragraphs: paragraphs(t) == num_paragraphs,
    "length_constraints:number_sentences": lambda t, relation, num_sentences: sentences(t, relation, num_sentences),
    "length_constraints:number_words": lambda t, relation, num_words: compared(
        len(re.findall(r"\w+", t)), relation, num_words
    ),
    "punctuation:no_comma": lambda t: "," not in t,
    "startend:end_checker": lambda t, end_phrase: t.strip().strip('"').lower().endswith(end_phrase.strip().lower()),
    "startend:quotation": quoted,
}


def follows(kind: str, kwargs: dict, text: str) -> bool | None:
    """Does the text follow one instruction? An empty text follows none. None: a package that says so is not installed."""
    if not text.strip():
        return False
    verdict = KINDS[kind](text, **kwargs)
    return None if verdict is None else bool(verdict)


def variants(text: str) -> list[str]:
    """What the loose reading also accepts: without asterisks, without the first line, the last line, or both."""
    lines = text.split("\n")
    cut = [text] + ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    return cut + [part.replace("*", "") for part in cut]


def check_ifeval(text: str, answer: list) -> dict[str, float]:
    """answer: [[kind, kwargs], ...]. reward: all instructions are followed (strict, prompt level); NaN where that hangs on
    one that cannot be scored here. loose: each is followed by one of the variants; followed: the share of instructions
    (strict)."""
    strict = [follows(kind, kwargs, text) for kind, kwargs in answer]
    loose = [any(follows(kind, kwargs, v) for v in variants(text)) for kind, kwargs in answer]
    return {
        "reward": 0.0 if False in strict else math.nan if None in strict else 1.0,
        "invalid": float(not text.strip()),
        "loose": float(all(loose)),
        "followed": strict.count(True) / len(strict),
    }
