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


# ---------------------------------------------------------------------------------------------------------------------
# More phases


THREE = {
    "tags": ["<PLAN>", "</PLAN>", "<SLATE>", "</SLATE>", "<RANK>", "</RANK>"],
    "phases": ["plan", "slate", "rank"],
}


def planned(plan="\nnight films\n", slate=S, ranking=(A, T, H)) -> str:
    return f"<PLAN>{plan}</PLAN>\n" + write(slate, ranking)


def test_a_third_phase_has_a_unit_and_a_reward_of_its_own():
    """plan is credited with R_joint; slate and ranking earn what they earn without it."""
    text = planned()
    two, three = scored(write(S, [A, T, H]), lam=0.5), scored(text, lam=0.5, **THREE)
    slate, rank = two.reward[0].tolist()
    assert three.reward.tolist() == [[pytest.approx(slate + 0.5 * rank), slate, rank]]
    assert three.answers == two.answers and three.high == [1.5, 1.0, 1.0] and two.high == [1.0, 1.0]
    joint = scored(text, "sequence", lam=0.5, **THREE)
    assert joint.reward.tolist() == [[pytest.approx(slate + 0.5 * rank)]] and joint.high == [1.5]
    parsed = parse(text, THREE["tags"], phases=THREE["phases"])
    assert text[slice(*parsed.spans[0])] == "\nnight films\n"
    assert parsed.spans[1:] == [parsed.slate_span, parsed.rank_span] and parsed.broken == set()
    raw = [bytes([b]) for b in text.encode()]
    ids = three.unit_ids[0].tolist()
    for unit, inside in enumerate((b"\nnight films\n", text[slice(*parsed.slate_span)].encode()), 1):
        assert b"".join(p for p, u in zip(raw, ids) if u == unit) == inside
    every = scored(text, train_delimiters=True, **THREE).unit_ids[0].tolist()
    ends = [text.encode().index(t.encode()) + len(t) for t in ("</PLAN>", "</SLATE>")]
    assert every == [1] * ends[0] + [2] * (ends[1] - ends[0]) + [3] * (len(raw) - ends[1])


@pytest.mark.parametrize("phases, texts", (
    (["plan", "slate", "rank"], ["<A>", "x", "</A>", "<B>", H, "</B>", "<C>", H, "</C>"]),
    (["slate", "plan", "rank"], ["<A>", H, "</A>", "<B>", "x", "</B>", "<C>", H, "</C>"]),
    (["slate", "rank", "plan"], ["<A>", H, "</A>", "<B>", H, "</B>", "<C>", "x", "</C>"]),
))  # fmt: skip
def test_phases_come_in_any_order_that_ranks_after_the_slate(phases, texts):
    tags = [t for t in texts if t.startswith("<")]
    p = parse("\n".join(texts), tags, phases=phases)
    assert p.valid and p.items == p.ranking == [H]
    for error, wrong in (
        ("missing:</B>", "\n".join(t for t in texts if t != "</B>")),
        ("repeated:<C>", "\n".join([*texts, "<C>"])),
        ("order", "\n".join(texts[6:] + texts[:6])),
    ):
        assert (
            parse(wrong, tags, phases=phases).error == error and parse(wrong, tags, phases=phases).spans == [None] * 3
        )


