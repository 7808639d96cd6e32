"""`farflung generate`: text that a run's model goes on with, so that people see what it learned.

Added to the command line by console/main.py.  The weights come from a checkpoint, or from the memory of a peer of the
run that is on this machine, which is only read.  The model may be a stranger's, so nothing that it writes moves the
cursor of a terminal.  As a process (`python -m`), it makes words of token ids for the page of a run.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, NamedTuple

import typer

from farflung.console.checkpoint_commands import Run, newest_model, of_run, tell
from farflung.console.data_commands import bytes_of, ids_of, tokenizer_of
from farflung.protocol.errors import UserError
from farflung.protocol.join_url import SCHEME, JoinUrl

if TYPE_CHECKING:
    from farflung.checkpoints.export import Exported
    from farflung.peer.local.memory import SharedState
    from farflung.protocol.manifest import Manifest
    from farflung.protocol.model_schema import ModelSchema

PATIENCE_S = 60.0  # for a version that is just arriving
TOKENS = 100
BYTES = 256
TOKENIZER_BYTES_MOST = 64 << 20
PAGE_CHARS_MOST = 2000  # of each part: a pipe has room for so much, however it is written
_OF_SCRIPT = "run '{}' trained the model of a script: farflung checkpoint export it, and load it there"
_NOTHING = "TEXT: expected something to go on from"
app = typer.Typer(help="Text from a run's model.")


class Weights(NamedTuple):
    terms: Manifest
    tensors: dict[str, Any]
    told: str  # whose they are
    on_gpu: bool  # may it compute there: the peer of this machine has it for itself


@app.command(rich_help_panel="Afterwards")
def generate(
    place: Annotated[
        str,
        typer.Argument(
            help="A folder or URL of checkpoints; or the join URL of a run with a peer on this machine."
        ),
    ],
    text: Annotated[str, typer.Argument(help="What the model goes on from.")],
    tokens: Annotated[int, typer.Option(min=1, help="At most so many.")] = TOKENS,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=10.0, help="0: always the likeliest token; more: less likely ones.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="Another one makes another text.")] = 0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="The tokenizer.json of the run's tokens \\[where the run says].")
    ] = None,
    run: Run = "",
    version: Annotated[int | None, typer.Option(min=0, help="Of this version \\[the newest].")] = None,
) -> None:
    """Go on from a text with the newest version of a run's model."""
    if place.startswith(SCHEME) and (run or version is not None):
        raise UserError(
            "--run and --version are of checkpoints; a join URL stands for what its peer holds now"
        )
    weights = (
        _of_peer_here(JoinUrl.parse(place))
        if place.startswith(SCHEME)
        else _of_checkpoint(place, run, version)
    )
    words = _words(weights.terms, tokenizer)
    ids, context = words.ids_of(text), weights.terms.model.context
    if not ids:
        raise UserError(_NOTHING)
    if max(ids) >= weights.terms.model.vocab:
        raise UserError(
            f"TEXT: it has token {max(ids)}, and the model's vocabulary has {weights.terms.model.vocab}"
        )
    if len(ids) >= context:
        raise UserError(
            f"TEXT: {len(ids)} tokens, and the model's context is {context}: give it a shorter text"
        )
    most = min(tokens, context - len(ids))
    tell([f"{weights.told}, {most} tokens at most, seed {seed}"])
    shown = ""
    made: list[int] = []
    for each in _continued(weights, ids, most, temperature, seed, words.ends):
        made.append(each)
        whole = words.text_of([*ids, *made])
        if not whole.endswith("\N{REPLACEMENT CHARACTER}") and whole.startswith(shown):
            _show(whole[len(shown) :])
            shown = whole
    _show(words.text_of([*ids, *made])[len(shown) :] + "\n")


def _show(text: str) -> None:
    plain = "".join(c for c in text if c in "\n\t" or unicodedata.category(c)[0] != "C")
    coding = sys.stdout.encoding or "utf-8"
    print(plain.encode(coding, "replace").decode(coding), end="", flush=True)


# ---- words -------------------------------------------------------------------------------------------------


class Words(NamedTuple):
    ids_of: Callable[[str], list[int]]
    text_of: Callable[[Sequence[int]], str]
    ends: frozenset[int]  # of a document


def _words(terms: Manifest, tokenizer: Path | None, read: Callable[[str], bytes] | None = None) -> Words:
    """`read`: what the run's own tokenizer is read with."""
    data, vocab = terms.data, terms.model.vocab
    place, digest = data.tokenizer_place
    if tokenizer is None and not place:
        of_bytes = data.dtype == "uint8" and vocab == BYTES and not digest
        if data.source != "python-stdlib" and not of_bytes:
            due = f", whose hash is {digest}" if digest else ""
            raise UserError(
                f"run '{terms.run.name}' learns tokens: name their tokenizer.json with --tokenizer{due}"
            )
        return Words(lambda text: list(text.encode()), _text_of_bytes, frozenset())
    found = tokenizer or place
    raw = bytes_of(tokenizer) if tokenizer is not None else (read or _fetched)(place)
    _refuse_other(found, raw, digest)
    made = tokenizer_of(found, raw)
    size = made.get_vocab_size(with_added_tokens=True)
    if size > vocab:
        raise UserError(f"{found}: {size} tokens, and the model of run '{terms.run.name}' has {vocab}")
    return Words(
        lambda text: list(made.encode(text, add_special_tokens=False).ids),
        lambda ids: str(made.decode(list(ids), skip_special_tokens=True)),
        frozenset(ids_of(made)),
    )


