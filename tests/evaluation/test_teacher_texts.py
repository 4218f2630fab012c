"""Answers of a model or an endpoint become training data, once each."""

import json

import pytest

from megatron_ext.cli.main import main
from megatron_ext.conversation.records import ConversationRecord
from megatron_ext.engines.chat_endpoint import Answer
from megatron_ext.errors import DataError
from megatron_ext.evaluation.megatron_language_model import ModelOptions, open_model
from megatron_ext.evaluation.teacher_texts import TeacherTexts, asked_conversations
from tests.engines.stand_in_server import ANSWERS, serving
from tests.evaluation.tiny_language_model import save_tiny_model

QUESTIONS = [ConversationRecord([{"role": "user", "content": str(n)}]) for n in range(5)]
ABOUT = {"model": "big", "temperature": 0.7, "date": "2026-11-24"}


def once(work):
    return work()


def answered(part, first):
    """Of its number; the fourth is cut."""
    return [Answer(f"answer {first + n}", first + n != 3) for n in range(len(part))]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_conversations_with_what_they_come_from(tmp_path, capsys):
    texts = TeacherTexts(output=tmp_path / "out.jsonl", about=ABOUT, batch=2)
    assert texts.write(QUESTIONS, answered, once) == (4, 1)
    told = capsys.readouterr().err.splitlines()
    assert told == [f"{count} of 5 conversations are answered" for count in (2, 4, 5)]
    records = lines(texts.output)
    assert [r["messages"][0]["content"] for r in records] == ["0", "1", "2", "4"]
    assert records[-1]["messages"][-1] == {"role": "assistant", "content": "answer 4"}
    assert all(record["generated_by"] == ABOUT for record in records)
    assert not texts.partial.exists()


def test_a_second_call_goes_on_where_the_first_was_stopped(tmp_path):
    texts = TeacherTexts(output=tmp_path / "out.jsonl", about=ABOUT, batch=2)
    asked = []

    def breaks(part, first):
        asked.append(first)
        if first == 4:
            raise KeyboardInterrupt
        return answered(part, first)

    with pytest.raises(KeyboardInterrupt):
        texts.write(QUESTIONS, breaks, once)
    assert not texts.output.exists()
    # A line that was cut short is answered again, and the date may be another one.
    texts.partial.write_bytes(texts.partial.read_bytes()[:-5])
    later = TeacherTexts(output=texts.output, about=ABOUT | {"date": "2027-01-01"}, batch=2)
    again = []
    later.write(QUESTIONS, lambda part, first: again.append(first) or answered(part, first), once)
    assert (asked, again) == ([0, 2, 4], [3])
    assert [r["messages"][0]["content"] for r in lines(texts.output)] == ["0", "1", "2", "4"]


def test_a_file_of_other_settings_is_not_continued(tmp_path):
    texts = TeacherTexts(output=tmp_path / "out.jsonl", about=ABOUT)
    texts._append([texts._line(QUESTIONS[0], Answer("x", True))])
    other = TeacherTexts(output=texts.output, about=ABOUT | {"temperature": 0.0})
    with pytest.raises(Exception, match=r"out\.jsonl\.partial:1.*other conversations or settings"):
        other.write(QUESTIONS, answered, once)


def test_conversations_are_asked_up_to_their_last_answers(tmp_path):
    turns = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": content} for role, content in turns]
    path = tmp_path / "asked.jsonl"
    path.write_text(
        json.dumps({"prompt": "plain"}) + "\n" + json.dumps({"messages": messages}) + "\n"
    )
    plain, long = asked_conversations(path, "prompt")
    assert plain.messages == [{"role": "user", "content": "plain"}]
    assert long.messages == messages[:4]
    path.write_text(json.dumps({"messages": messages[-1:]}) + "\n")
    with pytest.raises(Exception, match=r"asked\.jsonl, record 1.*nothing to answer"):
        asked_conversations(path, "prompt")


def test_a_record_that_asks_nothing_is_refused_with_the_flag_of_its_text(tmp_path):
    path = tmp_path / "asked.jsonl"
    path.write_text('{"prompt": "one"}\n{"question": "two"}\n')
    said = r"asked\.jsonl, record 2: .*no text in prompt.*the fields question; .*set --text-field"
    with pytest.raises(DataError, match=said):
        asked_conversations(path, "prompt")


