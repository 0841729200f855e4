#!/usr/bin/env bash
# An engine on a Debian machine that has none: `engine.sh FOLDER`, as root. Docker keeps its data in FOLDER (25 GB), and
# `kill $(cat FOLDER/dockerd.pid)` ends it. Debian has no Compose 2, so that is compiled from its Go module (minutes).
set -euo pipefail
folder=$(realpath --canonicalize-missing "${1:?folder for the data}")
plugin=$HOME/.docker/cli-plugins/docker-compose
mkdir -p "$folder" "$(dirname "$plugin")"
cd "$folder"
if ! { command -v dockerd && command -v mmdebstrap && command -v iptables; } > /dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install --yes -qq --no-install-recommends docker.io iptables mmdebstrap
fi
if ! docker compose version > /dev/null 2>&1; then
  [ -f go.mod ] || go mod init engine
  go get github.com/docker/compose/v2/cmd@v2.40.3
  CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o "$plugin" github.com/docker/compose/v2/cmd
fi
if ! docker info > /dev/null 2>&1; then
  setsid dockerd --data-root "$folder/data" --exec-root "$folder/run" --pidfile "$folder/dockerd.pid" > "$folder/dockerd.log" 2>&1 &
  for _ in $(seq 60); do docker info > /dev/null 2>&1 && break; sleep 1; done
  docker info --format '{{.ServerVersion}} on {{.Driver}}, cgroup {{.CgroupVersion}}'
fi
