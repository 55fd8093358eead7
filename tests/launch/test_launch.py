"""The files of launch/: that they parse, name what is there, and start what docs/hosts.md says."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import several_hosts as hosts
import yaml

import train
import train_any
from runtime.config.command_line import load
from runtime.config.rebuild import as_tree
from runtime.files import flat

LAUNCH = hosts.ROOT / "launch"


@pytest.mark.parametrize("path", sorted(LAUNCH.iterdir()), ids=lambda path: path.name)
def test_each_launch_file_begins_with_its_command_and_what_to_change(path):
    """The first comment says what it is, the command, and what to change."""
    lines = path.read_text().splitlines()
    lines = lines[1:] if lines[0].startswith("#!") else lines
    comment = "\n".join(lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))])
    assert "\n# Change: " in comment and re.search(rf"\n#   .*launch/{re.escape(path.name)}", comment)


def write_program(path, text):
    """A program of the test's own in the place of another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def configs_named_in(text):
    return set(re.findall(r"(?:--config-name=|CONFIG: )([a-z]\w+)", text)) - {"my_config"}


@pytest.mark.parametrize("path", [*sorted(LAUNCH.iterdir()), hosts.ROOT / "docs/hosts.md"], ids=lambda path: path.name)
def test_configs_and_keys_that_launch_files_name_are_there(path):
    """Each config exists, and each key=value loads in it."""
    text = path.read_text()
    names = configs_named_in(text)
    for name in names:
        assert (hosts.ROOT / f"configs/{name}.yaml").exists()
    keys = set(re.findall(r"\b((?:paths|flat_tokens|cluster|mesh|checkpoint|training)\.\w+|num_hosts)=", text))
    assert keys <= flat(as_tree(load(train_any.Config))).keys()


def test_the_jobset():
    """The JobSet has num_hosts indexed pods and an account that may ask for them; they restart together, but not after
    an error that would come again."""
    jobset, account, role, binding = yaml.safe_load_all((LAUNCH / "jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = jobset["spec"]["replicatedJobs"]
    spec, pod = job["template"]["spec"], job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (name,) = configs_named_in(" ".join(container["args"]))
    config = load(train.Config, name, container["args"][1:])
    devices = config.num_hosts * container["resources"]["limits"]["nvidia.com/gpu"]
    assert spec["parallelism"] == spec["completions"] == config.num_hosts and spec["completionMode"] == "Indexed"
    assert config.mesh.d * config.mesh.t == devices and job["replicas"] == 1
    assert spec["backoffLimit"] == 0 and pod["restartPolicy"] == "Never"
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [1]}
    assert jobset["spec"]["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    names = {pod["serviceAccountName"], account["metadata"]["name"], binding["subjects"][0]["name"]}
    assert len(names) == 1 and binding["roleRef"]["name"] == role["metadata"]["name"]


def test_the_skypilot_task():
    """The task has num_hosts nodes with the GPUs that the mesh needs; a run that was stopped and saved is started
    again."""
    task = yaml.safe_load((LAUNCH / "sky.yaml").read_text())
    config = load(train.Config, task["envs"]["CONFIG"])
    per_node = int(task["resources"]["accelerators"].partition(":")[2])
    assert task["num_nodes"] == config.num_hosts and config.mesh.d * config.mesh.t == per_node * config.num_hosts
    assert 75 in task["resources"]["job_recovery"]["recover_on_exit_codes"]
    assert subprocess.run(["bash", "-n"], input=task["setup"], text=True).returncode == 0


def test_the_skypilot_task_starts_the_processes_as_told(tmp_path):
    """What `run` executes on the second of two nodes."""
    write_program(tmp_path / ".venv/bin/python", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    task = yaml.safe_load((LAUNCH / "sky.yaml").read_text())
    node = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    env = {"PATH": os.environ["PATH"], **task["envs"], **node}
    printed = subprocess.run(["bash", "-c", task["run"]], cwd=tmp_path, env=env, capture_output=True, text=True).stdout
    assert printed.split()[-3:] == ["cluster.coordinator=10.0.0.1:8476", "num_hosts=2", "cluster.process_id=1"]


@pytest.mark.parametrize("statuses, ends, tries", [("75 134 0", 0, 3), ("1", 1, 1), ("75 " * 9, 75, 3)])
def test_tpu_sh_starts_again_what_can_go_on(statuses, ends, tries, tmp_path):
    """A run that was stopped or died is started again, MOST_RESTARTS times; one with an error that would come again is
    not. Arguments arrive unchanged."""
    (tmp_path / "statuses").write_text("\n".join(statuses.split()))
    notes = f'#!/bin/bash\ncd {tmp_path}\necho "${{!#}}" >> commands\n'
    write_program(tmp_path / "gcloud", notes + 'status=$(head -n 1 statuses); sed -i 1d statuses; exit "$status"\n')
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PAUSE_S": "0", "MOST_RESTARTS": "2"}
    ended = subprocess.run([str(LAUNCH / "tpu.sh"), "train", "a.b=c d"], env=env, capture_output=True, text=True)
    commands = (tmp_path / "commands").read_text().splitlines()
    assert ended.returncode == ends and len(commands) == tries, ended.stdout + ended.stderr
    assert set(commands) == {r"--command=cd clearshard && .venv/bin/python -m train a.b=c\ d"}


@pytest.mark.parametrize("name", ["Dockerfile.cuda", "Dockerfile.cpu"])
def test_dockerfiles(name):
    """Known instructions, what they copy is here, and JAX is of the tested version. (Building needs a network: not
    done.)"""
    text = re.sub(r"\\\n", "", (LAUNCH / name).read_text())
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    assert next(word for word, _ in lines) == "FROM"
    assert {word for word, _ in lines} <= {"FROM", "WORKDIR", "COPY", "RUN", "ENTRYPOINT"}
    for word, rest in lines:
        if word == "COPY":
            assert all((hosts.ROOT / path).exists() for path in rest.split()[:-1])
    version = re.search(r"^jax==(.*)$", (hosts.ROOT / "requirements-cpu.txt").read_text(), re.MULTILINE)[1]
    for path in LAUNCH.iterdir():
        assert set(re.findall(r"jax\[\w+\]==([\d.]+)", Path(path).read_text())) <= {version}


@pytest.mark.parametrize(
    "nodes, keys", [("4", ["num_hosts=4", "mesh.r=4"]), ("2", ["num_hosts=2", "mesh.r=2", "mesh.d=4"]), ("3", [])]
)
def test_the_batch_script_chooses_the_mesh(nodes, keys, tmp_path):
    """The script takes the mesh that the environment has for its number of nodes; without one, the arguments' mesh."""
    write_program(tmp_path / "srun", '#!/bin/sh\nshift 3; printf "%s\\n" "$@"\n')
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": nodes, "PROGRAM": "train_any"}
    env |= {"MESH_4": "mesh.r=4", "MESH_2": "mesh.r=2 mesh.d=4"}
    ended = subprocess.run([str(LAUNCH / "train.sbatch"), "a=c d"], env=env, capture_output=True, text=True)
    assert ended.returncode == 0 and ended.stdout.splitlines() == ["-m", "train_any", "a=c d", *keys]
