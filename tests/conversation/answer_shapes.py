"""What assistants' turns look like in published templates, to read answers out of plain text.

This knows nothing of provenance: answers are searched for by their markers, as one would by eye,
in conversations whose contents hold none of these markers.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class AnswerShape:
    """How one template writes an answer; patterns are regular expressions."""

    after: tuple[str, ...]
    """Texts of which one goes before an answer: generation prompts, or ends of others' turns."""
    ends: str
    """The stop marker, with white space after it."""
    first: str = ""
    """What may go first in an answer, though it holds an end."""
    not_before: str = ""
    """What shows that a text of ``after`` has no answer after it."""
    opening: str = ""
    """What may go before thinking in an answer."""
    thinking: str = ""
    """Thinking at the start of an answer, with its tags and the line ends after them."""
    calls: str = ""
    """Tool calls, with what the template writes around them."""
    empty: str = r"<[^<>]*>"
    """Marks that an answer holds of which nothing is left but them."""

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        begins = []
        for text in self.after:
            longer = [o[len(text) :] for o in self.after if o != text and o.startswith(text)]
            others = "".join(f"(?!{re.escape(rest)})" for rest in longer)
            begins.append(f"(?<={re.escape(text)}){others}")
        no_answer = f"(?!{self.not_before})" if self.not_before else ""
        body = f"(?P<body>{self.first}.*?)(?P<stop>{self.ends})"
        return re.compile(f"(?:{'|'.join(begins)}){no_answer}{body}", re.DOTALL)

    def answers(self, text: str) -> list[tuple[str, str]]:
        """What is said, and its stop marker, for each answer that says something."""
        return [(m["body"], m["stop"]) for m in self._pattern.finditer(text) if m["body"]]

    def trained_text(self, text: str, *, thinking: bool = True, tool_calls: bool = True) -> str:
        """What a model learns to write, with or without thinking and tool calls."""
        return "".join(self._kept(text, thinking, tool_calls))

    def _kept(self, text: str, thinking: bool, tool_calls: bool) -> Iterator[str]:
        for whole, stop in self.answers(text):
            body = whole
            if not thinking:
                tags = "|".join(filter(None, (self.thinking, THINK)))
                opened = rf"\A(?P<opening>{self.opening})(?:{tags})"
                body = re.sub(opened, r"\g<opening>", body, flags=re.DOTALL)
            if not tool_calls and self.calls:
                body = re.sub(self.calls, "", body, flags=re.DOTALL)
            if body == whole or re.sub(self.empty, "", body).strip():
                yield body + stop


RESULT_START, RESULT_END = "⟦", "⟧"
"""Stand around what tools say, where a template writes no mark there."""

THINK = r"\s*<think>.*?</think>\n*"
OPENED_THINK = r"(?:(?!<think>).)*?</think>\n*"
TOOL_CALL = r"\n*<tool_call>.*</tool_call>"
DEEPSEEK_END = "<｜end▁of▁sentence｜>"
LLAMA = AnswerShape(
    after=("<|start_header_id|>assistant<|end_header_id|>\n\n",),
    ends=r"<\|eot_id\|>|<\|eom_id\|>",
    calls=r"\{\"name\": .*\}|<\|python_tag\|>.*",
)
MISTRAL = AnswerShape(
    after=("[/INST]", "</s>", "[/TOOL_RESULTS]"),
    ends="</s>",
    not_before=r"\[INST\]|\[TOOL_RESULTS\]|\[AVAILABLE_TOOLS\]|\Z",
    calls=r"\[TOOL_CALLS\].*",
)
CHATML = AnswerShape(
    after=("<|im_start|>assistant\n",), ends=r"<\|im_end\|>\n", thinking=THINK, calls=TOOL_CALL
)
LAGUNA = AnswerShape(
    after=("</user>\n", "</tool_response>\n", "</assistant>\n"),
    ends="</assistant>\n",
    not_before=r"<user>|<tool_response>|<system>|\Z",
    # The template's own blocks hold the header.
    opening=r"<assistant>\n?",
    thinking=THINK,
    calls=TOOL_CALL,
)

