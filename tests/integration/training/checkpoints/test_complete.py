"""A checkpoint is complete: a run that continues from it has everything that the run that wrote it has."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_runs import object_graph, runs
from toys import texts

from marl_ray.config import RunConfig
from marl_ray.training.checkpoints import saving
from marl_ray.training.checkpoints.storage import local_stored_folder
from marl_ray.training.loop.assembly import build_run
from marl_ray.training.loop.run import Run
from marl_ray.training.loop.start import RunStart
from marl_ray.training.single_process import process_group

VERSION = "counts the refreshes of this process's copy, and only numbers of one process are compared"
DERIVED = {
    "run.clock": "measures the time since the last row",
    "run.evaluation.clock": "is run.clock",
    "run.saver": "writes the checkpoints",
    "run.transcripts": "shows the last batch to people",
}
"""Path of a state that is in no checkpoint -> the reason for which training does not need it. Whoever adds a line here says
why a run that died continues as if it had not."""
OF_PLAY = {
    "run.collector.starts": "is computed from the iteration at the start of each batch",
    "run.evaluation.evaluator.starts.evaluation_copies": "is made by the first evaluation, and each begins with resets",
}
OF_COMPILED = {
    f"run.team.learners[{name}]._has_compared": "says that this process has compared a compiled gradient, as each does"
    for name in ("first", "second")
}
OF_DECAY = {"run.team.learners[shared].trust_region": "is set from the run's steps before each update"}
OF_TEXTS = {
    "run.evaluation.evaluator.starts.collector": "is run.collector, which is compared",
    "run.collector.copies": "begins each batch with resets",
    "run.collector.groups": "holds the copies",
    "run.collector.group_sums": "is that of the last batch, and is in its metrics",
    "run.team.engines[speaker]._policy()[version]": VERSION,
    "run.team.learners[speaker].policy.models[1]()[version]": VERSION,
    "run.team.models[speaker]()[version]": VERSION,
}
COSTS = "constraints=[{budget: 4}]"
STEERED = ("hyper.kl_coef=0.1", "hyper.kl_target=0.01", "hyper.entropy_target=0.5")
LORA = (
    "team={speaker: {model: {preset: tiny-0.2m, context: 32, lora: {rank: 2}}, generation: {max_tokens: 4}}}",
    "train.curriculum=easiest_first",
    "train.total_steps=64",
)
CASES = {
    "multipliers": (
        runs.config("algorithm=mappo_lagrangian", COSTS, "evaluation.every=2", *STEERED[:2]),
        DERIVED | OF_PLAY,
    ),
    "integrals": (runs.config("algorithm=pid_lagrangian", COSTS, "hyper.lr_decay=true"), DERIVED | OF_PLAY | OF_DECAY),
    "policies": (runs.config("algorithm=happo", runs.TWO_POLICIES, STEERED[2]), DERIVED | OF_PLAY | OF_COMPILED),
    "adapters": (texts.config(*LORA), DERIVED | OF_TEXTS),
}


@pytest.fixture(scope="module", params=CASES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Run, Run, str, Path]]:
    """A run of three iterations, and one that was read from its checkpoint."""
    config: RunConfig = CASES[request.param][0]
    place = tmp_path_factory.mktemp("complete") / "3"
    with process_group():
        before = build_run(config, torch.device("cpu"))
        before.begin()
        for _ in range(3):
            before.step()
        before.save(local_stored_folder(place))
        before.saver.wait()
        resumed = build_run(config, torch.device("cpu"), RunStart([local_stored_folder(place)]))
        yield before, resumed, request.param, place
        resumed.close()
        before.close()


def test_a_run_that_goes_on_has_the_state_of_the_one_that_wrote_the_checkpoint(pair):
    before, resumed, case, _ = pair
    paths = dict(object_graph.walk(before, "run", frozenset(), CASES[case][1]))
    assert len(paths) > 500 and any("exp_avg" in path for path in paths)
    assert object_graph.differing(before, resumed, CASES[case][1]) == []


def after(event: threading.Event, action: Callable[..., Any]) -> Callable[..., Any]:
    """The action, which is taken when the event is set."""

    def late(*arguments: Any) -> Any:
        assert event.wait(60)
        return action(*arguments)

    return late


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_is_of_its_moment_however_late_it_is_written(case, tmp_path, monkeypatch):
    """Its thread copies when the next update waits for that, and writes when that update and another are done."""
    config, without = CASES[case]
    updates, ends = threading.Event(), threading.Event()
    monkeypatch.setattr(saving, "write", after(ends, saving.write))
    with process_group():
        run = build_run(config, torch.device("cpu"))
        run.begin()
        run.step()
        take, wait_for_copy = run.saver.copy.take, run.saver.wait_for_copy

        def update_and_wait() -> None:
            updates.set()
            wait_for_copy()

        monkeypatch.setattr(run.saver.copy, "take", lambda: after(updates, take()))
        monkeypatch.setattr(run.saver, "wait_for_copy", update_and_wait)
        run.save(local_stored_folder(tmp_path / "1"))
        moment = dict(object_graph.walk(run, "run", frozenset(), without))
        run.step()
        run.step()
        ends.set()
        run.saver.wait()
        read = build_run(config, torch.device("cpu"), RunStart([local_stored_folder(tmp_path / "1")]))
        again = dict(object_graph.walk(read, "run", frozenset(), without))
        read.close()
        run.close()
    changed = [path for path in {*moment, *again} if not object_graph.same(moment.get(path), again.get(path))]
    assert sorted(changed) == []


def test_a_state_that_no_checkpoint_holds_is_noticed(pair):
    """Wherever it is: in the run, its collector, a learner or a new object of these."""
    before, resumed, case, _ = pair
    name, learner = next(iter(before.team.learners.items()))
    owners = {"run": before, "run.collector": before.collector, f"run.team.learners[{name}]": learner}
    for path, owner in owners.items():
        for value in (3, torch.ones(2), {"seen": [1]}, type("Queue", (), {})()):
            owner.news = value
            if not isinstance(value, int | torch.Tensor | dict):
                value.items = [1.0]
            named = object_graph.differing(before, resumed, CASES[case][1])
            del owner.news
            assert named and all(each.startswith(f"{path}.news") for each in named)


def test_every_exception_is_one(pair):
    """A path in the list that exists no more, or that is equal, would hide what takes its name."""
    before, resumed, case, _ = pair
    known = CASES[case][1]
    compared = set(dict(object_graph.walk(before, "run", frozenset(), {})))
    compared |= set(dict(object_graph.walk(resumed, "run", frozenset(), {})))
    assert [path for path in known if not any(each.startswith(path) for each in compared)] == []


def test_frozen_weights_under_adapters_are_in_no_checkpoint(pair):
    before, _, case, place = pair
    manifest = json.loads((place / "manifest.json").read_text())
    size = sum(size for name, (size, _) in manifest["files"].items() if name.startswith("weights/"))
    parameters = list(next(iter(before.team.learners.values())).policy.model.parameters())
    frozen = sum(parameter.numel() for parameter in parameters if not parameter.requires_grad)
    if case == "adapters":
        assert frozen > 150_000 and size < 4 * frozen / 2
    else:
        assert frozen == 0
