"""Golden numbers: every case of tests/golden/*.json (or of the folder GOLDEN_DIR), through the product's own functions.

A runner takes a case's inputs by name and returns what it can compute, under the names of the file. A file without a
runner, an input no runner takes and an expected number no runner returns are failures: nothing is passed over unseen.
"""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rewards
from eval import list_variants, mean_by_request, paired_bootstrap, ranking_metrics
from losses import (
    METHODS,
    Cap,
    advantages,
    best_of,
    denominators,
    focal_weight,
    gae,
    informative,
    kl_estimate,
    length_control,
    log_ratio,
    policy_loss,
    spread,
    success_rate,
    tail_miss,
    unit_weights,
)
from model import token_logp
from passk import pass_at_k
from simulate import active, worst_group

FOLDER = Path(os.environ.get("GOLDEN_DIR") or Path(__file__).parent / "golden")
CASES = [
    (path.stem, case) for path in sorted(FOLDER.glob("*.json")) for case in json.loads(path.read_text("utf-8"))["cases"]
]


def tensor(x) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def integers(x) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.int64)


# ---------------------------------------------------------------------------------------------------------------------
# Advantages


VARIANTS = {
    "mean_std_ddof0": ("mean", "std", 0), "mean_std_ddof1": ("mean", "std", 1), "mean_only": ("mean", "none", 1),
    "leave_one_out": ("loo", "none", 1), "batch_std_ddof0": ("mean", "batch_std", 0), "batch_std_ddof1": ("mean", "batch_std", 1),
}  # fmt: skip


def all_variants(reward, valid, group, eps) -> dict[str, torch.Tensor]:
    return {k: advantages(reward, valid, group, base, scale, eps, ddof) for k, (base, scale, ddof) in VARIANTS.items()}


def adv_group(rewards, group_ids, valid, eps):
    out = all_variants(tensor(rewards)[:, None], integers(valid)[:, None] > 0, integers(group_ids), eps)
    return {k: v[:, 0] for k, v in out.items()}


def adv_phase(slate_rewards, rank_rewards, valid_format, format_penalty, group_ids, lam, eps, phase_ids):
    both = torch.stack([tensor(slate_rewards), tensor(rank_rewards)], 1)
    both = torch.where(integers(valid_format)[:, None] > 0, both, format_penalty)
    group, scorable = integers(group_ids), torch.ones_like(both, dtype=torch.bool)
    out = all_variants(both, scorable, group, eps)
    joint = advantages(both @ tensor([[1.0], [lam]]), scorable[:, :1], group, "mean", "none", eps)
    return {
        **{name: {k: v[:, u] for k, v in out.items()} for u, name in enumerate(("slate", "rank"))},
        "joint": joint[:, 0], "token_advantages": spread(out["mean_only"], integers(phase_ids)),
    }  # fmt: skip


def adv_rank(rewards, group_ids, num_ranks, eps, rank_ids):
    known = tensor([[math.nan if r is None else r for r in row] for row in rewards])
    present, group = ~known.isnan(), integers(group_ids)
    zero = all_variants(known.nan_to_num(), torch.ones_like(present), group, eps)
    tokens = spread(zero["mean_std_ddof1"], integers(rank_ids) + 1)
    return {
        "missing_zero": zero,
        "missing_excluded": all_variants(known, present, group, eps),
        "token_advantages": tokens,
    }


def adv_rank_length_control(item_advantages, unit_ids, eos_index, num_ranks, end_value, early_value, overflow_value):
    ids = (integers(unit_ids) + 1).clamp(max=num_ranks + 1)
    end = torch.tensor([[t == at for t in range(ids.shape[1])] for at in eos_index])
    adv = spread(torch.nn.functional.pad(tensor(item_advantages), (0, 1)), ids)
    out = length_control(adv, ids, end, num_ranks, (end_value, early_value, overflow_value))
    return {"token_advantages": torch.where(ids > 0, out, 0)}


def by_group(x, group) -> list:
    """A number of each group (of its rows, which agree), in increasing order of id."""
    return [x[group == g][0].item() for g in group.unique()]


def adv_focal(rewards, correct, group_ids, gamma, eps):
    group, every = integers(group_ids), torch.ones(len(rewards), 1, dtype=torch.bool)
    rate = success_rate(tensor(correct)[:, None], every, group)
    weight = focal_weight(rate, gamma)
    out = {k: (weight * v)[:, 0] for k, v in all_variants(tensor(rewards)[:, None], every, group, eps).items()}
    return out | {"success_rate": by_group(rate, group), "weight": by_group(weight, group)}


