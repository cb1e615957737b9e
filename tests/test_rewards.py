"""Rewards of slates and rankings: every switch of the configuration, and what must not matter (faults F18 F51)."""

import itertools
import json
import math
import random

import pytest
import torch

import data
import model as lm
import rewards
from config import CHOICES, Config
from data import Example
from rewards import dcg, identity, ndcg, parse, score, slate_scores, token_bytes
from rollout import Rollout

TOKENIZER = lm.build_tokenizer("byte", [])
PIECES = token_bytes(TOKENIZER)
POOL = ["Alien (1979)", "Heat (1995)", "Amélie (2001)", "東京物語 (1953)", "Up, Up (2009)", "Dune (2021)", "Her (2013)"]
GOLD = {"Heat (1995)": 3.0, "東京物語 (1953)": 2.0, "Her (2013)": 1.0}
TAGS = Config().tags


def write(slate: list[str], ranking: list[str]) -> str:
    a, b, c, d = TAGS
    return "\n".join([a, *slate, b, c, *ranking, d])


def scored(texts, unit="phase", gold=GOLD, pool=POOL, **settings) -> rewards.Scored:
    """One request, a completion per text (or several requests: lists of gold and pool)."""
    texts = [texts] if isinstance(texts, str) else texts
    ids = [TOKENIZER(t)["input_ids"] for t in texts]
    width = max(map(len, ids))
    mask = torch.arange(width) < torch.tensor([len(i) for i in ids])[:, None]
    tokens = torch.tensor([i + [0] * (width - len(i)) for i in ids])
    group = torch.zeros(len(ids), dtype=torch.long)
    roll = Rollout([[3]], tokens, torch.zeros(tokens.shape), mask, group, torch.ones(len(ids), dtype=torch.bool))
    return score(roll, [Example("1", "?", pool, gold)], PIECES, Config(**settings), unit)


def pair(slate, ranking, **settings) -> tuple[float, float]:
    """(R_slate, R_rank) of a well-formed answer."""
    return tuple(scored(write(slate, ranking), **settings).reward[0].tolist())


def discount(*places: int) -> float:
    return sum(1 / math.log2(p + 1) for p in places)


A, H, M, T, U, D, R = POOL
S = [A, H, M, T, A]  # 2 of 3 gold, one item twice: 4 distinct of 5


# ---------------------------------------------------------------------------------------------------------------------
# Switches


@pytest.mark.parametrize("kind, want", (
    ("recall", 2 / 3), ("f1", 2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3)), ("f1_raw", 2 * (2 / 5) * (2 / 3) / (2 / 5 + 2 / 3)),
    ("utility", 5 / 6),
))  # fmt: skip
def test_slate_reward_is_recall_f1_over_distinct_items_f1_over_the_length_or_utility(kind, want):
    assert pair(S, [A], slate_reward=kind)[0] == pytest.approx(want)
    assert pair([H, T, R], [A, H], slate_reward=kind)[0] == 1.0  # the gold and nothing else
    assert pair([A, M], [A], slate_reward=kind)[0] == 0.0
    assert {"recall", "f1", "f1_raw", "utility"} == set(CHOICES["slate_reward"])


