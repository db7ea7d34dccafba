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

# tfdist-run learns from Slurm which nodes there are. It runs beside this shell, which
# hears no signal while it waits for a command of its own.
tfdist-run -np 8 --save_seconds=30 --max_restarts=3 -- python elastic.py /data/run-7 &
ranks=$!
told=
trap 'heard=yes told=${told:-time}; kill -TERM "$ranks" 2> /dev/null' USR1  # Time is nearly up.
trap 'heard=yes told=${told:-end}; kill -TERM "$ranks" 2> /dev/null' TERM   # Cancelled, preempted.

# A signal ends the waiting, not the ranks: they save, and are waited for again.
heard=yes
while [ -n "$heard" ]; do
  heard=
  wait "$ranks"
  code=$?
done

# Code 76: the ranks have saved. Started again they go on from there.
if [ "$code" -eq 76 ] && [ "$told" != end ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi

exit "$code"
