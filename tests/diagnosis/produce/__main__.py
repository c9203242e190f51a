"""Make the start-up failures happen and keep their logs, trimmed, under tests/diagnosis/logs/.

Run from tests/:  python -m diagnosis.produce [NAME ...]     (all of them without a name)
Each failure runs in a process of its own with the real MindSpore and mindformers; only paths, user and host
names of the log are replaced, and its middle is cut where it is long.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1]
LOGS = HERE.parent / "logs"
FIRST, LAST = 8, 140
MSRUN_SECONDS = 75

HIDE = """\
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Hide())
"""


@dataclass
class Failure:
    """How to make one failure: a function of networks.py or engine_runs.py, or a msrun of ranks.py."""

    where: str
    function: str = ""
    env: dict[str, str] = field(default_factory=dict)
    before: Callable[[], None] | None = None
    hide: str = ""
    msrun_python: str = ""
    hold_port: bool = False
    path_first: str = ""


def _limit(kind: int, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(kind, (value, value))


NETWORKS = [
    "flash_attention_cpu",
    "morph_pynative",
    "construct_without_self",
    "bfloat16_matmul",
    "bfloat16_matmul_ext",
    "float16_double_matmul",
    "matmul_shapes",
    "call_depth",
    "duplicate_parameter",
    "type_join",
    "python_library_in_graph",
    "exec_source",
    "int_dropout",
    "dtype_string",
    "heads_not_divisible",
    "sequence_parallel_alone",
    "activation_name",
    "normalization_name",
    "position_ids_missing",
    "fused_norm_cpu",
    "ascend_on_cpu",
    "ascend_set_device",
    "gpu_on_cpu",
    "semi_auto_cpu",
    "embedding_ids_outside",
    "scale_sense_negative",
]
ENGINE = [
    "healthy",
    "long_record",
    "wrong_column",
    "vocabulary_too_small",
    "batch_too_large",
    "unknown_section_key",
    "unregistered_class",
    "missing_checkpoint",
    "wrong_checkpoint_format",
    "missing_dataset",
    "dataset_dir_empty",
    "use_parallel_alone",
    "learning_rate_text",
    "warmup_float",
    "unknown_callback",
    "unknown_optimizer_argument",
    "ascend_yaml",
    "wrong_shape",
    "checkpoint_not_one",
    "safetensors_cut",
    "missing_index_file",
    "map_function_raises",
    "batch_of_unequal_rows",
    "disk_full",
    "megatron_not_index",
]
RANKS = ["one_rank_fails", "one_rank_shape", "reduce_scatter", "send_receive", "killed", "parallel_product"]

FAILURES: dict[str, Failure] = {
    **{name: Failure("networks", name) for name in NETWORKS},
    **{name: Failure("engine_runs", name) for name in ENGINE},
    **{name: Failure("ranks", name) for name in RANKS},
    "no_decorator": Failure("networks", "graph_kernel", hide="decorator"),
    "no_mindspore": Failure("networks", "int_dropout", hide="mindspore"),
    "no_compiler": Failure("engine_runs", "cxx_helpers", env={"PATH": "/nonexistent"}),
    "memory_limit": Failure("networks", "memory_limit", before=_limit(resource.RLIMIT_AS, 5 << 30)),
    "few_descriptors": Failure("engine_runs", "few_descriptors", before=_limit(resource.RLIMIT_NOFILE, 256)),
    "unwritable_output": Failure("engine_runs", "unwritable_output"),
    # NUMPY2: a directory made with `pip install --target DIR numpy==2.2.6`.
    "numpy_two": Failure("networks", "numpy_two", path_first=os.environ.get("NUMPY2", "")),
    "port_in_use": Failure("ranks", "one_rank_fails", hold_port=True),
    "msrun_other_python": Failure("ranks", "one_rank_fails", msrun_python="/usr/bin"),
}


def _scrub(text: str) -> str:
    """The log without this machine's paths and names."""
    for old, new in (
        (sysconfig.get_path("purelib"), "/venv/lib/python3.11/site-packages"),
        (sys.prefix, "/venv"),
        (str(TESTS), "/project/tests"),
        (str(TESTS.parent), "/project"),
        (sysconfig.get_path("stdlib"), "/usr/lib/python3.11"),
        (socket.gethostname(), "worker-host"),
    ):
        text = text.replace(old, new)
    text = re.sub(r"/\S*?\.pyenv/versions/[\d.]+", "/usr", text)
    return re.sub(r"/tmp/[\w.-]+", "/tmp/run", text)


def _trim(text: str) -> str:
    lines = _scrub(text).splitlines()
    if len(lines) > FIRST + LAST:
        cut = len(lines) - FIRST - LAST
        lines = [*lines[:FIRST], f"[... {cut} lines cut ...]", *lines[-LAST:]]
    return "\n".join(line[:2000] for line in lines) + "\n"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _msrun(failure: Failure, env: dict[str, str], scratch: Path) -> dict[str, str]:
    port = _free_port()
    held = socket.socket()
    if failure.hold_port:
        held.bind(("127.0.0.1", port))
        held.listen()
    if failure.msrun_python:
        env["PATH"] = f"{failure.msrun_python}:{env['PATH']}"
    else:
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    command = [
        *(str(Path(sys.executable).parent / "msrun"), "--worker_num=2", "--local_worker_num=2"),
        *(f"--master_port={port}", "--join=True", f"--log_dir={scratch / 'msrun'}"),
        *(str(HERE / "ranks.py"), failure.function),
    ]
    env.setdefault("MS_NODE_TIMEOUT", "30")
    with contextlib.closing(held), open(scratch / "msrun.out", "wb") as output:
        job = subprocess.Popen(
            command, env=env, cwd=scratch, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        # With the port taken, MindSpore's workers try again for ever: what they said by then is the log.
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(MSRUN_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    out = {path.name: path.read_text(errors="replace") for path in (scratch / "msrun").glob("*.log")}
    return {"msrun.log": (scratch / "msrun.out").read_text(errors="replace"), **out}


def produce(name: str) -> dict[str, str]:
    """Run one failure; file name -> trimmed log."""
    failure = FAILURES[name]
    env = {**os.environ, "PYTHONPATH": str(TESTS), **failure.env}
    env.pop("GLOG_v", None)
    with tempfile.TemporaryDirectory() as tmp:
        scratch = Path(tmp)
        scratch.chmod(0o777)
        if failure.hide:
            (scratch / "sitecustomize.py").write_text(HIDE.format(module=failure.hide))
            env["PYTHONPATH"] = f"{scratch}:{env['PYTHONPATH']}"
        if failure.path_first:
            env["PYTHONPATH"] = f"{failure.path_first}:{env['PYTHONPATH']}"
        if failure.where == "ranks":
            logs = _msrun(failure, env, scratch)
        else:
            code = f"from diagnosis.produce import {failure.where} as m; m.{failure.function}()"
            done = subprocess.run(
                [sys.executable, "-c", code],
                env=env,
                cwd=scratch,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=240,
                preexec_fn=failure.before,
            )
            logs = {f"{name}.log": done.stdout.decode(errors="replace")}
    return {file: _trim(text) for file, text in logs.items()}


def main(names: list[str]) -> None:
    for name in names or FAILURES:
        logs = produce(name)
        folder = LOGS / name if len(logs) > 1 else LOGS
        if len(logs) > 1:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in logs.items():
            (folder / file).write_text(text)
            print(
                f"== {name}/{file}: {len(text.splitlines())} lines; last: {text.strip()[-160:]!r}", flush=True
            )


if __name__ == "__main__":
    main(sys.argv[1:])
