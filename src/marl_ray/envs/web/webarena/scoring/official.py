"""The three evaluators of WebArena as pure functions, equal to its code to the letter.

Source: https://github.com/web-arena-x/webarena, evaluation_harness/evaluators.py at f62e0b99bc7d. What is known to be weak
there is weak here too: parts of words match, and the values of alternative addresses are pooled.
"""

import html
from collections.abc import Sequence
from urllib.parse import parse_qs, urlparse

from marl_ray.envs.web.webarena.scoring.judges import FuzzyJudge
from marl_ray.envs.web.webarena.scoring.tokenization import words
from marl_ray.envs.web.webarena.tasks.schema import NOT_ACHIEVABLE, AnswerCheck, PageContent


def clean_text(text: str) -> str:
    """Return the text without spaces around it and without one pair of quotes, in lower case."""
    text = text.strip()
    for quote in "'", '"':
        if text.startswith(quote) and text.endswith(quote):
            return text[1:-1].lower()
    return text.lower()


def exact_match(reference: str, text: str) -> bool:
    """Return True if both are equal once cleaned."""
    return clean_text(text) == clean_text(reference)


def must_include(reference: str, text: str, alone: bool = False) -> bool:
    """Return True if the cleaned reference is in the cleaned text.

    A reference of one character that stands alone in its task must be a word there, so that `0` is not in `10`.
    """
    reference, text = clean_text(reference), clean_text(text)
    if alone and len(reference) == 1 and len(words(reference)) == 1:
        return reference in words(text)
    return reference in text


def answer_score(check: AnswerCheck, answer: str, intent: str, judge: FuzzyJudge) -> float:
    """Return the score of `string_match`, which is 1.0 if the answer matches all references of the check, else 0.0.

    answer: what the agent gave with `stop`.
    intent: the task in words, which the judge reads.
    """
    answer = clean_text(answer)
    if check.not_achievable:
        # As in WebArena: a reason that a judge accepts counts for everything.
        return float(exact_match(NOT_ACHIEVABLE, answer)) or judge.same_reason(answer, check.reason, intent)
    matches = check.exact is None or exact_match(check.exact, answer)
    matches = matches and all(must_include(phrase, answer, len(check.include) == 1) for phrase in check.include)
    return float(matches and all(judge.same_answer(answer, reference, intent) for reference in check.fuzzy))


def address_score(references: Sequence[str], address: str) -> float:
    """Return the score of `url_match`, which is 1.0 if the address fits the references, else 0.0.

    The address fits if the host and path of a reference are within its own, and if for every parameter of the
    references one of its values is in the address.
    """
    final = urlparse(address.rstrip("/"))
    expected = [urlparse(reference.rstrip("/")) for reference in references]
    if not any(url.netloc + url.path in final.netloc + final.path for url in expected):
        return 0.0
    values: dict[str, set[str]] = {}
    for url in expected:
        for name, accepted in parse_qs(url.query).items():
            values.setdefault(name, set()).update(accepted)
    query = parse_qs(final.query)
    return float(all(accepted & set(query.get(name, [])) for name, accepted in values.items()))


def content_score(content: PageContent, text: str) -> float:
    """Return the score of one part of a page in `program_html`.

    `text` is the part as the browser gives it, HTML entities and all.
    """
    text = html.unescape(text)
    if content.exact is not None:
        return float(exact_match(content.exact, text))
    return float(all(any(must_include(item, text) for item in items) for items in content.include))
