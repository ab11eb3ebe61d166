"""dask's configuration: its defaults, schema and documentation say the same."""

from __future__ import annotations

import inspect
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import dask
import pytest

from dask_devctx import DevicePlugin, LocalDeviceCluster, config
from dask_devctx.config.options import OPTION_NAMES
from tests.python import ROOT, python

jsonschema = pytest.importorskip("jsonschema")

KEYS = sorted(config.defaults["devctx"])


def test_the_defaults_fit_the_schema() -> None:
    schema = {"additionalProperties": False, "properties": config.schema()}
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(config.defaults["devctx"], schema)


def test_every_key_has_a_default_and_a_description() -> None:
    described = config.schema()
    assert described.keys() == {*KEYS}, (
        "devctx.yaml and devctx-schema.yaml have not the same keys: "
        f"{sorted(described.keys() ^ {*KEYS})}"
    )
    texts = {key: " ".join(one.get("description", "").split()) for key, one in described.items()}
    assert [key for key, text in texts.items() if not text] == []
    text = resources.files("dask_devctx.config").joinpath("devctx.yaml").read_text("utf-8")
    found = re.findall(r"((?:^  #.*\n)+)  ([a-z-]+):", text, re.M)
    comments = {key: " ".join(comment.replace("#", " ").split()) for comment, key in found}
    assert comments == texts, "a key's comment in devctx.yaml is its text in devctx-schema.yaml"


@pytest.mark.parametrize("cls", [DevicePlugin, LocalDeviceCluster])
def test_the_signature_and_the_docstring_name_every_option(cls: type) -> None:
    parameters = inspect.signature(cls).parameters
    assert {*OPTION_NAMES} <= parameters.keys()
    assert {parameters[name].kind for name in OPTION_NAMES} == {inspect.Parameter.KEYWORD_ONLY}
    described = re.findall(r"^(\w+)$", inspect.getdoc(cls) or "", re.M)
    lacks = [name for name in OPTION_NAMES if name not in described]
    assert not lacks, f"devctx-schema.yaml has no text for {lacks}"
    assert [name for name in described if name in OPTION_NAMES] == [*OPTION_NAMES]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("task_per_device", 1, "Did you mean tasks_per_device?"),
        ("colour", 1, "help(DevicePlugin)"),
        ("nvtx", True, "It is configuration: dask.config.set({'devctx.nvtx': True})"),
        ("pre_import", "wave", "dask.config.set({'devctx.pre-import': 'wave'})"),
        ("enable_jit_unspill", True, "Leave it out: device_memory_limit spills values"),
        ("pool", "cupy-async", "Write allocator='cupy-async', which is devctx.allocator"),
        ("rmm_pool_size", 0.5, "Write allocator={'pool_size': 0.5}"),
    ],
)
def test_an_argument_that_is_no_option_is_refused(name: str, value: Any, said: str) -> None:
    given: dict[str, Any] = {"zzz": 0, name: value}  # all are named
    with pytest.raises(TypeError, match=rf"no option '{name}'\. .*{re.escape(said)}.* 'zzz'"):
        DevicePlugin(**given)


@pytest.mark.parametrize("name", ["pool_size", "pool-size", "rmm_pool_size"])
def test_an_allocator_is_named_or_has_settings(name: str) -> None:
    assert DevicePlugin(allocator={name: 0.5}).rmm_pool_size == 0.5
    assert DevicePlugin(allocator={name: None}).allocator is None
    assert DevicePlugin(allocator="cupy-async").allocator == "cupy-async"
    with dask.config.set({f"devctx.allocator.{name}": "1 GB"}):
        assert DevicePlugin().rmm_pool_size == 10**9


async def _asynchronous(candidates: Any) -> Any:
    return candidates[0]


@pytest.mark.parametrize("policy", [min, 1, _asynchronous])
def test_a_policy_that_is_no_function_of_candidates_is_refused(policy: Any) -> None:
    with pytest.raises(TypeError, match="policy must be a function of one argument"):
        DevicePlugin(policy=policy)


