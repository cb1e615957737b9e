"""Bad input: reward functions that fail in every way, and data that holds what a prompt or an answer is made of.

Each test injects the fault. Rewards: what fails costs its own row and no other, is counted, and above a share ends the run
(faults F51 F52).
"""

import faulthandler
import glob
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import unicodedata
from dataclasses import replace

import pytest
import torch
from test_data import hotpot, write_hotpot
from test_masks import real, rolled
from test_rewards import GOLD, PIECES, POOL, TOKENIZER, write
from test_sampling import Mock

import data
import eval as evaluation
import model as lm
import rewards
import train
import workers
from config import Config, parse
from data import Example
from rewards import Row, score
from rollout import rollout

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TEXTS = [write(POOL[i : i + 3], [POOL[i + 1]]) for i in range(5)]
BAD = 2  # the row whose reward fails
REAL = {"phases": rewards.score_phases, "list": rewards.score_list}
LIMIT = 0.4  # seconds a worker may take


def children() -> set[str]:
    return {c for path in glob.glob("/proc/self/task/*/children") for c in open(path, encoding="ascii").read().split()}


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("not even the message can be had")


def raises(kind, *args):
    def fault(row):
        raise kind(*args)

    return fault


def changed(**fields):
    """The row with other fields, as an edited scorer might return it."""
    return lambda row: Row(**{**vars(row), **fields})


def die_by(number):
    def fault(row):
        faulthandler.disable()  # pytest's own report of a crash
        os.kill(os.getpid(), number)

    return fault


def forks(row):
    """Twice back from one call: the copy must not go on with the run."""
    os.fork()
    raise ValueError("forked")


def forks_and_hangs(row):
    if not os.fork():
        time.sleep(60)
    raise ValueError("the child goes on")


def closes_everything(row):
    os.closerange(3, 1000)
    time.sleep(60)


FAULTS = {  # name -> what the scorer of one row does, words of the error
    "exception": (raises(ValueError, "no\nverdict"), "ValueError: no verdict"),
    "exception without words": (raises(Mute), "Mute"),
    "recursion": (lambda row: FAULTS["recursion"][0](row), "RecursionError"),
    "exit": (raises(SystemExit, 7), "SystemExit"),
    "forks": (forks, "forked"),
    "None": (lambda row: None, "AttributeError"),
    "text": (changed(reward=["0.5", "1"]), "'0.5', not a number"),
    "infinite": (changed(reward=[float("inf"), 0.0]), "inf"),
    "too few rewards": (changed(reward=[1.0]), "1 rewards for 2 units"),
    "too many rewards": (changed(reward=[1.0] * 3), "3 rewards for 2 units"),
    "no list": (changed(reward=1.0), "not iterable"),
    "too few units": (changed(units=[1, 2]), "2 units for"),
    "unknown unit": (lambda row: Row([*row.units[:-1], 9], row.reward, row.parts, row.answer), "outside 0..2"),
    "text in a column": (lambda row: Row(row.units, row.reward, {**row.parts, "invalid": "no"}, row.answer), "column invalid"),
    "NaN in a column": (lambda row: Row(row.units, row.reward, {**row.parts, "invalid": float("nan")}, row.answer), "is NaN"),
    "answer of one part": (changed(answer=([],)), "unpack"),
}  # fmt: skip
DEADLY = {  # survived with workers only
    "hangs": (lambda row: time.sleep(60), "TimeoutError: no result within 0.4 s"),
    "hangs in native code": (lambda row: re.match("(a+)+$", "a" * 40 + "b"), "TimeoutError"),
    "stops itself": (die_by(signal.SIGSTOP), "TimeoutError"),
    "kills itself": (die_by(signal.SIGKILL), "ended with signal -?9"),
    "segmentation fault": (die_by(signal.SIGSEGV), "ended with signal 11"),
    "exits at once": (lambda row: os._exit(3), "exit code 3"),
    "kills its group": (lambda row: os.killpg(0, signal.SIGKILL), "ended with signal 9"),
    "forks and the child hangs": (forks_and_hangs, "the child goes on"),
    "closes every file": (closes_everything, "TimeoutError"),
    "Ctrl-C": (raises(KeyboardInterrupt), "exit code 1"),
}


