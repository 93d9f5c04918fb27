"""The tool `answer`, which every agent with tools has."""


class FinalAnswer:
    """Gives the final answer and ends the episode."""

    name = "answer"
    ends = True
    bounded = True

    def __call__(self, answer: str) -> str:
        """Return the answer, which the environment takes as the agent's last word."""
        return answer