def test_every_switch_of_the_ndcg_by_hand():
    """Ranking A T H of gold H 3, T 2, R 1: gains at places 2 and 3. Cutoff, gain, and the ideal over gold or slate."""
    ranking = [A, T, H]
    ideal = discount(1, 2, 3)
    assert pair(S, ranking)[1] == pytest.approx(discount(2, 3) / ideal)
    assert pair(S, ranking, ndcg_k=2)[1] == pytest.approx(discount(2) / discount(1, 2))
    assert pair(S, ranking, ndcg_k=1)[1] == 0
    d = [discount(p) for p in (1, 2, 3)]
    assert pair(S, ranking, ndcg_gain="linear")[1] == pytest.approx(
        (2 * d[1] + 3 * d[2]) / (3 * d[0] + 2 * d[1] + d[2])
    )
    assert pair(S, ranking, ndcg_gain="exp")[1] == pytest.approx((3 * d[1] + 7 * d[2]) / (7 * d[0] + 3 * d[1] + d[2]))
    assert pair(S, ranking, ndcg_ideal="slate")[1] == pytest.approx(discount(2, 3) / discount(1, 2))
    assert pair(S, ranking, ndcg_ideal="slate", ndcg_gain="linear", ndcg_k=2)[1] == pytest.approx(
        2 * d[1] / (3 * d[0] + 2 * d[1])
    )
    assert pair(S, [H, T], ndcg_ideal="slate")[1] == 1.0 > pair(S, [H, T])[1]
    assert pair([A, M], [A, M], ndcg_ideal="slate") == (0.0, 0.0)  # no gold in the slate
    assert pair(S, [H, T, A])[1] == pytest.approx(discount(1, 2) / ideal)


def test_ndcg_with_an_ideal_over_the_slate_does_not_depend_on_coverage():
    """The best order of a poor slate is worth as much as that of a full one; with the ideal over gold it is not."""
    poor, full = [[T, A, M], [H, T, R, A]], [[T], [H, T, R]]
    assert [pair(s, r, ndcg_ideal="slate")[1] for s, r in zip(poor, full)] == [1.0, 1.0]
    assert pair(poor[0], full[0])[1] < 1.0 == pair(poor[1], full[1])[1]


def test_a_malformed_answer_gets_the_penalty_in_every_phase():
    bad = "<SLATE>\nHeat (1995)\n</SLATE>"
    for penalty in (-1.0, -0.25, 0.0):
        both, joint = (scored(bad, unit, format_penalty=penalty, lam=0.5) for unit in ("phase", "sequence"))
        assert both.reward.tolist() == [[penalty, penalty]] and joint.reward.tolist() == [[1.5 * penalty]]
        assert both.parts["invalid"] == [1.0] and both.answers == [([], [])] and both.valid.all()
        assert both.parts["slate_recall"] == both.parts["rank_ndcg"] == [0.0]  # no partial credit


def test_joint_reward_is_slate_plus_lambda_rank():
    """GRPO sees one number, F-GRPO its two parts."""
    text = write(S, [A, T, H])
    slate, rank = scored(text).reward[0].tolist()
    for lam in (0.0, 0.5, 2.0):
        assert scored(text, "sequence", lam=lam).reward.tolist() == [[pytest.approx(slate + lam * rank)]]
        assert scored(text, lam=lam).reward.tolist() == [[slate, rank]]  # lambda weighs the advantage there
        for unit in ("sequence", "phase"):  # what the log calls the reward is one thing: methods can be compared
            assert scored(text, unit, lam=lam).parts["reward"] == [pytest.approx(slate + lam * rank)]
            assert scored("no tags", unit, lam=lam).parts["reward"] == [pytest.approx(-1 - lam)]


def test_a_ranking_with_strangers_or_repeats_is_cleaned_or_under_strict_rank_malformed():
    for ranking in ([T, D, H], [T, "No Such Film", H], [T, T, H]):
        loose = scored(write(S, ranking))
        assert loose.answers[0][1] == [T, H] and loose.reward[0, 1] == pytest.approx(discount(1, 2) / discount(1, 2, 3))
        assert scored(write(S, ranking), strict_rank=True).reward.tolist() == [[-1.0, -1.0]]
    assert scored(write(S, [T, H]), strict_rank=True).parts["invalid"] == [0.0]
    assert scored(write(S, [D])).reward.tolist() == [[-1.0, -1.0]]  # nothing of the ranking is left


