"""What `farflung init` writes: run.toml with the keys that a host thinks about first, or with every key, and what each
is for.  All but a few (`BETTER`) stand at their defaults.

Must say what protocol/manifest.py means; a test holds the two together.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import values_of

SHORT = """\
# The public description of a run. Every peer gets it, and its hash names the run: a change makes another run, except
# for [admission] and what `farflung amend` changes. Every key is optional; `farflung init --all` writes all of them.

[run]
name = "my-run"           # appears in the join URL; a-z, 0-9 and -
min_peers = 1             # no round opens with fewer
rounds = 100              # the run is finished after so many committed rounds

[model]
kind = "llama"            # "" where every peer brings the same model in a script of its own (docs/train.md)
preset = "tiny"           # 15M, 125M, 350M, 1B or 7B; or sizes of your own, such as layers = 8 and width = 512

[data]
source = "python-stdlib"  # or token shards, "s3://bucket/*.bin"; "" where the script brings the data
batch = 8                 # samples in an inner step; where little memory is they are computed in pieces

[inner]
optimizer = "muon"        # Muon for matrices, AdamW for the rest; "adamw" for weights that AdamW has trained
lr = 4e-4                 # of the steps that each peer takes alone between two rounds
warmup_steps = 100        # the rate rises over so many of them
schedule = "cosine"       # and falls to a tenth until the run ends

[round]
sync_every = 50           # inner steps between two rounds; raise it on slow networks
start_rounds = 40         # the first ones have shorter periods, which a model that is trained from nothing needs

[checkpoint]
every_rounds = 0          # peers with a place for checkpoints save after so many rounds (join --checkpoints); 0: never

[admission]
mode = "open"             # anyone with the URL; "token": by invitation (farflung invite); "allowlist": by a list
"""

TEMPLATE = """\
# The public description of a run.  Every peer gets it and it is hashed: a change makes another run, but for
# [admission], and for what `farflung amend` changes.  Every key is optional; the values below are the defaults, but
# for optimizer, warmup_steps, schedule of [inner] and start_rounds: "adamw", 0, "constant" and 0 if left out.

[run]
name = "my-run"           # appears in the join URL; a-z, 0-9 and -
seed = 0                  # first weights and order of the data; change it to repeat a run independently
min_peers = 1             # no round opens with fewer; raise it if lonely rounds are worth nothing to you
max_peers = 64            # further peers are refused
rounds = 100              # the run is finished after so many committed rounds (by every fragment)

[model]
kind = "llama"            # "" if every peer brings the same model of its own, through farflung.join(...)
preset = "tiny"           # or 15M, 125M, 350M, 1B, 7B: sizes for all keys below that are not written
layers = 2                # each one of attention and one of its MLP
width = 64                # size of a token's vector
heads = 4                 # attention heads of each layer
kv_heads = 4              # heads of keys and values, a divisor of heads; written with heads, or as the preset groups
head_dim = 16             # size of a head's vector; width / heads where one of these is written
mlp_width = 192           # 8/3 of width, up to a multiple of 64, where that is written
context = 64              # tokens per sample
vocab = 256               # tokens that there are; 256: bytes
rope_theta = 10000.0      # the slowest turn of places; raise it for long contexts
norm_eps = 1e-5           # what keeps norms of nothing finite
qk_norm = false           # norms of queries and keys: then an exported folder is a Qwen 3, else a Llama
tied = true               # embedding and head are one matrix; false by default where a model is cut into stages
config = {}               # with kind = "hf", the table [model.config]: a model of transformers, in its own words

[start]                   # what version 0 is: as the first peer's script builds the model, or what was trained before
from = ""                 # a checkpoint's folder, or a .safetensors file: https://, s3://, or a /path (join --start)
hash = ""                 # of that; `farflung init --start PLACE` finds it
momentum = "fresh"        # "keep": go on with the outer momentum of the checkpoint, too; step = "nesterov" only

