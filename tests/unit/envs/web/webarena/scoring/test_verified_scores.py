"""WebArena-Verified's evaluator of answers on a table of cases."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marl_ray.envs.web.webarena.scoring.task_score import check_scored
from marl_ray.envs.web.webarena.scoring.verified import response_score, unread_formats
from marl_ray.envs.web.webarena.tasks.reading import read_web_tasks
from marl_ray.envs.web.webarena.tasks.schema import ResponseCheck
from marl_ray.errors import MarlRayError

VERIFIED = Path(__file__).parents[5] / "fixtures" / "webarena" / "webarena-verified.json.gz"


def list_schema(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": {"type": kind, **more}}


TEXT, NUMBER, TRUTH, MONEY = (
    list_schema("string"),
    list_schema("number"),
    list_schema("boolean"),
    list_schema("number", format="currency"),
)
PAIR = list_schema("object", properties={"name": {"type": "string"}, "price": {"type": "number", "format": "currency"}})
NAMES = list_schema("object", properties={"names": list_schema("string"), "count": {"type": "number"}})
DATA = [
    (TEXT, ["Quest Lumaflex™ Band"], ["quest lumaflex band"], 1),
    (TEXT, ["Quest Lumaflex™ Band"], "Quest Lumaflex Band.", 1),  # a value alone is a list of one
    (TEXT, ["Quest Lumaflex™ Band"], ["Quest Lumaflex Band and more"], 0),
    (TEXT, ["a", "b"], ["b", "a"], 1),
    (TEXT, ["a", "b"], ["a"], 0),
    (TEXT, ["a"], ["a", "b"], 0),
    (TEXT, ["a", "a"], ["a", "b"], 0),
    (TEXT, [["a", "b"], "c"], ["c", "b"], 1),  # a list within holds alternatives
    (TEXT, ["Buffalo-Niagara"], ["buffalo niagara"], 1),
    (TEXT, ["123-4567"], ["123 4567"], 0),
    (TEXT, ["Café"], ["cafe"], 1),
    (TEXT, ["^.*blue.*$"], ["Light Blue chair"], 1),
    (TEXT, ["12"], [12], 1),
    (TEXT, ["a"], '["a"]', 1),
    (TEXT, ["a"], None, 0),
    (TEXT, ["a"], [], 0),
    (TEXT, None, None, 1),
    (TEXT, None, [], 1),
    (TEXT, None, ["a"], 0),
    (NUMBER, [10], ["10.0"], 1),
    (NUMBER, [1234], ["1,234"], 1),
    (NUMBER, [10], ["ten"], 0),
    (NUMBER, [0], [0], 1),
    (NUMBER, [[10, 17]], [17], 1),
    (NUMBER, [10], [10**400], 0),  # more than a float holds
    (MONEY, [10], ["9" * 1_000_000], 0),
    (TRUTH, [True], ["yes"], 1),
    (TRUTH, [True], ["perhaps"], 0),
    (TRUTH, [False], [False], 1),
    (MONEY, [12.5], ["$12.50"], 1),
    (MONEY, [12.5], ["12.6 USD"], 1),  # within 0.1
    (MONEY, [12.5], ["$12.70"], 0),
    (MONEY, [1250], ["$1,250.00"], 1),
    (MONEY, [1250], ["1.250,00 €"], 1),
    (MONEY, [-5], ["-$5"], 1),
    (MONEY, [5], ["free"], 0),
    (PAIR, [{"name": "Chair", "price": 12.5}], [{"price": "$12.50", "name": "chair"}], 1),
    (PAIR, [{"name": "Chair", "price": 12.5}], [{"name": "chair"}], 0),
    (PAIR, [{"name": ["Chair", "Seat"], "price": 12.5}], [{"name": "seat", "price": 12.5}], 1),
    (PAIR, [{"name": "Chair", "price": 12.5}], ["chair"], 0),
    (NAMES, [{"names": ["a", "b"], "count": 2}], [{"names": ["b", "a"], "count": "2"}], 1),
    (NAMES, [{"names": ["a", "b"], "count": 2}], [{"names": ["b"], "count": 2}], 0),
]


def answer(data: Any, kind: str = "retrieve", status: str = "SUCCESS") -> str:
    return json.dumps({"task_type": kind, "status": status, "retrieved_data": data})


@pytest.mark.parametrize(("schema", "expected", "data", "score"), DATA)
def test_data_of_an_answer_must_fit_the_schema(schema, expected, data, score):
    check = ResponseCheck("retrieve", "SUCCESS", expected, schema)
    assert response_score(check, answer(data)) == score


def test_order_counts_where_the_task_says_so():
    check = ResponseCheck("retrieve", "SUCCESS", ["a", "b"], TEXT, ordered=True)
    assert response_score(check, answer(["a", "b"])) == 1
    assert response_score(check, answer(["b", "a"])) == 0


ANSWERS = [
    (answer(None, "navigate"), 1),
    (answer(["whatever"], "NAVIGATE", "success"), 1),  # data counts for tasks that retrieve
    (f"I am done:\n```json\n{answer(None, 'navigate')}\n```", 1),
    ('{"performed_operation": "navigate", "status": "SUCCESS"}', 1),
    (answer(None, "mutate"), 0),
    (answer(None, "navigate", "NOT_FOUND_ERROR"), 0),
    ('{"task_type": "navigate"}', 0),
    ('{"task_type": ["navigate"], "status": "SUCCESS"}', 0),
    ("done", 0),
    ("", 0),
    ("[]", 0),
    ("[" * 9999, 0),
]


@pytest.mark.parametrize(("text", "score"), ANSWERS, ids=[text[:40] for text, _ in ANSWERS])
def test_the_type_and_the_status_of_a_response_are_scored(text, score):
    assert response_score(ResponseCheck("navigate", "SUCCESS", None, {"type": "null"}), text) == score


def test_the_right_answer_of_every_task_with_known_formats_scores():
    counted = 0
    for task in read_web_tasks(str(VERIFIED)):
        check = task.checks[0]
        assert isinstance(check, ResponseCheck)
        if check.task_type != "retrieve" or unread_formats(check.schema):
            continue
        if '"^' in json.dumps(check.data):
            continue  # the right answer is any that a pattern matches
        counted += 1
        data = [first(value) for value in check.data] if check.data else None
        assert response_score(check, answer(data, status=check.status)) == 1, task.task_id
        assert response_score(check, answer(["no such thing"], status=check.status)) == 0
    assert counted > 200


def first(value: Any) -> Any:
    """The first of alternatives, as one agent would answer."""
    if isinstance(value, list):
        return first(value[0])
    return value


def test_a_task_without_an_evaluator_is_refused_by_name():
    refused = {}
    for task in read_web_tasks(str(VERIFIED)):
        try:
            check_scored(task)
        except MarlRayError as error:
            refused[task.task_id] = str(error)
    assert refused["44"] == "task 44: NetworkEventEvaluator has no evaluator here"
    assert "results_schema: the format 'distance' has no evaluator here" in refused["100"]
    assert "0" not in refused


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.just(10**400) | st.text(max_size=8),
    st.lists,
    max_leaves=6,
)


@given(JSON, st.sampled_from([TEXT, NUMBER, TRUTH, MONEY, PAIR, NAMES]))
def test_whatever_an_agent_answers_has_a_score(data, schema):
    expected = {id(PAIR): [{"name": "a", "price": 1}], id(NAMES): [{"names": ["a"], "count": 1}]}.get(id(schema), [1])
    assert response_score(ResponseCheck("retrieve", "SUCCESS", expected, schema), answer(data)) in (0, 1)
