"""Words of a text as NLTK's `word_tokenize` parts them, by which WebArena looks for a reference of one character."""

import re

_STEPS = (  # NLTK 3.10's NLTKWordTokenizer, in its order
    (re.compile(r"([«“‘„]|[`]+)"), r" \1 "),  # noqa: RUF001
    (re.compile(r"^\""), r"``"),
    (re.compile(r"(``)"), r" \1 "),
    (re.compile(r"([ \(\[{<])(\"|\'{2})"), r"\1 `` "),
    (re.compile(r"(?i)(?<!\w)(\')(?!(?:re|ve|ll|m|t|s|d|n)\b)(?=\w)"), r"\1 "),
    (re.compile(r"([^\.])(\.)([\]\)}>\"\'»”’ ]*)\s*$"), r"\1 \2 \3 "),  # noqa: RUF001
    (re.compile(r"([:,])([^\d])"), r" \1 \2"),
    (re.compile(r"([:,])$"), r" \1 "),
    (re.compile(r"\.{2,}"), r" \g<0> "),
    (re.compile(r"[;@#$%&]"), r" \g<0> "),
    (re.compile(r"[\u2012-\u2015]"), r" \g<0> "),
    (re.compile(r"([^\.])(\.)([\]\)}>\"\']*)\s*$"), r"\1 \2\3 "),
    (re.compile(r"[?!]"), r" \g<0> "),
    (re.compile(r"([^'])' "), r"\1 ' "),
    (re.compile(r"[*]"), r" \g<0> "),
    (re.compile(r"[\]\[\(\)\{\}\<\>]"), r" \g<0> "),
    (re.compile(r"--"), r" -- "),
)
_ENDS = (
    (re.compile(r"([»”’])"), r" \1 "),  # noqa: RUF001
    (re.compile(r"''"), " '' "),
    (re.compile(r'"'), " '' "),
    (re.compile(r"\s+"), " "),
    (re.compile(r"([^' ])('[sS]|'[mM]|'[dD]|') "), r"\1 \2 "),
    (re.compile(r"([^' ])('ll|'LL|'re|'RE|'ve|'VE|n't|N'T) "), r"\1 \2 "),
)
_SENTENCE_END = re.compile(r"(?<=[.?!])[\])}>\"']*\s+(?=[^\sa-z])")
"""NLTK decides by a trained model; this takes every mark before what does not begin in lower case for an end."""


def words(text: str) -> list[str]:
    """Return the words and marks of a text.

    Sentences are parted first, because a period is a mark of its own only at their end.
    """
    return [word for sentence in _SENTENCE_END.split(text) for word in _split_sentence(sentence)]


def _split_sentence(text: str) -> list[str]:
    for pattern, replacement in _STEPS:
        text = pattern.sub(replacement, text)
    text = f" {text} "
    for pattern, replacement in _ENDS:
        text = pattern.sub(replacement, text)
    return text.split()