[data]
source = "python-stdlib"  # text that every peer already has; "" if your own script brings the data
                          # or token shards at https:// or s3://BUCKET/..., a place or a list: "s3://bucket/*.bin"
length = 0                # token shards: ids in a row, which is a sample; 0: context + 1
dtype = "uint16"          # of .bin files: uint8, uint16, int16, uint32, int32, int64
column = "input_ids"      # of parquet files
batch = 8                 # samples per inner step; where little memory is the built-in model takes pieces of it
lease_samples = 256       # samples handed to a peer at a time, at least; large data sets: what lasts ten minutes
tokenizer = ""            # token shards: place and hash of the tokenizer.json behind them, as data prepare prints them

[eval]                    # the loss on text that nobody learns from, of versions that all peers have alike
source = ""               # "python-stdlib", which holds some of its files out, or shards as in [data]; "": none
every_rounds = "auto"     # and of the last version; "auto": as often as takes 1 % of the time at most
windows = 256             # samples of it, always the same, 16 to 1024: more of them, a steadier figure
bytes_per_token = 0.0     # of that text, as data prepare prints it: for bits per byte; 0: not known

[inner]                   # run by each peer alone between two rounds
optimizer = "adamw"       # or "muon": Muon for the weights that are matrices, AdamW for the rest; for a small GPU, from
                          # packages: "adamw8bit", "galore", "apollo", "apollo-mini", "adam-mini"; more memory: "soap"
lr = 4e-4                 # size of a step; lower it if the loss jumps about
betas = [0.9, 0.95]       # memory of the mean and of the variance of the gradient
weight_decay = 0.1        # pulls weights to zero; lower it for short runs
warmup_steps = 0          # the rate rises from 0 over so many steps; raise it if the loss jumps at first
schedule = "constant"     # then it stays; "linear", "cosine": it goes down to a tenth at the last step (rounds *
                          # sync_every); "wsd": only in the last fifth of the steps.  By the run's step, for late
                          # joiners too; adamw and muon of [outer] go down by rounds, in a straight line
clip = 1.0                # largest gradient norm; lower it if the loss spikes
precision = "fp32"        # "bf16": products in bf16, on GPUs that have it; parameters stay fp32

[outer]                   # what is done with the merged result of a round
step = "nesterov"         # Nesterov momentum; "mean": plain averaging; "sparse": the same, of few values both ways, a
                          # sixteenth of the bytes of int8, for slow lines;
                          # "adamw": each round is a step of AdamW with betas, weight_decay and warmup_steps of
                          # [inner], each of them counted in rounds; costs 4 bytes more for each parameter;
                          # "muon", with batch in [pipeline]: Muon for hidden matrices, the same AdamW for the rest
lr = "auto"               # 0.7 for nesterov, lr of [inner] for adamw and muon, else 1.0; lower it if the loss rises
momentum = "auto"         # how long earlier rounds' direction lasts: 0.9 from 100 rounds, less with fewer; muon: 0.95
schedule = "blocking"     # training waits for rounds; "overlap": goes on while one is in flight; "streaming": the
                          # same, and each fragment has its rounds at another time: set fragments in [round]

[round]
sync_every = 50           # inner steps between rounds; raise it on slow links, lower it if peers drift apart; machines
                          # slower than the fastest third take those that they have time for
start_rounds = 0          # so many rounds at the beginning have shorter periods: an eighth of sync_every for a third of
                          # them, then a quarter, then half, with little momentum unless [outer] says how much
period_s = 0.0            # instead: seconds between rounds, in which each peer takes the steps it can; 0: by steps
codec = "auto"            # how contributions travel: fp32, bf16, int8, int4, int2, topk (each several times smaller);
                          # "auto": int8, or coarser where a peer's upload would take longer than scatter_grace_s; topk
                          # for step = "sparse"; in [pipeline] batch > 0 with mode = "sync" fp32: such updates are exact
gather_codec = "auto"     # how merged results travel: fp32, bf16, int8, int4, sparse; "auto": int8, which costs about
                          # nothing; sparse for step = "sparse"; in such batches fp32
