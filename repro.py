"""Every table and figure: resumable arms (config x method x seed), then a report under results/.

An arm is a train.py command and the evaluation of what it trained; it is done when its run folder holds the evaluation,
and a stopped one goes on from its checkpoint. One made with other settings than today's is refused, not reused. Independent
arms run side by side, one thread each. ENTRIES at the end is the list. Left out: launching on a cluster (each arm prints its
commands, which torchrun takes as they are).

    python repro.py list
    python repro.py run demo
    python repro.py run world --jobs 2
    python repro.py commands world
"""

import argparse
import concurrent.futures
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

import data
from config import parse, read_yaml
from eval import compare, read_rows
from losses import METHODS
from run import write
from simulate import plots, table

RUNS, RESULTS = "runs", "results"
CHILDREN: list[subprocess.Popen] = []


@dataclass
class Arm:
    """One training run and its evaluation. name: folder under runs/ENTRY; after: the arm whose weights it starts from."""

    name: str
    flags: list[str]
    after: str = ""
    baseline: str = ""  # no training: evaluate random or popularity
    chained: str = ""  # evaluate this arm going on from the slates of that one


@dataclass
class Entry:
    """A table or figure: its configuration, its arms and the report that reads their run folders; or one command that
    does all of it, resumable by itself, and takes --seeds and --jobs."""

    what: str
    config: str = ""
    arms: list[Arm] = field(default_factory=list)
    report: Callable[["Entry", str], None] | None = None
    seeds: list[int] = field(default_factory=lambda: [0])
    needs: str = ""  # files that must lie in $DATA_DIR or data/; skipped with a word where they do not
    command: list[str] = field(default_factory=list)
    score: list[str] = field(
        default_factory=list
    )  # flags of pass@k of the last checkpoints; empty: one answer of the best

    def folder(self, name: str, arm: str, seed: int) -> str:
        return os.path.join(RUNS, name, f"{arm}-{seed}")


def commands(entry: Entry, name: str, arm: Arm, seed: int) -> list[list[str]]:
    """The literal commands of an arm."""
    folder = entry.folder(name, arm.name, seed)
    base = ["--config", entry.config, "--run_dir", folder, "--seed", str(seed)]
    if arm.baseline:
        return [["eval.py", *base, "--baseline", arm.baseline]]
    start = ["--init", entry.folder(name, arm.after, seed)] if arm.after else []
    score = ["eval.py", "--init", folder]
    if entry.score:
        steps = parse([*base, *arm.flags]).steps
        last = os.path.join(folder, "checkpoints", f"step-{steps:06d}")
        score = ["eval.py", *base, "--init", last, *entry.score]
    if arm.chained:
        first = entry.folder(name, arm.chained, seed)
        score = ["eval.py", "--init", first, "--ranker", folder, "--run_dir", folder]
    return [["train.py", *base, *start, *arm.flags], score]


def with_seeds(entry: Entry) -> list[str]:
    """The command of an entry that has one."""
    return [*entry.command, "--seeds", *map(str, entry.seeds)]


def result_of(entry: Entry, folder: str, arm: Arm) -> str:
    name = f"pass_{read_yaml(entry.config)['data']}_test" if entry.score else "eval_test"
    return os.path.join(folder, name + (f"_{arm.baseline}" if arm.baseline else "") + ".json")


def spawn(command: list[str], **kwargs) -> subprocess.Popen:
    """Run a command to its end; CHILDREN are told to stop when this process is."""
    child = subprocess.Popen(command, **kwargs)
    CHILDREN.append(child)
    child.wait()
    return child


