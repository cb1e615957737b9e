"""eval.py: metrics against an independent library, the pass against what it must score, and the command end to end."""

import json
import math
import os

import numpy as np
import pytest
import torch
from test_train import CPU, TINY, go, lines, on_cpu, warm  # noqa: F401

import data
import eval as evaluation
import model
import rewards
from config import Config, parse
from eval import paired_bootstrap, ranking_metrics
from rollout import Rollout, demonstrations


@pytest.fixture(scope="module")
def sft(tmp_path_factory) -> str:
    return warm(tmp_path_factory)


@pytest.fixture(scope="module")
def rl(sft, tmp_path_factory) -> str:
    run = str(tmp_path_factory.mktemp("rl") / "run")
    go(run, f"--method fgrpo --init {sft} --steps 2 --lr 3e-3")
    return run


# ---------------------------------------------------------------------------------------------------------------------
# Metrics of one list


def test_metrics_agree_with_torchmetrics_on_random_lists():
    """An independent implementation: a ranked list becomes scores over all candidates, those it left out last, behind
    enough irrelevant ones that they stay outside every cutoff (a list does not earn what it did not say)."""
    retrieval = pytest.importorskip("torchmetrics.functional.retrieval", reason="pip install torchmetrics")
    rng, ks = np.random.default_rng(0), [1, 2, 5, 10]
    empty = 0
    for trial in range(150):
        pool = [f"item {i}" for i in range(int(rng.integers(3, 25)))]
        found = rng.choice(pool, int(rng.integers(1, min(6, len(pool)))), replace=False)
        gold = {str(i): float(rng.integers(1, 5)) for i in found}
        ranked = [str(i) for i in rng.permutation(pool)[: int(rng.integers(0, len(pool) + 1))]]
        if trial % 3 == 0 and ranked:  # something said twice, a gold item if there is one
            twice = next((i for i, item in enumerate(ranked) if item in gold), 0)
            ranked.insert(int(rng.integers(twice + 1, len(ranked) + 1)), ranked[twice])
        order, seen = [], set()
        for item in ranked:
            order.append(gold.get(item, 0.0) * (item not in seen))
            seen.add(item)
        order += [0.0] * max(ks) + [u for item, u in gold.items() if item not in seen]
        scores, grades = torch.arange(len(order), 0, -1).float(), torch.tensor(order)
        shuffled = torch.from_numpy(rng.permutation(len(order)))
        scores, grades = scores[shuffled], grades[shuffled]
        relevant = grades > 0
        gains = {"binary": relevant.long(), "linear": grades, "exp": 2.0**grades - 1}
        ours = {gain: ranking_metrics(ranked, gold, ks, gain) for gain in gains}
        for k in ks:
            theirs = {
                "recall": retrieval.retrieval_recall(scores, relevant, k),
                "precision": retrieval.retrieval_precision(scores, relevant, k),
                "hit": retrieval.retrieval_hit_rate(scores, relevant, k),
                "mrr": retrieval.retrieval_reciprocal_rank(scores, relevant, k),
            }
            for name, value in theirs.items():
                assert ours["binary"][f"{name}@{k}"] == pytest.approx(float(value), abs=1e-6), (name, k, ranked, gold)
            for gain, target in gains.items():
                value = retrieval.retrieval_normalized_dcg(scores, target, k)
                assert ours[gain][f"ndcg@{k}"] == pytest.approx(float(value), abs=1e-6), (k, gain, ranked, gold)
        whole = retrieval.retrieval_reciprocal_rank(scores, relevant, len(ranked)) if ranked else 0.0
        assert ours["binary"]["mrr"] == pytest.approx(float(whole), abs=1e-6)
        empty += not ranked
    assert empty > 2


