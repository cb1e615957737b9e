"""Problems with answers that a verifier checks: from the data set to training, and pass@k."""

import fcntl
import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from test_train import CPU, ROOT, contents, lines, on_cpu  # noqa: F401

import config
import data
import eval as evaluation
import model
import passk
import rewards
import train
import verify
from config import Config, parse
from rollout import demonstrations

SUMS = """--data sums --max_prompt 16 --max_new_tokens 4 --layers 2 --width 32 --batch_size 8 --group_size 8
--eval_examples 4""".split()


def load_sums(cfg: Config, split: str) -> data.Split:
    """a + b = for two digits whose sum is one, 55 problems. A fifth of them, trained on too, are valid and test: so that a
    tiny model solves some."""
    pairs = [(a, b) for a in range(10) for b in range(10 - a)]
    pairs = pairs if split == "train" else pairs[::5]
    examples = [
        data.Example(f"{a}+{b}", f"{a} + {b} = ", answer=str(a + b), check="last", demo=f"{a + b} ") for a, b in pairs
    ]
    return data.Split(examples, vocabulary=[f"{w} " for w in [*range(10), "+", "="]])


def check_last(text: str, answer: str) -> dict[str, float]:
    """The last number of the text is the answer."""
    found = re.findall("[0-9.]+", text)
    return {"reward": float(bool(found) and float(found[-1]) == float(answer)), "invalid": float(not found)}


@pytest.fixture(scope="module", autouse=True)
def sums():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(data.DATASETS, "sums", data.Dataset(load_sums, "sums of two digits"))
        patch.setattr(config, "PROBLEMS", config.PROBLEMS | {"sums"})
        patch.setitem(verify.VERIFIERS, "last", check_last)
        yield


def run(folder, text: str) -> dict[str, float]:
    return train.main(parse([*SUMS, *text.split(), "--run_dir", str(folder)]))


@pytest.fixture(scope="module")
def sft(sums, tmp_path_factory) -> str:
    """A run folder whose model knows what an answer looks like and some of the sums."""
    folder = str(tmp_path_factory.mktemp("problems") / "sft")
    run(folder, "--method sft --steps 30 --lr 1e-2 --schedule linear --batch_size 32")
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# Problems


def scored(texts: list[str], **settings) -> rewards.Scored:
    """Scores of answers to 3 + 4, written in bytes."""
    cfg = parse(["--data", "sums", "--method", "grpo", *(w for k, v in settings.items() for w in (f"--{k}", str(v)))])
    tokenizer = model.build_tokenizer("byte", [])
    ids = [data.encode_answer(tokenizer, t) for t in texts]
    roll = demonstrations([[5]], [ids], CPU)
    example = data.Example("a", "3 + 4 = ", answer="7", check="last")
    return rewards.score(roll, [example], rewards.token_bytes(tokenizer), cfg, "sequence")


def test_an_answer_earns_what_its_verifier_says():
    """One unit, all sampled tokens and no padding; the stop token is no text."""
    got = scored(["7", "it is 7.0", "7 or 8", "no idea", ""])
    assert got.reward.tolist() == [[1.0], [1.0], [0.0], [0.0], [0.0]] and got.valid.all() and got.high == [1.0]
    assert got.parts["correct"] == got.parts["exact"] == got.parts["reward"] == [1, 1, 0, 0, 0]
    assert got.parts["invalid"] == [0, 0, 0, 1, 1] and got.texts[1] == "it is 7.0"
    assert got.unit_ids.sum(1).tolist() == [2, 10, 7, 8, 1] and got.unit_ids.max() == 1


def test_a_share_is_a_reward_but_not_correct_and_a_stricter_test_is_logged(monkeypatch):
    found = {"half": {"reward": 0.5}, "all": {"reward": 1.0, "exact": 0.0}}
    monkeypatch.setitem(verify.VERIFIERS, "last", lambda text, answer: found[text])
    got = scored(["half", "all"])
    assert got.parts["reward"] == [0.5, 1.0] and got.parts["correct"] == [0, 1] and got.parts["exact"] == [0, 0]