def run_arm(entry: Entry, name: str, arm: Arm, seed: int) -> None:
    """Run what is missing of an arm; its output goes to FOLDER.txt. Raises if a command fails or was stopped."""
    folder = entry.folder(name, arm.name, seed)
    if done(entry, name, arm, seed):
        return
    began = time.time()
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    write(f"{folder}.recipe", recipe(entry, name, arm, seed))
    for command in commands(entry, name, arm, seed):
        if command[0] == "train.py":
            checkpoints = os.path.join(folder, "checkpoints")
            if os.path.isdir(checkpoints) and any(n.startswith("step-") for n in os.listdir(checkpoints)):
                command = ["train.py", "--run_dir", folder, "--resume"]
            elif os.path.isdir(folder):
                shutil.rmtree(folder)  # stopped before its first checkpoint: nothing to keep
        with open(f"{folder}.txt", "a", encoding="utf-8") as out:
            code = spawn([sys.executable, *command], stdout=out, stderr=out).returncode
        if code:
            with open(f"{folder}.txt", encoding="utf-8") as f:
                tail = f.read().strip().splitlines()[-5:]
            raise RuntimeError(f"{' '.join(command)} ended with {code}; see {folder}.txt:\n  " + "\n  ".join(tail))
        asked = command[0] == "train.py" and int(read_yaml(os.path.join(folder, "config.yaml"))["steps"])
        if asked and log_of(folder)[-1]["step"] < asked:
            raise RuntimeError(f"{arm.name} seed {seed} was stopped before its last step")
    print(f"  {arm.name} seed {seed}: done in {time.time() - began:.0f} s", flush=True)


def recipe(entry: Entry, name: str, arm: Arm, seed: int) -> str:
    """What an arm was made by: its commands and the text of its configuration."""
    with open(entry.config, encoding="utf-8") as f:
        return "\n".join(" ".join(c) for c in commands(entry, name, arm, seed)) + "\n\n" + f.read()


def done(entry: Entry, name: str, arm: Arm, seed: int) -> bool:
    """Is the arm's evaluation there? Stops if what is there was made with other settings."""
    folder = entry.folder(name, arm.name, seed)
    path = f"{folder}.recipe"
    if os.path.exists(path) and os.path.isdir(folder):  # a start that failed leaves no folder
        with open(path, encoding="utf-8") as f:
            if f.read() != recipe(entry, name, arm, seed):
                sys.exit(f"{folder} was made with other settings (see {path}); delete {RUNS}/{name} to make it again")
    return os.path.exists(result_of(entry, folder, arm))


def state(entry: Entry, name: str, arm: Arm, seed: int) -> str:
    """Where a running arm is, from its log; "" if it has not begun or is done."""
    folder = entry.folder(name, arm.name, seed)
    if (
        arm.baseline
        or os.path.exists(result_of(entry, folder, arm))
        or not os.path.exists(os.path.join(folder, "log.jsonl"))
    ):
        return ""
    last = log_of(folder)[-1:]
    shown = [
        f"{k} {last[0][k]:.2f}" for k in ("loss", "slate_recall", "rank_ndcg", "correct") if last and last[0].get(k)
    ]
    return f"{arm.name} seed {seed} step {last[0]['step']}: {', '.join(shown)}" if last else ""


def run(entry: Entry, name: str, jobs: int) -> None:
    """Run the missing arms of an entry, jobs at a time, then its report."""
    if entry.needs:
        try:
            data.load(parse(["--config", entry.config]), "test")
        except SystemExit:  # the line above said which file is missing and where to get it
            print(f"{name} left out: it needs {entry.needs} in $DATA_DIR or data/", flush=True)
            return
    if entry.command:
        print(f"{name}: {entry.what}", flush=True)
        try:
            code = spawn([sys.executable, *with_seeds(entry), "--jobs", str(jobs)]).returncode
        except BaseException:
            CHILDREN[-1].terminate()
            raise
        if code:
            sys.exit(f"{name} stopped; run the same command again to go on")
        return
    todo = [(a, s) for s in entry.seeds for a in entry.arms if not done(entry, name, a, s)]
    todo.sort(
        key=lambda t: bool(t[0].after or t[0].chained)
    )  # first what others wait for, so that none holds a worker for nothing
    total = len(entry.arms) * len(entry.seeds)
    print(f"{name}: {entry.what}; {total - len(todo)} of {total} arms are there already", flush=True)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        started: dict[tuple[str, int], concurrent.futures.Future] = {}

        def after(arm: Arm, seed: int) -> None:
            if (first := started.get((arm.after or arm.chained, seed))) is not None:
                first.result()
            run_arm(entry, name, arm, seed)

        # an arm is submitted after the one it starts from, so a waiting arm never holds the last worker
        for arm, seed in todo:
            started[arm.name, seed] = pool.submit(after, arm, seed)
        try:
            while True:
                over, running = concurrent.futures.wait(started.values(), 15, concurrent.futures.FIRST_EXCEPTION)
                for f in over:
                    f.result()  # raises where an arm has failed
                if not running:
                    break
                if now := [s for a, s in ((a, state(entry, name, a, s)) for a, s in todo) if s]:
                    print("  " + "; ".join(now), flush=True)
        except BaseException as e:
            for f in started.values():
                f.cancel()
            for child in CHILDREN:
                child.terminate()  # they finish their step, save and leave
            sys.exit(f"{name} stopped: {str(e) or type(e).__name__}\nrun the same command again to go on")
    os.makedirs(RESULTS, exist_ok=True)
    entry.report(entry, name)


