"""What runs farflung elsewhere than in a terminal (examples/deploy/): each file is held to what it speaks of.

No Docker engine, no cluster and no Slurm are needed: what they would do was not run, and the README there says so.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from farflung.console.main import app
from farflung.peer.settings import SETTINGS
from farflung.protocol.process.exit_codes import MISMATCH, REFUSED, USAGE
from rig.waiting import PATIENCE_S, eventually

sys.path.insert(0, str(Path(__file__).resolve().parent))
from rooms import ROOT

DEPLOY = ROOT / "examples" / "deploy"
METRICS = ("coordinator/run_metrics.py", "peer/agent/metrics.py", "protocol/process/metrics.py")
OF_PROMETHEUS = {"up"}
LABELS = {"job", "instance", "verdict", "state"}  # job and instance are Prometheus' own


def loaded(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


def problem_with(words: list[str]) -> str | None:
    """What the command line would say."""
    commands = get_command(app).commands  # type: ignore[attr-defined]
    try:
        commands[words[0]].make_context(words[0], words[1:])
    except Exception as error:  # the parser's own errors have no public home
        return f"{words}: {error!r}"
    return None


# ---- figures that are asked for are there ------------------------------------------------------------------------


def names_of_metrics() -> set[str]:
    found = set()
    for file in METRICS:
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    prefix = "" if node.func.id == "Family" else "farflung_"
                    if node.func.id in ("gauge", "counter", "by_label", "Family"):
                        found.add(prefix + first.value)
    return found


def expressions() -> Iterator[str]:
    dashboard = json.loads((DEPLOY / "grafana/farflung.json").read_text(encoding="utf-8"))
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for group in loaded("alerts.yml")[0]["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def unknown(expression: str, metrics: set[str]) -> set[str]:
    """Names and labels that nobody tells."""
    labels = set(re.findall(r"[{,]\s*(\w+)\s*(?:=~|!=|!~|=)", expression))
    asked = set(re.findall(r"\b(?:farflung|process)_\w+", expression))
    return (asked - metrics) | (labels - LABELS)


def test_the_dashboard_and_the_alarms_ask_for_figures_that_exist() -> None:
    metrics = names_of_metrics()
    assert {"farflung_version", "farflung_frames_total", "process_open_fds"} <= metrics, (
        "the reading is wrong"
    )
    found = list(expressions())
    assert len(found) > 20
    assert [(each, told) for each in found if (told := unknown(each, metrics))] == []
    assert unknown('farflung_versions{jobs="x"}', metrics) == {"farflung_versions", "jobs"}
    counters = {each for each in found if re.search(r"_total\b", each) and "rate(" not in each}
    assert counters == {'farflung_tokens_total{job="coordinator"}'}, "what only grows is shown by its rate"


def test_the_dashboard_is_one_picture() -> None:
    dashboard = json.loads((DEPLOY / "grafana/farflung.json").read_text(encoding="utf-8"))
    (source,) = loaded("grafana/provisioning/datasources/prometheus.yml")[0]["datasources"]
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        assert panel["datasource"]["uid"] == source["uid"]
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_overlay_for_a_standby_fits_over_the_compose_file() -> None:
    (compose,), (over,) = loaded("compose.yaml"), loaded("standby.yaml")
    assert set(over["services"]) == {"etcd", "coordinator"} and "etcd" not in compose["services"]
    words = [
        re.sub(r"\$\{.*\}", "a.example.org", each) for each in over["services"]["coordinator"]["command"]
    ]
    assert problem_with(words) is None and words.count("--public") == 2
    plain = compose["services"]["coordinator"]["command"]
    listen = words.index("--listen") + 1
    assert words[listen] == plain[plain.index("--listen") + 1], "the ports that compose.yaml lets through"
    if (tool := shutil.which("docker-compose")) is not None:
        own = {
            name: "a" for name in ("ETCD_NAME", "ETCD_HOST", "ETCD_ALL", "FARFLUNG_STORE", "FARFLUNG_OTHER")
        }
        own |= {**os.environ, "FARFLUNG_HOST": "a.example.org", "GRAFANA_PASSWORD": "secret"}
        files = [word for name in ("compose.yaml", "standby.yaml") for word in ("-f", str(DEPLOY / name))]
        done = subprocess.run([tool, *files, "config", "--quiet"], env=own, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_prometheus_takes_its_files() -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    done = subprocess.run(
        [tool, "check", "config", str(DEPLOY / "prometheus.yml")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr + done.stdout


# ---- containers --------------------------------------------------------------------------------------------------


def test_the_compose_file_fits_together() -> None:
    (compose,) = loaded("compose.yaml")
    services = compose["services"]
    assert set(services) == {"coordinator", "prometheus", "grafana"}
    for service in services.values():
        assert service["restart"] == "unless-stopped"
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            named = source in compose["volumes"]
            assert named or source == "./run.toml" or (DEPLOY / source).exists(), volume
    targets = [
        each for job in loaded("prometheus.yml")[0]["scrape_configs"] for each in job["static_configs"]
    ]
    port = services["coordinator"]["environment"]["FARFLUNG_METRICS"].rpartition(":")[2]
    assert f"coordinator:{port}" in targets[0]["targets"]
    build = services["coordinator"]["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT.resolve() and (ROOT / build["dockerfile"]).is_file()
    words = [re.sub(r"\$\{.*\}", "train.example.org", word) for word in services["coordinator"]["command"]]
    assert problem_with(words) is None
    assert problem_with([*words, "--no-such"]) is not None
    published = [each for service in services.values() for each in service.get("ports", [])]
    assert [each for each in published if "9464" in each or "9090" in each] == [], "they have no passwords"
    if (tool := shutil.which("docker-compose")) is not None:  # it asks no engine
        own = os.environ | {"FARFLUNG_HOST": "train.example.org", "GRAFANA_PASSWORD": "secret"}
        command = [tool, "-f", str(DEPLOY / "compose.yaml"), "config", "--quiet"]
        done = subprocess.run(command, env=own, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_every_port_that_a_host_has_is_let_through() -> None:
    """The door's, the members' and the relay's: without the last one, peers at home never meet."""

    def ports_in(words: list[str]) -> list[int]:
        return [int(port) for port in words[words.index("--listen") + 1].split(":")[1:]]

    compose = loaded("compose.yaml")[0]["services"]["coordinator"]
    service, coordinator, _ = loaded("kubernetes.yaml")
    (container,) = coordinator["spec"]["template"]["spec"]["containers"]
    unit = (DEPLOY / "farflung-coordinator.service").read_text(encoding="utf-8")
    (line,) = re.findall(r"^ExecStart=(.*)$", unit, re.M)
    asked = ports_in(compose["command"])
    assert len(asked) == 3 and asked == ports_in(container["args"]) == ports_in(line.split())
    assert compose["ports"] == [f"{port}:{port}" for port in asked]
    assert [each["port"] for each in service["spec"]["ports"]] == asked
    assert set(asked) <= {each["containerPort"] for each in container["ports"]}


