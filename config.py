"""The experiment's settings: one flat dataclass, one place that reads and checks them.

A YAML file under configs/ is a list of flags: each value is the text as it is written there, read like that of a flag, so both
get the same names, types and errors, and nothing in a file can become a Python object or run. Precedence: field default < options of the method < YAML < command line. Left out: nesting, interpolation,
inheritance between files.

    python train.py --config configs/demo.yaml --method fgrpo --steps 50
    python train.py --help
"""

import argparse
import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import yaml

from losses import AGGREGATES, METHODS, Cap, Clip, Method, resolve


@dataclass
class Config:
    "== Run"

    config: str = ""
    """YAML file with any of these fields; empty: defaults only. With --resume: the run folder's own config.yaml."""
    method: str = "fgrpo"
    """Row of METHODS in losses.py: one of %(methods)s."""
    steps: int = 100
    """Optimiser steps (one rollout each, mu updates). A resumed run continues up to this number; it may be raised then,
    if the schedule is constant (others depend on it)."""
    run_dir: str = "runs/METHOD"
    """Folder for log.jsonl, samples.jsonl, config.yaml and checkpoints/. It must not hold another run. METHOD: the method's
    name."""
    init: str = ""
    """Start weights: a run folder (its best checkpoint, or the last), a Hugging Face folder or hub name (owner/name, or
    owner/name@commit to pin it), or a .gguf file. Empty: a tiny model (arch) built from scratch, with a tokenizer made from the data."""
    resume: bool = False
    """Continue the run in run_dir from its last checkpoint."""
    seed: int = 0
    """Seed of weights, data order and samples. Sample (step, prompt, i) does not depend on batch size or ranks."""
    rank_timeout: int = 1800
    """Seconds that a rank waits for the others before the job ends: more than a rank's rollout may last longer than another's."""
    deterministic: bool = False
    """train.py: deterministic GPU kernels, slower; docs/scale.md says what stays different. On the CPU results repeat anyway."""
    plan: bool = False
    """train.py: print memory, communication and time of a step, computed from the settings, and leave: nothing is trained, loaded or
    written (plan.py)."""
    plan_ranks: list[int] = field(default_factory=list)
    """--plan: numbers of ranks to show. Empty: the ranks of the command itself, 8, 64 and 512."""
    plan_gb: float = 0.0
    """--plan: memory of a device in GB; 0: that of the GPU here, else 80."""
    report: str = "none"
    """Extra logger beside log.jsonl: none, tensorboard or wandb (install the one you want)."""

    "== Data"

    data: str = "world"
    """Data set: a row of DATASETS in data.py (python data.py list)."""
    data_dir: str = ""
    """Folder with the published files. Empty: $DATA_DIR, else data/."""
    split: str = "test"
    """Split that eval.py and data.py show use: train, valid or test."""
    data_seed: int = 0
    """Seed of the built-in world, of negatives and of the order of a pool. Not changed by --seed."""
    max_examples: int = 0
    """Keep this many examples of each split (a seeded sample); 0: all."""
    history: int = 10
    """Items of a user's history in the prompt, most recent last."""
    pool_size: int = 20
    """Candidates per example, gold included."""
    negatives: str = "uniform"
    """How pool negatives are drawn for recommendation data: uniform or popularity (weighted by training counts)."""
    show_pool: bool = True
    """List the pool in the prompt. False, and always for data of lists (requests): the catalog lives in the weights, and
    every title is a candidate."""
    slate_size: int = 10
    """Items of a slate (n): asked for, demonstrated, and the most that count in an answer."""
    rank_size: int = 5
    """Items of a ranking (k): asked for, demonstrated, and the most that count in an answer."""
    answer: str = ""
    """Form of an answer: phases (slate and ranking between tags), list (slate_size lines, best first, an item a line, no
    tags). Empty: list for data of lists (requests) and for methods whose unit is a rank, else phases. Answers to problems
    are free text, which a verifier checks (verify.py): leave it empty there."""
    item_form: str = "title"
    """How an answer names an item: title, or index (#3 = third of the pool)."""
    rank_form: str = "item"
    """How a demonstrated ranking names an item: item (as in the slate) or position (1-based, in the slate)."""
    demo_order: str = "shuffled"
    """Order of a demonstrated slate: shuffled, gold_first, pool (as listed: a model from scratch learns to copy much
    faster), or chain (no pool: each item follows the last; of recommendation files: what the user took next)."""
    template: str = "terse"
    """Prompt wording: terse (models built from scratch) or instruct (pretrained ones)."""
    system: str = ""
    """System message in front of the prompt, for models with a chat template. Empty: what the template says by itself."""
    tags: list[str] = field(default_factory=lambda: ["<SLATE>", "</SLATE>", "<RANK>", "</RANK>"])
    """Delimiters of the phases, in order: open and close of each."""
    phases: list[str] = field(default_factory=lambda: ["slate", "rank"])
    """What the pairs of tags hold, in order: one slate, later one rank, and any number of plan (a line of free text, which
    is credited with R_joint)."""
    draw: str = "request"
    """Training examples of data with several responders: request (one per request, all its responders: ReMaRk) or row
    (one per request and responder, with this one's items only: Rank-GRPO). valid and test: always request."""
    max_prompt: int = 2048
    """Longest prompt in tokens; longer ones are left out at load and counted, never cut."""
    min_count: int = 1
    """Recommendation data: drop items that fewer users than this have, before sequences are made."""
    min_rating: float = 0.0
    """MovieLens: drop ratings below this; 0 keeps all."""
    world_clusters: int = 12
    """Built-in world: clusters of items (the catalog has clusters x items titles)."""
    world_items: int = 10
    """Built-in world: items of a cluster, in a circle; the next item of a history is the next one of the circle."""
    world_gold: int = 3
    """Built-in world: gold items per example, the next ones of the circle, with utilities gold, ..., 2, 1."""
    world_noise: float = 0.2
    """Built-in world: chance that a history entry is replaced by a random title. Difficulty: 0 easy, 0.5 hard."""
    world_slack: int = 3
    """Built-in world: demonstrated slates start up to this many places beside the right one. 0: perfect teacher."""
    world_examples: int = 4000
    """Built-in world: training examples (valid and test get an eighth each)."""
    requests_themes: int = 12
    """Built-in requests: themes (moods that a request names)."""
    requests_items: int = 16
    """Built-in requests: titles of a theme, from best to worst; the catalog has themes x items titles."""
    requests_responders: int = 5
    """Built-in requests: most responders of a request; how many it has is drawn from 1 to this."""
    requests_named: int = 3
    """Built-in requests: titles that a responder names."""
    requests_disagreement: float = 0.5
    """Built-in requests: chance that a responder names any title of the theme and not the best one left. 0: all name the
    same titles, 1: each names its own."""
    requests_examples: int = 2000
    """Built-in requests: training requests (valid and test get an eighth each)."""

    maze_size: int = 17
    """Built-in mazes: squares of a side, odd; a maze has (size // 2)^2 cells."""
    maze_examples: int = 999_744
    """Built-in mazes: training mazes, made when they are needed. With the 256 of test a million, as in the papers."""
    maze_held_out: int = 256
    """Built-in mazes: mazes of test, and as many of valid; training has none of them."""
    maze_success: str = "walk"
    """Built-in mazes: what is rewarded: a walk that reaches the goal (walk), or the target move by move (target). Both are
    reported."""

    "== Model"

    tokenizer: str = "word"
    """Tokenizer of a model built from scratch: word, line (a whole line, so a title, is one token) or byte."""
    layers: int = 2
    """Layers of a model built from scratch."""
    width: int = 96
    """Hidden width of a model built from scratch."""
    arch: str = "qwen3"
    """Architecture of a model built from scratch: qwen3, or qwen2 (biases on queries, keys and values, no norm of queries
    and keys, rope theta 1e6)."""
    heads: int = 0
    """Attention heads of a model built from scratch; 0: heads of size 32."""
    kv_heads: int = 0
    """Key-value heads of a model built from scratch; 0: as many as heads."""
    ffn: int = 0
    """Width of the feed-forward of a model built from scratch; 0: three times the hidden width."""
    tie: bool = True
    """Tie input and output embeddings of a model built from scratch."""
    dtype: str = "auto"
    """Compute type of forward passes: float32, bfloat16 (autocast; weights stay fp32), auto: bfloat16 on a GPU."""
    attention: str = "auto"
    """attn_implementation: auto (flash_attention_2 where installed on a GPU in bfloat16, else sdpa), sdpa,
    eager or flash_attention_2."""
    checkpointing: bool = False
    """Gradient checkpointing: less memory in the update, about a third more time."""
    share_prefix: bool = True
    """The update sees a prompt once, not once per sample, and packs without padding; models that cannot do this take the
    plain path. The result is the same to rounding. It attends by its own function, in place of sdpa."""
    trust_remote_code: bool = False
    """Let a hub model run its own code. Off: such a model is refused."""

    "== Rollout"

    group_size: int = 8
    """Samples per prompt (G)."""
    temperature: float = 1.0
    """Sampling temperature; every log-prob is of logits / temperature. Evaluation is greedy (eval_temperature)."""
    top_p: float = 1.0
    """Nucleus sampling, for eval.py only: with p < 1 the loss would be of another distribution than the samples."""
    max_new_tokens: int = 64
    """Longest completion in tokens, stop token included; also the constant L of the const_len aggregate."""
    kv_tokens: int = 65536
    """Key-value budget in tokens per rank for what is decoded at once. A sample costs max_new_tokens and a prompt its length,
    once (once per sample where the model cannot share it); waiting prompts take the places of finished samples."""
    prefix: str = ""
    """Text forced at the start of every completion: not trained on, but part of what rewards see."""
    stop: list[str] = field(default_factory=list)
    """Words that end a completion beside the stop tokens of model and tokenizer, one token each (DONE of the mazes). Unlike
    those they are text: rewards see them."""

    "== Optimiser"

    batch_size: int = 16
    """Prompts per optimiser step, over all ranks."""
    micro_tokens: int = 8192
    """Tokens of one forward of the update, per rank (padding counts where there is any). The result does not depend on it."""
    mu: int = 1
    """Optimiser updates per rollout batch."""
    lr: float = 1e-6
    """Peak learning rate of AdamW."""
    schedule: str = "constant"
    """Learning rate after warmup: constant, linear or cosine (to min_lr at the last step)."""
    warmup: int = 0
    """Steps of linear warmup."""
    min_lr: float = 0.0
    """Learning rate at the end of linear and cosine schedules."""
    weight_decay: float = 0.0
    """AdamW weight decay."""
    adam_beta2: float = 0.999
    """AdamW second-moment decay."""
    optimizer_dtype: str = "float32"
    """Type of AdamW's moments: float32, or bfloat16 with stochastic rounding (optim.py): 4 bytes per parameter less."""
    grad_clip: float = 1.0
    """Largest gradient norm; 0: no clipping."""
    max_bad_steps: int = 5
    """Stop after this many steps in a row whose loss or gradient was NaN or infinite (their batches are in RUN_DIR/bad);
    0: never."""

    "== Method (empty or -1: what the row of METHODS says)"

    scale: str = ""
    """What advantages are divided by: none, std (of the group) or batch_std (of the batch)."""
    ratio: str = ""
    """Importance ratio: none, token, unit, sequence (the last two are geometric means) or sequence_token (the sequence's
    value, the token's gradient)."""
    aggregate: str = ""
    """How tokens become one number: one of %(aggregates)s."""
    clip_low: float = -1.0
    """Lower clip range: the ratio is held above 1 - clip_low."""
    clip_high: float = -1.0
    """Upper clip range: the ratio is held below 1 + clip_high."""
    cispo_cap: float = -1.0
    """CISPO: largest weight of a token, absolute (not an offset from 1)."""
    dual_clip: float = 0.0
    """Second bound for negative advantages: the objective is at least this times the advantage; 0: off, usual: 3."""
    tis: float = 0.0
    """Truncated importance weights for a gap between sampler and learner: their largest value; 0: off. Old log-probs are
    recomputed then."""
    lam: float = 1.0
    """Weight lambda of the ranking: of its loss in fgrpo, of its reward in R_joint = R_slate + lambda R_rank."""
    credit: str = "own"
    """fgrpo: own (a phase's advantage reaches its tokens only) or causal (plus lambda times that of later phases)."""
    lam_schedule: str = "constant"
    """lambda over the steps: constant, linear or cosine (to lam_end), or adaptive (follows the phases' remaining reward
    spread, within a factor of 4)."""
    lam_end: float = 1.0
    """lambda at the last step of a linear or cosine lam_schedule."""
    weights: list[float] = field(default_factory=list)
    """Weight of each unit, in place of 1 and lambda: 1 0 trains the slate alone, 0 1 the ranking alone."""
    focal_gamma: float = 0.0
    """Focal weight: advantages times (1 - success rate of the prompt's samples)^gamma; 0: off."""
    focal_ema: float = 0.0
    """Adaptive gamma: decay of each prompt's running success rate s; its gamma is 2 s focal_gamma. 0: one gamma for all."""
    smoothing: float = 0.0
    """Differential smoothing: minus this times the mean log-prob on right answers, plus on wrong ones (added to the
    advantage; right: at least half of the largest reward)."""
    keep_samples: int = 0
    """GFPO: train on this many samples of each group; 0: all."""
    keep_by: str = "length"
    """GFPO: the column of the score table that chooses, smallest first; with - in front largest first (--keep_by=-efficiency:
    most reward per token)."""
    keep_by_difficulty: list[int] = field(default_factory=list)
    """GFPO: samples to keep from the easiest to the hardest share of the step's prompts, such as 3 4 6 6 (equally hard ones
    share a place)."""
    rejected: str = "count"
    """GFPO: rejected samples count in the loss's divisor (count) or not (drop)."""
    refill: int = 0
    """Dynamic sampling: how often prompts whose samples all earn the same are replaced by others; 0: off."""
    good_answers: int = 1
    """Preference methods: good answers of a prompt."""
    bad_answers: int = 1
    """Preference methods: bad answers of a prompt."""
    pair_source: str = "data"
    """Preference methods: answers made from gold and candidates (data), or the best and worst of group_size samples (model)."""
    gae_gamma: float = 1.0
    """PPO: discount per token."""
    gae_lam: float = 0.95
    """PPO: lambda of generalised advantage estimation."""
    critic_lr: float = 1.0
    """PPO: learning rate of the critic, as a multiple of lr."""
    value_clip: float = 0.2
    """PPO: the critic's values are held this close to the old ones; 0: not clipped."""
    value_coef: float = 0.5
    """PPO: weight of the critic's loss."""
    end_value: float = 0.1
    """Lists: advantage of a stop token right behind the last line asked for."""
    early_value: float = -0.1
    """Lists: advantage of a stop token before that."""
    overflow_value: float = -0.1
    """Lists: advantage of every token beyond the last line asked for."""
    adv_eps: float = 1e-4
    """Added to the standard deviation where advantages are divided by it."""
    ddof: int = 1
    """Degrees of freedom of that standard deviation: 1 sample, 0 population."""
    beta: float = 0.0
    """Weight of the KL term against the frozen start weights; 0: no reference model is loaded. Preference methods: their
    beta."""
    kl_in: str = "loss"
    """Where the KL term goes: loss, or reward (of every unit, or of every token for ppo; use --kl k1 there)."""
    kl_fuse: float = 0.0
    """Largest KL to the start weights in nats per token: beyond it an update is not applied and the learning rate halved,
    and after three in a row the best checkpoint is restored. 0: off."""
    entropy: float = 0.0
    """Weight of an entropy bonus."""
    low_lr_gamma: float = 0.0
    """Learning rate times m_gamma, what a focal weight of this gamma takes from the mean advantage; 0: times 1."""
    kl: str = "k3"
    """KL estimator in the loss: k2 (right gradient on policy), k3, or k1 (zero expected gradient: to show it)."""
    kl_ratio: bool = False
    """Multiply the KL estimate by the importance ratio (differentiated too): right gradient off policy; k1 and k3."""
    kl_mask: str = "loss"
    """Tokens of the KL term: loss (those trained on) or completion (all, delimiters included)."""
    old_logp: str = "auto"
    """Old log-probs: sampler, recompute (by the training forward), auto: recompute under bfloat16 if mu > 1. Recomputing costs
    nothing (they are those of the update's first pass), but with tis, smoothing, KL in the reward or pairs: there a pass."""

    "== Reward"

    slate_reward: str = "recall"
    """R_slate: recall, f1 (precision over distinct items), f1_raw (over the slate's length) or utility."""
    ndcg_k: int = 5
    """Cutoff of the NDCG in R_rank."""
    ndcg_gain: str = "binary"
    """Gain of NDCG, in R_rank and in evaluation: binary, linear or exp (2^utility - 1)."""
    ndcg_ideal: str = "gold"
    """Ideal ranking of R_rank: gold (all gold items) or slate (only those in the slate: independent of coverage)."""
    format_penalty: float = -1.0
    """Reward of a malformed completion, in every phase."""
    format_scope: str = "all"
    """Tokens that a malformed completion trains: all, or none (it still counts in the group's mean)."""
    train_delimiters: bool = False
    """Phases: also train tags and stop token, as part of the phase they end. False, as in the paper: a phase's own words
    only; then the choice to end a phase gets blame where it breaks the format but never credit."""
    strict_rank: bool = False
    """A ranking with an entry outside the slate, or twice the same, is malformed. False: the entry is skipped."""
    append_unranked: bool = False
    """Append slate items that the ranking left out, in slate order, before scoring."""
    format_credit: str = "none"
    """Malformed completions: none (the penalty for every phase) or partial (for the phases that broke; others keep theirs)."""
    popularity_power: float = 0.0
    """A gold item found is worth its utility x (training count + 1)^-power, rescaled to keep an example's sum: R_slate is
    the recall and R_rank the NDCG of these weights (inverse propensity). 0: off."""
    tail_quota: float = 0.0
    """Share of the slate's places reserved for tail items (all but the most popular ones that make up half of the training
    counts): popular entries beyond the other places earn nothing. 0: off."""
    returns: str = "exp"
    """Lists: return of rank k over the hits rel_j at j >= k: exp (sum of rel_j / gamma^(j-k)) or log (of rel_j / log2(j+1))."""
    returns_gamma: float = math.inf
    """Lists: gamma of the exponential return, at least 1; inf leaves the hit at rank k itself."""
    consensus: float = 0.0
    """Lists: an item that c of n responders named is worth (c/n)^consensus: 0 union (any one counts), 1 mean."""
    year_tolerance: int = 2
    """Lists: a title with a year is a hit if the responder's year is at most this far."""
    reward_workers: int = 0
    """Processes that score completions, per rank. 0: in the run's own process, fastest for cheap rewards; there one that hangs
    or kills its process cannot be helped, so answers in mathematics and to IFEval get 2 processes all the same."""
    reward_timeout: float = 10.0
    """Seconds that a worker may take for one completion; then it is killed, and the completion cannot be scored."""
    max_reward_errors: float = 0.5
    """Completions whose reward fails are left out and counted (reward_errors); a larger share of those scored
    together (of four where there are fewer) ends the run."""
    overlong: float = 0.0
    """Soft punishment of length (DAPO): within the last this share of max_new_tokens up to -1 is added to the reward of
    every unit. 0: off."""

    "== Evaluation and checkpoints"

    eval_every: int = 0
    """Steps between evaluations on the valid split; 0: only at the end."""
    eval_examples: int = 0
    """Examples of such an evaluation; 0: all."""
    eval_k: list[int] = field(default_factory=lambda: [1, 3, 5])
    """Cutoffs of Recall, Precision, Hit and NDCG."""
    eval_temperature: float = 0.0
    """Temperature of evaluation; 0: greedy."""
    best_metric: str = ""
    """Metric by which the best checkpoint is kept. Empty: ndcg@5; of problems: correct."""
    k: list[int] = field(default_factory=list)
    """Problems: report pass@k, the chance that one of k samples is right, for each of these k (in training too). Empty: one
    answer per problem, at eval_temperature. --average: empty is 1, 2, 4, ..."""
    samples: int = 0
    """Problems: samples per problem that pass@k is computed from, at --temperature; 0: as many as the largest k."""
    subsample: int = 256
    """eval.py, pass@k --against: samples of a paired draw (m of m-out-of-n); done where there are more samples than this."""
    keep_answers: bool = False
    """eval.py, pass@k: also keep the tokens of right answers, for --rare."""
    rare: str = ""
    """eval.py: a pass_*.jsonl with kept answers of the model that a run started from: how much less likely --init has made the
    rarest 1 %% of them (Delta NLL)."""
    average: list[str] = field(default_factory=list)
    """eval.py: files pass_*.jsonl, or folders that hold such: pass@k of each and the mean over them, without a model."""
    baseline: str = ""
    """eval.py: score random or popularity instead of a model."""
    ranker: str = ""
    """eval.py: another run, which goes on from the slate that --init wrote (decoupled_sft)."""
    against: str = ""
    """eval.py: another run folder, or its eval_SPLIT.jsonl or pass_DATA_SPLIT.jsonl, to compare with (paired)."""
    save_every: int = 0
    """Steps between checkpoints; 0: only at the end and when stopped."""
    keep: int = 2
    """Checkpoints kept besides the best."""
    log_samples: int = 2
    """Decoded rollouts written to samples.jsonl at each step."""
    diagnose_every: int = 0
    """Methods with phases: steps between measurements of how the phases' gradients get along (costs some backward passes);
    0: never."""


