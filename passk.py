"""pass@k: the chance that at least one of k samples of a problem is right.

    python eval.py --init runs/focal --data sums --k 1 128 256 --samples 1024      # writes runs/focal/pass_sums_test.jsonl
    python eval.py --init runs/focal --k 1 128 256 --against runs/grpo             # paired, on the same problems
    python eval.py --average runs/focal/pass_*_test.jsonl --against runs/grpo      # mean over benchmarks

n samples of every problem, c of them right. What is written per problem are these counts, so any k up to n can be had later
without a model. Sample (seed, problem, number) depends on nothing else: not on chunks, ranks, other problems or an
interruption. Also here: the answers that are right but rare, and how much of them training forgot (Delta NLL). Formulas:
docs/passk.md. Left out: early stopping of solved problems (the counts would no longer be those of n samples), ranks that
write for themselves.

Sources: Chen et al. 2021, arXiv 2107.03374 (the estimator); arXiv 2602.06717, appendices M.2 and Q.
"""

import fcntl
import json
import os
import zlib
from array import array

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

import model as lm
import rewards
from config import Config, fail
from files import stable_hash
from rollout import Rollout, demonstrations
from run import lines_of, reason, writing

ROWS = 4096  # samples of one rollout, so what an interruption costs; a problem is never split
SHARE = 0.01  # of the right answers: the rare ones

# ---------------------------------------------------------------------------------------------------------------------
# Counts -> numbers


def pass_at_k(n, c, k: int):
    """Chance that k of n samples, c of them right, hold a right one: 1 - C(n-c, k) / C(n, k). n, c: numbers or arrays.

    The quotient is the product over i < c of 1 - k / (n - i); its logarithm is a sum of log1p, and expm1 keeps what is left
    of 1 where c is small. Exact to about 1e-12 (relative) for n up to 2^17.
    """
    n, c = np.broadcast_arrays(np.asarray(n), np.asarray(c))
    if not (k >= 1 and np.all(k <= n) and np.all(c >= 0) and np.all(c <= n)):
        raise ValueError(f"pass@{k} needs 1 <= k <= n and 0 <= c <= n")
    out = np.empty(n.shape)
    for m in np.unique(n):
        at = n == m
        most = min(int(c[at].max()), int(m) - k + 1)  # with more right ones than that no k samples miss them all
        with np.errstate(divide="ignore"):  # the last factor may be 0
            logs = np.concatenate([[0.0], np.cumsum(np.log1p(-k / (m - np.arange(most))))])
        out[at] = 0.0 - np.expm1(logs[np.minimum(c[at], most)])  # a plain minus would make -0.0
    return out if out.ndim else float(out)


def subsampled(sets: list[tuple], ks: list[int], m: int, iterations=50_000, seed=0) -> dict[int, np.ndarray]:
    """k -> mean pass@k of `iterations` draws of m samples without replacement from those of every problem.

    sets: (n (P,), c (P,)) of each benchmark; the mean is over problems, then over benchmarks. How many of the m drawn samples
    are right is hypergeometric, so the number is drawn and not the samples. Needs k <= m <= n. -> arrays (iterations,).
    """
    rng = np.random.default_rng(seed)
    values = {k: pass_at_k(m, np.arange(m + 1), k) for k in ks}
    out = {k: np.zeros(iterations) for k in ks}
    for n, c in sets:
        for total, right in zip(n, c):
            drawn = rng.hypergeometric(right, total - right, m, iterations)
            for k in ks:
                out[k] += values[k][drawn] / (len(n) * len(sets))
    return out


def paired_subsampling(ours: list[tuple], theirs: list[tuple], ks, m: int, iterations=50_000, level=0.95) -> dict:
    """Difference of mean pass@k between two models on the same problems, and the interval that m-out-of-n subsampling gives
    (appendix Q). It speaks of the luck of sampling, not of the choice of problems.
    -> k: mean_difference, lo, hi, significant (the interval leaves out 0)."""
    a, b = subsampled(ours, ks, m, iterations, 0), subsampled(theirs, ks, m, iterations, 1)
    out = {}
    for k in ks:
        d = a[k] - b[k]
        lo, hi = np.quantile(d, [(1 - level) / 2, 1 - (1 - level) / 2])
        out[k] = {"mean_difference": float(d.mean()), "lo": float(lo), "hi": float(hi), "significant": bool(lo > 0 or hi < 0)}  # fmt: skip
    return out


def rows_at(problems: list[dict], ks: list[int]) -> list[dict]:
    """Counts of problems -> rows with metrics, as an evaluation has them: pass@k; exact@k where a verifier has a stricter
    test; shares of samples that are malformed, finished, and whose verifier failed; mean length."""
    n, c, exact = (np.array([p[key] for p in problems]) for key in ("n", "c", "exact"))
    columns = {f"pass@{k}": pass_at_k(n, c, k) for k in ks}
    if (exact != c).any():
        columns |= {f"exact@{k}": pass_at_k(n, exact, k) for k in ks}
    shares = {key: [p[key] / p["n"] for p in problems] for key in ("invalid", "finished", "reward_errors")}
    columns |= shares | {"length": [p["length"] for p in problems]}
    return [{"id": p["id"], "metrics": {k: float(v[i]) for k, v in columns.items()}} for i, p in enumerate(problems)]