def test_slate_items_without_a_rank_are_appended_only_if_asked_in_slate_order():
    assert scored(write(S, [M, A])).answers[0][1] == [M, A]
    assert scored(write(S, [M, A]), append_unranked=True).answers[0][1] == [M, A, H, T]
    assert pair(S, [M, A])[1] == 0 < pair(S, [M, A], append_unranked=True)[1]
    assert pair(S, [M, A], append_unranked=True)[1] == pytest.approx(discount(3, 4) / discount(1, 2, 3))


def test_entries_beyond_slate_size_and_rank_size_earn_nothing():
    """Recall is earned by choice, not by writing on: the first n entries are the slate, repeats included."""
    long = [A, M, H, T, R]
    assert pair(long, [A], slate_size=5, rank_size=5)[0] == 1.0
    for n, hits in ((4, 2), (3, 1), (2, 0)):
        out = scored(write(long, [H, T, A, R]), slate_size=n, rank_size=2)
        assert out.answers[0] == (long[:n], [i for i in (H, T, A, R) if i in long[:n]][:2])
        assert out.reward[0, 0] == pytest.approx(hits / 3) and out.parts["invalid"] == [0.0]
    assert pair([A, A, H], [H], slate_size=2, rank_size=2) == (
        0.0,
        0.0,
    )  # a repeat uses up a place; H is out, ranked or not
    assert pair(long, [A, H, T], rank_size=1)[1] == 0 < pair(long, [A, H, T], rank_size=2)[1] < pair(long, [A, H, T])[1]
    appended = scored(write(long, [M]), append_unranked=True, slate_size=4, rank_size=3)
    assert appended.answers[0] == ([A, M, H, T], [M, A, H])
    assert pair(long, ["No Such Film", D, H, A], rank_size=1)[1] > 0  # strangers use up no place


def test_items_by_index_name_the_same_candidates_as_titles():
    """item_form index: #n is the n-th of the pool; a number out of it is an unknown item, not an error."""
    by_title = scored(write(S, [T, H]))
    index = {c: f"#{i}" for i, c in enumerate(POOL, 1)}
    by_index = scored(write([index[i] for i in S], [index[T], index[H]]), item_form="index")
    assert by_index.answers == by_title.answers and torch.equal(by_index.reward, by_title.reward)
    odd = scored(write(["#0", "#8", "#99999999999999999999", "#2", "# 3", "-1"], ["#2"]), item_form="index")
    assert odd.answers[0] == (["#0", "#8", "#99999999999999999999", H, "# 3", "-1"], [H])
    assert odd.parts["out_of_pool"] == [5 / 6] and odd.reward[0, 0] == pytest.approx(1 / 3)
    assert scored(write(["#2"], ["#2"])).answers[0] == (["#2"], ["#2"])  # with titles, #2 is a title


def test_a_ranking_by_position_points_into_the_slate():
    """rank_form position: 1-based places of the slate, repeats of the slate counted; both forms are always read."""
    by_name = scored(write(S, [T, A, H]))
    for ranking in (
        ["4", "1", "2"],
        ["4.", "5.", "2."],
        ["[4]", "[1]", "[2]"],
        ["4, 1, 2"],
        ["4 > 1 > 2"],
        ["- 4", "- 1", "- 2"],
    ):
        assert scored(write(S, ranking)).answers == by_name.answers, ranking
    assert scored(write(S, ["4", "0", "77", "4", "2"])).answers[0][1] == [T, H]