# ---------------------------------------------------------------------------------------------------------------------
# Reports


def rows_of(entry: Entry, name: str, arm: Arm, seed: int) -> list[dict]:
    folder = entry.folder(name, arm.name, seed)
    return read_rows(os.path.join(folder, f"eval_test_{arm.baseline}.jsonl") if arm.baseline else folder, "test")


def log_of(folder: str) -> list[dict]:
    with open(os.path.join(folder, "log.jsonl"), encoding="utf-8") as f:
        return [json.loads(line) for line in f if line.endswith("\n")]


# n -> 97.5 % point of Student's t with n - 1 degrees of freedom
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def t_interval(differences: np.ndarray) -> dict[str, float]:
    """Mean of paired differences over seeds and its 95 % interval by Student's t (a bootstrap of so few is too narrow)."""
    n, mean = len(differences), float(differences.mean())
    half = T95[n] * float(differences.std(ddof=1)) / n**0.5
    return {"difference": mean, "difference_lo": mean - half, "difference_hi": mean + half}


def comparison(columns: list[str], pairs: list[tuple[str, str]]) -> Callable[[Entry, str], None]:
    """Report: a table of test means with the spread over seeds, and paired differences of arms with intervals.

    One seed: the interval resamples test examples. Several: Student's t over the seeds' differences, because runs differ
    more than examples do.
    """

    def report(entry: Entry, name: str) -> None:
        scores = {a.name: np.array([[np.mean([r["metrics"].get(c, np.nan) for r in rows_of(entry, name, a, s)]) for c in columns]
                                    for s in entry.seeds]) for a in entry.arms}  # fmt: skip
        n = len(entry.seeds)
        lines = [f"# {entry.what}", "", f"{entry.config}, test split, seeds {entry.seeds}, greedy decoding. "
                 + ("Mean +- standard deviation over seeds." if n > 1 else ""), ""]  # fmt: skip
        rows = []
        for arm, x in scores.items():
            cells = [
                "-" if np.isnan(m) else f"{m:.3f}" + (f" +- {d:.3f}" if n > 1 else "")  # a baseline has no invalid
                for m, d in zip(x.mean(0), x.std(0, ddof=1) if n > 1 else x[0])
            ]
            rows.append([arm, *cells])
        lines += table(["arm", *columns], rows)
        rows = []
        for a, b in pairs:
            cells = []
            for j, c in enumerate(columns):
                if np.isnan(scores[a][:, j] - scores[b][:, j]).any():
                    cells.append("-")
                    continue
                if n > 1:
                    d = t_interval(scores[a][:, j] - scores[b][:, j])
                else:
                    arms = {arm.name: arm for arm in entry.arms}
                    d = compare(
                        rows_of(entry, name, arms[a], entry.seeds[0]),
                        rows_of(entry, name, arms[b], entry.seeds[0]),
                        [c],
                    )[c]
                cells.append(f"{d['difference']:+.3f} [{d['difference_lo']:+.3f}, {d['difference_hi']:+.3f}]")
            rows.append([f"{a} - {b}", *cells])
        text = "\n".join(lines + table(["difference", *columns], rows))
        write(os.path.join(RESULTS, f"{name}.md"), text)
        print("\n" + text)
        curves(entry, name)
        bars(entry, name, scores, columns)

    return report


