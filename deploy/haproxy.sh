#!/bin/sh
# HAProxy as Ray Serve starts it, with its own two doors (statistics, Prometheus) on loopback: Serve's template binds them to
# every interface. Ray finds this file by RAY_SERVE_HAPROXY_BINARY_PATH, and writes the file behind -f anew before each start.
set -eu
before=""
for argument in "$@"; do
    if [ "$before" = "-f" ]; then
        sed -i 's/^\( *bind \)\**:\([0-9][0-9]*\)/\1127.0.0.1:\2/' "$argument"
    fi
    before=$argument
done
exec "$QUARTET_HAPROXY" "$@"