def test_metrics_of_a_list_worked_by_hand():
    ranked, gold = ["x", "b", "a", "b"], {"a": 3.0, "b": 1.0, "c": 2.0, "d": 0.0}  # d is known and not relevant
    m = ranking_metrics(ranked, gold, [1, 2, 3, 5], "linear")
    assert (m["mrr"], m["mrr@1"], m["mrr@2"]) == (0.5, 0, 0.5)
    assert [m[f"recall@{k}"] for k in (1, 2, 3, 5)] == pytest.approx([0, 1 / 3, 2 / 3, 2 / 3])
    assert [m[f"precision@{k}"] for k in (1, 2, 3, 5)] == pytest.approx([0, 1 / 2, 2 / 3, 2 / 5])
    ideal = 3 + 2 / math.log2(3) + 1 / 2
    assert m["ndcg@3"] == pytest.approx((1 / math.log2(3) + 3 / 2) / ideal)
    assert set(ranking_metrics([], gold, [1]).values()) == {0.0}
    assert set(ranking_metrics(["a"], {}, [1]).values()) == {0.0}


def test_a_request_with_many_answers_counts_once():
    assert evaluation.mean_by_request([1, 0, 0, 1], ["a", "a", "a", "b"]) == pytest.approx((0.5, 2 / 3))
    assert evaluation.mean_by_request([], []) == (0.0, 0.0)


@pytest.mark.parametrize("hits, gold, k, recall, dcg, usual, cut", (
    ([0, 1, 0, 1], 6, 5, 0.333333, 1.061606, 0.360055, 0.414430), ([1, 0, 0, 0, 0], 3, 5, 0.333333, 1, 0.469279, 0.469279),
    ([0, 1], 2, 5, 0.5, 0.630930, 0.386853, 0.386853), ([1], 4, 5, 0.25, 1, 0.390380, 1.0),
    ([0, 0, 0, 1] + [0] * 16, 2, 20, 0.5, 0.430677, 0.264068, 0.264068),
))  # fmt: skip
def test_metrics_of_hits_by_hand(hits, gold, k, recall, dcg, usual, cut):
    """rank_grpo.md 13.7: the usual ideal has min(k, gold) places, the released one also ends with the list."""
    m = evaluation.hit_metrics(hits, gold, [k])
    assert m[f"recall@{k}"] == pytest.approx(recall, abs=1e-6) and m[f"ndcg@{k}"] == pytest.approx(usual, abs=1e-6)
    ideal = sum(1 / math.log2(i + 1) for i in range(1, min(gold, k) + 1))
    assert m[f"ndcg@{k}"] * ideal == pytest.approx(dcg, abs=1e-6)
    assert m[f"hit@{k}"] == 1 and m["mrr"] == 1 / (hits.index(1) + 1)
    recs = [(f"g{i}" if h else f"m{i}", 2000) for i, h in enumerate(hits)]
    truth = [r for r, h in zip(recs, hits) if h] + [(f"absent{i}", 2000) for i in range(gold - sum(hits))]
    for scores in evaluation.list_variants(recs, truth, recs, [], k).values():
        assert scores == pytest.approx({"recall": recall, "ndcg": usual, "ndcg_list_ideal": cut}, abs=1e-6)
    assert (
        set(evaluation.hit_metrics([0, 0], 3, [1, 2]).values())
        == {0.0}
        == set(evaluation.hit_metrics([], 0, [1]).values())
    )


def test_three_ways_to_cut_a_list_with_inadmissible_items():
    """rank_grpo.md 13.7."""
    recs = [(t, 2000) for t in ("ooc", "hit", "seen", "miss", "hit2", "miss2")]
    out = evaluation.list_variants(recs, [("hit", 2002), ("hit2", 2000)], recs[1:], ["seen"], 4)
    want = {"filter_then_cut": (1.0, 0.919721), "cut_then_filter": (0.5, 0.613147), "positional": (0.5, 0.386853)}
    for name, (recall, ndcg) in want.items():
        assert (out[name]["recall"], out[name]["ndcg"]) == pytest.approx((recall, ndcg), abs=1e-6)
    out = evaluation.list_variants(recs, [("seen", 2000), ("ooc", 2000)], recs[1:], ["seen"], 4)
    assert all(set(v.values()) == {0.0} for v in out.values())
    empty = evaluation.list_variants([], [("hit", 2002)], recs, [], 4)
    assert all(set(v.values()) == {0.0} for v in empty.values())


