"""Properties of the parsers, for arbitrary strings and arbitrary token sequences (hypothesis).

Strings: every code point, halves of characters too, and texts made of the pieces of an answer: tags whole and in parts, line
breaks of all kinds, list marks, numbers, right-to-left and combining characters. Token sequences: of the Qwen3 and SmolLM2
tokenizers and of those built here, ids beyond the tokenizer included. The draws are the same in every run.
"""

import json
import math
import unicodedata

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_masks import pieces_of, real, rolled

import data
import model as lm
import rewards
from config import Config
from data import Example
from rewards import (
    clean,
    entries,
    halves,
    identity,
    join,
    line_units,
    match,
    parse,
    parse_line,
    phase_units,
    rank_units,
)

TAGS = Config().tags
TITLES = [
    "Heat (1995)",
    "東京物語 (1953)",
    "Amélie (2001)",
    "العربية (1999)",
    "Food, Inc. (2008)",
    "1984",
    "👩‍👧",
    "e\u0301 (1950)",
]
BREAKS = [
    "\n",
    "\r\n",
    "\r",
    "\v",
    "\f",
    "\x1c",
    "\x85",
    "\u2028",
    "\u2029",
    "\n\n",
    "\0",
    "\t",
    "\u00a0",
    "\u200b",
    " ",
]
MARKS = [
    "- ",
    "* ",
    "• ",
    "1. ",
    "2) ",
    "[3] ",
    "#4: ",
    "**",
    '"',
    "'",
    "“",
    "”",
    ",",
    ">",
    "1",
    "2",
    "[1]",
    "(1999)",
    "()",
    "9" * 5000,
]
PARTS = [t[a:b] for t in TAGS for a, b in ((0, 1), (0, 3), (2, 9), (0, -1), (1, 9))] + [
    "<|im_end|>",
    "<eos>",
    "\ud83d",
    "\udcff",
]
ANY = st.text(st.characters(exclude_categories=()), max_size=30)
FRAGMENT = st.one_of(
    *(st.sampled_from(x) for x in (TAGS, TITLES, BREAKS, MARKS, PARTS)), st.sampled_from(["\n", *TITLES, *TAGS]), ANY
)
SECTION = st.lists(st.tuples(st.sampled_from([*TITLES, *MARKS]), st.sampled_from(BREAKS[:4])).map("".join), max_size=6)
ANSWER = st.tuples(SECTION, SECTION).map(
    lambda x: f"{TAGS[0]}\n{''.join(x[0])}{TAGS[1]}\n{TAGS[2]}\n{''.join(x[1])}{TAGS[3]}"
)
TEXT = st.one_of(st.lists(FRAGMENT, max_size=25).map("".join), ANSWER, ANY)
TOKENIZERS = ("qwen3-tokenizer", "smollm2-tokenizer", "word", "line", "byte")
POOL = {identity(t): t for t in TITLES}


def often(n: int):
    quiet = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    return settings(max_examples=n, derandomize=True, deadline=None, database=None, suppress_health_check=quiet)


def tokenizer_of(kind: str):
    texts = ["".join(f"{x}\n" for x in [*TAGS, *TITLES])]
    return real(kind)[0] if "-" in kind else BUILT.setdefault(kind, lm.build_tokenizer(kind, texts))


BUILT: dict = {}


def said(draw, kind: str) -> list[int]:
    """Ids: random ones, those of fragments, and both cut anywhere."""
    tokenizer = tokenizer_of(kind)
    size, out = len(tokenizer) + 200, []
    for part in draw.draw(st.lists(st.one_of(st.integers(0, size), FRAGMENT, ANSWER), max_size=12)):
        if isinstance(part, str):
            ids = tokenizer(part.encode("utf-8", "replace").decode(), add_special_tokens=False)["input_ids"]
            out += ids[draw.draw(st.integers(0, 2)) :] if part not in TITLES else ids
        else:
            out.append(part)
    return out


def said_bytes(kind: str, ids: list[int]) -> list[bytes]:
    pieces = pieces_of(tokenizer_of(kind))
    return [pieces[i] if i < len(pieces) else b"" for i in ids]