def scored(monkeypatch, fault=None, workers=0, unit="phase", **settings) -> rewards.Scored:
    """Five completions, one per request; the scorer of row BAD is followed by the fault."""
    form = "list" if unit == "rank" else "phases"
    texts = [t.replace("<SLATE>\n", "") for t in TEXTS] if unit == "rank" else TEXTS

    def scorer(said, example, *args):
        row = REAL[form](said, example, *args)
        return fault(row) if fault and example.id == f"row-{BAD}" else row

    monkeypatch.setattr(rewards, f"score_{form}", scorer)
    examples = [Example(f"row-{i}", "?", POOL, GOLD) for i in range(len(texts))]
    cfg = Config(reward_workers=workers, reward_timeout=LIMIT, slate_size=4, rank_size=2, **settings)
    return score(rolled(*(TOKENIZER(t)["input_ids"] for t in texts)), examples, PIECES, cfg, unit)


def assert_only_one_row_is_lost(got: rewards.Scored, clean: rewards.Scored):
    others = [b for b in range(len(TEXTS)) if b != BAD]
    assert torch.equal(got.unit_ids[others], clean.unit_ids[others]) and not got.unit_ids[BAD].any()
    assert torch.equal(got.reward[others], clean.reward[others]) and got.reward[BAD].isnan().all()
    assert torch.equal(got.valid[others], clean.valid[others]) and not got.valid[BAD].any() and got.valid.any()
    assert list(got.parts) == list(clean.parts) and got.texts == clean.texts and got.high == clean.high
    for name, column in got.parts.items():
        assert [column[b] for b in others] == [clean.parts[name][b] for b in others]
    assert got.parts["reward_errors"] == got.parts["unscorable"] == [float(b == BAD) for b in range(len(TEXTS))]
    assert got.parts["reward"][BAD] == 0 and got.parts["length"] == clean.parts["length"]
    assert [got.answers[b] for b in others] == [clean.answers[b] for b in others]
    json.dumps([got.parts, got.answers])


@pytest.mark.parametrize("count", (0, 2))
@pytest.mark.parametrize("name", FAULTS)
def test_a_reward_that_fails_costs_its_row_and_no_other(monkeypatch, name, count):
    clean = scored(monkeypatch)
    assert_only_one_row_is_lost(scored(monkeypatch, FAULTS[name][0], count), clean)
    if name == "forks" and not count:
        assert os.wait()[1] == 0  # its copy ended at once, and is nobody's but ours to bury
    assert not children()


@pytest.mark.parametrize("name", DEADLY)
def test_a_reward_that_hangs_or_dies_in_a_worker_costs_its_row_and_no_other(monkeypatch, name):
    clean, began = scored(monkeypatch), time.monotonic()
    assert_only_one_row_is_lost(scored(monkeypatch, DEADLY[name][0], 2), clean)
    assert time.monotonic() - began < LIMIT + 5 and not children()


@pytest.mark.parametrize("count", (0, 2))
@pytest.mark.parametrize("name", [*FAULTS, *DEADLY])
def test_the_first_error_ends_a_run_that_has_too_many_in_one_line(monkeypatch, capsys, name, count):
    fault, words = {**FAULTS, **DEADLY}[name]
    if name in DEADLY and not count:
        pytest.skip("nobody is left to tell")
    with pytest.raises(SystemExit) as end:
        scored(monkeypatch, fault, count, max_reward_errors=0.1)
    if name == "forks" and not count:
        os.wait()
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.count("\n") == 1 and len(err) < 700
    assert (
        "1 or more of 5" in err
        and f"example row-{BAD}" in err
        and "--max_reward_errors 0.1" in err
        and re.search(words, err)
    )
    if name in ("exception", "forks"):
        assert re.search(r"test_badinput\.py:\d+ in (fault|forks)", err)


@pytest.mark.parametrize("value", (None, float("nan")))
def test_a_reward_of_none_or_nan_is_unscorable_and_no_error(monkeypatch, value):
    """F51: in one phase alone, and in both."""
    for reward, valid in (([value, 1.0], [False, True]), ([value, value], [False, False])):
        got = scored(monkeypatch, lambda row, r=reward: Row(row.units, r, row.parts, row.answer))
        assert got.valid.tolist() == [valid if b == BAD else [True, True] for b in range(5)]
        assert got.parts["reward_errors"] == [0.0] * 5 and got.reward[BAD].isnan().tolist() == [not v for v in valid]
    monkeypatch.setitem(rewards.PHASES, "slate", lambda slate, rank, lam: value)  # a row that users edit
    assert scored(monkeypatch).valid.tolist() == [[False, True]] * 5


