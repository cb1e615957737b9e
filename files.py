"""What the loaders of data sets share: the nouns Example, Split and Dataset, and readers that refuse damaged files.

A file that is missing, cut, packed, of another encoding or no data at all ends in one line (config.fail) that names file,
line and where the official one comes from. Left out: any particular data set; see data.py and problems.py.
"""

import csv
import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from config import Config, fail


@dataclass
class Example:
    """One request.

    id         stable name, unique in its split
    prompt     what the user says, before the chat template
    candidates the pool: item names an answer may use, in the order of the prompt
    gold       item -> utility > 0; the items to find, best first
    demo       a demonstrated completion for SFT, "" where there is none
    history    items of the user's past, oldest first (for baselines)
    responders what each of several people named, item -> utility; gold is their union. Empty: gold is one person's
    seen       items that the request names: they must not be recommended
    answer     of a problem: what its verifier compares with; JSON can hold it. A problem has no candidates and no gold
    check      of a problem: its verifier, a row of VERIFIERS in verify.py; "" for requests
    """

    id: str
    prompt: str
    candidates: list[str] = field(default_factory=list)
    gold: dict[str, float] = field(default_factory=dict)
    demo: str = ""
    history: list[str] = field(default_factory=list)
    responders: list[dict[str, float]] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    answer: object = None
    check: str = ""


class Lazy(Sequence):
    """A sequence whose items are made when they are asked for: item i is make(i), a pure function; the last ones are kept."""

    def __init__(self, length: int, make: Callable[[int], object]):
        self.length, self.make = length, functools.lru_cache(2048)(make)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int):
        if not -self.length <= i < self.length:
            raise IndexError(i)
        return self.make(i % self.length)


def each(function: Callable, items: Sequence) -> Sequence:
    """function of every item; of a lazy sequence when it is asked for."""
    return Lazy(len(items), lambda i: function(items[i])) if isinstance(items, Lazy) else [function(x) for x in items]


@dataclass
class Split:
    """A loaded split: its examples, counts of what was dropped and why, how often training users took an item, and the
    catalog: every item that any split's prompts may name (the vocabulary of a tokenizer made from titles). vocabulary: the
    words of a tokenizer made here, each with the white space behind it; empty: those of the examples and the catalog."""

    examples: list[Example]
    dropped: dict[str, int] = field(default_factory=dict)
    popularity: dict[str, int] = field(default_factory=dict)
    catalog: list[str] = field(default_factory=list)
    vocabulary: list[str] = field(default_factory=list)


@dataclass
class Dataset:
    """load(cfg, split) -> Split; what: one line; where: the official source."""

    load: Callable[[Config, str], Split]
    what: str
    where: str = "built in, needs no file"


DATASETS: dict[str, Dataset] = {}  # name -> row; filled by data.py, here because every error names the official source


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def folder(cfg: Config) -> str:
    """Where published files are looked for: --data_dir, else $DATA_DIR, else data/."""
    return cfg.data_dir or os.environ.get("DATA_DIR") or "data"


def find(cfg: Config, folders: list[str], names: list[str]) -> list[str]:
    """Paths that exist among names in the data folder or its usual sub-folders; earlier names first, at least one."""
    root = folder(cfg)
    paths = [os.path.join(root, sub, name) for name in names for sub in ["", *folders]]
    if not (found := [p for p in paths if os.path.isfile(p)]):
        fail(
            f"--data {cfg.data}: no {' or '.join(names)} in {root} or its sub-folders {', '.join(folders)}. Get it from "
            f"{DATASETS[cfg.data].where} and put it into {os.path.join(root, folders[0])}, or say --data_dir"
        )
    return found


def damaged(cfg: Config, place: str, what: str):
    """Leave with one line: where, what is wrong, and where the right file comes from."""
    fail(f"{place}: {what}; the official files: {DATASETS[cfg.data].where}")


