"""simulate.py: the theory against worked examples, brute force and drawn groups; the study against torch, known results
and interruption."""

import importlib.util
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from decimal import Decimal, getcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import simulate as sim
from losses import low_rate, tail_miss
from simulate import Arm, Results, Scale, gradient, one_step, retained, sampled_mass, worst_group

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
P = np.array([0.35, 0.20, 0.10, 0.05, 0.20, 0.10])  # the first four right
RIGHT = np.arange(6) < 4

# ---------------------------------------------------------------------------------------------------------------------
# Theory

# mu, rho = tau / mu, the worst group, its chance; the chance at n = 2, 4, 8 ... 128 (Figures 1a and 3 of the paper)
PEAKS = """
0.3 0.05 9 .83246 .3990 .6946 .8284 .7819 .6165 .3801 .1445
0.3 0.1 8 .72607 .3780 .6399 .7261 .6109 .3773 .1424 .0203
0.3 0.2 6 .57203 .3360 .5373 .5519 .3683 .1381 .0191 .0004
0.8 0.01 15 .85623 .3168 .5733 .7830 .8554 .7728 .5981 .3577
0.8 0.05 8 .61008 .3040 .5141 .6101 .5080 .2707 .0733 .0054
0.8 0.1 6 .46698 .2880 .4461 .4410 .2582 .0693 .0048 .0000
0.8 0.2 4 .32850 .2560 .3285 .2197 .0607 .0038 .0000 .0000
0.5 0.01 8 .95318 .4950 .8576 .9532 .9229 .8518 .7256 .5264
0.5 0.05 6 .83196 .4750 .7903 .8102 .6669 .4448 .1978 .0391
0.5 0.1 5 .72408 .4500 .7110 .6578 .4401 .1937 .0375 .0014
0.5 0.2 4 .56800 .4000 .5680 .4259 .1853 .0343 .0012 .0000
0.2 0.01 21 .94961 .3168 .5809 .8163 .9403 .9372 .8797 .7739
0.2 0.05 15 .82487 .3040 .5497 .7550 .8233 .7242 .5256 .2763
0.2 0.1 12 .71600 .2880 .5117 .6830 .6957 .5231 .2745 .0753
0.2 0.2 9 .55832 .2560 .4391 .5536 .4923 .2700 .0733 .0054
"""


def test_the_curves_of_figures_1a_and_3():
    for line in PEAKS.split("\n")[1:-1]:
        mu, rho, n, peak, *curve = map(float, line.split())
        assert worst_group(mu, mu * rho) == (n, pytest.approx(peak, abs=5.1e-6)), line
        assert [tail_miss(mu, mu * rho, 2**k) for k in range(1, 8)] == pytest.approx(curve, abs=5.1e-5), line


def test_the_curve_of_figure_5():
    """The study's own start: a single right action is missed by nearly every group until there are 10^5 draws."""
    curve = [0, .4608, .8152, .9711, .9982, .9980, .9960, .9920, .9840, .9683, .9375, .8789, .7726, .5968, .3562, .1269, .0161, .000259]  # fmt: skip
    assert [tail_miss(0.64, 6.3e-5, 2**k) for k in range(18)] == pytest.approx(curve, abs=5.1e-5)
    assert tail_miss(0.64, 6.3e-5, 109_643) >= 1e-3 > tail_miss(0.64, 6.3e-5, 109_644)
    p = torch.softmax(Arm().logits().double(), 0)
    assert [float(p[:10_000].sum()), float(p[0]), float(p[1]), float(p[-1])] == pytest.approx(
        [0.630075, 4.65269e-4, 6.29673e-5, 3.13496e-6], rel=1e-5
    )
    assert worst_group(float(p[:10_000].sum()), float(p[1]))[0] == 19


def test_chances_are_right_to_twelve_digits_for_huge_groups_and_tiny_masses():
    """Against 80 decimal digits; the plain formula is off by up to .2 %, differences of powers gave 0 for small chances."""
    getcontext().prec = 80
    power = lambda x, n: x**n if x else Decimal(0)  # noqa: E731
    for mu in (2e-12, 1e-6, 0.3, 0.5, 0.63, 1 - 1e-6, 1 - 1e-13, 1.0):
        for tau, n in itertools.product((0.0, 1e-12, 6.3e-5, 0.2, mu), (2, 3, 8, 100, 2**17, 2**20)):
            if tau > mu:
                continue
            m, t = Decimal(mu), Decimal(tau)
            exact = float(power(1 - t, n) - power(m - t, n) - power(1 - m, n))
            assert tail_miss(mu, tau, n) == pytest.approx(exact, rel=1e-12, abs=1e-300), (mu, tau, n)
    assert sim.active(0.5, 1) == tail_miss(0.3, 0.1, 1) == 0


