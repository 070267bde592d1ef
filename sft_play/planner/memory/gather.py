"""What a rank with a shard of the weights gathers: buffers of FSDP2 and ZeRO-3, phase by phase.

FSDP2 (torch/distributed/fsdp/_fully_shard): a unit is gathered into one flat buffer and copied out into its parameters;
the buffer of the last unit stays until the next one is waited for. In the backward pass the next unit's buffer is
filled while this one computes, and the flat input of the last reduction stays until the next. accelerate's units are
the blocks, the embedding, and [last norm, head], with the embedding where it is tied; the last unit stays gathered from
the forward to the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sft_play.config.schema import LoraConfig
from sft_play.facts.models.model_shape import LayerKind, ModelShape
from sft_play.planner.layout import Layout
from sft_play.planner.memory.model_states import block_adapter_params, nf4_packed_bytes

# DeepSpeed's `reduce_bucket_size`, `allgather_bucket_size` and, doubled, the most parameters it keeps gathered
# (`stage3_max_live_parameters`) by its own defaults (deepspeed/runtime/zero/config.py).
ZERO_BUCKET_PARAMS = 500_000_000


@dataclass(frozen=True)
class GatherBuffers:
    """What is gathered, in bytes of the compute dtype, and the buffers for it in each phase."""

    blocks: tuple[int, ...]
    """The unit of each block, from the first to the last."""
    embedding: int
    """0 where it belongs to the tail."""
    tail: int
    """The last unit; while the head computes: its parameters."""
    trained_share: float
    """Fraction of a unit's parameters that train: what is reduced of it."""
    ranks: int
    reduce_ratio: float = 1.0
    """Bytes of a gradient as sent over its bytes as computed."""

    @property
    def _tied_embedding(self) -> int:
        return 0 if self.embedding else self.tail

    def forward_bytes(self, layer: int) -> int:
        """While block `layer` computes: its parameters and its flat buffer; a tied embedding stays too."""
        return 2 * self.blocks[layer] + self._tied_embedding

    @property
    def tail_gather_bytes(self) -> int:
        """When the tail is gathered: the last block's buffer, the tail's, and its parameters."""
        return self.blocks[-1] + 2 * self.tail

    @property
    def head_backward_bytes(self) -> int:
        """While the head runs backward: its parameters and the last block's buffer."""
        return self.tail + self.blocks[-1]

    def _prefetched_unit(self, layer: int) -> int:
        """The unit that is gathered while block `layer` runs backward: the one before it in the forward pass."""
        return self.blocks[layer - 1] if layer else self.embedding

    def backward_bytes(self, layer: int) -> int:
        """While block `layer` runs backward: its parameters, the next one's buffer, the last reduction's input."""
        reduced = self.blocks[layer + 1] if layer + 1 < len(self.blocks) else self.tail
        reduced_bytes = int(reduced * self.trained_share * self.reduce_ratio)
        return self.blocks[layer] + self._prefetched_unit(layer) + reduced_bytes + self._tied_embedding

    def _sharding_bytes(self, gradients: int) -> int:
        """Gradients while they are sharded: themselves, the flat input, this rank's shard, and that in fp32."""
        return int(gradients * (1 + self.reduce_ratio + (2 + self.reduce_ratio) / self.ranks))

    def reduction_bytes(self, layer: int) -> int:
        """When the gradients of block `layer` are sharded, beside the next unit's buffer."""
        return (
            self._prefetched_unit(layer)
            + self._sharding_bytes(int(self.blocks[layer] * self.trained_share))
            + self._tied_embedding
        )

    def embedding_backward_bytes(self, embedding_gradient: int) -> tuple[int, ...]:
        """When the embedding runs backward: gathered; with its gradient; when that is sharded."""
        last_reduction = int(self.blocks[0] * self.trained_share)
        # tied: the head's gradient of the same table is there too
        head_gradient = embedding_gradient if self._tied_embedding else 0
        return (
            2 * self.embedding,
            (self.embedding or self.tail) + last_reduction + embedding_gradient + head_gradient,
            self._sharding_bytes(embedding_gradient),
        )


def build_gather_buffers(
    shape: ModelShape,
    *,
    itemsize: int,
    is_nf4: bool,
    lora: LoraConfig | None,
    tensor_parallel_ranks: int,
    **fields: Any,
) -> GatherBuffers:
    """The units of a model, `itemsize` bytes for what is gathered unpacked, with the adapters of `lora`, and the other
    fields. Of blocks that tensor-parallel ranks share, the gathered part is one rank's."""
    unit_bytes = [
        _unit_bytes(kind, itemsize=itemsize, is_nf4=is_nf4, lora=lora) // tensor_parallel_ranks for kind in shape.layers
    ]
    table_bytes = itemsize * shape.embedding_table_params
    return GatherBuffers(
        tuple(unit_bytes[index] for index in shape.layer_order), 0 if shape.tied else table_bytes, table_bytes, **fields
    )


def _unit_bytes(kind: LayerKind, *, itemsize: int, is_nf4: bool, lora: LoraConfig | None) -> int:
    adapters = 0 if lora is None else itemsize * block_adapter_params(kind, lora)
    if not is_nf4:
        return itemsize * kind.params + adapters
    # constants are whole on every rank already
    packed = sum(nf4_packed_bytes(elements) for elements in kind.packable_sizes)
    return packed + itemsize * (kind.params - sum(kind.packable_sizes)) + adapters


def zero_bucket_bytes(
    layout: Layout,
    trained_params: int,
    params: int,
    hidden: int,
    *,
    packed_params: int = 0,
    reduces_in_fp32: bool = False,
) -> int:
    """DeepSpeed's flat buffers in half precision: two of gradients being sent in stages 1 and 2, and in stage 3 one
    beside the parameters that it keeps gathered. A bucket has the hidden size squared elements, as transformers fills
    `reduce_bucket_size: auto` (integrations/deepspeed.py). `packed_params`: parameters in NF4, two of which
    DeepSpeed sees as one element of one byte. `reduces_in_fp32`: gradients made in half precision travel in fp32."""
    bucket = 2 * min(hidden * hidden, trained_params)  # two bytes an element
    if reduces_in_fp32:  # a copy being sent, beside the bucket
        bucket += 4 * min(hidden * hidden, trained_params)
    if layout.shards_params:
        plain_params = min(2 * ZERO_BUCKET_PARAMS, params - packed_params)
        return bucket + 2 * plain_params + min(2 * ZERO_BUCKET_PARAMS - plain_params, packed_params // 2)
    return 2 * bucket
