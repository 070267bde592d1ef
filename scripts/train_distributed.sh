#!/bin/sh
# `make train-distributed` for people without make: the same variables (CONFIG, STRATEGY, NPROC, GPUS, NNODES, …) from the
# environment, the same words as `sft-play train-distributed`.
#
#     CONFIG=my.yaml STRATEGY=fsdp scripts/train_distributed.sh
#     scripts/train_distributed.sh --config my.yaml --strategy fsdp train.epochs=1
root=$(cd "$(dirname "$0")/.." && pwd) || exit 2
python=${VENV:-$root/.venv}/bin/python
if [ ! -x "$python" ]; then
  echo "[train-distributed] error: $python does not exist; run make setup, or name your own environment: VENV=/path" >&2
  exit 2
fi
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
exec "$python" "$root/scripts/train_distributed.py" "$@"
