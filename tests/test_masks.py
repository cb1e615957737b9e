"""From prompts to ids and from completions to unit_ids: what is seen, what is trained (faults F05 F10 F11 F15 F16 F18)."""

import functools
import itertools
import os
import random
import re

import pytest
import torch

import data
import model as lm
import rewards
from config import Config
from data import Example, Split
from rewards import join, phase_units, score, token_bytes
from rollout import Rollout

TAGS = Config().tags
ALPHABET = "abcXYZ019 .,:()<>/|#'\"\n\t-é東京物語ñß🎬👩‍👧🇯🇵\u200b\u00a0e\u0301العربية"
WELL_FORMED = (
    "<SLATE>\nThe Café (1991)\n東京物語 (1953)\n🎬 Heat\n</SLATE>\n<RANK>\n東京物語 (1953)\nThe Café (1991)\n</RANK>"
)


def random_text(rng: random.Random, n=60) -> str:
    return "".join(rng.choice(ALPHABET) for _ in range(rng.randrange(n)))


@functools.cache
def real(name: str):
    """A published tokenizer and its pieces; DATA_DIR says where the folders are."""
    from transformers import AutoTokenizer

    root = os.environ.get("DATA_DIR")
    if not root or not os.path.isdir(os.path.join(root, name)):
        pytest.skip(f"DATA_DIR is not set or has no {name}")
    tokenizer = AutoTokenizer.from_pretrained(os.path.join(root, name))
    return tokenizer, token_bytes(tokenizer)


@functools.cache
def sentencepiece(style: str):
    """A small BPE with word marks and byte fallback. llama2: normaliser and Replace; metaspace: pre-tokenizer and decoder."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"aehtSLATERNK<>/é東.12"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("<", "/"), ("S", "L"), ("SL", "A"), ("A", "T")]
    tokens += [a + b for a, b in merges]
    bpe = models.BPE({t: i for i, t in enumerate(tokens)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    raw = Tokenizer(bpe)
    if style == "llama2":
        raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        raw.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        raw.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False)]
        )
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
                                   clean_up_tokenization_spaces=False)  # fmt: skip


@functools.cache
def wordpiece():
    """A BERT-like tokenizer: pieces that continue a word, no rule but decoding."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {t: i for i, t in enumerate(["[UNK]", "[SEP]", "a", "##b", "the", "##s", "x"])}
    raw = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="[SEP]", unk_token="[UNK]")


pieces_of = functools.lru_cache(token_bytes)


def silent(tokenizer) -> set:
    return {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}


def rolled(*token_rows: list[int]) -> Rollout:
    """Completions of one prompt each, as a rollout would return them."""
    width = max(map(len, token_rows))
    tokens = torch.tensor([[*r, *[0] * (width - len(r))] for r in token_rows])
    mask = torch.arange(width) < torch.tensor([len(r) for r in token_rows])[:, None]
    n = len(token_rows)
    return Rollout([[3]] * n, tokens, torch.zeros(tokens.shape), mask, torch.arange(n), torch.ones(n, dtype=torch.bool))


def example(*candidates: str) -> Example:
    return Example(
        "1", "?", list(candidates) or ["The Café (1991)", "東京物語 (1953)", "🎬 Heat"], {"東京物語 (1953)": 1.0}
    )


def units_of(text_or_ids, tokenizer, unit="phase", prefix="", **settings) -> list[int]:
    """unit_ids of one completion, text or ids, cut to its length."""
    is_text = isinstance(text_or_ids, str)
    ids = tokenizer(text_or_ids, add_special_tokens=False)["input_ids"] if is_text else text_or_ids
    scored = score(rolled(ids), [example()], pieces_of(tokenizer), Config(prefix=prefix, **settings), unit)
    return scored.unit_ids[0].tolist()


# ---------------------------------------------------------------------------------------------------------------------
# Prompts


def test_at_most_one_start_token_with_or_without_a_chat_template():
    """F15: a template writes the start token, then the tokenizer adds it again: every prompt is off-distribution."""
    tokenizer = sentencepiece("llama2")
    start = tokenizer.bos_token_id
    bare = data.encode(tokenizer, "the a")
    assert bare[0] == start and bare.count(start) == 1
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}/{% endif %}"
    )
    try:
        chat = data.encode(tokenizer, "the a")
        assert chat[0] == start and chat.count(start) == 1
        assert tokenizer.decode(chat[1:]) == "<the a>/"
    finally:
        tokenizer.chat_template = None
    for kind in ("word", "line", "byte"):
        built = lm.build_tokenizer(kind, ["the a\n"])
        assert data.encode(built, "the a\n") == built("the a\n")["input_ids"]  # no start token, so none is invented


