"""Completion -> items, scores and unit_ids, by one parser per form of answer; and the reward functions.

    <SLATE>           A completion has two phases: a slate, whose order does not matter, and a ranking of it.
    Heat (1995)       The parser reads the text once: its spans say which tokens belong to which phase, its items say
    Alien (1979)      what they earn. So masks and rewards cannot disagree (faults.md section 11, item 1).
    </SLATE>
    <RANK>
    Alien (1979)
    Heat (1995)
    </RANK>

More phases are more pairs of tags (--phases, --tags). The other form is a list: an item a line, best first, no tags; there
line k is a unit (Rank-GRPO, arXiv 2510.20150; ReMaRk, arXiv 2610.17771). Answers to problems are text, one unit, and
verify.py says whether they are right.

Left out: models, tensors beyond unit_ids. Sources: factorized GRPO, arXiv 2605.12995 (the original tags and syntax are not
published: the syntax here is ours).
"""

import functools
import math
import re
from collections import Counter
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import verify
import workers
from config import COLUMNS, COLUMNS_OF, answer_of, fail

PHASES = {  # name -> reward of the phase, from R_slate, R_rank and lambda
    "slate": lambda slate, rank, lam: slate,
    "rank": lambda slate, rank, lam: rank,
    "plan": lambda slate, rank, lam: slate + lam * rank,  # free text, credited with what it leads to
}

# ---------------------------------------------------------------------------------------------------------------------
# Text -> items


@dataclass
class Parsed:
    """What a completion says. error: None, or the first of missing:TAG, repeated:TAG, order, empty_slate, empty_rank,
    bad_rank. Spans are character offsets [start, end) of the text between the tags, None unless all tags are there once
    and in order; spans: of every phase, in order. rank_indices point into items_unique. broken: the phases (from 0) that
    are to blame for an error."""

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
    spans: list[tuple[int, int] | None] = field(default_factory=list)
    broken: set[int] = field(default_factory=set)

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


def parse(text: str, tags: list[str], strict=False, known=(), phases=("slate", "rank")) -> Parsed:
    """Read a completion of phases; never raises. tags: open and close of each phase, in order (exact strings).

    strict: a ranking with an entry outside the slate, or one twice, is malformed (bad_rank); else the entry is skipped.
    known: identities of the pool's items. phases: what the pairs of tags hold (rows of PHASES).
    """
    out = Parsed()
    count = [text.count(t) for t in tags]
    at = [text.find(t) for t in tags]
    missing = next((f"missing:{t}" for t, n in zip(tags, count) if n == 0), None)
    repeated = next((f"repeated:{t}" for t, n in zip(tags, count) if n > 1), None)
    ordered = not missing and not repeated and at == sorted(at)
    out.error = missing or repeated or (None if ordered else "order")
    own: list[tuple[int, int] | None] = []  # text between a phase's tags, if these two are there once and hold no other
    for u in range(len(phases)):
        start, end = at[2 * u] + len(tags[2 * u]), at[2 * u + 1]
        alone = count[2 * u : 2 * u + 2] == [1, 1] and at[2 * u] < end
        own.append((start, end) if alone and not any(t in text[start:end] for t in tags) else None)
        if own[u] is None or any(at[2 * u] < close for close in at[1 : 2 * u : 2]):
            out.broken.add(u)
    s, r = phases.index("slate"), phases.index("rank")
    if own[s]:
        out.items = [item for e in entries(text[slice(*own[s])], known=known) if (item := clean(e))]
    out.slate_valid = bool(out.items)
    place: dict[str, int] = {}  # identity -> index into items_unique
    for item in out.items:
        if identity(item) not in place:
            place[identity(item)] = len(out.items_unique)
            out.items_unique.append(item)
    out.spans = own if ordered else [None] * len(phases)
    out.slate_span, out.rank_span = out.spans[s], out.spans[r]
    if not out.items:
        out.error = out.error or "empty_slate"
        out.broken |= {s, r}
    if not out.items or not own[r] or own[r] < own[s]:
        return out
    raw = entries(text[slice(*own[r])], arrows=True, known=known)
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
    wrong = "empty_rank" if not out.ranking else "bad_rank" if strict and (out.unknown or out.duplicate_ranks) else None
    if wrong:
        out.error = out.error or wrong
        out.broken.add(r)
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
    """Unit of every token, delimiters and stop token included: the first phase whose close tag has not been seen yet, or
    the last. Two phases: 1 up to the end of the first slate close, then 2."""
    closes, unit, units, seen = [t.encode() for t in tags[1::2]], 1, [], b""
    for piece in pieces:
        while unit < len(closes) and closes[unit - 1] in seen:
            unit += 1
        units.append(unit)
        seen += piece
    return units


