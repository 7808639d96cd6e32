"""A hostile host, key by key, against a real volunteer: which files it opens because of a manifest, and what it says.

    python benchmarks/hostile_host.py [--only start.from] [--seconds 20]

For each hostile value of each key (tests/rig/hostile_manifests.py) a coordinator with that manifest is started, and a
volunteer joins it whose home has keys, credentials and weights that fit the run's model.  It runs under strace; where
that is not to be had, Python's own audit events are looked at.  Counted: files of that home, and any others, that
it opens and that a run with the usual manifest does not make it open; and how often a secret of that home (the mark in
its files, the name of a file, the hash of the weights) is in anything that it says to the coordinator, before it is
encrypted.  Values that a manifest may not have end at the coordinator, which is told, too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# rig/ is what tests and benchmarks share.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from blake3 import blake3

from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest
from rig.hostile_manifests import HOSTILE, MARK, Case, cases, private_home
from rig.ports import free_ports

MODEL = {"layers": 1, "width": 32, "heads": 4, "context": 32}
AS_VICTIM = "--as-victim"
OPENED = re.compile(r'open(?:at2?)?\(.*?"([^"]+)".*\) = \d+')
WAIT_S = 60.0


def victim(words: list[str]) -> None:
    """`farflung join`, with what it says to the coordinator written down as it is before it is encrypted."""
    from farflung.console.main import main
    from farflung.protocol import messages

    place, listed = words[0], words[1]
    encode = messages.encode

    def heard(*arguments: object, **more: object) -> bytes:
        raw: bytes = encode(*arguments, **more)  # type: ignore[arg-type]
        with open(place, "ab") as file:
            file.write(raw)
        return raw

    messages.encode = heard  # type: ignore[assignment]
    if listed:
        out = Path(listed).open("a", buffering=1)  # noqa: SIM115 (until the process ends)
        sys.addaudithook(
            lambda event, what: out.write(f'open("{what[0]}") = 3\n') if event == "open" else None
        )
    sys.argv = ["farflung", *words[2:]]
    main()


def weights(home: Path) -> bytes:
    import torch
    from safetensors.torch import save

    from farflung.peer.builtin.llama import Llama
    from farflung.protocol.manifest import ModelSection

    torch.manual_seed(1)
    model = Llama(ModelSection(**MODEL), 7)
    return save({name: each.clone() for name, each in model.state_dict().items() if name != "lm_head.weight"})


class Trial:
    def __init__(self, folder: Path, home: Path, number: int) -> None:
        self.folder, self.home = folder / str(number), home
        self.folder.mkdir()
        self.said, self.opened = self.folder / "said", self.folder / "opened"

    def run(self, manifest: Manifest, seconds: float) -> tuple[set[str], bytes, str]:
        """Files that were opened; what was said; the volunteer's last line."""
        toml = self.folder / "run.toml"
        toml.write_text(_as_toml(manifest))
        port = next(iter(free_ports()))
        host = subprocess.Popen(
            [sys.executable, "-m", "farflung", "coordinate", str(toml), "--listen", f"127.0.0.1:{port}", "--json"],
            stdout=subprocess.PIPE, stderr=(self.folder / "host.log").open("w"), text=True,
        )  # fmt: skip
        try:
            assert host.stdout is not None
            line = host.stdout.readline()
            if not line:
                return set(), b"", "the coordinator refuses it"
            return self._join(json.loads(line)["url"], seconds)
        finally:
            host.terminate()
            host.wait(20)

    def _join(self, url: str, seconds: float) -> tuple[set[str], bytes, str]:
        own = self.folder / "own"
        own.mkdir()
        strace = shutil.which("strace")
        listed = "" if strace else str(self.opened)
        words = [sys.executable, __file__, AS_VICTIM, str(self.said), listed, "join", "--plain",
                 "--identity", str(own / "id.pem"), url]  # fmt: skip
        if strace:
            words = [strace, "-f", "-qq", "-e", "trace=open,openat,openat2", "-o", str(self.opened), *words]
        environ = {**os.environ, "HOME": str(self.home), "XDG_CACHE_HOME": str(own), "FARFLUNG_HOME": str(own),
                   "OMP_NUM_THREADS": "1"}  # fmt: skip
        log = self.folder / "victim.log"
        began = time.monotonic()
        with log.open("w") as out:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environ, start_new_session=True
            )
            while process.poll() is None and time.monotonic() - began < WAIT_S + seconds:
                time.sleep(0.5)
                if "in touch with the coordinator" in log.read_text():
                    seconds -= 0.5
                if seconds <= 0:
                    break
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # strace alone would not pass it on
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        calls = self.opened.read_text(errors="replace").splitlines() if self.opened.exists() else []
        opened = {path for call in calls for path in OPENED.findall(call)}
        # What was not there before is nobody else's: compilers make files in /tmp, and open them again.
        opened -= {path for call in calls if "O_EXCL" in call for path in OPENED.findall(call)}
        lines = log.read_text().strip().splitlines() or [""]
        return opened, self.said.read_bytes() if self.said.exists() else b"", lines[-1]


