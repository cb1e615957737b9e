"""Files in their published formats, or a built-in world that needs none -> Example.

One loader per data set; DATASETS at the end is the list. Readers: files.py. Left out: downloads (a missing file says where
to get it), streaming, and anything that knows of training.

    python data.py list
    python data.py show world --split test -n 2
    python data.py show movielens --data_dir DIR --split test -n 2
"""

import html
import itertools
import os
import re
import signal
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

import maze
import problems
from config import LISTS, Config, answer_of, fail, printable
from files import (
    DATASETS,
    Dataset,
    Example,
    Lazy,
    Split,
    clean,
    damaged,
    each,
    example_rng,
    find,
    id_of,
    is_text,
    list_of,
    records,
    sample,
    stable_hash,
    table,
    text_of,
)

# ---------------------------------------------------------------------------------------------------------------------
# Wording: the only place where prompts and demonstrations are made

TEMPLATES = {
    ("terse", "recommend"): "History:\n{history}\n{pool}",
    ("terse", "retrieve"): "{question}\n{pool}",
    ("terse", "request"): "{request}\n",
    ("instruct", "recommend"): (
        "A user liked these titles, oldest first:\n{history}\n\n{pool}\n{task} Write nothing else."
    ),
    ("instruct", "retrieve"): "Question: {question}\n\n{pool}\n{task} Do not answer the question itself.",
    ("instruct", "request"): (
        "A user writes:\n{request}\n\n{task} Leave out the titles that the user names. Write nothing else."
    ),
}
TASKS = {  # what the instruct prompts ask for: form of the answer, task
    ("phases", "recommend"): "First choose the {n} titles that the user will most likely want next. {where}",
    ("phases", "retrieve"): "First choose up to {n} passages that are needed to answer the question. {where}",
    ("list", "recommend"): (
        "Write the {n} titles that the user will most likely want next, best first, one per line. {form}"
    ),
    ("list", "retrieve"): (
        "Write up to {n} passages that are needed to answer the question, best first, one per line. {form}"
    ),
    ("list", "request"): "Recommend {n} titles, best first, one per line, each as: title (year).",
}
WHERE = (
    "Write them between {slate[0]} and {slate[1]}, one per line. Then put the best {k} of your choice in order, best "
    "first, between {rank[0]} and {rank[1]}, one per line. {form}"
)
PLAN = " {when}, write one short line about what to look for between {tags[0]} and {tags[1]}."


def label(cfg: Config, candidates: list[str], item: str) -> str:
    """How an answer names an item: its title, or #n, its place in the pool from 1."""
    return f"#{candidates.index(item) + 1}" if cfg.item_form == "index" else item


def marks(cfg: Config) -> list[tuple[str, tuple[str, str]]]:
    """(name, (open tag, close tag)) of every phase, in order."""
    return list(zip(cfg.phases, zip(cfg.tags[::2], cfg.tags[1::2])))


def instruction(cfg: Config, task: str) -> str:
    """What an instruct prompt asks for, in the words of the form of the answer."""
    tags, now, plans = dict(marks(cfg)), "Before that", ""
    for name, pair in marks(cfg):
        if name == "plan":
            plans += PLAN.format(when=now, tags=pair)
        now = {"slate": "Between the two", "rank": "At the end"}.get(name, now)
    form = "Name each by its number, such as #3." if cfg.item_form == "index" else "Copy each title exactly."
    where = WHERE.format(slate=tags["slate"], rank=tags["rank"], k=cfg.rank_size, form=form) + plans
    return TASKS[answer_of(cfg), task].format(n=cfg.slate_size, where=where, form=form)


def write_prompt(cfg: Config, task: str, candidates: list[str], texts: dict[str, str] | None = None, **parts) -> str:
    """The user's words. texts: item -> passage shown after its title; parts: history (list), question or request."""
    pool = ""
    if cfg.show_pool:
        lines = [f"{label(cfg, candidates, c)} {c}" if cfg.item_form == "index" else c for c in candidates]
        if texts:
            lines = [f"{line}: {texts[c]}" for line, c in zip(lines, candidates)]
        pool = "Pool:\n" + "\n".join(lines) + "\n"
    parts["history"] = "\n".join(parts.get("history", []))
    asked = instruction(cfg, task) if cfg.template == "instruct" else ""
    return TEMPLATES[cfg.template, task].format(pool=pool, task=asked, **parts)


def write_demo(cfg: Config, candidates: list[str], slate: list[str], ranking: list[str], plan="") -> str:
    """The completion that shows slate and ranking, an entry per line; plan: the line of a plan phase.

    List: the ranking, then the rest of the slate; each line ends in a line break, so that a title is the same tokens in
    the last line as in the others.
    """
    names = {i: label(cfg, candidates, i) for i in slate}
    if answer_of(cfg) == "list":
        return "".join(f"{names[i]}\n" for i in [*ranking, *(i for i in slate if i not in ranking)])
    order = [str(slate.index(i) + 1) if cfg.rank_form == "position" else names[i] for i in ranking]
    content = {"slate": list(names.values()), "rank": order, "plan": [plan]}
    return "\n".join(line for name, (a, b) in marks(cfg) for line in (a, *content[name], b))


def demonstrate(cfg: Config, candidates: list[str], gold: dict[str, float], rng, plan="") -> str:
    """SFT target for a pool: gold plus random pool negatives up to slate_size; ranking gold first (by utility)."""
    best = sorted(gold, key=gold.get, reverse=True)
    rest = [c for c in candidates if c not in gold]
    rng.shuffle(rest)
    slate = (best + rest)[: cfg.slate_size]
    if cfg.demo_order == "shuffled":
        rng.shuffle(slate)
    elif cfg.demo_order == "pool":
        slate.sort(key=candidates.index)
    ranking = [i for i in best if i in slate] + [i for i in slate if i not in gold]
    return write_demo(cfg, candidates, slate, ranking[: cfg.rank_size], plan)


