"""Machines: what NVML shows, what CUDA_VISIBLE_DEVICES leaves, what a name or a file means, what make gpu-info says."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pynvml
import pytest

from sft_play.diagnose import machine_pages
from sft_play.errors import HardwareError
from sft_play.machine import gpu_catalog, host
from sft_play.machine.hardware import detect_hardware, parse_hardware
from sft_play.machine.software import installed_version, nccl_package, torch_build_version
from sft_play.text import GIB, MIB
from tests.conftest import ROOT
from tests.fake_nvml import H200, FakeGpu, FakeNvml


# --- found: NVML -----------------------------------------------------------------------------------------------------
@pytest.fixture
def nvml(monkeypatch):
    def install(*gpus):
        fake = FakeNvml(*gpus)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return install


def two(**facts):
    return [FakeGpu(f"GPU-{n}{n}{n}-aa", **facts) for n in range(2)]


@pytest.mark.parametrize(("gpus", "link", "fp16"), [
    (two(links=12), 300e9, 312e12),
    (two(links=0), 32e9, 312e12),  # NVLink is off: 16 lanes of generation 4
    (two(name="NVIDIA RTX A6000", total=49_140, capability=(8, 6), links=4), 32e9, 154.8e12),  # by a bridge
    (two(name="NVIDIA Q900", total=20_000, capability=(9, 9)), None, None),  # not in the catalogue
])  # fmt: skip
def test_gpus_are_read_from_nvml_with_the_rates_of_the_catalogue(nvml, gpus, link, fp16):
    fake = nvml(*gpus)
    found = detect_hardware({})
    assert [gpu.name for gpu in found.gpus] == [gpu.name for gpu in gpus]
    assert [gpu.total_bytes for gpu in found.gpus] == [gpu.total * MIB for gpu in gpus]
    assert found.gpus[0].total_bytes - found.gpus[0].free_bytes == 500 * MIB
    assert found.gpus[0].flops("float16") == (fp16 and pytest.approx(fp16, rel=1e-3))
    assert (found.link_bytes_per_s, found.nodes, found.ranks_per_node, found.named, fake.is_open) == (
        link, 1, 2, False, False,
    )  # fmt: skip


def test_a_gpu_that_fell_off_the_bus_hides_no_other(nvml):
    nvml(FakeGpu("GPU-0"), FakeGpu("GPU-1", is_lost=True), FakeGpu("GPU-2"))
    found = detect_hardware({})
    assert [gpu.index for gpu in found.gpus] == [0, 2]
    assert found.notes == ("GPU 1 does not answer its driver (GPU is lost)",)
    # one that answers nothing is told by the error that says it is lost
    fake = nvml(FakeGpu(name=None, total=0, capability=None))
    fake.refused, fake.refusal = "nvmlDeviceGetUUID", pynvml.NVMLError_GpuIsLost
    assert detect_hardware({}).notes == ("GPU 0 does not answer its driver (GPU is lost)",)


def test_a_gpu_that_shares_the_hosts_memory_has_that(nvml):
    nvml(FakeGpu("GPU-0", "NVIDIA GB10", 0, (12, 1)))
    found = detect_hardware({})
    assert 0 < found.gpus[0].free_bytes <= found.ram_bytes


INSTANCES = [("MIG-1", "3g.20gb", 19_968), ("MIG-2", "1c.3g.20gb", 4_864)]
SPLIT = FakeGpu("GPU-aaa", "NVIDIA A100-SXM4-40GB", 40_960, instances=INSTANCES)


@pytest.mark.parametrize(("variable", "uuid"), [
    *((variable, "MIG-1") for variable in (None, "0", "GPU-aaa", "1,0")),  # no whole GPU beside an instance
    *((variable, "MIG-2") for variable in ("MIG-2", "MIG-2,MIG-1")),
    ("1", "GPU-bbb"),
    *((variable, "") for variable in ("MIG-9", "MIG-")),
])  # fmt: skip
def test_cuda_sees_one_instance_of_a_split_gpu(nvml, variable, uuid):
    nvml(SPLIT, FakeGpu("GPU-bbb", "NVIDIA A100-SXM4-40GB", 40_960))
    found = detect_hardware({} if variable is None else {"CUDA_VISIBLE_DEVICES": variable})
    sizes = {"MIG-1": [19_968 * MIB], "MIG-2": [4_864 * MIB], "GPU-bbb": [40_960 * MIB], "": []}
    assert [gpu.total_bytes for gpu in found.gpus] == sizes[uuid]
    seen = any("sees one instance only, MIG-1" in note for note in found.notes)
    assert seen == (variable in (None, "0", "GPU-aaa", "1,0"))


def test_an_instance_has_its_own_memory_and_its_share_of_the_rates(nvml):
    """Of seven slices, and by memory; 1c.3g.20gb has one of three slices (MIG user guide, compute instances)."""
    nvml(SPLIT)
    for uuid, slices, total in (("MIG-1", 3, 19_968), ("MIG-2", 1, 4_864)):
        gpu = detect_hardware({"CUDA_VISIBLE_DEVICES": uuid}).gpus[0]
        assert (gpu.total_bytes, gpu.free_bytes) == (total * MIB, (total - 13) * MIB)
        assert gpu.flops("bfloat16") == pytest.approx(312e12 * slices / 7)
        assert gpu.bandwidth == pytest.approx(1555e9 * total / 40_960)
    nvml(FakeGpu("GPU-a", "NVIDIA H100 80GB HBM3", 81_559, (9, 0), instances=[]))
    found = detect_hardware({})
    assert (found.gpus, found.notes) == ((), ("GPU 0 is in MIG mode and has no instance: CUDA does not see it",))


@pytest.mark.parametrize(("variable", "indices"), [
    *((variable, [1, 0]) for variable in ("1,0", " 1 , 0 ", "GPU-111,GPU-000-aa")),
    *((variable, []) for variable in ("", "-1", "NoDevFiles", "GPU-")),  # the last fits both: it names none
    *((variable, [0]) for variable in ("0,-1,1", "0,0")),
    ("1,7,0", [1]),
])  # fmt: skip
def test_cuda_visible_devices_is_honoured(nvml, variable, indices):
    nvml(*two())
    assert [gpu.index for gpu in detect_hardware({"CUDA_VISIBLE_DEVICES": variable}).gpus] == indices


@pytest.mark.parametrize("pynvml", [None, FakeNvml()], ids=["no package", "no GPU"])
def test_a_machine_without_gpus_has_its_ram(monkeypatch, pynvml):
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    found = detect_hardware({})
    assert (found.device, found.ranks_per_node, found.cpu_cores >= 1) == ("cpu", 1, True)
    assert found.ram_bytes >= found.ram_free_bytes > 0


def test_gpus_that_differ_are_numbered_by_cuda_in_another_order(nvml):
    turing = FakeGpu("GPU-a", "Tesla T4", 15_360, (7, 5))
    nvml(turing, FakeGpu("GPU-b", "NVIDIA A100-SXM4-40GB", 40_960))
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in detect_hardware({"CUDA_VISIBLE_DEVICES": "1"}).notes[0]
    assert not detect_hardware({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).notes
    assert not detect_hardware({"CUDA_VISIBLE_DEVICES": "GPU-b"}).notes
    nvml(turing)
    (gpu,) = detect_hardware({}).gpus
    assert (gpu.has_bf16, gpu.flops("bfloat16"), gpu.flops("float16")) == (False, None, 65e12)


# The host.
def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(host, "_PROCESS_CGROUP", tmp_path / "own")
    return tmp_path


def test_ram_is_what_every_control_group_above_leaves(cgroup):
    write(cgroup / "own", "0::/slurm/job7/step0\n")
    group = cgroup / "cgroup" / "slurm" / "job7"
    write(group / "memory.max", str(3 * GIB))
    write(group / "memory.current", str(2 * GIB))
    write(group / "memory.stat", f"anon 1\ninactive_file {GIB}\n")
    write(group / "step0" / "memory.max", "max\n")
    total, free = host.total_and_free_ram()
    assert total == 3 * GIB
    assert free == min(2 * GIB, free)  # 3 GiB less 2 in use, of which 1 is file cache that can be dropped
    write(group / "memory.stat", "anon 1\n")
    assert host.total_and_free_ram()[1] <= GIB


def test_version_1_control_groups_are_read_and_a_limit_above_the_ram_is_none(cgroup):
    write(cgroup / "own", "12:cpu,memory:/docker/x\n3:pids:/\n")
    group = cgroup / "cgroup" / "memory" / "docker" / "x"
    write(group / "memory.limit_in_bytes", str(GIB))
    write(group / "memory.usage_in_bytes", "0")
    assert host.total_and_free_ram()[0] == GIB
    write(group / "memory.limit_in_bytes", str(2**62))
    assert GIB < host.total_and_free_ram()[0] < 2**62


# Named.
@pytest.mark.parametrize(("text", "count", "name"), [
    *((text, 2, "NVIDIA H200") for text in ("2xH200", " 2 x h200 ", "2*H200")),
    *((text, 8, "NVIDIA A100-80GB") for text in ("8xA100-80GB", "A100-80GB:8")),
    ("2x8xH100", 16, "NVIDIA H100"), ("H100x4", 4, "NVIDIA H100"), ("RTX 4090 x 2", 2, "NVIDIA RTX 4090"),
    ("4x4090", 4, "NVIDIA RTX 4090"), ("NVIDIA GeForce RTX 3090", 1, "NVIDIA RTX 3090"), ("8xMI300X", 8, "AMD MI300X"),
    ("NVIDIA A100-SXM4-40GB", 1, "NVIDIA A100-40GB"), ("H100-94GB", 1, "NVIDIA H100-NVL"),
    ("RTX 4060 Ti 16GB", 1, "NVIDIA RTX 4060 Ti 16GB"), ("MyGPU,mem=24GiB", 1, "MyGPU"),
])  # fmt: skip
def test_a_machine_can_be_named(text, count, name):
    found = parse_hardware(text)
    assert (len(found.gpus), found.gpus[0].name, found.named) == (count, name, True)
    assert [gpu.index for gpu in found.gpus] == list(range(count))


def test_options_override_the_catalogue_and_read_their_units():
    found = parse_hardware(
        "2xH100,mem=70GiB,bandwidth=3TB/s,bf16=900TFLOPS,fp16=0.9PFLOPS,fp8=1800TFLOPS,link=600GB/s,network=50GBs,"
        "ram=1TiB,cores=96,cc=9.1,tdp=500W,price=2.5"
    )
    gpu = found.gpus[1]
    assert (gpu.total_bytes, gpu.bandwidth, gpu.capability, gpu.tdp_watts) == (70 * GIB, 3e12, (9, 1), 500)
    assert [gpu.flops(dtype) for dtype in ("bfloat16", "float16", "float8")] == [900e12, 900e12, 1800e12]
    assert (found.link_bytes_per_s, found.network_bytes_per_s) == (300e9, 50e9)  # a data sheet's link is both ways
    assert any("300 GB/s each way" in note for note in found.notes)
    host = (found.ram_bytes, found.ram_free_bytes, found.cpu_cores, found.ram_given)
    assert (host, found.price_per_gpu_hour) == ((1024 * GIB, 1024 * GIB, 96, True), 2.5)
    host_only = parse_hardware("cpu,ram=64GiB,cores=16")
    assert (host_only.device, host_only.ram_bytes, host_only.cpu_cores, host_only.named) == ("cpu", 64 * GIB, 16, True)
    assert parse_hardware("CPU").ram_given is False
    cluster = parse_hardware("2x8xH200,network=400Gbps")  # nodes come before the GPUs of each
    assert (cluster.nodes, cluster.ranks_per_node, cluster.network_bytes_per_s) == (2, 8, 50e9)
    sizes = [(part.nodes, part.ranks_per_node) for part in map(cluster.limit_gpus, (1, 8, 9))]
    assert sizes == [(1, 1), (1, 8), (2, 5)]


@pytest.mark.parametrize("size", ["24gib", "24576MiB", "25769803776B", "0.0234375TiB"])
def test_an_unknown_gpu_can_be_given_with_its_memory_and_one_rate_for_both_16_bit_formats(size):
    gpus = parse_hardware(f"2xMyGPU,mem={size}").gpus
    assert [gpu.total_bytes for gpu in gpus] == [24 * GIB] * 2
    assert (gpus[0].flops("bfloat16"), gpus[0].has_bf16) == (None, True)  # unknown counts as yes
    gpu = parse_hardware(f"2xMyGPU,mem={size},bandwidth=1000GBs,bf16=165TFLOPS").gpus[0]
    rates = [gpu.flops(dtype) for dtype in ("bfloat16", "float16", "float8")]
    assert (gpu.bandwidth, rates) == (1e12, [165e12, 165e12, None])


@pytest.mark.parametrize(("text", "note"), [
    ("A100", "A100 is read as A100-80GB with 79.1 GiB; the catalogue also has A100-40GB"),
    ("2xH100", "H100 is read as H100 SXM with 79.2 GiB; the catalogue also has H100-PCIe, H100-NVL"),
    ("3060", "3060 is read as RTX 3060 with 11.6 GiB; the catalogue also has RTX 3060 8GB"),
    ("RTX 6000", "RTX 6000 is read as RTX 6000 Ada with 47.4 GiB; the catalogue also has RTX PRO 6000, Quadro"),
])  # fmt: skip
def test_a_name_of_several_gpus_is_read_aloud(text, note):
    assert parse_hardware(text).notes[0].startswith(note)
    assert parse_hardware("2xA100-40GB").notes == ()  # a plain name needs no note


@pytest.mark.parametrize(("text", "message"), [
    *(
        (text, "is not COUNTxGPU")
        for text in ("", "2x", "-1xH200", "2.5xH200", "2x2x2xH100", "２xH200", "2xH200 💥", "a" * 300)
    ),
    ("0xH200", "names 0 GPUs"), ("200000xH100", "names 200000 GPUs; name 1 to 100000"),
    ("3xH300", r"H300 is not in the catalogue; nearest: .*H200.*HARDWARE=1xH300,mem=24GiB"),
    ("RTX4095", "nearest: RTX 4090"), ("8GB", "8GB is not in the catalogue.*HARDWARE=1xMyGPU,mem=24GiB"),
    ("M3 Max", "not in the catalogue.*no run uses other accelerators"),
    ("H200-80GB", "not in the catalogue; nearest: H200"),
    *((f"2xMyGPU,mem={size}", "mem takes a size with its unit") for size in ("lots", "0GiB", "9999999TiB")),
    ("2xH200,mem=24GiB,mem=48GiB", "gives mem= twice"),
    ("2xH200,memory=24GiB", "'memory' is not an option of a machine; did you mean mem"),
    ("2xH200,zzz=1", "'zzz' is not an option of a machine; there are mem, bandwidth"),
    ("2xH200,24GiB", "'24GiB' is not NAME=VALUE with mem, bandwidth"),
    ("H200,bandwidth=4800", "bandwidth takes a rate with its unit"), ("H200,tdp=0W", "tdp takes watts"),
    ("H200,bf16=165", "bf16 takes a dense rate with its unit"), ("H200,cores=0", "cores takes a whole number"),
    ("H200,cc=nine", "cc takes a CUDA compute capability, such as 8.9"), ("2xcpu", "takes no count"),
    ("H200,price=$2", "price takes a number without currency"),
    ("cpu,mem=24GiB", "a machine without GPUs takes ram and cores, not mem"),
])  # fmt: skip
def test_a_machine_that_cannot_be_meant_is_refused(text, message):
    with pytest.raises(HardwareError, match=message) as refused:
        parse_hardware(text)
    assert "\n" not in str(refused.value)


# The catalogue.
def test_every_gpu_of_the_catalogue_has_a_source_and_plausible_figures():
    assert len(gpu_catalog.CATALOG_ENTRIES) > 90
    assert len(gpu_catalog.CATALOG_BY_KEY) == len(gpu_catalog.CATALOG_ENTRIES)
    for entry in gpu_catalog.CATALOG_ENTRIES:
        assert len(entry.source) > 20, entry.name
        assert 0.95 * entry.driver_bytes - 512 * MIB < entry.memory_bytes < entry.driver_bytes, entry.name
        assert entry.driver_bytes <= 1.01 * entry.box_gb * GIB, entry.name
        assert 100e9 <= entry.bandwidth <= 8e12, entry.name
        assert entry.memory_kind in ("torch", "nvidia-smi less reserve", "box less reserve")
        assert 8e9 <= entry.pcie <= 128e9
        assert entry.nvlink is None or entry.nvlink > entry.pcie, entry.name
        # matrix units compute in bf16 from Ampere on
        assert entry.bf16 == (entry.fp16 if entry.capability >= (8, 0) else None), entry.name
        if entry.fp8:
            assert entry.fp8 >= 1.99 * entry.bf16, entry.name
            assert entry.capability >= (8, 9)
        assert entry.fp16 is None or entry.fp16 > entry.fp32, entry.name


@pytest.mark.parametrize(("name", "bf16", "fp8"), [
    ("H100", 989.4, 1978.9), ("H200", 989.4, 1978.9), ("A100-80GB", 312, None), ("RTX 4090", 165.2, 330.3),
    ("L40S", 362.05, 733), ("L4", 121, 242), ("B200", 2250, 4500), ("RTX 5090", 209.5, 419.0),
    ("MI300X", 1307.4, 2614.9),
])  # fmt: skip
def test_rates_are_dense_with_32_bit_accumulation(name, bf16, fp8):
    entry = gpu_catalog.CATALOG_BY_KEY[gpu_catalog.catalog_key(name)]
    assert entry.bf16 == pytest.approx(bf16 * 1e12, rel=2e-3)
    assert (entry.fp8 is None) if fp8 is None else entry.fp8 == pytest.approx(fp8 * 1e12, rel=2e-3)


def test_memory_is_what_torch_reports():
    """Totals of out-of-memory messages: H200 139.80, H100 79.18, B200 178.35, MI300X 191.69 GiB."""
    for name, gib in (("H200", 139.80), ("H100", 79.18), ("B200", 178.35), ("MI300X", 191.69)):
        entry = gpu_catalog.CATALOG_BY_KEY[gpu_catalog.catalog_key(name)]
        assert entry.memory_bytes / GIB == pytest.approx(gib, abs=0.006)
    assert parse_hardware("2xH200").gpus[0].total_bytes == gpu_catalog.CATALOG_BY_KEY["h200"].memory_bytes
    # of nvidia-smi's and torch's totals in MiB, of cards that are not the rule's only source
    for total, torch in ((8188, 7806), (16303, 15840), (23034, 22563), (49140, 48539)):
        assert abs(total * MIB - gpu_catalog.driver_reserve_bytes(total * MIB) - torch * MIB) < 40 * MIB


@pytest.mark.parametrize(("name", "total", "found"), [
    ("NVIDIA H100 80GB HBM3", 81_559, "H100"), ("NVIDIA H100 PCIe", 81_559, "H100-PCIe"),
    ("NVIDIA A100-SXM4-40GB", 40_960, "A100-40GB"), ("NVIDIA GeForce RTX 4060 Ti", 16_380, "RTX 4060 Ti 16GB"),
    ("NVIDIA GeForce RTX 4060 Ti", 8_188, "RTX 4060 Ti 8GB"), ("Quadro RTX 6000", 23_040, "Quadro RTX 6000"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97_887, "RTX PRO 6000"), ("NVIDIA GH200 480GB", 97_871, "GH200"),
    ("Tesla V100-SXM2-32GB", 32_510, "V100-32GB"), ("NVIDIA GeForce RTX 4060 Laptop GPU", 8_188, "RTX 4060 Laptop"),
    ("NVIDIA GeForce RTX 2070 SUPER with Max-Q Design", 8_192, "RTX 2070 SUPER Max-Q"),
    ("NVIDIA GeForce GTX 1650 with Max-Q Design", 4_096, None), ("NVIDIA Graphics Device", 8_188, None),
    ("NVIDIA RTX PRO 5000 72GB Blackwell", 73_000, "RTX PRO 5000 72GB"),
])  # fmt: skip
def test_names_of_the_driver_are_found(name, total, found):
    assert [entry.name for entry in gpu_catalog.find_catalog_entries(name, total * MIB)] == ([found] if found else [])


def test_a_name_is_found_however_it_is_spelled_and_an_alias_means_its_own_gpu_or_a_variant():
    chance = random.Random(8)
    for entry in gpu_catalog.CATALOG_ENTRIES:
        for _ in range(20):
            words = entry.name.replace("Laptop", chance.choice(["Laptop GPU", "mobile", "notebook", "laptop"])).split()
            words = words[1:] if words[0] == "RTX" and words[1].isdigit() and chance.random() < 0.5 else words
            cased = chance.choice([str.upper, str.lower, str.title])(chance.choice([" ", "-", "_", ""]).join(words))
            named = chance.choice(["", "NVIDIA ", "nvidia-"]) + cased
            assert gpu_catalog.find_catalog_entries(named)[0] is entry, named
    for entry in gpu_catalog.CATALOG_ENTRIES:
        assert all(entry in gpu_catalog.find_catalog_entries(alias) for alias in entry.aliases)
        assert parse_hardware(f"1x{entry.name}").gpus[0].total_bytes == entry.memory_bytes
    laptops = {entry for entry in gpu_catalog.CATALOG_ENTRIES if "Laptop" in entry.name or "Max-Q" in entry.name}
    assert len(laptops) > 25
    for entry in set(gpu_catalog.CATALOG_ENTRIES) - laptops:
        for word in ("Laptop GPU", "mobile", "with Max-Q Design"):
            assert set(gpu_catalog.find_catalog_entries(f"{entry.name} {word}")) <= laptops


def test_suggested_gpus_grow_and_nearest_names_are_of_the_catalogue():
    sizes = [entry.memory_bytes for entry in gpu_catalog.suggested_gpus()]
    assert sizes == sorted(set(sizes))
    assert all(entry.bf16 for entry in gpu_catalog.suggested_gpus())
    for text in ("H300", "banana", "", "A1000", "RTX 9090"):
        assert set(gpu_catalog.nearest_gpu_names(text)) <= {entry.name for entry in gpu_catalog.CATALOG_ENTRIES}


# The page.
PAGE = ROOT / "docs" / "gpus.md"


def table() -> str:
    """The catalogue as a table of Markdown, and its sources by number."""
    head = ["GPU", "usable GiB", "GB/s", "bf16", "fp16", "fp8", "link GB/s", "cc", "W", "sources"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 2) + "---|"]
    numbers: dict[str, int] = {}
    for entry in gpu_catalog.CATALOG_ENTRIES:
        rates = ["–" if rate is None else f"{rate / 1e12:.4g}" for rate in (entry.bf16, entry.fp16, entry.fp8)]
        memory = f"{entry.memory_bytes / GIB:.2f}" + ("" if entry.memory_kind == "torch" else "*")
        kind = "" if entry.nvlink is None else {"NVIDIA": " NVLink"}.get(entry.vendor, " IF")
        link = f"{entry.link / 1e9:g}{kind}"
        capability = f"{entry.capability[0]}.{entry.capability[1]}" if entry.vendor == "NVIDIA" else "–"
        cells = [f"{entry.vendor} {entry.name}", memory, f"{entry.bandwidth / 1e9:g}", *rates, link, capability]
        cited = [str(numbers.setdefault(source, len(numbers) + 1)) for source in entry.source.split("; ")]
        lines.append("| " + " | ".join([*cells, str(entry.tdp_watts or "–"), ", ".join(cited)]) + " |")
    return "\n".join([*lines, "", *(f"{number}. {source}" for source, number in numbers.items())])


def test_the_page_shows_the_catalogue():
    """UPDATE_DOCS=1 writes the table anew."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition("<!-- table -->\n")
    shown, _, after = rest.partition("\n<!-- end of table -->")
    if os.environ.get("UPDATE_DOCS") == "1":
        PAGE.write_text(f"{before}<!-- table -->\n{table()}\n<!-- end of table -->{after}", encoding="utf-8")
        return
    assert shown == table(), "the catalogue changed: UPDATE_DOCS=1 pytest tests/test_hardware.py -k page"