def test_partial_credit_blames_the_phase_that_broke_and_no_other():
    """format_credit: none as published; partial keeps R_slate of a slate that could be read. Metrics give no credit."""
    broken_rank = write(S, [A]).replace("</RANK>", "")
    broken_slate = write([], [H])
    for text in (broken_rank, write(S, ["nothing of it"]), write(S, [])):
        none, some = scored(text), scored(text, format_credit="partial")
        assert none.reward.tolist() == [[-1.0, -1.0]] and some.reward.tolist() == [[pytest.approx(2 / 3), -1.0]]
        assert some.parts["invalid"] == [1.0] and some.parts["slate_recall"] == [0.0] and some.answers == [([], [])]
        joint = scored(text, "sequence", format_credit="partial", lam=0.5)
        assert joint.reward.tolist() == [[pytest.approx(2 / 3 - 0.5)]]
        assert torch.equal(none.unit_ids, some.unit_ids)
    for text in (broken_slate, "no tags", "<RANK>\n</RANK>\n" + write(S, [A])):
        assert scored(text, format_credit="partial").reward.tolist()[0][1] == -1.0
    assert scored(broken_slate, format_credit="partial").reward.tolist() == [[-1.0, -1.0]]
    swapped = f"<RANK>\n{H}\n</RANK>\n<SLATE>\n{H}\n</SLATE>"
    assert scored(swapped, format_credit="partial").reward.tolist() == [[pytest.approx(1 / 3), -1.0]]
    assert scored(write(S, [A, T, H]), format_credit="partial").reward.equal(scored(write(S, [A, T, H])).reward)
    whole = scored(planned(), **THREE).reward[0].tolist()
    for settings, want, joint in (  # a plan without its close tag: slate and ranking keep theirs
        ({"format_credit": "partial"}, [-1.0, *whole[1:]], whole[0] - 1.0),
        ({"format_credit": "none"}, [-1.0] * 3, -2.0),
    ):
        text = planned().replace("</PLAN>", "")
        assert scored(text, **THREE, **settings).reward[0].tolist() == pytest.approx(want)
        assert scored(text, "sequence", **THREE, **settings).reward[0].tolist() == pytest.approx([joint])
    four = {
        "tags": [*THREE["tags"], "<END>", "</END>"],
        "phases": [*THREE["phases"], "plan"],
        "format_credit": "partial",
    }
    assert scored(planned() + "<END>", **four).reward[0].tolist() == pytest.approx(
        [*whole, -1.0]
    )  # the second plan alone


def test_demonstrations_may_be_trained_by_phase_or_by_line():
    ids = TOKENIZER(write([H], [H]))["input_ids"]
    out = rewards.demonstrated(rolled([*ids, 1]), PIECES, Config(), "phase")
    close = len("<SLATE>\nHeat (1995)\n</SLATE>")
    assert out.unit_ids.tolist() == [[1] * close + [2] * (len(ids) + 1 - close)] and out.reward.tolist() == [[1.0, 1.0]]
    a, b = (TOKENIZER(t)["input_ids"] for t in (f"{H}\n{A}\n", f"{H}\n"))
    out = rewards.demonstrated(rolled([*a, 1], [*b, 1]), PIECES, Config(slate_size=3, answer="list"), "rank")
    assert out.unit_ids[0].tolist() == [1] * len(b) + [2] * (len(a) - len(b) + 1)
    assert out.unit_ids[1].tolist() == [1] * (len(b) + 1) + [0] * (len(a) - len(b)) and out.reward.shape == (2, 4)


@pytest.mark.parametrize("settings", (
    {"answer": "list"}, {"answer": "list", "show_pool": False}, {"answer": "list", "item_form": "index"}, {"data": "requests"},
    {"data": "requests", "draw": "row"}, {**THREE}, {**THREE, "show_pool": False}, {**THREE, "rank_form": "position"},
))  # fmt: skip
def test_demonstrations_of_every_form_are_read_as_they_were_meant(settings):
    """What SFT teaches and what the reward reads is one language."""
    cfg = Config(world_examples=20, world_slack=0, world_clusters=20, requests_examples=20, **settings)
    examples = data.load(cfg, "train").examples[:15]
    for e in examples:
        out = score(rolled([*TOKENIZER(e.demo)["input_ids"], 1]), [e], PIECES, cfg, "sequence")
        wrong = [
            k
            for k in ("invalid", "duplicates", "out_of_pool", "out_of_catalog", "unparsable")
            if out.parts.get(k, [0]) != [0]
        ]
        assert not wrong, (wrong, e.demo)
        items, ranks = out.answers[0]
        if "lines" in out.parts:
            assert out.parts["lines"] == [10.0] and ranks == items
        assert settings.get("data") or set(e.gold) <= set(items)
    assert (
        settings.get("show_pool") is False
        or settings.get("data")
        or out.reward[0, 0] == (3.0 if "answer" in settings else 2.0)
    )


