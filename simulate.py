"""The focal paper without a language model (2602.06717): its theory as functions, its study of a categorical policy as a command.

A softmax policy over actions, some of them right, is trained on groups of n draws from itself. All right actions together
gain mass for every n; whether each of them keeps its own depends on n: at middling sizes few take all (the zone of
concentration). Measured: Q, the mass of the right actions, and the retained mass, how much of the right ones' start is left.

Not in here: the tail-miss chance, the focal weight and the learning-rate multiplier, which training uses too (losses.py:
tail_miss, focal_weight, low_rate). Each run of the study is a file of its own under OUT/runs, so a stopped command goes on.

    python simulate.py                                  # a tenth of the actions, under a minute
    python simulate.py --scale paper                    # 128,000 actions: figure, tables
    python simulate.py --sweep z_right 1 2 3 4          # where the zone lies for other first policies
"""

import argparse
import concurrent.futures
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from config import fail
from losses import focal_weight, tail_miss
from run import write

# ---------------------------------------------------------------------------------------------------------------------
# Theory. p (A,): probabilities, sum 1; right (A,) bool: which actions are right. Masses and chances are plain numbers.


def active(mu: float, n: int) -> float:
    """Chance that a group of n holds right and wrong answers, 1 - mu^n - (1-mu)^n (event A_N, section 3): without both no
    advantage differs from 0. It is the tail miss of a set that cannot be hit."""
    return tail_miss(mu, 0.0, n)


def worst_group(mu: float, tau: float) -> tuple[int, float]:
    """The group size that most often misses a rare right set (Lemma 3.1), and how often. ValueError unless 0 < tau < mu < 1.

    With a = 1-tau, c = mu-tau, w = 1-mu, a^n - c^n - w^n rises while (c/a)^n ln c/ln a + (w/a)^n ln w/ln a > 1. The left
    side falls with n from above 1 to 0, so there is one peak: bisect for it, then compare the whole numbers around.
    """
    if not 0 < tau < mu < 1:
        raise ValueError(f"a peak needs 0 < tau < mu < 1, not tau {tau}, mu {mu}")
    a = math.log1p(-tau)
    kinds = [math.log1p(-(1 - mu) / (1 - tau)), math.log1p(-(mu - tau) / (1 - tau))]  # ln c/a, ln w/a
    rises = lambda n: sum(math.exp(n * k) * (1 + k / a) for k in kinds) > 1  # noqa: E731
    low, high = 0.0, 1.0
    while rises(high):
        low, high = high, 2 * high
    while high - low > 0.5 and (low + high) / 2 not in (low, high):
        low, high = ((low + high) / 2, high) if rises((low + high) / 2) else (low, (low + high) / 2)
    return max(((n, tail_miss(mu, tau, n)) for n in range(max(1, int(low)), int(high) + 2)), key=lambda x: x[1])


def logit_step(p, right, drawn, n: int, eta: float, r_right=1.0, r_wrong=-1.0) -> np.ndarray:
    """One step of the logits (A,) (eq. 5): dz_i = eta/n p_i (R_i - S), R_i = 0 where not drawn, S = sum of R_i p_i over drawn.

    drawn: indices of the sampled actions; repeats count once. The gradient of (1/n) sum over distinct drawn of R_i p_i:
    rewards are not centred here, S is not the group's mean.
    """
    reward = np.zeros(len(p))
    reward[drawn] = np.where(right[drawn], r_right, r_wrong)
    return eta / n * p * (reward - reward @ p)


class Change(NamedTuple):
    """First-order change of mass in one step: total, of all right actions; unsampled, of the right ones that were not drawn."""

    total: float
    unsampled: float


