"""A section that links results of benchmarks has their figures, and a result names the machine of its record.

A number of four digits or more, or with a decimal point, occurs in a linked result, or is one of its numbers rounded.
What was measured and is not stored has a date.
"""

import json
import re
from pathlib import Path

import pytest
from docs.pages import PAGES, ROOT, prose

from marl_ray.envs.budget.dag import best_expected_reward

RESULTS = ROOT / "benchmarks/results"
LINK = re.compile(r"\]\([^)\s]*?(?<=[/(])results/(\w+\.(?:md|json))(?:#[^)]*)?\)")
GENERATED = re.compile(r"^<!-- begin (\w+) -->$.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
"""Tables that a benchmark writes, which tests/unit/docs/test_site.py compares with its results."""
OTHER = re.compile(
    r"`[^`]*`|\]\([^)]*\)|<!--.*?-->"
    r"|\d+(?:\.\d+){2,}|\b(?:vLLM|Ray|TRL|RLlib|JaxMARL|Python|accelerate) \d+\.\d+|\barXiv[: ][\d.]+|\bsection \d+\.\d+"
    r"|\b(?:19|20)\d\d\b(?![,.]\d)"
)
"""Inline code, targets of links, comments, versions, papers and their sections, years: no figures."""
NUMBER = re.compile(r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?(?!\d)")
CLAIM = re.compile(r"\(measured: |\b(?:[Mm]easured|[Ss]imulated|[Tt]ried) once\b|\bIn one measurement\b")
"""Words with which a sentence says that its figures were measured."""
NOT_STORED = re.compile(
    r"\b(?:[Mm]easured|[Ss]imulated|[Tt]ried) once, on 20\d\d-\d\d-\d\d,(?: on [\w\s]+,)? and not stored\b"
)
UNMEASURED: dict[tuple[str, str], list[float]] = {
    # the optimum of budget_dag, which is computed and not measured
    ("docs/algorithms.md", "Which one to choose"): [best_expected_reward(30)],
    # the published scripts, measured once beside the peer
    ("benchmarks/README.md", "compiled_peers.py: what is compared"): [54_700, 126_200],
}
"""(page, heading) -> figures of the section that no stored result has."""


MACHINE = {"cpu", "cores", "python"}
"""Keys that `benchmarks.records.machine` sets besides the versions of packages."""
WITHOUT_MACHINE = {"scale", "trackers", "web_latency"}
"""Results that were recorded before their scripts stored these keys; who records one again takes it out."""


def sections(page: Path) -> dict[str, str]:
    """Heading -> the text below it, as far as the next heading of whatever level."""
    parts, heading = {"": ""}, ""
    for _, line in prose(page):
        if line.startswith("#"):
            heading = line.lstrip("# ")
        parts[heading] = parts.get(heading, "") + line + "\n"
    return {name: GENERATED.sub("", text) for name, text in parts.items()}


def value(number: str) -> float:
    return float(number.replace(",", ""))


def half_a_digit(number: str) -> float:
    """Half of what one more in the last digit of a number is worth."""
    mantissa, _, exponent = number.partition("e")
    return 0.5 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


def figures(text: str) -> list[str]:
    """The numbers of a text that may be measured."""
    numbers = NUMBER.findall(OTHER.sub(" ", text))
    return [number for number in numbers if "." in number or "e" in number or len(number.replace(",", "")) >= 4]


def find_unsupported(text: str, known: list[float]) -> list[str]:
    """The figures of a text that are none of the known numbers, however they are rounded."""
    return [
        number
        for number in figures(text)
        if not any(abs(value(number) - other) <= half_a_digit(number) * (1 + 1e-9) for other in known)
    ]


def numbers_of(result: str) -> list[float]:
    """The numbers of a stored result."""
    return [value(number) for number in NUMBER.findall((RESULTS / result).read_text())]


LINKING = [
    pytest.param(page, heading, text, id=f"{page.relative_to(ROOT)}-{heading}")
    for page in PAGES
    for heading, text in sections(page).items()
    if LINK.search(text)
]


@pytest.mark.parametrize(("page", "heading", "text"), LINKING)
def test_figures_are_those_of_the_linked_results(page, heading, text):
    known = [number for result in set(LINK.findall(text)) for number in numbers_of(result)]
    known += UNMEASURED.get((str(page.relative_to(ROOT)), heading), [])
    assert find_unsupported(text, known) == []


def test_many_sections_link_their_results():
    named = {(str(param.values[0].relative_to(ROOT)), param.values[1]) for param in LINKING}
    assert len(named) > 25 and named >= UNMEASURED.keys()


def sourceless(heading: str, text: str) -> bool:
    """Return True if a section says that something was measured, without a source.

    A source is a link to a result, or a date and the words that none is stored.
    """
    claims = len(CLAIM.findall(text))
    dated = len(NOT_STORED.findall(" ".join(text.split())))
    if heading == "Measured":
        return not (LINK.search(text) or dated or re.search(r"^Nothing\b", text, re.MULTILINE))
    return claims > dated and not LINK.search(text)


def test_what_was_measured_is_a_stored_result_or_has_a_date():
    pages = [(page, heading, text) for page in PAGES for heading, text in sections(page).items()]
    assert [f"{page.relative_to(ROOT)}: {heading}" for page, heading, text in pages if sourceless(heading, text)] == []
    assert sum(bool(NOT_STORED.search(" ".join(text.split()))) for _, _, text in pages) > 5


@pytest.mark.parametrize(
    ("heading", "text"),
    [
        ("Limits", "It ends within a second (measured: 0.1 s)."),
        ("Limits", "Measured once, on 2026-11-21: 0.1 s."),
        ("Limits", "In one measurement it took 0.1 s."),
        ("Measured", "Two workers make 37,000 steps/s."),
    ],
)
def test_figures_without_a_source_are_refused(heading, text):
    assert sourceless(heading, text)
    assert not sourceless(heading, f"{text} See [results](../benchmarks/results/gridworld.md).")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("100,201 steps per second, 20.4 (19.8-20.9) times, 4.9e-07", []),
        ("100,202 steps per second, 20.3 times", ["100,202", "20.3"]),
        ("20 times in 15 ms/s of Ray 2.60, TRL 1.16.0, `0.99`, 2019", []),
        ("3.9ms", ["3.9"]),
    ],
)
def test_a_figure_is_a_number_of_the_result_or_one_of_its_numbers_rounded(text, wrong):
    assert find_unsupported(text, [100_201, 20.38, 19.8, 20.94, 4.93e-7]) == wrong