# ---------------------------------------------------------------------------------------------------------------------
# Popularity, length


def test_popular_gold_is_worth_less_under_a_power_and_the_sum_stays():
    """Weights 3, 2, 1 over (8, 1, 0) + 1 counts: 1/3, 1, 1 rescaled to the sum 6."""
    counts = {H: 8, T: 1}
    worth = rewards.debiased(GOLD, counts, 1.0)
    assert worth == pytest.approx({H: 6 / 7, T: 18 / 7, R: 18 / 7})
    assert rewards.debiased(GOLD, counts, 0.0) == pytest.approx(GOLD)
    text = write([H, T], [T, H])
    roll, example = rolled(TOKENIZER(text)["input_ids"]), [Example("1", "?", POOL, GOLD)]
    out = score(roll, example, PIECES, Config(popularity_power=1.0), "phase", popularity=counts)
    ideal = 18 / 7 * discount(1, 2) + 6 / 7 * discount(3)
    assert out.reward[0].tolist() == pytest.approx([4 / 7, (18 / 7 * discount(1) + 6 / 7 * discount(2)) / ideal])
    off = score(roll, example, PIECES, Config(), "phase", popularity=counts)
    assert off.reward.equal(scored(text).reward) and off.reward[0, 0] == pytest.approx(2 / 3)


def test_places_reserved_for_the_tail_earn_nothing_for_popular_items():
    counts = {A: 10, H: 9, T: 8, M: 3, R: 2, D: 1}  # 33 in all: A and H make up more than half, the rest is tail
    assert rewards.head_items(counts) == {A, H} and rewards.head_items({}) == set()
    assert rewards.head_items({A: 4, H: 3, M: 2, T: 1}) == {A, H} and rewards.head_items({A: 1, H: 1}) == {A}
    assert rewards.beyond_quota([A, M, H, A], {A, H}, 4, 0.75) == {H}
    assert rewards.beyond_quota([A, H], {A, H}, 10, 0.9) == {H}  # 10 * (1 - 0.9) is a hair below 1
    roll = rolled(TOKENIZER(write([A, H, T, R], [H, T, R]))["input_ids"])
    example = [Example("1", "?", POOL, GOLD)]
    free, quota = (score(roll, example, PIECES, Config(slate_size=4, rank_size=3, tail_quota=q), "phase", popularity=counts).reward[0]
                   for q in (0.5, 0.75))  # fmt: skip
    assert free.tolist() == [1.0, 1.0]  # two popular places of four
    assert quota.tolist() == pytest.approx([2 / 3, discount(2, 3) / discount(1, 2, 3)])  # one; Heat keeps its place


def test_the_punishment_of_length_reaches_every_unit():
    text = write([H], [H])
    n = len(TOKENIZER(text)["input_ids"])
    base = scored(text).reward[0]
    for limit, want in ((n + 10, 0.0), (n + 5, -0.5), (n, -1.0)):
        for unit in ("phase", "sequence"):
            out = scored(text, unit, max_new_tokens=limit, overlong=10 / limit)
            gap = out.reward[0] - scored(text, unit).reward[0]
            assert gap.tolist() == pytest.approx([want] * len(gap))
            assert out.parts["reward"] == pytest.approx([float(base.sum()) + want])
            assert out.parts["efficiency"] == pytest.approx([(float(base.sum()) + want) / n])
    assert scored(text, max_new_tokens=n).reward[0].equal(base)  # off


# ---------------------------------------------------------------------------------------------------------------------
# Lists


FILMS = [f"{x} ({1990 + i})" for i, x in enumerate("abcdefgh")] + ["s (1999)"]


def listed(texts, unit="sequence", responders=(), pool=FILMS, seen=(), gold=None, **settings) -> rewards.Scored:
    """Lists of one request; responders: item names."""
    texts = [texts] if isinstance(texts, str) else texts
    people = [dict.fromkeys(r, 1.0) for r in responders]
    gold = dict.fromkeys(i for r in people for i in r) if gold is None else gold
    roll = rolled(*(TOKENIZER(t)["input_ids"] + [1] for t in texts))
    example = Example("1", "?", pool, gold, responders=people, seen=list(seen))
    return score(roll, [example] * len(texts), PIECES, Config(answer="list", **settings), unit)