def one_step(p, right, drawn, n: int, eta: float, r_right=1.0, r_wrong=-1.0) -> Change:
    """What a step by eq. 5 does to the right mass Q (eq. 17, Theorem 1 of 2510.01180) and to its unsampled part (Prop. 3.2).

    dQ = eta/n [(Rc-S)(1-Q) A2 + (S-Rw) Q B2 + S (Q Un2 - (1-Q) Up2)]
    dQu = eta/n [-S Up2 - Qu ((Rc-S) A2 + (Rw-S) B2 - S U2)]
    A2, B2, Up2, Un2: sums of p^2 over drawn right, drawn wrong, undrawn right, undrawn wrong; U2 = Up2 + Un2. dQu can be
    negative while dQ is positive.
    """
    seen = np.zeros(len(p), bool)
    seen[drawn] = True
    square = lambda which: float((p[which] ** 2).sum())  # noqa: E731
    a2, b2, up2, un2 = square(seen & right), square(seen & ~right), square(~seen & right), square(~seen & ~right)
    s = float(r_right * p[seen & right].sum() + r_wrong * p[seen & ~right].sum())
    q, qu = float(p[right].sum()), float(p[right & ~seen].sum())
    total = (r_right - s) * (1 - q) * a2 + (s - r_wrong) * q * b2 + s * (q * un2 - (1 - q) * up2)
    unsampled = -s * up2 - qu * ((r_right - s) * a2 + (r_wrong - s) * b2 - s * (up2 + un2))
    return Change(eta / n * total, eta / n * unsampled)


def sampled_mass(p, k: int) -> float:
    """Expected mass of the distinct actions among k draws from p (K,), one kind's probabilities, not normalised (Lemma H.1):
    sum of p (1 - (1 - p/mass)^k). Rises with k."""
    if k == 0:
        return 0.0
    with np.errstate(divide="ignore"):  # a kind of one action: ln 0
        return float((p * -np.expm1(k * np.log1p(-p / p.sum()))).sum())


def expected_baseline(p, right, n: int, k: int, r_right=1.0, r_wrong=-1.0) -> float:
    """E[S | k of n draws are right] (Corollary H.2); does not fall with k if r_right > 0 >= r_wrong: why the paper takes k/n
    for the difficulty of a prompt."""
    return r_right * sampled_mass(p[right], k) + r_wrong * sampled_mass(p[~right], n - k)


def unsampled_moment(p, n: int) -> np.ndarray:
    """Expected p^2 where an action is not among n draws, (A,): p^2 (1-p)^n (Lemma 2 of 2510.01180)."""
    with np.errstate(divide="ignore"):
        return p**2 * np.exp(n * np.log1p(-p))


def retained(p0, p, right) -> float:
    """Retained right mass (eq. 26): 1 - sum over right of max(0, p0 - p) / sum over right of p0. 1: no right action lost."""
    return 1 - float(np.maximum(0, p0 - p)[right].sum() / p0[right].sum())


# ---------------------------------------------------------------------------------------------------------------------
# One run of the study


@dataclass(frozen=True)
class Arm:
    """One run. Right actions come first, action 0 being the anchor."""

    n: int = 256
    """Draws per step."""
    gamma: float = 0.0
    """Exponent of the focal weight; 0: plain."""
    seed: int = 0
    actions: int = 128_000
    right: int = 10_000
    """How many actions are right."""
    z_anchor: float = 5.0
    """First logit of one right action, better known than the others."""
    z_right: float = 3.0
    """First logit of each other right action; of a wrong one: 0."""
    surrogate: str = "ratio"
    """What a draw's centred reward multiplies: ratio (p / p_old), or prob (p), as the paper writes it."""
    optimizer: str = "adam"
    """adam: no weight decay; adamw: 0.01, torch's default."""
    lr: float = 1e-2
    steps: int = 1000

    def path(self, out: str) -> str:
        """File of the result: its name tells every setting apart."""
        start = f"{self.actions}-{self.right}-{self.z_anchor:g}-{self.z_right:g}"
        how = f"{self.surrogate}-{self.optimizer}-{self.lr:g}-{self.steps}"
        return os.path.join(out, "runs", start, how, f"n{self.n}-gamma{self.gamma:g}-seed{self.seed}.json")

    def logits(self) -> torch.Tensor:
        """First logits, (A,) float32."""
        z = torch.zeros(self.actions)
        z[: self.right] = self.z_right
        z[0] = self.z_anchor
        return z