def _text_of_bytes(ids: Sequence[int]) -> str:
    return bytes(each for each in ids if each < BYTES).decode(errors="replace")


def _fetched(place: str) -> bytes:
    """A host names the place, so it is read as nobody, and no more than a tokenizer needs."""
    from farflung.peer.data.data_files import DataFiles

    files = DataFiles(None)
    found = files.find(place)[0]
    if found.size_bytes > TOKENIZER_BYTES_MOST:
        raise UserError(f"{place}: {found.size_bytes:,} bytes are too many for a tokenizer")
    return b"".join(files.pieces(found))


def _refuse_other(place: object, raw: bytes, due: str) -> None:
    from blake3 import blake3

    found = blake3(raw).hexdigest()
    if due and found != due:
        raise UserError(
            f"{place}: its hash is {found[:16]}..., and that of the run's tokenizer is {due[:16]}..."
        )


def for_page(asked: dict[str, Any], kept: BinaryIO) -> list[str]:
    """What a model was given, and how it went on.  In a process of its own: the tokenizer is a stranger's, and whatever
    it does to its reader costs the page no more than this text.  `kept`: a file in which it is fetched once."""
    from farflung.protocol.manifest import Manifest

    terms = Manifest.from_canonical(asked["manifest"].encode())

    def fetched_once(place: str) -> bytes:
        kept.seek(0)
        raw = kept.read() or _fetched(place)
        _refuse_other(place, raw, terms.data.tokenizer_place[1])
        kept.seek(0)
        kept.write(raw)
        kept.flush()
        return raw

    words = _words(terms, None, fetched_once)
    given, whole = (words.text_of(ids) for ids in (asked["ids"][: asked["given"]], asked["ids"]))
    cut = len(given) if whole.startswith(given) else 0
    return [each[:PAGE_CHARS_MOST] for each in (whole[:cut], whole[cut:])]


# ---- weights -----------------------------------------------------------------------------------------------


def _of_checkpoint(place: str, run: str, version: int | None) -> Weights:
    found, exported = newest_model(place, run, version)
    terms, tensors = of_run(found, exported, _OF_SCRIPT)
    return Weights(terms, tensors, f"version {found.manifest.version} of {found.manifest.run}", True)


def _of_peer_here(url: JoinUrl) -> Weights:
    from farflung.peer.local.folder import abouts
    from farflung.peer.local.memory import NOTHING_HELD, SharedState
    from farflung.peer.local.words import peer_here
    from farflung.protocol.manifest import Manifest

    found = (peer_here(raw) for raw in abouts())
    here = [each for each in found if each is not None and (each.run, each.key) == (url.run, url.key)]
    if not here:
        raise UserError(
            f"no peer of run '{url.run}' is on this machine: join it here first, or name a place of its checkpoints"
        )
    for each in here:
        terms = Manifest.from_canonical(each.manifest)
        if not terms.model.kind:
            raise UserError(_OF_SCRIPT.format(url.run))
        try:
            shared = SharedState.open(each.shared)
        except (OSError, RuntimeError):
            continue  # it ended just now
        version, exported = shared.copy_whole(partial(_as_it_is, shared, each.model), PATIENCE_S)
        if version != NOTHING_HELD:
            told = f"version {version} of {url.run}, from the peer on this machine"
            return Weights(terms, exported.tensors, told, False)
    raise UserError(f"the peer of run '{url.run}' on this machine holds no version yet: try later")


def _as_it_is(shared: SharedState, model: ModelSchema) -> tuple[int, Exported]:
    from farflung.checkpoints.export import tensors_in

    return shared.read_version(), tensors_in(model, shared.anchor)


def _continued(
    weights: Weights, ids: list[int], most: int, temperature: float, seed: int, ends: frozenset[int]
) -> Iterator[int]:
    import torch

    from farflung.peer.builtin.llama import continued
    from farflung.peer.builtin.named_model import with_values
    from farflung.peer.room import best_device

    terms = weights.terms
    model = with_values(terms.model, weights.tensors)
    words = BYTES if terms.data.source == "python-stdlib" else terms.model.vocab
    device = best_device() if weights.on_gpu else torch.device("cpu")
    yield from continued(model.eval().to(device), ids, most, temperature, seed, ends, words)


if __name__ == "__main__":
    with open(int(sys.argv[1]), "r+b", closefd=False) as file:
        print(json.dumps(for_page(json.load(sys.stdin), file)))
