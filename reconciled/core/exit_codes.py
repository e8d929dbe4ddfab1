"""The exit codes of all verbs, in one table. From 64 on they are those of sysexits.h.

0    done; ``run``: a clean stop; ``plan``: no changes
1    ``run``: it could not start, or had a fault of its own; other verbs: not done; ``plan``:
     there are changes
2    wrong usage (``run``: 78, since a unit must not restart on it)
3    ``run``: something critical was cut; ``reap``: something had to be killed; ``step``: the
     attempt is not the current one
4    a key is not done, or what was named is not found
69   no daemon answers, or the verb is not built yet
70   the machine refuses; ``run``: the event loop hung, and the last resort ended the process
75   another daemon holds the state directory; ``resolve``: the daemon does not answer
78   the configuration is invalid: a restart will not help
141  the reader of the output has closed it (128 + SIGPIPE)
"""

from __future__ import annotations

DONE = 0
FAILED = CHANGES = 1
USAGE = 2
CUT = KILLED = STALE_ATTEMPT = 3
NOT_DONE = NOT_FOUND = 4
NO_DAEMON = NOT_BUILT = 69
INTERNAL = HUNG = 70
LOCKED = NO_ANSWER = 75
INVALID = 78
BROKEN_PIPE = 141