@pytest.mark.parametrize("item_form, rank_form, template, order, show_pool", [
    (i, r, t, o, s) for i, r, t, o, s in itertools.product(
        ("title", "index"), ("item", "position"), ("terse", "instruct"), ("shuffled", "chain"), (True, False))
    if s or i == "title"
])  # fmt: skip
def test_demonstrations_of_the_built_in_world_are_read_as_they_were_meant(
    item_form, rank_form, template, order, show_pool
):
    """What SFT teaches and what the reward reads is one language, under every setting of it."""
    cfg = Config(item_form=item_form, rank_form=rank_form, template=template, demo_order=order, show_pool=show_pool,
                 world_examples=20, world_slack=0, strict_rank=True, world_noise=0.5)  # fmt: skip
    for e in data.load_world(cfg, "train").examples[:10]:
        out = scored(
            e.demo, gold=e.gold, pool=e.candidates, **{k: getattr(cfg, k) for k in ("item_form", "strict_rank")}
        )
        slate, ranking = out.answers[0]
        assert out.parts["invalid"] == [0.0] and out.parts["out_of_pool"] == [0.0] == out.parts["duplicates"]
        assert len(slate) == cfg.slate_size and len(ranking) == cfg.rank_size
        assert out.reward[0, 0] == 1.0 and set(e.gold) <= set(slate) and set(ranking) <= set(slate)
        if show_pool:  # a teacher with the gold at hand ranks it first
            assert out.reward[0, 1] == 1.0 and ranking[: len(e.gold)] == list(e.gold)


# ---------------------------------------------------------------------------------------------------------------------
# What matters and what must not


def test_the_slate_reward_ignores_order_and_repeats_the_ranking_reward_does_not_ignore_order():
    """R_slate is a function of a set; NDCG falls whenever a gold item moves down."""
    rng = random.Random(0)
    for _ in range(40):
        slate = rng.sample(POOL, rng.randint(1, 7))
        shuffled = rng.sample(slate, len(slate))
        longer = shuffled + rng.choices(slate, k=3)
        for kind in ("recall", "f1", "utility"):
            values = {round(pair(s, [s[0]], slate_reward=kind)[0], 12) for s in (slate, shuffled, longer)}
            assert len(values) == 1, kind
        if len(slate) < 7 and set(slate) & set(GOLD):  # f1_raw punishes repeats, by choice
            assert pair(longer, [A], slate_reward="f1_raw") <= pair(slate, [A], slate_reward="f1_raw")
    for ranking in itertools.permutations([A, H, M, T]):
        for i in range(3):
            a, b = ranking[i], ranking[i + 1]
            swapped = [*ranking[:i], b, a, *ranking[i + 2 :]]
            gain = pair(POOL, swapped, ndcg_gain="linear")[1] - pair(POOL, list(ranking), ndcg_gain="linear")[1]
            assert (gain > 0) == (GOLD.get(b, 0) > GOLD.get(a, 0)) and (gain < 0) == (GOLD.get(b, 0) < GOLD.get(a, 0))
    best = max(itertools.permutations(POOL, 3), key=lambda r: pair(POOL, list(r), ndcg_gain="exp")[1])
    assert list(best) == list(GOLD)


def test_a_repeated_item_counts_once_everywhere():
    once = slate_scores([H, A, M], GOLD)
    thrice = slate_scores([H, A, H, M, H], GOLD)
    assert all(once[k] == thrice[k] for k in ("hits", "recall", "precision", "f1", "sum_utility", "utility"))
    assert thrice["precision_raw"] == 1 / 5 and thrice["f1_raw"] < once["f1_raw"]
    assert ndcg([H, H, H], GOLD, 3) == ndcg([H, A, M], GOLD, 3) == pytest.approx(discount(1) / discount(1, 2, 3))
    assert dcg([A, H, H, T], GOLD, 4) == pytest.approx(discount(2, 4))  # a repeat keeps its place and gains nothing
    flood = scored(write([H] * 9, [H]))
    assert flood.reward[0, 0] == pytest.approx(1 / 3) and flood.parts["duplicates"] == [pytest.approx(8 / 9)]


def test_spelling_with_other_case_spaces_marks_or_numbers_is_the_same_item():
    text = write(
        ["1. heat  (1995)", "- **東京物語 (1953)**", '"HER (2013)"', "[4] her (2013)"], ["1) HER (2013)", "Heat (1995)"]
    )
    out = scored(text)
    assert out.answers[0] == ([H, T, R, R], [R, H]) and out.reward[0, 0] == 1.0
    assert out.parts["out_of_pool"] == [0.0]