def test_a_coordinator_reads_where_to_tell_figures_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the images' health check needs it."""
    monkeypatch.setenv("FARFLUNG_METRICS", "9464")
    command = get_command(app).commands["coordinate"]  # type: ignore[attr-defined]
    assert command.make_context("coordinate", ["run.toml"]).params["metrics"] == "9464"
    assert "metrics" in SETTINGS


def test_the_image_has_no_root_a_health_check_and_nothing_of_the_checkout() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    stages = re.split(r"^FROM ", text, flags=re.M)[1:]
    named = {stage.splitlines()[0].rpartition(" AS ")[2]: stage for stage in stages}
    assert set(named) == {"wheel", "base", "cpu", "cuda"}
    for target in ("cpu", "cuda"):
        assert named[target].splitlines()[0].startswith("base ")
        assert re.findall(r"^USER (.*)$", named[target], re.M)[-1] == "10001"
    assert "HEALTHCHECK" in named["base"] and "/healthz" in named["base"]
    (check,) = re.findall(r'CMD (\["python", "-c".*\])$', named["base"], re.M)
    compile(json.loads(check)[2], "health check", "exec")
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert {".git", ".venv", "**/*.pem", "runs"} <= set(ignored)
    used = {"pyproject.toml", "README.md", "LICENSE", "coordinator", "peer", "examples"}
    assert not used & set(ignored), "the wheel is made of these"
    if (tool := shutil.which("hadolint")) is not None:
        ignore = [word for rule in ("DL3008", "DL3013", "DL3042") for word in ("--ignore", rule)]  # versions
        done = subprocess.run([tool, *ignore, str(DEPLOY / "Dockerfile")], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_the_sample_for_kubernetes_fits_together() -> None:
    kinds = [(each["kind"], each["metadata"]["name"]) for each in loaded("kubernetes.yaml")]
    assert kinds == [
        ("Service", "farflung-coordinator"),
        ("StatefulSet", "farflung-coordinator"),
        ("StatefulSet", "farflung-peer"),
    ]
    for each in loaded("kubernetes.yaml")[1:]:
        spec = each["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        known = {f"FARFLUNG_{name.upper()}" for name in SETTINGS} | {"FARFLUNG_JOIN_URL", "POD_IP"}
        assert {variable["name"] for variable in container["env"]} <= known
        there = {volume["name"] for volume in spec["volumes"]}
        there |= {volume["metadata"]["name"] for volume in each["spec"]["volumeClaimTemplates"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == there
        assert spec["securityContext"]["runAsNonRoot"] is True
        words = [word.replace("$(FARFLUNG_JOIN_URL)", "URL") for word in container["args"]]
        assert problem_with(words) is None
    assert loaded("kubernetes.yaml")[1]["spec"]["replicas"] == 1


# ---- services ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["coordinator", "peer"])
def test_the_units_come_back_by_themselves(name: str, tmp_path: Path) -> None:
    text = (DEPLOY / f"farflung-{name}.service").read_text(encoding="utf-8")
    assert "StartLimitIntervalSec=0" in text and re.search(r"^Restart=(always|on-failure)$", text, re.M)
    (command,) = re.findall(r"^ExecStart=/opt/farflung/bin/farflung (.*)$", text, re.M)
    assert problem_with(command.replace("${FARFLUNG_JOIN_URL}", "URL").split()) is None
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed (Debian: systemd)")
    unit = tmp_path / f"farflung-{name}.service"
    unit.write_text(text.replace("/opt/farflung/bin/farflung", sys.executable))
    done = subprocess.run([tool, "verify", str(unit)], capture_output=True, text=True)
    ours = [line for line in done.stderr.splitlines() if unit.name in line]
    assert done.returncode == 0 and ours == [], done.stderr


def test_a_peer_that_does_not_fit_the_run_looks_again_and_any_other_end_waits_for_nothing(
    tmp_path: Path,
) -> None:
    """Its host may upgrade, or this machine: nobody has to remember to start it."""
    text = (DEPLOY / "farflung-peer.service").read_text(encoding="utf-8")
    (never,) = re.findall(r"^RestartPreventExitStatus=(.*)$", text, re.M)
    assert str(MISMATCH) not in never.split() and {str(USAGE), str(REFUSED)} == set(never.split())
    (line,) = re.findall(r"^ExecStopPost=(.*)$", text, re.M)
    (patience,) = re.findall(r"^TimeoutStopSec=(.*)$", text, re.M)
    sleep = tmp_path / "sleep"
    sleep.write_text(f'#!/bin/sh\ntest "$1" -lt {patience} && touch {tmp_path}/slept\n')
    sleep.chmod(0o755)
    for code in (0, 1, 30, MISMATCH):
        own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "EXIT_STATUS": str(code)}
        assert subprocess.run(shlex.split(line), env=own).returncode == 0
        assert (tmp_path / "slept").exists() == (code == MISMATCH)


def test_a_slurm_job_hands_the_signal_on_and_ends_as_its_peer_does(tmp_path: Path) -> None:
    peer = tmp_path / "farflung"
    peer.write_text(
        "#!/bin/bash\n"
        "trap 'echo left > \"$FARFLUNG_HOME/said\"; exit 7' TERM\n"
        'echo "$@" > "$FARFLUNG_HOME/began"\n'
        "while true; do sleep 0.05; done\n"
    )
    peer.chmod(peer.stat().st_mode | stat.S_IXUSR)
    own = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "FARFLUNG_KEYS": str(tmp_path),
        "SLURM_ARRAY_TASK_ID": "3",
    }
    script = ["bash", str(DEPLOY / "slurm.sh")]
    unset = subprocess.run(script, env=os.environ | own, capture_output=True, text=True)
    assert unset.returncode != 0 and "set it to the join URL" in unset.stderr
    with subprocess.Popen(script, env=os.environ | own | {"FARFLUNG_JOIN_URL": "URL"}) as job:
        began = tmp_path / "array-3" / "began"
        eventually(lambda: began.exists() and began.read_text(), "the peer starts")
        assert problem_with(began.read_text().split()) is None
        job.send_signal(signal.SIGINT)
        assert job.wait(PATIENCE_S) == 7
    assert (tmp_path / "array-3" / "said").read_text() == "left\n"
