"""Samples of conversations: what is in them, what is said of what is not, and a batch of them."""

import io
import itertools
import json
import logging

import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from torch.utils.data import default_collate

from megatron_ext.constants import IGNORE_INDEX as X
from megatron_ext.data.sft_dataset import SFTDataset, SFTDatasetConfig, packed_batch
from megatron_ext.data.sft_records import SFTConfig
from megatron_ext.errors import ConfigError, DataError
from tests.data.sft_files import LENGTH, Chat, conversations, dataset, segments
from tests.data.sft_loss import POSITIONS, losses
from tests.preprocessing.chat_of_bytes import BEGIN, EOD, STOP, TRAINED, conversation
from tests.preprocessing.runs import write_json_lines
from tests.process_group import run_ranks

IN_ORDER = {"shuffle": False}


def words(tokens):
    """The two digits that each conversation begins with."""
    return [
        chr(tokens[i + 1]) + chr(tokens[i + 2]) for i, token in enumerate(tokens) if token == BEGIN
    ]


def test_a_sample_is_a_conversation_and_padding(tmp_path):
    made = dataset(
        tmp_path, [{"messages": conversation("hi", "yo")}], sequence_length=12, **IN_ORDER
    )
    assert len(made) == 1
    answer = [ord("y") + TRAINED, ord("o") + TRAINED, STOP + TRAINED, EOD]
    sample = {name: tensor.tolist() for name, tensor in made[0].items()}
    assert sample == {
        "tokens": [BEGIN, ord("h"), ord("i"), STOP, *answer, 0, 0, 0, 0],
        "labels": [X, X, X, *answer, X, X, X, X, X],
        "loss_mask": [0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0],
        "position_ids": [*range(8), *range(4)],
        "cu_seqlens": [0, 8, *[12] * 11],
        "max_seqlen": 8,
    }
    assert {name: tensor.dtype for name, tensor in made[0].items()} == {
        "tokens": torch.int64,
        "labels": torch.int64,
        "loss_mask": torch.float32,
        "position_ids": torch.int64,
        "cu_seqlens": torch.int32,
        "max_seqlen": torch.int32,
    }


@pytest.mark.parametrize("packing", ["none", "first-fit", "best-fit-decreasing"])
def test_every_conversation_is_once_in_an_epoch(tmp_path, packing):
    made = dataset(tmp_path, conversations(40), packing=packing)
    found = [word for sample in made for word in words(sample["tokens"].tolist())]
    assert sorted(found) == [f"{i:02}" for i in range(40)]
    assert found != sorted(found)
    assert (len(made) == 40) == (packing == "none")
    assert made.report.samples == len(made)
    assert made.report.tokens == sum(int((s["tokens"] != 0).sum()) for s in made)
    assert made.report.trained_tokens == sum(int(s["loss_mask"].sum()) for s in made)
    assert made.report.fill_ratio == made.report.tokens / (len(made) * LENGTH)


# What Megatron-LM's dataset does otherwise.


def test_nothing_is_predicted_across_conversations_even_where_all_is_trained(tmp_path):
    made = dataset(tmp_path, conversations(40), tokenizer=Chat(trains_all=True), packing="best-fit")
    boundaries = 0
    for sample in made:
        for tokens, labels in segments(sample):
            if tokens[0] == BEGIN:
                assert labels == [*tokens[1:], X]
                boundaries += 1
    assert boundaries == 40


def test_padding_that_shares_its_id_with_a_token_leaves_the_token_trained(tmp_path):
    tokenizer = Chat()
    tokenizer.pad = tokenizer.pad_id = EOD
    for sample in dataset(tmp_path, conversations(8), tokenizer=tokenizer):
        (tokens, labels), (padding, untrained) = segments(sample)
        assert tokens[-1] == EOD
        assert labels[-2:] == [EOD, X]
        assert set(padding) == {EOD}
        assert set(untrained) == {X}
        assert sample["loss_mask"].tolist() == [label != X for label in labels + untrained]


def test_a_tokenizer_without_padding_will_do(tmp_path):
    tokenizer = Chat()
    tokenizer.pad = tokenizer.pad_id = None
    sample = dataset(tmp_path, conversations(1), tokenizer=tokenizer)[0]
    assert sample["tokens"][-1] == EOD
    assert sample["labels"][-1] == X