def curves(entry: Entry, name: str) -> None:
    """Figure: reward parts of the sampled slates and rankings over training, per arm; band: range over seeds."""
    plt = plots()
    arms = [a for a in entry.arms if a.after]
    if plt is None or not arms:
        return
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    logs = {a.name: [log_of(entry.folder(name, a.name, s)) for s in entry.seeds] for a in arms}
    kinds = {"slate_recall": "slate recall", "rank_ndcg": "ranking NDCG"}  # of phases; lists have others
    if not any("slate_recall" in log[0] for seeds in logs.values() for log in seeds):
        kinds = {"recall": "recall", "dcg": "DCG"}
    for ax, (key, title) in zip(axes, kinds.items()):
        for arm in arms:
            if not all(key in log[0] for log in logs[arm.name]):
                continue  # trained on written answers: nothing was sampled
            y = np.array([[r[key] for r in log] for log in logs[arm.name]])
            w = max(1, y.shape[1] // 20)
            y = np.array([np.convolve(v, np.ones(w) / w, "valid") for v in y])
            x = np.arange(y.shape[1]) + w / 2
            ax.plot(x, y.mean(0), label=arm.name)
            if len(y) > 1:
                ax.fill_between(x, y.min(0), y.max(0), alpha=0.2)
        ax.set(xlabel="optimiser step", ylabel=f"{title} of samples", title=title)
        ax.grid(alpha=0.3)
    axes[0].legend()
    path = os.path.join(RESULTS, f"{name}_curves.png")
    figure.savefig(path, dpi=130)
    print(f"figure: {path}")


def bars(entry: Entry, name: str, scores: dict[str, np.ndarray], columns: list[str]) -> None:
    """Figure: test Recall@k of every arm; whisker: 95 % interval over examples (one seed) or range over seeds."""
    plt = plots()
    ks = [c for c in columns if c.startswith("recall@")]
    if plt is None or not ks:
        return
    figure, ax = plt.subplots(figsize=(7, 3.8), layout="constrained")
    width = 0.8 / len(scores)
    for i, arm in enumerate(entry.arms):
        x = scores[arm.name][:, [columns.index(k) for k in ks]]
        if len(x) > 1:
            err = np.abs([x.mean(0) - x.min(0), x.max(0) - x.mean(0)])  # of equal seeds: 0, but for rounding
        else:
            c = compare(rows_of(entry, name, arm, entry.seeds[0]), names=ks)
            err = [[c[k]["value"] - c[k]["lo"] for k in ks], [c[k]["hi"] - c[k]["value"] for k in ks]]
        ax.bar(np.arange(len(ks)) + i * width, x.mean(0), width, yerr=err, capsize=3, label=arm.name)
    ax.set_xticks(np.arange(len(ks)) + 0.4 - width / 2, [k.replace("recall", "Recall") for k in ks])
    ax.set(ylabel="test recall of the ranking", title="Recall@k")
    figure.legend(loc="outside right upper")  # beside the bars, never on them
    ax.grid(axis="y", alpha=0.3)
    path = os.path.join(RESULTS, f"{name}_recall.png")
    figure.savefig(path, dpi=130)
    print(f"figure: {path}")


def coloured(text: str, tags: list[str], gold: dict[str, float]) -> str:
    """A completion for the terminal: slate green, ranking blue, delimiters grey, gold items bold with their utility."""
    colour, now, out = {tags[0]: "32", tags[2]: "34"}, "90", []
    for line in text.splitlines():
        if line.strip() in tags:
            now = colour.get(line.strip(), "90")
            out.append(f"\033[90m{line}\033[0m")
        else:
            mark = f"   <- gold, utility {gold[line]:g}" if line in gold else ""
            out.append(f"\033[{'1;' if mark else ''}{now}m  {line}{mark}\033[0m")
    return "\n".join(out)


def demo_report(entry: Entry, name: str) -> None:
    """The comparison, and one test example as the arms answer it, coloured by phase."""
    comparison(["recall@1", "recall@5", "ndcg@3", "slate_recall", "invalid", "duplicates"],
               [("fgrpo", "sft"), ("dr_grpo", "sft"), ("fgrpo", "dr_grpo")])(entry, name)  # fmt: skip
    seed = entry.seeds[0]
    cfg = parse(["--config", os.path.join(entry.folder(name, "fgrpo", seed), "config.yaml")])
    example = data.load(cfg, "test").examples[0]
    print(f"\nOne test example. {example.prompt.strip()}\nGold: {', '.join(example.gold)}")
    for arm in entry.arms:
        row = next(r for r in rows_of(entry, name, arm, seed) if r["id"] == example.id)
        print(
            f"\n{arm.name} (slate recall {row['metrics']['slate_recall']:.2f}, NDCG@3 {row['metrics']['ndcg@3']:.2f})"
        )
        print(coloured(row["text"], cfg.tags, example.gold))
    print(f"\ntable: {RESULTS}/{name}.md; delete {RUNS}/{name} to train again")


TABLE4 = {  # arXiv 2602.06717, Table 4: pass@1, 128, 256 in % on 17 x 17 after 20,000 steps; (N, gamma) -> the three
    (4, 0): (65.6, 67.1, 67.3), (4, 0.5): (74.4, 75.8, 75.9), (4, 1): (79.7, 81.4, 81.5),
    (8, 0): (72.2, 73.3, 73.4), (8, 0.5): (83.4, 84.0, 84.0), (8, 1): (76.3, 76.6, 76.6),
    (16, 0): (73.9, 74.2, 74.2), (16, 0.5): (83.7, 84.3, 84.3), (16, 1): (84.4, 86.4, 86.5),
    (32, 0): (74.5, 74.9, 75.1), (32, 0.5): (85.1, 85.8, 85.8), (32, 1): (84.9, 85.8, 85.8),
}  # fmt: skip
KS = (1, 128, 256)


def interval(results: list[dict], column: str) -> tuple[float, float, float]:
    """(mean, low, high) of a metric over seeds, 95 %: Student's t over them, or, of one seed, its resampled problems."""
    values = np.array([r[column]["value"] for r in results])
    if len(values) == 1:
        return values[0], results[0][column]["lo"], results[0][column]["hi"]
    d = t_interval(values)
    return d["difference"], d["difference_lo"], d["difference_hi"]


def maze_report(entry: Entry, name: str) -> None:
    """Table: pass@k of every arm with intervals, beside the paper's. Figure: -log pass@k of valid mazes over training."""

    def results(arm: Arm) -> list[dict]:
        paths = [result_of(entry, entry.folder(name, arm.name, s), arm) for s in entry.seeds]
        return [json.load(open(path, encoding="utf-8"))["metrics"] for path in paths]

    lines = [f"# {entry.what}", "", f"{entry.config}, test split, seeds {entry.seeds}, {' '.join(entry.score)}, last checkpoints; "
             "95 % intervals: Student's t over seeds, of one seed resampled mazes (pass@k: the unbiased estimator). In brackets the "
             "paper's numbers: a larger maze and model, 20,000 steps (Table 4; its seeds and intervals are not published). exact: "
             "the target move by move.", ""]  # fmt: skip
    columns = [*(f"pass@{k}" for k in KS), "exact@1"]
    rows = []
    for arm in entry.arms:
        got, paper = results(arm), TABLE4.get(MAZE_ARMS.get(arm.name), ())
        cells = []
        for i, c in enumerate(columns):
            column = c if all(c in r for r in got) else f"pass@{c.split('@')[1]}"  # nothing right was ever inexact
            mean, low, high = (100 * x for x in interval(got, column))
            cells.append(f"{mean:.1f} [{low:.1f}, {high:.1f}]" + (f" ({paper[i]})" if i < len(paper) else ""))
        rows.append([arm.name, *cells])
    text = "\n".join(lines + table(["arm", *columns], rows))
    write(os.path.join(RESULTS, f"{name}.md"), text)
    print("\n" + text)
    maze_curves(entry, name)


def maze_curves(entry: Entry, name: str) -> None:
    """Figure: a row of panels per N, a panel per k; -log pass@k of valid mazes over training, a line per gamma (Figs. 6, 7)."""
    plt = plots()
    if plt is None:
        return
    sizes = list(dict.fromkeys(n for n, _ in (MAZE_ARMS[a.name] for a in entry.arms if a.after)))
    figure, axes = plt.subplots(
        len(sizes), len(KS), figsize=(10, 2.6 * len(sizes) + 0.6), layout="constrained", squeeze=False
    )
    for arm in entry.arms:
        if not arm.after:
            continue
        n, gamma = MAZE_ARMS[arm.name]
        logs = [log_of(entry.folder(name, arm.name, s)) for s in entry.seeds]
        for ax, k in zip(axes[sizes.index(n)], KS):
            points = [[(r["step"], r[f"valid/pass@{k}"]) for r in log if f"valid/pass@{k}" in r] for log in logs]
            x, y = np.array(points).transpose(2, 0, 1)
            y = -np.log(np.maximum(y, 1e-3))  # a pass@k of 0 has no logarithm
            ax.plot(x[0], y.mean(0), label=f"gamma {gamma:g}", marker=".")
            if len(y) > 1:
                ax.fill_between(x[0], y.min(0), y.max(0), alpha=0.2)
            ax.set(xlabel="optimiser step", ylabel=f"-log pass@{k}", title=f"N = {n}")
            ax.grid(alpha=0.3)
    axes[0][0].legend()
    path = os.path.join(RESULTS, f"{name}_passk.png")
    figure.savefig(path, dpi=130)
    print(f"figure: {path}")


# ---------------------------------------------------------------------------------------------------------------------
# The list

SFT = "--method sft --steps 400 --batch_size 64 --lr 1e-3 --schedule linear".split()
MOVIELENS_SFT = (
    "--method sft --steps 500 --lr 2e-3 --adam_beta2 0.95 --weight_decay 0.1 --schedule linear --eval_every 0".split()
)
WORLD, LISTS = "configs/demo.yaml", "configs/requests.yaml"
MAZE_ARMS = {f"n{n}-gamma{gamma:g}": (n, gamma) for n in (4, 8, 16, 32) for gamma in (0, 0.5, 1)}
PASS = "--eval_every 25 --k 1 128 256 --samples 256".split()  # along the way
HALF = ["--method", "decoupled_sft", *SFT[2:]]  # the same demonstrations, one phase of them
PHASED = [m for m, row in METHODS.items() if row.source == "sample" and row.unit != "rank"]

ENTRIES = {
    # The paper's GRPO baseline divides by no standard deviation: that is the row dr_grpo, one column away from fgrpo.
    "demo": Entry(
        "SFT, GRPO (the row dr_grpo, as in the paper) and F-GRPO on the built-in world", WORLD,
        [Arm("sft", SFT), Arm("dr_grpo", ["--method", "dr_grpo"], "sft"), Arm("fgrpo", ["--method", "fgrpo"], "sft")],
        demo_report),
    "world": Entry(
        "SFT, GRPO (the row dr_grpo), F-GRPO and F-GRPO with causal credit on the built-in world", WORLD,
        [Arm("popularity", [], baseline="popularity"), Arm("sft", SFT), Arm("dr_grpo", ["--method", "dr_grpo"], "sft"),
         Arm("fgrpo", ["--method", "fgrpo"], "sft"),
         Arm("fgrpo-causal", ["--method", "fgrpo", "--credit", "causal"], "sft")],
        comparison(["recall@1", "recall@5", "ndcg@3", "slate_recall", "invalid"],
                   [("fgrpo", "sft"), ("dr_grpo", "sft"), ("fgrpo", "dr_grpo"), ("fgrpo-causal", "dr_grpo"), ("fgrpo-causal", "fgrpo")]),
        seeds=[0, 1, 2, 3, 4]),
    "ablations": Entry(
        "On the built-in world: the row grpo, and F-GRPO without credit for delimiters (as published)", WORLD,
        [Arm("sft", SFT), Arm("grpo", ["--method", "grpo"], "sft"), Arm("dr_grpo", ["--method", "dr_grpo"], "sft"),
         Arm("fgrpo", ["--method", "fgrpo"], "sft"),
         Arm("fgrpo-words", ["--method", "fgrpo", "--train_delimiters", "false"], "sft")],
        comparison(["recall@1", "recall@5", "ndcg@3", "slate_recall", "invalid"], [("grpo", "dr_grpo"), ("fgrpo-words", "fgrpo")]),
        seeds=[0, 1, 2]),
    "methods": Entry(
        "Every method from the same SFT on the built-in world, 200 steps, at its own defaults", WORLD,
        [Arm("popularity", [], baseline="popularity"), Arm("sft", SFT),
         *(Arm(m, ["--method", m], "sft") for m in ("dpo", "s_dpo", "mult_dpo", *PHASED)),
         Arm("selector", HALF), Arm("decoupled_sft", [*HALF, "--weights", "0", "1"], chained="selector")],
        comparison(["recall@1", "recall@5", "ndcg@3", "slate_recall", "invalid"],
                   [(m, "sft") for m in ("dpo", "s_dpo", "mult_dpo", *PHASED)]),
        seeds=[0]),
    "lists": Entry(
        "SFT, GRPO and GSPO (reward DCG), Rank-GRPO and ReMaRk on built-in requests with several responders", LISTS,
        [Arm("popularity", [], baseline="popularity"), Arm("sft", SFT), Arm("grpo", ["--method", "grpo", "--returns", "log"], "sft"),
         Arm("gspo", ["--method", "gspo", "--returns", "log"], "sft"), Arm("rank_grpo", ["--method", "rank_grpo"], "sft"),
         Arm("remark", ["--method", "remark"], "sft"),
         Arm("mean", ["--method", "remark", "--consensus", "1", "--scale", "batch_std"], "sft")],
        comparison(["recall@5", "recall@10", "row_recall@10", "ndcg@10", "lines"],
                   [("rank_grpo", "sft"), ("rank_grpo", "grpo"), ("remark", "rank_grpo"), ("mean", "remark")]),
        seeds=[0, 1, 2]),
    "maze": Entry(
        "SFT, GRPO and focal GRPO on small mazes, N samples of a prompt and gamma of the focal weight", "configs/maze_small.yaml",
        [Arm("sft", ["--method", "sft"]),
         *(Arm(a, ["--method", "grpo", "--group_size", str(n), "--focal_gamma", str(gamma), "--lr", "1e-4", *PASS],
               "sft")
           for a, (n, gamma) in MAZE_ARMS.items())],
        maze_report, seeds=[0, 1, 2], score="--k 1 128 256 --samples 1024".split()),
    "movielens": Entry(
        "SFT, GRPO (the row dr_grpo) and F-GRPO on MovieLens latest-small, from scratch, all its 138 movies with 100 ratings", "configs/movielens.yaml",
        [Arm("random", [], baseline="random"), Arm("popularity", [], baseline="popularity"), Arm("sft", MOVIELENS_SFT),
         Arm("dr_grpo", ["--method", "dr_grpo"], "sft"), Arm("fgrpo", ["--method", "fgrpo"], "sft")],
        comparison(["recall@1", "recall@5", "ndcg@5", "slate_recall", "invalid"],
                   [("fgrpo", "sft"), ("fgrpo", "popularity"), ("fgrpo", "random"), ("fgrpo", "dr_grpo")]),
        seeds=[0, 1, 2, 3, 4], needs="MovieLens (python data.py list)"),
    "simulate": Entry(
        "The categorical study of the focal paper: 128,000 actions, 2 to 131,072 draws per step",
        command=["simulate.py", "--scale", "paper"], seeds=[0, 1, 2, 3]),
}  # fmt: skip


def main(argv: list[str]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("SIGTERM"))
    p = argparse.ArgumentParser(description="Tables and figures; see the head of this file.")
    p.add_argument("action", choices=["list", "run", "commands"])
    p.add_argument("entry", nargs="?", default="all", choices=["all", *ENTRIES])
    p.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="arms side by side, one thread each (default: cores)"
    )
    p.add_argument("--seeds", type=int, nargs="+", help="other seeds than the entry's")
    args = p.parse_args(argv)
    if args.jobs < 1:
        p.error("--jobs must be at least 1")
    if args.seeds and (len(set(args.seeds)) < len(args.seeds) or len(args.seeds) > max(T95)):
        p.error(f"--seeds: at most {max(T95)} seeds, all different")
    names = list(ENTRIES) if args.entry == "all" else [args.entry]
    for name in names:
        entry = replace(ENTRIES[name], seeds=args.seeds or ENTRIES[name].seeds)
        if args.action == "list":
            arms = "one command" if entry.command else f"{len(entry.arms)} arms"
            print(f"{name:12} {entry.what} ({arms} x {len(entry.seeds)} seeds)")
        elif args.action == "commands":
            if entry.command:
                print("python " + " ".join(with_seeds(entry)))
            for seed in entry.seeds:
                for arm in entry.arms:
                    print("\n".join("python " + " ".join(c) for c in commands(entry, name, arm, seed)))
        else:
            run(entry, name, args.jobs)


if __name__ == "__main__":
    main(sys.argv[1:])
