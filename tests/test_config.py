"""config.py: one place reads the settings, and every bad one ends in one line that names it."""

import ast
import dataclasses
import itertools
import os
import re
import subprocess
import sys

import pytest
import yaml

import config
import data
import model
from config import Config, dump, parse, parser

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FIELDS = {f.name: f for f in dataclasses.fields(Config)}


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """Every test runs in an empty folder and must neither load data or a model nor leave a file behind."""

    def touched(*args, **kwargs):
        raise AssertionError("something was loaded although the settings are bad")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "load", touched)
    monkeypatch.setattr(model, "load", touched)
    monkeypatch.setattr(model, "load_tokenizer", touched)


def refused(capsys, argv: list[str], world_size: int = 1) -> str:
    """The one line on stderr of settings that must end with exit code 2; nothing may be written."""
    import train

    before = {name: os.path.getmtime(name) for name in os.listdir()}
    with pytest.raises(SystemExit) as stop:
        train.main(parse(argv, world_size))
    assert stop.value.code == 2
    out = capsys.readouterr()
    assert out.out == "" and out.err.count("\n") == 1 and out.err.endswith("\n"), out
    assert "Traceback" not in out.err
    assert {name: os.path.getmtime(name) for name in os.listdir()} == before
    return out.err


def save(text: str | bytes, name: str = "a.yaml") -> str:
    with open(name, "wb") as f:
        f.write(text if isinstance(text, bytes) else text.encode())
    return name


