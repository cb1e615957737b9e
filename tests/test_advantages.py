"""Rewards -> advantages -> tokens: baselines, spreads of zero, groups in any order. Each test tells a fault's story."""

import pytest
import torch

from config import Config
from losses import METHODS, advantages, count_units, denominators, policy_loss, spread, unit_weights

KINDS = [("mean", "none"), ("mean", "std"), ("mean", "batch_std"), ("loo", "none"), ("none", "none")]
ROWS = sorted(
    {(r.baseline, r.scale) for r in METHODS.values() if r.baseline not in ("critic", "pairs")}
)  # others: test_methods.py


def tensor(*x) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def draw(groups=4, size=5, units=2):
    """Rewards (B,U) whose level differs from group to group, everything scorable, and the groups."""
    g = torch.Generator().manual_seed(1)
    group = torch.arange(groups).repeat_interleave(size)
    reward = torch.rand(groups * size, units, generator=g, dtype=torch.float64) + 3 * group[:, None]
    return reward, torch.ones_like(reward, dtype=torch.bool), group


def test_the_kinds_tried_here_cover_every_method():
    """A new row with a new baseline or scale must join the list above."""
    assert set(ROWS) <= set(KINDS)


@pytest.mark.parametrize(("baseline", "scale"), KINDS)
def test_shuffled_rows_with_group_ids_give_the_same_advantages(baseline, scale):
    """F19: a reshape in the wrong order compared the answers to one prompt with those to another."""
    reward, valid, group = draw()
    order = torch.randperm(len(group), generator=torch.Generator().manual_seed(2))
    valid[3, 0] = valid[7, 1] = False
    straight = advantages(reward, valid, group, baseline, scale)
    shuffled = advantages(reward[order], valid[order], group[order], baseline, scale)
    torch.testing.assert_close(shuffled, straight[order], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("baseline", "scale"), [k for k in KINDS if k[0] != "none"])
def test_groups_with_different_means_each_sum_to_zero(baseline, scale):
    """F19: with one mean over the batch the model learns that easy prompts are good, whatever it answers to them."""
    reward, valid, group = draw()
    adv = advantages(reward, valid, group, baseline, scale)
    sums = torch.zeros(4, 2, dtype=adv.dtype).index_add(0, group, adv)
    torch.testing.assert_close(sums, torch.zeros_like(sums), rtol=0, atol=1e-12)
    assert adv.abs().min() > 0


def test_a_group_is_a_label_and_not_an_index():
    """F19: group ids may be any integers; only who shares one matters."""
    reward, valid, group = draw()
    renamed = torch.tensor([900, -5, 7, 0])[group]
    torch.testing.assert_close(advantages(reward, valid, renamed), advantages(reward, valid, group), rtol=0, atol=1e-12)


def test_one_hit_in_eight_by_hand():
    """The figures of the GRPO paper's setting: 2.47 for the hit and -0.35 for the others belong to the sample deviation."""
    reward = tensor(1, 0, 0, 0, 0, 0, 0, 0)[:, None]
    valid, group = reward >= 0, torch.zeros(8, dtype=torch.int64)
    by = {k: advantages(reward, valid, group, *k, eps=0.0)[:2, 0].tolist() for k in KINDS}
    assert by["mean", "std"] == pytest.approx([2.474873734152916, -0.3535533905932738], abs=1e-12)
    assert by["mean", "batch_std"] == pytest.approx(by["mean", "std"], abs=1e-12)  # one group is the batch
    assert by["mean", "none"] == pytest.approx([7 / 8, -1 / 8], abs=1e-15)
    assert by["loo", "none"] == pytest.approx([1, -1 / 7], abs=1e-15)
    assert by["none", "none"] == [1, 0]
    population = advantages(reward, valid, group, "mean", "std", eps=0.0, ddof=0)
    assert population[:2, 0].tolist() == pytest.approx([7**0.5, -(7**-0.5)], abs=1e-12)


