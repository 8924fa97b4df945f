#!/bin/sh
# HAProxy as Ray Serve starts it, with its own two ports (statistics, Prometheus) on loopback, where Serve's template binds them to
# every interface; with each client's address in X-Forwarded-For; with a bound on how long a request's head may take, where Serve has
# none but the hour that a client may be silent; with one on the connections of an address, if QUARTET_CONNECTIONS_PER_ADDRESS has it:
# behind another proxy all clients have one; and with errors in OpenAI's shape where no replica answers, or is asked: for that each
# request has a connection of its own to the replica, for where one that was used before is lost, HAProxy closes the client's without
# a word, trusting that it asks again. What it cannot read as HTTP it answers by texts of its own, which no `errorfile` replaces.
# Ray finds this file by RAY_SERVE_HAPROXY_BINARY_PATH, and writes the file behind -f anew before each start.
set -eu
ours="option forwardfor\n    option http-server-close\n    timeout http-request ${QUARTET_HEAD_TIMEOUT:-10s}"
errors=${QUARTET_ERRORS:-}
json="content-type application/json file $errors"
known="{ method GET HEAD POST PUT PATCH DELETE OPTIONS TRACE }"
limit=${QUARTET_CONNECTIONS_PER_ADDRESS:-}
counted="stick-table type ipv6 size 64k expire 1h store conn_cur\n    tcp-request connection track-sc0 src"
counted="$counted\n    tcp-request connection reject if { sc0_conn_cur gt $limit }"
before=""
for argument in "$@"; do
    if [ "$before" = "-f" ]; then
        [ -z "$errors" ] || sed -i -e "s#^\( *errorfile \(50[234]\)\) .*#\1 $errors/\2.http#" \
            -e "s#^\( *http-request return status 404\) content-type text/plain lf-string .*#\1 $json/404.json#" \
            -e "s#^frontend http_frontend\$#&\n    http-request return status 405 $json/405.json hdr allow \"GET, POST\" unless $known#" "$argument"
        [ -z "$limit" ] || sed -i "s#^frontend http_frontend\$#&\n    $counted#" "$argument"
        sed -i -e 's/^\( *bind \)\**:\([0-9][0-9]*\)/\1127.0.0.1:\2/' -e "/^defaults/,/^frontend/s/^ *mode http\$/&\n    $ours/" "$argument"
    fi
    before=$argument
done
exec "$QUARTET_HAPROXY" "$@"
