"""Completion -> items, scores and unit_ids, by one parser; and the reward functions.

    <SLATE>           A completion has two phases: a slate, whose order does not matter, and a ranking of it.
    Heat (1995)       The parser reads the text once: its spans say which tokens belong to which phase, its items say
    Alien (1979)      what they earn. So masks and rewards cannot disagree (faults.md section 11, item 1).
    </SLATE>
    <RANK>
    Alien (1979)
    Heat (1995)
    </RANK>

Left out: models, tensors beyond unit_ids. Sources: factorized GRPO, arXiv 2605.12995 (the original tags and syntax are not
published: the syntax here is ours).
"""

import math
import re
from dataclasses import dataclass, field

import torch
from torch import Tensor

# ---------------------------------------------------------------------------------------------------------------------
# Text -> items


@dataclass
class Parsed:
    """What a completion says. error: None, or the first of missing:TAG, repeated:TAG, order, empty_slate, empty_rank,
    bad_rank. Spans are character offsets [start, end) of the text between the tags, None unless all four tags are there
    once and in order. rank_indices point into items_unique."""

    error: str | None = None
    items: list[str] = field(default_factory=list)
    items_unique: list[str] = field(default_factory=list)
    ranking: list[str] = field(default_factory=list)
    rank_indices: list[int] = field(default_factory=list)
    unknown: int = 0
    duplicate_ranks: int = 0
    slate_valid: bool = False
    slate_span: tuple[int, int] | None = None
    rank_span: tuple[int, int] | None = None

    @property
    def valid(self) -> bool:
        return self.error is None


MARK = re.compile(r"(?:[-*•]|\[\d+\]|#?\d+[.):])\s(.*)", re.S)  # bullet, [n], n. n) n:
NUMBER = re.compile(r"(?:[-*•]\s*)?(?:\[(\d+)\]|(\d+)[.)]?)")
QUOTES = {'"': '"', "'": "'", "“": "”"}


def identity(item: str) -> str:
    """Two spellings of one item have the same identity: white space collapsed, case folded."""
    return " ".join(item.split()).casefold()


def clean(entry: str) -> str:
    """An entry without bullets, numbers, bold marks and quotes; "" if nothing is left."""
    entry = " ".join(entry.split())
    while True:
        before = entry
        if m := MARK.match(entry):
            entry = m[1].strip()
        if len(entry) > 4 and entry.startswith("**") and entry.endswith("**"):
            entry = entry[2:-2].strip()
        if len(entry) > 1 and QUOTES.get(entry[0]) == entry[-1]:
            entry = entry[1:-1].strip()
        if entry == before:
            return entry if entry.strip("-*• ") else ""


def entries(section: str, arrows=False, known=()) -> list[str]:
    """Raw entries of a section: one per non-empty line, or, if it has one line only, split at commas (or at >).

    A single line that is a known item is not split: "Food, Inc. (2008)".
    """
    lines = [line for line in section.split("\n") if line.strip()]
    if len(lines) == 1 and identity(clean(lines[0])) not in known:
        lines = lines[0].split(">" if arrows and ">" in lines[0] else ",")
    return [line.strip() for line in lines if line.strip("-*• \t\r\n\f\v")]


