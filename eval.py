"""Metrics, the evaluation pass, baselines and confidence intervals; also a command.

    python eval.py --init runs/demo/fgrpo --split test --against runs/demo/sft
    python eval.py --config configs/demo.yaml --baseline popularity
    python eval.py --init runs/selector --ranker runs/ranker --run_dir runs/chained
    torchrun --nproc_per_node 8 eval.py --init runs/maze --k 1 128 256 --samples 1024

With --init RUN and no --config, the run's own settings are used. Every example gets one greedy completion (or one at
eval_temperature). Results: a table on the terminal, and eval_SPLIT.json (means, intervals) and eval_SPLIT.jsonl (a row per
example) in the run folder. Left out: reranking by other models, significance tests beyond the paired bootstrap.
"""

import glob
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
import passk
import rewards
from config import Config, answer_of, dump, fail, given, parse
from rollout import Rollout, demonstrations, rollout
from run import lines_of, to_json, write, writing

CHUNK = 256  # examples of one rollout

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


def hit_metrics(hits: list[int], gold: int, ks: list[int]) -> dict[str, float]:
    """Recall, NDCG and hit at each k, and MRR, from the hits per position of a list (positions stay as they are).

    gold: how many items there are to find. Ideal of NDCG: min(k, gold) places.
    """
    first = next((i for i, h in enumerate(hits, 1) if h), 0)
    out = {"mrr": 1 / first if first else 0.0}
    for k in ks:
        dcg, ideal = (rewards.causal_returns(x, k, "log")[0] for x in (hits, [1.0] * gold))
        found = sum(hits[:k])
        out |= {f"recall@{k}": found / gold if gold else 0.0, f"ndcg@{k}": dcg / ideal if ideal else 0.0, f"hit@{k}": float(found > 0)}  # fmt: skip
    return out


def list_variants(recs: list, gold: list, catalog, seen, k: int) -> dict[str, dict[str, float]]:
    """Recall and NDCG of a list under three ways to treat inadmissible items: outside the catalog, or title seen.

    recs, gold, catalog: (title, year). filter_then_cut: drop them, later items move up (the released Rank-GRPO code);
    cut_then_filter: cut at k first, then drop them; positional: they keep their places as misses, as in training.
    Hits: every gold entry marks the first item with the same title (exact) and a year at most 2 away. ndcg_list_ideal:
    the ideal also ends with the list (the released code; flatters short lists).
    """

    def admitted(item) -> bool:
        return item in catalog and item[0] not in seen

    def scores(items: list) -> dict[str, float]:
        hits = [0] * len(items)
        for title, year in gold:
            at = next((i for i, x in enumerate(items) if x and x[0] == title and abs(x[1] - year) <= 2), None)
            if at is not None:
                hits[at] = 1
        m, short = (hit_metrics(hits, n, [k]) for n in (len(gold), min(len(gold), len(items))))
        return {"recall": m[f"recall@{k}"], "ndcg": m[f"ndcg@{k}"], "ndcg_list_ideal": short[f"ndcg@{k}"]}

    return {
        "filter_then_cut": scores([x for x in recs if admitted(x)]),
        "cut_then_filter": scores([x for x in recs[:k] if admitted(x)]),
        "positional": scores([x if admitted(x) else None for x in recs]),
    }


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

    def prefix_ids(self, cfg: Config) -> list[int]:
        """Tokens of --prefix."""
        prefix = self.tokenizer(cfg.prefix, add_special_tokens=False)["input_ids"] if cfg.prefix else []
        if b"".join(self.pieces[i] for i in prefix) != cfg.prefix.encode():
            fail(f"--prefix {cfg.prefix!r}: the tokenizer has no tokens for it")
        return prefix

    def rollout(
        self, prompts: list[list[int]], samples: int, temperature: float, keys: list[tuple], cfg: Config
    ) -> Rollout:
        """Samples of every prompt under the configuration's limits, with the weights whole on this rank."""
        prefix = self.prefix_ids(cfg)
        with lm.gathered(self.model):
            return rollout(self.model, prompts, samples, self.stop, max_new_tokens=cfg.max_new_tokens, temperature=temperature,
                           top_p=cfg.top_p, keys=keys, prefix=prefix, kv_tokens=cfg.kv_tokens, dtype=self.dtype,
                           shared=None if cfg.share_prefix else False)  # fmt: skip


