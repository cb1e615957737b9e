"""Is an answer to a problem right? One pure function per kind of answer; VERIFIERS at the end is the list.

    VERIFIERS["number"]("So it is 1,024.", "1024") -> {"reward": 1.0, "invalid": 0.0, "exact": 0.0}

A verifier gets the text of a completion and what the problem's example holds as answer, and returns its reward (0 or 1, or a
share; NaN: cannot be scored) and columns to log: any of config.COLUMNS and COLUMNS_OF["text"] (invalid: nothing in the text
could be an answer; exact: a stricter test, where there is one). No text may make it raise or hang; where one does, rewards.score
counts it (reward_workers, reward_timeout). Left out: anything that needs a tensor, a model or the network.

Mathematics is compared in two steps: as numbers and as normalised LaTeX, here; then, where it is installed
(requirements-math.txt), by math-verify, which knows that \\sqrt{8} is 2\\sqrt{2}. Its own time limits are off: they are signals,
which reach the main thread only and no native code; workers.py keeps ours.
"""

import functools
import logging
import re
import sys
from collections.abc import Callable
from fractions import Fraction

import ifeval
import maze

SLOW = {"math", "ifeval"}  # rows that a text can make last for ever: algebra, regular expressions from data
WORKERS = 2  # processes for these where reward_workers says none
LONGEST = 1000  # characters of a boxed answer; nothing compares a longer one

# ---------------------------------------------------------------------------------------------------------------------
# Text -> its answer

