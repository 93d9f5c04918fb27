"""A walk compares a page's outputs with the printed ones, and replaces a page's ports and values."""

import pytest
from docs.pages import ROOT, Block, blocks
from docs.walks import Walk, expect


def output(shown: str, language: str = "text") -> Block:
    return Block(ROOT / "README.md", 1, language, ("output",), shown, ())


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("one\ntwo\n", "one  \ntwo"),
        ("run ... in ... s\n", "run a/b in 3.1 s\n"),
        ("...\nlast\n", "first\nsecond\nlast\n"),
        ("first\n...\n", "first\n"),
        ("first\n...\n", "first\nsecond\nthird\n"),
    ],
)
def test_dots_stand_for_what_differs(shown, printed):
    expect(output(shown), shown, printed)


@pytest.mark.parametrize(
    ("shown", "printed"), [("one\n", "one\ntwo\n"), ("a ... c\n", "a b\nc\n"), ("...\nx\n", "y\n")]
)
def test_other_output_is_an_error_that_names_the_page(shown, printed):
    with pytest.raises(AssertionError, match=r"README\.md:1: shows"):
        expect(output(shown), shown, printed)


def test_json_is_compared_without_blanks():
    expect(output('{"a": 1,\n "b": "..."}\n', "json"), '{"a": 1,\n "b": "..."}\n', '{"a":1,"b":"0f3c"}')


def test_ports_and_values_are_those_of_the_walk(tmp_path):
    walk = Walk(tmp_path, port=1234, printed="export KEY=old\nexport KEY=new TOKEN=t\n")
    assert walk.localised("curl localhost:8000/v1") == "curl localhost:1234/v1"
    assert walk.localised("export KEY=... TOKEN=...") == "export KEY=new TOKEN=t"
    with pytest.raises(AssertionError, match="OTHER"):
        walk.localised("export OTHER=...")


def test_blocks_have_their_names_and_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        '<!-- run: serve until "ready" -->\n```bash\nserve\n```\n\n- item\n\n  ```yaml a.yaml\n  x: 1\n  ```\n'
        "\n<!-- run: skip, needs root -->\n\n```bash\nrm\n```\n"
    )
    first, second, third = blocks(page)
    assert (first.serves_until, second.name, second.text, third.skipped) == ("ready", "a.yaml", "x: 1\n", "needs root")