def line_units(pieces: list[bytes]) -> list[int]:
    """Line of every token, from 0: a token belongs to the line open where it starts; its own line feeds count after it.

    The rule of the released Rank-GRPO code, for comparison. rank_units below is the one in use.
    """
    units, line = [], 0
    for piece in pieces:
        units.append(line)
        line += piece.count(b"\n")
    return units


def rank_units(pieces: list[bytes], n: int) -> tuple[list[int], list[str]]:
    """List of up to n ranks -> unit of every token (1..n, n + 1 for all behind rank n) and the lines, one per rank.

    Non-empty lines take ranks in order; a blank line belongs to the line before (the first, if there is none); a token
    belongs to the line open where it starts; a line break belongs to the line it ends (ReMaRk). So the stop token behind
    the line break of rank n belongs to rank n. The released code makes it an empty line n + 1, an overflow, and takes
    n - 1 lines with a line break for n (rank_grpo.md, D10 and D11).
    """
    raw = b"".join(pieces).split(b"\n")
    lines, ranks, ends, end = [], [], [], 0
    for line in raw:
        if (text := join([line])).strip():
            lines.append(text)
        ranks.append(min(max(len(lines), 1), n + 1))
        end += len(line) + 1
        ends.append(end)
    units, start, i = [], 0, 0
    for piece in pieces:
        while start >= ends[i]:
            i += 1
        units.append(ranks[i])
        start += len(piece)
    return units, lines


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


def debiased(gold: dict[str, float], popularity: dict[str, int], power: float) -> dict[str, float]:
    """Utilities times (training count + 1)^-power, rescaled so that their sum stays (inverse propensity)."""
    worth = {i: u * (popularity.get(i, 0) + 1) ** -power for i, u in gold.items()}
    scale = sum(gold.values()) / sum(worth.values())
    return {i: w * scale for i, w in worth.items()}


def head_items(popularity: dict[str, int]) -> set[str]:
    """The most popular items that together make up half of all training counts; the others are the tail."""
    head, left = set(), sum(popularity.values()) / 2
    for item in sorted(popularity, key=popularity.get, reverse=True):
        if left <= 0:
            break
        head.add(item)
        left -= popularity[item]
    return head


def beyond_quota(slate: list[str], head: set[str], size: int, quota: float) -> set[str]:
    """Head items of the slate behind the first size * (1 - quota) of them: these places are reserved for the tail."""
    popular = [i for i in dict.fromkeys(slate) if i in head]
    return set(popular[math.floor(size * (1 - quota) + 1e-9) :])


def overlong(length: int, max_length: int, cache: int) -> float:
    """Soft punishment of length (DAPO, 2503.14476, Eq. 13): 0 up to max_length - cache, then linear to -1 at max_length."""
    free = max_length - cache
    return 0.0 if length <= free else -1.0 if length >= max_length else (free - length) / cache


# ---------------------------------------------------------------------------------------------------------------------
# Lists of titles


LEAD = re.compile(r"\d+\s*[.)、\-—–]\s+")


def bare(text: str) -> str:
    """Text without list marks, bold marks, a leading number with its sign, and one pair of quotes around the whole."""
    before, text = None, " ".join(text.split())
    while text != before:
        before, text = text, text.strip("*_-# ")
        if m := LEAD.match(text):
            text = text[m.end() :]
    return text[1:-1].strip() if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


@functools.lru_cache(100_000)
def parse_line(line: str) -> tuple[str, int] | None:
    """'3. **Heat** (1995), great' -> ("Heat", 1995); None without a title and four digits in parentheses behind it.

    The rules of the released Rank-GRPO code (golden/title_match); they lose parts of some titles: '(500) Days'.
    """
    if not (m := re.match(r"(.+?)\s\(([0-9]{4})\)", bare(line))):
        return None
    before, title = None, m[1]
    while title != before:
        before, title = title, bare(re.sub(r"\([^()]*\)", "", title))
    return (title, int(m[2])) if title else None


