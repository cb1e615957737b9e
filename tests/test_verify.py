"""Verifiers: what is read as the answer, what counts as the same, and what no text can do."""

import math
import random
import time

import pytest

import ifeval
import verify
import workers

# ---------------------------------------------------------------------------------------------------------------------
# Answers in text


@pytest.mark.parametrize("text, content", [
    (r"so \boxed{\frac{3\sqrt{3}}{4}}.", r"\frac{3\sqrt{3}}{4}"),
    (r"\boxed{1}, no: \boxed{2}", "2"),
    (r"\boxed{1} and then \boxed{2", "1"),  # cut off
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
    (r"\boxed{a \\{b}}", r"a \\{b}"),  # a line break, then a brace
    (r"}} \boxed {7} }", "7"),
    (r"\boxed{\boxed{5}}", "5"),
    (r"\fbox{3}", "3"),
    (r"\boxed{4} as \boxed{} asks", "4"),
    ("nothing", None),
    (r"\boxed{", None),
])  # fmt: skip
def test_the_last_box_that_closes_is_the_answer(text, content):
    assert verify.boxed(text) == content


def test_many_open_boxes_take_no_time():
    start = time.perf_counter()
    assert verify.boxed("\\boxed{" * 200_000) is None
    assert time.perf_counter() - start < 3


SAME = [
    ("27.0", "27"), ("025", "25"), ("10,\\!080", "10080"), ("\\$32,\\!348", "32348"), ("2,125", "2125"), (".5", "\\frac12"),
    ("90^\\circ", "90"), ("50\\%", "50"), ("864 \\mbox{ inches}^2", "864"), ("\\frac{270}7\\text{ degrees}", "270/7"),
    ("\\dfrac{1}{2}", "0.5"), ("\\text{Evelyn}", "evelyn"), ("x=5", "5"), ("\\left(3,4\\right]", "(3, 4]"), ("$69$,$84$", "69, 84"),
    ("4.5e33", "4.5 \\times 10^{33}"), ("-\\frac{3}{4}", "-0.75"), ("(073)", "73"),
]  # fmt: skip
DIFFERENT = [
    ("27", "28"), ("1,3,5", "135"), ("(3,4]", "[3,4]"), ("1,000", "1"), ("\\frac{1}{2}", "\\frac{2}{1}"), ("4.5e33", "4.5e32"),
    ("x", "X"), ("1/0", "0"), ("-5", "5"), ("3.14", "\\pi"), ("", ""), ("1e-999", "0"), ("12", "1,2"), ("2^{10}", "210"),
    ("e4", "e5"), ("e4", "0"),
]  # fmt: skip


@pytest.mark.parametrize("a, b, equal", [(*p, True) for p in SAME] + [(*p, False) for p in DIFFERENT])
def test_two_answers_are_the_same_number_or_text(a, b, equal):
    assert verify.same(a, b) is verify.same(b, a) is equal


@pytest.mark.parametrize("check, answer, text, found", [
    # number: the last one, unless a box says otherwise
    ("number", "1024", "3 + 4 = 7. So it is $1,024.", (1, 0, 0)),
    ("number", "1024", "\\boxed{1024 \\text{ m}} and 5 more", (1, 0, 1)),
    ("number", "1024", "#### 1,024.00", (1, 0, 0)),
    ("number", "-10", "from 20 to -10", (1, 0, 0)),
    ("number", "10", "20-10", (1, 0, 0)),
    ("number", "1", "\\boxed{1+1}", (0, 1, 0)),
    ("number", "1024", "1024 or 1025", (0, 0, 0)),
    ("number", "1024", "many", (0, 1, 0)),
    ("number", "7", "9" * 9999, (0, 1, 0)),
    # math: a box or nothing
    ("math", "27", "\\boxed{27.0}", (1, 0, 1)),
    ("math", "27", "the answer is 27", (0, 1, 0)),
    ("math", "27", "\\boxed{27/0}", (0, 0, 0)),
    ("math", "27", "\\boxed{" + "2" * 2000 + "}", (0, 1, 0)),
    ("math", ["4.4e7", "4.5e7"], "\\boxed{4.5 \\cdot 10^7}", (1, 0, 1)),
    ("math", ["4.4e7", "4.5e7"], "\\boxed{4.4e7, 4.5e7}", (0, 0, 0)),
    # choice: a letter in a box, or one that is called the answer
    ("choice", "B", "\\boxed{\\text{(B)}}", (1, 0, 1)),
    ("choice", "B", "\\boxed{B) 5 metres}", (1, 0, 1)),
    ("choice", "B", "\\boxed{Boron}", (0, 1, 0)),
    ("choice", "B", "Not A. The correct answer is **B**.", (1, 0, 0)),
    ("choice", "B", "The answer is A. The answer is (B)", (1, 0, 0)),
    ("choice", "A", "A good answer is a long one", (0, 1, 0)),
    ("choice", "B", "\\boxed{A}, though the answer is B", (0, 0, 0)),
])  # fmt: skip
def test_reward_invalid_and_exact(check, answer, text, found, monkeypatch):
    monkeypatch.setattr(verify, "math_verify", lambda: None)
    got = verify.VERIFIERS[check](text, answer)
    assert (got["reward"], got["invalid"], got["exact"]) == found


