"""Arithmetic word problems with worked answers, made from a seed: text that a small model can learn to continue."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

NAMES = (
    "Maria", "Tom", "Aisha", "Ben", "Chen", "Dora", "Emil", "Fatima", "George", "Hana", "Ivan", "Julia", "Kofi", "Lena", "Milo",
    "Nora", "Omar", "Priya", "Quinn", "Rosa", "Sam", "Tara", "Uma", "Victor", "Wendy", "Yusuf", "Zoe", "Anna", "Carlos", "Elena",
)  # fmt: skip
THINGS = (
    "apples", "pencils", "marbles", "stamps", "books", "shells", "coins", "cards", "beads", "buttons", "cookies", "eggs", "flowers",
    "balloons", "stickers", "oranges", "ribbons", "candles", "tickets", "bottles", "plates", "stones", "toys", "cups",
)  # fmt: skip
BOXES = ("boxes", "bags", "baskets", "crates", "jars", "trays", "drawers", "rows", "piles", "shelves")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def problem(rng: Random) -> str:
    """One question with its worked answer, closed by an empty line."""
    question, steps, answer = rng.choice(KINDS)(rng)
    return f"Question: {question}\nAnswer: {' '.join(steps)} The answer is {answer}.\n\n"


def problems(num_bytes: int, seed: int) -> list[str]:
    """Problems of about ``num_bytes`` in all."""
    rng, made, total = Random(seed), [], 0
    while total < num_bytes:
        made.append(problem(rng))
        total += len(made[-1])
    return made


Made = tuple[str, list[str], int]


def _gain_and_give(rng: Random) -> Made:
    (a, b), thing = rng.sample(NAMES, 2), rng.choice(THINGS)
    start, gain = rng.randint(5, 60), rng.randint(2, 40)
    give = rng.randint(1, start + gain - 1)
    verb = rng.choice(("buys", "finds", "gets", "picks"))
    have = start + gain
    question = (
        f"{a} has {start} {thing}. {a} {verb} {gain} more and gives {give} to {b}. How many {thing} does {a} have now?"
    )
    steps = [
        f"{a} starts with {start} {thing}.",
        f"After that {a} {verb} {gain} more, so there are {start} + {gain} = {have} {thing}.",
        f"{a} gives {give} to {b}, which leaves {have} - {give} = {have - give} {thing}.",
    ]
    return question, steps, have - give


def _boxes(rng: Random) -> Made:
    a, thing, box = rng.choice(NAMES), rng.choice(THINGS), rng.choice(BOXES)
    num, each, extra = rng.randint(2, 12), rng.randint(2, 12), rng.randint(1, 30)
    question = (
        f"There are {num} {box} with {each} {thing} each, and {extra} {thing} on the table. "
        f"How many {thing} does {a} count in all?"
    )
    steps = [
        f"In the {box} there are {num} * {each} = {num * each} {thing}.",
        f"With the {extra} on the table there are {num * each} + {extra} = {num * each + extra} {thing}.",
    ]
    return question, steps, num * each + extra


def _shopping(rng: Random) -> Made:
    a, thing = rng.choice(NAMES), rng.choice(THINGS)
    num, price = rng.randint(2, 12), rng.randint(2, 9)
    cost = num * price
    paid = (cost // 10 + rng.randint(1, 3)) * 10
    question = (
        f"{a} buys {num} {thing} for {price} dollars each and pays with {paid} dollars. "
        f"How many dollars does {a} get back?"
    )
    steps = [
        f"The {thing} cost {num} * {price} = {cost} dollars.",
        f"{a} pays {paid} dollars and gets back {paid} - {cost} = {paid - cost} dollars.",
    ]
    return question, steps, paid - cost


def _days(rng: Random) -> Made:
    a, thing = rng.choice(NAMES), rng.choice(THINGS)
    first, factor, third = rng.randint(2, 20), rng.choice((2, 3)), rng.randint(1, 20)
    day = rng.sample(DAYS, 3)
    word = {2: "twice", 3: "three times"}[factor]
    second = first * factor
    question = (
        f"{a} sells {first} {thing} on {day[0]}, {word} as many on {day[1]} and {third} on {day[2]}. "
        f"How many {thing} does {a} sell on the three days?"
    )
    steps = [
        f"On {day[1]} {a} sells {factor} * {first} = {second} {thing}.",
        f"On {day[0]} and {day[1]} together that is {first} + {second} = {first + second} {thing}.",
        f"With {day[2]} it is {first + second} + {third} = {first + second + third} {thing}.",
    ]
    return question, steps, first + second + third


def _share(rng: Random) -> Made:
    a, thing = rng.choice(NAMES), rng.choice(THINGS)
    friends, each, left = rng.randint(2, 9), rng.randint(2, 12), rng.randint(0, 8)
    total = friends * each + left
    question = (
        f"{a} has {total} {thing}, keeps {left} and shares the rest equally among {friends} friends. "
        f"How many {thing} does each friend get?"
    )
    steps = [
        f"{a} keeps {left} of the {total} {thing}, so {total} - {left} = {total - left} are shared.",
        f"Each of the {friends} friends gets {total - left} / {friends} = {each} {thing}.",
    ]
    return question, steps, each


def _older(rng: Random) -> Made:
    a, b, c = rng.sample(NAMES, 3)
    age, more, less = rng.randint(8, 40), rng.randint(2, 15), rng.randint(1, 6)
    question = (
        f"{a} is {age} years old. {b} is {more} years older than {a}, and {c} is {less} years younger than {b}. "
        f"How old is {c}?"
    )
    steps = [
        f"{b} is {age} + {more} = {age + more} years old.",
        f"{c} is {age + more} - {less} = {age + more - less} years old.",
    ]
    return question, steps, age + more - less


def _travel(rng: Random) -> Made:
    a = rng.choice(NAMES)
    speed, hours, rest = rng.randint(3, 20), rng.randint(2, 9), rng.randint(2, 30)
    question = (
        f"{a} rides {speed} miles every hour for {hours} hours and then walks {rest} miles. "
        f"How many miles does {a} travel in all?"
    )
    steps = [
        f"{a} rides {hours} * {speed} = {hours * speed} miles.",
        f"With the walk it is {hours * speed} + {rest} = {hours * speed + rest} miles.",
    ]
    return question, steps, hours * speed + rest


KINDS: tuple[Callable[[Random], Made], ...] = (
    _gain_and_give, _boxes, _shopping, _days, _share, _older, _travel,
)  # fmt: skip
