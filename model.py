"""Load, build, save and shard a causal LM, and the log-probs of completions.

completion_logp is the plain reference: every row is [left padding | prompt | completion], one forward. packed_logp and
packed_loss see each prompt once, without padding, and never hold the logits; they equal the reference to rounding.
Left out: LoRA, quantised training, tensor parallelism.
"""

import contextlib
import math
import os
import types
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as hf_logging

from config import Config, fail

hf_logging.disable_progress_bar()  # loading tiny files needs no bars, and they would bury the one line of an error

SPECIAL = ["<pad>", "<eos>", "<unk>"]  # of tokenizers built here
ROPE_QWEN2 = {"rope_type": "default", "rope_theta": 1e6}  # of the published models
PIECES = {"word": r"\S+\s?|\s", "line": r"[^\n]+\n?|\n"}  # white space stays with the word before it


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers


def build_tokenizer(kind: str, texts, vocabulary=()):
    """A Hugging Face tokenizer made from texts: word, line (a title is one token) or byte. Ids join to the exact text.
    vocabulary: the words (or lines) in place of those of the texts, in this order; special ones may be among them, <bos> too.
    """
    from transformers import PreTrainedTokenizerFast

    if kind == "byte":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {t: i for i, t in enumerate(SPECIAL + alphabet)}
        raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        raw.decoder = decoders.ByteLevel()
    else:
        split = pre_tokenizers.Split(Regex(PIECES[kind]), "isolated")
        words = {piece for text in texts for piece, _ in split.pre_tokenize_str(text)}
        words = [t for t in vocabulary or sorted(words) if t not in SPECIAL or t in vocabulary]
        vocab = {t: i for i, t in enumerate([*(t for t in SPECIAL if t not in words), *words])}
        raw = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
        raw.pre_tokenizer, raw.decoder = split, decoders.Fuse()
    start = {"bos_token": "<bos>"} if "<bos>" in vocabulary else {}
    raw.add_special_tokens([*SPECIAL, *start.values()])
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", **start,
                                   clean_up_tokenization_spaces=False)  # fmt: skip


