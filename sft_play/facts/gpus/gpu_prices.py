"""What clouds ask for an hour of a GPU, on demand, in US dollars: public price lists, each with its date and address.

Prices change by the week, and none of these is an offer: the date stands beside every answer that rests on one. Only
GPUs of the catalogue are here, and none that can be taken away (spot, community hosts).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date


@dataclass(frozen=True)
class PriceList:
    """A provider's page, the day on which its prices were read, and where that reading is kept."""

    provider: str
    read: date
    address: str
    kept_at: str = ""


@dataclass(frozen=True)
class Price:
    """US dollars for an hour of one GPU of a machine that has `counts` of them; `gpu` is the catalogue's name."""

    of: PriceList
    gpu: str
    usd: float
    counts: tuple[int, ...] = (1, 2, 4, 8)


_RUNPOD = PriceList(
    "RunPod Secure Cloud", date(2026, 11, 9), "https://www.runpod.io/pricing",
    "github.com/datareceipts/data-receipts 109-gpu-pricing/vendors.json",
)  # fmt: skip
_AWS = PriceList(
    "AWS us-east-1", date(2026, 11, 9), "https://aws.amazon.com/ec2/pricing/on-demand/",
    "github.com/datareceipts/data-receipts 109-gpu-pricing/hyperscalers.json",
)  # fmt: skip
_AZURE = PriceList(
    "Azure eastus", date(2026, 11, 9), "https://azure.microsoft.com/pricing/details/virtual-machines/linux/",
    "github.com/datareceipts/data-receipts 109-gpu-pricing/hyperscalers.json",
)  # fmt: skip
_LAMBDA = PriceList(
    "Lambda", date(2026, 9, 20), "https://lambda.ai/instances",
    "github.com/api-evangelist/lambda-labs@1929382e7f plans/lambda-labs-plans-pricing.yml",
)  # fmt: skip
_HYPERSTACK = PriceList(
    "Hyperstack", date(2026, 8, 26), "https://www.hyperstack.cloud/gpu-pricing",
    "github.com/api-evangelist/nexgen-cloud@0fa0509ef7 plans/nexgen-cloud-plans-pricing.yml",
)  # fmt: skip
_MODAL = PriceList(
    "Modal", date(2026, 5, 7), "https://modal.com/pricing",
    "techbytes.app/posts/serverless-gpu-pricing-matrix-modal-replicate-lambda-2026",
)  # fmt: skip

PRICES: tuple[Price, ...] = (
    Price(_RUNPOD, "H100", 3.99),
    Price(_RUNPOD, "H100-PCIe", 2.89),
    Price(_RUNPOD, "H100-NVL", 3.19),
    Price(_RUNPOD, "A100-80GB", 1.79),
    Price(_RUNPOD, "A100-80GB-PCIe", 1.79),
    Price(_AWS, "H100", 6.88, (8,)),
    Price(_AWS, "A100-80GB", 3.4309, (8,)),
    Price(_AWS, "A100-40GB", 2.7447, (8,)),
    Price(_AZURE, "A100-80GB-PCIe", 3.673, (1,)),
    Price(_AZURE, "H100-NVL", 6.98, (1,)),
    Price(_LAMBDA, "B200", 6.99, (1,)),
    Price(_LAMBDA, "B200", 6.89, (2,)),
    Price(_LAMBDA, "B200", 6.79, (4,)),
    Price(_LAMBDA, "B200", 6.69, (8,)),
    Price(_LAMBDA, "H100", 4.29, (1,)),
    Price(_LAMBDA, "H100", 4.19, (2,)),
    Price(_LAMBDA, "H100", 4.09, (4,)),
    Price(_LAMBDA, "H100", 3.99, (8,)),
    Price(_LAMBDA, "H100-PCIe", 3.29, (1,)),
    Price(_LAMBDA, "GH200", 2.29, (1,)),
    Price(_LAMBDA, "A100-80GB", 2.79, (8,)),
    Price(_LAMBDA, "A100-40GB", 1.99, (8,)),
    Price(_LAMBDA, "V100-16GB", 0.79, (8,)),
    Price(_LAMBDA, "RTX A6000", 1.09, (4,)),
    Price(_LAMBDA, "A10", 1.29, (1,)),
    Price(_LAMBDA, "Quadro RTX 6000", 0.69, (1,)),
    Price(_HYPERSTACK, "H200", 3.99, (8,)),
    Price(_HYPERSTACK, "H100", 3.20, (8,)),
    Price(_HYPERSTACK, "H100-PCIe", 2.50),
    Price(_HYPERSTACK, "A100-80GB", 1.60, (8,)),
    Price(_HYPERSTACK, "A100-80GB-PCIe", 1.35),
    Price(_HYPERSTACK, "RTX PRO 6000", 1.85),
    Price(_HYPERSTACK, "L40", 1.00),
    Price(_HYPERSTACK, "RTX A6000", 0.50),
    Price(_HYPERSTACK, "RTX A4000", 0.15),
    Price(_MODAL, "L40S", 1.9512),
    Price(_MODAL, "L4", 0.7992),
    Price(_MODAL, "T4", 0.5904),
)  # fmt: skip
"""Hyperstack sells the SXM boards whole; Lambda's price depends on how many GPUs the machine has."""


def cheapest(prices: tuple[Price, ...] = PRICES) -> Iterator[tuple[Price, int]]:
    """The lowest price of every GPU and number of them, in the order of the list."""
    found: dict[tuple[str, int], Price] = {}
    for price in prices:
        for count in price.counts:
            kept = found.get((price.gpu, count))
            if kept is None or price.usd < kept.usd:
                found[price.gpu, count] = price
    for (_, count), price in found.items():
        yield price, count
