#!/bin/sh
# Starts HAProxy for Ray Serve. Ray writes the configuration anew before each start; this script edits it first:
#
#   statistics, metrics   bound to loopback; Serve's template binds both ports to every interface. The API's own bind stays as it is
#   X-Forwarded-For       carries the client's address
#   timeout http-request  bounds how long a request's head may take; Serve only has the hour that a client may be silent
#   http-server-close     gives each request a connection of its own to the replica. When a reused one is lost, HAProxy closes the
#                         client's without a word, and trusts the client to ask again
#   srvtcpka, tcp-ut      end the connections to a node that lost its power or its network after 9 s, whether or not data is in
#                         flight. Nothing else does: a stream may be silent for minutes, so there is no `timeout server`.
#                         2.8.25 takes tcp-ut on a default-server line and ignores it
#   tune.rcvbuf.client, tune.sndbuf.server
#                         bound what the kernel takes of a body that the replica does not read yet; by default it takes 10 MB and more
#   splice-request        is taken out: with it HAProxy does not see a client leave whose body came after its head, until the answer
#                         comes, and the engine works on for nobody (seen with 2.8.25)
#   errorfile             errors have OpenAI's shape where no replica answers or is asked. What is not HTTP gets HAProxy's own texts
#   deny_status 503       where HAProxy or Serve's proxy knows no application yet, or no more: they have a 404 in plain text for it,
#                         after which no client asks again. Of an application whose deployment failed Serve has a 503 in plain text
#   log-format-sd         Ray makes a label of the method in it, and each method that a client invents would be a series of its own:
#                         those that HTTP lacks are one, OTHER
#   stick-table           with QUARTET_CONNECTIONS_PER_ADDRESS, bounds the connections of an address. Behind another proxy all
#                         clients have one address
#   peers, stick on       keep conversations with their replicas, and set-path chooses the application of a model: by
#                         haproxy_routing.py, with QUARTET_ROUTING
#
# Ray finds this file by RAY_SERVE_HAPROXY_BINARY_PATH. `python -m tests.support.edge.haproxy_errors` writes the errors.
set -eu
errors=$(dirname "$0")/haproxy_errors
ours="option forwardfor\n    option http-server-close\n    timeout http-request ${QUARTET_HEAD_TIMEOUT:-10s}"
ours="$ours\n    option srvtcpka\n    srvtcpka-idle 3s\n    srvtcpka-intvl 2s\n    srvtcpka-cnt 3"
json="content-type application/json file $errors"
known="{ method GET HEAD POST PUT PATCH DELETE OPTIONS TRACE }"
other="hdr allow \"GET, POST\" unless $known"
method="http-request set-var(txn.method) method if $known\n    http-request set-var(txn.method) str(OTHER) unless $known"
gone="http-response deny deny_status 503 if { status 404 503 } { res.hdr(content-type) -m beg text/plain }"
limit=${QUARTET_CONNECTIONS_PER_ADDRESS:-}
counted="stick-table type ipv6 size 64k expire 1h store conn_cur\n    tcp-request connection track-sc0 src"
counted="$counted\n    tcp-request connection reject if { sc0_conn_cur gt $limit }"
before=""
for argument in "$@"; do
    if [ "$before" = "-f" ]; then
        sed -i -e "s#^\( *errorfile \(50[234]\)\) .*#\1 $errors/\2.http#" \
            -e "s#^\( *http-request return status 404\) content-type text/plain lf-string .*#    http-request deny deny_status 503 if { path_beg / }\n\1 $json/404.json#" \
            -e "s#^frontend http_frontend\$#&\n    http-request return status 405 $json/405.json $other\n    $gone#" "$argument"
        sed -i -e "s#^frontend http_frontend\$#&\n    $method#" -e 's/ method=%HM / method=%[var(txn.method)] /' "$argument"
        [ -z "$limit" ] || sed -i "s#^frontend http_frontend\$#&\n    $counted#" "$argument"
        sed -i -e '/^frontend http_frontend$/,/^backend/!s/^\( *bind \)\**:\([0-9][0-9]*\)/\1127.0.0.1:\2/' -e '/^ *option splice-request$/d' \
            -e 's/^ *server .*$/& tcp-ut 8s/' \
            -e 's/^global$/&\n    tune.rcvbuf.client 131072\n    tune.sndbuf.server 65536/' \
            -e "/^defaults/,/^frontend/s#^ *mode http\$#&\n    $ours\n    errorfile 408 $errors/408.http#" "$argument"
        [ -z "${QUARTET_ROUTING:-}" ] || "$QUARTET_PYTHON" -I "$(dirname "$0")/haproxy_routing.py" "$argument"
    fi
    before=$argument
done
exec "$QUARTET_HAPROXY" "$@"
