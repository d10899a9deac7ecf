#!/usr/bin/env bash
# Trains on a Slurm cluster: sbatch slurm.sh train.py --epochs 5
#
# The batch script runs on the first node of the allocation, and the training script with it, as the
# chief. One srun starts the ps and worker tasks (python -m tf_dsgd.serve) over all nodes; they end
# with the job. TensorFlow's gRPC has no authentication: whoever reaches a task's port may use it. Use
# it on a cluster whose network is private and whose users you trust.
#
# One ps task and, for four nodes with two tasks each, seven workers. PS_TASKS changes the first.
#SBATCH --job-name=tf_dsgd
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=4
#SBATCH --time=01:00:00
#SBATCH --no-kill
# With GPUs, one for each task (a ps leaves its own unused): #SBATCH --gpus-per-task=1
set -euo pipefail

if (($# == 0)); then
  echo "usage: sbatch slurm.sh SCRIPT [ARGUMENT...]" >&2
  exit 2
fi
ps_tasks=${PS_TASKS:-1}
tasks=$((SLURM_JOB_NUM_NODES * SLURM_NTASKS_PER_NODE))
if ((tasks <= ps_tasks)); then
  echo "slurm.sh: $tasks tasks are too few for $ps_tasks ps tasks and a worker; ask for more nodes" >&2
  exit 2
fi

# Ports by job id, so that jobs that share a node hardly ever get the same: 32 ports a job, below
# Linux's ephemeral ports (32768), which other programs are given. Set BASE_PORT if one is taken.
base_port=${BASE_PORT:-$((10000 + SLURM_JOB_ID % 700 * 32))}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

# Tasks in blocks (--distribution=block): task p runs on node p / (tasks per node).
list() {  # list FIRST END: the addresses of tasks FIRST to END - 1, in quotes
  local separator="" p
  for ((p = $1; p < $2; p++)); do
    printf '%s"%s:%d"' "$separator" "${nodes[p / SLURM_NTASKS_PER_NODE]}" \
      $((base_port + 1 + p % SLURM_NTASKS_PER_NODE))
    separator=", "
  done
}
cluster="{\"chief\": [\"${nodes[0]}:$base_port\"]"
cluster+=", \"ps\": [$(list 0 "$ps_tasks")], \"worker\": [$(list "$ps_tasks" "$tasks")]}"

export TF_DSGD_CLUSTER=$cluster TF_DSGD_PS_TASKS=$ps_tasks
export TF_DSGD_THREADS=${SLURM_CPUS_PER_TASK:-1}

# shellcheck disable=SC2016  # expanded in each task
srun --ntasks="$tasks" --cpus-per-task="$TF_DSGD_THREADS" --distribution=block \
  --kill-on-bad-exit=0 --wait=0 --label bash -c '
    if ((SLURM_PROCID < TF_DSGD_PS_TASKS)); then
      job=ps index=$SLURM_PROCID
    else
      job=worker index=$((SLURM_PROCID - TF_DSGD_PS_TASKS))
    fi
    export TF_CONFIG="{\"cluster\": $TF_DSGD_CLUSTER, \"task\": {\"type\": \"$job\", \"index\": $index}}"
    exec "${PYTHON:-python}" -m tf_dsgd.serve
  ' &

export TF_CONFIG="{\"cluster\": $cluster, \"task\": {\"type\": \"chief\", \"index\": 0}}"
"${PYTHON:-python}" "$@"
# Here the batch script ends with the script's exit code, and Slurm ends the srun step with it.