# ---------------------------------------------------------------------------------------------------------------------
# Intervals


def test_the_paired_bootstrap_of_given_resamples_is_plain_arithmetic():
    a, b = [3.0, 1.0, 4.0], [1.0, 1.0, 5.0]  # differences 2, 0, -1
    out = paired_bootstrap(a, b, indices=[[0, 0, 0], [0, 1, 2], [2, 2, 2], [1, 1, 2]])
    assert out["means"].tolist() == pytest.approx([2, 1 / 3, -1, -1 / 3])
    assert out["mean_difference"] == pytest.approx(1 / 3) and not out["significant"]
    assert (out["lo"], out["hi"]) == pytest.approx(tuple(np.quantile([2, 1 / 3, -1, -1 / 3], [0.025, 0.975])))
    clusters = paired_bootstrap(a, b, indices=[[0, 0], [0, 1], [1, 1]], clusters=["p", "q", "p"])
    assert clusters["means"].tolist() == pytest.approx([1 / 2, 1 / 3, 0])  # p: (2 - 1) / 2 rows, q: 0 / 1 row
    constant = paired_bootstrap([0.6, 0.7], [0.5, 0.6])
    assert (constant["lo"], constant["hi"]) == pytest.approx((0.1, 0.1)) and constant["significant"]
    same = paired_bootstrap(a, a)
    assert (same["lo"], same["hi"], same["significant"]) == (0, 0, False)


def test_the_bootstrap_interval_is_that_of_the_normal_approximation_and_repeatable():
    x = np.random.default_rng(1).normal(0.3, 1, 500)
    out = paired_bootstrap(x, np.zeros(500))
    half = 1.96 * x.std() / math.sqrt(500)
    assert (out["lo"], out["hi"]) == pytest.approx((x.mean() - half, x.mean() + half), abs=0.006)
    assert out["lo"] == paired_bootstrap(x, 0)["lo"] and out["significant"]
    assert paired_bootstrap(x, 0, level=0.5)["lo"] > out["lo"]


# ---------------------------------------------------------------------------------------------------------------------
# The pass


def opened(run: str, text=""):
    cfg = parse(["--config", os.path.join(run, "config.yaml"), "--init", run, *text.split()])
    split = data.load(cfg, "test")
    policy = evaluation.open_policy(cfg, split, CPU)
    return cfg, policy, *data.fit(split, policy.tokenizer, cfg)


def test_perfect_answers_reach_the_ceiling_of_every_metric(sft, monkeypatch):
    """Demonstrations of a perfect teacher, sent through the real parser: what no model can beat."""
    cfg, policy, examples, prompts = opened(sft, "--world_slack 0 --ndcg_gain exp")
    ids = [policy.tokenizer(e.demo, add_special_tokens=False)["input_ids"] + [1] for e in examples]
    monkeypatch.setattr(evaluation, "rollout", lambda m, p, *a, **k: demonstrations(p, [[i] for i in ids], CPU))
    out = evaluation.means(evaluation.evaluate(policy, examples, prompts, cfg))
    ceiling = {"recall@1": 1 / 2, "recall@2": 1, "slate_recall": 1, "slate_precision": 2 / 4}
    ceiling |= {"precision@1": 1, "precision@2": 1}
    ceiling |= {f"{m}@{k}": 1 for m in ("hit", "ndcg", "mrr") for k in (1, 2)} | {"mrr": 1, "finished": 1, "length": 11}
    assert out == pytest.approx({**ceiling, "invalid": 0, "duplicates": 0, "out_of_pool": 0, "reward_errors": 0})


def test_an_answer_whose_reward_fails_is_an_empty_one_and_counted(sft, monkeypatch):
    cfg, policy, examples, prompts = opened(sft)
    score, broken = evaluation.rewards.score_phases, examples[1]

    def fails(said, example, *args):
        if example is broken:
            raise ValueError("no such judge")
        return score(said, example, *args)

    monkeypatch.setattr(evaluation.rewards, "score_phases", fails)
    rows = evaluation.evaluate(policy, examples, prompts, cfg)
    assert [row["metrics"]["reward_errors"] for row in rows] == [float(e is broken) for e in examples]


