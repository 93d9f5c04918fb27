"""Judges of fuzzy matches, which decide if an answer says the same as a reference."""

import re
from collections.abc import Callable
from typing import Protocol

from typing_extensions import override

_WORD = re.compile(r"\d+(?:[.,:]\d+)*|[^\W\d_]+")
_LITTLE_WORDS = {*"a an and are as at be by for from in is it of on or than that the this to was were with".split()}  # noqa: SIM905
_MIN_SHARED_WORDS = 0.75
"""Share of a reference's words that an answer must have to mean the same."""


class FuzzyJudge(Protocol):
    """Compares texts by their meaning. Both methods return 1.0 for the same and 0.0 for another meaning."""

    def same_answer(self, answer: str, reference: str, question: str) -> float:
        """Compare an answer to the question of a task with the reference."""

    def same_reason(self, reported: str, actual: str, question: str) -> float:
        """Compare the reason that an agent reports for giving up the task `question` with the actual one."""


class WordJudge(FuzzyJudge):
    """Compares words, without a model: always the same verdict for the same texts.

    An answer means the same as a reference if it has all of its numbers and three quarters of its other words, without
    regard to case, order and little words. WebArena asks GPT-4, which is kinder to other wording.
    """

    @override
    def same_answer(self, answer: str, reference: str, question: str) -> float:
        answer_words, reference_words = _content(answer), _content(reference)
        numbers = {word for word in reference_words if word[0].isdigit()}
        names = reference_words - numbers
        if not reference_words:
            return float(answer.strip().casefold() == reference.strip().casefold())
        return float(numbers <= answer_words and len(names & answer_words) >= _MIN_SHARED_WORDS * len(names))

    @override
    def same_reason(self, reported: str, actual: str, question: str) -> float:
        return self.same_answer(reported, actual, question)


class PromptJudge(FuzzyJudge):
    """Asks a language model with WebArena's prompts, and reads its reply by WebArena's rules.

    reply: a function from a prompt to a model's reply. A reply with no verdict counts as another meaning; WebArena's own
    code ends with an error there.
    """

    def __init__(self, reply: Callable[[str], str]):
        self._reply = reply

    @override
    def same_answer(self, answer: str, reference: str, question: str) -> float:
        prompt = (
            "Help a teacher to grade the answer of a student given a question. Keep in mind that the student may use "
            "different phrasing or wording to answer the question. The goal is to evaluate whether the answer is "
            f"semantically equivalent to the reference answer.\nquestion: {question}\nreference answer: {reference}\n"
            "all the string 'N/A' that you see is a special sequence that means 'not achievable'\n"
            f"student answer: {answer}\nConclude the judgement by correct/incorrect/partially correct."
        )
        reply = self._reply(prompt).lower()
        if "partially correct" in reply or "incorrect" in reply:
            return 0.0
        return float("correct" in reply)

    @override
    def same_reason(self, reported: str, actual: str, question: str) -> float:
        prompt = (
            f"task: {question}\nactual unachievable reason: {actual}\nreported unachievable reason: {reported}\n"
            "The task described above is inherently unachievable due to the reason specified under 'actual unachievable "
            "reason'. An individual previously attempted this task and was unable to complete it. They provided a reason "
            "for their failure, which is listed under 'reported unachievable reason'. Your role is to review both the "
            "actual and reported reasons. Determine if the reported reason aligns with the actual reason, even if "
            "implicitly. If the stated reason is in line with the actual reason, respond with 'same'. Otherwise, respond "
            "with 'different'."
        )
        reply = self._reply(prompt).lower()
        return float("different" not in reply and "same" in reply)


def _content(text: str) -> set[str]:
    return {word.replace(",", "") for word in _WORD.findall(text.casefold())} - _LITTLE_WORDS