def lines(cfg: Config, path: str, encoding: str = "utf-8") -> Iterator[str]:
    """Decoded lines with their ends, split at \\n only (csv and JSON Lines need both).

    Refuses what only looks like data: an empty file, a Git LFS pointer, a saved web page, a packed file, bytes of another
    encoding, NUL. ISO-8859-1 decodes anything, so there a line that is valid UTF-8 (a re-encoded copy) is refused: it would
    show as garbage.
    """
    try:
        file = open(path, "rb")
    except OSError as e:
        damaged(cfg, path, e.strerror)
    with file:
        head = file.read(512).lstrip(b"\xef\xbb\xbf").lstrip()
        file.seek(0)
        if not head:
            damaged(cfg, path, "is empty")
        if head.startswith(b"version https://git-lfs.github.com/spec/v1"):
            damaged(cfg, path, "is a Git LFS pointer, not the data: run `git lfs pull` there or get the file")
        if head.lower().startswith((b"<!doctype html", b"<html")):
            damaged(cfg, path, "is a saved web page, not the data: use the download link itself")
        if head.startswith((b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\xfd7zXZ")):
            damaged(cfg, path, "is a packed file: unpack it")
        for n, raw in enumerate(file, 1):
            try:
                line = raw.decode(encoding)
            except UnicodeDecodeError as e:
                damaged(cfg, f"{path} line {n}", f"byte {raw[e.start]:#04x} in column {e.start + 1} is not {encoding}")
            if b"\0" in raw:
                damaged(cfg, f"{path} line {n}", "a NUL byte: the file is damaged, or UTF-16 text")
            if encoding != "utf-8" and not raw.isascii() and is_utf8(raw):
                damaged(cfg, f"{path} line {n}", f"is UTF-8, the published file is {encoding}: a re-encoded copy")
            yield line.removeprefix("\ufeff") if n == 1 else line


def is_utf8(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def ended(cfg: Config, path: str, text: Iterator[str]) -> Iterator[str]:
    """The lines of a table. Where the last one has no end the file was cut, be it inside a number that still reads as one."""
    for n, line in enumerate(text, 1):
        yield line
        if not line.endswith("\n"):
            damaged(cfg, f"{path} line {n}", "the last line has no line end: the file is cut short")


def table(
    cfg: Config, path: str, sep: str, columns: dict, header=True, encoding="utf-8", unique=False
) -> Iterator[list]:
    """Rows of a delimited file, each value through the type of its column. Quotes are only special where sep is ','.

    unique: no two rows may have the same first value.
    """
    text, seen = ended(cfg, path, lines(cfg, path, encoding)), set()
    rows = csv.reader(text, strict=True) if sep == "," else (line.rstrip("\r\n").split(sep) for line in text)
    kinds, n = list(columns.values()), 0
    try:
        for n, row in enumerate(rows, 1):
            if row in ([], [""]):
                continue  # some copies end in a blank line
            if sep == "," and rows.line_num != n:
                damaged(cfg, f"{path} line {n}", "a quote that is not closed on its line")
            if len(row) != len(kinds):
                damaged(cfg, f"{path} line {n}", f"{len(row)} columns instead of {len(kinds)} ({', '.join(columns)}): "
                        "the file is cut short or another one")  # fmt: skip
            if n == 1 and header:
                if row != list(columns):
                    damaged(cfg, f"{path} line 1", f"the header is {sep.join(row)!r}, expected {sep.join(columns)!r}")
                continue
            values = [kind(value) for kind, value in zip(kinds, row)]
            if unique and values[0] in seen:
                damaged(cfg, f"{path} line {n}", f"{next(iter(columns))} {values[0]} is there twice")
            if unique:
                seen.add(values[0])
            yield values
    except (ValueError, KeyError):
        damaged(
            cfg, f"{path} line {n}", f"not a number where one belongs: {sep.join(row)!r:.300} ({', '.join(columns)})"
        )
    except csv.Error as e:
        damaged(cfg, f"{path} line {n + 1}", f"{e}: the file is cut short or damaged")


def records(cfg: Config, path: str) -> Iterator[dict]:
    """Records of a JSON array or of JSON Lines, told apart by the first character: suffixes do not tell."""
    text, blank, first = lines(cfg, path), [], ""
    for first in text:
        if first.strip():
            break
        blank.append(first)
    if first.lstrip().startswith("["):
        yield from parse_json(cfg, path, "".join([*blank, first, *text]))
        return
    for n, line in enumerate(itertools.chain([first], text), 1 + len(blank)):
        if line.strip():
            yield parse_json(cfg, path, line, n)


def once(pairs: list[tuple[str, object]]) -> dict:
    """A JSON object in which no key is given twice: the second would win in silence."""
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError("a key is given twice in an object")
    return out


def constant(name: str):
    """NaN and Infinity, which Python's reader takes and JSON does not have."""
    raise ValueError(f"{name} is no JSON")


def parse_json(cfg: Config, path: str, text: str, line=1):
    """text starts at the given line of the file."""
    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=constant)
    except RecursionError:
        damaged(cfg, f"{path} line {line}", "not JSON of a data set: nested thousands of levels deep")
    except ValueError as e:  # JSONDecodeError, or a number with thousands of digits
        at, what = getattr(e, "pos", 0), getattr(e, "msg", str(e))
        early = "Unterminated" in what or (at and not text[at:].strip())
        place = f"{path} line {line + text.count(chr(10), 0, at)}, column {at - text.rfind(chr(10), 0, at)}"
        damaged(cfg, place, "the JSON ends early: the file is cut short" if early else
                f"not JSON ({what}): neither one array nor an object per line")  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Values of records


def text_of(value) -> str:
    """A text of a record. Other types would be read in silence as something else: a string is a list of characters, a
    list has a str()."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} where a text belongs")
    return value


def list_of(value) -> list:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.60} where a list belongs")
    return value


def id_of(value) -> str:
    return str(value) if type(value) is int else text_of(value)


def is_text(text: str) -> bool:
    """No half of a character, such as a careless JSON escape leaves."""
    return not re.search("[\ud800-\udfff]", text)


INVISIBLE = dict.fromkeys(map(ord, "\u200b\u200e\u200f\u2060\ufeff"))  # zero width, direction marks, BOM inside text
INVISIBLE |= dict.fromkeys(
    [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]
)  # what turns the direction of the text around
INVISIBLE |= dict.fromkeys(i for i in [*range(0x20), *range(0x7F, 0xA0)] if not chr(i).isspace())  # control characters
INVISIBLE |= dict.fromkeys(range(0xD800, 0xE000), "\ufffd")  # halves of a character, from JSON escapes: not UTF-8


def clean(text: str) -> str:
    """Text as shown: no invisible characters, every run of white space (no-break space, tab, newline) one space."""
    return " ".join(text.translate(INVISIBLE).split())


# ---------------------------------------------------------------------------------------------------------------------
# Seeded draws


def stable_hash(text: str) -> int:
    """A number that depends on the text alone, the same in every process (hash() is salted)."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def sample(cfg: Config, records, dropped: dict[str, int]):
    """At most max_examples of the records (any sequence), by a seeded draw that keeps their order."""
    if not cfg.max_examples or len(records) <= cfg.max_examples:
        return records
    keep = np.random.default_rng([cfg.data_seed, 9]).permutation(len(records))[: cfg.max_examples]
    dropped["beyond --max_examples"] = len(records) - cfg.max_examples
    return [records[i] for i in sorted(keep)]


def example_rng(cfg: Config, id: str) -> np.random.Generator:
    """The draws of one example depend on data_seed and its id alone, not on the examples around it."""
    return np.random.default_rng([cfg.data_seed, stable_hash(id)])
