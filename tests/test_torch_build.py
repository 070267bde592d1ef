"""Which build of torch a machine gets, and what the build takes. Drivers and GPUs are told, none is needed."""

import re
from pathlib import Path

import pytest

import lock
import torch_build
from torch_build import BUILDS, BuildError, Machine

ROOT = Path(__file__).resolve().parent.parent
L4 = ("NVIDIA L4", (8, 9))
V100 = ("Tesla V100-SXM2-16GB", (7, 0))
RTX5090 = ("NVIDIA GeForce RTX 5090", (12, 0))
K80 = ("Tesla K80", (3, 7))
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_12_INDEX = "https://download.pytorch.org/whl/cu126"


def linux(driver="", *gpus, arch="x86_64"):
    return Machine("linux", arch, driver, gpus)


def chosen(machine, asked="", configured=""):
    choice = torch_build.choose(machine, asked, configured)
    return choice.name, choice.source


@pytest.mark.parametrize(
    ("machine", "name", "source"),
    [
        (linux("580.65.06", L4), "cu130", None),  # what the public index has
        (linux("579.99", L4), "cu126", CUDA_12_INDEX),
        (linux("535.54"), "cu126", CUDA_12_INDEX),  # the kernel tells of no GPUs
        (linux("580.65.06", V100), "cu126", CUDA_12_INDEX),  # no kernels for 7.0 in CUDA 13's
        (linux("580.65.06", L4, V100), "cu126", CUDA_12_INDEX),
        (linux("580.65.06", ("NVIDIA GH200 480GB", (9, 0)), arch="aarch64"), "cu130", torch_build.WHEELS + "cu130"),
        (linux(), "cpu", CPU_INDEX),
        (linux(arch="aarch64"), "cpu", None),
        (Machine("darwin", "arm64"), "index", None),
        (linux(arch="ppc64le"), "index", None),
    ],
)
def test_the_driver_and_the_gpus_decide_the_build(machine, name, source):
    assert chosen(machine) == (name, source)


@pytest.mark.parametrize(
    ("machine", "parts", "update"),
    [
        (linux("525.60.11", L4), ["needs driver 580 or newer", "needs driver 525.60.13 or newer"], "580"),
        (linux("470.57.02"), ["driver 470.57.02 here", "needs driver 525.60.13"], "580"),
        (linux("570.86.15", RTX5090), ["CUDA 12.6 (cu126): has no kernels for NVIDIA GeForce RTX 5090"], "580"),
        (linux("470.57.02", V100), ["CUDA 13.0 (cu130): needs driver 580 or newer; has no kernels"], "525"),
        (linux("470.57.02", K80, K80), ["has no kernels for Tesla K80 (capability 3.7)"], None),
        (linux("580.65.06", V100, RTX5090), ["no kernels for Tesla V100", "no kernels for NVIDIA GeForce"], None),
    ],
)  # fmt: skip
def test_where_no_build_runs_the_message_says_why_and_what_to_update(machine, parts, update):
    with pytest.raises(BuildError) as caught:
        torch_build.choose(machine)
    text = str(caught.value)
    assert all(part in text for part in parts), text
    assert "TORCH=cpu" in text
    assert re.findall(r"update NVIDIA's driver to (\d+) or newer", text) == ([update] if update else [])


def test_a_configured_index_is_used_and_no_other():
    for machine in (linux(), linux("580.65.06", L4), linux("470.57.02", K80)):
        for asked in ("", "auto"):
            assert chosen(machine, asked, "pip's settings name an index (global.index-url)") == ("index", None)


@pytest.mark.parametrize(
    ("asked", "configured", "source"),
    [
        ("cu126", "", CUDA_12_INDEX),
        ("cu130", "", None),
        ("cu130", "a mirror", torch_build.WHEELS + "cu130"),
        ("cpu", "a mirror", CPU_INDEX),
        ("rocm7.1", "", torch_build.WHEELS + "rocm7.1"),
        ("index", "", None),
    ],
)
def test_the_build_that_is_asked_for_is_taken_whatever_the_machine(asked, configured, source):
    for machine in (linux(), linux("470.57.02", K80)):
        assert chosen(machine, asked, configured) == (asked, source)


def test_torch_takes_the_name_of_a_build_and_nothing_else():
    for asked in ("", "auto", "index", *BUILDS, "cu132", "rocm7.14"):
        assert torch_build.asked_build({"TORCH": asked}) == asked
    assert torch_build.asked_build({}) == ""
    with pytest.raises(BuildError, match=r"TORCH=2\.13\.0 .*which is a version[^$]*make -C \w+ lock TORCH="):
        torch_build.asked_build({"TORCH": "2.13.0"})
    for asked in ("cuda", "cu13", "cu1300", "CPU", "rocm", "cpu/../x", "http://x", " cpu"):
        with pytest.raises(BuildError, match="which is not a build of torch"):
            torch_build.asked_build({"TORCH": asked})


def test_nvidia_smis_lines_are_read():
    text = "580.65.06, 8.9, NVIDIA L4\n580.65.06, 12.0, NVIDIA RTX PRO 6000 Blackwell, Server\n"
    assert torch_build.read_smi(text) == ("580.65.06", (L4, ("NVIDIA RTX PRO 6000 Blackwell, Server", (12, 0))))
    for text in ("", "No devices were found\n", "NVIDIA-SMI has failed because it couldn't communicate\n"):
        assert torch_build.read_smi(text) == ("", ())


def test_the_kernel_modules_version_is_read():
    closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023\nGCC …"
    free = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (x@y)\n"
    assert [torch_build.read_kernel(text) for text in (closed, free, "")] == ["535.54.03", "570.86.15", ""]


def test_a_machine_with_nvidia_smi_is_asked_through_it(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\n[ "$2" = --format=csv,noheader ] && echo "550.54.15, 8.9, NVIDIA L4"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert torch_build.this_machine()[2:4] == ("550.54.15", (L4,))


def test_sizes_are_said_in_gib_and_unknown_ones_as_such():
    mib = 2**20
    cpu = BUILDS["cpu"]
    for name, build in BUILDS.items():
        download, disk, text = torch_build.sizes(torch_build.Choice(name, None, ""))
        if build.disk is None:
            assert "not measured" in text
            assert (download, disk) == (cpu.download * mib, cpu.disk * mib)
        else:
            assert (download, disk) == (build.download * mib, build.disk * mib)
            assert f"{build.download / 1024:.1f} GiB to download, {build.disk / 1024:.1f} GiB on the disk" in text
    assert "not measured" in torch_build.sizes(torch_build.Choice("cu132", "x", ""))[2]
    download, disk, text = torch_build.sizes(torch_build.Choice("index", None, ""))
    assert (download, disk) == (cpu.download * mib, cpu.disk * mib)  # the least that it can be
    assert f"{BUILDS['cu130'].disk / 1024:.1f} GiB if it is for CUDA" in text


def test_the_tables_are_about_the_torch_that_is_pinned():
    """Where `lock TORCH=` moves it: renew the builds, their drivers and GPUs, and the sizes, then VERSION."""
    for name in ("requirements.lock", "requirements-unsloth.lock"):
        assert lock.read_pins((ROOT / name).read_text())["torch"] == torch_build.VERSION
