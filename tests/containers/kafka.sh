#!/bin/bash
# Writes server.properties, formats an empty data folder, runs the broker.
set -euo pipefail
if [[ ${KAFKA_ADVERTISED_LISTENERS:-} =~ SASL_.*:// ]]; then : "${KAFKA_OPTS:?the real image asks for it with such listeners}"; fi
rm -f /opt/kafka/config/server.properties
if ! said=$(java -Xmx256m -cp '/opt/kafka/libs/*' kafka.docker.KafkaDockerWrapper setup --default-configs-dir /etc/kafka/docker \
  --mounted-configs-dir /mnt/shared/config --final-configs-dir /opt/kafka/config 2>&1); then
  grep -qi 'already formatted' <<< "$said" || { echo "$said"; exit 1; }
fi
exec java ${KAFKA_HEAP_OPTS:--Xmx1G -Xms1G} -cp '/opt/kafka/libs/*' kafka.Kafka /opt/kafka/config/server.properties
