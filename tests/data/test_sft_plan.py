"""The plan of the samples: the same for every process and every time, and made once."""

import os
import pickle
import threading
from datetime import datetime

import numpy as np
import pytest
import torch

from megatron_ext.conversation.rendering.template_limits import stopped_at
from megatron_ext.data import sft_plan
from megatron_ext.documents.index import cached_arrays
from megatron_ext.errors import DataError
from tests.data.sft_files import Chat, conversations, dataset
from tests.fork_server import run_python
from tests.preprocessing.runs import write_json_lines

PACKED = {"packing": "best-fit-decreasing"}


def tokens(made):
    return [sample["tokens"].tolist() for sample in made]


def test_the_data_is_read_once_and_the_plan_is_read_from_the_cache(tmp_path):
    first, second = Chat(), Chat()
    expected = dataset(tmp_path, conversations(20), tokenizer=first)
    assert first.calls == 20
    again = dataset(tmp_path, [], tokenizer=second)
    assert second.calls == 0
    assert tokens(again) == tokens(expected)
    assert again.report == expected.report


@pytest.mark.parametrize(
    ("changed", "reads_again"),
    [
        ({"packing": "first-fit"}, False),
        ({"seed": 6}, False),
        ({"shuffle": False}, False),
        ({"num_samples": 50}, False),
        ({"context_parallel_size": 2}, False),
        ({"workers": 2}, False),
        ({"sequence_length": 40}, True),
        ({"too_long": "drop"}, True),
        ({"append_eod": False}, True),
        ({"split_at_system": False}, True),
        ({"tokenizer": Chat(trains_all=True)}, True),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_only_what_changes_a_conversation_has_the_data_read_again(tmp_path, changed, reads_again):
    dataset(tmp_path, conversations(20))
    options = {"tokenizer": Chat(), **changed}
    dataset(tmp_path, [], **options)
    assert options["tokenizer"].calls == (20 if reads_again else 0)


def test_a_file_that_has_changed_is_read_again(tmp_path):
    old = dataset(tmp_path, conversations(20))
    write_json_lines(tmp_path / "data.jsonl", conversations(21))
    with pytest.raises(
        DataError, match=r"data\.jsonl: the file has changed since the data set was"
    ):
        old[0]
    assert len(dataset(tmp_path, [])) == 21


def test_a_conversation_that_has_become_another_is_refused(tmp_path):
    tokenizer = Chat()
    made = dataset(tmp_path, conversations(2), tokenizer=tokenizer)
    tokenizer._writes_year = True
    with pytest.raises(DataError, match=r"data\.jsonl:\d: the conversation has become another"):
        made[0]


def test_templates_see_the_time_at_which_the_plan_was_made(tmp_path):
    with stopped_at(datetime(1999, 1, 1)):
        made = dataset(tmp_path, conversations(3), tokenizer=Chat(writes_year=True))
        expected = tokens(made)
    year = datetime.now().year
    assert bytes(expected[0][1:5]).decode() in (str(year), str(year + 1))
    with stopped_at(datetime(12345 % 9999, 1, 1)):
        assert tokens(made) == expected


def test_a_sample_is_a_function_of_its_index(tmp_path):
    made = dataset(tmp_path, conversations(20), num_samples=70, **PACKED)
    forward = tokens(made)
    assert [made[i]["tokens"].tolist() for i in reversed(range(70))] == forward[::-1]
    # A longer run begins as the shorter one did.
    longer = dataset(tmp_path, [], num_samples=170, **PACKED)
    assert tokens(longer)[:70] == forward
    with pytest.raises(IndexError):
        made[70]


def test_each_epoch_has_every_sample_in_an_order_of_its_own(tmp_path):
    one = dataset(tmp_path, conversations(30), **PACKED)
    count = len(one)
    three = dataset(tmp_path, [], num_samples=3 * count, **PACKED)
    found = tokens(three)
    epochs = [found[count * k : count * (k + 1)] for k in range(3)]
    assert epochs[0] == tokens(one)
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_the_seed_mixes_conversations_and_samples(tmp_path):
    made = [dataset(tmp_path, conversations(30), seed=seed, **PACKED) for seed in (5, 5, 6)]
    assert tokens(made[0]) == tokens(made[1])
    assert sorted(tokens(made[0])) != sorted(tokens(made[2]))
    in_order = [dataset(tmp_path, [], seed=seed, shuffle=False) for seed in (5, 6)]
    assert tokens(in_order[0]) == tokens(in_order[1])
    assert [chr(t[1]) + chr(t[2]) for t in tokens(in_order[0])] == [f"{i:02}" for i in range(30)]


BAD = {"messages": [{"role": "tool", "content": "x"}]}


def test_several_processes_make_the_plan_that_one_makes(tmp_path, monkeypatch):
    monkeypatch.setattr(sft_plan, "_RECORDS_AT_ONCE", 8)
    for name in ("one", "several"):
        (tmp_path / name).mkdir()
    records = [*conversations(60), BAD, *conversations(60)]
    one = dataset(tmp_path / "one", records, bad_records="drop")
    several = dataset(tmp_path / "several", records, bad_records="drop", workers=2)
    assert tokens(one) == tokens(several)
    assert str(one.report).replace("/one/", "/several/") == str(several.report)
    assert several.report.bad_records == 1


def test_of_the_errors_of_workers_the_first_of_the_file_is_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(sft_plan, "_RECORDS_AT_ONCE", 8)
    with pytest.raises(DataError, match=r"data\.jsonl:21: message 0: unknown role"):
        dataset(tmp_path, [*conversations(20), *[BAD] * 9], workers=2)


def test_those_who_come_at_the_same_time_wait_for_the_first(tmp_path):
    tokenizer = Chat()
    write_json_lines(tmp_path / "data.jsonl", conversations(50))
    made = []
    threads = [
        threading.Thread(target=lambda: made.append(dataset(tmp_path, [], tokenizer=tokenizer)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    assert tokenizer.calls == 50
    assert all(np.array_equal(one._order["order"], made[0]._order["order"]) for one in made)


_IDENTITY = """
from megatron_ext.conversation.prompt_format import PromptConfig
from megatron_ext.conversation.masking.answer_parts import TrainingPolicy
from megatron_ext.tokenizers.identity import tokenizer_identity
from tests.preprocessing.chat_of_bytes import ChatOfBytes
tokenizer = ChatOfBytes()
policy = TrainingPolicy.of("assistant,tool,user")
tokenizer.prompt_config = PromptConfig(pad_token_id=0, policy=policy)
print(tokenizer_identity(tokenizer))
"""


def test_the_identity_of_a_tokenizer_is_the_same_in_every_process():
    found = {
        run_python(_IDENTITY, env=os.environ | {"PYTHONHASHSEED": seed}).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_workers_of_a_data_loader_read_it(tmp_path):
    made = dataset(tmp_path, conversations(30), **PACKED)
    loader = torch.utils.data.DataLoader(
        made, batch_size=4, num_workers=1, multiprocessing_context="fork"
    )
    batches = list(loader)
    assert batches[0]["tokens"].shape == (4, 32)
    assert batches[0]["cu_seqlens"].shape == (4, 33)
    assert batches[0]["max_seqlen"].shape == (4,)
    for name in made[0]:
        together = torch.cat([batch[name] for batch in batches])
        assert torch.equal(together, torch.stack([sample[name] for sample in made]))


def test_it_pickles_without_its_arrays(tmp_path):
    made = dataset(tmp_path, conversations(1000))
    pickled = pickle.dumps(made)
    # megatron-core keeps the numbers of the records in each dataset.
    assert len(pickled) < made.indices.nbytes + 5000
    assert torch.equal(pickle.loads(pickled)[7]["tokens"], made[7]["tokens"])


def test_large_arrays_are_mapped_and_not_read(tmp_path):
    made = dataset(tmp_path, conversations(3))
    assert isinstance(made._plan.arrays["record"], np.memmap)
    assert isinstance(made._order["order"], np.memmap)


# The cache.


def test_a_cache_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / ".sft_cache").touch()
    with pytest.raises(
        DataError, match=r"\.sft_cache: the cache of the data set cannot be written"
    ):
        dataset(tmp_path, conversations(2))


def test_arrays_that_are_half_written_are_not_taken_for_whole(tmp_path, monkeypatch):
    saved = np.save

    def save_one(path, array):
        saved(path, array)
        if path.stem == "y":
            raise KeyboardInterrupt

    monkeypatch.setattr(np, "save", save_one)
    arrays = {"x": np.arange(3), "y": np.arange(3), "z": np.arange(3)}
    with pytest.raises(KeyboardInterrupt):
        cached_arrays(tmp_path, {}, lambda: (arrays, {}))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(np, "save", saved)
    made = cached_arrays(tmp_path, {}, lambda: (arrays, {"n": 1}))
    assert (made["y"].tolist(), made.notes) == ([0, 1, 2], {"n": 1})


@pytest.mark.parametrize("file", ["x.npy", "notes.json"])
@pytest.mark.parametrize(
    "content", [None, b"", b"\x93NUMPY", b"\xff" * 99, b"[" * 100_000], ids=lambda c: str(c)[:9]
)
def test_a_damaged_cache_is_named(tmp_path, file, content):
    made = cached_arrays(tmp_path, {}, lambda: ({"x": np.arange(3)}, {"n": 1}))
    path = made.folder / file
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    again = type(made)(made.folder)
    with pytest.raises(DataError, match=r"the cache is damaged; .*; remove this folder") as raised:
        _ = (again["x"], again.notes["n"])
    assert str(raised.value).startswith(str(made.folder))


def test_where_there_are_no_locks_the_faster_process_wins(tmp_path, monkeypatch):
    def build():
        if not list(tmp_path.glob("*/notes.json")):
            cached_arrays(tmp_path, {}, lambda: ({"x": np.arange(2)}, {}))
        return {"x": np.arange(5)}, {}

    monkeypatch.setattr("megatron_ext.files._lock", lambda descriptor: None)
    assert cached_arrays(tmp_path, {}, build)["x"].tolist() == [0, 1]
    assert len(list(tmp_path.iterdir())) == 1