def test_conversations_of_a_model_without_a_template_are_refused_with_flags(
    tmp_path, monkeypatch, capsys
):
    folder, path = save_tiny_model(tmp_path / "model"), tmp_path / "asked.jsonl"
    (folder / "chat_template.jinja").unlink()
    path.write_text('{"prompt": "one"}\n')

    def opened(arguments):
        options = ModelOptions(applies_chat_template=arguments.applies_chat_template)
        return open_model(arguments.checkpoint[0], options)

    monkeypatch.setattr("megatron_ext.cli.generate.load_models", opened)
    words = ["generate", "--model", str(folder), "--conversations", "--prompts", str(path)]
    with pytest.raises(SystemExit):
        main([*words, "--output", str(tmp_path / "out.jsonl")])
    error = capsys.readouterr().err
    assert "no chat template, which --chat, --conversations and" in error
    assert "name a tokenizer that has one with --tokenizer" in error


@pytest.mark.parametrize("conversations", [(), ("--conversations",)])
def test_a_file_that_is_there_is_not_written_over(tmp_path, capsys, conversations):
    path, output = tmp_path / "asked.jsonl", tmp_path / "out.jsonl"
    path.write_text('{"prompt": "one"}\n')
    output.write_text("answers")
    files = ("--prompts", str(path), "--output", str(output))
    with pytest.raises(SystemExit):
        main(["generate", "--model", "none", *conversations, *files])
    assert "out.jsonl: the file exists" in capsys.readouterr().err
    assert output.read_text() == "answers"


def test_a_chat_refuses_a_file_for_its_answers(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--model", "none", "--chat", "--output", str(tmp_path / "out")])
    assert "--chat: answers go to the terminal; got --output" in capsys.readouterr().err


def test_an_endpoint_answers_from_the_command_line(tmp_path, capsys):
    path, output = tmp_path / "asked.jsonl", tmp_path / "out.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    reasons = iter(["stop", "length"])

    def answer(_):
        message = {"role": "assistant", "content": "said"}
        return {"choices": [{"message": message, "finish_reason": next(reasons)}]}

    with serving() as stand_in:
        stand_in.change = answer
        main(
            [
                *("generate", "--endpoint", f"{stand_in.url}/v1", "--endpoint-model", "big"),
                *("--conversations", "--prompts", str(path), "--output", str(output)),
                *("--temperature", "0.5", "--max-new-tokens", "7"),
            ]
        )
        bodies = [body for _, body, _ in stand_in.requests]
    assert stand_in.paths() == ["/v1/chat/completions"] * 2
    assert sorted(body["messages"][0]["content"] for body in bodies) == ["one", "two"]
    assert all((b["model"], b["max_tokens"], b["temperature"]) == ("big", 7, 0.5) for b in bodies)
    (record,) = lines(output)
    assert record["messages"][-1]["content"] == "said"
    assert record["generated_by"]["model"] == "big"
    assert "1 answer in" in capsys.readouterr().out


def test_one_answer_without_a_text_does_not_end_the_others(tmp_path, capsys, monkeypatch):
    path, output = tmp_path / "asked.jsonl", tmp_path / "out.jsonl"
    call = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    said = {
        "withheld": ({"content": None}, "content_filter"),
        "thought": ({"content": None, "reasoning": "so"}, "length"),
        "empty": ({"content": " "}, "stop"),
        "call": ({"content": None, "tool_calls": call}, "tool_calls"),
        "both": ({"content": "said", "reasoning_content": "so"}, "stop"),
    }
    path.write_text("".join(json.dumps({"prompt": name}) + "\n" for name in said))
    words = ["generate", "--conversations", "--prompts", str(path), "--output", str(output)]
    with serving() as stand_in:

        def answer(body):
            message, reason = said[body["messages"][0]["content"]]
            return {"choices": [{"message": message, "finish_reason": reason}]}

        monkeypatch.setitem(ANSWERS, "/v1/chat/completions", answer)
        main([*words, "--endpoint", stand_in.url])
        called, both = (record["messages"][-1] for record in lines(output))
        assert called == {"role": "assistant", "content": "", "tool_calls": call}
        assert both == {"role": "assistant", "content": "said", "reasoning_content": "so"}
        assert "2 answers in" in (shown := capsys.readouterr().out)
        assert "3 that were cut or say nothing are left out" in shown
        stand_in.change = lambda _: {"choices": []}
        output.unlink()
        with pytest.raises(SystemExit):
            main([*words, "--endpoint", stand_in.url])
    assert "error: conversation 1: --endpoint: the endpoint's answer" in capsys.readouterr().err
