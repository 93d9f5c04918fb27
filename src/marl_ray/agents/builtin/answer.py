"""The tool `answer`, which every agent with tools has."""


class FinalAnswer:
    """Gives the final answer and ends the episode."""

    name = "answer"
    ends = True
    bounded = True

    def __call__(self, answer: str) -> str:
        return answer
