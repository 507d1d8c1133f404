#!/usr/bin/env bash
# The same command on each host: HEAD=host0 bash torchrun.sh /shared/run.yaml. HEAD is the host whose agent the others look for.
set -euo pipefail
: "${HEAD:?name the host where the agents meet}"

# Between 1 and NODES hosts, that may come and go: the run goes on from its last checkpoint with those that are there.
# Without the variable, a host that comes back and one that has stayed may look for each other at different addresses.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# torchrun takes its other options from PET_ variables, such as PET_LOCAL_ADDR where hosts do not know each other by name.
exec torchrun \
  --nnodes "1:${NODES:-4}" --nproc-per-node "${RANKS_PER_HOST:-gpu}" --max-restarts "${MAX_RESTARTS:-3}" \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD:29400" --rdzv-id "${JOB:-shardrec}" \
  -m shardrec.trainer.cli train "$@" --resume