def test_a_conversation_that_is_untrained_once_it_is_cut_is_left_out_and_counted(
    tmp_path, monkeypatch
):
    records = [
        {"messages": conversation("00", "a")},
        {"messages": conversation("01" + "q" * 40, "never read")},
        {"messages": conversation("02", "b" * 40)},
        {"messages": conversation("03", "c", "q" * 40, "d")},
    ]
    # import-linter, which another test runs, silences every logger that is there already.
    logger, said = logging.getLogger("megatron_ext.data.sft_plan"), io.StringIO()
    monkeypatch.setattr(logger, "disabled", False)
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(said)])
    made = dataset(tmp_path, records, **IN_ORDER)
    assert [words(sample["tokens"].tolist()) for sample in made] == [["00"], ["02"], ["03"]]
    report = made.report
    assert (report.conversations, report.too_long) == (4, 3)
    assert (report.untrained, report.untrained_by_cut) == (1, 1)
    # One for BEGIN, one for each STOP, one for EOD.
    lengths = [1 + 42 + 1 + 10 + 1 + 1, 1 + 2 + 1 + 40 + 1 + 1, 1 + 2 + 1 + 2 + 40 + 1 + 2 + 1]
    assert report.dropped_tokens == sum(lengths) - 3 * LENGTH
    place = f"{tmp_path / 'data.jsonl'}:2 once it is cut"
    assert report.places["nothing to train"] == [place]
    assert (
        "1 conversations with nothing to train left out, 1 because they were cut" in said.getvalue()
    )
    assert f"nothing to train: {place}" in said.getvalue()


def test_a_label_is_lost_with_the_token_that_a_cut_takes(tmp_path):
    sample = dataset(tmp_path, [{"messages": conversation("00", "b" * 40)}])[0]
    b = ord("b") + TRAINED
    assert sample["tokens"].tolist() == [BEGIN, 48, 48, STOP, *[b] * 28]
    assert sample["labels"].tolist() == [X, X, X, *[b] * 28, X]


def test_a_cut_on_the_left_keeps_the_last_answer(tmp_path):
    records = [{"messages": conversation("00", "a", "q" * 40, "bc")}]
    made = dataset(tmp_path, records, too_long="truncate-left")
    answer = [ord("b") + TRAINED, ord("c") + TRAINED, STOP + TRAINED, EOD]
    assert made[0]["tokens"].tolist() == [BEGIN, *[ord("q")] * 26, STOP, *answer]
    assert made[0]["labels"].tolist() == [*[X] * 27, *answer, X]
    assert made.report.dropped_tokens == 1 + 3 + 2 + 41 + 4 - LENGTH


@pytest.mark.parametrize(
    ("policy", "records", "message"),
    [
        (
            {"too_long": "refuse"},
            [conversation("a", "b"), conversation("q", "a" * 40)],
            r"data\.jsonl:2: the conversation is longer than a sample; got 45 tokens; "
            r"expected at most 32",
        ),
        (
            {"untrained": "refuse"},
            [conversation("a", "b"), conversation("q" * 40, "a")],
            r"data\.jsonl:2: nothing of the conversation is trained once it is cut; set untrained",
        ),
        (
            {"untrained": "refuse"},
            [conversation("a", "b"), conversation("q")],
            r"data\.jsonl:2: nothing of the conversation is trained; set untrained to drop$",
        ),
        (
            {},
            [conversation("a", "b"), [{"role": "wizard", "content": "?"}]],
            r"data\.jsonl:2: messages\[0\]\.role: unknown role",
        ),
    ],
    ids=["too-long", "untrained-by-cut", "untrained", "bad-record"],
)
def test_what_is_not_to_be_lost_is_refused_with_its_place(tmp_path, policy, records, message):
    with pytest.raises(DataError, match=message):
        dataset(tmp_path, [{"messages": messages} for messages in records], **policy)


def test_too_long_conversations_can_be_left_out(tmp_path):
    records = [{"messages": conversation(f"{i:02}", "a" * i)} for i in (5, 40, 7)]
    made = dataset(tmp_path, records, too_long="drop", **IN_ORDER)
    assert [words(sample["tokens"].tolist()) for sample in made] == [["05"], ["07"]]
    assert (made.report.too_long, made.report.dropped_tokens) == (1, 1 + 3 + 41 + 1)
    assert made.report.places == {"too long": [f"{tmp_path / 'data.jsonl'}:2: 46 tokens"]}


def test_untrained_conversations_are_left_out_and_are_no_bad_records(tmp_path):
    records = [{"messages": conversation("00")}, {"messages": conversation("01", "a")}]
    made = dataset(tmp_path, records)
    assert [words(sample["tokens"].tolist()) for sample in made] == [["01"]]
    report = made.report
    assert (report.bad_records, report.untrained, report.untrained_by_cut) == (0, 1, 0)


