"""From messages to tokens and from tokens to text, for the command line.

Next to decoder.py and devices.py the only module that uses llama_cpp: its chat formatter, and its pieces of tokens.
"""

from __future__ import annotations

import codecs
import ctypes
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import jinja2
import llama_cpp
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from twofold import errors
from twofold.decoder import BaseLlama, end_of_generation
from twofold.llama import Llama
from twofold.llama_log import LOG_ERROR, quiet_log
from twofold.whereabouts import Whereabouts

_TEMPLATE = "tokenizer.chat_template"
Model = TypeVar("Model", bound=BaseLlama)


@dataclass(frozen=True)
class Sampling:
    """Settings of the sampler, named as `Llama.generate` names them; temperature 0 takes the likeliest token."""

    temp: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0


_load_errors: list[str] = []


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _hold_errors(level: int, text: bytes, _: Any) -> None:
    if level == LOG_ERROR:
        _load_errors.append(text.decode("utf-8", "replace").strip())


def load(path: str, **arguments: Any) -> Llama:
    """Load a pair; see `load_as`."""
    return load_as(Llama, path, **arguments)


def load_as(model: type[Model], path: str, *, tell: bool = True, **arguments: Any) -> Model:
    """Load a model of a class, with llama_cpp's exceptions turned into ours; `tell` where it lies (whereabouts.py).

    Raises
    ------
    FormatError
        if llama.cpp cannot load the file, or cannot make a context for it; with what llama.cpp says about it.
    TwofoldError
        for everything that :class:`twofold.Llama` refuses.
    """
    _load_errors.clear()
    llama_cpp.llama_log_set(_hold_errors, None)  # llama_cpp sends what is shown meanwhile to /dev/null
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", errors.PlacementWarning)
            made = model(model_path=path, verbose=False, **arguments)
        if tell:
            _tell_placement(getattr(made, "whereabouts", None), [str(warning.message) for warning in caught])
        return made
    except errors.TwofoldError:
        raise
    except (ValueError, RuntimeError) as error:  # llama_cpp's own exceptions
        raise errors.FormatError(
            f"{path}: llama.cpp cannot load it: {_load_errors[0] if _load_errors else error}; is it NAME.base.gguf of "
            "twofold convert, or an ordinary GGUF that it knows, and is there memory for the context (--ctx)?"
        ) from error
    finally:
        quiet_log()


def _tell_placement(found: Whereabouts | None, caught: Sequence[str]) -> None:
    """Say on standard error where everything lies, if there is more than RAM, and what should not be where it is."""
    if found is not None and found.uses:
        print(f"twofold: {found.line()}", file=sys.stderr)
    for warning in caught:
        print(f"twofold: warning: {warning}", file=sys.stderr)


def has_template(llm: BaseLlama) -> bool:
    """Whether the model comes with a chat template."""
    return _TEMPLATE in llm.metadata


def chat_tokens(llm: BaseLlama, messages: Sequence[dict[str, str]]) -> list[int]:
    """Tokens of a conversation in the model's chat template, up to where the answer begins.

    Raises
    ------
    ArgumentError
        if the model has no template, or its template refuses the messages.
    """
    if not has_template(llm):
        raise errors.ArgumentError("the model has no chat template; give it plain text with twofold generate --raw")
    eos, bos = (llm._model.token_get_text(t) if t != -1 else "" for t in (llm.token_eos(), llm.token_bos()))
    try:
        prompt = Jinja2ChatFormatter(llm.metadata[_TEMPLATE], eos, bos)(messages=list(messages)).prompt
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        raise errors.ArgumentError(
            f"the model's chat template refuses these messages: {error}; leave out --system, or use --raw"
        ) from error
    return text_tokens(llm, prompt)


def text_tokens(llm: BaseLlama, text: str) -> list[int]:
    """Tokens of plain text; special tokens in it are parsed, and it begins with BOS once if the model wants one."""
    tokens = list(llm.tokenize(text.encode("utf-8", "replace"), add_bos=True, special=True))
    bos = llm.token_bos()
    return tokens[1:] if tokens[:2] == [bos, bos] else tokens


def piece(llm: Llama, token: int) -> bytes:
    """Bytes of a token; llama_cpp's own detokenize loses tokens of more than 32 bytes."""
    buffer = ctypes.create_string_buffer(64)
    for _ in range(2):
        length = llama_cpp.llama_token_to_piece(llm._model.vocab, token, buffer, len(buffer), 0, False)
        if length >= 0:
            return buffer.raw[:length]
        buffer = ctypes.create_string_buffer(-length)
    return b""


class Answer:
    """One answer: iterate for its text, piece by piece.

    Attributes
    ----------
    tokens : list of int
        Generated so far, the end-of-generation token not included.
    text : str
        What was yielded so far.
    """

    def __init__(self, llm: Llama, prompt: Sequence[int], sampling: Sampling, limit: int | None = None) -> None:
        """Check that there is room.

        Raises
        ------
        ArgumentError
            if the prompt fills the context.
        """
        room = llm.n_ctx() - len(prompt)
        if room < 1:
            raise errors.ArgumentError(
                f"the prompt has {len(prompt)} tokens, the context {llm.n_ctx()}; shorten it or raise --ctx"
            )
        self._llm, self._prompt, self._sampling = llm, prompt, sampling
        self._limit = room if limit is None else min(limit, room)
        self.tokens: list[int] = []
        self.text = ""

    def pieces(self, stop: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """Yield text as it comes, whole characters only, until the end, the limit, or `stop()` says so.

        Raises
        ------
        DecodeError
            when llama.cpp or the engine fail.
        """
        for text, _ in self.spans(stop):
            yield text

    def spans(self, stop: Callable[[], bool] = lambda: False) -> Iterator[tuple[str, bool]]:
        """Yield what `pieces` does, and of each whether its token is an accepted draft or the verifier's own.

        A character of several tokens counts as the one's that completes it.

        Raises
        ------
        DecodeError
            when llama.cpp or the engine fail.
        """
        characters = codecs.getincrementaldecoder("utf-8")("replace")
        generator = self._llm.generate(self._prompt, **asdict(self._sampling))
        try:
            for token in generator:
                if end_of_generation(self._llm, token):
                    return
                self.tokens.append(token)
                text = characters.decode(piece(self._llm, token))
                self.text += text
                if text:
                    yield text, self._llm._stats.from_draft[-1]
                if len(self.tokens) >= self._limit or stop():
                    return
        finally:
            generator.close()

    def statistics(self) -> str:
        """One line for people about this answer."""
        return self._llm._stats.line()

    def live_statistics(self) -> str:
        """Return a short line about it while it is still being made."""
        return self._llm._stats.live()