ANSWER_SHAPES: dict[str, AnswerShape] = {
    "Apertus-8B-Instruct": AnswerShape(
        # Nothing but a bracket is between what a tool says and the answer.
        after=("<|assistant_start|>", f"{RESULT_END}]"),
        ends=rf"<\|assistant_end\|>|<\|tools_suffix\|>|(?=\[{RESULT_START})|\Z",
        calls=r"<\|tools_prefix\|>.*",
    ),
    "Apriel-1.6-15b-Thinker-fixed": AnswerShape(
        after=("<|begin_assistant|>\n",),
        ends=r"\n<\|end\|>\n|\Z",
        thinking=r".*?\n\[BEGIN FINAL RESPONSE\]\n",
        calls=r"\n<tool_calls>.*</tool_calls>",
    ),
    "ByteDance-Seed-OSS": AnswerShape(
        after=("<seed:bos>assistant\n",),
        ends="<seed:eos>",
        thinking=r"<seed:think>.*?</seed:think>\n*",
        calls=r"\n*<seed:tool_call>.*</seed:tool_call>",
    ),
    "CohereForAI-c4ai-command-r-plus-tool_use": AnswerShape(
        after=("<|CHATBOT_TOKEN|>",),
        ends=r"<\|END_OF_TURN_TOKEN\|>|(?=<\|START_OF_TURN_TOKEN\|>)",
        calls=r"\nAction:\n```json\n.*\]```\n",
    ),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": AnswerShape(
        after=("<|CHATBOT_TOKEN|>", "<|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>"),
        ends=r"<\|END_OF_TURN_TOKEN\|>",
        opening=r"(?:<\|START_RESPONSE\|>)?",
        thinking=r"<\|START_THINKING\|>.*?<\|END_THINKING\|>",
        calls=r"<\|START_ACTION\|>.*<\|END_ACTION\|>",
    ),
    "GLM-4.6": AnswerShape(
        after=("<|assistant|>",),
        ends=r"<\|(?:user|observation|assistant|system)\|>|\Z",
        thinking=THINK,
        calls=TOOL_CALL,
    ),
    "GLM-4.7-Flash": AnswerShape(
        after=("<|assistant|></think>", "<|assistant|><think>"),
        ends=r"<\|(?:user|observation|assistant|system)\|>|\Z",
        thinking=OPENED_THINK,
        calls=TOOL_CALL,
    ),
    "GigaChat3.1-10B-A1.8B": AnswerShape(
        after=("assistant<|role_sep|>\n",),
        ends=r"<\|message_sep\|>\n\n",
        calls=r"<\|function_call\|>.*",
    ),
    "Kimi-K2-Thinking": AnswerShape(
        after=("<|im_assistant|>assistant<|im_middle|>",),
        ends=r"<\|im_end\|>",
        thinking=THINK,
        calls=r"<\|tool_calls_section_begin\|>.*<\|tool_calls_section_end\|>",
    ),
    "Kimi-K3": AnswerShape(
        after=('<|open|>message role="assistant"<|sep|><|open|>think<|sep|>',),
        ends=r"<\|end_of_msg\|>",
        opening=r"(?:<\|close\|>think<\|sep\|><\|open\|>response<\|sep\|>)?",
        thinking=r".*?<\|close\|>think<\|sep\|>",
        calls=(
            r"(?:<\|open\|>response<\|sep\|><\|close\|>response<\|sep\|>)?"
            r"<\|open\|>tools<\|sep\|>.*"
        ),
        empty=r"(?:<\|open\|>|<\|close\|>)(?:think|response)<\|sep\|>",
    ),
    "LFM2-8B-A1B": CHATML,
    "LFM2.5-Instruct": CHATML,
    "MiniMax-M1": AnswerShape(
        after=("<beginning_of_sentence>ai name=assistant\n",),
        ends="<end_of_sentence>\n",
        calls=r"<tool_calls>.*</tool_calls>",
    ),
    "MiniMax-M2": AnswerShape(
        after=("]~b]ai\n", "]~b]ai\n<think>\n"),
        ends=r"\[e~\[\n",
        thinking=OPENED_THINK,
        calls=r"\n*<minimax:tool_call>.*</minimax:tool_call>",
    ),
    "MiniMax-M3": AnswerShape(
        after=("]~b]ai\n",),
        ends=r"\[e~\[\n",
        opening="(?:</mm:think>)?",
        thinking=r"<mm:think>.*?</mm:think>\n*",
        calls=r"\]<\]minimax\[>\[<tool_call>.*</tool_call>",
    ),
    "Mistral-Small-3.2-24B-Instruct-2506": MISTRAL,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": AnswerShape(
        after=("<|im_start|>assistant\n<think></think>", "<|im_start|>assistant\n<think>\n"),
        ends=r"<\|im_end\|>\n",
        thinking=OPENED_THINK,
        calls=r"\n?<tool_call>.*</tool_call>\n",
    ),
    "NVIDIA-Nemotron-Nano-v2": AnswerShape(
        after=(
            "<SPECIAL_11>Assistant\n",
            "<SPECIAL_11>Assistant\n<think>\n",
            "<SPECIAL_11>Assistant\n<think></think>",
        ),
        ends=r"\n?<SPECIAL_12>\n+",
        thinking=OPENED_THINK,
        calls=r"\n?<TOOLCALL>.*</TOOLCALL>",
    ),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": CHATML,
    "Qwen-QwQ-32B": CHATML,
    "Qwen-Qwen3-0.6B": CHATML,
    "Spark2.5": AnswerShape(
        after=("<|Bot|></think>", "<|Bot|><think>"),
        ends=DEEPSEEK_END,
        thinking=OPENED_THINK,
        calls=TOOL_CALL,
    ),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": AnswerShape(
        # Of a message with one call the template leaves out the end, of the second one the header.
        after=("<｜Assistant｜>", "<｜tool▁outputs▁end｜>", "\n<｜tool▁call▁begin｜>"),
        ends=f"<｜tool▁call▁end｜>(?=<｜tool▁outputs▁begin｜>)|{DEEPSEEK_END}",
        calls="(?:<｜tool▁calls▁begin｜>|function<｜tool▁sep｜>).*",
    ),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": AnswerShape(
        # Of its second message with calls the template leaves out the header.
        after=("<｜Assistant｜>", "<｜tool▁outputs▁end｜>", "\n<｜tool▁call▁begin｜>"),
        # Behind calls beside a content that is not null, which may be empty, that follows.
        ends=f"(?<!<｜tool▁calls▁end｜>){DEEPSEEK_END}|{DEEPSEEK_END}(?!<｜Assistant｜>)",
        calls="(?:<｜tool▁calls▁begin｜>|function<｜tool▁sep｜>)(?:.*<｜Assistant｜>|.*)",
    ),
    "deepseek-ai-DeepSeek-V3.1": AnswerShape(
        after=("<｜Assistant｜><think></think>", "<｜tool▁output▁end｜>", DEEPSEEK_END),
        ends=DEEPSEEK_END,
        not_before=r"<｜User｜>|<｜tool▁output▁begin｜>|<｜Assistant｜>|\Z",
        calls="<｜tool▁calls▁begin｜>.*<｜tool▁calls▁end｜>",
    ),
    "deepseek-ai-DeepSeek-V4-Flash-0731": AnswerShape(
        after=("<｜Assistant｜></think>", "<｜Assistant｜><think>"),
        ends=DEEPSEEK_END,
        thinking=OPENED_THINK,
        calls="\n\n<｜DSML｜tool_calls>.*</｜DSML｜tool_calls>",
    ),
    "fireworks-ai-llama-3-firefunction-v2": AnswerShape(
        after=LLAMA.after, ends=LLAMA.ends, calls=r" functools\[.*\]"
    ),
    "google-gemma-2-2b-it": AnswerShape(after=("<start_of_turn>model\n",), ends="<end_of_turn>\n"),
    "ibm-granite-granite-4.1": AnswerShape(
        after=("<|start_of_role|>assistant<|end_of_role|>",),
        ends=r"<\|end_of_text\|>\n",
        calls=TOOL_CALL,
    ),
    "llama-cpp-deepseek-r1": AnswerShape(after=("<｜Assistant｜>",), ends=DEEPSEEK_END),
    "meta-llama-Llama-3.1-8B-Instruct": LLAMA,
    "meta-llama-Llama-3.3-70B-Instruct": LLAMA,
    "microsoft-Phi-3.5-mini-instruct": AnswerShape(after=("<|assistant|>\n",), ends=r"<\|end\|>\n"),
    "mistralai-Mistral-Nemo-Instruct-2407": MISTRAL,
    "moonshotai-Kimi-K2": AnswerShape(
        after=("<|im_assistant|>assistant<|im_middle|>",),
        ends=r"<\|im_end\|>",
        calls=r"<\|tool_calls_section_begin\|>.*<\|tool_calls_section_end\|>",
    ),
    "openai-gpt-oss-120b": AnswerShape(
        after=("<|start|>assistant",),
        # The model goes on to the next message by itself.
        first=r"(?:<\|channel\|>analysis<\|message\|>.*?<\|end\|><\|start\|>assistant)?",
        ends=r"<\|end\|>|<\|return\|>|<\|call\|>",
        opening=r"(?:<\|channel\|>final<\|message\|>)?",
        thinking=r"<\|channel\|>analysis<\|message\|>.*?<\|end\|><\|start\|>assistant",
        calls=r"(?:<\|start\|>assistant)? to=functions.*",
    ),
    "poolside-Laguna-S-2.1": LAGUNA,
    "poolside-Laguna-XS.2": LAGUNA,
    "tencent-Hy3": AnswerShape(
        after=(
            "<｜hy_Assistant:opensource｜><think:opensource></think:opensource>",
            "<｜hy_Assistant:opensource｜><think:opensource>",
        ),
        ends=r"<｜hy_eos:opensource｜>|\Z",
        thinking=r"(?:(?!<think:).)*?</think:opensource>\n*",
        calls="<tool_calls:opensource>.*</tool_calls:opensource>",
    ),
    "unsloth-Apriel-1.5": AnswerShape(
        after=("<|assistant|>\n",),
        ends=r"\n<\|end\|>\n</s>",
        calls=r"\n<tool_calls>.*</tool_calls>",
    ),
    "unsloth-mistral-Devstral-Small-2507": MISTRAL,
    "upstage-Solar-Open-100B": AnswerShape(
        after=("<|begin|>assistant",),
        first=r"(?:<\|think\|>.*?<\|end\|><\|begin\|>assistant)?",
        ends=r"<\|end\|>|<\|calls\|>",
        opening=r"(?:<\|content\|>)?",
        thinking=r"<\|think\|>.*?<\|end\|><\|begin\|>assistant",
        calls=r"(?:<\|begin\|>assistant)?<\|tool_calls\|>.*",
    ),
}
"""File name of a template, without its ending -> how it writes an answer."""
