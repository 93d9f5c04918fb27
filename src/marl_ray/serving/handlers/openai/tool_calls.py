"""A reader that finds calls of tools in a text while it is written."""

import re
import secrets
from collections.abc import Collection

from marl_ray.json_types import JsonObject
from marl_ray.policies.prompting.tool_template import CLOSE_TAG, OPEN_TAG, WrittenCall, calls_in

_ESCAPED = re.compile(r"\\.", re.DOTALL)


class ToolCallReader:
    """Separates a model's text into text for the user and calls.

    Calls are `<tool_call>` blocks anywhere, or a whole response of JSON. Text that may become a call is held back until
    it is one, or cannot become one. A block is parsed when a closing mark comes, and not with every part, because the
    reader runs on the event loop and a part may be a single token.
    """

    def __init__(self, names: Collection[str], parallel: bool):
        """`names` are the tools' names; without `parallel` all calls but the first are dropped."""
        self._names = names
        self._parallel = parallel
        self._held_back = self._held_blanks = ""
        self._unread: list[str] = []
        """Parts behind the text that is held back, none of which can end it."""
        self._last_characters = ""
        """The end of the text so far, in which a closing mark may have begun."""
        self._is_json: bool | None = None
        self._is_block_open = False
        """True if the text that is held back begins with a block, which later text closes."""
        self._block_search = _BlockSearch()
        self.calls = 0
        """The number of calls so far."""

    def add(self, text: str, is_last: bool) -> tuple[str, list[JsonObject]]:
        """Return the text that later tokens cannot change, and the calls that are complete.

        The calls are in the form of OpenAI's API.
        """
        text_with_seam = self._last_characters + text
        self._last_characters = text_with_seam[1 - len(CLOSE_TAG) :]
        self._unread.append(text)
        if not is_last and (self._is_json or (self._is_block_open and CLOSE_TAG not in text_with_seam)):
            return "", []
        self._held_back = "".join([self._held_back, *self._unread])
        self._unread = []
        if self._is_json is None and (self._held_back.strip() or is_last):
            self._is_json = self._held_back.lstrip()[:1] in ("{", "[")
        if not is_last and self._is_json is not False:
            return "", []
        if self._is_json and (calls := calls_in(self._held_back)) and all(call.name in self._names for call in calls):
            return "", self._call_fields(calls)
        self._is_json = False
        return self._read_blocks(is_last)

    def _read_blocks(self, is_last: bool) -> tuple[str, list[dict[str, object]]]:
        text = ""
        calls = list[JsonObject]()
        while (at := self._held_back.find(OPEN_TAG)) >= 0:
            begin = at + len(OPEN_TAG)
            end = self._block_search.closing_index(self._held_back, begin)
            if end is None and not is_last:
                break
            if end is None:
                is_call = bool(calls_in(self._held_back[begin:]))
                end = None if is_call else self._block_search.first_mark(begin)
            self._block_search = _BlockSearch()
            block = self._held_back[begin:end]
            behind = len(self._held_back) if end is None else end + len(CLOSE_TAG)
            in_block = calls_in(block)
            if in_block:
                text += self._held_back[:at].rstrip()
                if not text:
                    self._held_blanks = ""
                calls += self._call_fields(in_block)
            else:
                text += self._held_back[:behind]
            self._held_back = self._held_back[behind:]
        self._is_block_open = at >= 0
        kept_length = 0 if is_last else _overlap(self._held_back, OPEN_TAG)
        if at >= 0:
            kept_length = len(self._held_back) - at
        text += self._held_back[: len(self._held_back) - kept_length]
        self._held_back = self._held_back[len(self._held_back) - kept_length :]
        return self._strip_blanks(text, is_last), calls

    def _strip_blanks(self, text: str, is_last: bool) -> str:
        """Return the text without blanks around calls.

        Blanks at its end are held back until the next part.
        """
        text_with_blanks = self._held_blanks + text
        visible = text_with_blanks if is_last and not self.calls else text_with_blanks.rstrip()
        self._held_blanks = text_with_blanks[len(visible) :]
        return visible

    def _call_fields(self, calls: list[WrittenCall]) -> list[dict[str, object]]:
        if not self._parallel:
            calls = calls[: 1 - min(self.calls, 1)]
        call_fields = [
            {
                "index": self.calls + k,
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for k, call in enumerate(calls)
        ]
        self.calls += len(call_fields)
        return call_fields


class _BlockSearch:
    """The search for the end of one block, whose text grows.

    A JSON string in the arguments may contain the closing mark. Each mark is looked at once. Positions are kept
    relative to the block's begin, because the text before the block is dropped meanwhile.
    """

    def __init__(self) -> None:
        self._first_mark: int | None = None
        self._searched = 0

    def closing_index(self, text: str, begin: int) -> int | None:
        """Return the index at which the block that begins here is closed; None if later text decides that."""
        while (end := text.find(CLOSE_TAG, begin + self._searched)) >= 0:
            self._searched = end + len(CLOSE_TAG) - begin
            if self._first_mark is None:
                self._first_mark = end - begin
            block = text[begin:end].strip()
            if calls_in(block):
                return end
            if not block.startswith(("{", "[")) or _ESCAPED.sub("", block).count('"') % 2 == 0:
                return begin + self._first_mark  # no later text can make it a call
        return None

    def first_mark(self, begin: int) -> int | None:
        """Return the index of the first closing mark that `closing_index` has met, None without one."""
        return None if self._first_mark is None else begin + self._first_mark


def _overlap(text: str, start: str) -> int:
    """Return the length of the longest beginning of `start` that `text` ends with."""
    return next((n for n in range(min(len(text), len(start) - 1), 0, -1) if text.endswith(start[:n])), 0)