def adv_gfpo(rewards, lengths, group_ids, k, metric, eps):
    reward, length, group = tensor(rewards), tensor(lengths), integers(group_ids)
    score = {"shortest": length, "token_efficiency": -reward / length.clamp(min=1)}[metric]
    keep = best_of(score, group, k)
    out = all_variants(reward[:, None], keep[:, None], group, eps)
    return {k: v[:, 0] for k, v in out.items()} | {"keep": keep.long()}


def adv_dynamic_sampling(rewards, correct, valid, group_ids):
    group, valid = integers(group_ids), integers(valid)[:, None] > 0
    spread_of, mixed = (informative(tensor(x)[:, None], valid, group).long() for x in (rewards, correct))
    kept = by_group(mixed, group)
    return {"keep_by_variance": by_group(spread_of, group), "keep_by_accuracy": kept,
            "keep_rows": (mixed * valid)[:, 0], "effective_fraction": sum(kept) / len(kept)}  # fmt: skip


def golden_gae(rewards, values, mask, gamma, lam, last_value):
    adv, returns = gae(tensor(rewards), tensor(values), integers(mask), gamma, lam, tensor(last_value))
    return {"advantages": adv, "returns": returns}


def golden_tail_miss(tau, mu, N=None, N_max=None):
    if N_max is None:
        return {"miss": tail_miss(mu, tau, N), "active": active(mu, N)}
    best, miss = worst_group(mu, tau)
    return {"argmax_N": best, "miss_at_argmax": miss}


# ---------------------------------------------------------------------------------------------------------------------
# Losses


def per_token(loss, ones) -> torch.Tensor:
    """The tokens' shares of a loss that divides them by `ones`: each share is minus the derivative by its divisor."""
    return -torch.autograd.grad(loss, ones, retain_graph=True)[0]


AGGREGATES = {"rank_mean": "unit_mean", "rank_mean_present": "unit_mean_present"}  # others have the same name
MODES = "seq_mean seq_mean_nonempty token_mean const_len rank_mean rank_mean_present".split()


def ranks_of(mask, rank_ids, num_ranks) -> torch.Tensor:
    """unit_ids of lists: positions from 1, and num_ranks + 1 for what belongs to none."""
    inside = (rank_ids >= 0) & (rank_ids < num_ranks)
    return torch.where(mask > 0, torch.where(inside, rank_ids + 1, num_ranks + 1), 0)


def units_of(mode, mask, rank_ids, num_ranks) -> tuple[torch.Tensor, int, torch.Tensor]:
    """unit_ids, U and the tokens that count (bool) of an aggregation mode: positions of a list, or the row as one unit."""
    if not mode.startswith("rank"):
        return mask, 1, mask > 0
    ids = ranks_of(mask, rank_ids, num_ranks)
    return ids, num_ranks, (ids > 0) & (ids <= num_ranks)


