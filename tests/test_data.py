"""data.py: published formats with their quirks, from made-up rows; real samples where DATA_DIR is set."""

import json
import os

import numpy as np
import pytest

import data
from config import Config

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
HTML = b"\n<!DOCTYPE HTML>\n<html><body>Sign in</body></html>\n"


def load(name, folder, split="test", **settings) -> data.Split:
    return data.load(Config(data=name, data_dir=str(folder), **settings), split)


def error_of(capsys, call) -> str:
    """The one line on stderr of a call that must end with exit code 2."""
    with pytest.raises(SystemExit) as stop:
        call()
    assert stop.value.code == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1, text
    return text


def seen(split: data.Split) -> list:
    return [(e.id, e.history, list(e.gold)) for e in split.examples]


# ---------------------------------------------------------------------------------------------------------------------
# The built-in world


def test_a_history_of_the_world_belongs_to_one_split_and_may_repeat_in_it():
    """Few clean histories: each is drawn as often as it is likely, in valid and test too, and never in two splits."""
    cfg = Config(show_pool=False, history=3, world_clusters=3, world_items=5, world_gold=2, world_noise=0.2, slate_size=4,
                 world_examples=800)  # fmt: skip
    splits = {s: data.load(cfg, s) for s in ("train", "valid", "test")}
    histories = {s: [tuple(e.history) for e in split.examples] for s, split in splits.items()}
    assert [len(h) for h in histories.values()] == [800, 100, 100]
    assert all(len(set(h)) < len(h) for h in histories.values())
    assert sum(len(set(h)) for h in histories.values()) == len(set().union(*histories.values()))
    catalog = [title for circle in data.world_catalog(cfg) for title in circle]
    for split in splits.values():
        assert split.catalog == catalog and split.popularity == splits["train"].popularity and split.dropped == {}
        assert len({e.id for e in split.examples}) == len(split.examples)
    assert splits["test"] == data.load(cfg, "test")


def test_the_gold_of_the_world_is_what_comes_next_on_the_circle():
    cfg = Config(history=4, world_noise=0.0, world_examples=80, world_clusters=20)
    circles = data.world_catalog(cfg)
    for e in data.load(cfg, "train").examples:
        circle = next(c for c in circles if e.history[0] in c)
        at = circle.index(e.history[0])
        walk = [circle[(at + i) % 10] for i in range(7)]
        assert walk[:4] == e.history and e.gold == dict(zip(walk[4:], (3.0, 2.0, 1.0)))
        assert set(e.gold) <= set(e.candidates) and len(set(e.candidates)) == len(e.candidates) == cfg.pool_size


# ---------------------------------------------------------------------------------------------------------------------
# Forms of an answer


THREE = {"tags": ["<P>", "</P>", "<S>", "</S>", "<R>", "</R>"], "phases": ["plan", "slate", "rank"]}


@pytest.mark.parametrize("show_pool, order", ((True, "shuffled"), (True, "pool"), (False, "chain")))
def test_a_demonstrated_list_is_the_ranking_and_then_the_rest_of_the_slate(show_pool, order):
    """The same draws as with phases, other form: a title a line, each line ended, no tags."""
    kw = {"show_pool": show_pool, "demo_order": order, "world_examples": 30}
    for e, listed in zip(
        data.load(Config(**kw), "train").examples, data.load(Config(answer="list", **kw), "train").examples
    ):
        body = e.demo.split("\n")
        slate, ranking = body[1 : body.index("</SLATE>")], body[body.index("<RANK>") + 1 : -1]
        assert listed.demo == "".join(f"{i}\n" for i in [*ranking, *(i for i in slate if i not in ranking)])
        assert (listed.prompt, listed.gold, listed.candidates) == (e.prompt, e.gold, e.candidates)


def test_a_demonstrated_plan_is_one_line_of_the_request():
    cfg = Config(world_examples=20, **THREE)
    for e, two in zip(data.load(cfg, "train").examples, data.load(Config(world_examples=20), "train").examples):
        plan = f"<P>\n{e.history[-1]}\n</P>\n"
        assert e.demo.startswith(plan)
        words = two.demo
        for old, new in zip(Config().tags, cfg.tags[2:]):
            words = words.replace(old, new)
        assert e.demo == plan + words
    for e in data.load(Config(world_examples=5, show_pool=False, **THREE), "train").examples:
        assert e.demo.startswith(f"<P>\n{e.history[-1]}\n</P>\n<S>")
    swapped = Config(
        world_examples=5, tags=["<S>", "</S>", "<P>", "</P>", "<R>", "</R>"], phases=["slate", "plan", "rank"]
    )
    for e in data.load(swapped, "train").examples:
        assert f"</S>\n<P>\n{e.history[-1]}\n</P>\n<R>" in e.demo


def test_instruct_prompts_ask_for_the_form_that_is_demonstrated():
    def prompt(**settings) -> str:
        return data.load(Config(template="instruct", world_examples=8, **settings), "test").examples[0].prompt

    phases, three, listed = prompt(), prompt(**THREE), prompt(answer="list")
    assert all(t in phases for t in Config().tags) and all(t in three for t in THREE["tags"])
    assert "Before that" in three and "Before that" not in phases
    middle = prompt(tags=THREE["tags"], phases=["slate", "plan", "rank"])
    assert (
        "Between the two" in middle
        and "between <P> and </P>, one per line" in middle
        and "between <S> and </S>." in middle
    )
    assert "best first, one per line" in listed and not any(t in listed for t in Config().tags)
    assert "10 titles" in listed