def steps_in(folder: str) -> list[str]:
    """Names step-N in a folder, in the order of the steps; none where there is no folder."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted((n for n in names if n.startswith("step-") and n[5:].isdecimal()), key=lambda n: int(n[5:]))


def checkpoint_of(path: str) -> str:
    """A run folder -> its best checkpoint, or the last; anything else unchanged."""
    folder = os.path.join(path, "checkpoints")
    if not os.path.isdir(folder):
        return path
    steps = steps_in(folder)
    if not steps:
        fail(f"--init {path}: the run has no checkpoint yet")
    best = os.path.join(folder, "best")
    return best if os.path.exists(best) else os.path.join(folder, steps[-1])


def load_tokenizer(cfg: Config, examples=(), catalog=(), vocabulary=()):
    """The tokenizer of --init, or one built from the examples (prompts, demonstrations, candidates) and the catalog, or from
    the vocabulary where the data set has one."""
    if not cfg.init and vocabulary:
        return build_tokenizer(cfg.tokenizer, (), vocabulary)
    if not cfg.init:
        titles = set(catalog).union(*{id(e.candidates): e.candidates for e in examples}.values())
        texts = {t for e in examples for t in (e.prompt, e.demo)} | {f"{t}\n" for t in titles}
        return build_tokenizer(cfg.tokenizer, texts)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # one made here is whole in tokenizer.json, but AutoTokenizer takes that of any qwen2 model for Qwen2's own
    made_here = '"TokenizersBackend"' in text_at(os.path.join(checkpoint_of(cfg.init), "tokenizer_config.json"))
    tokenizer = from_hub(PreTrainedTokenizerFast if made_here else AutoTokenizer, cfg)
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:
        fail(f"--init {cfg.init}: it has no tokenizer files")
    if tokenizer.eos_token_id is None:
        fail(f"--init {cfg.init}: its tokenizer has no end token (eos_token), so no completion could end")
    if tokenizer.chat_template:  # a program that came with the model: transformers runs it in a sandbox
        try:
            tokenizer.apply_chat_template(
                [{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True
            )
        except Exception as e:
            fail(f"--init {cfg.init}: its chat template fails: {type(e).__name__} {e}")
    return tokenizer


def text_at(path: str) -> str:
    """The text of a file; "" where there is none."""
    if not os.path.isfile(path):
        return ""
    with open(path, encoding="utf-8", errors="replace") as f:
        return f.read()


def from_hub(auto, cfg: Config, **kwargs):
    """auto.from_pretrained of --init; every failure ends in one line."""
    path = checkpoint_of(cfg.init)
    if not os.path.exists(path) and (path.startswith(("runs/", "/", ".")) or path.count("/") > 1):
        fail(f"--init {cfg.init}: cannot load it: there is no such folder (a hub name has at most one slash)")
    if not os.path.exists(path) and "@" in path:
        path, kwargs["revision"] = path.split("@", 1)
    if path.endswith(".gguf"):  # needs the packages gguf and accelerate
        path, kwargs["gguf_file"] = os.path.split(path)
    try:
        return auto.from_pretrained(path or ".", trust_remote_code=cfg.trust_remote_code, **kwargs)
    except Exception as e:
        reason = next((line.strip() for line in str(e).splitlines() if line.strip()), type(e).__name__)
        if "trust_remote_code" in str(e):
            reason += " (--trust_remote_code true would run it)"
        fail(f"--init {cfg.init}: cannot load it as a run folder, a Hugging Face folder, a hub name or .gguf: {reason}")


def stop_ids(model, tokenizer) -> list[int]:
    """Every id that ends a completion: the tokenizer's and the model's, which may be a list (F12)."""
    ids = {tokenizer.eos_token_id}
    for source in (getattr(model, "generation_config", None), model.config):
        eos = getattr(source, "eos_token_id", None)
        ids |= set(eos if isinstance(eos, list | tuple) else [eos])
    return sorted(i for i in ids if i is not None)


def word_ids(tokenizer, words: list[str]) -> list[int]:
    """Ids of the words of --stop, each one token."""
    ids = [tokenizer(word, add_special_tokens=False)["input_ids"] for word in words]
    for word, found in zip(words, ids):
        if len(found) != 1 or found[0] == tokenizer.unk_token_id:
            fail(f"--stop {word!r}: it must be one token of the tokenizer, and is {len(found)} or unknown")
    return [i for (i,) in ids]


# ---------------------------------------------------------------------------------------------------------------------
# Models


def no_dropout(model: nn.Module) -> nn.Module:
    """Set every dropout to 0: rollout, old and new log-probs must come from one function (F39)."""
    for config in {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}.values():
        for key, value in list(vars(config).items()):
            if ("dropout" in key or key.endswith("_pdrop")) and isinstance(value, float):
                setattr(config, key, 0.0)
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
        for key in ("attention_dropout", "dropout"):  # read by attention functions at call time
            if isinstance(getattr(m, key, None), float):
                setattr(m, key, 0.0)
    return model


def attention_of(cfg: Config, device: torch.device) -> str:
    from transformers.utils import is_flash_attn_2_available

    if cfg.attention != "auto":
        return cfg.attention
    flash = device.type == "cuda" and is_flash_attn_2_available() and compute_dtype(cfg, device) != torch.float32
    return "flash_attention_2" if flash else "sdpa"


def compute_dtype(cfg: Config, device: torch.device) -> torch.dtype:
    name = ("bfloat16" if device.type == "cuda" else "float32") if cfg.dtype == "auto" else cfg.dtype
    return getattr(torch, name)


def tiny_config(cfg: Config, tokenizer):
    """Config of a tiny Qwen3 or Qwen2 for the tokenizer."""
    from transformers import Qwen2Config, Qwen3Config

    heads = cfg.heads or cfg.width // 32
    make, own = {
        # logits of unit size at the start
        "qwen3": (Qwen3Config, {"head_dim": cfg.width // heads, "initializer_range": cfg.width**-0.5}),
        "qwen2": (Qwen2Config, {"rope_parameters": ROPE_QWEN2, "initializer_range": 0.02}),  # as published
    }[cfg.arch]
    return make(
        vocab_size=len(tokenizer), hidden_size=cfg.width, intermediate_size=cfg.ffn or 3 * cfg.width,
        num_hidden_layers=cfg.layers, num_attention_heads=heads, num_key_value_heads=cfg.kv_heads or heads,
        max_position_embeddings=cfg.max_prompt + cfg.max_new_tokens, tie_word_embeddings=cfg.tie,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **own,
    )  # fmt: skip


def build(cfg: Config, tokenizer) -> nn.Module:
    """That model with random weights, seeded by cfg.seed."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(cfg.seed)
    return AutoModelForCausalLM.from_config(tiny_config(cfg, tokenizer))


def load(cfg: Config, tokenizer, device: torch.device) -> nn.Module:
    """The model of --init, or a tiny one: fp32 master weights, no dropout, on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if cfg.init:
        safe = None if cfg.init.endswith(".gguf") else True  # the older .bin files are pickles
        config = from_hub(AutoConfig, cfg)
        config._attn_implementation = "eager"  # until --attention is set: a config.json may name a kernel of the hub
        model, info = from_hub(AutoModelForCausalLM, cfg, config=config, dtype=torch.float32, use_safetensors=safe,
                               output_loading_info=True)  # fmt: skip
        if missing := info["missing_keys"]:  # they would be random numbers
            fail(f"--init {cfg.init}: its weights lack {min(missing)} ({len(missing)} in all)")
        if (
            getattr(model, "hf_quantizer", None) is not None
        ):  # .gguf: the weights are plain fp32 now, so let them be saved
            model.hf_quantizer = None
            for holder, name in ((model, "quantization_method"), (model.config, "quantization_config")):
                if hasattr(holder, name):
                    delattr(holder, name)
    else:
        model = build(cfg, tokenizer)
    try:
        model.set_attn_implementation(attention_of(cfg, device))
    except (ImportError, ValueError) as e:
        fail(f"--attention {cfg.attention}: {str(e).strip().splitlines()[0]}")
    if tokenizer is not None and len(tokenizer) > (rows := model.get_input_embeddings().num_embeddings):
        fail(f"--init {cfg.init}: its tokenizer has {len(tokenizer)} tokens, its model {rows}")
    check_positions(cfg, model.config)
    if cfg.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return no_dropout(model).to(device)


def check_positions(cfg: Config, config) -> None:
    """Prompt and completion must fit into the positions that a model was made for."""
    longest = getattr(config, "max_position_embeddings", math.inf)
    if cfg.max_prompt + cfg.max_new_tokens > longest:
        fail(
            f"--max_prompt {cfg.max_prompt} + --max_new_tokens {cfg.max_new_tokens} exceed the model's {longest} positions"
        )


def save(model: nn.Module, tokenizer, folder: str, state: dict[str, Tensor] | None = None) -> None:
    """A Hugging Face folder (safetensors). state: full weights where the model holds only shards."""
    if state is not None:  # gathered, tied weights come under both names; keep the one that a whole model writes
        state = {k: v for k, v in state.items() if k not in model.all_tied_weights_keys}
    model.save_pretrained(folder, state_dict=state)
    tokenizer.save_pretrained(folder)


# ---------------------------------------------------------------------------------------------------------------------
# Log-probs


def autocast(model: nn.Module, dtype: torch.dtype):
    """bf16 compute on fp32 weights; nothing for float32."""
    device = next(model.parameters()).device.type
    return torch.autocast(device, dtype, enabled=dtype != torch.float32)


def token_logp(
    logits: Tensor, tokens: Tensor, temperature: float, entropy: bool | str = False
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of tokens (...,) under softmax(logits (...,V) / temperature), in fp32 or better, and its entropy (nats).

    logits[..., t, :] predict tokens[..., t]; no further shift. Half-precision log_softmax is off by up to 0.07 nats at
    150k words (F07). entropy "grad": with gradient, for a bonus; True: without. Temperature 0 (greedy) reads as 1.
    """
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) / (
        temperature or 1.0
    )  # a copy: logits stay as they are
    all_logp = z.log_softmax(-1)
    logp = all_logp.gather(-1, tokens[..., None]).squeeze(-1)
    if not entropy:
        return logp, None
    with torch.set_grad_enabled(entropy == "grad" and torch.is_grad_enabled()):
        known = all_logp.masked_fill(all_logp == -torch.inf, 0)  # p log p is 0 there, and so must its gradient be
        return logp, -(all_logp.exp() * known).sum(-1)