# make gpu-info
HEAVY = {"torch", "transformers", "trl", "peft", "accelerate", "datasets", "deepspeed", "bitsandbytes", "numpy"}


def h200(number: int = 0, **facts: Any) -> FakeGpu:
    return FakeGpu(f"GPU-{number}", **{"name": H200, "total": 143_771, "used": 614, "reserved": 479,
                                       "capability": (9, 0), "links": 18, **facts})  # fmt: skip


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine without NVML or any sign of a GPU: the folder of its programs."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setattr(machine_pages, "find_unusable_accelerator", lambda environment: None)
    return folder


def look(environment: dict[str, str] | None = None, **options: Any) -> tuple[dict[str, Any], str]:
    data, lines = machine_pages.read_machine_info(Path("outputs"), environment or {}, **options)
    return json.loads(json.dumps(data)), "\n".join(lines)


def test_two_gpus_are_counted_on_a_line_of_its_own_and_told_in_detail(nvml):
    fake = nvml(h200(processes=[(os.getpid(), 512 * MIB), (2**22 + 7, None)]), h200(1))
    data, text = look()
    first = data["gpus"][0]
    sizes = {"total": 143_771, "used": 614, "reserved": 479, "free": 143_771 - 614 - 479}
    assert {kind: first[f"{kind}_bytes"] for kind in sizes} == {kind: size * MIB for kind, size in sizes.items()}
    assert (first["compute_capability"], first["bf16"], first["fp8"]) == ("9.0", True, True)
    assert (first["power_cap_watts"], first["temperature_celsius"]) == (700.0, 31)
    assert first["pcie"] == {"generation": 1, "max_generation": 5, "lanes": 16, "max_lanes": 16}
    assert [item["used_bytes"] for item in first["processes"]] == [512 * MIB, None]
    lines = text.splitlines()
    assert {"Number of GPUs: 2", "Driver: 580.82.07, which runs CUDA up to 13.1"} < set(lines)
    row = next(line for line in lines if line.startswith("  0 "))
    assert " ".join(row.split()[1:]) == "NVIDIA H200 140.4 0.6 139.3 9.0 yes yes 700 31 1x16/5x16 no"
    assert any(f"process {os.getpid()} " in line and "0.50" in line for line in lines)
    assert f"GPU 0 process {2**22 + 7} (n/a): n/a GiB" in lines  # of another container: not known here
    assert not fake.is_open