def draw(cumulated: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """How often each action comes up in n draws, (A,) int64. cumulated: running sum of the masses (A,), float64, any scale.

    Running sums of exponentials, divided by the last, are sorted uniforms: the search then walks through memory in order.
    """
    u = np.cumsum(rng.standard_exponential(n + 1))
    index = np.searchsorted(cumulated, u[:-1] * (cumulated[-1] / u[-1]), side="right")
    return np.bincount(np.minimum(index, len(cumulated) - 1), minlength=len(cumulated))


def gradient(counts: torch.Tensor, p: torch.Tensor, right: int, gamma: float, surrogate: str) -> torch.Tensor:
    """d L / d logits (A,), to be climbed: L = g/n sum over the group's draws j of (R_j - mean R) s_j, R = 1 or -1.

    s_j: p_j / p_old,j ("ratio") or p_j ("prob"); g: the focal weight of the share of right draws. No division by the
    standard deviation; repeats count. counts (A,): how often each action was drawn, the first `right` ones being right.
    """
    n = int(counts.sum())
    rate = int(counts[:right].sum()) / n
    scale = focal_weight(rate, gamma) / n
    pull = counts.to(p.dtype)
    pull[:right] *= 2 * (1 - rate) * scale
    pull[right:] *= -2 * rate * scale
    # ratio: the centred rewards sum to 0, so no term of the softmax's normalisation is left
    return pull if surrogate == "ratio" else p * (pull - pull @ p)


def simulate(arm: Arm, points: int = 100) -> dict:
    """Train one policy -> {"arm": settings, "trace": columns over steps, "active": steps with a signal, "seconds": CPU time}.

    Columns: step; q, right mass; retained (eq. 26); entropy in nats; improved, share of right actions above their first
    probability; anchor, its probability. float32 logits; sums of masses in float64. The draws depend on seed and n only,
    so arms that differ in gamma or surrogate begin with the same numbers.
    """
    began = time.process_time()
    torch.set_num_threads(1)
    z, rng = arm.logits(), np.random.default_rng([arm.seed, arm.n])
    adam = torch.optim.Adam if arm.optimizer == "adam" else torch.optim.AdamW
    opt = adam([z], lr=arm.lr, maximize=True, fused=True)
    right = np.arange(arm.actions) < arm.right
    exact = lambda: torch.softmax(z.double(), 0).numpy()  # noqa: E731
    p0, trace, active_steps = exact(), [], 0
    for step in range(arm.steps + 1):
        if step % max(1, arm.steps // points) == 0 or step == arm.steps:
            p = exact()
            trace.append({"step": step, "q": p[right].sum(), "retained": retained(p0, p, right),
                          "entropy": -(p * np.log(np.maximum(p, 1e-300))).sum(),
                          "improved": (p > p0)[right].mean(), "anchor": p[0]})  # fmt: skip
        if step == arm.steps:
            break
        mass = torch.exp(z - z.max())
        cumulated = mass.cumsum(0, dtype=torch.float64)
        counts = torch.from_numpy(draw(cumulated.numpy(), arm.n, rng))
        z.grad = gradient(counts, mass / cumulated[-1].float(), arm.right, arm.gamma, arm.surrogate)
        active_steps += 0 < int(counts[: arm.right].sum()) < arm.n
        opt.step()  # also without a signal: Adam's momentum goes on
    columns = {k: [float(r[k]) for r in trace] for k in trace[0]}
    return {"arm": asdict(arm), "trace": columns, "active": active_steps, "seconds": time.process_time() - began}


# ---------------------------------------------------------------------------------------------------------------------
# The study: arms, each run once


@dataclass(frozen=True)
class Scale:
    """What the study runs over. shown: sizes drawn over steps, smallest first; broadened: those of 2510.01180."""

    start: Arm
    sizes: list[int]
    shown: list[int]
    broadened: list[int]
    seeds: list[int]


SCALES = {
    "small": Scale(Arm(actions=12_800, right=1_000), [2**k for k in range(1, 15)], [2, 64, 512, 16_384], [4, 8, 16, 512, 5_120], [0, 1]),
    "paper": Scale(Arm(), [2**k for k in range(1, 18)], [2, 256, 8_192, 131_072], [4, 8, 16, 512, 51_200], [0, 1, 2, 3]),
}  # fmt: skip
GAMMAS = [0.0, 1.0]
SWEEPS = ["actions", "right", "z_anchor", "z_right"]
VARIANTS = [(s, o) for s in ("ratio", "prob") for o in ("adam", "adamw")]
BRORL = {"surrogate": "prob", "optimizer": "adamw", "lr": 1e-3}  # of 2510.01180


def load(out: str, arm: Arm) -> dict | None:
    """A finished run, or None."""
    path = arm.path(out)
    if not os.path.exists(path):
        return None
    try:
        with open(path, encoding="utf-8") as f:
            return json.load(f)
    except ValueError as e:
        fail(f"{path} is damaged ({e}); delete it to run this arm again")


def run_one(out: str, arm: Arm) -> None:
    """Run an arm and write its file, whole or not at all."""
    os.makedirs(os.path.dirname(arm.path(out)), exist_ok=True)
    write(arm.path(out), json.dumps(simulate(arm)))


def leave_signals() -> None:
    """A worker finishes its run; the parent decides when to stop."""
    for s in (signal.SIGINT, signal.SIGTERM):
        signal.signal(s, signal.SIG_IGN)


def run_all(out: str, arms: list[Arm], jobs: int) -> list[dict]:
    """Run the missing arms, jobs at a time, one thread each -> the results of all, in order."""
    arms = list(dict.fromkeys(arms))
    todo = sorted((a for a in arms if load(out, a) is None), key=lambda a: -a.n)  # the longest first: no straggler
    print(f"{len(arms) - len(todo)} of {len(arms)} runs are there already", flush=True)
    bar = tqdm(total=len(todo), unit="run", mininterval=1 if sys.stderr.isatty() else 20, disable=not todo)
    with bar, concurrent.futures.ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), initializer=leave_signals
    ) as pool:  # fmt: skip
        futures = [pool.submit(run_one, out, a) for a in todo]
        try:
            for f in concurrent.futures.as_completed(futures):
                f.result()
                bar.update()
        except BaseException as e:
            pool.shutdown(wait=True, cancel_futures=True)  # what is running ends, seconds later, and is kept
            sys.exit(f"stopped: {str(e) or type(e).__name__}; the same command goes on")
    return [load(out, a) for a in arms]


