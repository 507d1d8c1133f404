#!/usr/bin/env bash
# The same command on every host; HEAD is the name of one of them, RUN a folder that all see.
set -euo pipefail
: "${HEAD:?name the host where the agents meet}" "${RUN:?name a folder that all hosts see}"

# Hosts may come and go between 1 and 4: the run goes on from its last checkpoint with those that are there.
exec torchrun \
  --nnodes "${NODES:-1:4}" --nproc-per-node "${RANKS_PER_HOST:-4}" --max-restarts 3 \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD:29400" --rdzv-id "$(basename "$RUN")" \
  -m shardrec.cli train --out "$RUN" --checkpoint-every 10m --resume "$@"
