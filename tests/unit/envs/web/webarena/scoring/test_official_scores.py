"""WebArena's evaluators on a table of cases; every verdict is that of WebArena's own code."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marl_ray.envs.web.webarena.scoring.judges import PromptJudge, WordJudge
from marl_ray.envs.web.webarena.scoring.official import (
    address_score,
    answer_score,
    clean_text,
    content_score,
    must_include,
)
from marl_ray.envs.web.webarena.scoring.tokenization import words
from marl_ray.envs.web.webarena.tasks.schema import AnswerCheck, PageContent

CLEAN = [
    ("  Hello ", "hello"),
    ("'Hello'", "hello"),
    ('"Hello"', "hello"),
    ("\"'Hello'\"", "'hello'"),
    ("'Hello\"", "'hello\""),
    ("' Hello '", " hello "),
    ("'", ""),
    ("", ""),
]


@pytest.mark.parametrize(("text", "cleaned"), CLEAN)
def test_texts_are_cleaned_as_officially(text, cleaned):
    assert clean_text(text) == cleaned


EXACT = [
    ("Quest Lumaflex™ Band", "quest lumaflex™ band", 1),
    ("Quest Lumaflex™ Band", '"Quest Lumaflex™ Band"', 1),
    ("Quest Lumaflex™ Band", "\"'Quest Lumaflex™ Band'\"", 1),  # cleaned twice
    ("Quest Lumaflex™ Band", '"\'"Quest Lumaflex™ Band"\'"', 0),
    ("Quest Lumaflex™ Band", "Quest Lumaflex™ Band.", 0),
    ("2", "2.0", 0),
    ("557m", " 557M ", 1),
    ("N/A", "n/a", 1),
    ("yes", "", 0),
]


@pytest.mark.parametrize(("reference", "answer", "score"), EXACT)
def test_exact_answers_score_as_officially(reference, answer, score):
    assert answer_score(AnswerCheck(exact=reference), answer, "", WordJudge()) == score


INCLUDE = [
    (("Catso",), "The author is Catso, I believe.", 1),
    (("Catso", "Dibbins"), "Catso and Dibbins", 1),
    (("Catso", "Dibbins"), "Catso", 0),
    (("cat",), "concatenate", 1),  # a part of a word matches
    (("0",), "0", 1),
    (("0",), "10", 0),  # one character that stands alone must be a word
    (("0",), "there are 0 of them", 1),
    (("0",), "the answer is 0.", 1),
    (("0",), "0.0", 0),
    (("0",), "0, of course", 1),
    (("0",), "(0)", 1),
    (("0",), "0,5", 0),
    (("0",), "$0", 1),
    (("0",), "0%", 1),
    (("0",), "-0", 0),
    (("0",), "'0'", 1),
    (("0",), "#0!", 1),
    (("0",), "0:30", 0),
    (("0",), "it is 0. That is all.", 0),  # in lower case no sentence ends there
    (("0",), "it is 0. 12 are left", 1),
    (("0",), "0/1", 0),
    (("0", "1"), "10", 1),  # not alone in its task
    (("10",), "100", 1),
    (("'0'",), "10", 0),  # the reference is cleaned first
    (("yes",), "", 0),
    (("",), "anything", 1),
]


@pytest.mark.parametrize(("references", "answer", "score"), INCLUDE)
def test_included_answers_score_as_officially(references, answer, score):
    assert answer_score(AnswerCheck(include=references), answer, "", WordJudge()) == score


ADDRESSES = [
    (["http://shop.test/a"], "http://shop.test/a", 1),
    (["http://shop.test/a"], "http://shop.test/a/", 1),
    (["http://shop.test/a///"], "http://shop.test/a", 1),
    (["http://shop.test/a"], "http://shop.test/ab/c", 1),  # the reference is within the address
    (["http://shop.test/a/b"], "http://shop.test/a", 0),
    (["http://shop.test/a"], "https://shop.test/a", 1),  # the scheme does not count
    (["http://shop.test:80/a"], "http://shop.test/a", 0),
    (["http://shop.test/a"], "http://shop.test/A", 0),
    (["http://shop.test/a"], "http://shop.test/a?x=1", 1),
    (["http://shop.test/a?x=1"], "http://shop.test/a", 0),
    (["http://shop.test/a?x=1"], "http://shop.test/a?y=2&x=1", 1),
    (["http://shop.test/a?x=1&y=2"], "http://shop.test/a?x=1", 0),
    (["http://shop.test/a?x=1"], "http://shop.test/a?x=2&x=1", 1),
    (["http://shop.test/a", "http://shop.test/b"], "http://shop.test/b", 1),
    (["http://shop.test/a", "http://shop.test/b"], "http://shop.test/c", 0),
    (["http://shop.test/a?x=1", "http://shop.test/b?x=2"], "http://shop.test/a?x=2", 1),  # values are pooled
    (["http://shop.test/a?x=1", "http://shop.test/b"], "http://shop.test/b", 0),  # and their names too
    (["http://shop.test/a?x="], "http://shop.test/a", 1),  # a blank value is none
    (["http://shop.test/a?x=a%20b"], "http://shop.test/a?x=a+b", 1),
    (["http://shop.test/a#part"], "http://shop.test/a", 1),
    (["http://shop.test"], "http://evil.test/shop.test", 1),
    (["http://shop.test"], "about:blank", 0),
]


@pytest.mark.parametrize(("references", "address", "score"), ADDRESSES)
def test_addresses_score_as_officially(references, address, score):
    assert address_score(references, address) == score


CONTENTS = [
    (PageContent("last", "", exact="Blue"), " blue\n", 1),
    (PageContent("last", "", exact="Blue"), "light blue", 0),
    (PageContent("last", "", exact="R&B"), "R&amp;B", 1),
    (PageContent("last", "", exact=""), "", 1),
    (PageContent("last", "", include=(("blue",), ("red", "green"))), "<p>Blue and green</p>", 1),
    (PageContent("last", "", include=(("blue",), ("red", "green"))), "<p>Blue</p>", 0),
    (PageContent("last", "", include=(("0",),)), "10", 1),  # never as a word
    (PageContent("last", "", include=(('"a"',),)), "&quot;a&quot;", 1),
    (PageContent("last", "", include=()), "", 1),
    (PageContent("last", "", exact="a", include=(("b",),)), "a", 1),
]


@pytest.mark.parametrize(("content", "text", "score"), CONTENTS)
def test_contents_of_pages_score_as_officially(content, text, score):
    assert content_score(content, text) == score


def test_an_answer_must_match_all_references():
    check = AnswerCheck(include=("blue",), fuzzy=("It is a blue chair",))
    assert answer_score(check, "a blue chair", "", WordJudge()) == 1
    assert answer_score(check, "a chair", "", WordJudge()) == 0
    assert answer_score(check, "blue table", "", WordJudge()) == 0


REASONS = [
    ("N/A", 1),
    ("'n/a'", 1),
    ("There is no product of this kind in the shop", 1),
    ("It costs 12 dollars", 0),
    ("", 0),
]


@pytest.mark.parametrize(("answer", "score"), REASONS)
def test_what_cannot_be_done(answer, score):
    check = AnswerCheck(not_achievable=True, reason="There is no such product in the shop")
    assert answer_score(check, answer, "Buy it", WordJudge()) == score


FUZZY = [
    ("5 minutes", "It takes 5 minutes.", 1),
    ("5 minutes", "It takes 15 minutes.", 0),
    ("1,250 dollars", "1250 Dollars", 1),
    ("Monday to Friday", "friday, and monday", 1),
    ("the", "the", 1),
    ("the", "a", 0),
]


@pytest.mark.parametrize(("reference", "answer", "score"), FUZZY)
def test_the_offline_judge_compares_words(reference, answer, score):
    assert answer_score(AnswerCheck(fuzzy=(reference,)), answer, "", WordJudge()) == score


REPLIES = [
    ("The answer is correct.", 1),
    ("Correct", 1),
    ("This is incorrect.", 0),
    ("It is partially correct.", 0),
    ("I cannot say.", 0),
    ("correct, hence not incorrect", 0),
]


@pytest.mark.parametrize(("reply", "score"), REPLIES)
def test_a_model_that_judges_gets_question_and_answers_and_its_reply_is_read(reply, score):
    prompts = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return reply

    judge = PromptJudge(answer)
    assert answer_score(AnswerCheck(fuzzy=("twelve",)), "12", "How many?", judge) == score
    assert "question: How many?\nreference answer: twelve\n" in prompts[0]
    assert "student answer: 12\n" in prompts[0]


@pytest.mark.parametrize(("reply", "score"), [("same", 1), ("They are the same.", 1), ("different", 0), ("hm", 0)])
def test_a_model_that_judges_reasons_says_the_same_or_different(reply, score):
    check = AnswerCheck(not_achievable=True, reason="it is closed")
    assert answer_score(check, "closed today", "Go there", PromptJudge(lambda _: reply)) == score


WORDS = [  # NLTK's own words
    ("the answer is 0.", ["the", "answer", "is", "0", "."]),
    ("0,5 and 0, or (0)", ["0,5", "and", "0", ",", "or", "(", "0", ")"]),
    ("$0 0% #0 a@b", ["$", "0", "0", "%", "#", "0", "a", "@", "b"]),
    ("0:30 0: 0", ["0:30", "0", ":", "0"]),
    ("it's 5 o'clock, isn't it?", ["it", "'s", "5", "o'clock", ",", "is", "n't", "it", "?"]),
    ("\"5\" -- '6' ...7", ["``", "5", "''", "--", "'", "6", "'", "...", "7"]),
    ("", []),
]


@pytest.mark.parametrize(("text", "expected"), WORDS)
def test_words_are_parted_as_officially(text, expected):
    assert words(text) == expected


@given(st.text(max_size=40), st.text(max_size=40))
def test_a_text_includes_its_own_parts(before, after):
    assert must_include("x", f"{before} x {after}")
    assert clean_text(clean_text(before)) == clean_text(clean_text(before)).lower()


@given(st.lists(st.text(string.ascii_letters + string.digits, min_size=1), max_size=6))
def test_words_of_plain_texts_are_parted_by_spaces(texts):
    plain = [text for text in texts if not text.lower().endswith("n't")]
    assert words(" ".join(plain)) == plain