def test_a_title_that_looks_like_a_numbered_line_is_still_found():
    """The story: the parser took the '2001:' of '2001: A Space Odyssey (1968)' for a number; the item never counted."""
    pool = [
        "2001: A Space Odyssey (1968)",
        "9. Kompanie",
        '"Quoted" "',
        '"Manon"',
        "* Star",
        "A Space Oddity",
        "1917 (2019)",
    ]
    for title in pool:
        out = scored(write([title, "A Space Oddity"], [title]), gold={title: 1.0}, pool=pool)
        assert out.reward.tolist() == [[1.0, 1.0]] and out.parts["out_of_pool"] == [0.0], title
        numbered = scored(write([f"1. {title}", "2. A Space Oddity"], [f"1. {title}"]), gold={title: 1.0}, pool=pool)
        assert numbered.reward.tolist() == [[1.0, 1.0]], title
    both = ["2001: Odyssey", "Odyssey"]  # the exact title wins
    for title in both[1:]:
        assert scored(write([title], [title]), gold={title: 1.0}, pool=both).reward.tolist() == [[1.0, 1.0]]


def test_a_comma_in_a_title_does_not_split_a_list_of_one_line():
    """The story: a ranking of one item, 'Up, Up (2009)', was read as 'Up' and 'Up (2009)': a perfect answer got -1.

    A line that is no title of the pool is still a list with commas (or arrows).
    """
    for slate, ranking in (([U], [U]), ([U, H], [U]), ([U, H], ["- " + U.upper()]), ([U], ["1"])):
        out = scored(write(slate, ranking), gold={U: 1.0})
        assert out.answers[0] == ([*slate], [U]) and out.reward.tolist() == [[1.0, 1.0]]
    assert scored(write([f"{H}, {T}"], [f"{T}, {H}"])).answers[0] == ([H, T], [T, H])
    arrow = "A > B (2000)"
    assert scored(write([arrow], [arrow]), pool=[arrow, H], gold={arrow: 1.0}).reward.tolist() == [[1.0, 1.0]]
    assert scored(write([H, T], [f"{T} > {H}"])).answers[0][1] == [T, H]


def test_items_outside_the_pool_earn_nothing_and_are_counted():
    out = scored(write([H, "Invented (2030)", "Другой"], ["Invented (2030)", H]))
    assert out.reward[0].tolist() == [pytest.approx(1 / 3), pytest.approx(discount(2) / discount(1, 2, 3))]
    assert out.parts["out_of_pool"] == [pytest.approx(2 / 3)]
    assert out.parts["slate_precision"] == [pytest.approx(1 / 3)]


def test_with_one_gold_item_the_published_identity_of_recall_and_ndcg_holds():
    """2605.12995, Table 1: with |G| = 1, N@5 - N@3 lies in [0.387, 0.431] x (R@5 - R@3), R@k = hit, N@k = 1 / log2(r + 1)."""
    rng = random.Random(0)
    pool = [f"item {i}" for i in range(20)]
    for _ in range(20):
        total = {k: 0.0 for k in ("n3", "n5", "r3", "r5")}
        for _ in range(50):
            gold = {rng.choice(pool): 1.0}
            ranking = rng.sample(pool, 5)
            for k in (3, 5):
                n, r = ndcg(ranking, gold, k), slate_scores(ranking[:k], gold)["recall"]
                place = ranking.index(*gold) + 1 if next(iter(gold)) in ranking[:k] else 0
                assert r == (place > 0) and n == pytest.approx(1 / math.log2(place + 1) if place else 0.0)
                total[f"n{k}"] += n
                total[f"r{k}"] += r
        gap = total["r5"] - total["r3"]
        assert 0.3868 * gap - 1e-9 <= total["n5"] - total["n3"] <= 0.4307 * gap + 1e-9
    for at, factor in ((4, 0.4307), (5, 0.3869)):  # the two ends of the interval
        ranking = pool[:5]
        assert ndcg(ranking, {pool[at - 1]: 1.0}, 5) - ndcg(ranking, {pool[at - 1]: 1.0}, 3) == pytest.approx(
            factor, abs=1e-4
        )
    everywhere = [ndcg([*pool[:p], "gold", *pool[p:]][:5], {"gold": 1.0}, 5) for p in range(20)]
    assert sum(everywhere) / 20 == pytest.approx(0.147, abs=5e-4)  # a random order of a pool of 20, published: 14.7


