"""Metrics, the evaluation pass, baselines and confidence intervals; also a command.

    python eval.py --init runs/demo/fgrpo --split test --against runs/demo/sft
    python eval.py --config configs/demo.yaml --baseline popularity

With --init RUN and no --config, the run's own settings are used. Every example gets one greedy completion (or one at
eval_temperature). Results: a table on the terminal, and eval_SPLIT.json (means, intervals) and eval_SPLIT.jsonl (a row per
example) in the run folder. Left out: reranking by other models, significance tests beyond the paired bootstrap.
"""

import json
import os
import sys
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

import data
import model as lm
import rewards
from config import Config, dump, fail, parse
from rollout import Rollout, rollout
from run import lines_of, write

# ---------------------------------------------------------------------------------------------------------------------
# Metrics of one list


def ranking_metrics(ranked: list, relevance: dict, ks: list[int], gain="binary") -> dict[str, float]:
    """Recall, precision, hit and NDCG at each k, MRR, of one ranked list. relevance: item -> grade, relevant if > 0.

    A repeated item keeps its place but counts once. Precision divides by k even if the list is shorter; the ideal of NDCG
    has min(k, relevant) places (Jarvelin and Kekalainen 2002). mrr looks at the whole list, mrr@k at its first k.
    """
    gold = {i for i, r in relevance.items() if r > 0}
    first = next((i for i, item in enumerate(ranked, 1) if item in gold), 0)
    out = {"mrr": 1 / first if first else 0.0}
    for k in ks:
        hits = len(set(ranked[:k]) & gold)
        out |= {
            f"recall@{k}": hits / len(gold) if gold else 0.0, f"precision@{k}": hits / k, f"hit@{k}": float(hits > 0),
            f"ndcg@{k}": rewards.ndcg(ranked, relevance, k, gain), f"mrr@{k}": 1 / first if 0 < first <= k else 0.0,
        }  # fmt: skip
    return out


