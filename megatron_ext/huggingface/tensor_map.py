"""The correspondence between the tensors of megatron-core and HuggingFace models.

A tensor of a megatron-core ``GPTModel`` is a vertical stack of rows of one or several HuggingFace
tensors. ``linear_qkv`` stacks them by query group, ``r`` query heads to a group:

    q_0 .. q_(r-1), k_0, v_0;  q_r .. q_(2r-1), k_1, v_1;  ...

Where a family rotates neighbouring rows of a head (GLM, ERNIE), which megatron-core has half a head
apart, the rows of queries and keys are in another order, which no product of the two depends on.
With output gates a group has those of its heads behind the queries. ``in_proj`` of linear attention
has the rows of a key head after those of another: its query and key, values, gates, corrections and
decays of the value heads that read it.

``linear_fc1`` has the rows of the gate, then those of the other half. All other tensors correspond
one to one; a tensor of experts has an entry for each layer and expert. Parts of a rule with the
same name are ranges of one HuggingFace tensor, in their order (Phi-3's ``qkv_proj``: all queries,
then all keys, then all values). A HuggingFace tensor with all experts of a layer (gpt-oss's) has a
part for each of them, which may be its columns, or every other one of these. Where layers are of
two kinds, dense and with experts, or with full and with linear attention, a checkpoint's keys have
the number of the layer.

So any rectangle of a megatron-core tensor, such as a rank's shard, is a few rectangles of
HuggingFace tensors, and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

Size = Literal[
    "hidden",
    "query",
    "gated_query",
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
    "linear_key",
    "linear_value",
    "linear_value_heads",
    "linear_value_head",
    "linear_convolution",
    "linear_mixed",
    "linear_gates",
    "experts",
    "expert_ffn",
    "shared_ffn",
    "one",
]
"""Length of a dimension of a tensor."""

Order = Literal[
    "stacked", "by_query_group", "paired_by_query_group", "gated_by_query_group", "by_linear_head"
]
"""Order of the rows of several parts."""

Layers = Literal["all", "dense", "experts", "full", "linear"]
"""Kind of layers, by their feed-forward layer or by their attention."""


@dataclass(frozen=True, slots=True)
class Part:
    """A HuggingFace tensor, or the next range of rows of one with the same name.

    ``{layer}`` and ``{expert}`` in its name stand for their numbers.
    """

    name: str

    shape: tuple[Size, ...]
    """Rows, and columns where it is no vector, as ``GPTModel`` has them; of a convolution, whose
    columns are one number wide, that number as well."""

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

    order: Order = "stacked"

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

    columns: tuple[int, ...]
    """Number of columns, and what each has of a convolution; none for a vector."""

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
        return (self.rows, *self.columns)

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
        self._turned = int(self._sizes["head"] * settings["rotary_percent"])
        self._linear_heads = int(settings["linear_num_key_heads"] or 0)
        self._dense = int(settings["moe_first_dense_layers"])
        self._interval = settings["linear_attention_freq"]
        self._is_numbered = bool(self._dense or self._interval)
        self.layers = int(settings["num_layers"])

    def megatron_tensors(self) -> Iterator[MegatronTensor]:
        """All megatron-core tensors, layer by layer, in the order of the rules."""
        rules = list(self._rules.values())
        inner = [index for index, rule in enumerate(rules) if rule.is_of_layers]
        for rule in rules[: inner[0]]:
            yield self.tensor(rule.megatron)
        for layer in range(self.layers):
            kinds = self._kinds(layer)
            for rule in (rules[index] for index in inner):
                if rule.layers not in kinds:
                    continue
                for expert in range(self._sizes["experts"]) if rule.is_of_experts else (None,):
                    yield self._tensor(rule, layer, expert)
        for rule in rules[inner[-1] + 1 :]:
            yield self.tensor(rule.megatron)

    def _kinds(self, layer: int) -> set[Layers]:
        """Kinds that a layer, counted from 0, is of."""
        is_linear = self._interval is not None and (layer + 1) % self._interval > 0
        return {
            "all",
            "dense" if layer < self._dense else "experts",
            "linear" if is_linear else "full",
        }

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
        if self._is_numbered and key.startswith(_LAYERS):
            layer, _, rest = key.removeprefix(_LAYERS).partition(".")
            return self._tensor(self._rules[_LAYERS + rest], int(layer), *place)
        return self._tensor(self._rules[key], *place)

    def _tensor(
        self, rule: Rule, layer: int | None = None, expert: int | None = None
    ) -> MegatronTensor:
        blocks = {
            "stacked": self._stacked,
            "by_query_group": self._by_query_group,
            "paired_by_query_group": self._paired_by_query_group,
            "gated_by_query_group": self._gated_by_query_group,
            "by_linear_head": self._by_linear_head,
        }[rule.order]
        shape, is_numbered = rule.parts[0].shape, self._is_numbered and layer is not None
        key = rule.megatron
        return MegatronTensor(
            key=f"{_LAYERS}{layer}.{key.removeprefix(_LAYERS)}" if is_numbered else key,
            layer=layer,
            expert=expert,
            is_numbered=is_numbered,
            blocks=tuple(blocks(rule, layer, expert)),
            columns=tuple(self._sizes[size] for size in shape[1:]),
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the model's HuggingFace tensors, in order."""
        found: dict[str, tuple[int, ...]] = {}
        ends: dict[str, int] = {}
        for tensor in self.megatron_tensors():
            columns = tensor.columns
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
            start = ends.get(name, 0)
            if part.step > 1:
                start = part.first
            ends[name] = start + part.step * (rows - 1) + 1
            of_entry = None if part.of_experts is None else expert
            is_transposed = part.of_experts == "columns"
            yield Block(name, start, ends[name], part.step, of_entry, is_transposed)

    def _by_query_group(self, rule: Rule, layer: int | None, expert: int | None) -> Iterator[Block]:
        return _by_group(self._stacked(rule, layer, expert), self._groups)

    def _by_linear_head(self, rule: Rule, layer: int | None, expert: int | None) -> Iterator[Block]:
        return _by_group(self._stacked(rule, layer, expert), self._linear_heads)

    def _paired_by_query_group(
        self, rule: Rule, layer: int | None, expert: int | None
    ) -> Iterator[Block]:
        """Of queries and keys, first the even ones of a head's rows that are rotated, then the odd
        ones: two that are rotated together are neighbours in the HuggingFace tensor."""
        head, parts = self._sizes["head"], len(rule.parts)
        for number, block in enumerate(self._by_query_group(rule, layer, expert)):
            if number % parts == parts - 1:
                yield block
                continue
            for start in range(block.start, block.stop, head):
                turned, stop = start + self._turned, start + head
                yield Block(block.name, start, turned, 2)
                yield Block(block.name, start + 1, turned, 2)
                if turned < stop:
                    yield Block(block.name, turned, stop)

    def _gated_by_query_group(
        self, rule: Rule, layer: int | None, expert: int | None
    ) -> Iterator[Block]:
        """Of each group the queries, their gates, keys and values; a head's gate is behind its
        query in the HuggingFace tensor."""
        head = self._sizes["head"]
        for block in self._by_query_group(rule, layer, expert):
            if block.rows == head:
                yield block
                continue
            for first in (0, head):
                for start in range(block.start + first, block.stop, 2 * head):
                    yield Block(block.name, start, start + head)