def test_bad_records_can_be_left_out_and_are_named_by_their_lines(tmp_path):
    path = tmp_path / "data.jsonl"
    lines = [
        '\ufeff{"messages": [{"role": "user", "content": "00"}, '
        '{"role": "assistant", "content": "a"}]}',
        "",
        "{not json",
        '{"messages": "none"}',
        '{"messages": [{"role": "user", "content": "01"}, {"role": "assistant", "content": "a"}]}',
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(DataError, match=r"data\.jsonl:3: the line is not JSON"):
        dataset(tmp_path, [])
    made = dataset(tmp_path, [], bad_records="drop", **IN_ORDER)
    assert [words(sample["tokens"].tolist()) for sample in made] == [["00"], ["01"]]
    assert (made.report.records, made.report.bad_records) == (4, 2)
    assert [place.split(": ")[0] for place in made.report.places["bad record"]] == [
        f"{path}:3",
        f"{path}:4",
    ]


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (
            [{"messages": conversation("00")}],
            r"left to train on; got 1 conv.* in 1 rec.*, nothing to train: .*data\.jsonl:1",
        ),
        ([], "no conversation is left"),
    ],
    ids=["untrained", "empty"],
)
def test_a_data_set_of_which_nothing_is_left_is_refused(tmp_path, records, words):
    with pytest.raises(DataError, match=words):
        dataset(tmp_path, records)


# Records.


def test_a_system_message_begins_a_new_conversation_of_a_record(tmp_path):
    system = {"role": "system", "content": "S"}
    record = {"messages": [system, *conversation("0", "a"), system, *conversation("1", "b")]}
    made = dataset(tmp_path, [record], packing="first-fit", **IN_ORDER)
    (first, _), (second, _), _ = segments(made[0])
    a, b, stop = ord("a") + TRAINED, ord("b") + TRAINED, STOP + TRAINED
    assert first == [BEGIN, ord("S"), ord("0"), STOP, a, stop, EOD]
    assert second == [BEGIN, ord("S"), ord("1"), STOP, b, stop, EOD]
    whole = dataset(tmp_path, [record], split_at_system=False)
    assert whole.report.conversations == 1
    assert whole[0]["tokens"].tolist().count(BEGIN) == 1


def test_a_bad_conversation_of_several_in_a_record_is_told(tmp_path):
    system = {"role": "system", "content": "S"}
    record = {
        "messages": [system, *conversation("0", "a"), system, {"role": "tool", "content": "x"}]
    }
    with pytest.raises(
        DataError,
        match=r"data\.jsonl:1: conversation 2 of the record: .*unknown role.*unset split_at_system",
    ):
        dataset(tmp_path, [record])


def test_the_tools_of_a_record_reach_its_template(tmp_path):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    records = [
        {"messages": conversation("0", "a"), "tools": [tool]},
        {"messages": conversation("1", "a")},
    ]
    made = dataset(tmp_path, records, sequence_length=128, **IN_ORDER)
    head = json.dumps({"tools": [tool]}).encode()
    assert made[0]["tokens"].tolist()[: len(head) + 2] == [BEGIN, *head, ord("0")]
    assert made[1]["tokens"].tolist()[:2] == [BEGIN, ord("1")]


@pytest.mark.parametrize(
    ("record", "options"),
    [
        (
            {"conversations": [{"from": "human", "value": "00"}, {"from": "gpt", "value": "yes"}]},
            {},
        ),
        ({"instruction": "00", "output": "yes"}, {}),
        ({"chat": conversation("00", "yes")}, {"json_key": "chat"}),
    ],
    ids=["sharegpt", "alpaca", "other-key"],
)
def test_records_of_every_schema_are_read(tmp_path, record, options):
    expected = dataset(tmp_path, [{"messages": conversation("00", "yes")}])[0]["tokens"].tolist()
    (tmp_path / "other").mkdir()
    made = dataset(tmp_path / "other", [record], **options)
    assert made[0]["tokens"].tolist() == expected


def test_the_files_of_a_folder_are_read_in_order(tmp_path):
    for name, part in (("b", slice(4, 9)), ("a", slice(0, 4))):
        write_json_lines(tmp_path / f"{name}.jsonl", conversations(9)[part])
    (tmp_path / "aa.jsonl").touch()
    made = SFTDataset.from_path(
        str(tmp_path), Chat(), sequence_length=LENGTH, sft=SFTConfig(shuffle=False)
    )
    assert [words(s["tokens"].tolist())[0] for s in made] == [f"{i:02}" for i in range(9)]
    assert made._reader.records.place(4) == f"{tmp_path / 'b.jsonl'}:1"


