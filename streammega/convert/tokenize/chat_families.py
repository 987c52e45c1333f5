"""Answers of the assistant in the text of a chat template: by the headers and the ends of turns that
a family of models writes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Sequence
from functools import cached_property


class Family:
    """Templates that write an answer between a header and an end.

    headers: what stands before an answer. One that begins with an end is written by the model
    itself, where an answer is open: it goes on to its next channel.
    ends: what ends an answer, which is learned too.
    """

    def __init__(self, name: str, headers: Sequence[str], ends: Sequence[str]) -> None:
        self.name = name
        self.headers = tuple(headers)
        self.ends = tuple(ends)

    @cached_property
    def in_messages(self) -> re.Pattern[str]:
        """Finds headers and ends that a message spells."""
        return spelled((*self.headers, *self.ends))

    @cached_property
    def _markers(self) -> re.Pattern[str]:
        return re.compile(any_of((*self.headers, *self.ends)))

    def answers(self, text: str, breaks: Sequence[int]) -> list[tuple[int, int]]:
        """[start, stop) characters of each answer, with its end.

        breaks: places within the headers and ends that messages spell, which count for nothing.
        """
        answers: list[tuple[int, int]] = []
        start: int | None = None
        for piece_start, piece_stop in itertools.pairwise((0, *breaks, len(text))):
            for marker in self._markers.finditer(text, piece_start, piece_stop):
                if marker[0] not in self.headers:
                    if start is not None:
                        answers.append((start, marker.end()))
                    start = None
                elif start is None or not marker[0].startswith(self.ends):
                    # The last header counts: a question may stand behind an unanswered one.
                    start = marker.end()
        return answers


FAMILIES = (
    Family("ChatML, Qwen", ["<|im_start|>assistant\n"], ["<|im_end|>"]),
    Family(
        "Llama 3",
        ["<|start_header_id|>assistant<|end_header_id|>\n\n"],
        ["<|eot_id|>", "<|eom_id|>"],
    ),
    Family("Mistral, Llama 2", ["[/INST]", "[/TOOL_RESULTS]"], ["</s>"]),
    Family("Gemma", ["<start_of_turn>model\n"], ["<end_of_turn>"]),
    Family("Gemma 4", ["<|turn>model\n"], ["<turn|>"]),
    Family("Phi-3", ["<|assistant|>\n"], ["<|end|>", "<|end|>\n<|endoftext|>"]),
    Family("Phi-4-mini", ["<|assistant|>"], ["<|end|>", "<|end|><|endoftext|>"]),
    Family("Phi-4", ["<|im_start|>assistant<|im_sep|>"], ["<|im_end|>"]),
    Family(
        "DeepSeek",
        ["<｜Assistant｜>", "<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>"],
        ["<｜end▁of▁sentence｜>"],
    ),
    Family(
        "gpt-oss",
        ["<|start|>assistant", "<|end|><|start|>assistant"],
        ["<|end|>", "<|call|>", "<|return|>"],
    ),
)


def any_of(names: Collection[str]) -> str:
    """An expression for the longest of some texts; one that fits nowhere if there are none."""
    if not names:
        return "(?!)"
    # an expression takes the first of its alternatives that fits
    longest_first = sorted(names, key=len, reverse=True)
    return f"(?:{'|'.join(map(re.escape, longest_first))})"


def spelled(names: Collection[str]) -> re.Pattern[str]:
    """Finds some tokens in a message, and at its end what could become one with the text behind."""
    begins = {name[:size] for name in names for size in range(1, len(name))}
    # some tokenizers fold letters
    return re.compile(f"{any_of(names)}|{any_of(begins)}\\Z", re.IGNORECASE)