@pytest.mark.parametrize("name", ("qwen3-tokenizer", "smollm2-tokenizer"))
def test_published_chat_templates_are_followed_to_the_letter(name):
    """F15: the ids are those of the template's text and nothing more; they end where the assistant begins.

    SmolLM2 uses its start token to open every turn: there it counts as often as the template writes it.
    """
    tokenizer, _ = real(name)
    ids = data.encode(tokenizer, "Liked: Heat (1995)\n東京物語")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Liked: Heat (1995)\n東京物語"}], tokenize=False,
                                         add_generation_prompt=True)  # fmt: skip
    assert tokenizer.decode(ids) == text and text.endswith("<|im_start|>assistant\n")
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == text.count("<|im_start|>")
    assert ids[:2] != [tokenizer.bos_token_id] * 2
    if tokenizer.bos_token is None:
        assert text.startswith("<|im_start|>user\nLiked")


def test_prompts_beyond_the_limit_are_left_out_and_counted_never_cut(capsys):
    """F16: a cut prompt loses its question or its header; the group's baseline is noise."""
    tokenizer = lm.build_tokenizer("byte", [])
    lengths = [5, 10, 11, 3, 50, 10]
    examples = [Example(str(i), "x" * n, ["a"], {"a": 1.0}) for i, n in enumerate(lengths)]
    split = Split(list(examples), {"before": 2})
    kept, prompts = data.fit(split, tokenizer, Config(max_prompt=10))
    assert [e.id for e in kept] == ["0", "1", "3", "5"] and [len(p) for p in prompts] == [5, 10, 3, 10]
    assert [tokenizer.decode(p) for p in prompts] == [e.prompt for e in kept]
    assert split.dropped == {"before": 2, "prompt longer than --max_prompt": 2}
    fits = Split(list(examples))
    assert len(data.fit(fits, tokenizer, Config(max_prompt=50))[0]) == 6 and fits.dropped == {}
    with pytest.raises(SystemExit) as stop:
        data.fit(Split(examples), tokenizer, Config(max_prompt=2))
    assert stop.value.code == 2 and "shortest has 3 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("n, batch", ((10, 4), (7, 7), (16, 5), (3, 1), (100, 8)))
def test_the_order_of_examples_is_a_pure_function_of_seed_and_step(n, batch):
    """F48: no state to save; a resumed run sees what the uninterrupted one would have seen. An epoch is a permutation of
    its own, cut into whole batches: no step may hold a prompt twice, its samples would be the same."""
    whole = n // batch
    epochs = [[data.order(n, 5, e * whole + i, batch) for i in range(whole)] for e in range(3)]
    for epoch in epochs:
        assert [len(b) for b in epoch] == [batch] * whole
        seen = [i for b in epoch for i in b]
        assert len(set(seen)) == whole * batch and set(seen) <= set(range(n))
    torch.manual_seed(3), random.seed(3)
    assert [data.order(n, 5, step, batch) for step in reversed(range(3 * whole))][::-1] == [
        b for e in epochs for b in e
    ]
    assert n < 7 or len({str(e) for e in epochs}) == 3
    assert n < 7 or epochs[0] != [data.order(n, 6, i, batch) for i in range(whole)]
    left = [set(range(n)) - {i for b in e for i in b} for e in epochs]  # the rest: another one in each epoch
    assert n % batch == 0 or len({frozenset(x) for x in left}) > 1


# ---------------------------------------------------------------------------------------------------------------------
# Bytes of tokens


