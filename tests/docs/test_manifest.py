"""The manifest for Kubernetes that the documents show is one, and its commands have real options."""

import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tests.cli.commands import parse_options
from varuna.cli.run import RunOptions
from varuna.morph.machines import read_machines

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)


def manifest() -> dict[str, Any]:
    (text,) = BLOCK.findall((ROOT / "docs/kubernetes.md").read_text())
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def test_the_managers_command_is_one_that_varuna_run_takes() -> None:
    """V29"""
    (container,) = manifest()["Pod"]["spec"]["containers"]
    assert container["command"][:2] == ["varuna", "run"]
    options = parse_options(RunOptions, container["command"][2:])
    assert options.command is not None
    assert (options.machine_list, options.nstages, options.command[0]) == ("/job/machines", 2, "train.py")
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/job", "/keys", "/checkpoints"} <= mounts


def test_its_names_lead_to_each_other() -> None:
    found = manifest()
    pods = found["StatefulSet"]["spec"]
    assert pods["serviceName"] == found["Service"]["metadata"]["name"]
    assert pods["selector"]["matchLabels"] == pods["template"]["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"] == pods["selector"]["matchLabels"]
    listed = read_machines(found["ConfigMap"]["data"]["machines"].encode(), source="the manifest")
    assert listed.machines == tuple(f"trainer-{number}.trainers" for number in range(pods["replicas"]))
    assert not listed.problem
    (volume,) = (one for one in found["Pod"]["spec"]["volumes"] if one["name"] == "machines")
    assert volume["configMap"]["name"] == found["ConfigMap"]["metadata"]["name"]


def test_the_ssh_server_takes_keys_of_a_folder_that_all_can_write() -> None:
    """Kubernetes mounts secrets in such folders, and sshd refuses them with StrictModes."""
    (container,) = manifest()["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    assert "StrictModes=no" in container["command"]