chunk_kb = 1024           # size of a transferred piece, 1 to 16384; lower it on links that often break
fragments = 1             # parts of the model with rounds of their own, side by side, 1 to 64; at most one per chunk
group = 0                 # rounds of up to 1,024 peers, in groups of so many (about the root of all) whose sums are
                          # added up; 0: all in one, up to 128
deadline_s = 60.0         # a round opens so long after the first peer is ready, even if not all are; one that takes
                          # twice as long is given up; raise it for big models on slow links
scatter_grace_s = 10.0    # after a round opens, stragglers are waited for so long; they keep their work
keep_results = 3          # rounds that a peer may miss and still catch up with cheaply; costs memory

[merge]                   # how the contributions of a round become one update
policy = "robust"         # from 4 members on: other directions than the others' out, long ones shortened; or "mean"
audit = 0.037             # share of each version's chunks that peers other than their owners merge again, to find
                          # wrong sums; costs about half of that in bytes; 1.0: all; 0: none

[net]
heartbeat_s = 1.0         # how often a peer says that it lives
dead_after_s = 5.0        # silence after which it counts as lost; more than twice heartbeat_s
upload_limit = "none"     # of every peer, for model data; "20 Mbit/s", or "20 Mbit/s, 5 Mbit/s 08:00-18:00"
download_limit = "none"   # whoever sets a limit of his own as well keeps to the stricter of the two
relay = "50 Mbit/s, 1 TB a month"  # what the coordinator passes at most, in and out, between peers that nobody can
                          # dial; "off".  Not hashed: change it as you like

[checkpoint]              # saved by the peers that say where: farflung join --checkpoints URL
every_rounds = 0          # after so many rounds the state is saved, and at the end; 0: never
keep = 3                  # so many of the newest stay; older ones are removed
go_back_after_s = 300.0   # nobody here holds the newest version: after so long the run goes on from the newest state
                          # that somebody brings, if those who may hold more said good-bye or are here; 0: it waits

[pipeline]                # exact large batches instead of steps of each peer's own: see docs/batches.md
batch = 0                 # microbatches in one update of the model, up to 4096; 0: every peer takes steps of its own;
                          # else write policy = "mean" in [merge]
micro = 1                 # samples in a microbatch
clip = 0.0                # largest norm of the gradient of a whole batch, over all stages; 0: it stays as it is
stages = 1                # 1: every peer holds the whole model; else it is cut, and a peer holds one stage
cuts = "auto"             # or the numbers of the parts at which stages 1, 2, ... begin, such as [7, 13, 19]
codec = "int8"            # of activations between stages and of their gradients: fp32, bf16, int8, int4
min_per_stage = 1         # a batch begins when every stage has so many peers; with 1 a death can cost the stage
rebalance_s = 60.0        # how often it is looked at whether a peer should serve another stage; 0: never
mode = "sync"             # stages > 1: "local": each peer takes steps of [inner] within a batch, and step = "nesterov"
                          # of [outer] merges what they moved; a batch is sync_every * local_micros * peers of a stage
local_micros = 8          # microbatches in such a step

[admission]               # who may come in.  Not hashed: change it and start the coordinator again, the run goes on
mode = "open"             # anyone with the URL; "token": by invitation (farflung invite); "allowlist": peers whose
                          # ids stand in allowlist.txt in the data folder
joins_at_once = 16        # open: newcomers that fetch the model at the same time; the others wait
trusted = []              # ids of peers that you answer for: what is too few to judge, 2 or 3 members, they judge
"""

START = """\
[start]                   # what version 0 is
from = ""                 # a full path, which no peer opens unless it joins with --start, or https:// or s3://
hash = ""                 # of that; all peers agree on it
momentum = "fresh"        # "keep": go on with the outer momentum of the checkpoint, too

