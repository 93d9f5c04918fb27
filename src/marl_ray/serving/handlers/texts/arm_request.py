"""The request to a language model: the agent that writes, its prompt, and the settings of the client's request."""

from typing import Any

from marl_ray.errors import MAX_COMPARED, did_you_mean
from marl_ray.serving.arms.protocol import TextRequest
from marl_ray.serving.errors import WrongKindError
from marl_ray.serving.http.messages import RequestError
from marl_ray.serving.http.text_settings import Settings
from marl_ray.serving.routing.experiment.loaded_arms import LoadedArms
from marl_ray.serving.service import Service


def check_writes_text(arms: LoadedArms) -> None:
    """Raise WrongKindError if the experiment's policies write no text, UnavailableError if none of its arms is loaded."""
    if not arms.is_text:
        family = arms.bundle_of(arms.state.control).manifest.family
        message = f"{arms.state.experiment!r} serves {family} policies, expected token policies"
        raise WrongKindError(message, "experiment")


def make_text_request(service: Service, agent: str, prompt: Any, settings: Settings, **more: Any) -> TextRequest:
    """Make the request to an arm, with a random seed if the client gave none."""
    seed = service.draw_seed() if settings.seed is None else settings.seed
    logged = service.acts is not None
    return TextRequest(agent, prompt, seed, settings.greedy, settings.changes, logged=logged, **more)


def agent_of(arms: LoadedArms, agent: object) -> str:
    """Return the agent whose text the request asks for.

    A request may omit it if one policy plays all agents. Raises RequestError 400 for a wrong or missing one.
    """
    agents = arms.bundle_of(arms.state.control).agents
    if agent is None and len(set(agents.values())) == 1:
        return next(iter(agents))
    if not isinstance(agent, str):
        raise RequestError(400, "agent", f"expected one of {', '.join(agents)}")
    if agent not in agents:
        raise RequestError(400, "agent", f"{agent[:MAX_COMPARED]!r} is unknown{did_you_mean(agent, agents)}")
    return agent
