"""What a rank with a shard of the weights gathers: buffers of FSDP2 and ZeRO-3, moment by moment.

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
from sft_play.planner.memory.model_states import adapters_of, packed_bytes

# DeepSpeed's `reduce_bucket_size`, `allgather_bucket_size` and, doubled, the most parameters it keeps gathered
# (`stage3_max_live_parameters`) by its own defaults (deepspeed/runtime/zero/config.py).
ZERO_BUCKET_PARAMS = 500_000_000


@dataclass(frozen=True)
class Gathering:
    """What is gathered, in bytes of the compute dtype, and the buffers for it at each moment."""

    blocks: tuple[int, ...]
    """The unit of each block, from the first to the last."""
    embedding: int
    """0 where it belongs to the tail."""
    tail: int
    """The last unit; while the head computes: its parameters."""
    trained_share: float
    """Fraction of a unit's parameters that train: what is reduced of it."""
    ranks: int
    wider: float = 1.0
    """Bytes of a gradient as sent over its bytes as computed."""

    @property
    def _tied(self) -> int:
        return 0 if self.embedding else self.tail

    def forward(self, layer: int) -> int:
        """While block `layer` computes: its parameters and its flat buffer; a tied embedding stays too."""
        return 2 * self.blocks[layer] + self._tied

    @property
    def before_tail(self) -> int:
        """When the tail is gathered: the last block's buffer, the tail's, and its parameters."""
        return self.blocks[-1] + 2 * self.tail

    @property
    def head(self) -> int:
        """While the head runs backward: its parameters and the last block's buffer."""
        return self.tail + self.blocks[-1]

    def _prefetched(self, layer: int) -> int:
        """The unit that is gathered while block `layer` runs backward: the one before it in the forward pass."""
        return self.blocks[layer - 1] if layer else self.embedding

    def backward(self, layer: int) -> int:
        """While block `layer` runs backward: its parameters, the next one's buffer, the last reduction's input."""
        reduced = self.blocks[layer + 1] if layer + 1 < len(self.blocks) else self.tail
        sent = int(reduced * self.trained_share * self.wider)
        return self.blocks[layer] + self._prefetched(layer) + sent + self._tied

    def _cut(self, gradients: int) -> int:
        """Gradients while they are sharded: themselves, the flat input, this rank's shard, and that in fp32."""
        return int(gradients * (1 + self.wider + (2 + self.wider) / self.ranks))

    def reduction(self, layer: int) -> int:
        """When the gradients of block `layer` are sharded, beside the next unit's buffer."""
        return self._prefetched(layer) + self._cut(int(self.blocks[layer] * self.trained_share)) + self._tied

    def end(self, dense: int) -> tuple[int, ...]:
        """When the embedding runs backward: gathered; with its gradient of `dense` bytes; when that is sharded."""
        last = int(self.blocks[0] * self.trained_share)
        twice = dense if self._tied else 0  # tied: the head's gradient of the same table is there too
        return 2 * self.embedding, (self.embedding or self.tail) + last + dense + twice, self._cut(dense)


def gathering(
    shape: ModelShape, *, width: int, nf4: bool, lora: LoraConfig | None, parts: int, **more: Any
) -> Gathering:
    """The units of a model, `width` bytes for what is gathered unpacked, with the adapters of `lora`, and the other
    fields. Of blocks that `parts` tensor-parallel ranks share, the gathered part is one rank's."""
    kinds = [_block(kind, width=width, nf4=nf4, lora=lora) // parts for kind in shape.layers]
    table = width * shape.embedding_table_params
    return Gathering(tuple(kinds[place] for place in shape.layer_order), 0 if shape.tied else table, table, **more)


def _block(kind: LayerKind, *, width: int, nf4: bool, lora: LoraConfig | None) -> int:
    adapters = 0 if lora is None else width * adapters_of(kind, lora)
    if not nf4:
        return width * kind.params + adapters
    packed = sum(packed_bytes(elements) for elements in kind.packable_sizes)  # constants are whole on every rank already
    return packed + width * (kind.params - sum(kind.packable_sizes)) + adapters


def zero_buckets(
    layout: Layout, trained_params: int, params: int, hidden: int, *, packed: int = 0, wider: bool = False
) -> int:
    """DeepSpeed's flat buffers in half precision: two of gradients being sent in stages 1 and 2, and in stage 3 one
    beside the parameters that it keeps gathered. A bucket has the hidden size squared elements, as transformers fills
    `reduce_bucket_size: auto` (integrations/deepspeed.py). `packed`: how many of the parameters are NF4's, two of which
    DeepSpeed sees as one element of one byte. `wider`: gradients made in half precision travel in fp32."""
    bucket = 2 * min(hidden * hidden, trained_params)  # two bytes an element
    if wider:  # a copy being sent, beside the bucket
        bucket += 4 * min(hidden * hidden, trained_params)
    if layout.shards_params:
        wide = min(2 * ZERO_BUCKET_PARAMS, params - packed)
        return bucket + 2 * wide + min(2 * ZERO_BUCKET_PARAMS - wide, packed // 2)
    return 2 * bucket