def test_a_malformed_answer_scores_zero_and_is_counted(sft, monkeypatch):
    """Half of the answers lack their last tag; the means must not be those of the well-formed half."""
    cfg, policy, examples, prompts = opened(sft, "--world_slack 0")
    ids = [policy.tokenizer(e.demo, add_special_tokens=False)["input_ids"] for e in examples]
    ids = [[*x, 1] if i % 2 else [*x[:-1], 1] for i, x in enumerate(ids)]
    monkeypatch.setattr(evaluation, "rollout", lambda m, p, *a, **k: demonstrations(p, [[i] for i in ids], CPU))
    rows = evaluation.evaluate(policy, examples, prompts, cfg)
    assert [row["metrics"]["invalid"] for row in rows] == [1.0, 0.0] * 4
    assert rows[0]["ranking"] == [] and rows[0]["metrics"]["slate_recall"] == 0
    assert evaluation.means(rows)["hit@1"] == 0.5


@pytest.mark.parametrize("prefix", ["", "<SLATE>\n"])
def test_a_ranker_goes_on_from_the_slate_of_another_checkpoint(sft, monkeypatch, prefix):
    """decoupled_sft: of the first answer what lies behind the slate's close tag is dropped, the second is asked to go on
    there, and both together are the answer. A first answer without that tag stays whole."""
    cfg, policy, examples, prompts = opened(sft, "--world_slack 0")
    cfg.prefix = prefix
    encode = lambda text: policy.tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    texts = [e.demo.removeprefix(prefix) for e in examples]
    cut = [t.index("<RANK>") for t in texts]
    first = [[*encode(t[:c] + t[:c]), 1] for t, c in zip(texts, cut)]  # goes on with a slate of its own
    first[0] = encode("no tag")
    second = [[*encode(t[c:]), 1] for t, c in zip(texts, cut)]
    asked = []

    def scripted(model, prompts, samples, stop, **kwargs):
        asked.append([p + list(kwargs["prefix"]) for p in prompts])
        answers = first if model is policy.model else second[1:]  # the answer without a slate is not passed on
        return demonstrations(asked[-1], [[a] for a in answers], CPU)

    monkeypatch.setattr(evaluation, "rollout", scripted)
    other = evaluation.Policy(torch.nn.Linear(1, 1), *list(vars(policy).values())[1:])
    chained = evaluation.Chained(**vars(policy), ranker=other)
    rows = evaluation.evaluate(chained, examples, prompts, cfg)
    assert [r["text"].removesuffix("<eos>") for r in rows[1:]] == [e.demo for e in examples[1:]]
    assert rows[0]["metrics"]["invalid"] == 1 and not any(r["metrics"]["invalid"] for r in rows[1:])
    assert asked[1][0] == prompts[1] + encode(prefix) + encode(texts[1][: cut[1]])


LISTED = "--data requests --requests_examples 40 --eval_k 1 3 --layers 1 --width 32 --slate_size 4 --method sft".split()


def answers(policy, texts: list[str]) -> Rollout:
    """Texts as completions that end, one per prompt."""
    rows = [[*policy.tokenizer(t, add_special_tokens=False)["input_ids"], policy.tokenizer.eos_token_id] for t in texts]
    width, n = max(map(len, rows)), len(rows)
    tokens = torch.tensor([r + [0] * (width - len(r)) for r in rows])
    mask = torch.arange(width) < torch.tensor([len(r) for r in rows])[:, None]
    return Rollout([[3]] * n, tokens, torch.zeros(tokens.shape), mask, torch.arange(n), torch.ones(n, dtype=torch.bool))


