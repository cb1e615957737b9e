"""Prompts -> sampled token ids and their log-probs: prefill a prompt once, keep its cache once, drop rows that are done.

Token ids in, token ids out; text is for rewards and eyes (F05). The sampler is our own: temperature only, unless top_p is
asked for; nothing is taken from a model's generation_config but its stop ids (F02). A row's result does not depend on the
rows beside it, up to rounding. Left out: beam search, top_k, repetition penalties, speculative decoding, a compiled step
(it needs static shapes, so a cache of full length for every row, and on a CPU it does not pay). The caches live inside one
call, so an update cannot leave a stale one (F08).
"""

import contextlib
import functools
import sys
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from model import autocast, left_pad, only_softmax, positions, token_logp


@dataclass
class Rollout:
    """Completions of one step. Two samples of one prompt, the second cut by the length limit:

    prompt_ids  [[5, 9, 4]]
    tokens      [[7, 2, 0], [7, 7, 7]]     (B,T) int64, 2 = stop id, 0 = padding
    logp        [[-.1, -.3, 0], [...]]     (B,T) float32, of the sampler, at its temperature
    mask        [[1, 1, 0], [1, 1, 1]]     (B,T) bool, sampled tokens, the stop token included (F10)
    group       [0, 0]                     (B,) int64, index into prompt_ids
    finished    [True, False]              (B,) bool, ended by a stop id
    row_steps   5                          rows decoded, summed over steps: equals mask.sum() with no wasted row
    """

    prompt_ids: list[list[int]]
    tokens: Tensor
    logp: Tensor
    mask: Tensor
    group: Tensor
    finished: Tensor
    row_steps: int = 0


def uniforms(keys: list[tuple[int, ...]], length: int) -> np.ndarray:
    """Uniform numbers (rows, length) in [0,1): row r is a pure function of keys[r] = (seed, step, prompt, sample) (F45)."""
    return np.stack([np.random.default_rng(key).random(length) for key in keys])


def nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Set logits outside the smallest set of tokens with probability >= top_p to -inf."""
    order = logits.sort(-1, descending=True)
    p = order.values.softmax(-1)
    drop = p.cumsum(-1) - p >= top_p
    return logits.masked_fill(drop.scatter(-1, order.indices, drop), -torch.inf)


BLOCK, CHUNK = 512, 2**21  # words per block of the sampler; words of all rows per pass, so that it stays in the cache


def inverse_cdf(mass: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """First place (B,1) where the cumulative mass (B,n) exceeds target (B,1), and the target's rest in that place.

    Never a place of mass 0: rounding may put the target below 0 or at the very end, so it is brought back.
    """
    cdf = mass.cumsum(-1, dtype=torch.float64)
    target = torch.minimum(target.clamp(min=0), torch.nextafter(cdf[:, -1:], cdf.new_zeros(())))
    place = torch.searchsorted(cdf, target, right=True).clamp(max=mass.shape[-1] - 1)
    return place, target - (cdf.gather(-1, place) - mass.gather(-1, place))


def sample(logits: Tensor, u: Tensor, temperature: float, top_p=1.0) -> tuple[Tensor, Tensor]:
    """One token per row by inverse CDF, and its log-prob: logits (B,V), u (B,) uniform float64 -> (B,), (B,).

    Temperature 0: argmax, log-prob at temperature 1. One uniform per row costs less than a random number per word, and
    sums of blocks find the block, so that one block per row is added up word by word. Sums over blocks are float64: in
    float32 the rare words of a large vocabulary are lost.
    """
    if temperature == 0:
        token = logits.argmax(-1)
        return token, token_logp(logits, token, 1.0)[0]
    words = logits.shape[-1]
    if len(logits) * words > CHUNK and len(logits) > 1:
        rows = max(1, CHUNK // words)
        parts = [sample(*part, temperature, top_p) for part in zip(logits.split(rows), u.split(rows))]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
    z = logits.float() if temperature == 1 else logits.float() / temperature
    p = (nucleus(z, top_p) if top_p < 1 else z).softmax(-1)
    even = words - words % BLOCK
    sums = p[:, :even].unflatten(-1, (even // BLOCK, BLOCK)).sum(-1)
    if even < words:
        sums = torch.cat([sums, p[:, even:].sum(-1, keepdim=True)], -1)
    block, rest = inverse_cdf(sums, u[:, None] * sums.sum(-1, keepdim=True, dtype=torch.float64))
    inside = p.gather(-1, (block * BLOCK + torch.arange(min(BLOCK, words), device=p.device)).clamp(max=words - 1))
    token = (block * BLOCK + inverse_cdf(inside, rest)[0]).clamp(max=words - 1)
    return token.squeeze(-1), p.gather(-1, token).log().squeeze(-1)


# ---------------------------------------------------------------------------------------------------------------------
# Caches


SHARED = "shared_cache"  # name of our attention function in transformers' registry


class Halves(DynamicLayer):
    """Keys and values of one attention layer: of N prompts, each once, and of what B rows have said, written in place.

    prompt (2 x (N*H,P,D)), left-padded; said (2 x (B*H,T,D)), of which the columns up to now are filled; H key-value heads.
    """

    def __init__(self, pool: "Shared"):
        super().__init__()
        self.pool, self.prompt, self.said = pool, None, None

    def join(self, prompt: DynamicLayer, rows: int, dtype: torch.dtype) -> None:
        """Take the prompts of a prefill, and room for some rows after the rows that are there."""
        pool, new = self.pool, [x if dtype == torch.float32 else x.to(dtype) for x in (prompt.keys, prompt.values)]
        self.heads = new[0].shape[1]
        old, self.said = self.said, [x.new_empty(rows * self.heads, pool.limit, x.shape[-1]) for x in new]
        if self.prompt is None:
            self.prompt = [x.flatten(0, 1) for x in new]
            return
        for i, x in enumerate(new):
            wide = nn.functional.pad(x, (0, 0, self.prompt[i].shape[1] - x.shape[2], 0))
            self.prompt[i] = torch.cat([self.prompt[i], wide.flatten(0, 1)])
            self.said[i][: len(old[i]), : pool.now] = old[i][:, : pool.now]
            self.said[i][len(old[i]) :, : pool.now] = 0  # weighted with 0, which does not make numbers of nan

    def keep(self, rows: Tensor, first: int, prompts: Tensor | None, width: int) -> None:
        """Keep these rows and their columns from first on; of the prompts these (None: all), and their last columns."""
        now = self.pool.now
        for i, x in enumerate(self.said):
            x = x.unflatten(0, (-1, self.heads))
            x[: len(rows), :, : now - first] = x[:, :, first:now].index_select(0, rows)
            self.said[i] = x[: len(rows)].flatten(0, 1)
        if prompts is not None:
            self.prompt = [x.unflatten(0, (-1, self.heads))[:, :, x.shape[1] - width :].index_select(0, prompts).flatten(0, 1)
                           for x in self.prompt]  # fmt: skip

    def update(self, keys: Tensor, values: Tensor, *args, **kwargs) -> tuple["Halves", "Halves"]:
        """Write the new column (B,H,1,D). What goes to the attention function is this layer, not a copy of its parts."""
        for x, new in zip(self.said, (keys, values)):
            x.select(1, self.pool.now).copy_(new.flatten(0, 2))
        return self, self

    def get_seq_length(self) -> int:
        return self.pool.now


def attend(module, query: Tensor, layer: Halves, _, mask, scaling: float, **kwargs) -> tuple[Tensor, None]:
    """Attention of one query per row (B,heads,1,D) over its prompt and its own tokens -> (B,1,heads,D).

    The prompt's keys are multiplied once with the queries of all its rows; query heads of one key-value head are rows of
    that product, so nothing is repeated. One softmax over both halves: the same arithmetic as over one cache.
    """
    only_softmax(kwargs)
    pool, now = layer.pool, layer.pool.now + 1
    rows, heads, _, size = query.shape
    q = (query * scaling).view(rows * layer.heads, heads // layer.heads, size)
    keys, values = (x.narrow(1, 0, now) for x in layer.said)
    prompt = pool.fold(q, layer.heads) @ layer.prompt[0].mT
    if pool.padding is not None:
        prompt.unflatten(0, (-1, layer.heads)).add_(pool.padding)
    own = q @ keys.mT
    if pool.late is not None:
        own.unflatten(0, (rows, -1)).add_(pool.late)
    width = prompt.shape[-1]
    prompt = pool.unfold(prompt, layer.heads)
    score = torch.cat([prompt, own.view(*prompt.shape[:-1], now)], -1).view(*q.shape[:2], -1)
    weight = score.softmax(-1, dtype=torch.promote_types(score.dtype, torch.float32)).to(values.dtype)
    out = pool.unfold(pool.fold(weight[..., :width], layer.heads) @ layer.prompt[1], layer.heads)
    out = out + (weight[..., width:] @ values).view(out.shape)
    return out.reshape(rows, 1, heads, -1), None


AttentionInterface.register(SHARED, attend)


@contextlib.contextmanager
def attention(model: nn.Module, name: str):
    """The model with another attention function, then with its own again."""
    own = model.config._attn_implementation
    if name == own:
        yield
        return
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(own)


def prefill(model: nn.Module, prompts: list[list[int]]) -> tuple[DynamicCache, Tensor]:
    """Caches of the prompts, padded on the left, and the logits (N,V) that follow them."""
    ids, seen = left_pad(prompts, next(model.parameters()).device)
    cache = DynamicCache(config=model.config)
    out = model(
        input_ids=ids, attention_mask=seen, position_ids=positions(seen), cache=cache, use_cache=True, logits_to_keep=1
    )
    return cache, out.logits[:, -1]


class Copied:
    """A batch of rows, each with its own copy of its prompt's cache: for every model. Takes rows only when it has none."""

    full, lengths = False, ()

    def __init__(self, model: nn.Module, limit: int, dtype: torch.dtype):
        self.model = model

    def join(self, prompts: list[list[int]], counts: list[int]) -> Tensor:
        self.cache, logits = prefill(self.model, prompts)
        device = logits.device
        origin = torch.arange(len(prompts), device=device).repeat_interleave(torch.tensor(counts, device=device))
        self.cache.reorder_cache(origin)  # unlike batch_select_indices, recurrent layers have it
        self.seen = left_pad(prompts, device)[1][origin]
        self.position = self.seen.sum(1)
        return logits[origin]

    def keep(self, rows: Tensor) -> None:
        if len(rows):
            self.cache.reorder_cache(rows)
        self.seen, self.position = self.seen[rows], self.position[rows]

    def step(self, token: Tensor) -> Tensor:
        """Feed one token (B,) per row -> logits (B,V)."""
        self.seen = torch.cat([self.seen, self.seen.new_ones(len(token), 1)], 1)
        out = self.model(input_ids=token[:, None], attention_mask=self.seen, position_ids=self.position[:, None],
                         cache=self.cache, use_cache=True)  # fmt: skip
        self.position = self.position + 1
        return out.logits[:, -1]


