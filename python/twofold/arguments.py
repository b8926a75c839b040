"""The arguments of the `twofold` command and of its subcommands."""

from __future__ import annotations

import argparse

import twofold
from twofold import commands, conversation, device_arguments, measure_arguments, plan_command
from twofold.argument_types import Parsers, add_pair, command, number
from twofold.loop import MAX_DRAFT
from twofold.merge import FILE_TYPES
from twofold.server import run as server
from twofold.terminal import AUTO, NEVER, WHEN
from twofold.whole import TYPES as WHOLE_TYPES


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; the function that runs the command is in ``run``."""
    top = argparse.ArgumentParser(
        prog="twofold",
        description="Run a language model as a base that drafts and a residual that completes it.",
        epilog="example: twofold convert model.Q8_0.gguf model && twofold generate model.base.gguf -p 'Hello'",
    )
    top.add_argument("--version", action="version", version=f"twofold {twofold.__version__}")
    parsers = top.add_subparsers(metavar="COMMAND", required=True)
    for add in (
        _add_convert,
        _add_calibrate,
        _add_inspect,
        _add_generate,
        _add_chat,
        _add_serve,
        _add_merge,
        measure_arguments.add_eval,
        _add_info,
        measure_arguments.add_accept,
        measure_arguments.add_bench,
        _add_plugin,
    ):
        add(parsers)
    about = "predict tokens a second of ways to run a model on a machine, and say which to take"
    example = "model.Q8_0.gguf --vram 12GiB --vram-bandwidth 500GB/s --pcie 25GB/s"
    plan_command.add_arguments(command(parsers, "plan", plan_command.run, about, example))
    return top


def _draft(text: str) -> int | str:
    return text if text == "auto" else int(number(int, 0, MAX_DRAFT)(text))


def _add_convert(parsers: Parsers) -> None:
    about = "convert a GGUF model into NAME.base.gguf and NAME.residual.gguf"
    parser = command(parsers, "convert", commands.convert, about, "model.Q8_0.gguf model --residual-bits 6")
    parser.add_argument(
        "source", metavar="SRC", help="GGUF file (first part of a split one), or hf://ORG/REPO/FILE.gguf"
    )
    parser.add_argument("name", metavar="NAME", help="path of the pair, without the endings")
    parser.add_argument("--base", default="auto", metavar="TYPE", help="ggml type of the base (default: auto: q2_k)")
    add = parser.add_argument
    calibration = (
        "of twofold calibrate, or an importance matrix in GGUF; auto: NAME.calibration.gguf, made now if need be"
    )
    add("--calibration", "--imatrix", metavar="FILE", help=calibration)
    bpw = "choose types for each matrix within so many bits a weight, by the calibration's sensitivities"
    add("--base-bpw", type=number(float, 1), metavar="BITS", help=bpw)
    add("--base-types", metavar="T,T,...", help="types that --base-bpw chooses from (default: q2_k to q8_0)")
    whole = "layers (0-3,27) or a regex on tensor names: kept whole in the base, without a residual"
    add("--whole", metavar="LAYERS|REGEX", help=whole)
    kinds = "of whole tensors: q8_0 (the source's, if that has fewer bits) or the source's (default: q8_0)"
    add("--whole-type", choices=WHOLE_TYPES, default="q8_0", help=kinds)
    vram = "choose types and whole layers to fill so much VRAM (12GiB): base, cache of --ctx tokens and --reserve"
    plan_command.add_machine(parser, vram)
    add("--no-feedback", action="store_true", help="round without error feedback, by importance alone")
    bits = "bits of the residual that are written; fewer can be used later (default: 8)"
    parser.add_argument("--residual-bits", type=int, choices=(4, 6, 8), default=8, help=bits)
    parser.add_argument("--group", type=int, default=128, metavar="N", help="weights that share a scale (default: 128)")
    parser.add_argument("--threads", type=number(int, 1), metavar="N", help="default: one for each CPU")
    _add_writing(parser)
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def _add_writing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="replace files that are there")
    parser.add_argument("--progress", action="store_true", help="show the progress bar even if stderr is no terminal")


def _add_calibrate(parsers: Parsers) -> None:
    about = "run a model over texts and note what its matrices are multiplied by, for twofold convert --calibration"
    example = "model.Q8_0.gguf calib.gguf --text mine.txt"
    parser = command(parsers, "calibrate", commands.calibrate, about, example)
    add = parser.add_argument
    add("source", metavar="SRC", help="model in GGUF, best the one to be converted, or hf://ORG/REPO/FILE.gguf")
    add("out", metavar="OUT", help="file to write: an importance matrix that llama.cpp reads too, and more")
    add("--text", nargs="+", metavar="FILE", default=[], help="texts in UTF-8 (default: those of the package)")
    add("--tokens", type=number(int, 32), default=16384, metavar="N", help="most tokens of them (default: 16384)")
    add("--chunk", type=number(int, 32), default=512, metavar="N", help="tokens decoded together (default: 512)")
    add("--no-moments", action="store_true", help="importance alone: a small file, no error feedback")
    add("--sensitivity", action="store_true", help="measure sensitivities, which --base-bpw goes by (minutes)")
    add("--gpu-layers", type=number(int, -1), default=0, metavar="N", help="layers in VRAM (default: 0; -1: all)")
    add("--threads", type=number(int, 1), metavar="N", help="default: one for each core")
    _add_writing(parser)


def _add_inspect(parsers: Parsers) -> None:
    about = "show what is in a pair"
    parser = command(parsers, "inspect", commands.inspect, about, "model.base.gguf --tensors")
    add_pair(parser)
    parser.add_argument("--tensors", action="store_true", help="list every tensor too")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_generate(parsers: Parsers) -> None:
    about = "continue a prompt"
    parser = command(parsers, "generate", conversation.generate, about, "model.base.gguf -p 'Tell a story.' -n 200")
    _add_model(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("-p", "--prompt", metavar="PROMPT", help="the prompt; - reads it from standard input")
    prompt.add_argument("-f", "--file", metavar="FILE", help="file with the prompt")
    parser.add_argument("-n", "--tokens", type=number(int, 1), default=128, help="most tokens (default: 128)")
    parser.add_argument("--raw", action="store_true", help="do not put the prompt into the model's chat template")
    stats = "show rate and acceptance while generating, on standard error if it is a terminal"
    parser.add_argument("--stats", action="store_true", help=stats)
    parser.add_argument("--json", action="store_true", help="print text, tokens and stats as one JSON document")


def _add_chat(parsers: Parsers) -> None:
    about = "talk with the model; /reset starts anew, /quit or Ctrl-D ends, Ctrl-C stops an answer"
    parser = command(parsers, "chat", conversation.chat, about, "model.base.gguf --system 'Be brief.' --temp 0.7")
    _add_model(parser)
    parser.add_argument("-n", "--tokens", type=number(int, 1), help="most tokens of an answer (default: no limit)")
    parser.add_argument("--stats", action="store_true", help="print a line of statistics after each answer")


def _add_serve(parsers: Parsers) -> None:
    about = "answer OpenAI's API over HTTP (needs twofold[server])"
    parser = command(parsers, "serve", server.serve, about, "model.base.gguf --port 8080")
    _add_loading(parser)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1: this machine alone)")
    add("--port", type=number(int, 0, 65535), default=8080, help="0: any free one (default: 8080)")
    add("--api-key", metavar="KEY", help="that requests must carry (default: $TWOFOLD_API_KEY, or none)")
    add("--alias", metavar="NAME", help="name of the model in /v1/models (default: NAME of NAME.base.gguf)")
    template = "llama_cpp's format of chats, as chatml-function-calling (default: the model's own template)"
    add("--chat-format", metavar="NAME", help=template)
    length = "most tokens of prompt and answer together (default: the context)"
    add("--max-length", type=number(int, 2), metavar="N", help=length)
    add("--max-body", type=number(int, 1), default=4 << 20, metavar="BYTES", help="of a request (default: 4 MiB)")
    add("--queue", type=number(int, 0), default=32, metavar="N", help="requests that may wait (default: 32)")
    add("--grace", type=number(float, 0), default=30, metavar="S", help="seconds for answers on SIGTERM (default: 30)")
    batch = "tokens of a prompt decoded at once; clients that leave are noticed in between (default: 512)"
    add("--batch", type=number(int, 1), default=512, metavar="N", help=batch)


def _add_loading(parser: argparse.ArgumentParser) -> None:
    add_pair(parser)
    add = parser.add_argument
    draft = "tokens drafted before each check, 0 to 32; auto: as far as it pays (default)"
    add("--draft", type=_draft, default="auto", metavar="N|auto", help=draft)
    drafter = "guesses for the base to check: ngram (the text so far, default), none, or a GGUF of the same vocabulary"
    add("--drafter", default="ngram", metavar="ngram|none|FILE", help=drafter)
    add("--residual-bits", type=int, choices=(0, 4, 6, 8), help="bits verified with; 0: base alone (default: all)")
    add("--ctx", type=number(int, 0), default=4096, help="tokens of context; 0: the model's own (default: 4096)")
    add("--threads", type=number(int, 1), metavar="N", help="default: one for each core")
    device_arguments.add_arguments(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    _add_loading(parser)
    add = parser.add_argument
    add("--temp", type=number(float, 0), default=0.0, help="temperature (default: 0: greedy, the likeliest token)")
    add("--top-k", type=number(int, 0), default=40, help="sample from the K likeliest; 0: all (default: 40)")
    add("--top-p", type=number(float, 0, 1), default=0.95, help="sample from this share (default: 0.95)")
    add("--min-p", type=number(float, 0, 1), default=0.05, help="least share of the likeliest's (default: 0.05)")
    add("--repeat-penalty", type=number(float, 0), default=1.0, help="1: none (default)")
    add("--seed", type=number(int, 0, 2**32 - 1), help="of the sampler (default: random)")
    add("--system", metavar="TEXT", help="system message")
    colour = "paint accepted drafts and the full model's own tokens; auto (if no value): only where a terminal shows it"
    add("--colour", "--color", nargs="?", choices=WHEN, const=AUTO, default=NEVER, help=colour)


def _add_merge(parsers: Parsers) -> None:
    about = "add the residual to the base for good, as one ordinary GGUF file"
    parser = command(parsers, "merge", commands.merge, about, "model.base.gguf model.f16.gguf --type f16")
    add_pair(parser)
    parser.add_argument("out", metavar="OUT", help="file to write")
    parser.add_argument("--type", choices=tuple(FILE_TYPES), default="f16", help="of the merged tensors (default: f16)")
    parser.add_argument("--residual-bits", type=int, choices=(4, 6, 8), help="bits to merge (default: all in the file)")
    _add_writing(parser)


def _add_info(parsers: Parsers) -> None:
    about = "show versions, CPU, kernels and devices, and where the parts of a pair would lie"
    parser = command(parsers, "info", commands.info, about, "model.base.gguf")
    parser.add_argument("base", metavar="BASE", nargs="?", help="NAME.base.gguf: load it and say where every part lies")
    parser.add_argument("--residual", metavar="PATH", help="default: NAME.residual.gguf beside the base")
    parser.add_argument("--ctx", type=number(int, 0), default=4096, help="tokens of context (default: 4096)")
    device_arguments.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_plugin(parsers: Parsers) -> None:
    about = "show the plugin for stock llama.cpp programs, and the line to run one with it"
    parser = command(parsers, "plugin", commands.show_plugin, about, "--residual model.residual.gguf")
    parser.add_argument("--path", action="store_true", help="print the plugin's path only, for GGML_BACKEND_PATH")
    parser.add_argument("--residual", metavar="FILE", help="name this residual and its base in the line")
