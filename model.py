"""Load, build, save and shard a causal LM, and the log-probs of completions.

completion_logp here is the plain reference: every row is [left padding | prompt | completion], one forward. It takes the
prompts once and a group index per row, so a packed forward that sees each prompt once can take its place unseen.
Left out: LoRA, quantised training, tensor parallelism.
"""

import contextlib
import math
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
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


def checkpoint_of(path: str) -> str:
    """A run folder -> its best checkpoint, or the last; anything else unchanged."""
    folder = os.path.join(path, "checkpoints")
    if not os.path.isdir(folder):
        return path
    names = sorted(os.listdir(folder))
    steps = [n for n in names if n.startswith("step-") and n[5:].isdigit()]
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
        self.body = lm_model.base_model
        self.head = nn.Linear(lm_model.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.to(next(lm_model.parameters()).device)

    def forward(self, keep: int, **inputs) -> Tensor:
        """Values (B,keep) of the last keep positions."""
        values = self.head(self.body(**inputs).last_hidden_state[:, -keep:].float())
        return values.squeeze(-1).clone()  # FSDP hooks into what a module returns: not into a view


def completion_values(
    critic: nn.Module, prompts: list[list[int]], tokens: Tensor, mask: Tensor, group: Tensor, dtype=torch.float32
) -> Tensor:
    """Value of the state before every completion token, (B,T), 0 where mask is 0; arguments as in completion_logp."""
    inputs, _, real = rows_of(prompts, tokens, mask, group)
    with autocast(critic, dtype):
        values = critic(keep=real.shape[1] + 1, **inputs)[:, :-1]
    return nn.functional.pad(torch.where(real, values.float(), 0), (0, tokens.shape[1] - real.shape[1]))


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
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype != torch.float32 else None
    kwargs = {"mp_policy": policy} if policy else {}
    blocks = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)
    for block in blocks:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


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
