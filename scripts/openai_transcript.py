#!/usr/bin/env python3
"""Talk to `twofold serve` with the openai client and print what was sent and answered, as Markdown.

Starts a server for the pair, runs the pieces of code below against it just as they are printed, and ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai

KEY = "secret"
STEPS: list[tuple[str, str]] = [
    (
        "Chat, and what `usage` says about drafts",
        """
rivers = [{"role": "user", "content": "Name three rivers."}]
done = client.chat.completions.create(model="any", messages=rivers, max_tokens=48, temperature=0)
print(done.choices[0].message.content)
print(done.usage.to_json())
""",
    ),
    (
        "The same, streamed, without drafts: the same text",
        """
stream = client.chat.completions.create(
    model="any", messages=rivers, max_tokens=48, temperature=0,
    stream=True, stream_options={"include_usage": True}, extra_body={"draft_tokens": 0},
)
text, chunks = "", 0
for chunk in stream:
    if chunk.choices:
        text, chunks = text + (chunk.choices[0].delta.content or ""), chunks + 1
print(chunks, "chunks; the same text:", text == done.choices[0].message.content)
print(chunk.usage.completion_tokens_details)
""",
    ),
    (
        "Sampled with a seed, drafts or none",
        """
options = {"model": "any", "prompt": "The sea was", "max_tokens": 16, "temperature": 0.8, "seed": 7}
for draft in (0, 4):
    sampled = client.completions.create(**options, extra_body={"draft_tokens": draft})
    details = sampled.usage.completion_tokens_details
    print(repr(sampled.choices[0].text), "accepted drafts:", details.accepted_prediction_tokens)
""",
    ),
    (
        "JSON by a schema",
        """
schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "length_km": {"type": "integer"}},
    "required": ["name", "length_km"],
    "additionalProperties": False,
}
done = client.chat.completions.create(
    model="any", messages=[{"role": "user", "content": "Describe a river as JSON."}], max_tokens=60, seed=1,
    response_format={"type": "json_schema", "json_schema": {"name": "river", "strict": True, "schema": schema}},
)
print(done.choices[0].message.content)
""",
    ),
    (
        "A tool",
        """
parameters = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
tool = {"type": "function", "function": {"name": "find_river", "parameters": parameters}}
done = client.chat.completions.create(
    model="any", messages=[{"role": "user", "content": "Look up the Rhine."}], max_tokens=60, seed=1,
    tools=[tool], tool_choice={"type": "function", "function": {"name": "find_river"}},
)
call = done.choices[0].message.tool_calls[0]
print(done.choices[0].finish_reason, call.function.name, call.function.arguments)
""",
    ),
    (
        "Log-probabilities",
        """
done = client.chat.completions.create(
    model="any", messages=rivers, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2
)
for token in done.choices[0].logprobs.content:
    print(repr(token.token), [(top.token, round(top.logprob, 3)) for top in token.top_logprobs])
""",
    ),
    (
        "Errors",
        """
try:
    client.chat.completions.create(model="any", messages=rivers, n=2)
except openai.BadRequestError as error:
    print(error.status_code, error.body["message"])
try:
    client.with_options(api_key="wrong").models.list()
except openai.AuthenticationError as error:
    print(error.status_code, error.body["message"])
""",
    ),
]


@contextlib.contextmanager
def served(pair: Path, draft: str) -> Iterator[int]:
    """Run a server; yield its port."""
    command = [sys.executable, "-m", "twofold", "serve", str(pair), "--port", "0", "--draft", draft, "--ctx", "2048"]
    environment = {**os.environ, "TWOFOLD_API_KEY": KEY}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr
    try:
        said = ""
        for line in process.stderr:
            said += line
            if "is ready" in line:
                break
        found = re.search(r"http://[\d.]+:(\d+)", said)
        if not found or "is ready" not in said:
            raise SystemExit(f"the server did not start:\n{said}")
        yield int(found[1])
    finally:
        process.terminate()
        process.communicate()


def transcript(port: int) -> str:
    """Run all steps in one namespace; return code and output."""
    opening = 'client = OpenAI(base_url="http://127.0.0.1:8080/v1", api_key="secret")'
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)
    names = {"client": client, "openai": openai}
    parts = [f"```python\nimport openai\nfrom openai import OpenAI\n\n{opening}\n```"]
    for title, code in STEPS:
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            exec(code, names)  # the very text that is printed
        parts.append(f"{title}:\n\n```python\n{code.strip()}\n```\n```\n{shown.getvalue().strip()}\n```")
    return "\n\n".join(parts)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, metavar="NAME.base.gguf")
    parser.add_argument("--draft", default="4", metavar="K", help="as for twofold serve (default: 4)")
    args = parser.parse_args()
    with served(args.base, args.draft) as port:
        print(transcript(port))


if __name__ == "__main__":
    main()