def test_the_page_lists_every_key_with_its_default_and_variable() -> None:
    expected = {
        key: (
            json.dumps(value) if not isinstance(value, str) else value,
            "DASK_DEVCTX__" + key.upper().replace("-", "_"),
        )
        for key, value in config.defaults["devctx"].items()
    }
    page = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    rows = re.findall(r"^\| `devctx\.([a-z-]+)` \| `([^`]*)` \| `([A-Z_]+)` \|", page, re.M)
    here = {key: (default, variable) for key, default, variable in rows}
    wrong = {key for key in expected.keys() | here.keys() if expected.get(key) != here.get(key)}
    assert not wrong, f"the table in docs/configuration.md lacks, or has otherwise: {wrong}"


def test_variables_and_files_work(tmp_path: Path) -> None:
    given = {
        "devices": ("[0, 'GPU-12']", [0, "GPU-12"]),
        "devices-per-worker": ("2", 2),
        "unannotated": ("leave", "leave"),
        "lock-directory": ("/there", "/there"),
        "missing-device-timeout": ("5s", "5s"),
    }
    (tmp_path / "devctx.yaml").write_text("devctx:\n  tasks-per-device: 5\n")
    variables = {
        "DASK_DEVCTX__" + key.upper().replace("-", "_"): text for key, (text, _) in given.items()
    }
    code = (
        "import json; from dask_devctx import DevicePlugin, config\n"
        f"found = {{key: config.get(key) for key in {[*given]!r}}}\n"
        "print(json.dumps([found, DevicePlugin().options.tasks_per_device]))"
    )
    done = python("-c", code, env={"DASK_CONFIG": str(tmp_path), **variables})
    assert json.loads(done.stdout) == [{key: value for key, (_, value) in given.items()}, 5]


def test_an_argument_overrides_the_configuration() -> None:
    with dask.config.set({"devctx.tasks-per-device": 5, "devctx.devices": [1]}):
        assert (DevicePlugin().tasks_per_device, DevicePlugin().devices) == (5, (1,))
        given = DevicePlugin(tasks_per_device=2, devices=[3]).options
        assert (given.tasks_per_device, given.devices) == (2, (3,))


@pytest.mark.parametrize("devices", [1, "0,1", "GPU-8f3a"])
def test_devices_that_are_no_list_are_refused_with_what_to_write(devices: Any) -> None:
    for make in (DevicePlugin, LocalDeviceCluster):
        with pytest.raises(TypeError, match=r"devices is a list, got .*DASK_DEVCTX__DEVICES='\[0"):
            make(devices=devices)
    with dask.config.set({"devctx.devices": devices}), pytest.raises(TypeError, match="a list"):
        DevicePlugin()
    with pytest.raises(ValueError, match=r"devices names each device once, got \[0, 1, 0\]"):
        DevicePlugin(devices=[0, 1, 0])


@pytest.mark.parametrize("key", ["tasks-per-devices", "tasks_per_devices"])
def test_a_mistyped_key_is_named_with_the_one_that_was_meant(key: str) -> None:
    expected = (
        "there is no devctx.tasks-per-devices (in the environment "
        "DASK_DEVCTX__TASKS_PER_DEVICES). Did you mean devctx.tasks-per-device?"
    )
    with (
        dask.config.set({f"devctx.{key}": 2}),
        pytest.warns(UserWarning, match=f"^{re.escape(expected)}$"),
    ):
        DevicePlugin()


def test_a_variable_in_dasks_spelling_is_known() -> None:
    with dask.config.set({"devctx.tasks_per_device": 2, "devctx.simulated_host": "a"}):
        DevicePlugin()


UNUSABLE = [("history", -1), ("history", None), ("missing-device-timeout", "soon")]
UNUSABLE += [("move-inputs", 1), ("synchronize", "yes"), ("oom-retries", True)]


@pytest.mark.parametrize(("key", "value"), [*UNUSABLE, ("device-memory-limit", "lots")])
def test_what_a_worker_cannot_use_is_refused_by_its_key(key: str, value: object) -> None:
    said = rf"got {value!r} \(in the configuration devctx.{key}\)"
    with dask.config.set({f"devctx.{key}": value}), pytest.raises(ValueError, match=said):
        DevicePlugin()
    with pytest.raises(ValueError, match=r"^device_memory_limit must be .*, got 'none'$"):
        DevicePlugin(device_memory_limit="none")  # an argument is no configuration