def parse(text: str, tags: list[str], strict=False, known=()) -> Parsed:
    """Read a two-phase completion; never raises. tags: slate open, slate close, rank open, rank close (exact strings).

    strict: a ranking with an entry outside the slate, or one twice, is malformed (bad_rank); else the entry is skipped.
    known: identities of the pool's items.
    """
    out = Parsed()
    count = [text.count(t) for t in tags]
    at = [text.find(t) for t in tags]
    missing = next((f"missing:{t}" for t, n in zip(tags, count) if n == 0), None)
    repeated = next((f"repeated:{t}" for t, n in zip(tags, count) if n > 1), None)
    ordered = not missing and not repeated and at == sorted(at)
    out.error = missing or repeated or (None if ordered else "order")
    if count[:2] == [1, 1] and at[0] < at[1]:
        start, end = at[0] + len(tags[0]), at[1]
        if not any(t in text[start:end] for t in tags[2:]):
            out.items = [item for e in entries(text[start:end], known=known) if (item := clean(e))]
    out.slate_valid = bool(out.items)
    place: dict[str, int] = {}  # identity -> index into items_unique
    for item in out.items:
        if identity(item) not in place:
            place[identity(item)] = len(out.items_unique)
            out.items_unique.append(item)
    if not ordered:
        return out
    out.slate_span = (at[0] + len(tags[0]), at[1])
    out.rank_span = (at[2] + len(tags[2]), at[3])
    if not out.items:
        out.error = "empty_slate"
        return out
    raw = entries(text[slice(*out.rank_span)], arrows=True, known=known)
    numbers = [NUMBER.fullmatch(e) for e in raw]
    by_place = all(numbers)  # every entry a bare number: 1-based positions in the slate
    for e, number in zip(raw, numbers):
        if by_place:
            n = int((number[1] or number[2])[:9])  # int() refuses absurdly long digit strings
            found = place[identity(out.items[n - 1])] if 1 <= n <= len(out.items) else None
        elif not (e := clean(e)):
            continue
        else:
            found = place.get(identity(e))
        if found is None:
            out.unknown += 1
        elif found in out.rank_indices:
            out.duplicate_ranks += 1
        else:
            out.rank_indices.append(found)
    out.ranking = [out.items_unique[i] for i in out.rank_indices]
    if not out.ranking:
        out.error = "empty_rank"
    elif strict and (out.unknown or out.duplicate_ranks):
        out.error = "bad_rank"
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Tokens -> units


