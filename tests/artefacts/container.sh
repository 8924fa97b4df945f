#!/bin/bash
# Runs nano in podman (test_image.py), in mount and network namespaces of its own. $1: the image, $2: the chart's pod as YAML.
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
say end 0