def names_machine(result) -> bool:
    """Return True if a result, or each part of it that is recorded alone, names its machine."""
    parts = [result] if "machine" in result else list(result.values()) if isinstance(result, dict) else [{}]
    machines = [part.get("machine") if isinstance(part, dict) else None for part in parts]
    return all(isinstance(machine, dict) and machine.keys() >= MACHINE for machine in machines)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_result_names_its_machine(path):
    assert names_machine(json.loads(path.read_text())) == (path.stem not in WITHOUT_MACHINE)


SCRIPTS = {path.stem: path.read_text() for path in (ROOT / "benchmarks").rglob("*.py")}
WRITERS = {name: text for name, text in SCRIPTS.items() if re.search(r"records import.*\b(RESULTS|store)\b", text)}
"""Scripts that write results."""


def test_every_script_that_writes_results_asks_for_the_machine():
    assert {name for name, text in WRITERS.items() if "machine(" not in text} == {"recipe_page"}  # which reads a result


def test_every_script_that_takes_times_stores_the_load_before():
    timing = {name for name, text in WRITERS.items() if "perf_counter" in text}
    assert {name for name in timing if '"load_before"' not in WRITERS[name]} == set() and len(timing) > 10


def keys_of(document) -> set[str]:
    """Return the keys of a result, at any depth."""
    if isinstance(document, dict):
        return document.keys() | {key for inner in document.values() for key in keys_of(inner)}
    return {key for inner in document for key in keys_of(inner)} if isinstance(document, list) else set()


def test_the_load_has_one_name_in_all_results():
    keys = {key for path in RESULTS.glob("*.json") for key in keys_of(json.loads(path.read_text()))}
    assert {key for key in keys if "load" in key.split("_")} == {"load_before"}