TOY = [["a (1990)", "b (1991)"], ["a (1990)"], ["c (1992)"], ["a (1990)", "d (1993)"], ["e (1994)"]]
TOY_LIST = "a (1990)\nf (1995)\na (1990)\ne (1994)\ns (1999)\nc (1992)\nsome words\nz (1980)\n"


def test_the_toy_request_with_five_responders():
    """remark.md 11.3: a repeat, a seen title, an unparsable line and a stranger keep their positions and earn nothing."""
    kw = {"responders": TOY, "seen": ["s (1999)"], "slate_size": 8}
    union = listed(TOY_LIST, "rank", **kw)
    assert union.reward.tolist() == [[1, 0, 0, 1, 0, 1, 0, 0, 0]] and union.valid.all() and union.high == [1.0] * 9
    mean = listed(TOY_LIST, "rank", consensus=1.0, **kw)
    assert mean.reward[0].tolist() == pytest.approx([0.6, 0, 0, 0.2, 0, 0.2, 0, 0, 0])
    half = listed(TOY_LIST, "rank", consensus=0.5, **kw)
    assert half.reward[0, :4].tolist() == pytest.approx([0.6**0.5, 0, 0, 0.2**0.5])
    alone = [listed(TOY_LIST, "rank", **{**kw, "responders": [r]}).reward[0, :8].tolist() for r in TOY]
    assert [[k + 1 for k, v in enumerate(row) if v] for row in alone] == [[1], [1], [6], [1], [4]]
    parts = {k: v[0] for k, v in union.parts.items()}
    want = {"reward": 3, "overlong": 0, "hits": 3, "recall": 3 / 5, "dcg": discount(1, 4, 6), "invalid": 0, "unparsable": 1 / 8, "finished": 1,
            "out_of_catalog": 1 / 7, "duplicates": 1 / 7, "lines": 8, "unscorable": 0, "length": len(TOY_LIST) + 1, "reward_errors": 0}  # fmt: skip
    assert parts == pytest.approx({**want, "efficiency": 3 / (len(TOY_LIST) + 1)})
    items, ranks = union.answers[0]
    assert items == [x for x in TOY_LIST.split("\n") if "(" in x]
    assert ranks == ["a (1990)", "f (1995)", None, "e (1994)", None, "c (1992)", None, None]
    json.dumps([union.parts, union.answers])
    for unit in ("sequence", "token"):
        out = listed(TOY_LIST, unit, **kw)
        assert out.reward.tolist() == [[3.0]] and out.high == [8.0] and (out.unit_ids == 1).all()


@pytest.mark.parametrize("rel, returns", (
    ([1, 0, 1, 0, 1], [1.886853, 0.886853, 0.886853, 0.386853, 0.386853]), ([0, 1, 1, 0, 0], [1.130930, 1.130930, 0.5, 0, 0]),
    ([0, 0, 0, 0, 1], [0.386853] * 5), ([1] * 5, [2.948459, 1.948459, 1.317529, 0.817529, 0.386853]),
))  # fmt: skip
def test_the_log_return_of_a_rank_is_the_discounted_sum_of_the_hits_from_there_on(rel, returns):
    """rank_grpo.md 13.1, through the whole path: the list's own reward is DCG@5."""
    text = "".join(f"{FILMS[i] if r else 'z (1980)'}\n" for i, r in enumerate(rel))
    kw = {"responders": [FILMS[:5]], "slate_size": 5, "returns": "log"}
    assert listed(text, "rank", **kw).reward[0].tolist() == pytest.approx([*returns, 0.0], abs=1e-6)
    assert listed(text, "sequence", **kw).reward[0].tolist() == pytest.approx(
        [discount(*(i + 1 for i in range(5) if rel[i]))]
    )
    assert rewards.causal_returns(rel, 5, "log") == pytest.approx(returns, abs=1e-6)
    assert listed(text, "rank", **kw).high == pytest.approx([*[discount(*range(k, 6)) for k in range(1, 6)], 1.0])
    assert rewards.causal_returns([1] * 20, 20, "log")[0] == pytest.approx(7.0402684)


