# syntax=docker/dockerfile:1
# sft_play with its pinned environment for NVIDIA's driver 580 or newer:
#
#     docker build -t sft-play .
#     docker run --rm --gpus all --ipc=host -v "$PWD:/workspace" -v sft-play-cache:/root/.cache sft-play \
#         sft-play train --config my.yaml
#
# For drivers from 525.60.13 (docs/setup.md): --build-arg CUDA=12.6.3 --build-arg TORCH=cu126. Without a GPU:
# --build-arg TORCH=cpu. A build for CUDA brings Liger's kernels; what is compiled is kept in the cache's volume.
ARG CUDA=13.0.1
FROM nvidia/cuda:${CUDA}-runtime-ubuntu24.04

# A compiler and Python's headers: Triton builds the loss with them at the first step. git: a run records its commit.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates g++ gcc git make ninja-build python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/sft_play
COPY . .
ARG TORCH=cu130
RUN PIP_NO_CACHE_DIR=1 make setup TORCH=${TORCH}

ENV PATH=/opt/sft_play/.venv/bin:${PATH} TRITON_CACHE_DIR=/root/.cache/triton
WORKDIR /workspace
CMD ["sft-play", "--help"]
