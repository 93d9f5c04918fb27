"""Files of web tasks: all tasks of both public files are read, and every mistake is named with its line and field."""

import copy
import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marl_ray.envs.web.webarena.tasks.programs import PROGRAMS, ProgramCall, parse_program
from marl_ray.envs.web.webarena.tasks.reading import read_web_tasks, split_by_template, tasks_of_sites
from marl_ray.envs.web.webarena.tasks.schema import (
    SITES,
    AddressCheck,
    AnswerCheck,
    PageCheck,
    RequestCheck,
    ResponseCheck,
    with_site_urls,
)
from marl_ray.errors import MarlRayError

FIXTURES = Path(__file__).parents[3] / "fixtures" / "webarena"
ORIGINAL, VERIFIED = FIXTURES / "test.raw.json.gz", FIXTURES / "webarena-verified.json.gz"
URLS = {site: f"http://{site}.test:80" for site in SITES}


def records(path: Path = ORIGINAL) -> list[dict[str, Any]]:
    """The first three records of a file."""
    return copy.deepcopy(json.loads(gzip.decompress(path.read_bytes()))[:3])


def write_tasks(folder: Path, tasks: list[Any], name: str = "tasks.json") -> str:
    path = folder / name
    lines = [json.dumps(task) for task in tasks]
    path.write_text("\n".join(lines) if name.endswith("l") else "[\n" + ",\n".join(lines) + "\n]")
    return str(path)


def test_all_tasks_of_webarena_are_read():
    tasks = read_web_tasks(str(ORIGINAL))
    assert [task.task_id for task in tasks] == [str(k) for k in range(812)]
    kinds = Counter(tuple(type(check) for check in task.checks) for task in tasks)
    assert kinds == {
        (AnswerCheck,): 325,
        (PageCheck,): 282,
        (AddressCheck, PageCheck): 129,
        (AddressCheck,): 66,
        (AnswerCheck, AddressCheck): 10,
    }
    answers = [check for task in tasks for check in task.checks if isinstance(check, AnswerCheck)]
    assert sum(answer.exact is not None for answer in answers) == 45
    assert sum(bool(answer.include) for answer in answers) == 176
    assert sum(bool(answer.fuzzy) for answer in answers) == 82
    assert sum(answer.not_achievable and bool(answer.reason) for answer in answers) == 36
    contents = [
        part for task in tasks for check in task.checks if isinstance(check, PageCheck) for part in check.contents
    ]
    assert len(contents) == 651
    assert sum(part.url.startswith("func:") for part in contents) == 75
    assert sum(part.locator.startswith("func:") for part in contents) == 22
    assert sum(bool(part.prepare) for part in contents) == 10


def test_all_tasks_of_webarena_verified_are_read():
    tasks = read_web_tasks(str(VERIFIED))
    assert len(tasks) == 812
    assert Counter(type(check) for task in tasks for check in task.checks) == {ResponseCheck: 812, RequestCheck: 663}


def test_alternatives_and_several_pages_are_parted():
    tasks = read_web_tasks(str(ORIGINAL))
    assert len(tasks[431].start_urls) == 3
    address = tasks[608].checks[0]
    assert isinstance(address, AddressCheck)
    assert address.references == ("__REDDIT__/f/washington", "__REDDIT__/f/washingtondc")
    alternatives = [
        names
        for task in tasks
        for check in task.checks
        if isinstance(check, PageCheck)
        for part in check.contents
        for names in part.include
        if len(names) > 1
    ]
    assert alternatives
    assert not [name for names in alternatives for name in names if "|OR|" in name]


@pytest.mark.parametrize("path", [ORIGINAL, VERIFIED], ids=["webarena", "verified"])
def test_every_placeholder_of_every_task_becomes_an_address(path):
    for task in read_web_tasks(str(path)):
        placed = with_site_urls(task, URLS)
        assert not [site for site in SITES if f"__{site.upper()}__" in repr(placed)]
        assert placed.task_id == task.task_id
        assert all(url.startswith("http://") for url in placed.start_urls)


def test_a_site_without_an_address_is_named():
    task = read_web_tasks(str(ORIGINAL))[0]
    with pytest.raises(
        MarlRayError, match=r"^sites: expected the base URL of shopping_admin, which '__SHOPPING_ADMIN__' needs$"
    ):
        with_site_urls(task, {"shopping": "http://shop.test"})
    with pytest.raises(
        MarlRayError, match=r"^sites: 'shoping' is unknown; did you mean shopping or shopping_admin or homepage\?$"
    ):
        with_site_urls(task, {"shoping": "http://shop.test"})


