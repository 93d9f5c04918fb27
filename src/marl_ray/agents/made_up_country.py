"""A made-up country, always the same: documents to search without a network, and questions that need them.

No model has read about it, so an agent that answers must have searched.
"""

import functools
import random
from dataclasses import dataclass
from typing import NamedTuple

TOWN_COUNT, PERSON_COUNT, SUM_COUNT = 60, 200, 400
"""Numbers of towns, of people with five questions each, and of sums: enough for both splits, searched in a millisecond."""
HELD_OUT_EVERY = 5
"""Every fifth person, and every fifth sum, is kept for the test split."""
QUESTION_KINDS = ("arithmetic", "fact", "two_step", "difference")
"""Kinds of questions, from the easiest: a program; a search; two searches; two searches and a program."""
_NAME_STARTS, _NAME_ENDS, _OCCUPATIONS = (
    words.split()
    for words in (
        "Bal Cor Dun Els Fen Gar Hol Ist Jor Kel Lum Mar Nol Or Pel Quen Ros Sil Tar Ul Vel Wen Yar Zor",
        "ath bek dor eth fold gard ham ivo kan lin mor nia ost ra sted tin und vik wick zen",
        "architect baker botanist carpenter chemist glazier judge miller painter physician pilot sailor weaver",
    )
)


class Town(NamedTuple):
    """A town of the made-up country: its river, and the year in which it was founded."""

    name: str
    river: str
    founded: int


class Person(NamedTuple):
    """A person of the made-up country: the work, the year of birth and the town."""

    name: str
    work: str
    born: int
    town: Town


class QuestionStep(NamedTuple):
    """A call that leads to the answer, and the thought before it."""

    thought: str
    tool: str
    arguments: dict[str, str]


@dataclass(frozen=True)
class CountryQuestion:
    """A question, its answer, and an expert's way to it with the tools."""

    task_id: str
    kind: str
    prompt: str
    answer: str
    plan: tuple[QuestionStep, ...]
    """Calls that lead to the answer; the last one gives it."""
    test: bool

    @property
    def level(self) -> float:
        """The place of the question's kind in QUESTION_KINDS, of which later ones need more steps."""
        return float(QUESTION_KINDS.index(self.kind))


@functools.cache
def _country() -> tuple[list[Town], list[Person]]:
    draw = random.Random(1882)
    names = [start + end for start in _NAME_STARTS for end in _NAME_ENDS]
    draw.shuffle(names)
    rivers = [names.pop() for _ in range(TOWN_COUNT // 2)]
    towns = [Town(names.pop(), draw.choice(rivers), draw.randint(900, 1700)) for _ in range(TOWN_COUNT)]
    full = sorted({f"{draw.choice(names)} {draw.choice(names)}" for _ in range(2 * PERSON_COUNT)})
    draw.shuffle(full)
    people = [
        Person(n, draw.choice(_OCCUPATIONS), draw.randint(1710, 1990), draw.choice(towns)) for n in full[:PERSON_COUNT]
    ]
    return towns, people


def documents() -> list[tuple[str, str]]:
    """Return the title and text of every document: one for each town and each person."""
    towns, people = _country()
    of_towns = [
        (town.name, f"{town.name} is a town on the river {town.river}, founded in {town.founded}.") for town in towns
    ]
    return of_towns + [
        (person.name, f"{person.work}, born in {person.town.name} in {person.born}.") for person in people
    ]


@functools.cache
def questions() -> tuple[CountryQuestion, ...]:
    """Return every question, in a fixed order."""
    _, people = _country()
    draw = random.Random(1921)
    drafts = [("arithmetic", *_draw_sum(draw), i % HELD_OUT_EVERY == 0) for i in range(SUM_COUNT)]
    drafts += [
        (*question, i % HELD_OUT_EVERY == 0) for i, person in enumerate(people) for question in _ask_about(person)
    ]
    return tuple(
        CountryQuestion(f"towns/{number}", kind, text, answer, (*steps, _answer(answer)), test)
        for number, (kind, text, answer, steps, test) in enumerate(drafts)
    )


def _draw_sum(draw: random.Random) -> tuple[str, str, list[QuestionStep]]:
    a = draw.randint(12, 99)
    b = draw.randint(12, 99)
    c = draw.randint(100, 999)
    sign = draw.choice((1, -1))
    text = f"{a} * {b} {'+' if sign > 0 else '-'} {c}"
    return f"What is {text}?", str(a * b + sign * c), [_compute(text)]


def _ask_about(person: Person) -> list[tuple[str, str, str, list[QuestionStep]]]:
    """Return the kind, question, answer and the steps before the answer."""
    name, town = person.name, person.town
    first, second = _search(name), _search(town.name)
    years = person.born - town.founded
    return [
        ("fact", f"In which town was {name} born?", town.name, [first]),
        ("fact", f"In which year was {name} born?", str(person.born), [first]),
        ("fact", f"What was the profession of {name}?", person.work, [first]),
        ("two_step", f"On which river is the town where {name} was born?", town.river, [first, second]),
        (
            "difference",
            f"How many years after the foundation of the town was {name} born there?",
            str(years),
            [first, second, _compute(f"{person.born} - {town.founded}")],
        ),
    ]


def _search(what: str) -> QuestionStep:
    return QuestionStep(f"I look up {what}.", "google_search_serper", {"query": what})


def _compute(text: str) -> QuestionStep:
    return QuestionStep(f"I compute {text}.", "code_interpreter", {"code": f"print({text})"})


def _answer(text: str) -> QuestionStep:
    return QuestionStep(f"It is {text}.", "answer", {"answer": text})