class Shared(Cache):
    """A batch of rows that attend to one cache of their prompt. Rows are in the order of their prompts, and new ones join at
    the end; what they say starts in the column where they joined, so that all rows write the same column."""

    def __init__(self, model: nn.Module, limit: int, dtype: torch.dtype):
        super().__init__(layers=[])
        self.model, self.limit, self.dtype = model, limit, dtype
        self.own = model.config._attn_implementation
        device = next(model.parameters()).device
        self.owner = self.start = self.position = torch.zeros(0, dtype=torch.long, device=device)
        self.lengths, self.now = [], 0

    @property
    def full(self) -> bool:
        """No column is free: the oldest rows have reached their limit, and keep makes room."""
        return self.now == self.limit

    def join(self, prompts: list[list[int]], counts: list[int]) -> Tensor:
        """Add rows, counts[i] of prompts[i], none longer than those here -> logits (sum(counts),V) of their first tokens."""
        with attention(self.model, self.own):
            cache, logits = prefill(self.model, prompts)
        device, old = logits.device, len(self.owner)
        origin = torch.arange(len(prompts), device=device).repeat_interleave(torch.tensor(counts, device=device))
        self.owner = torch.cat([self.owner, origin + len(self.lengths)])
        self.lengths += map(len, prompts)
        self.start = torch.cat([self.start, torch.full_like(origin, self.now)])
        self.position = torch.cat([self.position, torch.tensor(self.lengths, device=device)[self.owner[old:]]])
        if not self.layers:
            self.layers = [Halves(self) if isinstance(x, DynamicLayer) else x for x in cache.layers]
        for layer, new in zip(self.layers, cache.layers):
            if isinstance(layer, Halves):
                layer.join(new, len(self.owner), self.dtype)
                continue
            new.reorder_cache(origin)  # a recurrent state is small, and every row needs its own
            if layer is not new:
                for states, more in (
                    (layer.conv_states, new.conv_states),
                    (layer.recurrent_states, new.recurrent_states),
                ):
                    states.update({k: torch.cat([v, more[k]]) for k, v in states.items() if v is not None})
        self.regroup()
        return logits[origin]

    def keep(self, rows: Tensor) -> None:
        """Keep these rows (ascending), their prompts and the columns that they use."""
        self.owner, self.start, self.position = self.owner[rows], self.start[rows], self.position[rows]
        if not len(rows):
            self.layers, self.lengths, self.now = [], [], 0
            return
        prompts, self.owner = self.owner.unique_consecutive(return_inverse=True)
        first = int(self.start.min())
        gone = len(prompts) < len(self.lengths)
        self.lengths = [self.lengths[i] for i in prompts.tolist()]
        for layer in self.layers:
            if isinstance(layer, Halves):
                layer.keep(rows, first, prompts if gone else None, max(self.lengths))
            else:
                layer.reorder_cache(rows)
        self.start, self.now = self.start - first, self.now - first
        self.regroup()

    def regroup(self) -> None:
        """Where every row stands in a grid of prompts x most rows of a prompt."""
        device, lengths = self.owner.device, torch.tensor(self.lengths)
        counts = self.owner.bincount(minlength=len(self.lengths))
        self.most = int(counts.max())
        self.even = self.most * len(counts) == len(self.owner)
        self.place = torch.arange(len(self.owner), device=device) - (counts.cumsum(0) - counts)[self.owner]
        self.slots = {}
        self.late, self.padding = None, None
        self.joined_late = bool(self.start.any())
        width = max(self.lengths)
        if min(self.lengths) < width:
            real = torch.arange(width) >= width - lengths[:, None]
            self.padding = torch.zeros(real.shape).masked_fill(~real, -torch.inf)[:, None, None].to(device)

    def fold(self, x: Tensor, heads: int) -> Tensor:
        """Rows (B*H,R,X) -> (N*H,most*R,X): the rows of a prompt under each other; what has no row holds anything."""
        n, (_, r, size) = len(self.lengths), x.shape
        if self.even:
            return x.view(n, self.most, heads, r, size).transpose(1, 2).reshape(n * heads, -1, size)
        out = x.new_zeros(n * heads * self.most, r, size)
        return out.index_copy_(0, self.slot(heads), x).view(n * heads, -1, size)

    def unfold(self, x: Tensor, heads: int) -> Tensor:
        """The way back: (N*H,most*R,X) -> (...,R,X), whose leading dimensions are B*H rows in order."""
        x = x.view(len(self.lengths), heads, self.most, -1, x.shape[-1])
        return x.transpose(1, 2) if self.even else x.flatten(0, 2).index_select(0, self.slot(heads))

    def slot(self, heads: int) -> Tensor:
        """Place of (row, head) in the grid (N,H,most), flat."""
        if heads not in self.slots:
            head = torch.arange(heads, device=self.owner.device)
            self.slots[heads] = ((self.owner[:, None] * heads + head) * self.most + self.place[:, None]).flatten()
        return self.slots[heads]

    def step(self, token: Tensor) -> Tensor:
        """Feed one token (B,) per row -> logits (B,V)."""
        if self.joined_late:
            before = torch.arange(self.now + 1, device=token.device) < self.start[:, None]
            self.late = torch.zeros(before.shape, device=token.device).masked_fill(before, -torch.inf)[:, None, None]
        out = self.model(input_ids=token[:, None], position_ids=self.position[:, None], cache=self, use_cache=True)
        self.position, self.now = self.position + 1, self.now + 1
        return out.logits[:, -1]


