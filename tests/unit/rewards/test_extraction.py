"""A program in an answer's text: fenced blocks, and the last one that defines a name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marl_ray.rewards import defines, extract, python_blocks

F = "def f(x):\n    return x\n"


def fenced_code(code, info="python", fence="```"):
    return f"{fence}{info}\n{code}{fence}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(fenced_code(F), F, id="one block"),
        pytest.param(
            "First:\n" + fenced_code("def f(): 1\n") + "Better:\n" + fenced_code(F), F, id="the last that defines it"
        ),
        pytest.param(fenced_code(F) + "Use it:\n" + fenced_code("print(f(1))\n"), F, id="a usage example comes after"),
        pytest.param(fenced_code("x = 1\n") + fenced_code("y = 2\n"), "y = 2\n", id="none defines it: the last"),
        pytest.param(fenced_code(F) + fenced_code("pip install f\n", "bash"), F, id="another language does not count"),
        pytest.param(fenced_code(F, ""), F, id="no language"),
        pytest.param(fenced_code(F, "Python title=a.py"), F, id="an attribute after the language"),
        pytest.param(fenced_code(F, fence="~~~"), F, id="tildes"),
        pytest.param(fenced_code(F).replace("\n", "\r\n"), F.replace("\n", "\r\n"), id="CRLF"),
        pytest.param(
            "````python\n" + F + "# ```\n```\n````\n", F + "# ```\n```\n", id="a longer fence holds a shorter"
        ),
        pytest.param("```python\n" + F, None, id="never closed"),
        pytest.param(
            fenced_code("y = 2\n") + "```python\n" + F, "y = 2\n", id="the last was truncated: a complete one before"
        ),
        pytest.param("def f(x):\n    return x\n", None, id="no fence at all"),
        pytest.param("", None, id="nothing"),
        pytest.param("inline ```def f(x): return x``` code", None, id="inline"),
        pytest.param(fenced_code(""), "", id="an empty block"),
        pytest.param(fenced_code("class f:\n    pass\n"), "class f:\n    pass\n", id="a class"),
    ],
)
def test_the_last_complete_block_that_defines_the_entry_point(text, expected):
    assert extract(text, "f") == expected


def test_a_fence_on_a_line_of_a_string_ends_the_block_as_in_markdown():
    assert extract('```python\ns = """\n```\n"""\n' + F + "```\n", "f") == 's = """\n'


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def f(): pass", True),
        ("async def f(): pass", True),
        ("import x\nf = x.g", True),
        ("f: int = 1", True),
        ("def f[T](x: T): pass", True),
        ("def ｆ(): pass", True),  # noqa: RUF001  the compiler reads it as f, too
        ("    def f(): pass", False),
        ("def ff(): pass", False),
        ("f == 1", False),
        ("f(1)", False),
        ("# def f():", False),
    ],
)
def test_what_defines_a_name(code, expected):
    assert defines(code, "f") is expected


@given(st.lists(st.text(alphabet="ab=\n \\\"'", max_size=30), max_size=5))
def test_complete_blocks_come_back_as_they_were(codes):
    codes = [code + "\n" for code in codes]
    assert list(python_blocks("text\n".join(fenced_code(code) for code in codes))) == codes


@given(st.text(alphabet="`~ \npython", max_size=200))
def test_any_text_has_an_answer(text):
    code = extract(text, "f")
    assert code is None or isinstance(code, str)


def test_ten_megabytes_are_searched_quickly():
    assert extract("```python\n" + "x = 1\n" * 1_700_000 + "```\n", "f") is not None


INDENTED = "    def f(x):\n        return x\n"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("1. So:\n\n    ```python\n" + INDENTED + "    ```\n", id="in a list, four spaces"),
        pytest.param(
            "- So:\n  ```python\n" + INDENTED.replace("    def", "  def").replace("        r", "      r") + "  ```\n",
            id="two",
        ),
        pytest.param("- ```python\n  def f(x):\n      return x\n  ```\n", id="behind the list's mark"),
        pytest.param("1. - ```python\n     def f(x):\n         return x\n     ```\n", id="in a list of a list"),
        pytest.param("\t```python\n\tdef f(x):\n\t    return x\n\t```\n", id="a tab"),
        pytest.param("    ```python\n" + INDENTED + "```\n", id="closed further out"),
        pytest.param(fenced_code(F, "{.python}"), id="attributes in braces"),
        pytest.param(fenced_code(F, "{python}"), id="as in notebooks"),
        pytest.param(fenced_code(F, "python:solution.py"), id="a file's name"),
        pytest.param(fenced_code(F, "python3.11"), id="a version"),
        pytest.param(fenced_code(F, "python, linenos"), id="a comma"),
        pytest.param(fenced_code(F, "python `a`", "~~~"), id="backticks behind tildes"),
        pytest.param(fenced_code(F, fence="~~~~~"), id="longer tildes"),
        pytest.param(fenced_code(F, " python "), id="spaces"),
    ],
)
def test_a_block_comes_without_its_fences_indent_whatever_is_behind_the_fence(text):
    assert extract(text, "f") == F


def test_lines_that_are_less_indented_than_the_fence_keep_what_they_have():
    assert extract("  ```python\n  a = 1\n b = 2\nc = 3\n\n  ```\n") == "a = 1\nb = 2\nc = 3\n\n"


def test_a_fence_that_is_much_further_in_closes_nothing():
    code = 's = """\n        ```\n"""\n' + F
    assert extract(fenced_code(code), "f") == code


@pytest.mark.parametrize("info", ["pythonic", "python-repl", "json", "bash", "c++", "pycon"])
def test_other_languages_do_not_count(info):
    assert extract(fenced_code(F, info), "f") is None