def test_gains_of_binary_utilities_agree_and_the_ideal_is_the_best_order():
    for ranking in itertools.permutations([A, H, M], 2):
        values = {round(ndcg(list(ranking), {H: 1.0, M: 1.0}, 5, gain), 12) for gain in rewards.GAINS}
        assert len(values) == 1
    for k in (1, 2, 3, 5):
        for gain in rewards.GAINS:
            best = max(ndcg(list(r), GOLD, k, gain) for r in itertools.permutations(POOL, 3))
            assert best == pytest.approx(ndcg(list(GOLD), GOLD, k, gain)) == 1.0
            assert ndcg([H], {H: 2.0}, k, gain) == 1.0 and ndcg([], GOLD, k, gain) == 0.0 == ndcg([H], {}, k, gain)


# ---------------------------------------------------------------------------------------------------------------------
# Unscorable, odd and hostile


def test_a_request_without_gold_cannot_be_scored_and_is_not_scored_as_zero():
    """F51: NaN leaves the unit out of baseline and loss; a malformed answer is penalised all the same."""
    texts = [write(S, [H]), "no tags"]
    out = scored(texts, gold={})
    assert out.reward[0].isnan().all() and out.reward[1].tolist() == [-1.0, -1.0]
    assert out.valid.tolist() == [[False, False], [True, True]]
    joint = scored(texts, "sequence", gold={})
    assert joint.valid.tolist() == [[False], [True]]
    for parts in (out.parts, joint.parts):  # the log counts it, beside a mean that it does not turn into NaN
        assert parts["unscorable"] == [1.0, 0.0] and parts["reward"] == [0.0, -2.0]
    assert scored(texts).valid.all() and scored(texts).parts["unscorable"] == [0.0, 0.0]


def test_rows_read_the_request_of_their_group_in_any_order():
    """Row b answers examples[group[b]]; pools shared by examples or not."""
    other = Example("2", "?", ["x", "y"], {"x": 1.0})
    mine = Example("1", "?", ["x", "y"], {"y": 1.0})
    text = [TOKENIZER(write(["x"], ["x"]))["input_ids"]] * 4
    tokens = torch.tensor(text)
    roll = Rollout([[3], [4]], tokens, torch.zeros(tokens.shape), torch.ones_like(tokens).bool(), torch.tensor([1, 0, 0, 1]),
                   torch.tensor([True, False, True, True]))  # fmt: skip
    out = score(roll, [mine, other], PIECES, Config(), "phase")
    assert out.reward.tolist() == [[1, 1], [0, 0], [0, 0], [1, 1]] and out.reward.dtype == torch.float64
    assert out.parts["finished"] == [1, 0, 1, 1] and out.parts["slate_recall"] == [1, 0, 0, 1]
    assert {len(v) for v in out.parts.values()} == {4} == {len(out.texts), len(out.answers)}


def test_logged_parts_are_plain_numbers_that_json_accepts():
    out = scored([write(S, [H]), "bad", "\x00\ufffd" + write([H], ["1"])])
    json.dumps([out.parts, out.texts, out.answers])
    assert all(isinstance(x, (int, float)) for v in out.parts.values() for x in v)