def _by_group(stacked: Iterator[Block], groups: int) -> Iterator[Block]:
    """The next share of each block for every one of ``groups``."""
    wholes = list(stacked)
    for group in range(groups):
        for whole in wholes:
            rows = whole.rows // groups
            start = whole.start + group * rows
            yield Block(whole.name, start, start + rows)


_KINDS: Final = ("key", "value")


def _sizes(settings: Mapping[str, Any]) -> dict[Size, int]:
    heads = settings["num_attention_heads"]
    head = settings["kv_channels"] or settings["hidden_size"] // heads
    latent, of_query = settings["kv_lora_rank"] or 0, settings["q_lora_rank"] or 0
    rotary, plain = settings["qk_pos_emb_head_dim"] or 0, settings["qk_head_dim"] or 0
    value = settings["v_head_dim"] or 0
    key_heads, value_heads = (settings[f"linear_num_{kind}_heads"] or 0 for kind in _KINDS)
    of_key, of_value = (settings[f"linear_{kind}_head_dim"] or 0 for kind in _KINDS)
    return {
        "hidden": settings["hidden_size"],
        "query": heads * head,
        "gated_query": 2 * heads * head,
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
        "linear_key": key_heads * of_key,
        "linear_value": value_heads * of_value,
        "linear_value_heads": value_heads,
        "linear_value_head": of_value,
        "linear_convolution": settings["linear_conv_kernel_dim"] or 0,
        "linear_mixed": 2 * (key_heads * of_key + value_heads * of_value),
        "linear_gates": 2 * value_heads,
        "ffn": settings["ffn_hidden_size"],
        "vocabulary": settings["vocab_size"],
        "experts": settings["num_experts"] or 0,
        "expert_ffn": settings["moe_ffn_hidden_size"] or settings["ffn_hidden_size"],
        "shared_ffn": settings["moe_shared_expert_intermediate_size"] or 0,
        "one": 1,
    }
