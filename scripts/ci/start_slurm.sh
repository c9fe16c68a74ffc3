#!/usr/bin/env bash
# Starts a one-node Slurm cluster on loopback inside FOLDER, with a declared gpu:a30:1 whose device is a plain file.
#
#   scripts/ci/start_slurm.sh FOLDER        start; prints a line to evaluate (SLURM_CONF, PATH)
#   scripts/ci/start_slurm.sh FOLDER stop   stop
#
# Needs Debian's slurm-wlm and munge. No accounting, no cgroups: jobs are tracked through /proc.
set -euo pipefail

# Unix sockets have short path limits, so keep FOLDER short.
folder=$(realpath -m "${1:?usage: start_slurm.sh FOLDER [stop]}")

stop() {
    for name in slurmd slurmctld munged; do
        pid=$(cat "$folder/$name.pid" 2>/dev/null || true)
        if [ -n "$pid" ]; then kill "$pid" 2>/dev/null || true; fi
    done
}

if [ "${2:-}" = stop ]; then
    stop
    exit 0
fi

for tool in munged slurmctld slurmd sbatch; do
    PATH="$PATH:/usr/sbin" command -v "$tool" >/dev/null || { echo "error: $tool is missing: apt-get install slurm-wlm munge" >&2; exit 2; }
done
export PATH="$PATH:/usr/sbin"

mkdir -p "$folder/state" "$folder/spool"
chmod 755 "$folder"
user=$(id -un)
host=$(hostname -s)
# Two free ports on loopback.
read -r control_port daemon_port < <(python3 - <<'PY'
import socket
sockets = [socket.socket() for _ in range(2)]
for one in sockets:
    one.bind(("127.0.0.1", 0))
print(*(one.getsockname()[1] for one in sockets))
PY
)

dd if=/dev/urandom of="$folder/munge.key" bs=1 count=1024 status=none
chmod 400 "$folder/munge.key"
munged --force --key-file="$folder/munge.key" --socket="$folder/munge.sock" --pid-file="$folder/munged.pid" \
    --log-file="$folder/munged.log" --seed-file="$folder/munged.seed"

touch "$folder/fake-a30"
echo "Name=gpu Type=a30 File=$folder/fake-a30" >"$folder/gres.conf"
: >"$folder/plugstack.conf"
# The executor plugin strips SLURM_CONF inside a job, where its srun must still find this configuration.
mkdir -p "$folder/bin"
printf '#!/bin/sh\nSLURM_CONF=%s exec %s "$@"\n' "$folder/slurm.conf" "$(command -v srun)" >"$folder/bin/srun"
chmod +x "$folder/bin/srun"
cat >"$folder/slurm.conf" <<CONF
ClusterName=loopback
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$control_port
SlurmdPort=$daemon_port
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
AuthInfo=socket=$folder/munge.sock
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
PlugStackConfig=$folder/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
MinJobAge=600
KillWait=3
NodeName=$host NodeAddr=127.0.0.1 CPUs=4 RealMemory=32000 Gres=gpu:a30:1 State=UNKNOWN
PartitionName=gpu Nodes=$host Default=YES MaxTime=INFINITE State=UP
CONF
export SLURM_CONF="$folder/slurm.conf"
slurmctld
slurmd -N "$host"

for _ in $(seq 60); do
    if [ "$(sinfo -h -o %T 2>/dev/null | head -n 1)" = idle ]; then
        echo "export SLURM_CONF=$folder/slurm.conf PATH=$folder/bin:\$PATH"
        exit 0
    fi
    sleep 0.5
done
echo "error: the node did not become idle" >&2
tail -n 20 "$folder/munged.log" "$folder/slurmctld.log" "$folder/slurmd.log" >&2 || true
stop
exit 1