@dataclass
class Chained(Policy):
    """Two checkpoints in a chain (decoupled_sft): the first writes up to the end of the slate, the ranker goes on from there,
    on a slate that it was not trained on. The same checkpoint twice is the one-checkpoint variant."""

    ranker: Policy = None

    def rollout(self, prompts, samples, temperature, keys, cfg):
        first = super().rollout(prompts, samples, temperature, keys, cfg)
        close = cfg.tags[2 * cfg.phases.index("slate") + 1].encode()
        group, finished, answers, heads = first.group.tolist(), first.finished.clone(), [], {}
        for b, (tokens, real) in enumerate(zip(first.tokens.tolist(), first.mask.sum(1).tolist())):
            said, n = cfg.prefix.encode(), 0
            while n < real and close not in said:
                said, n = said + self.pieces[tokens[n]], n + 1
            answers.append(tokens[:n])
            if close in said and n < cfg.max_new_tokens:
                heads[b] = tokens[:n]  # an answer without a whole slate is left as it is
        if heads:
            asked = [first.prompt_ids[group[b]] + head for b, head in heads.items()]
            streams = [(*keys[group[b]], 1, b) for b in heads]
            rest = self.ranker.rollout(asked, 1, temperature, streams, replace(cfg, prefix=""))
            for i, (b, head) in enumerate(heads.items()):
                more = rest.tokens[i][rest.mask[i]].tolist()
                answers[b] = (head + more)[: cfg.max_new_tokens]
                finished[b] = rest.finished[i] and len(head) + len(more) <= cfg.max_new_tokens
        by_prompt = [[a for a, g in zip(answers, group) if g == i] for i in range(len(first.prompt_ids))]
        return replace(demonstrations(first.prompt_ids, by_prompt, first.tokens.device), finished=finished)


def open_policy(cfg: Config, split: data.Split, device: torch.device) -> Policy:
    """Load or build model and tokenizer for the configuration; split: what a new tokenizer is made from."""
    tokenizer = lm.load_tokenizer(cfg, split.examples, split.catalog, split.vocabulary)
    model = lm.load(cfg, tokenizer, device)
    pieces, stop = rewards.token_bytes(tokenizer), lm.stop_ids(model, tokenizer)
    for i in stop:
        pieces[i : i + 1] = [b""] * (i < len(pieces))  # the model's further stop tokens are no text either
    return Policy(model, tokenizer, pieces, stop + lm.word_ids(tokenizer, cfg.stop), lm.compute_dtype(cfg, device))


def list_metrics(example, ranks: list, cfg: Config, mean_people: float) -> dict[str, float]:
    """Metrics of a list, averaged over the request's responders. ranks: its items by position, None = cannot be a hit.

    row_recall@k: the same weighted by n_x / mean n_x, so that its mean over requests is the mean over all (request,
    responder) rows. mean_people: responders per request of the examples evaluated.
    """
    people = example.responders or [example.gold]
    every = [hit_metrics(hits, len(named), cfg.eval_k)
             for hits, named in zip(rewards.drawn(ranks, people, cfg.year_tolerance), people)]  # fmt: skip
    out = {k: float(np.mean([m[k] for m in every])) for k in every[0]}
    return out | {f"row_recall@{k}": out[f"recall@{k}"] * len(people) / mean_people for k in cfg.eval_k}


def people_per_request(examples: list) -> float:
    return float(np.mean([len(e.responders) or 1 for e in examples]))


def metrics_of(example, slate: list[str], ranking: list[str], cfg: Config) -> dict[str, float]:
    """Metrics of one answer of phases; a malformed one has empty lists and scores 0."""
    s = rewards.slate_scores(slate, example.gold)
    return {**ranking_metrics(ranking, example.gold, cfg.eval_k, cfg.ndcg_gain),
            "slate_recall": s["recall"], "slate_precision": s["precision"]}  # fmt: skip