CHOICES = {  # fields whose value is one word of a short list; checked before anything is loaded
    "method": list(METHODS),
    "report": ["none", "tensorboard", "wandb"],
    "split": ["train", "valid", "test"],
    "negatives": ["uniform", "popularity"],
    "item_form": ["title", "index"],
    "rank_form": ["item", "position"],
    "demo_order": ["shuffled", "gold_first", "pool", "chain"],
    "template": ["terse", "instruct"],
    "tokenizer": ["word", "line", "byte"],
    "arch": ["qwen3", "qwen2"],
    "maze_success": ["walk", "target"],
    "dtype": ["auto", "float32", "bfloat16"],
    "optimizer_dtype": ["float32", "bfloat16"],
    "schedule": ["constant", "linear", "cosine"],
    "attention": ["auto", "sdpa", "eager", "flash_attention_2"],
    "ratio": ["", "none", "token", "unit", "sequence", "sequence_token"],
    "scale": ["", "none", "std", "batch_std"],
    "lam_schedule": ["constant", "linear", "cosine", "adaptive"],
    "rejected": ["count", "drop"],
    "pair_source": ["data", "model"],
    "kl_in": ["loss", "reward"],
    "aggregate": ["", *AGGREGATES],
    "credit": ["own", "causal"],
    "kl": ["k1", "k2", "k3"],
    "kl_mask": ["loss", "completion"],
    "old_logp": ["auto", "sampler", "recompute"],
    "slate_reward": ["recall", "f1", "f1_raw", "utility"],
    "ndcg_gain": ["binary", "linear", "exp"],
    "ndcg_ideal": ["gold", "slate"],
    "format_scope": ["all", "none"],
    "answer": ["", "phases", "list"],
    "draw": ["request", "row"],
    "format_credit": ["none", "partial"],
    "returns": ["exp", "log"],
    "baseline": ["", "random", "popularity"],
}
AT_LEAST = {  # smallest allowed value
    **dict.fromkeys(
        "steps history slate_size rank_size max_prompt layers group_size max_new_tokens kv_tokens maze_held_out".split(),
        1,
    ),
    **dict.fromkeys(
        "batch_size micro_tokens mu min_count ndcg_k world_gold world_examples maze_examples keep".split(), 1
    ),
    **dict.fromkeys(
        "seed data_seed max_examples warmup log_samples eval_every eval_examples save_every ddof diagnose_every max_bad_steps".split(),
        0,
    ),
    **dict.fromkeys("temperature lr min_lr weight_decay grad_clip beta lam adv_eps world_noise world_slack".split(), 0),
    **dict.fromkeys("eval_temperature min_rating year_tolerance consensus".split(), 0),
    **dict.fromkeys("popularity_power tail_quota requests_disagreement plan_gb".split(), 0),
    **dict.fromkeys("requests_responders requests_named requests_examples returns_gamma".split(), 1),
    **dict.fromkeys(
        "lam_end focal_gamma focal_ema smoothing keep_samples refill dual_clip tis gae_gamma gae_lam".split(), 0
    ),
    **dict.fromkeys("critic_lr value_clip value_coef kl_fuse entropy low_lr_gamma overlong".split(), 0),
    **dict.fromkeys("reward_workers max_reward_errors".split(), 0),
    **dict.fromkeys("good_answers bad_answers subsample".split(), 1),
    "samples": 0,
    **dict.fromkeys("pool_size world_clusters world_items requests_themes".split(), 2),
    "rank_timeout": 1,
    "reward_timeout": 0.01,
    **dict.fromkeys("heads kv_heads ffn".split(), 0),
    "width": 32,
    "maze_size": 5,
}
AT_MOST = {
    **dict.fromkeys("seed data_seed".split(), 2**63 - 1),
    **dict.fromkeys("value_clip critic_lr clip_high cispo_cap tis reward_timeout".split(), 1e6),
    "popularity_power": 20, "low_lr_gamma": 100, "lr": 1e3, "reward_workers": 1024, "max_reward_errors": 1,
}  # fmt: skip
PHASES = ("slate", "rank", "plan")  # what a phase may hold; rewards.PHASES says what each earns
LISTS = {"requests"}  # data sets whose answers are lists
PROBLEMS = set(  # data sets whose answers are text that a verifier checks
    "maze deepscaler gsm8k math500 aime24 aime25 amc23 minerva olympiadbench ttrl gpqa synlogic ifeval".split()
)
INFINITE = {"returns_gamma"}  # numbers that may be infinite