@pytest.mark.parametrize("unit", ("phase", "sequence", "rank"))
def test_workers_score_as_the_own_process_does(monkeypatch, unit):
    a, b = (scored(monkeypatch, None, n, unit) for n in (0, 3))
    assert torch.equal(a.unit_ids, b.unit_ids) and torch.equal(a.reward, b.reward) and torch.equal(a.valid, b.valid)
    assert (a.parts, a.texts, a.answers, a.high) == (b.parts, b.texts, b.answers, b.high)
    lost = scored(monkeypatch, raises(ValueError), 0, unit)
    assert list(lost.parts) == list(a.parts) and lost.answers[BAD] == ([], [None] * 4 if unit == "rank" else [])


# ---------------------------------------------------------------------------------------------------------------------
# Workers alone


def test_results_come_back_in_order_whichever_job_fails():
    def job(i, big):
        if i % 7 == 3:
            raise KeyError(i)
        if i % 7 == 5:
            os._exit(i)
        return big * i

    out = workers.run(job, [(i, "x" * 100_000) for i in range(21)], 3, 10)
    for i, result in enumerate(out):
        assert isinstance(result, workers.Failure) if i % 7 in (3, 5) else result == "x" * 100_000 * i
    assert out[3].what == "KeyError: 3" and "exit code 5" in out[5].what and "in job" in out[3].where
    assert workers.run(job, [], 3, 10) == [] and not children()


def test_results_need_pickle_and_nothing_else_does():
    lock = threading.Lock()  # cannot be pickled: neither can a function that closes over it
    out = workers.run(lambda i: (lock.locked(), i) if i else lock, [(0,), (1,)], 1, 10)
    assert "pickle" in out[0].what and out[1] == (False, 1)


def test_the_limit_holds_in_any_thread_and_against_alarms_of_the_function():
    """A limit by SIGALRM works in the main thread only, and a verifier with an alarm of its own takes it away."""

    def job(i):
        if i == 1:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            signal.alarm(1000)
            time.sleep(60)
        return i

    out, began = [], time.monotonic()
    threads = [
        threading.Thread(target=lambda: out.append(workers.run(job, [(i,) for i in range(3)], 2, 0.5))) for _ in "ab"
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    assert time.monotonic() - began < 10 and len(out) == 2
    for a, b, c in out:
        assert (a, c) == (0, 2) and "TimeoutError" in b.what


def test_a_broken_function_is_not_waited_for_to_the_end():
    """100 jobs that all hang: stop behind the first few, not after 100 limits."""
    began = time.monotonic()
    out = workers.run(time.sleep, [(60,)] * 100, 2, 0.3, most=3)
    assert time.monotonic() - began < 5 and 4 <= sum(x is not None for x in out) <= 5 and not children()
    assert sum(x is not None for x in workers.run(int, [("x",)] * 9, 0, most=3)) == 4


def test_nothing_outlives_a_killed_parent_and_ctrl_c_reaches_the_parent_alone():
    program = """if True:
        import os, time, workers
        job = lambda i: os.write(1, b"%d\\n" % os.getpid()) and time.sleep(600)
        workers.run(job, [(0,), (1,)], 2, 900)"""
    for number in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
        parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)  # fmt: skip
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        parent.send_signal(number)
        parent.wait(10)
        end = time.monotonic() + 10
        while alive(pids) and time.monotonic() < end:
            time.sleep(0.02)
        assert not alive(pids), number
        parent.stdout.close()


def test_what_a_job_started_ends_with_its_worker():
    """A verifier that runs a program must not leave it behind, whether the job ended, died or took too long."""

    def job(after):
        child = os.fork()
        if not child:
            time.sleep(600)
        os.write(pids, b"%d\n" % child)
        return after()

    read, pids = os.pipe()
    workers.run(job, [(int,), (lambda: os._exit(1),), (lambda: time.sleep(60),)], 2, 0.5)
    started = [int(x) for x in os.read(read, 4096).split()]
    os.close(pids)
    os.close(read)
    end = time.monotonic() + 10
    while alive(started) and time.monotonic() < end:
        time.sleep(0.02)
    assert len(started) == 3 and not alive(started)


