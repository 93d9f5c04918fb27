"""Teams of bundles act in this process as they do in a gateway."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from toy_serving.gateways import SEES, make_bundle
from toy_serving.text_gateways import make_text_bundle

import marl_ray
from marl_ray.errors import FieldError, MarlRayError
from marl_ray.policies.engines.torch_engine import TorchEngine


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[marl_ray.LoadedTeam]:
    agents = {"coder": "lm", "critic": "lm"}
    team = marl_ray.load(make_text_bundle(tmp_path_factory.mktemp("texts"), 1, agents, context=1024))
    yield team
    team.close()


def test_actor_critics_act_as_arrays_and_lists_ask(tmp_path):
    team = marl_ray.load(make_bundle(tmp_path, 4))
    assert team.agents == {"agent_0": "p", "agent_1": "p"}
    assert str(team) == f"<LoadedTeam agent_0: p (ippo), agent_1: p (ippo); from {team.source}>"
    assert team.act(SEES, greedy=True) == {"agent_0": 4, "agent_1": 4}
    arrays = {agent: np.array(row) for agent, row in SEES.items()}
    assert team.act(arrays, seed=1) == team.act(SEES, seed=1)
    only_two = {"agent_0": [0, 0, 1, 0, 0, 0]}
    assert team.act(SEES, greedy=True, action_masks=only_two) == {"agent_0": 2, "agent_1": 4}


@pytest.mark.parametrize(
    ("observations", "options", "message"),
    [
        ({"nobody": [0, 0, 0]}, {}, "observations.nobody: unknown agent; expected one of agent_0, agent_1"),
        (
            {"agent_0": [0, 9, 0]},
            {},
            "observations.agent_0: expected an array of shape [3] of integers within the space, "
            "got a category out of range",
        ),
        ([0, 1, 2], {}, "observations: expected agent -> observation, got list"),
        (
            SEES,
            {"action_masks": {"agent_0": [0] * 6}},
            "action_masks.agent_0: expected 6 numbers 0 or 1, at least one of them 1",
        ),
        (
            {"agent_0": [0, 0, 0]},
            {"action_masks": {"agent_1": [1] * 6}},
            "action_masks.agent_1: expected an observation of this agent too",
        ),
        (SEES, {"gredy": True}, "gredy: is unknown; did you mean greedy?"),
        (SEES, {"seed": -1}, "seed: expected a whole number of 0 or more, got -1"),
        (SEES, {"seed": True}, "seed: expected a whole number of 0 or more, got True"),
        (SEES, {"generation": {"max_tokens": 3}}, "generation: expected none, the bundle holds actor-critics"),
    ],
)
def test_a_wrong_observation_is_named(tmp_path, observations, options, message):
    with pytest.raises(FieldError, match=f"^{re.escape(message)}$"):
        marl_ray.load(make_bundle(tmp_path, 4)).act(observations, **options)


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ({"bundle": None}, "bundle: expected a bundle's folder, models:/NAME/VERSION or models:/NAME@ALIAS, got None"),
        (
            {"bundle": ["a"]},
            "bundle: expected a bundle's folder, models:/NAME/VERSION or models:/NAME@ALIAS, got ['a']",
        ),
        ({"bundle": "a", "tracking_uri": 3}, "tracking_uri: expected a URI, got 3"),
    ],
)
def test_an_argument_of_a_wrong_type_is_named_before_a_bundle_is_looked_for(arguments, refusal):
    with pytest.raises(FieldError) as caught:
        marl_ray.load(**arguments)
    assert str(caught.value) == refusal


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (
            {"seed": np.arange(1000).reshape(10, 100)},
            "seed: expected a whole number of 0 or more, got array([[ 0, 1, 2,",
        ),
        ({"action_masks": [1, 0]}, "action_masks: expected agent -> mask, got list"),
        ({"generation": "greedy"}, "generation: expected settings by name, got str"),
    ],
)
def test_an_option_of_an_act_of_a_wrong_type_is_named_in_one_line(tmp_path, options, refusal):
    with pytest.raises(FieldError) as caught:
        marl_ray.load(make_bundle(tmp_path, 4)).act(SEES, **options)
    assert str(caught.value).startswith(refusal) and "\n" not in str(caught.value)


def test_a_run_is_answered_with_its_bundle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "walk").mkdir(parents=True)
    Path(make_bundle(tmp_path / "runs" / "walk", 4)).rename(tmp_path / "runs" / "walk" / "bundle")
    with pytest.raises(MarlRayError, match=r"it is the name of a run, whose bundle is runs/walk/bundle$"):
        marl_ray.load("walk")
    Path(make_bundle(tmp_path, 4)).rename(tmp_path / "bundle")
    with pytest.raises(MarlRayError, match=rf"it is the folder of a run, whose bundle is {tmp_path}/bundle$"):
        marl_ray.load(tmp_path)
    message = "bundle 'mine' has no readable bundle.json: No such file or directory; "
    message += "expected a bundle's folder, models:/NAME/VERSION or models:/NAME@ALIAS"
    with pytest.raises(MarlRayError, match=f"^{re.escape(message)}$"):
        marl_ray.load("mine")


def test_language_models_answer_texts(writers):
    prompts = {"coder": "def f(x):", "critic": "it fails"}
    sample = writers.act(prompts, seed=3)
    assert sample.keys() == prompts.keys()
    assert sample == writers.act(prompts, seed=3) != writers.act(prompts, seed=4)
    greedy = writers.act(prompts, greedy=True)
    assert writers.act(prompts, greedy=True, seed=3) == greedy
    longer = writers.act({"coder": "def f(x):"}, greedy=True, generation={"max_tokens": 40})["coder"]
    assert longer.startswith(greedy["coder"]) and len(longer) > len(greedy["coder"]) > 0


def test_an_engine_that_fails_to_close_leaves_no_other_open(tmp_path, monkeypatch):
    policies = {"coder": "one", "critic": "two"}
    team = marl_ray.load(make_text_bundle(tmp_path, 1, policies, context=1024))
    team.act(dict.fromkeys(policies, "x"))
    closed: list[TorchEngine] = []

    def close(engine: TorchEngine) -> None:
        closed.append(engine)
        raise OSError("it does not close")

    monkeypatch.setattr(TorchEngine, "close", close)
    with pytest.raises(OSError, match="it does not close"):
        team.close()
    assert len(set(closed)) == 2
    team.close()  # nothing is left to close
    assert len(closed) == 2


@pytest.mark.parametrize(
    ("observations", "options", "message"),
    [
        ({"nobody": "x"}, {}, "observations.nobody: unknown agent; expected one of coder, critic"),
        ({"coder": 3}, {}, "observations.coder: expected a text, got int"),
        (
            {"coder": "x" * 2000},
            {},
            "prompt: 2001 tokens and generation.max_tokens=12 exceed model.context=1024; "
            "expected model.context=2013 or more",
        ),
        (
            {"coder": "x"},
            {"generation": {"max_token": 3}},
            "generation: unknown key 'max_token'; did you mean max_tokens?",
        ),
        ({"coder": "x"}, {"action_masks": {}}, "action_masks: expected none, the bundle holds language models"),
    ],
)
def test_a_wrong_prompt_is_named(writers, observations, options, message):
    with pytest.raises(MarlRayError, match=f"^{re.escape(message)}$"):
        writers.act(observations, **options)