def test_records_that_leave_their_schema_open_are_refused(tmp_path):
    records = [*conversations(2), {"instruction": "a", "output": "b"}]
    with pytest.raises(DataError, match=r"data\.jsonl: the records differ in schema"):
        dataset(tmp_path, records)
    made = dataset(tmp_path, [], conversation_schema="messages", bad_records="drop")
    assert (made.report.conversations, made.report.bad_records) == (2, 1)


def test_a_compressed_file_is_refused(tmp_path):
    path = tmp_path / "data.jsonl.gz"
    path.touch()
    with pytest.raises(DataError, match=r"data\.jsonl\.gz: records are read by number, .*got json"):
        SFTDataset.from_path(str(path), Chat(), sequence_length=LENGTH)


# Settings.


def test_context_parallelism_gets_conversations_that_it_can_cut(tmp_path):
    made = dataset(tmp_path, conversations(30), context_parallel_size=4, packing="best-fit")
    for sample in made:
        assert (sample["cu_seqlens"] % 8 == 0).all()
        for tokens, labels in segments(sample):
            length = tokens.index(EOD) + 1 if BEGIN in tokens else 0
            assert set(tokens[length:]) <= {0}
            assert set(labels[max(length - 1, 0) :]) <= {X}
    assert made.report.tokens == sum(int((s["tokens"] != 0).sum()) for s in made)
    with pytest.raises(ConfigError, match="got 32; expected a multiple of 12, for context"):
        dataset(tmp_path, [], context_parallel_size=6)


def test_the_end_of_document_may_be_left_out(tmp_path):
    sample = dataset(tmp_path, conversations(1), append_eod=False)[0]
    assert EOD not in sample["tokens"].tolist()
    tokenizer = Chat()
    tokenizer.eod = None
    with pytest.raises(ConfigError, match=r"sft\.append_eod: the tokenizer has no end-of-document"):
        dataset(tmp_path, conversations(1), tokenizer=tokenizer)


def test_a_mask_keeps_conversations_apart(tmp_path):
    made = dataset(tmp_path, conversations(6), packing="best-fit", create_attention_mask=True)
    for sample in made:
        mask = sample["attention_mask"]
        assert mask.shape == (1, LENGTH, LENGTH)
        assert mask.dtype == torch.bool
        bounds = sample["cu_seqlens"].tolist()
        segment = [sum(bound <= i for bound in bounds) for i in range(LENGTH)]
        for query, key in itertools.product(range(LENGTH), repeat=2):
            sees = key <= query and segment[key] == segment[query]
            assert mask[0, query, key] == (not sees)