def test_the_worst_group_is_the_best_of_all_sizes():
    rng = np.random.default_rng(0)
    for _ in range(60):
        mu = rng.uniform(0.01, 0.99)
        tau = mu * 10 ** rng.uniform(-6, -0.01)
        best = max(range(1, 1500), key=lambda n: tail_miss(mu, tau, n))
        assert worst_group(mu, tau) == (best, tail_miss(mu, tau, best))
    for mu, tau in ((2e-6, 1e-12), (0.5, 1e-12), (1 - 1e-9, 1e-12)):  # where there are too many sizes to try
        n, chance = worst_group(mu, tau)
        assert all(tail_miss(mu, tau, m) <= chance * (1 + 1e-12) for m in (max(1, n // 2), n - 1, n + 1, 2 * n))
        assert 1e-6 < chance < 1
    for mu, tau in ((0.5, 0.0), (0.5, 0.5), (1.0, 0.1), (0.1, 0.5)):
        with pytest.raises(ValueError, match="0 < tau < mu < 1"):
            worst_group(mu, tau)


@pytest.mark.parametrize("mu, tau, n, exact, is_active", [
    (0.3, 0.015, 8, 0.82842296, 0.942286), (0.3, 0.06, 32, 0.13805641, 0.999989), (0.5, 0.05, 2, 0.45, 0.5),
    (0.8, 0.04, 16, 0.50801446, 0.971853), (0.2, 0.002, 64, 0.87973999, 0.999999), (0.6, 0.3, 4, 0.2064, 0.8448),
])  # fmt: skip
def test_tail_miss_as_worked_out_and_as_drawn(mu, tau, n, exact, is_active):
    assert tail_miss(mu, tau, n) == pytest.approx(exact, abs=5e-9)
    assert sim.active(mu, n) == pytest.approx(is_active, abs=5e-7)
    groups = 200_000
    rare, common, wrong = np.random.default_rng(n).multinomial(n, [tau, mu - tau, 1 - mu], groups).T
    mixed = (rare + common > 0) & (wrong > 0)
    for chance, seen in ((exact, mixed & (rare == 0)), (is_active, mixed)):
        assert abs(seen.mean() - chance) <= 4 * math.sqrt(chance * (1 - chance) / groups) + 1e-6


# p, how many are right, drawn, n, Rc, Rw, dQu (eq. 10), dQ (eq. 17), dQu by an exact softmax at the whole step; eta 0.1
STEPS = {
    "a": ([.30, .20, .10, .05, .20, .10, .05], 4, [0, 1, 4], 4, 1, -1, -2.11875e-4, 1.669375e-3, -2.131206e-4),
    "b": ([.30, .20, .10, .05, .20, .10, .05], 4, [0, 1, 4], 4, 1, 0, -2.78125e-4, 9.40625e-4, -2.783407e-4),
    "c": ([.30, .20, .10, .05, .20, .10, .05], 4, [2, 4, 5], 4, 1, -1, 6.7625e-4, 9.7875e-4, 6.752254e-4),
    "d": ([.05] * 8 + [.15] * 4, 8, [0, 1, 2, 8], 8, 1, -1, 4.6875e-5, 1.6875e-4, 4.681056e-5),
    "e": ([.40] + [.02] * 5 + [.25] * 2, 6, [0, 6], 2, 1, 0, -2.66e-4, 3.63e-3, -2.688912e-4),
    "f": ([.10] * 10, 5, [0, 1, 2, 3, 5, 6], 8, 1, -1, -2.5e-5, 3.75e-4, -2.504061e-5),
}  # fmt: skip


@pytest.mark.parametrize("case", STEPS)
def test_one_step_as_worked_out_and_as_a_softmax_moves(case):
    p, c, drawn, n, rc, rw, unsampled, total, whole = STEPS[case]
    p, right = np.array(p), np.arange(len(p)) < c
    drawn = [*drawn, drawn[0]]  # a repeat counts once
    got = one_step(p, right, drawn, n, 0.1, rc, rw)
    assert got == (pytest.approx(total, rel=1e-9), pytest.approx(unsampled, rel=1e-9))
    dz, hidden = sim.logit_step(p, right, drawn, n, 0.1, rc, rw), right.copy()
    hidden[drawn] = False

    def moved(scale):
        new = p * np.exp(scale * dz)
        return (new / new.sum() - p) / scale

    assert moved(1)[hidden].sum() == pytest.approx(whole, rel=1e-6)
    assert moved(1e-5)[hidden].sum() == pytest.approx(unsampled, rel=1e-4)
    assert moved(1e-5)[right].sum() == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("n, rw, unsampled, total", [
    (2, -1, -5.9643e-4, 2.0914e-3), (2, 0, -1.26696e-3, 8.9554e-4), (4, -1, -3.2914e-4, 1.44146e-3),
    (4, 0, -5.3850e-4, 7.3323e-4), (6, -1, -1.7785e-4, 1.09563e-3), (8, -1, -1.02772e-4, 8.7985e-4),
])  # fmt: skip
def test_one_step_over_all_groups(n, rw, unsampled, total):
    """The mean over every mixed group, by its chance: right mass rises while what was not drawn falls."""
    sums, chance = np.zeros(2), 0.0
    for group in itertools.combinations_with_replacement(range(6), n):
        if 0 < sum(RIGHT[i] for i in group) < n:
            ways = math.factorial(n) / math.prod(math.factorial(group.count(i)) for i in set(group))
            weight = ways * math.prod(P[i] for i in group)
            sums += weight * np.array(one_step(P, RIGHT, list(group), n, 0.1, 1, rw))
            chance += weight
    assert chance == pytest.approx(sim.active(0.7, n), rel=1e-12)
    assert sums / chance == pytest.approx([total, unsampled], rel=5e-5)


def test_sampled_mass_as_worked_out_and_as_drawn():
    """Lemma H.1, the same set as drawn groups give it, and the baseline of Corollary H.2, which never falls."""
    known = [0, .25, .39388, .48036, .53491, .57109, .59626, .61454, .62831]  # fmt: skip
    assert [sampled_mass(P[RIGHT], k) for k in range(9)] == pytest.approx(known, abs=5.1e-6)
    rng, n = np.random.default_rng(0), 8
    draws = rng.choice(6, (60_000, n), p=P)
    k, seen = (draws < 4).sum(1), np.zeros((60_000, 6), bool)
    np.put_along_axis(seen, draws, True, 1)
    for x in (4, 6):
        mass, s = seen[k == x][:, :4] @ P[:4], seen[k == x] @ np.where(RIGHT, P, -P)
        assert abs(mass.mean() - known[x]) < 4 * mass.std() / len(mass) ** 0.5
        assert abs(s.mean() - sim.expected_baseline(P, RIGHT, n, x)) < 4 * s.std() / len(s) ** 0.5
    base = [sim.expected_baseline(P, RIGHT, n, x, 1, 0) for x in range(n + 1)]
    assert base == sorted(base) and sampled_mass(np.array([0.3]), 5) == pytest.approx(0.3)
    even, three = np.full(10**6, 1e-12), 1e-12 * (3 - 3e-6 + 1e-12)  # a million tiny ones: 1 - (1 - 1e-6)^3 of 1e-6
    assert sampled_mass(even, 3) == pytest.approx(three, rel=1e-12, abs=0) and sampled_mass(
        even, 2**30
    ) == pytest.approx(1e-6)
    moment = np.where(seen, 0, P**2)
    error = 4 * moment.std(0) / len(draws) ** 0.5
    assert (np.abs(moment.mean(0) - sim.unsampled_moment(P, n)) < error).all()


def test_the_rate_multiplier_is_what_the_focal_weight_takes_on_average():
    """m_gamma against its integral: the mean of (1-mu)^gamma sqrt(mu (1-mu)) over that of sqrt(mu (1-mu))."""
    mu = (np.arange(200_000) + 0.5) / 200_000
    size = np.sqrt(mu * (1 - mu))
    for gamma in (0, 0.5, 1, 2, 3.7):
        assert low_rate(gamma) == pytest.approx(((1 - mu) ** gamma * size).sum() / size.sum(), rel=1e-6)


def test_retained_mass_counts_losses_only():
    p0, right = np.array([0.4, 0.2, 0.1, 0.3]), np.array([True, True, True, False])
    assert retained(p0, p0, right) == 1
    assert retained(p0, np.array([0.9, 0.1, 0.0, 0.0]), right) == pytest.approx(1 - 0.2 / 0.7)


# ---------------------------------------------------------------------------------------------------------------------
# One run


@pytest.mark.parametrize("surrogate", ["ratio", "prob"])
@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_the_gradient_is_that_of_the_surrogate(surrogate, gamma):
    """Against autograd through the softmax, draw by draw, with repeats."""
    group = [0, 0, 0, 2, 5, 5, 7]  # actions 0 to 2 are right
    z = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    p = torch.softmax(z, 0)
    reward = torch.tensor([1.0 if i < 3 else -1.0 for i in group], dtype=torch.float64)
    term = p[group] / p[group].detach() if surrogate == "ratio" else p[group]
    (((1 - 4 / 7) ** gamma) * ((reward - reward.mean()) * term).mean()).backward()
    counts = torch.bincount(torch.tensor(group), minlength=8)
    assert gradient(counts, p.detach(), 3, gamma, surrogate).tolist() == pytest.approx(z.grad.tolist(), abs=1e-15)
    for alike in ([0, 1, 1], [4, 7, 7]):
        counts = torch.bincount(torch.tensor(alike), minlength=8)
        assert not gradient(counts, p.detach(), 3, gamma, surrogate).any()


def test_draws_follow_the_masses():
    """Chi-square over 400 groups; what has no mass is never drawn, and the order of the uniforms leaves no trace."""
    mass = np.array([0.5, 0.0, 2.0, 1.0, 0.25, 0.0])
    rng, n = np.random.default_rng(3), 500
    counts = np.array([sim.draw(mass.cumsum(), n, rng) for _ in range(400)])
    assert (counts.sum(1) == n).all() and not counts[:, mass == 0].any()
    p = (mass / mass.sum())[mass > 0]
    chi = ((counts.sum(0)[mass > 0] - 400 * n * p) ** 2 / (400 * n * p)).sum()
    assert chi < 16.3  # 3 degrees of freedom, one in a thousand
    assert counts[:, 2].var() / (n * p[1] * (1 - p[1])) == pytest.approx(1, abs=0.3)


TENTH = Arm(actions=12_800, right=1_000)
# n, gamma, surrogate -> Q, retained mass: known from another program
KNOWN = {
    (2, 0.0, "ratio"): ((0.654, 0.01), (0.965, 0.01)),
    (64, 0.0, "ratio"): ((0.995, 0.003), (0.043, 0.01)),
    (64, 1.0, "ratio"): ((0.979, 0.01), (0.143, 0.03)),
    (2_048, 0.0, "ratio"): ((0.999, 0.002), (0.088, 0.03)),
    (2_048, 1.0, "ratio"): ((0.966, 0.01), (0.983, 0.04)),
    (16_384, 0.0, "ratio"): ((0.994, 0.003), (0.998, 0.004)),
    (16_384, 0.0, "prob"): ((0.99, 0.01), (0.03, 0.03)),  # the paper's own surrogate gives all to the anchor
}


@pytest.mark.parametrize("n, gamma, surrogate", KNOWN)
def test_a_tenth_of_the_study_has_the_three_regimes(n, gamma, surrogate):
    """Slow, concentrated, retained; the focal weight keeps more where it concentrates. 1,000 steps each."""
    got = sim.simulate(replace(TENTH, n=n, gamma=gamma, surrogate=surrogate))["trace"]
    q, kept = KNOWN[n, gamma, surrogate]
    assert got["q"][0] == pytest.approx(0.6314, abs=1e-4) and got["retained"][0] == 1 and got["step"][-1] == 1000
    assert (got["q"][-1], got["retained"][-1]) == (pytest.approx(q[0], abs=q[1]), pytest.approx(kept[0], abs=kept[1]))


def test_a_run_depends_on_its_settings_only():
    """Same arm, same numbers; another seed, others. Two draws: every mixed group has weight 1/2, which Adam does not see."""
    arm = Arm(n=2, actions=1_280, right=100, steps=40, seed=5)
    a, b, focal, other, fast, decayed = (
        sim.simulate(replace(arm, **new))
        for new in ({}, {}, {"gamma": 1.0}, {"seed": 6}, {"lr": 0.1}, {"lr": 0.1, "optimizer": "adamw"})
    )
    assert a["trace"] == b["trace"] != other["trace"]
    assert focal["trace"]["q"] == pytest.approx(a["trace"]["q"], abs=1e-6) and 5 < a["active"] < 35
    assert decayed["trace"]["q"][-1] < fast["trace"]["q"][-1] - 1e-3  # weight decay draws all logits together


# ---------------------------------------------------------------------------------------------------------------------
# The command

TINY = Arm(actions=128, right=10, steps=20)


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """A study of a few milliseconds per run, in this process."""
    monkeypatch.setitem(sim.SCALES, "small", Scale(TINY, [2, 8, 32], [2, 32], [4], [0, 1]))

    class Here:
        def __init__(self, *_, **__):
            self.submitted = []

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda *_: None  # noqa: E731

        def submit(self, function, out, arm):
            function(out, arm)
            ran.append(arm)
            return SimpleNamespace(result=lambda: None)

    ran: list[Arm] = []
    monkeypatch.setattr(sim.concurrent.futures, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(sim.concurrent.futures, "as_completed", list)
    handlers: dict = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    return SimpleNamespace(
        out=str(tmp_path), ran=ran, handlers=handlers, go=lambda *argv: sim.main([*argv, "--out", str(tmp_path)])
    )


def test_a_study_runs_what_is_missing_and_reports_the_rest_as_it_was(tiny, capsys):
    tiny.go()
    text = open(f"{tiny.out}/small.md").read()
    assert len(tiny.ran) == len(set(tiny.ran)) == 2 * (6 + 2 * 3 + 1)  # ratio with Adam is in the first table already
    pictures = {n for n in os.listdir(tiny.out) if n.endswith(".png")}
    if importlib.util.find_spec("matplotlib"):
        assert pictures == {"small.png", "small_brorl.png"}
    else:
        assert "no figures: pip install" in capsys.readouterr().out and not pictures
    gone = replace(TINY, n=8, gamma=1.0, seed=1)
    before = json.load(open(gone.path(tiny.out)))
    os.remove(gone.path(tiny.out))
    tiny.ran.clear()
    tiny.go()
    assert tiny.ran == [gone] and json.load(open(gone.path(tiny.out)))["trace"] == before["trace"]
    cells = next(line.split("|")[2:-1] for line in text.splitlines() if line.startswith("| 8 |"))
    q = [json.load(open(replace(TINY, n=8, seed=s).path(tiny.out)))["trace"]["q"][-1] for s in (0, 1)]
    assert cells[0].strip() == f"{np.mean(q):.4f} +- {np.std(q, ddof=1):.4f}"
    again = [line for line in open(f"{tiny.out}/small.md") if "CPU seconds" not in line]
    assert again == [line + "\n" for line in text.split("\n")[:-1] if "CPU seconds" not in line]


def test_a_damaged_result_is_named_not_trusted(tiny, capsys):
    tiny.go("--seeds", "0")
    path = replace(TINY, n=8).path(tiny.out)
    with open(path, "w") as f:
        f.write('{"arm": ')
    with pytest.raises(SystemExit) as e:
        tiny.go("--seeds", "0")
    assert e.value.code == 2 and path in (err := capsys.readouterr().err) and "delete it" in err


def test_without_matplotlib_there_are_tables_and_one_line(tiny, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    tiny.go("--seeds", "3")
    out = capsys.readouterr().out
    assert out.count("no figures: pip install -r requirements-plots.txt") == 1 and "| 32 |" in out
    assert not [n for n in os.listdir(tiny.out) if n.endswith(".png")]


def test_a_sweep_shows_the_start_of_each_first_policy(tiny, capsys):
    tiny.go("--sweep", "right", "10", "64", "--seeds", "0")
    rows = [line.split("|")[1:-1] for line in open(f"{tiny.out}/small_right.md") if line[:3] in ("| 1", "| 6")]
    for row, right in zip(rows, (10, 64), strict=True):
        z = np.exp([5.0] + [3.0] * (right - 1) + [0.0] * (128 - right))
        assert float(row[0]) == right and float(row[1]) == pytest.approx(z[:right].sum() / z.sum(), abs=5.1e-5)
    assert len(tiny.ran) == 2 * 3 * 2


@pytest.mark.parametrize("words, said", [
    (["colour", "3"], "--sweep takes one of actions, right, z_anchor, z_right"), (["right"], "and the values to try"),
    (["right", "2.5"], "every value must be whole"), (["z_right", "high"], "every value must be a number"),
    (["right", "128"], "below actions (128)"), (["z_right", "nan"], "a logit within 50"), (["right", "0"], "at least 1"),
])  # fmt: skip
def test_a_wrong_sweep_is_refused_in_one_line(tiny, capsys, words, said):
    with pytest.raises(SystemExit) as e:
        tiny.go("--sweep", *words)
    err = capsys.readouterr().err
    assert e.value.code == 2 and said in err and err.count("\n") == 1 and not tiny.ran


@pytest.mark.parametrize("flags", [["--seeds", "1", "1"], ["--seeds", "-1"], ["--jobs", "0"]])
def test_wrong_seeds_and_jobs_are_refused(tiny, flags):
    with pytest.raises(SystemExit) as e:
        tiny.go(*flags)
    assert e.value.code == 2 and not tiny.ran


def test_sigterm_stops_as_ctrl_c_does(tiny, monkeypatch):
    """It becomes an exit in the main thread, and one while runs are on says how to go on."""
    tiny.go("--seeds", "0")
    with pytest.raises(SystemExit, match="SIGTERM"):
        tiny.handlers[signal.SIGTERM](signal.SIGTERM, None)
    monkeypatch.setattr(sim.concurrent.futures, "as_completed", tiny.handlers[signal.SIGTERM])
    monkeypatch.setattr(sim.concurrent.futures.ProcessPoolExecutor, "shutdown", lambda *_, **how: calls.append(how), raising=False)  # fmt: skip
    calls: list[dict] = []
    with pytest.raises(SystemExit, match="stopped: SIGTERM; the same command goes on"):
        tiny.go("--seeds", "1")
    assert calls == [{"wait": True, "cancel_futures": True}]


def faked(kept: dict, q_end=0.9) -> tuple[Scale, Results]:
    """Results that were not run: gamma -> retained mass at the end, by size."""
    scale = Scale(TINY, [2, 8, 32], [2, 32], [4], [0])
    arms = [replace(TINY, n=n, gamma=g) for n in scale.sizes for g in (0.0, 1.0)]
    return scale, Results([
        {"arm": vars(a), "seconds": 1, "trace": {"q": [0.6, q_end], "retained": [1.0, kept[a.gamma][scale.sizes.index(a.n)]]}}
        for a in arms])  # fmt: skip


def test_a_cell_is_mean_and_sample_deviation():
    got = Results([{"arm": vars(replace(TINY, seed=s)), "seconds": 1, "trace": {"q": [0.1, q]}} for s, q in ((0, 0.5), (1, 0.7))])  # fmt: skip
    assert got.cell(TINY, "q", [0, 1]) == "0.6000 +- 0.1414" and got.cell(TINY, "q", [1], 2) == "0.70"


@pytest.mark.parametrize("kept, q_end, held", [
    ({0.0: [0.9, 0.1, 1.0], 1.0: [0.9, 0.3, 1.0]}, 0.9, "yes yes yes yes yes"),
    ({0.0: [1.0, 0.1, 1.0], 1.0: [1.0, 0.1, 1.0]}, 0.6, "no yes yes no no"),
    ({0.0: [0.9, 0.5, 0.1], 1.0: [0.9, 0.5, 0.3]}, 0.9, "yes no no no yes"),
])  # fmt: skip
def test_claims_are_judged_by_the_numbers(kept, q_end, held):
    rows = sim.claims(*faked(kept, q_end), [0])[2:-1]
    assert [r.split("|")[2].strip() for r in rows] == held.split()


def test_a_stopped_command_keeps_what_was_done(tmp_path):
    """A real process, stopped as Ctrl-C stops it, workers and all: every file it leaves is whole and is found again, also that of
    the run that was on."""
    command = [sys.executable, "simulate.py", "--jobs", "1", "--seeds", "0", "--out", str(tmp_path)]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)  # fmt: skip
    files = lambda: [os.path.join(d, n) for d, _, names in os.walk(tmp_path) for n in names if n.endswith(".json")]  # noqa: E731
    until = time.monotonic() + 200
    while not files() and child.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGINT)
    err = child.communicate(timeout=200)[1]
    assert child.returncode == 1 and "stopped: KeyboardInterrupt; the same command goes on" in err, err
    assert "Traceback" not in err, err
    made = [json.load(open(f)) for f in files()]
    assert 1 <= len(made) < 45 and all(sim.load(str(tmp_path), Arm(**r["arm"])) == r for r in made)
    first = [
        replace(TENTH, n=16_384, **new) for new in ({}, {"gamma": 1.0}, {"optimizer": "adamw"}, {"surrogate": "prob"})
    ]
    there = [os.path.exists(a.path(str(tmp_path))) for a in first]
    assert there == sorted(there, reverse=True) and sum(there) >= 2  # in order, none lost on the way
    assert not [n for _, _, names in os.walk(tmp_path) for n in names if n.endswith(".tmp")]
