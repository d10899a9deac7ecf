"""The example files for Kubernetes and Slurm state clusters that are accepted."""

import os
import re
import stat
import subprocess

import pytest

from tests.packaging.repository import ROOT
from tf_dsgd.transport import cluster_spec

pytestmark = pytest.mark.beside_others

KUBERNETES = ROOT / "examples/kubernetes.yaml"
SLURM = ROOT / "examples/slurm.sh"


def kubernetes_cluster(text):
    """The text of the ConfigMap's folded entry."""
    return " ".join(re.search(r"  cluster: >-\n((?:    .*\n)+)", text)[1].split())


def test_kubernetes_tasks_find_each_other():
    text = KUBERNETES.read_text()
    cluster = kubernetes_cluster(text)
    found = set()
    for document in text.split("\n---\n"):
        templates = re.findall(r"""value: '(\{"cluster".*)'""", document)
        if not templates:
            continue
        (template,) = templates
        name = re.search(r"^  name: (\S+)", document, re.MULTILINE)[1]
        service = re.search(r"^ +(?:serviceName|subdomain): (\S+)", document, re.MULTILINE)[1]
        replicas = int((re.search(r"replicas: (\d+)", document) or [0, 1])[1])
        for index in range(replicas):
            config = template.replace("$(CLUSTER)", cluster).replace("$(INDEX)", str(index))
            task = cluster_spec.from_tf_config(config)
            pod = f"{name}-{index}.{service}:2222"
            assert task.jobs[task.task_type][task.task_index] == pod
            serves = '"tf_dsgd.serve"]' in document
            assert serves == (task.task_type != "chief")
            found.add((task.task_type, task.task_index))
    stated = {(job, index) for job, of_job in task.jobs.items() for index in of_job}
    assert found == stated == {("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0)}


def test_kubernetes_objects():
    yaml = pytest.importorskip("yaml")
    objects = list(yaml.safe_load_all(KUBERNETES.read_text()))
    kinds = [each["kind"] for each in objects]
    assert sorted(kinds) == [
        *("ConfigMap", "Job", "NetworkPolicy", "Service", "StatefulSet", "StatefulSet")
    ]
    by_kind = {each["kind"]: each for each in objects}
    assert by_kind["ConfigMap"]["data"]["cluster"] == kubernetes_cluster(KUBERNETES.read_text())
    selector = by_kind["Service"]["spec"]["selector"]
    for each in objects:
        if each["kind"] not in ("Job", "StatefulSet"):
            continue
        labels = each["spec"]["template"]["metadata"]["labels"]
        assert labels.items() >= selector.items()
        assert each["kind"] == "Job" or each["spec"]["selector"]["matchLabels"] == labels
        (container,) = each["spec"]["template"]["spec"]["containers"]
        names = [variable["name"] for variable in container["env"]]
        # Kubernetes fills $(NAME) in only from variables before it.
        value = container["env"][names.index("TF_CONFIG")]["value"]
        used = re.findall(r"\$\((\w+)\)", value)
        assert all(names.index(name) < names.index("TF_CONFIG") for name in used)


SCONTROL = """#!/bin/bash
[[ "$1 $2 $3" == "show hostnames n[1-4]" ]] || exit 1
printf '%s\\n' n1 n2 n3 n4
"""
# Runs the tasks one after another, after its own options.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do
  [[ $1 == --ntasks=* ]] && tasks=${1#--ntasks=}
  shift
done
for ((p = 0; p < tasks; p++)); do SLURM_PROCID=$p "$@"; done
"""
# One write of a line: the chief and a task may write at one time.
PYTHON = """#!/bin/bash
printf '%s\\t%s\\t%s\\n' "$TF_CONFIG" "$TF_DSGD_THREADS" "$*" >> "$RECORD"
[[ $1 == -m ]] || exit 3
"""


def run_slurm(tmp_path, *arguments, **environment):
    """The exit code, and task -> (its cluster, threads, arguments of python)."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("python", PYTHON)):
        program = tmp_path / name
        program.write_text(text)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    record = tmp_path / "record"
    record.touch()
    result = subprocess.run(
        ["bash", str(SLURM), *arguments],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "RECORD": str(record),
            "SLURM_JOB_ID": "123456",
            "SLURM_JOB_NODELIST": "n[1-4]",
            "SLURM_JOB_NUM_NODES": "4",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_CPUS_PER_TASK": "6",
            **environment,
        },
        capture_output=True,  # ends with srun's, which is in the background
        text=True,
        timeout=60,
        check=False,
    )
    found = {}
    for line in record.read_text().splitlines():
        config, threads, command = line.split("\t")
        task = cluster_spec.from_tf_config(config)
        found[task.task_type, task.task_index] = (task, threads, command)
    return result, found


def test_slurm_starts_every_task_where_its_address_is(tmp_path):
    result, found = run_slurm(tmp_path, "train.py", "--epochs", "5", PS_TASKS="2")
    assert result.returncode == 3, result.stderr  # the script's
    assert result.stderr == ""
    port = 10000 + 123456 % 700 * 32
    assert all(
        task.jobs
        == {
            "chief": {0: f"n1:{port}"},
            "worker": {
                m: f"n{node}:{port + 1 + local}"
                for m, (node, local) in enumerate([(2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (4, 1)])
            },
            "ps": {0: f"n1:{port + 1}", 1: f"n1:{port + 2}"},
        }
        for task, _, _ in found.values()
    )
    assert set(found) == {("chief", 0), ("ps", 0), ("ps", 1), *(("worker", m) for m in range(6))}
    commands = {key: command for key, (_, _, command) in found.items()}
    assert commands.pop(("chief", 0)) == "train.py --epochs 5"
    assert set(commands.values()) == {"-m tf_dsgd.serve"}
    assert {threads for _, threads, _ in found.values()} == {"6"}


def test_slurm_by_default_has_one_ps(tmp_path):
    _, found = run_slurm(tmp_path, "train.py", BASE_PORT="5000")
    task = found["worker", 6][0]
    assert (len(task.ps), task.chief, task.me) == (1, "n1:5000", "worker 6 at n4:5002")


def test_slurm_refuses_what_cannot_work(tmp_path):
    result, found = run_slurm(tmp_path)
    assert (result.returncode, found) == (2, {})
    assert "usage: sbatch" in result.stderr
    result, found = run_slurm(tmp_path, "train.py", PS_TASKS="8")
    assert (result.returncode, found) == (2, {})
    assert "8 tasks are too few for 8 ps tasks" in result.stderr


def test_slurm_script_is_bash():
    subprocess.run(["bash", "-n", str(SLURM)], check=True, timeout=20)
