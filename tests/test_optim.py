"""AdamW with moments in bfloat16 against torch's in float32: the same path, half the bytes, nothing lost on average, and a run
that goes on exactly. Left out: how a whole training run fares (test_train.py does a short one)."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import optim
from run import load_optimizer, optimizer_state


def quadratic(
    make, steps: int, w: nn.Parameter | None = None
) -> tuple[nn.Parameter, list[float], torch.optim.Optimizer]:
    """Steps down a noisy quadratic of 64 dimensions whose curvatures span three decades; the losses without the noise."""
    g = torch.Generator().manual_seed(0)
    curvature, goal = torch.logspace(-2, 1, 64), torch.randn(64, generator=g)
    w = nn.Parameter(torch.zeros(64)) if w is None else w
    optimizer, losses = make([w]), []
    for _ in range(steps):
        away = w.detach() - goal
        losses.append(float((curvature * away**2).sum() / 2))
        w.grad = curvature * (away + 0.3 * torch.randn(64, generator=g))
        optimizer.step()
    return w, losses, optimizer


HOW = dict(lr=0.01, betas=(0.9, 0.999), weight_decay=0.01)


def test_it_takes_the_path_of_torch():
    """400 steps: every weight within 2 % of the way made of where float32 moments bring it, the losses within 2 %."""
    ours, losses, a = quadratic(lambda p: optim.AdamW(p, **HOW), 400)
    theirs, expected, b = quadratic(lambda p: torch.optim.AdamW(p, **HOW), 400)
    assert (ours - theirs).abs().max() < 0.02 * theirs.abs().max()
    assert losses == pytest.approx(expected, rel=0.02) and expected[-1] < 0.1 * expected[0]
    for key in ("exp_avg", "exp_avg_sq"):
        x, y = a.state[ours][key].float(), b.state[theirs][key]
        assert (x - y).norm() < 0.1 * y.norm()
    assert not torch.equal(ours, theirs), "the two were one"


def test_half_the_bytes():
    w, _, ours = quadratic(lambda p: optim.AdamW(p, **HOW), 1)
    v, _, theirs = quadratic(lambda p: torch.optim.AdamW(p, **HOW), 1)
    size = [
        sum(x.numel() * x.element_size() for k, x in s.items() if k != "step") for s in (ours.state[w], theirs.state[v])
    ]
    assert size == [64 * 2 * 2, 64 * 2 * 4]


def test_small_changes_are_not_lost_on_average():
    """A second moment that grows by 0.1 % a step: to the nearest it would stand still at half of its goal or before."""
    w = nn.Parameter(torch.zeros(5000))
    optimizer, nearest = optim.AdamW([w], **HOW), torch.tensor(0.0, dtype=torch.bfloat16)
    for _ in range(1500):
        w.grad = torch.ones(5000)
        optimizer.step()
        nearest = (nearest.float() * 0.999 + 0.001).bfloat16()
    goal = 1 - 0.999**1500
    assert float(optimizer.state[w]["exp_avg_sq"].float().mean()) == pytest.approx(goal, rel=2e-3)
    assert float(nearest) < 0.5 * goal


@pytest.mark.parametrize("x", [1.001, -1.001, 3e-5, -7.7e20])
def test_rounding_is_right_on_average_and_keeps_what_bfloat16_can_hold(x):
    n = 200_000
    got = optim.rounded(torch.full((n,), x), optim.noise(0, n, 3, torch.device("cpu")) & 0xFFFF).double()
    low, high = got.min(), got.max()
    assert low < x < high and ((got == low) | (got == high)).all() and (high - low) < abs(x) / 127
    assert float(got.mean()) == pytest.approx(torch.tensor(x).item(), abs=4 * float(high - low) / n**0.5)
    same = torch.full((100,), x).bfloat16()
    assert torch.equal(optim.rounded(same.float(), torch.full((100,), 0xFFFF)), same)


def test_noise_is_fair_and_independent():
    """Of neighbours, of parameters, of steps; both fields of 16 bits."""
    a, b = (optim.noise(0, 100_000, seed, torch.device("cpu")) for seed in (7, 8))
    fields = [(x >> shift & 0xFFFF).double() / 2**16 for x in (a, b) for shift in (0, 16)]
    for i, x in enumerate(fields):
        assert float(x.mean()) == pytest.approx(0.5, abs=0.005) and float(x.var()) == pytest.approx(1 / 12, rel=0.02)
        for y in (*fields[:i], x.roll(1)):
            assert abs(float(torch.corrcoef(torch.stack([x, y]))[0, 1])) < 0.015


def test_a_run_repeats_and_goes_on_exactly(tmp_path):
    """Through the functions that run.py saves and loads with: the file holds bfloat16, and so does what was loaded."""
    grads = torch.randn(30, 64, generator=torch.Generator().manual_seed(2))

    def start(seed: int, at: torch.Tensor):
        w = nn.Parameter(at.clone())
        return w, optim.AdamW([w], **HOW, seed=seed)

    def go(w, optimizer, some) -> torch.Tensor:
        for g in some:
            w.grad = g
            optimizer.step()
        return w.detach()

    whole, again, other = (go(*start(seed, torch.zeros(64)), grads) for seed in (5, 5, 6))
    assert torch.equal(whole, again) and not torch.equal(whole, other)
    w, optimizer = start(5, torch.zeros(64))
    go(w, optimizer, grads[:12])
    torch.save(optimizer_state(optimizer, True), tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    v, resumed = start(5, w.detach())
    load_optimizer(resumed, saved)
    for state in (saved["state"][0], resumed.state[v]):
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    assert torch.equal(go(v, resumed, grads[12:]), whole)


def test_a_shard_is_rounded_as_its_part_of_the_whole(monkeypatch):
    """Rank 2 of 4 has rows 6 to 9 of 10 x 3 (FSDP2: three each, the last rank one), in pieces of 4 numbers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.setattr(optim, "PIECE", 4)
    start, grads = torch.randn(10, 3), torch.randn(5, 10, 3)

    def run(cut):
        w = nn.Parameter(cut(start.clone()))
        optimizer = optim.AdamW([w], **HOW)
        for g in grads:
            w.grad = cut(g)
            optimizer.step()
        return [optim.local(x) for x in (w, *(optimizer.state[w][k] for k in ("exp_avg", "exp_avg_sq")))]

    whole = run(lambda x: x)
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        part = run(
            lambda x: DTensor.from_local(x[6:9], mesh, [Shard(0)], run_check=False, shape=x.shape, stride=x.stride())
        )
    finally:
        dist.destroy_process_group()
    for a, b in zip(part, whole):
        assert torch.equal(a, b.view(10, 3)[6:9].flatten())
