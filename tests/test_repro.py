"""repro.py: arms are run once, go on where they were stopped, and are never mixed up with arms made otherwise.

Most tests run the commands of the arms in this process instead of a new one each; one test runs the real ones.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from test_train import ROOT, TINY, contents, lines, on_cpu  # noqa: F401

import eval as evaluation
import repro
import simulate
import train
from config import dump, parse
from repro import Arm, Entry, comparison

COLUMNS = ["recall@1", "recall@5", "ndcg@3", "slate_recall", "invalid"]
SFT = "--method sft --steps 50 --lr 1e-2 --schedule linear --batch_size 16".split()
FROM_SFT = ["rloo", "grpo", "dr_grpo", "fgrpo"]
ARMS = [
    Arm("popularity", [], baseline="popularity"),
    *(Arm(m, ["--method", m], "sft") for m in FROM_SFT),  # before what they start from, on purpose
    Arm("fgrpo-causal", "--method fgrpo --credit causal".split(), "sft"),
    Arm("sft", SFT),
]


def entry_in(folder, arms=ARMS, report=None, **fields) -> Entry:
    """An entry whose configuration is a file of its own: runs of two steps, a checkpoint after each."""
    path = os.path.join(folder, "tiny.yaml")
    cfg = parse([*TINY, *"--eval_k 1 3 5 --best_metric ndcg@3 --lr 1e-3 --steps 2 --save_every 1 --keep 9".split()])
    if not os.path.exists(path):
        with open(path, "w") as f:
            f.write(dump(cfg))
    report = report or comparison(COLUMNS, [("fgrpo", "sft"), ("fgrpo-causal", "dr_grpo"), ("fgrpo", "popularity")])
    return Entry("a tiny comparison", path, arms, report, **fields)


@pytest.fixture(autouse=True)
def at_root(monkeypatch, tmp_path):
    """The commands name files of the repository; runs and results go elsewhere."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(repro, "RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(repro, "RESULTS", str(tmp_path / "results"))


def here(patch) -> list[list[str]]:
    """Let repro.py run its commands in this process; returns the list that the commands are added to."""
    ran: list[list[str]] = []

    def run(command, stdout, stderr):
        ran.append(command[1:])
        work = {"train.py": lambda a: train.main(parse(a)), "eval.py": evaluation.main}[command[1]]
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            try:
                work(command[2:])
            except SystemExit as stop:
                return SimpleNamespace(returncode=stop.code)
        return SimpleNamespace(returncode=0)

    patch.setattr(repro, "spawn", run)
    patch.setattr(train, "Signals", lambda: SimpleNamespace(asked=False, restore=lambda: None))  # for main threads only
    return ran