def test_a_job_may_use_torch_though_its_threads_do_not_survive_a_fork():
    """Parallel loops of the child would wait for ever for the threads of the parent's pool."""
    torch.set_num_threads(4)
    try:
        x = torch.ones(10**6)
        x.sum()  # starts the pool
        assert workers.run(lambda: float((x + x).sum()), [()], 1, 20) == [2e6]
    finally:
        torch.set_num_threads(1)


def alive(pids: list[int]) -> list[int]:
    """Those that run still: a zombie, which only waits for its parent, does not."""
    out = []
    for pid in pids:
        try:
            state = open(f"/proc/{pid}/stat", encoding="ascii").read().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        out += [pid] * (state != "Z")
    return out


# ---------------------------------------------------------------------------------------------------------------------
# A run


TINY = """--show_pool false --demo_order chain --history 3 --slate_size 4 --rank_size 2 --max_prompt 32 --max_new_tokens 24
--tokenizer line --layers 1 --width 32 --world_clusters 3 --world_items 5 --world_gold 2 --world_examples 64 --ndcg_k 2
--eval_k 1 2 --best_metric ndcg@2 --batch_size 4 --group_size 4 --eval_examples 4 --steps 2 --method fgrpo""".split()


def go(run, *flags: str) -> list[dict]:
    train.main(parse([*TINY, *flags, "--run_dir", str(run)]))
    return [json.loads(line) for line in open(run / "log.jsonl", encoding="utf-8")]


def test_a_run_counts_rewards_that_fail_and_ends_above_a_share(monkeypatch, capsys, tmp_path):
    """Of 16 completions of a step 4 fail (one group hangs in its workers): logged, and the run goes on; then all but 4."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    real, broken = rewards.score_phases, lambda n: n % 4 == 1

    def scorer(said, example, *args):
        if broken(int(example.id.split("-")[1])) and example.id.startswith("train"):
            time.sleep(60)
        row = real(said, example, *args)
        row.reward = [float(sum(b"".join(said)) % 2)] * 2  # an untrained model writes nothing of worth
        return row

    monkeypatch.setattr(rewards, "score_phases", scorer)
    monkeypatch.setattr(train.data, "order", lambda n, seed, step, size: [0, 1, 2, 3])
    rows = go(tmp_path / "a", "--reward_workers", "4", "--reward_timeout", "0.2")
    assert [row["reward_errors"] for row in rows] == [row["unscorable"] for row in rows] == [0.25, 0.25]
    assert all(row["grad_norm"] > 0 and row["skipped"] == 0 for row in rows)
    broken = lambda n: n != 0  # noqa: E731
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        go(tmp_path / "b", "--reward_workers", "4", "--reward_timeout", "0.2")
    last = capsys.readouterr().err.strip().split("\n")[-1]
    assert end.value.code == 2 and "TimeoutError: no result within 0.2 s (example train-1)" in last


# ---------------------------------------------------------------------------------------------------------------------
# Data that holds what a prompt or an answer is made of


def tokenizer_of(name: str):
    """A published tokenizer, or one built from the texts below."""
    return real(name)[0] if "-" in name else lm.build_tokenizer(name, [LIKED.format("Heat (1995)") + "\n"])


LIKED = "Liked:\nAlien (1979)\n{}\nDune (2021)"
TOKENIZERS = ("qwen3-tokenizer", "smollm2-tokenizer", "word", "line", "byte")


def specials(tokenizer, ids: list[int]) -> list[int]:
    """Added tokens among ids; words unknown to a tokenizer built from other texts are no such."""
    return [i for i in ids if i in tokenizer.added_tokens_decoder and i != tokenizer.unk_token_id]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_title_that_spells_a_special_token_ends_no_turn(kind):
    """Every added token, alone, doubled, overlapping, in a prompt: the template's own stay, the title becomes plain text."""
    tokenizer = tokenizer_of(kind)
    benign = data.encode(tokenizer, LIKED.format("Heat (1995)"))
    own, text = specials(tokenizer, benign), LIKED.format("Heat (1995)")
    if tokenizer.chat_template:  # what needs no care is encoded in one piece, as before
        turn = [{"role": "user", "content": text}]
        assert own and benign == tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"]
    names = [t.content for t in tokenizer.added_tokens_decoder.values()]
    titles = [*names, *(f"a{n}{n}b" for n in names), "".join(names), *(n[:-1] + n for n in names), "\ue000" + names[0]]
    for title in titles:
        ids = data.encode(tokenizer, LIKED.format(title))
        assert specials(tokenizer, ids) == own, title
        if kind not in ("word", "line"):  # these know the words of their texts only
            shown = tokenizer.decode(ids)
            assert title in shown and shown == tokenizer.decode(benign).replace("Heat (1995)", title)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_demonstration_trains_one_stop_token_the_last(kind):
    tokenizer, cfg = tokenizer_of(kind), Config()
    for t in tokenizer.added_tokens_decoder.values():
        demo = data.write_demo(cfg, [], [t.content, "Heat (1995)", f"x{t.content}y"], [f"x{t.content}y"])
        ids = data.encode_answer(tokenizer, demo, cfg.tags)
        assert specials(tokenizer, ids) == [tokenizer.eos_token_id] == ids[-1:]
        if kind not in ("word", "line"):
            assert tokenizer.decode(ids[:-1]) == demo