def mean_by_request(values: list[float], request: list) -> tuple[float, float]:
    """(mean over rows, mean over requests of the mean over their rows): a request with many responders counts once."""
    per: dict = {}
    for v, r in zip(values, request):
        per.setdefault(r, []).append(v)
    return (float(np.mean(values)), float(np.mean([np.mean(v) for v in per.values()]))) if values else (0.0, 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# Intervals


def paired_bootstrap(a, b, level=0.95, resamples=10_000, seed=0, indices=None, clusters=None) -> dict[str, float]:
    """Percentile interval of mean(a - b) over resampled rows (Efron), or over resampled clusters of rows.

    a, b (n,): paired scores; b may be 0 for the interval of a mean. indices (R, units): the resamples, else drawn with
    numpy's default_rng(seed). -> mean_difference, lo, hi, significant (the interval leaves out 0), means (R,).
    """
    d = np.asarray(a, float) - np.asarray(b, float)
    _, unit = np.unique(np.arange(len(d)) if clusters is None else np.asarray(clusters), return_inverse=True)
    sums, sizes = np.bincount(unit, d), np.bincount(unit)
    rng = np.random.default_rng(seed)
    chunk = max(1, 2_000_000 // len(sums))  # resamples at a time: 10,000 x n indices would fill the memory
    means = []
    for i in range(0, resamples if indices is None else len(indices), chunk):
        some = (
            rng.integers(0, len(sums), size=(min(chunk, resamples - i), len(sums)))
            if indices is None
            else np.asarray(indices[i : i + chunk])
        )
        means.append(sums[some].sum(1) / sizes[some].sum(1))
    means = np.concatenate(means)
    lo, hi = np.quantile(means, [(1 - level) / 2, 1 - (1 - level) / 2])
    return {"mean_difference": float(d.mean()), "lo": float(lo), "hi": float(hi), "significant": bool(lo > 0 or hi < 0),
            "means": means}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The pass


@dataclass
class Policy:
    """A model with what its rollouts need: tokenizer, bytes of every id, ids that end a completion, compute type."""

    model: torch.nn.Module
    tokenizer: object
    pieces: list[bytes]
    stop: list[int]
    dtype: torch.dtype

    def rollout(
        self, prompts: list[list[int]], samples: int, temperature: float, keys: list[tuple], cfg: Config
    ) -> Rollout:
        """Samples of every prompt under the configuration's limits, with the weights whole on this rank."""
        prefix = self.tokenizer(cfg.prefix, add_special_tokens=False)["input_ids"] if cfg.prefix else []
        if b"".join(self.pieces[i] for i in prefix) != cfg.prefix.encode():
            fail(f"--prefix {cfg.prefix!r}: the tokenizer has no tokens for it")
        with lm.gathered(self.model):
            return rollout(self.model, prompts, samples, self.stop, max_new_tokens=cfg.max_new_tokens, temperature=temperature,
                           top_p=cfg.top_p, keys=keys, prefix=prefix, kv_tokens=cfg.kv_tokens, dtype=self.dtype)  # fmt: skip


def open_policy(cfg: Config, split: data.Split, device: torch.device) -> Policy:
    """Load or build model and tokenizer for the configuration; split: what a new tokenizer is made from."""
    tokenizer = lm.load_tokenizer(cfg, split.examples, split.catalog)
    model = lm.load(cfg, tokenizer, device)
    return Policy(
        model, tokenizer, rewards.token_bytes(tokenizer), lm.stop_ids(model, tokenizer), lm.compute_dtype(cfg, device)
    )


def metrics_of(example, slate: list[str], ranking: list[str], cfg: Config) -> dict[str, float]:
    """Metrics of one answer; a malformed one has empty lists and scores 0."""
    s = rewards.slate_scores(slate, example.gold)
    return {**ranking_metrics(ranking, example.gold, cfg.eval_k, cfg.ndcg_gain),
            "slate_recall": s["recall"], "slate_precision": s["precision"]}  # fmt: skip


def evaluate(policy: Policy, examples: list, prompts: list[list[int]], cfg: Config, progress=False) -> list[dict]:
    """One completion per example -> a row per example, in their order. Examples are shared over ranks (F47)."""
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    mine, rows = list(range(rank, len(examples), world)), {}
    chunks = [mine[i : i + 256] for i in range(0, len(mine), 256)]
    for at in tqdm(chunks, "evaluate", disable=not progress, leave=False):
        roll = policy.rollout([prompts[i] for i in at], 1, cfg.eval_temperature, [(cfg.seed, 0, i) for i in at], cfg)
        scored = rewards.score(roll, [examples[i] for i in at], policy.pieces, cfg, "phase")
        for j, i in enumerate(at):
            extra = {k: scored.parts[k][j] for k in ("invalid", "duplicates", "out_of_pool", "length", "finished")}
            rows[i] = {"id": examples[i].id, "gold": examples[i].gold, "text": scored.texts[j], "ranking": scored.answers[j][1],
                       "metrics": {**metrics_of(examples[i], *scored.answers[j], cfg), **extra}}  # fmt: skip
    if world > 1:
        parts = [None] * world
        dist.all_gather_object(parts, rows)
        rows = {i: row for part in parts for i, row in part.items()}
    return [rows[i] for i in range(len(examples))]


def baseline_rows(kind: str, split: data.Split, cfg: Config) -> list[dict]:
    """random: a seeded order of the pool; popularity: by training counts, ties by pool order. No slate: the pool is ranked."""
    if kind == "popularity" and not split.popularity:
        fail(f"--baseline popularity: {cfg.data} has no users whose choices could be counted")
    rows = []
    for e in split.examples:
        rng = np.random.default_rng([cfg.data_seed, data.stable_hash(e.id) >> 1])
        if kind == "random":
            ranking = [e.candidates[i] for i in rng.permutation(len(e.candidates))]
        else:
            ranking = sorted(e.candidates, key=lambda c: -split.popularity.get(c, 0))
        metrics = metrics_of(e, ranking[: cfg.slate_size], ranking[: cfg.rank_size], cfg)
        rows.append({"id": e.id, "gold": e.gold, "ranking": ranking[: cfg.rank_size], "metrics": metrics})
    return rows


def means(rows: list[dict]) -> dict[str, float]:
    return {k: float(np.mean([r["metrics"][k] for r in rows])) for k in rows[0]["metrics"]}


# ---------------------------------------------------------------------------------------------------------------------
# The command


def read_rows(path: str, split: str) -> list[dict]:
    """Rows of an earlier evaluation, from its run folder or file."""
    file = os.path.join(path, f"eval_{split}.jsonl") if os.path.isdir(path) or not path.endswith(".jsonl") else path
    try:
        with open(file, encoding="utf-8") as f:
            rows = [json.loads(line) for line in f]
        if not all(isinstance(r, dict) and {"id", "metrics"} <= set(r) for r in rows):
            raise ValueError("its lines are no rows of an evaluation")
        return rows
    except (OSError, ValueError) as e:
        fail(f"--against {path}: cannot read {file} ({e}); make it with: python eval.py --init {path} --split {split}")


def compare(rows: list[dict], other: list[dict] | None = None, names: list[str] | None = None) -> dict[str, dict]:
    """Per metric: value with its 95 % bootstrap interval, and the paired difference to other rows where given."""
    out = {}
    theirs = {r["id"]: r["metrics"] for r in other or []}
    for k in names or rows[0]["metrics"]:
        a = [r["metrics"][k] for r in rows]
        own = paired_bootstrap(a, np.zeros(len(a)))
        out[k] = {"value": own["mean_difference"], "lo": own["lo"], "hi": own["hi"]}
        if theirs and k in next(iter(theirs.values())):
            d = paired_bootstrap(a, [theirs[r["id"]][k] for r in rows])
            out[k]["against"] = float(np.mean([theirs[r["id"]][k] for r in rows]))
            out[k] |= {f"difference{s}": d[t] for s, t in (("", "mean_difference"), ("_lo", "lo"), ("_hi", "hi"))}
    return out


def table(result: dict[str, dict]) -> str:
    lines = [
        f"{'metric':18}{'value':>9}  95 % interval"
        + ("      against  difference" if any("against" in v for v in result.values()) else "")
    ]
    for k, v in result.items():
        line = f"{k:18}{v['value']:9.4f}  [{v['lo']:.4f}, {v['hi']:.4f}]"
        if "against" in v:
            star = "*" if v["difference_lo"] > 0 or v["difference_hi"] < 0 else " "
            line += f"  {v['against']:9.4f}  {v['difference']:+.4f}{star} [{v['difference_lo']:+.4f}, {v['difference_hi']:+.4f}]"
        lines.append(line)
    return "\n".join(lines)


def main(argv: list[str]) -> dict[str, dict]:
    first = parse(argv, training=False)
    explicit = any(a == "--run_dir" or a.startswith("--run_dir=") for a in argv)
    known = os.path.isdir(os.path.join(first.init, "checkpoints")) or "checkpoints" in first.init.split(os.sep)
    home = first.init if first.init and known else first.run_dir  # a run's results lie with it, a checkpoint's in it
    cfg = replace(first, run_dir=first.run_dir if explicit else home)
    if not cfg.init and not cfg.baseline:
        fail("--init RUN_OR_MODEL is needed (or --baseline random | popularity)")
    split = data.load(cfg)
    other = read_rows(cfg.against, cfg.split) if cfg.against else None
    examples = split.examples
    if not cfg.baseline:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        policy = open_policy(cfg, split, device)
        examples, prompts = data.fit(split, policy.tokenizer, cfg)
    if other is not None:
        theirs = {r["id"]: r.get("gold") for r in other}
        if wrong := [e.id for e in examples if theirs.get(e.id) != e.gold]:
            fail(f"--against {cfg.against}: it lacks {len(wrong)} of {len(examples)} examples or has other gold for them, such "
                 f"as {wrong[0]}; evaluate both on the same data")  # fmt: skip
    try:
        os.makedirs(cfg.run_dir, exist_ok=True)  # before the long part, not after it
    except OSError as e:
        fail(f"--run_dir {cfg.run_dir} cannot be written: {e}")
    if cfg.baseline:
        rows = baseline_rows(cfg.baseline, split, cfg)
    else:
        rows = evaluate(policy, examples, prompts, cfg, progress=sys.stderr.isatty())
    result = compare(rows, other)
    name = f"eval_{cfg.split}" + (f"_{cfg.baseline}" if cfg.baseline else "")
    write(os.path.join(cfg.run_dir, f"{name}.jsonl"), lines_of(rows))
    write(os.path.join(cfg.run_dir, f"{name}.json"), json.dumps(
        {"examples": len(rows), "dropped": split.dropped, "metrics": result, "config": dump(cfg)}, indent=1))  # fmt: skip
    print(f"{cfg.baseline or cfg.init} on {cfg.data} {cfg.split}, {len(rows)} examples"
          + (f", against {cfg.against} (* interval leaves out 0)" if cfg.against else ""))  # fmt: skip
    print(table(result))
    print(f"written to {os.path.join(cfg.run_dir, name)}.json and .jsonl")
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