def whole(year) -> int | None:
    """A year that is an integer, or one written as text; None for anything else."""
    if isinstance(year, str) and re.fullmatch(r"\s*-?\d+\s*", year):
        return int(year)
    return year if isinstance(year, int) else None


def match(items: list, gold: list, catalog=None, seen=(), tolerance=2) -> list[int]:
    """Hit (0/1) of every item of a list against ground truth; both hold (title, year), None for an unparsable line.

    A hit: the pair is literally in catalog (None: any is), its title not literally in seen, and a gold entry not claimed
    yet has the same title (case and white space folded) and a year at most tolerance away. Claims go in list order and
    prefer the gold year 0, +1, -1, +2, -2, ... away. For hits without gaps, leave out the None first.
    """
    left = Counter((identity(title), whole(year)) for title, year in gold)
    away = sorted(range(-tolerance, tolerance + 1), key=lambda d: (abs(d), -d))
    hits = []
    for item in items:
        admitted = item is not None and (catalog is None or item in catalog) and item[0] not in seen
        keys = ((identity(item[0]), item[1] + d) for d in away) if admitted else ()
        claimed = next((key for key in keys if left[key] > 0), None)
        left[claimed] -= claimed is not None
        hits.append(int(claimed is not None))
    return hits


def eligible(items: list, catalog, seen=()) -> list[int]:
    """e_k of every position (ReMaRk): not None, in the catalog, not seen, and no repeat of an earlier position."""
    return [int(x is not None and x in catalog and x not in seen and x not in items[:k]) for k, x in enumerate(items)]


def drawn(items: list, responders: list, tolerance=2) -> list[list[int]]:
    """Hits per responder and position, n lists of N: has responder r named the item at k? None at k: 0.

    Items and responders' items are names; those of the form "title (year)" match as such, others if they are identical.
    """
    pair = [x and (parse_line(x) or (x, 0)) for x in items]
    return [match(pair, [parse_line(i) or (i, 0) for i in named], tolerance=tolerance) for named in responders]


def consensus(c: int, n: int, a: float) -> float:
    """Worth of an item that c of n responders named: (c/n)^a, 0 for c = 0. a = 0: union (ReMaRk), a = 1: mean."""
    return (c / n) ** a if c else 0.0


def causal_returns(rel: list[float], n: int, kind: str, gamma=math.inf) -> list[float]:
    """Return of every rank 1..n over the relevance from there on (Rank-GRPO, Eq. 8 and 9); beyond rel it is 0.

    log: sum over j >= k of rel_j / log2(j + 1), the first is DCG@n. exp: sum of rel_j / gamma^(j - k), inf: rel_k.
    """
    returns, after = [], 0.0
    for k in range(n, 0, -1):
        here = float(rel[k - 1]) if k <= len(rel) else 0.0
        after = after + here / math.log2(k + 1) if kind == "log" else here + after / gamma
        returns.append(after)
    return returns[::-1]


# ---------------------------------------------------------------------------------------------------------------------
# Completions -> Scored


@dataclass
class Scored:
    """One parse of every completion.

    unit_ids (B,T) int64: 0 = not trained; sequence: 1 on all sampled tokens; phase: unit u = phase u, delimiters 0; rank:
    unit k = line k of the list, N + 1 what comes behind line N
    reward (B,U) float64; valid (B,U) bool, False = cannot be scored (NaN reward)
    parts: columns to log, B numbers each; texts: B
    answers: B pairs, (slate, ranking); of a list: (items read, the N ranks with None where a rank cannot be a hit); of text:
    two empty lists
    high: the largest reward of each unit, U numbers (1 for the rank N + 1, which earns nothing)
    """

    unit_ids: Tensor
    reward: Tensor
    valid: Tensor
    parts: dict[str, list[float]]
    texts: list[str]
    answers: list[tuple[list[str], list[str]]]
    high: list[float] = field(default_factory=list)


def resolve(items: list[str], example, names: dict[str, str], form: str) -> list[str]:
    """Named items -> candidates: by title, or #n by place in the pool; unknown ones stay as they are written."""
    out = []
    for item in items:
        n = int(item[1:7]) if form == "index" and re.fullmatch(r"#\d+", item) else 0
        out.append(example.candidates[n - 1] if 1 <= n <= len(example.candidates) else names.get(identity(item), item))
    return out