def shares(model: nn.Module, length: int) -> bool:
    """Whether rows of this length can attend to shared prompts: the model must take its attention function from transformers'
    registry and ask of it no more than softmax; a sliding window must not bite; recurrent layers keep no keys."""

    def plain(layer) -> bool:
        window = type(layer) is DynamicSlidingWindowLayer and layer.sliding_window >= length
        return window or type(layer) in (DynamicLayer, LinearAttentionLayer)

    return (
        hasattr(model, "set_attn_implementation")
        and model._can_set_attn_implementation()
        and getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is None
        and not any(hasattr(m, "sinks") for m in model.modules())
        and all(map(plain, DynamicCache(config=model.config).layers))
    )


@functools.cache
def tell_once(name: str) -> None:
    print(f"{name}: every sample gets a copy of its prompt's cache, for the model cannot share it", file=sys.stderr)


# ---------------------------------------------------------------------------------------------------------------------
# Rollouts


def admit(
    waiting: list[tuple[int, int, int]], prompt_ids: list[list[int]], new_tokens: int, kv_tokens: int, shared: bool,
    rows=0, lengths: list[int] = (),
) -> list[tuple[int, int, int]]:  # fmt: skip
    """Take from waiting, longest prompts first, what fits a KV budget in tokens: pieces (prompt, first sample, last + 1).

    rows, lengths: the rows being decoded and the lengths of their prompts. The longest prompt sets the width of all. A row
    costs its new tokens and its prompt; shared prompts are paid once. A group is split only where it exceeds a whole batch;
    one row always fits.
    """
    out, prompts, width = [], len(lengths), max(lengths, default=0)
    while waiting:
        i, first, end = waiting[0]
        width = width or len(prompt_ids[i])
        most = (kv_tokens - (prompts + 1) * width) // new_tokens if shared else kv_tokens // (width + new_tokens)
        room = most - rows
        if room < end - first and rows:
            break
        last = min(end, first + max(1, room))
        out.append((i, first, last))
        rows, prompts = rows + last - first, prompts + 1
        waiting[:1] = [(i, last, end)] if last < end else []
    return out