def test_broken_bytes_in_an_answer_stay_in_place():
    """Half a character is sampled easily: offsets still map back, and the rest of the answer counts."""
    a, b = (
        TOKENIZER(t)["input_ids"] for t in ("<SLATE>\nHeat (1995)\nbro", "ken\n</SLATE>\n<RANK>\nHeat (1995)\n</RANK>")
    )
    half = TOKENIZER("東")["input_ids"][:2]
    tokens = torch.tensor([[*a, *half, *b]])
    roll = Rollout(
        [[3]],
        tokens,
        torch.zeros(tokens.shape),
        torch.ones_like(tokens).bool(),
        torch.zeros(1).long(),
        torch.ones(1).bool(),
    )
    out = score(roll, [Example("1", "?", POOL, GOLD)], PIECES, Config(), "phase")
    assert out.answers[0][1] == [H] and out.reward[0, 0] == pytest.approx(1 / 3)
    slate = bytes(b for i, u in zip(tokens[0].tolist(), out.unit_ids[0].tolist()) if u == 1 for b in PIECES[i])
    assert slate == b"\nHeat (1995)\nbro" + "東".encode()[:2] + b"ken\n"
    json.dumps(out.texts), out.texts[0].encode("utf-8", "surrogateescape")


def test_the_parser_never_raises_and_its_parts_agree():
    """Random mixtures of tags, titles, marks and numbers: spans lie in the text, a ranking is a set of slate items."""
    rng = random.Random(0)
    words = [
        *TAGS,
        *TAGS,
        *POOL,
        "\n",
        "\n",
        "\n",
        ",",
        ">",
        "1",
        "2.",
        "[3]",
        "#4",
        "- ",
        "**",
        '"',
        " ",
        "9" * 5000,
        "²",
        "٣",
        "\udc80",
    ]
    errors = set()
    for _ in range(3000):
        text = "".join(rng.choice(words) for _ in range(rng.randrange(25)))
        if rng.random() < 0.4:
            text = write([rng.choice(words) for _ in range(4)], [rng.choice(words) for _ in range(3)])
        for strict in (False, True):
            p = parse(text, TAGS, strict)
            errors.add((p.error or "").split(":")[0])
            assert p.valid == (p.error is None) and p.ranking == [p.items_unique[i] for i in p.rank_indices]
            assert len(set(p.rank_indices)) == len(p.rank_indices)
            assert len({identity(i) for i in p.items}) == len(p.items_unique)
            assert not strict or not p.valid or p.unknown == p.duplicate_ranks == 0
            if p.slate_span:
                (a, b), (c, d) = p.slate_span, p.rank_span
                assert a <= b < c <= d and text[a - len(TAGS[0]) : a] == TAGS[0] and text[d:].startswith(TAGS[3])
            assert not p.valid or (p.slate_span and p.items and p.ranking)
    assert errors == {"", "missing", "repeated", "order", "empty_slate", "empty_rank", "bad_rank"}


def rolled(*rows: list[int]) -> Rollout:
    """Token rows of one prompt each, in the shape of a rollout."""
    width, n = max(map(len, rows)), len(rows)
    tokens = torch.tensor([[*r, *[0] * (width - len(r))] for r in rows])
    mask = torch.arange(width) < torch.tensor([len(r) for r in rows])[:, None]
    return Rollout([[3]] * n, tokens, torch.zeros(tokens.shape), mask, torch.arange(n), torch.ones(n, dtype=torch.bool))


def test_demonstrations_are_one_unit_with_reward_1_stop_token_and_all():
    """SFT is the same loop: advantage 1 on every token."""
    out = rewards.demonstrated(rolled([5, 6, 1], [7, 1]))
    assert out.unit_ids.tolist() == [[1, 1, 1], [1, 1, 0]] and out.reward.tolist() == [[1.0], [1.0]] and out.valid.all()
    assert out.parts == {"length": [3.0, 2.0]}
