"""The lines and the refusals of `marl_ray.train` before Ray starts."""

import pytest
from toy_runs.runs import config

from marl_ray.api.training import TrainedRun, shared_weights_lines
from marl_ray.errors import MarlRayError
from marl_ray.training.run_checks import check_run
from marl_ray.training.run_folder.metrics_file import METRICS_FILE, line_of
from marl_ray.training.run_result import RunResult


def test_agents_that_share_weights_are_named(tmp_path):
    shared = check_run(config(f"storage={tmp_path}"))
    (members,) = shared.values()
    assert len(members) > 1
    assert shared_weights_lines(shared) == [
        f"{', '.join(members)} share the weights of policy 'shared'; `team` gives agents policies of their own"
    ]
    overrides = [f"team.p{number}.agents=[{agent}]" for number, agent in enumerate(members)]
    assert shared_weights_lines(check_run(config(f"storage={tmp_path}", *overrides))) == []


def test_an_address_that_mlflow_does_not_understand_is_refused(tmp_path):
    with pytest.raises(
        MarlRayError, match=r"^tracking.uri: 'htp://here' cannot be used: .*unsupported URI 'htp://here'"
    ):
        check_run(config(f"storage={tmp_path}", "tracking.uri=htp://here"))
    check_run(config(f"storage={tmp_path}", "tracking.uri=http://127.0.0.1:9"))


@pytest.mark.parametrize("key", ["return", "eval/return"])
def test_a_warm_start_is_in_the_metrics_and_not_in_the_curve(tmp_path, key):
    (tmp_path / "toy").mkdir()
    epochs = [{"steps": 0.0, "warm_start/epoch": epoch, key: -1.0} for epoch in (1.0, 2.0)]
    iterations = [{"iteration": i, "steps": 32 * i, key: float(i), "return": float(i)} for i in range(3)]
    (tmp_path / "toy" / METRICS_FILE).write_text("".join(line_of(row) + "\n" for row in (*epochs, *iterations)))
    result = RunResult("toy", "", "b", None, "sqlite:///m.db", "1", 0.5, {}, [])
    run = TrainedRun(config(f"storage={tmp_path}"), result)
    assert [row.get("warm_start/epoch") for row in run.metrics] == [1.0, 2.0, None, None, None]
    assert run.curve == [(0, 0.0), (32, 1.0), (64, 2.0)]
