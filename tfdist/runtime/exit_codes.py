"""The exit codes of tfdist's processes, apart from 0 and those of the user's program."""

#: A failure that may not occur again.
FAILED = 1

#: A wrong flag, argument or environment: a restart would fail again.
USAGE = 2

#: A rank that was stopped because of a failure of another rank (EX_TEMPFAIL of sysexits.h: a
#: supervisor may restart the job).
ENDED_BY_WATCHDOG = 75

#: A rank that received SIGTERM and saved a checkpoint: a restart resumes the training.
PREEMPTED = 76

#: A rank whose state differed from its replicas, but not when the steps were repeated.
TRANSIENT_FAULT = 77

#: A rank whose state differed again when the steps were repeated: a restart on the same machine
#: would not help.
PERSISTENT_FAULT = 78