def token_bytes(tokenizer) -> list[bytes]:
    """The bytes that every id stands for; joined, they are the completion. End, start and padding tokens are b"".

    Byte-level BPE: through its byte alphabet, so that a token holding half a character, or half a tag, is placed
    exactly. SentencePiece: the word mark is a space, <0xNN> a byte. Others: what decoding the id adds after another.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    added = {i: t.content.encode() for i, t in tokenizer.added_tokens_decoder.items()}
    silent = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = str(backend.decoder.__getstate__()) if backend is not None and backend.decoder is not None else ""
    to_byte = {c: b for b, c in bytes_to_unicode().items()}
    anchor = tokenizer.encode("a", add_special_tokens=False)
    alone = len(tokenizer.decode(anchor))

    def of(i: int) -> bytes:
        token = tokenizer.convert_ids_to_tokens(i)
        if i in silent or token is None:
            return b""
        if i in added:
            return added[i]
        if "ByteLevel" in decoder:
            return bytes(to_byte[c] for c in token) if all(c in to_byte for c in token) else token.encode()
        if "ByteFallback" in decoder or "Metaspace" in decoder:
            code = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
            return bytes([int(code[1], 16)]) if code else token.replace("▁", " ").encode()
        if "Fuse" in decoder:
            return token.encode()
        return tokenizer.decode([*anchor, i])[alone:].encode()

    return [of(i) for i in range(max([len(tokenizer) - 1, *added]) + 1)]


def join(pieces: list[bytes]) -> str:
    """Pieces -> text; bytes that are not UTF-8 become lone surrogates, so that offsets map back exactly."""
    return b"".join(pieces).decode("utf-8", "surrogateescape")


def phase_units(pieces: list[bytes], text: str, spans: list[tuple[int, int] | None]) -> list[int]:
    """Unit of every token: u if it lies entirely inside spans[u - 1] (character offsets of text), else 0."""
    edges = [tuple(len(text[:i].encode("utf-8", "surrogateescape")) for i in s) for s in spans if s is not None]
    units, start = [], 0
    for piece in pieces:
        end = start + len(piece)
        inside = [u for u, (a, b) in enumerate(edges, 1) if piece and a <= start and end <= b]
        units.append(inside[0] if inside else 0)
        start = end
    return units


def halves(pieces: list[bytes], tags: list[str]) -> list[int]:
    """Unit of every token, delimiters and stop token included: 1 up to the end of the first slate close, then 2."""
    close, units, seen = tags[1].encode(), [], b""
    for piece in pieces:
        units.append(2 if close in seen else 1)
        seen += piece
    return units


def line_units(pieces: list[bytes]) -> list[int]:
    """Line of every token, from 0: a token belongs to the line open where it starts; its own line feeds count after it."""
    units, line = [], 0
    for piece in pieces:
        units.append(line)
        line += piece.count(b"\n")
    return units


# ---------------------------------------------------------------------------------------------------------------------
# Items -> numbers


def slate_scores(slate: list, utility: dict) -> dict[str, float]:
    """Order-free scores of a slate; repeated items count once (2605.12995, R_slate). utility: item -> number, relevant > 0.

    recall = hits / |G|; precision over distinct items (f1) or over the slate with repeats (f1_raw); utility: sum over
    distinct items / sum of the positive utilities. Empty denominators give 0.
    """
    distinct = set(slate)
    gold = {i for i, u in utility.items() if u > 0}
    hits = len(distinct & gold)
    total = sum(utility.get(i, 0.0) for i in distinct)

    def ratio(a: float, b: float) -> float:
        return a / b if b else 0.0

    recall, precision, raw = ratio(hits, len(gold)), ratio(hits, len(distinct)), ratio(hits, len(slate))
    return {
        "hits": hits, "recall": recall, "precision": precision, "precision_raw": raw,
        "f1": ratio(2 * hits, len(distinct) + len(gold)), "f1_raw": ratio(2 * raw * recall, raw + recall),
        "sum_utility": total, "utility": ratio(total, sum(utility[i] for i in gold)),
    }  # fmt: skip


GAINS = {"binary": lambda u: 1.0, "linear": float, "exp": lambda u: 2.0**u - 1.0}


def dcg(ranked: list, relevance: dict, k: int, gain="binary") -> float:
    """Discounted cumulative gain: sum over i <= k of gain_i / log2(i + 1); a repeated item gains once."""
    seen, total = set(), 0.0
    for i, item in enumerate(ranked[:k], 1):
        if relevance.get(item, 0) > 0 and item not in seen:
            total += GAINS[gain](relevance[item]) / math.log2(i + 1)
        seen.add(item)
    return total


def ndcg(ranked: list, relevance: dict, k: int, gain="binary") -> float:
    """DCG / ideal DCG, the ideal over min(k, relevant items) places whatever the length of the list; 0 without gold."""
    ideal = dcg(sorted((i for i in relevance if relevance[i] > 0), key=relevance.get, reverse=True), relevance, k, gain)
    return dcg(ranked, relevance, k, gain) / ideal if ideal else 0.0


# ---------------------------------------------------------------------------------------------------------------------
# Completions -> Scored


@dataclass
class Scored:
    """One parse of every completion.

    unit_ids (B,T) int64: 0 = not trained; sequence: 1 on all sampled tokens; phase: slate 1, ranking 2, delimiters 0
    reward (B,U) float64; valid (B,U) bool, False = cannot be scored (NaN reward)
    parts: columns to log, B numbers each; texts and answers (slate, ranking): B each
    """

    unit_ids: Tensor
    reward: Tensor
    valid: Tensor
    parts: dict[str, list[float]]
    texts: list[str]
    answers: list[tuple[list[str], list[str]]]


def resolve(items: list[str], example, names: dict[str, str], form: str) -> list[str]:
    """Named items -> candidates: by title, or #n by place in the pool; unknown ones stay as they are written."""
    out = []
    for item in items:
        n = int(item[1:7]) if form == "index" and re.fullmatch(r"#\d+", item) else 0
        out.append(example.candidates[n - 1] if 1 <= n <= len(example.candidates) else names.get(identity(item), item))
    return out


def read(parsed: Parsed, example, names: dict[str, str], cfg) -> tuple[list[str], list[str]]:
    """Slate (repeats kept) and final ranking as candidates; both empty where the completion is malformed.

    Only the first slate_size entries are the slate and the first rank_size entries that name one of them the ranking:
    recall would otherwise be earned by writing on (with its own reward, a slate phase soon learns to).
    """
    if not parsed.valid:
        return [], []
    slate, ranking = (resolve(x, example, names, cfg.item_form) for x in (parsed.items, parsed.ranking))
    slate = slate[: cfg.slate_size]
    ranking = [i for i in ranking if i in slate]
    if cfg.append_unranked:
        ranking += [i for i in dict.fromkeys(slate) if i not in ranking]
    return slate, ranking[: cfg.rank_size]


def names_of(examples: list) -> dict[int, dict[str, str]]:
    """identity -> candidate for each example's pool; a pool shared by many examples is indexed once. By id(candidates).

    Also what the parser makes of a title that looks like a list entry: "2001: A Space Odyssey" loses its "number".
    """
    pools = {id(e.candidates): e.candidates for e in examples}
    return {k: {identity(clean(c)): c for c in pool} | {identity(c): c for c in pool} for k, pool in pools.items()}


