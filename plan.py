"""What a training step needs, computed from the configuration alone: memory per rank, bytes sent, time, and what limits.

    python train.py --config configs/hotpotqa.yaml --init Qwen/Qwen3-4B-Instruct-2507 --plan
    python train.py --init DIR --batch_size 512 --checkpointing --plan --plan_ranks 8 64 512 --plan_gb 141
    python plan.py DIR DIR --method fgrpo --checkpointing        what fits on which cards, as a table

Nothing is trained, written or loaded but the model's config (parameters are counted on the meta device). Every prompt
counts as max_prompt tokens and every completion as max_new_tokens: an upper bound. Formulas are for blocks of the Llama
kind (RMS norms, gated feed-forward; Qwen2, Qwen3, Llama, SmolLM2); other models get their exact parameters and the same
formulas, and every model is taken to share prompts where share_prefix says so. Computed, not measured: times rest on the
Machine below. Left out: fragmentation of the allocator (leave a tenth free), the CUDA context (about 1 GB), experts, tensor
and pipeline parallelism.
"""

import bisect
import math
import os
import sys
from dataclasses import dataclass, replace

import torch

import data
import model as lm
from config import Config, fail, parse
from losses import resolve
from rollout import CHUNK as SAMPLED  # words that the sampler takes at a time

GB = 1e9
RANKS = (8, 64, 512)  # shown beside the number at hand


@dataclass(frozen=True)
class Machine:
    """What times assume: rates that code like this sustains on an H100 node, not the printed peaks."""

    flops: float = 400e12  # FLOP/s of bf16 matrix products
    hbm: float = 2.5e12  # bytes/s of device memory
    nvlink: float = 315e9  # bytes/s a rank receives within a node: 0.7 of 450 GB/s
    nic: float = 35e9  # bytes/s a rank's own network card receives: 0.7 of 400 Gb/s
    node: int = 8  # ranks of a node
    hop: float = 2e-6  # seconds per rank in the ring of a collective
    launch: float = 1e-3  # seconds that Python needs to launch one layer of one decoding step

    def receive(self, ranks: int) -> float:
        """bytes/s a rank receives in a ring: across nodes all cards of a node share the ring's traffic."""
        return self.nvlink if ranks <= self.node else min(self.nvlink, self.node * self.nic)