@pytest.mark.parametrize("name", ("qwen3-tokenizer", "smollm2-tokenizer"))
def test_bytes_of_published_tokenizers_join_to_the_decoded_text(name):
    """Random text with emoji and CJK, exactly; random ids too, where halves of characters are not yet text."""
    tokenizer, pieces = real(name)
    rng = random.Random(0)
    assert len(pieces) == len(tokenizer)
    for text in [WELL_FORMED, *(random_text(rng) for _ in range(200))]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == join([pieces[i] for i in ids])
        if name.startswith("smollm2"):  # Qwen composes accents (NFC): its text comes back composed
            assert join([pieces[i] for i in ids]) == text
    for _ in range(200):
        ids = [i for i in (rng.randrange(len(tokenizer)) for _ in range(20)) if i not in silent(tokenizer)]
        assert b"".join(pieces[i] for i in ids).decode("utf-8", "replace") == tokenizer.decode(ids)
    assert all(pieces[i] == b"" for i in silent(tokenizer) if i is not None)


@pytest.mark.parametrize("kind", ("word", "line", "byte"))
def test_bytes_of_tokenizers_from_scratch_join_to_the_text(kind):
    rng = random.Random(1)
    texts = [WELL_FORMED, *(random_text(rng) for _ in range(60))]
    tokenizer = lm.build_tokenizer(kind, texts)
    pieces = token_bytes(tokenizer)
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert join([pieces[i] for i in ids]) == text
    for _ in range(60):
        ids = [i for i in (rng.randrange(len(tokenizer)) for _ in range(15)) if i not in silent(tokenizer)]
        assert b"".join(pieces[i] for i in ids).decode("utf-8", "replace") == tokenizer.decode(ids)


@pytest.mark.parametrize("style", ("llama2", "metaspace"))
def test_bytes_of_a_sentencepiece_tokenizer_join_to_the_text(style):
    """Word marks are spaces, <0xE6> is a byte; decoding alone would drop a space and spoil half a character.

    The space before the first word is the mark's, not the text's.
    """
    tokenizer, rng = sentencepiece(style), random.Random(2)
    pieces = token_bytes(tokenizer)
    for text in [WELL_FORMED, "the a the", "<SLATE>\nthe a\n</SLATE>", *(random_text(rng) for _ in range(100))]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if text and not text.startswith(" "):
            assert join([pieces[i] for i in ids]).removeprefix(" ") == text
    marks = {i: re.fullmatch(r"<0x(..)>", tokenizer.convert_ids_to_tokens(i)) for i in range(len(tokenizer))}
    for _ in range(200):
        ids = [i for i in (rng.randrange(3, len(tokenizer)) for _ in range(12)) if i not in silent(tokenizer)]
        want = b"".join(
            bytes([int(marks[i][1], 16)]) if marks[i] else tokenizer.convert_ids_to_tokens(i).replace("▁", " ").encode()
            for i in ids
        )
        assert b"".join(pieces[i] for i in ids) == want
        if not any(marks[i] for i in ids):  # decoding is exact without lone bytes
            assert tokenizer.decode(ids).lstrip(" ") == join([pieces[i] for i in ids]).lstrip(" ")
    assert pieces[tokenizer.eos_token_id] == pieces[tokenizer.bos_token_id] == b"" and pieces[0] == b"<unk>"


def test_a_tokenizer_without_a_known_decoder_is_read_by_decoding():
    """WordPiece: what an id adds behind another; a continuing piece brings no space."""
    tokenizer = wordpiece()
    pieces = token_bytes(tokenizer)
    assert [pieces[i] for i in tokenizer("the x ab")["input_ids"]] == [b" the", b" x", b" a", b"b"]
    assert pieces[tokenizer.eos_token_id] == b""


# ---------------------------------------------------------------------------------------------------------------------
# Units of tokens


def labels(text: str, spans) -> list[int]:
    """Unit of every byte, one by one."""
    out = []
    for i, char in enumerate(text):
        unit = next((u for u, (a, b) in enumerate(spans, 1) if a <= i < b), 0)
        out += [unit] * len(char.encode())
    return out


def expected(pieces: list[bytes], by_byte: list[int]) -> list[int]:
    out, at = [], 0
    for p in pieces:
        own = set(by_byte[at : at + len(p)])
        out.append(own.pop() if len(own) == 1 else 0)
        at += len(p)
    return out


