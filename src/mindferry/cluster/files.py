"""The launch files as text: start.sh for every host, its environment, lists of hosts and ranks, the rank's script."""

from __future__ import annotations

import json
from pathlib import Path

from mindferry.cluster.job import NAME, LaunchJob
from mindferry.targets.run_directory import write_text

FOLDER = "launch"

START = """\
#!/usr/bin/env bash
# Start this host's part of the training:  bash {folder}/start.sh NODE
# NODE is the host's number in hosts.txt. The run directory must lie at the same path on every host.
set -euo pipefail
NODE=${{1:?"usage: start.sh NODE (the number of this host in hosts.txt, 0 to {last})"}}
[[ $NODE =~ ^[0-9]+$ && $NODE -le {last} ]] || {{ echo "start.sh: NODE $NODE: expected 0 to {last}" >&2; exit 2; }}
HERE=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
. "$HERE/environment.sh"
# msrun starts whatever `python` is first on PATH: let it be this one.
PYTHON=${{PYTHON:-python}}
PATH=$(dirname "$(command -v "$PYTHON")"):$PATH
LOGS=${{LOGS:-$HERE/../logs/cluster}}
mkdir -p "$LOGS"
exec "$PYTHON" -m mindspore.parallel.cluster.run \\
  --worker_num="${{WORKERS:-{workers}}}" --local_worker_num="${{LOCAL_WORKERS:-{local}}}" \\
  --master_addr="${{MASTER:-{master}}}" --master_port="${{PORT:-{port}}}" --node_rank="$NODE" \\
  --log_dir="$LOGS" --join=True --cluster_time_out=7200 ${{BIND_CORE:---bind_core=True}} \\
  "$HERE/rank.py" ${{RANK_FOLDER:+"$RANK_FOLDER"}}
"""

ENVIRONMENT = """\
# Read by start.sh on every host. Change what your cluster needs, then: mindferry launch {run} --check
for setup in /usr/local/Ascend/ascend-toolkit/set_env.sh /usr/local/Ascend/nnal/atb/set_env.sh; do
  if [ -f "$setup" ]; then set +u; . "$setup"; set -u; fi
done
export GLOG_v=${GLOG_v:-2}                                  # MindSpore: 0 debug, 1 info, 2 warning, 3 error
export HCCL_CONNECT_TIMEOUT=${HCCL_CONNECT_TIMEOUT:-1800}   # seconds; hosts rarely load as fast as each other
export MS_NODE_TIMEOUT=${MS_NODE_TIMEOUT:-600}              # seconds until a silent node counts as lost
# Communication logs, for `mindferry doctor comm --plog`: they cost time, so only for some steps.
# export ASCEND_GLOBAL_LOG_LEVEL=1 HCCL_ENTRY_LOG_ENABLE=1 ASCEND_PROCESS_LOG_PATH="$HERE/../logs/plog"
"""

RANK = '''\
"""What msrun starts as each rank; written by `mindferry launch`."""

from pathlib import Path

from mindferry.cluster.rank import main

if __name__ == "__main__":
    main(Path(__file__).resolve().parent)
'''


def texts(job: LaunchJob, run: str = "RUN") -> dict[str, str]:
    """File name -> content, all that `mindferry launch` writes."""
    start = START.format(
        folder=FOLDER, last=len(job.hosts) - 1, workers=job.workers, local=job.devices_per_host,
        master=job.hosts[0], port=job.port,
    )  # fmt: skip
    return {
        "start.sh": start,
        "environment.sh": ENVIRONMENT.replace("{run}", run),
        "rank.py": RANK,
        "hosts.txt": _hosts(job),
        "ranks.csv": _ranks(job),
        NAME: json.dumps(job.to_json(), indent=1) + "\n",
    }


def _hosts(job: LaunchJob) -> str:
    each = job.devices_per_host
    lines = [
        f"{node} {host} ranks {node * each}-{(node + 1) * each - 1}" for node, host in enumerate(job.hosts)
    ]
    return "# node host ranks\n" + "\n".join(lines) + "\n"


def _ranks(job: LaunchJob) -> str:
    """A line a rank: where it runs and what it does there."""
    lines = ["rank,host,device,pipeline_stage,data_parallel,model_parallel"]
    for rank in range(job.workers):
        node, device = divmod(rank, job.devices_per_host)
        place = job.grid.place(rank)
        lines.append(f"{rank},{job.hosts[node]},{device},{place.stage},{place.data},{place.tensor}")
    return "\n".join(lines) + "\n"


def write(folder: Path, job: LaunchJob, run: str) -> list[Path]:
    """Write the files; an environment.sh that is there stays, for it is the cluster's own."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in texts(job, run).items():
        path = folder / name
        if name == "environment.sh" and path.exists():
            continue
        write_text(path, text)
        written.append(path)
    (folder / "start.sh").chmod(0o755)
    return written
