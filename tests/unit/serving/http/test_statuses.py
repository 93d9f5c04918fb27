"""Each cause of a refusal has a status of HTTP, and keeps all that it says."""

import pickle

import pytest

from marl_ray.serving.errors import (
    BusyError,
    InvalidRequestError,
    ServingError,
    UnavailableError,
    UnknownExperimentError,
    WrongKindError,
)
from marl_ray.serving.http.messages import RequestError
from marl_ray.serving.http.statuses import STATUSES, as_request_error


@pytest.mark.parametrize(
    ("error", "status", "field", "headers"),
    [
        (InvalidRequestError("expected a text", "prompt"), 400, "prompt", ()),
        (UnknownExperimentError("unknown experiment 'x'", "experiment"), 404, "experiment", ()),
        (WrongKindError("'x' serves token policies", "model"), 422, "model", ()),
        (UnavailableError("no arm answers", 2.5), 503, None, ((b"retry-after", b"3"),)),
        (BusyError("no room"), 503, None, ((b"retry-after", b"1"),)),
        (RequestError(413, "body", "too large"), 413, "body", ()),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, ServingError) else "",
)
def test_each_cause_has_its_status_and_keeps_its_field_and_its_wait(error, status, field, headers):
    refusal = as_request_error(error)
    assert (refusal.status, refusal.field, str(refusal), refusal.headers) == (status, field, str(error), headers)


def test_every_class_of_causes_has_a_status():
    causes, waiting = set(), [ServingError]
    while waiting:
        waiting += (subclasses := waiting.pop().__subclasses__())
        causes |= set(subclasses)
    assert causes - {RequestError} == STATUSES.keys()


@pytest.mark.parametrize(
    "error",
    [InvalidRequestError("too long", "prompt", code="context_length_exceeded"), BusyError("no room", 7.0)],
    ids=["invalid", "busy"],
)
def test_a_cause_crosses_processes_with_all_that_it_says(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error)
    assert (copy.field, copy.retry_after_s, copy.code) == (error.field, error.retry_after_s, error.code)