def contrast(cfg: Config, example: Example) -> tuple[list[str], list[str]]:
    """Good and bad answers of a request for preference methods: demonstrations that hold all gold, and such as would be
    written if nothing but the other candidates were known. The same at every step."""
    rng, plan = example_rng(cfg, f"{example.id}/contrast"), (example.history or [""])[-1]
    pool = [c for c in example.candidates if c not in example.seen]
    others = [c for c in pool if c not in example.gold]
    good = [demonstrate(cfg, pool, example.gold, rng, plan) for _ in range(cfg.good_answers)]
    return good, [demonstrate(cfg, others, {}, rng, plan) for _ in range(cfg.bad_answers)]


# ---------------------------------------------------------------------------------------------------------------------
# The built-in world: circles of titles

ADJECTIVES = (
    "amber ancient autumn bitter blue bright broken burning calm cold crimson curious dark deep distant early "
    "electric empty endless faded fallen false fast final first foreign forgotten fragile frozen gentle giant glass "
    "golden green grey happy hidden high hollow holy"
).split()
NOUNS = (
    "anchor arrow autumn bay bell bird blade border bridge castle city cloud coast comet crown dance desert dream "
    "echo empire engine field fire flower forest garden gate ghost harbor heart hill horizon house island journey "
    "kingdom lake lantern letter light"
).split()


def world_catalog(cfg: Config) -> list[list[str]]:
    """Titles of the built-in world, clusters x items; a title says nothing of its place, so it must be learned."""
    size = cfg.world_clusters * cfg.world_items
    titles = [f"{a} {n}" for a in ADJECTIVES for n in NOUNS]
    if size > len(titles):
        fail(f"--world_clusters x --world_items = {size}: the built-in world has words for {len(titles)} titles")
    picked = np.random.default_rng([cfg.data_seed, 0]).permutation(len(titles))[:size]
    return [[titles[i] for i in row] for row in picked.reshape(cfg.world_clusters, cfg.world_items)]


