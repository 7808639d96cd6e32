"""Runs of real processes over encrypted loopback: the promises as a user would see them.

Runs go on until their test ends them, if they are not over: see conftest.py for what may be waited for.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from farflung.console.history.audit import audit
from farflung.console.history.history import read_folder
from farflung.console.main import app
from farflung.peer.builtin.corpus import held_out_bytes
from farflung.peer.builtin.llama import Llama
from farflung.protocol.manifest import Manifest
from farflung.protocol.process import exit_codes
from rig import own_rules
from rig.waiting import is_running

pytestmark = pytest.mark.slow


def alive(status: dict[str, Any]) -> list[dict[str, Any]]:
    return [m for m in status["members"] if m["alive"]]


def is_finished(status: dict[str, Any]) -> bool:
    return bool(status["phase"] == "finished")


def steps_of(stage: Any, name: str) -> int:
    """Steps that its trainer had taken when it froze last."""
    return max((int(each["step"]) for each in stage.events(name) if each["event"] == "frozen"), default=0)


def trained(count: int, version: int = 1) -> Any:
    """So many peers take part, at this version or a later one."""
    return lambda s: s["version"] >= version and sum(m["participating"] for m in alive(s)) >= count


def end(stage: Any, name: str = "coordinator") -> int:
    """As an operator ends it: a finished run's coordinator may stay, so that its last status can be looked at."""
    stage.processes[name].send_signal(signal.SIGTERM)
    return int(stage.wait(name))


def same_model(*paths: Path) -> bool:
    first, *others = (load_file(path) for path in paths)
    return all(set(o) == set(first) and all((o[k] == first[k]).all() for k in first) for o in others)