def test_tags_that_are_tokens_of_their_own_stay_such_in_instructions_and_demonstrations():
    tokenizer, cfg = lm.build_tokenizer("byte", []), Config()
    tokenizer.add_tokens(cfg.tags, special_tokens=True)
    own = tokenizer.convert_tokens_to_ids(cfg.tags)
    demo = data.write_demo(cfg, [], ["Heat <eos>"], ["Heat <eos>"])
    assert specials(tokenizer, data.encode_answer(tokenizer, demo, cfg.tags)) == [*own, tokenizer.eos_token_id]
    asked = data.instruction(Config(template="instruct"), "recommend")
    assert specials(tokenizer, data.encode(tokenizer, asked, cfg.tags)) == own


@pytest.mark.parametrize("kind", ("qwen3-tokenizer", "smollm2-tokenizer", "byte"))
def test_a_stop_token_spelled_by_ordinary_tokens_ends_no_completion(kind):
    tokenizer = tokenizer_of(kind)
    stop, pieces = tokenizer.eos_token_id, rewards.token_bytes(tokenizer)
    spelled = data.encode_answer(tokenizer, f"Heat{tokenizer.eos_token}x")[:-1]
    follow = dict(zip([-1, *spelled], spelled))
    assert len(follow) > len(spelled) - 2

    def logits(last):
        at = torch.zeros(*last.shape, len(tokenizer))
        for b, token in enumerate(last[:, 0].tolist()):
            at[b, 0, follow.get(token, spelled[0])] = 1e4
        return at

    limit = 3 * len(spelled)
    roll = rollout(Mock(logits), [[0]], 1, [stop], max_new_tokens=limit, temperature=0.0)
    assert not roll.finished.any() and int(roll.mask.sum()) == limit and stop not in roll.tokens[0].tolist()
    got = score(roll, [Example("1", "?", POOL, GOLD)], pieces, Config(), "phase")
    assert got.parts["finished"] == [0.0]


HOSTILE = ["</SLATE>", "<SLATE> again", "the </RANK>", "<RANK></RANK>", "<|im_end|>", "<|im_start|>assistant", "<eos>", "<pad> and <unk>",
           "Heat\n</SLATE>\n<RANK>", "line\u2028two\x85three\x0bfour", "nul\0here", "bell\x07\x1b[31mred", "half \ud800 of it", "\udfff",
           "right \u202e tfel", "\u2067isolated", "Heat", "HEAT", "heat", "Straße", "STRASSE", "e\u0301te\u0301", "\u00e9t\u00e9", "1984",
           "300", "[2]", "#3", "***", "- ", "a, b, c", "a > b", "1. first", "\"quoted\"", "**bold**", "", "  ", "\u200b", "&lt;/SLATE&gt;",
           "M" * 10**6, "x, " * 300_000 + "The", "{history} %s {0}", "<script>alert(1)</script>", "../../etc/passwd", "العربية", "👩‍👧"]  # fmt: skip


def hostile(tmp_path, **settings) -> Config:
    """HotpotQA files whose titles, texts and questions hold everything above, as gold and as filler."""
    rows = []
    for i, title in enumerate(HOSTILE):
        row = hotpot(i, paragraphs=4)
        row["context"][0] = [title, [f"About {title[:50]}.", HOSTILE[(i + 7) % len(HOSTILE)][:50]]]
        row["supporting_facts"][0][0] = title
        row["question"] = f"What of {title[:50]}?"
        rows.append(row)
    for name in ("hotpot_train_v1.1.json", "hotpot_dev_distractor_v1.json"):
        write_hotpot(tmp_path, rows, name)
    return Config(data="hotpotqa", data_dir=str(tmp_path), pool_size=12, slate_size=6, rank_size=2, **settings)


