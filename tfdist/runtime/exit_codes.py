"""With what code a process of tfdist ends, apart from 0 and from those of the user's program."""

__all__ = [
    "ENDED_BY_WATCHDOG",
    "FAILED",
    "PERSISTENT_FAULT",
    "PREEMPTED",
    "TRANSIENT_FAULT",
    "USAGE",
]

#: Something failed that may go well another time.
FAILED = 1

#: A bad flag, argument or environment, and what another start would not mend.
USAGE = 2

#: A rank that another rank's trouble stopped (EX_TEMPFAIL of sysexits.h: whoever supervises the
#: job may start it again).
ENDED_BY_WATCHDOG = 75

#: A rank that was asked to end (SIGTERM), and saved before it did: started again it goes on.
PREEMPTED = 76

#: A rank that held something else than its replicas, and not so when the steps were run again.
TRANSIENT_FAULT = 77

#: One that did so again: another start on the same machine would not mend it.
PERSISTENT_FAULT = 78