@pytest.mark.parametrize("rel, gamma, returns", (
    ([1, 0, 1, 0, 1], 2, [1.3125, 0.625, 1.25, 0.5, 1]), ([0, 1, 1, 0, 0], 2, [0.75, 1.5, 1, 0, 0]),
    ([1, 0, 1, 0, 1], 3, [1.123457, 0.370370, 1.111111, 0.333333, 1]), ([1, 0, 1, 0, 1], 10, [1.0101, 0.101, 1.01, 0.1, 1]),
    ([1, 0, 1, 0, 1], math.inf, [1, 0, 1, 0, 1]),
))  # fmt: skip
def test_the_exponential_return_of_a_rank(rel, gamma, returns):
    """rank_grpo.md 13.2; missing positions too have the value of the formula, 0. The list's own reward is the sum of hits."""
    text = "".join(f"{FILMS[i] if r else 'z (1980)'}\n" for i, r in enumerate(rel))
    kw = {"responders": [FILMS[:5]], "slate_size": 7, "returns_gamma": gamma}
    out = listed(text, "rank", **kw)
    assert out.reward[0].tolist() == pytest.approx([*returns, 0, 0, 0], abs=1e-6)
    assert out.high[:7] == pytest.approx([sum(gamma**-j for j in range(7 - k)) for k in range(7)])
    assert listed(text, "sequence", **kw).reward.tolist() == [[float(sum(rel))]]


def test_years_within_the_tolerance_count_for_titles_of_the_catalog_only():
    """'t (2000)' and 't (2001)' are two catalog entries: the responder's is 2001. A year that no entry has is a stranger."""
    pool = ["t (2000)", "t (2001)", "u (2000)"]
    kw = {"responders": [["t (2001)"]], "pool": pool, "slate_size": 3}
    assert listed("t (2000)\nt (2001)\n", "rank", **kw).reward[0].tolist() == [1, 0, 0, 0]  # one claim
    assert listed("t (2000)\nt (2001)\n", "rank", year_tolerance=0, **kw).reward[0].tolist() == [0, 1, 0, 0]
    strange = listed("t (2002)\n", "rank", **kw)
    assert strange.reward[0].tolist() == [0, 0, 0, 0] and strange.parts["out_of_catalog"] == [1.0]
    assert listed("t (2001)\n", "rank", **kw, seen=["t (2000)"]).reward.sum() == 0  # by title, as released
    assert listed("1. **t** (2001) great\n", "rank", **kw).reward[0, 0] == 1


def test_items_without_years_are_matched_by_identity():
    pool = ["amber anchor", "blue bay", "2001: a dream"]
    kw = {"responders": [["amber anchor", "2001: a dream"]], "pool": pool, "slate_size": 4}
    out = listed("- Amber  Anchor\n---\n2001: a dream\nblue bay (1990)", "rank", **kw)
    assert out.reward[0].tolist() == [1, 0, 1, 0, 0] and out.answers[0][1] == [
        "amber anchor",
        None,
        "2001: a dream",
        None,
    ]
    assert out.parts["unparsable"] == [0.25] and out.parts["out_of_catalog"] == [pytest.approx(1 / 3)]
    by_number = listed("#3\n#9\n", "rank", item_form="index", **kw)
    assert by_number.reward[0, :2].tolist() == [1, 0] and by_number.answers[0][0] == ["2001: a dream", "#9"]
    single = listed("blue bay\n", "rank", pool=pool, gold={"blue bay": 3.0}, slate_size=2)  # no responders: gold is one
    assert single.reward[0].tolist() == [1, 0, 0]