def left_pad(prompts: list[list[int]], device) -> tuple[Tensor, Tensor]:
    """Prompts -> ids (N,P) padded on the left, and the mask of real tokens (N,P)."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return ids, mask


def positions(mask: Tensor) -> Tensor:
    """Position of every token from its attention mask; padding gets 0 (F13)."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def completion_logp(
    model: nn.Module, prompts: list[list[int]], tokens: Tensor, mask: Tensor, group: Tensor, temperature=1.0,
    dtype=torch.float32, entropy: bool | str = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Log-probs of completions, (B,T), 0 where mask is 0, and their entropies if asked.

    prompts: N lists of ids; tokens (B,T) padded on the right; mask (B,T) bool, real tokens; group (B,): row b continues
    prompts[group[b]]. Logits are computed for completion positions only (logits_to_keep), divided by the temperature.
    """
    inputs, picked, real = rows_of(prompts, tokens, mask, group)
    with autocast(model, dtype):
        # the logits before the first completion token predict it: keep one position more and drop the last (F04)
        logits = model(**inputs, logits_to_keep=real.shape[1] + 1).logits[:, :-1]
    logp, h = token_logp(logits, picked, temperature, entropy)
    pad = (0, tokens.shape[1] - real.shape[1])
    logp = nn.functional.pad(torch.where(real, logp, 0), pad)
    return logp, None if h is None else nn.functional.pad(torch.where(real, h, 0), pad)


def rows_of(prompts: list[list[int]], tokens: Tensor, mask: Tensor, group: Tensor) -> tuple[dict, Tensor, Tensor]:
    """Inputs of a forward over [left padding | prompt | completion], and the completions (B,W) with their mask, W the longest."""
    width = int(mask.sum(1).max())
    real = mask[:, :width]
    picked = torch.where(real, tokens[:, :width], 0)
    ids, seen = left_pad([prompts[g] for g in group.tolist()], tokens.device)
    seen = torch.cat([seen, real.long()], 1)
    ids = torch.cat([ids, picked], 1)
    return {"input_ids": ids, "attention_mask": seen, "position_ids": positions(seen), "use_cache": False}, picked, real


class Critic(nn.Module):
    """A value head on a body of its own, started as a copy of the policy's (PPO): what reward is still to come."""

    def __init__(self, lm_model: nn.Module):
        super().__init__()
        self.body, self.packed = lm_model.base_model, packs(lm_model)
        self.head = nn.Linear(lm_model.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.to(next(lm_model.parameters()).device)

    def forward(self, keep: int, layout=None, **inputs) -> Tensor:
        """Values (B,keep) of the last keep positions; with a layout (C,): of the states before its scored tokens."""
        if layout is None:
            hidden = self.body(**inputs).last_hidden_state[:, -keep:]
        else:
            hidden = packed_hidden(self.body, layout)
        return self.head(hidden.float()).squeeze(-1).clone()  # FSDP hooks into what a module returns: not into a view


def completion_values(
    critic: nn.Module, prompts: list[list[int]], tokens: Tensor, mask: Tensor, group: Tensor, dtype=torch.float32
) -> Tensor:
    """Value of the state before every completion token, (B,T), 0 where mask is 0; arguments as in completion_logp."""
    if packs(critic):
        layout = pack(prompts, tokens, mask, group)
        with autocast(critic, dtype):
            values = critic(keep=0, layout=layout)
        return unpack(values, layout.counts, tokens.shape[1])[layout.order.argsort()]
    inputs, _, real = rows_of(prompts, tokens, mask, group)
    with autocast(critic, dtype):
        values = critic(keep=real.shape[1] + 1, **inputs)[:, :-1]
    return nn.functional.pad(torch.where(real, values.float(), 0), (0, tokens.shape[1] - real.shape[1]))


# ---------------------------------------------------------------------------------------------------------------------
# Log-probs with each prompt seen once


@dataclass
class Layout:
    """Where things are in the one row of a packed forward, [prompt | prompt | ... | completion | completion | ...].

    No padding; the last token of a completion is no input. Rows of one prompt stand side by side, longest first. Two
    prompts of 3 tokens, three completions of 4, 2 and 2, the first of prompt 0, the others of prompt 1:

    ids, at     (1,N)  tokens and their positions: 0 1 2, 0 1 2, 3 4 5, 3, 3
    prompts     [(0, 2, 3)]                 runs of equally long prompts: first token, how many, tokens of each
    rows        [(6, 1, 3), (9, 2, 1)]      runs of equally long completions
    groups      [(0, 3, 6, 3), (3, 3, 9, 2)]  first token and tokens of a prompt; of what continues it
    scored      (C,)   the token whose hidden state predicts each completion token: 2 6 7 8, 5 9, 5 10
    targets     (C,)   the tokens predicted, row by row
    owners      [0, 1, 1]  the prompt of each row that has inputs
    order       (B,)   the row of the call that stands there
    counts      [4, 2, 2]  tokens scored of each
    """

    ids: Tensor
    at: Tensor
    prompts: list[tuple[int, int, int]]
    rows: list[tuple[int, int, int]]
    groups: list[tuple[int, int, int, int]]
    owners: list[int]
    scored: Tensor
    targets: Tensor
    order: Tensor
    counts: list[int]


def pack(prompts: list[list[int]], tokens: Tensor, mask: Tensor, group: Tensor) -> Layout:
    """The layout of a forward; arguments as in completion_logp."""
    owner, real, texts = group.tolist(), mask.sum(1).tolist(), tokens.tolist()
    order = sorted(range(len(owner)), key=lambda b: (-len(prompts[owner[b]]), owner[b], -real[b]))
    ids: list[int] = []
    at: list[int] = []
    runs: tuple[list, list] = ([], [])
    start: dict[int, int] = {}

    def append(kind: int, new: list[int], position: int) -> None:
        begin, n, length = runs[kind][-1] if runs[kind] else (0, 0, 0)
        if length == len(new) and n:
            runs[kind][-1] = (begin, n + 1, length)
        elif new:
            runs[kind].append((len(ids), 1, len(new)))
        at.extend(range(position, position + len(new)))
        ids.extend(new)

    for p in dict.fromkeys(owner[b] for b in order):
        start[p] = len(ids)
        append(0, prompts[p], 0)
    groups: list[tuple[int, int, int, int]] = []
    scored: list[int] = []
    targets: list[int] = []
    for b in order:
        p, first = owner[b], len(ids)
        size = len(prompts[p])
        append(1, texts[b][: max(0, real[b] - 1)], size)
        targets += texts[b][: real[b]]
        scored += [start[p] + size - 1, *range(first, len(ids))][: real[b]]
        if groups and groups[-1][0] == start[p]:
            groups[-1] = (*groups[-1][:3], len(ids) - groups[-1][2])
        else:
            groups.append((start[p], size, first, len(ids) - first))

    def tensor(x: list[int]) -> Tensor:
        return torch.tensor(x, dtype=torch.long, device=tokens.device)

    number = {p: i for i, p in enumerate(start)}
    owners = [number[owner[b]] for b in order if real[b] > 1]
    return Layout(tensor([ids]), tensor([at]), *runs, [g for g in groups if g[3]], owners, tensor(scored), tensor(targets),
                  tensor(order), [real[b] for b in order])  # fmt: skip


FLASH = True  # the flash attention of a CPU; tests switch it off


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(scale q k') v, (n,H,T,D), and the log-sum-exp of every query's scores, (n,H,T); k, v (n,K,S,D), K heads of
    keys, each shared by H/K heads of queries. Flash attention on a CPU, else with the scores of one call in memory."""
    if FLASH and q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    s = scores(q, k, causal, scale)
    lse = s.logsumexp(-1)
    out = (s - lse[..., None]).exp().to(v.dtype) @ v
    return out.view(q.shape), lse.view(q.shape[:3])


def attend_backward(grad, q, k, v, out, lse, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attend by q, k, v. With out and lse of a softmax over more keys than these: this part of theirs."""
    if FLASH and q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse.contiguous(), 0.0, causal, scale=scale)  # fmt: skip
    fold = (k.shape[0], k.shape[1], -1, k.shape[3])
    p = (scores(q, k, causal, scale) - lse.reshape(*fold[:3], 1)).exp()
    inner = (grad.to(p.dtype) * out).sum(-1).reshape(*fold[:3], 1)
    grad, low = grad.reshape(fold), v.dtype
    ds = (p * (grad @ v.transpose(-1, -2) - inner) * scale).to(low)
    return (ds @ k).view(q.shape), ds.transpose(-1, -2) @ q.reshape(fold), p.to(low).transpose(-1, -2) @ grad


def scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """scale q k' in fp32 or better, (n,K,H/K*T,S): the heads of queries that share keys lie behind each other."""
    s = q.reshape(k.shape[0], k.shape[1], -1, k.shape[3]) @ k.transpose(-1, -2)
    s = s.to(torch.promote_types(s.dtype, torch.float32)) * scale
    if causal:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        s = s.masked_fill(later.repeat(s.shape[2] // q.shape[2], 1), -torch.inf)
    return s


class SharedPrefix(torch.autograd.Function):
    """Attention over a packed row: prompts over themselves; completions over their prompt and over themselves.

    The two parts of a completion are merged by their log-sum-exps, and in the backward pass each gets the merged output and
    log-sum-exp, which makes its gradients those of the one softmax. Nothing is copied G times and no scores are kept.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
        """q (N,H,D), k and v (N,K,D) -> (N,H,D)."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = out.new_empty(out.shape[:2], dtype=torch.promote_types(out.dtype, torch.float32))
        for run in (*layout.prompts, *layout.rows):
            o, l = attend(*(cut(x, *run) for x in (q, k, v)), True, scale)
            cut(out, *run).copy_(o)
            cut(lse, *run).copy_(l)
        for p, size, first, n in layout.groups:
            o, l = attend(cut(q, first, 1, n), cut(k, p, 1, size), cut(v, p, 1, size), False, scale)
            own, own_lse = cut(out, first, 1, n), cut(lse, first, 1, n)
            own.lerp_(o, (l - own_lse).sigmoid()[..., None].to(o.dtype))
            own_lse.copy_(torch.logaddexp(own_lse, l))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        for run in (*ctx.layout.prompts, *ctx.layout.rows):
            got = attend_backward(*(cut(x, *run) for x in (grad, q, k, v, out, lse)), True, ctx.scale)
            for whole, part in zip((dq, dk, dv), got):
                cut(whole, *run).copy_(part)
        for p, size, first, n in ctx.layout.groups:
            own, shared = (first, 1, n), (p, 1, size)
            got = attend_backward(cut(grad, *own), cut(q, *own), cut(k, *shared), cut(v, *shared), cut(out, *own),
                                  cut(lse, *own), False, ctx.scale)  # fmt: skip
            for whole, run, part in zip((dq, dk, dv), (own, shared, shared), got):
                cut(whole, *run).add_(part)
        return dq, dk, dv, None, None


def cut(x: Tensor, first: int, n: int, length: int) -> Tensor:
    """n sequences of a packed tensor (N,H,...) as a view (n,H,length,...)."""
    return x[first : first + n * length].unflatten(0, (n, length)).transpose(1, 2)


SHARED = "shared_prefix"  # our name in transformers' registry of attention functions
BEYOND = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")  # what some models ask of theirs


def only_softmax(kwargs: dict) -> None:
    """NotImplementedError where a model asks more of its attention function than our own ones (here, in rollout.py) do."""
    if odd := [k for k in BEYOND if kwargs.get(k) is not None]:
        raise NotImplementedError(f"its attention has {odd[0]}")


def shared_attention(module, query, key, value, attention_mask, layout: Layout | None = None, scaling=None, **kwargs):
    """Attention function of a model: packed where the call brings a layout, else that of transformers. q (1,H,N,D)."""
    if layout is None:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    only_softmax(kwargs)
    device = query.device.type  # bf16 compute: some models bring q and k in fp32
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
    return SharedPrefix.apply(q, k, v, layout, query.shape[-1] ** -0.5 if scaling is None else scaling)[None], None


ALL_ATTENTION_FUNCTIONS.register(SHARED, shared_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(SHARED, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


class Carry:
    """In place of a cache: what a recurrent layer (Qwen3.5's gated delta net) carries from a prompt to its completions, a
    convolution's last inputs (n,channels,kernel) and a state (n,heads,D,D). Nothing is written in place, so gradients flow."""

    def __init__(self, conv: Tensor | None = None, state: Tensor | None = None):
        self.conv, self.state = conv, state

    def get_conv_state(self, *args, **kwargs) -> None:
        """None: the way that decodes one token in place is not taken."""

    def get_recurrent_state(self, *args, **kwargs) -> Tensor | None:
        return self.state

    def update_conv_state(self, new: Tensor, layer: int, conv_kernel_size: int, **kwargs) -> Tensor:
        whole = new if self.conv is None else torch.cat([self.conv, new], -1)
        self.conv = nn.functional.pad(whole, (conv_kernel_size, 0))[..., -conv_kernel_size:]
        return whole

    def update_recurrent_state(self, new: Tensor, layer: int, **kwargs) -> None:
        self.state = new


def recurrent(self, hidden_states: Tensor, layout: Layout | None = None, cache=None, attention_mask=None, **kwargs):
    """Forward of a recurrent layer. With a layout: prompts from the start, then every completion from its prompt's end."""
    run = type(self).forward
    if layout is None:
        return run(self, hidden_states, cache=cache, attention_mask=attention_mask, **kwargs)
    flat, out, ends = hidden_states[0], [], []
    for first, n, length in layout.prompts:
        ends.append(Carry())
        out.append(
            run(self, flat[first : first + n * length].unflatten(0, (n, length)), cache=ends[-1], **kwargs).flatten(
                0, 1
            )
        )
    if layout.rows:
        lengths = [length for _, n, length in layout.rows for _ in range(n)]
        rows = nn.utils.rnn.pad_sequence(flat[layout.rows[0][0] :].split(lengths), batch_first=True)
        start = Carry(*(torch.cat(x)[layout.owners] for x in ([e.conv for e in ends], [e.state for e in ends])))
        out += [row[:n] for row, n in zip(run(self, rows, cache=start, **kwargs), lengths)]
    return torch.cat(out)[None]


def packed_hidden(body: nn.Module, layout: Layout) -> Tensor:
    """Hidden states (C,h) that predict the scored tokens."""
    if body.config._attn_implementation != SHARED:
        body.set_attn_implementation(SHARED)
    # a mask of four dimensions is taken as it is (and ignored above): else one of N x N would be made for packed rows
    unused = layout.ids.new_ones(1, 1, 1, 1)
    hidden = body(input_ids=layout.ids, position_ids=layout.at, attention_mask=unused, use_cache=False, layout=layout)
    return hidden.last_hidden_state[0].index_select(0, layout.scored)


CHUNK = 64 * 2**20  # bytes of logits held at a time


class Head:
    """Logits of a chunk of positions in one buffer, turned in place into probabilities and then into their gradient."""

    def __init__(self, hidden: Tensor, weight: Tensor, layout: Layout, temperature: float, entropy: bool):
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        self.hidden, self.weight = hidden.to(dtype), weight.to(dtype)
        self.layout, self.temperature, self.entropy = layout, temperature or 1.0, entropy
        wide = torch.promote_types(dtype, torch.float32)
        self.most = max(1, CHUNK // (len(weight) * wide.itemsize))
        self.z = hidden.new_empty(min(self.most, len(hidden)), len(weight), dtype=wide)
        # elementwise passes in parts: small beside a chunk, and on a CPU small enough for its cache
        part = self.most // 4 if device != "cpu" else min(self.most // 4, 2**21 // (len(weight) * wide.itemsize))
        self.block = max(1, part)

    def blocks(self, a: int, b: int):
        """(part of the buffer, its positions) for positions a..b, whose logits lie at the front of the buffer."""
        for i in range(a, b, self.block):
            j = min(b, i + self.block)
            yield self.z[i - a : j - a], slice(i, j)

    def score(self, a: int, b: int) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropies of positions a..b; the buffer then holds exp(logits - max)."""
        z = self.z[: b - a]
        if z.dtype == self.hidden.dtype:
            torch.mm(self.hidden[a:b], self.weight.t(), out=z)
        else:  # in bf16 a matrix product cannot write fp32
            z.copy_(self.hidden[a:b] @ self.weight.t())
        logp, entropy = z.new_empty(b - a), z.new_empty(b - a) if self.entropy else None
        self.total = z.new_empty(b - a)
        for e, at in self.blocks(a, b):
            here = slice(at.start - a, at.stop - a)
            if self.temperature != 1:
                e.div_(self.temperature)
            top = e.amax(-1, keepdim=True)
            picked = e.gather(-1, self.layout.targets[at, None])
            e.sub_(top)
            if not self.entropy:
                total = e.exp_().sum(-1)
            else:  # log total - sum of e^z z / total, with 0 for e^-inf -inf
                p = e.clamp_(min=-1000).exp()
                total = p.sum(-1)
                entropy[here] = total.log() - e.mul_(p).sum(-1) / total
                e.copy_(p)
            self.total[here] = total
            logp[here] = (picked - top).squeeze(-1) - total.log()
        return logp, entropy

    def gradient(
        self, a: int, b: int, g: Tensor, g_entropy: Tensor | None, entropy: Tensor | None, dw: Tensor
    ) -> Tensor:
        """Gradient (b-a,h) by the hidden states of positions a..b, of which score was the last call, from those by log-probs
        and entropies; that by the weight is added to dw."""
        for e, at in self.blocks(a, b):
            here = slice(at.start - a, at.stop - a)
            total, down = self.total[here], -g[here]
            if g_entropy is not None:  # d entropy / d logit = -p (log p + entropy)
                down = down + g_entropy[here] * (total.log() - entropy[here])
                more = e.clamp(min=torch.finfo(e.dtype).tiny).log_().mul_(e).mul_((-g_entropy[here] / total)[:, None])
            e.mul_((down / total)[:, None])
            if g_entropy is not None:
                e.add_(more)
            e.scatter_add_(-1, self.layout.targets[at, None], g[here, None])
            if self.temperature != 1:
                e.div_(self.temperature)
        z, h = self.z[: b - a].to(self.weight.dtype), self.hidden[a:b]
        if dw.dtype == z.dtype:
            dw.addmm_(z.t(), h)
        else:
            dw.add_(z.t() @ h)
        return z @ self.weight


class FusedLoss(torch.autograd.Function):
    """The sum of loss_fn over chunks of whole rows; the gradients are made in the same pass, so logits exist one chunk at a
    time and are computed once. A row longer than a chunk is scored first and computed again for its gradient."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, layout: Layout, loss_fn, width: int, temperature: float, entropy):
        head = Head(hidden.detach(), weight.detach(), layout, temperature, bool(entropy))
        dh = torch.empty_like(hidden)
        dw = torch.zeros_like(weight, dtype=head.z.dtype)
        total: Tensor | None = None
        for rows, (a, b) in chunks(layout.counts, head.most):
            pieces = [(i, min(b, i + head.most)) for i in range(a, b, head.most)]
            got = [head.score(i, j) for i, j in pieces]
            logp = torch.cat([lp for lp, _ in got]).requires_grad_() if got else hidden.new_zeros(0).requires_grad_()
            h = torch.cat([x for _, x in got]).requires_grad_(entropy == "grad") if entropy and got else None
            with torch.enable_grad(), torch.autocast(hidden.device.type, enabled=False):
                some = layout.order[rows.start : rows.stop]
                part = loss_fn(some, *(unpack(x, layout.counts[rows], width) for x in (logp, h)))
                asked = (logp, h) if entropy == "grad" else (logp,)
                g = torch.autograd.grad(part, asked, allow_unused=True) if part.requires_grad else (None,)
            total = part.detach() if total is None else total + part.detach()
            g, gh = (*g, None)[:2]
            g = torch.zeros_like(logp) if g is None else g
            for i, j in pieces:
                if len(pieces) > 1:
                    head.score(i, j)
                x, y = i - a, j - a
                extra = (None, None) if gh is None else (gh[x:y], h[x:y].detach())
                dh[i:j] = head.gradient(i, j, g[x:y], *extra, dw)
        ctx.grads = dh, dw.to(weight.dtype)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        dh, dw = ctx.grads
        del ctx.grads  # scaled in place: they may be as large as the head, and a second backward pass has none
        return dh.mul_(grad), dw.mul_(grad), None, None, None, None, None


def chunks(counts: list[int], most: int):
    """Consecutive rows with at most so many scored tokens (a single row may have more): (rows, (first, last + 1) token)."""
    first = token = 0
    for i, n in enumerate(counts):
        size = sum(counts[first:i])
        if i > first and size + n > most:
            yield slice(first, i), (token, token + size)
            first, token = i, token + size
    yield slice(first, len(counts)), (token, token + sum(counts[first:]))


def unpack(x: Tensor | None, counts: list[int], width: int) -> Tensor | None:
    """Scored values (C,) -> (rows, width), 0 behind the end of a row."""
    if x is None:
        return None
    mask = torch.arange(width, device=x.device) < torch.tensor(counts, device=x.device)[:, None]
    return x.new_zeros(mask.shape).masked_scatter(mask, x)


def packed_loss(
    self, layout: Layout, width: int, loss_fn: Callable, temperature=1.0, entropy: bool | str = False
) -> Tensor:
    """Method of a model: loss_fn(rows, logp, entropy), called for parts of the rows and summed, ready for backward.

    rows: indices of the call's rows; logp and entropy (rows, width) as completion_logp returns them. loss_fn must be
    additive over rows, and its gradient must reach the model through its arguments alone.
    """
    hidden = packed_hidden(self.base_model, layout)
    return FusedLoss.apply(hidden, self.get_output_embeddings().weight, layout, loss_fn, width, temperature, entropy)


def packed_logp(self, layout: Layout, width: int, temperature=1.0, entropy=False) -> tuple[Tensor, Tensor | None]:
    """Method of a model: what completion_logp returns, without gradient."""
    with torch.no_grad():
        hidden = packed_hidden(self.base_model, layout)
        head = Head(hidden, self.get_output_embeddings().weight, layout, temperature, bool(entropy))
        got = [head.score(i, min(len(hidden), i + head.most)) for i in range(0, len(hidden), head.most)]
        back = layout.order.argsort()
        parts = (torch.cat(x) if x and x[0] is not None else None for x in zip(*got))
        logp, h = (x if x is None else unpack(x, layout.counts, width)[back] for x in parts)
        return logp, h


def packs(model: nn.Module) -> bool:
    """Does the model (or critic) take the packed path?"""
    return getattr(model, "packed", False)


def share_prefix(model: nn.Module, cfg: Config) -> str:
    """Put a model on the packed path; or say why it must stay on the plain one.

    What its configuration does not tell, a few tokens do: their log-probs must be those of the plain path.
    """
    if not cfg.share_prefix or cfg.attention not in ("auto", "sdpa"):
        return "--share_prefix false" if not cfg.share_prefix else f"--attention {cfg.attention}"
    config, head, before = (
        model.config.get_text_config(),
        model.get_output_embeddings(),
        model.config._attn_implementation,
    )
    odd = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention", "linear_attention"}
    window = getattr(config, "sliding_window", None) or math.inf
    if odd:
        return f"the model has layers of {odd.pop()}"
    if not model._can_set_attn_implementation():
        return "the model's attention cannot be replaced"
    if window < cfg.max_prompt + cfg.max_new_tokens:
        return f"the model's window of {window} tokens may be shorter than prompt and completion"
    if type(head) is not nn.Linear or head.bias is not None:
        return "the model's head is not a plain matrix"
    words, device = head.out_features, head.weight.device
    prompts = [[(37 * i + n) % words for i in range(n)] for n in (5, 2)]
    tokens = (torch.arange(12, device=device).view(3, 4) * 41 + 5) % words
    mask = torch.arange(4, device=device) < torch.tensor([[4], [2], [1]], device=device)
    part = (prompts, tokens, mask, torch.tensor([0, 1, 0], device=device))
    for method in (packed_loss, packed_logp):
        setattr(model, method.__name__, types.MethodType(method, model))
    layers = [m.linear_attn for m in model.modules() if hasattr(m, "linear_attn")]
    for layer in layers:
        layer.forward = types.MethodType(recurrent, layer)
    try:
        if before not in ("sdpa", "eager"):
            model.set_attn_implementation("sdpa")  # the weights are fp32 here, which flash-attn refuses
        with torch.no_grad():
            plain = completion_logp(model, *part)[0]
        model.packed = True
        gap = float((constant_logp(model, *part) - plain).abs().max())
        why = f"the model's log-probs would be off by {gap:.1g}" if not gap < 1e-3 else ""
    except Exception as e:  # whatever an exotic model does with a packed row
        why = f"the model refuses it: {(str(e).strip() or type(e).__name__).splitlines()[0]}"
    if why:
        model.packed = False
        model.set_attn_implementation(before)
        for layer in layers:
            del layer.forward
    return why


def completion_loss(
    model: nn.Module, prompts: list[list[int]], tokens: Tensor, mask: Tensor, group: Tensor, loss_fn: Callable,
    temperature=1.0, dtype=torch.float32, entropy: bool | str = False,
) -> Tensor:  # fmt: skip
    """loss_fn of all rows (see packed_loss), on the packed path where the model has one; arguments as in completion_logp."""
    if not packs(model):
        got = completion_logp(model, prompts, tokens, mask, group, temperature, dtype, entropy)
        return loss_fn(torch.arange(len(tokens), device=tokens.device), *got)
    layout = pack(prompts, tokens, mask, group)
    with autocast(model, dtype):
        return model.packed_loss(layout, tokens.shape[1], loss_fn, temperature, entropy)


def constant_logp(
    model: nn.Module, prompts: list[list[int]], tokens: Tensor, mask: Tensor, group: Tensor, temperature=1.0,
    dtype=torch.float32,
) -> Tensor:  # fmt: skip
    """Log-probs (B,T) without gradient, on the packed path where the model has one; arguments as in completion_logp."""
    with torch.no_grad(), autocast(model, dtype):
        if packs(model):
            return model.packed_logp(pack(prompts, tokens, mask, group), tokens.shape[1], temperature)[0]
    with torch.no_grad():
        return completion_logp(model, prompts, tokens, mask, group, temperature, dtype)[0]


# ---------------------------------------------------------------------------------------------------------------------
# Many processes, many GPUs: FSDP2


def environment() -> tuple[int, int, int]:
    """(rank, ranks, rank on this machine), as torchrun sets them; (0, 1, 0) without it."""
    given = {k: os.environ.get(k, default) for k, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))}
    shown = " ".join(f"{k}={v}" for k, v in given.items())
    if not all(v.isascii() and v.isdigit() for v in given.values()):
        fail(f"{shown}: whole numbers are needed; start several processes with torchrun")
    rank, world, local = map(int, given.values())
    if not local <= rank < world:
        fail(f"{shown}: LOCAL_RANK <= RANK < WORLD_SIZE must hold; start several processes with torchrun")
    if world > 1 and (missing := [k for k in ("MASTER_ADDR", "MASTER_PORT") if k not in os.environ]):
        fail(f"{shown} without {missing[0]}: start several processes with torchrun")
    return rank, world, local


def place() -> tuple[int, int]:
    """(rank, ranks) of the process group; (0, 1) without one."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather(x) -> list:
    """x of every rank, any object that can be pickled, in the order of the ranks."""
    if not dist.is_initialized():
        return [x]
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, x)
    return out


def launch(wait=1800.0) -> tuple[int, int, torch.device]:
    """(rank, ranks, device); joins the process group under torchrun. wait: seconds a rank waits for the others."""
    rank, world, local = environment()
    cuda = torch.cuda.is_available()
    if cuda and local >= torch.cuda.device_count():
        fail(f"LOCAL_RANK={local}: this machine has {torch.cuda.device_count()} GPUs; lower --nproc_per_node")
    if cuda:
        torch.cuda.set_device(local)
    if world > 1 and not dist.is_initialized():
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=wait)))
        # restarted workers meet in torchrun's old store: the addresses of the dead are still in it
        store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=world,
                                timeout=timedelta(seconds=wait))  # fmt: skip
    return rank, world, torch.device("cuda", local) if cuda else torch.device("cpu")


def shard(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """fully_shard every block, then the rest (embeddings and head, tied or not, stay together)."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype != torch.float32 else None
    kwargs = {"mp_policy": policy} if policy else {}
    blocks = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)
    for block in blocks:
        fully_shard(block, **kwargs)
    model = fully_shard(model, **kwargs)
    if packs(model) and not isinstance(
        model, Critic
    ):  # embeddings and head are whole inside the root's forward methods only
        for name in ("packed_loss", "packed_logp"):
            register_fsdp_forward_method(model, name)
    return model


@contextlib.contextmanager
def gathered(model: nn.Module):
    """Hold the whole weights for a rollout: no collective per token, so ranks may finish at different times (F42)."""
    from torch.distributed.fsdp import FSDPModule

    parts = [m for m in model.modules() if isinstance(m, FSDPModule)]
    for m in parts:
        m.set_reshard_after_forward(False, recurse=False)
        m.unshard()
    try:
        yield model
    finally:
        for m in parts:
            m.reshard()
            m.set_reshard_after_forward(m is not model, recurse=False)


def full_state(model: nn.Module) -> dict[str, Tensor] | None:
    """Whole weights on the CPU of rank 0 (empty elsewhere); None where the model is not sharded."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(model, FSDPModule):
        return None
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def load_weights(model: nn.Module, folder: str) -> None:
    """The weights of a Hugging Face folder into a model of the same kind, sharded or not."""
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    load_state(model, {k: v for k, v in whole.state_dict().items()})


def load_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Whole weights into a model, sharded or not; of several ranks only the first needs to hold them."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    ranks = torch.distributed.is_initialized()
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=ranks))
