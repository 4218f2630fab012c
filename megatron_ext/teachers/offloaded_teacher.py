"""A teacher whose weights are on the host between uses, so that the student has the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from megatron_ext.losses.targets import TeacherTargets
from megatron_ext.teachers.base import Teacher, TokenInputs


class HostWeights:
    """Weights of frozen modules, on their device inside ``on_device`` and only there.

    They are copied to the host once, into pinned memory where there is a GPU; after that they only
    go from there to the device, since they never change. Buffers, which are small, stay.

    Args:
        modules: On their device.
        kept: Parameters that stay there, too.
    """

    def __init__(self, modules: Iterable[nn.Module], *, kept: Sequence[torch.Tensor] = ()) -> None:
        stays = {id(parameter) for parameter in kept}
        # By identity: tied ones are one parameter, in several modules or places.
        found = {id(p): p for module in modules for p in module.parameters()}
        self._parameters = [p for key, p in found.items() if key not in stays]
        self._host = [_on_host(parameter) for parameter in self._parameters]
        self._free()

    @property
    def bytes(self) -> int:
        """Of the weights, which is what is copied each time."""
        return sum(weights.nbytes for weights in self._host)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have the weights on the device; the host does not wait for the copy.

        What is computed with them inside need not be finished at the end: their memory is given to
        whatever comes behind it on the same stream.
        """
        for parameter, weights in zip(self._parameters, self._host, strict=True):
            parameter.data = weights.to(parameter.device, non_blocking=True)
        try:
            yield
        finally:
            self._free()

    def _free(self) -> None:
        for parameter in self._parameters:
            parameter.data = parameter.data.new_empty(0)


class OffloadedTeacher:
    """A teacher that has its weights while it predicts.

    Args:
        teacher: It; what its targets hold is not among ``weights``.
        weights: Its own.
    """

    def __init__(self, teacher: Teacher, weights: HostWeights) -> None:
        self._teacher = teacher
        self.weights = weights

    def targets(self, microbatches: Sequence[TokenInputs]) -> list[TeacherTargets]:
        """Those of the teacher; see ``Teacher``."""
        with self.weights.on_device():
            return self._teacher.targets(microbatches)


def _on_host(parameter: torch.Tensor) -> torch.Tensor:
    """A copy to read from, or on a CPU the weights themselves."""
    weights = parameter.detach()
    if weights.device.type == "cpu":
        return weights
    host = torch.empty(weights.shape, dtype=weights.dtype, device="cpu", pin_memory=True)
    return host.copy_(weights)