def test_what_comes_behind_the_last_rank_earns_nothing_and_empty_lists_are_no_error():
    kw = {"responders": [FILMS[:4]], "slate_size": 2}
    text = "a (1990)\nz (1980)\nb (1991)\n"
    out = listed(text, "rank", **kw)
    assert out.reward[0].tolist() == [1, 0, 0] and out.parts["hits"] == [1.0] and out.parts["lines"] == [3.0]
    assert out.unit_ids[0].tolist() == [1] * 9 + [2] * 9 + [3] * 10
    for unit in ("rank", "sequence"):
        empty = listed(["", "\n\n", "words only"], unit, **kw)
        assert not empty.reward.any() and empty.valid.all() and empty.parts["invalid"] == [1.0] * 3
        nobody = listed("a (1990)", unit, gold={}, responders=[[]], slate_size=2)
        assert nobody.reward.isnan().all() and not nobody.valid.any() and nobody.parts["unscorable"] == [1.0]
    short = listed("words only\na (1990)\n", "rank", **{**kw, "slate_size": 8})
    assert (
        short.parts["unparsable"] == [0.5]
        and short.parts["lines"] == [2.0]
        and short.reward[0].tolist() == [0, 1] + [0] * 7
    )
    late = listed(text, "rank", **kw, max_new_tokens=30, overlong=4 / 30)
    assert late.reward[0].tolist() == pytest.approx([0.5, -0.5, -0.5])


@pytest.mark.parametrize(
    "c, n, a, want", ((0, 5, 0, 0), (0, 5, 1, 0), (1, 5, 0, 1), (3, 5, 1, 0.6), (5, 5, 0.7, 1), (1, 4, 0.5, 0.5))
)
def test_consensus_runs_from_union_to_mean(c, n, a, want):
    assert rewards.consensus(c, n, a) == pytest.approx(want)


@pytest.mark.parametrize("line, want", (
    ("300 - Rise of an Empire (2014)", ("Rise of an Empire", 2014)), ("• Heat (1995)", ("• Heat", 1995)), ("(1999)", None),
    ("“The Matrix” (1999)", ("“The Matrix”", 1999)), ("The Matrix(1999)", None), ("1984 (1984)", ("1984", 1984)),
    ("(a) (1999)", None), ('"The Matrix (1999)"', ("The Matrix", 1999)), ("10 - 4 (2001)", ("4", 2001)),
))  # fmt: skip
def test_lines_are_read_as_by_the_released_code(line, want):
    """rank_grpo.md 5.1; more in golden/title_match."""
    assert rewards.parse_line(line) == want


@pytest.mark.parametrize("recs, gold, seen, hits", (
    ([("Alien", 1979), ("Alien", 1979), ("Heat", 1995)], [("Alien", 1979), ("Heat", 1995)], [], [1, 0, 1]),
    ([("Alien", 1980), ("alien", 1979), ("Heat", 1995)], [("Alien", 1979), ("Heat", 1995)], [], [0, 0, 1]),
    ([("Titanic", 1996), ("Titanic", 1997)], [("Titanic", 1997)], [], [1, 0]),
    ([("Titanic", 1997), ("Titanic", 1996)], [("Titanic", 1997), ("Titanic", 1996)], [], [1, 1]),
    ([("Unknown", 2006), ("Unknown", 2005)], [("Unknown", 2005)], [], [1, 0]),
    ([("Heat", 1995)], [("Heat", 1995)], ["Heat"], [0]),
    ([("Fargo", 1996), ("Heat", 1995)], [("Heat", 1995)], [], [0, 1]),
    ([("X", 2001), ("X", 2003)], [("X", 2000), ("X", 2002)], [], [1, 0]),  # a later year is preferred: 2000 is left
))  # fmt: skip
def test_matching_claims_ground_truth_as_the_released_code_does(recs, gold, seen, hits):
    """rank_grpo.md 5.2."""
    catalog = [("Alien", 1979), ("Heat", 1995), ("Titanic", 1996), ("Titanic", 1997), ("Unknown", 2006), ("Unknown", 2005),
               ("Fargo", 1996), ("X", 2001), ("X", 2003)]  # fmt: skip
    assert rewards.match(recs, gold, catalog, seen) == hits
