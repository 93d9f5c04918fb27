"""Families of one-line functions: a text and a code, in which constants are filled in."""

import random
import re
from typing import NamedTuple

from marl_ray.envs.text.synthetic.functions import LETTERS


class TaskFamily(NamedTuple):
    """Functions of one kind. The capitals A, B and C are constants in the text and in the code."""

    level: int
    kind: str
    """Type of the argument x: `n` number, `l` list of numbers, `s` string, `p` two numbers x and y."""
    text: str
    code: str


FAMILIES = tuple(
    TaskFamily(int(level), kind, text, code)
    for level, kind, text, code in (
        [part.strip() for part in line.split("|")]
        for line in """
        1 | n | x plus A          | x+A
        1 | n | x minus A         | x-A
        1 | n | A minus x         | A-x
        1 | n | x times A         | x*A
        1 | n | x div A           | x//A
        1 | n | x mod A           | x%A
        1 | n | x xor A           | x^A
        1 | n | max of x A        | max(x,A)
        1 | n | min of x A        | min(x,A)
        1 | n | x above A         | x>A
        1 | n | x below A         | x<A
        1 | n | x equals A        | x==A
        1 | n | A divides x       | x%A==0
        1 | n | distance x A      | abs(x-A)
        1 | n | abs x plus A      | abs(x)+A
        1 | n | square plus A     | x*x+A
        1 | n | square minus A    | x*x-A
        2 | n | x times A plus B  | x*A+B
        2 | n | x times A minus B | x*A-B
        2 | n | x plus A times B  | (x+A)*B
        2 | n | x between A B     | A<=x<=B
        2 | n | clip x A B        | max(A,min(x,B))
        2 | n | x mod A plus B    | x%A+B
        2 | n | square times A plus B | x*x*A+B
        2 | n | range A x B       | list(range(A,x,B))
        2 | p | x plus y times A  | x+y*A
        2 | p | x times y plus A  | x*y+A
        2 | p | x minus y plus A  | x-y+A
        2 | p | max x y minus A   | max(x,y)-A
        2 | p | x A plus y B      | x*A+y*B
        2 | l | first A           | x[:A]
        2 | l | last A            | x[-A:]
        2 | l | drop A            | x[A:]
        2 | l | every A           | x[::A]
        2 | l | item A            | x[A]
        2 | l | count A           | x.count(A)
        2 | l | has A             | A in x
        2 | l | append A          | x+[A]
        2 | l | prepend A         | [A]+x
        2 | l | sum plus A        | sum(x)+A
        2 | l | sum times A       | sum(x)*A
        2 | l | length times A    | len(x)*A
        2 | l | max plus A        | max(x)+A
        2 | l | min minus A       | min(x)-A
        2 | l | sum of first A    | sum(x[:A])
        2 | l | rotate A          | x[A:]+x[:A]
        2 | l | smallest A        | sorted(x)[:A]
        2 | l | largest A         | sorted(x)[-A:]
        3 | l | each plus A       | [v+A for v in x]
        3 | l | each times A      | [v*A for v in x]
        3 | l | each mod A        | [v%A for v in x]
        3 | l | keep above A      | [v for v in x if v>A]
        3 | l | keep below A      | [v for v in x if v<A]
        3 | l | remove A          | [v for v in x if v!=A]
        3 | l | count above A     | sum(v>A for v in x)
        3 | l | all below A       | all(v<A for v in x)
        3 | l | any above A       | any(v>A for v in x)
        3 | l | each times A plus B | [v*A+B for v in x]
        3 | l | slice A B         | x[A:B]
        3 | n | square A x B plus C | x*x*A+x*B+C
        3 | s | repeat A          | x*A
        3 | s | first A           | x[:A]
        3 | s | drop A            | x[A:]
        3 | s | every A           | x[::A]
        3 | s | count 'A'         | x.count('A')
        3 | s | remove 'A'        | x.replace('A','')
        3 | s | replace 'A' 'B'   | x.replace('A','B')
        3 | s | split 'A'         | x.split('A')
        3 | s | starts 'A'        | x.startswith('A')
        3 | s | ends 'A'          | x.endswith('A')
        3 | s | find 'A'          | x.find('A')
        3 | s | join 'A'          | 'A'.join(x)
        3 | s | append 'A'        | x+'A'
        3 | s | prepend 'A'       | 'A'+x
        3 | s | pad A 'B'         | x.ljust(A,'B')
        """.strip().splitlines()
    )
)
STEP_FAMILIES = tuple(each for each in FAMILIES if each.level == 1 and each.code.count("x") == 1 and each.kind == "n")
"""The functions that may come second in level 4: each takes a number once."""
NUMBER_FAMILIES = tuple(family for family in STEP_FAMILIES if not re.search("[<=>]", family.code))
"""The functions that may come first in level 4: each makes a number of a number."""


def fill_template(source: random.Random, family: TaskFamily) -> tuple[str, str]:
    """Return the text and the code of a family with constants.

    Positions in sequences are small, because the sequences are short.
    """
    end = 20 if family.kind in "np" else 6
    names = [name for name in "ABC" if re.search(rf"\b{name}\b", family.text)]
    values = dict(zip(names, source.sample(range(2, end), len(names)), strict=True))
    if family.text.startswith(("x between", "clip", "slice")):
        values = dict(zip(names, sorted(values.values()), strict=True))
    letters = dict(zip(names, source.sample(LETTERS, len(names)), strict=True))

    def fill(pattern: str) -> str:
        quoted = re.sub(r"'([ABC])'", lambda match: f"'{letters[match[1]]}'", pattern)
        return re.sub(r"\b[ABC]\b", lambda match: str(values[match[0]]), quoted)

    return fill(family.text), fill(family.code)
