"""Parts that calls of the API share: files and mappings with changes by section, names of arguments, Ctrl-C."""

import contextlib
import gc
import sys
import weakref

import pytest
from toy_runs.run_configs import GOOD, run

import marl_ray
from marl_ray.api.calls import data_of, merge_changes, named_arguments, short_interrupt
from marl_ray.api.client import Client
from marl_ray.config import RunConfig, parse_config
from marl_ray.errors import MarlRayError


def test_a_section_keeps_the_keys_that_a_change_does_not_name():
    before = {"hyper": {"lr": 1, "gamma": 2}, "seeds": [1, 2]}
    assert merge_changes(before, {"hyper": {"lr": 3}, "seeds": [4]}) == {"hyper": {"lr": 3, "gamma": 2}, "seeds": [4]}
    assert before == {"hyper": {"lr": 1, "gamma": 2}, "seeds": [1, 2]}


def test_a_file_and_a_mapping_are_the_same_run(tmp_path):
    (tmp_path / "run.yaml").write_text("name: run\nenv: {id: MultiGrid-Empty-5x5-v0}\n")
    expected = run("hyper.lr=3e-3")
    for source in (tmp_path / "run.yaml", GOOD):
        data, name = data_of(source, {"hyper": {"lr": 3e-3}})
        assert parse_config(RunConfig, data, source=name) == expected


def test_what_is_no_config_is_one_line(tmp_path):
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(MarlRayError, match=r"/list\.yaml: expected a mapping of keys at the top, got list$"):
        data_of(tmp_path / "list.yaml", {})
    (tmp_path / "empty.yaml").touch()
    with pytest.raises(MarlRayError, match=r"/empty\.yaml: expected a mapping of keys at the top, got nothing$"):
        data_of(tmp_path / "empty.yaml", {})
    with pytest.raises(MarlRayError, match=r"^config file 'none\.yaml' cannot be read: No such file or directory$"):
        data_of("none.yaml", {})


def test_a_dotted_change_is_answered_with_its_section():
    with pytest.raises(MarlRayError, match=r"^hyper.lr: expected the section as an argument: hyper=\{'lr': 0.1\}$"):
        data_of(GOOD, {"hyper.lr": 0.1})


def test_a_misspelt_argument_is_named_with_what_was_meant():
    @named_arguments
    def act(self: int, *, greedy: bool = False) -> bool:
        return greedy

    assert act(1, greedy=True)
    with pytest.raises(MarlRayError, match=r"^gredy: is unknown; did you mean greedy\?$"):
        act(1, gredy=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("call", "arguments", "refusal"),
    [
        (marl_ray.train, {"confg": "run.yaml"}, "confg: is unknown; did you mean config"),
        (marl_ray.sweep, {"config": GOOD, "retri": True}, "retri: is unknown; did you mean retry"),
        (marl_ray.evaluate, {"polic": "bundle"}, "polic: is unknown; did you mean policy"),
        (marl_ray.evaluate, {"benchmark": "mbpp", "sample": None}, "sample: is unknown; did you mean samples"),
        (marl_ray.evaluate, {"policy": "bundle", "episods": 3}, "episods: is unknown; did you mean episodes"),
        (marl_ray.compare, {"runs": ["run"], "storag": "runs"}, "storag: is unknown; did you mean storage"),
        (marl_ray.load, {"bundel": "bundle"}, "bundel: is unknown; did you mean bundle"),
        (Client, {"ur": "http://127.0.0.1:9"}, "ur: is unknown; did you mean url"),
        (Client().generate, {"promt": "text"}, "promt: is unknown; did you mean prompt"),
        (Client().experiment, {"nam": "exp"}, "nam: is unknown; did you mean name"),
    ],
)
def test_every_call_names_an_unknown_argument_itself(call, arguments, refusal):
    with pytest.raises(MarlRayError, match=f"^{refusal}"):
        call(**arguments)


def test_ctrl_c_ends_a_script_with_one_line_and_may_be_caught(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # the block sets another
    with pytest.raises(KeyboardInterrupt) as caught, short_interrupt():
        raise KeyboardInterrupt
    sys.excepthook(KeyboardInterrupt, caught.value, None)
    assert capsys.readouterr().err == "marl-ray: interrupted\n"
    sys.excepthook(ValueError, ValueError("another error"), None)
    assert capsys.readouterr().err == "ValueError: another error\n"


def test_a_caught_ctrl_c_keeps_no_variable_of_its_call_alive_and_sets_one_hook(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    variables, hooks = [], []

    def interrupted_call() -> None:
        with short_interrupt():
            large = {"weights"}
            variables.append(weakref.ref(large))
            raise KeyboardInterrupt

    for _ in range(2):
        with contextlib.suppress(KeyboardInterrupt):
            interrupted_call()
        hooks.append(sys.excepthook)
    gc.collect()
    assert [variable() for variable in variables] == [None, None]
    assert hooks[0] is hooks[1] is not sys.__excepthook__


def test_an_outcome_that_is_no_number_is_refused_before_the_gateway_is_asked():
    with Client("http://127.0.0.1:9") as client, pytest.raises(MarlRayError) as refusal:
        client.record_outcome("session", "good")
    assert str(refusal.value) == "value: expected a number, got 'good'"


def test_what_is_no_mapping_of_a_request_is_refused_before_the_gateway_is_asked():
    with Client("http://127.0.0.1:9") as client:
        with pytest.raises(MarlRayError, match=r"^attributes: expected a mapping of names to values, got list$"):
            client.act({"alice": [0.0]}, attributes=["vip"])
        with pytest.raises(MarlRayError, match=r"^body: expected a mapping of fields to values, got list$"):
            client.request("/v1/act", ["session"])


@pytest.mark.parametrize("argument", ["observations", "action_masks"])
def test_a_list_instead_of_agents_is_refused_by_the_argument_that_holds_it(argument):
    arguments = {"observations": {"alice": [0.0]}} | {argument: [0.0]}
    with Client("http://127.0.0.1:9") as client, pytest.raises(MarlRayError) as refusal:
        client.act(**arguments)
    assert str(refusal.value) == f"{argument}: expected a mapping of agents, got list"
