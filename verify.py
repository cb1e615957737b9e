"""Is an answer to a problem right? One pure function per kind of answer; VERIFIERS at the end is the list.

    VERIFIERS["number"]("So it is 1,024.", "1024") -> {"reward": 1.0, "invalid": 0.0}

A verifier gets the text of a completion and what the problem's example holds as answer, and returns its reward (0 or 1, or a
share) and columns to log: any of config.COLUMNS and COLUMNS_OF["text"] (invalid: nothing in the text could be an answer;
exact: a stricter test, where there is one). No text may make it raise or hang; where one does, rewards.score counts it
(reward_workers, reward_timeout). Left out: anything that needs a tensor, a model or the network.
"""

import re
from collections.abc import Callable
from decimal import Decimal

NUMBER = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?|[-+]?\d*\.?\d+")


def check_number(text: str, answer: str) -> dict[str, float]:
    """The last number of the text equals the answer (a number as text); commas between thousands do not matter."""
    found = NUMBER.findall(text)
    if not found:
        return {"reward": 0.0, "invalid": 1.0}
    return {"reward": float(value_of(found[-1]) == value_of(str(answer))), "invalid": 0.0}


def value_of(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))


VERIFIERS: dict[str, Callable[[str, object], dict[str, float]]] = {
    "number": check_number,
}
