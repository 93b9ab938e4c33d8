"""Text for calibration and evaluation: rows of token ids, and a model that runs over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sketchssm.arrays import interop
from sketchssm.layer.checks import check_items

Ids = npt.NDArray[np.int64]

LENGTH = 1024
"""Default number of tokens of a row."""


def token_rows(
    text: Any, tokenizer: Any = None, length: int | None = None, *, least: int, rows: int = 1, name: str = "text"
) -> list[Ids]:
    """Rows of token ids, ``(tokens,)`` each. Each row runs through a model separately.

    Strings are tokenised and joined, with the tokenizer's end-of-sequence token between them, and cut into rows of
    `length` tokens, default 1024; so is an array of one axis. The rest after the last whole row is left out. An array
    ``(rows, tokens)`` and a sequence of arrays ``(tokens,)`` are rows already. TypeError if `text` is nothing of
    these. ValueError if there are fewer than `rows` rows or `least` tokens in a row, strings have no tokenizer, or
    `length` or `tokenizer` would have no effect. Errors call the text `name`.
    """
    strings = [text] if isinstance(text, str) else text
    if isinstance(strings, Sequence) and strings and all(isinstance(x, str) for x in strings):
        if tokenizer is None:
            raise ValueError("tokenizer: expected the model's tokenizer for text, got None")
        found = _cut(_tokenised(strings, tokenizer), length)
    elif tokenizer is not None:
        raise ValueError(f"tokenizer: expected None with token ids, got {type(tokenizer).__name__}")
    elif hasattr(text, "shape") and len(text.shape) == 1:
        found = _cut(_ids(text, name), length)
    elif length is not None:
        raise ValueError(f"length: expected None with rows of token ids, got {length}")
    else:
        found = [_ids(row, name) for row in check_items(name, text, "strings or of rows of token ids")]
    short = [row.size for row in found if row.size < least]
    if short:
        raise ValueError(f"{name}: expected rows of at least {least} tokens, got a row of {short[0]}")
    if len(found) < rows:
        raise ValueError(
            f"{name}: expected at least {rows} rows, got {len(found)}; give more text or, for text that is cut into "
            f"rows, a smaller length than {LENGTH if length is None else length}"
        )
    return found


def check_ids(model: Any, rows: Sequence[Ids], name: str = "text") -> None:
    """Refuse token ids that the model does not know: on a GPU they would end the process's use of the device."""
    known = model.get_input_embeddings().weight.shape[0]
    for row in rows:
        wrong = row[(row < 0) | (row >= known)]
        if wrong.size:
            raise ValueError(f"{name}: expected token ids from 0 to {known - 1}, got {wrong[0]}")


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Run a model in evaluation mode and as it is, not compiled."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in training:
            module.training = True


def run_row(model: Any, row: Ids) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits ``(tokens, vocabulary)`` of a row without a cache, and its token ids on the same device."""
    embeddings = model.get_input_embeddings()
    device = embeddings.weight.device
    if device.type == "meta":  # offloaded: accelerate computes elsewhere
        device = getattr(getattr(embeddings, "_hf_hook", None), "execution_device", device)
    ids = torch.from_numpy(row)[None].to(device)
    logits = model(ids, use_cache=False).logits
    return logits[0], ids[0].to(logits.device)


def encoded(tokenizer: Any, string: str) -> list[int]:
    """Token ids of a string, without special tokens."""
    return list(tokenizer(string, add_special_tokens=False, verbose=False)["input_ids"])


def _tokenised(strings: Sequence[str], tokenizer: Any) -> Ids:
    end = tokenizer.eos_token_id
    between = [] if end is None else [end]
    ids: list[int] = []
    for string in strings:
        ids += (between if ids else []) + encoded(tokenizer, string)
    return np.array(ids, dtype=np.int64)


def _ids(row: Any, name: str) -> Ids:
    array = interop.to_host(row, name)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{name}: expected strings or integers (tokens,) or (rows, tokens), got {array.dtype} of {array.shape}"
        )
    return array.astype(np.int64)


def _cut(stream: Ids, length: int | None) -> list[Ids]:
    length = LENGTH if length is None else length
    if isinstance(length, bool) or not isinstance(length, int) or length < 2:
        raise ValueError(f"length: expected an integer of at least 2, got {length!r}")
    return [stream[i : i + length] for i in range(0, stream.size - length + 1, length)]
