"""The model as the server runs it: one job at a time, which can be stopped and is counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from twofold import errors
from twofold.decoder import end_of_generation
from twofold.llama import Llama
from twofold.server import toolcalls
from twofold.server.logprobs import Recorder
from twofold.stats import Stats


class TooLongError(errors.ArgumentError):
    """Prompt and answer together have more tokens than allowed."""


def too_long(limit: int, prompt: int, answer: int) -> str:
    """Say that `prompt` and `answer` tokens are more than `limit`."""
    return (
        f"this model's maximum context length is {limit} tokens, however you requested {prompt + answer} tokens "
        f"({prompt} in the prompt, {answer} for the completion); please reduce the prompt or max_tokens"
    )


class _Stopped(Exception):
    """The job was stopped while its prompt was decoded."""


@dataclass
class Job:
    """One request: what it may do, and what it did.

    Attributes
    ----------
    draft_tokens
        instead of the model's own, or None.
    max_tokens
        of the answer as asked for, or None: as many as fit.
    prompt_tokens, cached_tokens, tokens
        of the prompt; of them found in the cache; of the answer, without the one that ends it.
    calls
        statistics of the calls of the model, more than one where tools are chosen from.
    error
        what went wrong, however llama_cpp.server reports it.
    """

    draft_tokens: int | None = None
    max_tokens: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    calls: list[Stats] = field(default_factory=list)
    error: BaseException | None = None
    first_token: float | None = None
    _stop: threading.Event = field(default_factory=threading.Event)

    def stop(self) -> None:
        """End the answer at the next token, or the prompt after the batch being decoded."""
        self._stop.set()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stop.is_set()

    def sums(self) -> dict[str, int]:
        """Drafted and accepted tokens of all calls."""
        return {
            "drafted": sum(sum(call.drafted_by_position) for call in self.calls),
            "accepted": sum(sum(call.agreed_by_position) for call in self.calls),
        }

    def usage(self) -> dict[str, Any]:
        """``usage`` as OpenAI's schema has it; rejected are the drafts that were not accepted."""
        sums = self.sums()
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": self.prompt_tokens + self.tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": sums["accepted"],
                "rejected_prediction_tokens": sums["drafted"] - sums["accepted"],
            },
        }


class ServedLlama(Llama):
    """A model that works on one `Job` at a time.

    Log-probabilities need no `logits_all` here: they are taken as the tokens are made.
    """

    _job: Job | None = None
    _recorder: Recorder | None = None
    _running_generator: Generator[int, Sequence[int] | None, None] | None = None
    max_length: int
    _made: list[int]  # tokens of the call
    _cut: bool = False  # whether `generate` ended it, not its caller

    def serve(self, max_length: int | None, handler: Callable[..., Any]) -> None:
        """Prepare for jobs.

        Parameters
        ----------
        max_length
            most tokens of prompt and answer together; None: the context.
        handler
            answers chats.
        """
        self.max_length = min(max_length or self.n_ctx(), self.n_ctx())
        self._default_draft = self.draft_tokens

        def chat(**request: Any) -> Any:
            try:
                return toolcalls.answer(handler, self, request)
            except Exception as error:
                self._failed(error)
                raise

        self.chat_handler = chat

    def begin(self, job: Job) -> None:
        """Start working for a job."""
        self._job = job
        self.draft_tokens = self._default_draft if job.draft_tokens is None else job.draft_tokens

    def end(self) -> None:
        """Leave the job, with the cache in order."""
        if self._running_generator is not None:
            self._running_generator.close()
        self._running_generator = self._recorder = self._job = None
        self.draft_tokens = self._default_draft

    def _failed(self, error: BaseException) -> None:
        if self._job is not None and self._job.error is None:
            self._job.error = error

    def create_completion(self, prompt: Any, *, logprobs: int | None = None, **settings: Any) -> Any:
        """Complete a prompt, as llama_cpp.Llama.create_completion does."""
        self._recorder = recorder = None if logprobs is None else Recorder(self, logprobs, prompt)
        try:
            made = super().create_completion(prompt, **settings)
        except Exception as error:
            self._failed(error)
            raise
        if settings.get("stream"):
            return made if recorder is None else recorder.stream(made)
        choice = made["choices"][0]
        if self._cut:  # llama_cpp has the text only of answers that it ended itself
            begun = prompt if settings.get("echo") else ""
            choice["text"] = begun + self.detokenize(self._made).decode("utf-8", "ignore")
        if recorder is not None:
            choice["logprobs"] = recorder.take(len(choice["text"].encode()), choice["finish_reason"])
        return made

    def generate(self, tokens: Sequence[int], **settings: Any) -> Iterator[int]:  # type: ignore[override]
        """Yield tokens as `Llama.generate` does, until the job is stopped or has no room left."""
        job = self._job
        if job is None:
            yield from super().generate(tokens, **settings)
            return
        if not job.calls and len(tokens) + (job.max_tokens or 1) > self.max_length:
            job.error = TooLongError(too_long(self.max_length, len(tokens), job.max_tokens or 1))
            raise job.error
        generator = self._running_generator = super().generate(tokens, **settings)
        try:
            yield from self._counted(generator, job, self.max_length - len(tokens))
        except _Stopped:
            return
        except Exception as error:
            self._failed(error)
            raise
        finally:
            generator.close()
            if not job.calls:
                job.prompt_tokens = len(tokens)
                job.cached_tokens = max(0, len(tokens) - self._stats.prompt_tokens)
            job.calls.append(self._stats)

    def _counted(self, generator: Iterator[int], job: Job, room: int) -> Iterator[int]:
        self._made, self._cut = [], False
        for token in generator:
            job.first_token = job.first_token or time.perf_counter()
            if not end_of_generation(self, token):
                job.tokens += 1
                self._made.append(token)
                if self._recorder is not None:
                    self._recorder.add(token, self._decoder.logits(self._row))
            yield token
            room -= 1
            if room <= 0 or job.stopped:
                self._cut = True
                return

    def _remember_batch(self, batch: Sequence[int], position: int) -> None:
        super()._remember_batch(batch, position)
        if self._job is not None and self._job.stopped:
            raise _Stopped
