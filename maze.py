"""Mazes: generator, words, and the two ways to say whether a walk is right. Pure functions, no model.

    #########    Cells lie on odd coordinates, the open passages between them form a tree, so one simple path leads from
    #S#...#.#    the start (upper left) to the goal (lower right): the target. The model reads the grid a word per square
    #.#.#.#.#    and writes moves of one square, then DONE.
    #...#..G#    walk: the moves lead to the goal through no wall (MaxRL, arXiv 2602.02710); ways back and forth are fine.
    #########    target: the moves are the target, move by move. Focal GRPO (arXiv 2602.06717) does not say which it used.

The task, its words and their ids are those of MaxRL's public description; the code is ours. data.load_maze makes examples.
"""

import functools
import math

import numpy as np

MOVES = {"UP": (-1, 0), "DOWN": (1, 0), "LEFT": (0, -1), "RIGHT": (0, 1)}  # word -> step in (row, column)
WORD = {"#": "WALL ", ".": "PATH ", "S": "START ", "G": "GOAL "}  # square of the grid -> word, white space behind it
VOCABULARY = [  # in the order of the published ids
    *("<pad>", "<bos>", "<eos>", "<unk>", "GRID_START\n", "GRID_END\n", "PATH_START\n", "DONE", *(WORD[c] for c in ".#GS")),
    *("NEWLINE\n", *(f"{move} " for move in MOVES), "\n", *(f"RESERVED_{i} " for i in range(18, 32))),
]  # fmt: skip


@functools.cache
def neighbours(side: int) -> list[list[int]]:
    """Cells beside each cell of a square of side x side cells, numbered row by row."""
    at = [divmod(c, side) for c in range(side * side)]
    steps = list(MOVES.values())
    return [[(r + y) * side + x + s for y, s in steps if 0 <= r + y < side and 0 <= x + s < side] for r, x in at]


def spanning_tree(side: int, rng: np.random.Generator) -> list[int]:
    """Randomised Prim from cell 0: always open a passage drawn evenly from those that lead out of the tree -> the cell from
    which each cell was reached (cell 0: itself)."""
    beside = neighbours(side)
    came, inside = [0] * len(beside), [False] * len(beside)
    inside[0] = True
    edges = [(0, c) for c in beside[0]]
    draws = iter(rng.random(2 * side * (side - 1)).tolist())  # an edge is drawn at most once in one direction
    while edges:
        i = int(next(draws) * len(edges))
        edges[i], edges[-1] = edges[-1], edges[i]
        a, b = edges.pop()
        if inside[b]:
            continue
        came[b], inside[b] = a, True
        edges += [(b, c) for c in beside[b] if not inside[c]]
    return came


def draw(came: list[int]) -> list[str]:
    """A tree of cells -> rows of # wall, . path, S start, G goal."""
    side = math.isqrt(len(came))
    size = 2 * side + 1
    grid = [["#"] * size for _ in range(size)]
    for b, a in enumerate(came):
        (rb, cb), (ra, ca) = divmod(b, side), divmod(a, side)
        grid[2 * rb + 1][2 * cb + 1] = grid[rb + ra + 1][cb + ca + 1] = "."
    grid[1][1], grid[-2][-2] = "S", "G"
    return ["".join(row) for row in grid]


def target(came: list[int]) -> list[str]:
    """The moves of the only simple path from cell 0 to the last cell, two a cell."""
    side, cell, out = math.isqrt(len(came)), len(came) - 1, []
    words = {step: word for word, step in MOVES.items()}
    while cell:
        (r, c), (y, x) = divmod(cell, side), divmod(came[cell], side)
        out += [words[r - y, c - x]] * 2
        cell = came[cell]
    return out[::-1]


def make(size: int, key: list[int]) -> dict:
    """The maze of a key (size x size squares, size odd): {"grid": rows, "path": moves of the target}, a pure function."""
    came = spanning_tree(size // 2, np.random.default_rng(key))
    return {"grid": draw(came), "path": " ".join(target(came))}


def count(size: int) -> int:
    """How many different mazes there are: spanning trees of the square of cells, by their known product formula."""
    side, product = size // 2, 1.0
    waves = [2 - 2 * math.cos(math.pi * k / side) for k in range(side)]
    for a in waves:
        for b in waves:
            product *= a + b or 1 / side**2
    return round(product)


def longest(size: int) -> int:
    """Most tokens of an answer: a path through all cells, DONE and the end token."""
    return 2 * ((size // 2) ** 2 - 1) + 2


def write_grid(grid: list[str]) -> str:
    """Grid -> prompt; <bos> comes with the tokenizer."""
    rows = "".join("".join(WORD[square] for square in row) + "NEWLINE\n" for row in grid)
    return f"GRID_START\n{rows}GRID_END\nPATH_START\n"


def write_path(path: str) -> str:
    """Moves -> demonstration; <eos> comes with the tokenizer."""
    return f"{path} DONE"


# ---------------------------------------------------------------------------------------------------------------------
# Right or wrong


def moves_of(text: str) -> list[str] | None:
    """Moves before DONE; None where DONE is missing or another word comes before it. What follows DONE does not matter."""
    said, done, _ = text.partition("DONE")
    moves = said.split()
    return moves if done and all(m in MOVES for m in moves) else None


def reaches(grid: list[str], moves: list[str]) -> bool:
    """Do the moves lead from the start to the goal through no wall? The walk ends at the goal: what follows is not walked."""
    r, c = 1, 1
    for move in moves:
        y, x = MOVES[move]
        r, c = r + y, c + x
        if grid[r][c] == "#":  # the rim is wall, so no walk leaves the grid
            return False
        if grid[r][c] == "G":
            return True
    return False


def check(text: str, maze: dict, success: str) -> dict[str, float]:
    """Both criteria of an answer; success: the one that is the reward. exact: the stricter one, target."""
    moves = moves_of(text)
    said = {"walk": moves is not None and reaches(maze["grid"], moves), "target": moves == maze["path"].split()}
    return {"reward": float(said[success]), "walk": float(said["walk"]), "exact": float(said["target"]),
            "invalid": float(moves is None)}  # fmt: skip


def check_walk(text: str, maze: dict) -> dict[str, float]:
    """The walk reaches the goal (MaxRL)."""
    return check(text, maze, "walk")


def check_target(text: str, maze: dict) -> dict[str, float]:
    """The answer is the target, move by move."""
    return check(text, maze, "target")