def alike(pieces: list[tuple[int, int, int]], prompt_ids: list[list[int]]) -> list[list[tuple[int, int, int]]]:
    """Pieces, longest prompts first, in runs of prompts of nearly one length: prefilled together, they need little padding."""
    out = []
    for piece in pieces:
        if not out or len(prompt_ids[piece[0]]) < 0.8 * len(prompt_ids[out[-1][0][0]]):
            out.append([])
        out[-1].append(piece)
    return out


def decode(
    model: nn.Module, prompt_ids: list[list[int]], samples: int, u: Tensor, ends: Tensor, *, temperature: float, top_p: float,
    kv_tokens: int, dtype: torch.dtype, shared: bool,
) -> tuple[Tensor, Tensor, Tensor, int]:  # fmt: skip
    """The loop: sample, drop rows, admit rows, feed. u (B,T), ends (stop ids) -> tokens (B,T), logp (B,T), lengths (B,), row_steps."""
    device, limit = u.device, u.shape[1]
    u = nn.functional.pad(u, (0, 1))  # a row that is done stands one column behind its end, so there is one more
    tokens, logp = torch.zeros_like(u, dtype=torch.long), torch.zeros_like(u, dtype=torch.float32)
    lengths, row_steps = torch.zeros(len(u), dtype=torch.long, device=device), 0
    waiting = [(i, 0, samples) for i in sorted(range(len(prompt_ids)), key=lambda i: -len(prompt_ids[i]))]
    pool = (Shared if shared else Copied)(model, limit, dtype)
    name = SHARED if shared else model.config._attn_implementation
    row, age, alive, logits = lengths[:0], lengths[:0], lengths[:0].bool(), None  # of the rows in the pool
    # one autocast for all: it casts every weight once, not once per token
    with torch.inference_mode(), autocast(model, dtype), attention(model, name):
        while waiting or len(row):
            if waiting and (shared or not len(row)):
                new = admit(waiting, prompt_ids, limit, kv_tokens, shared, len(row), pool.lengths)
                for part in alike(new, prompt_ids) if shared else [new][: len(new)]:
                    first = pool.join([prompt_ids[i] for i, _, _ in part], [b - a for _, a, b in part])
                    more = torch.tensor([i * samples + j for i, a, b in part for j in range(a, b)], device=device)
                    logits = first if logits is None else torch.cat([logits, first])
                    row, age = torch.cat([row, more]), torch.cat([age, torch.zeros_like(more)])
                    alive = torch.cat([alive, torch.ones_like(more, dtype=torch.bool)])
            token, token_logprob = sample(logits, u[row, age], temperature, top_p)
            tokens[row, age], logp[row, age] = token * alive, token_logprob.float() * alive
            row_steps, age = row_steps + len(row), age + alive
            alive = alive & ~torch.isin(token, ends) & (age < limit)
            left = int(alive.sum())  # the one wait for the device in a step
            if left <= 0.9 * len(row) or pool.full:  # dropping rows costs a copy of the cache, so not for every row
                lengths[row] = age
                rows = alive.nonzero().squeeze(1)
                pool.keep(rows)
                row, age, alive, token = row[rows], age[rows], alive[rows], token[rows]
            logits = pool.step(token) if left else None
    return tokens[:, :limit], logp[:, :limit], lengths, row_steps