def test_every_field_has_a_docstring_a_group_and_a_line_in_help(capsys):
    """A setting that nobody can find does not exist: the docstring of the field is its help text."""
    source = ast.parse(open(config.__file__, encoding="utf-8").read())
    body = next(n for n in source.body if isinstance(n, ast.ClassDef) and n.name == "Config").body
    for field, doc in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign):
            text = doc.value.value if isinstance(doc, ast.Expr) else ""
            assert len(text.split()) > 2, f"{field.target.id} has no docstring"
    with pytest.raises(SystemExit) as stop:
        parse(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    groups = {g.title: [a for a in g._group_actions if a.dest in FIELDS] for g in parser()._action_groups}
    grouped = {a.dest: title for title, actions in groups.items() for a in actions}
    assert grouped.keys() == FIELDS.keys() and not {"options", "positional arguments"} & set(grouped.values())
    assert len(set(grouped.values())) > 4
    for title, actions in groups.items():
        assert not actions or f"\n{title}:\n" in shown
        for action in actions:
            assert re.search(rf"^  --{action.dest}\b", shown, re.M), action.dest
            assert len(action.help.split()) > 2 and "%(methods)" not in action.help
    assert "fgrpo" in shown and "token_mean" in shown  # the lists come from losses.py
    assert "default" in shown


def test_a_yaml_file_and_the_same_flags_give_the_same_settings():
    """A file is a list of flags: same names, types and errors, whatever YAML makes of the values."""
    path = save("""
method: grpo
steps: 7
show_pool: false
resume: no          # YAML 1.1 reads false
kl_ratio: true
lr: 1e-3            # YAML 1.1 reads a string
clip_low: 0.1
beta: 1
tags: ["<A>", "</A>", "<B>", "</B>"]
eval_k: [2, 4]
best_metric: ndcg@4
prefix: "<A>\\nfirst: "
init: ""
""")
    flags = ["--method", "grpo", "--steps=7", "--show_pool", "false", "--kl_ratio", "--lr", "0.001", "--clip_low", ".1"]
    flags += ["--beta", "1.0", "--tags", "<A>", "</A>", "<B>", "</B>", "--eval_k", "2", "4", "--best_metric", "ndcg@4"]
    flags += ["--prefix", "<A>\nfirst: ", "--init="]
    ours, theirs = parse(["--config", path]), parse(flags)
    assert dataclasses.replace(ours, config="") == theirs
    for name, field in FIELDS.items():
        kind = list if "list" in str(field.type) else field.type
        assert type(getattr(ours, name)) is kind, name
    assert parse(["--config", save("eval_k: [5]", "one.yaml")]).eval_k == [5]
    assert parse(["--config", save("eval_k: 5", "plain.yaml")]).eval_k == [5]
    assert dataclasses.replace(parse(["--config", save("", "empty.yaml")]), config="") == Config(
        run_dir="runs/fgrpo", best_metric="ndcg@5"
    )


def test_the_command_line_wins_over_the_file_and_the_file_over_the_default():
    path = save("steps: 7\nmu: 3\n")
    cfg = parse(["--mu", "2", "--config", path])
    assert (cfg.steps, cfg.mu, cfg.group_size) == (7, 2, Config().group_size)
    assert parse(["--config", path, "--steps", "100"]).steps == 100  # the default's value, but said


def test_the_dumped_settings_parse_to_the_same_settings():
    """config.yaml of a run folder is the documentation of the experiment: nothing may change on the way back."""
    flags = "--method grpo --lr 3.3e-7 --eval_k 3 --best_metric mrr --show_pool false --tags [a b] {c d} --init no"
    odd = parse([*flags.split(), "--run_dir", "007", "--prefix", " é: [1]\n# x"])
    for n, cfg in enumerate([parse([]), odd]):
        again = parse(["--config", save(dump(cfg), f"{n}.yaml")])
        assert dataclasses.replace(again, config="") == cfg
        assert list(yaml.safe_load(dump(cfg))) == list(FIELDS)


def test_the_gamma_of_the_returns_may_be_infinite_everywhere():
    assert parse([]).returns_gamma == float("inf") == parse(["--returns_gamma", "inf"]).returns_gamma
    assert parse(["--returns_gamma", "2"]).returns_gamma == 2.0
    assert parse(["--config", save("returns_gamma: .inf"), "--returns", "log"]).returns_gamma == float("inf")
    assert parse(["--config", save("returns_gamma: 3", "three.yaml"), "--returns_gamma", "inf"]).returns_gamma == float(
        "inf"
    )


def test_the_form_of_an_answer_follows_from_data_and_method():
    """Said, it is what was said; else lists for data of lists and for methods that reward ranks."""

    def form(text: str) -> str:
        return config.answer_of(parse(text.split(), training=False))

    assert form("") == form("--method sft") == form("--method grpo --data movielens") == "phases"
    assert form("--data requests") == form("--method rank_grpo") == form("--method grpo --answer list") == "list"
    assert form("--method rank_grpo --answer phases") == "phases"
    three = parse("--phases plan slate rank --tags a b c d e f".split())
    assert three.phases == ["plan", "slate", "rank"] and len(three.tags) == 6
    parse("--method grpo --answer list --rank_size 5 --slate_size 3".split())  # a list has no ranking to fit in


def test_every_file_under_configs_parses():
    for name in sorted(os.listdir(os.path.join(ROOT, "configs"))):
        if name.endswith(".yaml"):
            parse(["--config", os.path.join(ROOT, "configs", name)])


BAD_FLAGS = {  # what is wrong -> flags, words of the message
    "misspelt": ("--learning_rat 1", "--learning_rat nearest"),
    "misspelt near": ("--grup_size 4", "--grup_size 'group_size'"),
    "misspelt with =": ("--kl_rato=1", "--kl_rato=1 'kl_ratio'"),
    "abbreviated": ("--group 4", "--group 'group_size'"),
    "dashes": ("--group-size 4", "--group-size 'group_size'"),
    "a word too many": ("steps", "'steps'"),
    "a float for an int": ("--steps 1.5", "--steps 1.5"),
    "a word for a float": ("--lr fast", "--lr fast"),
    "a word for a bool": ("--show_pool maybe", "--show_pool maybe"),
    "a word in a list": ("--eval_k 1 two", "--eval_k two"),
    "no value": ("--steps", "--steps"),
    "a bad choice": ("--method fgrp", "--method 'fgrp' nearest 'fgrpo'"),
    "a bad aggregate": ("--aggregate tokenmean", "--aggregate 'token_mean'"),
    "a bad split": ("--split dev", "--split train, valid, test"),
    "one sample": ("--group_size 1", "--group_size fgrpo 2"),
    "one sample, leave-one-out": ("--method rloo --group_size 1", "--group_size rloo"),
    "nucleus while sampling": ("--top_p 0.9", "--top_p 1"),
    "nucleus of nothing": ("--top_p 0", "--top_p"),
    "nucleus above 1": ("--top_p 1.1", "--top_p"),
    "greedy sampling": ("--temperature 0", "--temperature 1"),
    "negative temperature": ("--temperature -1", "--temperature"),
    "zero steps": ("--steps 0", "--steps 1"),
    "negative seed": ("--seed -1", "--seed 0"),
    "infinite": ("--lr inf", "--lr"),
    "beta2 of 1": ("--adam_beta2 1", "--adam_beta2"),
    "three tags": ("--tags a b c", "--tags different"),
    "equal tags": ("--tags a b c a", "--tags different"),
    "tag in tag": ("--tags <A> </A> <A>x y", "--tags contain"),
    "rank over slate": ("--slate_size 4 --rank_size 5", "--rank_size --slate_size 4 5"),
    "slate over pool": ("--slate_size 30 --pool_size 20", "--slate_size --pool_size"),
    "index without a pool": ("--item_form index --show_pool false", "--item_form --show_pool"),
    "gold over circle": ("--world_gold 10 --world_items 10", "--world_gold --world_items"),
    "noise over 1": ("--world_noise 1.5", "--world_noise"),
    "clip of 1": ("--clip_low 1", "--clip_low"),
    "negative clip": ("--clip_high -0.2", "--clip_high"),
    "causal without phases": ("--method grpo --credit causal", "--credit grpo"),
    "focal weight without samples": ("--method sft --focal_gamma 1", "--focal_gamma sft"),
    "running success without a focal weight": ("--focal_ema 0.9", "--focal_ema --focal_gamma"),
    "filter without groups": ("--method ppo --keep_samples 2", "--keep_samples ppo"),
    "more kept than sampled": ("--method grpo --keep_samples 9", "--keep_samples --group_size 8"),
    "one kept": ("--method grpo --keep_by_difficulty 1 4", "--keep_by_difficulty"),
    "a column that is none": ("--method gfpo --keep_by lenght", "--keep_by 'length'"),
    "a column of the other form": ("--method gfpo --keep_by=-hits", "--keep_by '-hits'"),
    "refill of demonstrations": ("--method sft --refill 2", "--refill sft"),
    "dual clip without a clip": ("--method cispo --dual_clip 3", "--dual_clip cispo"),
    "dual clip inside the clip": ("--method grpo --dual_clip 1.1", "--dual_clip 1.2"),
    "clip of a cap": ("--method cispo --clip_high 0.3", "--cispo_cap"),
    "cap of a clip": ("--method grpo --cispo_cap 3", "--cispo_cap --clip_high"),
    "cap of units": ("--method cispo --ratio sequence", "--ratio cispo"),
    "weights without truncation": ("--method rloo --tis 2", "--tis rloo"),
    "bonus without samples": ("--method sft --entropy 0.1", "--entropy sft"),
    "fuse without samples": ("--method dpo --kl_fuse 0.1", "--kl_fuse dpo"),
    "diagnosis without phases": ("--method grpo --diagnose_every 5", "--diagnose_every grpo"),
    "weights of one unit": ("--method grpo --weights 1 0", "--weights grpo"),
    "too many weights": ("--weights 1 0 1", "--weights 2"),
    "schedule without phases": ("--method grpo --lam_schedule cosine", "--lam_schedule"),
    "scale without groups": ("--method ppo --scale std", "--scale ppo"),
    "length of demonstrations": ("--method sft --overlong 0.2", "--overlong sft"),
    "popularity of lists": ("--data requests --method rank_grpo --tail_quota 0.5", "--tail_quota"),
    "consensus of phases": ("--consensus 1", "--consensus"),
    "a plan with causal credit": ("--phases plan slate rank --tags a b c d e f --credit causal", "--credit own"),
    "epochs of pairs": ("--method dpo --mu 2", "--mu dpo"),
    "pairs without a reference": ("--method dpo --beta 0", "--beta dpo"),
    "pairs out of few samples": ("--method s_dpo --pair_source model --group_size 3", "--group_size --bad_answers"),
    "kl of demonstrations": ("--method sft --beta 0.1", "--beta sft"),
    "k3 in a reward": ("--beta 0.1 --kl_in reward", "--kl k1"),
    "ranker of lists": ("--data requests --method sft --ranker x", "--ranker"),
    "metric not there": ("--best_metric ndcg@7", "--best_metric 'ndcg@7' nearest"),
    "cutoff of 0": ("--eval_k 0", "--eval_k"),
    "width": ("--width 33", "--width 32"),
    "attention": ("--attention flash", "--attention 'flash' nearest 'flash_attention_2'"),
    "chain with a pool": ("--demo_order chain", "--demo_order pool"),
    "chain of questions": ("--data hotpotqa --show_pool false --demo_order chain", "--demo_order pool"),
    "positions for instruct": ("--rank_form position --template instruct", "--rank_form terse"),
    "no such phase": ("--phases slate think rank --tags a b c d e f", "--phases 'think'"),
    "ranking before slate": ("--phases rank slate", "--phases one rank"),
    "two slates": ("--phases slate slate rank --tags a b c d e f", "--phases one slate"),
    "tags of two for three": ("--phases plan slate rank", "--tags 6 plan"),
    "lists with tags": ("--method grpo --data requests --answer phases", "--answer requests"),
    "phases on a list": ("--data requests", "--method fgrpo phases"),
    "phases on a list, said": ("--answer list", "--method fgrpo phases"),
    "ranks on phases": ("--method rank_grpo --answer phases --best_metric mrr", "--method rank_grpo --answer"),
    "slate metric of a list": (
        "--method grpo --answer list --best_metric slate_recall",
        "--best_metric 'slate_recall'",
    ),
    "index of requests": ("--method grpo --data requests --item_form index", "--item_form requests"),
    "named over items": ("--requests_named 5 --requests_items 6", "--requests_named --requests_items"),
    "disagreement over 1": ("--requests_disagreement 1.1", "--requests_disagreement"),
    "quota of all": ("--tail_quota 1", "--tail_quota"),
    "gamma below 1": ("--returns_gamma 0.5", "--returns_gamma 1"),
    "minus infinity": ("--returns_gamma=-inf", "--returns_gamma"),
    "infinite consensus": ("--consensus inf", "--consensus"),
    "overlong over 1": ("--overlong 1.5", "--overlong"),
    "file not there": ("--config nowhere.yaml", "nowhere.yaml No such file"),
    "folder as file": ("--config .", "config ."),
    "nothing to resume": ("--resume --run_dir nowhere", "--resume nowhere"),
}


@pytest.mark.parametrize("what", BAD_FLAGS)
def test_a_bad_flag_ends_in_one_line_that_names_it(what, capsys):
    flags, words = BAD_FLAGS[what]
    message = refused(capsys, flags.split())
    for word in words.split():
        assert word in message, (word, message)


@pytest.mark.parametrize("key", [n for n, f in FIELDS.items() if f.type is float])
def test_no_number_may_be_nan(key, capsys):
    """nan compares false with everything, so it slips through a check written the wrong way round."""
    assert f"--{key}" in refused(capsys, [f"--{key}", "nan"])


BAD_FILES = {
    "misspelt": ("grup_size: 4", "'grup_size' 'group_size'"),
    "wrong type": ("steps: many", "--steps many"),
    "float for an int": ("steps: 1.5", "--steps 1.5"),
    "twice": ("lr: 1\nsteps: 2\nlr: 2", "'lr' twice"),
    "nested": ("lr:\n  peak: 1", "'lr' plain value"),
    "list of lists": ("eval_k: [[1], [2]]", "'eval_k' plain value"),
    "null": ("init:", "'init' plain value"),
    "a list for a number": ("steps: [1, 2]", "'steps' plain value"),
    "empty list": ("eval_k: []", "--eval_k"),
    "a list": ("- 1\n- 2", "key: value"),
    "a word": ("steps", "key: value"),
    "number as key": ("1: 2", "'1'"),
    "not YAML": ("steps: [1, 2", "line"),
    "Python object": ("steps: !!python/object/apply:os.getcwd []", "python"),
    "tabs": ("steps:\t1\n\tmu: 2", "line"),
    "Latin-1": ("prefix: café".encode("latin-1"), "utf-8"),
    "binary": (b"\x00\x01\x02", "config"),
    "bad choice": ("method: pppo", "--method 'pppo'"),
    "bad value": ("group_size: 1", "--group_size 2"),
    "tags": ("tags: [a, b, c]", "--tags different"),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_a_bad_file_ends_in_one_line_that_names_the_key(what, capsys):
    text, words = BAD_FILES[what]
    message = refused(capsys, ["--config", save(text)])
    for word in words.split():
        assert word in message, (word, message)


@pytest.mark.parametrize("text", ["grup_size: 4", "lr:\n  peak: 1", "steps: many", "lr: 1\nlr: 2"])
def test_a_message_about_a_file_names_the_file(text, capsys):
    assert "mine.yaml" in refused(capsys, ["--config", save(text, "mine.yaml")])


def test_a_batch_that_the_ranks_cannot_share_is_refused(capsys):
    message = refused(capsys, ["--batch_size", "16"], world_size=3)
    assert "--batch_size 16" in message and "3 ranks" in message and "15" in message
    assert parse(["--batch_size", "15"], world_size=3).batch_size == 15
    assert "use 4" in refused(capsys, ["--batch_size", "3"], world_size=4)


def test_an_evaluation_may_ask_for_what_a_training_run_may_not(capsys):
    """Truncated sampling, other cutoffs: eval.py trains nothing. What no command can do is refused there too."""
    flags = "--top_p 0.9 --eval_k 10 --group_size 1 --batch_size 5 --temperature 0".split()
    cfg = parse(flags, world_size=2, training=False)
    assert (cfg.top_p, cfg.eval_k, cfg.group_size) == (0.9, [10], 1)
    refused(capsys, flags, world_size=2)
    for bad in ("--top_p 2", "--tags a b c", "--split dev", "--lr nan", "--slate_size 4 --rank_size 5"):
        with pytest.raises(SystemExit) as stop:
            parse(bad.split(), training=False)
        assert stop.value.code == 2 and bad.split()[0] in capsys.readouterr().err


def test_an_evaluation_of_a_run_reads_the_settings_of_the_run():
    """Without --config; a flag that is said wins. A training run that starts from a run has settings of its own."""
    os.makedirs("run/checkpoints")
    save(dump(parse("--method sft --history 3 --layers 1 --run_dir run --init before".split())), "run/config.yaml")
    cfg = parse("--init run --layers 4".split(), training=False)
    assert (cfg.method, cfg.history, cfg.layers, cfg.init, cfg.run_dir) == ("sft", 3, 4, "run", "run")
    assert parse("--init run".split()).history == Config().history
    path = save("history: 7")
    assert parse(["--init", "run", "--config", path], training=False).history == 7
    assert parse("--init elsewhere".split(), training=False).history == Config().history


def test_methods_without_samples_are_not_bound_by_sampling_rules():
    """SFT compares nothing and samples nothing, so one sample and a nucleus are no error there (F03)."""
    parse(["--method", "sft", "--group_size", "1", "--top_p", "0.5", "--temperature", "0"])


def test_every_evaluated_metric_may_choose_the_best_checkpoint():
    import eval as evaluation

    names = evaluation.ranking_metrics(["a"], {"a": 1.0}, Config().eval_k)
    for name in [*names, "slate_recall", "slate_precision"]:
        assert parse(["--best_metric", name]).best_metric == name


def test_the_real_command_names_a_misspelt_key_and_writes_nothing(tmp_path):
    """The way a user meets it: before torch has loaded a model, in one line, without a traceback."""
    command = [sys.executable, os.path.join(ROOT, "train.py"), "--config", os.path.join(ROOT, "configs", "demo.yaml")]
    command += "--method fgrpo --no_such_key 1".split()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r"train\.py: unknown key '--no_such_key'; the nearest is '\w+' .*\n", done.stderr)
    assert os.listdir(tmp_path) == []