def test_eight_gpus_fit_100_columns(nvml):
    nvml(*(h200(n, name="NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition") for n in range(8)))
    _, text = look()
    assert "Number of GPUs: 8" in text
    assert max(map(len, text.splitlines())) <= 100


def test_topology_tells_nvlink_switches_and_bridges(nvml):
    nvml(h200(), h200(1))
    assert look()[0]["topology"]["links"] == [["X", "NV18"], ["NV18", "X"]]
    nvml(h200(links=4, bridged=1), h200(1, links=4, bridged=0), h200(2, links=0))
    topology = look()[0]["topology"]
    assert topology["links"] == [["X", "NV4", "SYS"], ["NV4", "X", "SYS"], ["SYS", "SYS", "X"]]
    assert topology["peer"][2] == [False, False, None]


def test_what_a_driver_does_not_give_is_not_available_and_nothing_breaks(nvml):
    nvml(FakeGpu("GPU-0", "Tesla K80", 0, (3, 7), None, limit=None, temperature=None, pcie=None, processes=None))
    data, text = look()
    gpu = data["gpus"][0]
    facts = ("power_cap_watts", "temperature_celsius", "mig_enabled", "processes")
    assert [gpu[fact] for fact in facts] == [None] * 4
    assert gpu["unified"]  # memory is not supported, and the GPU answers: it has the host's
    assert "n/axn/a/n/axn/a" in text