# ---------------------------------------------------------------------------------------------------------------------
# Built-in requests


def requests(split="train", **settings) -> data.Split:
    return data.load(Config(data="requests", **{"requests_examples": 400, **settings}), split)


def test_a_request_belongs_to_one_split_and_its_titles_are_seen_not_gold():
    splits = {s: requests(s) for s in ("train", "valid", "test")}
    assert [len(s.examples) for s in splits.values()] == [400, 50, 50]
    themes = data.requests_catalog(Config())
    asked = {s: {frozenset(e.seen) for e in split.examples} for s, split in splits.items()}
    assert sum(map(len, asked.values())) == len(set().union(*asked.values()))
    for split in splits.values():
        assert split.catalog == [t for theme in themes for t in theme] and len(set(split.catalog)) == 12 * 16
        assert split.popularity == splits["train"].popularity and len({e.id for e in split.examples}) == len(
            split.examples
        )
        for e in split.examples:
            mood, *titles, end = e.prompt.split("\n")
            (theme,) = [t for t in themes if e.seen[0] in t]
            assert titles == e.seen and len(titles) == 2 and end == "" and data.MOODS[themes.index(theme)] in mood
            assert set(e.seen) <= set(theme) and not set(e.seen) & set(e.gold) and set(e.gold) <= set(theme)
            assert e.candidates == split.catalog and 1 <= len(e.responders) <= 5
            assert all(len(r) == 3 for r in e.responders)
            assert e.gold == {i: sum(i in r for r in e.responders) for r in e.responders for i in r}
            assert list(e.gold.values()) == sorted(e.gold.values(), reverse=True)
    assert {len(e.responders) for e in splits["train"].examples} == {1, 2, 3, 4, 5}
    counts = splits["train"].popularity
    assert sum(counts.values()) == sum(3 * len(e.responders) for e in splits["train"].examples)
    assert splits["test"] == requests("test") != requests("test", data_seed=1)


def test_disagreement_runs_from_the_same_best_titles_to_any_of_the_theme():
    themes = data.requests_catalog(Config())
    for e in requests(requests_disagreement=0.0).examples:
        (theme,) = [t for t in themes if e.seen[0] in t]
        best = [i for i in theme if i not in e.seen][:3]
        assert all(list(r) == best for r in e.responders)
    free = requests(requests_disagreement=1.0, requests_examples=1500).examples
    places = np.array(
        [next(t for t in themes if e.seen[0] in t).index(i) for e in free for r in e.responders for i in r]
    )
    share = np.bincount(places, minlength=16) / len(places)
    assert len(places) > 10_000 and abs(share - 1 / 16).max() < 0.01
    half = requests(requests_disagreement=0.5, requests_responders=4).examples
    sizes = [len(e.gold) for e in half if len(e.responders) == 4]
    assert 3 < np.mean(sizes) < 12 and max(len(e.responders) for e in half) == 4


def test_rows_are_requests_taken_apart_by_responder_for_training_only():
    """ReMaRk trains on requests, Rank-GRPO on rows: a request is drawn as often as it has responders."""
    by_request, by_row = requests().examples, requests(draw="row").examples
    assert len(by_row) == sum(len(e.responders) for e in by_request)
    rows = iter(by_row)
    for e in by_request:
        for i, named in enumerate(e.responders):
            row = next(rows)
            assert row.id == f"{e.id}/{i}" and row.gold == named and row.responders == [named]
            assert (row.prompt, row.seen, row.demo) == (e.prompt, e.seen, e.demo)
    for split in ("valid", "test"):
        assert requests(split, draw="row") == requests(split)


def test_the_teacher_of_the_requests_knows_the_theme_but_neither_the_start_nor_to_stay():
    """A fifth of the lines is of other themes; the rest runs around the theme's unseen titles from anywhere on."""
    themes = data.requests_catalog(Config())
    firsts, strays, lines = [], 0, 0
    for e in requests(requests_examples=1000).examples:
        (theme,) = [t for t in themes if e.seen[0] in t]
        unseen = [t for t in theme if t not in e.seen]
        shown = e.demo.splitlines()
        assert e.demo.endswith("\n") and len(shown) == len(set(shown)) == 10 and not set(shown) & set(e.seen)
        own = [(j, unseen.index(t)) for j, t in enumerate(shown) if t in theme]
        starts = {(at - j) % len(unseen) for j, at in own}
        assert len(starts) == 1
        firsts += starts
        strays += sum(t not in theme for t in shown)
        lines += len(shown)
    assert abs(strays / lines - data.STRAY) < 0.02 and set(firsts) == set(range(14))


def test_too_many_themes_or_requests_end_in_one_line(capsys, monkeypatch):
    for settings, word in (
        ({"requests_themes": 99}, "24 themes"),
        ({"requests_themes": 24, "requests_items": 100}, "titles"),
    ):
        assert word in error_of(capsys, lambda settings=settings: requests(**settings))
    few = requests(requests_themes=2, requests_items=5)  # few requests repeat within a split, as in the world
    assert len(few.examples) == 400 > len({e.prompt for e in few.examples})
    monkeypatch.setattr(data, "stable_hash", lambda text: 0)  # all of them belong to train
    assert "too few" in error_of(capsys, lambda: requests("test"))


# ---------------------------------------------------------------------------------------------------------------------
# MovieLens

