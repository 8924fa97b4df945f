#!/bin/bash
# The preStop of a Ray pod: Ray gives this node no more work, Serve starts its replica elsewhere, and the pod waits until its own
# replica has finished its requests, at most $1 seconds.
seconds=${1:?seconds}
ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message "the pod ends" --deadline-remaining-seconds "$seconds"
end=$((SECONDS + seconds))
while grep --quiet --text --no-messages '^ray::ServeReplica' /proc/[0-9]*/cmdline && [ "$SECONDS" -lt "$end" ]; do
    sleep 1
done
