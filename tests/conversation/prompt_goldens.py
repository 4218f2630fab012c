"""What each prompt format writes and trains, as text to read.

``goldens/NAME.txt`` has the conversations of ``CASES`` one after another: each line of the render
after a bar, its line end as ``⏎``, the end of the text as ``∎``, and ⟦ ⟧ around what is trained.
Where the format refuses a conversation, the message that it refuses stands there.

    python tests/conversation/prompt_goldens.py NAME...

writes the files anew: look at the difference before it is committed.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from megatron_ext.conversation import IGNORE_INDEX, prompt_config_of, tokenize_conversation
from megatron_ext.errors import ConversationError
from tests.conversation.byte_tokenizer import CONTROL_TOKENS, ByteTokenizer

GOLDENS: Final = Path(__file__).with_name("goldens")

OWN_TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Stands for the tokenizer's own template."""


@dataclass(frozen=True)
class Case:
    """A conversation and how it is asked for."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = False
    """Ids to go on from; otherwise ids to train."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """What the template sees besides."""


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, *calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    made = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"role": "assistant", "content": content} | ({"tool_calls": made} if made else {})


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content}


TURNS: Final = [
    system(" Be brief. "),
    user("Hi\n"),
    assistant(" Hello!\n"),
    user("Bye"),
    assistant("Bye."),
]
THINKING: Final = [
    user("2 + 2?"),
    assistant("<think>\nAdd.\n</think>\n\n4"),
    user("3 + 3?"),
    assistant("<think>\nAdd again.\n</think>\n\n6"),
]
WEATHER: Final = {"name": "weather", "parameters": {"city": "string"}}
TOOLS: Final = {"tools": [{"type": "function", "function": WEATHER}]}
CALL: Final = ("weather", {"city": "Paris"})

CASES: Final = {
    "several turns": Case(TURNS),
    "no system message": Case(TURNS[3:]),
    "several answers in a row": Case([*TURNS[3:], assistant("Ciao.")]),
    "thinking": Case(THINKING),
    "thinking, with truncate_history_thinking=False": Case(
        THINKING, variables={"truncate_history_thinking": False}
    ),
    "thinking switches": Case(
        [system("/no_think Be brief."), user("Hi /think"), assistant("Hello! /think")]
    ),
    "two tools": Case(
        [
            system("Be brief."),
            user("Paris? Rome?"),
            assistant("", CALL, ("weather", {"city": "Rome"})),
            tool('{"t": 21}'),
            tool('{"t": 25}'),
            assistant("Both are warm."),
        ],
        variables=TOOLS,
    ),
    "one tool": Case(
        [user("Paris?"), assistant("", CALL), tool('{"t": 21}'), assistant("Warm.")],
        variables=TOOLS,
    ),
    "text and a tool call": Case(
        [user("Paris?"), assistant("I look.", CALL), tool('{"t": 21}'), assistant("Warm.")]
    ),
    "prompt": Case(TURNS[:4], add_generation_prompt=True),
    "prompt after a tool": Case(
        [user("Paris?"), assistant("", CALL), tool('{"t": 21}')], add_generation_prompt=True
    ),
    "prompt with thinking on": Case(
        [system("Be brief. /think {'reasoning': True}"), user("Hi")], add_generation_prompt=True
    ),
    "prompt with thinking off": Case(
        [system("Be brief. /no_think {'reasoning': False}"), user("Hi")], add_generation_prompt=True
    ),
}


def golden(name: str) -> str:
    """The text of ``goldens/NAME.txt`` as the code has it now."""
    tokenizer = ByteTokenizer(OWN_TEMPLATE)
    pad = prompt_config_of(name, tokenizer).pad_token_id
    pages = [f"pads with {CONTROL_TOKENS[pad - 256]}\n"]
    for title, case in CASES.items():
        pages.append(f"\n{title}\n{''.join(_lines(name, tokenizer, case))}")
    return "".join(pages)


def _lines(name: str, tokenizer: ByteTokenizer, case: Case) -> Iterator[str]:
    config = replace(prompt_config_of(name, tokenizer), template_variables=case.variables)
    try:
        target = ids = tokenize_conversation(tokenizer, case.messages, config, False, True)
        if case.add_generation_prompt:
            target = np.full_like(ids, IGNORE_INDEX)
        else:
            ids, target = tokenize_conversation(tokenizer, case.messages, config, True, False)
    except ConversationError as error:
        place, _, _ = str(error).partition(":")
        yield f"! {place} is refused\n"
        return
    *lines, last = marked(tokenizer, ids, target != IGNORE_INDEX).split("\n")
    yield from (f"|{line}⏎\n" for line in lines)
    yield f"|{last}∎\n"


def marked(tokenizer: ByteTokenizer, ids: Any, trained: Any) -> str:
    """The text of ``ids`` with ⟦ ⟧ around what is trained."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], trained, [False]))))
    pieces = [tokenizer.decode(part) for part in np.split(ids, edges)]
    return "".join(f"⟦{piece}⟧" if odd % 2 else piece for odd, piece in enumerate(pieces))


if __name__ == "__main__":
    for given in sys.argv[1:]:
        (GOLDENS / f"{given}.txt").write_text(golden(given), encoding="utf-8")
