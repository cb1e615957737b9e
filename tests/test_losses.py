"""Advantages -> one number: ratios, clipping, KL, and sums that do not depend on how a step was cut."""

from dataclasses import replace

import pytest
import torch

from config import Config
from losses import (
    AGGREGATES,
    METHODS,
    Cap,
    advantages,
    denominators,
    kl_estimate,
    log_ratio,
    policy_loss,
    resolve,
    spread,
    surrogate,
    unit_weights,
)
from model import completion_logp, token_logp

ROW = METHODS["grpo"]
RATIOS = ["none", "token", "unit", "sequence", "sequence_token"]


def units_of(row) -> int:
    """U in these tests: one, or the two units of their step."""
    return 1 if row.unit in ("sequence", "token") else 2


def tensor(*x) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


class Step:
    """A small optimiser step: 7 rows in 3 groups, ragged, interior gaps, an empty row, two units; off policy."""

    def __init__(self, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.tensor([
            [1, 1, 1, 0, 2, 2, 0, 0, 0], [1, 0, 2, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 2, 2, 2],
            [0, 0, 0, 0, 0, 0, 0, 0, 0], [2, 2, 2, 0, 0, 0, 0, 0, 0], [0, 1, 1, 0, 0, 2, 0, 0, 0],
            [1, 0, 0, 0, 0, 0, 0, 0, 0],
        ])  # fmt: skip
        self.group = torch.tensor([0, 1, 0, 1, 2, 0, 2])
        self.kl_ids = (self.ids > 0).long()
        shape = self.ids.shape

        def noise(scale):
            return scale * torch.randn(shape, generator=g, dtype=torch.float64)

        self.logp = -1 - noise(1.0).abs()
        self.old, self.ref = self.logp + noise(0.3), self.logp + noise(0.5)
        self.adv = spread(torch.randn(7, 2, generator=g, dtype=torch.float64), self.ids)
        self.tokens = int((self.ids > 0).sum())

    def denoms(self, aggregate, apart=False):
        return (
            denominators(self.ids, aggregate, 2, 8, self.group, apart),
            denominators(self.kl_ids, aggregate, 1, 8, self.group),
        )

    def run(self, rows, row, denom, kl_denom, beta=0.1):
        """Loss, metrics and gradient of some rows, with divisors counted over all."""
        logp = self.logp[rows].requires_grad_()
        loss, metrics = policy_loss(logp, self.old[rows], self.adv[rows], self.ids[rows], denom[rows], row, self.tokens,
                                    self.ref[rows], self.kl_ids[rows], kl_denom[rows], beta)  # fmt: skip
        return loss.detach(), metrics, torch.autograd.grad(loss, logp)[0]


# ---------------------------------------------------------------------------------------------------------------------
# One number, however the step is cut


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_micro_batches_of_any_size_give_the_gradient_of_the_whole(aggregate, apart):
    """F27: each micro-batch divided by its own tokens, so the result depended on its size and long answers lost weight."""
    step, row = Step(), replace(ROW, aggregate=aggregate)
    denom, kl_denom = step.denoms(aggregate, apart)
    whole = step.run(torch.arange(7), row, denom, kl_denom)
    assert whole[2].abs().sum() > 0
    for size in (1, 2, 3):
        parts = [step.run(rows, row, denom, kl_denom) for rows in torch.arange(7).split(size)]
        torch.testing.assert_close(torch.cat([p[2] for p in parts]), whole[2], rtol=0, atol=1e-14)
        torch.testing.assert_close(sum(p[0] for p in parts), whole[0], rtol=0, atol=1e-14)
        for key in whole[1]:  # what is logged is summed over micro-batches too
            torch.testing.assert_close(sum(p[1][key] for p in parts), whole[1][key], rtol=0, atol=1e-14)


HAND = {  # divisors of the step below: row 0 has 3 tokens of unit 1 and 1 of unit 2; row 1 one of unit 2; row 2 none
    "token_mean": [5, 5, 5], "seq_mean": [3 * 4, 3 * 4, 3 * 1], "seq_mean_nonempty": [2 * 4, 2 * 4, 2 * 1],
    "seq_sum": [3, 3, 3], "group_sum": [2, 2, 2], "const_len": [3 * 8, 3 * 8, 3 * 8], "unit_mean": [3 * 2 * 3, 3 * 2 * 1, 3 * 2 * 1],
    "unit_mean_present": [3 * 2 * 3, 3 * 2 * 1, 3 * 1 * 1], "group_token_mean": [2 * 4, 2 * 4, 2 * 1],
}  # fmt: skip
APART = {  # each unit has its own normaliser: 3 tokens of unit 1, 2 of unit 2 in the step
    **HAND, "token_mean": [3, 2, 2], "seq_mean": [3 * 3, 3 * 1, 3 * 1], "seq_mean_nonempty": [2 * 3, 2 * 1, 2 * 1],
    "group_token_mean": [2 * 3, 2 * 1, 2 * 1],
}  # fmt: skip


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_gradient_of_a_step_written_by_hand(aggregate, apart):
    """F28: framework and loss both divided by the accumulation steps; here the gradient is -A / divisor and nothing else."""
    ids = torch.tensor([[1, 1, 1, 2], [2, 0, 0, 0], [0, 0, 0, 0]])
    logp = torch.full((3, 4), -2.0, dtype=torch.float64, requires_grad=True)
    adv = tensor([0.5, 0.5, 0.5, -3.0], [2.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0])
    denom = denominators(ids, aggregate, 2, 8, torch.tensor([4, 9, 9]), apart)
    policy_loss(logp, logp.detach(), adv, ids, denom, ROW, 5)[0].backward()
    a, b, c = (APART if apart else HAND)[aggregate]
    expected = tensor([-0.5 / a, -0.5 / a, -0.5 / a, 3.0 / b], [-2.0 / c, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(logp.grad, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_divisors_of_two_ranks_are_those_of_one_process(aggregate, apart):
    """F29: averaging local means made the result depend on the number of GPUs; here 2 ranks hold unequal tokens."""
    step = Step()
    parts = [(step.group != 1).nonzero()[:, 0], (step.group == 1).nonzero()[:, 0]]  # groups never cross ranks
    sent: list[list] = [[], []]

    def counts(rank, total):
        rows = parts[rank]
        return denominators(step.ids[rows], aggregate, 2, 8, step.group[rows], apart, total)

    for rank in (0, 1):
        counts(rank, lambda x: (sent[rank].append(x), x)[1])  # noqa: B023
    whole = step.denoms(aggregate, apart)[0]
    for rank in (0, 1):
        sums = iter([a + b for a, b in zip(*sent)])
        assert torch.equal(counts(rank, lambda x: next(sums)), whole[parts[rank]])  # noqa: B023


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_ten_more_columns_of_padding_change_nothing(aggregate, ratio):
    """F30: Dr.GRPO's constant was the padded width of the batch, so the length bias it removes stayed."""
    step, row = Step(), replace(ROW, aggregate=aggregate, ratio=ratio)
    narrow = step.run(torch.arange(7), row, *step.denoms(aggregate))
    for name in ("ids", "kl_ids", "logp", "old", "ref", "adv"):
        x = getattr(step, name)
        setattr(step, name, torch.nn.functional.pad(x, (0, 10), value=0 if "ids" in name else float("nan")))
    wide = step.run(torch.arange(7), row, *step.denoms(aggregate))
    torch.testing.assert_close(wide[0], narrow[0], rtol=0, atol=1e-14)
    torch.testing.assert_close(wide[2], torch.nn.functional.pad(narrow[2], (0, 10)), rtol=0, atol=1e-14)
    assert {k: v.item() for k, v in wide[1].items()} == pytest.approx(
        {k: v.item() for k, v in narrow[1].items()}, abs=1e-14
    )


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_masking_every_row_gives_loss_zero_and_no_nan(aggregate, ratio):
    """F22: a step whose samples were all filtered divided 0 by 0; whatever stands at untrained places must not matter."""
    step = Step()
    step.ids, step.kl_ids = torch.zeros_like(step.ids), torch.zeros_like(step.ids)
    for x, junk in (
        (step.logp, float("nan")),
        (step.old, float("inf")),
        (step.ref, -float("inf")),
        (step.adv, float("nan")),
    ):
        x[:] = junk
    loss, metrics, grad = step.run(torch.arange(7), replace(ROW, ratio=ratio), *step.denoms(aggregate))
    assert loss == 0 and (grad == 0).all() and all(v == 0 for v in metrics.values())


@pytest.mark.parametrize("ratio", RATIOS)
def test_numbers_at_untrained_places_reach_neither_value_nor_gradient(ratio):
    """F22: nan times 0 is nan, so a mask that multiplies lets one padded position spoil the step."""
    clean, dirty = Step(), Step()
    for x, junk in (
        (dirty.logp, float("nan")),
        (dirty.old, float("inf")),
        (dirty.ref, float("nan")),
        (dirty.adv, float("nan")),
    ):
        x[dirty.ids == 0] = junk
    results = [s.run(torch.arange(7), replace(ROW, ratio=ratio), *s.denoms("seq_mean")) for s in (clean, dirty)]
    assert results[0][0] == results[1][0] and torch.equal(results[0][2], results[1][2])
    assert results[0][1] == results[1][1]


# ---------------------------------------------------------------------------------------------------------------------
# Rows of the table


def trained(row, lam=1.0):
    """One on-policy step of a method on random rewards -> loss, metrics, gradient by token, unit_ids."""
    step, units = Step(), units_of(row)
    ids = step.ids if units > 1 else (step.ids > 0).long()
    reward = torch.rand(7, units, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    if row.source == "demo":
        reward = torch.ones_like(reward)
    adv = advantages(reward, torch.ones_like(reward, dtype=torch.bool), step.group, row.baseline, row.scale)
    token_adv = spread(unit_weights(adv, [1.0, lam][:units]), ids)
    denom = denominators(ids, row.aggregate, units, 8, step.group, row.unit == "phase")
    logp = step.logp.requires_grad_()
    loss, metrics = policy_loss(logp, logp.detach(), token_adv, ids, denom, row, step.tokens)
    return loss, metrics, torch.autograd.grad(loss, logp)[0], ids


@pytest.mark.parametrize("ratio", ["", *RATIOS])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_moves_every_trained_token(name, ratio):
    """F26: one importance level returned a constant, and in that configuration alone nothing ever moved."""
    row = replace(METHODS[name], ratio=ratio or METHODS[name].ratio)
    loss, _, grad, ids = trained(row)
    assert torch.isfinite(loss) and torch.isfinite(grad).all()
    assert (grad[ids > 0] != 0).all() and (grad[ids == 0] == 0).all()


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "fgrpo"])
def test_a_loss_of_zero_at_the_first_update_is_no_lack_of_a_gradient(name):
    """F24: at ratio 1 the advantages of a group cancel in the loss; only its halves by sign and the gradient inform."""
    ids = torch.ones(6, 4, dtype=torch.int64) if units_of(METHODS[name]) == 1 else torch.tensor([[1, 1, 2, 2]] * 6)
    units, group = units_of(METHODS[name]), torch.tensor([0, 0, 0, 1, 1, 1])
    reward = torch.rand(6, units, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    adv = spread(advantages(reward, reward >= 0, group, METHODS[name].baseline, METHODS[name].scale), ids)
    logp = torch.full((6, 4), -1.5, dtype=torch.float64, requires_grad=True)
    denom = denominators(ids, METHODS[name].aggregate, units, 8, group)
    loss, metrics = policy_loss(logp, logp.detach(), adv, ids, denom, METHODS[name], 24)
    loss.backward()
    assert abs(loss.item()) < 1e-15 and logp.grad.norm() > 1e-2
    assert metrics["loss_pos"] < -1e-2 and metrics["loss_neg"] > 1e-2
    assert (metrics["loss_pos"] + metrics["loss_neg"]).item() == pytest.approx(0, abs=1e-15)
    assert metrics["clip_low"] == metrics["clip_high"] == metrics["ratio_gap"] == 0


def test_the_configuration_changes_single_columns_of_a_row():
    """clip_low alone leaves the row's clip_high; a row without clipping gets one only when asked."""
    assert all(resolve(Config(method=m)) == row for m, row in METHODS.items())
    got = resolve(Config(method="grpo", clip_high=0.28, ratio="sequence", aggregate="token_mean"))
    assert got == replace(ROW, clip=(0.2, 0.28), ratio="sequence", aggregate="token_mean")
    assert resolve(Config(method="rloo", ratio="token", clip_low=0.1)).clip == (0.1, 0.2)
    assert resolve(Config(method="grpo", clip_low=0.0)).clip == (0.0, 0.2)
    assert resolve(Config(method="cispo", cispo_cap=3.0, clip_high=0.1)).clip == Cap(0, 3.0)


# ---------------------------------------------------------------------------------------------------------------------
# Ratio and clip


@pytest.mark.parametrize(
    ("ratio", "adv", "low", "high"), [(1.5, 1.0, 0, 1), (1.5, -1.0, 0, 0), (0.5, -1.0, 1, 0), (0.5, 1.0, 0, 0)]
)
def test_a_token_counts_as_clipped_only_when_its_gradient_is_gone(ratio, adv, low, high):
    """F23: counting ratios outside the band whatever the sign reported large clipping where nothing was clipped."""
    ids, denom = torch.tensor([[1, 0]]), torch.ones(1, 2, dtype=torch.float64)
    logp = tensor([ratio, 7.0]).log().requires_grad_()
    loss, metrics = policy_loss(logp, torch.zeros(1, 2, dtype=torch.float64), tensor([adv, adv]), ids, denom, ROW, 1)
    loss.backward()
    assert (metrics["clip_low"].item(), metrics["clip_high"].item()) == (low, high)
    assert (logp.grad[0, 0] == 0) == bool(low or high)
    assert metrics["ratio_gap"].item() == pytest.approx(0.5)


def test_clip_shares_are_of_all_trained_tokens_of_the_step():
    """F23: of the 10 tokens of a step two here are beyond their bound above, one below; each side has its own bound."""
    ids = torch.tensor([[1, 1, 1, 1, 1, 1, 0]])
    logp, adv = tensor([1.3, 1.4, 0.75, 0.7, 1.25, 0.85, 9.0]).log(), tensor([1.0, 1.0, -1.0, 1.0, 1.0, -1.0, 1.0])
    row = replace(ROW, clip=(0.2, 0.28))
    _, metrics = policy_loss(logp, torch.zeros_like(logp), adv, ids, torch.ones_like(logp), row, 10)
    assert (metrics["clip_low"].item(), metrics["clip_high"].item()) == (0.1, 0.2)


@pytest.mark.parametrize("aggregate", ["seq_mean", "unit_mean"])
def test_sequences_of_length_1_and_100_with_one_ratio_count_alike(aggregate):
    """F31: a (B,1) loss times a (B,T) mask, token-averaged, weighted each sequence by its length."""
    ids = torch.zeros(2, 100, dtype=torch.int64)
    ids[0, 0], ids[1] = 1, 1
    logp = torch.full((2, 100), 0.1, dtype=torch.float64, requires_grad=True)
    denom = denominators(ids, aggregate, 1, 100, torch.tensor([0, 0]))
    per_token, r = surrogate(logp, torch.zeros_like(logp), spread(tensor([1.0], [1.0]), ids), ids, "sequence", None)
    assert torch.allclose(r[ids > 0], tensor(0.1).exp())
    shares = (per_token / denom).sum(1)
    grad = torch.autograd.grad(shares.sum(), logp)[0].sum(1)
    assert shares[0].item() == pytest.approx(shares[1].item(), abs=1e-15)
    assert grad[0].item() == pytest.approx(grad[1].item(), abs=1e-15) and grad[0] < 0


@pytest.mark.parametrize("level", ["unit", "sequence"])
def test_the_ratio_of_a_long_sequence_is_a_mean(level):
    """F32: the log-probs of 500 tokens, each 0.01 apart, were summed: a ratio of 148 where 1.01 is meant."""
    ids, old = torch.ones(1, 500, dtype=torch.int64), torch.full((1, 500), -2.0, dtype=torch.float64)
    r = log_ratio(old + 0.01, old, ids, level).exp()
    torch.testing.assert_close(r, torch.full_like(r, 1.0100501670841682), rtol=0, atol=1e-12)


def test_ratios_by_level_by_hand():
    """token: each its own; unit: the mean over the unit; sequence: over the row's trained tokens; 0 elsewhere."""
    ids, old = torch.tensor([[1, 1, 0, 2], [0, 0, 0, 0]]), torch.zeros(2, 4, dtype=torch.float64)
    new = tensor([0.1, 0.3, 9.0, 0.8], [1.0, 1.0, 1.0, 1.0])
    expected = {"token": [0.1, 0.3, 0.0, 0.8], "unit": [0.2, 0.2, 0.0, 0.8], "sequence": [0.4, 0.4, 0.0, 0.4]}
    for level, row in expected.items():
        torch.testing.assert_close(log_ratio(new, old, ids, level), tensor(row, [0.0] * 4), rtol=0, atol=1e-15)


@pytest.mark.parametrize("gap", [200.0, -200.0, float("inf")])
@pytest.mark.parametrize("ratio", ["token", "unit", "sequence"])
def test_absurd_ratios_stay_finite(gap, ratio):
    """F34: a token that became impossible for one of the two policies overflowed exp, in value or gradient."""
    ids, adv = torch.tensor([[1, 1, 2]]), tensor([1.0, 1.0, -1.0])
    logp = tensor([-1.0, gap, -1.0]).requires_grad_()
    per_token, r = surrogate(logp, torch.full_like(logp, -1.0), adv, ids, ratio, (0.2, 0.2))
    per_token.sum().backward()
    assert all(torch.isfinite(x).all() for x in (per_token, r, logp.grad))


# ---------------------------------------------------------------------------------------------------------------------
# KL


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kl_ratio", [False, True])
@pytest.mark.parametrize("gap", [200.0, -200.0])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_a_reference_200_nats_away_gives_finite_loss_and_gradient(kind, gap, kl_ratio, dtype):
    """F34: exp(ref - new) overflowed; clamping after exp still gave a gradient of 0 times inf."""
    ids, ones = torch.tensor([[1, 1]]), torch.ones(1, 2, dtype=dtype)
    logp = (-0.5 * ones).requires_grad_()
    ref = torch.tensor([[gap, -0.7]], dtype=dtype)
    loss, metrics = policy_loss(logp, -ones, ones, ids, ones, ROW, 2, ref, ids, ones, 0.1, kind, kl_ratio)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logp.grad).all() and torch.isfinite(metrics["kl"])


def kl_gradients(kind, kl_ratio=False, on_policy=True):
    """Expected gradient of the KL term over every token of a categorical policy, and the exact ones of both divergences."""
    g = torch.Generator().manual_seed(4)
    z, z_ref, z_old = (torch.randn(6, generator=g, dtype=torch.float64) for _ in range(3))
    z.requires_grad_()
    logp, ref, old = (
        z.log_softmax(0),
        z_ref.log_softmax(0),
        z.detach().log_softmax(0) if on_policy else z_old.log_softmax(0),
    )
    ids, zero = torch.ones(6, 1, dtype=torch.int64), torch.zeros(6, 1, dtype=torch.float64)
    # row v is the token v; dividing it by 1 / probability makes the loss an expectation over the sampling policy
    loss, _ = policy_loss(logp[:, None], old[:, None], zero, 0 * ids, zero + 1, ROW, 1, ref[:, None], ids, 1 / old.exp()[:, None],
                          1.0, kind, kl_ratio)  # fmt: skip
    reverse, forward = (logp.exp() * (logp - ref)).sum(), (ref.exp() * (ref - logp)).sum()
    return [torch.autograd.grad(x, z, retain_graph=True)[0] for x in (loss, reverse, forward)]


def close(a, b) -> bool:
    return torch.allclose(a, b, rtol=0, atol=1e-12)


def test_expected_gradients_of_the_kl_estimators_on_policy():
    """F35: k1 in the loss does nothing on average, k2 descends the reverse KL, plain k3 the forward KL."""
    k1, reverse, forward = kl_gradients("k1")
    assert close(k1, torch.zeros_like(k1)) and not close(reverse, forward) and reverse.norm() > 0.1
    assert close(kl_gradients("k2")[0], reverse)
    assert close(kl_gradients("k3")[0], forward) and not close(kl_gradients("k3")[0], reverse)


@pytest.mark.parametrize("on_policy", [True, False])
def test_the_ratio_makes_k1_and_k3_right_on_and_off_policy(on_policy):
    """F35: without the importance ratio the KL of stale samples pulls elsewhere; with it, k1 and k3 are exact, k2 is not."""
    for kind in ("k1", "k3"):
        got, reverse, _ = kl_gradients(kind, True, on_policy)
        assert close(got, reverse)
    got, reverse, _ = kl_gradients("k2", True, on_policy)
    assert not close(got, reverse)
    if not on_policy:
        assert not any(close(*kl_gradients(kind, False, False)[:2]) for kind in ("k1", "k2", "k3"))


def test_the_logged_kl_is_the_one_in_the_loss():
    """With beta, loss = surrogate + beta times the logged KL, importance ratio included."""
    step, row = Step(), replace(ROW, ratio="token")
    denom, kl_denom = step.denoms("token_mean")
    for kl_ratio in (False, True):
        plain, full = (
            policy_loss(
                step.logp,
                step.old,
                step.adv,
                step.ids,
                denom,
                row,
                step.tokens,
                step.ref,
                step.kl_ids,
                kl_denom,
                beta,
                "k3",
                kl_ratio,
            )
            for beta in (0.0, 0.3)
        )
        assert plain[1]["kl"] == full[1]["kl"] > 0  # logged without a weight too
        assert full[0].item() == pytest.approx((plain[0] + 0.3 * full[1]["kl"]).item(), abs=1e-14)


# ---------------------------------------------------------------------------------------------------------------------
# No function writes into what it was given


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("kl_ratio", [False, True])
def test_inputs_of_the_loss_are_bit_identical_afterwards(ratio, kl_ratio):
    """F37: x[mask] = 0 on a view changed the labels that the next consumer read."""
    step = Step()
    denom, kl_denom = step.denoms("seq_mean")
    inputs = [step.logp, step.old, step.adv, step.ids, denom, step.ref, step.kl_ids, kl_denom]
    before = [(x.clone(), x._version) for x in inputs]
    step.logp.requires_grad_()
    loss, _ = policy_loss(*inputs[:5], replace(ROW, ratio=ratio), step.tokens, *inputs[5:], 0.1, "k3", kl_ratio)
    loss.backward()
    for kind in ("k1", "k2", "k3"):
        kl_estimate(step.logp, step.ref, kind)
    assert all(torch.equal(x, was) and x._version == version for x, (was, version) in zip(inputs, before))


def test_inputs_of_the_log_probs_are_bit_identical_afterwards(tiny_model):
    """F37: logits.div_(temperature) scaled the logits once more for everyone who came after."""
    logits = torch.randn(2, 3, 5)
    logits[0, 0, 1] = -torch.inf
    tokens, kept = torch.tensor([[0, 1, 2], [3, 4, 0]]), logits.clone()
    token_logp(logits, tokens, 0.7, entropy=True)
    assert torch.equal(logits, kept) and logits._version == 1 and tokens.tolist() == [[0, 1, 2], [3, 4, 0]]
    prompts, mask, group = [[5, 6, 7], [8]], torch.tensor([[1, 1, 0], [1, 1, 1]]).bool(), torch.tensor([1, 0])
    inputs = [tokens, mask, group]
    before = [(x.clone(), x._version) for x in inputs]
    completion_logp(tiny_model, prompts, *inputs, temperature=0.7, entropy=True)
    assert prompts == [[5, 6, 7], [8]]
    assert all(torch.equal(x, was) and x._version == version for x, (was, version) in zip(inputs, before))