# ---------------------------------------------------------------------------------------------------------------------
# Samples -> counts


def samples_of(cfg: Config) -> int:
    return cfg.samples or max(cfg.k)


def counted(
    policy, examples: list, prompts: list[list[int]], cfg: Config, known=(), keep=None, progress=False
) -> list[dict]:
    """Counts of samples_of(cfg) samples of every problem, in their order. Problems are shared over ranks, which all make the
    same number of rollouts. known: counts that are there already; keep: called with the new ones of each round on rank 0."""
    rank, world = lm.place()
    found = {p["id"]: p for p in known}
    left = [i for i, e in enumerate(examples) if e.id not in found]
    some = world * max(1, ROWS // samples_of(cfg))
    bar = tqdm(total=len(examples), initial=len(examples) - len(left), desc="pass@k", unit=" problems", leave=False,
               disable=not progress)  # fmt: skip
    for start in range(0, len(left), some):
        at = left[start : start + some][rank::world]
        new = []
        if at:
            new = counts(policy, [examples[i] for i in at], [prompts[i] for i in at], cfg)
        else:
            with lm.gathered(policy.model):  # other ranks sample, and gathering the weights is collective
                pass
        new = [p for part in lm.gather(new) for p in part]
        if keep is not None and rank == 0:
            keep(new)
        found |= {p["id"]: p for p in new}
        bar.update(len(new))
    bar.close()
    return [found[e.id] for e in examples]


def counts(policy, examples: list, prompts: list[list[int]], cfg: Config) -> list[dict]:
    """Sample and check some problems. A sample whose verifier failed is not right, and counted."""
    n = samples_of(cfg)
    roll = policy.rollout(prompts, n, cfg.temperature, [(cfg.seed, stable_hash(e.id)) for e in examples], cfg)
    scored = rewards.score(roll, examples, policy.pieces, cfg, "sequence")
    rows = []
    for i, (e, prompt) in enumerate(zip(examples, prompts)):
        total = {k: sum(v[i * n : (i + 1) * n]) for k, v in scored.parts.items()}
        shown = {k: int(total[k]) for k in ("exact", "invalid", "finished", "reward_errors")}
        rows.append({"id": e.id, "n": n, "c": int(total["correct"]), **shown, "length": total["length"] / n,
                     "problem": checksum(e), "prompt": checksum(e, prompt)})  # fmt: skip
    if cfg.keep_answers:
        right = [b for b, correct in enumerate(scored.parts["correct"]) if correct]
        answers = [[] for _ in rows]
        for b, value in zip(right, nll(policy, roll, right, cfg)):
            answers[int(roll.group[b])].append([value, roll.tokens[b][roll.mask[b]].tolist()])
        rows = [{**row, "answers": a} for row, a in zip(rows, answers)]
    return rows


def checksum(example, prompt=()) -> str:
    """Of what an answer is compared with, and of the prompt's tokens."""
    crc = zlib.crc32(json.dumps([example.check, example.answer]).encode())
    return f"{zlib.crc32(array('q', prompt).tobytes(), crc):08x}"


def weights_of(model: torch.nn.Module) -> str:
    """Checksum of the first numbers of every parameter: trained further, a model has another one."""
    crc = 0
    for p in model.parameters():
        crc = zlib.crc32(p.detach().flatten()[:256].float().cpu().numpy().tobytes(), crc)
    return f"{crc:08x}"


# ---------------------------------------------------------------------------------------------------------------------
# The file: a line of settings, then a line per problem


def file_of(cfg: Config, folder: str) -> str:
    return os.path.join(folder, f"pass_{cfg.data}_{cfg.split}.jsonl")


def settings_of(policy, cfg: Config) -> dict:
    """What counts depend on besides the problem."""
    return {"data": cfg.data, "split": cfg.split, "samples": samples_of(cfg), "temperature": cfg.temperature,
            "top_p": cfg.top_p, "max_new_tokens": cfg.max_new_tokens, "prefix": cfg.prefix, "stop": cfg.stop, "seed": cfg.seed,
            "keep_answers": cfg.keep_answers, "dtype": str(policy.dtype).removeprefix("torch."),
            "weights": weights_of(policy.model)}  # fmt: skip


def read(path: str, flag: str) -> tuple[dict, list[dict]]:
    """(settings, counts) of a file; a last line that was cut is left out. flag: what named the file, for errors."""
    try:
        with open(path, encoding="utf-8") as f:
            lines = list(f)
    except (OSError, ValueError) as e:
        fail(
            f"{flag}: cannot read {path} ({reason(e)}); python eval.py --init RUN --k 1 8 --samples 64 makes such files"
        )
    rows, seen = [], set()
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line.endswith("\n"):
            break
        try:
            row = json.loads(line)
            fine = is_settings(row) if number == 1 else is_counts(row, rows[0]["settings"]["samples"])
        except (ValueError, KeyError, TypeError, AttributeError):
            fine = False
        if not fine or (number > 1 and row["id"] in seen):
            fail(f"{flag}: {path} line {number} is {'a problem for the second time' if fine else 'damaged or of another file'}; "
                 f"delete that line (its problem is sampled again), or the file")  # fmt: skip
        seen.add(row.get("id"))
        rows.append(row)
    return (rows[0]["settings"], rows[1:]) if rows else ({}, [])


def is_settings(row: dict) -> bool:
    s = row["settings"]
    return type(s["samples"]) is int and s["samples"] > 0 and isinstance(s["data"], str) and isinstance(s["split"], str)


def is_counts(row: dict, samples: int) -> bool:
    """Is this a line of counts of that many samples?"""
    counted = [row[k] for k in ("c", "exact", "invalid", "finished", "reward_errors")]
    texts = [row[k] for k in ("id", "problem", "prompt")]
    whole = row["n"] == samples and all(type(v) is int and 0 <= v <= samples for v in counted)
    return whole and all(isinstance(t, str) for t in texts) and isinstance(row["length"], int | float)


def measured(policy, examples: list, prompts: list[list[int]], cfg: Config, progress=False) -> list[dict]:
    """Counts of every problem, each kept in the file of the run as soon as it is there. The same command again goes on where
    it stopped; a file of other settings is refused, never mixed or overwritten."""
    path, known = file_of(cfg, cfg.run_dir), []
    main = lm.place()[0] == 0

    def keep(rows: list[dict]) -> None:
        with writing(path, "make room; the same command goes on from there"):
            file.write(lines_of(rows))
            file.flush()
            os.fsync(file.fileno())

    with writing(path):
        file = open(path if main else os.devnull, "a", encoding="utf-8")
    with file:
        if main:
            known = claim(file, settings_of(policy, cfg), examples, prompts, cfg)
        if dist.is_initialized():
            box = [known]
            dist.broadcast_object_list(box)
            known = box[0]
        return counted(policy, examples, prompts, cfg, known, keep, progress)


def claim(file, settings: dict, examples: list, prompts: list[list[int]], cfg: Config) -> list[dict]:
    """Lock the open file, check that it is of these settings and problems, and cut off half a line. -> counts in it."""
    path, other = file.name, "choose another --run_dir, or delete the file"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f"{path} is being written by another process; choose another --run_dir")
    was, known = read(path, f"--run_dir {cfg.run_dir}")
    if key := next((k for k in settings | was if was and was.get(k) != settings.get(k)), None):
        fail(f"{path} was made with {key} {was.get(key)!r}, and now it is {settings.get(key)!r}: {other}")
    sums = {e.id: checksum(e, p) for e, p in zip(examples, prompts)}
    if wrong := next((p["id"] for p in known if sums.get(p["id"], p["prompt"]) != p["prompt"]), None):
        fail(f"{path}: problem {wrong} has another prompt or answer now: {other}")
    with writing(path), open(path, "rb") as f:
        os.truncate(path, f.read().rfind(b"\n") + 1)
        if not was:
            file.write(lines_of([{"settings": settings}]))
            file.flush()
    return known