# ---------------------------------------------------------------------------------------------------------------------
# Reports


class Results:
    """Results by settings: columns over seeds."""

    def __init__(self, results: list[dict]):
        self.of = {Arm(**r["arm"]): r for r in results}
        self.seconds = sum(r["seconds"] for r in results)

    def traces(self, arm: Arm, column: str, seeds: list[int]) -> np.ndarray:
        """(seeds, points)."""
        return np.array([self.of[replace(arm, seed=s)]["trace"][column] for s in seeds])

    def last(self, arm: Arm, column: str, seeds: list[int]) -> np.ndarray:
        """(seeds,): after the last step."""
        return self.traces(arm, column, seeds)[:, -1]

    def cell(self, arm: Arm, column: str, seeds: list[int], digits: int = 4) -> str:
        x = self.last(arm, column, seeds)
        return f"{x.mean():.{digits}f}" + (f" +- {x.std(ddof=1):.{digits}f}" if len(x) > 1 else "")


def table(head: list[str], rows: list[list]) -> list[str]:
    """Lines of a markdown table, a blank one behind it."""
    return ["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *("| " + " | ".join(map(str, r)) + " |" for r in rows), ""]  # fmt: skip


def zone(sizes: list[int], kept: list[float]) -> str:
    """Sizes at which less than half of the right mass is retained."""
    inside = [n for n, x in zip(sizes, kept) if x < 0.5]
    return f"{inside[0]:,} to {inside[-1]:,}" if inside else "none"


def claims(scale: Scale, got: Results, seeds: list[int]) -> list[str]:
    """What the paper says of its Figure 2, held against these runs."""
    arm = lambda n, g: replace(scale.start, n=n, gamma=g)  # noqa: E731
    mean = lambda n, g, c: got.last(arm(n, g), c, seeds).mean()  # noqa: E731
    first = got.traces(arm(scale.sizes[0], 0.0), "q", seeds)[0, 0]
    fell = [f"{n:,} (gamma {g:g})" for g in GAMMAS for n in scale.sizes if mean(n, g, "q") <= first]
    kept = {g: [mean(n, g, "retained") for n in scale.sizes] for g in GAMMAS}
    low = int(np.argmin(kept[0.0]))
    always = [n for n in scale.sizes if got.traces(arm(n, 0.0), "retained", seeds).min() > 0.99]
    inside = [i for i, x in enumerate(kept[0.0]) if x < 0.5]
    worse = [f"{scale.sizes[i]:,}" for i in inside if kept[1.0][i] <= kept[0.0][i]]
    gain = max(range(len(scale.sizes)), key=lambda i: kept[1.0][i] - kept[0.0][i])
    inner = 0 < low < len(scale.sizes) - 1 and kept[0.0][low] < min(kept[0.0][0], kept[0.0][-1])
    top = scale.sizes[-1]
    q_at = ", ".join(f"{n:,} (Q {mean(n, 0.0, 'q'):.3f})" for n in always) or "none"
    return table(["claim", "here", "numbers"], [
        ["Q rises for every n", "no" if fell else "yes", f"from {first:.4f}; fell at n = " + ", ".join(fell) if fell else
         f"from {first:.4f} to at least {min(mean(n, g, 'q') for g in GAMMAS for n in scale.sizes):.4f}"],
        ["retained mass falls, then rises with n", "yes" if inner else "no",
         f"gamma 0: {kept[0.0][0]:.3f} at {scale.sizes[0]}, least {kept[0.0][low]:.3f} at {scale.sizes[low]:,}, {kept[0.0][-1]:.3f} at {top:,}; "
         f"below half at {zone(scale.sizes, kept[0.0])}, gamma 1: {zone(scale.sizes, kept[1.0])}"],
        [f"n = {top:,} keeps about 1 throughout", "yes" if top in always else "no",
         f"least over steps and seeds {got.traces(arm(top, 0.0), 'retained', seeds).min():.3f}"],
        ["it alone does", "yes" if always == [top] else "no", f"above .99 throughout at n = {q_at}"],
        ["gamma 1 retains more at every n of the zone", "no" if worse or not inside else "yes",
         "not at " + ", ".join(worse) if worse else f"most at n = {scale.sizes[gain]:,}: {kept[0.0][gain]:.3f} -> {kept[1.0][gain]:.3f}"],
    ])  # fmt: skip


def study_report(name: str, scale: Scale, got: Results, seeds: list[int]) -> str:
    """Tables: final values by size, the paper's claims, the surrogates, the panel of 2510.01180."""
    start = scale.start
    spread = f"seeds {', '.join(map(str, seeds))}" + ("; mean +- standard deviation" if len(seeds) > 1 else "")
    lines = [f"# The categorical study, scale {name}", "",
             f"{start.actions:,} actions, {start.right:,} right, {start.steps:,} steps, ratio surrogate, Adam, learning rate "
             f"{start.lr:g}; after the last step, {spread}. Together {got.seconds:.0f} CPU seconds.", ""]  # fmt: skip
    rows = []
    for n in scale.sizes:
        arms = [replace(start, n=n, gamma=g) for g in GAMMAS]
        cells = [got.cell(a, c, seeds) for a in arms for c in ("q", "retained")]
        H = [f"{got.last(a, 'entropy', seeds).mean():.2f}" for a in arms]
        signal_ = [got.of[replace(a, seed=s)]["active"] for a in arms for s in seeds]
        rows.append([f"{n:,}", *cells[:2], H[0], *cells[2:], H[1], f"{min(signal_)} to {max(signal_)}"])
    lines += table(["n", "Q, gamma 0", "retained, gamma 0", "entropy", "Q, gamma 1", "retained, gamma 1", "entropy", "steps with a signal"], rows)  # fmt: skip
    lines += ["## What the paper says of its Figure 2", "", *claims(scale, got, seeds)]
    lines += ["## Surrogates and optimisers", "", "Q / retained, gamma 0. The paper writes the surrogate prob and names no optimiser.", ""]  # fmt: skip
    rows = [[s, o, *(" / ".join(got.cell(replace(start, n=n, surrogate=s, optimizer=o), c, seeds, 3) for c in ("q", "retained"))
                     for n in scale.shown)] for s, o in VARIANTS]  # fmt: skip
    lines += table(["surrogate", "optimiser", *(f"n = {n:,}" for n in scale.shown)], rows)
    lines += ["## BroRL (2510.01180, Figure 3)", "", f"Surrogate prob, AdamW, learning rate {BRORL['lr']:g}.", ""]
    rows = [[f"{n:,}", *(got.cell(replace(start, n=n, **BRORL), c, seeds) for c in ("q", "improved"))]
            for n in scale.broadened]  # fmt: skip
    lines += table(["n", "Q", "right actions above their start"], rows)
    return "\n".join(lines)


def plots():
    """matplotlib, or None with a word on how to get the figures."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        return plt
    except ImportError:
        print("no figures: pip install -r requirements-plots.txt")


def over_steps(ax, got: Results, arms: list[Arm], column: str, seeds: list[int], style="-", label=True) -> None:
    """Lines of a column over steps, one colour per size, with the range over seeds."""
    for i, arm in enumerate(arms):
        x, y = got.traces(arm, "step", seeds)[0], got.traces(arm, column, seeds)
        ax.plot(x, y.mean(0), style, color=f"C{i}", label=f"n = {arm.n:,}" if label else None)
        ax.fill_between(x, y.min(0), y.max(0), color=f"C{i}", alpha=0.15, lw=0)
    ax.set(xlabel="step")
    ax.grid(alpha=0.3)


def study_figures(path: str, scale: Scale, got: Results, seeds: list[int]) -> None:
    """PATH.png: Q and retained mass over steps, and after the last one by size. PATH_brorl.png: the panel of 2510.01180."""
    plt = plots()
    if plt is None:
        return
    figure, (a, b, c) = plt.subplots(1, 3, figsize=(14, 5), layout="constrained")
    for g, style in zip(GAMMAS, ("-", "--")):
        for ax, column in ((a, "q"), (b, "retained")):
            over_steps(
                ax, got, [replace(scale.start, n=n, gamma=g) for n in scale.shown], column, seeds, style, style == "-"
            )
    a.set(title="(a) mass of right actions", ylabel="Q")
    b.set(title="(b) retained right mass", ylabel="retained", ylim=(-0.02, 1.04))
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 2}  # inside, it would lie on a curve
    a.legend(title="solid: gamma 0, dashed: gamma 1", **below)
    for g, style in zip(GAMMAS, ("-o", "--o")):
        for column, colour in (("q", "C7"), ("retained", "C4")):
            y = np.array([got.last(replace(scale.start, n=n, gamma=g), column, seeds) for n in scale.sizes])
            name = "Q" if column == "q" else "retained"
            c.plot(scale.sizes, y.mean(1), style, color=colour, ms=3, label=f"{name}, gamma {g:g}")
            c.fill_between(scale.sizes, y.min(1), y.max(1), color=colour, alpha=0.15, lw=0)
            if g == 0 and column == "retained" and (inside := [n for n, x in zip(scale.sizes, y.mean(1)) if x < 0.5]):
                edges = [scale.sizes[0], inside[0] / 2**0.5, inside[-1] * 2**0.5, scale.sizes[-1]]
                c.axvspan(*edges[1:3], color="0.9", zorder=0)
                for k, numeral in enumerate(("I", "II", "III")):
                    c.text((edges[k] * edges[k + 1]) ** 0.5, 1.06, numeral, ha="center", va="bottom")
    c.set(xscale="log", xlabel="draws per step, n", title="(c) after the last step\n", ylim=(-0.02, 1.04))
    c.grid(alpha=0.3)
    c.legend(**below)
    figure.savefig(f"{path}.png", dpi=130)
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 4), layout="constrained")
    for ax, column, title in zip(
        axes, ("q", "improved"), ("mass of right actions, Q", "right actions above their start")
    ):
        over_steps(ax, got, [replace(scale.start, n=n, **BRORL) for n in scale.broadened], column, seeds)
        ax.set(title=title)
    axes[0].legend()
    figure.savefig(f"{path}_brorl.png", dpi=130)
    print(f"figures: {path}.png, {path}_brorl.png")


def study(out: str, name: str, scale: Scale, seeds: list[int], jobs: int) -> None:
    """The paper's figure, what the surrogate makes of it, and the panel it builds on."""
    start = scale.start
    settings = [replace(start, n=n, gamma=g) for n in scale.sizes for g in GAMMAS]
    settings += [replace(start, n=n, surrogate=s, optimizer=o) for s, o in VARIANTS for n in scale.shown]
    settings += [replace(start, n=n, **BRORL) for n in scale.broadened]
    got = Results(run_all(out, [replace(a, seed=s) for a in settings for s in seeds], jobs))
    text = study_report(name, scale, got, seeds)
    write(os.path.join(out, f"{name}.md"), text)
    print("\n" + text + f"\ntable: {out}/{name}.md")
    study_figures(os.path.join(out, name), scale, got, seeds)


def sweep(out: str, name: str, scale: Scale, key: str, values: list, seeds: list[int], jobs: int) -> None:
    """Where the zone lies when the first policy is another one."""
    starts = [replace(scale.start, **{key: v}) for v in values]
    arms = [replace(a, n=n, gamma=g) for a in starts for n in scale.sizes for g in GAMMAS]
    got = Results(run_all(out, [replace(a, seed=s) for a in arms for s in seeds], jobs))
    rows, kept = [], {}
    for v, start in zip(values, starts):
        p = torch.softmax(start.logits().double(), 0)
        mu, leaf = float(p[: start.right].sum()), float(p[start.right - 1])
        for g in GAMMAS:
            kept[v, g] = [got.last(replace(start, n=n, gamma=g), "retained", seeds).mean() for n in scale.sizes]
        low = int(np.argmin(kept[v, 0.0]))
        rows.append([f"{v:g}", f"{mu:.4f}", f"{float(p[0]):.2g}", f"{leaf:.2g}", zone(scale.sizes, kept[v, 0.0]),
                     f"{kept[v, 0.0][low]:.3f} at {scale.sizes[low]:,}", zone(scale.sizes, kept[v, 1.0]),
                     f"{worst_group(mu, leaf)[0]:,}" if 0 < leaf < mu < 1 else "-"])  # fmt: skip
    lines = [f"# The zone by {key}, scale {name}", "",
             f"Sizes n (powers of two to {scale.sizes[-1]:,}) at which less than half of the right mass is retained after "
             f"{scale.start.steps:,} steps; seeds {', '.join(map(str, seeds))}. Worst n: where a group most often misses one given "
             "ordinary right action at the start (Lemma 3.1).", ""]  # fmt: skip
    lines += table([key, "Q at start", "anchor", "each other right", "zone, gamma 0", "least retained", "zone, gamma 1", "worst n"], rows)  # fmt: skip
    path = os.path.join(out, f"{name}_{key}")
    write(f"{path}.md", "\n".join(lines))
    print("\n" + "\n".join(lines) + f"\ntable: {path}.md")
    if (plt := plots()) is not None:
        figure, ax = plt.subplots(figsize=(7, 4.2), layout="constrained")
        for i, v in enumerate(values):
            for g, style in zip(GAMMAS, ("-o", "--o")):
                ax.plot(scale.sizes, kept[v, g], style, color=f"C{i}", ms=3, label=None if g else f"{key} {v:g}")
        ax.set(
            xscale="log",
            xlabel="draws per step, n",
            ylabel="retained right mass",
            title="solid: gamma 0, dashed: gamma 1",
        )
        ax.legend()
        ax.grid(alpha=0.3)
        figure.savefig(f"{path}.png", dpi=130)
        print(f"figure: {path}.png")


def swept(words: list[str], start: Arm) -> tuple[str, list]:
    """--sweep KEY VALUE ... -> (key, values), checked."""
    key, kind = words[0], {f.name: f.type for f in fields(Arm)}.get(words[0])
    if key not in SWEEPS or len(words) < 2:
        fail(f"--sweep takes one of {', '.join(SWEEPS)} and the values to try")
    try:
        values = [kind(w) for w in words[1:]]
    except ValueError:
        fail(f"--sweep {key}: {' '.join(words[1:])}: every value must be {'whole' if kind is int else 'a number'}")
    for v in values:
        arm = replace(start, **{key: v})
        if not 1 <= arm.right < arm.actions or not all(abs(z) <= 50 for z in (arm.z_anchor, arm.z_right)):
            fail(f"--sweep {key} {v:g}: right must be at least 1 and below actions ({arm.actions}), a logit within 50")
    return key, list(dict.fromkeys(values))


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line, checked: scale, seeds, jobs, out, and sweep as (key, values) or None."""
    p = argparse.ArgumentParser(description="The categorical study of 2602.06717; see the head of this file.")
    p.add_argument("--scale", choices=list(SCALES), default="small")
    p.add_argument("--sweep", nargs="+", metavar="KEY VALUE", help=f"instead of the study: try first policies; {', '.join(SWEEPS)}")  # fmt: skip
    p.add_argument("--seeds", type=int, nargs="+", help="default: 0 1 small, 0 1 2 3 paper")
    p.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes of one thread (default: cores)")
    p.add_argument("--out", default=os.path.join("results", "simulate"))
    args = p.parse_args(argv)
    args.seeds = args.seeds or SCALES[args.scale].seeds
    if args.jobs < 1:
        fail("--jobs must be at least 1")
    if min(args.seeds) < 0 or len(set(args.seeds)) < len(args.seeds):
        fail("--seeds must be different whole numbers from 0 on")
    args.sweep = swept(args.sweep, SCALES[args.scale].start) if args.sweep else None
    return args


def main(argv: list[str]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("SIGTERM"))
    args = arguments(argv)
    scale = SCALES[args.scale]
    if args.sweep:
        sweep(args.out, args.scale, scale, *args.sweep, args.seeds, args.jobs)
    else:
        study(args.out, args.scale, scale, args.seeds, args.jobs)


if __name__ == "__main__":
    main(sys.argv[1:])