def test_columns_do_not_depend_on_what_failed(monkeypatch):
    """Or ranks would add up columns of different names, where all answers of one of them failed."""
    monkeypatch.setitem(verify.MORE, "last", ["walk"])
    monkeypatch.setitem(verify.VERIFIERS, "last", lambda text, answer: {"reward": 1.0, "walk": 1.0})
    healthy = scored(["7"] * 4)
    monkeypatch.setitem(verify.VERIFIERS, "last", lambda text, answer: 1 / 0)
    failed = scored(["7"] * 4, max_reward_errors=1)
    assert list(failed.parts) == list(healthy.parts) and healthy.parts["walk"] == [1.0] * 4


def test_a_verifier_that_fails_costs_its_own_answer(monkeypatch):
    def picky(text, answer):
        return {"reward": {"7": 1.0, "8": 0.0}[text]}

    monkeypatch.setitem(verify.VERIFIERS, "last", picky)
    got = scored(["7", "what", "8"], max_reward_errors=0.5)
    assert got.valid[:, 0].tolist() == [True, False, True] and got.parts["reward_errors"] == [0, 1, 0]
    assert got.unit_ids[1].sum() == 0 and got.parts["correct"] == [1, 0, 0]


@pytest.mark.parametrize("method", ["grpo", "focal_dapo", "ppo", "gspo"])
def test_a_step_on_problems_trains_and_logs_what_was_right(sft, tmp_path, method):
    last = run(tmp_path / "run", f"--method {method} --init {sft} --steps 1 --lr 1e-3")
    (row,) = lines(tmp_path / "run")
    assert 0 < row["correct"] < 1 and row["grad_norm"] > 0 and row["reward"] == pytest.approx(row["correct"])
    assert set(last) == {"correct", "exact", "invalid", "length", "finished", "reward_errors"}
    assert parse(["--config", str(tmp_path / "run" / "config.yaml")]).best_metric == "correct"


def test_reinforcement_raises_the_share_of_right_answers(sft, tmp_path):
    run(tmp_path / "run", f"--method focal_grpo --init {sft} --steps 25 --lr 3e-3 --group_size 16 --batch_size 16")
    share = [row["correct"] for row in lines(tmp_path / "run")]
    assert sum(share[-3:]) > sum(share[:3]) + 0.3, share


def test_a_vocabulary_is_the_whole_of_a_tokenizer_made_here():
    split = load_sums(Config(), "train")
    built = model.load_tokenizer(Config(), split.examples, split.catalog, split.vocabulary)
    assert len(built) == len(model.SPECIAL) + 12 and built.decode(built("9 + 0 = ")["input_ids"]) == "9 + 0 = "
    assert built.convert_ids_to_tokens([3, 12, 14]) == ["0 ", "9 ", "= "]  # in the order given
    assert len(model.load_tokenizer(Config(tokenizer="byte"), split.examples, (), split.vocabulary)) == 259