def rewards_of(slate: list[str], ranking: list[str], gold: dict[str, float], cfg) -> tuple[float, float]:
    """(R_slate, R_rank) of a well-formed answer; NaN where there is no gold to find."""
    if not gold:
        return math.nan, math.nan
    ideal = gold if cfg.ndcg_ideal == "gold" else {i: u for i, u in gold.items() if i in slate}
    return slate_scores(slate, gold)[cfg.slate_reward], ndcg(ranking, ideal, cfg.ndcg_k, cfg.ndcg_gain)


def units_of(parsed: Parsed, pieces: list[bytes], text: str, cfg, unit: str) -> list[int]:
    """Unit of every token of a completion, by the unit of the method and the switches of the configuration."""
    if not parsed.valid and cfg.format_scope == "none":
        return [0] * len(pieces)
    if unit == "sequence":
        return [1] * len(pieces)
    if cfg.train_delimiters or not parsed.valid:
        return halves(pieces, cfg.tags)
    return phase_units(pieces, text, [parsed.slate_span, parsed.rank_span])


def score(roll, examples: list, pieces: list[bytes], cfg, unit: str) -> Scored:
    """Parse and score every completion of a rollout; examples[roll.group[b]] is the request of row b.

    sequence: R_joint = R_slate + lambda R_rank on all sampled tokens (GRPO). phase: R_slate on slate tokens, R_rank on
    ranking tokens (F-GRPO). A malformed completion gets format_penalty in place of both rewards, on all of its tokens
    (format_scope). Forced tokens (prefix) are read, never trained (F18).
    """
    names = names_of(examples)
    prefix = [cfg.prefix.encode()] if cfg.prefix else []
    unit_ids, rewards, texts, answers = torch.zeros_like(roll.tokens), [], [], []
    parts: dict[str, list[float]] = {}
    group, mask = roll.group.tolist(), roll.mask.cpu()
    for b, row in enumerate(roll.tokens.cpu()):
        example = examples[group[b]]
        known = names[id(example.candidates)]
        said = prefix + [pieces[t] if t < len(pieces) else b"" for t in row[mask[b]].tolist()]
        text = join(said)
        parsed = parse(text, cfg.tags, cfg.strict_rank, known)
        slate, ranking = read(parsed, example, known, cfg)
        r_slate, r_rank = rewards_of(slate, ranking, example.gold, cfg) if parsed.valid else (cfg.format_penalty,) * 2
        joint = r_slate + cfg.lam * r_rank
        units = units_of(parsed, said, text, cfg, unit)[len(prefix) :]
        unit_ids[b, : len(units)] = torch.tensor(units, dtype=torch.long)
        rewards.append([joint] if unit == "sequence" else [r_slate, r_rank])
        texts.append(text)
        answers.append((slate, ranking))
        scores = slate_scores(slate, example.gold)
        for key, value in {
            "reward": 0.0 if math.isnan(joint) else joint, "unscorable": float(math.isnan(joint)),
            "slate_recall": scores["recall"], "slate_precision": scores["precision"],
            "rank_ndcg": ndcg(ranking, example.gold, cfg.ndcg_k, cfg.ndcg_gain), "invalid": float(not parsed.valid),
            "duplicates": 1 - len(set(slate)) / len(slate) if slate else 0.0,
            "out_of_pool": sum(identity(i) not in known for i in slate) / max(1, len(slate)),
            "length": float(len(units)), "finished": float(roll.finished[b]),
        }.items():  # fmt: skip
            parts.setdefault(key, []).append(value)
    reward = torch.tensor(rewards, dtype=torch.float64, device=roll.tokens.device)
    return Scored(unit_ids, reward, ~reward.isnan(), parts, texts, answers)


def demonstrated(roll) -> Scored:
    """Demonstrations: one unit per row, reward 1, every token (the stop token too) trained."""
    ones = torch.ones(len(roll.group), 1, dtype=torch.float64, device=roll.tokens.device)
    return Scored(roll.mask.long(), ones, ones.bool(), {"length": roll.mask.sum(1).double().tolist()}, [], [])