def _as_toml(manifest: Manifest) -> str:
    told = manifest.model_dump(mode="json", exclude={"admission"})
    return "\n".join(
        f"[{section}]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in content.items())
        for section, content in told.items()
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", help="this key, such as start.from")
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="of each volunteer, once it is in the run"
    )
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="hostile-host-"))
    home = private_home(folder, weights(folder))
    private = blake3((home / "private.safetensors").read_bytes()).hexdigest()
    secrets = (
        MARK.encode(),
        private.encode(),
        bytes.fromhex(private),
        b"private.safetensors",
        str(home).encode(),
    )
    base = {section: dict(content) for section, content in Manifest().model_dump(mode="json").items()}
    base["model"] |= MODEL
    usual, _, last = Trial(folder, home, 0).run(Manifest.model_validate(base), options.seconds)
    print(f"with the usual manifest {len(usual)} files are opened; {last}")
    theirs, others, bytes_said, refused, tried = set[str](), set[str](), 0, 0, 0
    for number, case in enumerate(cases(home, private, [options.only] if options.only else HOSTILE), start=1):
        manifest = _small(case)
        if manifest is None:
            refused += 1
            continue
        opened, said, last = Trial(folder, home, number).run(manifest, options.seconds)
        tried += 1
        found = {each for each in opened - usual if each.startswith(str(home))}
        more = {each for each in opened - usual if not _own(each, folder / str(number)) and each not in found}
        leaked = sum(said.count(each) for each in secrets)
        theirs, others, bytes_said = theirs | found, others | more, bytes_said + leaked
        print(
            f"{case.key:24} files of the home {len(found)}, others {len(more)}, secrets said {leaked}: {last[:110]}"
        )
    print(
        f"{tried} manifests joined, {refused} that no peer takes: {len(theirs)} files of the victim's home opened "
        f"{sorted(theirs)}, {len(others)} others {sorted(others)[:10]}, {bytes_said} secrets said"
    )
    shutil.rmtree(folder)
    return int(bool(theirs or others or bytes_said))


def _small(case: Case) -> Manifest | None:
    """With the model that the private weights fit, where the model is not what is hostile."""
    try:
        content = json.loads(case.content)
        if not case.key.startswith("model."):
            content["model"] |= MODEL
        return Manifest.model_validate_json(json.dumps(content))
    except UserError:
        return None
    except ValueError:
        return None


def _own(path: str, folder: Path) -> bool:
    """Of this trial, of Python and its packages, of the system's libraries, and what is no file on a disk."""
    here = (
        str(folder),
        sys.prefix,
        sys.base_prefix,
        str(Path(__file__).resolve().parents[1]),
        "/usr/",
        "/lib",
    )
    return path.startswith(
        (*here, "/proc/", "/sys/", "/dev/", "/etc/ssl", "/etc/ld.so", "/tmp/farflung-")
    ) or (not path.startswith("/"))


if __name__ == "__main__":
    if sys.argv[1:2] == [AS_VICTIM]:
        victim(sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1:]))