RATINGS = [  # user, movie, rating, time: neither sorted by user nor by time, with equal times
    (2, 10, 5.0, 400), (1, 13, 4.0, 300), (1, 11, 4.0, 100), (2, 11, 3.0, 100), (1, 12, 0.5, 100),
    (1, 10, 5.0, 200), (2, 13, 1.0, 200), (3, 10, 4.0, 100), (3, 11, 4.0, 200), (1, 14, 2.0, 300), (2, 12, 3.0, 200),
]  # fmt: skip
TITLES = {
    10: "Alpha (1990)",
    11: "Café, The (1991)",
    12: "Gamma Plan (1992) ",
    13: "Delta, with Comma (1993)",
    14: "Epsilon",
}
SHOWN = {
    10: "Alpha (1990)",
    11: "The Café (1991)",
    12: "Gamma Plan (1992)",
    13: "Delta, with Comma (1993)",
    14: "Epsilon",
}


def write_latest(folder, ratings=RATINGS, titles=TITLES):
    """ml-latest-small: CRLF, header, UTF-8, quoted titles."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = ["userId,movieId,rating,timestamp", *(f"{u},{m},{r},{t}" for u, m, r, t in ratings)]
    (folder / "ratings.csv").write_bytes("".join(f"{r}\r\n" for r in rows).encode())
    quoted = {m: t.replace('"', '""') for m, t in titles.items()}
    rows = ["movieId,title,genres", *(f'{m},"{t}",Drama|War' for m, t in quoted.items())]
    (folder / "movies.csv").write_bytes("".join(f"{r}\r\n" for r in rows).encode())
    return folder


def write_100k(folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "u.data").write_text("".join(f"{u}\t{m}\t{r:g}\t{t}\n" for u, m, r, t in RATINGS))
    items = [f"{m}|{t}|01-Jan-1990||http://x/{m}|{'|'.join('0' * 19)}\n" for m, t in TITLES.items()]
    (folder / "u.item").write_bytes("".join(items).encode("iso-8859-1") + b"\n")
    return folder


def write_1m(folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ratings.dat").write_text("".join(f"{u}::{m}::{r:g}::{t}\n" for u, m, r, t in RATINGS))
    (folder / "movies.dat").write_bytes("".join(f"{m}::{t}::Drama\n" for m, t in TITLES.items()).encode("iso-8859-1"))
    return folder


def write_many(folder, users=40, movies=60, length=12, seed=0):
    """Enough rows for full pools; movie m is the more popular the smaller m is."""
    rng = np.random.default_rng(seed)
    p = 1 / np.arange(1, movies + 1)
    rows = []
    for u in range(1, users + 1):
        for t, m in enumerate(rng.choice(movies, length, replace=False, p=p / p.sum())):
            rows.append((u, int(m) + 1, 4.0, t))
    return write_latest(folder, rows, {m: f"Movie {m} (2000)" for m in range(1, movies + 1)})


def names(*movies):
    return [SHOWN[m] for m in movies]


def test_sequences_are_in_time_order_with_ties_in_file_order_and_the_last_two_left_out(tmp_path):
    """User 1 by time, equal times in file order: 11 12, 10, 13 14. User 2: 11, 13 12, 10. User 3 has two items."""
    write_latest(tmp_path)
    assert seen(load("movielens", tmp_path, "test")) == [
        ("1/5", names(11, 12, 10, 13), names(14)), ("2/4", names(11, 13, 12), names(10))]  # fmt: skip
    assert seen(load("movielens", tmp_path, "valid")) == [
        ("1/4", names(11, 12, 10), names(13)), ("2/3", names(11, 13), names(12))]  # fmt: skip
    assert seen(load("movielens", tmp_path, "train")) == [
        ("1/2", names(11), names(12)), ("1/3", names(11, 12), names(10)), ("2/2", names(11), names(13))]  # fmt: skip
    assert load("movielens", tmp_path).dropped == {"user with fewer than 3 items": 1}
    assert seen(load("movielens", tmp_path, "test", history=2))[0] == ("1/5", names(10, 13), names(14))


def test_a_chain_is_what_the_user_took_next_within_the_training_part(tmp_path):
    """User 1 by time: 11 12 10 | 13 14. The last two are the valid and the test target: no demonstration may name them."""
    write_latest(tmp_path)
    options = {"show_pool": False, "demo_order": "chain", "slate_size": 3, "rank_size": 2}
    train = load("movielens", tmp_path, "train", **options)
    tags = Config().tags
    shown = lambda slate, ranking: "\n".join([tags[0], *slate, tags[1], tags[2], *ranking, tags[3]])  # noqa: E731
    assert [e.demo for e in train.examples] == [
        shown(names(12, 10), names(12, 10)), shown(names(10), names(10)), shown(names(13), names(13))]  # fmt: skip
    assert all(e.candidates == train.catalog for e in train.examples)


def test_popularity_counts_the_training_part_only(tmp_path):
    counts = {SHOWN[11]: 2, SHOWN[12]: 1, SHOWN[10]: 1, SHOWN[13]: 1}
    for split in ("train", "valid", "test"):
        assert load("movielens", write_latest(tmp_path), split).popularity == counts


@pytest.mark.parametrize("write, folder", [(write_100k, "ml-100k"), (write_1m, "ml-1m"), (write_latest, "ml-25m")])
def test_every_layout_gives_the_same_examples_also_from_the_folder_above(tmp_path, write, folder):
    write(tmp_path / "new" / folder)
    write_latest(tmp_path / "old")
    for split in ("train", "valid", "test"):
        want = load("movielens", tmp_path / "old", split).examples
        assert want == load("movielens", tmp_path / "new", split).examples
        assert want == load("movielens", tmp_path / "new" / folder, split).examples


@pytest.mark.parametrize("raw, shown", [
    ("Usual Suspects, The (1995)", "The Usual Suspects (1995)"),
    ("City of Lost Children, The (Cité des enfants perdus, La) (1995)",
     "The City of Lost Children (La Cité des enfants perdus) (1995)"),
    ("Good, the Bad and the Ugly, The (Buono, il brutto, il cattivo, Il) (1966)",
     "The Good, the Bad and the Ugly (Il Buono, il brutto, il cattivo) (1966)"),
    ("Bear, The (Ours, L') (1988)", "The Bear (L'Ours) (1988)"),
    ("His Secret Life (a.k.a. Ignorant Fairies, The) (Fate ignoranti, Le) (2001)",
     "His Secret Life (a.k.a. The Ignorant Fairies) (Le Fate ignoranti) (2001)"),
    ("Boot, Das (Boat, The) (1981)", "Das Boot (The Boat) (1981)"),
    ("Mariachi, El (1992)", "El Mariachi (1992)"),
    ("Twilight Zone, The", "The Twilight Zone"),
    ("Monsters, Inc. (2001)", "Monsters, Inc. (2001)"),
    ("I, Robot (2004)", "I, Robot (2004)"),
    ("Strike! (a.k.a. That, The Bird) (1998)", "Strike! (a.k.a. That, The Bird) (1998)"),
    ("Land Before Time III, A (1995) (V)", "A Land Before Time III (1995) (V)"),
])  # fmt: skip
def test_articles_come_to_the_front(raw, shown):
    assert data.restore_article(raw) == shown


def test_titles_are_one_clean_line_and_never_equal(tmp_path):
    titles = {
        **TITLES,
        11: "Alpha (1990) ",
        12: "Alpha\u00a0\t(1990)",
        13: "Alpha (1990) (2)",
        14: '11\'09""01, \u200bThe',
    }
    split = load("movielens", write_latest(tmp_path, titles=titles), "test", show_pool=False)
    assert split.examples[0].candidates == [
        "Alpha (1990)", "Alpha (1990) (3)", "Alpha (1990) (4)", "Alpha (1990) (2)", 'The 11\'09""01']  # fmt: skip


def test_ratings_without_title_or_too_low_are_dropped_and_counted(tmp_path):
    write_latest(tmp_path, [*RATINGS, (1, 99, 5.0, 1), (1, 98, 5.0, 1)])
    assert load("movielens", tmp_path).dropped["item without a name"] == 2
    split = load("movielens", tmp_path, "test", min_rating=2.0)  # user 1 loses 12, user 2 loses 13
    assert split.dropped["rating below --min_rating"] == 2
    assert [e.history for e in split.examples] == [names(11, 10, 13), names(11, 12)]


@pytest.mark.parametrize("negatives", ["uniform", "popularity"])
def test_pools_hold_the_target_and_negatives_the_user_never_had(tmp_path, negatives):
    write_many(tmp_path)
    full = {e.id.split("/")[0]: {*e.history, *e.gold} for e in load("movielens", tmp_path, history=99).examples}
    assert set(map(len, full.values())) == {12}
    for split in ("train", "valid", "test"):
        for e in load("movielens", tmp_path, split, negatives=negatives, history=3).examples:
            assert len(set(e.candidates)) == len(e.candidates) == 20
            assert set(e.candidates) & full[e.id.split("/")[0]] == set(e.gold)
            assert list(e.gold.values()) == [1.0] and len(e.history) <= 3
            assert e.prompt.endswith("Pool:\n" + "\n".join(e.candidates) + "\n")
            assert set(e.demo.split("\n")) <= {*e.candidates, "<SLATE>", "</SLATE>", "<RANK>", "</RANK>"}
    places = [e.candidates.index(*e.gold) for e in load("movielens", tmp_path, "train").examples]
    assert set(places) == set(range(20))  # shuffled: the target may be anywhere


def test_a_pool_is_smaller_where_negatives_run_out(tmp_path):
    write_latest(tmp_path)
    assert [len(e.candidates) for e in load("movielens", tmp_path).examples] == [1, 2]  # 5 items; users with 5 and 4


def test_draws_depend_on_data_seed_and_the_example_alone(tmp_path):
    write_many(tmp_path)
    full = load("movielens", tmp_path, "train").examples
    assert load("movielens", tmp_path, "train", seed=5).examples == full
    assert [e.candidates for e in load("movielens", tmp_path, "train", data_seed=1).examples] != [
        e.candidates for e in full
    ]
    few = load("movielens", tmp_path, "train", max_examples=50)
    assert len(few.examples) == 50 and few.dropped["beyond --max_examples"] == len(full) - 50
    assert few.examples == [e for e in full if e in few.examples]  # same examples, same order
    assert few == load("movielens", tmp_path, "train", max_examples=50)
    assert few.popularity == load("movielens", tmp_path, "train").popularity


def test_popularity_negatives_follow_training_counts(tmp_path):
    """Movie 60 is the last one of many users: frequent in the data, never in the training part, so never a negative."""
    rows = [(u, m, 4.0, t) for u in range(1, 31) for t, m in enumerate([1 + u % 2, 3 + u, 40 + u % 9, 60])]
    rows += [(99, m, 4.0, m) for m in range(70, 80)]
    write_latest(tmp_path, rows, {m: f"M{m}" for m in range(1, 90)})
    split = load("movielens", tmp_path, "valid", negatives="popularity", pool_size=6)
    drawn = [c for e in split.examples for c in e.candidates if c not in e.gold]
    assert "M60" not in split.popularity and split.popularity["M1"] == split.popularity["M2"] == 15
    assert set(drawn) <= set(split.popularity)
    often = sum(drawn.count(m) for m in ("M1", "M2")) / len(split.examples)
    assert often > 0.8  # weight 15 of 53 left, 5 draws: 0.85 expected; uniform would give about 0.1
    uniform = load("movielens", tmp_path, "valid", pool_size=6).examples
    assert sum(c in ("M1", "M2") for e in uniform for c in e.candidates) / len(uniform) < 0.4


def test_without_a_shown_pool_all_examples_share_one_catalog(tmp_path):
    write_many(tmp_path)
    split = load("movielens", tmp_path, "train", show_pool=False)
    assert all(e.candidates is split.examples[0].candidates for e in split.examples)
    rated = {n for e in load("movielens", tmp_path, history=99).examples for n in [*e.history, *e.gold]}
    assert set(split.examples[0].candidates) == rated
    assert all("Pool" not in e.prompt and e.demo.count("\n") == 18 for e in split.examples)


def test_several_sets_in_one_folder_are_not_guessed_at(tmp_path, capsys):
    write_100k(tmp_path / "ml-100k")
    write_1m(tmp_path / "ml-1m")
    assert "--data_dir" in error_of(capsys, lambda: load("movielens", tmp_path))
    assert load("movielens", tmp_path / "ml-1m").examples


# ---------------------------------------------------------------------------------------------------------------------
# Last.fm


def write_lastfm(folder, stamps=False):
    """Artist 9 has no name, artist 8 a blank one; user 3 has two artists after the beginning of 2002."""
    folder.mkdir(parents=True, exist_ok=True)
    artists = {1: '"Weird Al" Yankovic', 2: "#####", 3: "Björk\u00a0", 4: "Royce da 5'9\"", 5: "!!!", 8: " "}
    rows = ["id\tname\turl\tpictureURL", *(f"{i}\t{n}\thttp://x/{i}\t" for i, n in artists.items())]
    (folder / "artists.dat").write_bytes("".join(f"{r}\r\n" for r in rows).encode())
    tags = [(2, 1, "1 1 2009"), (2, 1, "1 3 2010"), (2, 9, "1 1 2009"), (2, 3, "1 2 2009"), (2, 2, "1 2 2009"),
            (2, 4, "1 12 2008"), (2, 5, "1 1 1956"), (7, 5, "1 1 2010"), (7, 4, "9 1 2010"), (7, 1, "1 2 2010"),
            (7, 8, "1 3 2010"), (3, 1, "31 12 2001"), (3, 2, "1 1 2002"), (3, 4, "1 2 2002")]  # fmt: skip
    rows = ["userID artistID tagID day month year", *(f"{u} {a} 6 {date}" for u, a, date in tags)]
    (folder / "user_taggedartists.dat").write_bytes("".join(f"{r}\r\n" for r in rows).replace(" ", "\t").encode())
    if stamps:  # user 2 the other way round
        rows = ["2 4 6 1300000004000", "2 2 6 1300000003000", "2 1 6 1300000001000", "2 3 6 1300000002000"]
        rows = ["userID artistID tagID timestamp", *rows, "2 5 6 -434246400000", "2 5 6 1009843199999"]
        (folder / "user_taggedartists-timestamps.dat").write_text("".join(f"{r}\n" for r in rows).replace(" ", "\t"))
    return folder


def test_lastfm_orders_artists_by_their_first_tag(tmp_path):
    split = load("lastfm", write_lastfm(tmp_path / "lastfm-2k").parent)
    assert seen(split) == [
        ("2/4", ["Royce da 5'9\"", '"Weird Al" Yankovic', "Björk"], ["#####"]),  # equal dates: file order
        ("7/3", ["!!!", "Royce da 5'9\""], ['"Weird Al" Yankovic']),
    ]
    assert split.dropped == {"item without a name": 2, "tag dated before 2002": 2,
                             "item the user already had": 1, "user with fewer than 3 items": 1}  # fmt: skip


def test_lastfm_prefers_timestamps(tmp_path):
    split = load("lastfm", write_lastfm(tmp_path, stamps=True))
    assert seen(split)[0] == ("2/4", ['"Weird Al" Yankovic', "Björk", "#####"], ["Royce da 5'9\""])
    assert split.dropped["tag dated before 2002"] == 2


# ---------------------------------------------------------------------------------------------------------------------
# HotpotQA and MuSiQue


def hotpot(i, paragraphs=10, facts=((0, 0), (1, 1))):
    """Question i with its own titles 'T{i}.{j}'; sentences keep their leading space."""
    context = [
        [f"T{i}.{j}", [f"First of {i}.{j}.", f" Second &amp; last\u00a0of\u200e {i}.{j}."]] for j in range(paragraphs)
    ]
    return {"_id": f"id{i}", "question": f"Question {i}?", "answer": "yes", "type": "bridge", "level": "hard",
            "supporting_facts": [[f"T{i}.{j}", s] for j, s in facts], "context": context}  # fmt: skip


def hub(record):
    """The same record in hub columns."""
    context = {"title": [t for t, _ in record["context"]], "sentences": [s for _, s in record["context"]]}
    facts = {"title": [t for t, _ in record["supporting_facts"]], "sent_id": [s for _, s in record["supporting_facts"]]}
    rest = {k: v for k, v in record.items() if k != "_id"}
    return {**rest, "id": record["_id"], "context": context, "supporting_facts": facts}


def write_hotpot(folder, rows, name="hotpot_train_v1.1.json"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(rows), encoding="utf-8")
    return folder


def test_hotpotqa_fills_pools_to_size_from_other_questions(tmp_path):
    rows = [hotpot(i, paragraphs=4 if i == 3 else 10) for i in range(6)]
    rows[1]["context"][5] = rows[0]["context"][5]  # a title that two questions share is not filled in twice
    split = load("hotpotqa", write_hotpot(tmp_path, rows), "train")
    assert [e.id for e in split.examples] == [f"id{i}" for i in range(6)] and not split.dropped
    for i, e in enumerate(split.examples):
        own = {t for t, _ in rows[i]["context"]}
        assert len(set(e.candidates)) == len(e.candidates) == 20 and own <= set(e.candidates)
        assert set(e.gold) == {f"T{i}.0", f"T{i}.1"} and set(e.gold.values()) == {1.0}
        assert e.prompt.startswith(f"Question {i}?\nPool:\n{e.candidates[0]}: First of ")
        assert f"T{i}.0: First of {i}.0. Second & last of {i}.0." in e.prompt.split("\n")
        assert len(e.prompt.split("\n")) == 23
    assert split.examples[0].candidates[:10] != sorted(split.examples[0].candidates)[:10]
    assert split.examples == load("hotpotqa", tmp_path, "train").examples
    filled = [set(e.candidates) for e in load("hotpotqa", tmp_path, "train", data_seed=3).examples]
    assert filled != [set(e.candidates) for e in split.examples]


def test_hotpotqa_cuts_pools_without_losing_gold(tmp_path):
    write_hotpot(tmp_path, [hotpot(i, facts=((8, 0), (9, 0))) for i in range(30)])
    for e in load("hotpotqa", tmp_path, "train", pool_size=5, slate_size=5).examples:
        assert len(e.candidates) == 5 and len(e.gold) == 2 and set(e.gold) <= set(e.candidates)


def test_hotpotqa_hub_columns_equal_the_official_layout(tmp_path):
    rows = [hotpot(i) for i in range(9)]
    write_hotpot(tmp_path / "a", rows, "hotpot_dev_distractor_v1.json")
    write_hotpot(tmp_path / "b", [hub(r) for r in rows], "validation.json")
    for split in ("valid", "test"):
        assert load("hotpotqa", tmp_path / "a", split).examples == load("hotpotqa", tmp_path / "b", split).examples


def test_hotpotqa_without_ids_gets_stable_different_ones(tmp_path):
    rows = [{k: v for k, v in hotpot(i).items() if k != "_id"} for i in (1, 2, 2)]
    ids = [e.id for e in load("hotpotqa", write_hotpot(tmp_path, rows), "train").examples]
    assert len(set(ids)) == 3 and ids[2] == f"{ids[1]} (2)"


def test_valid_and_test_are_the_two_halves_of_dev(tmp_path):
    write_hotpot(tmp_path / "hotpotqa", [hotpot(i) for i in range(40)], "hotpot_dev_distractor_v1.json")
    ids = {s: {e.id for e in load("hotpotqa", tmp_path, s).examples} for s in ("valid", "test")}
    assert not ids["valid"] & ids["test"] and len(ids["valid"] | ids["test"]) == 40 and min(map(len, ids.values())) > 8
    pools = {s: {c.split(".")[0] for e in load("hotpotqa", tmp_path, s).examples for c in e.candidates} for s in ids}
    assert not pools["valid"] & pools["test"]  # pools are filled within a split


def test_hotpotqa_tolerates_what_the_published_files_hold(tmp_path):
    rows = [hotpot(i) for i in range(5)]
    rows[0]["context"][0][0] = rows[0]["supporting_facts"][0][0] = (
        "Eddie &quot;The Eagle&quot; & Harris, Forbes &amp; Co."
    )
    rows[1]["supporting_facts"][0][0] = "Absent"
    rows[2]["supporting_facts"] = [["Absent", 0], ["Gone", 0]]
    rows[3]["supporting_facts"][0][1] = 99
    rows[4]["context"][0][1] = []
    split = load("hotpotqa", write_hotpot(tmp_path, rows), "train")
    gold = {e.id: set(e.gold) for e in split.examples}
    assert gold == {"id0": {'Eddie "The Eagle" & Harris, Forbes & Co.', "T0.1"}, "id1": {"T1.1"},
                    "id3": {"T3.0", "T3.1"}, "id4": {"T4.0", "T4.1"}}  # fmt: skip
    assert split.dropped == {"supporting title without a passage": 3, "question without a supporting passage": 1}


def musique(i, n=20):
    """Paragraphs out of order; titles repeat: 0, 5, 10, 15 are all 'Town'. Gold: idx 5 and 7."""
    titles = ["Town" if j % 5 == 0 else f"P{i}.{j}" for j in range(n)]
    texts = [f"\ufeffText\u2028{i}.{j}" for j in range(n)]
    paragraphs = [{"idx": j, "title": titles[j], "paragraph_text": texts[j], "is_supporting": j in (5, 7)}
                  for j in reversed(range(n))]  # fmt: skip
    return {"id": f"2hop__{i}", "question": f"Q{i} >> x?", "answer": "a", "answer_aliases": [], "answerable": True,
            "paragraphs": paragraphs, "question_decomposition": []}  # fmt: skip


def test_musique_tells_equal_titles_apart(tmp_path):
    rows = "".join(json.dumps(musique(i), ensure_ascii=False) + "\n" for i in range(3))  # U+2028 inside: not a line end
    (tmp_path / "musique_ans_v1.0_train.jsonl").write_text(rows, encoding="utf-8")
    for i, e in enumerate(load("musique", tmp_path, "train").examples):
        assert {"Town", "Town (2)", "Town (3)", "Town (4)"} <= set(e.candidates) and len(set(e.candidates)) == 20
        shown = dict(line.split(": ", 1) for line in e.prompt.split("\n")[2:-1])
        assert {shown[g] for g in e.gold} == {f"Text {i}.5", f"Text {i}.7"} and list(shown) == e.candidates


def test_array_and_lines_are_told_apart_by_the_first_character(tmp_path):
    rows = [musique(i) for i in range(3)]
    for sub, text in {
        "lines": "\n\n".join(map(json.dumps, rows)),
        "array": "\ufeff\n " + json.dumps(rows, indent=1),
    }.items():
        (tmp_path / sub).mkdir()
        (tmp_path / sub / "musique_train_sample.json").write_text(text, encoding="utf-8")
    examples = load("musique", tmp_path / "lines", "train").examples
    assert len(examples) == 3 and examples == load("musique", tmp_path / "array", "train").examples


def test_passages_need_a_shown_pool(tmp_path, capsys):
    write_hotpot(tmp_path, [hotpot(0)])
    assert "--show_pool true" in error_of(capsys, lambda: load("hotpotqa", tmp_path, "train", show_pool=False))


# ---------------------------------------------------------------------------------------------------------------------
# Bad files: one line, exit code 2, which file, where, what to do


@pytest.mark.parametrize("name, folder, source", [
    ("movielens", "ml-latest-small", "https://grouplens.org/datasets/movielens/"),
    ("lastfm", "lastfm-2k", "hetrec2011-lastfm-2k.zip"),
    ("hotpotqa", "hotpotqa", "curtis.ml.cmu.edu"),
    ("musique", "musique", "StonyBrookNLP/musique"),
])  # fmt: skip
def test_a_missing_file_says_where_to_get_it_and_where_to_put_it(tmp_path, capsys, name, folder, source):
    text = error_of(capsys, lambda: load(name, tmp_path / "none"))
    assert source in text and str(tmp_path / "none" / folder) in text and "--data_dir" in text


HEADER = b"userId,movieId,rating,timestamp\r\n"
BAD = [  # layout, file, its bytes (None: removed), what the message must hold
    (write_latest, "movies.csv", None, ["movies.csv", "No such file"]),
    (write_latest, "ratings.csv", b"", ["ratings.csv", "empty"]),
    (write_latest, "ratings.csv", b"\n\n", ["ratings.csv", "empty"]),
    (write_latest, "ratings.csv", LFS, ["ratings.csv", "Git LFS pointer", "git lfs pull"]),
    (write_1m, "ratings.dat", HTML, ["ratings.dat", "web page"]),
    (write_latest, "ratings.csv", HEADER + b"1,10,4.0,9\r\n1,11,4", ["ratings.csv line 3", "3 columns instead of 4"]),
    (write_latest, "ratings.csv", HEADER + b"1,10,four,9\r\n", ["ratings.csv line 2", "not a number", "four"]),
    (write_latest, "ratings.csv", HEADER + b"1,10,nan,9\r\n", ["ratings.csv line 2", "not a number", "nan"]),
    (write_latest, "ratings.csv", HEADER + b"1,10,4.0,9.5s\r\n", ["ratings.csv line 2", "9.5s"]),
    (write_latest, "ratings.csv", b"user,item\n1,2\n", ["ratings.csv line 1", "columns"]),
    (write_latest, "ratings.csv", b"user,item,rating,timestamp\n1,2,3,4\n", ["ratings.csv line 1", "header"]),
    (write_latest, "movies.csv", b"movieId,title,genres\n1,Caf\xe9,x\n", ["movies.csv line 2", "0xe9", "utf-8"]),
    (write_latest, "movies.csv", b'movieId,title,genres\n1,A,x\n2,"Half a ti', ["movies.csv line 3", "cut short"]),
    (write_latest, "movies.csv", b'movieId,title,genres\n1,"A" B,x\n', ["movies.csv line 2", "damaged"]),
    (write_100k, "u.item", b"1|Toy|\n", ["u.item line 1", "3 columns instead of 24"]),
    (write_100k, "u.data", b"1\t10\t4\t9\n1\t10\n", ["u.data line 2", "2 columns"]),
    (write_1m, "movies.dat", "1::Café::x\n".encode(), ["movies.dat line 1", "UTF-8", "iso-8859-1"]),
    (write_1m, "ratings.dat", b"1::10::4::9\n1::10::4::x\n", ["ratings.dat line 2", "'1::10::4::x'"]),
]  # fmt: skip


@pytest.mark.parametrize("write, name, content, words", BAD)
def test_bad_rating_files(tmp_path, capsys, write, name, content, words):
    write(tmp_path)
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_bytes(content)
    text = error_of(capsys, lambda: load("movielens", tmp_path))
    assert all(w in text for w in [*words, "https://grouplens.org/datasets/movielens/"]), text


@pytest.mark.parametrize("content, words", [
    (b"", ["empty"]),
    (LFS, ["Git LFS pointer"]),
    (HTML, ["web page"]),
    (json.dumps([musique(0), musique(1)]).encode()[:-2000], ["column", "ends early"]),
    (json.dumps([musique(0)]).encode()[:-1], ["column", "ends early"]),
    (json.dumps(musique(0)).encode() + b"\n" + json.dumps(musique(1)).encode()[:300], ["line 2", "ends early"]),
    (b'[{"id": "cut in a str', ["line 1, column 9", "ends early"]),
    (b'{"id": 1}\n', ["record 1", "paragraphs"]),
    (b'[{"id": "x", "question": "q", "paragraphs": [{"idx": 0}]}]', ["record 1", "title"]),
    (b"[1, 2]", ["record 1", "TypeError"]),
    (b"hello\n", ["line 1, column 1", "not JSON"]),
    (b'{"id": "\xff"}\n', ["line 1", "0xff", "utf-8"]),
])  # fmt: skip
def test_bad_json_files(tmp_path, capsys, content, words):
    (tmp_path / "musique_train_sample.json").write_bytes(content)
    text = error_of(capsys, lambda: load("musique", tmp_path, "train"))
    assert all(w in text for w in [*words, "musique_train_sample.json", "StonyBrookNLP/musique"]), text


def test_no_usable_example_says_what_was_dropped(tmp_path, capsys):
    write_latest(tmp_path, [(1, 10, 4.0, 1), (1, 11, 4.0, 2)])
    text = error_of(capsys, lambda: load("movielens", tmp_path))
    assert "no usable example" in text and "fewer than 3 items" in text


# ---------------------------------------------------------------------------------------------------------------------
# The command


def test_show_prints_an_example_and_list_names_every_source(tmp_path, capsys):
    data.main(["list"])
    listed = capsys.readouterr().out
    assert all(name in listed and d.where in listed for name, d in data.DATASETS.items())
    write_hotpot(tmp_path, [{**hotpot(0), "context": [["T0.0", ["long " * 99]], ["T0.1", ["short"]]]}])
    data.main(["show", "hotpotqa", "--data_dir", str(tmp_path), "--split", "train", "-n", "1"])
    out = capsys.readouterr().out
    assert "Question 0?" in out and "characters)" in out and max(map(len, out.split("\n"))) < 1000
    assert "gold: T0." in out and "demonstration:\n<SLATE>" in out
    data.main(["show", "requests", "-n", "1"])
    out = capsys.readouterr().out
    assert "responder 1:" in out and "catalog: 192 titles" in out and "<SLATE>" not in out


# ---------------------------------------------------------------------------------------------------------------------
# Real samples

real = pytest.mark.skipif(not os.environ.get("DATA_DIR"), reason="DATA_DIR is not set to a folder with real data")


def real_file(*path):
    path = os.path.join(os.environ["DATA_DIR"], *path)
    if not os.path.exists(path):
        pytest.skip(f"{path} is not there")
    return path


@real
def test_real_movielens_latest_small():
    folder = os.path.dirname(real_file("ml-latest-small", "ratings.csv"))
    split = load("movielens", folder, "test")
    users, ratings = len(split.examples), sum(split.popularity.values()) + 2 * len(split.examples)
    assert (users, ratings) in [(488, 78_471), (610, 100_836)]  # the sample, the official file
    train = load("movielens", folder, "train", max_examples=300)
    assert train.dropped == {"beyond --max_examples": ratings - 3 * users - 300}
    titles = load("movielens", folder, "test", show_pool=False).examples[0].candidates
    assert len(set(titles)) == len(titles) and not any(t != " ".join(t.split()) for t in titles)
    assert {"The Usual Suspects (1995)", "La Haine (1995)", "Saturn 3 (1980)"} & set(titles)
    assert not [t for t in titles if ", The (" in t or t.endswith(", The")]


@real
def test_real_lastfm_sample():
    folder = os.path.dirname(real_file("lastfm-2k", "user_taggedartists.dat"))
    split = load("lastfm", folder, "test")
    if os.path.exists(os.path.join(folder, "user_taggedartists-timestamps.dat")):
        pytest.skip("the full set, not the sample")
    assert len(split.examples) == 578 and split.dropped["tag dated before 2002"] == 2
    kept = sum(split.popularity.values()) + 2 * 578
    assert len(load("lastfm", folder, "train").examples) == kept - 3 * 578


@real
def test_real_hotpotqa_samples():
    folder = os.path.dirname(real_file("hotpotqa", "hotpot_train_sample.json"))
    counts = {s: len(load("hotpotqa", folder, s).examples) for s in ("train", "valid", "test")}
    assert counts["train"] == 100 and counts["valid"] + counts["test"] == 120
    columns = os.path.join(folder, "hf_layout")
    assert sum(len(load("hotpotqa", columns, s).examples) for s in ("valid", "test")) == 100
    for e in load("hotpotqa", folder, "train").examples:
        assert len(e.candidates) == len(set(e.candidates)) == 20 and len(e.gold) == 2
        assert not {"&amp;", "&quot;", "\u200e", "\u00a0"} & set(e.prompt.replace(";", "; ").split(" "))


@real
def test_real_musique_samples():
    real_file("musique", "musique_ans_sample.jsonl")
    folder = os.path.dirname(real_file("musique", "musique_train_sample.json"))
    dev = [e for s in ("valid", "test") for e in load("musique", folder, s).examples]
    assert len(dev) == 120 and {len(e.candidates) for e in dev} == {20} and {len(e.gold) for e in dev} == {2}
    hops = [len(e.gold) for e in load("musique", folder, "train").examples]
    assert [hops.count(n) for n in (2, 3, 4)] == [68, 27, 5]


def test_a_number_beyond_64_bits_ends_in_one_line(tmp_path, capsys):
    folder = write_latest(tmp_path)
    with open(folder / "ratings.csv", "ab") as f:
        f.write(b"1,10,4.0,99999999999999999999\r\n")
    with pytest.raises(SystemExit):
        load("movielens", tmp_path)
    said = capsys.readouterr().err
    assert "ratings.csv line" in said and "not a number" in said and said.count("\n") == 1