def test_a_token_belongs_to_a_phase_only_if_all_of_its_bytes_do():
    """Any cut of the bytes: tokens with half a tag, half a character, two tags or nothing in them."""
    rng = random.Random(0)
    raw, spans = (
        WELL_FORMED.encode(),
        [rewards.parse(WELL_FORMED, TAGS).slate_span, rewards.parse(WELL_FORMED, TAGS).rank_span],
    )
    by_byte = labels(WELL_FORMED, spans)
    assert {1, 2, 0} == set(by_byte)
    for _ in range(300):
        cuts = sorted([0, len(raw), *(rng.randrange(len(raw) + 1) for _ in range(rng.randrange(60)))])
        pieces = [raw[a:b] for a, b in itertools.pairwise(cuts)]
        assert join(pieces) == WELL_FORMED
        assert phase_units(pieces, WELL_FORMED, spans) == expected(pieces, by_byte)
    assert phase_units([raw], WELL_FORMED, spans) == [0]
    assert phase_units([b"", raw[:3], b""], WELL_FORMED, [None, None]) == [0, 0, 0]


@pytest.mark.parametrize(
    "name", ("qwen3-tokenizer", "smollm2-tokenizer", "llama2", "metaspace", "word", "line", "byte")
)
def test_tags_that_share_a_token_with_the_list_do_not_leak_into_a_phase(name):
    """'>' and a line break are one token in most vocabularies: it holds a piece of the tag, so it is not trained."""
    if name.endswith("tokenizer"):
        tokenizer = real(name)[0]
    else:
        tokenizer = lm.build_tokenizer(name, [WELL_FORMED]) if name in ("word", "line", "byte") else sentencepiece(name)
    pieces = token_bytes(tokenizer)
    ids = tokenizer(WELL_FORMED, add_special_tokens=False)["input_ids"]
    text = join([pieces[i] for i in ids])
    parsed = rewards.parse(text, TAGS)
    units = units_of([*ids, tokenizer.eos_token_id], tokenizer)
    assert units == [*expected([pieces[i] for i in ids], labels(text, [parsed.slate_span, parsed.rank_span])), 0]
    slate, rank = (b"".join(pieces[i] for i, u in zip(ids, units) if u == unit).decode() for unit in (1, 2))
    assert "SLATE" not in slate and "RANK" not in rank and {">", "<", "/"}.isdisjoint(slate + rank)
    assert "Café (1991)\n東京物語 (1953)\n🎬 Heat" in slate and "東京物語 (1953)\nThe Café (1991)" in rank
    assert units_of(WELL_FORMED, tokenizer, "sequence") == [1] * len(ids)


def test_a_token_that_holds_the_end_of_a_tag_and_a_title_is_not_trained():
    """The story: a vocabulary with '>\\n' as one token; by text alone the line break would have counted as slate."""
    parts = ["<SLATE", ">\n", "a\n", "</", "SLATE>\n<RA", "NK>", "a", "</RANK>"]
    text = "".join(parts)
    parsed = rewards.parse(text, TAGS)
    assert phase_units([p.encode() for p in parts], text, [parsed.slate_span, parsed.rank_span]) == [
        0,
        0,
        1,
        0,
        0,
        0,
        2,
        0,
    ]


BROKEN = {
    "missing:<RANK>": "<SLATE>\n東京物語 (1953)\n</SLATE>\n",
    "repeated:</RANK>": WELL_FORMED + "</RANK>",
    "order": "<RANK>\na\n</RANK>\n<SLATE>\na\n</SLATE>",
    "empty_slate": "<SLATE>\n\n</SLATE>\n<RANK>\na\n</RANK>",
    "empty_rank": "<SLATE>\na\n</SLATE>\n<RANK>\nb\n</RANK>",
    "missing:<SLATE>": "no tags at all",
}


def in_halves(ids: list[int], pieces: list[bytes], before=b"") -> list[int]:
    """Every token has a phase: the first that starts behind the first slate close, and all after it, have the second."""
    raw = before + b"".join(pieces[i] for i in ids)
    end = raw.find(TAGS[1].encode()) + len(TAGS[1]) if TAGS[1].encode() in raw else len(raw) + 1
    starts = [len(before) + sum(len(pieces[i]) for i in ids[:n]) for n in range(len(ids))]
    return [2 if start >= end else 1 for start in starts]


