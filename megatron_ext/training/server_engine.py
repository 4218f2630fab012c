"""Rollouts by inference servers that follow the checkpoints of a run."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch.distributed as dist

from megatron_ext.distributed import process_groups
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.engines.engine import Answers, AskedPrompt, Completion, EngineConfig, Sampling
from megatron_ext.engines.server import InferenceServer, check_processed
from megatron_ext.huggingface.checkpoint_files import is_checkpoint_folder
from megatron_ext.training import watchdog
from megatron_ext.training.checkpoints.huggingface_export import export_huggingface

WEIGHTS_FOLDER: Final = "engine_weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEngine:
    """An ``Engine`` over servers, which the main rank of each replica asks for all of its ranks."""

    server: InferenceServer | None
    """None on other ranks."""

    sampling: Sampling
    groups: ProcessGroups

    run_dir: Path
    """Folder of the run, in which the servers find the weights; they must be able to read it."""

    shares_weights = False

    @classmethod
    def connected(
        cls,
        config: EngineConfig,
        sampling: Sampling,
        *,
        groups: ProcessGroups,
        vocab_size: int,
        length: int,
        run_dir: Path,
    ) -> ServerEngine:
        """Connect to the servers.

        Collectives: one all-gather of objects.

        Raises:
            MegatronExtError: They cannot be reached, or are of no use; on every rank.
        """
        server = None
        with process_groups.raising_on_all():
            if groups.is_replica_main:
                where = "data.rollouts.engine"
                server = InferenceServer(config, where=where, vocab_size=vocab_size, length=length)
                check_processed(server, sampling, AskedPrompt([0], frozenset(), 0))
        return cls(server=server, sampling=sampling, groups=groups, run_dir=run_dir)

    def complete(self, prompts: Sequence[AskedPrompt]) -> Answers:
        """``Engine.complete``.

        Collectives of the result: one all-gather of objects; one object broadcast over ``tp_cp`` on
        the last stage, and one over ``pp``.

        Raises:
            DistributedError: A server does not answer, or answers nonsense; by the result, on every
                rank.
        """
        server = self.server
        answers = None if server is None else server.complete(prompts, self.sampling)
        return lambda: self._everywhere(answers)

    def close(self) -> None:
        """End the requests that have not begun, and the connections."""
        if self.server is not None:
            self.server.close()

    def _everywhere(self, answers_of: Answers | None) -> list[Completion]:
        """The answers that the main rank has, on every rank of its replica."""
        box: list[list[Completion]] = [[]]
        with process_groups.raising_on_all():
            if answers_of is not None:
                box = [answers_of()]
        for group, takes_part, place in (
            (self.groups.tp_cp, self.groups.is_last_stage, 0),
            (self.groups.pp, True, -1),
        ):
            if takes_part and dist.get_world_size(group) > 1:
                source = dist.get_process_group_ranks(group)[place]
                dist.broadcast_object_list(box, src=source, group=group)
        return box[0]

    def load(self, checkpoint: Path) -> None:
        """Have every server load the weights of a checkpoint, ours or a HuggingFace folder.

        Collectives: that of ``ProcessGroups.on_main``.

        Raises:
            MegatronExtError: The model has no architecture of transformers, or a server cannot load
                its weights.
        """
        watchdog.enter("loading the engine's weights")
        self.groups.on_main(lambda: self._load(checkpoint))

    def _load(self, checkpoint: Path) -> None:
        assert self.server is not None
        folder = checkpoint
        kept = self.run_dir / WEIGHTS_FOLDER
        if not is_checkpoint_folder(checkpoint):
            folder = kept / checkpoint.name
            shutil.rmtree(folder, ignore_errors=True)
            export_huggingface(checkpoint, folder, verify=False)
        self.server.load(folder.absolute())
        for older in kept.iterdir() if kept.exists() else ():
            if older.name != folder.name:
                shutil.rmtree(older, ignore_errors=True)