def held_out_loss(toml: Path, weights: Path) -> float:
    """By what the run left behind: sixteen windows at even distances."""
    manifest = Manifest.from_toml(toml.read_text(), "run.toml")
    model = Llama(manifest.model, 0)
    model.load_state_dict(load_file(weights), strict=False)
    rows = held_out_bytes(manifest.model.context)
    with torch.no_grad():
        found = [model.loss(rows[(len(rows) - 1) * window // 15][None]).item() for window in range(16)]
    return sum(found) / 16


def test_P1_two_peers_finish_with_one_model_and_one_digest_per_version(stage: Any) -> None:
    stage.write_run(rounds=8)
    toml = stage.folder / "run.toml"
    toml.write_text(toml.read_text() + '[eval]\nsource = "python-stdlib"\nwindows = 16\n')
    stage.coordinate()
    stage.join("ann")
    stage.join("bob")
    last = stage.until(is_finished, "the run is finished")
    assert last["version"] == 8 and len(last["rounds"]) == 8
    assert all(len(r["included"]) == 2 and not r["excluded"] and r["bytes"] >= 0 for r in last["rounds"])
    held_out = stage.until(lambda s: "version" in s["held_out"], "the last version is evaluated")["held_out"]
    assert [stage.wait("ann"), stage.wait("bob"), end(stage)] == [0, 0, 0]
    assert (held_out["version"], held_out["windows"], len(held_out["peers"])) == (8, 16, 2)
    assert held_out["loss"] == pytest.approx(held_out_loss(toml, stage.model("ann")), abs=1e-4)
    report = audit(read_folder(stage.folder))
    assert report.kept, "\n".join(report.lines())
    sealed = [each for name in ("ann", "bob") for each in stage.events(name) if each["event"] == "sealed"]
    digests = {(each["version"], each["digest"]) for each in sealed}
    assert len([each for each in sealed if each["version"] == 8]) == 2
    assert len(digests) == len({version for version, _ in digests}), "one digest per version"
    assert same_model(stage.model("ann"), stage.model("bob"))
    leases = last["leases"]
    assert leases["committed"] <= leases["leased"] and leases["committed"] >= 8 * 10 * 4, (
        "one of them takes all steps"
    )


@pytest.mark.forked_peers
def test_P10_ctrl_c_leaves_cleanly(stage: Any) -> None:
    stage.write_run(min_peers=1)
    stage.coordinate()
    stage.join("ann")
    stage.join("bob")
    before = stage.until(trained(2, 2), "the run has begun")
    stage.processes["bob"].send_signal(signal.SIGINT)
    assert stage.wait("bob") == 0
    alone = stage.until(lambda s: len(alive(s)) == 1, "bob is gone")
    after = stage.until(trained(1, alone["version"] + 2), "ann goes on")
    said = CliRunner().invoke(app, ["generate", stage.url, "def f(", "--tokens", "8"])
    assert said.exit_code == 0 and said.stdout.startswith("def f("), said.output
    assert "from the peer on this machine" in said.stderr
    assert [m["state"] for m in after["members"] if not m["alive"]] == ["left"]
    assert "left the run" in stage.log("bob") and "Traceback" not in stage.log("bob")
    data = after["leases"]
    assert data["leased"] == data["committed"] + data["held"] + data["returned"]
    assert data["returned"] > before["leases"]["returned"], "what bob had not used was free at once"


@pytest.mark.forked_peers
def test_another_model_is_refused_with_the_differing_field(stage: Any) -> None:
    stage.write_run(min_peers=1)
    stage.coordinate()
    stage.join("ann")
    stage.until(trained(1), "ann trains")
    script = stage.folder / "other.py"
    script.write_text(
        "import farflung, torch\n"
        "model = torch.nn.Linear(3, 2)\n"
        "farflung.join(None, model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
    )
    stage.join("eve", "--script", str(script))
    assert stage.wait("eve") == 21
    assert "the model differs from the run's: tensor 0" in stage.log("eve")
    assert "Traceback" not in stage.log("eve").split("cannot take part")[1]


def test_status_prints_one_json_object_and_mistakes_one_line(
    stage: Any, say: Callable[..., tuple[int, str, str]]
) -> None:
    stage.write_run(rounds=3, min_peers=1)
    stage.coordinate()
    found = stage.call("status", stage.url, "--json")
    status = json.loads(found.stdout)
    assert found.returncode == 0 and found.stdout.count("\n") == 1
    assert {"run", "phase", "version", "tokens", "loss", "members", "rounds"} <= status.keys()
    assert status["run"] == "small" and status["version"] == 0 and status["members"] == []
    wrong_run = stage.call("status", stage.url.replace("/small", "/other"))
    assert wrong_run.returncode == 20 and "this coordinator runs 'small', not 'other'" in wrong_run.stderr
    wrong_port = stage.call("status", stage.url.replace(f":{stage.port}", ":1"))
    assert wrong_port.returncode == 30 and wrong_port.stderr.count("\n") == 1
    for words in (
        ["status", "nonsense"],
        ["coordinate", "missing.toml"],
        ["join", stage.url, "--no-such"],
        ["fly"],
    ):
        code, _, told = say(*words)
        assert code == 2 and "Traceback" not in told, words


@pytest.mark.forked_peers
def test_nothing_is_left_behind(stage: Any) -> None:
    stage.write_run(rounds=4, min_peers=1)
    stage.coordinate("--exit-when-done")
    agent = stage.join("ann")
    assert stage.wait("ann") == 0 and stage.wait("coordinator") == 0
    assert not is_running(stage.trainer_of("ann"))
    for home in (Path("/dev/shm"), Path("/tmp")):
        assert not list(home.glob(f"farflung-{agent.pid}-*"))


OWN_MODEL = """
import torch
from torch import nn
import farflung

torch.manual_seed(3)
model = nn.Sequential(nn.Linear(16, 32), nn.{act}(), nn.Linear(32, 1))
data = torch.randn(4096, 16)
with farflung.join(None, model, torch.optim.AdamW(model.parameters(), lr=3e-3)) as run:
    for batch in run.batches(data):
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        if run.step_count == {nan_at}:
            loss = loss * float("nan")
        loss.backward()
        run.step(loss)
"""


def begin_with_scripts(stage: Any, **scripts: dict[str, Any]) -> None:
    """A run of a model that each peer's own script brings."""
    stage.write_run()
    run_toml = stage.folder / "run.toml"
    text = run_toml.read_text().replace("[model]\n", '[model]\nkind = ""\n')
    run_toml.write_text(text.replace("[data]\n", '[data]\nsource = ""\n'))
    stage.coordinate()
    for name, values in scripts.items():
        (stage.folder / f"{name}.py").write_text(OWN_MODEL.format(**({"act": "GELU", "nan_at": -1} | values)))
        stage.join(name, "--script", str(stage.folder / f"{name}.py"))


@pytest.mark.hard
@pytest.mark.forked_peers
def test_one_NaN_in_one_peer_of_two_costs_it_one_round_and_the_other_none(stage: Any) -> None:
    """With min_peers = 2.  AdamW's moments are NaN, too, after such a step."""
    begin_with_scripts(stage, ann={}, bob={"nan_at": 35})
    stage.until(lambda s: s["version"] >= 12, "both train on")
    assert "is not finite: the model is back at version" in stage.log("bob")
    rounds = stage.status()["rounds"]
    assert [each["version"] for each in rounds] == list(range(1, len(rounds) + 1)), "no round was aborted"
    alone = [each["version"] for each in rounds if len(each["included"]) == 1]
    assert len(alone) == 1, alone
    assert "nan" not in str([each["loss"] for each in stage.status()["members"]]).lower()


@pytest.mark.hard
@pytest.mark.forked_peers
def test_peers_whose_models_compute_something_else_are_told_in_the_first_round(stage: Any) -> None:
    """GELU here, ReLU there: names, shapes and dtypes are the same."""
    begin_with_scripts(stage, ann={}, bob={"act": "ReLU"}, cid={})
    stage.until(trained(3, 3), "three peers take part")

    def named(status: dict[str, Any]) -> list[str]:
        return [each["name"] for each in alive(status) if "computes something else" in str(each)]

    stage.until_log("bob", "its model computes something else")
    stage.until(lambda s: len(named(s)) == 1, "one of the two others, if it was named before, no longer is")
    [bob] = named(stage.status())
    notes = [str(each.get("text", "")) for each in stage.events("coordinator")]
    told = [text for text in notes if "computes something else" in text]
    assert len(told) <= 2, "of the first two that say so the one that came later may be named"
    assert told[-1].startswith(f"{bob}: ")


def test_P1_a_run_whose_step_codec_and_merge_rule_are_a_packages(stage: Any, tmp_path: Path) -> None:
    """One who lacks the package is told so in a line, and the run goes on without."""
    folder = tmp_path / "installed"
    own_rules.write_example(folder)
    stage.write_run(rounds=6)
    text = (stage.folder / "run.toml").read_text()
    for section, key in (("outer", 'step = "lion"\nlr = 0.01'), ("round", 'codec = "ternary"')):
        text = text.replace(f"\n[{section}]\n", f"\n[{section}]\n{key}\n")
    (stage.folder / "run.toml").write_text(f'{text}\n[merge]\npolicy = "median"\naudit = 0\n')
    stage.environ["PYTHONPATH"] = str(folder)
    stage.coordinate("--exit-when-done")
    del stage.environ["PYTHONPATH"]
    stage.join("lacks")
    assert stage.wait("lacks") == exit_codes.USAGE
    *_, told = stage.log("lacks").splitlines()
    assert 'no installed package has the outer step "lion" (there is none)' in told, stage.log("lacks")
    assert told.endswith("with the same packages beside it?")
    stage.environ["PYTHONPATH"] = str(folder)
    for name in "abc":
        stage.join(name)
    assert [stage.wait(name) for name in "abc"] == [0, 0, 0], stage.log("a")
    assert same_model(*map(stage.model, "abc"))


def test_what_a_peer_knows_and_has_not_sent_waits_on_its_disk_until_it_is_back(stage: Any) -> None:
    stage.write_run(sync_every=5)
    text = (stage.folder / "run.toml").read_text()
    (stage.folder / "run.toml").write_text(
        text.replace("\n[outer]\nmomentum = 0.5\n", '\n[outer]\nstep = "sparse"\n')
    )
    stage.coordinate()
    for name in "ab":
        stage.join(name)
    stage.until(trained(2, version=2), "both take part")
    stage.processes["a"].send_signal(signal.SIGINT)
    assert stage.wait("a") == 0
    left = [path for kind in ("unsent", "optimizer") for path in stage.folder.glob(f"**/*.{kind}")]
    assert len(left) == 2 and all(path.stat().st_size > 1000 for path in left)
    version = stage.status()["version"]
    stage.join("a")
    stage.until(trained(2, version=version + 2), "it is back")
    assert not any(path.exists() for path in left) and "is lost" not in stage.log("a")