def test_a_list_is_scored_for_each_responder_and_averaged_over_the_request(monkeypatch):
    """remark.md 11.7: row recalls 0.5 / 0, 1 / 0.2, 0.4, 0, 0, 0.4 -> per row 0.3125, per request 0.4. In the means of the
    rows both stand: recall weighs requests alike, row_recall (request, responder) rows."""
    cfg = parse([*LISTED, "--eval_k", "2", "--best_metric", "recall@2"])
    pool = [f"t{i} (2000)" for i in range(40)]
    people = [[pool[1:3]], [pool[4:5], pool[0:1]],
              [pool[0:1] + pool[5:9], pool[0:2] + pool[5:8], pool[9:11], pool[11:12], pool[0:2] + pool[9:12]]]  # fmt: skip
    examples = [data.Example(str(x), "?", pool, {}, responders=[dict.fromkeys(r, 1.0) for r in some])
                for x, some in enumerate(people)]  # fmt: skip
    mean = evaluation.people_per_request(examples)
    rows = [{"metrics": evaluation.list_metrics(e, pool[:2], cfg, mean)} for e in examples]
    assert evaluation.means(rows)["row_recall@2"] == pytest.approx(0.3125)
    assert evaluation.means(rows)["recall@2"] == pytest.approx(0.4)
    assert evaluation.list_metrics(examples[1], [None, *pool[:1]], cfg, mean)["mrr"] == 1 / 4  # positions as trained


def test_perfect_lists_reach_the_ceiling_and_bad_lines_keep_their_places(monkeypatch):
    """All people of a request name the same three best titles; the list says them in order, or behind a line of prose, or
    with a seen title in front."""
    cfg = parse([*LISTED, "--requests_disagreement", "0", "--best_metric", "row_recall@3"])
    split = data.load(cfg, "test")
    policy = evaluation.open_policy(cfg, data.load(cfg, "train"), CPU)
    policy = evaluation.Policy(policy.model, *read_bytes(), [1], policy.dtype)
    examples = split.examples
    prompts = [[3]] * len(examples)

    def means(before: list[str], **extra) -> dict:
        texts = ["\n".join([*(b.format(seen=e.seen[0]) for b in before), *e.responders[0]]) for e in examples]
        monkeypatch.setattr(evaluation, "rollout", lambda *a, **k: answers(policy, texts))
        return evaluation.means(evaluation.evaluate(policy, examples, prompts, cfg))

    best = means([])
    ceiling = {f"{m}@3": 1.0 for m in ("recall", "ndcg", "hit", "row_recall")} | {
        "mrr": 1.0,
        "lines": 3.0,
        "finished": 1.0,
    }
    assert {k: best[k] for k in ceiling} == pytest.approx(ceiling)
    assert (
        best["recall@1"] == pytest.approx(1 / 3)
        and best["invalid"] == best["unparsable"] == best["out_of_catalog"] == 0
    )
    ndcg = (1 / math.log2(3) + 1 / 2) / (1 + 1 / math.log2(3) + 1 / 2)
    for before, key, share in (
        ("Here you go:", "unparsable", 1 / 4),
        ("{seen}", "duplicates", 0),
        ("No (1900)", "out_of_catalog", 1 / 4),
    ):
        out = means([before])
        assert (out["mrr"], out["hit@1"], out["recall@3"], out["ndcg@3"]) == pytest.approx((1 / 2, 0, 2 / 3, ndcg))
        assert out[key] == pytest.approx(share) and out["lines"] == 4
    rows = evaluation.evaluate(policy, examples, prompts, cfg)
    assert rows[0]["ranking"] == [None, *examples[0].responders[0]] and rows[0]["text"].startswith("No (1900)\n")
    json.dumps(rows)


def read_bytes() -> tuple:
    tokenizer = model.build_tokenizer("byte", [])
    return tokenizer, rewards.token_bytes(tokenizer)


