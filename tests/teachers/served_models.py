"""What spawned ranks run in the tests of served models: two are a teacher, two its student."""

import time
import zlib
from datetime import timedelta
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.data.batch import SideBatch
from megatron_ext.distributed import process_groups
from megatron_ext.distributed.context_parallel import ContextRank
from megatron_ext.teachers.connection import connect, own_addresses
from megatron_ext.teachers.formed_targets import FormedTargets, from_records, to_records, whole_head
from megatron_ext.teachers.listener import TeacherListener
from megatron_ext.teachers.megatron_teacher import MegatronTeacher, head_weight
from megatron_ext.teachers.remote_server import RemoteServer
from megatron_ext.teachers.remote_teacher import RemoteTeacher
from megatron_ext.teachers.server import ReplicaRanks, TeacherServer
from megatron_ext.teachers.target_form import FormKind, TargetForm
from megatron_ext.training.configuration.config import ModelConfig, ParallelConfig, TrainingConfig
from megatron_ext.training.megatron_models import cpu_megatron
from megatron_ext.training.megatron_models.models import build_gpt_model, freeze
from megatron_ext.training.microbatch import TokenBatch
from tests.teachers.stand_in_teacher import TOKEN

VOCAB, PADDED_VOCAB, WIDTH, LENGTH, TOP_K = 53, 56, 32, 16, 7
TIMEOUT = timedelta(seconds=60)


class Run(NamedTuple):
    """One form of a teacher in one layout, for a student in another."""

    kind: FormKind
    serving: str
    student: str

    @property
    def form(self):
        return TargetForm.of(
            self.kind, precision="fp32", top_k=TOP_K, hidden_size=WIDTH, vocab_size=VOCAB
        )

    @property
    def name(self):
        return "-".join(self)


LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2": {},
}


def serve(rank, folder, runs):
    """Each run's teacher, until its student has left."""
    for run in runs:
        groups, gpt, shard = _model(run.serving)
        listener = None
        if groups.is_replica_main:
            listener = TeacherListener("127.0.0.1:0", TOKEN)
            _publish(folder / f"{run.name}-{groups.dp_rank}", listener.address)
        teacher = MegatronTeacher([gpt], shard=shard)
        formed = FormedTargets(form=run.form, boundary=_boundary(shard), tile_rows=9)

        def head(gpt=gpt, shard=shard, groups=groups):
            if not groups.is_last_stage:
                return None
            return whole_head(head_weight(gpt), shard, is_kept=groups.is_replica_main)

        group = parallel_state.get_model_parallel_group()
        TeacherServer(
            teacher,
            name="served",
            formed=formed,
            head=head if run.kind == "hidden" else None,
            identity={"model": "tiny"},
            ranks=ReplicaRanks(
                device=groups.device,
                group=group,
                main=dist.get_process_group_ranks(group)[_main_of(group, groups)],
            ),
            timeout=TIMEOUT,
        ).serve(listener, until_client_leaves=True)


def learn(rank, folder, runs):
    """By run the microbatches, and by field the largest difference to the teacher on this rank.

    It is a share of the field's largest number, where that is above 1.
    """
    return {run.name: _learn(folder, run) for run in runs}


def _learn(folder, run):
    groups, gpt, shard = _model(run.student)
    replicas = []
    if groups.is_replica_main:
        addresses = _addresses(folder / run.name, 2 if run.serving == "dp2" else 1)
        servers = [
            RemoteServer(
                name="served", address=address, token=TOKEN, timeout_s=TIMEOUT.total_seconds()
            )
            for address in own_addresses(addresses, client=groups.dp_rank, clients=groups.dp_size)
        ]
        replicas = connect(servers, form=run.form, identity={"model": "tiny"}, device=groups.device)
    # None leaves before all are there: a server ends with its last student.
    dist.barrier()
    remote = RemoteTeacher(
        replicas,
        form=run.form,
        shard=shard,
        groups=groups,
        dtype=torch.float32,
    )
    context = ContextRank.of(groups.cp)
    first, second = (_batches(seed + 10 * groups.dp_rank, context) for seed in (0, 1))
    remote.ask(first)
    found = {1: remote.targets(second), 0: remote.targets(first)}
    direct = MegatronTeacher([gpt], shard=shard)
    worst = {"count": 0}
    for number, batches in ((0, first), (1, second)):
        reference = direct.targets(batches)
        assert len(found[number]) == len(reference)
        for target, own, batch in zip(found[number], reference, batches, strict=False):
            worst["count"] += 1
            _compare(
                target,
                own,
                batch,
                FormedTargets(form=run.form, boundary=_boundary(shard), context=context),
                worst,
            )
    remote.close(is_finished=True)
    tokens = sum(batch.rows.tokens.numel() for batch in first + second if batch.rows)
    if replicas:
        assert remote.received_tokens == tokens
        assert remote.received_bytes > tokens * run.form.bytes_per_token
        assert replicas[0].channel == "shared_memory"
    if not groups.is_last_stage:
        assert remote.received_bytes == 0
    return worst


