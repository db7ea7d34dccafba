#!/bin/bash
#SBATCH --job-name=tfdist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=02:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@90
#SBATCH --requeue

export OMP_NUM_THREADS=8
export TF_NUM_INTRAOP_THREADS=8

# tfdist-run reads the nodes from Slurm's variables. It runs in the background, because the
# shell handles no signal while it waits for a foreground command.
tfdist-run -np 8 --save_seconds=30 --max_restarts=3 -- python elastic.py /data/run-7 &
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