def test_baselines_of_lists_leave_out_what_the_request_names():
    cfg = parse([*LISTED, "--slate_size", "192", "--eval_k", "1", "190", "--best_metric", "recall@1"])
    split = data.load(cfg)
    for kind in ("random", "popularity"):
        rows = evaluation.baseline_rows(kind, split, cfg)
        for row, e in zip(rows, split.examples):
            assert len(row["ranking"]) == 190 and not set(row["ranking"]) & set(e.seen)
        assert evaluation.means(rows)["recall@190"] == 1.0
    taken = [split.popularity.get(i, 0) for i in rows[0]["ranking"]]
    assert taken == sorted(taken, reverse=True)


def test_an_untrained_model_is_evaluated_on_lists_end_to_end(tmp_path):
    """Every metric that may choose the best checkpoint is there."""
    cfg = parse([*LISTED, "--max_new_tokens", "8", "--best_metric", "recall@3"])
    split = data.load(cfg, "valid")
    policy = evaluation.open_policy(cfg, data.load(cfg, "train"), CPU)
    out = evaluation.means(evaluation.evaluate(policy, *data.fit(split, policy.tokenizer, cfg), cfg))
    for name in [f"{m}@{k}" for m in ("recall", "hit", "ndcg", "row_recall") for k in (1, 3)] + ["mrr"]:
        assert name in out and parse([*LISTED, "--best_metric", name]).best_metric == name


def test_rows_do_not_depend_on_what_is_decoded_beside_them(sft):
    """Greedy, and sampled with a stream per example (F45): alone, together, in small batches; in their order."""
    for text in ("", "--eval_temperature 0.8 --method sft --top_p 0.9"):
        cfg, policy, examples, prompts = opened(sft, text)
        rows = evaluation.evaluate(policy, examples, prompts, cfg)
        assert [row["id"] for row in rows] == [e.id for e in examples]
        cfg.kv_tokens = 100
        assert evaluation.evaluate(policy, examples, prompts, cfg) == rows
        assert evaluation.evaluate(policy, examples[:1], prompts[:1], cfg) == rows[:1]
    again = evaluation.evaluate(policy, examples * 4, prompts * 4, cfg)
    assert again[:8] == rows and len({row["text"] for row in again}) > len({row["text"] for row in rows})
    cfg, policy, examples, prompts = opened(sft)
    rows = evaluation.evaluate(policy, examples, prompts, cfg)
    assert evaluation.evaluate(policy, examples * 33, prompts * 33, cfg) == rows * 33  # more than a chunk of 256


def test_a_rollout_of_a_policy_is_under_the_limits_of_the_settings(sft):
    """Training and evaluation sample through one door: length, stop ids, keys, and the prefix as context (F59)."""
    cfg, policy, _, prompts = opened(sft, "--max_new_tokens 3")
    keys = [(0, 1, i) for i in (5, 6)]
    (forced,) = policy.tokenizer("<SLATE>\n")["input_ids"]
    for prefix in ("", "<SLATE>\n"):
        cfg.prefix = prefix
        roll = policy.rollout(prompts[:2], 4, 1.0, keys, cfg)
        assert roll.prompt_ids == [[*p, forced] if prefix else p for p in prompts[:2]]
        assert roll.tokens.shape == (8, 3) and roll.group.tolist() == [0] * 4 + [1] * 4 and roll.finished.sum() == 0
        alone = policy.rollout(prompts[1:2], 4, 1.0, keys[1:], cfg)
        assert torch.equal(alone.tokens, roll.tokens[4:])
    assert not torch.equal(policy.rollout(prompts[:2], 4, 1.0, [(0, 2, 5), (0, 2, 6)], cfg).tokens, roll.tokens)


