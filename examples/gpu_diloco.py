"""One GPU as four peers of a run (int8, 50 steps a round), beside one process that learns from as many samples.

python examples/gpu_diloco.py           a Llama of 85 million parameters, 1,000 steps, on a GPU with 40 GB or more
python examples/gpu_diloco.py --tiny    a small one, on a CPU too: that it works, and nothing about a GPU

It prints both loss curves; with --json, one line for programs.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from gpu_diloco_peer import BATCH, EVERY, PEERS, ROUNDS

SCRIPT = str(Path(__file__).with_name("gpu_diloco_peer.py"))
NOTHING_RAN = 2
RUN = """run = {{ name = "gpu-diloco", rounds = {}, min_peers = {} }}
model = {{ kind = "" }}
data = {{ source = "", batch = {} }}
round = {{ sync_every = {}, codec = "int8", gather_codec = "int8", deadline_s = 600.0 }}"""


def measured(size: str, folder: Path) -> dict:
    (folder / "run.toml").write_text(RUN.format(ROUNDS[size], PEERS, BATCH[size], EVERY))
    words = ["coordinate", "--listen", "127.0.0.1:0", "--exit-when-done", "--json", str(folder / "run.toml")]
    host = subprocess.Popen([sys.executable, "-m", "farflung", *words], stdout=subprocess.PIPE, text=True)
    url, outs = json.loads(host.stdout.readline())["url"], [str(folder / f"{n}.json") for n in range(PEERS)]
    peers = [subprocess.Popen([sys.executable, SCRIPT, size, out, url, out + ".pem"]) for out in outs]
    if any([each.wait() for each in (*peers, host)]):
        sys.exit("a peer of the run failed; its last words are above")
    subprocess.run([sys.executable, SCRIPT, size, str(folder / "alone.json")], check=True)
    alone, *four = [json.loads(Path(each).read_text()) for each in (folder / "alone.json", *outs)]
    curve = []
    for first in range(0, ROUNDS[size] * EVERY, EVERY):  # the mean of each round's steps
        of_all = [statistics.fmean(each["losses"][first : first + EVERY]) for each in (*four, alone)]
        curve.append([first + EVERY, statistics.fmean(of_all[:-1]), of_all[-1]])
    ends = [each["held_out"] for each in four]
    return {**alone, "losses": curve, "held_out": [ends[0], alone["held_out"]], "equal": len({*ends}) == 1}


if __name__ == "__main__":
    tiny = "--tiny" in sys.argv
    if not (tiny or torch.cuda.is_available()):
        print("NOT RUN: torch finds no CUDA device here; --tiny runs on a CPU", file=sys.stderr)
        sys.exit(NOTHING_RAN)
    with tempfile.TemporaryDirectory() as place:
        found = measured("tiny" if tiny else "gpu", Path(place))
    on = "on a GPU" if found["device"] == "cuda" else "on a CPU; NOTHING HERE WAS MEASURED ON A GPU"
    lines = [f"{found['values'] / 1e6:.1f} million parameters, {on}", "step  four peers  one process"]
    lines += [f"{step:4}  {peers:10.3f}  {alone:11.3f}" for step, peers, alone in found["losses"]]
    lines.append("held out: {:.3f} and {:.3f}".format(*found["held_out"]))
    print(json.dumps(found) if "--json" in sys.argv else "\n".join(lines))
