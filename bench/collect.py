"""Run prompts through a server and record how long the answers became, as numbers.

Writes one JSON line for each answer: the features that the predictor would see and the
length. No text is written.
"""

import argparse
import asyncio
import contextlib
import random
import sys
from pathlib import Path
from typing import Any

import msgspec
import openai

from bench import lengths, servers
from engine import demo_model
from predictor.progress import Classes, classes_of


def main(argv: list[str]) -> int:
    """``python -m bench collect``."""
    parser = argparse.ArgumentParser(prog="python -m bench collect", description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with a prompt each")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, .gz for gzip")
    parser.add_argument("--url", default=None, help="a running server (default: start one)")
    parser.add_argument("--model", default="demo", help="of the server started here")
    parser.add_argument("--name", default=None, help="recorded as the source (default: --model)")
    parser.add_argument(
        "--tokenizer",
        default=None,
        help="the model's folder or name, to note what answers look like while they grow "
        "(default: --model, unless there is a --url)",
    )
    parser.add_argument("--max-tokens", type=int, default=1024, help="(default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="(default: %(default)s)")
    parser.add_argument("--limit", type=int, default=None, help="prompts, at most")
    parser.add_argument("--running", type=int, default=32, help="at a time (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the order and of sampling")
    args = parser.parse_args(argv)
    try:
        prompts = lengths.read_prompts(args.prompts)
    except (OSError, ValueError) as error:
        print(f"collect: {error}", file=sys.stderr)
        return 2
    random.Random(args.seed).shuffle(prompts)
    prompts = prompts[: args.limit]
    classes = _classes(args)
    flags = ["--max-running-requests", str(args.running)]
    with contextlib.ExitStack() as stack:
        url = args.url or stack.enter_context(servers.server("fcfs", flags, args.model))
        samples = asyncio.run(_collect(args, url, prompts, classes))
    lengths.write(args.out, samples)
    cut = sum(sample.is_cut for sample in samples)
    print(f"{len(samples)} of {len(prompts)} answers, {cut} cut at their limit: {args.out}")
    return 0 if samples else 1


def _classes(args: argparse.Namespace) -> Classes | None:
    name = args.tokenizer or (None if args.url else args.model)
    if name is None:
        return None
    from transformers import AutoTokenizer

    path = demo_model.prepare(print) if name == "demo" else name
    return classes_of(AutoTokenizer.from_pretrained(path).get_vocab())


async def _collect(
    args: argparse.Namespace, url: str, prompts: list[dict[str, Any]], classes: Classes | None
) -> list[lengths.Sample]:
    places = asyncio.Semaphore(args.running)
    samples: list[lengths.Sample] = []

    async def one(client: openai.AsyncOpenAI, row: dict[str, Any]) -> None:
        body = lengths.chat_body(row["prompt"], args.max_tokens, args.temperature)
        async with places:
            try:
                answer = await client.chat.completions.create(
                    **body, seed=args.seed, extra_body={"return_token_ids": classes is not None}
                )
            except openai.APIError as error:
                print(f"left out: {error}", file=sys.stderr)
                return
        if answer.usage is None:
            return
        sample = lengths.chat_sample(
            args.name or args.model,
            str(row.get("category", "")),
            body,
            answer.usage.prompt_tokens,
            answer.usage.completion_tokens,
            answer.choices[0].finish_reason or "",
        )
        ids = (answer.choices[0].model_extra or {}).get("response_token_ids")
        if classes is not None and ids:
            progress = lengths.progress_of(ids, classes)
            sample = msgspec.structs.replace(sample, progress=progress)
        samples.append(sample)
        if len(samples) % 50 == 0:
            lengths.write(args.out, samples)
            print(f"{len(samples)}/{len(prompts)}", flush=True)

    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=3600
    ) as client:
        await asyncio.gather(*(one(client, row) for row in prompts))
    return samples
