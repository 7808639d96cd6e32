"""`farflung data`: what a host does with texts before a run reads them."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farflung.protocol.caps import duration, si
from farflung.protocol.errors import UserError

if TYPE_CHECKING:
    from farflung.peer.data.shard_writer import Encode, ShardRecipe, Written

app = typer.Typer(help="Make token shards of texts.", no_args_is_help=True)

# What ends a document, by the names that tokenizers give it; the first one that there is.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<eos>", "</s>", "[SEP]")
TELL_EVERY_S = 2.0


@app.command()
def prepare(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="TEXT... OUT", help=".txt, .jsonl or .parquet files, then a new folder."),
    ],
    tokenizer: Annotated[Path, typer.Option(help="A tokenizer.json, as models of transformers have it.")],
    held_out: Annotated[
        str, typer.Option("--held-out", help="The share of documents that is not for training.")
    ] = "1%",
    end: Annotated[
        str, typer.Option(help="The token that ends a document \\[the tokenizer's end of text].")
    ] = "",
) -> None:
    """Write train-00000.bin, ... and held_out/ for [data] of run.toml.  Stopped, it goes on where it was."""
    from farflung.peer.data.shard_writer import ShardWriter

    *texts, out = files
    if not texts:
        raise UserError("data prepare: expected texts and then a folder, found one name")
    recipe, encode = _recipe(texts, tokenizer, end, _share(held_out))
    writer = ShardWriter(out, recipe)
    if writer.written.shards and not writer.written.done:
        _tell(f"going on after {len(writer.written.shards)} shards")
    for line in _told(
        out, tokenizer, recipe, writer.run(texts, encode, _Progress(len(texts), writer.written.text_bytes))
    ):
        typer.echo(line)


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise UserError(f'--held-out: expected a share such as "1%", found "{text}"')
    return share


def _recipe(texts: Sequence[Path], tokenizer: Path, end: str, held_out: float) -> tuple[ShardRecipe, Encode]:
    from blake3 import blake3

    from farflung.peer.data.shard_writer import ENDINGS, ShardRecipe, known_again

    for path in texts:
        if path.suffix not in ENDINGS:
            raise UserError(f"{path}: expected {', '.join(ENDINGS)}")
        if not path.is_file():
            raise UserError(f"{path}: there is no such file")
    raw = bytes_of(tokenizer)
    made = tokenizer_of(tokenizer, raw)
    names = (end,) if end else ENDS
    of_end = next(iter(ids_of(made, names)), None)
    if of_end is None:
        raise UserError(
            f"{tokenizer}: no token {' or '.join(names)}; name with --end the one that ends a document"
        )
    recipe = ShardRecipe(
        tuple(map(known_again, texts)),
        blake3(raw).hexdigest(),
        made.get_vocab_size(with_added_tokens=True),
        of_end,
        held_out,
    )
    return recipe, lambda batch: [
        each.ids for each in made.encode_batch_fast(list(batch), add_special_tokens=False)
    ]


def ids_of(tokenizer: Any, names: Sequence[str] = ENDS) -> list[int]:
    """Of those of these tokens that it has."""
    return [found for name in names if (found := tokenizer.token_to_id(name)) is not None]


def bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def tokenizer_of(place: object, raw: bytes) -> Any:
    """`place`: where it lay, for people.  UserError where it can't be read."""
    try:
        tokenizers = importlib.import_module("tokenizers")
    except ImportError:
        raise UserError(f"{place}: reading it needs tokenizers: pip install 'farflung[tokens]'") from None
    try:
        made = tokenizers.Tokenizer.from_str(raw.decode())
    except Exception as error:  # the outermost call of tokenizers, which raises nothing narrower
        raise UserError(f"{place}: no tokenizer.json: {str(error).splitlines()[0]}") from None
    # What it was saved with for another use would cut documents, or fill them up; and a text in which the name of a
    # special token stands says that name, and not that token.
    made.no_truncation()
    made.no_padding()
    made.encode_special_tokens = True
    return made


class _Progress:
    def __init__(self, files: int, read_before: int) -> None:
        self._files, self._read_before = files, read_before
        self._began = self._told = time.monotonic()

    def __call__(self, written: Written) -> None:
        now, read = time.monotonic(), written.text_bytes
        if now - self._told < TELL_EVERY_S:
            return
        self._told = now
        rate = (read - self._read_before) / (now - self._began)
        _tell(
            f"file {written.file + 1} of {self._files}: {si(read, 'B')} of text in {duration(now - self._began)}, "
            f"{si(rate, 'B/s')}; {len(written.shards)} shards"
        )


def _tell(text: str) -> None:
    print(f"farflung: {text}", file=sys.stderr, flush=True)


def _told(out: Path, tokenizer: Path, recipe: ShardRecipe, written: Written) -> list[str]:
    shards = "1 shard" if len(written.shards) == 1 else f"{len(written.shards)} shards"
    return [
        f"# {out}: {written.tokens:,} tokens in {shards}, {written.held_out:,} held out; "
        f"{written.bytes_per_token:.3f} bytes a token",
        f"# documents end with token {recipe.end}",
        "[model]",
        f"vocab = {recipe.vocab}",
        "",
        "[data]",
        'source = "https://HOST/PATH/train-*.bin"   # where you put the shards',
        f'dtype = "{recipe.dtype}"',
        f'tokenizer = "https://HOST/PATH/{tokenizer.name}#{recipe.tokenizer}"   # where you put the file',
        "",
        "[eval]",
        'source = "https://HOST/PATH/held_out/held_out.bin"',
        f"bytes_per_token = {written.bytes_per_token:.3f}",
    ]