@pytest.fixture
def ran(monkeypatch):
    return here(monkeypatch)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A whole entry, run once: its folder and the commands that were run."""
    root = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(repro, "RUNS", str(root / "runs"))
        patch.setattr(repro, "RESULTS", str(root / "results"))
        ran = here(patch)
        repro.run(entry_in(root, seeds=[0, 1]), "tiny", 1)
    return root, ran


@pytest.fixture
def copy(made, tmp_path):
    """The folder of that entry, copied into tmp_path. Its entry is the same one: commands name the folder in RUNS."""
    shutil.copytree(made[0], tmp_path, symlinks=True, dirs_exist_ok=True)
    for top, _, names in os.walk(tmp_path / "runs"):
        for path in (os.path.join(top, n) for n in names if n.endswith((".recipe", ".yaml", ".json"))):
            with open(path) as f:
                text = f.read()
            with open(path, "w") as f:
                f.write(text.replace(str(made[0]), str(tmp_path)))
    return entry_in(tmp_path, seeds=[0, 1])


def stopped(entry, name="tiny", jobs=1) -> str:
    """The message of a run that ends before its report."""
    with pytest.raises(SystemExit) as stop:
        repro.run(entry, name, jobs)
    assert isinstance(stop.value.code, str)  # printed on stderr; the exit code is 1
    return stop.value.code


def cells(text: str, first: str) -> list[str]:
    """Cells of the line of a table that begins with `first`."""
    (line,) = [line for line in text.split("\n") if line.startswith(f"| {first} |")]
    return [c.strip() for c in line.strip("|").split("|")][1:]


# ---------------------------------------------------------------------------------------------------------------------
# A whole entry


def test_every_method_is_trained_and_evaluated_for_every_seed(made):
    """Each arm leaves log, checkpoint and evaluation; an arm starts from the weights of the one that it is after."""
    root, ran = made
    assert len(ran) == 2 * (2 * len(ARMS) - 1)
    assert [c[0] for c in ran if "--baseline" in c] == ["eval.py"] * 2
    for seed in (0, 1):
        for arm in ARMS:
            run = root / "runs" / "tiny" / f"{arm.name}-{seed}"
            rows = lines(run, f"eval_test{'_popularity' * bool(arm.baseline)}.jsonl")
            assert len(rows) == 8 and (root / "runs" / "tiny" / f"{arm.name}-{seed}.recipe").exists()
            if arm.baseline:
                assert not (run / "log.jsonl").exists()
                continue
            log, cfg = lines(run), parse(["--config", str(run / "config.yaml")])
            assert [row["step"] for row in log] == list(range(1, 51 if arm.name == "sft" else 3))
            assert cfg.seed == seed and cfg.method == arm.name.split("-")[0]
            assert cfg.credit == ("causal" if arm.name == "fgrpo-causal" else "own")
            assert cfg.init == (str(root / "runs" / "tiny" / f"sft-{seed}") if arm.after else "")
            saved = json.load(open(run / "eval_test.json"))
            assert f"init: {run}\n" in saved["config"] and f"method: {cfg.method}\n" in saved["config"]
    first = {a.name: lines(root / "runs" / "tiny" / f"{a.name}-0")[0]["slate_recall"] for a in ARMS if a.after}
    assert len(set(first.values())) == 1 and first["grpo"] > 0  # the same weights, the same samples


def test_the_report_holds_means_over_seeds_and_intervals_of_paired_differences(made):
    root, _ = made
    text = (root / "results" / "tiny.md").read_text()
    assert text.startswith("# a tiny comparison\n") and "seeds [0, 1]" in text
    score = {
        arm.name: [
            evaluation.means(lines(root / "runs" / "tiny" / f"{arm.name}-{s}", "eval_test.jsonl")) for s in (0, 1)
        ]
        for arm in ARMS
        if not arm.baseline
    }
    for name, (a, b) in score.items():
        expected = [f"{np.mean([a[c], b[c]]):.3f} +- {abs(a[c] - b[c]) / 2**0.5:.3f}" for c in COLUMNS]
        assert cells(text, name) == expected
    assert cells(text, "popularity")[-1] == cells(text, "fgrpo - popularity")[-1] == "-"  # it has no form to break
    assert "-" not in cells(text, "popularity")[:-1] and "nan" not in text
    for ours, theirs in (("fgrpo", "sft"), ("fgrpo-causal", "dr_grpo")):
        for cell, c in zip(cells(text, f"{ours} - {theirs}"), COLUMNS):
            d = [x[c] - y[c] for x, y in zip(score[ours], score[theirs])]
            mean, half = sum(d) / 2, 12.706 * abs(d[0] - d[1]) / 2  # sd / sqrt(2) of two numbers is half their distance
            shown = [float(x) for x in cell.replace("[", "").replace("]", "").replace(",", "").split()]
            assert shown == pytest.approx([mean, mean - half, mean + half], abs=6e-4)
    assert any("+0.000 [+0.000, +0.000]" != c for c in cells(text, "fgrpo - sft"))


def test_figures_are_drawn_where_matplotlib_is_installed(made):
    pytest.importorskip("matplotlib", reason="pip install -r requirements-plots.txt")
    assert sorted(os.listdir(made[0] / "results")) == ["tiny.md", "tiny_curves.png", "tiny_recall.png"]


def test_a_second_run_runs_nothing_and_makes_the_report_again(copy, ran, tmp_path, capsys):
    before, report = contents(tmp_path / "runs"), tmp_path / "results" / "tiny.md"
    text = report.read_text()
    report.unlink()
    repro.run(copy, "tiny", 2)
    assert ran == [] and contents(tmp_path / "runs") == before
    assert "14 of 14 arms are there already" in capsys.readouterr().out
    assert report.read_text().split("| arm |")[1] == text.split("| arm |")[1]


def test_one_seed_is_compared_over_examples(copy, ran, tmp_path):
    """No spread over seeds: the interval is that of eval.py, a paired bootstrap."""
    repro.run(replace(copy, seeds=[1]), "tiny", 1)
    text, runs = (tmp_path / "results" / "tiny.md").read_text(), tmp_path / "runs" / "tiny"
    ours, theirs = (lines(runs / f"{n}-1", "eval_test.jsonl") for n in ("fgrpo", "sft"))
    d = evaluation.compare(ours, theirs, COLUMNS)
    assert cells(text, "fgrpo") == [f"{d[c]['value']:.3f}" for c in COLUMNS]
    assert cells(text, "fgrpo - sft") == [
        f"{x['difference']:+.3f} [{x['difference_lo']:+.3f}, {x['difference_hi']:+.3f}]" for x in d.values()
    ]
    assert ran == [] and "+-" not in text


# ---------------------------------------------------------------------------------------------------------------------
# Stopped and changed arms


def test_a_killed_arm_goes_on_from_its_checkpoint(copy, ran, tmp_path):
    """The machine died in step 2: the log is short, the last checkpoint and the evaluation are not there."""
    run = tmp_path / "runs" / "tiny" / "fgrpo-1"
    whole = lines(run)
    (run / "eval_test.json").unlink()
    os.remove(run / "checkpoints" / "best")
    shutil.rmtree(run / "checkpoints" / "step-000002")
    log = (run / "log.jsonl").read_text().split("\n")
    (run / "log.jsonl").write_text(f"{log[0]}\n{log[1][:20]}")
    assert not repro.done(copy, "tiny", *[a for a in ARMS if a.name == "fgrpo"], 1)
    repro.run(copy, "tiny", 1)
    assert ran == [["train.py", "--run_dir", str(run), "--resume"], ["eval.py", "--init", str(run)]]
    assert lines(run) == whole


def test_an_arm_without_a_checkpoint_is_begun_again(copy, ran, tmp_path):
    """There is nothing to go on from; train.py alone would refuse the folder."""
    run = tmp_path / "runs" / "tiny" / "grpo-0"
    whole = lines(run)
    (run / "eval_test.json").unlink()
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints" / ".step-000001").mkdir(parents=True)
    repro.run(copy, "tiny", 1)
    assert [c[0] for c in ran] == ["train.py", "eval.py"] and "--resume" not in ran[0] and lines(run) == whole


@pytest.mark.parametrize("what", ["flags", "configuration", "start"])
def test_arms_made_with_other_settings_are_refused(what, copy, ran, tmp_path):
    """Reused, they would stand in the table under settings that they never had."""
    before = contents(tmp_path / "runs")
    if what == "configuration":
        with open(copy.config, "a") as f:
            f.write("# one more line\n")
    change = {"flags": {"flags": ["--method", "grpo", "--mu", "2"]}, "start": {"after": "rloo"}}.get(what, {})
    arms = [replace(a, **change) if a.name == "grpo" else a for a in copy.arms]
    message = stopped(replace(copy, arms=arms))
    assert "other settings" in message and f"delete {tmp_path / 'runs' / 'tiny'}" in message
    assert "configuration" == what or str(tmp_path / "runs" / "tiny" / "grpo-0") in message
    assert ran == [] and contents(tmp_path / "runs") == before


def test_a_failed_arm_ends_the_run_with_its_last_words_and_may_be_mended(ran, tmp_path):
    """A bad flag: nothing after it runs, and once it is mended the arm is not one made with other settings."""
    arms = [Arm("sft", ["--method", "sft", "--lr", "-1"]), Arm("rl", ["--method", "grpo"], "sft")]
    entry = entry_in(tmp_path, arms, lambda entry, name: None)
    message = stopped(entry)
    assert "--lr -1.0 is too small" in message and "sft-0.txt" in message and "again to go on" in message
    assert [c[0] for c in ran] == ["train.py"]
    entry.arms[0].flags[-1] = "1e-3"
    repro.run(entry, "tiny", 1)
    assert len(ran) == 5 and all(repro.done(entry, "tiny", arm, 0) for arm in entry.arms)


def acting(monkeypatch, act):
    """Let a function of the arm's name stand for its commands."""
    started = []

    def run(command, stdout, stderr):
        folder = command[command.index("--run_dir" if command[1] == "train.py" else "--init") + 1]
        name = os.path.basename(folder)[:-2]
        started.append(name)
        os.makedirs(os.path.join(folder, "checkpoints"), exist_ok=True)
        steps = act(name) or 0
        with open(os.path.join(folder, "log.jsonl"), "w") as f:
            f.write(json.dumps({"step": steps}) + "\n")
        with open(os.path.join(folder, "config.yaml"), "w") as f:
            f.write("steps: 2\n")
        return SimpleNamespace(returncode=0 if steps else 1)

    monkeypatch.setattr(repro, "spawn", run)
    return started


