"""What a hostile host may write into each key of a manifest, and a home of its victim that it would like to see.

For tests and for benchmarks/hostile_host.py.  A key of protocol/manifest.py without a row here, or in the
table of docs/security.md, fails tests/house/test_hostile_host.py.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from farflung.protocol.errors import UserError
from farflung.protocol.manifest import COORDINATORS_OWN, Manifest

MARK = "SECRET-of-the-victim"  # in each file of its home, but for its weights
HUGE, TEXT = (
    2**53 - 1,
    ["\x1b]0;x\x07", "../../.ssh/id_rsa", "/etc/passwd", "$(id)", "__import__('os')", "x" * 300],
)
NUMBERS: list[Any] = [0, 1, -1, HUGE, 2**63, 1e308, True, "1", None]
# Keys that need others beside them to be taken.
BATCHES = {
    "merge": {"policy": "mean"},
    "outer": {"step": "adamw"},
    "round": {"fragments": 1},
    "pipeline": {"batch": 4},
}
# HOME: the victim's.
PLACES = [
    "HOME/private.safetensors", "file://HOME/private.safetensors", "HOME/run/1a2b3c4d-e0000-v00000001", "/etc/passwd",
    "/proc/self/environ", "/dev/zero", "https://127.0.0.1:9/a.safetensors", "https://localhost:9/a.safetensors",
    "https://[::1]:9/a.safetensors", "https://169.254.169.254/latest/meta-data", "https://10.0.0.1/a.safetensors",
    "http://127.0.0.1:9/a", "ftp://127.0.0.1/a", "memory://a",
    "simplecache::file://HOME/private.safetensors", "https://127.0.0.1:9/a::file://HOME/private.safetensors",
]  # fmt: skip
HF = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256,
    "max_position_embeddings": 64, "intermediate_size": 96,
}  # fmt: skip
DATA = [each.replace(".safetensors", ".bin") for each in PLACES] + ["https://127.0.0.1:9/*.parquet"]

HOSTILE: dict[str, list[Any]] = {
    "run.name": TEXT,
    "run.seed": NUMBERS,
    "run.min_peers": [1, 1024, *NUMBERS],
    "run.max_peers": [65536, *NUMBERS],
    "run.rounds": NUMBERS,
    "model.kind": ["hf", "os.system", "HOME/model.py", "torch.hub", *TEXT],
    "model.preset": ["7B", "HOME/model.safetensors", *TEXT],
    "model.layers": [1024, *NUMBERS],
    "model.width": [65536, 65532, *NUMBERS],
    "model.heads": [1024, *NUMBERS],
    "model.kv_heads": [1024, *NUMBERS],
    "model.head_dim": [1024, *NUMBERS],
    "model.mlp_width": [2**18, *NUMBERS],
    "model.context": [2**20, *NUMBERS],
    "model.vocab": [2**22, *NUMBERS],
    "model.rope_theta": [1, 1e9, *NUMBERS],
    "model.norm_eps": [1e-12, *NUMBERS],
    "model.qk_norm": [True, 1],
    "model.tied": [False, 1],
    "model.config": [
        HF,
        *({**HF, "model_type": each} for each in ["gpt2", "auto", *TEXT]),
        *({**HF, "num_hidden_layers": each} for each in [1024, *NUMBERS]),
        *({**HF, "intermediate_size": each} for each in [2**18, *NUMBERS]),
        *({**HF, "rope_theta": each} for each in NUMBERS),
        {**HF, "attn_implementation": "kernels-community/flash-attn"},
        {**HF, "_attn_implementation": "kernels-community/flash-attn"},
        {**HF, "auto_map": {"AutoModelForCausalLM": "HOME/model.py"}},
        {**HF, "trust_remote_code": True, "_name_or_path": "HOME/model"},
        {**HF, "quantization_config": {"quant_method": "gptq"}},
        *TEXT,
    ],
    "start.from": PLACES,
    "start.hash": ["HASH", "0" * 64, *TEXT],
    "start.momentum": ["keep", *TEXT],
    "data.source": [
        *DATA,
        DATA[6:9],
        ["https://127.0.0.1:9/a.bin"] * 1024,
        ["https://127.0.0.1:9/a.bin"] * 1025,
    ],
    "data.length": [2**24, *NUMBERS],
    "data.dtype": ["object", "O", *TEXT],
    "data.column": TEXT,
    "data.batch": [65536, *NUMBERS],
    "data.lease_samples": [2**24, *NUMBERS],
    "data.tokenizer": ["HASH", "0" * 64, "HOME/tokenizer.json", *TEXT],
    "eval.source": ["python-stdlib", *DATA, DATA[6:9], ["https://127.0.0.1:9/a.bin"] * 1025],
    "eval.every_rounds": ["auto", *NUMBERS, *TEXT],
    "eval.windows": [16, 1024, *NUMBERS],
    "eval.bytes_per_token": [64, *NUMBERS],
    "inner.optimizer": ["adamw8bit", "galore", "apollo", "soap", "os.system", "HOME/optimizer.py", *TEXT],
    "inner.lr": NUMBERS,
    "inner.betas": [[0.0, 0.0], [0.999, 0.999], [1, 1], [0.9] * 1000],
    "inner.weight_decay": NUMBERS,
    "inner.warmup_steps": NUMBERS,
    "inner.schedule": ["wsd", "cosine", *TEXT],
    "inner.clip": NUMBERS,
    "inner.precision": ["bf16", *TEXT],
    "outer.step": ["adamw", "sparse", *TEXT],
    "outer.lr": NUMBERS,
    "outer.momentum": [0.999, *NUMBERS],
    "outer.schedule": ["overlap", *TEXT],
    "round.sync_every": NUMBERS,
    "round.period_s": NUMBERS,
    "round.start_rounds": NUMBERS,
    "round.codec": ["topk", "fp32", *TEXT],
    "round.gather_codec": ["sparse", "fp32", *TEXT],
    "round.chunk_kb": [16384, *NUMBERS],
    "round.fragments": [64, *NUMBERS],
    "round.deadline_s": NUMBERS,
    "round.scatter_grace_s": NUMBERS,
    "round.keep_results": [1024, *NUMBERS],
    "round.group": [128, *NUMBERS],
    "merge.policy": ["mean", *TEXT],
    "merge.audit": NUMBERS,
    "net.heartbeat_s": [0.01, *NUMBERS],
    "net.dead_after_s": NUMBERS,
    "net.upload_limit": ["none", "1 bit/s", *TEXT],
    "net.download_limit": ["none", "1 bit/s", *TEXT],
    "checkpoint.every_rounds": NUMBERS,
    "checkpoint.keep": [1000, *NUMBERS],
    "checkpoint.go_back_after_s": NUMBERS,
    "pipeline.batch": [4096, *NUMBERS],
    "pipeline.micro": [65536, *NUMBERS],
    "pipeline.clip": NUMBERS,
    "pipeline.stages": [2, 64, *NUMBERS],
    "pipeline.cuts": [[1], [HUGE], [1] * 1000, *TEXT],
    "pipeline.codec": ["int4", *TEXT],
    "pipeline.min_per_stage": [128, *NUMBERS],
    "pipeline.rebalance_s": NUMBERS,
    "pipeline.mode": ["local", *TEXT],
    "pipeline.local_micros": NUMBERS,
}


class Case(NamedTuple):
    key: str
    content: bytes  # of the manifest, as a door may say it


def keys() -> set[str]:
    """Of a manifest, as peers get it."""
    told = Manifest().model_dump(mode="json", exclude=COORDINATORS_OWN)
    return {f"{section}.{key}" for section, content in told.items() for key in content}


def cases(home: Path, private_hash: str, keys: Iterable[str]) -> Iterator[Case]:
    """One key says something hostile; around it is what lets that be as much as it can."""
    usual: dict[str, dict[str, Any]] = Manifest().model_dump(mode="json", exclude=COORDINATORS_OWN)
    for each in keys:
        section, _, key = each.partition(".")
        for value in HOSTILE[each]:
            found = json.loads(json.dumps(usual))
            if each.startswith("pipeline.") and key != "batch":
                for of, more in BATCHES.items():
                    found[of] |= more
            if each == "model.config":
                found["model"] = {"kind": "hf"}
            if section == "eval":
                found["eval"]["source"] = "python-stdlib"
            if section == "start":
                found["start"] |= {"from": f"{home}/private.safetensors", "hash": private_hash}
            text = json.dumps(value).replace("HOME", str(home)).replace("HASH", private_hash)
            found[section][key] = json.loads(text)
            yield Case(each, _as_said(json.dumps(found, sort_keys=True, separators=(",", ":")).encode()))


def _as_said(raw: bytes) -> bytes:
    """What is allowed comes as all others say it; what is not, as it is."""
    try:
        return Manifest.from_json(raw).canonical()
    except UserError:
        return raw


def private_home(folder: Path, weights: bytes) -> Path:
    """What a person has: keys of a cloud, of a shell, of a web server; and weights that nobody else may have."""
    home = folder / "home"
    for name in (
        ".aws/credentials",
        ".aws/config",
        ".netrc",
        ".ssh/id_rsa",
        ".config/fsspec/a.json",
        "notes.bin",
    ):
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"s3": {"key": MARK}}) if name.endswith("json") else f"{MARK}\n")
        os.chmod(path, 0o600)
    (home / "private.safetensors").write_bytes(weights)
    (home / "run" / "1a2b3c4d-e0000-v00000001").mkdir(parents=True)
    (home / "run" / "1a2b3c4d-e0000-v00000001" / "manifest.json").write_text(MARK)
    at = time.time() - 1e6
    os.utime(home / "private.safetensors", (at, at))
    return home