def _compare(target, own, batch, formed, worst):
    fields = {name: x.flatten(0, 1) for name, x in formed(own, batch.labels).items()}
    whole = from_records(to_records(fields, formed.form), formed.form)
    shape = batch.rows.tokens.shape if batch.rows else ()
    for name, values in whole.items():
        rows = values.unflatten(0, shape)
        rows = rows if formed.context is None else formed.context.cut(rows)
        received = getattr(target, name)
        assert received.shape == rows.shape
        largest = max(1.0, rows.double().abs().max().item())
        difference = (received.double() - rows.double()).abs().max().item()
        worst[name] = max(worst.get(name, 0.0), difference / largest)
    if own.head_weight is not None and formed.form.kind == "hidden":
        # Rows beyond the vocabulary are padding, of which nothing is sent.
        valid = own.shard.valid_width
        assert torch.equal(target.head_weight[:valid], own.head_weight[:valid])
        assert not target.head_weight[valid:].any()


def _model(layout):
    """The same weights in any layout."""
    cpu_megatron.install()
    parallel_state.destroy_model_parallel()
    sizes = LAYOUTS[layout]
    parallel = ParallelConfig(**sizes)
    groups = process_groups.initialize(parallel.layout)
    gpt = build_gpt_model(
        ModelConfig(
            num_layers=2,
            hidden_size=WIDTH,
            num_attention_heads=4,
            num_query_groups=2,
            seq_length=LENGTH,
            swiglu=False,
            untie_embeddings_and_output_weights=True,
        ),
        padded_vocab_size=PADDED_VOCAB,
        parallel=parallel,
        training=TrainingConfig(train_iters=1, global_batch_size=2),
        groups=groups,
    )
    _draw(gpt, groups)
    (gpt,) = freeze([gpt])
    return groups, gpt, groups.vocab_shard(vocab_size=VOCAB, padded_vocab_size=PADDED_VOCAB)


@torch.no_grad()
def _draw(gpt, groups):
    """Weights by the names that they have in a whole model."""
    for name, weight in gpt.named_parameters():
        if name.startswith("decoder.layers."):
            parts = name.split(".")
            parts[2] = str(gpt.decoder.layers[int(parts[2])].layer_number)
            name = ".".join(parts)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        shape, is_cut = list(weight.shape), getattr(weight, "tensor_model_parallel", False)
        if is_cut:
            shape[weight.partition_dim] *= groups.tp.size()
        drawn = torch.randn(shape, generator=generator) * 0.1 + ("norm" in name)
        if is_cut:
            drawn = drawn.chunk(groups.tp.size(), weight.partition_dim)[groups.tp.rank()]
        weight.copy_(drawn)


def _batches(seed, context):
    """Rows of several texts, and rows of one."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for bounds in ([0, 5, 12, 16, 30, 32], [0, 16, 32], [0, 3, 16, 20, 32]):
        tokens = torch.randint(VOCAB, (2, LENGTH), generator=generator)
        labels = tokens.roll(-1, 1)
        places = torch.cat([torch.arange(b - a) for a, b in pairwise(bounds)])
        # The last label of each text is of none.
        labels.view(-1)[torch.tensor(bounds[1:]) - 1] = -100
        side = SideBatch(
            input_ids=tokens,
            labels=labels,
            loss_mask=(labels >= 0).float(),
            position_ids=places.view(2, LENGTH),
            lengths=torch.tensor([LENGTH, LENGTH]),
            cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
            max_seqlen=LENGTH,
            byte_count=1,
        )
        batches.append(TokenBatch.of(side, context).with_mask(side.cu_seqlens, context))
    assert [batch.rows.cu_seqlens is None for batch in batches] == [False, True, False]
    return batches


def _boundary(shard):
    return torch.arange(shard.start, shard.stop) % 3 == 0


def _main_of(group, groups):
    """Place of the main rank among those of a replica."""
    own = torch.tensor([dist.get_rank(group) if groups.is_replica_main else 0])
    dist.all_reduce(own, group=group)
    return int(own)


def _publish(path, address):
    partial = path.with_suffix(".partial")
    partial.write_text(address)
    partial.rename(path)


def _addresses(path, count):
    paths = [path.with_name(f"{path.name}-{replica}") for replica in range(count)]
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return [path.read_text() for path in paths]
