#!/bin/bash
#SBATCH --job-name=gpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --gpus-per-node=a100:4
#SBATCH --time=1-12:00:00
#SBATCH --partition=gpu
#SBATCH --account=physics
#SBATCH --chdir=/data
#SBATCH --output=logs/%x-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --qos=high
#SBATCH --exclusive

export OMP_NUM_THREADS=8
export TF_NUM_INTRAOP_THREADS=8
export RUN=7
export NOTE='it costs $5, 100%'
module load cuda
source /data/venv/bin/activate

# tfdist-run reads the nodes from Slurm's variables. It runs in the background, because the
# shell handles no signal while it waits for a foreground command.
tfdist-run -np 8 --save_seconds=60 --engine=horovod --max_restarts=3 -- tfdist-train --model=gpt --zero_stage=3 --workdir=/data/run-7 &
ranks=$!
cause=
trap 'signaled=yes cause=${cause:-time}; kill -TERM "$ranks" 2> /dev/null' USR1  # Time is nearly up.
trap 'signaled=yes cause=${cause:-end}; kill -TERM "$ranks" 2> /dev/null' TERM   # Cancelled, preempted.

# A signal interrupts the wait while the ranks save, so wait again.
signaled=yes
while [ -n "$signaled" ]; do
  signaled=
  wait "$ranks"
  code=$?
done

# Code 76: the ranks have saved, and resume from there after a restart.
if [ "$code" -eq 76 ] && [ "$cause" != end ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi

exit "$code"
