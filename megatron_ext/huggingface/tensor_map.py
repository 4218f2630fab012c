"""The correspondence between the tensors of megatron-core and HuggingFace models.

A tensor of a megatron-core ``GPTModel`` is a vertical stack of rows of one or several HuggingFace
tensors. ``linear_qkv`` stacks them by query group, ``r`` query heads to a group:

    q_0 .. q_(r-1), k_0, v_0;  q_r .. q_(2r-1), k_1, v_1;  ...

``linear_fc1`` has the rows of the gate, then those of the other half. All other tensors correspond
one to one; a tensor of experts has an entry for each layer and expert. Parts of a rule with the
same name are ranges of one HuggingFace tensor, in their order (Phi-3's ``qkv_proj``: all queries,
then all keys, then all values). A HuggingFace tensor with all experts of a layer (gpt-oss's) has a
part for each of them, which may be its columns, or every other one of these. Where layers are of
two kinds, dense and with experts, a checkpoint's keys have the number of the layer. So any
rectangle of a megatron-core tensor, such as a rank's shard, is a few rectangles of HuggingFace
tensors, and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

Size = Literal[
    "hidden",
    "query",
    "key_value",
    "biased_query",
    "biased_key_value",
    "normed_head",
    "head",
    "heads",
    "ffn",
    "vocabulary",
    "direct_query",
    "latent",
    "latent_query",
    "latent_key",
    "latent_key_value",
    "latent_and_rotary",
    "latent_value",
    "experts",
    "expert_ffn",
    "shared_ffn",
    "one",
]
"""Length of a dimension of a tensor."""

Layers = Literal["all", "dense", "experts"]
"""Kind of layers."""


@dataclass(frozen=True, slots=True)
class Part:
    """A HuggingFace tensor, or the next range of rows of one with the same name.

    ``{layer}`` and ``{expert}`` in its name stand for their numbers.
    """

    name: str

    shape: tuple[Size, ...]
    """Rows, and columns where it is no vector, as ``GPTModel`` has them."""

    of_experts: Literal["rows", "columns"] | None = None
    """What an entry of a tensor with one for each expert of a layer has the rows as; None for a
    tensor that is not of all experts."""

    first: int = 0
    """Where the rows of such a part begin."""

    step: int = 1
    """Distance between two rows of such a part."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A tensor of ``GPTModel``, in each layer or outside of them, and its HuggingFace parts.

    A model has no tensor with a size of 0.
    """

    megatron: str
    """Key in a megatron-core checkpoint, without the number of a layer."""

    parts: tuple[Part, ...]

    order: Literal["stacked", "by_query_group"] = "stacked"

    layers: Layers = "all"
    """Kind of the layers that have it."""

    @property
    def is_of_layers(self) -> bool:
        """Whether every layer has such a tensor."""
        return "{layer}" in self.parts[0].name

    @property
    def is_of_experts(self) -> bool:
        """Whether every expert of every layer has such a tensor."""
        part = self.parts[0]
        return part.of_experts is not None or "{expert}" in part.name


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of a HuggingFace tensor, or of the entry of an expert in one."""

    name: str
    start: int
    stop: int

    step: int = 1
    """Distance between two rows."""

    expert: int | None = None
    """Number of the entry; None for a tensor that is not of all experts."""

    is_transposed: bool = False
    """Whether the rows are columns there."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(range(self.start, self.stop, self.step))

    def of(self, whole: Any) -> Any:
        """The rows, [rows, columns] or [rows], as a view of the whole HuggingFace tensor."""
        entry = whole if self.expert is None else whole[self.expert]
        return (entry.T if self.is_transposed else entry)[self.start : self.stop : self.step]


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronTensor:
    """One tensor of ``GPTModel``, in a given layer and expert if it belongs to these."""

    key: str

    layer: int | None
    """Number of the layer; None outside of layers."""

    blocks: tuple[Block, ...]
    """Stacked blocks, from the first row on."""

    columns: int | None
    """Number of columns; None for a vector."""

    expert: int | None = None
    """Number of the expert; None outside of experts."""

    is_numbered: bool = False
    """Whether the key has the number of the layer."""

    @property
    def place(self) -> tuple[int, ...]:
        """Layer and expert, as far as there are and the key does not say them."""
        layer = None if self.is_numbered else self.layer
        return tuple(number for number in (layer, self.expert) if number is not None)

    @property
    def rows(self) -> int:
        """Rows from HuggingFace tensors; a padded vocabulary has more."""
        return sum(block.rows for block in self.blocks)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape without the padding of the vocabulary."""
        return (self.rows,) if self.columns is None else (self.rows, self.columns)

    def rows_of(self, name: str) -> Iterator[tuple[Block, int]]:
        """The blocks of one HuggingFace tensor, each with its first row in this tensor."""
        row = 0
        for block in self.blocks:
            if block.name == name:
                yield block, row
            row += block.rows


_LAYERS: Final = "decoder.layers."


