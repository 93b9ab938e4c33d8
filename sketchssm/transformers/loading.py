"""A model of transformers and a text, read from disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sketchssm.study.tasks import make_prompts
from sketchssm.transformers.modeling import check_version
from sketchssm.transformers.text import Ids, encoded, token_rows


@dataclass(frozen=True)
class ModelText:
    """A model and a text on disk, and the settings for reading them."""

    model: Path  # folder of the model and its tokenizer
    text: Path | None  # UTF-8 text, or token ids in an npy file; None where only the model is loaded
    rows: int  # to take from the beginning of the text
    length: int  # tokens of a row
    dtype: str  # of the parameters; "auto" for the type of the files
    device: str  # "auto" for the first CUDA device if there is one, "balanced" for all of them and the host

    def load(self, least: int) -> tuple[Any, list[Ids]]:
        """Load the model, in evaluation mode on its device, and `least` to `rows` rows of ids, ``(tokens,)`` each.

        ValueError if the model or the text can't be read, or there is too little text.
        """
        if self.rows < least:
            raise ValueError(f"rows: expected at least {least}, got {self.rows}")
        check_version()
        text, tokenizer = self._text()
        try:
            rows = token_rows(text, tokenizer, self.length, least=2, rows=least)
        except ValueError as error:
            raise ValueError(f"{self.text}: {error}") from error
        return self.load_model(), rows[: self.rows]

    def load_model(self) -> Any:
        """Load the model, in evaluation mode on its device; ValueError if it can't be read."""
        check_version()
        import transformers

        transformers.utils.logging.disable_progress_bar()
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        spread = device == "balanced"
        try:
            if not spread and torch.device(device).type == "meta":
                raise RuntimeError("its tensors have no values")
            torch.empty(0, device=None if spread else device)
        except (RuntimeError, AssertionError) as error:  # AssertionError: PyTorch without CUDA
            raise ValueError(f"device: {device!r} can't be used ({error})") from error
        config = self._loaded("AutoConfig")
        # quantised weights are made on their device
        placed = spread or getattr(config, "quantization_config", None) is not None
        model = self._loaded(_class_of(config), dtype=self.dtype, **({"device_map": device} if placed else {}))
        return (model if placed else model.to(device)).eval()

    def haystack(self) -> tuple[Ids, Callable[[str], list[int]]]:
        """Token ids of the whole text, ``(tokens,)``, and the model's tokenizer as a function of a string.

        ValueError if the text or the tokenizer can't be read.
        """
        text, tokenizer = self._text()
        encode = partial(encoded, tokenizer or self._tokenizer())
        return np.array(encode(text)) if isinstance(text, str) else text, encode

    def questions(self, number: int) -> dict[str, Any]:
        """Prompts and answers of a calibration, as of `calibrate`: questions about one of 1 to 8 facts in the text.

        ValueError if the text or the tokenizer can't be read, or the facts have no room.
        """
        text, encode = self.haystack()
        rng = np.random.default_rng(0)
        made = make_prompts("keys", text, encode, number, rng, length=self.length, facts=range(1, 9))
        return {"prompts": made.ids, "answers": made.answers}

    def _text(self) -> tuple[Any, Any]:
        """Token ids and None, or text and the tokenizer."""
        assert self.text is not None
        if self.text.suffix == ".npy":
            try:
                ids = np.load(self.text)
            except (ValueError, EOFError) as error:
                raise ValueError(f"text: expected an npy file of integers, got {self.text} ({error})") from error
            if ids.ndim != 1:
                raise ValueError(f"text: expected token ids of shape (tokens,), got {ids.shape} in {self.text}")
            return ids, None
        try:
            text = self.text.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"text: expected UTF-8 text or an npy file, got {self.text} ({error})") from error
        return text, self._tokenizer()

    def _tokenizer(self) -> Any:
        """The model's tokenizer; ValueError if there is none, for which transformers may make an empty one."""
        tokenizer = self._loaded("AutoTokenizer")
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise ValueError(f"model: expected a tokenizer in {self.model}, got none or an empty one")
        return tokenizer

    def _loaded(self, kind: str, **settings: Any) -> Any:
        import transformers

        try:
            return getattr(transformers, kind).from_pretrained(self.model, local_files_only=True, **settings)
        except Exception as error:  # of many types, for folders that hold no model or a damaged one
            raise ValueError(f"model: {kind} of transformers can't read {self.model} ({error})") from error


def _class_of(config: Any) -> str:
    """Name of the class that a configuration names if it generates text, else of the automatic class."""
    import transformers

    for name in config.architectures or ():
        kind = getattr(transformers, name, None)
        if isinstance(kind, type) and issubclass(kind, transformers.GenerationMixin):
            return str(name)
    return "AutoModelForCausalLM"