def test_a_gpu_that_is_lost_is_said_and_the_others_are_shown(nvml, bare):
    nvml(h200(), h200(1, is_lost=True))
    lines = look()[1].splitlines()
    assert {"Number of GPUs: 1", "GPU 1 does not answer its driver (GPU is lost)"} <= set(lines)


def test_cuda_visible_devices_is_respected_and_said(nvml):
    nvml(*map(h200, range(4)))
    data, text = look({"CUDA_VISIBLE_DEVICES": "2,0"})
    assert (data["number_of_gpus"], data["visible_gpus"]) == (2, [2, 0])
    assert "CUDA_VISIBLE_DEVICES=2,0: GPU 2 is cuda:0, GPU 0 is cuda:1" in text
    data, text = look({"CUDA_VISIBLE_DEVICES": ""})
    assert (data["number_of_gpus"], "no GPU is visible" in text) == (0, True)
    nvml(h200(name="NVIDIA \x1b[31m[bold]X"))
    text = look({"CUDA_VISIBLE_DEVICES": "0"})[1] + look({"CUDA_VISIBLE_DEVICES": "0\x1b]0;x"})[1]
    assert ("\x1b" in text, r"\x1b[31m[bold]X" in text) == (False, True)


def test_instances_of_a_split_gpu_are_listed(nvml):
    nvml(FakeGpu("GPU-a", instances=[("MIG-0", "3g.20gb", 19_968), ("MIG-1", "3g.20gb", 19_968)]))
    data, text = look()
    assert data["number_of_gpus"] == 1  # CUDA sees one instance
    assert data["gpus"][0]["instances"][1]["free_bytes"] == (19_968 - 13) * MIB
    assert all(said in text for said in ("GPU 0 instance 3g.20gb: MIG-1", "sees one instance only, MIG-0"))