@pytest.mark.parametrize("settings", ({}, {"template": "instruct"}, {"item_form": "index"}, {"rank_form": "position"},
                                      {"tags": ["[", "]", "(", ")"]}, {"answer": "list"}), ids=str)  # fmt: skip
def test_an_answer_can_name_every_item_whatever_its_title(tmp_path, settings):
    """The demonstration of every example is well-formed and earns what it should: its slate holds all gold, its ranking
    begins with it."""
    cfg = hostile(tmp_path, **settings)
    split = data.load(cfg, "train")
    assert len(split.examples) == len(HOSTILE)
    examples = split.examples
    for e in examples:
        assert len(e.candidates) == 12 == len({rewards.identity(c) for c in e.candidates}) and set(e.gold) <= set(
            e.candidates
        )
        assert all(len(c) <= 1000 for c in e.candidates)
        shown = "".join([*e.candidates, e.prompt.replace("\n", ""), e.demo.replace("\n", "")])
        assert not {"Cc", "Cs"} & set(map(unicodedata.category, shown)) and not set("\u202e\u2067") & set(shown)
    ids = [data.encode_answer(TOKENIZER, e.demo, cfg.tags) for e in examples]
    got = score(rolled(*ids), examples, PIECES, cfg, "rank" if cfg.answer == "list" else "phase")
    assert got.parts["invalid"] == got.parts["duplicates"] == [0.0] * len(examples)
    if cfg.answer != "list":
        assert (got.reward == 1).all() and got.parts["out_of_pool"] == [0.0] * len(examples)
    else:
        assert got.parts["recall"] == [1.0] * len(examples) and got.parts["out_of_catalog"] == [0.0] * len(examples)


def test_a_run_on_hostile_titles_learns_and_evaluates(monkeypatch, tmp_path):
    """Through the whole loop, special tokens and all; a prompt with a passage of a million characters is left out."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    hostile(tmp_path / "files")
    flags = ["--data", "hotpotqa", "--data_dir", str(tmp_path / "files"), "--pool_size", "4", "--slate_size", "2", "--show_pool", "true",
             "--demo_order", "pool", "--tokenizer", "byte", "--max_prompt", "2000", "--max_new_tokens", "400", "--eval_examples", "2"]  # fmt: skip
    rows = go(tmp_path / "sft", *flags, "--method", "sft")
    assert len(rows) == 2 and all(row["grad_norm"] > 0 for row in rows)


POOLS = {
    "empty pool": Example("1", "?", [], {}),
    "item twice in the pool": Example("1", "?", ["Heat", "heat  "], {"Heat": 1.0}),
    "item that is no line of text": Example("1", "?", ["Heat\n(1995)"], {"Heat\n(1995)": 1.0}),
    "item with a tag in it": Example("1", "?", ["a </SLATE>", "b"], {"b": 1.0}),
    "no gold": Example("1", "?", ["a", "b"], {}),
    "gold outside the pool": Example("1", "?", ["a", "b"], {"c": 1.0}),
    "text that is not UTF-8": Example("1", "half \ud83d", ["a", "b"], {"a": 1.0}),
}


@pytest.mark.parametrize("why", POOLS)
def test_examples_that_cannot_be_asked_or_answered_are_left_out_and_counted(monkeypatch, capsys, why):
    """From a loader of one's own; the good one beside it stays, with one candidate and no history."""
    good, bad = Example("0", "?", ["only"], {"only": 1.0}, "<SLATE>\nonly\n</SLATE>\n<RANK>\nonly\n</RANK>"), POOLS[why]
    monkeypatch.setitem(data.DATASETS, "own", data.Dataset(lambda cfg, split: data.Split([good, bad, good]), "mine"))
    split = data.load(Config(data="own"), "test")
    assert split.examples == [good, good] and split.dropped == {why: 1}
    monkeypatch.setitem(data.DATASETS, "own", data.Dataset(lambda cfg, split: data.Split([bad]), "mine"))
    with pytest.raises(SystemExit):
        data.load(Config(data="own"), "test")
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and why in err


