"""Problems with answers that a verifier checks: from the data set to training, and pass@k."""

import pytest
from test_train import CPU, lines, on_cpu  # noqa: F401

import config
import data
import model
import rewards
import train
import verify
from config import Config, parse
from rollout import demonstrations

SUMS = """--data sums --max_prompt 16 --max_new_tokens 4 --layers 2 --width 32 --batch_size 8 --group_size 8
--eval_examples 4""".split()


def load_sums(cfg: Config, split: str) -> data.Split:
    """a + b = for two digits whose sum is one, 55 problems; a fifth of them held out."""
    pairs = [(a, b) for a in range(10) for b in range(10 - a)]
    pairs = [p for i, p in enumerate(pairs) if (i % 5 == 0) != (split == "train")]
    examples = [
        data.Example(f"{a}+{b}", f"{a} + {b} = ", answer=str(a + b), check="number", demo=f"{a + b} ") for a, b in pairs
    ]
    return data.Split(examples, vocabulary=[f"{w} " for w in [*range(10), "+", "="]])


@pytest.fixture(scope="module", autouse=True)
def sums():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(data.DATASETS, "sums", data.Dataset(load_sums, "sums of two digits"))
        patch.setattr(config, "PROBLEMS", config.PROBLEMS | {"sums"})
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
    example = data.Example("a", "3 + 4 = ", answer="7", check="number")
    return rewards.score(roll, [example], rewards.token_bytes(tokenizer), cfg, "sequence")


def test_an_answer_earns_what_its_verifier_says():
    """One unit, all sampled tokens and no padding; the stop token is no text."""
    got = scored(["7", "it is 7.0", "7 or 8", "no idea", ""])
    assert got.reward.tolist() == [[1.0], [1.0], [0.0], [0.0], [0.0]] and got.valid.all() and got.high == [1.0]
    assert got.parts["correct"] == got.parts["reward"] == [1, 1, 0, 0, 0] and not any(got.parts["exact"])  # no box
    assert got.parts["invalid"] == [0, 0, 0, 1, 1] and got.texts[1] == "it is 7.0"
    assert got.unit_ids.sum(1).tolist() == [2, 10, 7, 8, 1] and got.unit_ids.max() == 1


def test_a_share_is_a_reward_but_not_correct_and_a_stricter_test_is_logged(monkeypatch):
    found = {"half": {"reward": 0.5}, "all": {"reward": 1.0, "exact": 0.0}}
    monkeypatch.setitem(verify.VERIFIERS, "number", lambda text, answer: found[text])
    got = scored(["half", "all"])
    assert got.parts["reward"] == [0.5, 1.0] and got.parts["correct"] == [0, 1] and got.parts["exact"] == [0, 0]


def test_a_verifier_that_fails_costs_its_own_answer(monkeypatch):
    def picky(text, answer):
        return {"reward": {"7": 1.0, "8": 0.0}[text]}

    monkeypatch.setitem(verify.VERIFIERS, "number", picky)
    got = scored(["7", "what", "8"], max_reward_errors=0.5)
    assert got.valid[:, 0].tolist() == [True, False, True] and got.parts["reward_errors"] == [0, 1, 0]
    assert got.unit_ids[1].sum() == 0 and got.parts["correct"] == [1, 0, 0]


@pytest.mark.parametrize("method", ["grpo", "focal_dapo", "ppo", "gspo"])
def test_a_step_on_problems_trains_and_logs_what_was_right(sft, tmp_path, method):
    last = run(tmp_path / "run", f"--method {method} --init {sft} --steps 1 --lr 1e-3")
    (row,) = lines(tmp_path / "run")
    assert 0 < row["correct"] < 1 and row["grad_norm"] > 0 and row["reward"] == pytest.approx(row["correct"])
    assert set(last) == {"correct", "exact", "invalid", "length", "finished"}
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
