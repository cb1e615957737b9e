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
from config import Config, parse
from eval import paired_bootstrap, ranking_metrics
from rollout import demonstrations


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
    monkeypatch.setattr(evaluation, "rollout", lambda m, p, *a, **k: demonstrations(p, ids, CPU))
    out = evaluation.means(evaluation.evaluate(policy, examples, prompts, cfg))
    ceiling = {"recall@1": 1 / 2, "recall@2": 1, "slate_recall": 1, "slate_precision": 2 / 4}
    ceiling |= {"precision@1": 1, "precision@2": 1}
    ceiling |= {f"{m}@{k}": 1 for m in ("hit", "ndcg", "mrr") for k in (1, 2)} | {"mrr": 1, "finished": 1, "length": 11}
    assert out == pytest.approx({**ceiling, "invalid": 0, "duplicates": 0, "out_of_pool": 0})


def test_a_malformed_answer_scores_zero_and_is_counted(sft, monkeypatch):
    """Half of the answers lack their last tag; the means must not be those of the well-formed half."""
    cfg, policy, examples, prompts = opened(sft, "--world_slack 0")
    ids = [policy.tokenizer(e.demo, add_special_tokens=False)["input_ids"] for e in examples]
    ids = [[*x, 1] if i % 2 else [*x[:-1], 1] for i, x in enumerate(ids)]
    monkeypatch.setattr(evaluation, "rollout", lambda m, p, *a, **k: demonstrations(p, ids, CPU))
    rows = evaluation.evaluate(policy, examples, prompts, cfg)
    assert [row["metrics"]["invalid"] for row in rows] == [1.0, 0.0] * 4
    assert rows[0]["ranking"] == [] and rows[0]["metrics"]["slate_recall"] == 0
    assert evaluation.means(rows)["hit@1"] == 0.5


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