# ---------------------------------------------------------------------------------------------------------------------
# Right but rare


@torch.no_grad()
def nll(policy, roll: Rollout, rows: list[int], cfg: Config) -> list[float]:
    """Mean negative log-likelihood per token (nats, stop token included, temperature 1) of rows of a rollout."""
    length = {b: len(roll.prompt_ids[int(roll.group[b])]) + int(roll.mask[b].sum()) for b in rows}
    order, out, start = sorted(rows, key=lambda b: -length[b]), {}, 0
    while start < len(order):
        some = order[start : start + max(1, cfg.micro_tokens // length[order[start]])]
        at = torch.tensor(some, device=roll.tokens.device)
        mask = roll.mask[at]
        logp, _ = lm.completion_logp(
            policy.model, roll.prompt_ids, roll.tokens[at], mask, roll.group[at], dtype=policy.dtype
        )
        out |= dict(zip(some, (-logp.double().sum(1) / mask.sum(1)).tolist()))
        start += len(some)
    return [out[b] for b in rows]


def rarest(problems: list[dict], share=SHARE) -> list[tuple[str, float, list[int]]]:
    """The share of all kept right answers with the highest mean NLL, at least one: (problem, NLL, tokens)."""
    every = [(p["id"], value, tokens) for p in problems for value, tokens in p["answers"]]
    every.sort(key=lambda answer: -answer[1])
    return every[: max(1, int(share * len(every) + 1e-9))]


def nll_of(policy, answers: list[tuple], prompts: dict[str, list[int]], cfg: Config) -> list[float]:
    """NLL of kept answers, in their order, under a policy. prompts: ids by problem, --prefix included. Shared over ranks."""
    rank, world = lm.place()
    mine = answers[rank::world]
    values = []
    if mine:
        device = next(policy.model.parameters()).device
        roll = demonstrations([prompts[id] for id, _, _ in mine], [[tokens] for _, _, tokens in mine], device)
        values = nll(policy, roll, list(range(len(mine))), cfg)
    parts = lm.gather(values)
    return [parts[i % world][i // world] for i in range(len(answers))]
