#!/bin/bash
# Runs in a booted container (test_systemd.py): the unit under a real systemd. Each line of the log is `name: value`.
say() { echo "$1: $2" >> /log; }
property() { systemctl show --property "$1" --value quartet; }
answers() { wget --quiet --output-document=- --timeout=2 http://127.0.0.1:8000/health/ready > /dev/null && echo yes || echo no; }
stream() {
    wget --quiet --output-document="$1" --header 'content-type: application/json' --post-data \
        '{"model": "nano-31b", "stream": true, "max_tokens": 600, "ignore_eos": true, "messages": [{"role": "user", "content": "Hi"}]}' \
        http://127.0.0.1:8000/v1/chat/completions
}

begun=$SECONDS
say start "$(systemctl start quartet && echo 0)"
say boot_seconds "$((SECONDS - begun))"
say answers_when_started "$(answers)"
say user "$(ps -o user= -p "$(property MainPID)")"
say status "$(property StatusText)"

stream /stream &
client=$!
for _ in $(seq 100); do [ "$(grep --count '^data' /stream)" -gt 3 ] && break; sleep 0.1; done
say events_before_stop "$(grep --count '^data' /stream)"
stopped=$SECONDS
systemctl stop quartet
wait "$client"
say stream_end "$(grep '^data' /stream | tail -1)"
say stop_seconds "$((SECONDS - stopped))"
say result_of_stop "$(property Result)"
say processes_left "$(pgrep --full 'ray|quartet' --count)"

systemctl start quartet
killed=$SECONDS
kill -9 "$(property MainPID)"
for _ in $(seq 600); do [ "$(property NRestarts)" = 1 ] && [ "$(property ActiveState)" = active ] && break; sleep 0.2; done
say back_after_kill "$(answers)"
say back_seconds "$((SECONDS - killed))"
systemctl stop quartet

echo 'applications: []' > /etc/quartet/config.yaml
systemctl start quartet || true
sleep 5
say state_after_exit_2 "$(property ActiveState)"
say code "$(property ExecMainStatus)"
say restarts_after_exit_2 "$(property NRestarts)"
say end 0
systemctl poweroff
