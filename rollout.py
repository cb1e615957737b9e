"""Prompts -> sampled token ids and their log-probs: prefill a prompt once, share its cache over the group, drop rows
that are done.

Token ids in, token ids out; text is for rewards and eyes (F05). The sampler is our own: temperature only, unless top_p is
asked for; nothing is taken from a model's generation_config but its stop ids (F02). Left out: beam search, top_k,
repetition penalties, speculative decoding. The caches live inside one call, so an update cannot leave a stale one (F08).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from model import autocast, left_pad, positions, token_logp


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


def sample(logits: Tensor, u: Tensor, temperature: float, top_p=1.0) -> tuple[Tensor, Tensor]:
    """One token per row by inverse CDF, and its log-prob: logits (B,V), u (B,) uniform float64 -> (B,), (B,).

    Temperature 0: argmax, log-prob at temperature 1. The cumulative sum is float64: a float32 one loses the rare words
    of a large vocabulary, and one uniform per row costs less than a random number per word.
    """
    if temperature == 0:
        token = logits.argmax(-1)
        return token, token_logp(logits, token, 1.0)[0]
    z = logits.float() / temperature
    if top_p < 1:
        z = nucleus(z, top_p)
    cdf = z.softmax(-1).cumsum(-1, dtype=torch.float64)
    token = torch.searchsorted(cdf, (u * cdf[:, -1])[:, None], right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    return token, token_logp(z, token, 1.0)[0]


def batches(
    prompt_ids: list[list[int]], samples: int, new_tokens: int, kv_tokens: int
) -> list[list[tuple[int, int, int]]]:
    """Cut the work by a KV budget in tokens: lists of (prompt, first sample, last sample + 1).

    Longest prompts first, so that little is padding and the first of a batch sets its width. A group is split only
    where it exceeds a whole batch; one row always fits.
    """
    out, now, room = [], [], 0
    for i in sorted(range(len(prompt_ids)), key=lambda i: -len(prompt_ids[i])):
        done = 0
        while done < samples:
            if now and samples - done > room:
                out.append(now)
                now = []
            if not now:
                room = max(1, kv_tokens // (len(prompt_ids[i]) + new_tokens))
            take = min(samples - done, room)
            now.append((i, done, done + take))
            done, room = done + take, room - take
    return [*out, now] if now else out


@torch.no_grad()
def decode(
    model: nn.Module, prompts: list[list[int]], counts: list[int], u: Tensor, stop: Tensor, temperature, top_p, dtype
):
    """Decode sum(counts) rows; counts[i] rows continue prompts[i]; u (rows, T). -> tokens, logp, lengths, finished, row_steps."""
    from transformers import DynamicCache

    device, (rows, limit) = u.device, u.shape
    tokens = torch.zeros(rows, limit, dtype=torch.long, device=device)
    logp = torch.zeros(rows, limit, device=device)
    lengths = torch.zeros(rows, dtype=torch.long, device=device)
    finished = torch.zeros(rows, dtype=torch.bool, device=device)

    ids, seen = left_pad(prompts, device)
    cache = DynamicCache(config=model.config)
    with autocast(model, dtype):
        logits = model(input_ids=ids, attention_mask=seen, position_ids=positions(seen), cache=cache, use_cache=True,
                       logits_to_keep=1).logits[:, -1]  # fmt: skip
    origin = torch.repeat_interleave(torch.arange(len(prompts), device=device), torch.tensor(counts, device=device))
    cache.reorder_cache(
        origin
    )  # a row's copy of its prompt's cache; unlike batch_select_indices, recurrent layers have it
    logits, seen = logits[origin], seen[origin]
    position = seen.sum(1)
    alive = torch.arange(rows, device=device)  # rows still in the batch
    active = torch.ones(rows, dtype=torch.bool, device=device)  # of those, the ones not done
    row_steps = 0
    for t in range(limit):
        row_steps += len(alive)
        token, token_logprob = sample(logits, u[alive, t], temperature, top_p)
        live = alive[active]
        tokens[live, t], logp[live, t] = token[active], token_logprob[active].float()
        lengths[live] += 1
        ended = torch.isin(token, stop) & active
        finished[alive[ended]] = True
        active = active & ~ended
        left = int(active.sum())
        if left == 0 or t == limit - 1:
            break
        if left <= 0.9 * len(alive):  # compaction costs a copy of the cache, so not for every row that ends
            keep = active.nonzero().squeeze(1)
            cache.reorder_cache(keep)
            alive, token, seen, position, active = alive[keep], token[keep], seen[keep], position[keep], active[keep]
        seen = torch.cat([seen, seen.new_ones(len(seen), 1)], 1)
        with autocast(model, dtype):
            logits = model(input_ids=token[:, None], attention_mask=seen, position_ids=position[:, None], cache=cache,
                           use_cache=True).logits[:, -1]  # fmt: skip
        position = position + 1
    return tokens, logp, lengths, finished, row_steps


def rollout(
    model: nn.Module, prompt_ids: list[list[int]], samples: int, stop: list[int], *, max_new_tokens: int, temperature=1.0,
    top_p=1.0, keys: list[tuple[int, ...]] | None = None, prefix: list[int] = (), kv_tokens=65536, dtype=torch.float32,
) -> Rollout:  # fmt: skip
    """Sample completions of every prompt; row i * samples + j is sample j of prompt i.

    keys[i]: (seed, step, prompt) of the random stream of prompt i; its samples do not depend on what is decoded beside
    them. prefix: ids forced before the completion; they are context, so they belong to prompt_ids of the result (F18).
    """
    prompt_ids = [[*p, *prefix] for p in prompt_ids]
    device = next(model.parameters()).device
    keys = keys or [(0, 0, i) for i in range(len(prompt_ids))]
    rows = len(prompt_ids) * samples
    tokens = torch.zeros(rows, max_new_tokens, dtype=torch.long, device=device)
    logp = torch.zeros(rows, max_new_tokens, device=device)
    lengths = torch.zeros(rows, dtype=torch.long, device=device)
    finished = torch.zeros(rows, dtype=torch.bool, device=device)
    ends, row_steps, was_training = torch.tensor(stop, device=device), 0, model.training
    model.eval()
    for batch in batches(prompt_ids, samples, max_new_tokens, kv_tokens):
        at = torch.tensor([i * samples + j for i, a, b in batch for j in range(a, b)], device=device)
        u = uniforms([(*keys[i], j) for i, a, b in batch for j in range(a, b)], max_new_tokens)
        part = decode(model, [prompt_ids[i] for i, _, _ in batch], [b - a for _, a, b in batch],
                      torch.from_numpy(u).to(device), ends, temperature, top_p, dtype)  # fmt: skip
        tokens[at], logp[at], lengths[at], finished[at] = part[:4]
        row_steps += part[4]
    model.train(was_training)
    width = max(1, int(lengths.max()))
    mask = torch.arange(width, device=device) < lengths[:, None]
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
