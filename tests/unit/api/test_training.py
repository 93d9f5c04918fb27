"""The lines and the refusals of `marl_ray.train` before Ray starts."""

import pytest
from toy_runs.runs import config

from marl_ray.api.training import shared_weights
from marl_ray.errors import MarlRayError
from marl_ray.training.run_checks import check_run


def test_agents_that_share_weights_are_named(tmp_path):
    shared = check_run(config(f"storage={tmp_path}"))
    (members,) = shared.values()
    assert len(members) > 1
    assert shared_weights(shared) == [
        f"{', '.join(members)} share the weights of policy 'shared'; `team` gives agents policies of their own"
    ]
    overrides = [f"team.p{number}.agents=[{agent}]" for number, agent in enumerate(members)]
    assert shared_weights(check_run(config(f"storage={tmp_path}", *overrides))) == []


def test_an_address_that_mlflow_does_not_understand_is_refused(tmp_path):
    with pytest.raises(
        MarlRayError, match=r"^tracking.uri: 'htp://here' cannot be used: .*unsupported URI 'htp://here'"
    ):
        check_run(config(f"storage={tmp_path}", "tracking.uri=htp://here"))
    check_run(config(f"storage={tmp_path}", "tracking.uri=http://127.0.0.1:9"))
