"""The lines that `serve --local` prints for another terminal, and the end of a silent gateway's error."""

import pytest

from marl_ray.cli.serving.local_gateway import _lines
from marl_ray.errors import MarlRayError
from marl_ray.serving.client.admin import ask


def test_what_a_second_terminal_needs_is_printed_for_pasting() -> None:
    lines = _lines({"one": "http://127.0.0.1:8017", "two": "http://127.0.0.1:8017/two"}, "secret")
    assert lines[1:] == [
        "two runs at http://127.0.0.1:8017/two, its page at http://127.0.0.1:8017/two/ui",
        "export MARL_RAY_API_KEY=secret",
        "export MARL_RAY_GATEWAY=http://127.0.0.1:8017",
        "serving until Ctrl-C",
    ]
    assert not any("KEY" in line for line in _lines({"one": "http://127.0.0.1:8000"}, None))


def test_a_gateway_that_does_not_answer_is_an_error_with_the_remedy() -> None:
    with pytest.raises(
        MarlRayError,
        match=r"^gateway http://127.0.0.1:9/? does not answer: .* \(--url or MARL_RAY_GATEWAY names another",
    ):
        ask("http://127.0.0.1:9", "/v1/endpoints")