def read(parsed: Parsed, example, names: dict[str, str], cfg) -> tuple[list[str], list[str]]:
    """Slate (repeats kept) and final ranking as candidates, whatever could be read of them.

    Only the first slate_size entries are the slate and the first rank_size entries that name one of them the ranking:
    recall would otherwise be earned by writing on (with its own reward, a slate phase soon learns to).
    """
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


def rewards_of(slate, ranking, gold: dict[str, float], cfg, popularity=None, head=frozenset()) -> tuple[float, float]:
    """(R_slate, R_rank) of a well-formed answer; NaN where there is no gold to find.

    popularity: training counts, for popularity_power; head: the popular items, for tail_quota.
    """
    if not gold:
        return math.nan, math.nan
    worth, kind, gain = gold, cfg.slate_reward, cfg.ndcg_gain
    if cfg.popularity_power:
        worth, kind, gain = debiased(gold, popularity or {}, cfg.popularity_power), "utility", "linear"
    ideal = worth if cfg.ndcg_ideal == "gold" else {i: u for i, u in worth.items() if i in slate}
    lost = beyond_quota(slate, head, cfg.slate_size, cfg.tail_quota) if head else ()
    slate, ranking = ([("lost", i) if i in lost else i for i in x] for x in (slate, ranking))  # they keep their places
    return slate_scores(slate, worth)[kind], ndcg(ranking, ideal, cfg.ndcg_k, gain)


def units_of(parsed: Parsed, pieces: list[bytes], text: str, cfg, unit: str) -> list[int]:
    """Unit of every token of a completion of phases, by the unit of the method and the switches of the configuration."""
    if not parsed.valid and cfg.format_scope == "none":
        return [0] * len(pieces)
    if unit != "phase":
        return [1] * len(pieces)
    if cfg.train_delimiters or not parsed.valid:
        return halves(pieces, cfg.tags)
    return phase_units(pieces, text, parsed.spans)


@dataclass
class Row:
    """A completion scored: units of its tokens, a reward per unit, the columns to log, the answer."""

    units: list[int]
    reward: list[float]
    parts: dict[str, float]
    answer: tuple[list, list]


def score_phases(
    said: list[bytes], example, known: dict[str, str], cfg, unit: str, popularity=None, head=frozenset()
) -> Row:
    """A completion of phases. Malformed: the penalty in place of every reward; under format_credit partial only in place
    of those of the phases that broke."""
    text = join(said)
    parsed = parse(text, cfg.tags, cfg.strict_rank, known, cfg.phases)
    slate, ranking = read(parsed, example, known, cfg)
    to_blame = parsed.broken if cfg.format_credit == "partial" else set(range(len(cfg.phases)))
    failed = set() if parsed.valid else to_blame
    both = rewards_of(slate, ranking, example.gold, cfg, popularity, head)
    places = [cfg.phases.index(name) for name in ("slate", "rank")]
    r_slate, r_rank = (cfg.format_penalty if u in failed else r for u, r in zip(places, both))
    joint = r_slate + cfg.lam * r_rank
    earned = [PHASES[name](r_slate, r_rank, cfg.lam) for name in cfg.phases]
    reward = [cfg.format_penalty if u in failed else r for u, r in enumerate(earned)]
    if failed and not failed & set(places):
        joint += cfg.format_penalty  # or a sequence could leave its plan out for nothing
    if not parsed.valid:
        slate, ranking = [], []  # metrics give no partial credit
    scores = slate_scores(slate, example.gold)
    parts = {
        "reward": joint, "slate_recall": scores["recall"], "slate_precision": scores["precision"],
        "rank_ndcg": ndcg(ranking, example.gold, cfg.ndcg_k, cfg.ndcg_gain), "invalid": float(not parsed.valid),
        "duplicates": 1 - len(set(slate)) / len(slate) if slate else 0.0,
        "out_of_pool": sum(identity(i) not in known for i in slate) / max(1, len(slate)),
    }  # fmt: skip
    reward = reward if unit == "phase" else [joint]
    return Row(units_of(parsed, said, text, cfg, unit), reward, parts, (slate, ranking))


@dataclass
class Catalog:
    """Items that a list may name. dated: all are of the form "title (year)", then lines are read as such (parse_line), else
    by identity. index: what is read from a line -> item."""

    items: set[str]
    dated: bool
    index: dict