BRACES = re.compile(r"(\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.S)
NUMBER = re.compile(r"(?:(?<![\d)])[-+])?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)", re.A)
CHOICE = re.compile(r"\(?([A-J])\)?(?:[.:)].*)?", re.S)
SAID = re.compile(r"(?i:\b(?:answer|choice|option)\b(?: is)?)[\s:*$(]*([A-J])\b")


def boxed(text: str) -> str | None:
    """What the last \\boxed{...} holds that closes and is not empty; None without one. Braces nest; \\{ and \\} are none."""
    open_at, last, content = [], -1, None
    for m in BRACES.finditer(text):
        if m[1] or m[0] == "{":
            open_at.append((m.end(), bool(m[1])))
        elif m[0] == "}" and open_at:
            start, is_box = open_at.pop()
            if is_box and start > last and (inside := text[start : m.start()].strip()):
                last, content = start, inside
    return content


# ---------------------------------------------------------------------------------------------------------------------
# Are two answers the same?

WORDS = r"\\(?:text|mbox|textbf|textit|mathrm|mathbf|mathit|operatorname)\s*\{([^{}]*)\}"
REWRITES = [(re.compile(a), b) for a, b in (
    (r"\\(?:left|right|displaystyle|,|;|:|!| )|\\?\$|~", ""),  # spacing, and the dollar of prices as that of mathematics
    (r"\\?%|\^\s*\{?\s*\\circ\s*\}?|\\degree\b", ""),
    (r"\\[dt]frac\b", r"\\frac"),
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
    (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
    (r"(?<=[^\s(\[{,])\s*" + WORDS + r"(?:\s*\^\s*\{?\d\}?)?\s*$", ""),  # a unit behind the value
    (WORDS, r"\1"),
    (r"(\d)\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{?\s*([-+]?\d+)\s*\}?", r"\1e\2"),
    (r"^\s*[A-Za-z](?:_\{?\w+\}?)?\s*=(?=[^=]+$)", ""),  # x = 5
    (r"\s+", ""),
    (r"\.$", ""),
    (r"^\(([-+]?[\d./]+)\)$", r"\1"),  # a number in parentheses, but no pair
)]  # fmt: skip
VALUE = re.compile(r"([-+]?)(?:\\frac\{([-+]?\d{1,99})\}\{(\d{1,99})\}|([-+]?\d{1,99})/(\d{1,99})|"
                   r"(\d{1,99}|\d{1,3}(?:,\d{3}){1,30})?(\.\d{0,99})?(?:[eE]([-+]?\d{1,3}))?)", re.A)  # fmt: skip


def normal(answer: str) -> str:
    """LaTeX without what does not change its meaning; words of more than one letter without case."""
    for pattern, by in REWRITES:
        answer = pattern.sub(by, answer)
    return answer.casefold() if answer.isalpha() and len(answer) > 1 else answer


def value_of(answer: str) -> Fraction | None:
    """The number that a normal form spells: 12,345 | -3/4 | \\frac{3}{4} | 27.0 | 4.5e33; None where it is none."""
    if not (m := VALUE.fullmatch(answer)):
        return None
    sign, above, below, over, under, whole, part, power = m.groups()
    above, below = above or over, below or under
    if not (below or whole or re.search(r"\d", part or "", re.A)):  # e4 is a square of a chess board, and not 0
        return None
    if below:
        number = Fraction(int(above), int(below)) if int(below) else None
    else:
        number = Fraction((whole or "0").replace(",", "") + (part or "").rstrip(".")) * Fraction(10) ** int(power or 0)
    return -number if number is not None and sign == "-" else number


def same(a: str, b: str) -> bool:
    """Equal as numbers or as normalised text."""
    a, b = normal(a), normal(b)
    return (a == b and a != "") or (value_of(a) is not None and value_of(a) == value_of(b))


@functools.cache
def math_verify():
    """The package, or None, said once, where it is not installed."""
    try:
        import math_verify
    except ImportError:
        print("math-verify is not installed (pip install -r requirements-math.txt): answers count only where they are equal "
              "as numbers or as text", file=sys.stderr)  # fmt: skip
        return None
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns at each call that its time limits are off
    return math_verify


def equal(gold: str, said: str) -> bool:
    """Equal to math-verify; False without it."""
    if (package := math_verify()) is None:
        return False
    # it takes 4.5e33 for 4.5 times Euler's number times 33
    shown = [re.sub(r"(\d)[eE]([-+]?\d+)", r"\1\\times10^{\2}", a.replace("$", "")) for a in (gold, said)]
    parsed = [package.parse(f"\\boxed{{{a}}}", parsing_timeout=None) for a in shown]
    return package.verify(*parsed, timeout_seconds=None)


# ---------------------------------------------------------------------------------------------------------------------
# The rows


def check_math(text: str, answer: str | list[str]) -> dict[str, float]:
    """What the last box holds is the answer, or one of several. exact: as a number or as text, without algebra.

    Without a box there is no answer, whatever the text says: a number that a cut-off text happens to end in would be right
    once in 256 tries.
    """
    said = boxed(text)
    if said is None or len(said) > LONGEST:
        return {"reward": 0.0, "invalid": 1.0, "exact": 0.0}
    golds = [answer] if isinstance(answer, str) else answer
    exact = any(same(gold, said) for gold in golds)
    return {"reward": float(exact or any(equal(gold, said) for gold in golds)), "invalid": 0.0, "exact": float(exact)}


def check_number(text: str, answer: str) -> dict[str, float]:
    """The number in the last box, or the last one of the text where there is no box, is the answer. exact: in a box."""
    box = boxed(text)
    found = NUMBER.findall(text if box is None else normal(box))
    one = len(found) == 1 or (box is None and found)  # of 1 + 1 in a box neither number is the answer
    value = value_of(found[-1]) if one else value_of(normal(box or ""))
    right = value is not None and value == value_of(normal(str(answer)))
    return {"reward": float(right), "invalid": float(value is None), "exact": float(right and box is not None)}


def check_choice(text: str, answer: str) -> dict[str, float]:
    """The letter of the last box, or else the last one that is called the answer. exact: in a box."""
    box = boxed(text)
    if box is not None:
        m = CHOICE.fullmatch(re.sub(WORDS, r"\1", box).strip(" \t\n$*."))
    else:
        m = next(iter([*SAID.finditer(text)][-1:]), None)
    right = m is not None and m[1] == answer
    return {"reward": float(right), "invalid": float(m is None), "exact": float(right and box is not None)}


VERIFIERS: dict[str, Callable[[str, object], dict[str, float]]] = {
    "number": check_number,
    "math": check_math,
    "choice": check_choice,
    "ifeval": ifeval.check_ifeval,
    "walk": maze.check_walk,
    "target": maze.check_target,
}
MORE = {"ifeval": ["loose", "followed"], "walk": ["walk"], "target": ["walk"]}  # columns beyond COLUMNS_OF["text"]
