#!/usr/bin/env bash
# Cloud TPU: makes a slice, installs on all of its hosts, trains on all of them, and takes it away again.
#
#   launch/tpu.sh create && launch/tpu.sh install
#   launch/tpu.sh train --config-name=my_config num_hosts=4 mesh.d=16 mesh.t=1 \
#       paths.root_working_dir=gs://my-bucket/runs flat_tokens.filespec=gs://my-bucket/c4.zarr
#   launch/tpu.sh delete
#
# Change: the five lines below. num_hosts is the slice's number of hosts, mesh.d × mesh.t its number of devices (a
# v5litepod-16 has 4 hosts and 16 devices). `train` starts again what a signal stopped, or what lost a host.
set -euo pipefail
NAME=${NAME:-clearshard}
ZONE=${ZONE:-us-west4-a}
TYPE=${TYPE:-v5litepod-16}
RUNTIME=${RUNTIME:-v2-alpha-tpuv5-lite}
REPOSITORY=${REPOSITORY:-https://example.com/clearshard.git}
MOST_RESTARTS=${MOST_RESTARTS:-20}

everywhere() {
  gcloud compute tpus tpu-vm ssh "$NAME" --zone="$ZONE" --worker=all --command="$1"
}

case ${1:-} in
  create)
    gcloud compute tpus tpu-vm create "$NAME" --zone="$ZONE" --accelerator-type="$TYPE" --version="$RUNTIME"
    ;;
  install)
    everywhere "git clone $REPOSITORY clearshard && cd clearshard && python3 -m venv .venv &&
      .venv/bin/pip install -r requirements-cpu.txt gcsfs 'jax[tpu]==0.10.2'"
    ;;
  train)
    shift
    command="cd clearshard && .venv/bin/python -m train$(printf ' %q' "$@")"
    for ((restarts = 0; restarts <= MOST_RESTARTS; restarts++)); do
      status=0
      everywhere "$command" || status=$?
      if ((status == 0 || status == 1)); then  # done, or an error that is printed and would come again
        exit "$status"
      fi
      echo "ended with status $status: started again"
      sleep "${PAUSE_S:-30}"
    done
    exit "$status"
    ;;
  delete)
    gcloud compute tpus tpu-vm delete "$NAME" --zone="$ZONE" --quiet
    ;;
  *)
    echo "usage: launch/tpu.sh create | install | train KEY=VALUE... | delete" >&2
    exit 2
    ;;
esac