def catalogs_of(examples: list) -> dict[int, Catalog]:
    """The catalog of each example's pool; a pool shared by many examples is read once. By id(candidates)."""
    out = {}
    for k, e in {id(e.candidates): e for e in examples}.items():
        pairs = {parse_line(c): c for c in e.candidates}
        dated = None not in pairs
        out[k] = Catalog(set(e.candidates), dated, pairs if dated else names_of([e])[k])
    return out


def named(line: str, example, catalog: Catalog, form: str) -> str | None:
    """The item of a line; as it is written if it is not in the catalog, None if the line holds none."""
    if catalog.dated:
        pair = parse_line(line)
        return pair and catalog.index.get(pair, f"{pair[0]} ({pair[1]})")
    text = clean(line)
    return resolve([text], example, catalog.index, form)[0] if text else None


def title_of(item: str) -> str:
    return (parse_line(item) or (item,))[0]


def score_list(said: list[bytes], example, catalog: Catalog, cfg, unit: str) -> Row:
    """A completion that is a list of N = slate_size ranks. rank: the return of each, 0 where there is no line and behind
    rank N. sequence: DCG@N (returns log) or the sum of what the ranks are worth (exp), on every token."""
    n = cfg.slate_size
    units, lines = rank_units(said, n)
    items = [named(line, example, catalog, cfg.item_form) for line in lines[:n]]
    passed = set(map(title_of, example.seen))
    fit = eligible(items, catalog.items, {i for i in items if i and title_of(i) in passed})
    ranks = [i if e else None for i, e in zip(items, fit)] + [None] * (n - len(items))
    responders = example.responders or [example.gold]
    count = [sum(hits) for hits in zip(*drawn(ranks, responders, cfg.year_tolerance))]
    rel = [consensus(c, len(responders), cfg.consensus) for c in count]
    returns = causal_returns(rel, n, cfg.returns, cfg.returns_gamma)
    total = returns[0] if cfg.returns == "log" else sum(rel)
    if not any(responders):  # nobody named anything: cannot be scored (F51)
        total, returns = math.nan, [math.nan] * n
    union, read = [float(c > 0) for c in count], [i for i in items if i is not None]
    parts = {
        "reward": total, "hits": sum(union), "recall": sum(union) / max(1, len(set().union(*responders))),
        "dcg": causal_returns(union, n, "log")[0], "invalid": float(not read),
        "unparsable": 1 - len(read) / len(items) if items else 0.0,
        "out_of_catalog": sum(i not in catalog.items for i in read) / max(1, len(read)),
        "duplicates": 1 - len(set(read)) / len(read) if read else 0.0, "lines": float(len(lines)),
    }  # fmt: skip
    if unit == "rank":
        return Row(units, [*returns, 0.0 if any(responders) else math.nan], parts, (read, ranks))
    return Row([1] * len(units), [total], parts, (read, ranks))


def score_text(said: list[bytes], example, cfg) -> Row:
    """A completion that answers a problem: one unit, the reward of the problem's verifier. correct: the whole reward of 1;
    exact: the verifier's stricter test, where it has one."""
    text = b"".join(said).decode("utf-8", "replace")  # half a character is none, and packages may choke on it
    found = verify.VERIFIERS[example.check](text, example.answer)
    correct = float(found["reward"] >= 1)
    return Row([1] * len(said), [found["reward"]], {"exact": correct, **found, "correct": correct}, ([], []))


def highest(cfg, unit: str, form: str) -> list[float]:
    """Largest reward of each unit, U numbers."""
    if form == "text":
        return [1.0]
    if form == "phases":
        return [PHASES[name](1.0, 1.0, cfg.lam) for name in cfg.phases] if unit == "phase" else [1.0 + cfg.lam]
    returns = causal_returns([1.0] * cfg.slate_size, cfg.slate_size, cfg.returns, cfg.returns_gamma)
    total = returns[0] if cfg.returns == "log" else float(cfg.slate_size)
    return [*returns, 1.0] if unit == "rank" else [total]


def number(x, what: str) -> float:
    """x as a float, NaN where it is None (cannot be scored); an error for text, for what is no single number, and for inf."""
    if isinstance(x, str | bytes | bytearray):
        raise TypeError(f"{what} is {x!r:.60}, not a number")
    value = math.nan if x is None else float(x)
    if math.isinf(value):
        raise ValueError(f"{what} is {value}")
    return value