def assert_parsed(text: str, out: rewards.Parsed):
    assert out.valid == (out.error is None) and out.slate_valid == bool(out.items)
    for span in filter(None, out.spans):
        assert 0 <= span[0] <= span[1] <= len(text) and not any(t in text[slice(*span)] for t in TAGS)
    found = [s for s in out.spans if s]
    assert found == sorted(found) and len(found) in (0, 2)  # all tags once and in order, or no span at all
    flat = " ".join(text.split())
    assert all(item and item in flat and clean(item) == item for item in out.items)
    assert len(set(map(identity, out.items_unique))) == len(out.items_unique) and set(out.items_unique) <= set(
        out.items
    )
    assert len(set(out.rank_indices)) == len(out.rank_indices)
    assert out.ranking == [out.items_unique[i] for i in out.rank_indices]
    if out.valid:
        assert len(found) == 2 and out.ranking and not out.broken
        assert all(item in text[slice(*out.slate_span)].replace("\t", " ") or " " in item for item in out.items)
    else:
        assert out.broken


@given(TEXT, st.booleans())
@often(1000)
def test_any_text_is_parsed_and_the_parts_agree(text, strict):
    out = parse(text, TAGS, strict, POOL)
    assert_parsed(text, out)
    assert not (strict and out.valid and (out.unknown or out.duplicate_ranks))
    assert parse(text, TAGS, strict, POOL) == out


@given(TEXT)
@often(400)
def test_what_was_read_is_read_again_when_it_is_written(text):
    """Idempotence: the slate and the ranking of a valid answer, written an item a line, are the same ones. (A ranking of bare
    numbers is one of positions, by its syntax.)"""
    out = parse(text, TAGS)
    if not out.valid or all(rewards.NUMBER.fullmatch(x) for x in out.ranking):
        return
    known = set(map(identity, out.items))  # or a single line would be split at its commas
    again = parse("\n".join([TAGS[0], *out.items, TAGS[1], TAGS[2], *out.ranking, TAGS[3]]), TAGS, True, known)
    assert (again.error, again.items, again.ranking) == (None, out.items, out.ranking)


@given(TEXT)
@often(600)
def test_entries_and_lines_of_any_text(text):
    assert clean(clean(text)) == clean(text) and "\n" not in clean(text)
    assert all(e == e.strip() and e in text for e in entries(text))
    assert identity(identity(text)) == identity(text) or identity(text).casefold() != identity(
        text
    )  # folding twice may fold on
    found = parse_line(text)
    if found is not None:
        title, year = found
        left = iter(text)  # the title stands there in order, less what is in parentheses
        assert title and f"{year:04}" in text and all(c in left for c in title if c != " ")
        assert parse_line(f"{title} ({year:04})") == found


PAIRS = st.tuples(st.sampled_from(["Heat", "heat ", "ΑΣ", "Up"]), st.integers(1990, 1996))


@given(st.lists(st.one_of(st.none(), PAIRS), max_size=8), st.lists(PAIRS, max_size=5), st.integers(0, 3))
@often(400)
def test_hits_of_any_list_claim_each_gold_item_once(items, gold, tolerance):
    hits = match(items, gold, tolerance=tolerance)
    assert len(hits) == len(items) and set(hits) <= {0, 1} and sum(hits) <= len(gold)
    assert not any(h for h, x in zip(hits, items) if x is None)
    assert match(gold, gold, tolerance=tolerance) == [1] * len(gold)
    near = [x and any(identity(x[0]) == identity(t) and abs(x[1] - y) <= tolerance for t, y in gold) for x in items]
    assert all(n for h, n in zip(hits, near) if h) and (sum(hits) > 0) == any(near)