EVALUATED = {  # columns of the score table that an evaluation reports, by form of answer
    "phases": "invalid duplicates out_of_pool length finished reward_errors",
    "list": "invalid unparsable out_of_catalog duplicates lines length finished reward_errors",
    "text": "correct exact walk loose followed invalid length finished reward_errors",
}


def sought(example) -> object:
    """What an answer is compared with, as JSON gives it back."""
    return json.loads(json.dumps(example.answer if example.check else example.gold))


def evaluate(policy: Policy, examples: list, prompts: list[list[int]], cfg: Config, progress=False) -> list[dict]:
    """One completion per example -> a row per example, in their order. Examples are shared over ranks (F47), which all make
    the same number of rollouts: each gathers the weights."""
    form, people = answer_of(cfg), people_per_request(examples)
    columns = EVALUATED[form].split()
    rank, world = lm.place()
    mine, rows = list(range(rank, len(examples), world)), {}
    chunks = [mine[i : i + CHUNK] for i in range(0, -(-len(examples) // world), CHUNK)]
    for at in tqdm(chunks, "evaluate", disable=not progress, leave=False):
        if not at:
            with lm.gathered(policy.model):
                continue
        roll = policy.rollout([prompts[i] for i in at], 1, cfg.eval_temperature, [(cfg.seed, 0, i) for i in at], cfg)
        unit = "phase" if form == "phases" else "sequence"
        scored = rewards.score(roll, [examples[i] for i in at], policy.pieces, cfg, unit)
        for j, i in enumerate(at):
            ranking, metrics = scored.answers[j][1], {}
            if form == "list":
                metrics = list_metrics(examples[i], ranking, cfg, people)
            elif form == "phases":
                metrics = metrics_of(examples[i], *scored.answers[j], cfg)
            rows[i] = {"id": examples[i].id, "gold": sought(examples[i]), "text": scored.texts[j], "ranking": ranking,
                       "metrics": {**metrics, **{k: scored.parts[k][j] for k in columns if k in scored.parts}}}  # fmt: skip
    rows = {i: row for part in lm.gather(rows) for i, row in part.items()}
    return [rows[i] for i in range(len(examples))]


def baseline_rows(kind: str, split: data.Split, cfg: Config) -> list[dict]:
    """random: a seeded order of the pool; popularity: by training counts, ties by pool order. No slate: the pool is ranked."""
    if kind == "popularity" and not split.popularity:
        fail(f"--baseline popularity: {cfg.data} has no users whose choices could be counted")
    rows, people = [], people_per_request(split.examples)
    for e in split.examples:
        rng = np.random.default_rng([cfg.data_seed, data.stable_hash(e.id) >> 1])
        if kind == "random":
            ranking = [e.candidates[i] for i in rng.permutation(len(e.candidates))]
        else:
            ranking = sorted(e.candidates, key=lambda c: -split.popularity.get(c, 0))
        if answer_of(cfg) == "list":
            ranking = [c for c in ranking if c not in e.seen][: cfg.slate_size]
            metrics = list_metrics(e, ranking, cfg, people)
        else:
            slate, ranking = ranking[: cfg.slate_size], ranking[: cfg.rank_size]
            metrics = metrics_of(e, slate, ranking, cfg)
        rows.append({"id": e.id, "gold": e.gold, "ranking": ranking, "metrics": metrics})
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


def against_counts(problems: list[tuple[str, str]], path: str, cfg: Config) -> list[dict]:
    """Counts of another model on the same problems, given by id and checksum, in their order."""
    file = path if path.endswith(".jsonl") and not os.path.isdir(path) else passk.file_of(cfg, path)
    theirs = {p["id"]: p for p in passk.read(file, f"--against {path}")[1]}
    if wrong := [id for id, sought in problems if id not in theirs or theirs[id]["problem"] != sought]:
        fail(f"--against {path}: {file} lacks {len(wrong)} of {len(problems)} problems or has other answers to them, such as "
             f"{wrong[0]}; evaluate both on the same problems")  # fmt: skip
    out = [theirs[id] for id, _ in problems]
    if cfg.k and max(cfg.k) > out[0]["n"]:
        fail(f"--against {path}: {file} has {out[0]['n']} samples of a problem, too few for pass@{max(cfg.k)}")
    return out


def add_subsampling(result: dict, ours: list[list[dict]], theirs: list[list[dict]], ks: list[int], m: int) -> str:
    """Put the interval of paired m-out-of-n subsampling beside each pass@k, k <= m, and say it in a line. Lists: of counts,
    per benchmark."""
    least = min(p["n"] for some in (*ours, *theirs) for p in some)
    ks = [k for k in ks if k <= m]
    if m >= least or not ks:
        return f"no m-out-of-n subsampling: it needs more than --subsample {m} samples of a problem, and k up to that"
    a, b = ([([p["n"] for p in some], [p["c"] for p in some]) for some in sets] for sets in (ours, theirs))
    said = []
    for k, d in passk.paired_subsampling(a, b, ks, m).items():
        result[f"pass@{k}"]["subsample"] = {"m": m, "difference": d["mean_difference"], "lo": d["lo"], "hi": d["hi"]}
        said.append(f"pass@{k} {d['mean_difference']:+.4f}{'*' * d['significant']} [{d['lo']:+.4f}, {d['hi']:+.4f}]")
    return f"paired m-out-of-n subsampling, {m} of {least}: " + ", ".join(said)


def compare_means(sets: list[list[dict]], others: list[list[dict]] | None = None) -> dict[str, dict]:
    """As compare, for the plain mean over several benchmarks: problems are resampled within each."""

    def interval(pairs) -> tuple[float, float, float]:
        boots = [paired_bootstrap(a, b, seed=i) for i, (a, b) in enumerate(pairs)]
        lo, hi = np.quantile(np.mean([b["means"] for b in boots], 0), [0.025, 0.975])
        return float(np.mean([b["mean_difference"] for b in boots])), float(lo), float(hi)

    out = {}
    for k in (k for k in sets[0][0]["metrics"] if all(k in rows[0]["metrics"] for rows in sets)):
        a = [np.array([r["metrics"][k] for r in rows]) for rows in sets]
        out[k] = dict(zip(("value", "lo", "hi"), interval([(x, 0 * x) for x in a])))
        if others and all(k in rows[0]["metrics"] for rows in others):
            b = [np.array([r["metrics"][k] for r in rows]) for rows in others]
            out[k]["against"] = float(np.mean([y.mean() for y in b]))
            out[k] |= dict(zip(("difference", "difference_lo", "difference_hi"), interval(list(zip(a, b)))))
    return out


def average(cfg: Config, folder: str) -> dict[str, dict]:
    """pass@k of every benchmark in --average, and the mean over them; written to the folder if one is given."""
    files = []
    for path in cfg.average:
        inside = sorted(glob.glob(os.path.join(glob.escape(path), f"pass_*_{cfg.split}.jsonl")))
        if os.path.isdir(path) and not inside:
            fail(
                f"--average {path}: it holds no pass_*_{cfg.split}.jsonl; python eval.py --init RUN --k 1 8 makes such files"
            )
        files += inside if os.path.isdir(path) else [path]
    sets, others = {}, []
    for file in files:
        settings, problems = passk.read(file, "--average")
        if not problems:
            fail(f"--average: {file} holds no problem yet")
        name = f"{settings['data']} {settings['split']}"
        sets[file if name in sets else name] = problems
        if cfg.against:
            path = os.path.join(cfg.against, os.path.basename(file)) if os.path.isdir(cfg.against) else cfg.against
            others.append(against_counts([(p["id"], p["problem"]) for p in problems], path, cfg))
    least = min(p["n"] for problems in (*sets.values(), *others) for p in problems)
    if cfg.k and max(cfg.k) > least:
        fail(f"--k {max(cfg.k)}: a benchmark has {least} samples of a problem")
    ks = cfg.k or [2**i for i in range(least.bit_length())]
    rows, theirs = [passk.rows_at(p, ks) for p in sets.values()], [passk.rows_at(p, ks) for p in others]
    result = {name: compare(r, t) for name, r, t in zip(sets, rows, theirs or [None] * len(rows))}
    result["mean"] = compare_means(rows, theirs)
    width = max(map(len, result))
    print(f"{'benchmark':{width}}  problems" + "".join(f"{f'pass@{k}':>10}" for k in ks))
    for name, r in result.items():
        size = len(sets[name]) if name in sets else len(sets)
        print(f"{name:{width}}{size:10}" + "".join(f"{100 * r[f'pass@{k}']['value']:10.1f}" for k in ks))
    print(
        f"mean over {len(sets)} benchmarks" + (f", against {cfg.against} (* interval leaves out 0)" if others else "")
    )
    line = add_subsampling(result["mean"], list(sets.values()), others, ks, cfg.subsample) if others else ""
    print(table(result["mean"]), *([line] if line else []), sep="\n")
    if folder:
        with writing(f"results to {folder}"):
            os.makedirs(folder, exist_ok=True)
            write(os.path.join(folder, "average.json"), to_json({"files": files, "metrics": result}, indent=1))
    return result


def forgotten(cfg: Config, device: torch.device) -> dict[str, dict]:
    """Delta NLL: mean NLL per token of the rarest right answers of another model (--rare) under --init, minus that under the
    model that gave them. The interval resamples problems."""
    settings, problems = passk.read(
        passk.file_of(cfg, cfg.rare) if os.path.isdir(cfg.rare) else cfg.rare, f"--rare {cfg.rare}"
    )
    if not any(p.get("answers") for p in problems):
        fail(f"--rare {cfg.rare}: no right answers are kept in it; make it with --keep_answers")
    cfg = replace(cfg, data=settings["data"], split=settings["split"], prefix=settings["prefix"])
    split = data.load(cfg)
    policy = open_policy(cfg, split, device)
    asked = {e.id: (passk.checksum(e, p), p) for e, p in zip(*data.fit(split, policy.tokenizer, cfg))}
    answers, sums = passk.rarest(problems), {p["id"]: p["prompt"] for p in problems}
    ids, base = [id for id, _, _ in answers], [value for _, value, _ in answers]
    if wrong := [id for id in ids if id not in asked or asked[id][0] != sums[id]]:
        fail(f"--rare {cfg.rare}: problem {wrong[0]} is not in --data {cfg.data} --split {cfg.split}, or has another prompt, "
             f"answer or tokenizer there (--max_examples?)")  # fmt: skip
    prefix = policy.prefix_ids(cfg)
    now = passk.nll_of(policy, answers, {id: p + prefix for id, (_, p) in asked.items()}, cfg)
    out, nought = {}, [0.0] * len(ids)
    for name, a, b in (("nll_base", base, nought), ("nll", now, nought), ("delta_nll", now, base)):
        d = paired_bootstrap(a, b, clusters=ids)
        out[name] = {"value": d["mean_difference"], "lo": d["lo"], "hi": d["hi"]}
    if lm.place()[0]:
        return out
    path = os.path.join(cfg.run_dir, f"rare_{cfg.data}_{cfg.split}.json")
    with writing(path):
        os.makedirs(cfg.run_dir, exist_ok=True)
        write(
            path, to_json({"answers": len(ids), "problems": len(set(ids)), "base": settings, "metrics": out}, indent=1)
        )
    print(f"{cfg.init} on the {len(ids)} rarest right answers of {cfg.rare}, to {len(set(ids))} problems")
    print(table(out), f"written to {path}", sep="\n")
    return out


def opponent(cfg: Config, examples: list) -> tuple[list[dict] | None, list[dict]]:
    """Rows of --against on the same examples, and their counts where it is about pass@k."""
    if not cfg.against:
        return None, []
    if cfg.k:
        counts = against_counts([(e.id, passk.checksum(e)) for e in examples], cfg.against, cfg)
        return passk.rows_at(counts, cfg.k), counts
    rows = read_rows(cfg.against, cfg.split)
    theirs = {r["id"]: r.get("gold") for r in rows}
    if wrong := [e.id for e in examples if e.id not in theirs or theirs[e.id] != sought(e)]:
        fail(f"--against {cfg.against}: it lacks {len(wrong)} of {len(examples)} examples or has other gold for them, such "
             f"as {wrong[0]}; evaluate both on the same data")  # fmt: skip
    return rows, []


def main(argv: list[str]) -> dict[str, dict]:
    first = parse(argv, training=False)
    explicit = given("run_dir", argv)
    if first.average:
        return average(first, first.run_dir if explicit else "")
    known = os.path.isdir(os.path.join(first.init, "checkpoints")) or "checkpoints" in first.init.split(os.sep)
    home = first.init if first.init and known else first.run_dir  # a run's results lie with it, a checkpoint's in it
    cfg = replace(first, run_dir=first.run_dir if explicit else home)
    if cfg.ranker and not explicit:
        fail(f"--ranker {cfg.ranker}: say with --run_dir where the results of the two go; --init has its own")
    if not cfg.init and not cfg.baseline:
        fail("--init RUN_OR_MODEL is needed (or --baseline random | popularity)")
    rank, _, device = lm.launch(cfg.rank_timeout)
    if cfg.rare:
        return forgotten(cfg, device)
    split = data.load(cfg)
    examples = split.examples
    if not cfg.baseline:
        policy = open_policy(cfg, split, device)
        if cfg.ranker:
            ranker = open_policy(replace(cfg, init=cfg.ranker), split, device)
            if ranker.pieces != policy.pieces:
                fail(f"--ranker {cfg.ranker}: its tokenizer is another one than that of --init {cfg.init}")
            policy = Chained(**vars(policy), ranker=ranker)
        examples, prompts = data.fit(split, policy.tokenizer, cfg)
    other, theirs = opponent(cfg, examples)  # what would end the command does so before the long part
    try:
        os.makedirs(cfg.run_dir, exist_ok=True)
    except OSError as e:
        fail(f"--run_dir {cfg.run_dir} cannot be written: {e}")
    name, progress, ours = f"eval_{cfg.split}" + (f"_{cfg.baseline}" if cfg.baseline else ""), sys.stderr.isatty(), []
    if cfg.baseline:
        rows = baseline_rows(cfg.baseline, split, cfg)
    elif cfg.k:
        ours = passk.measured(policy, examples, prompts, cfg, progress and rank == 0)
        rows, name = passk.rows_at(ours, cfg.k), os.path.basename(passk.file_of(cfg, "")).removesuffix(".jsonl")
    else:
        rows = evaluate(policy, examples, prompts, cfg, progress and rank == 0)
    result = compare(rows, other)
    if rank:
        return result
    line = add_subsampling(result, [ours], [theirs], cfg.k, cfg.subsample) if theirs else ""
    with writing(f"results to {cfg.run_dir}"):
        if not cfg.k:
            write(os.path.join(cfg.run_dir, f"{name}.jsonl"), lines_of(rows))
        write(os.path.join(cfg.run_dir, f"{name}.json"), to_json(
            {"examples": len(rows), "dropped": split.dropped, "metrics": result, "config": dump(cfg)}, indent=1))  # fmt: skip
    print(f"{cfg.baseline or cfg.init} on {cfg.data} {cfg.split}, {len(rows)} examples"
          + (f", {ours[0]['n']} samples of each" if ours else "")
          + (f", against {cfg.against} (* interval leaves out 0)" if cfg.against else ""))  # fmt: skip
    print(table(result), *([line] if line else []), sep="\n")
    print(f"written to {os.path.join(cfg.run_dir, name)}.json and .jsonl")
    return result


def command() -> None:
    """The process."""
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        print("\neval.py: stopped; with --k the same command goes on where it was", file=sys.stderr)
        sys.exit(130)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    command()
