"""The reward `llm_judge`: a language model grades answers."""

import json
import math
from collections.abc import Mapping
from typing import Any

from marl_ray.errors import MarlRayError, one_line
from marl_ray.rewards.judge.client import JudgeSettings, judge_client
from marl_ray.rewards.judge.prompt import RUBRIC, TEMPLATE, TEMPLATE_FIELDS, grade_of, judge_prompt, offline_reply
from marl_ray.rewards.option_numbers import check_finite, check_not_negative

REQUEST = {"temperature": 0, "max_tokens": 512}
"""Fields of a request unless others are given: the most likely reply, with room for an explanation."""
MAX_DEADLINE_S = 300.0
"""Maximum seconds of a judgement: a step of an environment, which may need one, may take ten minutes."""


class LLMJudge:
    """Pays the share of the highest grade that a language model gives an answer.

    `task.answer` is its reference, if there is one.

    url: an OpenAI-compatible API, `https://HOST/v1`.
    model: the API's name of the model.
    key_variable: the name of the environment variable that holds the key; empty, the default, for an API without one.
    rubric: what makes an answer good.
    template: the prompt, in place of the product's, with some of {rubric}, {mark}, {task}, {reference}, {answer}, {scale}.
    scale: the highest grade, 10.
    request: further fields of the request, in place of temperature 0 and 512 max_tokens.
    offline: True grades by common words, without a model. False by default.
    cache: a SQLite file for replies and spending that all workers share; by default none.
    deadline_s: seconds of a judgement, with its wait for a slot and with its retries, 60; at most 300.
    retries: most further requests of a judgement, 6.
    concurrency: slots for the requests of a process, 16.
    limit: most tokens, or with prices most money, of all runs with this cache; by default none.
    input_price: the price of a million tokens read, 0 or more; with `output_price` or not at all.
    output_price: the price of a million tokens written, 0 or more.
    when_spent: `error`, the default, ends the run at the limit; `fallback` continues.
    fallback: the reward where there is no grade, 0.
    max_failures: requests in a row without a reply that end the run, 50.

    Nothing that an answer or a reply says ends a run: a reply without a grade pays `fallback`.
    Metrics: `judge_calls`, `judge_cached`, `judge_failed` (0 or 1), `judge_cost` (tokens or money).
    """

    def __init__(
        self,
        url: str = "",
        model: str = "",
        key_variable: str = "",
        rubric: str = RUBRIC,
        template: str = TEMPLATE,
        scale: int = 10,
        request: Mapping[str, object] | None = None,
        offline: bool = False,
        cache: str | None = None,
        deadline_s: float = 60.0,
        retries: int = 6,
        concurrency: int = 16,
        limit: float | None = None,
        input_price: float | None = None,
        output_price: float | None = None,
        when_spent: str = "error",
        fallback: float = 0.0,
        max_failures: int = 50,
    ):
        """Raise ValueError or MarlRayError naming the option."""
        counts = {
            "scale": (scale, 1),
            "retries": (retries, 0),
            "concurrency": (concurrency, 1),
            "max_failures": (max_failures, 1),
        }
        for name, (count, least) in counts.items():
            if not (type(count) is int and count >= least):
                raise ValueError(f"{name}={count!r}, expected a whole number of at least {least}")
        wrong = {
            "deadline_s": (deadline_s, 0 < deadline_s <= MAX_DEADLINE_S, f"more than 0 to {MAX_DEADLINE_S:g}"),
            "limit": (limit, limit is None or 0 < limit < math.inf, "a finite number, more than 0"),
            "when_spent": (when_spent, when_spent in ("error", "fallback"), "error or fallback"),
        }
        for name, (value, fits, expected) in wrong.items():
            if not fits:
                raise ValueError(f"{name}={value!r}, expected {expected}")
        if (input_price is None) != (output_price is None):
            raise ValueError("input_price, output_price: expected both or none")
        for name, price in {"input_price": input_price, "output_price": output_price}.items():
            if price is not None:
                check_not_negative(name, price)
        check_finite("fallback", fallback)
        if limit is not None and cache is None:
            raise ValueError("limit: expected with `cache`, a file in which all workers add up what they spend")
        if not offline and not (url and model):
            raise ValueError("url, model: expected both, or offline: true")
        _check_template(template, rubric)
        self.scale = scale
        self.rubric = rubric
        self.template = template
        self.fallback = float(fallback)
        self._request = {"model": model, **(REQUEST if request is None else request)}
        try:
            json.dumps(self._request, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"request: expected what JSON holds ({one_line(error)})") from error
        settings = JudgeSettings(
            url=url,
            key_variable=key_variable,
            cache=cache,
            deadline_s=deadline_s,
            retries=retries,
            concurrency=concurrency,
            limit=limit,
            input_price=input_price,
            output_price=output_price,
            when_spent=when_spent,
            max_failures=max_failures,
        )
        self._client = None if offline else judge_client(settings)

    def __call__(self, prompt: str, answer: str, task: Any) -> tuple[float, dict[str, float]]:
        """Return the share of the highest grade, and metrics of the request, such as its cost."""
        texts = str(task.prompt), str(getattr(task, "answer", "")), answer
        if self._client is None:
            grade, cost, cached = grade_of(offline_reply(self.scale, *texts), self.scale), 0.0, False
        else:
            content = judge_prompt(self.template, self.rubric, self.scale, *texts)
            request = {**self._request, "messages": [{"role": "user", "content": content}]}
            reply = self._client.ask(request, lambda text: grade_of(text, self.scale) is not None)
            grade, cost, cached = grade_of(reply.text, self.scale), reply.cost, reply.cached
        called = self._client is not None and not cached
        counts = {"judge_calls": called, "judge_cached": cached, "judge_failed": grade is None, "judge_cost": cost}
        return self.fallback if grade is None else grade, {name: float(count) for name, count in counts.items()}


def _check_template(template: str, rubric: str) -> None:
    try:
        filled = template.format(**{field: f"<{field}>" for field in TEMPLATE_FIELDS})
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        allowed = ", ".join(f"{{{field}}}" for field in TEMPLATE_FIELDS)
        raise ValueError(f"template: cannot be filled ({error!r}); expected only {allowed}") from None
    if "<answer>" not in filled:
        raise MarlRayError("llm_judge: template: expected {answer} in it")
    if rubric != RUBRIC and "<rubric>" not in filled:
        raise MarlRayError("llm_judge: rubric: the template does not have {rubric}")