def test_a_random_order_finds_one_of_twenty_in_five_places_a_quarter_of_the_time():
    """The floor of the published tables: gold 1 of 20, so R@k is k/20 within sampling error (4 sigma), whatever the
    pool's own order; and it is the same in every process."""
    cfg = parse("--world_gold 1 --show_pool true --pool_size 20 --world_examples 6000 --eval_k 1 5".split())
    split = data.load(cfg)
    rows = evaluation.baseline_rows("random", split, cfg)
    assert len(rows) == 750
    out = evaluation.means(rows)
    for name, p in {"recall@1": 0.05, "recall@5": 0.25, "slate_recall": 0.5}.items():
        assert abs(out[name] - p) < 4 * math.sqrt(p * (1 - p) / len(rows)), (name, out[name])
    assert out["hit@5"] == out["recall@5"] and out["precision@5"] == pytest.approx(out["recall@5"] / 5)
    harmonic = sum(1 / (20 * i) for i in range(1, 6))  # a list of five places
    assert out["mrr"] == pytest.approx(harmonic, abs=0.03)
    assert evaluation.baseline_rows("random", split, cfg) == rows
    pools = [(e.candidates, sorted(e.candidates), list(e.gold)) for e in split.examples]
    assert not any(row["ranking"] == order[:5] for row, orders in zip(rows, pools) for order in orders)


def test_popularity_ranks_by_training_counts_and_ties_by_the_pool():
    """Counts come from the training split alone; a title never bought is last."""
    e = data.Example("t", "", ["a", "b", "c", "d", "e"], {"c": 1.0})
    split = data.Split([e], {}, {"b": 3, "d": 9, "e": 3})
    cfg = Config(slate_size=4, rank_size=3, eval_k=[1, 3])
    (row,) = evaluation.baseline_rows("popularity", split, cfg)
    assert row["ranking"] == ["d", "b", "e"] and row["metrics"]["recall@3"] == 0 and row["metrics"]["slate_recall"] == 0
    cfg = parse([*TINY, "--show_pool", "true", "--pool_size", "5", "--demo_order", "shuffled"])
    counts = data.load(cfg, "train").popularity
    for row, e in zip(evaluation.baseline_rows("popularity", data.load(cfg), cfg), data.load(cfg).examples):
        taken = [counts.get(c, 0) for c in row["ranking"]]
        assert taken == sorted((counts.get(c, 0) for c in e.candidates), reverse=True)[:2]


# ---------------------------------------------------------------------------------------------------------------------
# The command


def test_the_command_prints_a_table_and_writes_json(sft, rl, capsys):
    """python eval.py --init RUN: the run's own settings, its best checkpoint, results in its folder."""
    first = evaluation.main(["--init", sft, "--split", "test"])
    out = capsys.readouterr().out
    assert "95 % interval" in out and "eval_test.json" in out and "8 examples" in out
    for name, value in first.items():
        assert f"\n{name:18}{value['value']:9.4f}  [" in out
        assert value["lo"] <= value["value"] <= value["hi"]
    saved = json.load(open(os.path.join(sft, "eval_test.json")))
    rows = lines(sft, "eval_test.jsonl")
    assert saved["metrics"] == first and saved["examples"] == len(rows) == 8
    assert {"id", "gold", "text", "ranking", "metrics"} == rows[0].keys() and len(rows[0]["gold"]) == 2
    assert {k: v["value"] for k, v in first.items()} == pytest.approx(evaluation.means(rows))
    assert parse(["--config", write(sft, saved["config"])]).width == 32

    second = evaluation.main(["--init", rl, "--against", sft])
    out = capsys.readouterr().out
    assert "difference" in out and f"against {sft}" in out
    ours, theirs = lines(rl, "eval_test.jsonl"), rows
    for name, value in second.items():
        gap = [a["metrics"][name] - b["metrics"][name] for a, b in zip(ours, theirs)]
        assert value["difference"] == pytest.approx(np.mean(gap)) == pytest.approx(value["value"] - value["against"])
        expected = paired_bootstrap(gap, 0)
        assert (value["difference_lo"], value["difference_hi"]) == pytest.approx((expected["lo"], expected["hi"]))
    assert not [n for n in os.listdir(rl) if n.endswith(".tmp")]
    file = os.path.join(sft, "eval_test.jsonl")
    assert evaluation.main(["--init", rl, "--against", file, "--split", "test"]) == second


def write(folder: str, text: str) -> str:
    path = os.path.join(folder, "again.yaml")
    with open(path, "w") as f:
        f.write(text)
    return path