def token_loss(
    logp_new, logp_old, advantages, mask, rank_ids, num_ranks, const_length, eps_low=0.0, eps_high=0.0,
    logp_ref=None, beta=0.0, kl_importance_weight=False, global_token_count=None, dual_c=0.0, ratio="token", clip=None,
):  # fmt: skip
    logp, old, mask, ranks = tensor(logp_new).requires_grad_(), tensor(logp_old), integers(mask), integers(rank_ids)
    row = replace(METHODS["grpo"], ratio=ratio, clip=clip or (eps_low, eps_high))
    adv = tensor(advantages)
    adv = spread(adv[:, None], mask) if adv.dim() == 1 else adv
    group = torch.zeros(len(mask), dtype=torch.int64)
    # shares of a sequence's ratio count rows, those of a token's or unit's count tokens
    count = denominators(mask, "seq_mean" if ratio.startswith("sequence") else "token_mean", 1, 1, group)
    levels = ranks_of(mask, ranks, num_ranks) if ratio == "unit" else mask

    def run(ids, denom, counts):
        ref = None if logp_ref is None else tensor(logp_ref)
        return policy_loss(logp, old, torch.where(counts, adv, 0), ids, denom, row, count, ref, counts.long(), denom, beta, "k3",
                           kl_importance_weight, dual_c)  # fmt: skip

    ones = torch.ones_like(logp).requires_grad_()
    loss, metrics = run(levels, ones, mask > 0)
    out = {"per_token_loss": per_token(loss, ones), "loss": {}, "grad": {},
           "clip_fraction": {k: metrics[f"clip_{k}"] for k in ("low", "high", "dual") if f"clip_{k}" in metrics},
           "ratio": log_ratio(logp, old, levels, ratio).exp()}  # fmt: skip
    for mode in MODES + ["token_mean_global"] * (global_token_count is not None):
        ids, units, counts = units_of(mode, mask, ranks, num_ranks)
        kind, total = AGGREGATES.get(mode, mode), lambda x: x
        if mode == "token_mean_global":  # a share of a larger batch: as if other ranks held the rest
            kind, total = "token_mean", lambda x: x * global_token_count / x.sum().clamp(min=1)
        denom = denominators(ids, kind, units, const_length, group, total=total)
        loss, metrics = run(levels if ratio == "unit" else ids, denom, counts)
        out["loss"][mode], out["grad"][mode] = loss, torch.autograd.grad(loss, logp)[0]
        if mode == "token_mean" and "kl" in metrics:
            out["mean_kl"] = metrics["kl"]
    return out


def first(x, mask) -> list[float | None]:
    """The number at each row's first token of a mask; None for a row without."""
    return [next((v for v, m in zip(*row) if m), None) for row in zip(x.tolist(), mask.tolist())]


def loss_gspo(**inputs):
    out = token_loss(**inputs, ratio="sequence")
    ratio = first(out["ratio"], integers(inputs["mask"]))
    return out | {"sequence_ratio": [1.0 if r is None else r for r in ratio]}


def loss_gspo_token(**inputs):
    return token_loss(**inputs, ratio="sequence_token")


def loss_rank(token_advantages, **inputs):
    out = token_loss(advantages=token_advantages, **inputs, ratio="unit")
    ids = ranks_of(integers(inputs["mask"]), integers(inputs["rank_ids"]), inputs["num_ranks"])
    per_rank = [first(out["ratio"], ids == k + 1) for k in range(inputs["num_ranks"])]
    return out | {"rank_ratio": [list(row) for row in zip(*per_rank)]}


def loss_cispo(w_min, w_max, **inputs):
    return token_loss(**inputs, clip=Cap(-math.inf if w_min is None else w_min, math.inf if w_max is None else w_max))


def loss_phase(
    logp_new, logp_old, logp_ref, phase_ids, kl_mask, slate_advantages, rank_advantages, lam, beta, ratio_level,
    const_length, eps_low, eps_high,
):  # fmt: skip
    logp, old, ids, kl_ids = tensor(logp_new).requires_grad_(), tensor(logp_old), integers(phase_ids), integers(kl_mask)
    ref = None if logp_ref is None else tensor(logp_ref)
    row = replace(METHODS["fgrpo"], ratio={"token": "token", "phase": "unit"}[ratio_level], clip=(eps_low, eps_high))
    adv, group = (
        torch.stack([tensor(slate_advantages), tensor(rank_advantages)], 1),
        torch.zeros(len(ids), dtype=torch.int64),
    )
    out = {"loss": {}, "grad": {}}
    for mode in ("seq_mean", "token_mean", "const_len"):
        denom = denominators(ids, mode, 2, const_length, group, apart=True)
        kl_denom = denominators(kl_ids, mode, 1, const_length, group)

        def run(weights, beta):
            token_adv = spread(unit_weights(adv, weights), ids)
            return policy_loss(logp, old, token_adv, ids, denom, row, 1.0, ref, kl_ids, kl_denom, beta)  # noqa: B023

        total, metrics = run([1.0, lam], beta)
        out["loss"][mode] = {"slate": run([1.0, 0.0], 0.0)[0], "rank": run([0.0, 1.0], 0.0)[0], "total": total}
        if "kl" in metrics:
            out["loss"][mode]["kl"] = metrics["kl"]
        out["grad"][mode] = torch.autograd.grad(total, logp)[0]
    return out