@pytest.mark.parametrize("flags, said", [
    ("--method fgrpo", "one unit"),
    ("--method rank_grpo", "one unit"),
    ("--method dpo", "--pair_source model"),
    ("--method grpo --answer list", "leave --answer empty"),
    ("--method grpo --best_metric ndcg@5", "nearest"),
    ("--method grpo --keep_samples 4 --keep_by hits", "no column"),
])  # fmt: skip
def test_settings_of_lists_are_refused_for_problems(flags, said, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(["--data", "sums", *flags.split()])
    assert stop.value.code == 2 and said in capsys.readouterr().err


def test_a_run_goes_on_only_with_the_same_answers(sft, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    run(folder, f"--method grpo --init {sft} --steps 1")

    def other(cfg, split):
        out = load_sums(cfg, split)
        out.examples[0].answer = "99"
        return out

    monkeypatch.setitem(data.DATASETS, "sums", data.Dataset(other, "sums with a wrong answer"))
    with pytest.raises(SystemExit):
        run(folder, f"--method grpo --init {sft} --steps 2 --resume")
    assert "training examples" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Counts -> numbers


def missed(n: int, c: int, k: int) -> Fraction:
    """Chance that k of n samples, c of them right, hold no right one: one draw after the other."""
    out = Fraction(1)
    for i in range(k):
        out *= Fraction(max(0, n - c - i), n - i)
    return out


def test_pass_at_k_is_exact_for_every_small_n():
    for n in range(1, 13):
        for k in range(1, n + 1):
            want = [float(1 - missed(n, c, k)) for c in range(n + 1)]
            assert passk.pass_at_k(n, np.arange(n + 1), k) == pytest.approx(want, rel=1e-14, abs=0)
            assert passk.pass_at_k(n, 0, k) == 0.0 and passk.pass_at_k(n, n, k) == 1.0
    assert str(passk.pass_at_k(4, 0, 2)) == "0.0", "tables would say -0.0"
    mixed = passk.pass_at_k([4, 8, 4], [1, 2, 3], 2)
    assert mixed.tolist() == [passk.pass_at_k(4, 1, 2), passk.pass_at_k(8, 2, 2), passk.pass_at_k(4, 3, 2)]


@pytest.mark.parametrize("n, c, k", [
    (1024, 1, 1), (100_003, 1, 1), (2**17, 3, 1), (2**17, 7, 1), (1024, 3, 256), (1024, 700, 256), (1024, 768, 256), (1024, 769, 256), (1024, 1, 1024), (2**17, 1, 1),
    (2**17, 5, 1), (2**17, 1, 2**16), (2**17, 2, 1000), (2**17, 60000, 2), (2**17, 131071, 3), (2**17, 100, 100),
])  # fmt: skip
def test_pass_at_k_is_stable_for_many_samples(n, c, k):
    """Also where the result is near 0, which 1 - exp(difference of large lgamma) would lose."""
    want = 1 - missed(n, max(c, k), min(c, k))  # C(n-c, k) / C(n, k) is symmetric in c and k
    assert passk.pass_at_k(n, c, k) == pytest.approx(float(want), rel=1e-13, abs=0)


@pytest.mark.parametrize("n, c, k", [(4, 2, 5), (4, 5, 2), (4, -1, 2), (4, 2, 0)])
def test_pass_at_k_of_impossible_counts_is_an_error(n, c, k):
    with pytest.raises(ValueError, match="pass@"):
        passk.pass_at_k(n, c, k)


def test_counts_in_subsamples_are_those_of_drawn_subsets():
    """The counts are drawn, not the subsets: the same distribution of the mean as that of subsets drawn one by one, here
    over two benchmarks of one and two problems, which count the same."""
    n, rights, m, ks, rounds = 12, [[5], [1, 12]], 4, [1, 2, 4], 4000
    sets = [([n] * len(r), r) for r in rights]
    got = passk.subsampled(sets, ks, m, 40_000)
    rng, drawn = np.random.default_rng(1), {k: [] for k in ks}
    for _ in range(rounds):
        found = [[int((rng.permutation(n)[:m] < c).sum()) for c in r] for r in rights]
        for k in ks:
            drawn[k].append(np.mean([np.mean([1 - missed(m, c, k) for c in some]) for some in found]))
    for k in ks:
        whole = np.mean([np.mean(passk.pass_at_k(n, r, k)) for r in rights])
        assert got[k].mean() == pytest.approx(whole, abs=0.004)  # unbiased for the pass@k of all n samples
        assert np.std(got[k]) == pytest.approx(np.std(np.array(drawn[k], float)), rel=0.06)
    assert set(np.unique(got[4])) <= {0.25, 0.5, 0.75, 1.0}  # k = m: any right one counts


def test_paired_subsampling_tells_a_difference_from_luck():
    rng = np.random.default_rng(0)
    n, c = np.full(40, 1024), rng.integers(0, 1025, 40)
    better = np.minimum(1024, c + 60)
    same, other = (passk.paired_subsampling([(n, a)], [(n, c)], [1, 256], 256, 4000) for a in (c, better))
    assert not same[1]["significant"] and not same[256]["significant"]
    assert other[1]["significant"] and other[1]["mean_difference"] == pytest.approx(
        (better - c).mean() / 1024, abs=1e-3
    )


# ---------------------------------------------------------------------------------------------------------------------
# Samples -> counts


def asked(sft, *flags) -> list[str]:
    return ["--init", str(sft), "--k", "1", "4", "--samples", "16", *flags]


def opened(sft, *flags):
    """Policy, examples, prompts and settings of an evaluation."""
    cfg = parse(asked(sft, *flags), training=False)
    split = data.load(cfg)
    policy = evaluation.open_policy(cfg, split, CPU)
    return policy, *data.fit(split, policy.tokenizer, cfg), cfg


def test_counts_are_those_of_the_samples_and_depend_on_nothing_else(sft, monkeypatch):
    """Against samples drawn and checked one problem at a time; the same in other chunks, in another order and alone."""
    policy, examples, prompts, cfg = opened(sft)
    got = passk.counted(policy, examples, prompts, cfg)
    assert [p["id"] for p in got] == [e.id for e in examples] and 0 < sum(p["c"] for p in got) < 16 * len(got)
    for e, prompt, p in list(zip(examples, prompts, got))[:3]:
        roll = policy.rollout([prompt], 16, 1.0, [(0, data.stable_hash(e.id))], cfg)
        texts = [policy.tokenizer.decode(t[m], skip_special_tokens=True) for t, m in zip(roll.tokens, roll.mask)]
        right = sum(check_last(text, e.answer)["reward"] for text in texts)
        assert (p["n"], p["c"], p["exact"], p["finished"]) == (16, right, right, int(roll.finished.sum()))
        assert p["length"] == float(roll.mask.sum()) / 16
    rolls = []
    real = type(policy).rollout
    monkeypatch.setattr(type(policy), "rollout", lambda *args: rolls.append(len(args[1])) or real(*args))
    monkeypatch.setattr(passk, "ROWS", 50)
    assert passk.counted(policy, examples[::-1], prompts[::-1], cfg)[::-1] == got and rolls == [3, 3, 3, 2]
    assert passk.counted(policy, examples[4:5], prompts[4:5], cfg) == got[4:5]


def stopped(monkeypatch, after: int) -> list[int]:
    """From now on the sampling of some problems is interrupted after so many calls. -> problems of each call so far."""
    real, calls = passk.counts, []

    def counts(policy, examples, *args):
        if len(calls) == after:
            raise KeyboardInterrupt
        calls.append(len(examples))
        return real(policy, examples, *args)

    monkeypatch.setattr(passk, "counts", counts)
    return calls


def test_an_interrupted_evaluation_goes_on_where_it_stopped(sft, tmp_path, monkeypatch, capsys):
    """After two of four rounds, with half a line behind them: problems done are not sampled again, and the file, the
    numbers and the table are those of an evaluation without a break."""
    monkeypatch.setattr(passk, "ROWS", 50)
    whole, broken = str(tmp_path / "whole"), str(tmp_path / "broken")
    want = evaluation.main(asked(sft, "--run_dir", whole))
    path = os.path.join(broken, "pass_sums_test.jsonl")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stopped(patch, 2)
        evaluation.main(asked(sft, "--run_dir", broken))
    assert len(lines(broken, "pass_sums_test.jsonl")) == 1 + 6
    with open(path, "a", encoding="utf-8") as f:
        f.write('{"id": "9+0", "n": 16, "c"')
    calls = stopped(monkeypatch, 99)
    assert evaluation.main(asked(sft, "--run_dir", broken)) == want and calls == [3, 2]
    assert open(path, "rb").read() == open(os.path.join(whole, "pass_sums_test.jsonl"), "rb").read()
    assert evaluation.main(asked(sft, "--run_dir", broken, "--k", "2")) and calls == [3, 2]  # another k needs no sample
    out = capsys.readouterr().out
    assert "16 samples of each" in out and "pass@4" in out and "pass_sums_test.json" in out
    result = json.load(open(os.path.join(whole, "pass_sums_test.json"), encoding="utf-8"))
    rows = lines(whole, "pass_sums_test.jsonl")[1:]
    assert result["metrics"]["pass@1"]["value"] == pytest.approx(np.mean([r["c"] / r["n"] for r in rows]))
    assert result["examples"] == len(rows) == 11 and result["metrics"]["pass@1"]["lo"] < want["pass@1"]["value"]


def refused(capsys, *argv) -> str:
    """The line that a command ends with."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        evaluation.main(list(argv))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1, error
    return error


@pytest.fixture(scope="module")
def done(sft, tmp_path_factory) -> str:
    """A folder with counts of the test problems."""
    folder = str(tmp_path_factory.mktemp("done") / "run")
    evaluation.main(asked(sft, "--run_dir", folder))
    return folder


def test_a_file_of_another_evaluation_is_refused_and_left_alone(sft, done, tmp_path, monkeypatch, capsys):
    before, path = contents(done), os.path.join(done, "pass_sums_test.jsonl")
    for flags, said in (
        ("--seed 1", "seed 0, and now it is 1"),
        ("--samples 17", "samples 16"),
        ("--temperature 0.9", "temperature 1.0"),
        ("--keep_answers", "keep_answers False"),
        ("--max_new_tokens 3", "max_new_tokens 4"),
    ):
        assert said in refused(capsys, *asked(sft, "--run_dir", done, *flags.split())), flags
    run(tmp_path / "other", f"--method sft --init {sft} --steps 1 --lr 1e-3")
    assert "weights" in refused(capsys, *asked(tmp_path / "other", "--run_dir", done))
    with open(path, "a", encoding="utf-8") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        assert "another process" in refused(capsys, *asked(sft, "--run_dir", done))
    monkeypatch.setattr(data.DATASETS["sums"], "load", with_another_answer)
    assert "problem 0+0 has another prompt or answer" in refused(capsys, *asked(sft, "--run_dir", done))
    assert contents(done) == before


def with_another_answer(cfg: Config, split: str) -> data.Split:
    out = load_sums(cfg, split)
    out.examples[0].answer = "99"
    return out


@pytest.mark.parametrize("number, change", [
    (0, lambda line: "{}"), (1, lambda line: line[:20]), (2, lambda line: "null"),
    (2, lambda line: line.replace('"n": 16', '"n": 15')), (3, lambda line: re.sub('"c": [0-9]+', '"c": 17', line)),
    (1, lambda line: line.replace('"id": "0+0"', '"id": 5')),
])  # fmt: skip
def test_a_damaged_line_is_named_and_nothing_is_lost(sft, done, tmp_path, capsys, number, change):
    rows = open(os.path.join(done, "pass_sums_test.jsonl"), encoding="utf-8").read().split("\n")
    rows[number] = change(rows[number])
    path = tmp_path / "pass_sums_test.jsonl"
    path.write_text("\n".join(rows), encoding="utf-8")
    for argv in (
        asked(sft, "--run_dir", str(tmp_path)),
        ["--average", str(path)],
        ["--init", sft, "--rare", str(path)],
    ):
        assert f"line {number + 1} is damaged" in refused(capsys, *argv)
    assert path.read_text(encoding="utf-8") == "\n".join(rows)


def test_a_problem_twice_in_a_file_is_refused(sft, done, tmp_path, capsys):
    rows = open(os.path.join(done, "pass_sums_test.jsonl"), encoding="utf-8").read().splitlines()
    (tmp_path / "pass_sums_test.jsonl").write_text("\n".join([*rows, rows[3], ""]), encoding="utf-8")
    assert f"line {len(rows) + 1} is a problem for the second time" in refused(
        capsys, *asked(sft, "--run_dir", str(tmp_path))
    )


def changed(folder: str, to: str, name="sums", change=lambda row: row, first=None) -> str:
    """A copy of the counts of the first problems under another name of the data set, with changed rows."""
    os.makedirs(to, exist_ok=True)
    head, *rows = lines(folder, "pass_sums_test.jsonl")
    head["settings"]["data"] = name
    path = os.path.join(to, f"pass_{name}_test.jsonl")
    with open(path, "w", encoding="utf-8") as f:
        f.write("".join(json.dumps(r) + "\n" for r in [head, *(change(r) for r in rows[:first])]))
    return path


def test_a_model_is_compared_on_the_same_problems(sft, done, tmp_path, capsys):
    worse = os.path.dirname(
        changed(done, str(tmp_path / "worse"), change=lambda r: r | {"c": r["c"] // 2, "exact": r["c"] // 2})
    )
    result = evaluation.main(asked(sft, "--run_dir", done, "--against", worse, "--subsample", "8"))
    out = capsys.readouterr().out
    ours, theirs = (np.array([r["c"] for r in lines(d, "pass_sums_test.jsonl")[1:]]) for d in (done, worse))
    for k in (1, 4):
        got, want = result[f"pass@{k}"], passk.pass_at_k(16, ours, k) - passk.pass_at_k(16, theirs, k)
        assert got["difference"] == pytest.approx(want.mean()) and got["difference_lo"] < want.mean()
        assert got["subsample"]["difference"] == pytest.approx(want.mean(), abs=5e-3) and got["subsample"]["m"] == 8
        assert got["subsample"]["lo"] > 0  # 8 of 16 samples hardly differ in how many are right
    assert "8 of 16" in out
    evaluation.main(asked(sft, "--run_dir", done, "--against", worse))
    assert "no m-out-of-n subsampling" in capsys.readouterr().out  # 256 of 16
    few = os.path.dirname(changed(done, str(tmp_path / "few"), first=0))
    assert "lacks 11 of 11 problems" in refused(capsys, *asked(sft, "--run_dir", done, "--against", few))
    other = os.path.dirname(changed(done, str(tmp_path / "other"), change=lambda r: r | {"problem": "0"}))
    assert "other answers" in refused(capsys, *asked(sft, "--run_dir", done, "--against", other))
    assert "cannot read" in refused(capsys, *asked(sft, "--run_dir", done, "--against", str(tmp_path)))
    assert "too few for pass@32" in refused(
        capsys, *asked(sft, "--run_dir", str(tmp_path / "n"), "--k", "32", "--samples", "32", "--against", done)
    )


def test_the_mean_over_benchmarks_counts_each_the_same(done, tmp_path, capsys):
    """However many problems it has: 11 and 1. And no model is needed."""
    both, zero = str(tmp_path / "both"), str(tmp_path / "zero")
    for folder, right in ((both, 16), (zero, 0)):
        changed(done, folder, change=lambda r, right=right: r if right else r | {"c": 0, "exact": 0})
        changed(done, folder, "tiny", lambda r, right=right: r | {"c": right, "exact": right}, 1)
    c = np.array([r["c"] for r in lines(done, "pass_sums_test.jsonl")[1:]])
    result = evaluation.main(
        ["--average", both, "--k", "1", "8", "--against", zero, "--subsample", "8", "--run_dir", both]
    )
    for k in (1, 8):
        first = passk.pass_at_k(16, c, k).mean()
        mean = result["mean"][f"pass@{k}"]
        assert result["sums test"][f"pass@{k}"]["value"] == pytest.approx(first)
        assert mean["value"] == mean["difference"] == pytest.approx((first + 1) / 2) and mean["against"] == 0
        # one problem has no spread, so the mean's interval is half as wide
        width = [r[f"pass@{k}"]["hi"] - r[f"pass@{k}"]["lo"] for r in (result["mean"], result["sums test"])]
        assert width[0] == pytest.approx(width[1] / 2, rel=0.05)
        assert mean["subsample"]["difference"] == pytest.approx(mean["value"], abs=5e-3)
    assert json.load(open(os.path.join(both, "average.json"), encoding="utf-8"))["metrics"] == result
    out = capsys.readouterr().out
    assert "tiny test" in out and "mean over 2 benchmarks" in out and "8 of 16" in out
    powers = evaluation.main(["--average", os.path.join(both, "pass_sums_test.jsonl")])
    assert [k for k in powers["mean"] if "@" in k] == [f"pass@{2**i}" for i in range(5)]
    assert "holds no pass_" in refused(capsys, "--average", str(tmp_path))
    assert "cannot read" in refused(capsys, "--average", str(tmp_path / "no.jsonl"))
    assert "16 samples" in refused(capsys, "--average", both, "--k", "17")


def test_a_stricter_test_has_a_pass_at_k_of_its_own(done, tmp_path):
    path = changed(done, str(tmp_path), change=lambda r: r | {"c": 8, "exact": 2})
    result = evaluation.main(["--average", path, "--k", "1", "9"])["mean"]
    assert (result["pass@1"]["value"], result["exact@1"]["value"], result["pass@9"]["value"]) == (0.5, 0.125, 1.0)


@pytest.mark.parametrize("flags, said", [
    ("--data world --k 1", "right or wrong"), ("--k 0", "--k 0"), ("--k 4 --samples 2", "--samples 2"), ("--keep_answers --k", "--keep_answers"),
    ("--k 1 --temperature 0", "temperature"),
])  # fmt: skip
def test_impossible_questions_are_refused(flags, said, capsys):
    assert said in refused(capsys, *"--data sums --init runs/none".split(), *flags.split())


def test_pass_at_k_is_logged_over_training(sft, tmp_path):
    """The numbers of an evaluation of the checkpoint itself, and a metric to keep the best one by."""
    folder = tmp_path / "run"
    last = run(folder, f"--method grpo --init {sft} --steps 2 --lr 1e-3 --eval_every 1 --save_every 1 --k 1 4 --samples 16 "
               "--best_metric pass@4 --eval_examples 0")  # fmt: skip
    log = lines(folder)
    assert (
        all(0 < row["valid/pass@1"] < row["valid/pass@4"] < 1 for row in log)
        and last["pass@4"] == log[-1]["valid/pass@4"]
    )
    step = str(folder / "checkpoints" / "step-000002")
    again = evaluation.main(["--init", step, "--split", "valid"])  # k and samples are the run's own
    assert again["pass@4"]["value"] == last["pass@4"] and os.path.exists(os.path.join(step, "pass_sums_valid.jsonl"))


# ---------------------------------------------------------------------------------------------------------------------
# Right but rare


@pytest.fixture(scope="module")
def kept(sft, tmp_path_factory) -> str:
    """Counts of training problems, with the right answers."""
    folder = str(tmp_path_factory.mktemp("kept") / "base")
    evaluation.main(
        ["--init", sft, "--split", "train", "--k", "1", "--samples", "24", "--keep_answers", "--run_dir", folder]
    )
    return folder


def test_the_rarest_answers_are_those_of_the_highest_nll_per_token(sft, kept):
    """NLL by hand, from the model's logits over prompt and answer; every kept answer is right and ends in a stop token."""
    policy, examples, prompts, _ = opened(sft, "--split", "train")
    problems = lines(kept, "pass_sums_train.jsonl")[1:]
    answers = {p["id"]: p["answers"] for p in problems}
    assert [len(p["answers"]) for p in problems] == [p["c"] for p in problems] and any(
        len(a) > 1 for a in answers.values()
    )
    for e, prompt in list(zip(examples, prompts))[:8]:
        for value, tokens in answers[e.id][:3]:
            logits = policy.model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            want = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens))
            assert value == pytest.approx(want.item(), abs=1e-5)
            assert check_last(policy.tokenizer.decode(tokens[:-1]), e.answer)["reward"] == 1
    every = sorted((v for p in problems for v, _ in p["answers"]), reverse=True)
    assert [v for _, v, _ in passk.rarest(problems, 0.1)] == every[: len(every) // 10]
    assert len(passk.rarest(problems[:1] + [p for p in problems if p["c"]][:1])) == 1
    small = [a for a in passk.rarest(problems, 1.0)][:9]
    by_id = dict(zip([e.id for e in examples], prompts))
    one_by_one = passk.nll_of(policy, small, by_id, parse(asked(sft, "--micro_tokens", "1"), training=False))
    assert one_by_one == pytest.approx([v for _, v, _ in small], abs=1e-5)


def test_delta_nll_is_zero_for_the_base_and_grows_where_rare_answers_are_forgotten(
    sft, kept, tmp_path, monkeypatch, capsys
):
    """Training on one wrong answer to everything forgets the rest."""
    monkeypatch.setattr(passk.rarest, "__defaults__", (0.1,))
    same = evaluation.main(["--init", sft, "--rare", kept, "--run_dir", str(tmp_path / "a"), "--split", "train"])
    assert (
        same["delta_nll"]["value"] == pytest.approx(0, abs=1e-6)
        and same["nll"]["value"] == same["nll_base"]["value"] > 0
    )
    dull = load_sums(Config(), "train")
    for e in dull.examples:
        e.demo = "8 "
    with monkeypatch.context() as patch:
        patch.setattr(data.DATASETS["sums"], "load", lambda cfg, split: dull)
        run(tmp_path / "dull", f"--method sft --init {sft} --steps 5 --lr 3e-3")
    file = os.path.join(kept, "pass_sums_train.jsonl")
    lost = evaluation.main(["--init", str(tmp_path / "dull"), "--rare", file])  # the split is that of the file
    assert lost["delta_nll"]["lo"] > 0 and lost["nll_base"] == same["nll_base"]
    assert lost["delta_nll"]["value"] == pytest.approx(lost["nll"]["value"] - lost["nll_base"]["value"])
    written = json.load(open(tmp_path / "dull" / "rare_sums_train.json", encoding="utf-8"))
    assert (
        written["metrics"] == lost
        and written["base"]["samples"] == 24
        and "rarest right answers" in capsys.readouterr().out
    )
    monkeypatch.setattr(
        data.DATASETS["sums"], "load", lambda cfg, split: dull if split == "test" else load_sums(cfg, "test")
    )
    assert "is not in --data sums --split train" in refused(capsys, "--init", sft, "--rare", file)

    def longer(cfg, split):
        return data.Split([replace(e, prompt=e.prompt + "= ") for e in load_sums(cfg, split).examples])

    monkeypatch.setattr(data.DATASETS["sums"], "load", longer)
    assert "another prompt" in refused(capsys, "--init", sft, "--rare", file)


def test_a_file_without_answers_has_none_to_remember(sft, done, capsys):
    assert "--keep_answers" in refused(capsys, "--init", sft, "--rare", done)


# ---------------------------------------------------------------------------------------------------------------------
# Ranks


def rank_of_two(rank: int, port: int, sft: str, folder: str) -> None:
    """One of two processes that evaluate together: interrupted after the first round, then to the end; and Delta NLL."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
    passk.ROWS = 50
    data.DATASETS["sums"] = data.Dataset(load_sums, "sums of two digits")
    config.PROBLEMS.add("sums")
    verify.VERIFIERS["last"] = check_last
    flags = ["--split", "train", "--k", "1", "--samples", "24", "--keep_answers", "--run_dir", folder]
    real, calls = passk.counts, []

    def counts(policy, examples, *args):
        calls.append([e.id for e in examples])
        if len(calls) == 2:
            raise InterruptedError
        return real(policy, examples, *args)

    nll_of, values = passk.nll_of, []

    def looked(policy, answers, *args):
        values.append([[value for _, value, _ in answers], nll_of(policy, answers, *args)])
        return values[-1][1]

    passk.counts, passk.nll_of = counts, looked
    try:
        evaluation.main(["--init", sft, *flags])
    except InterruptedError:
        pass
    result = evaluation.main(["--init", sft, *flags])
    rare = evaluation.main(
        ["--init", sft, "--rare", os.path.join(folder, "pass_sums_train.jsonl"), "--run_dir", folder]
    )
    with open(os.path.join(folder, f"rank{rank}.json"), "w", encoding="utf-8") as f:
        json.dump({"calls": calls, "result": result, "rare": rare, "values": values}, f)


def test_two_ranks_share_the_problems_and_count_what_one_counts(sft, kept, tmp_path):
    """Every problem is sampled by one of them, also across an interruption, and one writes."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT}
    script = [sys.executable, os.path.join(ROOT, "tests", "test_passk.py"), str(port), sft, str(tmp_path)]
    subprocess.run(script, env=env, check=True, timeout=200, capture_output=True)
    ranks = [json.load(open(tmp_path / f"rank{r}.json", encoding="utf-8")) for r in (0, 1)]
    ours, theirs = (lines(d, "pass_sums_train.jsonl") for d in (tmp_path, kept))
    assert ours[0] == theirs[0] and sorted(r["id"] for r in ours[1:]) == sorted(r["id"] for r in theirs[1:])
    by_id = {r["id"]: r for r in theirs[1:]}
    for row in ours[1:]:
        want = by_id[row["id"]]
        assert {k: v for k, v in row.items() if k != "answers"} == {k: v for k, v in want.items() if k != "answers"}
        assert [t for _, t in row["answers"]] == [t for _, t in want["answers"]]
    sampled = [i for r in ranks for n, call in enumerate(r["calls"]) if n != 1 for i in call]  # call 1 was interrupted
    assert sorted(sampled) == sorted(by_id) and all(len(call) <= 2 for r in ranks for call in r["calls"])
    assert ranks[0]["result"] == ranks[1]["result"] and ranks[0]["rare"] == ranks[1]["rare"]
    ((base, now),) = ranks[0]["values"]
    assert now == pytest.approx(base, abs=1e-5) and len(set(base)) > 2  # in the order of the answers


if __name__ == "__main__":
    torch.set_num_threads(1)
    children = []
    for rank in (0, 1):
        if not (child := os.fork()):
            rank_of_two(rank, int(sys.argv[1]), *sys.argv[2:])
            sys.stdout.flush()
            os._exit(0)
        children.append(child)
    sys.exit(sum(os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) != 0 for c in children))