@dataclass(frozen=True)
class Shape:
    """A model's sizes. params: all, tied ones once; root: those outside the blocks (embeddings, head, last norm), which
    FSDP2 keeps together; block: of the largest block; kv_layers: those that keep keys and values."""

    params: int
    root: int
    block: int
    layers: int
    kv_layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    qk_norm: bool

    @property
    def tied(self) -> bool:
        """Are input and output embeddings one matrix?"""
        return self.root < 2 * self.vocab * self.hidden

    @property
    def kv_numbers(self) -> int:
        """Keys and values of one token: layers x 2 x kv_heads x head_dim."""
        return self.kv_layers * 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Path:
    """How the update runs. shared: each prompt once, P + G R tokens in place of G (P + R), without padding; chunk: bytes of
    logits that exist at once (0: all of a micro-batch)."""

    shared: bool = False
    chunk: int = 0
    checkpointing: bool = False

    def unit(self, cfg: Config) -> tuple[int, int]:
        """The least that one forward takes: (tokens that micro_tokens counts, positions with logits). Plain: a row, whose logits
        are kept from the last token of the prompt on; shared: a group."""
        rows, p, r = samples(cfg), cfg.max_prompt, cfg.max_new_tokens
        return (p + rows * r, rows * r) if self.shared else (p + r, r + 1)

    def fed(self, cfg: Config) -> int:
        """Tokens of a unit that go through the blocks: packed, the last one of a completion is no input."""
        return self.unit(cfg)[0] - (samples(cfg) if self.shared else 0)

    def units(self, cfg: Config, ranks: int) -> int:
        """Units of a step on one rank."""
        return prompts(cfg, ranks) * (1 if self.shared else samples(cfg))

    def micro(self, cfg: Config, ranks: int) -> tuple[int, int]:
        """(micro-batches of a step, units in one), as micro_batches cuts them: at most micro_tokens, at least one unit."""
        size = min(max(1, cfg.micro_tokens // self.unit(cfg)[0]), self.units(cfg, ranks))
        return math.ceil(self.units(cfg, ranks) / size), size


def path_of(cfg: Config) -> Path:
    """The path that train.py takes, for a model that can (lm.share_prefix)."""
    shared = cfg.share_prefix and cfg.attention in ("auto", "sdpa")
    return Path(shared, lm.CHUNK if shared else 0, cfg.checkpointing)


# ---------------------------------------------------------------------------------------------------------------------
# The model and the step


def shape_of(config) -> Shape:
    """Sizes of a Hugging Face config; the parameters are counted on a model without memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        net = AutoModelForCausalLM.from_config(config)
    c = config.get_text_config()
    blocks = max((m for m in net.modules() if isinstance(m, torch.nn.ModuleList)), key=len)
    sizes = [sum(p.numel() for p in b.parameters()) for b in blocks]
    total = sum(p.numel() for p in net.parameters())
    kinds = getattr(c, "layer_types", None) or ["full_attention"] * len(blocks)
    heads = c.num_attention_heads
    return Shape(
        total, total - sum(sizes), max(sizes), len(blocks), sum("attention" in k and "linear" not in k for k in kinds),
        c.hidden_size, getattr(c, "intermediate_size", None) or 4 * c.hidden_size, heads,
        getattr(c, "num_key_value_heads", None) or heads, getattr(c, "head_dim", None) or c.hidden_size // heads,
        c.vocab_size, any(n.endswith("q_norm.weight") for n, _ in net.named_parameters()),
    )  # fmt: skip


def model_config(cfg: Config):
    """Config of --init, or of the tiny model that train.py would build: for its vocabulary the data is read."""
    from transformers import AutoConfig

    if cfg.init:
        return lm.from_hub(AutoConfig, cfg)
    train = data.load(cfg, "train")
    return lm.tiny_config(cfg, lm.load_tokenizer(cfg, train.examples, train.catalog, train.vocabulary))


def samples(cfg: Config) -> int:
    """Rows of a prompt in the update."""
    source = resolve(cfg).source
    return {"sample": cfg.group_size, "demo": 1, "pairs": cfg.good_answers + cfg.bad_answers}[source]


def prompts(cfg: Config, ranks: int) -> int:
    """Prompts of a step on one rank; one where there are fewer prompts than ranks (train.py refuses that)."""
    return math.ceil(cfg.batch_size / ranks)


def decoded(cfg: Config) -> int:
    """Rows of a prompt that are sampled; 0 for methods that learn from written answers."""
    method = resolve(cfg)
    return cfg.group_size if method.source == "sample" or (method.source, cfg.pair_source) == ("pairs", "model") else 0


def width(cfg: Config) -> int:
    """Bytes of a number in forward passes. auto reads as on a GPU: bfloat16."""
    return 4 if cfg.dtype == "float32" else 2


def passes(cfg: Config) -> dict[str, int]:
    """Forward passes without gradient over the step's rows: old log-probs, reference, values (as train.measure). Old ones that
    the update alone needs are those of its first pass."""
    method = resolve(cfg)
    recompute = cfg.old_logp == "recompute" or (cfg.old_logp == "auto" and cfg.mu > 1 and width(cfg) < 4)
    early = cfg.tis > 0 or (recompute and (cfg.smoothing > 0 or cfg.kl_in == "reward"))
    old = method.source == "pairs" or (method.ratio != "none" and early)
    return {
        "old": int(old),
        "reference": int(bool(cfg.beta or cfg.kl_fuse)),
        "critic": int(method.baseline == "critic"),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Memory, in bytes per rank


def state(s: Shape, cfg: Config, ranks: int) -> dict[str, float]:
    """Bytes that stay for the whole run, sharded over ranks: 4 per parameter for fp32 master weights, 8 for AdamW's two
    moments (4 in bfloat16); 4 for a reference; as much as the policy for a critic (a body without head, a value per hidden
    unit). The reference's root is never resharded after its first forward (FSDP2), so it stays whole in the compute type."""
    c, has = width(cfg), passes(cfg)
    moments = 4 if cfg.optimizer_dtype == "bfloat16" else 8
    body = s.params - (0 if s.tied else s.vocab * s.hidden) + s.hidden + 1
    kept = c * s.root if ranks > 1 else 0
    return {
        "master weights (fp32)": 4 * s.params / ranks,
        f"AdamW moments ({'bf16' if moments == 4 else 'fp32'})": moments * s.params / ranks,
        "reference": has["reference"] * (4 * s.params / ranks + kept),
        "critic and its moments": has["critic"] * (4 + moments) * body / ranks,
    }


def gradients(s: Shape, cfg: Config, ranks: int) -> float:
    """4 bytes per parameter, fp32 (reduced in fp32 under FSDP2), sharded; the critic's too."""
    return 4 * s.params / ranks * (1 + passes(cfg)["critic"])


def gathered(s: Shape, cfg: Config, ranks: int) -> tuple[float, float]:
    """Bytes of weights in the compute type beside the master: (in the rollout, in the update).

    Several ranks: the rollout holds all of them; the update the root, two blocks (one in use, one on its way) and the
    gradient of a block, in the compute type and once more in fp32 on its way to the reduction. One rank: autocast's copies
    of all matrices, which the backward pass needs too; none in float32.
    """
    c = width(cfg)
    if ranks == 1:
        return (c * s.params,) * 2 if c < 4 else (0.0, 0.0)
    return c * s.params, c * s.root + (3 * c + 4) * s.block


def saved_per_token(s: Shape, cfg: Config, ranks: int, path: Path) -> float:
    """Bytes that autograd keeps of one token in one block. h hidden, f feed-forward, H heads, K key-value heads, d their
    size, c bytes of the compute type, r of the residual stream (4 under autocast, c where FSDP2 casts the weights):

        2 h (4 + r)         two RMS norms: their input in fp32 and the normalised one
        n h c               inputs of q, k, v, gate, up: n = 2 shared ones, or 5 copies where autocast casts each
        (2 H + 2 R) d c     queries, output, and keys and values of R heads: H if repeated (padded rows under sdpa), else K;
                            a packed row keeps no scores and copies no prompt
        4 H                 log-sum-exp
        W c                 the mask of a padded row of W tokens (sdpa; a bool mask is cast in every block)
        (H + K) d (4 + c)   norms of queries and keys, where there are (Qwen3)
        4 f c               gate, its SiLU, up, and their product
    """
    c = width(cfg)
    r = c if ranks > 1 else 4
    flash = cfg.attention == "flash_attention_2"
    padded, unit = not (flash or path.shared), path.fed(cfg)
    out = 2 * s.hidden * (4 + r) + (2 if r == c else 5) * s.hidden * c + 4 * s.ffn * c + 4 * s.heads
    out += (2 * s.heads + 2 * (s.heads if padded else s.kv_heads)) * s.head_dim * c
    if s.qk_norm:
        out += (s.heads + s.kv_heads) * s.head_dim * (4 + c)
    if padded:
        out += unit * c
    if cfg.attention == "eager":
        out += s.heads * unit * (4 + c)  # probabilities in fp32, and cast
    return out


def activations(s: Shape, cfg: Config, ranks: int, path: Path, units: int) -> float:
    """Bytes kept between forward and backward of `units` rows (or groups), without logits: those of every block, with
    checkpointing only its input, r per hidden unit; and 4 + r per hidden unit of the last norm."""
    r = width(cfg) if ranks > 1 else 4
    block = r * s.hidden if path.checkpointing else saved_per_token(s, cfg, ranks, path)
    return units * path.fed(cfg) * (s.layers * block + s.hidden * (4 + r))


def working(s: Shape, cfg: Config, ranks: int, path: Path, units: int) -> float:
    """Bytes that one block takes on top: 2 f c per token for gradients inside its feed-forward, or what attention takes, while
    the 4 f c that the feed-forward keeps are not there; and with checkpointing what its second forward keeps. Under them lies
    the gradient of the head, V h numbers, which waits for that of the embeddings where they are one matrix, and under FSDP2
    always."""
    c, tokens = width(cfg), units * path.fed(cfg)
    block = saved_per_token(s, cfg, ranks, path) if path.checkpointing else 0
    head = s.vocab * s.hidden * (c if ranks > 1 else 4 * s.tied)
    return head + tokens * block + max(2 * tokens * s.ffn * c, attention(s, cfg, path, units) - 4 * tokens * s.ffn * c)


def attention(s: Shape, cfg: Config, path: Path, units: int) -> float:
    """Bytes of model.attend on a GPU: 12 per score of one call, fp32, in H heads. A call takes all prompts of one length (here:
    all), P x P each, or what continues one prompt, G (R - 1) x P, or completions of one length. On a CPU, and on the plain
    path, kernels keep none."""
    if not path.shared:
        return 0.0
    rows, p, r = samples(cfg), cfg.max_prompt, cfg.max_new_tokens - 1
    return 12 * s.heads * max(units * p * p, rows * r * p, units * rows * r * r)


def logits(s: Shape, cfg: Config, path: Path, units: int) -> float:
    """Bytes of the head at their highest. Plain: logits in the compute type, divided ones, log-softmax, and three passing
    copies for the entropy, fp32 each: c + 20 per logit (4 of them are kept for the backward pass). In chunks: a buffer, copies of
    up to half a chunk, the gradient of the head's V h weights, made in the same pass in fp32 (in bfloat16 with a product
    beside it), and for every position its hidden state and that one's gradient."""
    c, positions = width(cfg), units * path.unit(cfg)[1]
    if path.chunk:
        buffer = 4 * s.vocab * min(positions, max(1, path.chunk // (4 * s.vocab)))
        low = c if c < 4 else 0
        return buffer + min(buffer, path.chunk // 2) + (4 + low) * s.vocab * s.hidden + (8 + low) * positions * s.hidden
    return (c + 20) * positions * s.vocab


def rollout(s: Shape, cfg: Config, ranks: int, rows: int) -> dict[str, float]:
    """Bytes of decoding `rows` rows: keys and values of their prompts, once each, and of max_new_tokens per row (layers x 2 x
    kv_heads x head_dim x c per token, and one more layer that is being copied); 3 c + 4 per score of a step's attention in
    one layer; old and new logits and what the sampler makes of some at a time. And, before these, of the prefill: the prompts'
    keys and values and one block's 3 f c + h (4 + 4 c) per token."""
    c, prompt, new = width(cfg), cfg.max_prompt, cfg.max_new_tokens
    n, words = math.ceil(rows / max(1, decoded(cfg))), rows * s.vocab
    return {
        "KV cache": (n * prompt + rows * new) * c * s.kv_numbers * (1 + 1 / s.kv_layers),
        "scores of a token": rows * s.heads * (prompt + new) * (3 * c + 4 if c < 4 else 12),
        "sampler": words * 2 * c + 8 * min(words, max(s.vocab, SAMPLED)),
        "prefill": n * prompt * (c * s.kv_numbers + 3 * s.ffn * c + s.hidden * (4 + 4 * c)),
    }


def decoding(s: Shape, cfg: Config, ranks: int, rows: int) -> float:
    """Highest bytes of a rollout: of its prefill, or of a token."""
    first = (parts := rollout(s, cfg, ranks, rows)).pop("prefill")
    return max(first, sum(parts.values()))


def in_flight(cfg: Config, ranks: int) -> int:
    """Rows decoded at once on a rank, as rollout.admit lets them in: whole groups, or a part of one where none fits."""
    rows, prompt, new = decoded(cfg), cfg.max_prompt, cfg.max_new_tokens
    groups = cfg.kv_tokens // (prompt + rows * new)
    part = max(1, (cfg.kv_tokens - prompt) // new)
    return min(groups or 1, prompts(cfg, ranks)) * (rows if groups else min(rows, part))


def micro_batch(s: Shape, cfg: Config, ranks: int, path: Path, units: int) -> float:
    """Highest bytes of a micro-batch: the logits are gone before the backward pass reaches the blocks."""
    top = max(logits(s, cfg, path, units), working(s, cfg, ranks, path, units))
    return activations(s, cfg, ranks, path, units) + top


def peaks(s: Shape, cfg: Config, ranks: int, path: Path) -> dict[str, float]:
    """Bytes per rank at the highest point of the start (every rank loads every model whole, in fp32, before any is sharded),
    of rollout, update and AdamW's step (in place; with moments in bfloat16 16 bytes for every number of the largest matrix)."""
    always, grads = sum(state(s, cfg, ranks).values()), gradients(s, cfg, ranks)
    in_rollout, in_update = gathered(s, cfg, ranks)
    rows, has = in_flight(cfg, ranks), passes(cfg)
    apart = 16 * s.vocab * s.hidden / ranks if cfg.optimizer_dtype == "bfloat16" else 0.0
    return {
        "start": 4 * s.params * (1 + has["reference"] + has["critic"]),
        "rollout": always + in_rollout + decoding(s, cfg, ranks, rows) if rows else 0.0,
        "update": always + grads + in_update + micro_batch(s, cfg, ranks, path, path.micro(cfg, ranks)[1]),
        "AdamW step": always + grads + apart,
    }


def largest(s: Shape, cfg: Config, ranks: int, path: Path, room: float) -> tuple[int, int]:
    """(kv_tokens, micro_tokens) that fit into `room` bytes per rank, in whole groups and whole units; 0: not even one."""
    always, (in_rollout, in_update) = sum(state(s, cfg, ranks).values()), gathered(s, cfg, ranks)
    rows, many = decoded(cfg), range(1, 10**7)
    groups = bisect.bisect(many, room - always - in_rollout, key=lambda n: decoding(s, cfg, ranks, n * rows))
    left = room - always - gradients(s, cfg, ranks) - in_update
    units = bisect.bisect(many, left, key=lambda n: micro_batch(s, cfg, ranks, path, n))
    return groups * bool(rows) * (cfg.max_prompt + rows * cfg.max_new_tokens), units * path.unit(cfg)[0]


# ---------------------------------------------------------------------------------------------------------------------
# Communication and time, per rank and step


def received(s: Shape, cfg: Config, ranks: int, path: Path) -> dict[str, float]:
    """Bytes a rank receives (and sends) in a step under FSDP2; in a ring each collective over S bytes moves S (W-1)/W.

    rollout   all-gather of every weight once, in the compute type
    forward   per micro-batch the blocks; the root once per update: it stays whole until the backward pass
    backward  per micro-batch the blocks again
    gradients per micro-batch a reduce-scatter of everything in fp32
    no grad   per micro-batch the blocks, for old log-probs and the reference; the critic as the policy
    """
    c, part, has = width(cfg), (ranks - 1) / ranks, passes(cfg)
    n, blocks = path.micro(cfg, ranks)[0], s.params - s.root
    update = {
        "forward": (n * blocks + n * s.root) * c,
        "backward": n * blocks * c,
        "gradients": n * s.params * 4,
    }
    out = {"rollout": s.params * c if decoded(cfg) else 0}
    out |= {k: v * cfg.mu * (1 + has["critic"]) for k, v in update.items()}
    out["no grad"] = n * blocks * c * (has["old"] + has["reference"] + has["critic"])
    return {k: v * part for k, v in out.items()}


def collectives(s: Shape, cfg: Config, ranks: int, path: Path) -> int:
    """Gatherings and reductions of a step, one per block and one for the root, as in received(). Beside them about 30
    reductions of a few numbers (under 1 kB) per step, which are not counted."""
    n, has, blocks = path.micro(cfg, ranks)[0], passes(cfg), s.layers
    update = n * (3 * blocks + 2) * cfg.mu * (1 + has["critic"])
    return (blocks + 1) * bool(decoded(cfg)) + update + n * blocks * sum(has.values()) if ranks > 1 else 0


def forward_flops(s: Shape, p: float, r: float, prompt: int, completion: int) -> float:
    """FLOPs of one forward over p tokens of prompts and r of completions: 2 per weight of the blocks, 4 H d per token it
    attends to and layer (half the prompt; the prompt and half the completion), 2 V h per completion token for the head."""
    attend = p * prompt / 2 + r * (prompt + completion / 2)
    blocks = s.params - s.root
    return 2 * blocks * (p + r) + 4 * s.heads * s.head_dim * s.kv_layers * attend + 2 * s.vocab * s.hidden * r


def seconds(s: Shape, cfg: Config, ranks: int, path: Path, m: Machine) -> dict[str, float]:
    """Seconds of a step's parts on one rank.

    decode: per token the largest of launching the layers, reading weights and cache, and the products. update: 3 forwards
    (4 with checkpointing), plus the passes without gradient. communication: bytes over bandwidth plus hops, of which FSDP2
    hides what the update's products cover. optimizer: 28 bytes per parameter read and written.
    """
    n, g, p, r = prompts(cfg, ranks), samples(cfg), cfg.max_prompt, cfg.max_new_tokens
    has, rows, c = passes(cfg), in_flight(cfg, ranks), width(cfg)
    tokens = n * (1 if path.shared else g) * p, n * g * r
    one = forward_flops(s, *tokens, p, r) / m.flops
    out = {"prefill": 0.0, "decode": 0.0}
    if decoded(cfg):
        read = c * (s.params + (rows / decoded(cfg) * p + rows * r / 2) * s.kv_numbers) / m.hbm
        product = forward_flops(s, 0, rows, p, r) / m.flops
        waves = math.ceil(n * decoded(cfg) / rows)
        out = {"prefill": forward_flops(s, n * p, 0, p, r) / m.flops,
               "decode": waves * r * max(s.layers * m.launch, read, product)}  # fmt: skip
    trained = cfg.mu * (4 if path.checkpointing else 3) * (1 + has["critic"])
    out["update"] = one * (trained + has["old"] + has["reference"] + has["critic"])
    out["optimizer"] = cfg.mu * 28 * s.params * (1 + has["critic"]) / ranks / m.hbm
    hops = collectives(s, cfg, ranks, path) * (ranks - 1) * m.hop
    out["communication"] = sum(received(s, cfg, ranks, path).values()) / m.receive(ranks) + hops
    return out


def step_seconds(t: dict[str, float]) -> float:
    """Seconds of a step: communication is hidden behind the update's products as far as it fits."""
    return t["prefill"] + t["decode"] + t["optimizer"] + max(t["update"], t["communication"])


def limit(s: Shape, cfg: Config, ranks: int, path: Path, room: float, m: Machine) -> str:
    """What holds the step back at this many ranks, in a few words."""
    if cfg.batch_size < ranks:
        return "batch"
    if max(peaks(s, cfg, ranks, path).values()) > room:
        return "memory"
    t = seconds(s, cfg, ranks, path, m)
    shown = {"decode": t["decode"], "compute": t["prefill"] + t["update"], "communication": t["communication"]}
    return max(shown, key=shown.get)


# ---------------------------------------------------------------------------------------------------------------------
# The report


def table(head: list[str], rows: list[list[str]], first: int = 30) -> str:
    """Aligned columns, the first to the left and the others to the right; 100 characters if there are at most 5."""
    wide = max(len(c) for row in [head, *rows] for c in row[1:]) + 2
    return "\n".join(f"{row[0]:<{first}}" + "".join(f"{c:>{wide}}" for c in row[1:]) for row in [head, *rows])


def gb(x: float) -> str:
    """Bytes in GB: at least two digits of any size."""
    x /= GB
    return f"{x:,.0f}" if x >= 100 else f"{x:.2f}" if x >= 0.1 or not x else f"{x:.3f}" if x >= 1e-3 else f"{x:.0e}"


def memory_table(s: Shape, cfg: Config, ranks: list[int], path: Path, room: float) -> str:
    """GB per rank, a column per number of ranks."""
    parts: dict[str, list[float]] = {}
    for w in ranks:
        units, rows = path.micro(cfg, w)[1], in_flight(cfg, w)
        whole, some = gathered(s, cfg, w)
        column = state(s, cfg, w) | {"gradients (fp32)": gradients(s, cfg, w)}
        if rows:
            column |= {"weights for the rollout": whole} | rollout(s, cfg, w, rows)
        column |= {"weights in the update": some, "activations of a micro-batch": activations(s, cfg, w, path, units),
                   "logits of a micro-batch": logits(s, cfg, path, units),
            "working memory of a block": working(s, cfg, w, path, units)}  # fmt: skip
        column |= {f"peak: {k}": v for k, v in peaks(s, cfg, w, path).items()}
        for name, value in column.items():
            parts.setdefault(name, []).append(value)
    rows = [[name, *map(gb, values)] for name, values in parts.items() if any(values)]
    fits = [largest(s, cfg, w, path, room) for w in ranks]
    rows += [["largest kv_tokens that fit", *(f"{kv:,}" for kv, _ in fits)]] if decoded(cfg) else []
    rows += [["largest micro_tokens that fit", *(f"{micro:,}" for _, micro in fits)]]
    return table(["GB per rank, at ranks", *map(str, ranks)], rows)


def path_table(s: Shape, cfg: Config, ranks: int, room: float, m: Machine) -> str:
    """The update with and without checkpointing, plain and with shared prefixes, at one number of ranks."""
    paths = [Path(shared, lm.CHUNK if shared else 0, check) for shared in (False, True) for check in (False, True)]
    tokens = [p.unit(cfg)[0] * p.units(cfg, ranks) for p in paths]
    micro = [p.micro(cfg, ranks) for p in paths]
    rows = [
        ["tokens of a step", *(f"{t:,}" for t in tokens)],
        ["micro-batches of a step", *(f"{n:,}" for n, _ in micro)],
        ["GB of activations", *(gb(activations(s, cfg, ranks, p, n)) for p, (_, n) in zip(paths, micro))],
        ["GB of logits", *(gb(logits(s, cfg, p, n)) for p, (_, n) in zip(paths, micro))],
        ["GB at the update's peak", *(gb(peaks(s, cfg, ranks, p)["update"]) for p in paths)],
        ["largest micro_tokens that fit", *(f"{largest(s, cfg, ranks, p, room)[1]:,}" for p in paths)],
        ["seconds of products", *(f"{seconds(s, cfg, ranks, p, m)['update']:,.2f}" for p in paths)],
    ]
    return table([f"update on each of {ranks} ranks", "plain", "checkpointing", "shared prefix", "both"], rows)


def step_table(s: Shape, cfg: Config, ranks: list[int], path: Path, room: float, m: Machine) -> str:
    """Bytes, seconds and limit of a step, a column per number of ranks."""
    got = [received(s, cfg, w, path) for w in ranks]
    time = [seconds(s, cfg, w, path, m) for w in ranks]
    rows = [["prompts per rank", *(str(prompts(cfg, w)) for w in ranks)],
            ["micro-batches", *(f"{path.micro(cfg, w)[0]:,}" for w in ranks)]]  # fmt: skip
    rows += [[f"GB received: {k}", *(gb(g[k]) for g in got)] for k in got[0] if any(g[k] for g in got)]
    rows += [["GB received in all", *(gb(sum(g.values())) for g in got)]]
    rows += [[f"seconds: {k}", *(f"{t[k]:,.2f}" for t in time)] for k in time[0]]
    rows += [["seconds of a step", *(f"{step_seconds(t):,.2f}" for t in time)]]
    rows += [["limit", *(limit(s, cfg, w, path, room, m) for w in ranks)]]
    return table(["a step per rank, at ranks", *map(str, ranks)], rows)


def report(cfg: Config, ranks: int = 1, m: Machine = Machine()) -> str:
    """The whole plan as text of at most 100 columns."""
    config, path = model_config(cfg), path_of(cfg)
    lm.check_positions(cfg, config)
    try:
        s, c = shape_of(config), width(cfg)
    except Exception as e:  # a damaged config, or one of another kind of model: whatever its code raises
        fail(
            f"--plan: {cfg.init} ({config.model_type}) is no decoder with attention: {type(e).__name__} {str(e)[:200]}"
        )
    worlds = cfg.plan_ranks or sorted({ranks, *RANKS})
    room, source = device_gb(cfg)
    return "\n\n".join([
        f"{cfg.init or 'the tiny model'} ({config.model_type})\n"
        f"{s.params:,} parameters, {s.vocab * s.hidden / s.params:.0%} of them input embeddings; {s.layers} layers; "
        f"KV cache {s.kv_numbers * c:,} bytes per token\n"
        f"{cfg.method}; {'bfloat16' if c == 2 else 'float32'} on fp32 master weights; {room / GB:g} GB per rank ({source})\n"
        f"{cfg.batch_size} prompts x {samples(cfg)} rows of {cfg.max_prompt:,} + {cfg.max_new_tokens:,} tokens a step; "
        f"micro_tokens {cfg.micro_tokens:,}, kv_tokens {cfg.kv_tokens:,}",
        memory_table(s, cfg, worlds, path, room),
        path_table(s, cfg, ranks if ranks in worlds else worlds[0], room, m),
        step_table(s, cfg, worlds, path, room, m),
        ASSUMED.format(m=m, flops=m.flops / 1e12, hbm=m.hbm / 1e12, nvlink=m.nvlink / GB, nic=m.nic / GB, chunk=lm.CHUNK // 2**20,
                       far=m.receive(m.node + 1) / GB, hop=m.hop * 1e6, launch=m.launch * 1e3),
    ])  # fmt: skip


def fits(cfg: Config, folders: list[str]) -> str:
    """Markdown table: the largest kv_tokens and micro_tokens, in thousands, for models on cards, with a tenth of the memory and
    1 GB kept free; no: not even one group of either, or AdamW's step, fits. Starts are left out (a second model on the way)."""
    cards = {"1 x 24 GB": (1, 24e9), "1 x 80 GB": (1, 80e9), "8 x 80 GB": (8, 80e9)}
    out = [f"| Qwen3 | moments | {' | '.join(cards)} |", "|---|---|" + "---|" * len(cards)]
    for folder in folders:
        for kind in ("float32", "bfloat16"):
            now = replace(cfg, init=folder, optimizer_dtype=kind)
            s, path, cells = shape_of(model_config(now)), path_of(now), []
            for ranks, size in cards.values():
                room = 0.9 * size - GB
                kv, micro = largest(s, now, ranks, path, room)
                good = kv and micro and peaks(s, now, ranks, path)["AdamW step"] < room
                cells.append(f"{kv / 1000:,.0f}k, {micro / 1000:,.0f}k" if good else "no")
            out.append(f"| {folder.split('-')[-1].upper()} | {kind} | {' | '.join(cells)} |")
    return "\n".join(out)


def show(cfg: Config, ranks: int) -> None:
    """What `train.py --plan` does: print the report, once under torchrun. With --resume: of the run's last checkpoint."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(report(replace(cfg, init=cfg.run_dir) if cfg.resume else cfg, ranks))


def device_gb(cfg: Config) -> tuple[float, str]:
    """Bytes of a device and where the number comes from: --plan_gb, the first GPU here, or 80 GB."""
    if cfg.plan_gb:
        return cfg.plan_gb * GB, "--plan_gb"
    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory), "the GPU here"
    return 80 * GB, "no GPU here: assumed"


ASSUMED = """Computed, not measured; 1 GB = 1e9 bytes. Prompts count as max_prompt tokens, completions as
max_new_tokens. Keep a tenth of the memory free for the allocator, and 1 GB for the CUDA context.
Assumed: {flops:g} TFLOP/s sustained; {hbm:g} TB/s of device memory; a rank receives {nvlink:g} GB/s within a
node of {m.node}, {far:g} GB/s across nodes (a card of {nic:g} GB/s per rank, the ring shares them); {hop:g} us per
rank of a ring; {launch:g} ms to launch a layer of a decoding step. The update's products hide communication
as far as they last. Shared prefix: {chunk} MiB of logits at once. limit: what takes longest;
memory: these settings do not fit; batch: fewer prompts than ranks, which train.py refuses."""


if __name__ == "__main__":  # python plan.py FOLDER ... [flags of train.py]: what fits where
    flags = next((i for i, word in enumerate(sys.argv) if word.startswith("--")), len(sys.argv))
    print(fits(parse(sys.argv[flags:]), sys.argv[1:flags]))