@given(st.lists(st.binary(max_size=6), max_size=20), st.integers(1, 5), st.data())
@often(500)
def test_units_of_any_bytes_are_those_of_their_places(pieces, n, draw):
    """Against a slower way: every byte gets the unit of its character, every token looks at its bytes."""
    whole, text = b"".join(pieces), join(pieces)
    assert text.encode("utf-8", "surrogateescape") == whole
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(text)), min_size=4, max_size=4)))
    spans = [(cuts[0], cuts[1]), draw.draw(st.sampled_from([None, (cuts[2], cuts[3])]))]
    labels = []
    for i, c in enumerate(text):
        inside = next((u for u, s in enumerate(filter(None, spans), 1) if s[0] <= i < s[1]), 0)
        labels += [inside] * len(c.encode("utf-8", "surrogateescape"))
    at, want = 0, []
    for p in pieces:
        mine = set(labels[at : at + len(p)])
        want.append(mine.pop() if len(mine) == 1 else 0)
        at += len(p)
    assert phase_units(pieces, text, spans) == want

    units, lines = rank_units(pieces, n)
    starts = [sum(map(len, pieces[:i])) for i in range(len(pieces))]
    raw = whole.split(b"\n")
    full = [bool(join([line]).strip()) for line in raw]
    opened = [whole[:s].count(b"\n") for s in starts]  # the line that is open where the token starts
    assert units == [min(max(sum(full[: i + 1]), 1), n + 1) for i in opened] and units == sorted(units)
    assert lines == [join([line]) for line, f in zip(raw, full) if f]
    assert line_units(pieces) == opened
    both = halves(pieces, TAGS)
    assert both == sorted(both) and set(both) <= {1, 2} and len(both) == len(pieces)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_any_token_sequence_is_scored_and_its_units_are_those_of_the_parse(kind):
    example = Example(
        "1", "?", TITLES, {TITLES[0]: 2.0, TITLES[3]: 1.0}, responders=[{TITLES[0]: 1.0}, {TITLES[3]: 1.0}]
    )

    @given(st.lists(st.booleans(), min_size=3, max_size=3), st.data())
    @often(60)
    def check(flags, draw):
        rows = [said(draw, kind), said(draw, kind), [tokenizer_of(kind).eos_token_id]]
        roll = rolled(*rows)
        cfg = Config(
            slate_size=4, rank_size=2, train_delimiters=flags[0], strict_rank=flags[1], append_unranked=flags[2]
        )
        for unit, units in (("phase", 2), ("sequence", 1), ("rank", 5)):
            got = rewards.score(roll, [example] * 3, pieces_of(tokenizer_of(kind)), cfg, unit)
            assert not got.unit_ids[~roll.mask].any() and 0 <= got.unit_ids.min() and got.unit_ids.max() <= units
            assert got.reward.shape == (3, units) and got.valid.all() and got.reward.isfinite().all()
            assert got.parts["reward_errors"] == [0.0] * 3 and json.dumps([got.parts, got.answers], allow_nan=False)
            assert all(math.isfinite(x) for column in got.parts.values() for x in column)
            assert (got.reward <= torch.tensor(got.high) + 1e-9).all()
            for b, ids in enumerate(rows):
                pieces, mine = said_bytes(kind, ids), got.unit_ids[b][: len(ids)].tolist()
                text = got.texts[b]
                assert text.encode("utf-8", "surrogateescape") == b"".join(pieces)
                slate, ranking = got.answers[b]
                if unit == "rank":
                    assert mine == rank_units(pieces, 4)[0] and len(ranking) == 4
                    assert all(x is None or x in TITLES for x in ranking)
                    continue
                parsed = parse(text, TAGS, cfg.strict_rank, POOL)
                assert_parsed(text, parsed)
                assert got.parts["invalid"][b] == float(not parsed.valid) and set(ranking) <= set(slate)
                if unit == "sequence":
                    assert mine == [1] * len(ids)
                elif parsed.valid and not cfg.train_delimiters:
                    assert mine == phase_units(pieces, text, parsed.spans)
                else:
                    assert mine == halves(pieces, TAGS)

    check()


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_any_text_survives_its_tokens_and_has_one_stop_token(kind):
    """Nothing is lost where the vocabulary has every byte (SmolLM2's lacks some, those built from words most); Qwen3 composes
    characters first."""
    tokenizer, pieces = tokenizer_of(kind), set(pieces_of(tokenizer_of(kind)))

    @given(TEXT)
    @often(150)
    def check(text):
        text = text.encode("utf-8", "replace").decode()
        *ids, stop = data.encode_answer(tokenizer, text)
        assert stop == tokenizer.eos_token_id and stop not in ids
        want = unicodedata.normalize("NFC", text) if kind.startswith("qwen3") else text
        if all(bytes([b]) in pieces for b in want.encode()):
            assert join(said_bytes(kind, ids)) == want

    check()