def load_world(cfg: Config, split: str) -> Split:
    """Synthetic next-item recommendation that a tiny model learns in a minute on a CPU.

    A user walks around one cluster's circle of titles; each history entry is replaced by a random title with
    probability world_noise. Gold: the next world_gold titles, utilities world_gold .. 1. The pool (show_pool) holds
    gold and random titles; without it the whole catalog is the pool and lives in the weights.
    Demonstrations come from a careless teacher: a slate runs around the right circle but starts up to world_slack
    places off, and its ranking starts anywhere in the slate. So SFT teaches form and neighbourhood, and leaves the
    right start (slate) and the right order (ranking) for reinforcement to find.
    A history belongs to one split, by its hash; within a split equal ones may repeat, as often as they are likely.
    """
    circles = world_catalog(cfg)
    catalog = [title for circle in circles for title in circle]
    seeds = {"train": 1, "valid": 2, "test": 3}
    rng = np.random.default_rng([cfg.data_seed, seeds[split]])
    share = {"train": range(0, 8), "valid": range(8, 9), "test": range(9, 10)}[split]
    wanted = cfg.world_examples if split == "train" else max(1, cfg.world_examples // 8)
    examples, tries = [], 0
    while len(examples) < wanted:
        tries += 1
        if tries > 200 * wanted + 10_000:
            fail(f"the built-in world has too few different histories for a {split} split: raise --history or "
                 f"--world_noise (reached {len(examples)} of {wanted} examples)")  # fmt: skip
        c, start = rng.integers(cfg.world_clusters), rng.integers(cfg.world_items)
        walk = [circles[c][(start + j) % cfg.world_items] for j in range(cfg.history + cfg.world_items)]
        noise = rng.random(cfg.history) < cfg.world_noise
        history = [str(rng.choice(catalog)) if n else title for title, n in zip(walk, noise)]
        if stable_hash("\n".join(history)) % 10 not in share:
            continue
        ahead = walk[cfg.history :]  # the circle from the right next title on
        gold = {title: float(cfg.world_gold - j) for j, title in enumerate(ahead[: cfg.world_gold])}
        candidates = catalog
        if cfg.show_pool:
            others = [t for t in catalog if t not in gold]
            extra = rng.permutation(len(others))[: max(0, cfg.pool_size - len(gold))]
            candidates = [*gold, *(others[i] for i in extra)]
            candidates = [candidates[i] for i in rng.permutation(len(candidates))]
            demo = demonstrate(cfg, candidates, gold, rng, history[-1])
        else:
            n = min(cfg.slate_size, cfg.world_items)
            off = int(rng.integers(-cfg.world_slack, cfg.world_slack + 1))
            slate = [ahead[(off + j) % cfg.world_items] for j in range(n)]
            if cfg.demo_order == "shuffled":
                slate = [slate[i] for i in rng.permutation(n)]
            k = min(cfg.rank_size, n)
            first = int(rng.integers(0, n - k + 1)) if cfg.world_slack else 0
            demo = write_demo(cfg, candidates, slate, slate[first : first + k], history[-1])
        prompt = write_prompt(cfg, "recommend", candidates, history=history)
        examples.append(Example(f"{split}-{len(examples)}", prompt, candidates, gold, demo, history))
    popularity = {}
    for e in examples if split == "train" else load_world(cfg, "train").examples:
        for title in e.gold:
            popularity[title] = popularity.get(title, 0) + 1
    return Split(examples, {}, popularity, catalog)


# ---------------------------------------------------------------------------------------------------------------------
# Built-in requests: a mood and titles like it, several people answer


MOODS = (
    "bleak breezy cerebral cosy dreamlike eerie epic gritty heartfelt jolly melancholy moody nostalgic playful quirky "
    "romantic rousing satirical suspenseful tender thrilling uplifting whimsical wistful"
).split()
WAYS = ("Something {mood}, please. I liked", "In the mood for a {mood} film like", "Any {mood} ones for a fan of")
STRAY = 0.2  # share of a demonstration's titles that are of another theme


def requests_catalog(cfg: Config) -> list[list[str]]:
    """Titles with years of the built-in requests, themes x items, best first; a title says nothing of its theme."""
    size = cfg.requests_themes * cfg.requests_items
    titles = [f"{a} {n}" for a in ADJECTIVES for n in NOUNS]
    if cfg.requests_themes > len(MOODS) or size > len(titles):
        fail(f"--requests_themes {cfg.requests_themes} --requests_items {cfg.requests_items}: there are words for "
             f"{len(MOODS)} themes and {len(titles)} titles")  # fmt: skip
    rng = np.random.default_rng([cfg.data_seed, 4])
    picked, years = rng.permutation(len(titles))[:size], rng.integers(1950, 2025, size)
    dated = [f"{titles[i]} ({year})" for i, year in zip(picked, years)]
    return [dated[i : i + cfg.requests_items] for i in range(0, size, cfg.requests_items)]


def responder(cfg: Config, best_first: list[str], rng) -> dict[str, float]:
    """What one person names of a theme's unseen titles: the best ones, each with chance disagreement any other instead."""
    left, out = list(best_first), {}
    while left and len(out) < cfg.requests_named:
        any_of = rng.random() < cfg.requests_disagreement
        out[left.pop(int(rng.integers(len(left))) if any_of else 0)] = 1.0
    return out


def load_requests(cfg: Config, split: str) -> Split:
    """Synthetic conversational recommendation with several answers per request, for lists of slate_size titles.

    A request names a mood, which is a theme, and two titles of it (seen, not to be recommended). 1 to
    requests_responders people answer; gold: every title that one of them named, with the number of those who did. The
    catalog lives in the weights; every prompt is without a pool.
    Demonstrations come from a careless teacher: the theme's unseen titles in their order, but from any of them on and
    around, with titles of other themes among them. So SFT teaches form and themes, and leaves the best titles, their
    order and the avoidance of strays for reinforcement to find. A request (mood, titles) belongs to one split, by hash.
    """
    themes = requests_catalog(cfg)
    catalog = [title for theme in themes for title in theme]
    rng = np.random.default_rng([cfg.data_seed, 5, ("train", "valid", "test").index(split)])
    share = {"train": range(0, 8), "valid": range(8, 9), "test": range(9, 10)}[split]
    wanted = cfg.requests_examples if split == "train" else max(1, cfg.requests_examples // 8)
    examples, people, asked, tries = [], Counter(), 0, 0
    while asked < wanted:
        tries += 1
        if tries > 200 * wanted + 10_000:
            fail(f"--data requests has too few different requests for a {split} split: raise --requests_themes or "
                 f"--requests_items (reached {asked} of {wanted})")  # fmt: skip
        t = int(rng.integers(cfg.requests_themes))
        seen = [themes[t][i] for i in rng.permutation(cfg.requests_items)[:2]]
        request = "\n".join([WAYS[rng.integers(len(WAYS))].format(mood=MOODS[t]), *seen])
        if stable_hash("\n".join([MOODS[t], *sorted(seen)])) % 10 not in share:
            continue
        unseen = [title for title in themes[t] if title not in seen]
        responders = [responder(cfg, unseen, rng) for _ in range(rng.integers(1, cfg.requests_responders + 1))]
        others = [title for title in catalog if title not in themes[t]]
        start, n = int(rng.integers(len(unseen))), min(cfg.slate_size, len(unseen))
        strays = [str(others[i]) for i in rng.permutation(len(others))[:n]]
        shown = [strays[j] if rng.random() < STRAY else unseen[(start + j) % len(unseen)] for j in range(n)]
        demo = write_demo(cfg, catalog, shown, shown)
        prompt = write_prompt(cfg, "request", [], request=request)
        id = f"{split}-{asked}"
        asked += 1
        named = Counter(title for r in responders for title in r)
        people.update(named)
        if split == "train" and cfg.draw == "row":
            examples += [
                Example(f"{id}/{i}", prompt, catalog, r, demo, seen, [r], seen) for i, r in enumerate(responders)
            ]
        else:
            gold = {title: float(c) for title, c in named.most_common()}
            examples.append(Example(id, prompt, catalog, gold, demo, seen, responders, seen))
    popularity = dict(people) if split == "train" else load_requests(cfg, "train").popularity
    return Split(examples, {}, popularity, catalog)


# ---------------------------------------------------------------------------------------------------------------------
# Built-in mazes

EAGER = 20_000  # so many mazes are made at once at load; more of them when they are needed


def load_maze(cfg: Config, split: str) -> Split:
    """Mazes of maze_size x maze_size squares (maze.py); the answer is a walk, and demonstrations are targets.

    A maze belongs to one split, by its hash: half of all mazes to train, a quarter each to valid and test. valid and test:
    the first maze_held_out different ones that are drawn; within training equal ones may repeat, as often as they are likely
    (all the time in small sizes: there are 192 mazes of 7 x 7). Training maze i is a pure function of (data_seed, i), so a
    million of them never lie in memory. Their prompts all have one length, and the longest answer is known, so nothing has
    to be looked at before it is used.
    """
    size, held = cfg.maze_size, cfg.maze_held_out
    share = {"train": (0, 1), "valid": (2,), "test": (3,)}[split]
    if 4 * held > (different := maze.count(size)):
        fail(f"--maze_held_out {held}: there are {different} different mazes of --maze_size {size}, and test and valid have "
             f"about a quarter each")  # fmt: skip
    if cfg.max_new_tokens < (longest := maze.longest(size)):
        fail(
            f"--max_new_tokens {cfg.max_new_tokens}: an answer to a maze of --maze_size {size} may have {longest} tokens"
        )

    def example(i: int, made: dict) -> Example:
        return Example(f"{split}-{i}", maze.write_grid(made["grid"]), demo=maze.write_path(made["path"]), answer=made,
                       check=cfg.maze_success)  # fmt: skip

    def drawn(*key: int) -> tuple[str, dict] | None:
        """The maze of a key and its name, if it belongs to the split."""
        made = maze.make(size, [cfg.data_seed, 6, *key])
        name = "".join(made["grid"])
        return (name, made) if stable_hash(name) % 4 in share else None

    def train(i: int) -> Example:
        return example(i, next(d for attempt in itertools.count() if (d := drawn(0, i, attempt)))[1])

    if split == "train":
        examples = Lazy(cfg.maze_examples, train)
        examples = list(examples) if len(examples) <= EAGER else examples
        return Split(examples, vocabulary=maze.VOCABULARY)
    mazes: dict[str, dict] = {}
    for i in range(200 * held + 10_000):
        mazes |= [d] if (d := drawn(share[0], i)) else []
        if len(mazes) == held:
            break
    else:
        fail(f"--maze_held_out {held}: only {len(mazes)} different mazes of --maze_size {size} came up for {split}")
    return Split([example(i, made) for i, made in enumerate(mazes.values())], vocabulary=maze.VOCABULARY)


# ---------------------------------------------------------------------------------------------------------------------
# Names of items, pools


ARTICLES = (
    "The A An La Le Les L' Un Une Des Il Lo I Gli Uno Una El Los Las De Det Den En Ett Et Het Een "
    "Der Die Das Dem Ein Eine O Os As Um Uma Da"
).split()
LONGEST = 1000  # characters of an item's name
BULLETS = "-*• "  # an answer's line of these alone names nothing
ARTICLE_LAST = re.compile(rf"(\s*(?:a\.?k\.?a\.? )?)([^()]+), ({'|'.join(ARTICLES)})(?=\s*(?:[()]|$))")


def item_name(text: str) -> str:
    """An item's name as shown; "" where no answer can give it: nothing but bullets, or longer than LONGEST."""
    shown = clean(text)
    return shown if shown.strip(BULLETS) and len(shown) <= LONGEST else ""


def spaced(cfg: Config, text: str) -> str:
    """Text from files without the tags of an answer: a space behind the first character, </SLATE> -> < /SLATE>.

    Or an answer that names the item would end its own phase there. All texts of an example are written so (items, history,
    gold), so the item can be found all the same. Special tokens of a chat template need no such thing: see encode.
    """
    while answer_of(cfg) == "phases" and (tag := next((t for t in cfg.tags if t in text), None)):
        text = text.replace(tag, f"{tag[0]} {tag[1:]}" if len(tag) > 1 else " ")
    return text


def restore_article(title: str) -> str:
    """'Postman, The (Postino, Il) (1994)' -> 'The Postman (Il Postino) (1994)'; each parenthesis on its own."""
    if ", " not in title:
        return title
    return ARTICLE_LAST.sub(lambda m: m[1] + m[3] + ("" if m[3] == "L'" else " ") + m[2], title)


def tell_apart(names: list[str]) -> list[str]:
    """Equal names -> 'x', 'x (2)', 'x (3)': an item is its name, so no two may share one. Case does not tell them apart: an
    answer is read without it."""
    taken, seen, out = {name.casefold() for name in names}, set(), []
    for name in names:
        if name.casefold() in seen:
            name = next(n for k in itertools.count(2) if (n := f"{name} ({k})").casefold() not in taken)
        taken.add(name.casefold())
        seen.add(name.casefold())
        out.append(name)
    return out


def draw_outside(rng, weight_sum: np.ndarray, taken: set[int], k: int) -> list[int]:
    """k different indices outside taken, each draw in proportion to its weight; weight_sum: cumulated weights (n,).

    Draws that hit are thrown away and repeated: costs nothing per item of the catalog. The caller makes sure that k
    indices of positive weight exist.
    """
    found: dict[int, None] = {}
    while len(found) < k:
        draws = np.searchsorted(weight_sum, rng.random(2 * k) * weight_sum[-1], side="right")
        found.update((i, None) for i in draws.tolist() if i not in taken)
    return list(found)[:k]


# ---------------------------------------------------------------------------------------------------------------------
# Next item: MovieLens, LastFM


def gather(events, named) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str], Counter]:
    """events: (user, item id, time, why it does not count or ""), in file order; named: (item id, name).

    -> users, items, times (rows,) of the events that count; names: item number -> name; what was dropped and why.
    """
    number, names, dropped = {}, [], Counter()
    for id, name in named:
        if name:
            number[id] = len(names)
            names.append(name)
    users, items, times = array("q"), array("q"), array("q")  # 8 bytes a number, where a list takes up to 40
    for user, id, time, why in events:
        if id not in number:
            dropped["item without a name"] += 1
        elif why:
            dropped[why] += 1
        else:
            users.append(user)
            items.append(number[id])
            times.append(time)
    return *(np.array(a, np.int64) for a in (users, items, times)), tell_apart(names), dropped