def test_a_template_is_on_one_side_of_the_split():
    tasks = read_web_tasks(str(ORIGINAL))
    train, test = split_by_template(tasks, 0.2)
    assert {*train, *test} == set(tasks)
    assert not {task.template for task in train} & {task.template for task in test}
    assert 0.1 < len(test) / len(tasks) < 0.3
    assert split_by_template(tasks, 0.0) == (tasks, ())


def test_tasks_of_some_sites():
    tasks = read_web_tasks(str(ORIGINAL))
    assert len(tasks_of_sites(tasks, ["shopping"])) == 187
    assert len(tasks_of_sites(tasks, ["shopping", "reddit"])) == 187 + 106 + 5


def change_key(key: str, value: Any) -> Any:
    """A change of one key, dotted where it is within a dictionary or a list."""

    def change(record: dict[str, Any]) -> None:
        *path, last = [int(part) if part.isdigit() else part for part in key.split(".")]
        node: Any = record
        for part in path:
            node = node[part]
        node[last] = value

    return change


BROKEN = [
    ("eval.eval_types", ["string_match", "looks_right"], r"eval\.eval_types\.1: .*'string_match', 'url_match'"),
    ("eval.eval_types", ["url_match"], r"eval: .*reference_url: expected with url_match"),
    ("eval.eval_types", ["program_html"], r"eval: .*program_html: expected an element"),
    ("eval.reference_answers", None, r"eval: .*reference_answers: expected with string_match"),
    ("eval.reference_answers", ["an", "older", "schema"], r"eval\.reference_answers: "),
    ("eval.reference_answers", {}, r"eval\.reference_answers: .*expected exact_match, must_include or fuzzy_match"),
    ("eval.reference_answers", {"fuzzy_match": "N/A"}, r"eval: .*string_note: expected with fuzzy_match N/A"),
    ("eval.url_note", "PRED in GOLD", r"eval\.url_note: .*'GOLD in PRED'"),
    ("eval.surprise", 1, r"unknown key 'eval\.surprise'; expected one of eval_types, "),
    ("eval.reference_url", "__SHOP__/a", r"eval: .*__SHOP__ is the placeholder of no site"),
    ("eval.reference_url", "http://[::1 |OR| __SHOPPING__", r"eval: .*reference_url: 'http://\[::1' is no address"),
    ("start_url", "__SHOP__/a", r"start_url: .*__SHOP__ is the placeholder of no site"),
    ("sites", ["amazon"], r"sites\.0: "),
    ("task_id", "seven", r"task_id: "),
    ("intent", "", r"intent: "),
]


@pytest.mark.parametrize(("key", "value", "message"), BROKEN, ids=[f"{key}={value}"[:50] for key, value, _ in BROKEN])
@pytest.mark.parametrize("name", ["tasks.json", "tasks.jsonl"])
def test_a_mistake_is_named_with_its_line_and_field(tmp_path, name, key, value, message):
    tasks = records()
    tasks[1]["eval"] |= {"string_note": ""}
    change_key(key, value)(tasks[1])
    line = 2 if name.endswith("l") else 3
    with pytest.raises(MarlRayError, match=rf"{name}:{line}: {message}") as raised:
        read_web_tasks(write_tasks(tmp_path, tasks, name))
    assert "\n" not in str(raised.value)


RESPONSE: dict[str, Any] = {
    "evaluator": "AgentResponseEvaluator",
    "expected": {"task_type": "retrieve", "status": "SUCCESS"},
}
PAGE = {"url": "last", "locator": "", "required_contents": {"must_include": ["a"]}}
BROKEN_PAGES = [
    ({"url": "func:__import__('os').system('true')"}, r"url: .*is not a call"),
    ({"url": "func:open('/etc/passwd')"}, r"url: .*'open' is not allowed"),
    ({"url": "func:reddit_get_post_url()"}, r"url: .*takes 1 arguments \(url\), got 0"),
    ({"url": "func:reddit_get_post_url(str(1))"}, r"url: .*is no quoted text"),
    ({"url": "func:reddit_get_post_url(__page__)"}, r"url: .*expected __page__ for the parameter page"),
    ({"url": "func:" + "(" * 9999}, r"url: .*is not a call"),
    ({"locator": "window.close()"}, r"locator: .*expected JavaScript from document"),
    ({"required_contents": {}}, r"required_contents: .*expected either"),
    ({"required_contents": {"exact_match": "a", "must_include": ["a"]}}, r"required_contents: .*expected either"),
    (
        {"required_contents": {"looks_like": "a"}},
        r"required_contents\.looks_like'; expected one of exact_match, must_include",
    ),
]