def test_after_a_failure_no_further_arm_is_begun(monkeypatch, tmp_path):
    """b fails while a is still running: c may have taken its place, d must not run."""
    over = threading.Event()
    started = acting(monkeypatch, lambda name: None if name == "b" else 1 + over.wait(1))
    message = stopped(entry_in(tmp_path, [Arm(n, []) for n in "abcd"], lambda *a: None), jobs=2)
    assert "train.py" in message and "b-0" in message and "d" not in started


def test_ctrl_c_waits_for_the_arms_to_save_and_says_how_to_go_on(monkeypatch, tmp_path):
    """The terminal interrupts the arms too: they end their step, save and leave with 0, short of their last step."""
    begun, asked = threading.Event(), threading.Event()

    def interrupted(*args):
        assert begun.wait(10)
        asked.set()
        raise KeyboardInterrupt

    started = acting(monkeypatch, lambda name: begun.set() or (asked.wait(10) and 1))
    monkeypatch.setattr(repro.concurrent.futures, "wait", interrupted)
    entry = entry_in(tmp_path, [Arm("a", []), Arm("b", [], "a")], lambda *a: pytest.fail("a report of half an entry"))
    message = stopped(entry)
    assert "KeyboardInterrupt" in message and "run the same command again" in message
    assert started == ["a"] and not repro.done(entry, "tiny", entry.arms[0], 0)