def test_no_text_makes_a_verifier_raise():
    rng, answers = (
        random.Random(0),
        {"number": "7", "math": "7", "choice": "A", "ifeval": [["detectable_format:title", {}]]},
    )
    bits = [
        "\\boxed{",
        "}",
        "{",
        "\\frac",
        "1",
        "/0",
        "e999",
        "\\",
        ",",
        "$",
        "٣",
        "²",
        "\x00",
        "\ud800",
        "answer is",
        "A",
        "\n",
        "^",
    ]
    for _ in range(200):
        text = "".join(rng.choice(bits) for _ in range(rng.randrange(12)))
        text = text.encode("utf-8", "replace").decode()
        text = rng.choice([text, f"\\boxed{{{text}}}"])
        for check, answer in answers.items():
            assert set(verify.VERIFIERS[check](text, answer)) >= {"reward", "invalid"}


# ---------------------------------------------------------------------------------------------------------------------
# math-verify


@pytest.mark.parametrize("gold, said, right", [
    ("\\sqrt{8}", "2\\sqrt{2}", 1), ("1,-2", "\\{-2, 1\\}", 1), ("(x+1)^2", "x^2+2x+1", 1), ("1 \\pm \\sqrt{19}", "1-\\sqrt{19},1+\\sqrt{19}", 1),
    ("\\frac{\\pi}{2}", "\\pi/2", 1), ("\\sqrt{8}", "2\\sqrt{3}", 0), ("(3,4]", "[3,4]", 0), ("x+1", "x-1", 0), ("\\pi", "3.14", 0),
])  # fmt: skip
def test_algebra_is_left_to_math_verify(gold, said, right, monkeypatch):
    pytest.importorskip("math_verify")
    got = verify.check_math(f"\\boxed{{{said}}}", gold)
    assert got == {"reward": right, "invalid": 0.0, "exact": 0.0}
    monkeypatch.setattr(verify, "math_verify", lambda: None)
    assert verify.check_math(f"\\boxed{{{said}}}", gold)["reward"] == 0, "without it such answers get no credit"


def test_math_verify_sets_no_alarm_so_it_works_in_any_thread():
    """Its own limits are SIGALRM, which raises outside the main thread; the error would be taken for a wrong answer."""
    pytest.importorskip("math_verify")
    import threading

    got = []
    thread = threading.Thread(target=lambda: got.append(verify.equal("\\sqrt{8}", "2\\sqrt{2}")))
    thread.start()
    thread.join()
    assert got == [True]


def test_an_answer_that_never_ends_costs_itself_only():
    """A comparison of two differential equations that sympy does not come back from; one of Minerva is such."""
    pytest.importorskip("math_verify")
    gold = "ml\\ddot{\\theta}(t) - mg\\sin\\theta(t) = f(t)\\cos\\theta(t)"
    jobs = [(f"\\boxed{{{gold}+1}}", gold), ("\\boxed{3}", "3"), ("\\boxed{4}", "3")]
    found = workers.run(verify.check_math, jobs, verify.WORKERS, 1.0)
    assert "TimeoutError" in found[0].what and [r["reward"] for r in found[1:]] == [1, 0]


# ---------------------------------------------------------------------------------------------------------------------
# IFEval