def rollout(
    model: nn.Module, prompt_ids: list[list[int]], samples: int, stop: list[int], *, max_new_tokens: int, temperature=1.0,
    top_p=1.0, keys: list[tuple[int, ...]] | None = None, prefix: list[int] = (), kv_tokens=65536, dtype=torch.float32,
    shared: bool | None = None,
) -> Rollout:  # fmt: skip
    """Sample completions of every prompt; row i * samples + j is sample j of prompt i.

    keys[i]: (seed, step, prompt) of the random stream of prompt i; its samples do not depend on what is decoded beside
    them. prefix: ids forced before the completion; they are context, so they belong to prompt_ids of the result (F18).
    kv_tokens: tokens that the caches may hold. shared: prompts' caches kept once; None: where the model can.
    """
    prompt_ids = [[*p, *prefix] for p in prompt_ids]
    device = next(model.parameters()).device
    keys = keys or [(0, 0, i) for i in range(len(prompt_ids))]
    u = torch.from_numpy(uniforms([(*key, j) for key in keys for j in range(samples)], max_new_tokens)).to(device)
    ends, was_training = torch.tensor(stop, dtype=torch.long, device=device), model.training
    if shared is None:
        shared = shares(model, max(map(len, prompt_ids)) + max_new_tokens)
        if not shared and samples > 1:
            tell_once(type(model).__name__)
    model.eval()
    try:
        tokens, logp, lengths, row_steps = decode(
            model, prompt_ids, samples, u, ends, temperature=temperature, top_p=top_p, kv_tokens=kv_tokens, dtype=dtype,
            shared=shared,
        )  # fmt: skip
    finally:
        model.train(was_training)
    width = max(1, int(lengths.max()))
    mask = torch.arange(width, device=device) < lengths[:, None]
    finished = torch.isin(tokens.gather(1, lengths[:, None] - 1).squeeze(1), ends)
    group = torch.arange(len(prompt_ids), device=device).repeat_interleave(samples)
    return Rollout(prompt_ids, tokens[:, :width], logp[:, :width], mask, group, finished, row_steps)


def take(roll: Rollout, rows: Tensor, groups: list[int]) -> Rollout:
    """The rows (a mask (B,), or their numbers) of a rollout, which belong to these groups, renumbered from 0."""
    new = torch.full((len(roll.prompt_ids),), -1, device=roll.group.device)
    new[groups] = torch.arange(len(groups), device=roll.group.device)
    return Rollout([roll.prompt_ids[g] for g in groups], roll.tokens[rows], roll.logp[rows], roll.mask[rows],
                   new[roll.group[rows]], roll.finished[rows], roll.row_steps)  # fmt: skip


def join(a: Rollout, b: Rollout) -> Rollout:
    """Two rollouts in one, the groups of b after those of a."""
    width = max(a.tokens.shape[1], b.tokens.shape[1])

    def both(name: str) -> Tensor:
        return torch.cat([nn.functional.pad(x, (0, width - x.shape[1])) for x in (getattr(a, name), getattr(b, name))])

    return Rollout(a.prompt_ids + b.prompt_ids, both("tokens"), both("logp"), both("mask"),
                   torch.cat([a.group, b.group + len(a.prompt_ids)]), torch.cat([a.finished, b.finished]),
                   a.row_steps + b.row_steps)  # fmt: skip


def demonstrations(prompt_ids: list[list[int]], answers: list[list[list[int]]], device) -> Rollout:
    """Written answers (stop token included), any number per prompt, in the shape of a rollout; log-probs are 0."""
    ids = [a for group in answers for a in group]
    group = torch.tensor([g for g, some in enumerate(answers) for _ in some], device=device)
    width = max(map(len, ids))
    tokens = torch.tensor([d + [0] * (width - len(d)) for d in ids], device=device)
    mask = torch.arange(width, device=device) < torch.tensor([len(d) for d in ids], device=device)[:, None]
    finished = torch.ones(len(ids), dtype=torch.bool, device=device)
    return Rollout(prompt_ids, tokens, torch.zeros(tokens.shape, device=device), mask, group, finished)