def answer_of(cfg: Config) -> str:
    """Form of the answers: phases, list or text (see the field answer)."""
    if cfg.data in PROBLEMS:
        return "text"
    return cfg.answer or ("list" if cfg.data in LISTS or METHODS[cfg.method].unit == "rank" else "phases")


def printable(text: str) -> str:
    """Text for a terminal: what data and models wrote must not move the cursor, ring the bell or turn the line around, so
    what is not printable shows as an escape (\\x1b)."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def fail(message: str):
    """Leave with exit code 2 and one line on stderr: the way every bad input ends."""
    line = printable(" ".join(str(message).split()))
    line = line if len(line) <= 1500 else f"{line[:750]} ... {line[-700:]}"  # a key or a value may be a whole file
    print(f"{os.path.basename(sys.argv[0]) or 'error'}: {line}", file=sys.stderr)
    sys.exit(2)


def check(cfg: Config, world_size: int = 1, training: bool = True) -> Config:
    """Refuse impossible settings before anything is loaded; the message names the key and what to do.

    training: also those that only matter to train.py (eval.py may truncate its sampling, say).
    """
    for key, allowed in CHOICES.items():
        if (value := getattr(cfg, key)) not in allowed:
            near = difflib.get_close_matches(value, allowed, 1, 0)
            fail(f"--{key} {value!r} is not one of {', '.join(a for a in allowed if a)}; nearest: {near[0]!r}")
    for key, least in AT_LEAST.items():
        if not getattr(cfg, key) >= least:  # written so that nan fails too
            fail(f"--{key} {getattr(cfg, key)} is too small: at least {least}")
    for f in dataclasses.fields(cfg):
        value, most = getattr(cfg, f.name), AT_MOST.get(f.name, 1e9)
        for v in value if isinstance(value, list) else [value]:
            if isinstance(v, str) and ("\0" in v or re.search("[\ud800-\udfff]", v)):
                fail(f"--{f.name} {v!r}: no NUL, and nothing that is not UTF-8")
            if isinstance(v, float) and not math.isfinite(v) and not (f.name in INFINITE and v > 0):
                fail(f"--{f.name} {v} must be a finite number")
            if isinstance(v, int | float) and abs(v) > most and math.isfinite(v):
                fail(f"--{f.name} {v} is too large: at most {most:g}")
    if any(w < 0 for w in cfg.weights):
        fail(f"--weights {' '.join(map(str, cfg.weights))}: numbers of at least 0 are needed")
    if not 0 <= cfg.adam_beta2 < 1:
        fail(f"--adam_beta2 {cfg.adam_beta2} is outside [0, 1)")
    if not 0 < cfg.top_p <= 1:
        fail(f"--top_p {cfg.top_p} is outside (0, 1]")
    if max(cfg.gae_gamma, cfg.gae_lam) > 1 or cfg.focal_ema >= 1:
        fail(f"--gae_gamma {cfg.gae_gamma}, --gae_lam {cfg.gae_lam}: at most 1; --focal_ema {cfg.focal_ema}: below 1")
    if wrong := [p for p in cfg.phases if p not in PHASES]:
        fail(f"--phases {' '.join(cfg.phases)}: {wrong[0]!r} is not one of {', '.join(PHASES)}")
    if [p for p in cfg.phases if p != "plan"] != ["slate", "rank"]:
        fail(f"--phases {' '.join(cfg.phases)}: one slate and, after it, one rank are needed")
    tags = 2 * len(cfg.phases)
    if len(cfg.tags) != tags or len(set(cfg.tags)) != tags or not all(t.strip() for t in cfg.tags):
        fail(
            f"--tags {' '.join(cfg.tags)}: {tags} different strings are needed (open and close of {', '.join(cfg.phases)})"
        )
    if any(a != b and a in b for a in cfg.tags for b in cfg.tags):
        fail(f"--tags {' '.join(cfg.tags)}: no tag may contain another")
    form = answer_of(cfg)
    listed = form == "list"
    if form == "text" and cfg.answer:
        fail(
            f"--answer {cfg.answer}: answers to --data {cfg.data} are text that a verifier checks; leave --answer empty"
        )
    if min(cfg.k, default=1) < 1 or max(cfg.k, default=0) > (cfg.samples or math.inf):
        fail(f"--k {' '.join(map(str, cfg.k))}: from 1 to --samples {cfg.samples} are possible")
    if cfg.k and not cfg.average and form != "text":
        fail(f"--k: pass@k is for problems, whose answers are right or wrong; --data {cfg.data} has none")
    if cfg.k and not cfg.average and not cfg.temperature:
        fail("--temperature 0 makes all samples of a problem equal: pass@k needs a temperature, such as 1")
    if cfg.keep_answers and not cfg.k:
        fail("--keep_answers: it keeps those of the samples for pass@k; say which with --k")
    if form == "text" and (cfg.ranker or cfg.baseline):
        fail(f"--ranker, --baseline: the problems of --data {cfg.data} have no items to rank")
    if cfg.data in LISTS and not listed:
        fail(f"--answer phases: answers to --data {cfg.data} are lists; leave --answer empty")
    if cfg.ranker and listed:
        fail(f"--ranker {cfg.ranker}: lists have no slate to go on from")
    if cfg.tail_quota >= 1 or cfg.requests_disagreement > 1:
        fail(
            f"--tail_quota {cfg.tail_quota} must be below 1, --requests_disagreement {cfg.requests_disagreement} at most 1"
        )
    if cfg.overlong > 1:
        fail(f"--overlong {cfg.overlong} is a share of --max_new_tokens: at most 1")
    if cfg.requests_named + 2 > cfg.requests_items:
        fail(
            f"--requests_named {cfg.requests_named} leaves no two of --requests_items {cfg.requests_items} to ask with"
        )
    if cfg.rank_size > cfg.slate_size and form == "phases":
        fail(f"--rank_size {cfg.rank_size} is larger than --slate_size {cfg.slate_size}: a ranking orders the slate")
    pool = cfg.show_pool and cfg.data not in LISTS | PROBLEMS  # these never show one
    if pool and cfg.slate_size > cfg.pool_size:
        fail(f"--slate_size {cfg.slate_size} is larger than --pool_size {cfg.pool_size}")
    if cfg.item_form == "index" and not pool:
        fail("--item_form index needs a pool in the prompt: use --show_pool true (and not --data requests)")
    if cfg.world_gold >= cfg.world_items:
        fail(f"--world_gold {cfg.world_gold} must be smaller than --world_items {cfg.world_items}")
    if cfg.world_noise > 1:
        fail(f"--world_noise {cfg.world_noise} is a probability: at most 1")
    if cfg.clip_low >= 1 or (cfg.clip_low < 0 and cfg.clip_low != -1) or (cfg.clip_high < 0 and cfg.clip_high != -1):
        fail(
            f"--clip_low {cfg.clip_low} --clip_high {cfg.clip_high}: ranges are offsets from 1, and clip_low is below 1"
        )
    if min(cfg.plan_ranks, default=1) < 1:
        fail(f"--plan_ranks {' '.join(map(str, cfg.plan_ranks))}: numbers of ranks are at least 1")
    if not cfg.eval_k or min(cfg.eval_k) < 1:
        fail("--eval_k needs cutoffs of at least 1")
    if cfg.width % 32:
        fail(f"--width {cfg.width} is not a multiple of 32")
    heads = cfg.heads or cfg.width // 32
    if cfg.width % heads or cfg.width // heads % 2 or heads % (cfg.kv_heads or heads):
        fail(
            f"--heads {heads} must cut --width {cfg.width} into even sizes, and --kv_heads {cfg.kv_heads or heads} must divide it"
        )
    if cfg.maze_size % 2 == 0 or cfg.maze_size > 49:
        fail(f"--maze_size {cfg.maze_size}: an odd number up to 49 is needed (walls lie between the cells)")
    if not cfg.run_dir.strip():
        fail("--run_dir needs the name of a folder")
    if cfg.rank_form == "position" and cfg.template == "instruct":
        fail("--rank_form position: the instruct prompts ask for titles or pool numbers; use --template terse")
    if cfg.demo_order == "chain" and (cfg.data not in ("world", "movielens", "lastfm") or cfg.show_pool):
        fail("--demo_order chain is for recommendation data without a pool; use pool, shuffled or gold_first")
    if training:
        check_training(cfg, world_size)
    return cfg


def check_training(cfg: Config, world_size: int) -> None:
    """What an evaluation may ask for and a training run may not."""
    row = resolve(cfg)
    samples = row.source == "sample"
    if cfg.top_p < 1 and samples:
        fail("--top_p below 1 would train on another distribution than it samples from: use --top_p 1 "
             "(eval.py may truncate)")  # fmt: skip
    if samples and row.baseline in ("mean", "loo") and cfg.group_size < 2:
        fail(f"--group_size {cfg.group_size}: method {cfg.method} compares samples of a prompt, so it needs at least 2")
    if samples and cfg.temperature == 0:
        fail("--temperature 0 makes all samples of a prompt equal: nothing to learn from; use 1")
    if not samples and row.ratio != "none":
        fail(f"--ratio {row.ratio}: demonstrations have no sampler, so method {cfg.method} takes no ratio")
    if samples and row.ratio == "none" and cfg.mu > 1:
        fail(
            f"--mu {cfg.mu}: without a ratio the later updates would be off policy uncorrected; use --mu 1 or --ratio token"
        )
    if cfg.batch_size % world_size:
        fail(f"--batch_size {cfg.batch_size} is not divisible by {world_size} ranks: "
             f"use {max(1, cfg.batch_size // world_size) * world_size}")  # fmt: skip
    if cfg.credit == "causal" and not (samples and row.unit == "phase"):
        fail(f"--credit causal needs a method that samples and has phases; {cfg.method} is not such")
    if row.ratio == "none" and max(cfg.clip_low, cfg.clip_high) >= 0:
        fail(f"--clip_low, --clip_high: {cfg.method} has no ratio to clip")
    if cfg.format_credit == "partial" and cfg.format_scope == "none":
        fail("--format_credit partial: a malformed answer's valid phases teach nothing under --format_scope none")
    check_options(cfg, row)
    if cfg.kl == "k2" and cfg.kl_ratio and cfg.beta:
        fail("--kl k2 with --kl_ratio has a wrong gradient: use --kl k3 (or k1), or --kl_ratio false")
    form = answer_of(cfg)
    if form == "text" and (row.unit in ("phase", "rank") or (row.source == "pairs" and cfg.pair_source == "data")):
        fail(f"--method {cfg.method}: answers to --data {cfg.data} are text of one unit, right or wrong: use a method whose "
             f"unit is the sequence or the token (preference methods: --pair_source model)")  # fmt: skip
    if row.unit == "phase" and form == "list":
        fail(
            f"--method {cfg.method} needs answers with phases; these are lists: use a method with unit sequence or rank"
        )
    if row.unit == "rank" and form != "list":
        fail(f"--method {cfg.method} needs answers that are lists: leave --answer empty, or use list")
    if form == "text":
        names = [*"correct exact invalid length finished".split(), *(f"pass@{k}" for k in cfg.k)]
    elif form == "list":
        names = [f"{m}@{k}" for m in ("recall", "hit", "ndcg", "row_recall") for k in cfg.eval_k] + ["mrr"]
    else:
        names = [f"{m}@{k}" for m in ("recall", "precision", "hit", "ndcg", "mrr") for k in cfg.eval_k]
        names += ["mrr", "slate_recall", "slate_precision"]
    if cfg.best_metric and cfg.best_metric not in names:
        near = difflib.get_close_matches(cfg.best_metric, names, 1, 0)[0]
        fail(f"--best_metric {cfg.best_metric!r} is not evaluated; nearest: {near!r}")


COLUMNS = "reward invalid duplicates length finished efficiency overlong unscorable"  # of every score table
COLUMNS_OF = {
    "phases": "slate_recall slate_precision rank_ndcg out_of_pool",
    "list": "hits recall dcg unparsable out_of_catalog lines",
    "text": "correct exact",
}


def check_options(cfg: Config, row: Method) -> None:
    """Options on top of a row that would do nothing, or something else than they say."""
    sampled = row.source == "sample"
    grouped = sampled and row.baseline in ("mean", "loo")
    phases = row.unit == "phase"
    for key, fits, needs in [
        ("focal_gamma", sampled, "a method that samples"),
        ("smoothing", grouped, "a method that compares samples of a prompt"),
        ("keep_samples", grouped, "a method that compares samples of a prompt"),
        ("keep_by_difficulty", grouped, "a method that compares samples of a prompt"),
        ("refill", grouped, "a method that compares samples of a prompt"),
        ("focal_ema", cfg.focal_gamma, "--focal_gamma above 0"),
        ("dual_clip", isinstance(row.clip, Clip) and row.ratio != "none", "a method with a clipped ratio"),
        ("tis", sampled and row.ratio != "none", "a method with a ratio"),
        ("entropy", sampled, "a method that samples"),
        ("kl_fuse", sampled, "a method that samples"),
        ("diagnose_every", sampled and phases, "a method with phases"),
        ("weights", row.unit in ("phase", "rank"), "a method with several units"),
        ("scale", grouped, "a method that compares samples of a prompt"),
        ("overlong", sampled or cfg.pair_source == "model", "a method that samples"),
        ("popularity_power", answer_of(cfg) == "phases", "answers with phases"),
        ("tail_quota", answer_of(cfg) == "phases", "answers with phases"),
        ("consensus", answer_of(cfg) == "list", "answers that are lists"),
    ]:
        if getattr(cfg, key) and not fits:
            fail(f"--{key} {getattr(cfg, key)}: needs {needs}; {cfg.method} is not such")
    if cfg.lam_schedule != "constant" and not (phases and not cfg.weights):
        fail(f"--lam_schedule {cfg.lam_schedule}: needs a method with phases, and no --weights")
    units = {"phase": len(cfg.phases), "rank": cfg.slate_size + 1}.get(row.unit, 1)
    if cfg.weights and len(cfg.weights) != units:
        fail(f"--weights {' '.join(map(str, cfg.weights))}: {units} numbers are needed, one for each unit")
    if isinstance(row.clip, Cap) and max(cfg.clip_low, cfg.clip_high) >= 0:
        fail(f"--clip_low, --clip_high: {cfg.method} caps its weights instead; use --cispo_cap")
    if not isinstance(row.clip, Cap) and cfg.cispo_cap >= 0:
        fail(f"--cispo_cap {cfg.cispo_cap}: {cfg.method} clips its ratio; use --clip_low and --clip_high")
    if isinstance(row.clip, Cap) and row.ratio != "token":
        fail(f"--ratio {row.ratio}: the weights of {cfg.method} are those of tokens; use --ratio token")
    if 0 < cfg.dual_clip <= 1 + (row.clip.high if row.clip else 0):
        fail(f"--dual_clip {cfg.dual_clip} must lie above the upper clip bound {1 + row.clip.high:g}")
    least = min(cfg.keep_by_difficulty or [cfg.keep_samples or 2])
    if not 2 <= least or max([cfg.keep_samples, *cfg.keep_by_difficulty]) > cfg.group_size:
        fail(f"--keep_samples {cfg.keep_samples} --keep_by_difficulty {cfg.keep_by_difficulty}: from 2 to --group_size "
             f"{cfg.group_size} samples can be kept")  # fmt: skip
    columns = f"{COLUMNS} {COLUMNS_OF[answer_of(cfg)]}".split()
    if (name := cfg.keep_by.removeprefix("-")) not in columns:
        near = difflib.get_close_matches(name, columns, 1, 0)[0]
        fail(
            f"--keep_by {cfg.keep_by!r} is no column of the scores; nearest: {near!r} (with - in front: largest first)"
        )
    if cfg.credit == "causal" and "plan" in cfg.phases:
        fail("--credit causal: a plan is credited with the whole answer already; use --credit own")
    if row.source == "pairs" and cfg.mu > 1:
        fail(f"--mu {cfg.mu}: the gradient of {cfg.method} is that of the weights a step starts with; use --mu 1")
    if row.source == "pairs" and not cfg.beta:
        fail(f"--beta 0: {cfg.method} compares with the start weights, so its beta must be above 0")
    if row.source == "pairs" and cfg.pair_source == "model" and cfg.group_size < cfg.good_answers + cfg.bad_answers:
        fail(
            f"--group_size {cfg.group_size} is smaller than --good_answers {cfg.good_answers} + --bad_answers {cfg.bad_answers}"
        )
    if row.source == "demo" and cfg.beta:
        fail(
            f"--beta {cfg.beta}: {cfg.method} learns from demonstrations, which no KL can be measured on; use --beta 0"
        )
    if cfg.kl_in == "reward" and cfg.kl != "k1" and cfg.beta and sampled:
        fail(f"--kl {cfg.kl} --kl_in reward: in a reward only k1 has the KL's gradient; use --kl k1")


class Parser(argparse.ArgumentParser):
    """argparse with errors on one line."""

    def error(self, message):
        fail(message)


def unknown(key: str) -> str:
    """What to say of a key that is no field: the nearest name."""
    near = difflib.get_close_matches(key.lstrip("-")[:100], [f.name for f in dataclasses.fields(Config)], 1, 0)
    return f"unknown key {key!r}; the nearest is {near[0]!r} (--help lists all)"


def boolean(text: str) -> bool:
    if text.lower() in ("true", "1", "yes", "on"):
        return True
    if text.lower() in ("false", "0", "no", "off"):
        return False
    raise ValueError(text)


def number(text: str) -> float:
    """A float, with YAML's spelling of infinity (.inf) too."""
    return float(text.lower().replace(".inf", "inf"))


