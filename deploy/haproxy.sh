#!/bin/sh
# HAProxy as Ray Serve starts it, with its own two ports (statistics, Prometheus) on loopback, where Serve's template binds them to
# every interface, and with each client's address in X-Forwarded-For. Ray finds this file by RAY_SERVE_HAPROXY_BINARY_PATH, and writes the file behind -f anew before each start.
set -eu
before=""
for argument in "$@"; do
    if [ "$before" = "-f" ]; then
        sed -i -e 's/^\( *bind \)\**:\([0-9][0-9]*\)/\1127.0.0.1:\2/' -e '/^defaults/,/^frontend/s/^\( *\)mode http$/&\n\1option forwardfor/' "$argument"
    fi
    before=$argument
done
exec "$QUARTET_HAPROXY" "$@"