FOLLOWED = [  # kind, kwargs, a text that follows it, one that does not
    ("change_case:capital_word_frequency", {"capital_relation": "at least", "capital_frequency": 3}, "DON'T go, NASA", "NASA is IN"),
    ("change_case:capital_word_frequency", {"capital_relation": "less than", "capital_frequency": 1}, "Nasa", "NASA"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi. "}, " say hi.\nHi", "Hi. Say hi."),
    ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("combination:two_responses", {}, "******one******two", "one******two******three"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] at [place]", "[name] at place"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\np. s. me", "Bye. P S me"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye.\nP.P.S. me", "P.S. me"),
    ("detectable_format:constrained_response", {}, "Well. My answer is no.", "My answer is no"),
    ("detectable_format:json_format", {}, "```json\n{\"a\": [1]}\n```", "{'a': 1}"),
    ("detectable_format:multiple_sections", {"section_spliter": "SECTION", "num_sections": 2}, "SECTION 1 a SECTION 2 b", "SECTION 1 a Section 2 b"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n - b", "* a\n- b\n- c"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 1}, "**bold**\n* a", "* a\n* b"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and *b*", "*a* and * *"),
    ("detectable_format:title", {}, "<<A title>>\ntext", "<< >> text"),
    ("keywords:existence", {"keywords": ["Mom", "dad"]}, "MOM and Dad", "Mom and son"),
    ("keywords:forbidden_words", {"forbidden_words": ["rock"]}, "rocket", "a Rock."),
    ("keywords:frequency", {"relation": "at least", "keyword": "war", "frequency": 2}, "War in warsaw", "war"),
    ("keywords:frequency", {"relation": "less than", "keyword": "c++(", "frequency": 1}, "c", "C++( is no pattern"),
    ("keywords:letter_frequency", {"let_relation": "at least", "letter": "q", "let_frequency": 2}, "Quiq", "quit"),
    ("keywords:letter_frequency", {"let_relation": "less than", "letter": "#", "let_frequency": 2}, "#a", "#a #b"),
    ("length_constraints:nth_paragraph_first_word", {"first_word": "weekend", "num_paragraphs": 2, "nth_paragraph": 2}, "a\n\n\"Weekend, yes", "weekend\n\na"),
    ("length_constraints:nth_paragraph_first_word", {"first_word": "a", "num_paragraphs": 2, "nth_paragraph": 1}, "a b\n\nc", "a b\n\nc\n\nd"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb\n***", "a\n***\n***\nb"),
    ("length_constraints:number_words", {"relation": "at least", "num_words": 3}, "one two-three", "one two"),
    ("length_constraints:number_words", {"relation": "less than", "num_words": 3}, "one two", "one two-three"),
    ("punctuation:no_comma", {}, "a; b", "a, b"),
    ("startend:end_checker", {"end_phrase": "Peace! "}, "So \"peace!\" ", "Peace! Bye"),
    ("startend:quotation", {}, " \"hi\" ", "\"hi"),
]  # fmt: skip


@pytest.mark.parametrize("kind, kwargs, follows, breaks", FOLLOWED)
def test_each_instruction_that_needs_no_package(kind, kwargs, follows, breaks):
    assert ifeval.follows(kind, kwargs, follows) is True and ifeval.follows(kind, kwargs, breaks) is False


def test_every_kind_is_tested_or_needs_a_package():
    assert {kind for kind, *_ in FOLLOWED} | set(ifeval.NEEDS) == set(ifeval.KINDS) and len(ifeval.KINDS) == 25


def test_case_and_language_need_langdetect(monkeypatch):
    upper, lower = "change_case:english_capital", "change_case:english_lowercase"
    monkeypatch.setattr(ifeval, "optional", lambda name: None)
    assert ifeval.follows(upper, {}, "Not all") is False and ifeval.follows(upper, {}, "ALL OF IT") is None
    assert math.isnan(ifeval.check_ifeval("all of it", [[lower, {}]])["reward"])
    assert ifeval.check_ifeval("all, of it", [[lower, {}], ["punctuation:no_comma", {}]])["reward"] == 0
    monkeypatch.undo()
    pytest.importorskip("langdetect")
    german = "das ist ein ganz normaler deutscher satz mit vielen wörtern, und noch einer dazu."
    english = "this is quite a normal english sentence with many words, and one more of them."
    assert ifeval.follows(lower, {}, english) is True and ifeval.follows(lower, {}, german) is False
    assert ifeval.follows("language:response_language", {"language": "de"}, german) is True


def test_all_instructions_count_strictly_and_loosely():
    wanted = [["startend:quotation", {}], ["punctuation:no_comma", {}]]
    assert ifeval.check_ifeval('"all well"', wanted) == {"reward": 1.0, "invalid": 0.0, "loose": 1.0, "followed": 1.0}
    # a first line that does not belong to the answer, and stars around it: loosely fine
    assert ifeval.check_ifeval('Sure:\n*"all well"*', wanted) == {
        "reward": 0.0,
        "invalid": 0.0,
        "loose": 1.0,
        "followed": 0.5,
    }
    assert ifeval.check_ifeval(" \n", wanted) == {"reward": 0.0, "invalid": 1.0, "loose": 0.0, "followed": 0.0}