def test_evaluation_at_the_end_of_a_run_is_that_of_the_command(rl, monkeypatch):
    """The numbers watched in training and the ones reported later come from one pass with the same limits (F59)."""
    limits, sample = [], evaluation.rollout
    monkeypatch.setattr(evaluation, "rollout", lambda *a, **k: limits.append((a[2], k)) or sample(*a, **k))
    last = {k[6:]: v for k, v in lines(rl)[-1].items() if k.startswith("valid/")}
    out = evaluation.main(["--init", rl, "--split", "valid"])
    rows = lines(rl, "eval_valid.jsonl")
    assert evaluation.means(rows[:4]) == pytest.approx(last) and set(out) == set(last)
    ((samples, kwargs),) = limits
    assert (samples, kwargs["max_new_tokens"], kwargs["temperature"], kwargs["prefix"]) == (1, 24, 0, [])


def test_the_command_scores_baselines_without_a_model(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(model, "load", lambda *a: pytest.fail("a model was loaded"))
    flags = [*TINY, *"--show_pool true --pool_size 8 --demo_order pool --run_dir".split(), str(tmp_path / "b")]
    for kind in ("random", "popularity"):
        result = evaluation.main([*flags, "--baseline", kind])
        assert f"{kind} on world test, 8 examples" in capsys.readouterr().out
        saved = json.load(open(tmp_path / "b" / f"eval_test_{kind}.json"))
        assert saved["metrics"] == result and len(lines(tmp_path / "b", f"eval_test_{kind}.jsonl")) == 8
    other = str(tmp_path / "b" / "eval_test_popularity.jsonl")
    result = evaluation.main([*flags, "--baseline", "random", "--against", other])
    assert "difference" in result["recall@1"]


def test_a_run_may_be_evaluated_into_another_folder(sft, tmp_path):
    before = sorted(os.listdir(sft))
    evaluation.main(["--init", sft, "--split", "train", "--max_examples", "3", "--run_dir", str(tmp_path / "there")])
    assert sorted(os.listdir(tmp_path / "there")) == ["eval_train.json", "eval_train.jsonl"]
    assert sorted(os.listdir(sft)) == before


BAD = {
    "nothing to evaluate": ("", "--init --baseline"),
    "no such run": ("--init ./nowhere", "--init ./nowhere"),
    "a run without a checkpoint": ("--init EMPTY", "--init checkpoint"),
    "nothing to compare with": ("--baseline random --against ./nowhere", "--against ./nowhere eval_test.jsonl"),
    "not rows": ("--baseline random --against BROKEN", "--against broken.jsonl"),
    "other examples": ("--baseline random --against OTHER", "--against lacks other-1"),
    "other gold": ("--baseline random --against GOLD", "--against other gold 8 test-0"),
    "misspelt": ("--baselin random", "--baselin 'baseline'"),
    "no such split": ("--baseline random --split dev", "--split 'dev'"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_command_ends_in_one_line(what, tmp_path, capsys, monkeypatch):
    """Exit code 2, the flag named, nothing written."""
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    (tmp_path / "broken.jsonl").write_text('{"id": "test-0", "met')
    (tmp_path / "other.jsonl").write_text('{"id": "other-1", "metrics": {"mrr": 1.0}}\n')
    (tmp_path / "gold.jsonl").write_text(
        "".join(f'{{"id": "test-{i}", "gold": {{"x": 1}}, "metrics": {{}}}}\n' for i in range(8))
    )
    flags, words = BAD[what]
    if what == "other examples":
        words = "--against lacks test-0"
    for name, path in {
        "EMPTY": "empty",
        "BROKEN": "broken.jsonl",
        "OTHER": "other.jsonl",
        "GOLD": "gold.jsonl",
    }.items():
        flags = flags.replace(name, str(tmp_path / path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit) as stop:
        evaluation.main([*TINY, *flags.split()])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1, error
    for word in words.split():
        assert word in error
    assert sorted(os.listdir(tmp_path)) == ["broken.jsonl", "empty", "gold.jsonl", "other.jsonl"]