def spans(users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each row of sorted users (rows,): the first row of its user, and how many the user has."""
    _, first, who, count = np.unique(users, return_index=True, return_inverse=True, return_counts=True)
    return first[who], count[who]


def sequences(users, items, times, dropped: Counter) -> tuple[np.ndarray, np.ndarray]:
    """Rows by user, then time, then place in the file; each item at its first place; users with 3 items or more."""
    order = np.lexsort((times, users))  # stable
    users, items = users[order], items[order]
    pair = users * (items.max(initial=0) + 1) + items  # one number per (user, item)
    kept = np.sort(np.unique(pair, return_index=True)[1])
    dropped["item the user already had"] += len(users) - len(kept)
    users, items = users[kept], items[kept]
    _, length = spans(users)
    dropped["user with fewer than 3 items"] += len(np.unique(users[length < 3]))
    return users[length >= 3], items[length >= 3]


def next_item(cfg: Config, split: str, events, named) -> Split:
    """Interactions (see gather) -> next-item examples.

    Leave-last-out: the last item of a user's sequence is the test target, the one before the valid target, and every
    earlier one with something before it a train target. The prompt has the cfg.history items before the target.
    Pool: the target and negatives that the user has nowhere in the sequence, out of all items that anyone has, uniform
    or in proportion to their count in the training part (a pool is smaller where these run out). Without show_pool the
    candidates of all examples are one shared list, and the pool only serves the demonstration; with demo_order chain that
    is what the user took next, in order, as far as the training part goes.
    Everything is arrays until max_examples has chosen, so tens of millions of rows fit in a few GB.
    """
    users, items, times, names, dropped = gather(events, ((id, spaced(cfg, name)) for id, name in named))
    known = np.bincount(items, minlength=len(names))[items] >= cfg.min_count
    dropped["interaction with an item below --min_count"] += int((~known).sum())
    users, items = sequences(users[known], items[known], times[known], dropped)
    start, length = spans(users)
    place = np.arange(len(users)) - start
    left = length - place  # 1: the user's last item
    rows = np.flatnonzero({"train": (left > 2) & (place > 0), "valid": left == 2, "test": left == 1}[split])

    count = np.bincount(items[left > 2], minlength=len(names))
    weight = count if cfg.negatives == "popularity" else np.bincount(items, minlength=len(names)) > 0
    weight_sum, drawable = np.cumsum(weight), np.count_nonzero(weight)
    catalog = [names[i] for i in np.unique(items)]
    examples, user = [], None
    for row in sample(cfg, rows, dropped):
        if users[row] != user:
            user, begin = users[row], start[row]
            taken = set(items[begin : begin + length[row]].tolist())
            free = drawable - np.count_nonzero(weight[list(taken)])
        id = f"{user}/{place[row] + 1}"
        rng = example_rng(cfg, id)
        *history, target = [names[i] for i in items[max(begin, row - cfg.history) : row + 1].tolist()]
        pool = [target, *(names[i] for i in draw_outside(rng, weight_sum, taken, min(cfg.pool_size - 1, free)))]
        rng.shuffle(pool)
        gold = {target: 1.0}
        if cfg.demo_order == "chain":
            stop = max(row + 1, begin + length[row] - 2)  # never a valid or test target of the user
            ahead = [names[i] for i in items[row : min(row + cfg.slate_size, stop)].tolist()]
            demo = write_demo(cfg, catalog, ahead, ahead[: cfg.rank_size], history[-1])
        else:
            demo = demonstrate(cfg, pool, gold, rng, history[-1])
        prompt = write_prompt(cfg, "recommend", pool, history=history)
        examples.append(Example(id, prompt, pool if cfg.show_pool else catalog, gold, demo, history))
    return Split(examples, +dropped, {names[i]: int(count[i]) for i in np.flatnonzero(count)}, catalog)


def whole(text: str) -> int:
    """int() alone would also take 1_0, blanks around a number and digits of other scripts."""
    if not (
        text.isascii() and text.removeprefix("-").isdecimal() and len(text) < 20 and abs(number := int(text)) < 2**63
    ):
        raise ValueError(text)
    return number


def ident(text: str) -> int:
    """The number of a user or an item, small enough that sequences() can make one number of a pair of them."""
    if not 0 <= (number := whole(text)) < 2**40:
        raise ValueError(text)
    return number


def part_of_date(text: str) -> int:
    if not 0 <= (number := whole(text)) < 10_000:
        raise ValueError(text)
    return number


STARS = {text: i / 2 for i in range(1, 11) for text in {f"{i / 2}", f"{i / 2:g}"}}  # 0.5, 1, 1.0, ..., 5, 5.0
RATING = {"userId": ident, "movieId": ident, "rating": STARS.__getitem__, "timestamp": whole}
MOVIE = {"movieId": ident, "title": str, "genres": str}
U_ITEM = {"movie id": ident, "movie title": str, **{f"field {i}": str for i in range(2, 24)}}  # dates, URL, 19 genres
MOVIELENS = {  # ratings file -> separator; titles file, its separator, columns and encoding; do they have a header?
    "ratings.csv": (",", "movies.csv", ",", MOVIE, "utf-8", True),
    "u.data": ("\t", "u.item", "|", U_ITEM, "iso-8859-1", False),
    "ratings.dat": ("::", "movies.dat", "::", MOVIE, "iso-8859-1", False),
}


def load_movielens(cfg: Config, split: str) -> Split:
    """MovieLens latest-small, 20M, 25M, 32M (csv), 100K (u.data) and 1M (::), told apart by their file names.

    Items are titles with the article in front. Dropped: ratings below min_rating, and those of movies without a title.
    """
    paths = find(cfg, "ml-latest-small ml-latest ml-100k ml-1m ml-20m ml-25m ml-32m".split(), list(MOVIELENS))
    if len(paths) > 1:
        fail(f"several MovieLens sets: {', '.join(paths)}; name the folder of one with --data_dir")
    place, name = os.path.split(paths[0])
    sep, movies, movies_sep, columns, encoding, header = MOVIELENS[name]
    titles = table(cfg, os.path.join(place, movies), movies_sep, columns, header, encoding, unique=True)
    named = ((movie, restore_article(item_name(title))) for movie, title, *_ in titles)
    low = "rating below --min_rating"
    ratings = table(cfg, paths[0], sep, RATING, header)
    events = ((user, movie, time, low if stars < cfg.min_rating else "") for user, movie, stars, time in ratings)
    return next_item(cfg, split, events, named)


ARTIST = {"id": ident, "name": str, "url": str, "pictureURL": str}
TAGGED = {
    "userID": ident,
    "artistID": ident,
    "tagID": whole,
    "day": part_of_date,
    "month": part_of_date,
    "year": part_of_date,
}
TAGGED_STAMPS = {"userID": ident, "artistID": ident, "tagID": whole, "timestamp": whole}  # milliseconds since 1970


def load_lastfm(cfg: Config, split: str) -> Split:
    """HetRec 2011 Last.fm 2K: artists in the order in which a user first tagged them (listening counts have no time).

    With user_taggedartists-timestamps.dat times are milliseconds; without it they are dates, nearly all the first of a
    month, so most order comes from the tie-break, and the published rows of a user are sorted by artist id.
    Dropped: tags of artists that artists.dat has no name for, tags dated before Last.fm began (2002), repeated artists.
    """
    files = ["user_taggedartists-timestamps.dat", "user_taggedartists.dat"]
    path = find(cfg, ["lastfm-2k", "hetrec2011-lastfm-2k"], files)[0]
    artists = table(cfg, os.path.join(os.path.dirname(path), "artists.dat"), "\t", ARTIST, unique=True)
    named = ((artist, item_name(name)) for artist, name, *_ in artists)
    if path.endswith(files[0]):
        begin, tags = 1_009_843_200_000, table(cfg, path, "\t", TAGGED_STAMPS)
        timed = ((user, artist, time) for user, artist, _, time in tags)
    else:  # of a date only the order counts
        begin, tags = 2002 * 12 * 31, table(cfg, path, "\t", TAGGED)
        timed = ((user, artist, (year * 12 + month - 1) * 31 + day - 1) for user, artist, _, day, month, year in tags)
    early = "tag dated before 2002"
    return next_item(cfg, split, ((*row, early if row[2] < begin else "") for row in timed), named)


# ---------------------------------------------------------------------------------------------------------------------
# Passages that answer a question: HotpotQA, MuSiQue


@dataclass
class Question:
    """A QA record, texts as shown.

    passages   (title, text) of each
    gold       places of the passages that support the answer
    absent     how many supporting titles no passage has
    """

    id: str
    question: str
    passages: list[tuple[str, str]]
    gold: list[int]
    absent: int = 0


def retrieve(cfg: Config, split: str, parse: Callable[[dict], Question], folders, train, dev) -> Split:
    """QA records -> retrieval examples; train and dev: file names, the first found is read.

    The published test sets have no labels, so valid and test are the two halves of the dev file, by a hash of the id.
    Pool: the question's own passages; if fewer than pool_size, filled with passages of other questions of the split
    (titles that the question has not); if more, cut at random without losing gold. Then shuffled, equal titles told
    apart. Dropped: questions none of whose passages is gold.
    """
    if not cfg.show_pool:
        fail(f"--data {cfg.data} has its passages in the prompt: use --show_pool true")
    path = find(cfg, folders, train if split == "train" else dev)[0]
    questions, dropped = [], Counter()
    for n, record in enumerate(records(cfg, path), 1):
        try:
            q = parse(record)
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            damaged(cfg, f"{path} record {n}", f"no {cfg.data} record: {type(e).__name__} {e}")
        if split != "train" and (stable_hash(q.id) % 2 == 1) != (split == "test"):
            continue
        q.question = spaced(cfg, q.question)
        q.passages = [(spaced(cfg, title), spaced(cfg, text)) for title, text in q.passages]
        dropped["supporting title without a passage"] += q.absent
        dropped["question without a supporting passage"] += not q.gold
        if q.gold:
            questions.append(q)
    for q, id in zip(questions, tell_apart([q.id for q in questions])):
        q.id = id
    bank = list(dict(p for q in questions for p in q.passages).items())  # one passage per title
    number = {title: i for i, (title, _) in enumerate(bank)}
    even = np.arange(1, len(bank) + 1)
    examples = []
    for q in sample(cfg, questions, dropped):
        rng = example_rng(cfg, q.id)
        others = [p for i, p in enumerate(q.passages) if i not in q.gold]
        room = max(0, cfg.pool_size - len(q.gold))
        if len(others) > room:
            others = [others[i] for i in rng.permutation(len(others))[:room]]
        taken = {number[title] for title, _ in q.passages}
        fill = min(room - len(others), len(bank) - len(taken))
        pool = [q.passages[i] for i in q.gold] + others + [bank[i] for i in draw_outside(rng, even, taken, fill)]
        shuffled = rng.permutation(len(pool))
        names = tell_apart([pool[i][0] for i in shuffled])
        texts = {name: pool[i][1] for name, i in zip(names, shuffled)}
        gold = {name: 1.0 for name, i in zip(names, shuffled) if i < len(q.gold)}
        prompt = write_prompt(cfg, "retrieve", names, texts, question=q.question)
        examples.append(Example(q.id, prompt, names, gold, demonstrate(cfg, names, gold, rng, q.question)))
    return Split(examples, +dropped)


def shown(text: str) -> str:
    return clean(html.unescape(text_of(text)))


def parse_hotpotqa(record: dict) -> Question:
    """Official record or hub columns. Supporting titles match undecoded, texts show decoded (&amp; -> &).

    Whole passages are retrieved, so the sentence indices, of which some are out of range, play no part.
    """
    context, facts = record["context"], record["supporting_facts"]
    if isinstance(context, dict):
        context = list(zip(list_of(context["title"]), list_of(context["sentences"]), strict=True))
        wanted = {text_of(title) for title in list_of(facts["title"])}
    else:
        context, wanted = list_of(context), {text_of(title) for title, *_ in map(list_of, list_of(facts))}
    passages = [
        (item_name(html.unescape(text_of(title))) or "untitled", shown("".join(list_of(sentences))))
        for title, sentences in context
    ]
    titles = [title for title, _ in context]
    question = shown(record["question"])
    id = record.get("_id") or record.get("id") or f"{stable_hash(question):016x}"  # some hub copies have lost the id
    gold = [i for i, title in enumerate(titles) if title in wanted]
    return Question(id_of(id), question, passages, gold, len(wanted.difference(titles)))


def parse_musique(record: dict) -> Question:
    """Paragraphs are known by their place: titles repeat within a record."""
    paragraphs = list_of(record["paragraphs"])
    passages = [(item_name(text_of(p["title"])) or "untitled", clean(text_of(p["paragraph_text"]))) for p in paragraphs]
    support = [p["is_supporting"] for p in paragraphs]
    if not all(isinstance(s, bool) for s in support):
        raise TypeError("is_supporting is neither true nor false")
    gold = [i for i, s in enumerate(support) if s]
    return Question(id_of(record["id"]), clean(text_of(record["question"])), passages, gold)


def load_hotpotqa(cfg: Config, split: str) -> Split:
    """HotpotQA, distractor setting: official JSON or hub columns, array or lines; 2 gold of mostly 10 passages."""
    train = ["hotpot_train_v1.1.json", "hotpot_train_sample.json", "train.json"]
    dev = ["hotpot_dev_distractor_v1.json", "hotpot_dev_distractor_v1.sample.json", "validation.json",
           "validation_first100.json"]  # fmt: skip
    return retrieve(cfg, split, parse_hotpotqa, ["hotpotqa"], train, dev)


def load_musique(cfg: Config, split: str) -> Split:
    """MuSiQue-Ans: 2 to 4 gold of 20 passages."""
    train = ["musique_ans_v1.0_train.jsonl", "musique_train_sample.json"]
    dev = ["musique_ans_v1.0_dev.jsonl", "musique_ans_sample.jsonl"]
    return retrieve(cfg, split, parse_musique, ["musique", "musique/data", "data"], train, dev)


# ---------------------------------------------------------------------------------------------------------------------
# The list


DATASETS |= {
    "world": Dataset(load_world, "synthetic next-item recommendation, difficulty is a setting"),
    "requests": Dataset(
        load_requests, "synthetic requests in words, several people answer; answers are lists of titles"
    ),
    "maze": Dataset(load_maze, "mazes to walk through; size and criterion are settings; answers are checked walks"),
    "movielens": Dataset(
        load_movielens,
        "next movie of a user: MovieLens latest-small, 100K, 1M, 20M, 25M or 32M",
        "https://grouplens.org/datasets/movielens/",
    ),
    "lastfm": Dataset(
        load_lastfm,
        "next artist that a user tags: HetRec 2011 Last.fm 2K",
        "https://files.grouplens.org/datasets/hetrec2011/hetrec2011-lastfm-2k.zip",
    ),
    "hotpotqa": Dataset(
        load_hotpotqa,
        "passages needed to answer a question: HotpotQA distractor setting, 2 gold",
        "http://curtis.ml.cmu.edu/datasets/hotpot/ (hotpot_train_v1.1.json, hotpot_dev_distractor_v1.json)",
    ),
    "musique": Dataset(
        load_musique,
        "passages needed to answer a multi-hop question: MuSiQue-Ans, 2 to 4 gold",
        "https://github.com/StonyBrookNLP/musique (musique_ans_v1.0_train.jsonl, musique_ans_v1.0_dev.jsonl)",
    ),
    **problems.ROWS,
}


def load(cfg: Config, split: str | None = None) -> Split:
    """One split of cfg.data, cut to max_examples by a seeded draw that keeps the order. Lazy examples are sound as they are."""
    if cfg.data not in DATASETS:
        fail(f"--data {cfg.data!r} is not one of {', '.join(DATASETS)}")
    split = split or cfg.split
    loaded = DATASETS[cfg.data].load(cfg, split)
    if not isinstance(loaded.examples, Lazy):
        loaded.examples = sound(cfg, loaded)
    loaded.examples = sample(cfg, loaded.examples, loaded.dropped)
    if not loaded.examples:
        fail(f"--data {cfg.data}: no usable example in split {split!r}; dropped: {loaded.dropped or 'nothing'}")
    return loaded


def sound(cfg: Config, loaded: Split) -> list[Example]:
    """The examples that can be asked and answered; the others are counted in loaded.dropped."""
    pools = {id(e.candidates): e.candidates for e in loaded.examples}
    pools = {k: (set(pool), fault_of_pool(cfg, pool)) for k, pool in pools.items()}
    out, dropped = [], Counter(loaded.dropped)
    for e in loaded.examples:
        if e.check:
            why = ""  # a problem names no items
        else:
            items, why = pools[id(e.candidates)]
            why = why or ("" if e.gold else "no gold") or ("" if items.issuperset(e.gold) else "gold outside the pool")
        if why := why or ("" if is_text(e.prompt + e.demo) else "text that is not UTF-8"):
            dropped[why] += 1
        else:
            out.append(e)
    loaded.dropped = dict(dropped)
    return out


def fault_of_pool(cfg: Config, pool: list[str]) -> str:
    """Why no answer could name the items of a pool, or tell them apart; "" if it can."""
    tags = cfg.tags if answer_of(cfg) == "phases" else []
    if not pool:
        return "empty pool"
    if len({" ".join(item.split()).casefold() for item in pool}) < len(pool):
        return "item twice in the pool"
    if any("\n" in item or not item.strip(BULLETS) or not is_text(item) for item in pool):
        return "item that is no line of text"
    return "item with a tag in it" if any(t in item for t in tags for item in pool) else ""


def encode(tokenizer, prompt: str, tags=(), system="") -> list[int]:
    """Prompt -> ids, through the chat template where the tokenizer has one; at most one BOS (F15).

    Only the template's own special tokens become such: see ordinary. tags: of the answer, which may be tokens of their own.
    """
    marked, mark = ordinary(tokenizer, prompt, tags)
    if tokenizer.chat_template:
        turns = [{"role": "system", "content": system}] if system else []
        turns.append({"role": "user", "content": marked})
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return ids_of(tokenizer, text, mark)
    ids = ids_of(tokenizer, marked, mark)
    return ids if tokenizer.bos_token_id is None else [tokenizer.bos_token_id, *ids]


def encode_answer(tokenizer, text: str, tags=()) -> list[int]:
    """Written answer -> ids, stop token included; it is the only one, whatever the text spells."""
    return [*ids_of(tokenizer, *ordinary(tokenizer, text, tags)), tokenizer.eos_token_id]


def ordinary(tokenizer, text: str, tags=()) -> tuple[str, str]:
    """Text from data in which no special token stands, and the mark that was put behind the first character of each.

    A title <|im_end|> would otherwise end the user's turn, or teach the model to stop in the middle of a demonstration.
    Cut at the marks and encoded piece by piece, it is the same characters in ordinary tokens. Text without such is left
    as it is, and so are white space (some tokenizers add tokens for indentation) and the tags.
    """
    names = [t.content for t in tokenizer.added_tokens_decoder.values() if len(t.content.strip()) > 1]
    names = [name for name in names if name in text and name not in tags]
    mark = next(c for c in map(chr, range(0xE000, 0xF900)) if c not in text)  # private use
    if names:
        text = re.sub(f"(?s)(?={'|'.join(map(re.escape, names))})(.)", rf"\1{mark}", text)
    return text, mark


def ids_of(tokenizer, text: str, mark: str) -> list[int]:
    """Ids of text cut at the marks."""
    return [i for part in tokenizer(text.split(mark), add_special_tokens=False)["input_ids"] for i in part]


def fit(split: Split, tokenizer, cfg: Config) -> tuple[Sequence[Example], Sequence[list[int]]]:
    """Examples and their prompt ids; prompts over max_prompt are left out and counted in split.dropped, never cut (F16).
    Of lazy ones, whose prompts have one length, the first speaks for all."""
    if cfg.system and not tokenizer.chat_template:
        fail("--system: the model's tokenizer has no chat template, so there is no place for a system message")
    prompts = each(lambda e: encode(tokenizer, e.prompt, cfg.tags, cfg.system), split.examples)
    lazy = isinstance(prompts, Lazy)
    pairs = list(zip(split.examples, prompts)) if not lazy else [(split.examples[0], prompts[0])]
    unknown = tokenizer.unk_token_id
    if unknown is not None and all(unknown in ids for _, ids in pairs):
        if not cfg.init:
            fail(f"--tokenizer {cfg.tokenizer}: made from the training examples, it knows the words of none of these "
                 f"{len(pairs)} prompts: load more examples, or use --tokenizer byte")  # fmt: skip
        fail(f"--init {cfg.init}: its tokenizer knows the words of none of these prompts; it was made from other data "
             f"(--data, --data_seed, --tokenizer?)")  # fmt: skip
    kept = [(e, ids) for e, ids in pairs if len(ids) <= cfg.max_prompt]
    if len(kept) < len(pairs):
        split.dropped["prompt longer than --max_prompt"] = len(pairs) - len(kept)
    if not kept:
        fail(
            f"--max_prompt {cfg.max_prompt}: every prompt is longer (the shortest has {min(len(i) for _, i in pairs)} tokens)"
        )
    return (split.examples, prompts) if lazy else ([e for e, _ in kept], [ids for _, ids in kept])


def order(n: int, seed: int, step: int, batch_size: int) -> list[int]:
    """Indices of the examples of one step, all different, a pure function of (seed, step) (F48).

    An epoch is a permutation cut into whole batches; the rest of it is left out (a batch across its end could hold a
    prompt twice, with the same samples).
    """
    epoch, at = divmod(step, n // batch_size)
    return np.random.default_rng([seed, 7, epoch]).permutation(n)[at * batch_size : (at + 1) * batch_size].tolist()


def main(argv: list[str]) -> None:
    from config import parse

    usage = "python data.py list | show NAME [--data_dir DIR] [--split test] [-n 2] [--init MODEL] [--any_field value]"
    if argv[:1] == ["list"]:
        for name, d in DATASETS.items():
            print(f"{name:12} {d.what}\n{'':12} {d.where}")
        return
    if len(argv) < 2 or argv[0] != "show":
        fail(f"usage: {usage}")
    n, rest = 2, argv[2:]
    if "-n" in rest:
        at = rest.index("-n")
        if not re.fullmatch("[0-9]{1,9}", "".join(rest[at + 1 : at + 2])):
            fail("-n needs a whole number")
        n, rest = int(rest[at + 1]), rest[:at] + rest[at + 2 :]
    cfg = parse([*rest, "--data", argv[1]], training=False)
    split = load(cfg)
    from model import load_tokenizer

    tokenizer = load_tokenizer(cfg, split.examples, split.catalog, split.vocabulary)
    examples, prompts = fit(split, tokenizer, cfg)
    lengths = [len(p) for p in itertools.islice(prompts, EAGER)]
    print(f"{cfg.data} {cfg.split}: {len(examples)} examples; prompt tokens {min(lengths)}..{max(lengths)}")
    for why, count in split.dropped.items():
        print(f"  left out {count}: {why}")
    for e, ids in itertools.islice(zip(examples, prompts), n):
        # passages are cut to a line each; the line with the tags is the instruction, which is not
        words = [w if len(w) <= 160 or cfg.tags[0] in w else f"{w[:140]}... (+{len(w) - 140} characters)"
                 for w in e.prompt.split("\n")]  # fmt: skip
        tokens = " ".join(repr(tokenizer.decode([i])) for i in ids[:60])
        out = [
            "",
            f"--- {e.id}, prompt of {len(ids)} tokens",
            *words,
            f"tokens: {tokens} {'...' if len(ids) > 60 else ''}",
        ]
        if e.candidates and (not cfg.show_pool or cfg.data in LISTS):
            out.append(f"catalog: {len(e.candidates)} titles, such as {' | '.join(e.candidates[:10])}")
        if e.check:
            out.append(f"answer ({e.check}): {e.answer}")
        else:
            out.append("gold: " + ", ".join(f"{item} ({utility:g})" for item, utility in e.gold.items()))
        out += [f"responder {i}: {', '.join(named)}" for i, named in enumerate(e.responders, 1)]
        out += ["demonstration:", *e.demo.split("\n")] if e.demo else []
        print("\n".join(map(printable, out)))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head
    main(sys.argv[1:])