@pytest.mark.parametrize(("change", "message"), BROKEN_PAGES, ids=[str(change)[:40] for change, _ in BROKEN_PAGES])
def test_a_mistake_in_program_html_is_named(tmp_path, change, message):
    tasks = records()
    tasks[2]["eval"] |= {"eval_types": ["program_html"], "program_html": [PAGE, PAGE | change]}
    with pytest.raises(MarlRayError, match=rf"tasks\.json:4: (unknown key ')?eval\.program_html\.1\.{message}"):
        read_web_tasks(write_tasks(tmp_path, tasks))


def test_a_mistake_in_a_verified_task_is_named(tmp_path):
    tasks = records(VERIFIED)
    tasks[2]["eval"][0]["evaluator"] = "LooksRight"
    with pytest.raises(MarlRayError, match=r"tasks\.json:4: eval\.0: .*'LooksRight'"):
        read_web_tasks(write_tasks(tmp_path, tasks))


SCHEMAS = [
    ({"type": "array", "items": {"type": "string"}}, ["^((a$"], "the pattern '^((a$' is wrong"),
    ({"type": "array", "items": {"type": "array"}}, [1], "'1' is no array, as results_schema says"),
    ({"type": "array", "items": {"type": "object"}}, ["a"], "'a' is no object, as results_schema says"),
    ({"type": "array", "items": {"type": "null"}}, ["a"], "expected nothing where results_schema has the type null"),
    ({"type": "array", "items": "string"}, ["a"], "results_schema.items: expected a mapping of keys"),
    ({"type": "array", "items": {"type": ["string", "null"]}}, ["a"], "results_schema.items.type: "),
]


@pytest.mark.parametrize(("schema", "data", "message"), SCHEMAS, ids=[message for *_, message in SCHEMAS])
def test_data_that_no_answer_can_be_compared_with_is_named(tmp_path, schema, data, message):
    tasks = records(VERIFIED)
    tasks[2]["eval"] = [
        RESPONSE | {"expected": RESPONSE["expected"] | {"retrieved_data": data}, "results_schema": schema}
    ]
    with pytest.raises(MarlRayError, match=rf"tasks\.json:4: eval\.0[:.].*{re.escape(message)}"):
        read_web_tasks(write_tasks(tmp_path, tasks))


def test_a_program_of_a_site_that_the_task_does_not_name(tmp_path):
    tasks = records()
    tasks[2]["sites"] = ["reddit"]
    page = PAGE | {"locator": "func:shopping_get_sku_latest_review_author('B0')"}
    tasks[2]["eval"] |= {"eval_types": ["program_html"], "program_html": [page]}
    with pytest.raises(MarlRayError, match=r"tasks\.json:4: .*sites: expected shopping, which func:shopping_get_sku"):
        read_web_tasks(write_tasks(tmp_path, tasks))


def test_an_id_that_comes_twice_and_a_file_without_tasks(tmp_path):
    tasks = records()
    with pytest.raises(MarlRayError, match=r"/tasks\.json:5: task_id 0 is already that of an earlier task$"):
        read_web_tasks(write_tasks(tmp_path, [*tasks, tasks[0]]))
    with pytest.raises(MarlRayError, match=r"/none\.json: expected at least one task$"):
        read_web_tasks(write_tasks(tmp_path, [], "none.json"))


def test_a_program_is_read_and_never_evaluated():
    call = parse_program("func:gitlab_get_project_memeber_role(__page__, 'yjlou')")
    assert call == ProgramCall("gitlab_get_project_memeber_role", ("__page__", "yjlou"))


@given(st.text(max_size=60), st.sampled_from([*PROGRAMS, "eval"]))
def test_whatever_a_program_says_it_is_a_call_of_the_whitelist_or_an_error(text, name):
    for program in (f"func:{text}", f"func:{name}({text})", f"func:{name}({text!r})"):
        try:
            call = parse_program(program)
        except ValueError:
            continue
        assert call.name in PROGRAMS
        assert len(call.arguments) == len(PROGRAMS[call.name])