@pytest.mark.parametrize(("baseline", "scale"), [k for k in KINDS if k[0] != "none"])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -1 / 3, 1e6 + 0.1])
def test_equal_rewards_give_an_advantage_and_a_gradient_of_exactly_zero(baseline, scale, value):
    """F21: the mean of three times 0.1 is not 0.1, and the rounding error divided by eps became a signal."""
    reward = torch.full((6, 1), value, dtype=torch.float64)
    reward[3:] = tensor(0, 1, 2)[:, None]
    group, ids = torch.tensor([0, 0, 0, 1, 1, 1]), torch.ones(6, 4, dtype=torch.int64)
    adv = advantages(reward, reward > -9, group, baseline, scale, eps=1e-12)
    assert adv[:3].tolist() == [[0.0]] * 3 and adv[3:].abs().sum() > 0
    logp = torch.full((6, 4), -1.0, dtype=torch.float64, requires_grad=True)
    denom = denominators(ids, "seq_mean", 1, 4, group)
    policy_loss(logp, logp.detach(), spread(adv, ids), ids, denom, METHODS["grpo"], 24)[0].backward()
    assert (logp.grad[:3] == 0).all() and (logp.grad[3] != 0).all()


@pytest.mark.parametrize(("baseline", "scale"), [k for k in KINDS if k[0] != "none"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_a_group_of_one_gets_zero_and_no_nan(baseline, scale, ddof):
    """F21: the sample deviation of one number is NaN; others gave a lone sample its raw reward as advantage."""
    reward, group = tensor(3.5, 1.0, 0.0, 7.0)[:, None], torch.tensor([0, 1, 1, 2])
    valid = torch.tensor([True, True, True, True])[:, None]
    adv = advantages(reward, valid, group, baseline, scale, ddof=ddof)
    assert adv[[0, 3], 0].tolist() == [0, 0] and adv[1] > 0 and adv[2] < 0
    valid[2] = False  # group 1 has one scorable sample left
    assert advantages(reward, valid, group, baseline, scale, ddof=ddof).abs().sum() == 0


@pytest.mark.parametrize(("baseline", "scale"), KINDS)
def test_a_batch_without_anything_scorable_gives_zeros(baseline, scale):
    """F22: a step in which every reward is NaN must not stop the run or poison the weights."""
    reward, group = torch.full((4, 2), float("nan"), dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    assert advantages(reward, ~reward.isnan(), group, baseline, scale).tolist() == [[0.0, 0.0]] * 4
    assert advantages(reward[:0], ~reward[:0].isnan(), group[:0], baseline, scale).shape == (0, 2)


@pytest.mark.parametrize(("baseline", "scale"), [k for k in KINDS if k[1] != "batch_std"])
def test_an_unscorable_sample_leaves_the_statistics_and_nothing_else(baseline, scale):
    """F22: NaN marks a sample without a reward: the rest of its group is compared without it, other groups are untouched."""
    reward, valid, group = draw()
    clean = advantages(reward, valid, group, baseline, scale)
    reward[2, 0] = float("nan")
    adv = advantages(reward, ~reward.isnan(), group, baseline, scale)
    keep = torch.arange(len(group)) != 2
    alone = advantages(reward[keep], valid[keep], group[keep], baseline, scale)
    torch.testing.assert_close(adv[keep, 0], alone[:, 0], rtol=0, atol=1e-12)
    torch.testing.assert_close(adv[5:], clean[5:], rtol=0, atol=1e-12)
    assert adv[2, 0] == 0 and torch.equal(adv[:, 1], clean[:, 1])


def test_a_sample_masked_after_scoring_still_counts_in_the_baseline():
    """F22: dropping cut-off samples before the mean biased the survivors; masking happens on tokens, after the baseline."""
    reward, valid, group = draw(2, 3, 1)
    adv, ids = advantages(reward, valid, group), torch.ones(6, 4, dtype=torch.int64)
    grads = []
    for masked in (False, True):
        ids[1] = 0 if masked else 1
        logp = torch.full((6, 4), -1.0, dtype=torch.float64, requires_grad=True)
        denom = denominators(ids, "seq_mean", 1, 4, group)  # an empty row counts among the rows
        policy_loss(logp, logp.detach(), spread(adv, ids), ids, denom, METHODS["grpo"], 20)[0].backward()
        grads.append(logp.grad)
    others = [0, 2, 3, 4, 5]
    assert torch.equal(grads[0][others], grads[1][others]) and (grads[1][1] == 0).all() and (grads[0][1] != 0).all()


@pytest.mark.parametrize(("baseline", "scale"), KINDS)
def test_units_are_normalised_apart(baseline, scale):
    """The reward of the ranking must not leak into the advantage of the slate."""
    reward, valid, group = draw()
    other = reward.clone()
    other[:, 1] = reward[:, 1] ** 2 * 10 - 5
    a, b = (advantages(r, valid, group, baseline, scale) for r in (reward, other))
    assert torch.equal(a[:, 0], b[:, 0]) and not torch.equal(a[:, 1], b[:, 1])


def test_weights_and_credit_by_hand():
    """own: unit u gets weight u times A_u; causal: what follows counts too; one unit: no difference."""
    adv = tensor([2.0, -1.0, 3.0], [0.0, 4.0, 0.0])
    assert unit_weights(adv, [1.0, 0.5, 2.0]).tolist() == [[2.0, -0.5, 6.0], [0.0, 2.0, 0.0]]
    assert unit_weights(adv, [1.0, 0.5, 2.0], "causal").tolist() == [[7.5, 5.5, 6.0], [2.0, 2.0, 0.0]]
    assert torch.equal(unit_weights(adv[:, :1], [1.0], "causal"), adv[:, :1])


def test_spread_by_hand():
    """Unit u of a row puts its number on the row's tokens of unit u; unit 0 gets 0, even beside NaN."""
    ids = torch.tensor([[1, 1, 0, 2], [2, 0, 0, 0]])
    per_unit = tensor([5.0, -3.0], [float("nan"), 7.0])
    assert spread(per_unit, ids).tolist() == [[5.0, 5.0, 0.0, -3.0], [7.0, 0.0, 0.0, 0.0]]


def test_every_method_has_a_known_unit():
    """How many units of a sample carry a reward, by the row's `unit`."""
    tags = "<P> </P> <S> </S> <R> </R>".split()
    known = {"sequence": 1, "token": 1, "phase": 3, "rank": 7}
    for row in METHODS.values():
        assert count_units(row, Config(tags=tags, slate_size=7)) == known[row.unit]


@pytest.mark.parametrize(("baseline", "scale"), KINDS)
def test_inputs_are_bit_identical_after_the_calls(baseline, scale):
    """F37: an in-place edit of a view changed what the next consumer saw."""
    reward, valid, group = draw()
    reward[0, 0], valid[0, 0] = float("nan"), False
    ids = torch.randint(0, 3, (20, 6), generator=torch.Generator().manual_seed(0))
    inputs = [reward, valid, group, ids]
    before = [(x.clone(), x._version) for x in inputs]
    adv = advantages(reward, valid, group, baseline, scale)
    kept = adv.clone()
    for credit in ("own", "causal"):
        unit_weights(adv, [1.0, 0.5], credit)
    spread(adv, ids)
    denominators(ids, "unit_mean", 2, 6, group, apart=True)
    assert torch.equal(adv, kept)
    for x, (was, version) in zip(inputs, before):
        assert x._version == version and torch.equal(x.nan_to_num(99.0) if x.is_floating_point() else x,
                                                     was.nan_to_num(99.0) if x.is_floating_point() else was)  # fmt: skip