def kind_of(f: dataclasses.Field) -> tuple[Callable, bool]:
    """What turns a text into a value of a field, and does the field take several?"""
    many = f.type in (list[str], list[int], list[float])
    kind = f.type.__args__[0] if many else f.type
    return {bool: boolean, float: number}.get(kind, kind), many


@functools.cache
def class_body() -> list[ast.stmt]:
    """The statements of Config: group titles, fields and the docstrings under them (which Python itself does not keep)."""
    return ast.parse(inspect.getsource(Config)).body[0].body


def parser() -> Parser:
    """The command line of train.py, eval.py and data.py show: a flag per field, grouped, with the field's docstring."""
    p = Parser(description="Every field of Config; a YAML file may set any of them.", allow_abbrev=False,
               formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    docs = {
        a.target.id: " ".join(b.value.value.split())
        for a, b in itertools.pairwise(class_body())
        if isinstance(a, ast.AnnAssign)
    }
    words = {"methods": ", ".join(METHODS), "aggregates": ", ".join(AGGREGATES)}
    fields, group = {f.name: f for f in dataclasses.fields(Config)}, p
    for node in class_body():
        if isinstance(node, ast.Expr) and node.value.value.startswith("== "):
            group = p.add_argument_group(node.value.value[3:])
        elif isinstance(node, ast.AnnAssign):
            f = fields[node.target.id]
            text = docs[f.name] % words if "%(" in docs[f.name] else docs[f.name].replace("%", "%%")
            kind, many = kind_of(f)
            extra = {"nargs": "*"} if many else {"nargs": "?", "const": True} if f.type is bool else {}
            default = f.default_factory() if many else f.default
            group.add_argument(f"--{f.name}", type=kind, default=default, help=text, metavar="", **extra)
    return p


def read_yaml(path: str) -> dict[str, str | list[str]]:
    """A flat YAML mapping, key -> the text of its value as written, or of each entry; anything else ends in one line that
    names the file. Nothing is constructed: 010 is no octal number, yes no truth value, a tag (!!python/...) an error."""

    def is_a(node, cls, *tags: str) -> bool:
        return isinstance(node, cls) and node.tag.removeprefix("tag:yaml.org,2002:") in tags

    def is_text(node) -> bool:
        return is_a(node, yaml.ScalarNode, "str", "int", "float", "bool", "timestamp")

    try:
        with open(path, encoding="utf-8") as f:
            root = yaml.compose(f, yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as e:
        fail(f"cannot read config {path}: {e}")
    if root is not None and not is_a(root, yaml.MappingNode, "map"):
        fail(f"{path}: expected lines of 'key: value'")
    out: dict[str, str | list[str]] = {}
    for key, value in root.value if root else []:
        line = f"{path} line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            fail(f"{line}: expected 'key: value'")
        if key.value in out:
            fail(f"{line}: key {key.value!r} is given twice")
        if is_text(value):
            out[key.value] = value.value
        elif is_a(value, yaml.SequenceNode, "seq") and all(map(is_text, value.value)):
            out[key.value] = [v.value for v in value.value]
        else:
            found = value.tag.removeprefix("tag:yaml.org,2002:")
            fail(f"{line}: key {key.value!r} needs a plain value or a list of plain values, not {found}")
    return out


def read_config(path: str) -> dict:
    """The settings that a YAML file gives, each through the type of its field."""
    fields, out = {f.name: f for f in dataclasses.fields(Config)}, {}
    for key, text in read_yaml(path).items():
        if key not in fields:
            fail(f"{path}: {unknown(key)}")
        kind, many = kind_of(fields[key])
        if isinstance(text, list) and not many:
            fail(f"{path}: key {key!r} needs a plain value, not a list")
        try:
            values = [kind(t) for t in (text if isinstance(text, list) else [text])]
        except ValueError:
            fail(f"{path}: --{key} {text!r} is no {kind.__name__}")
        out[key] = values if many else values[0]
    return out


def given(key: str, argv: list[str]) -> bool:
    """Is a flag on the command line?"""
    return any(a == f"--{key}" or a.startswith(f"--{key}=") for a in argv)


def parse(argv: list[str] | None = None, world_size: int = 1, training: bool = True) -> Config:
    """Command line -> checked Config. Errors: exit code 2 and one line.

    Not training (eval.py): without --config, an --init that is a run folder brings its own settings.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if lost := [a for a in argv if a.endswith("=--")]:
        fail(f"{lost[0]}: -- is no value")  # argparse would drop it, and read a switch (--resume=--) as on
    p = parser()
    first, rest = p.parse_known_args(argv)
    if rest:
        fail(unknown(rest[0]))
    path = first.config
    if first.resume and not path:
        path = os.path.join(first.run_dir, "config.yaml")
        if not os.path.exists(path):
            fail(f"--resume: {first.run_dir} holds no run (no config.yaml); give --run_dir of the run to continue")
    beside = os.path.join(first.init, "config.yaml")
    if not path and not training and first.init and os.path.isfile(beside):
        path = beside
    if path:
        own = read_config(path)
        row = METHODS.get(first.method if given("method", argv) else own.get("method", Config.method))
        p.set_defaults(**{**(row.options if row else {}), **own})
    elif first.method in METHODS:
        p.set_defaults(**METHODS[first.method].options)
    cfg = Config(**vars(p.parse_args(argv)))
    cfg.run_dir = cfg.run_dir.replace("METHOD", cfg.method)
    cfg.best_metric = cfg.best_metric or ("correct" if cfg.data in PROBLEMS else "ndcg@5")
    return check(cfg, world_size, training)


def dump(cfg: Config) -> str:
    """The resolved configuration as YAML, in the order of the fields."""
    return yaml.safe_dump(dataclasses.asdict(cfg), sort_keys=False, allow_unicode=True)