def aggregation(per_token_loss, mask, rank_ids, num_ranks, const_length, group_ids):
    x, mask, ranks = tensor(per_token_loss).requires_grad_(), integers(mask), integers(rank_ids)
    minus = -torch.ones_like(x)  # the score function -A log pi with A = -1 is the number itself
    out = {"loss": {}, "weights": {}}
    for mode in [*MODES, "group_token_mean"]:
        ids, units, counts = units_of(mode, mask, ranks, num_ranks)
        denom = denominators(ids, AGGREGATES.get(mode, mode), units, const_length, integers(group_ids))
        loss, _ = policy_loss(x, minus, torch.where(counts, minus, 0), ids, denom, METHODS["rloo"], 1.0)
        out["loss"][mode], out["weights"][mode] = loss, torch.autograd.grad(loss, x)[0]
    return out


# ---------------------------------------------------------------------------------------------------------------------
# KL, log-probs


def kl_estimators(logp_new, logp_ref, logp_old, mask):
    logp, ref, old, mask = tensor(logp_new).requires_grad_(), tensor(logp_ref), tensor(logp_old), integers(mask)
    out = {"value": {}, "grad": {}, "token_mean": {}}
    for name in ("k1", "k2", "k3", "k3_weighted"):

        def run(denom):
            nothing = torch.zeros_like(mask)  # no token carries a surrogate: the KL term alone
            return policy_loss(logp, old, old, nothing, torch.ones_like(logp), METHODS["grpo"], 1.0, ref, mask, denom,
                               1.0, name[:2], name.endswith("weighted"))[0]  # noqa: B023  # fmt: skip

        ones = torch.ones_like(logp).requires_grad_()
        loss = run(ones)
        out["value"][name], out["grad"][name] = per_token(loss, ones), torch.autograd.grad(loss, logp)[0]
        out["token_mean"][name] = run(denominators(mask, "token_mean", 1, 1, torch.zeros(len(mask), dtype=torch.int64)))
    return out


def kl_expectation(logits_new, logits_ref):
    logits, every = tensor(logits_new).requires_grad_(), torch.arange(len(logits_new))
    logp, ref = (token_logp(x.expand(len(x), -1), every, 1.0)[0] for x in (logits, tensor(logits_ref)))
    mean = {k: (logp.exp() * kl_estimate(logp, ref, k)).sum() for k in ("k1", "k2", "k3")}
    on_policy = (logp.exp().detach() * kl_estimate(logp, ref, "k2")).sum()  # its gradient is the KL's
    grad = torch.autograd.grad(on_policy, logits)[0]
    return {"kl": mean["k1"], **{f"mean_{k}": v for k, v in mean.items()}, "kl_grad_logits": grad}


def logits_logprob_entropy(logits, tokens, mask, temperature):
    z = tensor([[[-math.inf if x is None else x for x in place] for place in row] for row in logits]).requires_grad_()
    mask = integers(mask)
    logp, entropy = (torch.where(mask > 0, x, 0) for x in token_logp(z, integers(tokens), temperature, entropy="grad"))
    denom = denominators(mask, "token_mean", 1, 1, torch.zeros(len(mask), dtype=torch.int64))
    return {"logp": logp, "entropy": entropy, "entropy_token_mean": (entropy / denom).sum(),
            "grad_logp_sum": torch.autograd.grad(logp.sum(), z, retain_graph=True)[0],
            "grad_entropy_sum": torch.autograd.grad(entropy.sum(), z)[0]}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Metrics and set rewards


def golden_ranking_metrics(ranked, relevance, ks):
    by_gain = {g: ranking_metrics(ranked, relevance, ks, g) for g in ("binary", "linear", "exp")}
    binary = by_gain["binary"]
    at = {}
    for k in ks:
        at[str(k)] = {m: binary[f"{m}@{k}"] for m in ("recall", "precision", "hit", "mrr")}
        at[str(k)] |= {f"ndcg_{g}": v[f"ndcg@{k}"] for g, v in by_gain.items()}
        at[str(k)]["dcg_binary"] = rewards.dcg(ranked, relevance, k)
    return {"at": at, "mrr_full": binary["mrr"]}


def request_metrics(requests, k):
    request, rows = [], []
    for i, r in enumerate(requests):
        for gold in filter(None, r["responders"]):
            request.append(i)
            rows.append(ranking_metrics(r["ranked"], dict.fromkeys(gold, 1.0), [k]))
    out = {"rows": len(rows)}
    for m in ("recall", "ndcg"):
        out[f"per_row_{m}"], out[f"per_request_{m}"] = mean_by_request([row[f"{m}@{k}"] for row in rows], request)
    return out