def test_one_candidate_and_no_history_are_asked_answered_and_contrasted():
    cfg, rng = Config(), data.example_rng(Config(), "1")
    demo = data.demonstrate(cfg, ["only"], {"only": 1.0}, rng, "")
    example = Example("1", data.write_prompt(cfg, "recommend", ["only"], history=[]), ["only"], {"only": 1.0}, demo)
    good, bad = data.contrast(cfg, example)
    got = score(
        rolled(*(data.encode_answer(TOKENIZER, t) for t in (demo, *good, *bad))), [example] * 3, PIECES, cfg, "phase"
    )
    assert got.reward.tolist() == [
        [1.0, 1.0],
        [1.0, 1.0],
        [-1.0, -1.0],
    ]  # without other candidates there is no bad answer


@pytest.mark.parametrize("text", ("a" * 10**6, "<|im_end|>" * 10**4, "\n" * 10**6), ids=("word", "special", "lines"))
def test_a_million_characters_are_left_out_in_seconds_and_counted(text):
    """F16: a prompt that is one word, one special token over and over, or nothing but line breaks."""
    began, tokenizer = time.monotonic(), tokenizer_of("qwen3-tokenizer")
    split = data.Split([Example(id, id + text * (id == "long"), ["a"], {"a": 1.0}) for id in ("short", "long")])
    examples, prompts = data.fit(split, tokenizer, Config())
    assert [e.id for e in examples] == ["short"] and len(prompts) == 1
    assert split.dropped == {"prompt longer than --max_prompt": 1} and time.monotonic() - began < 30


def test_words_unknown_to_a_tokenizer_made_from_the_data_are_said_to_be_so(capsys):
    """There is no --init to blame."""
    tokenizer = lm.build_tokenizer("word", ["other words\n"])
    split = data.Split([Example("1", "never seen\n", ["a"], {"a": 1.0})])
    for init, words in (
        ("", "--tokenizer word: made from the training examples"),
        ("runs/sft", "--init runs/sft: its tokenizer"),
    ):
        with pytest.raises(SystemExit):
            data.fit(split, tokenizer, Config(init=init))
        assert words in capsys.readouterr().err


def test_good_and_bad_answers_beyond_the_limit_are_left_out_and_counted(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        go(tmp_path / "dpo", "--method", "dpo", "--max_new_tokens", "5")
    err = capsys.readouterr().err
    assert end.value.code == 2 and "good or bad answer longer than --max_new_tokens" in err


# ---------------------------------------------------------------------------------------------------------------------
# Completions


def test_completions_without_a_line_are_lists_of_nothing():
    """The stop token alone, padding sampled as tokens, line breaks, ids that the tokenizer lacks, half a character, nothing."""
    pad, eos, beyond = TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, len(TOKENIZER) + 7
    broken = TOKENIZER("東")["input_ids"][:1]
    rows = [[eos], [pad] * 3, [*TOKENIZER("\n\n \n")["input_ids"], eos], [beyond, 10**6, eos], [*broken, eos], []]
    cfg = Config(slate_size=3)
    for unit, want in (("rank", [[0.0] * 4] * 6), ("sequence", [[0.0]] * 6)):
        got = score(rolled(*rows), [Example("1", "?", POOL, GOLD)] * 6, PIECES, replace(cfg, answer="list"), unit)
        assert got.reward.tolist() == want and got.valid.all() and got.parts["invalid"] == [1.0] * 6
        assert got.parts["reward_errors"] == [0.0] * 6 and all(ranks == [None] * 3 for _, ranks in got.answers)
        assert got.unit_ids.tolist() == rolled(*rows).mask.long().tolist()
    assert got.texts == ["", "", "\n\n \n", "", "\udce6", ""]


def test_further_stop_tokens_of_a_model_are_no_text(monkeypatch):
    """A model may end a turn by another token than its tokenizer's (F12): its name is not part of the answer."""
    monkeypatch.setattr(lm, "stop_ids", lambda model, tokenizer: [tokenizer.eos_token_id, 40, 10**6])
    split = data.Split([Example("1", "a", ["a"], {"a": 1.0})])
    policy = evaluation.open_policy(Config(tokenizer="byte"), split, torch.device("cpu"))
    assert policy.pieces[40] == b"" != policy.pieces[41] and len(policy.pieces) == len(policy.tokenizer)