def test_a_sample_that_fills_a_batch_trains_nothing(tmp_path):
    made = dataset(tmp_path, conversations(2))
    assert made[None]["loss_mask"].sum() == 0
    assert {name: t.shape for name, t in made[None].items()} == {
        name: t.shape for name, t in made[0].items()
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packing": "tight"}, r"sft\.packing: packing is none of its choices; got 'tight'"),
        ({"untrained": "keep"}, r"sft\.untrained: .*expected drop, refuse"),
        ({"workers": 0}, r"sft\.workers: there must be a worker"),
        ({"sequence_length": 1}, "sequence_length: a sample is too short"),
        ({"sequence_length": 0}, "too small|must"),
        ({"context_parallel_size": 0}, "too small|must"),
        ({"num_samples": -1}, "too small|must"),
        ({"seed": -1}, "too small|must"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_is_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        dataset(tmp_path, conversations(2), **options)


# Through megatron-core's builder.


def build(paths, folder, kind=SFTDatasetConfig, **options):
    config = kind(
        random_seed=3,
        sequence_length=LENGTH,
        blend=(paths, None if len(paths) == 1 else [1.0, 2.0]),
        split="8,2,0",
        # A blend caches its indices under a process group only.
        path_to_cache=str(folder / "cache") if len(paths) == 1 else None,
        tokenizer=Chat(),
        **{
            "reset_position_ids": False,
            "reset_attention_mask": False,
            "eod_mask_loss": False,
            "create_attention_mask": False,
            **options,
        },
    )
    sizes = [60, 15, 0]
    return BlendedMegatronDatasetBuilder(SFTDataset, sizes, lambda: True, config).build()


def test_the_splits_share_no_record_and_repeat_what_they_have(tmp_path):
    path = write_json_lines(tmp_path / "data.jsonl", conversations(20))
    train, valid, test = build([str(path)], tmp_path, sft=SFTConfig(packing="best-fit"))
    assert (len(train), len(valid), test) == (60, 15, None)
    found = [{w for s in part for w in words(s["tokens"].tolist())} for part in (train, valid)]
    assert found == [{f"{i:02}" for i in range(16)}, {f"{i:02}" for i in range(16, 20)}]


def test_it_takes_the_place_of_megatrons_with_megatrons_configuration(tmp_path):
    path = write_json_lines(tmp_path / "data.jsonl", conversations(20))
    train, _, _ = build([str(path)], tmp_path, GPTDatasetConfig, context_parallel_size=2)
    sample = train[0]
    assert sorted(sample) == sorted(
        ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "max_seqlen")
    )
    assert (sample["cu_seqlens"] % 4 == 0).all()


def test_data_sets_can_be_blended(tmp_path):
    paths = [
        str(write_json_lines(tmp_path / name, records))
        for name, records in (("a.jsonl", conversations(10)), ("b.jsonl", conversations(50)[30:]))
    ]
    train, _, _ = build(paths, tmp_path)
    counts = [0, 0]
    for sample in train:
        (word,) = words(sample["tokens"].tolist())
        assert (int(word) >= 30) == (sample["dataset_id"] == 1)
        counts[sample["dataset_id"]] += 1
    assert counts == [20, 40]


@pytest.mark.parametrize("option", ["eod_mask_loss", "hybrid_context_parallel"])
def test_an_option_of_megatron_that_means_nothing_here_is_refused(tmp_path, option):
    path = write_json_lines(tmp_path / "data.jsonl", conversations(5))
    with pytest.raises(ConfigError, match=f"{option} means nothing for conversations"):
        build([str(path)], tmp_path, **{option: True})


def test_mock_data_is_refused():
    with pytest.raises(DataError, match="there is no data"):
        SFTDataset.build_low_level_dataset(None, None)


def test_a_packed_batch_has_the_bounds_of_all_its_conversations(tmp_path):
    made = dataset(tmp_path, conversations(20), packing="best-fit", context_parallel_size=2)
    samples = [made[0], made[1], made[None], made[2]]
    batch, params = packed_batch(default_collate(samples))
    assert {name: tensor.shape for name, tensor in batch.items()} == dict.fromkeys(
        ("tokens", "labels", "loss_mask", "position_ids"), (1, 4 * LENGTH)
    )
    bounds = params.cu_seqlens_q
    assert bounds.dtype == torch.int32
    assert torch.equal(bounds, params.cu_seqlens_kv)
    assert params.qkv_format == "thd"
    expected = [segment for sample in samples for segment in segments(sample)]
    assert len(expected) > len(samples)
    found = [
        (batch["tokens"][0, start:stop].tolist(), batch["labels"][0, start:stop].tolist())
        for start, stop in itertools.pairwise(bounds.tolist())
    ]
    assert found == expected
    assert params.max_seqlen_q == params.max_seqlen_kv == max(len(tokens) for tokens, _ in found)


def test_the_loss_of_packed_conversations_is_the_sum_of_theirs_alone(tmp_path):
    """Under an attention mask of the segments, on megatron-core's GPTModel; gradients too.

    Everything is trained, the ends of conversations excepted, which is where packing may leak.
    """
    tokenizer = Chat(trains_all=True)
    alone = dataset(tmp_path, conversations(12), tokenizer=tokenizer, sequence_length=64)
    packed = dataset(
        tmp_path, [], tokenizer=tokenizer, sequence_length=64, packing="best-fit-decreasing"
    )
    assert len(packed) < len(alone) / 2
    cases = {
        "alone": (list(alone), False),
        "packed": (list(packed), True),
        "leaking": (list(packed), False),
    }
    (by_positions,) = run_ranks(1, losses, cases)
    assert sorted(by_positions) == sorted(POSITIONS)
    for found in by_positions.values():
        expected, count, gradient = found["alone"]
        loss, packed_count, packed_gradient = found["packed"]
        assert packed_count == count
        # The same fp32 operations in another order.
        assert loss == pytest.approx(expected, rel=1e-5)
        scale = float(gradient.abs().max())
        torch.testing.assert_close(packed_gradient, gradient, rtol=1e-4, atol=1e-5 * scale)
        # The comparison sees a token that reads another conversation.
        assert abs(found["leaking"][0] - expected) > 1e-2 * expected