def test_a_machine_without_a_gpu_has_none(bare, monkeypatch, tmp_path):
    assert look()[0]["number_of_gpus"] == 0
    told = "A GPU is there, but it is not seen"
    monkeypatch.setattr(machine_pages, "find_unusable_accelerator", lambda environment: told)
    data, text = look()
    assert data["unused_accelerator"] in text
    for folder in (tmp_path, tmp_path / "no" / "outputs"):  # the disk is that of the outputs
        data, lines = machine_pages.read_machine_info(folder, {})
        assert data["host"]["disk_bytes"] >= data["host"]["disk_free_bytes"] > 0
        assert data["host"]["disk_folder"] == str(tmp_path)
        assert any(line.endswith(f"GiB free at {tmp_path}") for line in lines)


def test_versions_are_read_without_importing(monkeypatch):
    assert installed_version("pydantic")
    assert installed_version("no-such-distribution") is None
    assert torch_build_version("cuda") is None or torch_build_version("hip") is None
    asked = {"nvidia-nccl-cu12": "2.27.5"}
    monkeypatch.setattr("sft_play.machine.software.installed_version", asked.get)
    assert nccl_package() == ("nvidia-nccl-cu12", "2.27.5")
    code = (
        "import os, sys; from pathlib import Path; from sft_play.diagnose import machine_pages; "
        "machine_pages.read_machine_info(Path('outputs'), os.environ); "
        "machine_pages.format_memory_snapshot(machine_pages.read_memory_snapshot(Path('outputs'), os.environ)); "
        f"sys.exit(str(sorted(set(sys.modules) & {HEAVY!r})) if set(sys.modules) & {HEAVY!r} else 0)"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr


def test_torch_is_asked_only_where_full_is_wanted(bare, monkeypatch):
    monkeypatch.setattr(machine_pages, "read_torch_report", lambda environment: ["PyTorch version: 2"])
    data, text = look(includes_torch=True)
    assert (look()[0]["torch"], data["torch"]) == (None, ["PyTorch version: 2"])
    assert "torch, asked:\n  PyTorch version: 2" in text


@pytest.mark.build
def test_torch_answers_from_a_process_of_its_own(tmp_path):
    told = machine_pages.read_torch_report(dict(os.environ))
    assert f"PyTorch version: {installed_version('torch')}" in told
    assert not any("Vulnerability" in line for line in told)
    assert "timed out after 0.01" in machine_pages.read_torch_report(dict(os.environ), timeout_s=0.01)[0]
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open')")
    told = machine_pages.read_torch_report(dict(os.environ, PYTHONPATH=str(tmp_path)))
    assert told == ["it ended with exit status 1: ImportError: libcudart.so.13: cannot open"]


def test_a_named_machine_shows_what_a_plan_would_assume_and_says_so():
    machine = parse_hardware("2xH200,ram=1TiB,cores=64")
    answer, text = machine_pages.assumed_machine_info(machine, "2xH200")
    assert text[0].startswith("Assumed, not detected: HARDWARE=2xH200")
    assert text[1] == "Number of GPUs: 2"
    assert {"  memory bandwidth: 4,800 GB/s", "Between GPUs, each way: 450 GB/s", "  bf16: 989.4 TFLOPS"} < set(text)
    assert {"RAM of a node: 1,024 GiB", "Each GPU: NVIDIA H200", "  compute capability: 9.0"} < set(text)
    assert max(map(len, text)) <= 100
    assert (answer["assumed"], answer["number_of_gpus"], answer["ram_bytes"]) == (True, 2, 2**40)
    assert (answer["gpus"][1]["bandwidth"], answer["gpus"][0]["total_bytes"]) == (4800e9, machine.gpus[0].total_bytes)
    cluster = parse_hardware("2x8xMyGPU,mem=24GiB,network=400Gbps,price=2.5")
    _, text = machine_pages.assumed_machine_info(cluster, "a cluster")
    assert {"Number of GPUs: 16", "Nodes: 2", "Between nodes, each way: 50 GB/s of a node"} < set(text)
    assert {"Price of a GPU-hour: 2.5", "RAM of a node: not given (ram=512GiB names it)"} < set(text)
    assert not any("bandwidth" in line or "_" in line for line in text)
    assert machine_pages.assumed_machine_info(parse_hardware("cpu"), "cpu")[1][1] == "Number of GPUs: 0"


def test_the_command_prints_one_object_and_writes_it(nvml, command, succeed, monkeypatch, tmp_path):
    nvml(h200(), h200(1))
    assert "Number of GPUs: 2" in succeed("gpu-info").splitlines()
    out = tmp_path / "gpus.json"
    monkeypatch.setenv("OUT", str(out))
    monkeypatch.setenv("JSON", "1")
    assert json.loads(succeed("gpu-info"))["gpus"][1]["total_bytes"] == 143_771 * MIB
    assert json.loads(out.read_text())["number_of_gpus"] == 2
    monkeypatch.setenv("HARDWARE", "8xH100")
    found = json.loads(succeed("gpu-info"))
    assert (found["assumed"], found["number_of_gpus"]) == (True, 8)
    code, printed = command("gpu-info", "--hardware", "2xH2000")
    assert (code, "H2000 is not in the catalogue" in printed) == (2, True)
