#!/bin/bash
# Runs nano in podman (test_image.py), in mount and network namespaces of its own. $1: the image, $2: the chart's pod as YAML,
# $3: a folder with a Ray pod's script and its Serve config, as YAML for the pod and as JSON for Ray's API.
# Each line of the output is `name: value`.
say() { echo "$1: $2"; }
ask() {
    podman exec "$1" wget --quiet --output-document=- --header 'content-type: application/json' --post-data \
        '{"model": "'"$2"'", "max_tokens": 32, "messages": [{"role": "user", "content": "What is 472 + 389?"}]}' \
        http://127.0.0.1:8000/v1/chat/completions | sed 's/.*"content":"\([^"]*\)".*/\1/'
}
ready() {
    for _ in $(seq 120); do
        podman exec "$1" wget --quiet --output-document=/dev/null --timeout=2 http://127.0.0.1:8000/health/ready && break
        sleep 1
    done
}
exec 2> /dev/null
ip link set lo up
umount /sys/fs/cgroup/unified  # podman takes cgroups of both kinds at once for those of the second

podman run --detach --name quartet-test --no-healthcheck --network none --read-only --tmpfs /tmp:exec,mode=1777 --shm-size 2g \
    --cgroups=disabled --volume /var/cache/quartet "$1" > /dev/null
ready quartet-test
say answer "$(ask quartet-test nano-31b)"
say user "$(podman exec quartet-test id --user)"
say written_to_root "$(podman exec quartet-test touch /opt/quartet/x && echo yes || echo no)"
say written_to_cache "$(podman exec quartet-test touch /var/cache/quartet/x && echo yes || echo no)"
say health "$(podman exec quartet-test bash -c "$(podman image inspect --format '{{range .Healthcheck.Test}}{{.}} {{end}}' "$1" |
    sed 's/^CMD //')" && echo 0)"
say compiler "$(podman exec quartet-test quartet doctor | grep 'c compiler' | cut -d' ' -f1)"
podman stop --time 60 quartet-test > /dev/null
say exit_code "$(podman inspect --format '{{.State.ExitCode}}' quartet-test)"
podman rm --force --volumes quartet-test > /dev/null

podman play kube "$2" > /dev/null
ready q-quartet
say pod_answer "$(ask q-quartet m)"
say pod_user "$(podman exec q-quartet id --user)"
say pod_metrics "$(podman exec q-quartet wget --quiet --output-document=- http://127.0.0.1:9401/metrics | grep --count '^quartet_requests_running ')"
say pod_groups "$(podman exec q-quartet wget --quiet --output-document=- http://127.0.0.1:9464/metrics | grep '^quartet_groups{')"
podman play kube --down "$2" > /dev/null

# A head with a replica of its own, as KubeRay would start it, deploy to it by Ray's API, and end it.
token=$(tr --delete --complement a-f0-9 < /dev/urandom | head --bytes 64)
podman run --detach --name quartet-ray --no-healthcheck --network none --read-only --tmpfs /tmp:exec,mode=1777 --shm-size 2g \
    --cgroups=disabled --volume "$3":/etc/quartet/config:ro --env RAY_AUTH_MODE=token --env RAY_AUTH_TOKEN="$token" \
    --env KUBERAY_GEN_RAY_START_CMD="ray start --head --num-cpus=4 --dashboard-host=0.0.0.0 --block" \
    --entrypoint /bin/bash "$1" -c -- "$(cat "$3/start.sh")" > /dev/null
for _ in $(seq 60); do podman exec quartet-ray wget --quiet --output-document=/dev/null http://127.0.0.1:8265/api/healthz && break; sleep 1; done
say ray_deployed "$(podman exec quartet-ray python3 -c '
import os, urllib.request
body = open("/etc/quartet/config/config.json", "rb").read()
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["RAY_AUTH_TOKEN"]}
url = "http://127.0.0.1:8265/api/serve/applications/"
print(urllib.request.urlopen(urllib.request.Request(url, body, headers, method="PUT")).status)')"
ready quartet-ray
say ray_answer "$(ask quartet-ray m)"
say ray_drained "$(podman exec quartet-ray bash /opt/quartet/deploy/image/drain-node.sh 30 > /dev/null && echo 0)"
say ray_replicas_left "$(podman exec quartet-ray grep --text --no-messages --count '^ray::ServeReplica' /proc/[0-9]*/cmdline |
    grep --count ':[1-9]')"
begun=$SECONDS
podman stop --time 60 quartet-ray > /dev/null
say ray_stop_seconds "$((SECONDS - begun))"
podman rm --force --volumes quartet-ray > /dev/null
say end 0