"""


# What a new run has in place of a default, with figures in docs/learning.md: key, and the two values.
BETTER = (
    ("optimizer", '"adamw"', '"muon"'),
    ("warmup_steps", "0", "100"),
    ("schedule", '"constant"', '"cosine"'),
    ("start_rounds", "0", "40"),
)


def description(every_key: bool, start: tuple[str, str] | None = None) -> str:
    """The text of run.toml.  `start`: what the run begins with, and the hash of that."""
    text = TEMPLATE if every_key else SHORT
    for key, default, better in BETTER if every_key else ():
        usual, value = f"\n{key} = {default}", f"\n{key} = {better}"
        width = max(len(usual), len(value))
        text = text.replace(usual.ljust(width), value.ljust(width), 1)
    if start is None:
        return text
    # What is trained already does not change most at first.
    text = text.replace("\nstart_rounds = 40", "\nstart_rounds = 0 ", 1)
    text = text.replace('\noptimizer = "muon" ', '\noptimizer = "adamw"', 1)
    if "[start]" not in text:
        text = text.replace("[data]\n", START + "[data]\n", 1)
    for key, value in zip(("from", "hash"), start, strict=True):
        text = text.replace(f'\n{key} = ""', f"\n{key} = {json.dumps(value)}", 1)
    return text


# ---- run doubts --------------------------------------------------------------------------------------------
# What a `run.toml` may say, and hardly anybody means: a line each, for the host. Pure.
#
# Called by `farflung coordinate`. What can't be is refused in manifest.py.

VALUES_PER_KB = 256  # of fp32
SPARSE_ROW_KB = 16


def doubts(m: Manifest) -> list[str]:
    return [*_of_rounds(m), *_of_steps(m), *_of_the_model(m)]


def _of_rounds(m: Manifest) -> Iterator[str]:
    rules, outer = m.round, m.outer
    if rules.gather_codec == "sparse" and rules.chunk_kb % SPARSE_ROW_KB:
        yield (
            f"[round] chunk_kb: {rules.chunk_kb} is no multiple of {SPARSE_ROW_KB}, which are the 4096 values of which "
            "240 travel: every chunk costs as much as the next larger one"
        )
    if rules.codec in ("topk", "int2") and outer.step == "nesterov":
        yield (
            f'[outer] step: codec = "{rules.codec}" leaves most of what is learned to later rounds, where "nesterov" '
            'adds its momentum once more; "sparse" is made for it'
        )
    if rules.start_rounds >= m.run.rounds:
        yield (
            f"[round] start_rounds: {rules.start_rounds} are all rounds of the run ({m.run.rounds}): no period has "
            f"sync_every ({rules.sync_every}) steps"
        )
    if rules.period_s and "sync_every" in rules.model_fields_set:
        yield (
            f"[round] period_s: a round is due every {rules.period_s:g} s; sync_every ({rules.sync_every}) only says "
            "how many steps a version counts for rates that go down"
        )


def _of_steps(m: Manifest) -> Iterator[str]:
    inner = m.inner
    steps_itself = not m.pipeline.batch or m.pipeline.mode == "local"
    if steps_itself and inner.schedule == "constant" and inner.warmup_steps >= m.total_steps:
        yield (
            f"[inner] warmup_steps: {inner.warmup_steps} are no less than the {m.total_steps} steps of the run (rounds "
            "* sync_every): the rate never reaches lr"
        )


def _of_the_model(m: Manifest) -> Iterator[str]:
    model, rules = m.model, m.round
    if not model.kind:
        if m.data.source == "python-stdlib" and "source" in m.data.model_fields_set:
            yield (
                '[data] source: "python-stdlib" is the built-in model\'s text; with kind = "" each peer\'s script '
                'reads data of its own: write source = ""'
            )
        return
    chunks = -(-values_of(model) // (rules.chunk_kb * VALUES_PER_KB))
    if rules.fragments > chunks and not m.pipeline.batch:
        yield (
            f"[round] fragments: {rules.fragments}, and the built-in model has {chunks} chunks of chunk_kb = "
            f"{rules.chunk_kb} at most: no peer could take part; make chunk_kb or fragments smaller"
        )
