"""Text as tokens in a memory-mapped file, and batches that are a function of seed and step."""

from __future__ import annotations

import hashlib
import json
import math
import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gpt_training.options import OptionError, Options
from gpt_training.processes import Processes

_PIECE = 1 << 20
_PIECES_AT_ONCE = 16


class _Kind(NamedTuple):
    """How a token is stored: torch's type, and the letter of Python's `array`."""

    dtype: torch.dtype
    letter: str


class Codec(Protocol):
    """Between text and tokens.

    Attributes:
        vocabulary: number of tokens of a model.
        identity: two codecs with the same make the same tokens.
        kind: how tokens are stored.
    """

    vocabulary: int
    identity: str
    kind: _Kind

    def encode_file(self, file: Path) -> Iterator[bytes]:
        """Pieces of the stored tokens of a file."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


class ByteCodec:
    """Bytes are tokens; byte 0, which no text has, ends a file."""

    vocabulary = 256
    identity = "bytes"
    kind = _Kind(torch.uint8, "B")

    def encode_file(self, file: Path) -> Iterator[bytes]:
        with file.open("rb") as stream:
            while piece := stream.read(_PIECE):
                yield piece
        yield b"\0"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class TokenizerCodec:
    """A tokenizer of the tokenizers package. It sees files in pieces of whole lines, about 1 MiB each."""

    def __init__(self, file: Path, end_of_text: str | None) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises nothing narrower
            raise OptionError(f"--tokenizer: expected a tokenizer.json, got {file}: {error}") from None
        end = None if end_of_text is None else self._tokenizer.token_to_id(end_of_text)
        self._end: list[int] = [] if end is None else [end]
        if end is None and end_of_text is not None:
            raise OptionError(f"--end-of-text: expected a token of {file}, got {end_of_text!r}, which it does not have")
        # Rounded up, as matrix products like it; the model learns that it never sees the rest.
        self.vocabulary = -(-self._tokenizer.get_vocab_size() // 64) * 64
        self.identity = hashlib.sha256(file.read_bytes()).hexdigest() + json.dumps(end_of_text)
        self.kind = _Kind(torch.uint16, "H") if self.vocabulary <= 1 << 16 else _Kind(torch.int32, "i")

    def encode_file(self, file: Path) -> Iterator[bytes]:
        try:
            for pieces in _groups(_pieces(file)):
                for encoding in self._tokenizer.encode_batch(pieces, add_special_tokens=False):
                    yield array(self.kind.letter, encoding.ids).tobytes()
        except UnicodeDecodeError as error:
            raise OptionError(f"--data: expected UTF-8 with --tokenizer, got {file}: {error}") from None
        yield array(self.kind.letter, self._end).tobytes()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


@dataclass(frozen=True)
class Text:
    """Tokens on disk, mapped into memory.

    Attributes:
        training: of the first part, one dimension.
        validation: of the last part.
        fingerprint: SHA-256 of all of them.
        codec: that made them.
    """

    training: Tensor
    validation: Tensor
    fingerprint: str
    codec: Codec


def make_codec(options: Options) -> Codec:
    return ByteCodec() if options.tokenizer is None else TokenizerCodec(options.tokenizer, options.end_of_text)


def open_text(options: Options, codec: Codec, context: int, processes: Processes) -> Text:
    """The tokens of `--data`, from the cache where they are in it, and else put there by rank 0.

    Raises:
        OptionError: there is no text, or less than the context needs.
    """
    file, facts = processes.from_first(lambda: _cached_tokens(options.data, codec, options.cache_folder))
    count = facts["tokens"]
    held_out = max(int(count * options.validation_share), context + 1)
    if count - held_out < context + 1:
        raise OptionError(
            f"--data: expected at least {context + 1} tokens (the context and one) each for training and validation, "
            f"got {max(count - held_out, 0)} and {held_out} of {count}; take more text, a shorter --context or another "
            "--validation-share"
        )
    tokens = torch.from_file(str(file), shared=False, size=count, dtype=codec.kind.dtype)
    return Text(tokens[: count - held_out], tokens[count - held_out :], facts["sha256"], codec)


def training_batches(text: Text, step: int, context: int, options: Options, processes: Processes) -> list[Tensor]:
    """This process's batches of a step, int64 `[batch, context + 1]` each, at random places of the text.

    Processes that share sequences have the same ones. The places of all are drawn by each, from seed and step alone. So
    a resumed training needs no position, and as many sequences in a step are the same ones however they are divided.
    """
    generator = torch.Generator().manual_seed(derived_seed(options.seed, "batch", step))
    shape = (options.accumulate, processes.replicas, options.batch)
    places = torch.randint(len(text.training) - context, shape, generator=generator)
    return [_windows(text.training, part, context) for part in places[:, processes.replica]]


def validation_batches(text: Text, context: int, options: Options, processes: Processes) -> Iterator[Tensor]:
    """This process's part of the windows of validation, which lie evenly over the text and are always the same."""
    shape = (options.validation_batches * options.accumulate, processes.replicas, options.batch)
    places = torch.linspace(0, len(text.validation) - context - 1, math.prod(shape), dtype=torch.float64)
    for part in places.long().view(shape)[:, processes.replica]:
        yield _windows(text.validation, part, context)


def derived_seed(seed: int, *purpose: str | int) -> int:
    """One seed for each purpose, with nothing in common."""
    digest = hashlib.blake2b(json.dumps([seed, *purpose]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _windows(tokens: Tensor, places: Tensor, context: int) -> Tensor:
    return torch.stack([tokens[place : place + context + 1] for place in places.tolist()]).long()


def _cached_tokens(data: Path, codec: Codec, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file of the tokens, and what is known about them. The last thing written says that all is there."""
    files = _text_files(data)
    known = [[str(file.relative_to(data)), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    name = hashlib.sha256(json.dumps([codec.identity, str(data.resolve()), known]).encode()).hexdigest()[:24]
    tokens, facts = folder / f"{name}.tokens", folder / f"{name}.json"
    if facts.exists() and tokens.exists():
        return tokens, json.loads(facts.read_text("utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    partial, digest, size = folder / f"{name}.{os.getpid()}.partial", hashlib.sha256(), 0
    try:
        with partial.open("wb") as stream:
            for file in files:
                for piece in codec.encode_file(file):
                    stream.write(piece)
                    digest.update(piece)
                    size += len(piece)
        partial.replace(tokens)
        found = {"tokens": size // codec.kind.dtype.itemsize, "sha256": digest.hexdigest()}
        partial.write_text(json.dumps(found), "utf-8")
        partial.replace(facts)
    finally:
        partial.unlink(missing_ok=True)
    return tokens, found


def _text_files(data: Path) -> list[Path]:
    if data.is_file():
        return [data]
    found = (path for path in data.rglob("*") if path.is_file())
    files = sorted(f for f in found if not any(part.startswith(".") for part in f.relative_to(data).parts))
    if not files:
        raise OptionError(f"--data: expected at least one file in the folder, got none in {data}")
    return files


def _pieces(file: Path) -> Iterator[str]:
    """A file in pieces of whole lines."""
    with file.open(encoding="utf-8", newline="") as stream:
        while lines := stream.readlines(_PIECE):
            yield "".join(lines)


def _groups(pieces: Iterable[str]) -> Iterator[list[str]]:
    """Some at a time, for the tokenizer's threads."""
    group: list[str] = []
    for piece in pieces:
        group.append(piece)
        if len(group) == _PIECES_AT_ONCE:
            yield group
            group = []
    yield group