@pytest.mark.parametrize("error, text", BROKEN.items())
@pytest.mark.parametrize("kind", ("byte", "word", "llama2"))
def test_a_malformed_completion_trains_all_of_its_tokens_or_none(error, text, kind):
    """format_scope: the penalty reaches each sampled token, tags and stop token too, each in its phase, or not one."""
    tokenizer = sentencepiece(kind) if kind == "llama2" else lm.build_tokenizer(kind, [text])
    assert rewards.parse(text, TAGS).error == error
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    want = in_halves(ids, pieces_of(tokenizer))
    assert units_of(ids, tokenizer, "phase", format_scope="all") == want
    assert want[0] == 1 and want[-1] == (2 if TAGS[1] in text else 1)
    assert units_of(ids, tokenizer, "sequence", format_scope="all") == [1] * len(ids)
    for unit in ("phase", "sequence"):
        assert units_of(ids, tokenizer, unit, format_scope="none") == [0] * len(ids)


@pytest.mark.parametrize("kind", ("byte", "word", "line", "llama2"))
def test_tags_and_stop_token_belong_to_the_phase_that_they_end_if_they_are_trained(kind):
    """train_delimiters: no token is left out; those of a phase's own words keep their unit."""
    tokenizer = sentencepiece(kind) if kind == "llama2" else lm.build_tokenizer(kind, [WELL_FORMED])
    ids = [*tokenizer(WELL_FORMED, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    pieces = pieces_of(tokenizer)
    own, every = (units_of(ids, tokenizer, train_delimiters=t) for t in (False, True))
    assert every == in_halves(ids, pieces) == sorted(every) and every[-1] == 2
    assert all(b == a for a, b in zip(own, every) if a) and 0 in own
    text = [b"".join(pieces[i] for i, u in zip(ids, every) if u == unit).decode() for unit in (1, 2)]
    assert "".join(text) == join([pieces[i] for i in ids]) and TAGS[1] in text[0] and TAGS[2] in text[1]
    assert units_of(ids, tokenizer, "sequence", train_delimiters=True) == [1] * len(ids)


@pytest.mark.parametrize("unit", ("phase", "sequence"))
@pytest.mark.parametrize("scope", ("all", "none"))
def test_completions_without_words_are_malformed_and_cannot_break_anything(unit, scope):
    """The stop token alone, padding sampled as tokens, tags around nothing, ids that the tokenizer lacks, a row cut to nothing."""
    tokenizer = lm.build_tokenizer("byte", [])
    pad, eos, beyond = tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer) + 7
    tags = tokenizer("".join(TAGS))["input_ids"]
    roll = rolled([eos], [pad, pad, pad], [*tags, eos], [beyond, 10**6, eos], [])
    cfg = Config(format_scope=scope, format_penalty=-0.5)
    scored = score(roll, [example()] * 5, token_bytes(tokenizer), cfg, unit)
    assert scored.texts == ["", "", "".join(TAGS), "", ""]
    want = roll.mask.long() * (scope == "all")
    if unit == "phase":
        want[2] = torch.where(want[2] > 0, torch.tensor(in_halves(roll.tokens[2].tolist(), token_bytes(tokenizer))), 0)
    assert torch.equal(scored.unit_ids, want)
    assert (scored.reward == (-0.5 if unit == "phase" else -1.0)).all() and scored.valid.all()
    assert scored.parts["invalid"] == [1.0] * 5 and scored.parts["length"] == [1, 3, len(tags) + 1, 3, 0]
    assert all(a == ([], []) for a in scored.answers)


def test_ids_beyond_the_tokenizer_inside_an_answer_say_nothing():
    """Embedding tables are padded to round sizes: such ids can be sampled, have no text and belong to no phase."""
    tokenizer = lm.build_tokenizer("line", [WELL_FORMED + "\n"])
    ids = tokenizer(WELL_FORMED + "\n")["input_ids"]
    with_holes = [i for pair in zip(ids, [len(tokenizer) + 1] * len(ids)) for i in pair]
    units = units_of(with_holes, tokenizer)
    assert units[::2] == units_of(ids, tokenizer) and not any(units[1::2])


def test_padding_is_never_trained_whatever_stands_there():
    """F10, F11: text behind the first stop token is not read and not trained."""
    tokenizer = lm.build_tokenizer("byte", [])
    good, eos = tokenizer(WELL_FORMED)["input_ids"], tokenizer.eos_token_id
    roll = rolled([*good, eos], [*good, eos, *good])
    roll.mask[1, len(good) + 1 :] = False
    scored = score(roll, [example()] * 2, token_bytes(tokenizer), Config(), "phase")
    assert scored.texts == [WELL_FORMED] * 2
    assert torch.equal(scored.unit_ids[0], scored.unit_ids[1]) and not scored.unit_ids[~roll.mask].any()
    for unit in ("phase", "sequence"):
        ids = score(roll, [example()] * 2, token_bytes(tokenizer), Config(), unit).unit_ids
        assert (ids[:, len(good) + 1 :] == 0).all()


def test_a_completion_is_read_behind_its_forced_prefix_which_is_not_trained():
    """F18: with the tag in the prompt the reward was always that of a malformed answer."""
    tokenizer = lm.build_tokenizer("byte", [])
    prefix, rest = WELL_FORMED[:14], WELL_FORMED[14:]  # the prefix ends inside a title
    whole, part = units_of(WELL_FORMED, tokenizer), units_of(rest, tokenizer, prefix=prefix)
    assert part == whole[len(prefix.encode()) :]
    assert len(part) == len(rest.encode()) and set(part) == {0, 1, 2}
    ids = tokenizer(rest)["input_ids"]
    cfg = Config(prefix=prefix)
    scored = score(rolled(ids), [example()], token_bytes(tokenizer), cfg, "phase")
    assert (
        scored.texts == [WELL_FORMED]
        and scored.reward.tolist() == [[1.0, 1.0]]
        and scored.parts["length"] == [len(ids)]
    )
    assert units_of(rest, tokenizer, "sequence", prefix=prefix) == [1] * len(ids)
    assert units_of(rest, tokenizer) == in_halves(ids, pieces_of(tokenizer))  # without the prefix it is malformed
    every = units_of(rest, tokenizer, prefix=prefix, train_delimiters=True)
    assert every == in_halves(ids, pieces_of(tokenizer), prefix.encode())
    slate = WELL_FORMED[: WELL_FORMED.index(TAGS[2])]  # the whole slate is forced, the ranking is malformed
    assert units_of("é", tokenizer, prefix=slate) == [2, 2]


def test_masks_are_of_the_sampled_ids_even_where_the_text_would_be_cut_otherwise():
    """F05: a completion spelled with other tokens than the tokenizer's own; its text is right, each id keeps its place."""
    tokenizer, pieces = real("qwen3-tokenizer")
    byte_of = {p: i for i, p in enumerate(pieces) if len(p) == 1}
    ids = [byte_of[bytes([b])] for b in WELL_FORMED.encode()]
    assert tokenizer(WELL_FORMED)["input_ids"] != ids
    scored = score(rolled(ids), [example()], pieces, Config(), "phase")
    assert scored.texts == [WELL_FORMED] and scored.reward.tolist() == [[1.0, 1.0]]
    parsed = rewards.parse(WELL_FORMED, TAGS)
    assert scored.unit_ids[0].tolist() == labels(WELL_FORMED, [parsed.slate_span, parsed.rank_span])


# ---------------------------------------------------------------------------------------------------------------------
# Lists: ranks of tokens

A, B, C, D = (["A", " (1999)\n"], ["B", " (2000)\n"], ["C", " (2001)"], ["D", " (2002)"])
END = ""  # the stop token says nothing


@pytest.mark.parametrize("parts, ours, released", (
    ([*A, *B, *C, END], [1, 1, 2, 2, 3, 3, 3], [0, 0, 1, 1, 2, 2, 2]),
    ([*A, *B, "C", " (2001)\n", END], [1, 1, 2, 2, 3, 3, 3], [0, 0, 1, 1, 2, 2, 3]),  # D11: the end is rank 3's, no overflow
    ([*A, "B", " (2000)", END], [1, 1, 2, 2, 2], [0, 0, 1, 1, 1]),
    ([*A, *B, END], [1, 1, 2, 2, 2], [0, 0, 1, 1, 2]),  # D11: two items are not three
    (["A", " (1999)\n\n", *B, *C, END], [1, 1, 2, 2, 3, 3, 3], [0, 0, 2, 2, 3, 3, 3]),  # D10: a blank line takes no rank
    ([*A, *B, "C", " (2001)\n", *D, END], [1, 1, 2, 2, 3, 3, 4, 4, 4], [0, 0, 1, 1, 2, 2, 3, 3, 3]),
    ([*A, "B"], [1, 1, 2], [0, 0, 1]),
    (["\n", " \n", *A, END], [1, 1, 1, 1, 1], [0, 1, 2, 2, 3]),  # blank lines at the start: of the first rank
    ([*A, *B, "C", "\n", "\n", " ", "\n", *D, "\n", "E", END], [1, 1, 2, 2, 3, 3, 3, 3, 3, 4, 4, 4, 4, 4], None),
    (["A\nB", "\nC", END], [1, 2, 3], None),  # a token belongs to the line open where it starts
    ([END], [1], [0]), ([], [], []), ([END, *A, END, *B], [1, 1, 1, 2, 2, 2], None),
))  # fmt: skip
def test_a_token_belongs_to_the_rank_of_the_line_open_where_it_starts(parts, ours, released):
    """rank_grpo.md 13.6 with N = 3, beside what the released code makes of it (from 0)."""
    pieces = [p.encode() for p in parts]
    units, lines = rewards.rank_units(pieces, 3)
    assert units == ours and lines == [line for line in "".join(parts).split("\n") if line.strip()]
    assert released is None or rewards.line_units(pieces) == released


def test_ranks_of_any_cut_of_the_bytes_agree_with_the_lines():
    """Every token that starts in line k of the text has unit k, whatever the tokens are; lines do not depend on the cut."""
    rng = random.Random(0)
    for _ in range(300):
        text = "\n".join(
            rng.choice(["", " ", "Café (1991)", "東京 (1953)", "x", "\r"]) for _ in range(rng.randrange(1, 9))
        )
        raw, n = text.encode(), rng.randrange(1, 5)
        cuts = sorted([0, len(raw), *(rng.randrange(len(raw) + 1) for _ in range(rng.randrange(20)))])
        pieces = [raw[a:b] for a, b in itertools.pairwise(cuts)]
        units, lines = rewards.rank_units(pieces, n)
        assert lines == [line for line in text.split("\n") if line.strip()]
        before = [raw[:a].decode("utf-8", "surrogateescape").split("\n") for a in cuts[:-1]]
        want = []
        for parts in before:
            done = sum(bool(p.strip()) for p in parts[:-1])
            here = text.split("\n")[len(parts) - 1]
            want.append(min(max(done + bool(here.strip()), 1), n + 1))
        assert units == want


@pytest.mark.parametrize("name", ("qwen3-tokenizer", "smollm2-tokenizer", "llama2", "word", "line", "byte"))
def test_ranks_of_a_tokenized_list_are_its_lines_with_their_line_breaks(name):
    """')' and a line break are one token in most vocabularies; it ends the rank of its title."""
    text = "The Café (1991)\n東京物語 (1953)\n🎬 Heat (1995)\nfour (2004)\n"
    if name.endswith("tokenizer"):
        tokenizer = real(name)[0]
    else:
        tokenizer = sentencepiece(name) if name == "llama2" else lm.build_tokenizer(name, [text])
    pieces = token_bytes(tokenizer)
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    ex = example()
    for n in (2, 4, 6):
        cfg = Config(answer="list", slate_size=n)
        scored = score(rolled(ids), [ex], pieces, cfg, "rank")
        units = scored.unit_ids[0].tolist()
        shown = join([pieces[i] for i in ids])
        for unit in range(1, n + 1):
            got = b"".join(pieces[i] for i, u in zip(ids, units) if u == unit).decode()
            assert got == "".join(shown.splitlines(keepends=True)[unit - 1 : unit])
        assert units[-1] == min(4, n + 1) and units == sorted(units) and scored.reward.shape == (1, n + 1)
        assert scored.parts["lines"] == [4.0]
        assert score(rolled(ids), [ex], pieces, cfg, "sequence").unit_ids[0].tolist() == [1] * len(ids)


def test_a_forced_prefix_of_a_list_is_read_and_not_trained():
    """F18: the first title is forced, the completion goes on in its line."""
    tokenizer = lm.build_tokenizer("byte", [])
    pool = ["The Café (1991)", "Heat (1995)"]
    ids = tokenizer("é (1991)\nHeat (1995)")["input_ids"]
    cfg = Config(answer="list", slate_size=2, prefix="The Caf")
    scored = score(
        rolled(ids), [Example("1", "?", pool, {"The Café (1991)": 1.0})], token_bytes(tokenizer), cfg, "rank"
    )
    assert scored.reward.tolist() == [[1.0, 0.0, 0.0]] and scored.unit_ids[0].tolist() == [1] * 10 + [2] * 11