def checked(row: Row, tokens: int, units: int) -> Row:
    """What a scorer returned, with plain numbers: units of that many tokens, that many rewards. Users edit scorers."""
    ids, reward = [int(u) for u in row.units], [number(r, "a reward") for r in row.reward]
    if len(ids) != tokens or not all(0 <= u <= units for u in ids):
        raise ValueError(f"{len(ids)} units for {tokens} tokens, or one outside 0..{units}")
    if len(reward) != units:
        raise ValueError(f"{len(reward)} rewards for {units} units")
    parts = {k: number(v, f"column {k}") for k, v in row.parts.items()}
    if any(math.isnan(v) for k, v in parts.items() if k != "reward"):
        raise ValueError(f"a column is NaN: {parts}")
    slate, ranking = row.answer
    return Row(ids, reward, parts, (list(slate), list(ranking)))


def lost(tokens: int, units: int, listed: bool, cfg) -> Row:
    """In the place of a row whose reward could not be had: nothing is trained, nothing compared with it."""
    answer = ([], [None] * cfg.slate_size if listed else [])
    return Row([0] * tokens, [math.nan] * units, {"reward": math.nan}, answer)


def score(
    roll, examples: list, pieces: list[bytes], cfg, unit: str, *, popularity: dict[str, int] | None = None
) -> Scored:
    """Parse and score every completion of a rollout; examples[roll.group[b]] is the request of row b.

    sequence: one reward on all sampled tokens (GRPO): R_joint = R_slate + lambda R_rank, or that of the list or of the text;
    token: the same (a critic spreads it). phase: R_slate on slate tokens, R_rank on ranking tokens (F-GRPO). rank: a return for each
    line of a list (Rank-GRPO). A malformed completion of phases gets format_penalty, on all of its tokens (format_scope).
    With overlong the punishment of length is added to every unit. Forced tokens (prefix) are read, never trained
    (F18). popularity: training counts of items (Split.popularity), for popularity_power and tail_quota.

    A row whose scorer raises, dies, hangs (reward_workers) or returns no numbers is unscorable and counted in the part
    reward_errors; more than max_reward_errors of the rows end the run with the first error (F52).
    """
    form = "list" if unit == "rank" else answer_of(cfg)
    listed = form == "list"
    pools = catalogs_of(examples) if listed else names_of(examples)
    head = head_items(popularity) if popularity and cfg.tail_quota else frozenset()
    prefix, high = [cfg.prefix.encode()] if cfg.prefix else [], highest(cfg, unit, form)
    asked = [examples[g] for g in roll.group.tolist()]
    mask, tokens = roll.mask.cpu(), roll.tokens.cpu()
    said = [[*prefix, *(pieces[t] if 0 <= t < len(pieces) else b"" for t in row[real].tolist())]
            for row, real in zip(tokens, mask)]  # fmt: skip

    def one(b: int) -> Row:
        pool = pools[id(asked[b].candidates)]
        if form == "text":
            row = score_text(said[b], asked[b], cfg)
        elif listed:
            row = score_list(said[b], asked[b], pool, cfg, unit)
        else:
            row = score_phases(said[b], asked[b], pool, cfg, unit, popularity, head)
        return checked(row, len(said[b]), len(high))

    most = cfg.max_reward_errors * max(len(said), 4)  # one failure alone, as of a last example, is no share
    processes = cfg.reward_workers or (
        verify.WORKERS if form == "text" and any(e.check in verify.SLOW for e in examples) else 0
    )
    found = workers.run(one, [(b,) for b in range(len(said))], processes, cfg.reward_timeout, most)
    errors = [(row, example) for row, example in zip(found, asked) if isinstance(row, workers.Failure)]
    if len(errors) > most:
        first, example = errors[0]
        fail(f"rewards: {len(errors)} or more of {len(said)} completions cannot be scored (--max_reward_errors "
             f"{cfg.max_reward_errors:g}); the first: {first.what} (example {example.id}{first.where and ', '}{first.where})")  # fmt: skip

    unit_ids, rewards, rows = torch.zeros_like(roll.tokens), [], []
    # the same in every call and on every rank, whatever failed there
    own = f"{COLUMNS_OF[form]} {COLUMNS} reward_errors".split()
    own += [c for check in {e.check for e in examples if form == "text"} for c in verify.MORE.get(check, [])]
    columns = list(dict.fromkeys([*own, *(c for row in found if isinstance(row, Row) for c in row.parts)]))
    for b, row in enumerate(found):
        failed = isinstance(row, workers.Failure)
        row = lost(len(said[b]), len(high), listed, cfg) if failed else row
        units = row.units[len(prefix) :]
        unit_ids[b, : len(units)] = torch.tensor(units, dtype=torch.long)
        late = (
            overlong(len(units), cfg.max_new_tokens, max(1, round(cfg.overlong * cfg.max_new_tokens)))
            if cfg.overlong
            else 0.0
        )
        rewards.append([r + late for r in row.reward])
        total = row.parts["reward"] + late
        scorable = not math.isnan(total)
        row.parts["reward"] = total if scorable else 0.0
        row.parts |= {
            "overlong": late, "unscorable": float(not scorable), "efficiency": row.parts["reward"] / max(1, len(units)),
            "length": float(len(units)), "finished": float(roll.finished[b]), "reward_errors": float(failed),
        }  # fmt: skip
        rows.append(row)
    reward = torch.tensor(rewards, dtype=torch.float64, device=roll.tokens.device).reshape(len(rows), len(high))
    parts = {c: [row.parts.get(c, 0.0) for row in rows] for c in columns}
    texts, answers = [join(x) for x in said], [row.answer for row in rows]
    return Scored(unit_ids, reward, ~reward.isnan(), parts, texts, answers, high)