def test_an_arm_stopped_by_a_signal_is_not_done_and_goes_on(monkeypatch, tmp_path, capsys):
    """The real commands: SIGTERM to train.py, which saves and leaves with 0. The arm is not evaluated; the same command
    again goes on where it was, then evaluates and reports."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    ran, folder = [], tmp_path / "runs" / "tiny" / "sft-0"

    def run(command, stdout, stderr):
        ran.append(command[1:])
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr)
        try:
            log, until = folder / "log.jsonl", time.monotonic() + 60
            while len(ran) == 1 and process.poll() is None and time.monotonic() < until:
                if log.exists() and log.read_text().count("\n") > 2:
                    process.send_signal(signal.SIGTERM)
                    break
                time.sleep(0.02)
            return SimpleNamespace(returncode=process.wait(60))
        finally:
            process.kill()

    monkeypatch.setattr(repro, "spawn", run)
    arm = Arm("sft", "--method sft --lr 1e-3 --steps 150 --save_every 0".split())
    entry = entry_in(tmp_path, [arm], comparison(COLUMNS, []))
    message = stopped(entry)
    done = lines(folder)[-1]["step"]
    assert 2 < done < 150 and "sft seed 0 was stopped before its last step" in message and len(ran) == 1
    assert not (folder / "eval_test.json").exists() and not repro.done(entry, "tiny", arm, 0)
    assert f"sft seed 0 step {done}: loss" in repro.state(entry, "tiny", arm, 0)
    repro.run(entry, "tiny", 1)
    assert ran[1:] == [["train.py", "--run_dir", str(folder), "--resume"], ["eval.py", "--init", str(folder)]]
    assert [row["step"] for row in lines(folder)] == list(range(1, 151)) and repro.done(entry, "tiny", arm, 0)
    assert repro.state(entry, "tiny", arm, 0) == "" and "0 of 1 arms are there already" in capsys.readouterr().out
    text = (tmp_path / "runs" / "tiny" / "sft-0.txt").read_text()
    assert f"stopped after step {done}" in text and "95 % interval" in text
    assert len(cells((tmp_path / "results" / "tiny.md").read_text(), "sft")) == len(COLUMNS)


# ---------------------------------------------------------------------------------------------------------------------
# Reports


def test_intervals_over_seeds_are_those_of_student():
    """Against numbers worked by hand, and the table against the integral of the density of t."""
    got = repro.t_interval(np.array([1.0, 2.0, 3.0]))  # sd 1, 4.303 / sqrt(3)
    assert list(got.values()) == pytest.approx([2, 2 - 2.48434, 2 + 2.48434], abs=1e-5)
    got = repro.t_interval(np.array([0.1, 0.3]))  # sd 0.1 sqrt(2), 12.706 * 0.1
    assert (got["difference_lo"], got["difference_hi"]) == pytest.approx((0.2 - 1.2706, 0.2 + 1.2706))
    assert list(repro.t_interval(np.full(5, 0.5)).values()) == pytest.approx([0.5] * 3)
    assert list(repro.T95) == list(range(2, 11))
    middle = (np.arange(20_000) + 0.5) / 20_000 * 2 - 1  # of strips of [-1, 1]
    for n, t in repro.T95.items():
        inside = ((1 + (t * middle) ** 2 / (n - 1)) ** (-n / 2)).mean() * t
        whole = (
            (np.cos(middle * np.pi / 2) ** (n - 2)).mean() * np.pi / 2 * (n - 1) ** 0.5
        )  # x = sqrt(n - 1) tan(angle)
        assert inside / whole == pytest.approx(0.95, abs=1e-4), n


def test_seeds_with_equal_scores_are_no_obstacle_to_a_figure(tmp_path, monkeypatch):
    """A baseline is the same for every seed; the mean of three equal numbers may differ from them in the last bit."""
    pytest.importorskip("matplotlib", reason="pip install -r requirements-plots.txt")
    os.makedirs(repro.RESULTS)
    entry = entry_in(tmp_path, ARMS[:1], seeds=[0, 1, 2])
    assert np.full((3, 1), 0.1).mean(0) > 0.1
    for value in (0.1, 0.5):
        repro.bars(entry, "tiny", {"popularity": np.full((3, 1), value)}, ["recall@1"])
    assert os.path.exists(tmp_path / "results" / "tiny_recall.png")


def test_the_demo_shows_one_example_of_any_seed(copy, ran, capsys):
    """Slates, rankings and gold in colour, from the run folders of the seed that was asked for."""
    arms = [a for n in ("sft", "dr_grpo", "fgrpo") for a in copy.arms if a.name == n]
    shutil.rmtree(copy.folder("tiny", "fgrpo", 0))
    repro.run(replace(copy, arms=arms, report=repro.demo_report, seeds=[1]), "tiny", 1)
    out = capsys.readouterr().out
    assert ran == [] and "| fgrpo - dr_grpo |" in out and "One test example." in out
    for arm in arms:
        (row, *_) = lines(copy.folder("tiny", arm.name, 1), "eval_test.jsonl")
        assert f"\n{arm.name} (slate recall {row['metrics']['slate_recall']:.2f}" in out
        for line in row["text"].splitlines():
            assert f"{line}" in out
    gold = {"b": 2.0}
    text = repro.coloured("<S>\na\nb\n</S>\n<R>\nb\n</R>", ["<S>", "</S>", "<R>", "</R>"], gold)
    assert "\033[32m  a\033[0m" in text and "\033[1;32m  b   <- gold, utility 2\033[0m" in text
    assert "\033[1;34m  b   <- gold, utility 2\033[0m" in text and "\033[90m</R>\033[0m" in text


# ---------------------------------------------------------------------------------------------------------------------
# The list


@pytest.mark.parametrize("name", repro.ENTRIES)
def test_every_command_of_the_list_is_one_that_its_program_takes(name, capsys):
    """A misspelt flag or a refused combination would show after hours; arms start from arms of their entry."""
    repro.main(["commands", name])
    entry, said = repro.ENTRIES[name], capsys.readouterr().out.splitlines()
    assert len(said) == len(entry.seeds) * sum(1 if a.baseline else 2 for a in entry.arms) + bool(entry.command)
    for command in said:
        python, program, *argv = command.split()
        assert python == "python"
        if program == "simulate.py":
            assert simulate.arguments(argv).seeds == entry.seeds
        else:
            parse(argv, training=program == "train.py")
    arms = [a.name for a in entry.arms]
    assert len(set(arms)) == len(arms) and {a.after for a in entry.arms} <= {"", *arms}
    assert len(entry.seeds) == 1 or len(entry.seeds) in repro.T95


def test_an_entry_whose_files_are_missing_is_left_out_with_a_word(tmp_path, capsys, monkeypatch, ran):
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    repro.run(repro.ENTRIES["movielens"], "movielens", 1)
    out = capsys.readouterr()
    assert "movielens left out: it needs MovieLens" in out.out and "grouplens.org" in out.err
    assert ran == [] and os.listdir(tmp_path) == []


def test_an_entry_of_one_command_runs_it_with_its_seeds_and_says_when_it_stopped(tmp_path, capfd):
    """Its output is seen, and a failure is not passed over; SIGTERM reaches it, so that it can save."""
    script = tmp_path / "own.py"
    script.write_text("import sys\nprint('ran', *sys.argv[1:])\nsys.exit(sys.argv[1] == 'bad')\n")
    own = Entry("its own", command=[str(script), "good"], seeds=[4, 5])
    repro.run(own, "own", 3)
    assert "ran good --seeds 4 5 --jobs 3" in capfd.readouterr().out
    with pytest.raises(SystemExit, match="own stopped; run the same command again to go on"):
        repro.run(replace(own, command=[str(script), "bad"]), "own", 1)
    script.write_text("import time\ntime.sleep(60)\n")
    began = time.monotonic()
    threading.Timer(0.5, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        repro.run(own, "own", 1)
    assert repro.CHILDREN[-1].wait(10) == -signal.SIGTERM and time.monotonic() - began < 20


def test_the_command_line(capsys, monkeypatch):
    repro.main(["list"])
    listed = capsys.readouterr().out
    assert all(name in listed for name in repro.ENTRIES)
    calls = []
    monkeypatch.setattr(repro, "run", lambda entry, name, jobs: calls.append((name, entry.seeds, jobs)))
    repro.main("run demo --jobs 3 --seeds 4 5".split())
    repro.main(["run", "all"])
    assert calls[0] == ("demo", [4, 5], 3)
    assert [c[:2] for c in calls[1:]] == [(n, e.seeds) for n, e in repro.ENTRIES.items()]
    for bad in (
        "run nothing",
        "run demo --jobs 0",
        "run demo --seeds 1 1",
        f"run demo --seeds {' '.join(map(str, range(11)))}",
    ):
        with pytest.raises(SystemExit) as stop:
            repro.main(bad.split())
        assert stop.value.code == 2
    assert len(calls) == 1 + len(repro.ENTRIES)