def slate_rewards(slate, utility, order, k):
    got = rewards.slate_scores(slate, utility)
    final = [slate[i] for i in dict.fromkeys(order) if 0 <= i < len(slate)]
    if len(set(slate)) == len(slate):  # then the parser reads the same list from 1-based positions
        lines = ["<S>", *slate, "</S>", "<R>", *(str(i + 1) for i in order), "</R>"]
        assert rewards.parse("\n".join(lines), ["<S>", "</S>", "<R>", "</R>"]).ranking == final
    names = {"precision": "precision_unique", "f1": "f1_unique", "utility": "normalised_utility"}
    relevant = {i: 1.0 for i, u in utility.items() if u > 0}
    return {names.get(key, key): v for key, v in got.items()} | {
        "final": final,
        "ndcg_at_k": rewards.ndcg(final, relevant, k),
    }


def golden_paired_bootstrap(a, b, level, rng, resamples, indices=None, seed=None, cluster_ids=None):
    assert rng == ("pcg64" if indices is None else "given")
    got = paired_bootstrap(a, b, level, resamples, seed, indices, cluster_ids)
    means = got.pop("means")
    assert len(means) == resamples
    return got | {"significant": int(got["significant"]), "first_resample_means": means.tolist()}


def golden_pass_at_k(n, k=None, c=None, correct=None, ks=None):
    if correct is None:
        return {"pass_at_k": pass_at_k(n, c, k)}
    return {"mean_pass_at_k": {str(k): sum(pass_at_k(n, c, k) for c in correct) / len(correct) for k in ks}}


def overlong_punishment(lengths, max_length, cache):
    return {"punishment": [rewards.overlong(n, max_length, cache) for n in lengths]}


# ---------------------------------------------------------------------------------------------------------------------
# Lists


def causal_returns(rel, num_ranks, Gamma):
    log = rewards.causal_returns(rel, num_ranks, "log")
    exp = rewards.causal_returns(rel, num_ranks, "exp", float(Gamma))
    return {"dcg_return": log, "dcg_total": log[0], "exp_return": exp}


def responder_rewards(items, responders, catalog, seen, subset):
    fit = rewards.eligible(items, catalog, seen)
    hits = rewards.drawn([i if e else None for i, e in zip(items, fit)], responders)
    n, union = len(responders), set().union(*responders)
    count = [sum(i in s for s in responders) for i in items]
    found = [sum(column) for column in zip(*hits)]
    out = {name: [rewards.consensus(c, n, a) for c in found] for name, a in (("union", 0), ("mean", 1))}
    return {
        **out, "eligible": fit, "count": count, "drawn": [[float(h) for h in row] for row in hits],
        "subset": [sum(hits[r][k] for r in subset) / len(subset) for k in range(len(items))],
        "union_list_reward": sum(out["union"]), "recall_union": sum(out["union"]) / len(union) if union else 0.0,
    }  # fmt: skip


def pairs(entries) -> list:
    return [tuple(e) for e in entries]


def title_match(line, ground_truth, catalog, seen, year_tolerance):
    parsed, catalog = rewards.parse_line(line), None if catalog is None else pairs(catalog)
    (hit,) = rewards.match([parsed], pairs(ground_truth), catalog, seen, year_tolerance)
    inside = parsed is not None and (catalog is None or parsed in catalog)
    return {"parsed": parsed and list(parsed), "in_catalog": inside, "match": bool(hit)}


def list_match(text, ground_truth, num_ranks, catalog, seen, year_tolerance):
    """The lines are those of the tokens' parser, so that positions are the same on both sides."""
    raw = [text[i : i + 3].encode() for i in range(0, len(text), 3)]
    items = [rewards.parse_line(line) for line in rewards.rank_units(raw, num_ranks)[1]]
    read = [i for i in items if i is not None]
    out = {"parsed": [list(i) for i in read]}
    for name, some in (("hits_compact", read), ("hits_positional", items)):
        hits = rewards.match(some, pairs(ground_truth), catalog and pairs(catalog), seen, year_tolerance)
        out[name] = (hits + [0] * num_ranks)[:num_ranks]
    return out


def list_eval_variants(recs, ground_truth, catalog, seen, k):
    return list_variants(pairs(recs), pairs(ground_truth), pairs(catalog), seen, k)