def demonstrated(roll, pieces: list[bytes] | None = None, cfg=None, unit="sequence") -> Scored:
    """Demonstrations: reward 1, every token (the stop token too) trained. One unit per row; phase: the phases, each with
    its delimiters; rank: the lines."""
    unit_ids, units = roll.mask.long(), 1
    if unit in ("phase", "rank"):
        units = len(cfg.phases) if unit == "phase" else cfg.slate_size + 1
        for b, tokens in enumerate(roll.tokens.cpu()):
            said = [pieces[t] for t in tokens[roll.mask[b].cpu()].tolist()]
            ids = halves(said, cfg.tags) if unit == "phase" else rank_units(said, cfg.slate_size)[0]
            unit_ids[b, : len(ids)] = torch.tensor(ids, dtype=torch.long)
    ones = torch.ones(len(roll.group), units, dtype=torch.float64, device=roll.tokens.device)
    return Scored(unit_ids, ones, ones.bool(), {"length": roll.mask.sum(1).double().tolist()}, [], [], [1.0] * units)


def contrasted(roll, scored: Scored, joint: Tensor, positives: int, negatives: int) -> Scored:
    """The best `positives` and the worst `negatives` samples of each group by joint reward (B,) as good (reward 1) and bad
    (0) answers; the others, and groups whose best is no better than their worst, are left out."""
    valid = torch.zeros(len(joint), 1, dtype=torch.bool, device=joint.device)
    reward = torch.zeros(len(joint), 1, dtype=torch.float64, device=joint.device)
    for g in roll.group.unique():
        rows = (roll.group == g).nonzero()[:, 0]
        rows = rows[torch.argsort(-joint[rows], stable=True)]
        good, bad = rows[:positives], rows[positives:][-negatives:]
        if len(bad) and joint[good].min() > joint[bad].max():
            valid[good], valid[bad], reward[good] = True, True, 1.0
    return replace(scored, unit_ids=roll.mask.long(), reward=reward, valid=valid, high=[1.0])


def pick(scored: Scored, rows: Tensor) -> Scored:
    """The rows (a mask (B,), or their numbers) of scores."""
    at = torch.arange(len(scored.texts))[rows.cpu()].tolist()
    parts = {k: [v[i] for i in at] for k, v in scored.parts.items()}
    return replace(scored, unit_ids=scored.unit_ids[rows], reward=scored.reward[rows], valid=scored.valid[rows], parts=parts,
                   texts=[scored.texts[i] for i in at], answers=[scored.answers[i] for i in at])  # fmt: skip


def concat(a: Scored, b: Scored) -> Scored:
    """Scores of two rollouts joined by rollout.join."""
    width = max(a.unit_ids.shape[1], b.unit_ids.shape[1])
    ids = [torch.nn.functional.pad(x.unit_ids, (0, width - x.unit_ids.shape[1])) for x in (a, b)]
    return replace(a, unit_ids=torch.cat(ids), reward=torch.cat([a.reward, b.reward]), valid=torch.cat([a.valid, b.valid]),
                   parts={k: a.parts[k] + b.parts[k] for k in a.parts}, texts=a.texts + b.texts, answers=a.answers + b.answers)  # fmt: skip