class TensorMap:
    """The tensors of one model on both sides.

    Args:
        rules: Rules of the family.
        settings: Settings of the model, by the names of ``ModelConfig``.
    """

    def __init__(self, rules: Sequence[Rule], settings: Mapping[str, Any]) -> None:
        self._sizes = _sizes(settings)
        self._rules = {
            rule.megatron: rule
            for rule in rules
            if all(self._sizes[size] for part in rule.parts for size in part.shape)
        }
        self._groups = int(settings["num_query_groups"])
        self._dense = int(settings["moe_first_dense_layers"])
        self.layers = int(settings["num_layers"])

    def megatron_tensors(self) -> Iterator[MegatronTensor]:
        """All megatron-core tensors, layer by layer, in the order of the rules."""
        rules = list(self._rules.values())
        inner = [index for index, rule in enumerate(rules) if rule.is_of_layers]
        for rule in rules[: inner[0]]:
            yield self.tensor(rule.megatron)
        for layer in range(self.layers):
            absent = "experts" if layer < self._dense else "dense"
            for rule in (rules[index] for index in inner):
                if rule.layers == absent:
                    continue
                for expert in range(self._sizes["experts"]) if rule.is_of_experts else (None,):
                    yield self._tensor(rule, layer, expert)
        for rule in rules[inner[-1] + 1 :]:
            yield self.tensor(rule.megatron)

    @property
    def keys_of_checkpoint(self) -> tuple[str, ...]:
        """Keys of the model's megatron-core checkpoint."""
        return tuple({tensor.key: None for tensor in self.megatron_tensors()})

    def tensor(self, key: str, *place: int) -> MegatronTensor:
        """The tensor with a key of a checkpoint.

        Args:
            place: Numbers of the layer, unless the key has it, and of the expert, as far as the
                tensor is of these.

        Raises:
            KeyError: The family has no such tensor.
        """
        if self._dense and key.startswith(_LAYERS):
            layer, _, rest = key.removeprefix(_LAYERS).partition(".")
            return self._tensor(self._rules[_LAYERS + rest], int(layer), *place)
        return self._tensor(self._rules[key], *place)

    def _tensor(
        self, rule: Rule, layer: int | None = None, expert: int | None = None
    ) -> MegatronTensor:
        blocks = self._by_query_group if rule.order == "by_query_group" else self._stacked
        shape, is_numbered = rule.parts[0].shape, bool(self._dense) and layer is not None
        key = rule.megatron
        return MegatronTensor(
            key=f"{_LAYERS}{layer}.{key.removeprefix(_LAYERS)}" if is_numbered else key,
            layer=layer,
            expert=expert,
            is_numbered=is_numbered,
            blocks=tuple(blocks(rule, layer, expert)),
            columns=self._sizes[shape[1]] if len(shape) > 1 else None,
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the model's HuggingFace tensors, in order."""
        found: dict[str, tuple[int, ...]] = {}
        ends: dict[str, int] = {}
        for tensor in self.megatron_tensors():
            columns = () if tensor.columns is None else (tensor.columns,)
            for block in tensor.blocks:
                # A tensor ends where the last of its parts does.
                end = ends[block.name] = max(ends.get(block.name, 0), block.stop)
                shape = (*columns, end) if block.is_transposed else (end, *columns)
                entries = () if block.expert is None else (self._sizes["experts"],)
                found[block.name] = entries + shape
        return found

    def _stacked(self, rule: Rule, layer: int | None, expert: int | None) -> Iterator[Block]:
        ends: dict[str, int] = {}
        for part in rule.parts:
            name = part.name.format(layer=layer, expert=expert)
            rows = self._sizes[part.shape[0]]
            if part.of_experts is not None:
                stop = part.first + part.step * (rows - 1) + 1
                is_transposed = part.of_experts == "columns"
                yield Block(name, part.first, stop, part.step, expert, is_transposed)
                continue
            start = ends.get(name, 0)
            ends[name] = start + rows
            yield Block(name, start, ends[name])

    def _by_query_group(self, rule: Rule, layer: int | None, expert: int | None) -> Iterator[Block]:
        for group in range(self._groups):
            for whole in self._stacked(rule, layer, expert):
                rows = whole.rows // self._groups
                start = whole.start + group * rows
                yield Block(whole.name, start, start + rows)


def _sizes(settings: Mapping[str, Any]) -> dict[Size, int]:
    heads = settings["num_attention_heads"]
    head = settings["kv_channels"] or settings["hidden_size"] // heads
    latent, of_query = settings["kv_lora_rank"] or 0, settings["q_lora_rank"] or 0
    rotary, plain = settings["qk_pos_emb_head_dim"] or 0, settings["qk_head_dim"] or 0
    value = settings["v_head_dim"] or 0
    return {
        "hidden": settings["hidden_size"],
        "query": heads * head,
        "key_value": settings["num_query_groups"] * head,
        "head": head,
        "biased_query": heads * head * settings["add_qkv_bias"],
        "biased_key_value": settings["num_query_groups"] * head * settings["add_qkv_bias"],
        "normed_head": head * settings["qk_layernorm"],
        "heads": heads,
        "direct_query": 0 if of_query else heads * (plain + rotary),
        "latent": of_query,
        "latent_query": heads * (plain + rotary),
        "latent_key": latent,
        "latent_key_value": heads * (plain + value),
        "latent_and_rotary": latent + rotary,
        "latent_value": heads * value,
        "ffn": settings["ffn_hidden_size"],
        "vocabulary": settings["vocab_size"],
        "experts": settings["num_experts"] or 0,
        "expert_ffn": settings["moe_ffn_hidden_size"] or settings["ffn_hidden_size"],
        "shared_ffn": settings["moe_shared_expert_intermediate_size"] or 0,
        "one": 1,
    }