# ---------------------------------------------------------------------------------------------------------------------
# Text


def two_phase_parse(text, tags):
    got = rewards.parse(text, tags)
    return {"valid": got.valid} | vars(got)


def token_segmentation(task, pieces, num_ranks=None, tags=None):
    raw, text = [p.encode() for p in pieces], "".join(pieces)
    if task == "line":
        units = rewards.line_units(raw)
        return {"unit_ids": units, "in_list": [int(u < num_ranks) for u in units]}
    assert task == "phase"
    parsed = rewards.parse(text, tags)
    return {"phase_ids": rewards.phase_units(raw, text, [parsed.slate_span, parsed.rank_span])}


# ---------------------------------------------------------------------------------------------------------------------
# The table of runners, and the comparison


RUNNERS = {
    "adv_dynamic_sampling": adv_dynamic_sampling,
    "adv_focal": adv_focal,
    "adv_gfpo": adv_gfpo,
    "adv_group": adv_group,
    "adv_phase": adv_phase,
    "adv_rank": adv_rank,
    "adv_rank_length_control": adv_rank_length_control,
    "aggregation": aggregation,
    "causal_returns": causal_returns,
    "gae": golden_gae,
    "kl_estimators": kl_estimators,
    "kl_expectation": kl_expectation,
    "list_eval_variants": list_eval_variants,
    "list_match": list_match,
    "logits_logprob_entropy": logits_logprob_entropy,
    "loss_cispo": loss_cispo,
    "loss_clip_higher": token_loss,
    "loss_dual_clip": token_loss,
    "loss_gspo": loss_gspo,
    "loss_gspo_token": loss_gspo_token,
    "loss_phase": loss_phase,
    "loss_ppo_clip": token_loss,
    "loss_rank": loss_rank,
    "loss_with_kl": token_loss,
    "overlong_punishment": overlong_punishment,
    "paired_bootstrap": golden_paired_bootstrap,
    "pass_at_k": golden_pass_at_k,
    "ranking_metrics": golden_ranking_metrics,
    "request_metrics": request_metrics,
    "responder_rewards": responder_rewards,
    "slate_rewards": slate_rewards,
    "tail_miss": golden_tail_miss,
    "title_match": title_match,
    "token_segmentation": token_segmentation,
    "two_phase_parse": two_phase_parse,
}
PREFIXES = ["first_resample_means"]  # lists of which the file holds the beginning only


def compare(got, expected, atol: float, where: str) -> None:
    """Numbers within atol + 1e-9 |expected| and finite; text, flags, integers and null exactly; every expected key."""
    if isinstance(got, torch.Tensor):
        got = got.detach().tolist()
    if isinstance(expected, dict):
        assert set(expected) <= set(got), f"{where}: nothing looks at {sorted(set(expected) - set(got))}"
        for key, value in expected.items():
            compare(got[key], value, atol, f"{where}.{key}")
    elif isinstance(expected, list):
        assert isinstance(got, list | tuple), f"{where}: {got!r} is no list"
        got = got[: len(expected)] if where.split(".")[-1] in PREFIXES else got
        assert len(got) == len(expected), f"{where}: length {len(got)}, expected {len(expected)}"
        for i, (g, e) in enumerate(zip(got, expected)):
            compare(g, e, atol, f"{where}[{i}]")
    elif isinstance(got, float):
        assert math.isfinite(got) and abs(got - expected) <= atol + 1e-9 * abs(expected), (
            f"{where}: {got!r}, expected {expected!r}"
        )
    else:
        assert type(got) is type(expected) and got == expected, f"{where}: {got!r}, expected {expected!r}"


def test_every_file_has_a_runner():
    """A new file of numbers must not go unused in silence."""
    found = {path.stem for path in FOLDER.glob("*.json")}
    assert found, f"no golden file in {FOLDER}"
    assert found <= set(RUNNERS)


@pytest.mark.parametrize(("subject", "case"), CASES, ids=[case["id"] for _, case in CASES])
def test_golden(subject, case):
    """One case of one file; an input that the runner does not take is a TypeError."""
    assert subject in RUNNERS, f"{subject}.json has no runner"
    assert set(case) <= {"id", "note", "inputs", "expected", "atol"}
    compare(RUNNERS[subject](**case["inputs"]), case["expected"], case["atol"], subject)
